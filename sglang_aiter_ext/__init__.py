"""AITER's fast paths for hybrid linear-attention models, on the SGLang that is installed.

    PYTHONPATH=/opt/sglang-aiter-ext SGLANG_USE_AITER_PA=1 python -m sglang.launch_server ...

From Python, `activate()` does the same for SGLang modules that are imported before or after it,
`status()` says what is active and why something is not, and `counters()` counts what ran.
"""

from .names import VERSION as __version__

__all__ = ["__version__", "activate", "counters", "status"]


def activate() -> None:
    """Wrap SGLang's functions in this process, now or when SGLang imports them.

    A second call changes nothing, nor does a call after another activation route. Under
    SGLANG_AITER_EXT_STRICT=1 it raises `errors.CouldNotApply` where a capability could not be applied,
    `errors.SettingError` for a variable that cannot be read, and ImportError where this package is broken. A call
    in a second thread does not wait for one that is still at work.
    """
    import os

    if os.environ.get("SGLANG_AITER_EXT", "").strip().lower() in ("0", "false", "no", "off"):
        return
    from . import bootstrap

    bootstrap.install()


def _activate_at_start() -> None:
    """`activate()` for a host program whose own start would end with an error of ours."""
    import contextlib

    with contextlib.suppress(Exception):
        activate()


def status() -> list[dict[str, object]]:
    """One dict for each capability: name, verdict, reason, enabled, switch, state, error and wraps.

    `state` is `pending`, `active`, `failed` or `off`. Neither SGLang nor torch is imported.
    """
    from . import activation

    return activation.status()


def counters() -> dict[str, dict[str, int]]:
    """What ran in this process: capability -> outcome -> number of calls.

    An outcome that has a reason is written `outcome/reason`, for example `paged/soft_cap`.
    """
    from . import counting

    return counting.snapshot()
