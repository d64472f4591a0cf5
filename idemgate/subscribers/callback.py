"""Calling what a user registered, and what the end of that call means for the message."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from idemgate.core.functions import awaited, qualified_name, refuse_generator
from idemgate.errors import (
    AlreadyDone,
    AlreadyInProgress,
    AttemptsExhausted,
    Bury,
    DecodeError,
    InvalidArgument,
    KeyReused,
    OutcomeUnknown,
    ReplayedFailure,
    ResultUnavailable,
)
from idemgate.subscribers.threads import Threads, called

__all__ = ["Callback", "Ending", "checked", "ending_of"]

T = TypeVar("T")
Outcome = Literal["handled", "duplicate", "in_progress", "hopeless", "failed"]

_DUPLICATE = (AlreadyDone, ResultUnavailable)
_HOPELESS = (Bury, InvalidArgument, KeyReused, ReplayedFailure, OutcomeUnknown, AttemptsExhausted, DecodeError)
"""Repeating cannot mend these: a person has to look."""


class Ending(NamedTuple):
    """How a call ended; `error` is what it raised, None if it returned."""

    outcome: Outcome
    error: BaseException | None = None


def ending_of(error: BaseException) -> Ending:
    """What an error says about the message that led to it. A duplicate that was replayed or skipped raises nothing: it
    is handled, and the guard has counted it."""
    if isinstance(error, _DUPLICATE):
        return Ending("duplicate", error)
    if isinstance(error, AlreadyInProgress):
        return Ending("in_progress", error)
    return Ending("hopeless" if isinstance(error, _HOPELESS) else "failed", error)


class Callback(Generic[T]):
    """One run of a subscriber's function: sync ones run in threads of their own, with the context copied."""

    def __init__(self, func: Callable[[T], object]) -> None:
        self._func = func
        self._threads = None if awaited(func) else Threads("idemgate-subscriber")

    async def __call__(self, item: T) -> Ending:
        try:
            if self._threads is None:
                await self._await(self._func(item))
            else:
                context = contextvars.copy_context()
                result, error = await self._threads.run(lambda: context.run(called, self._func, item))
                if error is not None:
                    return ending_of(error)
                await self._await(result)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return Ending("failed", error)  # the callback's own; nobody cancelled us
        except KeyboardInterrupt:  # somebody's Ctrl-C, not the callback's word
            raise
        except BaseException as error:  # noqa: BLE001 - whatever it is, it says something about one message only
            return ending_of(error)
        return Ending("handled")

    async def _await(self, result: Any) -> None:
        if hasattr(result, "__await__"):  # a lambda, or another plain function, that hands on a coroutine
            await result

    def close(self) -> None:
        """Threads that still run go on by themselves; no new ones start."""
        if self._threads is not None:
            self._threads.close()


def checked(func: Callable[[T], object]) -> str:
    """The name of a function that can be a callback; InvalidArgument if it cannot."""
    if not callable(func):
        raise InvalidArgument("callback", func, "not callable", "Decorate a function of one argument")
    refuse_generator(func)
    return qualified_name(func)
