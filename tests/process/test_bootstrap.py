"""Interpreter start: what is imported, what is printed, and the sitecustomize that is shadowed."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import child
import environment
import pytest

ROOT = environment.ROOT


def python(*arguments, path=(), code=None, **env):
    """A bare interpreter with `path` on PYTHONPATH, after the checkout."""
    entries = os.pathsep.join([str(ROOT), *map(str, path)])
    variables = child.clean_environment(**{"PYTHONPATH": entries, **env})
    command = [sys.executable, *arguments] + (["-c", textwrap.dedent(code)] if code else [])
    return subprocess.run(command, env=variables, capture_output=True, text=True, cwd="/")


MODULES = "import sys, json; print(json.dumps(sorted(sys.modules)))"


def modules(**env):
    done = python(code=MODULES, **env)
    assert (done.returncode, done.stderr) == (0, "")
    return set(json.loads(done.stdout))


def test_start_up_prints_nothing_and_imports_four_modules_of_ours():
    bare = modules(PYTHONPATH="")
    ours = {"sglang_aiter_ext", "sglang_aiter_ext.bootstrap", "sglang_aiter_ext.names"}
    assert modules() - bare == {"sitecustomize", *ours}


OPENED = """
import sys
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
import site
site.main()
shown = list(opened)
import json
print(json.dumps(shown))
"""


def test_start_up_opens_no_file_outside_the_package():
    """`python -S`, then what `site` does: the files opened with the extension, less those opened without it."""
    with_us, without = (json.loads(python("-S", code=OPENED, **env).stdout) for env in ({}, {"PYTHONPATH": ""}))
    ours = [path for path in with_us if path not in without]
    cached = str(environment.CACHE / "pycache")
    assert ours and all(path.removeprefix(cached).startswith(f"{ROOT}/s") for path in ours), ours
    assert len({path for path in ours if "sglang_aiter_ext" in path or "sitecustomize" in path}) == len(set(ours))


@pytest.mark.slow
def test_start_up_takes_less_than_a_third_longer_than_pythons_own():
    """The quickest of many starts each, in turn: what else the machine does falls on both."""
    best = {"": 1e9, str(ROOT): 1e9}
    for _ in range(25):
        for path in best:
            began = time.perf_counter()
            python(code="pass", PYTHONPATH=path)
            best[path] = min(best[path], time.perf_counter() - began)
    assert best[str(ROOT)] < 1.33 * best[""], best


def test_a_sitecustomize_may_reorder_pythonpath_but_not_hide_ours(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    a.mkdir()
    body = """
        import os
        first, *rest = os.environ["PYTHONPATH"].split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join([*reversed(rest), first])
    """
    other(b, "module", textwrap.dedent(body))
    code = "import os; print(os.environ['PYTHONPATH'])"
    kept = python(code=code, path=[a, b]).stdout.strip().split(os.pathsep)
    assert kept == [str(ROOT), str(b), str(a)]
    # Switched off, it is as if we were not there.
    kept = python(code=code, path=[a, b], SGLANG_AITER_EXT="0").stdout.strip().split(os.pathsep)
    assert kept == [str(b), str(a), str(ROOT)]


def test_a_fork_while_another_thread_counts_can_count():
    code = """
        import os, threading
        from sglang_aiter_ext import counting
        held = threading.Event()
        def hold():
            with counting._lock:
                held.set()
                threading.Event().wait(20)
        threading.Thread(target=hold, daemon=True).start()
        held.wait()
        if os.fork() == 0:
            counting.count("a", "b")
            os._exit(counting.totals()[("a", "b", "")])
        os._exit(os.waitstatus_to_exitcode(os.wait()[1]) - 1)
    """
    assert python(code=code).returncode == 0


def test_switched_off_nothing_of_ours_is_imported():
    for value in ("0", "False", "NO", " off "):
        assert modules(SGLANG_AITER_EXT=value) - modules(PYTHONPATH="") == {"sitecustomize"}, value


@pytest.mark.parametrize("value", ["1", "TRUE", "Yes", "on", "", "banana"])
def test_every_other_value_starts_as_quietly(value):
    done = python(code="pass", SGLANG_AITER_EXT=value)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def other(folder: pathlib.Path, form: str, body: str = "") -> pathlib.Path:
    """A sitecustomize of somebody else's, as a module or a package, that appends to a list."""
    folder.mkdir()
    body = f"import sys; sys.__dict__.setdefault('ran', []).append({folder.name!r})\n{body}"
    if form == "module":
        (folder / "sitecustomize.py").write_text(body)
    else:
        (folder / "sitecustomize").mkdir()
        (folder / "sitecustomize" / "__init__.py").write_text(body)
    return folder


