"""The guard of a consumer: it runs a handler once per key and returns a verdict."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable
from contextlib import asynccontextmanager, contextmanager
from inspect import CO_COROUTINE
from threading import Event, Thread
from typing import Any, TypeVar, TypeVarTuple

from idemgate.core.codec import digest
from idemgate.core.counters import Counters
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.keys import Key
from idemgate.core.scopes import qualified_name
from idemgate.core.text import message_of, one_line
from idemgate.core.validation import call_blocking, check_blocking, check_function, is_async
from idemgate.core.verdict import Verdict, verdict_of
from idemgate.errors import InvalidArgument, MissingKey
from idemgate.guard.call import run, run_async, run_without_key, run_without_key_async
from idemgate.guard.context import GuardContext
from idemgate.guard.judge import judge
from idemgate.guard.request import Request, build_request
from idemgate.guard.run_many import run_many, run_many_async

__all__ = ["AioGuard", "Guard", "Keep"]

log: logging.Logger = logging.getLogger("idemgate.once")

R = TypeVar("R")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Keep = Callable[[float], Awaitable[object] | object]
"""A function that gets the seconds for which the message must stay invisible from now on."""


class _BaseGuard:
    """The common part of `Guard` and `AioGuard`."""

    def __init__(self, guard: GuardContext) -> None:
        self._guard = guard
        self._lease = guard.options.lease / 1000

    @property
    def scope(self) -> str:
        """The scope of the keys."""
        return self._guard.options.scope

    def _build_request(self, key: Key | None, fingerprint: object, wait_ms: int | None) -> Request:
        guard = self._guard
        packed = b"" if fingerprint is None else digest(fingerprint, name="fingerprint")
        return build_request(guard.options, guard.claims, key, packed, wait_ms)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


class Guard(_BaseGuard):
    """A guard for the messages of a consumer, from `gate.guard(...)`. Threads can share it."""

    @functools.cached_property
    def aio(self) -> AioGuard:
        """The same guard for async handlers: `await guard.aio.run(...)`. InvalidArgument if its sink is not async."""
        if (sink := self._guard.options.sink) is not None and not is_async(sink.apply):
            raise InvalidArgument("sink", sink, "not async", "Use guard.run, or pass an async sink to gate.guard")
        return AioGuard(self._guard)

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
            key: the idempotency key. None or empty: see `on_missing_key`.
            handler: the function to run, `handler(*message)`.
            *message: its arguments.
            fingerprint: a value that identifies the payload; the same key with another one is "rejected". None: none.
            keep: a function that gets the seconds for which the broker must not redeliver the message from now on. It
                is called every third of the lease while the handler runs, in its own thread. Its errors are counted
                (`once.keep_failed`) and logged.
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
        work: Callable[..., R] = handler
        if keep is not None:
            check_blocking(keep, "keep", _USE_AIO)
            work = functools.partial(self._keep_and_run, keep, handler)
        wait_ms = _parse_wait(wait)
        try:
            request = self._build_request(key, fingerprint, wait_ms)
        except MissingKey as error:
            return run_without_key(self._guard, error, work, message, {})
        except InvalidArgument as error:
            return verdict_of(error)
        if (sink := self._guard.options.sink) is not None and is_async(sink.apply):
            raise InvalidArgument("sink", sink, "async, and the handler is not", "Use guard.aio")
        return judge(request, run(self._guard, request, work, message, {}))

    def run_many(self, messages: Iterable[tuple[Key, T]], handler: Callable[[T], R]) -> list[Verdict[R]]:
        """Run a handler for a batch of messages and return their verdicts in order.

        The claims travel together, and so do the completions: two round trips instead of two a message. The handler
        gets the messages one after the other. The batch is not atomic. If the process dies inside it, all its messages
        are redelivered, and those that the handler has seen run again.

        The batch keeps its keys until its last handler has ended. A handler that would wait for one of them, by
        `on_in_progress="wait"` or `claim.wait`, gets AlreadyInProgress at once.

        A copy of a message in the same batch runs after it: as a duplicate, or again if the first one failed.
        With `at_most_once`, `shadow`, a sink or a cache the messages run one by one, as with `run`. So do messages that
        wait for another owner.

        Args:
            messages: (key, message) tuples.
            handler: the function to run, `handler(message)`.

        Raises:
            InvalidArgument: `messages` holds something else, or `handler` is no plain function. Nothing was sent.
            BaseException: the handler raised an exception that is no Exception, such as KeyboardInterrupt. Finished
                messages are completed, the others released.
        """
        check_blocking(handler, "handler", _USE_AIO)
        return run_many(self._guard, messages, handler, self.run)

    def _keep_and_run(self, keep: Callable[[float], object], handler: Callable[..., R], *message: Any) -> R:
        with _keep_message(keep, self._lease, self._guard.context.counters):
            return handler(*message)


class AioGuard(_BaseGuard):
    """The async form of a `Guard`, `guard.aio`."""

    async def run(
        self,
        key: Key | None,
        handler: Callable[[*Ts], Awaitable[R]],
        *message: *Ts,
        fingerprint: object | None = None,
        keep: Keep | None = None,
        wait: Duration | None = None,
    ) -> Verdict[R]:
        """Run an async handler once per key; see `Guard.run`.

        `keep` may be a coroutine function, which runs in a task. A plain function runs in a thread. If it returns an
        awaitable, that is awaited. If the caller is cancelled, CancelledError is raised, and the claim is released
        unless `on_lease_loss` is "hold". A handler that returns no awaitable has run: its message is "rejected", so
        that the effect is not repeated.
        """
        work: Callable[..., Awaitable[R]] = _check_async(handler)
        if keep is not None:
            check_function(keep, "keep")
            work = functools.partial(self._keep_and_run, keep, work)
        wait_ms = _parse_wait(wait)
        try:
            request = self._build_request(key, fingerprint, wait_ms)
        except MissingKey as error:
            return await run_without_key_async(self._guard, error, work, message, {})
        except InvalidArgument as error:
            return verdict_of(error)
        return judge(request, await run_async(self._guard, request, work, message, {}))

    async def run_many(
        self, messages: Iterable[tuple[Key, T]], handler: Callable[[T], Awaitable[R]], *, concurrency: int = 1
    ) -> list[Verdict[R]]:
        """Run an async handler for a batch of messages; see `Guard.run_many`.

        Args:
            messages: (key, message) tuples.
            handler: the coroutine function to run.
            concurrency: the most handlers at once. 1 keeps the order.
        """
        return await run_many_async(self._guard, messages, _check_async(handler), concurrency, self.run)

    async def _keep_and_run(self, keep: Keep, handler: Callable[..., Awaitable[R]], *message: Any) -> R:
        async with _keep_message_async(keep, self._lease, self._guard.context.counters):
            return await handler(*message)


@contextmanager
def _keep_message(keep: Callable[[float], object], lease: float, counters: Counters) -> Generator[None]:
    """Call `keep` every third of the lease (seconds) until the block ends, in its own thread."""
    stop = Event()

    def loop() -> None:
        while not stop.wait(lease / 3):
            try:
                call_blocking(keep, (lease,), {})
            except Exception as error:  # noqa: BLE001 - the handler goes on; its lease is renewed all the same
                if not stop.is_set():
                    _record_keep_failure(counters, error)

    thread = Thread(target=loop, name="idemgate-keep", daemon=True)
    try:  # from here on: a signal handler may raise while the thread starts
        thread.start()
        yield
    finally:
        stop.set()  # without a join: a slow call of `keep` must not delay the completion


@asynccontextmanager
async def _keep_message_async(keep: Keep, lease: float, counters: Counters) -> AsyncGenerator[None]:
    """Call `keep` every third of the lease until the block ends: a coroutine function in a task, others in a thread."""

    async def loop() -> None:
        while True:
            await asyncio.sleep(lease / 3)
            try:
                called = keep(lease) if is_async(keep) else await asyncio.to_thread(keep, lease)
                if isinstance(called, Awaitable):  # also of a lambda around a coroutine function
                    await called
            except Exception as error:  # noqa: BLE001 - the handler goes on; its lease is renewed all the same
                _record_keep_failure(counters, error)

    task = asyncio.create_task(loop(), name="idemgate-keep")
    try:
        yield
    finally:
        task.cancel()


def _record_keep_failure(counters: Counters, error: Exception) -> None:
    counters.add("once.keep_failed")
    text = message_of(error)
    log.warning("once.keep_failed: %s: %s", type(error).__name__, one_line(text), extra={"error": text})


_USE_AIO = "Pass a plain function, or use guard.aio"


def _parse_wait(wait: Duration | None) -> int | None:
    """Return the wait in ms. Raise InvalidArgument."""
    return None if wait is None else milliseconds(wait, "wait", zero=True)


def _check_async(handler: Callable[..., Awaitable[R]]) -> Callable[..., Awaitable[R]]:
    """Return an async handler, which raises InvalidArgument if it turns out that it is none. A lambda may be one."""
    code = getattr(handler, "__code__", None)
    if code is not None and code.co_flags & CO_COROUTINE:
        return handler  # the common case, in a third of the time
    check_function(handler, "handler")
    if is_async(handler):
        return handler
    return functools.partial(_await_result, handler)


async def _await_result(handler: Callable[..., Awaitable[R]], *message: Any) -> R:
    returned = handler(*message)
    if not hasattr(returned, "__await__"):
        problem = f"returned {type(returned).__name__}, which is not awaitable"
        fix = "Pass a coroutine function, or use guard.run"
        raise InvalidArgument("handler", qualified_name(handler), problem, fix)
    return await returned
