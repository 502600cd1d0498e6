"""A name SGLang 0.5.20 and later import for Triton kernels of their own."""

import torch

e4m3_dtype = torch.float8_e4m3fn
