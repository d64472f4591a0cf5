"""The guard of a consumer: it runs a handler once per key and returns a verdict."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, get_args
from uuid import UUID

import pytest
from tenacity.wait import wait_incrementing

from idemgate import (
    AlreadyDone,
    AlreadyInProgress,
    Bury,
    Gate,
    InvalidArgument,
    KeyReused,
    LeaseLost,
    MissingKey,
    OutcomeUnknown,
    PartialFailure,
    Retry,
    StoreUnavailable,
    Verdict,
    current,
    verdict_of,
)
from idemgate.errors import (
    AttemptsExhausted,
    DecodeError,
    DownstreamUnavailable,
    ReplayedFailure,
    ResultUnavailable,
)
from idemgate.guard.decorator import build_judge, build_judge_async
from idemgate.testing import Clock
from idemgate.types import Outcome
from tests.for_each import for_each

pytestmark = pytest.mark.one_in(3)


class Declined(Exception):
    pass


def fail(_message: object = None) -> None:
    raise Declined("no")


# -- the table of errors ----------------------------------------------------------------------------------------------


@for_each(
    ("error", "outcome"),
    [
        (None, "handled"),
        (AlreadyDone("k", 7), "duplicate"),
        (ResultUnavailable("k", "too large"), "duplicate"),
        (AlreadyInProgress("k", 2.5), "in_progress"),
        (LeaseLost("k", 1), "lost"),
        *((error, "rejected") for error in (
            Bury("no"), InvalidArgument("n", 1, "bad", "fix it"), MissingKey("n", 1, "bad", "fix it"), KeyReused("k"),
            ReplayedFailure("k", "m.E", "no"), OutcomeUnknown("k", 1, "s"), AttemptsExhausted("k", 1, "s"),
            DecodeError("no"),
        )),
        (Retry(), "failed"),
        (PartialFailure([1]), "failed"),
        (StoreUnavailable("away", "no"), "failed"),
        (Declined("no"), "failed"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else None,
)  # fmt: skip
def test_every_error_has_one_outcome(error: BaseException | None, outcome: str) -> None:
    verdict = verdict_of(error)
    assert (verdict.outcome, verdict.error) == (outcome, error)


def test_a_verdict_of_an_error_has_its_facts() -> None:
    assert verdict_of(AlreadyDone("k", 7))[:2] == ("duplicate", 7)
    assert verdict_of(AlreadyInProgress("k", 2.5)).retry_after == 2.5
    assert verdict_of(Retry(delay="1500ms")).retry_after == 1.5
    assert verdict_of(PartialFailure([1], delay=2)).retry_after == 2
    assert verdict_of(Retry()).retry_after is None


def test_an_invalid_delay_leaves_the_delay_to_the_consumer(caplog: pytest.LogCaptureFixture) -> None:
    assert verdict_of(Retry(delay="soon")).retry_after is None
    assert "verdict.bad_delay" in caplog.text


@for_each("outcome", get_args(Outcome))
def test_every_outcome_has_an_action(outcome: Any) -> None:
    action = Verdict(outcome, error=Declined()).action
    assert action == {"rejected": "reject", "in_progress": "retry", "failed": "retry", "lost": "retry"}.get(
        outcome, "ack"
    )


def test_the_delay_of_a_verdict_may_be_zero() -> None:
    assert [verdict_of(error).delay(7) for error in (Retry(delay=0), Retry(delay=2), Retry())] == [0, 2, 7]


def test_the_delay_of_a_verdict_takes_the_backoff_of_topics() -> None:
    third = Verdict("failed", error=Declined("no"), attempt=3)
    assert third.delay("1500ms") == 1.5
    assert third.delay(["1s", "10s", "1m", "1h"]) == 60
    assert third.delay(wait_incrementing(start=2, increment=2)) == 6
    assert 0 <= third.delay(None) <= 4
    # Without a claim there is no attempt, so the delay is that of the first
    assert verdict_of(Declined("no")).delay(["1s", "10s"]) == 1
    with pytest.raises(InvalidArgument, match="backoff"):
        third.delay([])


# -- run --------------------------------------------------------------------------------------------------------------


async def test_the_first_run_is_handled_and_a_copy_is_a_duplicate_with_its_result(face: Any) -> None:
    guard = face.guard("orders")
    first = await guard.run("k", lambda a, b: [a, b], 1, 2)
    assert first == Verdict("handled", [1, 2], attempt=1, token=first.token, ran=True)
    assert first.token > 0
    copy = await guard.run("k", fail)
    assert copy == Verdict("duplicate", [1, 2], attempt=1, replayed=True)


async def test_a_duplicate_from_the_cache_has_the_same_verdict(face: Any) -> None:
    guard = face.guard("orders", cache_size=10)
    await guard.run("k", lambda: 5)
    copies = [await guard.run("k", fail) for _ in range(3)]
    assert {(copy.outcome, copy.value, copy.replayed, copy.ran) for copy in copies} == {("duplicate", 5, True, False)}
    assert face.gate.counters["once.remembered"] == 3


async def test_a_decorator_with_the_same_scope_shares_the_records(face: Any) -> None:
    @face.once(key="{order}", scope="orders")
    def handle(order: str) -> str:
        return order + "!"

    assert await handle("a") == "a!"
    assert (await face.guard("orders").run("a", fail)).value == "a!"


async def test_a_failed_run_is_released_and_may_run_again(face: Any) -> None:
    guard = face.guard("orders")
    failed = await guard.run("k", fail)
    assert (failed.outcome, failed.ran, failed.retry_after) == ("failed", True, None)
    assert isinstance(failed.error, Declined)
    again = await guard.run("k", lambda: "ok")
    assert (again.outcome, again.value, again.attempt) == ("handled", "ok", 2)


async def test_a_permanent_error_of_the_handler_is_rejected(face: Any) -> None:
    def bury() -> None:
        raise Bury("broken")

    verdict = await face.guard("orders").run("k", bury)
    assert (verdict.outcome, verdict.ran) == ("rejected", True)


async def test_a_stored_failure_is_rejected_at_once_and_for_each_copy(face: Any) -> None:
    guard = face.guard("orders", on_error="store")
    first, copy = await guard.run("k", fail), await guard.run("k", fail)
    assert (first.outcome, first.ran, first.replayed) == ("rejected", True, False)
    assert (copy.outcome, copy.ran, copy.replayed) == ("rejected", False, True)
    assert isinstance(copy.error, ReplayedFailure)


async def test_a_kept_failure_tells_when_another_attempt_makes_sense(face: Any) -> None:
    guard = face.guard("orders", on_error="keep", lease="20s")
    assert (await guard.run("k", fail)).retry_after == 20
    busy = await guard.run("k", fail)
    assert busy.outcome == "in_progress"
    assert 0 < busy.retry_after <= 20


@pytest.mark.parametrize("policy", ["raise", "skip", "wait"])
async def test_a_key_that_another_owner_runs_is_in_progress(face: Any, policy: Any) -> None:
    await face.claim("k", scope="orders", lease="30s")
    verdict = await face.guard("orders", on_in_progress=policy, wait="20ms").run("k", fail)
    assert (verdict.outcome, verdict.ran) == ("in_progress", False)
    assert 0 < verdict.retry_after <= 30
    assert (verdict.error is None) == (policy == "skip")
    assert verdict.action == "retry"  # the other owner may still fail


async def test_one_call_can_wait_for_the_other_owner(face: Any) -> None:
    claim = await face.claim("k", scope="orders")
    guard = face.guard("orders")
    waiting = asyncio.create_task(guard.run("k", fail, wait="20s"))
    while not face.gate.counters["once.started"] and not waiting.done():
        await asyncio.sleep(0.01)
        if await claim.complete("first"):
            break
    assert await waiting == Verdict("duplicate", "first", attempt=1, replayed=True)


async def test_the_same_key_with_another_payload_is_rejected(face: Any) -> None:
    guard = face.guard("orders")
    await guard.run("k", lambda: 1, fingerprint={"total": 5})
    verdict = await guard.run("k", fail, fingerprint={"total": 6})
    assert verdict.outcome == "rejected"
    assert isinstance(verdict.error, KeyReused)


async def test_a_result_that_cannot_be_stored_is_handled_and_its_copy_does_not_run(face: Any) -> None:
    guard = face.guard("orders", max_result_bytes=10)
    assert (await guard.run("large", lambda: "x" * 100)).outcome == "handled"
    assert (await guard.run("object", lambda: object())).outcome == "handled"
    for key in ("large", "object"):
        copy = await guard.run(key, fail)
        assert (copy.outcome, copy.value, copy.ran) == ("duplicate", None, False)
        assert isinstance(copy.error, ResultUnavailable)


async def test_a_run_that_lost_its_lease_is_lost(face: Any, clock: Clock) -> None:
    def stall() -> str:
        clock.advance(60)
        face.gate.claim("k", scope="orders").complete("second")
        return "first"

    verdict = await face.guard("orders", lease="20s").run("k", stall)
    assert (verdict.outcome, verdict.value, verdict.ran) == ("lost", "first", True)


async def test_without_a_store_a_run_fails_before_the_handler(nowhere: Any) -> None:
    verdict = await nowhere.guard("orders").run("k", fail)
    assert (verdict.outcome, verdict.ran) == ("failed", False)
    assert isinstance(verdict.error, StoreUnavailable)


@pytest.mark.parametrize("policy", ["run", "local"])
async def test_without_a_store_a_run_is_unguarded_if_the_options_say_so(nowhere: Any, policy: Any) -> None:
    guard = nowhere.guard("orders", on_store_error=policy)
    assert await guard.run("k", lambda: 7) == Verdict("unguarded", 7, ran=True)
    many = await guard.run_many([("a", 1), ("b", 2)], lambda n: n)
    assert [(verdict.outcome, verdict.value) for verdict in many] == [("unguarded", 1), ("unguarded", 2)]


async def test_a_shadowed_duplicate_is_unguarded(face: Any) -> None:
    guard = face.guard("orders", shadow=True)
    assert (await guard.run("k", lambda: 1)).outcome == "handled"
    assert (await guard.run("k", lambda: 2))[:2] == ("unguarded", 2)


@pytest.mark.parametrize("keep", [None, lambda _: None])
async def test_a_handler_that_raises_a_cancellation_has_failed(gate: Gate, keep: Any) -> None:
    def fail() -> None:
        raise asyncio.CancelledError

    async def fail_async() -> None:
        fail()

    for handler in (fail, fail_async):
        verdict = await gate.guard("orders").aio.run("k", handler, keep=keep)
        assert (verdict.outcome, type(verdict.error), verdict.ran) == ("failed", asyncio.CancelledError, True)
        assert gate.inspect("k", scope="orders").state == "released"


async def test_a_handler_that_raises_a_cancellation_has_its_attempts_counted(gate: Gate) -> None:
    async def fail() -> None:
        raise asyncio.CancelledError

    guard = gate.guard("orders", max_attempts=2)
    seen = [await guard.aio.run("k", fail) for _ in range(2)]
    [many] = await guard.aio.run_many([("other", 1)], lambda _: fail())
    assert [(one.outcome, one.attempt, one.exhausted) for one in seen] == [("failed", 1, False), ("rejected", 2, True)]
    assert (many.outcome, many.attempt) == ("failed", 1)
    with pytest.raises(asyncio.CancelledError):
        await gate.once(key="{k}", scope="coroutine")(_raise_cancelled)("k")


async def _raise_cancelled(k: str) -> None:
    raise asyncio.CancelledError


async def test_cancellation_is_raised_and_releases_the_key(gate: Gate) -> None:
    guard, started = gate.guard("orders"), asyncio.Event()

    async def wait() -> None:
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(guard.aio.run("k", wait))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gate.inspect("k", scope="orders").state == "released"


def test_an_exit_is_raised_and_releases_the_key(gate: Gate) -> None:
    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        gate.guard("orders").run("k", leave)
    assert gate.inspect("k", scope="orders").state == "released"


# -- the last attempt -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("on_error", ["release", "keep", "share"])
async def test_the_last_attempt_is_rejected_with_the_error_of_the_handler(
    face: Any, clock: Clock, on_error: Any, many: bool
) -> None:
    guard = face.guard("orders", max_attempts=2, on_error=on_error, lease="20s")

    async def run() -> Verdict[Any]:
        return (await guard.run_many([("k", 1)], fail))[0] if many else await guard.run("k", fail)

    first = await run()
    assert (first.outcome, first.exhausted, type(first.error)) == ("failed", False, Declined)
    clock.advance(30)  # past a lease that was kept
    # When the last attempt fails, then its message is rejected now, and not one delivery later
    last = await run()
    assert (last.outcome, last.exhausted, last.ran, last.retry_after) == ("rejected", True, True, None)
    assert isinstance(last.error, AttemptsExhausted)
    assert isinstance(last.error.__cause__, Declined)
    assert "2 times without success, at last with tests.guard.test_verdicts.Declined: no; " in str(last.error)
    clock.advance(30)
    copy = await run()
    assert (copy.outcome, copy.exhausted, copy.ran) == ("rejected", True, False)


async def test_a_run_that_counts_no_attempt_is_not_the_last(face: Any) -> None:
    def defer() -> None:
        raise DownstreamUnavailable("no connection")

    guard = face.guard("orders", max_attempts=1)
    verdict = await guard.run("k", defer)
    assert (verdict.outcome, verdict.exhausted) == ("failed", False)
    assert (await guard.run("k", lambda: "ok")).outcome == "handled"


# -- done, but raise this ---------------------------------------------------------------------------------------------


class Ignore(Exception):
    """An exception by which a handler tells its framework what to do."""


def ignore(_message: object = None) -> None:
    raise Ignore("the message")


def complete_ignored(error: BaseException) -> Any:
    return "complete" if isinstance(error, Ignore) else "release"


@pytest.mark.parametrize("many", [False, True])
async def test_a_handler_can_be_done_and_raise(face: Any, many: bool) -> None:
    guard = face.guard("orders", on_error=complete_ignored, max_attempts=1, history=64)
    verdict = (await guard.run_many([("k", 1)], ignore))[0] if many else await guard.run("k", ignore)
    assert (verdict.outcome, verdict.action, verdict.value, verdict.ran) == ("handled", "ack", None, True)
    assert isinstance(verdict.error, Ignore)
    assert face.gate.counters["once.completed"] == 1
    copy = await guard.run("k", fail)
    assert (copy.outcome, copy.value, copy.error) == ("duplicate", None, None)
    assert (await guard.run("other", fail)).outcome == "rejected"


async def test_a_guarded_function_raises_what_makes_its_key_done(face: Any) -> None:
    handle = face.once(key="{k}", scope="orders", on_error=complete_ignored)(lambda k: ignore())
    with pytest.raises(Ignore):
        await handle("k")
    assert await handle("k") is None


async def test_a_callback_raises_what_makes_its_key_done(gate: Gate) -> None:
    decorate = gate.callback(key="{k}", scope="orders", on_error="complete")
    callback = decorate(lambda k: ignore())
    with pytest.raises(Ignore):
        callback("k")
    assert callback("k") is None
    quiet = gate.callback(key="{k}", scope="quiet", on_error="complete", on_failure="log")(lambda k: ignore())
    assert quiet("k") is None


async def test_a_key_may_become_done_by_an_exception_without_the_store(nowhere: Any) -> None:
    guard = nowhere.guard("orders", on_error="complete", on_store_error="local")
    assert (await guard.run("k", ignore)).outcome == "handled"
    assert (await guard.run("k", fail)).outcome == "duplicate"


# -- keys and fingerprints of a guard ---------------------------------------------------------------------------------


async def test_a_guard_finds_the_key_and_the_fingerprint_of_a_message(face: Any) -> None:
    guard = face.guard("orders", key="{event[id]}", fingerprint=["event[total]"])
    first = await guard.run(None, lambda message: message["total"], {"id": "k", "total": 5})
    assert (first.outcome, first.value) == ("handled", 5)
    assert (await guard.run(None, fail, {"id": "k", "total": 5})).outcome == "duplicate"
    assert isinstance((await guard.run(None, fail, {"id": "k", "total": 6})).error, KeyReused)
    # A given key, and a given fingerprint, count instead
    assert (await guard.run("other", lambda message: 1, {"id": "k", "total": 7})).outcome == "handled"
    assert (await guard.run("other", fail, {"total": 8}, fingerprint={"event[total]": 7})).outcome == "duplicate"


async def test_a_batch_finds_its_keys_and_fingerprints(face: Any) -> None:
    guard = face.guard("orders", key=lambda message: message["id"], fingerprint=lambda message: message["total"])
    await guard.run_many([(None, {"id": n, "total": n}) for n in range(1, 5)], lambda message: message["total"])
    # When the totals of some differ, then those are rejected
    messages = [{"id": n, "total": 3} for n in range(1, 6)] + [{"total": 1}]
    verdicts = await guard.run_many([(None, message) for message in messages], lambda message: "new")
    assert [(verdict.outcome, verdict.value) for verdict in verdicts] == [
        ("rejected", None), ("rejected", None), ("duplicate", 3), ("rejected", None), ("handled", "new"),
        ("rejected", None),
    ]  # fmt: skip
    assert [type(verdict.error) for verdict in verdicts if verdict.error is not None] == [KeyReused] * 3 + [KeyError]


async def test_a_guard_without_a_key_in_the_message_follows_on_missing_key(face: Any) -> None:
    guard = face.guard("orders", key="{event[id]}", on_missing_key="run")
    assert (await guard.run(None, lambda _: 1, {"total": 5})).outcome == "unguarded"


async def test_values_of_different_types_are_different_fingerprints(face: Any) -> None:
    guard = face.guard("orders")
    for key, value, other in (("text", "one", b"one"), ("number", 1, "1")):
        await guard.run(key, lambda: 1, fingerprint=value)
        assert (await guard.run(key, fail, fingerprint=value)).outcome == "duplicate"
        assert isinstance((await guard.run(key, fail, fingerprint=other)).error, KeyReused)


@for_each(
    ("option", "value", "problem"),
    [
        ("key", "{topic}:{message.id}", "is not a parameter"),
        ("key", "id", "has no field"),
        ("key", 5, "neither a template"),
        ("fingerprint", [], "names nothing"),
        ("fingerprint", 5, "names no fields"),
        ("fingerprint", "{body}", "is not a field"),
    ],
)
def test_a_guard_refuses_a_key_that_no_message_fits(gate: Gate, option: Any, value: Any, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        gate.guard("orders", **{option: value})


async def test_a_guard_refuses_a_coroutine_function_for_a_key(gate: Gate) -> None:
    async def find(message: Any) -> str: ...

    for options in ({"key": find}, {"fingerprint": find}):
        with pytest.raises(InvalidArgument, match="coroutine function"):
            gate.guard("orders", **options)


# -- the verdict on a decorated function ------------------------------------------------------------------------------


def guarded_in(face: Any, body: Callable[..., Any], **options: Any) -> Any:
    """Return a guarded function of one flavour, whose `verdict` is awaited in both."""
    if face.awaiting:

        async def charge(order: Any, total: int = 0) -> Any:
            return await asyncio.to_thread(body, order, total)

        return face.gate.once(**options)(charge).verdict

    def charge_blocking(order: Any, total: int = 0) -> Any:
        return body(order, total)

    guarded = face.gate.once(**options)(charge_blocking)
    return lambda *args, **kwargs: asyncio.to_thread(guarded.verdict, *args, **kwargs)


async def test_a_decorated_function_has_a_verdict(face: Any) -> None:
    def body(order: Any, total: int) -> int:
        if total < 0:
            raise Declined("no")
        return total

    verdict = guarded_in(face, body, key="{order[id]}", scope="orders", fingerprint="total")
    assert (await verdict({"id": "k"}, total=5))[:2] == ("handled", 5)
    copy = await verdict({"id": "k"}, 5)
    assert (copy.outcome, copy.value, copy.replayed) == ("duplicate", 5, True)
    assert isinstance((await verdict({"id": "k"}, 6)).error, KeyReused)
    assert isinstance((await verdict({"id": "other"}, total=-1)).error, Declined)
    assert isinstance((await verdict({})).error, MissingKey)
    assert (await verdict({"id": 1.5})).outcome == "rejected"


async def test_the_verdict_on_a_method_knows_its_object(face: Any) -> None:
    class Shop:
        name = "a"

        @face.gate.once(key="{self.name}:{order}", scope="shop")
        def pay(self, order: str) -> str:
            return self.name + order

    shop = Shop()
    assert [(await asyncio.to_thread(shop.pay.verdict, "1"))[:2] for _ in range(2)] == [  # type: ignore[attr-defined]
        ("handled", "a1"), ("duplicate", "a1"),
    ]  # fmt: skip


# -- a missing key ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [None, "", b""])
@pytest.mark.parametrize(
    ("policy", "expected"),
    [("raise", ("rejected", False)), ("run", ("unguarded", True)), ("skip", ("skipped", False))],
)
async def test_a_message_without_a_key(face: Any, key: Any, policy: Any, expected: tuple[str, bool]) -> None:
    verdict = await face.guard("orders", on_missing_key=policy).run(key, lambda: "ran")
    assert (verdict.outcome, verdict.ran) == expected
    assert isinstance(verdict.error, MissingKey) == (policy == "raise")
    assert verdict.value == ("ran" if policy == "run" else None)
    counter = f"once.missing_key.{policy}"
    assert face.gate.counters[counter] == (policy != "raise")


@pytest.mark.parametrize("event", [{}, {"id": None}, {"id": ""}, None])
@pytest.mark.parametrize("policy", ["raise", "run", "skip"])
async def test_a_decorated_function_without_a_key(face: Any, event: Any, policy: Any) -> None:
    @face.once(key="{event[id]}", on_missing_key=policy)
    def handle(event: dict[str, Any]) -> str:
        return "ran"

    if policy == "raise":
        with pytest.raises(MissingKey, match="id"):
            await handle(event)
    else:
        assert await handle(event) == ("ran" if policy == "run" else None)


async def test_an_invalid_key_is_no_missing_key(face: Any) -> None:
    verdict = await face.guard("orders", on_missing_key="run").run({"a": 1}, fail)
    assert verdict.outcome == "rejected"
    assert not isinstance(verdict.error, MissingKey)


# -- replays ----------------------------------------------------------------------------------------------------------


async def test_on_replay_gets_the_key_and_the_verdict_on_each_duplicate(face: Any) -> None:
    seen: list[Any] = []
    guard = face.guard("orders", on_replay=lambda key, verdict: seen.append((key, verdict.outcome, verdict.value)))
    await guard.run("k", lambda: 5)
    assert seen == []
    await guard.run("k", fail)
    await guard.run_many([("k", 1), ("new", 2)], lambda n: n)
    assert seen == [("k", "duplicate", 5), ("k", "duplicate", 5)]


@pytest.mark.parametrize("cache_size", [0, 10])
async def test_on_replay_of_a_decorator(face: Any, cache_size: int) -> None:
    seen: list[Any] = []

    @face.once(
        key="{order}", cache_size=cache_size, on_replay=lambda key, verdict: seen.append((key, verdict.replayed))
    )
    def handle(order: str) -> str:
        return order

    for _ in range(3):
        assert await handle("a") == "a"
    assert seen == [("a", True)] * 2


async def test_an_error_of_on_replay_is_counted_and_not_raised(face: Any) -> None:
    guard = face.guard("orders", on_replay=lambda key, verdict: 1 / 0)
    await guard.run("k", lambda: 5)
    assert (await guard.run("k", fail)).value == 5
    assert face.gate.counters["once.hook_failed"] == 1


async def test_a_coroutine_that_on_replay_returns_is_counted_as_its_failure(face: Any) -> None:
    async def notify() -> None: ...

    guard = face.guard("orders", on_replay=lambda *_: notify())
    assert [(await guard.run("k", lambda: "done")).value for _ in range(2)] == ["done", "done"]
    assert face.gate.counters["once.hook_failed"] == 1


def test_on_replay_must_be_a_plain_function(gate: Gate) -> None:
    async def hook(key: str, verdict: Any) -> None: ...

    with pytest.raises(InvalidArgument, match="on_replay"):
        gate.guard("orders", on_replay=hook)


# -- batches ----------------------------------------------------------------------------------------------------------


async def test_a_batch_gives_the_verdicts_of_single_runs_in_order(face: Any) -> None:
    guard = face.guard("orders")
    await guard.run("done", lambda: "old")
    await face.claim("busy", scope="orders")

    def handle(n: int) -> str:
        if n == 3:
            raise Declined("no")
        return f"ran {n}"

    messages = [("a", 1), ("done", 2), ("bad", 3), ("busy", 4), ("a", 5), (None, 6), ("b", 7)]
    verdicts = await guard.run_many(messages, handle)
    assert [(verdict.outcome, verdict.value) for verdict in verdicts] == [
        ("handled", "ran 1"), ("duplicate", "old"), ("failed", None), ("in_progress", None),
        ("duplicate", "ran 1"), ("rejected", None), ("handled", "ran 7"),
    ]  # fmt: skip
    assert [verdict.attempt for verdict in verdicts if verdict.ran] == [1, 1, 1]
    assert (await guard.run("bad", lambda: "now")).attempt == 2


async def test_each_run_of_a_batch_has_its_own_execution(face: Any) -> None:
    seen = []

    def handle(_: int) -> None:
        seen.append((current().key, current().attempt))

    await face.guard("orders").run_many([("a", 1), ("b", 2)], handle)
    assert seen == [("a", 1), ("b", 1)]


async def test_a_batch_stores_failures_and_results_that_cannot_be_stored(face: Any) -> None:
    guard = face.guard("orders", on_error="store", max_result_bytes=10)

    def handle(n: int) -> str:
        if n == 1:
            raise Declined("no")
        return "x" * n

    first = await guard.run_many([("a", 1), ("b", 2), ("c", 300)], handle)
    assert [verdict.outcome for verdict in first] == ["rejected", "handled", "handled"]
    second = await guard.run_many([("a", 1), ("b", 2), ("c", 300)], fail)
    assert [type(verdict.error).__name__ for verdict in second] == [
        "ReplayedFailure", "NoneType", "ResultUnavailable",
    ]  # fmt: skip
    assert not any(verdict.ran for verdict in second)


def test_an_exit_inside_a_batch_completes_what_has_ended_and_releases_the_rest(gate: Gate) -> None:
    def handle(n: int) -> int:
        if n == 2:
            raise KeyboardInterrupt
        return n

    with pytest.raises(KeyboardInterrupt):
        gate.guard("orders").run_many([("a", 1), ("b", 2), ("c", 3)], handle)
    assert [gate.inspect(key, scope="orders").state for key in "abc"] == ["done", "released", "released"]


async def test_a_cancelled_batch_completes_what_has_ended_and_releases_the_rest(gate: Gate) -> None:
    second = asyncio.Event()

    async def handle(n: int) -> int:
        if n == 2:
            second.set()
            await asyncio.Event().wait()
        return n

    batch = gate.guard("orders").aio.run_many([("a", 1), ("b", 2), ("c", 3)], handle)
    task = asyncio.create_task(batch)
    await second.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    while gate.inspect("a", scope="orders").state == "in_progress":
        await asyncio.sleep(0.01)
    assert [gate.inspect(key, scope="orders").state for key in "abc"] == ["done", "released", "released"]


async def test_an_async_batch_runs_as_many_handlers_as_asked(gate: Gate) -> None:
    both = asyncio.Barrier(2)

    async def meet(_: int) -> None:
        await both.wait()

    async with asyncio.timeout(30):
        verdicts = await gate.guard("orders").aio.run_many([("a", 1), ("b", 2)], meet, concurrency=2)
    assert [verdict.outcome for verdict in verdicts] == ["handled", "handled"]


async def test_a_choice_of_on_error_that_fails_concerns_its_message_only(face: Any) -> None:
    guard = face.guard("orders", on_error=lambda error: "bogus")

    def handle(n: int) -> int:
        if n == 1:
            raise Declined("no")
        return n

    verdicts = await guard.run_many([("a", 1), ("b", 2)], handle)
    assert [verdict.outcome for verdict in verdicts] == ["failed", "handled"]
    assert "on_error failed" in verdicts[0].error.__notes__[0]
    assert [(await face.inspect(key, scope="orders")).state for key in "ab"] == ["released", "done"]


async def test_a_handler_of_a_batch_that_raises_a_cancellation_has_failed(gate: Gate) -> None:
    async def handle(n: int) -> int:
        if n == 1:
            raise asyncio.CancelledError
        return n

    verdicts = await gate.guard("orders").aio.run_many([("a", 1), ("b", 2)], handle)
    assert [(verdict.outcome, verdict.value) for verdict in verdicts] == [("failed", None), ("handled", 2)]


@pytest.mark.parametrize("messages", [["a"], [("a", 1, 2)], "ab", 5])
def test_a_batch_refuses_other_things_than_pairs(gate: Gate, messages: Any) -> None:
    with pytest.raises(InvalidArgument, match="messages"):
        gate.guard("orders").run_many(messages, fail)


async def test_a_guard_that_marks_keys_before_the_run_runs_a_batch_one_by_one(face: Any) -> None:
    guard = face.guard("orders", at_most_once=True)
    verdicts = await guard.run_many([("a", 1), ("a", 2), ("b", 3)], lambda n: n)
    assert [(verdict.outcome, verdict.ran) for verdict in verdicts] == [
        ("handled", True), ("duplicate", False), ("handled", True),
    ]  # fmt: skip


# -- keys for other systems -------------------------------------------------------------------------------------------


async def test_key_for_is_the_same_for_each_attempt_and_differs_otherwise(face: Any) -> None:
    made: list[tuple[str, str]] = []

    def charge(ok: bool) -> None:
        made.append((current().key_for("charge"), current().key_for("refund")))
        if not ok:
            raise Declined("no")

    guard = face.guard("orders")
    await guard.run("k", charge, False)
    await guard.run("k", charge, True)
    await guard.run("k2", charge, True)
    await face.guard("other").run("k", charge, True)
    async with face.inside("k", scope="orders2"):
        made.append((current().key_for("charge"), current().key_for("refund")))
    first, second, *others = made
    assert first == second
    assert len({key for pair in made for key in pair}) == 2 * (1 + len(others))
    assert all(len(key) == 36 and str(UUID(key)) == key for pair in made for key in pair)


def test_key_for_never_changes_between_versions(tmp_path: Any) -> None:
    """Other systems store these keys."""
    with Gate(f"unix://{tmp_path}/absent.sock", namespace="shop", timeout="10ms") as gate:
        verdict = gate.guard("orders", on_store_error="run").run("k", lambda: current().key_for("charge"))
    assert verdict.value == "95d7b53f-0dbc-8267-88d3-42ec09ab07b6"


def test_key_for_refuses_an_empty_step(gate: Gate) -> None:
    verdict = gate.guard("orders").run("k", lambda: current().key_for(""))
    assert isinstance(verdict.error, InvalidArgument)


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["shadow", "at_most_once"])
@pytest.mark.parametrize("value", ["false", 0, None])
def test_a_switch_that_is_no_bool_is_refused(gate: Gate, name: Any, value: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"{name}=.*not a bool"):
        gate.guard("orders", **{name: value})


def test_a_guard_refuses_unknown_and_invalid_options(gate: Gate) -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        gate.guard("orders", keys="x")  # type: ignore[call-arg]
    with pytest.raises(InvalidArgument, match="on_missing_key"):
        gate.guard("orders", on_missing_key="ignore")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="scope"):
        gate.guard("")


# -- guarded functions of consumers -----------------------------------------------------------------------------------


class Service:
    """An object whose methods consume messages."""

    def __init__(self) -> None:
        self.ran: list[object] = []

    def handle(self, message: object) -> None:
        self.ran.append(message)


def test_the_verdict_on_a_guarded_function_is_that_of_its_guard(gate: Gate) -> None:
    service, ran = Service(), []
    functions = [
        gate.once(key="{n}", scope="a")(lambda n: ran.append(n)),
        gate.once(key="{message}", scope="b")(service.handle),
    ]

    class Guarded(Service):
        handle = gate.once(key="{message}", scope="c")(Service.handle)  # type: ignore[assignment]

    functions.append(Guarded().handle)
    for func in functions:
        judge = build_judge(func)
        assert [judge(1).outcome, judge(1).outcome, judge(2).outcome] == ["handled", "duplicate", "handled"]
    assert ran == service.ran == [1, 2]


async def test_the_verdict_on_a_guarded_coroutine_function_is_that_of_its_guard(gate: Gate) -> None:
    @gate.once(key="{n}")
    async def handle(n: int) -> None: ...

    judge = build_judge_async(handle)
    assert [(await judge(n)).outcome for n in (1, 1, None)] == ["handled", "duplicate", "rejected"]


def test_the_verdict_on_a_plain_function_follows_from_its_error() -> None:
    assert build_judge(lambda n: n)(5) == Verdict("handled", 5, ran=True)
    assert build_judge(lambda n: None)(5) == Verdict("handled", ran=True)
    assert build_judge(fail)(5)[:1] == ("failed",)
