"""The package's Triton kernels against their references, on a GPU or in Triton's interpreter."""

from __future__ import annotations

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


def far_apart() -> dict:
    """Rows of a pool of 4.6 GB, further apart than 32 bits of bytes or words reach; needs a GPU."""
    row, count = 2 * 256, 9_000_000
    pool = torch.empty(count * row, dtype=torch.uint8, device="cuda").view(count, 2, 256)
    slots = torch.tensor([0, 4_194_303, 4_194_304, 8_388_609, count - 1], device="cuda", dtype=torch.int32)
    values = torch.randint(0, 256, (len(slots), 2, 256), dtype=torch.uint8, device="cuda")
    pool[slots.long()] = values
    k, v = gather_kv.gather_kv(pool, pool, slots)
    return {"same": torch.equal(k, values) and torch.equal(v, values), "bytes": pool.numel()}


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
