"""What goes wrong, one fault a row: what SGLang then computes, what is said, and what strict mode makes of it.

Each row is a fresh process with the extension on PYTHONPATH. What was seen is written to `build/faults.md`;
`docs/faults.md` is a copy of that file, and a row that differs from its line there fails.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable

import child
import environment
import preloaded
import pytest
from conftest import EXACT

ROOT, TESTS = environment.ROOT, child.TESTS
RELEASE = "0.5.12.post1"
ASM = "flash_attn_varlen_fp8_pertensor_func"
PAGED = "mha_batch_prefill_func"
RAGGED = "paged_attention_ragged"
#: What SGLang itself prints where it cannot import AITER.
SGLANG_SAYS = "aiter is AMD specific kernel library. Please make sure aiter is installed on your AMD device."


@dataclasses.dataclass
class Setup:
    """The process a fault is put into."""

    tmp: pathlib.Path
    release: str
    ours: list[pathlib.Path] = dataclasses.field(default_factory=lambda: [ROOT])
    first: list[pathlib.Path] = dataclasses.field(default_factory=list)
    sglang: pathlib.Path | None = None
    aiter: pathlib.Path | None = TESTS / "reference"
    env: dict[str, str] = dataclasses.field(default_factory=lambda: {"SGLANG_USE_AITER_PA": "1"})
    prefix: list[str] = dataclasses.field(default_factory=list)
    inside: str = ""

    def path(self) -> str:
        sglang = self.sglang or environment.place("sglang", self.release)
        return os.pathsep.join(str(p) for p in (*self.ours, *self.first, sglang, self.aiter) if p is not None)

    def variables(self, **extra: str) -> dict[str, str]:
        return child.clean_environment(
            TRITON_INTERPRET="1", OMP_NUM_THREADS="1", PYTHONPATH=self.path(), **{**self.env, **extra}
        )

    def level(self) -> str:
        """What may be loaded before the fault is put in: all that is the same without it."""
        own = self.sglang is None and self.aiter in (TESTS / "reference", None)
        return self.release if own else preloaded.THIRD_PARTY


Change = Callable[[Setup], None]


@dataclasses.dataclass(frozen=True)
class Row:
    """One fault. `strict` is what the error says under SGLANG_AITER_EXT_STRICT=1, or `-` and why there is none."""

    name: str
    fault: Change
    result: str
    line: str | None = None
    strict: str = "-"
    run: Callable[[Row, pathlib.Path], Seen] | None = None
    release: str = RELEASE
    quick: bool = False
    #: How many of SGLang's three targets are imported where nothing is computed.
    targets: int = 1


@dataclasses.dataclass
class Seen:
    result: str
    line: str
    strict: str


# ---- faults ----


def both(*changes: Change) -> Change:
    return lambda setup: [change(setup) for change in changes] and None


def beside(name: str, body: str) -> Change:
    """A module of somebody else's in front of the installed one."""

    def change(setup: Setup) -> None:
        folder = setup.tmp / f"beside-{name}"
        folder.mkdir()
        (folder / f"{name}.py").write_text(body + "\n")
        setup.first.append(folder)

    return change


def package(name: str, version: str) -> Change:
    """A package from PyPI in front of the installed one."""

    return lambda setup: setup.first.append(environment.install(name, version))


def copied(setup: Setup) -> pathlib.Path:
    """A checkout of our own to break."""
    target = setup.tmp / "checkout"
    for name in ("sglang_aiter_ext", "sitecustomize"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    setup.ours = [target]
    setup.env["PYTHONDONTWRITEBYTECODE"] = "1"
    return target


def raises_in(capability: str, function: str) -> Change:
    """The function raises as the first thing it does."""

    def change(setup: Setup) -> None:
        folder = copied(setup) / "sglang_aiter_ext" / "capabilities"
        ((file, found),) = (
            (file, node)
            for file in (folder / f"{capability}.py", *(folder / capability).glob("*.py"))
            if file.is_file()
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.FunctionDef)
            and node.name == function
            and {a.arg for a in node.args.args} & {"original", "release"}
        )
        lines = file.read_text().splitlines()
        lines.insert(found.body[0].lineno - 1, f"{' ' * found.body[0].col_offset}raise RuntimeError('injected')")
        file.write_text("\n".join(lines))

    return change


def ours_has(file: str, body: str) -> Change:
    def change(setup: Setup) -> None:
        (copied(setup) / "sglang_aiter_ext" / file).write_text(body)

    return change


