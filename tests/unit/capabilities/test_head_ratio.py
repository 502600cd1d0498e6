"""The decisions of head_ratio one condition at a time, on plain objects and sources of a few lines."""

from types import SimpleNamespace

import pytest
from made_releases import ASM, extending, said

from sglang_aiter_ext import counting, logs
from sglang_aiter_ext.capabilities import head_ratio

pytestmark = pytest.mark.usefixtures("nothing_counted")
GFX = f"if is_gfx95_supported(): {ASM}"
GQA = f"if is_gfx95_supported() and supports_gqa: {ASM}"
#: Name -> (lines of forward_extend, verdict, what the reason says).
EXTEND = {
    "neither": (["0"], "not_applicable", "no ASM call"),
    "the question without the call": (["is_gfx95_supported()"], "unsupported", "does not call"),
    "the call without the question": ([ASM], "unsupported", "does not ask"),
    "no head ratio": ([GFX], "apply", "before 1 of the ASM calls"),
    "a head ratio": ([GQA], "upstream", "checks the head ratio"),
    "one of two has a head ratio": ([GQA, GFX], "apply", "before 1 of the ASM calls"),
    "one of two asks": ([GFX, f"if some(): {ASM}"], "unsupported", "does not ask"),
}


@pytest.mark.parametrize("case", EXTEND)
def test_each_condition_of_forward_extend(tmp_path, case):
    lines, verdict, words = EXTEND[case]
    found, reason = said(head_ratio.probe, extending(tmp_path, lines))
    assert found == verdict and words in reason


def extend(heads, kv_heads=4, mla=False, **kwargs):
    """What the release's check of the GPU answers inside of forward_extend."""
    layer = SimpleNamespace(tp_q_head_num=heads, tp_k_head_num=kv_heads)
    args = (1, 2, 3) if kwargs else (1, 2, 3, layer, 4)
    original = lambda *args, **kwargs: asks()  # noqa: E731
    return head_ratio.forward_extend(original, SimpleNamespace(use_mla=mla), args, kwargs)


def asks():
    return head_ratio.is_gfx95_supported(lambda: "asked", None, (), {})


@pytest.mark.parametrize("heads, mla, kept_out", [(24, False, True), (24, True, False), (16, False, False)])
def test_the_asm_branch_is_kept_out_for_an_uncovered_ratio_only(heads, mla, kept_out):
    found = extend(heads, mla=mla)
    assert found is False if kept_out else found == "asked"
    assert counting.snapshot() == ({"head_ratio": {"paged": 1}} if kept_out else {})


def test_after_such_a_layer_the_release_is_asked_again():
    assert (extend(24), asks(), extend(16)) == (False, "asked", "asked")


def test_a_ratio_that_is_not_covered_is_logged_once_with_its_heads(caplog):
    caplog.set_level("INFO", logger=logs.logger.name)
    for heads in (24, 12):
        extend(heads)
    (record,) = caplog.records
    assert "head_ratio: the paged kernel serves 24 query heads over 4 KV heads" in record.getMessage()
    assert record.levelname == "WARNING" and counting.snapshot() == {"head_ratio": {"paged": 2}}


def test_a_call_that_forward_extend_would_not_take_is_the_releases_own():
    assert extend(24, unknown=1) == "asked" and counting.snapshot() == {}


def test_both_are_wrapped_in_every_release_where_it_applies():
    names = {
        name.rpartition("aiter_backend.")[2]: wrapper for name, wrapper in head_ratio.CAPABILITY.wrappers(None).items()
    }
    assert names == {
        "is_gfx95_supported": head_ratio.is_gfx95_supported,
        "AiterAttnBackend.forward_extend": head_ratio.forward_extend,
    }
