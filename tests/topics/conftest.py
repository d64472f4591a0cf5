"""What the tests of topics share: times as seconds after the start, and the whole namespace as bytes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import pytest

from idemgate.testing import Clock


def scripts_run(raw: Any) -> int:
    """Return how many scripts the server has run. A request for one that it did not know yet has run none."""
    found = raw.info("commandstats")
    counts = [found[name] for name in ("cmdstat_evalsha", "cmdstat_eval") if name in found]
    return sum(one["calls"] - one["failed_calls"] for one in counts)


@pytest.fixture
def at(clock: Clock) -> Callable[[float], datetime]:
    """`at(60)`: the moment a minute after the start of the test."""
    start = clock.now()
    return lambda seconds: start + timedelta(seconds=seconds)


@pytest.fixture
def everything(raw: Any, namespace: str) -> Callable[[], dict[bytes, Any]]:
    """Every key of this test's namespace, with its DUMP; a hash as its fields, whose order changes while it grows."""

    def dumped() -> dict[bytes, Any]:
        found = sorted(raw.scan_iter(match=f"ig2:{{{namespace}:*", count=1000))
        with raw.pipeline(transaction=False) as read:
            for key in found:
                read.dump(key)
                read.hgetall(key)
            replies = iter(read.execute(raise_on_error=False))
        return {
            key: fields if isinstance(fields, dict) else dump
            for key, dump, fields in zip(found, replies, replies, strict=True)
        }

    return dumped


@pytest.fixture
def conserved() -> Callable[[Any], Any]:
    """Checks the identity that `Stats` promises: every accepted trigger is accounted for, in exactly one place."""

    async def check(topic: Any, keys: list[str]) -> None:
        stats = await topic.stats()
        held = 0
        for key in keys:
            seen = await topic.peek(key)
            held += sum(message.count for message in (seen.pending, seen.in_flight) if message)
        held += sum(letter.count for letter in await topic.dead.list(100_000))
        gone = sum(stats[f"{end}_triggers"] for end in ("acked", "cancelled", "deleted", "expired", "forwarded"))
        assert stats["accepted"] == gone + held, (dict(stats.counters), held)

    return check
