"""What a process does, where others can read it: a state file, Prometheus counters, SGLang's log.

A daemon thread brings them up to date once a second, so that no call of SGLang's pays for it. It
runs where SGLANG_AITER_EXT_STATE_DIR or SGLang's `--enable-metrics` asks for it, else only until
the lines of import time are logged.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import functools
import json
import logging
import os
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from . import __version__, activation, counting, installed, settings

SECONDS = 1.0
#: A process that sets up no logging gets its lines after this time.
PATIENCE_SECONDS = 60.0
HELP = (
    "Calls of SGLang that a capability looked after, by outcome and reason. Replays of a CUDA graph do not pass"
    " through Python: decode_pa counts each full-attention layer of a capture (outcome capture) and of an eager step"
    " (outcome decode), and no replayed step."
)


#: Of what `status()` says of a capability.
KEPT = ("state", "enabled", "verdict", "reason", "error")


class Sink(Protocol):
    """Somewhere to publish to. What it raises is logged once, and ends it."""

    def publish(self) -> None: ...

    def close(self) -> None: ...


class StateFile:
    """One JSON file in `folder`, locked for as long as the process lives. Raises OSError where it cannot be."""

    def __init__(self, folder: str):
        self.began = time.time()
        self.last: dict[str, Any] = {}
        os.makedirs(folder, exist_ok=True)
        prefix = f"{os.uname().nodename}-{os.getpid()}-"
        for old in pathlib.Path(folder).glob(prefix + "*.json"):
            # A process of the same number that was killed.
            with contextlib.suppress(OSError):
                if not is_alive(old):
                    old.unlink()
        self.descriptor, self.path = tempfile.mkstemp(".json", prefix, folder)
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.fchmod(self.descriptor, 0o644)
            self.publish()
        except Exception:
            self.close()
            raise

    def publish(self) -> None:
        if os.fstat(self.descriptor).st_nlink == 0:
            raise FileNotFoundError(f"{self.path} was removed")
        state = record(self.began)
        if state != self.last:
            data = json.dumps({**state, "written": time.time()}).encode()
            if os.pwrite(self.descriptor, data, 0) < len(data):
                raise OSError(errno.ENOSPC, "the state was written in part", self.path)
            os.ftruncate(self.descriptor, len(data))
            self.last = state

    def close(self) -> None:
        os.close(self.descriptor)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.path)


class Metrics:
    """Counters for SGLang's /metrics, in prometheus_client's multiprocess mode. Raises ImportError without it."""

    def __init__(self) -> None:
        # Chooses its mode at its first import: PROMETHEUS_MULTIPROC_DIR is set by now.
        from prometheus_client import Counter

        self.counter = Counter("sglang_aiter_ext_calls", HELP, ["capability", "outcome", "reason"])
        self.sent: dict[tuple[str, str, str], int] = {}

    def publish(self) -> None:
        for key, number in counting.totals().items():
            self.counter.labels(*key).inc(number - self.sent.get(key, 0))
            self.sent[key] = number

    def close(self) -> None:
        self.publish()


_sinks: list[Sink] | None = None


def begin() -> None:
    """Publish this process from now on; a second call changes nothing.

    Under SGLANG_AITER_EXT_STRICT=1 raises CouldNotApply where it cannot; else that is logged.
    """
    global _sinks
    if _sinks is not None:
        return
    on = settings.is_on(settings.MASTER)
    wanted: list[tuple[str, Callable[[], Sink]]] = []
    # What is wrong with the variable itself is said where a target is imported.
    with contextlib.suppress(settings.SettingError):
        if on and (folder := settings.state_folder()):
            wanted.append((f"{settings.STATE.name}={folder}", functools.partial(StateFile, folder)))
    if on and os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        wanted.append(("sglang_aiter_ext counters on /metrics", Metrics))
    sinks: list[Sink] = []
    for what, make in wanted:
        try:
            sinks.append(make())
        except Exception as error:
            message = f"{what} cannot be served: {error}"
            if settings.strict():
                raise activation.CouldNotApply(message) from error
            counting.log_when_set_up(logging.WARNING, message)
    _sinks = sinks
    atexit.register(end)
    os.register_at_fork(after_in_child=_forked)
    if sinks or counting.holding():
        threading.Thread(target=_run, args=(sinks,), name="sglang_aiter_ext", daemon=True).start()


def _run(sinks: list[Sink]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while sinks or counting.holding():
        # A tick before: logging.basicConfig adds its handler first and sets the level after.
        ready = counting.set_up() or time.monotonic() > deadline
        time.sleep(SECONDS)
        for sink in list(sinks):
            try:
                sink.publish()
            except Exception as error:
                sinks.remove(sink)
                with contextlib.suppress(Exception):
                    # A file that no longer changes would be taken for the truth.
                    sink.close()
                what = type(sink).__name__
                counting.log_once(what, "", "no longer kept: %s: %s", type(error).__name__, error)
        if ready:
            counting.release()


def end() -> None:
    """At exit: what waits is logged, the last counts are sent, and no file is left."""
    counting.release()
    while _sinks:
        # Out of the thread's sight first: it may be about to publish.
        with contextlib.suppress(Exception):
            _sinks.pop().close()


def _forked() -> None:
    """SGLang spawns its processes; one that is forked publishes nothing, and leaves its parent's file alone."""
    for sink in _sinks or ():
        if isinstance(sink, StateFile):
            os.close(sink.descriptor)
    if _sinks:
        _sinks.clear()


