"""How decode_pa builds a backend for decode, one condition at a time, on plain objects."""

import sys
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from decode_objects import (
    BF16,
    FP8,
    AiterAttnBackend,
    HybridAttnBackend,
    HybridLinearAttnBackend,
    SWAKVPool,
    Thing,
    Triton,
    known,
    layer,
    model,
    runner,
)

from sglang_aiter_ext import aiter_kernels, logs
from sglang_aiter_ext.aiter_kernels import RAGGED_DECODE
from sglang_aiter_ext.capabilities.decode_pa import building as pa
from sglang_aiter_ext.errors import DECODE_ELSEWHERE, DecodeError, SettingError
from sglang_aiter_ext.kept import DECODE, RUNNER, DecodeNotes, RunnerNotes
from sglang_aiter_ext.names import BACKEND, REGISTRY

ATTENTION = BACKEND.rpartition(".")[0]
HELPS = f"; {DECODE_ELSEWHERE}$"


def importable(monkeypatch, name, **attributes):
    module = ModuleType(name)
    module.__dict__.update(attributes)
    monkeypatch.setitem(sys.modules, name, module)
    return module


@pytest.fixture(autouse=True)
def asked_for(nothing_counted, monkeypatch):
    """Decode is asked for, where SGLang's registry is imported; strict mode is not."""
    for name in ("SGLANG_USE_AITER_UNIFIED_ATTN", "SGLANG_AITER_EXT_STRICT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "sglang.srt.runtime_context", raising=False)
    monkeypatch.setenv("SGLANG_USE_AITER_PA", "1")
    importable(monkeypatch, REGISTRY, ATTENTION_BACKENDS={})
    monkeypatch.setattr(pa, "hybrid_class", lambda: HybridLinearAttnBackend)


# ---- what the kernel and the memory allow ----


@pytest.mark.parametrize(
    "problem, has, hip, arch, cache, words",
    [
        (None, True, None, None, FP8, None),
        (None, True, "6", "gfx942:sramecc+", FP8, None),
        (None, True, "6", "gfx950", FP8, None),
        (None, True, "6", "gfx90a", BF16, None),
        (
            None,
            True,
            "6",
            "gfx90a",
            FP8,
            "the GPU is gfx90a, and the kernel with an fp8 KV cache runs on gfx942, gfx950",
        ),
        (None, True, "6", "gfx1100:x", BF16, "the GPU is gfx1100, and the kernel runs on gfx90a, gfx942, gfx950 only"),
        (None, False, "6", "gfx942", FP8, "could not import mla_reduce_v1 from aiter.mla"),
        ("it lacks a kernel", True, "6", "gfx1100", FP8, "cannot be used: it lacks a kernel"),
        ("it lacks a kernel", False, None, None, FP8, "cannot be used: it lacks a kernel"),
    ],
)
def test_aiter_must_be_there_and_the_gpu_one_of_the_kernels(monkeypatch, problem, has, hip, arch, cache, words):
    asked = []
    monkeypatch.setattr(aiter_kernels, "import_problem", lambda *kernels: asked.append(kernels) or problem)
    importable(monkeypatch, BACKEND, first=1, **({"mla_reduce_v1": 1} if has else {}))
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(**({"gcnArchName": arch} if arch else {}))
    )
    facts = known(imports=[("aiter", "first"), ("aiter.mla", "mla_reduce_v1")])
    if words is None:
        pa.check_aiter(facts, runner(kv_cache_dtype=cache))
    else:
        with pytest.raises(DecodeError, match=f"{words}.*Install AITER, or {DECODE_ELSEWHERE}$"):
            pa.check_aiter(facts, runner(kv_cache_dtype=cache))
    assert asked == [(RAGGED_DECODE,)]


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
    monkeypatch.setattr(pa, "workspace_bytes", lambda of: 100)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (left.pop(0), 1000))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptyings.append(1))
    if fits:
        pa.check_memory(runner(device=device))
    else:
        with pytest.raises(
            DecodeError, match=r"needs a decode workspace of 0.00 GiB \(100 bytes\) for 8 requests of up"
        ):
            pa.check_memory(runner(device=device))
    assert (len(emptyings), left) == (emptied, [])


@pytest.mark.parametrize("requests, fits", [(255, True), (256, False)])
def test_partial_outputs_past_the_kernels_offsets_are_refused_on_any_device(monkeypatch, requests, fits):
    """256 requests of 16 heads, 4,096 partitions of 256 tokens and head_dim 256 are 2**32 partial outputs."""
    monkeypatch.setattr(pa, "attention_tp_size", lambda: 1)
    config = SimpleNamespace(num_attention_heads=16, context_len=2**20, head_dim=256)
    one = runner(device="cpu", model_config=config, req_to_token_pool=SimpleNamespace(size=requests))
    if fits:
        pa.check_memory(one)
    else:
        with pytest.raises(DecodeError, match="256 requests of up to 1048576 tokens have 4294967296 partial outputs"):
            pa.check_memory(one)


