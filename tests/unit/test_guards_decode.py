"""The decisions of decode_pa one condition at a time, on plain objects."""

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from sglang_aiter_ext import counting, installed
from sglang_aiter_ext.bootstrap import ATTENTION
from sglang_aiter_ext.capabilities import decode_pa as pa
from sglang_aiter_ext.capability import NothingToServe

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
SCALED = dict(k_scale=torch.ones(1) / 2, k_scale_float=0.5, v_scale=torch.ones(1), v_scale_float=1.0)


class Thing:
    """Anything with attributes that a weak reference can point at."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class AiterAttnBackend(Thing):
    pass


class Derived(AiterAttnBackend):
    pass


class Triton(Thing):
    def forward_extend(self):
        pass


class Scaling(Thing):
    def forward_extend(self):
        return self.k_scale


class HybridAttnBackend(Thing):
    pass


class SWAKVPool:
    pass


class RadixAttention(Thing):
    pass


@pytest.fixture(autouse=True)
def fresh(nothing_counted, monkeypatch):
    for name in ("SGLANG_USE_AITER_UNIFIED_ATTN", "SGLANG_AITER_EXT_STRICT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SGLANG_USE_AITER_PA", "1")


def known(**changed):
    parameters = ("layer", "forward_batch", "save_kv_cache", "q", "k", "v", "mixed_qkv")
    fields = dict(reads_fp8=True, casts_pool=False, writes_at_unit_scale=True, graph_buffer_in_pages=False, wraps_each_side=False,
                  parameters=parameters, layer_at=0, own=frozenset(parameters), imports=[])  # fmt: skip
    return SimpleNamespace(**{**fields, **changed})


def layer(of=RadixAttention, **changed):
    fields = dict(layer_id=3, qk_head_dim=256, v_head_dim=256, logit_cap=0.0, scaling=256**-0.5, is_cross_attention=False,
                  k_scale=None, v_scale=None)  # fmt: skip
    return of(**{**fields, **changed})


def model(*layers, names=()):
    return Thing(modules=lambda: layers, named_parameters=lambda: [(name, None) for name in names])


def runner(*layers, **changed):
    fields = dict(
        model=model(*(layers or (layer(),))), mambaish_config=SimpleNamespace(full_attention_layer_ids=[3]),
        model_config=SimpleNamespace(dtype=BF16, num_attention_heads=16, context_len=1000, head_dim=256),
        server_args=SimpleNamespace(disable_cuda_graph=True), kv_cache_dtype=FP8, token_to_kv_pool=SimpleNamespace(),
        req_to_token_pool=SimpleNamespace(size=8), device="cuda",
    )  # fmt: skip
    return Thing(**{**fields, **changed})


REGISTRY = SimpleNamespace()


def reason(of_runner, full=None, facts=None):
    found = pa.leave_alone(REGISTRY, of_runner, full or Triton(), facts or known())
    return found and found[0]


# ---- which runners are served ----


def test_the_hybrid_config_is_asked_for_as_the_release_asks():
    config = object()
    assert pa.hybrid_config(REGISTRY, Thing(mambaish_config=config)) is config
    assert pa.hybrid_config(REGISTRY, Thing()) is None
    asking = SimpleNamespace(mambaish_config=lambda of: (config, of))
    assert pa.hybrid_config(asking, Thing(model_config=7)) == (config, 7)


ARGS = SimpleNamespace
LEFT = {
    "not_hybrid": (dict(mambaish_config=None), {}, None), "draft_worker": (dict(is_draft_worker=True), {}, None),
    "mla": (dict(use_mla_backend=True), {}, None), "aiter_already": ({}, {}, Derived()),
    "speculative_attention_mode": (dict(server_args=ARGS(speculative_algorithm="EAGLE", speculative_attention_mode="decode")), {}, None),
    "vectorized_5d": (dict(token_to_kv_pool=ARGS(kv_cache_layout="vectorized_5d")), {}, None),
    "kv_cache_dtype": (dict(kv_cache_dtype=torch.float8_e5m2), {}, None), "fp8_pool_cast": ({}, dict(reads_fp8=False), None),
    "layer": (dict(model=model(layer(v_head_dim=128))), {}, None), "kv_scales": (dict(model=model(layer(**SCALED))), {}, None),
    "sinks": (dict(model=model(layer(), names=["a.weight", "layers.3.attn.sinks"])), {}, None),
}  # fmt: skip


@pytest.mark.parametrize("wanted", LEFT)
def test_each_reason_to_leave_a_runner_alone(wanted):
    of_runner, of_known, full = LEFT[wanted]
    found, details = pa.leave_alone(REGISTRY, runner(**of_runner), full or Triton(), known(**of_known))
    assert found == wanted and details


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_a_scale_for_one_of_k_and_v_is_left_alone_whoever_writes(name):
    """SGLang's Triton backend applies neither where K has none, and the kernel would be given the other."""
    one = layer(**{name: torch.ones(1) * 2, f"{name}_float": 2.0})
    assert reason(runner(model=model(one)), Scaling()) == "kv_scales"


