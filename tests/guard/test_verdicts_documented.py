"""The outcomes "lost" and "unguarded" are returned exactly as their table says, for one message and for a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from idemgate import Verdict
from idemgate.testing import Clock

pytestmark = pytest.mark.one_in(3)

METHODS = ["run", "run_many"]


async def judged(guard: Any, method: str, body: Callable[[str], Any], key: str = "k") -> Verdict[Any]:
    if method == "run":
        return await guard.run(key, body, key)
    [verdict] = await guard.run_many([(key, key)], body)
    return verdict


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("taken_over", "outcome", "action"), [(True, "lost", "retry"), (False, "handled", "ack")])
@pytest.mark.parametrize("on_lost", ["return", "raise"])
async def test_a_stall_beyond_the_lease_is_lost_only_if_another_owner_took_over(
    face: Any, clock: Clock, method: str, taken_over: bool, outcome: str, action: str, on_lost: str
) -> None:
    def stall(k: str) -> str:
        clock.advance("31s")
        if taken_over:
            assert face.gate.claim(k, scope="s").started
        return "effect"

    verdict = await judged(face.guard("s", lease="30s", on_lost=on_lost), method, stall)
    assert (verdict.outcome, verdict.action, verdict.ran, verdict.attempt) == (outcome, action, True, 1)
    assert face.gate.counters["once.lost"] == taken_over


@pytest.mark.parametrize("method", METHODS)
async def test_a_stall_that_ends_in_an_error_is_failed(face: Any, clock: Clock, method: str) -> None:
    def stall(k: str) -> str:
        clock.advance("31s")
        assert face.gate.claim(k, scope="s").started
        raise ValueError(k)

    verdict = await judged(face.guard("s", lease="30s"), method, stall)
    assert (verdict.outcome, verdict.action, type(verdict.error)) == ("failed", "retry", ValueError)
    assert face.gate.counters["once.lost"] == 1


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("policy", ["run", "local"])
async def test_without_a_store_each_outcome_is_as_documented(nowhere: Any, method: str, policy: str) -> None:
    guard = nowhere.guard("s", on_store_error=policy)
    ran = []

    def body(k: str) -> int:
        ran.append(k)
        return len(ran)

    def fail(k: str) -> None:
        raise ValueError(k)

    failed = await judged(guard, method, fail)
    assert (failed.outcome, failed.action, failed.ran, failed.token) == ("failed", "retry", True, 0)
    first, second = await judged(guard, method, body), await judged(guard, method, body)
    assert (first.outcome, first.action, first.value, first.ran, first.token) == ("unguarded", "ack", 1, True, 0)
    expected = ("unguarded", "ack", 2, True) if policy == "run" else ("duplicate", "ack", 1, False)
    assert (second.outcome, second.action, second.value, second.ran) == expected
    assert nowhere.gate.counters[f"once.store_error.{policy}"] == 3


@pytest.mark.parametrize("method", METHODS)
async def test_without_a_store_and_a_policy_the_handler_does_not_run(nowhere: Any, method: str) -> None:
    verdict = await judged(nowhere.guard("s"), method, lambda k: pytest.fail("it ran"))
    assert (verdict.outcome, verdict.action, verdict.ran) == ("failed", "retry", False)
