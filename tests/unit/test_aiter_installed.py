"""What the files of an AITER that is installed tell of its kernels, and of its gfx950 ASM kernel."""

import hashlib
import importlib.machinery
import shutil
import sys
from types import ModuleType

import environment
import pytest
from conftest import written

from sglang_aiter_ext import aiter_installed
from sglang_aiter_ext.aiter_kernels import ASM_PREFILL, KEYWORDS, PAGED_PREFILL, PARAMETERS, RAGGED_DECODE

REFERENCE = environment.ROOT / "tests" / "reference"


def all_of(name):
    return [*PARAMETERS[name], *KEYWORDS[name]]


# ---- the kernels and their parameters ----


def source_of(*names):
    return "".join(f"def {name}({', '.join(all_of(name))}): 0\n" for name in names)


ELSEWHERE = {"aiter/__init__.py": source_of(ASM_PREFILL), "aiter/ops/mha.py": source_of(PAGED_PREFILL)}
COMPLETE = {**ELSEWHERE, "aiter/ops/attention.py": source_of(RAGGED_DECODE)}


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """What is said of an AITER of these files, which raises where it is imported."""

    def said(files):
        monkeypatch.delitem(sys.modules, "aiter", raising=False)
        monkeypatch.setattr(sys, "path", [str(written(tmp_path, files))])
        return aiter_installed.on_path()

    return said


def test_an_aiter_on_the_path_is_usable_where_its_source_has_every_kernel_in_any_of_three_files(installed, tmp_path):
    files = {**COMPLETE, "aiter/__init__.py": "raise AssertionError('imported')\n" + COMPLETE["aiter/__init__.py"]}
    reason = "its source has the kernels, with the parameters that are expected"
    kernels = dict.fromkeys(PARAMETERS)
    assert installed(files) == {"usable": True, "path": str(tmp_path / "aiter"), "reason": reason, "kernels": kernels}
    assert "aiter" not in sys.modules


def test_each_kernel_that_the_source_lacks_or_has_in_another_way_is_named(installed):
    found = installed({**ELSEWHERE, "aiter/ops/mha.py": f"def {PAGED_PREFILL}(q, v): 0\n"})
    problem = f"{PAGED_PREFILL} has parameter 1 'v' where 'k' is expected"
    assert found["kernels"] == {PAGED_PREFILL: problem, ASM_PREFILL: None, RAGGED_DECODE: f"lacks {RAGGED_DECODE}"}
    assert not found["usable"] and found["reason"] == f"{problem}; lacks {RAGGED_DECODE}"


@pytest.mark.parametrize(
    "files, path, words",
    [
        ({}, False, "aiter is not installed for this Python"), ({"aiter/a": ""}, True, "an empty namespace package"),
        ({**COMPLETE, "aiter/ops/mha.py": "def f(:"}, True, "its source cannot be read: "),
    ],
)  # fmt: skip
def test_an_aiter_that_is_missing_empty_or_broken_serves_no_kernel(installed, tmp_path, files, path, words):
    found = installed(files)
    assert not found["usable"] and found["reason"].startswith(words)
    assert found["path"] == (str(tmp_path / "aiter") if path else None)
    assert found["kernels"] == dict.fromkeys(PARAMETERS, found["reason"])


