"""Chunked prefill on the AITER backend."""

from __future__ import annotations

import hashlib

import aiter
from recording import Logs, Trace, counters, forget, harness, torch

MIXES = {
    1: [{1: 37}, {1: 64}, {1: 1}],
    3: [{1: 20, 2: 37}, {1: 5, 2: 40, 3: 9}, {3: 16, 2: 1, 1: 31}],
    8: [{r: 3 + 7 * r for r in range(1, 9)}, {r: 40 - 4 * r for r in range(1, 9)}, {8: 17, 2: 1, 5: 33}],
}
SCALES = [(1.0, 1.0), (0.0371, 1.7)]


def chunked() -> list[dict]:
    """Page sizes, scales and request mixes: errors, kernels and the pool's bytes of every batch."""
    rows = []
    for page_size in (1, 16, 64):
        for scales in SCALES:
            for requests, batches in MIXES.items():
                stack = harness.Stack(page_size=page_size, k_scale=scales[0], v_scale=scales[1], seed=requests)
                for number, lengths in enumerate(batches):
                    with Trace() as trace:
                        result = stack.extend(lengths)
                    rows.append({
                        "page_size": page_size, "scales": scales, "requests": requests, "batch": number,
                        "kernels": trace.kernels, "error": result.error(), "fp8_error": result.error(fp8_queries=True),
                        "pool": hashlib.sha256(stack.pool_bytes()).hexdigest(),
                        "args": trace.calls,
                    })  # fmt: skip
    return rows


def saturation() -> dict:
    """Queries far beyond 448, and a scaling other than 1/sqrt(head_dim)."""
    out = {}
    for name, gain, scaling in (("queries", 300.0, 1e-4), ("scaling", 1.0, 0.02)):
        stack = harness.Stack(scaling=scaling, k_scale=0.5, v_scale=2.0)
        stack.grow({1: 50})
        with Trace() as trace:
            result = stack.extend({1: 20}, q_gain=gain)
        out[name] = {"kernels": trace.kernels, "fp8_error": result.error(fp8_queries=True),
                     "largest": max(float(q.abs().max()) for q in result.queries.values())}  # fmt: skip
    return out


def several_layers() -> dict:
    """Four full-attention layers: one plan a batch, and none that outlives it."""
    from sglang_aiter_ext.capabilities.asm_context_prefill import decision

    plans = []
    original = decision.plan_batch
    decision.plan_batch = lambda *args: plans.append(1) or original(*args)
    stack = harness.Stack(layers=8, full_interval=2)
    stack.grow({1: 33, 2: 20, 3: 33, 4: 20})
    out = {"plans": [], "errors": [], "asm": []}
    # The second batch has the shape of the first and other slots.
    for lengths in ({1: 7, 2: 9}, {3: 7, 4: 9}):
        plans.clear()
        forget()
        result = stack.extend(lengths)
        out["plans"].append(len(plans))
        out["errors"].append(result.error(fp8_queries=True))
        out["asm"].append(counters().get("asm_context_prefill", {}).get("asm", 0))
    full = stack.backend.full_attn_backend
    import gc
    import weakref

    plan = weakref.ref(full.forward_metadata._sglang_aiter_ext_plan)
    full.forward_metadata = None
    out["plan_gone"] = plan() is None
    gc.collect()
    return out


