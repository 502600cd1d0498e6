"""SGLang's own hybrid attention stack on a CPU or a GPU, driven batch by batch.

Everything here is the installed release's: `ServerArgs`, `ModelConfig`, pools, `ForwardBatch`,
`RadixAttention`, and the backends as `ModelRunner` builds them. Only the model around the
attention layers is missing: queries, keys and values are random.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import logging
import os
import tempfile
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.simplefilter("ignore")
logging.getLogger("transformers").setLevel(logging.ERROR)

import stand_ins  # noqa: E402
import torch  # noqa: E402

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
#: Compiled kernels need a GPU, and interpreted ones a CPU.
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
if INTERPRETED:
    stand_ins.mend_triton_interpreter()
if DEVICE == "cuda":
    # FlashInfer looks for what is really there, and uses it.
    names, stand_ins.NAMES = stand_ins.NAMES, ()
    with contextlib.suppress(ImportError):
        import flashinfer  # noqa: F401
        import sgl_kernel  # noqa: F401
    stand_ins.NAMES = names
    _register_fake = torch.library.register_fake

    def _register_fake_of_what_is_there(op, func=None, /, **options):
        """Older releases describe operators to PyTorch that the kernels of this machine no longer have."""
        namespace, _, name = str(op).partition("::")
        if namespace == "sgl_kernel" and not hasattr(torch.ops.sgl_kernel, name):
            return func or (lambda function: function)
        return _register_fake(op, func, **options)

    torch.library.register_fake = _register_fake_of_what_is_there

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def pretend_gfx950() -> None:
    """Patch SGLang's own check, before the AITER backend is imported. No AMD GPU is near."""
    import sglang.srt.utils as utils

    # Once only: whoever imported it has this very function.
    if getattr(utils.is_gfx95_supported, "__name__", "") != "<lambda>":
        utils.is_gfx95_supported = utils.common.is_gfx95_supported = lambda: True


def _config(q_heads, kv_heads, head_dim, layers, full_interval, context_len) -> str:
    """A tiny Qwen3-Next `config.json` in a folder of its own."""
    config = {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "torch_dtype": "bfloat16",
        "bos_token_id": 0, "eos_token_id": 1, "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 256,
        "num_hidden_layers": layers, "full_attention_interval": full_interval, "hidden_act": "silu",
        "rms_norm_eps": 1e-6, "initializer_range": 0.02, "max_position_embeddings": max(context_len, 4096),
        "tie_word_embeddings": False, "use_cache": True, "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "attention_bias": False,
        "attention_dropout": 0.0, "partial_rotary_factor": 0.25, "rope_theta": 10000000,
        "rope_scaling": None, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "norm_topk_prob": True,
        "output_router_logits": False, "router_aux_loss_coef": 0.001,
    }  # fmt: skip
    folder = tempfile.mkdtemp(prefix="tiny-hybrid-")
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump(config, file)
    return folder


def _built(cls, **kwargs):
    """An object of this release's class, from those of `kwargs` that it takes."""
    return cls(**_accepted(cls.__init__, **kwargs))


def _accepted(function, **kwargs):
    """`kwargs` without what this release's `function` does not take."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in kwargs.items() if name in parameters}


_published: list = []


def _single_process() -> None:
    """SGLang's own process groups, for one process, so that it can ask how many ranks there are."""
    import sglang.srt.distributed.parallel_state as parallel_state

    if parallel_state.model_parallel_is_initialized():
        return
    rendezvous = tempfile.mktemp(prefix="rendezvous-")
    parallel_state.init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{rendezvous}", backend="gloo"
    )
    parallel_state.initialize_model_parallel(**_accepted(parallel_state.initialize_model_parallel, backend="gloo"))
    with contextlib.suppress(ImportError):
        from sglang.srt.runtime_context import get_parallel

        # A launcher publishes the ranks, and there is none. It lasts as long as it is held.
        _published.append(get_parallel().override(tp_rank=0, attn_tp_rank=0))
        _published[-1].__enter__()


