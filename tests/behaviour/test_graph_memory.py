"""The memory check counts graph buffers; test_gpu_sglang.py holds the figures against what a GPU gives."""

import pytest
from child import launch

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("decode")]


@pytest.mark.parametrize("release", ["0.5.12.post1", "0.5.16", "0.5.23"])
def test_a_decode_step_in_graphs_needs_its_buffers_beside_the_workspace(release):
    """8 requests of 512 tokens: an index of 4 bytes and a mask of 1 for each."""
    out = launch(release, "gpu_graphs:counted").result
    assert (out["with"]["graphs"], out["without"]["graphs"]) == (8 * 512 * 5, 0)
    for case in out.values():
        assert case["0"] == "fits" and "GiB of graph buffers" in case["-1"]
