"""The package's own Triton kernels: on a CPU in Triton's interpreter, and compiled for AMD GPUs without one."""

import re

import pytest
from child import launch

QUICK = "0.5.23"


def test_the_gather_moves_exactly_the_rows_asked_for():
    rows = launch(QUICK, "own_kernels:gather").result
    assert len(rows) == 5 * 5 * 4 * 2
    assert [row["case"] for row in rows if not row["same"]] == []


def test_the_cast_saturates_and_keeps_nan():
    for row in launch(QUICK, "own_kernels:cast").result:
        assert row["same"] and row["contiguous"], row["case"]
        assert (row["nans"], row["largest"]) == (1, 448.0), row["case"]


def test_rows_further_apart_than_31_bits_of_words_are_reached():
    """Without the kernels' casts to 64 bits the last rows are read from somewhere else, or the process crashes."""
    gathered = launch(QUICK, "own_kernels:far_apart").result
    cast = launch(QUICK, "own_kernels:cast_far_apart").result
    assert gathered["same"] and gathered["words"] > 2**31
    assert cast["same"] and cast["elements"] > 2**31


@pytest.mark.parametrize("arch", ["gfx950", "gfx942"])
@pytest.mark.parametrize("kernel", ["gather_rows", "cast_rows"])
def test_the_assembly_for_amd_has_wide_accesses_and_no_spills(arch, kernel):
    triton = pytest.importorskip("triton", reason="triton is not installed")
    compiler = pytest.importorskip("triton.backends.compiler")
    if "amd" not in triton.backends.backends:
        pytest.skip("this triton has no AMD backend")
    from triton.compiler import ASTSource

    from sglang_aiter_ext.kernels import gather_kv

    if kernel == "gather_rows":
        import triton.language as tl

        signature = dict.fromkeys(("k_cache", "v_cache", "k_out", "v_out"), "*fp8e4nv") | {"slots": "*i32"}
        signature |= dict.fromkeys(("rows", "k_stride", "v_stride"), "i32")
        constants = {"WORD": tl.int32, "K_WIDTH": 128, "V_WIDTH": 128, "BLOCK": 128, "ROWS": gather_kv.WORDS // 128}
    else:
        signature = {
            "x": "*bf16",
            "out": "*fp8e4nv" if arch == "gfx950" else "*fp8e4b8",
            "row_stride": "i32",
            "width": "i32",
        }
        constants = {"BLOCK": 4096}
    function = getattr(gather_kv, kernel)
    divisible = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(function.arg_names)
        if name in signature and name != "rows"
    }
    source = ASTSource(
        fn=function, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=constants, attrs=divisible
    )
    assembly = triton.compile(source, target=compiler.GPUTarget("hip", arch, 64)).asm["amdgcn"]
    loads = re.findall(r"^\s+(?:global|buffer)_load_(\w+)", assembly, re.M)
    stores = re.findall(r"^\s+(?:global|buffer)_store_(\w+)", assembly, re.M)
    assert "dwordx4" in loads and "dwordx4" in stores
    assert set(stores) == {"dwordx4"}
    for field in ("vgpr_spill_count", "sgpr_spill_count", "private_segment_fixed_size"):
        assert re.findall(rf"{field}:\s*(\d+)", assembly) == ["0"], field
