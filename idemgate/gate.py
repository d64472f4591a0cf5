"""The entry point of the library: a store and a namespace."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar, Unpack

from idemgate.core.clock import Clock
from idemgate.core.counters import Counters
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.key_template import KeyCallable
from idemgate.core.keys import Key, check_name
from idemgate.core.validation import check_int
from idemgate.dedup.dedup import Dedup
from idemgate.errors import InvalidArgument
from idemgate.gate_aio import AioGate
from idemgate.gate_guard import GuardMethods
from idemgate.gate_pickling import portable_options, rebuild_gate
from idemgate.gate_subscribers import SubscriberMethods
from idemgate.guard.batch import ClaimBatch, build_completions, build_releases, record_ends, run_ends
from idemgate.guard.calls import Record
from idemgate.guard.claim import BaseClaim, Claim
from idemgate.guard.decide import cancel, forget, inspect, mark_call, mark_calls, resolve
from idemgate.guard.options import (
    ClaimOptions,
    claim_attempt,
    claim_attempts,
)
from idemgate.store.context import Context
from idemgate.store.durability import DurabilityOption, parse_durability
from idemgate.topics.decorator import MergedFunction, decorate_merge
from idemgate.topics.policy import Policy, TopicOptions, policy_from
from idemgate.topics.registry import StoredTopic, stored_topics
from idemgate.topics.topic import Topic

if TYPE_CHECKING:
    from idemgate.membership.member import Membership
    from idemgate.store.endpoint import Endpoint
    from idemgate.subscribers import Subscriber

__all__ = ["Gate", "parse_source"]

P = ParamSpec("P")
R = TypeVar("R")
LARGEST = 512 * 1024 * 1024
"""The largest value of a Redis server, in bytes."""


class Gate(GuardMethods, SubscriberMethods):
    """One store and one namespace. The constructor opens no connection; the first use does.

    Threads and event loops can share a gate. A forked child opens its own connections. Pickle stores the arguments of a
    gate, with the credentials of its URL. Each process builds one gate from them. A gate with `client`, `clock` or a
    temporary embedded server cannot be pickled.

    Args:
        url: redis://, rediss://, unix://, redis+cluster://h1:p,h2:p, redis+sentinel://h1:p,h2:p/service, or
            embedded://[dir]. None: the environment variable IDEMGATE_URL.
        client: a redis-py client, sync or async, instead of a URL. The gate copies its address and credentials and
            opens its own connections. These never decode, never retry on their own, and have timeouts.
        namespace: the first part of every key. Use one for each trust domain.
        timeout: how long a call may take, retries included, while the store does not answer. Then it raises
            StoreUnavailable. A topic recognizes a retry for 30 s. With a longer timeout a trigger needs an
            `event_id`, or it may count twice.
        max_bytes: the largest payload or result, 1 byte to 512 MiB. Deliveries with a larger payload, of a gate with
            a larger limit, are deferred by 30 s and counted as `topic.too_large`.
        durability: what a write must reach before its call returns. None: the memory of the primary. "replicas" or a
            number: that many replicas acknowledged it (WAIT). "fsync": the append-only file on disk (WAITAOF, with
            Redis 7.2 or Valkey and `appendonly yes`). Not on a cluster. The guarantees are in docs/promises.md.
        clock: a test clock that every script uses (`idemgate.testing.Clock`).

    Raises:
        NotConfigured: the client cannot be copied. The first use raises it if neither a URL nor IDEMGATE_URL is set.
        NotDurable: a call raises it if its write was not durable within `timeout`.
        ServerRejected: a call raises it if the server can never give the durability. Nothing is written then.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        client: object | None = None,
        namespace: str = "default",
        timeout: Duration = "5s",
        max_bytes: int = 262_144,
        durability: DurabilityOption = None,
        clock: Clock | None = None,
    ) -> None:
        if url is not None and client is not None:
            raise InvalidArgument("client", client, "a URL was given too", "Pass one of url and client")
        self.context = Context(
            parse_source(client, url), check_name(namespace, "namespace"), milliseconds(timeout, "timeout") / 1000,
            check_int("max_bytes", max_bytes, 1, LARGEST), parse_durability(durability, namespace), clock,
        )  # fmt: skip
        self.topics: dict[str, Topic] = {}
        self.subscribers: list[Subscriber] = []
        options: dict[str, Any] = {
            "url": url, "namespace": namespace, "timeout": timeout, "max_bytes": max_bytes, "durability": durability,
        }  # fmt: skip
        self._options: Callable[[], dict[str, Any]] = lambda: options  # no repr shows the password of the URL

    def __reduce__(self) -> Any:
        """Let pickle store what the gate was made from, with the credentials of its URL, but no connection."""
        return rebuild_gate, (type(self), portable_options(self, self._options()))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _memo: object) -> Self:
        return self

    def __repr__(self) -> str:
        source = self.context.source
        return f"<Gate {self.namespace!r} {source if source is not None else 'IDEMGATE_URL'}>"

    @property
    def namespace(self) -> str:
        """The first part of every key."""
        return self.context.namespace

    @property
    def counters(self) -> Counters:
        """The counters of this process, by name: `gate.counters["once.done"]`."""
        return self.context.counters

    @property
    def has_work(self) -> bool:
        """True if `run` has something to do: a subscriber, or a topic with a handler or a forward target."""
        topics = [topic.definition for topic in self.topics.values()]
        return bool(self.subscribers) or any(topic.handler or topic.forward for topic in topics)

    @cached_property
    def aio(self) -> AioGate:
        """The async form of this gate."""
        return AioGate(self.context, self.topic, self.topics, self.subscribers)

    def close(self) -> None:
        """Stop the heartbeats and close the blocking connections. `await gate.aio.close()` closes the async ones."""
        self.context.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def claim(self, key: Key, *, fingerprint: object | None = None, **options: Unpack[ClaimOptions]) -> Claim:
        """Claim a key and return at once; see `Claim.state`. Atomic, one round trip.

        Args:
            key: the idempotency key.
            fingerprint: a value that identifies the payload. None: none.
            **options: see `ClaimOptions`.

        Raises:
            KeyReused: the key was used with another fingerprint.
            OutcomeUnknown: a former owner vanished or was interrupted, and `on_lease_loss` is "hold".
            AttemptsExhausted: the key reached `max_attempts`.
            LeaseLost: the reply came so late that another caller has taken the key over.
            StoreError: the store did not answer.
        """
        return Claim(self.context, claim_attempt(self.context, key, fingerprint, options)).acquire()

    def claim_many(self, keys: Iterable[Key], **options: Unpack[ClaimOptions]) -> ClaimBatch:
        """Claim many keys together and return their claims in order.

        One round trip, or one to each node of a cluster in parallel; more where the stored data is large. Each claim
        is atomic, the batch is not. One script call claims 100 keys. Of equal keys the first is granted; the others
        are "in_progress" until it ends. Use it in a `with` block, in which a heartbeat renews the claims; see
        `ClaimBatch`. End them with `complete_many` or one by one.

        Args:
            keys: the idempotency keys.
            **options: see `ClaimOptions`.

        Returns:
            A claim for each key. KeyReused, OutcomeUnknown, AttemptsExhausted, LeaseLost or UnexpectedData of one key
            is the `error` of its claim.

        Raises:
            InvalidArgument: a key is invalid; the error names its index. Nothing was sent.
            StoreError: the store did not answer. Granted claims are released if it can be reached, else their leases
                expire.
        """
        attempts = claim_attempts(self.context, keys, options)
        return ClaimBatch(self.context, [Claim(self.context, attempt) for attempt in attempts]).acquire()

    def complete_many(
        self, pairs: Iterable[tuple[BaseClaim, object]], *, retention: Duration | None = None
    ) -> list[bool]:
        """Complete many claims together; see `Claim.complete`. One round trip; only each completion is atomic.

        Args:
            pairs: (claim, result) tuples.
            retention: how long the keys stay done. None: the retention of each claim.

        Returns:
            For each claim False if it was lost, in order.

        Raises:
            InvalidArgument: a result cannot be stored, or a claim occurs twice. Nothing was written; all are still
                held.
            StoreError: some claims may be completed. The same call can be repeated.
        """
        claims, calls = build_completions(self.context, pairs, retention)
        return record_ends(claims, run_ends(self.context, claims, calls, completes=True))

    def release_many(self, claims: Iterable[BaseClaim]) -> list[bool]:
        """Release many claims together; see `Claim.release` and `complete_many`."""
        held, calls = build_releases(self.context, claims)
        return record_ends(held, run_ends(self.context, held, calls, completes=False))

    def first(self, key: Key, retention: Duration, *, scope: str = "first") -> bool:
        """Mark a key. Atomic, one round trip; the record holds nothing else.

        For many millions of ids, `dedup` needs 20 to 25 bytes an id instead of some 180.

        Returns:
            True for the first caller of `key` within `retention`, False for all others.

        Raises:
            InvalidArgument: the key is no str, bytes or int.
            StoreError: the store did not answer. Another call may then return False.
        """
        return self.context.link.run(mark_call(self.context, key, retention, scope))

    def first_many(self, keys: Iterable[Key], retention: Duration, *, scope: str = "first") -> list[bool]:
        """Mark many keys together and return the replies in order; see `first`.

        One script call marks 100 keys and is atomic; on a cluster each key is. Of equal keys only the first one can
        be first.
        """
        return self.context.link.run_all(mark_calls(self.context, keys, retention, scope))

    def dedup(self, scope: str, retention: Duration) -> Dedup:
        """Return the compact set of ids of a scope; see `Dedup`. Sends nothing to the store.

        Args:
            scope: the name of the set. Ids of one scope are compared with each other.
            retention: how long an id is stored. Use the same one wherever the scope is used.
        """
        return Dedup(self.context, scope, retention)

    def inspect(self, key: Key, *, scope: str = "claim") -> Record:
        """Return the stored record of a key. One round trip; changes nothing.

        If the scope does not know the key, a second round trip looks in the other scopes that this gate has used.
        `Record.other_scopes` has those that know it.
        """
        return inspect(self.context, key, scope)

    def cancel(self, key: Key, *, scope: str = "claim") -> bool:
        """Ask the owner of a key to stop. Two round trips.

        The owner learns it with its next heartbeat, after a sixth of its lease at most: `current().cancel_requested`,
        `claim.cancel_requested`. It decides what to do; its claim stays. A later attempt is not cancelled.

        Returns:
            False if no owner has a live lease.
        """
        return cancel(self.context, key, scope)

    def forget(self, key: Key, *, scope: str = "claim", force: bool = False) -> bool:
        """Delete the record of a key, so that its next call runs.

        Returns:
            False if there was no record.

        Raises:
            AlreadyInProgress: an owner's lease is valid. With `force` the record is deleted anyway, and two owners
                may run at once.
        """
        return forget(self.context, key, scope, force)

    def resolve(
        self,
        key: Key,
        *,
        done: bool,
        result: object = None,
        retention: Duration | None = None,
        scope: str = "claim",
    ) -> bool:
        """Decide the state of a key whose owner lost its lease (OutcomeUnknown).

        Args:
            key: the key.
            done: True stores `result` for `retention`; False lets the next call run.
            result: what duplicates get.
            retention: how long the key stays done. None: the longest retention of the programs that use the scope.
                The store knows it once one of them ran for a second. For `done=False` it is how long the attempts are
                counted.
            scope: the scope of the key.

        Returns:
            False if there is nothing to decide.

        Raises:
            AlreadyInProgress: an owner's lease is valid.
            InvalidArgument: `retention` is missing, and the store does not know the scope.
        """
        return resolve(self.context, key, scope, done, result, retention)

    def topic(self, name: str, **options: Unpack[TopicOptions]) -> Topic:
        """Return a topic: a named stream of keyed messages with one policy. Sends nothing to the store.

        The same name returns the same topic. Its first use compares the policy with the stored one, in one round
        trip. Without any option the stored policy is used, or the default one for a new topic. After PolicyChanged the
        next declaration replaces the refused one.

        Type checkers know the payload of a topic if annotated: `orders: Topic[Order] = gate.topic("orders")`. Where
        deliveries hold something else than triggers, name both: `lines: Topic[str, list[str]]` for "append". Nothing
        is converted: a model is delivered as the dict of its fields.

        Args:
            name: the name of the topic.
            revision: raise it with each change of the policy. The highest revision is stored, and programs with a lower
                one adopt it (logged once). Another policy of the same revision raises PolicyChanged. No revision
                changes `slots` or `merge`.
            window: merge the triggers of a key within this time of the *first* into one delivery at its end.
            quiet: deliver when a key had no trigger for this long. `max_delay` after the first trigger or `max_size`
                triggers end the wait. One of both is required, or `max_delay=None`: then a key with steady triggers is
                never delivered. Without `window`, `quiet` and `max_size` a message is delivered as soon as
                possible. Pending triggers still merge.
            edge: "trailing" delivers at the end of the window. "leading" delivers the first trigger at once. It drops
                and counts the others of the window. A message that is cancelled or dies ends its window.
            merge: how payloads merge: "last", "first", "append", "union", "count", "sum", "min", "max", `append(cap)`
                or `union(cap)`; or a dict of field -> policy, in which "*" is for all other fields (default: last).
            slots: the number of shards of a new topic, a power of two. `reshard` changes it later. Any current or
                former number is accepted.
            lease: how long a delivery is valid without a heartbeat; see `once`.
            max_attempts: deliveries of a message before it becomes a dead letter. A trigger that joins a failed message
                starts them anew; unless `merge` is "last", the message has twice as many in all.
            backoff: the delays between them. It is one duration or a list of durations whose last one repeats. It may
                be a tenacity wait strategy. None: exponential with full jitter from 1 s to 10 min.
            dead_retention, max_dead_letters: the age and the number of dead letters in a slot. Burying a message
                discards at most 100 that are older or beyond this number. `expired` counts them.
            concurrency: the most deliveries in flight over all workers and slots. None: no limit.
            group_concurrency: the most deliveries in flight of one group.
            priority, priority_boost: order due messages by priority. One point counts like an age of one boost.
            retry_penalty: how many points of priority each failed attempt takes away, so that failing work does not
                stay in front. It needs `priority`.
            rate: the most deliveries over time of all workers, such as "100/s".
            burst: the most deliveries at once after a pause.
            adaptive: a limit that each worker finds by measurement; see `Adaptive`.
            dedup_retention: how long a `version` is stored. An `event_id` is stored for as long after the due time of
                its message.
            result_retention: how long `topic.result` finds what the handler returned, at least. None: results are not
                stored. A value that is not stored (its type or its size) is counted and logged. Forwarded messages
                have none.

        Raises:
            InvalidArgument: an option is invalid.
            PolicyChanged: this program has declared the topic with another policy of the same revision. The first use
                raises it if the stored one differs.
        """
        declared, plain = policy_from("topic", options)
        return self._declare(check_name(name, "topic"), declared, plain)

    def stored_topics(self, *, active: bool = False) -> list[StoredTopic]:
        """Return every topic that the store holds in this namespace, by name: policy, slots, depth, counters.

        Two round trips on one server; nothing is written. Topics are not read at the same moment. An empty topic stays
        in the list until `topic.delete()`.

        Args:
            active: only topics that hold a message or a dead letter, are paused, or are being changed.
        """
        return stored_topics(self.context, active)

    def _declare(self, name: str, declared: Policy, plain: bool) -> Topic:
        """Return the topic of this name, and register its declared policy."""
        known = self.topics.get(name)
        if known is None:
            known = self.topics[name] = Topic(self.context, name, declared, plain)
            known.definition.unregister = partial(self.topics.pop, name, None)
        else:
            known.definition.declare(declared, plain)
        return known

    def merge(
        self,
        key: str | KeyCallable | None = None,
        *,
        name: str | None = None,
        **options: Unpack[TopicOptions],
    ) -> Callable[[Callable[P, R]], MergedFunction[P, R]]:
        """Decorate a function so that its triggers merge into one later call.

        `f.trigger(...)` takes the arguments of the function. A worker later calls `f` once with the merged arguments.
        `f(...)` still calls the function directly.

        Args:
            key: the key of a trigger; see `once`.
            name: the name of the topic. None: the qualified name of the function, as for the scope of `once`.
            **options: see `topic`. `merge` may name arguments.

        Raises:
            InvalidArgument: an option is invalid.
        """

        policy_from("merge", options)

        def decorate(func: Callable[P, R]) -> MergedFunction[P, R]:
            return decorate_merge(self.topic, func, key, name, options)

        return decorate

    def run(
        self,
        *topics: str,
        concurrency: int = 32,
        prefetch: int | None = None,
        grace: Duration = "30s",
        membership: Literal["redis"] | Membership | None = None,
    ) -> None:
        """Run a worker, and the registered subscribers, until SIGTERM or SIGINT; see `Worker`.

        It serves the topics that have a handler, or only the named ones.
        """
        from idemgate.worker.run import run

        run(self, topics, concurrency=concurrency, prefetch=prefetch, grace=grace, membership=membership)


def parse_source(client: object | None, url: str | None) -> Endpoint | str | None:
    """Return the endpoint of a client or URL. An embedded server stays a URL until the first use."""
    if client is not None:
        from idemgate.store.endpoint import endpoint_from_client  # late: importing redis-py is slow

        return endpoint_from_client(client)
    if url is None:
        return None
    if not isinstance(url, str):
        raise InvalidArgument(
            "url", type(url), "not a URL", "Pass 'redis://localhost:6379/0', or client= for a redis-py client"
        )
    if url.startswith("embedded:"):
        return url
    from idemgate.store.url import endpoint_from_url

    return endpoint_from_url(url)
