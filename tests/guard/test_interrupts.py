"""An exception of a signal handler, at every point of a guarded call: Celery's soft limit, RQ's timeout, Ctrl-C.

The lease is not renewed afterwards, so the key is free after a lease at the latest. What has run stays done.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import pytest

from idemgate import Gate, current
from idemgate.errors import NoCurrentExecution
from idemgate.guard.current import set_current
from tests.guard.interrupts import Interrupter, Stopped, TimeUp

pytestmark = pytest.mark.one_in(3)

RESULT = {"charged": [1, 2.5, (3, "x")]}


class Trial(NamedTuple):
    """One call of a program: its keys, and whether its work had returned and was to be completed."""

    call: Callable[[], Any]
    scope: str
    finished: list[str]


def guarded(gate: Gate, key: str, **options: Any) -> Trial:
    finished: list[str] = []

    @gate.once(key="{k}", scope="s", on_error=options.pop("on_error", "release"))
    def work(k: str) -> Any:
        if options.get("fails"):
            raise ValueError
        finished.append(k)
        return RESULT

    return Trial(lambda: work(key), "s", finished)


def claimed(gate: Gate, key: str, *, fails: bool = False, completes: bool = False) -> Trial:
    def call() -> None:
        with gate.claim(key, scope="s") as claim:
            if completes:
                claim.complete(RESULT)
            if fails:
                raise ValueError

    return Trial(call, "s", [])


def batch_claimed(gate: Gate, key: str) -> Trial:
    def call() -> None:
        with gate.claim_many([key, f"{key}-b"], scope="s") as claims:
            gate.complete_many([(claims[0], RESULT)])

    return Trial(call, "s", [])


def batch_run(gate: Gate, key: str) -> Trial:
    finished: list[str] = []
    guard = gate.guard("s")

    def work(message: str) -> Any:
        finished.append(message)
        return RESULT

    return Trial(lambda: guard.run_many([(key, key), (f"{key}-b", f"{key}-b")], work), "s", finished)


PROGRAMS: dict[str, Callable[[Gate, str], Trial]] = {
    "once": guarded,
    "once, the work raises": lambda gate, key: guarded(gate, key, fails=True),
    "once, on_error=keep": lambda gate, key: guarded(gate, key, fails=True, on_error="keep"),
    "once, on_error=store": lambda gate, key: guarded(gate, key, fails=True, on_error="store"),
    "claim": claimed,
    "claim, the body raises": lambda gate, key: claimed(gate, key, fails=True),
    "claim, complete": lambda gate, key: claimed(gate, key, completes=True),
    "claim_many": batch_claimed,
    "run_many": batch_run,
}


def renewed(gate: Gate) -> list[Any]:
    """The renewals of leases that go on."""

    def living() -> list[Any]:
        every = [reference() for reference in tuple(gate.context.heartbeat._renewals)]
        return [one for one in every if one is not None and not one.optional]

    if living():
        gc.collect()
    return living()


def current_or_none() -> Any:
    try:
        return current()
    except NoCurrentExecution:
        return None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # raised in a destructor
@pytest.mark.parametrize("kind", [TimeUp, pytest.param(Stopped, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "program",
    [pytest.param(name, marks=[pytest.mark.slow] if name.endswith("_many") else []) for name in PROGRAMS],
)
def test_an_interrupt_at_any_point_leaks_no_heartbeat_and_loses_no_result(
    gate: Gate, program: str, kind: type[BaseException], record_fault: Any
) -> None:
    set_current(None)
    with suppress(ValueError):
        PROGRAMS[program](gate, "warm").call()
    points, lost, wrong = 0, [], []
    while True:
        points += 1
        key = f"k{points}"
        trial = PROGRAMS[program](gate, key)
        interrupter = Interrupter(points, kind)
        with suppress(kind, ValueError):
            interrupter.run(trial.call)
        if not interrupter.where:
            break
        if renewed(gate):
            lost.append(interrupter.where)
            gate.context.heartbeat._renewals.clear()  # so that each leak counts once
        record = gate.inspect(key, scope=trial.scope)
        if record.kind == "n" or (key in trial.finished and record.state not in ("done", "released")):
            wrong.append((interrupter.where, record.state, record.kind))
        if kind is TimeUp and "on_error" in program and record.state == "released":
            wrong.append((interrupter.where, record.state, "against the policy"))
        if gate.counters["once.hook_failed"]:
            wrong.append((interrupter.where, "hook_failed", "without a hook"))
        if (stale := current_or_none()) is not None:
            wrong.append((interrupter.where, "current", repr(stale)))
    assert not lost, f"{len(lost)} of {points} interrupts leak a heartbeat, such as {lost[0]}"
    assert not wrong, f"{len(wrong)} of {points} interrupts lose what has run, such as {wrong[0]}"
    assert points > 50
    record_fault("an exception of a signal handler, at every point of a call (N: points)", points, promises="P1 P2 P3")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a coroutine was not awaited
def test_an_interrupt_at_any_point_of_an_async_guard_loses_no_result(gate: Gate, record_fault: Any) -> None:
    finished, points, wrong = list[str](), 0, list[tuple[str, str]]()

    @gate.once(key="{k}", scope="s")
    async def work(k: str) -> Any:
        finished.append(k)
        return RESULT

    async def call(k: str) -> None:
        try:
            await work(k)
        finally:
            await gate.aio.close()  # waits for the calls under way

    with asyncio.Runner() as runner:
        runner.run(call("warm"))
        while True:
            points += 1
            key = f"k{points}"
            # In the code that runs in the caller's task: an event loop drops what a signal handler raises in a callback
            interrupter = Interrupter(points, TimeUp, "guard")
            with suppress(TimeUp):
                interrupter.run(functools.partial(runner.run, call(key)))
            if not interrupter.where:
                break
            state = gate.inspect(key, scope="s").state
            if key in finished and state not in ("done", "released"):
                wrong.append((interrupter.where, state))
    assert not wrong, f"{len(wrong)} of {points} interrupts lose what has run: {wrong}"
    assert points > 50
    name = "an exception of a signal handler, at every point of an async call in the guard (N: points)"
    record_fault(name, points, promises="P2 P3")


@pytest.mark.parametrize("starts", [True, False])
def test_a_heartbeat_thread_that_did_not_start_is_started_with_the_next_lease(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    # Given a system without threads, or a signal handler that raises while the thread starts, which then dies
    start, failed = threading.Thread.start, []

    def fail_once(thread: threading.Thread) -> None:
        if thread.name != "idemgate-heartbeat" or failed:
            return start(thread)
        failed.append(thread)
        if starts:
            monkeypatch.setattr(thread, "run", lambda: None)
            start(thread)
            thread.join()
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail_once)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        gate.claim("a", scope="s").__enter__()
    assert not renewed(gate)
    # And the gate can be closed, and is opened by its next use
    gate.close()
    # When another lease begins
    with gate.claim("b", scope="s"):
        # Then a thread renews it
        thread = gate.context.heartbeat._thread
        assert thread is not None
        assert thread not in failed
        assert thread.is_alive()
