"""Dead letters: their decoding, filters for them, and paging through those of a slot."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from idemgate.core.codec import Codec
from idemgate.core.codec.decoding import unpack, wrap_decode_errors
from idemgate.core.durations import instant
from idemgate.errors import InvalidArgument
from idemgate.topics.merge import Merge
from idemgate.topics.message import Message, check_ms, moment

__all__ = [
    "PAGE",
    "DeadFilter",
    "DeadLetter",
    "DeadPage",
    "DeadPages",
    "DeadPosition",
    "build_filter",
    "dead_numbers",
    "decode_dead_letter",
    "group_ids",
]

PAGE = 50
"""Maximum dead letters that one script call lists or moves. Such a call blocks the server for 1 to 3 ms."""
LATEST = 2**53


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that was given up.

    Attributes:
        id: The id that `redrive` and `delete` take. It changes when the topic gets another number of slots.
        key: The text of the message's key.
        reason: The last line of the failure.
        died_at: The time at which it was given up, by the server's clock.
        attempts: The number of attempts.
        count: The number of merged triggers.
        first_at: The time of the first trigger.
        last_at: The time of the last trigger.
        message: The message, with its payload.
    """

    id: str
    key: str
    reason: str
    died_at: datetime
    attempts: int
    count: int
    first_at: datetime
    last_at: datetime
    message: Message

    @property
    def payload(self) -> Any:
        """The merged payload. Raises DecodeError if another codec wrote it."""
        return self.message.payload


def decode_dead_letter(slot: int, number: bytes, packed: bytes, merge: Merge, codec: Codec) -> DeadLetter:
    """Decode a dead letter of a slot. Raises DecodeError."""
    with wrap_decode_errors("a dead letter"):
        raw_key, raw_message, reason, died_ms, _ = unpack(packed, "a dead letter")
        message = Message(raw_message, merge, codec)
        return DeadLetter(
            id=f"{slot}-{number.decode()}",
            key=raw_key.decode(errors="backslashreplace"),
            reason=reason.decode(errors="replace"),
            died_at=moment(check_ms(died_ms)),
            attempts=message.attempts,
            count=message.count,
            first_at=moment(message.first_ms),
            last_at=moment(message.last_ms),
            message=message,
        )


class DeadPosition(NamedTuple):
    """A position in the dead letters, from newer to older.

    The next letters died before `ms`, or in the same millisecond and have a lower number.
    """

    ms: int = LATEST
    number: str = ""


class DeadFilter(NamedTuple):
    """A filter for dead letters. All conditions must hold. `since` is in ms and inclusive, `before` is exclusive."""

    key: str | None = None
    reason: str | None = None
    since: int = 0
    before: DeadPosition = DeadPosition()

    @property
    def needs_matching(self) -> bool:
        """True if some letters within the time range may not match."""
        return self.key is not None or self.reason is not None

    @property
    def fragments(self) -> tuple[bytes, bytes, bytes]:
        """What a matching letter has: the start of its key, "1" if that is the whole key, and a part of its failure.

        The server compares bytes. Texts are decoded leniently (`decode_dead_letter`), so a fragment ends before a
        character that may stand for an invalid byte.
        """
        pattern = self.key or "*"
        literal = _LITERAL.match(pattern)
        start = literal[0] if literal else ""
        failure = "" if self.reason is None or "\ufffd" in self.reason else self.reason
        return (
            start.encode(errors="surrogatepass"),
            b"1" if start == pattern else b"",
            failure.encode(errors="surrogatepass"),
        )

    def matches(self, letter: DeadLetter) -> bool:
        """Return True if the key and the reason of a letter match."""
        key_matches = self.key is None or fnmatchcase(letter.key, self.key)
        return key_matches and (self.reason is None or self.reason in letter.reason)


_LITERAL = re.compile(r"[^*?\[\\]+")
"""The start of a shell pattern that matches itself only."""


class DeadPage(NamedTuple):
    """The letters that one call found, and the position where the next one goes on; None at the end."""

    letters: list[DeadLetter]
    next: DeadPosition | None


class DeadPages:
    """Pages through the dead letters of a slot, newest first.

    It always ends, because letters that are added meanwhile are newer. Request `size` letters before `at` and pass
    them to `add_page`, until `at` is None. `found` holds the first `most` matches.
    """

    def __init__(self, wanted: DeadFilter, most: int | None = None) -> None:
        self.at: DeadPosition | None = wanted.before
        self.found: list[DeadLetter] = []
        self._wanted = wanted
        self._most = most

    @property
    def size(self) -> int:
        """The number of letters to request next."""
        missing = PAGE if self._most is None or self._wanted.needs_matching else self._most - len(self.found)
        return max(1, min(PAGE, missing))

    def add_page(self, page: DeadPage) -> list[DeadLetter]:
        """Add a page. Return its matching letters."""
        self.at = page.next
        matching = [letter for letter in page.letters if self._wanted.matches(letter)]
        if self._most is not None:
            self.found += matching
            self.at = None if len(self.found) >= self._most else self.at
        return matching


def build_filter(key: str | None, reason: str | None, since: datetime | None, until: datetime | None) -> DeadFilter:
    """Build a filter from a user's arguments. Raises InvalidArgument."""
    for name, value in (("key", key), ("reason", reason)):
        if value is not None and (not isinstance(value, str) or not value):
            raise InvalidArgument(
                name, value, "not a text to look for", "Pass a str that is not empty, or leave it out"
            )
    return DeadFilter(
        key,
        reason,
        0 if since is None else instant(since, "since"),
        DeadPosition() if until is None else DeadPosition(instant(until, "until")),
    )


def dead_numbers(letters: Iterable[DeadLetter]) -> list[str]:
    """Return the numbers of letters within their slot."""
    return [letter.id.partition("-")[2] for letter in letters]


def group_ids(ids: Iterable[str], slots: int) -> list[tuple[int, list[str]]]:
    """Group ids of dead letters by slot, at most one page per group. Raises InvalidArgument."""
    by_slot: defaultdict[int, list[str]] = defaultdict(list)
    for letter_id in ids:
        slot, separator, number = letter_id.partition("-")
        if not separator or not slot.isdigit() or not number.isdigit() or int(slot) >= slots:
            raise InvalidArgument(
                "ids",
                letter_id,
                "not the id of a dead letter of this topic",
                "Use DeadLetter.id as dead.list() returns it. A change of the number of slots changes the ids",
            )
        by_slot[int(slot)].append(number)
    return [(slot, numbers[i : i + PAGE]) for slot, numbers in by_slot.items() for i in range(0, len(numbers), PAGE)]
