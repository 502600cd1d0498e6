"""Beside other parties that hook Python's start or SGLang's methods: the real packages from PyPI, in every order."""

from __future__ import annotations

import configparser
import dataclasses
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import child
import environment
import pytest
from conftest import EXACT

pytestmark = pytest.mark.slow
ROOT, TESTS = environment.ROOT, child.TESTS
RELEASE = "0.5.12.post1"
RUN = [sys.executable, "-m", "sglang_aiter_ext", "run", "--"]


@dataclasses.dataclass(frozen=True)
class Party:
    """A launcher that puts a folder with its own sitecustomize first on PYTHONPATH, as opentelemetry-instrument does."""

    package: str
    version: str
    command: tuple[str, ...]
    site: str
    #: True in a process where it is active.
    active: str
    env: dict[str, str]
    #: Whether its sitecustomize runs the next one on the path.
    chains: bool

    @property
    def folder(self) -> pathlib.Path:
        return environment.install(self.package, self.version, dependencies=True)

    @property
    def sitecustomize(self) -> pathlib.Path:
        return self.folder / self.site / "sitecustomize.py"

    def launcher(self) -> list[str]:
        return [sys.executable, str(self.folder / "bin" / self.command[0]), *self.command[1:]]


PARTIES = {
    "opentelemetry-instrument": Party(
        "opentelemetry-distro", "0.66b2", ("opentelemetry-instrument",), "opentelemetry/instrumentation/auto_instrumentation",
        "__import__('opentelemetry.trace').trace.get_tracer_provider().__class__.__module__ == 'opentelemetry.sdk.trace'",
        {f"OTEL_{what}_EXPORTER": "none" for what in ("TRACES", "METRICS", "LOGS")}, False,
    ),
    "ddtrace-run": Party(
        "ddtrace", "4.16.0", ("ddtrace-run",), "ddtrace/bootstrap", "'ddtrace.bootstrap.preload' in sys.modules",
        {"DD_INSTRUMENTATION_TELEMETRY_ENABLED": "false", "DD_REMOTE_CONFIGURATION_ENABLED": "false", "DD_TRACE_ENABLED": "false"}, True,
    ),
    "newrelic-admin": Party(
        "newrelic", "14.1.0", ("newrelic-admin", "run-program"), "newrelic/bootstrap", "'newrelic.config' in sys.modules",
        {"NEW_RELIC_DEVELOPER_MODE": "true", "NEW_RELIC_LOG": os.devnull}, True,
    ),
}  # fmt: skip


def launch(party: Party | None, command: list[str], *, order: str = "outside", path=(), ours=ROOT, **env: str):
    """`command` under the party's launcher and `ours` on PYTHONPATH; `order` says where our `run` stands, if anywhere."""
    entries = [str(ours), *map(str, path), *([str(party.folder)] if party else [])]
    launcher = party.launcher() if party else []
    full = {
        "outside": [*launcher, *command],
        "run inside": [*launcher, *RUN, *command],
        "run outside": [*RUN, *launcher, *command],
    }[order]
    variables = child.clean_environment(
        PYTHONPATH=os.pathsep.join(entries),
        TRITON_INTERPRET="1",
        OMP_NUM_THREADS="1",
        **{**(party.env if party else {}), **env},
    )
    return subprocess.run(full, env=variables, capture_output=True, text=True, cwd="/", timeout=300)


#: Of this process and of one that it starts: whether each is active, and what `import sitecustomize` gives.
SHOW = """
import json, subprocess, sys
import sitecustomize
ours = [type(f).__name__ for f in sys.meta_path].count("TargetFinder")
seen = [[ours, {active}, sitecustomize.__name__, sitecustomize.__file__]]
if "inner" not in sys.argv:
    seen += json.loads(subprocess.run([sys.executable, __file__, "inner"], stdout=subprocess.PIPE, check=True).stdout)
print(json.dumps(seen))
"""


