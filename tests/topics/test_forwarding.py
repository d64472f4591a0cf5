"""Forwarding by the script: out of the topic and into the target in one step."""

from __future__ import annotations

from typing import Any

import pytest

from idemgate import Gate, InvalidArgument
from idemgate.core import keys
from idemgate.errors import DecodeError
from idemgate.testing import Clock
from idemgate.topics.messages import Forward


@pytest.mark.parametrize("kind", ["list", "stream"])
@pytest.mark.parametrize("named", [False, True], ids=["outbox", "named"])
def test_due_messages_move_with_all_their_facts(gate: Gate, clock: Clock, raw: Any, kind: Any, named: bool) -> None:
    # Given merged messages of which one is not due
    topic = gate.topic("mails", window="10s", merge="append")
    topic.trigger("ann", 1)
    clock.advance("1s")
    topic.trigger("ann", 2)
    topic.trigger("bob", 3)
    target = f"jobs-{gate.namespace}".encode() if named else topic.forward_targets()[0].encode()
    clock.advance("9s")
    # When what is due is sent on, and the same request comes once more
    call = topic.open().forward(0, Forward(kind, target if named else None, 0), 100)
    first, again = gate.context.link.run(call), gate.context.link.run(call)
    # Then it is in the target, once, and no more in the topic
    assert first == again
    assert first.sent == 1
    entries = raw.lrange(target, 0, -1) if kind == "list" else [fields for _, fields in raw.xrange(target)]
    (found,) = [topic.decode_forwarded(entry) for entry in entries]
    assert (found.key, found.payload, found.count, found.reason) == ("ann", [1, 2], 2, "window")
    assert (found.token > 0, found.attempt) == (True, 1)
    stats = topic.stats()
    assert (stats.pending, stats.in_flight, stats["forwarded"], stats["forwarded_triggers"]) == (1, 0, 1, 2)
    raw.delete(target)


def test_priorities_are_kept_and_the_target_is_bounded(gate: Gate, raw: Any) -> None:
    topic = gate.topic("jobs", priority=True)
    for number in range(10):
        topic.trigger(f"j{number}", priority=number)
    assert gate.context.link.run(topic.open().forward(0, Forward("list", None, 4), 3)).sent == 3
    assert gate.context.link.run(topic.open().forward(0, Forward("list", None, 4), 100)).sent == 7
    assert [topic.decode_forwarded(entry).key for entry in raw.lrange(topic.forward_targets()[0], 0, -1)] == [
        "j3",
        "j2",
        "j1",
        "j0",
    ]


@pytest.mark.parametrize("keep", [0, 1, 200])
def test_a_stream_keeps_about_as_many_as_it_should(gate: Gate, raw: Any, keep: int) -> None:
    topic = gate.topic("jobs")
    topic.trigger_many([(f"j{number}", None) for number in range(400)])
    for _ in range(4):
        assert gate.context.link.run(topic.open().forward(0, Forward("stream", None, keep), 100)).sent == 100
    # Whole nodes of a stream go, of a hundred entries each
    kept = raw.xlen(topic.forward_targets()[0])
    assert keep <= kept <= keep + 100 if keep else kept == 400


def test_a_forwarded_message_holds_no_group(gate: Gate) -> None:
    # Given a retry that holds its group, and one in its line
    topic = gate.topic("jobs", backoff=0)
    topic.trigger("a", group="g")
    topic.nack(topic.take(1))
    topic.trigger("b", group="g")
    topic.trigger("c", group="g")
    # When what is due is sent on, one message a call
    assert gate.context.link.run(topic.open().forward(0, Forward("list", None, 0), 1)).sent == 1
    # Then the next of the group may be taken
    assert [one.key for one in topic.take(10)] == ["b"]


def test_messages_of_one_call_have_different_tokens(gate: Gate, raw: Any) -> None:
    # Given messages that one call forwards
    topic = gate.topic("jobs")
    topic.forward("list")
    topic.trigger_many([(key, 1) for key in "abc"])
    assert topic.forward_once(10) == 3
    # Then each has its own token, by which a consumer recognizes a copy
    (box,) = topic.forward_targets()
    tokens = [topic.decode_forwarded(entry).token for entry in raw.lrange(box, 0, -1)]
    assert tokens == sorted(set(tokens))
    assert len(tokens) == 3


def test_messages_of_two_calls_have_different_tokens(gate: Gate, raw: Any) -> None:
    # Given a clock that stands still, and a key that is forwarded twice
    topic = gate.topic("jobs")
    topic.forward("list")
    for _ in range(2):
        topic.trigger("a", 1)
        assert topic.forward_once(10) == 1
    # Then a consumer can tell the second message from a copy of the first
    first, second = [topic.decode_forwarded(entry).token for entry in raw.lrange(topic.forward_targets()[0], 0, -1)]
    assert first < second


def test_of_a_group_that_ends_nothing_is_left(gate: Gate, raw: Any) -> None:
    topic = gate.topic("jobs", backoff=0)
    topic.trigger("a", group="g")
    topic.nack(topic.take(1))
    groups = keys.slot(gate.namespace, "jobs", 0, 1)[11]
    assert raw.hkeys(groups) == [b"g"]
    assert gate.context.link.run(topic.open().forward(0, Forward("list", None, 0), 1)).sent == 1
    assert raw.hkeys(groups) == []


def test_what_was_blocked_is_sent_on_too(gate: Gate) -> None:
    topic = gate.topic("jobs")
    for key in ("a", "b", "c"):
        topic.trigger(key, group="g")
    (first,) = topic.take(10)
    assert topic.stats().blocked == 2
    topic.ack(first)
    topic.forward("list")
    assert topic.forward_once() + topic.forward_once() == 2
    assert (topic.stats().pending, topic.stats()["forwarded_triggers"]) == (0, 2)


