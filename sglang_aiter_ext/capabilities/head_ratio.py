"""head_ratio: a model that the ASM kernels do not cover reaches the paged kernel instead of wrong heads.

From 0.5.17 to 0.5.19 `forward_extend` calls the gfx950 fp8 ASM kernel for any ratio of query
to KV heads. That kernel finds the KV head by a shift, so it is right for powers of two: with 24 query
heads over 4 KV heads, heads of the result are wrong or NaN, or the process ends. The branch
asks `is_gfx95_supported()` at every call: inside a call for such a layer, the answer is no.
"""

import ast
from collections.abc import Mapping
from typing import Any

from .. import logs
from ..aiter_kernels import ASM_GPU, ASM_PREFILL
from ..capability import APPLY, NOT_APPLICABLE, UPSTREAM, Args, Capability, Kwargs, Needs, Verdict, Wrapper
from ..counting import count
from ..errors import Unsupported
from ..names import BACKEND
from ..source import Release, calls, enclosing_tests, mentions
from ..wrapping import Scope
from .layers import bind_extend, covered_ratio

NAME = "head_ratio"


def probe(release: Release) -> Verdict:
    extend = release.function(BACKEND, "AiterAttnBackend.forward_extend")
    asm = calls(extend, ASM_PREFILL)
    if not asm and not mentions(extend, "is_gfx95_supported"):
        return Verdict(NOT_APPLICABLE, "forward_extend makes no ASM call of its own")
    if not asm:
        raise Unsupported(f"forward_extend asks is_gfx95_supported() and does not call {ASM_PREFILL}")
    conditions = [" and ".join(ast.unparse(test) for test in enclosing_tests(extend, call)) for call in asm]
    unguarded = [words for words in conditions if "supports_gqa" not in words]
    if not unguarded:
        return Verdict(UPSTREAM, "forward_extend checks the head ratio before each of its ASM calls")
    if not all("is_gfx95_supported()" in words for words in unguarded):
        reason = "forward_extend has an ASM call without a head-ratio guard that does not ask is_gfx95_supported()"
        raise Unsupported(reason)
    return Verdict(APPLY, f"the head ratio is not checked before {len(unguarded)} of the ASM calls of forward_extend")


#: True inside a call of forward_extend for a layer that the ASM kernels do not cover.
_uncovered = Scope()


def forward_extend(original: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    call = bind_extend(args, kwargs)
    if call is None or instance.use_mla or covered_ratio(call.layer):
        return original(*args, **kwargs)
    count(NAME, "paged")
    text = "the paged kernel serves %d query heads over %d KV heads, which this release's ASM calls do not check"
    logs.once(NAME, "paged", text, call.layer.tp_q_head_num, call.layer.tp_k_head_num)
    return _uncovered.call(True, original, args, kwargs)


def is_gfx95_supported(original: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    return False if _uncovered.value else original(*args, **kwargs)


def wrappers(release: Release) -> Mapping[str, Wrapper]:
    return {
        f"{BACKEND}.is_gfx95_supported": is_gfx95_supported,
        f"{BACKEND}.AiterAttnBackend.forward_extend": forward_extend,
    }


CAPABILITY = Capability(
    name=NAME,
    summary="layers whose head ratio the ASM kernels do not cover reach the paged kernel",
    why="the release's own ASM calls do not check the ratio, and an uncovered one gives wrong heads and NaN, or ends the process",
    upstream=("https://github.com/sgl-project/sglang/pull/38467",),
    until="0.5.20",
    switch=None,
    kernels=(),
    needs=(Needs(BACKEND, "AiterAttnBackend.forward_extend", leading="q k v layer forward_batch", mentions="use_mla"),),
    probe=probe,
    wrappers=wrappers,
    architectures=(ASM_GPU,),
)