def overlay(setup: Setup, *files: str) -> pathlib.Path:
    """The release with real copies of `files` and of the folders above them, all else links."""
    source, target = environment.place("sglang", setup.release) / "sglang", setup.tmp / "release" / "sglang"
    real = {pathlib.PurePath(f) for f in files} | {p for f in files for p in pathlib.PurePath(f).parents}

    def fill(inner: pathlib.PurePath) -> None:
        (target / inner).mkdir(parents=True)
        for entry in (source / inner).iterdir():
            at = inner / entry.name
            if at not in real:
                (target / at).symlink_to(entry)
            elif entry.is_dir():
                fill(at)
            else:
                shutil.copy(entry, target / at)

    fill(pathlib.PurePath())
    setup.sglang = setup.tmp / "release"
    # Python finds what it compiled of the release by path: give it the one it has, to read.
    kept, prefix = environment.CACHE / "pycache", setup.tmp / "pycache"
    here = prefix / target.relative_to("/")
    here.parent.mkdir(parents=True)
    kept.mkdir(parents=True, exist_ok=True)
    here.symlink_to(kept / source.relative_to("/"))
    for top in kept.iterdir():
        if not (prefix / top.name).exists():
            (prefix / top.name).symlink_to(top)
    setup.env |= {"PYTHONPYCACHEPREFIX": str(prefix), "PYTHONDONTWRITEBYTECODE": "1"}
    return target


def attention(file: str, before: str | None, after: str) -> Change:
    """A change to a file of SGLang's attention code: `before` becomes `after`, or `after` is all there is, or is added."""

    def change(setup: Setup) -> None:
        name = f"srt/layers/attention/{file}.py"
        path = overlay(setup, name) / name
        text = path.read_text()
        assert before is None or before in text
        path.write_text(text + after if before == "" else after if before is None else text.replace(before, after))

    return change


def no_file(name: str) -> Change:
    return lambda setup: (overlay(setup, name) / name).unlink()


def sglang_is(body: str | None) -> Change:
    """A folder `sglang` with nothing but an `__init__.py`, or without even that."""

    def change(setup: Setup) -> None:
        setup.sglang = setup.tmp / "half"
        (setup.sglang / "sglang").mkdir(parents=True)
        if body is not None:
            (setup.sglang / "sglang" / "__init__.py").write_text(body + "\n")

    return change


def no_sglang(setup: Setup) -> None:
    setup.sglang = setup.tmp


def aiter(body: str | None, reference: bool = False) -> Change:
    """An `aiter` with `body`, after the reference's own code if that is asked for; None is a folder without a file."""

    def change(setup: Setup) -> None:
        setup.aiter = child.aiter_with(setup.tmp / "aiter-of-this-row", body, reference)

    return change


def no_aiter(setup: Setup) -> None:
    setup.aiter = None


def variable(name: str, value: str) -> Change:
    return lambda setup: setup.env.update({name: value})


def inside(name: str) -> Change:
    return lambda setup: setattr(setup, "inside", name)


def nothing(setup: Setup) -> None:
    pass


def without_dac(setup: Setup) -> None:
    """Root reads and writes everything: without these two capabilities file modes count for it too."""
    if os.getuid() == 0:
        setup.prefix = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]


def unreadable(setup: Setup) -> None:
    without_dac(setup)
    (copied(setup) / "sglang_aiter_ext" / "__init__.py").chmod(0)


def read_only(setup: Setup) -> None:
    without_dac(setup)
    checkout = copied(setup)
    for folder in (checkout, *(p for p in checkout.rglob("*") if p.is_dir())):
        folder.chmod(0o555)
    setup.env |= {"PYTHONPYCACHEPREFIX": "", "PYTHONDONTWRITEBYTECODE": ""}


def unwritable_states(setup: Setup) -> None:
    without_dac(setup)
    folder = setup.tmp / "states"
    folder.mkdir(mode=0o555)
    setup.env["SGLANG_AITER_EXT_STATE_DIR"] = str(folder)


def twice(setup: Setup) -> None:
    setup.ours = [ROOT, ROOT]


def another_checkout(setup: Setup) -> None:
    setup.ours = [copied(setup), ROOT]


def by_run(setup: Setup) -> None:
    setup.prefix = [sys.executable, "-m", "sglang_aiter_ext", "run", "--"]


# ---- runners ----


def execute(setup: Setup, command: list[str], **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [*setup.prefix, *command],
        env=setup.variables(),
        capture_output=True,
        text=True,
        cwd="/",
        timeout=300,
        **options,
    )


def case(setup: Setup, targets: int, attend: bool) -> tuple[dict, str]:
    """The result of cases/faults.py and what it wrote to stderr; stdout holds nothing else."""
    setup.env["FAULT"] = json.dumps({"inside": setup.inside, "targets": targets, "attend": attend})
    if setup.prefix:
        done = execute(setup, [sys.executable, str(child.KIT / "child.py"), "faults:run"])
    else:
        done = child.start("faults:run", setup.variables(), setup.level(), timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line != SGLANG_SAYS]
    assert len(lines) == 1 and lines[0].startswith(child.MARK), done.stdout
    return json.loads(lines[0][len(child.MARK) :]), done.stderr


@functools.cache
def plain(release: str) -> tuple[dict, frozenset[str]]:
    """The same case without the extension: its result, and the lines SGLang writes to stderr."""
    result, stderr = case(Setup(pathlib.Path("/"), release, ours=[]), 3, True)
    return result, frozenset(map(nameless, stderr.splitlines()))


def nameless(line: str) -> str:
    """A line without the names of temporary folders."""
    return re.sub(r"tiny-hybrid-\w+", "", line)


