"""Where the store is: a URL or a client of the user's, reduced to what is needed to make clients of our own.

A client handed in by the user is never used itself: ours never decode replies, never retry by themselves and have
time-outs, since each of those breaks the guard (a reply that fails to decode after its script ran, a script run
eleven times, a call that never ends). Where its settings cannot be carried over, it is refused with the reason before
anything runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, cast
from urllib.parse import parse_qsl, unquote, urlsplit

import redis
import redis.asyncio as aredis
import redis.asyncio.connection as aconnection
import redis.asyncio.sentinel as asentinel
from redis import connection, sentinel
from redis.asyncio.cluster import ClusterNode as AsyncClusterNode
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode
from redis.retry import Retry

from idemgate.errors import BadInput, NotConfigured

__all__ = ["Endpoint", "async_client", "of_client", "of_url", "one_node", "sync_client"]

# redis-py annotates some of what it offers, and not as it is used.
_redis, _aredis = cast(Any, redis), cast(Any, aredis)
SOCKET_TIMEOUT = 2.0
CONNECTIONS = 64
"""Most connections of one client of ours; further calls wait for one."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`kind` says how to reach it, `nodes` are host and port of cluster nodes or sentinels, `settings` those of a
    connection."""

    kind: Literal["single", "cluster", "sentinel"]
    settings: dict[str, Any] = field(repr=False)
    nodes: tuple[tuple[str, int], ...] = ()
    service: str = ""
    sentinel_settings: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)

    def __str__(self) -> str:
        if self.kind != "single":
            return f"{self.kind} {', '.join(f'{host}:{port}' for host, port in self.nodes)}"
        path = self.settings.get("path")
        return str(path) if path else f"{self.settings.get('host', 'localhost')}:{self.settings.get('port', 6379)}"


# -- from a URL -------------------------------------------------------------------------------------------------------

_SCHEMES = "redis://, rediss://, unix://, redis+cluster://, rediss+cluster://, redis+sentinel://, rediss+sentinel://, embedded://"


def of_url(url: str) -> Endpoint:
    """redis, rediss and unix URLs as redis-py reads them; redis+cluster://h1:p1,h2:p2; redis+sentinel://h1:p1,h2:p2/service/db."""
    scheme = urlsplit(url).scheme
    base, _, topology = scheme.partition("+")
    if (
        base not in ("redis", "rediss", "unix")
        or topology not in ("", "cluster", "sentinel")
        or (base == "unix" and topology)
    ):
        raise BadInput("url", _without_secrets(url), "not a URL of a store", f"Use one of {_SCHEMES}")
    if topology:
        return _of_many(url, base, topology)
    try:
        settings = cast("dict[str, Any]", cast(Any, connection).parse_url(url))
    except ValueError as error:
        raise BadInput("url", _without_secrets(url), str(error), f"Use one of {_SCHEMES}") from None
    return Endpoint("single", _kept(settings, "url"))


def _of_many(url: str, base: str, topology: str) -> Endpoint:
    _, _, rest = url.partition("://")
    authority, _, path = rest.partition("/")
    path, _, query = path.partition("?")
    userinfo, _, hosts = authority.rpartition("@")
    settings: dict[str, Any] = dict(parse_qsl(query))
    if userinfo:
        username, _, password = userinfo.partition(":")
        settings |= {"username": unquote(username) or None, "password": unquote(password)}
    nodes = tuple(_node(url, host, 26379 if topology == "sentinel" else 6379) for host in hosts.split(","))
    parsed = _kept(settings, "url")
    if base == "rediss":
        parsed["connection_class"] = connection.SSLConnection
    if topology == "cluster":
        return Endpoint("cluster", parsed, nodes)
    service, _, db = path.partition("/")
    if not service:
        raise BadInput("url", _without_secrets(url), "no service named", "Use redis+sentinel://host:port/service")
    return Endpoint("sentinel", parsed | {"db": int(db or 0)}, nodes, service)


def _node(url: str, text: str, port: int) -> tuple[str, int]:
    host, separator, number = text.rpartition(":")
    if not separator:
        host, number = text, str(port)
    if not host or not number.isdigit():
        raise BadInput(
            "url",
            _without_secrets(url),
            f"{text!r} is not host:port",
            "Separate nodes by commas, as in h1:6379,h2:6379",
        )
    return host.strip("[]"), int(number)


