"""Call of a registered callback, and the outcome for its message."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, TypeVar

from idemgate.core.validation import check_not_generator, is_async, qualified_name
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
from idemgate.subscribers.threads import CallbackThreads, call_catching

__all__ = ["Callback", "CallbackResult", "check_callback", "result_of_error"]

T = TypeVar("T")
Outcome = Literal["handled", "duplicate", "in_progress", "hopeless", "failed"]

_DUPLICATE = (AlreadyDone, ResultUnavailable)
_PERMANENT = (Bury, InvalidArgument, KeyReused, ReplayedFailure, OutcomeUnknown, AttemptsExhausted, DecodeError)
"""Errors that a retry cannot fix."""


class CallbackResult(NamedTuple):
    """The outcome of a call, and the exception that it raised."""

    outcome: Outcome
    error: BaseException | None = None


def result_of_error(error: BaseException) -> CallbackResult:
    """Return the outcome for a callback's exception.

    A replayed or skipped duplicate raises nothing: its outcome is "handled", and the guard counts it.
    """
    if isinstance(error, _DUPLICATE):
        return CallbackResult("duplicate", error)
    if isinstance(error, AlreadyInProgress):
        return CallbackResult("in_progress", error)
    return CallbackResult("hopeless" if isinstance(error, _PERMANENT) else "failed", error)


class Callback(Generic[T]):
    """A subscriber's function for one run; a blocking function runs in threads, in a copy of the context."""

    def __init__(self, func: Callable[[T], object]) -> None:
        self._func = func
        self._threads = None if is_async(func) else CallbackThreads("idemgate-subscriber")

    async def __call__(self, item: T) -> CallbackResult:
        try:
            if self._threads is None:
                await self._await(self._func(item))
            else:
                context = contextvars.copy_context()
                result, error = await self._threads.run(lambda: context.run(call_catching, self._func, item))
                if error is not None:
                    return result_of_error(error)
                await self._await(result)
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return CallbackResult("failed", error)  # raised by the callback; this task was not cancelled
        except KeyboardInterrupt:  # Ctrl-C, not an error of the callback
            raise
        except BaseException as error:  # noqa: BLE001 - any exception concerns one message only
            return result_of_error(error)
        return CallbackResult("handled")

    async def _await(self, result: Any) -> None:
        if hasattr(result, "__await__"):  # a plain function, such as a lambda, that returned a coroutine
            await result

    def close(self) -> None:
        """Close the threads: each ends after its current call."""
        if self._threads is not None:
            self._threads.close()


def check_callback(func: Callable[[T], object]) -> str:
    """Check that a function can be a callback; return its name.

    Raises:
        InvalidArgument: It is not callable, or it is a generator function.
    """
    if not callable(func):
        raise InvalidArgument("callback", func, "not callable", "Decorate a function of one argument")
    check_not_generator(func)
    return qualified_name(func)
