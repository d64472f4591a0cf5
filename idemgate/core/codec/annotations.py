"""The classes that an annotation leads to."""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from functools import lru_cache
from types import NoneType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin
from uuid import UUID

from idemgate.core.codec.state import class_name, is_pydantic
from idemgate.errors import DecodeError

__all__ = ["BUILT_IN", "dataclass_hints", "find_class", "flatten", "has_model", "hints_of", "unwrap"]

BUILT_IN: frozenset[Any] = frozenset({
    NoneType, bool, int, float, str, bytes, list, tuple, dict, set, frozenset, datetime, date, timedelta, Decimal, UUID,
    object,
})  # fmt: skip
"""The types that the codec restores without an annotation, and object, which says nothing."""
_LIBRARY = frozenset({"builtins", "collections.abc", "typing", "inspect"})
"""Modules without models."""


def unwrap(annotation: Any) -> Any:
    """Return the annotation without Annotated, NewType and `type X = ...`."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        elif type(annotation).__name__ == "TypeAliasType":  # Python 3.12 and typing_extensions
            annotation = annotation.__value__
        else:
            return annotation


def flatten(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union and the bounds of a type variable, unwrapped; else the annotation alone."""
    annotation = unwrap(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        members = get_args(annotation)
    elif isinstance(annotation, TypeVar):
        members = annotation.__constraints__ or (() if annotation.__bound__ is None else (annotation.__bound__,))
    else:
        return (annotation,)
    return tuple(part for member in members for part in flatten(member))


def has_model(annotation: object) -> bool:
    """Return True if the annotation may lead to a model. Avoids a walk over a plain `dict[str, int]`."""
    try:
        return _has_model_cached(annotation)
    except TypeError:  # an unhashable annotation, such as Annotated[int, []]
        return True


def _find_model(annotation: Any) -> bool:
    for part in flatten(annotation):
        kind: Any = get_origin(part) or part
        members = () if kind is typing.Literal else get_args(part)
        if _leads_to_models(kind) or any(has_model(member) for member in members):
            return True
    return False


_has_model_cached = lru_cache(maxsize=1024)(_find_model)


def _leads_to_models(kind: Any) -> bool:
    """Return True for a class of the user: it may be a model, or have subclasses that are, also later ones."""
    if not isinstance(kind, type) or kind in BUILT_IN or kind is Any or typing.is_typeddict(kind):
        return False
    return is_dataclass(kind) or cast(Any, kind).__module__ not in _LIBRARY


def find_class(name: str, options: tuple[Any, ...]) -> tuple[type, Any]:
    """Return the class that has the name of a stored one, and the annotation that leads to it.

    Raises:
        DecodeError: no annotation leads to it, or several classes have that name.
    """
    for option in options:
        for cls in _classes(option):
            if class_name(cls) == name:
                return cls, option
    found: dict[type, Any] = {
        cls: option for option in options for kind in _classes(option) for cls in _subclasses(kind)
        if class_name(cls) == name
    }  # fmt: skip
    if len(found) == 1:
        return found.popitem()
    known = _loaded(name)
    if known in found:  # the others are left from a reload, or from `slots=True`
        return known, found[known]
    shown = " | ".join(getattr(option, "__qualname__", str(option)) for option in options) or "no class"
    problem = "several loaded classes have that name" if found else f"the annotation leads to {shown}"
    raise DecodeError(f"it holds a {name}, and {problem}")


def _classes(option: Any) -> Iterator[type]:
    """Yield the classes that an annotation names. For a model `Box[int]` of pydantic `Box` is one, too."""
    kind = get_origin(option) or option
    if isinstance(kind, type) and kind not in BUILT_IN and kind is not Any:
        yield kind
        generic: Any = kind.__dict__.get("__pydantic_generic_metadata__")
        if generic and generic["origin"] is not None:
            yield generic["origin"]


def _subclasses(kind: type) -> Iterator[type]:
    subclasses: list[type] = type.__subclasses__(kind)
    for cls in subclasses:
        yield cls
        yield from _subclasses(cls)


def _loaded(name: str) -> Any:
    """Return what a loaded module has under this name, only to choose among the classes that were found."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for step in path.split("."):
        found = getattr(found, step, None)
    return found


def hints_of(cls: Any, annotation: Any) -> dict[str, Any]:
    """Return the annotations of a model's fields, where `Box[int]` has given the type variables a type."""
    if is_pydantic(cls):
        return {name: field.annotation for name, field in cls.model_fields.items()}
    hints = dataclass_hints(cls)
    given: dict[Any, Any] = {}
    if get_origin(annotation) is cls:
        given = dict(zip(cls.__parameters__, get_args(annotation), strict=False))
    return {name: given.get(hint, hint) if isinstance(hint, TypeVar) else hint for name, hint in hints.items()}


@lru_cache(maxsize=1024)
def dataclass_hints(cls: Any) -> dict[str, Any]:
    """Return the evaluated annotations of a dataclass. Raise DecodeError if they cannot be evaluated."""
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError as error:  # a name imported under TYPE_CHECKING only
        raise DecodeError(f"the annotations of {cls.__qualname__} cannot be evaluated: {error}") from error
    return {field.name: hints.get(field.name) for field in fields(cls)}