def _without_secrets(url: object) -> str:
    head, separator, tail = str(url).rpartition("@")
    return f"{head.partition('://')[0]}://***@{tail}" if separator else str(url)


# -- from a client ----------------------------------------------------------------------------------------------------

_KEPT = frozenset(
    {
        "host", "port", "path", "db", "username", "password", "credential_provider", "client_name",
        "socket_keepalive", "socket_keepalive_options", "connection_class",
    }
)  # fmt: skip
# Ours, whatever the user's client does: no decoding, no retries of redis-py, our time-outs and protocol.
_IGNORED = frozenset(
    [
        "decode_responses",
        "encoding",
        "encoding_errors",
        "retry",
        "retry_on_timeout",
        "retry_on_error",
        "socket_timeout",
        "socket_connect_timeout",
        "socket_read_size",
        "health_check_interval",
        "protocol",
        "parser_class",
        "max_connections",
        "lib_name",
        "lib_version",
        "driver_info",
        "legacy_responses",
        "command_packer",
        "event_dispatcher",
        "timeout",
        "maint_notifications_config",
        "maint_notifications_pool_handler",
        "maintenance_state",
        "orig_host_address",
        "maintenance_notification_hash",
        "orig_socket_timeout",
        "orig_socket_connect_timeout",
        "socket_type",
        "oss_cluster_maint_notifications_handler",
        "himport_registry",
        "is_master",
        "connection_pool",
        "single_connection_client",
        "cache",
        "cache_config",
        "response_callbacks",
        "read_from_replicas",
        "load_balancing_strategy",
        "auto_close_connection_pool",
    ]
)
_CLASSES = {
    aconnection.Connection: connection.Connection,
    aconnection.SSLConnection: connection.SSLConnection,
    aconnection.UnixDomainSocketConnection: connection.UnixDomainSocketConnection,
    sentinel.SentinelManagedConnection: connection.Connection,
    sentinel.SentinelManagedSSLConnection: connection.SSLConnection,
    asentinel.SentinelManagedConnection: connection.Connection,
    asentinel.SentinelManagedSSLConnection: connection.SSLConnection,
}


def of_client(client: object) -> Endpoint:
    """The endpoint of a redis-py client, sync or async; NotConfigured with the reason if its settings cannot be
    carried over."""
    if isinstance(client, redis.RedisCluster | aredis.RedisCluster):
        return _of_cluster(client)
    if not isinstance(client, redis.Redis | aredis.Redis):
        raise _refused(client, "is not a client of redis-py (redis.Redis, redis.RedisCluster or their asyncio twins)")
    pool = cast(Any, client).connection_pool
    kwargs = cast("dict[str, Any]", dict(pool.connection_kwargs))
    kwargs["connection_class"] = pool.connection_class
    if isinstance(pool, sentinel.SentinelConnectionPool | asentinel.SentinelConnectionPool):
        managers = cast("list[Any]", cast(Any, pool).sentinel_manager.sentinels)
        addresses = [manager.connection_pool.connection_kwargs for manager in managers]
        nodes = tuple((address["host"], int(address["port"])) for address in addresses)
        kwargs.pop("connection_pool", None)
        return Endpoint(
            "sentinel",
            _kept(kwargs, client),
            nodes,
            str(cast(Any, pool).service_name),
            _kept(addresses[0], client, nodes=True),
        )
    return Endpoint("single", _kept(kwargs, client))


def _of_cluster(client: object) -> Endpoint:
    manager = cast(Any, client).nodes_manager
    kwargs = cast("dict[str, Any]", dict(manager.connection_kwargs))
    kwargs.pop("redis_connect_func", None)  # the cluster client's own hook, not the user's
    nodes = tuple((node.host, int(node.port)) for node in manager.startup_nodes.values())
    return Endpoint("cluster", _kept(kwargs, client, nodes=True), nodes)


def _kept(kwargs: dict[str, Any], client: object, nodes: bool = False) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in kwargs.items():
        if value is None or name in _IGNORED or (nodes and name in ("host", "port", "db")):
            continue
        if name not in _KEPT and not name.startswith("ssl"):
            raise _refused(
                client,
                f"has the setting {name}, which cannot be carried over to a client that is safe for idemgate",
            )
        kept[name] = value
    used = kept.pop("connection_class", None)
    if used is not None:
        used = _CLASSES.get(used, used)
        if used not in (
            connection.Connection,
            connection.SSLConnection,
            connection.UnixDomainSocketConnection,
        ):
            raise _refused(
                client,
                f"connects through {used!r}, which is not one of redis-py's own connections",
            )
        kept["connection_class"] = used
    if kept.pop("ssl", False):
        kept["connection_class"] = connection.SSLConnection
    return kept


