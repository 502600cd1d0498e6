"""asm_context_prefill: extend batches gather their paged fp8 K/V and call the gfx950 ASM kernel.

The release's `forward_extend` writes its own K/V and then makes one call of the paged
kernel, `mha_batch_prefill_func`. The wrapper around `forward_extend` decides, from the layer
and the batch's host lengths, whether the ASM kernel covers this call; if so it leaves a note
that the wrapper around the paged kernel finds. Everything else, and every failure on the way, is
the release's own call with its arguments untouched.

| file | what it holds |
| --- | --- |
| `release` | what the release has |
| `decision` | whether the ASM kernel covers a call |
| `call` | what happens at a call |
"""

import functools
from collections.abc import Mapping

from ... import settings
from ...aiter_installed import asm_problem
from ...aiter_kernels import ASM_GPU, ASM_PREFILL, PAGED_PREFILL
from ...capability import Capability, Needs, Wrapper
from ...names import BACKEND
from ...source import Release
from .call import NAME, check, forward_extend, is_gfx95_supported, paged_kernel
from .release import EXTEND, asm_calls, probe

METADATA = "forward_metadata kv_indices kv_indptr max_q_len max_kv_len kv_cache_dtype input_dtype use_mla qo_indptr"
LENGTHS = "extend_prefix_lens_cpu extend_seq_lens_cpu seq_lens_cpu"


def wrappers(release: Release) -> Mapping[str, Wrapper]:
    has_first_chunk = bool(asm_calls(release)[False])
    found: dict[str, Wrapper] = {f"{BACKEND}.{PAGED_PREFILL}": paged_kernel}
    if has_first_chunk:
        found[f"{BACKEND}.is_gfx95_supported"] = is_gfx95_supported
    found[f"{BACKEND}.{EXTEND}"] = functools.partial(forward_extend, has_first_chunk)
    return found


CAPABILITY = Capability(
    name=NAME,
    summary="chunked prefill through the gfx950 fp8 ASM kernel, on gathered K/V",
    why="the paged prefill kernel is several times slower than the ASM one, which needs contiguous K/V",
    upstream=("https://github.com/sgl-project/sglang/pull/36758", "https://github.com/sgl-project/sglang/pull/36852"),
    until="0.5.19",
    switch=settings.ASM,
    kernels=(PAGED_PREFILL, ASM_PREFILL),
    needs=(
        Needs(BACKEND, EXTEND, leading="q k v layer forward_batch save_kv_cache", mentions=METADATA),
        Needs(BACKEND, "AiterAttnBackend.__init__", mentions="kv_cache_dtype input_dtype use_mla page_size"),
        Needs(BACKEND, "AiterAttnBackend.init_forward_metadata", mentions=LENGTHS),
        Needs(BACKEND, "AiterIndicesUpdaterPrefill.update_single_wrapper", mentions="kv_indices kv_indptr"),
    ),
    probe=probe,
    wrappers=wrappers,
    check=check,
    architectures=(ASM_GPU,),
    aiter_problem=asm_problem,
)
