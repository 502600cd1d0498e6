"""The gather beside what it replaces, on a GPU: each result is compared with the reference, then timed.

Times are the GPU's, apart from the host reads of a contender that makes some. All contenders of a row run in turn in the same rounds, with the L2 cache flushed before each,
and the median is reported. GB/s counts bytes read and written.
"""

from __future__ import annotations

import statistics
import time
import warnings
from types import SimpleNamespace

LAYERS = 15


def lacks(name: str) -> str | None:
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return None if torch.cuda.is_available() else "no GPU"


def where() -> dict:
    import torch
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def make_batch(tokens: int, heads: int, page: int, requests: int, head_dim: int = 256):
    """An fp8 pool, and a batch whose pages lie in it in random order."""
    import torch

    lengths = [tokens // requests + (i < tokens % requests) for i in range(requests)]
    pages = [-(-n // page) for n in lengths]
    total_pages = sum(pages) + max(64, sum(pages) // 4)
    pool = [
        torch.randint(0, 120, (total_pages * page, heads, head_dim), dtype=torch.uint8, device="cuda").view(
            torch.float8_e4m3fn
        )
        for _ in "kv"
    ]
    order = torch.randperm(total_pages)[: sum(pages)]
    slots, start = [], 0
    for length, count in zip(lengths, pages):
        own = order[start : start + count]
        slots.append((own[:, None] * page + torch.arange(page)).flatten()[:length])
        start += count
    table = torch.cat([*slots, slots[0][:1].expand(256)]).to(device="cuda", dtype=torch.int32)
    indptr = torch.tensor([0, *lengths], device="cuda").cumsum(0).to(torch.int32)
    return SimpleNamespace(k=pool[0], v=pool[1], table=table, indptr=indptr, lengths=lengths, tokens=tokens, page=page)


def select(batch, index):
    """Two uint8 index_select with ready indices, as SGLang 0.5.21 and later do."""
    import torch

    return tuple(
        x.view(x.shape[0], -1).view(torch.uint8).index_select(0, index).view(x.dtype).view(-1, *x.shape[1:])
        for x in (batch.k, batch.v)
    )


def rebuilt_index(batch):
    """The slots from the device's own lengths, with the host reads that SGLang 0.5.19 and 0.5.20 make at each layer."""
    import torch

    starts = batch.indptr.long()
    lengths = starts.diff()
    total = int(lengths.sum().item())
    ends = lengths.cumsum(0)
    owner = torch.repeat_interleave(torch.arange(lengths.numel(), device="cuda"), lengths)
    entry = starts[owner] + torch.arange(total, device="cuda") - (ends - lengths)[owner]
    if int(entry.max().item()) >= batch.table.numel():
        raise ValueError("the table is too short")
    index = batch.table[entry].long()
    if int(index.max().item()) >= batch.k.shape[0]:
        raise ValueError("a slot is outside the pool")
    return index


def contenders(batch):
    import torch

    from sglang_aiter_ext.kernels import gather_kv

    slots = batch.table[: batch.tokens]
    source = torch.empty(2 * batch.tokens * batch.k[0].numel(), dtype=torch.uint8, device="cuda").random_(0, 120)
    target = torch.empty_like(source)
    return {
        "ours": lambda: gather_kv.gather_kv(batch.k, batch.v, slots),
        "index_select": lambda: select(batch, slots),
        "rebuilt": lambda: select(batch, rebuilt_index(batch)),
        "copy": lambda: target.copy_(source),
    }


def check(batch) -> None:
    """Raises AssertionError where a contender's bytes are not the reference's."""
    import torch

    from sglang_aiter_ext.kernels import gather_kv_reference

    want = gather_kv_reference.gather_kv(batch.k, batch.v, batch.table[: batch.tokens])
    runs = contenders(batch)
    for name in ("ours", "index_select", "rebuilt"):
        for got, expected in zip(runs[name](), want):
            assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8)), name


def medians(runs: dict, rounds: int) -> dict[str, float]:
    """Microseconds of each contender, one after the other in every round, L2 flushed before each."""
    import torch

    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times: dict[str, list] = {name: [] for name in runs}
    for _ in range(rounds + 3):
        for name, run in runs.items():
            flush.zero_()
            # The GPU waits here until the host has queued the call, so that only the GPU's time is counted.
            torch.cuda._sleep(1_000_000)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            times[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median(s.elapsed_time(e) * 1000 for s, e in pairs[3:]) for name, pairs in times.items()}


def gather(quick: bool) -> dict:
    rows = []
    shapes = [(t, 2, 16, 1) for t in (1_000, 4_000, 16_000, 70_000, 262_144, 1_000_000)]
    shapes += [(70_000, heads, 16, 1) for heads in (1, 4, 8)] + [(70_000, 2, page, 1) for page in (1, 64)]
    shapes += [(70_000, 2, 16, requests) for requests in (8, 64)]
    for tokens, heads, page, requests in shapes[:4] if quick else shapes:
        batch = make_batch(tokens, heads, page, requests)
        check(batch)
        times = medians(contenders(batch), 20 if quick else 60)
        moved = 4 * tokens * heads * 256
        rows.append({
            "tokens": tokens, "heads": heads, "page": page, "requests": requests, "us": times,
            "gbs": {name: moved / us / 1000 for name, us in times.items()},
        })  # fmt: skip
    return {"where": where(), "rows": rows}


def plan(batch):
    """What `asm_context_prefill` plans from host lengths, for a batch that is one chunk a request."""
    import torch

    from sglang_aiter_ext.capabilities.asm_context_prefill import decision

    class Batch:
        extend_prefix_lens_cpu = [0] * len(batch.lengths)
        extend_seq_lens_cpu = batch.lengths
        seq_lens_cpu = torch.tensor(batch.lengths)
        batch_size = len(batch.lengths)

    longest = max(batch.lengths)
    metadata = SimpleNamespace(kv_indices=batch.table, kv_indptr=batch.indptr, max_q_len=longest, max_kv_len=longest)
    return decision.plan_batch(metadata, Batch(), batch.tokens)


def batch(quick: bool) -> dict:
    """15 layers: host wall time to the end of the GPU's work, and synchronisations."""
    import torch

    from sglang_aiter_ext.kernels import gather_kv

    data = make_batch(70_000, 2, 16, 4)
    check(data)

    def ours():
        slots = plan(data).slots
        for _ in range(LAYERS):
            gather_kv.gather_kv(data.k, data.v, slots)

    def once():
        index = data.table[: int(sum(data.lengths))]
        for _ in range(LAYERS):
            select(data, index)

    def every_layer():
        for _ in range(LAYERS):
            select(data, rebuilt_index(data))

    result = {}
    for name, run in (
        ("ours", ours),
        ("indices once (0.5.21)", once),
        ("indices at every layer (0.5.19)", every_layer),
    ):
        run()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run()
        torch.cuda.set_sync_debug_mode("default")
        syncs = sum("synchroniz" in str(w.message) for w in caught)
        walls = []
        for _ in range(10 if quick else 40):
            torch.cuda.synchronize()
            began = time.perf_counter()
            run()
            torch.cuda.synchronize()
            walls.append((time.perf_counter() - began) * 1e6)
        result[name] = {"us": statistics.median(walls), "syncs": syncs}
    return {"where": where(), "rows": result}


def markdown(name: str, result: dict) -> str:
    at = result["where"]
    lines = [f"{at['gpu']}, torch {at['torch']}, triton {at['triton']}, {at['date']}.", ""]
    if name == "gather":
        lines += [
            "| tokens | KV heads | page | requests | ours µs (GB/s) | index_select, ready | index build + index_select | copy | ours / copy | index_select / ours |",
            "| --: " * 10 + "|",
        ]
        for row in result["rows"]:
            us, gbs = row["us"], row["gbs"]
            cells = " | ".join(f"{us[n]:.1f} ({gbs[n]:.0f})" for n in ("ours", "index_select", "rebuilt", "copy"))
            lines.append(
                f"| {row['tokens']} | {row['heads']} | {row['page']} | {row['requests']} | {cells} | {us['ours'] / us['copy']:.2f} | {us['index_select'] / us['ours']:.2f} |"
            )
    else:
        ours = result["rows"]["ours"]["us"]
        lines += [
            f"| {LAYERS} layers, 70,000 tokens | wall µs | synchronisations | over ours |",
            "| --- | --: | --: | --: |",
        ]
        lines += [
            f"| {who} | {row['us']:.0f} | {row['syncs']} | {row['us'] / ours:.1f} |"
            for who, row in result["rows"].items()
        ]
    return "\n".join(lines)
