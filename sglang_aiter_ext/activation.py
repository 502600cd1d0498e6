"""Which capabilities act in this process, and what became of them."""

import contextlib
import dataclasses
import logging
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from . import aiter_installed, counting, gpu, logs, settings, source, wrapping
from .capabilities import CAPABILITIES
from .capability import APPLY, UNSUPPORTED, Capability, Verdict, Wrapper, short
from .errors import CouldNotApply, SettingError
from .names import VERSION


@dataclasses.dataclass
class State:
    """What became of one capability in this process; `broken` says that something stood in the way: nothing of it acts."""

    capability: Capability
    verdict: Verdict
    enabled: bool
    error: str | None = None
    broken: bool = False
    #: Module -> wrappers by their name in it; empty where the verdict is not `apply`.
    wrappers: dict[str, dict[str, Wrapper]] = dataclasses.field(default_factory=dict)
    wrapped_in: set[str] = dataclasses.field(default_factory=set)

    def __post_init__(self) -> None:
        self.group = wrapping.Group(self.capability.name, self.capability.internal_error)

    @property
    def switch(self) -> str:
        """The variable that turns it on or off."""
        return (self.capability.switch or settings.DISABLE).name

    @property
    def state(self) -> str:
        if self.error is not None:
            return "failed"
        if not self.enabled or self.verdict.verdict != APPLY:
            return "off"
        return "active" if self.wrapped_in >= self.wrappers.keys() else "pending"

    def row(self) -> dict[str, Any]:
        """What `status()` and `doctor` show of it."""
        acting = self.wrappers if self.verdict.verdict == APPLY else {}
        wraps = [short(f"{module}.{name}") for module, names in acting.items() for name in names]
        return {
            "name": self.capability.name, "verdict": self.verdict.verdict, "reason": self.verdict.reason,
            "enabled": self.enabled, "switch": self.switch, "asked_for": settings.asked_for(self.capability.switch),
            "state": self.state, "error": self.error, "wraps": wraps,
        }  # fmt: skip


_lock = threading.Lock()
#: Module -> what strict mode said of it. It survives a reload of this module, as what is wrapped does.
_handled: weakref.WeakKeyDictionary[ModuleType, str | None] = globals().get("_handled", weakref.WeakKeyDictionary())
_logged: set[str] = set()
_states: dict[str, State] = {}


def _forked() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)


def evaluate(release: source.Release | None, gpus: tuple[str, ...] | None = None) -> dict[str, State]:
    """The state of every capability for `release`, in their order, before anything is wrapped.

    `gpus` are architectures such as ("gfx950",), those of this machine where it is None. The AITER is the one that
    this Python would import.
    """
    names = tuple(c.name for c in CAPABILITIES)
    gpus = gpu.architectures() if gpus is None else gpus
    aiter = aiter_installed.package()
    off, errors = settings.disabled(names), settings.errors(names)
    result = {}
    for capability in CAPABILITIES:
        switches = [s for s in (settings.MASTER, capability.switch) if s is not None]
        unreadable = [str(errors[s.name]) for s in switches if s.name in errors and capability.name not in off]
        enabled = capability.name not in off and not unreadable and all(map(settings.boolean, switches))
        state = State(capability, capability.verdict(release), enabled, "; ".join(unreadable) or None)
        result[capability.name] = state
        if release is not None and state.verdict.verdict == APPLY:
            try:
                for name, wrapper in capability.wrappers(release).items():
                    (target,) = (t for t in capability.targets if name.startswith(f"{t}."))
                    state.wrappers.setdefault(target, {})[name.removeprefix(f"{target}.")] = wrapper
            except Exception as error:
                if enabled or unreadable:
                    state.error, state.broken = f"{type(error).__name__}: {error}", True
            state.verdict = capability.on_machine(gpus, aiter) or state.verdict
            if state.verdict.verdict != APPLY and capability.internal_error is None:
                # The others refuse where they meet the GPU, and need their wrappers for that.
                state.wrappers.clear()
    return result


def states() -> dict[str, State]:
    """The states in this process; the installed release is probed once."""
    if _states:
        return _states
    release = source.installed()
    result = evaluate(release)
    if release is None:
        # Nothing is kept, since a path may be added later.
        return result
    with _lock:
        if not _states:
            _states.update(result)
    return _states


def status() -> list[dict[str, Any]]:
    """See `sglang_aiter_ext.status`."""
    return [state.row() for state in states().values()]


