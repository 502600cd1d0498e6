"""decode_pa on real SGLang releases, against float32 attention and an unpatched SGLang."""

import pytest
from child import launch

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("decode")]
RELEASES = ["0.5.12.post1", "0.5.18"]
PA = (("SGLANG_USE_AITER_PA", "1"),)
KERNEL = "paged_attention_ragged"


@pytest.mark.parametrize("release", RELEASES)
def test_decode_is_exact_on_aiter_and_prefill_and_linear_layers_are_as_before(release, exact):
    ours = launch(release, "decode:steps", env=PA).result
    plain = launch(release, "decode:steps", extension=False).result
    for row, before in zip(ours, plain, strict=True):
        case = row["case"]
        assert row["backend"] == {
            "hybrid": "HybridLinearAttnBackend", "full": "AiterDecodeRouter", "linear": "GDNAttnBackend",
            "prefill": "TritonAttnBackend", "decode": "AiterAttnBackend",
        }  # fmt: skip
        assert before["backend"]["full"] == "TritonAttnBackend"
        assert row["counters"] == {"decode_pa": {"decode": 3}}
        for batch, same in zip(row["batches"], before["batches"], strict=True):
            assert batch["finite"] and batch["linear"] == same["linear"], case
            if batch["phase"] == "prefill":
                assert (batch["kernels"], batch["outputs"]) == ([], same["outputs"]), case
            else:
                assert batch["kernels"] == [KERNEL] and batch["error"] <= exact, case


@pytest.mark.parametrize("release", RELEASES)
def test_without_the_variable_decode_is_untouched(release):
    ours = launch(release, "decode:steps").result
    plain = launch(release, "decode:steps", extension=False).result
    for row, before in zip(ours, plain, strict=True):
        assert row["backend"] == before["backend"]
        assert row["batches"] == before["batches"]
        assert row["counters"] == {}


@pytest.mark.parametrize("release", RELEASES)
def test_arguments_that_are_none_are_dropped_and_others_are_errors(release, exact):
    out = launch(release, "decode:arguments", env=PA).result
    assert out["none"]["counters"] == {"decode": 1, "dropped/q_rope": 1, "dropped/k_rope": 1}
    assert out["none"]["error"] <= exact
    for name in ("q_rope", "sinks", "topk_indices"):
        assert out[name].startswith(f"DecodeError: the model passes {name}, ")
        assert "SGLANG_USE_AITER_PA=0" in out[name]


@pytest.mark.parametrize("release", RELEASES)
def test_every_attribute_of_the_chosen_backend_still_resolves(release):
    out = launch(release, "decode:attributes", env=PA).result
    assert out["name"] == "AiterDecodeRouter"
    assert out["missing"] == []
    assert (out["absent"], out["hasattr"]) == ("AttributeError", False)


#: Case -> (class of the full-attention backend, the reason that is logged, its level).
LEFT_ALONE = {
    "aiter_already": ("AiterAttnBackend", "aiter_already", "INFO"),
    "draft_worker": ("TritonAttnBackend", "draft_worker", "INFO"),
    "sliding_window": ("TritonAttnBackend", "layer", "WARNING"),
    "cross_attention": ("TritonAttnBackend", "layer", "WARNING"),
    "v_head_dim": ("TritonAttnBackend", "layer", "WARNING"),
    "sinks": ("TritonAttnBackend", "sinks", "WARNING"),
    "vectorized_5d": ("TritonAttnBackend", "vectorized_5d", "WARNING"),
    "kv_cache_dtype": ("TritonAttnBackend", "kv_cache_dtype", "WARNING"),
    "speculative": ("TritonAttnBackend", "no_decode_batches", "WARNING"),
}


