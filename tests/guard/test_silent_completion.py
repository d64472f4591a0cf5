"""A completion whose connection falls silent: the lease is renewed until the store has answered, so nobody else runs.

The server is up, the caller lives, and its renewals arrive; only the requests that complete the key never do.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from idemgate import Gate
from idemgate.lua import script
from idemgate.store import sync
from idemgate.testing import Clock
from idemgate.testing.proxy import Proxy
from tests.waiting import eventually

pytestmark = pytest.mark.one_in(3)

COMPLETE = script("guard/complete").sha
LEASE = {"lease": "1s", "scope": "pay"}


@pytest.fixture
def proxy(url: str) -> Iterator[Proxy]:
    with Proxy(url) as made:
        yield made


@pytest.fixture
async def owner(face: Any, proxy: Proxy, clock: Clock, namespace: str) -> AsyncIterator[Any]:
    """The face of a gate that reaches the server through `proxy`, and tries long enough for each test."""
    made = Gate(proxy.url, namespace=namespace, clock=clock, timeout="20s")
    yield type(face)(made, face.awaiting)
    proxy.heal()
    await made.aio.close()
    made.close()


@pytest.fixture
def outlast_leases(gate: Gate, clock: Clock, proxy: Proxy) -> Callable[..., Any]:
    """`await outlast_leases("k")`: let two leases pass by the server's clock while no completion arrives. After each
    half of a lease the owner renews, and another caller is refused."""

    async def outlast(*keys: str) -> None:
        await eventually(lambda: proxy.faults_left < 1000)
        for _ in range(4):
            clock.advance("500ms")
            for key in keys:
                await eventually(lambda key=key: (gate.inspect(key, scope="pay").lease_left or 0) > 0.75)
                assert gate.claim(key, **LEASE).state == "in_progress"

    return outlast


def check_done_once(gate: Gate, owner: Any, key: str, result: object) -> None:
    """The key is done with the owner's result, and no lease was lost."""
    claim = gate.claim(key, **LEASE)
    assert (claim.state, claim.result) == ("done", result)
    assert gate.inspect(key, scope="pay").attempts == 1
    assert not {name: n for name, n in dict(owner.gate.counters).items() if "lost" in name or ".un" in name}


async def test_a_guarded_function_keeps_its_lease_until_its_completion_is_answered(
    gate: Gate, owner: Any, proxy: Proxy, outlast_leases: Any
) -> None:
    @owner.once(key="{order}", **LEASE)
    def pay(order: str) -> str:
        return f"paid {order}"

    # Given a guarded function that has returned, and whose completion does not arrive
    proxy.swallow_request(COMPLETE, 1000)
    calling = asyncio.ensure_future(pay("a"))
    # When its lease would have ended twice, it is still held
    await outlast_leases("a")
    # And when a completion arrives, the key is done
    proxy.heal()
    assert await calling == "paid a"
    check_done_once(gate, owner, "a", "paid a")
    assert owner.gate.counters["once.completed"] == 1


@pytest.mark.parametrize("by", ["leaving the block", "complete"])
async def test_a_claim_keeps_its_lease_until_its_completion_is_answered(
    gate: Gate, owner: Any, proxy: Proxy, outlast_leases: Any, by: str
) -> None:
    proxy.swallow_request(COMPLETE, 1000)

    async def run() -> None:
        async with owner.inside("a", **LEASE) as claim:
            if by == "complete":
                assert await claim.complete("paid")

    running = asyncio.ensure_future(run() if owner.awaiting else asyncio.to_thread(asyncio.run, run()))
    await outlast_leases("a")
    proxy.heal()
    await running
    check_done_once(gate, owner, "a", "paid" if by == "complete" else None)


async def test_claims_of_a_batch_keep_their_leases_until_their_completions_are_answered(
    gate: Gate, owner: Any, proxy: Proxy, outlast_leases: Any
) -> None:
    proxy.swallow_request(COMPLETE, 1000)

    async def run() -> None:
        if owner.awaiting:
            async with owner.gate.aio.claim_many(["a", "b"], **LEASE) as claims:
                assert await owner.gate.aio.complete_many([(claim, "paid") for claim in claims]) == [True, True]
        else:
            with owner.gate.claim_many(["a", "b"], **LEASE) as claims:
                assert owner.gate.complete_many([(claim, "paid") for claim in claims]) == [True, True]

    running = asyncio.ensure_future(run() if owner.awaiting else asyncio.to_thread(asyncio.run, run()))
    await outlast_leases("a", "b")
    proxy.heal()
    await running
    check_done_once(gate, owner, "a", "paid")
    check_done_once(gate, owner, "b", "paid")


async def complete_guarded(gate: Gate) -> None:
    @gate.once(key="{order}", **LEASE)
    async def pay(order: str) -> str:
        return "paid"

    await pay("a")


async def complete_claim(gate: Gate) -> None:
    async with gate.aio.claim("a", **LEASE) as claim:
        await claim.complete("paid")


async def complete_batch(gate: Gate) -> None:
    async with gate.aio.claim_many(["a"], **LEASE) as claims:
        await gate.aio.complete_many([(claims[0], "paid")])


async def leave_block(gate: Gate) -> None:
    async with gate.aio.claim("a", **LEASE):
        pass


