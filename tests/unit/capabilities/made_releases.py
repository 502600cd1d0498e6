"""Releases of a few lines, for what the capabilities read of them."""

from conftest import written

from sglang_aiter_ext.errors import Unsupported
from sglang_aiter_ext.names import BACKEND, LINEAR, REGISTRY
from sglang_aiter_ext.source import Release

PLACES = {name.rpartition(".")[2]: name for name in (REGISTRY, LINEAR, BACKEND)}
PLACES["model_runner"] = "sglang.srt.model_executor.model_runner"


def release_of(folder, **modules):
    """A release of the modules given, each by the last part of its name."""
    files = {"/".join(PLACES[name].split(".")[1:]) + ".py": text for name, text in modules.items()}
    return Release(written(folder, files))


def said(probe, release):
    """The verdict of a probe and its reason."""
    try:
        return tuple(probe(release))
    except Unsupported as error:
        return "unsupported", str(error)


#: Lines of a release's forward_extend.
PAGED = "mha_batch_prefill_func(q, k, v, a, b, c, d, e, causal=True, q_descale=s, k_descale=s, v_descale=s)"
ASM = "flash_attn_varlen_fp8_pertensor_func()"
PREFIX = f"if any(forward_batch.extend_prefix_lens_cpu): {ASM}"
FIRST = f"if q and not any(forward_batch.extend_prefix_lens_cpu): {ASM}"


def extending(folder, lines, before="", after=""):
    """A release whose forward_extend has these lines, with text before its class and at the end of it."""
    body = "".join(f"\n  {line}" for line in lines)
    text = f"{before}class AiterAttnBackend:\n def forward_extend(self, forward_batch):{body}{after}\n"
    return release_of(folder, aiter_backend=text)
