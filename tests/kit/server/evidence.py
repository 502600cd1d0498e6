#!/usr/bin/env python3
"""Whether the processes of a server decoded through AITER: evidence.py LOG [STATE_DIR] [--schedulers 1].

Reads the state files of SGLANG_AITER_EXT_STATE_DIR where there are any, else the server's log.
Exit status 1 names what is missing.
"""

import argparse
import json
import pathlib
import re
import sys

ROUTED = re.compile(r"decode_pa: full-attention layers: prefill on (\w+), decode on AiterAttnBackend")


def missing(log: str, states: list[dict], schedulers: int) -> list[str]:
    """What speaks against it: `log` is the server's, `states` the state files' contents."""
    if not states:
        found = ROUTED.findall(log)
        return [] if len(found) == schedulers else [f"{len(found)} of {schedulers} schedulers routed decode to AITER"]
    problems = []
    of_schedulers = [state for state in states if state["role"].startswith("scheduler")]
    if len(of_schedulers) != schedulers:
        problems.append(f"{len(of_schedulers)} schedulers of {schedulers} have a state file")
    for state in states:
        served = state["capabilities"]["decode_pa"]["state"]
        if state in of_schedulers and served != "active":
            problems.append(f"decode_pa is {served} in {state['role']}")
        if served == "failed":
            problems.append(f"decode_pa failed in {state['role']}: {state['capabilities']['decode_pa']['error']}")
        counts = state["counters"].get("decode_pa", {})
        if state in of_schedulers and not counts.get("capture", 0) + counts.get("decode", 0):
            problems.append(f"no decode call in {state['role']}")
    return problems


def read(folder: str | None) -> list[dict]:
    return [json.loads(path.read_text()) for path in pathlib.Path(folder).glob("*.json")] if folder else []


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log")
    parser.add_argument("state_dir", nargs="?")
    parser.add_argument("--schedulers", type=int, default=1)
    options = parser.parse_args()
    problems = missing(pathlib.Path(options.log).read_text(), read(options.state_dir), options.schedulers)
    print("; ".join(problems) or "every scheduler decoded through AITER")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
