"""Workers that are processes: time limits, revoked tasks, chords, and pools of threads and greenlets."""

from __future__ import annotations

import asyncio
import importlib.util
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import chord

from idemgate import Gate
from idemgate.testing.contract import SCOPE
from integrations.celery.tests.test_contract import VISIBILITY, CeleryTransport
from tests.waiting import eventually

pytestmark = pytest.mark.slow  # two seconds of processor time for each worker
HANG = 600


@pytest.fixture
def make_transport(gate: Gate, store: str, broker: str, tmp_path: Path) -> Iterator[Callable[..., CeleryTransport]]:
    made: list[CeleryTransport] = []

    def make(pool: str = "prefork") -> CeleryTransport:
        made.append(CeleryTransport(gate, store, broker, tmp_path, pool))
        return made[-1]

    yield make
    for transport in made:
        transport.close()


class Handler:
    """A handler that hangs at the first call for a message."""

    def __init__(self, seconds: float = HANG) -> None:
        self.seconds = seconds
        self.calls = Counter[str]()

    async def run(self, message_id: str, body: bytes) -> str:
        self.calls[message_id] += 1
        if self.calls[message_id] == 1:
            await asyncio.sleep(self.seconds)
        return message_id


async def end_of(result: Any) -> str:
    """Return the state of a task that has ended."""
    await eventually(lambda: asyncio.to_thread(result.ready))
    return str(result.state)


async def test_a_soft_time_limit_is_a_failed_attempt(make_transport: Any, gate: Gate) -> None:
    transport, handler = make_transport(), Handler()
    consumer = await transport.start(handler.run)
    result = transport.send("m", soft_time_limit=1)
    assert await end_of(result) == "SUCCESS"
    assert (handler.calls["m"], gate.inspect("m", scope=SCOPE).attempts) == (2, 2)
    await consumer.stop()


async def test_after_a_hard_time_limit_a_copy_runs(make_transport: Any, gate: Gate) -> None:
    transport, handler = make_transport(), Handler()
    consumer = await transport.start(handler.run)
    result = transport.send("m", time_limit=1)
    assert await end_of(result) == "FAILURE"
    assert await end_of(transport.send("m")) == "SUCCESS"
    assert handler.calls["m"] == 2
    await consumer.stop()
    assert await transport.is_empty()


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGKILL"])
async def test_after_a_revoke_that_terminates_a_copy_runs(make_transport: Any, gate: Gate, signal: str) -> None:
    transport, handler = make_transport(), Handler()
    consumer = await transport.start(handler.run)
    result = transport.send("m")
    await eventually(lambda: handler.calls["m"])
    await asyncio.to_thread(result.revoke, terminate=True, signal=signal)
    assert await end_of(result) == "REVOKED"
    # Then SIGTERM releases the key, and SIGKILL leaves it to the end of the lease
    end = "released" if signal == "SIGTERM" else "lapsed"
    await eventually(lambda: gate.inspect("m", scope=SCOPE).state == end, 10)
    assert await end_of(transport.send("m")) == "SUCCESS"
    assert handler.calls["m"] == 2
    await consumer.stop()
    assert await transport.is_empty()


async def test_a_chord_ends_whose_members_run_again_or_are_copies(make_transport: Any, gate: Gate) -> None:
    transport, handler = make_transport(), Handler()
    killed = await transport.start(handler.run)
    members = [transport.app.signature(SCOPE, args=[message_id, ""]) for message_id in "aab"]
    result = chord(members, app=transport.app)(transport.app.signature("count"))
    await eventually(lambda: handler.calls.total() == 2)
    await killed.kill()
    consumer = await transport.start(handler.run)
    assert await end_of(result) == "SUCCESS"
    assert (result.result, handler.calls) == (3, {"a": 2, "b": 2})
    await consumer.stop()


@pytest.mark.parametrize("pool", ["threads", "gevent"])
async def test_other_pools_run_copies_once_and_keep_what_runs(make_transport: Any, gate: Gate, pool: str) -> None:
    if pool == "gevent" and importlib.util.find_spec("gevent") is None:
        pytest.skip("gevent is not installed")
    # Given handlers that take longer than the visibility timeout and the lease
    transport, handler = make_transport(pool), Handler(2 * VISIBILITY)
    consumer = await transport.start(handler.run)
    results = [transport.send(message_id) for message_id in ("a", "b", "c", "a")]
    later = transport.send("d", countdown=2 * VISIBILITY)
    # Then all of them run at once
    await eventually(lambda: handler.calls.total() == 3)
    assert [await end_of(result) for result in (*results, later)] == ["SUCCESS"] * 5
    # And each runs once, and none is delivered again but the copy
    assert handler.calls == dict.fromkeys("abcd", 1)
    assert transport.deliveries["b"] == transport.deliveries["c"] == transport.deliveries["d"] == 1
    await consumer.stop()
    assert await transport.is_empty()
