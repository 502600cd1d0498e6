"""What this package reads of AITER's `ops/mha.py`: the condition under which a varlen call takes the ASM kernel."""


def _flash_attn_varlen_forward(q, head_dim_v, gfx):
    hdim_q = q.shape[-1]

    def is_fmha_v3_fp8():
        return hdim_q == 128 or (hdim_q == 256 and head_dim_v == 256 and gfx == "gfx950")

    return is_fmha_v3_fp8()
