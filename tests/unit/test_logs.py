"""When a line is logged: each reason once, and those of import time when somebody listens."""

import logging

import pytest

from sglang_aiter_ext import logs

pytestmark = pytest.mark.usefixtures("nothing_counted")


@pytest.fixture
def lines(monkeypatch):
    """Lists what is logged once its handler is attached; logging is not configured yet."""
    monkeypatch.setattr(logs, "_waiting", type(logs._waiting)())
    alone = logging.Manager(logging.RootLogger(logging.WARNING)).getLogger("alone")
    monkeypatch.setattr(logs, "logger", alone)
    return []


def attach(lines):
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logs.logger.addHandler(handler)


def test_the_logger_obeys_a_configuration_of_sglangs():
    sglangs = logging.getLogger("sglang")
    assert logs.logger.parent is sglangs and logs.logger.level == logging.NOTSET


def test_a_line_of_import_time_waits_for_a_handler_and_for_its_level(lines):
    assert not logs.waiting()
    logs.when_configured(logging.ERROR, "an error")
    assert logs.waiting() and not logs.configured()
    attach(lines)
    logs.when_configured(logging.INFO, "a summary")
    assert lines == [] and not logs.configured()
    logs.logger.setLevel(logging.INFO)
    logs.when_configured(logging.ERROR, "another")
    assert lines == ["an error", "a summary", "another"] and not logs.waiting()


def test_a_level_without_a_handler_is_no_configuration(lines):
    logs.logger.setLevel(logging.DEBUG)
    logs.when_configured(logging.ERROR, "an error")
    assert logs.waiting() and not logs.configured()


def test_lines_that_wait_can_be_logged_before_anything_is_configured(lines):
    logs.when_configured(logging.INFO, "a summary of 100%")
    attach(lines)
    logs.logger.setLevel(logging.INFO)
    logs.flush()
    assert lines == ["a summary of 100%"] and not logs.waiting()


def test_a_reason_is_logged_once_after_the_lines_that_wait(lines):
    attach(lines)
    logs.when_configured(logging.INFO, "a summary")
    logs.logger.setLevel(logging.INFO)
    assert not logs.said("a", "one")
    for reason in ("one", "one", "two"):
        logs.once("a", reason, "because of %s", reason)
    assert lines == ["a summary", "a: because of one", "a: because of two"]
    assert logs.said("a", "one") and not logs.said("b", "one")


def test_a_reason_has_the_level_that_it_is_given_and_is_a_warning_without_one(lines, monkeypatch):
    levels = []
    monkeypatch.setattr(logs, "say", lambda level, *args: levels.append(level))
    logs.once("a", "one", "text")
    logs.once("a", "two", "text", level=logging.INFO)
    assert levels == [logging.WARNING, logging.INFO]


def test_an_error_of_one_of_the_host_programs_handlers_reaches_nobody(lines, monkeypatch):
    def fails(level, *args):
        lines.append(args)
        raise OSError("disk full")

    monkeypatch.setattr(logs.logger, "log", fails)
    logs.once("a", "one", "text")
    assert len(lines) == 1 and logs.said("a", "one")


def test_a_line_may_come_in_while_another_thread_looks_at_those_that_wait(lines, monkeypatch):
    attach(lines)
    logs._waiting.append((logging.INFO, "waits"))
    monkeypatch.setattr(logs.logger, "isEnabledFor", lambda level: logs._waiting.append((level, "new")) or True)
    assert logs.configured()
