"""Which runners decode_pa leaves alone and why, one condition at a time, on plain objects."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from decode_objects import (
    BF16,
    SCALED,
    AiterAttnBackend,
    Derived,
    HybridAttnBackend,
    Scaling,
    SWAKVPool,
    Thing,
    Triton,
    known,
    layer,
    model,
    runner,
)

from sglang_aiter_ext.capabilities.decode_pa import routing
from sglang_aiter_ext.kept import RUNNER, Decline
from sglang_aiter_ext.names import REGISTRY as REGISTRY_MODULE

REGISTRY = SimpleNamespace(ATTENTION_BACKENDS={})


@pytest.fixture(autouse=True)
def nothing_resolved(monkeypatch):
    """No unified attention is chosen, and SGLang resolved no setting elsewhere than on ServerArgs."""
    monkeypatch.delenv("SGLANG_USE_AITER_UNIFIED_ATTN", raising=False)
    monkeypatch.delitem(sys.modules, "sglang.srt.runtime_context", raising=False)
    monkeypatch.setitem(sys.modules, REGISTRY_MODULE, REGISTRY)


def left(of_runner, full=None, facts=None):
    found = routing.leave_alone(REGISTRY, of_runner, full or Triton(), facts or known())
    # Each reason has a text, whose arguments fit.
    assert found is None or (isinstance(found, Decline) and found.text)
    return found


def reason(*args):
    found = left(*args)
    return found and found.reason


def test_the_hybrid_config_is_asked_for_as_the_release_asks():
    config = object()
    assert routing.hybrid_config(REGISTRY, Thing(mambaish_config=config)) is config
    assert routing.hybrid_config(REGISTRY, Thing()) is None
    asking = SimpleNamespace(mambaish_config=lambda of: (config, of))
    assert routing.hybrid_config(asking, Thing(model_config=7)) == (config, 7)


ARGS = SimpleNamespace
LEFT = {
    "not_hybrid": (dict(mambaish_config=None), {}, None), "draft_worker": (dict(is_draft_worker=True), {}, None),
    "mla": (dict(use_mla_backend=True), {}, None), "aiter_already": ({}, {}, Derived()),
    "no_decode_batches": (dict(server_args=ARGS(speculative_algorithm="EAGLE")), {}, None),
    "vectorized_5d": (dict(token_to_kv_pool=ARGS(kv_cache_layout="vectorized_5d")), {}, None),
    "kv_cache_dtype": (dict(kv_cache_dtype=torch.float8_e5m2), {}, None), "fp8_pool_cast": ({}, dict(reads_fp8=False), None),
    "layer": (dict(model=model(layer(v_head_dim=128))), {}, None), "kv_scales": (dict(model=model(layer(**SCALED))), {}, None),
    "sinks": (dict(model=model(layer(), names=["a.weight", "layers.3.attn.sinks"])), {}, None),
}  # fmt: skip


@pytest.mark.parametrize("wanted", LEFT)
def test_each_reason_to_leave_a_runner_alone(wanted):
    of_runner, of_known, full = LEFT[wanted]
    assert reason(runner(**of_runner), full, known(**of_known)) == wanted


def test_a_reason_names_what_it_is_about():
    scaled, odd = layer(**SCALED), layer(k_scale=torch.ones(1), k_scale_float=2.0)
    for of_runner, words in (
        (runner(scaled), "layer 3 has K/V scales that Triton does not apply to the cache"),
        (runner(odd), "layer 3 has a scale for one of K and V, which backends read differently"),
        (runner(layer(sliding_window_size=7)), "layer 3 has a sliding window of 7, which the decode kernel lacks"),
        (
            runner(kv_cache_dtype=torch.float16),
            "the kernel reads no torch.float16 cache for torch.bfloat16 activations",
        ),
        (runner(model=model(layer(), names=["a.sinks"])), "the model has attention sinks (a.sinks), which"),
    ):
        assert left(of_runner).text.startswith(words)


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_a_scale_for_one_of_k_and_v_is_left_alone_whoever_writes(name):
    """SGLang's Triton backend applies neither where K has none, and the kernel would be given the other."""
    one = layer(**{name: torch.ones(1) * 2, f"{name}_float": 2.0})
    assert reason(runner(model=model(one)), Scaling()) == "kv_scales"


