"""Log lines of this package: each reason once a process, and lines of import time once logging is configured."""

import collections
import contextlib
import logging
import os

#: A child of SGLang's logger, so that a logging configuration for `sglang` holds for it.
logger = logging.getLogger("sglang.aiter_ext")
_said: set[tuple[str, str]] = set()
_waiting: collections.deque[tuple[int, str]] = collections.deque()


def say(level: int, message: str, *args: object) -> None:
    """Log a line. An error of one of the host program's handlers stays here."""
    with contextlib.suppress(Exception):
        logger.log(level, message, *args)


def once(capability: str, reason: str, message: str, *args: object, level: int = logging.WARNING) -> None:
    """Log `message` the first time that this process sees (capability, reason)."""
    if not said(capability, reason):
        _said.add((capability, reason))
        flush()
        say(level, f"%s: {message}", capability, *args)


def said(capability: str, reason: str) -> bool:
    """Whether `once` has logged this reason."""
    return (capability, reason) in _said


def when_configured(level: int, message: str) -> None:
    """Log a line of import time. SGLang configures its logging after its imports, and the line waits for that."""
    _waiting.append((level, message))
    if configured():
        flush()


def waiting() -> bool:
    """Whether there are lines that wait."""
    return bool(_waiting)


def configured() -> bool:
    """Whether the lines that wait would be logged. A handler alone may be one of the host program's own."""
    return logger.hasHandlers() and all(logger.isEnabledFor(level) for level, _ in tuple(_waiting))


def flush() -> None:
    """Log the lines that wait, whether logging is configured or not."""
    with contextlib.suppress(IndexError):
        while True:
            level, message = _waiting.popleft()
            say(level, "%s", message)


# The lines that wait are the parent's to log.
os.register_at_fork(after_in_child=_waiting.clear)
