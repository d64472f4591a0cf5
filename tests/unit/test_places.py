"""How many deliveries a worker holds ready: pure arithmetic of what it handled lately."""

from __future__ import annotations

import pytest

from idemgate.worker.places import SLOW, PrefetchState, adjust, initial_state


@pytest.mark.parametrize(("concurrency", "held"), [(1, 1), (4, 1), (32, 8), (400, 100)])
def test_it_begins_with_a_quarter_of_the_concurrency(concurrency: int, held: int) -> None:
    assert initial_state(concurrency) == PrefetchState(held)


@pytest.mark.parametrize("concurrency", [1, 3, 4, 7])
def test_a_worker_of_few_places_holds_one_however_little_it_handled(concurrency: int) -> None:
    assert adjust(initial_state(concurrency), concurrency, 0, 1.0) == PrefetchState(1)


@pytest.mark.parametrize(("handled", "seconds", "held"), [(0, 0.05, 8), (100, 0.1, 50), (1000, 0.05, 500), (1, 60, 8)])
def test_it_holds_what_was_handled_in_50_ms_within_bounds(handled: int, seconds: float, held: int) -> None:
    assert adjust(initial_state(32), 32, handled, seconds) == PrefetchState(held)


def test_once_slow_it_holds_nothing_until_every_place_was_free_again_within_a_second() -> None:
    assert SLOW.size == 0
    assert adjust(SLOW, 32, 0, 1.0) == SLOW
    assert adjust(SLOW, 32, 31, 1.0) == SLOW
    assert adjust(SLOW, 32, 63, 2.0) == SLOW
    assert adjust(SLOW, 32, 32, 1.0) == PrefetchState(8)
    assert adjust(SLOW, 32, 20_000, 1.0) == PrefetchState(500)
    # And it is looked at a second at a time, since in less than that no slow handler ends
    assert (SLOW.window, initial_state(32).window) == (1.0, 0.05)
