"""Whether the ASM kernel covers a call: the layer and the kind of batch, the batch's lengths, and the paged call."""

import weakref
from typing import Any

from ...aiter_kernels import ASM_REACH, HEAD_DIM, HEAD_RATIOS
from ...kept import PLAN, Decline, Plan
from ..layers import covered_ratio, has_window, is_decoder, is_vectorized_5d

#: The entries that `AiterIndicesUpdaterPrefill` adds to the table, since the paged kernel reads past its end.
TABLE_PADDING = 256
#: Reasons that no batch and no model should meet.
FAULTS = ("internal_error", "kernel_error", "out_of_memory", "lengths_mismatch", "table_mismatch")


def decline(reason: str, message: str, *arguments: Any) -> Decline:
    return Decline(reason, message, arguments)


def check_layer(backend: Any, q: Any, layer: Any, batch: Any, sinks: Any) -> Decline | None:
    """Why the ASM kernel does not cover this layer and kind of batch. It looks at no tensor's values."""
    import torch

    mode = batch.forward_mode
    if mode.name not in ("EXTEND", "MIXED"):
        return decline("forward_mode", "forward mode %s is neither EXTEND nor MIXED", mode.name)
    if backend.kv_cache_dtype != torch.float8_e4m3fn:
        return decline("kv_cache_dtype", "the KV cache is %s, not float8_e4m3fn", backend.kv_cache_dtype)
    if q.dtype != torch.bfloat16 or backend.input_dtype != torch.bfloat16:
        return decline("activation_dtype", "activations are %s, not bfloat16", q.dtype)
    if backend.use_mla:
        return decline("mla", "MLA layers have kernels of their own")
    if layer.qk_head_dim != HEAD_DIM or layer.v_head_dim != HEAD_DIM:
        widths = layer.qk_head_dim, layer.v_head_dim, HEAD_DIM
        return decline("head_dim", "head_dim is %d for Q and K, %d for V, not %d", *widths)
    if has_window(layer):
        return decline("sliding_window", "the layer has a sliding window of %s", layer.sliding_window_size)
    if sinks is not None:
        return decline("sinks", "the layer has attention sinks")
    if layer.logit_cap:
        return decline("soft_cap", "the layer has a logit soft cap of %s", layer.logit_cap)
    if not is_decoder(layer):
        return decline("attention_type", "the layer is not causal self-attention")
    if layer.tp_k_head_num != layer.tp_v_head_num:
        return decline("kv_heads", "the layer has %d K heads and %d V heads", layer.tp_k_head_num, layer.tp_v_head_num)
    if not covered_ratio(layer):
        heads = layer.tp_q_head_num, layer.tp_k_head_num, HEAD_RATIOS
        return decline("head_ratio", "%d query heads over %d KV heads; the ASM kernels cover the ratios %s", *heads)
    if getattr(backend, "kv_cache_is_vectorized_5d", False) or is_vectorized_5d(pool_of(backend, batch)):
        return decline("vectorized_5d", "the KV cache has the vectorized_5d layout")
    return None


def pool_of(backend: Any, batch: Any) -> Any:
    """The KV pool, where the release keeps it: on the backend, or before 0.5.13 on the batch."""
    return getattr(backend, "token_to_kv_pool", None) or getattr(batch, "token_to_kv_pool", None)


def plan_for(backend: Any, batch: Any, q_rows: int) -> Plan:
    """The plan of this batch, which is made at its first layer and kept on its metadata."""
    metadata = backend.forward_metadata
    plan = PLAN.on(metadata)
    if plan is None or plan.batch() is not batch or plan.table is not metadata.kv_indices:
        plan = PLAN.keep(metadata, plan_batch(metadata, batch, q_rows))
    return plan


