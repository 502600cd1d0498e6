"""The command line: `sglang-aiter-ext doctor`, `run -- CMD ...` and `path`."""

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
    commands.add_parser("path", help="print the PYTHONPATH entry that activates the extension")
    options = parser.parse_args(arguments)
    if options.command == "path":
        print(path_entry())
        return 0
    if options.command == "doctor":
        return examine(options, doctor)
    command = options.cmd[1:] if options.cmd[:1] == ["--"] else options.cmd
    if not command:
        parser.error("run needs a command, as in: run -- python -m sglang.launch_server ...")
    return run(command)


if __name__ == "__main__":
    sys.exit(main())
