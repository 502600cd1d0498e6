"""A little of everything, on any release."""

from __future__ import annotations

from recording import Logs, Trace, counters, forget, harness, torch


def _attempt(run) -> dict:
    try:
        return run()
    except Exception as error:
        import traceback

        return {"exception": f"{type(error).__name__}: {error}", "where": traceback.format_exc()[-1500:]}


def release() -> dict:
    """AITER backend of a model whose layer 0 is linear, chunked prefill on it, and decode behind Triton."""
    logs = Logs()
    return {"aiter": _attempt(aiter_backend), "decode": {str(fp8): _attempt(lambda fp8=fp8: decode(fp8)) for fp8 in (True, False)},
            "logs": logs.take(), "status": status()}  # fmt: skip


def status() -> list:
    try:
        import sglang_aiter_ext
    except ImportError:
        return []
    return sglang_aiter_ext.status()


def aiter_backend() -> dict:
    forget()
    stack = harness.Stack(backend="aiter", layers=8, full_interval=2)
    out = {"v_head_dim": stack.backend.full_attn_backend.v_head_dim, "batches": []}
    for lengths in ({1: 20, 2: 37}, {1: 5, 2: 40, 3: 9}, {3: 11, 1: 1}):
        with Trace() as trace:
            result = stack.extend(lengths)
        out["batches"].append({"kernels": sorted(set(trace.kernels)), "calls": len(trace.kernels), "error": result.error(),
                               "fp8_error": result.error(fp8_queries=True), "digest": trace.calls})  # fmt: skip
    out["counters"] = counters()
    return out


def decode(fp8: bool) -> dict:
    forget()
    stack = harness.Stack(
        backend="triton", fp8=fp8, k_scale=0.5 if fp8 else None, v_scale=2.0 if fp8 else None, scaling=0.05
    )
    stack.grow({1: 33, 2: 16})
    with Trace() as trace:
        result = stack.decode([1, 2])
    full = stack.backend.full_attn_backend
    return {"full": type(full).__name__, "kernels": trace.kernels, "error": result.error(), "counters": counters()}


def ratio() -> dict:
    """A 24-query, 4-KV-head model: first chunk, and a chunk with a prefix."""
    logs = Logs()
    stack = harness.Stack(backend="aiter", q_heads=24, kv_heads=4)
    out = {}
    forget()
    for name, lengths in (("first", {1: 20, 2: 7}), ("prefix", {1: 5, 2: 9})):

        def run(lengths=lengths):
            with Trace() as trace:
                result = stack.extend(lengths)
            return {"calls": trace.calls, "fp8_error": result.error(fp8_queries=True)}

        out[name] = _attempt(run)
    return {**out, "counters": counters(), "logs": logs.take()}


def reuse() -> dict:
    """Four layers and two batches of equal shape and other slots: index builds, host reads, and outputs."""
    import sglang.srt.layers.attention.aiter_backend as module
    from recording import digest

    stack = harness.Stack(backend="aiter", layers=8, full_interval=2, k_scale=None)
    stack.grow({1: 33, 2: 20, 3: 33, 4: 20})
    function = module._asm_context_prefill_gather_indices
    inner = getattr(function, "__wrapped__", function)
    reads = []
    item = torch.Tensor.item
    out = []
    for lengths in ({1: 7, 2: 9}, {3: 7, 4: 9}):
        forget()
        marks = []

        def seen(name, arguments):
            if name == "flash_attn_varlen_fp8_pertensor_func":
                marks.append(len(reads))

        def counting(self):
            import sys

            if sys._getframe(1).f_code is inner.__code__:
                reads.append(1)
            return item(self)

        import aiter

        aiter.BEFORE_CALL.append(seen)
        torch.Tensor.item = counting
        reads.clear()
        try:
            with Trace() as trace:
                result = stack.extend(lengths)
        finally:
            torch.Tensor.item = item
            aiter.BEFORE_CALL.remove(seen)
        out.append({"reads_at_each_layer": marks, "outputs": [digest(x) for x in result.outputs.values()], "calls": trace.calls,
                    "fp8_error": result.error(fp8_queries=True), "counters": counters()})  # fmt: skip
    metadata = stack.backend.full_attn_backend.forward_metadata
    return {"batches": out, "on_metadata": hasattr(metadata, "_sglang_aiter_ext_indices")}
