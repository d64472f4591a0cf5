"""What the log says about deliveries, outages of the store and the stop of a worker."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from idemgate import Gate
from idemgate.errors import Bury
from idemgate.testing import Clock
from idemgate.testing.proxy import Proxy
from idemgate.worker.worker import Worker
from tests.unit.test_logs import bare
from tests.waiting import eventually

Records = Callable[[str], list[logging.LogRecord]]


@pytest.fixture
def records(caplog: pytest.LogCaptureFixture) -> Records:
    """Return the records of an event: `records("worker.dead")`."""
    caplog.set_level(logging.INFO, logger="idemgate")

    def of(event: str) -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.getMessage().split()[0] == event]

    return of


def facts(record: logging.LogRecord, *names: str) -> tuple[Any, ...]:
    """Return fields of a record, after a check that its text has them, too."""
    found = tuple(getattr(record, name) for name in names)
    for name, value in zip(names, found, strict=True):
        text = f"{value:g}" if isinstance(value, float) else repr(value)
        assert f"{name}={text}" in record.getMessage()
    return found


@pytest.mark.parametrize("awaiting", [False, True])
async def test_a_failed_and_a_dead_delivery_are_logged_with_topic_and_key(
    gate: Gate, records: Records, eventually: Any, awaiting: bool
) -> None:
    # Given a handler that buries its message
    topic = gate.topic("orders")

    def fail(delivery: Any) -> None:
        raise Bury("no such order")

    async def fail_awaiting(delivery: Any) -> None:
        fail(delivery)

    topic.handler(fail_awaiting if awaiting else fail)
    await topic.aio.trigger("order-7")
    async with Worker(gate):
        await eventually(lambda: gate.counters["worker.dead"] == 1)
    # Then both records name the message
    (failed,), (dead,) = records("worker.handler_failed"), records("worker.dead")
    assert facts(failed, "topic", "key", "attempt") == ("orders", "order-7", 1)
    assert facts(dead, "topic", "key", "failure") == ("orders", "order-7", "idemgate.errors.Bury: no such order")


@pytest.mark.parametrize("awaiting", [False, True])
async def test_a_stop_says_what_runs_and_what_is_cut_short(
    gate: Gate, records: Records, eventually: Any, awaiting: bool
) -> None:
    # Given a handler that does not end
    topic, started, go = gate.topic("orders"), threading.Event(), threading.Event()

    async def wait(delivery: Any) -> None:
        started.set()
        await asyncio.Event().wait()

    def block(delivery: Any) -> None:
        started.set()
        go.wait(30)

    topic.handler(wait if awaiting else block)
    await topic.aio.trigger("order-7")
    # When its worker stops
    async with Worker(gate, grace="20ms"):
        await eventually(started.is_set)
    go.set()
    # Then the log says what runs and for how long the worker waits, then what it cut short
    (stopping,), (cut,) = records("worker.stopping"), records("worker.cut_short")
    assert facts(stopping, "running", "grace", "handlers") == (1, 0.02, ["orders/order-7"])
    assert facts(cut, "topic", "key") == ("orders", "order-7")


async def test_a_lost_lease_is_logged_with_topic_and_key(
    gate: Gate, records: Records, clock: Clock, url: str, namespace: str, eventually: Any
) -> None:
    # Given a handler whose message another process takes after its lease ended
    topic, running, go = gate.topic("orders", lease="1s"), asyncio.Event(), asyncio.Event()

    @topic.handler
    async def handle(delivery: Any) -> None:
        running.set()
        await go.wait()

    await topic.aio.trigger("order-7")
    with Gate(url, namespace=namespace, clock=clock) as other:
        async with Worker(gate, concurrency=1, prefetch=0):
            await eventually(running.is_set)

            def steal() -> Any:
                clock.advance("2s")
                return other.topic("orders", lease="1s").take()

            await eventually(lambda: asyncio.to_thread(steal))
            # When the heartbeat finds out
            await eventually(lambda: records("worker.lease_lost"))
            go.set()
    # Then the log names the message
    assert facts(records("worker.lease_lost")[0], "topic", "key") == ("orders", "order-7")


async def test_an_outage_of_the_store_is_logged_once_and_so_is_its_end(
    url: str, namespace: str, records: Records, eventually: Any
) -> None:
    # Given a worker of three topics, behind a proxy
    with Proxy(url) as proxy:
        gate = Gate(proxy.url, namespace=namespace, timeout="300ms")
        for name in ("one", "two", "three"):
            gate.topic(name).handler(lambda delivery: None)
        async with gate.aio.worker():
            for outage in (1, 2):
                # When nothing passes any more
                before = gate.counters["worker.store_unavailable"]
                proxy.black_hole = True
                proxy.cut_all()
                await eventually(lambda before=before: gate.counters["worker.store_unavailable"] >= before + 9)
                # Then that is one record
                assert len(records("worker.store_unavailable")) == outage
                # And so is the end, with the duration
                proxy.heal()
                proxy.cut_all()
                await eventually(lambda outage=outage: len(records("worker.store_back")) == outage)
        for record in records("worker.store_back"):
            assert 0 < facts(record, "seconds")[0] < 60
        await gate.aio.close()
        gate.close()


async def test_lost_and_taken_over_claims_are_logged_with_their_scope(
    face: Any, clock: Clock, records: Records
) -> None:
    # Given a claim whose lease ends before its block
    async with face.inside("order-7", scope="charge", lease="30s"):
        clock.advance("31s")
        # When another one takes the key over
        assert (await face.guard("charge").run("order-7", lambda: None)).outcome == "handled"
    # Then both records name the scope
    for event in ("once.taken_over", "once.lost"):
        (record,) = records(event)
        assert facts(record, "scope", "key") == ("charge", "order-7")


def test_a_program_without_logging_gets_the_events_on_stderr(
    gate: Gate, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a program that configured no logging, with a handler that ends it by Ctrl-C and runs while it stops
    topic, logged = gate.topic("orders"), set[str]()
    monkeypatch.setattr(logging.getLogger("idemgate.worker"), "filters", [lambda one: logged.add(one.msg) or True])

    @topic.handler
    async def handle(delivery: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        await eventually(lambda: any("worker.stopping" in text for text in logged))

    topic.trigger("order-7")
    # When it runs
    with bare():
        gate.run()
    # Then it says what runs and how long it waits
    err = capsys.readouterr().err
    assert "worker.started" in err
    assert "worker.stopping running=1 grace=30 handlers=['orders/order-7']" in err


def test_a_program_with_a_handler_for_the_events_keeps_its_logging(gate: Gate) -> None:
    # Given a program that handles the events of idemgate only
    topic, seen = gate.topic("orders"), list[str]()
    topic.handler(lambda delivery: os.kill(os.getpid(), signal.SIGINT))
    topic.trigger("order-7")
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    ours = logging.getLogger("idemgate")
    with bare():
        ours.addHandler(handler)
        try:
            ours.setLevel(logging.INFO)
            gate.run()
            # Then no second handler gets them
            assert logging.getLogger().handlers == []
        finally:
            ours.removeHandler(handler)
    assert any(line.startswith("worker.stopping") for line in seen)
