"""The AITER that is installed, read from its files and never imported: its kernels' parameters, and its ASM kernel."""

import ast
import csv
import hashlib
import importlib.util
import os
import pathlib
from typing import Any

from .aiter_kernels import ASM_PREFILL, HEAD_DIM, PARAMETERS, parameter_problem
from .source import Source, parameters

#: Where AITER keeps its gfx950 attention kernels, below the folder that it calls its meta directory.
KERNELS = "hsa/gfx950/fmha_v3_fwd"
#: The rows of AITER's kernel table that a varlen call needs: (mask, mode), causal and, for one query a request, not.
ROWS = {("2", "1"): "causal", ("0", "1"): "non-causal"}
FIRST = "AITER v0.1.19 is the first release with it"
#: SHA-256 of a code object that computes wrong results -> what is wrong with it.
BAD_OBJECTS = {
    "95ef992a211ffeb2ae3dc9afa7ca87a9dcc59f85a9423d67e2e22b62d153eaba": "leaves rows of the result unwritten"
    " (ROCm/aiter#4682, in AITER's main branch from 2026-08-10 to 2026-08-12); AITER v0.1.20 has a right one",
}


def located() -> tuple[str | None, str | None]:
    """Where the AITER lies that this Python would import, and why that is no AITER; each may be None."""
    try:
        spec = importlib.util.find_spec("aiter")
    except ValueError as error:
        return None, f"aiter cannot be looked for: {error}"
    if spec is None:
        return None, "aiter is not installed for this Python"
    if spec.origin is None:
        places = ", ".join(spec.submodule_search_locations or [])
        return places, "an empty namespace package, not AITER: a folder of that name is on sys.path"
    return str(pathlib.Path(spec.origin).parent), None


def package() -> pathlib.Path | None:
    """The folder `aiter` that this Python would import, or None where there is no AITER."""
    place, problem = located()
    return pathlib.Path(str(place)) if problem is None else None


def on_path() -> dict[str, Any]:
    """What the source of the AITER on the path tells: `usable`, `path`, `reason`, and in `kernels` a problem of each."""
    place, reason = located()
    if reason is None:
        try:
            kernels = kernel_problems(pathlib.Path(str(place)))
        except (OSError, SyntaxError, ValueError) as error:
            reason = f"its source cannot be read: {error}"
        else:
            problems = [problem for problem in kernels.values() if problem is not None]
            reason = "; ".join(problems) or "its source has the kernels, with the parameters that are expected"
            return {"usable": not problems, "path": place, "reason": reason, "kernels": kernels}
    return {"usable": False, "path": place, "reason": reason, "kernels": dict.fromkeys(PARAMETERS, reason)}


def kernel_problems(folder: pathlib.Path) -> dict[str, str | None]:
    """Why each kernel cannot be called as this package calls it, or None. Raises OSError, SyntaxError or ValueError."""
    files = (folder / "ops/mha.py", folder / "ops/attention.py", folder / "__init__.py")
    sources = [Source(path) for path in files if path.is_file()]
    kernels = {}
    for name in PARAMETERS:
        function = next((f for s in sources if (f := s.function(name)) is not None), None)
        kernels[name] = f"lacks {name}" if function is None else parameter_problem(name, parameters(function))
    return kernels


def meta_folder(folder: pathlib.Path) -> pathlib.Path:
    """The folder that holds `csrc` and `hsa`, found as `aiter/jit/core.py` finds it."""
    root, mode = folder.parent, folder / "install_mode"
    in_place = not mode.is_file() or mode.read_text().strip() == "develop"
    chosen = pathlib.Path(os.environ.get("AITER_META_DIR") or (root if in_place else root / "aiter_meta"))
    return chosen if (chosen / "csrc").exists() else root


def asm_problem(folder: pathlib.Path) -> str | None:
    """Why this AITER does not serve head_dim 256 with its gfx950 fp8 ASM kernel, or None where it does.

    Three things are read: the condition in `ops/mha.py` that leads to the kernel, AITER's table of kernels,
    and the code objects that the table names.
    """
    try:
        return _asm_problem(folder)
    except (OSError, SyntaxError, ValueError, KeyError, csv.Error) as error:
        return (
            f"whether AITER at {folder} has the gfx950 fp8 ASM kernel cannot be read: {type(error).__name__}: {error}"
        )


def _asm_problem(folder: pathlib.Path) -> str | None:
    lacks = f"AITER at {folder} has no gfx950 fp8 ASM kernel for head_dim {HEAD_DIM}"
    forward = Source(folder / "ops/mha.py").function("_flash_attn_varlen_forward")
    gates = [n for n in ast.walk(forward or ast.Pass()) if getattr(n, "name", None) == "is_fmha_v3_fp8"]
    if len(gates) != 1:
        return f"{lacks}: {ASM_PREFILL} does not choose it in a way that is known here; {FIRST}"
    if f"hdim_q == {HEAD_DIM}" not in ast.unparse(gates[0]):
        return f"{lacks}: its ops/mha.py does not let that head_dim through; {FIRST}"
    kernels = meta_folder(folder) / KERNELS
    with open(kernels / "fmha_fwd.csv", newline="") as file:
        table = list(csv.DictReader(file))
    for (mask, mode), word in ROWS.items():
        want = {"dtype": "fp8bf16", "hdim_q": str(HEAD_DIM), "hdim_v": str(HEAD_DIM), "mask": mask, "mode": mode}
        rows = [row for row in table if want.items() <= row.items()]
        if not rows:
            return f"{lacks}: {kernels / 'fmha_fwd.csv'} lists no {word} one for varlen batches; {FIRST}"
        for row in rows:
            path = kernels / row["co_name"]
            if not path.is_file():
                return f"{lacks}: {path} is missing"
            if (fault := BAD_OBJECTS.get(hashlib.sha256(path.read_bytes()).hexdigest())) is not None:
                return f"AITER's code object {path} {fault}"
    return None
