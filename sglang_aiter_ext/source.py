"""The source of the SGLang that is installed, read with `ast` and never imported."""

import ast
import functools
import importlib.util
import pathlib
import re
import sys
from collections.abc import Iterator

from .errors import Unsupported


class Source:
    """One parsed Python file."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))

    def function(self, dotted: str) -> ast.FunctionDef | None:
        """The function or method called `name` or `Class.name`, or None."""
        scope: ast.AST | None = self.tree
        for part in dotted.split("."):
            # Of two with one name the last one counts, as in Python.
            children = reversed(list(ast.iter_child_nodes(scope)))  # type: ignore[arg-type]
            named = (n for n in children if isinstance(n, (ast.FunctionDef, ast.ClassDef)) and n.name == part)
            scope = next(named, None)
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


class Release:
    """One SGLang source tree. It reads files and imports nothing.

    `root` is the folder `sglang` itself, as it lies in site-packages.
    """

    def __init__(self, root: pathlib.Path):
        self.root = root

    @functools.cached_property
    def version(self) -> str | None:
        """What the release calls itself. It is for people to read: no verdict depends on it."""
        pattern = re.compile(r"^(?:\w+ = )?_*version_*(?:: str)? = ['\"]([^'\"]+)", re.M)
        for name in ("_version.py", "version.py"):
            path = self.root / name
            if path.is_file() and (found := pattern.search(path.read_text(errors="replace"))):
                return found[1]
        return None

    @functools.cache  # noqa: B019 - a Release lives as long as the process
    def source(self, module: str) -> Source | None:
        """The parsed module `module`, such as `sglang.srt.plugins`; None where there is none."""
        base = self.root.joinpath(*module.split(".")[1:])
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if path.is_file():
                return Source(path)
        return None

    def function(self, module: str, dotted: str) -> ast.FunctionDef:
        """The function or method `name` or `Class.name` of `module`. Raises Unsupported where there is none."""
        source = self.source(module)
        if source is None:
            raise Unsupported(f"the release has no module {module}")
        function = source.function(dotted)
        if function is None:
            raise Unsupported(f"{module} has no {dotted}")
        return function


def parameters(function: ast.FunctionDef) -> list[str]:
    """The names of the parameters, without `self`, and `**name` as it is written."""
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs) if a.arg != "self"]
    return names + ([f"**{arguments.kwarg.arg}"] if arguments.kwarg else [])


def calls(node: ast.AST, name: str) -> list[ast.Call]:
    """The calls of `name(...)` or `....name(...)` inside `node`, in the order of the source."""
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
    """The condition of each `if` inside `function` whose body holds `inner`."""
    for node in ast.walk(function):
        if isinstance(node, ast.If) and any(inner is n for statement in node.body for n in ast.walk(statement)):
            yield node.test


_found: list[Release] = []


def installed() -> Release | None:
    """The SGLang that this Python would import, or None. It is not imported."""
    if not _found:
        module = sys.modules.get("sglang")
        if module is not None:
            places = list(getattr(module, "__path__", []))
        else:
            spec = importlib.util.find_spec("sglang")
            places = list(spec.submodule_search_locations or []) if spec else []
        # Where there is none, a later call looks again: a path may have been added.
        _found.extend(Release(pathlib.Path(p)) for p in places[:1] if (pathlib.Path(p) / "srt").is_dir())
    return _found[0] if _found else None
