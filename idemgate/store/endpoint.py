"""The endpoint of the store: the settings of a connection, from a URL (`url.py`) or from a client of the caller.

The caller's client is only read, never used. Clients of idemgate never decode replies, never retry inside redis-py, and
always have timeouts. Without that a guard fails:

- a reply that cannot be decoded raises after its script ran;
- redis-py runs one script eleven times;
- a call without a timeout never ends.

A client with a setting that cannot be copied is rejected with the reason, before any command runs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import redis
import redis.asyncio as aredis
import redis.asyncio.connection as aconnection
import redis.asyncio.sentinel as asentinel
from redis import connection, sentinel

from idemgate.errors import InvalidArgument, NotConfigured
from idemgate.store.tls import check_tls_settings

__all__ = ["Endpoint", "connection_settings", "endpoint_from_client", "pick_node", "verifies_certificate"]

log: logging.Logger = logging.getLogger("idemgate.store")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address and settings of the store.

    Attributes:
        kind: the topology.
        settings: the keyword arguments of a redis-py connection.
        nodes: host and port of each cluster node or sentinel.
        service: the name of the master that Sentinel knows.
        sentinel_settings: the keyword arguments of a connection to a sentinel.
    """

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


def verifies_certificate(endpoint: Endpoint) -> bool:
    """Return whether the server's certificate is checked when TLS is in use."""
    requirement = endpoint.settings.get("ssl_cert_reqs", "required")
    return str(getattr(requirement, "name", requirement)).lower().removeprefix("cert_") not in ("none", "0")


def pick_node(endpoint: Endpoint, number: int) -> Endpoint:
    """Return one node of a cluster as a separate endpoint. Any node will do for Pub/Sub, which reaches all nodes."""
    if endpoint.kind != "cluster":
        return endpoint
    host, port = endpoint.nodes[number % len(endpoint.nodes)]
    return Endpoint("single", endpoint.settings | {"host": host, "port": port})


_COPIED = frozenset(
    {
        "host", "port", "path", "db", "username", "password", "credential_provider", "client_name",
        "socket_keepalive", "socket_keepalive_options", "connection_class",
    }
)  # fmt: skip
# Set by idemgate for its own clients: decoding, retries, timeouts, protocol.
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


def endpoint_from_client(client: object) -> Endpoint:
    """Return the endpoint of a redis-py client, sync or async.

    Raises:
        InvalidArgument: it is no client.
        NotConfigured: a setting of the client cannot be copied. The text names it.
    """
    if isinstance(client, redis.RedisCluster | aredis.RedisCluster):
        return _endpoint_from_cluster(client)
    if not isinstance(client, redis.Redis | aredis.Redis):
        fix = "Pass 'redis://localhost:6379/0', or a redis.Redis or redis.RedisCluster, also one of redis.asyncio"
        raise InvalidArgument("store", type(client), "neither a URL nor a client of redis-py", fix)
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
            connection_settings(kwargs, client),
            nodes,
            str(cast(Any, pool).service_name),
            connection_settings(addresses[0], client, nodes=True),
        )
    return Endpoint("single", connection_settings(kwargs, client))


def _endpoint_from_cluster(client: object) -> Endpoint:
    manager = cast(Any, client).nodes_manager
    kwargs = cast("dict[str, Any]", dict(manager.connection_kwargs))
    if getattr(client, "user_on_connect_func", None) is None:
        kwargs.pop("redis_connect_func", None)  # a hook of the cluster client, not of the caller
    nodes = tuple((node.host, int(node.port)) for node in manager.startup_nodes.values())
    return Endpoint("cluster", connection_settings(kwargs, client, nodes=True), nodes)


def connection_settings(kwargs: dict[str, Any], client: object, nodes: bool = False) -> dict[str, Any]:
    """Return the settings of a client that idemgate needs for its own clients.

    Args:
        kwargs: the client's settings.
        client: the client for the text of an error, or "url".
        nodes: True for the settings shared by many nodes, without host, port and database.

    Raises:
        NotConfigured: a setting can be neither copied nor ignored.
        InvalidArgument: a TLS setting cannot work.
    """
    settings: dict[str, Any] = {}
    for name, value in kwargs.items():
        if value is None or name in _IGNORED or (nodes and name in ("host", "port", "db")):
            continue
        if value is False and name.startswith("ssl_validate_ocsp"):
            continue  # a default of blocking clients that async clients do not know
        if name not in _COPIED and not name.startswith("ssl"):
            raise _unsupported_client(
                client,
                f"has the setting {name}, which cannot be carried over to a client that is safe for idemgate",
            )
        settings[name] = value
    connection_class = settings.pop("connection_class", None)
    if connection_class is not None:
        connection_class = _CLASSES.get(connection_class, connection_class)
        if connection_class not in (
            connection.Connection,
            connection.SSLConnection,
            connection.UnixDomainSocketConnection,
        ):
            raise _unsupported_client(
                client,
                f"connects through {connection_class!r}, which is not a connection class of redis-py",
            )
        settings["connection_class"] = connection_class
    if settings.pop("ssl", False):
        settings["connection_class"] = connection.SSLConnection
    check_tls_settings(settings)
    if not verifies_certificate(Endpoint("single", settings)):
        log.warning(
            "link.unverified", extra={"fix": "the server's certificate is not checked: leave out ssl_cert_reqs=none"}
        )
    return settings


def _unsupported_client(client: object, reason: str) -> NotConfigured:
    source = "the URL" if client == "url" else f"the client {type(client).__module__}.{type(client).__qualname__}"
    return NotConfigured(f"{source} {reason}. Pass a URL instead, or a plain redis.Redis / redis.RedisCluster")
