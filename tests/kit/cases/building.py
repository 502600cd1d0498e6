"""Building the backends: layer 0 that is linear, AITER that is missing, variables that cannot be read."""

from __future__ import annotations

import pathlib
import sys
import tempfile
from unittest import mock

from recording import Logs, Trace, forget, harness

LOGS = Logs()


def indexer(stack) -> None:
    """The model's configuration with the fields of sparse attention, as Qwen4-Exp has them."""
    for name, value in dict(n_heads=4, kv_heads=1, head_dim=128, budget=2048, compress_ratio=4).items():
        setattr(stack.model_config.hf_config, f"indexer_{name}", value)


def two_gpus(stack) -> None:
    """What SGLang answers from here on with --dcp-size 2, where one process cannot be both GPUs."""
    from sglang.srt.runtime_context import get_parallel

    answers = dict(attn_tp_size=2, attn_dcp_size=2, attn_dcp_rank=0)
    mock.patch.multiple(type(get_parallel()), create=True, **answers).start()


#: What a user's command line or model asks -> how the stack is built.
ASKED = {
    "nothing": {}, "deterministic": dict(enable_deterministic_inference=True), "context parallel": dict(before_build=two_gpus),
    "speculative": dict(speculative_algorithm="NGRAM", speculative_num_draft_tokens=4, page_size=1),
    "disaggregated": dict(disaggregation_mode="prefill"), "indexer": dict(before_build=indexer),
}  # fmt: skip


def asked() -> dict:
    """The backend of the full-attention layers, how many AITER backends were built, and what was logged of it."""
    import sglang.srt.layers.attention.attention_registry as registry

    out, built, aiter = {}, [], registry.ATTENTION_BACKENDS["aiter"]
    registry.ATTENTION_BACKENDS["aiter"] = lambda runner: built.append(runner) or aiter(runner)
    for name, options in ASKED.items():
        forget()
        LOGS.take()
        built.clear()
        stack = harness.Stack(backend="triton", fp8=False, **options)
        mock.patch.stopall()
        logs = [line for _, line in LOGS.take() if line.startswith("decode_pa: ")]
        out[name] = [type(stack.backend.full_attn_backend).__name__, len(built), *logs]
    return out


def v_head_dim() -> dict:
    """The AITER backend of a model whose layer 0 is linear, and of a pool without get_v_head_dim."""
    out = {}
    try:
        stack = harness.Stack(backend="aiter", fp8=False)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    pool = stack.token_to_kv_pool
    out["v_head_dim"] = stack.backend.full_attn_backend.v_head_dim
    out["left_on_the_pool"] = "get_value_buffer" in vars(pool)
    try:
        pool.get_value_buffer(0)
        out["layer_0"] = "answered"
    except ValueError:
        out["layer_0"] = "ValueError"
    stack.grow({1: 20, 2: 33})
    with Trace() as trace:
        result = stack.decode([1, 2])
    out.update(kernels=trace.kernels, error=result.error())
    return out


def plain_pool() -> dict:
    """A dense model's pool, whose class has no get_v_head_dim: nothing stands in for anything."""
    stack = harness.Stack(backend="aiter", fp8=False, build=False)
    pool = stack.token_to_kv_pool.full_kv_pool
    seen = []
    original = pool.get_value_buffer
    pool.get_value_buffer = lambda layer_id: seen.append(layer_id) or original(layer_id)
    mine = pool.get_value_buffer
    stack.runner.token_to_kv_pool = pool
    from sglang.srt.layers.attention.aiter_backend import AiterAttnBackend

    backend = AiterAttnBackend(stack.runner)
    return {"has": hasattr(type(pool), "get_v_head_dim"), "asked": seen, "same": pool.get_value_buffer is mine,
            "v_head_dim": backend.v_head_dim}  # fmt: skip


KINDS = {
    "raises": "raise RuntimeError('No HIP GPUs are available')",
    "os_error": "raise OSError('libamdhip64.so.6: cannot open shared object file')",
    "namespace": None,
    "symbol_missing": "def mha_batch_prefill_func(): pass",
    "other_parameters": "def paged_attention_ragged(out, query, workspace): pass",
}


def _replace_aiter(folder: str | None) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        del sys.modules[name]
    sys.path[:] = [entry for entry in sys.path if not entry.endswith("reference") and "no-aiter" not in entry]
    if folder is not None:
        sys.path.insert(0, folder)


def without_aiter() -> dict:
    """Each way for AITER to be unusable: the error of the build, and all that was logged."""
    out = {}
    for kind in ("absent", *KINDS):
        folder = None
        if kind != "absent":
            folder = tempfile.mkdtemp(prefix="no-aiter-")
            package = pathlib.Path(folder, "aiter")
            package.mkdir()
            if KINDS[kind] is not None:
                package.joinpath("__init__.py").write_text(KINDS[kind] + "\n")
        _replace_aiter(folder)
        forget()
        LOGS.take()
        try:
            stack = harness.Stack(backend="triton")
            out[kind] = {"built": type(stack.backend.full_attn_backend).__name__}
        except Exception as error:
            out[kind] = {"error": f"{type(error).__name__}: {error}"}
        out[kind]["logs"] = LOGS.take()
    return out


