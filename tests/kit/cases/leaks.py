"""Many calls and many batches: memory, open files, and what is kept of metadata, batches and plans."""

from __future__ import annotations

import gc
import inspect
import os
import resource
import tracemalloc
import types
import weakref

import aiter
import torch

CALLS, BATCHES = 100_000, 10_000


def _cheap(name):
    """The reference's kernel with its parameters, and without its work."""
    real = getattr(aiter, name)

    def kernel(*args, **kwargs):
        return OUT

    kernel.__signature__ = inspect.signature(real)
    setattr(aiter, name, kernel)


OUT = torch.zeros(4, 8 * 256, dtype=torch.bfloat16)


def measure(run, count, warm=2_000) -> dict:
    """What `count` calls of `run` after `warm` leave: bytes of Python objects, of the process, and open files."""
    for _ in range(warm):
        run()
    gc.collect()
    tracemalloc.start()
    for _ in range(100):
        run()
    gc.collect()
    before, files, resident = tracemalloc.get_traced_memory()[0], len(os.listdir("/proc/self/fd")), _resident()
    # Traced for a part only: tracing costs more than most of these calls.
    for _ in range(min(count // 20, 2_000)):
        run()
    gc.collect()
    traced = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    for _ in range(count):
        run()
    gc.collect()
    return {
        "calls": count,
        "traced": traced,
        "resident": _resident() - resident,
        "files": len(os.listdir("/proc/self/fd")) - files,
    }


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def calls() -> dict:
    """Each wrapper around a function that does nothing: served, declined and passed through."""
    for name in ("flash_attn_varlen_fp8_pertensor_func", "mha_batch_prefill_func", "paged_attention_ragged"):
        _cheap(name)
    # With what SGLang itself needs on a CPU, so before it.
    from recording import counters, forget, harness  # isort: split
    import sglang.srt.layers.attention.aiter_backend as module
    import sglang.srt.layers.attention.attention_registry
    import sglang.srt.layers.attention.hybrid_linear_attn_backend  # noqa: F401
    from properties import harness_mode
    from wrappers import around, is_ours

    import sglang_aiter_ext

    def nothing(*args, **kwargs):
        return None

    out = {}
    stack = harness.Stack(backend="aiter", layers=2, full_interval=2, k_scale=0.5, v_scale=2.0)
    stack.grow({1: 20})
    (layer,) = stack.layers.values()
    backend, batch = stack.backend.full_attn_backend, stack._forward_batch([1], [4], harness_mode("EXTEND"))
    backend.init_forward_metadata(batch)
    metadata, q = backend.forward_metadata, OUT
    cache = stack.token_to_kv_pool.get_kv_buffer(layer.layer_id)
    given = (q, *cache, backend.qo_indptr[:2], metadata.kv_indptr, metadata.kv_indices, 4, 24)
    paged = around("aiter_backend.mha_batch_prefill_func", nothing)
    extend = around("AiterAttnBackend.forward_extend", lambda *args, **kwargs: paged(*given), True)
    forget()
    out["forward_extend, served"] = measure(lambda: extend(backend, q, q, q, layer, batch), CALLS)
    served = counters().get("asm_context_prefill")
    assert served is None or served.keys() == {"asm"}, served
    out["forward_extend, internal error"] = measure(lambda: extend(backend, q, q, q, object(), batch), CALLS)
    out["forward_extend, declined"] = measure(lambda: extend(backend, q, q, q, layer, batch, sinks=q), CALLS)
    if paged is not nothing:
        out["the paged kernel"] = measure(lambda: paged(*given), CALLS)
    if is_ours(module.is_gfx95_supported):
        out["is_gfx95_supported"] = measure(around("aiter_backend.is_gfx95_supported", nothing), CALLS)
        layer.tp_q_head_num = 6
        out["forward_extend, head ratio"] = measure(lambda: extend(backend, q, q, q, layer, batch), CALLS)
        layer.tp_q_head_num = 8
    if hasattr(module, "_asm_context_prefill_gather_indices"):
        build = around("_asm_context_prefill_gather_indices", nothing)
        arguments = (metadata.kv_indptr, metadata.kv_indices, batch.seq_lens, 24)
        extend = around("AiterAttnBackend.forward_extend", lambda *args, **kwargs: build(*arguments), True)
        out["gather indices"] = measure(lambda: extend(backend, q, q, q, layer, batch), CALLS)

    stack = harness.Stack(backend="triton", layers=2, full_interval=2, k_scale=0.5, v_scale=2.0)
    stack.grow({1: 20})
    (layer,) = stack.layers.values()
    batch = stack._forward_batch([1], [1], harness_mode("DECODE"))
    kernel = around("aiter_backend.paged_attention_ragged", nothing)
    decode = around("HybridLinearAttnBackend.forward_decode", lambda *args, **kwargs: kernel(*range(17)), True)
    new = torch.zeros(1, 1, 256, dtype=torch.bfloat16)
    out["forward_decode, served"] = measure(
        lambda: decode(stack.backend, layer, batch, True, q, new, new, None, None, None, q_rope=None), CALLS
    )
    refused = refusing(decode, stack.backend, layer, batch, True, q, new, new, sinks=q)
    out["forward_decode, refused"] = measure(refused, CALLS)
    linear = types.SimpleNamespace(layer_id=0)
    out["forward_decode, linear"] = measure(lambda: decode(stack.backend, linear, batch, True, q, new, new), CALLS)
    out["the decode kernel"] = measure(lambda: kernel(*range(17)), CALLS)
    build = around("attention_registry.attn_backend_wrapper", lambda runner, full_attn_backend: None)
    stack.runner.is_draft_worker = True
    out["attn_backend_wrapper, left alone"] = measure(
        lambda: build(stack.runner, stack.backend.full_attn_backend), CALLS
    )
    stack.runner.is_draft_worker = False
    out["attn_backend_wrapper, routed"] = measure(
        lambda: build(stack.runner, stack.backend.full_attn_backend.prefill_backend), 300, 50
    )
    os.environ["SGLANG_USE_AITER_PA"] = "2"
    refused = refusing(build, stack.runner, stack.backend.full_attn_backend)
    out["attn_backend_wrapper, refused"] = measure(refused, CALLS)
    out["activate"] = measure(sglang_aiter_ext.activate, CALLS)
    return out


def refusing(function, *args, **kwargs):
    """A call that must raise what this package raises on purpose."""
    from sglang_aiter_ext.errors import Refusal, SettingError

    def call():
        try:
            function(*args, **kwargs)
        except (Refusal, SettingError):
            return
        raise AssertionError("nothing was refused")

    return call


def building() -> dict:
    """The wrapper around AiterAttnBackend.__init__, with a pool whose layer 0 is asked for."""
    from recording import counters, harness  # isort: split
    import sglang.srt.layers.attention.aiter_backend  # noqa: F401
    from wrappers import around

    stack = harness.Stack(backend="aiter", layers=2, full_interval=2, fp8=False, build=False)
    asked = lambda self, runner: runner.token_to_kv_pool.get_value_buffer(0).shape[-1]  # noqa: E731
    init = around("AiterAttnBackend.__init__", asked, True)
    holder = types.SimpleNamespace()
    assert init(holder, stack.runner) == stack.head_dim and counters()["v_head_dim"] == {"asked_pool": 1}
    return {"__init__": measure(lambda: init(holder, stack.runner), CALLS)}


def batches() -> dict:
    """Real batches of a few tokens, each with metadata and a plan of its own, which die with it."""
    from recording import harness  # isort: split
    import sglang.srt.layers.attention.aiter_backend as module
    from properties import harness_mode, write_rows

    if hasattr(module, "launch_reshape_and_cache_flash"):
        module.launch_reshape_and_cache_flash = write_rows
    out = {}
    for name, mode, tokens in (("prefill", "EXTEND", 2), ("decode", "DECODE", 1)):
        stack = harness.Stack(backend="aiter", layers=2, full_interval=2, k_scale=0.5, v_scale=2.0, q_heads=1)
        stack.grow({1: 20})
        (layer,) = stack.layers.values()
        backend, free, made, alive = stack.backend.full_attn_backend, list(stack._free_pages), weakref.WeakSet(), []
        q, rows = OUT[:tokens, :256].clone(), OUT[:tokens, :256].view(tokens, 1, 256)

        def one():
            stack.seq_lens[1], stack._free_pages = 20, free.copy()
            batch = stack._forward_batch([1], [tokens], harness_mode(mode))
            backend.init_forward_metadata(batch)
            stack.backend.forward(q, rows.clone(), rows.clone(), layer, batch)
            for thing in (batch, getattr(backend.forward_metadata, "_sglang_aiter_ext_plan", None)):
                if thing is not None:
                    alive.append(weakref.ref(thing))
            alive.append(weakref.ref(backend.forward_metadata))
            if len(alive) > 300:
                # All but the last batch's are gone.
                made.update(x for x in (ref() for ref in alive[:-6]) if x is not None)
                del alive[:]

        with torch.no_grad():
            out[name] = {**measure(one, BATCHES // 2, 300), "survivors": len(made)}
    return out
