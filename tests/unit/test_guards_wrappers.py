"""The decisions of head_ratio, gather_reuse and v_head_dim one condition at a time, on plain objects; and what holds a wrapper."""

from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from sglang_aiter_ext import activation, counting
from sglang_aiter_ext.capabilities import gather_reuse, head_ratio, v_head_dim

pytestmark = pytest.mark.usefixtures("nothing_counted")


class Batch(SimpleNamespace):
    """What a ForwardBatch says of itself."""


@pytest.mark.parametrize("heads, mla, kept_out", [(24, False, True), (24, True, False), (16, False, False)])
def test_the_asm_branch_is_kept_out_for_an_uncovered_ratio_only(heads, mla, kept_out):
    layer = SimpleNamespace(tp_q_head_num=heads, tp_k_head_num=4)
    wrapped = lambda *args: head_ratio.is_gfx95_supported(lambda: "asked", None, (), {})  # noqa: E731
    found = head_ratio.forward_extend(wrapped, SimpleNamespace(use_mla=mla), (1, 2, 3, layer, 4), {})
    assert found is False if kept_out else found == "asked"
    assert counting.snapshot() == ({"head_ratio": {"paged": 1}} if kept_out else {})


def indices(table="table", slots=9, metadata=None, batch=None, **kwargs):
    """What the release's builder, which gives a new object each time, answers inside of forward_extend."""
    arguments = ("indptr", table, "lengths", slots, "mode")

    def wrapped(*args):
        return gather_reuse.gather_indices(lambda *a, **k: object(), None, arguments, kwargs)

    backend = SimpleNamespace(forward_metadata=metadata)
    return gather_reuse.forward_extend(wrapped, backend, (1, 2, 3, 4, batch), {})


def test_the_indices_of_a_batch_are_built_once():
    metadata, batch = SimpleNamespace(), Batch()
    first = indices(metadata=metadata, batch=batch)
    assert indices(metadata=metadata, batch=batch) is first
    assert counting.snapshot() == {"gather_reuse": {"built": 1, "reused": 1}}


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
    for scope, args in ((None, (1, 2, 3, 4)), ((metadata, batch), (1, 2, 3))):
        call = (lambda *args: args, None, args, {})
        assert gather_reuse._scope.call(scope, gather_reuse.gather_indices, call, {}) == args
    assert vars(metadata) == {} and counting.snapshot() == {}


class Pool:
    """A pool without layer 0, as a hybrid model's."""

    def get_value_buffer(self, layer_id):
        if layer_id != 3:
            raise ValueError(f"layer {layer_id}")
        return "layer 3"

    def get_v_head_dim(self):
        return 128


def built(pool, ask, by_name=False):
    runner = SimpleNamespace(token_to_kv_pool=pool)
    args, kwargs = ((), {"model_runner": runner}) if by_name else ((runner,), {})
    return v_head_dim.wrapper(lambda *args, **kwargs: pool.get_value_buffer(ask), None, args, kwargs)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_pool_without_layer_0_shows_its_width_while_a_backend_is_built(by_name):
    pool = Pool()
    assert built(pool, 0, by_name).shape == (0, 128) and built(pool, 3, by_name) == "layer 3"
    with pytest.raises(ValueError, match="layer 2"):
        built(pool, 2, by_name)
    assert vars(pool) == {} and counting.snapshot() == {"v_head_dim": {"asked_pool": 1}}


def test_a_pools_own_attribute_comes_back():
    pool = Pool()
    own = pool.get_value_buffer = lambda layer_id: "own"
    assert built(pool, 0) == "own" and pool.get_value_buffer is own


def test_a_pool_that_has_no_such_width_is_left_alone():
    pool = SimpleNamespace(get_value_buffer=lambda layer_id: vars(pool)["get_value_buffer"])
    own = pool.get_value_buffer
    assert built(pool, 0) is own


# ---- what a wrapper is put into ----


class Holder:
    """A class of SGLang's whose method counts its calls."""

    def method(self, value=0):
        self.calls = getattr(self, "calls", 0) + 1
        if value == "raise":
            raise ValueError("SGLang's own")
        return value


@pytest.fixture
def put_around(monkeypatch):
    def put(wrapper, instead=None):
        module = ModuleType("module")
        module.Holder = type("Holder", (Holder,), {"method": Holder.method})
        wrapper.__module__ = "sglang_aiter_ext.capabilities.some"
        activation.wrap(module, "Holder.method", wrapper, instead)
        return module.Holder()

    monkeypatch.delenv("SGLANG_AITER_EXT_STRICT", raising=False)
    return put


def before(wrapped, instance, args, kwargs):
    raise KeyError("ours")


def after(wrapped, instance, args, kwargs):
    wrapped(*args, **kwargs)
    raise KeyError("ours")


@pytest.mark.parametrize("wrapper", [before, after])
def test_an_error_of_a_wrappers_own_leaves_the_call_to_sglangs_function_which_runs_once(put_around, wrapper):
    holder = put_around(wrapper)
    assert (holder.method(7), holder.calls) == (7, 1)
    assert counting.snapshot() == {"some": {"internal_error": 1}}


@pytest.mark.parametrize("wrapper", [before, after])
def test_it_is_raised_in_strict_mode_and_where_sglangs_function_would_answer_differently(
    put_around, wrapper, monkeypatch
):
    message = "internal error in Holder.method: KeyError: 'ours'"
    with pytest.raises(activation.Refusal, match=f"^{message}$"):
        put_around(wrapper, activation.Refusal).method(7)
    monkeypatch.setenv("SGLANG_AITER_EXT_STRICT", "1")
    with pytest.raises(activation.CouldNotApply, match=f"^some: {message}$"):
        put_around(wrapper).method(7)


def twice(wrapped, instance, args, kwargs):
    wrapped()
    return wrapped(*args, **kwargs)


def masking(wrapped, instance, args, kwargs):
    try:
        return wrapped(*args, **kwargs)
    finally:
        raise KeyError("ours")


@pytest.mark.parametrize("wrapper, calls", [(twice, 2), (masking, 1)])
def test_an_error_of_sglangs_own_is_never_answered_with_another_call_or_an_earlier_result(put_around, wrapper, calls):
    holder = put_around(wrapper)
    with pytest.raises((ValueError, KeyError)) as caught:
        holder.method("raise")
    assert "SGLang's own" in str(caught.value) or "SGLang's own" in str(caught.value.__context__)
    assert holder.calls == calls and counting.snapshot() == {}


def test_what_a_wrapper_refuses_is_raised_as_it_is(put_around):
    def refuse(wrapped, instance, args, kwargs):
        raise activation.Refusal("on purpose")

    with pytest.raises(activation.Refusal, match="^on purpose$"):
        put_around(refuse).method()


def test_a_wrapped_method_is_called_as_the_method_itself(put_around):
    def through(wrapped, instance, args, kwargs):
        return wrapped(*args, **kwargs)

    holder = put_around(through)
    assert type(holder).method(self=holder, value=3) == type(holder).method(holder, 3) == holder.method(value=3) == 3
    for call in (lambda f: f(), lambda f: f(holder, self=holder), lambda f: f(holder, other=1)):
        with pytest.raises(TypeError) as ours:
            call(type(holder).method)
        with pytest.raises(TypeError) as theirs:
            call(Holder.method)
        assert str(ours.value) == str(theirs.value)
