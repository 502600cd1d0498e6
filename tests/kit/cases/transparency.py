"""What code that never heard of the extension sees of the wrapped functions and of the backends."""

from __future__ import annotations

import copy
import enum
import hashlib
import inspect
import pathlib
import pickle
import re
import types
from typing import Optional

import aiter
import dill
import torch
from wrappers import is_ours

Tensor = torch.Tensor
NAMES = ("flash_attn_varlen_fp8_pertensor_func", "mha_batch_prefill_func", "paged_attention_ragged")


def wrapped_functions() -> dict:
    import sglang.srt.layers.attention.aiter_backend as aiter_backend
    import sglang.srt.layers.attention.attention_registry as registry
    import sglang.srt.layers.attention.hybrid_linear_attn_backend as hybrid

    found = {
        "forward_extend": aiter_backend.AiterAttnBackend.forward_extend,
        "forward_decode": hybrid.HybridLinearAttnBackend.forward_decode,
        "attn_backend_wrapper": registry.attn_backend_wrapper,
        "mha_batch_prefill_func": aiter_backend.mha_batch_prefill_func,
        "paged_attention_ragged": aiter_backend.paged_attention_ragged,
    }
    if hasattr(aiter_backend, "is_gfx95_supported"):
        found["is_gfx95_supported"] = aiter_backend.is_gfx95_supported
    return found


def functions() -> dict:
    """Each wrapped function as introspection and pickling see it; `wrapped` says whether it is."""
    import harness  # noqa: F401  (stand-ins)

    out = {"wrapped": {}, "seen": {}}
    for name, function in wrapped_functions().items():
        out["wrapped"][name] = is_ours(function)
        out["seen"][name] = {
            "signature": str(inspect.signature(function)), "names": [function.__name__, function.__qualname__],
            "source": hashlib.sha256(inspect.getsource(function).encode()).hexdigest(), "doc": function.__doc__,
            "annotations": sorted(function.__annotations__),
            # SGLang's check for gfx950 is a functools.cache, and answers as one.
            "cached": [name for name in ("cache_info", "cache_clear") if hasattr(function, name)],
            "function": inspect.isfunction(function) and isinstance(function, types.FunctionType) or name.startswith("is_gfx95"),
            "pickle": pickle.loads(pickle.dumps(function)) is function, "dill": name.startswith("is_gfx95") or dill.loads(dill.dumps(function)) is function,
            "copies": copy.copy(function) is copy.deepcopy(function) is function,
        }  # fmt: skip
    return out


def subclasses() -> dict:
    """Subclasses that override a wrapped method: by super(), by the class's name, and without either."""
    from recording import Trace, counters, forget, harness

    stack = harness.Stack(backend="aiter", layers=2, full_interval=2)
    backend = stack.backend.full_attn_backend
    base, out = type(backend), {}

    class BySuper(base):
        def forward_extend(self, *args, **kwargs):
            seen.append("BySuper")
            return super().forward_extend(*args, **kwargs)

    class ByName(base):
        def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
            seen.append("ByName")
            return base.forward_extend(self, q, k, v, layer=layer, forward_batch=forward_batch, **kwargs)

    class Alone(base):
        def forward_extend(self, q, *args, **kwargs):
            seen.append("Alone")
            return torch.zeros_like(q)

    class Twice(BySuper):
        pass

    # The last one leaves its K/V unwritten.
    for cls in (base, BySuper, ByName, Twice, Alone):
        backend.__class__, seen = cls, []
        forget()
        with Trace() as trace:
            result = stack.extend({1: 5, 2: 7})
        method = backend.forward_extend
        out[cls.__name__] = {
            "seen": seen, "calls": len(trace.kernels), "isinstance": isinstance(backend, base), "ismethod": inspect.ismethod(method),
            "self": method.__self__ is backend, "func": method.__func__ is cls.forward_extend, "dict": "forward_extend" in vars(cls),
            "error": result.error(fp8_queries=True) if trace.kernels else None, "counters": counters().get("asm_context_prefill"),
        }  # fmt: skip
    return out


# ---- every attribute ----


def attributes() -> dict:
    """name -> what it is, for every attribute that SGLang's source or `dir` names, of each backend."""
    from recording import harness  # isort: skip
    import sglang
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    root = pathlib.Path(sglang.__path__[0], "srt")
    words = {w for path in root.rglob("*.py") for w in re.findall(r"[A-Za-z_]\w*", path.read_text(errors="replace"))}
    out = {}
    own = harness.Stack(backend="triton", prefill_backend="triton", decode_backend="torch_native")
    for name in ("aiter", "triton"):
        hybrid = harness.Stack(backend=name).backend
        for backend in (hybrid, hybrid.full_attn_backend):
            out[f"{name} {'hybrid' if backend is hybrid else 'full'}"] = {
                word: described for word in sorted(words | set(dir(backend))) if (described := describe(backend, word)) and not word.startswith(("__", "_sglang_aiter_ext"))
            }  # fmt: skip
    routers = [own.backend, getattr(own.backend, "full_attn_backend", None)]
    router = next(x for x in routers if type(x) is HybridAttnBackend or type(x).__name__ == "AiterDecodeRouter")
    # What SGLang's own router has by itself.
    out["own"] = sorted({*vars(HybridAttnBackend), *vars(router)})
    return out


