"""What the release has: which calls of the ASM kernel its `forward_extend` makes itself."""

import ast

from ...aiter_kernels import ASM_PREFILL, PAGED_PREFILL, PARAMETERS
from ...capability import APPLY, UPSTREAM, Verdict
from ...errors import Unsupported
from ...names import BACKEND
from ...source import Release, calls, enclosing_tests, mentions

EXTEND = "AiterAttnBackend.forward_extend"


def probe(release: Release) -> Verdict:
    extend = release.function(BACKEND, EXTEND)
    if asm_calls(release)[True]:
        return Verdict(UPSTREAM, "forward_extend has its own ASM branch for batches with a prefix")
    paged = calls(extend, PAGED_PREFILL)
    if len(paged) != 1:
        raise Unsupported(f"forward_extend calls {PAGED_PREFILL} {len(paged)} times, where one call is expected")
    by_name = {keyword.arg: getattr(keyword.value, "value", None) for keyword in paged[0].keywords}
    if len(paged[0].args) != len(PARAMETERS[PAGED_PREFILL]) or not by_name.keys() >= {
        "q_descale",
        "k_descale",
        "v_descale",
    }:
        reason = f"forward_extend casts the fp8 K/V pool before {PAGED_PREFILL}, or does not pass its descales there"
        raise Unsupported(reason)
    if by_name.get("causal") is not True or "softmax_scale" in by_name:
        raise Unsupported(f"forward_extend asks {PAGED_PREFILL} for something else than plain causal attention")
    return Verdict(APPLY, "forward_extend has no ASM branch for batches with a prefix")


def asm_calls(release: Release) -> dict[bool | None, list[ast.Call]]:
    """The ASM calls of forward_extend's own: for batches with a prefix (True), without one (False), for others (None).

    Raises Unsupported where none is known to be for a prefix and one may be, or where calls are made elsewhere.
    """
    extend = release.function(BACKEND, EXTEND)
    source = release.source(BACKEND)
    found: dict[bool | None, list[ast.Call]] = {True: [], False: [], None: []}
    for call in calls(extend, ASM_PREFILL):
        found[_asks_for_prefix(extend, call)].append(call)
    if found[None] and not found[True]:
        reason = f"forward_extend calls {ASM_PREFILL} under a condition that does not say whether there is a prefix"
        raise Unsupported(reason)
    imported = source.optional_imports("aiter") if source is not None else []
    if not any(found.values()) and any(name == ASM_PREFILL for _, name in imported):
        raise Unsupported(f"the module imports {ASM_PREFILL}, and forward_extend does not call it")
    return found


def _asks_for_prefix(extend: ast.AST, call: ast.Call) -> bool | None:
    for test in enclosing_tests(extend, call):
        negated = {id(n.operand) for n in ast.walk(test) if isinstance(n, ast.UnaryOp) and isinstance(n.op, ast.Not)}
        for asked in calls(test, "any"):
            if mentions(asked, "extend_prefix_lens_cpu"):
                return id(asked) not in negated
    return None
