"""Thread pool for blocking handlers and callbacks.

The threads take jobs from one shared queue, so that fast handlers cost no switch between threads each. The event loop
receives ended jobs in batches. The number of woken threads follows the time a job takes. One thread suffices for work
done within a millisecond; jobs that would wait longer wake another thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from math import ceil
from typing import Generic, Protocol, TypeVar

from idemgate.core.clock import perf_counter

__all__ = ["Jobs", "ThreadPool"]

J = TypeVar("J")
R = TypeVar("R")
MAX_DELAY = 0.001
"""Seconds of queued work per thread. Waking a thread costs a good part of that, since two threads then compete for the
interpreter's lock."""
MEASURED_JOBS = 32


class Jobs(Protocol[J, R]):
    """The owner of a pool: it queues jobs, runs one, and receives the results."""

    def count_ready(self) -> int:
        """Return how many jobs wait for a thread. Any thread may call it."""
        ...

    def next_job(self, first: bool) -> J:
        """Remove and return the next job. Raises IndexError if none may start. The threads call it.

        Args:
            first: True for the first job of a woken thread. False if the thread has run a job, so that other work may
                need its place.
        """
        ...

    def run_job(self, job: J, /) -> R:
        """Run a job in a thread. It must not raise."""
        ...

    def on_jobs_ended(self, ended: list[tuple[J, R]]) -> None:
        """Receive ended jobs in the event loop, and call `start` for those that wait. There may be none."""
        ...


class ThreadPool(Generic[J, R]):
    """Threads that run the jobs of one owner, each in a copy of the context in which the pool was created.

    The threads are daemons: a handler that never ends must not keep the process alive.
    """

    def __init__(self, name: str, jobs: Jobs[J, R]) -> None:
        """Build a pool without threads. `name` is the prefix of their names."""
        self.running: dict[J, int] = {}
        """The jobs that run now, each with the id of its thread."""
        self.active: int = 0
        self.job_seconds: float = MAX_DELAY / 16
        """Moving average of the seconds that a job takes. It starts low, because to start 100 threads costs 10 ms. If
        the first jobs are slow, `_recheck_speed` wakes the other threads after 2 ms."""
        self._name = name
        self._jobs = jobs
        self._ended_count = 0
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._lock = threading.Lock()
        self._wakeups = threading.Semaphore(0)
        self._threads = 0
        self._idle = 0
        self._ended: deque[tuple[J, R]] = deque()
        self._notified = False
        self._recheck: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._closed = False

    def start(self, free: int) -> int:
        """Wake as many threads as the ready jobs need, at most `free`. Return their number.

        Running threads count only if jobs are fast: then they will soon take more jobs.
        """
        ready, fast = self._jobs.count_ready(), self.job_seconds < MAX_DELAY
        wanted = ceil(ready * self.job_seconds / MAX_DELAY) - self.active if fast else ready
        woken = self._wake_threads(min(free, wanted))
        if fast and self._recheck is None and ready and free > woken:
            # The running jobs may be slower than the average says.
            self._recheck = self._loop.call_later(2 * MAX_DELAY, self._recheck_speed, self._ended_count)
        return woken

    def _recheck_speed(self, ended_before: int) -> None:
        self._recheck = None
        if self._jobs.count_ready():
            if ended_before == self._ended_count:
                self.job_seconds = MAX_DELAY  # no job has ended since: jobs are not fast any more
            self._jobs.on_jobs_ended([])

    def _wake_threads(self, wanted: int) -> int:
        """Wake at most `wanted` threads; return their number."""
        with self._lock:
            wanted = min(wanted, self._jobs.count_ready())
            if wanted <= 0:
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
        while self.active or self._ended:
            self._changed.clear()
            await self._changed.wait()

    # -- in the threads -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._wakeups.acquire() and not self._closed:
            self._run_jobs()
            self._notify_loop()

    def _run_jobs(self) -> None:
        """Run jobs until none may start."""
        run, next_job, running, copy = self._jobs.run_job, self._jobs.next_job, self.running, self._context.copy
        since, measured, first, thread = perf_counter(), 0, True, threading.get_ident()
        while True:
            job: J | None
            try:
                job = next_job(first)
            except IndexError:
                job = self._last_job(first)
            if job is None:
                break
            running[job] = thread
            result = copy().run(run, job)
            del running[job]
            self._ended.append((job, result))
            if not self._notified:
                self._notify_loop()
            first, measured = False, measured + 1
            if measured == MEASURED_JOBS:
                since, measured = self._update_speed(since, measured), 0
        if measured:
            self._update_speed(since, measured)

    def _last_job(self, first: bool) -> J | None:
        """Return a job that was added meanwhile, and may rely on this thread. Without one, mark it as idle."""
        with self._lock:
            try:
                return self._jobs.next_job(first)
            except IndexError:
                self.active -= 1
                self._idle += 1
        return None

    def _update_speed(self, since: float, jobs: int) -> float:
        now = perf_counter()
        self.job_seconds += ((now - since) / jobs - self.job_seconds) / 4
        return now

    def _notify_loop(self) -> None:
        self._notified = True
        try:
            self._loop.call_soon_threadsafe(self._collect)
        except RuntimeError:  # the event loop is closed
            self._closed = True

    # -- in the event loop --------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        self._notified = False  # before reading: a job that ends from here on notifies again
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        self._ended_count += len(ended)
        self._changed.set()
        self._jobs.on_jobs_ended(ended)
