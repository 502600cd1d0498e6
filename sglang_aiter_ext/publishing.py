"""What a process does, where others can read it: a state file, Prometheus counters and SGLang's log.

A daemon thread brings them up to date once a second, so that no call of SGLang's pays for it. It
runs where SGLANG_AITER_EXT_STATE_DIR or SGLang's `--enable-metrics` asks for it, and otherwise only
until the lines of import time are logged.
"""

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
from typing import Any

from . import activation, counting, logs, settings, source
from .errors import CouldNotApply, SettingError
from .names import VERSION

SECONDS = 1.0
#: A process that sets up no logging gets its lines after this time.
PATIENCE_SECONDS = 60.0
HELP = (
    "Calls of SGLang that a capability looked after, by outcome and reason. Replays of a CUDA graph do not pass"
    " through Python: decode_pa counts each full-attention layer of a capture (outcome capture) and of an eager step"
    " (outcome decode), and no replayed step."
)
#: Of what `status()` says of a capability.
KEPT = ("state", "enabled", "asked_for", "verdict", "reason", "error")


class StateFile:
    """One JSON file in `folder`, locked for as long as the process lives. Raises OSError where it cannot be kept."""

    def __init__(self, folder: str):
        self.began = time.time()
        self.last: dict[str, Any] = {}
        os.makedirs(folder, exist_ok=True)
        prefix = f"{os.uname().nodename}-{os.getpid()}-"
        for old in pathlib.Path(folder).glob(prefix + "*.json"):
            # It may belong to a process that had the same number and was killed.
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
    """Counters for SGLang's /metrics, in prometheus_client's multiprocess mode. Raises ImportError without that."""

    def __init__(self) -> None:
        # The library chooses its mode at its first import, and PROMETHEUS_MULTIPROC_DIR is set by now.
        from prometheus_client import Counter

        self.counter = Counter("sglang_aiter_ext_calls", HELP, ["capability", "outcome", "reason"])
        self.sent: dict[tuple[str, str, str], int] = {}

    def publish(self) -> None:
        for key, number in counting.totals().items():
            self.counter.labels(*key).inc(number - self.sent.get(key, 0))
            self.sent[key] = number

    def close(self) -> None:
        self.publish()


#: What is published to. Where one raises, that is logged once, and it is not used any more.
Sink = StateFile | Metrics
_sinks: list[Sink] = []
_begun: dict[str, object] = {}


def begin() -> None:
    """Publish this process from now on; a second call changes nothing.

    Under SGLANG_AITER_EXT_STRICT=1 it raises CouldNotApply where it cannot; otherwise it logs that.
    """
    # Of two threads one begins, and no lock is held while prometheus_client is imported: setdefault is atomic.
    mine = object()
    if _begun.setdefault("by", mine) is not mine:
        return
    on = settings.is_on(settings.MASTER)
    wanted: list[tuple[str, Callable[[], Sink]]] = []
    # A value that is not accepted is reported where a target is imported.
    with contextlib.suppress(SettingError):
        if on and (folder := settings.state_folder()):
            wanted.append((f"{settings.STATE.name}={folder}", functools.partial(StateFile, folder)))
    if on and os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        wanted.append(("sglang_aiter_ext counters on /metrics", Metrics))
    for what, make in wanted:
        try:
            _sinks.append(make())
        except Exception as error:
            message = f"{what} cannot be served: {error}"
            if settings.strict():
                end()
                _begun.clear()
                raise CouldNotApply(message) from error
            logs.when_configured(logging.WARNING, message)
    atexit.register(end)
    os.register_at_fork(after_in_child=_forked)
    if _sinks or logs.waiting():
        threading.Thread(target=_keep_current, name="sglang_aiter_ext", daemon=True).start()


def _keep_current() -> None:
    """What the thread does until nothing is left to do."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while _sinks or logs.waiting():
        # It is asked twice: logging.basicConfig adds its handler first and sets the level after.
        ready = logs.waiting() and logs.configured()
        time.sleep(SECONDS)
        for sink in list(_sinks):
            try:
                sink.publish()
            except Exception as error:
                if sink not in _sinks:
                    # It was closed at exit.
                    continue
                _sinks.remove(sink)
                with contextlib.suppress(Exception):
                    # A file that no longer changes would be taken for the truth.
                    sink.close()
                what = type(sink).__name__
                logs.once(what, "", "no longer kept: %s: %s", type(error).__name__, error)
        if ready and logs.configured() or time.monotonic() > deadline:
            logs.flush()


def end() -> None:
    """At exit, log the lines that wait, send the last counts and remove the file."""
    logs.flush()
    while _sinks:
        # The thread may be about to publish, so the sink is taken out of its sight first.
        with contextlib.suppress(Exception):
            _sinks.pop().close()


def _forked() -> None:
    """SGLang spawns its processes. One that is forked publishes nothing and leaves its parent's file alone."""
    for sink in _sinks:
        if isinstance(sink, StateFile):
            os.close(sink.descriptor)
    _sinks.clear()


def record(began: float) -> dict[str, Any]:
    """What the state file holds; `began` is in seconds since 1970."""
    release = source.installed()
    capabilities = {row["name"]: {key: row[key] for key in KEPT} for row in activation.status()}
    return {
        "pid": os.getpid(), "host": os.uname().nodename, "role": role(), "began": began, "extension": VERSION,
        "sglang": release and release.version, "capabilities": capabilities, "counters": counting.snapshot(),
    }  # fmt: skip


def role() -> str:
    """SGLang's title of this process, such as `scheduler_TP0`; where there is none, the program's name."""
    try:
        title = pathlib.Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        title = ""
    if title.startswith("sglang::"):
        return title[8:]
    return pathlib.Path(sys.argv[0] if sys.argv else "").stem or "python"


def is_alive(path: pathlib.Path) -> bool:
    """Whether the process that keeps this state file still has it locked. Raises OSError where it cannot be read."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
        except BlockingIOError:
            return True
