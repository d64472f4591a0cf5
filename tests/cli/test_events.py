"""What the demo publishes, and when."""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter
from pathlib import Path

import pytest

from idemgate.cli.demo.events import LATER, SECONDS, DemoEvent, made_up, plan_of, read
from idemgate.errors import InvalidArgument
from tests.for_each import for_each

LINE = '{"id": "a", "ts": 1387731401, "path": "pom.xml", "change": "M"}'


def at(*times: float) -> list[DemoEvent]:
    return [DemoEvent(f"e{number}", ts, "p", "M") for number, ts in enumerate(times)]


def test_pauses_are_cut_and_the_rest_is_speeded_up() -> None:
    # Given events with a pause of a year between them, and one out of order
    events = at(100, 110, 110 + 31_536_000, 90, 120 + 31_536_000)
    # When it is planned ten times as fast, with pauses of at most 60 s
    plan, _ = plan_of(events, 10)
    # Then times are those of the file where they are short, and never fall
    assert sorted({round(at, 9) for at, _ in plan}) == [0, 1, 7, 13]


@pytest.mark.parametrize("times", [[0], [5, 5, 5], [0, 1, 2, 1000]], ids=["one", "at once", "a minute"])
def test_without_a_speed_it_lasts_its_25_seconds_at_most(times: list[float]) -> None:
    plan, _ = plan_of(at(*times), None)
    assert plan[-1][0] in (0, pytest.approx(SECONDS))


def test_as_fast_as_possible_has_no_pauses() -> None:
    plan, _ = plan_of(at(0, 10, 20), math.inf)
    assert {at for at, _ in plan} == {0}


def test_some_events_come_twice_soon_after() -> None:
    # Given a plan of 2,000 events
    events = made_up(2000)
    order = [event.id for _, event in plan_of(events, 1)[0]]
    # Then every one is published, in order, and about 1 in 20 a second time, a little later
    twice = [event for event, times in Counter(order).items() if times == 2]
    assert list(dict.fromkeys(order)) == [event.id for event in events]
    assert 60 < len(twice) < 140
    assert len(order) == 2000 + len(twice)
    for event in twice:
        first = order.index(event)
        assert 0 < order.index(event, first + 1) - first <= 2 * LATER


@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress], ids=["plain", "gzip"])
def test_a_file_is_read_up_to_the_limit(tmp_path: Path, pack: object) -> None:
    # Given a file of three events, with an empty line and a field that is not ours
    lines = [json.dumps(json.loads(LINE) | {"id": name, "extra": 1}) for name in "abc"]
    file = tmp_path / "events"
    file.write_bytes(pack("\n\n".join(lines).encode()))
    # Then it is known by its content, not by its name
    assert [event.id for event in read(file, None)] == ["a", "b", "c"]
    assert [event.id for event in read(file, 2)] == ["a", "b"]
    assert read(file, 1) == [DemoEvent("a", 1387731401, "pom.xml", "M")]


@for_each(
    ("content", "words"),
    [
        (b"", "holds no events"),
        (LINE.encode() + b"\nnonsense\n", "events:2='nonsense': is not an event"),
        (b"[1]\n", "events:1"),
        (b'{"id": "a", "ts": 1, "path": "p"}\n', "is not an event"),
        (LINE.replace("1387731401", "NaN").encode(), "is not an event"),
        (LINE.replace("1387731401", "1" + "0" * 400).encode(), "is not an event"),
        (LINE.replace("1387731401", "true").encode(), "is not an event"),
        (LINE.replace('"a"', "7").encode(), "is not an event"),
        (LINE.replace("pom.xml", "").encode(), "is not an event"),
        (b"\xff\xfe\n", "cannot be read"),
        (gzip.compress(LINE.encode(), mtime=0)[:-9], "cannot be read"),
        (gzip.compress(b"", mtime=0)[:10] + b"nonsense", "cannot be read"),
    ],
)  # fmt: skip
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "events"
    file.write_bytes(content)
    with pytest.raises(InvalidArgument) as caught:
        read(file, None)
    assert words in str(caught.value)
