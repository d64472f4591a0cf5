"""`drain`: it runs what is due with the parts of a worker, leaves the rest, and says what it ran."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import pytest

from idemgate import Bury, Delivery, Gate, InvalidArgument, PartialFailure, Retry
from idemgate.errors import DownstreamUnavailable, NotDrained, PolicyChanged
from idemgate.testing import Clock, Drained, Ran, drain

Run = Callable[..., Awaitable[Drained]]


@pytest.fixture(params=["blocking", "awaiting"])
def flavour(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(flavour: str, gate: Gate) -> Run:
    """`await run()`: `drain(gate)` in a thread without an event loop, or `gate.aio.drain()`."""

    async def run(**options: Any) -> Drained:
        if flavour == "blocking":
            return await asyncio.to_thread(drain, gate, **options)
        return await gate.aio.drain(**options)

    return run


@pytest.fixture
def handled(flavour: str) -> Handled:
    return Handled(flavour)


class Handled:
    """Handlers in the flavour of the test, and the messages that they got."""

    def __init__(self, flavour: str) -> None:
        self._flavour = flavour
        self.messages: list[Any] = []

    @property
    def keys(self) -> list[str]:
        return [one.key for one in self.messages]

    def handler(self, work: Callable[[Any], object] = lambda _: None) -> Callable[[Any], Any]:
        def blocking(message: Any) -> object:
            self.messages.append(message)
            return work(message)

        async def awaiting(message: Any) -> object:
            await asyncio.sleep(0)
            return blocking(message)

        return blocking if self._flavour == "blocking" else awaiting


def fail(_: object) -> None:
    raise ValueError("no")


# -- topics -----------------------------------------------------------------------------------------------------------


async def test_messages_that_are_due_run_and_the_others_stay(
    gate: Gate, clock: Clock, run: Run, handled: Handled
) -> None:
    # Given two topics, one of them with a window
    now, later = gate.topic("now"), gate.topic("later", window="1h", merge="count")
    now.handler(handled.handler())
    later.handler(handled.handler())
    await now.aio.trigger_many([("a", 1), ("b", 2)])
    await later.aio.trigger_many([("c", None)] * 40)
    # When what is due runs
    ran = await run()
    # Then the open window stays
    assert ran == Drained(2, 0, 0, {"now": Ran(2), "later": Ran()})
    assert handled.keys == ["a", "b"]
    # And runs once it has ended
    clock.advance("59m")
    assert await run() == Drained(0, 0, 0, {"now": Ran(), "later": Ran()})
    clock.advance("1m")
    assert (await run()).topics["later"] == Ran(delivered=1)
    assert (handled.messages[-1].key, handled.messages[-1].count) == ("c", 40)


async def test_what_a_handler_triggers_runs_too(gate: Gate, run: Run, handled: Handled) -> None:
    # Given a topic whose handler triggers one that is looked at before it
    mails, orders = gate.topic("mails"), gate.topic("orders")
    mails.handler(handled.handler())
    orders.handler(handled.handler(lambda order: mails.trigger(f"mail of {order.key}", event_id=order.id)))
    await orders.aio.trigger("o1")
    # When the gate is drained
    ran = await run()
    # Then both have run
    assert ran.topics == {"mails": Ran(1), "orders": Ran(1)}
    assert handled.keys == ["o1", "mail of o1"]


async def test_failures_are_retried_after_their_backoff_and_end_as_dead_letters(
    gate: Gate, clock: Clock, run: Run, handled: Handled
) -> None:
    # Given a handler that always fails, and one that never may
    images, jobs = gate.topic("images", backoff=["10s", "60s"], max_attempts=3), gate.topic("jobs")
    images.handler(handled.handler(fail))

    def refuse(_: object) -> None:
        raise Bury("never")

    jobs.handler(handled.handler(refuse))
    await images.aio.trigger("a")
    await jobs.aio.trigger("b")
    # When they run, each failure is due again after its backoff
    ran = await run()
    assert ran == Drained(0, 1, 1, {"images": Ran(retried=1), "jobs": Ran(dead=1)})
    assert list(map(repr, ran.errors)) == ["ValueError('no')", "Bury('never')"]
    assert (await run()).topics["images"] == Ran()
    clock.advance("10s")
    assert (await run()).retried == 1
    clock.advance("59s")
    assert (await run()).retried == 0
    clock.advance("1s")
    # Then the last one is a dead letter
    assert (await run()).topics["images"] == Ran(dead=1)
    assert [one.attempt for one in handled.messages if one.key == "a"] == [1, 2, 3]
    assert len(await images.aio.dead.list()) == len(await jobs.aio.dead.list()) == 1


async def test_the_error_of_an_async_handler_has_no_error_of_the_drain_as_its_context(gate: Gate) -> None:
    images = gate.topic("images")

    @images.handler
    async def render(_: object) -> None:
        raise ValueError("no")

    await images.aio.trigger("a")
    [error] = (await asyncio.to_thread(drain, gate)).errors
    assert error.__context__ is None


async def test_a_retry_without_delay_runs_in_the_same_drain(gate: Gate, run: Run, handled: Handled) -> None:
    def work(delivery: Delivery[Any]) -> None:
        if delivery.attempt < 3:
            raise Retry(delay=0)

    gate.topic("images").handler(handled.handler(work))
    await gate.topic("images").aio.trigger("a")
    assert (await run()).topics == {"images": Ran(delivered=1, retried=2)}


async def test_items_that_failed_are_retried_alone(gate: Gate, clock: Clock, run: Run, handled: Handled) -> None:
    def work(delivery: Delivery[Any]) -> None:
        if len(delivery.payload) > 1:
            raise PartialFailure(delivery.payload[1:])

    topic = gate.topic("mails", merge="append", backoff="10s")
    topic.handler(handled.handler(work))
    await topic.aio.trigger_many([("a", 1), ("a", 2)])
    assert await run() == Drained(0, 1, 0, {"mails": Ran(retried=1)})
    clock.advance("10s")
    assert (await run()).delivered == 1
    assert [one.payload for one in handled.messages] == [[1, 2], [2]]


async def test_one_handler_runs_at_a_time_and_keys_run_in_the_order_of_their_time(
    gate: Gate, clock: Clock, run: Run
) -> None:
    # Given many keys that became due one after the other
    order, running = [], 0

    async def handle(delivery: Delivery[Any]) -> None:
        nonlocal running
        running += 1
        await asyncio.sleep(0)
        assert running == 1
        running -= 1
        order.append(delivery.key)

    topic = gate.topic("t")
    topic.handler(handle)
    for n in range(100):
        await topic.aio.trigger(f"{n:02}")
        clock.advance("1ms")
    # When they run
    await run()
    # Then in that order
    assert order == [f"{n:02}" for n in range(100)]


async def test_each_slot_is_drained(gate: Gate, run: Run, handled: Handled) -> None:
    topic = gate.topic("t", slots=64)
    topic.handler(handled.handler())
    await topic.aio.trigger_many([(str(n), None) for n in range(300)])
    assert (await run()).delivered == 300
    assert (await topic.aio.stats()).pending == 0


async def test_the_rate_of_a_topic_holds(gate: Gate, clock: Clock, run: Run, handled: Handled) -> None:
    topic = gate.topic("t", rate="2/s", burst=2)
    topic.handler(handled.handler())
    await topic.aio.trigger_many([(str(n), None) for n in range(5)])
    ran = [(await run()).delivered]
    for _ in range(3):
        clock.advance("1s")
        ran.append((await run()).delivered)
    assert ran == [2, 2, 1, 0]


async def test_a_paused_topic_keeps_its_messages(gate: Gate, run: Run, handled: Handled) -> None:
    topic = gate.topic("t")
    topic.handler(handled.handler())
    await topic.aio.trigger("a")
    await topic.aio.pause()
    assert (await run()).delivered == 0
    await topic.aio.resume()
    assert (await run()).delivered == 1


async def test_a_topic_whose_downstream_service_is_away_keeps_its_messages(
    gate: Gate, clock: Clock, run: Run, handled: Handled
) -> None:
    # Given a service that is away
    away = True

    def work(_: object) -> None:
        if away:
            raise DownstreamUnavailable("away", delay="30s")

    topic = gate.topic("mails")
    topic.handler(handled.handler(work))
    await topic.aio.trigger_many([("a", 1), ("b", 2)])
    # When the topic is drained, the first message pauses it
    assert await run() == Drained(0, 1, 0, {"mails": Ran(retried=1)})
    # Then all run when the service is back
    away = False
    clock.advance("30s")
    assert (await run()).delivered == 2


async def test_a_delivery_in_flight_elsewhere_stays_until_its_lease_ends(
    gate: Gate, clock: Clock, run: Run, handled: Handled
) -> None:
    topic = gate.topic("t", lease="30s")
    topic.handler(handled.handler())
    await topic.aio.trigger("a")
    assert len(await topic.aio.take()) == 1
    assert (await run()).delivered == 0
    clock.advance("31s")
    assert (await run()).delivered == 1


async def test_a_guarded_handler_drops_duplicates(gate: Gate, run: Run, handled: Handled) -> None:
    charge = gate.once(key="{delivery.payload[order]}", scope="charge")(_named(handled.handler()))
    topic = gate.topic("t")
    topic.handler(charge)
    await topic.aio.trigger_many([("a", {"order": 1}), ("b", {"order": 1})])
    assert (await run()).delivered == 2
    assert handled.keys == ["a"]
    assert gate.counters["worker.duplicate"] == 1


def _named(handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a handler whose parameter has a name for the template of a key."""
    if asyncio.iscoroutinefunction(handler):

        async def awaiting(delivery: Delivery[Any]) -> None:
            await handler(delivery)

        return awaiting

    def blocking(delivery: Delivery[Any]) -> None:
        handler(delivery)

    return blocking


