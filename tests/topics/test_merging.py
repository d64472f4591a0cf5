"""How the payloads of one message become one."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest

from idemgate import Gate, Trigger, append, union
from idemgate.errors import DecodeError
from idemgate.testing import Clock
from idemgate.topics.merge import NAMES

pytestmark = pytest.mark.one_in(3)

NOON = datetime(2024, 5, 1, 12, tzinfo=UTC)


async def _merged(face: Any, merge: Any, payloads: list[Any], count: int | None = None, together: bool = True) -> Any:
    """The one delivery of these payloads, and whose triggers were accepted: `count` of them, or all."""
    topic = face.topic("t", merge=merge)
    if together:
        receipts = await topic.trigger_many([("k", payload) for payload in payloads])
    else:  # each call but the first reads a stored message
        receipts = [await topic.trigger("k", payload) for payload in payloads]
    (delivery,) = await topic.take(10)
    accepted = len(payloads) if count is None else count
    assert delivery.count == sum(receipt.accepted for receipt in receipts) == accepted
    assert (await topic.stats())["dropped"] == len(payloads) - accepted
    return delivery


CASES: list[tuple[str, list[Any], Any]] = [
    ("last", [1, None, {"a": [NOON]}], {"a": [NOON]}),
    ("first", [(1, 2), 3], (1, 2)),
    ("append", [1, "x", None, b"\x00\xff", 1.0], [1, "x", None, b"\x00\xff", 1.0]),
    ("append", [Decimal("1.10")], [Decimal("1.10")]),
    ("union", [[3, 1], (1, 2), {2}, []], [3, 1, 2]),
    ("union", [[1], [1.0], ["1"], [b"1"]], [1, 1.0, "1", b"1"]),
    ("union", [[], []], []),
    ("count", [object, None, {}], 3),
    ("sum", [1, -3, 7], 5),
    ("sum", [0.5, 1], 1.5),
    ("sum", [2**52, 2**52 - 1], 2**53 - 1),
    ("min", [3, 1.5, 2], 1.5),
    ("min", [1, 1.0], 1),
    ("max", [-3, -1.5, -2], -1.5),
    ("max", [2**53, 1], 2**53),
]


def test_each_policy_has_a_case() -> None:
    assert {merge for merge, _, _ in CASES} == {*NAMES}


@pytest.mark.parametrize("together", [True, False], ids=["in one call", "one by one"])
@pytest.mark.parametrize(("merge", "payloads", "expected"), CASES)
async def test_a_policy(face: Any, merge: str, payloads: list[Any], expected: Any, together: bool) -> None:
    payload = (await _merged(face, merge, payloads, together=together)).payload
    assert (payload, type(payload)) == (expected, type(expected))
    if isinstance(expected, list):
        assert [type(item) for item in payload] == [type(item) for item in expected]


@pytest.mark.parametrize("payloads", [[1.5, 0.5], [1, 1.0]])
async def test_a_sum_of_floats_is_a_float_also_where_it_is_whole(face: Any, payloads: list[Any]) -> None:
    payload = (await _merged(face, "sum", payloads)).payload
    assert (payload, type(payload)) == (2.0, float)


async def test_a_sum_beyond_what_counts_exactly_says_so_by_its_type(face: Any) -> None:
    payload = (await _merged(face, "sum", [2**53, 2**53])).payload
    assert (payload, type(payload)) == (2.0**54, float)


async def test_an_append_keeps_the_first_and_counts_the_rest(face: Any) -> None:
    delivery = await _merged(face, append(3), [1, 2, 3, 4, 5], count=3)
    assert (delivery.payload, delivery.dropped) == ([1, 2, 3], 2)


FULL: list[Any] = [
    (append(2), [1, 2, 3, 4], ["merged", "dropped", "dropped"], 2),
    (append(), [b"x" * 200_000] * 6, ["merged"] * 4 + ["dropped"], 1),
    (append(), [*[b"x" * 200_000] * 6, b"fits"], ["merged"] * 4 + ["dropped"] * 2, 2),
    (union(2), [[1, 2], [2], [3, 2], [3], []], ["merged", "merged", "dropped", "merged"], 2),
    ({"log": append(1)}, [{"log": 1}, {"log": 2}, {}], ["dropped", "merged"], 1),
    ({"log": append(1), "n": "count"}, [{"log": 1, "n": 1}, {"log": 2, "n": 1}, {"log": 3}], ["merged", "dropped"], 2),
    ({"log": append(1), "n": "first"}, [{"log": 1, "n": 1}, {"log": 2, "n": 2}, {"n": 3}], ["merged", "merged"], 1),
    ({"log": append(1), "n": "max"}, [{"log": n, "n": n} for n in (2, 3, 1, 3)], ["merged", "merged", "merged"], 3),
    ({"log": append(1), "n": "min"}, [{"log": n, "n": n} for n in (2, 1, 3)], ["merged", "merged"], 2),
    ({"log": append(1), "n": "last"}, [{"log": n, "n": n} for n in (1, 2, 2)], ["merged", "merged"], 2),
    ({"log": append(1), "n": "sum"}, [{"log": n, "n": 0} for n in (1, 2)], ["merged"], 1),
    ({"log": union(1), "n": "first"}, [{"log": [n], "n": n} for n in (1, 2, 1)], ["merged", "merged"], 1),
    ("last", [1, 2], ["merged"], 0),
]
PARTLY: list[Any] = [
    (union(2), [1], [2, 3]),
    ({"log": append(1), "n": "last"}, {"log": 1, "n": 1}, {"log": 2, "n": 2}),
    ({"log": append(1), "n": "last"}, {"log": 1, "n": 1}, {"log": 2, "new": 2}),
    ({"log": append(1), "n": "first"}, {"log": 1, "n": 1}, {"log": 2, "n": 1}),
]


async def test_a_full_message_is_logged_once_for_each_key_and_window(
    face: Any, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    topic = face.topic("t", merge=append(1), window="10m")

    def logged() -> list[str]:
        return [record.getMessage().partition(":")[0] for record in caplog.records]

    # When triggers of two keys find no room, some together and some alone
    await topic.trigger_many([("a", 1), ("a", 2), ("a", 3), ("b\n", 1), ("b\n", 2)])
    await topic.trigger("a", 4)
    # Then each key is logged once
    both = ["topic.message_full topic='t' key='a'", "topic.message_full topic='t' key='b\\n'"]
    assert logged() == both
    clock.advance("9m")
    await topic.trigger("a", 4)
    assert logged() == both
    # And again in the next window
    clock.advance("1m")
    await topic.trigger("a", 5)
    assert logged() == [*both, both[0]]


@pytest.mark.parametrize("together", [True, False], ids=["in one call", "one by one"])
@pytest.mark.parametrize("moved", [True, False], ids=["at a time", "plain"])
@pytest.mark.parametrize(("merge", "first", "second"), PARTLY)
async def test_items_without_room_are_logged_also_where_another_part_was_merged(
    face: Any, caplog: pytest.LogCaptureFixture, together: bool, moved: bool, merge: Any, first: Any, second: Any
) -> None:
    topic = face.topic("t", merge=merge, window="10m")
    # When a message has no room for an item of a trigger
    await topic.trigger("k", first)
    assert caplog.records == []
    late = Trigger("k", second, delay="1h" if moved else None)
    if together:
        (receipt,) = await topic.trigger_many([late])
    else:
        receipt = await topic.trigger("k", second, delay=late.delay)
    # Then this is logged, and the receipt of an accepted trigger says it
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "topic.message_full topic='t' key='k'"
    ]
    assert (receipt.items_dropped, (await topic.stats())["items_dropped"]) == (receipt.accepted, 1)


@pytest.mark.parametrize("edge", ["leading", "trailing"])
async def test_no_other_dropped_trigger_is_logged_as_one_of_a_full_message(
    face: Any, caplog: pytest.LogCaptureFixture, edge: Any
) -> None:
    topic = face.topic("t", merge="append" if edge == "leading" else "last", window="10m", edge=edge)
    await topic.trigger_many([Trigger("a", 1, version=2), Trigger("a", 2, version=1), Trigger("a", 3, version=3)])
    assert caplog.records == []


@pytest.mark.parametrize("together", [True, False], ids=["in one call", "one by one"])
@pytest.mark.parametrize(("merge", "payloads", "statuses", "items"), FULL)
async def test_a_trigger_for_which_there_is_no_room_is_dropped(
    face: Any, conserved: Any, together: bool, merge: Any, payloads: list[Any], statuses: list[str], items: int
) -> None:
    topic = face.topic("t", merge=merge, window="10s")
    # When a message has no room for some triggers, or for a part of them
    if together:
        receipts = await topic.trigger_many([("k", payload) for payload in payloads])
    else:
        receipts = [await topic.trigger("k", payload) for payload in payloads]
    # Then the receipt of a trigger of which nothing was merged says so
    assert [receipt.status for receipt in receipts] == ["scheduled", *statuses]
    assert [receipt.accepted for receipt in receipts] == [receipt.status != "dropped" for receipt in receipts]
    # And the topic counts the triggers that were accepted, those that were not, and all items without room
    stats, message = await topic.stats(), (await topic.peek("k")).pending
    dropped = statuses.count("dropped")
    assert (stats["accepted"], stats["dropped"], stats["items_dropped"]) == (len(payloads) - dropped, dropped, items)
    assert (message.count, message.dropped) == (len(payloads) - dropped, items)
    await conserved(topic, ["k"])


async def test_a_trigger_without_room_changes_nothing_else(face: Any, clock: Clock) -> None:
    topic = face.topic("t", merge=append(1), quiet="10s", max_delay="1m", priority=True)
    await topic.trigger("k", 1, priority=1, version=1)
    before = await topic.peek("k")
    clock.advance("5s")
    # When a trigger with options of its own has no room
    late = await topic.trigger("k", 2, event_id="e", version=2, group="g", priority=5, delay="1h")
    # Then it moves nothing, and its event and version may come again
    after = await topic.peek("k")
    assert (late.status, after.pending.dropped, after.due_at) == ("dropped", 1, before.due_at)
    for name in ("count", "first_ms", "last_ms", "due_ms", "reason", "version", "priority", "group", "payload"):
        assert getattr(after.pending, name) == getattr(before.pending, name), name
    clock.advance("5s")
    (delivery,) = await topic.take(10)
    await topic.ack(delivery)
    assert (await topic.trigger("k", 2, event_id="e", version=2)).status == "scheduled"


async def test_items_that_find_no_room_when_they_return_are_counted(face: Any, conserved: Any) -> None:
    topic = face.topic("t", merge=append(3), backoff=0)
    # Given a delivery of two items, behind which two wait
    await topic.trigger_many([("k", 1), ("k", 2)])
    (delivery,) = await topic.take(10)
    await topic.trigger_many([("k", 3), ("k", 4)])
    # When it fails
    await topic.nack(delivery)
    # Then the item beyond the cap is counted by the message and by the topic
    message = (await topic.peek("k")).pending
    assert (message.payload, message.dropped, (await topic.stats())["items_dropped"]) == ([1, 2, 3], 1, 1)
    await conserved(topic, ["k"])


async def test_a_dead_letter_stays_while_a_newer_message_has_no_room_for_both(face: Any, conserved: Any) -> None:
    topic = face.topic("t", merge=append(3), backoff=0)
    # Given a dead letter, and a message that returned with two items and took in one of the two behind it
    await topic.trigger("k", 0)
    assert await topic.bury(await topic.take(1)) == ["dead"]
    await topic.trigger_many([("k", 1), ("k", 2)])
    (delivery,) = await topic.take(1)
    await topic.trigger_many([("k", 3), ("k", 4)])
    await topic.nack(delivery)
    # When the dead letter is redriven
    assert await topic.dead.redrive() == 0
    # Then it stays, and no accepted trigger is dropped for it
    message, stats = (await topic.peek("k")).pending, await topic.stats()
    assert (message.payload, message.dropped, stats["items_dropped"], stats.dead) == ([1, 2, 3], 1, 1, 1)
    await conserved(topic, ["k"])
    # And it comes back when that message is done
    await topic.ack(await topic.take(1))
    assert await topic.dead.redrive() == 1
    assert [one.payload for one in await topic.take(1)] == [[0]]


async def test_a_dead_letter_that_has_dropped_items_takes_in_no_newer_one(face: Any) -> None:
    # Given a dead letter that dropped an item since it was too large, and a newer message of which both have room
    topic = face.topic("t", merge="append")
    receipts = await topic.trigger_many([("k", str(n) * 230_000) for n in range(5)])
    assert [one.status for one in receipts] == ["scheduled", "merged", "merged", "merged", "dropped"]
    assert await topic.bury(await topic.take(1)) == ["dead"]
    await topic.trigger("k", "new")
    # When it is redriven, then it stays: its list has an end, behind which nothing joins it
    assert await topic.dead.redrive() == 0
    assert [one.payload for one in await topic.take(1)] == [["new"]]


STAYING: list[Any] = [
    ({}, None),
    ({"key": "k*"}, None),
    ({"limit": 500}, None),
    ({}, "ids"),
]


@pytest.mark.parametrize("policy", ["append", "union", "fields", "last"])
@pytest.mark.parametrize("where", ["pending", "behind a delivery"])
@pytest.mark.parametrize(("selection", "by"), STAYING, ids=["all", "by key", "newest", "by id"])
async def test_letters_without_room_do_not_hold_up_the_others(
    face: Any, conserved: Any, policy: str, where: str, selection: Any, by: Any
) -> None:
    merge: Any = {"append": append(2), "union": union(2), "fields": {"a": append(2)}, "last": "last"}[policy]

    def pack(value: str) -> Any:
        return {"append": value, "union": [value], "fields": {"a": value}, "last": value}[policy]

    topic = face.topic("t", merge=merge, max_attempts=1)
    names = [f"k{number}" for number in range(120)]
    full, others = names[:60], names[60:]
    # Given dead letters, more than a call moves, and newer messages that are full, of the older half
    for old in ("old0", "old1"):
        await topic.trigger_many([(name, pack(old)) for name in names])
    assert len(await topic.nack(await topic.take(200))) == 120
    if where != "pending":
        await topic.trigger_many([(name, pack("runs")) for name in full])
        deliveries = await topic.take(200)
    for new in ("new0", "new1"):
        receipts = await topic.trigger_many([(name, pack(new)) for name in full])
        assert all(receipt.accepted for receipt in receipts)
    if by == "ids":
        selection = {"ids": [letter.id for letter in await topic.dead.list(200)]}
    # When they are redriven
    expected = 120 if policy == "last" else 60
    assert await topic.dead.redrive(**selection) == expected
    # Then those without room stay, and nothing is lost
    stats = await topic.stats()
    assert (stats.dead, stats["items_dropped"], stats["redriven"]) == (120 - expected, 0, expected)
    if where != "pending":
        await topic.ack(deliveries)
    taken = await topic.take(200)
    newest = {"append": ["new0", "new1"], "union": ["new0", "new1"], "fields": {"a": ["new0", "new1"]}, "last": "new1"}
    oldest = {"append": ["old0", "old1"], "union": ["old0", "old1"], "fields": {"a": ["old0", "old1"]}, "last": "old1"}
    assert {one.key: one.payload for one in taken} == {
        **dict.fromkeys(full, newest[policy]), **dict.fromkeys(others, oldest[policy])
    }  # fmt: skip
    await conserved(topic, names)
    # And later they come back, too
    await topic.ack(taken)
    assert await topic.dead.redrive(**selection) == 120 - expected
    assert (await topic.stats()).dead == 0
    await conserved(topic, names)


async def test_a_union_keeps_the_first_and_counts_the_rest(face: Any) -> None:
    # Given a cap of three items, of which one payload alone has more
    delivery = await _merged(face, union(3), [[1, 2], [2, 3, 4], [1, 4]])
    assert (delivery.payload, delivery.dropped) == ([1, 2, 3], 2)


async def test_one_payload_can_fill_a_union(face: Any) -> None:
    delivery = await _merged(face, union(3), [list(range(10))])
    assert (delivery.payload, delivery.dropped) == ([0, 1, 2], 7)


async def test_an_append_is_bounded_in_bytes(face: Any) -> None:
    # Given ten payloads of 200 kB: more than a message of an append may hold
    delivery = await _merged(face, append(), [bytes([n]) * 200_000 for n in range(10)], count=5)
    assert [item[0] for item in delivery.payload] == [0, 1, 2, 3, 4]
    assert delivery.dropped == 5


async def test_each_field_has_its_policy(face: Any) -> None:
    merge = {"n": "count", "total": "sum", "tags": "union", "log": append(2), "best": "max", "*": "first"}
    payloads = [
        {"n": 0, "total": 5, "tags": ["a"], "log": "x", "best": 1, "who": "ann"},
        {"n": 0, "total": 6, "tags": ["b", "a"], "log": "y", "who": "bob", "extra": True},
        {"n": 0, "log": "z", "best": 9},
    ]
    delivery = await _merged(face, merge, payloads)
    assert delivery.payload == {
        "n": 3, "total": 11, "tags": ["a", "b"], "log": ["x", "y"], "best": 9, "who": "ann", "extra": True,
    }  # fmt: skip
    assert delivery.dropped == 1


async def test_a_field_that_is_not_named_is_the_last(face: Any) -> None:
    assert (await _merged(face, {"n": "sum"}, [{"n": 1, "x": 1}, {"x": 2}])).payload == {"n": 1, "x": 2}


@pytest.mark.parametrize("payloads", [[{}, {}], [{}, {"n": 1}], [{"n": 1}, {}]])
async def test_payloads_may_lack_fields(face: Any, payloads: list[dict[str, int]]) -> None:
    assert (await _merged(face, {"n": "sum"}, payloads)).payload == {
        name: 1 for payload in payloads for name in payload
    }


async def test_field_names_are_any_text(face: Any) -> None:
    names = {"1": 1, "op": 2, "*": 3, "ü\n\x00": 4, "": 5}
    assert (await _merged(face, {"1": "sum"}, [names, names])).payload == names | {"1": 2}


async def test_any_key_is_kept_as_it_is(face: Any) -> None:
    topic = face.topic("t", slots=4)
    keys = ["a:b{c}", "ü", "x" * 5000, 7, b"\xff\x00", " "]
    await topic.trigger_many([(key, n) for n, key in enumerate(keys)])
    # Then deliveries name them as text, and in raw bytes
    taken = {one.payload: one for one in await topic.take(100)}
    assert [taken[n].key for n in range(6)] == ["a:b{c}", "ü", "x" * 5000, "7", "\\xff\x00", " "]
    assert taken[4].raw_key == b"\xff\x00"
    assert await topic.ack(list(taken.values())) == ["ok"] * 6


async def test_a_payload_at_the_limit_fits_and_comes_back(face: Any) -> None:
    payload = "x" * (262_144 - 6)
    assert (await _merged(face, "last", [payload])).payload == payload


async def test_a_payload_above_the_limit_raises_when_it_is_read(
    face: Any, url: str, namespace: str, clock: Any
) -> None:
    # Given a payload that a gate with a larger limit wrote
    with Gate(url, namespace=namespace, clock=clock, max_bytes=1_000_000) as other:
        other.topic("t").trigger("k", "x" * 500_000)
    # When it is read, then the error says why; the other facts of the message can be read
    pending = (await face.topic("t").peek("k")).pending
    with pytest.raises(DecodeError, match="the limit is 262,144"):
        _ = pending.payload
    assert (pending.count, pending.attempts) == (1, 0)
