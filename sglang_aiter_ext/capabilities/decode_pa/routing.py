"""Whether this runner's decode may be routed to AITER, and if not, why its backends stay as they are."""

import inspect
import math
import operator
import os
import sys
from typing import Any

from ...aiter_kernels import DECODE_HEAD_DIMS, DECODE_RATIO
from ...kept import RUNNER, Decline, RunnerNotes
from ..layers import has_window, is_decoder, is_vectorized_5d, unit_scales
from . import options
from .release import Facts

#: Reasons that say nothing to act on: they are logged at INFO, and strict mode does not refuse them.
QUIET = ("not_hybrid", "draft_worker", "aiter_already", "prefill_side")


def leave_alone(registry: Any, runner: Any, full: Any, known: Facts) -> Decline | None:
    """Why this runner's backends stay as they are, or None."""
    import torch

    config = hybrid_config(registry, runner)
    if config is None:
        return Decline("not_hybrid", "the model is not a hybrid linear-attention model")
    if getattr(runner, "is_draft_worker", False):
        return Decline("draft_worker", "a draft model decodes on its own backend")
    if getattr(runner, "use_mla_backend", False):
        return Decline("mla", "the model's full-attention layers are MLA")
    instead = without_decode(runner)
    if instead is not None:
        return Decline("no_decode_batches", "%s, so no batch would reach it", (instead,))
    if known.wraps_each_side and not is_router(full) and sides_differ(runner):
        notes = RUNNER.on(runner) or RUNNER.keep(runner, RunnerNotes())
        notes.prefill_is_next = not notes.prefill_is_next
        if not notes.prefill_is_next:
            return Decline("prefill_side", "this is the prefill side; decode is routed on its own")
    decode = getattr(full, "decode_backend", full)
    if is_aiter(decode):
        return Decline("aiter_already", "the decode backend is AITER already")
    unmet = options.unmet(known.release, runner, decode)
    if unmet is not None:
        return Decline("options", "%s", (unmet,))
    pool = runner.token_to_kv_pool
    if is_vectorized_5d(pool):
        return Decline("vectorized_5d", "the KV cache has the vectorized_5d layout")
    fp8 = runner.kv_cache_dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    if not fp8 and runner.kv_cache_dtype != runner.model_config.dtype:
        dtypes = runner.kv_cache_dtype, runner.model_config.dtype
        return Decline("kv_cache_dtype", "the kernel reads no %s cache for %s activations", dtypes)
    if fp8 and not known.reads_fp8:
        casts = "casts the whole fp8 KV pool to bf16 at every layer of every step"
        tells = "tells the kernel that the cache is bf16"
        text = "this release %s; use --kv-cache-dtype auto, or SGLang 0.5.12 or later"
        return Decline("fp8_pool_cast", text, (casts if known.casts_pool else tells,))
    for layer in full_layers(runner, config) or ():
        problem = layer_problem(layer, uses_unified(pool))
        if problem is not None:
            return Decline("layer", "layer %s has %s, which the decode kernel lacks", (layer.layer_id, problem))
        if fp8 and (layer.k_scale is None) != (layer.v_scale is None):
            text = "layer %s has a scale for one of K and V, which backends read differently"
            return Decline("kv_scales", text, (layer.layer_id,))
        if fp8 and not unit_scales(layer) and not writes_scaled(getattr(full, "prefill_backend", full)):
            text = "layer %s has K/V scales that %s does not apply to the cache"
            return Decline("kv_scales", text, (layer.layer_id, type(full).__name__))
    sinks = sink_parameter(getattr(runner, "model", None))
    if sinks is not None:
        return Decline("sinks", "the model has attention sinks (%s), which the decode kernel lacks", (sinks,))
    return None


def without_decode(runner: Any) -> str | None:
    """Why this runner executes no decode batches, or None."""
    algorithm = resolved(runner, "spec", "speculative_algorithm")
    if algorithm is not None:
        return f"with --speculative-algorithm {algorithm} each step is a target verify"
    if getattr(runner.server_args, "disaggregation_mode", None) == "prefill":
        return "with --disaggregation-mode prefill another server decodes"
    if not getattr(runner.model_config, "is_generation", True):
        return "the model generates no tokens"
    return None


