"""SGLang's own attention tests (`sglang.test.kits.attention_unittest`), which its wheels carry from 0.5.13 on."""

from __future__ import annotations

import os
import unittest

import harness
import torch
from sglang.srt.layers.attention import attention_registry as registry

DEVICE = harness.DEVICE


def outcome(run) -> str:
    try:
        run()
    except unittest.SkipTest as skip:
        return f"skipped: {skip}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return "passed"


def with_pages(runner):
    backend = registry.ATTENTION_BACKENDS["paged"](runner)
    backend.page_size = runner.page_size
    return backend


def dense_and_gdn() -> dict:
    """Outcome of each case, on each backend: eager, decode in a graph, and extends split as for graphs."""
    from sglang.test.kits.attention_unittest.attention_methods import dense_attention, gdn_attention

    if DEVICE == "cuda":
        from sglang.test.kits.attention_unittest.runner_modes import (
            cuda_graph_decode_runner as graphs,
        )
        from sglang.test.kits.attention_unittest.runner_modes import (
            split_op_runner as split,
        )

    # The AITER backend reads two things that the kit's stand-ins for a runner lack.
    for config in (dense_attention.TinyModelConfig, gdn_attention.TinyGDNModelConfig):
        config.dtype = torch.float16
    if "paged" not in registry.ATTENTION_BACKENDS:
        registry.ATTENTION_BACKENDS["paged"] = registry.ATTENTION_BACKENDS["aiter"]
        registry.ATTENTION_BACKENDS["aiter"] = with_pages
    results = {}
    test = unittest.TestCase()
    for backend in os.environ["KIT_BACKENDS"].split(","):
        for kind, cases in (("dense", dense_attention.make_dense_cases(backend)), ("gdn", gdn_attention.make_gdn_cases(backend))):  # fmt: skip
            run_eager = {"dense": dense_attention.run_dense_attention_case, "gdn": gdn_attention.run_gdn_attention_case}
            for case in cases:
                name = f"{backend}/{case.name}"
                results[name] = outcome(lambda: run_eager[kind](test, case, device=DEVICE))
                if DEVICE == "cpu":
                    continue
                if case.forward_mode.is_decode():
                    in_graph = getattr(graphs, f"run_{kind}_cuda_graph_decode_case")
                    size = {"cuda_graph_capture_batch_size": case.batch_size}
                    results[f"{name}/graph"] = outcome(lambda: in_graph(test, case, **size))
                    results[f"{name}/padded graph"] = outcome(lambda: in_graph(test, case))
                else:
                    in_pieces = getattr(split, f"run_{kind}_split_op_extend_case")
                    for breakable in (False, True):
                        results[f"{name}/split {breakable}"] = outcome(
                            lambda: in_pieces(test, case, breakable=breakable)
                        )
    return {"results": results, "wrapped": wrapped()}


def decode_router() -> dict:
    """The same dense cases on the router that decode_pa builds: Triton and, for decode, AITER."""
    from sglang_aiter_ext.capabilities.decode_pa.building import router_class

    make_triton = registry.ATTENTION_BACKENDS["triton"]
    registry.ATTENTION_BACKENDS["triton"] = lambda runner: router_class()(
        runner, prefill_backend=make_triton(runner), decode_backend=registry.ATTENTION_BACKENDS["aiter"](runner)
    )
    return dense_and_gdn()


def wrapped() -> bool:
    """Whether the extension is active in this process."""
    return hasattr(registry.attn_backend_wrapper, "__wrapped__")
