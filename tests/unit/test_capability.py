"""What a capability says of a release, on capabilities and sources made up here."""

import dataclasses

import pytest
from conftest import written

from sglang_aiter_ext.aiter_kernels import PARAMETERS
from sglang_aiter_ext.capabilities import CAPABILITIES
from sglang_aiter_ext.capability import Needs, Verdict, short
from sglang_aiter_ext.errors import Unsupported
from sglang_aiter_ext.names import BACKEND, LINEAR, REGISTRY, ROUTER
from sglang_aiter_ext.settings import ASM, PA
from sglang_aiter_ext.source import Release


@pytest.mark.parametrize(
    "need, words",
    [
        (dict(parameters="x"), "^f in sglang.m has no parameter x .it has a, b.$"),
        (dict(parameters="a x"), "no parameter x"), (dict(leading="x"), "no parameter x"),
        (dict(leading="b a"), "b, a is the order expected"), (dict(leading="b"), "takes a, b, where b is"),
        (dict(mentions="used x"), "^f in sglang.m does not use x$"), (dict(mentions="x used"), "does not use x"),
    ],
)  # fmt: skip
def test_what_a_release_must_have_is_named_where_it_is_missing(tmp_path, need, words):
    release = Release(written(tmp_path, {"m.py": "def f(a, b): used"}))
    Needs("sglang.m", "f", parameters="b", leading="a b", mentions="used").check(release)
    with pytest.raises(Unsupported, match=words):
        Needs("sglang.m", "f", **need).check(release)


def it(**changed):
    """The first capability, changed."""
    return dataclasses.replace(CAPABILITIES[0], **changed)


def test_a_verdict_is_the_probes_once_all_that_is_needed_is_there(tmp_path):
    release = Release(written(tmp_path, {"m.py": "def f(): 0", "broken.py": "def f(:"}))

    def verdict(release, probe=lambda release: Verdict("apply", "fine"), module="sglang.m"):
        return it(needs=(Needs(module, "f"),), probe=probe).verdict(release)

    assert verdict(release) == ("apply", "fine") and verdict(None).verdict == "not_applicable"
    assert verdict(release, module="sglang.n") == ("unsupported", "the release has no module sglang.n")
    assert "cannot be read" in verdict(release, module="sglang.broken").reason
    assert "internal error of the probe: ZeroDivisionError" in verdict(release, lambda release: 1 / 0).reason


def test_the_targets_are_those_of_the_modules_needed_in_which_something_may_be_wrapped():
    needs = tuple(Needs(module, "f") for module in (BACKEND, ROUTER, LINEAR, "sglang.m", BACKEND))
    assert it(needs=needs).targets == {BACKEND, LINEAR}


def test_what_is_wrapped_is_asked_of_the_release_and_only_where_it_applies(tmp_path):
    release, asked = Release(written(tmp_path, {})), []

    def wrapped(verdict, of=release):
        made = it(
            needs=(),
            probe=lambda release: Verdict(verdict, ""),
            wrappers=lambda release: asked.append(release) or {f"{BACKEND}.C.f": None, f"{REGISTRY}.g": None},
        )
        return made.wraps(of)

    assert wrapped("apply") == ["aiter_backend.C.f", "attention_registry.g"] and asked == [release]
    for verdict in ("upstream", "not_applicable", "unsupported"):
        assert wrapped(verdict) == []
    assert wrapped("apply", None) == [] and asked == [release]


@pytest.mark.parametrize(
    "gpus, for_gpus, switch, expected",
    [
        ((), ("gfx950",), None, None),
        (("gfx942",), (), None, None),
        (("gfx950",), ("gfx950",), None, None),
        (("gfx942", "gfx950"), ("gfx950",), None, None),
        (("gfx942",), ("gfx950",), None, ("not_applicable", "the GPU is gfx942, and this is for gfx950")),
        (("gfx942",), ("gfx950",), ASM, ("not_applicable", "the GPU is gfx942, and this is for gfx950")),
        (("gfx1100", "gfx1101"), ("gfx942", "gfx950"), PA, ("unsupported", "the GPU is gfx1100, gfx1101, and this is for gfx942, gfx950")),
    ],
)  # fmt: skip
def test_a_gpu_that_it_is_not_for_keeps_it_from_acting(gpus, for_gpus, switch, expected):
    assert it(architectures=for_gpus, switch=switch, aiter_problem=None).on_machine(gpus, None) == expected


def test_an_aiter_that_cannot_serve_it_keeps_it_from_acting(tmp_path):
    asked = []
    made = it(architectures=("gfx950",), aiter_problem=lambda folder: asked.append(folder) or "it has none")
    assert made.on_machine((), tmp_path) == ("unsupported", "it has none") and asked == [tmp_path]
    # Without an AITER, SGLang says itself what it cannot import.
    assert made.on_machine((), None) is None
    assert made.on_machine(("gfx942",), tmp_path).reason.startswith("the GPU is gfx942")
    assert it(architectures=(), aiter_problem=lambda folder: None).on_machine(("gfx942",), tmp_path) is None


def test_a_name_is_shortened_by_the_packages_that_sglangs_attention_lies_in():
    assert short(f"{BACKEND}.C.f") == "aiter_backend.C.f" and short("sglang.srt.plugins.f") == "sglang.srt.plugins.f"


def test_each_capability_has_a_target_and_a_name_of_its_own_and_calls_kernels_that_are_known():
    assert all(capability.targets for capability in CAPABILITIES)
    assert len({capability.name for capability in CAPABILITIES}) == len(CAPABILITIES)
    assert {kernel for capability in CAPABILITIES for kernel in capability.kernels} <= PARAMETERS.keys()
