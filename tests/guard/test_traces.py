"""Traces of guarded calls: what replays a result names the run that made it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from idemgate.errors import ReplayedFailure
from tests.conftest import Face
from tests.tracing import record


async def test_a_replay_names_the_run_that_made_the_result(face: Face) -> None:
    recorder = record(face.gate)

    @face.once(key="{order}", scope="s", retention="1h")
    def charge(order: str) -> dict[str, Any]:
        return {"order": order, "pair": (1, 2)}

    first, again = await charge("o1"), await charge("o1")
    assert first == again == {"order": "o1", "pair": (1, 2)}
    run, replay = recorder.of("once")
    assert (run.of, run.outcome.outcome, run.replayed) == ("s", "handled", b"")
    assert (replay.outcome.outcome, replay.outcome.replayed, replay.replayed) == ("duplicate", True, run.trace)
    record_found = await face.inspect("o1", scope="s")
    assert record_found.value == first
    # A process without a tracer reads the same result
    face.gate.context.tracer = None
    assert await charge("o1") == first


@pytest.mark.parametrize("options", [{}, {"cache_size": 10}, {"retention": "90s"}, {"fingerprint": "f"}])
async def test_a_guard_traces_its_runs(face: Face, options: dict[str, Any]) -> None:
    recorder, options = record(face.gate), {"retention": "1h"} | options
    named = {"fingerprint": options.pop("fingerprint")} if "fingerprint" in options else {}
    guard = face.guard("orders", **options)
    verdicts = [await guard.run("k", lambda message: message * 2, 4, **named) for _ in range(2)]
    assert [verdict.value for verdict in verdicts] == [8, 8]
    run, replay = recorder.of("once")
    assert ([run.outcome, replay.outcome], replay.replayed) == (verdicts, run.trace)


async def test_each_message_of_a_batch_that_runs_is_a_step(face: Face) -> None:
    recorder, guard = record(face.gate), face.guard("orders", retention="1h")

    def handle(message: int) -> int:
        if message == 2:
            raise ValueError(message)
        return recorder.steps[-1].outcome or message * 2  # its step has no outcome yet

    verdicts = await guard.run_many([("a", 1), ("b", 2), ("c", 3), ("a", 1)], handle)
    assert [one.outcome for one in verdicts] == ["handled", "failed", "handled", "duplicate"]
    steps = recorder.of("once")
    # The copy is a call of its own, after the batch
    assert [one.outcome.outcome for one in steps] == [one.outcome for one in verdicts]
    assert [one.outcome.value for one in steps[:3]] == [2, None, 6]
    assert [one.error for one in steps] == [None] * 4
    assert {one.of for one in steps} == {"orders"}


async def test_each_duplicate_of_a_batch_is_a_step(face: Face) -> None:
    recorder, guard = record(face.gate), face.guard("orders", retention="1h")
    for _ in range(2):
        verdicts = await guard.run_many([("a", 1), ("b", 2)], lambda message: message)
    *runs, first, second = recorder.of("once")
    assert [one.outcome for one in (first, second)] == verdicts
    assert [one.replayed for one in (first, second)] == [one.trace for one in runs]


async def test_a_stored_failure_names_its_run(face: Face) -> None:
    recorder = record(face.gate)

    @face.once(key="{order}", scope="s", retention="1h", on_error="store")
    def charge(order: str) -> None:
        raise ValueError("no funds")

    with pytest.raises(ValueError, match="no funds"):
        await charge("o1")
    with pytest.raises(ReplayedFailure, match="no funds"):
        await charge("o1")
    run, replay = recorder.of("once")
    assert (run.outcome.outcome, replay.outcome.outcome, replay.replayed) == ("rejected", "rejected", run.trace)
    assert (await face.inspect("o1", scope="s")).value["text"] == "no funds"


async def test_without_a_trace_the_stored_result_is_the_same(face: Face, raw: Any) -> None:
    guard = face.guard("orders", retention="1h")
    await guard.run("k", lambda: 7)
    (name,) = raw.scan_iter(match=f"ig2:*{face.gate.namespace}*orders*")
    assert raw.get(name).endswith(b"\x01\x07")


async def test_a_cancelled_call_ends_its_step(face: Face) -> None:
    if not face.awaiting:
        return
    recorder, started = record(face.gate), asyncio.Event()

    async def handle() -> None:
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(face.gate.guard("orders", retention="1h").aio.run("k", handle))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (step,) = recorder.steps
    assert isinstance(step.error, asyncio.CancelledError)
