"""Large messages: one script call goes through so many bytes, and what is left goes with the next, in its order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from idemgate import Gate, Topic, Trigger
from idemgate.core.calls import MAX_CALL_BYTES, Call, split_batches
from idemgate.errors import UnexpectedData
from idemgate.testing import Clock
from idemgate.topics.deliveries import Settlement
from idemgate.topics.messages import Delivery, Forward, Taken
from idemgate.topics.triggers import _expand
from tests.for_each import for_each
from tests.topics.conftest import scripts_run

pytestmark = pytest.mark.one_in(3)

Dumps = Callable[[], dict[bytes, bytes]]
LARGE = "x" * 50_000
"""Two of them are less than `MAX_CALL_BYTES`, three are more."""


def taken(topic: Topic, n: int = 100) -> Taken:
    """What one script call takes."""
    calls = topic.open()
    return topic.definition.context.link.run(calls.take(0, n))


def keys_of(deliveries: list[Delivery[Any]]) -> list[str]:
    return [one.key for one in deliveries]


async def put(topic: Any, clock: Clock, n: int, payload: object = LARGE, **more: Any) -> list[str]:
    """Messages that are due one after the other."""
    for number in range(n):
        await topic.trigger(f"k{number}", payload, **more)
        clock.advance("1ms")
    return [f"k{number}" for number in range(n)]


# -- what is cut up here ----------------------------------------------------------------------------------------------


@for_each(
    ("sizes", "lengths"),
    [
        ([], []),
        ([1] * 10, [4, 4, 2]),
        ([MAX_CALL_BYTES], [1]),
        ([MAX_CALL_BYTES, 1], [1, 1]),
        ([1, MAX_CALL_BYTES - 1, 1], [2, 1]),
        ([3 * MAX_CALL_BYTES, 1, 1, 3 * MAX_CALL_BYTES], [1, 2, 1]),
        ([1] * 6 + [MAX_CALL_BYTES], [4, 2, 1]),
    ],
)
def test_a_portion_is_a_number_and_a_number_of_bytes_or_one(sizes: list[int], lengths: list[int]) -> None:
    found = split_batches(list(enumerate(sizes)), lambda entry: entry[1], 4)
    assert [len(part) for part in found] == lengths
    assert [entry for part in found for entry in part] == list(enumerate(sizes))


@pytest.mark.parametrize("slots", [1, 2])
async def test_many_calls_carry_large_triggers_and_all_answers_are_in_order(face: Any, gate: Gate, slots: int) -> None:
    triggers = [Trigger(f"k{n}", LARGE if n % 2 else "", delay=n) for n in range(40)]
    topic = gate.topic("t", slots=slots)
    # Given what would be 1 MB in a call: no call has more than its share
    for call in topic.open().trigger_many(triggers).calls:
        assert sum(len(arg) for arg in call.args if isinstance(arg, bytes)) < MAX_CALL_BYTES + 10_000
    # Then each trigger has its own receipt
    receipts = await face.topic("t", slots=slots).trigger_many(triggers)
    assert [one.due_ms - receipts[0].due_ms for one in receipts] == [n * 1000 for n in range(40)]


@pytest.mark.parametrize("slots", [1, 2])
async def test_ends_and_heartbeats_of_large_deliveries_go_in_many_calls(face: Any, gate: Gate, slots: int) -> None:
    topic = face.topic("t", slots=slots, max_attempts=1)
    await topic.trigger_many([(n, LARGE) for n in range(12)])
    deliveries = await topic.take(12)
    assert {one.size > 50_000 for one in deliveries} == {True}
    assert len(gate.topic("t").open().extend_many(deliveries).calls) >= 6
    assert await topic.extend(deliveries) == ["ok"] * 12
    assert await topic.nack(deliveries[1:4]) == ["dead"] * 3
    assert await topic.ack(deliveries) == ["ok", "lost", "lost", "lost"] + ["ok"] * 8


# -- what a script cuts short -----------------------------------------------------------------------------------------


async def test_a_take_hands_out_so_many_bytes_and_says_that_there_is_more(gate: Gate, clock: Clock) -> None:
    topic = gate.topic("t")
    keys = await put(topic.aio, clock, 5)
    # When five that are due have twice the bytes of a call
    found = [taken(topic) for _ in range(3)]
    # Then they come two by two, in their order, and each call tells whether to ask at once again
    assert [keys_of(one.deliveries) for one in found] == [keys[:2], keys[2:4], keys[4:]]
    assert [one.more for one in found] == [True, True, False]


async def test_one_that_is_larger_than_that_goes_alone(gate: Gate, clock: Clock) -> None:
    # Given one that was appended to until it has more than the bytes of a call, between two small ones
    topic = gate.topic("t", merge="append", window="1s")
    await topic.aio.trigger("small")
    clock.advance("1ms")
    await topic.aio.trigger_many([("large", LARGE)] * 5)
    clock.advance("1ms")
    await topic.aio.trigger("last")
    clock.advance("1s")
    found = [taken(topic) for _ in range(3)]
    # Then it waits for its own call, and nothing waits for longer
    assert [keys_of(one.deliveries) for one in found] == [["small"], ["large"], ["last"]]
    assert found[1].deliveries[0].payload == [LARGE] * 5


async def test_take_asks_again_until_it_has_so_many(face: Any, clock: Clock) -> None:
    topic = face.topic("t")
    keys = await put(topic, clock, 7)
    assert keys_of(await topic.take(6)) == keys[:6]
    assert keys_of(await topic.take(6)) == keys[6:]
    assert await topic.take(6) == []


async def test_a_turn_ends_and_takes_by_bytes(gate: Gate, clock: Clock) -> None:
    topic, run = gate.topic("t"), gate.context.link.run
    keys = await put(topic.aio, clock, 4)
    first = taken(topic).deliveries
    turned = run(topic.open().settle_and_take(0, [Settlement("ack", one) for one in first], 100))
    assert turned.settled.outcomes == ["ok", "ok"]
    assert keys_of(turned.taken.deliveries) == keys[2:]


async def test_what_lapses_comes_back_by_bytes(gate: Gate, clock: Clock) -> None:
    # Given five large deliveries whose leases end
    topic = gate.topic("t", lease="1s")
    keys = await put(topic.aio, clock, 5)
    topic.take(5)
    clock.advance("1s")
    # When they are swept, which leaves no room to hand one out beside them
    found = [taken(topic) for _ in range(6)]
    # Then each call does its share, and all come back
    assert [one.lapsed for one in found] == [2, 2, 1, 0, 0, 0]
    assert [len(one.deliveries) for one in found] == [0, 0, 1, 2, 2, 0]
    assert sorted(key for one in found for key in keys_of(one.deliveries)) == keys
    assert {one.attempt for each in found for one in each.deliveries} == {2}


async def test_what_does_not_go_beside_what_lapsed_goes_next(gate: Gate, clock: Clock) -> None:
    # Given a large delivery whose lease has ended, and one that is due and has no room beside it
    topic = gate.topic("t", lease="1s")
    await topic.aio.trigger("lapsed", LARGE)
    topic.take(1)
    await topic.aio.trigger("due", 2 * LARGE)
    clock.advance("1s")
    found = [taken(topic) for _ in range(3)]
    # Then each goes in its own call, and nothing is asked of the one that has no room
    assert [(one.lapsed, keys_of(one.deliveries), one.more) for one in found] == [
        (1, [], True),
        (0, ["due"], True),
        (0, ["lapsed"], False),
    ]


async def test_the_most_urgent_goes_first_also_of_large_ones(gate: Gate, clock: Clock) -> None:
    topic = gate.topic("t", priority=True)
    for number in range(8):
        await topic.aio.trigger(f"k{number}", LARGE, priority=number)
    assert keys_of(taken(topic).deliveries) == ["k7", "k6"]
    assert keys_of(topic.take(6)) == [f"k{number}" for number in reversed(range(6))]


async def test_a_large_flushed_message_keeps_its_payload(gate: Gate, clock: Clock) -> None:
    # Given messages that are due at another time than was written into them
    topic = gate.topic("t", priority=True, window="1h")
    keys = await put(topic.aio, clock, 3)
    assert topic.flush() == 3
    assert [(one.key, one.reason, one.payload == LARGE) for one in topic.take(3)] == [
        (key, "flush", True) for key in keys
    ]


@pytest.mark.parametrize(("number", "size", "calls"), [(300, 10, 3), (6, 60_000, 3), (3, 200_000, 3)])
async def test_a_flush_goes_through_what_waits_behind_deliveries_in_parts(
    face: Any, raw: Any, number: int, size: int, calls: int
) -> None:
    # Given many deliveries, or large messages, and behind each of them another
    topic = face.topic("t", window="1h", merge="append", slots=1)
    keys = [f"k{n}" for n in range(number)]
    await topic.trigger_many([Trigger(key, 0, delay=0) for key in keys])
    running = await everything(topic)
    payload = {key: key * (size // len(key)) for key in keys}
    await topic.trigger_many([(key, payload[key]) for key in keys])
    # When all are flushed
    before = scripts_run(raw)
    assert await topic.flush() == number
    # Then no call went through all of them, and none is missing, nor anything of it
    assert scripts_run(raw) - before >= calls
    assert await topic.flush() == 0
    await topic.ack(running)
    found = {one.key: (one.payload, one.reason) for one in await everything(topic)}
    assert found == {key: ([payload[key]], "flush") for key in keys}


async def test_a_flush_finds_what_was_behind_deliveries_that_end_between_its_parts(gate: Gate, clock: Clock) -> None:
    # Given many deliveries, and behind each another message for later
    topic, keys = gate.topic("t", window="1h", slots=1, lease="2h"), [f"k{n}" for n in range(1500)]
    topic.trigger_many([Trigger(key, 0, delay=0) for key in keys])
    running = await everything(topic.aio)
    topic.trigger_many([(key, 1) for key in keys])
    # When some end between two parts of a flush of all
    waiting, moved = [topic.open().flush_slot(0)], 0
    while waiting:
        done, more = gate.context.link.run(waiting.pop())
        moved += done
        waiting += more
        topic.ack(running[:200])
        del running[:200]
    # Then each is due now
    assert moved == 1500
    topic.ack(running)
    assert {one.key for one in await everything(topic.aio)} == set(keys)


async def everything(topic: Any) -> list[Any]:
    found: list[Any] = []
    while more := await topic.take(100):
        found += more
    return found


async def test_what_waits_behind_its_group_is_passed_over_by_bytes(gate: Gate, clock: Clock) -> None:
    # Given six large ones of a group of which one may run, and one of no group behind them
    topic = gate.topic("t")
    keys = await put(topic.aio, clock, 6, group="g")
    await topic.aio.trigger("free", group="other")
    one, free = topic.take(2)
    assert (one.key, free.key) == (keys[0], "free")
    # Then each goes when the one before has ended
    order = [one.key]
    while topic.ack(one) and (more := topic.take(5)):
        (one,) = more
        order.append(one.key)
    assert order == keys


@pytest.mark.parametrize("kind", ["list", "stream"])
async def test_large_messages_are_sent_on_a_few_a_call(
    face: Any, gate: Gate, clock: Clock, raw: Any, kind: Any
) -> None:
    topic = gate.topic("t")
    keys = await put(topic.aio, clock, 5)
    first = gate.context.link.run(topic.open().forward(0, Forward(kind, None, 0), 100))
    assert (first.sent, first.more) == (2, True)
    topic.forward(kind)
    assert await face.topic("t").forward_once() == 3
    (box,) = topic.forward_targets()
    entries = raw.lrange(box, 0, -1) if kind == "list" else [fields for _, fields in raw.xrange(box)]
    assert keys_of([topic.decode_forwarded(entry) for entry in entries]) == keys


@pytest.mark.parametrize("verb", ["redrive", "delete"])
@pytest.mark.parametrize("named", [False, True])
async def test_large_letters_are_moved_a_few_a_call(
    face: Any, gate: Gate, clock: Clock, verb: str, named: bool
) -> None:
    topic = face.topic("t")
    await put(topic, clock, 7)
    await topic.bury(await topic.take(7))
    letters = await topic.dead.list()
    assert len(letters) == 7
    ids = [one.id for one in letters]
    first = gate.context.link.run(
        gate.topic("t").open().take_dead(0, verb, [one.partition("-")[2] for one in ids] if named else [])
    )
    assert (first.taken, first.left, first.seen) == (2, 5, 2)
    assert await getattr(topic.dead, verb)(ids if named else None) == 5
    assert len(await topic.take(10)) == (7 if verb == "redrive" else 0)


async def test_letters_of_which_a_call_reads_one_are_all_listed(face: Any, clock: Clock) -> None:
    # Given letters of which one is as large as a call may read
    topic = face.topic("t")
    await put(topic, clock, 3, "x" * 140_000)
    await topic.bury(await topic.take(3))
    # Then each is in the list, which several calls read
    assert sorted(one.key for one in await topic.dead.list()) == ["k0", "k1", "k2"]


async def test_large_letters_beyond_the_cap_are_discarded(face: Any, clock: Clock) -> None:
    topic = face.topic("t", max_dead_letters=2)
    await put(topic, clock, 9)
    for one in await topic.take(9):
        await topic.bury(one)
    assert (await topic.stats()).dead == 2
    assert (await topic.stats())["expired"] == 7


async def test_large_messages_are_moved_to_other_slots(face: Any, clock: Clock) -> None:
    topic = face.topic("t", priority=True, slots=1)
    keys = await put(topic, clock, 9)
    held = await topic.take(2)
    assert (await topic.reshard(2)).moved >= 9
    assert await topic.ack(held) == ["ok", "ok"]
    assert sorted(keys_of(await topic.take(9))) == keys[2:]


SPOILT = {
    "cut": lambda packed: packed[:30],
    "unknown flags": lambda packed: b"\x04" + packed[1:],
    "unknown reason": lambda packed: packed[:1] + b"\x0a" + packed[2:],
    "an extension of another length": lambda packed: b"\x02" + packed[1:],
}


@pytest.mark.damages("undecodable")
@pytest.mark.parametrize("how", SPOILT)
async def test_a_large_message_with_a_corrupt_header_is_refused(
    face: Any, raw: Any, everything: Dumps, namespace: str, how: str
) -> None:
    topic, name = face.topic("t", priority=True), f"ig2:{{{namespace}:topic:t:0/1}}:messages"
    await topic.trigger("k", "x" * 70_000)
    raw.hset(name, "k", SPOILT[how](raw.hget(name, "k")))
    before = everything()
    with pytest.raises(UnexpectedData, match="holds corrupt data under k"):
        await topic.take(1)
    assert everything() == before


# -- what a call meets ------------------------------------------------------------------------------------------------


def codes(gate: Gate, call: Call[Any]) -> list[int]:
    """What each trigger of a call was answered."""
    return _expand(replied(gate, call)[2:])


def replied(gate: Gate, call: Call[Any]) -> list[Any]:
    """The bare reply to a call."""
    reply: list[Any] = gate.context.link.run(Call(call.script, call.keys, call.args, lambda reply: reply))
    return reply


async def grown(topic: Any, n: int) -> list[str]:
    """Pending messages that are large, of policies that keep the first payload."""
    keys = [f"k{number}" for number in range(n)]
    await topic.trigger_many([(key, LARGE) for key in keys])
    return keys


async def behind(topic: Any, n: int) -> list[Delivery[Any]]:
    """Small deliveries, each with a large message behind it."""
    await topic.trigger_many([(f"k{number}", "small") for number in range(n)])
    held: list[Delivery[Any]] = await topic.take(n)
    await grown(topic, n)
    return held


async def test_triggers_go_with_as_many_calls_as_the_bytes_need_that_they_join(face: Any, raw: Any) -> None:
    # Given twelve large messages
    topic = face.topic("t", window="1h", merge="first")
    keys = await grown(topic, 12)
    before = scripts_run(raw)
    # When each is joined by a trigger of a few bytes
    receipts = await topic.trigger_many([(key, "x") for key in keys])
    # Then they are joined two by two, and no call carries more than twice as many as the one before it did
    assert [one.status for one in receipts] == ["merged"] * 12
    assert scripts_run(raw) - before == 1 + 2 + 2 + 1
    assert [(await topic.peek(key)).pending.count for key in keys] == [2] * 12


async def test_large_deliveries_of_their_keys_count_among_what_triggers_meet(face: Any, raw: Any) -> None:
    topic = face.topic("t", window="1h", merge="first")
    await topic.trigger_many([Trigger(f"k{number}", LARGE, delay=0) for number in range(12)])
    held = await topic.take(12)
    before = scripts_run(raw)
    receipts = await topic.trigger_many([(one.key, "x") for one in held])
    assert [one.status for one in receipts] == ["scheduled"] * 12
    assert scripts_run(raw) - before == 1 + 2 + 2 + 1


async def test_one_that_is_larger_than_a_call_goes_through_is_joined(face: Any, raw: Any) -> None:
    topic = face.topic("t", window="1h", merge="append")
    await topic.trigger_many([("k", LARGE)] * 5)
    before = scripts_run(raw)
    receipts = await topic.trigger_many([("k", "x"), ("other", "x")])
    assert [one.status for one in receipts] == ["merged", "scheduled"]
    assert scripts_run(raw) - before == 2


async def test_triggers_that_join_small_messages_go_together(face: Any, raw: Any) -> None:
    topic = face.topic("t", window="1h")
    await topic.trigger_many([(number, "x" * 900) for number in range(128)])
    before = raw.info("commandstats")
    await topic.trigger_many([(number, "x") for number in range(128)])
    # Then nobody asked for their lengths
    after = raw.info("commandstats")
    assert after["cmdstat_evalsha"]["calls"] - before["cmdstat_evalsha"]["calls"] == 1
    assert after.get("cmdstat_hstrlen") == before.get("cmdstat_hstrlen")


async def test_nobody_asks_for_lengths_where_nothing_was_ever_large(face: Any, raw: Any, clock: Clock) -> None:
    def asked() -> int:
        return int(raw.info("commandstats").get("cmdstat_hstrlen", {"calls": 0})["calls"])

    # Given small messages of a topic that takes them, ends them, puts back what lapsed, and sends back what is dead
    topic = face.topic("t", lease="30s")
    await topic.trigger_many([(number, "x") for number in range(3)])
    before = asked()
    one, two, _ = await topic.take(3)
    await topic.nack(one, delay=0)
    await topic.bury(two)
    clock.advance("30s")
    assert len(await topic.take(3)) == 2
    await topic.dead.redrive()
    # Then each of the two that ended something asked once, for what every such call asks
    assert asked() - before == 2


@pytest.mark.parametrize("slots", [1, 2])
async def test_triggers_of_a_key_stay_in_order_where_calls_leave_some(face: Any, clock: Clock, slots: int) -> None:
    # Given six large messages, and 400 triggers for them, which are sent as several calls at once
    topic = face.topic("t", window="1m", merge="append", slots=slots)
    keys = await grown(topic, 6)
    receipts = await topic.trigger_many([(keys[number % 6], number) for number in range(400)])
    # Then each has its own receipt, and each key its triggers in their order
    assert [one.status for one in receipts] == ["merged"] * 400
    clock.advance("1m")
    found = {one.key: one.payload for one in await topic.take(6)}
    assert found == {key: [LARGE, *range(at, 400, 6)] for at, key in enumerate(keys)}


async def test_a_call_behind_one_that_did_not_run_waits_for_it(face: Any, gate: Gate) -> None:
    # Given a batch of several calls, of which the first was refused: its script was forgotten, say, and is known again
    topic = face.topic("t", window="1h", merge="append")
    await topic.trigger("k", -1)
    calls = gate.topics["t"].open()
    batch = calls.trigger_many([Trigger("k", number) for number in range(300)])
    _, second, third = batch.calls
    # When those behind it run all the same
    for call in (second, third):
        assert set(codes(gate, call)) == {5}
    # Then they do nothing, and with the first again all is in order
    receipts = gate.context.link.run_all(batch)
    assert [one.status for one in receipts] == ["merged"] * 300
    assert (await topic.peek("k")).pending.payload == [-1, *range(300)]


async def test_a_call_of_one_trigger_waits_for_the_call_before_it(face: Any, gate: Gate) -> None:
    # Given a batch of two calls, of which the second has one small trigger, and the first did not run
    topic = face.topic("t")
    await topic.trigger("other")
    batch = gate.topics["t"].open().trigger_many([Trigger("k", "x" * 131_000), Trigger("k", "y" * 100)])
    _, second = batch.calls
    # When the second runs first, then it does nothing
    assert codes(gate, second) == [5]
    gate.context.link.run_all(batch)
    assert (await topic.peek("k")).pending.payload == "y" * 100


@pytest.mark.parametrize(
    ("merge", "many", "few", "goes"),
    [("union", list(range(300)), [1], 7), ({"*": "sum"}, {f"field{n}": n for n in range(20)}, {"field1": 2}, 33)],
    ids=["items", "fields"],
)
async def test_what_is_merged_value_by_value_counts_for_more(
    face: Any, raw: Any, merge: Any, many: object, few: object, goes: int
) -> None:
    # Given small messages of many values
    topic = face.topic("t", window="1h", merge=merge)
    keys = [f"k{number}" for number in range(120)]
    await topic.trigger_many([Trigger(key, many) for key in keys])
    # When they are triggered again
    before = scripts_run(raw)
    assert {one.status for one in await topic.trigger_many([Trigger(key, few) for key in keys])} == {"merged"}
    # Then one call does not go through all of them
    assert scripts_run(raw) - before > 1
    # Nor does one that takes them
    await topic.flush()
    calls = face.gate.topics["t"].open()
    assert len(face.gate.context.link.run(calls.take(0, 100)).deliveries) in range(goes - 1, goes + 2)


async def test_two_that_become_one_value_by_value_count_twice(face: Any, raw: Any) -> None:
    # Given deliveries with many values behind them
    topic = face.topic("t", window="1h", merge="union")
    keys = [f"k{number}" for number in range(30)]
    await topic.trigger_many([Trigger(key, [1], delay=0) for key in keys])
    held = await topic.take(30)
    await topic.trigger_many([Trigger(key, list(range(300))) for key in keys])
    # When they become one with these, then three go in a call, of which seven meet no more than 128 KiB
    before = scripts_run(raw)
    await topic.nack(held)
    assert 10 <= scripts_run(raw) - before <= 11  # the script may be unknown at first


@pytest.mark.parametrize(("merge", "most"), [("append", 20), ({"log": "append"}, 60)], ids=str)
async def test_what_grows_with_each_trigger_goes_in_more_calls(
    face: Any, raw: Any, clock: Clock, merge: Any, most: int
) -> None:
    # Given 100 kB of triggers of one key, whose message is made anew for each of them
    topic = face.topic("t", window="1m", merge=merge)
    await topic.trigger("other", {"log": 0})
    before = scripts_run(raw)
    await topic.trigger_many([("k", {"log": f"{number:01000}"}) for number in range(100)])
    assert 3 <= scripts_run(raw) - before <= most
    # Then small ones go together as they did
    before = scripts_run(raw)
    await topic.trigger_many([("small", {"log": number}) for number in range(100)])
    assert scripts_run(raw) - before == 1
    clock.advance("1m")
    assert {one.key: one.count for one in await topic.take(3)} == {"k": 100, "small": 100, "other": 1}


@pytest.mark.parametrize("merge", ["last", "first"])
async def test_triggers_of_a_key_of_which_one_is_kept_go_together(face: Any, raw: Any, merge: Any) -> None:
    topic = face.topic("t", window="1m", merge=merge)
    await topic.trigger("k", LARGE)
    before = scripts_run(raw)
    await topic.trigger_many([("k", f"{number:01000}") for number in range(100)])
    assert scripts_run(raw) - before == 1
    # Nor does a call wait for the one in front of it where that did all
    await topic.trigger_many([("k", number) for number in range(200)])
    assert scripts_run(raw) - before == 1 + 2


async def test_a_copy_of_what_did_a_part_says_the_same_and_does_nothing(gate: Gate, everything: Dumps) -> None:
    # Given two calls that travel together, of which the first can do a part only
    topic = gate.topic("t", window="1h", merge="append")
    await grown(topic.aio, 4)
    calls = topic.open().trigger_many([Trigger(f"k{number % 4}", number) for number in range(200)]).calls
    first, second = (codes(gate, call) for call in calls)
    # Then of the second nothing was done, so that what is left goes before it
    done = len(first) - first.count(5)
    assert 2 <= done < 128
    assert first == [*first[:done], *[5] * (128 - done)]
    assert second == [5] * 72
    # And copies of either are told the same, also once what was left is done
    before = everything()
    assert [codes(gate, call) for call in calls] == [first, second]
    assert everything() == before
    receipts = gate.context.link.run(calls[0]) + gate.context.link.run(calls[1])
    assert [one.status for one in receipts] == ["merged"] * 200
    before = everything()
    assert [codes(gate, call) for call in calls] == [first, second]
    assert everything() == before
    assert sum(topic.peek(f"k{number}").pending.count for number in range(4)) == 204


@pytest.mark.damages("undecodable")
async def test_a_call_behind_one_whose_answer_was_spoilt_is_refused(
    gate: Gate, raw: Any, everything: Dumps, namespace: str
) -> None:
    # Given two calls that travel together, and a stored reply of the first that another program has replaced
    topic = gate.topic("t", window="1h")
    first, second = topic.open().trigger_many([Trigger(number) for number in range(200)]).calls
    gate.context.link.run(first)
    (replies,) = raw.keys(f"ig2:{{{namespace}:*:replies*")
    for request in set(raw.hkeys(replies)) - {b""}:
        raw.hset(replies, request, "spoilt")
    before = everything()
    # Then nobody can say whether the second may go, and nothing is written
    with pytest.raises(UnexpectedData, match="holds a corrupt reply"):
        gate.context.link.run(second)
    assert everything() == before


@pytest.mark.parametrize("verb", ["ack", "nack", "bury", "release"])
async def test_deliveries_end_by_the_bytes_of_what_waits_behind_them(face: Any, raw: Any, verb: str) -> None:
    topic = face.topic("t", merge="first", max_attempts=2)
    held = await behind(topic, 6)
    before = scripts_run(raw)
    # When all end at once, then two do in each call
    assert await getattr(topic, verb)(held) == ["dead" if verb == "bury" else "ok"] * 6
    assert scripts_run(raw) - before == 1 + 2
    # And what waited is due
    stats = await topic.stats()
    assert (stats.pending, stats.waiting, stats.in_flight) == (6, 0, 0)


@pytest.mark.parametrize("verb", ["ack", "nack"])
async def test_no_call_reads_more_messages_behind_deliveries_than_fit(face: Any, raw: Any, verb: str) -> None:
    # Given 12 small deliveries, each with a large message behind it
    topic = face.topic("t", merge="first")
    held = await behind(topic, 12)
    marker = f"done {topic.name} {face.gate.namespace}"
    # When all end at once
    with raw.monitor() as monitor:
        await getattr(topic, verb)(held)
        raw.echo(marker)
        lines = list(iter(lambda: str(monitor.next_command()["command"]), f"ECHO {marker}"))
    # Then each command that reads messages behind deliveries reads at most two
    commands = [line.split(" ") for line in lines]
    reads = [words[2:] for words in commands if words[0].upper() == "HMGET" and words[1].endswith(":next")]
    assert reads
    assert max(map(len, reads)) <= 2, reads


async def test_a_copy_of_what_ended_some_says_the_same_and_does_nothing(gate: Gate, everything: Dumps) -> None:
    topic = gate.topic("t", merge="first")
    held = await behind(topic.aio, 5)
    call = topic.open().settle(0, [Settlement("ack", one) for one in held])
    first = replied(gate, call)
    assert first[3:] == [b"ok", b"ok", b"left", b"left", b"left"]
    before = everything()
    assert replied(gate, call)[3:] == first[3:]
    assert everything() == before
    assert topic.stats().in_flight == 3
    assert gate.context.link.run(call).outcomes == ["ok"] * 5


async def test_a_turn_that_cannot_end_all_takes_nothing(gate: Gate, everything: Dumps) -> None:
    topic = gate.topic("t", merge="first")
    held = await behind(topic.aio, 3)
    await topic.aio.trigger("due")
    call = topic.open().settle_and_take(0, [Settlement("ack", one) for one in held], 10)
    first = replied(gate, call)
    # Then it took nothing, and says that there is work
    assert first[2:] == [first[1], 0, 0, b"ok", b"ok", b"left"]
    before = everything()
    assert replied(gate, call)[2:] == first[2:]
    assert everything() == before
    turned = gate.context.link.run(call)
    assert (turned.settled.outcomes, turned.taken.deliveries, turned.taken.more) == (["ok"] * 3, [], True)


async def test_what_lapses_meets_what_waits_behind_it_by_bytes(gate: Gate, clock: Clock) -> None:
    topic = gate.topic("t", merge="first", lease="1s")
    await behind(topic.aio, 5)
    clock.advance("1s")
    assert [taken(topic, 0).lapsed for _ in range(4)] == [2, 2, 1, 0]


async def test_letters_meet_what_they_join_by_bytes(face: Any, gate: Gate) -> None:
    # Given small letters, and large pending messages of the same keys
    topic = face.topic("t", merge="first")
    await topic.trigger_many([(f"k{number}", "small") for number in range(5)])
    await topic.bury(await topic.take(5))
    await grown(topic, 5)
    first = gate.context.link.run(gate.topic("t").open().take_dead(0, "redrive", []))
    assert (first.taken, first.left, first.seen) == (2, 3, 2)
    assert await topic.dead.redrive() == 3
    assert {one.count for one in await topic.take(5)} == {2}


@pytest.mark.parametrize("how", ["failure", "letter", "trigger"])
async def test_a_slot_knows_that_it_holds_something_large_however_that_came(
    gate: Gate, raw: Any, namespace: str, how: str
) -> None:
    # Given a slot of small messages
    topic, facts = gate.topic("t", backoff=0), f"ig2:{{{namespace}:topic:t:0/1}}:meta"
    await topic.aio.trigger("k", "x" * 900)
    (delivery,) = topic.take()
    for _ in range(2):
        await topic.aio.trigger("other", "x" * 900)
    assert not raw.hexists(facts, "large")
    # When one becomes large by what is said of it, or a large one comes
    if how == "trigger":
        await topic.aio.trigger("third", "x" * 1100)
    else:
        (topic.nack if how == "failure" else topic.bury)(delivery, reason="no " * 200)
    assert raw.hget(facts, "large") == b"1"
    assert "large" not in topic.stats().counters


async def test_what_is_left_is_done_where_its_slot_has_moved(gate: Gate, clock: Clock) -> None:
    # Given triggers and ends of which a part was done, when the slot becomes two, and the replies are lost
    topic = gate.topic("t", window="1m", merge="append")
    await topic.aio.trigger_many([Trigger(f"d{number}", "small", delay=0) for number in range(5)])
    held = topic.take(5)
    await topic.aio.trigger_many([(f"d{number}", LARGE) for number in range(5)])
    keys = await grown(topic.aio, 6)
    puts = topic.open().trigger_many([Trigger(keys[number % 6], number) for number in range(200)])
    ends = topic.open().settle_many([Settlement("ack", one) for one in held])
    assert {codes(gate, call)[-1] for call in puts.calls} == {5}
    assert {replied(gate, call)[-1] for call in ends.calls} == {b"left"}
    topic.reshard(2)
    # When copies of them come, then all is done, in its order
    assert [one.status for one in gate.context.link.run_all(puts)] == ["merged"] * 200
    assert gate.context.link.run_all(ends) == ["ok"] * 5
    clock.advance("1m")
    found = {one.key: one.payload for one in topic.take(20)}
    assert {key: found[key] for key in keys} == {key: [LARGE, *range(at, 200, 6)] for at, key in enumerate(keys)}
    assert {found[f"d{number}"][0] for number in range(5)} == {LARGE}
