"""The GPUs that the Linux driver names, read from files as the driver writes them."""

import pytest
from conftest import written

from sglang_aiter_ext import gpu

CPU = "cpu_cores_count 64\nsimd_count 0\ngfx_target_version 0\n"


def node(version):
    """The properties of a GPU, shortened."""
    return f"cpu_cores_count 0\nsimd_count 1024\ngfx_target_version {version}\nlocal_mem_size 0\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """What is said of a machine whose driver has nodes with these properties."""
    monkeypatch.delenv("HSA_OVERRIDE_GFX_VERSION", raising=False)
    monkeypatch.setattr(gpu, "NODES", tmp_path)

    def said(*nodes):
        written(tmp_path, {f"{number}/properties": text for number, text in enumerate(nodes)})
        return gpu.architectures()

    return said


@pytest.mark.parametrize(
    "version, name",
    [
        (90402, "gfx942"),
        (90500, "gfx950"),
        (90010, "gfx90a"),
        (90400, "gfx940"),
        (110000, "gfx1100"),
        (120001, "gfx1201"),
    ],
)
def test_a_version_of_the_driver_is_the_name_of_an_architecture(machine, version, name):
    assert machine(CPU, node(version)) == (name,)


def test_each_architecture_is_named_once(machine):
    assert machine(CPU, CPU, *[node(90500)] * 8, node(90402)) == ("gfx942", "gfx950")


def test_a_machine_without_a_gpu_or_without_the_driver_has_none(machine, monkeypatch, tmp_path):
    assert machine(CPU) == ()
    monkeypatch.setattr(gpu, "NODES", tmp_path / "missing")
    assert gpu.architectures() == ()


@pytest.mark.parametrize("text", ["", "simd_count 5\n", "gfx_target_version x\n", "three words here\n"])
def test_a_node_that_cannot_be_read_takes_nothing_from_the_others(machine, text):
    assert machine(CPU, text, node(90500)) == ("gfx950",)


def test_a_node_that_may_not_be_opened_takes_nothing_from_the_others(machine, tmp_path):
    (tmp_path / "7" / "properties").mkdir(parents=True)
    assert machine(node(90402)) == ("gfx942",)


def test_an_override_of_rocms_hides_what_the_driver_says(machine, monkeypatch):
    monkeypatch.setenv("HSA_OVERRIDE_GFX_VERSION", "9.4.2")
    assert machine(node(110000)) == ()
