"""Messages as scripts pack them: what has another shape is none, and is refused before anything is read of it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgpack
import pytest

from idemgate.core.codec import Codec
from idemgate.core.durations import LATEST_MS
from idemgate.errors import DecodeError
from idemgate.topics.merge import merge_of
from idemgate.topics.messages import Delivery, Forwarded, Message, Taken, Trigger

PLACES: list[Any] = [2, 1, 2, 3, 4, b"window", 0, b"", b"\xa1\x01", b"no", b"", b"group", 5, 6]
NAMES = [
    "count", "first", "last", "due", "attempts", "why", "pinned", "version", "acc", "failure", "priority", "group",
    "serial", "splits",
]  # fmt: skip


def _read(places: list[Any]) -> Message:
    return Message(msgpack.packb(places), merge_of("last"), Codec())


def test_each_place_is_what_it_is_called() -> None:
    found = _read(PLACES)
    assert (found.count, found.first_ms, found.last_ms, found.due_ms, found.attempts) == (2, 1, 2, 3, 4)
    assert (found.reason, found.version, found.serial, found.splits) == ("window", None, 5, 6)
    assert _read([*PLACES[:10], 7, *PLACES[11:], b"rank"]).count == 2


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("ms", [0, LATEST_MS])
def test_times_are_those_of_a_calendar(at: int, ms: int) -> None:
    assert _read([*PLACES[:at], ms, *PLACES[at + 1 :]]).count == 2
    for far in (-1, LATEST_MS + 1):
        with pytest.raises(DecodeError):
            _read([*PLACES[:at], far, *PLACES[at + 1 :]])


@pytest.mark.parametrize("at", [n for n, name in enumerate(NAMES) if name != "acc"], ids=lambda n: NAMES[n])
def test_a_place_of_another_kind_makes_it_none(at: int) -> None:
    other: Any = b"text" if isinstance(PLACES[at], int) or NAMES[at] == "priority" else 7
    with pytest.raises(DecodeError):
        _read([*PLACES[:at], other, *PLACES[at + 1 :]])


@pytest.mark.parametrize("places", [[], PLACES[:13], [*PLACES, b"rank", 1], {"count": 1}, 7])
def test_what_is_no_list_of_so_many_is_none(places: Any) -> None:
    with pytest.raises(DecodeError):
        _read(places)


def test_a_trigger_is_told_when_and_what_by_name() -> None:
    with pytest.raises(TypeError):
        Trigger("k", 1, datetime.now(UTC))  # type: ignore[misc]


def test_a_delivery_begins_uncancelled_and_held() -> None:
    taken = Delivery[Any]("t", 0, b"k", 7, 5, _read(PLACES))
    assert (taken.cancelled, taken.lost, taken.count) == (False, False, 2)
    # When it is due is what its slot says, and any number of it is read
    assert _read([*PLACES[:3], LATEST_MS + 1, *PLACES[4:]]).due_ms == LATEST_MS + 1


@pytest.mark.parametrize(("next_due_ms", "now_ms", "more"), [(0, 5, False), (1, 5, True), (5, 5, True), (6, 5, False)])
def test_a_slot_whose_next_message_is_due_has_more(next_due_ms: int, now_ms: int, more: bool) -> None:
    assert Taken([], 0, next_due_ms, now_ms).more is more
    assert Forwarded(1, next_due_ms, now_ms).more is more
    # One that had nothing to send holds what it may not send yet
    assert Forwarded(0, next_due_ms, now_ms).more is False
