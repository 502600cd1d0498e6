"""What the core decides, one condition at a time, on plain objects and sources of a few lines."""

import ast
import dataclasses
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
from conftest import written

from sglang_aiter_ext import counting, installed
from sglang_aiter_ext.capabilities import CAPABILITIES
from sglang_aiter_ext.capability import Needs, Unsupported, Verdict
from sglang_aiter_ext.installed import Release, Source

# ---- installed ----

UNBUILT = "try:\n from sglang._version import __version__\nexcept ImportError:\n __version__ = '0.0.0.dev0'\n"


@pytest.mark.parametrize(
    "version, files",
    [
        ("0.5.6", {"version.py": '__version__ = "0.5.6"\n'}), (None, {"version.py": UNBUILT}), (None, {}),
        ("0.5.7", {"_version.py": "version: str\n__version__ = version = '0.5.7'\n", "version.py": UNBUILT}),
        ("1", {"_version.py": "version: str\n", "version.py": "version: str = '1'\n"}),
    ],
)  # fmt: skip
def test_the_version_is_the_one_that_the_release_was_built_as(tmp_path, version, files):
    assert Release(written(tmp_path, files)).version == version


def test_a_module_is_a_file_or_a_package_and_one_that_is_missing_is_named(tmp_path):
    release = Release(written(tmp_path, {"a/__init__.py": "def f(): 0", "a/b.py": "def g(): 0"}))
    assert (release.function("a", "f").name, release.function("a.b", "g").name) == ("f", "g")
    assert release.source("a.c") is None
    with pytest.raises(LookupError, match="no module sglang.a.c"):
        release.function("a.c", "f")
    with pytest.raises(LookupError, match="sglang.a has no g"):
        release.function("a", "g")


def test_a_function_is_found_by_its_name_in_its_class_and_nothing_else_is(tmp_path):
    text = "f = 0\nclass A:\n def g(self): 0\nclass B:\n def f(self): 0\n def g(self): 1\n def g(self): 2\n"
    source = Source(written(tmp_path, {"m.py": text}) / "m.py")
    # Of two the last, as in Python.
    assert source.function("B.g").lineno == 7
    assert [source.function(name) for name in ("f", "B", "C.g", "B.h", "g")] == [None] * 5


def test_optional_imports_are_those_of_a_try_that_imports_the_package(tmp_path):
    text = (
        "from aiter import a\n"
        "try:\n import aiter\n from aiter.ops import b as c\n from other import d\n from . import e\n"
        "except ImportError:\n from aiter import f\n"
        "try:\n from .aiter import g\n from aiterate import h\nexcept ImportError: 0\n"
    )
    source = Source(written(tmp_path, {"m.py": text}) / "m.py")
    assert source.optional_imports("aiter") == [("aiter.ops", "c"), ("other", "d"), (".", "e")]


def test_parameters_are_named_without_self_and_with_the_stars_of_a_dict():
    for text, names in (("self, a, /, b, *c, d, **e", ["a", "b", "d", "**e"]), ("a", ["a"])):
        assert installed.parameters(ast.parse(f"def f({text}): 0").body[0]) == names


def test_calls_are_found_by_a_plain_or_dotted_name_in_the_order_of_the_source():
    body = ast.parse("if (f(1), g.f(2)): f\nf.g(), g(f), f()()\nx.f(3)")
    assert [ast.unparse(call) for call in installed.calls(body, "f")] == ["f(1)", "g.f(2)", "f()", "x.f(3)"]


def test_a_name_is_mentioned_as_a_name_an_attribute_or_a_string():
    assert all(installed.mentions(ast.parse(text), "x") for text in ("x", "a.x", "x.a", "'x'"))
    assert not any(installed.mentions(ast.parse(text), "x") for text in ("xs", "'an x'", "f(x=1)"))


