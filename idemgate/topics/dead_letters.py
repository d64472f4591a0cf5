"""The dead letters of a topic: list, redrive and delete them, for blocking code and for asyncio."""

from __future__ import annotations

import builtins
import re
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from fnmatch import fnmatchcase
from operator import index
from typing import Any, NamedTuple, TypeVar

from idemgate.core import keys
from idemgate.core.calls import Arg, Batch, Call, Plan, new_id, run_call, run_calls, run_plan, run_plan_async, text
from idemgate.core.codec import Codec
from idemgate.core.codec.decoding import unpack, wrap_decode_errors
from idemgate.core.durations import instant
from idemgate.core.process import actor_name
from idemgate.core.validation import check_int
from idemgate.errors import DecodeError, InvalidArgument, TopicInUse
from idemgate.store.context import Context
from idemgate.topics.merge import Merge
from idemgate.topics.messages import Message, check_ms, moment
from idemgate.topics.slots import BaseCalls, SlotRequest, SlotsChanged, restore_order

__all__ = [
    "PAGE",
    "AioDeadLetters",
    "DeadFilter",
    "DeadLetter",
    "DeadLetterCalls",
    "DeadLetters",
    "DeadPage",
    "DeadPages",
    "DeadPosition",
    "DeadTaken",
    "LoadedLetters",
    "build_filter",
    "decode_dead_letter",
    "group_ids",
    "iterate_dead_letters",
    "plan_move",
    "select_letters",
]

T = TypeVar("T")
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
        stored: The stored bytes, which `load` takes.
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
    stored: bytes = field(repr=False)

    @property
    def payload(self) -> Any:
        """The merged payload. Raises DecodeError if another codec wrote it."""
        return self.message.payload


class LoadedLetters(NamedTuple):
    """The result of loading dead letters.

    Attributes:
        added: The number of letters that were stored.
        present: Those that the topic has already.
        expired: Those that are past `dead_retention`. They were not stored.
        full: Those for which `max_dead_letters` left no room. They were not stored.
    """

    added: int
    present: int
    expired: int
    full: int


