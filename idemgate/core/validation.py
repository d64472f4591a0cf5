"""Checks of arguments: numbers, iterables and functions."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from types import CoroutineType, NoneType, SimpleNamespace
from typing import Any, TypeVar, get_type_hints

from idemgate.errors import InvalidArgument

__all__ = [
    "ENDED",
    "MOST",
    "call_async",
    "call_blocking",
    "check_blocking",
    "check_function",
    "check_int",
    "check_iterable",
    "check_parameters",
    "is_async",
    "parse_count",
    "refuse_unfinished",
    "type_hints",
]

R = TypeVar("R")
T = TypeVar("T")
_GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_CONTEXTLIB = vars(contextlib)


ENDED: frozenset[Any] = frozenset({NoneType, bool, int, float, str, bytes, list, tuple, dict})
"""The types of most results. None of them stands for work that has not ended."""
MOST = 2**53 - 1
"""The largest whole number that Lua holds exactly. Options beyond it would be rounded, or overflow."""


def check_int(name: str, value: int, least: int = 1, most: int = MOST) -> int:
    """Return `value` if it is an int within the bounds. A bool is not an int here.

    Args:
        name: the parameter to name in the error.
        value: the argument.
        least: the smallest valid value.
        most: the largest valid value.

    Raises:
        InvalidArgument: `value` has another type or is out of bounds.
    """
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        is_above = isinstance(value, int) and value > most
        bounds = f"from {least} to {most}" if is_above or most < MOST else f"of at least {least}"
        raise InvalidArgument(name, value, f"not a whole number {bounds}", "Pass an int")
    return value


def parse_count(text: str, name: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise InvalidArgument(name, text, "is not a whole number of at least 1", "Write one such as 50")
    return int(text)


def check_iterable(values: Iterable[T], name: str, fix: str) -> Iterator[T]:
    """Return an iterator over `values`.

    Args:
        values: the argument.
        name: the parameter to name in the error.
        fix: the advice to put into the error.

    Raises:
        InvalidArgument: `values` is text or bytes, is only asynchronously iterable, or is not iterable.
    """
    if isinstance(values, str | bytes | bytearray):
        raise InvalidArgument(name, values, "one value, not many", fix)
    try:
        return iter(values)
    except TypeError:
        raise InvalidArgument(name, values, "cannot be iterated over", fix) from None


def is_async(func: object) -> bool:
    """Return True if a call of `func` returns a coroutine.

    True for an `async def`, a partial of one, and an object with an async `__call__`.
    """
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(getattr(type(func), "__call__", None))  # noqa: B004


def check_blocking(func: object, name: str, fix: str) -> None:
    """Check that `func` is a plain function, whose body runs when it is called. Raises InvalidArgument."""
    code = getattr(func, "__code__", None)
    if (code is None or code.co_flags & inspect.CO_COROUTINE) and is_async(func):
        raise InvalidArgument(name, getattr(func, "__qualname__", func), "a coroutine function", fix)
    check_function(func, name)


def check_function(func: object, name: str = "function") -> None:
    """Check that `func` can be called and that its work ends with the call.

    Args:
        func: the function.
        name: the parameter to name in the error.

    Raises:
        InvalidArgument: `func` is not callable, is a class whose objects are called, is a generator function, or makes
            a context manager. A call of the last two returns before the body has run.
    """
    code = getattr(func, "__code__", None)
    if code is not None and not code.co_flags & _GENERATOR and getattr(func, "__globals__", None) is not _CONTEXTLIB:
        return  # the common case, in a tenth of the time
    if not callable(func):
        raise InvalidArgument(name, func, "not callable", "Pass a function")
    call_method = getattr(type(func), "__call__", None)  # noqa: B004
    shown = getattr(func, "__qualname__", func)
    if isinstance(func, type) and any("__call__" in vars(base) for base in func.__mro__):
        raise InvalidArgument(name, shown, "a class, whose objects can be called", f"Pass one: {shown}(...)")
    if any(inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in (func, call_method)):
        fix = "Use a function that runs the generator to its end"
        raise InvalidArgument(name, shown, "a generator function returns before its body has run", fix)
    if getattr(func, "__globals__", None) is _CONTEXTLIB and hasattr(func, "__wrapped__"):
        fix = "Use a function that contains the `with` block"
        raise InvalidArgument(name, shown, "a context manager returns before its block has run", fix)


def check_parameters(func: Any, name: str, *parameters: str) -> None:
    """Check that `func` can be called with these positional arguments.

    Args:
        func: the function.
        name: the parameter to name in the error.
        parameters: names for the arguments, for the error.

    Raises:
        InvalidArgument: it has other parameters.
    """
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError):  # some builtins have no signature
        return
    try:
        signature.bind(*parameters)
    except TypeError as error:
        call, shown = f"({', '.join(parameters)})", getattr(func, "__qualname__", func)
        raise InvalidArgument(name, shown, f"cannot be called with {call}: {error}", f"Define it with {call}") from None


def type_hints(func: Any) -> dict[str, Any]:
    """Return the annotations of `func` that can be evaluated. Of a class: all, or none if one of them cannot."""
    try:
        return get_type_hints(func)
    except Exception:  # noqa: BLE001 - an annotation is an arbitrary expression and may raise anything
        hints = dict[str, Any]()
    with contextlib.suppress(Exception):  # Python 3.14 evaluates all of them here, unless they are text
        variables = inspect.unwrap(func).__globals__
        for name, annotation in func.__annotations__.items():
            with contextlib.suppress(Exception):
                hints |= get_type_hints(SimpleNamespace(__annotations__={name: annotation}), variables)
    return hints


def call_blocking(work: Callable[..., R], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R:
    """Call the work and return its result. Raise InvalidArgument if the work has not ended; see `refuse_unfinished`."""
    result = work(*args, **kwargs)
    if result.__class__ not in ENDED:
        refuse_unfinished(result)
    return result


async def call_async(work: Callable[..., Awaitable[R]], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R:
    """Await the work and return its result. Raise InvalidArgument if it stands for work that has not ended."""
    result = await work(*args, **kwargs)
    if result.__class__ not in ENDED:
        refuse_unfinished(result)
    return result


def refuse_unfinished(result: object) -> None:
    """Check that the work has ended which returned this result.

    A coroutine, a Future, a Task and a generator stand for work that has not ended, so the key must not become done.
    They are closed or cancelled, because the key is free afterwards. A database cursor may also be iterated, but its
    statement has run, so it passes. So does an AsyncResult of Celery: the work was to send the task.

    Raises:
        InvalidArgument: the work has not ended.
    """
    kind: Any = type(result)
    if not _is_unfinished(kind):
        return
    shown = getattr(result, "__qualname__", kind.__qualname__)
    if issubclass(kind, CoroutineType):
        problem, fix = "a plain function returned its coroutine", "Decorate or pass the coroutine function itself, or"
        fix += " write `async def`"
    else:
        problem = f"the function returned a {kind.__qualname__}, whose work has not ended"
        fix = "Wait for it and return its result"
    _stop(result)
    raise InvalidArgument("function", shown, problem, fix)


def _is_unfinished(kind: Any) -> bool:
    if issubclass(kind, (Generator, AsyncGenerator, Future)) or hasattr(kind, "__await__"):
        return True
    return kind.__module__ in ("builtins", "itertools") and hasattr(kind, "__next__")  # map, filter, zip, starmap


def _stop(result: Any) -> None:
    """Close a coroutine or a generator, and cancel a future. Work that runs in a thread cannot be stopped."""
    with contextlib.suppress(RuntimeError):  # its loop is closed, or it runs now
        if isinstance(result, CoroutineType | Generator):
            result.close()
        elif isinstance(result, Future):
            result.cancel()
        elif not asyncio.isfuture(result):
            return
        elif asyncio._get_running_loop() is (loop := result.get_loop()):
            result.cancel()
        else:
            loop.call_soon_threadsafe(result.cancel)
