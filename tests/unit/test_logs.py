"""Logging for programs that have none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument
from idemgate.worker.logs import Facts, configure_logs


@contextmanager
def bare() -> Iterator[None]:
    """As in a program that configured nothing."""
    root, ours = logging.getLogger(), logging.getLogger("idemgate")
    handlers, level = root.handlers[:], ours.level
    root.handlers[:] = []
    ours.setLevel(logging.NOTSET)
    try:
        yield
    finally:
        root.handlers[:] = handlers
        ours.setLevel(level)


@pytest.mark.parametrize("level", ["info", "INFO", "Info"])
def test_a_level_is_named_in_any_case(level: str) -> None:
    with bare():
        configure_logs(level)
        assert logging.getLogger("idemgate").level == logging.INFO
        assert logging.getLogger().handlers


@pytest.mark.parametrize("level", ["loud", "", None, 20])
def test_an_unknown_level_is_refused_before_anything_is_configured(level: Any) -> None:
    with bare():
        with pytest.raises(InvalidArgument, match=r"level=.*no such level\. Use one of .*INFO"):
            configure_logs(level)
        assert logging.getLogger().handlers == []


def test_facts_are_appended_once() -> None:
    formatter = Facts("%(message)s")
    record = logging.makeLogRecord({"msg": "once.lost key=%r", "args": ("a",), "key": "a", "token": 5})
    assert formatter.format(record) == "once.lost key='a' token=5"
    record = logging.makeLogRecord({"msg": "worker.dead", "topic": "images", "attempt": 17})
    assert formatter.format(record) == "worker.dead topic='images' attempt=17"


def test_no_text_of_a_stranger_begins_a_record_or_acts_on_a_terminal() -> None:
    # Given a handler whose exception has the text of a message
    forged = "2026-01-01 00:00:00,000 ERROR   idemgate.worker worker.failed"
    try:
        raise ValueError(f"odd\n{forged}\x1b[2J\r{forged}")
    except ValueError as error:
        failed = error
    given = {"msg": "worker.handler_failed key=%s", "args": (f"a\n{forged}",), "key": "a"}
    record = logging.makeLogRecord(given | {"exc_info": (ValueError, failed, failed.__traceback__)})
    # When `idemgate run` prints it
    head, *rest = Facts("%(message)s").format(record).splitlines()
    # Then only the record itself is at the first column, and no control character is left
    assert head == f"worker.handler_failed key=a\\n{forged}"
    assert all(line.startswith("  ") and line.isprintable() for line in rest)
    assert rest[0] == "  Traceback (most recent call last):"
    assert rest[-1].endswith(f"\\x1b[2J\\r{forged}")


FORGED = "2026-01-01 00:00:00,000 ERROR idemgate.worker worker.failed"


@pytest.mark.parametrize("name", ["worker", "subscriber", "lease", "once"])
def test_no_traceback_forges_a_record_of_a_program_with_a_plain_formatter(name: str, caplog: Any) -> None:
    """The loggers that log what functions of the user raise."""
    from idemgate.worker import settlements

    assert settlements.log.name == "idemgate.worker"
    try:
        raise ValueError(f"odd\n{FORGED}\x1b[2J\r\u2028{FORGED}")
    except ValueError as error:
        logging.getLogger(f"idemgate.{name}").error("event", exc_info=error)
    head, *rest = logging.Formatter("%(message)s").format(caplog.records[0]).split("\n")
    assert head == "event"
    assert all(line.startswith("  ") and line.isprintable() for line in rest)
    assert caplog.records[0].exc_info[0] is ValueError  # for those who read the exception itself


@pytest.mark.parametrize("is_async", [False, True])
async def test_an_exception_of_a_guarded_callback_forges_no_record(is_async: bool, caplog: Any) -> None:
    with Gate("embedded://", namespace="logs") as gate:

        def fail(message: str) -> None:
            raise ValueError(f"odd\n{FORGED}")

        async def fail_awaiting(message: str) -> None:
            fail(message)

        if is_async:
            await gate.callback("{message}", scope="async", on_failure="log")(fail_awaiting)("a")
            await gate.aio.close()
        else:
            gate.callback("{message}", scope="blocking", on_failure="log")(fail)("a")
    (text,) = [logging.Formatter().format(one) for one in caplog.records if one.message.startswith("callback.failed")]
    assert FORGED in text
    assert not any(line.startswith(FORGED) for line in text.splitlines())


def test_the_error_of_a_relay_is_one_printable_line() -> None:
    from idemgate_sql.outages import describe

    error = ValueError(f"odd\n{FORGED}\x1b[2J")
    error.add_note(f"note\n{FORGED}")
    assert describe(error) == rf"ValueError: odd; {FORGED}\x1b[2J; note; {FORGED}"
