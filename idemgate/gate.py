"""The entry point of the library: a store and a namespace."""

from __future__ import annotations

import inspect as inspection
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import cached_property, partial
from pathlib import Path
from pickle import PicklingError
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    Unpack,
    cast,
    overload,
)
from urllib.parse import quote
from weakref import WeakValueDictionary

from idemgate.core.calls import run_plan
from idemgate.core.clock import Clock
from idemgate.core.counters import Counters
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.key_template import KeyCallable, compile_key, compile_message_fingerprint, compile_message_key
from idemgate.core.keys import Key, check_name
from idemgate.core.scopes import check_unregistered, mark_registered
from idemgate.core.validation import check_blocking, check_function, check_int, is_async
from idemgate.core.verdict import Verdict
from idemgate.dedup.dedup import Dedup
from idemgate.errors import InvalidArgument
from idemgate.gate_aio import AioGate
from idemgate.guard.batch import ClaimBatch, build_completions, build_releases, record_ends, run_ends
from idemgate.guard.callback import OnFailure, OnVerdict, record_settlement, wrap_callback
from idemgate.guard.claim import BaseClaim, Claim, claim_request, claim_requests
from idemgate.guard.claim_calls import Record
from idemgate.guard.context import build_guard_context
from idemgate.guard.decorator import OnceFunction, decorate
from idemgate.guard.guard import Guard
from idemgate.guard.manage import cancel, forget, inspect, join_marks, mark_call, mark_calls, resolve
from idemgate.guard.options import ClaimOptions, GuardOptions, NoSkipOptions, check_choice, once_options, split_bare
from idemgate.history.trace import EventTraces, trace_event
from idemgate.presence.presence import make_observer
from idemgate.store.context import Context, Redact
from idemgate.store.durability import DurabilityOption, parse_durability
from idemgate.store.lifespan import LifespanFunction, check_lifespan
from idemgate.topics.decorator import MergedFunction, decorate_merge
from idemgate.topics.messages import Delivery
from idemgate.topics.policy import ExpiryOptions, Policy, TopicOptions, policy_from
from idemgate.topics.registry import StoredTopic, stored_topics
from idemgate.topics.topic import Topic

if TYPE_CHECKING:
    from idemgate.membership.member import Membership
    from idemgate.store.endpoint import Endpoint
    from idemgate.subscribers import Entry as StreamEntry
    from idemgate.subscribers import Expiry, ListEntry, PubSubMessage, Subscriber

__all__ = ["CallbackDecorator", "Gate", "OnceDecorator", "SkippingDecorator", "check_gate", "parse_source"]

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")
L = TypeVar("L", bound=LifespanFunction)
S_contra = TypeVar("S_contra", contravariant=True)
M = TypeVar("M", bound="_Method[Any, ..., Any] | _ClassMethod[Any, ..., Any]")
MessageCallback = TypeVar("MessageCallback", bound="Callable[[PubSubMessage], object]")
EntryCallback = TypeVar("EntryCallback", bound="Callable[[StreamEntry], object]")
ListCallback = TypeVar("ListCallback", bound="Callable[[ListEntry], object]")
LARGEST = 512 * 1024 * 1024
"""The largest value of a Redis server, in bytes."""
_METHOD_KINDS: tuple[Any, ...] = (classmethod, staticmethod)


