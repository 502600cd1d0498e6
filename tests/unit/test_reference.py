"""The AITER reference: its signatures against AITER's own, and its strictness."""

import ast
import inspect
import sys

import environment
import pytest

sys.path.insert(0, str(environment.ROOT / "tests" / "reference"))
import aiter  # noqa: E402
import torch  # noqa: E402
from aiter.ops.triton.attention.unified_attention import unified_attention  # noqa: E402

from sglang_aiter_ext import aiter_kernels, source  # noqa: E402

FUNCTIONS = {
    "flash_attn_varlen_func": ("ops/mha.py", aiter.flash_attn_varlen_func),
    "flash_attn_varlen_fp8_pertensor_func": ("ops/mha.py", aiter.flash_attn_varlen_fp8_pertensor_func),
    "mha_batch_prefill_func": ("ops/mha.py", aiter.mha_batch_prefill_func),
    "paged_attention_ragged": ("ops/attention.py", aiter.paged_attention_ragged),
    "unified_attention": ("ops/triton/unified_attention.py", unified_attention),
}
#: Parameters that AITER gained after its version on PyPI.
LATER = {
    "flash_attn_varlen_fp8_pertensor_func": {"q_descale", "k_descale", "v_descale", "sink_ptr"},
    "mha_batch_prefill_func": {
        "kv_last_page_lens", "block_table", "seqlen_k", "q_descale", "k_descale", "v_descale", "kv_block_descale",
        "sink_ptr", "sink_size",
    },
    "unified_attention": {"q_scales", "shuffled_kv_cache", "skip_reduce"},
}  # fmt: skip


