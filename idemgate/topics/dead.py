"""The two faces of a topic's dead letters."""

from __future__ import annotations

import builtins
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING

from idemgate.core.numbers import whole
from idemgate.errors import InvalidArgument
from idemgate.topics.dead_letters import Chosen, Pages, by_slot, chosen, newest, numbers_of
from idemgate.topics.messages import DeadLetter

if TYPE_CHECKING:
    from idemgate.topics.calls import TopicCalls
    from idemgate.topics.topic import AioTopic, Topic

__all__ = ["AioDead", "Dead"]


class Dead:
    """The dead letters of a topic. Which of them a call means is said by their ids, or by what they have in common:

    - `key`: a pattern of the key as a shell has them, "order-*"; upper and lower case differ.
    - `reason`: a text that the reason contains.
    - `since`, `until`: aware datetimes; died at `since` or later, and before `until`.
    All that are named have to hold. InvalidArgument for what can never match.
    """

    def __init__(self, topic: Topic) -> None:
        self._topic = topic

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
        """At most `n` dead letters, newest first, after leaving `skip` out; where they died within the same millisecond
        in several slots, in any order. One round trip per slot and 50 letters
        looked at, or 128 KiB of them."""
        return self._list(chosen(key, reason, since, until), whole("n", n, 0), whole("skip", skip, 0))

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
        """Sends letters back, due now, attempts reset, and returns how many; with nothing named, all of them. With
        `limit` those that `list(limit, ...)` shows.

        Each script call moves at most 50, or 128 KiB of them, each letter in one step: it is dead or pending, never
        both and never neither. The whole is not atomic: what dies meanwhile stays, what somebody else took out is
        passed over and not counted, and after an interruption the same call goes on with what is left.
        """
        return self._exhume("redrive", ids, chosen(key, reason, since, until), limit)

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
        """Deletes letters for good, as `redrive` sends them back; how many."""
        return self._exhume("delete", ids, chosen(key, reason, since, until), limit)

    def _list(self, wanted: Chosen, n: int, skip: int = 0) -> builtins.list[DeadLetter]:
        calls = self._topic.open()
        link = self._topic.opening.context.link
        found: builtins.list[builtins.list[DeadLetter]] = []
        for slot in range(calls.policy.slots):
            pages = Pages(wanted, skip + n)
            while pages.at is not None:
                pages.turn(link.run(calls.dead(slot, wanted.since, pages.size, pages.at)))
            found.append(pages.found)
        return newest(found, n, skip)

    def _exhume(self, verb: str, ids: Iterable[str] | None, wanted: Chosen, limit: int | None) -> int:
        _check(ids, wanted, limit)
        calls = self._topic.open()
        if limit is not None:
            ids = [one.id for one in self._list(wanted, limit)]
        if ids is not None:
            parts = by_slot(ids, calls.policy.slots)
            return sum(self._move(calls, slot, verb, numbers) for slot, numbers in parts)
        moved = 0
        for slot in range(calls.policy.slots):
            moved += self._sift(calls, slot, verb, wanted) if wanted != Chosen() else self._empty(calls, slot, verb)
        return moved

    def _sift(self, calls: TopicCalls, slot: int, verb: str, wanted: Chosen) -> int:
        link = self._topic.opening.context.link
        pages, moved = Pages(wanted), 0
        while pages.at is not None:
            found = pages.turn(link.run(calls.dead(slot, wanted.since, pages.size, pages.at)))
            if found:
                moved += self._move(calls, slot, verb, numbers_of(found))
        return moved

    def _move(self, calls: TopicCalls, slot: int, verb: str, numbers: builtins.list[str]) -> int:
        link, moved = self._topic.opening.context.link, 0
        while numbers:
            done = link.run(calls.exhume(slot, verb, numbers))
            moved, numbers = moved + done.taken, numbers[done.seen :]
        return moved

    def _empty(self, calls: TopicCalls, slot: int, verb: str) -> int:
        link = self._topic.opening.context.link
        first = link.run(calls.exhume(slot, verb, ()))
        moved, left, done = first.taken, first.left, first.taken
        while left > 0 and done:  # those that were there at first: what is sent back may die again meanwhile
            done = link.run(calls.exhume(slot, verb, ())).taken
            moved, left = moved + done, left - done
        return moved


class AioDead:
    """As `Dead`, awaiting."""

    def __init__(self, topic: AioTopic) -> None:
        self._topic = topic

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
        """As `Dead.list`."""
        return await self._list(chosen(key, reason, since, until), whole("n", n, 0), whole("skip", skip, 0))

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
        """As `Dead.redrive`."""
        return await self._exhume("redrive", ids, chosen(key, reason, since, until), limit)

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
        """As `Dead.delete`."""
        return await self._exhume("delete", ids, chosen(key, reason, since, until), limit)

    async def _list(self, wanted: Chosen, n: int, skip: int = 0) -> builtins.list[DeadLetter]:
        calls = await self._topic.open()
        link = self._topic.opening.context.aio_link
        found: builtins.list[builtins.list[DeadLetter]] = []
        for slot in range(calls.policy.slots):
            pages = Pages(wanted, skip + n)
            while pages.at is not None:
                pages.turn(await link.run(calls.dead(slot, wanted.since, pages.size, pages.at)))
            found.append(pages.found)
        return newest(found, n, skip)

    async def _exhume(self, verb: str, ids: Iterable[str] | None, wanted: Chosen, limit: int | None) -> int:
        _check(ids, wanted, limit)
        calls = await self._topic.open()
        if limit is not None:
            ids = [one.id for one in await self._list(wanted, limit)]
        if ids is not None:
            parts = by_slot(ids, calls.policy.slots)
            return sum([await self._move(calls, slot, verb, numbers) for slot, numbers in parts])
        moved = 0
        for slot in range(calls.policy.slots):
            moved += await (
                self._sift(calls, slot, verb, wanted) if wanted != Chosen() else self._empty(calls, slot, verb)
            )
        return moved

    async def _sift(self, calls: TopicCalls, slot: int, verb: str, wanted: Chosen) -> int:
        link = self._topic.opening.context.aio_link
        pages, moved = Pages(wanted), 0
        while pages.at is not None:
            found = pages.turn(await link.run(calls.dead(slot, wanted.since, pages.size, pages.at)))
            if found:
                moved += await self._move(calls, slot, verb, numbers_of(found))
        return moved

    async def _move(self, calls: TopicCalls, slot: int, verb: str, numbers: builtins.list[str]) -> int:
        link, moved = self._topic.opening.context.aio_link, 0
        while numbers:
            done = await link.run(calls.exhume(slot, verb, numbers))
            moved, numbers = moved + done.taken, numbers[done.seen :]
        return moved

    async def _empty(self, calls: TopicCalls, slot: int, verb: str) -> int:
        link = self._topic.opening.context.aio_link
        first = await link.run(calls.exhume(slot, verb, ()))
        moved, left, done = first.taken, first.left, first.taken
        while left > 0 and done:
            done = (await link.run(calls.exhume(slot, verb, ()))).taken
            moved, left = moved + done, left - done
        return moved


def _check(ids: object, wanted: Chosen, limit: int | None) -> None:
    if limit is not None:
        whole("limit", limit, 0)
    if ids is not None and (limit is not None or wanted != Chosen()):
        raise InvalidArgument(
            "ids", ids, "letters are named by their ids or by what they have in common", "Pass one of both"
        )
