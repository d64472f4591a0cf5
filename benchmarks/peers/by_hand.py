"""What people write by hand with redis-py: SET NX, then SET of the result; a duplicate gets it by SET NX and GET."""

from __future__ import annotations

from collections.abc import Callable

import redis
import redis.asyncio

from benchmarks.peers.guarding import awaiting, blocking
from benchmarks.peers.speak import RESULT, Answer, main, timed, url

LEASE, KEPT = 30_000, 86_400_000


def steps(client: redis.Redis) -> None:
    def guarded(key: str) -> object:
        if client.set(key, "running", nx=True, px=LEASE):
            client.set(key, RESULT, px=KEPT)
            return RESULT
        return client.get(key)

    aclient = redis.asyncio.Redis.from_url(url(), max_connections=500)

    async def aguarded(key: str) -> object:
        if await aclient.set(key, "running", nx=True, px=LEASE):
            await aclient.set(key, RESULT, px=KEPT)
            return RESULT
        return await aclient.get(key)

    def first_many(tag: str, n: int, batch: int) -> Answer:
        return batches(tag, n, batch, lambda keys: marked(client, keys))

    def claim_many(tag: str, n: int, batch: int) -> Answer:
        return batches(tag, n, batch, lambda keys: completed(client, keys))

    main(**blocking(guarded), **awaiting(aguarded), first_many=first_many, claim_many=claim_many)


def batches(tag: str, n: int, batch: int, work: Callable[[list[str]], object]) -> Answer:
    with timed(n) as answer:
        for start in range(0, n, batch):
            work([f"{tag}:{number}" for number in range(start, start + batch)])
    return answer


def marked(client: redis.Redis, keys: list[str]) -> None:
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.set(key, "1", nx=True, px=KEPT)
    pipeline.execute()


def completed(client: redis.Redis, keys: list[str]) -> None:
    pipeline = client.pipeline(transaction=False)
    for key in keys:
        pipeline.set(key, "running", nx=True, px=LEASE)
    for key, mine in zip(keys, pipeline.execute(), strict=True):
        if mine:
            pipeline.set(key, RESULT, px=KEPT)
    pipeline.execute()


if __name__ == "__main__":
    steps(redis.Redis.from_url(url()))
