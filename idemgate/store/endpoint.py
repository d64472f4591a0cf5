"""Where the store is: what is needed to make clients of our own, from a URL (`url.py`) or a client of the user's.

A client handed in by the user is never used itself: ours never decode replies, never retry by themselves and have
time-outs, since each of those breaks the guard (a reply that fails to decode after its script ran, a script run
eleven times, a call that never ends). Where its settings cannot be carried over, it is refused with the reason before
anything runs.
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

from idemgate.errors import NotConfigured

__all__ = ["Endpoint", "kept", "of_client", "one_node", "verified"]

log = logging.getLogger("idemgate.store")


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


def verified(endpoint: Endpoint) -> bool:
    """Whether the server's certificate is checked, where it has one."""
    asked = endpoint.settings.get("ssl_cert_reqs", "required")
    return str(getattr(asked, "name", asked)).lower().removeprefix("cert_") not in ("none", "0")


def one_node(endpoint: Endpoint, number: int) -> Endpoint:
    """A cluster's node as an endpoint of its own: plain Pub/Sub reaches every node, so any of them will do."""
    if endpoint.kind != "cluster":
        return endpoint
    host, port = endpoint.nodes[number % len(endpoint.nodes)]
    return Endpoint("single", endpoint.settings | {"host": host, "port": port})


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
            kept(kwargs, client),
            nodes,
            str(cast(Any, pool).service_name),
            kept(addresses[0], client, nodes=True),
        )
    return Endpoint("single", kept(kwargs, client))


def _of_cluster(client: object) -> Endpoint:
    manager = cast(Any, client).nodes_manager
    kwargs = cast("dict[str, Any]", dict(manager.connection_kwargs))
    if getattr(client, "user_on_connect_func", None) is None:
        kwargs.pop("redis_connect_func", None)  # the cluster client's own hook, not the user's
    nodes = tuple((node.host, int(node.port)) for node in manager.startup_nodes.values())
    return Endpoint("cluster", kept(kwargs, client, nodes=True), nodes)


def kept(kwargs: dict[str, Any], client: object, nodes: bool = False) -> dict[str, Any]:
    """Those of a client's settings that ours need; NotConfigured for one that can be neither kept nor ignored."""
    found: dict[str, Any] = {}
    for name, value in kwargs.items():
        if value is None or name in _IGNORED or (nodes and name in ("host", "port", "db")):
            continue
        if value is False and name.startswith("ssl_validate_ocsp"):
            continue  # what blocking clients begin with, and awaiting ones do not know
        if name not in _KEPT and not name.startswith("ssl"):
            raise _refused(
                client,
                f"has the setting {name}, which cannot be carried over to a client that is safe for idemgate",
            )
        found[name] = value
    used = found.pop("connection_class", None)
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
        found["connection_class"] = used
    if found.pop("ssl", False):
        found["connection_class"] = connection.SSLConnection
    if not verified(Endpoint("single", found)):
        log.warning("link.unverified", extra={"fix": "anybody may be that server: leave out ssl_cert_reqs=none"})
    return found


def _refused(client: object, why: str) -> NotConfigured:
    shown = "the URL" if client == "url" else f"the client {type(client).__module__}.{type(client).__qualname__}"
    return NotConfigured(f"{shown} {why}. Pass a URL instead, or a plain redis.Redis / redis.RedisCluster")
