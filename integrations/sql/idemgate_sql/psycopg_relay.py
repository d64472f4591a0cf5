"""The connection of a relay on PostgreSQL by psycopg: LISTEN, and advisory locks of the session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, suppress
from time import monotonic
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from idemgate_sql.database import Rows, read_text
from idemgate_sql.names import shorten_channel
from idemgate_sql.relay_connection import RelayThread

__all__ = ["connect", "connect_async"]

# A lock has the number of the table, because tables of two schemas may have one name.
_LOCK = """
SELECT name, pg_try_advisory_lock(hashtextextended(CAST(CAST(to_regclass(%s) AS oid) AS text) || ' ' || name, 6517))
FROM unnest(CAST(%s AS text[])) AS names (name)
"""
_UNLOCK = """
SELECT pg_advisory_unlock(hashtextextended(CAST(CAST(to_regclass(%s) AS oid) AS text) || ' ' || CAST(%s AS text), 6517))
"""
_UNLOCK_ALL = "SELECT pg_advisory_unlock_all()"
SESSION_TIMEOUT = 30_000
"""Milliseconds after which the server ends the session of a relay that does nothing, and with it the locks. The process
is stopped, or its host is lost. From PostgreSQL 14 on."""
_READ_TIMEOUT = "SELECT current_setting('idle_session_timeout', true)"
_SET_TIMEOUT = "SELECT set_config('idle_session_timeout', %s, false)"
LONGEST_WAIT = 10.0
"""Seconds after which a waiting relay executes a statement at the latest, because of `SESSION_TIMEOUT`."""
SHORT_WAIT = 0.5
"""Seconds that a thread waits for NOTIFY: nothing else interrupts it."""


class _Locks:
    """The locks that a session has."""

    def __init__(self, channel: str) -> None:
        self._channel = channel
        self._held = set[str]()

    def request(self, names: Collection[str]) -> tuple[str, list[str]]:
        """Return the parameters of `_LOCK` for the names that are not held."""
        return self._channel, [name for name in names if name not in self._held]

    def add(self, rows: Iterable[Any], names: Collection[str]) -> set[str]:
        """Read the rows of `_LOCK`. Return which of the names are held."""
        # NULL: there is no table, which the next statement reports.
        self._held |= {read_text(name) for name, granted in rows if granted is not False}
        return self._held & set(names)

    def release(self, name: str) -> tuple[str, str]:
        """Return the parameters of `_UNLOCK`."""
        self._held.discard(name)
        return self._channel, name


class _AsyncConnection:
    """An async connection in autocommit mode."""

    def __init__(self, connection: psycopg.AsyncConnection[Any], channel: str) -> None:
        self._connection = connection
        self._locks = _Locks(channel)

    async def lock(self, names: Collection[str]) -> set[str]:
        """Return the names whose lock this connection has; see `RelayConnection.lock`."""
        return self._locks.add(await self.execute(_LOCK, self._locks.request(names)), names)

    async def unlock(self, name: str) -> None:
        """Release a lock; see `RelayConnection.unlock`."""
        await self.execute(_UNLOCK, self._locks.release(name))

    async def execute(self, sql: str, params: Any) -> Rows:
        """Execute a statement; see `RelayConnection.execute`."""
        async with psycopg.AsyncCursor(self._connection, row_factory=tuple_row) as cursor:
            await cursor.execute(sql.encode(), params)
            return await cursor.fetchall() if cursor.description else ()

    async def wait(
        self,
        stop: asyncio.Event,
        woken: asyncio.Event,  # noqa: ARG002 - NOTIFY comes from all processes
        seconds: float,
        serves: Callable[[str], bool],
    ) -> None:
        """Wait until a row is committed, `stop` is set, or the time has passed; see `RelayConnection.wait`."""
        notified = asyncio.ensure_future(self._wait_for_notify(min(seconds, LONGEST_WAIT), serves))
        stopped = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({notified, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if notified.done():
                notified.result()
        finally:
            stopped.cancel()
            notified.cancel()
            await asyncio.gather(notified, stopped, return_exceptions=True)

    async def _wait_for_notify(self, seconds: float, serves: Callable[[str], bool]) -> None:
        until = monotonic() + seconds
        while (left := until - monotonic()) > 0:
            found = [one async for one in self._connection.notifies(timeout=left, stop_after=1)]
            if any(serves(one.payload) for one in found):
                return


class _BlockingConnection:
    """A blocking connection in autocommit mode, which a thread uses."""

    def __init__(self, connection: psycopg.Connection[Any], channel: str, thread: RelayThread) -> None:
        self._connection = connection
        self._locks = _Locks(channel)
        self._thread = thread

    async def lock(self, names: Collection[str]) -> set[str]:
        """Return the names whose lock this connection has; see `RelayConnection.lock`."""
        return self._locks.add(await self.execute(_LOCK, self._locks.request(names)), names)

    async def unlock(self, name: str) -> None:
        """Release a lock; see `RelayConnection.unlock`."""
        await self.execute(_UNLOCK, self._locks.release(name))

    async def execute(self, sql: str, params: Any) -> Rows:
        """Execute a statement; see `RelayConnection.execute`."""
        return await self._thread.run(_run, self._connection, sql, params)

    async def wait(
        self,
        stop: asyncio.Event,
        woken: asyncio.Event,  # noqa: ARG002 - NOTIFY comes from all processes
        seconds: float,
        serves: Callable[[str], bool],
    ) -> None:
        """Wait until a row is committed, `stop` is set, or the time has passed; see `RelayConnection.wait`."""
        until = monotonic() + min(seconds, LONGEST_WAIT)
        while not stop.is_set() and (left := until - monotonic()) > 0:
            if await self._thread.run(self._is_notified, min(left, SHORT_WAIT), serves):
                return

    def _is_notified(self, seconds: float, serves: Callable[[str], bool]) -> bool:
        found = list(self._connection.notifies(timeout=seconds, stop_after=1))
        return any(serves(one.payload) for one in found)


@asynccontextmanager
async def connect_async(open_connection: Callable[[], Any], channel: str) -> AsyncGenerator[_AsyncConnection]:
    """Listen on an async connection. At the end it is as it was, because a pool may get it back."""
    opened = open_connection()
    manager: AbstractAsyncContextManager[psycopg.AsyncConnection[Any]] = (
        opened if isinstance(opened, AbstractAsyncContextManager) else await opened
    )
    async with manager as connection:
        before, timeout = connection.autocommit, None
        cursor = psycopg.AsyncCursor(connection, row_factory=tuple_row)
        try:
            await connection.set_autocommit(True)
            timeout = _read_timeout(await (await cursor.execute(_READ_TIMEOUT)).fetchone())
            await cursor.execute(_listen(channel))
            if timeout is not None:
                await cursor.execute(_SET_TIMEOUT, (str(SESSION_TIMEOUT),))
            yield _AsyncConnection(connection, channel)
        finally:
            with suppress(psycopg.Error):  # the connection is lost
                await cursor.execute("UNLISTEN *")
                await cursor.execute(_UNLOCK_ALL)
                if timeout is not None:
                    await cursor.execute(_SET_TIMEOUT, (timeout,))
                await connection.set_autocommit(before)


@asynccontextmanager
async def connect(
    open_connection: Callable[[], AbstractContextManager[psycopg.Connection[Any]]], channel: str
) -> AsyncGenerator[_BlockingConnection]:
    """Listen on a blocking connection, in a thread; see `connect_async`."""
    thread, manager = RelayThread(), open_connection()
    try:
        connection = await thread.run(manager.__enter__)
        try:
            autocommit, timeout = connection.autocommit, list[str]()
            try:
                await thread.run(_begin, connection, channel, timeout)
                yield _BlockingConnection(connection, channel, thread)
            finally:
                await thread.run(_end, connection, autocommit, timeout)
        finally:
            await thread.run(manager.__exit__, None, None, None)
    finally:
        thread.close()


def _begin(connection: psycopg.Connection[Any], channel: str, timeout: list[str]) -> None:
    """Listen. Add the former time-out of the session to `timeout`, unless the server has none.

    A caller that is cancelled gets no result, and this thread goes on. `_end` follows in the same thread.
    """
    connection.autocommit = True
    cursor = psycopg.Cursor(connection, row_factory=tuple_row)
    before = _read_timeout(cursor.execute(_READ_TIMEOUT).fetchone())
    cursor.execute(_listen(channel))
    if before is not None:
        timeout.append(before)
        cursor.execute(_SET_TIMEOUT, (str(SESSION_TIMEOUT),))


def _end(connection: psycopg.Connection[Any], autocommit: bool, timeout: list[str]) -> None:
    """Set the connection back."""
    with suppress(psycopg.Error):  # the connection is lost
        cursor = psycopg.Cursor(connection, row_factory=tuple_row)
        cursor.execute("UNLISTEN *")
        cursor.execute(_UNLOCK_ALL)
        for before in timeout:
            cursor.execute(_SET_TIMEOUT, (before,))
        connection.autocommit = autocommit


def _run(connection: psycopg.Connection[Any], sql: str, params: Any) -> Rows:
    with psycopg.Cursor(connection, row_factory=tuple_row) as cursor:
        cursor.execute(sql.encode(), params)
        return cursor.fetchall() if cursor.description else ()


def _listen(channel: str) -> sql.Composed:
    return sql.SQL("LISTEN {}").format(sql.Identifier(shorten_channel(channel)))


def _read_timeout(row: Any) -> str | None:
    """Return the time-out of the session, or None if the server knows none."""
    return None if row[0] is None else read_text(row[0])
