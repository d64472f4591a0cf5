"""The calls of a topic as values: how they are cut up, what is asked of slots that have moved, what replies mean."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, get_args

import pytest

from idemgate.core.calls import MAX_ENTRIES, Incomplete
from idemgate.core.codec import Codec
from idemgate.core.keys import slot_of
from idemgate.errors import DecodeError, InvalidArgument
from idemgate.topics.deliveries import MAX_MIXED_SETTLEMENTS, Settlement, nack_items
from idemgate.topics.merge import append
from idemgate.topics.messages import Delivery, Settled, Taken, Trigger, moment, pack_pause
from idemgate.topics.slots import OpenReply
from idemgate.topics.topic import AioTopic, Topic
from idemgate.topics.topic_calls import TopicCalls
from tests.for_each import for_each
from tests.messages import pack_message
from tests.unit.test_policy import policy

CODEC = Codec()
NOW = 1_700_000_000_000


def calls(**facts: Any) -> TopicCalls:
    """Those of a topic "t"."""
    return TopicCalls("n", "t", policy(**facts), CODEC, None)


def delivery(key: bytes = b"k", slot: int = 0, packed: bytes | None = None, **facts: Any) -> Delivery[Any]:
    merge = policy(**facts).merge
    acc = b"\x01\xc0" if merge.raw else merge.lift("x", CODEC)
    packed = pack_message(acc, first=NOW, last=NOW, due=NOW) if packed is None else packed
    return Delivery("t", slot, key, 7, NOW, None, (packed, merge, CODEC))


def test_fewer_end_in_a_call_where_any_is_more_than_acknowledged() -> None:
    acked, failing = Settlement("ack", delivery()), Settlement("nack", delivery())
    plain, results = calls(), calls(result_retention="1h")
    assert [plain.max_settlements(ends) for ends in ([acked] * 3, [acked, failing], [failing])] == [
        MAX_ENTRIES,
        MAX_MIXED_SETTLEMENTS,
        MAX_MIXED_SETTLEMENTS,
    ]
    # An ack with a result is more than a plain ack
    assert results.max_settlements([acked] * 3) == MAX_MIXED_SETTLEMENTS


def test_what_fails_and_names_no_delay_is_tried_again_at_once() -> None:
    assert Settlement("nack", delivery()).args(3) == (3, "nack", 0, "")


def key_of(slot: int) -> bytes:
    """A key of that one of two slots."""
    return next(key for n in range(99) if slot_of(key := b"k%d" % n, 2) == slot)


# -- to a slot that has moved -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("to", "opened"), [(-1, True), (0, False), (1, False)])
def test_a_closed_slot_is_opened_again_only_where_nobody_changes_its_topic(to: int, opened: bool) -> None:
    # Given a slot that is closed, of a topic that has as many slots as ever
    topic = calls()
    asked = topic.trigger(Trigger("k", 1))
    assert asked.redirect is not None
    batch = asked.redirect.resolve(OpenReply("same", topic.policy.pack_stored(), to), b"a change")
    # Then the same is asked again, and before that, unless the topic is being changed or forgotten, the slot is opened
    scripts = ["topics/reshard/reopen", "topics/trigger"] if opened else ["topics/trigger"]
    assert [one.script.name for one in batch.calls] == scripts
    assert batch.join([True, "receipt"][-len(scripts) :]) == "receipt"


def test_a_delivery_that_cannot_be_read_is_of_the_slot_with_the_rest_of_its_number() -> None:
    assert calls(slots=2).slot_of_delivery(delivery(slot=5, packed=b"\xc1")) == 1
    assert calls(slots=2).slot_of_delivery(delivery(key_of(0), slot=5)) == 0


def test_what_ends_in_slots_that_were_one_is_told_as_one() -> None:
    ends = [Settlement("ack", delivery(key_of(slot))) for slot in (1, 0, 1)]
    asked: Any = calls().settle(0, ends).redirect
    batch = asked.rebuild(calls(slots=2), 0)
    assert len(batch.calls) == 2
    found = batch.join([Settled(["ok", "lost"], 0, NOW), Settled(["dead"], NOW + 9, NOW - 1)])
    assert found == Settled(["ok", "dead", "lost"], NOW + 9, NOW)


def test_what_is_taken_from_several_slots_for_one_is_told_as_one() -> None:
    asked: Any = calls().take(0, 5).redirect
    batch = asked.rebuild(calls(slots=4), 0)
    taken = [Taken([], 1, due, now) for due, now in ((NOW + 5, 1), (0, 2), (NOW + 3, 3), (NOW + 4, 4))]
    # The next time is the earliest of those that have one
    assert batch.join(taken) == Taken([], 4, NOW + 3, 4)
    assert batch.join([Taken([], 0, 0, 1)] * 4).next_due_ms == 0


# -- going in ---------------------------------------------------------------------------------------------------------


@for_each(
    ("merge", "payload", "more", "lengths"),
    [
        ("last", None, {}, [1]),
        ("last", None, {"delay": 1}, [1]),
        ("last", None, {"event_id": "e"}, [2]),
        ("last", None, {"version": 1}, [2]),
        ("last", None, {"group": "g"}, [2]),
        ("union", ["a", "b", "c", "d", "e"], {}, [1]),
    ],
)
def test_so_many_triggers_go_at_once_by_what_they_ask_for(
    merge: Any, payload: Any, more: dict[str, Any], lengths: list[int]
) -> None:
    batch = calls(merge=merge).trigger_many([Trigger(f"k{n}", payload, **more) for n in range(41)])
    assert [len(batch.calls)] == lengths


def test_a_receipt_says_when_by_the_servers_clock() -> None:
    (asked,) = calls().trigger_many([Trigger("a"), Trigger("b"), Trigger("c")]).calls
    # Given a reply of pairs: an answer, and the number of triggers in turn that have it
    receipts = asked.answer([b"ok", NOW, 60_000 << 3, 1, 1, 1, 4, 1])
    assert [one.status for one in receipts] == ["scheduled", "merged", "duplicate"]
    assert [one.due_at and one.due_at.timestamp() * 1000 for one in receipts] == [NOW + 60_000, NOW, None]
    assert [one.status for one in asked.answer([b"ok", NOW, 1, 2, 0, 1])] == ["merged", "merged", "scheduled"]


@pytest.mark.parametrize("pairs", [[0], [0, 10**12], [0, 3, 1], [0, 2], []])
def test_a_reply_with_another_number_of_answers_is_rejected(pairs: list[int]) -> None:
    (asked,) = calls().trigger_many([Trigger("a"), Trigger("b"), Trigger("c")]).calls
    with pytest.raises(DecodeError):
        asked.answer([b"ok", NOW, *pairs])


@pytest.mark.parametrize(("options", "most"), [({"priority": True}, 2**52), ({"priority_boost": "4s"}, 2**52 // 4000)])
def test_a_priority_ranks_exactly(options: dict[str, Any], most: int) -> None:
    topic = calls(**options)
    for priority in (most, -most, 0):
        assert topic.pack_trigger(Trigger("k", priority=priority))
    for priority in (most + 1, -most - 1, True, 1.0):
        with pytest.raises(InvalidArgument, match="not an integer that ranks exactly"):
            topic.pack_trigger(Trigger("k", priority=priority))  # type: ignore[arg-type]


# -- going out --------------------------------------------------------------------------------------------------------


def test_what_one_call_left_is_asked_for_in_more_and_told_as_one() -> None:
    # Given five deliveries of which a call ended one
    asked = calls().settle(0, [Settlement("ack", delivery(b"k%d" % n)) for n in range(5)])
    with pytest.raises(Incomplete) as left:
        asked.answer([b"ok", NOW, 0, b"ok", *[b"left"] * 4])
    # Then the rest goes by twice as many a call, and the last of them says what is next
    rest = left.value.rest
    assert len(rest.calls) == 2
    answers = [Settled(["dead", "ok"], NOW + 5, NOW + 1), Settled(["lost", "ok"], NOW + 6, NOW + 2)]
    assert rest.join(answers) == Settled(["ok", "dead", "ok", "lost", "ok"], NOW + 6, NOW + 2)


def test_of_what_failed_as_a_whole_all_is_tried_again() -> None:
    one = delivery(merge=append(5))
    assert nack_items(one, ["x"], 9, "no") == Settlement("nack", one, 9, "no")
    assert nack_items(one, [], 9, "no") == Settlement("ack", one)
    assert Settlement("nack", one, 9, "no").args(3) == (3, "nack", 9, "no")


def test_every_reply_tells_the_servers_time() -> None:
    assert calls().time().answer([b"ok", NOW, 1, 2, 3, 4, 5, 6, 7]) == NOW


def test_what_a_slot_holds_beside_counters_is_not_counted() -> None:
    facts = {
        b"v": b"closed x", b"fence": b"7", b"paused": b"1 " + pack_pause("why"), b"rate": b"9",
        b"lease": b"30000", b"flushed": b"1",
        b"large": b"1", b"opened": b"y", b"batch": b"z", b"gone": b"\x93\x00\x00\x00", b"from:0/2": b"5",
    }  # fmt: skip
    head = [b"ok", NOW, 1, 2, 3, 4, 5, 6]
    groups = [0, 0, 2, b"g", 3, NOW, b"h", 4, NOW - 1]
    words = [word for pair in {**facts, b"acked": b"3"}.items() for word in pair]
    batch = calls(slots=2).stats()
    replies = [[*head, 0, *groups, *words], [*head, NOW, *groups, b"acked", b"4"]]
    stats = batch.join([call.read(reply) for call, reply in zip(batch.calls, replies, strict=True)])
    assert (stats.counters, stats.paused and stats.paused.reason) == ({"acked": 7}, "why")
    assert (stats.scheduled, stats.ready, stats.waiting, stats.blocked) == (2, 4, 6, 8)
    assert (stats.in_flight, stats.dead) == (10, 12)
    # And of slots of which one has something next, that is next
    assert stats.next_due is not None
    assert stats.next_due.timestamp() * 1000 == NOW
    # And a group that a change of slots has divided is one
    assert [(one.group, one.count) for one in stats.blocked_groups] == [("h", 8), ("g", 6)]
    assert stats.oldest_blocked == stats.blocked_groups[0]


def test_a_topic_is_as_late_as_the_slot_whose_server_says_so() -> None:
    # Given slots on servers whose clocks differ by an hour
    batch, hour = calls(slots=2).stats(), 3_600_000
    here = [b"ok", NOW, *[0] * 7, NOW - 5, 0, 0]
    there = [b"ok", NOW - hour, *[0] * 7, NOW - hour - 2, 1, 0]
    stats = batch.join([call.read(reply) for call, reply in zip(batch.calls, [here, there], strict=True)])
    # Then each due time is compared with the time of its own server
    assert (stats.lateness, stats.oldest_due, stats.sampled) == (timedelta(milliseconds=5), moment(NOW - 5), True)


@pytest.mark.parametrize("topic", [Topic, AioTopic])
def test_a_topic_with_one_type_delivers_what_was_sent(topic: Any) -> None:
    assert get_args(topic[int]) == get_args(topic[int, int]) == (int, int)
    assert get_args(topic[str, list[str]]) == (str, list[str])
    assert get_args(Delivery[int]) == (int,)