SERVED = {
    "fp8": ({}, {}, None), "fnuz": (dict(kv_cache_dtype=torch.float8_e4m3fnuz), {}, None),
    "bf16": (dict(kv_cache_dtype=BF16), dict(reads_fp8=False), None), "no model": (dict(model=None), {}, None),
    "no drafts": (dict(server_args=ARGS(speculative_algorithm=None, speculative_attention_mode="decode")), {}, None),
    "the decode role": (dict(server_args=ARGS(disaggregation_mode="decode")), {}, None),
    "scales of a bf16 cache": (dict(kv_cache_dtype=BF16, model=model(layer(**SCALED))), {}, None),
    "half the scales of one": (dict(kv_cache_dtype=BF16, model=model(layer(k_scale=torch.ones(1)))), {}, None),
    "scales that prefill applies": (dict(model=model(layer(**SCALED))), {}, Scaling()),
    "scales a router's prefill applies": (dict(model=model(layer(**SCALED))), {}, HybridAttnBackend(prefill_backend=Scaling(), decode_backend=Triton())),
    "sinks elsewhere in a name": (dict(model=model(layer(), names=["sinks.weight"])), {}, None),
    "a router with AITER for prefill": ({}, {}, HybridAttnBackend(prefill_backend=AiterAttnBackend(), decode_backend=Triton())),
}  # fmt: skip


@pytest.mark.parametrize("case", SERVED)
def test_each_neighbour_of_a_reason_is_served(case):
    of_runner, of_known, full = SERVED[case]
    assert reason(runner(**of_runner), full, known(**of_known)) is None


def test_the_decode_side_of_a_router_counts():
    router = HybridAttnBackend(prefill_backend=Triton(), decode_backend=AiterAttnBackend())
    assert reason(runner(), router) == "aiter_already"


def test_what_a_release_does_with_an_fp8_cache_is_said():
    for casts, words in ((True, "casts the whole fp8 KV pool"), (False, "tells the kernel that the cache is bf16")):
        assert words in left(runner(), Triton(), known(reads_fp8=False, casts_pool=casts)).text


@pytest.mark.parametrize(
    "wraps, router, sides, expected",
    [
        (True, False, "ab", [None, "prefill_side", None, "prefill_side"]),
        (False, False, "ab", [None] * 4),
        (True, True, "ab", [None] * 4),
        (True, False, "aa", [None] * 4),
    ],
)
def test_the_second_side_that_is_built_is_prefill(wraps, router, sides, expected):
    one = runner(decode_attention_backend_str=sides[0], prefill_attention_backend_str=sides[1])
    full = HybridAttnBackend(prefill_backend=Triton(), decode_backend=Triton()) if router else Triton()
    assert [reason(one, full, known(wraps_each_side=wraps)) for _ in range(4)] == expected
    # What is kept on the runner says so; where sides are not told apart, nothing is kept.
    notes = RUNNER.on(one)
    assert notes is None if expected[1] is None else notes.prefill_is_next is False


def test_what_is_kept_of_a_runner_stays_where_its_sides_are_told_apart():
    one = runner(decode_attention_backend_str="a", prefill_attention_backend_str="b")
    left(one, facts=known(wraps_each_side=True))
    notes = RUNNER.on(one)
    left(one, facts=known(wraps_each_side=True))
    assert RUNNER.on(one) is notes


@pytest.mark.parametrize(
    "changed, regular, unified",
    [
        ({}, None, None),
        (dict(sliding_window_size=7), "sliding window of 7", "sliding window"),
        (dict(sliding_window_size=-1), None, None),
        (dict(v_head_dim=128), "256 for Q and K and 128 for V", "head_dim"),
        (dict(is_cross_attention=True), "cross or encoder", "cross or encoder"),
        (dict(logit_cap=30.0), None, "soft cap 30.0"),
        (dict(scaling=0.5), None, "scaling 0.5"),
        *((dict(qk_head_dim=n, v_head_dim=n, scaling=n**-0.5), None, None) for n in (64, 128)),
        *((dict(qk_head_dim=n, v_head_dim=n, scaling=n**-0.5), f"head_dim {n}", None) for n in (80, 96, 112, 192, 512)),
        (dict(tp_q_head_num=32), None, None),
        (dict(tp_q_head_num=34), "34 query heads over 2 KV heads", None),
        (dict(tp_q_head_num=32, tp_k_head_num=1), None, None),
        (dict(tp_q_head_num=33, tp_k_head_num=1), "33 query heads over 1 KV heads", None),
        (dict(tp_q_head_num=15, tp_k_head_num=1), None, None),
    ],
)
def test_each_need_of_a_layer(changed, regular, unified):
    for expected, mode in ((regular, False), (unified, True)):
        found = routing.layer_problem(layer(**changed), mode)
        assert found is None if expected is None else expected in found


def test_layers_are_looked_at_as_the_pool_will_decode():
    assert reason(runner(layer(logit_cap=30.0))) is None
    assert reason(runner(layer(logit_cap=30.0), token_to_kv_pool=SWAKVPool())) == "layer"


