"""Every variable in every accepted spelling, and in one that is not."""

import pytest

from sglang_aiter_ext import settings

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
    with pytest.raises(settings.SettingError) as error:
        settings.boolean(setting)
    assert (
        str(error.value)
        == f"{setting.name}={value!r} is not accepted: use 1/true/yes/on or 0/false/no/off, in any case"
    )


def test_the_disable_list(monkeypatch):
    known = ("decode_pa", "v_head_dim")
    monkeypatch.setenv("SGLANG_AITER_EXT_DISABLE", " V_Head_Dim ,, other")
    assert settings.disabled(known) == {"v_head_dim"}
    with pytest.raises(settings.SettingError, match="other is not a capability; use any of decode_pa, v_head_dim"):
        settings.check_disabled(known)
    monkeypatch.setenv("SGLANG_AITER_EXT_DISABLE", "")
    assert settings.disabled(known) == frozenset()
    settings.check_disabled(known)


def test_a_strict_that_cannot_be_read_is_off(monkeypatch):
    monkeypatch.setenv("SGLANG_AITER_EXT_STRICT", "banana")
    assert settings.strict() is False


def test_the_readme_lists_every_switch():
    import environment

    readme = (environment.ROOT / "README.md").read_text()
    assert settings.table() in readme
