"""What several capabilities ask of layers, batches and pools, one condition at a time."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
from sglang_aiter_ext.capabilities import layers


def test_a_pool_has_the_layout_that_it_or_one_hidden_inside_of_it_says():
    vectorized, other = (SimpleNamespace(kv_cache_layout=name) for name in ("vectorized_5d", "NHD"))
    assert layers.is_vectorized_5d(vectorized) and not layers.is_vectorized_5d(other)
    assert layers.is_vectorized_5d(SimpleNamespace(full_kv_pool=vectorized))
    assert not layers.is_vectorized_5d(SimpleNamespace(full_kv_pool=other))


def test_no_pool_at_all_has_no_layout():
    assert not layers.is_vectorized_5d(None)
    assert not layers.is_vectorized_5d(SimpleNamespace(full_kv_pool=None))


@pytest.mark.parametrize(
    "heads, kv_heads, covered",
    [(8, 8, 1), (8, 4, 1), (16, 1, 1), (32, 2, 1), (24, 4, 0), (32, 1, 0), (3, 1, 0), (7, 2, 0), (9, 4, 0)],
)
def test_the_ratios_that_the_asm_kernels_cover_are_whole_and_powers_of_two_up_to_16(heads, kv_heads, covered):
    layer = SimpleNamespace(tp_q_head_num=heads, tp_k_head_num=kv_heads)
    assert layers.covered_ratio(layer) is bool(covered)


def test_a_call_of_forward_extend_is_understood_as_in_any_release_and_another_one_is_not():
    def bound(*args, **kwargs):
        found = layers.bind_extend(args, kwargs)
        return found and (found.q, found.k, found.v, found.layer, found.forward_batch, found.save_kv_cache, found.sinks)

    assert bound(1, 2, 3, 4, 5) == (1, 2, 3, 4, 5, True, None)
    assert (
        bound(1, 2, 3, 4, 5, False, 7)
        == bound(1, 2, 3, 4, 5, save_kv_cache=False, sinks=7)
        == (1, 2, 3, 4, 5, False, 7)
    )
    assert bound(q=1, k=2, v=3, layer=4, forward_batch=5, save_kv_cache=False, sinks=7) == (1, 2, 3, 4, 5, False, 7)
    assert bound(1, 2, 3, 4) is bound(1, 2, 3, 4, 5, other=6) is None


def test_a_layer_has_a_window_where_its_size_is_not_negative():
    sizes = [None, -1, 0, 5]
    assert [layers.has_window(SimpleNamespace(sliding_window_size=size)) for size in sizes] == [
        False,
        False,
        True,
        True,
    ]
    assert layers.has_window(SimpleNamespace()) is False


def test_a_decoder_is_neither_cross_attention_nor_an_encoders():
    def asked(cross=False, **kind):
        kind = {"attn_type": SimpleNamespace(value=kind["value"])} if kind else {}
        return layers.is_decoder(SimpleNamespace(is_cross_attention=cross, **kind))

    assert asked() and asked(value="decoder") and not asked(value="encoder_only")
    assert not asked(cross=True) and not asked(cross=True, value="decoder")


@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_are_one_only_where_the_host_knows_it(name):
    other = {"k_scale": "v_scale", "v_scale": "k_scale"}[name]

    def unit(**scales):
        return layers.unit_scales(SimpleNamespace(**{"k_scale": None, "v_scale": None, **scales}))

    one = torch.ones(1)
    assert unit() and layers.unit_scales(SimpleNamespace())
    assert unit(**{name: one, name + "_float": 1.0})
    assert unit(**{name: one, name + "_float": 1.0, other: one, other + "_float": 1.0})
    assert not unit(**{name: one, name + "_float": 0.5})
    assert not unit(**{name: one})
    # A figure without the tensor is not applied by anyone.
    assert unit(**{name + "_float": 0.5})
