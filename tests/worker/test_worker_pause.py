"""What a worker says about a paused topic."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from idemgate import Gate
from idemgate.testing import Clock


@pytest.mark.parametrize("kind", ["handler", "forward"])
async def test_a_worker_logs_a_pause_and_its_end_once(
    gate: Gate, clock: Clock, eventually: Any, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    caplog.set_level(logging.WARNING, logger="idemgate.worker")
    topic = gate.topic("jobs", slots=4)
    if kind == "forward":
        topic.forward("list")
    else:
        topic.handler(lambda delivery: None)

    def events() -> list[str]:
        return [record.getMessage().partition(" since=")[0] for record in caplog.records]

    # Given a topic that is paused before the worker starts
    topic.pause("an outage\n\x1b")
    pause = topic.stats().paused
    assert pause is not None
    async with gate.aio.worker():
        await eventually(lambda: len(events()) == 1)
        # When it takes again and again from all slots, and is resumed
        for _ in range(3):
            await topic.aio.trigger_many([(n, n) for n in range(20)])
            clock.advance("1s")
        await topic.aio.resume()
        # Then both are logged once
        await eventually(lambda: len(events()) == 2)
        await eventually(lambda: topic.stats().pending == 0)
        await topic.aio.pause()
        await topic.aio.trigger_many([(n, n) for n in range(20)])
        await eventually(lambda: len(events()) == 3)
    assert events() == [f"worker.{event} topic='jobs'" for event in ("paused", "resumed", "paused")]
    text = caplog.records[0].getMessage()
    assert text.endswith(f" since={pause.since.isoformat()} by={pause.by!r} reason='an outage\\n\\x1b'")
    facts = vars(caplog.records[0])
    assert (facts["topic"], facts["since"], facts["by"], facts["reason"]) == (
        "jobs", pause.since.isoformat(), pause.by, "an outage\n\x1b",
    )  # fmt: skip


async def test_a_record_of_a_pause_that_cannot_be_read_does_not_disturb_a_worker(
    gate: Gate, raw: Any, eventually: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="idemgate.worker")
    topic = gate.topic("jobs")
    topic.handler(lambda delivery: None)
    topic.trigger("k")
    topic.pause()
    raw.hset(topic.open().keys(0)[7], "paused", "1 x")
    async with gate.aio.worker():
        await eventually(lambda: caplog.records)
        await topic.aio.resume()
        await eventually(lambda: len(caplog.records) == 2)
        await eventually(lambda: topic.stats()["acked"] == 1)
    assert "by='<not decodable: " in caplog.records[0].getMessage()
    assert caplog.records[1].getMessage() == "worker.resumed topic='jobs'"
