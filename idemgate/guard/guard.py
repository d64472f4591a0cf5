"""The guard of a consumer: it runs a handler once per key and returns a verdict."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from inspect import CO_COROUTINE
from threading import Thread
from typing import Any, TypeVar, TypeVarTuple, overload

from idemgate.core.codec import digest
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.key_template import FingerprintSpec, KeySpec
from idemgate.core.keys import Key
from idemgate.core.validation import check_blocking, check_function, is_async
from idemgate.core.verdict import Verdict
from idemgate.errors import InvalidArgument, MissingKey
from idemgate.guard.call import run, run_async, run_without_key, run_without_key_async
from idemgate.guard.context import GuardContext
from idemgate.guard.judge import judge
from idemgate.guard.keep import Keep, run_kept, run_kept_async
from idemgate.guard.request import Request
from idemgate.guard.run_many import run_many, run_many_async

__all__ = ["AioGuard", "Guard", "Keep"]

R = TypeVar("R")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
_calls: set[asyncio.Task[Any]] = set()
"""The calls of plain functions: an event loop refers to its tasks weakly."""


class _BaseGuard:
    """The common part of `Guard` and `AioGuard`. `key` and `fingerprint` find those of a message."""

    def __init__(
        self, guard: GuardContext, key: KeySpec | None = None, fingerprint: FingerprintSpec | None = None
    ) -> None:
        self._guard = guard
        self._key = key
        self._fingerprint = fingerprint

    @property
    def scope(self) -> str:
        """The scope of the keys."""
        return self._guard.options.scope

    def _build_request(
        self, key: Key | None, fingerprint: object, message: tuple[Any, ...], wait_ms: int | None = None
    ) -> Request | MissingKey | Verdict[Any]:
        """Return the request of a message. Without a key return the error, and without a valid one the verdict."""
        guard = self._guard
        try:
            if key is None and self._key is not None:
                key = self._key.of(None, message, {})
            if fingerprint is not None:
                packed = digest(fingerprint, name="fingerprint")
            else:
                packed = b"" if self._fingerprint is None else self._fingerprint.of(None, message, {})
            return Request(guard.options, guard.claims, key, packed, wait_ms)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
        except MissingKey as error:
            return error
        except Exception as error:  # noqa: BLE001 - a callable of the user may raise anything, and would raise it again
            return Verdict("rejected", None, error)


class Guard(_BaseGuard):
    """A guard for the messages of a consumer, from `gate.guard(...)`. Threads can share it."""

    @functools.cached_property
    def aio(self) -> AioGuard:
        """The same guard for async handlers: `await guard.aio.run(...)`. InvalidArgument if its sink is not async."""
        if (sink := self._guard.options.sink) is not None and not is_async(sink.apply):
            raise InvalidArgument("sink", sink, "not async", "Use guard.run, or pass an async sink to gate.guard")
        return AioGuard(self._guard, self._key, self._fingerprint)

    def run(
        self,
        key: Key | None,
        handler: Callable[[*Ts], R],
        *message: *Ts,
        fingerprint: object | None = None,
        keep: Callable[[float], object] | None = None,
        wait: Duration | None = None,
    ) -> Verdict[R]:
        """Run a handler once per key and return the verdict on its message.

        Two round trips for a new key, one for a duplicate. Inside the handler `current()` returns its execution.

        Args:
            key: the idempotency key. None: the `key` of the guard, if it has one. A missing or empty one: see
                `on_missing_key`.
            handler: the function to run, `handler(*message)`.
            *message: its arguments.
            fingerprint: a value that identifies the payload; the same key with another one is "rejected". Values of
                different types differ, also "one" and b"one": pass the body as it arrived. None: the `fingerprint` of
                the guard, or none.
            keep: a function that gets the seconds for which the broker must not redeliver the message from now on,
                those of the lease. It is called in its own thread once the handler has run for 0.1 s, then every third
                of the lease until `run` returns. With a wait for another owner that counts from the beginning. It is
                called no more when the lease is lost, or after `max_run`: without that option a handler that never ends
                keeps its message as long as its key. `run` waits up to 2 s for a call that has begun. Errors are
                counted (`once.keep_failed`) and logged.
            wait: how long to wait while another owner runs the key. None: the option `on_in_progress`.

        Returns:
            The verdict. Errors of the handler, of the key and of the store are its `error`. A handler that returns a
            Future or a generator is "rejected": its work has not ended. A duplicate gets a model as a dict.

        Raises:
            InvalidArgument: `handler` or `keep` is no plain function, or `wait` no duration. Nothing was sent.
            BaseException: the handler raised an exception that is no Exception: KeyboardInterrupt, SystemExit or one
                of another library. The claim was released, unless `on_lease_loss` is "hold". `on_error` does not
                apply.
        """
        check_blocking(handler, "handler", _USE_AIO)
        if keep is not None:
            check_blocking(keep, "keep", _USE_AIO)
        if (sink := self._guard.options.sink) is not None and is_async(sink.apply):
            raise InvalidArgument("sink", sink, "async, and the handler is not", "Use guard.aio")
        request = self._build_request(key, fingerprint, message, _parse_wait(wait))
        if isinstance(request, Verdict):
            return request
        if keep is not None:
            return run_kept(self._guard, request, keep, handler, message, {})
        if isinstance(request, MissingKey):
            return run_without_key(self._guard, request, handler, message, {})
        return judge(request, run(self._guard, request, handler, message, {}))

    def run_many(
        self,
        messages: Iterable[tuple[Key | None, T]],
        handler: Callable[[T], R],
        *,
        keep: Callable[[float], object] | None = None,
    ) -> list[Verdict[R]]:
        """Run a handler for a batch of messages and return their verdicts in order.

        The claims travel together, and so do the completions: two round trips instead of two a message. The handler
        gets the messages one after the other. The batch is not atomic. If the process dies inside it, all its messages
        are redelivered, and those that the handler has seen run again.

        The batch keeps its keys until its last handler has ended. A handler that would wait for one of them, by
        `on_in_progress="wait"` or `claim.wait`, gets AlreadyInProgress at once.

        A copy of a message in the same batch runs after it: as a duplicate, or again if the first one failed.
        With `at_most_once`, `shadow`, a sink or a cache the messages run one by one, as with `run`. So do messages that
        wait for another owner.

        Fingerprints are those of the guard's `fingerprint`. Only neighbours with the same one share a script call, so
        they cost the server about as much as single claims. They still travel together.

        Args:
            messages: (key, message) tuples. A key of None is that of the guard's `key`.
            handler: the function to run, `handler(message)`.
            keep: a function that gets the seconds for which the broker must not redeliver the messages of the batch
                from now on; see `run`. It goes on until `run_many` returns, or all leases are lost.

        Raises:
            InvalidArgument: `messages` holds something else, or `handler` or `keep` is no plain function. Nothing was
                sent.
            BaseException: the handler raised an exception that is no Exception, such as KeyboardInterrupt. Finished
                messages are completed, the others released.
        """
        check_blocking(handler, "handler", _USE_AIO)
        if keep is not None:
            check_blocking(keep, "keep", _USE_AIO)
        return run_many(self._guard, messages, handler, keep, self._build_request, self.run)


class AioGuard(_BaseGuard):
    """The async form of a `Guard`, `guard.aio`."""

    @overload
    async def run(
        self,
        key: Key | None,
        handler: Callable[[*Ts], Awaitable[R]],
        *message: *Ts,
        fingerprint: object | None = None,
        keep: Keep | None = None,
        wait: Duration | None = None,
    ) -> Verdict[R]: ...
    @overload
    async def run(
        self,
        key: Key | None,
        handler: Callable[[*Ts], R],
        *message: *Ts,
        fingerprint: object | None = None,
        keep: Keep | None = None,
        wait: Duration | None = None,
    ) -> Verdict[R]: ...
    async def run(  # type: ignore[misc]
        self,
        key: Key | None,
        handler: Callable[..., Any],
        *message: Any,
        fingerprint: object | None = None,
        keep: Keep | None = None,
        wait: Duration | None = None,
    ) -> Verdict[Any]:
        """Run a handler once per key; see `Guard.run`.

        A coroutine function runs in this task. If the caller is cancelled, CancelledError is raised, and the claim is
        released unless `on_lease_loss` is "hold". The verdict is `failed` if the handler raises CancelledError itself.

        A plain function runs in its own thread, in a copy of the context. If it returns an awaitable, that is awaited.
        A cancelled caller does not wait for the thread. The claim then lasts until the thread has ended, and is ended
        as if the caller had waited: the effect is not repeated. `asyncio.run` waits for such threads at its end.

        `keep` may be a coroutine function, which runs in a task. A plain one runs in a thread. If it returns an
        awaitable, that is awaited.
        """
        work, is_native = _adapt(handler)
        if keep is not None:
            check_function(keep, "keep")
        request = self._build_request(key, fingerprint, message, _parse_wait(wait))
        if isinstance(request, Verdict):
            return request
        call = self._run(request, work, message, keep)
        return await (call if is_native else _outlive_caller(call))

    async def _run(
        self, request: Request | MissingKey, work: Callable[..., Awaitable[Any]], message: Any, keep: Keep | None
    ) -> Verdict[Any]:
        if keep is not None:
            return await run_kept_async(self._guard, request, keep, work, message, {})
        if isinstance(request, MissingKey):
            return await run_without_key_async(self._guard, request, work, message, {})
        return judge(request, await run_async(self._guard, request, work, message, {}))

    @overload
    async def run_many(
        self,
        messages: Iterable[tuple[Key | None, T]],
        handler: Callable[[T], Awaitable[R]],
        *,
        keep: Keep | None = None,
        concurrency: int = 1,
    ) -> list[Verdict[R]]: ...
    @overload
    async def run_many(
        self,
        messages: Iterable[tuple[Key | None, T]],
        handler: Callable[[T], R],
        *,
        keep: Keep | None = None,
        concurrency: int = 1,
    ) -> list[Verdict[R]]: ...
    async def run_many(
        self,
        messages: Iterable[tuple[Key | None, T]],
        handler: Callable[[T], Any],
        *,
        keep: Keep | None = None,
        concurrency: int = 1,
    ) -> list[Verdict[Any]]:
        """Run a handler for a batch of messages; see `Guard.run_many`.

        Args:
            messages: (key, message) tuples.
            handler: the function to run. Each call of a plain one has its own thread; see `run`.
            keep: see `Guard.run_many`. It may be a coroutine function.
            concurrency: the most handlers at once. 1 keeps the order.
        """
        work, is_native = _adapt(handler)
        if keep is not None:
            check_function(keep, "keep")
        call = run_many_async(self._guard, messages, work, keep, concurrency, self._build_request, self.run)
        return await (call if is_native else _outlive_caller(call))


_USE_AIO = "Pass a plain function, or use guard.aio"


def _parse_wait(wait: Duration | None) -> int | None:
    """Return the wait in ms. Raise InvalidArgument."""
    return None if wait is None else milliseconds(wait, "wait", zero=True)


def _adapt(handler: Callable[..., Any]) -> tuple[Callable[..., Awaitable[Any]], bool]:
    """Return an async handler, and whether it runs in the task of its caller: a plain function runs in a thread."""
    code = getattr(handler, "__code__", None)
    if code is not None and code.co_flags & CO_COROUTINE:
        return handler, True  # the common case, in a third of the time
    check_function(handler, "handler")
    return (handler, True) if is_async(handler) else (_in_thread(handler), False)


# -- plain functions in threads ---------------------------------------------------------------------------------------


def _in_thread(handler: Callable[..., Any]) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Return an async handler that calls a plain one in a thread, in a copy of the context, and awaits what it returns.

    A thread cannot be stopped. So a cancellation has no effect while it runs, and the claim lasts until it has ended.
    """

    async def run(*message: Any) -> Any:
        returned = await _call_in_thread(handler, message)
        return await returned if hasattr(returned, "__await__") else returned

    return run


async def _outlive_caller(call: Coroutine[Any, Any, T]) -> T:
    """Await a call whose handler may run in a thread. A cancelled caller does not wait for the thread.

    The call is cancelled, too, and ends when its thread has ended: what has not started does not start.
    """
    task = asyncio.create_task(call)
    _calls.add(task)
    task.add_done_callback(_calls.discard)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.cancel()
        raise


async def _call_in_thread(handler: Callable[..., Any], message: tuple[Any, ...]) -> Any:
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def work() -> None:
        try:
            outcome: tuple[Any, BaseException | None] = context.run(handler, *message), None
        except BaseException as error:  # noqa: BLE001 - it is raised in the event loop
            outcome = None, error
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(ended.set_result, outcome)

    # Not of a pool: a handler that waits for another one would wait for ever for a thread. It is a variable because
    # reports of this process look for it there.
    thread = Thread(target=work, name="idemgate-handler", daemon=True)
    thread.start()
    while not ended.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait({ended})
    value, error = ended.result()
    if error is not None:
        raise error
    return value