def test_a_backend_that_sglang_cannot_build_is_a_refusal_with_its_error(monkeypatch):
    monkeypatch.setattr(pa, "check_aiter", lambda known: None)
    monkeypatch.setattr(pa, "check_memory", lambda runner: None)

    def fails(of):
        raise MemoryError("HIP out of memory")

    with pytest.raises(
        pa.DecodeError, match="AITER backend cannot be built: MemoryError: HIP out of memory; start with"
    ):
        pa.build_decode_backend(SimpleNamespace(ATTENTION_BACKENDS={"aiter": fails}), runner(), known())


SERVED = {
    "fp8": ({}, {}, None), "fnuz": (dict(kv_cache_dtype=torch.float8_e4m3fnuz), {}, None),
    "bf16": (dict(kv_cache_dtype=BF16), dict(reads_fp8=False), None), "no model": (dict(model=None), {}, None),
    "drafts verified by prefill": (dict(server_args=ARGS(speculative_algorithm="EAGLE", speculative_attention_mode="prefill")), {}, None),
    "drafts, no mode": (dict(server_args=ARGS(speculative_algorithm="EAGLE")), {}, None),
    "no drafts": (dict(server_args=ARGS(speculative_algorithm=None, speculative_attention_mode="decode")), {}, None),
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
        details = pa.leave_alone(REGISTRY, runner(), Triton(), known(reads_fp8=False, casts_pool=casts))[1]
        assert words in details


@pytest.mark.parametrize(
    "wraps, router, sides, expected",
    [
        (True, False, "ab", [None, "prefill_side", None]),
        (False, False, "ab", [None] * 3),
        (True, True, "ab", [None] * 3),
        (True, False, "aa", [None] * 3),
    ],
)
def test_the_second_side_that_is_built_is_prefill(wraps, router, sides, expected):
    one = runner(decode_attention_backend_str=sides[0], prefill_attention_backend_str=sides[1])
    full = HybridAttnBackend(prefill_backend=Triton(), decode_backend=Triton()) if router else Triton()
    assert [reason(one, full, known(wraps_each_side=wraps)) for _ in range(3)] == expected


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
    ],
)
def test_each_need_of_a_layer(changed, regular, unified):
    for expected, mode in ((regular, False), (unified, True)):
        found = pa.layer_problem(layer(**changed), mode)
        assert found is None if expected is None else expected in found


def test_layers_are_looked_at_as_the_pool_will_decode():
    assert reason(runner(layer(logit_cap=30.0))) is None
    assert reason(runner(layer(logit_cap=30.0), token_to_kv_pool=SWAKVPool())) == "layer"


def test_full_layers_are_the_radix_attention_layers_of_the_config():
    config, mine, other = SimpleNamespace(full_attention_layer_ids=[3, 4]), layer(), layer(layer_id=5)
    assert pa.full_layers(runner(mine, other, layer(of=Thing)), config) == [mine]
    assert pa.full_layers(runner(other), config) is None
    assert pa.full_layers(runner(mine), SimpleNamespace()) is None
    assert pa.full_layers(runner(model=None), config) is None
    assert pa.full_layers(runner(model=object()), config) is None


