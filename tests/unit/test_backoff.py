"""Backoff: every policy becomes whole milliseconds for an attempt, and store calls stop at their deadline."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest
import tenacity
from hypothesis import given
from hypothesis import strategies as st

from idemgate.core import backoff as module
from idemgate.core.backoff import delays, retry_pause
from idemgate.core.durations import LONGEST_MS
from idemgate.errors import InvalidArgument
from tests.for_each import for_each

ATTEMPTS = st.integers(1, 10**6)


def first(policy: Any, count: int = 4) -> list[int]:
    backoff = delays(policy)
    return [backoff.ms(attempt) for attempt in range(1, count + 1)]


@for_each(
    ("policy", "expected"),
    [
        (["1s", "10s"], [1_000, 10_000, 10_000, 10_000]),
        ((0, 0.5, timedelta(seconds=2)), [0, 500, 2_000, 2_000]),
        ("5s", [5_000] * 4),
        (0, [0] * 4),
        (1.5, [1_500] * 4),
        (timedelta(minutes=1), [60_000] * 4),
        (tenacity.wait_fixed(2), [2_000] * 4),
        (tenacity.wait_none(), [0] * 4),
        (tenacity.wait_incrementing(1, 2), [1_000, 3_000, 5_000, 7_000]),
        (tenacity.wait_exponential(max=5), [1_000, 2_000, 4_000, 5_000]),
        (tenacity.wait_fixed(1) + tenacity.wait_exponential(), [2_000, 3_000, 5_000, 9_000]),
        (tenacity.wait_chain(tenacity.wait_fixed(1), tenacity.wait_fixed(9)), [1_000, 9_000, 9_000, 9_000]),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_a_policy_gives_milliseconds_by_attempt(policy: Any, expected: list[int]) -> None:
    assert first(policy) == expected


@for_each(
    "policy",
    [
        [],
        (),
        ["1s", "x"],
        [None],
        "x",
        -1,
        True,
        float("nan"),
        {"a": 1},
        object(),
        lambda state: 1,
        {1},
        b"1s",
    ],
)
def test_anything_else_is_refused(policy: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        delays(policy)
    assert refused.value.name.startswith("backoff")


def test_a_bad_delay_in_a_list_says_which() -> None:
    with pytest.raises(InvalidArgument, match=r"^backoff\[1\]="):
        delays(["1s", "-1s"])


@given(ATTEMPTS)
def test_the_default_doubles_from_a_second_to_ten_minutes_with_full_jitter(attempt: int) -> None:
    assert 0 <= delays(None).ms(attempt) <= min(600_000, 1_000 * 2 ** min(attempt - 1, 20))


def test_the_default_uses_the_whole_span() -> None:
    backoff = delays(None)
    drawn = [backoff.ms(4) for _ in range(2_000)]  # 0 to 8 s
    assert min(drawn) < 1_000  # missed once in 10^116
    assert max(drawn) > 7_000


def test_the_default_draws_from_0_to_the_doubled_span(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._jitter, "randint", lambda least, most: (least, most))
    spans: list[Any] = [delays(None).ms(attempt) for attempt in (1, 2, 10, 11, 99)]
    assert spans == [(0, 1_000), (0, 2_000), (0, 512_000), (0, 600_000), (0, 600_000)]


@given(ATTEMPTS, st.sampled_from([tenacity.wait_exponential(), tenacity.wait_random_exponential(max=9),
    tenacity.wait_exponential_jitter(),
                                  tenacity.wait_random(1, 2),
                                  tenacity.wait_incrementing(increment=10)]))  # fmt: skip
def test_strategies_stay_in_the_range_of_durations(attempt: int, wait: Any) -> None:
    ms = delays(wait).ms(attempt)
    assert type(ms) is int
    assert 0 <= ms <= LONGEST_MS


def test_a_strategy_sees_the_error_of_the_attempt() -> None:
    wait = tenacity.wait_exception(lambda error: 60.0 if isinstance(error, TimeoutError) else 1.0)
    assert delays(wait).ms(1, TimeoutError()) == 60_000
    assert delays(wait).ms(1, error=ValueError()) == 1_000
    assert delays(wait).ms(1) == 1_000


class Strategy(tenacity.wait.wait_base):
    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __call__(self, retry_state: tenacity.RetryCallState) -> float:
        assert retry_state.outcome is not None
        assert retry_state.outcome.failed
        return self.answer


@pytest.mark.parametrize(("answer", "ms"), [(-1, 0), (float("inf"), LONGEST_MS), (0.0004, 0), (1, 1_000)])
def test_what_a_strategy_answers_is_brought_into_range(answer: Any, ms: int) -> None:
    assert delays(Strategy(answer)).ms(1) == ms


@pytest.mark.parametrize("answer", [None, "1", float("nan"), True, timedelta(1)])
def test_a_strategy_that_returns_no_number_is_named(answer: Any) -> None:
    with pytest.raises(InvalidArgument, match="returned"):
        delays(Strategy(answer)).ms(1)


@for_each("attempt", [0, -1, True, 1.0, None, "1"])
@for_each("policy", [None, "1s", ["1s"], tenacity.wait_fixed(1)], ids=["default", "constant", "list", "tenacity"])
def test_attempts_count_from_one(policy: Any, attempt: Any) -> None:
    with pytest.raises(InvalidArgument, match="first attempt is 1"):
        delays(policy).ms(attempt)


@given(ATTEMPTS)
def test_a_retry_of_a_store_call_waits_up_to_half_a_second(n: int) -> None:
    assert 0 <= retry_pause(n) <= min(0.5, 0.01 * 2 ** min(n - 1, 10))


def test_the_first_delay_that_nobody_named_is_anything_from_none_to_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_jitter", random.Random(5))  # with which either bound comes soon
    drawn = {delays(None).ms(1) for _ in range(1_500)}
    assert (min(drawn), max(drawn)) == (0, 1_000)
