"""What evidence.py makes of state files and of a log."""

import evidence
import pytest

ROUTED = "[2026-11-30 TP0] decode_pa: full-attention layers: prefill on TritonAttnBackend, decode on AiterAttnBackend (1 GiB)\n"


def state(role="scheduler", served="active", **counts):
    capability = {"state": served, "verdict": "apply", "error": "why" if served == "failed" else None}
    return {
        "role": role,
        "capabilities": {"decode_pa": capability},
        "counters": {"decode_pa": counts} if counts else {},
    }


@pytest.mark.parametrize(
    ("states", "schedulers", "missing"),
    [
        ([state(capture=4), state("launch_server", "pending")], 1, []),
        ([state("scheduler_TP0", decode=1), state("scheduler_TP1", decode=1)], 2, []),
        ([state("scheduler_TP0", decode=1)], 2, ["1 schedulers of 2 have a state file"]),
        ([state(served="pending", capture=4)], 1, ["decode_pa is pending in scheduler"]),
        ([state(capture=0)], 1, ["no decode call in scheduler"]),
        ([state(capture=4), state("detokenizer", "failed")], 1, ["decode_pa failed in detokenizer: why"]),
    ],
)
def test_state_files_say_which_scheduler_did_not_decode_through_aiter(states, schedulers, missing):
    assert evidence.missing("", states, schedulers) == missing


def test_without_state_files_each_scheduler_has_its_line_in_the_log():
    assert evidence.missing(ROUTED * 2, [], 2) == []
    assert evidence.missing(ROUTED, [], 2) == ["1 of 2 schedulers routed decode to AITER"]
