"""Behaviour on real code in every release from 0.5.9 on, each in its own process."""

import environment
import pytest
from child import launch
from environment import since

PA = (("SGLANG_USE_AITER_PA", "1"),)
ASM = "flash_attn_varlen_fp8_pertensor_func"
PAGED = "mha_batch_prefill_func"


def releases(*versions):
    """Parameters, each release in a group of its own."""
    return [pytest.param(v, marks=pytest.mark.xdist_group(v)) for v in versions]


def smoke(release):
    return launch(release, "smoke:release", env=PA).result


@pytest.mark.parametrize("release", releases(*environment.RUNNABLE))
def test_the_aiter_backend_of_a_model_whose_layer_0_is_linear(release):
    assert smoke(release)["aiter"]["v_head_dim"] == 256


@pytest.mark.parametrize("release", releases(*environment.RUNNABLE))
def test_chunked_prefill(release, exact, fp8):
    out = smoke(release)["aiter"]
    own = {"asm": 12} if release not in since("0.5.17") else {"asm": 8, "release": 4}
    served = {"asm_context_prefill": own} if release in since("0.5.10") and release not in since("0.5.19") else {}
    if release in ("0.5.19", "0.5.20"):
        served = {"gather_reuse": {"built": 2, "reused": 6}}
    if release == "0.5.9":
        served = {"v_head_dim": {"asked_pool": 1}}
    assert out["counters"] == served
    for batch in out["batches"]:
        assert batch["calls"] == 4
        if release == "0.5.9":
            # The pool is cast to bf16 there, and the paged kernel serves it.
            assert batch["kernels"] == [PAGED] and batch["error"] <= exact
        else:
            assert batch["kernels"] == [ASM]
            assert batch["fp8_error"] <= exact and batch["error"] <= fp8


@pytest.mark.parametrize("release", releases(*environment.RUNNABLE))
def test_decode(release, exact):
    out = smoke(release)
    for fp8, row in out["decode"].items():
        if fp8 == "True" and release not in since("0.5.12"):
            assert (row["full"], row["kernels"], row["counters"]) == ("TritonAttnBackend", [], {})
            assert any("(fp8_pool_cast)" in line and "casts the whole fp8 KV pool" in line for _, line in out["logs"])
        else:
            assert (row["full"], row["kernels"]) == ("AiterDecodeRouter", ["paged_attention_ragged"])
            assert row["error"] <= exact
            assert row["counters"]["decode_pa"] == {"decode": 1}


@pytest.mark.parametrize("release", releases(*environment.RUNNABLE))
def test_the_state_of_every_capability(release):
    for state in smoke(release)["status"]:
        assert state["error"] is None
        assert state["state"] == ("active" if state["verdict"] == "apply" else "off"), state


@pytest.mark.parametrize("release", releases("0.5.19", "0.5.20", "0.5.21", "0.5.23"))
def test_where_the_release_has_its_own_branch_its_calls_are_untouched(release):
    ours = launch(release, "smoke:release", env=PA).result["aiter"]
    plain = launch(release, "smoke:release", extension=False).result["aiter"]
    assert [b["digest"] for b in ours["batches"]] == [b["digest"] for b in plain["batches"]]


@pytest.mark.parametrize("release", releases("0.5.17", "0.5.18", "0.5.19"))
def test_a_head_ratio_the_asm_kernels_do_not_cover_reaches_the_paged_kernel(release, exact):
    plain = launch(release, "smoke:ratio", extension=False).result
    assert "24 query heads over 4 KV heads is not covered" in plain["first"]["exception"]
    ours = launch(release, "smoke:ratio").result
    for name in ("first", "prefix"):
        assert [kernel for kernel, _ in ours[name]["calls"]] == [PAGED]
        assert ours[name]["fp8_error"] <= exact
    assert ours["counters"]["head_ratio"] == {"paged": 2}
    own = {"release": 1, "paged/head_ratio": 1}
    assert ours["counters"].get("asm_context_prefill") == (None if release == "0.5.19" else own)
    lines = [line for level, line in ours["logs"] if level == "WARNING" and line.startswith("head_ratio: ")]
    assert len(lines) == 1 and "24 query heads over 4 KV heads" in lines[0]


# From 0.5.22 on the release casts queries for the paged kernel with a GPU-only function.
@pytest.mark.parametrize("release", releases("0.5.20", "0.5.21"))
def test_a_release_with_the_guard_is_left_to_it(release):
    ours = launch(release, "smoke:ratio").result
    plain = launch(release, "smoke:ratio", extension=False).result
    assert ours["first"]["calls"] == plain["first"]["calls"] and ours["prefix"]["calls"] == plain["prefix"]["calls"]
    assert ours["counters"] == {}


@pytest.mark.parametrize("release", releases("0.5.19", "0.5.20"))
def test_indices_are_built_once_a_batch_and_never_for_another(release, exact):
    ours = launch(release, "smoke:reuse").result
    plain = launch(release, "smoke:reuse", extension=False).result
    for batch, before in zip(ours["batches"], plain["batches"], strict=True):
        first = batch["reads_at_each_layer"][0]
        assert first > 0 and batch["reads_at_each_layer"] == [first] * 4
        assert before["reads_at_each_layer"] == [first * n for n in (1, 2, 3, 4)]
        assert (batch["calls"], batch["outputs"]) == (before["calls"], before["outputs"])
        assert batch["counters"] == {"gather_reuse": {"built": 1, "reused": 3}}
        assert batch["fp8_error"] <= exact
    assert ours["batches"][0]["outputs"] != ours["batches"][1]["outputs"]
    assert ours["on_metadata"] and not plain["on_metadata"]
