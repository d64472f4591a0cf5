"""What each role is for, as short scenes that reach every branch of its scripts in which the server is asked for
something."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import pytest

from idemgate import Bury, Gate, Retry, Trigger
from idemgate.audit.slot import Slot, read_slot
from idemgate.cli.doctor.examine import Namespace, examine_store
from idemgate.core.calls import new_id
from idemgate.core.keys import list_keys, scope_history
from idemgate.errors import NoResult, ResultTimeout
from idemgate.guard.claim_calls import register_retention
from idemgate.guard.heartbeat import note_history
from idemgate.membership import heartbeats as members
from idemgate.membership.ownership import HeartbeatRequest
from idemgate.operate.acts import perform
from idemgate.operate.table import VERBS
from idemgate.operate.verb import Lines
from idemgate.subscribers.expiry import rules as expiry
from idemgate.testing import Clock, audit
from idemgate.topics import registry
from tests.claims import claims_of

__all__ = ["BESIDE", "SCENES", "Stage"]


class Stage(NamedTuple):
    """`mine` is the gate of the role, by `url`, and `lasting` the same by the server's clock; `other` may do all,
    in the same namespace; `theirs` begins the names of keys and channels that are named to the role."""

    mine: Gate
    lasting: Gate
    url: str
    other: Gate
    clock: Clock
    raw: Any
    theirs: str


Scene = Callable[[Stage], None]


def awaited(on: Stage, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs it in a loop of its own, and leaves no connection of that behind."""

    async def whole() -> None:
        try:
            await work()
        finally:
            await on.mine.aio.close()

    asyncio.run(whole())


# -- guard ------------------------------------------------------------------------------------------------------------


def guards(on: Stage) -> None:
    gate = on.mine
    guarded = gate.once(key="{n}", scope="s", fingerprint="n", on_in_progress="raise")(lambda n: n + 1)
    assert [guarded(1) for _ in range(2)] == [2, 2]
    claim = gate.claim("k", lease="1s", on_lease_loss="hold")
    assert claim.checkpoint("half")
    assert gate.cancel("k")
    assert claim.extend("1m")
    assert gate.inspect("k").state == "in_progress"
    on.clock.advance("1h")
    assert gate.resolve("k", done=True)
    assert gate.forget("k")
    assert gate.claim("k").release()
    gate.once(key="{k}", scope="s", at_most_once=True)(lambda k: k)("x")
    notes(gate)


def notes(gate: Gate) -> None:
    """Note what happened to a key, as the heartbeat thread does."""
    name = scope_history(gate.namespace, "s", b"k")
    for note in (b"one", b"another"):
        gate.context.link.run(note_history(gate.context, name, [(0, note)]))


def marks(on: Stage) -> None:
    assert on.lasting.first("now", "1h")
    dedup = on.mine.dedup("s", "1h")
    assert [on.mine.first("f", "1h") for _ in range(2)] == [True, False]
    assert [dedup.add("f") for _ in range(2)] == [True, False]
    assert on.mine.first_many(["x", "y", "x"], "1h") == [True, True, False]
    assert dedup.add_many(["x", "y", "x"]) == [True, True, False]
    for _ in range(3):  # a new page replaces the older one
        on.clock.advance("2h")
        assert dedup.add("f")


def reports(on: Stage) -> None:
    presence: Any = on.mine.context.observer
    presence.beat()
    presence.beat()
    presence.end()
    assert not on.mine.counters["presence.failed"]
    assert asks(on.other, "worker", "ls")["processes"] == []


def waits(on: Stage) -> None:
    async def waiting() -> None:
        claim = await on.mine.aio.claim("k")
        first = await waiter(on, "k")
        await claim.complete("done")
        assert await first == "done"
        # What nobody waits for any more is unsubscribed from
        await on.mine.aio.claim("l")
        second = await waiter(on, "l")
        await until(on, lambda: not on.raw.pubsub_numsub(channel(on, "k"))[0][1])
        second.cancel()

    awaited(on, waiting)


async def waiter(on: Stage, key: str) -> asyncio.Task[Any]:
    """A caller that waits for the end of a run."""
    claim = await on.mine.aio.claim(key)
    task = asyncio.create_task(claim.wait(30))
    await until(on, lambda: on.raw.pubsub_numsub(channel(on, key))[0][1] or task.done())
    return task


def channel(on: Stage, key: str) -> bytes:
    return claims_of(on.mine).key("claim", key)[0]


# -- producer ---------------------------------------------------------------------------------------------------------


