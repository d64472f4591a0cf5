"""A primary with a replica behind a proxy, to lose what the replica has not yet; and the same under three sentinels."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis

from idemgate.store.embedded.server import find_server
from idemgate.testing.proxy import Proxy
from tests.cluster import running, server, unused_ports, wait_for

__all__ = ["Pair", "Watched", "pair", "watched"]

PROMPT = ("--repl-diskless-sync-delay", "0", "--repl-ping-replica-period", "1", "--repl-timeout", "600")


class Pair:
    """`primary` and `replica` are clients, `urls` where they listen, `link` the proxy between the two."""

    def __init__(self, primary: Any, replica: Any, link: Proxy) -> None:
        self.primary, self.replica, self.link = primary, replica, link
        self.urls = tuple(f"redis://127.0.0.1:{port(one)}/0" for one in (primary, replica))

    def cut(self) -> None:
        """From now on nothing that the primary writes reaches the replica, nor can the replica say what it has."""
        self.link.mute = self.link.black_hole = True

    def catch_up(self) -> None:
        """Returns when the replica has all that was written. (A WAIT would speak of one connection.)"""

        def even() -> bool:
            facts = self.primary.info("replication")
            online = facts["connected_slaves"] == 1 and facts["slave0"]["state"] == "online"
            return online and facts["master_repl_offset"] == _offset(self.replica, "slave_repl_offset")

        wait_for(even)

    def promote(self) -> None:
        """The replica is a primary; the former one still runs, until it is stopped."""
        self.replica.replicaof("NO", "ONE")
        wait_for(lambda: self.replica.info("replication")["role"] == "master")


def port(client: Any) -> int:
    return int(client.connection_pool.connection_kwargs["port"])


def _offset(client: Any, name: str) -> int:
    return int(client.info("replication")[name])


@contextmanager
def pair(home: Path, *options: str) -> Iterator[Pair]:
    """Both run until the end; `options` are those of the primary."""
    first, second = unused_ports(2)
    with (
        server(home / "primary", first, *PROMPT, *options) as primary,
        Proxy(f"redis://127.0.0.1:{first}") as link,
        server(home / "replica", second, *PROMPT) as replica,
    ):
        replica.replicaof("127.0.0.1", link.port)
        wait_for(lambda: replica.info("replication")["master_link_status"] == "up")
        made = Pair(primary, replica, link)
        made.catch_up()
        yield made


class Watched:
    """A primary and a replica that three sentinels watch."""

    def __init__(self, service: str, nodes: list[Any], sentinels: list[Any]) -> None:
        self.service, self.nodes, self.sentinels = service, nodes, sentinels
        hosts = ",".join(f"127.0.0.1:{port(one)}" for one in sentinels)
        self.url = f"redis+sentinel://{hosts}/{service}"

    def master(self) -> int:
        """Which of the nodes the first sentinel says is the primary."""
        at = int(self.sentinels[0].execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", self.service)[1])
        return next(number for number, node in enumerate(self.nodes) if port(node) == at)

    def primary(self) -> Any:
        return next(node for node in self.nodes if node.info("replication")["role"] == "master")

    def switch(self) -> None:
        """A planned switch: writes are held back while the sentinels replace the primary by its replica, which has all
        of them. Then the former primary becomes a replica at once; the sentinels do that later, and what it accepted
        meanwhile would be gone."""
        wait_for(self.quiet, within=120)
        before = self.master()
        primary, replica = self.nodes[before], self.nodes[1 - before]
        primary.execute_command("CLIENT", "PAUSE", 120_000, "WRITE")
        wait_for(lambda: _offset(primary, "master_repl_offset") == _offset(replica, "slave_repl_offset"))
        self.sentinels[0].execute_command("SENTINEL", "FAILOVER", self.service)
        wait_for(lambda: self.master() != before, within=120)
        wait_for(lambda: replica.info("replication")["role"] == "master")
        primary.replicaof("127.0.0.1", port(replica))
        primary.execute_command("CLIENT", "UNPAUSE")

    def quiet(self) -> bool:
        """Whether all sentinels name one primary, whose replica is up to date, so that it may be replaced."""
        names = {tuple(one.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", self.service)) for one in self.sentinels}
        facts = self.nodes[self.master()].info("replication")
        flags = self.sentinels[0].sentinel_slaves(self.service)
        return (
            len(names) == 1 and facts["role"] == "master" and facts["connected_slaves"] == 1
            and facts["slave0"]["state"] == "online"
            and not any(one["is_sdown"] or one["is_disconnected"] or one["is_master_down"] for one in flags)
        )  # fmt: skip


@contextmanager
def watched(home: Path, service: str) -> Iterator[Watched]:
    """Sentinels that replace the primary within seconds after it fell silent, or at once when told to."""
    ports = unused_ports(5)
    with ExitStack() as stack:
        nodes = [stack.enter_context(server(home / str(one), one, *PROMPT)) for one in ports[:2]]
        nodes[1].replicaof("127.0.0.1", ports[0])
        wait_for(lambda: nodes[1].info("replication")["master_link_status"] == "up")
        sentinels = [stack.enter_context(_sentinel(home, service, ports[0], one)) for one in ports[2:]]
        made = Watched(service, nodes, sentinels)
        wait_for(lambda: all(_knows(one, service) for one in sentinels) and made.quiet())
        yield made


@contextmanager
def _sentinel(home: Path, service: str, primary: int, at: int) -> Iterator[Any]:
    place = home / f"sentinel{at}"
    place.mkdir(parents=True)
    config = place / "sentinel.conf"
    config.write_text(
        f"port {at}\nbind 127.0.0.1\ndir {place}\nsentinel monitor {service} 127.0.0.1 {primary} 2\n"
        f"sentinel down-after-milliseconds {service} 3000\nsentinel failover-timeout {service} 6000\n"
    )
    with (
        running([find_server().path, str(config), "--sentinel"]),
        redis.Redis(port=at, decode_responses=True) as client,
    ):
        wait_for(client.ping)
        yield client


def _knows(sentinel: Any, service: str) -> bool:
    facts = sentinel.execute_command("SENTINEL MASTER", service)  # `sentinel_master` of redis-py 6.4 fails
    return facts["num-other-sentinels"] == 2 and facts["num-slaves"] == 1
