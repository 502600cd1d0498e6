"""How the backend is built: the wrapper around `attn_backend_wrapper`, the AITER backend and its memory, and the router."""

import functools
import importlib
import inspect
import logging
import sys
from collections.abc import Callable
from typing import Any

from ... import aiter_kernels, logs, settings, wrapping
from ...aiter_kernels import DECODE_GPUS, DECODE_GPUS_FP8, DECODE_REACH, PARTITION, RAGGED_DECODE
from ...capability import Args, Kwargs
from ...errors import DECODE_ELSEWHERE, DecodeError
from ...kept import DECODE, RUNNER, Decline, DecodeNotes, RunnerNotes
from ...names import BACKEND, LINEAR, REGISTRY
from .release import Facts
from .routing import QUIET, full_layers, hybrid_config, is_aiter, is_router, layer_problem, leave_alone, uses_unified

NAME = "decode_pa"


def bind_build(runner: Any, full_attn_backend: Any) -> tuple[Any, Any]:
    return runner, full_attn_backend


def build(known: Facts, original: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Around `attn_backend_wrapper(runner, full_attn_backend)`.

    Raises SettingError for a SGLANG_USE_AITER_PA that cannot be read, and DecodeError where it
    cannot be served.
    """
    if not settings.boolean(settings.PA):
        return original(*args, **kwargs)
    registry = sys.modules[REGISTRY]
    runner, full = bind_build(*args, **kwargs)
    why = leave_alone(registry, runner, full, known)
    built = original(*args, **kwargs)
    if why is None and not (isinstance(built, hybrid_class()) and built.full_attn_backend is full):
        text = "SGLang gives the full-attention layers of this model to %s, whatever the backend"
        why = Decline("replaced", text, (type(getattr(built, "full_attn_backend", built)).__name__,))
    if why is not None:
        details = why.text
        if why.reason == "aiter_already" and put_right(registry, runner, full, known):
            details += "; its kernel is given the layers' own scales"
        if why.reason == "prefill_side" and is_aiter(full):
            with_shared_workspace(runner, lambda: full)
        quiet = why.reason in QUIET
        level = logging.INFO if quiet else logging.WARNING
        text = "decode stays on its own backend (%s): %s"
        logs.once(NAME, why.reason, text, why.reason, details, level=level)
        if not quiet and settings.strict():
            raise DecodeError(f"{settings.PA.name}=1 is not served ({why.reason}): {details}")
        return built
    prefill = full.prefill_backend if is_router(full) else full
    layers_seen = full_layers(runner, hybrid_config(registry, runner)) is not None
    if is_aiter(prefill):
        # Prefill has an AITER backend, with a workspace: decode runs on it too.
        check_aiter(known, runner)
        decode = chosen = prefill
    else:
        decode = build_decode_backend(registry, runner, known)
        chosen = router_class()(runner, prefill_backend=prefill, decode_backend=decode)
    look_after(decode, runner, layers_seen)
    if NAME in wrapping.inert:
        # A module that SGLang imported just now could not be wrapped, which is logged: decode stays where it was.
        return built
    # What the release takes from the backend, it takes from the router now; the linear backend is built already.
    type(built).__init__(built, chosen, built.linear_attn_backend, built.full_attn_layers)
    if decode is prefill:
        text = "full-attention layers: prefill and decode on %s"
        logs.once(NAME, "routed", text, type(prefill).__name__, level=logging.INFO)
    else:
        text = "full-attention layers: prefill on %s, decode on %s (workspace %.2f GiB)"
        kinds = type(prefill).__name__, type(decode).__name__
        logs.once(NAME, "routed", text, *kinds, workspace_bytes(runner) / 2**30, level=logging.INFO)
    return built


def put_right(registry: Any, runner: Any, full: Any, known: Facts) -> bool:
    """Whether the decode calls of a user's own AITER backend can be given the layers' own figures."""
    pool = runner.token_to_kv_pool
    layers = full_layers(runner, hybrid_config(registry, runner)) or ()
    if uses_unified(pool) or (not known.reads_fp8 and runner.kv_cache_dtype.itemsize == 1):
        return False
    if any(layer_problem(layer, False) for layer in layers):
        return False
    look_after(getattr(full, "decode_backend", full), runner, layers_seen=True, routed=False)
    return True


def look_after(decode: Any, runner: Any, layers_seen: bool, routed: bool = True) -> None:
    """Have `step` look after the decode calls of an AiterAttnBackend; see `kept.DecodeNotes`."""
    takes = frozenset(inspect.signature(decode.forward_decode).parameters)
    DECODE.keep(decode, DecodeNotes(layers_seen, routed, runner.kv_cache_dtype.itemsize == 1, takes))


# ---- the AITER backend ----


def build_decode_backend(registry: Any, runner: Any, known: Facts) -> Any:
    """An AiterAttnBackend for decode, as the release builds one. Raises DecodeError."""
    check_aiter(known, runner)
    notes = RUNNER.on(runner)
    if notes is None or not notes.backends:
        check_memory(runner)
    try:
        decode = with_shared_workspace(runner, lambda: registry.ATTENTION_BACKENDS["aiter"](runner))
    except DecodeError:
        raise
    except Exception as error:
        what = f"SGLang's AITER backend cannot be built: {type(error).__name__}: {error}"
        raise DecodeError(f"{settings.PA.name}=1 is not served: {what}; {DECODE_ELSEWHERE}") from error
    if known.graph_buffer_in_pages and decode.page_size > 1:
        give_graph_buffer(decode)
    return decode


def check_aiter(known: Facts, runner: Any) -> None:
    """Raises DecodeError unless AITER's decode kernel is there and runs on this GPU with this KV cache."""
    import torch

    problem = aiter_kernels.import_problem(RAGGED_DECODE)
    if problem is None:
        # SGLang imports all of AITER's names in one `try`, and goes on without those after one that is missing.
        backend = importlib.import_module(BACKEND)
        missing = next((item for item in known.imports if not hasattr(backend, item[1])), None)
        problem = missing and f"SGLang's AITER backend could not import {missing[1]} from {missing[0]}"
    if problem is None and torch.version.hip:
        arch = torch.cuda.get_device_properties(torch.cuda.current_device()).gcnArchName.partition(":")[0]
        fp8 = runner.kv_cache_dtype.itemsize == 1
        covered = DECODE_GPUS_FP8 if fp8 else DECODE_GPUS
        if arch not in covered:
            cache = "with an fp8 KV cache " if fp8 else ""
            problem = f"the GPU is {arch}, and the kernel {cache}runs on {', '.join(covered)} only"
    if problem is not None:
        needs = f"{settings.PA.name}=1 needs AITER's {RAGGED_DECODE}, and it cannot be used"
        raise DecodeError(f"{needs}: {problem}. Install AITER, or {DECODE_ELSEWHERE}")


def hybrid_class() -> Any:
    """SGLang's backend of a hybrid model, which sends each layer to its own kind of attention."""
    return importlib.import_module(LINEAR).HybridLinearAttnBackend


def attention_tp_size() -> int:
    """The number of GPUs that share the heads of one attention layer, from where the release keeps it."""
    runtime = sys.modules.get("sglang.srt.runtime_context")
    if runtime is not None:
        return int(runtime.get_parallel().attn_tp_size)
    from sglang.srt.layers.dp_attention import get_attention_tp_size

    return int(get_attention_tp_size())


def workspace_bytes(runner: Any) -> int:
    """The bytes that AiterAttnBackend.__init__ takes for its decode workspace, beside the KV pool."""
    if uses_unified(runner.token_to_kv_pool):
        return 0
    config = runner.model_config
    rows = runner.req_to_token_pool.size * (config.num_attention_heads // attention_tp_size())
    return int(rows * -(-config.context_len // PARTITION) * (config.head_dim * 4 + 8))


def check_memory(runner: Any) -> None:
    """Raises DecodeError where the decode workspace does not fit into the free memory, or the kernel's offsets.

    Graph buffers are not counted: SGLang keeps memory back for those of the backend that decode was on.
    """
    import torch

    needed = workspace_bytes(runner)
    requests, tokens = runner.req_to_token_pool.size, runner.model_config.context_len
    head_dim = runner.model_config.head_dim
    partial_outputs = needed // (head_dim * 4 + 8) * head_dim
    if partial_outputs >= DECODE_REACH:
        raise DecodeError(
            f"{settings.PA.name}=1 is not served: {requests} requests of up to {tokens} tokens have {partial_outputs}"
            f" partial outputs, and AITER's kernel addresses {DECODE_REACH}; the results of others would be wrong: lower"
            f" --max-running-requests or --context-length, or {DECODE_ELSEWHERE}"
        )
    if not str(runner.device).startswith("cuda"):
        return
    free = torch.cuda.mem_get_info()[0]
    if needed > free:
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
    if needed > free:
        raise DecodeError(
            f"{settings.PA.name}=1 needs a decode workspace of {needed / 2**30:.2f} GiB ({needed} bytes) for"
            f" {requests} requests of up to {tokens} tokens, and {free / 2**30:.2f} GiB are free: lower"
            f" --max-running-requests, --context-length or --mem-fraction-static, or {DECODE_ELSEWHERE}"
        )


def with_shared_workspace(runner: Any, make: Callable[[], Any]) -> Any:
    """The backend that `make()` gives, on the workspace of the runner's others.

    Two-batch overlap and PD multiplexing build several, and one decode runs at a time. Their workspace
    is let go before the next one is built, so that there are never two, not even for a moment.
    """
    others = (RUNNER.on(runner) or RUNNER.keep(runner, RunnerNotes())).backends
    size = next((backend.workspace_buffer.shape for backend in others), None)
    for backend in others:
        backend.workspace_buffer = None
    decode = make()
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
    """Hand `init_cuda_graph_state` a `kv_indices` buffer with one entry for each token."""
    import torch

    original = decode.init_cuda_graph_state

    def init_cuda_graph_state(max_bs: int, max_num_tokens: int, kv_indices_buf: Any = None) -> Any:
        if kv_indices_buf is None:
            kv_indices_buf = torch.zeros(max_bs * decode.max_context_len, dtype=torch.int32, device=decode.device)
        return original(max_bs, max_num_tokens, kv_indices_buf)

    decode.init_cuda_graph_state = init_cuda_graph_state


# ---- the router ----


@functools.cache
def router_class() -> type:
    """SGLang's own router, for decode and idle batches only. The user's backend answers for what it does not define."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend

    class Chosen:
        """A default of SGLang's base class. It may not hide what the user's backend says, and an instance's own wins."""

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
