"""Partial success: of a merged payload only what failed is tried again."""

from __future__ import annotations

import itertools
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from idemgate import Gate, InvalidArgument, Trigger, append, union
from idemgate.testing import Clock
from tests.for_each import for_each

NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)
BY_FIELD = {"tags": "union", "log": "append", "total": "sum", "*": "last"}


async def _one(topic: Any, *payloads: Any) -> Any:
    """The one delivery of these payloads."""
    await topic.trigger_many([("k", payload) for payload in payloads])
    (delivery,) = await topic.take(10)
    return delivery


async def test_only_the_named_items_of_an_append_come_back(face: Any, clock: Clock, conserved: Any) -> None:
    topic = face.topic("t", merge="append", backoff="10s")
    # Given a delivery of five triggers
    first = await _one(topic, "a", "b", "c", "d", "e")
    # When two of its items failed
    assert await topic.nack(first, items=["d", "b"], reason="no") == "ok"
    # Then these come back after the backoff, in their order, as the second attempt of two triggers
    assert await topic.take(10) == []
    clock.advance("10s")
    (second,) = await topic.take(10)
    assert (second.payload, second.count, second.attempt) == (["b", "d"], 2, 2)
    assert (second.reason, second.failure) == ("retry", "no")
    assert second.id != first.id
    # And the others are done
    stats = await topic.stats()
    assert (stats["nacked"], stats["partial"], stats["items_failed"], stats["acked_triggers"]) == (1, 1, 2, 3)
    await conserved(topic, ["k"])
    assert await topic.ack(second) == "ok"
    stats = await topic.stats()
    assert (stats["acked_triggers"], stats.pending, stats.in_flight) == (5, 0, 0)


async def test_the_named_items_of_a_union_come_back_and_all_triggers_stay_counted(face: Any, conserved: Any) -> None:
    topic = face.topic("t", merge="union", backoff=0)
    # Given three triggers that share items
    delivery = await _one(topic, ["a", "b"], ["b", "c"], ["c"])
    assert await topic.nack(delivery, items={"c", "a"}) == "ok"
    # Then it is not known whose the items were: none of the triggers is done
    (again,) = await topic.take(10)
    assert (again.payload, again.count) == (["a", "c"], 3)
    # And it is other work than before, of as many triggers
    assert again.id != delivery.id
    assert (await topic.stats())["acked_triggers"] == 0
    await conserved(topic, ["k"])
    # Until all items are
    await topic.ack(again)
    assert (await topic.stats())["acked_triggers"] == 3


@pytest.mark.parametrize(
    ("items", "returned", "n"),
    [
        (["total"], {"total": 3}, 1),
        (["tags", "name"], {"tags": ["a", "b"], "name": "new"}, 3),
        ({"tags": ["b"], "log": [2]}, {"tags": ["b"], "log": [2]}, 2),
        ({"log": [], "total": ...}, {"total": 3}, 1),
        ({"log": ..., "tags": ()}, {"log": [1, 2]}, 2),
    ],
)
async def test_named_fields_come_back(face: Any, items: Any, returned: Any, n: int) -> None:
    topic = face.topic("t", merge=BY_FIELD, backoff=0)
    delivery = await _one(
        topic,
        {"tags": ["a"], "log": 1, "total": 1, "name": "old"},
        {"tags": ["b"], "log": 2, "total": 2, "name": "new"},
    )
    assert await topic.nack(delivery, items=items) == "ok"
    (again,) = await topic.take(10)
    assert (again.payload, again.count, again.attempt) == (returned, 2, 2)
    assert (await topic.stats())["items_failed"] == n


