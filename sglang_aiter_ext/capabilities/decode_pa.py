"""decode_pa: full-attention layers of a hybrid model decode through AITER's ragged paged attention.

`attn_backend_wrapper` is where SGLang builds a hybrid model's backend around the
full-attention backend the user chose. There, that backend goes into SGLang's own router for
different prefill and decode backends, with an `AiterAttnBackend` for decode and idle batches
only. At decode, two more things are put right on the way to the kernel: arguments that
models pass and the AITER backend does not take, and the layer's own scales.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import itertools
import logging
import math
import operator
import sys
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from .. import activation, installed, settings
from ..activation import Args, Kwargs
from ..bootstrap import ATTENTION
from ..capability import APPLY, UPSTREAM, Capability, Needs, NothingToServe, Unsupported, Verdict
from ..counting import count, log_once
from ..installed import Release, calls, mentions, parameters
from ..layers import has_window, is_decoder, is_vectorized_5d, unit_scales

NAME = "decode_pa"
REGISTRY = "srt.layers.attention.attention_registry"
LINEAR = "srt.layers.attention.hybrid_linear_attn_backend"
ROUTER = "srt.layers.attention.hybrid_attn_backend"
BACKEND = "srt.layers.attention.aiter_backend"
KERNEL = "paged_attention_ragged"
PARTITION = 256
OFF = f"start with {settings.PA.name}=0 to decode on the backend of --attention-backend"


class DecodeError(activation.Refusal):
    """SGLANG_USE_AITER_PA=1 cannot be served; the message names what is missing and what helps."""


class InternalError(DecodeError):
    """An error of this capability's own, where going on without it would decode differently."""

    def __init__(self, message: str):
        super().__init__(f"{settings.PA.name}=1 is not served: {message}; {OFF}")


# ---- what the release has ----


def probe(release: Release) -> Verdict:
    registry = release.source(REGISTRY)
    if registry is not None and mentions(registry.tree, settings.PA.name):
        return Verdict(UPSTREAM, f"attn_backend_wrapper reads {settings.PA.name} itself")
    facts(release)
    return Verdict(APPLY, "attn_backend_wrapper gives a hybrid model one full-attention backend for prefill and decode")


class Facts:
    """What differs between releases, read from their source."""

    def __init__(self, release: Release):
        decode = release.function(BACKEND, "AiterAttnBackend.forward_decode")
        kernel = calls(decode, KERNEL)
        if len(kernel) != 1 or len(kernel[0].args) < 17:
            raise Unsupported(f"AiterAttnBackend.forward_decode calls {KERNEL} {len(kernel)} times, or not by position")
        #: Up to 0.5.11 the kernel is told that the cache has the queries' dtype ...
        self.reads_fp8 = getattr(kernel[0].args[12], "value", None) != "auto"
        #: ... and from 0.5.7 each layer of each step casts the whole fp8 pool to bf16 for it.
        self.casts_pool = any(
            isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "k_cache" and calls(node.value, "to")
            for node in ast.walk(decode)
        )
        writes = calls(decode, "set_kv_buffer")
        if not writes:
            raise Unsupported("AiterAttnBackend.forward_decode does not write K/V with set_kv_buffer")
        #: Up to 0.5.15.post1 decode writes K/V at unit scale, whatever the layer's scales.
        self.writes_at_unit_scale = len(writes[-1].args) < 6
        graph = release.function(BACKEND, "AiterAttnBackend.init_cuda_graph_state")
        own_buffer = next(
            (n for n in ast.walk(graph) if isinstance(n, ast.If) and ast.unparse(n.test) == "kv_indices_buf is None"),
            None,
        )
        if own_buffer is None:
            raise Unsupported("AiterAttnBackend.init_cuda_graph_state takes no kv_indices_buf")
        products = [n for n in ast.walk(own_buffer) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)]
        #: From 0.5.10 to 0.5.12.post1 the buffer has one entry a page, and decode writes one a token.
        self.graph_buffer_in_pages = mentions(own_buffer, "page_size") and not any(
            "self.page_size" in (ast.unparse(n.left), ast.unparse(n.right)) for n in products
        )
        #: Up to 0.5.15 different prefill and decode backends are wrapped one by one, decode first.
        self.wraps_each_side = False
        runner = release.source("srt.model_executor.model_runner")
        for call in calls(runner.tree, "HybridAttnBackend") if runner else ():
            sides = [k.arg for k in call.keywords if calls(k.value, "_get_attention_backend_from_str")]
            self.wraps_each_side = bool(sides)
            if sides and sides != ["decode_backend", "prefill_backend"]:
                raise Unsupported(f"ModelRunner builds the sides of HybridAttnBackend in the order {sides}")
        takes = parameters(release.function(LINEAR, "HybridLinearAttnBackend.forward_decode"))
        #: Parameters of HybridLinearAttnBackend.forward_decode, in order.
        self.parameters = tuple(name for name in takes if not name.startswith("**"))
        self.layer_at = self.parameters.index("layer")
        self.own = frozenset(self.parameters)
        backend = release.source(BACKEND)
        #: (module, name) of all that SGLang's AITER backend imports in one `try`.
        self.imports = backend.optional_imports("aiter") if backend is not None else []


