"""idempotency-kit: its coordinator with the Redis repository. It awaits only; as a sync caller it is one task."""

from __future__ import annotations

import logging

from idempotency_kit import AsyncIdempotencyCoordinator
from idempotency_kit.core import adapters
from idempotency_kit.core.services.domain import IdempotencyDomainService
from idempotency_kit.infra.storage.redis.aio import RedisAsyncIdempotencyRepository
from redis.asyncio import Redis

from benchmarks.peers.guarding import awaiting
from benchmarks.peers.speak import RESULT, main, url


async def work() -> str:
    return RESULT


def steps() -> None:
    logging.disable(logging.INFO)
    repository = RedisAsyncIdempotencyRepository(Redis.from_url(url(), max_connections=500))
    coordinator = AsyncIdempotencyCoordinator(repository, IdempotencyDomainService())
    adapter = adapters.JsonResultAdapter()

    async def guarded(key: str) -> object:
        return await coordinator.coordinate("bench", key, 86_400, adapter, work)

    main(**awaiting(guarded))


if __name__ == "__main__":
    steps()
