"""Conversion of values to a form that msgpack restores exactly, and back.

Plain msgpack changes some types: tuples become lists, enums numbers, bytearrays bytes. Here such a type has an ext id,
or it is rejected with its path, such as `payload['lines'][3]`.

Packed bytes are checked before they are unpacked. `looks_plain` is fast (two C calls) and may return False for a plain
value. `measure` reads every header and is exact. They are needed because a few bytes can request gigabytes: the
unpacker allocates the length that each nested array header claims before it finds the values missing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from types import NoneType
from typing import Any, cast
from uuid import UUID

from msgpack import ExtType, Packer, unpackb

from idemgate.core.codec.state import StoredEnum, StoredModel, class_name, is_found_by_name, read_state
from idemgate.errors import InvalidArgument

__all__ = [
    "Ext",
    "Unpack",
    "ValueEncoder",
    "decimal_text",
    "from_ext",
    "looks_plain",
    "may_hold_model",
    "measure",
    "nests_at_most",
    "pack",
    "unpack",
    "unpack_stored",
]

_PACKER: Callable[..., Packer] = Packer  # the stubs do not know buf_size
_AS_IS = frozenset({str, bool, NoneType, bytes})
_FREEZEGUN = "freezegun.api"
"""The module of FakeDatetime and FakeDate, which stand for `datetime` and `date` while a test freezes the time."""
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


class Ext:
    """The msgpack ext ids of this library. They are stored in Redis, so a number must never get another meaning."""

    DATETIME, DATE, TIMEDELTA, DECIMAL, UUID, BIG_INT, TUPLE, SET, FROZENSET, MODEL, ENUM = range(1, 12)


class Place:
    """A container in the payload: its path, for error messages, and the rules for its members."""

    __slots__ = ("depth", "hashed", "modelled", "parent", "step")

    def __init__(self, parent: Place | None, step: object, depth: int, hashed: bool, modelled: bool) -> None:
        self.parent: Place | None = parent
        self.step: object = step
        self.depth: int = depth
        self.hashed: bool = hashed  # in a dict key or a set: the decoded value must be hashable
        self.modelled: bool = modelled  # in a model: its class restores types that the value alone does not

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

    `ordered` sorts maps by key, so equal values give equal bytes. `identity` leaves out which fields of a model were
    set, in which equal models may differ. `unique` refuses a class whose name another class may have.
    """

    __slots__ = ("identity", "max_depth", "name", "ordered", "unique")

    def __init__(
        self, name: str, max_depth: int, *, ordered: bool = False, identity: bool = False, unique: bool = False
    ) -> None:
        self.name: str = name
        self.max_depth: int = max_depth
        self.ordered: bool = ordered
        self.identity: bool = identity
        self.unique: bool = unique

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
        return value if -(2**63) <= value < 2**64 else ExtType(Ext.BIG_INT, _int_bytes(value))

    def write_float(self, value: float, _outer: Place, _step: object) -> object:
        return _NAN if self.ordered and value != value else value  # noqa: PLR0124 - NaN does

    def write_decimal(self, value: Decimal, _outer: Place, _step: object) -> ExtType:
        text = decimal_text(value) if self.ordered else str(value)
        return ExtType(Ext.DECIMAL, text.upper().encode())  # the context may write 1e5

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
        return ExtType(Ext.TUPLE, pack([self.plain(item, place, at) for at, item in enumerate(value)]))

    def write_set(self, value: set[object] | frozenset[object], outer: Place, step: object) -> ExtType:
        place = self._enter(value, outer.inside(step, levels=2)).hashing()
        items = [self.plain(item, place, at) for at, item in enumerate(value)]
        if len(set(items)) != len(value) or (place.modelled and not _stay_apart(value)):
            raise InvalidArgument(place.path(), value, "has members that become one", "Use members of one plain type")
        return ExtType(Ext.SET if isinstance(value, set) else Ext.FROZENSET, pack(sorted(items, key=pack)))

    def write_datetime(self, value: datetime, outer: Place, step: object) -> ExtType:
        offset = value.utcoffset()
        if offset is not None and offset.microseconds:  # datetime.fromisoformat takes +00:00:00.000001 for UTC
            fix = "Pass value.astimezone(UTC)"
            raise InvalidArgument(outer.inside(step).path(), value, "has a zone with fractions of a second", fix)
        if offset is None:
            fix = "Give it a zone: value.replace(tzinfo=UTC), or value.astimezone() if local time is meant"
            raise InvalidArgument(outer.inside(step).path(), value, "is a naive datetime", fix)
        return ExtType(Ext.DATETIME, value.isoformat().encode())

    def _other(self, value: object, outer: Place, step: object) -> object:
        if isinstance(value, Enum) and outer.modelled:
            self._check_class(value, outer.inside(step))
            return self._write_enum(StoredEnum(class_name(type(value)), value.value), outer, step)
        if type(value) is StoredEnum:
            return self._write_enum(value, outer, step)
        place = outer.inside(step, levels=2, modelled=True)
        model = value if type(value) is StoredModel else _read(value, place)
        if model is None and type(value).__module__ == _FREEZEGUN and isinstance(value, date):
            # Not by the names of this module: freezegun replaces them, too.
            kind = next(kind for kind in type(value).__mro__ if kind in _WRITERS)
            return _WRITERS[kind](self, value, outer, step)
        if model is None:
            fix = next((fix for kind, fix in _FIXES if isinstance(value, kind)), _FIX)
            problem = f"is a {type(value).__qualname__}, which would come back as something else"
            raise InvalidArgument(place.path(), value, problem, fix)
        if place.hashed:
            fix = "Use a tuple, or one of its fields, as the key or member"
            raise InvalidArgument(place.path(), value, "a model comes back as a dict, which cannot be hashed", fix)
        if model is not value:
            self._check_class(value, place)
        self._enter(value, place)
        return self._write_model(model, place)

    def _write_model(self, model: StoredModel, place: Place) -> ExtType:
        pairs: dict[Any, object] = {name: self.plain(item, place, name) for name, item in model.fields.items()}
        body: dict[Any, object] = {_NAME: model.name, **(_sorted(pairs) if self.ordered else pairs)}
        if model.hidden:
            hidden = {name: self.plain(item, place, name) for name, item in model.hidden.items()}
            body[_HIDDEN] = _sorted(hidden) if self.ordered else hidden
        if model.unset and not self.identity:
            body[_UNSET] = model.unset
        return ExtType(Ext.MODEL, pack(body))

    def _write_enum(self, member: StoredEnum, outer: Place, step: object) -> ExtType:
        place = self._enter(member.value, outer.inside(step, levels=2))
        return ExtType(Ext.ENUM, pack([member.name, self.plain(member.value, place, "value")]))

    def _check_class(self, value: object, place: Place) -> None:
        if self.unique and not is_found_by_name(type(value)):
            problem = f"is a {class_name(type(value))}, a name that another class may have, so it identifies nothing"
            fix = "Define the class at the top of its module, or pass its fields as a dict"
            raise InvalidArgument(place.path(), type(value), problem, fix)

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
    date: lambda _encoder, value, _outer, _step: ExtType(Ext.DATE, value.isoformat().encode()),
    timedelta: lambda _encoder, value, _outer, _step: ExtType(Ext.TIMEDELTA, _int_bytes(value // _MICROSECOND)),
    Decimal: ValueEncoder.write_decimal,
    UUID: lambda _encoder, value, _outer, _step: ExtType(Ext.UUID, value.bytes),
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
    if code == Ext.MODEL:
        return _read_model(data, unpack).fields
    if code == Ext.ENUM:
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
    Ext.DATETIME: _read_datetime,
    Ext.DATE: lambda data, _: date.fromisoformat(data.decode("ascii")),
    Ext.TIMEDELTA: lambda data, _: timedelta(microseconds=_read_int(data)),
    Ext.DECIMAL: lambda data, _: Decimal(data.decode("ascii")),
    Ext.UUID: lambda data, _: UUID(bytes=data),
    Ext.BIG_INT: lambda data, _: _read_int(data),
    Ext.TUPLE: lambda data, unpack: tuple(_read_list(data, unpack)),
    Ext.SET: lambda data, unpack: set(_read_list(data, unpack)),
    Ext.FROZENSET: lambda data, unpack: frozenset(_read_list(data, unpack)),
}
_STORED_READERS: dict[int, Callable[[bytes, Unpack], object]] = {Ext.MODEL: _read_model, Ext.ENUM: _read_enum}


def decimal_text(value: Decimal) -> str:
    """Return one text for all Decimals that are equal: without zeros at its end, and without an exponent if short."""
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):  # NaN or infinity
        return str(value)
    text = "".join(map(str, digits)).rstrip("0")
    if not text:
        return "0"  # also -0, which is equal
    exponent += len(digits) - len(text)
    if abs(exponent) <= _LONGEST_EXPONENT:
        return format(Decimal((sign, tuple(map(int, text)), exponent)), "f")
    return f"{'-' if sign else ''}{text}E{exponent:+d}"


