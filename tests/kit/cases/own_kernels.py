"""The package's Triton kernels against their references, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import mmap

import harness  # noqa: F401  (mends the interpreter)
import torch

from sglang_aiter_ext.kernels import gather_kv
from sglang_aiter_ext.kernels import gather_kv_reference as reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def gather() -> list[dict]:
    """Odd shapes, all dtypes, poisoned buffers, slots out of order and repeated."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.uint8, torch.bfloat16, torch.float16):
        for heads, k_dim, v_dim in ((1, 256, 256), (2, 256, 256), (3, 80, 48), (1, 7, 5), (8, 128, 64)):
            for tokens in (0, 1, 17, 333):
                pool = [torch.randint(0, 256, (400, heads, d * (torch.empty(0, dtype=dtype).element_size())), generator=generator, dtype=torch.uint8)
                        .to(DEVICE).view(dtype) for d in (k_dim, v_dim)]  # fmt: skip
                for slot_dtype in (torch.int32, torch.int64):
                    slots = torch.randint(0, 400, (tokens,), generator=generator).to(DEVICE, slot_dtype)
                    out = [
                        torch.full(
                            (tokens, heads, x.shape[2] * x.element_size()), 0xA5, dtype=torch.uint8, device=DEVICE
                        ).view(dtype)
                        for x in pool
                    ]
                    gather_kv.launch_gather(*pool, slots, *out)
                    want = reference.gather_kv(*pool, slots)
                    same = all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(out, want))
                    rows.append({"case": [str(dtype), heads, k_dim, v_dim, tokens, str(slot_dtype)], "same": same})
    return rows


def sparse(size: int) -> torch.Tensor:
    """`size` bytes, of which only the pages that are written take memory; on a GPU all of them do."""
    if DEVICE == "cuda":
        return torch.empty(size, dtype=torch.uint8, device=DEVICE)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, size, flags=flags), dtype=torch.uint8)


def far_apart() -> dict:
    """Rows of a pool of 9.2 GB, the last ones more words of 4 bytes from the first than 31 bits can say."""
    heads, width, count = 2, 256, 18_000_000
    row = heads * width
    pool = sparse(count * row).view(count, heads, width)
    slots = [0, 4_194_303, 4_194_304, 8_388_609, 16_777_215, 16_777_216, count - 1]
    slots = torch.tensor(slots, device=DEVICE, dtype=torch.int32)
    values = torch.randint(0, 256, (len(slots), heads, width), dtype=torch.uint8, device=DEVICE)
    pool[slots.long()] = values
    k, v = (torch.zeros_like(values) for _ in range(2))
    gather_kv.launch_gather(pool, pool, slots, k, v)
    return {"same": torch.equal(k, values) and torch.equal(v, values), "words": pool.numel() // 4}


def cast_far_apart() -> dict:
    """Three rows whose last one is more elements from the first than 31 bits can say."""
    apart, width = 2**30 + 512, 512
    values = torch.randn(3, width, generator=torch.Generator().manual_seed(2)).to(torch.float16).to(DEVICE) * 300
    x = sparse(2 * (2 * apart + width)).view(torch.float16).as_strided((3, width), (apart, 1))
    x.copy_(values)
    got = gather_kv.saturating_fp8(x) if DEVICE == "cuda" else _interpreted(x)
    want = reference.saturating_fp8(values.cpu())
    return {"same": torch.equal(got.cpu().view(torch.uint8), want.view(torch.uint8)), "elements": 2 * apart}


def cast() -> list[dict]:
    """The saturating cast: extremes, NaN, strided rows, each input dtype."""
    rows = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x = torch.randn(37, 520, generator=torch.Generator().manual_seed(1)) * 300
        x[0, :8] = torch.tensor([449.0, -449.0, 1e30, -1e30, float("inf"), float("-inf"), 448.0, 0.0])
        x[1, 0] = float("nan")
        x = x.to(dtype).to(DEVICE)
        for name, view in (("contiguous", x), ("rows apart", x[:, :512]), ("heads", x[:, :512].reshape(37, 2, 256))):
            got = gather_kv.saturating_fp8(view) if DEVICE == "cuda" else _interpreted(view)
            want = reference.saturating_fp8(view.cpu()).flatten(1)
            got = got.cpu().flatten(1)
            nan = got.float().isnan()
            rows.append({
                "case": [str(dtype), name], "nans": int(nan.sum()), "contiguous": got.is_contiguous(),
                "same": torch.equal(got.view(torch.uint8)[~nan], want.view(torch.uint8)[~nan]) and torch.equal(nan, want.float().isnan()),
                "largest": float(got.float().nan_to_num(0).abs().max()),
            })  # fmt: skip
    return rows


def _interpreted(x):
    x = x.reshape(x.shape[0], -1)
    out = torch.empty(x.shape, dtype=torch.float8_e4m3fn)
    gather_kv.cast_rows[(x.shape[0], 1)](x, out, x.stride(0), x.shape[1], BLOCK=1024)
    return out