def described(phase: dict, before: dict) -> str:
    """`as without it`, `exact`, or the error and whose it is."""
    if "raised" in phase:
        return ("" if phase["ours"] else "SGLang's ") + phase["raised"]
    if phase == before:
        return "as without it"
    # The harness cannot run every phase of every release without us.
    without = before.get("outputs", [None] * len(phase["outputs"]))
    served = [error for error, *same in zip(phase["errors"], phase["outputs"], without) if len(set(same)) == 2]
    if max(served) > EXACT:
        return f"off by {max(served):.3f}"
    return "exact" if len(served) == len(phase["errors"]) else "exact or as without it, batch by batch"


def shown(setup: Setup, text: str) -> str:
    """`text` without what differs from machine to machine."""
    for place in (setup.tmp, child.KIT, TESTS, ROOT, environment.place("sglang", setup.release), environment.CACHE):
        text = text.replace(str(place), "…")
    text = re.sub(r"states/[\w.-]+\.json", "states/….json", text)
    return " ".join(text.split()).replace("|", "\\|")


def our_line(setup: Setup, stderr: str) -> str:
    """The one line that is not SGLang's own, or nothing; it names us, a capability or a variable."""
    from sglang_aiter_ext.capabilities import CAPABILITIES

    known = plain(setup.release)[1] if stderr else ()
    lines = [line for line in stderr.splitlines() if nameless(line) not in known]
    assert len(lines) <= 1, stderr
    names = ("sglang_aiter_ext", "SGLANG_", *(c.name for c in CAPABILITIES))
    assert all(any(name in line for name in names) for line in lines), lines
    return shown(setup, lines[0]) if lines else ""


def attend(row: Row, tmp: pathlib.Path) -> Seen:
    """Prefill on SGLang's AITER backend and decode behind its Triton backend, with SGLANG_USE_AITER_PA=1."""
    setup = Setup(tmp, row.release)
    row.fault(setup)
    before, _ = plain(row.release)
    out, stderr = case(setup, 3, True)
    for path, depth in out["wrapped"].items():
        # asm_context_prefill and head_ratio both wrap forward_extend in 0.5.17 and 0.5.18.
        assert depth <= (2 if path.endswith("forward_extend") else 1), out["wrapped"]
    phases = {name: shown(setup, described(out[name], before[name])) for name in ("prefill", "decode")}
    words = set(phases.values())
    result = words.pop() if len(words) == 1 else f"prefill {phases['prefill']}, decode {phases['decode']}"
    return Seen(result, our_line(setup, stderr), strict_error(row, setup, out))


def strict_error(row: Row, setup: Setup, out: dict) -> str:
    """What strict mode raises; nothing where none is expected and SGLang raises the same without it."""
    sglangs = [out.get("import")]
    if row.strict.startswith("-"):
        sglangs += [out[phase].get("raised") for phase in ("prefill", "decode") if phase in out]
    return "" if out["strict"] in sglangs else shown(setup, out["strict"] or "")


def imports(row: Row, tmp: pathlib.Path) -> Seen:
    """SGLang's targets are imported, and nothing is computed: wrapped, unwrapped, or the error SGLang has without us."""
    setup = Setup(tmp, row.release)
    row.fault(setup)
    out, stderr = case(setup, row.targets, False)
    assert not any(depth > 1 for depth in out["wrapped"].values())
    if "import" in out:
        assert not any(out["wrapped"].values())
        result = f"SGLang's {out['import']}"
    else:
        result = "wrapped" if any(out["wrapped"].values()) else "as without it"
    return Seen(shown(setup, result), our_line(setup, stderr), strict_error(row, setup, out))


#: Imports SGLang's first target as a server does, and says whether its function is wrapped.
PROGRAM = """
import sys
sys.path[:0] = [p for p in {stand_ins!r} if p not in sys.path]
sys.path += [p for p in {path!r} if p not in sys.path]
import stand_ins
import sglang.srt.layers.attention.attention_registry as registry
print("wrapped" if hasattr(registry.attn_backend_wrapper, "__wrapped__") else "as without it")
"""


def program(setup: Setup, source: str = PROGRAM) -> str:
    import site

    return source.format(
        stand_ins=[str(child.KIT)],
        path=[*map(str, filter(None, setup.path().split(os.pathsep)[len(setup.ours) :])), *site.getsitepackages()],
    )


def starts(*flags: str, form: str = "-c", source: str = PROGRAM):
    """Python itself, with flags, as a script, with code on its stdin: what the program prints is the result."""

    def run(row: Row, tmp: pathlib.Path) -> Seen:
        setup = Setup(tmp, row.release)
        row.fault(setup)
        code = textwrap.dedent(program(setup, source))
        script = tmp / "program.py"
        script.write_text(code)
        command = {"-c": ["-c", code], "script": [str(script)], "-i": ["-i"]}[form]
        options = {"input": code} if form == "-i" else {}
        seen = []
        for strict in ("", "1"):
            setup.env["SGLANG_AITER_EXT_STRICT"] = strict
            done = execute(setup, [sys.executable, *flags, *command], **options)
            assert done.returncode == 0, done.stderr[-3000:]
            # The prompts of an interactive Python go to stderr.
            prompts = (">>>", "Python ", "Type ") if form == "-i" else ()
            said = "\n".join(x for x in done.stderr.splitlines() if not x.startswith(prompts))
            seen.append((done.stdout.strip(), our_line(setup, said)))
        return Seen(*seen[0], strict="" if seen[0] == seen[1] else str(seen[1]))

    return run


