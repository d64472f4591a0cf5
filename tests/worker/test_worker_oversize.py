"""A worker leaves deliveries larger than the `max_bytes` of its gate to workers with a larger limit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from idemgate import Gate
from idemgate.testing import Clock

LARGE = "x" * 2_000


@pytest.mark.parametrize("awaiting", [False, True])
async def test_a_worker_leaves_what_is_too_large_to_others(
    gate: Gate, small: Gate, clock: Clock, eventually: Callable[..., Any], awaiting: bool
) -> None:
    # Given a worker of a gate for which one of two deliveries is too large
    handled: list[Any] = []

    def note(delivery: Any) -> None:
        handled.append((delivery.key, len(delivery.payload), delivery.attempt))

    async def note_async(delivery: Any) -> None:
        note(delivery)

    topic = gate.topic("t", max_attempts=1)
    for made in (topic, small.topic("t", max_attempts=1)):
        made.handler(note_async if awaiting else note)
    await topic.aio.trigger_many([("large", LARGE), ("other", "x")])
    # When it works
    async with small.aio.worker():
        await eventually(lambda: small.counters["worker.acked"] == small.counters["worker.deferred"] == 1)
        # Then it takes the large one again only after a delay
        for number in range(2, 5):
            clock.advance("29s")
            await topic.aio.stats()
            assert small.counters["worker.deferred"] == number - 1
            clock.advance("1s")
            await eventually(lambda number=number: small.counters["worker.deferred"] == number)
    assert handled == [("other", 1, 1)]
    assert small.counters["topic.too_large"] == small.counters["worker.deferred"] == 4
    assert small.counters["worker.failed"] == small.counters["worker.dead"] == 0
    # And another worker handles it, as its first attempt
    clock.advance("30s")
    async with gate.aio.worker():
        await eventually(lambda: gate.counters["worker.acked"] == 1)
    assert handled[1:] == [("large", 2_000, 1)]
