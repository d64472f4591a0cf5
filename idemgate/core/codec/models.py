"""Dataclasses, enums and pydantic models again, from decoded plain values and the annotation of the receiver.

The annotation decides, never the data: no class is found by a name that was stored.
"""

from __future__ import annotations

import types
import typing
from dataclasses import Field, fields, is_dataclass
from enum import Enum
from functools import lru_cache
from inspect import signature
from typing import Annotated, Any, Union, cast, get_args, get_origin

from idemgate.errors import DecodeError

__all__ = ["rebuild"]

_ROWS = frozenset({list, tuple, set, frozenset})


def rebuild(value: Any, annotation: object) -> Any:
    """`value` as `annotation` describes it; what asks for no model comes back unchanged.

    Looks through list, dict, tuple and their abstract kin, Optional and unions (the first arm that fits,
    as declared), Annotated, NewType, and the fields of dataclasses. Annotations have to be evaluated
    (`typing.get_type_hints`): a string is no type and changes nothing. Fields that are missing take their
    defaults, unknown ones are left out, so that two versions of a model can share a topic. Raises
    DecodeError when the model refuses the value.
    """
    if not _concerns(annotation):
        return value
    annotation = _bare(annotation)
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return _model(value, annotation)
    origin: Any = get_origin(annotation)
    arms = get_args(annotation)
    if origin in (Union, types.UnionType):
        return _of_union(value, arms)
    if is_dataclass(origin):
        return _model(value, origin)
    return _members(value, arms)


def _bare(annotation: Any) -> Any:
    """Without the wrappers that only tell people something: Annotated, NewType, `type X = ...`."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        elif type(annotation).__name__ == "TypeAliasType":  # Python 3.12 and typing_extensions
            annotation = annotation.__value__
        else:
            return annotation


def _concerns(annotation: Any) -> bool:
    """Whether there is anything to make in it; so a plain `dict[str, int]` is not walked for nothing."""
    try:
        return _concerns_cached(annotation)
    except TypeError:  # unhashable, as Annotated[int, []] inside
        return True


def _concerns_here(annotation: Any) -> bool:
    annotation = _bare(annotation)
    if _is_model(annotation) or is_dataclass(get_origin(annotation)):
        return True
    return any(_concerns(arm) for arm in get_args(annotation))


_concerns_cached = lru_cache(maxsize=1024)(_concerns_here)


def _is_model(annotation: Any) -> bool:
    if not isinstance(annotation, type):
        return False
    return _holds_fields(annotation) or issubclass(annotation, Enum)


def _members(value: Any, arms: tuple[Any, ...]) -> Any:
    kind = cast(Any, type(value))
    if kind is dict and len(arms) == 2:
        return {rebuild(key, arms[0]): rebuild(item, arms[1]) for key, item in value.items()}
    if kind is tuple and Ellipsis not in arms and len(arms) == len(value):
        return tuple(rebuild(item, arm) for item, arm in zip(value, arms, strict=True))
    if kind in _ROWS and arms:
        return kind(rebuild(item, arms[0]) for item in value)
    return value


def _of_union(value: Any, arms: tuple[Any, ...]) -> Any:
    """The first arm that fits, as declared. Where none does, a single model among them has to say why."""
    arms = tuple(_bare(arm) for arm in arms)
    for arm in arms:
        if _fits(value, arm):
            return rebuild(value, arm)
    models = [arm for arm in arms if _holds_fields(get_origin(arm) or arm)]
    return rebuild(value, models[0]) if len(models) == 1 and isinstance(value, dict) else value


def _holds_fields(kind: Any) -> bool:
    return isinstance(kind, type) and (is_dataclass(kind) or hasattr(cast(Any, kind), "model_validate"))


def _fits(value: Any, arm: Any) -> bool:
    """Whether this arm of a union is meant. Dataclasses fit by the names of their fields, as stored."""
    kind: Any = get_origin(arm) or arm
    if kind is Any or not isinstance(kind, type):  # Any is a class
        return kind is Any
    if is_dataclass(kind) and isinstance(value, dict):
        return cast(dict[object, object], value).keys() == {field.name for field in fields(kind)}
    if issubclass(kind, Enum):
        return any(value in (member, member.value) for member in kind)
    if _holds_fields(kind) and isinstance(value, dict):
        return _validates(value, kind)
    try:
        return isinstance(value, kind)
    except TypeError:  # a TypedDict or a protocol: says nothing about instances
        return False


def _validates(value: Any, model: Any) -> bool:
    try:
        _validated(value, model)
    except ValueError:  # pydantic's ValidationError is one
        return False
    return True


def _model(value: Any, model: Any) -> Any:
    if isinstance(value, model):
        return value
    try:
        return _made(value, model)
    except DecodeError:
        raise
    except Exception as error:
        told = _without_value(error, model)
        if told is None:
            raise DecodeError(f"it does not fit {model.__qualname__}: {error}") from error
    # Out here, since an error keeps the one during which it was raised.
    raise DecodeError(f"it does not fit {model.__qualname__}: {told}")


def _without_value(error: Exception, model: Any) -> str | None:
    """What is wrong, where the error itself would show what was stored; None where its text is the model's own."""
    if issubclass(model, Enum):
        return "it is none of its members"
    if not hasattr(error, "error_count"):  # that of pydantic's ValidationError
        return None
    problems = cast(Any, error).errors(include_input=False, include_url=False, include_context=False)
    return "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in problems)


def _made(value: Any, model: Any) -> Any:
    if issubclass(model, Enum):
        return model(value)
    if is_dataclass(model):
        return _dataclass(cast(Any, value), model) if isinstance(value, dict) else value
    return _validated(value, model)


def _validated(value: Any, model: Any) -> Any:
    """Stored by the names of the fields; pydantic before 2.11 can only be asked for their aliases."""
    if "by_name" in signature(model.model_validate).parameters:
        return model.model_validate(value, by_name=True)
    return model.model_validate(value)


def _dataclass(value: dict[str, Any], model: Any) -> Any:
    given: dict[str, Any] = {}
    later: dict[str, Any] = {}
    for field, hint in _fields(model):
        if field.name in value:
            (given if field.init else later)[field.name] = rebuild(value[field.name], hint)
    made = model(**given)
    for name, item in later.items():
        object.__setattr__(made, name, item)  # as it was, frozen or not
    return made


@lru_cache(maxsize=1024)
def _fields(model: Any) -> list[tuple[Field[Any], object]]:
    try:
        hints = typing.get_type_hints(model, include_extras=True)
    except NameError as error:  # a name imported under TYPE_CHECKING only
        raise DecodeError(f"the annotations of {model.__qualname__} cannot be evaluated: {error}") from error
    return [(field, hints.get(field.name)) for field in fields(model)]