def record(began: float) -> dict[str, Any]:
    """What the state file holds; `began` is in seconds since 1970."""
    release = installed.release()
    return {
        "pid": os.getpid(),
        "host": os.uname().nodename,
        "role": role(),
        "began": began,
        "extension": __version__,
        "sglang": release.version if release is not None else None,
        "capabilities": {row["name"]: {key: row[key] for key in KEPT} for row in activation.status()},
        "counters": counting.snapshot(),
    }


def role() -> str:
    """SGLang's title of this process, such as `scheduler_TP0`; without one the program's name."""
    try:
        title = pathlib.Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        title = ""
    if title.startswith("sglang::"):
        return title.removeprefix("sglang::")
    return pathlib.Path(sys.argv[0] if sys.argv else "").stem or "python"


def is_alive(path: pathlib.Path) -> bool:
    """Whether the process that keeps this state file still has it locked. Raises OSError where it cannot be read."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def read(folder: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The state of every process that has a file in `folder`, each with `alive` and `file`, the oldest first.

    Then a line for each file that cannot be read or is not one of ours. Raises FileNotFoundError,
    NotADirectoryError or PermissionError for the folder.
    """
    found, skipped = [], []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if not entry.name.endswith(".json") or not entry.is_file():
            continue
        try:
            text = pathlib.Path(entry.path).read_text()
            found.append({**_parsed(text), "alive": is_alive(pathlib.Path(entry.path)), "file": entry.path})
        except FileNotFoundError:
            # Its process has just ended.
            continue
        except OSError as error:
            skipped.append(f"{printable(entry.path)} cannot be read: {error.strerror}")
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
            skipped.append(f"{printable(entry.path)} is not a state file of this package's")
    return sorted(found, key=lambda state: state["began"]), skipped


def _parsed(text: str) -> dict[str, Any]:
    """What `record` wrote, each value of its type and printable."""
    # Between writing a shorter state and cutting the file there is a rest of the last one.
    state = json.JSONDecoder().raw_decode(text)[0]
    words = {key: printable(str(state[key])) for key in ("host", "role", "extension", "sglang")}
    capabilities = {
        printable(name): {key: c[key] if key == "enabled" or c[key] is None else printable(str(c[key])) for key in KEPT}
        for name, c in state["capabilities"].items()
    }
    counters = {
        printable(name): {printable(what): int(number) for what, number in counts.items()}
        for name, counts in state["counters"].items()
    }
    numbers = {"pid": int(state["pid"]), "began": float(state["began"]), "written": float(state["written"])}
    return {**numbers, **words, "capabilities": capabilities, "counters": counters}


def printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text)
