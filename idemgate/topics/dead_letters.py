"""Dead letters: which of them are meant, and going through those of a slot page by page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import datetime
from fnmatch import fnmatchcase
from typing import NamedTuple

from idemgate.core.durations import instant
from idemgate.errors import InvalidArgument
from idemgate.topics.messages import DeadLetter

__all__ = ["PAGE", "Chosen", "Pages", "Place", "by_slot", "chosen", "newest", "numbers_of"]

PAGE = 50
"""Most letters that one script call shows or moves: the server is blocked for the whole of it, 1 to 3 ms."""
LATEST = 2**53


class Place(NamedTuple):
    """Where to go on, from newer to older: with letters that died before `ms`, or then and with a lower number."""

    ms: int = LATEST
    number: str = ""


class Chosen(NamedTuple):
    """Which letters are meant; all conditions have to hold. `since` in ms, inclusive; `before` exclusive."""

    key: str | None = None
    reason: str | None = None
    since: int = 0
    before: Place = Place()

    @property
    def sifts(self) -> bool:
        """Whether some of the letters of that time may not match."""
        return self.key is not None or self.reason is not None

    def matches(self, letter: DeadLetter) -> bool:
        fits = self.key is None or fnmatchcase(letter.key, self.key)
        return fits and (self.reason is None or self.reason in letter.reason)


class Pages:
    """Goes through the letters of a slot, newest first, so that it ends: what dies meanwhile is newer. Ask for `size`
    letters before `at`, and `turn`, until that is None; `found` are the first `most` that match."""

    def __init__(self, wanted: Chosen, most: int | None = None) -> None:
        self.at: Place | None = wanted.before
        self.found: list[DeadLetter] = []
        self._wanted = wanted
        self._most = most

    @property
    def size(self) -> int:
        room = PAGE if self._most is None or self._wanted.sifts else self._most - len(self.found)
        return max(1, min(PAGE, room))

    def turn(self, page: tuple[int, list[DeadLetter]]) -> list[DeadLetter]:
        """Those of the page that match, as `TopicCalls.dead` told it."""
        total, letters = page
        alone = self.at == self._wanted.before and len(letters) == total
        self.at = None if alone or not letters else place_of(letters[-1])
        matching = [one for one in letters if self._wanted.matches(one)]
        if self._most is not None:
            self.found += matching
            self.at = None if len(self.found) >= self._most else self.at
        return matching


def chosen(key: str | None, reason: str | None, since: datetime | None, until: datetime | None) -> Chosen:
    """What a user asked for, or InvalidArgument."""
    for name, given in (("key", key), ("reason", reason)):
        if given is not None and (not isinstance(given, str) or not given):
            raise InvalidArgument(
                name, given, "not a text to look for", "Pass a str that is not empty, or leave it out"
            )
    return Chosen(
        key,
        reason,
        0 if since is None else instant(since, "since"),
        Place() if until is None else Place(instant(until, "until")),
    )


def place_of(letter: DeadLetter) -> Place:
    return Place(instant(letter.died_at, "died_at"), *numbers_of([letter]))


def numbers_of(letters: Iterable[DeadLetter]) -> list[str]:
    """What their slot calls them."""
    return [one.id.partition("-")[2] for one in letters]


def newest(by_slot: Iterable[Sequence[DeadLetter]], n: int, skip: int) -> list[DeadLetter]:
    """The letters of several slots as one list, newest first."""
    found = sorted(
        (letter for letters in by_slot for letter in letters), key=lambda letter: letter.died_at, reverse=True
    )
    return found[skip : skip + n]


def by_slot(ids: Iterable[str], slots: int) -> list[tuple[int, list[str]]]:
    """Which letters to move out of which slot, a page a call."""
    wanted: defaultdict[int, list[str]] = defaultdict(list)
    for one in ids:
        slot, separator, number = one.partition("-")
        if not separator or not slot.isdigit() or not number.isdigit() or int(slot) >= slots:
            raise InvalidArgument(
                "ids",
                one,
                "not the id of a dead letter of this topic",
                "Use DeadLetter.id as dead.list() gives it",
            )
        wanted[int(slot)].append(number)
    return [(slot, found[i : i + PAGE]) for slot, found in wanted.items() for i in range(0, len(found), PAGE)]