_LONGEST_EXPONENT = 64
"""A key must not grow with the exponent: Decimal("1E+999999") has a million digits."""


# -- checks of packed bytes -------------------------------------------------------------------------------------------

_SCALAR_EXTS = frozenset({Ext.DATETIME, Ext.DATE, Ext.TIMEDELTA, Ext.DECIMAL, Ext.UUID, Ext.BIG_INT})
_BOX_EXTS = frozenset({Ext.TUPLE, Ext.SET, Ext.FROZENSET, Ext.MODEL, Ext.ENUM})
"""The body of each is one packed container."""


# Sizes by the first byte. _FIXED: the bytes of the whole value. _LONG: the bytes of the length field before the data.
_FIXED = bytes(
    [1] * 128 + [0] * 32 + list(range(1, 33)) + [1, 0, 1, 1] + [0] * 6
    + [5, 9, 2, 3, 5, 9, 2, 3, 5, 9] + [0] * 5 + [0] * 7 + [1] * 32
)  # fmt: skip
_TEXT = {0xD9: 1, 0xDA: 2, 0xDB: 4}
_BIN = {0xC4: 1, 0xC5: 2, 0xC6: 4}
_LONG = _TEXT | _BIN
_ARRAYS = {0xDC: 2, 0xDD: 4}
_MAPS = {0xDE: 2, 0xDF: 4}
_FIXED_EXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_LONG_EXT = {0xC7: 1, 0xC8: 2, 0xC9: 4}

