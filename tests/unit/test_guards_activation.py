"""What activation decides, one condition at a time, on capabilities and modules made up here."""

import functools
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

from sglang_aiter_ext import activation, capabilities, counting, installed, settings
from sglang_aiter_ext.activation import CouldNotApply, State
from sglang_aiter_ext.capability import Capability, NothingToServe, Verdict
from sglang_aiter_ext.settings import ASM, DISABLE, MASTER, PA, STRICT

INSTALLED, LINES = [], []


def it(verdict="apply", switch=None, name="it", targets=("sglang.m",), raises=None):
    """A capability that puts another `f` into its targets."""

    def install(module, release):
        INSTALLED.append((name, module.__name__))
        if raises is not None:
            raise raises
        module.f = f()

    return Capability(
        name, "", "", (), (), "", switch, targets, (), (), lambda release: Verdict(verdict, "why"), install
    )


def f(owner="sglang.m"):
    made = lambda: None  # noqa: E731
    made.__module__ = owner
    return made


@pytest.fixture(autouse=True)
def process(monkeypatch, tmp_path):
    """A process that has found a release, and served nothing."""
    for setting in settings.SETTINGS:
        monkeypatch.delenv(setting.name, raising=False)
    log = lambda level, text: LINES.append(f"{logging.getLevelName(level)} {text}")  # noqa: E731
    for module, fresh in (
        (activation, dict(_states={}, _reported=set(), publish=lambda: None, log_when_set_up=log)),
        (counting, dict(compiling=counting.compiling)),
        (installed, dict(_releases=[installed.Release(tmp_path)])),
    ):
        for name, value in fresh.items():
            monkeypatch.setattr(module, name, value)
    INSTALLED.clear(), LINES.clear()


@pytest.fixture
def serve(monkeypatch):
    """Has a module imported where these variables and capabilities are."""

    def served(has, env=(), module="sglang.m", fresh=True):
        monkeypatch.setattr(capabilities, "CAPABILITIES", has)
        for setting, value in dict(env).items():
            monkeypatch.setenv(setting.name, value)
        activation.on_import(ModuleType(module) if isinstance(module, str) else module, fresh)

    return served


@pytest.mark.parametrize(
    "env, expected",
    [
        ({}, ["on", "on", "off"]), ({PA: "1", ASM: "0"}, ["on", "off", "on"]), ({PA: "1", MASTER: "0"}, ["off"] * 3),
        ({DISABLE: "asm"}, ["on", "off", "off"]), ({ASM: "x"}, ["on", "unreadable", "off"]), ({MASTER: "x"}, ["unreadable"] * 3),
        ({ASM: "x", DISABLE: "asm"}, ["on", "off", "off"]),
    ],
)  # fmt: skip
def test_a_capability_is_on_where_the_master_switch_its_own_and_the_list_say_so(monkeypatch, env, expected):
    monkeypatch.setattr(capabilities, "CAPABILITIES", (it(), it(switch=ASM, name="asm"), it(switch=PA, name="pa")))
    for setting, value in env.items():
        monkeypatch.setenv(setting.name, value)
    states = activation.evaluate(None).values()
    said = {(True, None): "on", (False, None): "off"}
    assert [said.get((state.enabled, state.error), "unreadable") for state in states] == expected
    assert not any(state.enabled and state.error for state in states)


BOTH = ("sglang.m", "sglang.n")


def test_a_capability_is_active_once_it_is_in_all_its_targets_and_has_a_switch():
    def state(verdict="apply", enabled=True, error=None, done=BOTH, switch=None):
        return State(it(switch=switch, targets=BOTH), Verdict(verdict, ""), enabled, error, set(done))

    assert (state().state, state(done=()).state, state(done=BOTH[:1]).state) == ("active", "pending", "pending")
    assert (state(enabled=False).state, state("upstream").state, state(error="").state) == ("off", "off", "failed")
    assert (state().switch, state(switch=PA).switch) == ("SGLANG_AITER_EXT_DISABLE", "SGLANG_USE_AITER_PA")


def test_a_release_is_looked_at_once_and_one_that_is_not_there_again(monkeypatch):
    with monkeypatch.context() as without:
        without.setattr(installed, "release", lambda: None)
        assert activation.states()["decode_pa"] is not activation.states()["decode_pa"]
    assert activation.states()["decode_pa"] is activation.states()["decode_pa"]


REFUSED = "it could not be applied: why"
FAILED = "it could not be applied to sglang.m: "
UNREADABLE = "SGLANG_AITER_ASM_CONTEXT_PREFILL='x' is not accepted: "
#: Name -> (capabilities, variables, which are installed, what is logged beside the summary, the error under strict).
SERVED = {
    "one that applies": ([it()], {}, ["it"], None, None),
    "the first is to be the outermost": ([it(name="a"), it(name="b")], {}, ["b", "a"], None, None),
    "of another module": ([it(targets=("sglang.n",))], {}, [], None, None),
    "one that is off": ([it(switch=PA)], {}, [], None, None),
    "one that the release has": ([it("upstream")], {}, [], None, None),
    "an unsupported one": ([it("unsupported")], {}, [], "INFO " + REFUSED, REFUSED),
    "an unsupported one that is on by default": ([it("unsupported", ASM)], {}, [], "INFO " + REFUSED, REFUSED),
    "an unsupported one that was asked for": ([it("unsupported", PA)], {PA: "1"}, [], "WARNING " + REFUSED, REFUSED),
    "an unsupported one that is off": ([it("unsupported", PA)], {}, [], None, None),
    "one that fails": ([it(raises=ValueError("x"))], {}, ["it"], f"ERROR {FAILED}ValueError: x", FAILED + "ValueError: x"),
    "one with nothing to serve": ([it(raises=NothingToServe("x"))], {}, ["it"], None, FAILED + "x"),
    "an unreadable variable": ([it(switch=ASM)], {ASM: "x"}, [], "ERROR " + UNREADABLE, UNREADABLE),
    "switched off": ([it()], {MASTER: "0"}, [], None, None),
    "an unreadable master switch": ([it()], {MASTER: "x"}, [], "ERROR SGLANG_AITER_EXT='x'", "SGLANG_AITER_EXT='x'"),
}  # fmt: skip


@pytest.mark.parametrize("case", SERVED)
def test_each_condition_of_serving_a_module(serve, case):
    has, env, names, line, strict = SERVED[case]
    for _ in range(2):
        serve(has, env)
    assert [name for name, _ in INSTALLED] == names * 2
    lines = [text for text in LINES if " on SGLang None: " not in text]
    assert len(lines) == (line is not None) and all(text.startswith(line) for text in lines)
    assert len(LINES) - len(lines) == (MASTER not in env)
    if strict is None:
        serve(has, {STRICT: "1"})
    else:
        with pytest.raises((CouldNotApply, settings.SettingError)) as error:
            serve(has, {STRICT: "1"})
        assert str(error.value).startswith(strict)


def test_the_summary_says_what_is_off(serve):
    serve([it(), it("upstream", PA, "b")])
    assert LINES[0].startswith("INFO ") and LINES[0].endswith(": it apply, b upstream (off)")


def test_without_a_release_nothing_is_installed_or_said(serve, monkeypatch):
    monkeypatch.setattr(installed, "release", lambda: None)
    serve([it()])
    assert INSTALLED == LINES == []


def test_a_module_is_served_each_time_it_is_executed_and_once_where_it_is_found(serve):
    for fresh, number in ((True, 2), (False, 1)):
        module = ModuleType("sglang.m")
        for _ in range(2):
            serve([it()], module=module, fresh=fresh)
        assert len(INSTALLED) == number
        INSTALLED.clear()


def test_strict_mode_says_each_time_that_a_module_was_not_served(serve):
    module = ModuleType("sglang.m")
    for _ in range(2):
        with pytest.raises(CouldNotApply, match=f"^{FAILED}ValueError: x$"):
            serve([it(raises=ValueError("x"))], {STRICT: "1"}, module, fresh=False)
    assert len(INSTALLED) == 1
    serve([it()], {STRICT: "0"}, module, fresh=False)


def test_a_cause_that_capabilities_and_modules_share_is_said_once(serve):
    has = [it(name=name, targets=BOTH, raises=ValueError(text)) for name, text in (("a", "x"), ("b", "x"), ("c", "y"))]
    for module in BOTH:
        serve(has, module=module)
    assert [line.partition(" could not")[0] for line in LINES[1:]] == ["ERROR c", "ERROR b"]
    assert {row["state"] for row in activation.status()} == {"failed"}


def test_only_decode_is_installed_where_its_variable_cannot_be_read_and_in_each_target(serve):
    has = [it(switch=ASM, name="asm", targets=BOTH), it(switch=PA, name="pa", targets=BOTH, raises=ValueError("x"))]
    for module in BOTH:
        serve(has, {PA: "x", ASM: "x"}, module)
    assert [("pa", module) for module in BOTH] == INSTALLED


def test_an_internal_error_is_one_line_and_under_strict_is_raised(serve, monkeypatch):
    monkeypatch.setattr(installed, "release", lambda: 1 / 0)
    for _ in range(2):
        serve([])
    assert LINES == ["ERROR sglang_aiter_ext: ZeroDivisionError: division by zero; SGLang goes on without it"]
    with pytest.raises(CouldNotApply, match="ZeroDivisionError"):
        serve([], {STRICT: "1"})


def test_whether_torch_compiles_is_asked_where_torch_is(serve, monkeypatch):
    torch = SimpleNamespace(compiler=SimpleNamespace(is_compiling="asked"))
    for there, asked in ((None, counting.compiling), (torch, "asked")):
        monkeypatch.setitem(sys.modules, "torch", there)
        serve([it()])
        assert counting.compiling == asked


def test_aliases_taken_before_a_late_activation_are_rebound(serve, monkeypatch):
    def module(name, **values):
        made = ModuleType(name)
        vars(made).update(values)
        monkeypatch.setitem(sys.modules, name, made)
        return made

    for fresh, owner, rebound in ((False, "sglang.m", True), (True, "sglang.m", False), (False, "other", False)):
        old, other = f(owner), f()
        target = module("sglang.m", f=old, g=other)
        near, far, own = module("sglang.x", f=old, g=other), module("sglangs", f=old), module("sglang.y", f=other)
        serve([it()], module=target, fresh=fresh)
        assert target.f is not old and near.f is (target.f if rebound else old)
        assert near.g is other and far.f is old and own.f is other


# ---- wrappers ----


def test_wrappers_are_taken_off_a_function_and_nothing_else_is():
    plain = f()
    plain.__wrapped__ = "someone else's"
    inner = SimpleNamespace(_sglang_aiter_ext_wrapper=1, __wrapped__=plain)
    assert activation.without_wrappers(SimpleNamespace(_sglang_aiter_ext_wrapper=1, __wrapped__=inner)) is plain


def passes_on(wrapped, instance, args, kwargs):
    return instance, wrapped(*args, **kwargs)


def test_what_is_not_defined_where_it_is_expected_is_not_wrapped():
    module = ModuleType("sglang.m")
    module.C = type("C", (type("Base", (), {"inherited": passes_on}),), {})
    for name in ("f", "C.f", "C.inherited"):
        with pytest.raises(AttributeError):
            activation.wrap(module, name, passes_on)


def test_a_wrapper_gets_what_a_method_is_called_on_apart_from_its_arguments():
    module = ModuleType("sglang.m")
    module.f = functools.cache(lambda *args, **kwargs: (args, kwargs))
    module.C = type("C", (), {"f": lambda self, *args, **kwargs: (self, args, kwargs)})
    for name in ("f", "C.f"):
        activation.wrap(module, name, passes_on)
    owner = module.C()
    assert module.f(1, a=2) == (None, ((1,), {"a": 2})) and owner.f(1, a=2) == (owner, (owner, (1,), {"a": 2}))
    # What a cached function has besides its answer stays, and one that is not cached gets nothing.
    assert module.f.cache_info().misses == 1 and not hasattr(module.C.f, "cache_info")
