"""A plain PyTorch reference of the AITER functions SGLang's attention backends call.

Put `tests/reference` on `PYTHONPATH` and `import aiter` gives this package. It keeps
AITER's names, parameters and strictness, runs on any device PyTorch knows, and computes
in float32. It is neither fast nor an AMD kernel: nothing measured with it says anything
about AITER. `CALLS` counts each kernel's calls, `BEFORE_CALL` hooks see them first.

Where the real kernels would read out of bounds or end the process, this raises. Values
that live on a GPU are not looked at while a CUDA graph is captured.
"""

from __future__ import annotations

import collections
import inspect

import torch

REFERENCE = True
CALLS: collections.Counter[str] = collections.Counter()
BEFORE_CALL: list = []

#: Query-to-KV head ratios the gfx950 fp8 ASM kernels cover.
ASM_HEAD_RATIOS = (1, 2, 4, 8, 16)
ASM_HEAD_DIMS = (128, 256)
#: Head sizes that the divisions of the ragged decode kernel do not truncate, and the query heads a KV head up to
#: which it covers several KV heads.
DECODE_HEAD_DIMS = (64, 128, 256)
DECODE_HEAD_RATIO = 16
#: Entries past the end of a page table that the paged prefill kernel may read.
PREFETCHED_TABLE_ENTRIES = 256
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)


def _called(name: str, **arguments) -> None:
    CALLS[name] += 1
    for hook in BEFORE_CALL:
        hook(name, arguments)


def _require(condition: bool, message: str) -> None:
    if not condition:
        caller = inspect.stack()[2].function.lstrip("_")
        raise ValueError(f"aiter reference, {caller}: {message}")


def _values_visible(tensor: torch.Tensor) -> bool:
    return not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _check_cu_seqlens(name: str, cu: torch.Tensor, rows: int, longest: int) -> list[int]:
    _require(cu.dtype == torch.int32, f"{name} must be int32, not {cu.dtype}")
    _require(cu.dim() == 1 and cu.is_contiguous(), f"{name} must be one contiguous dimension")
    _require(isinstance(longest, int), f"the longest length of {name} must be a Python int")
    bounds = cu.tolist()
    lengths = [b - a for a, b in zip(bounds, bounds[1:])]
    _require(bounds[0] == 0 and min(lengths, default=0) >= 0, f"{name} must rise from 0: {bounds}")
    _require(bounds[-1] <= rows, f"{name} ends at {bounds[-1]}, past {rows} rows")
    _require(max(lengths, default=0) <= longest, f"{name} has a length over max_seqlen {longest}")
    return bounds


def _check_descale(name: str, scale: torch.Tensor | None, device: torch.device, shaped: bool = True) -> None:
    """Raises unless it is one float32 on `device`, of shape (1,) where the kernel's choice depends on the shape."""
    _require(torch.is_tensor(scale), f"{name} must be a tensor")
    _require(scale.dtype == torch.float32, f"{name} must be float32, not {scale.dtype}")
    _require(scale.numel() == 1 and scale.device == device, f"{name} must be one value on {device}")
    _require(not shaped or scale.shape == (1,), f"{name} must have the shape (1,), not {tuple(scale.shape)}")


def _float(x: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    x = x.to(torch.float32)
    return x if scale is None else x * scale.to(torch.float32)


def _attend(q, k, v, scale, causal, window, softcap, sinks):
    """One request in float32: q [Lq, Hq, D], k [Lk, Hkv, D], v [Lk, Hkv, Dv] -> [Lq, Hq, Dv]."""
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, dim=1)
    v = v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(q.shape[0], device=q.device)[:, None] + (k.shape[0] - q.shape[0])
    j = torch.arange(k.shape[0], device=q.device)[None]
    hidden = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool, device=q.device)
    if causal:
        hidden |= j > i
    if window[0] >= 0:
        hidden |= j < i - window[0]
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        column = sinks.to(torch.float32)[:, None, None].expand(-1, q.shape[0], 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights.nan_to_num(0.0), v)


