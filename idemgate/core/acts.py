"""The stored form of an act: a change that an operator asked for."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NamedTuple

from idemgate.core.codec.decoding import unpack, wrap_decode_errors
from idemgate.core.codec.packing import pack
from idemgate.core.text import cut

__all__ = ["KEPT_ACTS", "Act", "decode_act", "pack_act"]

KEPT_ACTS = 1000
"""The number of acts that a namespace keeps."""
_LONGEST = 500
"""The most characters of each text of an act. Keys may be longer."""
_HEAD = 24
"""The bytes before the packed texts: the time in ms, and the id of the act (`operate/scripts/record.lua`)."""


class Act(NamedTuple):
    """A change: when, who asked for it, the command, and the reason."""

    at: datetime
    who: str
    what: str
    why: str


def pack_act(who: str, what: str, why: str) -> bytes:
    """Return the part of an act that the client packs. Long texts are cut."""
    return pack([cut(text, _LONGEST) for text in (who, what, why)])


def decode_act(entry: bytes) -> Act:
    """Decode an entry of the list of acts. Raises DecodeError."""
    with wrap_decode_errors("an act"):
        who, what, why = map(str.__str__, unpack(entry[_HEAD:], "an act", raw=False))
        return Act(datetime.fromtimestamp(int.from_bytes(entry[:8]) / 1000, UTC), who, what, why)
