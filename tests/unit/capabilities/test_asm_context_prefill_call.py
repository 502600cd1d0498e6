"""What happens at a call: the wrappers of asm_context_prefill around a module of the same steps as SGLang's."""

import ast
import functools
import gc
import inspect
import pathlib
import sys
import weakref
from types import ModuleType, SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from extend_objects import EXTEND, FP8, QUERIES, Batch, backend, layer, metadata_of
from made_releases import FIRST, PAGED, extending

from sglang_aiter_ext import counting, logs, wrapping
from sglang_aiter_ext.aiter_kernels import ASM_PREFILL, PAGED_PREFILL
from sglang_aiter_ext.capabilities.asm_context_prefill import CAPABILITY, call, decision
from sglang_aiter_ext.errors import CouldNotApply, Unsupported, UnusableAiter
from sglang_aiter_ext.kept import PLAN, Decline
from sglang_aiter_ext.kernels import gather_kv
from sglang_aiter_ext.names import BACKEND

pytestmark = pytest.mark.usefixtures("nothing_counted")
SUPPORTED = "is_gfx95_supported"


@pytest.fixture(autouse=True)
def not_strict(monkeypatch):
    monkeypatch.delenv("SGLANG_AITER_EXT_STRICT", raising=False)
    monkeypatch.setattr(call, "_failed", [None])


def kernel(q, k, v, q_descale, k_descale, v_descale, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
           causal=False, softmax_scale=None):  # fmt: skip
    """As AITER's own; gives what it was called with."""
    return SimpleNamespace(**locals())


def paged(q, k, v, cu_seqlens_q, kv_indptr, kv_page_indices, max_seqlen_q, max_seqlen_k, *, causal, q_descale=None,
          k_descale=None, v_descale=None):  # fmt: skip
    return "paged"


def backend_module(monkeypatch):
    """SGLang's AITER backend module, with a forward_extend of the same steps; AITER has both kernels."""
    aiter = ModuleType("aiter")
    aiter.__dict__.update({"__file__": "aiter", ASM_PREFILL: kernel, PAGED_PREFILL: paged})
    monkeypatch.setitem(sys.modules, "aiter", aiter)
    module = ModuleType(BACKEND)

    class AiterAttnBackend(SimpleNamespace):
        def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
            self.asked = module.is_gfx95_supported()
            prefix = forward_batch.extend_prefix_lens_cpu
            if self.own_branch and self.asked and prefix is not None and not any(prefix):
                return "own"
            data, table = self.forward_metadata, getattr(self, "table", self.forward_metadata.kv_indices)
            return module.mha_batch_prefill_func(
                q, self.cache, self.cache, "cu_seqlens_q", data.kv_indptr, table, data.max_q_len, data.max_kv_len,
                causal=True, q_descale=None, k_descale=layer.k_scale, v_descale=layer.v_scale,
            )  # fmt: skip

    own = {PAGED_PREFILL: paged, SUPPORTED: lambda: True, "AiterAttnBackend": AiterAttnBackend}
    module.__dict__.update(own)
    monkeypatch.setitem(sys.modules, BACKEND, module)
    return module


def wrapped(monkeypatch, folder, own_branch):
    """The module with the wrappers around it that a release with or without a branch for first chunks needs."""
    module = backend_module(monkeypatch)
    names = CAPABILITY.wrappers(extending(folder, [FIRST, PAGED] if own_branch else [PAGED]))
    wrappers = {name.removeprefix(f"{BACKEND}."): wrapper for name, wrapper in names.items()}
    wrapping.wrap_all(module, wrappers, wrapping.Group(CAPABILITY.name, acts=True))
    return module


def extend_call(module, own_branch, prefix=4, k="k", on=(), metadata=(), **of_layer):
    """(what forward_extend of 2 tokens after `prefix` answers, the backend)."""
    total = (prefix or 0) + 2
    cache = torch.zeros(64, 2, 256, dtype=torch.uint8).view(FP8)
    fields = {**vars(backend()), "cache": cache, "own_branch": own_branch, **dict(on)}
    one = module.AiterAttnBackend(**fields, forward_metadata=metadata_of([total], [2], **dict(metadata)))
    batch = Batch(forward_mode=EXTEND.forward_mode, extend_prefix_lens_cpu=None if prefix is None else [prefix],
                  extend_seq_lens_cpu=[2], seq_lens_cpu=[total], batch_size=1)  # fmt: skip
    return one.forward_extend(QUERIES[:2], k, "v", layer(scaling=0.5, **of_layer), batch), one


