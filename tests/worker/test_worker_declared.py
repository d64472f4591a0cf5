"""What a program declares while its worker runs: it reaches neither the deliveries in flight nor their leases."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

import pytest

from idemgate import Gate
from idemgate.errors import PolicyChanged
from idemgate.store.held import HeldRenewal
from idemgate.testing import Clock
from idemgate.worker import consumer
from idemgate.worker.worker import Worker

pytestmark = pytest.mark.one_in(3)

Declare = Callable[[Gate], Awaitable[Any]]


@pytest.fixture(autouse=True)
def frequent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deliveries are renewed every two milliseconds."""

    class FrequentRenewal(HeldRenewal[Any]):
        def __init__(self, lease: float, *options: Any, **more: Any) -> None:
            super().__init__(lease, *options, **more)
            self.interval = 0.002
            self.due = self.last

    monkeypatch.setattr(consumer, "HeldRenewal", FrequentRenewal)


async def again(gate: Gate) -> None:
    gate.topic("t", window="10s")


async def by_name(gate: Gate) -> None:
    gate.topic("t")


async def with_a_lease(gate: Gate) -> None:
    gate.topic("t", window="10s", lease="1s", max_attempts=1)


async def redefined(gate: Gate) -> None:
    gate.topic("t", window="5s", revision=1)


async def refused(gate: Gate) -> None:
    topic = gate.topic("t", window="5s", merge="append", revision=1)
    with pytest.raises(PolicyChanged):
        await topic.aio.trigger("refused")
    gate.topic("t", window="10s")


async def deleted(gate: Gate) -> None:
    await gate.topic("t").aio.delete(discard=True)


async def deleted_blocking(gate: Gate) -> None:
    await asyncio.to_thread(gate.topic("t").delete, discard=True)


DECLARATIONS: list[tuple[dict[str, Any], Declare]] = [
    ({"window": "10s"}, again),
    ({"window": "10s"}, by_name),
    ({}, again),
    ({"window": "10s"}, with_a_lease),
    ({}, with_a_lease),
    ({"window": "10s"}, redefined),
    ({}, redefined),
    ({"window": "10s"}, refused),
    ({"window": "10s"}, deleted),
    ({"window": "10s"}, deleted_blocking),
]


@pytest.mark.parametrize("awaiting", [False, True])
@pytest.mark.parametrize(("first", "declare"), DECLARATIONS, ids=lambda of: getattr(of, "__name__", str(of)))
async def test_a_declaration_does_not_reach_a_running_worker(
    gate: Gate, url: str, clock: Clock, eventually: Any, first: Any, declare: Declare, awaiting: bool
) -> None:
    # Given a stored topic, and a worker of it and of another topic, each with a delivery that runs
    with Gate(url, namespace=gate.namespace, clock=clock) as producer:
        producer.topic("t", window="10s").trigger("held")
    clock.advance("10s")
    running, done, go = list[str](), list[str](), threading.Event()

    async def work(delivery: Any) -> None:
        if delivery.key == "held":
            running.append(delivery.key)
            await asyncio.to_thread(go.wait, 30)
        done.append(delivery.key)

    def work_blocking(delivery: Any) -> None:
        if delivery.key == "held":
            running.append(delivery.key)
            go.wait(30)
        done.append(delivery.key)

    topic, other = gate.topic("t", **first), gate.topic("other")
    topic.handler(work if awaiting else work_blocking)
    other.handler(work if awaiting else work_blocking)
    await other.aio.trigger("held")
    async with Worker(gate):
        await eventually(lambda: len(running) == 2)
        # When the program declares it once more
        await declare(gate)
        # Then both leases are renewed as before, for as long as before
        clock.advance("20s")
        wanted = clock.now() + timedelta(seconds=30)

        async def renewed(one: Any) -> bool:
            return (await one.aio.peek("held")).lease_until == wanted

        await eventually(lambda: renewed(other))
        if not declare.__name__.startswith("deleted"):
            await eventually(lambda: renewed(topic))
        # And the worker goes on with both topics
        await topic.aio.trigger("next")
        await other.aio.trigger("also")
        clock.advance("10s")
        await eventually(lambda: {"next", "also"} <= {*done})
        go.set()
        await eventually(lambda: done.count("held") == 2)
    assert gate.counters["lease.renewal_error"] == 0
    assert gate.counters["worker.acked"] == 3 + (not declare.__name__.startswith("deleted"))


async def test_a_topic_declared_before_each_trigger_is_served(gate: Gate, eventually: Any) -> None:
    # Given a program that declares its topic wherever it uses it, as web views do
    done = list[int]()

    @gate.topic("t").handler
    async def work(delivery: Any) -> None:
        done.append(delivery.payload)

    async with Worker(gate):
        for number in range(200):
            topic = gate.topic("t", max_attempts=3) if number % 2 else gate.topic("t")
            await asyncio.sleep(0)
            await topic.aio.trigger(number, number)
        await eventually(lambda: len(done) == 200)


