"""Many at once: exactly one runs, the others wait for it, and heartbeats keep it alive while it runs."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime
from typing import Any

import freezegun
import pytest

from idemgate import AlreadyInProgress, Gate, StoreUnavailable, current
from idemgate.errors import ResultTimeout
from idemgate.testing import Clock
from tests.claims import claims_of

pytestmark = pytest.mark.one_in(3)


async def listening(raw: Any, gate: Gate, key: str) -> None:
    """Return once a client listens for the end of that key of scope "s"."""
    channel = claims_of(gate).key("s", key)[0]
    while raw.pubsub_numsub(channel)[0][1] == 0:
        await asyncio.sleep(0.002)


@pytest.mark.usefixtures("no_polls")
@pytest.mark.parametrize("end", ["complete", "release", "forget"])
async def test_who_waits_is_woken_when_the_owner_ends(face: Any, gate: Gate, raw: Any, end: str) -> None:
    # Given a key that runs elsewhere, and a call that waits for it
    owner = await face.claim("x", scope="s")

    @face.once(key="{k}", scope="s", on_in_progress="wait", wait="1h")
    def handle(k: str) -> str:
        return "ran here"

    task = asyncio.create_task(handle("x"))
    await listening(raw, gate, "x")
    # When its owner ends
    if end == "complete":
        await owner.complete("ran there")
    elif end == "release":
        await owner.release()
    else:
        await face.forget("x", scope="s", force=True)
    # Then the call goes on, although it never polls
    async with asyncio.timeout(60):
        assert await task == ("ran there" if end == "complete" else "ran here")


async def test_who_waits_goes_on_when_the_lease_of_the_owner_lapses(lasting: Any) -> None:
    started = time.monotonic()
    await lasting.claim("x", scope="s", lease="1s")

    @lasting.once(key="{k}", scope="s", on_in_progress="wait", wait="60s")
    def handle(k: str) -> tuple[str, int]:
        return "ran here", current().attempt

    assert await handle("x") == ("ran here", 2)
    assert time.monotonic() - started > 0.9
    assert lasting.gate.counters["once.taken_over"] == 1


async def test_waiting_ends_in_time_with_the_error_of_who_does_not_wait(face: Any) -> None:
    await face.claim("x", scope="s", lease="30s")

    @face.once(key="{k}", scope="s", on_in_progress="wait", wait="50ms")
    def handle(k: str) -> None: ...

    with pytest.raises(AlreadyInProgress) as refused:
        await handle("x")
    assert refused.value.retry_after == 30.0


async def test_fifty_tasks_on_one_key_make_one_run_and_fifty_equal_results(gate: Gate) -> None:
    ran = []

    @gate.once(key="{k}", on_in_progress="wait")
    async def handle(k: str) -> dict[str, Any]:
        ran.append(k)
        await asyncio.sleep(0.02)
        return {"run": len(ran), "at": ("x", 1)}

    results = await asyncio.gather(*(handle("x") for _ in range(50)))
    assert ran == ["x"]
    assert results == [{"run": 1, "at": ("x", 1)}] * 50
    assert (gate.counters["once.started"], gate.counters["once.done"]) == (1, 49)


def test_thirty_two_threads_on_one_key_make_one_run_and_equal_results(gate: Gate) -> None:
    ran = []
    start = threading.Barrier(32)

    @gate.once(key="{k}", on_in_progress="wait")
    def handle(k: str) -> int:
        ran.append(k)
        time.sleep(0.02)
        return len(ran)

    def call(_: int) -> int:
        start.wait()
        return handle("x")

    with ThreadPoolExecutor(32) as pool:
        results = list(pool.map(call, range(32)))
    assert ran == ["x"]
    assert results == [1] * 32


@pytest.mark.parametrize("ask", ["claim", "first"])
def test_of_thirty_two_threads_one_wins(gate: Gate, ask: str) -> None:
    start = threading.Barrier(32)

    def call(_: int) -> bool:
        start.wait()
        return gate.claim("x").started if ask == "claim" else gate.first("x", "1h")

    with ThreadPoolExecutor(32) as pool:
        assert sorted(pool.map(call, range(32))) == [False] * 31 + [True]


async def test_both_flavours_guard_the_same_keys(gate: Gate) -> None:
    def body(k: str) -> str:
        return "blocking"

    async def awaiting(k: str) -> str:
        return "awaiting"

    assert gate.once(key="{k}", scope="s")(body)("x") == "blocking"
    assert await gate.once(key="{k}", scope="s")(awaiting)("x") == "blocking"
    assert await gate.once(key="{k}", scope="s")(awaiting)("y") == "awaiting"
    assert gate.once(key="{k}", scope="s")(body)("y") == "awaiting"


# -- heartbeats -------------------------------------------------------------------------------------------------------


async def test_a_run_longer_than_its_lease_keeps_it(face: Any, gate: Gate, outlive_lease: Any) -> None:
    started, go = threading.Event(), threading.Event()

    @face.once(key="{k}", scope="s", lease="1s")
    def handle(k: str) -> str:
        started.set()
        assert go.wait(60)
        return "kept" if not current().lease_lost else "lost"

    task = asyncio.create_task(handle("x"))
    assert await asyncio.to_thread(started.wait, 60)
    await outlive_lease("x", scope="s")
    assert not (await face.claim("x", scope="s", lease="1ms")).started
    go.set()
    assert await task == "kept"
    assert gate.counters.snapshot() == {"once.started": 1, "once.completed": 1}


async def test_when_the_run_ends_so_do_its_heartbeats(lasting: Any, gate: Gate) -> None:
    @lasting.once(key="{k}", scope="s", lease="1s", on_error="keep")
    def handle(k: str) -> None:
        raise ValueError("keep")

    with pytest.raises(ValueError, match="keep"):
        await handle("x")
    claim = await lasting.claim("x", scope="s")
    assert await claim.wait("10s") == "started"
    assert claim.taken_over == 1


async def test_a_lost_lease_is_told_to_the_run(face: Any, gate: Gate) -> None:
    # Given a run whose record an operator forgets by force
    told = threading.Event()

    @face.once(key="{k}", scope="s", lease="1s")
    def handle(k: str) -> bool:
        execution = current()
        assert not execution.lease_lost
        gate.forget(k, scope="s", force=True)
        while not execution.lease_lost:
            told.wait(0.01)
        return current().lease_lost

    # When the next heartbeat finds nothing to renew, the run learns it, and its end is counted as lost
    assert await asyncio.wait_for(handle("x"), 60)
    assert gate.counters["once.lease_lost"] == 1
    assert gate.counters["once.lost"] == 1
    assert gate.counters["once.completed"] == 0


async def test_a_run_that_cannot_reach_the_store_is_told_before_its_lease_is_gone(
    impatient: Any, wire: Any, caplog: pytest.LogCaptureFixture
) -> None:
    @impatient.once(key="{k}", scope="s", lease="1s")
    def handle(k: str) -> str:
        wire.cut()
        while not current().lease_lost:
            time.sleep(0.01)
        wire.mend()
        return "told"

    # The clock of the store did not move, so nobody took over, and the end could still be recorded.
    assert await asyncio.wait_for(handle("x"), 60) == "told"
    assert impatient.gate.counters["once.lease_lost"] == 1
    assert [record.getMessage() for record in caplog.records if record.name == "idemgate.once"] == [
        "once.lease_lost scope='s' key='x'"
    ]
    assert (await impatient.inspect("x", scope="s")).state == "done"


async def test_a_claim_outside_of_a_block_is_not_renewed(lasting: Any, clock: Clock) -> None:
    await lasting.claim("x", lease="1s")
    claim = await lasting.claim("x")
    assert await claim.wait("60s") == "started"


# -- waiting for oneself ----------------------------------------------------------------------------------------------


def both(gate: Gate, awaiting: bool, **options: Any) -> Any:
    """Return a decorator for functions `f(k, inner)` that await or call `inner`, guarded by scope "s"."""

    def run(name: str) -> Any:
        if awaiting:

            async def awaited(k: str, inner: Any = None) -> Any:
                return await inner() if inner else k

            work: Any = awaited
        else:

            def called(k: str, inner: Any = None) -> Any:
                return inner() if inner else k

            work = called
        work.__qualname__ = name
        return gate.once(key="{k}", scope="s", on_in_progress="wait", wait="1h", **options)(work)

    return run


OWN = "part of"


@pytest.mark.parametrize("awaiting", [False, True])
async def test_a_call_that_would_wait_for_its_own_run_is_refused_at_once(gate: Gate, awaiting: bool) -> None:
    first, second = both(gate, awaiting)("first"), both(gate, awaiting)("second")

    async def run(work: Any) -> Any:
        async with asyncio.timeout(60):
            return await work() if awaiting else await asyncio.to_thread(work)

    # The same function, another one with that key, and with another key between them
    for number, inner in enumerate(
        (lambda k: first(k), lambda k: second(k), lambda k: second(f"{k} between", lambda: first(k)))
    ):
        with pytest.raises(AlreadyInProgress, match=OWN):
            await run(lambda inner=inner, k=f"k{number}": first(k, lambda: inner(k)))
        # And the key is free again, and another key was never refused
        assert await run(lambda k=f"k{number}": first(k, lambda: second(f"{k} other"))) == f"k{number} other"
    await gate.aio.close()


async def test_a_task_of_the_run_is_refused_while_the_run_lasts_and_not_after_it(gate: Gate) -> None:
    handle = both(gate, awaiting=True)("handle")
    began, tasks = asyncio.Event(), list[asyncio.Task[Any]]()

    async def later() -> Any:
        await began.wait()
        return await handle("k")

    async def inner() -> str:
        tasks.append(asyncio.create_task(later()))
        with pytest.raises(AlreadyInProgress, match=OWN):
            await asyncio.wait_for(asyncio.create_task(handle("k")), 60)
        return "ran"

    assert await handle("k", inner) == "ran"
    # Given a task that outlives the run, while another owner has the key
    await gate.aio.forget("k", scope="s")
    owner = await gate.aio.claim("k", scope="s")
    began.set()
    while gate.context.aio_link._state.subscription._listeners == {}:
        await asyncio.sleep(0.002)
    await owner.complete("there")
    # Then it waits like any other call
    assert await asyncio.wait_for(tasks[0], 60) == "there"
    await gate.aio.close()


@pytest.mark.parametrize("awaiting", [False, True])
async def test_a_claim_does_not_wait_for_the_block_around_it(gate: Gate, awaiting: bool) -> None:
    if awaiting:
        async with gate.aio.claim("k", scope="s") as owner:
            again = await gate.aio.claim("k", scope="s")
            with pytest.raises(AlreadyInProgress, match=OWN):
                await asyncio.wait_for(again.wait("1h"), 60)
            await owner.complete("done")
        assert await again.wait("1h") == "done"
        await gate.aio.close()
    else:
        with gate.claim("k", scope="s") as held:
            other = gate.claim("k", scope="s")
            with pytest.raises(AlreadyInProgress, match=OWN):
                other.wait("1h")
            held.complete("done")
        assert other.wait("1h") == "done"


@pytest.mark.parametrize("awaiting", [False, True])
async def test_a_message_that_waits_for_the_run_around_it_is_in_progress(gate: Gate, awaiting: bool) -> None:
    options = {"scope": "s", "on_in_progress": "wait", "wait": "1h"}
    if awaiting:
        guard = gate.guard(**options).aio

        async def inner(message: str) -> str:
            return message

        async def outer(message: str) -> Any:
            one = await guard.run("k", inner, message)
            return [one, *await guard.run_many([("k", message)], inner)]

        verdict = await asyncio.wait_for(guard.run("k", outer, "m"), 60)
    else:
        plain = gate.guard(**options)

        def call(message: str) -> Any:
            inside: Any = lambda inner: inner  # noqa: E731
            return [plain.run("k", inside, message), *plain.run_many([("k", message)], inside)]

        verdict = await asyncio.wait_for(asyncio.to_thread(plain.run, "k", call, "m"), 60)
    assert [one.outcome for one in verdict.value] == ["in_progress", "in_progress"]
    await gate.aio.close()


@pytest.mark.parametrize("awaiting", [False, True])
async def test_a_call_does_not_wait_for_a_batch_of_claims_around_it(gate: Gate, awaiting: bool) -> None:
    handle = both(gate, awaiting)("handle")
    if awaiting:
        async with gate.aio.claim_many(["a", "b"], scope="s") as held, asyncio.timeout(60):
            with pytest.raises(AlreadyInProgress, match=OWN):
                await handle("b")
            with pytest.raises(AlreadyInProgress, match=OWN):
                await (await gate.aio.claim("a", scope="s")).wait("1h")
            # A key that the body has ended is owned no more, and another key never was
            await held[1].release()
            assert await handle("b") == "b"
            assert await handle("c") == "c"
        assert await handle("a") == "a"
    else:
        with gate.claim_many(["a", "b"], scope="s") as claims:
            with pytest.raises(AlreadyInProgress, match=OWN):
                await asyncio.to_thread(handle, "b")
            with pytest.raises(AlreadyInProgress, match=OWN):
                gate.claim("a", scope="s").wait("1h")
            claims[1].release()
            assert handle("b") == "b"
            assert handle("c") == "c"
        assert handle("a") == "a"
    await gate.aio.close()


@pytest.mark.parametrize("awaiting", [False, True])
async def test_a_message_does_not_wait_for_another_one_of_its_batch(gate: Gate, awaiting: bool) -> None:
    handle = both(gate, awaiting)("handle")
    other = {"a": "b", "b": "a"}  # the later one has not run yet, the earlier one is not completed yet
    guard = gate.guard("s")

    async def awaited(message: str) -> Any:
        return await handle(other[message])

    messages = [("a", "a"), ("b", "b")]
    if awaiting:
        verdicts = await asyncio.wait_for(guard.aio.run_many(messages, awaited, concurrency=2), 60)
    else:
        verdicts = await asyncio.to_thread(guard.run_many, messages, lambda message: handle(other[message]))
    assert [type(verdict.error) for verdict in verdicts] == [AlreadyInProgress] * 2
    assert all(OWN in str(verdict.error) for verdict in verdicts)
    # And after the batch its keys are free
    assert (await handle("a") if awaiting else handle("a")) == "a"
    await gate.aio.close()


@pytest.mark.parametrize("wait", ["once", "claim", "result", "store"])
@pytest.mark.parametrize("aio", [False, True], ids=["blocking", "awaiting"])
def test_timeouts_end_in_a_test_that_freezes_the_time(url: str, namespace: str, wait: str, aio: bool) -> None:
    # Given a key that runs elsewhere, a trigger without a worker, and a store that is away
    gate = Gate(url, namespace=namespace)
    gate.claim("x", scope="s")
    away = Gate("redis://127.0.0.1:1", timeout="0.1s")
    topic = gate.topic("t", result_retention="1h")
    receipt = topic.trigger("k")

    def block() -> None:
        if wait == "once":
            gate.once(key="{k}", scope="s", on_in_progress="wait", wait="0.1s")(lambda k: k)("x")
        elif wait == "claim":
            assert gate.claim("x", scope="s").wait("0.1s") == "in_progress"
            raise TimeoutError
        elif wait == "result":
            topic.result(receipt, timeout="0.1s")
        else:
            away.first("k", "1h")

    async def suspend() -> None:
        if wait == "once":

            @gate.once(key="{k}", scope="s", on_in_progress="wait", wait="0.1s")
            async def handle(k: str) -> None:
                pytest.fail("it ran")

            await handle("x")
        elif wait == "claim":
            assert await (await gate.aio.claim("x", scope="s")).wait("0.1s") == "in_progress"
            raise TimeoutError
        elif wait == "result":
            await topic.aio.result(receipt, timeout="0.1s")
        else:
            await away.aio.first("k", "1h")

    async def wrapped() -> None:
        try:
            await suspend()
        finally:
            await gate.aio.close()
            await away.aio.close()

    # Then each wait ends all the same
    with freezegun.freeze_time("2026-01-01", real_asyncio=True):
        frozen = time.monotonic()
        with pytest.raises((AlreadyInProgress, TimeoutError, ResultTimeout, StoreUnavailable)):
            asyncio.run(wrapped()) if aio else block()
        assert time.monotonic() == frozen
    gate.close()
    away.close()


@pytest.mark.parametrize("aio", [False, True], ids=["blocking", "awaiting"])
def test_a_frozen_time_can_be_a_result_and_a_payload(url: str, namespace: str, aio: bool) -> None:
    # Given a function that returns the current time, and a topic
    gate, runs = Gate(url, namespace=namespace), list[str]()

    def read_clock(key: str) -> dict[str, Any]:
        runs.append(key)
        return {"at": datetime.now(UTC), "on": [date.today()]}  # noqa: DTZ011

    @gate.once(key="{key}", scope="aio")
    async def read_clock_later(key: str) -> dict[str, Any]:
        return read_clock(key)

    stamp = gate.once(key="{key}", scope="s")(read_clock)
    of_day = gate.once(scope="of a day")(lambda day: runs.append(str(day)))
    topic = gate.topic("t")

    async def await_both() -> list[dict[str, Any]]:
        try:
            await topic.aio.trigger("k", await read_clock_later("x"))
            return [await read_clock_later("x") for _ in range(2)]
        finally:
            await gate.aio.close()

    with freezegun.freeze_time("2026-01-02", real_asyncio=True):
        # When it is stored while a test freezes the time
        if aio:
            found = asyncio.run(await_both())
        else:
            topic.trigger("k", stamp("x"))
            found = [stamp("x") for _ in range(2)]
            of_day(date.today())  # noqa: DTZ011
            of_day(date.today())  # noqa: DTZ011
    # Then duplicates and the worker get it as the time that it stands for
    [delivery] = topic.take(1)
    assert runs == (["x"] if aio else ["x", "2026-01-02"])
    for value in (*found, delivery.payload):
        assert value == {"at": datetime(2026, 1, 2, tzinfo=UTC), "on": [date(2026, 1, 2)]}
    assert type(delivery.payload["at"]) is datetime
    assert type(delivery.payload["on"][0]) is date
    gate.close()
