"""Random batches on the release's own metadata: what the kernels are given, and what comes out.

A served call is exact attention over `req_to_token`; any other is the release's own call, argument by argument.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import math
import os
import re
from unittest import mock

import aiter
import environment
from recording import counters, forget, harness, torch

os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(environment.CACHE / "hypothesis"))
import hypothesis  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

try:
    from sglang_aiter_ext.wrapping import without_ours
except ImportError:
    pass

PHASES = [p for p in hypothesis.Phase if p is not hypothesis.Phase.explain]
COMMON = dict(deadline=None, database=None, phases=PHASES, report_multiple_bugs=False, print_blob=True,
              suppress_health_check=list(hypothesis.HealthCheck))  # fmt: skip
hypothesis.settings.register_profile("test", max_examples=300, derandomize=True, **COMMON)
hypothesis.settings.register_profile("nightly", max_examples=10_000, **COMMON)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or "test")

ASM, PAGED, DECODE = "flash_attn_varlen_fp8_pertensor_func", "mha_batch_prefill_func", "paged_attention_ragged"
#: As in conftest.py: half a unit in the last place of the bf16 output.
EXACT = 2.0**-8
FP8 = torch.float8_e4m3fn
REQUESTS, LONGEST, Q_HEADS, DIM = 64, 4000, 2, 256
SLOTS = REQUESTS * (LONGEST // 128 + 1) * 128 + 128
#: The first slot of a pool of which the last `SLOTS` are used, past 2 GiB: nothing else of it is ever touched.
FAR = 9 * 2**20
NOISE = torch.randn(4096, Q_HEADS * DIM, generator=torch.Generator().manual_seed(0)).bfloat16()

worst, outcomes = [0.0], collections.Counter()


# ---- what a batch is ----


def batches(chunked=True):
    """Lists of (prefix, length), few or short ones more often."""

    def some(fewest, most, *longest):
        length = st.one_of(st.integers(1, n) for n in longest)
        chunk = length.flatmap(lambda n: st.tuples(st.integers(0, n - 1) if chunked else st.just(0), st.just(n)))
        return st.lists(chunk, min_size=fewest, max_size=most)

    any_length = (8, 70, 600, LONGEST)
    few, many = some(1, 3, *any_length), some(17, REQUESTS, *any_length)
    return st.one_of(few, some(1, 12, *any_length), some(17, REQUESTS, 8, 300), few, many)


scales = st.one_of(st.none(), st.just(1.0), st.floats(2.0**-10, 2.0**10, width=32))
common = dict(
    page_size=st.sampled_from((16, 1, 2, 4, 8, 32, 64, 128)), seed=st.integers(0, 2**32 - 1), shared=st.booleans(),
    k_scale=scales, v_scale=scales, gain=st.floats(2.0**-8, 8.0, width=32),
)  # fmt: skip


@functools.cache
def stack(page_size, **options):
    """The release's stack with one full-attention layer, and that layer."""
    made = harness.Stack(q_heads=Q_HEADS, kv_heads=1, head_dim=DIM, layers=2, full_interval=2, page_size=page_size,
                         max_requests=REQUESTS, context_len=4096, **options)  # fmt: skip
    made.token_to_kv_pool.full_kv_pool.k_buffer.clear()
    made.token_to_kv_pool.full_kv_pool.v_buffer.clear()
    return made, next(iter(made.layers.values()))


@functools.cache
def buffers(kind, dtype):
    """(K, V) buffers [slots, 1, DIM]; what is read of them holds values from the start."""
    made = []
    for seed in (1, 2):
        rows = NOISE[torch.randint(len(NOISE), (SLOTS,), generator=torch.Generator().manual_seed(seed)), :DIM].to(dtype)
        if kind == "far":
            buffer = torch.empty((FAR + SLOTS, 1, DIM), dtype=dtype)
            _raw(buffer)[FAR:, 0] = _raw(rows)
        elif kind == "strided":
            # 2.2 GiB apart end to end, a page of memory for each slot that is written.
            buffer = torch.empty(SLOTS * 8448 // dtype.itemsize, dtype=dtype).as_strided(
                (SLOTS, 1, DIM), (8448, DIM, 1)
            )
        else:
            buffer = rows.view(SLOTS, 1, DIM)
        made.append(buffer)
    return made


def _raw(x):
    return x.view(torch.uint8) if x.dtype == FP8 else x


