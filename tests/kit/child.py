"""Runs one case in this process and prints its result as the last line: `child.py module:function`.

Started by `launch`, as a user starts a server: the extension is on PYTHONPATH, or it is not.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import os
import pathlib
import subprocess
import sys

import environment
import preloaded

KIT = pathlib.Path(__file__).resolve().parent
TESTS = KIT.parent
MARK = "RESULT "
#: The level of a fresh interpreter.
NOTHING = "nothing"
#: Shows a process from the import of SGLang on.
STATES = "SGLANG_AITER_EXT_STATE_DIR"
#: The extension's variables, which nothing reads before it is activated.
OWN = {
    "SGLANG_AITER_EXT", "SGLANG_AITER_EXT_STRICT", "SGLANG_AITER_EXT_DISABLE", "SGLANG_USE_AITER_PA",
    "SGLANG_AITER_ASM_CONTEXT_PREFILL",
}  # fmt: skip


@dataclasses.dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str
    result: object = None


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment without anything of SGLang's or ours; compiled files are kept in the cache."""
    dropped = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG") and k not in dropped}
    return {**kept, "PYTHONPYCACHEPREFIX": str(environment.CACHE / "pycache"), "HF_HUB_OFFLINE": "1", **extra}


def aiter_with(place: pathlib.Path, body: str | None, reference: bool = True) -> pathlib.Path:
    """An AITER at `place` with all files of the stand-in, whose `__init__.py` executes the stand-in's and then `body`.

    Without `reference` it executes `body` alone; without a `body` there is no such file.
    """
    own = TESTS / "reference"
    (place / "aiter").mkdir(parents=True)
    for name in ("csrc", "hsa", "aiter/mla.py", "aiter/ops"):
        (place / name).symlink_to(own / name)
    start = f"exec(compile(open({str(own / 'aiter/__init__.py')!r}).read(), __file__, 'exec'))\n" * reference
    if body is not None:
        (place / "aiter/__init__.py").write_text(f"{start}{body}\n")
    return place


@functools.cache
def launch(release: str, case: str, *, extension=True, aiter="reference", env=(), timeout=900, level=None) -> Done:
    """`case` in a process of its own on SGLang `release`; the result is kept for further tests.

    `aiter` is `reference`, None for a path without AITER, or a folder. The process is forked from a level of
    preloaded.py, or with NOTHING loaded it is a fresh interpreter. Fails with what it printed when it does not end well.
    """
    path = [str(environment.ROOT)] if extension else []
    path.append(str(environment.place("sglang", release)))
    if aiter is not None:
        path.append(str(TESTS / "reference") if aiter == "reference" else str(aiter))
    variables = clean_environment(
        TRITON_INTERPRET="1", OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(path), **dict(env)
    )
    level = level or (release if aiter in ("reference", None) else preloaded.THIRD_PARTY)
    ran = start(case, variables, level, timeout)
    done = Done(ran.returncode, ran.stdout, ran.stderr)
    lines = [line for line in ran.stdout.splitlines() if line.startswith(MARK)]
    if ran.returncode == 0 and lines:
        done.result = json.loads(lines[-1][len(MARK) :])
        return done
    raise AssertionError(f"{case} on {release} ended with {ran.returncode}\n{ran.stdout[-2000:]}\n{ran.stderr[-6000:]}")


def start(case: str, variables: dict[str, str], level: str, timeout=900) -> subprocess.CompletedProcess:
    """`case` with these variables, in a fresh interpreter or forked from a level of preloaded.py."""
    if level == NOTHING:
        command = [sys.executable, str(KIT / "child.py"), case]
        return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=timeout, cwd="/")
    # SGLang is imported before such a variable is set.
    early = [name for name in variables if name.startswith("SGLANG") and name not in OWN or name == STATES]
    return preloaded.run(preloaded.THIRD_PARTY if early else level, case, variables, timeout)


def main() -> None:
    module, _, function = sys.argv[1].partition(":")
    sys.path.insert(0, str(KIT / "cases"))
    # Collecting garbage takes a quarter of the time of SGLang's imports.
    gc.disable()
    case = getattr(__import__(module), function)
    gc.enable()
    result = case()
    print(MARK + json.dumps(result))


if __name__ == "__main__":
    main()