def test_a_backend_without_source_applies_no_scales():
    assert not pa.writes_scaled(type("Compiled", (), {"forward_extend": len})())


@pytest.mark.parametrize("value, chosen", [("1", 1), (" True ", 1), ("0", 0), ("yes", 0), (None, 0)])
def test_unified_attention_is_chosen_by_the_variable_or_the_pool(monkeypatch, value, chosen):
    if value is not None:
        monkeypatch.setenv("SGLANG_USE_AITER_UNIFIED_ATTN", value)
    assert pa.uses_unified(SimpleNamespace()) is bool(chosen)
    assert pa.uses_unified(type("Pool", (SWAKVPool,), {})())


# ---- what the kernel and the memory allow ----


def importable(monkeypatch, name, **attributes):
    module = ModuleType(name)
    module.__dict__.update(attributes)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.mark.parametrize(
    "problem, has, hip, arch, words",
    [
        (None, True, None, None, None),
        (None, True, "6", "gfx942:sramecc+", None),
        (None, True, "6", "gfx1100:x", "the GPU is gfx1100, and"),
        (None, False, "6", "gfx942", "could not import mla_reduce_v1 from aiter.mla"),
        ("it lacks a kernel", True, "6", "gfx1100", "cannot be used: it lacks a kernel"),
        ("it lacks a kernel", False, None, None, "cannot be used: it lacks a kernel"),
    ],
)
def test_aiter_must_be_there_and_the_gpu_cdna(monkeypatch, problem, has, hip, arch, words):
    monkeypatch.setattr(installed, "aiter_problem", lambda *kernels: problem)
    importable(monkeypatch, f"{ATTENTION}.aiter_backend", first=1, **({"mla_reduce_v1": 1} if has else {}))
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**({"gcnArchName": arch} if arch else {}))
    )
    facts = known(imports=[("aiter", "first"), ("aiter.mla", "mla_reduce_v1")])
    if words is None:
        pa.check_aiter(facts)
    else:
        with pytest.raises(pa.DecodeError, match=words):
            pa.check_aiter(facts)


def test_the_attention_tp_size_is_asked_for_where_the_release_keeps_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "sglang.srt.runtime_context", raising=False)
    importable(monkeypatch, "sglang.srt.layers.dp_attention", get_attention_tp_size=lambda: 4)
    assert pa.attention_tp_size() == 4
    context = SimpleNamespace(attn_tp_size=2)
    importable(monkeypatch, "sglang.srt.runtime_context", get_parallel=lambda: context)
    assert pa.attention_tp_size() == 2


def test_the_bytes_of_the_workspace(monkeypatch):
    monkeypatch.setattr(pa, "attention_tp_size", lambda: 2)
    # 8 requests of 8 heads, 4 partitions of 256 tokens, 256 floats and two more each.
    assert pa.workspace_bytes(runner()) == 8 * 8 * 4 * (256 * 4 + 8)
    assert pa.workspace_bytes(runner(token_to_kv_pool=SWAKVPool())) == 0


def config(backend, *sizes):
    return SimpleNamespace(decode=SimpleNamespace(backend=backend, bs=sizes))


@pytest.mark.parametrize(
    "args, runtime, requests, a_token",
    [
        (dict(cuda_graph_config=config("full", 1, 4)), None, 4, 5),
        (dict(cuda_graph_config=config("disabled", 1, 4)), None, 0, 5),
        (dict(cuda_graph_config=config("full", 4)), config("full", 2), 2, 5),
        (dict(cuda_graph_config={"decode": {"max_bs": 4}}), config("full", 2), 2, 5),
        (dict(cuda_graph_config={"decode": {"max_bs": 4}}), None, 0, 5),
        (dict(disable_cuda_graph=True), config("full", 2), 2, 5),
        (dict(disable_cuda_graph=False, cuda_graph_bs=[1, 16]), None, 8, 5),
        (dict(disable_cuda_graph=True, cuda_graph_bs=[1, 16]), None, 0, 5),
        (dict(disable_cuda_graph=False), None, 0, 5),
        (dict(disable_cuda_graph=False, cuda_graph_bs=[3], speculative_num_draft_tokens=6), None, 3, 10),
    ],
)
def test_the_bytes_of_the_graph_buffers(monkeypatch, args, runtime, requests, a_token):
    monkeypatch.delitem(sys.modules, "sglang.srt.runtime_context", raising=False)
    if runtime is not None:
        execution = SimpleNamespace(graph=SimpleNamespace(cuda_graph_config=runtime))
        importable(monkeypatch, "sglang.srt.runtime_context", get_exec=lambda: execution)
    assert pa.graph_bytes(runner(server_args=SimpleNamespace(**args))) == requests * 1000 * a_token


