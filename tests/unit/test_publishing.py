"""A server's processes seen from outside: state files, doctor --running, /metrics and the log."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
import urllib.request

import child
import environment
import pytest

RELEASE = "0.5.12.post1"
DOCTOR = [sys.executable, "-m", "sglang_aiter_ext", "doctor", "--running"]


class Server:
    """tests/kit/cases/serving.py in processes of its own; `stop` ends it and gives what it wrote to its log."""

    def __init__(self, folder, **env):
        path = [environment.ROOT, environment.place("sglang", RELEASE), child.TESTS / "reference"]
        variables = child.clean_environment(
            TRITON_INTERPRET="1", OMP_NUM_THREADS="1", PYTHONPATH=os.pathsep.join(map(str, path)),
            SGLANG_AITER_EXT_STATE_DIR=str(folder), **env,
        )  # fmt: skip
        self.log = open(f"{folder}.log", "w+")
        self.process = subprocess.Popen(
            [sys.executable, str(child.KIT / "child.py"), "serving:server"], env=variables, cwd="/", text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
        )  # fmt: skip
        line = self.process.stdout.readline()
        assert line, self.stop()
        self.__dict__.update(json.loads(line))

    def metrics(self):
        return urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics").read().decode()

    def logged(self):
        with open(self.log.name) as file:
            return file.read()

    def stop(self):
        if self.process.poll() is None:
            self.process.communicate("", timeout=60)
        return self.logged()


def doctor(*arguments):
    return subprocess.run([*DOCTOR, *map(str, arguments)], capture_output=True, text=True, cwd=environment.ROOT)


def running(folder):
    return json.loads(doctor(folder, "--json").stdout)


def wait_for(condition):
    """A process publishes once a second: a minute is plenty for a busy machine too."""
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert condition()


def one_server(test):
    return pytest.mark.slow(pytest.mark.xdist_group("one server")(test))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "states"
    server = Server(folder)
    yield folder, server
    server.stop()


@one_server
def test_every_process_of_the_server_shows_its_role_states_and_counters(served):
    folder, server = served
    wait_for(lambda: [p["counters"] for p in running(folder)] == [{}, server.counters])
    main, scheduler = running(folder)
    assert (main["pid"], main["role"], main["alive"]) == (server.process.pid, "child", True)
    assert (scheduler["pid"], scheduler["role"], scheduler["alive"]) == (server.scheduler, "scheduler_TP0", True)
    assert scheduler["sglang"] == RELEASE and scheduler["counters"]["asm_context_prefill"] == {"asm": 4}
    assert {name: c["state"] for name, c in scheduler["capabilities"].items()} == {
        "decode_pa": "off", "v_head_dim": "off", "asm_context_prefill": "active", "head_ratio": "off",
        "gather_reuse": "off",
    }  # fmt: skip
    assert main["capabilities"]["asm_context_prefill"]["state"] == "pending"
    done = doctor(folder)
    assert done.returncode == 0
    assert re.search(rf"{server.scheduler} +\S+ +scheduler_TP0 +running +asm_context_prefill .*asm 4", done.stdout)


@one_server
def test_sglangs_metrics_endpoint_has_the_schedulers_counters(served):
    _, server = served
    sample = 'sglang_aiter_ext_calls_total{capability="asm_context_prefill",outcome="asm",reason=""} 4.0'
    wait_for(lambda: sample in server.metrics())
    text = server.metrics()
    samples = [line for line in text.splitlines() if line.startswith("sglang_aiter_ext_calls_total")]
    assert len(samples) == sum(map(len, server.counters.values()))
    assert "# TYPE sglang_aiter_ext_calls_total counter" in text
    assert re.search(r"# HELP sglang_aiter_ext_calls_total .*Replays of a CUDA graph do not pass through Python", text)


@one_server
def test_the_file_goes_at_exit_and_the_one_of_a_killed_process_is_stale(served):
    folder, server = served
    # The lines of import time are written by the thread that publishes, which a killed process takes along.
    wait_for(lambda: "on SGLang" in server.logged())
    os.kill(server.scheduler, signal.SIGKILL)
    wait_for(lambda: [p["alive"] for p in running(folder)] == [True, False])
    assert f"{server.scheduler} ended without removing" in doctor(folder).stdout
    log = server.stop()
    (left,) = running(folder)
    assert (left["pid"], left["alive"]) == (server.scheduler, False)
    done = doctor(folder)
    assert (done.returncode, "stale" in done.stdout) == (1, True)
    # The line of import time came before logging was set up, and has SGLang's format all the same.
    (line,) = [line for line in log.splitlines() if "on SGLang" in line]
    stamp = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d TP0\]"
    assert re.fullmatch(rf"{stamp} sglang-aiter-ext \S+ on SGLang {RELEASE}: decode_pa apply \(off\), .*", line)


START = """
import sys, os, json, stand_ins
if 'nothing' not in sys.argv: import sglang.srt
if 'attention' in sys.argv: import sglang.srt.layers.attention.attention_registry
folder = os.environ['SGLANG_AITER_EXT_STATE_DIR']
print(json.dumps(os.listdir(folder) if os.path.isdir(folder) else None))
"""


def start(folder, *arguments, code=START, path=(), **env):
    path = [environment.ROOT, environment.place("sglang", RELEASE), child.KIT, *path]
    variables = child.clean_environment(
        PYTHONPATH=os.pathsep.join(map(str, path)), SGLANG_AITER_EXT_STATE_DIR=str(folder), **env
    )
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, cwd="/")


@pytest.mark.slow
def test_a_process_that_imports_sglang_shows_itself_and_one_that_does_not_leaves_no_file(tmp_path):
    done = start(tmp_path)
    assert len(json.loads(done.stdout)) == 1 and done.stderr == "" and os.listdir(tmp_path) == []
    assert json.loads(start(tmp_path, "nothing").stdout) == []
    assert json.loads(start(tmp_path, SGLANG_AITER_EXT="0").stdout) == []


@pytest.mark.slow
def test_lines_of_import_time_follow_the_configuration_that_sglang_sets_up_later(tmp_path):
    """A handler of the host program's own, before; then SGLang's basicConfig, or a file for its loggers."""
    code = """
        import logging, logging.config, sys, time, stand_ins
        if sys.argv[1] == "handler":
            logging.getLogger().addHandler(logging.StreamHandler())
        import sglang.srt.layers.attention.attention_registry
        if sys.argv[1] == "handler":
            logging.basicConfig(format="[set up] %(message)s", level="INFO", force=True)
        else:
            handlers = {"h": {"class": "logging.StreamHandler", "formatter": "f"}}
            loggers = {"sglang": {"level": "INFO", "handlers": ["h"]}}
            formatters = {"f": {"format": "[set up] %(message)s"}}
            logging.config.dictConfig({"version": 1, "formatters": formatters, "handlers": handlers, "loggers": loggers})
        time.sleep(2.5)
    """
    for how in ("handler", "file"):
        done = start(tmp_path, how, code=code, SGLANG_USE_AITER_PA="maybe")
        lines = done.stderr.splitlines()
        # The handler of before takes errors at once; the line at INFO waits for a level that lets it through.
        stamp = "" if how == "handler" else "[set up] "
        assert len(lines) == 2 and lines[0].startswith(f"{stamp}SGLANG_USE_AITER_PA='maybe' is not accepted"), lines
        assert lines[1].startswith("[set up] sglang-aiter-ext "), lines


@pytest.mark.slow
def test_a_folder_that_takes_no_file_is_one_line_or_an_error_under_strict(tmp_path):
    taken = tmp_path / "taken"
    taken.write_text("")
    done = start(taken, "attention")
    assert done.returncode == 0
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"SGLANG_AITER_EXT_STATE_DIR={taken} cannot be served: [Errno 17] File exists")
    done = start(taken, SGLANG_AITER_EXT_STRICT="1")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        f"sglang_aiter_ext.errors.CouldNotApply: SGLANG_AITER_EXT_STATE_DIR={taken} cannot be served"
    )


@pytest.mark.slow
def test_a_disk_that_fills_up_or_a_folder_that_goes_is_said_and_leaves_no_file(tmp_path):
    code = """
        import logging, os, resource, shutil, sys, stand_ins, sglang.srt, time
        logging.basicConfig(format="%(message)s")
        from sglang_aiter_ext import counting, publishing
        publishing.SECONDS = 0.1
        folder = os.environ["SGLANG_AITER_EXT_STATE_DIR"]
        if sys.argv[1] == "fills up":
            counting._counts[("x" * 100_000, "y", "")] = 1
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        else:
            shutil.rmtree(folder)
        time.sleep(1.5)
        print(os.listdir(folder) if os.path.isdir(folder) else None)
    """
    # Without coverage, whose file would be cut as well.
    done = start(tmp_path / "a", "fills up", code=code, COVERAGE_PROCESS_CONFIG="")
    assert re.fullmatch(r"StateFile: no longer kept: OSError: .*\n", done.stderr) and done.stdout == "[]\n"
    done = start(tmp_path / "b", "goes", code=code)
    assert re.fullmatch(r"StateFile: no longer kept: FileNotFoundError: .* was removed\n", done.stderr), done.stderr


@pytest.mark.slow
def test_a_relative_folder_is_not_accepted(tmp_path):
    done = start("states", "attention")
    assert "SGLANG_AITER_EXT_STATE_DIR='states' is not accepted: use an absolute path" in done.stderr
    assert (done.returncode, done.stderr.count("\n"), os.path.exists("/states")) == (0, 1, False)


@pytest.mark.slow
def test_without_prometheus_client_the_rest_works(tmp_path):
    blocked = tmp_path / "blocked"
    (blocked / "sitecustomize").mkdir(parents=True)
    (blocked / "sitecustomize" / "__init__.py").write_text("import sys\nsys.modules['prometheus_client'] = None\n")
    folder = tmp_path / "states"
    done = start(folder, "attention", path=[blocked], PROMETHEUS_MULTIPROC_DIR=str(tmp_path))
    assert done.stderr.startswith("sglang_aiter_ext counters on /metrics cannot be served: ")
    assert "prometheus_client" in done.stderr and done.stderr.count("\n") == 1
    assert len(json.loads(done.stdout)) == 1


@pytest.mark.slow
def test_a_forked_child_leaves_its_parents_file_alone(tmp_path):
    code = """
        import os, stand_ins, sglang.srt
        folder = os.environ["SGLANG_AITER_EXT_STATE_DIR"]
        if os.fork() == 0:
            raise SystemExit
        os.wait()
        from sglang_aiter_ext.command import running
        print([p["alive"] for p in running.processes(folder)[0]], len(os.listdir(folder)))
    """
    done = start(tmp_path, code=code)
    assert (done.stdout, done.stderr) == ("[True] 1\n", "")


def test_under_strict_a_sink_that_cannot_be_made_leaves_no_other_behind(tmp_path, monkeypatch):
    from sglang_aiter_ext import publishing
    from sglang_aiter_ext.errors import CouldNotApply

    monkeypatch.setenv("SGLANG_AITER_EXT_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setenv("SGLANG_AITER_EXT_STRICT", "1")
    monkeypatch.setattr(publishing, "Metrics", lambda: 1 / 0)
    for _ in range(2):
        with pytest.raises(CouldNotApply, match="/metrics cannot be served: division by zero"):
            publishing.begin()
        assert os.listdir(tmp_path) == [] and publishing._sinks == []
