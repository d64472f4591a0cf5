"""Callers that run real guarded calls step by step.

Each completion or release waits for the test, which lets it arrive, loses its reply, or lets the caller give up."""

from __future__ import annotations

import asyncio
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from idemgate import AlreadyInProgress, Gate, StoreUnavailable
from idemgate.core.calls import Call, stamp
from idemgate.testing import Clock

__all__ = ["LEASE", "AwaitingCaller", "BlockingCaller", "Caller"]

LEASE = 9_000
"""Ms. A run would renew every sixth of it; here each renewal is a step of the search."""
ENDINGS = ("guard/complete", "guard/release")
Phase = Literal["idle", "working", "ending"]
Program = Literal["guarded function", "claim block", "complete in block"]


class WorkFailed(Exception):
    """What the work raises when a step says so."""


class Renewals:
    """Stands for the heartbeat thread of one gate: what is renewed, by steps of the search."""

    def __init__(self) -> None:
        self.running: set[Any] = set()

    def add(self, renewal: Any) -> None:
        if not renewal.optional:  # notes of the history
            self.running.add(renewal)

    def add_optional(self, renewal: Any) -> None:
        """Ignore what no lease depends on."""

    def remove(self, renewal: Any) -> None:
        self.running.discard(renewal)

    def close(self) -> None:
        self.running.clear()


class Caller(ABC):
    """One process: a gate of its own whose link and heartbeat the test plays. `starts`: how often its work began."""

    def __init__(self, url: str, namespace: str, clock: Clock, program: Program) -> None:
        self.gate = Gate(url, namespace=namespace, clock=clock)
        self.program, self.clock = program, clock
        self.server = self.gate.context.link
        self.renewals = Renewals()
        self.gate.context.heartbeat = self.renewals  # type: ignore[assignment]
        self.phase: Phase = "idle"
        self.starts = 0
        self.executed = False
        """The pending ending has reached the server, and its reply has not reached the caller."""
        self.gave_up = 0
        self.cancelled = False

    def execute(self, call: Call[Any]) -> Any:
        """Run a call at the server, at the present time of the clock."""
        return self.server.run(Call(call.script, call.keys, (stamp(self.clock), *call.args[1:]), call.read))

    def renew(self) -> None:
        """Send each renewal once, as the heartbeat thread does."""
        for renewal in tuple(self.renewals.running):
            for batch in renewal.renew():
                batch.join([self.execute(call) for call in batch.calls])

    @abstractmethod
    def call(self) -> None:
        """Start the guarded call; returns when its work runs, or when it was refused."""

    @abstractmethod
    def end_work(self, fails: bool) -> None:
        """Let the work return or raise; the ending of its claim is then on its way."""

    @abstractmethod
    def arrive(self) -> None:
        """Execute the ending, and let the caller read its reply."""

    @abstractmethod
    def give_up(self) -> None:
        """Let the caller's time for the ending run out."""

    def lose_reply(self) -> None:
        """Execute the ending; its reply is lost, and the caller sends the same again."""
        self.execute(self.pending)
        self.executed = True

    @property
    @abstractmethod
    def pending(self) -> Call[Any]:
        """The ending that is on its way."""

    @abstractmethod
    def close(self) -> None:
        """End whatever is left of it."""


class AwaitingCaller(Caller):
    """The awaiting driver. The test runs its event loop until nothing moves."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *args: Any) -> None:
        super().__init__(*args)
        self._loop = loop
        self._link = _AwaitingLink(self)
        self.gate.context._aio_link = self._link  # type: ignore[assignment]
        self._task: asyncio.Task[Any] | None = None
        self._work: asyncio.Future[None] | None = None

    def _turn(self) -> None:
        async def settle() -> None:
            for _ in range(20):
                await asyncio.sleep(0)

        self._loop.run_until_complete(settle())

    async def _run_work(self) -> None:
        self.starts += 1
        self.phase = "working"
        self._work = self._loop.create_future()
        try:
            await self._work
        finally:
            self.phase = "ending"

    async def _run(self) -> None:
        options: dict[str, Any] = {"scope": "s", "lease": LEASE / 1000}
        if self.program == "guarded function":

            @self.gate.once(key="{key}", **options)
            async def guarded(key: str) -> None:
                await self._run_work()

            await guarded("k")
            return
        async with self.gate.aio.claim("k", **options) as claim:
            if claim.started:
                await self._run_work()
                if self.program == "complete in block":
                    await claim.complete("done")

    def call(self) -> None:
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._turn()

    def end_work(self, fails: bool) -> None:
        assert self._work is not None, "it was called"
        if fails:
            self._work.set_exception(WorkFailed())
        else:
            self._work.set_result(None)
        self._turn()

    def cancel(self) -> None:
        """Cancel the task that called; its work, if that runs, raises."""
        assert self._task is not None, "it was called"
        self.cancelled = True
        self._task.cancel()
        self._turn()

    @property
    def pending(self) -> Call[Any]:
        assert self._link.pending is not None, "an ending is on its way"
        return self._link.pending[0]

    def _answer(self, result: Any) -> None:
        assert self._link.pending is not None, "an ending is on its way"
        _, asking = self._link.pending
        self._link.pending = None
        self.phase, self.executed = "idle", False
        asking.tell(result)
        self._turn()

    def arrive(self) -> None:
        self._answer(self.execute(self.pending))

    def give_up(self) -> None:
        self.gave_up += 1
        self._answer(StoreUnavailable("no answer", "unknown"))

    def close(self) -> None:
        if self._link.pending is not None:
            self._answer(StoreUnavailable("the test ends", "unknown"))
        if self._task is not None and not self._task.done():
            self._task.cancel()
        self._turn()
        if self._link.pending is not None:
            self._answer(StoreUnavailable("the test ends", "unknown"))
        self.gate.context._aio_link = None
        self.gate.close()


class _Asking:
    """As `store.aio.PendingCall`, answered by the test."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.answer: asyncio.Future[Any] = loop.create_future()

    def outcome(self) -> asyncio.Future[Any]:
        if self.answer.cancelled():
            self.answer = self._loop.create_future()
        return self.answer

    def tell(self, result: Any) -> None:
        if self.answer.cancelled():
            return  # nobody asked for the outcome
        if isinstance(result, Exception):
            self.answer.set_exception(result)
        else:
            self.answer.set_result(result)


