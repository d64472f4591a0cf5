"""idemgate's guard of a consumer: `gate.guard(...).run`, which returns a verdict, sync and async."""

from __future__ import annotations

from benchmarks.peers.guarding import awaiting, blocking
from benchmarks.peers.speak import RESULT, main, url
from idemgate import Gate

gate = Gate(url(), namespace="bench-run")
sync, aio = gate.guard("sync"), gate.guard("async").aio


def handle(key: str) -> str:
    return RESULT


async def ahandle(key: str) -> str:
    return RESULT


def run(key: str) -> str | None:
    return sync.run(key, handle, key).value


async def arun(key: str) -> str | None:
    return (await aio.run(key, ahandle, key)).value


if __name__ == "__main__":
    main(**blocking(run), **awaiting(arun))
