"""The history of guarded keys: what happened outside the usual path, best-effort and off the caller's path."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from idemgate import Gate, LeaseLost, StoreUnavailable
from idemgate.core import keys
from idemgate.core.calls import run_plan
from idemgate.core.history import HISTORY_LASTS, KEPT
from idemgate.core.process import process_name
from idemgate.guard.heartbeat import MAX_NOTES, note
from idemgate.history.calls import KeyHistory, find_guard_history
from idemgate.testing import Clock
from tests.waiting import wait_until

Told = Callable[..., list[tuple[str, int]]]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("idemgate.guard.heartbeat.NOTES_AFTER", 0)


def history(gate: Gate, key: str = "k", scope: str = "s") -> KeyHistory:
    return run_plan(find_guard_history(gate.context, key, [scope]), gate.context.link.run_all)[scope]


@pytest.fixture
def told(gate: Gate) -> Told:
    """`told(2, "k")`: the transitions of a key with their attempts, the oldest first, once there are two."""

    def wait(n: int, key: str = "k", scope: str = "s") -> list[tuple[str, int]]:
        wait_until(lambda: len(history(gate, key, scope).transitions) >= n)
        return [(one.what, one.attempts) for one in reversed(history(gate, key, scope).transitions)]

    return wait


async def test_first_calls_and_replays_leave_no_trace(face: Any, gate: Gate, raw: Any) -> None:
    # Given calls that run, replay, find another owner, and give a claim back
    guarded = face.once(key="{n}", scope="s")(lambda n: n)
    assert [await guarded(1), await guarded(1)] == [1, 1]
    claim = await face.claim("k", scope="s")
    assert (await face.claim("k", scope="s")).state == "in_progress"
    await claim.release()
    await face.first("f", "1h")
    # Then nothing waits to be noted, and nothing is stored
    assert gate.context.notes is None
    assert list(raw.scan_iter(f"*{gate.namespace}:*history:*")) == []


async def test_a_failure_is_told_with_its_attempt_and_its_error(face: Any, gate: Gate, told: Told) -> None:
    def fail(n: int) -> None:
        raise ValueError(f"bad {n}")

    guarded = face.once(key=lambda *_: "k", scope="s")(fail)
    for n in range(2):
        with pytest.raises(ValueError, match=f"bad {n}"):
            await guarded(n)
    assert told(2) == [("failed", 1), ("failed", 2)]
    one = history(gate).transitions[0]
    assert (one.error, one.by, one.key) == ("ValueError: bad 1", process_name(), "k")


async def test_a_run_that_was_taken_over_is_told_by_both(face: Any, gate: Gate, clock: Clock, told: Told) -> None:
    # Given an owner whose lease lapsed, and another one that took over
    late = await face.claim("k", scope="s", lease="10s")
    clock.advance("11s")
    owner = await face.claim("k", scope="s", lease="10s")
    assert not await late.complete()
    assert await owner.complete()
    # Then both tell, each with its token
    assert told(2) == [("taken_over", 2), ("lost", 1)]
    assert [one.token for one in history(gate).transitions] == [late.token, owner.token]


async def test_a_guarded_function_tells_as_a_claim_does(face: Any, gate: Gate, clock: Clock, told: Told) -> None:
    # Given a run whose lease lapses while it runs, and that another one takes over
    inner: list[str] = []

    def work() -> None:
        if not inner:
            inner.append("runs")
            clock.advance("1h")
            assert gate.once(key=lambda *_: "k", scope="s", lease="1m")(lambda: 7)() == 7

    guarded = face.once(key=lambda *_: "k", scope="s", lease="1m", on_lost="raise")(work)
    with pytest.raises(LeaseLost):
        await guarded()
    # Then both are told. The heartbeat may have found the loss, too.
    assert {("taken_over", 2), ("lost", 1)} <= set(told(2))


async def test_an_error_in_a_block_is_told(face: Any, told: Told) -> None:
    with pytest.raises(ValueError, match="no"):
        async with face.inside("k", scope="s"):
            raise ValueError("no")
    assert told(1) == [("failed", 1)]


async def test_decisions_are_told(face: Any, gate: Gate, clock: Clock, told: Told) -> None:
    await face.claim("k", scope="s", on_lease_loss="hold", lease="10s")
    assert await face.cancel("k", scope="s")
    clock.advance("11s")
    assert await face.resolve("k", scope="s", done=True, retention="1h")
    assert await face.forget("k", scope="s")
    assert not await face.forget("k", scope="s")
    await face.claim("k", scope="s", on_lease_loss="hold", lease="10s")
    clock.advance("11s")
    assert await face.resolve("k", scope="s", done=False)
    assert [what for what, _ in told(4)] == ["cancel_asked", "resolved_done", "forgotten", "resolved_again"]


async def test_what_waits_is_sent_when_the_gate_is_closed(
    entry: str, namespace: str, gate: Gate, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("idemgate.guard.heartbeat.NOTES_AFTER", 3600)
    with Gate(entry, namespace=namespace, clock=clock) as made:
        made.claim("k", scope="s").release()
        for n in range(MAX_NOTES + 5):
            note(made.context, "s", "k", "failed", attempt=n)
    assert made.counters["history.dropped"] == 5
    found = history(gate).transitions
    assert [one.attempts for one in found] == list(range(MAX_NOTES + 4, MAX_NOTES + 4 - KEPT, -1))


@pytest.mark.parametrize("seconds", [0, 3600], ids=["in the background", "at the end of the gate"])
def test_what_cannot_be_stored_is_counted(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr("idemgate.guard.heartbeat.NOTES_AFTER", seconds)
    with Gate("redis://127.0.0.1:1", timeout="100ms", presence=False) as away:
        with pytest.raises(StoreUnavailable):
            away.claim("k", scope="s")
        for n in range(3):
            note(away.context, "s", f"k{n}", "failed")
        if not seconds:
            wait_until(lambda: away.counters["history.dropped"] == 3)
    assert away.counters["history.dropped"] == 3


async def test_a_scope_keeps_the_newest_of_each_shard(gate: Gate, raw: Any, namespace: str, told: Told) -> None:
    name = keys.scope_history(namespace, "s", b"k")
    for n in range(KEPT + 3):
        note(gate.context, "s", "k", "failed", attempt=n)
    wait_until(lambda: history(gate).transitions[:1] and history(gate).transitions[0].attempts == KEPT + 2)
    assert told(KEPT)[0] == ("failed", 3)
    assert raw.llen(name) == KEPT
    assert HISTORY_LASTS - 60_000 < raw.pttl(name) <= HISTORY_LASTS


async def test_redacted_histories_hold_neither_keys_nor_errors(
    entry: str, namespace: str, clock: Clock, raw: Any, gate: Gate
) -> None:
    # Given a gate that hides keys and errors
    with Gate(entry, namespace=namespace, clock=clock, redact=lambda kind, text: f"<{kind}>") as hiding:

        def charge(card: str) -> None:
            raise ValueError(card)

        with pytest.raises(ValueError, match="4711"):
            hiding.once(key="{card}", scope="s")(charge)("4711")
        wait_until(lambda: raw.keys("*:history:*"))
    # Then the store has neither, and one who knows the key finds it
    [name] = raw.keys("*:history:*")
    assert b"4711" not in name + b"".join(raw.lrange(name, 0, -1))
    [one] = history(gate, "4711").transitions
    assert (one.what, one.error) == ("failed", "<error>")


async def test_a_history_that_cannot_be_written_costs_no_call(face: Any, gate: Gate, raw: Any, namespace: str) -> None:
    name = keys.scope_history(namespace, "s", b"k")
    raw.set(name, "x")
    guarded = face.once(key=lambda *_: "k", scope="s")(lambda fail: 1 / 0 if fail else 7)
    with pytest.raises(ZeroDivisionError):
        await guarded(True)
    wait_until(lambda: not gate.context.notes.waiting)  # type: ignore[union-attr]
    assert await guarded(False) == 7
    raw.delete(name)


async def test_a_scope_may_keep_all_transitions(face: Any, gate: Gate, told: Told) -> None:
    # Given a guarded function and claims of a scope that keeps all
    guarded = face.once(key=lambda fail: "k", scope="s", history=64)(lambda fail: 1 / 0 if fail else 7)
    with pytest.raises(ZeroDivisionError):
        await guarded(True)
    assert [await guarded(False), await guarded(False)] == [7, 7]
    # Then each run is told, and no replay
    ended = ["started", "failed", "released", "started", "completed"]
    assert [what for what, _ in told(5)] == ended
    claim = await face.claim("c", scope="s", history=64)
    assert (await face.claim("c", scope="s", history=64)).state == "in_progress"
    await claim.release()
    async with face.inside("c", scope="s", history=64):
        pass
    assert [what for what, _ in told(4, "c")] == ["started", "released", "started", "completed"]
    claims = await face.claim_many(["m", "n"], scope="s", history=64)
    await face.complete_many([(claims[0], 1)])
    await face.release_many([claims[1]])
    assert [[what for what, _ in told(2, key)] for key in "mn"] == [["started", "completed"], ["started", "released"]]


def test_a_process_sends_many_notes_in_several_calls(gate: Gate, raw: Any, namespace: str) -> None:
    # Given more notes of a key than one call takes
    for n in range(250):
        note(gate.context, "s", "k", "failed", attempt=n, kept=200)
    # Then its list has the newest of them
    wait_until(lambda: (found := history(gate).transitions) and found[0].attempts == 249)
    assert raw.llen(keys.scope_history(namespace, "s", b"k")) == 200
