"""Runners, layers and backends of plain objects, as decode_pa meets them."""

from types import SimpleNamespace

import torch

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
SCALED = dict(k_scale=torch.ones(1) / 2, k_scale_float=0.5, v_scale=torch.ones(1), v_scale_float=1.0)


class Thing:
    """Anything with attributes that a weak reference can point at."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def takes_nothing_else(q, k, v, layer, forward_batch, save_kv_cache=True):
    """The forward_decode of SGLang's AITER backend."""


class AiterAttnBackend(Thing):
    """SGLang's AITER backend, by its name."""

    def __init__(self, **attributes):
        super().__init__(**{"forward_decode": takes_nothing_else, **attributes})


class Derived(AiterAttnBackend):
    """A user's own, made of it."""


class Triton(Thing):
    """A backend that writes K/V as they are."""

    def forward_extend(self):
        pass


class Scaling(Thing):
    """A backend that applies the layer's scales when it writes K/V."""

    def forward_extend(self):
        return self.k_scale


class HybridAttnBackend(Thing):
    """SGLang's router, by its name."""


class HybridLinearAttnBackend:
    """SGLang's backend of a hybrid model, by its name. It is equal to (its linear backend, its full-attention backend)."""

    def __init__(self, full_attn_backend, linear_attn_backend, full_attn_layers):
        self.full_attn_backend, self.linear_attn_backend = full_attn_backend, linear_attn_backend
        self.full_attn_layers, self.taken = full_attn_layers, full_attn_backend

    def __eq__(self, other):
        assert self.taken is self.full_attn_backend
        return (self.linear_attn_backend, self.full_attn_backend) == other


class NoSource:
    """A release without any file."""

    def source(self, module):
        return None


class SWAKVPool:
    """A pool whose models decode through unified attention, by its name."""


class RadixAttention(Thing):
    """SGLang's attention layer, by its name."""


def known(**changed):
    """What the newest release has, but for what is changed; see `release.Facts`."""
    parameters = ("layer", "forward_batch", "save_kv_cache", "q", "k", "v", "mixed_qkv")
    fields = dict(reads_fp8=True, casts_pool=False, writes_at_unit_scale=True, graph_buffer_in_pages=False, wraps_each_side=False,
                  parameters=parameters, layer_at=0, own=frozenset(parameters), imports=[], release=NoSource())  # fmt: skip
    return SimpleNamespace(**{**fields, **changed})


def layer(of=RadixAttention, **changed):
    fields = dict(layer_id=3, qk_head_dim=256, v_head_dim=256, tp_q_head_num=16, tp_k_head_num=2, logit_cap=0.0, scaling=256**-0.5, is_cross_attention=False,
                  k_scale=None, v_scale=None)  # fmt: skip
    return of(**{**fields, **changed})


def model(*layers, names=()):
    return Thing(modules=lambda: layers, named_parameters=lambda: [(name, None) for name in names])


def runner(*layers, **changed):
    """A ModelRunner of a hybrid model with an fp8 cache, whose layer 3 is a full-attention layer."""
    fields = dict(
        model=model(*(layers or (layer(),))), mambaish_config=SimpleNamespace(full_attention_layer_ids=[3]),
        model_config=SimpleNamespace(dtype=BF16, num_attention_heads=16, context_len=1000, head_dim=256),
        server_args=SimpleNamespace(), kv_cache_dtype=FP8, token_to_kv_pool=SimpleNamespace(),
        req_to_token_pool=SimpleNamespace(size=8), device="cuda",
    )  # fmt: skip
    return Thing(**{**fields, **changed})
