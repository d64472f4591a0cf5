"""Traces of guarded calls: what replays a result names the run that made it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from idemgate import Verdict
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


async def test_the_block_of_a_claim_is_a_step(face: Face) -> None:
    recorder = record(face.gate)
    async with face.inside("k", scope="s", retention="1h") as claim, face.inside("other", scope="inner"):
        assert await claim.complete({"n": 1})
    async with face.inside("k", scope="s") as claim:
        assert claim.result == {"n": 1}
    run, inner, replay = recorder.of("once")
    assert (run.of, run.outcome, run.replayed) == (
        "s", Verdict("handled", attempt=1, token=run.outcome.token, ran=True), b""
    )  # fmt: skip
    assert (inner.of, inner.outcome.outcome) == ("inner", "handled")
    # The step that was inside of the run completed it
    assert (replay.outcome.outcome, replay.outcome.replayed, replay.replayed) == ("duplicate", True, inner.trace)


async def test_a_step_of_a_block_has_its_outcome(face: Face) -> None:
    recorder = record(face.gate)
    await face.claim("busy", scope="s")
    async with face.inside("busy", scope="s"):
        pass
    async with face.inside("released", scope="s") as claim:
        await claim.release()
    async with face.inside("lost", scope="s"):
        await face.forget("lost", scope="s", force=True)
    with pytest.raises(ValueError, match="no"):
        async with face.inside("failed", scope="s"):
            raise ValueError("no")
    with pytest.raises(asyncio.CancelledError):
        async with face.inside("cancelled", scope="s"):
            raise asyncio.CancelledError
    *steps, cancelled = recorder.of("once")
    assert [one.outcome.outcome for one in steps] == ["in_progress", "failed", "lost", "failed"]
    assert isinstance(steps[-1].outcome.error, ValueError)
    assert [one.error for one in steps] == [None] * 4
    assert (cancelled.outcome, type(cancelled.error)) == (None, asyncio.CancelledError)


async def test_of_claims_that_are_sent_together_each_block_is_a_step(face: Face) -> None:
    recorder = record(face.gate)
    if face.awaiting:
        async with face.gate.aio.claim_many(["a", "b"], scope="s") as claims, claims[1] as claim:
            await claim.complete(2)
    else:
        with face.gate.claim_many(["a", "b"], scope="s") as others, others[1] as other:
            other.complete(2)
    [step] = recorder.of("once")
    assert (step.outcome.outcome, step.error) == ("handled", None)


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
