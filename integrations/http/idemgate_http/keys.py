"""The value of the header Idempotency-Key, and the name of its record."""

from __future__ import annotations

import re
from hashlib import blake2b
from uuid import UUID

from idemgate import InvalidArgument

__all__ = ["MOST_CHARACTERS", "Identity", "parse_key", "record_key", "tag_caller"]

Identity = str | int | UUID
"""Who sends a request. 7 and "7" are two callers: the id of a user and a name that a client has chosen, for example."""

MOST_CHARACTERS = 255
_CHARACTER = r'(?:[ !#-\[\]-~]|\\["\\])'
_PARAMETER = rf'; *[a-z*][a-z0-9_.*-]*(?:=(?:"{_CHARACTER}*"|[!#-+\--:<-~]+))?'
_QUOTED = re.compile(rf'"({_CHARACTER}*)"(?:{_PARAMETER})*')
"""A String of RFC 8941: printable ASCII in double quotes, in which a quote and a backslash are escaped.

Parameters may follow. The draft defines none, so they are ignored.
"""
_BARE = re.compile(r"[!#-+\--:<-\[\]-~]*")
"""Printable ASCII without space, quote, backslash, comma and semicolon. Most clients send a UUID without quotes."""
_ESCAPE = re.compile(r'\\(["\\])')


def parse_key(field: str) -> str | None:
    """Return the key in a header field, or None if it is malformed. Quoted and bare spellings are one key."""
    field = field.strip(" \t")
    if found := _QUOTED.fullmatch(field):
        key = _ESCAPE.sub(r"\1", found[1])
    elif _BARE.fullmatch(field):
        key = field
    else:
        return None
    return key if 0 < len(key) <= MOST_CHARACTERS else None


def tag_caller(caller: Identity) -> str:
    """Return a caller as text after its length and type. Different callers never make the same text.

    A subclass may write all its values as one text ("Token(***)"), so its own `__str__` is not called.

    Raises:
        InvalidArgument: an int has more digits than Python writes.
    """
    if isinstance(caller, str):
        kind, text = "", str.__str__(caller)
    elif isinstance(caller, int):
        try:
            kind, text = "i", int.__repr__(caller)
        except ValueError:
            size = f"an int of {caller.bit_length()} bits"
            raise InvalidArgument("caller", size, "too long for a caller", "Return a hash of it") from None
    else:
        kind, text = "u", UUID.__str__(caller)
    return f"{kind}{len(text.encode('utf-8', 'surrogatepass'))}:{text}"


def record_key(caller: Identity, method: str, path: str, key: str) -> str:
    """Return the key of the guard for a request, for `gate.inspect` and `gate.forget`.

    It is a digest, so that neither Redis nor a log shows the caller or the key. Each part is preceded by its length,
    so different parts never make the same text.

    Args:
        caller: what `caller=` returns, of the same type; "" with `single_tenant`. For a webhook
            "<length>:<caller>:<provider>:<source of the event>", for example "0::github:github:repository:42:7".
        method: in upper case.
        path: the whole decoded path.
        key: the value of the header without quotes, or the id of the event.
    """
    parts = [part.encode("utf-8", "surrogatepass") for part in (method, path, key)]
    named = tag_caller(caller).encode("utf-8", "surrogatepass")  # half a pair, and no two texts have the same bytes
    return blake2b(named + b"".join(b"%d:%b" % (len(part), part) for part in parts), digest_size=20).hexdigest()