def hybrid_config(registry: Any, runner: Any) -> Any:
    """The configuration of a hybrid model, or None; the release is asked as it asks itself."""
    ask = getattr(registry, "mambaish_config", None)
    return ask(runner.model_config) if ask is not None else getattr(runner, "mambaish_config", None)


def layer_problem(layer: Any, unified: bool) -> str | None:
    """What a full-attention layer needs and the decode kernel lacks, or None."""
    if has_window(layer):
        return f"a sliding window of {layer.sliding_window_size}"
    if layer.qk_head_dim != layer.v_head_dim:
        return f"head_dim {layer.qk_head_dim} for Q and K and {layer.v_head_dim} for V"
    if not is_decoder(layer):
        return "cross or encoder attention"
    ratio = layer.tp_q_head_num // layer.tp_k_head_num
    if not unified and layer.qk_head_dim not in DECODE_HEAD_DIMS:
        return f"head_dim {layer.qk_head_dim}"
    if not unified and ratio > DECODE_RATIO and (layer.tp_k_head_num > 1 or ratio % 2):
        return f"{layer.tp_q_head_num} query heads over {layer.tp_k_head_num} KV heads"
    if unified and (layer.logit_cap or not math.isclose(layer.scaling, layer.qk_head_dim**-0.5, rel_tol=1e-6)):
        return f"scaling {layer.scaling} and soft cap {layer.logit_cap}, which AITER's unified attention is not given"
    return None


def full_layers(runner: Any, config: Any) -> list[Any] | None:
    """The model's full-attention `RadixAttention` layers; None where they cannot be seen."""
    model = getattr(runner, "model", None)
    if model is None or not hasattr(model, "modules"):
        return None
    ids = set(getattr(config, "full_attention_layer_ids", ()))
    found = [m for m in model.modules() if type(m).__name__ == "RadixAttention" and m.layer_id in ids]
    return found or None


def sink_parameter(model: Any) -> str | None:
    """The name of a parameter that holds attention sinks, which models pass as an argument of each call."""
    named: Any = getattr(model, "named_parameters", list)()
    return next((name for name, _ in named if "sink" in name.rpartition(".")[2]), None)


def writes_scaled(backend: Any) -> bool:
    """Whether a prefill backend's source applies the layer's scales when it writes K/V."""
    try:
        return "k_scale" in inspect.getsource(type(backend).forward_extend)
    except (OSError, TypeError):
        return False


def is_aiter(backend: Any) -> bool:
    return is_a(backend, "AiterAttnBackend")


def is_router(backend: Any) -> bool:
    return is_a(backend, "HybridAttnBackend")


def is_a(thing: Any, name: str) -> bool:
    """Whether a class of that name is among those of `thing`; its module may not be imported."""
    return any(c.__name__ == name for c in type(thing).__mro__)


def sides_differ(runner: Any) -> bool:
    """Whether the runner names different backends for prefill and decode."""
    sides = ("decode_attention_backend_str", "prefill_attention_backend_str")
    return len({getattr(runner, side, None) for side in sides}) == 2


def uses_unified(pool: Any) -> bool:
    """Whether the AITER backend will decode through its unified attention, which has no workspace."""
    chosen = os.environ.get("SGLANG_USE_AITER_UNIFIED_ATTN", "").strip().lower() in ("1", "true")
    return chosen or is_a(pool, "SWAKVPool")


def resolved(runner: Any, bag: str, path: str) -> Any:
    """A setting as SGLang resolved it. From 0.5.19 on it does not write that back onto ServerArgs, as it did before."""
    runtime = sys.modules.get("sglang.srt.runtime_context")
    try:
        found = operator.attrgetter(path)(getattr(runtime, f"get_{bag}")())
    except Exception:
        # There is no such place, or nothing is published there.
        found = None
    return getattr(runner.server_args, path.rpartition(".")[2], None) if found is None else found
