"""gather_reuse: the slots of a chunk with a prefix are worked out once a batch, not at every layer.

In 0.5.19 and 0.5.20 `forward_extend` calls `_asm_context_prefill_gather_indices` at every
full-attention layer: four host synchronisations each, for the same result. What it answers at the
first layer of a batch is kept on the batch's metadata and given to the other layers.
"""

import weakref
from collections.abc import Mapping
from typing import Any

from ..aiter_kernels import ASM_GPU
from ..capability import APPLY, NOT_APPLICABLE, UPSTREAM, Args, Capability, Kwargs, Needs, Verdict, Wrapper
from ..counting import count
from ..errors import Unsupported
from ..kept import INDICES, Indices
from ..names import BACKEND
from ..settings import ASM
from ..source import Release, calls
from ..wrapping import Scope
from .asm_context_prefill.release import EXTEND, asm_calls
from .layers import bind_extend

NAME = "gather_reuse"
BUILDER = "_asm_context_prefill_gather_indices"


def probe(release: Release) -> Verdict:
    source = release.source(BACKEND)
    if calls(release.function(BACKEND, EXTEND), BUILDER):
        Needs(BACKEND, BUILDER, leading="kv_indptr kv_indices seq_lens num_kv_slots forward_mode").check(release)
        return Verdict(APPLY, f"forward_extend calls {BUILDER} at every layer")
    if source is not None and source.function("AiterAttnBackend._asm_context_prefill_indices") is not None:
        return Verdict(UPSTREAM, "forward_extend takes the slots from _asm_context_prefill_indices, once a batch")
    if asm_calls(release)[True]:
        raise Unsupported("forward_extend works out the slots for its ASM branch in a way that is not known here")
    return Verdict(NOT_APPLICABLE, "forward_extend has no ASM branch for batches with a prefix")


#: (metadata, batch) of the call of forward_extend that this thread is inside of.
_batch = Scope()


def forward_extend(original: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    call = bind_extend(args, kwargs)
    if call is None:
        return original(*args, **kwargs)
    return _batch.call((instance.forward_metadata, call.forward_batch), original, args, kwargs)


def bind_builder(kv_indptr: Any, kv_indices: Any, seq_lens: Any, num_kv_slots: Any, forward_mode: Any) -> Any:
    """(kv_indices, num_kv_slots) of a call of the release's builder. Raises TypeError for another call."""
    return kv_indices, num_kv_slots


def gather_indices(original: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Around the release's index builder."""
    if _batch.value is None:
        return original(*args, **kwargs)
    try:
        table, num_kv_slots = bind_builder(*args, **kwargs)
    except TypeError:
        return original(*args, **kwargs)
    metadata, batch = _batch.value
    kept = INDICES.on(metadata)
    if kept is not None and kept.batch() is batch and kept.table is table and kept.num_kv_slots == num_kv_slots:
        count(NAME, "reused")
        return kept.answer
    answer = original(*args, **kwargs)
    count(NAME, "built")
    INDICES.keep(metadata, Indices(weakref.ref(batch), table, num_kv_slots, answer))
    return answer


def wrappers(release: Release) -> Mapping[str, Wrapper]:
    return {
        f"{BACKEND}.{BUILDER}": gather_indices,
        f"{BACKEND}.{EXTEND}": forward_extend,
    }


CAPABILITY = Capability(
    name=NAME,
    summary="the slots to gather for the ASM kernel are worked out once a batch, for all layers",
    why="the release rebuilds them at every layer, with four host synchronisations each time",
    upstream=("https://github.com/sgl-project/sglang/pull/39901",),
    until="0.5.21",
    switch=ASM,
    kernels=(),
    needs=(Needs(BACKEND, EXTEND, leading="q k v layer forward_batch", mentions="forward_metadata"),),
    probe=probe,
    wrappers=wrappers,
    architectures=(ASM_GPU,),
)