def show(party: Party, tmp_path: pathlib.Path, order: str, **options):
    script = tmp_path / "show.py"
    script.write_text(SHOW.replace("{active}", party.active))
    done = launch(party, [sys.executable, str(script)], order=order, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("order", ["outside", "run inside", "run outside"])
@pytest.mark.parametrize("name", PARTIES)
def test_both_are_active_in_a_process_and_in_those_it_starts(name, order, tmp_path):
    """One that does not run the next sitecustomize needs our `run` inside of it, or our package installed."""
    party = PARTIES[name]
    seen, stderr = show(party, tmp_path, order)
    assert stderr == ""
    works = party.chains or order == "run inside"
    assert [(ours, theirs) for ours, theirs, *_ in seen] == [(int(works), True)] * 2
    places = {str(ROOT / "sitecustomize" / "__init__.py"), str(party.sitecustomize)}
    assert all(module == "sitecustomize" and file in places for *_, module, file in seen)


@pytest.fixture
def found_by_opentelemetry(tmp_path):
    """A folder with the metadata that an installed package has for it."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    group = "opentelemetry_pre_instrument"
    name, _, value = config["options.entry_points"][group].strip().partition(" = ")
    distribution(tmp_path / "site", name, value, group)
    return tmp_path / "site"


@pytest.mark.parametrize("order", ["outside", "run outside"])
def test_opentelemetry_starts_an_installed_package_itself(order, found_by_opentelemetry, tmp_path):
    seen, stderr = show(PARTIES["opentelemetry-instrument"], tmp_path, order, path=[found_by_opentelemetry])
    assert [(ours, theirs) for ours, theirs, *_ in seen] == [(1, True)] * 2
    assert stderr == ""


@pytest.mark.parametrize("switch", ["1", "0"])
def test_a_broken_package_does_opentelemetry_no_harm(switch, found_by_opentelemetry, tmp_path):
    shutil.copytree(ROOT / "sglang_aiter_ext", found_by_opentelemetry / "sglang_aiter_ext")
    (found_by_opentelemetry / "sglang_aiter_ext" / "bootstrap.py").write_text("raise RuntimeError('broken')")
    party = PARTIES["opentelemetry-instrument"]
    seen, stderr = show(party, tmp_path, "outside", ours=found_by_opentelemetry, SGLANG_AITER_EXT=switch)
    assert [(ours, theirs) for ours, theirs, *_ in seen] == [(0, True)] * 2
    assert stderr == ""


@pytest.mark.parametrize("order", ["outside", "run inside"])
@pytest.mark.parametrize("name", PARTIES)
def test_each_sitecustomize_of_theirs_runs_once(name, order, tmp_path):
    """Python says of each file whose code it runs where it found it."""
    party = PARTIES[name]
    last = tmp_path / "last"
    last.mkdir()
    (last / "sitecustomize.py").write_text("")
    done = launch(party, [sys.executable, "-v", "-c", "pass"], order=order, path=[last])
    assert done.returncode == 0
    ran = re.findall(
        r"^# (?:code object from|.* matches) '?(.*?/sitecustomize(?:/__init__)?\.py)'?$", done.stderr, re.M
    )
    assert ran.count(str(party.sitecustomize)) == 1
    # A third one on the path is run by theirs, if it runs any, directly or through ours.
    assert ran.count(str(last / "sitecustomize.py")) == int(party.chains)


def test_where_ours_is_hidden_doctor_names_what_hides_it():
    for name, party in PARTIES.items():
        done = launch(party, [sys.executable, "-m", "sglang_aiter_ext", "doctor", "--json"])
        routes = json.loads(done.stdout)["activation"]
        assert (routes["pythonpath"], routes["hidden_by"]) == (False, str(party.sitecustomize)), name
        assert routes["this_process"] is party.chains


@pytest.mark.parametrize("name", PARTIES)
def test_what_sglang_computes_beside_it_is_exact(name):
    party = PARTIES[name]
    fault = json.dumps({"targets": 3, "attend": True})
    done = launch(
        party, [sys.executable, str(child.KIT / "child.py"), "faults:run"], order="run inside", FAULT=fault, SGLANG_USE_AITER_PA="1",
        path=[environment.place("sglang", RELEASE), TESTS / "reference"],
    )  # fmt: skip
    out = json.loads(done.stdout.removeprefix(child.MARK))
    assert set(out["wrapped"].values()) == {1}
    assert max(out["prefill"]["errors"] + out["decode"]["errors"]) <= EXACT
    assert not [line for line in done.stderr.splitlines() if "aiter" in line.lower()]


def test_coverage_starts_in_each_process_and_so_do_we(tmp_path, monkeypatch):
    """Its .pth in site-packages runs before sitecustomize; COVERAGE_PROCESS_START turns it on."""
    # Set where these tests are measured themselves.
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)
    (tmp_path / "coveragerc").write_text(f"[run]\nparallel = True\ndata_file = {tmp_path}/data\n")
    script = tmp_path / "show.py"
    script.write_text(SHOW.replace("{active}", "'coverage' in sys.modules"))
    done = launch(None, [sys.executable, str(script)], COVERAGE_PROCESS_START=str(tmp_path / "coveragerc"))
    assert done.stderr == ""
    assert [row[:2] for row in json.loads(done.stdout)] == [[1, True]] * 2
    assert len(list(tmp_path.glob("data.*"))) == 2


#: Debian's sitecustomize.py, and one that is a package.
THEIRS = {
    "sitecustomize.py": "# install the apport exception handler if available\ntry:\n    import apport_python_hook\nexcept ImportError:\n    pass\nelse:\n    apport_python_hook.install()\n",
    "sitecustomize/__init__.py": "import sys\nfrom . import inner\nsys.theirs = inner.value\n",
}


@pytest.mark.parametrize("name", PARTIES)
@pytest.mark.parametrize("form", THEIRS)
def test_a_third_sitecustomize_runs_too_where_each_runs_the_next(form, name, tmp_path):
    party = PARTIES[name]
    folder = tmp_path / "third"
    (folder / form).parent.mkdir(parents=True)
    (folder / form).write_text("import sys\nsys.third = getattr(sys, 'third', 0) + 1\n" + THEIRS[form])
    (folder / form).with_name("inner.py").write_text("value = 1\n")
    code = (
        "import sys; print([type(f).__name__ for f in sys.meta_path].count('TargetFinder'), getattr(sys, 'third', 0))"
    )
    done = launch(party, [sys.executable, "-c", code], order="run inside", path=[folder])
    # Ours runs theirs; theirs, where it runs another, that one.
    assert (done.stdout, done.stderr) == (f"1 {int(party.chains)}\n", "")


# ---- SGLang's own plugins ----

PLUGIN = """
import sys
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
CALLS = sys.__dict__.setdefault("plugin_calls", {})

def around(name):
    def hook(original, *args, **kwargs):
        CALLS[name] = CALLS.get(name, 0) + 1
        return original(*args, **kwargs)
    return hook

def register():
    base = "sglang.srt.layers.attention."
    for name in ("attention_registry.attn_backend_wrapper", "hybrid_linear_attn_backend.HybridLinearAttnBackend.forward_decode",
                 "aiter_backend.AiterAttnBackend.forward_extend", "aiter_backend.AiterAttnBackend.__init__"):
        HookRegistry.register(base + name, around(name.rpartition(".")[2]), HookType.AROUND)

def register_at_once():
    register()
    HookRegistry.apply_hooks()
"""


def distribution(folder: pathlib.Path, name: str, value: str, group: str = "sglang.srt.plugins") -> None:
    """Metadata of an installed package with an entry point, for SGLang's plugin loader if not another's."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {value}\n")