class DeadLetters:
    """The dead letters of a topic.

    Select letters by id, or by properties. All given properties must match:

    - `key`: a shell pattern of the key, such as "order-*". It is case-sensitive.
    - `reason`: a text that the reason contains.
    - `since`, `until`: aware datetimes. The letter died at `since` or later, and before `until`.
    """

    def __init__(self, context: Context, open_calls: Callable[[], DeadLetterCalls]) -> None:
        self._context = context
        self._open_calls = open_calls

    def list(
        self,
        n: int = 50,
        *,
        skip: int = 0,
        key: str | None = None,
        reason: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> builtins.list[DeadLetter]:
        """List dead letters, newest first.

        Letters of different slots that died in the same millisecond come in any order. Each slot needs one round trip
        per 50 letters, or per 128 KiB of them. With `key` or `reason` a round trip examines 200 letters. Each call
        blocks the server for about 2 ms at most.

        Args:
            n: The maximum number of letters. `stats().dead` is how many there are.
            skip: The number of matching letters to skip first.
            key: A shell pattern of the key. None matches every key.
            reason: A text that the reason contains. None matches every reason.
            since: The earliest time of death, inclusive. None means no bound.
            until: The latest time of death, exclusive. None means no bound.

        Returns:
            At most `n` letters.

        Raises:
            InvalidArgument: An argument has the wrong type, or can never match.
            DecodeError: A stored letter is invalid.
        """
        wanted = build_filter(key, reason, since, until)
        count, skipped = check_int("n", n, 0), check_int("skip", skip, 0)
        return self._run(lambda calls: _plan_list(calls, wanted, count, skipped))

    def redrive(
        self,
        ids: Iterable[str] | None = None,
        *,
        key: str | None = None,
        reason: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int | None = None,
    ) -> int:
        """Move dead letters back into the topic: due now, with no attempts.

        A letter joins the pending message of its key as the older one; a time that a caller set stays. A letter with a
        lower version than a later trigger of its key is deleted, and counted as `outdated` in `Topic.stats`. A letter
        stays dead if that message has no room for both (`append`, `union`, a policy per field): accepted triggers are
        not dropped for it. Redrive it when the message is done.

        Without arguments it moves all of them. One script call moves at most 50 letters, or 128 KiB of them. Each
        letter moves atomically: it is either dead or pending, never both.

        The whole operation is not atomic. It skips letters that die meanwhile, and those that another caller moved.
        After an interruption, repeat the call: it continues with the rest.

        Args:
            ids: The ids of the letters. Cannot be combined with the other arguments.
            key: A shell pattern of the key.
            reason: A text that the reason contains.
            since: The earliest time of death, inclusive.
            until: The latest time of death, exclusive.
            limit: Move only the letters that `list(limit, ...)` returns.

        Returns:
            The number of letters that this call moved back, without those that it deleted as outdated and those that
            stay.

        Raises:
            InvalidArgument: An argument is invalid, or ids are combined with properties.
            TopicInUse: The number of slots is being changed, and with it the ids. Calls without `ids` work meanwhile.
        """
        selection = select_letters(ids, build_filter(key, reason, since, until), limit)
        return self._run(lambda calls: plan_move(calls, "redrive", selection))

    def delete(
        self,
        ids: Iterable[str] | None = None,
        *,
        key: str | None = None,
        reason: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int | None = None,
    ) -> int:
        """Delete dead letters permanently. Selection and batches work as for `redrive`.

        Returns:
            The number of letters that this call deleted.

        Raises:
            InvalidArgument: An argument is invalid, or ids are combined with properties.
            TopicInUse: As for `redrive`.
        """
        selection = select_letters(ids, build_filter(key, reason, since, until), limit)
        return self._run(lambda calls: plan_move(calls, "delete", selection))

    def load(self, letters: Iterable[bytes]) -> LoadedLetters:
        """Store dead letters that were read before, perhaps from another topic, such as those of a backup.

        Each keeps its key, payload, reason, attempts and time of death. Its triggers count as accepted. It keeps its
        id if that is free in its slot. A repeated call adds nothing: a letter is known by its id, key and time of
        death. That fails after the number of slots has changed, or if the letter had to take another id.

        All letters are checked before the first is stored. One script call stores at most 50 letters, or 128 KiB of
        them, atomically.

        Args:
            letters: `DeadLetter.stored` of each. Payloads are not decoded, so those of another codec stay as they are.

        Returns:
            What became of them. No stored letter is discarded to make room.

        Raises:
            InvalidArgument: One is no dead letter, or its payload cannot be one of this merge policy. Nothing was
                written.
        """
        given = list(letters)
        return self._run(lambda calls: _plan_load(calls, given))

    def _run(self, build: Callable[[DeadLetterCalls], Plan[T]]) -> T:
        return run_plan(build(self._open_calls()), self._context.link.run_all)


class AioDeadLetters:
    """The dead letters of a topic, for asyncio. The methods are those of `DeadLetters`."""

    def __init__(self, context: Context, open_calls: Callable[[], Awaitable[DeadLetterCalls]]) -> None:
        self._context = context
        self._open_calls = open_calls

    async def list(
        self,
        n: int = 50,
        *,
        skip: int = 0,
        key: str | None = None,
        reason: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
    ) -> builtins.list[DeadLetter]:
        """List dead letters, newest first. See `DeadLetters.list`."""
        wanted = build_filter(key, reason, since, until)
        count, skipped = check_int("n", n, 0), check_int("skip", skip, 0)
        return await self._run(lambda calls: _plan_list(calls, wanted, count, skipped))

    async def redrive(
        self,
        ids: Iterable[str] | None = None,
        *,
        key: str | None = None,
        reason: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int | None = None,
    ) -> int:
        """Move dead letters back into the topic. See `DeadLetters.redrive`."""
        selection = select_letters(ids, build_filter(key, reason, since, until), limit)
        return await self._run(lambda calls: plan_move(calls, "redrive", selection))

    async def delete(
        self,
        ids: Iterable[str] | None = None,
        *,
        key: str | None = None,
        reason: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int | None = None,
    ) -> int:
        """Delete dead letters permanently. See `DeadLetters.delete`."""
        selection = select_letters(ids, build_filter(key, reason, since, until), limit)
        return await self._run(lambda calls: plan_move(calls, "delete", selection))

    async def load(self, letters: Iterable[bytes]) -> LoadedLetters:
        """Store dead letters that were read before. See `DeadLetters.load`."""
        given = list(letters)
        return await self._run(lambda calls: _plan_load(calls, given))

    async def _run(self, build: Callable[[DeadLetterCalls], Plan[T]]) -> T:
        return await run_plan_async(build(await self._open_calls()), self._context.aio_link.run_all)


# -- selection --------------------------------------------------------------------------------------------------------


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
        """The condition of a letter: the start of its key. "1" if that is the whole key. A part of its failure.

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


# -- calls ------------------------------------------------------------------------------------------------------------


class DeadPage(NamedTuple):
    """The letters that one call found, and the position where the next one goes on; None at the end."""

    letters: list[DeadLetter]
    next: DeadPosition | None


class DeadTaken(NamedTuple):
    """The result of one `take_dead` call.

    `taken` dead letters were removed and `left` remain in the slot. `seen` of the requested ids were processed; an
    absent id counts as processed. `outdated` of those to redrive were deleted. `stayed` of those that were processed
    are dead letters still: the pending message of their key has no room for both.
    """

    taken: int
    left: int
    seen: int
    outdated: int = 0
    stayed: int = 0

    @property
    def moved_count(self) -> int:
        return self.taken - self.outdated


class DeadLetterCalls(BaseCalls):
    """The calls that list and move dead letters."""

    __slots__ = ()

    def dead(
        self, slot: int, wanted: DeadFilter, n: int, at: DeadPosition | None = None
    ) -> Call[DeadPage | SlotsChanged]:
        """Build the call that lists dead letters of a slot, newest first, from a position on.

        It returns at most `n` letters, fewer if they are large. Letters that cannot match are left out, and others that
        do not match may be among them. If the slot has moved, it answers SlotsChanged: a position belongs to one slot.
        """
        position = at or wanted.before

        def read(reply: list[Any]) -> DeadPage:
            letters = [
                decode_dead_letter(slot, reply[i], reply[i + 1], self.policy.merge, self.codec)
                for i in range(5, len(reply), 2)
            ]
            return DeadPage(letters, DeadPosition(int(reply[3]), reply[4].decode()) if reply[4] else None)

        rebuild = self._answer_change(lambda slot: self.dead(slot, wanted, n, position))
        args = (wanted.since, position.ms, position.number, n, *wanted.fragments)
        return self._call("dead", slot, args, read, rebuild)

    def take_dead(
        self, slot: int, verb: str, numbers: Sequence[str], most: int = PAGE, skip: int = 0
    ) -> Call[DeadTaken | SlotsChanged]:
        """Build the call that moves dead letters out of a slot; `verb` is "redrive" or "delete".

        Without `numbers` it moves the oldest `most` after the first `skip`. It moves fewer if they are large. If the
        slot has moved, it answers SlotsChanged: its letters have other numbers now.
        """
        args: list[Arg] = [new_id(), self._policy, verb, most, actor_name(), skip, *numbers]
        rebuild = self._answer_change(lambda slot: self.take_dead(slot, verb, numbers, most, skip))
        return self._call("take_dead", slot, args, lambda reply: DeadTaken(*reply[2:]), rebuild)

    def check_stored(self, packed: bytes) -> tuple[bytes, bytes]:
        """Return the route of a stored dead letter, and its bytes. Raises DecodeError if the topic cannot hold it."""
        letter = decode_dead_letter(0, b"", packed, self.policy.merge, self.codec)
        raw_key, _, _, _, number = unpack(packed, "a dead letter")
        with wrap_decode_errors("a dead letter"):
            letter.message.check_shape()
            if not 0 < index(number) < LATEST or letter.count < 1:
                raise ValueError("a number is out of range")
            return keys.raw(letter.message.raw_group or keys.raw(raw_key)), packed

    def load_dead(self, letters: Iterable[tuple[bytes, bytes]]) -> Batch[builtins.list[str]]:
        """Build the calls that store dead letters, as `check_stored` returned them. They answer a word for each."""
        return self._split_by_slot(
            letters,
            lambda letter: self.slot_of(letter[0]),
            lambda slot, batch: self._load_dead(slot, SlotRequest(new_id(), batch)),
            builtins.list,
            lambda letter: len(letter[1]),
            PAGE,
        )

    def _load_dead(self, slot: int, request: SlotRequest[tuple[bytes, bytes]]) -> Call[builtins.list[str]]:
        return self._call(
            "dead/load",
            slot,
            (request.id, self._policy, *(packed for _, packed in request.entries)),
            lambda reply: request.select_answers([text(word) for word in reply[2:]]),
            lambda calls, _: request.split(lambda letter: calls.slot_of(letter[0]), calls._load_dead, restore_order),
        )

    def adopt_letters(self, source: str, letters: Iterable[bytes]) -> Batch[builtins.list[str]]:
        """Build the calls that make dead letters of the topic `source` pending messages of this one, each once.

        They answer a word for each (`topics/scripts/dead/adopt.lua`). Raises DecodeError.
        """
        return self._split_by_slot(
            [self._adoption(source, packed) for packed in letters],
            lambda entry: self.slot_of(entry.route),
            lambda slot, batch: self._adopt_letters(slot, SlotRequest(new_id(), batch)),
            builtins.list,
            lambda entry: len(entry.packed),
            PAGE,
        )

    def _adoption(self, source: str, packed: bytes) -> _Adoption:
        """Return a letter with its mark, which tells it from all other letters of its topic."""
        route, _ = self.check_stored(packed)
        raw_key, raw_message, _, died_ms, _ = unpack(packed, "a dead letter")
        message = Message(raw_message, self.policy.merge, self.codec)
        name = b"\0moved %b %d %d %b" % (source.encode(), message.serial, died_ms, message.raw_group)
        return _Adoption(route, keys.event(name, raw_key, route), packed)

    def _adopt_letters(self, slot: int, request: SlotRequest[_Adoption]) -> Call[builtins.list[str]]:
        parts = [part for one in request.entries for part in (one.mark, one.packed)]
        return self._call(
            "dead/adopt",
            slot,
            (request.id, self._policy, actor_name(), *parts),
            lambda reply: request.select_answers([text(word) for word in reply[2:]]),
            lambda calls, _: request.split(lambda one: calls.slot_of(one.route), calls._adopt_letters, restore_order),
        )


class _Adoption(NamedTuple):
    """A dead letter for another topic: what decides its slot, its mark (`keys.event`), and its bytes."""

    route: bytes
    mark: bytes
    packed: bytes


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
            stored=packed,
        )


# -- plans ------------------------------------------------------------------------------------------------------------


class _Selection(NamedTuple):
    """The letters to move: those with these ids, the newest `limit` that match, or all that match."""

    ids: builtins.list[str] | None
    wanted: DeadFilter
    limit: int | None
    page: int


def select_letters(ids: Iterable[str] | None, wanted: DeadFilter, limit: int | None, page: int = PAGE) -> _Selection:
    """Return a selection to move. One call moves at most `page` of its letters. Raises InvalidArgument."""
    if limit is not None:
        check_int("limit", limit, 0)
    if ids is not None and (limit is not None or wanted != DeadFilter()):
        raise InvalidArgument(
            "ids", ids, "ids cannot be combined with other conditions", "Pass ids or conditions, not both"
        )
    return _Selection(None if ids is None else list(ids), wanted, limit, page)


class _Place(NamedTuple):
    """A slot of a layout."""

    calls: DeadLetterCalls
    slot: int


class _Walk:
    """A visit of all slots of a topic, while the topic may get another number of slots.

    `add_moved` replaces the part of a slot that has moved by the slots of the new layout. Letters that were found in
    that part are dropped, because the new slots hold them too.
    """

    def __init__(self, calls: DeadLetterCalls, page: int = PAGE) -> None:
        self.page = page
        self.found: dict[_Place, builtins.list[DeadLetter]] = {}
        self.changed = False
        self._waiting = [_Place(calls, slot) for slot in range(calls.policy.slots)]

    def __iter__(self) -> Iterator[_Place]:
        while self._waiting:
            yield self._waiting.pop(0)

    def add_moved(self, place: _Place, calls: DeadLetterCalls) -> None:
        size = min(place.calls.policy.slots, calls.policy.slots)
        part = place.slot % size
        self._waiting = [one for one in self._waiting if one.slot % size != part]
        self._waiting += [_Place(calls, slot) for slot in range(part, calls.policy.slots, size)]
        self.found = {one: letters for one, letters in self.found.items() if one.slot % size != part}
        self.changed = True

    def newest(self, n: int, skip: int = 0) -> builtins.list[tuple[_Place, DeadLetter]]:
        """Return the `n` newest letters after the first `skip`, newest first, each with its place."""
        found = [(place, letter) for place, letters in self.found.items() for letter in letters]
        found.sort(key=lambda one: one[1].died_at, reverse=True)
        return found[skip : skip + n]


def _send(walk: _Walk, place: _Place, request: Call[T | SlotsChanged]) -> Plan[T | None]:
    """Run a call of a place. If the place has moved, add its new places to the walk and return None."""
    answer = yield from run_call(request)
    if isinstance(answer, SlotsChanged):
        walk.add_moved(place, answer.calls)
        return None
    return answer


def _read_page(walk: _Walk, place: _Place, wanted: DeadFilter, pages: DeadPages) -> Plan[Any]:
    assert pages.at is not None
    return (yield from _send(walk, place, place.calls.dead(place.slot, wanted, pages.size, pages.at)))


def _plan_list(calls: DeadLetterCalls, wanted: DeadFilter, n: int, skip: int) -> Plan[builtins.list[DeadLetter]]:
    walk = yield from _read_newest(calls, wanted, skip + n)
    return [letter for _, letter in walk.newest(n, skip)]


def _read_newest(calls: DeadLetterCalls, wanted: DeadFilter, most: int) -> Plan[_Walk]:
    """Find the `most` newest matching letters of each slot. Return the walk that holds them."""
    walk = _Walk(calls)
    for place in walk:
        pages = DeadPages(wanted, most)
        while pages.at is not None:
            page = yield from _read_page(walk, place, wanted, pages)
            if page is None:
                break
            pages.add_page(page)
        else:
            walk.found[place] = pages.found
    return walk


def iterate_dead_letters(
    calls: DeadLetterCalls, send: Callable[[Any], Any], wanted: DeadFilter
) -> Iterator[DeadLetter]:
    """Yield all matching letters, each slot newest first. At most one page is in memory.

    While the number of slots changes, letters of a slot that moves may come twice.
    """
    walk = _Walk(calls)
    for place in walk:
        pages = DeadPages(wanted)
        while pages.at is not None:
            page = run_plan(_read_page(walk, place, wanted, pages), send)
            if page is None:
                break
            yield from pages.add_page(page)


def plan_move(calls: DeadLetterCalls, verb: str, selection: _Selection) -> Plan[int]:
    """Move letters out of a topic: "redrive" or "delete". It returns their number. See `DeadLetters.redrive`."""
    ids, wanted, limit, page = selection
    if ids is not None:
        return (yield from _move_ids(calls, verb, ids, page))
    if limit is not None:
        return (yield from _move_newest(calls, verb, wanted, limit, page))
    move_slot = _move_all if wanted == DeadFilter() else _move_matching
    walk, moved = _Walk(calls, page), 0
    for place in walk:
        moved += yield from move_slot(walk, place, verb, wanted)
    return moved


def _move_all(walk: _Walk, place: _Place, verb: str, _: DeadFilter) -> Plan[int]:
    reply = yield from _send(walk, place, place.calls.take_dead(place.slot, verb, (), walk.page))
    if reply is None:
        return 0
    moved, stayed, left = reply.moved_count, reply.stayed, reply.left - reply.stayed
    # Only as many as there were at first: a redriven letter may die again meanwhile.
    while left > 0 and reply is not None and reply.taken + reply.stayed:
        most = min(left, walk.page)
        reply = yield from _send(walk, place, place.calls.take_dead(place.slot, verb, (), most, stayed))
        if reply is not None:
            moved, stayed = moved + reply.moved_count, stayed + reply.stayed
            left -= reply.taken + reply.stayed
    return moved


def _move_matching(walk: _Walk, place: _Place, verb: str, wanted: DeadFilter) -> Plan[int]:
    pages, moved = DeadPages(wanted), 0
    while pages.at is not None:
        page = yield from _read_page(walk, place, wanted, pages)
        if page is None:
            break
        moved += yield from _move_numbers(walk, place, verb, dead_numbers(pages.add_page(page)))
    return moved


def _move_newest(calls: DeadLetterCalls, verb: str, wanted: DeadFilter, limit: int, page: int) -> Plan[int]:
    """Move the newest letters. If a slot moves meanwhile, find the rest again: they may have other ids now."""
    moved, changed = 0, True
    while changed and moved < limit:
        walk = yield from _read_newest(calls, wanted, limit - moved)
        walk.page = page
        by_place: defaultdict[_Place, builtins.list[DeadLetter]] = defaultdict(builtins.list)
        for place, letter in walk.newest(limit - moved):
            by_place[place].append(letter)
        walk.changed = False
        for place, letters in by_place.items():
            moved += yield from _move_numbers(walk, place, verb, dead_numbers(letters))
        changed = walk.changed
    return moved


def _move_numbers(walk: _Walk, place: _Place, verb: str, numbers: builtins.list[str]) -> Plan[int]:
    """Move letters of a place until it moves. Return the number of letters moved."""
    moved = 0
    while numbers:
        reply = yield from _send(walk, place, place.calls.take_dead(place.slot, verb, numbers[: walk.page]))
        if reply is None:
            break
        moved, numbers = moved + reply.moved_count, numbers[reply.seen :]
    return moved


def _move_ids(calls: DeadLetterCalls, verb: str, ids: builtins.list[str], page: int) -> Plan[int]:
    """Move the letters with these ids. The ids belong to one layout, so read the stored one first."""
    if not ids:
        return 0
    found = yield from run_call(calls.lookup())
    if found.to >= 0:
        raise TopicInUse(calls.name, "its slots are being changed, and with them the ids of dead letters. " + _FIX)
    calls, moved = calls.resolve_layout(found), 0
    for slot, numbers in group_ids(ids, calls.policy.slots):
        walk = _Walk(calls, page)
        moved += yield from _move_numbers(walk, _Place(calls, slot), verb, numbers)
        if walk.changed:
            what = f"its slots changed, and with them the ids of dead letters, after {moved} of {len(ids)}. "
            raise TopicInUse(calls.name, what + _FIX)
    return moved


_FIX = "List the letters again after the change, or select them by key, reason, time or limit"


def _plan_load(calls: DeadLetterCalls, letters: builtins.list[bytes]) -> Plan[LoadedLetters]:
    checked = builtins.list[tuple[bytes, bytes]]()
    for position, packed in enumerate(letters):
        try:
            checked.append(calls.check_stored(packed))
        except DecodeError as error:
            fix = "Pass `DeadLetter.stored` of a topic with the same merge policy"
            raise InvalidArgument(f"letters[{position}]", packed, error.why, fix) from None
    batch = calls.load_dead(checked)
    words = batch.join((yield from run_calls(batch.calls)))
    return LoadedLetters(*(words.count(word) for word in LoadedLetters._fields))


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
