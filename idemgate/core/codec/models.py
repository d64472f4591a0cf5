"""Conversion of payloads to the annotation of a parameter: stored models exactly, plain values by its model.

A producer in another language sends a dict. Its validation is the first one, so it happens here.
"""

from __future__ import annotations

import types
from dataclasses import fields, is_dataclass
from enum import Enum
from inspect import signature
from typing import Any, Union, cast, get_args, get_origin

from idemgate.core.codec.annotations import class_hints, expand_tuple, has_model, hints_of, is_typed_dict, unwrap
from idemgate.core.codec.restoring import holds_stored, restore, to_plain
from idemgate.core.codec.state import holds_fields
from idemgate.core.text import message_of
from idemgate.errors import DecodeError

__all__ = ["rebuild"]

_ROWS = frozenset({list, tuple, set, frozenset})


def rebuild(value: Any, annotation: object) -> Any:
    """Return `value` with its models restored, and plain values converted to the models in `annotation`.

    Without a model in the annotation, plain values are unchanged, and a stored model becomes the dict of its fields.
    Supports list, dict, tuple and their abstract bases, TypedDict, Annotated, NewType and the fields of dataclasses. A
    plain value becomes the first member of a union that fits. Missing fields get their defaults and unknown ones are
    ignored, so two versions of a model can share a topic.

    Args:
        value: a value of `Codec.decode_stored`.
        annotation: an evaluated annotation (`typing.get_type_hints`). A string is ignored.

    Raises:
        DecodeError: the model rejects the value.
    """
    if not has_model(annotation):
        return to_plain(value) if holds_stored(value) else value
    return restore(value, annotation, _convert) if holds_stored(value) else _convert(value, annotation)


def _convert(value: Any, annotation: object) -> Any:
    if not has_model(annotation):
        return value
    annotation = unwrap(annotation)
    origin: Any = get_origin(annotation)
    members = get_args(annotation)
    if is_typed_dict(origin or annotation):
        return _rebuild_typed_dict(value, origin or annotation, annotation)
    if isinstance(annotation, type) and origin is None:
        return _rebuild_model(value, annotation)
    if origin in (Union, types.UnionType):
        return _rebuild_union(value, members)
    if is_dataclass(origin):
        return _rebuild_model(value, origin, annotation)
    return _rebuild_members(value, members)


def _rebuild_typed_dict(value: Any, kind: Any, annotation: Any) -> Any:
    hints = hints_of(kind, annotation)
    if cast(Any, type(value)) is not dict:
        return value
    return {name: _convert(item, hints.get(name)) for name, item in value.items()}


def _rebuild_members(value: Any, members: tuple[Any, ...]) -> Any:
    kind = cast(Any, type(value))
    members = expand_tuple(members, len(value)) if kind is tuple else members
    if kind is dict and len(members) == 2:
        return {_convert(key, members[0]): _convert(item, members[1]) for key, item in value.items()}
    if kind is tuple and Ellipsis not in members and len(members) == len(value):
        return tuple(_convert(item, member) for item, member in zip(value, members, strict=True))
    if kind in _ROWS and members:
        return kind(_convert(item, members[0]) for item in value)
    return value


def _rebuild_union(value: Any, members: tuple[Any, ...]) -> Any:
    """Convert to the first member of the union that fits.

    If none fits and the union has a single model, that model's error is raised.
    """
    members = tuple(unwrap(member) for member in members)
    for member in members:
        if _fits(value, member):
            return _convert(value, member)
    models = [member for member in members if holds_fields(get_origin(member) or member)]
    return _convert(value, models[0]) if len(models) == 1 and isinstance(value, dict) else value


def _fits(value: Any, member: Any) -> bool:
    """Return True if the value fits this member of a union. A dataclass fits by the names of its fields."""
    kind: Any = get_origin(member) or member
    if kind is Any or not isinstance(kind, type):  # Any is a class
        return kind is Any
    if is_typed_dict(kind):
        return isinstance(value, dict) and cast("dict[str, object]", value).keys() <= class_hints(kind).keys()
    if is_dataclass(kind) and isinstance(value, dict):
        return cast(dict[object, object], value).keys() == {field.name for field in fields(kind)}
    if issubclass(kind, Enum):
        return any(value in (member, member.value) for member in kind)
    if holds_fields(kind) and isinstance(value, dict):
        return _is_valid(value, kind)
    try:
        return isinstance(value, kind)
    except TypeError:  # a protocol has no instance check
        return False


def _is_valid(value: Any, model: Any) -> bool:
    try:
        _validate(value, model)
    except ValueError:  # pydantic's ValidationError is one
        return False
    return True


def _rebuild_model(value: Any, model: Any, annotation: Any = None) -> Any:
    if isinstance(value, model):
        return value
    try:
        return _construct(value, model, annotation)
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


def _construct(value: Any, model: Any, annotation: Any) -> Any:
    if issubclass(model, Enum):
        return model(value)
    if is_dataclass(model):
        return _build_dataclass(cast(Any, value), model, annotation) if isinstance(value, dict) else value
    return _validate(value, model)


def _validate(value: Any, model: Any) -> Any:
    """Validate by field names, as stored. pydantic before 2.11 supports aliases only."""
    if "by_name" in signature(model.model_validate).parameters:
        return model.model_validate(value, by_name=True)
    return model.model_validate(value)


def _build_dataclass(value: dict[str, Any], model: Any, annotation: Any) -> Any:
    arguments: dict[str, Any] = {}
    late_fields: dict[str, Any] = {}
    hints = hints_of(model, annotation)
    for field in fields(model):
        if field.name in value:
            made = _convert(value[field.name], hints.get(field.name))
            (arguments if field.init else late_fields)[field.name] = made
    instance = model(**arguments)
    for name, item in late_fields.items():
        object.__setattr__(instance, name, item)  # also works for a frozen dataclass
    return instance
