"""Messages as scripts pack them: what has another shape is none, and is refused before anything is read of it."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from idemgate.core.codec import Codec
from idemgate.core.durations import LATEST_MS
from idemgate.core.merging import merge_of
from idemgate.core.messages import Message
from idemgate.errors import NotDecodable

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
        with pytest.raises(NotDecodable):
            _read([*PLACES[:at], far, *PLACES[at + 1 :]])


@pytest.mark.parametrize("at", [n for n, name in enumerate(NAMES) if name != "acc"], ids=lambda n: NAMES[n])
def test_a_place_of_another_kind_makes_it_none(at: int) -> None:
    other: Any = b"text" if isinstance(PLACES[at], int) or NAMES[at] == "priority" else 7
    with pytest.raises(NotDecodable):
        _read([*PLACES[:at], other, *PLACES[at + 1 :]])


@pytest.mark.parametrize("places", [[], PLACES[:13], [*PLACES, b"rank", 1], {"count": 1}, 7])
def test_what_is_no_list_of_so_many_is_none(places: Any) -> None:
    with pytest.raises(NotDecodable):
        _read(places)
