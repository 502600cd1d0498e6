"""AITER's fast paths for hybrid linear-attention models, on the SGLang that is installed.

    PYTHONPATH=/opt/sglang-aiter-ext SGLANG_USE_AITER_PA=1 python -m sglang.launch_server ...

From Python, `activate()` does the same for SGLang modules imported before or after it;
`status()` says what is active and why not; `counters()` counts what ran.
"""

__version__ = "0.1.0"
__all__ = ["activate", "counters", "status"]


def activate() -> None:
    """Wrap SGLang's functions in this process, now or when SGLang imports them.

    Calling it again, or after another activation route, changes nothing. Under
    SGLANG_AITER_EXT_STRICT=1 raises where a capability could not be applied.
    """
    import os

    if os.environ.get("SGLANG_AITER_EXT", "").strip().lower() in ("0", "false", "no", "off"):
        return
    from . import bootstrap

    bootstrap.install()


def _activate_at_start() -> None:
    """`activate()` for a host whose own start an error of ours would end."""
    import contextlib

    with contextlib.suppress(Exception):
        activate()


def status() -> list[dict[str, object]]:
    """One dict a capability: name, verdict, reason, enabled, switch, state and error.

    `state` is `pending`, `active`, `failed` or `off`. Imports neither SGLang nor torch.
    """
    from . import activation

    return activation.status()


def counters() -> dict[str, dict[str, int]]:
    """What ran in this process: capability -> outcome -> number of calls.

    An outcome with a reason is written `outcome/reason`, for example `paged/soft_cap`.
    """
    from . import counting

    return counting.snapshot()
