"""What kind of function somebody handed in."""

from __future__ import annotations

import inspect
from typing import Any, get_type_hints

from idemgate.errors import InvalidArgument

__all__ = ["awaited", "hints_of", "qualified_name", "refuse_generator"]


def awaited(func: object) -> bool:
    """Whether calling it gives something to await: `async def`, a partial of one, an object whose `__call__` is one."""
    return inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(getattr(type(func), "__call__", None))  # noqa: B004


def refuse_generator(func: object) -> None:
    """InvalidArgument for generator functions: they have not run when they return, so there is nothing to be done once."""
    called = getattr(type(func), "__call__", None)  # noqa: B004
    if any(inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in (func, called)):
        raise InvalidArgument(
            "function",
            getattr(func, "__qualname__", func),
            "a generator function returns before its body has run",
            "Use a function that runs the generator to its end",
        )


def qualified_name(func: Any) -> str:
    """Module and qualified name; partial objects and callables of classes are named by what they are."""
    while hasattr(func, "func"):
        func = func.func
    named: Any = func if hasattr(func, "__qualname__") else func.__class__
    return f"{named.__module__}.{named.__qualname__}".replace("<locals>.", "").replace("<lambda>", "lambda")


def hints_of(func: Any) -> dict[str, Any]:
    """Its evaluated annotations; none where they cannot be read, whatever the reason."""
    try:
        return get_type_hints(func)
    except Exception:  # noqa: BLE001 - an annotation may be any expression, and fail in any way
        return {}
