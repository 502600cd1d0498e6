"""The decisions of v_head_dim one condition at a time, on plain objects and sources of a few lines."""

from types import SimpleNamespace

import pytest
from made_releases import release_of, said

torch = pytest.importorskip("torch")
from sglang_aiter_ext import counting
from sglang_aiter_ext.capabilities import v_head_dim

pytestmark = pytest.mark.usefixtures("nothing_counted")
INIT = {
    "get_v_head_dim()": "upstream", "get_value_buffer(0)": "apply", "0": "unsupported", "get_value_buffer(1)": "unsupported",
    "get_value_buffer(layer)": "unsupported", "get_value_buffer(0), get_value_buffer(0)": "unsupported",
    "get_value_buffer(0), get_v_head_dim()": "upstream",
}  # fmt: skip


@pytest.mark.parametrize("line", INIT)
def test_each_way_to_the_width_of_the_values(tmp_path, line):
    release = release_of(tmp_path, aiter_backend=f"class AiterAttnBackend:\n def __init__(self):\n  {line}\n")
    assert said(v_head_dim.probe, release)[0] == INIT[line]


class Pool:
    """A pool without layer 0, as a hybrid model's."""

    def get_value_buffer(self, layer_id):
        if layer_id != 3:
            raise ValueError(f"layer {layer_id}")
        return "layer 3"

    def get_v_head_dim(self):
        return 128


def built(pool, ask, by_name=False):
    runner = SimpleNamespace(token_to_kv_pool=pool)
    args, kwargs = ((), {"model_runner": runner}) if by_name else ((runner,), {})
    return v_head_dim.init(lambda *args, **kwargs: pool.get_value_buffer(ask), None, args, kwargs)


@pytest.mark.parametrize("by_name", [False, True])
def test_a_pool_without_layer_0_shows_its_width_while_a_backend_is_built(by_name):
    pool = Pool()
    shown = built(pool, 0, by_name)
    assert (shown.shape, shown.device.type) == ((0, 128), "meta") and built(pool, 3, by_name) == "layer 3"
    with pytest.raises(ValueError, match="layer 2"):
        built(pool, 2, by_name)
    assert vars(pool) == {} and counting.snapshot() == {"v_head_dim": {"asked_pool": 1}}


def test_a_pools_own_attribute_comes_back():
    pool = Pool()
    own = pool.get_value_buffer = lambda layer_id: "own"
    assert built(pool, 0) == "own" and pool.get_value_buffer is own


def test_a_pool_that_has_no_such_width_is_left_alone():
    pool = SimpleNamespace(get_value_buffer=lambda layer_id: vars(pool)["get_value_buffer"])
    own = pool.get_value_buffer
    assert built(pool, 0) is own


def test_a_runner_without_a_pool_is_sglangs_own_to_judge():
    for args in ((), (SimpleNamespace(),)):
        assert v_head_dim.init(lambda *args: ("built", *args), None, args, {}) == ("built", *args)