def triggers(on: Stage) -> None:
    topic = on.mine.topic("t", window="60s", priority=True, dedup_retention="1h")
    assert topic.trigger("a", 1, group="g", version=1, event_id="e", priority=3).accepted
    assert topic.trigger("a", 2, event_id="e").status == "duplicate"
    topic.trigger_many([Trigger("b", group="g"), Trigger("c", delay="5s", priority=1)])
    other = on.other.topic("t", window="60s", priority=True, dedup_retention="1h")
    on.clock.advance("61s")
    taken = other.take(10)
    assert topic.stats().blocked == 1
    topic.trigger("a", 3, group="h", delay="1s")
    topic.trigger("c", 3, delay="9s")
    assert topic.peek("a").in_flight is not None
    assert topic.cancel("a") == "in_flight"
    other.nack(taken[0], delay="1s")
    topic.trigger("a", 4, delay="20s")
    topic.trigger("a", 4, group="i", delay="2s", priority=4)
    on.clock.advance("2h")
    topic.trigger("z", 1)  # what was remembered fades
    for _ in range(2):  # the second call asks how large it is
        topic.trigger_many([Trigger("large", "x" * 2000), Trigger("y")])
    topic.stats()


def waits_for_results(on: Stage) -> None:
    topic, other = on.mine.topic("r", result_retention="1h"), on.other.topic("r", result_retention="1h")
    receipt = topic.trigger("k", 1)
    with pytest.raises(ResultTimeout):
        topic.result(receipt, 0.01)
    other.ack(other.take(), result=7)
    assert topic.result(receipt) == 7
    dropped = topic.trigger("k", 2)
    assert topic.cancel("k") == "cancelled"
    with pytest.raises(NoResult):
        topic.result(dropped)
    on.clock.advance("2h")
    topic.trigger("k", 3)
    assert topic.bury("k") == "buried"

    async def waiting() -> None:
        """The event loop unsubscribes from a channel when no caller waits for it any more."""
        receipts = [await topic.aio.trigger(key) for key in "lm"]
        calls = await topic.aio.open()
        channels = [calls.result_channel(receipt.ticket) for receipt in receipts if receipt.ticket]
        tasks = [asyncio.create_task(topic.aio.result(receipt)) for receipt in receipts]
        await until(on, lambda: all(count for _, count in on.raw.pubsub_numsub(*channels)))
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        await until(on, lambda: not on.raw.pubsub_numsub(channels[0])[0][1])
        tasks[1].cancel()

    awaited(on, waiting)


def changes(on: Stage) -> None:
    on.lasting.topic("now").trigger("k", 1)
    topic = on.mine.topic("t", window="60s", priority=True)
    topic.trigger_many([Trigger(key, 1, group="g") for key in "abcd"])
    assert topic.reschedule("b", group="g", delay="1s")
    assert topic.flush("c", group="g")
    assert topic.flush() >= 1
    other = on.other.topic("t", window="60s", priority=True)
    other.take(1)
    for key in "abcd":
        topic.reschedule(key, group="g", delay="3s")
        topic.flush(key, group="g")
        topic.peek(key, group="g")
        topic.cancel(key, group="g")
    assert topic.stats().pending == 0
    assert topic.pause()
    assert topic.resume()


def begins_anew(on: Stage) -> None:
    """A topic that was forgotten, and one that has other slots by now."""
    mine, other = (gate.topic("t", window="60s") for gate in (on.mine, on.other))
    mine.trigger("a", 1)
    other.reshard(2)
    mine.trigger("a", 2)
    on.other.topic("t").delete(discard=True)
    assert mine.trigger("a", 3).status == "scheduled"
    mine.stats()


def edges(on: Stage) -> None:
    for name, policy in (
        ("leading", {"edge": "leading", "window": "10s"}),
        ("quiet", {"quiet": "2s", "max_delay": "9s", "max_size": 3}),
        ("group", {"group_concurrency": 2}),
    ):
        topic = on.mine.topic(name, **policy)
        for n in range(4):
            topic.trigger("k", n, group="g")
            topic.trigger("l", n, group="g")
        topic.cancel("k", group="g")


# -- worker -----------------------------------------------------------------------------------------------------------


