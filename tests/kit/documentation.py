"""What the documents under docs/ take from the source: `python tests/kit/documentation.py` writes the generated tables."""

from __future__ import annotations

import ast
import re
import sys

import environment
import matrix

sys.path.insert(0, str(environment.ROOT))
from sglang_aiter_ext.capabilities import CAPABILITIES  # noqa: E402
from sglang_aiter_ext.settings import DISABLE, SETTINGS  # noqa: E402

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
        "wraps": ", ".join(wraps(c)),
        "AITER kernels it calls": ", ".join(f"`{kernel}`" for kernel in c.kernels) or "none",
        "upstream": ", ".join(f"[#{link.rsplit('/', 1)[1]}]({link})" for link in c.upstream),
        "not needed from": c.until,
        "switch": f"`{c.switch.name}`, {by_default} by default" if c.switch else f"on, but for `{DISABLE.name}`",
    }
    lines = [f"| {row} | {value} |" for row, value in rows.items()]
    return "\n".join(["", lines[0], "| --- | --- |", *lines[1:], "", ""])


def wraps(capability) -> list[str]:
    """What it wraps, as its wrappers say for each release; the releases are named where not all have it."""
    by_release = {version: capability.wraps(matrix.release(version)) for version in environment.RELEASES}
    applies = [version for version, names in by_release.items() if names]
    found = []
    for name in dict.fromkeys(name for names in by_release.values() for name in names):
        where = [version for version in applies if name in by_release[version]]
        found.append(f"`{name}`" + ("" if where == applies else f" ({where[0]} to {where[-1]})"))
    return found


def capabilities(text: str) -> str:
    """The page `text` with its generated tables as they should be."""
    return PLACE.sub(lambda found: found[1] + table(found[2]) + found[4], text)


def modules():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), ast.parse(path.read_text())


def imports() -> set[tuple[str, str]]:
    """(file, file) of each import of one file of the package in another, also inside of functions, without `.py`."""
    found = set()
    files = {path.removesuffix(".py").removesuffix("/__init__"): tree for path, tree in modules()}
    for importer, tree in files.items():
        inside = (PACKAGE / importer).is_dir() or importer == "__init__"
        folder = [] if importer == "__init__" else importer.split("/")[: None if inside else -1]
        for node in (n for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.level):
            base = folder[: len(folder) - node.level + 1] + (node.module.split(".") if node.module else [])
            for alias in node.names:
                whole = "/".join([*base, alias.name])
                found.add((importer, whole if whole in files else "/".join(base) or "__init__"))
    return found


def picture(page: str) -> tuple[dict[str, set[str]], set[tuple[str, str]]]:
    """The rooms of the last flowchart of `page` with their nodes, and its arrows from nodes or rooms to others."""
    rooms: dict[str, set[str]] = {}
    arrows = set()
    room = None
    for line in re.findall(r"^```mermaid\n(.*?)^```", page, re.M | re.S)[-1].splitlines()[1:]:
        line = re.sub(r'\[".*?"\]', "", line.strip())
        if line == "end":
            room = None
        elif line.startswith("subgraph "):
            room = rooms.setdefault(line.split()[1], set())
        elif "~~~" not in line:
            steps = [step.replace("&", " ").split() for step in line.split("-->")]
            arrows |= {(a, b) for before, after in zip(steps, steps[1:]) for a in before for b in after}
            if room is not None:
                room |= {name for step in steps for name in step}
    return rooms, arrows


def reasons(folder: str) -> set[str]:
    """The reasons that a capability counts and logs: the first argument of each `Decline` that its files make."""
    found = set()
    for path, tree in modules():
        for node in ast.walk(tree) if path.startswith(folder) else ():
            if isinstance(node, ast.Call) and getattr(node.func, "id", None) in ("Decline", "decline", "_failure"):
                found.add(getattr(node.args[0], "value", None))
    return {word for word in found if isinstance(word, str)}


#: Exceptions that a user may see, and functions that log.
SAID = ("DecodeError", "SettingError", "CouldNotApply", "UnusableAiter", "once", "when_configured", "_log")
#: What a message is called where it is put together first. The messages of declines are explained by their reasons.
CALLED = ("message", "problem", "needs", "lacks", "changes", "what", "hint", "failed")


def messages() -> set[str]:
    """The longest fixed piece of each log line, error and reason of the package (`..._problem`, `text = ...`)."""
    found: list[list[ast.AST]] = []
    for _, tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", "")) in SAID:
                found.append(list(node.args))
            elif isinstance(node, ast.FunctionDef) and node.name.endswith("_problem"):
                found += [[n.value] for n in ast.walk(node) if isinstance(n, ast.Return) and n.value]
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in CALLED:
                found.append([n for n in ast.walk(node.value) if isinstance(n, (ast.JoinedStr, ast.Constant))])
    pieces = (max((text for node in nodes for text in _fixed(node)), key=len, default="") for nodes in found)
    return {piece for piece in pieces if len(piece) > 8}


def _fixed(node: ast.AST) -> list[str]:
    whole = "".join(
        part.value if isinstance(part, ast.Constant) else "\0"
        for part in (node.values if isinstance(node, ast.JoinedStr) else [node])
        if not isinstance(part, ast.Constant) or isinstance(part.value, str)
    )
    return [piece.strip(" ,") for piece in re.split(r"\0|%\.?\d*[sdf]", whole)]


def switches() -> str:
    """The table of variables in README.md."""
    rows = ["| variable | default | what it switches |", "| --- | --- | --- |"]
    for setting in SETTINGS:
        default = {True: "on", False: "off", None: "none"}[setting.default]
        rows.append(f"| `{setting.name}` | {default} | {setting.meaning} |")
    return "\n".join(rows)


if __name__ == "__main__":
    CAPABILITIES_PAGE.write_text(capabilities(CAPABILITIES_PAGE.read_text()))
