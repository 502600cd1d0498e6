"""Processes that have the slow imports behind them, and from which cases fork: `preloaded.run`.

A fresh interpreter spends seconds on imports that no test is about. So each pytest worker starts one process with the
third-party modules of SGLang's attention code (THIRD_PARTY), and that one forks another for each release, which also has
the release's own modules, up to the first one that the extension wraps. A case is a fork of one of the two. Path, variables,
arguments and output are set in the fork, and `site.execsitecustomize()` runs there: so activation, the wrapped modules,
AITER and the process group are made after the fork, in the order in which a fresh interpreter makes them.
test_preloaded.py compares the two.

As a program, this file is the first of these processes. A request is one message with open files; the answer is another.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import gc
import importlib
import json
import os
import pathlib
import select
import signal
import site
import socket
import subprocess
import sys
import tempfile
import threading
import traceback

KIT = pathlib.Path(__file__).resolve().parent
#: The level that has no module of SGLang's; every other level is a release.
THIRD_PARTY = "third-party modules"
#: What SGLang's attention code imports of others, where that takes longest. `harness` has torch, triton and the stand-ins.
MODULES = (
    "harness", "requests", "aiohttp", "pydantic", "IPython.display", "fastapi", "gguf", "tvm_ffi", "transformers",
    "transformers.image_processing_utils", "transformers.masking_utils", "transformers.modeling_layers",
    "transformers.models.llama", "transformers.models.auto.tokenization_auto", "openai.types.responses", "xgrammar",
    "torch._dynamo.repro.after_dynamo", "torch._inductor.compile_fx", "compressed_tensors.config",
)  # fmt: skip
ATTENTION = "sglang.srt.layers.attention"
TARGETS = {f"{ATTENTION}.{n}" for n in ("attention_registry", "hybrid_linear_attn_backend", "aiter_backend")}
RUNNER = "sglang.srt.model_executor.model_runner"
#: What imports the first target, and is therefore imported again in each case.
UNFINISHED = {RUNNER, f"{RUNNER}_components.attention_backend_setup"}
#: The only module before the targets that imports AITER; it goes on without.
ASKS_FOR_AITER = "sglang.srt.layers.quantization.quark.utils"
#: Releases that a worker keeps loaded. Its tests come release by release, most of the time.
KEPT = 3


# ---- the preloaded processes ----

#: What modules put into the environment as they were imported.
variables_set: dict[str, str] = {}


@contextlib.contextmanager
def variables_kept():
    before = dict(os.environ)
    try:
        yield
    finally:
        variables_set.update({name: value for name, value in os.environ.items() if before.get(name) != value})


def main() -> None:
    """The first level: its socket is the file that the command line names."""
    sys.path_of_python = sys.path[1:]  # without this folder
    gc.disable()
    with variables_kept():
        for name in MODULES:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    # PyTorch chooses this folder when it is imported, unless SGLang has done so before.
    for variables in (os.environ, variables_set):
        variables.pop("TORCHINDUCTOR_CACHE_DIR", None)
    serve(socket.socket(fileno=int(sys.argv[1])))


def load(place: str) -> None:
    """Import the release's own modules that are finished when the first target is imported."""
    import harness

    class TargetReached(BaseException):
        """No `except` of SGLang's takes it."""

    class Stop:
        def find_spec(self, name, path=None, target=None):
            if name in TARGETS:
                raise TargetReached
            return

    sys.path[:] = [place, *sys.path_of_python, str(KIT)]
    sys.meta_path.insert(0, stop := Stop())
    seen: set[str] = set()
    try:
        with variables_kept():
            harness.pretend_gfx950()
            importlib.import_module(RUNNER)
    except TargetReached as reached:
        frames = (
            frame.f_globals["__name__"]
            for frame, _ in traceback.walk_tb(reached.__traceback__)
            if frame.f_code.co_name == "<module>"
        )
        seen = {name for name in frames if name.startswith("sglang")}
    assert seen and seen <= UNFINISHED, f"{seen} import a target, and only {UNFINISHED} may"
    sys.meta_path.remove(stop)


def serve(requests: socket.socket) -> None:
    """Fork for each request, until nobody is left to ask."""
    sys.stdout.flush(), sys.stderr.flush()
    # A fork has no thread but the one that forks, and whatever another one holds stays locked.
    assert len(os.listdir("/proc/self/task")) == 1, "a thread runs in a preloaded process"
    gc.collect()
    # A collection in a fork does not touch, and so does not copy, what all of them share.
    gc.freeze()
    while True:
        message, files, *_ = socket.recv_fds(requests, 2**20, 3)
        if not message:
            with contextlib.suppress(ChildProcessError):
                while os.wait():
                    pass
            os._exit(0)
        request = json.loads(message)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass  # A release that is no longer kept.
        pid = os.fork()
        if pid == 0:
            requests.close()
            begin(request, files)
        for file in files:
            os.close(file)
        if "case" in request:
            requests.send(json.dumps(wait(pid, requests, request["timeout"])).encode())


def wait(pid: int, requests: socket.socket, timeout: float) -> int | None:
    """The exit status of a case; None for one that was killed, because it took too long or nobody waits for it."""
    ended = os.pidfd_open(pid)
    ready, _, _ = select.select([ended, requests], [], [], timeout)
    os.close(ended)
    if ended not in ready:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return status if ended in ready else None