def describe(backend, word):
    try:
        value = getattr(backend, word)
    except AttributeError:
        return None
    except Exception as error:
        return type(error).__name__
    plain = isinstance(value, (int, float, str, bool, type(None), torch.dtype, torch.device, enum.Enum))
    return repr(value) if plain else type(value).__name__


# ---- torch.compile ----


def _traceable_kernels() -> None:
    """The reference's kernels as custom operators, which torch.compile takes as they are, like AITER's."""
    real = {name: getattr(aiter, name) for name in NAMES}

    def operator(*mutates):
        return lambda f: torch.library.custom_op(f"reference::{f.__name__}", f, mutates_args=mutates)

    @operator("out", "space")
    def ragged(out: Tensor, space: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, indptr: Tensor, table: Tensor,
               last: Tensor, parts: int, dtype: str, cap: float, ks: Tensor, vs: Tensor) -> None:  # fmt: skip
        real["paged_attention_ragged"](
            out, space, q, k, v, scale, indptr, table, last, 1, parts, None, dtype, "NHD", cap, ks, vs
        )

    @operator()
    def asm(q: Tensor, k: Tensor, v: Tensor, qs: Tensor, ks: Tensor, vs: Tensor, cu_q: Tensor, cu_k: Tensor,
            max_q: int, max_k: int, scale: float) -> Tensor:  # fmt: skip
        return real[NAMES[0]](q, k, v, qs, ks, vs, cu_q, cu_k, max_q, max_k, softmax_scale=scale, causal=True)

    @operator()
    def paged(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, indptr: Tensor, table: Tensor, max_q: int, max_k: int,
              qs: Optional[Tensor], ks: Optional[Tensor], vs: Optional[Tensor]) -> Tensor:  # fmt: skip
        return real[NAMES[1]](
            q, k, v, cu_q, indptr, table, max_q, max_k, causal=True, q_descale=qs, k_descale=ks, v_descale=vs
        )

    for op in (asm, paged):
        op.register_fake(lambda q, *rest: torch.empty(q.shape, dtype=torch.bfloat16))

    def call_ragged(
        out, space, q, k, v, scale, indptr, table, last, size, parts, alibi, dtype, layout, cap, ks, vs, *rest
    ):
        ragged(out, space, q, k, v, scale, indptr, table, last, parts, dtype, cap, ks, vs)

    def call_asm(*args, softmax_scale, causal):
        return asm(*args, softmax_scale)

    def call_paged(*args, q_descale, k_descale, v_descale, **rest):
        return paged(*args, q_descale, k_descale, v_descale)

    for name, call in zip(NAMES, (call_asm, call_paged, call_ragged)):
        call.__signature__ = inspect.signature(real[name])
        setattr(aiter, name, call)


def compiled() -> dict:
    """Five steps of a compiled function that calls a layer: graph breaks, compiled frames after each, and errors."""
    _traceable_kernels()
    import properties
    import sglang.srt.layers.attention.aiter_backend as aiter_backend
    import torch._dynamo as dynamo
    from recording import Trace, harness

    if hasattr(aiter_backend, "launch_reshape_and_cache_flash"):
        # Triton's interpreter cannot be traced.
        def write(
            k: Tensor, v: Tensor, ks: Optional[Tensor], vs: Optional[Tensor], slots: Tensor, kc: Tensor, vc: Tensor
        ) -> None:
            properties.write_rows(k, v, kc, vc, slots, None, ks, vs)

        op = torch.library.custom_op("reference::write", write, mutates_args=("kc", "vc"))
        aiter_backend.launch_reshape_and_cache_flash = (
            lambda k, v, kc, vc, slots, swa=None, k_scale=None, v_scale=None: op(k, v, k_scale, v_scale, slots, kc, vc)
        )  # fmt: skip
    out = {}
    for name, backend, mode, lengths in (
        ("decode", "aiter", "DECODE", [1, 1]), ("router", "triton", "DECODE", [1, 1]), ("prefill", "aiter", "EXTEND", [4, 4]),
    ):  # fmt: skip
        stack = harness.Stack(backend=backend, layers=2, full_interval=2, k_scale=0.5, v_scale=2.0)
        stack.grow({1: 20, 2: 30})
        (layer,) = stack.layers.values()
        dynamo.reset()
        dynamo.utils.counters.clear()
        step = torch.compile(lambda q, k, v, batch, layer=layer: layer(q * 1.0, k, v, batch) * 2, backend="eager")
        rows = []
        for _ in range(5):
            batch = stack._forward_batch([1, 2], lengths, properties.harness_mode(mode))
            q, k, v = (stack._random(sum(lengths), n * 256) for n in (stack.q_heads, 1, 1))
            given = ({layer.layer_id: x.clone()} for x in (q, k, v))
            result = harness.Result(stack, batch, [1, 2], lengths, *given)
            with torch.no_grad(), stack.forward_context(batch), Trace() as trace:
                result.outputs[layer.layer_id] = step(q, k, v, batch) / 2
            counted = dynamo.utils.counters
            rows.append({
                "breaks": {str(key).partition("\n")[0]: n for key, n in counted["graph_break"].items()}, "kernels": trace.kernels,
                "frames": counted["frames"]["ok"], "error": result.error(fp8_queries=mode == "EXTEND"),
            })  # fmt: skip
        out[name] = rows
    return out
