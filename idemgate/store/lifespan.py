"""The user's own resources of a gate: they are made before its workers and subscribers start, and cleaned up after."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from idemgate.core.waits import finish_despite_cancel
from idemgate.errors import InvalidArgument

__all__ = ["LifespanFunction", "Lifespans", "check_lifespan"]

LifespanFunction = Callable[[], Iterator[Any]] | Callable[[], AsyncIterator[Any]]
"""A generator function, blocking or async, that yields once."""


class Lifespans:
    """The functions of one gate that make and clean up resources.

    The first runner in an event loop enters them, and the last one leaves them.
    """

    def __init__(self) -> None:
        self._functions: list[LifespanFunction] = []
        self._users: dict[asyncio.AbstractEventLoop, _Users] = {}

    def add(self, function: LifespanFunction, first: bool = False) -> None:
        """Add a function. It is entered after the others, or before them if it is `first`."""
        self._functions.insert(0 if first else len(self._functions), function)

    @asynccontextmanager
    async def hold(self) -> AsyncGenerator[None]:
        """Hold the resources while the block runs. An error of a function that makes some is raised here."""
        if not self._functions:
            yield
            return
        loop = asyncio.get_running_loop()
        users = self._users.setdefault(loop, _Users())
        await users.join(self._functions)
        try:
            yield
        finally:
            try:
                await finish_despite_cancel(users.leave())
            finally:
                if not users.number:
                    self._users.pop(loop, None)


class _Users:
    """The runners in one event loop that hold the resources."""

    def __init__(self) -> None:
        self.number = 0
        self._lock = asyncio.Lock()
        self._entered: list[Iterator[Any] | AsyncIterator[Any]] = []

    async def join(self, functions: Sequence[LifespanFunction]) -> None:
        async with self._lock:
            if not self.number:
                try:
                    for function in functions:
                        generator = function()
                        await _resume(generator, "did not yield")
                        self._entered.append(generator)
                except BaseException:
                    await finish_despite_cancel(self._clean_up())
                    raise
            self.number += 1

    async def leave(self) -> None:
        async with self._lock:
            self.number -= 1
            if not self.number:
                await self._clean_up()

    async def _clean_up(self) -> None:
        """Leave all, the last one first. Raise the first error after that."""
        first: BaseException | None = None
        while self._entered:
            generator = self._entered.pop()
            try:
                await _resume(generator, "yielded twice")
            except BaseException as error:  # noqa: BLE001 - the others are cleaned up, too
                first = first or error
        if first is not None:
            raise first


async def _resume(generator: Iterator[Any] | AsyncIterator[Any], problem: str) -> None:
    """Run a generator up to its `yield` or to its end. Raise InvalidArgument if it comes to the other one."""
    ended = object()
    found = await anext(generator, ended) if isinstance(generator, AsyncIterator) else next(generator, ended)
    if (found is ended) is (problem == "did not yield"):
        raise InvalidArgument("lifespan", _name_of(generator), problem, "Let it yield once")


def _name_of(function: object) -> object:
    return getattr(function, "__qualname__", function)


def check_lifespan(function: Any) -> None:
    """Check that a function is a generator function without parameters. Raises InvalidArgument."""
    name = _name_of(function)
    if not (inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)):
        fix = "Pass a function that makes the resources, yields once and cleans up, without @contextmanager"
        raise InvalidArgument("lifespan", name, "not a generator function", fix)
    if any(
        one.default is one.empty and one.kind < one.VAR_POSITIONAL
        for one in inspect.signature(function).parameters.values()
    ):
        raise InvalidArgument("lifespan", name, "has parameters", "Pass a function that is called without arguments")
