"""Names that start-up shares with everything else. It imports nothing, since each process with the extension on its path reads it."""

VERSION = "0.1.0"
SGLANG = "sglang.srt"
ATTENTION = f"{SGLANG}.layers.attention"
#: Builds the backend of a model.
REGISTRY = f"{ATTENTION}.attention_registry"
#: Holds the backend of a hybrid model, which sends each layer to its own kind of attention.
LINEAR = f"{ATTENTION}.hybrid_linear_attn_backend"
#: Holds SGLang's AITER backend.
BACKEND = f"{ATTENTION}.aiter_backend"
#: Holds SGLang's router for different prefill and decode backends. Nothing in it is wrapped.
ROUTER = f"{ATTENTION}.hybrid_attn_backend"
#: The modules in which capabilities wrap something.
TARGETS = (REGISTRY, LINEAR, BACKEND)
