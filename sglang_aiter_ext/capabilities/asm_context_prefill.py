"""asm_context_prefill: extend batches gather their paged fp8 K/V and call the gfx950 ASM kernel.

The release's `forward_extend` writes its own K/V and then makes one call of the paged
kernel, `mha_batch_prefill_func`. The wrapper around `forward_extend` decides, from the layer
and the batch's host lengths, whether the ASM kernel covers this call; if so it leaves a note
that the router at the paged call finds. Everything else, and every failure on the way, is
the release's own call with its arguments untouched.
"""

from __future__ import annotations

import ast
import logging
import sys
import weakref
from types import ModuleType
from typing import Any

from .. import activation, installed, settings
from ..activation import Args, Kwargs
from ..bootstrap import ATTENTION
from ..capability import APPLY, UPSTREAM, Capability, Needs, NothingToServe, Unsupported, Verdict
from ..counting import count, log_once, logged
from ..installed import Release, calls, enclosing_tests, mentions
from ..layers import HEAD_RATIOS, bind_extend, covered_ratio, has_window, is_decoder, is_vectorized_5d, unit_scales

NAME = "asm_context_prefill"
BACKEND = "srt.layers.attention.aiter_backend"
KERNEL = "flash_attn_varlen_fp8_pertensor_func"
PAGED = "mha_batch_prefill_func"
HEAD_DIM = 256
#: Entries `AiterIndicesUpdaterPrefill` adds to the table; the paged kernel reads past the end.
TABLE_PADDING = 256


# ---- what the release has ----


def probe(release: Release) -> Verdict:
    extend = release.function(BACKEND, "AiterAttnBackend.forward_extend")
    if asm_calls(release)[True]:
        return Verdict(UPSTREAM, "forward_extend has its own ASM branch for batches with a prefix")
    paged = calls(extend, PAGED)
    if len(paged) != 1:
        raise Unsupported(f"forward_extend calls {PAGED} {len(paged)} times, where one call is expected")
    by_name = {keyword.arg: getattr(keyword.value, "value", None) for keyword in paged[0].keywords}
    if len(paged[0].args) != 8 or not {"q_descale", "k_descale", "v_descale"} <= set(by_name):
        raise Unsupported(f"forward_extend casts the fp8 K/V pool before {PAGED}, or does not pass its descales there")
    if by_name.get("causal") is not True or "softmax_scale" in by_name:
        raise Unsupported(f"forward_extend asks {PAGED} for something else than plain causal attention")
    return Verdict(APPLY, "forward_extend has no ASM branch for batches with a prefix")


def asm_calls(release: Release) -> dict[bool | None, list[ast.Call]]:
    """forward_extend's own calls of the ASM kernel: for batches with a prefix (True), without (False), others (None).

    Raises Unsupported where none is known to be for a prefix and one may be, or calls are made elsewhere.
    """
    extend = release.function(BACKEND, "AiterAttnBackend.forward_extend")
    source = release.source(BACKEND)
    found: dict[bool | None, list[ast.Call]] = {True: [], False: [], None: []}
    for call in calls(extend, KERNEL):
        found[_asks_for_prefix(extend, call)].append(call)
    if found[None] and not found[True]:
        raise Unsupported(
            f"forward_extend calls {KERNEL} under a condition that does not say whether there is a prefix"
        )
    imported = source.optional_imports("aiter") if source is not None else []
    if not any(found.values()) and any(name == KERNEL for _, name in imported):
        raise Unsupported(f"the module imports {KERNEL}, and forward_extend does not call it")
    return found


def _asks_for_prefix(extend: ast.AST, call: ast.Call) -> bool | None:
    for test in enclosing_tests(extend, call):
        negated = {id(n.operand) for n in ast.walk(test) if isinstance(n, ast.UnaryOp) and isinstance(n.op, ast.Not)}
        for asked in calls(test, "any"):
            if mentions(asked, "extend_prefix_lens_cpu"):
                return id(asked) not in negated
    return None


# ---- the decision ----

#: Why the paged kernel serves a call: a reason that is counted, and a message with its arguments that is logged once.
Decline = tuple[Any, ...]
#: Reasons that no batch and no model should meet.
FAULTS = ("internal_error", "kernel_error", "out_of_memory", "lengths_mismatch", "table_mismatch")