def plan_batch(metadata: Any, batch: Any, q_rows: int) -> Plan:
    """The pool slots of a batch, worked out from host lengths: nothing synchronises.

    The table in the metadata has one entry for each token, at any page size, and 256 more.
    """
    import torch

    plan = Plan(weakref.ref(batch), metadata.kv_indices)
    lengths = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, batch.seq_lens_cpu
    if any(length is None for length in lengths):
        plan.decline = decline("no_host_lengths", "the batch has no sequence lengths on the host")
        return plan
    prefix, extend, total = (n.tolist() if torch.is_tensor(n) else list(n) for n in lengths)
    plan.decline = _lengths_problem(metadata, batch, prefix, extend, total, q_rows) or _table_problem(metadata, total)
    if plan.decline is None:
        plan.slots = plan.table[: sum(total)]
    return plan


def _lengths_problem(
    metadata: Any, batch: Any, prefix: list[int], extend: list[int], total: list[int], q_rows: int
) -> Decline | None:
    if not any(extend) or not q_rows:
        return decline("no_tokens", "the batch has no tokens")
    agree = (
        len(prefix) == len(extend) == len(total) == batch.batch_size
        and all(p + e == t for p, e, t in zip(prefix, extend, total))
        and sum(extend) <= q_rows
        and metadata.max_q_len == max(extend)
        and metadata.max_kv_len == max(total)
    )
    if agree:
        return None
    text = "prefix %s, extend %s and sequence %s lengths, %d queries and the metadata's longest (%s, %s) do not agree"
    return decline("lengths_mismatch", text, prefix, extend, total, q_rows, metadata.max_q_len, metadata.max_kv_len)


def _table_problem(metadata: Any, total: list[int]) -> Decline | None:
    import torch

    table, indptr = metadata.kv_indices, metadata.kv_indptr
    if getattr(metadata, "custom_mask", None) is not None:
        return decline("custom_mask", "the batch has a custom attention mask")
    if table.dim() != 1 or table.dtype != torch.int32 or indptr.dtype != torch.int32 or indptr.shape[0] <= len(total):
        text = "kv_indices is %s %s, kv_indptr %s %s"
        return decline("table_mismatch", text, tuple(table.shape), table.dtype, tuple(indptr.shape), indptr.dtype)
    if table.shape[0] != sum(total) + TABLE_PADDING:
        text = "kv_indices has %d entries, where %d tokens and %d more are expected"
        return decline("table_mismatch", text, table.shape[0], sum(total), TABLE_PADDING)
    if table.is_cuda and torch.cuda.is_current_stream_capturing():
        return decline("graph_capture", "a graph is being captured")
    return None


def check_size(layer: Any, plan: Plan, q_rows: int) -> Decline | None:
    """Why the batch is too large for the 32-bit offsets of the ASM kernel."""
    gathered = plan.slots.shape[0] * layer.tp_k_head_num * HEAD_DIM
    # A query row and head of the output has 256 values of 2 bytes.
    output = q_rows * layer.tp_q_head_num * HEAD_DIM * 2
    if max(gathered, output) < ASM_REACH:
        return None
    text = "gathered K has %d bytes and the output %d, and the kernel's offsets reach %d"
    return decline("batch_size", text, gathered, output, ASM_REACH)


def check_call(layer: Any, plan: Plan, call: dict[str, Any]) -> Decline | None:
    """Why the arguments of the paged call, by their names, fit neither the plan nor the ASM kernel."""
    import torch

    if call.get("kv_page_indices") is not plan.table:
        return decline("table_mismatch", "the paged kernel was given another table than the metadata's")
    for cache in (call["k"], call["v"]):
        heads_and_width = layer.tp_k_head_num, HEAD_DIM
        if cache.shape[-2:] != heads_and_width or cache.dtype != torch.float8_e4m3fn or not cache.is_contiguous():
            text = "a cache buffer is %s %s, with strides %s"
            return decline("pool_layout", text, tuple(cache.shape), cache.dtype, cache.stride())
    for name in ("k_descale", "v_descale"):
        scale = call.get(name)
        if scale is not None and scale.numel() != 1:
            return decline("scale_shape", "%s has %d values, not one", name, scale.numel())
    return None
