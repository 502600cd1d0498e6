"""Counts of what ran, and log lines that appear once."""

from __future__ import annotations

import logging
import threading

logger = logging.getLogger("sglang_aiter_ext")

_counts: dict[tuple[str, str, str], int] = {}
_logged: set[tuple[str, str]] = set()
_lock = threading.Lock()


def count(capability: str, outcome: str, reason: str = "") -> None:
    """Never raises: an answer is worth more than its count."""
    key = (capability, outcome, reason)
    try:
        with _lock:
            _counts[key] = _counts.get(key, 0) + 1
    except Exception as error:
        log_once("sglang_aiter_ext", "counter", "calls are not counted: %s: %s", type(error).__name__, error)


def say(level: int, message: str, *args: object) -> None:
    """Log, whatever a handler of the host program's makes of it."""
    try:
        logger.log(level, message, *args)
    except Exception:
        pass


def log_once(capability: str, reason: str, message: str, *args: object, level: int = logging.WARNING) -> None:
    """Log `message` the first time this process sees (capability, reason)."""
    if not logged(capability, reason):
        _logged.add((capability, reason))
        say(level, "%s: " + message, capability, *args)


def logged(capability: str, reason: str) -> bool:
    return (capability, reason) in _logged


def snapshot() -> dict[str, dict[str, int]]:
    result: dict[str, dict[str, int]] = {}
    for (capability, outcome, reason), number in list(_counts.items()):
        result.setdefault(capability, {})[f"{outcome}/{reason}" if reason else outcome] = number
    return result
