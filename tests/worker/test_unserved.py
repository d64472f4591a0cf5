"""A worker names the stored topics whose messages wait for a handler that its program does not have."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from idemgate import Gate
from idemgate.testing import Clock
from idemgate.worker import unserved


def warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.getMessage().startswith("worker.unserved")]


async def test_topics_without_a_handler_here_are_named(
    replicas: Callable[[int], list[Gate]], eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a program whose topics have other names than those of the worker
    producer, program = replicas(2)
    producer.topic("__main__.render", slots=4).trigger_many([(n, None) for n in range(3)])
    producer.topic("mail", window="1h").trigger("k")
    producer.topic("empty").open()
    producer.topic("sent").trigger("k")
    producer.topic("handled", window="1h").trigger("k")
    # And a worker of one of its two topics
    program.topic("app.render").handler(lambda delivery: None)
    program.topic("handled", window="1h").handler(lambda delivery: None)
    program.topic("sent").forward("list")
    program.topic("mail", window="1h")  # only to trigger
    async with program.aio.worker("app.render"):
        await eventually(lambda: warnings(caplog))
    # Then it names those that wait for nothing here, with the number of messages and what to do
    (record,) = warnings(caplog)
    assert "topics=__main__.render (3), mail (1): " in record.getMessage()
    assert "Register one" in record.getMessage()
    assert vars(record)["waiting"] == {"__main__.render": 3, "mail": 1}


async def test_a_long_list_is_cut(
    replicas: Callable[[int], list[Gate]],
    eventually: Any,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unserved, "MAX_SHOWN", 2)
    (program,) = replicas(1)
    for name in "abc":
        program.topic(name, window="1h").trigger("k")
    program.topic("own").handler(lambda delivery: None)
    async with program.aio.worker():
        await eventually(lambda: warnings(caplog))
    assert "topics=a (1), b (1) and 1 more: " in warnings(caplog)[0].getMessage()


async def test_a_store_that_cannot_tell_is_no_obstacle(
    replicas: Callable[[int], list[Gate]], raw: Any, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    # Given a topic that is not waiting for anything, and one whose policy cannot be read
    (program,) = replicas(1)
    program.topic("idle", window="1h").open()
    handled: list[str] = []
    program.topic("own").handler(lambda delivery: handled.append(delivery.key))
    program.topic("own").trigger("k")
    raw.hset(f"ig2:{{{program.namespace}:topics}}", "broken", b"\xc1")
    async with program.aio.worker():
        await eventually(lambda: handled == ["k"])
    assert warnings(caplog) == []
    raw.hdel(f"ig2:{{{program.namespace}:topics}}", "broken")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each look that ended."""
    ended: list[None] = []
    original = unserved.UnservedTopics._look

    async def look(self: unserved.UnservedTopics, is_first: bool) -> None:
        await original(self, is_first)
        ended.append(None)

    monkeypatch.setattr(unserved.UnservedTopics, "_look", look)
    return ended


async def test_a_topic_that_no_program_serves_is_named_while_the_worker_runs(
    gate: Gate, url: str, clock: Clock, eventually: Any, looks: list[None], caplog: pytest.LogCaptureFixture
) -> None:
    async def look_again(seconds: float = 30) -> int:
        """Let the worker look once more; return how often it has warned."""
        before = len(looks)
        clock.advance(seconds)
        await eventually(lambda: len(looks) > before)
        return len(warnings(caplog))

    gate.topic("own").handler(lambda delivery: None)
    with Gate(url, namespace=gate.namespace, clock=clock) as other:
        mail, later = other.topic("mail"), other.topic("later", window="1h")
        async with gate.aio.worker():
            await eventually(lambda: looks)
            # Given messages that came after the start; those of one topic are not due
            mail.trigger("k")
            later.trigger("k")
            # When nobody takes them for half a minute, then the topic is named once
            assert await look_again() == 0
            assert await look_again() == 1
            assert vars(warnings(caplog)[0])["waiting"] == {"mail": 1}
            assert await look_again() == 1
            # When another program serves it, then it is not named, also while a handler runs for long
            (taken,) = mail.take()
            assert await look_again() == 1
            mail.ack(taken)
            mail.trigger("a")
            mail.trigger("b")
            (held,) = mail.take()
            assert [await look_again(), await look_again(), await look_again()] == [1, 1, 1]
            # When that program is gone, then it is named again
            assert await look_again(300) == 2
            mail.ack(held)
            # A paused topic waits on purpose
            mail.pause()
            assert [await look_again(), await look_again()] == [2, 2]
            mail.resume()
            # When the other messages are due, then their topic is named too
            clock.advance("1h")
            assert await look_again() >= 2
            await look_again()
            assert {name for record in warnings(caplog) for name in vars(record)["waiting"]} == {"mail", "later"}
    assert gate.counters["worker.unserved"] == len(warnings(caplog))


async def test_a_topic_is_named_once_at_the_start(
    gate: Gate, url: str, clock: Clock, eventually: Any, looks: list[None], caplog: pytest.LogCaptureFixture
) -> None:
    # Given messages that wait when the worker starts, and become due later
    gate.topic("own").handler(lambda delivery: None)
    with Gate(url, namespace=gate.namespace, clock=clock) as other:
        other.topic("later", window="40s").trigger("k")
        async with gate.aio.worker():
            for seen in range(1, 6):
                await eventually(lambda seen=seen: len(looks) >= seen)
                clock.advance("30s")
    assert [vars(record)["waiting"] for record in warnings(caplog)] == [{"later": 1}]
