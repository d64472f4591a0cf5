"""Messages as scripts pack them: what has another shape is none, and is refused before anything is read of it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from idemgate.core.codec import Codec
from idemgate.core.durations import LATEST_MS
from idemgate.errors import DecodeError
from idemgate.topics.dead_letters import DeadLetter
from idemgate.topics.merge import merge_of
from idemgate.topics.messages import Delivery, Forwarded, Message, Peek, Taken, Trigger, moment
from tests.for_each import for_each
from tests.messages import pack_message

WHOLE: dict[str, Any] = {
    "count": 2, "first": 1, "last": 2, "due": 3, "why": 1, "serial": 5, "attempts": 4, "failure": b"no",
    "group": b"group", "splits": 6,
}  # fmt: skip


def _read(**changes: Any) -> Message:
    return Message(pack_message(**WHOLE | changes), merge_of("last"), Codec())


def test_each_field_is_what_it_is_called() -> None:
    found = _read()
    assert (found.count, found.first_ms, found.last_ms, found.due_ms, found.attempts) == (2, 1, 2, 3, 4)
    assert (found.reason, found.version, found.serial, found.splits) == ("window", None, 5, 6)
    assert (found.failure, found.group, found.priority, found.payload) == ("no", "group", 0, 1)
    traced = _read(traces=[3, b"a", b"b"])
    assert (traced.traces, traced.dropped_traces, traced.count) == ((b"a", b"b"), 3, 2)
    assert (found.traces, found.dropped_traces) == ((), 0)
    ranked = _read(priority=7, version=b"12", rank=b"rank")
    assert (ranked.priority, ranked.version, ranked.count) == (7, 12, 2)


def test_a_repr_tells_what_matters_and_no_payload() -> None:
    message = _read(due=1_700_000_000_000, acc=b"\x01\xa6secret", group=b"g\x1b\n")
    assert repr(message) == (
        r"<Message due=2023-11-14T22:13:20+00:00 reason=window count=2 attempts=4 group='g\x1b\n'>"
    )
    assert repr(_read(due=2**48 - 1, group=b"")) == f"<Message due={2**48 - 1} ms reason=window count=2 attempts=4>"
    peek = Peek(message, moment(1), None, None, None)
    letter = DeadLetter("0-1", "k\n", "no", moment(1), 4, 2, moment(1), moment(1), message, b"")
    assert repr(peek).startswith("Peek(pending=<Message due=2023-11-14")
    assert repr(letter).startswith(r"DeadLetter(id='0-1', key='k\n', reason='no'")
    assert "secret" not in repr(peek) + repr(letter)


def test_a_message_in_flight_counts_its_attempt_and_shows_a_flush() -> None:
    packed = pack_message(**WHOLE)
    assert Message(packed, merge_of("last"), Codec(), running=True).attempts == 5
    moved = Message(packed, merge_of("last"), Codec(), due_ms=2)
    assert (moved.due_ms, moved.reason) == (2, "flush")
    assert Message(packed, merge_of("last"), Codec(), due_ms=3).reason == "window"


@pytest.mark.parametrize("name", ["first", "last"])
def test_times_are_those_of_a_calendar(name: str) -> None:
    assert _read(**{name: 0}).count == _read(**{name: LATEST_MS}).count == 2
    with pytest.raises(DecodeError):
        _read(**{name: LATEST_MS + 1})


@for_each("name", ["attempts", "failure", "version", "priority", "group", "splits", "earlier", "rank", "traces"])
def test_a_field_of_another_type_is_corrupt(name: str) -> None:
    other: Any = b"text" if name in ("attempts", "splits", "priority") else 7
    with pytest.raises(DecodeError):
        _read(**{name: other})


@for_each(
    "packed",
    [
        b"", pack_message()[:30], b"\x04" + pack_message()[1:], b"\x00\x0a" + pack_message()[2:],
        pack_message(attempts=1)[:40], pack_message(attempts=1)[:31] + b"\xff" * 20, b"\x02" + pack_message()[1:], 7,
        None,
    ],
)  # fmt: skip
def test_other_bytes_are_refused(packed: Any) -> None:
    with pytest.raises(DecodeError):
        Message(packed, merge_of("last"), Codec())


def test_a_trigger_is_told_when_and_what_by_name() -> None:
    with pytest.raises(TypeError):
        Trigger("k", 1, datetime.now(UTC))  # type: ignore[misc]


def test_a_delivery_begins_uncancelled_and_held() -> None:
    taken = Delivery[Any]("t", 0, b"k", 7, 5, _read())
    assert (taken.cancelled, taken.lost, taken.count) == (False, False, 2)
    # When it is due is what its slot says, and any number of it is read
    assert _read(due=LATEST_MS + 1).due_ms == LATEST_MS + 1


@pytest.mark.parametrize(("next_due_ms", "now_ms", "more"), [(0, 5, False), (1, 5, True), (5, 5, True), (6, 5, False)])
def test_a_slot_whose_next_message_is_due_has_more(next_due_ms: int, now_ms: int, more: bool) -> None:
    assert Taken([], 0, next_due_ms, now_ms).more is more
    assert Forwarded(1, next_due_ms, now_ms).more is more
    # One that had nothing to send holds what it may not send yet
    assert Forwarded(0, next_due_ms, now_ms).more is False
