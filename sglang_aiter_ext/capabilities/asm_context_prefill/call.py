"""What happens at a call: the wrappers, the ASM kernel, and how a call that it does not serve is counted."""

import dataclasses
import functools
import logging
import sys
from typing import Any

from ... import aiter_kernels, logs, settings
from ...aiter_kernels import ASM_PREFILL, HEAD_DIM, PAGED_PREFILL
from ...capability import Args, Kwargs
from ...counting import count
from ...errors import CouldNotApply, Unsupported, UnusableAiter
from ...kept import Decline, Plan
from ...names import BACKEND
from ...wrapping import Scope, without_ours
from ..layers import bind_extend, unit_scales
from .decision import FAULTS, check_call, check_layer, check_size, decline, plan_for, pool_of

NAME = "asm_context_prefill"


@dataclasses.dataclass
class Call:
    """A call of forward_extend that the ASM kernel is to serve; `q` is [tokens, heads * 256]."""

    backend: Any
    q: Any
    layer: Any
    plan: Plan


#: The Call that this thread is inside of.
_served = Scope()
#: True inside a first chunk that is not served, where the release's own ASM branch would be wrong.
_paged_only = Scope()
_ones: dict[Any, Any] = {}
#: Why the ASM kernel serves nothing more in this process, once a call of it has failed.
_failed: list[Decline | None] = [None]
#: What SGLang's check for gfx950 answered, and the check itself.
_asked: list[Any] = [None, False]


def check() -> None:
    """Raises UnusableAiter or Unsupported where one of the two kernels, or SGLang's check of the GPU, is not as known."""
    problem = aiter_kernels.import_problem(PAGED_PREFILL, ASM_PREFILL)
    if problem is not None:
        raise UnusableAiter(problem)
    if not hasattr(sys.modules[BACKEND], "is_gfx95_supported"):
        raise Unsupported(f"{BACKEND} has no is_gfx95_supported")
    # Triton is imported now rather than at the first batch.
    from ...kernels import gather_kv  # noqa: F401


