"""A server that answers BUSY while a script of another client runs, and LOADING while it reads its data.

Nothing is executed meanwhile, and waiting calls get a reply afterwards.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from idemgate import Gate, StoreUnavailable
from tests.cluster import wait_for
from tests.resilience.servers import DEBUG, Server

KEYS = 2500


@contextmanager
def busy(server: Server) -> Iterator[Callable[[], object]]:
    """Run a script that ends at a signal only."""

    def forever() -> None:
        with redis.Redis(port=server.port) as client, pytest.raises(redis.ResponseError):
            client.eval("while true do end", 0)

    running = threading.Thread(target=forever)
    running.start()
    with redis.Redis(port=server.port) as client:
        try:
            yield client.script_kill
        finally:
            running.join(60)


@contextmanager
def loading(server: Server) -> Iterator[Callable[[], object]]:
    """It comes back, slowly; nobody has to tell it to end."""
    with server.client.pipeline() as many:
        for n in range(KEYS):
            many.set(f"other{n}", bytes(1024))  # so much it reads before it looks at its connections
        many.execute()
    server.client.save()
    server.kill()
    server.options += ("--key-load-delay", "1000", "--loading-process-events-interval-bytes", "1024")
    starting = threading.Thread(target=server.start)
    starting.start()
    try:
        yield lambda: None
    finally:
        starting.join(60)


@pytest.mark.parametrize(
    ("word", "trouble", "awaiting"),
    [
        ("BUSY", busy, False),
        ("BUSY", busy, True),
        pytest.param(
            "LOADING",
            loading,
            True,
            marks=pytest.mark.skipif(not DEBUG, reason="it loads too fast"),
        ),
    ],
)
async def test_nothing_is_done_meanwhile_and_who_waits_is_answered(
    tmp_path: Path,
    namespace: str,
    word: str,
    trouble: Any,
    awaiting: bool,
    sound: Callable[[Gate], None],
    record_fault: Callable[..., None],
) -> None:
    with Server(tmp_path / "data", "--lua-time-limit", "50", "--rdbcompression", "no") as server:
        patient = Gate(server.url, namespace=namespace, timeout="60s")
        assert await first(patient, awaiting, "before")
        # (Of a connection that breaks, nobody knows: it has none before.)
        gate = Gate(server.url, namespace=namespace, timeout="800ms")
        # Given a server in that state
        with trouble(server) as end:
            await asyncio.to_thread(wait_for, lambda: says(server, word))
            # When a call has a short timeout, then it certainly was not executed
            with pytest.raises(StoreUnavailable, match=word) as refused:
                await first(gate, awaiting, "meanwhile")
            assert refused.value.executed == "no"
            # And when a call waits, and the script ends
            waiting = [asyncio.create_task(first(patient, awaiting, key)) for key in ("before", "meanwhile")]
            await asyncio.sleep(0.02)
            assert not any(one.done() for one in waiting)
            await asyncio.to_thread(end)
            # Then he is answered: what was done is done, and what was refused was not
            assert await asyncio.gather(*waiting) == [False, True]
        for one in (gate, patient):
            await one.aio.close()
            one.close()
        sound(gate)
    record_fault(f"server answers {word}", 1, promises="P2 P6", done=0)


def says(server: Server, word: str) -> bool:
    with redis.Redis(port=server.port, retry=Retry(NoBackoff(), 0)) as client:
        try:
            client.ping()
        except redis.exceptions.BusyLoadingError:
            return word == "LOADING"
        except redis.exceptions.ResponseError as error:
            return str(error).startswith(word)
    return False


async def first(gate: Gate, awaiting: bool, key: str) -> bool:
    return await (gate.aio.first(key, "1h") if awaiting else asyncio.to_thread(gate.first, key, "1h"))
