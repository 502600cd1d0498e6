"""Verdicts over every released wheel: from the code, never from the version."""

import json
import shutil
import subprocess
import sys
import venv

import child
import environment
import matrix
import pytest
from environment import since

from sglang_aiter_ext import installed
from sglang_aiter_ext.capabilities import CAPABILITIES
from sglang_aiter_ext.capabilities.decode_pa import Facts

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


@pytest.mark.slow
def test_the_readme_shows_the_matrix():
    assert matrix.table() in (environment.ROOT / "README.md").read_text()


def copied(tmp_path, version, *files):
    """A copy of what the probes read of a release, to change."""
    source = environment.place("sglang", version) / "sglang"
    target = tmp_path / "sglang"
    needed = {BACKEND, "srt/model_executor/model_runner.py", *files}
    needed |= {need.module.replace(".", "/") + ".py" for c in CAPABILITIES for need in c.needs}
    for name in needed:
        if (source / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source / name, target / name)
    return target


def verdicts_of(root):
    release = installed.Release(root)
    return {c.name: tuple(c.verdict(release)) for c in CAPABILITIES}


@pytest.mark.slow
def test_the_version_says_nothing(tmp_path):
    root = copied(tmp_path, "0.5.12.post1")
    for name in ("version.py", "_version.py"):
        (root / name).write_text("__version__ = version = '0.5.23'\n")
    assert installed.Release(root).version == "0.5.23"
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


# ---- doctor ----


def doctor(*arguments, path=(), **env):
    entries = ":".join(map(str, path))
    variables = child.clean_environment(PYTHONPATH=entries, **env)
    command = [sys.executable, "-m", "sglang_aiter_ext", "doctor", *map(str, arguments)]
    return subprocess.run(command, env=variables, capture_output=True, text=True, cwd=environment.ROOT)


REFERENCE = environment.ROOT / "tests" / "reference"


def sglang(version):
    return environment.place("sglang", version)


@pytest.mark.slow
def test_doctor_reports_in_the_fixed_shape_without_importing_anything():
    done = doctor("--json", path=[sglang("0.5.18"), REFERENCE])
    report = json.loads(done.stdout)
    assert done.returncode == 0 and done.stderr == ""
    assert report["sglang"] == {"version": "0.5.18", "path": str(sglang("0.5.18") / "sglang")}
    assert (report["aiter"]["usable"], report["aiter"]["path"]) == (True, str(REFERENCE / "aiter"))
    assert [set(row) for row in report["capabilities"]] == [{"name", "verdict", "reason", "enabled", "switch"}] * 5
    assert {row["name"]: row["verdict"] for row in report["capabilities"]} == expected("0.5.18")
    assert {row["name"]: row["enabled"] for row in report["capabilities"]}["decode_pa"] is False
    assert isinstance(report["activation"], dict)


@pytest.mark.slow
def test_doctor_imports_neither_sglang_nor_torch_nor_aiter():
    code = "import sys; from sglang_aiter_ext import doctor; doctor.examine(); print(sorted({m.partition('.')[0] for m in sys.modules} & {'sglang', 'torch', 'aiter', 'wrapt'}))"
    env = child.clean_environment(PYTHONPATH=f"{sglang('0.5.18')}:{REFERENCE}")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=environment.ROOT)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.slow
def test_doctor_exit_status():
    assert doctor().returncode == 2
    assert doctor(path=[sglang("0.5.18")]).returncode == 1  # no AITER
    assert doctor(path=[sglang("0.5.18"), REFERENCE]).returncode == 0
    assert doctor(path=[sglang("0.5.9"), REFERENCE]).returncode == 1  # asm_context_prefill is unsupported there
    assert doctor(path=[sglang("0.5.9"), REFERENCE], SGLANG_AITER_ASM_CONTEXT_PREFILL="0").returncode == 0
    assert doctor(path=[sglang("0.5.23")]).returncode == 0  # nothing enabled needs AITER from us
    assert doctor(path=[sglang("0.5.23")], SGLANG_USE_AITER_PA="1").returncode == 1
    assert doctor(path=[sglang("0.5.18")], SGLANG_AITER_EXT="0").returncode == 0


