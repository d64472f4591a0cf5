"""What becomes of a trigger: receipts, duplicates, versions, many at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import msgpack
import pytest

from idemgate import Gate, InvalidArgument, Trigger, append
from idemgate.core import keys
from idemgate.errors import UnexpectedData
from idemgate.testing import Clock
from idemgate.types import StoredVersion
from tests.topics.conftest import scripts_run
from tests.waiting import subscribed

pytestmark = pytest.mark.one_in(3)

At = Callable[[float], datetime]


async def _finish(topic: Any) -> list[Any]:
    taken = await topic.take(1000)
    await topic.ack(taken)
    return taken


# -- event_id ---------------------------------------------------------------------------------------------------------


async def test_an_event_triggers_once(face: Any) -> None:
    topic = face.topic("t", merge="count")
    # Given an event that comes three times
    receipts = [await topic.trigger("k", event_id="e-1") for _ in range(3)]
    # Then two are told apart from a trigger, and do not count
    assert [receipt.status for receipt in receipts] == ["scheduled", "duplicate", "duplicate"]
    assert [receipt.accepted for receipt in receipts] == [True, False, False]
    assert (await topic.trigger("k", event_id="e-2")).status == "merged"
    assert [one.count for one in await topic.take(10)] == [2]
    assert (await topic.stats())["duplicate"] == 2


async def test_a_message_without_options_of_its_own_is_stored_without_an_extension(
    face: Any, raw: Any, namespace: str
) -> None:
    # Given a message of two triggers with event ids, which are stored elsewhere
    topic = face.topic("t", merge="append")
    await topic.trigger("k", 1, event_id="a")
    await topic.trigger("k", 2, event_id="b")
    # Then its flags say that no extension follows its header
    assert raw.hget(f"ig2:{{{namespace}:topic:t:0/1}}:messages", "k")[0] == 0


async def test_an_event_is_remembered_beyond_its_delivery_for_a_time(face: Any, clock: Clock) -> None:
    topic = face.topic("t", dedup_retention="10m")
    # Given an event that was delivered and acked
    await topic.trigger("k", event_id=7)
    assert len(await _finish(topic)) == 1
    # When it comes again within `remember`, by whatever spelling of its id
    clock.advance("9m59.999s")
    assert (await topic.trigger("k", event_id="7")).status == "duplicate"
    # Then it is dropped; later it is new
    clock.advance("1ms")
    assert (await topic.trigger("k", event_id=7)).status == "scheduled"


@pytest.mark.parametrize("slots", [1, 8])
async def test_one_event_may_trigger_many_keys(face: Any, slots: int) -> None:
    topic = face.topic("t", slots=slots)
    # When one event concerns twenty keys, whatever slots they are in
    triggers = [Trigger(f"doc-{n}", event_id="e-1") for n in range(20)]
    # Then each is triggered, once
    assert {receipt.status for receipt in await topic.trigger_many(triggers)} == {"scheduled"}
    assert {receipt.status for receipt in await topic.trigger_many(triggers)} == {"duplicate"}


async def test_a_dropped_trigger_does_not_use_up_its_event(face: Any, clock: Clock) -> None:
    topic = face.topic("t", window="60s", edge="leading")
    await topic.trigger("k")
    # Given an event that was dropped inside the window
    assert (await topic.trigger("k", event_id="e")).status == "dropped"
    # When it comes again after the window, it counts
    clock.advance("60s")
    assert (await topic.trigger("k", event_id="e")).accepted


# -- version ----------------------------------------------------------------------------------------------------------


async def test_an_older_version_is_dropped(face: Any) -> None:
    topic = face.topic("t", window="60s")
    # Given versions that arrive out of order; the same version again is not older
    receipts = [await topic.trigger("k", f"v{version}", version=version) for version in (5, 4, 7, 7, -1, 6)]
    assert [receipt.status for receipt in receipts] == [
        "scheduled",
        "dropped",
        "merged",
        "merged",
        "dropped",
        "dropped",
    ]
    # Then the newest is what is delivered; a trigger without a version is not compared
    assert (await topic.trigger("k", "unversioned")).status == "merged"
    pending = (await topic.peek("k")).pending
    assert (pending.count, pending.version, pending.payload) == (4, 7, "unversioned")
    assert (await topic.trigger("other", version=1)).accepted


async def test_a_version_is_remembered_beyond_its_delivery(face: Any, clock: Clock) -> None:
    topic = face.topic("t", dedup_retention="1h")
    await topic.trigger("k", version=2**53)
    assert [one.version for one in await _finish(topic)] == [2**53]
    # When an older one comes after the delivery, it is dropped, until `remember` is over
    clock.advance("59m59s")
    assert (await topic.trigger("k", version=2**53 - 1)).status == "dropped"
    clock.advance("1s")
    assert (await topic.trigger("k", version=2**53 - 1)).status == "scheduled"
    assert (await topic.trigger("k")).accepted


@pytest.mark.parametrize("group", [None, "g"])
async def test_a_version_is_seen_and_reset(face: Any, clock: Clock, at: At, group: str | None) -> None:
    topic = face.topic("t", slots=4, dedup_retention="1h")
    # Given a key that was triggered without a version
    await topic.trigger("k", group=group)
    assert await topic.versions("k", group=group) is None
    assert await topic.reset_version("k", group=group) is False
    # When a version of a wrong clock comes, then it is seen, with the end of its retention
    clock.advance("1m")
    await topic.trigger("k", version=2**53, group=group)
    assert (await topic.trigger("k", version=7, group=group)).status == "dropped"
    assert await topic.versions("k", group=group) == StoredVersion(2**53, at(3_660))
    # When the slots change, then it is still known
    await topic.reshard(2)
    assert (await topic.versions("k", group=group)).version == 2**53
    # When it is reset, then any version is accepted, and its message holds all triggers
    assert await topic.reset_version("k", group=group) is True
    assert await topic.reset_version("k", group=group) is False
    assert (await topic.trigger("k", version=-7, group=group)).status == "merged"
    assert (await topic.versions("k", group=group)).version == -7
    assert (await topic.peek("k", group=group)).pending.count == 3
    # And a version that expired is none
    clock.advance("1h")
    assert await topic.versions("k", group=group) is None
    assert await topic.reset_version("k", group=group) is False


async def test_a_version_of_an_invalid_key_is_refused(face: Any) -> None:
    topic = face.topic("t", window="1s")
    for ask in (topic.versions, topic.reset_version):
        with pytest.raises(InvalidArgument, match="topic 't'"):
            await ask("")
    assert await face.stored_topics() == []


@pytest.mark.damages("undecodable")
async def test_a_corrupt_version_is_reported_and_can_be_reset(face: Any, raw: Any, namespace: str) -> None:
    topic = face.topic("t")
    await topic.trigger("k", version=1)
    raw.hset(f"ig2:{{{namespace}:topic:t:0/1}}:dedup", "vk", "x")
    with pytest.raises(UnexpectedData, match="holds corrupt data under vk"):
        await topic.versions("k")
    assert await topic.reset_version("k") is True
    assert (await topic.trigger("k", version=0)).accepted


# -- what is not accepted ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("together", [True, False], ids=["in one call", "one by one"])
@pytest.mark.parametrize(
    ("options", "triggers", "counted"),
    [
        ({}, [Trigger("k", 1, version=2), Trigger("k", 1, version=1), Trigger("k", 1, version=0)], "dropped_version"),
        ({"window": "1m", "edge": "leading"}, [Trigger("k", 1)] * 3, "dropped_window"),
        ({"merge": append(1)}, [Trigger("k", 1), Trigger("k", 2), Trigger("k", 3)], "dropped_full"),
        ({}, [Trigger("k", 1, event_id="e")] * 3, "duplicate"),
    ],
)
async def test_what_is_not_accepted_is_counted_by_its_reason(
    face: Any, conserved: Any, together: bool, options: dict[str, Any], triggers: list[Trigger], counted: str
) -> None:
    topic = face.topic("t", slots=4, **options)
    # When the second and the third trigger of a key are not accepted
    if together:
        await topic.trigger_many(triggers)
    else:
        for one in triggers:
            await topic.trigger_many([one])
    # Then the topic counts them by the reason, and the dropped ones in total
    total = {} if counted == "duplicate" else {"dropped": 2}
    items = {"items_dropped": 2} if counted == "dropped_full" else {}
    assert dict((await topic.stats()).counters) == {"accepted": 1, counted: 2, **total, **items}
    await conserved(topic, ["k"])
    # And the counts stay when the slots change
    await topic.reshard(1)
    assert (await topic.stats())[counted] == 2


# -- in flight --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        ("ack", [("b", ["2", "3"], 1)]),
        ("nack", [("b", ["1", "2", "3"], 1)]),
        ("release", [("b", ["1", "2", "3"], 1)]),
        ("bury", [("b", ["2", "3"], 1)]),
        ("lapse", [("b", ["1", "2", "3"], 1)]),
    ],
)
async def test_a_trigger_while_its_key_is_in_flight_waits_behind_it(
    face: Any, clock: Clock, conserved: Any, end: str, expected: Any
) -> None:
    topic = face.topic("t", merge=append(), lease="30s", backoff=0)
    # Given a delivery that was taken
    await topic.trigger("b", "1")
    (running,) = await topic.take(10)
    # When its key is triggered meanwhile
    receipts = [(await topic.trigger("b", payload)).status for payload in ("2", "3")]
    assert receipts == ["scheduled", "merged"]
    # Then the running one is not touched, and the new message cannot be taken
    stats = await topic.stats()
    assert (stats.waiting, stats.in_flight, stats.ready, stats.next_due) == (1, 1, 0, None)
    assert await topic.take(10) == []
    assert running.payload == ["1"]
    # And it is delivered when the running one has ended; with it, where that is tried again, and as a first attempt
    if end == "lapse":
        clock.advance("30s")
    else:
        assert await getattr(topic, end)(running) == ("dead" if end == "bury" else "ok")
    assert [(one.key, one.payload, one.attempt) for one in await topic.take(10)] == expected
    await conserved(topic, ["b"])


async def test_what_waits_keeps_its_own_window(face: Any, clock: Clock, at: At) -> None:
    topic = face.topic("t", window="60s", lease="5m")
    await topic.trigger("k")
    clock.advance("60s")
    (running,) = await topic.take(10)
    # Given a trigger behind it
    clock.advance("10s")
    assert (await topic.trigger("k")).due_at == at(130)
    # When the running one ends before that window does, or after
    assert await topic.ack(running) == "ok"
    assert await topic.take(10) == []
    clock.advance("60s")
    assert [one.due_at for one in await topic.take(10)] == [at(130)]


async def test_a_named_time_behind_a_delivery_wins_over_its_retry(face: Any, clock: Clock, at: At) -> None:
    topic = face.topic("t", backoff="5s")
    await topic.trigger("k", 1)
    (running,) = await topic.take(10)
    assert (await topic.trigger("k", 2, delay="10m")).due_at == at(600)
    # When the running one is to be tried again, both go at the time the caller named
    assert await topic.nack(running) == "ok"
    assert (await topic.peek("k")).due_at == at(600)
    clock.advance("10m")
    assert [(one.count, one.reason, one.attempt) for one in await topic.take(10)] == [(2, "time", 1)]


# -- many at once -----------------------------------------------------------------------------------------------------


async def test_many_triggers_keep_their_order(face: Any) -> None:
    topic = face.topic("t", slots=8, merge=append())
    # Given 100 keys, each triggered thrice, over eight slots
    triggers = [(f"k{n}", turn) for turn in range(3) for n in range(100)]
    receipts = await topic.trigger_many(triggers)
    # Then receipts come in the order of the triggers, and payloads merge in it
    assert [receipt.status for receipt in receipts] == ["scheduled"] * 100 + ["merged"] * 200
    taken = await topic.take(1000)
    assert {one.key: one.payload for one in taken} == {f"k{n}": [0, 1, 2] for n in range(100)}
    assert {one.slot for one in taken} == set(range(8))


async def test_triggers_and_pairs_may_be_mixed(face: Any, at: At) -> None:
    topic = face.topic("t", window="60s")
    mixed = [
        ("a", 1),
        Trigger("a", 2, delay="5s"),
        Trigger("b", event_id="e"),
        Trigger("b", event_id="e"),
        Trigger("c", version=3),
    ]
    receipts = await topic.trigger_many(iter(mixed))
    assert [receipt.status for receipt in receipts] == ["scheduled", "replaced", "scheduled", "duplicate", "scheduled"]
    assert [receipt.due_at for receipt in receipts] == [at(60), at(5), at(60), None, at(60)]
    assert await topic.trigger_many([]) == []


@pytest.mark.parametrize("state", ["absent", "pending", "twice"])
async def test_each_trigger_of_a_call_has_its_own_time(face: Any, at: At, state: str) -> None:
    topic = face.topic("t", window="60s", merge=append())
    delays = [None, "5s", "5s", "7s", None, "5s"]
    # Given keys without a message, or some with one, or one that the call has twice
    if state == "pending":
        await topic.trigger_many([("k4", 0), ("k5", 0)])
    triggers = [Trigger(f"k{n}", n, delay=delay) for n, delay in enumerate(delays)]
    if state == "twice":
        triggers.append(Trigger("k3", 6))
    # When one call triggers them
    receipts = await topic.trigger_many(triggers)
    # Then each has the time of its trigger
    old = {"absent": [], "pending": ["merged", "replaced"], "twice": ["merged"]}[state]
    assert [one.status for one in receipts] == ["scheduled"] * (len(receipts) - len(old)) + old
    assert [one.due_at for one in receipts[:6]] == [at(60), at(5), at(5), at(7), at(60), at(5)]
    assert [(await topic.peek(f"k{n}")).due_at for n in range(6)] == [one.due_at for one in receipts[:6]]
    assert (await topic.stats()).scheduled == 6


async def test_all_are_checked_before_any_is_sent(face: Any, everything: Any) -> None:
    topic = face.topic("t", slots=4)
    # When the last of 600 triggers is bad
    with pytest.raises(InvalidArgument, match="key=''"):
        await topic.trigger_many([(f"k{n}", n) for n in range(600)] + [("", 1)])
    # Then nothing was written, not even the topic
    assert everything() == {}


@pytest.mark.parametrize(
    ("triggers", "slots", "expected"), [(100, 1, 1), (128, 1, 1), (129, 1, 2), (500, 1, 4), (100, 2, 2)]
)
async def test_a_batch_is_one_script_call_for_each_slot_and_128(
    face: Any, raw: Any, url: str, triggers: int, slots: int, expected: int
) -> None:
    # Given a topic that is open and whose scripts the server knows
    topic = face.topic("t", slots=slots)
    await topic.trigger_many([(n, None) for n in range(20)])
    assert await topic.ack(await topic.take(20))
    before = scripts_run(raw)
    # When many triggers are put in
    assert len(await topic.trigger_many([(n, None) for n in range(triggers)])) == triggers
    # Then the server ran this many scripts, and no more
    assert scripts_run(raw) - before == expected
    # And what was taken is acked in one for each slot, too
    taken = await topic.take(100)
    before = scripts_run(raw)
    await topic.ack(taken)
    assert scripts_run(raw) - before == len({one.slot for one in taken})


async def test_what_takes_a_script_longer_goes_fewer_at_a_time(face: Any, raw: Any) -> None:
    topic = face.topic("t")
    await topic.trigger_many([(n, None) for n in range(3)])
    await topic.ack(await topic.take(3))
    before = scripts_run(raw)
    # When triggers ask for more than a time, then 40 go at once
    await topic.trigger_many([Trigger(n, event_id=n) for n in range(41)])
    assert scripts_run(raw) - before == 2
    # And of deliveries that are not just done, 32
    taken = await topic.take(41)
    before = scripts_run(raw)
    assert await topic.nack(taken[:33]) == ["ok"] * 33
    assert scripts_run(raw) - before == 2


async def test_one_trigger_is_one_script_call(face: Any, raw: Any) -> None:
    topic = face.topic("t", window="60s")
    await topic.trigger("k")
    before = scripts_run(raw)
    await topic.trigger("k", event_id="e", version=3, delay="1s")
    assert scripts_run(raw) - before == 1


async def test_triggers_of_one_tick_share_a_script_call(gate: Gate, raw: Any) -> None:
    # Given a topic that is open
    topic = gate.aio.topic("t", merge="count", window="60s")
    await topic.trigger("k")
    before = scripts_run(raw)
    # When a hundred tasks trigger at once, and one of them is bad
    receipts = await asyncio.gather(*(topic.trigger(f"k{n % 10}") for n in range(100)), return_exceptions=True)
    with pytest.raises(InvalidArgument):
        await topic.trigger("")
    # Then each has its own receipt, and the server ran one script
    assert scripts_run(raw) - before == 1
    assert [receipt.status for receipt in receipts] == ["scheduled"] * 10 + ["merged"] * 90
    assert (await topic.stats()).counters["accepted"] == 101


async def test_a_trigger_whose_caller_left_is_put_in_all_the_same(gate: Gate) -> None:
    topic = gate.aio.topic("t", merge="count")
    await topic.open()
    # Given two tasks of one tick, one of which is cancelled before its answer came
    one, other = asyncio.create_task(topic.trigger("a")), asyncio.create_task(topic.trigger("b"))
    await asyncio.sleep(0)
    one.cancel()
    # Then the other has its receipt, and both are in
    assert (await other).status == "scheduled"
    assert {delivery.key for delivery in await topic.take(10)} == {"a", "b"}


async def test_what_is_refused_is_refused_to_all_who_shared_it(url: str, raw: Any, namespace: str) -> None:
    gate = Gate(url, namespace=namespace)
    topic = gate.aio.topic("t")
    calls = await topic.open()
    raw.set(calls.keys(0)[1], "another program's")
    refused = await asyncio.gather(topic.trigger("a"), topic.trigger("b"), return_exceptions=True)
    assert [type(error) for error in refused] == [UnexpectedData, UnexpectedData]
    await gate.aio.close()


async def test_many_writers_lose_nothing(gate: Gate, conserved: Any) -> None:
    # Given twenty tasks that trigger the same three keys, 50 times each, while another takes and acks
    topic = gate.aio.topic("t", merge="count", slots=2)
    acked = 0

    async def write(n: int) -> None:
        for turn in range(50):
            await topic.trigger(f"k{(n + turn) % 3}")

    async def work() -> None:
        nonlocal acked
        while acked < 1000:
            taken = await topic.take(10)
            acked += sum(one.payload for one in taken)
            if taken:
                await topic.ack(taken)
            await asyncio.sleep(0)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(work())
        for n in range(20):
            group.create_task(write(n))
    # Then each trigger was in exactly one delivery
    assert acked == 1000
    await conserved(topic, ["k0", "k1", "k2"])
    assert (await topic.stats())["acked_triggers"] == 1000


def test_facts_are_forgotten_when_their_time_has_passed(gate: Gate, raw: Any, clock: Clock) -> None:
    topic, memo = gate.topic("t", dedup_retention="60s"), keys.slot(gate.namespace, "t", 0, 1)[8]
    for key in ("a", "b"):
        topic.trigger(key, version=1)
    clock.advance("61s")
    topic.trigger("c", version=1)
    assert raw.hkeys(memo) == [b"vc"]


@pytest.mark.parametrize("first", [{"delay": "10s"}, {"delay": "90s"}])
async def test_a_time_that_is_named_in_a_batch_holds_for_the_rest_of_it(
    face: Any, clock: Clock, first: dict[str, Any]
) -> None:
    # Given a message that is due in a minute
    topic = face.topic("t", window="60s", merge="append")
    await topic.trigger("k", 1)
    # When a batch names another time, and then triggers it once more
    receipts = await topic.trigger_many([Trigger("k", 2, **first), Trigger("k", 3)])
    # Then that time stands
    due = clock.now() + timedelta(seconds=float(first["delay"].rstrip("s")))
    assert [(one.status, one.due_at) for one in receipts] == [("replaced", due), ("merged", due)]
    assert (await topic.peek("k")).due_at == due
    clock.set(due.timestamp())
    (delivery,) = await topic.take(10)
    assert (delivery.payload, delivery.reason) == ([1, 2, 3], "time")


async def test_workers_are_notified_of_the_earliest_message(face: Any, clock: Clock, raw: Any, namespace: str) -> None:
    # Given a message that is due in a minute
    topic = face.topic("t")
    await topic.trigger("k", delay="60s")
    with subscribed(raw, f"ig2:{{{namespace}:topic:t:0/1}}:scheduled") as heard:
        # When one comes that is due later, then one that is due sooner
        await topic.trigger("later", delay="90s")
        await topic.trigger("sooner", delay="30s")
        # And one of them is made due at once
        await topic.flush("later")
        told = [heard.get_message(timeout=30) for _ in range(2)]
    # Then the latter two are published, with the times when they are due
    now = round(clock.now().timestamp() * 1000)
    assert [int(one["data"]) for one in told] == [now + 30_000, now]


async def test_workers_are_notified_of_the_earliest_message_of_a_batch(
    face: Any, clock: Clock, raw: Any, namespace: str
) -> None:
    # Given a message that is due in a minute
    topic = face.topic("t", window="60s", max_size=3)
    await topic.trigger("k")
    with subscribed(raw, f"ig2:{{{namespace}:topic:t:0/1}}:scheduled") as heard:
        # When a batch comes that is due later, then one of which two are due sooner
        await topic.trigger_many([Trigger("a", delay="90s"), Trigger("b", delay="80s")])
        await topic.trigger_many([Trigger("c", delay="50s"), Trigger("d", delay="30s"), Trigger("e", delay="40s")])
        # And one that also merges, then one that makes the first message due at once
        await topic.trigger_many([Trigger("k"), Trigger("f", delay="20s")])
        await topic.trigger_many([Trigger("g"), Trigger("k")])
        told = [heard.get_message(timeout=30) for _ in range(3)]
    # Then the earliest of each of the latter three is published
    now = round(clock.now().timestamp() * 1000)
    assert [int(one["data"]) for one in told] == [now + 30_000, now + 20_000, now]


async def test_workers_are_notified_of_a_flush(face: Any, clock: Clock, raw: Any, namespace: str) -> None:
    # Given one message that is due in a minute
    topic = face.topic("t")
    await topic.trigger("k", delay="60s")
    with subscribed(raw, f"ig2:{{{namespace}:topic:t:0/1}}:scheduled") as heard:
        # When everything is made due, and again, where nothing is left to be
        assert [await topic.flush(), await topic.flush()] == [1, 0]
        raw.publish(f"ig2:{{{namespace}:topic:t:0/1}}:scheduled", b"all")
        told = [heard.get_message(timeout=30)["data"] for _ in range(2)]
    # Then that is published once
    assert told == [b"%d" % round(clock.now().timestamp() * 1000), b"all"]


@pytest.mark.parametrize("triggers", [1, 2])
async def test_nobody_is_told_of_what_waits_behind_a_delivery(
    face: Any, clock: Clock, raw: Any, namespace: str, triggers: int
) -> None:
    # Given a key in flight, and nothing else
    topic = face.topic("t")
    await topic.trigger("k")
    await topic.take(1)
    with subscribed(raw, f"ig2:{{{namespace}:topic:t:0/1}}:scheduled") as heard:
        # When it is triggered, and then another
        await (topic.trigger("k") if triggers == 1 else topic.trigger_many([Trigger("k")] * triggers))
        await topic.trigger("other")
        told = heard.get_message(timeout=30)
    # Then the latter alone is published
    assert int(told["data"]) == round(clock.now().timestamp() * 1000)


async def test_what_was_flushed_is_due_whatever_came_before_it_in_a_batch(face: Any, clock: Clock) -> None:
    # Given two messages that were flushed, of which one is of a group
    topic = face.topic("t", window="1h")
    await topic.trigger_many([Trigger("a", group="g"), Trigger("b")])
    assert await topic.flush() == 2
    # When a batch puts the one of the group off, and joins the other
    receipts = await topic.trigger_many([Trigger("a", group="g", delay="2h"), Trigger("b")])
    # Then that is still due now
    assert [one.due_at for one in receipts] == [clock.now() + timedelta(hours=2), clock.now()]
    assert [(one.key, one.count, one.reason) for one in await topic.take(10)] == [("b", 2, "flush")]


@pytest.mark.damages("undecodable")
@pytest.mark.parametrize("part", ["message", "extension", "extension with a time", "extension of other types"])
async def test_a_pending_message_that_is_none_of_ours_is_named(
    face: Any, raw: Any, everything: Any, namespace: str, part: str
) -> None:
    topic = face.topic("t")
    await topic.trigger("k")
    messages = f"ig2:{{{namespace}:topic:t:0/1}}:messages"
    extension = msgpack.packb(["one", "", "", "", "", 0, ""]) if part == "extension of other types" else b"spoilt"
    spoilt = raw.hget(messages, "k")[1:31] + len(extension).to_bytes(4) + extension
    flag = b"\3" if part == "extension with a time" else b"\2"
    raw.hset(messages, "k", "spoilt" if part == "message" else flag + spoilt)
    before = everything()
    with pytest.raises(UnexpectedData, match=":messages: holds corrupt data under k"):
        await topic.trigger("k")
    assert everything() == before


@pytest.mark.damages("undecodable")
@pytest.mark.parametrize("order", ["ab", "ba"])
async def test_a_corrupt_message_refuses_the_triggers_of_other_keys_in_its_call(
    face: Any, raw: Any, everything: Any, namespace: str, order: str
) -> None:
    # Given two pending messages, of which one is corrupt
    topic = face.topic("t", merge="append", priority=True)
    await topic.trigger_many([("a", 1), ("b", 1)])
    messages = f"ig2:{{{namespace}:topic:t:0/1}}:messages"
    assert raw.hset(messages, "a", "spoilt") == 0
    before = everything()
    # When a call triggers both, then it names the corrupt one and changes nothing
    with pytest.raises(UnexpectedData, match=":messages: holds corrupt data under a"):
        await topic.trigger_many([(key, 2) for key in order])
    assert everything() == before


@pytest.mark.damages("undecodable")
async def test_a_remembered_version_that_is_none_is_named(face: Any, raw: Any, everything: Any, namespace: str) -> None:
    topic = face.topic("t")
    await topic.trigger("k", version=1)
    raw.hset(f"ig2:{{{namespace}:topic:t:0/1}}:dedup", "vk", "spoilt")
    before = everything()
    with pytest.raises(UnexpectedData, match=":dedup: holds corrupt data under vk"):
        await topic.trigger("k", version=2)
    assert everything() == before
