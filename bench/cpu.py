"""What the extension costs a host: a wrapped call that declines at once, forward_decode, and start-up."""

from __future__ import annotations

import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]


def lacks(name: str) -> str | None:
    if name == "startup":
        return None
    import environment

    return (
        None
        if environment.place("sglang", environment.DEMO).is_dir()
        else "SGLang is not installed for the tests; run `make environment`"
    )


def where() -> dict:
    return {
        "cpu": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }


def host(quick: bool) -> dict:
    """Microseconds a call of each wrapper adds, around methods that do nothing, with SGLang's own layers."""
    import child
    import environment

    rows = child.launch(
        environment.DEMO, "overhead:wrappers", env=(("SGLANG_USE_AITER_PA", "1"),), level=child.NOTHING
    ).result
    return {"where": where(), "rows": rows}


def startup(quick: bool) -> dict:
    """Milliseconds of `python -c pass`: bare, with the extension on PYTHONPATH, and with `import wrapt`."""
    import child

    bare = child.clean_environment()
    with_us = {**bare, "PYTHONPATH": str(ROOT)}
    runs = {"bare": ("pass", bare), "with the extension": ("pass", with_us), "import wrapt": ("import wrapt", bare)}
    times: dict[str, list] = {name: [] for name in runs}
    for _ in range(20 if quick else 60):
        for name, (code, environment) in runs.items():
            began = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], env=environment, check=True)
            times[name].append((time.perf_counter() - began) * 1000)
    return {"where": where(), "rows": {name: statistics.median(values) for name, values in times.items()}}


def markdown(name: str, result: dict) -> str:
    at = result["where"]
    lines = [f"{at['cores']}-core {at['cpu']}, Python {at['python']}, {at['date']}.", ""]
    if name == "startup":
        bare = result["rows"]["bare"]
        lines += ["| `python -c pass` | ms | over bare |", "| --- | --: | --: |"]
        lines += [f"| {who} | {ms:.1f} | {ms - bare:.1f} |" for who, ms in result["rows"].items()]
    else:
        lines += ["| wrapper | µs a call | added |", "| --- | --: | --: |"]
        lines += [f"| {who} | {us:.2f} | {us - plain:.2f} |" for who, (us, plain) in result["rows"].items()]
    return "\n".join(lines)
