"""Layers, backends and batches of plain objects, as `forward_extend` meets them."""

from types import SimpleNamespace

import torch

FP8 = torch.float8_e4m3fn
QUERIES = torch.zeros(12, 2048, dtype=torch.bfloat16)


class Batch(SimpleNamespace):
    """What a ForwardBatch says of itself."""


EXTEND = Batch(forward_mode=SimpleNamespace(name="EXTEND"))


def layer(**changed):
    """A layer that the ASM kernel covers, but for what is changed."""
    fields = dict(qk_head_dim=256, v_head_dim=256, sliding_window_size=-1, logit_cap=0.0, is_cross_attention=False,
                  tp_q_head_num=8, tp_k_head_num=2, tp_v_head_num=2, k_scale=None, v_scale=None)  # fmt: skip
    return SimpleNamespace(**{**fields, **changed})


def backend(**changed):
    """A backend whose cache and activations the ASM kernel takes, but for what is changed."""
    fields = dict(kv_cache_dtype=FP8, input_dtype=torch.bfloat16, use_mla=False, token_to_kv_pool=SimpleNamespace())
    return SimpleNamespace(**{**fields, **changed})


def metadata_of(total, extend, padding=256, entries=None, dtype=torch.int32, **changed):
    """The attention metadata of requests with these lengths, in slots 0, 1, 2 and so on."""
    fields = dict(
        kv_indices=torch.arange(sum(total) + padding if entries is None else entries).to(dtype),
        kv_indptr=torch.tensor([0, *total]).cumsum(0).to(torch.int32),
        max_q_len=max(extend, default=0),
        max_kv_len=max(total, default=0),
    )
    return SimpleNamespace(**{**fields, **changed})