def lay_out(made, requests, shared, pool, generator):
    """Prefixes on shuffled pages, whole ones shared with the first request's where asked for; returns request ids."""
    page, table = made.page_size, made.req_to_token_pool.req_to_token
    free = (torch.randperm(SLOTS // page - 1, generator=generator) + 1 + (FAR // page if pool == "far" else 0)).tolist()
    ids = (torch.randperm(REQUESTS, generator=generator)[: len(requests)] + 1).tolist()
    theirs = []
    for request, (prefix, _) in zip(ids, requests):
        pages = theirs[: prefix // page] if shared else []
        pages = pages + [free.pop() for _ in range(-(-prefix // page) - len(pages))]
        theirs = theirs or pages[: prefix // page]
        position = torch.arange(prefix)
        table[request, :prefix] = (
            torch.tensor(pages, dtype=torch.int32)[position // page] * page + position % page
        ).int()
        made.seq_lens[request] = prefix
    made._free_pages = free
    return ids


@contextlib.contextmanager
def setting(made, layer, pool, k_scale, v_scale, gain, **options):
    """The layer's figures and the pool of one example."""
    with contextlib.ExitStack() as undo:
        for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
            tensor = None if value is None else torch.tensor(value)
            undo.enter_context(mock.patch.object(layer, name, tensor))
            undo.enter_context(mock.patch.object(layer, name + "_float", value, create=True))
        # Scores keep a deviation of `gain`, whatever the scale.
        undo.enter_context(mock.patch.object(layer, "scaling", gain / 16 / (k_scale or 1.0)))
        made.token_to_kv_pool.full_kv_pool.k_buffer[:], made.token_to_kv_pool.full_kv_pool.v_buffer[:] = (
            [b.view(made.token_to_kv_pool.full_kv_pool.store_dtype)] for b in buffers(pool, made.kv_dtype)
        )
        yield undo


def noise(rows, width, scale, generator):
    """Fresh, as the release may write into it."""
    picked = NOISE[torch.randint(len(NOISE), (rows,), generator=generator), :width]
    return picked if scale is None else (picked.float() * scale).bfloat16()


# ---- what is true ----


def looked_at(queries, keys):
    """The query rows of a request that are computed and compared: all, or of a large one a few."""
    if queries * keys <= 2**14:
        return range(queries)
    return sorted({round(i * (queries - 1) / 5) for i in range(6)})


_attend = aiter._attend


def attend_some(q, k, v, *rest):
    """The reference's attention of one request, at `looked_at` rows only; NaN elsewhere."""
    rows = looked_at(len(q), len(k))
    if len(rows) == len(q):
        return _attend(q, k, v, *rest)
    out = torch.full((len(q), q.shape[1], v.shape[2]), float("nan"))
    for row in rows:
        end = len(k) - len(q) + row + 1
        out[row] = _attend(q[row : row + 1], k[:end], v[:end], *rest)[0]
    return out


def difference(made, layer, ids, queries, totals, q, out):
    """Largest |out - exact| relative to the largest |exact|, by float32 attention over `req_to_token`."""
    start, most, largest = 0, 0.0, 0.0
    for request, tokens, total in zip(ids, queries, totals):
        if total:
            rows = list(looked_at(tokens, total))
            k, v = (x[:, 0] for x in made.stored(layer.layer_id, request, total))
            picked = torch.tensor(rows) + start
            scores = q[picked].float() @ k.T * layer.scaling
            seen = torch.arange(total)[None] <= torch.tensor(rows)[:, None] + total - tokens
            exact = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1) @ v
            error = (out[picked].float() - exact).abs().max()
            most = math.inf if not error.isfinite() else max(most, float(error))
            largest = max(largest, float(exact.abs().max()))
        start += tokens
    relative = most / largest if any(totals) else 0.0
    worst[0] = max(worst[0], relative)
    return relative


def slots_of(made, ids, totals):
    table = made.req_to_token_pool.req_to_token
    return torch.cat([table[request, :total] for request, total in zip(ids, totals)]).long()


def same(a, b):
    if not torch.is_tensor(a) or not torch.is_tensor(b):
        return type(a) is type(b) and a == b
    if (a.dtype, a.shape, a.stride(), a.device) != (b.dtype, b.shape, b.stride(), b.device):
        return False
    return a.data_ptr() == b.data_ptr() or torch.equal(
        a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)
    )


def ends(values):
    return [0, *itertools.accumulate(values)]


class Calls:
    """Kernel calls, in order: (name, arguments)."""

    def __enter__(self):
        self.made = []
        aiter.BEFORE_CALL.append(self.see)
        return self.made

    def __exit__(self, *_):
        aiter.BEFORE_CALL.remove(self.see)

    def see(self, name, arguments):
        self.made.append((name, arguments))


def attempt(call):
    """(kernel calls, output or error) of a call."""
    with Calls() as made, torch.no_grad():
        try:
            return made, call()
        except Exception as error:
            # The reference names its caller, which the extension may be.
            return made, re.sub(r"aiter reference, \w+: ", "", f"{type(error).__name__}: {error}")


# ---- asm_context_prefill ----

#: What is done to a batch that no kernel of the extension may serve -> the reasons that may be given.
TWISTS = {
    "mode": "forward_mode", "gpu": "not_gfx950", "cap": "soft_cap", "window": "sliding_window", "sinks": "sinks",
    "cross": "attention_type", "ratio": "head_ratio", "prefix_none": "no_host_lengths", "total_none": "no_host_lengths",
    "total": "lengths_mismatch", "mask": "custom_mask", "e5m2": "kv_cache_dtype",
    "fp16": "activation_dtype", "5d": "vectorized_5d",
}  # fmt: skip
#: Batches that look odd and are served.
SERVED = ("mixed", "empty")
TABLES = ("tokens", "unpadded", "pages", "padded pages", "one more", "int64")


def check_prefill(page_size, requests, shared, seed, k_scale, v_scale, gain, pool, padding, table, twist):
    import sglang.srt.layers.attention.aiter_backend as module

    made, layer = stack(page_size, backend="aiter")
    backend, generator = made.backend.full_attn_backend, torch.Generator().manual_seed(seed)
    if pool == "strided":
        requests = requests[:8]
    new = [total - prefix for prefix, total in requests]
    if twist == "empty":
        requests, new = [(0, 0), *requests], [0, *new]
        requests, new = requests[:REQUESTS], new[:REQUESTS]
    with setting(made, layer, pool, k_scale, v_scale, gain) as undo:
        ids = lay_out(made, requests, shared, pool, generator)
        mode = harness_mode("SPLIT_PREFILL" if twist == "mode" else "MIXED" if twist == "mixed" else "EXTEND")
        batch = made._forward_batch(ids, new, mode)
        backend.init_forward_metadata(batch)
        metadata = backend.forward_metadata
        totals = [total for _, total in requests]
        slots = slots_of(made, ids, totals)
        tokens = len(slots)
        reasons = {TWISTS[twist]} if twist in TWISTS else set()
        reasons |= change_table(metadata, made, ids, totals, table, tokens)
        if pool == "strided" and tokens:
            reasons.add("pool_layout")
        if not any(new):
            reasons.add("no_tokens")
        heads = 3 if twist == "ratio" else Q_HEADS
        apply(twist, undo, module, made, backend, layer, batch, metadata)
        q = noise(sum(new) + padding, heads * DIM if heads == 3 else Q_HEADS * DIM, None, generator) if heads != 3 else (
            torch.ones(sum(new) + padding, 3 * DIM, dtype=torch.bfloat16))  # fmt: skip
        k = noise(sum(new), DIM, k_scale, generator).view(-1, 1, DIM)
        v = noise(sum(new), DIM, v_scale, generator).view(-1, 1, DIM)
        extra = {"sinks": torch.zeros(heads)} if twist == "sinks" else {}
        if hasattr(module, "launch_reshape_and_cache_flash") and len(k) > 16:
            undo.enter_context(mock.patch.object(module, "launch_reshape_and_cache_flash", write_rows))

        def call(forward):
            return attempt(lambda: forward(backend, q.clone(), k.clone(), v.clone(), layer, batch, **extra))

        forget()
        calls, out = call(module.AiterAttnBackend.forward_extend)
        counted = counters().get("asm_context_prefill", {})
        (outcome,) = counted
        assert counted[outcome] == 1, counted
        outcomes[outcome] += 1
        names = [name for name, _ in calls]
        if outcome != "asm":
            assert outcome == "release" or outcome.removeprefix("paged/") in reasons, (outcome, reasons)
            assert ASM not in names or outcome == "release", names
            wanted, theirs = call(without_extension(module))
            if ASM in [name for name, _ in wanted] and outcome != "release":
                wanted, theirs = call(without_extension(module, gfx950=False))
            if not (outcome == "release" and twist == "ratio"):
                assert [name for name, _ in wanted] == names, (names, wanted)
                for (_, given), (_, plain) in zip(calls, wanted):
                    different = [name for name in plain if not same(given[name], plain[name])]
                    assert given.keys() == plain.keys() and not different, different
                assert same(out, theirs), "another result than the release's own"
            return
        assert names == [ASM] and not reasons, (names, reasons)
        ((_, given),) = calls
        for name, buffer in zip("kv", buffers(pool, FP8)):
            assert torch.equal(_raw(given[name]), _raw(buffer)[slots]), f"{name} is not what req_to_token says"
        assert given["cu_seqlens_q"].tolist()[: len(new) + 1] == ends(new)
        assert given["cu_seqlens_k"].tolist()[: len(new) + 1] == ends(totals)
        assert (given["max_seqlen_q"], given["max_seqlen_k"]) == (max(new), max(totals))
        figures = [float(given[name]) for name in ("q_descale", "k_descale", "v_descale", "softmax_scale")]
        assert figures == [1.0, *(float(torch.tensor(s or 1.0)) for s in (k_scale, v_scale)), layer.scaling], figures
        rounded = q.clamp(-448, 448).to(FP8).view(-1, Q_HEADS, DIM)
        assert torch.equal(_raw(given["q"]), _raw(rounded))
        assert out.dtype == torch.bfloat16 and out.numel() == q.numel()
        assert difference(made, layer, ids, new, totals, rounded, out.view(-1, Q_HEADS, DIM)) <= EXACT


def harness_mode(name):
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return ForwardMode[name]


def change_table(metadata, made, ids, totals, table, tokens):
    """Put another table of the batch's slots into its metadata; returns why it cannot be served, if so."""
    page = made.page_size
    if table == "unpadded":
        metadata.kv_indices = metadata.kv_indices[:tokens]
    elif table == "one more":
        metadata.kv_indices = torch.cat([metadata.kv_indices, metadata.kv_indices[:1]])
    elif table == "int64":
        metadata.kv_indices = metadata.kv_indices.long()
        return {"table_mismatch"}
    elif table in ("pages", "padded pages"):
        rows = made.req_to_token_pool.req_to_token
        entries = torch.cat([rows[r, :n:page] // page for r, n in zip(ids, totals)]).int()
        metadata.kv_indices = torch.cat([entries, entries[:1].repeat(256)]) if table == "padded pages" else entries
    return set() if len(metadata.kv_indices) == tokens + 256 else {"table_mismatch"}


def apply(twist, undo, module, made, backend, layer, batch, metadata):
    def patch(owner, name, value):
        undo.enter_context(mock.patch.object(owner, name, value, create=True))

    if twist == "gpu":
        patch(module, "is_gfx95_supported", lambda: False)
    elif twist == "cap":
        patch(layer, "logit_cap", 30.0)
    elif twist == "window":
        patch(layer, "sliding_window_size", 20)
    elif twist == "cross":
        patch(layer, "is_cross_attention", True)
        batch.encoder_out_cache_loc = batch.out_cache_loc
    elif twist == "ratio":
        patch(layer, "tp_q_head_num", 3)
    elif twist == "e5m2":
        patch(backend, "kv_cache_dtype", torch.float8_e5m2)
    elif twist == "fp16":
        patch(backend, "input_dtype", torch.float16)
    elif twist == "5d":
        patch(made.token_to_kv_pool.full_kv_pool, "kv_cache_layout", "vectorized_5d")
    elif twist == "mask":
        metadata.custom_mask = torch.ones(4)
    elif twist == "total":
        batch.seq_lens_cpu = batch.seq_lens_cpu + 1
    elif twist == "total_none":
        batch.seq_lens_cpu = None
    elif twist == "prefix_none":
        batch.extend_prefix_lens_cpu = None


def write_rows(key, value, key_cache, value_cache, slots, swa=None, k_scale=None, v_scale=None):
    """What the release's K/V write does, which takes a millisecond a token in Triton's interpreter."""
    for new, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
        rows = new.float() if scale is None else new.float() / scale
        _raw(cache).view(-1, *cache.shape[2:])[slots] = _raw(rows.clamp(-448, 448).to(cache.dtype))


def without_extension(module, gfx950=True):
    """The release's own forward_extend; its module holds what it held when it was imported."""

    def forward_extend(*args, **kwargs):
        original = without_ours(module.AiterAttnBackend.forward_extend)
        names = {name: without_ours(value) for name, value in vars(module).items()}
        names = {name: value for name, value in names.items() if value is not vars(module)[name]}
        assert names
        if gfx950 is False:
            names["is_gfx95_supported"] = lambda: False
        with mock.patch.multiple(module, **names):
            return original(*args, **kwargs)

    return forward_extend


def run(check) -> dict:
    """All examples; hypothesis names the smallest one that fails."""
    with mock.patch.object(aiter, "_attend", attend_some):
        check()
    return {"examples": sum(outcomes.values()), "wanted": hypothesis.settings().max_examples, "outcomes": outcomes,
            "worst": worst[0]}  # fmt: skip


def prefill() -> dict:
    wanted = hypothesis.given(
        requests=st.one_of(batches(), batches(), batches(chunked=False)),
        pool=st.sampled_from(("plain", "far") * 4 + ("strided",)),
        padding=st.one_of(st.just(0), st.integers(0, 8)),
        table=st.sampled_from(("tokens",) * 32 + TABLES),
        twist=st.one_of(st.none(), st.none(), st.sampled_from([*sorted(TWISTS), *SERVED])),
        **common,
    )
    return run(wanted(check_prefill))


# ---- decode_pa ----


def check_decode(page_size, requests, shared, seed, k_scale, v_scale, gain, pool, fp8, idle, save, extra):
    made, layer = stack(page_size, backend="triton", fp8=fp8)
    generator = torch.Generator().manual_seed(seed)
    with setting(made, layer, pool, k_scale if fp8 else None, v_scale if fp8 else None, gain):
        ids = lay_out(made, [(total - 1, total) for _, total in requests], shared, pool, generator)
        batch = made._forward_batch(ids, [1] * len(ids), harness_mode("DECODE"))
        totals = [total for _, total in requests]
        for i in {i % len(ids) for i in idle}:
            # A request that only pads the batch.
            totals[i], batch.out_cache_loc[i] = 0, 0
        batch.seq_lens, batch.seq_lens_cpu = torch.tensor(totals), torch.tensor(totals)
        batch.seq_lens_sum = sum(totals)
        router = made.backend.full_attn_backend
        router.init_forward_metadata(batch)
        q = noise(len(ids), Q_HEADS * DIM, None, generator)
        k = noise(len(ids), DIM, layer.k_scale, generator).view(-1, 1, DIM)
        v = noise(len(ids), DIM, layer.v_scale, generator).view(-1, 1, DIM)
        kwargs = {"None": {"q_rope": None}, "tensor": {"q_rope": q}, "sinks": {"sinks": torch.zeros(Q_HEADS)}}.get(
            extra, {}
        )
        forget()
        calls, out = attempt(
            lambda: made.backend.forward(q.clone(), k.clone(), v.clone(), layer, batch, save, **kwargs)
        )
        counted = counters()["decode_pa"] if extra not in ("tensor", "sinks") else {}
        if extra in ("tensor", "sinks"):
            outcomes["error"] += 1
            assert isinstance(out, str) and out.startswith("DecodeError: the model passes ") and not calls, out
            return
        outcomes["decode"] += 1
        assert counted == {"decode": 1, **({"dropped/q_rope": 1} if extra else {})}
        assert [name for name, _ in calls] == [DECODE], (calls, out)
        ((_, given),) = calls
        slots, cache = slots_of(made, ids, totals), buffers(pool, made.kv_dtype)
        assert given["kv_indptr"].tolist() == ends(totals)
        assert torch.equal(given["kv_page_indices"][: len(slots)].long(), slots), "not the slots of req_to_token"
        assert given["key_cache"].data_ptr() == cache[0].data_ptr() and torch.equal(given["query"].flatten(1), q)
        figures = [given["scale"], *(float(given[name]) for name in ("k_scale", "v_scale"))]
        assert figures == [layer.scaling, *(1.0 if s is None else float(s) for s in (layer.k_scale, layer.v_scale))], (
            figures
        )
        live = [i for i, total in enumerate(totals) if total]
        for new, buffer, scale in zip((k, v), cache, (layer.k_scale, layer.v_scale)):
            written = _raw(buffer)[batch.out_cache_loc[live]].view(buffer.dtype).float() * (
                1.0 if scale is None else scale
            )
            off = (written - new[live].float()).abs().max() if save and live else torch.tensor(0.0)
            assert off <= 2.0**-4 * new.float().abs().max(), "the new token's K or V is not in its slot, at its scale"
        assert (
            difference(made, layer, ids, [1] * len(ids), totals, q.view(-1, Q_HEADS, DIM), out.view(-1, Q_HEADS, DIM))
            <= EXACT
        )


def decode() -> dict:
    wanted = hypothesis.given(
        requests=batches(), pool=st.sampled_from(("plain", "far", "plain")), fp8=st.booleans(),
        idle=st.one_of(st.just([]), st.lists(st.integers(0, REQUESTS - 1), max_size=3)), save=st.sampled_from((True, True, False)),
        extra=st.one_of(st.just(""), st.just(""), st.sampled_from(("", "None", "tensor", "sinks"))), **common,
    )  # fmt: skip
    return run(wanted(check_decode))