class Stack:
    """One hybrid model's attention stack: pools, layers and backend, as the release builds them."""

    def __init__(
        self, *, backend="aiter", prefill_backend=None, decode_backend=None, page_size=16, fp8=True, q_heads=8,
        kv_heads=1, head_dim=256, layers=4, full_interval=4, k_scale=None, v_scale=None, scaling=None,
        max_requests=8, context_len=512, device=DEVICE, seed=0, build=True, dtype=torch.bfloat16,
        before_build=None, linear=False, kv_dtype=None, kv_slots=None, graphs=False, **server_args,
    ):  # fmt: skip
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
        from sglang.srt.model_executor.model_runner import ModelRunner
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self.generator = torch.Generator().manual_seed(seed)
        self.device, self.page_size, self.head_dim = device, page_size, head_dim
        self.q_heads, self.kv_heads, self.context_len = q_heads, kv_heads, context_len
        self.dtype, self.max_requests = dtype, max_requests
        folder = _config(q_heads, kv_heads, head_dim, layers, full_interval, context_len)
        names = inspect.signature(ServerArgs).parameters
        wanted = dict(
            model_path=folder, device=device, attention_backend=backend, prefill_attention_backend=prefill_backend,
            decode_attention_backend=decode_backend, page_size=page_size, skip_tokenizer_init=True,
            disable_radix_cache=True, max_running_requests=max_requests, disable_cuda_graph=not graphs,
            chunked_prefill_size=-1, context_length=context_len, mem_fraction_static=0.5,
            kv_cache_dtype="fp8_e4m3" if fp8 else "auto", **server_args,
        )  # fmt: skip
        args = ServerArgs(**{name: value for name, value in wanted.items() if name in names})
        if hasattr(args, "resolve_once"):
            args.resolve_once()
        set_global_server_args_for_scheduler(args)
        _single_process()
        self.server_args = args
        self.model_config = ModelConfig.from_server_args(args)
        self.model_config.dtype = dtype
        config = self.model_config.hf_config
        kv_dtype = kv_dtype or (FP8 if fp8 else dtype)
        self.kv_dtype = kv_dtype
        full_layers = list(config.full_attention_layer_ids)
        linear_layers = list(config.linear_layer_ids)
        self.full_layers, self.linear_layers = full_layers, linear_layers
        cache_params = config.mamba2_cache_params
        self.req_to_token_pool = _built(
            HybridReqToTokenPool,
            size=max_requests,
            mamba_size=max_requests + 1,
            mamba_spec_state_size=max_requests,
            max_context_len=context_len,
            device=device,
            enable_memory_saver=False,
            cache_params=cache_params,
            mamba_layer_ids=linear_layers,
            enable_mamba_extra_buffer=False,
            speculative_num_draft_tokens=None,
            enable_overlap_schedule=False,
        )
        slots = kv_slots or (max_requests * context_len // page_size + max_requests) * page_size
        self.token_to_kv_pool = _built(
            HybridLinearKVPool,
            size=slots,
            dtype=kv_dtype,
            page_size=page_size,
            head_num=kv_heads,
            head_dim=head_dim,
            full_attention_layer_ids=full_layers,
            enable_kvcache_transpose=False,
            device=device,
            mamba_pool=self.req_to_token_pool.mamba_pool,
            enable_memory_saver=False,
            use_mla=False,
        )
        self._poison()
        pages = torch.randperm(slots // page_size - 1, generator=self.generator) + 1
        self._free_pages = pages.tolist()
        self.seq_lens = [0] * (max_requests + 1)

        class Runner(ModelRunner):
            """`ModelRunner` without a model to load: it still builds the attention backend itself."""

            def __init__(self):
                pass

        runner = self.runner = Runner()
        runner.__dict__.update(
            device=device, dtype=dtype, kv_cache_dtype=kv_dtype, kv_cache_dtype_str=args.kv_cache_dtype, gpu_id=0,
            page_size=page_size, model_config=self.model_config, server_args=args, is_draft_worker=False,
            req_to_token_pool=self.req_to_token_pool, token_to_kv_pool=self.token_to_kv_pool,
            use_mla_backend=False, is_hybrid_swa=False, sliding_window_size=None, attention_chunk_size=None,
            init_new_workspace=False, canary_manager=None, hisparse_coordinator=None, attn_cp_size=1,
            draft_attention_backend=None, tp_size=1, is_multimodal=False, spec_algorithm=SpeculativeAlgorithm.from_string(None),
            kv_index_translator=None,
        )  # fmt: skip
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

        runner.token_to_kv_pool_allocator = _built(
            TokenToKVPoolAllocator,
            size=slots,
            dtype=kv_dtype,
            device=device,
            kvcache=self.token_to_kv_pool,
            need_sort=False,
        )
        getattr(runner, "init_kv_index_translator", lambda: None)()
        scaling = head_dim**-0.5 if scaling is None else scaling
        model = torch.nn.Module()
        model.layers = torch.nn.ModuleList()
        self.layers = {}
        for layer_id in full_layers:
            layer = RadixAttention(q_heads, head_dim, scaling, kv_heads, layer_id)
            for name, value in (("k_scale", k_scale), ("v_scale", v_scale)):
                if value is not None:
                    setattr(layer, name, torch.nn.Parameter(torch.tensor(value, device=device), requires_grad=False))
                    setattr(layer, name + "_float", value)
            self.layers[layer_id] = layer
            model.layers.append(layer)
        runner.model = model
        self.linear = {layer_id: self._linear_layer(layer_id, config) for layer_id in linear_layers} if linear else {}
        if before_build:
            before_build(self)
        self.backend = self.build_backend() if build else None

    def _linear_layer(self, layer_id, config):
        """A Gated DeltaNet layer with random weights, as Qwen3-Next calls it."""
        from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

        if self.device == "cpu":
            stand_ins.mend_linear_attention()
        rows = self.req_to_token_pool.req_index_to_mamba_index_mapping
        rows.copy_(torch.arange(len(rows)) % (self.max_requests + 1))
        key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
        key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        width = 2 * key_heads * key_dim + value_heads * value_dim
        return RadixLinearAttention(
            layer_id=layer_id, num_q_heads=key_heads, num_k_heads=key_heads, num_v_heads=value_heads,
            head_q_dim=key_dim, head_k_dim=key_dim, head_v_dim=value_dim, conv_weights=self._random(width, 4),
            bias=None, activation="silu", dt_bias=torch.ones(value_heads, dtype=self.dtype, device=self.device),
            A_log=torch.empty(value_heads).uniform_(1, 16, generator=self.generator).log().to(self.device),
        )  # fmt: skip

    def _poison(self) -> None:
        """NaN in every slot nobody wrote, so that reading one is seen."""
        pool = self.token_to_kv_pool.full_kv_pool
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            if buffer.element_size() == 1:
                buffer.view(torch.uint8).fill_(0x7F)
            else:
                buffer.fill_(float("nan"))

    def build_backend(self):
        """Through the function `ModelRunner` itself uses in this release."""
        try:
            from sglang.srt.model_executor.model_runner_components import attention_backend_setup as setup
        except ImportError:
            return self.runner._get_attention_backend()
        args = self.server_args
        chosen = (
            args.prefill_attention_backend or args.attention_backend,
            args.decode_attention_backend or args.attention_backend,
        )
        self.runner.prefill_attention_backend_str, self.runner.decode_attention_backend_str = chosen
        return setup.get_attention_backend(model_runner=self.runner)

    # ---- requests ----

    def _grow(self, request: int, tokens: int) -> torch.Tensor:
        """Slots for `tokens` more tokens of `request`, on pages in random order."""
        table, page = self.req_to_token_pool.req_to_token, self.page_size
        start, end = self.seq_lens[request], self.seq_lens[request] + tokens
        pages = [self._free_pages.pop() for _ in range(-(-start // page), -(-end // page))]
        if start % page:
            pages.insert(0, int(table[request, start - 1]) // page)
        position = torch.arange(start, end)
        slots = torch.tensor(pages, dtype=torch.int64)[position // page - start // page] * page + position % page
        table[request, start:end] = slots.to(table.device, table.dtype)
        self.seq_lens[request] = end
        return slots.to(self.device)

    def _random(self, *shape) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.device, self.dtype)

    def _forward_batch(self, requests, lengths, mode):
        before = [self.seq_lens[request] for request in requests]
        slots = [self._grow(request, tokens) for request, tokens in zip(requests, lengths)]
        after = [self.seq_lens[request] for request in requests]
        device, ints = self.device, dict(dtype=torch.int32, device=self.device)
        positions = torch.cat([torch.arange(a, b) for a, b in zip(before, after)])
        fields = dict(
            forward_mode=mode, batch_size=len(requests), input_ids=torch.zeros(len(positions), dtype=torch.int64, device=device),
            req_pool_indices=torch.tensor(requests, dtype=torch.int64, device=device),
            seq_lens=torch.tensor(after, dtype=torch.int64, device=device), seq_lens_sum=sum(after),
            seq_lens_cpu=torch.tensor(after, dtype=torch.int64), out_cache_loc=torch.cat(slots),
            positions=positions.to(device),
        )  # fmt: skip
        if not mode.is_decode():
            starts = [sum(lengths[:i]) for i in range(len(lengths))]
            fields.update(
                extend_num_tokens=sum(lengths), extend_seq_lens=torch.tensor(lengths, **ints),
                extend_prefix_lens=torch.tensor(before, **ints), extend_start_loc=torch.tensor(starts, **ints),
                extend_prefix_lens_cpu=list(before), extend_seq_lens_cpu=list(lengths),
            )  # fmt: skip
        return self.make_batch(**fields)

    def make_batch(self, **fields):
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch

        fields.update(
            req_to_token_pool=self.req_to_token_pool, token_to_kv_pool=self.token_to_kv_pool, attn_backend=self.backend
        )
        names = {field.name for field in dataclasses.fields(ForwardBatch)}
        return ForwardBatch(**{name: value for name, value in fields.items() if name in names})

    @contextlib.contextmanager
    def forward_context(self, batch):
        """What `ModelRunner.forward` does around a model's forward."""
        self.backend.init_forward_metadata(batch)
        with self.backend_context():
            yield

    def backend_context(self):
        try:
            from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
        except ImportError:
            return contextlib.nullcontext()
        return forward_context(ForwardContext(attn_backend=self.backend))

    def grow(self, lengths: dict[int, int]) -> None:
        """More tokens of each request straight into the pool, without attention."""
        for request, tokens in lengths.items():
            slots = self._grow(request, tokens)
            for layer_id, layer in self.layers.items():
                pool = self.token_to_kv_pool.get_kv_buffer(layer_id)
                for cache, scale in zip(pool, (layer.k_scale_float, layer.v_scale_float)):
                    rows = self._random(tokens, self.kv_heads, self.head_dim).float().div(scale or 1.0).to(cache.dtype)
                    raw, new = (x.view(torch.uint8) if x.element_size() == 1 else x for x in (cache, rows))
                    raw[slots] = new

    def run(self, lengths: dict[int, int], mode=None, *, q_gain=1.0, tamper=None, **kwargs):
        """One batch through every layer; returns a `Result`.

        `lengths` maps a request to its number of new tokens; `mode` defaults to EXTEND. With
        `DECODE` each has one. `kwargs` go to the attention call, as a model passes them.
        """
        from sglang.srt.model_executor.forward_batch_info import ForwardMode

        mode = ForwardMode.EXTEND if mode is None else getattr(ForwardMode, mode) if isinstance(mode, str) else mode
        requests = list(lengths)
        earlier = self._slots_in_use()
        rows = self._rows(earlier)
        batch = self._forward_batch(requests, list(lengths.values()), mode)
        tokens = int(batch.out_cache_loc.shape[0])
        result = Result(self, batch, requests, list(lengths.values()))
        with torch.no_grad(), self.forward_context(batch):
            if tamper is not None:
                tamper(self, batch)
            for layer_id, layer in self.linear.items():
                width = layer.q_dim + layer.k_dim + layer.v_dim
                mixed, a, b = (self._random(tokens, n) for n in (width, layer.num_v_heads, layer.num_v_heads))
                result.linear[layer_id] = layer(batch, mixed, a, b).clone()
            for layer_id, layer in self.layers.items():
                q = self._random(tokens, self.q_heads * self.head_dim) * q_gain
                k = self._random(tokens, self.kv_heads * self.head_dim)
                v = self._random(tokens, self.kv_heads * self.head_dim)
                result.queries[layer_id] = q.clone()
                result.keys[layer_id], result.values[layer_id] = k.clone(), v.clone()
                k, v = (x.view(tokens, self.kv_heads, self.head_dim) for x in (k, v))
                result.outputs[layer_id] = layer(q, k, v, batch, **kwargs)
        damaged = sum(not torch.equal(before, now) for before, now in zip(rows, self._rows(earlier)))
        assert not damaged, (
            f"the batch changed rows of earlier batches in {damaged} of {len(rows)} buffers of the KV pool"
        )
        return result

    def _slots_in_use(self) -> torch.Tensor:
        """Where the K and V of all tokens so far lie."""
        table = self.req_to_token_pool.req_to_token
        used = [table[request, :tokens].long() for request, tokens in enumerate(self.seq_lens) if tokens]
        return torch.cat([table[0, :0].long(), *used])

    def _rows(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """A copy of these rows of every K and V buffer, as bytes."""
        pool = self.token_to_kv_pool.full_kv_pool
        return [buffer[slots].view(torch.uint8) if buffer.element_size() > 1 else buffer.view(torch.uint8)[slots]
                for buffer in (*pool.k_buffer, *pool.v_buffer)]  # fmt: skip

    def extend(self, lengths, **kwargs):
        return self.run(lengths, **kwargs)

    def decode(self, requests, **kwargs):
        return self.run(dict.fromkeys(requests, 1), "DECODE", **kwargs)

    def pool_bytes(self) -> bytes:
        pool = self.token_to_kv_pool.full_kv_pool
        return b"".join(
            buffer.contiguous().view(torch.uint8).cpu().numpy().tobytes() for buffer in (*pool.k_buffer, *pool.v_buffer)
        )

    def stored(self, layer_id: int, request: int, length: int):
        """Keys and values of `request` in float32, as the pool holds them, by `req_to_token`."""
        slots = self.req_to_token_pool.req_to_token[request, :length].long()
        k, v = self.token_to_kv_pool.get_kv_buffer(layer_id)
        layer = self.layers[layer_id]

        def rows(buffer, scale):
            raw = buffer.view(torch.uint8)[slots].view(buffer.dtype) if buffer.element_size() == 1 else buffer[slots]
            raw = raw.float()
            return raw * float(scale) if scale is not None and self.kv_dtype == FP8 else raw

        return rows(k, layer.k_scale), rows(v, layer.v_scale)


@dataclasses.dataclass
class Result:
    """One batch: what went in, what came out, and how far that is from exact attention."""

    stack: Stack
    batch: object
    requests: list[int]
    lengths: list[int]
    queries: dict = dataclasses.field(default_factory=dict)
    keys: dict = dataclasses.field(default_factory=dict)
    values: dict = dataclasses.field(default_factory=dict)
    outputs: dict = dataclasses.field(default_factory=dict)
    linear: dict = dataclasses.field(default_factory=dict)

    def exact(self, layer_id: int, q: torch.Tensor) -> torch.Tensor:
        """float32 causal attention of `q` over `req_to_token[request, :seq_len]`."""
        stack, layer = self.stack, self.stack.layers[layer_id]
        q = q.float().view(-1, stack.q_heads, stack.head_dim)
        group = stack.q_heads // stack.kv_heads
        rows, start = [], 0
        for request, tokens, end in zip(self.requests, self.lengths, self.batch.seq_lens.tolist()):
            k, v = (x.permute(1, 0, 2) for x in stack.stored(layer_id, request, end))
            for head in range(stack.q_heads):
                scores = q[start : start + tokens, head] @ k[head // group].T * layer.scaling
                seen = (
                    torch.arange(end, device=q.device)[None]
                    <= torch.arange(end - tokens, end, device=q.device)[:, None]
                )
                weights = scores.where(seen, float("-inf")).softmax(-1)
                rows.append((start, head, weights @ v[head // group]))
            start += tokens
        out = torch.zeros(start, stack.q_heads, stack.head_dim, device=q.device)
        for first, head, values in rows:
            out[first : first + len(values), head] = values
        return out.flatten(1)

    def holds_what_was_given(self, layer_id: int) -> bool:
        """Whether the pool has this batch's K and V, to half a step of its dtype."""
        stack, start = self.stack, 0
        info = torch.finfo(stack.kv_dtype)
        # K and V may be divided by a scale in bf16 before they are cast to fp8.
        relative = info.eps / 2 + (2**-8 if info.bits == 8 else 0)
        for request, tokens, end in zip(self.requests, self.lengths, self.batch.seq_lens.tolist()):
            stored = stack.stored(layer_id, request, end)
            for given, rows in zip((self.keys[layer_id], self.values[layer_id]), stored):
                new = given[start : start + tokens].float().view(tokens, stack.kv_heads, stack.head_dim)
                off = (rows[end - tokens :] - new).abs() - relative * new.abs()
                # A subnormal's step does not shrink with it; scales are at most 2.
                if not bool((off <= 2 * info.smallest_normal * info.eps).all()):
                    return False
            start += tokens
        return True

    def error(self, *, fp8_queries: bool = False) -> float:
        """Largest |output - exact| over all layers, relative to the largest |exact|; inf where K or V were not kept.

        With `fp8_queries` the exact result uses the queries as a saturating cast to
        e4m3 leaves them; the only rounding left is then that of the bf16 output.
        """
        worst = 0.0
        for layer_id, output in self.outputs.items():
            if not self.holds_what_was_given(layer_id):
                return float("inf")
            q = self.queries[layer_id].float()
            if fp8_queries:
                q = q.clamp(-FP8_MAX, FP8_MAX).to(FP8).float()
            exact = self.exact(layer_id, q)
            got = output.float().view(exact.shape)
            if not bool(torch.isfinite(got).all()):
                return float("inf")
            worst = max(worst, float((got - exact).abs().max() / exact.abs().max()))
        return worst