def works(on: Stage) -> None:
    topic = on.mine.topic("t", priority=True, max_attempts=2, rate="1000/s", concurrency=10, dead_retention="1h")
    for key in "abcdefgh":
        topic.trigger(key, key, group="g" if key < "d" else None, priority=1)
    for _ in range(4):
        taken = topic.take(10)
        topic.stats()
        for one in taken:
            if one.key in "ae":
                topic.ack(one)
            elif one.key in "bf":
                topic.nack(one, delay="1s")
            elif one.key == "h":
                topic.bury(one, reason="why")
            else:
                topic.extend(one, "1m")
        on.clock.advance("5m")
    on.clock.advance("2h")
    topic.take(10)
    topic.stats()


def settles(on: Stage) -> None:
    topic = on.mine.topic("t", merge="append", priority=True)
    topic.trigger_many([Trigger(key, n, group=key.upper()) for key in "abc" for n in range(3)])
    first, second, third = topic.take(3)
    topic.trigger(second.key, 7, group=second.group)
    topic.nack(first, items=[0])
    topic.nack(second)
    topic.cancel(third.key, group=third.group)
    topic.nack(third)
    on.clock.advance("1h")
    while taken := topic.take(10):
        topic.ack(taken)


def forwards(on: Stage) -> None:
    for kind in ("list", "stream"):
        for target in (None, f"{on.theirs}{kind}"):
            topic = on.mine.topic(f"{kind}-{target is None}")
            topic.forward(kind, target, keep=1)  # type: ignore[arg-type]
            for _ in range(2):
                topic.trigger_many([Trigger(key, 1, group="g" if key < "c" else None) for key in "abcd"])
                while topic.forward_once():
                    pass
    stream = on.mine.topic("stream-True")

    on.raw.xgroup_create(stream.forward_targets()[0], "g", "0")
    on.raw.xreadgroup("g", "c", {stream.forward_targets()[0]: ">"})
    stream.trim_forwarded()


def belongs(on: Stage) -> None:
    for number, topics in ((1, ("t",)), (2, ("t",)), (3, ())):
        slots = (("t", 0), ("t", 1)) if topics else ()
        said = HeartbeatRequest("m", number, topics, number - 1, (), slots, ())
        on.mine.context.link.run(members.heartbeat(on.mine.namespace, "g", on.clock, said, 60_000))
    said = HeartbeatRequest("n", 1, ("t",), 0, (), (("t", 1),), ())
    on.mine.context.link.run(members.heartbeat(on.mine.namespace, "g", on.clock, said, 1000))
    on.mine.context.link.run(members.leave(on.mine.namespace, "g", on.clock, "m"))
    on.clock.advance("1h")
    said = HeartbeatRequest("o", 1, ("t",), 0, (), (("t", 1),), (("t", 0),))
    on.mine.context.link.run(members.heartbeat(on.mine.namespace, "g", on.clock, said, 1000))
    on.mine.context.link.run(members.list_members(on.mine.namespace, "g", on.clock))
    on.mine.context.link.run(members.leave(on.mine.namespace, "g", on.clock, "o"))


def runs(on: Stage) -> None:
    topic, heard = on.mine.topic("t", slots=2, max_attempts=1), list[str]()

    @topic.handler
    def handle(delivery: Any) -> None:
        heard.append(delivery.key)
        if delivery.key == "b":
            raise Bury("no")
        if delivery.key == "c":
            raise Retry("later", delay="1h")

    async def running() -> None:
        async with on.mine.aio.worker(membership="redis"):
            await topic.aio.trigger_many([Trigger(key, 1) for key in "abc"])
            await until(on, lambda: len(heard) == 3)

    awaited(on, running)


# -- subscriber -------------------------------------------------------------------------------------------------------


def hears(on: Stage) -> None:
    heard = list[object]()

    async def hearing() -> None:
        on.mine.subscribe(f"{on.theirs}.a")(heard.append)
        on.mine.subscribe(f"{on.theirs}.*", pattern=True)(heard.append)
        async with on.mine.aio.subscribers():
            on.raw.publish(f"{on.theirs}.a", "x")
            await until(on, lambda: len(heard) == 2)

    awaited(on, hearing)


