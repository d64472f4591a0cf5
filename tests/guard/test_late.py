"""Work does not start on a lease that has nearly ended, and a lease does not outlive `max_run` or its gate."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

import pytest

from idemgate import Gate, LeaseLost, current
from idemgate.errors import InvalidArgument
from idemgate.guard import attempt as attempts
from idemgate.guard import driver, heartbeat
from idemgate.guard.attempt import ClaimAttempt
from idemgate.testing import Clock

Later = Callable[[float], None]


@pytest.fixture
def late_reply(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Later:
    """`late_reply(20)`: the next reply to a claim arrives after 20 seconds, on the clocks of the server and here."""
    passed, planned = [0.0], [0.0]
    interpret, decide = ClaimAttempt.interpret_reply, monotonic

    def interpret_later(self: ClaimAttempt, entry: Any) -> Any:
        passed[0] += planned[0]
        clock.advance(planned[0])
        planned[0] = 0.0
        return interpret(self, entry)

    for module in (attempts, driver, heartbeat):
        monkeypatch.setattr(module, "monotonic", lambda: decide() + passed[0])
    monkeypatch.setattr(ClaimAttempt, "interpret_reply", interpret_later)

    def plan(seconds: float) -> None:
        planned[0] = seconds

    return plan


async def test_a_lease_of_which_less_than_half_is_left_is_renewed_before_the_work_starts(
    face: Any, late_reply: Later
) -> None:
    left: list[float | None] = []

    @face.once(key="{k}", scope="s", lease="30s")
    def handle(k: str) -> str:
        left.append(face.gate.inspect(k, scope="s").lease_left)
        return "ran"

    late_reply(10)
    assert await handle("a") == "ran"
    late_reply(20)
    assert await handle("b") == "ran"
    assert left == [20, 30]


async def test_work_whose_lease_was_taken_over_does_not_start(
    face: Any, late_reply: Later, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    handle = face.once(key="{k}", scope="s", lease="30s")(lambda k: ran.append(k))
    renew = ClaimAttempt.build_renewal

    def taken_over(self: ClaimAttempt) -> Any:
        assert face.gate.claim("a", scope="s").started
        return renew(self)

    monkeypatch.setattr(ClaimAttempt, "build_renewal", taken_over)
    late_reply(40)
    with pytest.raises(LeaseLost):
        await handle("a")
    assert (ran, face.gate.counters["once.not_started"]) == ([], 1)


async def test_a_renewal_that_is_late_itself_releases_the_key(
    face: Any, late_reply: Later, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = face.guard("s", lease="30s")
    monkeypatch.setattr(ClaimAttempt, "needs_renewal", property(lambda self: True))
    verdict = await guard.run("a", lambda: "ran")
    assert (verdict.outcome, verdict.action, verdict.ran) == ("lost", "retry", False)
    assert face.gate.inspect("a", scope="s").state == "released"
    assert face.gate.inspect("a", scope="s").attempts == 0


async def test_a_message_of_a_batch_whose_lease_is_lost_does_not_start(face: Any) -> None:
    ran: list[str] = []

    def handle(message: str) -> None:
        ran.append(message)
        for renewal in [one() for one in face.gate.context.heartbeat._renewals]:
            if renewal is not None:
                renewal.overdue()

    verdicts = await face.guard("s").run_many([("a", "a"), ("b", "b")], handle)
    assert [(verdict.outcome, verdict.ran) for verdict in verdicts] == [("handled", True), ("lost", False)]
    assert (ran, face.gate.counters["once.not_started"]) == (["a"], 1)


# -- max_run ----------------------------------------------------------------------------------------------------------


async def test_a_run_longer_than_max_run_is_renewed_no_more(lasting: Any, caplog: pytest.LogCaptureFixture) -> None:
    lost = threading.Event()

    def watch() -> None:
        while not current().lease_lost:
            lost.wait(0.002)

    await lasting.once(key="{k}", scope="s", lease="60ms", max_run="90ms")(lambda k: watch())("a")
    assert lasting.gate.counters["once.max_run_exceeded"] == 1
    assert "once.max_run_exceeded scope='s' key='a'" in caplog.text
    async with lasting.inside("b", lease="60ms", max_run="90ms") as claim:
        while not claim.lease_lost:
            lost.wait(0.002)


@pytest.mark.parametrize("value", ["soon", 0, -1, True])
def test_an_invalid_max_run_is_refused(gate: Gate, value: Any) -> None:
    with pytest.raises(InvalidArgument, match="max_run"):
        gate.once(key="{k}", max_run=value)
    with pytest.raises(InvalidArgument, match="max_run"):
        gate.claim("k", max_run=value)


def test_at_most_once_has_no_lease_that_could_run_too_long(gate: Gate) -> None:
    with pytest.raises(InvalidArgument, match="max_run"):
        gate.once(key="{k}", at_most_once=True, max_run="1m")


async def test_a_gate_that_is_closed_during_a_run_loses_its_leases(lasting: Any) -> None:
    seen: list[bool] = []

    @lasting.once(key="{k}", scope="s")
    def handle(k: str) -> None:
        seen.append(current().lease_lost)
        lasting.gate.close()
        seen.append(current().lease_lost)

    await handle("a")
    assert seen == [False, True]


# -- cancel -----------------------------------------------------------------------------------------------------------


async def test_extend_learns_that_the_run_is_cancelled(face: Any) -> None:
    claim = await face.claim("k")
    assert await face.cancel("k")
    assert not claim.cancel_requested
    assert await claim.extend()
    assert claim.cancel_requested
