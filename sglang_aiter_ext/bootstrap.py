"""Waits until SGLang imports a target module, then hands over to `activation`.

Runs in every Python process that has the extension on its path, so: standard library
only, and nothing of it that a bare interpreter has not imported already.
"""

import os
import sys
from _thread import get_ident

SGLANG = "sglang.srt"
ATTENTION = f"{SGLANG}.layers.attention"
TARGETS = (f"{ATTENTION}.attention_registry", f"{ATTENTION}.hybrid_linear_attn_backend", f"{ATTENTION}.aiter_backend")


class TargetFinder:
    """A meta path finder that finds nothing itself: it has a target's loader tell us when it is done."""

    def __init__(self):
        self._asking = set()  # (thread, name) of each search that is under way

    def find_spec(self, name, path=None, target=None):
        if name == SGLANG:
            _sglang_is_imported()
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
    """Have the loader tell us, without a trace left on it; one that takes no attribute is let be."""
    loader = spec.loader
    execute = getattr(loader, "exec_module", None)
    if execute is None or isinstance(loader, type):
        return

    def exec_module(module):
        loader.__dict__.pop("exec_module", None)
        execute(module)
        if module.__spec__ is spec:
            _serve(module, fresh=True)

    try:
        loader.exec_module = exec_module
    except AttributeError:
        pass


def _sglang_is_imported() -> None:
    """A process of SGLang's shows itself from here on, whether or not it imports a target."""
    if os.environ.get("SGLANG_AITER_EXT_STATE_DIR") and (activation := _activation()):
        activation.publish()


_broken: list[str] = []


def _activation():
    """Our own code, or None where it cannot be imported: one line then, or an error under SGLANG_AITER_EXT_STRICT=1."""
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
                # A handler of the host program's.
                pass
        return None


def _serve(module, fresh) -> None:
    if activation := _activation():
        activation.on_import(module, fresh)


def waiting() -> bool:
    """Whether the finder is in place in this process."""
    return any(type(f).__name__ == "TargetFinder" and type(f).__module__ == __name__ for f in sys.meta_path)


def install() -> None:
    """Put the finder first on sys.meta_path, once, and serve targets that are imported already."""
    if not waiting():
        sys.meta_path.insert(0, TargetFinder())
    if SGLANG in sys.modules:
        _sglang_is_imported()
    imported = [name for name in TARGETS if sys.modules.get(name) is not None]
    for name in imported:
        __import__(name)  # waits for a thread that is still executing it
        _serve(sys.modules[name], fresh=False)