class _AwaitingLink:
    def __init__(self, caller: AwaitingCaller) -> None:
        self._caller = caller
        self._tasks: set[asyncio.Task[Any]] = set()
        self.pending: tuple[Call[Any], _Asking] | None = None

    def start(self, call: Call[Any], within: float | None = None, attempt: float | None = None) -> _Asking:
        asking = _Asking(self._caller._loop)
        if call.script.name in ENDINGS:
            assert self.pending is None, "one ending is on its way"
            self.pending = call, asking
        else:
            asking.tell(self._caller.execute(call))
        return asking

    async def run(self, call: Call[Any], within: float | None = None, attempt: float | None = None) -> Any:
        return await self.start(call, within).answer

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = self._caller._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class BlockingCaller(Caller):
    """The blocking driver, in a thread. A step returns when that thread waits for the next one, or is idle."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.gate.context._link = _BlockingLink(self)  # type: ignore[assignment]
        self._parked: queue.Queue[str] = queue.Queue()
        self._orders: queue.Queue[Any] = queue.Queue()
        self._thread: threading.Thread | None = None
        self._pending: Call[Any] | None = None

    def park(self) -> Any:
        """Called by the caller's thread: wait for what the test orders."""
        self._parked.put("waits")
        return self._orders.get(timeout=60)

    def _order(self, what: Any) -> None:
        self._orders.put(what)
        self._parked.get(timeout=60)

    def _run_work(self) -> None:
        self.starts += 1
        self.phase = "working"
        fails = self.park()
        self.phase = "ending"
        if fails:
            raise WorkFailed

    def _run(self) -> None:
        options: dict[str, Any] = {"scope": "s", "lease": LEASE / 1000}
        try:
            if self.program == "guarded function":

                @self.gate.once(key="{key}", **options)
                def guarded(key: str) -> None:
                    self._run_work()

                guarded("k")
            else:
                with self.gate.claim("k", **options) as claim:
                    if claim.started:
                        self._run_work()
                        if self.program == "complete in block":
                            claim.complete("done")
        except (WorkFailed, AlreadyInProgress, StoreUnavailable):
            pass
        finally:
            self.phase = "idle"
            self._parked.put("ended")

    def end_by(self, call: Call[Any]) -> Any:
        """Called by the caller's thread: wait for what becomes of this ending."""
        self._pending = call
        answer: Callable[[], Any] = self.park()
        self._pending = None
        return answer()

    def call(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._parked.get(timeout=60)

    def end_work(self, fails: bool) -> None:
        self._order(fails)

    @property
    def pending(self) -> Call[Any]:
        assert self._pending is not None, "an ending is on its way"
        return self._pending

    def arrive(self) -> None:
        result = self.execute(self.pending)
        self.executed = False
        self._order(lambda: result)

    def give_up(self) -> None:
        def fail() -> Any:
            raise StoreUnavailable("no answer", "unknown")

        self.gave_up += 1
        self.executed = False
        self._order(fail)

    def close(self) -> None:
        if self.phase == "working":
            self.end_work(fails=True)
        if self.phase == "ending":
            self.give_up()
        if self._thread is not None:
            self._thread.join(60)
        self.gate.context._link = self.server
        self.gate.close()


class _BlockingLink:
    def __init__(self, caller: BlockingCaller) -> None:
        self._caller = caller

    def run(self, call: Call[Any], within: float | None = None, attempt: float | None = None) -> Any:
        return self._caller.end_by(call) if call.script.name in ENDINGS else self._caller.execute(call)
