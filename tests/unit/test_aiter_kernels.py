"""What is known of AITER's kernels, and how an AITER that is imported is asked for them."""

import sys
from types import ModuleType

import pytest

from sglang_aiter_ext import aiter_kernels
from sglang_aiter_ext.aiter_kernels import ASM_PREFILL, KEYWORDS, PAGED_PREFILL, PARAMETERS, RAGGED_DECODE


def taking(*names):
    """A function with these parameters."""
    return eval(f"lambda {', '.join(names)}: 0")


def all_of(name):
    return [*PARAMETERS[name], *KEYWORDS[name]]


def aiter_with(monkeypatch, **attributes):
    aiter = ModuleType("aiter")
    aiter.__dict__.update(attributes)
    monkeypatch.setitem(sys.modules, "aiter", aiter)
    return aiter


# ---- arguments by name ----


def test_arguments_are_told_by_the_names_of_their_parameters_however_they_are_given():
    given = aiter_kernels.by_name(PAGED_PREFILL, ("query", "key"), {"v": "value", "causal": True})
    assert given == {"q": "query", "k": "key", "v": "value", "causal": True}
    everything = aiter_kernels.by_name(RAGGED_DECODE, range(17), {})
    assert list(everything.values()) == list(range(17)) and list(everything) == list(PARAMETERS[RAGGED_DECODE])


def test_an_argument_that_has_no_name_here_is_an_error():
    with pytest.raises(TypeError, match="is given 9 arguments by position, where 8 are known"):
        aiter_kernels.by_name(PAGED_PREFILL, range(9), {})


def test_values_take_the_place_of_the_arguments_that_they_name_and_of_no_other():
    given = tuple(range(17))
    found = aiter_kernels.with_values(RAGGED_DECODE, given, {"scale": "a", "v_scale": "b"})
    assert found == [*range(5), "a", *range(6, 16), "b"] and given == tuple(range(17))
    assert aiter_kernels.with_values(RAGGED_DECODE, given, {}) == list(given)
    with pytest.raises(ValueError):
        aiter_kernels.with_values(RAGGED_DECODE, given, {"softmax_scale": 1})


def test_a_value_for_an_argument_that_was_not_given_by_position_is_an_error():
    with pytest.raises(IndexError):
        aiter_kernels.with_values(RAGGED_DECODE, range(5), {"scale": 1})


def test_each_kernel_has_leading_parameters_and_keywords_and_no_name_twice():
    assert PARAMETERS.keys() == KEYWORDS.keys() == {PAGED_PREFILL, ASM_PREFILL, RAGGED_DECODE}
    assert all(len(set(all_of(name))) == len(all_of(name)) for name in PARAMETERS)


# ---- the AITER that is imported ----


def test_a_kernel_is_the_one_that_the_imported_aiter_has_now(monkeypatch):
    aiter_with(monkeypatch, **{RAGGED_DECODE: "one"})
    assert aiter_kernels.imported(RAGGED_DECODE) == "one"
    aiter_with(monkeypatch, **{RAGGED_DECODE: "another"})
    assert aiter_kernels.imported(RAGGED_DECODE) == "another"


@pytest.mark.parametrize(
    "attributes, words",
    [
        ({"__file__": "f", RAGGED_DECODE: taking(*PARAMETERS[RAGGED_DECODE])}, None),
        ({RAGGED_DECODE: taking(*PARAMETERS[RAGGED_DECODE])}, "empty namespace package"),
        ({"__file__": "f"}, f"lacks {RAGGED_DECODE}"), ({"__file__": "f", RAGGED_DECODE: 0}, "cannot be read"),
        ({"__file__": "f", RAGGED_DECODE: taking("out", "query")}, "f: paged_attention_ragged has parameter 1 'query'"),
    ],
)  # fmt: skip
def test_why_aiter_cannot_serve_a_kernel(monkeypatch, attributes, words):
    aiter_with(monkeypatch, **attributes)
    problem = aiter_kernels.import_problem(RAGGED_DECODE)
    assert problem is None if words is None else words in problem
    monkeypatch.setitem(sys.modules, "aiter", None)
    assert aiter_kernels.import_problem(RAGGED_DECODE).startswith("import aiter fails: ModuleNotFoundError: ")


def test_the_first_kernel_that_cannot_be_served_is_the_one_that_is_named(monkeypatch):
    has = {ASM_PREFILL: taking(*all_of(ASM_PREFILL)), RAGGED_DECODE: taking("out")}
    aiter_with(monkeypatch, __file__="f", **has)
    assert aiter_kernels.import_problem(ASM_PREFILL) is None
    assert aiter_kernels.import_problem(ASM_PREFILL, PAGED_PREFILL, RAGGED_DECODE) == f"f lacks {PAGED_PREFILL}"
    assert aiter_kernels.import_problem() is None


def test_an_empty_folder_that_is_imported_is_named_by_its_places(monkeypatch):
    aiter_with(monkeypatch, __path__=["/a", "/b"])
    assert aiter_kernels.import_problem().startswith("aiter at /a, /b is an empty namespace package, not AITER")


def test_a_kernel_needs_its_leading_parameters_in_order_and_its_keywords_anywhere():
    name = ASM_PREFILL
    leading, keywords = list(PARAMETERS[name]), list(KEYWORDS[name])
    assert aiter_kernels.parameter_problem(name, [*leading, "more", *keywords]) is None
    assert "parameter 9 'nothing'" in aiter_kernels.parameter_problem(name, leading[:-1])
    assert "parameter 0 'k' where 'q'" in aiter_kernels.parameter_problem(name, [*leading[1:], *keywords])
    assert aiter_kernels.parameter_problem(name, [*leading, "causal"]) == f"{name} takes no 'softmax_scale'"