@pytest.fixture(params=[True, False], ids=["own branch", "no own branch"])
def served(request, monkeypatch, tmp_path):
    """(module that is wrapped, whether the release has a branch for first chunks)."""
    return wrapped(monkeypatch, tmp_path, request.param), request.param


def counted():
    return counting.snapshot().get(call.NAME)


# ---- what is served, and what is not ----


def test_a_batch_with_a_prefix_is_served(served):
    module, own = served
    found, one = extend_call(module, own)
    assert found.cu_seqlens_k is one.forward_metadata.kv_indptr and found.k.shape == (6, 2, 256) and found.causal
    assert (found.cu_seqlens_q, found.max_seqlen_q, found.max_seqlen_k, found.softmax_scale) == (
        "cu_seqlens_q",
        2,
        6,
        0.5,
    )
    assert found.q.shape == (2, 8, 256) and found.q.dtype == found.k.dtype == found.v.dtype == FP8
    assert found.k_descale is found.v_descale is found.q_descale and found.q_descale.item() == 1
    assert extend_call(module, own)[0].q_descale is found.q_descale
    assert one.asked is not own and counted() == {"asm": 2}


def test_the_layers_scales_reach_the_kernel_as_one_float_each(served):
    scales = dict(k_scale=torch.tensor([[0.5]], dtype=torch.bfloat16), v_scale=torch.tensor(2.0))
    found, _ = extend_call(*served, 20, **scales)
    for scale, value in ((found.k_descale, 0.5), (found.v_descale, 2.0)):
        assert (scale.shape, scale.dtype, scale.item()) == ((1,), torch.float32, value)


def test_a_first_chunk_is_the_releases_own_where_it_has_a_branch_that_is_right(served):
    module, own = served
    found, _ = extend_call(module, own, 0)
    assert (found == "own", counted()) == ((True, {"release": 1}) if own else (False, {"asm": 1}))
    for changed in (dict(k=None), dict(k_scale=torch.tensor(0.5))):
        assert extend_call(module, own, 0, **changed)[0].k.shape == (2, 2, 256)
    assert counted() == ({"release": 1, "asm": 2} if own else {"asm": 3})


def test_what_is_declined_is_paged_and_a_first_chunk_stays_out_of_the_releases_branch(served):
    module, own = served
    found, one = extend_call(module, own, logit_cap=5.0)
    assert found == "paged" and one.asked
    found, one = extend_call(module, own, 0, k=None, logit_cap=5.0)
    assert found == "paged" and one.asked is not own
    assert extend_call(module, own, metadata=dict(max_q_len=3))[0] == "paged"
    assert extend_call(module, own, None)[0] == "paged"
    assert extend_call(module, own, metadata=dict(padding=0))[0] == "paged"
    assert counted() == {
        "paged/soft_cap": 2, "paged/lengths_mismatch": 1, "paged/no_host_lengths": 1, "paged/table_mismatch": 1
    }  # fmt: skip


@pytest.mark.parametrize("prefix", [0, 4])
def test_another_gpu_is_paged_whenever_it_is_known(served, monkeypatch, prefix):
    module, own = served
    monkeypatch.setattr(module, SUPPORTED, lambda: False)
    assert extend_call(module, own, prefix)[0] == "paged" and counted() == {"paged/not_gfx950": 1}


def test_sglangs_check_of_the_gpu_is_asked_once_and_whatever_our_wrappers_around_it_say(served, monkeypatch):
    module, own = served
    asked, no = [], lambda original, instance, args, kwargs: False
    for name in ("first", "second"):
        monkeypatch.setattr(module, SUPPORTED, lambda name=name: asked.append(name) or True)
        # Ours answers no inside of a call that is served.
        wrapping.wrap_all(module, {SUPPORTED: no}, wrapping.Group(call.NAME, acts=True))
        assert module.is_gfx95_supported() is False and [call.is_gfx950() for _ in range(3)] == [True] * 3
    assert asked == ["first", "second"]
    # What somebody else's wrapper says counts.
    monkeypatch.setattr(module, SUPPORTED, functools.wraps(module.is_gfx95_supported)(lambda: False))
    assert call.is_gfx950() is False


