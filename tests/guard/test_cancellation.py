"""Being cancelled, at each point of a guarded call: nothing stays held that never ran, and what ran is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import pytest

from idemgate import Gate, StoreUnavailable
from idemgate.core.waits import wait_for_wakeup
from idemgate.testing import Clock
from tests.claims import claims_of


@pytest.fixture
async def gate(wire: Any, namespace: str, clock: Clock) -> AsyncIterator[Gate]:
    """A gate whose replies can be held back. Closing it waits a minute for the calls that are under way."""
    made = Gate(wire.url, namespace=namespace, clock=clock, timeout="60s")
    await made.aio.inspect("warm")
    yield made
    wire.flowing.set()
    await made.aio.close()
    made.close()


async def held_back(wire: Any) -> None:
    """Returns once a script was sent whose reply is held back."""
    assert await asyncio.to_thread(wire.asked.wait, 10)


async def settled(gate: Gate) -> None:
    """Returns when the calls under way have ended."""
    await gate.aio.close()


async def cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def cancelled_under_way(gate: Gate, wire: Any, work: Coroutine[Any, Any, Any]) -> None:
    """Cancels a call whose script was executed and whose reply is on its way; returns when it has ended."""
    wire.reset()
    wire.flowing.clear()
    task = asyncio.create_task(work)
    await held_back(wire)
    await cancelled(task)
    wire.flowing.set()
    await settled(gate)


async def test_cancelled_while_claiming_nothing_stays_held(gate: Gate, wire: Any) -> None:
    ran = []

    @gate.once(key="{k}", scope="s")
    async def handle(k: str) -> None:
        ran.append(k)

    await cancelled_under_way(gate, wire, handle("x"))
    # Then the key is free, as if nobody had asked: the attempt that never started is not counted
    record = await gate.aio.inspect("x", scope="s")
    assert (record.state, record.attempts) == ("released", 0)
    await handle("x")
    assert ran == ["x"]
    assert (await gate.aio.inspect("x", scope="s")).attempts == 1


async def test_cancelled_while_marking_at_most_once_the_mark_stays(gate: Gate, wire: Any) -> None:
    ran = []

    @gate.once(key="{k}", at_most_once=True)
    async def handle(k: str) -> None:
        ran.append(k)

    await cancelled_under_way(gate, wire, handle("x"))
    # There is no second chance, and a mark cannot tell whether the work had begun.
    assert await handle("x") is None
    assert ran == []


async def test_a_cancelled_claim_object_stays_held_by_nobody(gate: Gate, wire: Any) -> None:
    async def ask() -> None:
        await gate.aio.claim("x", max_attempts=1)

    await cancelled_under_way(gate, wire, ask())
    assert (await gate.aio.claim("x", max_attempts=1)).started


async def test_cancelled_while_refused_nothing_of_the_owner_is_touched(gate: Gate, wire: Any) -> None:
    owner = await gate.aio.claim("x", scope="s")

    @gate.once(key="{k}", scope="s")
    async def handle(k: str) -> None: ...

    await cancelled_under_way(gate, wire, handle("x"))
    assert await owner.complete("mine")


async def test_cancelled_while_running_the_key_is_released(gate: Gate) -> None:
    running = asyncio.Event()

    @gate.once(key="{k}", scope="s", on_error="store")
    async def handle(k: str) -> None:
        running.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(handle("x"))
    await running.wait()
    await cancelled(task)
    record = await gate.aio.inspect("x", scope="s")
    assert (record.state, record.attempts) == ("released", 1)


@pytest.mark.parametrize("lost", [False, True], ids=["late reply", "lost reply"])
async def test_cancelled_while_completing_it_is_done_all_the_same(gate: Gate, wire: Any, lost: bool) -> None:
    running = asyncio.Event()

    @gate.once(key="{k}", scope="s")
    async def handle(k: str) -> str:
        wire.reset()
        wire.flowing.clear()
        running.set()
        return "result"

    task = asyncio.create_task(handle("x"))
    await running.wait()
    await held_back(wire)
    await cancelled(task)
    if lost:  # with its connection; the call is sent again, with the same ids
        wire.cut()
    wire.flowing.set()
    if lost:
        wire.mend()
    await settled(gate)
    assert (gate.counters["once.completed"], gate.counters["once.lost"]) == (1, 0)
    assert (await gate.aio.claim("x", scope="s")).result == "result"


async def test_cancelled_while_waiting_for_another_owner(gate: Gate, raw: Any) -> None:
    owner = await gate.aio.claim("x", scope="s")

    @gate.once(key="{k}", scope="s", on_in_progress="wait")
    async def handle(k: str) -> str:
        return "ran"

    task = asyncio.create_task(handle("x"))
    channel = claims_of(gate).key("s", "x")[0]
    while raw.pubsub_numsub(channel)[0][1] == 0:
        await asyncio.sleep(0.002)
    await cancelled(task)
    assert await owner.release()
    await settled(gate)
    assert (await gate.aio.inspect("x", scope="s")).state == "released"


@pytest.mark.parametrize("turns", range(4))
async def test_a_cancellation_that_comes_with_the_wake_up_is_not_lost(turns: int) -> None:
    # Given a waiter that is woken
    wake = asyncio.Event()
    task = asyncio.create_task(wait_for_wakeup(wake, 10))
    await asyncio.sleep(0)
    wake.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    # When it is cancelled before it went on, then it does not go on
    if task.cancel():
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        assert turns > 0
        await task


async def test_a_cancelled_block_gives_its_claim_back(gate: Gate) -> None:
    running = asyncio.Event()

    async def work() -> None:
        async with gate.aio.claim("x"):
            running.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await running.wait()
    await cancelled(task)
    assert (await gate.aio.inspect("x")).state == "released"


async def test_cancelled_at_any_moment_a_key_is_done_or_free(gate: Gate) -> None:
    # Given calls that are cancelled after another number of turns of the event loop each
    ended = []

    @gate.once(key="{k}", scope="s")
    async def handle(k: str) -> str:
        await asyncio.sleep(0)
        ended.append(k)
        return k

    for turns in range(0, 50, 2):
        task = asyncio.create_task(handle(str(turns)))
        for _ in range(turns):
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])
    await settled(gate)
    # Then what came to its end is done, and the rest is free
    for key in map(str, range(0, 50, 2)):
        record = await gate.aio.inspect(key, scope="s")
        assert record.state in (["done"] if key in ended else ["released", "absent"]), (record, ended)
    assert 0 < len(ended) < 25


@pytest.fixture
async def impatient(wire: Any, namespace: str) -> AsyncIterator[Gate]:
    """A gate whose replies can be held back, and which waits for them for a moment only."""
    made = Gate(wire.url, namespace=namespace, timeout="1s")
    await made.aio.inspect("warm")
    yield made
    wire.flowing.set()
    await made.aio.close()
    made.close()


def pending_tasks() -> set[Any]:
    return asyncio.all_tasks() - {asyncio.current_task()}


@pytest.mark.parametrize("cancelled", [True, False])
async def test_closing_leaves_no_task_behind_a_store_that_does_not_answer(
    impatient: Gate, wire: Any, cancelled: bool
) -> None:
    # Given a guarded call whose release, or whose completion, is not answered. It would be retried for the lease
    started, ended = asyncio.Event(), asyncio.Event()

    async def handle() -> None:
        started.set()
        await ended.wait()

    before = pending_tasks()
    task = asyncio.create_task(impatient.guard("s", lease="10m").aio.run("k", handle))
    await started.wait()
    wire.reset()
    wire.flowing.clear()
    if cancelled:
        task.cancel()
    ended.set()
    await held_back(wire)
    # When the gate is closed
    async with asyncio.timeout(20):
        await impatient.aio.close()
    # Then the call has ended, and neither a task nor a connection is left
    if cancelled:
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        verdict = await task
        assert verdict.outcome == "handled"
        assert isinstance(verdict.error, StoreUnavailable)
    assert pending_tasks() <= before
    assert not impatient.context.aio_link._loops


@pytest.mark.parametrize("call", ["claim", "wait", "claim_many"])
async def test_a_claim_that_is_awaited_again_is_not_released_by_its_cancellation(
    gate: Gate, wire: Any, call: str
) -> None:
    # Given a claim that was granted, and whose caller was cancelled before the reply arrived
    owner = await gate.aio.claim("x")
    batch = gate.aio.claim_many(["x"])
    claim = batch[0] if call == "claim_many" else gate.aio.claim("x")
    if call == "wait":
        await claim

    async def awaited() -> None:
        await (claim.wait("60s") if call == "wait" else claim if call == "claim" else batch)

    await owner.release()
    wire.reset()
    wire.flowing.clear()
    task = asyncio.create_task(awaited())
    await held_back(wire)
    await cancelled(task)
    # When it is awaited again
    again = asyncio.create_task(awaited())
    wire.flowing.set()
    await again
    # Then it holds the key once it says so
    assert await claim.wait("60s") == "started"
    await settled(gate)
    assert gate.claim("x").state == "in_progress"
    assert await claim.complete() is True
