"""`python -m bench [CASE ...] [--out DIR]`: every measurement of this project, checked before it is timed.

Cases: gather, batch (both need a GPU), host, startup. Without names all of them run, and what
this machine lacks is said and skipped. Prints Markdown; with --out also writes results.json and,
where matplotlib is installed, gather.png.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
CASES = {"gather": "gpu", "batch": "gpu", "host": "cpu", "startup": "cpu"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__.splitlines()[0])
    parser.add_argument("case", nargs="*", help=f"any of {', '.join(CASES)} (default: all)")
    parser.add_argument("--out", type=pathlib.Path, help="folder for results.json and gather.png")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds")
    options = parser.parse_args()
    unknown = [name for name in options.case if name not in CASES]
    if unknown:
        parser.error(f"{unknown[0]!r} is not a case: use any of {', '.join(CASES)}")
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kit")]
    results = {}
    for name in options.case or CASES:
        module = importlib.import_module(f"bench.{CASES[name]}")
        lacking = module.lacks(name)
        if lacking:
            print(f"## {name}\n\nskipped: {lacking}\n")
            continue
        results[name] = getattr(module, name)(quick=options.quick)
        print(f"## {name}\n\n{module.markdown(name, results[name])}\n", flush=True)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "results.json").write_text(json.dumps(results, indent=1))
        if "gather" in results:
            from bench import plot

            print(plot.gather(results["gather"], options.out / "gather.png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
