"""The front door: one store and one namespace."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Literal, ParamSpec, Self, TypeVar, Unpack

from idemgate.core.clock import Clock
from idemgate.core.counters import Counters
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.keys import Key, check_name
from idemgate.core.numbers import whole
from idemgate.dedup.dedup import Dedup
from idemgate.errors import InvalidArgument
from idemgate.gate_aio import AioGate
from idemgate.guard.attempt import ErrorPolicy, OnDone, OnInProgress, OnLeaseLoss, OnStoreError
from idemgate.guard.batch import ClaimBatch, completing, ended, releasing
from idemgate.guard.calls import Record
from idemgate.guard.claim import Claim, Claimed
from idemgate.guard.decide import forget, inspect_call, resolve
from idemgate.guard.mark import mark_call, mark_calls
from idemgate.guard.options import ClaimOptions, attempt_of, attempts_of, decorate, guard_of
from idemgate.store.context import Context
from idemgate.store.durability import Asked, durability_of
from idemgate.topics.decorator import Merged, merged
from idemgate.topics.policy import ExpiryOptions, MergeOptions, Policy, TopicOptions, policy_from
from idemgate.topics.registry import StoredTopic, stored_topics
from idemgate.topics.topic import Topic

if TYPE_CHECKING:
    from tenacity import BaseRetrying

    from idemgate.membership.member import Membership
    from idemgate.store.endpoint import Endpoint
    from idemgate.subscribers import Entry as StreamEntry
    from idemgate.subscribers import Expiry, Heard, Subscriber

__all__ = ["Gate", "default_gate"]

P = ParamSpec("P")
R = TypeVar("R")
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
      Redis 7.2 or Valkey, `appendonly yes`). Else NotDurable, after `timeout`; ServerRejected, and nothing is written,
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
            raise InvalidArgument("client", client, "a URL was given too", "Pass one of url and client")
        self.context = Context(
            _source(client, url), check_name(namespace, "namespace"), milliseconds(timeout, "timeout") / 1000,
            max_bytes, durability_of(durability, namespace), whole("connections", connections, 1, 64), clock,
        )  # fmt: skip
        self.topics: dict[str, Topic] = {}
        self.subscribers: list[Subscriber] = []

    def __repr__(self) -> str:
        source = self.context.source
        return f"<Gate {self.namespace!r} {source if source is not None else 'IDEMGATE_URL'}>"

    @property
    def namespace(self) -> str:
        """The first part of every key."""
        return self.context.namespace

    @property
    def counters(self) -> Counters:
        """What happened in this process, by name: `gate.counters["once.done"]`."""
        return self.context.counters

    @cached_property
    def aio(self) -> AioGate:
        """The awaiting form of this gate."""
        return AioGate(self.context, self.topic, self.topics, self.subscribers)

    def close(self) -> None:
        """End heartbeats and blocking connections. Those of an event loop are closed by `await gate.aio.close()`."""
        self.context.close()

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
        ReplayedFailure, OutcomeUnknown, AttemptsExhausted, StoreError, and InvalidArgument for arguments that give no key.
        """
        guard = guard_of(
            self.context.codec, scope, retention, lease, on_done, on_in_progress, wait, on_error, on_lease_loss,
            on_store_error, max_attempts, retry, at_most_once, max_result_bytes, shadow,
        )  # fmt: skip

        def once(func: Callable[P, R]) -> Callable[P, R]:
            return decorate(self.context, guard, func, key, fingerprint, retry, remember)

        return once

    def claim(self, key: Key, *, fingerprint: object | None = None, **options: Unpack[ClaimOptions]) -> Claim:
        """Asks once for the right to run `key` and answers at once: see `Claim.state`. One round trip.

        Raises KeyReused, OutcomeUnknown, AttemptsExhausted, StoreError. `scope` is as in `once`: a decorator with the
        same scope guards the same keys.
        """
        return Claim(self.context, attempt_of(self.context, key, fingerprint, options)).ask()

    def claim_many(self, keys: Iterable[Key], **options: Unpack[ClaimOptions]) -> ClaimBatch:
        """`claim` for the keys of a batch: a list of claims in their order, which travel together, one round trip (on a
        cluster one to each node, at the same time; more where what is stored is large). Not atomic as a whole: each
        claim is, and 100 keys are one script call.

        What KeyReused, OutcomeUnknown, AttemptsExhausted or UnexpectedData says of one key is that claim's `error`; the
        others are as they are. Any other StoreError is raised, and what was granted is given back, if the store can be
        asked; else its leases run out. Of equal keys the first is granted; the others are "in_progress" until it ends.

        Use it as a block, `with gate.claim_many(keys) as claims:`, in which heartbeats keep them: see `ClaimBatch`. End
        them with `complete_many`, or one by one. InvalidArgument names the place of a key that is none; nothing was asked
        then.
        """
        attempts = attempts_of(self.context, keys, options)
        return ClaimBatch(self.context, [Claim(self.context, one) for one in attempts]).ask()

    def complete_many(
        self, pairs: Iterable[tuple[Claimed, object]], *, retention: Duration | None = None
    ) -> list[bool]:
        """`Claim.complete` for many (claim, result), answers in their order: False for those that were lost. They
        travel together, as in `claim_many`; each is written by itself.

        InvalidArgument if one of the results cannot be stored, or a claim is there twice; nothing is written then, and all are
        still held. After a StoreError some may be done: the same again is answered alike.
        """
        claims, calls = completing(self.context, pairs, retention)
        return ended(claims, self.context.link.run_each(calls))

    def release_many(self, claims: Iterable[Claimed]) -> list[bool]:
        """`Claim.release` for many, as `complete_many`."""
        given, calls = releasing(self.context, claims)
        return ended(given, self.context.link.run_each(calls))

    def first(self, key: Key, retention: Duration, *, scope: str = "first") -> bool:
        """Mark a key. Atomic, one round trip; the record holds nothing else.

        For many millions of ids, `dedup` needs 20 to 25 bytes an id instead of some 180.

        Returns:
            True for the first caller of `key` within `retention`, False for all others.

        Raises:
            InvalidArgument: the key is no str, bytes or int.
            StoreError: the store did not answer. Asking again may then return False.
        """
        return self.context.link.run(mark_call(self.context, key, retention, scope))

    def first_many(self, keys: Iterable[Key], retention: Duration, *, scope: str = "first") -> list[bool]:
        """`first` for many keys, answers in their order; they travel together. Of equal keys in one call the first is
        first.

        Not atomic as a whole: 100 keys are one script call; on a cluster each key is.
        """
        return self.context.link.run_all(mark_calls(self.context, keys, retention, scope))

    def dedup(self, scope: str, retention: Duration) -> Dedup:
        """Return the compact set of ids of a scope; see `Dedup`. Nothing is sent to the store.

        Args:
            scope: names the set. Ids of one scope are compared with each other.
            retention: how long an id is known. Use the same one wherever the scope is used.
        """
        return Dedup(self.context, scope, retention)

    def inspect(self, key: Key, *, scope: str = "claim") -> Record:
        """Return what is stored for a key. Changes nothing."""
        return self.context.link.run(inspect_call(self.context, key, scope))

    def forget(self, key: Key, *, scope: str = "claim", force: bool = False) -> bool:
        """Delete the record of a key, so that its next call runs.

        Returns:
            False if there was no record.

        Raises:
            AlreadyInProgress: an owner's lease holds. With `force` the record is deleted all the same, and two owners
                may run at once.
        """
        return forget(self.context, key, scope, force)

    def resolve(
        self,
        key: Key,
        *,
        done: bool,
        result: object = None,
        retention: Duration = "24h",
        scope: str = "claim",
    ) -> bool:
        """Decide what becomes of a key whose owner vanished (OutcomeUnknown).

        Args:
            key: the idempotency key.
            done: True stores `result` for `retention`; False lets the next call run.
            result: what duplicates get.
            retention: how long the key is known as done.
            scope: the scope of the key.

        Returns:
            False if there is nothing to decide.

        Raises:
            AlreadyInProgress: an owner's lease holds.
        """
        return resolve(self.context, key, scope, done, result, retention)

    # -- merge --------------------------------------------------------------------------------------------------------

    def topic(self, name: str, *, redefine: bool = False, **options: Unpack[TopicOptions]) -> Topic:
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
        declared, plain = policy_from("topic", options)
        return self._declare(check_name(name, "topic"), declared, plain and not redefine, redefine)

    def stored_topics(self) -> list[StoredTopic]:
        """Return every topic that the store holds in this namespace, by name: policy, slots, depth, counters.

        Two round trips on one server; nothing is written. Topics are not read in the same moment.
        """
        return stored_topics(self.context)

    def _declare(self, name: str, declared: Policy, plain: bool, redefine: bool) -> Topic:
        known = self.topics.get(name)
        if known is None:
            known = self.topics[name] = Topic(self.context, name, declared, plain, redefine)
        elif not plain:
            known.opening.declare(declared, redefine)
        return known

    def merge(
        self,
        key: str | Callable[..., object] | None = None,
        *,
        name: str | None = None,
        **options: Unpack[MergeOptions],
    ) -> Callable[[Callable[P, R]], Merged[P, R]]:
        """The short form of a topic: `f.trigger(...)` takes the function's own arguments, and a worker later calls `f`
        once with the merged ones. `f(...)` itself still calls directly. `key` is as in `once`, the rest as in
        `topic`; `merge` may name arguments.
        `name`: the topic's; None: the function's qualified name."""

        policy_from("merge", options)

        def decorate(func: Callable[P, R]) -> Merged[P, R]:
            return merged(self.topic, func, key, name, options)

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

        - `pattern`: subscribe to all channels that match, "prices.*"; None: no, and a name that looks so is InvalidArgument.
        - `concurrency`: calls at once; 1 keeps the order. - `backlog`: messages that may wait for their turn; what
          comes when it is full is dropped and counted (`channel.dropped`).

        Returns the function unchanged. Raises InvalidArgument.
        """

        def on(func: OnHeard) -> OnHeard:
            from idemgate.subscribers import Channel

            made = Channel(self.context, channel, func, pattern=pattern, concurrency=concurrency, backlog=backlog)
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

        What happened is counted in `gate.counters`, as `stream.*`. Returns the function unchanged. Raises InvalidArgument.
        """

        def on(func: OnEntry) -> OnEntry:
            from idemgate.subscribers import Stream

            made = Stream(
                self.context, stream, func, group=group, consumer=consumer, start=start, concurrency=concurrency,
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
        **options: Unpack[ExpiryOptions],
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
          "check" it (ServerRejected when it starts); "set" it, adding what is missing; "assume" it, where this user may
          not ask.
        - `scan`: how often one of the listeners goes through all keys of the database, besides once when each begins
          and after each gap.
        - `retention`: how long it is remembered that a key was handled, at least 10 s.
        - `backlog`: events that may wait here; what comes when it is full is dropped and counted.
        - `slots`, `lease`, `max_attempts`, `backoff`: as in `topic`.

        Counted in `gate.counters`, as `expiry.*`. Raises InvalidArgument.
        """
        from idemgate.subscribers import Expiry
        from idemgate.subscribers.expiry.rules import ECHO_MS, MERGE

        if name in self.topics:
            raise InvalidArgument(
                "name", name, "a topic of this gate has that name", "Give the due set a name of its own"
            )

        def make_topic() -> Topic:
            return self.topic(name, merge=MERGE, remember=ECHO_MS / 1000, **options)

        made = Expiry(
            self.context, name, make_topic, pattern, notifications=notifications, scan=scan, retention=retention,
            backlog=backlog,
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


def _source(client: object | None, url: str | None) -> Endpoint | str | None:
    """What a gate was given, checked; a server that has to be started stays a URL until the first use. Only now comes
    redis-py, which takes longer than all of ours."""
    if client is not None:
        from idemgate.store.endpoint import of_client

        return of_client(client)
    if url is None or url.startswith("embedded:"):
        return url
    from idemgate.store.url import of_url

    return of_url(url)


default_gate = Gate(namespace=os.environ.get("IDEMGATE_NAMESPACE", "default"))
"""The gate behind `idemgate.once` and `idemgate.merge`; its store is named by IDEMGATE_URL, read with the first use."""