def reads(on: Stage) -> None:
    """A stream: made, read, kept, reclaimed, given back, buried, acknowledged, left."""
    name, ran = f"{on.theirs}stream", list[str]()
    hold = asyncio.Event()

    async def reading() -> None:
        @on.mine.stream(name, group="g", reclaim="60ms", max_deliveries=3, max_dead_letters=1)
        async def handle(entry: Any) -> None:
            ran.append(entry.id)
            if entry.fields["n"] == b"0":
                await hold.wait()
            elif entry.fields["n"] == b"1":
                raise Bury("no")
            elif entry.fields["n"] == b"2" and entry.deliveries < 2:
                raise Retry("later", delay="1ms")

        count = on.mine.counters
        async with on.mine.aio.subscribers():
            for n in (0, 1, 1, 2, 3):
                on.raw.xadd(name, {"n": n})
            await until(on, lambda: count["stream.handled"] == 2 and count["stream.dead_trimmed"] == 1)
            if on.raw.exists(name) and on.raw.xinfo_groups(name):
                pending = on.raw.xpending_range(name, "g", "-", "+", 10)
                beaten = [one["time_since_delivered"] for one in pending]
                await until(on, lambda: not beaten or idle(on, name) <= min(30, beaten[0] + 1))
            hold.set()
            await until(on, lambda: count["stream.acked"] == 5)

    awaited(on, reading)


def consumes(on: Stage) -> None:
    """Lists: entries that are moved, taken from each end, renewed, retried, buried, reclaimed and removed."""
    name, hold = f"{on.theirs}:{{list}}", asyncio.Event()
    gate = on.lasting  # leases are renewed by the server's clock
    _, incoming, leases, *_ = list_keys(name)
    count = gate.counters

    def last_lease() -> float:
        return max((score for _, score in on.raw.zrange(leases, 0, -1, withscores=True)), default=0)

    async def handle(entry: Any) -> None:
        if entry.data == b"hold":
            await hold.wait()
        elif entry.data == b"bury":
            raise Bury("no")
        elif entry.data == b"retry" and entry.deliveries < 2:
            raise Retry("later", delay=0)

    async def consuming() -> None:
        gate.consume_list(name, reclaim="60ms", max_dead_letters=1)(handle)
        gate.consume_list(f"{name}2", pop="right")(handle)
        on.raw.zadd(leases, {"0": 1})
        on.raw.lpush(f"{name}2", "x")
        async with gate.aio.subscribers():
            for data in ("hold", "bury", "bury", "retry"):
                on.raw.rpush(name, data)
            await until(on, lambda: count["list.acked"] == 4 and count["list.dead_trimmed"] == count["list.missing"])
            first = last_lease()
            await until(on, lambda: last_lease() > first)
            on.raw.rpush(incoming, "moved")
            hold.set()
            await until(on, lambda: count["list.acked"] == 6)

    async def closing() -> None:
        try:
            await consuming()
        finally:
            await gate.aio.close()

    awaited(on, closing)


def idle(on: Stage, name: str) -> int:
    return min((one["time_since_delivered"] for one in on.raw.xpending_range(name, "g", "-", "+", 10)), default=0)


def looks(on: Stage) -> None:
    on.raw.set(f"{on.theirs}k", "x", px=60_000)
    assert on.lasting.context.link.run(expiry.look(f"{on.theirs}k".encode(), None)).expires


def scans(on: Stage) -> None:
    """It finds what expires, without being told; the due set is a producer's."""
    on.raw.set(f"{on.theirs}k", "x", px=60_000)

    async def scanning() -> None:
        on.mine.on_expired("due", f"{on.theirs}*", notifications="assume")
        async with on.mine.aio.subscribers():
            await until(on, lambda: on.mine.counters["expiry.scans"])
            on.raw.delete(f"{on.theirs}k")  # whether a primary says so is asked
            await until(on, lambda: "gone" in on.other.topic("due").peek(f"{on.theirs}k").pending.payload)

    awaited(on, scanning)


# -- viewer and admin -------------------------------------------------------------------------------------------------


def views(on: Stage) -> None:
    topic = on.other.topic("t", window="1s", priority=True)
    topic.trigger_many([Trigger(key, 1, group="g") for key in "abc"])
    topic.flush()
    topic.bury(topic.take(1)[0], reason="why")
    topic.trigger(topic.take(9)[0].key, 2, group="g")
    on.other.first("f", "1h")
    said = HeartbeatRequest("m", 1, ("t",), 0, (), (("t", 0),), ())
    on.other.context.link.run(members.heartbeat(on.other.namespace, "g", on.clock, said, 60_000))
    seen = on.mine.topic("t", window="1s", priority=True)
    stats = seen.stats()
    assert (stats.dead, stats.blocked, stats.waiting) == (1, 1, 1)
    assert len(seen.dead.list()) == 1
    for key in "abc":
        seen.peek(key, group="g")
    assert on.mine.inspect("f", scope="first").state == "done"
    assert set(on.mine.context.link.run(members.list_members(on.mine.namespace, "g", on.clock)).members) == {"m"}
    assert [one.name for one in on.mine.stored_topics()] == ["t"]
    on.lasting.context.link.run(registry.list_entries(on.mine.namespace, None))
    on.mine.context.link.run(read_slot(Slot(on.mine.namespace, "t", 0, 1), on.clock, 1000, 100_000))
    asks(on.other, "topic", "pause", topic="t")
    assert [act["what"] for act in asks(on.mine, "act", "ls")] == ["topic pause t"]
    assert len(asks(on.mine, "key", "show", key="f")["records"]) == 1
    reporting: Any = on.other.context.observer
    reporting.beat()
    assert len(asks(on.mine, "worker", "ls")["processes"]) == 1


