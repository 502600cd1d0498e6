"""Questions about SGLang's layers, batches and pools that several capabilities ask."""

from typing import Any, NamedTuple

from ..aiter_kernels import HEAD_RATIOS
from ..capability import Args, Kwargs


def is_vectorized_5d(pool: Any) -> bool:
    """Whether the KV pool, or one hidden inside a hybrid pool, has the `vectorized_5d` layout."""
    inner = getattr(pool, "full_kv_pool", None)
    return any(getattr(p, "kv_cache_layout", None) == "vectorized_5d" for p in (pool, inner) if p is not None)


def covered_ratio(layer: Any) -> bool:
    """Whether the gfx950 fp8 ASM kernels cover the layer's ratio of query to KV heads."""
    heads, kv_heads = layer.tp_q_head_num, layer.tp_k_head_num
    return heads % kv_heads == 0 and heads // kv_heads in HEAD_RATIOS


class Extend(NamedTuple):
    """The arguments of a call of forward_extend, in any release."""

    q: Any
    k: Any
    v: Any
    layer: Any
    forward_batch: Any
    save_kv_cache: Any = True
    sinks: Any = None


def bind_extend(args: Args, kwargs: Kwargs) -> Extend | None:
    """The arguments by name; None for a call that forward_extend would not take either."""
    try:
        return Extend(*args, **kwargs)
    except TypeError:
        return None


def has_window(layer: Any) -> bool:
    """Whether the layer has a sliding window."""
    size = getattr(layer, "sliding_window_size", None)
    return size is not None and size > -1


def is_decoder(layer: Any) -> bool:
    """Whether the layer is causal self-attention: neither cross attention nor an encoder's."""
    kind = getattr(layer, "attn_type", None)
    return not layer.is_cross_attention and getattr(kind, "value", "decoder") == "decoder"


def unit_scales(layer: Any) -> bool:
    """Whether the host knows that both scales of the layer's K/V cache are 1."""
    return all(
        getattr(layer, name, None) is None or getattr(layer, name + "_float", None) == 1.0
        for name in ("k_scale", "v_scale")
    )
