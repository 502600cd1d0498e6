"""SGLang's attention code on a GPU: decode in graphs, memory, and SGLang's own attention tests.

Each release lies in $SGLANG_AITER_EXT_CACHE/cpXY/sglang-RELEASE, where tests/kit/environment.py
installs it; what a release needs to run on this GPU is in this Python.
"""

import functools
import json
import os
import subprocess
import sys

import child
import environment
import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
#: Capture and replay pairs up to 0.5.12.post1, `init_forward_metadata_out_graph` from 0.5.13, `..._in_graph`
#: from 0.5.15, breakable graphs in 0.5.22 and later.
RELEASES = ["0.5.10.post1", "0.5.12.post1", "0.5.13", "0.5.16", "0.5.18", "0.5.21", "0.5.23"]
#: 0.5.16's kernels are those that a GPU machine is given.
KIT = ["0.5.16", "0.5.18", "0.5.23"]


def each(releases, group="graphs"):
    """One worker for all tests of a release: they share results."""
    return [pytest.param(release, marks=pytest.mark.xdist_group(f"{group} {release}")) for release in releases]


@functools.cache
def on_gpu(release, case, extension=True, backends=""):
    """The result of `case` in a process of its own, as `child.launch`, with compiled kernels."""
    place = environment.place("sglang", release)
    if not place.is_dir():
        pytest.skip(f"there is no SGLang {release} in {place}")
    path = [str(environment.ROOT)] * extension + [str(place), str(child.TESTS / "reference")]
    env = child.clean_environment(PYTHONPATH=os.pathsep.join(path), SGLANG_USE_AITER_PA="1", KIT_BACKENDS=backends)
    command = [sys.executable, str(child.KIT / "child.py"), case]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=550, cwd="/")
    lines = [line for line in done.stdout.splitlines() if line.startswith(child.MARK)]
    assert done.returncode == 0 and lines, f"{case} on {release}\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return json.loads(lines[-1][len(child.MARK) :])


@pytest.mark.parametrize("release", each(RELEASES))
def test_replayed_decode_steps_equal_eager_ones_and_exact_attention(release, exact):
    """Other lengths than captured, padded and full batches of two sizes, a prefill between: no kernel call in Python."""
    rows = on_gpu(release, "gpu_graphs:sizes_and_lengths")
    for row in rows:
        fp8 = row["case"][1]
        if fp8 and release == "0.5.10.post1":
            assert row["full"] == "TritonAttnBackend"
            continue
        assert row["full"] == "AiterDecodeRouter" and len(row["replays"]) == 8
        for replay in row["replays"]:
            assert max(replay["graph"], replay["eager"], replay["apart"]) <= exact, (row["case"], replay)
            assert (replay["aiter_calls_of_the_replay"], replay["calls"]) == (0, 2)
        assert row["other_prefill"]["aiter_calls"] == 0


@pytest.mark.parametrize("release", each(RELEASES))
def test_the_graph_buffer_has_an_entry_for_every_token_at_any_page_size(release):
    rows = [row for row in on_gpu(release, "gpu_graphs:sizes_and_lengths") if "entries" in row]
    assert {row["case"][0] for row in rows} == {1, 16}
    for row in rows:
        assert row["entries"] >= 4 * 1024 and row["graph_bytes"] >= 4 * row["entries"]


def test_the_releases_own_breakable_graphs_replay_decode_steps(exact):
    out = on_gpu("0.5.23", "gpu_graphs:breakable")
    for replay in out["replays"]:
        assert max(replay["graph"], replay["eager"], replay["apart"]) <= exact
        assert replay["aiter_calls_of_the_replay"] == 0
    assert out["hooks"] <= exact


@pytest.mark.parametrize("release", each(["0.5.12.post1", "0.5.16", "0.5.23"]))
def test_the_memory_that_is_checked_is_the_memory_that_is_taken(release):
    """The workspace, as PyTorch counts it; 2 MiB are what its allocator rounds up to."""
    out = on_gpu(release, "gpu_graphs:memory")
    assert out["expected"] <= out["built"] <= out["expected"] * 1.01 + 2 * 2**20
    assert out["entries"] >= 32 * 262144


def test_a_workspace_larger_than_the_gpu_is_refused_before_it_is_taken():
    out = on_gpu("0.5.16", "gpu_graphs:refused")
    assert out["error"].startswith("DecodeError: SGLANG_USE_AITER_PA=1 needs a decode workspace of ")
    for words in ("GiB are free", "--max-running-requests", "--mem-fraction-static"):
        assert words in out["error"]
    assert out["taken"] < 2**35


@pytest.mark.parametrize("release", each(KIT, "kit"))
def test_sglangs_own_attention_tests_end_the_same_with_and_without_the_extension(release):
    backends = "triton,torch_native,aiter"
    ours = on_gpu(release, "gpu_kit:dense_and_gdn", backends=backends)
    plain = on_gpu(release, "gpu_kit:dense_and_gdn", extension=False, backends=backends)
    assert (ours["wrapped"], plain["wrapped"]) == (True, False)
    assert ours["results"] == plain["results"]
    for backend in ("triton", "aiter"):
        eager = [
            result for name, result in plain["results"].items() if name.startswith(backend) and name.count("/") == 1
        ]
        assert eager.count("passed") >= 20


@pytest.mark.parametrize("release", each(KIT, "kit"))
def test_sglangs_own_attention_tests_pass_on_the_router_as_on_its_prefill_backend(release):
    ours = on_gpu(release, "gpu_kit:decode_router", backends="triton")["results"]
    plain = on_gpu(release, "gpu_kit:dense_and_gdn", extension=False, backends="triton")["results"]
    assert ours == plain
