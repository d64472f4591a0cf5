"""The state of dataclasses, pydantic models and enums: what identifies a value, and what rebuilds it without its code.

Serializers are meant for output: they mask, leave out and rename. So the fields are read from the instance.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cached_property
from types import MemberDescriptorType
from typing import Any, Generic, NamedTuple, cast, get_args

from idemgate.core.scopes import module_of

__all__ = [
    "StoredEnum", "StoredModel", "class_name", "holds_fields", "is_computed", "is_entity", "is_found_by_name",
    "is_pydantic", "read_state", "set_attribute", "takes_extras",
]  # fmt: skip

_LIBRARY = frozenset({"builtins", "datetime", "decimal", "uuid", "typing", "types", "collections.abc"})
"""Modules without classes of the user. A test tool may replace the classes in them."""
_IMMUTABLE_TYPE = 1 << 8
"""Py_TPFLAGS_IMMUTABLETYPE: the flag of a class that is written in C."""


class StoredModel:
    """A decoded model before its class is known.

    Attributes:
        name: the name of its class; see `class_name`.
        fields: the values of its fields and extras.
        hidden: the values of its other attributes, such as the private ones of pydantic.
        unset: the fields that hold a default because nobody set them; see `model_fields_set` of pydantic. Of a
            dataclass the fields that a property computes from its other attributes.
    """

    __slots__ = ("fields", "hidden", "name", "unset")

    def __init__(self, name: str, fields: dict[str, Any], hidden: dict[str, Any], unset: list[str]) -> None:
        self.name: str = name
        self.fields: dict[str, Any] = fields
        self.hidden: dict[str, Any] = hidden
        self.unset: list[str] = unset

    def __repr__(self) -> str:
        return f"<stored {self.name}>"


class StoredEnum(NamedTuple):
    """A decoded enum member before its class is known."""

    name: str
    value: Any


def class_name(cls: type) -> str:
    """Return the module and qualified name of a class. A module that runs as a program has its importable name.

    A model `Page[Item]` of pydantic names `Item` with its module, too: two classes may have that short name.
    """
    generic: Any = cls.__dict__.get("__pydantic_generic_metadata__")
    of = ", ".join(map(class_name, _argument_classes(generic["args"]))) if generic else ""
    return f"{module_of(cls) or cls.__module__}:{cls.__qualname__}" + (f"({of})" if of else "")


def holds_fields(kind: Any) -> bool:
    """Return True for a dataclass and a pydantic model."""
    return isinstance(kind, type) and (is_dataclass(kind) or is_pydantic(kind))


def is_pydantic(kind: Any) -> bool:
    """Return True for a model of pydantic 2."""
    return hasattr(kind, "__pydantic_fields_set__") and hasattr(kind, "model_fields")


def is_entity(kind: Any) -> bool:
    """Return True for an entity of SQLAlchemy: it belongs to a session, which nothing can store."""
    return hasattr(kind, "_sa_class_manager")


def read_state(value: object) -> StoredModel | None:
    """Return the state of a dataclass or pydantic model, or None for any other value.

    The values are those that the instance holds, and not those that a property shows in their place. None also for a
    model that is a str, a dict, a deque, an exception or another type of C.
    """
    kind = type(value)
    if is_dataclass(kind):
        return None if _is_of_c(kind) else _read_dataclass(value, kind)
    return _read_pydantic(value, kind) if is_pydantic(kind) and not _is_of_c(kind) else None


def set_attribute(instance: object, name: str, value: object) -> None:
    """Set an attribute without the code of the class: no property, descriptor or `__setattr__` sees it."""
    slot = _find_slot(type(instance), name)
    if slot is not None:
        slot.__set__(instance, value)
    else:
        object.__getattribute__(instance, "__dict__")[name] = value


def is_computed(cls: type, name: str) -> bool:
    """Return True if a property or another descriptor of the class stands for an attribute."""
    return hasattr(inspect.getattr_static(cls, name, None), "__set__") and _find_slot(cls, name) is None


def takes_extras(kind: Any) -> bool:
    """Return True for a dataclass of pydantic that holds extra values, as it holds all its attributes."""
    return bool(getattr(kind, "__pydantic_config__", {}).get("extra") == "allow")


def is_found_by_name(cls: Any) -> bool:
    """Return False for a class whose name another class may have: one that its module does not have under its name.

    Such are the classes that a function defines. A model `Page[Item]` of pydantic counts by `Page` and `Item`.
    """
    generic: Any = cls.__dict__.get("__pydantic_generic_metadata__")
    if generic and generic["args"]:
        return all(map(is_found_by_name, [generic["origin"], *_argument_classes(generic["args"])]))
    found: Any = sys.modules.get(cls.__module__)
    for step in cls.__qualname__.split("."):
        found = getattr(found, step, None)
    return found is cls or not (found is None or isinstance(found, type))  # a function: a decorator replaced the class


def _argument_classes(arguments: Iterable[Any]) -> Iterator[type]:
    """Yield the classes of the user that type arguments name, such as `Item` for `list[Item] | None`."""
    for argument in arguments:
        if get_args(argument):
            yield from _argument_classes(get_args(argument))
        elif isinstance(argument, type) and argument.__module__ not in _LIBRARY:
            yield argument


def _is_of_c(kind: type) -> bool:
    """Return True for a class that has a base written in C, which holds state besides the attributes."""
    return any(base.__flags__ & _IMMUTABLE_TYPE for base in kind.__mro__ if base is not object and base is not Generic)


def _read_dataclass(value: Any, kind: Any) -> StoredModel:
    attributes: dict[str, Any] = _attributes(value)
    given: dict[str, Any] = {}
    computed: list[str] = []
    for field in fields(kind):
        name = field.name
        if name in attributes:
            given[name] = attributes[name]
        elif (slot := _find_slot(kind, name)) is not None:
            given[name] = slot.__get__(value)
        else:
            given[name] = getattr(value, name)
            if is_computed(kind, name):
                computed.append(name)
    hidden = _other_attributes(kind, attributes, given)
    if not is_entity(kind):
        hidden |= _other_slots(value, kind, given)
    if takes_extras(kind):
        given |= {name: item for name, item in hidden.items() if not name.startswith("_")}
        hidden = {name: item for name, item in hidden.items() if name.startswith("_")}
    return StoredModel(class_name(kind), given, hidden, computed)


def _read_pydantic(model: Any, kind: Any) -> StoredModel:
    attributes: dict[str, Any] = _attributes(model)
    given: dict[str, Any] = {name: attributes[name] for name in kind.model_fields if name in attributes}
    if is_entity(kind):  # an expired one loads its attributes when they are read
        given |= {name: getattr(model, name) for name in kind.model_fields if name not in given}
    hidden: dict[str, Any] = _other_attributes(kind, attributes, given) | (model.__pydantic_private__ or {})
    unset = [name for name in given if name not in model.__pydantic_fields_set__]
    return StoredModel(class_name(kind), given | (model.__pydantic_extra__ or {}), hidden, unset)


def _attributes(value: object) -> dict[str, Any]:
    try:
        return cast("dict[str, Any]", object.__getattribute__(value, "__dict__"))
    except AttributeError:  # a class with slots
        return {}


def _other_attributes(kind: type, attributes: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes that are no fields, such as those that `__post_init__` sets. Cached properties are left."""
    if is_entity(kind):
        return {}
    return {
        name: item
        for name, item in attributes.items()
        if not (name in given or name.startswith("__pydantic_"))
        and not isinstance(inspect.getattr_static(kind, name, None), cached_property)
    }


def _other_slots(value: object, kind: type, given: dict[str, Any]) -> dict[str, Any]:
    """Return the values of the slots that are no fields."""
    found: dict[str, Any] = {}
    for cls in kind.__mro__:
        for name, slot in cls.__dict__.items():
            if type(slot) is MemberDescriptorType and name not in given and name not in found:
                with suppress(AttributeError):  # it is empty
                    found[name] = slot.__get__(value)
    return found


def _find_slot(kind: type, name: str) -> Any:
    """Return the slot that holds an attribute, also where a property of a subclass stands before it."""
    for cls in kind.__mro__:
        if type(slot := cls.__dict__.get(name)) is MemberDescriptorType:
            return slot
    return None
