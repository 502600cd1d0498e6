"""Building backends: v_head_dim, AITER that is missing, every switch, and each activation route."""

import pytest
from child import aiter_with, launch

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("building")]
PA = ("SGLANG_USE_AITER_PA", "1")
RELEASES = ["0.5.12.post1", "0.5.18"]


def test_v_head_dim_needs_the_extension_on_0_5_9_and_decodes_exactly_with_it(exact):
    plain = launch("0.5.9", "building:v_head_dim", extension=False).result
    assert plain["error"].startswith("ValueError: layer_id=0 not in full attention layers")
    ours = launch("0.5.9", "building:v_head_dim").result
    assert ours["v_head_dim"] == 256
    assert ours["kernels"] == ["paged_attention_ragged"] and ours["error"] <= exact
    assert not ours["left_on_the_pool"] and ours["layer_0"] == "ValueError"


def test_a_pool_without_get_v_head_dim_is_untouched():
    out = launch("0.5.9", "building:plain_pool").result
    assert out == {"has": False, "asked": [0], "same": True, "v_head_dim": 256}


#: Kind of unusable AITER -> what the error must say.
UNUSABLE = {
    "absent": "import aiter fails: ModuleNotFoundError: No module named 'aiter'",
    "raises": "import aiter fails: RuntimeError: No HIP GPUs are available",
    "os_error": "import aiter fails: OSError: libamdhip64.so.6",
    "namespace": "is an empty namespace package, not AITER",
    "symbol_missing": "lacks paged_attention_ragged",
    "other_parameters": "has parameter 1 'query' where 'workspace_buffer' is expected",
}


@pytest.mark.parametrize("kind", UNUSABLE)
@pytest.mark.parametrize("release", RELEASES)
def test_unusable_aiter_is_a_clear_error_when_the_backend_is_built(release, kind):
    out = launch(release, "building:without_aiter", env=(PA,)).result[kind]
    assert out["error"].startswith("DecodeError: SGLANG_USE_AITER_PA=1 needs AITER's paged_attention_ragged")
    assert UNUSABLE[kind] in out["error"]
    assert "SGLANG_USE_AITER_PA=0" in out["error"]


def test_a_symbol_that_only_sglang_needs_is_named_too(tmp_path):
    """SGLang's AITER backend imports its names in one `try`: one that is missing takes the rest with it."""
    place = aiter_with(tmp_path / "aiter", "del mla_reduce_v1")
    out = launch("0.5.18", "building:states", env=(PA,), aiter=place).result
    assert "could not import mla_reduce_v1 from aiter" in out["build_error"]
    # The paged prefill kernel comes before it in that `try`, and the decode kernel after it.
    assert out["status"]["asm_context_prefill"] == [True, "active"]
    assert out["status"]["decode_pa"] == [True, "failed"]


@pytest.mark.parametrize("release", RELEASES)
def test_without_the_variable_unusable_aiter_is_not_worth_a_word(release):
    out = launch(release, "building:without_aiter").result
    for kind in UNUSABLE:
        assert out[kind]["built"] == "TritonAttnBackend"
        assert [line for line in out[kind]["logs"] if line[0] != "INFO"] == []


def test_only_some_gpus_have_the_kernel():
    out = launch("0.5.18", "building:wrong_gpu", env=(PA,)).result
    assert "the GPU is gfx1100, and the kernel runs on gfx90a, gfx942, gfx950 only" in out["gfx1100:sramecc-"]
    without_fp8 = "the GPU is gfx90a, and the kernel with an fp8 KV cache runs on gfx942, gfx950 only"
    assert without_fp8 in out["gfx90a:sramecc+"]
    assert out["gfx942:sramecc+:xnack-"] == out["gfx90a"] == "usable"


DETERMINISTIC = "attention backends are supported for deterministic inference, but you explicitly specified 'aiter'."
#: What a user asks -> why decode stays where it was, from the first of the releases on that has it.
KEEPS = {
    "deterministic": ("(options): SGLang refuses it: Currently only ", DETERMINISTIC),
    "context parallel": ("(options): --dcp-size is 2: TritonAttnBackend heeds it in decode, and ", "backend does not"),
    "speculative": (
        "(no_decode_batches): with --speculative-algorithm NGRAM each step is a target verify, ",
        "reach it",
    ),
    "disaggregated": ("(no_decode_batches): with --disaggregation-mode prefill another server decodes, ", "reach it"),
}
SPARSE = (
    "(replaced): SGLang gives the full-attention layers of this model to QwenSparseAttnBackend, whatever the backend"
)


