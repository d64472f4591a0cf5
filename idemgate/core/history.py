"""The stored forms of what happened: transitions of messages and guarded keys, and acts of operators."""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import sha1
from typing import Any, NamedTuple

import msgpack

from idemgate.core.calls import PROCESS_BYTES
from idemgate.core.codec.decoding import unpack, wrap_decode_errors
from idemgate.core.codec.packing import pack
from idemgate.core.text import cut
from idemgate.core.validation import check_int
from idemgate.errors import InvalidArgument

__all__ = [
    "HISTORY_LASTS", "KEPT", "KEPT_ACTS", "Act", "Subject", "Transition", "check_history", "decode_act",
    "decode_transition", "pack_act", "pack_transition", "stored_key",
]  # fmt: skip

KEPT = 64
"""The number of transitions that a slot keeps."""
MOST_KEPT = 1000
"""The most transitions that a slot keeps, if its topic asks for more. A call reads all of them."""
HISTORY_LASTS = 30 * 86_400_000
"""Ms after which a history is gone, counted from its last transition. As in `topics/scripts/lib/slot/history.lua`."""
_LONGEST_KEY = 128
_TIME = 6
"""The bytes of the time in ms, before the packed array."""


class Transition(NamedTuple):
    """An event in the life of a message or a guarded key.

    Attributes:
        at: The time, by the server's clock.
        what: "cancelled", "lapsed", ... (`topics/scripts/lib/slot/history.lua`).
        raw_key: The key, or "#" and its SHA-1 if it has more than 128 bytes.
        token: The fencing token of the delivery; None if there was none.
        attempts: The attempts of the message so far; 0 if they are unknown.
        triggers: The number of its triggers; 0 if it is unknown.
        serial: The serial of its newest trigger; 0 if it is unknown. Of a guarded key it tells notes apart.
        by: The operator, or the process: its name, or what the ids of its requests begin with, as hex.
        error: The error of a run that failed, or "".
        event: The digest of the event id of a trigger (`keys.event`), or b"".
    """

    at: datetime
    what: str
    raw_key: bytes
    token: int | None
    attempts: int
    triggers: int
    serial: int
    by: str
    error: str
    event: bytes

    @property
    def key(self) -> str:
        """The key as text. Bytes that are not UTF-8 are escaped."""
        return self.raw_key.decode(errors="backslashreplace")


def check_history(history: int) -> int:
    """Return the number of transitions to keep. Raises InvalidArgument."""
    if not KEPT <= check_int("history", history) <= MOST_KEPT:
        fix = f"Use {KEPT} to {MOST_KEPT}, or None: then only what is unusual is kept"
        raise InvalidArgument("history", history, "not a number of transitions", fix)
    return history


def stored_key(raw_key: bytes, hidden: bool = False) -> bytes:
    """Return the bytes by which a history names a key. A hidden one is named by its SHA-1, as a long one is."""
    if hidden or len(raw_key) > _LONGEST_KEY:
        return b"#" + sha1(raw_key, usedforsecurity=False).hexdigest().encode()
    return raw_key


def pack_transition(what: str, key: bytes, token: int, attempts: int, number: int, by: str, error: str) -> bytes:
    """Pack a transition of a guarded key, without its time. `number` tells it from others with the same facts."""
    packed: bytes = msgpack.packb(
        [what, key, b"%d" % token if token else b"", attempts, 0, number, by, error], use_bin_type=False
    )
    return packed


def decode_transition(entry: bytes) -> Transition:
    """Decode an entry of a history. Raises DecodeError."""
    with wrap_decode_errors("a transition"):
        fields: list[Any] = unpack(entry[_TIME:], "a transition")
        what, key, token, attempts, triggers, serial, by, *more = fields
        error, event = [*more, b"", b""][:2]
        return Transition(
            datetime.fromtimestamp(int.from_bytes(entry[:_TIME]) / 1000, UTC), _text(what), bytes.__bytes__(key),
            int(token) if token else None, int.__int__(attempts), int.__int__(triggers), int.__int__(serial),
            by.hex() if len(by) == PROCESS_BYTES else _text(by).rstrip(), _text(error), bytes.__bytes__(event),
        )  # fmt: skip


def _text(value: bytes) -> str:
    return bytes.decode(value, errors="backslashreplace")


# -- acts -------------------------------------------------------------------------------------------------------------

KEPT_ACTS = 1000
"""The number of acts that a namespace keeps."""
_LONGEST_TEXT = 500
"""The most characters of each text of an act. Keys may be longer."""
_ACT_HEAD = 24
"""The bytes before the packed texts: the time in ms, and the id of the act (`operate/scripts/record.lua`)."""


class Subject(NamedTuple):
    """The subject of an act.

    Attributes:
        topic: The topic, or "".
        scope: The scope of a guarded key, or "".
        key: The key as `stored_key` returns it; b"" if the act is about no single key.
    """

    topic: str = ""
    scope: str = ""
    key: bytes = b""

    def is_about(self, raw_key: bytes, scope: str | None) -> bool:
        """Return True if this is the key: in this scope, or for None in any scope or topic."""
        if self.key not in (stored_key(raw_key), stored_key(raw_key, hidden=True)):
            return False
        return scope is None or self.scope == cut(scope, _LONGEST_TEXT)


class Act(NamedTuple):
    """A change with its time, who asked for it, the command, the reason and the subject."""

    at: datetime
    who: str
    what: str
    why: str
    subject: Subject


def pack_act(who: str, what: str, why: str, subject: Subject) -> bytes:
    """Return the part of an act that the client packs. Long texts are cut."""
    texts = [cut(text, _LONGEST_TEXT) for text in (who, what, why, subject.topic, subject.scope)]
    return pack([*texts, subject.key])


def decode_act(entry: bytes) -> Act:
    """Decode an entry of the list of acts. Raises DecodeError."""
    with wrap_decode_errors("an act"):
        *texts, key = unpack(entry[_ACT_HEAD:], "an act", raw=False)
        who, what, why, topic, scope = map(str.__str__, texts)
        at = datetime.fromtimestamp(int.from_bytes(entry[:8]) / 1000, UTC)
        return Act(at, who, what, why, Subject(topic, scope, bytes.__bytes__(key)))
