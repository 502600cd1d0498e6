"""What only a GPU shows, without SGLang: compiled kernels, offsets past 32 bits, synchronisations."""

import sys
from types import SimpleNamespace

import child
import pytest

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
sys.path.insert(0, str(child.KIT / "cases"))


def test_the_compiled_gather_moves_exactly_the_rows_asked_for():
    import own_kernels as kernels

    rows = kernels.gather()
    assert [row["case"] for row in rows if not row["same"]] == [] and len(rows) == 200


def test_the_compiled_cast_saturates_and_keeps_nan():
    import own_kernels as kernels

    for row in kernels.cast():
        assert (row["same"], row["contiguous"], row["nans"], row["largest"]) == (True, True, 1, 448.0), row["case"]


def test_rows_further_apart_than_31_bits_of_words_are_reached():
    import own_kernels as kernels

    gathered, cast = kernels.far_apart(), kernels.cast_far_apart()
    assert gathered["same"] and gathered["words"] > 2**31
    assert cast["same"] and cast["elements"] > 2**31


def test_a_batch_of_many_layers_synchronises_nothing():
    """The plan, the gather and the cast of queries, under PyTorch's own check."""
    from bench import gpu
    from sglang_aiter_ext.kernels import gather_kv

    data = gpu.make_batch(5000, 2, 16, 3)
    queries = torch.randn(5000, 8 * 256, device="cuda", dtype=torch.bfloat16)
    gather_kv.gather_kv(data.k, data.v, data.table[:10])
    gather_kv.saturating_fp8(queries[:10])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plan = gpu.plan(data)
        for _ in range(15):
            k, v = gather_kv.gather_kv(data.k, data.v, plan.slots)
            gather_kv.saturating_fp8(queries)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert plan.decline is None
    assert torch.equal(k.view(torch.uint8), data.k.view(torch.uint8)[data.table[:5000].long()])
    assert torch.equal(v.view(torch.uint8), data.v.view(torch.uint8)[data.table[:5000].long()])


def test_nothing_is_planned_while_a_graph_is_captured():
    from bench import gpu

    data = gpu.make_batch(100, 2, 16, 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        data.table.add_(0)
        plan = gpu.plan(data)
    assert plan.decline.reason == "graph_capture"


def test_no_memory_for_the_gather_is_pytorchs_error():
    from sglang_aiter_ext.kernels import gather_kv

    cache = torch.empty(8, 2, 256, dtype=torch.float8_e4m3fn, device="cuda")
    huge = SimpleNamespace(shape=(1 << 40,))
    with pytest.raises(torch.OutOfMemoryError):
        gather_kv.gather_kv(cache, cache, huge)
