"""Checks of arguments: numbers, iterables and functions."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CoroutineType
from typing import Any, TypeVar, cast, get_type_hints

from idemgate.errors import InvalidArgument

__all__ = [
    "MOST",
    "call_blocking",
    "check_blocking",
    "check_function",
    "check_int",
    "check_iterable",
    "check_parameters",
    "is_async",
    "refuse_coroutine",
    "type_hints",
]

R = TypeVar("R")
T = TypeVar("T")
_GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_CONTEXTLIB = vars(contextlib)


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
        InvalidArgument: `func` is not callable, is a generator function, or makes a context manager. A call of the
            last two returns before the body has run.
    """
    code = getattr(func, "__code__", None)
    if code is not None and not code.co_flags & _GENERATOR and getattr(func, "__globals__", None) is not _CONTEXTLIB:
        return  # the common case, in a tenth of the time
    if not callable(func):
        raise InvalidArgument(name, func, "not callable", "Pass a function")
    call_method = getattr(type(func), "__call__", None)  # noqa: B004
    shown = getattr(func, "__qualname__", func)
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
    """Return the evaluated annotations of `func`, or an empty dict if they cannot be evaluated."""
    try:
        return get_type_hints(func)
    except Exception:  # noqa: BLE001 - an annotation is an arbitrary expression and may raise anything
        return {}


def call_blocking(work: Callable[..., R], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> R:
    """Call the work and return its result.

    Raise InvalidArgument for a coroutine: none of it has run, so the key must not become done.
    """
    result = work(*args, **kwargs)
    if result.__class__ is CoroutineType:
        refuse_coroutine(result)
    return result


def refuse_coroutine(result: object) -> None:
    """Close the coroutine that a blocking call returned, and raise InvalidArgument."""
    coroutine = cast("CoroutineType[Any, Any, Any]", result)
    coroutine.close()
    fix = "Decorate or pass the coroutine function itself, or write `async def`"
    raise InvalidArgument("function", coroutine.__qualname__, "a plain function returned its coroutine", fix)