def forward_extend(has_first_chunk: bool, original: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Around `AiterAttnBackend.forward_extend`; `has_first_chunk` says that the release has an ASM branch for those."""
    if _served.value is not None or _paged_only.value:
        # SGLang does not nest these calls. One inside of another is the release's own, and sees no note of ours.
        return _served.call(None, functools.partial(_paged_only.call, None, original), (args, kwargs), {})
    call = bind_extend(args, kwargs)
    if call is None:
        return original(*args, **kwargs)
    q, layer, batch = call.q, call.layer, call.forward_batch
    prefix = getattr(batch, "extend_prefix_lens_cpu", None)
    gfx950 = is_gfx950()
    first_chunk = has_first_chunk and prefix is not None and not any(prefix) and gfx950
    if first_chunk and call.k is not None and unit_scales(layer):
        # The release's own branch for a first chunk is right at unit scale.
        count(NAME, "release")
        return original(*args, **kwargs)
    try:
        why = _failed[0] if gfx950 else decline("not_gfx950", "the GPU is not gfx950")
        why = why or check_layer(instance, q, layer, batch, call.sinks)
        if why is None:
            plan = plan_for(instance, batch, q.shape[0])
            why = plan.decline or check_size(layer, plan, q.shape[0])
    except Exception as error:
        why = _failure("internal_error", "%s: %s", type(error).__name__, error)
        leave_to_paged(why, instance, layer, batch)
    else:
        if why is None:
            return _served.call(Call(instance, q, layer, plan), original, args, kwargs)
        leave_to_paged(why, instance, layer, batch)
    return _paged_only.call(True, original, args, kwargs) if first_chunk else original(*args, **kwargs)


def is_gfx950() -> bool:
    """What SGLang's check says. It is asked once, since our wrappers around it would cost more than the rest of a call."""
    check = sys.modules[BACKEND].is_gfx95_supported
    if _asked[0] is not check:
        _asked[:] = check, bool(without_ours(check)())
    return _asked[1]  # type: ignore[no-any-return]


def paged_kernel(original: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Around the release's one call of the paged kernel."""
    import torch

    served: Call | None = _served.value
    if served is None:
        return original(*args, **kwargs)
    plan = served.plan
    try:
        call = aiter_kernels.by_name(PAGED_PREFILL, args, kwargs)
        why = check_call(served.layer, plan, call)
        if why is None:
            output = attend(served, call)
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError):
            why = _failure("out_of_memory", "no memory for %s gathered tokens: %s", plan.slots.shape[0], error)
        else:
            # Another try may start a build of AITER's, or cost a cast and a gather, for the same error.
            why = _failed[0] = _failure("kernel_error", "%s: %s", type(error).__name__, error)
        leave_to_paged(why, served.backend, served.layer, plan.batch())
    else:
        if why is None:
            count(NAME, "asm")
            return output
        leave_to_paged(why, served.backend, served.layer, plan.batch())
    # All further layers of the batch stay on the paged kernel too.
    plan.decline = why
    return original(*args, **kwargs)


def is_gfx95_supported(original: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Around SGLang's check: the release's own branch for a first chunk stays out where we serve it, or cannot."""
    return False if _served.value is not None or _paged_only.value else original(*args, **kwargs)


def attend(served: Call, call: dict[str, Any]) -> Any:
    """Gather K and V, cast the queries, and call the ASM kernel. Returns [tokens, heads, 256] in bf16."""
    import torch

    from ...kernels import gather_kv

    q, layer = served.q, served.layer
    row = (-1, layer.tp_k_head_num, HEAD_DIM)
    if q.device not in _ones:
        _ones[q.device] = torch.ones(1, dtype=torch.float32, device=q.device)
    # Queries are cast at unit scale, so this is their descale.
    one = _ones[q.device]
    # A scale of the layer's may be of any shape with one value, and of another dtype.
    k_descale, v_descale = (
        one if scale is None else scale.reshape(1).to(torch.float32)
        for scale in (call.get("k_descale"), call.get("v_descale"))
    )
    queries = gather_kv.saturating_fp8(q).view(-1, layer.tp_q_head_num, HEAD_DIM)
    keys, values = gather_kv.gather_kv(call["k"].view(row), call["v"].view(row), served.plan.slots)
    return aiter_kernels.imported(ASM_PREFILL)(
        queries, keys, values, one, k_descale, v_descale, call["cu_seqlens_q"], call["kv_indptr"],
        call["max_seqlen_q"], call["max_seqlen_k"], softmax_scale=layer.scaling, causal=True,
    )  # fmt: skip


def _failure(reason: str, message: str, *arguments: Any) -> Decline:
    """The decline for an error. It keeps text, since the traceback of an error holds tensors."""
    return decline(reason, message, *map(str, arguments))


def leave_to_paged(why: Decline, backend: Any, layer: Any, batch: Any) -> None:
    """Count a call that the paged kernel serves, and log its reason the first time.

    Raises CouldNotApply under SGLANG_AITER_EXT_STRICT=1 where the reason is a fault; the error that is
    being handled is its cause.
    """
    if why.reason in FAULTS and settings.strict():
        text = f"{NAME}: the ASM kernel cannot serve it ({why.reason}): {why.text}"
        raise CouldNotApply(text) from sys.exc_info()[1]
    count(NAME, "paged", why.reason)
    if logs.said(NAME, why.reason):
        return
    try:
        size = pool_of(backend, batch).get_key_buffer(layer.layer_id).nbytes
    except Exception:
        size = 0
    # ROCm/aiter#2517 and #2608: its offsets were 32 bits wide until #2893.
    risk = f"; a layer's K cache is {size / 2**30:.1f} GiB: AITER's paged kernel gave zeros past 2 GiB before v0.1.13"
    text = f"the paged kernel serves it (%s): {why.message}%s"
    logs.once(NAME, why.reason, text, why.reason, *why.arguments, risk if size > 2**31 else "", level=logging.WARNING)
