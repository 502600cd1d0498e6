"""All that this package knows of AITER and asks of it: which kernels there are and what parameters they take."""

import importlib
import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

PAGED_PREFILL = "mha_batch_prefill_func"
ASM_PREFILL = "flash_attn_varlen_fp8_pertensor_func"
RAGGED_DECODE = "paged_attention_ragged"
#: The leading parameters, in order, of the kernels that this package calls or whose calls it changes.
PARAMETERS = {
    PAGED_PREFILL: (
        "q", "k", "v", "cu_seqlens_q", "kv_indptr", "kv_page_indices", "max_seqlen_q", "max_seqlen_k",
    ),
    ASM_PREFILL: (
        "q", "k", "v", "q_descale", "k_descale", "v_descale", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q",
        "max_seqlen_k",
    ),
    RAGGED_DECODE: (
        "out", "workspace_buffer", "query", "key_cache", "value_cache", "scale", "kv_indptr", "kv_page_indices",
        "kv_last_page_lens", "block_size", "max_num_partitions", "alibi_slopes", "kv_cache_dtype",
        "kv_cache_layout", "logits_soft_cap", "k_scale", "v_scale",
    ),
}  # fmt: skip
#: The further parameters that are passed by name.
KEYWORDS = {
    PAGED_PREFILL: ("causal", "q_descale", "k_descale", "v_descale"),
    ASM_PREFILL: ("causal", "softmax_scale"),
    RAGGED_DECODE: (),
}
#: The tokens in one partition of the ragged decode kernel.
PARTITION = 256
#: What the gfx950 fp8 ASM kernel covers: the head_dim of Q, K and V, and the ratios of query to KV heads
#: (sgl-project/sglang#38467).
HEAD_DIM = 256
HEAD_RATIOS = (1, 2, 4, 8, 16)
ASM_GPU = "gfx950"
#: The bytes that its 32-bit offsets reach, in the gathered K or V and in 512 bytes for each query row and head.
ASM_REACH = 2**32
#: What the ragged decode kernel covers: its GPUs, of which gfx90a has no fp8 (`pa_ragged.cuh`), and its head sizes,
#: since its integer divisions truncate others.
DECODE_GPUS = ("gfx90a", "gfx942", "gfx950")
DECODE_GPUS_FP8 = ("gfx942", "gfx950")
DECODE_HEAD_DIMS = (64, 128, 256)
#: Query heads a KV head beyond which several KV heads a rank give wrong or unwritten heads.
DECODE_RATIO = 16
#: The elements of partial outputs that its reduce kernel addresses, with 32 bits (`pa_kernels.cuh`).
DECODE_REACH = 2**32


def by_name(kernel: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call of `kernel` by the names of its parameters. Raises TypeError for one without a name."""
    if len(args) > len(PARAMETERS[kernel]):
        raise TypeError(
            f"{kernel} is given {len(args)} arguments by position, where {len(PARAMETERS[kernel])} are known"
        )
    return {**dict(zip(PARAMETERS[kernel], args)), **kwargs}


def with_values(kernel: str, args: Sequence[Any], values: Mapping[str, Any]) -> list[Any]:
    """The positional arguments of a call of `kernel`, with those that `values` names replaced."""
    result = list(args)
    for name, value in values.items():
        result[PARAMETERS[kernel].index(name)] = value
    return result


# ---- the AITER that this process imports ----


def imported(kernel: str) -> Any:
    """The function `kernel` of the AITER that is imported."""
    return getattr(sys.modules["aiter"], kernel)


def import_problem(*kernels: str) -> str | None:
    """Why `aiter` cannot serve `kernels`, or None when it can. It imports AITER."""
    try:
        aiter = importlib.import_module("aiter")
    except Exception as error:
        return f"import aiter fails: {type(error).__name__}: {error}"
    if getattr(aiter, "__file__", None) is None:
        places = ", ".join(getattr(aiter, "__path__", []))
        return f"aiter at {places} is an empty namespace package, not AITER: a folder of that name is on sys.path"
    return next((problem for name in kernels if (problem := kernel_problem(aiter, name)) is not None), None)


def kernel_problem(aiter: object, name: str) -> str | None:
    """Why the kernel `name` of the module `aiter` cannot be called as this package calls it, or None."""
    where = getattr(aiter, "__file__", "aiter")
    kernel = getattr(aiter, name, None)
    if kernel is None:
        return f"{where} lacks {name}"
    try:
        found = list(inspect.signature(kernel).parameters)
    except (TypeError, ValueError):
        return f"the parameters of {name} in {where} cannot be read"
    problem = parameter_problem(name, found)
    return problem and f"{where}: {problem}"


def parameter_problem(name: str, found: list[str]) -> str | None:
    """How the parameters `found` of the kernel `name` differ from those that this package knows, or None."""
    for index, parameter in enumerate(PARAMETERS[name]):
        got = found[index] if index < len(found) else "nothing"
        if got != parameter:
            return f"{name} has parameter {index} {got!r} where {parameter!r} is expected"
    missing = [parameter for parameter in KEYWORDS[name] if parameter not in found]
    return f"{name} takes no {missing[0]!r}" if missing else None
