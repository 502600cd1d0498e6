"""What the probe of asm_context_prefill says of a release, one condition at a time, on sources of a few lines."""

import ast

import pytest
from made_releases import ASM, FIRST, PAGED, PREFIX, extending, said

from sglang_aiter_ext.capabilities.asm_context_prefill import CAPABILITY
from sglang_aiter_ext.capabilities.asm_context_prefill.release import asm_calls

IMPORT = "try:\n from aiter import flash_attn_varlen_fp8_pertensor_func\nexcept ImportError: 0\n"
#: Name -> (lines of forward_extend, verdict, what the reason says, text before the class).
EXTEND = {
    "no ASM call": ([PAGED], "apply", "no ASM branch"),
    "an ASM call for a prefix": ([PREFIX, PAGED], "upstream", "own ASM branch"),
    "one for a first chunk": ([FIRST, PAGED], "apply", "no ASM branch"),
    "both": ([FIRST, PREFIX, PAGED], "upstream", "own ASM branch"),
    "one under another condition": ([f"if some(): {ASM}", PAGED], "unsupported", "does not say"),
    "one for any of others": ([f"if any(others): {ASM}", PAGED], "unsupported", "does not say"),
    "one unknown and one for a prefix": ([f"if x: {ASM}", PREFIX, PAGED], "upstream", "own ASM"),
    "not of something else": ([PREFIX.replace("if ", "if not off and "), PAGED], "upstream", "own"),
    "another operator before": ([PREFIX.replace("if ", "if -"), PAGED], "upstream", "own ASM"),
    "no paged call": (["0"], "unsupported", "0 times"),
    "two paged calls": ([PAGED, PAGED], "unsupported", "2 times"),
    "seven arguments": ([PAGED.replace("d, e", "d")], "unsupported", "casts the fp8"),
    "a descale is missing": ([PAGED.replace("v_descale=s", "x=s")], "unsupported", "casts the fp8"),
    "not causal": ([PAGED.replace("True", "False")], "unsupported", "something else"),
    "another scale": ([PAGED.replace("q_descale", "softmax_scale=1, q_descale")], "unsupported", "something"),
    "an import that is not called": ([PAGED], "unsupported", "does not call it", IMPORT),
    "another import": ([PAGED], "apply", "no ASM branch", IMPORT.replace("flash_attn", "other")),
    "an import that is called": ([FIRST, PAGED], "apply", "no ASM branch", IMPORT),
}


@pytest.mark.parametrize("case", EXTEND)
def test_each_condition_of_forward_extend(tmp_path, case):
    lines, verdict, words, *before = EXTEND[case]
    found, reason = said(CAPABILITY.probe, extending(tmp_path, lines, *before))
    assert found == verdict and words in reason


def test_the_releases_own_calls_are_told_by_the_batches_that_they_are_for(tmp_path):
    found = asm_calls(extending(tmp_path, [FIRST, f"if some(): {ASM}", PREFIX, PREFIX, PAGED]))
    assert {which: [call.lineno for call in calls] for which, calls in found.items()} == {
        False: [3], None: [4], True: [5, 6]
    }  # fmt: skip
    assert all(ast.unparse(call) == ASM for calls in found.values() for call in calls)


@pytest.mark.parametrize("own_branch", [True, False])
def test_the_check_of_the_gpu_is_wrapped_only_where_the_release_has_a_branch_that_asks_it(tmp_path, own_branch):
    release = extending(tmp_path, [FIRST, PAGED] if own_branch else [PAGED])
    names = [name.rpartition("aiter_backend.")[2] for name in CAPABILITY.wrappers(release)]
    asks = ["is_gfx95_supported"] if own_branch else []
    assert sorted(names) == ["AiterAttnBackend.forward_extend", *asks, "mha_batch_prefill_func"]