def bare(row: Row, tmp: pathlib.Path) -> Seen:
    """`import sglang` ends as it does without us."""
    setup, without = Setup(tmp, row.release), Setup(tmp, row.release, ours=[])
    row.fault(setup)
    without.sglang = setup.sglang
    strict = dataclasses.replace(setup, env={**setup.env, "SGLANG_AITER_EXT_STRICT": "1"})
    code = "import sglang.srt.layers.attention.attention_registry"
    ours, *others = (execute(s, [sys.executable, "-c", code]) for s in (setup, strict, without))
    for other in others:
        assert (ours.returncode, ours.stdout, ours.stderr) == (other.returncode, other.stdout, other.stderr)
    return Seen(f"SGLang's {ours.stderr.splitlines()[-1]}", "", "")


def server_help(row: Row, tmp: pathlib.Path) -> Seen:
    """`python -m sglang.launch_server --help` prints what it prints without us."""
    answers = []
    # SGLang imports torchvision, which has a stand-in here.
    code = "import stand_ins, runpy; runpy.run_module('sglang.launch_server', run_name='__main__', alter_sys=True)"
    for ours, strict in (([ROOT], "0"), ([ROOT], "1"), ([], "0")):
        setup = Setup(tmp, row.release, ours=[*ours, child.KIT])
        setup.env["SGLANG_AITER_EXT_STRICT"] = strict
        setup.env["PYTHONHASHSEED"] = "0"  # its help shows sets
        done = execute(setup, [sys.executable, "-c", code, "--help"])
        assert done.returncode == 0, done.stderr[-2000:]
        answers.append((done.stdout, done.stderr))
    assert answers[0] == answers[1] == answers[2]
    return Seen("as without it", "", "")


#: The end of forward_extend's parameters in the release.
EXTEND = (
    "        layer: RadixAttention,\n        forward_batch: ForwardBatch,\n        save_kv_cache=True,\n"
    "        sinks=None,\n    ):\n        self.logits"
)

# ---- programs ----

FORK = (
    PROGRAM.replace('without it")', "without it\", end='', flush=True)")
    + """
import os
pid = os.fork()
if pid == 0:
    from sglang.srt.layers.attention import attention_registry
    depth = hasattr(attention_registry.attn_backend_wrapper.__wrapped__, "__wrapped__")
    os._exit(depth)
print(", in the fork", "as without it" if os.waitpid(pid, 0)[1] else "wrapped", end="")
"""
)
FORK_BEFORE = (
    """
import os, sys
pid = os.fork()
if pid:
    sys.exit(os.waitpid(pid, 0)[1])
"""
    + PROGRAM
)
SPAWN = """
import multiprocessing, sys
sys.path[:0] = {stand_ins!r}

def in_child():
    import stand_ins
    import sglang.srt.layers.attention.attention_registry as registry
    return hasattr(registry.attn_backend_wrapper, "__wrapped__")

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print("wrapped" if pool.apply(in_child) else "as without it")
"""
THREADS = """
import sys, threading, warnings
warnings.simplefilter("ignore")
sys.path[:0] = {stand_ins!r}
import stand_ins
names = ["sglang.srt.layers.attention." + n for n in ("attention_registry", "hybrid_linear_attn_backend", "aiter_backend")]
errors, start = [], threading.Barrier(6)
def load(name):
    start.wait()
    try:
        __import__(name)
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=load, args=(name,), daemon=True) for name in names * 2]
[t.start() for t in threads]
[t.join(120) for t in threads]
function, depth = sys.modules[names[0]].attn_backend_wrapper, 0
while hasattr(function, "__wrapped__"):
    function, depth = function.__wrapped__, depth + 1
print("wrapped" if (depth, errors, any(t.is_alive() for t in threads)) == (1, [], False) else (depth, errors))
"""
WAITING = """
import sys
print("waiting for SGLang" if [type(f).__name__ for f in sys.meta_path].count("TargetFinder") == 1 else "not active")
"""
SUB_INTERPRETERS = (
    """
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
for _ in range(3):
    inner = interpreters.create()
    interpreters.run_string(inner, "import sys; assert [type(f).__name__ for f in sys.meta_path].count('TargetFinder') == 1")
    interpreters.destroy(inner)
"""
    + PROGRAM
)


# ---- the table ----