def _output(q: torch.Tensor, v_head_dim: int, out: torch.Tensor | None) -> torch.Tensor:
    """Poisoned, so that a row nobody writes is seen."""
    if out is None:
        dtype = torch.bfloat16 if q.dtype in FP8 else q.dtype
        out = torch.empty(q.shape[0], q.shape[1], v_head_dim, dtype=dtype, device=q.device)
    return out.fill_(float("nan"))


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    min_seqlen_q=0, dropout_p=0.0, softmax_scale=None, logits_soft_cap=0.0, causal=False,
    window_size=(-1, -1), bias=None, alibi_slopes=None, deterministic=False, return_lse=False,
    return_attn_probs=False, how_v3_bf16_cvt=1, block_table=None, out=None,
    cu_seqlens_q_padded=None, cu_seqlens_k_padded=None,
):  # fmt: skip
    """Varlen attention on contiguous q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, Dv]."""
    _called("flash_attn_varlen_func", q=q, k=k, v=v)
    for name, value in (("bias", bias), ("alibi_slopes", alibi_slopes), ("block_table", block_table),
                        ("cu_seqlens_q_padded", cu_seqlens_q_padded),
                        ("cu_seqlens_k_padded", cu_seqlens_k_padded)):  # fmt: skip
        _require(value is None, f"{name} is not in the reference")
    _require(
        not (dropout_p or return_lse or return_attn_probs), "dropout, LSE and probabilities are not in the reference"
    )
    return _varlen(q, k, v, None, None, None, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                   softmax_scale, logits_soft_cap, causal, window_size, out)  # fmt: skip


def flash_attn_varlen_fp8_pertensor_func(
    q, k, v, q_descale, k_descale, v_descale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
    min_seqlen_q=0, logits_soft_cap=0.0, causal=False, window_size=(-1, -1, 0), softmax_scale=None,
    sink_ptr=None,
):  # fmt: skip
    """The fp8 ASM kernel: q [Tq, Hq, D], k and v [Tk, Hkv, D], all fp8 -> bf16 [Tq, Hq, D]."""
    _called("flash_attn_varlen_fp8_pertensor_func", q=q, k=k, v=v, q_descale=q_descale,
            k_descale=k_descale, v_descale=v_descale, cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
            softmax_scale=softmax_scale)  # fmt: skip
    _require(
        q.dtype in FP8 and q.dtype == k.dtype == v.dtype,
        f"q, k, v must share an fp8 dtype, not {q.dtype}, {k.dtype}, {v.dtype}",
    )
    _require(
        q.shape[-1] == k.shape[-1] == v.shape[-1] and q.shape[-1] in ASM_HEAD_DIMS,
        f"head_dim {q.shape[-1]}, {k.shape[-1]}, {v.shape[-1]} is not covered",
    )
    _require(k.shape[1] == v.shape[1], "K and V must have as many heads")
    _require(k.stride() == v.stride(), f"V is read with the strides of K, {k.stride()}, not {v.stride()}")
    _require(
        q.shape[1] % k.shape[1] == 0 and q.shape[1] // k.shape[1] in ASM_HEAD_RATIOS,
        f"{q.shape[1]} query heads over {k.shape[1]} KV heads is not covered",
    )
    _require(
        causal and not logits_soft_cap and tuple(window_size)[:2] == (-1, -1) and sink_ptr is None,
        "only plain causal attention is covered",
    )
    for name, scale in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
        _check_descale(name, scale, q.device)
    return _varlen(q, k, v, q_descale, k_descale, v_descale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
                   max_seqlen_k, softmax_scale, 0.0, causal, (-1, -1), None)  # fmt: skip


def _varlen(q, k, v, q_descale, k_descale, v_descale, cu_q, cu_k, max_q, max_k, scale, softcap, causal,
            window, out):  # fmt: skip
    for name, x in (("q", q), ("k", k), ("v", v)):
        _require(x.dim() == 3 and x.stride(-1) == 1, f"{name} must be 3-D with a contiguous last dimension")
    q_bounds = _check_cu_seqlens("cu_seqlens_q", cu_q, q.shape[0], max_q)
    k_bounds = _check_cu_seqlens("cu_seqlens_k", cu_k, k.shape[0], max_k)
    _require(len(q_bounds) == len(k_bounds), "cu_seqlens_q and cu_seqlens_k differ in length")
    out = _output(q, v.shape[-1], out)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    for (a, b), (c, d) in zip(zip(q_bounds, q_bounds[1:]), zip(k_bounds, k_bounds[1:])):
        if b > a:
            _require(d - c >= b - a or not causal, "a causal request has more queries than keys")
            out[a:b] = _attend(_float(q[a:b], q_descale), _float(k[c:d], k_descale), _float(v[c:d], v_descale),
                               scale, causal, window, softcap, None).to(out.dtype)  # fmt: skip
    return out


