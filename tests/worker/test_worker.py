"""The worker: what it hands to which handler, and what the end of a handler does to its message."""

from __future__ import annotations

import asyncio
import functools
import threading
from typing import Any

import pytest

from idemgate import Bury, Gate, InvalidArgument, KeyReused, Retry, current
from idemgate.core.durations import LATEST_MS
from idemgate.errors import AttemptsExhausted, NoCurrentExecution, OutcomeUnknown, PartialFailure, PolicyChanged
from idemgate.testing import Clock
from idemgate.topics.merge import append, union
from idemgate.topics.messages import Delivery
from idemgate.worker.worker import Worker
from tests.messages import pack_message, unpack_message

pytestmark = pytest.mark.one_in(3)


class Handled:
    """Deliveries as a handler saw them."""

    def __init__(self) -> None:
        self.deliveries: list[Any] = []

    @property
    def keys(self) -> list[str]:
        return sorted(one.key for one in self.deliveries)


class SyncObject(Handled):
    def __call__(self, delivery: Any) -> None:
        self.deliveries.append(delivery)


class AsyncObject(Handled):
    async def __call__(self, delivery: Any) -> None:
        await asyncio.sleep(0)
        self.deliveries.append(delivery)


def kinds(handled: Handled) -> dict[str, Any]:
    """Handlers of every kind, each noting its deliveries."""

    def blocking(delivery: Any) -> None:
        assert threading.current_thread() is not threading.main_thread()
        handled.deliveries.append(delivery)

    async def awaiting(delivery: Any) -> None:
        await asyncio.sleep(0)
        handled.deliveries.append(delivery)

    async def with_more(extra: str, delivery: Any) -> None:
        assert extra == "more"
        await awaiting(delivery)

    class WithMethod:
        def blocking(self, delivery: Any) -> None:
            handled.deliveries.append(delivery)

        @staticmethod
        async def awaiting(delivery: Any) -> None:
            handled.deliveries.append(delivery)

    objects = {"sync object": SyncObject(), "async object": AsyncObject()}
    for one in objects.values():
        one.deliveries = handled.deliveries
    return {
        "sync": blocking,
        "async": awaiting,
        "sync partial": functools.partial(lambda extra, delivery: blocking(delivery), "more"),
        "async partial": functools.partial(with_more, "more"),
        "method": WithMethod().blocking,
        "async staticmethod": WithMethod.awaiting,
        "plain function that hands on a coroutine": lambda delivery: awaiting(delivery),
        **objects,
    }


@pytest.mark.parametrize("kind", kinds(Handled()))
async def test_every_kind_of_handler_is_called_and_acknowledged(gate: Gate, eventually: Any, kind: str) -> None:
    # Given a handler of this kind
    handled = Handled()
    topic = gate.topic("t", merge="append", slots=4)
    topic.handler(kinds(handled)[kind])
    # When two keys are triggered, one of them twice
    await topic.aio.trigger_many([("a", 1), ("b", 2), ("a", 3)])
    async with gate.aio.worker():
        await eventually(lambda: gate.counters["worker.acked"] == 2)
    # Then each key is handled, with its merged payload
    assert {one.key: (one.payload, one.count, one.attempt) for one in handled.deliveries} == {
        "a": ([1, 3], 2, 1),
        "b": ([2], 1, 1),
    }
    # And nothing is left
    stats = await topic.aio.stats()
    assert (stats.pending, stats.in_flight, stats.dead, stats["acked_triggers"]) == (0, 0, 0, 3)


@pytest.mark.parametrize(
    ("merge", "payloads", "kept", "dropped"),
    [
        (append(2), [1, 2, 3, 4, 5], [1, 2], 3),
        (union(2), [{1, 2}, {3}], [1, 2], 1),
        ({"tags": append(1), "n": "sum"}, [{"tags": 1, "n": 1}, {"tags": 2, "n": 1}], {"tags": [1], "n": 2}, 1),
        ("sum", [1, 2], 3, 0),
    ],
    ids=["append", "union", "by field", "sum"],
)
async def test_what_a_merge_had_no_room_for_is_counted(
    gate: Gate, eventually: Any, merge: Any, payloads: list[Any], kept: Any, dropped: int
) -> None:
    handled = Handled()
    topic = gate.topic("t", merge=merge)
    topic.handler(kinds(handled)["async"])
    await topic.aio.trigger_many([("a", payload) for payload in payloads])
    async with gate.aio.worker():
        await eventually(lambda: gate.counters["worker.acked"] == 1)
    (one,) = handled.deliveries
    assert (one.payload, one.dropped, gate.counters["worker.items_dropped"]) == (kept, dropped, dropped)


