"""The wheel: what is in it, and SGLang's plugin route with it installed."""

import json
import os
import subprocess
import sys
import zipfile

import child
import environment
import pytest


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy of the files git knows, as a release is."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    names = ["sglang_aiter_ext", "sitecustomize", "tests", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"]
    subprocess.run(["cp", "-r", *(environment.ROOT / name for name in names), source], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", folder, source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory):
    target = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", target, wheel], check=True)
    return target


def test_the_wheel_holds_no_top_level_sitecustomize(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"sglang_aiter_ext"}
    assert {"sglang_aiter_ext/py.typed", "sglang_aiter_ext/preload/sitecustomize/__init__.py"} <= set(names)
    metadata = zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith("METADATA"))).decode()
    needs = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra" not in line]
    assert needs == ["Requires-Dist: wrapt>=1.16"]


def test_an_installed_package_has_the_stand_in_for_its_selftest(site):
    env = child.clean_environment(PYTHONPATH=str(site), OMP_NUM_THREADS="1")
    command = [sys.executable, "-m", "sglang_aiter_ext", "selftest", "--reference", "--tokens", "40"]
    done = subprocess.run([*command, "--chunk", "8"], env=env, capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    assert f"AITER at {site}/sglang_aiter_ext/reference/aiter/__init__.py" in done.stdout


def test_an_installed_package_activates_by_its_own_path(site):
    env = child.clean_environment(PYTHONPATH=str(site))
    command = [sys.executable, "-m", "sglang_aiter_ext"]
    path = subprocess.run([*command, "path"], env=env, capture_output=True, text=True, cwd="/").stdout.strip()
    assert path == str(site / "sglang_aiter_ext" / "preload")
    code = "import sys; print(any(type(f).__name__ == 'TargetFinder' for f in sys.meta_path))"
    done = subprocess.run(
        [*command, "run", "--", sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd="/"
    )
    assert done.stdout == "True\n", done.stderr
    plain = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd="/")
    assert plain.stdout == "False\n"


def test_the_entry_alone_activates_a_python_that_has_not_the_package(site):
    """As a program of another Python started by `run`; nothing else of that folder becomes importable."""
    (site / "neighbour.py").write_text("")
    env = child.clean_environment(PYTHONPATH=str(site / "sglang_aiter_ext" / "preload"))
    code = (
        "import sys, importlib.util as u; print([type(f).__name__ for f in sys.meta_path].count('TargetFinder'),"
        " u.find_spec('neighbour'), sys.modules['sglang_aiter_ext'].__file__); import sglang_aiter_ext.activation"
    )
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd="/")
    assert (done.stdout, done.stderr) == (f"1 None {site}/sglang_aiter_ext/__init__.py\n", "")


@pytest.mark.parametrize(
    "release, plugins, expected",
    [("0.5.12.post1", "", True), ("0.5.12.post1", "a, sglang_aiter_ext", True), ("0.5.12.post1", "a", False), (None, "", False)],
)  # fmt: skip
def test_doctor_says_whether_sglang_would_load_the_plugin(site, release, plugins, expected):
    path = [site, *([environment.place("sglang", release)] if release else [])]
    env = child.clean_environment(PYTHONPATH=os.pathsep.join(map(str, path)), SGLANG_PLUGINS=plugins)
    command = [sys.executable, "-m", "sglang_aiter_ext", "doctor", "--json"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd="/")
    assert json.loads(done.stdout)["activation"]["plugin"] is expected


@pytest.mark.slow
@pytest.mark.parametrize("release", ["0.5.12.post1", "0.5.23"])
@pytest.mark.parametrize("order", ["plugin", "path+plugin", "late plugin"])
def test_sglangs_plugin_loader_activates_it_once(site, release, order):
    """In every order with the PYTHONPATH route, and when the target modules are there already."""
    entries = [str(site), str(environment.place("sglang", release)), str(environment.ROOT / "tests" / "reference")]
    if order == "path+plugin":
        entries.insert(0, str(site / "sglang_aiter_ext" / "preload"))
    case = "building:plugin_late" if order == "late plugin" else "building:plugin"
    env = child.clean_environment(
        PYTHONPATH=os.pathsep.join(entries),
        TRITON_INTERPRET="1",
        OMP_NUM_THREADS="1",
        SGLANG_USE_AITER_PA="1",
        SGLANG_PLUGINS="sglang_aiter_ext",
    )
    command = [sys.executable, str(child.KIT / "child.py"), case]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd="/")
    line = next((x for x in done.stdout.splitlines() if x.startswith(child.MARK)), None)
    assert line, done.stderr[-3000:]
    assert line == child.MARK + '{"layers": 1, "from": true, "built": "AiterDecodeRouter"}', line


@pytest.mark.slow
def test_pip_installs_it_into_a_clean_environment_with_wrapt_and_nothing_else(wheel, tmp_path):
    import venv

    venv.create(tmp_path / "clean", with_pip=True)
    bin = tmp_path / "clean" / "bin"
    env = child.clean_environment(PATH=f"{bin}{os.pathsep}{os.environ['PATH']}")
    subprocess.run([bin / "pip", "install", "-q", "--no-cache-dir", wheel], check=True, env=env)
    listed = subprocess.run([bin / "pip", "list", "--format=freeze"], env=env, capture_output=True, text=True).stdout
    names = {line.partition("==")[0] for line in listed.split()}
    assert names - {"pip", "setuptools", "wheel"} == {"sglang-aiter-ext", "wrapt"}
    (site,) = (tmp_path / "clean" / "lib").glob("python*/site-packages")
    path = subprocess.run(["sglang-aiter-ext", "path"], env=env, capture_output=True, text=True).stdout.strip()
    assert path == str(site / "sglang_aiter_ext" / "preload")
    shell = (
        'export PYTHONPATH=$(sglang-aiter-ext path):$PYTHONPATH; python -m sglang_aiter_ext doctor; echo "status $?"'
    )
    done = subprocess.run(["sh", "-c", shell], env=env, capture_output=True, text=True, cwd="/")
    assert "PYTHONPATH yes" in done.stdout and done.stdout.endswith("status 2\n"), done.stdout + done.stderr
    assert not (site / "sitecustomize").exists() and not (site / "sitecustomize.py").exists()
