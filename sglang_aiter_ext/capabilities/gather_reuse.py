"""gather_reuse: the slots of a chunk with a prefix are worked out once a batch, not at every layer.

In 0.5.19 and 0.5.20 `forward_extend` calls `_asm_context_prefill_gather_indices` at every
full-attention layer: four host synchronisations each, for the same result. The result of the
batch's first layer is kept on the batch's metadata and given to the others.
"""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import Any

from .. import activation
from ..activation import Args, Kwargs
from ..bootstrap import ATTENTION
from ..capability import APPLY, NOT_APPLICABLE, UPSTREAM, Capability, Needs, Unsupported, Verdict
from ..counting import count
from ..installed import Release, calls
from ..layers import bind_extend
from ..settings import ASM
from .asm_context_prefill import asm_calls

NAME = "gather_reuse"
BACKEND = "srt.layers.attention.aiter_backend"
BUILDER = "_asm_context_prefill_gather_indices"


def probe(release: Release) -> Verdict:
    source = release.source(BACKEND)
    if calls(release.function(BACKEND, "AiterAttnBackend.forward_extend"), BUILDER):
        Needs(BACKEND, BUILDER, ("kv_indptr", "kv_indices", "seq_lens", "num_kv_slots", "forward_mode")).check(release)
        return Verdict(APPLY, f"forward_extend calls {BUILDER} at every layer")
    if source is not None and source.function("AiterAttnBackend._asm_context_prefill_indices") is not None:
        return Verdict(UPSTREAM, "forward_extend takes the slots from _asm_context_prefill_indices, once a batch")
    if asm_calls(release)[True]:
        raise Unsupported("forward_extend works out the slots for its ASM branch in a way that is not known here")
    return Verdict(NOT_APPLICABLE, "forward_extend has no ASM branch for batches with a prefix")


#: The (metadata, batch) of the forward_extend this thread is inside of.
_scope = activation.Scope()


def forward_extend(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    try:
        _, _, _, batch, _ = bind_extend(*args, **kwargs)
    except TypeError:
        return wrapped(*args, **kwargs)
    return _scope.call((instance.forward_metadata, batch), wrapped, args, kwargs)


def gather_indices(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Around the release's builder, which gets (kv_indptr, kv_indices, seq_lens, num_kv_slots, forward_mode)."""
    if _scope.value is None or len(args) < 4 or kwargs:
        return wrapped(*args, **kwargs)
    metadata, batch = _scope.value
    kept = getattr(metadata, "_sglang_aiter_ext_indices", None)
    if kept is not None:
        whose, table, slots, result = kept
        if whose() is batch and table is args[1] and slots == args[3]:
            count(NAME, "reused")
            return result
    result = wrapped(*args, **kwargs)
    count(NAME, "built")
    # On the metadata, so that it cannot outlive its batch.
    metadata._sglang_aiter_ext_indices = (weakref.ref(batch), args[1], args[3], result)
    return result


def install(module: ModuleType, release: Release) -> None:
    activation.wrap(module, BUILDER, gather_indices)
    activation.wrap(module, "AiterAttnBackend.forward_extend", forward_extend)


CAPABILITY = Capability(
    name=NAME,
    summary="the slots to gather for the ASM kernel are worked out once a batch, for all layers",
    why="the release rebuilds them at every layer, with four host synchronisations each time",
    wraps=("AiterAttnBackend.forward_extend", f"aiter_backend.{BUILDER}"),
    upstream=("https://github.com/sgl-project/sglang/pull/39901",),
    until="0.5.21",
    switch=ASM,
    targets=(f"{ATTENTION}.aiter_backend",),
    kernels=(),
    needs=(
        Needs(
            BACKEND,
            "AiterAttnBackend.forward_extend",
            leading=("q", "k", "v", "layer", "forward_batch"),
            mentions=("forward_metadata",),
        ),
    ),
    probe=probe,
    install=install,
)
