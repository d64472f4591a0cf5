"""Call of a registered callback, and the verdict on its message."""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

from idemgate.core.scopes import qualified_name
from idemgate.core.thread_pool import ThreadPool
from idemgate.core.validation import check_function, check_parameters, is_async
from idemgate.core.verdict import Verdict, judge_error
from idemgate.core.waits import is_cancelled
from idemgate.guard.decorator import build_judge, build_judge_async
from idemgate.store.context import Context, trace, trace_async

__all__ = ["Callback", "check_callback"]

T = TypeVar("T")


class _Job:
    """A call of a blocking callback."""

    __slots__ = ("context", "future", "item")

    def __init__(self, item: object, future: asyncio.Future[Verdict[Any]]) -> None:
        self.item: object = item
        self.future: asyncio.Future[Verdict[Any]] = future
        self.context: contextvars.Context = contextvars.copy_context()


class Callback(Generic[T]):
    """A subscriber's function for one run. A blocking function runs in threads, in a copy of the context.

    It implements the `Jobs` of its thread pool. The subscriber bounds the number of calls.
    """

    def __init__(self, func: Callable[[T], object], context: Context, source: str) -> None:
        self.is_async: bool = is_async(func)
        judge: Any = build_judge_async(cast(Any, func)) if self.is_async else build_judge(func)
        if (tracer := context.tracer) is not None:
            judge = (trace_async if self.is_async else trace)(judge, lambda _: tracer.consume(source))
        self._judge: Callable[[T], Any] = judge
        self._jobs: deque[_Job] = deque()
        self._pool: ThreadPool[_Job, Verdict[Any] | None] | None = None

    async def __call__(self, item: T) -> Verdict[Any]:
        """Return the verdict on a message."""
        try:
            if self.is_async:
                return cast("Verdict[Any]", await self._judge(item))
            verdict = await self._call_in_thread(item)
            if hasattr(verdict.value, "__await__"):  # a plain function, such as a lambda, that returned a coroutine
                return await build_judge_async(lambda: cast(Any, verdict.value))()
        except asyncio.CancelledError as error:
            if is_cancelled():
                raise
            return judge_error(error)  # raised by the callback
        except KeyboardInterrupt:  # Ctrl-C, not an error of the callback
            raise
        except BaseException as error:  # noqa: BLE001 - any exception concerns one message only
            return judge_error(error)
        return verdict

    def close(self) -> None:
        """Close the threads: each ends after its current call."""
        if self._pool is not None:
            self._pool.close()

    # -- blocking callbacks -------------------------------------------------------------------------------------------

    async def _call_in_thread(self, item: T) -> Verdict[Any]:
        """Call the function in a thread. If cancelled, a call that has begun continues."""
        if self._pool is None:
            self._pool = ThreadPool("idemgate-subscriber", self)
        job = _Job(item, asyncio.get_running_loop().create_future())
        self._jobs.append(job)
        self._pool.start(len(self._jobs))
        return await job.future

    def count_ready(self) -> int:
        return len(self._jobs)

    def next_job(self, first: bool) -> _Job:  # noqa: ARG002 - no other work needs the threads
        return self._jobs.popleft()

    def run_job(self, job: _Job) -> Verdict[Any] | None:
        return None if job.future.cancelled() else job.context.run(_call_catching, self._judge, job.item)

    def on_jobs_ended(self, ended: list[tuple[_Job, Verdict[Any] | None]]) -> None:
        for job, verdict in ended:
            if verdict is not None and not job.future.done():
                job.future.set_result(verdict)
        if self._pool is not None:
            self._pool.start(len(self._jobs))


def _call_catching(judge: Callable[[Any], Verdict[Any]], item: object) -> Verdict[Any]:
    try:
        return judge(item)
    except BaseException as error:  # noqa: BLE001 - any exception is a verdict; a Ctrl-C only reaches the main thread
        return judge_error(error)


def check_callback(func: Callable[[T], object]) -> str:
    """Check that a function can be a callback; return its name.

    Raises:
        InvalidArgument: It is not callable with one argument, or it returns before its work ends.
    """
    check_function(func, "callback")
    check_parameters(func, "callback", "message")
    return qualified_name(func)