def real_parameters(name: str) -> list[str]:
    file = environment.place("amd-aiter", environment.AITER) / "aiter" / FUNCTIONS[name][0]
    tree = ast.parse(file.read_text())
    (function,) = (n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name)
    return [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_parameters_are_aiters_in_aiters_order(name):
    ours = list(inspect.signature(FUNCTIONS[name][1]).parameters)
    later = LATER.get(name, set())
    assert later <= set(ours)
    assert [p for p in ours if p not in later] == real_parameters(name)


@pytest.mark.parametrize("release", environment.RELEASES)
def test_every_call_in_sglangs_aiter_backend_binds(release):
    file = environment.place("sglang", release) / "sglang/srt/layers/attention/aiter_backend.py"
    tree, seen = ast.parse(file.read_text()), set()
    for name, (_, function) in FUNCTIONS.items():
        for call in source.calls(tree, name):
            keywords = {k.arg: None for k in call.keywords if k.arg}
            inspect.signature(function).bind(*[None] * len(call.args), **keywords)
            seen.add(name)
    assert {"mha_batch_prefill_func", "paged_attention_ragged"} <= seen


def test_the_packages_own_list_of_parameters_fits():
    for name in aiter_kernels.PARAMETERS:
        assert aiter_kernels.kernel_problem(aiter, name) is None
    problem = aiter_kernels.kernel_problem(
        type("Old", (), {"flash_attn_varlen_fp8_pertensor_func": lambda q, k, v, cu_seqlens_q: 0}),
        "flash_attn_varlen_fp8_pertensor_func",
    )
    assert "has parameter 3 'cu_seqlens_q' where 'q_descale' is expected" in problem


FP8 = torch.float8_e4m3fn


def asm(**changed):
    one = torch.ones(1)
    arguments = dict(
        q=torch.zeros(3, 4, 256).to(FP8), k=torch.zeros(5, 2, 256).to(FP8), v=torch.zeros(5, 2, 256).to(FP8),
        q_descale=one, k_descale=one, v_descale=one, cu_seqlens_q=torch.tensor([0, 3], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([0, 5], dtype=torch.int32), max_seqlen_q=3, max_seqlen_k=5, causal=True,
    )  # fmt: skip
    return aiter.flash_attn_varlen_fp8_pertensor_func(**{**arguments, **changed})


def test_the_asm_kernel_poisons_rows_no_request_has():
    out = asm(q=torch.zeros(4, 4, 256).to(FP8))
    assert out[:3].isfinite().all() and out[3].isnan().all()


WRONG = {
    "int64 cu_seqlens": (dict(cu_seqlens_k=torch.tensor([0, 5])), "must be int32"),
    "strided head_dim": (dict(q=torch.zeros(3, 4, 512).to(FP8)[..., ::2]), "contiguous last dimension"),
    "strides of V": (dict(v=torch.zeros(5, 4, 256).to(FP8)[:, ::2]), "V is read with the strides of K"),
    "head ratio": (dict(q=torch.zeros(3, 6, 256).to(FP8)), None),
    "ratio 6": (dict(q=torch.zeros(3, 12, 256).to(FP8)), "12 query heads over 2 KV heads is not covered"),
    "bf16 cache": (dict(k=torch.zeros(5, 2, 256, dtype=torch.bfloat16)), "must share an fp8 dtype"),
    "max_seqlen": (dict(max_seqlen_k=4), "a length over max_seqlen 4"),
    "tensor max_seqlen": (dict(max_seqlen_k=torch.tensor(5)), "must be a Python int"),
    "past the end": (dict(cu_seqlens_k=torch.tensor([0, 6], dtype=torch.int32), max_seqlen_k=6), "past 5 rows"),
    "missing descale": (dict(q_descale=None), "q_descale must be a tensor"),
    "bf16 descale": (dict(k_descale=torch.ones(1, dtype=torch.bfloat16)), "k_descale must be float32"),
    "not causal": (dict(causal=False), "only plain causal attention"),
}


@pytest.mark.parametrize("what", WRONG)
def test_the_asm_kernel_refuses_a_wrong_caller(what):
    changed, message = WRONG[what]
    message = message or "6 query heads over 2 KV heads is not covered"
    with pytest.raises(ValueError, match=message):
        asm(**changed)


def paged(**changed):
    arguments = dict(
        q=torch.zeros(3, 4, 64, dtype=torch.bfloat16), k=torch.zeros(300, 2, 64, dtype=torch.bfloat16),
        v=torch.zeros(300, 2, 64, dtype=torch.bfloat16), cu_seqlens_q=torch.tensor([0, 3], dtype=torch.int32),
        kv_indptr=torch.tensor([0, 5], dtype=torch.int32), kv_page_indices=torch.ones(261, dtype=torch.int32),
        max_seqlen_q=3, max_seqlen_k=5, causal=True,
    )  # fmt: skip
    return aiter.mha_batch_prefill_func(**{**arguments, **changed})


def test_the_paged_kernel_reads_its_padding_entries():
    assert paged().isfinite().all()
    with pytest.raises(ValueError, match="lacks its padding entries"):
        paged(kv_page_indices=torch.ones(260, dtype=torch.int32))
    for slot in (300, -1):
        table = torch.ones(261, dtype=torch.int32)
        table[-1] = slot
        with pytest.raises(ValueError, match="points outside the pool"):
            paged(kv_page_indices=table)


def ragged(**changed):
    arguments = dict(
        out=torch.zeros(2, 4, 64, dtype=torch.bfloat16), workspace_buffer=torch.zeros(2 * 4 * 2 * (64 * 4 + 8), dtype=torch.uint8),
        query=torch.zeros(2, 4, 64, dtype=torch.bfloat16), key_cache=torch.zeros(30, 1, 2, 64, dtype=torch.bfloat16),
        value_cache=torch.zeros(30, 1, 2, 64, dtype=torch.bfloat16), scale=0.1, kv_indptr=torch.tensor([0, 3, 8], dtype=torch.int32),
        kv_page_indices=torch.arange(8, dtype=torch.int32), kv_last_page_lens=torch.ones(2, dtype=torch.int32), block_size=1,
        max_num_partitions=2, alibi_slopes=None, kv_cache_dtype="auto", kv_cache_layout="NHD", logits_soft_cap=0.0,
        k_scale=torch.ones(1), v_scale=torch.ones(1),
    )  # fmt: skip
    return aiter.paged_attention_ragged(**{**arguments, **changed})


def test_the_decode_kernel_refuses_a_wrong_caller():
    assert ragged().isfinite().all()
    for changed, message in (
        (dict(workspace_buffer=torch.zeros(100, dtype=torch.uint8)), "the workspace is smaller than"),
        (dict(kv_indptr=torch.tensor([0, 3, 8])), "must be contiguous int32"),
        (dict(kv_page_indices=torch.full((8,), 30, dtype=torch.int32)), "points outside the pool"),
        (dict(kv_cache_dtype="fp8_e4m3"), "cache with kv_cache_dtype 'fp8_e4m3'"),
        (dict(scale=torch.tensor(0.1)), "scale must be a Python float"),
        (dict(k_scale=1.0), "k_scale must be a tensor"),
        (dict(kv_indptr=torch.tensor([0, 3, 600], dtype=torch.int32), kv_page_indices=torch.zeros(600, dtype=torch.int32)), "over max_seqlen 512"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            ragged(**changed)


def test_the_package_never_imports_the_reference():
    for file in (environment.ROOT / "sglang_aiter_ext").rglob("*.py"):
        assert "reference/" not in file.read_text() and "import tests" not in file.read_text()
