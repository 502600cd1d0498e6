"""`doctor`: what is installed, what each capability makes of it, and what is in effect.

Imports neither SGLang nor torch nor AITER.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import pathlib
from typing import Any

from . import bootstrap, installed, settings
from .activation import evaluate
from .capabilities import CAPABILITIES
from .capability import APPLY, UNSUPPORTED

OK, PROBLEM, NO_SGLANG = 0, 1, 2
PLUGIN = "sglang_aiter_ext:activate"


def examine(sglang_path: str | None = None) -> dict[str, Any]:
    """Everything `doctor` knows, as it is printed with `--json`.

    `sglang_path` is an unpacked release: the folder `sglang`, or the one it lies in. Without
    it, the SGLang that this Python would import. Raises FileNotFoundError for a path that
    holds no release.
    """
    release = installed.release() if sglang_path is None else unpacked(pathlib.Path(sglang_path))
    capabilities = [
        {
            "name": state.capability.name,
            "verdict": state.verdict.verdict,
            "reason": "; ".join(filter(None, (state.verdict.reason, state.error))),
            "enabled": state.enabled,
            "switch": state.switch,
        }
        for state in evaluate(release).values()
    ]
    return {
        "sglang": None if release is None else {"version": release.version, "path": str(release.root)},
        "aiter": aiter(),
        "wrapt": importlib.util.find_spec("wrapt") is not None,
        "activation": activation(release),
        "capabilities": capabilities,
    }


def exit_status(report: dict[str, Any]) -> int:
    """2 without SGLang, 1 where an enabled capability cannot be wrapped or served or a variable not be read, else 0."""
    if report["sglang"] is None:
        return NO_SGLANG
    if report["activation"]["errors"]:
        return PROBLEM
    kernels = {c.name: c.kernels for c in CAPABILITIES}
    for row in report["capabilities"]:
        missing = not report["wrapt"] or any(report["aiter"]["kernels"][k] for k in kernels[row["name"]])
        if row["enabled"] and (row["verdict"] == UNSUPPORTED or (row["verdict"] == APPLY and missing)):
            return PROBLEM
    return OK


def unpacked(path: pathlib.Path) -> installed.Release:
    for root in (path, path / "sglang"):
        if (root / "srt").is_dir():
            return installed.Release(root.resolve())
    raise FileNotFoundError(f"--sglang-path {path}: no SGLang there; give the folder `sglang`, or the one it lies in")


def aiter() -> dict[str, Any]:
    """Whether the AITER on the path has the kernels, as far as its source tells; `kernels` says it of each."""
    spec = importlib.util.find_spec("aiter")
    if spec is None:
        return _unusable(None, "aiter is not installed for this Python")
    if spec.origin is None:
        path = ", ".join(spec.submodule_search_locations or [])
        return _unusable(path, "an empty namespace package, not AITER: a folder of that name is on sys.path")
    package = pathlib.Path(spec.origin).parent
    try:
        return {"path": str(package), **_kernels(package)}
    except (OSError, SyntaxError, ValueError) as error:
        return _unusable(str(package), f"its source cannot be read: {error}")


def _unusable(path: str | None, reason: str) -> dict[str, Any]:
    kernels = dict.fromkeys(installed.KERNEL_PARAMETERS, reason)
    return {"usable": False, "path": path, "reason": reason, "kernels": kernels}


def _kernels(package: pathlib.Path) -> dict[str, Any]:
    files = (package / "ops/mha.py", package / "ops/attention.py", package / "__init__.py")
    sources = [installed.Source(path) for path in files if path.is_file()]
    kernels = {}
    for name in installed.KERNEL_PARAMETERS:
        function = next((f for s in sources if (f := s.function(name)) is not None), None)
        kernels[name] = (
            f"lacks {name}" if function is None else installed.parameter_problem(name, installed.parameters(function))
        )
    problems = [problem for problem in kernels.values() if problem is not None]
    reason = "; ".join(problems) or "its source has the kernels, with the parameters that are expected"
    return {"usable": not problems, "reason": reason, "kernels": kernels}


def _plugin(release: installed.Release | None) -> bool:
    """Whether SGLang's plugin loader would activate the extension."""
    found = [p for p in importlib.metadata.entry_points(group="sglang.srt.plugins") if p.value == PLUGIN]
    allowed = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    has_loader = release is not None and release.source("srt.plugins") is not None
    return has_loader and any(not allowed or p.name in allowed for p in found)


