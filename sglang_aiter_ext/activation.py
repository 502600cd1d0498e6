"""Installs capabilities into SGLang's modules, and keeps what goes wrong inside."""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from . import __version__, installed, settings
from .capability import APPLY, UNSUPPORTED, Capability, NothingToServe, Verdict
from .counting import count, log_once, say


class CouldNotApply(RuntimeError):
    """Under SGLANG_AITER_EXT_STRICT=1: a capability that is enabled could not be applied."""


@dataclasses.dataclass
class State:
    """What became of one capability in this process."""

    capability: Capability
    verdict: Verdict
    enabled: bool
    error: str | None = None
    installed_in: set[str] = dataclasses.field(default_factory=set)

    @property
    def switch(self) -> str:
        """The variable that turns it on or off."""
        return self.capability.switch.name if self.capability.switch else settings.DISABLE.name

    @property
    def state(self) -> str:
        if self.error is not None:
            return "failed"
        if not self.enabled or self.verdict.verdict != APPLY:
            return "off"
        return "active" if self.installed_in == set(self.capability.targets) else "pending"


_lock = threading.RLock()
#: Survives a reload of this module: what is wrapped stays wrapped.
_served: weakref.WeakSet[ModuleType] = globals().get("_served", weakref.WeakSet())
_reported: set[str] = set()


_states: dict[str, State] = {}


def evaluate(release: installed.Release | None) -> dict[str, State]:
    """The state of every capability for `release`, in order, before anything is installed."""
    from .capabilities import CAPABILITIES

    names = tuple(c.name for c in CAPABILITIES)
    off, errors = settings.disabled(names), settings.errors(names)
    result = {}
    for capability in CAPABILITIES:
        switches = [s for s in (settings.MASTER, capability.switch) if s is not None]
        unreadable = [str(errors[s.name]) for s in switches if s.name in errors]
        enabled = capability.name not in off and not unreadable and all(map(settings.boolean, switches))
        result[capability.name] = State(capability, capability.verdict(release), enabled, "; ".join(unreadable) or None)
    return result


def states() -> dict[str, State]:
    """The states in this process; the installed release is probed once."""
    with _lock:
        if _states:
            return _states
        release = installed.release()
        result = evaluate(release)
        if release is not None:
            # Without one nothing is kept: a path may be added later.
            _states.update(result)
        return result


def status() -> list[dict]:
    """See `sglang_aiter_ext.status`."""
    return [
        {
            "name": state.capability.name,
            "verdict": state.verdict.verdict,
            "reason": state.verdict.reason,
            "enabled": state.enabled,
            "switch": state.switch,
            "state": state.state,
            "error": state.error,
        }
        for state in states().values()
    ]


def on_import(module: ModuleType, fresh: bool) -> None:
    """Serve a target module: called when its code has run (`fresh`), or late for one already there.

    Raises CouldNotApply or SettingError under SGLANG_AITER_EXT_STRICT=1, else nothing.
    """
    with _lock:
        try:
            if not fresh and module in _served:
                return
            _served.add(module)
            _serve(module, late=not fresh)
        except (CouldNotApply, settings.SettingError):
            # Strict mode's own.
            raise
        except Exception as error:
            message = f"sglang_aiter_ext: {type(error).__name__}: {error}"
            if settings.strict():
                raise CouldNotApply(message) from error
            _report(f"{message}; SGLang goes on without it")


def _report(message: str, cause: str | None = None) -> None:
    """Log at ERROR; a `cause` that several capabilities or modules share only the first time."""
    if (cause or message) not in _reported:
        _reported.add(cause or message)
        say(logging.ERROR, "%s", message)


def _serve(module: ModuleType, late: bool) -> None:
    from .capabilities import CAPABILITIES

    errors = settings.errors(tuple(c.name for c in CAPABILITIES))
    for error in errors.values():
        if settings.strict():
            raise error
        _report(str(error))
    release = installed.release()
    if settings.MASTER.name in errors or not settings.boolean(settings.MASTER) or release is None:
        return
    _summarise(release)
    # The first capability's wrapper is the outermost.
    for state in reversed(states().values()):
        if module.__name__ in state.capability.targets:
            _install(state, module, release, late)


def _summarise(release: installed.Release) -> None:
    """One line, at the first target: what this process found and will do."""
    if "" in _reported:
        return
    _reported.add("")
    words = [
        f"{name} {state.verdict.verdict}" + ("" if state.enabled else " (off)") for name, state in states().items()
    ]
    say(logging.INFO, "sglang-aiter-ext %s on SGLang %s: %s", __version__, release.version, ", ".join(words))


