"""K and V rows of a batch, from the paged pool into contiguous varlen buffers, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from . import gather_kv_reference as reference


@triton.jit
def _gather_rows(
    k_cache, v_cache, slots, k_out, v_out, rows, k_stride, v_stride,
    K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    # 64 bits: a pool passes 2 GiB.
    slot = tl.load(slots + row, mask=live, other=0).to(tl.int64)[:, None]
    row = row.to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    k_mask = live[:, None] & (column < K_WIDTH)
    v_mask = live[:, None] & (column < V_WIDTH)
    k = tl.load(k_cache + slot * k_stride + column, mask=k_mask)
    v = tl.load(v_cache + slot * v_stride + column, mask=v_mask)
    tl.store(k_out + row * K_WIDTH + column, k, mask=k_mask)
    tl.store(v_out + row * V_WIDTH + column, v, mask=v_mask)


def gather_kv(k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `slots` of both caches, each contiguous.

    `k_cache` [slots, kv_heads, head_dim] and `v_cache` [slots, kv_heads, v_head_dim] have a
    dtype of 1 or 2 bytes and contiguous rows; `slots` [tokens] is int32 or int64. Returns
    [tokens, kv_heads, head_dim] and [tokens, kv_heads, v_head_dim]. Nothing synchronises.
    The buffers are PyTorch's own allocations on the current stream: the next layer gets the
    same memory again once this layer's kernel is queued, and nothing outlives the batch.
    On a CPU this is the reference.
    """
    if not k_cache.is_cuda:
        return reference.gather_kv(k_cache, v_cache, slots)
    tokens = slots.shape[0]
    k_out = torch.empty((tokens, *k_cache.shape[1:]), dtype=k_cache.dtype, device=k_cache.device)
    v_out = torch.empty((tokens, *v_cache.shape[1:]), dtype=v_cache.dtype, device=v_cache.device)
    launch_gather(k_cache, v_cache, slots, k_out, v_out)
    return k_out, v_out


def launch_gather(k_cache, v_cache, slots, k_out, v_out) -> None:
    """The launch alone, for tests that run it in Triton's interpreter."""
    tokens = slots.shape[0]
    if tokens == 0:
        return
    word = torch.int32 if all(_row_bytes(c) % 4 == 0 for c in (k_cache, v_cache)) else torch.uint8
    k, v, k_to, v_to = (_words(x, word) for x in (k_cache, v_cache, k_out, v_out))
    block = triton.next_power_of_2(max(k_to.shape[1], v_to.shape[1]))
    rows = max(1, 2048 // block)
    _gather_rows[(triton.cdiv(tokens, rows),)](
        k, v, slots, k_to, v_to, tokens, k.stride(0), v.stride(0),
        K_WIDTH=k_to.shape[1], V_WIDTH=v_to.shape[1], BLOCK=block, ROWS=rows,
    )  # fmt: skip


def _row_bytes(x: torch.Tensor) -> int:
    return x[0].numel() * x.element_size()


def _words(x: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    """`x` as [rows, words a row], without a copy."""
    return x.view(x.shape[0], -1).view(word)


def saturating_fp8(x: torch.Tensor) -> torch.Tensor:
    """See `gather_kv_reference.saturating_fp8`."""
    return reference.saturating_fp8(x)
