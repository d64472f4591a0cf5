"""What is decided of keys that expire, from what was seen of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from idemgate import Gate, Trigger
from idemgate.core.durations import LONGEST_MS
from idemgate.store.embedded.server import start
from idemgate.subscribers.expiry.rules import (
    BORN,
    ECHO_MS,
    EXPIRED,
    GONE,
    MERGE,
    Look,
    due,
    expired_of,
    is_echo,
    taken_away,
    timed_out,
    was_deleted,
)
from idemgate.testing import Clock
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def telling() -> Iterator[Any]:
    """A server that tells all events, and what listens to them."""
    with start() as own, redis.Redis.from_url(own.url, decode_responses=True) as client, client.pubsub() as heard:
        client.config_set("notify-keyspace-events", "EA")
        heard.psubscribe("__keyevent@*__:*")
        assert heard.get_message(timeout=30)
        yield client, heard


EVENTS: dict[str, tuple[Any, Callable[[], str]]] = {
    "given a time to live": (lambda r: r.expire("a", 60), lambda: BORN[0]),
    "restored": (lambda r: r.restore("b", 60_000, r.dump("a"), replace=True), lambda: BORN[1]),
    "given another name": (lambda r: r.rename("a", "c"), lambda: BORN[2]),
    "copied": (lambda r: r.copy("a", "c"), lambda: BORN[3]),
    "moved here": (lambda r: r.move("a", 1), lambda: BORN[4]),
    "deleted": (lambda r: r.delete("a"), lambda: GONE[0]),
    "renamed": (lambda r: r.rename("a", "c"), lambda: GONE[1]),
    "moved away": (lambda r: r.move("a", 1), lambda: GONE[2]),
    "expired": (lambda r: r.pexpire("a", 1), lambda: EXPIRED),
}


@pytest.mark.parametrize("name", EVENTS)
def test_events_are_called_what_a_server_calls_them(telling: Any, name: str) -> None:
    client, heard = telling
    act, event = EVENTS[name]
    client.flushall()
    client.set("a", "x", px=60_000)
    act(client)
    wanted = f"__keyevent@{'1' if name == 'moved here' else '0'}__:{event()}"

    def is_told() -> bool:
        client.get("a")  # and what has expired is noticed
        message = heard.get_message(timeout=1)
        return message is not None and message["channel"] == wanted

    wait_until(is_told)


@pytest.mark.parametrize(("left_ms", "alive", "expires"), [(-2, False, False), (-1, True, False), (0, True, True)])
def test_what_was_seen_of_a_key(left_ms: int, alive: bool, expires: bool) -> None:
    seen = Look(1000, left_ms)
    assert (seen.alive, seen.expires) == (alive, expires)


def test_what_goes_into_the_due_set() -> None:
    assert due(b"k", Look(5000, 1500)) == Trigger(b"k", {"until": 6500, "seen": 5000, "heard": 0}, delay=1.5)
    assert due(b"k", Look(5000, LONGEST_MS + 1)).delay == LONGEST_MS / 1000
    assert timed_out(b"k") == Trigger(b"k", {"heard": 1}, delay=0)
    assert taken_away(b"k", Look(7000, -2)) == Trigger(b"k", {"gone": 7000}, delay=0)


@pytest.fixture
def delivered(gate: Gate, clock: Clock) -> Any:
    """The delivery of what was found of a key, one after the other, a second apart."""
    topic = gate.topic("keys", merge=MERGE, window="1h")

    def deliver(*found: dict[str, int]) -> Any:
        for facts in found:
            clock.advance("1s")
            topic.trigger("k", facts)
        topic.flush("k")
        (taken,) = topic.take(1)
        topic.ack(taken)
        return taken

    return deliver


@pytest.mark.parametrize(
    ("found", "is_deleted"),
    [
        ([{"seen": 5}], False),
        ([{"seen": 5}, {"gone": 6}], True),
        ([{"seen": 5}, {"gone": 5}], False),  # at the same time: it was seen
        ([{"gone": 6}], True),
        ([{"gone": 6}, {"heard": 1}], False),
        ([{"seen": 9}, {"gone": 8}, {"seen": 7}], False),
        ([{"seen": 5}, {"gone": 8}, {"gone": 4}], True),
        ([{"heard": 1}, {"seen": 5, "heard": 0}, {"gone": 6}], True),
    ],
)
def test_a_key_was_deleted_if_it_was_found_gone_after_it_was_last_seen_and_nobody_said_that_it_expired(
    delivered: Any, found: list[dict[str, int]], is_deleted: bool
) -> None:
    assert was_deleted(delivered(*found)) is is_deleted


def test_until_is_what_was_known_last(delivered: Any) -> None:
    gone = expired_of(delivered({"until": 9000, "seen": 5, "heard": 0}, {"until": 8000, "seen": 6, "heard": 0}))
    assert (gone.heard, gone.until.timestamp()) == (False, 8)
    assert (expired_of(delivered({"heard": 1})).heard, expired_of(delivered({"heard": 1})).until) == (True, None)


def test_what_was_seen_before_or_heard_soon_after_is_an_echo(delivered: Any) -> None:
    seen = delivered({"seen": 1000})
    assert is_echo(seen, 1001)
    assert not is_echo(seen, 1000)
    heard = delivered({"heard": 1})
    at = round(heard.last_at.timestamp() * 1000)
    assert is_echo(heard, at - ECHO_MS)
    assert not is_echo(heard, at - ECHO_MS - 1)
    assert is_echo(delivered({"gone": 5}), 1)
