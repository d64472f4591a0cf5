"""Conversion of values to a form that msgpack restores exactly, and back.

Plain msgpack changes some types: tuples become lists, enums numbers, bytearrays bytes. Here such a type has an ext id,
or it is rejected with its path, such as `payload['lines'][3]`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from types import NoneType
from typing import Any, cast
from uuid import UUID

from msgpack import ExtType, Packer, unpackb

import idemgate.core.codec.limits as wire
from idemgate.core.key_text import decimal_text
from idemgate.errors import InvalidArgument

__all__ = ["ValueEncoder", "from_ext", "pack", "unpack"]

_PACKER: Callable[..., Packer] = Packer  # the stubs do not know buf_size
_AS_IS = frozenset({str, bool, NoneType, bytes})
_NAN = float("nan")
_MICROSECOND = timedelta(microseconds=1)
_FIXES: list[tuple[type | tuple[type, ...], str]] = [
    ((bytearray, memoryview), "Pass bytes(value)"),
    (Enum, "Pass its .value, or put it in a dataclass, whose annotation brings it back"),
    (time, "Pass .isoformat(), or an aware datetime"),
    (datetime, "Pass a plain datetime with a zone"),
    (tuple, "Pass tuple(value), or value._asdict()"),
    (dict, "Pass dict(value)"),
    (list, "Pass list(value)"),
    (str, "Pass str(value)"),
    (int, "Pass int(value)"),
    (float, "Pass float(value)"),
]
_FIX = (
    "Pass None, bool, int, float, str, bytes, list, tuple, dict, set, aware datetime, date, timedelta, "
    "Decimal, UUID, a dataclass or a pydantic model"
)


class Place:
    """A container in the payload: its path, for error messages, and the rules for its members."""

    __slots__ = ("depth", "hashed", "modelled", "parent", "step")

    def __init__(self, parent: Place | None, step: object, depth: int, hashed: bool, modelled: bool) -> None:
        self.parent = parent
        self.step = step
        self.depth = depth
        self.hashed = hashed  # in a dict key or a set: the decoded value must be hashable
        self.modelled = modelled  # in a model: its annotations restore types that the value alone does not

    def inside(self, step: object, *, levels: int = 1, modelled: bool = False) -> Place:
        return Place(self, step, self.depth + levels, self.hashed, self.modelled or modelled)

    def hashing(self) -> Place:
        return Place(self.parent, self.step, self.depth, True, self.modelled)

    def path(self) -> str:
        if self.parent is None:
            return str(self.step)
        around = self.parent.path()
        return around if self.parent.parent is None else f"{around}[{_step(self.step)}]"


def _step(step: object) -> str:
    """Return a path step. Only str and int keys are shown: another key may itself be invalid."""
    return repr(step) if type(step) in (str, int) else f"<{type(step).__qualname__}>"


class ValueEncoder:
    """One pass over a value. `ordered` sorts maps by key, so equal values give equal bytes."""

    __slots__ = ("max_depth", "name", "ordered")

    def __init__(self, name: str, max_depth: int, *, ordered: bool = False) -> None:
        self.name = name
        self.max_depth = max_depth
        self.ordered = ordered

    def encode(self, value: object) -> bytes:
        """Return `value` in msgpack. Raises InvalidArgument that names a member which cannot be restored exactly."""
        try:
            return pack(self.plain(value, Place(None, self.name, 0, False, False), None))
        except UnicodeEncodeError as error:
            fix = "Pass bytes, or repair the text: text.encode(errors='replace').decode()"
            raise InvalidArgument(self.name, error.object, "holds half a surrogate pair", fix) from None

    def plain(self, value: object, outer: Place, step: object) -> object:
        """Return `value`, the member `step` of `outer`, in a form that msgpack restores exactly."""
        kind = type(value)
        if kind in _AS_IS:
            return value
        write = _WRITERS.get(kind)
        return write(self, value, outer, step) if write is not None else self._other(value, outer, step)

    def write_int(self, value: int, _outer: Place, _step: object) -> object:
        return value if -(2**63) <= value < 2**64 else ExtType(wire.BIG_INT, _int_bytes(value))

    def write_float(self, value: float, _outer: Place, _step: object) -> object:
        return _NAN if self.ordered and value != value else value  # noqa: PLR0124 - NaN does

    def write_decimal(self, value: Decimal, _outer: Place, _step: object) -> ExtType:
        text = decimal_text(value) if self.ordered else str(value)
        return ExtType(wire.DECIMAL, text.upper().encode())  # the context may write 1e5

    def write_list(self, value: list[object], outer: Place, step: object) -> list[object]:
        place = self._enter(value, outer.inside(step))
        return [self.plain(item, place, at) for at, item in enumerate(value)]

    def write_dict(self, value: dict[object, object], outer: Place, step: object) -> dict[Any, object]:
        place = self._enter(value, outer.inside(step))
        keys = place.hashing()
        pairs = {self.plain(key, keys, key): self.plain(item, place, key) for key, item in value.items()}
        if len(pairs) != len(value):
            raise InvalidArgument(place.path(), value, "has keys that become one key", "Use keys of one plain type")
        return _sorted(pairs) if self.ordered else pairs

    def write_tuple(self, value: tuple[object, ...], outer: Place, step: object) -> ExtType:
        place = self._enter(value, outer.inside(step, levels=2))
        return ExtType(wire.TUPLE, pack([self.plain(item, place, at) for at, item in enumerate(value)]))

    def write_set(self, value: set[object] | frozenset[object], outer: Place, step: object) -> ExtType:
        place = self._enter(value, outer.inside(step, levels=2)).hashing()
        items = [self.plain(item, place, at) for at, item in enumerate(value)]
        if len(set(items)) != len(value):
            raise InvalidArgument(place.path(), value, "has members that become one", "Use members of one plain type")
        return ExtType(wire.SET if isinstance(value, set) else wire.FROZENSET, pack(sorted(items, key=pack)))

    def write_datetime(self, value: datetime, outer: Place, step: object) -> ExtType:
        offset = value.utcoffset()
        if offset is not None and offset.microseconds:  # datetime.fromisoformat takes +00:00:00.000001 for UTC
            fix = "Pass value.astimezone(UTC)"
            raise InvalidArgument(outer.inside(step).path(), value, "has a zone with fractions of a second", fix)
        if offset is None:
            fix = "Give it a zone: value.replace(tzinfo=UTC), or value.astimezone() if local time is meant"
            raise InvalidArgument(outer.inside(step).path(), value, "is a naive datetime", fix)
        return ExtType(wire.DATETIME, value.isoformat().encode())

    def _other(self, value: object, outer: Place, step: object) -> object:
        if isinstance(value, Enum) and outer.modelled:
            return self.plain(value.value, outer, step)
        place = outer.inside(step, modelled=True)
        members = _members(value, place)
        if members is None:
            fix = next((fix for kind, fix in _FIXES if isinstance(value, kind)), _FIX)
            problem = f"is a {type(value).__qualname__}, which would come back as something else"
            raise InvalidArgument(place.path(), value, problem, fix)
        if place.hashed:
            fix = "Use a tuple, or one of its fields, as the key or member"
            raise InvalidArgument(place.path(), value, "a model comes back as a dict, which cannot be hashed", fix)
        self._enter(value, place)
        pairs: dict[Any, object] = {key: self.plain(item, place, key) for key, item in members.items()}
        return _sorted(pairs) if self.ordered else pairs

    def _enter(self, value: object, place: Place) -> Place:
        if place.depth > self.max_depth:
            fix = "Flatten it, or store it elsewhere and pass a reference; a cycle never ends"
            raise InvalidArgument(self.name, type(value), f"nests deeper than {self.max_depth} levels", fix)
        return place


_WRITERS: dict[type, Callable[[ValueEncoder, Any, Place, object], object]] = {
    int: ValueEncoder.write_int,
    float: ValueEncoder.write_float,
    list: ValueEncoder.write_list,
    dict: ValueEncoder.write_dict,
    tuple: ValueEncoder.write_tuple,
    set: ValueEncoder.write_set,
    frozenset: ValueEncoder.write_set,
    datetime: ValueEncoder.write_datetime,
    date: lambda _encoder, value, _outer, _step: ExtType(wire.DATE, value.isoformat().encode()),
    timedelta: lambda _encoder, value, _outer, _step: ExtType(wire.TIMEDELTA, _int_bytes(value // _MICROSECOND)),
    Decimal: ValueEncoder.write_decimal,
    UUID: lambda _encoder, value, _outer, _step: ExtType(wire.UUID, value.bytes),
}


def pack(tree: object) -> bytes:
    """Return `tree` in msgpack, exact types only. Threads cannot share a packer, so each call creates one."""
    return _PACKER(strict_types=True, buf_size=1024).pack(tree)  # packb allocates 256 KiB


def unpack(body: bytes) -> Any:
    """Return the value in `body`, which `measure` or `looks_plain` has accepted."""
    return unpackb(body, strict_map_key=False, ext_hook=from_ext)


def from_ext(code: int, data: bytes) -> object:
    """Return the value of an ext type. Raises ValueError for an unknown id."""
    read = _READERS.get(code)
    if read is None:
        raise ValueError(f"ext id {code} is unknown")
    return read(data)


def _members(value: object, place: Place) -> dict[str, object] | None:
    """Return the fields of a dataclass or pydantic model.

    None for any other value, and for a model that is also a str, dict or other built-in type.
    """
    if isinstance(value, (type, str, bytes, int, float, list, tuple, dict, set, frozenset)):
        return None
    try:
        if is_dataclass(value):
            return {field.name: getattr(value, field.name) for field in fields(value)}
        dump = getattr(type(value), "model_dump", None)
        return None if dump is None else dump(value, mode="python", round_trip=True)
    except Exception as error:
        raise InvalidArgument(
            place.path(), type(value), f"its fields cannot be read ({type(error).__name__})", "Pass a dict"
        ) from error


def _sorted(pairs: dict[Any, object]) -> dict[Any, object]:
    texts = all(type(key) is str for key in pairs)
    return {key: pairs[key] for key in sorted(pairs, key=None if texts else pack)}


def _int_bytes(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, signed=True)


def _read_int(data: bytes) -> int:
    return int.from_bytes(data, signed=True)


def _read_datetime(data: bytes) -> datetime:
    value = datetime.fromisoformat(data.decode("ascii"))
    if value.tzinfo is None:
        raise ValueError("a datetime without a zone is never written")
    return value


def _read_date(data: bytes) -> date:
    return date.fromisoformat(data.decode("ascii"))


def _read_list(data: bytes) -> list[object]:
    value: object = unpack(data)
    if type(value) is not list:
        raise ValueError("a tuple or set without a list in it is never written")
    return cast(list[object], value)


_READERS: dict[int, Callable[[bytes], object]] = {
    wire.DATETIME: _read_datetime,
    wire.DATE: _read_date,
    wire.TIMEDELTA: lambda data: timedelta(microseconds=_read_int(data)),
    wire.DECIMAL: lambda data: Decimal(data.decode("ascii")),
    wire.UUID: lambda data: UUID(bytes=data),
    wire.BIG_INT: _read_int,
    wire.TUPLE: lambda data: tuple(_read_list(data)),
    wire.SET: lambda data: set(_read_list(data)),
    wire.FROZENSET: lambda data: frozenset(_read_list(data)),
}
