"""`doctor`: what is installed, what each capability makes of it, and which activation routes are in effect.

It imports neither SGLang nor torch nor AITER.
"""

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import pathlib
import re
from typing import Any

from .. import aiter_installed, bootstrap, gpu, settings, source
from ..activation import evaluate
from ..capabilities import CAPABILITIES
from ..capability import APPLY, UNSUPPORTED
from ..source import Release
from .launching import path_entry

OK, PROBLEM, NO_SGLANG = 0, 1, 2
PLUGIN = "sglang_aiter_ext:activate"


def report(sglang_path: str | None = None, arch: str | None = None) -> dict[str, Any]:
    """Everything `doctor` knows, as it is printed with `--json`.

    `sglang_path` is an unpacked release: the folder `sglang`, or the one it lies in. Without
    it, the SGLang that this Python would import. `arch` is the GPU of another machine, such as gfx942. Raises
    FileNotFoundError for a path that holds no release, and ValueError for an `arch` that is none.
    """
    if arch is not None and not re.fullmatch("gfx[0-9a-f]{3,5}", arch):
        raise ValueError(f"--arch {arch}: use the name of an AMD GPU architecture, such as gfx942 or gfx950")
    gpus = gpu.architectures() if arch is None else (arch,)
    release = source.installed() if sglang_path is None else unpacked(pathlib.Path(sglang_path))
    rows = [state.row() for state in evaluate(release, gpus).values()]
    for row in rows:
        row["reason"] = "; ".join(filter(None, (row["reason"], row.pop("error"))))
        # No process runs here, so there is no state.
        del row["state"]
    return {
        "sglang": None if release is None else {"version": release.version, "path": str(release.root)},
        "gpus": list(gpus), "aiter": aiter_installed.on_path(), "atom": atom(),
        "wrapt": importlib.util.find_spec("wrapt") is not None,
        "activation": activation(release), "capabilities": rows,
    }  # fmt: skip


def exit_status(found: dict[str, Any]) -> int:
    """2 without SGLang, 1 where something stands in the way that the user can change, else 0.

    That is a variable that cannot be read, a capability that applies and that wrapt or AITER is missing for, and one
    that the user turned on by its variable and that is unsupported.
    """
    if found["sglang"] is None:
        return NO_SGLANG
    if found["activation"]["errors"]:
        return PROBLEM
    by_name = {c.name: c for c in CAPABILITIES}
    for row in found["capabilities"]:
        capability = by_name[row["name"]]
        missing = not found["wrapt"] or any(found["aiter"]["kernels"][k] for k in capability.kernels)
        missing = missing or not row["wraps"]
        unsupported = row["verdict"] == UNSUPPORTED and row["asked_for"]
        if row["enabled"] and (unsupported or (row["verdict"] == APPLY and missing)):
            return PROBLEM
    return OK


def unpacked(path: pathlib.Path) -> Release:
    for root in (path, path / "sglang"):
        if (root / "srt").is_dir():
            return Release(root.resolve())
    raise FileNotFoundError(f"--sglang-path {path}: no SGLang there; give the folder `sglang`, or the one it lies in")


def atom() -> str | None:
    """Where AMD's ATOM is, which can give SGLang models with attention of their own; None where it is not."""
    spec = importlib.util.find_spec("atom")
    place = pathlib.Path(spec.origin).parent if spec is not None and spec.origin else None
    # PyPI has another package of that name, which has no plugins for servers.
    return str(place) if place is not None and (place / "plugin").is_dir() else None


def _plugin(release: Release | None) -> bool:
    """Whether SGLang's plugin loader would activate the extension."""
    found = [p for p in importlib.metadata.entry_points(group="sglang.srt.plugins") if p.value == PLUGIN]
    allowed = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    has_loader = release is not None and release.source("sglang.srt.plugins") is not None
    return has_loader and any(not allowed or p.name in allowed for p in found)


def activation(release: Release | None) -> dict[str, Any]:
    """Which routes would activate the extension in a process started like this one."""
    errors = settings.errors(tuple(c.name for c in CAPABILITIES))
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.environ.get("PYTHONPATH") else []
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", entries) if entries else None
    first = str(pathlib.Path(spec.origin).resolve()) if spec is not None and spec.origin else None
    ours = str(pathlib.Path(path_entry(), "sitecustomize", "__init__.py").resolve())
    present = os.path.realpath(path_entry()) in map(os.path.realpath, entries)
    return {
        "master": settings.is_on(settings.MASTER),
        "errors": [str(error) for error in errors.values()],
        "pythonpath": first == ours,
        "hidden_by": first if present and first != ours else None,
        "plugin": _plugin(release),
        "this_process": bootstrap.waiting(),
    }


def text(found: dict[str, Any]) -> str:
    """The report as a table for people."""
    sglang, kernels, routes, yes = found["sglang"], found["aiter"], found["activation"], ("no", "yes")
    errors = [*routes["errors"]]
    if not found["wrapt"]:
        errors.append("wrapt is not installed for this Python; nothing can be wrapped")
    route = "" if routes["master"] else f"off by {settings.MASTER.name}; "
    names = {"pythonpath": "PYTHONPATH", "plugin": "plugin", "this_process": "this process"}
    route += ", ".join(f"{name} {yes[routes[key]]}" for key, name in names.items())
    if routes["hidden_by"]:
        route += f"; {routes['hidden_by']} comes first on PYTHONPATH and hides ours unless it runs the next one"
    release = (
        f"{sglang['version'] or 'version unknown'} at {sglang['path']}" if sglang else "not installed for this Python"
    )
    place = f" ({kernels['path']})" if kernels["path"] else ""
    atom = f"{found['atom']} can replace SGLang's models; the attention of such a model is not SGLang's, or ours"
    lines = [
        f"SGLang      {release}",
        f"GPU         {', '.join(found['gpus']) or 'no AMD GPU is visible here; --arch gfx950 asks for another machine'}",
        f"AITER       {'usable' if kernels['usable'] else 'not usable'}: {kernels['reason']}{place}",
        *([f"ATOM        {atom}"] if found["atom"] else []),
        f"Activation  {route}",
        *(f"Error       {error}" for error in errors),
        "",
        f"{'capability':20} {'verdict':15} {'enabled':8} {'switch':34} reason",
    ]
    for row in found["capabilities"]:
        lines.append("{name:20} {verdict:15} {on:8} {switch:34} {reason}".format(**row, on=yes[row["enabled"]]))
    lines += ["", *(f"{row['name']} wraps {', '.join(row['wraps'])}" for row in found["capabilities"] if row["wraps"])]
    return "\n".join(lines).rstrip()
