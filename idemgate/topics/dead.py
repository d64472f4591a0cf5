"""The dead letters of a topic, for blocking code and for asyncio."""

from __future__ import annotations

import builtins
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from idemgate.core.calls import Call, Plan, run_call, run_plan, run_plan_async
from idemgate.core.validation import check_int
from idemgate.errors import InvalidArgument, TopicInUse
from idemgate.store.context import Context
from idemgate.topics.calls import SlotsChanged, TopicCalls
from idemgate.topics.dead_letters import (
    PAGE,
    DeadFilter,
    DeadLetter,
    DeadPages,
    build_filter,
    dead_numbers,
    group_ids,
)

__all__ = ["AioDeadLetters", "DeadLetters"]

T = TypeVar("T")


class DeadLetters:
    """The dead letters of a topic.

    Select letters by id, or by properties. All given properties must match:

    - `key`: a shell pattern of the key, such as "order-*". It is case-sensitive.
    - `reason`: a text that the reason contains.
    - `since`, `until`: aware datetimes. The letter died at `since` or later, and before `until`.
    """

    def __init__(self, context: Context, open_calls: Callable[[], TopicCalls]) -> None:
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
            n: The maximum number of letters.
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
        lower version than a later trigger of its key is deleted, and counted as `outdated` in `Topic.stats`.

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
            The number of letters that this call moved back, without those it deleted as outdated.

        Raises:
            InvalidArgument: An argument is invalid, or ids are combined with properties.
            TopicInUse: The number of slots is being changed, and with it the ids. Calls without `ids` work meanwhile.
        """
        selection = _select(ids, build_filter(key, reason, since, until), limit)
        return self._run(lambda calls: _plan_move(calls, "redrive", selection))

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
        selection = _select(ids, build_filter(key, reason, since, until), limit)
        return self._run(lambda calls: _plan_move(calls, "delete", selection))

    def _run(self, build: Callable[[TopicCalls], Plan[T]]) -> T:
        return run_plan(build(self._open_calls()), self._context.link.run_all)


class AioDeadLetters:
    """The dead letters of a topic, for asyncio. The methods are those of `DeadLetters`."""

    def __init__(self, context: Context, open_calls: Callable[[], Awaitable[TopicCalls]]) -> None:
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
        selection = _select(ids, build_filter(key, reason, since, until), limit)
        return await self._run(lambda calls: _plan_move(calls, "redrive", selection))

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
        selection = _select(ids, build_filter(key, reason, since, until), limit)
        return await self._run(lambda calls: _plan_move(calls, "delete", selection))

    async def _run(self, build: Callable[[TopicCalls], Plan[T]]) -> T:
        return await run_plan_async(build(await self._open_calls()), self._context.aio_link.run_all)


class _Selection(NamedTuple):
    """The letters to move: those with these ids, the newest `limit` that match, or all that match."""

    ids: builtins.list[str] | None
    wanted: DeadFilter
    limit: int | None


def _select(ids: Iterable[str] | None, wanted: DeadFilter, limit: int | None) -> _Selection:
    if limit is not None:
        check_int("limit", limit, 0)
    if ids is not None and (limit is not None or wanted != DeadFilter()):
        raise InvalidArgument(
            "ids", ids, "ids cannot be combined with other conditions", "Pass ids or conditions, not both"
        )
    return _Selection(None if ids is None else list(ids), wanted, limit)


# -- plans ------------------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """A slot of a layout."""

    calls: TopicCalls
    slot: int


class _Walk:
    """A visit of all slots of a topic, while the topic may get another number of slots.

    `add_moved` replaces the part of a slot that has moved by the slots of the new layout. Letters that were found in
    that part are dropped, because the new slots hold them too.
    """

    def __init__(self, calls: TopicCalls) -> None:
        self.found: dict[_Place, builtins.list[DeadLetter]] = {}
        self.changed = False
        self._waiting = [_Place(calls, slot) for slot in range(calls.policy.slots)]

    def __iter__(self) -> Iterator[_Place]:
        while self._waiting:
            yield self._waiting.pop(0)

    def add_moved(self, place: _Place, calls: TopicCalls) -> None:
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


def _plan_list(calls: TopicCalls, wanted: DeadFilter, n: int, skip: int) -> Plan[builtins.list[DeadLetter]]:
    walk = yield from _read_newest(calls, wanted, skip + n)
    return [letter for _, letter in walk.newest(n, skip)]


def _read_newest(calls: TopicCalls, wanted: DeadFilter, most: int) -> Plan[_Walk]:
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


def _plan_move(calls: TopicCalls, verb: str, selection: _Selection) -> Plan[int]:
    ids, wanted, limit = selection
    if ids is not None:
        return (yield from _move_ids(calls, verb, ids))
    if limit is not None:
        return (yield from _move_newest(calls, verb, wanted, limit))
    move_slot = _move_all if wanted == DeadFilter() else _move_matching
    walk, moved = _Walk(calls), 0
    for place in walk:
        moved += yield from move_slot(walk, place, verb, wanted)
    return moved


def _move_all(walk: _Walk, place: _Place, verb: str, _: DeadFilter) -> Plan[int]:
    reply = yield from _send(walk, place, place.calls.take_dead(place.slot, verb, ()))
    if reply is None:
        return 0
    moved, left = reply.moved, reply.left
    # Only as many as there were at first: a redriven letter may die again meanwhile.
    while left > 0 and reply is not None and reply.taken:
        reply = yield from _send(walk, place, place.calls.take_dead(place.slot, verb, (), min(left, PAGE)))
        if reply is not None:
            moved, left = moved + reply.moved, left - reply.taken
    return moved


def _move_matching(walk: _Walk, place: _Place, verb: str, wanted: DeadFilter) -> Plan[int]:
    pages, moved = DeadPages(wanted), 0
    while pages.at is not None:
        page = yield from _read_page(walk, place, wanted, pages)
        if page is None:
            break
        moved += yield from _move_numbers(walk, place, verb, dead_numbers(pages.add_page(page)))
    return moved


def _move_newest(calls: TopicCalls, verb: str, wanted: DeadFilter, limit: int) -> Plan[int]:
    """Move the newest letters. If a slot moves meanwhile, find the rest again: they may have other ids now."""
    moved, changed = 0, True
    while changed and moved < limit:
        walk = yield from _read_newest(calls, wanted, limit - moved)
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
        reply = yield from _send(walk, place, place.calls.take_dead(place.slot, verb, numbers[:PAGE]))
        if reply is None:
            break
        moved, numbers = moved + reply.moved, numbers[reply.seen :]
    return moved


def _move_ids(calls: TopicCalls, verb: str, ids: builtins.list[str]) -> Plan[int]:
    """Move the letters with these ids. The ids belong to one layout, so read the stored one first."""
    if not ids:
        return 0
    found = yield from run_call(calls.lookup())
    if found.to >= 0:
        raise TopicInUse(calls.name, "its slots are being changed, and with them the ids of dead letters. " + _FIX)
    calls, moved = calls.resolve_layout(found), 0
    for slot, numbers in group_ids(ids, calls.policy.slots):
        walk = _Walk(calls)
        moved += yield from _move_numbers(walk, _Place(calls, slot), verb, numbers)
        if walk.changed:
            what = f"its slots changed, and with them the ids of dead letters, after {moved} of {len(ids)}. "
            raise TopicInUse(calls.name, what + _FIX)
    return moved


_FIX = "List the letters again after the change, or select them by key, reason, time or limit"
