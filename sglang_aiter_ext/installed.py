"""What is installed: SGLang's source, read with `ast` and never imported, and AITER's kernels."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import pathlib
import re
import sys
from collections.abc import Iterator


class Release:
    """One SGLang source tree. Reads files, imports nothing.

    `root` is the folder `sglang` itself, as it lies in site-packages.
    """

    def __init__(self, root: pathlib.Path):
        self.root = root

    @functools.cached_property
    def version(self) -> str | None:
        """For people to read: no verdict depends on it."""
        for name in ("_version.py", "version.py"):
            path = self.root / name
            if path.is_file() and (
                found := re.search(
                    r"^(?:\w+ = )?_*version_*(?:: str)? = ['\"]([^'\"]+)", path.read_text(errors="replace"), re.M
                )
            ):
                return found[1]
        return None

    def source(self, module: str) -> Source | None:
        """The parsed module `module`, dotted and without the leading `sglang.`; None where there is none."""
        return self._sources(module)

    def function(self, module: str, dotted: str) -> ast.FunctionDef:
        """The function or method `name` or `Class.name` of `module`. Raises LookupError where there is none."""
        source = self.source(module)
        if source is None:
            raise LookupError(f"the release has no module sglang.{module}")
        function = source.function(dotted)
        if function is None:
            raise LookupError(f"sglang.{module} has no {dotted}")
        return function

    @functools.cache  # noqa: B019 - a Release lives as long as the process
    def _sources(self, module: str) -> Source | None:
        base = self.root.joinpath(*module.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return Source(path)
        return None


class Source:
    """One parsed Python file."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))

    def function(self, dotted: str) -> ast.FunctionDef | None:
        """The function or method called `name` or `Class.name`, or None."""
        scope: ast.AST = self.tree
        for part in dotted.split("."):
            scope = next(
                (
                    node
                    # The last of two of that name, as Python has it.
                    for node in reversed(list(ast.iter_child_nodes(scope)))
                    if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == part
                ),
                None,
            )  # type: ignore[assignment]
            if scope is None:
                return None
        return scope if isinstance(scope, ast.FunctionDef) else None

    def optional_imports(self, package: str) -> list[tuple[str, str]]:
        """(module, name) of each `from ... import name` in the `try` statements that import `package`, in order."""
        found = []
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Try):
                names = [
                    ("." * n.level + (n.module or ""), alias.asname or alias.name)
                    for n in node.body
                    if isinstance(n, ast.ImportFrom)
                    for alias in n.names
                ]
                if any(module.partition(".")[0] == package for module, _ in names):
                    found += names
        return found


def parameters(function: ast.FunctionDef) -> list[str]:
    """Names of the parameters, `self` left out, `**name` as it is written."""
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs) if a.arg != "self"]
    return names + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])


def calls(node: ast.AST, name: str) -> list[ast.Call]:
    """Calls of `name(...)` or `....name(...)` inside `node`, in the order of the source."""
    found = [
        call
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and name == getattr(call.func, "id", getattr(call.func, "attr", None))
    ]
    return sorted(found, key=lambda call: (call.lineno, call.col_offset))


def mentions(node: ast.AST, name: str) -> bool:
    """Whether `name` occurs inside `node` as a name, an attribute or a string."""
    return any(
        name in (getattr(n, "id", None), getattr(n, "attr", None), getattr(n, "value", None)) for n in ast.walk(node)
    )


def enclosing_tests(function: ast.AST, inner: ast.AST) -> Iterator[ast.expr]:
    """The conditions of each `if` whose body `inner` lies in."""
    for node in ast.walk(function):
        if isinstance(node, ast.If) and any(inner is n for statement in node.body for n in ast.walk(statement)):
            yield node.test


_releases: list[Release] = []


def release() -> Release | None:
    """The SGLang this Python would import, or None. Does not import it."""
    if not _releases:
        module = sys.modules.get("sglang")
        if module is not None:
            places = list(getattr(module, "__path__", []))
        else:
            spec = importlib.util.find_spec("sglang")
            places = list(spec.submodule_search_locations or []) if spec else []
        # None is not kept: a path may be added later.
        _releases.extend(Release(pathlib.Path(p)) for p in places[:1] if (pathlib.Path(p) / "srt").is_dir())
    return _releases[0] if _releases else None


#: Leading parameters, in order, of the AITER kernels whose calls this package makes or changes.
KERNEL_PARAMETERS = {
    "mha_batch_prefill_func": (
        "q", "k", "v", "cu_seqlens_q", "kv_indptr", "kv_page_indices", "max_seqlen_q", "max_seqlen_k",
    ),
    "flash_attn_varlen_fp8_pertensor_func": (
        "q", "k", "v", "q_descale", "k_descale", "v_descale", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q",
        "max_seqlen_k",
    ),
    "paged_attention_ragged": (
        "out", "workspace_buffer", "query", "key_cache", "value_cache", "scale", "kv_indptr", "kv_page_indices",
        "kv_last_page_lens", "block_size", "max_num_partitions", "alibi_slopes", "kv_cache_dtype",
        "kv_cache_layout", "logits_soft_cap", "k_scale", "v_scale",
    ),
}  # fmt: skip
#: Further parameters that are passed by name.
KERNEL_KEYWORDS = {
    "mha_batch_prefill_func": ("causal", "q_descale", "k_descale", "v_descale"),
    "flash_attn_varlen_fp8_pertensor_func": ("causal", "softmax_scale"),
    "paged_attention_ragged": (),
}


def aiter_problem(*kernels: str) -> str | None:
    """Why `aiter` cannot serve `kernels`, or None when it can. Imports AITER."""
    try:
        aiter = importlib.import_module("aiter")
    except Exception as error:
        return f"import aiter fails: {type(error).__name__}: {error}"
    if getattr(aiter, "__file__", None) is None:
        places = ", ".join(getattr(aiter, "__path__", []))
        return f"aiter at {places} is an empty namespace package, not AITER: a folder of that name is on sys.path"
    return next((problem for name in kernels if (problem := kernel_problem(aiter, name)) is not None), None)


def kernel_problem(aiter: object, name: str) -> str | None:
    """Why the kernel `name` of module `aiter` cannot be called as this package calls it, or None."""
    where = getattr(aiter, "__file__", "aiter")
    kernel = getattr(aiter, name, None)
    if kernel is None:
        return f"{where} lacks {name}"
    try:
        found = list(inspect.signature(kernel).parameters)
    except (TypeError, ValueError):
        return f"the parameters of {name} in {where} cannot be read"
    problem = parameter_problem(name, found)
    return problem and f"{where}: {problem}"


def parameter_problem(name: str, found: list[str]) -> str | None:
    """How the parameters `found` of the kernel `name` differ from those this package knows, or None."""
    for index, parameter in enumerate(KERNEL_PARAMETERS[name]):
        got = found[index] if index < len(found) else "nothing"
        if got != parameter:
            return f"{name} has parameter {index} {got!r} where {parameter!r} is expected"
    missing = [parameter for parameter in KERNEL_KEYWORDS[name] if parameter not in found]
    return f"{name} takes no {missing[0]!r}" if missing else None
