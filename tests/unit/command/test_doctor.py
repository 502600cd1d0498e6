"""`doctor`: what it says of a release, of AITER and of the routes, without importing any of them."""

import importlib.metadata
import json
import shutil
import subprocess
import sys
import types
import venv

import child
import environment
import matrix
import pytest
from conftest import written

from sglang_aiter_ext.capabilities import CAPABILITIES
from sglang_aiter_ext.command import doctor as doctor_of
from sglang_aiter_ext.source import Release


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
    assert [set(row) for row in report["capabilities"]] == [
        {"name", "verdict", "reason", "enabled", "switch", "asked_for", "wraps"}
    ] * 5
    verdicts = {name: verdict for name, (verdict, _) in matrix.verdicts("0.5.18").items()}
    assert {row["name"]: row["verdict"] for row in report["capabilities"]} == verdicts
    assert {row["name"]: row["enabled"] for row in report["capabilities"]}["decode_pa"] is False
    assert isinstance(report["activation"], dict)


@pytest.mark.slow
def test_doctor_imports_neither_sglang_nor_torch_nor_aiter():
    code = "import sys; from sglang_aiter_ext.command import doctor; doctor.report(); print(sorted({m.partition('.')[0] for m in sys.modules} & {'sglang', 'torch', 'aiter', 'wrapt'}))"
    env = child.clean_environment(PYTHONPATH=f"{sglang('0.5.18')}:{REFERENCE}")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=environment.ROOT)
    assert done.stdout == "[]\n", done.stderr


def test_doctor_says_what_a_gpu_means_for_each_capability():
    for arch, asm, decode in (("gfx942", "not_applicable", "apply"), ("gfx950", "apply", "apply"),
                              ("gfx90a", "not_applicable", "apply"), ("gfx1100", "not_applicable", "unsupported")):  # fmt: skip
        report = json.loads(doctor("--json", "--arch", arch, path=[sglang("0.5.18"), REFERENCE]).stdout)
        verdicts = {row["name"]: row["verdict"] for row in report["capabilities"]}
        assert (verdicts["asm_context_prefill"], verdicts["decode_pa"], report["gpus"]) == (asm, decode, [arch])
        assert verdicts["v_head_dim"] == "upstream"
    shown = doctor("--arch", "gfx942", path=[sglang("0.5.18"), REFERENCE])
    assert "GPU         gfx942\n" in shown.stdout and "the GPU is gfx942, and this is for gfx950" in shown.stdout
    assert shown.returncode == 0
    asked = doctor("--arch", "gfx1100", path=[sglang("0.5.18"), REFERENCE], SGLANG_USE_AITER_PA="1")
    assert asked.returncode == 1 and "the GPU is gfx1100, and this is for gfx90a, gfx942, gfx950" in asked.stdout


def test_doctor_reads_the_gpus_that_the_driver_names(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor_of.gpu, "architectures", lambda: ("gfx942",))
    assert doctor_of.report()["gpus"] == ["gfx942"] and doctor_of.report(arch="gfx950")["gpus"] == ["gfx950"]
    monkeypatch.setattr(doctor_of.gpu, "architectures", tuple)
    assert "no AMD GPU is visible here; --arch gfx950 asks" in doctor_of.text(doctor_of.report())


@pytest.mark.parametrize("arch", ["mi300x", "gfx", "950", "GFX942 "])
def test_doctor_refuses_what_is_no_architecture(arch):
    done = doctor("--arch", arch, path=[sglang("0.5.18"), REFERENCE])
    assert done.returncode == 2 and f"--arch {arch}: use the name of an AMD GPU architecture" in done.stderr


def test_doctor_says_that_aiter_lacks_the_asm_kernel_and_which_has_it(tmp_path):
    shutil.copytree(REFERENCE, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "hsa")
    gate = tmp_path / "aiter" / "ops" / "mha.py"
    gate.write_text(gate.read_text().replace(" or (hdim_q == 256", " or (hdim_q == 192"))
    for value, status in (("", 0), ("1", 1)):
        done = doctor(path=[sglang("0.5.18"), tmp_path], SGLANG_AITER_ASM_CONTEXT_PREFILL=value)
        assert done.returncode == status
        assert "its ops/mha.py does not let that head_dim through; AITER v0.1.19 is the first" in done.stdout