GOES_ON = "*: internal error in *: RuntimeError: injected; SGLang's own function serves it"
SILENT = "- nothing of ours can be imported, and at interpreter start nothing raises"
WORKS = "- everything is applied"
ONE_CALL = "CouldNotApply: {}: internal error in *: RuntimeError: injected"
REFUSED = "InternalError: SGLANG_USE_AITER_PA=1 is not served: internal error in *: RuntimeError: injected; start with SGLANG_USE_AITER_PA=0*"
NOT_SERVED = "CouldNotApply: asm_context_prefill: the ASM kernel cannot serve it ({}): *"
SGLANGS = "- SGLang's own import fails, as it does without the extension"
NO_PATH = "- Python was told to leave PYTHONPATH or site alone: nothing of ours runs"
NO_LAYER_0 = "prefill SGLang's ValueError: layer_id=0 not in full attention layers*, decode as without it"
APPLIED = "CouldNotApply: {} could not be applied*"
ACCEPTED = "use 1/true/yes/on or 0/false/no/off, in any case"


def needs_aiter(why: str, prefill: str = "SGLang's NameError: name '*' is not defined") -> str:
    """Decode with SGLANG_USE_AITER_PA=1 is refused, and the error names what is wrong and the way out."""
    return f"prefill {prefill}, decode DecodeError: SGLANG_USE_AITER_PA=1 needs AITER's {RAGGED}*{why}*SGLANG_USE_AITER_PA=0*"


def unaccepted(name: str, value: str, result: str, strict: str | None = None, accepted: str = ACCEPTED, **more) -> Row:
    line = f"{name}={value!r} is not accepted: {accepted}"
    return Row(f"{name}={value}", variable(name, value), result, line, strict or f"SettingError: {line}", **more)