@pytest.mark.parametrize("case", LEFT_ALONE)
@pytest.mark.parametrize("release", RELEASES)
def test_a_runner_that_must_be_left_alone_is_left_alone_with_one_line(release, case):
    out = launch(release, "decode:left_alone", env=PA).result
    assert out["routed"]["full"] == "AiterDecodeRouter"
    full, reason, level = LEFT_ALONE[case]
    assert out[case]["full"] == full
    lines = [line for line in out[case]["logs"] if line[1].startswith("decode_pa: ")]
    assert len(lines) == 1
    assert lines[0][0] == level and f"decode stays on its own backend ({reason}): " in lines[0][1]


@pytest.mark.parametrize("release", RELEASES)
def test_a_users_own_aiter_backend_is_given_the_layers_figures_and_nothing_else_changes(release, exact):
    out = launch(release, "decode:left_alone", env=PA).result["own_aiter"]
    assert out["error"] <= exact and out["counters"] == {"decode": 1}
    assert out["sinks"] == "as without us"


@pytest.mark.parametrize("release", RELEASES)
def test_the_variable_wins_on_the_decode_side_only(release, exact):
    out = launch(release, "decode:two_backends", env=PA).result
    other, aiter = out["other_decode"], out["aiter_decode"]
    assert other["kernels"] == aiter["kernels"] == [KERNEL]
    assert max(other["error"], aiter["error"]) <= exact
    linear = "HybridLinearAttnBackend"
    if release == "0.5.18":
        routed = {"prefill_backend": "TritonAttnBackend", "decode_backend": "AiterAttnBackend"}
        assert other["tree"] == {linear: {"full_attn_backend": {"AiterDecodeRouter": routed}}}
        assert aiter["tree"] == {linear: {"full_attn_backend": {"HybridAttnBackend": routed}}}
    else:
        prefill = {linear: {"full_attn_backend": "TritonAttnBackend"}}
        routed = {"prefill_backend": "TorchNativeAttnBackend", "decode_backend": "AiterAttnBackend"}
        decode = {linear: {"full_attn_backend": {"AiterDecodeRouter": routed}}}
        assert other["tree"] == {"HybridAttnBackend": {"prefill_backend": prefill, "decode_backend": decode}}
        decode = {linear: {"full_attn_backend": "AiterAttnBackend"}}
        assert aiter["tree"] == {"HybridAttnBackend": {"prefill_backend": prefill, "decode_backend": decode}}


@pytest.mark.parametrize("release", RELEASES)
def test_several_backends_of_a_runner_share_one_workspace_and_never_have_two(release, exact):
    out = launch(release, "decode:workspaces", env=PA).result
    assert out["storages"] == 1
    assert out["alive_while_allocating"] == [0, 0]
    assert out["prefill_aiter"] == 1 and out["prefill_aiter_error"] <= exact
    assert out["bytes"] == out["expected"]


@pytest.mark.parametrize("release", RELEASES)
def test_a_workspace_that_does_not_fit_is_an_error_with_the_bytes_and_the_options(release):
    out = launch(release, "decode:memory", env=PA).result
    assert out["large"] == "fits"
    for words in (
        "DecodeError: ",
        f"({out['needed']} bytes)",
        "--max-running-requests",
        "--context-length",
        "--mem-fraction-static",
    ):
        assert words in out["small"]


@pytest.mark.parametrize("release", RELEASES)
def test_the_graph_buffer_has_an_entry_for_every_token(release):
    out = launch(release, "decode:graph_buffer", env=PA).result
    for size in out.values():
        assert size["entries"] >= size["needed"]


def test_an_fp8_cache_is_refused_where_the_release_would_cast_it_whole(exact):
    out = launch("0.5.9", "decode:fp8_refusal", env=PA).result
    assert out["fp8"]["backend"]["full"] == "TritonAttnBackend" and out["fp8"]["kernels"] == []
    warnings = [line for level, line in out["fp8"]["logs"] if level == "WARNING"]
    assert len(warnings) == 1 and "casts the whole fp8 KV pool to bf16" in warnings[0]
    assert out["bf16"]["backend"]["full"] == "AiterDecodeRouter" and out["bf16"]["kernels"] == [KERNEL]
    assert out["bf16"]["error"] <= exact