async def test_a_dropped_item_is_counted_once_over_all_attempts(gate: Gate, clock: Clock, eventually: Any) -> None:
    # Given a delivery with dropped items, whose handler fails twice
    topic, attempts = gate.topic("t", merge=append(2), backoff="10s", max_attempts=3), list[int]()

    @topic.handler
    async def fail(delivery: Delivery[Any]) -> None:
        attempts.append(delivery.dropped)
        if len(attempts) < 3:
            raise RuntimeError("no")

    await topic.aio.trigger_many([("a", n) for n in range(5)])
    async with gate.aio.worker():
        for n in (1, 2):
            await eventually(lambda n=n: gate.counters["worker.nacked"] == n)
            assert gate.counters["worker.items_dropped"] == 0
            clock.advance("10s")
        await eventually(lambda: gate.counters["worker.acked"] == 1)
    # Then each attempt sees them, and they are counted once
    assert attempts == [3, 3, 3]
    assert gate.counters["worker.items_dropped"] == 3


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_items_without_room_beside_a_failed_delivery_are_counted(
    kind: str, gate: Gate, clock: Clock, eventually: Any
) -> None:
    topic, handled = gate.topic("t", merge=append(3), backoff="10s"), list[Any]()

    def handle(delivery: Delivery[Any]) -> None:
        handled.append((delivery.payload, delivery.dropped))
        if len(handled) == 1:  # two triggers come while it runs, and then it fails
            assert [topic.trigger("a", n).status for n in (3, 4)] == ["scheduled", "merged"]
            raise RuntimeError("no")

    async def handle_async(delivery: Delivery[Any]) -> None:
        handle(delivery)

    topic.handler(handle if kind == "sync" else handle_async)
    await topic.aio.trigger_many([("a", 1), ("a", 2)])
    async with gate.aio.worker():
        await eventually(lambda: gate.counters["worker.nacked"] == 1)
        clock.advance("10s")
        await eventually(lambda: gate.counters["worker.acked"] == 1)
    assert handled == [([1, 2], 0), ([1, 2, 3], 1)]
    assert (topic.stats()["items_dropped"], gate.counters["worker.items_dropped"]) == (1, 1)


async def test_a_dropped_item_of_a_partial_failure_is_counted_once(gate: Gate, clock: Clock, eventually: Any) -> None:
    topic, attempts = gate.topic("t", merge=append(2), backoff="10s"), list[int]()

    @topic.handler
    async def fail(delivery: Delivery[Any]) -> None:
        attempts.append(delivery.dropped)
        if len(attempts) == 1:
            raise PartialFailure(delivery.payload)

    await topic.aio.trigger_many([("a", n) for n in range(5)])
    async with gate.aio.worker():
        await eventually(lambda: gate.counters["worker.nacked"] == 1)
        clock.advance("10s")
        await eventually(lambda: gate.counters["worker.acked"] == 1)
    assert attempts == [3, 0]
    assert gate.counters["worker.items_dropped"] == 3


async def test_the_short_form_calls_the_function_with_the_merged_arguments(
    gate: Gate, clock: Clock, eventually: Any
) -> None:
    calls: list[tuple[int, str]] = []

    @gate.merge(key="{doc}", quiet="5s", max_delay="1m", name="reindex")
    async def reindex(doc: int, why: str = "?") -> None:
        calls.append((doc, why))

    # Given a running worker and two triggers
    async with gate.aio.worker():
        await reindex.aio.trigger(7)
        await reindex.aio.trigger(7, why="edited")
        assert calls == []
        # When the quiet time is over
        clock.advance("5s")
        # Then it runs once, with the last arguments
        await eventually(lambda: gate.counters["worker.acked"] == 1)
    assert calls == [(7, "edited")]


