"""Decode steps captured into CUDA graphs as the release's own graph runner captures them, and replayed."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import aiter
import harness
import torch


def sizes_and_lengths() -> list[dict]:
    """Replays of two captured batch sizes at lengths that were not captured, padded and not, each followed by an eager run."""
    rows = []
    for page_size, fp8, k_scale, v_scale, scaling in (
        (1, False, None, None, None), (16, False, None, None, 0.05), (1, True, 0.5, 2.0, 0.05), (16, True, 0.5, 2.0, None),
    ):  # fmt: skip
        stack = harness.Stack(
            backend="triton", page_size=page_size, fp8=fp8, k_scale=k_scale, v_scale=v_scale, scaling=scaling,
            context_len=1024, layers=8,
        )  # fmt: skip
        case = [page_size, fp8, k_scale, v_scale, scaling]
        full = stack.backend.full_attn_backend
        row = {"case": case, "full": type(full).__name__, "replays": []}
        rows.append(row)
        if row["full"] != "AiterDecodeRouter":
            continue
        stack.grow({1: 5, 2: 270, 3: 33, 4: 16})
        before = torch.cuda.memory_allocated()
        graphs = Graphs(stack, (4, 2))
        row["graph_bytes"] = torch.cuda.memory_allocated() - before
        row["entries"] = full.decode_backend.cuda_graph_kv_indices.numel()
        row["replays"] = [
            graphs.replay(4, [1, 2, 3, 4]), graphs.replay(2, [2, 3]), graphs.replay(4, [3, 1, 2]),
            graphs.replay(2, [4]), graphs.replay(2, [1, 4], grow={1: 255, 4: 600}), graphs.replay(4, [4, 3, 2, 1], grow={3: 480}),
            graphs.replay(2, [2, 3]),
        ]  # fmt: skip
        row["other_prefill"] = prefill_between(stack)
        row["replays"].append(graphs.replay(4, [1, 2, 3]))
    return rows


def prefill_between(stack) -> dict:
    """A chunk on the prefill backend between two replays."""
    calls = sum(aiter.CALLS.values())
    result = stack.extend({5: 40, 3: 7})
    return {"error": result.error(), "aiter_calls": sum(aiter.CALLS.values()) - calls}


class Graphs:
    """One captured decode step of all full-attention layers for each of `sizes`, on static tensors they share."""

    def __init__(self, stack, sizes, breakable=False):
        self.stack, backend = stack, stack.backend
        self.fill = backend.get_cuda_graph_seq_len_fill_value()
        most, device = max(sizes), stack.device
        self.static = SimpleNamespace(
            input_ids=torch.zeros(most, dtype=torch.int64, device=device),
            positions=torch.zeros(most, dtype=torch.int64, device=device),
            req_pool_indices=torch.zeros(most, dtype=torch.int64, device=device),
            seq_lens=torch.full((most,), self.fill, dtype=torch.int32, device=device),
            seq_lens_cpu=torch.full((most,), self.fill, dtype=torch.int32),
            out_cache_loc=torch.zeros(most, dtype=torch.int64, device=device),
            encoder_lens=None, mamba_track_indices=None,
        )  # fmt: skip
        self.inputs = {layer: [stack._random(most, n * stack.head_dim) for n in (stack.q_heads, stack.kv_heads, stack.kv_heads)] for layer in stack.layers}  # fmt: skip
        backend.init_cuda_graph_state(most, most)
        self.graphs, self.outputs, self.breakable = {}, {}, breakable
        for size in sorted(sizes, reverse=True):
            self.capture(size)

    def layers(self, batch, size) -> dict:
        stack, out = self.stack, {}
        for layer_id, layer in stack.layers.items():
            # A release may scale K and V where they are.
            q, k, v = (x[:size].clone() for x in self.inputs[layer_id])
            k, v = (x.view(size, stack.kv_heads, stack.head_dim) for x in (k, v))
            out[layer_id] = layer(q, k, v, batch)
        return out

    def capture(self, size):
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        backend, static = self.stack.backend, self.static
        fields = {name: value[:size] for name, value in vars(static).items() if value is not None}
        batch = self.stack.make_batch(
            forward_mode=ForwardMode.DECODE, batch_size=size, seq_lens_sum=size * self.fill, **fields
        )
        with torch.no_grad(), self.stack.backend_context():
            if hasattr(backend, "init_forward_metadata_out_graph"):
                backend.init_forward_metadata_out_graph(batch, in_capture=True)
            else:
                backend.init_forward_metadata_capture_cuda_graph(
                    size, size, batch.req_pool_indices, batch.seq_lens, None, batch.forward_mode, None
                )
            in_graph = getattr(backend, "init_forward_metadata_in_graph", lambda batch: None)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    in_graph(batch)
                    self.layers(batch, size)
            torch.cuda.current_stream().wait_stream(stream)
            self.graphs[size], capturing = self.new_graph(stream)
            with capturing:
                in_graph(batch)
                self.outputs[size] = self.layers(batch, size)

    def new_graph(self, stream):
        if not self.breakable:
            graph = torch.cuda.CUDAGraph()
            return graph, torch.cuda.graph(graph, stream=stream)
        from sglang.srt.model_executor.runner_backend_utils import breakable_cuda_graph as module

        graph = module.BreakableCUDAGraph()
        return graph, module.BreakableCUDAGraphCapture(graph, torch.cuda.graph_pool_handle(), stream)

    def prepare(self, size, batch):
        """What the release's runner does with metadata before it replays."""
        backend, static, count = self.stack.backend, self.static, batch.batch_size
        if not hasattr(backend, "init_forward_metadata_out_graph"):
            backend.init_forward_metadata_replay_cuda_graph(
                size, static.req_pool_indices[:size], static.seq_lens[:size],
                batch.seq_lens_sum + (size - count) * self.fill, None, batch.forward_mode, None,
                seq_lens_cpu=static.seq_lens_cpu[:size],
            )  # fmt: skip
            return
        build_view = replay_view()
        view = harness._accepted(
            build_view, forward_batch=batch, buffers=static, bs=size, raw_bs=count, num_tokens=size,
            global_num_tokens_cpu=None, seq_len_fill_value=self.fill, capture_forward_mode=batch.forward_mode,
            is_encoder_decoder=False,
        )  # fmt: skip
        backend.init_forward_metadata_out_graph(build_view(**view))

    def step(self, requests):
        """A decode batch of `requests`, and the static tensors as a graph runner fills them."""
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        stack, static, count = self.stack, self.static, len(requests)
        batch = stack._forward_batch(requests, [1] * count, ForwardMode.DECODE)
        rest = {
            "req_pool_indices": 0,
            "seq_lens": self.fill,
            "seq_lens_cpu": self.fill,
            "out_cache_loc": 0,
            "positions": 0,
        }
        for name, value in rest.items():
            getattr(static, name)[:count].copy_(getattr(batch, name))
            getattr(static, name)[count:] = value
        self.graphed, self.eager = (harness.Result(stack, batch, requests, [1] * count) for _ in range(2))
        for layer_id, tensors in self.inputs.items():
            for tensor in tensors:
                tensor.copy_(stack._random(*tensor.shape))
            for result in (self.graphed, self.eager):
                given = result.queries, result.keys, result.values
                for kept, tensor in zip(given, tensors, strict=True):
                    kept[layer_id] = tensor[:count].clone()
        return batch

    def replay(self, size, requests, grow=None) -> dict:
        """One step of `requests` by the graph of `size`, and the same step again without it."""
        stack, count = self.stack, len(requests)
        stack.grow(grow or {})
        batch = self.step(requests)
        graphed, eager = self.graphed, self.eager
        calls = sum(aiter.CALLS.values())
        with torch.no_grad(), stack.backend_context():
            self.prepare(size, batch)
            self.graphs[size].replay()
        graphed.outputs = {layer_id: out[:count].clone() for layer_id, out in self.outputs[size].items()}
        python_calls, error = sum(aiter.CALLS.values()) - calls, graphed.error()
        with torch.no_grad(), stack.forward_context(batch):
            eager.outputs = {layer_id: out.clone() for layer_id, out in self.layers(batch, count).items()}
        apart = max(
            float((graphed.outputs[i].float() - eager.outputs[i].float()).abs().max() / eager.outputs[i].float().abs().max())
            for i in eager.outputs
        )  # fmt: skip
        return {"size": size, "lengths": batch.seq_lens.tolist(), "graph": error, "eager": eager.error(), "apart": apart,
                "aiter_calls_of_the_replay": python_calls, "calls": sum(aiter.CALLS.values()) - calls}  # fmt: skip


