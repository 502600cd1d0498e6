"""How wrappers go around functions, one condition at a time, on modules made up here."""

import functools
import sys
import threading
from types import ModuleType

import pytest

from sglang_aiter_ext import counting, logs, wrapping
from sglang_aiter_ext.errors import CouldNotApply, Refusal, SettingError
from sglang_aiter_ext.wrapping import Group, Scope

pytestmark = pytest.mark.usefixtures("nothing_counted")


@pytest.fixture(autouse=True)
def not_strict(monkeypatch):
    monkeypatch.delenv("SGLANG_AITER_EXT_STRICT", raising=False)


class Holder:
    """A class of SGLang's whose method counts its calls."""

    def method(self, value=0):
        self.calls = getattr(self, "calls", 0) + 1
        if value == "raise":
            raise ValueError("SGLang's own")
        return value


def module_of(name="sglang.m", **values):
    made = ModuleType(name)
    vars(made).update(values)
    return made


def passes_on(original, instance, args, kwargs):
    return instance, original(*args, **kwargs)


def acting(name="some", instead=None):
    return Group(name, instead, acts=True)


# ---- all or nothing ----


def test_only_what_a_module_and_its_classes_define_themselves_is_there():
    base = type("Base", (), {"inherited": passes_on})
    module = module_of(f=passes_on, C=type("C", (base,), {"g": passes_on}), value=Holder())
    module.value.g = passes_on
    names = ["f", "C.g", "C", "h", "C.inherited", "C.h", "D.g", "value.g", "C.g.x"]
    assert wrapping.missing(module, names) == ["h", "C.inherited", "C.h", "D.g", "value.g", "C.g.x"]


def test_where_one_name_is_missing_nothing_is_wrapped_and_each_that_is_missing_is_named():
    module = module_of(f=passes_on, C=type("C", (), {"g": passes_on}))
    before, method = dict(vars(module)), module.C.g
    wrappers = dict.fromkeys(["f", "C.h", "C.g", "x"], passes_on)
    with pytest.raises(AttributeError, match="^sglang.m has no C.h, x$"):
        wrapping.wrap_all(module, wrappers, acting())
    assert vars(module) == before and module.C.g is method


def test_without_wrapt_nothing_is_wrapped(monkeypatch):
    module = module_of(f=passes_on)
    monkeypatch.setitem(sys.modules, "wrapt", None)
    with pytest.raises(ImportError):
        wrapping.wrap_all(module, {"f": passes_on}, acting())
    assert module.f is passes_on


def test_a_wrapper_acts_only_while_its_group_does():
    module, group = module_of(f=lambda x: x, C=type("C", (), {"g": lambda self, x: x})), Group("some")
    wrapping.wrap_all(module, {"f": passes_on, "C.g": passes_on}, group)
    owner = module.C()
    for acts in (False, True, False):
        group.acts = acts
        assert module.f(3) == ((None, 3) if acts else 3)
        assert owner.g(3) == ((owner, 3) if acts else 3)


def test_a_group_acts_on_its_own_wrappers_and_on_no_others():
    one, other = module_of(f=lambda: 0), module_of(f=lambda: 0)
    wrapping.wrap_all(one, {"f": passes_on}, acting("a"))
    wrapping.wrap_all(other, {"f": passes_on}, Group("b"))
    assert one.f() == (None, 0) and other.f() == 0


# ---- what a wrapped function looks like ----


def test_a_wrapper_gets_what_a_method_is_called_on_apart_from_its_arguments():
    module = module_of(
        f=functools.cache(lambda *args, **kwargs: (args, kwargs)),
        C=type("C", (), {"f": lambda self, *args, **kwargs: (self, args, kwargs)}),
    )
    wrapping.wrap_all(module, {"f": passes_on, "C.f": passes_on}, acting())
    owner = module.C()
    assert module.f(1, a=2) == (None, ((1,), {"a": 2})) and owner.f(1, a=2) == (owner, (owner, (1,), {"a": 2}))
    # What a cached function has besides its answer stays, and one that is not cached gets nothing.
    assert module.f.cache_info().misses == 1 and not hasattr(module.C.f, "cache_info")


def test_a_wrapped_function_is_a_function_that_is_found_by_its_name_and_shows_what_it_wraps():
    module = module_of(f=len, Holder=type("Holder", (), {"method": Holder.method}))
    wrapping.wrap_all(module, {"f": passes_on, "Holder.method": passes_on}, acting())
    for function, name, original in ((module.f, "f", len), (module.Holder.method, "Holder.method", Holder.method)):
        assert type(function) is type(passes_on) and function.__wrapped__ is original
        assert (function.__module__, function.__qualname__) == ("sglang.m", name)


def through(original, instance, args, kwargs):
    return original(*args, **kwargs)


@pytest.fixture
def put_around():
    """An object of a class whose method has this wrapper around it."""

    def put(wrapper, instead=None):
        module = module_of(Holder=type("Holder", (Holder,), {"method": Holder.method}))
        wrapping.wrap_all(module, {"Holder.method": wrapper}, acting("some", instead))
        return module.Holder()

    return put


def test_a_wrapped_method_is_called_as_the_method_itself(put_around):
    holder = put_around(through)
    assert type(holder).method(self=holder, value=3) == type(holder).method(holder, 3) == holder.method(value=3) == 3
    for call in (lambda f: f(), lambda f: f(holder, self=holder), lambda f: f(holder, other=1)):
        with pytest.raises(TypeError) as ours:
            call(type(holder).method)
        with pytest.raises(TypeError) as theirs:
            call(Holder.method)
        assert str(ours.value) == str(theirs.value)


# ---- errors ----