async def test_recurring_triggers_run_when_the_clock_passes_them(
    gate: Gate, clock: Clock, run: Run, handled: Handled
) -> None:
    # Given a trigger for each full hour
    clock.set(datetime(2026, 1, 1, 7, 30, tzinfo=UTC).timestamp())
    topic = gate.topic("reports")
    topic.every("0 * * * *", name="hourly", tz="UTC")
    topic.handler(handled.handler())
    # When the clock passes two of them
    ran = [(await run()).delivered]
    for _ in range(4):
        clock.advance("30m")
        ran.append((await run()).delivered)
    # Then each has run
    assert ran == [0, 1, 0, 1, 0]


async def test_a_gate_without_a_test_clock_is_drained_by_the_time_of_the_server(
    url: str, namespace: str, flavour: str, handled: Handled
) -> None:
    with Gate(url, namespace=namespace) as gate:
        topic = gate.topic("t")
        topic.handler(handled.handler())
        await topic.aio.trigger("a")
        ran = await asyncio.to_thread(drain, gate) if flavour == "blocking" else await gate.aio.drain()
        assert ran.delivered == 1
        await gate.aio.close()


# -- forwarding, streams, lists and other subscribers -----------------------------------------------------------------


async def test_forwarded_messages_arrive_and_are_consumed(gate: Gate, run: Run, handled: Handled) -> None:
    # Given a topic that is forwarded to a list, and a consumer of the list
    topic = gate.topic("orders")
    topic.forward("list", f"jobs-{gate.namespace}")
    gate.consume_list(f"jobs-{gate.namespace}")(handled.handler())
    await topic.aio.trigger_many([(str(n), n) for n in range(250)])
    # When both are drained
    ran = await run()
    # Then each message arrived
    assert ran == Drained(250, 0, 0, {"orders": Ran(250)}, 250)
    assert sorted(topic.decode_forwarded(one.data).payload for one in handled.messages) == [*range(250)]


