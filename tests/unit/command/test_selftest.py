"""`selftest`: what it says of right kernels, of wrong ones and of what it is asked."""

import argparse
import os
import re
import signal
import subprocess
import sys
import time

import child
import environment
import pytest

pytest.importorskip("torch")
from sglang_aiter_ext.command import main, selftest

SMALL = ("--tokens", "600", "--chunk", "40", "--heads", "4")
REFERENCE = (child.TESTS / "reference" / "aiter" / "__init__.py").read_text()


def command(*arguments):
    return [sys.executable, "-m", "sglang_aiter_ext", "selftest", *arguments]


def run(*arguments, aiter=None):
    path = [str(environment.ROOT), *([str(aiter)] if aiter else [])]
    env = child.clean_environment(PYTHONPATH=os.pathsep.join(path), OMP_NUM_THREADS="1")
    return subprocess.run(command(*arguments), env=env, capture_output=True, text=True, cwd="/")


def errors(done):
    """kernel -> (error, limit) of the table."""
    found = re.findall(r"^(\S.*?) +([\d.e+-]+|inf) +([\d.e+-]+) +[\d,.]+ µs$", done.stdout, re.M)
    return {kernel: (float(error), float(limit)) for kernel, error, limit in found}


def answers(done):
    return dict(re.findall(r"^(.+?) +((?:yes|no)\b.*)$", done.stdout, re.M))


def with_reference(folder, old, new):
    """An AITER of its own: the stand-in with one line changed, which `selftest --reference` does not use."""
    assert REFERENCE.count(old) == 1
    package = folder / "aiter"
    package.mkdir()
    (package / "__init__.py").write_text(REFERENCE.replace(old, new))
    return folder


def test_right_kernels_are_within_bf16_rounding_and_every_answer_is_yes():
    done = run("--reference", *SMALL)
    assert done.returncode == 0, done.stderr
    found = errors(done)
    assert len(found) == 7 and found.pop("gather") == (0.0, 0.0)
    # The stand-in computes in float32 and rounds its output once.
    assert all(0 < error < 2**-8 < limit for error, limit in found.values()), found
    assert answers(done) == dict.fromkeys(
        [
            "asm_context_prefill", "decode_pa with a bf16 KV cache", "decode_pa with an fp8 KV cache", "head_ratio",
            ],
        "yes",
    ) | {"v_head_dim, gather_reuse": "yes: they call no kernel"}  # fmt: skip


# ROCm/aiter#5642: probabilities that sum to 1 in a partition of 256 are cast to e4m3 as they are.
LOW_RANGE = (
    '    out.copy_(torch.einsum("bhgk,bkhd->bhgd", weights, rows(value_cache, v_scale)).flatten(1, 2))\n',
    """    if is_fp8:
        parts = torch.nn.functional.pad(weights, (0, -weights.shape[-1] % 256)).unflatten(-1, (-1, 256))
        share = parts.sum(-1, keepdim=True)
        parts = (parts / share).nan_to_num(0.0).to(torch.float8_e4m3fn).float() * share
        weights = parts.flatten(-2)[..., : weights.shape[-1]]
    out.copy_(torch.einsum("bhgk,bkhd->bhgd", weights, rows(value_cache, v_scale)).flatten(1, 2))
""",
)


def test_probabilities_cast_in_a_low_range_are_a_no_for_fp8_decode_alone(tmp_path):
    done = run(*SMALL, aiter=with_reference(tmp_path, *LOW_RANGE))
    error, limit = errors(done)["PA decode, fp8 KV, near-uniform attention"]
    # The report measured about 15 %.
    assert 0.1 < error < 0.2 and limit == pytest.approx(2**-4, rel=0.01), done.stdout + done.stderr
    found = answers(done)
    assert done.returncode == 1 and found["decode_pa with a bf16 KV cache"] == "yes"
    assert re.match(
        r"no: .*near-uniform attention: error 0.1\d* is over 0.062, see .*aiter/issues/5642",
        found["decode_pa with an fp8 KV cache"],
    )


