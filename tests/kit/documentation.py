"""What the documents under docs/ take from the source: `python tests/kit/documentation.py` writes the generated tables."""

from __future__ import annotations

import ast
import re
import sys

import environment

sys.path.insert(0, str(environment.ROOT))
from sglang_aiter_ext.capabilities import CAPABILITIES  # noqa: E402
from sglang_aiter_ext.settings import DISABLE  # noqa: E402

PACKAGE = environment.ROOT / "sglang_aiter_ext"
CAPABILITIES_PAGE = environment.ROOT / "docs" / "capabilities.md"
#: The generated table of a capability lies between these.
PLACE = re.compile(r"(<!-- (\w+): written by tests/kit/documentation.py -->\n)(.*?)(<!-- end -->\n)", re.S)


def table(name: str) -> str:
    """What a `Capability` says of itself, as a table."""
    (c,) = (c for c in CAPABILITIES if c.name == name)
    by_default = "on" if c.switch and c.switch.default else "off"
    rows = {
        "what": c.summary,
        "why": c.why,
        "wraps": ", ".join(f"`{wrapped}`" for wrapped in c.wraps),
        "AITER kernels it calls": ", ".join(f"`{kernel}`" for kernel in c.kernels) or "none",
        "upstream": ", ".join(f"[#{link.rsplit('/', 1)[1]}]({link})" for link in c.upstream),
        "not needed from": c.until,
        "switch": f"`{c.switch.name}`, {by_default} by default" if c.switch else f"on, but for `{DISABLE.name}`",
    }
    lines = [f"| {row} | {value} |" for row, value in rows.items()]
    return "\n".join(["", lines[0], "| --- | --- |", *lines[1:], "", ""])


def capabilities(text: str) -> str:
    """The page `text` with its generated tables as they should be."""
    return PLACE.sub(lambda found: found[1] + table(found[2]) + found[4], text)


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


def reasons(module: str) -> set[str]:
    """The reasons that `module` counts and logs: the first word of each (reason, message, ...) it makes."""
    tree = dict(modules())[module]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Return, ast.Assign)) and isinstance(node.value, ast.Tuple):
            found.add(getattr(node.value.elts[0], "value", None))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("decline", "failure"):
            found.add(node.args[0].value)  # type: ignore[attr-defined]
    return {word for word in found if isinstance(word, str) and re.fullmatch(r"[a-z0-9_]+", word)}


#: Exceptions that a user may see.
RAISED = ("DecodeError", "SettingError", "CouldNotApply", "LookupError", "NothingToServe")
LOGS = ("log_once", "log_when_set_up", "log", "_report")


def messages() -> set[str]:
    """The longest fixed piece of each log line, error and reason for one (`..._problem`, `problem = ...`) of the package."""
    found = []
    for _, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in RAISED + LOGS:
                found.append(node.args)
            elif isinstance(node, ast.FunctionDef) and node.name.endswith("_problem"):
                found += [[n.value] for n in ast.walk(node) if isinstance(n, ast.Return) and n.value]
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "problem":
                found.append([part for part in ast.walk(node.value) if isinstance(part, ast.JoinedStr)])
    pieces = (max((text for node in nodes for text in _fixed(node)), key=len, default="") for nodes in found)
    return {piece for piece in pieces if len(piece) > 8}


def _fixed(node: ast.AST) -> list[str]:
    whole = "".join(
        part.value if isinstance(part, ast.Constant) else "\0"
        for part in (node.values if isinstance(node, ast.JoinedStr) else [node])
        if not isinstance(part, ast.Constant) or isinstance(part.value, str)
    )
    return [piece.strip(" ,") for piece in re.split(r"\0|%\.?\d*[sdf]", whole)]


if __name__ == "__main__":
    CAPABILITIES_PAGE.write_text(capabilities(CAPABILITIES_PAGE.read_text()))
