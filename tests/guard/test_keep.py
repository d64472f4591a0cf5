"""`keep`: the broker does not redeliver a message while its handler works, or waits for another owner."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument, current
from tests.guard.test_batches import block
from tests.guard.test_verdicts import fail, guarded_in
from tests.waiting import eventually, wait_until

LONG = {"lease": "60s"}
"""A third of it is longer than a test: what is called in a test was called at once."""


def keeps() -> bool:
    """Return whether a thread or a task of this process keeps a message."""
    return any(thread.name == "idemgate-keep" for thread in threading.enumerate())


async def test_keep_is_called_with_the_lease_while_the_handler_runs(face: Any) -> None:
    kept, enough = [], threading.Event()

    def keep(seconds: float) -> None:
        kept.append((seconds, threading.current_thread().name))
        if len(kept) == 2:
            enough.set()

    verdict = await face.guard("orders", lease="1s").run("k", lambda: enough.wait(30), keep=keep)
    assert (verdict.outcome, verdict.value) == ("handled", True)
    assert {seconds for seconds, _ in kept} == {1.0}
    assert not any("heartbeat" in name for _, name in kept)


async def test_an_error_of_keep_is_counted_and_the_handler_goes_on(face: Any) -> None:
    failed = threading.Event()

    def keep(_: float) -> None:
        failed.set()
        raise ConnectionError("broker away")

    def handler() -> str:
        assert failed.wait(30)
        while not face.gate.counters["once.keep_failed"]:
            failed.wait(0.001)
        return "done"

    assert (await face.guard("orders", lease="1s").run("k", handler, keep=keep)).value == "done"


async def test_keep_may_be_a_coroutine_function(gate: Gate) -> None:
    kept = asyncio.Event()

    async def keep(seconds: float) -> None:
        kept.set()

    verdict = await gate.guard("orders", lease="1s").aio.run("k", kept.wait, keep=keep)
    assert verdict.value is True


async def test_keep_may_be_a_lambda_around_a_coroutine_function(gate: Gate) -> None:
    # Given a client of a broker whose method is async, and a lambda that drops the seconds
    kept = asyncio.Event()

    async def extend() -> None:
        kept.set()

    # When the handler runs, then the coroutine of the lambda runs, too
    async def handler() -> bool:
        return await asyncio.wait_for(kept.wait(), 30)

    verdict = await gate.guard("orders", lease="1s").aio.run("k", handler, keep=lambda _: extend())
    assert (verdict.value, gate.counters["once.keep_failed"]) == (True, 0)


def test_a_coroutine_that_keep_returns_to_a_blocking_run_is_counted_as_its_failure(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    async def extend() -> None: ...

    def handler() -> None:
        wait_until(lambda: "a plain function returned its coroutine" in caplog.text)

    assert gate.guard("orders", lease="1s").run("k", handler, keep=lambda _: extend()).outcome == "handled"
    assert gate.counters["once.keep_failed"]


def test_a_blocking_run_refuses_a_coroutine_function_as_keep(gate: Gate) -> None:
    async def keep(seconds: float) -> None: ...

    with pytest.raises(InvalidArgument, match="keep"):
        gate.guard("orders").run("k", fail, keep=keep)
    assert gate.inspect("k", scope="orders").state == "absent"


async def test_keep_is_called_at_once(face: Any) -> None:
    called = threading.Event()
    guard = face.guard("orders", **LONG)
    verdict = await guard.run("k", lambda: called.wait(30), keep=lambda _: called.set())
    assert (verdict.outcome, verdict.value) == ("handled", True)
    called.clear()
    batch = await guard.run_many([("a", 1), ("b", 2)], lambda _: called.wait(30), keep=lambda _: called.set())
    assert [verdict.value for verdict in batch] == [True, True]
    called.clear()
    guarded = guarded_in(face, lambda *_: called.wait(30), key="{order}", scope="decorated", **LONG)
    assert (await guarded("k", keep=lambda _: called.set())).value is True


async def test_a_duplicate_is_not_kept(face: Any) -> None:
    guard, kept = face.guard("orders", **LONG), []
    await guard.run("k", lambda: 1)
    assert (await guard.run("k", fail, keep=kept.append)).outcome == "duplicate"
    assert (await guard.run_many([("k", 1)], fail, keep=kept.append))[0].outcome == "duplicate"
    assert kept == []


async def test_keep_covers_the_wait_for_another_owner(face: Any) -> None:
    owner, called = await face.claim("k", scope="orders", **LONG), asyncio.Event()
    loop = asyncio.get_running_loop()
    waiting = asyncio.create_task(
        face.guard("orders", **LONG).run(
            "k", fail, wait="30s", keep=lambda _: loop.call_soon_threadsafe(called.set)
        )
    )  # fmt: skip
    await asyncio.wait_for(called.wait(), 30)
    await owner.complete("first")
    assert (await waiting).value == "first"


async def run_until_unkept(lasting: Any, guard: Any, on_kept: Callable[[], object] = lambda: None) -> None:
    """Run a handler that goes on until nothing keeps its message any more."""
    kept = asyncio.Event() if lasting.awaiting else threading.Event()

    def is_over() -> bool:
        if not kept.is_set():
            return False
        on_kept()
        names = [task.get_name() for task in asyncio.all_tasks(loop)] if lasting.awaiting else []
        return "idemgate-keep" not in names and not keeps()

    loop = asyncio.get_running_loop()
    verdict = await guard.run(
        "k", lambda: wait_until(is_over) and wait_until(lambda: current().lease_lost), keep=lambda _: kept.set()
    )
    assert verdict.value is True


async def test_keep_ends_with_max_run_while_the_handler_hangs(lasting: Any) -> None:
    await run_until_unkept(lasting, lasting.guard("orders", lease="1s", max_run="500ms"))


async def test_keep_ends_with_the_lease_while_the_handler_hangs(lasting: Any) -> None:
    def forget() -> None:
        lasting.gate.forget("k", scope="orders", force=True)

    await run_until_unkept(lasting, lasting.guard("orders", lease="1s"), forget)


async def test_keep_ends_with_the_run(face: Any) -> None:
    called = threading.Event()
    await face.guard("orders", **LONG).run("k", lambda: called.wait(30), keep=lambda _: called.set())
    await asyncio.sleep(0)
    wait_until(lambda: not keeps(), 30)


async def test_an_unguarded_run_is_kept_too(face: Any) -> None:
    called = threading.Event()
    guard = face.guard("orders", on_missing_key="run", **LONG)
    verdict = await guard.run(None, lambda: called.wait(30), keep=lambda _: called.set())
    assert (verdict.outcome, verdict.value) == ("unguarded", True)


async def test_the_copies_in_a_batch_are_kept_too(face: Any) -> None:
    called = threading.Event()
    guard = face.guard("orders", **LONG)

    def handle(n: int) -> bool:
        if n == 1:
            raise ValueError
        called.clear()  # after the first message, which was kept
        return called.wait(30)

    batch = await guard.run_many([("k", 1), ("k", 2)], handle, keep=lambda _: called.set())
    assert [verdict.value for verdict in batch] == [None, True]


async def test_a_block_of_claims_is_kept_until_its_end(face: Any) -> None:
    called = threading.Event()
    options: Any = {"scope": "orders", "keep": lambda _: called.set(), **LONG}
    async with block(face, ["a", "b"], **options):
        await eventually(called.is_set)
    await eventually(lambda: not keeps())
    # A block that finds nothing to do keeps nothing
    for key in "ab":
        await (await face.claim(key, scope="orders")).complete()
    async with block(face, ["a", "b"], **options):
        assert not keeps()
    async with block(face, [], **options) as none:
        assert none == []


def test_claims_refuse_what_is_no_keep(gate: Gate) -> None:
    async def keep(seconds: float) -> None: ...

    for bad in (keep, 5):
        with pytest.raises(InvalidArgument, match="keep"):
            gate.claim_many(["a"], keep=bad, scope="orders")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="keep"):
        gate.aio.claim_many(["a"], keep=5, scope="orders")  # type: ignore[arg-type]
    assert gate.inspect("a", scope="orders").state == "absent"
