"""The harness that drives SGLang's attention stack notices what it is there to notice."""

from child import launch

QUICK = "0.5.23"


def test_a_batch_that_changes_one_byte_of_an_earlier_row_is_noticed():
    said = launch(QUICK, "damage:earlier_rows").result
    assert said["earlier"] == "the batch changed rows of earlier batches in 1 of 2 buffers of the KV pool"
    # What a batch does to rows that it writes itself is what Result.error() looks at.
    assert said["its own"] is None
