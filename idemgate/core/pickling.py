"""Objects in the place of functions. pickle stores them by their name as it does functions."""

from __future__ import annotations

import operator
from pickle import PicklingError
from typing import Any, NoReturn

__all__ = ["PickledByName"]


class PickledByName:
    """The base of an object that has the name and the module of a function: pickle stores that name.

    cloudpickle copies the functions of a program and of a notebook because other processes cannot import them. It does
    not copy other objects that pickle stores by name: they could not be loaded there. So the pickle of this object
    names a function that is one of its attributes and refuses to be copied. Loading the pickle calls that function.
    """

    def _init_finder(self) -> None:
        """Add the function. Call it when the object has its name. A partial has none and cannot be pickled."""
        name = self._name = getattr(self, "__qualname__", type(self).__name__)
        copied = _Copied(name)

        def find(_: object = copied) -> Any:
            return self

        find.__module__, find.__qualname__ = self.__module__, f"{name}._find"
        self._find = find

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Let pickle store the name. Protocols before 4 have no names with a dot; cloudpickle does not use them."""
        return (operator.call, (self._find,)) if protocol >= 4 else self._name


class _Copied:
    """A default of a function. It is pickled only where the function is copied."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __reduce__(self) -> NoReturn:
        raise PicklingError(
            f"cannot pickle {self._name!r} by value: it belongs to a gate of this process. Define it in a module that "
            "the other process imports"
        )
