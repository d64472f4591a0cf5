"""A worker says at its start which stored topics wait for a handler that its program does not have."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from idemgate import Gate
from idemgate.worker import worker as worker_module


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
    monkeypatch.setattr(worker_module, "MAX_SHOWN", 2)
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
