"""Plain PyTorch forms of the kernels beside them: used on a CPU, and what those are held against."""

import torch

FP8_MAX = 448.0


def gather_kv(k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `gather_kv.gather_kv`; the result holds the same bytes."""
    return _rows(k_cache, slots), _rows(v_cache, slots)


def _rows(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    if cache.element_size() == 1:
        # index_select knows no fp8.
        return cache.view(torch.uint8).index_select(0, slots).view(cache.dtype)
    return cache.index_select(0, slots)


def saturating_fp8(x: torch.Tensor) -> torch.Tensor:
    """`x`, any float dtype, as contiguous e4m3fn at unit scale: beyond ±448 becomes ±448, NaN stays NaN."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).contiguous()
