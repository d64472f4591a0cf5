"""Access to a call's arguments by name without binding the signature at each call.

A call is (instance, args, kwargs), as in wrapt. With an instance, `args` lack the first parameter. Without one, `args`
contain it: for a plain function, or a decorator that leaves `self` in `args`. Both are supported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from inspect import Parameter, ismethod, signature
from typing import Any, cast

from idemgate.core.validation import type_hints

__all__ = ["Args", "Arguments", "Find", "Kwargs"]

Args = tuple[Any, ...]
Kwargs = Mapping[str, Any]
Find = Callable[[object, Args, Kwargs], Any]

_MISSING: Any = object()
_NOWHERE = sys.maxsize


def _unwrap(func: Callable[..., object]) -> Callable[..., object]:
    """Return the function of a bound method, classmethod or staticmethod. Its signature has `self` or `cls`."""
    if isinstance(func, (classmethod, staticmethod)) or ismethod(func):
        return cast(Callable[..., object], cast(Any, func).__func__)
    return func


class Arguments:
    """The parameters of `func`. Raises ValueError or TypeError for some builtins, as `inspect.signature` does."""

    __slots__ = ("_finds", "_rest", "hints", "names", "of_method")

    def __init__(self, func: Callable[..., object]) -> None:
        func = _unwrap(func)
        parameters = list(signature(func).parameters.values())
        named = frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
        self.hints = type_hints(func)
        self.names = tuple(parameter.name for parameter in parameters)
        self._finds = {p.name: _find(at, p, named) for at, p in enumerate(parameters)}
        self._rest = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        self.of_method = _takes_self(func, self.names)

    def find(self, name: str) -> Find | None:
        """Return a function that finds the argument `name` of a call; None if there is no such parameter.

        With `**kwargs` every name is accepted, and a missing argument raises TypeError at the call.
        """
        found = self._finds.get(name)
        return _Extra(name) if found is None and self._rest else found

    def all(self, instance: object, args: Args, kwargs: Kwargs) -> dict[str, Any]:
        """Return all arguments by name with their defaults, without the instance or class of a method."""
        skip = instance is not None or self.of_method
        return {name: self._finds[name](instance, args, kwargs) for name in self.names[skip:]}


def _find(at: int, parameter: Parameter, named: frozenset[str]) -> Find:
    if parameter.kind is parameter.VAR_POSITIONAL:
        return _Positionals(at)
    if parameter.kind is parameter.VAR_KEYWORD:
        return _Keywords(named)
    return _One(at, parameter)


def _takes_self(func: Callable[..., object], names: tuple[str, ...]) -> bool:
    """Return True for a function of a class body, such as `Shop.pay`, whose first parameter is `self` or `cls`."""
    around = getattr(func, "__qualname__", "").rpartition(".")[0]
    return bool(around) and not around.endswith("<locals>") and names[:1] in (("self",), ("cls",))


class _One:
    __slots__ = ("_at", "_default", "_keyword", "_name")

    def __init__(self, at: int, parameter: Parameter) -> None:
        self._at = _NOWHERE if parameter.kind is parameter.KEYWORD_ONLY else at
        self._name = parameter.name
        # A positional-only name may also be a name in **kwargs, which is another argument.
        self._keyword = "" if parameter.kind is parameter.POSITIONAL_ONLY else parameter.name
        self._default = _MISSING if parameter.default is parameter.empty else parameter.default

    def __call__(self, instance: object, args: Args, kwargs: Kwargs) -> Any:
        at = self._at if instance is None else self._at - 1
        if at < len(args):
            return args[at] if at >= 0 else instance
        value = kwargs.get(self._keyword, self._default)
        if value is _MISSING:
            raise TypeError(f"missing a required argument: {self._name!r}")  # the same error as the call itself
        return value


class _Positionals:
    __slots__ = ("_at",)

    def __init__(self, at: int) -> None:
        self._at = at

    def __call__(self, instance: object, args: Args, _kwargs: Kwargs) -> Args:
        return (args if instance is None else (instance, *args))[self._at :]


class _Keywords:
    __slots__ = ("_named",)

    def __init__(self, named: frozenset[str]) -> None:
        self._named = named

    def __call__(self, _instance: object, _args: Args, kwargs: Kwargs) -> dict[str, Any]:
        return {name: value for name, value in kwargs.items() if name not in self._named}


class _Extra:
    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, _instance: object, _args: Args, kwargs: Kwargs) -> Any:
        if self._name not in kwargs:
            raise TypeError(f"missing a keyword argument: {self._name!r}")
        return kwargs[self._name]
