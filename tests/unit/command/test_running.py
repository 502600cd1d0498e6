"""`doctor --running`: what is read of the files in a folder, and what is said of it."""

import fcntl
import json
import os
import re

import pytest

from sglang_aiter_ext import command
from sglang_aiter_ext.command import running

UNSUPPORTED = dict(state="off", enabled=True, asked_for=True, verdict="unsupported", reason="no X", error=None)
OURS = {
    "pid": 1, "host": "a", "role": "r", "began": 1.0, "written": 1.0, "extension": "0", "sglang": "0", "counters": {},
    "capabilities": {"decode_pa": UNSUPPORTED},
}  # fmt: skip


def doctor(capsys, folder, *arguments):
    """(status, what is printed, what is printed as an error) of the command."""
    try:
        status = command.main(["doctor", "--running", str(folder), *arguments])
    except SystemExit as ended:
        status = ended.code
    return status, *capsys.readouterr()


def alive(**changed):
    return {**OURS, "alive": True, "file": "/f.json", **changed}


@pytest.fixture
def keep(tmp_path):
    """Writes a file as a process does that is alive, and lets go of it at the end of the test."""
    kept = {}

    def written(name, state):
        if name not in kept:
            kept[name] = open(tmp_path / name, "w")
            fcntl.flock(kept[name], fcntl.LOCK_EX | fcntl.LOCK_NB)
        kept[name].seek(0)
        kept[name].write(json.dumps(state))
        kept[name].truncate()
        kept[name].flush()

    yield written
    for file in kept.values():
        file.close()


# ---- what is read ----


def test_each_process_is_read_with_whether_it_lives_and_where_its_file_lies_the_oldest_first(tmp_path, keep):
    keep("a.json", {**OURS, "pid": 2, "began": 2.0})
    (tmp_path / "b.json").write_text(json.dumps(OURS))
    old, new = (
        {**OURS, "alive": False, "file": f"{tmp_path}/b.json"},
        alive(pid=2, began=2.0, file=f"{tmp_path}/a.json"),
    )
    assert running.processes(str(tmp_path)) == ([old, new], [])


def test_a_file_that_ends_in_the_rest_of_a_longer_state_is_read(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(OURS) + '"}')
    assert running.processes(str(tmp_path))[0][0]["pid"] == 1


def test_only_files_whose_name_ends_as_ours_do_are_looked_at(tmp_path):
    (tmp_path / "notes.txt").write_text("of somebody else")
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "folder.json").mkdir()
    assert running.processes(str(tmp_path)) == ([], [])


@pytest.mark.parametrize(
    "text", ["{not json", "[]", "3", "null", "{}", '{"pid": 3}', "[" * 100_000, "\0\0", '{"began": "x"}', "",
             json.dumps({**OURS, "capabilities": None}), json.dumps([*OURS]),
             json.dumps({name: value for name, value in OURS.items() if name != "counters"}),
             json.dumps({name: value for name, value in OURS.items() if name != "written"}),
             json.dumps({**OURS, "capabilities": {"x": {"state": "off"}}}),
             *(json.dumps({**OURS, **changed}) for changed in ({"capabilities": {"x": 3}}, {"capabilities": {"x": {}}}, {"host": None},
                                                              {"counters": 3}, {"counters": {"x": 3}}, {"began": "soon"}))],
)  # fmt: skip
def test_a_file_that_is_not_ours_is_named_and_hides_no_other(text, tmp_path, capsys):
    (tmp_path / "other.json").write_text(text)
    (tmp_path / "ours.json").write_text(json.dumps(OURS))
    status, out, err = doctor(capsys, tmp_path)
    assert (status, err) == (1, "")
    assert out.endswith(f"\n{tmp_path}/other.json is not a state file of this package's\n")
    assert re.search(r"^1 +a +r +stale", out, re.M) and "1 decode_pa: unsupported: no X" in out


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path, monkeypatch):
    (tmp_path / "a.json").write_text(json.dumps(OURS))
    (tmp_path / "b.json").write_text(json.dumps(OURS))

    def denied(path):
        if path.name == "a.json":
            raise PermissionError(13, "Permission denied")
        return False

    monkeypatch.setattr(running, "is_alive", denied)
    found, skipped = running.processes(str(tmp_path))
    assert len(found) == 1 and skipped == [f"{tmp_path}/a.json cannot be read: Permission denied"]


def test_a_file_that_goes_while_it_is_read_is_that_of_a_process_that_has_ended(tmp_path, monkeypatch):
    (tmp_path / "a.json").write_text(json.dumps(OURS))

    def gone(path):
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(running, "is_alive", gone)
    assert running.processes(str(tmp_path)) == ([], [])


# ---- what is said ----


