"""Decode of a hybrid model whose prefill backend is Triton."""

from __future__ import annotations

from recording import Logs, Trace, counters, digest, forget, harness, torch


def steps() -> list[dict]:
    """Prefill in chunks, then decode steps, with linear layers between."""
    rows = []
    # Linear layers take most of the time in Triton's interpreter, and know neither scales nor pages: two cases have them.
    for page_size, fp8, k_scale, v_scale, scaling, linear in (
        (1, True, None, None, None, True), (16, True, 1.0, 1.0, None, False), (16, True, 0.5, 2.0, 0.03, False),
        (64, True, 0.0371, 1.7, None, False), (16, False, None, None, None, True), (1, False, 0.5, 2.0, 0.1, False),
    ):  # fmt: skip
        stack = harness.Stack(
            backend="triton",
            page_size=page_size,
            fp8=fp8,
            k_scale=k_scale,
            v_scale=v_scale,
            scaling=scaling,
            linear=linear,
            layers=2,
            full_interval=2,
        )
        row = {"case": [page_size, fp8, k_scale, v_scale, scaling], "batches": [], "backend": describe(stack.backend)}
        forget()
        for lengths in ({1: 20, 2: 37}, {1: 5, 2: 40, 3: 9}):
            row["batches"].append(batch("prefill", stack, lambda lengths=lengths: stack.extend(lengths)))
        for requests in ([1, 2, 3], [3, 1], [1, 2, 3]):
            row["batches"].append(batch("decode", stack, lambda requests=requests: stack.decode(requests)))
        row["counters"] = counters()
        rows.append(row)
    return rows


def batch(phase, stack, run) -> dict:
    with Trace() as trace:
        result = run()
    return {
        "phase": phase, "kernels": trace.kernels, "error": result.error(),
        "outputs": [digest(x) for x in result.outputs.values()], "linear": [digest(x) for x in result.linear.values()],
        "finite": all(bool(x.isfinite().all()) for x in result.linear.values()),
    }  # fmt: skip


def describe(backend) -> dict:
    full = backend.full_attn_backend
    return {
        "hybrid": type(backend).__name__, "full": type(full).__name__, "linear": type(backend.linear_attn_backend).__name__,
        "prefill": type(getattr(full, "prefill_backend", full)).__name__,
        "decode": type(getattr(full, "decode_backend", full)).__name__,
    }  # fmt: skip


def arguments() -> dict:
    """What models pass beyond q, k and v."""
    stack = harness.Stack(backend="triton", linear=True)
    stack.grow({1: 20, 2: 5})
    out = {}
    forget()
    result = stack.decode([1, 2], q_rope=None, k_rope=None)
    out["none"] = {"counters": counters()["decode_pa"], "error": result.error()}
    for name, value in (("q_rope", torch.zeros(2)), ("sinks", torch.zeros(stack.q_heads)), ("topk_indices", [1])):
        try:
            stack.decode([1, 2], **{name: value})
            out[name] = "no error"
        except Exception as error:
            out[name] = f"{type(error).__name__}: {error}"
    return out


def attributes() -> dict:
    """Every attribute the chosen backend has is still there, and nothing else appears."""
    stack = harness.Stack(backend="triton")
    router = stack.backend.full_attn_backend
    chosen = getattr(router, "prefill_backend", router)
    missing = [name for name in dir(chosen) if not hasattr(router, name)]
    try:
        router.no_such_attribute
        absent = "found"
    except AttributeError:
        absent = "AttributeError"
    return {"missing": missing, "absent": absent, "hasattr": hasattr(router, "no_such_attribute"),
            "name": type(router).__name__}  # fmt: skip


def left_alone() -> dict:
    """Runners whose backends must stay as they are: what was built, and what was logged."""
    logs = Logs()
    out = {}

    def case(name, before_build=None, **options):
        forget()
        logs.take()
        stack = harness.Stack(before_build=before_build, **{"backend": "triton", **options})
        full = getattr(stack.backend, "full_attn_backend", None)
        out[name] = {"full": type(full).__name__, "logs": logs.take()}

    def layers(**attributes):
        return lambda stack: [setattr(x, k, v) for x in stack.layers.values() for k, v in attributes.items()]

    def sinks(stack):
        stack.runner.model.layers[0].register_parameter("sinks", torch.nn.Parameter(torch.zeros(2)))

    case("routed")
    case("aiter_already", backend="aiter")
    stack = harness.Stack(backend="aiter", k_scale=0.5, v_scale=2.0, scaling=0.03)
    stack.grow({1: 20})
    out["own_aiter"] = {"error": stack.decode([1]).error(), "counters": counters().get("decode_pa")}
    try:
        stack.decode([1], sinks=torch.zeros(stack.q_heads))
        out["own_aiter"]["sinks"] = "as without us"
    except Exception as error:
        out["own_aiter"]["sinks"] = f"{type(error).__name__}: {error}"
    case("draft_worker", lambda s: s.runner.__dict__.update(is_draft_worker=True))
    case("sliding_window", layers(sliding_window_size=64))
    case("cross_attention", layers(is_cross_attention=True))
    case("v_head_dim", layers(v_head_dim=128))
    case("sinks", sinks)
    case("vectorized_5d", lambda s: setattr(s.token_to_kv_pool.full_kv_pool, "kv_cache_layout", "vectorized_5d"))
    case("kv_cache_dtype", lambda s: s.runner.__dict__.update(kv_cache_dtype=torch.float8_e5m2))
    case(
        "speculative",
        lambda s: s.server_args.__dict__.update(speculative_algorithm="EAGLE", speculative_attention_mode="decode"),
    )
    return out


