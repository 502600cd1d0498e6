"""What happens at a step: a decode call of one full-attention layer, on its way to AITER's kernel."""

import dataclasses
from typing import Any

from ... import aiter_kernels
from ...aiter_kernels import RAGGED_DECODE
from ...capability import Args, Kwargs
from ...counting import count
from ...errors import DECODE_ELSEWHERE, DecodeError
from ...kept import DECODE, DecodeNotes
from ...wrapping import Scope
from ..layers import unit_scales
from .building import NAME
from .release import Facts
from .routing import layer_problem


@dataclasses.dataclass
class Step:
    """A decode call of a full-attention layer, and whether its KV cache is fp8."""

    layer: Any
    fp8: bool


#: The Step that this thread is inside of.
_step = Scope()


def forward_decode(known: Facts, original: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Around `HybridLinearAttnBackend.forward_decode`; linear layers pass through untouched."""
    if _step.value is not None:
        # SGLang does not nest these calls. One inside of another sees no note of ours.
        return _step.call(None, original, args, kwargs)
    full = instance.full_attn_backend
    decode = full.__dict__.get("decode_backend", full)
    notes = DECODE.on(decode)
    if notes is None:
        return original(*args, **kwargs)
    layer = args[known.layer_at] if len(args) > known.layer_at else kwargs.get("layer")
    if layer is None or layer.layer_id not in instance.full_attn_layers:
        return original(*args, **kwargs)
    unified = getattr(decode, "use_triton_unified_attention", False)
    if notes.routed and not known.own.issuperset(kwargs):
        kwargs = accepted(known, notes, unified, kwargs)
    if not notes.layers_seen:
        problem = layer_problem(layer, unified)
        if problem is not None:
            lacks = f"layer {layer.layer_id} has {problem}, which AITER's decode kernel lacks"
            raise DecodeError(f"{lacks}: {DECODE_ELSEWHERE}")
    if notes.fp8 and known.writes_at_unit_scale and not unit_scales(layer):
        args, kwargs = (), scaled(known, layer, args, kwargs)
    import torch

    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    count(NAME, "capture" if capturing else "decode")
    return _step.call(Step(layer, notes.fp8), original, args, kwargs)


def accepted(known: Facts, notes: DecodeNotes, unified: bool, kwargs: Kwargs) -> Kwargs:
    """`kwargs` without what the decode backend does not take.

    Raises DecodeError for an argument that would change the result.
    """
    result: Kwargs = {}
    for name, value in kwargs.items():
        # The backend takes sinks, and its ragged kernel ignores them.
        ignored = name not in notes.takes or (name == "sinks" and not unified)
        if name in known.own or not ignored:
            result[name] = value
        elif value is None or name == "layer_id":
            count(NAME, "dropped", name)
        else:
            changes = (
                f"the model passes {name}, which AITER's paged attention does not take and would change the result"
            )
            raise DecodeError(f"{changes}: {DECODE_ELSEWHERE}")
    return result


def scaled(known: Facts, layer: Any, args: Args, kwargs: Kwargs) -> Kwargs:
    """All arguments by name, with K and V divided by the layer's scales, as the cache's other rows were."""
    bound = dict(zip(known.parameters, args), **kwargs)
    if bound.get("save_kv_cache", True):
        for name, scale in (("k", layer.k_scale), ("v", layer.v_scale)):
            if bound.get(name) is not None and scale is not None:
                bound[name] = bound[name].clone().div_(scale)
    return bound


def decode_kernel(original: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Around the one call of the kernel: it gets the layer's own scaling and scales, not the backend's constants."""
    step: Step | None = _step.value
    if step is None:
        return original(*args, **kwargs)
    layer = step.layer
    values: dict[str, Any] = {"scale": float(layer.scaling)}
    if step.fp8:
        for name in ("k_scale", "v_scale"):
            scale = getattr(layer, name)
            if scale is not None:
                values[name] = scale.reshape(1).float()
    return original(*aiter_kernels.with_values(RAGGED_DECODE, args, values), **kwargs)
