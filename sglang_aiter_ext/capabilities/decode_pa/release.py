"""What the release has: what differs between releases is read from their source."""

import ast
import functools

from ... import settings
from ...aiter_kernels import PARAMETERS, RAGGED_DECODE
from ...capability import APPLY, UPSTREAM, Verdict
from ...errors import Unsupported
from ...names import BACKEND, LINEAR, REGISTRY
from ...source import Release, calls, mentions, parameters

ARGUMENTS = PARAMETERS[RAGGED_DECODE]


def probe(release: Release) -> Verdict:
    registry = release.source(REGISTRY)
    if registry is not None and mentions(registry.tree, settings.PA.name):
        return Verdict(UPSTREAM, f"attn_backend_wrapper reads {settings.PA.name} itself")
    facts(release)
    return Verdict(APPLY, "attn_backend_wrapper gives a hybrid model one full-attention backend for prefill and decode")


class Facts:
    """What a release does around decode."""

    def __init__(self, release: Release):
        self.release = release
        decode = release.function(BACKEND, "AiterAttnBackend.forward_decode")
        kernel = calls(decode, RAGGED_DECODE)
        if len(kernel) != 1 or len(kernel[0].args) < len(ARGUMENTS):
            reason = f"AiterAttnBackend.forward_decode calls {RAGGED_DECODE} {len(kernel)} times, or not by position"
            raise Unsupported(reason)
        #: Up to 0.5.11 the kernel is told that the cache has the queries' dtype ...
        self.reads_fp8 = getattr(kernel[0].args[ARGUMENTS.index("kv_cache_dtype")], "value", None) != "auto"
        #: ... and from 0.5.7 each layer of each step casts the whole fp8 pool to bf16 for it.
        self.casts_pool = any(
            isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "k_cache" and calls(node.value, "to")
            for node in ast.walk(decode)
        )
        writes = calls(decode, "set_kv_buffer")
        if not writes:
            raise Unsupported("AiterAttnBackend.forward_decode does not write K/V with set_kv_buffer")
        #: Up to 0.5.15.post1 decode writes K/V at unit scale, whatever the layer's scales are.
        self.writes_at_unit_scale = len(writes[-1].args) < 6
        graph = release.function(BACKEND, "AiterAttnBackend.init_cuda_graph_state")
        own_buffer = next(
            (n for n in ast.walk(graph) if isinstance(n, ast.If) and ast.unparse(n.test) == "kv_indices_buf is None"),
            None,
        )
        if own_buffer is None:
            raise Unsupported("AiterAttnBackend.init_cuda_graph_state takes no kv_indices_buf")
        products = [n for n in ast.walk(own_buffer) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult)]
        #: From 0.5.10 to 0.5.12.post1 the buffer has one entry a page, and decode writes one a token.
        self.graph_buffer_in_pages = mentions(own_buffer, "page_size") and not any(
            "self.page_size" in (ast.unparse(n.left), ast.unparse(n.right)) for n in products
        )
        #: Up to 0.5.15 different prefill and decode backends are wrapped one by one, decode first.
        self.wraps_each_side = False
        runner = release.source("sglang.srt.model_executor.model_runner")
        for call in calls(runner.tree, "HybridAttnBackend") if runner else ():
            sides = [k.arg for k in call.keywords if calls(k.value, "_get_attention_backend_from_str")]
            self.wraps_each_side = bool(sides)
            if sides and sides != ["decode_backend", "prefill_backend"]:
                raise Unsupported(f"ModelRunner builds the sides of HybridAttnBackend in the order {sides}")
        takes = parameters(release.function(LINEAR, "HybridLinearAttnBackend.forward_decode"))
        #: The parameters of HybridLinearAttnBackend.forward_decode, in order.
        self.parameters = tuple(name for name in takes if not name.startswith("**"))
        self.layer_at = self.parameters.index("layer")
        self.own = frozenset(self.parameters)
        backend = release.source(BACKEND)
        #: (module, name) of all that SGLang's AITER backend imports in one `try`.
        self.imports = backend.optional_imports("aiter") if backend is not None else []


@functools.cache
def facts(release: Release) -> Facts:
    return Facts(release)