_CONTAINERS = frozenset(range(0x80, 0xA0)) | _ARRAYS.keys() | _MAPS.keys()
_SPECIAL = frozenset(_BIN) | _FIXED_EXT.keys() | _LONG_EXT.keys()
_SINGLE = bytes(sorted(set(range(256)) - _CONTAINERS))
_HARMLESS = bytes(sorted(set(range(256)) - _CONTAINERS - _SPECIAL))

_SHORT_TEXT = b"|".join(  # in groups of four: the lookahead skips seven of eight alternatives
    rb"(?=[\x%02x-\x%02x])(?:" % (first, first + 3)
    + b"|".join(rb"\x%02x.{%d}" % (lead, lead - 0xA0) for lead in range(first, first + 4))
    + b")"
    for first in range(0xA0, 0xC0, 4)
)
_RUN = re.compile(  # plain values and small containers, up to a value with a length field
    rb"(?s:[\x00-\xa0\xc0\xc2\xc3\xe0-\xff]++|[\xcb\xcf\xd3].{8}|[\xca\xce\xd2].{4}|[\xcd\xd1]..|[\xcc\xd0].|"
    + _SHORT_TEXT
    + rb")*+"
)


_MODEL = re.compile(rb"(?s:\x0a(?:[\x81-\x8f]|\xde..|\xdf....)\x00)")
"""The id of a model, a map, and its first key `_NAME`."""


def looks_plain(body: bytes, max_depth: int) -> bool:
    """Return True if the body has no binary or ext value and nests at most `max_depth` levels.

    False means that neither is certain.
    """
    suspects = body.translate(None, _HARMLESS)
    return len(suspects) <= max_depth and (_SPECIAL.isdisjoint(suspects) or _reads_plain(body))


