"""K and V rows of a batch, from the paged pool into contiguous varlen buffers, in one launch."""

import functools
from typing import Any

import torch
import triton
import triton.language as tl

from . import gather_kv_reference as reference

FP8_MAX = tl.constexpr(reference.FP8_MAX)
#: Words of K, and as many of V, that one program of two warps moves: best of 256 to 2048 on an H200.
WORDS = 1024
_FNUZ = (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@triton.jit
def gather_rows(
    k_cache, v_cache, slots, k_out, v_out, rows, k_stride, v_stride,
    WORD: tl.constexpr, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows `slots[i]` of both caches to row `i` of both outputs; widths and strides count words."""
    # Views as words made on the host cost more of its time than this launch.
    k_cache = k_cache.to(tl.pointer_type(WORD), bitcast=True)
    v_cache = v_cache.to(tl.pointer_type(WORD), bitcast=True)
    k_out = k_out.to(tl.pointer_type(WORD), bitcast=True)
    v_out = v_out.to(tl.pointer_type(WORD), bitcast=True)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < rows
    # The offset needs 64 bits, since a pool passes 2 GiB.
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
    [tokens, kv_heads, head_dim] and [tokens, kv_heads, v_head_dim]. On a CPU this is the
    reference. Nothing synchronises.

    The buffers are PyTorch's allocations on the current stream, as large as the batch needs:
    its allocator hands the next layer the same memory once this layer's kernels are queued,
    follows the stream the caller is on, and puts them into a graph's pool under capture.
    Raises torch.OutOfMemoryError where they do not fit.
    """
    if not k_cache.is_cuda:
        return reference.gather_kv(k_cache, v_cache, slots)
    tokens = slots.shape[0]
    _, heads, head_dim = k_cache.shape
    k_out = k_cache.new_empty((tokens, heads, head_dim))
    v_out = v_cache.new_empty((tokens, heads, v_cache.shape[2]))
    launch_gather(k_cache, v_cache, slots, k_out, v_out)
    return k_out, v_out


def launch_gather(
    k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, k_out: torch.Tensor, v_out: torch.Tensor
) -> None:
    """The launch alone, into buffers that are there; see `gather_kv` for shapes."""
    tokens = slots.shape[0]
    if tokens == 0:
        return
    if k_cache.dtype in _FNUZ:
        # Triton knows these types on AMD GPUs only.
        k_cache, v_cache, k_out, v_out = (x.view(torch.uint8) for x in (k_cache, v_cache, k_out, v_out))
    k_stride, v_stride = k_cache.stride(0), v_cache.stride(0)
    word, per_word, k_width, v_width, block, rows = _layout(
        k_out.stride(0), v_out.stride(0), k_stride, v_stride, k_cache.itemsize
    )
    gather_rows[(-(-tokens // rows),)](
        k_cache, v_cache, slots, k_out, v_out, tokens, k_stride // per_word, v_stride // per_word,
        WORD=word, K_WIDTH=k_width, V_WIDTH=v_width, BLOCK=block, ROWS=rows, num_warps=2,
    )  # fmt: skip


@functools.cache
def _layout(k_row: int, v_row: int, k_stride: int, v_stride: int, size: int) -> tuple[Any, ...]:
    """(word, elements a word, words of a K row, of a V row, columns and rows of a program); all given in elements."""
    whole = all(elements * size % 4 == 0 for elements in (k_row, v_row, k_stride, v_stride))
    # Words of 4 bytes where rows consist of them, else the elements' own bits.
    word, per_word = (tl.int32, 4 // size) if whole else (tl.int8 if size == 1 else tl.int16, 1)
    k_width, v_width = k_row // per_word, v_row // per_word
    block = triton.next_power_of_2(max(k_width, v_width))
    return word, per_word, k_width, v_width, block, max(1, WORDS // block)


@triton.jit
def cast_rows(x, out, row_stride, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    value = tl.load(x + row * row_stride + column, mask=mask).to(tl.float32)
    # Comparisons, not clamp: NaN stays NaN.
    value = tl.where(value > FP8_MAX, FP8_MAX, value)
    value = tl.where(value < -FP8_MAX, -FP8_MAX, value)
    tl.store(out + row * width + column, value.to(out.dtype.element_ty), mask=mask)


def saturating_fp8(x: torch.Tensor) -> torch.Tensor:
    """`x` [tokens, width], any float dtype, as contiguous e4m3fn at unit scale, in one pass.

    Beyond ±448 becomes ±448, NaN stays NaN. On a CPU this is the reference. Nothing synchronises.
    """
    if not x.is_cuda:
        return reference.saturating_fp8(x)
    x = x.view(x.shape[0], -1) if x.dim() != 2 else x
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    if out.numel():
        block = min(4096, triton.next_power_of_2(x.shape[1]))
        cast_rows[(x.shape[0], -(-x.shape[1] // block))](x, out, x.stride(0), x.shape[1], BLOCK=block)
    return out
