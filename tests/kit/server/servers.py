"""Real SGLang servers for tests: started by serve.sh, asked, and stopped."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import random
import socket
import subprocess
import sys

import child
import environment

HERE = pathlib.Path(__file__).resolve().parent
#: Kind of an unusable AITER -> its source (None for none, "" for an empty folder), and what a server must say of it.
#: With one that raises another error than ImportError, SGLang does not start itself.
UNUSABLE = {
    "absent": (None, "import aiter fails: ModuleNotFoundError: No module named 'aiter'"),
    "broken": (
        "raise ImportError('libamdhip64.so.6: cannot open shared object file')",
        "import aiter fails: ImportError: libamdhip64.so.6",
    ),
    "old": ("def gelu_and_mul(out, input): pass", "lacks paged_attention_ragged"),
    "namespace": ("", "is an empty namespace package, not AITER"),
}
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
#: Below those that Linux gives to connections; two for each server, and ten workers have ranges of their own.
PORTS = itertools.count(10000 + WORKER % 10 * 2000 + random.randrange(0, 1000, 200), 2)
#: On a CPU a server gets as far as its attention backend, which is where it must refuse.
ON_CPU = (
    "--device", "cpu", "--load-format", "dummy", "--disable-cuda-graph", "--disable-radix-cache",
    "--disable-overlap-schedule", "--skip-server-warmup",
)  # fmt: skip


@dataclasses.dataclass
class Server:
    """What a server left: `answers` of prompts.py, or None where it did not answer them all."""

    log: str
    answers: list | None
    output: str

    def last_lines(self) -> list[str]:
        """The end of the log without what SGLang says after any failure of a child process."""
        after = ("Received sigquit from a child process", "kill_process_tree called")
        return [line for line in self.log.splitlines() if line.strip() and not any(a in line for a in after)][-3:]


def free(port: int) -> bool:
    """Whether nothing listens on this port."""
    with socket.socket() as listener:
        return listener.connect_ex(("127.0.0.1", port)) != 0


def run(work, name, *arguments, release, aiter="reference", extension=True, model=None, **env) -> Server:
    """One server on WORK=`work`, from start to stop. `aiter` is `reference`, None or a folder to have on the path."""
    path = [str(environment.ROOT)] if extension else []
    path += [str(environment.place("sglang", release)), str(HERE / "shims")]
    if aiter is not None:
        path.append(str(child.TESTS / "reference") if aiter == "reference" else str(aiter))
    port = next(port for port in PORTS if free(port) and free(port + 1))
    variables = child.clean_environment(
        PYTHONPATH=os.pathsep.join(path), PYTHON=sys.executable, NAME=name, PORT=str(port), **env
    )
    tokens = pathlib.Path(work, f"{name}.json")
    tokens.unlink(missing_ok=True)
    # SGLang looks for a free port of its own, and servers that start together would find the same.
    command = [str(HERE / "serve.sh"), str(work), str(tokens), "--nccl-port", str(port + 1), *map(str, arguments)]
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    answers = json.loads(tokens.read_text()) if tokens.exists() and done.returncode == 0 else None
    return Server(pathlib.Path(work, f"{name}.log").read_text(), answers, done.stdout)


def folder_of(kind: str, parent: pathlib.Path) -> pathlib.Path | None:
    """A folder for the path whose `aiter` is unusable in the way of `kind`."""
    source = UNUSABLE[kind][0]
    if source is None:
        return None
    (parent / "aiter").mkdir(parents=True, exist_ok=True)
    if source:
        (parent / "aiter" / "__init__.py").write_text(source + "\n")
    return parent