def _refused(client: object, why: str) -> NotConfigured:
    shown = "the URL" if client == "url" else f"the client {type(client).__module__}.{type(client).__qualname__}"
    return NotConfigured(f"{shown} {why}. Pass a URL instead, or a plain redis.Redis / redis.RedisCluster")


# -- clients of our own -----------------------------------------------------------------------------------------------

_OURS: dict[str, Any] = {
    "decode_responses": False,
    "socket_timeout": SOCKET_TIMEOUT,
    "socket_connect_timeout": SOCKET_TIMEOUT,
    "protocol": 2,
}
"""RESP2 everywhere: replies then have one shape, and connecting needs no HELLO."""
_ASYNC_CLASSES = {sync: awaiting for awaiting, sync in list(_CLASSES.items())[:3]}


def _ours(settings: dict[str, Any], retry: object, over: dict[str, Any]) -> dict[str, Any]:
    made = settings | _OURS | {"retry": retry} | over
    if settings.get("connection_class") is not connection.UnixDomainSocketConnection:
        made["socket_keepalive"] = True
    return made


def sync_client(endpoint: Endpoint, **over: Any) -> Any:
    """A blocking client of ours. `over` replaces settings (a blocking read needs another time-out)."""
    settings = _ours(endpoint.settings, Retry(NoBackoff(), 0), over)
    if endpoint.kind == "cluster":
        return _cluster(redis.RedisCluster, ClusterNode, endpoint, settings)
    if endpoint.kind == "sentinel":
        ssl_used = settings.pop("connection_class", None) is connection.SSLConnection
        made = _redis.Sentinel(list(endpoint.nodes), sentinel_kwargs=_OURS | endpoint.sentinel_settings)
        return made.master_for(endpoint.service, ssl=ssl_used, **settings)
    cls = settings.pop("connection_class", connection.Connection)
    pool = _redis.BlockingConnectionPool(CONNECTIONS, timeout=SOCKET_TIMEOUT, connection_class=cls, **settings)
    return redis.Redis.from_pool(pool)


def async_client(endpoint: Endpoint, **over: Any) -> Any:
    """An awaiting client of ours, for the running event loop only."""
    settings = _ours(endpoint.settings, AsyncRetry(NoBackoff(), 0), over)
    if endpoint.kind == "cluster":
        return _cluster(aredis.RedisCluster, AsyncClusterNode, endpoint, settings)
    if endpoint.kind == "sentinel":
        ssl_used = settings.pop("connection_class", None) is connection.SSLConnection
        made = _aredis.Sentinel(list(endpoint.nodes), sentinel_kwargs=_OURS | endpoint.sentinel_settings)
        return made.master_for(endpoint.service, ssl=ssl_used, **settings)
    cls = _ASYNC_CLASSES[settings.pop("connection_class", connection.Connection)]
    pool = _aredis.BlockingConnectionPool(CONNECTIONS, timeout=SOCKET_TIMEOUT, connection_class=cls, **settings)
    return aredis.Redis.from_pool(pool)


def _cluster(client: Any, node: Any, endpoint: Endpoint, settings: dict[str, Any]) -> Any:
    settings["ssl"] = settings.pop("connection_class", None) is connection.SSLConnection
    settings.pop("db", None)
    if int(redis.__version__.partition(".")[0]) < 6:
        settings["cluster_error_retry_attempts"] = 0
    return client(
        startup_nodes=[node(host, port) for host, port in endpoint.nodes],
        require_full_coverage=False,
        **settings,
    )


def one_node(endpoint: Endpoint, number: int) -> Endpoint:
    """A cluster's node as an endpoint of its own: plain Pub/Sub reaches every node, so any of them will do."""
    if endpoint.kind != "cluster":
        return endpoint
    host, port = endpoint.nodes[number % len(endpoint.nodes)]
    return Endpoint("single", endpoint.settings | {"host": host, "port": port})