class Plan:
    """What is the same for all layers of one batch: made at its first layer, gone with its metadata.

    `slots` [tokens] are the batch's pool slots; `cu_seqlens_k` is None where the metadata's own
    `kv_indptr` is one. `decline` says why the batch is not served.
    """

    def __init__(
        self, batch: Any, table: Any, slots: Any = None, cu_seqlens_k: Any = None, decline: Decline | None = None
    ):
        self.batch, self.table = weakref.ref(batch), table
        self.slots, self.cu_seqlens_k, self.decline = slots, cu_seqlens_k, decline


#: (backend, q, layer, plan) of a call of forward_extend that the ASM kernel is to serve; the plan is None
#: where the paged kernel is to serve a first chunk that the release's own branch would take.
_scope = activation.Scope()


def check_layer(backend: Any, q: Any, layer: Any, batch: Any, sinks: Any) -> Decline | None:
    """Why the ASM kernel does not cover this layer and kind of batch. Looks at no tensor's values."""
    import torch

    mode = batch.forward_mode
    if mode.name != "EXTEND":
        return "forward_mode", "forward mode %s is not a plain extend", mode.name
    if backend.kv_cache_dtype != torch.float8_e4m3fn:
        return "kv_cache_dtype", "the KV cache is %s, not float8_e4m3fn", backend.kv_cache_dtype
    if q.dtype != torch.bfloat16 or backend.input_dtype != torch.bfloat16:
        return "activation_dtype", "activations are %s, not bfloat16", q.dtype
    if backend.use_mla:
        return "mla", "MLA layers have kernels of their own"
    if layer.qk_head_dim != HEAD_DIM or layer.v_head_dim != HEAD_DIM:
        widths = layer.qk_head_dim, layer.v_head_dim, HEAD_DIM
        return "head_dim", "head_dim is %d for Q and K, %d for V, not %d", *widths
    if has_window(layer):
        return "sliding_window", "the layer has a sliding window of %s", layer.sliding_window_size
    if sinks is not None:
        return "sinks", "the layer has attention sinks"
    if layer.logit_cap:
        return "soft_cap", "the layer has a logit soft cap of %s", layer.logit_cap
    if not is_decoder(layer):
        return "attention_type", "the layer is not causal self-attention"
    if layer.tp_k_head_num != layer.tp_v_head_num:
        return "kv_heads", "%d K heads and %d V heads", layer.tp_k_head_num, layer.tp_v_head_num
    if not covered_ratio(layer):
        heads = layer.tp_q_head_num, layer.tp_k_head_num, HEAD_RATIOS
        return "head_ratio", "%d query heads over %d KV heads; the ASM kernels cover the ratios %s", *heads
    if getattr(backend, "kv_cache_is_vectorized_5d", False) or is_vectorized_5d(pool_of(backend, batch)):
        return "vectorized_5d", "the KV cache has the vectorized_5d layout"
    return None


def pool_of(backend: Any, batch: Any) -> Any:
    """The KV pool, where the release keeps it: on the backend, before 0.5.13 on the batch."""
    return getattr(backend, "token_to_kv_pool", None) or getattr(batch, "token_to_kv_pool", None)


