"""The one way in which wrappers go around SGLang's functions: every name is found first, then all are wrapped.

    group = Group("v_head_dim")
    wrap_all(module, {"AiterAttnBackend.__init__": wrapper}, group)
    group.acts = True

A wrapper is called as `wrapper(original, instance, args, kwargs)`, where `instance` is None for a function
of the module. Until its group acts, and when it no longer does, SGLang's own function is called instead.
"""

import dataclasses
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, ModuleType
from typing import Any

from . import logs, settings
from .capability import Args, Kwargs, Wrapper
from .counting import count
from .errors import CouldNotApply, Refusal, SettingError


@dataclasses.dataclass
class Group:
    """The wrappers of one capability in this process.

    `instead` is what an error of a wrapper's own becomes where SGLang's function would answer differently.
    """

    capability: str
    instead: type[Refusal] | None = None
    acts: bool = False


#: The capabilities of which something could not be wrapped in this process: nothing of them acts.
inert: set[str] = set()


class Scope(threading.local):
    """What a wrapper around one call leaves for the wrappers of calls made inside of it, in this thread.

    `value` is None where nothing is served, and else what is served.
    """

    def __init__(self) -> None:
        # A default of the class would break the graph of torch.compile.
        self.value: Any = None

    def call(self, value: Any, original: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
        """`original(*args, **kwargs)`, with `value` left for the time of the call."""
        before, self.value = self.value, value
        try:
            return original(*args, **kwargs)
        finally:
            self.value = before


def missing(module: ModuleType, names: Iterable[str]) -> list[str]:
    """Those of `names`, each `name` or `Class.name`, that `module` does not define itself."""
    return [name for name in names if not _defines(module, name)]


def _defines(module: ModuleType, name: str) -> bool:
    owner: Any = module
    *path, last = name.split(".")
    for part in path:
        owner = vars(owner).get(part)
        if not isinstance(owner, type):
            return False
    return last in vars(owner)


def wrap_all(module: ModuleType, wrappers: Mapping[str, Wrapper], group: Group) -> None:
    """Wrap each `name` or `Class.name` of `module` with its wrapper.

    Raises AttributeError where the module does not define one of them, and ImportError without a
    usable wrapt; nothing is wrapped then.
    """
    from wrapt import wrap_object

    absent = missing(module, wrappers)
    if absent:
        raise AttributeError(f"{module.__name__} has no {', '.join(absent)}")
    for name, wrapper in wrappers.items():
        # The arguments go by position, since wrapt 2 renamed the first parameter.
        wrap_object(module, name, functools.partial(_wrapped, module, name, wrapper, group))


def _wrapped(module: ModuleType, name: str, wrapper: Wrapper, group: Group, original: Any) -> Any:
    # A function, not a wrapt.FunctionWrapper: torch.compile takes that one for what it wraps and leaves the
    # wrapper out, and it can be neither pickled nor copied.
    guarded = _guarded(wrapper, name, group)
    if "." in name:

        @functools.wraps(original)
        def function(self: Any, *args: Any, **kwargs: Any) -> Any:
            return guarded(functools.partial(original, self), self, args, kwargs)

    else:

        @functools.wraps(original)
        def function(*args: Any, **kwargs: Any) -> Any:
            return guarded(original, None, args, kwargs)

    function.__module__, function.__qualname__ = module.__name__, name
    for attribute in ("cache_info", "cache_clear", "cache_parameters"):
        if hasattr(original, attribute):
            setattr(function, attribute, getattr(original, attribute))
    return function


def without_ours(function: Any) -> Any:
    """`function` without this package's wrappers around it; those of others stay."""
    # A wrapper of wrapt's own shows the code of what it wraps, and is somebody else's.
    while type(function) is FunctionType and function.__code__.co_filename == __file__:
        function = function.__wrapped__  # type: ignore[attr-defined]
    return function


def _guarded(wrapper: Wrapper, name: str, group: Group) -> Wrapper:
    def guarded(original: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        if not group.acts:
            return original(*args, **kwargs)
        result: tuple[Any] | None = None
        failed = False

        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal result, failed
            failed = True
            result = (original(*args, **kwargs),)
            failed = False
            return result[0]

        try:
            return wrapper(called, instance, args, kwargs)
        except Exception as error:
            if isinstance(error, (Refusal, SettingError)) or failed:
                # It was raised on purpose, or by SGLang itself.
                raise
            message = f"internal error in {name}: {type(error).__name__}: {error}"
            if group.instead is not None:
                raise group.instead(message) from error
            if settings.strict():
                raise CouldNotApply(f"{group.capability}: {message}") from error
            count(group.capability, "internal_error")
            logs.once(group.capability, "internal_error", "%s; SGLang's own function serves it", message)
            return result[0] if result is not None else original(*args, **kwargs)

    return guarded


def rebind(before: Mapping[str, Any], module: ModuleType) -> None:
    """Point the `from module import name` aliases of SGLang's modules at what `module` defines now.

    `before` is what the module's names stood for; only functions that it defines itself count.
    """
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