def test_a_call_that_does_not_fit_keeps_its_batch_on_the_paged_kernel(served, monkeypatch):
    monkeypatch.setattr(gather_kv, "gather_kv", lambda *args: pytest.fail("K and V were gathered"))
    found, one = extend_call(*served, on={"table": torch.arange(6, dtype=torch.int32)})
    assert found == "paged" and counted() == {"paged/table_mismatch": 1}
    assert PLAN.on(one.forward_metadata).decline.reason == "table_mismatch"


def test_a_call_that_forward_extend_would_not_take_is_its_own_to_refuse(served):
    module, _ = served
    with pytest.raises(TypeError, match="forward_extend"):
        module.AiterAttnBackend().forward_extend(1, 2, 3)
    assert counted() is None


def test_outside_of_forward_extend_everything_is_the_releases_own(served):
    module, own = served
    extend_call(module, own)
    extend_call(module, own, 0, k=None, logit_cap=5.0)
    before = counted()
    assert module.mha_batch_prefill_func(*range(8), causal=True) == "paged"
    assert module.is_gfx95_supported() is True and counted() == before


# ---- what goes wrong ----


@pytest.mark.parametrize("error, reason", [(torch.OutOfMemoryError, "out_of_memory"), (RuntimeError, "kernel_error")])
def test_a_call_that_fails_holds_nothing_of_it_and_in_strict_mode_names_its_cause(error, reason, monkeypatch, tmp_path):
    module, alive = wrapped(monkeypatch, tmp_path, False), []

    def broken(q, k, v, *args, **kwargs):
        alive.extend(map(weakref.ref, (q, k, v)))
        raise error("HIP error")

    broken.__signature__ = inspect.signature(kernel)
    monkeypatch.setattr(sys.modules["aiter"], ASM_PREFILL, broken)
    gc.disable()
    try:
        # Also while the batch goes on: its other layers, and its metadata.
        found, one = extend_call(module, False)
        assert [ref() for ref in alive] == [None] * 3
    finally:
        gc.enable()
    assert found == "paged" and counted() == {f"paged/{reason}": 1}
    assert PLAN.on(one.forward_metadata).decline.reason == reason
    call._failed[0] = None
    monkeypatch.setenv("SGLANG_AITER_EXT_STRICT", "1")
    with pytest.raises(CouldNotApply, match=rf"\({reason}\): .*HIP error") as caught:
        extend_call(module, False)
    assert isinstance(caught.value.__cause__, error)


@pytest.mark.parametrize("error, tries", [(torch.OutOfMemoryError, 3), (RuntimeError, 1)])
def test_a_kernel_that_failed_once_is_not_tried_again_and_memory_is(error, tries, served, monkeypatch, caplog):
    tried, gathered = [], []

    def broken(*args, **kwargs):
        tried.append(1)
        raise error("invalid argument for fmha_fwd")

    broken.__signature__ = inspect.signature(kernel)
    monkeypatch.setattr(sys.modules["aiter"], ASM_PREFILL, broken)
    gather = gather_kv.gather_kv
    monkeypatch.setattr(gather_kv, "gather_kv", lambda *args: gathered.append(1) or gather(*args))
    assert [extend_call(*served)[0] for _ in range(3)] == ["paged"] * 3
    reason = "out_of_memory" if tries == 3 else "kernel_error"
    assert (len(tried), len(gathered), counted()) == (tries, tries, {f"paged/{reason}": 3})
    assert [record.getMessage().count("invalid argument for fmha_fwd") for record in caplog.records] == [1]
    # Strict mode goes on saying so.
    monkeypatch.setenv("SGLANG_AITER_EXT_STRICT", "1")
    with pytest.raises(CouldNotApply, match=rf"\({reason}\): .*invalid argument for fmha_fwd"):
        extend_call(*served)