def test_full_layers_are_the_radix_attention_layers_of_the_config():
    config, mine, other = SimpleNamespace(full_attention_layer_ids=[3, 4]), layer(), layer(layer_id=5)
    assert routing.full_layers(runner(mine, other, layer(of=Thing)), config) == [mine]
    assert routing.full_layers(runner(other), config) is None
    assert routing.full_layers(runner(mine), SimpleNamespace()) is None
    assert routing.full_layers(runner(model=None), config) is None
    assert routing.full_layers(runner(model=object()), config) is None


def test_a_parameter_holds_sinks_where_the_last_part_of_its_name_says_so():
    assert routing.sink_parameter(model(names=["a.weight", "layers.3.sinks", "b.sink"])) == "layers.3.sinks"
    assert routing.sink_parameter(model(names=["sinks.weight"])) is None and routing.sink_parameter(None) is None


def test_scales_are_applied_by_a_backend_whose_source_reads_them():
    assert routing.writes_scaled(Scaling()) and not routing.writes_scaled(Triton())
    # One without source, and one that does not extend at all.
    assert not routing.writes_scaled(type("Compiled", (), {"forward_extend": len})())


def test_a_backend_is_known_by_a_name_of_its_classes():
    assert routing.is_aiter(Derived()) and not routing.is_aiter(Triton())
    assert routing.is_router(HybridAttnBackend()) and not routing.is_router(AiterAttnBackend())


def test_the_sides_of_a_runner_differ_where_their_backends_have_different_names():
    def asked(**sides):
        return routing.sides_differ(Thing(**{f"{side}_attention_backend_str": name for side, name in sides.items()}))

    assert asked(decode="a", prefill="b") and not asked(decode="a", prefill="a") and not asked()


@pytest.mark.parametrize("value, chosen", [("1", 1), (" True ", 1), ("0", 0), ("yes", 0), (None, 0)])
def test_unified_attention_is_chosen_by_the_variable_or_the_pool(monkeypatch, value, chosen):
    if value is not None:
        monkeypatch.setenv("SGLANG_USE_AITER_UNIFIED_ATTN", value)
    assert routing.uses_unified(SimpleNamespace()) is bool(chosen)
    assert routing.uses_unified(type("Pool", (SWAKVPool,), {})())


def test_a_setting_is_as_sglang_resolved_it_and_else_as_it_was_asked_for(monkeypatch):
    asked = Thing(server_args=SimpleNamespace(size=1))
    assert routing.resolved(asked, "spec", "part.size") == 1 and routing.resolved(asked, "spec", "other") is None
    runtime = ModuleType("sglang.srt.runtime_context")
    monkeypatch.setitem(sys.modules, runtime.__name__, runtime)
    # An older one has no such place.
    assert routing.resolved(asked, "spec", "part.size") == 1
    for published, expected in ((SimpleNamespace(part=SimpleNamespace(size=2)), 2), (None, 1),
                                (SimpleNamespace(part=SimpleNamespace(size=None)), 1)):  # fmt: skip
        runtime.get_spec = lambda published=published: published
        assert routing.resolved(asked, "spec", "part.size") == expected


@pytest.mark.parametrize(
    "changed, words",
    [
        (
            dict(server_args=ARGS(speculative_algorithm="NGRAM")),
            "with --speculative-algorithm NGRAM each step is a target",
        ),
        (
            dict(server_args=ARGS(disaggregation_mode="prefill")),
            "with --disaggregation-mode prefill another server decodes",
        ),
        (dict(model_config=ARGS(dtype=BF16, is_generation=False)), "the model generates no tokens"),
        (dict(server_args=ARGS(speculative_algorithm=None, disaggregation_mode="null")), None),
        (dict(model_config=ARGS(dtype=BF16, is_generation=True)), None),
    ],
)
def test_a_runner_without_decode_batches_says_which_option_makes_it_one(changed, words):
    found = routing.without_decode(runner(**changed))
    assert found is None if words is None else found.startswith(words)


def test_drafts_are_asked_for_where_the_release_resolves_them(monkeypatch):
    runtime = ModuleType("sglang.srt.runtime_context")
    monkeypatch.setitem(sys.modules, runtime.__name__, runtime)
    for algorithm, expected in (("EAGLE", "no_decode_batches"), (None, None)):
        runtime.get_spec = lambda algorithm=algorithm: SimpleNamespace(speculative_algorithm=algorithm)
        assert reason(runner()) == expected
    # The algorithm that the user asked for counts as well.
    assert reason(runner(server_args=SimpleNamespace(speculative_algorithm="EAGLE"))) == "no_decode_batches"


def test_what_the_options_ask_is_told_of_the_decode_side(monkeypatch):
    asked = []
    monkeypatch.setattr(routing.options, "unmet", lambda release, of, decode: asked.append(decode) or "it is so")
    decode = Triton()
    found = left(runner(), HybridAttnBackend(prefill_backend=Triton(), decode_backend=decode))
    assert (found.reason, found.text, asked) == ("options", "it is so", [decode])
