"""Handlers that say which of the merged items failed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from idemgate import Gate, PartialFailure
from idemgate.testing import Clock

pytestmark = pytest.mark.one_in(3)


def _returns(failed: PartialFailure) -> PartialFailure:
    return failed


def _raises(failed: PartialFailure) -> None:
    raise failed from ConnectionError("no answer")


def _handler(end: Callable[[PartialFailure], Any], awaiting: bool, seen: list[Any], bad: Callable[[Any], bool]) -> Any:
    """A handler that notes its payloads, and says that the bad items of the first delivery failed."""

    def blocking(delivery: Any) -> Any:
        seen.append(delivery.payload)
        if len(seen) == 1:
            return end(PartialFailure([item for item in delivery.payload if bad(item)], "odd ones"))
        return None

    async def handle(delivery: Any) -> Any:
        return blocking(delivery)

    return handle if awaiting else blocking


@pytest.mark.parametrize("awaiting", [False, True])
@pytest.mark.parametrize("end", [_returns, _raises])
async def test_only_what_failed_is_handled_again(
    gate: Gate, clock: Clock, eventually: Any, end: Any, awaiting: bool
) -> None:
    seen: list[Any] = []
    topic = gate.topic("t", merge="append", backoff="10s")
    topic.handler(_handler(end, awaiting, seen, lambda item: item % 2))
    await topic.aio.trigger_many([("k", n) for n in range(1, 6)])
    async with gate.aio.worker():
        await eventually(lambda: gate.counters["worker.nacked"] == 1)
        peek = await topic.aio.peek("k")
        assert peek.pending is not None
        assert (peek.pending.payload, peek.pending.failure) == ([1, 3, 5], "idemgate.errors.PartialFailure: odd ones")
        # What is triggered before the retry joins it
        await topic.aio.trigger("k", 6)
        clock.advance("10s")
        await eventually(lambda: gate.counters["worker.acked"] == 1)
    assert seen == [[1, 2, 3, 4, 5], [1, 3, 5, 6]]
    stats = await topic.aio.stats()
    assert (stats["acked_triggers"], stats["partial"], stats["items_failed"], stats.pending) == (6, 1, 3, 0)
    assert gate.counters["worker.failed"] == 1


@pytest.mark.parametrize("end", [_returns, _raises])
async def test_when_no_item_failed_all_is_done(gate: Gate, eventually: Any, end: Any) -> None:
    topic = gate.topic("t", merge="union")
    topic.handler(_handler(end, True, [], lambda _: False))
    await topic.aio.trigger("k", [1, 2])
    async with gate.aio.worker():
        await eventually(lambda: gate.counters["worker.acked"] == 1)
    assert gate.counters["worker.failed"] == 0
    assert (await topic.aio.stats()).pending == 0


async def test_failed_names_its_own_delay(gate: Gate, clock: Clock, eventually: Any) -> None:
    topic = gate.topic("t", merge="append", backoff="1h")

    @topic.handler
    def handle(delivery: Any) -> PartialFailure | None:
        return PartialFailure(delivery.payload[:1], delay="7s") if delivery.attempt == 1 else None

    await topic.aio.trigger_many([("k", 1), ("k", 2)])
    async with gate.aio.worker():
        await eventually(lambda: gate.counters["worker.nacked"] == 1)
        peek = await topic.aio.peek("k")
        assert peek.due_at is not None
        assert (peek.due_at - clock.now()).total_seconds() == 7.0


def _broken() -> Any:
    yield 1
    raise RuntimeError("half-way")


@pytest.mark.parametrize(
    ("merge", "items", "said"),
    [
        ("append", [1, 99], "items=99: not an item of this payload"),
        ("append", 7, "items=7: not a list"),
        pytest.param("append", [object()], "InvalidArgument: items", id="append-object"),
        pytest.param("append", _broken, "half-way", id="append-broken"),
        ("last", [1], 'merge="last" keeps no items'),
        ("sum", [1], 'merge="sum" keeps no items'),
        ("sum", [], 'merge="sum" keeps no items'),
    ],
    ids=str,
)
async def test_items_that_are_not_there_are_a_failed_attempt_of_everything(
    gate: Gate, clock: Clock, eventually: Any, merge: Any, items: Any, said: str
) -> None:
    # Given a handler that names what its delivery does not hold
    topic = gate.topic("t", merge=merge, max_attempts=2, backoff=0)

    @topic.handler
    def handle(delivery: Any) -> PartialFailure:
        return PartialFailure(items() if callable(items) else items)

    await topic.aio.trigger_many([("k", 1), ("k", 2)])
    async with gate.aio.worker():
        await eventually(lambda: gate.counters["worker.nacked"] >= 1)
        clock.advance("1s")
        # When its attempts are over, then all of it is dead, and says why
        (letter,) = await eventually(topic.aio.dead.list)
    assert (letter.count, letter.attempts) == (2, 2)
    assert said in letter.reason
    assert (await topic.aio.stats())["acked_triggers"] == 0


async def test_after_the_last_attempt_the_items_that_failed_are_dead(gate: Gate, eventually: Any) -> None:
    topic = gate.topic("t", merge="append", max_attempts=3, backoff=0)
    runs: list[Any] = []

    @topic.handler
    async def handle(delivery: Any) -> PartialFailure:
        runs.append(delivery.payload)
        return PartialFailure(delivery.payload[1:] or delivery.payload, "still")

    await topic.aio.trigger_many([("k", n) for n in range(5)])
    async with gate.aio.worker():
        (letter,) = await eventually(topic.aio.dead.list)
    assert runs == [[0, 1, 2, 3, 4], [1, 2, 3, 4], [2, 3, 4]]
    assert (letter.payload, letter.count, letter.reason) == ([3, 4], 2, "idemgate.errors.PartialFailure: still")


@pytest.mark.parametrize("end", [_returns, _raises])
async def test_a_guarded_handler_gets_what_failed_again(gate: Gate, eventually: Any, end: Any) -> None:
    # Given a handler that is itself guarded, by the work that it is given
    topic = gate.topic("t", merge="union", backoff=0)
    seen: list[Any] = []
    handle = _handler(end, False, seen, lambda item: item == "b")
    topic.handler(gate.once(key="{delivery.id}", on_done="skip")(handle))
    await topic.aio.trigger("k", ["a", "b"])
    async with gate.aio.worker():
        await eventually(lambda: gate.counters["worker.acked"] == 1)
    # Then what failed is other work than all of it
    assert seen == [["a", "b"], ["b"]]


@pytest.mark.parametrize("awaiting", [False, True])
@pytest.mark.parametrize("end", [_returns, _raises])
@pytest.mark.parametrize(
    ("items", "again"),
    [
        ({"tags": ["b"]}, ((7, ["b"], [], "new"))),
        (["tags"], (7, ["a", "b"], [], "new")),
        ({"log": [2], "tags": []}, (7, [], [2], "new")),
        ({"tags": [], "log": []}, None),
        ([], None),
    ],
)
async def test_a_merged_function_is_called_again_with_all_its_arguments(
    gate: Gate, clock: Clock, eventually: Any, awaiting: bool, end: Any, items: Any, again: Any
) -> None:
    calls: list[Any] = []

    def blocking(doc: int, tags: list[str], log: int, why: str = "?") -> Any:
        calls.append((doc, tags, log, why))
        return end(PartialFailure(items)) if len(calls) == 1 else None

    async def function(doc: int, tags: list[str], log: int, why: str = "?") -> Any:
        return blocking(doc, tags, log, why)

    merge = {"tags": "union", "log": "append"}
    made = gate.merge(key="{doc}", window="5s", merge=merge, name="reindex", backoff=0)(
        function if awaiting else blocking
    )
    await made.aio.trigger(7, ["a"], 1, why="old")
    await made.aio.trigger(7, ["b"], 2, why="new")
    clock.advance("5s")
    async with gate.aio.worker():
        await eventually(lambda: gate.counters["worker.acked"] == 1)
    assert calls == [(7, ["a", "b"], [1, 2], "new"), *([again] if again else [])]
