"""Plain functions as handlers of an async guard."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from idemgate import Gate, current
from idemgate.guard.guard import _calls
from tests.waiting import eventually


@pytest.mark.parametrize("many", [False, True])
async def test_a_plain_function_runs_in_a_thread(gate: Gate, many: bool) -> None:
    guard = gate.guard("orders").aio

    def handle(message: str) -> list[Any]:
        assert threading.current_thread() is not threading.main_thread()
        return [message, current().attempt]

    for outcome in ("handled", "duplicate"):
        verdict = (await guard.run_many([("k", "m")], handle))[0] if many else await guard.run("k", handle, "m")
        assert (verdict.outcome, verdict.value) == (outcome, ["m", 1])


async def test_plain_functions_do_not_wait_for_each_other(gate: Gate) -> None:
    together = threading.Barrier(64, timeout=60)  # more than the threads of asyncio.to_thread
    guard = gate.guard("orders").aio
    verdicts = await asyncio.gather(*(guard.run(f"k{n}", together.wait) for n in range(32)), guard.run_many(
        [(f"b{n}", n) for n in range(32)], lambda _: together.wait(), concurrency=32
    ))  # fmt: skip
    assert {verdict.outcome for verdict in [*verdicts[:32], *verdicts[32]]} == {"handled"}


async def test_what_a_plain_function_returns_is_awaited(gate: Gate) -> None:
    async def handle(message: str) -> str:
        await asyncio.sleep(0)
        return message + current().key

    assert (await gate.guard("orders").aio.run("k", lambda message: handle(message), "m")).value == "mk"


async def test_an_error_of_a_plain_function_is_in_the_verdict(gate: Gate) -> None:
    def fail() -> None:
        raise StopIteration("no")

    verdict = await gate.guard("orders").aio.run("k", fail)
    assert (verdict.outcome, verdict.ran) == ("failed", True)
    assert "StopIteration" in str(verdict.error)


@pytest.mark.parametrize("many", [False, True])
async def test_a_cancelled_caller_leaves_the_claim_to_the_thread(gate: Gate, many: bool) -> None:
    began, go_on = threading.Event(), threading.Event()
    guard = gate.guard("orders").aio

    def handle(_: int) -> str:
        began.set()
        assert go_on.wait(60)
        return "done"

    call = guard.run_many([("k", 1), ("other", 2)], handle) if many else guard.run("k", handle, 1)
    task = asyncio.create_task(call)
    await eventually(began.is_set)
    # When the caller is cancelled, it does not wait for the thread
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # Then the key stays claimed until the thread has ended, and its effect is not repeated
    assert gate.inspect("k", scope="orders").state == "in_progress"
    go_on.set()
    await eventually(lambda: gate.inspect("k", scope="orders").state == "done")
    assert (await guard.run("k", handle, 1)).value == "done"
    # A message that had not started does not start
    assert gate.inspect("other", scope="orders").state == ("released" if many else "absent")


async def test_a_cancelled_wait_starts_no_thread(gate: Gate, raw: Any, namespace: str) -> None:
    owner, ran = gate.claim("k", scope="orders"), threading.Event()
    task = asyncio.create_task(gate.guard("orders").aio.run("k", ran.set, wait="60s"))
    await eventually(lambda: any(namespace.encode() in channel for channel in raw.pubsub_channels()))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await eventually(lambda: not _calls)
    owner.release()
    assert (ran.is_set(), gate.inspect("k", scope="orders").state) == (False, "released")
