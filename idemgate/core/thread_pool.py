"""Thread pool for blocking handlers and callbacks.

The threads take jobs from one shared queue, so that fast handlers cost no switch between threads each. The event loop
receives finished jobs in batches. The number of woken threads follows the time a job takes. One thread suffices for
work done within a millisecond; jobs that would wait longer wake another thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from math import ceil
from typing import Generic, Protocol, TypeVar

from idemgate.core.clock import perf_counter

__all__ = ["JobQueue", "ThreadPool"]

J = TypeVar("J")
J_co = TypeVar("J_co", covariant=True)
R = TypeVar("R")
MAX_DELAY = 0.001
"""Seconds of queued work per thread. Waking a thread costs a good part of that, since two threads then compete for the
interpreter's lock."""
FAST_BATCH = 8
"""Jobs to run without checking `stopped`, if each takes less than a hundredth of `MAX_DELAY`."""


class JobQueue(Protocol[J_co]):
    """A queue of jobs, such as a deque."""

    def popleft(self) -> J_co:
        """Remove and return the next job. Raises IndexError without one. Any thread may call it."""
        ...

    def __len__(self) -> int: ...


class ThreadPool(Generic[J, R]):
    """Threads that `run` jobs, each in a copy of the context in which the pool was created.

    The threads are daemons: a handler that never ends must not keep the process alive. `run` must not raise.

    Args:
        name: Prefix of the threads' names.
        run: Function that runs one job, in a thread.
        on_finished: Callback in the event loop, with a batch of finished jobs and their results.
        on_idle: Callback in the event loop after `on_finished`: a thread may be free.
        stopped: Function that returns True if no job may start. Threads call it before each job or fast batch.
        yields: Function that returns True if a thread that has run a job must end its turn, because other work waits
            for its place. A thread that was woken runs one job or fast batch in any case.
        ready: Queue of the jobs to start. The caller adds jobs to it, then calls `start`.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[J], R],
        on_finished: Callable[[list[tuple[J, R]]], None],
        on_idle: Callable[[], None],
        stopped: Callable[[], bool],
        yields: Callable[[], bool],
        ready: JobQueue[J],
    ) -> None:
        self.ready = ready
        self.running: set[J] = set()
        self.active = 0
        self.job_seconds = MAX_DELAY / 16
        """Moving average of the seconds that a job takes. It starts low, because to start 100 threads costs 10 ms. If
        the first jobs are slow, `_recheck_speed` wakes the other threads after 2 ms."""
        self._name = name
        self._run = run
        self._on_finished = on_finished
        self._finished_count = 0
        self._on_idle = on_idle
        self._stopped = stopped
        self._yields = yields
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._lock = threading.Lock()
        self._wakeups = threading.Semaphore(0)
        self._threads = 0
        self._idle = 0
        self._finished: deque[tuple[J, R]] = deque()
        self._notified = False
        self._recheck: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._closed = False

    def start(self, free: int) -> None:
        """Wake as many threads as the ready jobs need, at most `free`.

        Running threads count only if jobs are fast: then they will soon take more jobs.
        """
        fast = self.job_seconds < MAX_DELAY
        wanted = ceil(len(self.ready) * self.job_seconds / MAX_DELAY) - self.active if fast else len(self.ready)
        woken = self._wake_threads(min(free, wanted))
        if fast and self._recheck is None and self.ready and free > woken:
            # The running jobs may be slower than the average says.
            self._recheck = self._loop.call_later(2 * MAX_DELAY, self._recheck_speed, self._finished_count)

    def _recheck_speed(self, finished_before: int) -> None:
        self._recheck = None
        if self.ready:
            if finished_before == self._finished_count:
                self.job_seconds = MAX_DELAY  # no job has finished since: jobs are not fast any more
            self._on_idle()

    def _wake_threads(self, wanted: int) -> int:
        """Wake at most `wanted` threads; return their number."""
        with self._lock:
            wanted = min(wanted, len(self.ready))
            if wanted <= 0 or self._stopped():
                return 0
            self.active += wanted
            self._idle -= wanted
            new = max(0, -self._idle)
            self._idle += new
        for _ in range(new):
            self._threads += 1
            threading.Thread(target=self._work, name=f"{self._name}-{self._threads}", daemon=True).start()
        self._wakeups.release(wanted)
        return wanted

    def close(self) -> None:
        """Make each thread end after its current job."""
        if self._recheck is not None:
            self._recheck.cancel()
        self._threads, ending = 0, self._threads
        if ending:
            self._closed = True
            self._wakeups.release(ending)

    async def wait_idle(self) -> None:
        """Wait until no job runs."""
        while self.active or self._finished:
            self._changed.clear()
            await self._changed.wait()

    # -- in the threads -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._wakeups.acquire() and not self._closed:
            started, done = perf_counter(), 0
            while (job := self._next_job(first=not done)) is not None:
                done += self._run_batch(job, FAST_BATCH if self.job_seconds < MAX_DELAY / 100 else 1)
                if done >= 32:
                    started, done = self._update_speed(started, done), 0
            if done:
                self._update_speed(started, done)
            self._notify_loop()

    def _run_batch(self, job: J, most: int) -> int:
        """Run a job and the ready jobs behind it, at most `most` and for about `MAX_DELAY`; return their number."""
        until = perf_counter() + MAX_DELAY
        running, ready, finished, copy, run = self.running, self.ready, self._finished, self._context.copy, self._run
        for done in range(1, most + 1):
            running.add(job)
            result = copy().run(run, job)
            running.discard(job)
            finished.append((job, result))
            if not self._notified:
                self._notify_loop()
            if done == most or perf_counter() > until:
                return done
            try:
                job = ready.popleft()
            except IndexError:
                return done
        return most

    def _may_continue(self, first: bool) -> bool:
        return not self._stopped() and (first or not self._yields())

    def _next_job(self, first: bool) -> J | None:
        """Return the next job. Without one, mark the thread as idle and return None."""
        if self._may_continue(first):
            try:
                return self.ready.popleft()
            except IndexError:
                pass
        with self._lock:
            # Check again under the lock: a job added meanwhile may rely on this thread.
            if self.ready and self._may_continue(first):
                try:
                    return self.ready.popleft()
                except IndexError:
                    pass
            self.active -= 1
            self._idle += 1
        return None

    def _update_speed(self, started: float, jobs: int) -> float:
        now = perf_counter()
        self.job_seconds += ((now - started) / jobs - self.job_seconds) / 4
        return now

    def _notify_loop(self) -> None:
        self._notified = True
        try:
            self._loop.call_soon_threadsafe(self._collect)
        except RuntimeError:  # the event loop is closed
            self._closed = True

    # -- in the event loop --------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        self._notified = False  # before reading: a job that finishes from here on notifies again
        if finished := [self._finished.popleft() for _ in range(len(self._finished))]:
            self._on_finished(finished)
            self._finished_count += len(finished)
        self._changed.set()
        self._on_idle()