@pytest.mark.parametrize("face", ["awaiting"], indirect=True)
@pytest.mark.parametrize("complete", [complete_guarded, complete_claim, complete_batch, leave_block])
async def test_a_cancelled_caller_keeps_its_lease_until_its_completion_is_answered(
    gate: Gate, owner: Any, proxy: Proxy, outlast_leases: Any, complete: Any
) -> None:
    # Given a caller that is cancelled while its completion does not arrive
    proxy.swallow_request(COMPLETE, 1000)
    calling = asyncio.create_task(complete(owner.gate))
    await eventually(lambda: proxy.faults_left < 1000)
    calling.cancel()
    with suppress(asyncio.CancelledError):
        await calling
    assert calling.cancelled()
    # Then it still holds the key, until the completion that goes on without it arrives
    await outlast_leases("a")
    proxy.heal()
    await eventually(lambda: gate.inspect("a", scope="pay").state == "done")
    check_done_once(gate, owner, "a", None if complete is leave_block else "paid")
    # And nothing renews it any more
    await eventually(lambda: not owner.gate.context.heartbeat._renewals)


SHORT = {"lease": "1500ms", "scope": "pay"}


async def end_function(owner: Any) -> None:
    @owner.once(key="{order}", **SHORT)
    def pay(order: str) -> str:
        return "paid"

    assert await pay("a") == "paid"
    assert owner.gate.counters["once.completed"] == 1
    assert owner.gate.counters["once.completion_lost"] == 0


async def end_block(owner: Any) -> None:
    async with owner.inside("a", **SHORT):
        pass


async def end_claim(owner: Any) -> None:
    async with owner.inside("a", **SHORT) as claim:
        assert await claim.complete("paid")


async def end_batch(owner: Any) -> None:
    claims = await owner.claim_many(["a", "b"], **SHORT)
    assert await owner.complete_many([(claim, "paid") for claim in claims]) == [True, True]


async def end_batch_of_one(owner: Any) -> None:
    claims = await owner.claim_many(["a"], **SHORT)
    assert await owner.complete_many([(claims[0], "paid")]) == [True]


@pytest.mark.parametrize("end", [end_function, end_block, end_claim, end_batch, end_batch_of_one])
async def test_one_try_of_a_completion_takes_a_third_of_the_lease_at_most(
    gate: Gate, face: Any, proxy: Proxy, namespace: str, end: Any
) -> None:
    # Given a gate that gives up after two seconds, as long as one silent connection may take
    made = Gate(proxy.url, namespace=namespace, timeout="2s")
    # When the first try of a completion is not answered
    proxy.swallow_request(COMPLETE)
    await end(type(face)(made, face.awaiting))
    # Then another one was made in time
    assert gate.inspect("a", scope="pay").state == "done"
    assert not [name for name in dict(made.counters) if "lost" in name or ".un" in name]
    await made.aio.close()
    made.close()


@pytest.mark.parametrize("keys", [["a"], ["a", "b"]])
async def test_a_renewal_without_a_reply_is_sent_again_before_the_lease_ends(
    owner: Any, proxy: Proxy, keys: list[str]
) -> None:
    renew, renewals = script("guard/renew").sha, owner.gate.context.heartbeat._renewals

    async def count_losses() -> int:
        """Return how many leases were lost although only one renewal was not answered."""
        before = owner.gate.counters["once.lease_lost"]
        async with owner.gate.aio.claim_many(keys, **LEASE) as claims:
            proxy.swallow_request(renew)
            await eventually(lambda: not proxy.faults_left)
            sent = {heartbeat: heartbeat.last for one in tuple(renewals) if (heartbeat := one())}
            await eventually(
                lambda: (
                    any(claim.lease_lost for claim in claims)
                    or all(heartbeat.last > last for heartbeat, last in sent.items())
                )
            )
        return owner.gate.counters["once.lease_lost"] - before

    # Then no lease is lost; a busy machine may lose one of several
    assert 0 in [await count_losses() for _ in range(4)]


async def test_a_renewal_without_a_reply_delays_no_shorter_lease(
    gate: Gate, proxy: Proxy, clock: Clock, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a long lease and a short one, renewed over a connection that may be silent for longer than this test takes
    monkeypatch.setattr(sync, "SOCKET_TIMEOUT", 60.0)
    renew, owner = script("guard/renew").sha, Gate(proxy.url, namespace=namespace, clock=clock)
    owner.context.heartbeat._open_link = lambda: sync.SyncLink(owner.context.endpoint, seconds=60)
    renewals = owner.context.heartbeat._renewals
    with owner, owner.claim("long", lease="1h", scope="pay"):
        [long] = [renewal for one in tuple(renewals) if (renewal := one())]
        with owner.claim("a", **LEASE):
            [short] = [renewal for one in tuple(renewals) if (renewal := one()) is not long]
            before = short.last
            await eventually(lambda: short.last > before)
            # When the renewal of the long one is not answered
            proxy.swallow_request(renew)
            owner.context.heartbeat.hasten(long)
            await eventually(lambda: not proxy.faults_left)
            # Then the short one is renewed in time
            for _ in range(4):
                clock.advance("500ms")
                await eventually(lambda: (gate.inspect("a", scope="pay").lease_left or 0) > 0.75)


async def test_a_lease_that_cannot_be_renewed_while_its_completion_waits_is_counted_once(
    gate: Gate, owner: Any, proxy: Proxy, clock: Clock
) -> None:
    renew = script("guard/renew").sha

    @owner.once(key="{order}", **LEASE)
    def pay(order: str) -> str:
        return "paid"

    # Given an owner that neither completes nor renews, since the whole store is out of its reach
    proxy.swallow_request(COMPLETE, 1000)
    proxy.swallow_request(renew, 1000)
    calling = asyncio.ensure_future(pay("a"))
    await eventually(lambda: proxy.faults_left < 2000)
    # When its lease ends, and another caller runs the work
    clock.advance("10s")
    with gate.claim("a", **LEASE) as claim:
        assert (claim.state, claim.taken_over) == ("started", 1)
    proxy.heal()
    # Then the owner returns its result, and its loss is counted
    assert await calling == "paid"
    assert owner.gate.counters["once.lost"] == 1
    assert owner.gate.counters["once.lease_lost"] == 0
