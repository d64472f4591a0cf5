"""Which topics a store holds, as it tells by itself: for those who did not write the program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from idemgate.core import keys
from idemgate.core.calls import Batch, Call, call, text
from idemgate.core.clock import Clock, stamp
from idemgate.core.codec import Codec
from idemgate.store.context import Context
from idemgate.topics.calls import TopicCalls
from idemgate.topics.messages import Stats
from idemgate.topics.policy import DEFAULT, Policy, from_stored

__all__ = ["Entry", "StoredTopic", "depths", "entries", "registered", "stored_topics", "stored_topics_async"]


@dataclass(frozen=True, slots=True)
class StoredTopic:
    """A topic as the store knows it. `policy` holds what is stored; what each program says for itself (lease, attempts,
    backoff, retention) is what it says by saying nothing. `changing_to`: how many slots it is being given, 0 if it is
    being forgotten, None if neither. `stats`: how much is where, and the counters."""

    name: str
    policy: Policy
    changing_to: int | None
    stats: Stats

    @property
    def slots(self) -> int:
        return self.policy.slots


@dataclass(frozen=True, slots=True)
class Entry:
    """A topic of the registry. `was`: numbers of slots that it had before."""

    name: str
    policy: bytes
    to: int
    was: tuple[int, ...]


def entries(namespace: str, clock: Clock | None) -> Call[list[Entry]]:
    """By name."""

    def read(reply: list[Any]) -> list[Entry]:
        return [
            Entry(text(reply[at]), reply[at + 1], reply[at + 2], tuple(map(int, reply[at + 3].split())))
            for at in range(2, len(reply), 4)
        ]

    return call("topics/registry", (keys.topics(namespace),), (stamp(clock),), read)


def registered(namespace: str, clock: Clock | None, name: str) -> Call[Entry | None]:
    """A topic by its name."""
    found = entries(namespace, clock)
    return Call(
        found.script,
        found.keys,
        found.args,
        lambda reply: next((one for one in found.read(reply) if one.name == name), None),
    )


def depths(
    namespace: str, clock: Clock | None, codec: Codec, plain: Policy, found: list[Entry]
) -> Batch[list[StoredTopic]]:
    """One script call a slot, all topics together."""
    policies = [from_stored(one.policy, plain) for one in found]
    batches = [
        TopicCalls(namespace, one.name, policy, codec, clock).depth(one.to)
        for one, policy in zip(found, policies, strict=True)
    ]

    def join(answers: list[Any]) -> list[StoredTopic]:
        rest, topics = iter(answers), list[StoredTopic]()
        for one, policy, batch in zip(found, policies, batches, strict=True):
            stats = batch.join([next(rest) for _ in batch.calls])
            topics.append(StoredTopic(one.name, policy, None if one.to < 0 else one.to, stats))
        return topics

    return Batch([made for batch in batches for made in batch.calls], join)


def stored_topics(context: Context) -> list[StoredTopic]:
    """Return every topic that the store holds in this namespace, by name. Two round trips; nothing is written."""
    link = context.link
    return link.run_all(_depths_of(context, link.run(entries(context.namespace, context.clock))))


async def stored_topics_async(context: Context) -> list[StoredTopic]:
    """Return every topic that the store holds in this namespace, awaiting."""
    link = context.aio_link
    return await link.run_all(_depths_of(context, await link.run(entries(context.namespace, context.clock))))


def _depths_of(context: Context, found: list[Entry]) -> Batch[list[StoredTopic]]:
    return depths(context.namespace, context.clock, context.codec, DEFAULT, found)
