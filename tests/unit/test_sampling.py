"""`@pytest.mark.one_in(n)`: which cases the test line runs."""

from __future__ import annotations

import pytest

from tests.plugins.sampling import pick, pytest_collection_modifyitems


@pytest.mark.parametrize("n", [3, 5])
@pytest.mark.parametrize("cases", [1, 2, 3, 4, 5, 6, 12, 50, 132])
def test_about_one_in_n_is_taken_and_two_at_least(cases: int, n: int) -> None:
    for name in ("a", "b", "c"):
        taken = pick(name, cases, n)
        assert taken <= set(range(cases))
        assert min(cases, 2) <= len(taken) <= max(2, -(-cases // n))


@pytest.mark.parametrize("n", [3, 5])
@pytest.mark.parametrize("values", [1, 2, 3, 10, 66])
def test_both_flavours_of_a_test_are_taken(values: int, n: int) -> None:
    # Given a test whose last parameter is its flavour: even numbers are blocking, odd ones awaiting
    for name in ("a", "b", "c"):
        assert {number % 2 for number in pick(name, 2 * values, n)} == {0, 1}


def test_a_run_takes_the_same_cases_as_the_one_before_and_tests_take_different_ones() -> None:
    assert pick("a", 50, 5) == pick("a", 50, 5)
    assert len({frozenset(pick(name, 50, 5)) for name in "abcdefgh"}) > 1


def test_an_even_step_is_refused() -> None:
    with pytest.raises(pytest.UsageError, match="odd"):
        pick("a", 50, 4)


def test_the_cases_that_are_not_taken_are_slow(request: pytest.FixtureRequest) -> None:
    # Given a test with ten cases
    items: list[pytest.Item] = [
        pytest.Function.from_parent(request.node.parent, name=f"test_it[{number}]", callobj=lambda: None)
        for number in range(10)
    ]
    for item in items:
        item.add_marker(pytest.mark.one_in(5))
    # When they are collected
    pytest_collection_modifyitems(items)
    # Then eight of them are slow
    assert sum(item.get_closest_marker("slow") is None for item in items) == 2
