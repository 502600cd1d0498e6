"""`doctor`: what is installed, what each capability makes of it, and what is in effect.

Imports neither SGLang nor torch nor AITER.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import os
import pathlib
import sys
from typing import Any

from . import installed, settings
from .capability import APPLY, UNSUPPORTED
from .capabilities import CAPABILITIES

OK, PROBLEM, NO_SGLANG = 0, 1, 2


def examine(sglang_path: str | None = None) -> dict[str, Any]:
    """Everything `doctor` knows, as it is printed with `--json`.

    `sglang_path` is an unpacked release: the folder `sglang`, or the one it lies in. Without
    it, the SGLang that this Python would import. Raises FileNotFoundError for a path that
    holds no release.
    """
    release = installed.release() if sglang_path is None else unpacked(pathlib.Path(sglang_path))
    off = settings.disabled(tuple(c.name for c in CAPABILITIES))
    capabilities = []
    for capability in CAPABILITIES:
        verdict = capability.verdict(release)
        enabled, errors = capability.name not in off, []
        for setting in {settings.MASTER, capability.switch} - {None}:
            try:
                enabled = enabled and settings.boolean(setting)
            except settings.SettingError as error:
                enabled = False
                errors.append(str(error))
        switch = capability.switch.name if capability.switch else settings.DISABLE.name
        reason = "; ".join([verdict.reason, *errors])
        capabilities.append({
            "name": capability.name, "verdict": verdict.verdict, "reason": reason, "enabled": enabled, "switch": switch,
        })  # fmt: skip
    return {
        "sglang": None if release is None else {"version": release.version, "path": str(release.root)},
        "aiter": aiter(),
        "activation": activation(),
        "capabilities": capabilities,
    }


def exit_status(report: dict[str, Any]) -> int:
    """2 without SGLang, 1 where an enabled capability cannot be served, else 0."""
    if report["sglang"] is None:
        return NO_SGLANG
    kernels = {c.name: c.kernels for c in CAPABILITIES}
    for row in report["capabilities"]:
        unserved = row["verdict"] == APPLY and any(report["aiter"]["kernels"][k] for k in kernels[row["name"]])
        if row["enabled"] and (unserved or row["verdict"] == UNSUPPORTED):
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
    if spec is None or spec.origin is None:
        path = ", ".join(spec.submodule_search_locations or []) if spec else None
        reason = "an empty namespace package, not AITER: a folder of that name is on sys.path" if spec else "aiter is not installed for this Python"
        return {"usable": False, "path": path, "reason": reason, "kernels": dict.fromkeys(installed.KERNEL_PARAMETERS, reason)}
    package = pathlib.Path(spec.origin).parent
    files = (package / "ops/mha.py", package / "ops/attention.py", package / "__init__.py")
    sources = [installed.Source(path) for path in files if path.is_file()]
    kernels = {}
    for name in installed.KERNEL_PARAMETERS:
        function = next((f for s in sources if (f := s.function(name)) is not None), None)
        kernels[name] = f"lacks {name}" if function is None else installed.parameter_problem(name, installed.parameters(function))
    problems = [problem for problem in kernels.values() if problem is not None]
    reason = "; ".join(problems) or "its source has the kernels, with the parameters that are expected"
    return {"usable": not problems, "path": str(package), "reason": reason, "kernels": kernels}


def activation() -> dict[str, Any]:
    """Which routes would activate the extension in a process started like this one."""
    from .__main__ import path_entry

    entries = [os.path.realpath(e) for e in os.environ.get("PYTHONPATH", "").split(os.pathsep) if e]
    try:
        master, error = settings.boolean(settings.MASTER), None
    except settings.SettingError as problem:
        master, error = False, str(problem)
    return {
        "master": master,
        "error": error,
        "pythonpath": path_entry() in entries,
        "plugin": any(e.value == "sglang_aiter_ext:activate" for e in importlib.metadata.entry_points(group="sglang.srt.plugins")),
        "this_process": any(type(f).__name__ == "TargetFinder" for f in sys.meta_path),
    }


def text(report: dict[str, Any]) -> str:
    """The report as a table for people."""
    sglang, kernels, routes = report["sglang"], report["aiter"], report["activation"]
    lines = [
        f"SGLang      {sglang['version'] or 'version unknown'} at {sglang['path']}" if sglang else "SGLang      not installed for this Python",
        f"AITER       {'usable' if kernels['usable'] else 'not usable'}: {kernels['reason']}" + (f" ({kernels['path']})" if kernels["path"] else ""),
        "Activation  " + (routes["error"] or ("" if routes["master"] else f"off by {settings.MASTER.name}; ")
                          + f"PYTHONPATH {'yes' if routes['pythonpath'] else 'no'}, plugin {'yes' if routes['plugin'] else 'no'}"),
        "",
        f"{'capability':20} {'verdict':15} {'enabled':8} {'switch':34} reason",
    ]  # fmt: skip
    for row in report["capabilities"]:
        lines.append(f"{row['name']:20} {row['verdict']:15} {'yes' if row['enabled'] else 'no':8} {row['switch']:34} {row['reason']}")
    return "\n".join(lines)
