"""When a worker asks a slot: its own server's clock, and a poll that waking does not put off."""

from __future__ import annotations

from time import monotonic
from typing import NamedTuple

import pytest

from idemgate import Gate
from idemgate.worker import poller as module
from idemgate.worker.poller import POLL, Poller


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