@pytest.mark.parametrize("awaiting", [False, True])
async def test_current_tells_about_the_delivery(gate: Gate, eventually: Any, awaiting: bool) -> None:
    topic = gate.topic("t")
    runs: list[Any] = []
    told: list[Any] = []

    def look(delivery: Any) -> None:
        here = current()
        with pytest.raises(NoCurrentExecution):
            here.checkpoint("a note")
        runs.append(here)
        told.append((here.key, here.token == delivery.token, here.attempt, here.lease_lost, here.has_ended))

    async def look_here(delivery: Any) -> None:
        look(delivery)

    topic.handler(look_here if awaiting else look)
    await topic.aio.trigger("a")
    async with gate.aio.worker():
        await eventually(lambda: told)
    assert told == [("a", True, 1, False, False)]
    assert runs[0].has_ended
    with pytest.raises(NoCurrentExecution):
        current()


@pytest.mark.parametrize("awaiting", [False, True])
async def test_key_for_is_the_same_for_each_attempt_of_a_delivery(
    gate: Gate, clock: Clock, eventually: Any, awaiting: bool
) -> None:
    topic = gate.topic("t", backoff="1s")
    made: list[tuple[str, str]] = []

    def look(delivery: Any) -> None:
        made.append((delivery.key, current().key_for("charge")))
        if len(made) == 1:
            raise ValueError("no")

    async def look_here(delivery: Any) -> None:
        look(delivery)

    topic.handler(look_here if awaiting else look)
    async with gate.aio.worker():
        await topic.aio.trigger("a")
        await eventually(lambda: gate.counters["worker.nacked"] == 1)
        clock.advance("1s")
        await eventually(lambda: len(made) == 2)
        # When the same key has another message
        await eventually(lambda: gate.counters["worker.acked"] == 1)
        await topic.aio.trigger("a")
        await eventually(lambda: len(made) == 3)
    first, retried, other = (key for _, key in made)
    assert first == retried != other


@pytest.mark.parametrize("awaiting", [False, True])
async def test_a_delivery_whose_key_is_done_is_acknowledged_and_counted_as_a_duplicate(
    gate: Gate, eventually: Any, awaiting: bool
) -> None:
    topic = gate.topic("t")

    def handle(delivery: Any) -> None:
        raise AssertionError

    async def handle_async(delivery: Any) -> None:
        raise AssertionError

    topic.handler(gate.once(key="{delivery.key}", scope="s")(handle_async if awaiting else handle))
    gate.claim("a", scope="s").complete()
    async with gate.aio.worker():
        await topic.aio.trigger("a")
        await eventually(lambda: gate.counters["worker.acked"] == 1)
    assert gate.counters["worker.duplicate"] == 1


async def test_a_delivery_is_deferred_while_the_store_of_its_guard_is_away(
    gate: Gate, clock: Clock, eventually: Any, tmp_path: Any
) -> None:
    topic = gate.topic("t", backoff="1s", max_attempts=2)
    away = Gate(f"unix://{tmp_path}/absent.sock", timeout="1ms")
    topic.handler(away.once(key="{delivery.key}", scope="s")(lambda delivery: None))
    async with gate.aio.worker():
        await topic.aio.trigger("a")
        for times in range(1, 5):
            await eventually(lambda times=times: gate.counters["worker.deferred"] == times)
            clock.advance("2s")
    # Then no attempt was counted
    assert (gate.counters["worker.nacked"], gate.counters["worker.dead"]) == (0, 0)
    away.close()


async def test_a_delivery_whose_guard_lost_its_lease_is_delivered_again(
    gate: Gate, clock: Clock, eventually: Any
) -> None:
    topic, ran = gate.topic("t"), []

    def stall(delivery: Any) -> None:
        ran.append(delivery.key)
        clock.advance("20s")  # the lease of the guard is over, that of the delivery is not
        gate.claim("a", scope="s").complete()

    topic.handler(gate.once(key="{delivery.key}", scope="s", lease="10s")(stall))
    async with gate.aio.worker():
        await topic.aio.trigger("a")
        await eventually(lambda: gate.counters["worker.deferred"] == 1)
        clock.advance("2s")
        await eventually(lambda: gate.counters["worker.acked"] == 1)
    assert ran == ["a"]
    assert gate.counters["worker.duplicate"] == 1


# -- what a handler raises --------------------------------------------------------------------------------------------


class Odd(BaseException):
    pass


