"""The decisions of asm_context_prefill one condition at a time, those too that no whole batch here can reach."""

import gc
import inspect
import sys
import weakref
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
import documentation

from sglang_aiter_ext import activation, counting
from sglang_aiter_ext.capabilities import asm_context_prefill as asm
from sglang_aiter_ext.capability import NothingToServe
from sglang_aiter_ext.kernels import gather_kv
from sglang_aiter_ext.layers import is_vectorized_5d, unit_scales

pytestmark = pytest.mark.usefixtures("nothing_counted")
FP8 = torch.float8_e4m3fn


class Batch(SimpleNamespace):
    """What a ForwardBatch says of itself."""


def layer(**changed):
    fields = dict(qk_head_dim=256, v_head_dim=256, sliding_window_size=-1, logit_cap=0.0, is_cross_attention=False,
                  tp_q_head_num=8, tp_k_head_num=2, tp_v_head_num=2, k_scale=None, v_scale=None)  # fmt: skip
    return SimpleNamespace(**{**fields, **changed})


def backend(**changed):
    fields = dict(
        kv_cache_dtype=FP8, input_dtype=torch.bfloat16, use_mla=False, page_size=16, token_to_kv_pool=SimpleNamespace()
    )
    return SimpleNamespace(**{**fields, **changed})


QUERIES = torch.zeros(12, 2048, dtype=torch.bfloat16)
EXTEND = Batch(forward_mode=SimpleNamespace(name="EXTEND"))


def test_a_layer_the_kernel_covers():
    assert asm.check_layer(backend(), QUERIES, layer(), EXTEND, None) is None


LAYERS = {
    "mla": (dict(use_mla=True), {}), "activation_dtype": (dict(input_dtype=torch.float16), {}),
    "kv_cache_dtype": (dict(kv_cache_dtype=torch.float8_e5m2), {}), "vectorized_5d": (dict(kv_cache_is_vectorized_5d=True), {}),
    "head_dim": ({}, dict(v_head_dim=128)), "kv_heads": ({}, dict(tp_v_head_num=1)), "head_ratio": ({}, dict(tp_q_head_num=12)),
    "soft_cap": ({}, dict(logit_cap=50.0)), "sliding_window": ({}, dict(sliding_window_size=0)),
    "attention_type": ({}, dict(is_cross_attention=True)),
}  # fmt: skip


@pytest.mark.parametrize("reason", LAYERS)
def test_each_condition_of_a_layer(reason):
    of_backend, of_layer = LAYERS[reason]
    found, message, *arguments = asm.check_layer(backend(**of_backend), QUERIES, layer(**of_layer), EXTEND, None)
    assert found == reason and message % tuple(arguments)


def test_each_half_of_a_layers_conditions():
    def check(**of_layer):
        return asm.check_layer(backend(), QUERIES, layer(**of_layer), EXTEND, None)

    assert check(qk_head_dim=128)[0] == "head_dim"
    assert check(sliding_window_size=None) is None
    assert check(attn_type=SimpleNamespace(value="decoder")) is None
    assert check(attn_type=SimpleNamespace(value="encoder_only"))[0] == "attention_type"
    # A whole ratio that is covered, and one that only rounds down to it.
    assert check(tp_q_head_num=9, tp_k_head_num=4, tp_v_head_num=4)[0] == "head_ratio"


def test_the_pool_is_found_on_the_backend_and_else_on_the_batch():
    ours, theirs = SimpleNamespace(), SimpleNamespace(kv_cache_layout="vectorized_5d")
    old = Batch(forward_mode=EXTEND.forward_mode, token_to_kv_pool=theirs)
    assert asm.pool_of(backend(token_to_kv_pool=ours), old) is ours
    assert asm.check_layer(backend(token_to_kv_pool=None), QUERIES, layer(), old, None)[0] == "vectorized_5d"


def test_no_pool_at_all_has_no_layout():
    assert not is_vectorized_5d(None)
    assert not is_vectorized_5d(SimpleNamespace(full_kv_pool=None))


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_are_one_only_where_the_host_knows_it(name):
    other = {"k_scale": "v_scale", "v_scale": "k_scale"}[name]
    assert unit_scales(layer()) and unit_scales(SimpleNamespace())
    assert unit_scales(layer(**{name: torch.ones(1), name + "_float": 1.0}))
    assert unit_scales(
        layer(**{name: torch.ones(1), name + "_float": 1.0, other: torch.ones(1), other + "_float": 1.0})
    )
    assert not unit_scales(layer(**{name: torch.ones(1), name + "_float": 0.5}))
    assert not unit_scales(layer(**{name: torch.ones(1)}))
    # A figure without the tensor is not applied by anyone.
    assert unit_scales(layer(**{name + "_float": 0.5}))


