"""asm_context_prefill on real SGLang releases, against float32 attention and an unpatched SGLang."""

import pytest
from child import launch

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("prefill")]
RELEASES = ["0.5.12.post1", "0.5.18"]
ASM = "flash_attn_varlen_fp8_pertensor_func"
PAGED = "mha_batch_prefill_func"


@pytest.mark.parametrize("release", RELEASES)
def test_chunked_prefill_is_exact_and_runs_on_the_asm_kernel(release, exact, fp8):
    rows = launch(release, "prefill:chunked").result
    assert len(rows) == 3 * 2 * 3 * 3
    for row in rows:
        where = {k: row[k] for k in ("page_size", "scales", "requests", "batch")}
        assert set(row["kernels"]) == {ASM}, where
        assert row["fp8_error"] <= exact, where
        assert row["error"] <= fp8, where


@pytest.mark.parametrize("release", RELEASES)
def test_kv_pool_has_the_bytes_an_unpatched_sglang_leaves(release):
    ours = launch(release, "prefill:chunked").result
    plain = launch(release, "prefill:chunked", extension=False).result
    assert any(PAGED in row["kernels"] for row in plain)
    assert [row["pool"] for row in ours] == [row["pool"] for row in plain]
    assert len({row["pool"] for row in ours}) > len(ours) / 3


@pytest.mark.parametrize("release", RELEASES)
def test_queries_beyond_448_saturate_and_the_layers_own_scaling_is_used(release, exact):
    out = launch(release, "prefill:saturation").result
    assert out["queries"]["largest"] > 448
    for name in ("queries", "scaling"):
        assert out[name]["kernels"] == [ASM]
        assert out[name]["fp8_error"] <= exact, name


@pytest.mark.parametrize("release", RELEASES)
def test_a_batch_is_planned_once_for_all_layers_and_no_plan_outlives_it(release, exact):
    out = launch(release, "prefill:several_layers").result
    assert out["plans"] == [1, 1]
    assert out["asm"] == [4, 4]
    assert max(out["errors"]) <= exact
    assert out["plan_gone"]


#: Guard -> the reason that is counted.
GUARDS = {
    "not_gfx950": "not_gfx950", "forward_mode": "forward_mode",
    "kv_cache_dtype": "kv_cache_dtype", "activation_dtype": "activation_dtype",
    "head_dim": "head_dim", "sliding_window": "sliding_window", "sinks": "sinks", "soft_cap": "soft_cap",
    "attention_type": "attention_type", "attention_type_cross": "attention_type", "head_ratio": "head_ratio",
    "vectorized_5d": "vectorized_5d", "no_tokens": "no_tokens",
    "lengths_mismatch": "lengths_mismatch", "no_host_lengths": "no_host_lengths", "table_mismatch": "table_mismatch",
    "custom_mask": "custom_mask", "out_of_memory": "out_of_memory", "kernel_error": "kernel_error",
}  # fmt: skip


@pytest.mark.parametrize("guard", GUARDS)
@pytest.mark.parametrize("release", RELEASES)
def test_guard_leaves_the_paged_call_untouched_counts_it_and_logs_once(release, guard):
    ours = launch(release, "prefill:guards").result[guard]
    plain = launch(release, "prefill:guards", extension=False).result[guard]
    # A failing ASM call was tried once before the paged one.
    calls = [call for call in ours["calls"] if call[0] == PAGED]
    assert calls == plain["calls"]
    assert len(calls) == len(ours["calls"]) and calls
    reason = GUARDS[guard]
    assert ours["counters"] == {f"paged/{reason}": len(calls)}
    warnings = [line for level, line in ours["logs"] if level == "WARNING" and not line.startswith("head_ratio: ")]
    assert len(warnings) == 1, ours["logs"]
    assert warnings[0].startswith(f"asm_context_prefill: the paged kernel serves it ({reason}): ")


@pytest.mark.parametrize("release", RELEASES)
def test_a_failing_kernel_is_tried_once_for_all_batches(release):
    ours = launch(release, "prefill:guards").result["kernel_error"]
    assert (ours["tries"], len(ours["calls"])) == (1, 2)


@pytest.mark.parametrize("release", RELEASES)
def test_without_a_guard_the_same_batch_is_served(release):
    ours = launch(release, "prefill:guards").result["served"]
    assert {name for name, _ in ours["calls"]} == {ASM}
    assert ours["counters"] == {"asm": 2}
    assert not ours["logs"]


def test_first_chunk_is_left_to_the_release_where_its_own_branch_is_right(exact):
    old = launch("0.5.12.post1", "prefill:first_chunk_branch").result
    new = launch("0.5.18", "prefill:first_chunk_branch").result
    for name in ("unit", "one", "scaled"):
        assert old[name]["counters"] == {"asm": 1}
        assert new[name]["counters"] == ({"asm": 1} if name == "scaled" else {"release": 1})
        assert max(old[name]["fp8_error"], new[name]["fp8_error"]) <= exact, name


@pytest.mark.parametrize("release", RELEASES)
def test_a_first_chunk_that_is_not_served_reaches_the_paged_kernel_and_so_does_the_rest_of_its_batch(release):
    out = launch(release, "prefill:declined_first_chunks").result
    for reason, case in out.items():
        assert set(case["kernels"]) == {PAGED}, reason
        assert case["counters"] == {f"paged/{reason}": len(case["kernels"])}


@pytest.mark.parametrize("release", RELEASES)
def test_odd_batches_are_exact_or_on_the_paged_kernel(release, exact):
    out = launch(release, "prefill:odd_batches").result
    assert out["no_prefix_lengths"]["counters"] == {"paged/no_host_lengths": 1}
    assert out["no_prefix_lengths"]["kernels"] == [PAGED]
    assert out["one_token"]["counters"] == ({"release": 1} if release == "0.5.18" else {"asm": 1})
    served = ("tensor_lengths", "only_k", "only_v", "scale_forms")
    for name in (*served, "mixed", "mixed_first_chunk", "empty_first", "empty_between", "empty_last"):
        assert out[name]["counters"] == {"asm": 1}, name
    for name, case in out.items():
        assert case["fp8_error"] <= exact, name
