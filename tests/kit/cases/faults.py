"""What a process with a fault in it computes: SGLang's targets imported, then prefill and decode.

`FAULT` in the environment names what goes wrong from inside the process, if anything does, and how far to go.
The strict answer is a fork's, made just before what may raise it: SGLANG_AITER_EXT_STRICT is read then.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import logging
import os
import sys
import traceback

ATTENTION = "sglang.srt.layers.attention"
TARGETS = [f"{ATTENTION}.{name}" for name in ("attention_registry", "hybrid_linear_attn_backend", "aiter_backend")]


def run() -> dict:
    """`{"inside": name, "targets": n, "attend": bool}`: states, wrappers, what was computed, and strict mode's first error."""
    wanted = json.loads(os.environ["FAULT"])
    gc.disable()
    out: dict = {"strict": None}
    if os.environ.get("SGLANG_AITER_EXT_STATE_DIR"):
        import stand_ins  # noqa: F401

        out["strict"] = strictly(importlib.import_module, "sglang.srt")
    import harness

    harness.pretend_gfx950()
    before, after = INSIDE.get(wanted.get("inside"), (None, None))
    if before:
        before()
    for name in TARGETS[: wanted["targets"]]:
        out["strict"] = out["strict"] or strictly(importlib.import_module, name)
        try:
            importlib.import_module(name)
        except Exception as error:
            out["import"] = f"{type(error).__name__}: {error}"
    gc.enable()
    if after:
        after()
    out["wrapped"] = wrapped()
    if wanted["attend"]:
        for phase in (prefill, decode):
            out["strict"] = out["strict"] or strictly(phase)
        out["prefill"], out["decode"] = attempt(prefill), attempt(decode)
    out["plugin_calls"] = getattr(sys, "plugin_calls", None)
    if "sglang_aiter_ext" in sys.modules:
        import sglang_aiter_ext

        try:
            out["states"] = {s["name"]: s["state"] for s in sglang_aiter_ext.status()}
            out["counters"] = sglang_aiter_ext.counters()
        except Exception as error:
            out["states"] = f"{type(error).__name__}: {error}"
    return out


def strictly(function, *args) -> str | None:
    """What `function(*args)` raises under SGLANG_AITER_EXT_STRICT=1, in a fork of this process."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.environ["SGLANG_AITER_EXT_STRICT"] = "1"
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1), os.dup2(nowhere, 2)
        said = ""
        try:
            function(*args)
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return f"it ended with {status}" if status else said or None


def wrapped() -> dict:
    """How many wrappers lie around each function that some capability wraps, in the targets that are imported."""
    found = {}
    for name, path in zip(
        TARGETS, ("attn_backend_wrapper", "HybridLinearAttnBackend.forward_decode", "AiterAttnBackend.forward_extend")
    ):
        function = sys.modules.get(name)
        for part in path.split(".") if function is not None else ():
            function = vars(function).get(part)
            if function is None:
                break
        if function is not None:
            found[path] = 0
            while hasattr(function, "__wrapped__"):
                function, found[path] = function.__wrapped__, found[path] + 1
    return found


def attempt(phase) -> dict:
    """Of each batch a digest of the outputs and the distance from exact attention; or the error, and whose it is."""
    try:
        results = phase()
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        return {"raised": f"{type(error).__name__}: {error}", "ours": "sglang_aiter_ext" in last}
    outputs = [b"".join(output.float().numpy().tobytes() for output in r.outputs.values()) for r in results]
    return {
        "outputs": [hashlib.sha256(raw).hexdigest()[:16] for raw in outputs],
        "errors": [r.error(fp8_queries=phase is prefill) for r in results],
    }


SCALES = {"k_scale": 0.5, "v_scale": 2.0}


def prefill() -> list:
    import harness

    # Triton's interpreter writes one token of one layer at a time.
    stack = harness.Stack(backend="aiter", layers=4, full_interval=2, **SCALES, **HEADS)
    return [stack.extend(lengths, tamper=TAMPER) for lengths in ({1: 9, 2: 17}, {1: 2, 2: 7, 3: 3})]


def decode() -> list:
    import harness

    stack = harness.Stack(backend="triton", scaling=0.05, **SCALES)
    stack.grow({1: 33, 2: 16})
    return [stack.decode([1, 2]) for _ in range(2)]


# ---- what goes wrong from inside ----

TAMPER, HEADS = None, {}


def uncovered_ratio() -> None:
    HEADS["q_heads"] = 6


class Raises(logging.Handler):
    def emit(self, record):
        raise RuntimeError("the handler is broken")


def a_handler_that_raises() -> None:
    logging.getLogger("sglang.aiter_ext").addHandler(Raises())
    logging.getLogger("sglang.aiter_ext").setLevel(logging.DEBUG)


def out_of_memory() -> None:
    import torch

    from sglang_aiter_ext.kernels import gather_kv

    def none_left(*args):
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")

    gather_kv.gather_kv = none_left


def asm_raises() -> None:
    import aiter

    def broken(name, arguments):
        if name == "flash_attn_varlen_fp8_pertensor_func":
            raise RuntimeError("HIP error: invalid configuration")

    aiter.BEFORE_CALL.append(broken)


def lengths_disagree() -> None:
    global TAMPER

    def TAMPER(stack, batch):
        stack.backend.full_attn_backend.forward_metadata.max_kv_len += 1


def no_attributes() -> None:
    """Metadata that takes none of ours, as a class with slots would."""
    global TAMPER

    def TAMPER(stack, batch):
        def refuse(self, name, value):
            if name.startswith("_sglang_aiter_ext"):
                raise AttributeError(f"no {name} here")
            object.__setattr__(self, name, value)

        type(stack.backend.full_attn_backend.forward_metadata).__setattr__ = refuse


def counter_raises() -> None:
    from sglang_aiter_ext import counting

    class Full(dict):
        def __setitem__(self, key, value):
            raise MemoryError("no room to count")

    counting._counts = Full()


def reload_targets() -> None:
    for name in TARGETS[1:]:
        importlib.reload(sys.modules[name])


def reload_ours() -> None:
    for name in [name for name in sys.modules if name.startswith("sglang_aiter_ext")]:
        importlib.reload(sys.modules[name])
    activate()


def activate() -> None:
    import sglang_aiter_ext

    for _ in range(3):
        sglang_aiter_ext.activate()


def plugin() -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()


#: name -> (before SGLang's targets are imported, after it)
INSIDE = {
    "a handler that raises": (a_handler_that_raises, None),
    "out of memory": (None, out_of_memory),
    "the ASM kernel raises": (None, asm_raises),
    "lengths disagree": (None, lengths_disagree),
    "a ratio that the ASM kernel lacks": (uncovered_ratio, None),
    "metadata takes no attribute": (None, no_attributes),
    "the counter raises": (None, counter_raises),
    "reload targets": (None, reload_targets),
    "reload ours": (None, reload_ours),
    "plugin": (plugin, None),
    "plugin late": (None, plugin),
    "activate": (activate, activate),
}
