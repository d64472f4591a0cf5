"""The few requests that are sent to ZooKeeper, typed and awaited; many may be under way at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from time import monotonic
from typing import Any, Protocol, TypeVar, cast

from kazoo.client import KazooClient  # type: ignore[import-untyped]  # pyright: ignore[reportMissingTypeStubs]
from kazoo.exceptions import (  # type: ignore[import-untyped]  # pyright: ignore[reportMissingTypeStubs]
    AuthFailedError,
    ConnectionLoss,
    InvalidACLError,
    KazooException,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
    SessionExpiredError,
)

from idemgate import StoreError, StoreUnavailable
from idemgate.errors import ServerRejected

__all__ = ["Wire"]

T = TypeVar("T")
Watch = Callable[[object], None]
PAUSE = 0.1
"""Seconds from a lost connection to the next try."""
LOST: tuple[type[Exception], ...] = (ConnectionLoss, SessionExpiredError)
"""What a request raises if its connection or its session ends before the reply."""


class _Result(Protocol):
    value: Any
    exception: BaseException | None

    def rawlink(self, callback: Callable[[Any], None]) -> None: ...


class _Stat(Protocol):
    pzxid: int


class _Started(Protocol):
    def wait(self, timeout: float) -> bool: ...


class _Client(Protocol):
    """As much of kazoo's client as is used; it has no types of its own."""

    connected: bool

    def start_async(self) -> _Started: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...
    def add_listener(self, listener: Callable[[object], object]) -> None: ...
    def ensure_path_async(self, path: str) -> _Result: ...
    def get_async(self, path: str, watch: Watch) -> _Result: ...
    def get_children_async(self, path: str, watch: Watch, include_data: bool) -> _Result: ...
    def create_async(self, path: str, value: bytes, *, ephemeral: bool) -> _Result: ...
    def delete_async(self, path: str) -> _Result: ...


class Wire:
    """One session with ZooKeeper, of the event loop it is opened in.

    `noticed` is called there when the connection changes, and when what was read does: once for each time it was read.
    """

    def __init__(self, hosts: str, session: float, options: dict[str, Any], noticed: Callable[[], None]) -> None:
        self._client = cast("_Client", KazooClient(hosts=hosts, timeout=session, **options))
        self._loop = asyncio.get_running_loop()
        self._noticed = noticed
        self._watch: Watch = self._heard  # one object: of equal watches on a node only one is kept
        self._client.add_listener(self._heard)

    def _heard(self, _event: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody waits for this any more
            self._loop.call_soon_threadsafe(self._noticed)

    async def open(self, seconds: float, *paths: str) -> None:
        """Connects, and makes the paths if they are missing."""
        await asyncio.to_thread(self._client.start_async().wait, seconds)
        if not self._client.connected:
            raise StoreUnavailable(f"no answer from ZooKeeper within {seconds:g} s", "no")
        await self.retry(seconds, lambda: self._make(paths))

    async def _make(self, paths: Iterable[str]) -> None:
        for path in paths:
            await self._of(self._client.ensure_path_async(path))

    async def close(self) -> None:
        """Ends the session; its nodes are gone at once, if the server can be reached."""
        await asyncio.to_thread(self._client.stop)
        await asyncio.to_thread(self._client.close)

    async def within(self, seconds: float, requests: Coroutine[Any, Any, T]) -> T:
        """What the requests bring; StoreUnavailable, or ServerRejected if asking again cannot help."""
        if not self._client.connected:  # kazoo would keep them, and send them when nobody wants them any more
            requests.close()
            raise StoreUnavailable("not connected to ZooKeeper", "no")
        try:
            async with asyncio.timeout(seconds):
                return await requests
        except (KazooException, TimeoutError) as error:
            raise _translated(error, seconds) from error

    async def retry(self, seconds: float, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """What the requests bring. Until the time is over they are sent again if the connection is lost meanwhile."""
        end = monotonic() + seconds
        while True:
            try:
                return await self.within(max(end - monotonic(), PAUSE), ask())
            except StoreUnavailable as error:
                lost = error.__cause__ is None or isinstance(error.__cause__, LOST)  # no cause: not connected
                if not lost or monotonic() + PAUSE >= end:
                    raise
            await asyncio.sleep(PAUSE)

    # -- requests -------------------------------------------------------------------------------------------------

    async def children(self, path: str) -> tuple[list[str], int]:
        """Names, and the number of the last transaction that changed them."""
        names, stat = cast(
            "tuple[list[str], _Stat]", await self._of(self._client.get_children_async(path, self._watch, True))
        )
        return names, stat.pzxid

    async def text(self, path: str) -> str | None:
        """What a node says; None if there is none."""
        try:
            data, _ = cast("tuple[bytes, _Stat]", await self._of(self._client.get_async(path, self._watch)))
        except NoNodeError:
            return None
        return data.decode()

    async def create(self, path: str, text: str) -> bool:
        """Makes a node that lasts as long as this session; False if there is one."""
        try:
            await self._of(self._client.create_async(path, text.encode(), ephemeral=True))
        except NodeExistsError:
            return False
        return True

    async def delete(self, path: str) -> None:
        """Removes a node, if there is one."""
        with suppress(NoNodeError):
            await self._of(self._client.delete_async(path))

    def _of(self, result: _Result) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._loop.create_future()

        def settle() -> None:
            if future.done():
                return
            if result.exception is None:
                future.set_result(result.value)
            else:
                future.set_exception(result.exception)

        def ready(_: object) -> None:  # in a thread of kazoo's
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(settle)

        result.rawlink(ready)
        return future


def _translated(error: Exception, seconds: float) -> StoreError:
    if isinstance(error, NoAuthError | AuthFailedError | InvalidACLError):
        return ServerRejected(f"ZooKeeper refused: {type(error).__name__} {error}")
    if isinstance(error, TimeoutError):
        return StoreUnavailable(f"no answer from ZooKeeper within {seconds:g} s", "unknown")
    return StoreUnavailable(f"ZooKeeper: {type(error).__name__} {error}", "unknown")
