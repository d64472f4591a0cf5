"""The classes that an annotation leads to."""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import is_dataclass
from datetime import date, datetime, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from types import NoneType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Final,
    Generic,
    Literal,
    NotRequired,
    Protocol,
    Required,
    Self,
    TypeVar,
    Union,
    Unpack,
    cast,
    get_args,
    get_origin,
)
from uuid import UUID

from idemgate.core.codec.state import class_name, is_pydantic
from idemgate.errors import DecodeError

__all__ = [
    "BUILT_IN",
    "class_hints",
    "expand_tuple",
    "find_class",
    "has_model",
    "hints_of",
    "is_typed_dict",
    "union_members",
    "unwrap",
]  # fmt: skip

BUILT_IN: frozenset[Any] = frozenset({
    NoneType, bool, int, float, str, bytes, list, tuple, dict, set, frozenset, datetime, date, timedelta, Decimal, UUID,
    object,
})  # fmt: skip
"""The types that the codec restores without an annotation, and object, which says nothing."""
_LIBRARY = frozenset({"builtins", "collections.abc", "typing", "inspect"})
"""Modules without models."""


_MARKS: tuple[Any, ...] = (Annotated, Required, NotRequired, ClassVar, Final)
"""What may stand around an annotation."""


def unwrap(annotation: Any) -> Any:
    """Return the annotation without Annotated, Final, Required, NewType and `type X = ...`."""
    while True:
        origin = get_origin(annotation)
        if origin in _MARKS or getattr(origin, "_name", "") == "ReadOnly":
            annotation = get_args(annotation)[0]
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        elif type(annotation).__name__ == "TypeAliasType":  # Python 3.12 and typing_extensions
            annotation = annotation.__value__
        elif type(origin).__name__ == "TypeAliasType":
            alias: Any = origin
            annotation = _substitute(alias.__value__, dict(zip(alias.__type_params__, get_args(annotation))))  # noqa: B905
        else:
            return annotation


def is_typed_dict(kind: Any) -> bool:
    """Return True for a TypedDict, also for one of typing_extensions."""
    return isinstance(kind, type) and hasattr(cast(Any, kind), "__required_keys__") and issubclass(kind, dict)