SHOW = """
    import sys, json, sitecustomize
    ours = any(type(f).__name__ == 'TargetFinder' for f in sys.meta_path)
    print(json.dumps([getattr(sys, 'ran', []), sitecustomize.__file__, sitecustomize.__name__, ours]))
"""


@pytest.mark.parametrize("form", ["module", "package"])
@pytest.mark.parametrize("env", [{}, {"SGLANG_AITER_EXT": "0"}])
def test_the_shadowed_sitecustomize_runs_once_and_is_the_one_that_imports(tmp_path, form, env):
    folder = other(tmp_path / "theirs", form)
    done = python(code=SHOW, path=[folder], **env)
    assert done.stderr == ""
    ran, file, name, ours = json.loads(done.stdout)
    assert ran == ["theirs"]
    assert file.startswith(str(folder)) and name == "sitecustomize"
    assert ours is not bool(env)


def test_without_another_one_ours_is_what_imports():
    ran, file, _, ours = json.loads(python(code=SHOW).stdout)
    assert (ran, ours) == ([], True)
    assert file == str(ROOT / "sitecustomize" / "__init__.py")


def test_only_the_next_one_runs_as_without_us(tmp_path):
    first, second = other(tmp_path / "first", "module"), other(tmp_path / "second", "module")
    assert json.loads(python(code=SHOW, path=[first, second]).stdout)[0] == ["first"]


#: A sitecustomize that itself runs the next one, the way some monitoring agents do.
CHAINING = """
import importlib.machinery, importlib.util, os
here = os.path.dirname(__file__)
spec = importlib.machinery.PathFinder.find_spec('sitecustomize', [p for p in sys.path if p != here])
if spec:
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
"""


def test_one_that_chains_back_to_us_ends_with_each_having_run_once(tmp_path):
    agent = other(tmp_path / "agent", "module", CHAINING)
    last = other(tmp_path / "last", "package")
    done = python(code=SHOW, path=[agent, last])
    ran, _, _, ours = json.loads(done.stdout)
    assert (sorted(ran), ours, done.stderr) == (["agent", "last"], True, "")
    entries = os.pathsep.join(map(str, [agent, ROOT, last]))
    done = python(code=SHOW, PYTHONPATH=entries)
    ran, _, _, ours = json.loads(done.stdout)
    assert (ran, ours, done.stderr) == (["agent", "last"], True, "")


def test_an_error_in_the_shadowed_one_is_logged_as_without_us(tmp_path):
    folder = other(tmp_path / "theirs", "module", "raise ValueError('theirs')")
    ours = python(code="print('goes on')", path=[folder])
    plain = python(code="print('goes on')", PYTHONPATH=str(folder))
    assert (ours.returncode, ours.stdout, ours.stderr) == (plain.returncode, plain.stdout, plain.stderr)
    assert "ValueError: theirs" in ours.stderr


def test_the_checkout_on_the_path_shadows_nothing(tmp_path):
    for name in ("tests", "bench"):
        package = tmp_path / name
        package.mkdir()
        (package / "__init__.py").write_text("mine = True")
    done = python(code="import tests, bench; print(tests.mine, bench.mine)", path=[tmp_path])
    assert done.stdout == "True True\n", done.stderr


