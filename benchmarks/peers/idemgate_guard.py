"""idemgate's guard: the decorator, sync and async, `first_many` and `claim_many`."""

from __future__ import annotations

from benchmarks.peers.guarding import awaiting, blocking
from benchmarks.peers.speak import RESULT, Answer, main, timed, url
from idemgate import Gate

gate = Gate(url(), namespace="bench")


@gate.once(key="{key}", scope="sync")
def guarded(key: str) -> str:
    return RESULT


@gate.once(key="{key}", scope="async")
async def aguarded(key: str) -> str:
    return RESULT


@gate.once(key="{key}", scope="known", cache_size=100_000)
def remembered(key: str) -> str:
    return RESULT


def first_many(tag: str, n: int, batch: int) -> Answer:
    with timed(n) as answer:
        for start in range(0, n, batch):
            gate.first_many([f"{tag}:{number}" for number in range(start, start + batch)], "24h")
    return answer


def claim_many(tag: str, n: int, batch: int) -> Answer:
    with timed(n) as answer:
        for start in range(0, n, batch):
            with gate.claim_many([f"{tag}:{number}" for number in range(start, start + batch)]) as claims:
                gate.complete_many([(claim, RESULT) for claim in claims if claim.started])
    return answer


def known(tag: str, n: int) -> Answer:
    """Keys that this process knows to be done; how they came to be known is not timed."""
    some = [f"{tag}:{number}" for number in range(100)]
    for key in some:
        remembered(key)
    with timed(n) as answer:
        for number in range(n):
            remembered(some[number % 100])
    return answer


if __name__ == "__main__":
    main(**blocking(guarded), **awaiting(aguarded), first_many=first_many, claim_many=claim_many, known=known)