class Gate:
    """One store and one namespace. The constructor opens no connection; the first use does.

    Threads and event loops can share a gate. A forked child opens its own connections. Pickle stores the arguments of a
    gate, with the credentials of its URL. Each process builds one gate from them. A gate with `client`, `clock` or a
    temporary embedded server cannot be pickled.

    Args:
        store: a URL: redis://, rediss://, unix://, redis+cluster://h1:p,h2:p,
            redis+sentinel://h1:p,h2:p/service or embedded://[dir]. Or a redis-py client, sync or async: the gate copies
            its address and credentials and opens its own connections, which never decode, never retry on their own, and
            have timeouts. None: the environment variable IDEMGATE_URL.
        namespace: the first part of every key. Use one for each trust domain.
        timeout: how long a call may take, retries included, while the store does not answer. Then it raises
            StoreUnavailable. A topic recognizes a retry for 30 s. With a longer timeout a trigger needs an
            `event_id`, or it may count twice.
        max_bytes: the largest payload or result, 1 byte to 512 MiB. Deliveries with a larger payload, of a gate with
            a larger limit, are deferred by 30 s and counted as `topic.too_large`.
        durability: what a write must reach before its call returns. None: the memory of the primary. "replicas" or a
            number: that many replicas acknowledged it (WAIT). "fsync": the append-only file on disk (WAITAOF, with
            Redis 7.2 or Valkey and `appendonly yes`). Not on a cluster. The guarantees are in docs/promises.md.
        clock: a test clock that every script uses (`idemgate.testing.Clock`). Such a gate does not report.
        presence: report every 10 s what this process does, for `idemgate worker ls`: one thread for all gates of the
            process, and a connection for each. A gate that is used for less than a second reports nothing. The report
            of a killed process expires after 30 s.
        redact: a function `(kind, text) -> text` for what a report holds of a key (kind "key"), and what a report or
            the history of a scope holds of a failure ("error"). It runs in the thread of the reports, or in that of
            the call. If it raises, nothing of the text is stored. With it histories of scopes and topics have digests
            of keys, and the list of acts has what it returns for keys in the commands of a page (`idemgate.ui.app`).
            None: they hold keys and errors as they are.

    Raises:
        InvalidArgument: an argument is invalid.
        NotConfigured: the client cannot be copied. The first use raises it if neither a store nor IDEMGATE_URL is set.
        NotDurable: a call raises it if its write was not durable within `timeout`.
        ServerRejected: a call raises it if the server can never give the durability. Nothing is written then.
    """

    def __init__(
        self,
        store: str | object | None = None,
        *,
        namespace: str = "default",
        timeout: Duration = "5s",
        max_bytes: int = 262_144,
        durability: DurabilityOption = None,
        clock: Clock | None = None,
        presence: bool = True,
        redact: Redact | None = None,
    ) -> None:
        self.context: Context = Context(
            parse_source(store), check_name(namespace, "namespace"), milliseconds(timeout, "timeout") / 1000,
            check_int("max_bytes", max_bytes, 1, LARGEST), parse_durability(durability, namespace), clock,
        )  # fmt: skip
        self.context.observer = make_observer(self.context, presence, redact)
        self.context.redact = redact
        self.topics: dict[str, Topic] = {}
        self.subscribers: list[Subscriber] = []
        options: dict[str, Any] = {
            "store": store if isinstance(store, str) else None, "namespace": namespace, "timeout": timeout,
            "max_bytes": max_bytes, "durability": durability, "presence": presence, "redact": redact,
        }  # fmt: skip
        self._options: Callable[[], dict[str, Any]] = lambda: options  # no repr shows the password of the URL

    def __reduce__(self) -> Any:
        """Let pickle store what the gate was made from, with the credentials of its URL, but no connection."""
        return rebuild_gate, (type(self), _portable_options(self, self._options()))

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
    def url(self) -> str | None:
        """The URL of the store, for a client of your own, with its password. None if the gate was made from a client.

        That of an embedded server is the URL of its socket. Reading it starts the server. Other processes can use it as
        long as this one lives.

        Raises:
            NotConfigured: no store is configured, or no server program was found.
        """
        source: object = self.context.source
        if source is None or isinstance(source, str):
            return self.context.find_url()
        url: str | None = self._options()["store"]
        return url

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

    @overload
    def once(  # type: ignore[overload-overlap]  # pyright: ignore[reportOverlappingOverload]
        self, func: MergedFunction[P, R], /
    ) -> MergedFunction[P, R]: ...
    @overload
    def once(self, func: M, /) -> M: ...
    @overload
    def once(self, func: Callable[P, R], /) -> OnceFunction[P, R]: ...
    @overload
    def once(  # pyright: ignore[reportOverlappingOverload] - the options of the last two include these
        self,
        key: str | None = None,
        *,
        scope: str | None = None,
        fingerprint: Sequence[str] | KeyCallable | None = None,
        **options: Unpack[NoSkipOptions],
    ) -> OnceDecorator: ...
    @overload
    def once(  # pyright: ignore[reportOverlappingOverload]
        self,
        *,
        key: KeyCallable,
        scope: str | None = None,
        fingerprint: Sequence[str] | KeyCallable | None = None,
        **options: Unpack[NoSkipOptions],
    ) -> OnceDecorator: ...
    @overload
    def once(
        self,
        key: str | None = None,
        *,
        scope: str | None = None,
        fingerprint: Sequence[str] | KeyCallable | None = None,
        **options: Unpack[GuardOptions],
    ) -> SkippingDecorator: ...
    @overload
    def once(
        self,
        *,
        key: KeyCallable,
        scope: str | None = None,
        fingerprint: Sequence[str] | KeyCallable | None = None,
        **options: Unpack[GuardOptions],
    ) -> SkippingDecorator: ...
    def once(
        self,
        *bare: Callable[..., Any] | str | None,
        key: str | KeyCallable | None = None,
        scope: str | None = None,
        fingerprint: Sequence[str] | KeyCallable | None = None,
        **options: Unpack[GuardOptions],
    ) -> Any:
        """Guard a function: run the first call of a key and return its result to the others.

        Above `@gate.merge` it drops copies: a second trigger with the same key of both is a "duplicate" (`key` and
        `retention` only). Below it guards the merged call. `@gate.once` is `@gate.once()`. It works on functions,
        methods, classmethods and staticmethods, sync and async, but not on generator functions.
        Two round trips for a new key, one for a duplicate.

        Write it below a decorator that registers the function, such as `@topic.handler`, `@gate.subscribe`,
        `@gate.stream`, `@gate.consume_list` or `@expiry.handler`. Above one it would guard nothing and is refused. So
        it is above the decorators of Celery, RQ and Dramatiq. Those of web frameworks, such as `@app.post`, leave no
        trace: above them it guards nothing, and raises nothing.

        `charge.inspect(order)` returns the record of the key of `charge(order)`, and `charge.forget(order)` deletes it.
        Both are coroutines if `charge` is async. `charge.key(order)` is the key, and `charge.scope` the scope. Methods
        have them too. Write `@once` above `@classmethod`. Type checkers see only a method: pass it to `once_function`
        of `idemgate.types`.

        The groups of options, of which docs/guides/options.md has examples:

        - What counts as the same call: `key` to `on_missing_key`.
        - What a duplicate gets: `on_done` to `shadow`.
        - What happens after a failure: `on_error` to `at_most_once`.
        - What happens when a lease or the store is lost: `lease` to `sink`.
        - What the history of the scope keeps: `history`.

        Args:
            key: a template over the arguments, "{event[id]}" or "{order.id}", or `key=` and a callable that gets the
                same arguments. None: all arguments, which must be storable. It is checked and compiled at decoration.
                Values count, not how they are written: Decimals 1.0 and 1.00 are one key, and so are 7 and "7". Of a
                model its class and all its fields count. A method needs a key, because its object is in no argument. So
                do a classmethod, an object with `__call__` and a partial with positional arguments.
            scope: keys of one scope share their record. None: the qualified name of the function. A function without
                a unique name (a lambda, a partial, an object with `__call__`) needs a scope.
            fingerprint: names of arguments, or a callable. The same key with another fingerprint raises KeyReused.
            retention: how long a key stays done.
            on_missing_key: for a call whose arguments hold no key "raise" MissingKey, "run" unguarded, or "skip"
                (return None). The last two are counted.
            on_done: "replay" the result (ResultUnavailable if none was stored), "skip" (return None), or "raise"
                AlreadyDone. None: "replay", or "skip" with `at_most_once`. A duplicate gets an equal dataclass or
                pydantic model of the same class; no validator, `__post_init__` or serializer runs again. The return
                annotation must lead to that class: name it, a union with it, or a base class of it, or duplicates get
                ResultUnavailable. If the annotation names no class of yours, they get the dict of its fields, and the
                first one is logged. A function that is annotated to return what cannot be stored is refused.
            on_in_progress, wait: "raise" AlreadyInProgress (with `retry_after`), "skip" (return None), or "wait" for
                at most `wait`. A consumer that redelivers (a topic, stream or list) does so after "skip", too: the
                other owner may still fail. A call that would wait for a run that it is part of raises
                AlreadyInProgress at once. Tasks and threads that inherit the context of the run are part of it.
            on_replay: a function that gets the key and the `Verdict` on each duplicate of a done key. Its errors are
                counted and logged.
            cache_size: the number of done keys that this process caches to answer without a round trip. 0: none. A
                key that another process forgot stays cached until its retention ends.
            max_result_bytes: larger results are not stored, but the key is done. None: `max_bytes` of the gate.
            shadow: run everything, and only count and log the duplicates.
            on_error: "release" (the next caller may run), "keep" (not before the lease ends), "store" (duplicates
                get ReplayedFailure), "share", "complete", or a callable from the exception to one of these. "share"
                releases the key, and the callers that waited for this run (`on_in_progress="wait"`) get SharedFailure.
                With "release" they run one after another. "complete" makes the key done with the result None, and the
                exception is raised: for one by which a function tells its framework something, such as `Ignore` of
                Celery. Cancellation, KeyboardInterrupt and SystemExit always release, unless `on_lease_loss` is
                "hold".
            retry: a tenacity policy for attempts inside one claim. Once the lease is known to be lost, no other attempt
                starts, and LeaseLost is raised.
            max_attempts: starts of a key without success before AttemptsExhausted. None: no limit. The count restarts
                if no attempt follows within `retention`. A run that releases its key does not count if it raised
                DownstreamUnavailable, StoreUnavailable, AlreadyInProgress or LeaseLost: it is not the run's fault.
            at_most_once: mark the key before the run, in one round trip. There is no lease, no result and no second
                attempt after a failure.
            lease: how long a claim is valid without a heartbeat. Heartbeats renew it while the function runs. Make it
                three times the longest time that C code may hold the GIL.
            max_run: how long a run may take, from its start. Then its lease is renewed no more, `current().lease_lost`
                becomes true, and another caller may run the key within a lease and a sixth. A hung function, or a
                coroutine of a closed event loop, else holds its key while the process lives. None: no limit.
            on_lease_loss: after a lost lease "retry", or "hold": raise OutcomeUnknown until `gate.resolve`. "hold"
                also keeps a key whose run was cancelled or ended by KeyboardInterrupt or SystemExit, because the run
                may have had its effect.
            on_lost: what a call gets whose lease was taken over while it ran. "return": its own result, which was not
                stored, and `once.lost` counts it. "raise": LeaseLost. A guard's verdict is "lost" either way.
            on_store_error: while the store is unavailable "raise", "run" unguarded, or guard within this process
                ("local"). Each case is counted. With "local" this process answers duplicates of keys that it ran
                without the store, until the store is back. It keeps 100,000 results or 32 MiB.
            sink: a database that stores the key and the result in the transaction of the effect, such as an inbox of
                idemgate-sql. The function runs inside that transaction. A crash, a lost lease or a Redis that lost its
                data then causes no second effect. A sync function needs a sync sink, an async one an async sink. Not
                with `at_most_once`, `shadow`, or "store" or "complete" of `on_error`. `retry` makes a transaction for
                each attempt.
            history: how many transitions each of the 16 histories of the scope keeps, 64 to 1,000, of all runs: also
                "started", "completed" and "released". `idemgate key show` prints them. They are sent in the background,
                best-effort. None: the last 64 of what is unusual, which costs first calls and replays nothing.

        Raises:
            InvalidArgument: an option is invalid, or a decorator below has registered the function. Calls raise it for
                arguments that give no key, and if the function returns a Future, a Task, a generator or another object
                whose work has not ended. The key is then free, unless `at_most_once` or `on_error` says otherwise.

        The guarded function raises its own errors, and AlreadyInProgress, AlreadyDone, KeyReused, ResultUnavailable,
        ReplayedFailure, SharedFailure, OutcomeUnknown, AttemptsExhausted and StoreError. LeaseLost means that the
        lease had nearly ended before the function, or an attempt of `retry`, could start. With `on_lost="raise"` it
        also means that the function has run. With an option "skip" or `at_most_once` it may return None, and its
        return type is `R | None`.
        """
        func, key = split_bare("once", bare, key)
        checked = once_options(self.context.codec, "once", scope, options)

        def once(func: Any) -> Any:
            if isinstance(func, MergedFunction):
                return self._drop_copies(cast("MergedFunction[..., Any]", func), key, scope, fingerprint, options)
            check_unregistered(func, "gate.once")
            return decorate(self.context, checked, func, key, fingerprint, options)

        return once if func is None else once(func)

    def _drop_copies(
        self,
        merged: MergedFunction[P, R],
        key: str | Callable[..., object] | None,
        scope: str | None,
        fingerprint: object,
        options: GuardOptions,
    ) -> MergedFunction[P, R]:
        """Compose `once` above `merge`. Raises InvalidArgument for an option that triggers do not have."""
        given = {"fingerprint": fingerprint, **options}
        for name, value in given.items():
            if value is not None and name != "retention":
                fix = "Leave it out, or write @once below @merge, which guards the merged call"
                raise InvalidArgument(name, value, "once above merge drops copies of triggers, without this", fix)
        checked = once_options(self.context.codec, "once", scope or merged.topic.name, options)
        inner = merged.__wrapped__
        guarded = decorate(self.context, checked, inner, key, None, options)
        return merged.drop_copies(guarded, compile_key(key, inner), checked.retention)

    def guard(
        self,
        scope: str,
        *,
        key: str | KeyCallable | None = None,
        fingerprint: Sequence[str] | KeyCallable | None = None,
        **options: Unpack[GuardOptions],
    ) -> Guard:
        """Return a guard for the messages of a consumer. Sends nothing to the store.

        `guard.run(key, handler, message)` runs the handler once per key and returns a verdict instead of raising.
        `once` is the same as a decorator; guards and decorators with one scope share their records. A decorated
        function has a verdict too: `charge.verdict(order)`.

        Args:
            scope: keys of one scope share their record.
            key: the key of a message for which `run` gets None: a template such as "{message[id]}", whose one name
                stands for the first argument of the handler, or a callable that gets its arguments.
            fingerprint: the fingerprint of a message for which `run` gets None: fields such as ["message.body"], or a
                callable. Other than the value that `run` takes, text is the name of a field.
            **options: the options of `once`.

        Raises:
            InvalidArgument: an option is invalid.
        """
        checked = once_options(self.context.codec, "guard", scope, options)
        return Guard(
            build_guard_context(self.context, checked, options),
            None if key is None else compile_message_key(key),
            None if fingerprint is None else compile_message_fingerprint(fingerprint),
        )

    def record_settlement(
        self, scope: str, verdict: Verdict[Any], message_id: object, *, error: BaseException | None = None
    ) -> None:
        """Count and log how a consumer settled a message, under the names that all integrations share.

        Call it when the broker has the settlement, or has refused it. Sends nothing to the store.

        | counter | log event of `idemgate.once` | when |
        |---|---|---|
        | `consumer.handled`, `.duplicate`, `.unguarded`, `.skipped` | | acknowledged |
        | `consumer.in_progress` | | given back, because another owner runs the key |
        | `consumer.failed`, `.lost` | the same, a warning with the traceback | given back |
        | `consumer.rejected` | the same, an error with the traceback | a dead letter now |
        | `consumer.unsettled` | the same, a warning | the broker did not take the settlement: it will redeliver |

        Args:
            scope: the scope of the guard, for the log.
            verdict: the verdict on the message.
            message_id: what finds the message in the broker, for the log.
            error: the error with which the settlement failed, or None.
        """
        record_settlement(self.context.counters, scope, verdict, message_id, error)

    def callback(
        self,
        key: str | KeyCallable,
        *,
        scope: str | None = None,
        fingerprint: Sequence[str] | KeyCallable | None = None,
        on_verdict: OnVerdict | None = None,
        on_failure: OnFailure | None = None,
        **options: Unpack[GuardOptions],
    ) -> CallbackDecorator:
        """Guard a callback of another library, such as a handler of redis-py Pub/Sub, paho or pika.

        The first copy of a message runs. The callback returns the stored result to a duplicate, and None to a message
        that is in progress elsewhere. It raises none of the guard's errors, because an exception would end the loop of
        the library. Counters: `callback.*`, one for each outcome of a `Verdict`.

        Args:
            key, scope, fingerprint: see `once`.
            on_verdict: a function that settles the message where the library leaves that to you:
                `on_verdict(verdict, *args, **kwargs)` with the arguments of the callback, in its thread. Act on
                `verdict.action`: "ack", "retry" or "reject". It is called once for each message, before an error is
                raised or logged. An async callback may have an async one. Its own errors are raised.
            on_failure: an error of your own function: "raise" it, or "log" it (`callback.failed`). Errors of the key
                and of the store are logged. None: "raise", or "log" with `on_verdict`.
            **options: the options of `once`.

        Returns:
            A decorator for the function or method, sync or async.

        Raises:
            InvalidArgument: an option is invalid.
        """
        failure = on_failure if on_failure is not None else "raise" if on_verdict is None else "log"
        check_choice("on_failure", failure, OnFailure)
        if on_verdict is not None:
            check_function(on_verdict, "on_verdict")
        checked = once_options(self.context.codec, "callback", scope, options)

        def guard(func: Any) -> Any:
            if type(func) in _METHOD_KINDS:
                return type(func)(guard(func.__func__))
            check_unregistered(func, "gate.callback")
            guarded = decorate(self.context, checked, func, key, fingerprint, options)
            callback = wrap_callback(guarded, self.context.counters, failure, on_verdict)
            mark_registered(callback, "gate.callback")
            return callback

        return guard

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
        return Claim(self.context, claim_request(self.context, key, fingerprint, options)).acquire()

    def claim_many(
        self,
        keys: Iterable[Key],
        *,
        fingerprints: Iterable[object] | None = None,
        keep: Callable[[float], object] | None = None,
        **options: Unpack[ClaimOptions],
    ) -> ClaimBatch:
        """Claim many keys together and return their claims in order.

        One round trip, or one to each node of a cluster in parallel; more where the stored data is large. Each claim
        is atomic, the batch is not. A script call claims up to 100 keys. Of equal keys the first is granted; the others
        are "in_progress" until it ends. Use it in a `with` block, in which a heartbeat renews the claims; see
        `ClaimBatch`. End them with `complete_many` or one by one.

        Args:
            keys: the idempotency keys.
            fingerprints: a value for each key that identifies its payload, or None; see `Guard.run`. Only neighbours
                with the same one share a script call, so different ones cost the server about as much as single claims.
            keep: a function that gets the seconds for which the broker must not redeliver the messages from now on,
                those of the lease. In a `with` block it is called soon after the begin, and every third of the lease
                until the end, or until all leases are lost. See `Guard.run`.
            **options: see `ClaimOptions`.

        Returns:
            A claim for each key. KeyReused, OutcomeUnknown, AttemptsExhausted, LeaseLost or UnexpectedData of one key
            is the `error` of its claim.

        Raises:
            InvalidArgument: a key or a fingerprint is invalid; the error names its index. Or `keep` is no plain
                function. Nothing was sent.
            StoreError: the store did not answer. Granted claims are released if it can be reached, else their leases
                expire.
        """
        if keep is not None:
            check_blocking(keep, "keep", "Pass a plain function, or use gate.aio")
        requests = claim_requests(self.context, keys, fingerprints, options)
        return ClaimBatch(self.context, [Claim(self.context, request) for request in requests], keep).acquire()

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

        Each mark is atomic, the batch is not. Of equal keys only the first one can be first.

        Raises:
            UnexpectedData: a key holds other data. Other keys may be marked.
            StoreError: the store did not answer. Another call may then return False for keys that were marked.
        """
        records, calls = mark_calls(self.context, keys, retention, scope)
        return join_marks(records, self.context.link.run_each(calls))

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
        return run_plan(inspect(self.context, key, scope), self.context.link.run_all)

    def cancel(self, key: Key, *, scope: str = "claim") -> bool:
        """Ask the owner of a key to stop. Two round trips.

        The owner learns it with its next heartbeat, after a sixth of its lease at most: `current().cancel_requested`,
        `claim.cancel_requested`. It decides what to do; its claim stays. A later attempt is not cancelled.

        Returns:
            False if no owner has a live lease.
        """
        return run_plan(cancel(self.context, key, scope), self.context.link.run_all)

    def forget(self, key: Key, *, scope: str = "claim", force: bool = False) -> bool:
        """Delete the record of a key, so that its next call runs.

        Returns:
            False if there was no record.

        Raises:
            AlreadyInProgress: an owner's lease is valid. With `force` the record is deleted anyway, and two owners
                may run at once. A claim that is younger than 5 seconds is looked at for 1.2 seconds before that.
        """
        return run_plan(forget(self.context, key, scope, force), self.context.link.run_all)

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
                The store knows it a sixth of a lease, and at least a second, after the first lease that one of them
                renews. For `done=False` it is how long the attempts are counted.
            scope: the scope of the key.

        Returns:
            False if there is nothing to decide.

        Raises:
            AlreadyInProgress: an owner's lease is valid.
            InvalidArgument: `retention` is missing, and the store does not know the scope.
        """
        return run_plan(resolve(self.context, key, scope, done, result, retention), self.context.link.run_all)

    def topic(self, name: str, **options: Unpack[TopicOptions]) -> Topic:
        """Return a topic: a named stream of keyed messages with one policy. Sends nothing to the store.

        The same name returns the same topic. Its first use compares the policy with the stored one, in one round
        trip. Without any option the stored policy is used, or the default one for a new topic. After PolicyChanged the
        next declaration replaces the refused one.

        Type checkers know the payload of a topic if annotated: `orders: Topic[Order] = gate.topic("orders")`. Where
        deliveries hold something else than triggers, name both: `lines: Topic[str, list[str]]` for "append". Nothing
        is converted: a model is delivered as the dict of its fields.

        The groups of options, of which docs/guides/options.md has examples:

        - When a message is delivered: `window` to `merge`.
        - What happens after a failure: `lease` to `max_dead_letters`.
        - In which order and how fast: `concurrency` to `retry_penalty`.
        - What is stored: `dedup_retention` to `revision`.

        Args:
            name: the name of the topic.
            window: merge the triggers of a key within this time of the *first* into one delivery at its end.
            quiet, max_delay, max_size: deliver when a key had no trigger for `quiet`. `max_delay` after the first
                trigger or `max_size` triggers end the wait. One of both is required, or `max_delay=None`: then a key
                with steady triggers is never delivered. Without `window`, `quiet` and `max_size` a message is delivered
                as soon as possible. Pending triggers still merge.
            edge: "trailing" delivers at the end of the window. "leading" delivers the first trigger at once. It drops
                and counts the others of the window. A message that is cancelled or dies ends its window, also if its
                last lease lapsed and no worker has found it yet. Triggers that were dropped before are not restored.
            merge: how payloads merge: "last", "first", "append", "union", "count", "sum", "min", "max", `append(cap)`
                or `union(cap)`; or a dict of field -> policy, in which "*" is for all other fields (default: last).
            lease: how long a delivery is valid without a heartbeat; see `once`.
            max_attempts: deliveries of a message before it becomes a dead letter. A trigger that joins a failed message
                resets them. Unless `merge` is "last", the message has twice as many in all.
            backoff: the delays between them. It is one duration or a list of durations whose last one repeats. It may
                be a tenacity wait strategy. None: exponential with full jitter from 1 s to 10 min.
            dead_retention, max_dead_letters: the age and the number of dead letters in a slot. Burying a message
                discards at most 100 that are older or beyond this number. `expired` counts them.
            concurrency: the most deliveries in flight over all workers and slots. None: no limit.
            group_concurrency: the most deliveries in flight of one group.
            rate: the most deliveries over time of all workers, such as "100/s".
            burst: the most deliveries at once after a pause.
            adaptive: a limit that each worker finds by measurement; see `Adaptive`.
            priority, priority_boost: order due messages by priority. One point counts like an age of one boost.
            retry_penalty: how many points of priority each failed attempt takes away, so that failing work does not
                stay in front. It needs `priority`.
            dedup_retention: how long a `version` is stored. An `event_id` is stored for as long after the due time of
                its message.
            result_retention: how long `topic.result` finds what the handler returned, at least. None: results are not
                stored. A value that is not stored (its type or its size) is counted and logged. Forwarded messages
                have none.
            history: how many transitions each slot keeps, 64 to 1,000, of all messages: triggers, deliveries and their
                ends. `trace` and `idemgate key show` read them. Calls then take 1.5 to 3.5 times the instructions of
                the server. None: the last 64 of what is unusual, which costs the usual path nothing.
            slots: the number of shards of a new topic, a power of two. `reshard` changes it later. Any current or
                former number is accepted.
            revision: raise it with each change of the policy. The highest revision is stored, and programs with a lower
                one adopt it (logged once). Another policy of the same revision raises PolicyChanged. No revision
                changes `slots` or `merge`.

        Raises:
            InvalidArgument: an option is invalid.
            PolicyChanged: this program has declared the topic with another policy of the same revision. The first use
                raises it if the stored one differs.
        """
        declared, plain = policy_from("topic", options)
        return self._declare(check_name(name, "topic"), declared, plain)

    def trace(self, event_id: Key, *, topic: str | None = None, key: Key | None = None) -> EventTraces:
        """Return what became of the triggers with an event id: the deliveries that took them, and how these ended.

        It knows the topics with `history=` only, and of these what their histories still have; see `EventTraces`. Each
        slot of these topics is read. Not atomic.

        Args:
            event_id: the `event_id` of the triggers.
            topic: only in this topic. None: in all.
            key: only triggers of this key. Needed for a key of more than 128 bytes. None: of all keys.

        Raises:
            InvalidArgument: the store has no such topic.
            DecodeError: a stored transition or policy is damaged.
        """
        return run_plan(trace_event(self.context, event_id, topic, key), self.context.link.run_all)

    def stored_topics(self, *, active: bool = False) -> list[StoredTopic]:
        """Return every topic that the store holds in this namespace, by name: policy, slots, depth, counters.

        Two round trips on one server; nothing is written. Topics are not read at the same moment. An empty topic stays
        in the list until `topic.delete()`.

        Args:
            active: only topics that hold a message or a dead letter, are paused, or are being changed.
        """
        return run_plan(stored_topics(self.context, active), self.context.link.run_all)

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
        deliver: Callable[[Delivery[dict[str, Any]]], object] | None = None,
        **options: Unpack[TopicOptions],
    ) -> Callable[[Callable[P, R]], MergedFunction[P, R]]:
        """Decorate a function so that its triggers merge into one later call.

        `f.trigger(...)` takes the arguments of the function. A worker later calls `f` once with the merged arguments.
        `f(...)` still calls the function directly.

        Args:
            key: the key of a trigger; see `once`.
            name: the name of the topic. None: the qualified name of the function, as for the scope of `once`.
            deliver: a handler that gets the delivery instead of a call of the function, such as one that enqueues it in
                a task queue. Its payload is the dict of the merged arguments, in which a model is the dict of its
                fields. It may be async. Another attempt has the same `delivery.id`.
            **options: see `topic`. `merge` may name arguments.

        Raises:
            InvalidArgument: an option is invalid.
        """

        policy_from("merge", options)

        def decorate(func: Callable[P, R]) -> MergedFunction[P, R]:
            return decorate_merge(self.topic, func, key, name, options, deliver)

        return decorate

    def subscribe(
        self,
        channel: str,
        *,
        pattern: bool | None = None,
        concurrency: int = 32,
        backlog: int = 10_000,
    ) -> Callable[[MessageCallback], MessageCallback]:
        """Register a callback for the messages of a Redis Pub/Sub channel.

        `gate.run()` or `async with gate.aio.subscribers()` starts the subscription. Every replica of the program
        receives every message. With `once` below this decorator, one replica runs it; duplicates and keys in progress
        elsewhere are dropped. Pub/Sub stores nothing: a message is lost after an error of the callback (logged), or
        while the connection is down. The connection is restored. Counters: `channel.*`.

        Args:
            channel: the channel or pattern.
            pattern: True subscribes to all matching channels, "prices.*". None: False; a name like a pattern is
                invalid.
            concurrency: the most callbacks at once. 1 keeps the order in this process, but replicas do not wait for
                each other: pass `version=` to a trigger, or read the state in the handler.
            backlog: the most waiting messages. Further ones are dropped and counted (`channel.dropped`).

        Returns:
            A decorator that returns the function, sync or async, unchanged.

        Raises:
            InvalidArgument: an option is invalid.
        """

        _check_parentheses("subscribe", channel)

        def register(func: MessageCallback) -> MessageCallback:
            from idemgate.subscribers import Channel

            subscriber = Channel(self.context, channel, func, pattern=pattern, concurrency=concurrency, backlog=backlog)
            self._register(subscriber)
            mark_registered(func, "gate.subscribe")
            return func

        return register

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
        max_dead_letters: int = 10_000,
    ) -> Callable[[EntryCallback], EntryCallback]:
        """Register a callback for the entries of a Redis stream, as a member of a consumer group.

        One replica gets each entry, at least once. Guard the callback with `once` to run it once. An entry is
        acknowledged when the callback has returned, or when its guard found the key done. While another owner runs
        the key, the entry stays pending until that lease may end. After another error it stays pending for `reclaim`,
        or the delay of `Retry` if that is shorter. After a permanent error (KeyReused, `Bury`, a stored failure, ...)
        or `max_deliveries` attempts it moves to the dead stream, with reason and error. Counters: `stream.*`.

        Args:
            stream: the stream.
            group: the consumer group. It is created if missing, with the stream.
            consumer: the name of this member, unique among live members. None: a new name, removed at the end of the
                run.
            start: where a new group begins: "0" at the first entry, "$" at new entries.
            concurrency: the most callbacks at once.
            reclaim: take over an entry that was not renewed for this long. Use at least the lease of the guard, and
                more than anything that blocks the event loop. It is renewed while the callback runs.
            max_deliveries: attempts before an entry is dead.
            dead: the dead stream. None: the name of the stream and ":dead".
            max_dead_letters: the most entries of the dead stream.

        Returns:
            A decorator that returns the function, sync or async, unchanged.

        Raises:
            InvalidArgument: an option is invalid.
        """

        def register(func: EntryCallback) -> EntryCallback:
            from idemgate.subscribers import Stream

            subscriber = Stream(
                self.context, stream, func, group=group, consumer=consumer, start=start, concurrency=concurrency,
                reclaim=reclaim, max_deliveries=max_deliveries, dead=dead, max_dead_letters=max_dead_letters,
            )  # fmt: skip
            self._register(subscriber)
            mark_registered(func, "gate.stream")
            return func

        return register

    def consume_list(
        self,
        name: str,
        *,
        pop: Literal["left", "right"] = "left",
        concurrency: int = 32,
        reclaim: Duration = "30s",
        max_deliveries: int = 17,
        max_dead_letters: int = 10_000,
    ) -> Callable[[ListCallback], ListCallback]:
        """Register a callback for the entries of a Redis list.

        One replica gets each entry, at least once. Guard the callback with `once` to run it once. The list may also be
        the target of `topic.forward("list")`. An entry leaves the list when a consumer takes it. It is stored beside
        the list until the callback has returned, or its guard found the key done. While another owner runs the key, the
        entry is delayed until that lease may end. After another error it is delayed for `reclaim`, or the delay of
        `Retry`. After a permanent error (KeyReused, `Bury`, a stored failure, ...) or `max_deliveries` attempts it
        becomes a dead letter. Counters: `list.*`.

        Dead letters are a list of JSON objects with `id`, `deliveries`, `reason`, `error`, `at` and `data`, or
        `data_base64` for data that is not UTF-8. Its name is that of the list and ":dead". The other keys beside the
        list are named in the same way. If the name has no hash tag, they have it as theirs: `{orders}:dead`.

        With `concurrency=1` and one replica the order of the list is kept, except for retries.

        Args:
            name: the list.
            pop: the end from which to take: "left" if producers use RPUSH, as `forward` does, "right" for LPUSH.
            concurrency: the most callbacks at once.
            reclaim: the lease of a taken entry, renewed while the callback runs. After it another consumer takes the
                entry of a consumer that died. Use at least the lease of the guard, and more than anything that blocks
                the event loop.
            max_deliveries: attempts before an entry is dead.
            max_dead_letters: the most dead letters. The oldest are dropped and counted (`list.dead_trimmed`).

        Returns:
            A decorator that returns the function, sync or async, unchanged.

        Raises:
            InvalidArgument: an option is invalid, or the name has a closing brace and no hash tag.
        """

        _check_parentheses("consume_list", name)

        def register(func: ListCallback) -> ListCallback:
            from idemgate.subscribers import ListQueue

            subscriber = ListQueue(
                self.context, name, func, pop=pop, concurrency=concurrency, reclaim=reclaim,
                max_deliveries=max_deliveries, max_dead_letters=max_dead_letters,
            )  # fmt: skip
            self._register(subscriber)
            mark_registered(func, "gate.consume_list")
            return func

        return register

    def on_expired(
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
        """Handle the keys of a pattern that expire. Register the callback with `@expiry.handler`.

        One of all listeners handles each key. Keys that expire without a listener are handled later. Run it with
        `gate.run()`, or with both `gate.aio.subscribers()` and `gate.aio.worker()`. Subscribers fill the due set,
        which is the topic `name`, and workers of that topic run the handler. Counters: `expiry.*`.

        A key enters the due set when its time to live is set, if the server reports that (flag `g`), or with `track`,
        and at the latest with the next scan. A key is missed only if it was not tracked, lived between two scans, and
        expired while no listener received its event. A deletion is no expiry if the server reports it (flag `g`) or
        after `untrack`. Otherwise it counts as one, because it looks the same.

        Args:
            name: the name of the due set.
            pattern: a pattern as in SCAN, "session:*".
            notifications: how to treat notify-keyspace-events, which needs "Ex" and should have "g". "check" raises
                ServerRejected at the start. "set" adds the missing flags. "assume" is for users that may not read it.
            scan: the interval between scans of all keys of the database by one of the listeners. Each listener also
                scans at its start and after each gap.
            retention: how long a handled key is stored, at least 10 s.
            backlog: the most waiting events. Further ones are dropped and counted.
            **options: `slots`, `lease`, `max_attempts` and `backoff`; see `topic`.

        Raises:
            InvalidArgument: an option is invalid.
        """
        from idemgate.subscribers import Expiry
        from idemgate.subscribers.expiry.rules import ECHO_MS, MERGE

        if name in self.topics:
            raise InvalidArgument(
                "name", name, "a topic of this gate has this name", "Choose another name for the due set"
            )

        def make_topic() -> Topic:
            return self.topic(name, merge=MERGE, dedup_retention=ECHO_MS / 1000, **options)

        expiry = Expiry(
            self.context, name, make_topic, pattern, notifications=notifications, scan=scan, retention=retention,
            backlog=backlog,
        )  # fmt: skip
        self._register(expiry)
        return expiry

    def add_subscriber(self, subscriber: Subscriber) -> None:
        """Register a consumer loop of your own, such as one of Kafka, SQS or NATS.

        `gate.run()` and `gate.aio.subscribers()` run it with the other subscribers, with their signals and grace time.

        Args:
            subscriber: an object with the method `run` of `idemgate.types.Subscriber`.

        Raises:
            InvalidArgument: it has no coroutine function `run` with these arguments.
        """
        run = getattr(subscriber, "run", None)
        if not is_async(run) or not _accepts_stop(run):
            fix = "Pass an object with `async def run(self, stop, *, grace=30.0, ready=None)`"
            raise InvalidArgument("subscriber", subscriber, "not a subscriber", fix)
        self._register(subscriber)

    def _register(self, subscriber: Subscriber) -> None:
        self.context.runners.warn_if_late("subscriber", None, repr(subscriber))
        self.subscribers.append(subscriber)

    def lifespan(self, func: L) -> L:
        """Register a function that makes what handlers need, such as a pool of connections, and cleans it up.

        It is a generator function without parameters, blocking or async, that yields once. What is before the `yield`
        runs in the event loop before a worker takes its first message and before subscribers read, and what is after
        it when the last handler has ended. A handler that outlives `grace` may still run then. All workers and
        subscribers in one event loop share one run of it. Several functions are entered in the order of their
        declaration, and left in reverse.

            @gate.lifespan
            async def resources():
                async with httpx.AsyncClient() as client:
                    state.client = client
                    yield

        An exception before the `yield` ends the worker: `run` and `async with gate.aio.worker()` raise it. One after it
        is raised when the worker has stopped. The failure of a worker is not raised at the `yield`, so no `finally` is
        needed for it.

        Raises:
            InvalidArgument: it is no such function. Leave out `@contextmanager`.
        """
        check_lifespan(func)
        self.context.runners.warn_if_late("lifespan", None, repr(func))
        self.context.lifespans.add(func)
        return func

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

    def close(self) -> None:
        """Stop the heartbeats and close the blocking connections. `await gate.aio.close()` closes the async ones."""
        self.context.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_gate(gate: object, *kinds: type[object]) -> None:
    """Check the gate that an integration gets. The error shows no URL, which may hold a password.

    Args:
        gate: the argument.
        kinds: the classes that the integration takes: `AioGate` is that of `gate.aio`. None given: `Gate`.

    Raises:
        InvalidArgument: it is something else, such as a URL or a class.
    """
    if not isinstance(gate, kinds or Gate):
        fix = "Pass the gate itself" if isinstance(gate, AioGate) else 'Pass Gate("redis://...")'
        raise InvalidArgument("gate", gate if isinstance(gate, type) else type(gate), "not a Gate", fix)


def parse_source(store: object | None) -> Endpoint | str | None:
    """Return the endpoint of a URL or client. An embedded server stays a URL until the first use."""
    if store is None:
        return None
    if not isinstance(store, str):
        from idemgate.store.endpoint import endpoint_from_client  # late: importing redis-py is slow

        return endpoint_from_client(store)
    if store.startswith("embedded:"):
        return store
    from idemgate.store.url import endpoint_from_url

    return endpoint_from_url(store)


def _check_parentheses(method: str, name: object) -> None:
    """Raise InvalidArgument if a function is in the place of the name: it would never be registered."""
    if callable(name):
        fix = f'Write @gate.{method}("name") above it'
        raise InvalidArgument(method, getattr(name, "__qualname__", name), "a function in the place of a name", fix)


def _accepts_stop(run: Any) -> bool:
    """Return True if the method can be called as `Subscriber.run`."""
    try:
        inspection.signature(run).bind(None, grace=0.0, ready=None)
    except TypeError:
        return False
    return True


_rebuilt: WeakValueDictionary[tuple[Any, ...], Gate] = WeakValueDictionary()
_lock = threading.Lock()


def _portable_options(gate: Gate, options: dict[str, Any]) -> dict[str, Any]:
    """Return the constructor arguments with which another process builds a gate of the same store.

    Raises:
        PicklingError: the gate has something that exists in this process only.
    """
    url = options["store"]
    if url is None and gate.context.source is not None:
        raise _refusal(gate, "it was made from a client", "Make it from a URL or IDEMGATE_URL")
    if gate.context.clock is not None:
        raise _refusal(gate, "it has a clock of this process", "Leave out clock=")
    if url is not None and url.startswith("embedded:"):
        from idemgate.store.embedded.server import directory_of

        if (directory := directory_of(url)) is None:
            raise _refusal(gate, "its embedded server is temporary and of this process", "Name a directory in the URL")
        url = f"embedded://{quote(str(Path(directory).resolve()))}"
    return options | {"store": url}


def _refusal(gate: Gate, reason: str, fix: str) -> PicklingError:
    return PicklingError(
        f"cannot pickle {gate}: {reason}. {fix}, or create the gate in a module that each process imports"
    )


def rebuild_gate(cls: type[Gate], options: dict[str, Any]) -> Gate:
    """Return the gate of these arguments. All that this process unpickles with the same arguments are one gate."""
    key = (cls, *options.items())
    with _lock:
        gate = _rebuilt.get(key)
        if gate is None:
            gate = _rebuilt[key] = cls(**options)
        return gate


class _Method(Protocol[S_contra, P, R_co]):
    """A function whose first parameter is named `self`."""

    def __call__(_me, self: S_contra, *args: P.args, **kwargs: P.kwargs) -> R_co: ...  # noqa: N805


class _ClassMethod(Protocol[S_contra, P, R_co]):
    """A function whose first parameter is named `cls`."""

    def __call__(_me, cls: S_contra, *args: P.args, **kwargs: P.kwargs) -> R_co: ...  # noqa: N805


class OnceDecorator(Protocol):
    """The decorator that `gate.once(...)` returns.

    A method keeps its type. With another one it could not override a method or fulfil a protocol.
    """

    @overload
    def __call__(  # type: ignore[overload-overlap]  # pyright: ignore[reportOverlappingOverload]
        self, func: MergedFunction[P, R], /
    ) -> MergedFunction[P, R]: ...
    @overload
    def __call__(self, func: M, /) -> M: ...
    @overload
    def __call__(self, func: Callable[P, R], /) -> OnceFunction[P, R]: ...


class SkippingDecorator(Protocol):
    """The decorator that `gate.once(...)` returns if an option lets calls return None: a "skip", or `at_most_once`."""

    @overload
    def __call__(self, func: MergedFunction[P, R], /) -> MergedFunction[P, R]: ...  # type: ignore[overload-overlap]
    @overload
    def __call__(  # type: ignore[overload-overlap]  # pyright: ignore[reportOverlappingOverload]
        self, func: _Method[S, P, Coroutine[Any, Any, R]], /
    ) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R | None]]: ...
    @overload
    def __call__(self, func: _Method[S, P, R], /) -> Callable[Concatenate[S, P], R | None]: ...
    @overload
    def __call__(  # type: ignore[overload-overlap]
        self, func: _ClassMethod[S, P, Coroutine[Any, Any, R]], /
    ) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R | None]]: ...
    @overload
    def __call__(self, func: _ClassMethod[S, P, R], /) -> Callable[Concatenate[S, P], R | None]: ...
    @overload
    def __call__(
        self, func: Callable[P, Coroutine[Any, Any, R]], /
    ) -> OnceFunction[P, Coroutine[Any, Any, R | None]]: ...
    @overload
    def __call__(self, func: Callable[P, R], /) -> OnceFunction[P, R | None]: ...


class CallbackDecorator(Protocol):
    """The decorator that `gate.callback(...)` returns."""

    @overload
    def __call__(self, func: Callable[P, Coroutine[Any, Any, R]], /) -> Callable[P, Coroutine[Any, Any, R | None]]: ...
    @overload
    def __call__(self, func: Callable[P, R], /) -> Callable[P, R | None]: ...
