"""Call of a registered callback, and the outcome for its message."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from idemgate.core.thread_pool import ThreadPool
from idemgate.core.validation import check_not_generator, is_async, qualified_name
from idemgate.errors import AlreadyDone, AlreadyInProgress, InvalidArgument, ResultUnavailable, is_permanent

__all__ = ["Callback", "CallbackResult", "check_callback", "result_of_error"]

T = TypeVar("T")
_Returned = tuple[Any, BaseException | None]
"""The result of a function and its exception. Both are values, since not every exception survives a future."""
Outcome = Literal["handled", "duplicate", "in_progress", "permanent", "failed"]

_DUPLICATE = (AlreadyDone, ResultUnavailable)


class CallbackResult(NamedTuple):
    """The outcome of a call, and the exception that it raised."""

    outcome: Outcome
    error: BaseException | None = None


def result_of_error(error: BaseException) -> CallbackResult:
    """Return the outcome for a callback's exception.

    A replayed or skipped duplicate raises nothing: its outcome is "handled", and the guard counts it.
    """
    if isinstance(error, _DUPLICATE):
        return CallbackResult("duplicate", error)
    if isinstance(error, AlreadyInProgress):
        return CallbackResult("in_progress", error)
    return CallbackResult("permanent" if is_permanent(error) else "failed", error)


class _Job:
    """A call of a blocking callback."""

    __slots__ = ("context", "future", "item")

    def __init__(self, item: object, future: asyncio.Future[_Returned]) -> None:
        self.item = item
        self.future = future
        self.context = contextvars.copy_context()


class Callback(Generic[T]):
    """A subscriber's function for one run; a blocking function runs in threads, in a copy of the context."""

    def __init__(self, func: Callable[[T], object]) -> None:
        self._func = func
        self._is_async = is_async(func)
        self._pool: ThreadPool[_Job, _Returned | None] | None = None

    async def __call__(self, item: T) -> CallbackResult:
        try:
            if self._is_async:
                await _await_coroutine(self._func(item))
            else:
                result, error = await self._call_in_thread(item)
                if error is not None:
                    return result_of_error(error)
                await _await_coroutine(result)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return CallbackResult("failed", error)  # raised by the callback; this task was not cancelled
        except KeyboardInterrupt:  # Ctrl-C, not an error of the callback
            raise
        except BaseException as error:  # noqa: BLE001 - any exception concerns one message only
            return result_of_error(error)
        return CallbackResult("handled")

    def close(self) -> None:
        """Close the threads: each ends after its current call."""
        if self._pool is not None:
            self._pool.close()

    # -- blocking callbacks -------------------------------------------------------------------------------------------

    async def _call_in_thread(self, item: T) -> _Returned:
        """Call the function in a thread. If cancelled, a call that has begun continues."""
        if self._pool is None:
            self._pool = ThreadPool(
                "idemgate-subscriber", self._run_job, _set_results, self._start_threads, lambda: False
            )
        job = _Job(item, asyncio.get_running_loop().create_future())
        self._pool.ready.append(job)
        self._start_threads()
        return await job.future

    def _start_threads(self) -> None:
        assert self._pool is not None, "only the pool and its jobs call this"
        self._pool.start(len(self._pool.ready))  # the subscriber bounds the number of calls

    def _run_job(self, job: _Job) -> _Returned | None:
        return None if job.future.cancelled() else job.context.run(_call_catching, self._func, job.item)


async def _await_coroutine(result: Any) -> None:
    if hasattr(result, "__await__"):  # a plain function, such as a lambda, that returned a coroutine
        await result


def _call_catching(func: Callable[[Any], Any], argument: object) -> _Returned:
    try:
        return func(argument), None
    except BaseException as error:  # noqa: BLE001 - any exception is a result; a Ctrl-C only reaches the main thread
        return None, error


def _set_results(finished: list[tuple[_Job, _Returned | None]]) -> None:
    for job, result in finished:
        if result is not None and not job.future.done():
            job.future.set_result(result)


def check_callback(func: Callable[[T], object]) -> str:
    """Check that a function can be a callback; return its name.

    Raises:
        InvalidArgument: It is not callable, or it is a generator function.
    """
    if not callable(func):
        raise InvalidArgument("callback", func, "not callable", "Decorate a function of one argument")
    check_not_generator(func)
    return qualified_name(func)
