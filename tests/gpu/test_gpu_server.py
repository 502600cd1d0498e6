"""Real SGLang servers of a tiny hybrid model on a GPU, with CUDA graphs, a radix cache and chunked prefill.

SERVER_WORK=DIR keeps the model, compiled kernels and logs (default: a temporary folder).
"""

import concurrent.futures
import functools
import os
import pathlib
import tempfile

import environment
import pytest

torch = pytest.importorskip("torch")
RELEASE = "0.5.16"
PLACE = environment.place("sglang", RELEASE)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.xdist_group("servers"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(not PLACE.is_dir(), reason=f"there is no SGLang {RELEASE} in {PLACE}"),
]
import compare  # noqa: E402
import evidence  # noqa: E402
import servers  # noqa: E402

WORK = pathlib.Path(os.environ.get("SERVER_WORK") or tempfile.mkdtemp(prefix="servers-"))
PA = {"SGLANG_USE_AITER_PA": "1"}
NEXTN = (
    "--speculative-algorithm", "NEXTN", "--speculative-num-steps", "2", "--speculative-eagle-topk", "1",
    "--speculative-num-draft-tokens", "3",
)  # fmt: skip
#: The same batches in both runs, so the same tokens to the last; and SGLang 0.5.16 fails with 16 drafting requests
#: on its Triton backend.
ONE_BY_ONE = {"AT_ONCE": "1"}
TP = ("--tp", "2", "--disable-custom-all-reduce", "--enforce-disable-flashinfer-allreduce-fusion")
#: Name -> (SGLang's arguments, options of servers.run).
TOGETHER = {
    "pa": ((), PA),
    "wrong": ((), {**PA, "aiter": "wrong"}),
    "spec": (NEXTN, {**ONE_BY_ONE, "extension": False}),
    "spec_pa": (NEXTN, {**ONE_BY_ONE, **PA}),
    "window": ((), {**PA, "SERVER_LAYERS": "window"}),
    "sinks": ((), {**PA, "SERVER_LAYERS": "sinks"}),
    "unreadable": ((), {"SGLANG_USE_AITER_PA": "2"}),
    **{kind: ((), {**PA, "aiter": kind}) for kind in servers.UNUSABLE},
}


def run(name, arguments=(), **options):
    aiter = options.pop("aiter", "reference")
    if aiter in servers.UNUSABLE:
        aiter = servers.folder_of(aiter, WORK / f"aiter-{name}")
    elif aiter == "wrong":
        aiter = wrong_kernel(WORK / "aiter-wrong")
    states = {"SGLANG_AITER_EXT_STATE_DIR": str(WORK / f"{name}.states")} if options.get("extension", True) else {}
    return servers.run(WORK, name, *arguments, release=RELEASE, aiter=aiter, **states, **options)


def wrong_kernel(folder):
    """An AITER whose decode kernel answers 10 everywhere."""
    reference = servers.child.TESTS / "reference" / "aiter"
    (folder / "aiter").mkdir(parents=True, exist_ok=True)
    (folder / "aiter" / "__init__.py").write_text(
        "import functools\n"
        f"__path__.append({str(reference)!r})\n"
        f"exec(compile(open({str(reference / '__init__.py')!r}).read(), __file__, 'exec'))\n"
        "paged_attention_ragged = functools.wraps(paged_attention_ragged)(lambda out, *args, **kwargs: out.fill_(10))\n"
    )
    return folder


@functools.cache
def plain():
    """The server without the extension, alone: it compiles what the others find."""
    server = run("plain", extension=False)
    assert server.answers, server.output
    return server


@functools.cache
def together():
    plain()
    with concurrent.futures.ThreadPoolExecutor(len(TOGETHER)) as pool:
        jobs = {name: pool.submit(run, name, arguments, **options) for name, (arguments, options) in TOGETHER.items()}
    return {name: job.result() for name, job in jobs.items()}


def same_tokens(without, with_us):
    assert without.answers and with_us.answers, f"{without.output}\n{with_us.output}"
    same, near, wrong = compare.compare(without.answers, with_us.answers)
    # Two runs without the extension part by rounding in up to 4 of 32.
    assert wrong == [] and same >= 24, (same, near, wrong)


def decoded_through_aiter(server, name, schedulers=1):
    states = WORK / f"{name}.states.asked"
    return evidence.missing(server.log, evidence.read(states) if states.is_dir() else [], schedulers)


def test_tokens_are_those_without_the_extension_request_by_request():
    same_tokens(plain(), together()["pa"])


def test_every_scheduler_decoded_through_aiter():
    assert decoded_through_aiter(together()["pa"], "pa") == []
    assert decoded_through_aiter(plain(), "plain") != []


def test_a_wrong_decode_kernel_gives_wrong_tokens_so_decode_runs_through_it():
    wrong = together()["wrong"].answers
    differ = [[x != y for x, y in zip(a["tokens"], b["tokens"])] for a, b in zip(plain().answers, wrong, strict=True)]
    # The first token of each comes from prefill.
    assert sum(map(any, differ)) >= 30 and sum(first for first, *_ in differ) <= 1


def test_speculative_decoding_gives_the_tokens_it_gives_without_the_extension():
    without, with_us = together()["spec"], together()["spec_pa"]
    assert without.answers and with_us.answers, f"{without.output}\n{with_us.output}"
    assert [a["tokens"] for a in without.answers] == [a["tokens"] for a in with_us.answers]
    # Drafts are verified on the prefill backend, and the draft model keeps its own.
    assert "decode stays on its own backend (draft_worker)" in with_us.log and "accept len" in with_us.log


@pytest.mark.parametrize("kind", servers.UNUSABLE)
def test_a_server_without_a_usable_aiter_stops_with_that_message(kind):
    server = together()[kind]
    assert server.answers is None
    message = server.last_lines()[-1]
    assert "SGLANG_USE_AITER_PA=1 needs AITER's paged_attention_ragged" in message
    assert servers.UNUSABLE[kind][1] in message


def test_a_server_with_a_switch_that_cannot_be_read_stops_with_that_message():
    server = together()["unreadable"]
    assert server.answers is None
    assert "SGLANG_USE_AITER_PA='2' is not accepted: use " in server.last_lines()[-1]


@pytest.mark.parametrize("layers", ["window", "sinks"])
def test_a_server_whose_layers_the_kernel_lacks_says_so_and_decodes_on_its_own_backend(layers):
    server = together()[layers]
    assert server.log.count("decode_pa: decode stays on its own backend") == 1
    assert decoded_through_aiter(server, layers) != []
    # SGLang itself serves no window where the model's config has none.
    assert layers == "window" or server.answers


def test_a_server_without_memory_for_the_workspace_stops_with_the_sizes():
    """Alone: the KV pool takes 98% of the GPU."""
    together()
    arguments = (
        "--context-length", "8388608", "--max-total-tokens", "1000000000", "--mem-fraction-static", "0.98",
    )  # fmt: skip
    server = run("memory", arguments, **PA, SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN="1")
    assert server.answers is None
    assert "SGLANG_USE_AITER_PA=1 needs a decode workspace of " in server.last_lines()[-1]
    assert "lower --max-running-requests, --context-length or --mem-fraction-static" in server.last_lines()[-1]


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="one GPU, and this needs two")
def test_two_way_tensor_parallelism_gives_the_tokens_it_gives_without_the_extension():
    plain()
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(run, "tp", TP, extension=False), pool.submit(run, "tp_pa", TP, **PA)]
    without, with_us = (job.result() for job in jobs)
    same_tokens(without, with_us)
    assert decoded_through_aiter(with_us, "tp_pa", schedulers=2) == []
