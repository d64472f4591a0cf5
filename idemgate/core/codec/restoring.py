"""Restoring of stored models: the value that was stored, of the class that it had, without running the class's code.

A stored name never loads anything. It only chooses among the classes that an annotation leads to: those that it names,
and their loaded subclasses.
"""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import MISSING, fields
from enum import Enum
from typing import Any, cast, get_args, get_origin

from idemgate.core.codec.annotations import expand_tuple, find_class, hints_of, is_typed_dict, union_members
from idemgate.core.codec.state import (
    StoredEnum,
    StoredModel,
    holds_fields,
    is_computed,
    is_entity,
    is_pydantic,
    set_attribute,
    takes_extras,
)
from idemgate.core.text import message_of
from idemgate.errors import DecodeError

__all__ = ["holds_stored", "restore", "to_plain"]

Convert = Callable[[Any, Any], Any]
_ROWS = frozenset({list, tuple, set, frozenset})
_SCALARS = frozenset({type(None), bool, int, float, str, bytes})


def restore(value: Any, annotation: object, convert: Convert | None = None) -> Any:
    """Return a value of `Codec.decode_stored` as it was: no validator, `__post_init__` or serializer runs.

    Missing fields get their defaults and unknown ones are ignored, so two versions of a model can share data.

    Args:
        value: the decoded value.
        annotation: an evaluated annotation (`typing.get_type_hints`).
        convert: converts a dict that is no stored model to the model of an annotation. None: such a dict is an error.

    Raises:
        DecodeError: the annotation does not lead to the class of a model in it, or a field is missing. Or a dict stands
            where the annotation names models only.
    """
    try:
        return _restore(value, union_members(annotation), convert)
    except DecodeError:
        raise
    except Exception as error:
        raise DecodeError(f"it cannot be rebuilt: {message_of(error)}") from error


def holds_stored(value: Any) -> bool:
    """Return True if a stored model is in a value."""
    kind = cast(Any, type(value))
    if kind in _SCALARS:
        return False
    if kind is dict:
        pairs = cast("dict[Any, Any]", value)
        return any(holds_stored(item) for item in pairs.values()) or any(map(holds_stored, pairs))
    return kind is StoredModel or kind is StoredEnum or (kind in _ROWS and any(map(holds_stored, value)))


def to_plain(value: Any) -> Any:
    """Return a value of `Codec.decode_stored` as `Codec.decode` gives it: a model is the dict of its fields."""
    kind = cast(Any, type(value))
    if kind in _SCALARS:
        return value
    if kind is StoredModel:
        return {name: to_plain(item) for name, item in value.fields.items()}
    if kind is StoredEnum:
        return to_plain(value.value)
    if kind is dict:
        return {to_plain(key): to_plain(item) for key, item in value.items()}
    return kind(map(to_plain, value)) if kind in _ROWS else value


def _restore(value: Any, options: tuple[Any, ...], convert: Convert | None) -> Any:
    kind = cast(Any, type(value))
    if kind in _SCALARS:
        return value
    if kind is StoredModel:
        return _build(value, *find_class(value.name, options), convert)
    if kind is StoredEnum:
        return _build_enum(value, find_class(value.name, options, enum=True)[0], options, convert)
    if kind is dict:
        return _restore_dict(value, options, convert)
    if kind in _ROWS:
        return kind([_restore(item, _of_item(options, at, len(value)), convert) for at, item in enumerate(value)])
    return value


def _restore_dict(value: dict[Any, Any], options: tuple[Any, ...], convert: Convert | None) -> Any:
    named = [get_origin(option) or option for option in options]
    models = [option for option, kind in zip(options, named, strict=True) if holds_fields(kind)]
    if models and all(holds_fields(kind) or kind in _SCALARS for kind in named):
        if convert is None or holds_stored(value):
            shown = getattr(models[0], "__qualname__", models[0])
            raise DecodeError(f"it is a dict, and the annotation names {shown}")
        return convert(value, typing.Union[tuple(options)])  # noqa: UP007 - built at run time
    keys, items = (_of_pair(options, at) for at in (0, 1))
    typed = [hints_of(kind, option) for option, kind in zip(options, named, strict=True) if is_typed_dict(kind)]
    if typed:
        of_key = {
            key: tuple(part for hints in typed if key in hints for part in union_members(hints[key])) for key in value
        }
        return {key: _restore(item, items + of_key[key], convert) for key, item in value.items()}
    return {_restore(key, keys, convert): _restore(item, items, convert) for key, item in value.items()}


def _of_pair(options: tuple[Any, ...], at: int) -> tuple[Any, ...]:
    """Return the annotations of the keys or the values of a dict."""
    pairs = [get_args(option) for option in options if get_origin(option) is not tuple]
    return tuple(part for members in pairs if len(members) == 2 for part in union_members(members[at]))


