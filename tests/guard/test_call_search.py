"""No order of steps lets a second caller run the work of a caller that lives and renews. The search finds each fault
that is put into the guarded call.

The calls are the real ones. Renewals are steps of their own, and time passes in thirds of a lease, also between the
end of the work and the answer to its completion. What is assumed is what the promises assume: a renewal that is made
reaches the store before a third of the lease has passed.

`IDEMGATE_DEPTH=9 pytest tests/guard/test_call_search.py -s` looks further.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from idemgate.guard.heartbeat import Heartbeat
from idemgate.testing import Clock
from tests.claims import claims_of
from tests.exhaustive import Violation
from tests.guard.callers import LEASE, AwaitingCaller, BlockingCaller, Caller, Program

DEPTH = int(os.environ.get("IDEMGATE_DEPTH", "7"))
"""Steps. One more takes about twice as long."""
PROGRAMS: tuple[Program, ...] = ("guarded function", "claim block", "complete in block")
TIMES = 5
"""How many thirds of a lease pass at most."""


class World:
    """Two callers of one key, made anew for each path. What is judged is who ran when, not what is stored."""

    def __init__(self, url: str, namespace: str, make: Callable[..., Caller], program: Program) -> None:
        self.clock = Clock(1_700_000_000.0)
        self.callers = [make(url, namespace, self.clock, program) for _ in range(2)]
        self.path: tuple[str, ...] = ()
        self.thirds = 0
        self.calls = 0
        self.unrenewed: list[Any] = []
        """Renewals that are running, and not sent since the last third of a lease."""
        self.done = False
        self.released = 0
        self.unread = False
        """The reply to a release was lost: a copy of it may come when another owner runs, and be answered `lost`."""

    def steps(self) -> Iterator[str]:
        if self.unrenewed:
            yield "renew"
        elif self.calls and self.thirds < TIMES:
            yield "a third of a lease passes"
        for n, caller in enumerate(self.callers):
            if caller.phase == "idle" and self.calls < 3:
                yield f"{n} calls"
            if caller.phase == "working":
                yield f"the work of {n} returns"
                yield f"the work of {n} raises"
            if caller.phase == "ending":
                yield f"the ending of {n} arrives"
                if not caller.executed:
                    yield f"the ending of {n} arrives, its reply is lost"
                yield f"{n} gives up"
            if isinstance(caller, AwaitingCaller) and caller.phase != "idle" and not caller.cancelled:
                yield f"{n} is cancelled"

    def take(self, step: str) -> None:
        self.path = (*self.path, step)
        started = [caller.starts for caller in self.callers]
        if step == "renew":
            for caller in self.callers:
                caller.renew()
            self.unrenewed = []
        elif step == "a third of a lease passes":
            self.thirds += 1
            self.clock.advance(LEASE / 3000)
            self.unrenewed = [one for caller in self.callers for one in caller.renewals.running]
        else:
            self._act(self.callers[int(next(word for word in step.split() if word.isdigit()))], step)
        running = {one for caller in self.callers for one in caller.renewals.running}
        self.unrenewed = [one for one in self.unrenewed if one in running]
        self._judge(started)

    def _act(self, caller: Caller, step: str) -> None:
        if step.endswith("calls"):
            self.calls += 1
            caller.call()
        elif "work" in step:
            caller.end_work(fails=step.endswith("raises"))
        elif step.endswith("gives up"):
            caller.give_up()
        elif step.endswith("is cancelled"):
            assert isinstance(caller, AwaitingCaller)
            caller.cancel()
        else:
            completes = caller.pending.script.name == "guard/complete"
            if step.endswith("arrives"):
                caller.arrive()
            else:
                caller.lose_reply()
                self.unread = self.unread or not completes
            self.done = self.done or completes
            self.released += not completes

    def _judge(self, started: list[int]) -> None:
        gave_up = sum(caller.gave_up for caller in self.callers)
        busy = [n for n, caller in enumerate(self.callers) if caller.phase != "idle" and not caller.executed]
        self.check(len(busy) < 2 or bool(gave_up), "two callers run the same work")
        if [caller.starts for caller in self.callers] != started:
            self.check(not self.done or self.path[-1].endswith("arrives"), "what is done runs again")
        starts = sum(caller.starts for caller in self.callers)
        self.check(starts <= 1 + self.released + gave_up, "the work runs again, and nobody gave its claim back")
        if not gave_up and not self.unread:
            lost = [name for caller in self.callers for name in dict(caller.gate.counters) if "lost" in name]
            self.check(not lost, "a lease that is renewed is lost")
        for caller in self.callers:
            renews, idle = bool(caller.renewals.running), caller.phase == "idle"
            self.check(not (renews and idle), "a lease is renewed after its ending was answered")

    def check(self, holds: bool, what: str) -> None:
        if not holds:
            raise Violation(what, self.path)

    def same(self) -> Any:
        record = self.callers[0].server.run(claims_of(self.callers[0].gate).inspect(self.key)) if self.calls else None
        callers = [
            (one.phase, one.starts, one.executed, one.gave_up, one.cancelled, len(one.renewals.running))
            for one in self.callers
        ]
        seen = (record.state, record.lease_left, record.attempts, record.taken_over) if record else ()
        return (*seen, self.thirds, self.calls, len(self.unrenewed), self.done, self.released, self.unread, *callers)

    @property
    def key(self) -> Any:
        return claims_of(self.callers[0].gate).key("s", "k")

    def close(self) -> None:
        for caller in self.callers:
            caller.close()


class Search:
    """Every path up to a depth. States that look the same from outside are followed once."""

    def __init__(self, url: str, namespace: str, make: Callable[..., Caller], program: Program) -> None:
        self._args = make, program
        self._url, self._namespace = url, namespace
        self._worlds = 0

    def _follow(self, path: tuple[str, ...]) -> World:
        self._worlds += 1
        world = World(self._url, f"{self._namespace}-{self._worlds}", *self._args)
        try:
            for step in path:
                world.take(step)
        except BaseException:
            world.close()
            raise
        return world

    def run(self, depth: int) -> int:
        """Return how many states there are within so many steps. Raises Violation."""
        seen: set[Any] = set()
        frontier: list[tuple[str, ...]] = [()]
        for length in range(depth + 1):
            found: list[tuple[str, ...]] = []
            for path in frontier:
                world = self._follow(path)
                try:
                    if (same := world.same()) not in seen:
                        seen.add(same)
                        found += [(*path, step) for step in world.steps()] if length < depth else []
                finally:
                    world.close()
            frontier = found
        return len(seen)


@pytest.fixture(params=["blocking", "awaiting"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., Caller]]:
    if request.param == "blocking":
        yield BlockingCaller
        return
    loop = asyncio.new_event_loop()
    yield lambda *args: AwaitingCaller(loop, *args)
    loop.close()


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.slow
def test_no_order_of_steps_runs_the_work_twice(
    url: str, namespace: str, make: Any, program: Program, record_fault: Any
) -> None:
    states = Search(url, namespace, make, program).run(DEPTH)
    print(f"{program}: {states:,} states within {DEPTH} steps")
    assert states > 100
    record_fault(
        "every order of steps of the guard's drivers, renewals and silent completions among them (N: states)",
        states,
        promises="P1 P2 P3",
        exhaustive=True,
        steps=f"{DEPTH}",
    )


def _end_with_the_work(self: Any) -> None:
    end_work(self)
    self._context.heartbeat.remove(self)


end_work = Heartbeat.end_work
FAULTS: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "renewals end with the work": ("end_work", _end_with_the_work, "run the same work"),
    "renewals go on after the answer": ("__exit__", lambda self, *_: None, "renewed after"),
    "renewals end with a cancelled caller": ("hand_over", lambda self: None, "run the same work"),
    "renewals of a cancelled caller never end": ("stop", lambda self: None, "renewed after"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow
def test_a_fault_in_a_driver_is_found(
    url: str, namespace: str, make: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "cancelled" in fault and make is BlockingCaller:
        pytest.skip("a thread cannot be cancelled")
    name, broken, what = FAULTS[fault]
    monkeypatch.setattr(Heartbeat, name, broken)
    with pytest.raises(Violation, match=what) as found:
        Search(url, namespace, make, "guarded function").run(7)
    print(found.value)