def test_a_runtime_context_without_get_exec_is_an_older_one(monkeypatch):
    importable(monkeypatch, "sglang.srt.runtime_context")
    assert pa.graph_bytes(runner()) == 0


@pytest.mark.parametrize(
    "device, free, emptied, fits",
    [
        ("cuda:1", [100], 0, True),
        ("cuda", [99, 100], 1, True),
        ("cuda", [99, 99], 1, False),
        ("cpu", [], 0, True),
    ],
)
def test_memory_is_asked_for_again_before_it_is_refused(monkeypatch, device, free, emptied, fits):
    left, emptyings = list(free), []
    monkeypatch.setattr(pa, "workspace_bytes", lambda of: 60)
    monkeypatch.setattr(pa, "graph_bytes", lambda of: 40)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (left.pop(0), 1000))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptyings.append(1))
    try:
        pa.check_memory(runner(device=device))
        fitted = True
    except pa.DecodeError:
        fitted = False
    assert (fitted, len(emptyings), left) == (fits, emptied, [])


# ---- building ----


@pytest.mark.parametrize("in_pages, page, given", [(True, 16, True), (True, 1, False), (False, 16, False)])
def test_the_memory_is_checked_for_the_first_backend_and_its_graph_buffer_given(monkeypatch, in_pages, page, given):
    checked = []
    monkeypatch.setattr(pa, "check_aiter", lambda facts: checked.append("aiter"))
    monkeypatch.setattr(pa, "check_memory", lambda of: checked.append("memory"))
    registry = SimpleNamespace(ATTENTION_BACKENDS={"aiter": lambda of: AiterAttnBackend(page_size=page, init_cuda_graph_state=None, workspace_buffer=torch.zeros(4))})  # fmt: skip
    one, facts = runner(), known(graph_buffer_in_pages=in_pages)
    built = [pa.build_decode_backend(registry, one, facts) for _ in range(2)]
    assert checked == ["aiter", "memory", "aiter"]
    assert [backend.init_cuda_graph_state is not None for backend in built] == [given] * 2


def test_the_backends_of_a_runner_share_one_workspace():
    one, first = runner(), AiterAttnBackend(workspace_buffer=torch.zeros(4))
    assert pa.with_shared_workspace(one, lambda: first) is first

    def build():
        assert first.workspace_buffer is None
        return AiterAttnBackend(workspace_buffer=torch.ones(4))

    second = pa.with_shared_workspace(one, build)
    assert first.workspace_buffer is second.workspace_buffer and second.workspace_buffer.sum() == 4
    with pytest.raises(pa.DecodeError, match="differ in size: 4 and 5"):
        pa.with_shared_workspace(one, lambda: AiterAttnBackend(workspace_buffer=torch.zeros(5)))


@pytest.mark.parametrize("attributes", [{}, {"workspace_buffer": None}])
def test_a_backend_without_a_workspace_is_not_one_of_them(attributes):
    one, without = runner(), AiterAttnBackend(**attributes)
    assert pa.with_shared_workspace(one, lambda: without) is without
    assert not one._sglang_aiter_ext_backends


