"""What cases share: kernel calls as digests, log records, and the harness itself."""

from __future__ import annotations

import hashlib
import logging
import sys

import aiter
import harness
import torch

harness.pretend_gfx950()


def digest(value) -> str:
    """Of a tensor its bytes, dtype and shape; of anything else its repr."""
    if torch.is_tensor(value):
        raw = value.detach().contiguous().cpu()
        raw = raw.reshape(-1).view(torch.uint8) if raw.numel() else raw.reshape(-1)
        return hashlib.sha256(raw.numpy().tobytes() + f"{value.dtype}{tuple(value.shape)}".encode()).hexdigest()[:16]
    return repr(value)


class Trace:
    """Every call of an AITER kernel while this is active: (name, digest of its arguments)."""

    def __init__(self):
        self.calls: list[list[str]] = []

    def __enter__(self):
        aiter.BEFORE_CALL.append(self._see)
        return self

    def __exit__(self, *_):
        aiter.BEFORE_CALL.remove(self._see)

    def _see(self, name, arguments):
        # The workspace holds nothing that matters.
        words = [f"{key}={digest(value)}" for key, value in sorted(arguments.items()) if key != "workspace_buffer"]
        self.calls.append([name, " ".join(words)])

    @property
    def kernels(self) -> list[str]:
        return [name for name, _ in self.calls]


class Logs(logging.Handler):
    """Messages of the package's logger, with their levels."""

    def __init__(self):
        super().__init__()
        self.lines: list[list[str]] = []
        logger = logging.getLogger("sglang.aiter_ext")
        logger.addHandler(self)
        logger.setLevel(logging.DEBUG)

    def emit(self, record):
        self.lines.append([record.levelname, record.getMessage()])

    def take(self) -> list[list[str]]:
        lines, self.lines = self.lines, []
        return lines


def counters() -> dict:
    """The package's counters, or nothing where this process has no extension on its path."""
    try:
        import sglang_aiter_ext
    except ImportError:
        return {}
    return sglang_aiter_ext.counters()


def forget() -> None:
    """Zero the counters, and forget what was logged and that a kernel failed."""
    try:
        from sglang_aiter_ext import counting, logs
    except ImportError:
        return
    counting._counts.clear()
    logs._said.clear()
    call = sys.modules.get("sglang_aiter_ext.capabilities.asm_context_prefill.call")
    if call is not None:
        call._failed[0] = None
