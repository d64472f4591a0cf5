"""The watch of a relay on PostgreSQL by psycopg: LISTEN, and an advisory lock of the session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, suppress
from time import monotonic
from typing import Any

import psycopg
from psycopg import sql

from idemgate_sql.names import shorten_channel

__all__ = ["watch", "watch_async"]

# The lock has the number of the table, because tables of two schemas may have one name, and the name of the relay:
# a relay that sends the rows of other topics must not stand by.
_LOCK = """
SELECT pg_try_advisory_lock(hashtextextended(CAST(CAST(to_regclass(%s) AS oid) AS text) || ' ' || %s, 6517))
"""
_UNLOCK = "SELECT pg_advisory_unlock_all()"
SHORT_WAIT = 0.5
"""Seconds that a thread waits for NOTIFY: nothing else interrupts it."""


class _Watch:
    """The watch of an async connection in autocommit mode."""

    def __init__(self, connection: psycopg.AsyncConnection[Any], channel: str) -> None:
        self._connection = connection
        self._channel = channel
        self._locks = set[str]()

    async def try_lock(self, name: str) -> bool:
        """Return True if this connection has the lock of this name."""
        if name not in self._locks:
            cursor = await psycopg.AsyncCursor(self._connection).execute(_LOCK, (self._channel, name))
            if _is_granted(await cursor.fetchone()):
                self._locks.add(name)
        return name in self._locks

    async def wait(self, stop: asyncio.Event, woken: asyncio.Event, seconds: float) -> None:  # noqa: ARG002
        """Wait until a row is committed, `stop` is set, or the time has passed."""
        notified = asyncio.ensure_future(self._wait_for_notify(seconds))
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({notified, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if notified.done():
                notified.result()
        finally:
            stopped.cancel()
            notified.cancel()
            await asyncio.gather(notified, stopped, return_exceptions=True)

    async def _wait_for_notify(self, seconds: float) -> None:
        async for _ in self._connection.notifies(timeout=seconds, stop_after=1):
            pass


class _BlockingWatch:
    """The watch of a blocking connection, which a thread waits on."""

    def __init__(self, connection: psycopg.Connection[Any], channel: str) -> None:
        self._connection = connection
        self._channel = channel
        self._locks = set[str]()

    async def try_lock(self, name: str) -> bool:
        """Return True if this connection has the lock of this name."""
        if name not in self._locks and await asyncio.to_thread(self._try_lock, name):
            self._locks.add(name)
        return name in self._locks

    def _try_lock(self, name: str) -> bool:
        return _is_granted(psycopg.Cursor(self._connection).execute(_LOCK, (self._channel, name)).fetchone())

    async def wait(self, stop: asyncio.Event, woken: asyncio.Event, seconds: float) -> None:  # noqa: ARG002
        """Wait until a row is committed, `stop` is set, or the time has passed."""
        until = monotonic() + seconds
        while not stop.is_set() and (left := until - monotonic()) > 0:
            if await asyncio.to_thread(self._is_notified, min(left, SHORT_WAIT)):
                return

    def _is_notified(self, seconds: float) -> bool:
        return any(True for _ in self._connection.notifies(timeout=seconds, stop_after=1))


@asynccontextmanager
async def watch_async(open_connection: Callable[[], Any], channel: str) -> AsyncGenerator[_Watch]:
    """Listen on an async connection. At the end it is as it was, because a pool may get it back."""
    opened = open_connection()
    manager: AbstractAsyncContextManager[psycopg.AsyncConnection[Any]] = (
        opened if isinstance(opened, AbstractAsyncContextManager) else await opened
    )
    async with manager as connection:
        before = connection.autocommit
        await connection.set_autocommit(True)
        await psycopg.AsyncCursor(connection).execute(_listen(channel))
        try:
            yield _Watch(connection, channel)
        finally:
            with suppress(psycopg.Error):  # the connection is lost
                await psycopg.AsyncCursor(connection).execute("UNLISTEN *")
                await psycopg.AsyncCursor(connection).execute(_UNLOCK)
                await connection.set_autocommit(before)


@asynccontextmanager
async def watch(
    open_connection: Callable[[], AbstractContextManager[psycopg.Connection[Any]]], channel: str
) -> AsyncGenerator[_BlockingWatch]:
    """Listen on a blocking connection, in threads; see `watch_async`."""
    manager = open_connection()
    connection = await asyncio.to_thread(manager.__enter__)
    try:
        before = connection.autocommit
        await asyncio.to_thread(_begin, connection, channel)
        try:
            yield _BlockingWatch(connection, channel)
        finally:
            await asyncio.to_thread(_end, connection, before)
    finally:
        await asyncio.to_thread(manager.__exit__, None, None, None)


def _begin(connection: psycopg.Connection[Any], channel: str) -> None:
    connection.autocommit = True
    psycopg.Cursor(connection).execute(_listen(channel))


def _end(connection: psycopg.Connection[Any], before: bool) -> None:
    with suppress(psycopg.Error):  # the connection is lost
        psycopg.Cursor(connection).execute("UNLISTEN *")
        psycopg.Cursor(connection).execute(_UNLOCK)
        connection.autocommit = before


def _listen(channel: str) -> sql.Composed:
    return sql.SQL("LISTEN {}").format(sql.Identifier(shorten_channel(channel)))


def _is_granted(row: Any) -> bool:
    """Return True if the row of `_LOCK` says so. NULL: there is no table, which the read reports."""
    return row is not None and row[0] is not False
