"""redis-py clients with fixed settings: no decoding, no retries, and a timeout for every step."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from inspect import signature
from queue import Empty, SimpleQueue
from typing import Any, cast

import redis
import redis.asyncio as aredis
import redis.asyncio.connection as aconnection
import redis.exceptions as rx
from redis import connection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from idemgate.core.backoff import SOCKET_TIMEOUT
from idemgate.core.clock import monotonic
from idemgate.core.version import VERSION
from idemgate.errors import NotConfigured
from idemgate.store.endpoint import Endpoint, verifies_certificate

__all__ = ["async_client", "async_pool", "close_client", "close_sentinels", "find_master", "sync_client", "sync_pool"]

# redis-py's annotations are incomplete, and some do not match its use.
_redis, _aredis = cast(Any, redis), cast(Any, aredis)
_FIXED_SETTINGS: dict[str, Any] = {"decode_responses": False, "protocol": 2}
"""RESP2 gives replies one shape on every version, and needs no HELLO to connect."""
with suppress(ImportError):  # redis-py before 7.2
    from redis.driver_info import DriverInfo

    # One for all connections: without it redis-py reads its own metadata for each, which takes a millisecond.
    _FIXED_SETTINGS["driver_info"] = DriverInfo().add_upstream_driver("idemgate", VERSION)
_ASYNC_CLASSES = {
    connection.Connection: aconnection.Connection,
    connection.SSLConnection: aconnection.SSLConnection,
    connection.UnixDomainSocketConnection: aconnection.UnixDomainSocketConnection,
}


def sync_pool(endpoint: Endpoint, seconds: float) -> Any:
    """Return a redis-py pool of blocking connections. Not for clusters.

    `store/connection.py` needs only its settings. A client costs a millisecond more, for its table of reply parsers.

    Args:
        endpoint: the store.
        seconds: the timeout for each of connecting, sending and reading, at most `SOCKET_TIMEOUT`.
    """
    settings = _connection_settings(endpoint, Retry(NoBackoff(), 0), seconds)
    if endpoint.kind == "sentinel":
        return _sentinel_master(_Sentinels, endpoint, settings).connection_pool
    cls = settings.pop("connection_class", connection.Connection)
    return _redis.ConnectionPool(connection_class=cls, **settings)


def sync_client(endpoint: Endpoint, seconds: float = SOCKET_TIMEOUT) -> Any:
    """Return a blocking client on a `sync_pool`."""
    return redis.Redis.from_pool(sync_pool(endpoint, seconds))


def async_pool(endpoint: Endpoint, seconds: float) -> Any:
    """Return a redis-py pool of asynchronous connections, with the parameters of `sync_pool`.

    Raises:
        NotConfigured: redis-py supports a TLS setting in blocking clients only.
    """
    settings = _connection_settings(endpoint, AsyncRetry(NoBackoff(), 0), seconds)
    _check_async_settings(settings)
    if endpoint.kind == "sentinel":
        return _sentinel_master(_AsyncSentinels, endpoint, settings).connection_pool
    cls = _ASYNC_CLASSES[settings.pop("connection_class", connection.Connection)]
    return _aredis.ConnectionPool(connection_class=cls, **settings)


def async_client(endpoint: Endpoint) -> Any:
    """Return an asynchronous client for the running event loop, on an `async_pool`."""
    return aredis.Redis.from_pool(async_pool(endpoint, SOCKET_TIMEOUT))


def find_master(pool: Any, seconds: float) -> tuple[str, int] | None:
    """Return host and port of the master, for the pool of a blocking client of Sentinel. None for other pools.

    Raises:
        MasterNotFoundError: no sentinel named the master within `seconds`.
    """
    sentinels = getattr(pool, "sentinel_manager", None)
    return None if sentinels is None else sentinels.discover_master(pool.service_name, seconds)


async def close_client(client: Any) -> None:
    """Close an asynchronous client and its clients to the sentinels, which redis-py leaves open."""
    await client.aclose()
    await close_sentinels(client.connection_pool)


async def close_sentinels(pool: Any) -> None:
    """Close the clients to the sentinels of an asynchronous pool, which redis-py leaves open."""
    manager = getattr(pool, "sentinel_manager", None)
    for sentinel in manager.sentinels if manager else ():
        await sentinel.aclose()


def _connection_settings(endpoint: Endpoint, retry: object, seconds: float) -> dict[str, Any]:
    timeout = min(seconds, SOCKET_TIMEOUT)
    timeouts = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
    settings = endpoint.settings | _FIXED_SETTINGS | timeouts | {"retry": retry}
    if settings.get("connection_class") is connection.SSLConnection and verifies_certificate(endpoint):
        settings.setdefault("ssl_check_hostname", True)  # not the default in redis-py 5
    if settings.get("connection_class") is not connection.UnixDomainSocketConnection:
        settings["socket_keepalive"] = True
    return settings


def _check_async_settings(settings: dict[str, Any]) -> None:
    supported = signature(cast(Any, aconnection).SSLConnection).parameters
    for name in settings:
        if name.startswith("ssl_") and name not in supported:
            raise NotConfigured(
                f"{name} is a setting of blocking clients only in redis-py {redis.__version__}, so the async API "
                f"(gate.aio) cannot connect as safely. Leave it out, or use the blocking API"
            )


def _pop_tls(settings: dict[str, Any]) -> bool:
    return settings.pop("connection_class", None) is connection.SSLConnection


class _Sentinels(Sentinel):
    """A Sentinel that asks all sentinels, each a moment after the one before, and takes the first answer.

    redis-py asks one after the other, and waits for the timeout of each silent one. Its error may quote a password.
    """

    def discover_master(self, service_name: str, seconds: float = SOCKET_TIMEOUT) -> tuple[str, int]:
        """Return host and port of the master, or raise MasterNotFoundError after `seconds`."""
        answers: SimpleQueue[tuple[Any, Any]] = SimpleQueue()

        def ask(one: Any) -> None:
            try:
                answers.put((one, one.sentinel_masters()))
            except Exception as error:  # noqa: BLE001 - the caller raises it
                answers.put((one, error))

        vote = _Vote(self, service_name, seconds)
        while vote.is_open:
            if (one := vote.next_to_ask()) is not None:
                threading.Thread(target=ask, args=(one,), name="idemgate-sentinel", daemon=True).start()
            with suppress(Empty):
                if (address := vote.count(*answers.get(timeout=vote.pause))) is not None:
                    return address
        raise vote.failure()


class _AsyncSentinels(AsyncSentinel):
    """The asynchronous form of `_Sentinels`."""

    async def discover_master(self, service_name: str, seconds: float = SOCKET_TIMEOUT) -> tuple[str, int]:
        vote, asking = _Vote(self, service_name, seconds), dict[asyncio.Task[Any], Any]()
        try:
            while vote.is_open:
                if (one := vote.next_to_ask()) is not None:
                    asking[asyncio.ensure_future(one.sentinel_masters())] = one
                done, _ = await asyncio.wait(asking, timeout=vote.pause, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    if (address := vote.count(asking.pop(task), task.exception() or task.result())) is not None:
                        return address
            raise vote.failure()
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)


HEAD_START = 0.05
"""Seconds until the next sentinel is asked, too. The first is the one that answered the last time."""


class _Vote:
    """One search for a master: which sentinels to ask, and what they answered."""

    def __init__(self, sentinels: Any, service: str, seconds: float) -> None:
        self._sentinels = sentinels
        self._service = service
        self._unasked: list[Any] = list(sentinels.sentinels)
        self._unanswered = len(self._unasked)
        self._refusal: Exception | None = None
        self._deadline = monotonic() + seconds

    @property
    def is_open(self) -> bool:
        """True if another answer may come in time."""
        return self._unanswered > 0 and monotonic() < self._deadline

    @property
    def pause(self) -> float:
        """The seconds to wait for an answer before the next sentinel is asked."""
        remaining = max(0.0, self._deadline - monotonic())
        return min(remaining, HEAD_START) if self._unasked else remaining

    def next_to_ask(self) -> Any:
        return self._unasked.pop(0) if self._unasked else None

    def count(self, one: Any, answer: Any) -> tuple[str, int] | None:
        """Return the address if this answer of a sentinel names the master."""
        self._unanswered -= 1
        if isinstance(answer, Exception):
            if not isinstance(answer, rx.ConnectionError | rx.TimeoutError):
                self._refusal = answer
            return None
        state = answer.get(self._service)
        if not state or not self._sentinels.check_master_state(state, self._service):
            return None
        others = [other for other in self._sentinels.sentinels if other is not one]
        self._sentinels.sentinels = [one, *others]
        return state["ip"], state["port"]

    def failure(self) -> Exception:
        """Return the error of a search without an answer. It quotes no setting."""
        if self._refusal is not None:
            return self._refusal
        settings = [one.connection_pool.connection_kwargs for one in self._sentinels.sentinels]
        addresses = ", ".join(f"{one['host']}:{one['port']}" for one in settings)
        return MasterNotFoundError(f"No master found for {self._service!r} by any of the sentinels {addresses}")


def _sentinel_master(sentinel: Any, endpoint: Endpoint, settings: dict[str, Any]) -> Any:
    sentinel_settings = dict(endpoint.sentinel_settings)
    if _pop_tls(sentinel_settings):
        sentinel_settings["ssl"] = True
    sentinel_settings |= {
        name: settings[name] for name in (*_FIXED_SETTINGS, "retry", "socket_timeout", "socket_connect_timeout")
    }
    tls = _pop_tls(settings)
    return sentinel(list(endpoint.nodes), sentinel_kwargs=sentinel_settings).master_for(
        endpoint.service, ssl=tls, **settings
    )
