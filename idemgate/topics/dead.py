"""The dead letters of a topic, for blocking code and for asyncio."""

from __future__ import annotations

import builtins
from collections.abc import Awaitable, Callable, Iterable
from datetime import datetime

from idemgate.core.validation import check_int
from idemgate.errors import InvalidArgument
from idemgate.store.context import Context
from idemgate.topics.calls import TopicCalls
from idemgate.topics.dead_letters import (
    PAGE,
    DeadFilter,
    DeadLetter,
    DeadPages,
    build_filter,
    dead_numbers,
    group_ids,
    newest,
)

__all__ = ["AioDeadLetters", "DeadLetters"]


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
        per 50 letters examined, or per 128 KiB of them.

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
        return self._list(build_filter(key, reason, since, until), check_int("n", n, 0), check_int("skip", skip, 0))

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
            The number of letters that this call moved.

        Raises:
            InvalidArgument: An argument is invalid, or ids are combined with properties.
        """
        return self._move("redrive", ids, build_filter(key, reason, since, until), limit)

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
        """
        return self._move("delete", ids, build_filter(key, reason, since, until), limit)

    def _list(self, wanted: DeadFilter, n: int, skip: int = 0) -> builtins.list[DeadLetter]:
        calls = self._open_calls()
        link = self._context.link
        by_slot: builtins.list[builtins.list[DeadLetter]] = []
        for slot in range(calls.policy.slots):
            pages = DeadPages(wanted, skip + n)
            while pages.at is not None:
                pages.add_page(link.run(calls.dead(slot, wanted.since, pages.size, pages.at)))
            by_slot.append(pages.found)
        return newest(by_slot, n, skip)

    def _move(self, verb: str, ids: Iterable[str] | None, wanted: DeadFilter, limit: int | None) -> int:
        _check(ids, wanted, limit)
        calls = self._open_calls()
        if limit is not None:
            ids = [letter.id for letter in self._list(wanted, limit)]
        if ids is not None:
            groups = group_ids(ids, calls.policy.slots)
            return sum(self._move_numbers(calls, slot, verb, numbers) for slot, numbers in groups)
        move_slot = self._move_all if wanted == DeadFilter() else self._move_matching
        return sum(move_slot(calls, slot, verb, wanted) for slot in range(calls.policy.slots))

    def _move_matching(self, calls: TopicCalls, slot: int, verb: str, wanted: DeadFilter) -> int:
        link = self._context.link
        pages, moved = DeadPages(wanted), 0
        while pages.at is not None:
            matching = pages.add_page(link.run(calls.dead(slot, wanted.since, pages.size, pages.at)))
            if matching:
                moved += self._move_numbers(calls, slot, verb, dead_numbers(matching))
        return moved

    def _move_numbers(self, calls: TopicCalls, slot: int, verb: str, numbers: builtins.list[str]) -> int:
        link, moved = self._context.link, 0
        while numbers:
            reply = link.run(calls.take_dead(slot, verb, numbers))
            moved, numbers = moved + reply.taken, numbers[reply.seen :]
        return moved

    def _move_all(self, calls: TopicCalls, slot: int, verb: str, _: DeadFilter) -> int:
        link = self._context.link
        first = link.run(calls.take_dead(slot, verb, ()))
        moved, left, taken = first.taken, first.left, first.taken
        # Only as many as there were at first: a redriven letter may die again meanwhile.
        while left > 0 and taken:
            taken = link.run(calls.take_dead(slot, verb, (), min(left, PAGE))).taken
            moved, left = moved + taken, left - taken
        return moved


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
        return await self._list(
            build_filter(key, reason, since, until), check_int("n", n, 0), check_int("skip", skip, 0)
        )

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
        return await self._move("redrive", ids, build_filter(key, reason, since, until), limit)

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
        return await self._move("delete", ids, build_filter(key, reason, since, until), limit)

    async def _list(self, wanted: DeadFilter, n: int, skip: int = 0) -> builtins.list[DeadLetter]:
        calls = await self._open_calls()
        link = self._context.aio_link
        by_slot: builtins.list[builtins.list[DeadLetter]] = []
        for slot in range(calls.policy.slots):
            pages = DeadPages(wanted, skip + n)
            while pages.at is not None:
                pages.add_page(await link.run(calls.dead(slot, wanted.since, pages.size, pages.at)))
            by_slot.append(pages.found)
        return newest(by_slot, n, skip)

    async def _move(self, verb: str, ids: Iterable[str] | None, wanted: DeadFilter, limit: int | None) -> int:
        _check(ids, wanted, limit)
        calls = await self._open_calls()
        if limit is not None:
            ids = [letter.id for letter in await self._list(wanted, limit)]
        if ids is not None:
            groups = group_ids(ids, calls.policy.slots)
            return sum([await self._move_numbers(calls, slot, verb, numbers) for slot, numbers in groups])
        move_slot = self._move_all if wanted == DeadFilter() else self._move_matching
        return sum([await move_slot(calls, slot, verb, wanted) for slot in range(calls.policy.slots)])

    async def _move_matching(self, calls: TopicCalls, slot: int, verb: str, wanted: DeadFilter) -> int:
        link = self._context.aio_link
        pages, moved = DeadPages(wanted), 0
        while pages.at is not None:
            matching = pages.add_page(await link.run(calls.dead(slot, wanted.since, pages.size, pages.at)))
            if matching:
                moved += await self._move_numbers(calls, slot, verb, dead_numbers(matching))
        return moved

    async def _move_numbers(self, calls: TopicCalls, slot: int, verb: str, numbers: builtins.list[str]) -> int:
        link, moved = self._context.aio_link, 0
        while numbers:
            reply = await link.run(calls.take_dead(slot, verb, numbers))
            moved, numbers = moved + reply.taken, numbers[reply.seen :]
        return moved

    async def _move_all(self, calls: TopicCalls, slot: int, verb: str, _: DeadFilter) -> int:
        link = self._context.aio_link
        first = await link.run(calls.take_dead(slot, verb, ()))
        moved, left, taken = first.taken, first.left, first.taken
        while left > 0 and taken:
            taken = (await link.run(calls.take_dead(slot, verb, (), min(left, PAGE)))).taken
            moved, left = moved + taken, left - taken
        return moved


def _check(ids: object, wanted: DeadFilter, limit: int | None) -> None:
    if limit is not None:
        check_int("limit", limit, 0)
    if ids is not None and (limit is not None or wanted != DeadFilter()):
        raise InvalidArgument(
            "ids", ids, "ids cannot be combined with other conditions", "Pass ids or conditions, not both"
        )
