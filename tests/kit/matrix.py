"""The verdicts of every release, as the Markdown table of README.md: `python tests/kit/matrix.py`."""

from __future__ import annotations

import pathlib
import sys

import environment

sys.path.insert(0, str(environment.ROOT))
from sglang_aiter_ext.capabilities import CAPABILITIES  # noqa: E402
from sglang_aiter_ext.source import Release  # noqa: E402


def release(version: str) -> Release:
    return Release(environment.place("sglang", version) / "sglang")


def verdicts(version: str) -> dict[str, tuple[str, str]]:
    one = release(version)
    return {c.name: tuple(c.verdict(one)) for c in CAPABILITIES}


def table(versions=environment.RELEASES) -> str:
    """Releases in a row have the same verdicts: one line for each run of them."""
    names = [c.name for c in CAPABILITIES]
    lines = ["| SGLang | " + " | ".join(f"`{name}`" for name in names) + " |", "| --- " * (len(names) + 1) + "|"]
    runs: list[tuple[list[str], list[str]]] = []
    for version in versions:
        words = [verdict for verdict, _ in verdicts(version).values()]
        if runs and runs[-1][1] == words:
            runs[-1][0].append(version)
        else:
            runs.append(([version], words))
    for run, words in runs:
        name = run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}"
        lines.append(f"| {name} | " + " | ".join(words) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    missing = [v for v in environment.RELEASES if not pathlib.Path(environment.place("sglang", v)).is_dir()]
    if missing:
        sys.exit(f"not installed: {', '.join(missing)}; run `make environment` first")
    print(table())
