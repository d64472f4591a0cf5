"""When a worker asks a slot: its own server's clock, and a poll that waking does not put off."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any, NamedTuple

import pytest

from idemgate import Gate
from idemgate.store.pubsub import Subscription
from idemgate.testing.proxy import Proxy
from idemgate.worker import poller as module
from idemgate.worker.poller import IDLE_POLL, POLL, Poller


class Told(NamedTuple):
    now_ms: int
    next_due_ms: int = 0


async def test_each_slot_goes_by_the_clock_of_its_own_server(url: str, namespace: str) -> None:
    # Given two slots whose servers' clocks are minutes apart
    gate = Gate(url, namespace=namespace)
    due = Poller(gate.topic("t", slots=2))
    await due.open()
    for slot, now_ms in ((0, 10**12), (1, 10**12 + 400_000), (0, 10**12)):
        due.record_reply(slot, Told(now_ms), monotonic())
    # Then neither goes by that of the other
    assert due.now(1) - due.now(0) == pytest.approx(400_000, abs=60_000)
    await due.close()
    await gate.aio.close()


async def test_who_is_woken_looks_at_all_slots_a_poll_after_the_last_look(
    url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an empty topic, which was asked, and a wake-up nine tenths of a poll after the last look
    gate = Gate(url, namespace=namespace)
    due = Poller(gate.topic("t"))
    calls = await due.topic.aio.open()
    await due.open()
    await due.execute(0, calls.take(0, 1))
    assert 0 < due.pause() <= POLL
    monkeypatch.setattr(module, "monotonic", lambda: monotonic() + 0.9 * POLL)
    # Then it sleeps for no more than what is left of that poll
    assert due.pause() <= 0.1 * POLL
    await due.close()
    await gate.aio.close()


async def test_idle_slots_are_polled_in_turn_while_hints_arrive(
    url: str, namespace: str, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    # Given a topic of 64 empty slots, and a poller that listens to their hints
    now = 1000.0  # whole seconds, so that sums are exact
    monkeypatch.setattr(module, "monotonic", lambda: now)

    async def poll() -> list[int]:
        """Let a second pass and poll the slots that are due."""
        nonlocal now
        now += POLL
        assert due.pause() == 0
        slots = due.due_slots(calls)
        for slot in slots:
            await due.execute(slot, calls.take(slot, 1))
        return slots

    with Proxy(url) as proxy:
        gate = Gate(proxy.url, namespace=namespace)
        due = Poller(gate.topic("t", slots=64))
        await due.open()
        calls = await due.topic.aio.open()
        await due.listen()
        assert len(await poll()) == 64  # hints may have been missed while subscribing
        # When half a minute passes, then each slot is polled, and no more than three in a second
        polled = [await poll() for _ in range(30)]
        assert {len(slots) for slots in polled} == {3}
        assert {slot for slots in polled for slot in slots} == set(range(64))
        # And as soon as the connection that brings the hints is lost, all of them are polled each second
        listening, is_listening = True, Subscription.is_listening.fget
        assert is_listening is not None
        monkeypatch.setattr(Subscription, "is_listening", property(lambda self: listening and is_listening(self)))
        listening = False
        assert [len(await poll()) for _ in range(3)] == [64, 64, 64]
        listening = True
        assert len(await poll()) == 3
        # And after a new connection too, because hints may have been missed
        proxy.cut_all()
        await eventually(lambda: all(at == 0 for at in due._due_at.values()))
        assert due.pause() == 0
        await due.close()
        await gate.aio.close()
        gate.close()


async def test_a_subscription_listens_from_its_confirmation_until_its_connection_is_lost(
    url: str, namespace: str, eventually: Any
) -> None:
    with Proxy(url) as proxy:
        gate = Gate(proxy.url, namespace=namespace)
        subscription = gate.context.aio_link.subscription()
        # Given a server that does not confirm
        assert not subscription.is_listening
        proxy.mute = True
        adding = asyncio.create_task(subscription.add(b"channel", lambda channel, data: None))
        await eventually(lambda: proxy.passed)
        assert not subscription.is_listening
        # When it does
        proxy.mute = False
        proxy.cut_all()
        await adding
        await eventually(lambda: subscription.is_listening)
        # Then it listens, until the connection is lost
        proxy.close()
        await eventually(lambda: not subscription.is_listening)
        await subscription.close()
        await gate.aio.close()
        gate.close()


@pytest.mark.parametrize(("slots", "seconds"), [(1, 1), (8, 8), (64, 22)])
async def test_no_slot_waits_longer_for_a_poll_than_the_documented_bound(
    url: str, namespace: str, monkeypatch: pytest.MonkeyPatch, slots: int, seconds: int
) -> None:
    now = float(int(monotonic()))  # whole seconds: sums of others are rounded
    monkeypatch.setattr(module, "monotonic", lambda: now)
    gate = Gate(url, namespace=namespace)
    due = Poller(gate.topic("t", slots=slots))
    await due.open()
    calls = await due.topic.aio.open()
    await due.listen()
    last = dict.fromkeys(range(slots), 0)
    for second in range(1, 4 * int(IDLE_POLL)):
        now += POLL
        due.pause()
        for slot in due.due_slots(calls):
            assert second - last[slot] <= seconds
            last[slot] = second
            due._due_at[slot] = float("inf")
    assert min(last.values()) >= 4 * int(IDLE_POLL) - 1 - seconds
    await due.close()
    await gate.aio.close()
    gate.close()
