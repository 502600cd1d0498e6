"""v_head_dim: the AITER backend can be built for a model whose layer 0 is not full attention.

Releases up to 0.5.9 ask the pool for the value buffer of layer 0. A hybrid pool holds only
full-attention layers and raises. It can be asked for its `v_head_dim` instead.
"""

from collections.abc import Mapping
from typing import Any

from ..capability import APPLY, UPSTREAM, Args, Capability, Kwargs, Needs, Verdict, Wrapper
from ..counting import count
from ..errors import Unsupported
from ..names import BACKEND
from ..source import Release, calls, mentions

NAME = "v_head_dim"


def probe(release: Release) -> Verdict:
    init = release.function(BACKEND, "AiterAttnBackend.__init__")
    if mentions(init, "get_v_head_dim"):
        return Verdict(UPSTREAM, "AiterAttnBackend.__init__ asks the pool for get_v_head_dim itself")
    reads = calls(init, "get_value_buffer")
    if len(reads) != 1 or [getattr(a, "value", None) for a in reads[0].args] != [0]:
        raise Unsupported("AiterAttnBackend.__init__ neither asks for get_v_head_dim nor reads get_value_buffer(0)")
    reason = "AiterAttnBackend.__init__ reads the value buffer of layer 0, which a hybrid pool may not have"
    return Verdict(APPLY, reason)


def init(original: Any, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Around `AiterAttnBackend.__init__`: shows it a layer 0 of a pool that has none."""
    runner = args[0] if args else kwargs.get("model_runner")
    pool: Any = getattr(runner, "token_to_kv_pool", None)
    if not hasattr(pool, "get_v_head_dim"):
        return original(*args, **kwargs)
    pools_own, own, asked = pool.get_value_buffer, "get_value_buffer" in vars(pool), False

    def get_value_buffer(layer_id: int) -> Any:
        nonlocal asked
        try:
            return pools_own(layer_id)
        except ValueError:
            if layer_id != 0:
                raise
        import torch

        asked = True
        return torch.empty((0, pool.get_v_head_dim()), device="meta")

    pool.get_value_buffer = get_value_buffer
    try:
        result = original(*args, **kwargs)
    finally:
        if own:
            pool.get_value_buffer = pools_own
        else:
            # The method of the class shows again.
            del pool.get_value_buffer
    if asked:
        count(NAME, "asked_pool")
    return result


def wrappers(release: Release) -> Mapping[str, Wrapper]:
    return {f"{BACKEND}.AiterAttnBackend.__init__": init}


CAPABILITY = Capability(
    name=NAME,
    summary="build the AITER backend for a hybrid model whose layer 0 is a linear layer",
    why="`get_value_buffer(0)` raises on a hybrid pool when layer 0 is a linear layer",
    upstream=("https://github.com/sgl-project/sglang/pull/18355",),
    until="0.5.10",
    switch=None,
    kernels=(),
    needs=(Needs(BACKEND, "AiterAttnBackend.__init__", "model_runner"),),
    probe=probe,
    wrappers=wrappers,
)
