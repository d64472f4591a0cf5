"""redis-py's own lock around GET and SET: a duplicate needs the GET only."""

from __future__ import annotations

import redis
import redis.asyncio

from benchmarks.peers.guarding import awaiting, blocking
from benchmarks.peers.speak import RESULT, main, url

KEPT = 86_400_000


def steps(client: redis.Redis) -> None:
    def guarded(key: str) -> object:
        if (known := client.get(key)) is not None:
            return known
        with client.lock(f"{key}:lock", timeout=30):
            if (known := client.get(key)) is None:
                client.set(key, known := RESULT, px=KEPT)
            return known

    aclient = redis.asyncio.Redis.from_url(url(), max_connections=500)

    async def aguarded(key: str) -> object:
        if (known := await aclient.get(key)) is not None:
            return known
        async with aclient.lock(f"{key}:lock", timeout=30):
            if (known := await aclient.get(key)) is None:
                await aclient.set(key, known := RESULT, px=KEPT)
            return known

    main(**blocking(guarded), **awaiting(aguarded))


if __name__ == "__main__":
    steps(redis.Redis.from_url(url()))
