"""What SGLang imports and its attention code never calls on a CPU: one place for all of it.

Importing this module makes `torchvision` (a build that matches the CPU torch is a large
download) and `sgl_kernel`, `cutlass` and `cuda` (GPU-only, imported by some releases)
importable where they are not installed. Calling anything in them raises.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types

import triton
import triton.language as tl

NAMES = ("torchvision", "sgl_kernel", "cutlass", "cuda")


class _Anything(type):
    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)

    def __call__(cls, *args, **kwargs):
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        raise RuntimeError(f"{cls.__name__} is a stand-in for a GPU-only function and was called")


def _anything(name: str) -> _Anything:
    return _Anything(name, (), {})


class _Module(types.ModuleType):
    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NAMES:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        module.__version__ = "0.0"


# Last on the list: an installed package always wins.
sys.meta_path.append(_Finder())


@triton.jit
def _exp(x):
    return tl.exp(x)


@triton.jit
def _log(x):
    return tl.log(x)


@triton.jit
def _log2(x):
    return tl.log2(x)


def mend_triton_interpreter() -> None:
    """What Triton's interpreter (3.8, 3.9) gets wrong or lacks, and SGLang's kernels need.

    Arithmetic and dots of bf16 work on the raw bits, casts to narrower floats lose a carry (1.96 becomes
    1.0 in e4m3), and autotuning wants a GPU to time on. PyTorch's casts replace its own.
    """
    import numpy as np
    import torch
    import triton.runtime.autotuner as autotuner
    import triton.runtime.interpreter as interpreter

    dtypes = {
        "fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
        "fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2, "fp8e4b8": torch.float8_e4m3fnuz,
    }  # fmt: skip
    original = interpreter._convert_float

    def convert(data, source, target, rounding_mode):
        if source.name not in dtypes or target.name not in dtypes:
            return original(data, source, target, rounding_mode)
        raw = torch.from_numpy(np.ascontiguousarray(data).view(f"int{source.primitive_bitwidth}").copy())
        bits = {8: torch.int8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[target.primitive_bitwidth]
        cast = raw.view(dtypes[source.name]).to(dtypes[target.name]).view(bits)
        return cast.numpy().view(f"uint{target.primitive_bitwidth}").reshape(data.shape)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        def wide(x):
            if x.dtype.name in ("fp32", "fp64", "fp16") or x.dtype.name not in dtypes:
                return x.data
            return convert(x.data, x.dtype, tl.float32, None).view(np.float32)

        return interpreter.TensorHandle(np.matmul(wide(a), wide(b), dtype=d.data.dtype) + d.data, d.dtype.scalar)

    builder = interpreter.InterpreterBuilder
    original_binary = builder.binary_op

    def binary_op(self, lhs, rhs, op):
        if lhs.dtype.scalar.name != "bf16":
            return original_binary(self, lhs, rhs, op)
        left, right = (convert(x.data, tl.bfloat16, tl.float32, None).view(np.float32) for x in (lhs, rhs))
        result = op(left, right)
        if result.dtype == np.float32:
            result = convert(result, tl.float32, tl.bfloat16, None)
        return interpreter.TensorHandle(result, lhs.dtype.scalar)

    builder.binary_op = binary_op
    interpreter._convert_float = convert
    builder.create_dot = create_dot
    autotuner.Autotuner._bench = lambda self, *args, **kwargs: [0.0, 0.0, 0.0]


def mend_linear_attention() -> None:
    """SGLang's linear-attention kernels enter their tensors' device, and bind `tl.exp` before it is patched."""
    import contextlib

    import torch

    torch.cpu.device = lambda index=None: contextlib.nullcontext()
    mended = {id(f): g for f, g in ((tl.exp, _exp), (tl.log, _log), (tl.log2, _log2))}
    for name in ("sglang.kernels.ops.attention.fla", "sglang.srt.layers.attention.fla"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name + ".op")
    for name, module in list(sys.modules.items()):
        if ".attention.fla." in name:
            for attribute, value in list(vars(module).items()):
                if id(value) in mended:
                    setattr(module, attribute, mended[id(value)])
