"""Makes what the demo and the tests run on: `.venv`, and SGLang releases in a cache folder.

    python3 tests/kit/environment.py [--quick | RELEASE ...]

Standard library only. Each SGLang release is installed once, by `pip install --no-deps
--target`, into $SGLANG_AITER_EXT_CACHE (default ~/.cache/sglang-aiter-ext).
"""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import shutil
import subprocess
import sys
import time
import venv

ROOT = pathlib.Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
REQUIREMENTS = pathlib.Path(__file__).with_name("requirements.txt")
CACHE = pathlib.Path(os.environ.get("SGLANG_AITER_EXT_CACHE") or pathlib.Path.home() / ".cache" / "sglang-aiter-ext")
#: What the demo runs on.
DEMO = "0.5.18"
#: Every release with a verdict of its own in README.md; those from 0.5.9 on also run.
RELEASES = (
    "0.5.6", "0.5.6.post1", "0.5.6.post2", "0.5.7", "0.5.8", "0.5.8.post1", "0.5.9", "0.5.10", "0.5.10.post1", "0.5.11",
    "0.5.12", "0.5.12.post1",
    "0.5.13", "0.5.13.post1", "0.5.14", "0.5.15", "0.5.15.post1", "0.5.16", "0.5.17", "0.5.18", "0.5.19", "0.5.20",
    "0.5.21", "0.5.22", "0.5.23",
)  # fmt: skip
RUNNABLE = RELEASES[RELEASES.index("0.5.9") :]
#: The newest and an old one, for `make test-quick`.
QUICK = ("0.5.23", "0.5.12.post1")
#: AITER's Python layer on PyPI, read with ast and never imported.
AITER = "0.1.7.post2.dev18"


def since(version: str) -> tuple[str, ...]:
    """The releases from `version` on."""
    return RELEASES[RELEASES.index(version) :]


def say(message: str) -> None:
    print(f"[{time.monotonic() - START:5.0f} s] {message}", flush=True)


START = time.monotonic()


def run(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout[-4000:]}")


def tag() -> str:
    return f"cp{sys.version_info.major}{sys.version_info.minor}"


def place(package: str, version: str) -> pathlib.Path:
    """Where a package lies once it is installed: the folder to put on a path."""
    return CACHE / tag() / f"{package}-{version}"


def make_venv() -> None:
    if sys.version_info[:2] not in ((3, 11), (3, 12)):
        sys.exit(
            f"Python {sys.version.split()[0]} is not supported here: use 3.11 or 3.12, as in `make PYTHON=python3.12`"
        )
    wanted = f"{sys.version}\n{REQUIREMENTS.read_text()}"
    done = VENV / "ready"
    if done.is_file() and done.read_text() == wanted:
        return
    say("creating .venv (the largest part is torch)")
    shutil.rmtree(VENV, ignore_errors=True)
    venv.create(VENV, with_pip=True)
    run(PYTHON, "-m", "pip", "install", "-q", "-r", REQUIREMENTS)
    done.write_text(wanted)


def install(package: str, version: str, *, dependencies: bool = False) -> pathlib.Path:
    """Where the package lies, which is installed if need be; tests install in this way what only they use."""
    target = place(package, version)
    if not target.is_dir():
        part = target.with_name(f"{target.name}.part{os.getpid()}")
        options = ["-q", "--no-compile", "--target", part, *(() if dependencies else ("--no-deps",))]
        run(PYTHON, "-m", "pip", "install", *options, f"{package}=={version}")
        try:
            part.rename(target)
        except OSError:
            # Another run was faster.
            shutil.rmtree(part)
    return target


def main(releases: list[str]) -> None:
    make_venv()
    quick = releases == ["--quick"]
    wanted = [("sglang", version) for version in (QUICK if quick else releases or RELEASES)]
    if quick or not releases:
        wanted.append(("amd-aiter", AITER))
    missing = [item for item in wanted if not place(*item).is_dir()]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        jobs = {pool.submit(install, *item): item for item in missing}
        for left, job in enumerate(concurrent.futures.as_completed(jobs), 1):
            job.result()
            say(f"{' '.join(jobs[job])} installed, {len(missing) - left} left")
    say("the environment is ready")


if __name__ == "__main__":
    main(sys.argv[1:])