async def test_entries_of_a_list_are_retried_by_the_clock(
    gate: Gate, raw: Any, clock: Clock, run: Run, handled: Handled
) -> None:
    name = f"jobs-{gate.namespace}"

    def work(entry: Any) -> None:
        if entry.deliveries == 1:
            raise Retry(delay="10s")

    gate.consume_list(name)(handled.handler(work))
    raw.rpush(name, "a", "b")
    assert (await run()).subscribers == 2
    assert (await run()).subscribers == 0
    clock.advance("10s")
    assert (await run()).subscribers == 2
    assert [one.data for one in handled.messages] == [b"a", b"b"] * 2


async def test_entries_of_a_stream_are_processed_once_and_in_order(
    gate: Gate, raw: Any, run: Run, handled: Handled
) -> None:
    name = f"jobs-{gate.namespace}"
    gate.stream(name, group="g")(handled.handler())
    for n in range(100):
        raw.xadd(name, {"n": n})
    assert (await run()).subscribers == 100
    assert [int(one.fields["n"]) for one in handled.messages] == [*range(100)]
    assert (await run()).subscribers == 0
    assert raw.xpending(name, "g")["pending"] == 0
    assert raw.xinfo_consumers(name, "g") == []


async def test_a_stream_entry_that_fails_stays_pending(gate: Gate, raw: Any, run: Run, handled: Handled) -> None:
    name = f"jobs-{gate.namespace}"
    gate.stream(name, group="g")(handled.handler(fail))
    raw.xadd(name, {"n": 1})
    await run()
    assert len(handled.messages) == 1
    assert raw.xpending(name, "g")["pending"] == 1


