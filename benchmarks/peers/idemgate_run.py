"""idemgate's guard of a consumer: `gate.guard(...).run`, which returns a verdict, sync and async."""

from __future__ import annotations

from collections.abc import Awaitable

from benchmarks.peers.guarding import awaiting, blocking
from benchmarks.peers.speak import RESULT, main, url
from idemgate import Gate, Verdict

gate = Gate(url(), namespace="bench-run")
sync, aio = gate.guard("sync"), gate.guard("async").aio


def handle(key: str) -> str:
    return RESULT


async def ahandle(key: str) -> str:
    return RESULT


def run(key: str) -> Verdict[str]:
    return sync.run(key, handle, key)


def arun(key: str) -> Awaitable[Verdict[str]]:
    return aio.run(key, ahandle, key)  # without a coroutine of its own, which the decorator's row has not either


if __name__ == "__main__":
    main(**blocking(run), **awaiting(arun))