def union_members(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union and the bounds of a type variable, unwrapped; else the annotation alone."""
    annotation = unwrap(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        members = get_args(annotation)
    elif isinstance(annotation, TypeVar):
        members = annotation.__constraints__ or (() if annotation.__bound__ is None else (annotation.__bound__,))
    else:
        return (annotation,)
    return tuple(part for member in members for part in union_members(member))


def expand_tuple(members: tuple[Any, ...], size: int) -> tuple[Any, ...]:
    """Return the members of `tuple[...]` for a value of this size: `*tuple[X, ...]` stands for as many as it takes."""
    for at, member in enumerate(members):
        inner = get_args(member)[0] if get_origin(member) is Unpack else member
        if inner is not member or getattr(member, "__unpacked__", False):
            parts = get_args(inner)
            parts = parts[:1] * (size - len(members) + 1) if Ellipsis in parts else parts
            return expand_tuple((*members[:at], *parts, *members[at + 1 :]), size)
    return members


def has_model(annotation: object) -> bool:
    """Return True if the annotation may lead to a model. Avoids a walk over a plain `dict[str, int]`."""
    try:
        return _has_model_cached(annotation)
    except TypeError:  # an unhashable annotation, such as Annotated[int, []]
        return True


def _find_model(annotation: Any, seen: frozenset[Any] = frozenset()) -> bool:
    for part in union_members(annotation):
        if part in seen:
            continue
        kind: Any = get_origin(part) or part
        if _leads_to_models(kind):
            return True
        members = () if kind is Literal else get_args(part)
        if is_typed_dict(kind):
            try:
                members = (*members, *class_hints(kind).values())
            except DecodeError:
                return True
        if any(_find_model(member, seen | {part}) for member in members):
            return True
    return False


_has_model_cached = lru_cache(maxsize=1024)(_find_model)


def _leads_to_models(kind: Any) -> bool:
    """Return True for a class of the user: it may be a model, or have subclasses that are, also later ones."""
    if not isinstance(kind, type) or kind in BUILT_IN or kind is Any or is_typed_dict(kind):
        return False
    return is_dataclass(kind) or cast(Any, kind).__module__ not in _LIBRARY


def find_class(name: str, options: tuple[Any, ...], *, enum: bool = False) -> tuple[type, Any]:
    """Return the class that has the name of a stored one, and the annotation that leads to it.

    Args:
        name: the stored name; see `class_name`.
        options: the annotations of the place.
        enum: True for the class of an enum, which may also be a subclass of a built-in type: a StrEnum in a `str`.

    Raises:
        DecodeError: no annotation leads to it, or several classes have that name.
    """
    for option in options:
        for cls in _classes(option):
            if class_name(cls) == name:
                return cls, option
    found: dict[type, Any] = {
        cls: option for option in options for kind in _classes(option, enum) for cls in _subclasses(kind)
        if class_name(cls) == name
    }  # fmt: skip
    if len(found) == 1:
        return found.popitem()
    known = _loaded_type(name)
    if known in found:  # the others are left from a reload, or from `slots=True`
        return known, found[known]
    if not found and (generic := _find_generic(name, options)) is not None:
        return generic
    shown = " | ".join(getattr(option, "__qualname__", str(option)) for option in options) or "no class"
    problem = "several loaded classes have that name" if found else f"the annotation leads to {shown}"
    raise DecodeError(f"it holds a {name}, and {problem}")


def _find_generic(name: str, options: tuple[Any, ...]) -> tuple[type, Any] | None:
    """Return the model `Box` of pydantic for a stored `Box[int]`, which this process has not made. They are equal."""
    plain, bracket, _ = name.partition("[")
    if not bracket:
        return None
    for option in options:
        for kind in _classes(option):
            for cls in (kind, *_subclasses(kind)):
                generic: Any = cls.__dict__.get("__pydantic_generic_metadata__")
                if (
                    generic
                    and generic["parameters"]
                    and class_name(cls).partition(":")[0] + ":" + cls.__name__ == plain
                ):
                    return cls, option
    return None


def _classes(option: Any, built_in: bool = False) -> Iterator[type]:
    """Yield the classes that an annotation names. For a model `Box[int]` of pydantic `Box` is one, too."""
    kind = get_origin(option) or option
    if kind is Literal:
        yield from {type(member) for member in get_args(option) if isinstance(member, Enum)}
    elif kind in BUILT_IN:
        if built_in and kind not in (object, NoneType):
            yield kind
    elif isinstance(kind, type) and kind is not Any:
        yield kind
        generic: Any = kind.__dict__.get("__pydantic_generic_metadata__")
        if generic and generic["origin"] is not None:
            yield generic["origin"]


def _subclasses(kind: type) -> Iterator[type]:
    subclasses: list[type] = type.__subclasses__(kind)
    for cls in subclasses:
        yield cls
        yield from _subclasses(cls)


def _loaded_type(name: str) -> Any:
    """Return what a loaded module has under this name, only to choose among the classes that were found."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for step in path.split("."):
        found = getattr(found, step, None)
    return found


def hints_of(cls: Any, annotation: Any = None) -> dict[str, Any]:
    """Return the annotations of a class's attributes, or of the keys of a TypedDict.

    Type variables are replaced by what `annotation` or a base class gives them, as in `Page[Item]`, and Self by `cls`.

    Raises:
        DecodeError: the annotations cannot be evaluated.
    """
    try:
        return _hints_cached(cls, annotation)
    except TypeError:  # an unhashable annotation
        return _find_hints(cls, annotation)


def _find_hints(cls: Any, annotation: Any) -> dict[str, Any]:
    bound, hints = _type_arguments(cls, annotation), class_hints(cls)
    owners = {name: base for base in reversed(cls.__mro__) if base in bound for name in inspect.get_annotations(base)}
    found = {name: _substitute(hint, {**bound[owners.get(name, cls)], Self: cls}) for name, hint in hints.items()}
    if is_pydantic(cls):  # pydantic has replaced the type variables
        generic = getattr(annotation, "__pydantic_generic_metadata__", {})
        known = annotation if generic.get("origin") is cls else cls  # a `Box` where `Box[Item]` is named
        found |= {name: _substitute(field.annotation, {Self: cls}) for name, field in known.model_fields.items()}
    return found


_hints_cached = lru_cache(maxsize=1024)(_find_hints)


@lru_cache(maxsize=1024)
def class_hints(cls: Any) -> dict[str, Any]:
    """Return the evaluated annotations of a class. Raise DecodeError if they cannot be evaluated."""
    if is_pydantic(cls):
        return _pydantic_hints(cls)
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except NameError as error:  # a name imported under TYPE_CHECKING only
        raise DecodeError(f"the annotations of {cls.__qualname__} cannot be evaluated: {error}") from error


def _pydantic_hints(cls: Any) -> dict[str, Any]:
    """Return the evaluated annotations of the attributes that are no fields of pydantic, which knows those of fields.

    What cannot be evaluated is left out.
    """
    found: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        if is_pydantic(base) and base.__module__ not in ("pydantic.main", "pydantic.root_model"):
            own = types.SimpleNamespace(__annotations__=inspect.get_annotations(base))
            variables = vars(sys.modules[base.__module__]) if base.__module__ in sys.modules else {}
            try:
                found |= typing.get_type_hints(own, variables, {base.__name__: base})
            except NameError:
                continue
    return found


def _type_arguments(cls: Any, annotation: Any) -> dict[Any, dict[Any, Any]]:
    """Return the types of the type variables of a class and of its bases, where `annotation` names one of them."""
    bound = _bases(cls, {})
    origin: Any = get_origin(annotation)
    if origin not in bound:
        return bound
    given = dict(zip(origin.__parameters__, get_args(annotation), strict=False))
    if origin is not cls:  # `Page[Item]` for a `class Sorted(Page[T])`
        given = {own: given[name] for name, own in bound[origin].items() if isinstance(own, TypeVar) and name in given}
    return _bases(cls, given)


def _bases(cls: Any, given: dict[Any, Any]) -> dict[Any, dict[Any, Any]]:
    found: dict[Any, dict[Any, Any]] = {cls: given}
    for base in cls.__dict__.get("__orig_bases__", cls.__bases__):
        origin: Any = get_origin(base) or base
        if isinstance(origin, type) and origin not in (object, dict, Generic, Protocol):
            members = [_substitute(member, given) for member in get_args(base)]
            found = _bases(origin, dict(zip(getattr(origin, "__parameters__", ()), members, strict=False))) | found
    return found


def _substitute(annotation: Any, given: dict[Any, Any]) -> Any:
    """Return the annotation with its type variables replaced."""
    if isinstance(annotation, TypeVar) or annotation is Self:
        return given.get(annotation, annotation)
    if type(annotation).__name__ == "PydanticRecursiveRef":  # a generic model in its own field
        return given.get(Self, annotation)
    origin, members = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _substitute(members[0], given)
    changed = () if origin is Literal else tuple(_substitute(member, given) for member in members)
    if not changed or all(new is old for new, old in zip(changed, members, strict=True)):
        return annotation
    if origin in (Union, types.UnionType):
        return Union[changed]  # noqa: UP007 - built at run time
    return types.GenericAlias(cast(Any, origin), changed)
