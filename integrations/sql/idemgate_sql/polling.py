"""The connection of a relay without NOTIFY: it looks for rows at intervals."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import AbstractAsyncContextManager
from typing import Any, Self

from idemgate_sql.database import AioDatabase, Database, Params, Rows
from idemgate_sql.relay_connection import RelayThread, wait_for_stop

__all__ = ["PollingConnection", "poll", "poll_async"]

FIRST_LOOK = 0.005
"""Seconds from a trigger of this process to the first look. Its transaction may still be open, so others follow."""


def poll(database: Database[Any]) -> PollingConnection:
    """Return the connection of a relay in a blocking database, which a thread uses."""
    thread = RelayThread()

    def run(sql: str, params: Params) -> Rows:
        with database.transaction() as connection:
            return database.execute(connection, sql, params)

    return PollingConnection(lambda sql, params: thread.run(run, sql, params), thread.close)


def poll_async(database: AioDatabase[Any]) -> PollingConnection:
    """Return the connection of a relay in an async database."""

    async def run(sql: str, params: Params) -> Rows:
        async with database.transaction() as connection:
            return await database.execute(connection, sql, params)

    return PollingConnection(run)


class PollingConnection(AbstractAsyncContextManager["PollingConnection"]):
    """A connection for each statement. Every relay works, and looks for rows at intervals.

    After a trigger of this process it looks sooner, at intervals that double.
    """

    def __init__(
        self, execute: Callable[[str, Params], Awaitable[Rows]], close: Callable[[], None] = lambda: None
    ) -> None:
        self._execute = execute
        self._close = close
        self._next_look: float | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close what the statements need."""
        self._close()

    async def lock(self, names: Collection[str]) -> set[str]:
        """Return all names."""
        return set(names)

    async def unlock(self, name: str) -> None:
        """Do nothing."""

    async def execute(self, sql: str, params: Params) -> Rows:
        """Execute a statement; see `RelayConnection.execute`."""
        return await self._execute(sql, params)

    async def wait(
        self,
        stop: asyncio.Event,
        woken: asyncio.Event,
        seconds: float,
        serves: Callable[[str], bool],  # noqa: ARG002 - `woken` is set for served topics only
    ) -> None:
        """Wait until `stop` is set, the time has passed, or it is time for a look after a trigger."""
        if self._next_look is None:
            await _wait_for_one(stop, woken, seconds)
        if woken.is_set():
            woken.clear()
            self._next_look = FIRST_LOOK
        if self._next_look is not None:
            await wait_for_stop(stop, min(seconds, self._next_look))
            self._next_look = 2 * self._next_look if self._next_look < seconds else None


async def _wait_for_one(first: asyncio.Event, second: asyncio.Event, seconds: float) -> None:
    """Wait until one of the events is set, at most this long."""
    tasks = [asyncio.ensure_future(one.wait()) for one in (first, second)]
    try:
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
