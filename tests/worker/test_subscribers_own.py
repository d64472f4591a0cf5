"""`gate.add_subscriber`: a consumer loop of the user's, in an application and under `gate.run()`."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument
from idemgate.subscribers import subscribers as module
from idemgate.testing.proxy import Proxy

Ready = Callable[[], None] | None


class Loop:
    """A consumer loop that runs until the stop. `seen` has the steps of all loops."""

    def __init__(self, seen: list[str], name: str = "loop") -> None:
        self.seen = seen
        self.name = name
        self.started = asyncio.Event()

    async def run(self, stop: asyncio.Event, *, grace: float = 30.0, ready: Ready = None) -> None:
        self.seen.append(f"{self.name} starts")
        self.started.set()
        try:
            await self.consume(stop, ready)
        except asyncio.CancelledError:
            self.seen.append(f"{self.name} is cancelled")
            raise
        self.seen.append(f"{self.name} ends")

    async def consume(self, stop: asyncio.Event, ready: Ready) -> None:
        if ready is not None:
            ready()
        await stop.wait()


class Impatient(Loop):
    async def consume(self, stop: asyncio.Event, ready: Ready) -> None:
        assert ready is not None
        for _ in range(5):
            ready()
        await stop.wait()


class Slow(Loop):
    """A loop that is ready when the test says so."""

    async def consume(self, stop: asyncio.Event, ready: Ready) -> None:
        self.connected = asyncio.Event()
        await self.connected.wait()
        await super().consume(stop, ready)


class Brief(Loop):
    async def consume(self, stop: asyncio.Event, ready: Ready) -> None:
        pass


class Endless(Loop):
    async def consume(self, stop: asyncio.Event, ready: Ready) -> None:
        if ready is not None:
            ready()
        await asyncio.Event().wait()


class Failing(Loop):
    async def consume(self, stop: asyncio.Event, ready: Ready) -> None:
        if ready is not None:
            ready()
        raise ConnectionError("the broker is gone")


class Finishing(Loop):
    """A loop whose message takes a few steps of the event loop after the stop."""

    async def consume(self, stop: asyncio.Event, ready: Ready) -> None:
        await super().consume(stop, ready)
        for _ in range(10):
            await asyncio.sleep(0)


class Signalling(Loop):
    """A loop that gets signals while it runs."""

    signals: tuple[signal.Signals, ...] = (signal.SIGTERM,)

    async def consume(self, stop: asyncio.Event, ready: Ready) -> None:
        for number in self.signals:
            signal.raise_signal(number)
        await super().consume(stop, ready)


class SignallingTwice(Signalling):
    signals = (signal.SIGTERM, signal.SIGINT)


async def within(seconds: float, work: Any) -> None:
    async with asyncio.timeout(seconds):
        await work


# -- inside an application --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Brief, Impatient])
async def test_entering_waits_until_each_loop_is_ready_once(gate: Gate, kind: type[Loop]) -> None:
    # Given a loop that returns early, or that says more than once that it is ready, and a slow one
    seen: list[str] = []
    slow = Slow(seen, "slow")
    gate.add_subscriber(kind(seen, "other"))
    gate.add_subscriber(slow)
    entering = asyncio.create_task(gate.aio.subscribers().__aenter__())
    await within(60, slow.started.wait())
    for _ in range(20):
        await asyncio.sleep(0)
    # Then entering waits for the slow one only
    assert not entering.done()
    slow.connected.set()
    await within(60, entering)
    await (await entering).__aexit__()
    assert seen[-1] == "slow ends"


async def test_a_loop_that_returned_is_logged_and_the_others_go_on(gate: Gate, caplog: Any) -> None:
    seen: list[str] = []
    gate.add_subscriber(Brief(seen, "brief"))
    gate.add_subscriber(Loop(seen))
    async with gate.aio.subscribers():
        await asyncio.sleep(0)
        assert seen == ["brief starts", "brief ends", "loop starts"]
    assert "subscriber.ended" in caplog.text


async def test_a_loop_that_ignores_the_stop_is_cancelled_after_the_grace(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(module, "OVERTIME", 0.0)
    seen: list[str] = []
    gate.add_subscriber(Endless(seen))
    gate.add_subscriber(Finishing(seen, "finishing"))

    async def enter() -> None:
        async with gate.aio.subscribers(grace="50ms"):
            pass

    await within(60, enter())
    assert seen == ["loop starts", "finishing starts", "finishing ends", "loop is cancelled"]
    assert "subscriber.cut_short" in caplog.text


class Swallowing(Loop):
    async def consume(self, stop: asyncio.Event, ready: Ready) -> None:
        self.end = asyncio.Event()
        while not self.end.is_set():
            with suppress(asyncio.CancelledError):
                await self.end.wait()


async def test_a_loop_that_swallows_its_cancellation_is_left_running(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(module, "OVERTIME", 0.0)
    monkeypatch.setattr(module, "CLEANUP_SECONDS", 0.05)
    loop, stop = Swallowing([]), asyncio.Event()
    gate.add_subscriber(loop)
    running = asyncio.create_task(gate.aio.subscribers(grace=0).run(stop))
    await loop.started.wait()
    stop.set()
    await within(60, running)
    assert "subscriber.left_running" in caplog.text
    loop.end.set()


@pytest.mark.parametrize("kind", ["stream", "list"])
async def test_a_stop_while_the_store_is_away_ends(kind: str, url: str, namespace: str, raw: Any) -> None:
    # Given a callback that runs, and a store that does not answer any more
    with Proxy(url) as proxy:
        gate, started = Gate(proxy.url, namespace=namespace, timeout="1s"), asyncio.Event()

        async def handle(entry: Any) -> None:
            started.set()
            await asyncio.Event().wait()

        if kind == "stream":
            raw.xadd(namespace, {"n": 1})
            gate.stream(namespace, group="g", reclaim="10m")(handle)
        else:
            raw.rpush(namespace, 1)
            gate.consume_list(namespace, reclaim="10m")(handle)
        async with gate.aio.subscribers(grace=0):
            await within(30, started.wait())
            proxy.black_hole = True
            proxy.cut_all()
            # When its subscriber stops
            began = time.monotonic()
        # Then it waits for the store no longer than a few times the timeout
        assert time.monotonic() - began < 20
        assert gate.counters[f"{kind}.abandoned"] == 1
        proxy.black_hole = False
        proxy.cut_all()
        await gate.aio.close()
        gate.close()


# -- under gate.run() -------------------------------------------------------------------------------------------------


def test_a_signal_stops_the_loops_and_they_finish(gate: Gate) -> None:
    seen: list[str] = []
    gate.add_subscriber(Finishing(seen, "finishing"))
    gate.add_subscriber(Signalling(seen))
    gate.run(grace="30s")
    assert seen == ["finishing starts", "loop starts", "loop ends", "finishing ends"]


def test_a_second_signal_ends_the_grace_of_the_loops(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given that the second signal counts, although it comes at once
    monkeypatch.setattr("idemgate.worker.run.SAME_REQUEST", 0)
    seen: list[str] = []
    gate.add_subscriber(Endless(seen, "endless"))
    gate.add_subscriber(SignallingTwice(seen))
    gate.run(grace="1h")
    assert seen == ["endless starts", "loop starts", "loop ends", "endless is cancelled"]


def test_the_failure_of_a_loop_stops_the_others_gracefully_and_is_raised(gate: Gate) -> None:
    seen: list[str] = []
    gate.add_subscriber(Finishing(seen, "finishing"))
    gate.add_subscriber(Failing(seen, "failing"))
    with pytest.raises(ConnectionError, match="the broker is gone"):
        gate.run(grace="30s")
    assert seen == ["finishing starts", "failing starts", "finishing ends"]


def test_a_loop_that_returned_does_not_end_the_worker(gate: Gate) -> None:
    # Given a topic, and a loop that returns at once
    seen: list[str] = []
    topic = gate.topic("orders")

    @topic.handler
    def handle(delivery: Any) -> None:
        seen.append(delivery.key)
        signal.raise_signal(signal.SIGTERM)

    gate.add_subscriber(Brief(seen))
    topic.trigger("a")
    gate.run()
    assert seen == ["loop starts", "loop ends", "a"]


# -- bad input --------------------------------------------------------------------------------------------------------


class Blocking:
    def run(self, stop: asyncio.Event, *, grace: float = 30.0, ready: Ready = None) -> None: ...


class WithoutGrace:
    async def run(self, stop: asyncio.Event) -> None: ...


@pytest.mark.parametrize("subscriber", [None, object(), Blocking(), WithoutGrace(), Loop])
def test_an_object_that_cannot_run_is_refused(gate: Gate, subscriber: Any) -> None:
    with pytest.raises(InvalidArgument, match="async def run"):
        gate.add_subscriber(subscriber)
