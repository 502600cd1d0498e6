"""How a release is found and read, one condition at a time, on sources of a few lines."""

import ast
import sys
from types import SimpleNamespace

import pytest
from conftest import written

from sglang_aiter_ext import source
from sglang_aiter_ext.errors import Unsupported
from sglang_aiter_ext.source import Release, Source

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
    assert (release.function("sglang.a", "f").name, release.function("sglang.a.b", "g").name) == ("f", "g")
    assert release.source("sglang.a.c") is None
    with pytest.raises(Unsupported, match="^the release has no module sglang.a.c$"):
        release.function("sglang.a.c", "f")
    with pytest.raises(Unsupported, match="^sglang.a has no g$"):
        release.function("sglang.a", "g")


def test_a_module_is_parsed_once(tmp_path):
    release = Release(written(tmp_path, {"a.py": ""}))
    assert release.source("sglang.a") is release.source("sglang.a")


def test_a_function_is_found_by_its_name_in_its_class_and_nothing_else_is(tmp_path):
    text = "f = 0\nclass A:\n def g(self): 0\nclass B:\n def f(self): 0\n def g(self): 1\n def g(self): 2\n"
    parsed = Source(written(tmp_path, {"m.py": text}) / "m.py")
    # Of two the last, as in Python.
    assert parsed.function("B.g").lineno == 7
    assert [parsed.function(name) for name in ("f", "B", "C.g", "B.h", "g")] == [None] * 5


def test_optional_imports_are_those_of_a_try_that_imports_the_package(tmp_path):
    text = (
        "from aiter import a\n"
        "try:\n import aiter\n from aiter.ops import b as c\n from other import d\n from . import e\n"
        "except ImportError:\n from aiter import f\n"
        "try:\n from .aiter import g\n from aiterate import h\nexcept ImportError: 0\n"
    )
    parsed = Source(written(tmp_path, {"m.py": text}) / "m.py")
    assert parsed.optional_imports("aiter") == [("aiter.ops", "c"), ("other", "d"), (".", "e")]


def test_parameters_are_named_without_self_and_with_the_stars_of_a_dict():
    for text, names in (("self, a, /, b, *c, d, **e", ["a", "b", "d", "**e"]), ("a", ["a"])):
        assert source.parameters(ast.parse(f"def f({text}): 0").body[0]) == names


def test_calls_are_found_by_a_plain_or_dotted_name_in_the_order_of_the_source():
    body = ast.parse("if (f(1), g.f(2)): f\nf.g(), g(f), f()()\nx.f(3)")
    assert [ast.unparse(call) for call in source.calls(body, "f")] == ["f(1)", "g.f(2)", "f()", "x.f(3)"]


def test_a_name_is_mentioned_as_a_name_an_attribute_or_a_string():
    assert all(source.mentions(ast.parse(text), "x") for text in ("x", "a.x", "x.a", "'x'"))
    assert not any(source.mentions(ast.parse(text), "x") for text in ("xs", "'an x'", "f(x=1)"))


def test_enclosing_tests_are_of_ifs_whose_body_a_call_lies_in():
    body = ast.parse("while w:\n if a:\n  if b:\n   if x(): 0\n  elif c: y()\n  else: z()\n if d: 0")
    for name, tests in (("x", ["a", "b"]), ("y", ["a", "c"]), ("z", ["a"])):
        (call,) = source.calls(body, name)
        assert [ast.unparse(test) for test in source.enclosing_tests(body, call)] == tests


@pytest.fixture
def on_path(monkeypatch):
    """Puts folders on an otherwise empty sys.path, where no SGLang was looked for yet."""
    monkeypatch.setattr(source, "_found", [])
    monkeypatch.delitem(sys.modules, "sglang", raising=False)
    return lambda *folders: monkeypatch.setattr(sys, "path", [str(folder) for folder in folders])


SGLANG = {"sglang/__init__.py": "raise AssertionError('imported')", "sglang/srt/a.py": ""}


def test_the_release_is_the_one_that_would_be_imported_and_stays_so(tmp_path, on_path):
    first, second = (written(tmp_path / name, SGLANG) for name in ("first", "second"))
    for folders in ((first, second), (second,)):
        on_path(*folders)
        assert source.installed().root == first / "sglang" and len(source._found) == 1


def test_the_release_is_the_one_that_is_imported_wherever_the_path_leads(tmp_path, on_path, monkeypatch):
    on_path(written(tmp_path / "first", SGLANG))
    place = written(tmp_path / "second", SGLANG) / "sglang"
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__path__=[str(place)], __spec__=None))
    assert source.installed().root == place


@pytest.mark.parametrize("files", [{}, {"sglang.py": ""}, {"sglang/a.py": ""}])
def test_without_sglang_there_is_no_release_until_a_path_is_added(tmp_path, on_path, files):
    on_path(written(tmp_path / "nothing", files))
    assert source.installed() is None
    on_path(written(tmp_path / "something", SGLANG))
    assert source.installed() is not None
