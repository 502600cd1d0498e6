"""Names SGLang imports; the reference has no MLA kernel."""

from . import _no_mla

mla_decode_fwd = _no_mla("mla_decode_fwd")
mla_prefill_fwd = _no_mla("mla_prefill_fwd")
