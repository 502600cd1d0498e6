"""Verdicts over every released wheel: from the code, never from the version."""

import shutil

import environment
import matrix
import pytest
from environment import since

from sglang_aiter_ext.capabilities import CAPABILITIES
from sglang_aiter_ext.capabilities.decode_pa.release import Facts
from sglang_aiter_ext.capability import short
from sglang_aiter_ext.names import TARGETS
from sglang_aiter_ext.source import Release, mentions

BACKEND = "srt/layers/attention/aiter_backend.py"


def expected(version):
    """Read off the wheels by hand, once; each line names the first release of a change."""
    return {
        "decode_pa": "apply",
        "v_head_dim": "upstream" if version in since("0.5.10") else "apply",
        "asm_context_prefill": "upstream"
        if version in since("0.5.19")
        else "apply"
        if version in since("0.5.10")
        else "unsupported",
        "head_ratio": "upstream"
        if version in since("0.5.20")
        else "apply"
        if version in since("0.5.17")
        else "not_applicable",
        "gather_reuse": "upstream"
        if version in since("0.5.21")
        else "apply"
        if version in since("0.5.19")
        else "not_applicable",
    }


@pytest.mark.parametrize("version", environment.RELEASES)
def test_the_verdict_of_every_release(version):
    found = matrix.verdicts(version)
    assert {name: verdict for name, (verdict, _) in found.items()} == expected(version)
    assert all(reason for _, reason in found.values())


@pytest.mark.parametrize("version", environment.RELEASES)
def test_the_facts_decode_relies_on(version):
    facts = Facts(matrix.release(version))
    assert facts.reads_fp8 == (version in since("0.5.12"))
    assert facts.casts_pool == (version in since("0.5.6.post2") and version not in since("0.5.12"))
    assert facts.writes_at_unit_scale == (version not in since("0.5.16"))
    assert facts.graph_buffer_in_pages == (version in since("0.5.10") and version not in since("0.5.13"))
    assert facts.wraps_each_side == (version not in since("0.5.16"))
    assert facts.layer_at == (0 if version in since("0.5.9") else 3)


@pytest.mark.parametrize("version", environment.RELEASES)
def test_what_is_wrapped_lies_in_a_target_of_its_capability_and_is_defined_or_imported_there(version):
    release, seen = matrix.release(version), 0
    for capability in CAPABILITIES:
        assert capability.targets <= set(TARGETS)
        if expected(version)[capability.name] != "apply":
            assert capability.wraps(release) == []
            continue
        names = list(capability.wrappers(release))
        assert names and capability.wraps(release) == [short(name) for name in names]
        for name in names:
            (target,) = (target for target in capability.targets if name.startswith(f"{target}."))
            source, inner = release.source(target), name.removeprefix(f"{target}.")
            # What the module imports, such as a kernel of AITER's, is called in it.
            assert source.function(inner) is not None or ("." not in inner and mentions(source.tree, inner)), name
            seen += 1
        # And it wraps something in each of its targets, so that `pending` ends.
        assert {target for target in capability.targets if any(n.startswith(f"{target}.") for n in names)} == (
            capability.targets
        )
    assert seen >= 3


@pytest.mark.slow
def test_the_readme_shows_the_matrix():
    assert matrix.table() in (environment.ROOT / "README.md").read_text()


def copied(tmp_path, version, *files):
    """A copy of what the probes read of a release, to change."""
    source = environment.place("sglang", version) / "sglang"
    target = tmp_path / "sglang"
    needed = {BACKEND, "srt/model_executor/model_runner.py", *files}
    needed |= {"/".join(need.module.split(".")[1:]) + ".py" for c in CAPABILITIES for need in c.needs}
    for name in needed:
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, target / name)
    return target


def verdicts_of(root):
    release = Release(root)
    return {c.name: tuple(c.verdict(release)) for c in CAPABILITIES}


@pytest.mark.slow
def test_the_version_says_nothing(tmp_path):
    root = copied(tmp_path, "0.5.12.post1")
    for name in ("version.py", "_version.py"):
        (root / name).write_text("__version__ = version = '0.5.23'\n")
    assert Release(root).version == "0.5.23"
    assert {n: v for n, (v, _) in verdicts_of(root).items()} == expected("0.5.12.post1")


@pytest.mark.slow
def test_a_cherry_picked_change_is_upstream(tmp_path):
    """0.5.18 with the AITER backend of 0.5.21."""
    root = copied(tmp_path, "0.5.18")
    shutil.copy(environment.place("sglang", "0.5.21") / "sglang" / BACKEND, root / BACKEND)
    found = {n: v for n, (v, _) in verdicts_of(root).items()}
    assert found["asm_context_prefill"] == found["head_ratio"] == found["gather_reuse"] == "upstream"
    registry = root / "srt/layers/attention/attention_registry.py"
    registry.write_text(registry.read_text() + "\n_use_pa = get_bool_env_var('SGLANG_USE_AITER_PA')\n")
    assert verdicts_of(root)["decode_pa"][0] == "upstream"