ROWS = [
    # wrapt
    Row("wrapt missing", beside("wrapt", "raise ModuleNotFoundError(\"No module named 'wrapt'\", name='wrapt')"),
        "as without it", "decode_pa could not be applied to *: ModuleNotFoundError: No module named 'wrapt'", APPLIED.format("decode_pa")),
    Row("wrapt broken on import", beside("wrapt", "raise RuntimeError('broken')"), "as without it",
        "decode_pa could not be applied to *: RuntimeError: broken", APPLIED.format("decode_pa")),
    Row("an empty module called wrapt", beside("wrapt", ""), "as without it",
        "decode_pa could not be applied to *: ImportError: cannot import name 'wrap_object' from 'wrapt'*", APPLIED.format("decode_pa")),
    Row("wrapt 1.16.0", package("wrapt", "1.16.0"), "exact", strict=WORKS),
    Row("wrapt 2.0.1", package("wrapt", "2.0.1"), "exact", strict=WORKS),
    Row("no fault at all, wrapt 2.5.2", nothing, "exact", strict=WORKS),
    Row("no fault at all, SGLANG_AITER_EXT_STRICT=1", variable("SGLANG_AITER_EXT_STRICT", "1"), "exact", strict=WORKS),
    # our own code
    Row("our package unreadable", unreadable, "as without it", strict=SILENT, run=starts()),
    Row("our bootstrap raises", ours_has("bootstrap.py", "raise RuntimeError('injected')"), "as without it", strict=SILENT, run=starts()),
    Row("our package's __init__ empty", ours_has("__init__.py", ""), "exact", strict=WORKS),
    Row("a syntax error in activation", ours_has("activation.py", "def broken(:\n"), "as without it",
        "sglang_aiter_ext is not active: SyntaxError: invalid syntax (activation.py, line 1)", "ImportError: sglang_aiter_ext is not active: SyntaxError: invalid syntax (activation.py, line 1)"),
    Row("a syntax error in a capability", ours_has("capabilities/head_ratio.py", "def broken(:\n"), "as without it",
        "sglang_aiter_ext is not active: SyntaxError: invalid syntax (head_ratio.py, line 1)", "ImportError: sglang_aiter_ext is not active: SyntaxError: invalid syntax (head_ratio.py, line 1)"),
    *(Row(f"the probe of {name} raises", raises_in(name, "probe"), result, line, f"CouldNotApply: {name} could not be applied: internal error of the probe: RuntimeError: injected")
      for name, result, line in (
          ("decode_pa", "prefill exact, decode as without it", "decode_pa could not be applied: internal error of the probe: RuntimeError: injected"),
          ("asm_context_prefill", "prefill as without it, decode exact", None),
          ("v_head_dim", "exact", None),
          ("head_ratio", "exact", None),
          ("gather_reuse", "exact", None))),
    *(Row(f"wrappers of {name} raises", both(raises_in(name, "wrappers"), *more), result, f"{name} could not be applied: RuntimeError: injected", APPLIED.format(name), release=release)
      for name, result, release, *more in (
          ("decode_pa", "prefill exact, decode as without it", RELEASE),
          ("asm_context_prefill", "prefill as without it, decode exact", RELEASE),
          ("head_ratio", "exact", "0.5.18"),
          ("gather_reuse", "prefill as without it, decode exact", "0.5.19"),
          ("v_head_dim", NO_LAYER_0, "0.5.9", variable("SGLANG_USE_AITER_PA", "0"), variable("SGLANG_AITER_ASM_CONTEXT_PREFILL", "0")))),
    *(Row(f"{function} of {name} raises", raises_in(name, function), result, GOES_ON, ONE_CALL.format(name), release=release)
      for name, function, result, release in (
          ("asm_context_prefill", "forward_extend", "prefill as without it, decode exact", RELEASE),
          ("asm_context_prefill", "paged_kernel", "prefill as without it, decode exact", RELEASE),
          ("asm_context_prefill", "is_gfx95_supported", "prefill exact or as without it, batch by batch, decode exact", "0.5.18"),
          ("head_ratio", "forward_extend", "exact", "0.5.18"),
          ("gather_reuse", "forward_extend", "prefill as without it, decode exact", "0.5.19"),
          ("gather_reuse", "gather_indices", "prefill as without it, decode exact", "0.5.19"))),
    Row("init of v_head_dim raises", both(raises_in("v_head_dim", "init"), variable("SGLANG_USE_AITER_PA", "0"), variable("SGLANG_AITER_ASM_CONTEXT_PREFILL", "0")), NO_LAYER_0, GOES_ON, ONE_CALL.format("v_head_dim"), release="0.5.9"),
    Row("forward_extend of head_ratio raises, where the ASM kernel lacks the ratio",
        both(raises_in("head_ratio", "forward_extend"), inside("a ratio that the ASM kernel lacks"), variable("SGLANG_AITER_EXT_DISABLE", "asm_context_prefill")),
        "prefill SGLang's *, decode exact", GOES_ON, ONE_CALL.format("head_ratio"), release="0.5.18"),
    *(Row(f"{function} of decode_pa raises", raises_in("decode_pa", function),
          f"{prefill}{REFUSED}", strict=REFUSED) for function, prefill in (("build", ""), ("forward_decode", "prefill exact, decode "), ("decode_kernel", "prefill exact, decode "))),
    Row("the counter raises", inside("the counter raises"), "exact", "sglang_aiter_ext: calls are not counted: MemoryError: no room to count", "CouldNotApply: asm_context_prefill: internal error in *: MemoryError: no room to count"),
    Row("a log handler raises", inside("a handler that raises"), "exact", strict=WORKS),
    # SGLang
    Row("SGLang missing", no_sglang, "SGLang's ModuleNotFoundError: No module named 'sglang'", strict=SGLANGS, run=bare, quick=True),
    Row("SGLang an empty folder", sglang_is(None), "SGLang's ModuleNotFoundError: No module named 'sglang.srt'", strict=SGLANGS, run=bare, quick=True),
    Row("SGLang half installed", sglang_is(""), "SGLang's ModuleNotFoundError: No module named 'sglang.srt'", strict=SGLANGS, run=bare, quick=True),
    Row("SGLang raises on import", sglang_is("raise RuntimeError('no GPU')"), "SGLang's RuntimeError: no GPU", strict=SGLANGS, run=bare, quick=True),
    Row("a target module missing", no_file("srt/layers/attention/attention_registry.py"), "SGLang's ModuleNotFoundError: No module named *", strict=SGLANGS, run=imports),
    Row("a target module raises", attention("attention_registry", "", "\nraise RuntimeError('half written')\n"), "SGLang's RuntimeError: half written", strict=SGLANGS, run=imports),
    Row("a syntax error in a target module", attention("aiter_backend", "", "\ndef broken(:\n"), "SGLang's SyntaxError: invalid syntax (aiter_backend.py, line *",
        "decode_pa could not be applied: the source of the release cannot be read: invalid syntax (aiter_backend.py, line *", APPLIED.format("decode_pa"), run=imports, targets=3),
    Row("a target function missing", attention("attention_registry", "def attn_backend_wrapper(", "def wrap_attn_backend("), "as without it",
        "decode_pa could not be applied: * has no attn_backend_wrapper", APPLIED.format("decode_pa"), run=imports, quick=True),
    Row("a target function in the source that is gone when it runs", attention("attention_registry", "", "\ndel attn_backend_wrapper\n"), "as without it",
        "decode_pa could not be applied to *: AttributeError: * has no attn_backend_wrapper", APPLIED.format("decode_pa"), run=imports),
    Row("a target class missing", attention("aiter_backend", "class AiterAttnBackend", "class AITERBackend"), "as without it",
        "decode_pa could not be applied: * has no AiterAttnBackend.forward_decode", APPLIED.format("decode_pa"), run=imports, targets=3),
    Row("a target parameter missing", attention("aiter_backend", EXTEND, EXTEND.replace("layer:", "layers:")), "wrapped",
        None, "CouldNotApply: * could not be applied: AiterAttnBackend.forward_extend in * has no parameter layer *", run=imports, targets=3),
    Row("a kernel called twice", attention("aiter_backend", f"                {RAGGED}(\n", f"                {RAGGED}() if 0 else {RAGGED}(\n"), "wrapped",
        f"decode_pa could not be applied: AiterAttnBackend.forward_decode calls {RAGGED} 2 times, or not by position", APPLIED.format("decode_pa"), run=imports, targets=3),
    # AITER
    Row("aiter absent", no_aiter, needs_aiter("ModuleNotFoundError: No module named 'aiter'"), strict=APPLIED.format("asm_context_prefill")),
    Row("aiter raises ImportError", aiter("raise ImportError('undefined symbol: hipFoo')"), needs_aiter("ImportError: undefined symbol: hipFoo"), strict=APPLIED.format("asm_context_prefill")),
    Row("aiter raises RuntimeError", aiter("raise RuntimeError('No HIP GPUs are available')"), "SGLang's RuntimeError: No HIP GPUs are available", strict=SGLANGS),
    Row("aiter raises OSError", aiter("raise OSError('libamdhip64.so.6: cannot open shared object file')"), "SGLang's OSError: libamdhip64.so.6: *", strict=SGLANGS),
    Row("aiter an empty namespace package", aiter(None), needs_aiter("is an empty namespace package, not AITER"), strict=APPLIED.format("asm_context_prefill")),
    Row(f"aiter without {PAGED}", aiter(f"del {PAGED}", reference=True), needs_aiter(f"could not import {PAGED} from aiter"), strict=APPLIED.format("asm_context_prefill")),
    Row(f"aiter without {ASM}", aiter(f"del {ASM}", reference=True), "prefill as without it, decode exact", f"asm_context_prefill could not be applied to *: UnusableAiter: * lacks {ASM}", APPLIED.format("asm_context_prefill")),
    Row(f"aiter without {RAGGED}", aiter(f"del {RAGGED}", reference=True), needs_aiter(f"lacks {RAGGED}", "exact"), strict=APPLIED.format("decode_pa")),
    *(Row(f"{kernel} with other parameters", aiter(f"_own = {kernel}\ndef {kernel}(first, *args, **kwargs): return _own(first, *args, **kwargs)", reference=True), result, line, strict)
      for kernel, result, line, strict in (
          (PAGED, "prefill as without it, decode exact", f"asm_context_prefill could not be applied to *: {PAGED} has parameter 0 'first' where 'q' is expected", APPLIED.format("asm_context_prefill")),
          (ASM, "prefill as without it, decode exact", f"asm_context_prefill could not be applied to *: {ASM} has parameter 0 'first' where 'q' is expected", APPLIED.format("asm_context_prefill")),
          (RAGGED, needs_aiter(f"{RAGGED} has parameter 0 'first' where 'out' is expected", "exact"), None, f"DecodeError: SGLANG_USE_AITER_PA=1 needs AITER's {RAGGED}*has parameter 0 'first'*"))),
    # variables
    unaccepted("SGLANG_AITER_EXT", "banana", "as without it"),
    unaccepted("SGLANG_USE_AITER_PA", "2", f"SettingError: SGLANG_USE_AITER_PA='2' is not accepted: {ACCEPTED}"),
    unaccepted("SGLANG_AITER_ASM_CONTEXT_PREFILL", "perhaps", "prefill as without it, decode exact"),
    unaccepted("SGLANG_AITER_EXT_STRICT", "maybe", "exact", "- this is the variable itself: what cannot be read is off"),
    unaccepted("SGLANG_AITER_EXT_DISABLE", "decode,head_ratio", "exact", accepted="decode is not a capability; use any of decode_pa, *"),
    unaccepted("SGLANG_AITER_EXT_STATE_DIR", "states", "exact", accepted="use an absolute path"),
    # where others can see it
    Row("a state folder that cannot be made", variable("SGLANG_AITER_EXT_STATE_DIR", "/proc/states"), "exact",
        "SGLANG_AITER_EXT_STATE_DIR=/proc/states cannot be served: [Errno 2] No such file or directory: *", "CouldNotApply: SGLANG_AITER_EXT_STATE_DIR=/proc/states cannot be served: *"),
    Row("a state folder without write permission", unwritable_states, "exact",
        "SGLANG_AITER_EXT_STATE_DIR=* cannot be served: [Errno 13] Permission denied: *", "CouldNotApply: SGLANG_AITER_EXT_STATE_DIR=* cannot be served: *"),
    Row("prometheus_client missing, with SGLang's metrics on", both(variable("PROMETHEUS_MULTIPROC_DIR", "/tmp"), beside("prometheus_client", "raise ImportError('none here')")), "exact",
        "sglang_aiter_ext counters on /metrics cannot be served: none here", "CouldNotApply: sglang_aiter_ext counters on /metrics*"),
    # one call
    Row("no memory for the gather", inside("out of memory"), "prefill as without it, decode exact", "asm_context_prefill: the paged kernel serves it (out_of_memory): *2.00 GiB", NOT_SERVED.format("out_of_memory")),
    Row("the ASM kernel raises", inside("the ASM kernel raises"), "prefill as without it, decode exact", "asm_context_prefill: the paged kernel serves it (kernel_error): RuntimeError: HIP error: *", NOT_SERVED.format("kernel_error")),
    Row("metadata that disagrees with the lengths", inside("lengths disagree"), "prefill as without it, decode exact", "asm_context_prefill: the paged kernel serves it (lengths_mismatch): *", NOT_SERVED.format("lengths_mismatch")),
    Row("metadata that takes no attribute, after SGLang's function ran", inside("metadata takes no attribute"), "prefill as without it, decode exact",
        "gather_reuse: internal error in *: AttributeError: no _sglang_aiter_ext_indices here; *",
        "CouldNotApply: gather_reuse: internal error in *: AttributeError: no _sglang_aiter_ext_indices here", release="0.5.19"),
    # files, flags, and ways to start
    Row("a read-only checkout", read_only, "wrapped", strict=WORKS, run=starts()),
    Row("PYTHONDONTWRITEBYTECODE=1", variable("PYTHONDONTWRITEBYTECODE", "1"), "wrapped", strict=WORKS, run=starts()),
    Row("python -I", nothing, "as without it", strict=NO_PATH, run=starts("-I")),
    Row("python -E", nothing, "as without it", strict=NO_PATH, run=starts("-E")),
    Row("python -S", nothing, "as without it", strict=NO_PATH, run=starts("-S")),
    Row("python -s -P", nothing, "wrapped", strict=WORKS, run=starts("-s", "-P")),
    Row("python -O", nothing, "wrapped", strict=WORKS, run=starts("-O")),
    Row("python -OO, with which transformers cannot be imported", nothing, "waiting for SGLang", strict=WORKS, run=starts("-OO", source=WAITING)),
    Row("python script.py", nothing, "wrapped", strict=WORKS, run=starts(form="script")),
    Row("python -i", nothing, "wrapped", strict=WORKS, run=starts(form="-i")),
    Row("python -m sglang.launch_server --help", nothing, "as without it", strict=WORKS, run=server_help),
    Row("fork after SGLang is imported", nothing, "wrapped, in the fork wrapped", strict=WORKS, run=starts(source=FORK)),
    Row("fork before SGLang is imported", nothing, "wrapped", strict=WORKS, run=starts(source=FORK_BEFORE)),
    Row("spawn", nothing, "wrapped", strict=WORKS, run=starts(form="script", source=SPAWN)),
    Row("six threads import SGLang at once", nothing, "wrapped", strict=WORKS, run=starts(source=THREADS)),
    # coverage's own .pth fails in a sub-interpreter.
    Row("sub-interpreters", variable("COVERAGE_PROCESS_CONFIG", ""), "wrapped", strict=WORKS, run=starts(source=SUB_INTERPRETERS)),
    # once more
    Row("SGLang's target modules reloaded", inside("reload targets"), "exact", strict=WORKS),
    Row("our modules reloaded, then activate()", inside("reload ours"), "exact", strict=WORKS),
    Row("PYTHONPATH twice", twice, "wrapped", strict=WORKS, run=imports),
    Row("two checkouts on PYTHONPATH", another_checkout, "wrapped", strict=WORKS, run=imports),
    Row("PYTHONPATH and run", by_run, "wrapped", strict=WORKS, run=imports),
    Row("PYTHONPATH and activate(), before and after", inside("activate"), "exact", strict=WORKS),
]  # fmt: skip