@pytest.mark.parametrize("prefix", [0, 4])
def test_a_decision_that_fails_is_paged_and_in_strict_mode_an_error_that_names_its_cause(served, monkeypatch, prefix):
    module, own = served
    monkeypatch.setattr(call, "check_layer", lambda *args: {}["none"])
    found, one = extend_call(module, own, prefix, k=None)
    # The release's own branch would be wrong for a first chunk without K.
    assert found == "paged" and counted() == {"paged/internal_error": 1} and one.asked is not (own and not prefix)
    monkeypatch.setenv("SGLANG_AITER_EXT_STRICT", "1")
    with pytest.raises(CouldNotApply, match=r"\(internal_error\): KeyError: 'none'$") as caught:
        extend_call(module, own, prefix, k=None)
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_count_that_fails_after_the_kernel_is_not_the_kernels_error(served, monkeypatch):
    monkeypatch.setattr(call, "count", lambda *args: {}["none"])
    monkeypatch.setenv("SGLANG_AITER_EXT_STRICT", "1")
    with pytest.raises(CouldNotApply, match="internal error in mha_batch_prefill_func: KeyError: 'none'$"):
        extend_call(*served)


def test_what_is_missing_is_said_before_anything_is_wrapped(monkeypatch):
    module = backend_module(monkeypatch)
    call.check()
    delattr(module, SUPPORTED)
    with pytest.raises(Unsupported, match=f"^{BACKEND} has no {SUPPORTED}$"):
        call.check()
    for missing in (ASM_PREFILL, PAGED_PREFILL):
        backend_module(monkeypatch)
        delattr(sys.modules["aiter"], missing)
        with pytest.raises(UnusableAiter, match=f"lacks {missing}"):
            call.check()


# ---- what is said ----


def leave(reason, message="because of this", *arguments, on=None, **of_layer):
    call.leave_to_paged(Decline(reason, message, arguments), on or backend(), layer(**of_layer), EXTEND)


def test_a_reason_is_logged_once_with_the_pools_size_and_counted_each_time(caplog):
    caplog.set_level("INFO", logger=logs.logger.name)
    asked = []

    def pool(size):
        return SimpleNamespace(get_key_buffer=lambda layer_id: asked.append(layer_id) or SimpleNamespace(nbytes=size))

    for number, size in enumerate((3 * 2**30, 2**31)):
        for _ in range(2):
            leave(f"reason{number}", "because of %s", "this", on=backend(token_to_kv_pool=pool(size)), layer_id=7)
    assert counted() == {"paged/reason0": 2, "paged/reason1": 2} and asked == [7, 7]
    large, small = (record.getMessage() for record in caplog.records)
    assert "(reason0): because of this; a layer's K cache is 3.0 GiB" in large
    assert small.endswith("(reason1): because of this")
    # A pool that cannot be asked takes nothing from the line.
    leave("reason2")
    assert caplog.records[-1].getMessage().endswith("(reason2): because of this")
    assert {record.levelname for record in caplog.records} == {"WARNING"}


def reasons():
    """The reasons that the source makes."""
    found = set()
    for file in (decision, call):
        tree = ast.parse(pathlib.Path(file.__file__).read_text())
        for node in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
            if getattr(node.func, "id", None) in ("decline", "_failure") and isinstance(node.args[0], ast.Constant):
                found.add(node.args[0].value)
    return found


FAULTS = ["internal_error", "kernel_error", "out_of_memory", "lengths_mismatch", "table_mismatch"]


@pytest.mark.parametrize("reason", FAULTS)
def test_strict_mode_raises_what_no_batch_should_meet_and_nothing_else(reason, monkeypatch):
    monkeypatch.setenv("SGLANG_AITER_EXT_STRICT", "1")
    with pytest.raises(CouldNotApply, match=rf"^asm_context_prefill: .* \({reason}\): because of this$"):
        leave(reason, "because of %s", "this")
    assert counted() is None and reasons() >= set(FAULTS)
    others = reasons() - set(FAULTS)
    assert len(others) > 15
    for other in others:
        leave(other)
    monkeypatch.setenv("SGLANG_AITER_EXT_STRICT", "0")
    leave(reason)
    assert counted()[f"paged/{reason}"] == 1


def test_a_call_inside_of_another_is_the_releases_own_and_sees_no_note_of_it(served):
    for scope in (call._served, call._paged_only):
        found, _ = scope.call("a note", extend_call, served, {})
        assert found == "paged" and counted() is None