@pytest.mark.parametrize(
    ("merge", "items"),
    [("append", [1, 2]), ("union", [2, 1]), ({"a": "last"}, ["a"]), ({"a": "append"}, {"a": [[1], [2]]})],
)
async def test_all_of_them_is_a_nack_and_none_of_them_an_ack(face: Any, merge: Any, items: Any) -> None:
    payloads: dict[Any, Any] = {"append": [1, 2], "union": [[1], [2]]}
    topic = face.topic("t", merge=merge, backoff=0)
    first = await _one(topic, *(payloads.get(merge) if isinstance(merge, str) else [{"a": [1]}, {"a": [2]}]))
    assert await topic.nack(first, items=items) == "ok"
    (second,) = await topic.take(10)
    assert (second.payload, second.count, second.id) == (first.payload, 2, first.id)
    stats = await topic.stats()
    assert (stats["nacked"], stats["partial"]) == (1, 0)
    # And when none failed, all is done
    assert await topic.nack(second, items=[] if isinstance(merge, str) else {}) == "ok"
    stats = await topic.stats()
    assert (stats["acked"], stats["acked_triggers"], stats.pending) == (1, 2, 0)


async def test_items_are_found_by_what_they_are(face: Any) -> None:
    topic = face.topic("t", merge="append", backoff=0)
    # Given items that look alike, and some twice
    items = [1, 1.0, True, "1", {"a": 1, "b": {1, 2}}, 7, 7, 7, (NOON,), [NOON], None]
    delivery = await _one(topic, *items)
    # When some are named, built anew and in another order
    await topic.nack(delivery, items=[None, (NOON,), 7, {"b": {2, 1}, "a": 1}, 7, 1.0])
    (again,) = await topic.take(10)
    # Then those are meant, and of equal ones as many as were named
    expected = [1.0, {"a": 1, "b": {1, 2}}, 7, 7, (NOON,), None]
    assert again.payload == expected
    assert [type(item) for item in again.payload] == [type(item) for item in expected]


@for_each(
    ("merge", "payload", "items", "said"),
    [
        ("append", 1, [2], "items=2: not an item of this payload"),
        ("append", 1, [1, 1], "items=1: not an item of this payload"),
        ("append", 1, [1.0], "items=1.0: not an item of this payload"),
        ("append", "x", "x", "items='x': not a list, tuple or set"),
        ("append", 1, 1, "items=1: not a list, tuple or set"),
        ("append", 1, {1: 1}, "items={1: 1}: not a list, tuple or set"),
        ("append", 1, [object], "items"),
        ("union", [1], [[1]], "items=\\[1\\]: not an item of this payload"),
        ({"a": "append"}, {"a": 1}, ["b"], "items='b': not a field of this payload. It has a"),
        ({"a": "append"}, {"a": 1}, {"a": [2]}, "items\\['a'\\]=2: not an item"),
        ({"a": "append"}, {"a": 1}, "a", "neither names of fields nor a mapping"),
        ({"a": "append"}, {"a": 1}, [["a"]], "not a field"),
        ({"a": "sum"}, {"a": 1}, {"a": 1}, "keeps no items"),
        *[(op, 1, items, f'merge="{op}" keeps no items') for op in ("last", "first", "sum") for items in ([1], [])],
        *[(op, 1, [1], f'merge="{op}" keeps no items') for op in ("count", "min", "max")],
    ],
)
async def test_what_is_no_item_is_refused_before_anything_is_written(
    face: Any, everything: Any, merge: Any, payload: Any, items: Any, said: str
) -> None:
    topic = face.topic(f"t{len(face.gate.topics)}", merge=merge)
    delivery = await _one(topic, payload)
    before = everything()
    with pytest.raises(InvalidArgument, match=said):
        await topic.nack(delivery, items=items)
    assert everything() == before


async def test_items_of_several_deliveries_are_refused(face: Any, everything: Any) -> None:
    topic = face.topic("t", merge="append")
    delivery = await _one(topic, 1)
    before = everything()
    with pytest.raises(InvalidArgument, match="those of one delivery"):
        await topic.nack([delivery], items=[1])
    assert everything() == before


