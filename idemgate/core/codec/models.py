"""Reconstruction of dataclasses, enums and pydantic models from decoded values and the receiver's annotation.

Only the annotation selects a class. No class is looked up by a stored name.
"""

from __future__ import annotations

import types
import typing
from dataclasses import Field, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from inspect import signature
from typing import Annotated, Any, Union, cast, get_args, get_origin

from idemgate.core.failure import message_of
from idemgate.errors import DecodeError

__all__ = ["has_model", "holds_fields", "rebuild", "unwrap"]

_ROWS = frozenset({list, tuple, set, frozenset})


def rebuild(value: Any, annotation: object) -> Any:
    """Return `value` converted to the models in `annotation`; without a model it is unchanged.

    Supports list, dict, tuple and their abstract bases, Annotated, NewType and the fields of dataclasses. Of a union,
    the first member that fits is used. Missing fields get their defaults and unknown ones are ignored, so two versions
    of a model can share a topic.

    Args:
        value: a decoded value.
        annotation: an evaluated annotation (`typing.get_type_hints`). A string is ignored.

    Raises:
        DecodeError: the model rejects the value.
    """
    if not has_model(annotation):
        return value
    annotation = unwrap(annotation)
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return _rebuild_model(value, annotation)
    origin: Any = get_origin(annotation)
    members = get_args(annotation)
    if origin in (Union, types.UnionType):
        return _rebuild_union(value, members)
    if is_dataclass(origin):
        return _rebuild_model(value, origin)
    return _rebuild_members(value, members)


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


def has_model(annotation: object) -> bool:
    """Return True if the annotation contains a model. Avoids a walk over a plain `dict[str, int]`."""
    try:
        return _has_model_cached(annotation)
    except TypeError:  # an unhashable annotation, such as Annotated[int, []]
        return True


def _find_model(annotation: Any) -> bool:
    annotation = unwrap(annotation)
    if _is_model(annotation) or is_dataclass(get_origin(annotation)):
        return True
    return any(has_model(member) for member in get_args(annotation))


_has_model_cached = lru_cache(maxsize=1024)(_find_model)


def _is_model(annotation: Any) -> bool:
    if not isinstance(annotation, type):
        return False
    return holds_fields(annotation) or issubclass(annotation, Enum)


def _rebuild_members(value: Any, members: tuple[Any, ...]) -> Any:
    kind = cast(Any, type(value))
    if kind is dict and len(members) == 2:
        return {rebuild(key, members[0]): rebuild(item, members[1]) for key, item in value.items()}
    if kind is tuple and Ellipsis not in members and len(members) == len(value):
        return tuple(rebuild(item, member) for item, member in zip(value, members, strict=True))
    if kind in _ROWS and members:
        return kind(rebuild(item, members[0]) for item in value)
    return value


def _rebuild_union(value: Any, members: tuple[Any, ...]) -> Any:
    """Convert to the first member of the union that fits.

    If none fits and the union has a single model, that model's error is raised.
    """
    members = tuple(unwrap(member) for member in members)
    for member in members:
        if _fits(value, member):
            return rebuild(value, member)
    models = [member for member in members if holds_fields(get_origin(member) or member)]
    return rebuild(value, models[0]) if len(models) == 1 and isinstance(value, dict) else value


def holds_fields(kind: Any) -> bool:
    """Return True for a dataclass and a pydantic model."""
    return isinstance(kind, type) and (is_dataclass(kind) or hasattr(cast(Any, kind), "model_validate"))


def _fits(value: Any, member: Any) -> bool:
    """Return True if the value fits this member of a union. A dataclass fits by the names of its fields."""
    kind: Any = get_origin(member) or member
    if kind is Any or not isinstance(kind, type):  # Any is a class
        return kind is Any
    if is_dataclass(kind) and isinstance(value, dict):
        return cast(dict[object, object], value).keys() == {field.name for field in fields(kind)}
    if issubclass(kind, Enum):
        return any(value in (member, member.value) for member in kind)
    if holds_fields(kind) and isinstance(value, dict):
        return _is_valid(value, kind)
    try:
        return isinstance(value, kind)
    except TypeError:  # a TypedDict or a protocol has no instance check
        return False


def _is_valid(value: Any, model: Any) -> bool:
    try:
        _validate(value, model)
    except ValueError:  # pydantic's ValidationError is one
        return False
    return True


def _rebuild_model(value: Any, model: Any) -> Any:
    if isinstance(value, model):
        return value
    try:
        return _construct(value, model)
    except DecodeError:
        raise
    except Exception as error:
        problem = _redact(error, model)
        if problem is None:
            raise DecodeError(f"it does not fit {model.__qualname__}: {message_of(error)}") from error
    # Raised outside of `except`: the context of an error would show the stored value.
    raise DecodeError(f"it does not fit {model.__qualname__}: {problem}")


def _redact(error: Exception, model: Any) -> str | None:
    """Return a description without the stored value, or None if the error's text does not contain it."""
    if issubclass(model, Enum):
        return "it is none of its members"
    if not hasattr(error, "error_count"):  # pydantic's ValidationError has it
        return None
    problems = cast(Any, error).errors(include_input=False, include_url=False, include_context=False)
    return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in problems)


def _construct(value: Any, model: Any) -> Any:
    if issubclass(model, Enum):
        return model(value)
    if is_dataclass(model):
        return _build_dataclass(cast(Any, value), model) if isinstance(value, dict) else value
    return _validate(value, model)


def _validate(value: Any, model: Any) -> Any:
    """Validate by field names, as stored. pydantic before 2.11 supports aliases only."""
    if "by_name" in signature(model.model_validate).parameters:
        return model.model_validate(value, by_name=True)
    return model.model_validate(value)


def _build_dataclass(value: dict[str, Any], model: Any) -> Any:
    arguments: dict[str, Any] = {}
    late_fields: dict[str, Any] = {}
    for field, hint in _fields(model):
        if field.name in value:
            (arguments if field.init else late_fields)[field.name] = rebuild(value[field.name], hint)
    made = model(**arguments)
    for name, item in late_fields.items():
        object.__setattr__(made, name, item)  # also works for a frozen dataclass
    return made


@lru_cache(maxsize=1024)
def _fields(model: Any) -> list[tuple[Field[Any], object]]:
    try:
        hints = typing.get_type_hints(model, include_extras=True)
    except NameError as error:  # a name imported under TYPE_CHECKING only
        raise DecodeError(f"the annotations of {model.__qualname__} cannot be evaluated: {error}") from error
    return [(field, hints.get(field.name)) for field in fields(model)]