def nests_at_most(body: bytes, max_depth: int) -> bool:
    """Return True if at most `max_depth` bytes can start a container, so it cannot nest deeper.

    False means that it might.
    """
    return len(body.translate(None, _SINGLE)) <= max_depth


def may_hold_model(packed: bytes) -> bool:
    """Return False if no model is in the packed bytes. True means that it is not certain."""
    return b"\x0a" in packed and _MODEL.search(packed) is not None


def _reads_plain(body: bytes) -> bool:
    """Return True if no header is binary or ext.

    Reads each header in turn, since bytes inside floats and texts often look like a binary header.
    """
    pos = 0
    while (pos := _run_end(body, pos)) < len(body):
        lead = body[pos]
        if lead in _TEXT:
            pos, length = _number(body, pos + 1, _TEXT[lead])
            pos += length
        elif lead in _CONTAINERS:
            pos += 1 + (_ARRAYS | _MAPS)[lead]
        else:
            return False
    return pos == len(body)


def _run_end(body: bytes, pos: int) -> int:
    found = _RUN.match(body, pos)
    return found.end() if found is not None and pos <= len(body) else pos


def measure(body: bytes, max_depth: int, max_items: int) -> bool:
    """Check one packed value without creating objects.

    Args:
        body: the packed value.
        max_depth: the maximum number of levels. A tuple, set or model has two: the ext and what is in it.
        max_items: the maximum number of values, where keys, values and containers each count.

    Returns:
        True if no binary or ext value is in it.

    Raises:
        ValueError: the bytes are malformed, truncated or followed by others, have an unknown ext id or exceed a limit.
    """
    outer: list[tuple[int, int]] = []  # of each enclosing container: values left, and its end (0 if not fixed)
    left, end, pos, items, plain = 1, len(body), 0, 1, True
    try:
        while True:
            while left:
                left -= 1
                lead = body[pos]
                if _FIXED[lead]:
                    pos += _FIXED[lead]
                    continue
                plain = plain and lead not in _SPECIAL
                pos, inside, inner_end = _header(body, pos + 1, lead)
                if inside or inner_end:
                    items += inside
                    _check_limits(len(outer) + 1, max_depth, items, max_items)
                    outer.append((left, end))
                    left, end = inside, inner_end
            if end and pos != end:
                raise ValueError("it is cut short" if pos > len(body) else "more bytes follow a value")
            if not outer:
                return plain
            left, end = outer.pop()
    except IndexError:
        raise ValueError("it is cut short") from None


def _check_limits(depth: int, max_depth: int, items: int, max_items: int) -> None:
    if depth > max_depth:
        raise ValueError(f"it nests deeper than {max_depth} levels")
    if items > max_items:
        raise ValueError(f"it holds more than {max_items:,} values")


def _header(body: bytes, pos: int, lead: int) -> tuple[int, int, int]:
    """Return (next position, number of values inside, their end or 0) of a value of variable size."""
    if lead < 0x90:
        return pos, 2 * (lead & 0x0F), 0
    if lead < 0xA0:
        return pos, lead & 0x0F, 0
    if lead in _LONG:
        pos, length = _number(body, pos, _LONG[lead])
        return pos + length, 0, 0
    if lead in _ARRAYS:
        return *_number(body, pos, _ARRAYS[lead]), 0
    if lead in _MAPS:
        pos, length = _number(body, pos, _MAPS[lead])
        return pos, 2 * length, 0
    if lead == 0xC1:
        raise ValueError("byte 0xc1 is never written")
    length = _FIXED_EXT.get(lead, 0)
    if not length:
        pos, length = _number(body, pos, _LONG_EXT[lead])
    return _read_ext(body, pos, length)


def _read_ext(body: bytes, pos: int, length: int) -> tuple[int, int, int]:
    code = int.from_bytes(body[pos : pos + 1], signed=True)
    end = pos + 1 + length
    if code in _BOX_EXTS and end <= len(body):
        return pos + 1, 1, end
    if code in _SCALAR_EXTS or end > len(body):
        return end, 0, 0
    raise ValueError(f"ext id {code} is unknown")


def _number(body: bytes, pos: int, width: int) -> tuple[int, int]:
    return pos + width, int.from_bytes(body[pos : pos + width])
