"""Every coroutine of the awaiting faces, cancelled at each of its awaits, and once more while it cleans up after that.

Whatever the await: what is then in the store is what the caller knows or may find out. A key is done, or free; a
trigger counts once or not at all; a delivery is in flight, or back, or ended; nobody else gets a wrong answer; no
listener and no task stays behind.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

import pytest

from idemgate import Gate, StoreRefused
from idemgate.testing import Clock
from tests.faults.cancelling import cancelled_at

Work = Callable[[], Coroutine[Any, Any, Any]]
Check = Callable[[Any], Awaitable[None]]


class Case:
    """`work` is cancelled, `check` is told what came of it."""

    def __init__(self, gate: Gate, clock: Clock, key: str) -> None:
        self.gate, self.aio, self.clock, self.key = gate, gate.aio, clock, key
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
        again = await handle(case.key)
        assert (again, case.runs) == (case.key, 1 if record.state == "done" else case.runs)

    return lambda: handle(case.key), check


def once_that_waits(case: Case) -> tuple[Work, Check]:
    @case.gate.once(key="{k}", scope="s", on_in_progress="wait")
    async def handle(k: str) -> str:
        case.runs += 1
        return k

    async def work() -> str:
        owner = await case.aio.claim(case.key, scope="s")
        release = owner._ending(owner._passage.release())
        asyncio.get_running_loop().call_later(0.02, lambda: case.aio.link.start(release))
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


def worker(case: Case, **options: Any) -> tuple[Work, Check]:
    handled: list[int] = []

    async def handle(delivery: Any) -> None:
        await asyncio.sleep(0)
        handled.extend(delivery.payload)

    case.gate.topics["t"].opening.handler = handle  # another one each time

    async def work() -> None:
        async with case.aio.worker(grace="5s", **options):
            await case.topic.trigger(case.key, 1, event_id=case.key)
            while not handled:
                await asyncio.sleep(0.001)

    async def check(outcome: Any) -> None:
        await case.topic.trigger(case.key, 1, event_id=case.key)
        case.clock.advance("30s")
        left = await case.topic.take(10)
        await case.topic.ack(left)
        stats = await case.topic.stats()
        assert (stats.pending, stats.in_flight) == (0, 0)
        assert len(handled) + len(left) >= 1
        assert stats["accepted"] == stats["acked_triggers"]

    return work, check


def worker_that_is_run(case: Case) -> tuple[Work, Check]:
    handled: list[int] = []

    async def handle(delivery: Any) -> None:
        await asyncio.sleep(0)
        handled.extend(delivery.payload)

    case.topic.opening.handler = handle
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
        await work(moving=True)  # and it can be begun anew; who was cancelled twice may have left a lease to lapse
        assert handled

    return work, check


# -- subscribers ------------------------------------------------------------------------------------------------------


def channel(case: Case) -> tuple[Work, Check]:
    heard: list[bytes] = []
    name = f"{case.gate.namespace}:{case.key}"

    @case.gate.on(name)
    async def handle(one: Any) -> None:
        await asyncio.sleep(0)
        heard.append(one.data)

    listener = case.gate.subscribers.pop()

    async def work() -> None:
        """What it hears ends it."""
        stop, ready = asyncio.Event(), asyncio.Event()

        async def publish() -> None:
            await ready.wait()
            while not heard:
                await case.aio.link.command("PUBLISH", name, "news")
                await asyncio.sleep(0.01)
            stop.set()

        publishing = asyncio.create_task(publish())
        try:
            await listener.run(stop, grace=5.0, ready=ready.set)
        finally:
            publishing.cancel()

    async def check(outcome: Any) -> None:
        heard.clear()
        await work()  # and it can be begun anew
        assert heard

    return work, check


def subscribers(case: Case) -> tuple[Work, Check]:
    heard: list[bytes] = []
    name = f"{case.gate.namespace}:{case.key}"
    case.gate.subscribers.clear()

    @case.gate.on(name)
    async def handle(one: Any) -> None:
        heard.append(one.data)

    async def work() -> None:
        async with case.aio.subscribers(grace="5s"):
            await case.aio.link.command("PUBLISH", name, "news")
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
        await case.aio.link.command("XADD", name, "*", "a", "1")

        async def acknowledged() -> None:
            while True:
                with suppress(StoreRefused):  # the group is not made yet
                    (pending, *_) = await case.aio.link.command("XPENDING", name, "g")
                    (facts,) = await case.aio.link.command("XINFO", "GROUPS", name)
                    lag = dict(zip(facts[::2], facts[1::2], strict=True))[b"last-delivered-id"]
                    last = (await case.aio.link.command("XREVRANGE", name, "+", "-", "COUNT", "1"))[0][0]
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
        entries = [entry for entry, _ in await case.aio.link.command("XRANGE", name, "-", "+")]
        assert {entry.decode() for entry in entries} == set(handled)
        assert await case.aio.link.command("DEL", name)

    return work, check


def channel_that_is_busy(case: Case) -> tuple[Work, Check]:
    """Stopped while a callback runs, which ends when it is cancelled only."""
    running: list[str] = []
    name = f"{case.gate.namespace}:{case.key}"

    @case.gate.on(name)
    async def handle(one: Any) -> None:
        running.append(name)
        try:
            await asyncio.Event().wait()
        finally:
            running.pop()

    listener = case.gate.subscribers.pop()

    async def work() -> None:
        stop, ready = asyncio.Event(), asyncio.Event()

        async def publish() -> None:
            await ready.wait()
            while not running:
                await case.aio.link.command("PUBLISH", name, "news")
                await asyncio.sleep(0.01)
            stop.set()

        publishing = asyncio.create_task(publish())
        try:
            await listener.run(stop, grace=0.05, ready=ready.set)
        finally:
            publishing.cancel()

    async def check(outcome: Any) -> None:
        assert not running

    return work, check


def channel_of_threads(case: Case) -> tuple[Work, Check]:
    heard: list[bytes] = []
    name = f"{case.gate.namespace}:{case.key}"
    case.gate.on(name)(lambda one: heard.append(one.data))
    listener = case.gate.subscribers.pop()

    async def work() -> None:
        stop, ready = asyncio.Event(), asyncio.Event()

        async def publish() -> None:
            await ready.wait()
            while not heard:
                await case.aio.link.command("PUBLISH", name, "news")
                await asyncio.sleep(0.01)
            stop.set()

        publishing = asyncio.create_task(publish())
        try:
            await listener.run(stop, grace=5.0, ready=ready.set)
        finally:
            publishing.cancel()

    async def check(outcome: Any) -> None:
        async with asyncio.timeout(30):
            while [one for one in threading.enumerate() if one.name.startswith("idemgate-subscriber")]:
                await asyncio.sleep(0.003)

    return work, check


def expiring(case: Case) -> tuple[Work, Check]:
    name = f"{case.gate.namespace}.{case.key}"

    async def work() -> None:
        expiry = case.gate.expiry(name, f"{name}:*", notifications="assume")
        stop = asyncio.Event()
        try:
            await expiry.run(stop, grace=5.0, ready=lambda: asyncio.get_running_loop().call_later(0.01, stop.set))
        finally:
            case.gate.subscribers.clear()

    async def check(outcome: Any) -> None: ...

    return work, check


CASES: dict[str, Callable[[Case], tuple[Work, Check]]] = {
    "once": once,
    "once, waiting": once_that_waits,
    "async with claim": a_block,
    "claim": a_claim,
    "claim_many": a_batch,
    "async with claim_many": a_batch_in_a_block,
    "first": first,
    "trigger": trigger,
    "trigger_many": trigger_many,
    "take": take,
    **{verb: ended(verb) for verb in ("ack", "nack", "bury", "give_back", "extend")},
    "worker": worker,
    "worker.run": worker_that_is_run,
    "worker that is a member": lambda case: worker(case, members=True),
    "channel": channel,
    "channel, busy": channel_that_is_busy,
    "channel, threads": channel_of_threads,
    "expiry": expiring,
    "subscribers": subscribers,
    "stream": stream,
}


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
            case = Case(gate, clock, f"k{next(numbers)}")
            work, check = CASES[name](case)
            # When it is cancelled at this await
            async with asyncio.timeout(30):
                outcome, awaits = await cancelled_at(work(), at, late, gap)
            assert is_cancelled(outcome) or not isinstance(outcome, BaseException), (at, repr(outcome))
            # Then it has left nothing behind that still listens or works
            await nothing_listens(raw)
            assert working() <= before, (at, gap)
            await gate.aio.link.close()
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
        "cancelled at each await, and again while it cleans up, of every coroutine of the awaiting faces",
        n,
        promises="P2 P3 P7 P15",
        exhaustive=True,
        left_held=0,
        wrong_answers=0,
    )
