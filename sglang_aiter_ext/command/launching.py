"""`run -- CMD ...` and `path`: another program with the extension on its PYTHONPATH."""

import os
import pathlib
import sys


def path_entry() -> str:
    """The PYTHONPATH entry that holds `sitecustomize`: the checkout, or a folder inside an installed package."""
    package = pathlib.Path(__file__).resolve().parents[1]
    preload = package / "preload"
    return str(preload if preload.is_dir() else package.parent)


def launch(command: list[str]) -> int:
    """Replace this process by `command`, activated. Returns 127 or 126 where it cannot be started."""
    old, ours = os.environ.get("PYTHONPATH"), path_entry()
    # An empty entry is the working directory, and stays. Ours goes to the front, where no other sitecustomize hides it.
    entries = [e for e in old.split(os.pathsep) if not e or os.path.realpath(e) != ours] if old else []
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([ours, *entries])}
    try:
        os.execvpe(command[0], command, environment)
    except (OSError, ValueError) as error:
        print(f"sglang-aiter-ext run: {command[0]}: {getattr(error, 'strerror', error)}", file=sys.stderr)
        return 127 if isinstance(error, (FileNotFoundError, ValueError)) else 126
