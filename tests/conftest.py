"""One tolerance for the whole suite, and where it comes from."""

import pathlib
import sys

import pytest

TESTS = pathlib.Path(__file__).resolve().parent
for path in (TESTS.parent, TESTS / "kit", TESTS / "kit" / "server"):
    if str(path) not in sys.path:
        sys.path.insert(0, str(path))

#: Against float32 attention over the same fp8 queries and cached K/V only the rounding of the
#: bf16 output is left: half a unit in the last place (8 significant bits) of the largest value.
EXACT = 2.0**-8
#: Against queries that were not rounded to e4m3 (relative error up to 2**-4 each): the weighted
#: mean of many keys keeps less than that, relative to the largest value of the result.
FP8 = 2.0**-4


def pytest_collection_modifyitems(items):
    """A test that names a release `make test-quick` does not install is slow."""
    import environment

    for item in items:
        named = {
            v for v in getattr(item, "callspec", item).__dict__.get("params", {}).values() if v in environment.RELEASES
        }
        if named - set(environment.QUICK):
            item.add_marker(pytest.mark.slow)


def pytest_sessionfinish():
    import preloaded

    preloaded.end()


@pytest.fixture
def nothing_counted(monkeypatch):
    """This process has counted and logged nothing yet."""
    from sglang_aiter_ext import counting, logs

    monkeypatch.setattr(counting, "_counts", {})
    monkeypatch.setattr(logs, "_said", set())


def written(folder, files):
    """`folder`, with these files in it: a path inside of it -> its text."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def exact():
    return EXACT


@pytest.fixture
def fp8():
    return FP8
