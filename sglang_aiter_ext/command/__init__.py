"""The command line: `sglang-aiter-ext doctor`, `selftest`, `run -- CMD ...` and `path`."""

import argparse
import json
import signal
import sys
from typing import Any

from ..names import VERSION
from .launching import launch, path_entry


def main(arguments: list[str] | None = None) -> int:
    """The exit status of the command: 2 for options that it does not take, and 130 after Ctrl-C."""
    # Python ignores both signals, and `run` would hand that on. A program in C starts with their defaults.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    reconfigure: Any = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")
    try:
        status = _answer(arguments)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print("\nsglang-aiter-ext: interrupted", file=sys.stderr)
        return 130
    except OSError as error:
        print(f"sglang-aiter-ext: {error}", file=sys.stderr)
        return 1


def _answer(arguments: list[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="sglang-aiter-ext", description="AITER fast paths for an unmodified SGLang")
    parser.add_argument("--version", action="version", version=VERSION)
    commands = parser.add_subparsers(dest="command", required=True)
    runner = commands.add_parser("run", help="run a command with the extension active: run -- CMD ...")
    runner.add_argument("cmd", nargs=argparse.REMAINDER, metavar="-- CMD ...")
    doctor = commands.add_parser("doctor", help="what is installed, and what each capability makes of it")
    what = doctor.add_mutually_exclusive_group()
    what.add_argument("--sglang-path", metavar="DIR", help="an unpacked SGLang instead of the one this Python imports")
    what.add_argument("--running", metavar="DIR", help="the processes of a server with SGLANG_AITER_EXT_STATE_DIR=DIR")
    doctor.add_argument("--arch", metavar="GFX", help="the GPU of another machine, such as gfx942")
    doctor.add_argument("--json", action="store_true", help="for programs")
    tester = commands.add_parser("selftest", help="AITER's kernels on this GPU against float32 attention")
    tester.add_argument("--preset", metavar="MODEL", help="heads and head_dim of a model: Qwen3.5-397B-A17B")
    for option, meaning in (
        ("--tp", "GPUs that share the preset's heads (1)"), ("--heads", "query heads on one GPU (16)"),
        ("--kv-heads", "KV heads on one GPU (2)"), ("--head-dim", "(256)"),
        ("--tokens", "of the request (70000; 5000 with --reference)"),
        ("--chunk", "of them in the chunk (16384; 256 with --reference)"),
    ):  # fmt: skip
        tester.add_argument(option, type=int, metavar="N", help=meaning)
    tester.add_argument("--page-size", type=int, default=16, metavar="N", help="(16)")
    tester.add_argument("--reference", action="store_true", help="on a PyTorch stand-in, with or without a GPU")
    commands.add_parser("path", help="print the PYTHONPATH entry that activates the extension")
    options = parser.parse_args(arguments)
    if options.command == "path":
        print(path_entry())
        return 0
    if options.command == "doctor":
        return _doctor(options, doctor)
    if options.command == "selftest":
        return _selftest(options, tester)
    command = options.cmd[1:] if options.cmd[:1] == ["--"] else options.cmd
    if not command:
        parser.error("run needs a command, as in: run -- python -m sglang.launch_server ...")
    return launch(command)


def _doctor(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from . import doctor, running

    found: Any
    try:
        if options.running is not None:
            found, skipped = running.processes(options.running)
            text, status = running.text(found, skipped, options.running), running.exit_status(found)
        else:
            found = doctor.report(options.sglang_path, options.arch)
            text, status = doctor.text(found), doctor.exit_status(found)
    except (FileNotFoundError, ValueError) as error:
        parser.error(str(error))
    print(json.dumps(found, indent=2) if options.json else text)
    return status


def _selftest(options: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from ..errors import UnusableAiter

    try:
        from . import selftest

        bench = selftest.prepare(selftest.shapes(options), options.reference)
    except (ImportError, UnusableAiter, ValueError) as error:
        parser.error(str(error))
    return selftest.run_all(bench)