def test_the_graph_buffer_has_an_entry_a_token_unless_one_is_given():
    asked = []
    decode = Thing(max_context_len=7, device="cpu", init_cuda_graph_state=lambda *given: asked.append(given))
    pa.give_graph_buffer(decode)
    decode.init_cuda_graph_state(3, 5)
    decode.init_cuda_graph_state(3, 5, "given")
    assert asked[0][:2] == (3, 5) and asked[0][2].shape == (21,) and asked[1] == (3, 5, "given")


def test_the_router_decodes_on_one_side_and_shows_the_other(monkeypatch):
    class AttentionBackend:
        _private = "base"

        def support(self):
            return "base"

    class Router(AttentionBackend):
        def __init__(self, model_runner, prefill_backend, decode_backend):
            self.prefill_backend, self.decode_backend = prefill_backend, decode_backend

    importable(monkeypatch, f"{ATTENTION}.base_attn_backend", AttentionBackend=AttentionBackend)
    importable(monkeypatch, f"{ATTENTION}.hybrid_attn_backend", HybridAttnBackend=Router)
    made = pa.router_class.__wrapped__()
    prefill, decode = Thing(support=lambda: "chosen", other=5), Thing()
    router = made(None, prefill_backend=prefill, decode_backend=decode)
    for is_decode, side in ((True, decode), (False, prefill)):
        assert router._select_backend(SimpleNamespace(is_decode_or_idle=lambda answer=is_decode: answer)) is side
    assert router.support() == "chosen" and made.support is AttentionBackend.support
    assert router.other == 5 and router._private == "base"
    with pytest.raises(AttributeError, match="^other$"):
        made.__new__(made).other  # before __init__


# ---- the wrappers ----


def test_what_is_wrapped_depends_on_the_module(monkeypatch):
    wrapped = []
    monkeypatch.setattr(pa.activation, "wrap", lambda module, name, wrapper, instead: wrapped.append(name))
    monkeypatch.setattr(pa, "facts", lambda release: known())
    for name, attributes in (
        ("attention_registry", {}), ("hybrid_linear_attn_backend", {}), ("aiter_backend", {pa.KERNEL: len}),
    ):  # fmt: skip
        module = ModuleType(f"{ATTENTION}.{name}")
        module.__dict__.update(attributes)
        pa.install(module, None)
    assert wrapped == ["attn_backend_wrapper", "HybridLinearAttnBackend.forward_decode", pa.KERNEL]
    with pytest.raises(NothingToServe):
        pa.install(ModuleType(f"{ATTENTION}.aiter_backend"), None)


def build(of_runner, full, facts=None):
    """What the release's own attn_backend_wrapper is called with."""
    return pa.build(REGISTRY, facts or known(), lambda *args: args, None, (of_runner, full), {})


@pytest.fixture
def lines(caplog):
    caplog.set_level("INFO", logger=counting.logger.name)
    return lambda: [(record.levelname, record.getMessage()) for record in caplog.records]


def test_without_the_variable_nothing_is_looked_at(monkeypatch, lines):
    monkeypatch.setenv("SGLANG_USE_AITER_PA", "0")
    assert build(1, 2) == (1, 2) and lines() == []


QUIET = {"not_hybrid": dict(mambaish_config=None), "draft_worker": dict(is_draft_worker=True)}
LOUD = {"mla": dict(use_mla_backend=True), "kv_cache_dtype": dict(kv_cache_dtype=torch.float16)}


@pytest.mark.parametrize("strict", ["0", "1"])
@pytest.mark.parametrize("wanted", [*QUIET, *LOUD])
def test_a_runner_left_alone_keeps_its_backend_and_only_strict_mode_refuses(monkeypatch, lines, wanted, strict):
    monkeypatch.setenv("SGLANG_AITER_EXT_STRICT", strict)
    one, full = runner(**{**QUIET, **LOUD}[wanted]), Triton()
    if wanted in LOUD and strict == "1":
        with pytest.raises(pa.DecodeError, match=f"is not served \\({wanted}\\)"):
            build(one, full)
    else:
        assert build(one, full) == (one, full)
    ((level, message),) = lines()
    assert level == ("WARNING" if wanted in LOUD else "INFO") and f"({wanted})" in message
    assert vars(full) == {} and "_sglang_aiter_ext_backends" not in vars(one)