def asks(gate: Gate, noun: str, name: str, **given: Any) -> Any:
    """Does what the command `idemgate NOUN NAME` does."""
    (verb,) = [one for one in VERBS if (one.noun, one.name) == (noun, name)]
    empty = {"flag": False, "texts": []}
    whole = {one.name: empty.get(one.kind) for one in verb.parameters} | given
    return perform(gate, verb, whole, who="tests")


def operates(on: Stage) -> None:
    """Guarded keys: held, running, done, forgotten. Processes."""
    reporting: Any = on.other.context.observer
    reporting.beat()
    assert len(asks(on.mine, "worker", "ls")["processes"]) == 1
    on.other.claim("held", lease="1s", on_lease_loss="hold")
    calls = claims_of(on.other)
    on.other.context.link.run(calls.claim(calls.key("claim", "held"), new_id(), 1000, 1000, wait=True))
    on.clock.advance("1h")
    held = {"key": "held", "scope": "claim"}
    assert asks(on.mine, "key", "show", key="held")["records"][0]["state"] == "held"
    assert asks(on.mine, "key", "resolve", **held, done=True, retention=60.0)["resolved"]
    assert asks(on.mine, "key", "forget", **held)["forgotten"]
    on.other.claim("runs")
    assert asks(on.mine, "key", "cancel", key="runs")["asked"]
    on.other.claim("asked", lease="1s", on_lease_loss="hold")
    on.clock.advance("1h")
    on.other.once(key="{n}", scope="claim")(lambda n: n)(1)
    on.lasting.context.link.run(register_retention(on.other.context, "claim", 60_000))
    assert asks(on.mine, "key", "resolve", key="asked", done=True)["resolved"]
    notes(on.mine)


def operates_on_topics(on: Stage) -> None:
    topic = on.other.topic("t", window="60s", priority=True)
    for key in "abcd":
        topic.trigger(key, 1, group="g", event_id=key, version=1)
    assert asks(on.mine, "topic", "trigger", topic="t", key="e", payload=1, delay=60.0)["status"] == "scheduled"
    assert asks(on.mine, "topic", "trigger", topic="t", key="e", payload=2)["status"] == "merged"
    assert asks(on.mine, "topic", "move", topic="t", key="e", delay=30.0)["outcome"] == "rescheduled"
    assert asks(on.mine, "topic", "cancel", topic="t", key="e")["outcome"] == "cancelled"
    assert asks(on.mine, "topic", "bury", topic="t", key="d")["outcome"] == "buried"
    assert asks(on.mine, "dead", "redrive", topic="t", key="d")["redriven"] == 1
    assert asks(on.mine, "topic", "flush", topic="t")["moved"] == 3
    for key in "ab":
        (taken,) = topic.take(9)
        topic.trigger(taken.key, 2, group="g")
        assert asks(on.mine, "topic", "show", topic="t")["oldest_blocked"] == "g"
        topic.cancel(taken.key, group="g")
        topic.bury(taken, reason=key)
    assert len(asks(on.mine, "dead", "ls", topic="t")) == 2
    assert asks(on.mine, "dead", "redrive", topic="t", key="a")["redriven"] == 1
    lines = Lines("file", [json.dumps(one, default=str) for one in asks(on.mine, "dead", "export", topic="t")])
    assert asks(on.mine, "dead", "import", topic="t", file=lines)["present"] == 1
    assert asks(on.mine, "dead", "rm", topic="t", all=True)["deleted"] == 1
    assert asks(on.mine, "dead", "import", topic="t", file=lines)["added"] == 1
    assert asks(on.mine, "topic", "versions", topic="t", key="c", group="g")["version"] == 1
    assert asks(on.mine, "topic", "reset-version", topic="t", key="c", group="g")["reset"]
    page = asks(on.mine, "topic", "messages", topic="t", limit=1)
    assert asks(on.mine, "topic", "messages", topic="t", after=page["after"])["messages"]
    on.other.topic("to", window="60s").trigger("c", 1, version=1, group="g")
    assert asks(on.mine, "topic", "transfer", topic="t", to="to")["moved"] == 3
    on.other.topic("t").trigger("c", 0, version=0, group="g")
    on.other.topic("to").trigger("c", 1, version=2, group="g")
    assert asks(on.mine, "topic", "transfer", topic="t", to="to")["dropped"] == 1
    assert asks(on.mine, "topic", "pause", topic="t")["paused"]
    assert asks(on.mine, "topic", "reshard", topic="t", slots=4)["slots"] == 4
    assert asks(on.mine, "topic", "resume", topic="t")["resumed"]
    assert asks(on.mine, "topic", "delete", topic="t", discard=True)["deleted"]


