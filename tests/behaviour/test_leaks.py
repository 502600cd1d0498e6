"""Nothing grows with the number of calls or batches."""

import pytest
from child import launch

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("leaks")]
PA = (("SGLANG_USE_AITER_PA", "1"),)


def flat(name, row):
    # One object of 100 bytes kept by each call would be 200 kB among those traced, and 10 MB in all.
    assert row["traced"] < 20_000, (name, row)
    assert row["resident"] < 4 * 2**20, (name, row)
    assert row["files"] == 0, (name, row)


@pytest.mark.parametrize("release", ["0.5.18", "0.5.19"])
def test_a_hundred_thousand_calls_of_each_wrapper_leave_nothing(release):
    out = launch(release, "leaks:calls", env=PA).result
    assert len(out) == 14
    for name, row in out.items():
        flat(name, row)


def test_a_hundred_thousand_calls_of_the_wrapper_around_a_backends_init_leave_nothing():
    ((name, row),) = launch("0.5.9", "leaks:building").result.items()
    flat(name, row)


@pytest.mark.parametrize("release", ["0.5.12.post1"])
def test_ten_thousand_batches_leave_nothing_and_their_metadata_and_plans_die(release):
    for name, row in launch(release, "leaks:batches", env=PA).result.items():
        flat(name, row)
        assert row["survivors"] == 0, name