def test_enclosing_tests_are_of_ifs_whose_body_a_call_lies_in():
    body = ast.parse("while w:\n if a:\n  if b:\n   if x(): 0\n  elif c: y()\n  else: z()\n if d: 0")
    for name, tests in (("x", ["a", "b"]), ("y", ["a", "c"]), ("z", ["a"])):
        (call,) = installed.calls(body, name)
        assert [ast.unparse(test) for test in installed.enclosing_tests(body, call)] == tests


@pytest.fixture
def on_path(monkeypatch):
    """Puts folders on an otherwise empty sys.path, where no SGLang was looked for yet."""
    monkeypatch.setattr(installed, "_releases", [])
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    return lambda *folders: monkeypatch.setattr(sys, "path", [str(folder) for folder in folders])


SGLANG = {"sglang/__init__.py": "raise AssertionError('imported')", "sglang/srt/a.py": ""}


def test_the_release_is_the_one_that_would_be_imported_and_stays_so(tmp_path, on_path):
    first, second = (written(tmp_path / name, SGLANG) for name in ("first", "second"))
    for folders in ((first, second), (second,)):
        on_path(*folders)
        assert installed.release().root == first / "sglang" and len(installed._releases) == 1


def test_the_release_is_the_one_that_is_imported_wherever_the_path_leads(tmp_path, on_path, monkeypatch):
    on_path(written(tmp_path / "first", SGLANG))
    place = written(tmp_path / "second", SGLANG) / "sglang"
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__path__=[str(place)], __spec__=None))
    assert installed.release().root == place


@pytest.mark.parametrize("files", [{}, {"sglang.py": ""}, {"sglang/a.py": ""}])
def test_without_sglang_there_is_no_release_until_a_path_is_added(tmp_path, on_path, files):
    on_path(written(tmp_path / "nothing", files))
    assert installed.release() is None
    on_path(written(tmp_path / "something", SGLANG))
    assert installed.release() is not None


RAGGED = "paged_attention_ragged"


def ragged(*names):
    return eval(f"lambda {', '.join(names)}: 0")


@pytest.mark.parametrize(
    "attributes, words",
    [
        ({"__file__": "f", RAGGED: ragged(*installed.KERNEL_PARAMETERS[RAGGED])}, None),
        ({RAGGED: ragged(*installed.KERNEL_PARAMETERS[RAGGED])}, "empty namespace package"),
        ({"__file__": "f"}, f"lacks {RAGGED}"), ({"__file__": "f", RAGGED: 0}, "cannot be read"),
        ({"__file__": "f", RAGGED: ragged("out", "query")}, "f: paged_attention_ragged has parameter 1 'query'"),
    ],
)  # fmt: skip
def test_why_aiter_cannot_serve_a_kernel(monkeypatch, attributes, words):
    aiter = ModuleType("aiter")
    aiter.__dict__.update(attributes)
    monkeypatch.setitem(sys.modules, "aiter", aiter)
    problem = installed.aiter_problem(RAGGED)
    assert problem is None if words is None else words in problem
    monkeypatch.setitem(sys.modules, "aiter", None)
    assert installed.aiter_problem(RAGGED).startswith("import aiter fails: ModuleNotFoundError: ")


def test_a_kernel_needs_its_leading_parameters_in_order_and_its_keywords_anywhere():
    name = "flash_attn_varlen_fp8_pertensor_func"
    leading, keywords = list(installed.KERNEL_PARAMETERS[name]), list(installed.KERNEL_KEYWORDS[name])
    assert installed.parameter_problem(name, [*leading, "more", *keywords]) is None
    assert "parameter 9 'nothing'" in installed.parameter_problem(name, leading[:-1])
    assert "parameter 0 'k' where 'q'" in installed.parameter_problem(name, [*leading[1:], *keywords])
    assert installed.parameter_problem(name, [*leading, "causal"]) == f"{name} takes no 'softmax_scale'"


# ---- capability ----


