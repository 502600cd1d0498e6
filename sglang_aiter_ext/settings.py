"""Every environment variable that this package reads, its default, and what it accepts."""

import os
from typing import NamedTuple

from .errors import SettingError

TRUE = ("1", "true", "yes", "on")
FALSE = ("0", "false", "no", "off")
ACCEPTED = f"{'/'.join(TRUE)} or {'/'.join(FALSE)}, in any case"


class Setting(NamedTuple):
    name: str
    default: bool | None
    meaning: str


MASTER = Setting("SGLANG_AITER_EXT", True, "the whole extension; off wraps nothing and imports nothing")
PA = Setting("SGLANG_USE_AITER_PA", False, "`decode_pa`: full-attention layers of hybrid models decode through AITER paged attention")  # fmt: skip
ASM = Setting("SGLANG_AITER_ASM_CONTEXT_PREFILL", True, "`asm_context_prefill`: chunked prefill gathers the paged fp8 K/V and calls the gfx950 ASM kernel")  # fmt: skip
STRICT = Setting("SGLANG_AITER_EXT_STRICT", False, 'every "could not apply", and what goes wrong in a call, becomes an error instead of a log line')  # fmt: skip
DISABLE = Setting("SGLANG_AITER_EXT_DISABLE", None, "comma-separated names of capabilities to leave off")
STATE = Setting("SGLANG_AITER_EXT_STATE_DIR", None, "a folder where each process keeps a file for `doctor --running`; absolute path")  # fmt: skip
SETTINGS = (MASTER, PA, ASM, STRICT, DISABLE, STATE)


def boolean(setting: Setting) -> bool:
    """The value of a boolean variable; unset and empty mean its default.

    Raises SettingError, naming the variable, the value and what is accepted.
    """
    raw = os.environ.get(setting.name, "")
    value = raw.strip().lower()
    if value in TRUE + FALSE:
        return value in TRUE
    if value:
        raise SettingError(f"{setting.name}={raw!r} is not accepted: use {ACCEPTED}")
    return bool(setting.default)


def is_on(setting: Setting) -> bool:
    """The value of a boolean variable; one that cannot be read counts as off."""
    try:
        return boolean(setting)
    except SettingError:
        return False


def asked_for(setting: Setting | None) -> bool:
    """Whether the user turned it on himself: the variable is there and is not empty, and reads as on."""
    return setting is not None and bool(os.environ.get(setting.name, "").strip()) and is_on(setting)


def strict() -> bool:
    """Whether what would be a log line is to be an error."""
    return is_on(STRICT)


def disabled(known: tuple[str, ...]) -> frozenset[str]:
    """The capabilities named in SGLANG_AITER_EXT_DISABLE that are known."""
    return frozenset(_named()) & frozenset(known)


def errors(known: tuple[str, ...]) -> dict[str, SettingError]:
    """The error of each variable whose value is not accepted; `known` are the names of the capabilities."""
    found = {}
    for setting in SETTINGS:
        try:
            if setting is DISABLE:
                check_disabled(known)
            elif setting is STATE:
                state_folder()
            else:
                boolean(setting)
        except SettingError as error:
            found[setting.name] = error
    return found


def check_disabled(known: tuple[str, ...]) -> None:
    """Raises SettingError where SGLANG_AITER_EXT_DISABLE names something that is no capability."""
    unknown = [name for name in _named() if name not in known]
    if unknown:
        what = f"{', '.join(unknown)} is not a capability; use any of {', '.join(known)}, separated by commas"
        raise SettingError(f"{DISABLE.name}={os.environ[DISABLE.name]!r} is not accepted: {what}")


def state_folder() -> str | None:
    """The folder for state files, or None. Raises SettingError for a path that is not absolute."""
    folder = os.environ.get(STATE.name, "").strip()
    if folder and not os.path.isabs(folder):
        raise SettingError(f"{STATE.name}={folder!r} is not accepted: use an absolute path")
    return folder or None


def _named() -> list[str]:
    return [name for part in os.environ.get(DISABLE.name, "").split(",") if (name := part.strip().lower())]
