"""`on_error="share"`: the callers that waited for a run get its failure, and do not run the work one after another."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest
import redis

from idemgate import AlreadyInProgress, Gate
from idemgate.core.waits import wait_for_wakeup
from idemgate.errors import DownstreamUnavailable, SharedFailure
from idemgate.guard import call
from idemgate.testing import Clock
from tests.claims import claims_of

CALLERS = 1_000


async def until_waiting(raw: Any, gate: Gate, key: str, callers: int = 1) -> None:
    """Return once this many connections are subscribed to the record of a key of scope "s"."""
    channel = claims_of(gate).key("s", key)[0]
    while raw.pubsub_numsub(channel)[0][1] < callers:
        await asyncio.sleep(0.002)


async def call_twice(raw: Any, gate: Gate, ran: list[str], go: threading.Event, make: Callable[[], Any]) -> Any:
    """Call what runs, and a second time while that runs. Let the run end once the second call waits for it."""
    first = asyncio.create_task(make())
    while not ran:
        await asyncio.sleep(0.002)
    second = asyncio.create_task(make())
    await until_waiting(raw, gate, "x")
    go.set()
    return first, second


def gated(ran: list[str], error: BaseException) -> tuple[threading.Event, Callable[[str], str]]:
    """A function that fails with `error` once the event is set."""
    go = threading.Event()

    def work(k: str) -> str:
        ran.append(k)
        assert go.wait(60)
        raise error

    return go, work


def shared(face: Any, work: Any, **options: Any) -> Any:
    return face.once(**{"key": "{k}", "scope": "s", "on_in_progress": "wait", "on_error": "share"} | options)(work)


@pytest.mark.usefixtures("no_polls")
async def test_a_caller_that_waited_gets_the_failure_and_a_later_caller_runs(face: Any, raw: Any) -> None:
    ran: list[str] = []
    go, work = gated(ran, LookupError("no item 7"))
    handle = shared(face, work)
    first, second = await call_twice(raw, face.gate, ran, go, lambda: handle("x"))
    with pytest.raises(LookupError, match="no item 7"):
        await first
    with pytest.raises(SharedFailure) as refused:
        await second
    error = refused.value
    assert (error.key, error.scope, error.kind, error.text) == ("x", "s", "builtins.LookupError", "no item 7")
    assert ran == ["x"]
    assert face.gate.counters["once.shared_failure"] == 1
    with pytest.raises(LookupError):
        await handle("x")
    assert ran == ["x", "x"]


@pytest.mark.usefixtures("no_polls")
async def test_an_outage_is_shared_and_counts_as_no_attempt(face: Any, raw: Any) -> None:
    ran: list[str] = []
    go, work = gated(ran, DownstreamUnavailable("away"))
    handle = shared(face, work, max_attempts=1)
    first, second = await call_twice(raw, face.gate, ran, go, lambda: handle("x"))
    with pytest.raises(DownstreamUnavailable):
        await first
    with pytest.raises(SharedFailure, match="away"):
        await second
    assert (await face.inspect("x", scope="s")).attempts == 0


async def test_a_thousand_tasks_that_wait_for_work_that_fails_make_one_run(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []
    waiting, everyone_waits = [0], asyncio.Event()

    async def count_and_wait(wake: asyncio.Event, seconds: float) -> None:
        waiting[0] += 1
        if waiting[0] >= CALLERS - 1:
            everyone_waits.set()
        await wait_for_wakeup(wake, seconds)

    monkeypatch.setattr(call, "wait_for_wakeup", count_and_wait)

    @gate.once(key="{k}", on_in_progress="wait", on_error="share")
    async def handle(k: str) -> None:
        ran.append(k)
        await everyone_waits.wait()
        raise ValueError("always")

    outcomes = await asyncio.gather(*(handle("x") for _ in range(CALLERS)), return_exceptions=True)
    kinds = [type(outcome) for outcome in outcomes]
    assert ran == ["x"]
    assert (kinds.count(ValueError), kinds.count(SharedFailure)) == (1, CALLERS - 1)
    assert (gate.counters["once.started"], gate.counters["once.shared_failure"]) == (1, CALLERS - 1)


def call_from_threads(url: str, namespace: str, callers: int, results: Any) -> None:
    """Call the guarded function from threads of this process, and report what each call raised."""
    with Gate(url, namespace=namespace) as gate:

        @gate.once(key="{k}", scope="s", on_in_progress="wait", on_error="share")
        def handle(k: str) -> None:
            results.put("ran")
            channel = claims_of(gate).key("s", k)[0]
            raw = redis.Redis.from_url(url)
            # All callers of all processes. Valkey 9.1 has some great number for 8, 15 and 16.
            while raw.pubsub_numsub(channel)[0][1] != 3 * callers - 1:
                time.sleep(0.01)
            time.sleep(0.2)  # a subscriber claims once more before it waits
            raw.close()
            raise ValueError("always")

        def call(_: int) -> str:
            try:
                handle("x")
            except (ValueError, SharedFailure) as error:
                return type(error).__name__
            return "returned"

        with ThreadPoolExecutor(callers) as pool:
            for name in pool.map(call, range(callers)):
                results.put(name)


@pytest.mark.timeout(180)
@pytest.mark.slow
def test_callers_of_three_processes_share_one_failure(url: str, namespace: str) -> None:
    context = get_context("spawn")
    results = context.Queue()
    children = [context.Process(target=call_from_threads, args=(url, namespace, 8, results)) for _ in range(3)]
    for child in children:
        child.start()
    told = [results.get(timeout=120) for _ in range(25)]
    for child in children:
        child.join(60)
    assert sorted(told) == ["SharedFailure"] * 23 + ["ValueError", "ran"]


@pytest.mark.parametrize(("error", "starts"), [(ValueError("1"), 1), (LookupError("1"), 2)])
async def test_a_callable_chooses_for_each_exception(face: Any, raw: Any, error: Exception, starts: int) -> None:
    ran: list[str] = []
    go, work = gated(ran, error)
    handle = shared(face, work, on_error=lambda e: "share" if isinstance(e, ValueError) else "release")
    first, second = await call_twice(raw, face.gate, ran, go, lambda: handle("x"))
    with pytest.raises(type(error), match="1"):
        await first
    with pytest.raises(SharedFailure if starts == 1 else LookupError):
        await second
    assert len(ran) == starts


async def test_a_cancelled_run_is_not_shared(gate: Gate, raw: Any) -> None:
    ran: list[str] = []

    @gate.once(key="{k}", scope="s", on_in_progress="wait", on_error="share")
    async def handle(k: str) -> str:
        ran.append(k)
        if len(ran) == 1:
            await asyncio.Event().wait()
        return "ran"

    first = asyncio.create_task(handle("x"))
    while not ran:
        await asyncio.sleep(0.002)
    second = asyncio.create_task(handle("x"))
    await until_waiting(raw, gate, "x")
    first.cancel()
    assert await second == "ran"


def fail_shared(gate: Gate, *, print_: bytes = b"") -> None:
    """A run that another caller waits for, and that fails. Both are sent to the server as scripts."""
    claims, record = claims_of(gate), claims_of(gate).key("s", "x")
    link = gate.context.link
    link.run(claims.claim(record, b"a" * 16, 30_000, 60_000, print_))
    link.run(claims.claim(record, b"b" * 16, 30_000, 60_000, print_, wait=1))
    link.run(claims.release(record, b"a" * 16, 60_000, failure=b"failure"))


def test_a_failure_that_no_caller_waited_for_is_not_stored(gate: Gate, raw: Any) -> None:
    claims, record = claims_of(gate), claims_of(gate).key("s", "x")
    link = gate.context.link
    link.run(claims.claim(record, b"a" * 16, 30_000, 60_000))
    link.run(claims.release(record, b"a" * 16, 60_000, failure=b"failure"))
    assert b"failure" not in raw.get(record[0])
    assert link.run(claims.claim(record, b"b" * 16, 30_000, 60_000, wait=2)).state == "started"


def test_the_next_run_drops_the_failure_and_gets_the_checkpoint(gate: Gate, raw: Any) -> None:
    claims, record = claims_of(gate), claims_of(gate).key("s", "x")
    link, note = gate.context.link, gate.context.codec.encode("note", "checkpoint")
    link.run(claims.claim(record, b"a" * 16, 30_000, 60_000))
    link.run(claims.checkpoint(record, b"a" * 16, note))
    link.run(claims.claim(record, b"b" * 16, 30_000, 60_000, wait=1))
    link.run(claims.release(record, b"a" * 16, 60_000, failure=b"failure"))
    assert b"failure" in raw.get(record[0])
    seen = gate.inspect("x", scope="s")
    assert (seen.state, seen.attempts, seen.recovered) == ("released", 1, "note")
    entry = link.run(claims.claim(record, b"c" * 16, 30_000, 60_000))
    assert (entry.state, entry.attempt, entry.checkpoint) == ("started", 2, note)
    assert b"failure" not in raw.get(record[0])


def test_a_caller_with_another_payload_does_not_get_the_failure(gate: Gate) -> None:
    fail_shared(gate, print_=b"p" * 16)
    claims, record = claims_of(gate), claims_of(gate).key("s", "x")
    claim = claims.claim(record, b"b" * 16, 30_000, 60_000, b"q" * 16, wait=2)
    assert gate.context.link.run(claim).state == "started"


def test_a_copy_of_the_release_and_of_the_claim_get_the_same_answers(gate: Gate) -> None:
    fail_shared(gate)
    claims, record, link = claims_of(gate), claims_of(gate).key("s", "x"), gate.context.link
    assert link.run(claims.release(record, b"a" * 16, 60_000, failure=b"another"))
    for _ in range(2):
        entry = link.run(claims.claim(record, b"b" * 16, 30_000, 60_000, wait=2))
        assert (entry.state, entry.attempt, entry.result) == ("shared_failure", 1, b"failure")


def test_the_failure_ends_with_the_retention(gate: Gate, clock: Clock) -> None:
    fail_shared(gate)
    clock.advance("60s")
    claims, record = claims_of(gate), claims_of(gate).key("s", "x")
    assert gate.context.link.run(claims.claim(record, b"b" * 16, 30_000, 60_000, wait=2)).state == "started"


async def test_a_caller_of_exhausted_attempts_gets_the_failure_that_it_waited_for(face: Any, raw: Any) -> None:
    ran: list[str] = []
    go, work = gated(ran, ValueError("1"))
    handle = shared(face, work, max_attempts=1)
    first, second = await call_twice(raw, face.gate, ran, go, lambda: handle("x"))
    with pytest.raises(ValueError, match="1"):
        await first
    with pytest.raises(SharedFailure):
        await second


@pytest.mark.parametrize("many", [False, True], ids=["run", "run_many"])
async def test_the_verdict_on_a_shared_failure_is_failed(face: Any, raw: Any, many: bool) -> None:
    ran: list[str] = []
    go, work = gated(ran, ValueError("1"))
    guard = face.guard("s", on_in_progress="wait", on_error="share")

    async def run() -> Any:
        return (await guard.run_many([("x", "x")], work))[0] if many else await guard.run("x", work, "x")

    first, second = await call_twice(raw, face.gate, ran, go, run)
    failed, verdict = await first, await second
    assert (failed.outcome, failed.action, failed.ran, type(failed.error)) == ("failed", "retry", True, ValueError)
    assert (verdict.outcome, verdict.action, verdict.ran, verdict.attempt) == ("failed", "retry", False, 1)
    assert isinstance(verdict.error, SharedFailure)
    assert not verdict.replayed
    assert ran == ["x"]


async def test_without_the_store_a_shared_failure_releases_the_key(nowhere: Any) -> None:
    ran: list[str] = []
    go, work = gated(ran, ValueError("1"))
    handle = shared(nowhere, work, on_store_error="local")
    first = asyncio.create_task(handle("x"))
    while not ran:
        await asyncio.sleep(0.002)
    with pytest.raises(AlreadyInProgress):  # no store would end the wait
        await handle("x")
    go.set()
    with pytest.raises(ValueError, match="1"):
        await first
    with pytest.raises(ValueError, match="1"):
        await handle("x")
    assert ran == ["x", "x"]


async def test_a_claim_that_waits_may_start_after_a_shared_failure(face: Any) -> None:
    owner = await face.claim("x", scope="s")
    claim = await face.claim("x", scope="s")
    claims, record = claims_of(face.gate), claims_of(face.gate).key("s", "x")
    release = claims.release(record, owner._request.owner, 60_000, failure=b"failure")
    face.gate.context.link.run(release)
    assert await claim.wait("10s") == "started"


async def test_a_failure_that_cannot_be_decoded_is_still_a_failure(face: Any, raw: Any) -> None:
    ran: list[str] = []
    _, work = gated(ran, ValueError("1"))
    handle = shared(face, work)
    first = face.gate.claim("x", scope="s")
    second = asyncio.create_task(handle("x"))
    await until_waiting(raw, face.gate, "x")
    claims, record = claims_of(face.gate), claims_of(face.gate).key("s", "x")
    face.gate.context.link.run(claims.release(record, first._request.owner, 60_000, failure=b"\xc1"))
    with pytest.raises(SharedFailure, match="cannot be decoded"):
        await second
    assert not ran