def test_doctor_says_that_wrapt_is_missing_where_something_would_be_wrapped(tmp_path):
    venv.create(tmp_path, symlinks=True)  # with nothing in it
    command = [tmp_path / "bin" / "python", "-m", "sglang_aiter_ext", "doctor"]
    for release, status in (("0.5.12.post1", 1), ("0.5.23", 0)):
        env = child.clean_environment(PYTHONPATH=f"{sglang(release)}:{REFERENCE}")
        done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=environment.ROOT)
        assert done.returncode == status
        assert "Error       wrapt is not installed for this Python; nothing can be wrapped\n" in done.stdout
    assert "wrapt" not in doctor(path=[sglang("0.5.23"), REFERENCE]).stdout


def test_doctor_reads_an_unpacked_release_and_says_what_it_cannot_find(tmp_path):
    for path in (sglang("0.5.23"), sglang("0.5.23") / "sglang"):
        done = doctor("--sglang-path", path, "--json")
        assert json.loads(done.stdout)["sglang"]["version"] == "0.5.23"
    done = doctor("--sglang-path", tmp_path)
    assert done.returncode == 2 and f"--sglang-path {tmp_path}: no SGLang there" in done.stderr


def test_doctor_says_why_aiter_is_not_usable(tmp_path):
    (tmp_path / "aiter").mkdir()
    report = json.loads(doctor("--json", path=[tmp_path]).stdout)["aiter"]
    assert not report["usable"] and "namespace package" in report["reason"] and str(tmp_path) in report["path"]
    report = json.loads(doctor("--json", path=[environment.place("amd-aiter", environment.AITER)]).stdout)["aiter"]
    assert not report["usable"]
    assert (
        "flash_attn_varlen_fp8_pertensor_func has parameter 3 'cu_seqlens_q' where 'q_descale' is expected"
        in report["reason"]
    )


def test_doctor_survives_an_aiter_that_cannot_be_parsed(tmp_path):
    (tmp_path / "aiter" / "ops").mkdir(parents=True)
    (tmp_path / "aiter" / "__init__.py").write_text("")
    (tmp_path / "aiter" / "ops" / "mha.py").write_text("def f(:\n")
    done = doctor("--json", path=[sglang("0.5.23"), tmp_path])
    report = json.loads(done.stdout)["aiter"]
    assert not report["usable"] and "cannot be read" in report["reason"] and done.stderr == ""


def test_doctor_reports_every_variable_that_cannot_be_read():
    wrong = {"SGLANG_AITER_EXT_STRICT": "maybe", "SGLANG_AITER_EXT_DISABLE": "decode_paa", "SGLANG_USE_AITER_PA": "2"}
    done = doctor(path=[sglang("0.5.23"), REFERENCE], **wrong)
    assert done.returncode == 1
    for name, value in wrong.items():
        assert f"{name}={value!r} is not accepted" in done.stdout


def test_doctor_says_what_hides_us_on_the_path(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("")
    routes = json.loads(doctor("--json", path=[tmp_path, environment.ROOT]).stdout)["activation"]
    assert (routes["pythonpath"], routes["hidden_by"], routes["this_process"]) == (
        False,
        str(tmp_path / "sitecustomize.py"),
        False,
    )
    routes = json.loads(doctor("--json", path=[environment.ROOT, tmp_path]).stdout)["activation"]
    assert (routes["pythonpath"], routes["hidden_by"], routes["this_process"]) == (True, None, True)


def test_doctor_for_people_names_each_capability_and_variable():
    done = doctor(path=[sglang("0.5.12.post1"), REFERENCE], SGLANG_USE_AITER_PA="banana")
    assert "0.5.12.post1" in done.stdout
    for capability in CAPABILITIES:
        assert capability.name in done.stdout
    assert "SGLANG_USE_AITER_PA='banana' is not accepted" in done.stdout
