"""In every process of a server under test, after the extension's own sitecustomize.

SERVER_ON_CPU=1 makes SGLang import where there is no GPU; SERVER_LAYERS gives the model's
full-attention layers what AITER's decode kernel lacks: `window` or `sinks`.
"""

import os
import pathlib
import sys
import types

if os.environ.get("SERVER_ON_CPU"):
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
    import stand_ins

    sys.path.pop(0)
    stand_ins.NAMES = (*stand_ins.NAMES, "soundfile")
    vllm = sys.modules["vllm"] = types.ModuleType("vllm")
    vllm.__path__ = []
    sys.modules["vllm._custom_ops"] = types.ModuleType("vllm._custom_ops")
    sys.modules["vllm._custom_ops"].rotary_embedding = None

if os.environ.get("SERVER_LAYERS"):
    import wrapt

    @wrapt.when_imported("sglang.srt.layers.radix_attention")
    def change_layers(module):
        original = module.RadixAttention.__init__

        def __init__(self, *args, **kwargs):
            original(self, *args, **kwargs)
            if os.environ["SERVER_LAYERS"] == "window":
                self.sliding_window_size = 64
            else:
                import torch

                self.register_parameter("sinks", torch.nn.Parameter(torch.zeros(1)))

        module.RadixAttention.__init__ = __init__
