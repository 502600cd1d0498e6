"""What decode_pa reads of a release, one condition at a time, on sources of a few lines."""

import pytest
from made_releases import release_of, said

from sglang_aiter_ext.capabilities.decode_pa import CAPABILITY, wrappers
from sglang_aiter_ext.capabilities.decode_pa.release import Facts, facts, probe
from sglang_aiter_ext.errors import InternalError, Unsupported
from sglang_aiter_ext.source import Release

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


def facts_of(folder, before="", after="", runner=None, linear=LINEAR):
    assert before in DECODE
    sources = dict(aiter_backend=DECODE.replace(before, after), hybrid_linear_attn_backend=linear)
    return Facts(release_of(folder, **sources, **({"model_runner": runner} if runner else {})))


def test_the_facts_of_a_release(tmp_path):
    found = vars(facts_of(tmp_path))
    assert isinstance(found.pop("release"), Release)
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
    assert getattr(facts_of(tmp_path, before, after), name) is value


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
        facts_of(tmp_path, before, after)


def test_the_sides_of_a_router_are_wrapped_one_by_one_in_a_known_order(tmp_path):
    assert facts_of(tmp_path, runner=SIDES).wraps_each_side is True
    assert facts_of(tmp_path, runner=SIDES.replace("._get_attention_backend_from_str()", "")).wraps_each_side is False
    turned = SIDES.replace("decode_", "x_").replace("prefill_", "decode_").replace("x_", "prefill_")
    with pytest.raises(Unsupported, match="in the order"):
        facts_of(tmp_path, runner=turned)


def test_a_registry_that_reads_the_variable_is_upstream(tmp_path):
    sources = dict(aiter_backend=DECODE, hybrid_linear_attn_backend=LINEAR)
    assert said(probe, release_of(tmp_path, **sources))[0] == "apply"
    assert said(probe, release_of(tmp_path, **sources, attention_registry="other = 'SGLANG'"))[0] == "apply"
    release = release_of(tmp_path, attention_registry="get_bool_env_var('SGLANG_USE_AITER_PA')")
    assert said(probe, release)[0] == "upstream"


def test_a_release_is_read_once(tmp_path):
    release = release_of(tmp_path, aiter_backend=DECODE, hybrid_linear_attn_backend=LINEAR)
    assert facts(release) is facts(release)


def test_the_builder_the_step_and_the_kernel_are_wrapped_and_what_is_ours_to_answer_for_is_an_error(tmp_path):
    release = release_of(tmp_path, aiter_backend=DECODE, hybrid_linear_attn_backend=LINEAR)
    found = wrappers(release)
    assert [".".join(name.split(".")[4:]) for name in found] == [
        "attention_registry.attn_backend_wrapper",
        "hybrid_linear_attn_backend.HybridLinearAttnBackend.forward_decode",
        "aiter_backend.paged_attention_ragged",
    ]
    # Both are told what this release has.
    assert [getattr(wrapper, "args", None) for wrapper in found.values()] == [
        (facts(release),),
        (facts(release),),
        None,
    ]
    assert CAPABILITY.internal_error is InternalError
