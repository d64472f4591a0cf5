"""Stored values as an operator may read them: as JSON where that is exact."""

from __future__ import annotations

import json
from base64 import b64encode
from datetime import datetime
from typing import Any

from idemgate.core.codec import Codec
from idemgate.errors import DecodeError
from idemgate.topics.dead_letters import DeadLetter

__all__ = ["STORED", "export_payload", "show_value", "to_json"]

STORED = ("payload", "value", "checkpoint")
"""The facts that hold values of users."""


def to_json(value: object) -> object:
    """Return a value that JSON does not know in the form that answers have there: the `default` of `json.dumps`."""
    return value.isoformat() if isinstance(value, datetime) else repr(value)


def show_value(holder: object, name: str) -> Any:
    """Return an attribute for people: itself if JSON can hold it, else its repr, or why it cannot be decoded."""
    try:
        value = getattr(holder, name)
    except DecodeError as error:
        return f"<not decodable: {error.why}>"
    return value if _is_json(value) else repr(value)


def export_payload(letter: DeadLetter, codec: Codec) -> dict[str, Any]:
    """Return the payload for programs: as JSON, else as base64 of msgpack, or why it cannot be decoded."""
    try:
        value = letter.payload
    except DecodeError as error:
        return {"payload_error": error.why}
    if _is_json(value):
        return {"payload": value}
    return {"payload_msgpack": b64encode(codec.encode(value)[1:]).decode()}


def _is_json(value: Any) -> bool:
    """Return True if a value is the same after it was written as JSON and read: no tuple, no number as a key."""
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError, RecursionError):
        return False
