"""Waits until SGLang imports a target module, then hands over to `activation`.

It runs in every Python process that has the extension on its path. So it imports only what a bare
interpreter has imported already, and reads `names` for the modules to wait for.
"""

import os
import sys
from _thread import get_ident

from .names import SGLANG, TARGETS


class TargetFinder:
    """A meta path finder that finds nothing itself. It has the loader of a target tell us when the module has run."""

    def __init__(self):
        self._asking = set()  # (thread, name) of each search that is under way

    def find_spec(self, name, path=None, target=None):
        if name == SGLANG:
            _publish()
        key = (get_ident(), name)
        if name not in TARGETS or key in self._asking:
            return None
        self._asking.add(key)
        try:
            for finder in sys.meta_path:
                find = getattr(finder, "find_spec", None)
                if finder is not self and find is not None and (spec := find(name, path, target)) is not None:
                    _tell_when_executed(spec)
                    return spec
        finally:
            self._asking.discard(key)
        return None


def _tell_when_executed(spec) -> None:
    """Have the loader tell us, and leave no trace on it. A loader that takes no attribute is left alone."""
    loader = spec.loader
    execute = getattr(loader, "exec_module", None)
    if execute is None or isinstance(loader, type):
        return

    def exec_module(module):
        loader.__dict__.pop("exec_module", None)
        execute(module)
        if module.__spec__ is spec:
            _hand_over(module, fresh=True)

    try:
        loader.exec_module = exec_module
    except AttributeError:
        pass


_broken: list[str] = []


def _activation():
    """Our own code. Where it cannot be imported this gives None and logs one line; strict mode makes it an error."""
    try:
        from . import activation

        return activation
    except Exception as error:
        import logging

        message = f"sglang_aiter_ext is not active: {type(error).__name__}: {error}"
        if os.environ.get("SGLANG_AITER_EXT_STRICT", "").strip().lower() in ("1", "true", "yes", "on"):
            raise ImportError(message) from error
        if not _broken:
            _broken.append(message)
            try:
                logging.getLogger("sglang.aiter_ext").error("%s", message)
            except Exception:
                # A handler of the host program raised it.
                pass
        return None


def _hand_over(module, fresh) -> None:
    """Have a target module wrapped, then show this process to others."""
    if activation := _activation():
        activation.on_import(module, fresh)
        _publish(always=True)


def _publish(always=False) -> None:
    """Show this process to others, as far as variables ask for it: from the first import of SGLang's on."""
    if (always or os.environ.get("SGLANG_AITER_EXT_STATE_DIR")) and (activation := _activation()):
        with activation.contained():
            from . import publishing

            publishing.begin()


def waiting() -> bool:
    """Whether the finder is in place in this process."""
    return any(type(f).__name__ == "TargetFinder" and type(f).__module__ == __name__ for f in sys.meta_path)


def install() -> None:
    """Put the finder first on sys.meta_path, once, and hand over the targets that are imported already."""
    if not waiting():
        sys.meta_path.insert(0, TargetFinder())
    if SGLANG in sys.modules:
        _publish()
    for name in [name for name in TARGETS if sys.modules.get(name) is not None]:
        __import__(name)  # waits for a thread that is still executing it
        _hand_over(sys.modules[name], fresh=False)