#: A change to a release -> (capability, what the reason must say).
DRIFT = {
    "a parameter renamed": ("def forward_extend(\n        self,\n        q: torch.Tensor", "def forward_extend(\n        self,\n        query: torch.Tensor", {"asm_context_prefill": "AiterAttnBackend.forward_extend in sglang.srt.layers.attention.aiter_backend has no parameter q "}),
    "the method gone": ("def forward_extend(", "def forward_prefill(", {"asm_context_prefill": "has no AiterAttnBackend.forward_extend", "head_ratio": "has no AiterAttnBackend.forward_extend"}),
    "the paged call twice": ("            o = mha_batch_prefill_func(", "            mha_batch_prefill_func()\n            o = mha_batch_prefill_func(", {"asm_context_prefill": "calls mha_batch_prefill_func 2 times"}),
    "the descales gone": ("k_descale=k_descale,\n                v_descale=v_descale,\n                **extra_kwargs", "**extra_kwargs", {"asm_context_prefill": "does not pass its descales"}),
    "the decode kernel by name": ("                paged_attention_ragged(\n", "                paged_attention_by_another_name(\n", {"decode_pa": "calls paged_attention_ragged 0 times"}),
    "the graph buffer gone": ("kv_indices_buf: Optional[torch.Tensor] = None,\n    ):", "):", {"decode_pa": "has no parameter kv_indices_buf"}),
    "the paged call renamed": ("mha_batch_prefill_func", "mha_batch_prefill_v2", {"asm_context_prefill": "calls mha_batch_prefill_func 0 times"}),
    "the ASM call renamed": ("flash_attn_varlen_fp8_pertensor_func", "flash_attn_varlen_fp8_v2", {"head_ratio": "does not call flash_attn_varlen_fp8_pertensor_func"}),
    "another way to ask for a prefix": ("and not any(forward_batch.extend_prefix_lens_cpu)", "and max(forward_batch.extend_prefix_lens_cpu) == 0", {"asm_context_prefill": "does not say whether there is a prefix", "gather_reuse": "does not say whether there is a prefix"}),
    "the ASM call in a helper": ("                o = flash_attn_varlen_fp8_pertensor_func(", "                o = self._asm(", {"asm_context_prefill": "forward_extend does not call it", "head_ratio": "does not call"}),
    "not causal": ("causal=True,\n                logits_soft_cap=self.logits_soft_cap", "causal=False,\n                logits_soft_cap=self.logits_soft_cap", {"asm_context_prefill": "something else than plain causal attention"}),
    "an attribute renamed": ("input_dtype", "activation_dtype", {"asm_context_prefill": "does not use input_dtype"}),
    "parameters in another order": ("layer: RadixAttention,\n        forward_batch: ForwardBatch,\n        save_kv_cache=True,\n        sinks=None,\n    ):\n        self.logits_soft_cap", "forward_batch: ForwardBatch,\n        layer: RadixAttention,\n        save_kv_cache=True,\n        sinks=None,\n    ):\n        self.logits_soft_cap", {"asm_context_prefill": "is the order expected", "head_ratio": "is the order expected"}),
    "an unknown condition": ("                is_gfx95_supported()\n                and forward_batch.forward_mode.is_extend()", "                some_gpu()\n                and forward_batch.forward_mode.is_extend()", {"head_ratio": "does not ask is_gfx95_supported()"}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("change", DRIFT)
def test_what_is_gone_or_different_is_unsupported_and_named(tmp_path, change):
    root = copied(tmp_path, "0.5.18")
    before, after, wanted = DRIFT[change]
    text = (root / BACKEND).read_text()
    assert before in text
    (root / BACKEND).write_text(text.replace(before, after))
    found = verdicts_of(root)
    for name, words in wanted.items():
        verdict, reason = found[name]
        assert verdict == "unsupported" and words in reason, found[name]


@pytest.mark.slow
def test_a_missing_module_and_a_broken_one_are_unsupported(tmp_path):
    root = copied(tmp_path, "0.5.18")
    (root / BACKEND).write_text("def broken(:\n")
    assert "cannot be read" in verdicts_of(root)["asm_context_prefill"][1]
    (root / BACKEND).unlink()
    for name, (verdict, reason) in verdicts_of(root).items():
        assert verdict == "unsupported" and "no module sglang.srt.layers.attention.aiter_backend" in reason, name
