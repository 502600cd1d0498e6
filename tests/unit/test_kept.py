"""What is kept on objects that are not ours, and where it is looked for."""

import inspect
import re

import pytest

from sglang_aiter_ext import kept
from sglang_aiter_ext.kept import Decline, DecodeNotes, Indices, Kept, RunnerNotes


class Thing:
    """Anything that takes attributes."""


class Router:
    """Answers for what it lacks with what another object has, as SGLang's routers of backends do."""

    def __init__(self, other):
        self.other = other

    def __getattr__(self, name):
        return getattr(self.other, name)


class Closed:
    __slots__ = ()


NOTE = Kept("note")


def test_what_is_kept_is_found_on_its_owner_and_on_no_other_until_something_is_kept_in_its_place():
    owner, other = Thing(), Thing()
    assert NOTE.on(owner) is None and NOTE.keep(owner, [1]) == [1]
    assert NOTE.on(owner) == [1] and NOTE.on(other) is None and Kept("another").on(owner) is None
    NOTE.keep(owner, [2])
    assert NOTE.on(owner) == [2]


def test_what_an_object_passes_on_from_another_or_from_its_class_is_not_its_own():
    inner = Thing()
    NOTE.keep(inner, 1)
    router = Router(inner)
    assert getattr(router, NOTE.attribute) == 1 and NOTE.on(router) is None
    derived = type("Derived", (Thing,), {NOTE.attribute: 1})()
    assert getattr(derived, NOTE.attribute) == 1 and NOTE.on(derived) is None


def test_an_object_that_takes_no_attribute_holds_nothing_and_says_so():
    assert NOTE.on(Closed()) is None and NOTE.on(None) is None
    with pytest.raises(AttributeError):
        NOTE.keep(Closed(), 1)


def all_kept():
    return {name: value for name, value in vars(kept).items() if isinstance(value, Kept)}


def test_the_table_of_the_module_names_each_thing_that_is_kept_and_no_other():
    rows = re.findall(r"^\| `(\w+)` \| .+ \| .+ \| .+ \|$", kept.__doc__, re.M)
    assert sorted(rows) == sorted(all_kept()) and len(rows) == len(set(rows)) > 3


def test_each_thing_is_kept_under_a_name_of_its_own_that_tells_whose_it_is():
    names = [value.attribute for value in all_kept().values()]
    assert len(set(names)) == len(names) and all(name.startswith("_sglang_aiter_ext_") for name in names)


def test_a_decline_has_the_text_that_its_arguments_make():
    assert Decline("why", "the layer has %d heads, not %s", (3, "four")).text == "the layer has 3 heads, not four"
    assert Decline("why", "the layer has none").text == "the layer has none"


@pytest.mark.parametrize("kind", [DecodeNotes, Decline, Indices])
def test_what_several_calls_share_does_not_change(kind):
    values = dict.fromkeys(inspect.signature(kind).parameters)
    assert values
    for name in values:
        with pytest.raises(AttributeError):
            setattr(kind(**values), name, 1)


def test_a_runners_notes_let_go_of_a_backend_that_nobody_else_has():
    notes, backend = RunnerNotes(), Thing()
    notes.backends.add(backend)
    assert list(notes.backends) == [backend] and not RunnerNotes().backends and notes.prefill_is_next is False
    del backend
    assert not notes.backends
