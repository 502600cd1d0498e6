"""The decisions of gather_reuse one condition at a time, on plain objects and sources of a few lines."""

import gc
import weakref
from types import SimpleNamespace

import pytest
from made_releases import FIRST, PREFIX, extending, said

from sglang_aiter_ext import counting
from sglang_aiter_ext.capabilities import gather_reuse
from sglang_aiter_ext.kept import INDICES

pytestmark = pytest.mark.usefixtures("nothing_counted")
BUILD = "_asm_context_prefill_gather_indices(a, b, c, d, e)"
BUILDER = "def _asm_context_prefill_gather_indices(kv_indptr, kv_indices, seq_lens, num_kv_slots, forward_mode): 0\n"
ONCE = "\n def _asm_context_prefill_indices(self): 0"
#: Name -> (lines of forward_extend, verdict, what the reason says, text before and after the class).
EXTEND = {
    "built at every layer": ([BUILD], "apply", "at every layer", BUILDER),
    "built at every layer from something else": ([BUILD], "unsupported", "is the order expected", BUILDER.replace("kv_indptr, kv_indices", "kv_indices, kv_indptr")),
    "built at every layer by nobody": ([BUILD], "unsupported", "has no _asm_context_prefill_gather_indices"),
    "built once": ([PREFIX], "upstream", "once a batch", "", ONCE),
    "built in another way": ([PREFIX], "unsupported", "not known here"),
    "nothing to build": ([FIRST], "not_applicable", "no ASM branch"),
}  # fmt: skip


@pytest.mark.parametrize("case", EXTEND)
def test_each_condition_of_forward_extend(tmp_path, case):
    lines, verdict, words, *around = EXTEND[case]
    found, reason = said(gather_reuse.probe, extending(tmp_path, lines, *around))
    assert found == verdict and words in reason


class Batch(SimpleNamespace):
    """What a ForwardBatch says of itself."""


class Answer:
    """What the release's builder gives: a new object each time."""


def indices(table="table", slots=9, metadata=None, batch=None, **kwargs):
    """What the release's builder answers inside of forward_extend."""
    arguments = ("indptr", table, "lengths", slots, "mode")

    def original(*args):
        return gather_reuse.gather_indices(lambda *a, **k: Answer(), None, arguments, kwargs)

    backend = SimpleNamespace(forward_metadata=metadata)
    return gather_reuse.forward_extend(original, backend, (1, 2, 3, 4, batch), {})


def test_the_indices_of_a_batch_are_built_once():
    metadata, batch = SimpleNamespace(), Batch()
    first = indices(metadata=metadata, batch=batch)
    assert indices(metadata=metadata, batch=batch) is first
    assert counting.snapshot() == {"gather_reuse": {"built": 1, "reused": 1}}
    kept = INDICES.on(metadata)
    assert (kept.batch(), kept.table, kept.num_kv_slots, kept.answer) == (batch, "table", 9, first)


def test_a_batch_is_not_held_by_what_was_built_for_it():
    metadata, batch = SimpleNamespace(), Batch()
    indices(metadata=metadata, batch=batch)
    alive = weakref.ref(batch)
    gc.disable()
    try:
        del batch
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "changed", [dict(batch=Batch()), dict(table="other"), dict(slots=8), dict(metadata=SimpleNamespace())]
)
def test_another_batch_table_or_pool_is_built_anew(changed):
    given = dict(metadata=SimpleNamespace(), batch=Batch())
    first = indices(**given)
    assert indices(**{**given, **changed}) is not first
    assert counting.snapshot() == {"gather_reuse": {"built": 2}}


def test_a_call_made_in_another_way_is_the_releases_own():
    metadata, batch = SimpleNamespace(), Batch()
    indices(metadata=metadata, batch=batch, by_name=1)
    for scope, args in ((None, (1, 2, 3, 4, 5)), ((metadata, batch), (1, 2, 3))):
        call = (lambda *args: args, None, args, {})
        assert gather_reuse._batch.call(scope, gather_reuse.gather_indices, call, {}) == args
    assert gather_reuse.forward_extend(lambda *args: args, SimpleNamespace(), (1, 2), {}) == (1, 2)
    assert vars(metadata) == {} and counting.snapshot() == {}


def test_the_builder_is_understood_however_its_arguments_are_given():
    names = dict(kv_indptr="indptr", seq_lens="lengths", forward_mode="mode", num_kv_slots=9, kv_indices="table")
    assert gather_reuse.bind_builder(**names) == ("table", 9)
    assert gather_reuse.bind_builder("indptr", "table", "lengths", 9, "mode") == ("table", 9)


def test_both_are_wrapped_in_every_release_where_it_applies():
    wrappers = gather_reuse.CAPABILITY.wrappers(None)
    assert {name.rpartition("aiter_backend.")[2]: wrapper for name, wrapper in wrappers.items()} == {
        "_asm_context_prefill_gather_indices": gather_reuse.gather_indices,
        "AiterAttnBackend.forward_extend": gather_reuse.forward_extend,
    }