@functools.cache
def facts(release: Release) -> Facts:
    return Facts(release)


# ---- when the backend is built ----


def hybrid_config(registry: Any, runner: Any) -> Any:
    """The hybrid model's config, or None; asked as the release asks."""
    ask = getattr(registry, "mambaish_config", None)
    return ask(runner.model_config) if ask is not None else getattr(runner, "mambaish_config", None)


def layer_problem(layer: Any, unified: bool) -> str | None:
    """What a full-attention layer needs that the decode kernel lacks, or None."""
    if has_window(layer):
        return f"a sliding window of {layer.sliding_window_size}"
    if layer.qk_head_dim != layer.v_head_dim:
        return f"head_dim {layer.qk_head_dim} for Q and K and {layer.v_head_dim} for V"
    if not is_decoder(layer):
        return "cross or encoder attention"
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


def leave_alone(registry: Any, runner: Any, full: Any, known: Facts) -> tuple[str, str] | None:
    """(reason, details) why this runner's backends stay as they are, or None."""
    import torch

    config = hybrid_config(registry, runner)
    args = runner.server_args
    if config is None:
        return "not_hybrid", "the model is not a hybrid linear-attention model"
    if getattr(runner, "is_draft_worker", False):
        return "draft_worker", "a draft model decodes on its own backend"
    if getattr(runner, "use_mla_backend", False):
        return "mla", "the model's full-attention layers are MLA"
    if known.wraps_each_side and not is_router(full) and sides_differ(runner):
        turns = runner.__dict__.setdefault("_sglang_aiter_ext_sides", itertools.cycle((True, False)))
        if not next(turns):
            return "prefill_side", "this is the prefill side; decode is routed on its own"
    if is_aiter(getattr(full, "decode_backend", full)):
        return "aiter_already", "the decode backend is AITER already"
    speculative = resolved(runner, "spec", "speculative_algorithm")
    modes = resolved(runner, "spec", "speculative_attention_mode"), getattr(args, "speculative_attention_mode", None)
    if speculative is not None and "decode" in modes:
        return (
            "speculative_attention_mode",
            "--speculative-attention-mode decode would verify drafts on the decode backend",
        )
    pool = runner.token_to_kv_pool
    if is_vectorized_5d(pool):
        return "vectorized_5d", "the KV cache has the vectorized_5d layout"
    fp8 = runner.kv_cache_dtype in (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
    if not fp8 and runner.kv_cache_dtype != runner.model_config.dtype:
        return (
            "kv_cache_dtype",
            f"the kernel reads no {runner.kv_cache_dtype} cache for {runner.model_config.dtype} activations",
        )
    if fp8 and not known.reads_fp8:
        does = (
            "casts the whole fp8 KV pool to bf16 at every layer of every step"
            if known.casts_pool
            else "tells the kernel that the cache is bf16"
        )
        return "fp8_pool_cast", f"this release {does}; use --kv-cache-dtype auto, or SGLang 0.5.12 or later"
    for layer in full_layers(runner, config) or ():
        problem = layer_problem(layer, uses_unified(pool))
        if problem is not None:
            return "layer", f"layer {layer.layer_id} has {problem}, which the decode kernel lacks"
        if fp8 and (layer.k_scale is None) != (layer.v_scale is None):
            return (
                "kv_scales",
                f"layer {layer.layer_id} has a scale for one of K and V, which backends read differently",
            )
        if fp8 and not unit_scales(layer) and not writes_scaled(getattr(full, "prefill_backend", full)):
            return (
                "kv_scales",
                f"layer {layer.layer_id} has K/V scales that {type(full).__name__} does not apply to the cache",
            )
    sinks = sink_parameter(getattr(runner, "model", None))
    if sinks is not None:
        return "sinks", f"the model has attention sinks ({sinks}), which the decode kernel lacks"
    return None


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
    return any(c.__name__ == "AiterAttnBackend" for c in type(backend).__mro__)


def is_router(backend: Any) -> bool:
    return any(c.__name__ == "HybridAttnBackend" for c in type(backend).__mro__)


def sides_differ(runner: Any) -> bool:
    return getattr(runner, "decode_attention_backend_str", None) != getattr(
        runner, "prefill_attention_backend_str", None
    )


def uses_unified(pool: Any) -> bool:
    """Whether the AITER backend will decode through its unified attention, which has no workspace."""
    import os

    chosen = os.environ.get("SGLANG_USE_AITER_UNIFIED_ATTN", "").strip().lower() in ("1", "true")
    return chosen or any(c.__name__ == "SWAKVPool" for c in type(pool).__mro__)


def check_aiter(known: Facts) -> None:
    """Raises DecodeError unless AITER's decode kernel is there and runs on this GPU."""
    import torch

    problem = installed.aiter_problem(KERNEL)
    if problem is None:
        # SGLang imports all of AITER's names in one `try`, and goes on without those after one that is missing.
        backend = importlib.import_module(f"{ATTENTION}.aiter_backend")
        missing = next((item for item in known.imports if not hasattr(backend, item[1])), None)
        problem = missing and f"SGLang's AITER backend could not import {missing[1]} from {missing[0]}"
    if problem is None and torch.version.hip:
        arch = torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName
        if not arch.startswith("gfx9"):
            problem = f"the GPU is {arch.partition(':')[0]}, and the kernel runs on CDNA (gfx9) only"
    if problem is not None:
        raise DecodeError(
            f"{settings.PA.name}=1 needs AITER's {KERNEL}, and it cannot be used: {problem}. Install AITER, or {OFF}"
        )


def attention_tp_size() -> int:
    runtime = sys.modules.get("sglang.srt.runtime_context")
    if runtime is not None:
        return int(runtime.get_parallel().attn_tp_size)
    from sglang.srt.layers.dp_attention import get_attention_tp_size

    return int(get_attention_tp_size())


def workspace_bytes(runner: Any) -> int:
    """Bytes that AiterAttnBackend.__init__ takes for its decode workspace, beside the KV pool."""
    if uses_unified(runner.token_to_kv_pool):
        return 0
    config = runner.model_config
    rows = runner.req_to_token_pool.size * (config.num_attention_heads // attention_tp_size())
    return int(rows * -(-config.context_len // PARTITION) * (config.head_dim * 4 + 8))


def resolved(runner: Any, bag: str, path: str) -> Any:
    """A setting as SGLang resolved it: from 0.5.19 on that is not written back onto ServerArgs, where it is otherwise."""
    runtime = sys.modules.get("sglang.srt.runtime_context")
    try:
        found = operator.attrgetter(path)(getattr(runtime, f"get_{bag}")())
    except Exception:
        # There is no such place, or nothing is published there.
        found = None
    return getattr(runner.server_args, path.rpartition(".")[2], None) if found is None else found


def graph_bytes(runner: Any) -> int:
    """Bytes that `init_cuda_graph_state` takes for the largest batch: an index and a mask for each token of context."""
    args, config = runner.server_args, resolved(runner, "exec", "graph.cuda_graph_config")
    if hasattr(config, "decode"):
        sizes = config.decode.bs if config.decode.backend != "disabled" else None
    else:
        sizes = None if getattr(args, "disable_cuda_graph", False) else getattr(args, "cuda_graph_bs", None)
    requests = min(max(sizes or (0,)), runner.req_to_token_pool.size)
    a_token = 4 + (resolved(runner, "spec", "speculative_num_draft_tokens") or 1)
    return int(requests * runner.model_config.context_len * a_token)


def check_memory(runner: Any) -> None:
    """Raises DecodeError where the decode workspace does not fit into the memory that is free."""
    import torch

    if not str(runner.device).startswith("cuda"):
        return
    workspace, graphs = workspace_bytes(runner), graph_bytes(runner)
    needed = workspace + graphs
    free = torch.cuda.mem_get_info()[0]
    if needed > free:
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
    if needed > free:
        config = runner.model_config
        raise DecodeError(
            f"{settings.PA.name}=1 needs a decode workspace of {workspace / 2**30:.2f} GiB ({workspace} bytes) for"
            f" {runner.req_to_token_pool.size} requests of up to {config.context_len} tokens and {graphs / 2**30:.2f} GiB"
            f" of graph buffers, and {free / 2**30:.2f} GiB are free: lower --max-running-requests, --context-length or"
            f" --mem-fraction-static, or {OFF}"
        )


def build_decode_backend(registry: Any, runner: Any, known: Facts) -> Any:
    """An AiterAttnBackend for decode, as the release builds one. Raises DecodeError."""
    check_aiter(known)
    if not runner.__dict__.get("_sglang_aiter_ext_backends"):
        check_memory(runner)
    try:
        decode = with_shared_workspace(runner, lambda: registry.ATTENTION_BACKENDS["aiter"](runner))
    except DecodeError:
        raise
    except Exception as error:
        what = f"SGLang's AITER backend cannot be built: {type(error).__name__}: {error}"
        raise DecodeError(f"{settings.PA.name}=1 is not served: {what}; {OFF}") from error
    if known.graph_buffer_in_pages and decode.page_size > 1:
        give_graph_buffer(decode)
    return decode


def with_shared_workspace(runner: Any, build: Callable[[], Any]) -> Any:
    """The backend `build()` gives, on the workspace of the runner's others.

    Two-batch overlap and PD multiplexing build several, and one decode runs at a time. Theirs
    is let go before the next is built, so that there is never a second one, not even for a moment.
    """
    others = runner.__dict__.setdefault("_sglang_aiter_ext_backends", weakref.WeakSet())
    size = next((backend.workspace_buffer.shape for backend in others), None)
    for backend in others:
        backend.workspace_buffer = None
    decode = build()
    workspace = getattr(decode, "workspace_buffer", None)
    if workspace is not None:
        if size is not None and workspace.shape != size:
            raise DecodeError(
                f"the decode workspaces of one runner differ in size: {size[0]} and {workspace.shape[0]} bytes"
            )
        others.add(decode)
        for backend in others:
            backend.workspace_buffer = workspace
    return decode


def give_graph_buffer(decode: Any) -> None:
    """Hand `init_cuda_graph_state` a `kv_indices` buffer with one entry a token."""
    import torch

    original = decode.init_cuda_graph_state

    def init_cuda_graph_state(max_bs: int, max_num_tokens: int, kv_indices_buf: Any = None) -> Any:
        if kv_indices_buf is None:
            kv_indices_buf = torch.zeros(max_bs * decode.max_context_len, dtype=torch.int32, device=decode.device)
        return original(max_bs, max_num_tokens, kv_indices_buf)

    decode.init_cuda_graph_state = init_cuda_graph_state


@functools.cache
def router_class() -> type:
    """SGLang's own router, for decode and idle batches only; what it does not define the user's backend answers."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    class Chosen:
        """A default of SGLang's base class, which must not hide what the user's backend says; an instance's own wins."""

        def __init__(self, name: str):
            self.name = name

        def __get__(self, router: Any, owner: type) -> Any:
            return getattr(AttentionBackend if router is None else router.prefill_backend, self.name)

    class AiterDecodeRouter(HybridAttnBackend):  # type: ignore[misc]
        def _select_backend(self, forward_mode: Any) -> Any:
            return self.decode_backend if forward_mode.is_decode_or_idle() else self.prefill_backend

        def __getattr__(self, name: str) -> Any:
            try:
                chosen = self.__dict__["prefill_backend"]
            except KeyError:
                raise AttributeError(name) from None
            return getattr(chosen, name)

    for name in vars(AttentionBackend).keys() - vars(HybridAttnBackend).keys():
        if not name.startswith("_"):
            setattr(AiterDecodeRouter, name, Chosen(name))
    return AiterDecodeRouter


# ---- the wrappers ----


def install(module: ModuleType, release: Release) -> None:
    known = facts(release)
    if module.__name__.endswith("attention_registry"):
        activation.wrap(module, "attn_backend_wrapper", functools.partial(build, module, known), InternalError)
    elif module.__name__.endswith("hybrid_linear_attn_backend"):
        wrapper = functools.partial(forward_decode, known)
        activation.wrap(module, "HybridLinearAttnBackend.forward_decode", wrapper, InternalError)
    elif hasattr(module, KERNEL):
        activation.wrap(module, KERNEL, decode_kernel, InternalError)
    else:
        raise NothingToServe(f"SGLang could not import {KERNEL} from aiter")


def bind_build(runner: Any, full_attn_backend: Any) -> tuple[Any, Any]:
    return runner, full_attn_backend


def build(registry: Any, known: Facts, wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Around `attn_backend_wrapper(runner, full_attn_backend)`.

    Raises SettingError for a SGLANG_USE_AITER_PA that cannot be read, DecodeError where it
    cannot be served.
    """
    try:
        return routed(registry, known, wrapped, args, kwargs)
    except (settings.SettingError, DecodeError) as error:
        log_without_traceback(error)
        raise


#: The last lines of tracebacks that say all there is to say.
_refusals: set[str] = set()


def log_without_traceback(error: Exception) -> None:
    """SGLang's scheduler logs a traceback of what stops it; of a refusal it logs the message alone."""
    _refusals.add(f"{type(error).__module__}.{type(error).__qualname__}: {error}")
    for handler in logging.getLogger().handlers:
        handler.addFilter(_shorten)


def _shorten(record: logging.LogRecord) -> bool:
    mark = "Traceback (most recent call last):"
    # What cannot be formatted is logging's own to report.
    with contextlib.suppress(Exception):
        before, _, text = record.getMessage().partition(mark)
        last = text.rstrip().rpartition("\n")[2]
        # A second traceback is a cause, which stays.
        if last in _refusals and mark not in text:
            record.msg, record.args = before + last.partition(": ")[2], ()
    return True


def routed(registry: Any, known: Facts, wrapped: Any, args: Args, kwargs: Kwargs) -> Any:
    if not settings.boolean(settings.PA):
        return wrapped(*args, **kwargs)
    runner, full = bind_build(*args, **kwargs)
    left = leave_alone(registry, runner, full, known)
    if left is not None:
        reason, details = left
        if reason == "aiter_already" and put_right(registry, runner, full, known):
            details += "; its kernel is given the layers' own scales"
        if reason == "prefill_side" and is_aiter(full):
            with_shared_workspace(runner, lambda: full)
        quiet = reason in ("not_hybrid", "draft_worker", "aiter_already", "prefill_side")
        log_once(
            NAME,
            reason,
            "decode stays on its own backend (%s): %s",
            reason,
            details,
            level=logging.INFO if quiet else logging.WARNING,
        )
        if not quiet and settings.strict():
            raise DecodeError(f"{settings.PA.name}=1 is not served ({reason}): {details}")
        return wrapped(*args, **kwargs)
    prefill = full.prefill_backend if is_router(full) else full
    layers_seen = full_layers(runner, hybrid_config(registry, runner)) is not None
    if is_aiter(prefill):
        # Prefill has an AITER backend, with a workspace: decode runs on it too.
        check_aiter(known)
        serve(prefill, runner, layers_seen=layers_seen)
        log_once(
            NAME,
            "routed",
            "full-attention layers: prefill and decode on %s",
            type(prefill).__name__,
            level=logging.INFO,
        )
        return wrapped(runner, prefill)
    decode = build_decode_backend(registry, runner, known)
    router = router_class()(runner, prefill_backend=prefill, decode_backend=decode)
    serve(decode, runner, layers_seen=layers_seen)
    log_once(
        NAME, "routed", "full-attention layers: prefill on %s, decode on %s (workspace %.2f GiB)",
        type(prefill).__name__, type(decode).__name__, workspace_bytes(runner) / 2**30, level=logging.INFO,
    )  # fmt: skip
    return wrapped(runner, router)


def put_right(registry: Any, runner: Any, full: Any, known: Facts) -> bool:
    """Whether the decode calls of a user's own AITER backend can be given the layers' own figures."""
    pool = runner.token_to_kv_pool
    layers = full_layers(runner, hybrid_config(registry, runner)) or ()
    if uses_unified(pool) or (not known.reads_fp8 and runner.kv_cache_dtype.itemsize == 1):
        return False
    if any(layer_problem(layer, False) for layer in layers):
        return False
    serve(getattr(full, "decode_backend", full), runner, layers_seen=True, routed=False)
    return True


def serve(decode: Any, runner: Any, layers_seen: bool, routed: bool = True) -> None:
    """Mark an AiterAttnBackend as one whose decode calls this capability looks after.

    `layers_seen` says that the model's layers were looked at; where decode was `routed` to it,
    arguments that it does not take are this capability's business too.
    """
    decode._sglang_aiter_ext_serves = (layers_seen, routed, runner.kv_cache_dtype.itemsize == 1)


#: (layer, whether its cache is fp8) of a full-attention layer that decodes through AITER.
_scope = activation.Scope()


def forward_decode(known: Facts, wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Around `HybridLinearAttnBackend.forward_decode`; linear layers pass through untouched."""
    full = instance.full_attn_backend
    decode = full.__dict__.get("decode_backend", full)
    serves = decode.__dict__.get("_sglang_aiter_ext_serves")
    if serves is None:
        return wrapped(*args, **kwargs)
    layers_seen, routed, fp8 = serves
    layer = args[known.layer_at] if len(args) > known.layer_at else kwargs.get("layer")
    if layer is None or layer.layer_id not in instance.full_attn_layers:
        return wrapped(*args, **kwargs)
    if routed and not known.own.issuperset(kwargs):
        kwargs = filtered(known, decode, kwargs)
    if not layers_seen:
        problem = layer_problem(layer, unified(decode))
        if problem is not None:
            raise DecodeError(f"layer {layer.layer_id} has {problem}, which AITER's decode kernel lacks: {OFF}")
    if fp8 and known.writes_at_unit_scale and not unit_scales(layer):
        args, kwargs = (), scaled(known, layer, args, kwargs)
    import torch

    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        count(NAME, "capture")
    else:
        count(NAME, "decode")
    return _scope.call((layer, fp8), wrapped, args, kwargs)


def unified(decode: Any) -> bool:
    return getattr(decode, "use_triton_unified_attention", False)


def filtered(known: Facts, decode: Any, kwargs: Kwargs) -> Kwargs:
    """`kwargs` without what the decode backend does not take.

    Raises DecodeError for an argument that would change the result.
    """
    takes = inspect.signature(decode.forward_decode).parameters
    result: Kwargs = {}
    for name, value in kwargs.items():
        # The backend takes sinks, and its ragged kernel ignores them.
        ignored = name not in takes or (name == "sinks" and not unified(decode))
        if name in known.own or not ignored:
            result[name] = value
        elif value is None or name == "layer_id":
            count(NAME, "dropped", name)
        else:
            raise DecodeError(
                f"the model passes {name}, which AITER's paged attention does not take and would change the result: {OFF}"
            )
    return result


def scaled(known: Facts, layer: Any, args: Args, kwargs: Kwargs) -> Kwargs:
    """All arguments by name, with K and V divided by the layer's scales, as the cache's other rows were."""
    bound = dict(zip(known.parameters, args), **kwargs)
    if bound.get("save_kv_cache", True):
        for name, scale in (("k", layer.k_scale), ("v", layer.v_scale)):
            if bound.get(name) is not None and scale is not None:
                bound[name] = bound[name].clone().div_(scale)
    return bound


def decode_kernel(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """At the one call of the kernel: the layer's own scaling and scales instead of the backend's constants."""
    if _scope.value is None:
        return wrapped(*args, **kwargs)
    layer, fp8 = _scope.value
    given = list(args)
    given[5] = float(layer.scaling)
    if fp8:
        for index, scale in ((15, layer.k_scale), (16, layer.v_scale)):
            if scale is not None:
                given[index] = scale.reshape(1).float()
    return wrapped(*given, **kwargs)


CAPABILITY = Capability(
    name=NAME,
    summary="decode of a hybrid model's full-attention layers through AITER paged attention",
    why="the AITER decode kernel is faster than the prefill backend's, and hybrid models cannot choose it on their own",
    wraps=(
        "attention_registry.attn_backend_wrapper",
        "HybridLinearAttnBackend.forward_decode",
        f"aiter_backend.{KERNEL}",
    ),
    upstream=("https://github.com/sgl-project/sglang/pull/24129", "https://github.com/sgl-project/sglang/pull/24587"),
    until="no release yet",
    switch=settings.PA,
    targets=(
        f"{ATTENTION}.attention_registry",
        f"{ATTENTION}.hybrid_linear_attn_backend",
        f"{ATTENTION}.aiter_backend",
    ),
    kernels=(KERNEL,),
    needs=(
        Needs(REGISTRY, "attn_backend_wrapper", leading=("runner", "full_attn_backend")),
        Needs(REGISTRY, "create_aiter_backend", ("runner",)),
        Needs(
            LINEAR,
            "HybridLinearAttnBackend.__init__",
            ("full_attn_backend", "linear_attn_backend", "full_attn_layers"),
            mentions=("full_attn_backend", "full_attn_layers"),
        ),
        Needs(
            LINEAR,
            "HybridLinearAttnBackend.forward_decode",
            ("layer", "forward_batch", "save_kv_cache", "q", "k", "v", "**kwargs"),
        ),
        Needs(
            ROUTER,
            "HybridAttnBackend.__init__",
            ("model_runner", "prefill_backend", "decode_backend"),
            mentions=("prefill_backend", "decode_backend"),
        ),
        Needs(ROUTER, "HybridAttnBackend._select_backend", ("forward_mode",)),
        Needs(ROUTER, "HybridAttnBackend.forward_decode", ("q", "k", "v", "layer", "forward_batch", "save_kv_cache")),
        Needs(
            BACKEND,
            "AiterAttnBackend.forward_decode",
            ("q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
            mentions=("workspace_buffer",),
        ),
        Needs(BACKEND, "AiterAttnBackend.__init__", mentions=("workspace_buffer", "max_context_len")),
        Needs(BACKEND, "AiterAttnBackend.init_cuda_graph_state", ("max_bs", "max_num_tokens", "kv_indices_buf")),
    ),
    probe=probe,
    install=install,
)
