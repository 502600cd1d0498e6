"""What `python3 -m sglang.launch_server ARGUMENTS` comes to without a model and a GPU."""

from __future__ import annotations

import argparse
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"
import harness

harness.pretend_gfx950()


def server() -> dict:
    """The arguments as SGLang's own parser reads them, and what became of the extension once its attention code is there."""
    import sglang.srt.layers.attention.aiter_backend
    import sglang.srt.layers.attention.attention_registry
    import sglang.srt.layers.attention.hybrid_linear_attn_backend  # noqa: F401
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = parser.parse_args(sys.argv[2:])
    package = sys.modules.get("sglang_aiter_ext")
    states = {s["name"]: s["state"] for s in package.status()} if package else {}
    return {
        "states": states, "package": getattr(package, "__file__", None), "path": os.environ.get("PYTHONPATH"),
        "backend": given.attention_backend, "tp": given.tensor_parallel_size,
    }  # fmt: skip