def _of_item(options: tuple[Any, ...], at: int, size: int) -> tuple[Any, ...]:
    """Return the annotations of one item of a list, tuple or set."""
    found: list[Any] = []
    for option in options:
        members = get_args(option)
        if get_origin(option) is tuple and Ellipsis not in members:
            members = expand_tuple(members, size)
            found += union_members(members[at]) if len(members) == size else ()
        elif members and get_origin(option) is not dict:
            found += union_members(members[0])
    return tuple(found)


def _build_enum(stored: StoredEnum, cls: type, options: tuple[Any, ...], convert: Convert | None) -> Any:
    value = _restore(stored.value, options, convert)
    if not issubclass(cls, Enum):
        raise DecodeError(f"{stored.name} is no enum")
    for member in cls.__members__.values():
        if type(member.value) is type(value) and member.value == value:
            return member
    if isinstance(value, int) and hasattr(cls, "_flag_mask_"):  # several flags
        return cls(value)
    raise DecodeError(f"a stored value is no member of {cls.__qualname__}")


def _build(stored: StoredModel, cls: Any, annotation: Any, convert: Convert | None) -> Any:
    if not holds_fields(cls) or is_entity(cls):
        raise DecodeError(f"{stored.name} is no dataclass and no pydantic model")
    held = (*stored.fields.values(), *stored.hidden.values())
    hints = hints_of(cls, annotation) if any(type(item) not in _SCALARS for item in held) else {}
    options = {name: union_members(hint) for name, hint in hints.items()}
    extra = _of_pair(options.get("__pydantic_extra__", ()), 1)
    given = {name: _restore(item, options.get(name, extra), convert) for name, item in stored.fields.items()}
    hidden = {name: _restore(item, options.get(name, ()), None) for name, item in stored.hidden.items()}
    if is_pydantic(cls):
        return _build_pydantic(cls, given, hidden, stored.unset)
    return _build_dataclass(cls, given, hidden, stored.unset)


def _build_dataclass(cls: Any, given: dict[str, Any], hidden: dict[str, Any], computed: list[str]) -> Any:
    made = object.__new__(cls)
    absent: list[str] = []
    for field in fields(cls):
        name = field.name
        if name in computed and is_computed(cls, name):
            absent.append(name)
        elif name in given:
            set_attribute(made, name, given[name])
        elif field.default is not MISSING:
            set_attribute(made, name, field.default)
        elif field.default_factory is not MISSING:
            set_attribute(made, name, field.default_factory())
        else:
            raise _missing(cls, name)
    if takes_extras(cls):
        hidden |= {name: value for name, value in given.items() if name not in {field.name for field in fields(cls)}}
    for name, value in hidden.items():
        set_attribute(made, name, value)
    for name in absent:
        if getattr(made, name) != given[name]:
            raise DecodeError(f"{name!r} of {cls.__qualname__} is a property, and its value is not in the instance")
    return made


def _build_pydantic(cls: Any, given: dict[str, Any], hidden: dict[str, Any], unset: list[str]) -> Any:
    made = object.__new__(cls)
    attributes = {name: given[name] if name in given else _default(cls, name, field, given)
                  for name, field in cls.model_fields.items()}  # fmt: skip
    extra = {name: item for name, item in given.items() if name not in attributes}
    known = cls.__private_attributes__
    private = {name: item.get_default() for name, item in known.items() if name not in hidden}
    private = {name: item for name, item in private.items() if type(item).__name__ != "PydanticUndefinedType"}
    private |= {name: item for name, item in hidden.items() if name in known}
    state = {
        "__dict__": attributes | {name: item for name, item in hidden.items() if name not in known},
        "__pydantic_fields_set__": given.keys() - set(unset),
        "__pydantic_extra__": extra if cls.model_config.get("extra") == "allow" else None,
        "__pydantic_private__": private if known else None,
    }
    for name, value in state.items():  # as `BaseModel.__setstate__`, which a model may override
        if value is not None or getattr(cls, name, ...) is not None:  # None already in a RootModel
            object.__setattr__(made, name, value)
    return made


def _default(cls: Any, name: str, field: Any, given: dict[str, Any]) -> Any:
    """Return the default of a field that the stored model lacks: another version of its class has stored it."""
    if field.is_required():
        raise _missing(cls, name)
    if getattr(field, "default_factory_takes_validated_data", False):
        return field.get_default(call_default_factory=True, validated_data=given)
    return field.get_default(call_default_factory=True)


def _missing(cls: Any, name: str) -> DecodeError:
    return DecodeError(f"it does not fit {cls.__qualname__}: a stored model lacks its field {name!r}")
