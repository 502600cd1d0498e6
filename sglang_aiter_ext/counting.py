"""Counts of what ran, and log lines that appear once."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import threading

from . import settings

#: A child of SGLang's, so that a logging configuration for `sglang` holds for it.
logger = logging.getLogger("sglang.aiter_ext")

_counts: dict[tuple[str, str, str], int] = {}
_logged: set[tuple[str, str]] = set()
_held: collections.deque[tuple[int, str]] = collections.deque()
_lock = threading.Lock()


def compiling() -> bool:
    """Whether torch.compile is tracing the caller; `torch.compiler.is_compiling` once torch is there."""
    return False


def count(capability: str, outcome: str, reason: str = "") -> None:
    """Raises nothing: an answer is worth more than its count, but under SGLANG_AITER_EXT_STRICT=1."""
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
        log_once("sglang_aiter_ext", "counter", "calls are not counted: %s: %s", type(error).__name__, error)


def say(level: int, message: str, *args: object) -> None:
    """Log, whatever a handler of the host program's makes of it."""
    with contextlib.suppress(Exception):
        logger.log(level, message, *args)


def log_once(capability: str, reason: str, message: str, *args: object, level: int = logging.WARNING) -> None:
    """Log `message` the first time this process sees (capability, reason)."""
    if not logged(capability, reason):
        _logged.add((capability, reason))
        release()
        say(level, f"%s: {message}", capability, *args)


def logged(capability: str, reason: str) -> bool:
    return (capability, reason) in _logged


def log_when_set_up(level: int, message: str) -> None:
    """Log a line of import time. SGLang sets its logging up after its imports: the line waits for that."""
    _held.append((level, message))
    if set_up():
        release()


def holding() -> bool:
    """Whether lines wait."""
    return bool(_held)


def set_up() -> bool:
    """Whether the lines that wait would be logged; a handler alone may be the host program's own."""
    return logger.hasHandlers() and all(logger.isEnabledFor(level) for level, _ in tuple(_held))


def release() -> None:
    """Log the lines that wait, whether logging is set up or not."""
    with contextlib.suppress(IndexError):
        while True:
            level, message = _held.popleft()
            say(level, "%s", message)


def snapshot() -> dict[str, dict[str, int]]:
    result: dict[str, dict[str, int]] = {}
    for (capability, outcome, reason), number in totals().items():
        result.setdefault(capability, {})[f"{outcome}/{reason}" if reason else outcome] = number
    return result


def totals() -> dict[tuple[str, str, str], int]:
    """(capability, outcome, reason) -> number of calls."""
    with _lock:
        return dict(_counts)


def _forked() -> None:
    """A thread of the parent's may have held the lock; the lines that wait are the parent's."""
    global _lock
    _lock = threading.Lock()
    _held.clear()


os.register_at_fork(after_in_child=_forked)
