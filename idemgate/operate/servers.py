"""Read what a server says of itself: INFO, CONFIG, its clock and the state of its cluster."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from idemgate.audit.server import Seen
from idemgate.core.clock import monotonic
from idemgate.errors import ServerRejected
from idemgate.store.nodes import Server

__all__ = ["read_server", "read_settings"]


def read_server(server: Server, *, in_cluster: bool, watch_clock: float = 0.1) -> Seen:
    """Return the state of a server. What the user may not ask for is missing in it.

    Args:
        server: the server.
        in_cluster: whether the client connected in cluster mode.
        watch_clock: for how many seconds to look whether its clock jumps; 0 does not look.

    Raises:
        StoreUnavailable: the server cannot be reached.
    """
    apart, jumped = _read_clocks(server, watch_clock)
    return Seen(
        info=_ask_if_allowed(server, "INFO") or {},
        config=read_settings(server, "*"),
        apart=apart,
        jumped=jumped,
        in_cluster=in_cluster,
        cluster=_lines(_ask_if_allowed(server, "CLUSTER INFO")) if in_cluster else {},
    )


def _ask_if_allowed(server: Server, *words: str) -> Any:
    """Return the reply; None if the command is not permitted or not known."""
    with suppress(ServerRejected):
        return server.command(*words)
    return None


def read_settings(server: Server, pattern: str) -> dict[str, str] | None:
    """Return the settings of a server whose names match; None if the user may not ask."""
    found = _ask_if_allowed(server, "CONFIG GET", pattern)
    return None if found is None else {_text(name): _text(value) for name, value in found.items()}


def _lines(reply: Any) -> dict[str, str]:
    if isinstance(reply, dict):
        return {_text(name): _text(value) for name, value in reply.items()}  # pyright: ignore[reportUnknownVariableType]
    return dict(line.split(":", 1) for line in _text(reply or b"").split() if ":" in line)


def _text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value)


def _read_clocks(server: Server, wait: float) -> tuple[float | None, float]:
    """Return how far the server's clock is ahead, and how much it gained during the wait.

    The result is (None, 0.0) if the server may not be asked.
    """
    try:
        before, ours = _time(server), time.time()
        time.sleep(wait)
        after = _time(server)
    except ServerRejected:
        return None, 0.0
    return before[0] - ours, (after[0] - before[0]) - (after[1] - before[1])


def _time(server: Server) -> tuple[float, float]:
    """Return the server's clock, and a clock of this process that never jumps."""
    seconds, micros = server.command("TIME")
    return seconds + micros / 1_000_000, monotonic()
