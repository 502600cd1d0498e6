"""What activation decides, one condition at a time, on capabilities and modules made up here."""

import logging
import sys
import threading
from types import ModuleType, SimpleNamespace

import pytest
from conftest import written

from sglang_aiter_ext import activation, counting, logs, settings, source
from sglang_aiter_ext.activation import State
from sglang_aiter_ext.capability import Capability, Needs, Verdict
from sglang_aiter_ext.errors import CouldNotApply, Refusal, SettingError
from sglang_aiter_ext.names import BACKEND, LINEAR, REGISTRY
from sglang_aiter_ext.settings import ASM, DISABLE, MASTER, PA, STRICT

LINES = []
BOTH = (BACKEND, LINEAR)


def it(verdict="apply", switch=None, name="it", targets=(BACKEND,), names=("f",), kernels=(), raises=None, **changed):
    """A capability whose wrapper around `f` of each target tells its name."""

    def tells(original, instance, args, kwargs):
        return [name, *original(*args, **kwargs)]

    def check():
        if raises is not None:
            raise raises

    fields = dict(
        name=name, summary="", why="", upstream=(), until="", switch=switch, kernels=kernels, check=check,
        needs=tuple(Needs(target, "f") for target in targets), probe=lambda release: Verdict(verdict, "why"),
        wrappers=lambda release: {f"{target}.{name}": tells for target in targets for name in names},
    )  # fmt: skip
    return Capability(**{**fields, **changed})


def module_of(name=BACKEND):
    """A module of SGLang's as it is before anything is wrapped."""
    made = ModuleType(name)
    made.f = f(name)
    return made


def f(owner=BACKEND):
    def made():
        return []

    made.__module__ = owner
    return made


@pytest.fixture(autouse=True)
def process(monkeypatch, tmp_path):
    """A process that has found a release, and wrapped nothing."""
    for setting in settings.SETTINGS:
        monkeypatch.delenv(setting.name, raising=False)
    files = {"/".join(name.split(".")[1:]) + ".py": "def f(): 0" for name in (BACKEND, LINEAR, REGISTRY)}
    log = lambda level, text: LINES.append(f"{logging.getLevelName(level)} {text}")  # noqa: E731
    for module, fresh in (
        (activation, dict(_states={}, _logged=set())), (logs, dict(when_configured=log)),
        (counting, dict(compiling=counting.compiling)),
        (source, dict(_found=[source.Release(written(tmp_path, files))])),
    ):  # fmt: skip
        for name, value in fresh.items():
            monkeypatch.setattr(module, name, value)
    LINES.clear()


@pytest.fixture
def serve(monkeypatch):
    """Has a module imported in a process of these capabilities and variables; gives the module."""

    def served(has, env=(), module=BACKEND, fresh=True, again=False):
        if not again:
            monkeypatch.setattr(activation, "_states", {})
            monkeypatch.setattr(activation, "CAPABILITIES", has)
        for setting, value in dict(env).items():
            monkeypatch.setenv(setting.name, value)
        module = module_of(module) if isinstance(module, str) else module
        activation.on_import(module, fresh)
        return module

    return served


# ---- states ----


@pytest.mark.parametrize(
    "env, expected",
    [
        ({}, ["on", "on", "off"]), ({PA: "1", ASM: "0"}, ["on", "off", "on"]), ({PA: "1", MASTER: "0"}, ["off"] * 3),
        ({DISABLE: "asm"}, ["on", "off", "off"]), ({ASM: "x"}, ["on", "unreadable", "off"]), ({MASTER: "x"}, ["unreadable"] * 3),
        ({ASM: "x", DISABLE: "asm"}, ["on", "off", "off"]),
    ],
)  # fmt: skip
def test_a_capability_is_on_where_the_master_switch_its_own_and_the_list_say_so(monkeypatch, env, expected):
    monkeypatch.setattr(activation, "CAPABILITIES", (it(), it(switch=ASM, name="asm"), it(switch=PA, name="pa")))
    for setting, value in env.items():
        monkeypatch.setenv(setting.name, value)
    states = activation.evaluate(None).values()
    said = {(True, None): "on", (False, None): "off"}
    assert [said.get((state.enabled, state.error), "unreadable") for state in states] == expected
    assert not any(state.enabled and state.error for state in states)


def test_a_capability_is_active_once_it_is_in_all_its_modules_and_has_a_switch():
    def state(verdict="apply", enabled=True, error=None, done=BOTH, switch=None):
        wrappers = {target: {} for target in BOTH}
        return State(it(switch=switch), Verdict(verdict, ""), enabled, error, wrappers=wrappers, wrapped_in=set(done))

    assert (state().state, state(done=()).state, state(done=BOTH[:1]).state) == ("active", "pending", "pending")
    assert (state(enabled=False).state, state("upstream").state, state(error="").state) == ("off", "off", "failed")
    assert (state().switch, state(switch=PA).switch) == ("SGLANG_AITER_EXT_DISABLE", "SGLANG_USE_AITER_PA")


def test_a_states_group_is_named_after_its_capability_and_acts_not_yet():
    group = State(it(name="a", internal_error=Refusal), Verdict("apply", ""), True).group
    assert (group.capability, group.instead, group.acts) == ("a", Refusal, False)


def test_wrappers_are_sorted_by_the_module_they_lie_in_and_only_where_the_release_needs_them(monkeypatch):
    wrappers = {f"{BACKEND}.C.f": 1, f"{BACKEND}.g": 2, f"{LINEAR}.h": 3}
    has = [it("upstream", name="a"), it(name="b", targets=BOTH, wrappers=lambda release: wrappers)]
    monkeypatch.setattr(activation, "CAPABILITIES", has)
    upstream, applies = activation.evaluate(source.installed()).values()
    assert upstream.wrappers == {} and applies.wrappers == {BACKEND: {"C.f": 1, "g": 2}, LINEAR: {"h": 3}}
    assert all(state.wrappers == {} and state.error is None for state in activation.evaluate(None).values())


@pytest.mark.parametrize(
    "gpus, switch, internal_error, verdict, wraps",
    [
        ((), None, None, "apply", True),
        (("gfx950",), None, None, "apply", True),
        (("gfx942",), None, None, "not_applicable", False),
        (("gfx942",), PA, None, "unsupported", False),
        (("gfx942",), PA, Refusal, "unsupported", True),
    ],
)
def test_a_gpu_that_it_is_not_for_takes_the_wrappers_but_of_what_refuses_where_it_meets_it(
    monkeypatch, gpus, switch, internal_error, verdict, wraps
):
    has = it(architectures=("gfx950",), switch=switch, internal_error=internal_error)
    monkeypatch.setattr(activation, "CAPABILITIES", [has])
    (state,) = activation.evaluate(source.installed(), gpus).values()
    assert (state.verdict.verdict, bool(state.wrappers)) == (verdict, wraps)
    # What is shown is what acts.
    assert state.row()["wraps"] == (["aiter_backend.f"] if verdict == "apply" else [])
    # Without a GPU that is named, those of this machine count.
    monkeypatch.setattr(activation.gpu, "architectures", lambda: gpus)
    (of_machine,) = activation.evaluate(source.installed()).values()
    assert of_machine.verdict == state.verdict


def test_an_aiter_that_lacks_the_kernel_is_said_of_what_applies_and_of_nothing_else(monkeypatch, tmp_path):
    has = [it("upstream", name="a", aiter_problem=lambda folder: "no"), it(name="b", aiter_problem=lambda folder: "no")]
    monkeypatch.setattr(activation, "CAPABILITIES", has)
    for folder, expected in ((tmp_path, ["upstream", "unsupported"]), (None, ["upstream", "apply"])):
        monkeypatch.setattr(activation.aiter_installed, "package", lambda folder=folder: folder)
        states = activation.evaluate(source.installed(), ()).values()
        assert [state.verdict.verdict for state in states] == expected


def test_a_release_is_looked_at_once_and_one_that_is_not_there_again(monkeypatch):
    with monkeypatch.context() as without:
        without.setattr(source, "installed", lambda: None)
        assert activation.states()["decode_pa"] is not activation.states()["decode_pa"]
    evaluate, asked = activation.evaluate, []
    monkeypatch.setattr(activation, "evaluate", lambda release: asked.append(release) or evaluate(release))
    assert activation.states()["decode_pa"] is activation.states()["decode_pa"] and len(asked) == 1


def test_a_state_that_another_thread_found_first_is_the_one_that_counts(monkeypatch):
    theirs = {"it": "theirs"}
    monkeypatch.setattr(activation, "evaluate", lambda release: activation._states.update(theirs) or {"it": "ours"})
    assert activation.states() == theirs


def test_the_status_tells_each_capability_as_it_is(serve):
    serve([it(switch=ASM), it("upstream", name="b")])
    first = dict(name="it", verdict="apply", reason="why", enabled=True, switch=ASM.name, asked_for=False,
                 state="active", error=None, wraps=["aiter_backend.f"])  # fmt: skip
    second = {**first, "name": "b", "verdict": "upstream", "switch": DISABLE.name, "state": "off", "wraps": []}
    assert activation.status() == [first, second]


# ---- one module ----

REFUSED = "it could not be applied: why"
FAILED = f"it could not be applied to {BACKEND}: "
UNREADABLE = "SGLANG_AITER_ASM_CONTEXT_PREFILL='x' is not accepted: "
BROKEN = "it could not be applied: ZeroDivisionError: division by zero"
NO_KERNEL = FAILED + "SGLang could not import k from aiter"
#: Name -> (capabilities, variables, whose wrappers act, what is logged beside the summary, the error under strict).
SERVED = {
    "one that applies": ([it()], {}, ["it"], None, None),
    "one that has nothing to check": ([it(check=None)], {}, ["it"], None, None),
    "the first is to be the outermost": ([it(name="a"), it(name="b")], {}, ["a", "b"], None, None),
    "of another module": ([it(targets=(LINEAR,))], {}, [], None, None),
    "one that fails in another module": ([it(targets=(LINEAR,), raises=ValueError("x"))], {}, [], None, None),
    "an unsupported one of another module": ([it("unsupported", targets=(LINEAR,))], {}, [], None, None),
    "one that is off": ([it(switch=PA)], {}, [], None, None),
    "one that the release has": ([it("upstream", raises=ValueError("x"))], {}, [], None, None),
    "one that wraps nothing there": ([it(raises=ValueError("x"), wrappers=lambda release: {})], {}, [], None, None),
    "an unsupported one": ([it("unsupported")], {}, [], "INFO " + REFUSED, REFUSED),
    "an unsupported one that is on by default": ([it("unsupported", ASM)], {}, [], "INFO " + REFUSED, REFUSED),
    "an unsupported one that was asked for": ([it("unsupported", PA)], {PA: "1"}, [], "WARNING " + REFUSED, REFUSED),
    "an unsupported one that is off": ([it("unsupported", PA)], {}, [], None, None),
    "an unsupported one whose variable cannot be read": ([it("unsupported", PA)], {PA: "x"}, [], "ERROR SGLANG_USE_AITER_PA='x'", "SGLANG_USE_AITER_PA='x'"),
    "one that fails": ([it(raises=ValueError("x"))], {}, [], f"ERROR {FAILED}ValueError: x", FAILED + "ValueError: x"),
    "one beside another that fails": ([it(raises=ValueError("x")), it(name="b")], {}, ["b"], f"ERROR {FAILED}ValueError: x", FAILED),
    "a name that is missing": ([it(names=("f", "g"))], {}, [], f"ERROR {FAILED}AttributeError: {BACKEND} has no g", FAILED + "AttributeError"),
    "a kernel that SGLang lacks": ([it(names=("f", "k"), kernels=("k",))], {}, [], None, NO_KERNEL),
    "a kernel and a name": ([it(names=("f", "g", "k"), kernels=("k", "g2"))], {}, [], None, NO_KERNEL),
    "wrappers that cannot be told": ([it(wrappers=lambda release: 1 / 0)], {}, [], f"ERROR {BROKEN}", BROKEN),
    "wrappers that cannot be told of one that is off": ([it(switch=PA, wrappers=lambda release: 1 / 0)], {}, [], None, None),
    "a wrapper in no target": ([it(wrappers=lambda release: {"sglang.m.f": 0})], {}, [], "ERROR it could not be applied: ValueError", "it could not be applied: ValueError"),
    "an unreadable variable": ([it(switch=ASM)], {ASM: "x"}, [], "ERROR " + UNREADABLE, UNREADABLE),
    "switched off": ([it()], {MASTER: "0"}, [], None, None),
    "an unreadable master switch": ([it()], {MASTER: "x"}, [], "ERROR SGLANG_AITER_EXT='x'", "SGLANG_AITER_EXT='x'"),
}  # fmt: skip


@pytest.mark.parametrize("case", SERVED)
def test_each_condition_of_serving_a_module(serve, case):
    has, env, acting, line, strict = SERVED[case]
    module = serve(has, env)
    assert module.f() == acting and serve(has, module=BACKEND, again=True).f() == acting
    lines = [text for text in LINES if " on SGLang None: " not in text]
    assert len(lines) == (line is not None) and all(text.startswith(line) for text in lines)
    assert len(LINES) - len(lines) == (MASTER not in env)
    if strict is None:
        serve(has, {STRICT: "1"})
    else:
        with pytest.raises((CouldNotApply, SettingError)) as error:
            serve(has, {STRICT: "1"})
        assert str(error.value).startswith(strict)


def test_a_kernel_that_sglang_lacks_is_the_state_of_the_capability_although_nothing_is_logged(serve):
    module = serve([it(names=("f", "k"), kernels=("k",))])
    assert module.f() == [] and len(LINES) == 1
    (row,) = activation.status()
    assert (row["state"], row["error"]) == ("failed", "SGLang could not import k from aiter")


def test_the_error_behind_what_could_not_be_applied_is_its_cause(serve):
    with pytest.raises(CouldNotApply) as raised:
        serve([it(raises=ValueError("x"))], {STRICT: "1"})
    assert str(raised.value.__cause__) == "x"


def test_the_summary_says_what_is_off(serve):
    serve([it(), it("upstream", PA, "b")])
    assert LINES[0].startswith("INFO ") and LINES[0].endswith(": it apply, b upstream (off)")


def test_without_a_release_nothing_is_wrapped_or_said(serve, monkeypatch):
    monkeypatch.setattr(source, "installed", lambda: None)
    assert serve([it()]).f() == [] and LINES == []


def test_a_module_is_served_each_time_it_is_executed_and_once_where_it_is_found(serve):
    for fresh, acting in ((True, ["it", "it"]), (False, ["it"])):
        module = module_of()
        for _ in range(2):
            serve([it()], module=module, fresh=fresh)
        assert module.f() == acting
    # It is known from then on that it was served.
    module = serve([it()])
    assert serve([it()], module=module, fresh=False).f() == ["it"]


def test_strict_mode_says_each_time_that_a_module_was_not_served(serve):
    module, has = module_of(), [it(raises=ValueError("x"))]
    for _ in range(3):
        with pytest.raises(CouldNotApply, match=f"^{FAILED}ValueError: x$"):
            serve(has, {STRICT: "1"}, module, fresh=False)
    assert module.f() == [] and len(LINES) == 1
    serve([it()], {STRICT: "0"}, module, fresh=False)
    # One that could be served is not spoken of.
    serve([it()], {STRICT: "1"}, serve([it()]), fresh=False)
    # Executed anew it is served anew.
    assert serve([it()], {STRICT: "1"}, module).f() == ["it"]
    serve([it()], {STRICT: "1"}, module, fresh=False)


# ---- several modules ----


def failing_in(target, **changed):
    """A capability of three modules that lacks a name in one of them."""

    def wrappers(release):
        return {**it(targets=(BACKEND, LINEAR, REGISTRY)).wrappers(release), f"{target}.g": None}

    return it(targets=(BACKEND, LINEAR, REGISTRY), wrappers=wrappers, **changed)


def test_where_a_later_module_fails_what_was_wrapped_in_earlier_ones_calls_straight_through(serve):
    has = [failing_in(LINEAR), it(name="b", targets=BOTH)]
    first = serve(has)
    assert first.f() == ["it", "b"]
    second = serve(has, module=LINEAR, again=True)
    assert first.f() == second.f() == ["b"]
    # Nothing of it is wrapped from then on, and that was said.
    third = serve(has, module=REGISTRY, again=True)
    assert third.f() == [] and not hasattr(third.f, "__wrapped__")
    assert [line for line in LINES if line.startswith("ERROR")] == [
        f"ERROR it could not be applied to {LINEAR}: AttributeError: {LINEAR} has no g"
    ]
    assert [row["state"] for row in activation.status()] == ["failed", "active"]


def test_a_capability_that_failed_is_an_error_in_each_further_module_under_strict(serve):
    has = [failing_in(BACKEND)]
    serve(has)
    with pytest.raises(CouldNotApply, match=f"^it could not be applied: AttributeError: {BACKEND} has no g$"):
        serve(has, {STRICT: "1"}, LINEAR, again=True)


def test_a_cause_that_capabilities_and_modules_share_is_said_once(serve):
    has = [it(name=name, targets=BOTH, raises=ValueError(text)) for name, text in (("a", "x"), ("b", "x"), ("c", "y"))]
    serve(has)
    serve(has, module=LINEAR, again=True)
    assert [line.partition(" could not")[0] for line in LINES[1:]] == ["ERROR c", "ERROR b"]
    assert {row["state"] for row in activation.status()} == {"failed"}


def test_only_decode_is_wrapped_where_its_variable_cannot_be_read_and_in_each_target(serve):
    has = [it(switch=ASM, name="asm", targets=BOTH), it(switch=PA, name="pa", targets=BOTH)]
    for again, module in enumerate(BOTH):
        assert serve(has, {PA: "x", ASM: "x"}, module, again=bool(again)).f() == ["pa"]


# ---- around it ----


def test_an_internal_error_is_one_line_and_under_strict_is_raised(serve, monkeypatch):
    monkeypatch.setattr(source, "installed", lambda: 1 / 0)
    for _ in range(2):
        serve([])
    assert LINES == ["ERROR sglang_aiter_ext: ZeroDivisionError: division by zero; SGLang goes on without it"]
    with pytest.raises(CouldNotApply, match="ZeroDivisionError") as raised:
        serve([], {STRICT: "1"})
    assert isinstance(raised.value.__cause__, ZeroDivisionError)


def test_another_thread_can_import_a_module_while_one_is_being_wrapped(serve):
    """A check imports AITER; were a lock held meanwhile, a thread that imports SGLang would wait for this one."""
    other, done = module_of(LINEAR), []

    def check():
        thread = threading.Thread(target=lambda: activation.on_import(other, True), daemon=True)
        thread.start()
        thread.join(10)
        done.append(not thread.is_alive())

    serve([it(check=check), it(name="b", targets=(LINEAR,))])
    assert done == [True] and other.f() == ["b"]


def test_whether_torch_compiles_is_asked_where_torch_is(serve, monkeypatch):
    torch = SimpleNamespace(compiler=SimpleNamespace(is_compiling="asked"))
    for there, asked in ((None, counting.compiling), (torch, "asked")):
        monkeypatch.setitem(sys.modules, "torch", there)
        serve([it()])
        assert counting.compiling == asked


def test_aliases_taken_before_a_late_activation_are_rebound(serve, monkeypatch):
    for fresh in (False, True):
        target, near = module_of(), ModuleType("sglang.x")
        old = near.f = target.f
        for module in (target, near):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        serve([it()], module=target, fresh=fresh)
        # A module that has just been executed is imported by nobody yet.
        assert target.f is not old and near.f is (old if fresh else target.f)