async def test_a_corrupt_delivery_does_not_cost_the_others_their_leases(
    gate: Gate, raw: Any, clock: Clock, eventually: Any
) -> None:
    # Given two deliveries in one slot, a delivery of another topic, and a guarded run
    seen, go = dict[str, Any](), asyncio.Event()

    async def work(delivery: Any) -> None:
        seen[delivery.key] = delivery
        await go.wait()

    topic, other = gate.topic("t"), gate.topic("other")
    topic.handler(work)
    other.handler(work)
    await topic.aio.trigger_many([("good", 1), ("bad", 2)])
    await other.aio.trigger("third")
    async with Worker(gate):
        await eventually(lambda: len(seen) == 3)
        # When the data of one of them is corrupt
        inflight = next(key for key in topic.open().keys(0) if key.endswith(b":inflight"))
        raw.hset(inflight, "bad", b"\xc1")
        clock.advance("20s")
        wanted = clock.now() + timedelta(seconds=30)

        async def renewed(key: str) -> bool:
            return (await (other if key == "third" else topic).aio.peek(key)).lease_until == wanted

        # Then the others are renewed, and the failures are counted
        await eventually(lambda: renewed("third"))
        await eventually(lambda: renewed("good"))
        assert gate.counters["lease.renewal_failed"] > 0
        assert not seen["good"].lost
        assert not seen["third"].lost
        raw.hset(inflight, "bad", str(seen["bad"].token))
        go.set()


@pytest.mark.parametrize("awaiting", [False, True])
async def test_two_releases_run_side_by_side_forward_and_back(
    url: str, namespace: str, clock: Clock, eventually: Any, awaiting: bool
) -> None:
    # Given two releases of a program, whose topics differ in their window
    done, sent, releases = list[int](), 0, list[Gate]()

    async def work(delivery: Any) -> None:
        done.extend(delivery.payload)

    def work_blocking(delivery: Any) -> None:
        done.extend(delivery.payload)

    @asynccontextmanager
    async def release(window: str, revision: int) -> AsyncIterator[Gate]:
        gate = Gate(url, namespace=namespace, clock=clock)
        releases.append(gate)
        topic = gate.topic("t", window=window, merge="append", slots=2, revision=revision)
        topic.handler(work if awaiting else work_blocking)
        try:
            async with Worker(gate):
                yield gate
        finally:
            await gate.aio.close()
            gate.close()

    async def load(*gates: Gate) -> None:
        nonlocal sent
        for _ in range(20):
            for gate in gates:
                await gate.topics["t"].aio.trigger_many([(n % 7, n) for n in range(sent, sent + 10)])
                sent += 10
            clock.advance("3s")
            await asyncio.sleep(0)

    def in_use(gate: Gate) -> tuple[int | None, int]:
        policy = gate.topics["t"].policy
        return policy.window, policy.revision

    async with release("10s", 0) as old:
        await load(old)
        async with release("5s", 1) as new:
            # When the later one starts under load, then the running worker adopts its policy
            await load(old, new)
            await eventually(lambda: clock.advance("1s") or in_use(old) == (5_000, 1))
            await load(old, new)
        # And when it is rolled back, the former release goes on, and starts again
        async with release("10s", 0) as again:
            await load(old, again)
            assert in_use(again) == (5_000, 1)
        await load(old)
        # Then every trigger is handled once, and each process said once what it adopted
        await eventually(lambda: clock.advance("1s") or len(done) >= sent)
    assert sorted(done) == [*range(sent)]
    assert [gate.counters["topic.policy_adopted"] for gate in releases] == [1, 0, 1]
    assert sum(gate.counters["worker.failed"] for gate in releases) == 0


@pytest.mark.parametrize(
    ("declare", "name"),
    [
        (lambda gate: gate.topic("late").handler(print), "late"),
        (lambda gate: gate.topic("late").forward("list"), "late"),
        (lambda gate: gate.topic("t").every("* * * * *", name="tick"), "t/tick"),
        (lambda gate: gate.merge("{item}", name="late")(lambda item: None), "late"),
    ],
    ids=["handler", "forward", "every", "merge"],
)
async def test_what_is_declared_too_late_for_a_worker_is_reported_once(
    gate: Gate, caplog: Any, declare: Any, name: str
) -> None:
    gate.topic("t").handler(print)
    async with Worker(gate):
        # When something to serve is declared while a worker of all topics runs
        declare(gate)
        gate.topic("t").handler(print)  # that is known
        # Then a warning names it, with the fix
        (text,) = [record.getMessage() for record in caplog.records if "declared_late" in record.getMessage()]
        assert f"name={name}:" in text
        assert "before the worker" in text
    assert gate.counters["worker.declared_late"] == 1


async def test_what_another_worker_serves_is_not_late(gate: Gate, eventually: Any) -> None:
    # Given a worker of one topic, and a worker that has not started
    done = list[str]()
    gate.topic("t").handler(print)
    all_topics = Worker(gate)
    async with Worker(gate, ["t"]):
        # When a topic of neither is declared, then that is no warning
        gate.topic("later").handler(lambda delivery: done.append(delivery.key))
    assert gate.counters["worker.declared_late"] == 0
    # And the one that starts now serves it
    await gate.topic("later").aio.trigger("a")
    async with all_topics:
        await eventually(lambda: done == ["a"])


@pytest.mark.parametrize(
    "register",
    [
        lambda gate, name: gate.subscribe(name)(print),
        lambda gate, name: gate.stream(name, group="g")(print),
        lambda gate, name: gate.consume_list(name)(print),
    ],
    ids=["channel", "stream", "list"],
)
async def test_a_subscriber_that_is_registered_too_late_is_reported(
    gate: Gate, namespace: str, caplog: Any, register: Any
) -> None:
    gate.subscribe(f"{namespace}-first")(print)
    async with gate.aio.subscribers():
        register(gate, f"{namespace}-news")
        gate.topic("t").handler(print)  # no worker runs
    assert gate.counters["worker.declared_late"] == 1
    (text,) = [record.getMessage() for record in caplog.records if "declared_late" in record.getMessage()]
    assert f"{namespace}-news" in text