def activation(release: installed.Release | None) -> dict[str, Any]:
    """Which routes would activate the extension in a process started like this one."""
    from .__main__ import path_entry

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


def text(report: dict[str, Any]) -> str:
    """The report as a table for people."""
    sglang, kernels, routes = report["sglang"], report["aiter"], report["activation"]
    errors = routes["errors"] + (
        [] if report["wrapt"] else ["wrapt is not installed for this Python; nothing can be wrapped"]
    )
    yes = {True: "yes", False: "no"}
    route = f"PYTHONPATH {yes[routes['pythonpath']]}, plugin {yes[routes['plugin']]}, this process {yes[routes['this_process']]}"
    if routes["hidden_by"]:
        route += f"; {routes['hidden_by']} comes first on PYTHONPATH and hides ours unless it runs the next one"
    lines = [
        f"SGLang      {sglang['version'] or 'version unknown'} at {sglang['path']}"
        if sglang
        else "SGLang      not installed for this Python",
        f"AITER       {'usable' if kernels['usable'] else 'not usable'}: {kernels['reason']}"
        + (f" ({kernels['path']})" if kernels["path"] else ""),
        f"Activation  {'' if routes['master'] else 'off by ' + settings.MASTER.name + '; '}{route}",
        *(f"Error       {error}" for error in errors),
        "",
        f"{'capability':20} {'verdict':15} {'enabled':8} {'switch':34} reason",
    ]
    for row in report["capabilities"]:
        lines.append(
            f"{row['name']:20} {row['verdict']:15} {'yes' if row['enabled'] else 'no':8} {row['switch']:34} {row['reason']}"
        )
    return "\n".join(lines)


def running(folder: str) -> tuple[list[dict[str, Any]], list[str]]:
    """See `publishing.read`. Raises FileNotFoundError, with a hint, where the folder cannot be read."""
    from . import publishing

    try:
        return publishing.read(folder)
    except OSError as error:
        hint = f"use the folder that {settings.STATE.name} names in the server"
        raise FileNotFoundError(f"--running {folder}: {error.strerror}; {hint}") from None


def troubled(capability: dict[str, Any]) -> bool:
    """Whether a capability of a running process failed, or is wanted and cannot be had."""
    return capability["state"] == "failed" or bool(capability["enabled"] and capability["verdict"] == UNSUPPORTED)


def running_status(processes: list[dict[str, Any]]) -> int:
    """1 where no process lives, or one that does has a capability that failed or is unsupported; else 0."""
    alive = [process for process in processes if process["alive"]]
    bad = any(troubled(capability) for process in alive for capability in process["capabilities"].values())
    return PROBLEM if bad or not alive else OK


def running_text(processes: list[dict[str, Any]], skipped: list[str], folder: str) -> str:
    """The processes as a table for people, and lines for what needs a word."""
    rows = [("pid", "host", "role", "process", "active", "pending", "failed", "counters")]
    notes = []
    for process in processes:
        by_state: dict[str, list[str]] = {}
        for name, capability in process["capabilities"].items():
            by_state.setdefault(capability["state"], []).append(name)
            if troubled(capability):
                why = capability["error"] or f"{capability['verdict']}: {capability['reason']}"
                notes.append(f"{process['pid']} {name}: {why}")
        counts = [f"{name} {what} {n}" for name, counts in process["counters"].items() for what, n in counts.items()]
        if not process["alive"]:
            notes.append(f"{process['pid']} ended without removing {process['file']}")
        states = (", ".join(by_state.get(state, ())) or "-" for state in ("active", "pending", "failed"))
        who = (str(process["pid"]), process["host"], process["role"], "running" if process["alive"] else "stale")
        rows.append((*who, *states, ", ".join(counts) or "-"))
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip() for row in rows]
    if not processes:
        lines = [f"no process keeps a file in {folder}: nothing has imported SGLang with the extension on its path"]
    return "\n".join([*lines, *([""] if notes or skipped else []), *notes, *skipped])
