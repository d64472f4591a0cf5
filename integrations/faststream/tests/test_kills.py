"""kill -9 of a consumer between its effect, its reply and its acknowledgement."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import nats
import pytest
import redis

from tests.for_each import for_each
from tests.waiting import eventually

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
@for_each(
    ("when", "effects", "replies"),
    [
        ("effect", 2, 1),  # before its completion: only the database of the effect could tell
        ("reply", 1, 1),
        ("acknowledgement", 1, 2),
    ],
)
async def test_a_killed_consumer_repeats_what_was_not_recorded(
    when: str, effects: int, replies: int, store: str, namespace: str, nats_server: Any
) -> None:
    name = f"{namespace}-{when}"
    client = await nats.connect(nats_server.url)
    jetstream = client.jetstream()
    await jetstream.add_stream(name=name, subjects=[f"{name}.>"])
    await jetstream.publish(f"{name}.orders", b"order 7", headers={"event-id": "e1"})

    def start(when: str) -> subprocess.Popen[bytes]:
        words = [
            sys.executable,
            "-m",
            "integrations.faststream.tests.killed_consumer",
            store,
            name,
            nats_server.url,
            when,
        ]
        return subprocess.Popen(words, stdin=subprocess.PIPE, cwd=ROOT)

    async def is_settled() -> bool:
        info = await jetstream.consumer_info(name, "billing")
        return not info.num_pending and not info.num_ack_pending

    # Given a consumer that is killed
    doomed = start(when)
    assert await asyncio.to_thread(doomed.wait, 240) == -9
    assert not await is_settled()
    # When another one gets the message
    consumer = start("never")
    await eventually(is_settled)
    await asyncio.to_thread(consumer.communicate)
    assert consumer.returncode == 0
    # Then its effect is repeated only if its completion was not recorded, and its reply is published in any case
    invoices = (await jetstream.stream_info(name, subjects_filter=">")).state.subjects[f"{name}.invoices"]
    with redis.Redis.from_url(store) as raw:
        found = raw.lrange(f"{name}-effects", 0, -1)
    assert (len(found), invoices) == (effects, replies)
    await jetstream.delete_stream(name)
    await client.close()
    doomed.stdin.close()  # type: ignore[union-attr]
