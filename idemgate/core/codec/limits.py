"""Checks of packed bytes before they are unpacked, and the msgpack ext ids of this library.

`looks_plain` is fast (two C calls) and may return False for a plain value. `measure` reads every header and is exact.
They are needed because a few bytes can request gigabytes: the unpacker allocates the length that each nested array
header claims before it finds the values missing.
"""

from __future__ import annotations

import re

__all__ = [
    "BIG_INT",
    "DATE",
    "DATETIME",
    "DECIMAL",
    "ENUM",
    "FROZENSET",
    "MODEL",
    "SET",
    "TIMEDELTA",
    "TUPLE",
    "UUID",
    "looks_plain",
    "measure",
    "nests_at_most",
]

# These numbers are stored in Redis, so a number must never get another meaning.
DATETIME, DATE, TIMEDELTA, DECIMAL, UUID, BIG_INT, TUPLE, SET, FROZENSET, MODEL, ENUM = range(1, 12)

_SCALARS = frozenset({DATETIME, DATE, TIMEDELTA, DECIMAL, UUID, BIG_INT})
_BOXES = frozenset({TUPLE, SET, FROZENSET, MODEL, ENUM})  # the body of each is one packed container

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
    return _ext(body, pos, length)


def _ext(body: bytes, pos: int, length: int) -> tuple[int, int, int]:
    code = int.from_bytes(body[pos : pos + 1], signed=True)
    end = pos + 1 + length
    if code in _BOXES and end <= len(body):
        return pos + 1, 1, end
    if code in _SCALARS or end > len(body):
        return end, 0, 0
    raise ValueError(f"ext id {code} is unknown")


def _number(body: bytes, pos: int, width: int) -> tuple[int, int]:
    return pos + width, int.from_bytes(body[pos : pos + width])
