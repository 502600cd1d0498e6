"""A case that is forked from a preloaded process is the case that a fresh interpreter runs."""

import os
import subprocess
import sys
import time

import child
import environment
import preloaded
import pytest

QUICK = environment.QUICK[0]
PA = (("SGLANG_USE_AITER_PA", "1"),)


@pytest.mark.slow
@pytest.mark.parametrize(
    "release", [pytest.param(v, marks=pytest.mark.xdist_group(v)) for v in environment.RUNNABLE]
)  # fmt: skip
def test_a_forked_case_has_the_result_and_the_output_of_a_fresh_interpreter(release):
    forked, fresh = (child.launch(release, "smoke:release", env=PA, level=level) for level in (None, child.NOTHING))
    assert forked.result == fresh.result
    assert without_names(forked.stdout) == without_names(fresh.stdout)
    assert without_names(forked.stderr) == without_names(fresh.stderr)


def without_names(text):
    """Lines without the names of temporary folders."""
    return [word for word in text.split() if "/tiny-hybrid-" not in word]


@pytest.mark.parametrize("extension", [True, False])
def test_a_forked_case_starts_as_a_fresh_interpreter_does(extension):
    options = dict(extension=extension, env=(*PA, ("HF_HUB_VERBOSITY", "error")))
    forked, fresh = (
        child.launch(QUICK, "startup:seen", level=level, **options).result for level in (None, child.NOTHING)
    )
    assert forked["after"] == fresh["after"]
    # Before the case imports anything, a fork differs by what the loaded modules did, and by nothing else.
    for each in (forked, fresh):
        del each["before"]["finders"], each["before"]["warnings"], each["before"]["environment"]
    assert forked["before"] == fresh["before"]


def test_nothing_of_the_extension_or_of_aiter_is_loaded_before_a_fork():
    for level in (preloaded.THIRD_PARTY, QUICK):
        variables = child.clean_environment(PYTHONPATH=str(environment.place("sglang", QUICK)))
        done = preloaded.run(level, "startup:loaded", variables, 60)
        assert done.returncode == 0, done.stderr
        loaded = done.stdout.splitlines()[-1]
        assert ('"sglang"' in loaded) == (level == QUICK)
        assert not any(name in loaded for name in ("sglang_aiter_ext", '"aiter"', "wrapt", "attention_registry"))


def test_two_cases_of_a_process_share_no_variable_and_no_module():
    first, second = (child.launch(QUICK, "startup:changes", env=(("CHANGED", n),)).result for n in "12")
    assert (first, second) == (["1", False], ["2", False])


@pytest.mark.parametrize(("case", "status"), [("exits", 3), ("crashes", -11), ("raises", 1)])
def test_a_case_that_ends_badly_is_reported_with_its_status_and_its_output(case, status):
    variables = child.clean_environment(PYTHONPATH="")
    done = child.start(f"startup:{case}", variables, preloaded.THIRD_PARTY)
    assert done.returncode == status and done.stdout == "said before the end\n", done
    assert ("ValueError: the case is wrong" in done.stderr) == (case == "raises")


def test_a_case_that_hangs_is_ended_and_the_next_one_runs():
    variables = child.clean_environment(PYTHONPATH="")
    with pytest.raises(subprocess.TimeoutExpired):
        child.start("startup:hangs", variables, preloaded.THIRD_PARTY, timeout=2)
    assert child.start("startup:exits", variables, preloaded.THIRD_PARTY).returncode == 3


def test_a_module_in_front_of_one_that_is_loaded_needs_a_fresh_interpreter(tmp_path):
    (tmp_path / "requests.py").write_text("")
    done = child.start("startup:exits", child.clean_environment(PYTHONPATH=str(tmp_path)), preloaded.THIRD_PARTY)
    assert done.returncode == 1 and "{'requests'}, which this process imported from elsewhere" in done.stderr


def test_the_preloaded_processes_end_with_the_process_that_started_them(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {str(child.KIT)!r}); import child, preloaded, os, signal\n"
        "child.start('startup:exits', child.clean_environment(PYTHONPATH=''), preloaded.THIRD_PARTY)\n"
        "print(preloaded.level(preloaded.THIRD_PARTY).process.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    pid = int(done.stdout)
    for _ in range(100):
        if not os.path.exists(f"/proc/{pid}"):
            return
        time.sleep(0.1)
    raise AssertionError("it still runs")
