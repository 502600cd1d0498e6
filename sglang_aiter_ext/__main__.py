"""The command line: `sglang-aiter-ext doctor`, `selftest`, `run -- CMD ...` and `path`."""

from __future__ import annotations

import argparse
import os
import pathlib
import sys
from typing import Any

from . import __version__


def path_entry() -> str:
    """The PYTHONPATH entry that holds `sitecustomize`: the checkout, or a folder inside an installed package."""
    package = pathlib.Path(__file__).resolve().parent
    preload = package / "preload"
    return str(preload if preload.is_dir() else package.parent)


def run(command: list[str]) -> int:
    """Replace this process by `command`, activated. Returns 127 or 126 where it cannot be started."""
    old = os.environ.get("PYTHONPATH")
    # An empty entry is the working directory, and stays. Ours goes to the front, where no other sitecustomize hides it.
    entries = [entry for entry in old.split(os.pathsep) if entry != path_entry()] if old else []
    entries.insert(0, path_entry())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entries)}
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        print(f"sglang-aiter-ext run: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126


def examine(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print the doctor's report; the exit status is its own."""
    import json

    from . import doctor

    try:
        report: Any
        if options.running is not None:
            report = doctor.running(options.running)
            text, status = doctor.running_text(report, options.running), doctor.running_status(report)
        else:
            report = doctor.examine(options.sglang_path)
            text, status = doctor.text(report), doctor.exit_status(report)
    except FileNotFoundError as error:
        parser.error(str(error))
    print(json.dumps(report, indent=2) if options.json else text)
    return status


def selftest(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Run AITER's kernels; 130 where Ctrl-C ends it."""
    try:
        from . import selftest

        heads, kv_heads, head_dim = options.heads, options.kv_heads, options.head_dim
        if options.preset is not None:
            heads, kv_heads, head_dim = selftest.preset(options.preset, options.tp)
        # A stand-in of plain PyTorch writes out all scores of a chunk.
        tokens = options.tokens or (5_000 if options.reference else 70_000)
        chunk = options.chunk or min(tokens, 256 if options.reference else 16_384)
        shapes = selftest.Shapes(heads, kv_heads, head_dim, tokens, options.page_size, chunk)
        return selftest.run(shapes, options.reference)
    except KeyboardInterrupt:
        print("\nsglang-aiter-ext selftest: interrupted", file=sys.stderr)
        return 130
    except (ImportError, LookupError, OSError, ValueError) as error:
        parser.error(str(error))


def main(arguments: list[str] | None = None) -> int:
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
    tester.add_argument("--tp", type=int, default=1, metavar="N", help="GPUs that share the preset's heads (1)")
    tester.add_argument("--heads", type=int, default=16, metavar="N", help="query heads on one GPU (16)")
    tester.add_argument("--kv-heads", type=int, default=2, metavar="N", help="KV heads on one GPU (2)")
    tester.add_argument("--head-dim", type=int, default=256, metavar="N", help="(256)")
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
