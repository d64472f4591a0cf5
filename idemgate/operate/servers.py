"""Read what a server says of itself: INFO, CONFIG, its clock and the state of its cluster."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, NamedTuple

from idemgate.audit.server import Seen
from idemgate.core.clock import monotonic
from idemgate.errors import ServerRejected
from idemgate.store.endpoint import Endpoint
from idemgate.store.nodes import Server, servers

__all__ = ["count_evicted", "read_server", "read_settings"]


def count_evicted(endpoint: Endpoint) -> int:
    """Return how many keys the servers evicted since they started; 0 of those that the user may not ask.

    Raises StoreUnavailable if one cannot be reached.
    """
    with servers(endpoint) as found:
        told: list[dict[str, Any]] = [_ask_if_allowed(one, "INFO") or {} for one in found]
    return sum(int(info.get("evicted_keys", 0)) for info in told)


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


class _Clocks(NamedTuple):
    """The clock of a server, and those of this process before it was asked and after it answered."""

    theirs: float
    ours: tuple[float, float]
    steady: tuple[float, float]


def _read_clocks(server: Server, wait: float) -> tuple[float | None, float]:
    """Return how far the server's clock is ahead at least, and how much it gained at least during the wait.

    An answer may come late on a busy machine, so a difference that this explains is none. The result is (None, 0.0) if
    the server may not be asked.
    """
    try:
        first = _ask_clock(server)
        time.sleep(wait)
        second = _ask_clock(server)
    except ServerRejected:
        return None, 0.0
    apart = _beyond(first.theirs, *first.ours)
    passed = second.steady[0] - first.steady[1], second.steady[1] - first.steady[0]
    return apart, _beyond(second.theirs - first.theirs, *passed)


def _beyond(number: float, least: float, most: float) -> float:
    """Return by how much a number is above or, negative, below a range; 0.0 within."""
    return max(0.0, number - most) + min(0.0, number - least)


def _ask_clock(server: Server) -> _Clocks:
    ours, steady = time.time(), monotonic()
    seconds, micros = server.command("TIME")
    return _Clocks(seconds + micros / 1_000_000, (ours, time.time()), (steady, monotonic()))
