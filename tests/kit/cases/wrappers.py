"""This package's own wrappers, taken from SGLang's functions and put around others."""

from __future__ import annotations

import sys
import types


def around(name: str, inner, method: bool = False):
    """The wrappers that this process has around SGLang's `module.function` or `module.Class.method`, around `inner`."""
    from sglang_aiter_ext import activation, wrapping

    holder = types.ModuleType("holder")
    holder.Holder = type("Holder", (), {"function": inner})
    holder.function = inner
    for state in reversed(activation.states().values()):
        for target in state.wrapped_in:
            for found, wrapper in state.wrappers[target].items():
                if f"{target}.{found}".endswith(f".{name}"):
                    wrapping.wrap_all(holder, {"Holder.function" if method else "function": wrapper}, state.group)
    return holder.Holder.function if method else holder.function


def is_ours(function) -> bool:
    """Whether a function is a wrapper of this package's."""
    wrapping = sys.modules.get("sglang_aiter_ext.wrapping")
    file = getattr(getattr(function, "__code__", None), "co_filename", None)
    return wrapping is not None and hasattr(function, "__wrapped__") and file == wrapping.__file__