# ---- building ----


@pytest.mark.parametrize("in_pages, page, given", [(True, 16, True), (True, 1, False), (False, 16, False)])
def test_the_memory_is_checked_for_the_first_backend_and_its_graph_buffer_given(monkeypatch, in_pages, page, given):
    checked = []
    monkeypatch.setattr(pa, "check_aiter", lambda facts, of: checked.append("aiter"))
    monkeypatch.setattr(pa, "check_memory", lambda of: checked.append("memory"))
    registry = SimpleNamespace(ATTENTION_BACKENDS={"aiter": lambda of: AiterAttnBackend(page_size=page, init_cuda_graph_state=None, workspace_buffer=torch.zeros(4))})  # fmt: skip
    one, facts = runner(), known(graph_buffer_in_pages=in_pages)
    # The notes that tell the sides of a router apart are there before any backend is.
    RUNNER.keep(one, RunnerNotes())
    built = [pa.build_decode_backend(registry, one, facts) for _ in range(2)]
    assert checked == ["aiter", "memory", "aiter"]
    assert [backend.init_cuda_graph_state is not None for backend in built] == [given] * 2


@pytest.mark.parametrize(
    "error, message",
    [
        (MemoryError("HIP out of memory"), f"AITER backend cannot be built: MemoryError: HIP out of memory{HELPS}"),
        (DecodeError("they differ"), "^they differ$"),
    ],
)
def test_a_backend_that_sglang_cannot_build_is_a_refusal_with_its_error(monkeypatch, error, message):
    monkeypatch.setattr(pa, "check_aiter", lambda facts, of: None)
    monkeypatch.setattr(pa, "check_memory", lambda runner: None)

    def fails(of):
        raise error

    with pytest.raises(DecodeError, match=message):
        pa.build_decode_backend(SimpleNamespace(ATTENTION_BACKENDS={"aiter": fails}), runner(), known())


def test_the_backends_of_a_runner_share_one_workspace():
    one, first = runner(), AiterAttnBackend(workspace_buffer=torch.zeros(4))
    assert pa.with_shared_workspace(one, lambda: first) is first

    def build():
        assert first.workspace_buffer is None
        return AiterAttnBackend(workspace_buffer=torch.ones(4))

    second = pa.with_shared_workspace(one, build)
    assert first.workspace_buffer is second.workspace_buffer and second.workspace_buffer.sum() == 4
    with pytest.raises(DecodeError, match="differ in size: 4 and 5"):
        pa.with_shared_workspace(one, lambda: AiterAttnBackend(workspace_buffer=torch.zeros(5)))


@pytest.mark.parametrize("attributes", [{}, {"workspace_buffer": None}])
def test_a_backend_without_a_workspace_is_not_one_of_them(attributes):
    one, without = runner(), AiterAttnBackend(**attributes)
    assert pa.with_shared_workspace(one, lambda: without) is without
    assert not RUNNER.on(one).backends


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


# ---- the wrapper ----


def build(of_runner, full, facts=None):
    """What the release's own attn_backend_wrapper is called with."""
    return pa.build(
        facts or known(), lambda runner, full: HybridLinearAttnBackend(full, runner, [0]), None, (of_runner, full), {}
    )


def noted(decode):
    """What the steps are told of a backend: (its layers were seen, it was routed, its cache is fp8)."""
    notes = DECODE.on(decode)
    return notes and (notes.layers_seen, notes.routed, notes.fp8)


@pytest.fixture
def lines(caplog):
    caplog.set_level("INFO", logger=logs.logger.name)
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
        with pytest.raises(DecodeError, match=f"is not served \\({wanted}\\)"):
            build(one, full)
    else:
        assert build(one, full) == (one, full)
    ((level, message),) = lines()
    assert level == ("WARNING" if wanted in LOUD else "INFO") and f"({wanted})" in message
    assert vars(full) == {} and RUNNER.on(one) is None


@pytest.mark.parametrize("strict", ["0", "1"])
@pytest.mark.parametrize("other", [HybridLinearAttnBackend(Triton(), 1, [0]), Thing()], ids=["within", "instead"])
def test_a_backend_that_sglang_replaces_is_not_routed_and_takes_no_memory(monkeypatch, lines, other, strict):
    """From 0.5.20 on, a model of sparse attention gets a backend of SGLang's own choice."""
    monkeypatch.setenv("SGLANG_AITER_EXT_STRICT", strict)
    monkeypatch.setattr(pa, "build_decode_backend", lambda *args: pytest.fail("a decode backend was built"))
    one = runner()
    if strict == "1":
        with pytest.raises(DecodeError, match=r"is not served \(replaced\): SGLang gives the full-attention layers"):
            pa.build(known(), lambda *args: other, None, (one, Triton()), {})
    else:
        assert pa.build(known(), lambda *args: other, None, (one, Triton()), {}) is other
    ((level, message),) = lines()
    name = "Triton" if isinstance(other, HybridLinearAttnBackend) else "Thing"
    assert level == "WARNING" and f"of this model to {name}, whatever" in message and RUNNER.on(one) is None


