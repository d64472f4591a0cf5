"""Servers that are more than one process: a cluster of three primaries, with replicas if wanted, and a primary with a
sentinel.

Run with the server program that `embedded://` would take. They end with the process that started them.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import redis

from idemgate.store.embedded.server import find_server
from idemgate.store.embedded.supervisor import _die_with_parent
from tests.waiting import wait_until

__all__ = ["Operator", "agree", "cluster", "running", "sentinel", "unused_ports", "wait_for"]

SLOTS = 16_384


def wait_for(happens: Callable[[], object], within: float = 60.0) -> None:
    """Polls; what redis-py raises counts as not yet. (A connection to a port on which nobody listens yet may be one to
    itself, whose answer is the question: AttributeError.)"""
    wait_until(happens, within, not_yet=(redis.exceptions.RedisError, AttributeError))


@cache
def _first_port() -> int:
    """The first of 100 ports that no other process of the tests takes: each holds the lock of its ports to its end."""
    for n in range(100):
        number = (os.getpid() + n) % 100
        lock = os.open(Path(tempfile.gettempdir()) / f"idemgate-test-ports-{number}", os.O_CREAT | os.O_RDWR, 0o666)
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return 10_000 + number * 100
        os.close(lock)
    raise AssertionError("100 processes of tests run at once")


def unused_ports(n: int) -> list[int]:
    """Ports that were free a moment ago. The bus of a cluster's node listens 10,000 above the node's port, where no
    process of the tests takes a port. Both are below 32,768, where the ports begin that systems give to connections.
    """
    with ExitStack() as open_:
        found: list[int] = []
        port = _first_port()
        while len(found) < n:
            port += 1
            with suppress(OSError):
                for one in (port, port + 10_000):
                    held = open_.enter_context(socket.socket())
                    held.bind(("127.0.0.1", one))
                found.append(port)
        return found


@contextmanager
def running(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is gone afterwards, or when this one is killed."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=partial(_die_with_parent, os.getpid()),  # noqa: PLW1509 - see there
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def server(home: Path, port: int, *options: str) -> Iterator[Any]:
    """A client of a new server on that port."""
    home.mkdir(parents=True, exist_ok=True)
    words = [
        "--port",
        str(port),
        "--dir",
        str(home),
        "--save",
        "",
        "--bind",
        "127.0.0.1",
        "--protected-mode",
        "no",
        *options,
    ]
    with running([find_server().path, *words]), redis.Redis(port=port, decode_responses=True) as client:
        wait_for(client.ping)
        yield client


# Primaries hand over when they are told to, not when this machine is busy.
NODE = (
    "--cluster-enabled", "yes", "--cluster-node-timeout", "5000", "--cluster-config-file", "nodes.conf",
    "--repl-diskless-sync-delay", "0", "--cluster-replica-no-failover", "yes",
)  # fmt: skip


@contextmanager
def cluster(home: Path, replicas: bool = False) -> Iterator[list[int]]:
    """Ports of three primaries that share all slots; then, if wanted, those of one replica of each."""
    ports = unused_ports(6 if replicas else 3)
    with ExitStack() as stack:
        nodes = [stack.enter_context(server(home / str(port), port, *NODE)) for port in ports]
        for number, node in enumerate(nodes):
            if number < 3:
                first, last = SLOTS * number // 3, SLOTS * (number + 1) // 3
                node.execute_command("CLUSTER ADDSLOTS", *range(first, last))
            node.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            node.execute_command("CLUSTER MEET", "127.0.0.1", ports[0])
        for node in nodes:
            wait_for(lambda node=node: _whole(node, len(nodes)))
        for primary, replica in zip(nodes, nodes[3:], strict=False):
            replica.execute_command("CLUSTER REPLICATE", primary.execute_command("CLUSTER MYID"))
        wait_for(lambda: agree(nodes))
        for replica in nodes[3:]:
            wait_for(lambda replica=replica: replica.info("replication")["master_link_status"] == "up")
        yield ports


def _whole(node: Any, n: int) -> bool:
    info = node.execute_command("CLUSTER INFO")
    facts = info if isinstance(info, dict) else dict(line.split(":", 1) for line in info.splitlines() if line)
    return facts["cluster_state"] == "ok" and facts["cluster_known_nodes"] == str(n)


def agree(nodes: list[Any]) -> bool:
    """Whether all nodes know who the three primaries are, and who follows whom: they vote on the next hand-over."""
    views: list[set[tuple[str, str]]] = []
    for node in nodes:
        view = node.execute_command("CLUSTER NODES").values()
        views.append({(one["node_id"], one["master_id"]) for one in view})  # the master of a primary is "-"
    return all(view == views[0] for view in views) and sum(master == "-" for _, master in views[0]) == 3


class Operator:
    """What is done to a cluster while it works: primaries hand over to their replicas, slots move."""

    def __init__(self, ports: list[int]) -> None:
        self.nodes: list[Any] = [redis.Redis(port=port, decode_responses=True) for port in ports]
        self.ids: list[str] = [node.execute_command("CLUSTER MYID") for node in self.nodes]

    def primaries(self) -> list[int]:
        """Which of the nodes are primaries now, each by its own word."""
        return [number for number, node in enumerate(self.nodes) if node.info("replication")["role"] == "master"]

    def keys(self, pattern: str) -> list[set[str]]:
        """Keys on each of the primaries."""
        return [set(self.nodes[number].scan_iter(pattern, count=1000)) for number in self.primaries()]

    def met(self, error: str) -> int:
        """How often the nodes answered with this error: TRYAGAIN, ASK, MOVED."""
        found = [node.info("errorstats").get(f"errorstat_{error}", "count=0") for node in self.nodes]
        # redis-py 5 leaves it as it is written
        return sum(int(one["count"] if isinstance(one, dict) else one.removeprefix("count=")) for one in found)

    def fail_over(self, primary: int) -> int:
        """Its replica takes over without losing a write; which one that was. The former primary then follows it."""
        replica = self.replica(primary)
        asked = 0.0

        def taken_over() -> bool:
            nonlocal asked
            if replica in self.primaries():
                return agree(self.nodes)
            if time.monotonic() - asked > 6:  # a busy primary lets the request lapse after five seconds
                asked = time.monotonic()
                self.nodes[replica].execute_command("CLUSTER FAILOVER")
            return False

        wait_for(taken_over)
        wait_for(lambda: self.nodes[primary].info("replication")["master_link_status"] == "up")
        return replica

    def replica(self, primary: int) -> int:
        return next(
            number for number, node in enumerate(self.nodes)
            if number != primary and (facts := node.info("replication"))["role"] == "slave"
            and facts["master_port"] == self.port(primary)
        )  # fmt: skip

    def settle(self, primary: int) -> None:
        """Until its replica has all that it wrote."""
        replica = self.nodes[self.replica(primary)]
        offset = self.nodes[primary].info("replication")["master_repl_offset"]
        wait_for(lambda: replica.info("replication")["slave_repl_offset"] >= offset)

    def kill(self, number: int) -> Path:
        """Kills its process; where its files are, for `restarted`."""
        home = Path(self.nodes[number].config_get("dir")["dir"])
        os.kill(self.nodes[number].info("server")["process_id"], signal.SIGKILL)
        return home

    def take_over(self, replica: int) -> None:
        """A replica whose primary is gone takes its slots."""
        self.nodes[replica].execute_command("CLUSTER FAILOVER", "TAKEOVER")
        wait_for(lambda: self.nodes[replica].info("replication")["role"] == "master")

    @contextmanager
    def restarted(self, number: int, home: Path) -> Iterator[None]:
        """A killed node that follows the one which took over."""
        with server(home, self.port(number), *NODE):
            wait_for(lambda: agree(self.nodes))
            wait_for(lambda: self.nodes[number].info("replication")["master_link_status"] == "up")
            yield

    def owner(self, key: str) -> int:
        """The primary that serves the slot of a key, by its own word."""
        for number in self.primaries():
            with suppress(redis.exceptions.ResponseError):  # MOVED
                self.nodes[number].exists(key)
                return number
        raise AssertionError(f"nobody serves {key}")

    def move(self, key: str) -> Iterator[int]:
        """Moves the slot of a key to another primary, one of its keys after the other; stops after each, with the
        number of keys moved so far, and first of all when the move has been announced (0)."""
        old, slot = self.owner(key), self.nodes[0].execute_command("CLUSTER KEYSLOT", key)
        new = next(number for number in self.primaries() if number != old)
        self.nodes[new].execute_command("CLUSTER SETSLOT", slot, "IMPORTING", self.ids[old])
        self.nodes[old].execute_command("CLUSTER SETSLOT", slot, "MIGRATING", self.ids[new])
        moved = 0
        yield moved
        while keys := self.nodes[old].execute_command("CLUSTER GETKEYSINSLOT", slot, 1):
            self.nodes[old].execute_command("MIGRATE", "127.0.0.1", self.port(new), keys[0], 0, 5000)
            moved += 1
            yield moved
        for number in (new, old, *self.primaries()):
            self.nodes[number].execute_command("CLUSTER SETSLOT", slot, "NODE", self.ids[new])

    def port(self, number: int) -> int:
        return int(self.nodes[number].connection_pool.connection_kwargs["port"])

    def close(self) -> None:
        for node in self.nodes:
            node.close()


@contextmanager
def sentinel(home: Path, service: str) -> Iterator[tuple[int, int]]:
    """Ports of a primary and of a sentinel that knows it under the name `service`."""
    port, watching = unused_ports(2)
    (home / "sentinel").mkdir()
    config = home / "sentinel" / "sentinel.conf"
    config.write_text(
        f"port {watching}\nbind 127.0.0.1\ndir {home / 'sentinel'}\nsentinel monitor {service} 127.0.0.1 {port} 1\n"
    )
    with server(home / "primary", port), running([find_server().path, str(config), "--sentinel"]):
        with redis.Redis(port=watching, decode_responses=True) as client:
            wait_for(lambda: client.execute_command("SENTINEL GET-MASTER-ADDR-BY-NAME", service))
        yield port, watching