@pytest.mark.parametrize("release", ["0.5.16", "0.5.18", "0.5.20", "0.5.23"])
def test_what_the_command_line_asks_keeps_decode_where_it_is_and_builds_no_second_backend(release):
    out = launch(release, "building:asked", env=(PA,)).result
    routed = "decode_pa: full-attention layers: prefill on TritonAttnBackend, decode on AiterAttnBackend (workspace"
    assert out["nothing"][:2] == ["AiterDecodeRouter", 1] and out["nothing"][2].startswith(routed)
    stays = "decode_pa: decode stays on its own backend "
    for name, (begins, ends) in KEEPS.items():
        kind, built, line = out[name]
        assert (kind, built) == ("TritonAttnBackend", 0), (name, out[name])
        assert line.startswith(stays + begins) and line.endswith(ends), name
    if release in ("0.5.16", "0.5.18"):
        # These have no sparse attention, and serve such a model as any other.
        assert out["indexer"][:2] == ["AiterDecodeRouter", 1]
    else:
        assert out["indexer"] == ["QwenSparseAttnBackend", 0, stays + SPARSE]


def states(*env):
    return launch("0.5.18", "building:states", env=env).result


#: Wrappers around each function: asm_context_prefill and head_ratio both wrap forward_extend on 0.5.18.
ALL = {"attn_backend_wrapper": 1, "forward_decode": 1, "forward_extend": 2}


def test_by_default_prefill_is_served_and_decode_is_not():
    out = states()
    assert out["wrapped"] == {**ALL, "attn_backend_wrapper": 0, "forward_decode": 0}
    assert out["built"] == "TritonAttnBackend"
    assert out["status"] == {
        "decode_pa": [False, "off"], "v_head_dim": [True, "off"], "asm_context_prefill": [True, "active"],
        "head_ratio": [True, "active"], "gather_reuse": [True, "off"],
    }  # fmt: skip
    assert [level for level, _ in out["logs"]] == ["INFO"]


def test_the_variable_turns_decode_on():
    out = states(PA)
    assert out["wrapped"] == ALL
    assert out["built"] == "AiterDecodeRouter"
    assert out["status"]["decode_pa"] == [True, "active"]


def test_the_master_switch_turns_everything_off():
    out = states(PA, ("SGLANG_AITER_EXT", "0"))
    assert not any(out["wrapped"].values())
    assert (out["built"], out["logs"]) == ("TritonAttnBackend", [])
    assert out["imported"] == [] or not any("sglang_aiter_ext" in name for name in out["imported"])


def test_the_asm_switch_and_the_disable_list_turn_single_capabilities_off():
    for env in (
        ("SGLANG_AITER_ASM_CONTEXT_PREFILL", "No"),
        ("SGLANG_AITER_EXT_DISABLE", " asm_context_prefill ,v_head_dim"),
    ):
        out = states(PA, env)
        assert out["wrapped"] == {**ALL, "forward_extend": 1}, env
        assert out["status"]["asm_context_prefill"] == [False, "off"]
        assert out["built"] == "AiterDecodeRouter"


def test_every_variable_that_cannot_be_read_is_named():
    out = states(
        ("SGLANG_AITER_EXT_STRICT", "perhaps"),
        ("SGLANG_AITER_ASM_CONTEXT_PREFILL", "maybe"),
        ("SGLANG_AITER_EXT_DISABLE", "head_ration"),
    )
    lines = [line for level, line in out["logs"] if level == "ERROR"]
    assert [line.partition("=")[0] for line in lines] == [
        "SGLANG_AITER_ASM_CONTEXT_PREFILL",
        "SGLANG_AITER_EXT_STRICT",
        "SGLANG_AITER_EXT_DISABLE",
    ]


def test_status_knows_the_master_switch(monkeypatch):
    from sglang_aiter_ext import activation

    for value in ("0", "maybe"):
        monkeypatch.setenv("SGLANG_AITER_EXT", value)
        activation._states.clear()
        assert {(s["enabled"], s["state"] in ("off", "failed")) for s in activation.status()} == {(False, True)}
    activation._states.clear()


@pytest.mark.parametrize("release", RELEASES)
def test_late_activation_rebinds_aliases_and_wraps_once(release):
    out = launch(release, "building:late", extension=False, env=(PA,)).result
    assert out == {
        "original": True, "layers": 1, "alias": True, "built": "AiterDecodeRouter", "kernels": ["paged_attention_ragged"],
        "supported": 1 if release == "0.5.18" else 0, "reloaded": True,
    }  # fmt: skip
