"""The GPUs of this machine, as the Linux driver names them: without torch, ROCm or a GPU that is initialised."""

import os
import pathlib

#: One folder for each processor that the amdkfd driver knows; a CPU has version 0.
NODES = pathlib.Path("/sys/class/kfd/kfd/topology/nodes")


def architectures() -> tuple[str, ...]:
    """The architectures of this machine's AMD GPUs, such as ("gfx950",); empty where the driver names none.

    Empty too under HSA_OVERRIDE_GFX_VERSION, with which ROCm sees other architectures than the driver.
    """
    if os.environ.get("HSA_OVERRIDE_GFX_VERSION"):
        return ()
    found = set()
    for path in sorted(NODES.glob("*/properties")):
        try:
            values = dict(line.split() for line in path.read_text().splitlines())
            version = int(values.get("gfx_target_version", 0))
        except (OSError, ValueError):
            # A container may hide the properties of a GPU that is not its own.
            continue
        if version:
            found.add(f"gfx{version // 10000}{version // 100 % 100}{version % 100:x}")
    return tuple(sorted(found))