def mha_batch_prefill_func(
    q, k, v, cu_seqlens_q, kv_indptr, kv_page_indices, max_seqlen_q, max_seqlen_k,
    dropout_p=0.0, softmax_scale=None, logits_soft_cap=0.0, causal=False, window_size=(-1, -1),
    alibi_slopes=None, deterministic=False, return_lse=False, return_attn_probs=False, out=None,
    kv_last_page_lens=None, block_table=None, seqlen_k=None, q_descale=None, k_descale=None,
    v_descale=None, kv_block_descale=None, sink_ptr=None, sink_size=0,
):  # fmt: skip
    """The paged prefill kernel over a token-level table: k and v are [slots, Hkv, D].

    Reads `PREFETCHED_TABLE_ENTRIES` entries past the end of the table, as the real one does.
    """
    _called("mha_batch_prefill_func", q=q, k=k, v=v, cu_seqlens_q=cu_seqlens_q, kv_indptr=kv_indptr,
            kv_page_indices=kv_page_indices, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k,
            q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, causal=causal, softmax_scale=softmax_scale,
            logits_soft_cap=logits_soft_cap, window_size=window_size, sink_ptr=sink_ptr)  # fmt: skip
    for name, value in (("alibi_slopes", alibi_slopes), ("kv_last_page_lens", kv_last_page_lens),
                        ("block_table", block_table), ("seqlen_k", seqlen_k),
                        ("kv_block_descale", kv_block_descale)):  # fmt: skip
        _require(value is None, f"{name} is not in the reference")
    _require(
        not (dropout_p or return_lse or return_attn_probs), "dropout, LSE and probabilities are not in the reference"
    )
    _require(k.dim() == 3 and v.dim() == 3, "K and V must be [slots, heads, head_dim]")
    _require(k.stride(-1) == 1 and v.stride(-1) == 1, "K and V need a contiguous last dimension")
    _require(kv_page_indices.dtype == torch.int32, f"kv_page_indices must be int32, not {kv_page_indices.dtype}")
    _require(q.shape[1] % k.shape[1] == 0, "query heads must be a multiple of KV heads")
    _require(q.dtype == k.dtype == v.dtype, f"q, k, v must share a dtype, not {q.dtype}, {k.dtype}, {v.dtype}")
    for name, scale in (("q_descale", q_descale), ("k_descale", k_descale), ("v_descale", v_descale)):
        if q.dtype in FP8 or scale is not None:
            _check_descale(name, scale, q.device, shaped=False)
    q_bounds = _check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, q.shape[0], max_seqlen_q)
    kv_bounds = _check_cu_seqlens("kv_indptr", kv_indptr, kv_page_indices.shape[0], max_seqlen_k)
    touched = kv_page_indices[: kv_bounds[-1] + PREFETCHED_TABLE_ENTRIES].long()
    _require(touched.shape[0] == kv_bounds[-1] + PREFETCHED_TABLE_ENTRIES, "kv_page_indices lacks its padding entries")
    _require(bool(((touched >= 0) & (touched < k.shape[0])).all()), "kv_page_indices points outside the pool")
    out = _output(q, v.shape[-1], out)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    for (a, b), (c, d) in zip(zip(q_bounds, q_bounds[1:]), zip(kv_bounds, kv_bounds[1:])):
        if b > a:
            slots = kv_page_indices[c:d].long()
            keys = _float(k.view(torch.uint8)[slots].view(k.dtype) if k.dtype in FP8 else k[slots], k_descale)
            values = _float(v.view(torch.uint8)[slots].view(v.dtype) if v.dtype in FP8 else v[slots], v_descale)
            out[a:b] = _attend(_float(q[a:b], q_descale), keys, values, scale, causal, window_size,
                               logits_soft_cap, sink_ptr).to(out.dtype)  # fmt: skip
    return out