@pytest.mark.parametrize("late", [False, True], ids=["before the targets", "after the targets"])
@pytest.mark.parametrize("order", ["path", "ours first", "theirs first", "theirs at once"])
def test_a_plugin_that_wraps_the_same_methods_and_we_are_both_active(order, late, tmp_path):
    (tmp_path / "someones_plugin.py").write_text(PLUGIN)
    names = {"ours first": ("b", "a"), "theirs first": ("a", "b"), "theirs at once": ("a", "b"), "path": ("a", None)}[
        order
    ]
    value = "register_at_once" if order == "theirs at once" else "register"
    # Entry points are found in the order of the path.
    for name, target in sorted(zip(names, (f"someones_plugin:{value}", "sglang_aiter_ext:activate"))
                               if names[1] else [("a", f"someones_plugin:{value}")]):  # fmt: skip
        distribution(tmp_path / name, f"plugin_{name}", target)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "sglang_aiter_ext").symlink_to(ROOT / "sglang_aiter_ext")
    ours = ROOT if order == "path" else tmp_path / "package"
    entries = [
        ours,
        *(tmp_path / n for n in sorted(filter(None, names))),
        tmp_path,
        environment.place("sglang", RELEASE),
        TESTS / "reference",
    ]
    fault = json.dumps({"inside": "plugin late" if late else "plugin", "targets": 3, "attend": True})
    env = child.clean_environment(
        PYTHONPATH=os.pathsep.join(map(str, entries)), TRITON_INTERPRET="1", OMP_NUM_THREADS="1", FAULT=fault, SGLANG_USE_AITER_PA="1",
        SGLANG_PLUGINS=",".join(f"plugin_{n}" for n in names if n),
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(child.KIT / "child.py"), "faults:run"], env=env, capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 0, done.stderr[-3000:]
    out = json.loads(done.stdout.removeprefix(child.MARK))
    assert set(out["wrapped"].values()) == {2}
    assert max(out["prefill"]["errors"] + out["decode"]["errors"]) <= EXACT
    assert out["counters"] == {"asm_context_prefill": {"asm": 4}, "decode_pa": {"decode": 2}}
    assert out["plugin_calls"] == {"attn_backend_wrapper": 2, "forward_decode": 2, "forward_extend": 4, "__init__": 2}
    assert not [line for line in done.stderr.splitlines() if "aiter_ext" in line or "hook" in line]
