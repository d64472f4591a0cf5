"""`for_each`: all cases of a test run, and those that fail are named."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tests.for_each import for_each


def test_each_case_is_run_beside_the_fixtures() -> None:
    seen = []

    @for_each(("a", "b"), [(1, 2), pytest.param(3, 4, id="later")])
    @for_each("c", "xy")
    def run(a: int, fixture: str, b: int, c: str) -> None:
        seen.append((a, b, c, fixture))

    assert [*inspect.signature(run).parameters] == ["fixture"]
    run(fixture="f")
    assert seen == [(1, 2, "x", "f"), (1, 2, "y", "f"), (3, 4, "x", "f"), (3, 4, "y", "f")]


async def test_cases_are_awaited() -> None:
    seen = []

    @for_each("a", [1, 2])
    async def run(a: int) -> None:
        seen.append(a)

    await run()
    assert seen == [1, 2]


def _refuse(what: object) -> None:
    with pytest.raises(ValueError, match="even"):
        if what in (2, 4):
            raise ValueError("even")


@pytest.mark.parametrize(
    ("cases", "options", "named"),
    [
        ([1, 2], {}, ["case 0: (1,)"]),
        ([2, pytest.param(3, id="three"), 4], {}, ["case 1: three"]),
        ([2, 3], {"ids": ["two", "three"]}, ["case 1: three"]),
        ([2, 3, 5], {"ids": lambda value: f"number {value}"}, ["case 1: number 3", "case 2: number 5"]),
    ],
)
def test_what_fails_is_named_and_the_others_run(cases: Any, options: Any, named: list[str]) -> None:
    seen = []

    @for_each("a", cases, **options)
    def run(a: int) -> None:
        seen.append(a)
        _refuse(a)

    with pytest.raises(BaseException) as failed:  # noqa: PT011 - one of pytest's, or a group of them
        run()
    errors = failed.value.exceptions if isinstance(failed.value, BaseExceptionGroup) else [failed.value]
    assert [error.__notes__ for error in errors] == [[name] for name in named]
    assert len(seen) == len(cases)


def _use_no_case(b: int) -> None: ...


@pytest.mark.parametrize(
    ("cases", "test"), [([], lambda a: None), ([pytest.param(1, marks=pytest.mark.slow)], lambda a: None),
                        ([1], _use_no_case)],
)  # fmt: skip
def test_what_would_run_no_case_is_refused(cases: list[Any], test: Callable[..., Any]) -> None:
    with pytest.raises(AssertionError):
        for_each("a", cases)(test)
