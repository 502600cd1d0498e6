"""docs/aiter.md and its data say what the package reads of AITER's own files, for each release of AITER and SGLang."""

import json
import os
import re

import aiter_facts
import environment
import pytest

from sglang_aiter_ext import aiter_installed

FACTS = json.loads(aiter_facts.FACTS.read_text())
PAGE = aiter_facts.PAGE.read_text()


def test_each_release_of_sglang_has_one_image_and_each_aiter_of_an_image_has_facts():
    images = aiter_facts.images()
    assert [release for image in images for release in image["sglang"]] == list(environment.RELEASES)
    assert {name for image in images for name in image["aiter"]} <= FACTS.keys()
    assert all(image["aiter"] or image["known"].startswith("not known: ") for image in images)


@pytest.mark.slow
def test_the_tables_of_the_page_are_those_of_the_data_and_of_the_releases():
    assert aiter_facts.page(PAGE) == PAGE


def test_the_kernel_is_there_from_its_first_commit_and_release_on_and_its_faulty_build_is_recognised():
    first, faulty, mended = aiter_facts.FAULTY
    assert FACTS[first]["asm"] is FACTS[mended]["asm"] is FACTS["v0.1.19"]["asm"] is FACTS["v0.1.20"]["asm"] is None
    assert "ROCm/aiter#4682" in FACTS[faulty]["asm"] and aiter_installed.FIRST in FACTS["v0.1.18"]["asm"]
    digests = {name: set(fact["objects"].values()) for name, fact in FACTS.items()}
    (bad,) = aiter_installed.BAD_OBJECTS
    assert [name for name, found in digests.items() if bad in found] == [faulty]


@pytest.mark.parametrize(
    "gpu, names", [("gfx942", ["decode_pa"]), ("gfx950", ["decode_pa", "asm_context_prefill", "head_ratio"])]
)
def test_what_acts_is_what_the_release_the_aiter_and_the_gpu_allow(gpu, names):
    assert aiter_facts.acts("0.5.18", FACTS["v0.1.19"], gpu) == names
    without = [name for name in names if name != "asm_context_prefill"]
    assert aiter_facts.acts("0.5.18", FACTS["v0.1.18"], gpu) == without
    lacks_decode = {
        **FACTS["v0.1.18"],
        "kernels": {**FACTS["v0.1.18"]["kernels"], "paged_attention_ragged": "lacks it"},
    }
    assert aiter_facts.acts("0.5.18", lacks_decode, gpu) == without[1:]


def test_rows_that_follow_each_other_and_say_the_same_are_one():
    rows = [("1", ["a"]), ("2", ["a"]), ("3", ["b"]), ("4", ["a"])]
    assert re.findall(r"^\| (.*) \| (.) \|$", aiter_facts.runs(rows), re.M) == [("1 to 2", "a"), ("3", "b"), ("4", "a")]


def test_the_data_is_what_an_aiter_checkout_says():
    checkout = os.environ.get("AITER_CHECKOUT")
    if checkout is None:
        pytest.skip("AITER_CHECKOUT names no clone of ROCm/aiter with its history and tags")
    names = aiter_facts.references(checkout)
    assert {name: aiter_facts.facts(checkout, name) for name in names} == FACTS
