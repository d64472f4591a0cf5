"""Logging for programs that have none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from idemgate import InvalidArgument
from idemgate.worker.logs import Facts, configure


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
        configure(level)
        assert logging.getLogger("idemgate").level == logging.INFO
        assert logging.getLogger().handlers


@pytest.mark.parametrize("level", ["loud", "", None, 20])
def test_an_unknown_level_is_refused_before_anything_is_configured(level: Any) -> None:
    with bare():
        with pytest.raises(InvalidArgument, match=r"level=.*no such level\. Use one of .*INFO"):
            configure(level)
        assert logging.getLogger().handlers == []


def test_facts_are_appended_once() -> None:
    formatter = Facts("%(message)s")
    record = logging.makeLogRecord({"msg": "once.lease_lost key=%r", "args": ("a",), "key": "a", "token": 5})
    assert formatter.format(record) == "once.lease_lost key='a' token=5"
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