def two_backends() -> dict:
    """Prefill and decode backends that the user chose apart."""
    out = {}
    for name, prefill, decode in (("other_decode", "triton", "torch_native"), ("aiter_decode", "triton", "aiter")):
        stack = harness.Stack(backend="triton", prefill_backend=prefill, decode_backend=decode)
        outer = stack.backend

        def names(backend):
            children = {
                side: names(getattr(backend, side))
                for side in ("full_attn_backend", "prefill_backend", "decode_backend") if side in vars(backend)
            }  # fmt: skip
            return {type(backend).__name__: children} if children else type(backend).__name__

        with Trace() as trace:
            stack.grow({1: 20})
            result = stack.decode([1])
        out[name] = {"tree": names(outer), "kernels": trace.kernels, "error": result.error()}
    return out


def workspaces() -> dict:
    """Several backends of one runner share one decode workspace."""
    stack = harness.Stack(backend="triton")
    sizes, empty = [], torch.empty

    def counting(*shape, **options):
        alive = [b for b in stack.runner._sglang_aiter_ext_runner.backends if b.workspace_buffer is not None]
        if options.get("dtype") is torch.uint8:
            sizes.append(len(alive))
        return empty(*shape, **options)

    torch.empty = counting
    others = [stack.build_backend() for _ in range(2)]
    torch.empty = empty
    buffers = [b.full_attn_backend.decode_backend.workspace_buffer for b in (stack.backend, *others)]
    from sglang_aiter_ext.capabilities.decode_pa import building

    mixed = harness.Stack(backend="triton", prefill_backend="aiter", decode_backend="triton")
    own = {b.data_ptr() for b in workspaces_of(mixed.backend)}
    mixed.grow({1: 20})
    result = mixed.decode([1])
    return {"alive_while_allocating": sizes, "prefill_aiter": len(own), "prefill_aiter_error": result.error(), "storages": len({b.data_ptr() for b in buffers}), "bytes": buffers[0].numel(),
            "expected": building.workspace_bytes(stack.runner)}  # fmt: skip


def workspaces_of(backend):
    if hasattr(backend, "workspace_buffer") and "workspace_buffer" in vars(backend):
        yield backend.workspace_buffer
    for name in ("full_attn_backend", "prefill_backend", "decode_backend"):
        if name in vars(backend):
            yield from workspaces_of(vars(backend)[name])


def memory() -> dict:
    """The workspace check: what it says when the GPU's memory is too small, and when it is not."""
    from sglang_aiter_ext.capabilities.decode_pa import building

    stack = harness.Stack(backend="triton", build=False)
    runner = stack.runner
    out = {}
    torch.cuda.empty_cache = lambda: None
    for name, free in (("small", 1000), ("large", 1 << 40)):
        torch.cuda.mem_get_info = lambda free=free: (free, 1 << 40)
        runner.device = "cuda"
        try:
            building.check_memory(runner)
            out[name] = "fits"
        except Exception as error:
            out[name] = f"{type(error).__name__}: {error}"
    out["needed"] = building.workspace_bytes(runner)
    return out


def graph_buffer() -> dict:
    """The buffer `init_cuda_graph_state` gets: entries for every token of every request."""
    out = {}
    for page_size in (1, 16):
        stack = harness.Stack(backend="triton", page_size=page_size)
        decode = stack.backend.full_attn_backend.decode_backend
        stack.backend.full_attn_backend.init_cuda_graph_state(4, 4)
        out[str(page_size)] = {"entries": decode.cuda_graph_kv_indices.numel(), "needed": 4 * stack.context_len}
    return out


def fp8_refusal() -> dict:
    """An fp8 KV cache where the release casts it whole, and a bf16 one."""
    logs = Logs()
    out = {}
    for name, fp8 in (("fp8", True), ("bf16", False)):
        forget()
        logs.take()
        stack = harness.Stack(backend="triton", fp8=fp8)
        built = describe(stack.backend)
        lines = logs.take()
        stack.grow({1: 20, 2: 5})
        with Trace() as trace:
            result = stack.decode([1, 2])
        out[name] = {"backend": built, "logs": lines, "kernels": trace.kernels, "error": result.error()}
    return out
