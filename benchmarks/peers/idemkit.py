"""idemkit: its decorators for plain functions, blocking and awaiting, keyed by one argument."""

from __future__ import annotations

from idemkit import MethodConfig, RedisBackend, idempotent, idempotent_sync

from benchmarks.peers.guarding import awaiting, blocking
from benchmarks.peers.speak import RESULT, main, url


def steps() -> None:
    config = MethodConfig(key_fields=["key"])

    @idempotent_sync(backend=RedisBackend.from_url(url(), namespace="sync"), config=config)
    def guarded(*, key: str) -> str:
        return RESULT

    @idempotent(backend=RedisBackend.from_url(url(), namespace="async", max_connections=500), config=config)
    async def aguarded(*, key: str) -> str:
        return RESULT

    main(**blocking(lambda key: guarded(key=key)), **awaiting(lambda key: aguarded(key=key)))


if __name__ == "__main__":
    steps()
