"""Checks of arguments: numbers, iterables and functions."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar, get_type_hints

from idemgate.errors import InvalidArgument

__all__ = ["check_int", "check_iterable", "check_not_generator", "is_async", "qualified_name", "type_hints"]

T = TypeVar("T")


def check_int(name: str, value: int, least: int = 1, most: int | None = None) -> int:
    """Return `value` if it is an int within the bounds. A bool is not an int here.

    Args:
        name: the parameter to name in the error.
        value: the argument.
        least: the smallest valid value.
        most: the largest valid value; None for no upper bound.

    Raises:
        InvalidArgument: `value` has another type or is out of bounds.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
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


def check_not_generator(func: object) -> None:
    """Raise InvalidArgument for a generator function: it returns before its body has run."""
    call_method = getattr(type(func), "__call__", None)  # noqa: B004
    if any(inspect.isgeneratorfunction(each) or inspect.isasyncgenfunction(each) for each in (func, call_method)):
        raise InvalidArgument(
            "function",
            getattr(func, "__qualname__", func),
            "a generator function returns before its body has run",
            "Use a function that runs the generator to its end",
        )


def qualified_name(func: Any) -> str:
    """Return the module and qualified name of `func`.

    A partial is named by its function, and a callable object by its class.
    """
    while hasattr(func, "func"):
        func = func.func
    owner: Any = func if hasattr(func, "__qualname__") else func.__class__
    return f"{owner.__module__}.{owner.__qualname__}".replace("<locals>.", "").replace("<lambda>", "lambda")


def type_hints(func: Any) -> dict[str, Any]:
    """Return the evaluated annotations of `func`, or an empty dict if they cannot be evaluated."""
    try:
        return get_type_hints(func)
    except Exception:  # noqa: BLE001 - an annotation is an arbitrary expression and may raise anything
        return {}