def _install(state: State, module: ModuleType, release: installed.Release, late: bool) -> None:
    capability = state.capability
    # A variable that cannot be read must be said when the backend is built, so that wrapper goes in.
    wanted = state.enabled or (capability.switch is settings.PA and settings.PA.name in (state.error or ""))
    if not wanted or state.verdict.verdict != APPLY:
        if state.enabled and state.verdict.verdict == UNSUPPORTED:
            message = f"{capability.name} could not be applied: {state.verdict.reason}"
            if settings.strict():
                raise CouldNotApply(message)
            if message not in _reported:
                _reported.add(message)
                asked_for = capability.switch is not None and not capability.switch.default
                say(logging.WARNING if asked_for else logging.INFO, "%s", message)
        return
    before = dict(vars(module)) if late else {}
    try:
        capability.install(module, release)
    except NothingToServe as error:
        state.error = str(error)
        if settings.strict():
            raise CouldNotApply(f"{capability.name} could not be applied to {module.__name__}: {error}") from error
        return
    except Exception as error:
        state.error = f"{type(error).__name__}: {error}"
        message = f"{capability.name} could not be applied to {module.__name__}: {state.error}"
        if settings.strict():
            raise CouldNotApply(message) from error
        _report(message, state.error)
        return
    _rebind(before, module)
    state.installed_in.add(module.__name__)


def _rebind(before: dict, module: ModuleType) -> None:
    """Point `from module import name` aliases taken before at what the functions `module` defines are now."""
    changed = {
        name: value
        for name, value in before.items()
        if vars(module).get(name) is not value and getattr(value, "__module__", None) == module.__name__
    }
    for other in list(sys.modules.values()):
        if other is not module and getattr(other, "__name__", "").partition(".")[0] == "sglang":
            for name, value in changed.items():
                if vars(other).get(name) is value:
                    setattr(other, name, vars(module)[name])


class Scope(threading.local):
    """What a wrapper around one call leaves for the wrappers of calls made inside of it, in this thread."""

    value: Any = None

    def call(self, value: Any, wrapped: Callable, args: tuple, kwargs: dict) -> Any:
        """`wrapped(*args, **kwargs)` with `value` left for the time of the call."""
        before, self.value = self.value, value
        try:
            return wrapped(*args, **kwargs)
        finally:
            self.value = before


class Refusal(RuntimeError):
    """Raised by a wrapper on purpose: what the user asked for cannot be had."""


def wrap(module: ModuleType, name: str, wrapper: Callable, instead: type[Refusal] | None = None) -> None:
    """Wrap `name` or `Class.name` of `module` with `wrapper(wrapped, instance, args, kwargs)`.

    An error of the wrapper's own leaves the call to SGLang's function, or becomes an `instead`
    where that one would answer differently. Raises AttributeError where there is no such name,
    ImportError without a usable wrapt.
    """
    from wrapt import FunctionWrapper, wrap_function_wrapper  # noqa: F401  (one message for a wrapt that lacks either)

    owner: object = module
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    if last not in vars(owner):
        raise AttributeError(f"{module.__name__} has no {name}")
    # By position: wrapt 2 renamed the first parameter.
    wrap_function_wrapper(module, name, _guarded(wrapper, name, instead))


def _guarded(wrapper: Callable, name: str, instead: type[Refusal] | None) -> Callable:
    capability = getattr(wrapper, "func", wrapper).__module__.rpartition(".")[2]

    def guarded(wrapped: Any, instance: Any, args: tuple, kwargs: dict) -> Any:
        called, result = False, None

        def original(*args: Any, **kwargs: Any) -> Any:
            nonlocal called, result
            called = True
            result = (wrapped(*args, **kwargs),)
            return result[0]

        try:
            return wrapper(original, instance, args, kwargs)
        except Exception as error:
            if isinstance(error, (Refusal, settings.SettingError)) or (called and result is None):
                # On purpose, or SGLang's own.
                raise
            message = f"internal error in {name}: {type(error).__name__}: {error}"
            if instead is not None:
                raise instead(message) from error
            count(capability, "internal_error")
            log_once(capability, "internal_error", "%s; SGLang's own function serves it", message)
            return result[0] if result is not None else wrapped(*args, **kwargs)

    return guarded


def without_wrappers(function: Any) -> Any:
    """`function` without the wrapt wrappers around it."""
    from wrapt import FunctionWrapper

    while isinstance(function, FunctionWrapper):
        function = function.__wrapped__
    return function