def begin(request: dict, files: list[int]) -> None:
    """What a fork does: load a release and serve, or run a case. It does not return."""
    # What the modules printed as they were imported is part of the output of each case.
    printed = [os.pread(output, 2**20, 0) for output in (1, 2)]
    *sockets, out, err = files
    os.dup2(out, 1), os.dup2(err, 2), os.close(out), os.close(err)
    os.write(1, printed[0]), os.write(2, printed[1])
    status = 0
    try:
        if "load" in request:
            load(request["load"])
            serve(socket.socket(fileno=sockets[0]))
        become(request["environment"], request["case"])
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    # As an interpreter ends, apart from taking every object down.
    with contextlib.suppress(BaseException):
        threading._shutdown()
    atexit._run_exitfuncs()
    with contextlib.suppress(BaseException):
        sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)


def become(environment: dict[str, str], case: str) -> None:
    """Turn this fork into the process that `python child.py CASE` would be with these variables, and run it."""
    import child

    os.environ.clear()
    os.environ.update({**variables_set, **environment})
    sys.pycache_prefix = environment.get("PYTHONPYCACHEPREFIX") or None
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    os.chdir("/")
    sys.argv[:] = [str(KIT / "child.py"), case]
    entries = [entry for entry in environment["PYTHONPATH"].split(os.pathsep) if entry]
    sys.path[:] = [*entries, *sys.path_of_python]
    site.removeduppaths()
    for entry in entries:
        front = {path.stem for path in pathlib.Path(entry).glob("*") if path.is_dir() or path.suffix == ".py"}
        taken = {name for name in front & set(sys.modules) if not in_front(name, entry)}
        assert not taken, f"{entry} has {taken}, which this process imported from elsewhere: start a fresh interpreter"
    if "COVERAGE_PROCESS_CONFIG" in environment:
        import coverage

        coverage.process_startup()
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()
    gc.enable()
    site.execsitecustomize()
    if ASKS_FOR_AITER in sys.modules:
        importlib.reload(sys.modules[ASKS_FOR_AITER])
    sys.path.insert(0, str(KIT))
    child.main()


def in_front(name: str, entry: str) -> bool:
    """Whether the module that is imported is the one in the folder `entry`."""
    module = sys.modules[name]
    places = [getattr(module, "__file__", None), *getattr(module, "__path__", [])]
    return any(place and str(place).startswith(entry) for place in places)


# ---- the pytest worker's side ----


class Level:
    """A preloaded process as the pytest worker sees it; it ends when this object does, or the worker."""

    def __init__(self, name: str, base: Level | None = None):
        from child import clean_environment
        from environment import place

        self.name = name
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.output = [tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")]
        with theirs:
            if base is not None:
                base.send({"load": str(place("sglang", name))}, theirs, *self.output)
                return
            variables = clean_environment(TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
            variables.pop("COVERAGE_PROCESS_CONFIG", None)
            out, err = self.output
            command = [sys.executable, str(KIT / "preloaded.py"), str(theirs.fileno())]
            # In a session of its own, so that Ctrl-C reaches only the worker.
            self.process = subprocess.Popen(
                command, env=variables, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd="/", start_new_session=True,
                pass_fds=[theirs.fileno()],
            )  # fmt: skip

    def send(self, request: dict, *files) -> None:
        try:
            socket.send_fds(self.socket, [json.dumps(request).encode()], [file.fileno() for file in files])
        except OSError as error:
            raise RuntimeError(f"the process with {self.name} has ended:\n{self.said()}") from error

    def said(self) -> str:
        return "".join(text(file)[-3000:] for file in self.output)


def text(file) -> str:
    file.seek(0)
    return file.read()


_levels: collections.OrderedDict[str, Level] = collections.OrderedDict()


def level(name: str) -> Level:
    """The preloaded process with this release, or with THIRD_PARTY, which is started if need be."""
    if name not in _levels:
        _levels[name] = Level(name, None if name == THIRD_PARTY else level(THIRD_PARTY))
        releases = [loaded for loaded in _levels if loaded != THIRD_PARTY]
        for oldest in releases[:-KEPT]:
            _levels.pop(oldest).socket.close()
    _levels.move_to_end(name)
    return _levels[name]


def end() -> None:
    """End all of them, and wait until they are gone."""
    first = _levels.get(THIRD_PARTY)
    while _levels:
        _levels.popitem()[1].socket.close()
    if first:
        first.process.wait()


def run(name: str, case: str, variables: dict[str, str], timeout: float) -> subprocess.CompletedProcess:
    """`python child.py CASE` with these variables, forked from the level `name`; raises TimeoutExpired as `subprocess` does."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        origin = level(name)
        origin.send({"case": case, "environment": variables, "timeout": timeout}, out, err)
        answer = origin.socket.recv(2**10)
        if not answer:
            raise RuntimeError(f"the process with {name} has ended:\n{origin.said()}")
        status = json.loads(answer)
        if status is None:
            raise subprocess.TimeoutExpired(case, timeout, text(out), text(err))
        return subprocess.CompletedProcess(case, status, text(out), text(err))


if __name__ == "__main__":
    main()