def plan_batch(backend: Any, batch: Any, q_rows: int) -> Plan:
    """The token slots of a batch, from host lengths: no synchronisation.

    The table in the metadata is one entry a token, at any page size; a table of one entry a
    page is recognised by its length and expanded. Anything else is a mismatch.
    """
    import torch

    metadata = backend.forward_metadata
    table, indptr = metadata.kv_indices, metadata.kv_indptr

    def decline(reason: str, detail: str) -> Plan:
        return Plan(batch, table, decline=(reason, detail))

    lengths = batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, batch.seq_lens_cpu
    if any(x is None for x in lengths):
        return decline("no_host_lengths", "the batch has no sequence lengths on the host")
    prefix, extend, total = (x.tolist() if torch.is_tensor(x) else list(x) for x in lengths)
    if not total or not q_rows:
        return decline("no_tokens", "the batch has no tokens")
    if min(extend, default=0) == 0:
        return decline("zero_length_request", "a request of the batch has length 0")
    lengths_agree = (
        len(prefix) == len(extend) == len(total) == batch.batch_size
        and all(p + e == t for p, e, t in zip(prefix, extend, total))
        and sum(extend) <= q_rows
        and metadata.max_q_len == max(extend)
        and metadata.max_kv_len == max(total)
    )
    if not lengths_agree:
        return decline(
            "lengths_mismatch",
            f"prefix {prefix}, extend {extend} and sequence {total} lengths, {q_rows} queries and the metadata's"
            f" longest ({metadata.max_q_len}, {metadata.max_kv_len}) do not agree",
        )
    if getattr(metadata, "custom_mask", None) is not None:
        return decline("custom_mask", "the batch has a custom attention mask")
    if table.dim() != 1 or table.dtype != torch.int32 or indptr.dtype != torch.int32 or indptr.shape[0] <= len(total):
        return decline(
            "table_mismatch",
            f"kv_indices is {tuple(table.shape)} {table.dtype}, kv_indptr {tuple(indptr.shape)} {indptr.dtype}",
        )
    if table.is_cuda and torch.cuda.is_current_stream_capturing():
        return decline("graph_capture", "a graph is being captured")
    tokens, page = sum(total), backend.page_size
    pages = sum(-(-length // page) for length in total)
    is_tokens = table.shape[0] in (tokens, tokens + TABLE_PADDING)
    is_pages = page > 1 and table.shape[0] in (pages, pages + TABLE_PADDING)
    if is_tokens and is_pages:
        return decline("table_ambiguous", f"the table's {table.shape[0]} entries may be tokens or pages of {page}")
    if not is_tokens and not is_pages:
        return decline(
            "table_mismatch", f"kv_indices has {table.shape[0]} entries for {tokens} tokens in {pages} pages of {page}"
        )
    return Plan(batch, table, table[:tokens]) if is_tokens else Plan(batch, table, *expand_pages(table, total, page))


def expand_pages(table: Any, lengths: list[int], page: int) -> tuple[Any, Any]:
    """Token slots [tokens] int64 and `cu_seqlens_k` [requests + 1] int32 of a table with one entry a page."""
    import torch

    def to_device(x: Any) -> Any:
        return x.pin_memory().to(table.device, non_blocking=True) if table.is_cuda else x

    entry, offset, start = [], [], 0
    for length in lengths:
        position = torch.arange(length)
        entry.append(start + position // page)
        offset.append(position % page)
        start += -(-length // page)
    slots = table[to_device(torch.cat(entry))].long() * page + to_device(torch.cat(offset))
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return slots, to_device(ends)


def plan_for(backend: Any, batch: Any, q_rows: int) -> Plan:
    """The plan of this batch, made at its first layer and kept on its metadata."""
    metadata = backend.forward_metadata
    plan = getattr(metadata, "_sglang_aiter_ext_plan", None)
    if plan is None or plan.batch() is not batch or plan.table is not metadata.kv_indices:
        plan = metadata._sglang_aiter_ext_plan = plan_batch(backend, batch, q_rows)
    return plan


def check_call(layer: Any, plan: Plan, args: Args, kwargs: Kwargs) -> Decline | None:
    """Why the arguments of the paged call do not fit the plan, or the ASM kernel."""
    import torch

    if len(args) != 8 or args[5] is not plan.table:
        return "table_mismatch", "the paged kernel was given another table than the metadata's"
    for cache in args[1:3]:
        if (
            cache.shape[-2:] != (layer.tp_k_head_num, HEAD_DIM)
            or cache.dtype != torch.float8_e4m3fn
            or not cache.is_contiguous()
        ):
            return "pool_layout", f"a cache buffer is {tuple(cache.shape)} {cache.dtype}, strides {cache.stride()}"
    for name in ("k_descale", "v_descale"):
        if kwargs.get(name) is not None and kwargs[name].numel() != 1:
            return "scale_shape", f"{name} has {kwargs[name].numel()} values, not one"
    return None


def check_strict(decline: Decline) -> None:
    """Raises CouldNotApply under SGLANG_AITER_EXT_STRICT=1 for a fault; the error that is being handled is its cause."""
    reason, message, *arguments = decline
    if reason in FAULTS and settings.strict():
        raise activation.CouldNotApply(
            f"{NAME}: the ASM kernel cannot serve it ({reason}): {message % tuple(arguments)}"
        ) from sys.exc_info()[1]


def failure(reason: str, message: str, *arguments: Any) -> Decline:
    """The decline for the error being handled. Arguments are kept as text: an error's traceback holds tensors."""
    decline = reason, message, *map(str, arguments)
    check_strict(decline)
    return decline


def report(decline: Decline, backend: Any, layer: Any, batch: Any) -> None:
    """Count a call that the paged kernel serves, and log its reason the first time.

    Raises CouldNotApply under SGLANG_AITER_EXT_STRICT=1 where that is a fault.
    """
    check_strict(decline)
    reason, message, *arguments = decline
    count(NAME, "paged", reason)
    if not logged(NAME, reason):
        try:
            size = pool_of(backend, batch).get_key_buffer(layer.layer_id).nbytes
        except Exception:
            size = 0
        # ROCm/aiter#2517, #2608: the paged kernel's offsets are 32 bits wide.
        risk = (
            f"; a layer's K cache is {size / 2**30:.1f} GiB, and AITER's paged kernel has overflowed past 2 GiB"
            if size > 2**31
            else ""
        )
        level = logging.INFO if reason == "table_ambiguous" else logging.WARNING
        log_once(NAME, reason, f"the paged kernel serves it (%s): {message}%s", reason, *arguments, risk, level=level)


# ---- the wrappers ----


def install(module: ModuleType, release: Release) -> None:
    """Wrap forward_extend and the paged kernel's name in SGLang's AITER backend module.

    Raises NothingToServe where SGLang itself could not import AITER, LookupError where AITER
    lacks the ASM kernel or takes other parameters.
    """
    import torch

    from ..kernels import gather_kv

    if not hasattr(module, PAGED):
        raise NothingToServe(f"SGLang could not import {PAGED} from aiter")
    problem = installed.aiter_problem(PAGED, KERNEL)
    if problem is not None:
        raise LookupError(problem)
    if not hasattr(module, "is_gfx95_supported"):
        raise AttributeError(f"{module.__name__} has no is_gfx95_supported")
    asm_kernel = getattr(sys.modules["aiter"], KERNEL)
    has_first_chunk = bool(asm_calls(release)[False])
    out_of_memory = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)
    unwrapped = activation.without_wrappers(module.is_gfx95_supported)
    ones: dict[Any, Any] = {}

    def forward_extend(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        try:
            q, k, layer, batch, sinks = bind_extend(*args, **kwargs)
        except TypeError:
            return wrapped(*args, **kwargs)
        prefix = getattr(batch, "extend_prefix_lens_cpu", None)
        first_chunk = has_first_chunk and prefix is not None and not any(prefix) and gfx950()
        if first_chunk and k is not None and unit_scales(layer):
            # The release's own branch for a first chunk, right at unit scale.
            count(NAME, "release")
            return wrapped(*args, **kwargs)
        plan = None
        try:
            decline = decide(instance, q, layer, batch, sinks)
            if decline is None:
                plan = plan_for(instance, batch, q.shape[0])
                decline = plan.decline
        except Exception as error:
            decline = failure("internal_error", "%s: %s", type(error).__name__, error)
        if decline is None:
            return _scope.call((instance, q, layer, plan), wrapped, args, kwargs)
        report(decline, instance, layer, batch)
        if first_chunk:
            return _scope.call((instance, q, layer, None), wrapped, args, kwargs)
        return wrapped(*args, **kwargs)

    def gfx950() -> bool:
        # Outside of a served call the wrappers around SGLang's check only cost time.
        check = unwrapped if module.is_gfx95_supported is wrapped_check else module.is_gfx95_supported
        return bool(check())

    def decide(backend: Any, q: Any, layer: Any, batch: Any, sinks: Any) -> Decline | None:
        if not gfx950():
            return "not_gfx950", "the GPU is not gfx950"
        return check_layer(backend, q, layer, batch, sinks)

    def paged_kernel(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        backend, q, layer, plan = _scope.value or (None,) * 4
        if plan is None:
            return wrapped(*args, **kwargs)
        try:
            decline = check_call(layer, plan, args, kwargs)
            if decline is None:
                output = attend(q, layer, plan, args, kwargs)
        except out_of_memory as error:
            decline = failure("out_of_memory", "no memory for %s gathered tokens: %s", plan.slots.shape[0], error)
        except Exception as error:
            decline = failure("kernel_error", "%s: %s", type(error).__name__, error)
        if decline is None:
            count(NAME, "asm")
            return output
        # All further layers of the batch stay on the paged kernel too.
        plan.decline = decline
        report(decline, backend, layer, plan.batch())
        return wrapped(*args, **kwargs)

    def attend(q: Any, layer: Any, plan: Plan, args: Args, kwargs: Kwargs) -> Any:
        _, k_cache, v_cache, cu_seqlens_q, kv_indptr, _, max_seqlen_q, max_seqlen_k = args
        row = (-1, layer.tp_k_head_num, HEAD_DIM)
        one = unit(q.device)
        # A scale of the layer's may be of any shape with one value, and of another dtype.
        k_descale, v_descale = (
            one if scale is None else scale.reshape(1).to(torch.float32)
            for scale in (kwargs.get("k_descale"), kwargs.get("v_descale"))
        )
        queries = gather_kv.saturating_fp8(q).view(-1, layer.tp_q_head_num, HEAD_DIM)
        keys, values = gather_kv.gather_kv(k_cache.view(row), v_cache.view(row), plan.slots)
        cu_seqlens_k = kv_indptr if plan.cu_seqlens_k is None else plan.cu_seqlens_k
        return asm_kernel(
            queries, keys, values, one, k_descale, v_descale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
            max_seqlen_k, softmax_scale=layer.scaling, causal=True,
        )  # fmt: skip

    def unit(device: Any) -> Any:
        """Queries are cast at unit scale, so this is their descale."""
        if device not in ones:
            ones[device] = torch.ones(1, dtype=torch.float32, device=device)
        return ones[device]

    def is_gfx95_supported(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
        # Inside a call that the router serves, the release's own first-chunk branch stays out.
        return False if _scope.value is not None else wrapped(*args, **kwargs)

    activation.wrap(module, PAGED, paged_kernel)
    if has_first_chunk:
        activation.wrap(module, "is_gfx95_supported", is_gfx95_supported)
    activation.wrap(module, "AiterAttnBackend.forward_extend", forward_extend)
    wrapped_check = module.is_gfx95_supported


CAPABILITY = Capability(
    name=NAME,
    summary="chunked prefill through the gfx950 fp8 ASM kernel, on gathered K/V",
    why="the paged prefill kernel is several times slower than the ASM one, which needs contiguous K/V",
    wraps=("AiterAttnBackend.forward_extend", f"aiter_backend.{PAGED}"),
    upstream=("https://github.com/sgl-project/sglang/pull/36758", "https://github.com/sgl-project/sglang/pull/36852"),
    until="0.5.19",
    switch=settings.ASM,
    targets=(f"{ATTENTION}.aiter_backend",),
    kernels=(PAGED, KERNEL),
    needs=(
        Needs(
            BACKEND,
            "AiterAttnBackend.forward_extend",
            leading=("q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
            mentions=(
                "forward_metadata",
                "kv_indices",
                "kv_indptr",
                "max_q_len",
                "max_kv_len",
                "kv_cache_dtype",
                "input_dtype",
                "use_mla",
                "qo_indptr",
            ),
        ),
        Needs(BACKEND, "AiterAttnBackend.__init__", mentions=("kv_cache_dtype", "input_dtype", "use_mla", "page_size")),
        Needs(
            BACKEND,
            "AiterAttnBackend.init_forward_metadata",
            mentions=("extend_prefix_lens_cpu", "extend_seq_lens_cpu", "seq_lens_cpu"),
        ),
        Needs(BACKEND, "AiterIndicesUpdaterPrefill.update_single_wrapper", mentions=("kv_indices", "kv_indptr")),
    ),
    probe=probe,
    install=install,
)
