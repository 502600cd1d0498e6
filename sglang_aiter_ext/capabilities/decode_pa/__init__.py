"""decode_pa: full-attention layers of a hybrid model decode through AITER's ragged paged attention.

`attn_backend_wrapper` is where SGLang builds a hybrid model's backend around the
full-attention backend that the user chose. There, that backend goes into SGLang's own router for
different prefill and decode backends, with an `AiterAttnBackend` for decode and idle batches
only. At decode, two more things are put right on the way to the kernel: arguments that
models pass and the AITER backend does not take, and the layer's own scales.

| file | what it holds |
| --- | --- |
| `release` | what the release has |
| `routing` | whether this runner may be routed |
| `building` | how the backend is built |
| `step` | what happens at a step |
"""

import functools
from collections.abc import Mapping

from ... import settings
from ...aiter_kernels import DECODE_GPUS, RAGGED_DECODE
from ...capability import Capability, Needs, Wrapper
from ...errors import InternalError
from ...names import BACKEND, LINEAR, REGISTRY, ROUTER
from ...source import Release
from .building import NAME, build
from .release import facts, probe
from .step import decode_kernel, forward_decode

PARTS, SIDES = "full_attn_backend full_attn_layers", "prefill_backend decode_backend"
CALL = "q k v layer forward_batch save_kv_cache"


def wrappers(release: Release) -> Mapping[str, Wrapper]:
    known = facts(release)
    return {
        f"{REGISTRY}.attn_backend_wrapper": functools.partial(build, known),
        f"{LINEAR}.HybridLinearAttnBackend.forward_decode": functools.partial(forward_decode, known),
        f"{BACKEND}.{RAGGED_DECODE}": decode_kernel,
    }


CAPABILITY = Capability(
    name=NAME,
    summary="decode of a hybrid model's full-attention layers through AITER paged attention",
    why="the AITER decode kernel is faster than the prefill backend's, and hybrid models cannot choose it on their own",
    upstream=("https://github.com/sgl-project/sglang/pull/24129", "https://github.com/sgl-project/sglang/pull/24587"),
    until="no release yet",
    switch=settings.PA,
    kernels=(RAGGED_DECODE,),
    needs=(
        Needs(REGISTRY, "attn_backend_wrapper", leading="runner full_attn_backend"),
        Needs(REGISTRY, "create_aiter_backend", "runner"),
        Needs(LINEAR, "HybridLinearAttnBackend.__init__", f"{PARTS} linear_attn_backend", mentions=PARTS),
        Needs(LINEAR, "HybridLinearAttnBackend.forward_decode", "layer forward_batch save_kv_cache q k v **kwargs"),
        Needs(ROUTER, "HybridAttnBackend.__init__", f"{SIDES} model_runner", mentions=SIDES),
        Needs(ROUTER, "HybridAttnBackend._select_backend", "forward_mode"),
        Needs(ROUTER, "HybridAttnBackend.forward_decode", CALL),
        Needs(BACKEND, "AiterAttnBackend.forward_decode", CALL, mentions="workspace_buffer"),
        Needs(BACKEND, "AiterAttnBackend.__init__", mentions="workspace_buffer max_context_len"),
        Needs(BACKEND, "AiterAttnBackend.init_cuda_graph_state", "max_bs max_num_tokens kv_indices_buf"),
    ),
    probe=probe,
    wrappers=wrappers,
    internal_error=InternalError,
    architectures=DECODE_GPUS,
)
