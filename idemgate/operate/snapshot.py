"""Take a snapshot of a namespace: what its servers, its topics and its processes say at a moment.

It takes a few round trips, however much is stored. No key is searched for: the keys of a snapshot are those that
processes reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

from idemgate.audit.running import limit_of
from idemgate.audit.server import Seen
from idemgate.audit.snapshot import (
    DeadSeen,
    FailingCall,
    FailingMessage,
    HeldKey,
    KnownVersion,
    Snapshot,
    TopicSeen,
)
from idemgate.core.calls import Batch, Call, run_plan
from idemgate.core.keys import record
from idemgate.errors import DecodeError, UnexpectedData
from idemgate.gate import Gate
from idemgate.guard.claim_calls import Claims
from idemgate.operate.servers import read_server
from idemgate.presence.calls import EXPIRES, read_processes
from idemgate.presence.report import Process, WorkFailure
from idemgate.store.nodes import servers
from idemgate.topics.dead_letters import DeadFilter, DeadPage
from idemgate.topics.messages import Peek, moment
from idemgate.topics.registry import RegistryEntry, StoredTopic, list_entries, read_topics
from idemgate.topics.topic_calls import TopicCalls

__all__ = ["take_snapshot"]

T = TypeVar("T")
U = TypeVar("U")
MOST_KEYS = 20
"""The most keys of each kind that are looked up."""
MOST_CALLS = 400
"""The most calls that look for failing messages: one for each slot of the topic."""
MOST_LETTERS = 5
"""The most dead letters of a slot."""


def take_snapshot(gate: Gate, before: Snapshot | None = None) -> Snapshot:
    """Return a snapshot. It writes nothing. What is damaged is left out and counted, so that the rest can be seen.

    Args:
        gate: a gate of the namespace.
        before: an earlier snapshot of it. Reports in it that are still the last ones of their processes are not read
            again.

    Raises:
        StoreError: the store failed.
        DecodeError: the list of topics is damaged.
    """
    return _Taking(gate).take(before)


class _Taking:
    def __init__(self, gate: Gate) -> None:
        self._context = gate.context
        self._link = gate.context.link
        self._unreadable = 0
        self._claims = Claims(gate.namespace, gate.context.clock)
        self._calls: dict[str, TopicCalls] = {}

    def take(self, before: Snapshot | None) -> Snapshot:
        context = self._context
        now_ms, entries = self._link.run(_list_at(list_entries(context.namespace, context.clock)))
        stored = self._read(entries, lambda part: read_topics(context, [*part]))
        self._calls = {
            one.name: TopicCalls(context.namespace, one.name, one.policy, context.codec, context.clock)
            for one in stored
        }
        last = moment(now_ms) - timedelta(seconds=EXPIRES)
        known = [one for one in before.processes if one.seen_at > last] if before else []
        processes, damaged = run_plan(read_processes(context.namespace, context.clock, known), self._link.run_all)
        topics = tuple(map(_see_topic, stored))
        return Snapshot(
            context.namespace,
            moment(now_ms),
            self._read_servers(),
            self._add_dead(topics, now_ms),
            tuple(processes),
            self._find_held(processes),
            self._find_failing(processes),
            self._find_versions(processes),
            failing_calls=self._find_failing_calls(processes),
            unreadable=self._unreadable + damaged,
        )

    def _read(self, items: Sequence[T], build: Callable[[Sequence[T]], Batch[list[U]]]) -> list[U]:
        """Read items together. If one is damaged, read each of them alone, and leave out and count what is damaged."""
        if not items:
            return []
        try:
            return self._link.run_all(build(items))
        except (DecodeError, UnexpectedData):
            if len(items) == 1:
                self._unreadable += 1
                return []
        return [found for item in items for found in self._read([item], build)]

    def _read_servers(self) -> dict[str, Seen]:
        clustered = self._context.endpoint.kind == "cluster"
        with servers(self._context.endpoint) as found:
            return {
                one.name: read_server(one, in_cluster=clustered, watch_clock=0).reduce() for one in found
            }  # fmt: skip

    # -- topics -------------------------------------------------------------------------------------------------------

    def _add_dead(self, topics: tuple[TopicSeen, ...], now_ms: int) -> tuple[TopicSeen, ...]:
        """Return the topics with their newest dead letters."""
        lately = DeadFilter(since=now_ms - round(limit_of("dead-letters") * 1000))

        def build(part: Sequence[tuple[str, int]]) -> Batch[list[tuple[str, list[DeadSeen]]]]:
            calls = [self._calls[name].dead(slot, lately, MOST_LETTERS) for name, slot in part]
            return Batch(calls, lambda pages: [(name, _see(page)) for (name, _), page in zip(part, pages, strict=True)])

        asked = [(one.name, slot) for one in topics if one.stats.dead for slot in range(one.slots)]
        found: dict[str, list[DeadSeen]] = {}
        for name, letters in self._read(asked, build):
            found.setdefault(name, []).extend(letters)
        return tuple(replace(one, letters=tuple(found.get(one.name, ()))) for one in topics)

    def _find_failing(self, processes: Sequence[Process]) -> tuple[FailingMessage, ...]:
        """Return the pending messages among those that failed often and are tried again."""
        failures: dict[tuple[str, str], WorkFailure] = {}
        room, known = MOST_CALLS, set[tuple[str, str]]()
        for one in _newest(processes):
            often = one.next_at is not None and (one.attempt or 0) >= limit_of("poison-message")
            if not often or one.of not in self._calls or (one.of, one.key) in known:
                continue
            known.add((one.of, one.key))
            # No message is at fault for an error of the store, and a buried one would have to be brought back.
            if not one.of_store:
                room -= self._calls[one.of].policy.slots
                if room < 0 or len(failures) == MOST_KEYS:
                    break
                failures[one.of, one.key] = one

        def build(part: Sequence[tuple[str, str]]) -> Batch[list[FailingMessage]]:
            batches = [self._calls[name].find(key) for name, key in part]

            def join(answers: list[Any]) -> list[FailingMessage]:
                rest, found = iter(answers), list[FailingMessage]()
                for (name, key), batch in zip(part, batches, strict=True):
                    for seen in batch.join([next(rest) for _ in batch.calls]):
                        found += _failing(name, key, seen, failures[name, key].error)
                return found

            return Batch([call for batch in batches for call in batch.calls], join)

        return tuple(self._read([*failures], build))

    def _find_versions(self, processes: Sequence[Process]) -> tuple[KnownVersion, ...]:
        """Return the stored versions of the keys of which triggers were dropped."""
        asked = dict.fromkeys(key for one in processes for key in one.outdated if key[0] in self._calls)

        def build(part: Sequence[tuple[str, str, str]]) -> Batch[list[KnownVersion]]:
            calls = [self._calls[name].versions(key, group or None) for name, key, group in part]
            return Batch(
                calls,
                lambda found: [KnownVersion(*one, seen.version) for one, seen in zip(part, found, strict=True) if seen],
            )

        return tuple(self._read([*asked][:MOST_KEYS], build))

    # -- keys ---------------------------------------------------------------------------------------------------------

    def _find_held(self, processes: Sequence[Process]) -> tuple[HeldKey, ...]:
        """Return the keys that still wait for a decision, among those that processes found held."""
        namespace, claims = self._context.namespace, self._claims
        asked = dict.fromkeys(key for one in processes for key in one.held)

        def build(part: Sequence[tuple[str, str]]) -> Batch[list[HeldKey]]:
            calls = [claims.inspect((record(namespace, scope, key),)) for scope, key in part]
            return Batch(
                calls,
                lambda found: [
                    HeldKey(*one, seen.since, seen.attempts)
                    for one, seen in zip(part, found, strict=True) if seen.state == "held"
                ],
            )  # fmt: skip

        return tuple(self._read([*asked][:MOST_KEYS], build))

    def _find_failing_calls(self, processes: Sequence[Process]) -> tuple[FailingCall, ...]:
        """Return the guarded keys that failed often and are not done. A scope with the name of a topic is taken for it.

        The newest failure of a key decides.
        """
        claims, failures = self._claims, dict[tuple[str, str], WorkFailure]()
        for one in _newest(processes):
            if one.of not in self._calls:
                failures.setdefault((one.of, one.key), one)
        often = [
            one for one in failures.values()
            if one.next_at is not None and (one.attempt or 0) >= limit_of("poison-message") and not one.of_store
        ]  # fmt: skip

        def build(part: Sequence[WorkFailure]) -> Batch[list[FailingCall]]:
            calls = [claims.inspect((record(self._context.namespace, one.of, one.key),)) for one in part]
            return Batch(
                calls,
                lambda found: [
                    FailingCall(one.of, one.key, one.attempt or 0, one.at, one.error)
                    for one, seen in zip(part, found, strict=True)
                    if seen.state in ("released", "in_progress", "lapsed")
                ],
            )

        return tuple(self._read(often[:MOST_KEYS], build))


def _list_at(listing: Call[list[RegistryEntry]]) -> Call[tuple[int, list[RegistryEntry]]]:
    """Build the call that also returns the time of the server, in ms."""
    return Call(listing.script, listing.keys, listing.args, lambda reply: (reply[1], listing.read(reply)))


def _see_topic(stored: StoredTopic) -> TopicSeen:
    policy = stored.policy
    rate = None if policy.rate is None else float(policy.rate)
    return TopicSeen(stored.name, stored.slots, stored.changing_to, stored.stats, policy.concurrency, rate)


def _see(page: Any) -> list[DeadSeen]:
    """Return the letters of a page; none if the slot moved meanwhile."""
    letters = page.letters if isinstance(page, DeadPage) else []
    return [DeadSeen(one.key, one.reason, one.died_at, one.attempts) for one in letters]


def _failing(topic: str, key: str, seen: Peek, error: str) -> list[FailingMessage]:
    if seen.pending is None:
        return []
    return [FailingMessage(topic, key, seen.pending.group, seen.pending.attempts, seen.due_at, error)]


def _newest(processes: Sequence[Process]) -> list[WorkFailure]:
    return sorted((one for process in processes for one in process.failures), key=lambda one: one.at, reverse=True)
