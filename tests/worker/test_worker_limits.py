"""The adaptive limit at work: fewer handlers at once when the downstream says or shows that it is overloaded, and more
again when it has recovered."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from idemgate import Adaptive, Gate, InvalidArgument
from idemgate.errors import Overloaded
from idemgate.testing import Clock
from idemgate.worker.worker import Worker


class Downstream:
    """Holds each call until `worker` has as many of them running as it may; then it is well, slow or busy."""

    worker: Worker

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.state = "well"
        self.running = 0
        self.seen: list[int] = []

    async def call(self, delivery: Any) -> None:
        self.running += 1
        self.seen.append(self.running)
        try:
            for _ in range(10):
                if self.running < self.worker.limits["t"]:
                    await asyncio.sleep(0.001)
            if self.state == "slow":
                self.clock.advance("2s")
            if self.state == "busy":
                raise Overloaded("503", delay=0)
        finally:
            self.running -= 1

    async def most_running(self, eventually: Any, wanted: int) -> int:
        """From now on: once as many run at once as wanted, and at least ten calls were made."""
        self.seen.clear()
        await eventually(lambda: len(self.seen) >= 10 and max(self.seen) >= wanted)
        return max(self.seen)


@pytest.mark.parametrize(
    ("trouble", "awaiting"),
    [
        ("slow", True),
        ("busy", False),
        pytest.param("slow", False, marks=pytest.mark.slow),
        pytest.param("busy", True, marks=pytest.mark.slow),
    ],
)
async def test_it_backs_off_and_comes_back(
    gate: Gate, clock: Clock, eventually: Any, caplog: pytest.LogCaptureFixture, trouble: str, awaiting: bool
) -> None:
    # Given a topic with more work than there is time for, and a downstream that is well
    topic = gate.topic("t", max_attempts=10_000, lease="10h", slots=2, adaptive=Adaptive(most=12, target="1s"))
    await topic.aio.trigger_many([(n, n) for n in range(5000)])
    downstream, loop = Downstream(clock), asyncio.get_running_loop()

    def blocking(delivery: Any) -> None:
        asyncio.run_coroutine_threadsafe(downstream.call(delivery), loop).result(60)

    topic.handler(downstream.call if awaiting else blocking)
    worker = downstream.worker = Worker(gate, concurrency=16)
    assert worker.limits == {}
    async with worker:
        # Then as many run at once as may
        await eventually(lambda: worker.limits == {"t": 12})
        assert await downstream.most_running(eventually, 12) == 12
        # When it is overloaded, it gets one call at a time
        downstream.state = trouble
        await eventually(lambda: worker.limits == {"t": 1})
        await eventually(lambda: _held(topic, 1))
        assert await downstream.most_running(eventually, 1) == 1
        # And when it has recovered, as many as before
        downstream.state = "well"
        await eventually(lambda: worker.limits == {"t": 12})
        assert await downstream.most_running(eventually, 12) == 12
    assert gate.counters["worker.limit_lowered"] >= 3
    assert gate.counters["worker.limit_raised"] >= 4 + 11
    lowered = [record for record in caplog.records if record.message == "worker.limit_lowered"]
    assert (lowered[-1].topic, lowered[-1].limit, lowered[-1].levelno) == ("t", 1, logging.WARNING)
    # And nothing was lost of what was not handled
    stats = await topic.aio.stats()
    assert stats["acked"] + stats.pending == 5000


async def _held(topic: Any, most: int) -> bool:
    """Whether no more are held than this: a thread may be late to call."""
    return bool((await topic.aio.stats()).in_flight <= most)


async def test_other_errors_tell_nothing_and_other_topics_are_not_held_back(
    gate: Gate, clock: Clock, eventually: Any
) -> None:
    # Given a topic whose handlers fail by themselves, one at a time, and one without such a limit
    broken, sound = gate.topic("broken", backoff=0, adaptive=Adaptive(target="1s")), gate.topic("sound")
    go, running = asyncio.Event(), 0

    @broken.handler
    async def fail(delivery: Any) -> None:
        raise ValueError(delivery.key)

    @sound.handler
    async def wait(delivery: Any) -> None:
        nonlocal running
        running += 1
        await go.wait()

    await broken.aio.trigger_many([(n, n) for n in range(10)])
    await sound.aio.trigger_many([(n, n) for n in range(20)])
    async with gate.aio.worker() as worker:
        # Then its messages end as dead letters without any change of the limit
        await eventually(lambda: gate.counters["worker.dead"] == 10)
        assert worker.limits == {"broken": 1}
        # And the other one has all the places that it wants
        await eventually(lambda: running == 20)
        go.set()
        await eventually(lambda: gate.counters["worker.acked"] == 20)


async def test_the_limit_is_of_this_program_and_not_stored(url: str, gate: Gate) -> None:
    topic = gate.topic("t", window="1s", adaptive=Adaptive(most=3))
    await topic.aio.open()
    # Another program says nothing of it, or something else
    with Gate(url, namespace=gate.namespace, clock=gate.context.clock) as other:
        assert other.topic("t", window="1s").open().policy.adaptive is None
    # And one that names the topic twice says it once
    assert gate.topic("t", window="1s").policy.adaptive == Adaptive(most=3)
    with pytest.raises(InvalidArgument, match="this program declared"):
        gate.topic("t", window="1s", adaptive=Adaptive(most=4))
    with pytest.raises(InvalidArgument, match="adaptive"):
        gate.topic("u", adaptive=5)  # type: ignore[arg-type]