def test_doctor_names_an_atom_that_replaces_models_and_no_other_package_of_that_name(tmp_path):
    written(tmp_path, {"atom/__init__.py": ""})
    assert "ATOM" not in doctor(path=[sglang("0.5.18"), REFERENCE, tmp_path]).stdout
    written(tmp_path, {"atom/plugin/__init__.py": ""})
    done = doctor(path=[sglang("0.5.18"), REFERENCE, tmp_path])
    assert f"ATOM        {tmp_path / 'atom'} can replace SGLang's models" in done.stdout


@pytest.mark.slow
def test_doctor_exit_status():
    assert doctor().returncode == 2
    assert doctor(path=[sglang("0.5.18")]).returncode == 1  # no AITER
    assert doctor(path=[sglang("0.5.18"), REFERENCE]).returncode == 0
    # asm_context_prefill is unsupported there, which is a problem for who asked for it.
    for value, status in (("", 0), ("0", 0), ("1", 1)):
        assert doctor(path=[sglang("0.5.9"), REFERENCE], SGLANG_AITER_ASM_CONTEXT_PREFILL=value).returncode == status
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


@pytest.mark.parametrize(
    "files, value, plugins, expected",
    [
        ({"srt/plugins/__init__.py": ""}, doctor_of.PLUGIN, None, True), ({"srt/plugins.py": ""}, doctor_of.PLUGIN, "", True),
        ({"srt/plugins/__init__.py": ""}, doctor_of.PLUGIN, "other, ours ", True), ({"srt/other.py": ""}, doctor_of.PLUGIN, None, False),
        ({"srt/plugins/__init__.py": ""}, doctor_of.PLUGIN, "other", False), ({"srt/plugins/__init__.py": ""}, "other:activate", None, False),
    ],
)  # fmt: skip
def test_sglang_would_load_the_plugin_where_it_has_a_loader_and_its_list_leaves_ours_in(
    tmp_path, monkeypatch, files, value, plugins, expected
):
    entry = types.SimpleNamespace(name="ours", value=value)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: [entry] * (group == "sglang.srt.plugins"))
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    if plugins is not None:
        monkeypatch.setenv("SGLANG_PLUGINS", plugins)
    assert doctor_of.activation(Release(written(tmp_path, files)))["plugin"] is expected
    assert doctor_of.activation(None)["plugin"] is False


def test_what_is_wrapped_is_shown_where_the_release_needs_it(tmp_path):
    report = json.loads(doctor("--json", path=[sglang("0.5.23"), REFERENCE]).stdout)
    wraps = {row["name"]: row["wraps"] for row in report["capabilities"]}
    assert wraps["asm_context_prefill"] == [] and "aiter_backend.paged_attention_ragged" in wraps["decode_pa"]
    shown = doctor(path=[sglang("0.5.23"), REFERENCE]).stdout
    assert f"decode_pa wraps {', '.join(wraps['decode_pa'])}" in shown and "asm_context_prefill wraps" not in shown


RAGGED = "paged_attention_ragged"
#: What differs from a report without a problem -> the status of the command.
STATUS = [
    ({}, 0), (dict(sglang=None), 2), (dict(errors=["x"]), 1), (dict(wrapt=False), 1), (dict(wrapt=False, enabled=False), 0),
    (dict(wrapt=False, verdict="upstream", wraps=[]), 0), (dict(verdict="unsupported", wraps=[]), 0), (dict(wraps=[]), 1),
    (dict(verdict="unsupported", wraps=[], asked_for=True), 1), (dict(verdict="not_applicable", wraps=[], asked_for=True), 0),
    (dict(verdict="unsupported", wraps=[], enabled=False, asked_for=True), 0), (dict(kernel="lacks it"), 1), (dict(kernel="lacks it", enabled=False), 0),
]  # fmt: skip


@pytest.mark.parametrize("changed, status", STATUS)
def test_the_status_is_a_problem_where_what_is_wanted_cannot_be_wrapped_or_served(changed, status):
    fields = dict(
        sglang={}, errors=[], wrapt=True, enabled=True, verdict="apply", wraps=["f"], kernel=None, asked_for=False
    )
    given = {**fields, **changed}
    row = {"name": "decode_pa", **{name: given[name] for name in ("enabled", "asked_for", "verdict", "wraps")}}
    report = {
        "sglang": given["sglang"], "wrapt": given["wrapt"], "activation": {"errors": given["errors"]},
        "aiter": {"kernels": {RAGGED: given["kernel"]}}, "capabilities": [row],
    }  # fmt: skip
    assert doctor_of.exit_status(report) == status