class Rows:
    """A subscriber of one's own: rows of a table, in batches of two."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __repr__(self) -> str:
        return "<Rows>"

    async def run(self, stop: asyncio.Event, *, grace: float = 30.0, ready: Any = None) -> None:
        raise AssertionError("a drain does not run a subscriber")

    async def drain_once(self) -> int:
        n = min(2, self.rows)
        self.rows -= n
        return n


async def test_a_subscriber_of_ones_own_is_drained_and_a_channel_is_named(gate: Gate, run: Run) -> None:
    # Two look alike, and the limit is that of one of them
    gate.add_subscriber(Rows(5))
    gate.add_subscriber(Rows(6))
    gate.subscribe(f"{gate.namespace}.prices")(lambda message: None)
    ran = await run(limit=6)
    assert ran.subscribers == 11
    assert ran.skipped == (repr(gate.subscribers[2]),)


@pytest.mark.parametrize("stream", ["missing", "without a group", "with a group"])
async def test_a_server_without_memory_drains_all_but_a_stream_without_a_group(
    gate: Gate, raw: Any, run: Run, handled: Handled, caplog: pytest.LogCaptureFixture, stream: str
) -> None:
    # Given a stream with or without its group, and a topic and a list beside it
    topic, name, got = gate.topic("t"), gate.namespace, list[object]()
    topic.handler(handled.handler())
    await topic.aio.trigger("k")
    gate.stream(f"{name}:stream", group="g")(got.append)
    gate.consume_list(f"{name}:list")(got.append)
    raw.rpush(f"{name}:list", b"entry")
    if stream != "missing":
        raw.xadd(f"{name}:stream", {"a": 1})
    if stream == "with a group":
        raw.xgroup_create(f"{name}:stream", "g", "0")
    # And topics that the server has to store something for: a policy, an occurrence, a list
    gate.topic("new").handler(handled.handler())
    gate.topic("cron").every("* * * * *", payload=1, name="minute")
    gate.topic("cron").handler(handled.handler())
    forwarded = gate.topic("forwarded")
    forwarded.forward("list")
    await forwarded.aio.trigger("k")
    await gate.topic("cron").aio.open()
    # When the server has no memory
    raw.config_set("maxmemory", 1)
    try:
        ran = await run()
    finally:
        raw.config_set("maxmemory", 0)
    # Then what it can do is done, and what it cannot is named, with the reason in the log
    left = () if stream == "with a group" else (repr(gate.subscribers[0]),)
    topics = {"topic 'new'", "topic 'cron'", "topic 'forwarded'"}
    assert (ran.topics["t"], ran.subscribers, {*ran.skipped}) == (Ran(1), 1 if left else 2, {*topics, *left})
    assert [record.topic for record in caplog.records if record.getMessage().startswith("worker.store_un")] == ["new"]
    errors = [record.error for record in caplog.records if record.getMessage().startswith("subscriber.store_error")]
    assert errors
    assert all("maxmemory" in error for error in errors)
    # And with memory the rest is done
    if stream == "missing":
        raw.xadd(f"{name}:stream", {"a": 1})
    assert ((await run()).subscribers, len(got)) == (1 if left else 0, 2)


async def test_a_topic_without_a_handler_is_named_if_it_has_due_messages(
    gate: Gate, clock: Clock, run: Run, handled: Handled
) -> None:
    topic = gate.topic("images", window="1h")
    await topic.aio.trigger("a")
    assert await run() == Drained()
    clock.advance("1h")
    assert await run() == Drained(skipped=("topic 'images'",))
    topic.handler(handled.handler())
    assert await run() == Drained(1, topics={"images": Ran(1)})


async def test_resources_are_there_while_it_drains(gate: Gate, run: Run, handled: Handled) -> None:
    seen: list[str] = []

    @gate.lifespan
    def resources() -> Any:
        seen.append("made")
        yield
        seen.append("cleaned up")

    topic = gate.topic("t")
    topic.handler(handled.handler(lambda _: seen.append("handled")))
    await topic.aio.trigger("a")
    await run()
    assert seen == ["made", "handled", "cleaned up"]


# -- bounds and errors ------------------------------------------------------------------------------------------------


async def test_a_handler_that_triggers_itself_for_ever_ends_with_an_error_that_names_its_topic(
    gate: Gate, run: Run, handled: Handled
) -> None:
    topic = gate.topic("loop")
    topic.handler(handled.handler(lambda delivery: topic.trigger("a")))
    await topic.aio.trigger("a")
    with pytest.raises(NotDrained, match=r"^topic 'loop' had more than 50 deliveries to drain. Does its handler") as e:
        await run(limit=50)
    assert (e.value.source, e.value.limit) == ("topic 'loop'", 50)
    assert len(handled.messages) == 51


async def test_as_many_deliveries_as_the_limit_are_no_error(gate: Gate, run: Run, handled: Handled) -> None:
    topic = gate.topic("t")
    topic.handler(handled.handler())
    await topic.aio.trigger_many([(str(n), None) for n in range(50)])
    assert (await run(limit=50)).delivered == 50


async def test_a_subscriber_that_never_ends_is_named(gate: Gate, run: Run) -> None:
    gate.add_subscriber(Rows(1_000))
    with pytest.raises(NotDrained, match="<Rows> had more than 50"):
        await run(limit=50)


async def test_another_policy_is_refused(gate: Gate, url: str, clock: Clock, run: Run) -> None:
    with Gate(url, namespace=gate.namespace, clock=clock) as other:
        other.topic("t", window="1s").trigger("a")
    gate.topic("t", window="2s").handler(lambda delivery: None)
    with pytest.raises(PolicyChanged):
        await run()


async def test_a_gate_without_work_is_drained_at_once(run: Run) -> None:
    assert await run() == Drained()


@pytest.mark.parametrize("limit", [0, -1, 1.5, True])
async def test_a_bad_limit_is_refused(run: Run, limit: Any) -> None:
    with pytest.raises(InvalidArgument, match="limit"):
        await run(limit=limit)


async def test_the_blocking_drain_names_the_async_one_in_an_event_loop(gate: Gate) -> None:
    with pytest.raises(InvalidArgument, match=r"running event loop.*await gate\.aio\.drain\(\)"):
        drain(gate)


async def test_a_cancelled_drain_cancels_its_handler_and_returns_the_delivery(gate: Gate, eventually: Any) -> None:
    # Given a handler that waits
    seen: list[str] = []

    async def handle(delivery: Delivery[Any]) -> None:
        seen.append(f"{delivery.key} {delivery.attempt}")
        if len(seen) == 1:
            try:
                await asyncio.sleep(3600)
            finally:
                seen.append("cancelled")

    topic = gate.topic("t")
    topic.handler(handle)
    await topic.aio.trigger("a")
    draining = asyncio.create_task(gate.aio.drain())
    await eventually(lambda: seen)
    # When the drain is cancelled
    draining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await draining
    # Then its handler is, and the message is due again, without an attempt
    assert (await gate.aio.drain()).delivered == 1
    assert seen == ["a 1", "cancelled", "a 1"]