@pytest.mark.parametrize("soft_cap, marked", [(False, True), (True, False)])
def test_a_users_own_aiter_backend_is_given_the_layers_figures_where_it_can_be(lines, soft_cap, marked):
    one, full = runner(layer(sliding_window_size=5 if soft_cap else -1)), AiterAttnBackend()
    assert build(one, full) == (one, full)
    assert hasattr(full, "_sglang_aiter_ext_serves") is marked
    assert ("its kernel is given" in lines()[0][1]) is marked and lines()[0][0] == "INFO"
    assert "_sglang_aiter_ext_backends" not in vars(one)


@pytest.mark.parametrize("kind", [AiterAttnBackend, Triton])
def test_an_aiter_prefill_side_shares_the_workspace(lines, kind):
    one = runner(decode_attention_backend_str="a", prefill_attention_backend_str="b")
    pa.leave_alone(REGISTRY, one, Triton(), known(wraps_each_side=True))
    full = kind(workspace_buffer=torch.zeros(2))
    assert build(one, full, known(wraps_each_side=True)) == (one, full)
    assert (full in one.__dict__.get("_sglang_aiter_ext_backends", ())) is (kind is AiterAttnBackend)
    assert lines()[0][0] == "INFO" and not hasattr(full, "_sglang_aiter_ext_serves")


@pytest.mark.parametrize("seen", [True, False])
@pytest.mark.parametrize("in_router", [True, False])
def test_decode_is_routed_to_a_backend_of_its_own(monkeypatch, lines, in_router, seen):
    decode = AiterAttnBackend()
    monkeypatch.setattr(pa, "build_decode_backend", lambda registry, of, facts: decode)
    monkeypatch.setattr(pa, "router_class", lambda: lambda of, **sides: (of, sides))
    monkeypatch.setattr(pa, "workspace_bytes", lambda of: 0)
    prefill = Triton()
    full = HybridAttnBackend(prefill_backend=prefill, decode_backend=Triton()) if in_router else prefill
    one = runner(**({} if seen else {"model": None}))
    assert build(one, full) == (one, (one, dict(prefill_backend=prefill, decode_backend=decode)))
    assert decode._sglang_aiter_ext_serves == (seen, True, True)
    assert "prefill on Triton, decode on AiterAttnBackend" in lines()[0][1]


def test_an_aiter_prefill_backend_decodes_too(monkeypatch, lines):
    checked = []
    monkeypatch.setattr(pa, "check_aiter", checked.append)
    prefill, one = AiterAttnBackend(), runner(kv_cache_dtype=BF16)
    assert build(one, HybridAttnBackend(prefill_backend=prefill, decode_backend=Triton())) == (one, prefill)
    assert prefill._sglang_aiter_ext_serves == (True, True, False) and len(checked) == 1


@pytest.mark.parametrize(
    "changed, facts, expected",
    [
        ({}, {}, True),
        (dict(model=None), {}, True),
        (dict(token_to_kv_pool=SWAKVPool()), {}, False),
        ({}, dict(reads_fp8=False), False),
        (dict(kv_cache_dtype=BF16), dict(reads_fp8=False), True),
        (dict(kv_cache_dtype=BF16), {}, True),
        (dict(model=model(layer(v_head_dim=1))), {}, False),
    ],
)
def test_each_condition_to_put_a_users_own_backend_right(changed, facts, expected):
    decode = AiterAttnBackend()
    one = runner(**changed)
    assert pa.put_right(REGISTRY, one, HybridAttnBackend(decode_backend=decode), known(**facts)) is expected
    mark = (True, False, one.kv_cache_dtype is FP8)
    assert vars(decode) == ({"_sglang_aiter_ext_serves": mark} if expected else {})


