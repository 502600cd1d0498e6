"""The main job on real SGLang code: `make demo`.

Two child processes run the same batches of a hybrid model's attention stack on the
installed SGLang release: one as it is, one with the extension activated as on a server.
SGLang's Triton kernels run in Triton's interpreter, AITER's kernels are the PyTorch
reference. Prints what ran where, how far it is from float32 attention, and each verdict.
"""

from __future__ import annotations

import concurrent.futures
import sys
import time

import child
import environment

#: A bf16 result has 8 significant bits: half a unit in the last place of the largest value.
BF16 = 2.0**-8


def show(title: str, rows: list[dict]) -> None:
    print(f"\n{title}")
    print(f"  {'model runs on':18} {'phase':8} {'kernel (calls)':66} {'largest error':>14}")
    for row in rows:
        kernels = ", ".join(f"{name} ({n})" for name, n in row["kernels"].items()) or "Triton, SGLang's own"
        print(f"  {row['backend']:18} {row['phase']:8} {kernels:66} {row['error']:14.5f}")


def main() -> int:
    release = environment.DEMO
    began = time.monotonic()
    env = (("SGLANG_USE_AITER_PA", "1"),)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        plain = pool.submit(child.launch, release, "showcase:run", extension=False, level=child.NOTHING)
        ours = pool.submit(child.launch, release, "showcase:run", extension=True, env=env, level=child.NOTHING)
        plain, ours = plain.result().result, ours.result().result
    print(f"SGLang {release}, unmodified, on this CPU. AITER's kernels are a PyTorch reference:")
    print("errors are real, and no time here says anything about an AMD GPU. The model has 2 Gated")
    print("DeltaNet and 2 full-attention layers, an fp8 KV cache, and calibrated scales (K 0.5, V 2).")
    show("Without the extension", plain["rows"])
    show("With the extension on PYTHONPATH and SGLANG_USE_AITER_PA=1", ours["rows"])
    same = all(a["linear"] == b["linear"] and a["pool"] == b["pool"] for a, b in zip(plain["rows"], ours["rows"]))
    print(f"\nLinear layers and KV pool, with and without: {'the same bytes' if same else 'DIFFERENT'}.")
    print("Errors are relative to the largest value of float32 attention over req_to_token.")
    print("\nVerdicts")
    for state in ours["status"]:
        print(f"  {state['name']:20} {state['verdict']:10} {state['state']:8} {state['reason']}")
    problems = check(plain, ours)
    for problem in problems:
        print(f"NOT AS IT SHOULD BE: {problem}")
    print(f"\n{'OK' if not problems else 'FAILED'} in {time.monotonic() - began:.0f} s")
    return 1 if problems else 0


def check(plain: dict, ours: dict) -> list[str]:
    problems = []
    for before, after in zip(plain["rows"], ours["rows"]):
        where = f"{after['backend']} {after['phase']}"
        wanted = (after["backend"], after["phase"]) != ("triton", "prefill")
        served = {"prefill": "flash_attn_varlen_fp8_pertensor_func", "decode": "paged_attention_ragged"}[after["phase"]]
        if wanted and set(after["kernels"]) != {served}:
            problems.append(f"{where} ran {after['kernels']}, not {served}")
        if wanted and after["exact_error"] > BF16:
            problems.append(f"{where} is off by {after['exact_error']} where {BF16} is allowed")
        if not wanted and (before["kernels"], before["outputs"]) != (after["kernels"], after["outputs"]):
            problems.append(f"{where} is not what SGLang computes without the extension")
        if before["pool"] != after["pool"]:
            problems.append(f"{where} leaves other bytes in the KV pool")
        if before["linear"] != after["linear"]:
            problems.append(f"{where} changed the linear layers")
    states = {state["name"]: state["state"] for state in ours["status"]}
    if states["decode_pa"] != "active" or states["asm_context_prefill"] != "active":
        problems.append(f"capabilities are {states}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