def test_a_package_that_cannot_be_imported_does_not_stop_python(tmp_path):
    (tmp_path / "sitecustomize").mkdir()
    source = (ROOT / "sitecustomize" / "__init__.py").read_text()
    (tmp_path / "sitecustomize" / "__init__.py").write_text(source)
    (tmp_path / "sglang_aiter_ext").mkdir()
    for body in ("syntax error", "raise RuntimeError", None):
        file = tmp_path / "sglang_aiter_ext" / "__init__.py"
        file.unlink(missing_ok=True)
        if body:
            file.write_text(body)
        done = python(code="print(1)", PYTHONPATH=str(tmp_path))
        assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", ""), body


def test_run_activates_a_command_and_is_that_command():
    run = [sys.executable, "-m", "sglang_aiter_ext", "run", "--"]
    env = child.clean_environment()
    code = "import sys, os, json; print(json.dumps([sys.argv, os.getpid(), any(type(f).__name__ == 'TargetFinder' for f in sys.meta_path), os.environ['PYTHONPATH']])); sys.exit(7)"
    inner = [sys.executable, "-c", code, "--flag", "a b"]
    for command in (run + inner, run + run + inner):
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        out, _ = process.communicate()
        argv, pid, active, path = json.loads(out)
        assert (argv, active, process.returncode) == (["-c", "--flag", "a b"], True, 7)
        assert pid == process.pid
        assert path.split(os.pathsep) == [str(ROOT)]


def test_run_moves_our_entry_to_the_front_and_keeps_the_others(tmp_path):
    hiding = other(tmp_path / "hiding", "module")
    code = "import sys, os, json; print(json.dumps([any(type(f).__name__ == 'TargetFinder' for f in sys.meta_path), getattr(sys, 'ran', []), os.environ['PYTHONPATH']]))"
    run = [sys.executable, "-m", "sglang_aiter_ext", "run", "--", sys.executable, "-c", code]
    for before, after in ((f"{hiding}:{ROOT}", f"{ROOT}:{hiding}"), (f":{hiding}:", f"{ROOT}::{hiding}:")):
        env = child.clean_environment(PYTHONPATH=before)
        done = subprocess.run(run, env=env, capture_output=True, text=True, cwd=ROOT)
        assert json.loads(done.stdout) == [True, ["hiding"], after], done.stderr


#: A finder of somebody else's whose loader takes no attribute.
SLOTS = """
    import sys
    from importlib.machinery import ModuleSpec
    class Loader:
        __slots__ = ()
        def create_module(self, spec): return None
        def exec_module(self, module): module.done = True
    class Finder:
        def find_spec(self, name, path=None, target=None):
            if name.partition('.')[0] == 'sglang':
                spec = ModuleSpec(name, Loader(), is_package=True)
                return spec
    sys.meta_path.append(Finder())
    import sglang.srt.layers.attention.attention_registry as module
    print(module.done, type(module.__loader__).__name__, module.__spec__.loader is module.__loader__)
"""


def test_a_loader_that_takes_no_attribute_is_let_be():
    done = python(code=SLOTS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True Loader True\n", "")


def test_run_says_what_it_cannot_start():
    run = [sys.executable, "-m", "sglang_aiter_ext", "run"]
    done = subprocess.run(
        [*run, "--", "/no/such"], env=child.clean_environment(), capture_output=True, text=True, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (127, "sglang-aiter-ext run: /no/such: No such file or directory\n")
    done = subprocess.run([*run, "--", ""], env=child.clean_environment(), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 127 and done.stderr.startswith("sglang-aiter-ext run: : ")
    done = subprocess.run(run, env=child.clean_environment(), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "run needs a command" in done.stderr


def test_run_hands_on_no_signal_that_python_ignores():
    run = [sys.executable, "-m", "sglang_aiter_ext", "run", "--", "grep", "SigIgn", "/proc/self/status"]
    done = subprocess.run(run, env=child.clean_environment(), capture_output=True, text=True, cwd=ROOT)
    ignored = int(done.stdout.split()[1], 16)
    assert [s.name for s in (signal.SIGPIPE, signal.SIGXFSZ) if ignored >> s - 1 & 1] == []
