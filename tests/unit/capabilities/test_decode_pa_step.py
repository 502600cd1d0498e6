"""One decode call of decode_pa, one condition at a time, on plain objects."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from decode_objects import BF16, SCALED, AiterAttnBackend, HybridAttnBackend, Triton, known, layer

from sglang_aiter_ext import counting
from sglang_aiter_ext.aiter_kernels import PARAMETERS, RAGGED_DECODE
from sglang_aiter_ext.capabilities.decode_pa import step as pa
from sglang_aiter_ext.capabilities.decode_pa.step import Step
from sglang_aiter_ext.errors import DecodeError
from sglang_aiter_ext.kept import DECODE, DecodeNotes

pytestmark = pytest.mark.usefixtures("nothing_counted")
NAME = "decode_pa"


def notes(**changed):
    takes = frozenset(("q", "k", "v", "layer", "forward_batch", "save_kv_cache"))
    return DecodeNotes(**{**dict(layers_seen=True, routed=True, fp8=True, takes=takes), **changed})


def decode_call(*args, of=None, facts=None, decode=None, in_router=True, **kwargs):
    """(arguments that SGLang's own function gets, what is left for the kernel)."""
    decode = decode or AiterAttnBackend()
    if of is not False:
        DECODE.keep(decode, of or notes())
    full = HybridAttnBackend(decode_backend=decode) if in_router else decode
    instance = SimpleNamespace(full_attn_backend=full, full_attn_layers=[3])
    return pa.forward_decode(facts or known(), lambda *a, **k: (a, k, pa._step.value), instance, args, kwargs)


def test_a_call_inside_of_another_sees_no_note_of_it():
    mine = layer()
    inner = pa._step.call(Step(layer(), True), decode_call, (mine, "batch"), {})
    assert inner == ((mine, "batch"), {}, None) and counting.snapshot() == {}


def test_a_full_layer_decodes_in_scope_however_it_is_given():
    mine = layer()
    for router in (True, False):
        assert decode_call(mine, "batch", in_router=router) == ((mine, "batch"), {}, Step(mine, True))
    assert decode_call(layer=mine, q=1) == ((), {"layer": mine, "q": 1}, Step(mine, True))
    assert decode_call(1, 2, 3, mine, facts=known(layer_at=3), of=notes(fp8=False))[2] == Step(mine, False)
    assert counting.snapshot() == {NAME: {"decode": 4}} and pa._step.value is None


def test_a_linear_layer_and_a_backend_not_looked_after_pass_through():
    linear = layer(layer_id=2)
    assert decode_call(linear) == ((linear,), {}, None)
    assert decode_call(q=1) == ((), {"q": 1}, None)
    assert decode_call(layer(), of=False)[2] is None
    assert counting.snapshot() == {}


def test_notes_that_a_router_passes_on_from_its_prefill_side_are_not_its_own():
    """SGLang's AITER backend on the prefill side of a user's router decodes nothing."""

    class Passing(HybridAttnBackend):
        def __getattr__(self, name):
            return getattr(self.__dict__["prefill_backend"], name)

    prefill = AiterAttnBackend()
    DECODE.keep(prefill, notes())
    router = HybridAttnBackend(decode_backend=prefill)
    for sides in (
        dict(prefill_backend=prefill), dict(prefill_backend=prefill, decode_backend=Triton()), dict(prefill_backend=router)
    ):  # fmt: skip
        instance = SimpleNamespace(full_attn_backend=Passing(**sides), full_attn_layers=[3])
        assert pa.forward_decode(known(), lambda *args: pa._step.value, instance, (layer(),), {}) is None


def test_only_a_routed_backend_is_spared_what_it_does_not_take():
    assert decode_call(layer(), extra=None)[1] == {}
    assert decode_call(layer(), of=notes(routed=False), extra=None)[1] == {"extra": None}


def test_a_layer_that_was_not_seen_before_is_looked_at_now():
    windowed, unseen = layer(sliding_window_size=9), notes(layers_seen=False)
    assert decode_call(layer(), of=unseen)[2] is not None
    assert decode_call(windowed)[2] is not None
    with pytest.raises(DecodeError, match="layer 3 has a sliding window of 9"):
        decode_call(windowed, of=unseen)
    capped, unified = layer(logit_cap=1.0), AiterAttnBackend(use_triton_unified_attention=True)
    assert decode_call(capped, of=unseen)[2] is not None
    with pytest.raises(DecodeError, match="soft cap 1.0.*: start with SGLANG_USE_AITER_PA=0"):
        decode_call(capped, of=unseen, decode=unified)


@pytest.mark.parametrize(
    "fp8, unit_writes, scaled, divided",
    [(True, True, True, True), (False, True, True, False), (True, False, True, False), (True, True, False, False)],
)
def test_keys_are_divided_by_their_scale_only_where_they_are_written_at_unit_scale(fp8, unit_writes, scaled, divided):
    mine = layer(**(SCALED if scaled else {}))
    facts = known(writes_at_unit_scale=unit_writes)
    args, kwargs, _ = decode_call(mine, "batch", k=torch.ones(1), of=notes(fp8=fp8), facts=facts)
    assert (args == ()) is divided and kwargs["k"].item() == (2.0 if divided else 1.0)


@pytest.mark.parametrize("initialised, capturing, counted", [(1, 1, "capture"), (1, 0, "decode"), (0, 1, "decode")])
def test_a_call_under_capture_is_counted_as_one(monkeypatch, initialised, capturing, counted):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(initialised))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    decode_call(layer())
    assert counting.snapshot() == {NAME: {counted: 1}}


