"""The state of dataclasses, pydantic models and enums: what identifies a value, and what rebuilds it without its code.

Serializers are meant for output: they mask, leave out and rename. So the fields are read from the instance.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast

from idemgate.core.scopes import module_of

__all__ = ["StoredEnum", "StoredModel", "class_name", "holds_fields", "is_entity", "is_pydantic", "read_state"]

_BUILT_IN = (type, str, bytes, int, float, list, tuple, dict, set, frozenset, BaseException)
"""A model that is also one of these has a state besides its fields."""


class StoredModel:
    """A decoded model before its class is known.

    Attributes:
        name: the name of its class; see `class_name`.
        fields: the values of its fields and extras.
        hidden: the values of its other attributes, such as the private ones of pydantic.
        unset: the fields that hold a default because nobody set them; see `model_fields_set` of pydantic.
    """

    __slots__ = ("fields", "hidden", "name", "unset")

    def __init__(self, name: str, fields: dict[str, Any], hidden: dict[str, Any], unset: list[str]) -> None:
        self.name = name
        self.fields = fields
        self.hidden = hidden
        self.unset = unset

    def __repr__(self) -> str:
        return f"<stored {self.name}>"


class StoredEnum(NamedTuple):
    """A decoded enum member before its class is known."""

    name: str
    value: Any


def class_name(cls: type) -> str:
    """Return the module and qualified name of a class. A module that runs as a program has its importable name."""
    return f"{module_of(cls) or cls.__module__}:{cls.__qualname__}"


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

    None also for a model that is a str, a dict, an exception or another built-in type.
    """
    kind = type(value)
    if isinstance(value, _BUILT_IN):
        return None
    if is_dataclass(kind):
        given = {field.name: getattr(value, field.name) for field in fields(kind)}
        return StoredModel(class_name(kind), given, _other_attributes(value, given), [])
    return _read_pydantic(value, kind) if is_pydantic(kind) else None


def _read_pydantic(model: Any, kind: Any) -> StoredModel:
    attributes: dict[str, Any] = model.__dict__
    given: dict[str, Any] = {name: attributes[name] for name in kind.model_fields if name in attributes}
    hidden: dict[str, Any] = _other_attributes(model, given) | (model.__pydantic_private__ or {})
    unset = [name for name in given if name not in model.__pydantic_fields_set__]
    return StoredModel(class_name(kind), given | (model.__pydantic_extra__ or {}), hidden, unset)


def _other_attributes(value: object, given: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes that are no fields, such as those that `__post_init__` sets. Cached properties are left."""
    kind = type(value)
    if is_entity(kind):
        return {}
    found = {
        name: item
        for name, item in getattr(value, "__dict__", {}).items()
        if not (name in given or name.startswith("__pydantic_"))
        and not isinstance(inspect.getattr_static(kind, name, None), cached_property)
    }
    if not is_pydantic(kind):
        found |= {name: getattr(value, name) for name in _slots(kind) if name not in given and hasattr(value, name)}
    return found


def _slots(kind: type) -> Iterator[str]:
    for cls in kind.__mro__:
        slots = cast("str | tuple[str, ...]", cls.__dict__.get("__slots__", ()))
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            if name not in ("__dict__", "__weakref__"):
                yield f"_{cls.__name__.lstrip('_')}{name}" if private else name
