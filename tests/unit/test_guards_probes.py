"""What each probe says of a release, one condition at a time, on sources of a few lines."""

import pytest
from conftest import written

from sglang_aiter_ext.capabilities import CAPABILITIES, decode_pa
from sglang_aiter_ext.capability import Unsupported
from sglang_aiter_ext.installed import Release

PROBES = {capability.name: capability.probe for capability in CAPABILITIES}


def release_of(folder, **modules):
    """A release of the modules given, each by the last part of its name."""
    places = {module.rpartition(".")[2]: module for module in (decode_pa.REGISTRY, decode_pa.LINEAR, decode_pa.BACKEND)}
    places["model_runner"] = "srt.model_executor.model_runner"
    return Release(written(folder, {places[n].replace(".", "/") + ".py": text for n, text in modules.items()}))


def said(name, release):
    try:
        return tuple(PROBES[name](release))
    except Unsupported as error:
        return "unsupported", str(error)


PAGED = "mha_batch_prefill_func(q, k, v, a, b, c, d, e, causal=True, q_descale=s, k_descale=s, v_descale=s)"
ASM = "flash_attn_varlen_fp8_pertensor_func()"
PREFIX = f"if any(forward_batch.extend_prefix_lens_cpu): {ASM}"
FIRST = f"if q and not any(forward_batch.extend_prefix_lens_cpu): {ASM}"
GFX = f"if is_gfx95_supported(): {ASM}"
GQA = f"if is_gfx95_supported() and supports_gqa: {ASM}"
BUILD = "_asm_context_prefill_gather_indices(a, b, c, d, e)"
BUILDER = "def _asm_context_prefill_gather_indices(kv_indptr, kv_indices, seq_lens, num_kv_slots, forward_mode): 0\n"
IMPORT = "try:\n from aiter import flash_attn_varlen_fp8_pertensor_func\nexcept ImportError: 0\n"
ONCE = "\n def _asm_context_prefill_indices(self): 0"
#: Name -> (capability, lines of forward_extend, verdict, what the reason says, text before and after the class).
EXTEND = {
    "no ASM call": ("asm_context_prefill", [PAGED], "apply", "no ASM branch"),
    "an ASM call for a prefix": ("asm_context_prefill", [PREFIX, PAGED], "upstream", "own ASM branch"),
    "one for a first chunk": ("asm_context_prefill", [FIRST, PAGED], "apply", "no ASM branch"),
    "both": ("asm_context_prefill", [FIRST, PREFIX, PAGED], "upstream", "own ASM branch"),
    "one under another condition": ("asm_context_prefill", [f"if some(): {ASM}", PAGED], "unsupported", "does not say"),
    "one for any of others": ("asm_context_prefill", [f"if any(others): {ASM}", PAGED], "unsupported", "does not say"),
    "one unknown and one for a prefix": ("asm_context_prefill", [f"if x: {ASM}", PREFIX, PAGED], "upstream", "own ASM"),
    "not of something else": ("asm_context_prefill", [PREFIX.replace("if ", "if not off and "), PAGED], "upstream", "own"),
    "another operator before": ("asm_context_prefill", [PREFIX.replace("if ", "if -"), PAGED], "upstream", "own ASM"),
    "no paged call": ("asm_context_prefill", ["0"], "unsupported", "0 times"),
    "two paged calls": ("asm_context_prefill", [PAGED, PAGED], "unsupported", "2 times"),
    "seven arguments": ("asm_context_prefill", [PAGED.replace("d, e", "d")], "unsupported", "casts the fp8"),
    "a descale is missing": ("asm_context_prefill", [PAGED.replace("v_descale=s", "x=s")], "unsupported", "casts the fp8"),
    "not causal": ("asm_context_prefill", [PAGED.replace("True", "False")], "unsupported", "something else"),
    "another scale": ("asm_context_prefill", [PAGED.replace("q_descale", "softmax_scale=1, q_descale")], "unsupported", "something"),
    "an import that is not called": ("asm_context_prefill", [PAGED], "unsupported", "does not call it", IMPORT),
    "another import": ("asm_context_prefill", [PAGED], "apply", "no ASM branch", IMPORT.replace("flash_attn", "other")),
    "an import that is called": ("asm_context_prefill", [FIRST, PAGED], "apply", "no ASM branch", IMPORT),
    "neither": ("head_ratio", ["0"], "not_applicable", "no ASM call"),
    "the question without the call": ("head_ratio", ["is_gfx95_supported()"], "unsupported", "does not call"),
    "the call without the question": ("head_ratio", [ASM], "unsupported", "does not ask"),
    "no head ratio": ("head_ratio", [GFX], "apply", "1 ASM branch"),
    "a head ratio": ("head_ratio", [GQA], "upstream", "checks the head ratio"),
    "one of two has a head ratio": ("head_ratio", [GQA, GFX], "apply", "1 ASM branch"),
    "one of two asks": ("head_ratio", [GFX, f"if some(): {ASM}"], "unsupported", "does not ask"),
    "built at every layer": ("gather_reuse", [BUILD], "apply", "at every layer", BUILDER),
    "built once": ("gather_reuse", [PREFIX], "upstream", "once a batch", "", ONCE),
    "built in another way": ("gather_reuse", [PREFIX], "unsupported", "not known here"),
    "nothing to build": ("gather_reuse", [FIRST], "not_applicable", "no ASM branch"),
}  # fmt: skip


