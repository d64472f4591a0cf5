"""Conversion of values to a form that msgpack restores exactly, and back.

Plain msgpack changes some types: tuples become lists, enums numbers, bytearrays bytes. Here such a type has an ext id,
or it is rejected with its path, such as `payload['lines'][3]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from types import NoneType
from typing import Any, cast
from uuid import UUID

from msgpack import ExtType, Packer, unpackb

import idemgate.core.codec.limits as wire
from idemgate.core.codec.state import StoredEnum, StoredModel, class_name, read_state
from idemgate.core.key_text import decimal_text
from idemgate.errors import InvalidArgument

__all__ = ["Unpack", "ValueEncoder", "from_ext", "pack", "unpack", "unpack_stored"]

_PACKER: Callable[..., Packer] = Packer  # the stubs do not know buf_size
_AS_IS = frozenset({str, bool, NoneType, bytes})
_NAN = float("nan")
_MICROSECOND = timedelta(microseconds=1)
_NAME, _HIDDEN, _UNSET = range(3)
"""The keys of a packed model beside the names of its fields. They are stored, so they must not change."""
Unpack = Callable[[bytes], Any]
_FIXES: list[tuple[type | tuple[type, ...], str]] = [
    ((bytearray, memoryview), "Pass bytes(value)"),
    (Enum, "Pass its .value, or put it in a dataclass, which brings it back"),
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
        self.modelled = modelled  # in a model: its class restores types that the value alone does not

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
    """One pass over a value.

    `ordered` sorts maps by key, so equal values give equal bytes. `identity` leaves out of a model what is no field.
    """

    __slots__ = ("identity", "max_depth", "name", "ordered")

    def __init__(self, name: str, max_depth: int, *, ordered: bool = False, identity: bool = False) -> None:
        self.name = name
        self.max_depth = max_depth
        self.ordered = ordered
        self.identity = identity

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
        if len(pairs) != len(value) or (place.modelled and not _stay_apart(value)):
            raise InvalidArgument(place.path(), value, "has keys that become one key", "Use keys of one plain type")
        return _sorted(pairs) if self.ordered else pairs

    def write_tuple(self, value: tuple[object, ...], outer: Place, step: object) -> ExtType:
        place = self._enter(value, outer.inside(step, levels=2))
        return ExtType(wire.TUPLE, pack([self.plain(item, place, at) for at, item in enumerate(value)]))

    def write_set(self, value: set[object] | frozenset[object], outer: Place, step: object) -> ExtType:
        place = self._enter(value, outer.inside(step, levels=2)).hashing()
        items = [self.plain(item, place, at) for at, item in enumerate(value)]
        if len(set(items)) != len(value) or (place.modelled and not _stay_apart(value)):
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
            return self._write_enum(StoredEnum(class_name(type(value)), value.value), outer, step)
        if type(value) is StoredEnum:
            return self._write_enum(value, outer, step)
        place = outer.inside(step, levels=2, modelled=True)
        model = value if type(value) is StoredModel else _read(value, place)
        if model is None:
            fix = next((fix for kind, fix in _FIXES if isinstance(value, kind)), _FIX)
            problem = f"is a {type(value).__qualname__}, which would come back as something else"
            raise InvalidArgument(place.path(), value, problem, fix)
        if place.hashed:
            fix = "Use a tuple, or one of its fields, as the key or member"
            raise InvalidArgument(place.path(), value, "a model comes back as a dict, which cannot be hashed", fix)
        self._enter(value, place)
        return self._write_model(model, place)

    def _write_model(self, model: StoredModel, place: Place) -> ExtType:
        pairs: dict[Any, object] = {name: self.plain(item, place, name) for name, item in model.fields.items()}
        body: dict[Any, object] = {_NAME: model.name, **(_sorted(pairs) if self.ordered else pairs)}
        if model.hidden and not self.identity:
            hidden = {name: self.plain(item, place, name) for name, item in model.hidden.items()}
            body[_HIDDEN] = _sorted(hidden) if self.ordered else hidden
        if model.unset and not self.identity:
            body[_UNSET] = model.unset
        return ExtType(wire.MODEL, pack(body))

    def _write_enum(self, member: StoredEnum, outer: Place, step: object) -> ExtType:
        place = self._enter(member.value, outer.inside(step, levels=2))
        return ExtType(wire.ENUM, pack([member.name, self.plain(member.value, place, "value")]))

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
    """Return the value in `body`, which `measure` or `looks_plain` has accepted. A model is the dict of its fields."""
    return unpackb(body, strict_map_key=False, ext_hook=from_ext)


def unpack_stored(body: bytes) -> Any:
    """Return the value in `body`, as `unpack`. A model is a StoredModel and a member of an enum a StoredEnum."""
    return unpackb(body, strict_map_key=False, ext_hook=_from_ext_stored)


def from_ext(code: int, data: bytes) -> object:
    """Return the value of an ext type; a model is the dict of its fields. Raises ValueError for an unknown id."""
    read = _READERS.get(code)
    if read is not None:
        return read(data, unpack)
    if code == wire.MODEL:
        return _read_model(data, unpack).fields
    if code == wire.ENUM:
        return _read_enum(data, unpack).value
    raise ValueError(f"ext id {code} is unknown")


def _from_ext_stored(code: int, data: bytes) -> object:
    read = _READERS.get(code) or _STORED_READERS.get(code)
    if read is None:
        raise ValueError(f"ext id {code} is unknown")
    return read(data, unpack_stored)


def _read(value: object, place: Place) -> StoredModel | None:
    """Return the state of a model, or None for any other value."""
    try:
        return read_state(value)
    except Exception as error:
        raise InvalidArgument(
            place.path(), type(value), f"its fields cannot be read ({type(error).__name__})", "Pass a dict"
        ) from error


def _stay_apart(hashed: Iterable[object]) -> bool:
    """Return True if these keys or members stay different where members of enums are their values."""
    bare: list[object] = [each.value if isinstance(each, Enum) else each for each in hashed]
    try:
        return len(set(bare)) == len(bare)
    except TypeError:  # the value of an enum is a list, which is no key
        return False


def _sorted(pairs: dict[Any, object]) -> dict[Any, object]:
    texts = all(type(key) is str for key in pairs)
    return {key: pairs[key] for key in sorted(pairs, key=None if texts else pack)}


def _int_bytes(value: int) -> bytes:
    return value.to_bytes(value.bit_length() // 8 + 1, signed=True)


def _read_int(data: bytes) -> int:
    return int.from_bytes(data, signed=True)


def _read_datetime(data: bytes, _unpack: Unpack) -> datetime:
    value = datetime.fromisoformat(data.decode("ascii"))
    if value.tzinfo is None:
        raise ValueError("a datetime without a zone is never written")
    return value


def _read_list(data: bytes, unpack: Unpack) -> list[object]:
    value: object = unpack(data)
    if type(value) is not list:
        raise ValueError("a tuple, set or enum without a list in it is never written")
    return cast(list[object], value)


def _read_model(data: bytes, unpack: Unpack) -> StoredModel:
    pairs: dict[Any, Any] = _check(unpack(data), dict)
    name: str = _check(pairs.pop(_NAME, None), str)
    hidden: dict[str, Any] = _check(pairs.pop(_HIDDEN, {}), dict)
    unset: list[str] = _check(pairs.pop(_UNSET, []), list)
    for each in (*pairs, *hidden, *unset):
        _check(each, str)
    return StoredModel(name, pairs, hidden, unset)


def _check(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a model with a {type(value).__name__} in place of a {kind.__name__} is never written")
    return value


def _read_enum(data: bytes, unpack: Unpack) -> StoredEnum:
    name, value = _read_list(data, unpack)
    if type(name) is not str:
        raise ValueError("an enum without a name is never written")
    return StoredEnum(name, value)


_READERS: dict[int, Callable[[bytes, Unpack], object]] = {
    wire.DATETIME: _read_datetime,
    wire.DATE: lambda data, _: date.fromisoformat(data.decode("ascii")),
    wire.TIMEDELTA: lambda data, _: timedelta(microseconds=_read_int(data)),
    wire.DECIMAL: lambda data, _: Decimal(data.decode("ascii")),
    wire.UUID: lambda data, _: UUID(bytes=data),
    wire.BIG_INT: lambda data, _: _read_int(data),
    wire.TUPLE: lambda data, unpack: tuple(_read_list(data, unpack)),
    wire.SET: lambda data, unpack: set(_read_list(data, unpack)),
    wire.FROZENSET: lambda data, unpack: frozenset(_read_list(data, unpack)),
}
_STORED_READERS: dict[int, Callable[[bytes, Unpack], object]] = {wire.MODEL: _read_model, wire.ENUM: _read_enum}
