"""Breaks each guard of the capabilities in turn and lists what no test notices: `python tests/mutation.py [PART ...]`.

For every `if` test, conditional expression, comprehension filter, boolean operand and comparison in
`capabilities/*.py` and `layers.py`: the condition made True, made False, or turned round. Works on a copy.
The fast tests run in a fork of this process; where they all pass, the slow ones that name the file do.
With PART, only mutants whose name contains it. Exits with 1 when an unexplained mutant survives.
"""

from __future__ import annotations

import ast
import copy
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
FAST = ("test_guards.py",)
SECONDS = 60
#: File -> further tests, the quickest first.
SLOW = {
    "asm_context_prefill.py": ("test_verdicts.py", "test_prefill.py"),
    "decode_pa.py": ("test_verdicts.py", "test_decode.py", "test_building.py"),
    "head_ratio.py": ("test_verdicts.py", "test_releases.py -k ratio"),
    "gather_reuse.py": ("test_verdicts.py", "test_releases.py -k indices"),
    "v_head_dim.py": ("test_verdicts.py", "test_building.py -k v_head_dim"),
    "layers.py": ("test_decode.py -k left_alone", "test_prefill.py -k guard"),
}
#: Survivors that change nothing: (part of the name, why).
EQUIVALENT = {"no filter: p is not None": "None has no kv_cache_layout"}


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


def in_fork(folder: pathlib.Path, arguments: list[str], seconds: int) -> bool:
    """Whether the tests pass in a fork of this process, which has imported torch and pytest already."""
    child = os.fork()
    if child == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1), os.dup2(null, 2)
        signal.alarm(seconds)
        os.chdir(folder)
        sys.path[:0] = [str(folder), str(folder / "tests")]
        os._exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *arguments]))
    return os.waitpid(child, 0)[1] == 0


def passes(folder: pathlib.Path, file: str, slow: bool) -> bool:
    """Whether no test notices what was changed in the copy at `folder`."""
    if not in_fork(folder, [str(p) for name in FAST if (p := folder / "tests" / name).is_file()], SECONDS):
        return False
    for line in SLOW[file] if slow else ():
        name, *options = line.split()
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{name}", *options]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, timeout=600)
        except subprocess.TimeoutExpired:
            return False
        if done.returncode:
            return False
    return True


def main(parts: list[str]) -> int:
    import torch  # noqa: F401

    slow = "--fast" not in parts
    parts = [part for part in parts if part != "--fast"]
    survivors, total = [], 0
    folder = pathlib.Path(tempfile.mkdtemp(prefix="mutation-"))
    for name in ("sglang_aiter_ext", "sitecustomize", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("README.md", "setup.cfg"):
        shutil.copy(ROOT / name, folder / name)
    if not passes(folder, "layers.py", slow):
        sys.exit("the tests fail without any mutant")
    package = ROOT / "sglang_aiter_ext"
    for path in (package / "layers.py", *sorted((package / "capabilities").glob("*.py"))):
        target = folder / path.relative_to(ROOT)
        for line, what, tree in mutants(ast.parse(path.read_text())):
            name = f"{path.name}:{line} {what}"
            if path.name not in SLOW or (parts and not any(part in name for part in parts)):
                continue
            total += 1
            target.write_text(ast.unparse(tree))
            began = time.monotonic()
            if passes(folder, path.name, slow):
                why = next((why for part, why in EQUIVALENT.items() if part in name), None)
                survivors += [] if why else [name]
                print(f"{'equivalent' if why else 'SURVIVES'} {name}" + (f" ({why})" if why else ""), flush=True)
            elif time.monotonic() - began > SECONDS:
                print(f"slow       {name}", flush=True)
        shutil.copy(path, target)
    shutil.rmtree(folder)
    print(f"{total} mutants, {len(survivors)} unexplained survivors")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
