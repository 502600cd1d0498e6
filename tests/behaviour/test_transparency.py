"""Code that never heard of the extension finds SGLang's functions and backends as they were."""

import pytest
from child import launch
from preloaded import THIRD_PARTY

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("transparency")]
RELEASES = ["0.5.12.post1", "0.5.18"]
PA = (("SGLANG_USE_AITER_PA", "1"),)


def both(release, case, **options):
    return (launch(release, f"transparency:{case}", env=PA, extension=on, **options).result for on in (True, False))


@pytest.mark.parametrize("release", RELEASES)
def test_signature_source_type_pickling_and_copies_are_those_of_the_function_itself(release):
    # With SGLang's own check for gfx950, which is replaced in a process that has the release loaded.
    ours, plain = both(release, "functions", level=THIRD_PARTY)
    assert set(ours["wrapped"].values()) == ({True} if release == "0.5.18" else {True, False})
    assert [name for name, wrapped in ours["wrapped"].items() if not wrapped] in ([], ["is_gfx95_supported"])
    assert not any(plain["wrapped"].values())
    assert ours["seen"] == plain["seen"]
    assert all(
        seen["function"] and seen["pickle"] and seen["dill"] and seen["copies"] for seen in ours["seen"].values()
    )


@pytest.mark.parametrize("release", RELEASES)
def test_subclasses_override_a_wrapped_method_and_reach_it_by_super_and_by_name(release, exact):
    ours, plain = both(release, "subclasses")
    for name, row in ours.items():
        for key in ("seen", "calls", "isinstance", "ismethod", "self", "func", "dict"):
            assert row[key] == plain[name][key], (name, key)
        assert row["calls"] == (0 if name == "Alone" else 1)
        if row["calls"]:
            assert row["counters"] and sum(row["counters"].values()) == 1 and row["error"] <= exact, name
        else:
            assert not row["counters"]


@pytest.mark.parametrize("release", RELEASES)
def test_every_attribute_of_the_backends_resolves_as_before(release):
    ours, plain = both(release, "attributes")
    assert min(len(names) for names in plain.values()) > 10
    for name in ("aiter hybrid", "aiter full"):
        assert ours[name] == plain[name], name
    # SGLang's own router brings attributes of its own; all others are those of the backend that the user chose.
    own = {*plain["own"], "full_attn_backend"}
    assert {
        item for item in ours["triton hybrid"].items() ^ plain["triton hybrid"].items() if item[0] not in own
    } == set()
    router, chosen = ours["triton full"], plain["triton full"]
    assert not chosen.keys() - router.keys()
    assert not router.keys() - chosen.keys() - own
    assert {name: (router[name], chosen[name]) for name in chosen.keys() - own if router[name] != chosen[name]} == {}


@pytest.mark.parametrize("release", RELEASES)
def test_a_compiled_decode_step_has_no_new_graph_break_or_recompilation_and_is_exact(release, exact):
    ours, plain = both(release, "compiled")
    for name in ("decode", "router"):
        for row in ours[name]:
            assert row["kernels"] == ["paged_attention_ragged"] and row["error"] <= exact, (name, row)
    for row, before in zip(ours["decode"], plain["decode"], strict=True):
        assert (row["breaks"], row["frames"]) == ({}, before["frames"])
        # Without the extension the release decodes at unit scale.
        assert before["error"] > 0.1
    frames = [row["frames"] for row in ours["router"]]
    assert not any(row["breaks"] for row in ours["router"]) and frames[1:] == frames[1:2] * 4


@pytest.mark.parametrize("release", RELEASES)
def test_a_compiled_prefill_is_served_and_nothing_is_compiled_at_each_step(release, exact):
    """SGLang itself keeps extend attention out of what it compiles; where it is compiled, lengths are read off the graph."""
    ours = launch(release, "transparency:compiled", env=PA).result
    for row in ours["prefill"]:
        assert row["kernels"] == ["flash_attn_varlen_fp8_pertensor_func"] and row["error"] <= exact, row
        assert set(row["breaks"]) <= {"Data dependent operator"}
    frames = [row["frames"] for row in ours["prefill"]]
    assert frames[1:] == frames[1:2] * 4
