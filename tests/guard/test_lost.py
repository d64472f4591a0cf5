"""A lost lease and a replay are visible: in the verdict, as an error, and on the delivery."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import tenacity

from idemgate import InvalidArgument, LeaseLost, current
from idemgate.guard.decorator import build_judge, build_judge_async
from idemgate.testing import Clock


def stalled(face: Any, clock: Clock, **options: Any) -> Any:
    """A guarded function that stalls for longer than its lease, and is taken over."""

    def handle(k: str) -> str:
        clock.advance("31s")
        assert face.gate.claim(k, scope="s").started
        return "my own"

    return face.once(key="{k}", scope="s", lease="30s", **options)(handle)


async def test_an_owner_that_was_taken_over_may_ask_for_an_error(face: Any, clock: Clock) -> None:
    with pytest.raises(LeaseLost, match="scope 's'") as lost:
        await stalled(face, clock, on_lost="raise")("k")
    assert lost.value.key == "k"
    assert face.gate.counters["once.lost"] == 1


async def test_an_owner_that_was_taken_over_gets_its_own_result_by_default(face: Any, clock: Clock) -> None:
    assert await stalled(face, clock)("k") == "my own"
    assert face.gate.counters["once.lost"] == 1


@pytest.mark.parametrize("on_lost", ["return", "raise"])
async def test_the_verdict_on_a_lost_run_is_lost(face: Any, clock: Clock, on_lost: Any) -> None:
    def handle() -> None:
        clock.advance("31s")
        assert face.gate.claim("k", scope="s").started

    verdict = await face.guard("s", lease="30s", on_lost=on_lost).run("k", handle)
    assert (verdict.outcome, verdict.action, verdict.ran) == ("lost", "retry", True)


@pytest.mark.parametrize("hooked", [False, True])
async def test_a_retry_policy_starts_no_attempt_after_the_lease_was_lost(face: Any, clock: Clock, hooked: bool) -> None:
    # Given a function with a retry policy, which fails after another owner took its key and completed it
    runs, called = [], []

    def work(k: str) -> None:
        runs.append(k)
        clock.advance("31s")
        with face.gate.claim(k, scope="s") as successor:
            assert successor.started
        assert not current().checkpoint("lost")
        raise ConnectionError

    async def before(_: Any) -> None:
        called.append("k")

    policy = tenacity.Retrying(stop=tenacity.stop_after_attempt(3), reraise=True)
    if hooked and face.awaiting:
        policy = tenacity.AsyncRetrying(stop=tenacity.stop_after_attempt(3), reraise=True, before=before)
    elif hooked:
        policy = policy.copy(before=lambda _: called.append("k"))
    # When it is called
    with pytest.raises(LeaseLost, match="scope 's'"):
        await face.once(key="{k}", scope="s", lease="30s", retry=policy)(work)("k")
    # Then it ran once, and so did the hook of the policy
    assert runs == ["k"]
    assert called == runs * hooked


def test_on_lost_is_checked(gate: Any) -> None:
    with pytest.raises(InvalidArgument, match="on_lost='ignore'"):
        gate.once(key="{k}", on_lost="ignore")
    with pytest.raises(InvalidArgument, match=r"on_lost='raise'.*at_most_once"):
        gate.once(key="{k}", on_lost="raise", at_most_once=True)


async def test_a_replay_of_a_partial_is_a_duplicate_and_not_handled(gate: Any) -> None:
    @gate.once(key="{k}")
    def handle(tenant: str, k: str) -> str:
        return tenant + k

    @gate.once(key="{k}")
    async def handle_soon(tenant: str, k: str) -> str:
        return tenant + k

    judge = build_judge(functools.partial(handle, "t"))
    judge_soon = build_judge_async(functools.partial(handle_soon, "t"))
    assert [judge("a").outcome, judge("a").outcome] == ["handled", "duplicate"]
    assert [(await judge_soon("a")).outcome, (await judge_soon("a")).outcome] == ["handled", "duplicate"]


async def test_an_extension_that_learns_a_cancellation_or_a_loss_marks_the_delivery(face: Any, clock: Clock) -> None:
    topic = face.topic("t", lease="30s")
    await topic.trigger("a", 1)
    [delivery] = await topic.take()
    assert await topic.cancel("a") == "in_flight"
    assert (await topic.extend(delivery), delivery.cancelled, delivery.lost) == ("cancelled", True, False)
    clock.advance("31s")
    await topic.take()
    assert (await topic.extend(delivery), delivery.lost) == ("lost", True)