def administers(on: Stage) -> None:
    topic = on.mine.topic("t", window="60s", priority=True)
    for key in "abcd":
        topic.trigger(key, 1, group="g", event_id=key, version=1)
    topic.flush()
    topic.bury(topic.take(1)[0], reason="why")
    assert topic.pause()
    topic.reshard(4)
    topic.reshard(2)
    assert topic.resume()
    assert topic.dead.redrive() == 1
    on.mine.topic("t").delete(discard=True)
    said = HeartbeatRequest("m", 1, ("t",), 0, (), (("t", 0),), ())
    on.mine.context.link.run(members.heartbeat(on.mine.namespace, "g", on.clock, said, 60_000))
    assert not audit(on.mine).critical


def audits(on: Stage) -> None:
    """Of everything something, and of some of it something that is wrong."""
    topic = on.other.topic("t", slots=2)
    topic.trigger_many([Trigger(key, 1, group="g", event_id=key, version=1) for key in "abcd"])
    topic.trigger("later", delay="1h")
    topic.bury(topic.take(1)[0], reason="why")
    topic.trigger(topic.take(9)[0].key, 2, group="g")
    assert on.mine.context.link.run_all(topic.open().stats()).blocked == 2
    on.other.topic("list").forward("list")
    on.other.topic("list").trigger("k", 1)
    assert on.other.topic("list").forward_once() == 1
    on.other.first("f", "1h")
    on.other.dedup("s", "1h").add("f")
    on.other.dedup("s", "1h").get_or_set("f", 1)
    said = HeartbeatRequest("m", 1, ("t",), 0, (), (("t", 0),), ())
    on.other.context.link.run(members.heartbeat(on.other.namespace, "g", on.clock, said, 60_000))
    asks(on.other, "topic", "resume", topic="t")
    assert audit(on.mine).sound
    for key in on.raw.scan_iter(f"*{on.mine.namespace}:topic:t:*scheduled"):
        on.raw.delete(key)
        on.raw.set(key, "x")
    # The clock of the server, which is far from that of the tests
    report = audit(on.url, on.mine.namespace)
    assert "wrong-type" in report.by_kind
    assert "unread" not in report.by_kind, report


def examines_only(on: Stage) -> None:
    told = examine_store(Namespace(on.url, on.mine.namespace), writes=False)
    assert {check.name for _, check in told if check.state == "critical"} <= {"persistence"}, told


def examines(on: Stage) -> None:
    assert len(examine_store(Namespace(on.url, on.mine.namespace))) > 5


async def until(on: Stage, happens: Callable[[], Any]) -> None:
    """AssertionError as soon as the server refused anything: then it will not happen."""
    end = time.monotonic() + 30.0
    while not happens():
        refused = [one["object"] for one in on.raw.acl_log() if one["object"] != "client|setinfo"]
        assert not refused, refused
        assert time.monotonic() < end, "it did not come to pass"
        await asyncio.sleep(0.002)


GUARD = [guards, marks, waits, reports]
PRODUCER = [triggers, waits_for_results, changes, begins_anew, edges, reports]
WORKER = [*PRODUCER, works, settles, forwards, belongs, runs]
SCENES: dict[str, list[Scene]] = {
    "guard": GUARD,
    "producer": PRODUCER,
    "worker": WORKER,
    "subscriber": [looks, hears, reads, consumes, scans, reports],
    "viewer": [views],
    "operator": [operates, operates_on_topics],
    "auditor": [audits, examines_only],
    "admin": [*GUARD, *WORKER, views, operates, operates_on_topics, administers, looks, examines],
}
BESIDE = {scans: ["producer"]}
"""Roles that a scene needs beside the one it is of."""
