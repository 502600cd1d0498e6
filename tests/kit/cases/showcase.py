"""What `make demo` runs in each of its two processes."""

from __future__ import annotations

import collections
import hashlib

from recording import Trace, digest, harness

CHUNKS = ({1: 40, 2: 33, 3: 16}, {1: 40, 2: 20, 3: 1}, {1: 24, 2: 35, 4: 28})
STEPS = ([1, 2, 3, 4], [1, 2, 3, 4], [4, 2])


def run() -> dict:
    """Chunked prefill and decode steps of a hybrid model, on the AITER backend and on Triton."""
    rows = []
    for backend in ("aiter", "triton"):
        scaled = {"k_scale": 0.5, "v_scale": 2.0}
        stack = harness.Stack(backend=backend, layers=4, full_interval=2, page_size=16, linear=True, **scaled)
        for phase, batches in (("prefill", CHUNKS), ("decode", STEPS)):
            kernels, outputs, linear, errors, exact = collections.Counter(), [], [], [], []
            for batch in batches:
                with Trace() as trace:
                    result = stack.extend(batch) if phase == "prefill" else stack.decode(batch)
                kernels.update(trace.kernels)
                outputs += [digest(x) for x in result.outputs.values()]
                linear += [digest(x) for x in result.linear.values()]
                errors.append(result.error())
                exact.append(result.error(fp8_queries=phase == "prefill"))
            rows.append({
                "backend": backend, "phase": phase, "kernels": kernels, "outputs": outputs, "linear": linear,
                "error": max(errors), "exact_error": max(exact), "pool": hashlib.sha256(stack.pool_bytes()).hexdigest(),
            })  # fmt: skip
    try:
        import sglang_aiter_ext
    except ImportError:
        return {"rows": rows}
    return {"rows": rows, "status": sglang_aiter_ext.status(), "counters": sglang_aiter_ext.counters()}
