"""Clients of our own: never decoding, never retrying by themselves, none of their steps without a time-out."""

from __future__ import annotations

from contextlib import suppress
from inspect import signature
from typing import Any, cast

import redis
import redis.asyncio as aredis
import redis.asyncio.connection as aconnection
from redis import connection
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import MasterNotFoundError as AsyncMasterNotFoundError
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from idemgate.core.backoff import SOCKET_TIMEOUT
from idemgate.errors import NotConfigured
from idemgate.store.endpoint import Endpoint, verified

__all__ = ["async_client", "close_client", "sync_client"]

# redis-py annotates some of what it offers, and not as it is used.
_redis, _aredis = cast(Any, redis), cast(Any, aredis)
CONNECTIONS = 64
"""Most connections of one client of ours; further calls wait for one."""
_OURS: dict[str, Any] = {"decode_responses": False, "protocol": 2}
"""RESP2 everywhere: replies then have one shape, and connecting needs no HELLO."""
_ASYNC_CLASSES = {
    connection.Connection: aconnection.Connection,
    connection.SSLConnection: aconnection.SSLConnection,
    connection.UnixDomainSocketConnection: aconnection.UnixDomainSocketConnection,
}


def sync_client(endpoint: Endpoint, seconds: float = SOCKET_TIMEOUT, **over: Any) -> Any:
    """A blocking client of ours, not for clusters; connecting, sending, reading take at most `seconds` each. `over`
    replaces settings."""
    settings = _ours(endpoint, Retry(NoBackoff(), 0), seconds, over)
    if endpoint.kind == "sentinel":
        return _master(_Sentinels, endpoint, settings)
    cls, timeout = settings.pop("connection_class", connection.Connection), settings["socket_connect_timeout"]
    pool = _redis.BlockingConnectionPool(CONNECTIONS, timeout=timeout, connection_class=cls, **settings)
    return redis.Redis.from_pool(pool)


def async_client(endpoint: Endpoint, seconds: float = SOCKET_TIMEOUT, **over: Any) -> Any:
    """As `sync_client`, an awaiting one, for the running event loop only."""
    settings = _ours(endpoint, AsyncRetry(NoBackoff(), 0), seconds, over)
    _check_awaiting(settings)
    if endpoint.kind == "sentinel":
        return _master(_AsyncSentinels, endpoint, settings)
    cls = _ASYNC_CLASSES[settings.pop("connection_class", connection.Connection)]
    timeout = settings["socket_connect_timeout"]
    pool = _aredis.BlockingConnectionPool(CONNECTIONS, timeout=timeout, connection_class=cls, **settings)
    return aredis.Redis.from_pool(pool)


async def close_client(client: Any) -> None:
    """Closes an awaiting client of ours, and its clients to the sentinels, which redis-py leaves open."""
    await client.aclose()
    finder = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    for one in finder.sentinels if finder else ():
        await one.aclose()


def _ours(endpoint: Endpoint, retry: object, seconds: float, over: dict[str, Any]) -> dict[str, Any]:
    timeout = min(seconds, SOCKET_TIMEOUT)
    times = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
    made = endpoint.settings | _OURS | times | {"retry": retry} | over
    if made.get("connection_class") is connection.SSLConnection and verified(endpoint):
        made.setdefault("ssl_check_hostname", True)  # redis-py 5 leaves it out
    if made.get("connection_class") is not connection.UnixDomainSocketConnection:
        made["socket_keepalive"] = True
    return made


def _check_awaiting(settings: dict[str, Any]) -> None:
    known = signature(cast(Any, aconnection).SSLConnection).parameters
    for name in settings:
        if name.startswith("ssl_") and name not in known:
            raise NotConfigured(
                f"{name} is a setting of blocking clients only in redis-py {redis.__version__}, so the awaiting face "
                f"(gate.aio) cannot connect as safely. Leave it out, or use the blocking face"
            )


def _takes_tls(settings: dict[str, Any]) -> bool:
    return settings.pop("connection_class", None) is connection.SSLConnection


class _Sentinels(Sentinel):
    """What redis-py says when none knows the master may quote what the sentinels are asked with, such as a password."""

    def discover_master(self, service_name: str) -> Any:
        with suppress(MasterNotFoundError):
            return cast(Any, super()).discover_master(service_name)
        raise _no_master(self, service_name)


class _AsyncSentinels(AsyncSentinel):
    async def discover_master(self, service_name: str) -> Any:
        with suppress(AsyncMasterNotFoundError):
            return await cast(Any, super()).discover_master(service_name)
        raise _no_master(self, service_name)


def _no_master(sentinels: Any, service: str) -> MasterNotFoundError:
    settings = [one.connection_pool.connection_kwargs for one in sentinels.sentinels]
    asked = ", ".join(f"{one['host']}:{one['port']}" for one in settings)
    return MasterNotFoundError(f"No master found for {service!r} by any of the sentinels {asked}")


def _master(sentinel: Any, endpoint: Endpoint, settings: dict[str, Any]) -> Any:
    theirs = dict(endpoint.sentinel_settings)
    if _takes_tls(theirs):
        theirs["ssl"] = True
    theirs |= {name: settings[name] for name in (*_OURS, "retry", "socket_timeout", "socket_connect_timeout")}
    tls = _takes_tls(settings)
    return sentinel(list(endpoint.nodes), sentinel_kwargs=theirs).master_for(endpoint.service, ssl=tls, **settings)
