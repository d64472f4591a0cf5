"""What people write by hand with redis-py: SET NX, then SET of the result; a duplicate gets it by SET NX and GET."""

from __future__ import annotations

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

    def many(tag: str, n: int, batch: int) -> Answer:
        with timed(n) as answer:
            for start in range(0, n, batch):
                pipeline = client.pipeline(transaction=False)
                for number in range(start, start + batch):
                    pipeline.set(f"{tag}:{number}", "1", nx=True, px=KEPT)
                pipeline.execute()
        return answer

    def claim_many(tag: str, n: int, batch: int) -> Answer:
        with timed(n) as answer:
            for start in range(0, n, batch):
                keys = [f"{tag}:{number}" for number in range(start, start + batch)]
                pipeline = client.pipeline(transaction=False)
                for key in keys:
                    pipeline.set(key, "running", nx=True, px=LEASE)
                for key, mine in zip(keys, pipeline.execute(), strict=True):
                    if mine:
                        pipeline.set(key, RESULT, px=KEPT)
                pipeline.execute()
        return answer

    main(**blocking(guarded), **awaiting(aguarded), first_many=many, claim_many=claim_many)


if __name__ == "__main__":
    steps(redis.Redis.from_url(url()))
