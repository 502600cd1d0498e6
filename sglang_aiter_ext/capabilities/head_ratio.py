"""head_ratio: a model the ASM kernels do not cover reaches the paged kernel instead of crashing.

From 0.5.17 to 0.5.19 `forward_extend` calls the gfx950 fp8 ASM kernel for any ratio of query
to KV heads. That kernel covers a few; a 24-query, 4-KV-head model ends the process. The branch
asks `is_gfx95_supported()` at every call: inside a call for such a layer, the answer is no.
"""

from __future__ import annotations

import ast
from types import ModuleType
from typing import Any

from .. import activation
from ..activation import Args, Kwargs
from ..bootstrap import ATTENTION
from ..capability import APPLY, NOT_APPLICABLE, UPSTREAM, Capability, Needs, Unsupported, Verdict
from ..counting import count, log_once
from ..installed import Release, calls, enclosing_tests, mentions
from ..layers import bind_extend, covered_ratio

NAME = "head_ratio"
BACKEND = "srt.layers.attention.aiter_backend"
KERNEL = "flash_attn_varlen_fp8_pertensor_func"


def probe(release: Release) -> Verdict:
    extend = release.function(BACKEND, "AiterAttnBackend.forward_extend")
    asm = calls(extend, KERNEL)
    if not asm and not mentions(extend, "is_gfx95_supported"):
        return Verdict(NOT_APPLICABLE, "forward_extend makes no ASM call of its own")
    if not asm:
        raise Unsupported(f"forward_extend asks is_gfx95_supported() and does not call {KERNEL}")
    conditions = [" and ".join(ast.unparse(test) for test in enclosing_tests(extend, call)) for call in asm]
    unguarded = [words for words in conditions if "supports_gqa" not in words]
    if not unguarded:
        return Verdict(UPSTREAM, "forward_extend checks the head ratio before each of its ASM calls")
    if not all("is_gfx95_supported()" in words for words in unguarded):
        raise Unsupported(
            "forward_extend has an ASM call without a head-ratio guard that does not ask is_gfx95_supported()"
        )
    return Verdict(APPLY, f"forward_extend has {len(unguarded)} ASM branch(es) that do not check the head ratio")


#: True inside forward_extend for a layer the ASM kernels do not cover.
_scope = activation.Scope()


def forward_extend(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    try:
        _, _, layer, _, _ = bind_extend(*args, **kwargs)
    except TypeError:
        return wrapped(*args, **kwargs)
    if instance.use_mla or covered_ratio(layer):
        return wrapped(*args, **kwargs)
    count(NAME, "paged")
    log_once(
        NAME, "paged", "the paged kernel serves %d query heads over %d KV heads, which this release's ASM calls do not check",
        layer.tp_q_head_num, layer.tp_k_head_num,
    )  # fmt: skip
    return _scope.call(True, wrapped, args, kwargs)


def is_gfx95_supported(wrapped: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    return False if _scope.value else wrapped(*args, **kwargs)


def install(module: ModuleType, release: Release) -> None:
    activation.wrap(module, "is_gfx95_supported", is_gfx95_supported)
    activation.wrap(module, "AiterAttnBackend.forward_extend", forward_extend)


CAPABILITY = Capability(
    name=NAME,
    summary="layers whose head ratio the ASM kernels do not cover reach the paged kernel",
    why="the release's own ASM calls do not check the ratio, and an uncovered one ends the process",
    wraps=("AiterAttnBackend.forward_extend", "aiter_backend.is_gfx95_supported"),
    upstream=("https://github.com/sgl-project/sglang/pull/38467",),
    until="0.5.20",
    switch=None,
    targets=(f"{ATTENTION}.aiter_backend",),
    kernels=(),
    needs=(
        Needs(
            BACKEND,
            "AiterAttnBackend.forward_extend",
            leading=("q", "k", "v", "layer", "forward_batch"),
            mentions=("use_mla",),
        ),
    ),
    probe=probe,
    install=install,
)
