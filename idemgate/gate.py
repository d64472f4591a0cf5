"""The gate: one store, one namespace, and everything that can be asked of them. `gate.aio` is the awaiting face of the
same object."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar
from weakref import WeakSet

from idemgate.core.backoff import BackoffPolicy
from idemgate.core.calls import Batch, Call
from idemgate.core.clock import Clock
from idemgate.core.codec import Codec, digest
from idemgate.core.counters import Counters
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.forks import freed_at_fork
from idemgate.core.keys import Key, check_name, text_of
from idemgate.core.numbers import whole
from idemgate.core.tokens import token
from idemgate.core.validation import each
from idemgate.dedup.calls import Kept, SeenSets
from idemgate.dedup.value import Small
from idemgate.errors import AlreadyInProgress, BadInput, NotConfigured
from idemgate.guard.attempt import ErrorPolicy, OnDone, OnInProgress, OnLeaseLoss, OnStoreError, Passage, Seen
from idemgate.guard.batch import AioClaimBatch, ClaimBatch, completing, ended, ended_by, releasing
from idemgate.guard.calls import MANY, Claims, Record
from idemgate.guard.claim import AioClaim, Claim, Claimed
from idemgate.guard.options import decorate, guard_of
from idemgate.store.durability import Asked, durability_of
from idemgate.store.heartbeat import Pulse
from idemgate.topics.adaptive import Adaptive
from idemgate.topics.decorator import Merged, merged
from idemgate.topics.merge import MergeSpec
from idemgate.topics.policy import Edge, Policy, policy_of
from idemgate.topics.rate import Rate
from idemgate.topics.registry import Entry as RegistryEntry
from idemgate.topics.registry import StoredTopic, depths, entries
from idemgate.topics.topic import AioTopic, Topic

if TYPE_CHECKING:
    from tenacity import BaseRetrying

    from idemgate.membership.member import Membership
    from idemgate.store.aio import AsyncLink
    from idemgate.store.endpoint import Endpoint
    from idemgate.store.sync import SyncLink
    from idemgate.subscribers import Entry as StreamEntry
    from idemgate.subscribers import Expiry, Heard, Subscriber, Subscribers
    from idemgate.worker.worker import Worker

__all__ = ["AioGate", "Gate", "default_gate"]

P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V", bound=Small)
OnHeard = TypeVar("OnHeard", bound="Callable[[Heard], object]")
OnEntry = TypeVar("OnEntry", bound="Callable[[StreamEntry], object]")


class Gate:
    """One store and one namespace. Making a gate connects to nothing; the first use does.

    - `url`: redis://, rediss://, unix://, redis+cluster://h1:p,h2:p, redis+sentinel://h1:p,h2:p/service, or
      embedded://[dir]. None: the environment variable IDEMGATE_URL; with neither, the first use raises NotConfigured.
    - `client`: instead of a URL, a redis-py client, sync or async. Its address and credentials are used, not the
      client itself: connections of our own never decode, never retry by themselves, and have time-outs. NotConfigured
      if that cannot be done.
    - `namespace`: first part of every key; one for each trust domain.
    - `timeout`: how long a call is tried while the store does not answer, then StoreUnavailable.
    - `max_bytes`: the largest payload or result.
    - `durability`: what a write must have reached before its call returns: None: the primary's memory; "replicas", or a
      number of them: so many replicas acknowledged it (WAIT); "fsync": it is in the append-only file on disk (WAITAOF:
      Redis 7.2 or Valkey, `appendonly yes`). Else NotDurable, after `timeout`; StoreRefused, and nothing is written,
      where the server can never do it. Not on a cluster. What it gives and what not: docs/promises.md.
    - `connections`: how many connections the awaiting face has to a server (to each node of a cluster), 1 to 64, for
      each event loop. One carries the calls of all tasks. More help where connections are slow and the event loop is
      not: values of 100 kB and more, a server on another machine, several `io-threads`. With small values it is Python
      that is busy, and more connections cost it some 10 %: calls that would have shared a write do not. What one task
      awaits in turn is done in turn; what several tasks ask may be done in any order. Blocking calls have a connection
      for each thread, whatever this says.
    - `clock`: a test clock that every script is told (`idemgate.testing.Clock`).

    Safe to share between threads and event loops; a forked child makes its own connections.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        client: object | None = None,
        namespace: str = "default",
        timeout: Duration = "5s",
        max_bytes: int = 262_144,
        durability: Asked = None,
        connections: int = 1,
        clock: Clock | None = None,
    ) -> None:
        if url is not None and client is not None:
            raise BadInput("client", client, "a URL was given too", "Pass one of url and client")
        self.namespace = check_name(namespace, "namespace")
        self.seconds = milliseconds(timeout, "timeout") / 1000
        self.connections = whole("connections", connections, 1, 64)
        self.clock = clock
        self.durability = durability_of(durability, self.namespace)
        self.codec = Codec(max_bytes)
        self.claims = Claims(namespace, clock)
        self.seen = SeenSets(namespace, clock)
        self.counters = Counters()
        self.topics: dict[str, Topic] = {}
        self.remembered: WeakSet[Seen] = WeakSet()
        self.subscribers: list[Subscriber] = []
        self._given = _given(client, url)
        self._lock = freed_at_fork(self, "_lock")
        self._link: SyncLink | None = None
        self._alink: AsyncLink | None = None
        self.pulse = Pulse(self._heartbeat_link)

    def __repr__(self) -> str:
        return f"<Gate {self.namespace!r} {self._given if self._given is not None else 'IDEMGATE_URL'}>"

    # -- connections --------------------------------------------------------------------------------------------------

    @cached_property
    def endpoint(self) -> Endpoint:
        """Where the store is; starts the embedded server if that is what the URL says."""
        given = self._given if self._given is not None else os.environ.get("IDEMGATE_URL")
        if given is None or given == "":
            raise NotConfigured(
                "no store was named. Pass a URL, Gate('redis://localhost:6379/0'); or set IDEMGATE_URL; "
                "or pass client=; or Gate('embedded://') for a server of this process"
            )
        if not isinstance(given, str):
            return given
        if given.startswith("embedded:"):
            from idemgate.store.embedded.server import shared

            given = shared(given).url
        from idemgate.store.url import of_url

        return of_url(given)

    @property
    def at_once(self) -> int:
        """Records of one script call, at most: on a cluster each lives by itself."""
        return 1 if self.endpoint.kind == "cluster" else MANY

    @property
    def link(self) -> SyncLink:
        """The blocking link: `gate.link.run(call)`."""
        if self._link is None:
            from idemgate.store.sync import SyncLink

            with self._lock:
                self._link = self._link or SyncLink(self.endpoint, self.seconds, self.durability)
        return self._link

    def _heartbeat_link(self) -> SyncLink:
        from idemgate.store.sync import SyncLink

        return SyncLink(self.endpoint, seconds=1.0)

    @cached_property
    def aio(self) -> AioGate:
        """The awaiting face of this gate."""
        return AioGate(self)

    def _async_link(self) -> AsyncLink:
        if self._alink is None:
            from idemgate.store.aio import AsyncLink

            self._alink = AsyncLink(self.endpoint, self.seconds, self.durability, self.connections)
        return self._alink

    def seconds_now(self) -> float:
        """A clock for what this process remembers: the test clock's, or a monotonic one."""
        return monotonic() if self.clock is None else self.clock.microseconds() / 1_000_000

    def close(self) -> None:
        """Ends heartbeats and blocking connections. Those of an event loop are closed by `await gate.aio.close()`."""
        self.pulse.close()
        if self._link is not None:
            self._link.close()
            self._link = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- once ---------------------------------------------------------------------------------------------------------

    def once(
        self,
        key: str | Callable[..., object] | None = None,
        *,
        scope: str | None = None,
        fingerprint: Sequence[str] | Callable[..., object] | None = None,
        retention: Duration = "24h",
        lease: Duration = "30s",
        on_done: OnDone | None = None,
        on_in_progress: OnInProgress = "raise",
        wait: Duration = "30s",
        on_error: ErrorPolicy = "release",
        on_lease_loss: OnLeaseLoss = "retry",
        on_store_error: OnStoreError = "raise",
        max_attempts: int | None = None,
        retry: BaseRetrying | None = None,
        at_most_once: bool = False,
        max_result_bytes: int | None = None,
        remember: int = 0,
        shadow: bool = False,
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Of all calls with the same key, run the first; give the others its result.

        Works on functions, methods, classmethods and staticmethods, sync and async; generator functions are refused.
        Two round trips for a new key, one for a duplicate.

        - `key`: a template over the arguments, "{event[id]}" or "{order.id}"; or a callable that gets the same
          arguments; None: all arguments, which must be storable. Checked now, compiled once.
        - `scope`: keys of one scope are the same work. None: the function's qualified name.
        - `fingerprint`: names of arguments, or a callable: the same key with another fingerprint raises KeyReused.
        - `retention`: how long a done key is remembered.
        - `lease`: how long the right to run holds without a
          heartbeat; renewed while the function runs. Make it three times the longest time that C code may hold the
          GIL.
        - `on_done`: "replay" the result (ResultUnavailable if none was stored), "skip" (return None), "raise"
          AlreadyDone. None: "replay", or "skip" with at_most_once. A model (dataclass, pydantic) is stored as its
          fields, and made again as the function's return annotation says: of a union the first arm that fits them,
          whatever it was (`dict | Order` replays a dict); without an annotation it is replayed as a dict.
        - `on_in_progress`: "raise" AlreadyInProgress (with `retry_after`), "skip" (return None), or "wait" for at
          most `wait`.
        - `on_error`: what a raised exception does: "release" (the next caller may run), "keep" (not before the lease
          ends), "store" (duplicates get ReplayedFailure); or a callable from the exception to one of these.
          Cancellation, KeyboardInterrupt and SystemExit always release.
        - `on_lease_loss`: when an owner vanished, "retry", or "hold": OutcomeUnknown until `gate.resolve`.
        - `on_store_error`: when the store is away, "raise"; "run" unguarded; "local": guarded by this process alone.
          Each is counted.
        - `max_attempts`: starts of a key without success before AttemptsExhausted; None: any number. Counted as long
          as one follows the other within `retention`.
        - `retry`: a tenacity policy for attempts inside one claim.
        - `at_most_once`: mark the key before running, in one round trip: no lease, no result, and no second chance
          after a failure.
        - `max_result_bytes`: larger results are not stored (the key is done all the same); None: the gate's
          `max_bytes`.
        - `remember`: how many done keys this process keeps in memory, to answer without a round trip; 0 = none. A key
          that was forgotten elsewhere is remembered here until it fades.
        - `shadow`: run everything; only count and log what would have been dropped.

        The wrapped function raises what it raises, and AlreadyInProgress, AlreadyDone, KeyReused, ResultUnavailable,
        ReplayedFailure, OutcomeUnknown, AttemptsExhausted, StoreError, and BadInput for arguments that give no key.
        """
        guard = guard_of(
            self.codec, scope, retention, lease, on_done, on_in_progress, wait, on_error, on_lease_loss, on_store_error,
            max_attempts, retry, at_most_once, max_result_bytes, shadow,
        )  # fmt: skip

        def once(func: Callable[P, R]) -> Callable[P, R]:
            return decorate(self, guard, func, key, fingerprint, retry, remember)

        return once

    def _passage(
        self,
        key: Key,
        scope: str,
        lease: Duration,
        retention: Duration,
        fingerprint: object,
        on_lease_loss: OnLeaseLoss,
        max_attempts: int | None,
    ) -> Passage:
        guard = guard_of(
            self.codec, scope, retention, lease, "replay", "wait", "30s", "release", on_lease_loss, "raise",
            max_attempts, None, False, None, False,
        )  # fmt: skip
        return Passage(guard, self.claims, key, b"" if fingerprint is None else digest(fingerprint, name="fingerprint"))

    def claim(
        self,
        key: Key,
        *,
        scope: str = "claim",
        lease: Duration = "30s",
        retention: Duration = "24h",
        fingerprint: object | None = None,
        on_lease_loss: OnLeaseLoss = "retry",
        max_attempts: int | None = None,
    ) -> Claim:
        """Asks once for the right to run `key` and answers at once: see `Claim.state`. One round trip.

        Raises KeyReused, OutcomeUnknown, AttemptsExhausted, StoreError. `scope` is as in `once`: a decorator with the
        same scope guards the same keys.
        """
        return Claim(self, self._passage(key, scope, lease, retention, fingerprint, on_lease_loss, max_attempts)).ask()

    def _passages(
        self,
        keys: Iterable[Key],
        scope: str,
        lease: Duration,
        retention: Duration,
        on_lease_loss: OnLeaseLoss,
        max_attempts: int | None,
    ) -> list[Passage]:
        guard = guard_of(
            self.codec, scope, retention, lease, "replay", "wait", "30s", "release", on_lease_loss, "raise",
            max_attempts, None, False, None, False,
        )  # fmt: skip
        passages: list[Passage] = []
        for key in each(keys, "keys", "Pass a list of keys"):
            try:
                passages.append(Passage(guard, self.claims, key, b""))
            except BadInput as error:
                raise BadInput(f"keys[{len(passages)}]", error.value, error.problem, error.fix) from None
        return passages

    def claim_many(
        self,
        keys: Iterable[Key],
        *,
        scope: str = "claim",
        lease: Duration = "30s",
        retention: Duration = "24h",
        on_lease_loss: OnLeaseLoss = "retry",
        max_attempts: int | None = None,
    ) -> ClaimBatch:
        """`claim` for the keys of a batch: a list of claims in their order, which travel together, one round trip (on a
        cluster one to each node, at the same time; more where what is stored is large). Not atomic as a whole: each
        claim is, and 100 keys are one script call.

        What KeyReused, OutcomeUnknown, AttemptsExhausted or ForeignData says of one key is that claim's `error`; the
        others are as they are. Any other StoreError is raised, and what was granted is given back, if the store can be
        asked; else its leases run out. Of equal keys the first is granted; the others are "in_progress" until it ends.

        Use it as a block, `with gate.claim_many(keys) as claims:`, in which heartbeats keep them: see `ClaimBatch`. End
        them with `complete_many`, or one by one. BadInput names the place of a key that is none; nothing was asked
        then.
        """
        passages = self._passages(keys, scope, lease, retention, on_lease_loss, max_attempts)
        return ClaimBatch(self, [Claim(self, one) for one in passages]).ask()

    def complete_many(
        self, pairs: Iterable[tuple[Claimed, object]], *, retention: Duration | None = None
    ) -> list[bool]:
        """`Claim.complete` for many (claim, result), answers in their order: False for those that were lost. They
        travel together, as in `claim_many`; each is written by itself.

        BadInput if one of the results cannot be stored, or a claim is there twice; nothing is written then, and all are
        still held. After a StoreError some may be done: the same again is answered alike.
        """
        claims, calls = completing(self, pairs, retention)
        return ended(claims, self.link.run_each(calls))

    def release_many(self, claims: Iterable[Claimed]) -> list[bool]:
        """`Claim.release` for many, as `complete_many`."""
        given, calls = releasing(self, claims)
        return ended(given, self.link.run_each(calls))

    def first(self, key: Key, retention: Duration, *, scope: str = "first", compact: bool = False) -> bool:
        """True for the first caller of `key` within `retention`, False for all others. One round trip; nothing is
        stored but the mark.

        `compact`: for many millions of keys, a mark of 20 to 25 bytes instead of a record of some 180. These marks are
        a set of their own: `claim`, `first` without `compact`, `inspect` and `forget` neither see nor change them. A
        new key is taken for a duplicate with a probability of n / 2^69, n = keys marked within `retention`.
        """
        return self.link.run(self.mark(key, retention, scope, compact))

    def first_many(
        self, keys: Iterable[Key], retention: Duration, *, scope: str = "first", compact: bool = False
    ) -> list[bool]:
        """`first` for many keys, answers in their order; they travel together. Of equal keys in one call the first is
        first.

        Not atomic as a whole: 100 keys are one script call; on a cluster each key is.
        """
        return self.link.run_all(self.marks(keys, retention, scope, compact))

    def mark(self, key: Key, retention: Duration, scope: str, compact: bool) -> Call[bool]:
        """The call of `first`."""
        if compact:
            return self.seen.first(scope, key, retention)
        return self.claims.first(self.claims.key(scope, key), milliseconds(retention, "retention"))

    def marks(self, keys: Iterable[Key], retention: Duration, scope: str, compact: bool) -> Batch[list[bool]]:
        """The calls of `first_many`."""
        if compact:
            return self.seen.first_many(scope, keys, retention)
        kept = milliseconds(retention, "retention")
        records = [self.claims.key(scope, key) for key in each(keys, "keys", "Pass a list of keys")]
        if self.at_once == 1:
            return Batch([self.claims.first(record, kept) for record in records], list)
        return self.claims.mark_many(records, kept)

    def keep(self, key: Key, value: V, retention: Duration, *, scope: str = "keep") -> Kept[V]:
        """Keeps a small value for `key`, unless one is kept: the first stays for its `retention`, and every caller is
        told it, and whether it is the `first`, its own. Atomic, one round trip; 40 to 48 bytes a key.

        `value`: text or bytes of at most 16 bytes, a whole number of 128 bits or a UUID; anything else is BadInput.
        What is answered has the type of what was kept: keep one type in a scope, and with one `retention` (of two the
        shorter counts). These values are a set of their own: `claim`, `first`, `inspect` and `forget` neither see nor
        change them. A new key is taken for another one, and gets its value, with a probability of n / 2^69, n = keys
        kept within `retention`.
        """
        return self.link.run(self.seen.keep(scope, key, value, retention))

    def keep_many(self, pairs: Iterable[tuple[Key, V]], retention: Duration, *, scope: str = "keep") -> list[Kept[V]]:
        """`keep` for many (key, value), answers in their order; they travel together. Of equal keys in one call the
        first is first. Not atomic as a whole: each key is."""
        return self.link.run_all(self.seen.keep_many(scope, pairs, retention))

    def kept(self, key: Key, *, scope: str = "keep") -> Small | None:
        """What is kept for `key`; None for nothing. Changes nothing; one round trip."""
        return self.link.run(self.seen.kept(scope, key))

    def inspect(self, key: Key, *, scope: str = "claim") -> Record:
        """What is remembered of a key. Changes nothing."""
        return self.link.run(self.claims.inspect(self.claims.key(scope, key)))

    def _unremembered(self, scope: str, key: Key) -> tuple[bytes, ...]:
        """The record of a key about which somebody decides; what this process remembers of it no longer counts."""
        record = self.claims.key(scope, key)
        for seen in tuple(self.remembered):
            seen.drop(record[0])
        return record

    def forget(self, key: Key, *, scope: str = "claim", force: bool = False) -> bool:
        """Forgets a key, so that its next call is the first. False if nothing was known.

        Raises AlreadyInProgress while an owner's lease holds, unless `force`: then two may run at once.
        """
        record = self._unremembered(scope, key)
        request = token()
        answer = self._decided(record, lambda seen: self.claims.forget(record, request, seen, force))
        return changed(key, "forgotten", answer)

    def _decided(self, record: tuple[bytes, ...], build: Callable[[Record], Call[tuple[str, int]]]) -> tuple[str, int]:
        """The answer to a decision about what is there: made again if that changes between the look and the call."""
        while True:
            answer = self.link.run(build(self.link.run(self.claims.inspect(record))))
            if answer[0] != "changed":
                return answer

    def resolve(
        self,
        key: Key,
        *,
        done: bool,
        result: object = None,
        retention: Duration = "24h",
        scope: str = "claim",
    ) -> bool:
        """Decides about a key whose owner vanished (OutcomeUnknown): it is done, with this result, or it may run again.

        False if there is nothing to decide. Raises AlreadyInProgress while an owner's lease holds.
        """
        record = self._unremembered(scope, key)
        data = self.codec.encode(result, "result")
        request, kept = token(), milliseconds(retention, "retention")
        answer = self._decided(record, lambda seen: self.claims.resolve(record, request, seen, done, kept, b"v", data))
        return changed(key, "ok", answer)

    # -- merge --------------------------------------------------------------------------------------------------------

    def topic(
        self,
        name: str,
        *,
        window: Duration | None = None,
        quiet: Duration | None = None,
        max_delay: Duration | None = None,
        max_size: int | None = None,
        edge: Edge = "trailing",
        merge: MergeSpec = "last",
        slots: int = 1,
        lease: Duration = "30s",
        max_attempts: int = 17,
        backoff: BackoffPolicy = None,
        retention: Duration = "30d",
        max_dead: int = 10_000,
        remember: Duration = "24h",
        priority: bool = False,
        priority_boost: Duration | None = None,
        group_concurrency: int = 1,
        concurrency: int | None = None,
        rate: Rate | None = None,
        burst: int | None = None,
        adaptive: Adaptive | None = None,
        redefine: bool = False,
    ) -> Topic:
        """A named stream of keyed messages with one policy. The same name gives the same topic; its policy is checked
        against the stored one with the first use (PolicyChanged), one round trip.

        - `window`: triggers of a key within this span of the *first* make one delivery, when it ends.
        - `quiet`: one delivery when no trigger came for this span; at the latest `max_delay` after the first, or with
          `max_size` triggers. None of the three: deliver as soon as possible; what is pending still merges.
        - `edge`: "trailing" delivers when the window ends; "leading" delivers the first trigger at once and drops
          (and counts) the others of the window.
        - `merge`: how payloads become one: "last", "first", "append", "union", "count", "sum", "min", "max";
          `append(cap)`, `union(cap)`; or a dict of field -> policy, with "*" for the fields it does not name
          (default: last).
        - `slots`: shards, a power of two, when the topic is made; later `reslot` changes it, and the stored number
          counts wherever this program says one that the topic had before.
        - `lease`: as in `once`, of a delivery.
        - `max_attempts`: deliveries of a message before it becomes a dead letter.
        - `backoff`: pauses between them: a
          list of durations (the last repeats), one duration, a tenacity wait strategy; None: exponential with full
          jitter, 1 s to 10 min.
        - `retention`, `max_dead`: dead letters older than this, or beyond this many in a slot, are discarded when the
          next one is buried, at most 100 at a time, and counted as `expired`.
        - `concurrency`: deliveries in flight at most, over all workers and slots; None: any number.
        - `group_concurrency`: of one group. - `rate`, `burst`: deliveries a span, such as "100/s", and how many of them
          at once after a rest; over all workers.
        - `adaptive`: a limit that each worker finds out for itself; see `Adaptive`. None: none.
        - `remember`: how long a `version` is remembered, and an `event_id` after its message was due.
        - `redefine`: replace the stored policy, but for slots and merge, for everybody.

        With no policy given at all, the stored one is used, or the plain one if the topic is new.
        """
        facts = dict(locals())
        for local in ("self", "name", "redefine"):
            facts.pop(local)
        declared = policy_of(**facts)
        plain = declared.stored() == _PLAIN.stored() and not redefine
        return self._declare(check_name(name, "topic"), declared, plain, redefine)

    def stored_topics(self) -> list[StoredTopic]:
        """Every topic that the store holds in this namespace, whoever made it, by name: policy, slots, depth, counters.
        Two round trips on one server; nothing is written. Two topics are not looked at in the same moment."""
        return self.link.run_all(self._depths(self.link.run(entries(self.namespace, self.clock))))

    def _depths(self, found: list[RegistryEntry]) -> Batch[list[StoredTopic]]:
        return depths(self.namespace, self.clock, self.codec, _PLAIN, found)

    def _declare(self, name: str, declared: Policy, plain: bool, redefine: bool) -> Topic:
        known = self.topics.get(name)
        if known is None:
            known = self.topics[name] = Topic(self, name, declared, plain, redefine)
        elif not plain:
            known.opening.declare(declared, redefine)
        return known

    def merge(
        self,
        key: str | Callable[..., object] | None = None,
        *,
        window: Duration | None = None,
        quiet: Duration | None = None,
        max_delay: Duration | None = None,
        max_size: int | None = None,
        edge: Edge = "trailing",
        merge: MergeSpec = "last",
        slots: int = 1,
        lease: Duration = "30s",
        max_attempts: int = 17,
        backoff: BackoffPolicy = None,
        retention: Duration = "30d",
        name: str | None = None,
    ) -> Callable[[Callable[P, R]], Merged[P, R]]:
        """The short form of a topic: `f.trigger(...)` takes the function's own arguments, and a worker later calls `f`
        once with the merged ones. `f(...)` itself still calls directly. `key` is as in `once`, the rest as in
        `topic`; `merge` may name arguments.
        `name`: the topic's; None: the function's qualified name."""

        def decorate(func: Callable[P, R]) -> Merged[P, R]:
            return merged(self, func, key, name, options)

        options = {
            "window": window, "quiet": quiet, "max_delay": max_delay, "max_size": max_size, "edge": edge,
            "merge": merge, "slots": slots, "lease": lease, "max_attempts": max_attempts, "backoff": backoff,
            "retention": retention,
        }  # fmt: skip
        return decorate

    # -- subscribers --------------------------------------------------------------------------------------------------

    def on(
        self,
        channel: str,
        *,
        pattern: bool | None = None,
        concurrency: int = 32,
        backlog: int = 10_000,
    ) -> Callable[[OnHeard], OnHeard]:
        """Registers a function, sync or async, that is called with each message (`Heard`) of a Redis Pub/Sub channel.

        `gate.run()` or `async with gate.aio.subscribers()` makes it listen. Every replica hears every message; guarded
        with `once` below this decorator, one replica runs it: duplicates and keys in progress elsewhere are dropped.
        Pub/Sub has no memory: nothing is delivered again, not after an error (logged) and not what was published while
        the connection was lost (it is restored by itself). All of that is counted in `gate.counters`, as `channel.*`.

        - `pattern`: subscribe to all channels that match, "prices.*"; None: no, and a name that looks so is BadInput.
        - `concurrency`: calls at once; 1 keeps the order. - `backlog`: messages that may wait for their turn; what
          comes when it is full is dropped and counted (`channel.dropped`).

        Returns the function unchanged. Raises BadInput.
        """

        def on(func: OnHeard) -> OnHeard:
            from idemgate.subscribers import Channel

            made = Channel(self, channel, func, pattern=pattern, concurrency=concurrency, backlog=backlog)
            self.subscribers.append(made)
            return func

        return on

    def stream(
        self,
        stream: str,
        *,
        group: str,
        consumer: str | None = None,
        start: Literal["0", "$"] = "0",
        concurrency: int = 32,
        reclaim: Duration = "30s",
        max_deliveries: int = 17,
        dead: str | None = None,
        max_dead: int = 10_000,
    ) -> Callable[[OnEntry], OnEntry]:
        """Registers a function, sync or async, that is called with each entry (`Entry`) of a Redis stream, as a member
        of a consumer group: at least once, by one of the replicas. Guard it with `once` to make that once.

        It is acknowledged when the function has returned, or its guard said that the key is done. While another owner
        runs the key it stays pending, until that owner's lease may end; after any other error until `reclaim`, or the
        delay of `Retry`. Where repeating cannot help (KeyReused, `Bury`, a stored failure, ...), and after
        `max_deliveries` attempts, it goes to the dead stream, with reason and error, and is then acknowledged.

        - `group`: made if missing, with the stream. - `start`: where a new group begins: "0" at the first entry there
          is, "$" with what comes from then on.
        - `consumer`: this member's name, of which no other live member may have the same; None: one for this run, taken
          off the group in the end.
        - `concurrency`: calls at once. - `reclaim`: an entry that nobody worked at for so long is taken over: at least
          the guard's lease, and longer than anything that keeps the event loop busy. Renewed while the function runs.
        - `dead`: name of the dead stream, None: the stream's name and ":dead"; at most `max_dead` entries are kept.

        What happened is counted in `gate.counters`, as `stream.*`. Returns the function unchanged. Raises BadInput.
        """

        def on(func: OnEntry) -> OnEntry:
            from idemgate.subscribers import Stream

            made = Stream(
                self, stream, func, group=group, consumer=consumer, start=start, concurrency=concurrency,
                reclaim=reclaim, max_deliveries=max_deliveries, dead=dead, max_dead=max_dead,
            )  # fmt: skip
            self.subscribers.append(made)
            return func

        return on

    def expiry(
        self,
        name: str,
        pattern: str,
        *,
        notifications: Literal["check", "set", "assume"] = "check",
        scan: Duration = "5m",
        retention: Duration = "1h",
        backlog: int = 100_000,
        slots: int = 1,
        lease: Duration = "30s",
        max_attempts: int = 17,
        backoff: BackoffPolicy = None,
    ) -> Expiry:
        """The keys of a pattern (as of SCAN: "session:*") that expire: of all listeners one calls the handler, and what
        expires while nobody listens is handled afterwards. Register it with `@expiry.handler`.

        `gate.run()`, or `gate.aio.subscribers()` together with `gate.aio.worker()`, make it work: subscribers keep the
        due set, which is the topic `name`, and workers of that topic run the handler.

        A key is in the due set since its time to live was set, if the server says so (flag `g`); since `track`, if you
        call that; at the latest since the next scan. Unhandled remains only a key that nobody tracked and that began
        and ended between two scans, while no listener heard its event. Deleting a key is no expiry, if the server says
        so (flag `g`) or you call `untrack`; otherwise it counts as one, since it looks the same.

        - `notifications`: what to do about the server's notify-keyspace-events, which needs "Ex" and should have "g":
          "check" it (StoreRefused when it starts); "set" it, adding what is missing; "assume" it, where this user may
          not ask.
        - `scan`: how often one of the listeners goes through all keys of the database, besides once when each begins
          and after each gap.
        - `retention`: how long it is remembered that a key was handled, at least 10 s.
        - `backlog`: events that may wait here; what comes when it is full is dropped and counted.
        - `slots`, `lease`, `max_attempts`, `backoff`: as in `topic`.

        Counted in `gate.counters`, as `expiry.*`. Raises BadInput.
        """
        from idemgate.subscribers import Expiry

        made = Expiry(
            self, name, pattern, notifications=notifications, scan=scan, retention=retention, backlog=backlog,
            slots=slots, lease=lease, max_attempts=max_attempts, backoff=backoff,
        )  # fmt: skip
        self.subscribers.append(made)
        return made

    # -- work ---------------------------------------------------------------------------------------------------------

    def run(
        self,
        *topics: str,
        concurrency: int = 32,
        prefetch: int | None = None,
        grace: Duration = "30s",
        members: bool | Membership = False,
    ) -> None:
        """Runs a worker for the topics that have a handler (or the named ones) until SIGTERM or SIGINT; see
        `Worker`."""
        from idemgate.worker.run import run

        run(self, topics, concurrency=concurrency, prefetch=prefetch, grace=grace, members=members)


class AioGate:
    """The awaiting face of a gate; each method is as the gate's own."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._topics: dict[str, AioTopic] = {}

    @property
    def link(self) -> AsyncLink:
        """The awaiting link: `await gate.aio.link.run(call)`."""
        return self._gate._alink or self._gate._async_link()

    def claim(
        self,
        key: Key,
        *,
        scope: str = "claim",
        lease: Duration = "30s",
        retention: Duration = "24h",
        fingerprint: object | None = None,
        on_lease_loss: OnLeaseLoss = "retry",
        max_attempts: int | None = None,
    ) -> AioClaim:
        """As `Gate.claim`: `await` it, or use it in `async with`."""
        passage = self._gate._passage(key, scope, lease, retention, fingerprint, on_lease_loss, max_attempts)
        return AioClaim(self._gate, passage)

    def claim_many(
        self,
        keys: Iterable[Key],
        *,
        scope: str = "claim",
        lease: Duration = "30s",
        retention: Duration = "24h",
        on_lease_loss: OnLeaseLoss = "retry",
        max_attempts: int | None = None,
    ) -> AioClaimBatch:
        """As `Gate.claim_many`: `await` it, or use it in `async with`."""
        passages = self._gate._passages(keys, scope, lease, retention, on_lease_loss, max_attempts)
        return AioClaimBatch(self._gate, [AioClaim(self._gate, one) for one in passages])

    async def complete_many(
        self, pairs: Iterable[tuple[Claimed, object]], *, retention: Duration | None = None
    ) -> list[bool]:
        """As `Gate.complete_many`."""
        claims, calls = completing(self._gate, pairs, retention)
        return ended(claims, await ended_by(self._gate, claims, calls))

    async def release_many(self, claims: Iterable[Claimed]) -> list[bool]:
        """As `Gate.release_many`."""
        given, calls = releasing(self._gate, claims)
        return ended(given, await ended_by(self._gate, given, calls))

    async def first(self, key: Key, retention: Duration, *, scope: str = "first", compact: bool = False) -> bool:
        """As `Gate.first`."""
        return await self.link.run(self._gate.mark(key, retention, scope, compact))

    async def first_many(
        self, keys: Iterable[Key], retention: Duration, *, scope: str = "first", compact: bool = False
    ) -> list[bool]:
        """As `Gate.first_many`."""
        return await self.link.run_all(self._gate.marks(keys, retention, scope, compact))

    async def keep(self, key: Key, value: V, retention: Duration, *, scope: str = "keep") -> Kept[V]:
        """As `Gate.keep`."""
        return await self.link.run(self._gate.seen.keep(scope, key, value, retention))

    async def keep_many(
        self, pairs: Iterable[tuple[Key, V]], retention: Duration, *, scope: str = "keep"
    ) -> list[Kept[V]]:
        """As `Gate.keep_many`."""
        return await self.link.run_all(self._gate.seen.keep_many(scope, pairs, retention))

    async def kept(self, key: Key, *, scope: str = "keep") -> Small | None:
        """As `Gate.kept`."""
        return await self.link.run(self._gate.seen.kept(scope, key))

    async def inspect(self, key: Key, *, scope: str = "claim") -> Record:
        """As `Gate.inspect`."""
        return await self.link.run(self._gate.claims.inspect(self._gate.claims.key(scope, key)))

    async def forget(self, key: Key, *, scope: str = "claim", force: bool = False) -> bool:
        """As `Gate.forget`."""
        claims, record, request = self._gate.claims, self._gate._unremembered(scope, key), token()
        answer = await self._decided(record, lambda seen: claims.forget(record, request, seen, force))
        return changed(key, "forgotten", answer)

    async def _decided(
        self, record: tuple[bytes, ...], build: Callable[[Record], Call[tuple[str, int]]]
    ) -> tuple[str, int]:
        """As that of `Gate`."""
        while True:
            answer = await self.link.run(build(await self.link.run(self._gate.claims.inspect(record))))
            if answer[0] != "changed":
                return answer

    async def resolve(
        self,
        key: Key,
        *,
        done: bool,
        result: object = None,
        retention: Duration = "24h",
        scope: str = "claim",
    ) -> bool:
        """As `Gate.resolve`."""
        claims, record = self._gate.claims, self._gate._unremembered(scope, key)
        data = self._gate.codec.encode(result, "result")
        request, kept = token(), milliseconds(retention, "retention")
        answer = await self._decided(record, lambda seen: claims.resolve(record, request, seen, done, kept, b"v", data))
        return changed(key, "ok", answer)

    def topic(self, name: str, **policy: Any) -> AioTopic:
        """As `Gate.topic`; the same topic, awaiting."""
        return self._gate.topic(name, **policy).aio

    async def stored_topics(self) -> list[StoredTopic]:
        """As `Gate.stored_topics`."""
        return await self.link.run_all(
            self._gate._depths(await self.link.run(entries(self._gate.namespace, self._gate.clock)))
        )

    def worker(
        self,
        *topics: str,
        concurrency: int = 32,
        prefetch: int | None = None,
        grace: Duration = "30s",
        members: bool | Membership = False,
    ) -> Worker:
        """A worker for use inside of an application: `async with gate.aio.worker(): ...`; see `Worker`."""
        from idemgate.worker.worker import Worker

        return Worker(self._gate, topics, concurrency=concurrency, prefetch=prefetch, grace=grace, members=members)

    def subscribers(self, *, grace: Duration = "30s") -> Subscribers:
        """The gate's subscribers for use inside of an application: `async with gate.aio.subscribers(): ...`; see
        `Subscribers`."""
        from idemgate.subscribers import Subscribers

        return Subscribers(self._gate, grace)

    async def close(self) -> None:
        """Waits for the calls under way, then closes the connections of this event loop."""
        if self._gate._alink is not None:
            await self._gate._alink.close()


def _given(client: object | None, url: str | None) -> Endpoint | str | None:
    """What a gate was given, checked; a server that has to be started stays a URL until the first use. Only now comes
    redis-py, which takes longer than all of ours."""
    if client is not None:
        from idemgate.store.endpoint import of_client

        return of_client(client)
    if url is None or url.startswith("embedded:"):
        return url
    from idemgate.store.url import of_url

    return of_url(url)


def changed(key: Key, wanted: str, answer: tuple[str, int]) -> bool:
    """Whether a record was changed; AlreadyInProgress if a live owner stands in the way."""
    word, left_ms = answer
    if word == "busy":
        raise AlreadyInProgress(text_of(key), left_ms / 1000)
    return word == wanted


_PLAIN = policy_of(
    window=None, quiet=None, max_delay=None, max_size=None, edge="trailing", merge="last", slots=1, lease="30s",
    max_attempts=17, backoff=None, retention="30d", max_dead=10_000, remember="24h", priority=False,
    priority_boost=None, group_concurrency=1, concurrency=None, rate=None, burst=None,
)  # fmt: skip
"""What `gate.topic(name)` says when nothing is said."""

default_gate = Gate(namespace=os.environ.get("IDEMGATE_NAMESPACE", "default"))
"""The gate behind `idemgate.once` and `idemgate.merge`; its store is named by IDEMGATE_URL, read with the first use."""