async def test_what_was_triggered_meanwhile_joins_what_comes_back(face: Any, clock: Clock, conserved: Any) -> None:
    topic = face.topic("t", merge=union(4), backoff="5s")
    delivery = await _one(topic, ["a", "b", "c"])
    clock.advance("1s")
    await topic.trigger("k", ["d", "a"])
    # When one failed, and its item is triggered again before the retry
    await topic.nack(delivery, items=["c"])
    await topic.trigger("k", ["c", "e", "f"])
    clock.advance("5s")
    # Then all of it is one message, by the ordinary rule
    (again,) = await topic.take(10)
    assert (again.payload, again.dropped, again.attempt, again.count) == (["c", "d", "a", "e"], 1, 1, 3)
    assert again.id != delivery.id
    await conserved(topic, ["k"])


async def test_there_is_room_again_for_what_comes_after(face: Any, conserved: Any) -> None:
    topic = face.topic("t", merge=append(3), backoff=0)
    # Given a full message that had to drop two
    delivery = await _one(topic, 1, 2, 3, 4, 5)
    assert (delivery.payload, delivery.dropped, delivery.count) == ([1, 2, 3], 2, 3)
    await topic.nack(delivery, items=[2])
    # Then what it dropped was told with the attempt that is over, and newer items fit in
    await topic.trigger("k", 6)
    (again,) = await topic.take(10)
    assert (again.payload, again.dropped, again.count) == ([2, 6], 0, 2)
    assert (await topic.stats())["acked_triggers"] == 2
    await conserved(topic, ["k"])


async def test_after_the_last_attempt_only_what_failed_is_dead(face: Any, conserved: Any) -> None:
    topic = face.topic("t", merge="append", max_attempts=2, backoff=0)
    delivery = await _one(topic, 1, 2, 3)
    assert await topic.nack(delivery, items=[1, 3]) == "ok"
    (second,) = await topic.take(10)
    # When one of them fails for the last time
    assert await topic.nack(second, items=[3], reason="never") == "dead"
    # Then that is the dead letter
    (letter,) = await topic.dead.list()
    assert (letter.payload, letter.count, letter.attempts, letter.reason) == ([3], 1, 2, "never")
    stats = await topic.stats()
    assert (stats["buried"], stats["buried_triggers"], stats["acked_triggers"]) == (1, 1, 2)
    await conserved(topic, ["k"])
    # And it is what a redrive brings
    assert await topic.dead.redrive() == 1
    (third,) = await topic.take(10)
    assert (third.payload, third.attempt, third.reason) == ([3], 1, "redrive")


async def test_of_a_cancelled_delivery_nothing_comes_back(face: Any, conserved: Any) -> None:
    topic = face.topic("t", merge="append", backoff=0)
    delivery = await _one(topic, 1, 2, 3)
    assert await topic.cancel("k") == "in_flight"
    assert await topic.nack(delivery, items=[2]) == "cancelled"
    stats = await topic.stats()
    assert (stats["cancelled_triggers"], stats["acked_triggers"], stats.pending) == (1, 2, 0)
    await conserved(topic, ["k"])


async def test_a_former_owner_changes_nothing(face: Any, clock: Clock, everything: Any) -> None:
    topic = face.topic("t", merge="append", backoff=0, lease="30s")
    former = await _one(topic, 1, 2)
    clock.advance("30s")
    (owner,) = await topic.take(10)
    before = everything()
    assert await topic.nack(former, items=[1]) == "lost"
    # Only the count of what was lost rose, the history tells it, and the answer is remembered
    after = everything()
    changed = {key.rpartition(b":")[2] for key in after if after[key] != before.get(key)}
    assert changed <= {b"meta", b"history", b"replies0", b"replies1"}
    assert await topic.ack(owner) == "ok"


async def test_a_group_waits_for_what_comes_back(face: Any, clock: Clock) -> None:
    topic = face.topic("t", merge="append", backoff="5s")
    await topic.trigger_many([Trigger("a", 1, group="g"), Trigger("a", 2, group="g"), Trigger("b", 3, group="g")])
    (first,) = await topic.take(10)
    await topic.nack(first, items=[2])
    # Then the other message of the group is handed out only when the first is done
    assert await topic.take(10) == []
    clock.advance("5s")
    (again,) = await topic.take(10)
    assert (again.key, again.payload) == ("a", [2])
    await topic.ack(again)
    assert [one.payload for one in await topic.take(10)] == [[3]]