def before(original, instance, args, kwargs):
    raise KeyError("ours")


def after(original, instance, args, kwargs):
    original(*args, **kwargs)
    raise KeyError("ours")


@pytest.mark.parametrize("wrapper", [before, after])
def test_an_error_of_a_wrappers_own_leaves_the_call_to_sglangs_function_which_runs_once(put_around, wrapper, caplog):
    caplog.set_level("INFO", logger=logs.logger.name)
    holder = put_around(wrapper)
    assert [(holder.method(7), holder.calls) for _ in range(2)] == [(7, 1), (7, 2)]
    assert counting.snapshot() == {"some": {"internal_error": 2}}
    text = "some: internal error in Holder.method: KeyError: 'ours'; SGLang's own function serves it"
    assert [record.getMessage() for record in caplog.records] == [text]


def test_an_answer_of_none_is_an_answer_and_is_not_asked_for_again(put_around):
    holder = put_around(after)
    assert (holder.method(None), holder.calls) == (None, 1)


@pytest.mark.parametrize("wrapper", [before, after])
def test_it_is_raised_in_strict_mode_and_where_sglangs_function_would_answer_differently(
    put_around, wrapper, monkeypatch
):
    message = "internal error in Holder.method: KeyError: 'ours'"
    for strict in ("0", "1"):
        monkeypatch.setenv("SGLANG_AITER_EXT_STRICT", strict)
        with pytest.raises(Refusal, match=f"^{message}$") as raised:
            put_around(wrapper, Refusal).method(7)
        assert isinstance(raised.value.__cause__, KeyError)
    with pytest.raises(CouldNotApply, match=f"^some: {message}$") as raised:
        put_around(wrapper).method(7)
    assert isinstance(raised.value.__cause__, KeyError) and counting.snapshot() == {}


def twice(original, instance, args, kwargs):
    original()
    return original(*args, **kwargs)


def masking(original, instance, args, kwargs):
    try:
        return original(*args, **kwargs)
    finally:
        raise KeyError("ours")


@pytest.mark.parametrize("instead", [None, Refusal])
@pytest.mark.parametrize("wrapper, calls", [(twice, 2), (masking, 1)])
def test_an_error_of_sglangs_own_is_never_answered_with_another_call_or_an_earlier_result(
    put_around, wrapper, calls, instead
):
    holder = put_around(wrapper, instead)
    with pytest.raises((ValueError, KeyError)) as caught:
        holder.method("raise")
    assert "SGLang's own" in str(caught.value) or "SGLang's own" in str(caught.value.__context__)
    assert holder.calls == calls and counting.snapshot() == {}


@pytest.mark.parametrize("kind", [Refusal, CouldNotApply, SettingError])
def test_what_a_wrapper_refuses_is_raised_as_it_is(put_around, kind):
    def refuse(original, instance, args, kwargs):
        raise kind("on purpose")

    for instead in (None, CouldNotApply):
        with pytest.raises(kind, match="^on purpose$"):
            put_around(refuse, instead).method()
    assert counting.snapshot() == {}


# ---- what a wrapper leaves for another ----


def test_what_a_scope_holds_ends_with_the_call_however_it_ends():
    scope = Scope()
    assert scope.value is None

    def inner(*args, **kwargs):
        return scope.value, args, kwargs

    def outer():
        within = scope.call("inner", inner, (1,), {"a": 2})
        return within, scope.value

    assert scope.call("outer", outer, (), {}) == (("inner", (1,), {"a": 2}), "outer") and scope.value is None
    with pytest.raises(ZeroDivisionError):
        scope.call("outer", lambda: 1 / 0, (), {})
    assert scope.value is None


def test_a_scope_is_seen_in_its_own_thread_only():
    scope, seen = Scope(), []

    def call():
        thread = threading.Thread(target=lambda: seen.append(scope.value))
        thread.start()
        thread.join()

    scope.call("ours", call, (), {})
    assert seen == [None]


# ---- aliases ----


def test_aliases_of_a_function_that_was_replaced_are_pointed_at_the_new_one_in_sglangs_modules_only(monkeypatch):
    def function(owner):
        made = lambda: None  # noqa: E731
        made.__module__ = owner
        return made

    old, kept, foreign, new = (function(name) for name in ("sglang.m", "sglang.m", "other", "sglang.m"))
    module = module_of(f=new, g=kept, h=function("other"))
    names = ("sglang.x", "sglangs", "sglang.y")
    near, far, other = (module_of(name, f=old, g=kept, h=foreign) for name in names)
    other.f = kept
    for one in (module, near, far, other):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    wrapping.rebind({"f": old, "g": kept, "h": foreign, "value": 3}, module)
    assert near.f is new and near.g is kept and near.h is foreign and not hasattr(near, "value")
    assert far.f is old and other.f is kept and module.f is new


def test_what_is_no_longer_there_leaves_its_aliases_alone(monkeypatch):
    old = lambda: None  # noqa: E731
    old.__module__ = "sglang.m"
    near = module_of("sglang.x", f=old)
    monkeypatch.setitem(sys.modules, "sglang.x", near)
    monkeypatch.setitem(sys.modules, "sglang.nothing", None)
    wrapping.rebind({"f": old}, module_of(f=old))
    assert near.f is old


def test_only_our_own_wrappers_are_taken_off():
    import wrapt

    module = module_of(f=lambda: ["f"])
    plain = module.f
    wrapping.wrap_all(module, {"f": passes_on}, acting())
    assert wrapping.without_ours(module.f) is plain
    agent = wrapt.FunctionWrapper(module.f, lambda wrapped, instance, args, kwargs: ["agent"])
    assert wrapping.without_ours(agent) is agent
