"""Work does not start on a lease that has nearly ended, and a lease does not outlive `max_run` or its gate."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from time import monotonic
from typing import Any

import pytest

from idemgate import Gate, LeaseLost, current
from idemgate.errors import InvalidArgument
from idemgate.guard import call, claim, heartbeat
from idemgate.guard.request import Grant
from idemgate.lua import script
from idemgate.testing import Clock
from idemgate.testing.proxy import Proxy
from tests.waiting import eventually

CLAIM, RENEW = script("guard/claim").sha, script("guard/renew").sha
Later = Callable[[float], None]


@pytest.fixture
def late_reply(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Later:
    """`late_reply(20)`: the next reply to a claim arrives after 20 seconds, on the clocks of the server and here."""
    passed, planned = [0.0], [0.0]
    record, real = call.record_claim, monotonic

    def record_later(*answer: Any) -> Any:
        passed[0] += planned[0]
        clock.advance(planned[0])
        planned[0] = 0.0
        return record(*answer)

    for module in (call, claim, heartbeat):
        monkeypatch.setattr(module, "monotonic", lambda: real() + passed[0])
    monkeypatch.setattr(call, "record_claim", record_later)

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
    renew = call.build_renewal

    def taken_over(grant: Grant) -> Any:
        assert face.gate.claim("a", scope="s").started
        return renew(grant)

    monkeypatch.setattr(call, "build_renewal", taken_over)
    late_reply(40)
    with pytest.raises(LeaseLost):
        await handle("a")
    assert (ran, face.gate.counters["once.not_started"]) == ([], 1)


async def test_a_renewal_that_is_late_itself_releases_the_key(
    face: Any, late_reply: Later, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = face.guard("s", lease="30s")
    monkeypatch.setattr(call, "is_late", lambda request, leased_at: True)
    verdict = await guard.run("a", lambda: "ran")
    assert (verdict.outcome, verdict.action, verdict.ran) == ("lost", "retry", False)
    assert face.gate.inspect("a", scope="s").state == "released"
    assert face.gate.inspect("a", scope="s").attempts == 0


@pytest.fixture
async def slow(face: Any, url: str, namespace: str) -> AsyncIterator[tuple[Any, Proxy]]:
    """The face of a gate on the real clock, and the proxy before it. Scripts are loaded: short leases use them."""
    with Proxy(url) as proxy:
        made = Gate(proxy.url, namespace=namespace)
        slow = type(face)(made, face.awaiting)
        await (await slow.claim("warm")).extend()
        await slow.claim_many(["warm"])
        yield slow, proxy
        await made.aio.close()
        made.close()


@pytest.mark.parametrize("many", [False, True], ids=["claim", "claim_many"])
async def test_a_claim_whose_reply_was_late_is_renewed(slow: tuple[Any, Proxy], many: bool) -> None:
    face, proxy = slow
    proxy.delay_reply(CLAIM, 1.5)
    claim = (await face.claim_many(["a"], lease="2500ms"))[0] if many else await face.claim("a", lease="2500ms")
    assert claim.started
    assert face.gate.inspect("a").lease_left > 1.1


async def _claim(face: Any, many: bool) -> Any:
    return await (face.claim_many(["a"], lease="300ms") if many else face.claim("a", lease="300ms"))


@pytest.mark.parametrize("many", [False, True], ids=["claim", "claim_many"])
async def test_a_claim_whose_lease_was_taken_over_before_its_reply_is_lost(
    slow: tuple[Any, Proxy], url: str, namespace: str, many: bool
) -> None:
    face, proxy = slow
    other = Gate(url, namespace=namespace)
    # Given a claim that was granted, and whose reply is late
    proxy.delay_reply(CLAIM, 1.5)
    claiming = asyncio.create_task(_claim(face, many))
    while other.inspect("a").state != "lapsed":
        await asyncio.sleep(0.01)
    # When another caller takes the key over before the reply arrives
    assert other.claim("a").started
    # Then the first caller does not believe that it may run
    if many:
        assert isinstance((await claiming)[0].error, LeaseLost)
    else:
        with pytest.raises(LeaseLost):
            await claiming
    assert face.gate.counters["once.not_started"] == 1
    other.close()


async def test_a_lease_that_a_late_copy_started_is_renewed_before_it_is_relied_on(
    slow: tuple[Any, Proxy], url: str, namespace: str
) -> None:
    face, proxy = slow
    other = Gate(url, namespace=namespace)
    owner = other.claim("a")
    claim = await face.claim("a", lease="2500ms")
    # Given a wait of which a copy is still on its way
    proxy.hold_request(CLAIM)
    assert await claim.wait("1ms") == "in_progress"
    # When the copy arrives after the owner has released the key
    owner.release()
    assert proxy.release() == 1
    await asyncio.sleep(1.5)
    # Then a later wait does not rely on what is left of that lease
    assert await claim.wait("1ms") == "started"
    assert face.gate.inspect("a").lease_left > 1.1
    other.close()


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


async def test_a_heartbeat_does_not_shorten_an_extended_lease(slow: tuple[Any, Proxy]) -> None:
    face, proxy = slow
    # Given a block whose body expects to be unable to renew its lease for a while
    async with face.inside("a", lease="1500ms") as claim:
        assert await claim.extend("1m")
        # When the heartbeat renews the lease
        sent = proxy.count(RENEW)
        async with asyncio.timeout(60):
            while proxy.count(RENEW) < sent + 2:
                await asyncio.sleep(0.01)
        # Then the lease is as long as was asked for
        assert face.gate.inspect("a").lease_left > 50


# -- max_run ----------------------------------------------------------------------------------------------------------


async def test_a_run_longer_than_max_run_is_renewed_no_more(lasting: Any, caplog: pytest.LogCaptureFixture) -> None:
    lost = threading.Event()

    def watch() -> None:
        while not current().lease_lost:
            lost.wait(0.002)

    await lasting.once(key="{k}", scope="s", lease="2s", max_run="90ms")(lambda k: watch())("a")
    assert lasting.gate.counters["once.max_run_exceeded"] == 1
    await eventually(lambda: "once.max_run_exceeded scope='s' key='a'" in caplog.text)  # the run may end before it
    async with lasting.inside("b", lease="1s", max_run="1200ms") as claim:
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
