"""redis-py clients with fixed settings: no decoding, no retries, and a timeout for every step."""

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
from idemgate.store.endpoint import Endpoint, verifies_certificate

__all__ = ["async_client", "close_client", "sync_client"]

# redis-py's annotations are incomplete, and some do not match its use.
_redis, _aredis = cast(Any, redis), cast(Any, aredis)
CONNECTIONS = 64
"""The most connections of one client. Further calls wait for one."""
_FIXED_SETTINGS: dict[str, Any] = {"decode_responses": False, "protocol": 2}
"""RESP2 gives replies one shape on every version, and needs no HELLO to connect."""
_ASYNC_CLASSES = {
    connection.Connection: aconnection.Connection,
    connection.SSLConnection: aconnection.SSLConnection,
    connection.UnixDomainSocketConnection: aconnection.UnixDomainSocketConnection,
}


def sync_client(endpoint: Endpoint, seconds: float = SOCKET_TIMEOUT, **overrides: Any) -> Any:
    """Return a blocking client. Not for clusters.

    Args:
        endpoint: the store.
        seconds: the timeout for each of connecting, sending and reading, at most `SOCKET_TIMEOUT`.
        overrides: settings to replace.
    """
    settings = _client_settings(endpoint, Retry(NoBackoff(), 0), seconds, overrides)
    if endpoint.kind == "sentinel":
        return _sentinel_master(_Sentinels, endpoint, settings)
    cls, timeout = settings.pop("connection_class", connection.Connection), settings["socket_connect_timeout"]
    pool = _redis.BlockingConnectionPool(CONNECTIONS, timeout=timeout, connection_class=cls, **settings)
    return redis.Redis.from_pool(pool)


def async_client(endpoint: Endpoint, seconds: float = SOCKET_TIMEOUT, **overrides: Any) -> Any:
    """Return an asynchronous client for the running event loop, with the parameters of `sync_client`.

    Raises:
        NotConfigured: redis-py supports a TLS setting in blocking clients only.
    """
    settings = _client_settings(endpoint, AsyncRetry(NoBackoff(), 0), seconds, overrides)
    _check_async_settings(settings)
    if endpoint.kind == "sentinel":
        return _sentinel_master(_AsyncSentinels, endpoint, settings)
    cls = _ASYNC_CLASSES[settings.pop("connection_class", connection.Connection)]
    timeout = settings["socket_connect_timeout"]
    pool = _aredis.BlockingConnectionPool(CONNECTIONS, timeout=timeout, connection_class=cls, **settings)
    return aredis.Redis.from_pool(pool)


async def close_client(client: Any) -> None:
    """Close an asynchronous client and its clients to the sentinels, which redis-py leaves open."""
    await client.aclose()
    manager = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    for sentinel in manager.sentinels if manager else ():
        await sentinel.aclose()


def _client_settings(endpoint: Endpoint, retry: object, seconds: float, overrides: dict[str, Any]) -> dict[str, Any]:
    timeout = min(seconds, SOCKET_TIMEOUT)
    timeouts = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
    settings = endpoint.settings | _FIXED_SETTINGS | timeouts | {"retry": retry} | overrides
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
    """A Sentinel whose error for a missing master names no settings. redis-py's error may quote a password."""

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
    addresses = ", ".join(f"{one['host']}:{one['port']}" for one in settings)
    return MasterNotFoundError(f"No master found for {service!r} by any of the sentinels {addresses}")


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