def guards() -> dict:
    """Each guard: what the kernels were called with, what was counted and logged, twice over."""
    import sglang.srt.layers.attention.aiter_backend as aiter_backend

    logs = Logs()
    out = {}

    def case(name, *, setup=None, tamper=None, mode=None, undo=None, call=None, lengths=None, **stack_options):
        stack = harness.Stack(**stack_options)
        stack.grow({1: 40, 2: 17})
        if setup:
            setup(stack)
        forget()
        logs.take()
        with Trace() as trace:
            for lengths_now in (lengths or {1: 6, 2: 9}, lengths or {1: 3, 2: 4}):
                stack.run(lengths_now, mode, tamper=tamper, **(call(stack) if call else {}))
        if undo:
            undo()
        out[name] = {"calls": trace.calls, "counters": counters().get("asm_context_prefill"), "logs": logs.take()}

    def layers(**attributes):
        return lambda stack: [setattr(x, k, v) for x in stack.layers.values() for k, v in attributes.items()]

    def metadata(change):
        return lambda stack, batch: change(stack.backend.full_attn_backend.forward_metadata, batch)

    original = aiter_backend.is_gfx95_supported
    case("not_gfx950", setup=lambda s: setattr(aiter_backend, "is_gfx95_supported", lambda: False),
         undo=lambda: setattr(aiter_backend, "is_gfx95_supported", original))  # fmt: skip
    case("forward_mode", mode="SPLIT_PREFILL")
    case("kv_cache_dtype", fp8=False)
    case("activation_dtype", dtype=torch.float16)
    case("head_dim", head_dim=128)
    case("sliding_window", setup=layers(sliding_window_size=20))
    case("sinks", call=lambda s: {"sinks": torch.zeros(s.q_heads)})
    case("soft_cap", setup=layers(logit_cap=30.0))
    case("attention_type_cross", setup=layers(is_cross_attention=True),
         tamper=lambda s, batch: setattr(batch, "encoder_out_cache_loc", batch.out_cache_loc))  # fmt: skip
    from sglang.srt.layers.radix_attention import AttentionType

    case("attention_type", setup=layers(attn_type=AttentionType.ENCODER_ONLY))
    case("head_ratio", q_heads=24, kv_heads=4)
    case("vectorized_5d", setup=lambda s: setattr(s.token_to_kv_pool.full_kv_pool, "kv_cache_layout", "vectorized_5d"))
    case("no_tokens", tamper=lambda s, batch: setattr(batch, "extend_seq_lens_cpu", [0, 0]))
    case("lengths_mismatch", tamper=lambda s, batch: batch.extend_prefix_lens_cpu.__setitem__(0, 41))
    case("no_host_lengths", tamper=lambda s, batch: setattr(batch, "seq_lens_cpu", None))
    case(
        "table_mismatch",
        tamper=metadata(lambda m, b: setattr(m, "kv_indices", torch.cat([m.kv_indices, m.kv_indices[-1:]]))),
    )
    case("custom_mask", tamper=metadata(lambda m, b: setattr(m, "custom_mask", torch.ones(4))))

    def no_memory(*args):
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")

    tries = []

    def broken(name, arguments):
        if name == "flash_attn_varlen_fp8_pertensor_func":
            tries.append(name)
            raise RuntimeError("HIP error: invalid configuration")

    try:
        from sglang_aiter_ext.kernels import gather_kv
    except ImportError:
        gather_kv = harness
    kept = getattr(gather_kv, "gather_kv", None)
    case("out_of_memory", setup=lambda s: setattr(gather_kv, "gather_kv", no_memory),
         undo=lambda: setattr(gather_kv, "gather_kv", kept), layers=8, full_interval=2)  # fmt: skip
    case(
        "kernel_error",
        setup=lambda s: aiter.BEFORE_CALL.insert(0, broken),
        undo=lambda: aiter.BEFORE_CALL.remove(broken),
    )
    out["kernel_error"]["tries"] = len(tries)
    case("served")
    return out