def wrong_gpu() -> dict:
    """ROCm GPUs, of which one is not an Instinct, and one has no fp8."""
    import types

    import torch

    torch.version.hip = "6.4"
    out = {}
    for arch, dtype in (
        ("gfx1100:sramecc-", torch.bfloat16), ("gfx942:sramecc+:xnack-", harness.FP8), ("gfx90a:sramecc+", harness.FP8),
        ("gfx90a", torch.bfloat16),
    ):  # fmt: skip
        torch.cuda.current_device = lambda: 0
        torch.cuda.get_device_properties = lambda device, arch=arch: types.SimpleNamespace(gcnArchName=arch)
        from sglang_aiter_ext import source
        from sglang_aiter_ext.capabilities.decode_pa import building, release

        try:
            building.check_aiter(release.facts(source.installed()), types.SimpleNamespace(kv_cache_dtype=dtype))
            out[arch] = "usable"
        except Exception as error:
            out[arch] = f"{type(error).__name__}: {error}"
    return out


def depth(function) -> int:
    """How many wrappers lie around a function."""
    count = 0
    while hasattr(function, "__wrapped__"):
        function, count = function.__wrapped__, count + 1
    return count


def states() -> dict:
    """What the variables of this process make of the capabilities, at import and at build."""
    out = {}
    try:
        import sglang.srt.layers.attention.aiter_backend as aiter_backend
        import sglang.srt.layers.attention.attention_registry as registry
        import sglang.srt.layers.attention.hybrid_linear_attn_backend as hybrid
    except Exception as error:
        return {"import_error": f"{type(error).__name__}: {error}", "logs": LOGS.take()}
    out["wrapped"] = {
        "attn_backend_wrapper": depth(registry.attn_backend_wrapper),
        "forward_decode": depth(hybrid.HybridLinearAttnBackend.__dict__["forward_decode"]),
        "forward_extend": depth(aiter_backend.AiterAttnBackend.__dict__["forward_extend"]),
    }
    out["imported"] = sorted(name for name in sys.modules if name.partition(".")[0] in ("sglang_aiter_ext", "wrapt"))
    out["logs"] = LOGS.take()
    try:
        out["built"] = type(harness.Stack(backend="triton").backend.full_attn_backend).__name__
    except Exception as error:
        out["build_error"] = f"{type(error).__name__}: {error}"
    if "sglang_aiter_ext" in sys.modules:
        import sglang_aiter_ext

        out["status"] = {s["name"]: [s["enabled"], s["state"]] for s in sglang_aiter_ext.status()}
    return out


def late() -> dict:
    """activate() after SGLang was imported: aliases taken before point at the wrapped function, once."""
    import sglang.srt.layers.attention.aiter_backend as aiter_backend
    import sglang.srt.layers.attention.attention_registry as registry
    import sglang.srt.layers.attention.hybrid_linear_attn_backend  # noqa: F401

    try:
        import sglang.srt.model_executor.model_runner_components.attention_backend_setup as user
    except ImportError:
        import sglang.srt.model_executor.model_runner as user
    before = user.attn_backend_wrapper
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[3]))
    import sglang_aiter_ext

    for _ in range(3):
        sglang_aiter_ext.activate()
    layers = depth(registry.attn_backend_wrapper)
    stack = harness.Stack(backend="triton")
    stack.grow({1: 9})
    with Trace() as trace:
        stack.decode([1])
    import importlib

    supported = sum(
        hasattr(vars(m).get("is_gfx95_supported"), "__wrapped__")
        for n, m in list(sys.modules.items())
        if n.startswith("sglang.")
    )

    once = depth(aiter_backend.AiterAttnBackend.__dict__["forward_extend"])
    importlib.reload(aiter_backend)
    return {
        "supported": supported, "reloaded": depth(aiter_backend.AiterAttnBackend.__dict__["forward_extend"]) == once,
        "original": before is registry.attn_backend_wrapper.__wrapped__, "layers": layers, "alias": user.attn_backend_wrapper is registry.attn_backend_wrapper,
        "built": type(stack.backend.full_attn_backend).__name__, "kernels": trace.kernels,
    }  # fmt: skip


def plugin() -> dict:
    """SGLang's own plugin loader, before its attention code is imported."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    return _loaded()


def plugin_late() -> dict:
    """SGLang's own plugin loader, when the target modules and their users are imported already."""
    import sglang.srt.layers.attention.aiter_backend
    import sglang.srt.layers.attention.attention_registry
    import sglang.srt.layers.attention.hybrid_linear_attn_backend
    import sglang.srt.model_executor.model_runner  # noqa: F401

    return plugin()


def _loaded() -> dict:
    import sglang.srt.layers.attention.attention_registry as registry

    import sglang_aiter_ext

    stack = harness.Stack(backend="triton")
    return {
        "layers": depth(registry.attn_backend_wrapper), "from": "site" in sglang_aiter_ext.__file__,
        "built": type(stack.backend.full_attn_backend).__name__,
    }  # fmt: skip