# Probabilities relative to the largest are cast to e4m3 as they are, and their sum is not.
NO_HEAD_ROOM = (
    "    weights = torch.softmax(scores, dim=-1)\n",
    "    weights = torch.exp(scores - scores.amax(-1, keepdim=True))\n"
    "    weights = weights.to(torch.float8_e4m3fn).float() / weights.sum(-1, keepdim=True)\n",
)


def test_a_kernel_without_head_room_is_told_by_its_error_beside_a_sink_and_is_no_fault_of_the_capability(tmp_path):
    done = run("--tokens", "4096", "--chunk", "16", "--heads", "2", aiter=with_reference(tmp_path, *NO_HEAD_ROOM))
    found = errors(done)
    error, limit = found["ASM prefill, half of the weight on one key"]
    assert found["ASM prefill, with its cast and gather"][0] < limit < 0.25 < error, done.stdout + done.stderr
    assert "\nASM prefill, half of the weight on one key: error 0." in done.stdout
    assert "compare with the paged kernel on yours" in done.stdout
    assert done.returncode == 0 and answers(done)["asm_context_prefill"] == "yes"


@pytest.mark.parametrize(
    "old, new, capability",
    [
        ("q_bounds = _check_cu_seqlens(\"cu_seqlens_q\", cu_seqlens_q,", "k_descale = k_descale * 2\n    q_bounds = _check_cu_seqlens(\"cu_seqlens_q\", cu_seqlens_q,", "head_ratio"),
        ('    _called("paged_attention_ragged"', '    scale *= 2\n    _called("paged_attention_ragged"', "decode_pa with a bf16 KV cache"),
    ],
)  # fmt: skip
def test_a_kernel_that_computes_something_else_is_a_no(tmp_path, old, new, capability):
    done = run(*SMALL, aiter=with_reference(tmp_path, old, new))
    assert done.returncode == 1 and answers(done)[capability].startswith("no: "), done.stdout + done.stderr


def test_a_kernel_that_raises_does_not_end_the_others(tmp_path):
    raising = (
        '    _called("mha_batch_prefill_func"',
        '    raise RuntimeError("no module")\n    _called("mha_batch_prefill_func"',
    )
    done = run(*SMALL, aiter=with_reference(tmp_path, *raising))
    assert answers(done)["head_ratio"] == "no: paged prefill: RuntimeError: no module"
    assert "PA decode, fp8 KV" in errors(done) and done.returncode == 1


def test_off_gfx950_the_asm_kernel_is_not_called(tmp_path):
    done = run(*SMALL, aiter=with_reference(tmp_path, "REFERENCE = True", "REFERENCE = False"))
    assert answers(done)["asm_context_prefill"].startswith("no: ASM prefill, with its cast and gather: this is CPU")


def test_shapes_the_asm_kernel_does_not_cover_are_not_given_to_it():
    done = run("--reference", "--heads", "24", "--kv-heads", "4", "--tokens", "40", "--chunk", "8")
    assert "takes head_dim 256 and (1, 2, 4, 8, 16) query heads a KV head" in answers(done)["asm_context_prefill"]
    assert answers(done)["head_ratio"] == "yes"


def options(**given):
    """The options of the command, with their defaults."""
    names = ("preset", "tp", "heads", "kv_heads", "head_dim", "tokens", "chunk")
    return argparse.Namespace(**{**dict.fromkeys(names), "page_size": 16, "reference": False, **given})


def test_what_is_not_asked_for_is_a_long_request_of_a_common_shape_and_a_short_one_on_the_stand_in():
    assert selftest.shapes(options()) == selftest.Shapes(16, 2, 256, 70_000, 16, 16_384)
    assert selftest.shapes(options(reference=True)) == selftest.Shapes(16, 2, 256, 5_000, 16, 256)
    assert selftest.shapes(options(tokens=100, heads=4)) == selftest.Shapes(4, 2, 256, 100, 16, 100)
    asked = dict(heads=8, kv_heads=4, head_dim=64, tokens=100, page_size=1, chunk=10)
    assert selftest.shapes(options(**asked)) == selftest.Shapes(**asked)