def paged_attention_ragged(
    out, workspace_buffer, query, key_cache, value_cache, scale, kv_indptr, kv_page_indices,
    kv_last_page_lens, block_size, max_num_partitions, alibi_slopes, kv_cache_dtype, kv_cache_layout,
    logits_soft_cap, k_scale, v_scale, fp8_out_scale=None, partition_size=256, mtp=1,
):  # fmt: skip
    """Ragged paged decode: query [B, Hq, D], caches [slots, 1, Hkv, D] -> out [B, Hq, Dv].

    Captures into a CUDA graph: the number of keys looked at is `max_num_partitions *
    partition_size`, with a mask, never a length read back from the GPU.
    """
    _called("paged_attention_ragged", query=query, key_cache=key_cache, scale=scale, k_scale=k_scale,
            v_scale=v_scale, kv_indptr=kv_indptr, kv_page_indices=kv_page_indices,
            kv_cache_dtype=kv_cache_dtype, workspace_buffer=workspace_buffer)  # fmt: skip
    batch, heads, head_dim = query.shape
    _require(
        alibi_slopes is None and fp8_out_scale is None and mtp == 1,
        "alibi, fp8 output and mtp are not in the reference",
    )
    _require(
        block_size == 1 and key_cache.shape[1] == 1 and kv_cache_layout == "NHD",
        "only block size 1 in NHD is in the reference",
    )
    _require(head_dim == key_cache.shape[-1] == value_cache.shape[-1], "head_dim of Q, K and V must be one")
    _require(head_dim in DECODE_HEAD_DIMS, f"head_dim {head_dim} is not covered")
    kv_heads = key_cache.shape[2]
    _require(heads % kv_heads == 0, "query heads must be a multiple of KV heads")
    ratio = heads // kv_heads
    _require(
        ratio <= DECODE_HEAD_RATIO or (kv_heads == 1 and ratio % 2 == 0),
        f"{heads} query heads over {kv_heads} KV heads are not covered",
    )
    _require(query.dtype in (torch.bfloat16, torch.float16), f"query must be bf16 or fp16, not {query.dtype}")
    _require(
        query.stride(-1) == key_cache.stride(-1) == value_cache.stride(-1) == 1,
        "Q, K and V need a contiguous last dimension",
    )
    _require(query.stride(1) == head_dim, f"the heads of Q must lie {head_dim} apart, not {query.stride(1)}")
    _require(
        key_cache.stride() == value_cache.stride(),
        f"V is read with the strides of K, {key_cache.stride()}, not {value_cache.stride()}",
    )
    _require(kv_cache_dtype in ("auto", "fp8", "fp8_e4m3"), f"kv_cache_dtype {kv_cache_dtype!r}")
    is_fp8 = key_cache.dtype in FP8
    _require(is_fp8 == (kv_cache_dtype != "auto"), f"a {key_cache.dtype} cache with kv_cache_dtype {kv_cache_dtype!r}")
    for name, index in (("kv_indptr", kv_indptr), ("kv_page_indices", kv_page_indices)):
        _require(index.dtype == torch.int32 and index.is_contiguous(), f"{name} must be contiguous int32")
    _require(kv_indptr.shape[0] == batch + 1, f"kv_indptr has {kv_indptr.shape[0]} entries for {batch} requests")
    for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
        _check_descale(name, value, query.device, shaped=False)
    _require(isinstance(scale, float), "scale must be a Python float")
    needed = batch * heads * max_num_partitions * (head_dim * 4 + 8)
    _require(
        workspace_buffer.numel() * workspace_buffer.element_size() >= needed,
        f"the workspace is smaller than {needed} bytes",
    )
    longest = max_num_partitions * partition_size
    if _values_visible(query):
        bounds = _check_cu_seqlens("kv_indptr", kv_indptr, kv_page_indices.shape[0], longest)
        used = kv_page_indices[: bounds[-1]]
        _require(bool(((used >= 0) & (used < key_cache.shape[0])).all()), "kv_page_indices points outside the pool")
        longest = max((b - a for a, b in zip(bounds, bounds[1:])), default=0)
        workspace_buffer.fill_(255)
    starts = kv_indptr[:-1].long()
    lengths = kv_indptr[1:].long() - starts
    position = torch.arange(longest, device=query.device)
    valid = position[None] < lengths[:, None]
    entry = torch.where(valid, starts[:, None] + position[None], 0).clamp(max=kv_page_indices.shape[0] - 1)
    slots = torch.where(valid, kv_page_indices[entry].long(), 0)

    def rows(cache, descale):
        flat = cache.view(torch.uint8) if is_fp8 else cache
        picked = flat[slots, 0]
        picked = picked.view(cache.dtype) if is_fp8 else picked
        picked = _float(picked, descale if is_fp8 else None)
        # Slots that no request owns may hold anything, NaN included.
        return picked.masked_fill_(~valid[..., None, None], 0.0)

    grouped = query.to(torch.float32).view(batch, key_cache.shape[2], -1, head_dim)
    scores = torch.einsum("bhgd,bkhd->bhgk", grouped, rows(key_cache, k_scale)) * scale
    if logits_soft_cap:
        scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
    weights = torch.softmax(scores.masked_fill(~valid[:, None, None], float("-inf")), dim=-1).nan_to_num(0.0)
    out.copy_(torch.einsum("bhgk,bkhd->bhgd", weights, rows(value_cache, v_scale)).flatten(1, 2))
    return out


def _no_mla(name: str):
    def kernel(*args, **kwargs):
        raise NotImplementedError(f"aiter reference: {name} is an MLA kernel, and the reference has none")

    kernel.__name__ = name
    return kernel


get_mla_metadata_info_v1 = _no_mla("get_mla_metadata_info_v1")
get_mla_metadata_v1 = _no_mla("get_mla_metadata_v1")
get_ps_metadata_info_v1 = _no_mla("get_ps_metadata_info_v1")
get_ps_metadata_v1 = _no_mla("get_ps_metadata_v1")
mla_prefill_ps_asm_fwd = _no_mla("mla_prefill_ps_asm_fwd")
mla_reduce_v1 = _no_mla("mla_reduce_v1")
