"""What a process is as its case begins, and cases that end badly."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import warnings


def seen() -> dict:
    """All that a fresh interpreter and a fork must agree on, before and after the harness is imported."""
    before = _state()
    import harness

    harness.pretend_gfx950()
    import sglang.srt.model_executor.model_runner  # noqa: F401 - as a server does
    from sglang.srt.layers.attention import attention_registry as registry

    return {"before": before, "after": _state(), "wrapped": hasattr(registry.attn_backend_wrapper, "__wrapped__")}


def _state() -> dict:
    return {
        "path": sys.path, "argv": sys.argv, "folder": os.getcwd(), "environment": dict(os.environ),
        "finders": [f"{type(f).__name__} {getattr(f, '__name__', '')}" for f in sys.meta_path if "Editable" not in repr(f)],
        "handlers": [repr(type(h)) for h in logging.getLogger().handlers], "warnings": sorted({f[0] for f in warnings.filters}),
        "pycache": [sys.pycache_prefix, sys.dont_write_bytecode], "threads": len(os.listdir("/proc/self/task")),
        "extension": sorted(name for name in sys.modules if name.startswith("sglang_aiter_ext")),
        "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "files": len([fd for fd in os.listdir("/proc/self/fd") if int(fd) > 2]),
    }  # fmt: skip


def loaded() -> list:
    return [name for name in sys.modules if name.startswith(("sglang", "aiter", "wrapt"))]


def changes() -> list:
    """Whether an earlier case's change is there, and what this one's variable says."""
    there = hasattr(json, "changed")
    json.changed = True
    return [os.environ["CHANGED"], there]


def exits():
    print("said before the end")
    sys.exit(3)


def crashes():
    print("said before the end", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def raises():
    print("said before the end")
    raise ValueError("the case is wrong")


def hangs():
    time.sleep(600)
