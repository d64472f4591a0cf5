"""Many small cases as one test: `@for_each("written", ["", "1x"])` instead of `@pytest.mark.parametrize`.

A test of its own costs pytest several milliseconds, in each of its processes. So checks of pure code, and refusals that
leave nothing behind, run as one test. All cases run, and each one that fails is told with its name. The fixtures are
shared by all cases.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

__all__ = ["for_each"]

Test = Callable[..., Any]


def for_each(
    names: str | Sequence[str], cases: Iterable[Any], ids: Callable[[Any], object] | Sequence[str] | None = None
) -> Callable[[Test], Test]:
    """Run a test once with each case. The arguments are those of `pytest.mark.parametrize`."""
    single = isinstance(names, str) and "," not in names
    arguments = [name.strip() for name in (names.split(",") if isinstance(names, str) else names)]
    told = dict(_told(cases, ids, single))
    assert told, "a test without cases shows nothing"

    def decorate(test: Test) -> Test:
        signature = inspect.signature(test)
        rest = [one for name, one in signature.parameters.items() if name not in arguments]
        assert len(rest) + len(arguments) == len(signature.parameters), f"{test.__name__} lacks one of {arguments}"

        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            with _failures() as case_of:
                for name, values in told.items():
                    with case_of(name):
                        test(**fixtures, **dict(zip(arguments, values, strict=True)))

        @functools.wraps(test)
        async def run_awaiting(**fixtures: Any) -> None:
            with _failures() as case_of:
                for name, values in told.items():
                    with case_of(name):
                        await test(**fixtures, **dict(zip(arguments, values, strict=True)))

        chosen = run_awaiting if inspect.iscoroutinefunction(test) else run
        chosen.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
        return chosen

    return decorate


def _told(cases: Iterable[Any], ids: Any, single: bool) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield the name and the values of each case."""
    for number, case in enumerate(cases):
        name, values = None, (case,) if single else case
        if isinstance(case, type(pytest.param())):
            assert not case.marks, "a case with a mark is a test of its own"
            name, values = case.id, case.values
        if name is None and ids is not None:
            name = ", ".join(str(ids(value)) for value in values) if callable(ids) else ids[number]
        yield f"{number}: {repr(values)[:300] if name is None else name}", values


@contextmanager
def _failures() -> Iterator[Callable[[str], Any]]:
    """Collect what fails, and raise it when all cases have run."""
    found: list[BaseException] = []

    @contextmanager
    def case_of(name: str) -> Iterator[None]:
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:
            error.add_note(f"case {name}")
            found.append(error)

    yield case_of
    if len(found) == 1:
        raise found[0]
    if found:
        raise BaseExceptionGroup(f"{len(found)} cases failed", found)
