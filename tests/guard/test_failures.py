"""What a run that fails leaves behind: on_error, on_lease_loss, max_attempts, retry."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import tenacity

from idemgate import AlreadyInProgress, Gate, OutcomeUnknown, current
from idemgate.errors import (
    AttemptsExhausted,
    DownstreamUnavailable,
    LeaseLost,
    NotDurable,
    ReplayedFailure,
    StoreUnavailable,
)
from idemgate.testing import Clock

pytestmark = pytest.mark.one_in(5)


def failing(*errors: BaseException | None) -> tuple[list[int], Callable[[str], str]]:
    """A function that raises each of these in turn (None: returns), and the list of the attempts it made."""
    attempts: list[int] = []

    def body(k: str) -> str:
        attempts.append(current().attempt)
        error = errors[len(attempts) - 1]
        if error is not None:
            raise error
        return "done at last"

    return attempts, body


# -- on_error ---------------------------------------------------------------------------------------------------------


async def test_on_error_release_lets_the_next_caller_run(face: Any) -> None:
    attempts, body = failing(ValueError("1"), ValueError("2"), None)
    handle = face.once(key="{k}")(body)
    for text in ("1", "2"):
        with pytest.raises(ValueError, match=text):
            await handle("x")
    assert [await handle("x"), await handle("x")] == ["done at last"] * 2
    assert attempts == [1, 2, 3]


async def test_on_error_keep_lets_nobody_run_before_the_lease_ends(face: Any, clock: Clock) -> None:
    attempts, body = failing(ValueError("1"), None)
    handle = face.once(key="{k}", on_error="keep", lease="30s")(body)
    with pytest.raises(ValueError, match="1"):
        await handle("x")
    with pytest.raises(AlreadyInProgress) as refused:
        await handle("x")
    assert refused.value.retry_after == 30.0
    clock.advance("30s")
    assert await handle("x") == "done at last"
    assert attempts == [1, 2]
    assert face.gate.counters["once.taken_over"] == 1


async def test_on_error_store_replays_the_failure_until_retention_ends(face: Any, clock: Clock) -> None:
    attempts, body = failing(LookupError("no item 7"), None)
    handle = face.once(key="{k}", scope="s", on_error="store", retention="1h")(body)
    with pytest.raises(LookupError, match="no item 7"):
        await handle("x")
    for how in ("replay", "raise"):
        with pytest.raises(ReplayedFailure) as refused:
            await face.once(key="{k}", scope="s", on_done=how)(body)("x")
        error = refused.value
        assert (error.key, error.kind, error.text) == ("x", "builtins.LookupError", "no item 7")
    assert await face.once(key="{k}", scope="s", on_done="skip")(body)("x") is None
    clock.advance("1h")
    assert await handle("x") == "done at last"
    assert attempts == [1, 1]


async def test_a_stored_failure_is_cut_where_it_is_long_and_mended_where_it_is_no_text(face: Any) -> None:
    _, body = failing(ValueError("\ud800" + "x" * 5000))
    handle = face.once(key="{k}", on_error="store")(body)
    with pytest.raises(ValueError, match="xxx"):
        await handle("x")
    with pytest.raises(ReplayedFailure) as refused:
        await handle("x")
    assert refused.value.text == "?" + "x" * 999


async def test_on_error_may_decide_by_the_exception(face: Any) -> None:
    # Given a function that fails in a way of its own for each key
    errors = {"release": TimeoutError, "keep": ConnectionError, "store": ValueError}

    def choose(error: BaseException) -> Any:
        return next(choice for choice, kind in errors.items() if type(error) is kind)

    @face.once(key="{k}", on_error=choose)
    def handle(k: str) -> None:
        raise errors[k](k)

    for k, error in errors.items():
        with pytest.raises(error):
            await handle(k)
    # When each is called again
    with pytest.raises(TimeoutError):
        await handle("release")
    with pytest.raises(AlreadyInProgress):
        await handle("keep")
    with pytest.raises(ReplayedFailure):
        await handle("store")


@pytest.mark.parametrize("choose", [lambda error: "retry", lambda error: 1 / 0])
async def test_an_on_error_that_fails_releases_the_key_and_hides_nothing(face: Any, choose: Any) -> None:
    attempts, body = failing(ValueError("the cause"), None)
    handle = face.once(key="{k}", on_error=choose)(body)
    with pytest.raises(ValueError, match="the cause") as raised:
        await handle("x")
    assert "on_error failed" in raised.value.__notes__[0]
    assert face.gate.counters["once.hook_failed"] == 1
    assert await handle("x") == "done at last"
    assert attempts == [1, 2]


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


async def test_an_exception_without_a_text_is_stored_all_the_same(face: Any) -> None:
    attempts, body = failing(Unspeakable(), None)
    handle = face.once(key="{k}", on_error="store")(body)
    with pytest.raises(Unspeakable):
        await handle("x")
    with pytest.raises(ReplayedFailure, match=r"Unspeakable: <str\(\) of this Unspeakable raised RuntimeError>"):
        await handle("x")
    assert attempts == [1]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_being_stopped_always_releases(gate: Gate, stop: type[BaseException]) -> None:
    ran = []

    @gate.once(key="{k}", scope="s", on_error="store")
    def handle(k: str) -> str:
        ran.append(k)
        if len(ran) == 1:
            raise stop
        return "ran"

    with pytest.raises(stop):
        handle("x")
    assert gate.inspect("x", scope="s").state == "released"
    assert handle("x") == "ran"


async def test_the_next_attempt_recovers_what_the_one_before_noted(face: Any) -> None:
    seen = []

    @face.once(key="{k}")
    def handle(k: str) -> str:
        seen.append(current().recovered)
        if current().recovered is None:
            assert current().checkpoint({"charged": k})
            raise ConnectionError("after the effect")
        return "not charged again"

    with pytest.raises(ConnectionError):
        await handle("x")
    assert await handle("x") == "not charged again"
    assert seen == [None, {"charged": "x"}]


# -- on_lease_loss ----------------------------------------------------------------------------------------------------


async def test_on_lease_loss_hold_waits_for_a_decision(face: Any, clock: Clock, gate: Gate) -> None:
    # Given a run that ended without a word: neither done nor given back
    attempts, body = failing(ValueError("as if it had vanished"), None)
    handle = face.once(key="{k}", scope="s", on_error="keep", on_lease_loss="hold")(body)
    with pytest.raises(ValueError, match="vanished"):
        await handle("x")
    clock.advance("30s")
    # When it is called again
    for _ in range(2):
        with pytest.raises(OutcomeUnknown) as refused:
            await handle("x")
        assert (refused.value.key, refused.value.attempt) == ("x", 1)
    assert gate.counters["once.held"] == 2
    # Then nothing runs before a decision
    assert attempts == [1]
    assert await face.resolve("x", done=False, scope="s")
    assert await handle("x") == "done at last"
    assert attempts == [1, 2]


class Interruption(BaseException):
    """Of a server that ends a request, such as SystemExit."""


@asynccontextmanager
async def block(face: Any, how: str, **options: Any) -> AsyncIterator[None]:
    """Enter a block of `gate.claim` or `gate.claim_many`."""
    given: Any = ["x"] if how == "claim_many" else "x"
    if face.awaiting:
        async with getattr(face.gate.aio, how)(given, **options):
            yield
    else:
        with getattr(face.gate, how)(given, **options):
            yield


@pytest.mark.parametrize("how", ["once", "claim", "claim_many", "run", "run_many"])
@pytest.mark.parametrize("held", [True, False])
async def test_an_interrupted_run_is_held(face: Any, clock: Clock, how: str, held: bool) -> None:
    # Given a run that is interrupted after its effect
    options, effects = {"scope": "s", "on_lease_loss": "hold" if held else "retry"}, list[str]()

    def interrupt(key: str) -> None:
        effects.append(key)
        raise Interruption

    with pytest.raises((Interruption, BaseExceptionGroup)):
        if how == "once":
            await face.once(key="{key}", **options)(interrupt)("x")
        elif how == "run":
            await face.guard(**options).run("x", interrupt, "x")
        elif how == "run_many":
            await face.guard(**options).run_many([("x", "x")], interrupt)
        else:
            async with block(face, how, **options):
                interrupt("x")
    # When the lease has ended, then no other run starts before a decision
    clock.advance("31s")
    again = face.once(key="{key}", **options)(lambda key: effects.append("again"))
    if held:
        with pytest.raises(OutcomeUnknown):
            await again("x")
        assert await face.resolve("x", done=False, scope="s")
    await again("x")
    assert effects == ["x", "again"]


async def test_resolved_as_done_everybody_gets_the_decided_result(face: Any, clock: Clock) -> None:
    await face.claim("x", scope="s", on_lease_loss="hold")
    clock.advance("30s")
    assert await face.resolve("x", done=True, result="decided", scope="s")
    assert await face.once(key="{k}", scope="s")(failing()[1])("x") == "decided"


# -- max_attempts -----------------------------------------------------------------------------------------------------


async def test_after_max_attempts_nothing_runs_until_it_is_forgotten(face: Any, gate: Gate) -> None:
    attempts, body = failing(*[ValueError("no")] * 3, None)
    handle = face.once(key="{k}", scope="s", max_attempts=3)(body)
    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            await handle("x")
    for _ in range(2):
        with pytest.raises(AttemptsExhausted) as refused:
            await handle("x")
        assert (refused.value.key, refused.value.attempts) == ("x", 3)
    assert gate.counters["once.exhausted"] == 2
    assert await face.forget("x", scope="s")
    assert await handle("x") == "done at last"
    assert attempts == [1, 2, 3, 1]


OUTAGES = [
    DownstreamUnavailable("away"),
    StoreUnavailable("the store of another gate is away", "no"),
    AlreadyInProgress("another key", 1.0),
    LeaseLost("another key", 1),
]


async def run_by(face: Any, how: str, body: Callable[[str], object], **options: Any) -> None:
    """Run `body("x")` once, in each of the ways that there are. Raise its error, or that of the key."""
    if how == "once":
        await face.once(key="{key}", scope="s", **options)(lambda key: body(key))("x")
    elif how in ("run", "run_many"):
        guard = face.guard("s", **options)
        verdict = await guard.run("x", body, "x") if how == "run" else (await guard.run_many([("x", "x")], body))[0]
        if verdict.error is not None:
            raise verdict.error
    else:
        async with block(face, how, scope="s", **options):
            body("x")


@pytest.mark.parametrize("error", OUTAGES, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("how", ["once", "run", "run_many", "claim", "claim_many"])
async def test_what_is_not_the_fault_of_a_run_counts_as_no_attempt(face: Any, how: str, error: Exception) -> None:
    # Given a function that may fail twice
    def fail(key: str) -> None:
        raise error

    # When a service that it needs is away for longer
    for _ in range(4):
        with pytest.raises(type(error)):
            await run_by(face, how, fail, max_attempts=2)
    record = await face.inspect("x", scope="s")
    assert (record.state, record.attempts) == ("released", 0)
    # Then it runs once the service is back
    ran: list[str] = []
    await run_by(face, how, ran.append, max_attempts=2)
    assert ran == ["x"]


@pytest.mark.parametrize("how", ["once", "run", "run_many", "claim", "claim_many"])
async def test_a_run_whose_write_may_be_lost_counts_as_an_attempt(face: Any, how: str) -> None:
    # Given a function whose own write was executed, and may be lost: each run repeats it
    def fail(key: str) -> None:
        raise NotDurable("0 of 1 replicas have it")

    for error in (NotDurable, AttemptsExhausted if how in ("run", "run_many") else NotDurable):
        with pytest.raises(error):
            await run_by(face, how, fail, max_attempts=2)
    assert (await face.inspect("x", scope="s")).attempts == 2


async def test_a_run_that_does_not_count_keeps_its_checkpoint_and_the_attempts_before(face: Any) -> None:
    seen: list[Any] = []

    @face.once(key="{k}", max_attempts=2)
    def handle(k: str) -> None:
        seen.append((current().attempt, current().recovered))
        assert current().checkpoint(len(seen))
        raise ValueError("its own fault") if len(seen) == 1 else DownstreamUnavailable("away")

    with pytest.raises(ValueError, match="its own fault"):
        await handle("x")
    for _ in range(2):
        with pytest.raises(DownstreamUnavailable):
            await handle("x")
    assert seen == [(1, None), (2, 1), (2, 2)]


async def test_on_error_decides_about_the_key_of_a_run_that_does_not_count(face: Any, gate: Gate) -> None:
    def fail(key: str) -> None:
        raise DownstreamUnavailable("away")

    for how, state, attempts in (("keep", "in_progress", 1), ("store", "failed", 1), ("share", "released", 0)):
        handle = face.once(key="{key}", scope=how, on_error=how)(fail)
        with pytest.raises(DownstreamUnavailable):
            await handle("x")
        record = await face.inspect("x", scope=how)
        assert (record.state, record.attempts) == (state, attempts)
    # Also where the policy itself fails
    broken = face.once(key="{key}", scope="broken", on_error=lambda error: 1 / 0)(fail)
    with pytest.raises(DownstreamUnavailable):
        await broken("x")
    assert (await face.inspect("x", scope="broken")).attempts == 0


def test_messages_that_a_batch_did_not_start_count_as_no_attempt(gate: Gate) -> None:
    def stop(message: str) -> None:
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            gate.guard("s", max_attempts=2).run_many([("a", "a"), ("b", "b")], stop)
        assert gate.inspect("b", scope="s").attempts == 0
        gate.forget("a", scope="s")


# -- retry ------------------------------------------------------------------------------------------------------------


async def test_retry_makes_its_attempts_inside_one_claim(face: Any) -> None:
    attempts, body = failing(ConnectionError("1"), ConnectionError("2"), None)
    policy = tenacity.Retrying(stop=tenacity.stop_after_attempt(3), wait=tenacity.wait_none(), reraise=True)
    handle = face.once(key="{k}", scope="s", retry=policy)(body)
    assert await handle("x") == "done at last"
    assert attempts == [1, 1, 1]
    assert (await face.inspect("x", scope="s")).attempts == 1
    assert face.gate.counters["once.started"] == 1


async def test_a_coroutine_function_takes_an_awaiting_policy_too(gate: Gate) -> None:
    attempts, body = failing(ConnectionError("1"), None)

    @gate.once(key="{k}", retry=tenacity.AsyncRetrying(stop=tenacity.stop_after_attempt(2), reraise=True))
    async def handle(k: str) -> str:
        return body(k)

    assert await handle("x") == "done at last"
    assert attempts == [1, 1]


async def test_when_retry_gives_up_on_error_decides(face: Any) -> None:
    attempts, body = failing(ConnectionError("1"), ConnectionError("2"), ConnectionError("3"), None)
    policy = tenacity.Retrying(stop=tenacity.stop_after_attempt(2), reraise=True)
    handle = face.once(key="{k}", retry=policy)(body)
    with pytest.raises(ConnectionError, match="2"):
        await handle("x")
    assert await handle("x") == "done at last"
    assert attempts == [1, 1, 2, 2]


async def test_a_policy_is_not_used_up_by_the_calls_before(face: Any) -> None:
    policy = tenacity.Retrying(stop=tenacity.stop_after_attempt(2), reraise=True)
    tried: list[str] = []

    @face.once(key="{k}", retry=policy)
    def handle(k: str) -> str:
        tried.append(k)
        if tried.count(k) == 1:
            raise ConnectionError(k)
        return k

    assert [await handle(k) for k in "abc"] == ["a", "b", "c"]
    assert tried == list("aabbcc")


async def test_retry_that_gives_up_with_an_error_of_its_own(face: Any) -> None:
    _, body = failing(ConnectionError("1"), ConnectionError("2"))
    handle = face.once(key="{k}", retry=tenacity.Retrying(stop=tenacity.stop_after_attempt(2)), on_error="store")(body)
    with pytest.raises(tenacity.RetryError):
        await handle("x")
    with pytest.raises(ReplayedFailure) as refused:
        await handle("x")
    assert refused.value.kind == "tenacity.RetryError"
