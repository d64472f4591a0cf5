"""Threads that run a worker's blocking handlers.

They take deliveries from one queue by themselves, so that quick handlers do not cost a hop between threads each, and
the event loop hears of those that have ended many at a time. How many threads are woken follows from how long handlers
take: one is enough for what is done in a millisecond; whoever waits longer than that gets another.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from math import ceil
from time import perf_counter
from typing import Generic, TypeVar

__all__ = ["Hands"]

J = TypeVar("J")
R = TypeVar("R")
SOON = 0.001
"""Seconds of work that one thread may have before it. Waking a thread, and two that struggle for the interpreter's
lock, cost a good part of that."""
HANDFUL = 8
"""Jobs that are done without a look around where each takes less than a hundredth of that."""


class Hands(Generic[J, R]):
    """Threads that `run` jobs, each in a copy of the context in which this was made. In the event loop `ended` hears of
    those that have, many at a time, and `rested` afterwards: a thread may have become free. `stopped` is asked before
    each job, and of the quickest before a handful.

    Daemons: a handler that nothing can end must not keep the process from ending. `run` must not raise.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[J], R],
        ended: Callable[[list[tuple[J, R]]], None],
        rested: Callable[[], None],
        stopped: Callable[[], bool],
    ) -> None:
        self.ready: deque[J] = deque()
        self.running: set[J] = set()
        self.active = 0
        self.pace = SOON
        """Seconds that a job takes, lately."""
        self._name = name
        self._run = run
        self._heard = ended
        self._heard_of = 0
        self._rested = rested
        self._stopped = stopped
        self._loop = asyncio.get_running_loop()
        self._context = contextvars.copy_context()
        self._lock = threading.Lock()
        self._wakings = threading.Semaphore(0)
        self._threads = 0
        self._idle = 0
        self._ended: deque[tuple[J, R]] = deque()
        self._telling = False
        self._look: asyncio.TimerHandle | None = None
        self._changed = asyncio.Event()
        self._closed = False

    def start(self, free: int) -> None:
        """Wakes as many threads as what is ready needs, at most `free`. Those that run will soon take more only where
        jobs are quick."""
        quick = self.pace < SOON
        wanted = ceil(len(self.ready) * self.pace / SOON) - self.active if quick else len(self.ready)
        woken = self._wake(min(free, wanted))
        if quick and self._look is None and self.ready and free > woken:
            # The pace of the past may not be that of what runs now.
            self._look = self._loop.call_later(2 * SOON, self._look_again, self._heard_of)

    def _look_again(self, heard_of: int) -> None:
        self._look = None
        if self.ready:
            if heard_of == self._heard_of:
                self.pace = SOON  # none has ended meanwhile: they are not quick any more
            self._rested()

    def _wake(self, wanted: int) -> int:
        """How many it woke."""
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
        self._wakings.release(wanted)
        return wanted

    def close(self) -> None:
        """The threads end, each with what it is doing."""
        if self._look is not None:
            self._look.cancel()
        self._threads, ending = 0, self._threads
        if ending:
            self._closed = True
            self._wakings.release(ending)

    async def rest(self) -> None:
        """Until nothing runs."""
        while self.active or self._ended:
            self._changed.clear()
            await self._changed.wait()

    # -- in the threads -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._wakings.acquire() and not self._closed:
            began, done = perf_counter(), 0
            while (job := self._next()) is not None:
                done += self._do(job, HANDFUL if self.pace < SOON / 100 else 1)
                if done >= 32:
                    began, done = self._paced(began, done), 0
            if done:
                self._paced(began, done)
            self._tell()

    def _do(self, job: J, most: int) -> int:
        """Runs a job, and those that are ready behind it, `most` in all, and fewer when that takes long after all.
        Returns how many it ran."""
        until = perf_counter() + SOON
        running, ready, ended, copy, run = self.running, self.ready, self._ended, self._context.copy, self._run
        for done in range(1, most + 1):
            running.add(job)
            result = copy().run(run, job)
            running.discard(job)
            ended.append((job, result))
            if not self._telling:
                self._tell()
            if done == most or perf_counter() > until:
                return done
            try:
                job = ready.popleft()
            except IndexError:
                return done
        return most

    def _next(self) -> J | None:
        """The next job; None and a thread less when there is none."""
        if not self._stopped():
            try:
                return self.ready.popleft()
            except IndexError:
                pass
        with self._lock:
            # Looked at once more under the lock: whoever brought something meanwhile may have counted on this thread.
            if self.ready and not self._stopped():
                try:
                    return self.ready.popleft()
                except IndexError:
                    pass
            self.active -= 1
            self._idle += 1
        return None

    def _paced(self, began: float, jobs: int) -> float:
        now = perf_counter()
        self.pace += ((now - began) / jobs - self.pace) / 4
        return now

    def _tell(self) -> None:
        self._telling = True
        try:
            self._loop.call_soon_threadsafe(self._collect)
        except RuntimeError:  # the loop is closed: nobody waits for this any more
            self._closed = True

    # -- in the event loop --------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        self._telling = False  # before looking: what ends from here on is told anew
        if ended := [self._ended.popleft() for _ in range(len(self._ended))]:
            self._heard(ended)
            self._heard_of += len(ended)
        self._changed.set()
        self._rested()
