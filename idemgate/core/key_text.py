"""Conversion of values to the text of an idempotency key."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any
from uuid import UUID

from idemgate.errors import InvalidArgument, MissingKey

__all__ = ["check_encodes", "decimal_text", "one_line", "printable", "text_of"]

_NO_NAME = "A missing key would make all such messages one; refuse the message, or name the work by something it has"
_KINDS = "Use a str, int, bytes, UUID, Decimal, Enum, date or aware datetime"


def text_of(value: object, name: str) -> str:
    """Return `value` as key text. Two values of one type have the same text if they are equal, and only then.

    Types are ignored: 7 and "7" are one key, since JSON and form data write the same number in two ways. bytes are
    decoded as UTF-8. An Enum counts by its value, an aware datetime by its time in UTC. A Decimal counts by its value:
    1, 1.0 and 1.00 are the key "1", and 1.50 is "1.5". Text counts as it is written: "1.50" is another key.

    Args:
        value: the value.
        name: the parameter to name in the error.

    Raises:
        MissingKey: the value is None or empty.
        InvalidArgument: the value is a bool, a float, a container or a naive datetime.
    """
    kind = type(value)
    if kind is str and value:
        return value  # type: ignore[return-value] # `kind is str` implies it, at half the cost of isinstance
    if kind is int:
        return _int_text(value, name)
    return _other_text(value, name)


def printable(text: str) -> str:
    """Return text with each character that a terminal would act on as an escape, such as \\x1b. Line ends stay.

    Names in a store may come from anyone. Control characters, and those that change the direction of text, could hide
    or forge what a command prints.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text
    )


def one_line(value: object) -> str:
    """Return the text of a value for one line of a log or a terminal: `printable`, and line ends are escaped, too.

    What a stranger chose, such as a path, a key in an error or the text of a handler's exception, could otherwise add
    lines that look like others.
    """
    try:
        text = str(value)
    except Exception:  # noqa: BLE001 - an exception of the user may have a broken `__str__`
        text = f"<{type(value).__name__}>"
    return text if text.isprintable() else printable(text).replace("\n", "\\n")


def check_encodes(key: str, name: str) -> str:
    """Return the key. Raises InvalidArgument if it cannot be encoded as UTF-8."""
    if not key.isascii():
        try:
            key.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(name, key, "holds half a surrogate pair", "Pass bytes, or repair the text") from None
    return key


def _int_text(value: Any, name: str) -> str:
    try:
        return int.__repr__(value)
    except ValueError:  # Python limits the conversion of an int to 4,300 digits
        raise InvalidArgument(
            name, f"int of {value.bit_length()} bits", "is too long for a key", "Use a hash of it"
        ) from None


def _other_text(value: object, name: str) -> str:
    if isinstance(value, Enum):
        return text_of(value.value, name)
    if value is None or (isinstance(value, (str, bytes)) and not value):
        raise MissingKey(name, value, "makes an empty key", _NO_NAME)
    if isinstance(value, bool):
        raise InvalidArgument(name, value, "is a bool, and two keys cannot tell messages apart", _KINDS)
    for kind, write in _WRITERS:
        if isinstance(value, kind):
            return write(value, name)
    raise InvalidArgument(name, value, f"is a {type(value).__qualname__}, which does not name anything", _fix(value))


def _fix(value: object) -> str:
    if isinstance(value, float):
        return "Floats differ by rounding: use an int, a Decimal or the text the number came from"
    if isinstance(value, (dict, list, tuple, set, frozenset)):
        return "Name one member of it, as in {event[id]}, or use a callable"
    return "Name an attribute of it, as in {order.id}. " + _KINDS


def _bytes_text(value: bytes, name: str) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise InvalidArgument(name, value, "is not UTF-8", "Use a callable that returns value.hex()") from None


def _decimal_text(value: Decimal, name: str) -> str:
    if not value.is_finite():
        raise InvalidArgument(name, value, "is not a finite number", _KINDS)
    return decimal_text(value)


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


def _datetime_text(value: datetime, name: str) -> str:
    if value.utcoffset() is None:
        raise InvalidArgument(name, value, "is a naive datetime", "Give it a zone: value.replace(tzinfo=UTC)")
    try:
        return value.astimezone(UTC).isoformat()
    except OverflowError:
        raise InvalidArgument(
            name, value, "has no such moment in UTC", "Pass a time well inside years 1 to 9999"
        ) from None


_WRITERS: list[tuple[type, Callable[[Any, str], str]]] = [
    (str, lambda value, _name: str.__str__(value)),
    (int, _int_text),
    (bytes, _bytes_text),
    (UUID, lambda value, _name: str(value)),
    (Decimal, _decimal_text),
    (datetime, _datetime_text),
    (date, lambda value, _name: value.isoformat()),
]