def test_the_preset_gives_a_gpus_share_of_the_heads():
    shares = {1: (32, 2, 256), 2: (16, 1, 256), 4: (8, 1, 256), 8: (4, 1, 256)}
    for tp, share in shares.items():
        found = selftest.shapes(options(preset="Qwen3.5-397B-A17B", tp=tp))
        assert (found.heads, found.kv_heads, found.head_dim) == share
    # Without --tp it is one GPU's.
    assert selftest.shapes(options(preset="Qwen3.5-397B-A17B")).heads == 32
    done = run("--reference", "--preset", "Qwen3.5-397B-A17B", "--tp", "8", "--tokens", "40", "--chunk", "8")
    assert "4 query heads, 1 KV heads, head_dim 256" in done.stdout and done.returncode == 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--reference", "--preset", "Qwen9"), "--preset Qwen9: use Qwen3.5-397B-A17B"),
        (("--reference", "--preset", "Qwen3.5-397B-A17B", "--tp", "3"), "--tp 3: use 1, 2, 4 or 8"),
        (("--reference", "--tp", "4"), "--tp 4: goes with --preset"),
        (
            ("--reference", "--preset", "Qwen3.5-397B-A17B", "--kv-heads", "4"),
            "--kv-heads: --preset Qwen3.5-397B-A17B says",
        ),
        (("--reference", "--heads", "5"), "--heads 5: use a multiple of --kv-heads 2"),
        (("--reference", "--heads", "0"), "--heads 0: use 1 or more"),
        (("--reference", "--tokens", "0"), "--tokens 0: use 1 or more"),
        (("--reference", "--chunk", "0"), "--chunk 0: use 1 or more"),
        (("--reference", "--page-size", "0"), "--page-size 0: use 1 or more"),
        (("--reference", "--tokens", "9", "--chunk", "10"), "--chunk 10: use at most --tokens 9"),
        ((), "selftest needs AITER's kernels: import aiter fails: ModuleNotFoundError"),
    ],
)
def test_bad_options_are_named_with_what_is_accepted(arguments, message, capsys, monkeypatch):
    # Another test of this process may have imported the stand-in.
    monkeypatch.setitem(sys.modules, "aiter", None)
    with pytest.raises(SystemExit) as ended:
        main(["selftest", *arguments])
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_reader_that_goes_away_ends_it_as_any_other_program():
    env = child.clean_environment(PYTHONPATH=str(environment.ROOT), OMP_NUM_THREADS="1")
    line = " ".join([*command("--reference", "--tokens", "40", "--chunk", "8"), "| head -1; echo ${PIPESTATUS[0]}"])
    done = subprocess.run(["bash", "-c", line], env=env, capture_output=True, text=True, cwd="/")
    assert done.stdout.startswith("CPU, torch") and done.stdout.endswith("\n141\n") and done.stderr == ""


def test_without_triton_the_stand_in_does_the_gather_too(tmp_path):
    (tmp_path / "triton.py").write_text("raise ImportError('no triton')")
    done = run("--reference", "--tokens", "40", "--chunk", "8", aiter=tmp_path)
    assert done.returncode == 0 and len(errors(done)) == 7, done.stderr


def test_ctrl_c_leaves_one_clean_line():
    env = child.clean_environment(PYTHONPATH=str(environment.ROOT), OMP_NUM_THREADS="1")
    process = subprocess.Popen(
        command("--reference", "--tokens", "8000", "--chunk", "800"), env=env, cwd="/", text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    while not process.stdout.readline().startswith("kernel "):
        assert process.poll() is None
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "\nsglang-aiter-ext: interrupted\n")