@pytest.mark.parametrize("soft_cap, marked", [(False, True), (True, False)])
def test_a_users_own_aiter_backend_is_given_the_layers_figures_where_it_can_be(lines, soft_cap, marked):
    one, full = runner(layer(sliding_window_size=5 if soft_cap else -1)), AiterAttnBackend()
    assert build(one, full) == (one, full)
    assert (DECODE.on(full) is not None) is marked
    assert ("its kernel is given" in lines()[0][1]) is marked and lines()[0][0] == "INFO"
    assert RUNNER.on(one) is None


@pytest.mark.parametrize("kind", [AiterAttnBackend, Triton])
def test_an_aiter_prefill_side_shares_the_workspace(lines, kind):
    one = runner(decode_attention_backend_str="a", prefill_attention_backend_str="b")
    pa.leave_alone(sys.modules[REGISTRY], one, Triton(), known(wraps_each_side=True))
    full = kind(workspace_buffer=torch.zeros(2))
    assert build(one, full, known(wraps_each_side=True)) == (one, full)
    assert (full in RUNNER.on(one).backends) is (kind is AiterAttnBackend)
    assert lines()[0][0] == "INFO" and DECODE.on(full) is None


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
    assert noted(decode) == (seen, True, True)
    assert "prefill on Triton, decode on AiterAttnBackend" in lines()[0][1]


def test_decode_stays_where_it_was_if_a_module_of_the_capability_could_not_be_wrapped_meanwhile(monkeypatch, lines):
    monkeypatch.setattr(pa, "build_decode_backend", lambda registry, of, facts: AiterAttnBackend())
    monkeypatch.setattr(pa, "router_class", lambda: lambda of, **sides: (of, sides))
    monkeypatch.setattr(pa.wrapping, "inert", {pa.NAME})
    monkeypatch.setattr(pa, "check_aiter", lambda facts, of: None)
    for prefill in (Triton(), AiterAttnBackend()):
        one, full = runner(), HybridAttnBackend(prefill_backend=prefill, decode_backend=Triton())
        assert build(one, full) == (one, full) and lines() == []


def test_an_aiter_prefill_backend_decodes_too(monkeypatch, lines):
    checked = []
    monkeypatch.setattr(pa, "check_aiter", lambda *given: checked.append(given))
    prefill, one = AiterAttnBackend(), runner(kv_cache_dtype=BF16)
    assert build(one, HybridAttnBackend(prefill_backend=prefill, decode_backend=Triton())) == (one, prefill)
    assert noted(prefill) == (True, True, False) and [of for _, of in checked] == [one]


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
    assert (
        pa.put_right(sys.modules[REGISTRY], one, HybridAttnBackend(decode_backend=decode), known(**facts)) is expected
    )
    assert noted(decode) == ((True, False, one.kv_cache_dtype is FP8) if expected else None)


def test_a_backend_is_looked_after_with_the_parameters_that_it_takes():
    def forward_decode(q, layer, sinks=None):
        """As that of a release to come."""

    decode = AiterAttnBackend(forward_decode=forward_decode)
    pa.look_after(decode, runner(kv_cache_dtype=BF16), layers_seen=False)
    assert DECODE.on(decode) == DecodeNotes(False, True, False, frozenset(("q", "layer", "sinks")))
    pa.look_after(decode, runner(kv_cache_dtype=FP8), layers_seen=True, routed=False)
    assert DECODE.on(decode) == DecodeNotes(True, False, True, frozenset(("q", "layer", "sinks")))


def test_a_variable_that_cannot_be_read_is_an_error_where_the_backend_is_built(monkeypatch):
    monkeypatch.setenv("SGLANG_USE_AITER_PA", "banana")
    with pytest.raises(SettingError, match="^SGLANG_USE_AITER_PA='banana' is not accepted"):
        build(runner(), Triton())


def test_a_model_is_asked_for_as_the_registry_that_is_imported_asks(monkeypatch, lines):
    importable(monkeypatch, REGISTRY, mambaish_config=lambda config: None)
    one, full = runner(), Triton()
    assert build(one, full) == (one, full) and "(not_hybrid)" in lines()[0][1]


def test_the_arguments_may_be_given_by_name(monkeypatch):
    given = dict(full_attn_backend=Triton(), runner=runner(mambaish_config=None))
    assert pa.build(known(), lambda **kwargs: kwargs, None, (), given) == given