def declined_first_chunks() -> dict:
    """First chunks at scales other than 1 that the ASM kernel does not serve: kernels, counters and errors."""
    from sglang_aiter_ext.kernels import gather_kv

    out = {}

    def case(name, lengths, mode=None, before=lambda: None, after=lambda: None, **stack_options):
        stack = harness.Stack(k_scale=0.5, v_scale=2.0, **stack_options)
        forget()
        before()
        with Trace() as trace:
            stack.run(lengths, mode)
        after()
        out[name] = {"kernels": trace.kernels, "counters": counters().get("asm_context_prefill")}

    def no_memory(*args):
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")

    def broken(name, arguments):
        if name == "flash_attn_varlen_fp8_pertensor_func":
            raise RuntimeError("HIP error: invalid configuration")

    kept = gather_kv.gather_kv
    case("forward_mode", {1: 5, 2: 8}, "SPLIT_PREFILL")
    case(
        "out_of_memory",
        {1: 9},
        None,
        lambda: setattr(gather_kv, "gather_kv", no_memory),
        lambda: setattr(gather_kv, "gather_kv", kept),
        layers=8,
        full_interval=2,
    )
    case(
        "kernel_error",
        {1: 9},
        None,
        lambda: aiter.BEFORE_CALL.insert(0, broken),
        lambda: aiter.BEFORE_CALL.remove(broken),
        layers=8,
        full_interval=2,
    )
    return out


def odd_batches() -> dict:
    """Host lengths as tensors or missing, one token, no saved K/V, shared K/V, scales of every form, padded queries."""
    out = {}

    def case(name, lengths, stack, **options):
        forget()
        with Trace() as trace:
            result = stack.extend(lengths, **options)
        out[name] = {
            "kernels": trace.kernels,
            "fp8_error": result.error(fp8_queries=True),
            "counters": counters().get("asm_context_prefill"),
        }

    def grown(lengths, **options):
        stack = harness.Stack(**options)
        stack.grow(lengths)
        return stack

    def tensors(stack, batch):
        batch.extend_prefix_lens_cpu = torch.tensor(batch.extend_prefix_lens_cpu)
        batch.extend_seq_lens_cpu = torch.tensor(batch.extend_seq_lens_cpu)

    case("tensor_lengths", {1: 5, 2: 7}, grown({1: 20, 2: 9}), tamper=tensors)
    case(
        "no_prefix_lengths",
        {1: 5, 2: 7},
        grown({1: 20, 2: 9}),
        tamper=lambda s, b: setattr(b, "extend_prefix_lens_cpu", None),
    )
    case("one_token", {1: 1}, grown({}))
    case("mixed", {1: 5, 2: 1}, grown({1: 20, 2: 9}), mode="MIXED")
    case("mixed_first_chunk", {1: 5, 2: 8}, grown({}, k_scale=0.5, v_scale=2.0), mode="MIXED")
    case("empty_first", {3: 0, 1: 5, 2: 7}, grown({1: 20, 2: 9}))
    case("empty_between", {1: 5, 3: 0, 2: 7}, grown({1: 20, 3: 11}))
    case("empty_last", {1: 5, 3: 0}, grown({1: 20}, k_scale=0.5, v_scale=2.0))
    for name, k_scale, v_scale in (("only_k", 0.5, None), ("only_v", None, 2.0)):
        case(name, {1: 5, 2: 7}, grown({1: 20}, k_scale=k_scale, v_scale=v_scale))
    stack = grown({1: 20}, k_scale=0.5, v_scale=2.0)
    for layer in stack.layers.values():
        layer.k_scale.data, layer.v_scale.data = layer.k_scale.data.double().reshape(1), layer.v_scale.data.bfloat16()
        layer.k_scale_float = layer.v_scale_float = None
    case("scale_forms", {1: 5, 2: 7}, stack)
    return out


def first_chunk_branch() -> dict:
    """A first chunk at unit scale and at others."""
    out = {}
    for name, scales in (("unit", (None, None)), ("one", (1.0, 1.0)), ("scaled", (0.5, 2.0))):
        stack = harness.Stack(k_scale=scales[0], v_scale=scales[1])
        forget()
        result = stack.extend({1: 30, 2: 7})
        out[name] = {"counters": counters().get("asm_context_prefill"), "fp8_error": result.error(fp8_queries=True)}
    return out
