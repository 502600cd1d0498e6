"""`doctor --running DIR`: what the processes of a server say of themselves in their state files."""

import json
import os
import pathlib
from typing import Any

from .. import settings
from ..capability import UNSUPPORTED
from ..publishing import KEPT, is_alive

#: What a state file of this package's holds.
HOLDS = {"pid", "host", "role", "began", "written", "capabilities", "counters"}


def processes(folder: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The state of every process that has a file in `folder`, each with `alive` and `file`, the oldest first.

    Then a line for each file that cannot be read or is not one of ours. Raises FileNotFoundError, with a
    hint, where the folder cannot be read.
    """
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        hint = f"use the folder that {settings.STATE.name} names in the server"
        raise FileNotFoundError(f"--running {folder}: {error.strerror}; {hint}") from None
    found, skipped = [], []
    for entry in entries:
        if not entry.name.endswith(".json") or not entry.is_file():
            continue
        try:
            # Between writing a shorter state and cutting the file, the rest of the last state is still there.
            state = json.JSONDecoder().raw_decode(pathlib.Path(entry.path).read_text())[0]
            alive = is_alive(pathlib.Path(entry.path))
        except FileNotFoundError:
            # Its process has just ended.
            continue
        except OSError as error:
            skipped.append(f"{entry.path} cannot be read: {error.strerror}")
            continue
        except (RecursionError, ValueError):
            state = None
        if _is_ours(state):
            found.append({**state, "alive": alive, "file": entry.path})
        else:
            skipped.append(f"{entry.path} is not a state file of this package's")
    return sorted(found, key=lambda state: state["began"]), skipped


def _is_ours(state: Any) -> bool:
    try:
        capabilities, counters = state["capabilities"].values(), state["counters"].values()
        whole = state.keys() >= HOLDS and isinstance(state["began"], float)
        words = [state["host"], state["role"], *(c["state"] for c in capabilities)]
        whole = whole and all(isinstance(word, str) for word in words)
        return whole and all(c.keys() >= set(KEPT) for c in capabilities) and all(isinstance(c, dict) for c in counters)
    except (AttributeError, LookupError, TypeError):
        return False


def troubled(capability: dict[str, Any]) -> bool:
    """Whether a capability of a running process failed, or is wanted and cannot be had: the report says why."""
    return capability["state"] == "failed" or bool(capability["enabled"] and capability["verdict"] == UNSUPPORTED)


def exit_status(found: list[dict[str, Any]]) -> int:
    """1 where no process lives, or one that does lacks a capability, and what is missing can be changed; else 0.

    It lacks one that failed, and one that the user turned on by its variable and that is unsupported.
    """
    alive = [c for process in found if process["alive"] for c in process["capabilities"].values()]
    lives = any(process["alive"] for process in found)
    return int(not lives or any(troubled(c) and (c["state"] == "failed" or c["asked_for"]) for c in alive))


def text(found: list[dict[str, Any]], skipped: list[str], folder: str) -> str:
    """The processes as a table for people, and a line for each thing that needs a word."""
    rows = [("pid", "host", "role", "process", "active", "pending", "failed", "counters")]
    notes = []
    for process in found:
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
    printed = [[printable(word) for word in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*printed)]
    lines = ["  ".join(word.ljust(width) for word, width in zip(row, widths)).rstrip() for row in printed]
    if not found:
        lines = [f"no process keeps a file in {folder}: nothing has imported SGLang with the extension on its path"]
    return "\n".join([*lines, *([""] if notes or skipped else []), *map(printable, [*notes, *skipped])])


def printable(word: str) -> str:
    """`word` without what would move the cursor of a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in word)