def on_import(module: ModuleType, fresh: bool) -> None:
    """Wrap what is to be wrapped in a target module, when its code has run (`fresh`) or late.

    Under SGLANG_AITER_EXT_STRICT=1 it raises CouldNotApply or SettingError; else it raises nothing. No
    lock is held while modules are imported, so a second thread that comes late does not wait for the first.
    """
    with contained():
        with _lock:
            handled, said = not fresh and module in _handled, _handled.get(module)
            if not handled:
                _handled[module] = None
        if handled and said is not None and settings.strict():
            raise CouldNotApply(said)
        if not handled:
            try:
                _wrap_in(module, late=not fresh)
            except Exception as error:
                _handled[module] = str(error)
                raise


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Make one log line of an error inside, or CouldNotApply under SGLANG_AITER_EXT_STRICT=1."""
    try:
        yield
    except (CouldNotApply, SettingError):
        # Strict mode raised it.
        raise
    except Exception as error:
        message = f"sglang_aiter_ext: {type(error).__name__}: {error}"
        if settings.strict():
            raise CouldNotApply(message) from error
        _log(message + "; SGLang goes on without it")


def _log(message: str, cause: str | None = None, level: int = logging.ERROR) -> None:
    """Log `message`; a `cause` that several capabilities or modules share is logged the first time only."""
    if (cause or message) not in _logged:
        _logged.add(cause or message)
        logs.when_configured(level, message)


def _wrap_in(module: ModuleType, late: bool) -> None:
    for error in settings.errors(tuple(c.name for c in CAPABILITIES)).values():
        if settings.strict():
            raise error
        _log(str(error))
    release = source.installed()
    if not settings.is_on(settings.MASTER) or release is None:
        return
    found = [f"{name} {s.verdict.verdict}" + ("" if s.enabled else " (off)") for name, s in states().items()]
    _log(f"sglang-aiter-ext {VERSION} on SGLang {release.version}: {', '.join(found)}", level=logging.INFO)
    if (torch := sys.modules.get("torch")) is not None:
        counting.compiling = torch.compiler.is_compiling
    # The first capability's wrapper is to be the outermost.
    for state in reversed(states().values()):
        if module.__name__ in state.capability.targets:
            _apply(state, module, late)


def _apply(state: State, module: ModuleType, late: bool) -> None:
    capability, failed = state.capability, f"{state.capability.name} could not be applied"
    # A SGLANG_USE_AITER_PA that cannot be read must be said where the backend is built, so that wrapper goes in.
    unreadable = capability.switch is settings.PA and state.error is not None
    wrappers = state.wrappers.get(module.__name__, {})
    if not state.enabled and not unreadable:
        return
    if state.broken:
        # Something stood in the way in another module, or before any was looked at.
        _could_not(f"{failed}: {state.error}", state.error)
    elif state.verdict.verdict == UNSUPPORTED and state.enabled and not wrappers:
        level = logging.WARNING if settings.asked_for(capability.switch) else logging.INFO
        _could_not(f"{failed}: {state.verdict.reason}", level=level)
    elif kernels := [name for name in wrapping.missing(module, wrappers) if name in capability.kernels]:
        # SGLang says itself that it could not import AITER: only strict mode says it too. Wrappers in other
        # modules go on, since `decode_pa` refuses there what it cannot serve.
        state.error = f"SGLang could not import {', '.join(kernels)} from aiter"
        _could_not(f"{failed} to {module.__name__}: {state.error}", level=None)
    elif wrappers:
        before: dict[str, Any] = dict(vars(module)) if late else {}
        try:
            if capability.check is not None:
                capability.check()
            wrapping.wrap_all(module, wrappers, state.group)
        except Exception as error:
            with _lock:
                state.error, state.broken, state.group.acts = f"{type(error).__name__}: {error}", True, False
                wrapping.inert.add(capability.name)
            _could_not(f"{failed} to {module.__name__}: {state.error}", state.error)
        else:
            wrapping.rebind(before, module)
            state.wrapped_in.add(module.__name__)
            with _lock:
                # Another thread may have failed in another module meanwhile.
                state.group.acts = not state.broken


def _could_not(message: str, cause: str | None = None, level: int | None = logging.ERROR) -> None:
    """Log `message` at `level`, or raise CouldNotApply under SGLANG_AITER_EXT_STRICT=1."""
    if settings.strict():
        raise CouldNotApply(message) from sys.exc_info()[1]
    if level is not None:
        _log(message, cause, level)