def replay_view():
    """The release's own view of a padded batch."""
    for name in ("runner.decode_cuda_graph_runner", "cuda_graph_runner"):
        try:
            return importlib.import_module(f"sglang.srt.model_executor.{name}").build_replay_fb_view
        except ImportError:
            continue
    raise LookupError("the release has no build_replay_fb_view")


def breakable() -> dict:
    """The step captured into the release's own breakable graph, and its hooks for breakable prefill graphs."""
    stack = harness.Stack(backend="triton", fp8=False, context_len=1024)
    stack.grow({1: 5, 2: 270, 3: 33})
    graphs = Graphs(stack, (4, 2), breakable=True)
    out = {"replays": [graphs.replay(4, [1, 2, 3]), graphs.replay(2, [3, 2], grow={3: 300})]}
    # A breakable prefill graph prepares metadata by these; the linear backend of this model leaves plain extends out.
    batch = graphs.step([1, 3])
    stack.backend.init_forward_metadata_for_breakable_cuda_graph_capture(batch)
    stack.backend.prepare_forward_metadata_for_breakable_cuda_graph_replay(None, batch)
    with torch.no_grad(), stack.backend_context():
        graphs.eager.outputs = graphs.layers(batch, 2)
    out["hooks"] = graphs.eager.error()
    return out


def memory() -> dict:
    """What building the backend and its graph buffers takes of the GPU, and what the check expects of the first."""
    from sglang_aiter_ext.capabilities.decode_pa import building

    stack = harness.Stack(backend="triton", page_size=16, fp8=False, build=False, context_len=262144, max_requests=32, layers=2, full_interval=2, kv_slots=4096, graphs=True)  # fmt: skip
    before = torch.cuda.memory_allocated()
    stack.backend = stack.build_backend()
    built = torch.cuda.memory_allocated() - before
    stack.backend.full_attn_backend.init_cuda_graph_state(32, 32)
    full = stack.backend.full_attn_backend
    return {
        "built": built, "graphs": torch.cuda.memory_allocated() - before - built,
        "expected": building.workspace_bytes(stack.runner),
        "entries": full.decode_backend.cuda_graph_kv_indices.numel(),
    }  # fmt: skip


def refused() -> dict:
    """A workspace larger than this GPU."""
    before = torch.cuda.memory_allocated()
    try:
        harness.Stack(backend="triton", fp8=False, context_len=262144, max_requests=4096, q_heads=64, kv_heads=8, layers=2, full_interval=2, kv_slots=4096, graphs=True)  # fmt: skip
    except Exception as error:
        taken = torch.cuda.max_memory_allocated() - before
        return {"error": f"{type(error).__name__}: {error}", "taken": taken}
    return {"error": None}