def test_a_target_of_another_type_is_refused_and_nothing_is_moved(gate: Gate, raw: Any) -> None:
    from idemgate.errors import UnexpectedData

    topic = gate.topic("jobs")
    topic.trigger("a", 1)
    raw.set(topic.forward_targets()[0], "text")
    with pytest.raises(UnexpectedData, match="out: holds a string, expected a list"):
        gate.context.link.run(topic.open().forward(0, Forward("list", None, 0), 100))
    assert topic.stats().pending == 1
    raw.delete(topic.forward_targets()[0])


def test_what_makes_no_sense_is_refused(gate: Gate) -> None:
    topic = gate.topic("jobs")
    with pytest.raises(InvalidArgument, match="list"):
        topic.forward("queue")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="keep"):
        topic.forward("list", keep=-1)
    with pytest.raises(DecodeError):
        topic.decode_forwarded(b"no message")
    with pytest.raises(DecodeError, match="message"):
        topic.decode_forwarded({b"other": b""})
    topic.forward("list")
    with pytest.raises(InvalidArgument, match="is forwarded"):
        topic.handler(print)


def test_what_was_flushed_says_so_where_it_is_sent(gate: Gate, clock: Clock, raw: Any) -> None:
    # Given a message whose time has not come, and the whole topic flushed
    topic = gate.topic("jobs", window="60s")
    topic.trigger("a", 1)
    clock.advance("5s")
    assert topic.flush() == 1
    # When it is sent on
    assert gate.context.link.run(topic.open().forward(0, Forward("list", None, 0), 100)).sent == 1
    # Then it is due since the flush
    (found,) = [topic.decode_forwarded(entry) for entry in raw.lrange(topic.forward_targets()[0], 0, -1)]
    assert (found.reason, found.due_at) == ("flush", clock.now())


def test_a_target_may_keep_one(gate: Gate, raw: Any) -> None:
    topic = gate.topic("jobs")
    for key in ("a", "b", "c"):
        topic.trigger(key)
    assert gate.context.link.run(topic.open().forward(0, Forward("list", None, 1), 100)).sent == 3
    assert raw.llen(topic.forward_targets()[0]) == 1


def test_forwarding_nothing_writes_nothing(gate: Gate, everything: Any) -> None:
    topic = gate.topic("jobs")
    topic.trigger("late", delay="60s")
    before = everything()
    assert gate.context.link.run(topic.open().forward(0, Forward("list", None, 0), 100)).sent == 0
    assert everything() == before


class TestTrimming:
    """What every group has acknowledged leaves the stream, and nothing else does."""

    async def fill(self, face: Any, raw: Any, **options: Any) -> tuple[Any, str]:
        topic = face.topic("jobs")
        face.gate.topic("jobs").forward("stream", **options)
        await topic.trigger_many([(n, n) for n in range(500)])
        assert await topic.forward_once() == 500
        return topic, face.gate.topic("jobs").forward_targets()[0]

    def read(self, raw: Any, stream: str, group: str, n: int) -> list[bytes]:
        return [one for one, _ in raw.xreadgroup(group, "consumer", {stream: ">"}, count=n)[0][1]]

    async def test_a_consumed_stream_shrinks(self, face: Any, raw: Any) -> None:
        # Given a stream that its only group has acknowledged
        topic, stream = await self.fill(face, raw)
        raw.xgroup_create(stream, "g", "0")
        raw.xack(stream, "g", *self.read(raw, stream, "g", 500))
        # When it is trimmed, then about a hundred entries stay at most
        removed = await topic.trim_forwarded()
        assert removed + raw.xlen(stream) == 500
        assert raw.xlen(stream) <= 110

    async def test_pending_and_unread_entries_of_each_group_stay(self, face: Any, raw: Any) -> None:
        # Given one group that is done, and one that has an early entry pending
        topic, stream = await self.fill(face, raw)
        for group in ("quick", "slow"):
            raw.xgroup_create(stream, group, "0")
            ids = self.read(raw, stream, group, 500 if group == "quick" else 300)
            raw.xack(stream, group, *(ids if group == "quick" else ids[:250] + ids[251:]))
        # When the stream is trimmed
        await topic.trim_forwarded()
        # Then the pending entry and all behind it are there
        left = [one for one, _ in raw.xrange(stream)]
        assert raw.xpending(stream, "slow")["min"] in left
        assert 250 <= len(left) <= 360
        # And a group that has read nothing keeps everything
        raw.xgroup_create(stream, "new", "0")
        raw.xack(stream, "slow", *[one["message_id"] for one in raw.xpending_range(stream, "slow", "-", "+", 9)])
        assert await topic.trim_forwarded() == 0

    async def test_without_a_group_nothing_is_removed(self, face: Any, raw: Any) -> None:
        topic = face.topic("jobs")
        face.gate.topic("jobs").forward("stream")
        assert await topic.trim_forwarded() == 0  # no stream yet
        topic, stream = await self.fill(face, raw)
        assert await topic.trim_forwarded() == 0
        assert raw.xlen(stream) == 500

    async def test_a_list_is_refused(self, face: Any, raw: Any) -> None:
        face.gate.topic("jobs").forward("list")
        with pytest.raises(InvalidArgument, match="forwarded to a list"):
            await face.topic("jobs").trim_forwarded()
        with pytest.raises(InvalidArgument, match="a list has no groups"):
            face.gate.topic("other").forward("list", trim=True)
