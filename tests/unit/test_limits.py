"""The adaptive limit: its rule, and what it does against a downstream of known capacity. No time passes here."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemgate import Adaptive, InvalidArgument, Retry
from idemgate.errors import Overloaded
from idemgate.topics.limits import WINDOW, HandlerEnd, Limit, initial_limit, update_limit
from tests.for_each import for_each

FAST, SLOW = 0.05, 0.5


def window(adaptive: Adaptive, state: Limit, seconds: float, overloaded: int = 0, running: int | None = None) -> Limit:
    """A whole window of handlers that began now; those that were turned away end first."""
    began = max(state.since, 0.0)
    for number in range(max(state.limit, WINDOW)):
        event = HandlerEnd(began, began + seconds, number < overloaded, state.limit if running is None else running)
        found = update_limit(adaptive, state, event)
        if found.limit != state.limit:
            return found
        state = found
    return state


def limits(adaptive: Adaptive, windows: Sequence[float], state: Limit | None = None) -> list[int]:
    state = state or initial_limit(adaptive)
    found = []
    for seconds in windows:
        state = window(adaptive, state, seconds)
        found.append(state.limit)
    return found


def test_it_doubles_until_the_first_bad_window_then_adds_one_and_halves() -> None:
    adaptive = Adaptive(target="100ms", most=40)
    assert limits(adaptive, [FAST] * 5) == [2, 4, 8, 16, 32]
    assert limits(adaptive, [FAST] * 5 + [SLOW, FAST, FAST, SLOW]) == [2, 4, 8, 16, 32, 16, 17, 18, 9]
    # And its bounds hold
    assert limits(adaptive, [FAST] * 7)[-2:] == [40, 40]
    assert limits(Adaptive(target="100ms", least=3), [SLOW] * 3) == [3, 3, 3]


def test_without_a_target_slow_is_what_is_slower_than_usual() -> None:
    adaptive = Adaptive(tolerance=1.8)
    assert limits(adaptive, [0.1, 0.17, 0.17, 0.3]) == [2, 4, 8, 4]
    # What became slow for good is usual after a while: it recovers
    assert limits(adaptive, [0.1] * 5 + [0.3] * 30)[-1] > 10
    # And what became fast is usual soon
    assert limits(adaptive, [0.3] * 3 + [0.1] * 20 + [0.25])[-2:] == [1000, 500]


def test_too_many_turned_away_are_a_bad_window_at_once() -> None:
    adaptive = Adaptive(target="1s", overload=0.1)
    state = initial_limit(adaptive)._replace(limit=20)
    assert window(adaptive, state, FAST, overloaded=2).limit == 40
    halved = window(adaptive, state, FAST, overloaded=3)
    assert (halved.limit, halved.ended, halved.doubling) == (10, 0, False)


def test_what_began_before_the_limit_changed_says_nothing_about_it() -> None:
    adaptive = Adaptive(target="100ms")
    state = window(adaptive, initial_limit(adaptive)._replace(limit=40), SLOW)
    assert (state.limit, state.since) == (20, SLOW)
    # When the other handlers of that time end, slow as well
    assert update_limit(adaptive, state, HandlerEnd(0.1, 0.7, True, 40)) == state
    # Then only those count that began after it
    assert update_limit(adaptive, state, HandlerEnd(0.6, 0.7, True, 20)).overloaded == 1


def test_a_limit_that_is_not_used_up_does_not_grow() -> None:
    adaptive = Adaptive(target="100ms")
    state = initial_limit(adaptive)._replace(limit=8)
    assert window(adaptive, state, FAST, running=7).limit == 8
    assert window(adaptive, state, FAST, running=8).limit == 16
    assert window(adaptive, state, SLOW, running=1).limit == 4


def test_where_the_limit_stays_what_runs_from_before_still_counts() -> None:
    # Given a window that ended and changed nothing
    adaptive = Adaptive(target="100ms")
    state = window(adaptive, Limit(8, since=1.0), FAST, running=1)
    assert (state.limit, state.since, state.ended) == (8, 1.0, 0)
    # Then a handler that began before its end is counted into the next
    assert update_limit(adaptive, state, HandlerEnd(1.01, 2.0, False, 1)).ended == 1


def test_how_long_those_took_that_were_turned_away_is_not_counted() -> None:
    adaptive = Adaptive()
    state = update_limit(adaptive, initial_limit(adaptive), HandlerEnd(0.0, 5.0, True, 1))
    assert (state.ended, state.overloaded, state.seconds, state.mean) == (1, 1, 0.0, 0.0)
    assert update_limit(adaptive, state, HandlerEnd(0.0, 0.25, False, 1)).mean == 0.25


@pytest.mark.parametrize(
    ("limit", "seconds", "usual"),
    [(1, 0.15, "slower"), (2, 0.15, "as it was"), (8, 0.15, "as it was"), (2, 0.05, "faster"), (1, 0.05, "faster")],
)
def test_what_is_usual_becomes_slower_at_the_least_limit_only(limit: int, seconds: float, usual: str) -> None:
    found = window(Adaptive(), Limit(limit, usual=0.1), seconds, running=0).usual
    assert {"slower": found > 0.1, "as it was": found == 0.1, "faster": found < 0.1}[usual]


EVENTS = st.lists(
    st.tuples(st.floats(0, 1), st.floats(0, 1), st.booleans(), st.integers(1, 40), st.integers(0, 1)), max_size=400
)


@given(EVENTS, st.integers(1, 5), st.integers(5, 40), st.sampled_from([None, 0.1]))
def test_whatever_happens_it_keeps_its_bounds_and_its_steps(
    events: list[tuple[float, float, bool, int, int]], least: int, most: int, target: float | None
) -> None:
    adaptive = Adaptive(least=least, most=most, target=target)
    states, now = [initial_limit(adaptive)], 0.0
    for gap, took, overloaded, running, old in events:
        now += gap / 10
        began = now - took if old else max(now - took, states[-1].since)
        states.append(update_limit(adaptive, states[-1], HandlerEnd(began, now, overloaded, running)))
    backed_off = False
    for before, then in pairwise(states):
        assert least <= then.limit <= most
        steps = {before.limit, max(least, before.limit // 2), min(most, before.limit + 1)}
        assert then.limit in (steps if backed_off else steps | {min(most, 2 * before.limit)})
        assert then.since >= before.since
        if then.limit > before.limit:  # a whole window, used up, and not too many of it turned away
            assert before.ended + 1 == max(before.limit, WINDOW)
            assert before.overloaded <= adaptive.overload * max(before.limit, WINDOW)
        backed_off = backed_off or then.limit < before.limit
        assert then.doubling or not before.doubling or then.ended == 0
    assert all(0 <= state.usual <= 1 + 1e-9 for state in states)


# -- against a downstream ---------------------------------------------------------------------------------------------


class Downstream:
    """Serves `capacity` calls at once in 100 ms; more share it and wait, and from `most` on they are turned away."""

    def __init__(self, capacity: int, most: int = 10**9) -> None:
        self.capacity = capacity
        self.most = most
        self.running = 0

    def takes(self) -> float:
        return 0.1 * max(1.0, self.running / self.capacity)


def load(downstream: Downstream, states: list[Limit], adaptive: Adaptive, ends: int, seed: int = 1) -> list[list[int]]:
    """Workers that always have work, until so many handlers ended; what each one's limit was at every end."""
    chance = random.Random(seed)
    running = [0] * len(states)
    heap: list[tuple[float, int, float, bool]] = []
    now, seen = max([0.0, *(state.since for state in states)]), []
    for _ in range(ends):
        for worker in chance.sample(range(len(states)), len(states)):
            while running[worker] < states[worker].limit:
                running[worker] += 1
                downstream.running += 1
                refused = downstream.running > downstream.most
                took = 0.001 if refused else downstream.takes() * chance.uniform(0.9, 1.1)
                heapq.heappush(heap, (now + took, worker, now, refused))
        now, worker, began, refused = heapq.heappop(heap)
        states[worker] = update_limit(adaptive, states[worker], HandlerEnd(began, now, refused, running[worker]))
        running[worker] -= 1
        downstream.running -= 1
        seen.append([state.limit for state in states])
    downstream.running = 0
    return seen