@pytest.mark.parametrize("awaiting", [False, True])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("no such item"), "ValueError: no such item"),
        (ValueError("first line\nlast line"), "ValueError: first line ... last line"),
        (SystemExit(3), "SystemExit: 3"),
        (StopIteration(), "StopIteration"),
        (GeneratorExit(), "GeneratorExit"),
        (asyncio.CancelledError("by something inside"), "CancelledError"),
        (Odd("odd"), "Odd: odd"),
        (ExceptionGroup("several", [ValueError("one")]), "ExceptionGroup: several (1 sub-exception)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
async def test_whatever_a_handler_raises_is_tried_again_and_then_dead(
    gate: Gate, eventually: Any, awaiting: bool, error: BaseException, reason: str
) -> None:
    # Given a handler that always raises this, and two attempts
    topic = gate.topic("t", max_attempts=2, backoff=0)
    attempts: list[int] = []

    def blocking(delivery: Any) -> None:
        attempts.append(delivery.attempt)
        raise error

    async def fail(delivery: Any) -> None:
        blocking(delivery)

    topic.handler(fail if awaiting else blocking)
    other = gate.topic("other")
    handled = AsyncObject()
    other.handler(handled)
    await topic.aio.trigger("a")
    # When it is delivered
    async with gate.aio.worker() as worker:
        letters = await eventually(topic.aio.dead.list)
        # Then it was tried twice, and the dead letter says what the traceback's last line says
        assert attempts == [1, 2]
        assert (letters[0].key, letters[0].attempts) == ("a", 2)
        assert reason in letters[0].reason or (awaiting and "raised StopIteration" in letters[0].reason)
        # And the worker goes on
        await other.aio.trigger("b")
        await eventually(lambda: handled.keys == ["b"])
        assert worker.concurrency == 32
    assert (gate.counters["worker.failed"], gate.counters["worker.dead"]) == (2, 1)


async def test_a_reason_that_is_no_text_is_kept_escaped(
    gate: Gate, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    # Given an error that names a file as the file system has it
    caplog.set_level("CRITICAL", logger="idemgate.worker")  # pytest-xdist cannot send what this would log
    topic = gate.topic("t", max_attempts=1)

    @topic.handler
    async def fail(delivery: Any) -> None:
        raise OSError("no file \udcff")

    await topic.aio.trigger("a")
    async with gate.aio.worker():
        letters = await eventually(topic.aio.dead.list)
    assert letters[0].reason == r"OSError: no file \udcff"


async def test_an_attempt_that_fails_is_repeated_after_the_backoff(gate: Gate, clock: Clock, eventually: Any) -> None:
    # Given a handler that succeeds with the third attempt
    topic = gate.topic("t", backoff=["10s", "60s"])
    attempts: list[tuple[int, str, Any]] = []

    @topic.handler
    async def handle(delivery: Any) -> None:
        attempts.append((delivery.attempt, delivery.failure, clock.now()))
        if delivery.attempt < 3:
            raise ValueError(f"attempt {delivery.attempt}")

    started = clock.now()
    await topic.aio.trigger("a")
    async with gate.aio.worker():
        await eventually(lambda: gate.counters["worker.nacked"] == 1)
        clock.advance("9s")
        assert (await topic.aio.peek("a")).pending is not None
        clock.advance("1s")
        await eventually(lambda: gate.counters["worker.nacked"] == 2)
        clock.advance("60s")
        await eventually(lambda: gate.counters["worker.acked"] == 1)
    # Then each came after its delay, and knew how the one before failed
    after = [(attempt, failure, (at - started).total_seconds()) for attempt, failure, at in attempts]
    assert after == [(1, "", 0.0), (2, "ValueError: attempt 1", 10.0), (3, "ValueError: attempt 2", 70.0)]


async def test_retry_names_its_own_delay(gate: Gate, clock: Clock, eventually: Any) -> None:
    topic = gate.topic("t", backoff="1h")

    @topic.handler
    def handle(delivery: Any) -> None:
        if delivery.attempt == 1:
            raise Retry("the rate is limited", delay="7s")

    await topic.aio.trigger("a")
    async with gate.aio.worker():
        await eventually(lambda: gate.counters["worker.nacked"] == 1)
        peek = await topic.aio.peek("a")
        assert peek.due_at is not None
        assert (peek.due_at - clock.now()).total_seconds() == 7.0
        clock.advance("7s")
        await eventually(lambda: gate.counters["worker.acked"] == 1)


async def test_a_retry_is_reported_as_a_failure_only_with_an_error_or_if_it_is_the_last(
    gate: Gate, eventually: Any
) -> None:
    topic = gate.topic("t", max_attempts=3)

    @topic.handler
    def handle(delivery: Any) -> None:
        raise Retry("not yet", delay=0) from (KeyError("address") if delivery.attempt == 2 else None)

    topic.trigger("a")
    async with gate.aio.worker():
        await eventually(lambda: topic.stats().dead == 1)
    failures = [(one.attempt, one.error) for one in gate.context.activity.failures]
    assert failures == [(2, "KeyError: 'address'"), (3, "idemgate.errors.Retry: not yet")]
    assert gate.counters["worker.failed"] == 3


async def test_a_delay_that_makes_no_sense_costs_a_second_not_the_worker(
    gate: Gate, clock: Clock, eventually: Any
) -> None:
    topic = gate.topic("t")

    @topic.handler
    def handle(delivery: Any) -> None:
        if delivery.attempt == 1:
            raise Retry(delay="soon")

    await topic.aio.trigger("a")
    async with gate.aio.worker():
        await eventually(lambda: gate.counters["worker.nacked"] == 1)
        clock.advance("1s")
        await eventually(lambda: gate.counters["worker.acked"] == 1)


@pytest.mark.parametrize(
    "error",
    [
        Bury("the item was deleted"),
        KeyReused("order-7"),
        OutcomeUnknown("order-7", 1, "charge"),
        AttemptsExhausted("order-7", 3, "charge"),
        InvalidArgument("key", "", "empty", "Name one"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_what_repeating_cannot_mend_goes_to_the_dead_letters_at_once(
    gate: Gate, eventually: Any, error: Exception
) -> None:
    topic = gate.topic("t")

    @topic.handler
    async def handle(delivery: Any) -> None:
        raise error

    await topic.aio.trigger("a")
    async with gate.aio.worker():
        letters = await eventually(topic.aio.dead.list)
    assert (letters[0].attempts, letters[0].reason.rpartition("errors.")[2]) == (1, f"{type(error).__name__}: {error}")


@pytest.mark.damages("undecodable")
async def test_a_payload_that_cannot_be_read_goes_to_the_dead_letters(gate: Gate, raw: Any, eventually: Any) -> None:
    # Given a payload of another codec version
    topic = gate.topic("t")

    @topic.handler
    async def handle(delivery: Any) -> None:
        assert delivery.payload

    await topic.aio.trigger("a", "text")
    pending = b"ig2:{%s:topic:t:0/1}:messages" % gate.namespace.encode()
    stored = raw.hget(pending, "a")
    encoded = gate.context.codec.encode("text")
    raw.hset(pending, "a", stored.replace(encoded, b"\x7f" + encoded[1:]))
    # When it is delivered
    async with gate.aio.worker():
        letters = await eventually(topic.aio.dead.list)
    assert letters[0].reason.startswith("idemgate.errors.DecodeError: ")


# -- a guarded handler ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("awaiting", [False, True])
@pytest.mark.parametrize("done", ["replay", "raise", "result unavailable"])
async def test_a_guarded_handler_that_was_done_is_acknowledged_without_running_again(
    gate: Gate, clock: Clock, eventually: Any, awaiting: bool, done: Any
) -> None:
    topic, runs = gate.topic("t", lease="30s"), []

    result = object() if done == "result unavailable" else "rendered"  # an object cannot be stored

    def body(delivery: Any) -> object:
        runs.append((delivery.key, delivery.attempt))
        return result

    async def await_body(delivery: Any) -> object:
        return body(delivery)

    on_done = "raise" if done == "raise" else "replay"
    guarded = gate.once(key=lambda delivery: f"{delivery.key} {delivery.last_at}", on_done=on_done)
    handler = guarded(await_body if awaiting else body)
    topic.handler(handler)
    await topic.aio.trigger("a")
    # Given an owner that ran the handler and vanished before it acknowledged
    (taken,) = await topic.aio.take()
    assert (await handler(taken) if awaiting else await asyncio.to_thread(handler, taken)) is result
    clock.advance("31s")
    # When a worker gets the delivery again
    async with gate.aio.worker():
        await eventually(lambda: gate.counters["worker.acked"] == 1)
    # Then it ran once, and the message is done
    assert runs == [("a", 1)]
    assert gate.counters["worker.lapsed"] == 1
    stats = await topic.aio.stats()
    assert (stats.pending, stats.in_flight, stats["acked"]) == (0, 0, 1)


async def test_one_guarded_handler_of_two_topics_runs_for_each(gate: Gate, eventually: Any) -> None:
    topics, ran = [gate.topic("mails", slots=2), gate.topic("audits")], list[tuple[str, str]]()

    @topics[0].handler
    @topics[1].handler
    @gate.once(key="{delivery.id}")
    def handle(delivery: Any) -> None:
        ran.append((delivery.topic, delivery.key))

    # Given triggers of the same keys at the same moment
    for topic in topics:
        await topic.aio.trigger_many((f"k{n}", n) for n in range(20))
    async with gate.aio.worker():
        await eventually(lambda: gate.counters["worker.acked"] == 40)
    assert len({*ran}) == len(ran) == 40


def test_a_fence_of_a_guarded_handler_compares_the_token_of_the_delivery(gate: Gate, clock: Clock) -> None:
    topic, written = gate.topic("t", merge="append", lease="30s"), []

    @gate.once(key="{delivery.id}")
    def write(delivery: Any) -> None:
        written.append((delivery.payload, delivery.token, current().token))

    # Given a worker that stalled before it claimed the work, and another that has done it, with a newer trigger
    topic.trigger("a", 1)
    (stalled,) = topic.take()
    topic.trigger("a", 2)
    clock.advance("31s")
    (taken,) = topic.take()
    write(taken)
    clock.advance("1s")
    # When the first goes on
    write(stalled)
    # Then its work was no other's, and runs: what tells is the token of the delivery, and not that of the guard
    (items, token, granted), (again, former, later) = written
    assert (items, again) == ([1, 2], [1])
    assert former < token
    assert later > granted
    assert (topic.ack(stalled), topic.ack(taken)) == ("lost", "ok")


@pytest.mark.parametrize("policy", ["raise", "skip"])
async def test_while_another_owner_runs_the_key_the_delivery_is_put_off_and_no_attempt_is_counted(
    gate: Gate, clock: Clock, eventually: Any, policy: Any
) -> None:
    topic, runs = gate.topic("t", max_attempts=2), []

    @topic.handler
    @gate.once(key="{delivery.key}", scope="render", on_in_progress=policy)
    async def render(delivery: Any) -> None:
        runs.append(delivery.attempt)

    # Given another owner of the key
    held = await gate.aio.claim("a", scope="render", lease="20s")
    await topic.aio.trigger("a")
    async with gate.aio.worker():
        for round_ in range(1, 5):  # more often than there are attempts
            await eventually(lambda round_=round_: gate.counters["worker.deferred"] == round_)
            peek = await topic.aio.peek("a")
            assert peek.pending is not None
            assert peek.due_at is not None
            assert (peek.pending.attempts, (peek.due_at - clock.now()).total_seconds()) == (0, 20.0)
            await held.extend("40s")
            clock.advance("20s")
            await held.extend("20s") if round_ < 4 else await held.release()
        # Then it runs as soon as that owner has gone, and that is its first attempt
        await eventually(lambda: gate.counters["worker.acked"] == 1)
    assert runs == [1]
    assert gate.counters["worker.failed"] == 0


async def test_a_key_that_was_reused_is_a_dead_letter(gate: Gate, eventually: Any) -> None:
    topic = gate.topic("t")

    @topic.handler
    @gate.once(key=lambda delivery: "one", fingerprint=lambda delivery: delivery.key)
    def handle(delivery: Any) -> None: ...

    await topic.aio.trigger("a")
    async with gate.aio.worker():
        await eventually(lambda: gate.counters["worker.acked"] == 1)
        await topic.aio.trigger("b")
        letters = await eventually(topic.aio.dead.list)
    assert letters[0].reason.startswith("idemgate.errors.KeyReused: 'one' was used before with another payload")


async def test_a_handler_may_trigger_its_own_key_and_that_makes_another_delivery(gate: Gate, eventually: Any) -> None:
    topic, seen = gate.topic("t"), []

    @topic.handler
    async def handle(delivery: Any) -> None:
        seen.append(delivery.payload)
        if delivery.payload < 3:
            await topic.aio.trigger(delivery.key, delivery.payload + 1)

    await topic.aio.trigger("a", 1)
    async with gate.aio.worker():
        await eventually(lambda: gate.counters["worker.acked"] == 3)
    assert seen == [1, 2, 3]


# -- what is refused --------------------------------------------------------------------------------------------------


def test_run_without_anything_to_run_is_refused(gate: Gate) -> None:
    gate.topic("t")
    with pytest.raises(InvalidArgument, match="no topic with a handler and no subscriber"):
        gate.run()


def test_run_refuses_a_name_without_a_handler_even_where_there_are_subscribers(gate: Gate) -> None:
    gate.subscribe("channel")(lambda heard: None)
    with pytest.raises(InvalidArgument, match="'images': no handler is registered for it"):
        gate.run("images")


def test_a_worker_of_an_unknown_topic_is_refused(gate: Gate) -> None:
    gate.topic("images").handler(lambda delivery: None)
    gate.topic("plain")
    for name in ("image", "plain"):
        with pytest.raises(InvalidArgument, match=rf"'{name}': no handler.*\['images'\]"):
            gate.aio.worker(name)


@pytest.mark.parametrize(
    ("name", "value"), [("concurrency", 0), ("concurrency", True), ("prefetch", -1), ("prefetch", 1.5), ("grace", "x")]
)
def test_bounds_that_make_no_sense_are_refused(gate: Gate, name: str, value: Any) -> None:
    gate.topic("t").handler(lambda delivery: None)
    with pytest.raises(InvalidArgument, match=name):
        Worker(gate, **{name: value})


async def test_a_topic_with_another_policy_refuses_a_worker(gate: Gate, url: str, clock: Clock) -> None:
    # Given a topic, and a program that means another one by the same name
    await gate.topic("t", window="60s").aio.open()
    other = Gate(url, namespace=gate.namespace, clock=clock)
    other.topic("t", window="30s").handler(lambda delivery: None)
    # Then its worker does not start
    with pytest.raises(PolicyChanged, match=r"window is 60.0, asked 30.0"):
        async with other.aio.worker():
            raise AssertionError("entered")
    await other.aio.close()
    other.close()


def test_a_topic_with_another_policy_ends_run(url: str, namespace: str) -> None:
    # Given the same, as a whole program with a subscriber too
    with Gate(url, namespace=namespace) as gate, Gate(url, namespace=namespace) as other:
        gate.topic("t", window="60s").open()
        other.topic("t", window="30s").handler(lambda delivery: None)
        other.subscribe(f"{namespace}-news")(lambda heard: None)
        # Then the program ends with the text of the error, not with a traceback
        with pytest.raises(SystemExit, match=r"idemgate: topic 't' .* 60.0, asked 30.0.*raise revision=") as end:
            other.run()
        assert isinstance(end.value.__cause__, PolicyChanged)


async def test_run_outside_of_the_main_thread_is_refused(gate: Gate) -> None:
    gate.topic("t").handler(lambda delivery: None)
    with pytest.raises(InvalidArgument, match="signals reach the main thread only"):
        await asyncio.to_thread(gate.run)


@pytest.mark.damages("undecodable")
async def test_a_message_that_cannot_be_read_is_buried_and_the_others_run(
    gate: Gate, raw: Any, eventually: Any
) -> None:
    topic, seen = gate.topic("t"), []

    @topic.handler
    def handle(delivery: Any) -> None:
        seen.append(delivery.payload)

    # Given a message that scripts can handle, and Python cannot read
    topic.trigger_many([("bad", 1), ("good", 2)])
    pending = topic.open().keys(0)[1]
    fields = unpack_message(raw.hget(pending, "bad"))
    raw.hset(pending, "bad", pack_message(**fields | {"first": LATEST_MS + 1}))
    # When both are due
    async with gate.aio.worker():
        await eventually(lambda: (gate.counters["worker.acked"], gate.counters["worker.buried"]) == (1, 1))
    # Then one was run, and the other is a dead letter
    assert seen == [2]
    assert (await topic.aio.stats()).dead == 1
