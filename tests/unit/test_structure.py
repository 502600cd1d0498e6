"""How the package is built: what imports what, how long files are, and where something is put on other objects."""

import ast
import json
import os
import subprocess
import sys

import child
import environment
import mutation
import pytest

PACKAGE = environment.ROOT / "sglang_aiter_ext"
FILES = sorted(PACKAGE.rglob("*.py"))
#: The folders beside the core: what is done to SGLang, what a user types, and Triton's code.
FOLDERS = {"capabilities", "command", "kernels"}
LINES, CORE_LINES = 350, 1900


def shown(path):
    return path.relative_to(environment.ROOT).as_posix()


def name_of(path):
    """The dotted name of a module of the package."""
    parts = path.relative_to(environment.ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


def imported_names(module, path):
    """The dotted name of everything that an import statement of `path` asks for, at its start or in a function."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                yield base, alias.name


def imports(module, path):
    """The modules of the package that `path` imports: of `from . import x`, the module x where there is one."""
    found = set()
    for base, name in imported_names(module, path):
        inner = f"{base}.{name}"
        target = inner if inner in MODULES else base
        if target in MODULES:
            found.add(target)
    return found


def circle(graph):
    """Modules of which each imports the next one and the last one the first, or None."""
    done, path = set(), []

    def visit(module):
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return None
        path.append(module)
        found = next((found for other in sorted(graph[module]) if (found := visit(other))), None)
        path.pop()
        done.add(module)
        return found

    return next((found for module in sorted(graph) if (found := visit(module))), None)


def test_no_module_imports_itself_by_way_of_others_even_when_it_does_so_later():
    """A circle is hidden by an import inside of a function, and shows itself when the order of imports changes."""
    graph = {module: imports(module, path) for module, path in MODULES.items()}
    assert "sglang_aiter_ext.activation" in graph["sglang_aiter_ext.bootstrap"]
    assert "sglang_aiter_ext.command.running" in graph["sglang_aiter_ext.command"]
    assert graph["sglang_aiter_ext.capabilities.gather_reuse"] >= {
        "sglang_aiter_ext.kept", "sglang_aiter_ext.capabilities.asm_context_prefill.release"
    }  # fmt: skip
    assert circle(graph) is None


def test_a_circle_is_found_where_there_is_one():
    assert circle({"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"b"}}) == ["b", "d", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None and circle({"a": {"a"}}) == ["a", "a"]


def length(path):
    return len(path.read_text().splitlines())


def test_no_file_is_longer_than_a_reader_takes_in_at_once():
    assert {shown(path): length(path) for path in FILES if length(path) > LINES} == {}


def test_the_core_stays_small():
    core = [path for path in FILES if path.relative_to(PACKAGE).parts[0] not in FOLDERS]
    assert PACKAGE / "activation.py" in core and len(core) > 10
    assert sum(map(length, core)) < CORE_LINES


def test_each_test_file_has_a_name_of_its_own():
    """Pytest imports a test file under its bare name, and refuses the second file of a name."""
    names = sorted(path.name for path in (environment.ROOT / "tests").rglob("test_*.py"))
    assert names == sorted(set(names)) and "test_structure.py" in names


EXECUTED = """
import sys
executed = []
def hook(event, args):
    if event == "exec" and getattr(args[0], "co_name", "") == "<module>":
        executed.append(args[0].co_filename)
sys.addaudithook(hook)
import site
site.main()
import json, runpy
sys.argv = ["sglang_aiter_ext", *sys.argv[1:]]
try:
    runpy.run_module("sglang_aiter_ext", run_name="__main__", alter_sys=True)
except SystemExit as ended:
    print(json.dumps([ended.code, executed]))
"""


@pytest.mark.parametrize("command", [["path"], ["doctor", "--json"]])
def test_no_file_of_the_package_runs_twice_under_two_names(command):
    """Two copies of a module would have two states, two counters and two locks."""
    variables = child.clean_environment(PYTHONPATH=str(environment.ROOT))
    done = subprocess.run(
        [sys.executable, "-S", "-c", EXECUTED, *command], env=variables, capture_output=True, text=True, cwd="/"
    )
    status, executed = json.loads(done.stdout.splitlines()[-1])
    assert status == (0 if command == ["path"] else 2), done.stderr
    ours = [os.path.relpath(path, PACKAGE) for path in executed if path.startswith(f"{PACKAGE}{os.sep}")]
    assert sorted(ours) == sorted(set(ours)) and {"__main__.py", "names.py", "bootstrap.py"} <= set(ours)


def test_the_names_under_which_something_is_put_on_other_objects_are_made_in_one_place():
    """Whoever looks for what we leave on SGLang's objects finds all of it in `kept`."""
    using = [path.name for path in FILES if "_sglang_aiter_ext" in path.read_text()]
    assert using == ["kept.py"]
    # It stands where `site` imports it, before the package, and counts on `sys` which files of its name have run.
    start = (environment.ROOT / "sitecustomize" / "__init__.py").read_text()
    assert start.count("_sglang_aiter_ext") == start.count('"_sglang_aiter_ext_chained"') == 1


def test_each_file_that_decides_something_about_sglang_has_its_guards_broken_by_tests_that_exist():
    """See tests/kit/mutation.py. Start-up and what runs in processes of its own are tested by starting them."""
    elsewhere = {"__init__.py", "__main__.py", "bootstrap.py", "publishing.py"}
    for path in FILES:
        file = path.relative_to(PACKAGE).as_posix()
        if file not in elsewhere and not file.startswith(("command/", "kernels/")):
            assert file in mutation.TESTS or not list(mutation.mutants(ast.parse(path.read_text()))), file
    for file, tests in mutation.TESTS.items():
        assert (PACKAGE / file).is_file()
        assert all((environment.ROOT / "tests" / "unit" / name).is_file() for name in tests)
