"""Calls are counted by what became of them."""

import pytest

from sglang_aiter_ext import counting, logs

pytestmark = pytest.mark.usefixtures("nothing_counted")


def test_calls_are_counted_by_outcome_and_reason_except_while_they_are_compiled(monkeypatch):
    for compiling in (False, True, False):
        monkeypatch.setattr(counting, "compiling", lambda compiling=compiling: compiling)
        counting.count("a", "paged", "why")
    counting.count("a", "asm")
    assert counting.snapshot() == {"a": {"paged/why": 2, "asm": 1}}
    assert counting.totals() == {("a", "paged", "why"): 2, ("a", "asm", ""): 1}


def test_until_torch_is_there_nothing_is_compiled():
    assert counting.compiling() is False


def test_what_was_counted_so_far_is_a_copy_that_later_calls_do_not_change():
    counting.count("a", "asm")
    before = counting.totals(), counting.snapshot()
    counting.count("a", "asm")
    assert before == ({("a", "asm", ""): 1}, {"a": {"asm": 1}})


def test_a_call_that_cannot_be_counted_is_one_line_and_under_strict_an_error(monkeypatch):
    lines = []
    monkeypatch.setattr(logs, "say", lambda level, message, *args: lines.append(message % args))
    monkeypatch.delenv("SGLANG_AITER_EXT_STRICT", raising=False)
    for _ in range(2):
        counting.count("a", ["no key"])
    assert lines == ["sglang_aiter_ext: calls are not counted: TypeError: unhashable type: 'list'"]
    monkeypatch.setenv("SGLANG_AITER_EXT_STRICT", "1")
    with pytest.raises(TypeError):
        counting.count("a", ["no key"])
