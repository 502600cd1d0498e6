"""The command line: `sglang-aiter-ext doctor`, `selftest`, `run -- CMD ...` and `path`."""

from __future__ import annotations

import argparse
import os
import pathlib
import signal
import sys
from typing import Any

from . import __version__

DEFAULT_SHAPE = {"heads": 16, "kv_heads": 2, "head_dim": 256}


def path_entry() -> str:
    """The PYTHONPATH entry that holds `sitecustomize`: the checkout, or a folder inside an installed package."""
    package = pathlib.Path(__file__).resolve().parent
    preload = package / "preload"
    return str(preload if preload.is_dir() else package.parent)


def run(command: list[str]) -> int:
    """Replace this process by `command`, activated. Returns 127 or 126 where it cannot be started."""
    old, ours = os.environ.get("PYTHONPATH"), path_entry()
    # An empty entry is the working directory, and stays. Ours goes to the front, where no other sitecustomize hides it.
    entries = [e for e in old.split(os.pathsep) if not e or os.path.realpath(e) != ours] if old else []
    entries.insert(0, ours)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entries)}
    try:
        os.execvpe(command[0], command, environment)
    except (OSError, ValueError) as error:
        print(f"sglang-aiter-ext run: {command[0]}: {getattr(error, 'strerror', error)}", file=sys.stderr)
        return 127 if isinstance(error, (FileNotFoundError, ValueError)) else 126


def examine(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the doctor's report; the exit status is its own."""
    import json

    from . import doctor

    try:
        report: Any
        if options.running is not None:
            report, skipped = doctor.running(options.running)
            text, status = doctor.running_text(report, skipped, options.running), doctor.running_status(report)
        else:
            report = doctor.examine(options.sglang_path)
            text, status = doctor.text(report), doctor.exit_status(report)
    except FileNotFoundError as error:
        parser.error(str(error))
    print(json.dumps(report, indent=2) if options.json else text)
    return status


def selftest(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run AITER's kernels; the exit status is 0, or 1 where an answer is no."""
    try:
        from . import selftest

        shape = {name: getattr(options, name) for name in ("heads", "kv_heads", "head_dim")}
        if options.preset is None and options.tp is not None:
            parser.error(f"--tp {options.tp}: goes with --preset; else give --heads and --kv-heads of one GPU")
        if options.preset is not None:
            given = [f"--{name.replace('_', '-')}" for name, value in shape.items() if value is not None]
            if given:
                parser.error(f"{given[0]}: --preset {options.preset} says that already")
            heads, kv_heads, head_dim = selftest.preset(options.preset, 1 if options.tp is None else options.tp)
        else:
            heads, kv_heads, head_dim = (shape[n] if shape[n] is not None else d for n, d in DEFAULT_SHAPE.items())
        # A stand-in of plain PyTorch writes out all scores of a chunk.
        tokens = options.tokens if options.tokens is not None else 5_000 if options.reference else 70_000
        chunk = options.chunk if options.chunk is not None else min(tokens, 256 if options.reference else 16_384)
        shapes = selftest.Shapes(heads, kv_heads, head_dim, tokens, options.page_size, chunk)
        bench = selftest.prepare(shapes, options.reference)
    except (ImportError, LookupError, ValueError) as error:
        parser.error(str(error))
    return selftest.run(bench)


def main(arguments: list[str] | None = None) -> int:
    """The exit status of the command: 2 for options it does not take, 130 after Ctrl-C."""
    # As a program in C has them, and `run` hands them on: Python ignores both.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    reconfigure: Any = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    try:
        status = command_line(arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("\nsglang-aiter-ext: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"sglang-aiter-ext: {error}", file=sys.stderr)
        return 1


def command_line(arguments: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="sglang-aiter-ext", description="AITER fast paths for an unmodified SGLang")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="run a command with the extension active: run -- CMD ...")
    runner.add_argument("cmd", nargs=argparse.REMAINDER, metavar="-- CMD ...")
    doctor = commands.add_parser("doctor", help="what is installed, and what each capability makes of it")
    what = doctor.add_mutually_exclusive_group()
    what.add_argument("--sglang-path", metavar="DIR", help="an unpacked SGLang instead of the one this Python imports")
    what.add_argument("--running", metavar="DIR", help="the processes of a server with SGLANG_AITER_EXT_STATE_DIR=DIR")
    doctor.add_argument("--json", action="store_true", help="for programs")
    tester = commands.add_parser("selftest", help="AITER's kernels on this GPU against float32 attention")
    tester.add_argument("--preset", metavar="MODEL", help="heads and head_dim of a model: Qwen3.5-397B-A17B")
    tester.add_argument("--tp", type=int, metavar="N", help="GPUs that share the preset's heads (1)")
    tester.add_argument("--heads", type=int, metavar="N", help="query heads on one GPU (16)")
    tester.add_argument("--kv-heads", type=int, metavar="N", help="KV heads on one GPU (2)")
    tester.add_argument("--head-dim", type=int, metavar="N", help="(256)")
    tester.add_argument("--tokens", type=int, metavar="N", help="of the request (70000; 5000 with --reference)")
    tester.add_argument("--chunk", type=int, metavar="N", help="of them in the chunk (16384; 256 with --reference)")
    tester.add_argument("--page-size", type=int, default=16, metavar="N", help="(16)")
    tester.add_argument(
        "--reference", action="store_true", help="on a PyTorch stand-in of AITER, with or without a GPU"
    )
    commands.add_parser("path", help="print the PYTHONPATH entry that activates the extension")
    options = parser.parse_args(arguments)
    if options.command == "path":
        print(path_entry())
        return 0
    if options.command == "doctor":
        return examine(options, doctor)
    if options.command == "selftest":
        return selftest(options, tester)
    command = options.cmd[1:] if options.cmd[:1] == ["--"] else options.cmd
    if not command:
        parser.error("run needs a command, as in: run -- python -m sglang.launch_server ...")
    return run(command)


if __name__ == "__main__":
    sys.exit(main())
