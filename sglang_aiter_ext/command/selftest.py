"""`selftest`: AITER's kernels on the user's own GPU, at the user's shapes, against float32 attention."""

import argparse
import dataclasses
import importlib
import math
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from .. import aiter_kernels
from ..aiter_kernels import HEAD_DIM, HEAD_RATIOS, PARTITION
from ..capabilities.asm_context_prefill.decision import TABLE_PADDING
from ..errors import NotRun, UnusableAiter

try:
    from ..kernels import gather_kv
except ImportError:
    # A PyTorch for CPUs may come without Triton, and the reference serves as well there.
    from ..kernels import gather_kv_reference as gather_kv  # type: ignore[no-redef]

DEFAULT_SHAPE = {"heads": 16, "kv_heads": 2, "head_dim": 256}
#: name -> (query heads, KV heads, head_dim) of a model's full-attention layers
PRESETS = {"Qwen3.5-397B-A17B": (32, 2, 256)}
#: Limits of the error's root mean square over the result's. An fp8 kernel rounds each probability to e4m3, by up to 2**-4
#: of itself unless it falls below e4m3's normal range; a bf16 one rounds probabilities and output by up to 2**-9.
FP8, BF16, SAME = 2.0**-4, 2.0**-7, 0.0
#: Queries of a chunk that are compared; requests of a decode step; least tokens of near-uniform attention.
ROWS, REQUESTS, UNIFORM_TOKENS = 32, 4, 4096
UNIFORM = "PA decode, fp8 KV, near-uniform attention"
SINK = "ASM prefill, half of the weight on one key"
LOW_RANGE = "https://github.com/ROCm/aiter/issues/5642; use --kv-cache-dtype auto"


@dataclasses.dataclass(frozen=True)
class Shapes:
    """One full-attention layer on one GPU. The last `chunk` of the request's `tokens` are the queries of a prefill."""

    heads: int
    kv_heads: int
    head_dim: int
    tokens: int
    page_size: int
    chunk: int

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                raise ValueError(f"--{name.replace('_', '-')} {value}: use 1 or more")
        if self.heads % self.kv_heads:
            raise ValueError(f"--heads {self.heads}: use a multiple of --kv-heads {self.kv_heads}")
        if self.chunk > self.tokens:
            raise ValueError(f"--chunk {self.chunk}: use at most --tokens {self.tokens}")