class OnGPU(torch.Tensor):
    is_cuda = True


def test_indices_reach_a_gpu_through_pinned_memory(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    for table, number in ((torch.arange(2), 0), (torch.arange(2).as_subclass(OnGPU), 3)):
        slots, ends = asm.expand_pages(table, [3], 2)
        assert (slots.tolist(), ends.tolist(), len(pinned)) == ([0, 1, 2], [0, 3], number)


def test_nothing_is_planned_while_a_graph_is_captured(monkeypatch):
    table = torch.arange(6 + 256, dtype=torch.int32).as_subclass(OnGPU)
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        assert reason(plan([4], [2], metadata={"kv_indices": table})) == ("graph_capture" if capturing else None)


def test_a_reason_is_logged_once_with_the_pools_size_and_counted_each_time(caplog):
    caplog.set_level("INFO", logger=counting.logger.name)
    asked = []

    def pool(size):
        return SimpleNamespace(get_key_buffer=lambda layer_id: asked.append(layer_id) or SimpleNamespace(nbytes=size))

    for number, size in enumerate((3 * 2**30, 2**31)):
        for _ in range(2):
            asm.report(
                (f"reason{number}", "because of %s", "this"),
                backend(token_to_kv_pool=pool(size)),
                layer(layer_id=7),
                EXTEND,
            )
    assert counting.snapshot()[asm.NAME] == {"paged/reason0": 2, "paged/reason1": 2} and asked == [7, 7]
    large, small = (record.getMessage() for record in caplog.records)
    assert "(reason0): because of this; a layer's K cache is 3.0 GiB" in large
    assert small.endswith("(reason1): because of this")
    assert {record.levelname for record in caplog.records} == {"WARNING"}
    asm.report(("table_ambiguous", "one token each"), backend(), layer(), EXTEND)
    assert caplog.records[-1].levelname != "WARNING"


FAULTS = ["internal_error", "kernel_error", "out_of_memory", "lengths_mismatch", "table_mismatch"]


@pytest.mark.parametrize("reason", FAULTS)
def test_strict_mode_raises_what_no_batch_should_meet_and_nothing_else(reason, monkeypatch):
    monkeypatch.setenv("SGLANG_AITER_EXT_STRICT", "1")
    with pytest.raises(activation.CouldNotApply, match=rf"^asm_context_prefill: .* \({reason}\): because of this$"):
        asm.report((reason, "because of %s", "this"), backend(), layer(), EXTEND)
    others = documentation.reasons("capabilities/asm_context_prefill.py") - set(FAULTS)
    assert len(others) > 15
    for other in others:
        asm.report((other, "because of this"), backend(), layer(), EXTEND)
    monkeypatch.setenv("SGLANG_AITER_EXT_STRICT", "0")
    asm.report((reason, "because of this"), backend(), layer(), EXTEND)
    assert counting.snapshot()[asm.NAME][f"paged/{reason}"] == 1


def test_the_kind_of_batch_and_what_comes_with_the_call():
    for mode in ("MIXED", "SPLIT_PREFILL", "TARGET_VERIFY", "DRAFT_EXTEND_V2", "DLLM_EXTEND"):
        other = Batch(forward_mode=SimpleNamespace(name=mode))
        assert asm.check_layer(backend(), QUERIES, layer(), other, None)[0] == "forward_mode"
    assert asm.check_layer(backend(), QUERIES, layer(), EXTEND, torch.zeros(8))[0] == "sinks"
    assert asm.check_layer(backend(), QUERIES.half(), layer(), EXTEND, None)[0] == "activation_dtype"
    hidden = SimpleNamespace(full_kv_pool=SimpleNamespace(kv_cache_layout="vectorized_5d"))
    assert asm.check_layer(backend(token_to_kv_pool=hidden), QUERIES, layer(), EXTEND, None)[0] == "vectorized_5d"


@pytest.mark.parametrize(
    "heads, kv_heads, covered",
    [(8, 8, 1), (8, 4, 1), (16, 1, 1), (32, 2, 1), (24, 4, 0), (32, 1, 0), (3, 1, 0), (7, 2, 0)],
)
def test_head_ratios(heads, kv_heads, covered):
    found = asm.check_layer(
        backend(), QUERIES, layer(tp_q_head_num=heads, tp_k_head_num=kv_heads, tp_v_head_num=kv_heads), EXTEND, None
    )
    assert (found is None) == bool(covered)


def plan(prefix, extend, *, rows=None, entries=None, padding=256, page=16, dtype=torch.int32, metadata=(), **changed):
    total = [p + e for p, e in zip(prefix, extend)]
    tokens = sum(total)
    table = torch.arange(tokens + padding if entries is None else entries).to(dtype)
    own = dict(kv_indices=table, kv_indptr=torch.tensor([0, *total]).cumsum(0).to(torch.int32),
                               max_q_len=max(extend, default=0), max_kv_len=max(total, default=0))  # fmt: skip
    metadata = SimpleNamespace(**{**own, **dict(metadata)})
    fields = dict(
        extend_prefix_lens_cpu=prefix,
        extend_seq_lens_cpu=extend,
        seq_lens_cpu=torch.tensor(total),
        batch_size=len(total),
    )
    batch = Batch(**{**fields, **changed})
    return asm.plan_batch(
        backend(forward_metadata=metadata, page_size=page), batch, sum(extend) if rows is None else rows
    )


def reason(made):
    return made.decline and made.decline[0]


def test_a_plan_takes_the_tokens_and_leaves_the_padding():
    for padding in (0, 256):
        made = plan([40, 3], [6, 20], padding=padding)
        assert made.decline is None and made.slots.tolist() == list(range(69)) and made.cu_seqlens_k is None
    # Queries may be padded past the last request.
    assert reason(plan([40], [6], rows=8)) is None


@pytest.mark.parametrize("page", [2, 16, 64])
def test_a_table_of_pages_is_expanded_whatever_its_padding(page):
    lengths = [2 * page + 1, page, 5 * page - 1]
    pages = sum(-(-n // page) for n in lengths)
    for padding in (0, 256):
        made = plan([0, 0, 0], lengths, entries=pages + padding, page=page)
        assert made.decline is None
        expected, start = [], 0
        for n in lengths:
            expected += [(start + i // page) * page + i % page for i in range(n)]
            start += -(-n // page)
        assert made.slots.tolist() == expected
        assert made.cu_seqlens_k.tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]


def test_each_condition_of_a_batch():
    assert reason(plan([], [])) == reason(plan([], [], rows=1)) == "no_tokens"
    assert reason(plan([4], [2], rows=0)) == "no_tokens"
    assert reason(plan([4, 0], [2, 0])) == "zero_length_request"
    assert reason(plan([4, 9], [2, 0])) == "zero_length_request"
    for missing in ("extend_prefix_lens_cpu", "extend_seq_lens_cpu", "seq_lens_cpu"):
        assert reason(plan([4], [2], **{missing: None})) == "no_host_lengths"
    assert reason(plan([4], [2], rows=1)) == "lengths_mismatch"
    assert reason(plan([4], [2], batch_size=2)) == "lengths_mismatch"
    assert reason(plan([4], [2], seq_lens_cpu=[7])) == "lengths_mismatch"
    assert reason(plan([4], [2], extend_seq_lens_cpu=[2, 1])) == "lengths_mismatch"
    assert reason(plan([4], [20], entries=23)) == "table_mismatch"
    assert reason(plan([4], [20], dtype=torch.int64)) == "table_mismatch"
    # As long as the metadata says it is, and as many requests end where they should.
    assert reason(plan([4], [2], metadata={"max_q_len": 3})) == "lengths_mismatch"
    assert reason(plan([4], [2], metadata={"max_kv_len": 7})) == "lengths_mismatch"
    assert reason(plan([4, 9], [2, 3], extend_prefix_lens_cpu=[5, 8])) == "lengths_mismatch"
    assert reason(plan([4], [2], metadata={"custom_mask": torch.ones(1)})) == "custom_mask"
    assert reason(plan([4], [2], metadata={"kv_indptr": torch.tensor([0, 6])})) == "table_mismatch"
    assert reason(plan([4], [2], metadata={"kv_indptr": torch.tensor([0], dtype=torch.int32)})) == "table_mismatch"
    # Lengths are numbers, however the batch holds them.
    assert "prefix [4], extend [2] and sequence [6] lengths" in plan([4], [2], rows=1).decline[1]
    column = torch.arange(6, dtype=torch.int32)[:, None]
    assert reason(plan([4], [2], metadata={"kv_indices": column})) == "table_mismatch"
    # One token a request: tokens and pages are as many.
    assert reason(plan([0, 0], [1, 1])) == "table_ambiguous"
    assert reason(plan([0, 0], [1, 1], page=1)) is None
    # 512 tokens in pages of 2, and 256 pages with their padding.
    assert reason(plan([0], [512], entries=512, page=2)) == "table_ambiguous"


def test_each_condition_of_the_paged_call():
    made = plan([4], [2])
    cache = torch.zeros(64, 2, 256, dtype=torch.uint8).view(FP8)
    arguments = [QUERIES, cache, cache, None, None, made.table, 2, 6]
    scale = torch.ones(1)

    def check(position=None, value=None, **scales):
        given = list(arguments)
        if position is not None:
            given[position] = value
        found = asm.check_call(layer(), made, tuple(given), {"k_descale": scale, "v_descale": scale, **scales})
        return found and found[0]

    assert check() is None and check(k_descale=None) is None
    assert check(5, made.table.clone()) == "table_mismatch"
    assert check(1, cache.view(torch.uint8)) == "pool_layout"
    assert check(2, cache.view(32, 2, 2, 256)) is None
    assert check(2, cache[:, :1]) == check(2, cache.view(64, 1, 512)) == "pool_layout"
    assert check(1, torch.zeros(64, 4, 256, dtype=torch.uint8).view(FP8)[:, ::2]) == "pool_layout"
    assert check(k_descale=torch.ones(2)) == check(v_descale=torch.ones(2)) == "scale_shape"
    assert asm.check_call(layer(), made, tuple(arguments[:7]), {})[0] == "table_mismatch"


def test_a_plan_is_made_once_for_its_batch_and_not_kept_for_another():
    table = torch.arange(6 + 256, dtype=torch.int32)
    metadata = SimpleNamespace(
        kv_indices=table, kv_indptr=torch.tensor([0, 6], dtype=torch.int32), max_q_len=2, max_kv_len=6
    )
    lengths = dict(extend_prefix_lens_cpu=[4], extend_seq_lens_cpu=[2], seq_lens_cpu=torch.tensor([6]), batch_size=1)
    one, other, of = Batch(**lengths), Batch(**lengths), backend(forward_metadata=metadata)
    made = asm.plan_for(of, one, 2)
    assert asm.plan_for(of, one, 2) is made
    assert asm.plan_for(of, other, 2) is not made
    metadata.kv_indices = table.clone()
    assert asm.plan_for(of, other, 2).table is metadata.kv_indices


# ---- the wrappers ----

SUPPORTED = "is_gfx95_supported"


def kernel(q, k, v, q_descale, k_descale, v_descale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
           causal=False, softmax_scale=None):  # fmt: skip
    """As AITER's own; gives what it was called with."""
    return SimpleNamespace(**locals())


def paged(q, k, v, cu_seqlens_q, kv_indptr, kv_page_indices, max_seqlen_q, max_seqlen_k, *, causal, q_descale=None,
          k_descale=None, v_descale=None):  # fmt: skip
    return "paged"


def aiter_module(monkeypatch, name, **attributes):
    """SGLang's AITER backend module, with a forward_extend of the same steps; AITER has both kernels."""
    aiter = ModuleType("aiter")
    aiter.__dict__.update({"__file__": "aiter", asm.KERNEL: kernel, asm.PAGED: paged})
    monkeypatch.setitem(sys.modules, "aiter", aiter)
    module = ModuleType(name)

    class AiterAttnBackend(SimpleNamespace):
        def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
            self.asked = module.is_gfx95_supported()
            prefix = forward_batch.extend_prefix_lens_cpu
            if self.own_branch and self.asked and prefix is not None and not any(prefix):
                return "own"
            data, table = self.forward_metadata, getattr(self, "table", self.forward_metadata.kv_indices)
            return module.mha_batch_prefill_func(
                q, self.cache, self.cache, "cu_seqlens_q", data.kv_indptr, table, data.max_q_len, data.max_kv_len,
                causal=True, q_descale=None, k_descale=layer.k_scale, v_descale=layer.v_scale,
            )  # fmt: skip

    own = {asm.PAGED: paged, SUPPORTED: lambda: True, "AiterAttnBackend": AiterAttnBackend}
    module.__dict__.update({**own, **attributes})
    return module


def extend_call(module, own_branch, prefix=4, k="k", on=(), metadata=(), **of_layer):
    """(what forward_extend of 2 tokens after `prefix` answers, the backend)."""
    total = (prefix or 0) + 2
    data = dict(
        kv_indices=torch.arange(total, dtype=torch.int32),
        kv_indptr=torch.tensor([0, total]).to(torch.int32),
        max_q_len=2,
        max_kv_len=total,
    )
    cache = torch.zeros(64, 2, 256, dtype=torch.uint8).view(FP8)
    fields = {**vars(backend()), "cache": cache, "own_branch": own_branch, **dict(on)}
    one = module.AiterAttnBackend(**fields, forward_metadata=SimpleNamespace(**{**data, **dict(metadata)}))
    batch = Batch(forward_mode=EXTEND.forward_mode, extend_prefix_lens_cpu=None if prefix is None else [prefix],
                  extend_seq_lens_cpu=[2], seq_lens_cpu=[total], batch_size=1)  # fmt: skip
    return one.forward_extend(QUERIES[:2], k, "v", layer(scaling=0.5, **of_layer), batch), one


@pytest.fixture(params=[True, False], ids=["own branch", "no own branch"])
def served(request, monkeypatch):
    """(module that is wrapped, whether the release has a branch for first chunks)."""
    module = aiter_module(monkeypatch, "sglang.srt.layers.attention.aiter_backend")
    supported = module.is_gfx95_supported
    monkeypatch.setattr(asm, "asm_calls", lambda release: {False: ["call"] if request.param else []})
    asm.install(module, None)
    assert (module.is_gfx95_supported is supported) is not request.param
    return module, request.param


def counted():
    return counting.snapshot().get(asm.NAME)


def test_a_batch_with_a_prefix_is_served(served):
    module, own = served
    found, one = extend_call(module, own)
    assert found.cu_seqlens_k is one.forward_metadata.kv_indptr and found.k.shape == (6, 2, 256) and found.causal
    assert found.k_descale is found.v_descale is found.q_descale and found.q_descale.item() == 1
    assert extend_call(module, own)[0].q_descale is found.q_descale
    assert one.asked is not own and counted() == {"asm": 2}


def test_a_table_of_pages_and_scales_reach_the_kernel(served):
    data = dict(kv_indices=torch.tensor([1, 0], dtype=torch.int32), kv_indptr=torch.tensor([0, 2], dtype=torch.int32))
    found, _ = extend_call(*served, 20, on={"page_size": 16}, metadata=data, k_scale=torch.tensor(0.5), v_scale=torch.tensor(2.0))  # fmt: skip
    assert found.cu_seqlens_k.tolist() == [0, 22] and (found.k_descale.item(), found.v_descale.item()) == (0.5, 2.0)


def test_a_first_chunk_is_the_releases_own_where_it_has_a_branch_that_is_right(served):
    module, own = served
    found, _ = extend_call(module, own, 0)
    assert (found == "own", counted()) == ((True, {"release": 1}) if own else (False, {"asm": 1}))
    for changed in (dict(k=None), dict(k_scale=torch.tensor(0.5))):
        assert extend_call(module, own, 0, **changed)[0].k.shape == (2, 2, 256)
    assert counted() == ({"release": 1, "asm": 2} if own else {"asm": 3})


def test_what_is_declined_is_paged_and_a_first_chunk_stays_out_of_the_releases_branch(served):
    module, own = served
    found, one = extend_call(module, own, logit_cap=5.0)
    assert found == "paged" and one.asked
    found, one = extend_call(module, own, 0, k=None, logit_cap=5.0)
    assert found == "paged" and one.asked is not own
    assert extend_call(module, own, metadata=dict(max_q_len=3))[0] == "paged"
    assert extend_call(module, own, None)[0] == "paged"
    assert counted() == {"paged/soft_cap": 2, "paged/lengths_mismatch": 1, "paged/no_host_lengths": 1}


@pytest.mark.parametrize("prefix", [0, 4])
def test_another_gpu_is_paged_whenever_it_is_known(served, monkeypatch, prefix):
    module, own = served
    monkeypatch.setattr(module, SUPPORTED, lambda: False)
    assert extend_call(module, own, prefix)[0] == "paged" and counted() == {"paged/not_gfx950": 1}


def test_a_call_that_does_not_fit_keeps_its_batch_on_the_paged_kernel(served, monkeypatch):
    monkeypatch.setattr(gather_kv, "gather_kv", lambda *args: pytest.fail("K and V were gathered"))
    found, one = extend_call(*served, on={"table": torch.arange(6, dtype=torch.int32)})
    assert found == "paged" and counted() == {"paged/table_mismatch": 1}
    assert one.forward_metadata._sglang_aiter_ext_plan.decline[0] == "table_mismatch"


@pytest.mark.parametrize("error, reason", [(torch.OutOfMemoryError, "out_of_memory"), (RuntimeError, "kernel_error")])
def test_a_call_that_fails_holds_nothing_of_it_and_in_strict_mode_names_its_cause(error, reason, monkeypatch):
    module, alive = aiter_module(monkeypatch, "sglang.srt.layers.attention.aiter_backend"), []

    def broken(q, k, v, *args, **kwargs):
        alive.extend(map(weakref.ref, (q, k, v)))
        raise error("HIP error")

    broken.__signature__ = inspect.signature(kernel)
    monkeypatch.setattr(sys.modules["aiter"], asm.KERNEL, broken)
    monkeypatch.setattr(asm, "asm_calls", lambda release: {False: []})
    asm.install(module, None)
    gc.disable()
    try:
        # Also while the batch goes on: its other layers, and its metadata.
        found, one = extend_call(module, False)
        assert [ref() for ref in alive] == [None] * 3
    finally:
        gc.enable()
    assert found == "paged" and counted() == {f"paged/{reason}": 1}
    monkeypatch.setenv("SGLANG_AITER_EXT_STRICT", "1")
    with pytest.raises(activation.CouldNotApply, match=rf"\({reason}\): .*HIP error") as caught:
        extend_call(module, False)
    assert isinstance(caught.value.__cause__, error)


def test_a_decision_that_fails_is_paged_and_in_strict_mode_an_error_that_names_its_cause(served, monkeypatch):
    monkeypatch.setattr(asm, "check_layer", lambda *args: {}["none"])
    assert extend_call(*served)[0] == "paged" and counted() == {"paged/internal_error": 1}
    monkeypatch.setenv("SGLANG_AITER_EXT_STRICT", "1")
    with pytest.raises(activation.CouldNotApply, match=r"\(internal_error\): KeyError: 'none'$") as caught:
        extend_call(*served)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_count_that_fails_after_the_kernel_is_not_the_kernels_error(served, monkeypatch):
    monkeypatch.setattr(asm, "count", lambda *args: {}["none"])
    monkeypatch.setenv("SGLANG_AITER_EXT_STRICT", "1")
    with pytest.raises(activation.CouldNotApply, match="internal error in mha_batch_prefill_func: KeyError: 'none'$"):
        extend_call(*served)


def test_outside_of_forward_extend_everything_is_the_releases_own(served):
    module, _ = served
    assert module.mha_batch_prefill_func(*range(8), causal=True) == "paged"
    assert module.is_gfx95_supported() is True and counted() is None


def test_what_is_missing_is_said_before_anything_is_wrapped(monkeypatch):
    name = "sglang.srt.layers.attention.aiter_backend"
    monkeypatch.setattr(asm, "asm_calls", lambda release: {False: []})
    for gone, error in ((asm.PAGED, NothingToServe), (SUPPORTED, AttributeError)):
        module = aiter_module(monkeypatch, name)
        delattr(module, gone)
        before = dict(vars(module))
        with pytest.raises(error, match=f"could not import {gone}|{name} has no {gone}"):
            asm.install(module, None)
        assert vars(module) == before
    module = aiter_module(monkeypatch, name)
    del sys.modules["aiter"].flash_attn_varlen_fp8_pertensor_func
    with pytest.raises(LookupError, match="lacks flash_attn_varlen_fp8_pertensor_func"):
        asm.install(module, None)