def total(seen: list[list[int]]) -> list[int]:
    """The sum of the limits, over the last half."""
    return [sum(one) for one in seen[len(seen) // 2 :]]


@pytest.mark.parametrize("options", [{"target": "200ms"}, {}, {"target": "10s", "overload": 0.1}])
@pytest.mark.slow
def test_it_finds_the_capacity_backs_off_when_that_shrinks_and_comes_back(options: dict[str, Any]) -> None:
    adaptive, states = Adaptive(**options), [Limit(1)]
    turning = options.get("target") == "10s"

    def downstream(capacity: int) -> Downstream:
        return Downstream(capacity, most=2 * capacity if turning else 10**9)

    # Given a downstream that serves 40 at once, and is overloaded with 80
    found = total(load(downstream(40), states, adaptive, 30_000))
    assert 35 <= sum(found) / len(found) <= 85
    # When it shrinks to 10, the limit follows
    found = total(load(downstream(10), states, adaptive, 30_000))
    assert 8 <= sum(found) / len(found) <= 25
    # And it comes back without a reset
    found = total(load(downstream(40), states, adaptive, 60_000))
    assert 35 <= sum(found) / len(found) <= 85


@pytest.mark.slow
def test_workers_that_know_nothing_of_each_other_share_the_downstream() -> None:
    # Given one worker that has it for itself, and three that come later
    adaptive, states = Adaptive(target="200ms"), [Limit(1)]
    load(Downstream(60), states, adaptive, 30_000)
    alone = states[0].limit
    states += [Limit(1), Limit(1), Limit(1)]
    # When all have work
    seen = load(Downstream(60), states, adaptive, 120_000)
    # Then together they take what it has, and none much more than another
    found = total(seen)
    assert 50 <= sum(found) / len(found) <= 130
    late = seen[len(seen) // 2 :]
    shares = [sum(one[worker] for one in late) / len(late) for worker in range(4)]
    assert max(shares) < 2 * min(shares)
    assert max(shares) < alone


# -- bad input --------------------------------------------------------------------------------------------------------


@for_each(
    ("options", "name"),
    [
        ({"least": 0}, "least"),
        ({"most": 0}, "most"),
        ({"least": 5, "most": 4}, "most"),
        ({"most": 2.5}, "most"),
        ({"target": 0}, "target"),
        ({"target": "soon"}, "target"),
        ({"tolerance": 1}, "tolerance"),
        ({"tolerance": 2}, "tolerance"),
        ({"tolerance": float("nan")}, "tolerance"),
        ({"overload": 1.0}, "overload"),
        ({"overload": -0.1}, "overload"),
        ({"overload": "10%"}, "overload"),
        ({"errors": TimeoutError}, "errors"),
        ({"errors": ("TimeoutError",)}, "errors"),
    ],
)
def test_bad_input_is_named(options: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgument, match=name):
        Adaptive(**options)


def test_to_be_overloaded_is_a_reason_to_try_again() -> None:
    assert issubclass(Overloaded, Retry)
    assert Overloaded("429", delay="2s").delay == "2s"


def test_how_long_handlers_take_is_told_by_those_that_were_not_turned_away() -> None:
    assert Limit(1, ended=20, overloaded=10, seconds=1.0).mean == 0.1
    assert Limit(1, ended=10, overloaded=10, seconds=1.0).mean == 0.0
