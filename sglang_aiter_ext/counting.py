"""Counts of the calls that capabilities looked after."""

import os
import threading

from . import logs, settings

_counts: dict[tuple[str, str, str], int] = {}
_lock = threading.Lock()


def compiling() -> bool:
    """Whether torch.compile is tracing the caller; `torch.compiler.is_compiling` once torch is imported."""
    return False


def count(capability: str, outcome: str, reason: str = "") -> None:
    """Count one call. It raises only under SGLANG_AITER_EXT_STRICT=1: an answer is worth more than its count."""
    if compiling():
        # Compiled code counts nothing, as a replayed graph does not: a lock would break the graph at every layer.
        return
    key = (capability, outcome, reason)
    try:
        with _lock:
            _counts[key] = _counts.get(key, 0) + 1
    except Exception as error:
        if settings.strict():
            raise
        logs.once("sglang_aiter_ext", "counter", "calls are not counted: %s: %s", type(error).__name__, error)


def totals() -> dict[tuple[str, str, str], int]:
    """(capability, outcome, reason) -> number of calls."""
    with _lock:
        return dict(_counts)


def snapshot() -> dict[str, dict[str, int]]:
    """See `sglang_aiter_ext.counters`."""
    result: dict[str, dict[str, int]] = {}
    for (capability, outcome, reason), number in totals().items():
        result.setdefault(capability, {})[f"{outcome}/{reason}" if reason else outcome] = number
    return result


def _forked() -> None:
    # A thread of the parent's may have held the lock.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)
