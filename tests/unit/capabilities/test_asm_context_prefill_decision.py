"""Whether the ASM kernel covers a call, one condition at a time, those too that no whole batch here can reach."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from extend_objects import EXTEND, FP8, QUERIES, Batch, backend, layer, metadata_of

from sglang_aiter_ext.capabilities.asm_context_prefill import decision
from sglang_aiter_ext.kept import PLAN, Decline

# ---- the layer and the kind of batch ----


def checked(of_backend=None, q=QUERIES, of_layer=None, batch=EXTEND, sinks=None):
    found = decision.check_layer(of_backend or backend(), q, of_layer or layer(), batch, sinks)
    # Each reason has a text, whose arguments fit.
    assert found is None or (isinstance(found, Decline) and found.text)
    return found and found.reason


def test_a_layer_the_kernel_covers():
    assert checked() is None


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
    assert checked(backend(**of_backend), of_layer=layer(**of_layer)) == reason


def test_each_half_of_a_layers_conditions():
    def check(**of_layer):
        return checked(of_layer=layer(**of_layer))

    assert check(qk_head_dim=128) == "head_dim"
    assert check(sliding_window_size=None) is None
    assert check(attn_type=SimpleNamespace(value="decoder")) is None
    assert check(attn_type=SimpleNamespace(value="encoder_only")) == "attention_type"
    # A whole ratio that is covered, and one that only rounds down to it.
    assert check(tp_q_head_num=9, tp_k_head_num=4, tp_v_head_num=4) == "head_ratio"


def test_the_kind_of_batch_and_what_comes_with_the_call():
    assert checked(batch=Batch(forward_mode=SimpleNamespace(name="MIXED"))) is None
    for mode in ("SPLIT_PREFILL", "TARGET_VERIFY", "DRAFT_EXTEND_V2", "DLLM_EXTEND"):
        assert checked(batch=Batch(forward_mode=SimpleNamespace(name=mode))) == "forward_mode"
    assert checked(sinks=torch.zeros(8)) == "sinks"
    assert checked(q=QUERIES.half()) == "activation_dtype"
    hidden = SimpleNamespace(full_kv_pool=SimpleNamespace(kv_cache_layout="vectorized_5d"))
    assert checked(backend(token_to_kv_pool=hidden)) == "vectorized_5d"


def test_the_pool_is_found_on_the_backend_and_else_on_the_batch():
    ours, theirs = SimpleNamespace(), SimpleNamespace(kv_cache_layout="vectorized_5d")
    old = Batch(forward_mode=EXTEND.forward_mode, token_to_kv_pool=theirs)
    assert decision.pool_of(backend(token_to_kv_pool=ours), old) is ours
    assert checked(backend(token_to_kv_pool=None), batch=old) == "vectorized_5d"


@pytest.mark.parametrize(
    "heads, kv_heads, covered",
    [(8, 8, 1), (8, 4, 1), (16, 1, 1), (32, 2, 1), (24, 4, 0), (32, 1, 0), (3, 1, 0), (7, 2, 0)],
)
def test_head_ratios(heads, kv_heads, covered):
    found = checked(of_layer=layer(tp_q_head_num=heads, tp_k_head_num=kv_heads, tp_v_head_num=kv_heads))
    assert found == (None if covered else "head_ratio")


# ---- the batch ----


def plan(prefix, extend, *, rows=None, metadata=(), of_table=(), **changed):
    total = [p + e for p, e in zip(prefix, extend)]
    fields = dict(extend_prefix_lens_cpu=prefix, extend_seq_lens_cpu=extend, seq_lens_cpu=torch.tensor(total),
                  batch_size=len(total))  # fmt: skip
    data = metadata_of(total, extend, **dict(of_table), **dict(metadata))
    return decision.plan_batch(data, Batch(**{**fields, **changed}), sum(extend) if rows is None else rows)


def reason(made):
    assert made.decline is None or made.decline.text
    return made.decline and made.decline.reason


def test_a_plan_takes_the_tokens_and_leaves_the_padding():
    made = plan([40, 3], [6, 20])
    assert made.decline is None and made.slots.tolist() == list(range(69))
    # They are a part of the table itself, so that nothing is copied.
    assert made.slots.data_ptr() == made.table.data_ptr()
    # Queries may be padded past the last request.
    assert reason(plan([40], [6], rows=8)) is None


@pytest.mark.parametrize("entries", [0, 255, 257, 512, -69])
def test_a_table_with_any_other_number_of_entries_than_the_tokens_and_256_more_is_declined(entries):
    """A table with an entry for each page, for example: its slots would be read as those of tokens."""
    made = plan([40, 3], [6, 20], of_table=dict(padding=entries))
    assert reason(made) == "table_mismatch" and made.slots is None
    assert made.decline.text == f"kv_indices has {69 + entries} entries, where 69 tokens and 256 more are expected"


def test_a_table_of_pages_is_declined_whatever_its_padding():
    for page in (2, 16, 64):
        lengths = [2 * page + 1, page, 5 * page - 1]
        pages = sum(-(-n // page) for n in lengths)
        for padding in (0, 256):
            assert reason(plan([0, 0, 0], lengths, of_table=dict(entries=pages + padding))) == "table_mismatch"


def test_one_token_a_request_is_served_as_any_other_batch_is():
    assert plan([0, 0], [1, 1]).slots.tolist() == [0, 1]


def test_a_request_of_length_0_is_served_with_its_neighbours():
    """The kernel returns early for it, as the machine code shows."""
    assert plan([4, 0], [2, 0]).slots.tolist() == list(range(6))
    assert plan([4, 9, 0], [2, 0, 3]).slots.tolist() == list(range(18))


def test_each_condition_of_a_batch():
    assert reason(plan([], [])) == reason(plan([], [], rows=1)) == "no_tokens"
    assert reason(plan([4], [2], rows=0)) == "no_tokens"
    assert reason(plan([4, 9], [0, 0], rows=1)) == "no_tokens"
    for missing in ("extend_prefix_lens_cpu", "extend_seq_lens_cpu", "seq_lens_cpu"):
        assert reason(plan([4], [2], **{missing: None})) == "no_host_lengths"
    assert reason(plan([4], [2], rows=1)) == "lengths_mismatch"
    assert reason(plan([4], [2], batch_size=2)) == "lengths_mismatch"
    assert reason(plan([4], [2], seq_lens_cpu=[7])) == "lengths_mismatch"
    assert reason(plan([4], [2], extend_seq_lens_cpu=[2, 1])) == "lengths_mismatch"
    assert reason(plan([4], [20], of_table=dict(entries=23))) == "table_mismatch"
    assert reason(plan([4], [20], of_table=dict(dtype=torch.int64))) == "table_mismatch"
    # As long as the metadata says it is, and as many requests end where they should.
    assert reason(plan([4], [2], metadata={"max_q_len": 3})) == "lengths_mismatch"
    assert reason(plan([4], [2], metadata={"max_kv_len": 7})) == "lengths_mismatch"
    assert reason(plan([4, 9], [2, 3], extend_prefix_lens_cpu=[5, 8])) == "lengths_mismatch"
    assert reason(plan([4], [2], metadata={"custom_mask": torch.ones(1)})) == "custom_mask"
    assert reason(plan([4], [2], metadata={"custom_mask": None})) is None
    assert reason(plan([4], [2], metadata={"kv_indptr": torch.tensor([0, 6])})) == "table_mismatch"
    assert reason(plan([4], [2], metadata={"kv_indptr": torch.tensor([0], dtype=torch.int32)})) == "table_mismatch"
    column = torch.arange(6 + 256, dtype=torch.int32)[:, None]
    assert reason(plan([4], [2], metadata={"kv_indices": column})) == "table_mismatch"


def test_lengths_are_numbers_however_the_batch_holds_them():
    assert "prefix [4], extend [2] and sequence [6] lengths" in plan([4], [2], rows=1).decline.text
    tensors = {f"extend_{name}_cpu": torch.tensor([n]) for name, n in (("prefix_lens", 4), ("seq_lens", 2))}
    assert reason(plan([4], [2], **tensors)) is None and reason(plan([4], [2], seq_lens_cpu=[6])) is None


class OnGPU(torch.Tensor):
    is_cuda = True


def test_nothing_is_planned_while_a_graph_is_captured(monkeypatch):
    table = torch.arange(6 + 256, dtype=torch.int32)
    for capturing in (True, False):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        found = reason(plan([4], [2], metadata={"kv_indices": table.as_subclass(OnGPU)}))
        assert found == ("graph_capture" if capturing else None)
        assert reason(plan([4], [2], metadata={"kv_indices": table})) is None


def test_a_plan_is_made_once_for_its_batch_and_not_kept_for_another():
    metadata = metadata_of([6], [2])
    lengths = dict(extend_prefix_lens_cpu=[4], extend_seq_lens_cpu=[2], seq_lens_cpu=torch.tensor([6]), batch_size=1)
    one, other, of = Batch(**lengths), Batch(**lengths), backend(forward_metadata=metadata)
    made = decision.plan_for(of, one, 2)
    assert decision.plan_for(of, one, 2) is made is PLAN.on(metadata) and made.batch() is one
    assert decision.plan_for(of, other, 2) is not made
    metadata.kv_indices = metadata.kv_indices.clone()
    assert decision.plan_for(of, other, 2).table is metadata.kv_indices


def test_a_batch_that_was_declined_once_is_not_looked_at_again():
    batch = Batch(extend_prefix_lens_cpu=None, extend_seq_lens_cpu=[2], seq_lens_cpu=[6], batch_size=1)
    of = backend(forward_metadata=metadata_of([6], [2]))
    made = decision.plan_for(of, batch, 2)
    batch.extend_prefix_lens_cpu = [4]
    assert reason(made) == "no_host_lengths" and decision.plan_for(of, batch, 2) is made


# ---- the size ----


@pytest.mark.parametrize(
    "tokens, kv_heads, rows, heads, reason",
    [
        (2**24 - 1, 1, 1, 1, None),
        (2**24, 1, 1, 1, "batch_size"),
        (2**22, 4, 1, 4, "batch_size"),
        (1, 1, 2**19 - 1, 16, None),
        (1, 1, 2**19, 16, "batch_size"),
    ],
)
def test_a_batch_past_the_kernels_32_bit_offsets_is_declined(tokens, kv_heads, rows, heads, reason):
    """K has 256 bytes for each token and KV head, and the output 512 for each query row and head."""
    made = SimpleNamespace(slots=torch.empty(tokens, device="meta"))
    found = decision.check_size(layer(tp_q_head_num=heads, tp_k_head_num=kv_heads), made, rows)
    assert (found and found.reason) == reason
    if found is not None:
        sizes = f"gathered K has {tokens * kv_heads * 256} bytes and the output {rows * heads * 512}"
        assert found.text == f"{sizes}, and the kernel's offsets reach 4294967296"


# ---- the paged call ----


def test_each_condition_of_the_paged_call():
    made = plan([4], [2])
    cache, scale = torch.zeros(64, 2, 256, dtype=torch.uint8).view(FP8), torch.ones(1)

    def check(**changed):
        given = dict(k=cache, v=cache, kv_page_indices=made.table, k_descale=scale, v_descale=scale)
        found = decision.check_call(layer(), made, {**given, **changed})
        assert found is None or found.text
        return found and found.reason

    assert check() is None and check(k_descale=None) is check(v_descale=None) is None
    assert check(kv_page_indices=made.table.clone()) == "table_mismatch"
    assert check(k=cache.view(torch.uint8)) == "pool_layout"
    assert check(v=cache.view(32, 2, 2, 256)) is None
    assert check(v=cache[:, :1]) == check(v=cache.view(64, 1, 512)) == "pool_layout"
    assert check(k=torch.zeros(64, 4, 256, dtype=torch.uint8).view(FP8)[:, ::2]) == "pool_layout"
    assert check(k_descale=torch.ones(2)) == check(v_descale=torch.ones(2)) == "scale_shape"
    assert decision.check_call(layer(), made, dict(k=cache, v=cache)).reason == "table_mismatch"
    assert decision.check_call(layer(), made, dict(k=cache, v=cache, kv_page_indices=made.table)) is None