def test_arguments_the_backend_does_not_take_are_dropped_kept_or_refused():
    taken = notes(takes=frozenset(("q", "layer", "sinks", "rope")))

    def accepted(kwargs, unified=False, of=taken):
        return pa.accepted(known(), of, unified, kwargs)

    kept = {"q": 1, "mixed_qkv": 2, "rope": 3}
    assert accepted(kept) == kept and counting.snapshot() == {}
    assert accepted({"q": 1, "layer_id": 7, "extra": None, "sinks": None}) == {"q": 1}
    dropped = {"dropped/layer_id": 1, "dropped/extra": 1, "dropped/sinks": 1}
    assert counting.snapshot() == {NAME: dropped}
    for name in ("extra", "sinks"):
        with pytest.raises(DecodeError, match=f"the model passes {name},"):
            accepted({name: 5})
    assert accepted({"sinks": 5}, unified=True) == {"sinks": 5}
    with pytest.raises(DecodeError):
        accepted({"extra": 5}, unified=True)
    with pytest.raises(DecodeError):
        accepted({"sinks": 5}, unified=True, of=notes())


def test_sinks_reach_a_backend_that_decodes_through_unified_attention():
    of = notes(takes=notes().takes | {"sinks"})
    unified = AiterAttnBackend(use_triton_unified_attention=True)
    assert decode_call(layer(), of=of, decode=unified, sinks=5)[1] == {"sinks": 5}
    with pytest.raises(DecodeError, match="the model passes sinks,"):
        decode_call(layer(), of=of, sinks=5)


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
    assert pa.scaled(known(), both, (both,), {"mixed_qkv": 7}) == {"layer": both, "mixed_qkv": 7}


def test_the_kernel_is_given_the_layers_scaling_and_scales():
    given = tuple(range(17))

    def kernel(step):
        call = (lambda *args, **kwargs: (args, kwargs), None, given, {"x": 1})
        return pa._step.call(step, pa.decode_kernel, call, {})

    assert kernel(None) == (given, {"x": 1})
    scales = dict(k_scale=torch.tensor([[2.0]], dtype=BF16), v_scale=torch.tensor(3.0))
    args, kwargs = kernel(Step(layer(scaling=0.5, **scales), True))
    assert args[:15] == (*given[:5], 0.5, *given[6:15]) and kwargs == {"x": 1}
    assert PARAMETERS[RAGGED_DECODE][5::10] == ("scale", "k_scale") and PARAMETERS[RAGGED_DECODE][16] == "v_scale"
    assert [(s.shape, s.dtype, s.item()) for s in args[15:]] == [((1,), torch.float32, x) for x in (2.0, 3.0)]
    assert kernel(Step(layer(scaling=0.5, **scales), False))[0][15:] == (15, 16)
    assert kernel(Step(layer(scaling=0.5), True))[0][15:] == (15, 16)


def test_a_scaling_that_is_a_tensor_reaches_the_kernel_as_a_number():
    args = pa._step.call(
        Step(layer(scaling=torch.tensor(0.5)), False),
        pa.decode_kernel,
        (lambda *args: args, None, tuple(range(17)), {}),
        {},
    )
    assert type(args[5]) is float and args[5] == 0.5
