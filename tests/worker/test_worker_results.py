"""What a handler returns reaches the callers that triggered it."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from typing import Any

import pytest

from idemgate import Bury, Delivery, Gate
from idemgate.errors import DeliveryFailed, InvalidArgument, NoResult


class Secret:
    """A value that cannot be stored."""

    def __repr__(self) -> str:
        return "Secret(card-4111)"


@pytest.mark.parametrize("awaiting", [False, True])
async def test_what_a_handler_returns_is_the_result(
    gate: Gate, awaiting: bool, caplog: pytest.LogCaptureFixture
) -> None:
    topic = gate.topic("t", result_retention="10m", backoff=0.01, max_attempts=2)

    def blocking(delivery: Delivery[Any]) -> Any:
        if delivery.payload == "poison":
            raise Bury("poison")
        pending = [Future[None]()]
        return {"none": None, "object": [Secret()], "pending": pending}.get(delivery.payload, delivery.payload * 2)

    async def handle(delivery: Delivery[Any]) -> Any:
        return blocking(delivery)

    topic.handler(handle if awaiting else blocking)
    async with gate.aio.worker():
        receipts = await topic.aio.trigger_many(
            [(text, text) for text in ("ab", "none", "poison", "object", "pending")]
        )
        fine, none, poison, odd, pending = receipts
        assert await topic.aio.result(fine, "20s") == "abab"
        assert await topic.aio.result(none, "20s") is None
        with pytest.raises(DeliveryFailed, match="poison"):
            await topic.aio.result(poison, "20s")
        with pytest.raises(DeliveryFailed, match="returned a Future, whose work has not ended"):
            await topic.aio.result(pending, "20s")
        with pytest.raises(NoResult, match="its value was not stored") as unstored:
            await topic.aio.result(odd, "20s")
    # And the reason names the type, but neither the error nor the log has the value
    assert "Secret" in str(unstored.value)
    assert "card-4111" not in str(unstored.value) + caplog.text
    assert gate.counters["worker.result_not_stored"] == 1


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("awaiting", [False, True])
async def test_a_handler_does_not_wait_for_the_result_of_its_own_delivery(
    gate: Gate, awaiting: bool, guarded: bool
) -> None:
    topic = gate.topic("t", result_retention="10m")
    errors, late = list[str](), list[asyncio.Task[Any]]()
    receipts = asyncio.get_running_loop().create_future()

    def blocking(delivery: Delivery[Any]) -> str:
        if delivery.key == "k":
            with pytest.raises(InvalidArgument, match="its own delivery") as refused:
                topic.result(delivery.payload and receipts.result(), "1h")
            errors.append(str(refused.value))
        return "ran"

    async def handle(delivery: Delivery[Any]) -> str:
        if delivery.key == "k":
            receipt = await receipts
            for wait in (topic.aio.result(receipt, "1h"), asyncio.to_thread(topic.result, receipt, "1h")):
                with pytest.raises(InvalidArgument, match="its own delivery") as refused:
                    await asyncio.wait_for(wait, 60)
                errors.append(str(refused.value))

            async def outlive() -> Any:
                while gate.counters["worker.handled"] == 0 and not ended.is_set():
                    await asyncio.sleep(0.002)
                return await topic.aio.result(receipt, "20s")

            late.append(asyncio.create_task(outlive()))
        return "ran"

    ended = asyncio.Event()
    work: Any = handle if awaiting else blocking
    topic.handler(gate.once(key="{delivery.key}", scope="s")(work) if guarded else work)
    receipts.set_result(await topic.aio.trigger("k", "payload"))
    async with gate.aio.worker():
        assert await topic.aio.result(receipts.result(), "20s") == "ran"
        ended.set()
        assert len(errors) == (2 if awaiting else 1)
        for task in late:  # one that outlives the handler may wait
            assert await task == "ran"
