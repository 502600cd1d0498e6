"""Breaks each guard of the package in turn and lists what no test notices: `python tests/kit/mutation.py [PART ...]`.

For every `if` test, conditional expression, comprehension filter, boolean operand and comparison in the
files of TESTS: the condition made True, made False, or turned round. Works on a copy.
The tests of the file's guards run in a fork of this process, a second a mutant; none that starts a process does.
With PART, only mutants whose name contains it. Exits with 1 when an unexplained mutant survives.
"""

from __future__ import annotations

import ast
import copy
import os
import pathlib
import shutil
import signal
import sys
import tempfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGE = "sglang_aiter_ext"
#: File of the package -> the tests of the file, on plain objects and on sources of a few lines.
TESTS = {
    "capabilities/asm_context_prefill/release.py": ("capabilities/test_asm_context_prefill_release.py",),
    "capabilities/asm_context_prefill/decision.py": ("capabilities/test_asm_context_prefill_decision.py",),
    "capabilities/asm_context_prefill/call.py": ("capabilities/test_asm_context_prefill_call.py",),
    "capabilities/asm_context_prefill/__init__.py": ("capabilities/test_asm_context_prefill_call.py",),
    "capabilities/decode_pa/release.py": ("capabilities/test_decode_pa_release.py",),
    "capabilities/decode_pa/routing.py": ("capabilities/test_decode_pa_routing.py",),
    "capabilities/decode_pa/building.py": ("capabilities/test_decode_pa_building.py",),
    "capabilities/decode_pa/options.py": ("capabilities/test_decode_pa_options.py",),
    "capabilities/decode_pa/step.py": ("capabilities/test_decode_pa_step.py",),
    "capabilities/head_ratio.py": ("capabilities/test_head_ratio.py",),
    "capabilities/gather_reuse.py": ("capabilities/test_gather_reuse.py",),
    "capabilities/v_head_dim.py": ("capabilities/test_v_head_dim.py",),
    "capabilities/layers.py": ("capabilities/test_layers.py",),
    "source.py": ("test_source.py",),
    "aiter_kernels.py": ("test_aiter_kernels.py",),
    "aiter_installed.py": ("test_aiter_installed.py",),
    "gpu.py": ("test_gpu.py",),
    "capability.py": ("test_capability.py",),
    "kept.py": ("test_kept.py",),
    "settings.py": ("test_settings.py",),
    "counting.py": ("test_counting.py",),
    "logs.py": ("test_logs.py",),
    "wrapping.py": ("test_wrapping.py",),
    "activation.py": ("test_activation.py",),
    "command/running.py": ("command/test_running.py",),
}
OPTIONS = ("-q", "-x", "--tb=no", "--assert=plain", "-p", "no:cacheprovider")
SECONDS = 60
#: File and mutant -> why it changes nothing.
EQUIVALENT = {
    "capabilities/layers.py no filter: p is not None": "None has no kv_cache_layout",
    "capabilities/asm_context_prefill/release.py always: source is not None": "release.function has raised where there is no such module",
    "capabilities/gather_reuse.py operand dropped: source is not None": "release.function has raised where there is no such module",
    "capabilities/decode_pa/release.py always: backend is not None": "release.function has raised where there is no such module",
    "capabilities/decode_pa/routing.py operand dropped: model is None": "None has no modules",
    "capabilities/decode_pa/step.py operand dropped: not known.own.issuperset(kwargs)": "the release's own arguments are all accepted, which takes longer",
    "activation.py operand dropped: release is not None": "without a release no verdict is `apply`",
    "capability.py operand dropped: release is None": "without a release the verdict is not `apply`",
    "logs.py always: True": "it is",
    "wrapping.py operand dropped: vars(module).get(name) is not value": "what has not changed is set to itself",
}


def mutants(tree: ast.Module):
    """(line, description, mutated tree) of each mutant."""

    def change(node, field, index, make, what):
        changed = copy.deepcopy(tree)
        twin = next(n for n, m in zip(ast.walk(changed), ast.walk(tree)) if m is node)
        value = getattr(twin, field)
        if index is None:
            setattr(twin, field, make(value))
        else:
            value[index] = make(value[index])
        old = getattr(node, field) if index is None else getattr(node, field)[index]
        return old.lineno, f"{what}: {ast.unparse(old)}", ast.fix_missing_locations(changed)

    def constant(value):
        return lambda old: ast.copy_location(ast.Constant(value), old)

    def inverted(old):
        return ast.copy_location(ast.UnaryOp(ast.Not(), old), old)

    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.IfExp, ast.While)):
            yield change(node, "test", None, constant(False), "never")
            yield change(node, "test", None, constant(True), "always")
        elif isinstance(node, ast.comprehension):
            for i in range(len(node.ifs)):
                yield change(node, "ifs", i, constant(True), "no filter")
        elif isinstance(node, ast.BoolOp):
            for i in range(len(node.values)):
                yield change(node, "values", i, constant(isinstance(node.op, ast.And)), "operand dropped")
        elif isinstance(node, ast.Compare):
            parents = [
                (p, f)
                for p in ast.walk(tree)
                for f, v in ast.iter_fields(p)
                if v is node or isinstance(v, list) and node in v
            ]
            ((parent, field),) = parents
            held = getattr(parent, field)
            yield change(parent, field, held.index(node) if isinstance(held, list) else None, inverted, "turned round")


def passes(folder: pathlib.Path, file: str) -> bool:
    """Whether no test notices what was changed in the copy at `folder`; in a fork, where torch and pytest are."""
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1), os.dup2(null, 2)
        signal.alarm(SECONDS)
        os.chdir(folder)
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        sys.path[:0] = [str(folder)]
        os._exit(pytest.main([*OPTIONS, *(f"tests/unit/{name}" for name in TESTS[file])]))
    return os.waitpid(child, 0)[1] == 0


def main(parts: list[str]) -> int:
    # Imported once, for all forks. No bytecode is kept: two mutants of one second and size would share it.
    import torch  # noqa: F401
    import triton  # noqa: F401
    import wrapt  # noqa: F401

    sys.dont_write_bytecode = True
    survivors, total = [], 0
    folder = pathlib.Path(tempfile.mkdtemp(prefix="mutation-"))
    for name in (PACKAGE, "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "README.md"):
        shutil.copy(ROOT / name, folder)
    for file in TESTS:
        path, target = ROOT / PACKAGE / file, folder / PACKAGE / file
        made = [(f"{file}:{line} {what}", what, tree) for line, what, tree in mutants(ast.parse(path.read_text()))]
        wanted = [mutant for mutant in made if not parts or any(part in mutant[0] for part in parts)]
        if wanted and not passes(folder, file):
            sys.exit(f"the tests of {file} fail without any mutant")
        for name, what, tree in wanted:
            total += 1
            target.write_text(ast.unparse(tree))
            if passes(folder, file):
                why = EQUIVALENT.get(f"{file} {what}")
                survivors += [] if why else [name]
                print(f"{'equivalent' if why else 'SURVIVES'} {name}" + (f" ({why})" if why else ""), flush=True)
        shutil.copy(path, target)
    shutil.rmtree(folder)
    print(f"{total} mutants, {len(survivors)} unexplained survivors")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