@pytest.mark.parametrize(
    "need, words",
    [
        (dict(parameters=("x",)), "no parameter x"), (dict(leading=("x",)), "no parameter x"),
        (dict(leading=("b", "a")), "b, a is the order expected"), (dict(leading=("b",)), "takes a, b, where b is"),
        (dict(mentions=("used", "x")), "does not use x"),
    ],
)  # fmt: skip
def test_what_a_release_must_have_is_named_where_it_is_missing(tmp_path, need, words):
    release = Release(written(tmp_path, {"m.py": "def f(a, b): used"}))
    Needs("m", "f", parameters=("b",), leading=("a", "b"), mentions=("used",)).check(release)
    with pytest.raises(Unsupported, match=words):
        Needs("m", "f", **need).check(release)


def test_a_verdict_is_the_probes_once_all_that_is_needed_is_there(tmp_path):
    release = Release(written(tmp_path, {"m.py": "def f(): 0", "broken.py": "def f(:"}))

    def verdict(release, probe=lambda release: Verdict("apply", "fine"), module="m"):
        return dataclasses.replace(CAPABILITIES[0], needs=(Needs(module, "f"),), probe=probe).verdict(release)

    assert verdict(release) == ("apply", "fine") and verdict(None).verdict == "not_applicable"
    assert verdict(release, module="n") == ("unsupported", "the release has no module sglang.n")
    assert "cannot be read" in verdict(release, module="broken").reason
    assert "internal error of the probe: ZeroDivisionError" in verdict(release, lambda release: 1 / 0).reason


# ---- counting ----


@pytest.fixture
def lines(nothing_counted, monkeypatch):
    """Lists what is logged once its handler is attached; logging is not set up yet."""
    monkeypatch.setattr(counting, "_held", type(counting._held)())
    alone = logging.Manager(logging.RootLogger(logging.WARNING)).getLogger("alone")
    monkeypatch.setattr(counting, "logger", alone)
    return []


def attach(lines):
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    counting.logger.addHandler(handler)


def test_calls_are_counted_by_outcome_and_reason_except_while_they_are_compiled(lines, monkeypatch):
    for compiling in (False, True, False):
        monkeypatch.setattr(counting, "compiling", lambda compiling=compiling: compiling)
        counting.count("a", "paged", "why")
    counting.count("a", "asm")
    assert counting.snapshot() == {"a": {"paged/why": 2, "asm": 1}}


def test_a_call_that_cannot_be_counted_is_one_line_and_under_strict_an_error(lines, monkeypatch):
    attach(lines)
    monkeypatch.delenv("SGLANG_AITER_EXT_STRICT", raising=False)
    for _ in range(2):
        counting.count("a", ["no key"])
    assert lines == ["sglang_aiter_ext: calls are not counted: TypeError: unhashable type: 'list'"]
    monkeypatch.setenv("SGLANG_AITER_EXT_STRICT", "1")
    with pytest.raises(TypeError):
        counting.count("a", ["no key"])


def test_a_line_of_import_time_waits_for_a_handler_and_for_its_level(lines):
    counting.log_when_set_up(logging.ERROR, "an error")
    assert counting.holding() and not counting.set_up()
    attach(lines)
    counting.log_when_set_up(logging.INFO, "a summary")
    assert lines == [] and not counting.set_up()
    counting.logger.setLevel(logging.INFO)
    counting.log_when_set_up(logging.ERROR, "another")
    assert lines == ["an error", "a summary", "another"] and not counting.holding()


def test_a_reason_is_logged_once_after_the_lines_that_wait(lines):
    attach(lines)
    counting.log_when_set_up(logging.INFO, "a summary")
    counting.logger.setLevel(logging.INFO)
    for reason in ("one", "one", "two"):
        counting.log_once("a", reason, "because of %s", reason)
    assert lines == ["a summary", "a: because of one", "a: because of two"]


def test_a_line_may_come_in_while_another_thread_looks_at_those_that_wait(lines, monkeypatch):
    attach(lines)
    counting._held.append((logging.INFO, "waits"))
    monkeypatch.setattr(counting.logger, "isEnabledFor", lambda level: counting._held.append((level, "new")) or True)
    assert counting.set_up()
