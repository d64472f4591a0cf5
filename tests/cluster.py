"""Servers that are more than one process: a cluster of three primaries, and a primary with a sentinel.

Run with the server program that `embedded://` would take. They end with the process that started them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import redis

from idemgate.link.embedded import find_server
from idemgate.link.supervisor import _die_with

__all__ = ["cluster", "running", "sentinel", "unused_ports", "wait_for"]

SLOTS = 16_384


def wait_for(happens: Callable[[], object], within: float = 20.0) -> None:
    """Polls; what redis-py raises counts as not yet."""
    deadline = time.monotonic() + within
    while True:
        with suppress(redis.exceptions.RedisError):
            if happens():
                return
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def unused_ports(n: int) -> list[int]:
    """Ports that were free a moment ago, below 55,536: a cluster bus listens 10,000 above its port."""
    with ExitStack() as open_:
        found: list[int] = []
        port = 20_000 + os.getpid() % 300 * 100
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
        preexec_fn=partial(_die_with, os.getpid()),  # noqa: PLW1509 - see there
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def server(home: Path, port: int, *options: str) -> Iterator[Any]:
    """A client of a new server on that port."""
    home.mkdir()
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


@contextmanager
def cluster(home: Path) -> Iterator[list[int]]:
    """Ports of three primaries that share all slots."""
    ports = unused_ports(3)
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "5000", "--cluster-config-file", "nodes.conf")
    with ExitStack() as stack:
        nodes = [stack.enter_context(server(home / str(port), port, *options)) for port in ports]
        for number, node in enumerate(nodes):
            first, last = SLOTS * number // 3, SLOTS * (number + 1) // 3
            node.execute_command("CLUSTER ADDSLOTS", *range(first, last))
            node.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            node.execute_command("CLUSTER MEET", "127.0.0.1", ports[0])
        for node in nodes:
            wait_for(lambda node=node: _whole(node))
        yield ports


def _whole(node: Any) -> bool:
    info = node.execute_command("CLUSTER INFO")
    facts = info if isinstance(info, dict) else dict(line.split(":", 1) for line in info.splitlines() if line)
    return facts["cluster_state"] == "ok" and facts["cluster_known_nodes"] == "3"


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
