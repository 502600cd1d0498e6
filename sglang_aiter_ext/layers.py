"""Questions about SGLang's layers and pools that several capabilities ask."""

from __future__ import annotations

from typing import Any


def is_vectorized_5d(pool: Any) -> bool:
    """Whether the KV pool, or one hidden inside a hybrid pool, has the `vectorized_5d` layout."""
    inner = getattr(pool, "full_kv_pool", None)
    return any(getattr(p, "kv_cache_layout", None) == "vectorized_5d" for p in (pool, inner) if p is not None)


#: Query-to-KV head ratios the gfx950 fp8 ASM kernels cover (sgl-project/sglang#38467).
HEAD_RATIOS = (1, 2, 4, 8, 16)


def covered_ratio(layer: Any) -> bool:
    """Whether the gfx950 fp8 ASM kernels cover the layer's ratio of query to KV heads."""
    heads, kv_heads = layer.tp_q_head_num, layer.tp_k_head_num
    return heads % kv_heads == 0 and heads // kv_heads in HEAD_RATIOS


def bind_extend(
    q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: Any = True, sinks: Any = None
) -> tuple[Any, Any, Any, Any, Any]:
    """(q, k, layer, batch, sinks) of a call of forward_extend, in any release.

    Raises TypeError for a call that forward_extend would not take either.
    """
    return q, k, layer, forward_batch, sinks


def has_window(layer: Any) -> bool:
    size = getattr(layer, "sliding_window_size", None)
    return size is not None and size > -1


def is_decoder(layer: Any) -> bool:
    """False for cross attention and encoder or bidirectional layers."""
    kind = getattr(layer, "attn_type", None)
    return not layer.is_cross_attention and getattr(kind, "value", "decoder") == "decoder"


def unit_scales(layer: Any) -> bool:
    """Whether both scales of the K/V cache are known on the host to be 1."""
    return all(
        getattr(layer, name, None) is None or getattr(layer, name + "_float", None) == 1.0
        for name in ("k_scale", "v_scale")
    )