@pytest.mark.parametrize("case", EXTEND)
def test_each_condition_of_forward_extend(tmp_path, case):
    name, lines, verdict, words, *around = EXTEND[case]
    before, after = (*around, "", "")[:2]
    body = "".join(f"\n  {line}" for line in lines)
    text = f"{before}class AiterAttnBackend:\n def forward_extend(self, forward_batch):{body}{after}\n"
    found, reason = said(name, release_of(tmp_path, aiter_backend=text))
    assert found == verdict and words in reason


INIT = {
    "get_v_head_dim()": "upstream", "get_value_buffer(0)": "apply", "0": "unsupported", "get_value_buffer(1)": "unsupported",
    "get_value_buffer(layer)": "unsupported", "get_value_buffer(0), get_value_buffer(0)": "unsupported",
    "get_value_buffer(0), get_v_head_dim()": "upstream",
}  # fmt: skip


@pytest.mark.parametrize("line", INIT)
def test_each_way_to_the_width_of_the_values(tmp_path, line):
    release = release_of(tmp_path, aiter_backend=f"class AiterAttnBackend:\n def __init__(self):\n  {line}\n")
    assert said("v_head_dim", release)[0] == INIT[line]


KERNEL = "paged_attention_ragged(a, b, c, d, e, f, g, h, i, j, k, l, 'auto', m, n, o, p)"
BUFFER = "max_bs * self.max_context_len"
DECODE = f"""
try:
 from aiter import one, two
except ImportError: 0
class AiterAttnBackend:
 def forward_decode(self):
  k_cache = get_kv_buffer()
  other = x.to(y)
  set_kv_buffer(a, b, c, d)
  {KERNEL}
 def init_cuda_graph_state(self, kv_indices_buf):
  if self.page_size > 1: 0
  if kv_indices_buf is None:
   self.buffer = zeros({BUFFER})
"""
LINEAR = "class HybridLinearAttnBackend:\n def forward_decode(self, layer, q, k, v, **kwargs): 0\n"
SIDES = "HybridAttnBackend(model_runner=x, decode_backend=y._get_attention_backend_from_str(), prefill_backend=y._get_attention_backend_from_str())"


def facts(folder, before="", after="", runner=None, linear=LINEAR):
    assert before in DECODE
    sources = dict(aiter_backend=DECODE.replace(before, after), hybrid_linear_attn_backend=linear)
    return decode_pa.Facts(release_of(folder, **sources, **({"model_runner": runner} if runner else {})))


def test_the_facts_of_a_release(tmp_path):
    found = vars(facts(tmp_path))
    assert found == dict(
        reads_fp8=False, casts_pool=False, writes_at_unit_scale=True, graph_buffer_in_pages=False, wraps_each_side=False,
        parameters=("layer", "q", "k", "v"), layer_at=0, own={"layer", "q", "k", "v"},
        imports=[("aiter", "one"), ("aiter", "two")],
    )  # fmt: skip


#: A change to DECODE -> the fact that is another then.
CHANGES = {
    "the cache's dtype": ("'auto'", "dtype", "reads_fp8", True),
    "a cast of the pool": ("k_cache = get_kv_buffer()", "k_cache = get_kv_buffer().to(x)", "casts_pool", True),
    "scales are written": ("set_kv_buffer(a, b, c, d)", "set_kv_buffer(a, b, c, d, e, f)", "writes_at_unit_scale", False),
    "a buffer in pages": (BUFFER, "max_bs * (self.max_context_len // self.page_size)", "graph_buffer_in_pages", True),
    "whole pages": (BUFFER, "max_bs * (n // self.page_size) * self.page_size", "graph_buffer_in_pages", False),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_each_fact_is_read_from_its_own_line(tmp_path, case):
    before, after, name, value = CHANGES[case]
    assert getattr(facts(tmp_path, before, after), name) is value


@pytest.mark.parametrize(
    "before, after, words",
    [
        (KERNEL, "0", "0 times"),
        (KERNEL, f"{KERNEL}, {KERNEL}", "2 times"),
        (", p)", ")", "not by position"),
        ("set_kv_buffer", "set_something_else", "does not write K/V"),
        ("if kv_indices_buf is None", "if no_buffer", "takes no kv_indices_buf"),
    ],
)
def test_what_decode_needs_and_does_not_find_is_named(tmp_path, before, after, words):
    with pytest.raises(Unsupported, match=words):
        facts(tmp_path, before, after)


def test_the_sides_of_a_router_are_wrapped_one_by_one_in_a_known_order(tmp_path):
    assert facts(tmp_path, runner=SIDES).wraps_each_side is True
    assert facts(tmp_path, runner=SIDES.replace("._get_attention_backend_from_str()", "")).wraps_each_side is False
    turned = SIDES.replace("decode_", "x_").replace("prefill_", "decode_").replace("x_", "prefill_")
    with pytest.raises(Unsupported, match="in the order"):
        facts(tmp_path, runner=turned)


def test_a_registry_that_reads_the_variable_is_upstream(tmp_path):
    sources = dict(aiter_backend=DECODE, hybrid_linear_attn_backend=LINEAR)
    assert said("decode_pa", release_of(tmp_path, **sources))[0] == "apply"
    assert said("decode_pa", release_of(tmp_path, **sources, attention_registry="other = 'SGLANG'"))[0] == "apply"
    release = release_of(tmp_path, attention_registry="get_bool_env_var('SGLANG_USE_AITER_PA')")
    assert said("decode_pa", release)[0] == "upstream"
