"""Random batches: exact attention through AITER's kernels, or the release's own call untouched, and nothing else.

`make test` runs 300 batches each, the same every time; `make test-nightly` 10,000 others.
"""

import os

import pytest
from child import launch

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("properties")]
PROFILE = os.environ.get("HYPOTHESIS_PROFILE") or "test"


def batches(release, capability, exact, *env):
    out = launch(release, f"properties:{capability}", env=env, timeout=900 if PROFILE == "test" else 6 * 3600).result
    assert out["examples"] >= out["wanted"] >= {"test": 300, "nightly": 10_000}[PROFILE]
    assert 0 < out["worst"] <= exact
    return out["outcomes"], out["examples"]


@pytest.mark.parametrize("release", ["0.5.12.post1", "0.5.18"])
def test_a_prefill_batch_is_exact_on_the_asm_kernel_or_the_releases_own_call(release, exact):
    outcomes, examples = batches(release, "prefill", exact)
    served = outcomes["asm"] + outcomes.get("release", 0)
    assert outcomes["asm"] > 0.4 * examples and served < 0.9 * examples, outcomes
    # Most of what keeps a batch on the paged kernel was met.
    assert len(outcomes) >= 9, outcomes


@pytest.mark.parametrize("release", ["0.5.12.post1", "0.5.18"])
def test_a_decode_batch_is_exact_on_the_ragged_kernel_or_an_error(release, exact):
    outcomes, examples = batches(release, "decode", exact, ("SGLANG_USE_AITER_PA", "1"))
    assert outcomes["decode"] > 0.7 * examples and outcomes["error"] > 0.02 * examples, outcomes
