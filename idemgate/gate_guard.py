"""The methods of a gate that guard functions: `once`, `guard` and `callback`."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, Unpack, cast, overload

from idemgate.core.key_template import KeyCallable, compile_key
from idemgate.core.scopes import check_unregistered, mark_registered
from idemgate.core.validation import check_function
from idemgate.errors import InvalidArgument
from idemgate.guard.callback import OnFailure, OnVerdict, wrap_callback
from idemgate.guard.decorator import OnceFunction
from idemgate.guard.guard import Guard
from idemgate.guard.options import (
    GuardOptions,
    NoSkipOptions,
    build_driver,
    check_choice,
    decorate,
    once_options,
    split_bare,
)
from idemgate.store.context import Context
from idemgate.topics.decorator import MergedFunction

__all__ = ["CallbackDecorator", "GuardMethods", "OnceDecorator", "SkippingDecorator"]

P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
S = TypeVar("S")
S_contra = TypeVar("S_contra", contravariant=True)
_METHOD_KINDS: tuple[Any, ...] = (classmethod, staticmethod)


class _Method(Protocol[S_contra, P, R_co]):
    """A function whose first parameter is named `self`."""

    def __call__(_me, self: S_contra, *args: P.args, **kwargs: P.kwargs) -> R_co: ...  # noqa: N805


class _ClassMethod(Protocol[S_contra, P, R_co]):
    """A function whose first parameter is named `cls`."""

    def __call__(_me, cls: S_contra, *args: P.args, **kwargs: P.kwargs) -> R_co: ...  # noqa: N805


M = TypeVar("M", bound=_Method[Any, ..., Any] | _ClassMethod[Any, ..., Any])


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


class GuardMethods:
    """The part of `Gate` that guards functions."""

    context: Context

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
        `@gate.stream`, `@gate.list` or `@expiry.handler`. Above one it would guard nothing and is refused.

        `charge.inspect(order)` returns the record of the key of `charge(order)`, and `charge.forget(order)` deletes it.
        Both are coroutines if `charge` is async. `charge.key(order)` is the key, and `charge.scope` the scope. Methods
        have them too. Write `@once` above `@classmethod`. Type checkers see only a method: pass it to `once_function`
        of `idemgate.types`.

        Args:
            key: a template over the arguments, "{event[id]}" or "{order.id}", or `key=` and a callable that gets the
                same arguments. None: all arguments, which must be storable. It is checked and compiled at decoration.
                Values count, not how they are written: Decimals 1.0 and 1.00 are one key, and so are 7 and "7". Of a
                model its class and all its fields count. A method needs a key, because its object is in no argument.
            scope: keys of one scope share their record. None: the qualified name of the function. A function without
                a unique name (a lambda, a partial, an object with `__call__`) needs a scope.
            fingerprint: names of arguments, or a callable. The same key with another fingerprint raises KeyReused.
            retention: how long a key stays done.
            lease: how long a claim is valid without a heartbeat. Heartbeats renew it while the function runs. Make it
                three times the longest time that C code may hold the GIL.
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
            on_error: "release" (the next caller may run), "keep" (not before the lease ends), "store" (duplicates
                get ReplayedFailure), "share", or a callable from the exception to one of these. "share" releases the
                key, and the callers that waited for this run (`on_in_progress="wait"`) get SharedFailure. With
                "release" they run one after another. Cancellation, KeyboardInterrupt and SystemExit always release,
                unless `on_lease_loss` is "hold".
            on_lease_loss: after a lost lease "retry", or "hold": raise OutcomeUnknown until `gate.resolve`. "hold"
                also keeps a key whose run was cancelled or ended by KeyboardInterrupt or SystemExit, because the run
                may have had its effect.
            on_lost: what a call gets whose lease was taken over while it ran. "return": its own result, which was not
                stored, and `once.lease_lost` counts it. "raise": LeaseLost. A guard's verdict is "lost" either way.
            on_missing_key: for a call whose arguments hold no key "raise" MissingKey, "run" unguarded, or "skip"
                (return None). The last two are counted.
            on_replay: a function that gets the key and the `Verdict` on each duplicate of a done key. Its errors are
                counted and logged.
            on_store_error: while the store is unavailable "raise", "run" unguarded, or guard within this process
                ("local"). Each case is counted. With "local" this process answers duplicates of keys that it ran
                without the store, until the store is back. It keeps 100,000 results or 32 MiB.
            max_attempts: starts of a key without success before AttemptsExhausted. None: no limit. The count restarts
                if no attempt follows within `retention`.
            max_run: how long a run may take, from its start. Then its lease is renewed no more, `current().lease_lost`
                becomes true, and another caller may run the key within a lease and a sixth. A hung function, or a
                coroutine of a closed event loop, else holds its key while the process lives. None: no limit.
            retry: a tenacity policy for attempts inside one claim. Once the lease is known to be lost, no other attempt
                starts, and LeaseLost is raised.
            at_most_once: mark the key before the run, in one round trip. There is no lease, no result and no second
                attempt after a failure.
            max_result_bytes: larger results are not stored, but the key is done. None: `max_bytes` of the gate.
            cache_size: the number of done keys that this process caches to answer without a round trip. 0: none. A
                key that another process forgot stays cached until its retention ends.
            shadow: run everything, and only count and log the duplicates.
            sink: a database that stores the key and the result in the transaction of the effect, such as an inbox of
                idemgate-sql. The function runs inside that transaction. A crash, a lost lease or a Redis that lost its
                data then causes no second effect. A sync function needs a sync sink, an async one an async sink. Not
                with `at_most_once`, `shadow` or `on_error="store"`. `retry` makes a transaction for each attempt.

        Raises:
            InvalidArgument: an option is invalid, or a decorator below has registered the function. Calls raise it for
                arguments that give no key, and if the function returns a Future, a Task, a generator or another object
                whose work has not ended. The key is then free.

        The guarded function raises its own errors, and AlreadyInProgress, AlreadyDone, KeyReused, ResultUnavailable,
        ReplayedFailure, SharedFailure, OutcomeUnknown, AttemptsExhausted and StoreError. LeaseLost means that the
        lease had nearly ended before the function could start; it did not run. With an option "skip" or `at_most_once`
        it may return None, and its return type is `R | None`.
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

    def guard(self, scope: str, **options: Unpack[GuardOptions]) -> Guard:
        """Return a guard for the messages of a consumer. Sends nothing to the store.

        `guard.run(key, handler, message)` runs the handler once per key and returns a verdict instead of raising.
        `once` is the same as a decorator; guards and decorators with one scope share their records.

        Args:
            scope: keys of one scope share their record.
            **options: the options of `once`.

        Raises:
            InvalidArgument: an option is invalid.
        """
        return Guard(build_driver(self.context, once_options(self.context.codec, "guard", scope, options), options))

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
