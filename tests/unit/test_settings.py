"""Every variable in every accepted spelling, and in one that is not."""

import environment
import pytest

from sglang_aiter_ext import settings
from sglang_aiter_ext.errors import SettingError

BOOLEANS = [s for s in settings.SETTINGS if s.default is not None]


@pytest.mark.parametrize("setting", BOOLEANS, ids=lambda s: s.name)
def test_accepted_spellings(setting, monkeypatch):
    monkeypatch.delenv(setting.name, raising=False)
    assert settings.boolean(setting) is setting.default
    for words, value in ((settings.TRUE, True), (settings.FALSE, False)):
        for word in words:
            for spelled in (word, word.upper(), word.title(), f" {word}\n"):
                monkeypatch.setenv(setting.name, spelled)
                assert settings.boolean(setting) is value, spelled
    monkeypatch.setenv(setting.name, "")
    assert settings.boolean(setting) is setting.default


@pytest.mark.parametrize("value", ["2", "banana", "enabled", "y", "-1", "truefalse"])
@pytest.mark.parametrize("setting", BOOLEANS, ids=lambda s: s.name)
def test_anything_else_names_the_variable_the_value_and_what_is_accepted(setting, value, monkeypatch):
    monkeypatch.setenv(setting.name, value)
    with pytest.raises(SettingError) as error:
        settings.boolean(setting)
    assert (
        str(error.value)
        == f"{setting.name}={value!r} is not accepted: use 1/true/yes/on or 0/false/no/off, in any case"
    )


@pytest.mark.parametrize(
    "value, asked", [("1", True), (" On ", True), ("0", False), ("", False), ("x", False), (None, False)]
)
def test_a_variable_is_asked_for_where_the_user_set_it_and_turned_it_on(monkeypatch, value, asked):
    monkeypatch.delenv(settings.ASM.name, raising=False)
    if value is not None:
        monkeypatch.setenv(settings.ASM.name, value)
    # It is on by default, which nobody asked for.
    assert settings.asked_for(settings.ASM) is asked and settings.asked_for(None) is False


def test_the_disable_list(monkeypatch):
    known = ("decode_pa", "v_head_dim")
    monkeypatch.setenv("SGLANG_AITER_EXT_DISABLE", " V_Head_Dim ,, other")
    assert settings.disabled(known) == {"v_head_dim"}
    with pytest.raises(SettingError, match="other is not a capability; use any of decode_pa, v_head_dim"):
        settings.check_disabled(known)
    monkeypatch.setenv("SGLANG_AITER_EXT_DISABLE", "decode_pa,V_HEAD_DIM")
    settings.check_disabled(known)
    monkeypatch.setenv("SGLANG_AITER_EXT_DISABLE", "")
    assert settings.disabled(known) == frozenset()
    settings.check_disabled(known)


@pytest.mark.parametrize("value, folder", [("/a/b", "/a/b"), (" /a b\n", "/a b"), ("", None), (" ", None)])
def test_the_state_folder_is_an_absolute_path_or_none(monkeypatch, value, folder):
    monkeypatch.setenv("SGLANG_AITER_EXT_STATE_DIR", value)
    assert settings.state_folder() == folder
    monkeypatch.setenv("SGLANG_AITER_EXT_STATE_DIR", "a/b")
    with pytest.raises(SettingError, match="SGLANG_AITER_EXT_STATE_DIR='a/b' is not accepted"):
        settings.state_folder()


def test_errors_are_of_each_variable_by_what_it_accepts(monkeypatch):
    right = {"SGLANG_AITER_EXT_DISABLE": "decode_pa", "SGLANG_AITER_EXT_STATE_DIR": "/a"}
    for setting in settings.SETTINGS:
        monkeypatch.setenv(setting.name, right.get(setting.name, "on"))
    assert settings.errors(("decode_pa",)) == {}
    for setting in settings.SETTINGS:
        monkeypatch.setenv(setting.name, "banana")
    found = settings.errors(("decode_pa",))
    assert list(found) == [setting.name for setting in settings.SETTINGS]
    assert all(str(error).startswith(f"{name}='banana' is not accepted: ") for name, error in found.items())
    assert "is not a capability" in str(found.pop("SGLANG_AITER_EXT_DISABLE"))
    assert "absolute path" in str(found.pop("SGLANG_AITER_EXT_STATE_DIR"))
    assert all("use 1/true/yes/on" in str(error) for error in found.values())


def test_a_strict_that_cannot_be_read_is_off(monkeypatch):
    monkeypatch.setenv("SGLANG_AITER_EXT_STRICT", "banana")
    assert settings.strict() is False


def test_the_readme_lists_every_switch_with_its_default_and_its_meaning():
    """The table is written out there, so that it can be read without the source."""
    rows = ["| variable | default | what it switches |", "| --- | --- | --- |"]
    for setting in settings.SETTINGS:
        default = {True: "on", False: "off", None: "none"}[setting.default]
        rows.append(f"| `{setting.name}` | {default} | {setting.meaning} |")
    assert "\n".join(["", *rows, "", ""]) in (environment.ROOT / "README.md").read_text()