def shapes(options: argparse.Namespace) -> Shapes:
    """The shapes that the options of the command ask for. Raises ValueError, which names an option, where they do not fit."""
    given = {name: value for name in DEFAULT_SHAPE if (value := getattr(options, name)) is not None}
    name, tp = options.preset, options.tp
    if name is None and tp is not None:
        raise ValueError(f"--tp {tp}: goes with --preset; else give --heads and --kv-heads of one GPU")
    if name is not None:
        tp = 1 if tp is None else tp
        if given:
            raise ValueError(f"--{next(iter(given)).replace('_', '-')}: --preset {name} says that already")
        if name not in PRESETS:
            raise ValueError(f"--preset {name}: use {', '.join(PRESETS)}")
        if tp not in (1, 2, 4, 8):
            raise ValueError(f"--tp {tp}: use 1, 2, 4 or 8")
        heads, kv_heads, head_dim = PRESETS[name]
        # With more GPUs than KV heads each has a copy of one.
        given = {"heads": heads // tp, "kv_heads": max(1, kv_heads // tp), "head_dim": head_dim}
    # A stand-in of plain PyTorch writes out all scores of a chunk.
    tokens = options.tokens if options.tokens is not None else 5_000 if options.reference else 70_000
    chunk = options.chunk if options.chunk is not None else min(tokens, 256 if options.reference else 16_384)
    return Shapes(**{**DEFAULT_SHAPE, **given}, tokens=tokens, page_size=options.page_size, chunk=chunk)


def use_reference() -> None:
    """Have `import aiter` give the PyTorch stand-in, of an installed package or of a checkout."""
    package = pathlib.Path(__file__).resolve().parents[1]
    places = (package / "reference", package.parent / "tests" / "reference")
    sys.path.insert(0, str(next(place for place in places if (place / "aiter").is_dir())))


class Bench:
    """One request whose pages lie in the pool in random order, and each kernel on it: (error, seconds)."""

    def __init__(self, shapes: Shapes, stand_in: bool):
        self.shapes, self.stand_in = shapes, stand_in
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        gpu: Any = torch.cuda.get_device_properties(0) if self.device.type == "cuda" else None
        self.arch = gpu.gcnArchName.partition(":")[0] if gpu and torch.version.hip else ""
        self.name = f"{gpu.name} {self.arch}".strip() if gpu else "CPU"
        self.fp8 = torch.float8_e4m3fnuz if self.arch == "gfx942" else torch.float8_e4m3fn
        self.generator = torch.Generator(self.device).manual_seed(1)
        pages, size = -(-shapes.tokens // shapes.page_size), shapes.page_size
        order = torch.randperm(pages, device=self.device, generator=self.generator)
        #: Pool slots [tokens].
        self.slots = (order[:, None] * size + torch.arange(size, device=self.device)).flatten()[: shapes.tokens].int()
        k, v = (self.normal(pages * size, shapes.kv_heads, shapes.head_dim) for _ in "kv")
        self.bf16, self.quantised = (k, v), (k.to(self.fp8), v.to(self.fp8))
        self.one = torch.ones(1, dtype=torch.float32, device=self.device)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, generator=self.generator).to(torch.bfloat16)

    def measure(self, call: Callable[[], Any]) -> tuple[Any, float]:
        """What `call` gives, and the seconds it takes once it is warm."""
        result = call()
        if self.device.type == "cpu":
            began = time.perf_counter()
            call()
            return result, time.perf_counter() - began
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(20):
            call()
        end.record()
        end.synchronize()
        return result, start.elapsed_time(end) / 20e3

    def error(
        self, got: torch.Tensor, q: torch.Tensor, caches: tuple[torch.Tensor, ...], slots: torch.Tensor, last: Any
    ) -> float:
        """Of `got` [rows, heads, head_dim] against float32 attention of q over the slots up to position `last` [rows]."""
        k, v = (cache.float()[slots.long()] for cache in caches)
        grouped = q.float().unflatten(1, (k.shape[1], -1))
        scores = torch.einsum("rhgd,thd->rhgt", grouped, k) * q.shape[2] ** -0.5
        hidden = torch.arange(k.shape[0], device=self.device) > last[:, None]
        weights = scores.masked_fill(hidden[:, None, None], float("-inf")).softmax(-1)
        truth = torch.einsum("rhgt,thd->rhgd", weights, v).flatten(1, 2)
        error = (got.float() - truth).square().mean().sqrt() / truth.square().mean().sqrt()
        return float(error.nan_to_num(float("inf")))

    def gather(self) -> tuple[float, float]:
        """The gather alone; its result is compared byte for byte."""
        got, seconds = self.measure(lambda: gather_kv.gather_kv(*self.quantised, self.slots))
        expected = [cache.view(torch.uint8)[self.slots.long()] for cache in self.quantised]
        return float(any(not torch.equal(a.view(torch.uint8), b) for a, b in zip(got, expected))), seconds

    def prefill(self, asm: bool, sink: bool = False) -> tuple[float, float]:
        """The last chunk of the request: cast, gather and ASM kernel, or the paged kernel.

        With `sink`, the first key holds half of the weight of every query, and its value is zero.
        """
        import aiter

        s, one = self.shapes, self.one
        if asm and not self.stand_in and not self.arch.startswith("gfx95"):
            raise NotRun(f"this is {self.name}, and the kernel is for gfx950")
        if asm and (s.head_dim != HEAD_DIM or s.heads // s.kv_heads not in HEAD_RATIOS):
            raise NotRun(f"the kernel takes head_dim {HEAD_DIM} and {HEAD_RATIOS} query heads a KV head")
        q, caches = self.normal(s.chunk, s.heads, s.head_dim), self.quantised
        if sink:
            k, v = (cache.clone() for cache in self.bf16)
            q[..., 0], k[..., 0], k[self.slots[0]], v[self.slots[0]] = 8.0, 0.0, 0.0, 0.0
            # The other scores have a standard deviation of 1.
            k[self.slots[0], :, 0] = (math.log(s.tokens) + 0.5) * s.head_dim**0.5 / 8
            caches = k.to(self.fp8), v.to(self.fp8)
        fp8_q = q.to(self.fp8)
        cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=self.device) for n in (s.chunk, s.tokens))
        table = torch.cat([self.slots, self.slots[:1].expand(TABLE_PADDING)])

        def paged_kernel() -> Any:
            return aiter.mha_batch_prefill_func(
                fp8_q, *caches, cu_q, cu_k, table, s.chunk, s.tokens, causal=True, q_descale=one,
                k_descale=one, v_descale=one,
            )  # fmt: skip

        def asm_kernel() -> Any:
            queries = gather_kv.saturating_fp8(q).view(q.shape)
            keys, values = gather_kv.gather_kv(*caches, self.slots)
            return aiter.flash_attn_varlen_fp8_pertensor_func(
                queries, keys, values, one, one, one, cu_q, cu_k, s.chunk, s.tokens, softmax_scale=s.head_dim**-0.5,
                causal=True,
            )  # fmt: skip

        out, seconds = self.measure(asm_kernel if asm else paged_kernel)
        rows = torch.linspace(0, s.chunk - 1, min(ROWS, s.chunk), device=self.device).long()
        return self.error(out[rows], fp8_q[rows], caches, self.slots, s.tokens - s.chunk + rows), seconds

    def decode(self, fp8: bool, uniform: bool = False) -> tuple[float, float]:
        """A step of four requests that share the tokens; `uniform` spreads attention over at least 4,096 of them."""
        import aiter

        s = self.shapes
        if not self.stand_in and not self.arch.startswith("gfx9"):
            raise NotRun(f"this is {self.name}, and the kernel is for CDNA (gfx9)")
        tokens = max(s.tokens, UNIFORM_TOKENS) if uniform else s.tokens
        # A shorter request's slots are read again.
        slots = self.slots.repeat(-(-tokens // s.tokens))[:tokens]
        # Scores of standard deviation a half: probabilities of about 1/tokens that still differ by some tens of per cent.
        q = self.normal(REQUESTS, s.heads, s.head_dim) * (0.5 if uniform else 1.0)
        caches = self.quantised if fp8 else self.bf16
        out, table, partitions = torch.empty_like(q), slots.repeat(REQUESTS), -(-tokens // PARTITION)
        indptr = torch.arange(REQUESTS + 1, dtype=torch.int32, device=self.device) * tokens
        last_page = torch.ones(REQUESTS, dtype=torch.int32, device=self.device)
        size = REQUESTS * s.heads * partitions * (s.head_dim * 4 + 8)
        workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
        _, seconds = self.measure(
            lambda: aiter.paged_attention_ragged(
                out, workspace, q, *(cache[:, None] for cache in caches), s.head_dim**-0.5, indptr, table, last_page, 1,
                partitions, None, "fp8_e4m3" if fp8 else "auto", "NHD", 0.0, self.one, self.one, None, PARTITION,
            )
        )  # fmt: skip
        return self.error(out, q, caches, slots, torch.full((REQUESTS,), tokens - 1, device=self.device)), seconds


def prepare(shapes: Shapes, reference: bool) -> Bench:
    """The data of a self-test. Raises UnusableAiter without a usable AITER."""
    if reference:
        use_reference()
    problem = aiter_kernels.import_problem(*aiter_kernels.PARAMETERS)
    if problem is not None:
        raise UnusableAiter(f"selftest needs AITER's kernels: {problem}; --reference runs it on a PyTorch stand-in")
    return Bench(shapes, getattr(importlib.import_module("aiter"), "REFERENCE", False))


def run_all(bench: Bench) -> int:
    """Print a line a kernel as it is done, then the answers. Returns 0, or 1 where one is no."""
    s, stand_in, aiter = bench.shapes, bench.stand_in, importlib.import_module("aiter")
    print(f"{bench.name}, torch {torch.__version__}, AITER at {aiter.__file__}")
    print(
        f"{s.heads} query heads, {s.kv_heads} KV heads, head_dim {s.head_dim}, a request of {s.tokens:,} tokens on pages"
        f" of {s.page_size}, a chunk of {s.chunk:,} at its end"
    )
    if stand_in:
        print("On the PyTorch stand-in: its times say nothing about AITER.")
    print(f"\n{'kernel':43} {'error':>8} {'limit':>8} {'time':>14}")
    why: dict[str, str | None] = {}
    times: dict[str, float] = {}
    for name, limit, step in (
        ("gather", SAME, bench.gather),
        ("ASM prefill, with its cast and gather", FP8, lambda: bench.prefill(asm=True)),
        (SINK, FP8, lambda: bench.prefill(asm=True, sink=True)),
        ("paged prefill", FP8, lambda: bench.prefill(asm=False)),
        ("PA decode, bf16 KV", BF16, lambda: bench.decode(fp8=False)),
        ("PA decode, fp8 KV", FP8, lambda: bench.decode(fp8=True)),
        (UNIFORM, FP8, lambda: bench.decode(fp8=True, uniform=True)),
    ):
        print(f"{name:43} ", end="", flush=True)
        try:
            error, times[name] = step()
        except NotRun as reason:
            why[name] = f"{name}: {reason}"
            print("not run")
        except Exception as failure:
            why[name] = f"{name}: {type(failure).__name__}: {failure}"
            print("failed")
        else:
            why[name] = None if error <= limit else f"{name}: error {error:.2g} is over {limit:.2g}"
            print(f"{error:8.2g} {limit:8.2g} {times[name] * 1e6:11,.1f} µs")
    gather, asm, sink, paged, bf16, fp8, uniform = why
    if not stand_in and asm in times and paged in times:
        print(f"\nSuch a chunk's attention is {times[paged] / times[asm]:.2f} times as fast with ASM as paged.")
    if why[uniform] and uniform in times:
        why[uniform] = f"{why[uniform]}, see {LOW_RANGE}"
    if why[sink] and sink in times:
        print(f"\n{why[sink]}: the kernel has no head-room for the keys behind it.")
        print("Texts whose first token holds much of the weight lose accuracy: compare with the paged kernel on yours.")
    print()
    good = True
    for capability, needs in (
        ("asm_context_prefill", (gather, asm)),
        ("decode_pa with a bf16 KV cache", (bf16,)),
        ("decode_pa with an fp8 KV cache", (fp8, uniform)),
        ("head_ratio", (paged,)),
    ):
        problems = [why[name] for name in needs if why[name]]
        good = good and not problems
        print(f"{capability:31} {'no: ' + '; '.join(map(str, problems)) if problems else 'yes'}")
    print(f"{'v_head_dim, gather_reuse':31} yes: they call no kernel")
    return 0 if good else 1
