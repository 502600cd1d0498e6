"""AITER's unified attention, in plain PyTorch."""

from aiter import _attend, _called, _float, _output, _require


def unified_attention(
    q, k, v, out, cu_seqlens_q, max_seqlen_q, seqused_k, max_seqlen_k, softmax_scale, causal, window_size,
    block_table, softcap, q_descale, k_descale, v_descale, q_scales=None, alibi_slopes=None,
    output_scale=None, qq_bias=None, sinks=None, shuffled_kv_cache=False, skip_reduce=False,
):  # fmt: skip
    """q [Tq, Hq, D] over k and v [pages, page_size, Hkv, D] and a page table [B, max_pages]."""
    _called("unified_attention", q=q, k=k, block_table=block_table, softmax_scale=softmax_scale)
    for name, value in (("q_scales", q_scales), ("alibi_slopes", alibi_slopes), ("output_scale", output_scale),
                        ("qq_bias", qq_bias)):  # fmt: skip
        _require(value is None, f"{name} is not in the reference")
    _require(causal and not shuffled_kv_cache and not skip_reduce, "only causal attention over the plain layout")
    _output(q, v.shape[-1], out)
    bounds = cu_seqlens_q.tolist()
    page_size = k.shape[1]
    for row, ((a, b), length) in enumerate(zip(zip(bounds, bounds[1:]), seqused_k.tolist())):
        if b > a:
            pages = block_table[row, : -(-length // page_size)].long()
            keys = _float(k[pages], k_descale).flatten(0, 1)[:length]
            values = _float(v[pages], v_descale).flatten(0, 1)[:length]
            out[a:b] = _attend(_float(q[a:b], q_descale), keys, values, softmax_scale, causal, window_size,
                               softcap, sinks).to(out.dtype)  # fmt: skip
    return out