# ---- the tests ----

DOCS, BUILD = ROOT / "docs" / "faults.md", ROOT / "build" / "faults"
#: The page up to its first row, which people write.
HEADER = re.match(r".*?\| --- \| --- \| --- \| --- \|\n", DOCS.read_text(), re.S)[0]


def matches(pattern: str, text: str) -> bool:
    """Whether `text` is `pattern`, with anything in place of each `*`."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), text) is not None


def keep(row: Row, seen: Seen) -> str:
    """The row's line of Markdown, written to its place in `build/faults.md` too."""
    strict = row.strict[2:] if row.strict.startswith("- ") else f"`{seen.strict}`"
    line = f"| {row.name} | {seen.result} | {f'`{seen.line}`' if seen.line else ''} | {strict} |\n"
    BUILD.mkdir(parents=True, exist_ok=True)
    files = [BUILD / re.sub(r"\W+", "-", each.name) for each in ROWS]
    files[ROWS.index(row)].write_text(line)
    part = BUILD / f"part-{os.getpid()}"
    part.write_text(HEADER + "".join(file.read_text() for file in files if file.is_file()))
    part.replace(BUILD.with_suffix(".md"))
    return line


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=() if row.quick else pytest.mark.slow, id=row.name) for row in ROWS]
)
def test_a_fault_does_and_says_what_its_row_says(row, tmp_path):
    seen = (row.run or attend)(row, tmp_path)
    line = keep(row, seen)
    assert matches(row.result, seen.result), seen
    assert matches(row.line or "", seen.line), seen
    assert matches("" if row.strict.startswith("-") else row.strict, seen.strict), seen
    assert line in DOCS.read_text(), f"docs/faults.md has another line for this row; now: {line}"


def test_the_document_has_every_row_and_no_other():
    assert len({row.name for row in ROWS}) == len(ROWS) >= 60
    assert f"[{len(ROWS)} faults](docs/faults.md)" in (ROOT / "README.md").read_text()
    table = DOCS.read_text().removeprefix(HEADER)
    assert [line.split(" | ")[0] for line in table.splitlines()] == [f"| {row.name}" for row in ROWS]