def test_the_command_says_what_is_wrong_with_the_folder(tmp_path, capsys):
    status, out, err = doctor(capsys, tmp_path)
    nothing = f"no process keeps a file in {tmp_path}: nothing has imported SGLang with the extension on its path\n"
    assert (status, out, err) == (1, nothing, "")
    status, out, err = doctor(capsys, tmp_path / "none")
    assert (status, out) == (2, "")
    assert "none: No such file or directory; use the folder that SGLANG_AITER_EXT_STATE_DIR names" in err


def test_the_command_gives_programs_what_was_read(tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps(OURS))
    status, out, _ = doctor(capsys, tmp_path, "--json")
    assert status == 1 and json.loads(out) == [{**OURS, "alive": False, "file": f"{tmp_path}/a.json"}]


def test_a_live_process_with_a_capability_it_cannot_have_is_status_1(tmp_path, keep, capsys):
    keep("a.json", OURS)
    status, out, _ = doctor(capsys, tmp_path)
    assert status == 1 and "running" in out
    keep("a.json", {**OURS, "capabilities": {}})
    assert doctor(capsys, tmp_path)[0] == 0


@pytest.mark.parametrize(
    "changed, troubled",
    [
        ({}, True), (dict(enabled=False), False), (dict(verdict="apply"), False), (dict(state="active", verdict="apply"), False),
        (dict(state="failed", enabled=False, verdict="apply"), True),
    ],
)  # fmt: skip
def test_a_capability_is_trouble_where_it_failed_or_is_wanted_and_cannot_be_had(changed, troubled):
    capability = {**UNSUPPORTED, **changed}
    assert running.troubled(capability) is troubled
    process = alive(capabilities={"fine": {**UNSUPPORTED, "enabled": False}, "it": capability})
    assert running.exit_status([process]) == int(troubled)


@pytest.mark.parametrize("state, status", [("off", 0), ("failed", 1)])
def test_a_status_is_of_what_failed_and_of_what_the_user_asked_for(state, status):
    on_by_default = {**UNSUPPORTED, "asked_for": False, "state": state}
    assert (
        running.troubled(on_by_default) and running.exit_status([alive(capabilities={"it": on_by_default})]) == status
    )


def test_a_status_is_of_the_processes_that_live_and_1_without_any():
    fine, dead = alive(capabilities={}), alive(alive=False)
    assert [running.exit_status(found) for found in ([], [dead], [fine], [dead, fine])] == [1, 1, 0, 0]


def test_the_table_shows_the_states_and_counters_of_each_process_in_columns():
    states = {name: {**UNSUPPORTED, "state": state, "verdict": "apply"} for name, state in
              (("one", "active"), ("two", "active"), ("three", "pending"), ("four", "failed"), ("five", "off"))}  # fmt: skip
    states["four"]["error"] = "it broke"
    first = alive(pid=10, capabilities=states, counters={"one": {"asm": 4, "paged/why": 2}, "two": {"built": 1}})
    second = alive(pid=200, role="scheduler", capabilities={}, alive=False)
    head, one, two, empty, *notes = running.text([first, second], ["a line"], "/folder").splitlines()
    assert re.split(" {2,}", head) == ["pid", "host", "role", "process", "active", "pending", "failed", "counters"]
    assert re.split(" {2,}", one) == ["10", "a", "r", "running", "one, two", "three", "four",
                                      "one asm 4, one paged/why 2, two built 1"]  # fmt: skip
    assert re.split(" {2,}", two) == ["200", "a", "scheduler", "stale", "-", "-", "-", "-"]
    assert head.index("active") == one.index("one, two") == two.index("-  ") and empty == ""
    assert notes == ["10 four: it broke", "200 ended without removing /f.json", "a line"]


def test_where_nothing_needs_a_word_the_table_is_all():
    assert len(running.text([alive(capabilities={})], [], "/folder").splitlines()) == 2
    # A line that does stands apart from it.
    assert running.text([alive(capabilities={}, alive=False)], [], "/folder").splitlines()[2:] == [
        "", "1 ended without removing /f.json"
    ]  # fmt: skip
    text = running.text([], ["a line"], "/folder")
    assert text.splitlines()[0].startswith("no process keeps a file in /folder: ") and text.endswith("\n\na line")


def test_what_a_file_says_is_printed_as_one_line_of_plain_letters(tmp_path, capsys):
    (tmp_path / "ours.json").write_text(json.dumps({**OURS, "role": "two\nlines \x1b[31m\ud800"}))
    assert re.search(r"two\?lines \?\[31m\? +stale", doctor(capsys, tmp_path)[1])
    assert running.printable("é 1\t\u2028") == "é 1??"


def test_what_is_said_of_a_process_is_plain_letters_too():
    broken = alive(capabilities={"it": {**UNSUPPORTED, "error": "two\nlines"}})
    assert "1 it: two?lines" in running.text([broken], ["a\x1bb"], "/folder").splitlines()
    assert running.text([broken], ["a\x1bb"], "/folder").endswith("\na?b")