def test_an_aiter_that_cannot_be_looked_for_serves_no_kernel(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiter", ModuleType("aiter"))
    sys.modules["aiter"].__spec__ = None
    found = aiter_installed.on_path()
    assert (found["usable"], found["path"]) == (False, None) and "cannot be looked for" in found["reason"]


def test_an_aiter_that_some_finder_makes_up_without_any_file_is_no_aiter(monkeypatch):
    monkeypatch.setitem(sys.modules, "aiter", ModuleType("aiter"))
    sys.modules["aiter"].__spec__ = importlib.machinery.ModuleSpec("aiter", None)
    found = aiter_installed.on_path()
    assert (found["usable"], found["path"]) == (False, "") and found["reason"].startswith("an empty namespace package")


def test_the_package_is_the_folder_of_an_aiter_and_of_nothing_else(installed, tmp_path):
    installed({})
    assert aiter_installed.package() is None
    installed({"aiter/a": ""})
    assert aiter_installed.package() is None
    installed(COMPLETE)
    assert aiter_installed.package() == tmp_path / "aiter"


# ---- the ASM kernel ----


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """An AITER that has the ASM kernel, laid out as a source checkout is, and nothing in the environment."""
    monkeypatch.delenv("AITER_META_DIR", raising=False)
    for name in ("aiter", "csrc", "hsa"):
        shutil.copytree(REFERENCE / name, tmp_path / name)
    return tmp_path


TABLE = f"{aiter_installed.KERNELS}/fmha_fwd.csv"


def problem(checkout):
    return aiter_installed.asm_problem(checkout / "aiter")


def change(path, before, after):
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


def test_an_aiter_with_the_gate_the_rows_and_the_code_objects_has_the_kernel(checkout):
    assert problem(checkout) is None


@pytest.mark.parametrize(
    "file, before, after, words",
    [
        ("aiter/ops/mha.py", "hdim_q == 256", "hdim_q == 192", "its ops/mha.py does not let that head_dim through"),
        ("aiter/ops/mha.py", "is_fmha_v3_fp8", "is_something", "does not choose it in a way that is known here"),
        ("aiter/ops/mha.py", "_flash_attn_varlen_forward", "other", "does not choose it in a way that is known here"),
        (TABLE, "fp8bf16,256,256,2", "fp8bf16,128,128,2", "lists no causal one for varlen batches"),
        (TABLE, "fp8bf16,256,256,0", "fp8bf16,256,128,0", "lists no non-causal one for varlen batches"),
        (TABLE, "fp8bf16,256,256,2", "bf16,256,256,2", "lists no causal one for varlen batches"),
    ],
)
def test_each_thing_that_the_kernel_needs_is_named_where_it_is_not_there(checkout, file, before, after, words):
    change(checkout / file, before, after)
    found = problem(checkout)
    assert found.startswith(f"AITER at {checkout / 'aiter'} has no gfx950 fp8 ASM kernel for head_dim 256: ")
    assert words in found and found.endswith("AITER v0.1.19 is the first release with it")


@pytest.mark.parametrize("name", ["reference_causal_group.co", "reference_group.co"])
def test_a_code_object_that_is_missing_is_named(checkout, name):
    path = checkout / aiter_installed.KERNELS / name
    path.unlink()
    assert problem(checkout).endswith(f": {path} is missing")


def test_a_code_object_that_is_known_to_be_wrong_is_left_alone(checkout, monkeypatch):
    path = checkout / aiter_installed.KERNELS / "reference_causal_group.co"
    path.write_bytes(b"a wrong kernel")
    assert problem(checkout) is None
    digest = hashlib.sha256(b"a wrong kernel").hexdigest()
    monkeypatch.setattr(aiter_installed, "BAD_OBJECTS", {digest: "leaves rows unwritten"})
    assert problem(checkout) == f"AITER's code object {path} leaves rows unwritten"


@pytest.mark.parametrize(
    "file, content, words",
    [
        ("aiter/ops/mha.py", "def f(:", "SyntaxError"), ("aiter/ops/mha.py", None, "FileNotFoundError"),
        (TABLE, None, "FileNotFoundError"), (TABLE, b"\xff\xfe\x00", "UnicodeDecodeError"),
        (TABLE, b"dtype,hdim_q,hdim_v,mask,mode\nfp8bf16,256,256,2,1\n", "KeyError: 'co_name'"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_said_and_not_guessed(checkout, file, content, words):
    path = checkout / file
    path.unlink()
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    found = problem(checkout)
    assert found.startswith(f"whether AITER at {checkout / 'aiter'} has the gfx950 fp8 ASM kernel cannot be read: ")
    assert words in found


def test_a_wheel_keeps_its_kernels_in_a_folder_of_its_own(checkout):
    """As `setup.py` of AITER lays it out, and `aiter/jit/core.py` finds it."""
    meta = checkout / "aiter_meta"
    meta.mkdir()
    (checkout / "csrc").rename(meta / "csrc")
    (checkout / "hsa").rename(meta / "hsa")
    (checkout / "aiter" / "install_mode").write_text("install\n")
    assert problem(checkout) is None
    (checkout / "aiter" / "install_mode").write_text("develop\n")
    assert "FileNotFoundError" in problem(checkout)


def test_the_folder_that_the_user_names_is_the_one_that_is_read(checkout, monkeypatch, tmp_path_factory):
    other = tmp_path_factory.mktemp("meta")
    monkeypatch.setenv("AITER_META_DIR", str(other))
    # AITER takes a folder without csrc for a mistake, and looks beside its package.
    assert problem(checkout) is None
    (other / "csrc").mkdir()
    assert "FileNotFoundError" in problem(checkout) and str(other) in problem(checkout)
    (checkout / "hsa").rename(other / "hsa")
    assert problem(checkout) is None
