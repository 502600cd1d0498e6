"""Installs capabilities into SGLang's modules, and keeps what goes wrong inside."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from . import __version__, counting, installed, settings
from .capability import APPLY, UNSUPPORTED, Capability, NothingToServe, Verdict
from .counting import count, log_once, log_when_set_up

Args = tuple[Any, ...]
Kwargs = dict[str, Any]
#: (wrapped, instance or None, args, kwargs) -> result
Wrapper = Callable[[Callable[..., Any], Any, Args, Kwargs], Any]


class Refusal(RuntimeError):
    """Raised by a wrapper on purpose: what the user asked for cannot be had."""


class CouldNotApply(Refusal):
    """Under SGLANG_AITER_EXT_STRICT=1: a capability that is enabled could not be applied, or went wrong in a call."""


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
#: Module -> what strict mode said of it. Survives a reload of this module: what is wrapped stays wrapped.
_served: weakref.WeakKeyDictionary[ModuleType, str | None] = globals().get("_served", weakref.WeakKeyDictionary())
_reported: set[str] = set()


def _forked() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_forked)


_states: dict[str, State] = {}


def evaluate(release: installed.Release | None) -> dict[str, State]:
    """The state of every capability for `release`, in order, before anything is installed."""
    from .capabilities import CAPABILITIES

    names = tuple(c.name for c in CAPABILITIES)
    off, errors = settings.disabled(names), settings.errors(names)
    result = {}
    for capability in CAPABILITIES:
        switches = [s for s in (settings.MASTER, capability.switch) if s is not None]
        unreadable = [str(errors[s.name]) for s in switches if s.name in errors and capability.name not in off]
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


def status() -> list[dict[str, Any]]:
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
    with _contained():
        if fresh or module not in _served:
            _served[module] = None
            try:
                _serve(module, late=not fresh)
            except Exception as error:
                _served[module] = str(error)
                raise
        elif (said := _served[module]) is not None and settings.strict():
            raise CouldNotApply(said)
    publish()


def publish() -> None:
    """Show this process to others from now on, as far as variables ask for it; raises as `on_import` does."""
    with _contained():
        from . import publishing

        publishing.begin()


@contextlib.contextmanager
def _contained() -> Iterator[None]:
    with _lock:
        try:
            yield
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
        log_when_set_up(logging.ERROR, message)


def _serve(module: ModuleType, late: bool) -> None:
    from .capabilities import CAPABILITIES

    errors = settings.errors(tuple(c.name for c in CAPABILITIES))
    for error in errors.values():
        if settings.strict():
            raise error
        _report(str(error))
    release = installed.release()
    if not settings.is_on(settings.MASTER) or release is None:
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
    found = f"sglang-aiter-ext {__version__} on SGLang {release.version}: {', '.join(words)}"
    log_when_set_up(logging.INFO, found)


def _install(state: State, module: ModuleType, release: installed.Release, late: bool) -> None:
    capability = state.capability
    # A variable that cannot be read must be said when the backend is built, so that wrapper goes in.
    wanted = state.enabled or (capability.switch is settings.PA and state.error is not None)
    if not wanted or state.verdict.verdict != APPLY:
        if state.enabled and state.verdict.verdict == UNSUPPORTED:
            message = f"{capability.name} could not be applied: {state.verdict.reason}"
            if settings.strict():
                raise CouldNotApply(message)
            if message not in _reported:
                _reported.add(message)
                asked_for = capability.switch is not None and not capability.switch.default
                log_when_set_up(logging.WARNING if asked_for else logging.INFO, message)
        return
    before: dict[str, Any] = dict(vars(module)) if late else {}
    if (torch := sys.modules.get("torch")) is not None:
        counting.compiling = torch.compiler.is_compiling
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


def _rebind(before: dict[str, Any], module: ModuleType) -> None:
    """Point `from module import name` aliases taken before at what the functions `module` defines are now."""
    changed = {
        name: value
        for name, value in before.items()
        if vars(module).get(name) is not value and getattr(value, "__module__", None) == module.__name__
    }
    for other in list(sys.modules.values()):
        if getattr(other, "__name__", "").partition(".")[0] == "sglang":
            for name, value in changed.items():
                if vars(other).get(name) is value:
                    setattr(other, name, vars(module)[name])


class Scope(threading.local):
    """What a wrapper around one call leaves for the wrappers of calls made inside of it, in this thread."""

    def __init__(self) -> None:
        self.value: Any = None

    def call(self, value: Any, wrapped: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """`wrapped(*args, **kwargs)` with `value` left for the time of the call."""
        before, self.value = self.value, value
        try:
            return wrapped(*args, **kwargs)
        finally:
            self.value = before


def wrap(module: ModuleType, name: str, wrapper: Wrapper, instead: type[Refusal] | None = None) -> None:
    """Wrap `name` or `Class.name` of `module` with `wrapper(wrapped, instance, args, kwargs)`.

    An error of the wrapper's own leaves the call to SGLang's function; it becomes an `instead` where
    that one would answer differently, and CouldNotApply under SGLANG_AITER_EXT_STRICT=1. Raises
    AttributeError where there is no such name, ImportError without a usable wrapt.
    """
    from wrapt import wrap_object

    owner: object = module
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    if last not in vars(owner):
        raise AttributeError(f"{module.__name__} has no {name}")

    guarded = _guarded(wrapper, name, instead)

    def wrapping(wrapped: Any) -> Any:
        # A function, not a wrapt.FunctionWrapper: torch.compile takes that one for what it wraps and leaves the
        # wrapper out, and it can be neither pickled nor copied.
        if path:

            @functools.wraps(wrapped)
            def function(self: Any, *args: Any, **kwargs: Any) -> Any:
                return guarded(functools.partial(wrapped, self), self, args, kwargs)

        else:

            @functools.wraps(wrapped)
            def function(*args: Any, **kwargs: Any) -> Any:
                return guarded(wrapped, None, args, kwargs)

        function.__module__, function.__qualname__ = module.__name__, name
        function.__dict__["_sglang_aiter_ext_wrapper"] = wrapper
        for attribute in ("cache_info", "cache_clear", "cache_parameters"):
            if hasattr(wrapped, attribute):
                setattr(function, attribute, getattr(wrapped, attribute))
        return function

    # By position: wrapt 2 renamed the first parameter.
    wrap_object(module, name, wrapping)  # type: ignore[arg-type]


def _guarded(wrapper: Wrapper, name: str, instead: type[Refusal] | None) -> Wrapper:
    capability = getattr(wrapper, "func", wrapper).__module__.rpartition(".")[2]

    def guarded(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        result: tuple[Any] | None = None
        failed = False

        def original(*args: Any, **kwargs: Any) -> Any:
            nonlocal result, failed
            failed = True
            result = (wrapped(*args, **kwargs),)
            failed = False
            return result[0]

        try:
            return wrapper(original, instance, args, kwargs)
        except Exception as error:
            if isinstance(error, (Refusal, settings.SettingError)) or failed:
                # On purpose, or SGLang's own.
                raise
            message = f"internal error in {name}: {type(error).__name__}: {error}"
            if instead is not None:
                raise instead(message) from error
            if settings.strict():
                raise CouldNotApply(f"{capability}: {message}") from error
            count(capability, "internal_error")
            log_once(capability, "internal_error", "%s; SGLang's own function serves it", message)
            return result[0] if result is not None else wrapped(*args, **kwargs)

    return guarded


def without_wrappers(function: Any) -> Any:
    """`function` without this package's wrappers around it."""
    while hasattr(function, "_sglang_aiter_ext_wrapper"):
        function = function.__wrapped__
    return function
