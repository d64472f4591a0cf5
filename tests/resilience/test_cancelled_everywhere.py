"""Every coroutine of the awaiting faces that writes, cancelled at each of its awaits, and once more while it cleans up
after that.

Whatever the await: what is then in the store is what the caller knows or may find out. A key is done, or free; a
trigger counts once or not at all; a delivery is in flight, or back, or ended; nobody else gets a wrong answer; no
listener and no task stays behind.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from idemgate import Gate
from idemgate.dedup.dedup import AioDedup
from idemgate.errors import ServerRejected
from idemgate.gate import AioGate
from idemgate.guard.batch import AioClaimBatch
from idemgate.guard.claim import AioClaim
from idemgate.guard.current import AioExecution
from idemgate.subscribers.expiry.expiry import AioExpiry
from idemgate.testing import Clock
from idemgate.topics.dead_letters import AioDeadLetters
from idemgate.topics.decorator import AioMergedFunction
from idemgate.topics.topic import AioTopic
from tests.resilience.cancelling import cancelled_at

Work = Callable[[], Coroutine[Any, Any, Any]]
Check = Callable[[Any], Awaitable[None]]


class Case:
    """Cancel `work`, once or `twice`. `check` gets the result."""

    def __init__(self, gate: Gate, clock: Clock, key: str, twice: bool) -> None:
        self.gate, self.aio, self.clock, self.key, self.twice = gate, gate.aio, clock, key, twice
        self.topic = gate.topic("t", merge="append", lease="30s", backoff=0).aio
        self.runs = 0

    async def state(self, scope: str = "s") -> str:
        return (await self.aio.inspect(self.key, scope=scope)).state


def is_cancelled(outcome: Any) -> bool:
    return isinstance(outcome, asyncio.CancelledError)


# -- the guard --------------------------------------------------------------------------------------------------------


def once(case: Case) -> tuple[Work, Check]:
    @case.gate.once(key="{k}", scope="s")
    async def handle(k: str) -> str:
        await asyncio.sleep(0)
        case.runs += 1
        await asyncio.sleep(0)
        return k

    async def check(outcome: Any) -> None:
        record = await case.aio.inspect(case.key, scope="s")
        assert record.state in ("done", "released", "absent")
        assert outcome == case.key or is_cancelled(outcome)
        assert record.state == "done" or is_cancelled(outcome)
        # It ran at most once, and what is not done runs, once more
        ran, done = case.runs, record.state == "done"
        assert ran == 1 or (ran == 0 and not done)
        assert await handle(case.key) == case.key
        assert case.runs == ran + (not done)

    return lambda: handle(case.key), check


def once_that_waits(case: Case) -> tuple[Work, Check]:
    @case.gate.once(key="{k}", scope="s", on_in_progress="wait")
    async def handle(k: str) -> str:
        case.runs += 1
        return k

    async def work() -> str:
        owner = await case.aio.claim(case.key, scope="s")
        release = owner._end_with(owner._build_release())
        asyncio.get_running_loop().call_later(0.02, lambda: case.aio.context.aio_link.start(release))
        return await handle(case.key)

    async def check(outcome: Any) -> None:
        async with asyncio.timeout(30):  # until the other owner has let go; a claim that is left would stay
            while await case.state() == "in_progress":
                await asyncio.sleep(0.005)
        assert await handle(case.key) == case.key
        assert case.runs == 1

    return work, check


def a_block(case: Case) -> tuple[Work, Check]:
    async def work() -> None:
        async with case.aio.claim(case.key, scope="s") as claim:
            await asyncio.sleep(0)
            await claim.checkpoint("x")
            await claim.extend()

    async def check(outcome: Any) -> None:
        assert await case.state() in (("done", "released", "absent") if outcome else ("done",))

    return work, check


def a_claim(case: Case) -> tuple[Work, Check]:
    got: list[Any] = []

    async def work() -> None:
        got.append(await case.aio.claim(case.key, scope="s"))
        await got[0].complete("result")

    async def check(outcome: Any) -> None:
        state = await case.state()
        if got and state != "done":
            assert state == "in_progress"  # its holder knows, and may go on
            assert await got[0].complete("result")
        elif not got:
            assert state in ("released", "absent")

    return work, check


def a_batch(case: Case) -> tuple[Work, Check]:
    keys = [case.key, f"{case.key}b"]
    got: list[Any] = []

    async def work() -> None:
        got.extend(await case.aio.claim_many([*keys, case.key], scope="s"))
        await case.aio.complete_many([(got[0], "result")])
        await case.aio.release_many(got[1:2])

    async def check(outcome: Any) -> None:
        states = [(await case.aio.inspect(key, scope="s")).state for key in keys]
        if not got:
            assert set(states) <= {"released", "absent"}
        else:  # its holder knows, and may go on
            assert states[0] in ("done", "in_progress")
            assert states[1] in ("released", "in_progress")
            assert await case.aio.complete_many([(got[0], "result")]) == [True]

    return work, check


def a_batch_in_a_block(case: Case) -> tuple[Work, Check]:
    keys = [case.key, f"{case.key}b"]

    async def work() -> None:
        async with case.aio.claim_many(keys, scope="s") as claims:
            await asyncio.sleep(0)
            await case.aio.complete_many([(claims[0], "result")])

    async def check(outcome: Any) -> None:
        states = [(await case.aio.inspect(key, scope="s")).state for key in keys]
        assert states == ["done", "released"] or is_cancelled(outcome)
        assert "in_progress" not in states

    return work, check


def first(case: Case) -> tuple[Work, Check]:
    async def check(outcome: Any) -> None:
        assert not await case.aio.first(case.key, "1h") or is_cancelled(outcome)

    return lambda: case.aio.first(case.key, "1h"), check


def first_many(case: Case) -> tuple[Work, Check]:
    keys = [case.key, f"{case.key}b"]

    async def check(outcome: Any) -> None:
        again = await case.aio.first_many([*keys, f"{case.key}c"], "1h")
        assert again == [False, False, True] or is_cancelled(outcome)

    return lambda: case.aio.first_many(keys, "1h"), check


def dedup_add(case: Case) -> tuple[Work, Check]:
    dedup = case.aio.dedup("s", "1h")

    async def check(outcome: Any) -> None:
        assert not await dedup.add(case.key) or is_cancelled(outcome)

    return lambda: dedup.add(case.key), check


def dedup_add_many(case: Case) -> tuple[Work, Check]:
    dedup, keys = case.aio.dedup("s", "1h"), [case.key, f"{case.key}b"]

    async def check(outcome: Any) -> None:
        again = await dedup.add_many([*keys, f"{case.key}c"])
        assert again == [False, False, True] or is_cancelled(outcome)

    return lambda: dedup.add_many(keys), check


def dedup_get_or_set(case: Case) -> tuple[Work, Check]:
    dedup = case.aio.dedup("s", "1h")

    async def check(outcome: Any) -> None:
        found = await dedup.get_or_set(case.key, 8)
        assert found.value == (8 if found.first else 7)
        assert not found.first or is_cancelled(outcome)
        assert await dedup.get(case.key) == found.value

    return lambda: dedup.get_or_set(case.key, 7), check


def dedup_get_or_set_many(case: Case) -> tuple[Work, Check]:
    dedup, pairs = case.aio.dedup("s", "1h"), [(case.key, 7), (f"{case.key}b", 7)]

    async def check(outcome: Any) -> None:
        found = await dedup.get_or_set_many([(key, 8) for key, _ in pairs])
        assert all(one.value == (8 if one.first else 7) for one in found)
        assert not any(one.first for one in found) or is_cancelled(outcome)

    return lambda: dedup.get_or_set_many(pairs), check


def forget(case: Case) -> tuple[Work, Check]:
    async def work() -> bool:
        await case.aio.first(case.key, "1h", scope="s")
        return await case.aio.forget(case.key, scope="s")

    async def check(outcome: Any) -> None:
        assert await case.state() in (("absent", "done") if is_cancelled(outcome) else ("absent",))
        await case.aio.forget(case.key, scope="s")
        assert await case.state() == "absent"

    return work, check


def resolve(case: Case) -> tuple[Work, Check]:
    async def work() -> bool:
        await case.aio.claim(case.key, scope="s", on_lease_loss="hold")
        case.clock.advance("31s")
        return await case.aio.resolve(case.key, done=True, result="decided", scope="s")

    async def check(outcome: Any) -> None:
        case.clock.advance("31s")
        state = await case.state()
        assert state in (("absent", "released", "held", "done") if is_cancelled(outcome) else ("done",))
        if state == "held":  # nobody has decided: it may still be
            assert await case.aio.resolve(case.key, done=True, result="decided", scope="s")
        if state in ("held", "done"):
            assert (await case.aio.claim(case.key, scope="s")).result == "decided"

    return work, check


def waiting(case: Case) -> tuple[Work, Check]:
    async def work() -> str:
        owner = await case.aio.claim(case.key, scope="s")
        release = owner._end_with(owner._build_release())
        asyncio.get_running_loop().call_later(0.02, lambda: case.aio.context.aio_link.start(release))
        other = await case.aio.claim(case.key, scope="s")
        return await other.wait("20s")

    async def check(outcome: Any) -> None:
        assert outcome == "started" or is_cancelled(outcome)
        if outcome == "started":
            assert await case.state() == "in_progress"  # its owner goes on
            return
        async with asyncio.timeout(30):  # until the first owner has let go; a claim that is left would stay
            while await case.state() == "in_progress":
                await asyncio.sleep(0.005)

    return work, check


# -- topics -----------------------------------------------------------------------------------------------------------


def trigger(case: Case) -> tuple[Work, Check]:
    async def check(outcome: Any) -> None:
        pending = (await case.topic.peek(case.key)).pending
        assert pending is None if outcome is None else (pending is None or pending.payload == [1])
        # Sent again with the same event id, it counts once in all.
        await case.topic.trigger(case.key, 1, event_id=case.key)
        assert (await case.topic.peek(case.key)).pending.payload == [1]  # type: ignore[union-attr]

    return lambda: case.topic.trigger(case.key, 1, event_id=case.key), check


def trigger_many(case: Case) -> tuple[Work, Check]:
    triggers = [(case.key, 1), (case.key, 2), (f"{case.key}b", 3)]

    async def check(outcome: Any) -> None:
        pending = (await case.topic.peek(case.key)).pending
        assert pending is None or pending.payload == [1, 2]

    return lambda: case.topic.trigger_many(triggers), check


def take(case: Case) -> tuple[Work, Check]:
    async def work() -> Any:
        await case.topic.trigger(case.key, 1, event_id=case.key)
        return await case.topic.take(1)

    async def check(outcome: Any) -> None:
        if is_cancelled(outcome):
            await case.topic.trigger(case.key, 1, event_id=case.key)
            case.clock.advance("30s")
            outcome = await case.topic.take(1)
        assert [one.payload for one in outcome] == [[1]]
        assert await case.topic.ack(outcome) == ["ok"]
        assert (await case.topic.peek(case.key)) == (await case.topic.peek("never seen"))

    return work, check


def ended(verb: str) -> Callable[[Case], tuple[Work, Check]]:
    def build(case: Case) -> tuple[Work, Check]:
        async def work() -> Any:
            await case.topic.trigger(case.key, 1)
            taken = await case.topic.take(1)
            return await getattr(case.topic, verb)(taken)

        async def check(outcome: Any) -> None:
            case.clock.advance("30s")
            left = await case.topic.take(10)
            assert left == [] or is_cancelled(outcome) or verb not in ("ack", "bury")
            await case.topic.ack(left)
            stats = await case.topic.stats()
            assert (stats.pending, stats.in_flight) == (0, 0)
            ends = stats["acked_triggers"] + stats.dead
            assert ends == stats["accepted"]

        return work, check

    return build


def cancel(case: Case) -> tuple[Work, Check]:
    async def work() -> str:
        await case.topic.trigger(case.key, 1)
        return await case.topic.cancel(case.key)

    async def check(outcome: Any) -> None:
        assert outcome == "cancelled" or is_cancelled(outcome)
        again = await case.topic.cancel(case.key)
        assert again == "absent" or (again == "cancelled" and is_cancelled(outcome))
        assert (await case.topic.peek(case.key)).pending is None

    return work, check


def reschedule(case: Case) -> tuple[Work, Check]:
    async def work() -> str:
        await case.topic.trigger(case.key, 1)
        return await case.topic.reschedule(case.key, delay="1h")

    async def check(outcome: Any) -> None:
        assert outcome == "rescheduled" or is_cancelled(outcome)
        left = await case.topic.take(10)
        assert left == [] or is_cancelled(outcome)
        await case.topic.ack(left)
        await case.topic.cancel(case.key)
        assert (await case.topic.peek(case.key)).pending is None

    return work, check


def flush(case: Case, whole: bool = False) -> tuple[Work, Check]:
    async def work() -> int:
        await case.topic.trigger(case.key, 1, delay="1h", event_id=case.key)
        return await case.topic.flush(None if whole else case.key)

    async def check(outcome: Any) -> None:
        assert outcome == 1 or is_cancelled(outcome)
        left = await case.topic.take(10)
        assert left or is_cancelled(outcome)
        await case.topic.ack(left)
        await case.topic.cancel(case.key)
        assert (await case.topic.peek(case.key)).pending is None

    return work, check


def exhumed(verb: str) -> Callable[[Case], tuple[Work, Check]]:
    def build(case: Case) -> tuple[Work, Check]:
        topic = case.gate.topic(case.key, merge="append", lease="30s", backoff=0).aio

        async def work() -> int:
            await topic.trigger(case.key, 1)
            await topic.bury(await topic.take(1))
            return int(await getattr(topic.dead, verb)())

        async def check(outcome: Any) -> None:
            assert outcome == 1 or is_cancelled(outcome)
            case.clock.advance("30s")
            stats = await topic.stats()
            there = stats.pending + stats.in_flight + stats.dead
            gone = stats["deleted_triggers"]
            assert there + gone == stats["accepted"]
            assert (verb == "redrive" and there == 1) or gone == 1 or is_cancelled(outcome)
            await topic.dead.redrive()
            assert await topic.ack(await topic.take(10)) == ["ok"] * there

        return work, check

    return build


def loaded(case: Case) -> tuple[Work, Check]:
    """Bury by the key, delete, load."""
    topic = case.gate.topic(case.key, merge="append", lease="30s").aio

    async def work() -> int:
        await topic.trigger(case.key, 1)
        await topic.bury(case.key)
        stored = [letter.stored for letter in await topic.dead.list()]
        await topic.dead.delete()
        return (await topic.dead.load(stored)).added

    async def check(outcome: Any) -> None:
        assert outcome == 1 or is_cancelled(outcome)
        stats = await topic.stats()
        assert stats.pending + stats.dead + stats["deleted_triggers"] == stats["accepted"]
        assert stats.dead == 1 or is_cancelled(outcome)
        await topic.dead.redrive()
        assert set(await topic.ack(await topic.take(10))) <= {"ok"}

    return work, check


def result(case: Case) -> tuple[Work, Check]:
    topic = case.gate.topic("r", result_retention="1h").aio

    async def work() -> Any:
        receipt = await topic.trigger(case.key, 1)
        waiting = asyncio.ensure_future(topic.result(receipt, "20s"))
        try:
            await asyncio.sleep(0)
            await topic.ack(await topic.take(10), result="done")
            return await waiting
        finally:
            waiting.cancel()

    async def check(outcome: Any) -> None:
        assert outcome == "done" or is_cancelled(outcome)
        case.clock.advance("1m")
        await topic.ack(await topic.take(10), result="later")
        assert (await topic.stats()).pending == 0

    return work, check


def forward_once(case: Case) -> tuple[Work, Check]:
    plain = case.gate.topic(case.key, merge="append")
    plain.forward("list", f"{case.gate.namespace}:{case.key}")

    async def work() -> int:
        await plain.aio.trigger(case.key, 1)
        return await plain.aio.forward_once()

    async def check(outcome: Any) -> None:
        assert outcome == 1 or is_cancelled(outcome)
        await plain.aio.forward_once()
        stats = await plain.aio.stats()
        assert (stats.pending, stats["forwarded"]) == (0, stats["accepted"])
        sent = await case.aio.context.aio_link.command("LLEN", f"{case.gate.namespace}:{case.key}")
        assert sent == stats["accepted"]
        await case.aio.context.aio_link.command("DEL", f"{case.gate.namespace}:{case.key}")

    return work, check


def reshard(case: Case) -> tuple[Work, Check]:
    topic = case.gate.topic(case.key, merge="append").aio

    async def work() -> int:
        await topic.trigger_many([(n, n) for n in range(5)])
        return (await topic.reshard(4)).after

    async def check(outcome: Any) -> None:
        assert outcome == 4 or is_cancelled(outcome)
        assert (await topic.reshard(4)).after == 4  # the next call ends it
        stats = await topic.stats()
        assert stats.pending == stats["accepted"]
        assert len(await topic.ack(await topic.take(10))) == stats["accepted"]

    return work, check


def forgotten(case: Case) -> tuple[Work, Check]:
    topic = case.gate.topic(case.key, merge="append").aio

    async def work() -> Any:
        await topic.trigger(case.key, 1)
        return await topic.delete(discard=True)

    async def check(outcome: Any) -> None:
        assert is_cancelled(outcome) or (outcome.known, outcome.pending) == (True, 1)
        await topic.delete(discard=True)
        assert case.key not in [one.name for one in await case.aio.stored_topics()]
        await topic.trigger(case.key, 2)  # which makes it anew
        assert [one.payload for one in await topic.take(10)] == [[2]]
        await topic.delete(discard=True)

    return work, check


def paused(case: Case) -> tuple[Work, Check]:
    topic = case.gate.topic(case.key, merge="append").aio

    async def work() -> bool:
        await topic.trigger(case.key, 1, event_id=case.key)
        return await topic.pause() and await topic.resume()

    async def check(outcome: Any) -> None:
        assert outcome is True or is_cancelled(outcome)
        await topic.trigger(case.key, 1, event_id=case.key)
        await topic.resume()
        assert [one.payload for one in await topic.take(10)] == [[1]]

    return work, check


def handling(case: Case, handled: list[int]) -> Check:
    """A handler of the topic that notes what it gets. What it did not get is still there."""

    async def handle(delivery: Any) -> None:
        await asyncio.sleep(0)
        handled.extend(delivery.payload)

    case.gate.topics["t"].definition.handler = handle  # another one each time

    async def check(outcome: Any) -> None:
        await case.topic.trigger(case.key, 1, event_id=case.key)
        case.clock.advance("30s")
        left = await case.topic.take(10)
        await case.topic.ack(left)
        stats = await case.topic.stats()
        assert (stats.pending, stats.in_flight) == (0, 0)
        assert len(handled) + len(left) >= 1
        assert stats["accepted"] == stats["acked_triggers"]

    return check


def worker(case: Case, **options: Any) -> tuple[Work, Check]:
    handled: list[int] = []
    check = handling(case, handled)

    async def work() -> None:
        async with case.aio.worker(grace="5s", **options):
            await case.topic.trigger(case.key, 1, event_id=case.key)
            while not handled:
                await asyncio.sleep(0.001)

    return work, check


def drain(case: Case) -> tuple[Work, Check]:
    check = handling(case, [])

    async def work() -> None:
        await case.topic.trigger(case.key, 1, event_id=case.key)
        await case.aio.drain()

    return work, check


def worker_that_is_run(case: Case) -> tuple[Work, Check]:
    handled: list[int] = []

    async def handle(delivery: Any) -> None:
        await asyncio.sleep(0)
        handled.extend(delivery.payload)

    case.topic.definition.handler = handle
    worker = case.aio.worker("t", grace="5s")

    async def work(moving: bool = False) -> None:
        """Until it has handled something."""
        stop = asyncio.Event()

        async def until() -> None:
            await case.topic.trigger(case.key, 1)
            while not handled:
                await asyncio.sleep(0.001)
                if moving:
                    case.clock.advance("1s")
            stop.set()

        waiting = asyncio.create_task(until())
        try:
            await worker.run(stop)
        finally:
            waiting.cancel()

    async def check(outcome: Any) -> None:
        handled.clear()
        await work(moving=case.twice)  # begun anew; who was cancelled twice may have left a lease to lapse
        assert handled

    return work, check


# -- subscribers ------------------------------------------------------------------------------------------------------


def told(case: Case, handle: Callable[[Any], Any], happened: Callable[[], object], grace: float) -> Work:
    """Listens to a channel, in which something is published until it `happened`; that ends it."""
    name = f"{case.gate.namespace}:{case.key}"
    case.gate.subscribe(name)(handle)
    listener = case.gate.subscribers.pop()

    async def work() -> None:
        stop, ready = asyncio.Event(), asyncio.Event()

        async def publish() -> None:
            await ready.wait()
            while not happened():
                await case.aio.context.aio_link.command("PUBLISH", name, "news")
                await asyncio.sleep(0.01)
            stop.set()

        publishing = asyncio.create_task(publish())
        try:
            await listener.run(stop, grace=grace, ready=ready.set)
        finally:
            publishing.cancel()

    return work


def channel(case: Case) -> tuple[Work, Check]:
    heard: list[bytes] = []

    async def handle(one: Any) -> None:
        await asyncio.sleep(0)
        heard.append(one.data)

    work = told(case, handle, lambda: heard, grace=5.0)

    async def check(outcome: Any) -> None:
        heard.clear()
        await work()  # and it can be begun anew
        assert heard

    return work, check


def subscribers(case: Case) -> tuple[Work, Check]:
    heard: list[bytes] = []
    name = f"{case.gate.namespace}:{case.key}"
    case.gate.subscribers.clear()

    @case.gate.subscribe(name)
    async def handle(one: Any) -> None:
        heard.append(one.data)

    async def work() -> None:
        async with case.aio.subscribers(grace="5s"):
            await case.aio.context.aio_link.command("PUBLISH", name, "news")
            while not heard:
                await asyncio.sleep(0.001)

    async def check(outcome: Any) -> None:
        heard.clear()
        await work()
        assert heard == [b"news"]

    return work, check


def stream(case: Case) -> tuple[Work, Check]:
    handled: list[str] = []
    name = f"{case.gate.namespace}:{case.key}:stream"

    @case.gate.stream(name, group="g", consumer="c", reclaim="1s")
    async def handle(entry: Any) -> None:
        await asyncio.sleep(0)
        handled.append(entry.id)

    reader = case.gate.subscribers.pop()

    async def work() -> None:
        """Reads until nothing is left that was not acknowledged."""
        stop = asyncio.Event()
        await case.aio.context.aio_link.command("XADD", name, "*", "a", "1")

        async def acknowledged() -> None:
            while True:
                with suppress(ServerRejected):  # the group is not made yet
                    (pending, *_) = await case.aio.context.aio_link.command("XPENDING", name, "g")
                    (facts,) = await case.aio.context.aio_link.command("XINFO", "GROUPS", name)
                    lag = dict(zip(facts[::2], facts[1::2], strict=True))[b"last-delivered-id"]
                    last = (await case.aio.context.aio_link.command("XREVRANGE", name, "+", "-", "COUNT", "1"))[0][0]
                    if pending == 0 and lag == last:
                        stop.set()
                        return
                await asyncio.sleep(0.01)

        waiting = asyncio.create_task(acknowledged())
        try:
            await reader.run(stop, grace=5.0)
        finally:
            waiting.cancel()

    async def check(outcome: Any) -> None:
        await work()  # the next one gets what the one that was cancelled had
        entries = [entry for entry, _ in await case.aio.context.aio_link.command("XRANGE", name, "-", "+")]
        assert {entry.decode() for entry in entries} == set(handled)
        assert await case.aio.context.aio_link.command("DEL", name)

    return work, check


def channel_that_is_busy(case: Case) -> tuple[Work, Check]:
    """Stopped while a callback runs, which ends when it is cancelled only."""
    running: list[Any] = []

    async def handle(one: Any) -> None:
        running.append(one)
        try:
            await asyncio.Event().wait()
        finally:
            running.pop()

    async def check(outcome: Any) -> None:
        assert not running

    return told(case, handle, lambda: running, grace=0.05), check


def channel_of_threads(case: Case) -> tuple[Work, Check]:
    heard: list[bytes] = []

    async def check(outcome: Any) -> None:
        async with asyncio.timeout(30):
            while [one for one in threading.enumerate() if one.name.startswith("idemgate-subscriber")]:
                await asyncio.sleep(0.003)

    return told(case, lambda one: heard.append(one.data), lambda: heard, grace=5.0), check


def expiring(case: Case) -> tuple[Work, Check]:
    name = f"{case.gate.namespace}.{case.key}"
    expiry = case.gate.on_expired(name, f"{name}:*", notifications="assume")
    case.gate.subscribers.clear()

    async def work() -> None:
        stop = asyncio.Event()
        await expiry.run(stop, grace=5.0, ready=lambda: asyncio.get_running_loop().call_later(0.01, stop.set))

    async def check(outcome: Any) -> None:
        """Begun anew it keeps the due set: what is to expire is in there, once."""
        await case.aio.context.aio_link.command("SET", f"{name}:1", "x", "PX", "3600000")
        stop = asyncio.Event()
        async with asyncio.timeout(30):
            running = asyncio.create_task(expiry.run(stop, grace=5.0))
            while (await expiry.topic.aio.peek(f"{name}:1")).pending is None:
                await asyncio.sleep(0.003)
            stop.set()
            await running
        stats = await expiry.topic.aio.stats()
        assert (stats.pending, stats.in_flight, stats.dead) == (1, 0, 0)
        assert await expiry.aio.untrack(f"{name}:1") == "cancelled"
        await case.aio.context.aio_link.command("DEL", f"{name}:1")

    return work, check


def tracking(case: Case) -> tuple[Work, Check]:
    name = f"{case.gate.namespace}.{case.key}"
    expiry = case.gate.on_expired(name, f"{name}:*", notifications="assume").aio
    case.gate.subscribers.clear()

    async def work() -> str:
        await case.aio.context.aio_link.command("SET", f"{name}:1", "x", "PX", "3600000")
        await expiry.track(f"{name}:1")
        return await expiry.untrack(f"{name}:1")

    async def check(outcome: Any) -> None:
        assert outcome == "cancelled" or is_cancelled(outcome)
        assert await expiry.untrack(f"{name}:1") in (("absent", "cancelled") if is_cancelled(outcome) else ("absent",))
        await case.aio.context.aio_link.command("DEL", f"{name}:1")

    return work, check


CASES: dict[str, Callable[[Case], tuple[Work, Check]]] = {
    "once": once,
    "once, waiting": once_that_waits,
    "async with claim": a_block,
    "claim": a_claim,
    "claim_many": a_batch,
    "async with claim_many": a_batch_in_a_block,
    "first": first,
    "first_many": first_many,
    "dedup.add": dedup_add,
    "dedup.add_many": dedup_add_many,
    "dedup.get_or_set": dedup_get_or_set,
    "dedup.get_or_set_many": dedup_get_or_set_many,
    "forget": forget,
    "resolve": resolve,
    "wait": waiting,
    "trigger": trigger,
    "trigger_many": trigger_many,
    "take": take,
    **{verb: ended(verb) for verb in ("ack", "nack", "bury", "release", "extend")},
    "cancel": cancel,
    "reschedule": reschedule,
    "flush": flush,
    "flush all": lambda case: flush(case, whole=True),
    "redrive": exhumed("redrive"),
    "delete": exhumed("delete"),
    "load": loaded,
    "forward_once": forward_once,
    "result": result,
    "reshard": reshard,
    "forget a topic": forgotten,
    "pause, resume": paused,
    "worker": worker,
    "worker.run": worker_that_is_run,
    "drain": drain,
    "worker that is a member": lambda case: worker(case, membership="redis"),
    "channel": channel,
    "channel, busy": channel_that_is_busy,
    "channel, threads": channel_of_threads,
    "expiry": expiring,
    "track, untrack": tracking,
    "subscribers": subscribers,
    "stream": stream,
}


AWAITED: dict[type, dict[str, str]] = {
    AioGate: {
        "complete_many": "claim_many",
        "release_many": "claim_many",
        **{name: name for name in ("first", "first_many", "forget", "resolve", "drain")},
    },
    AioDedup: {name: f"dedup.{name}" for name in ("add", "add_many", "get_or_set", "get_or_set_many")},
    AioClaim: {
        "complete": "claim",
        "checkpoint": "async with claim",
        "extend": "async with claim",
        "wait": "wait",
    },
    AioTopic: {
        **{name: name for name in ("trigger", "trigger_many", "take", "ack", "nack", "bury", "release", "extend")},
        **{name: name for name in ("cancel", "reschedule", "flush", "forward_once", "reshard", "result")},
        "open": "trigger",
        "run": "trigger",
        "delete": "forget a topic",
        "pause": "pause, resume",
        "resume": "pause, resume",
    },
    AioDeadLetters: {name: name for name in ("redrive", "delete", "load")},
    AioExpiry: {"track": "track, untrack", "untrack": "track, untrack"},
}
"""Which case cancels each coroutine of the awaiting faces."""
LEFT_OUT: dict[type, dict[str, str]] = {
    AioGate: {
        "inspect": "reads one reply",
        "cancel": "reads, then one call, which changes what its target reads",
        "stored_topics": "reads",
        "trace": "reads",
        "close": "ends the gate that the cases share",
    },
    AioDedup: {"get": "reads one reply"},
    AioClaim: {"release": 'one call, as "complete"'},
    AioTopic: {
        "peek": "reads one reply",
        "versions": "reads one reply",
        "reset_version": 'one call, as "cancel"',
        "stats": "reads",
        "next_due": "reads",
        "trim_forwarded": "trims each stream in one command, and the next call trims the rest",
    },
    AioDeadLetters: {"list": "reads"},
    AioExecution: {"checkpoint": "one call, as that of a claim"},
    AioMergedFunction: {"trigger": "binds arguments, then is that of a topic"},
}
"""Those that none does, and why."""


def test_every_coroutine_of_the_awaiting_faces_has_a_case_or_a_reason() -> None:
    faces = {
        AioGate,
        AioDedup,
        AioClaim,
        AioClaimBatch,
        AioTopic,
        AioDeadLetters,
        AioExpiry,
        AioExecution,
        AioMergedFunction,
    }
    for face in faces:
        found = {name for name, one in inspect.getmembers(face, inspect.iscoroutinefunction) if name[0] != "_"}
        named = [*AWAITED.get(face, ()), *LEFT_OUT.get(face, ())]
        assert sorted(named) == sorted(found), face
    assert {case for cases in AWAITED.values() for case in cases.values()} <= set(CASES)
    assert {*AWAITED, *LEFT_OUT} <= faces


GAPS = (0, 1, 2, 3, 5)
"""How many awaits after the first cancellation the second comes; 0: there is none."""


def working() -> set[asyncio.Task[Any]]:
    """Tasks of ours, but for those that the connections of the gate need."""
    return {task for task in asyncio.all_tasks() if "idemgate/work" in str(task.get_coro().cr_code.co_filename)}  # type: ignore[union-attr]


async def nothing_listens(raw: Any) -> None:
    """The server knows it a little later."""
    async with asyncio.timeout(30):
        while raw.execute_command("CLIENT", "LIST", "TYPE", "pubsub"):
            await asyncio.sleep(0.003)


@pytest.fixture
async def gate(url: str, namespace: str, clock: Clock) -> AsyncIterator[Gate]:
    """Of a user who may publish and read streams, too; audited as all are in here."""
    made = Gate(url, namespace=namespace, clock=clock)
    yield made
    await made.aio.close()
    made.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("late", [False, True], ids=["as it begins to wait", "when it is there"])
@pytest.mark.parametrize("name", CASES)
async def test_cancelled_at_every_await(
    gate: Gate, clock: Clock, raw: Any, name: str, late: bool, many: Callable[[int], int], record_fault: Any
) -> None:
    before = working()
    n = 0
    numbers = itertools.count()
    for gap in GAPS[: many(2)]:
        for at in itertools.count():
            case = Case(gate, clock, f"k{next(numbers)}", twice=gap > 0)
            work, check = CASES[name](case)
            # When it is cancelled at this await
            async with asyncio.timeout(30):
                outcome, awaits = await cancelled_at(work(), at, late, gap)
            assert is_cancelled(outcome) or not isinstance(outcome, BaseException), (at, repr(outcome))
            # Then it has left nothing behind that still listens or works
            await nothing_listens(raw)
            assert working() <= before, (at, gap)
            await gate.aio.context.aio_link.close()
            # And all is as the caller may expect
            await check(outcome)
            if awaits <= at:
                break
            n += 1
    # And nothing stays behind
    assert n > 0
    await gate.aio.close()
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
    record_fault(
        "cancelled at each await, and again while it cleans up, of the coroutines of the awaiting faces that write",
        n,
        promises="P2 P3 P7 P15",
        exhaustive=True,
        left_held=0,
        wrong_answers=0,
    )
