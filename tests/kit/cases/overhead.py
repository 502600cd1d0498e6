"""Host cost of the wrappers, around methods that do nothing."""

from __future__ import annotations

import statistics
import time

from recording import harness, torch
from wrappers import around

CALLS = 2000


def microseconds(call) -> float:
    rounds = []
    for _ in range(30):
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        rounds.append((time.perf_counter() - began) / CALLS * 1e6)
    return statistics.median(rounds)


def wrappers() -> dict:
    """name -> (wrapped, plain), microseconds a call."""
    import sglang.srt.layers.attention.aiter_backend as aiter_backend
    import sglang.srt.layers.attention.hybrid_linear_attn_backend as hybrid

    out = {}
    stack = harness.Stack(backend="aiter", fp8=False)
    stack.grow({1: 20})
    batch = stack._forward_batch([1], [4], _mode("EXTEND"))
    layer = next(iter(stack.layers.values()))
    q = torch.zeros(4, layer.tp_q_head_num * 256, dtype=torch.bfloat16)
    backend = stack.backend.full_attn_backend
    backend.init_forward_metadata(batch)
    out["forward_extend that declines"] = measure(
        aiter_backend.AiterAttnBackend, "forward_extend", backend, (q, q, q, layer, batch)
    )

    stack = harness.Stack(backend="triton")
    stack.grow({1: 20})
    batch = stack._forward_batch([1], [1], _mode("DECODE"))
    layer = next(iter(stack.layers.values()))
    out["forward_decode, full attention"] = measure(
        hybrid.HybridLinearAttnBackend, "forward_decode", stack.backend, (layer, batch, True, q, q, q, None, None, None)
    )
    linear = type("Linear", (), {"layer_id": 0})()
    out["forward_decode, linear"] = measure(
        hybrid.HybridLinearAttnBackend,
        "forward_decode",
        stack.backend,
        (linear, batch, True, None, None, None, q, q, q),
    )
    return out


def _mode(name):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return getattr(ForwardMode, name)


def measure(cls, name, instance, args) -> tuple[float, float]:
    """The installed wrappers of a method, around one that does nothing, called on a real instance."""

    def nothing(self, *args, **kwargs):
        return None

    kept = cls.__dict__[name]
    try:
        setattr(cls, name, nothing)
        call = getattr(instance, name)
        plain = microseconds(lambda: call(*args))
        setattr(cls, name, around(f"{cls.__name__}.{name}", nothing, method=True))
        call = getattr(instance, name)
        return microseconds(lambda: call(*args)), plain
    finally:
        setattr(cls, name, kept)
