"""Values that the codec cannot store: the check of a return annotation, and the reason that callers see."""

from __future__ import annotations

import inspect
import types
import typing
from collections import abc, deque
from collections.abc import Iterator
from enum import Enum
from types import NoneType
from typing import Any, Union, cast, get_args, get_origin

from idemgate.core.codec.annotations import BUILT_IN, is_typed_dict, unwrap
from idemgate.core.codec.state import class_name, holds_fields, is_entity, read_state
from idemgate.core.validation import refuse_unfinished
from idemgate.errors import InvalidArgument

__all__ = ["describe_unstored", "find_unstorable", "has_other_class", "refuse_unfinished_inside"]

_BASES: tuple[Any, ...] = tuple(BUILT_IN - {object})
_CALLABLE = cast(Any, abc).Callable
_USED_UP: tuple[Any, ...] = (abc.Iterator, abc.AsyncIterator, abc.AsyncIterable, abc.Awaitable, _CALLABLE, type)
"""Values that are used up, or that mean code: an abstract type of one cannot be stored either."""


def find_unstorable(annotation: object) -> object | None:
    """Return the part of an annotation whose values the codec never stores, or None.

    What is not certain passes: a type variable, a protocol, an abstract class, a base class of models, and a union with
    a member that can be stored.
    """
    annotation = unwrap(annotation)
    origin, members = get_origin(annotation), get_args(annotation)
    if origin is typing.Literal:
        return None
    if origin in (Union, types.UnionType):
        found = [find_unstorable(member) for member in members if member is not NoneType]
        return found[0] if found and all(part is not None for part in found) else None
    kind: Any = origin or annotation
    if not isinstance(kind, type):
        return None
    if not _may_be_stored(kind):
        return annotation
    if kind in BUILT_IN or inspect.isabstract(kind):
        return next((part for member in members if (part := find_unstorable(member)) is not None), None)
    return None


def _may_be_stored(kind: Any) -> bool:
    """Return True if a value of this class or of a subclass can be stored."""
    if kind in BUILT_IN or kind is Any or is_typed_dict(kind):
        return True
    if issubclass(kind, (*_USED_UP, BaseException)):
        return False
    if is_entity(kind):
        return False
    if issubclass(kind, _BASES):
        return False  # a subclass, such as a named tuple, would come back as its base
    if holds_fields(kind) or inspect.isabstract(kind) or getattr(kind, "_is_protocol", False):
        return True
    return any(_may_be_stored(subclass) for subclass in type.__subclasses__(kind))


def describe_unstored(error: Exception) -> str:
    """Return why a result was not stored.

    The text names the place and the type, never a value, because every later caller sees it.
    """
    kind = type(error).__name__
    return f"{kind}: {error.name}: {error.problem}. {error.fix}" if isinstance(error, InvalidArgument) else kind


def refuse_unfinished_inside(result: object) -> None:
    """Check that a result holds no work that has not ended, in containers and in fields of models.

    Call it for what could not be encoded: only then such work can be inside. Each one found is stopped.

    Raises:
        InvalidArgument: the first one found; see `refuse_unfinished`.
    """
    refusals: list[InvalidArgument] = []
    for item in _walk(result):
        try:
            refuse_unfinished(item)
        except InvalidArgument as refusal:
            refusals.append(refusal)
    if refusals:
        raise refusals[0]


def has_other_class(restored: object, value: object) -> bool:
    """Return True if a model or enum in a restored value has another class of the same name as the one in `value`."""
    back = _find_classes(restored)
    missing = _find_classes(value) - back
    return bool(missing) and not {*map(class_name, missing)}.isdisjoint(map(class_name, back))


def _find_classes(value: object) -> set[type]:
    return {type(item) for item in _walk(value) if holds_fields(type(item)) or isinstance(item, Enum)}


def _walk(value: object) -> Iterator[Any]:
    """Yield a value and what is in it: members of containers and attributes of models, each object once."""
    left, seen = [value], dict[int, object]()  # kept, so that no other object gets the same id
    while left:
        item = left.pop()
        if id(item) not in seen:
            seen[id(item)] = item
            yield item
            left += _members(item)


_CONTAINERS: tuple[type[Any], ...] = (list, tuple, set, frozenset, deque, type({"": ""}.values()))


def _members(item: Any) -> list[Any]:
    if isinstance(item, dict):
        return [*item.keys(), *item.values()]
    if isinstance(item, _CONTAINERS):
        return [*item]
    if isinstance(item, types.SimpleNamespace):
        return [*vars(item).values()]
    try:
        model = read_state(item)
    except Exception:  # noqa: BLE001 - code of the user, and the result is not stored anyhow
        return []
    return [] if model is None else [*model.fields.values(), *model.hidden.values()]