def test_a_refusal_is_logged_without_its_traceback_and_other_errors_with_it(monkeypatch):
    handler = logging.Handler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    pa.log_without_traceback(pa.DecodeError("no 100% memory"))

    def shown(text):
        record = logging.LogRecord("name", logging.ERROR, "path", 1, "%s", (text,), None)
        assert handler.filter(record)
        return record.getMessage()

    before, trace = "Scheduler hit an exception: ", "Traceback (most recent call last):\n  File x\n"
    last = f"{pa.__name__}.DecodeError: no 100% memory"
    assert shown(f"{before}{trace}{last}\n") == before + "no 100% memory"
    for text in (
        f"{before}{trace}ValueError: else", "without one: no 100% memory", f"{trace}Other: no 100% memory",
        f"{trace}ValueError: a cause\n\nThe above exception was the direct cause of {trace}{last}",
    ):  # fmt: skip
        assert shown(text) == text
    pa.log_without_traceback(pa.DecodeError("once more"))
    assert handler.filters == [pa._shorten]
    # What cannot be formatted is logging's own to report.
    assert handler.filter(logging.LogRecord("name", logging.ERROR, "path", 1, "bad %d", ("x",), None))


def test_a_refusal_and_an_unreadable_variable_shorten_their_log_line(monkeypatch):
    shortened = []
    monkeypatch.setattr(pa, "log_without_traceback", lambda error: shortened.append(type(error).__name__))
    monkeypatch.setenv("SGLANG_USE_AITER_PA", "banana")
    with pytest.raises(pa.settings.SettingError):
        build(runner(), Triton())
    assert shortened == ["SettingError"]


# ---- one decode call ----


def decode_call(*args, mark=(True, True, True), facts=None, decode=None, in_router=True, **kwargs):
    """(arguments that SGLang's own function gets, what is left for the kernel)."""
    decode = decode or AiterAttnBackend()
    if mark is not None:
        decode._sglang_aiter_ext_serves = mark
    full = HybridAttnBackend(decode_backend=decode) if in_router else decode
    instance = SimpleNamespace(full_attn_backend=full, full_attn_layers=[3])
    return pa.forward_decode(facts or known(), lambda *a, **k: (a, k, pa._scope.value), instance, args, kwargs)


def test_a_full_layer_decodes_in_scope_however_it_is_given():
    mine = layer()
    for router in (True, False):
        assert decode_call(mine, "batch", in_router=router) == ((mine, "batch"), {}, (mine, True))
    assert decode_call(layer=mine, q=1) == ((), {"layer": mine, "q": 1}, (mine, True))
    assert decode_call(1, 2, 3, mine, facts=known(layer_at=3), mark=(True, True, False))[2] == (mine, False)
    assert counting.snapshot() == {pa.NAME: {"decode": 4}}


def test_a_linear_layer_and_a_backend_not_marked_pass_through():
    linear = layer(layer_id=2)
    assert decode_call(linear) == ((linear,), {}, None)
    assert decode_call(q=1) == ((), {"q": 1}, None)
    assert decode_call(layer(), mark=None)[2] is None
    assert counting.snapshot() == {}


def test_only_a_routed_backend_is_spared_what_it_does_not_take():
    decode = AiterAttnBackend(forward_decode=lambda q, k, v, layer, forward_batch, save_kv_cache: None)
    assert decode_call(layer(), decode=decode, extra=None)[1] == {}
    assert decode_call(layer(), decode=decode, mark=(True, False, True), extra=None)[1] == {"extra": None}


def test_a_layer_that_was_not_seen_before_is_looked_at_now():
    windowed = layer(sliding_window_size=9)
    assert decode_call(layer(), mark=(False, True, True))[2] is not None
    assert decode_call(windowed)[2] is not None
    with pytest.raises(pa.DecodeError, match="layer 3 has a sliding window of 9"):
        decode_call(windowed, mark=(False, True, True))
    capped, unified = layer(logit_cap=1.0), AiterAttnBackend(use_triton_unified_attention=True)
    assert decode_call(capped, mark=(False, True, True))[2] is not None
    with pytest.raises(pa.DecodeError, match="soft cap 1.0"):
        decode_call(capped, mark=(False, True, True), decode=unified)