async def test_a_large_payload_comes_back_as_it_was(face: Any) -> None:
    topic = face.topic("t", merge={"log": append(2000), "n": "sum", "x": "min"}, backoff=0)
    blobs = [bytes([n % 256]) * 300 + str(n).encode() for n in range(300)]
    await topic.trigger_many([("k", {"log": blob, "n": 2**45 + 0.5, "x": -n}) for n, blob in enumerate(blobs)])
    (delivery,) = await topic.take(1)
    await topic.nack(delivery, items={"log": blobs[1::2], "n": ..., "x": ...})
    (again,) = await topic.take(1)
    assert again.payload == {"log": blobs[1::2], "n": delivery.payload["n"], "x": -299}


# -- conservation, whatever happens -----------------------------------------------------------------------------------

_numbers = itertools.count()
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("trigger"), st.lists(st.integers(0, 5), min_size=1, max_size=3)),
        st.tuples(st.just("fail"), st.integers(0, 63)),
        st.tuples(st.just("fail"), st.integers(0, 63)),
        st.tuples(st.just("lapse"), st.just(0)),
        st.tuples(st.just("redrive"), st.just(0)),
    ),
    max_size=25,
)


class Walk:
    """Any sequence of triggers and partial failures; what the handler has done is written down."""

    def __init__(self, gate: Gate, clock: Clock, merge: str) -> None:
        self.clock = clock
        self.topic = gate.topic(f"t{next(_numbers)}", merge=merge, backoff=0, max_attempts=3, lease="10s")
        self.single = merge == "append"
        self.given: list[int] = []
        self.done: list[int] = []

    def trigger(self, items: list[int]) -> None:
        self.given += items
        self.topic.trigger_many([("k", item) for item in items] if self.single else [("k", items)])

    def fail(self, mask: int) -> None:
        """Takes what there is; which of its items fail is said by the bits of a number."""
        for delivery in self.topic.take(1):
            bits = [bool(mask >> place % 6 & 1) for place in range(len(delivery.payload))]
            failed = [item for item, bad in zip(delivery.payload, bits, strict=True) if bad]
            self.done += [item for item, bad in zip(delivery.payload, bits, strict=True) if not bad]
            assert self.topic.nack(delivery, items=failed) in ("ok", "dead")

    def lapse(self, _: int) -> None:
        self.topic.take(1)
        self.clock.advance("10s")

    def redrive(self, _: int) -> None:
        self.topic.dead.redrive()

    def held(self) -> list[int]:
        """The items that are to be tried, or dead."""
        peek = self.topic.peek("k")
        messages = [*filter(None, (peek.pending, peek.in_flight)), *self.topic.dead.list()]
        return [item for message in messages for item in message.payload]

    def check(self) -> None:
        stats = self.topic.stats()
        peek = self.topic.peek("k")
        messages = [*filter(None, (peek.pending, peek.in_flight)), *self.topic.dead.list()]
        assert stats["accepted"] == stats["acked_triggers"] + sum(one.count for one in messages)
        if self.single:
            # Every item is in one place, as often as it was given
            assert Counter(self.given) == Counter(self.done) + Counter(self.held())
            assert all(one.count == len(one.payload) for one in messages)
        else:
            # Each item is done or held, and nothing else is; where it was done and came back, it was given again
            assert set(self.given) == set(self.done) | set(self.held())
            assert not Counter(self.done) - Counter(self.given)


@pytest.mark.parametrize("merge", ["append", "union"])
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_no_item_is_lost_or_doubled(gate: Gate, clock: Clock, merge: str, steps: list[Any]) -> None:
    walk = Walk(gate, clock, merge)
    for verb, argument in steps:
        getattr(walk, verb)(argument)
        walk.check()
    # And when everything succeeds at last, each item was done
    while walk.held():
        walk.clock.advance("10s")
        walk.redrive(0)
        walk.fail(0)
    walk.check()
