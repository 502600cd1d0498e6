"""The capabilities, in the order in which they are applied and shown."""

from .asm_context_prefill import CAPABILITY as ASM_CONTEXT_PREFILL
from .decode_pa import CAPABILITY as DECODE_PA
from .gather_reuse import CAPABILITY as GATHER_REUSE
from .head_ratio import CAPABILITY as HEAD_RATIO
from .v_head_dim import CAPABILITY as V_HEAD_DIM

CAPABILITIES = (DECODE_PA, V_HEAD_DIM, ASM_CONTEXT_PREFILL, HEAD_RATIO, GATHER_REUSE)