@pytest.mark.parametrize(
    "fp8, unit_writes, scaled, divided",
    [(True, True, True, True), (False, True, True, False), (True, False, True, False), (True, True, False, False)],
)
def test_keys_are_divided_by_their_scale_only_where_they_are_written_at_unit_scale(fp8, unit_writes, scaled, divided):
    mine = layer(**(SCALED if scaled else {}))
    args, kwargs, _ = decode_call(
        mine, "batch", k=torch.ones(1), mark=(True, True, fp8), facts=known(writes_at_unit_scale=unit_writes)
    )
    assert (args == ()) is divided and kwargs["k"].item() == (2.0 if divided else 1.0)


@pytest.mark.parametrize("initialised, capturing, counted", [(1, 1, "capture"), (1, 0, "decode"), (0, 1, "decode")])
def test_a_call_under_capture_is_counted_as_one(monkeypatch, initialised, capturing, counted):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(initialised))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    decode_call(layer())
    assert counting.snapshot() == {pa.NAME: {counted: 1}}


def test_arguments_the_backend_does_not_take_are_dropped_kept_or_refused():
    def takes(sinks=None, **attributes):
        return Thing(forward_decode=lambda q, layer, sinks=None, rope=None: None, **attributes)

    kept = {"q": 1, "mixed_qkv": 2, "rope": 3}
    assert pa.filtered(known(), takes(), kept) == kept and counting.snapshot() == {}
    assert pa.filtered(known(), takes(), {"q": 1, "layer_id": 7, "extra": None, "sinks": None}) == {"q": 1}
    dropped = {"dropped/layer_id": 1, "dropped/extra": 1, "dropped/sinks": 1}
    assert counting.snapshot() == {pa.NAME: dropped}
    for name in ("extra", "sinks"):
        with pytest.raises(pa.DecodeError, match=f"the model passes {name},"):
            pa.filtered(known(), takes(), {name: 5})
    unified = takes(use_triton_unified_attention=True)
    assert pa.filtered(known(), unified, {"sinks": 5}) == {"sinks": 5}
    with pytest.raises(pa.DecodeError):
        pa.filtered(known(), unified, {"extra": 5})


def test_keys_and_values_are_divided_by_their_own_scale_where_they_are_written():
    k, v = torch.full((2,), 4.0), torch.full((2,), 6.0)

    def scaled(of_layer, *args, **kwargs):
        found = pa.scaled(known(), of_layer, args, kwargs)
        return [None if found[name] is None else found[name].tolist() for name in "kv"]

    both = layer(k_scale=torch.tensor(2.0), v_scale=torch.tensor(3.0))
    assert scaled(both, both, "batch", True, "q", k, v) == scaled(both, k=k, v=v) == [[2, 2], [2, 2]]
    assert k.tolist() == [4, 4]  # the model's own stays as it is
    assert scaled(both, k=k, v=v, save_kv_cache=False) == [[4, 4], [6, 6]]
    assert scaled(both, k=None, v=v) == [None, [2, 2]]
    assert scaled(layer(v_scale=torch.tensor(3.0)), k=k, v=v) == [[4, 4], [2, 2]]


def test_the_kernel_is_given_the_layers_scaling_and_scales():
    given = tuple(range(17))

    def kernel(scope):
        return pa._scope.call(
            scope, pa.decode_kernel, (lambda *args, **kwargs: (args, kwargs), None, given, {"x": 1}), {}
        )

    assert kernel(None) == (given, {"x": 1})
    scales = dict(k_scale=torch.tensor([[2.0]], dtype=BF16), v_scale=torch.tensor(3.0))
    args, kwargs = kernel((layer(scaling=0.5, **scales), True))
    assert args[:15] == (*given[:5], 0.5, *given[6:15]) and kwargs == {"x": 1}
    assert [(s.shape, s.dtype, s.item()) for s in args[15:]] == [((1,), torch.float32, x) for x in (2.0, 3.0)]
    assert kernel((layer(scaling=0.5, **scales), False))[0][15:] == (15, 16)
    assert kernel((layer(scaling=0.5), True))[0][15:] == (15, 16)
