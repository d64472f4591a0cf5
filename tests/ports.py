"""Ports on which nothing listens."""

from __future__ import annotations

import socket

__all__ = ["free_ports"]


def free_ports(many: int = 1) -> list[int]:
    """Return so many ports, all different."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(many)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports
