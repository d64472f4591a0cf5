"""The event loop ends while calls are in flight that no `close` waits for. The gate ends them before its loop ends."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import pytest

from idemgate import Gate
from idemgate.testing import Clock


@pytest.mark.parametrize("closed_before", [False, True], ids=["never closed", "closed before"])
@pytest.mark.parametrize("count", [1, 20])
def test_a_claim_that_the_end_of_its_loop_cancels_is_released(
    wire: Any, namespace: str, clock: Clock, caplog: pytest.LogCaptureFixture, closed_before: bool, count: int
) -> None:
    gate = Gate(wire.url, namespace=namespace, clock=clock, timeout="60s")
    calls = set[asyncio.Task[None]]()

    @gate.once(key="{k}", scope="s")
    async def handle(k: str) -> None:
        raise AssertionError("it must not run")

    async def main() -> None:
        await gate.aio.inspect("warm")
        if closed_before:
            await gate.aio.close()
            await gate.aio.inspect("warm")
        # Given claims whose replies are held back
        wire.reset()
        wire.flowing.clear()
        calls.update(asyncio.create_task(handle(f"x{number}")) for number in range(count))
        assert await asyncio.to_thread(wire.asked.wait, 60)
        # When the program ends, and the replies come after the loop has cancelled all tasks
        next(iter(calls)).add_done_callback(lambda _: threading.Timer(0.1, wire.flowing.set).start())

    asyncio.run(main())
    # Then the keys are free at once, and no task was destroyed while it was pending
    assert {gate.inspect(f"x{number}", scope="s").state for number in range(count)} == {"released"}
    calls.clear()
    gc.collect()
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []
    gate.close()


def test_a_release_that_is_sent_after_close_arrives_before_the_loop_ends(
    wire: Any, namespace: str, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(wire.url, namespace=namespace, clock=clock, timeout="60s")
    calls = set[asyncio.Task[None]]()

    @gate.once(key="{k}", scope="s")
    async def handle(k: str) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        calls.add(asyncio.create_task(handle("x")))
        while (await gate.aio.inspect("x", scope="s")).state != "in_progress":
            await asyncio.sleep(0)
        await gate.aio.close()

    asyncio.run(main())
    assert gate.inspect("x", scope="s").state == "released"
    calls.clear()
    gc.collect()
    assert [record.message for record in caplog.records if record.name == "asyncio"] == []
    gate.close()


def test_the_end_of_a_loop_waits_for_no_store_that_is_away(
    wire: Any, namespace: str, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    gate = Gate(wire.url, namespace=namespace, clock=clock, timeout="1s")

    async def main() -> None:
        await gate.aio.inspect("warm")
        wire.cut()
        task = asyncio.create_task(gate.aio.inspect("x"))
        await asyncio.sleep(0)
        del task

    asyncio.run(main())
    gc.collect()
    # Where the cut hits redis-py's handshake, asyncio's own stream may report its future, if that is collected first.
    messages = [record.message for record in caplog.records if record.name == "asyncio"]
    assert [message for message in messages if "exception=BrokenPipeError" not in message] == []
    gate.close()
