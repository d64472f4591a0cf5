"""Wait for the durability of a write: the requests behind a script, and the meaning of their replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis.exceptions as rx

from idemgate.core.backoff import SOCKET_TIMEOUT
from idemgate.core.calls import Call
from idemgate.errors import NotConfigured, ServerRejected
from idemgate.store.durability import Durability
from idemgate.store.endpoint import Endpoint
from idemgate.store.resp import pack_command
from idemgate.store.retry import NotReplicated, is_transient

__all__ = ["DurabilityCheck", "make_durability_check"]


class DurabilityCheck:
    """The durability that a link requires of its writes.

    Send `requests` behind a script, on the same connection, and pass their replies to `check_replies`. Before the first
    script send each request of `probe`, one after the other, and pass its reply to `check_probe`.
    """

    __slots__ = ("_durability", "_whole_probe", "probe", "requests")

    def __init__(self, durability: Durability, seconds: float) -> None:
        self._durability = durability
        # The touch comes last: a server that cannot wait rejects the first request, and nothing is written.
        self._whole_probe = tuple(map(pack_command, reversed(durability.commands(1))))
        self.probe: tuple[bytes, ...] = self._whole_probe
        # Wait for half the reply timeout; a write that is not durable by then is retried until the deadline. For fsync
        # wait longer if time allows. With `everysec` a sync comes every 1 to 1.1 s. Each try writes, and so needs a
        # sync that begins after it. A wait of one second would miss each sync.
        half = seconds * 500
        wait = half if durability.replicas else max(half, seconds * 1000 - 500)
        self.requests: list[bytes] = [pack_command(words) for words in durability.commands(max(1, int(wait)))]

    def applies_to(self, call: Call[Any]) -> bool:
        """Return whether this call must be durable."""
        return self._durability.applies_to(call)

    def check_probe(self, request: bytes, reply: Any) -> None:
        """Check the reply to a request of the probe. The last successful reply ends the probe.

        Raises:
            ServerRejected: the server does not support the required durability.
            RedisError: a transient error, unchanged.
        """
        if isinstance(reply, rx.ResponseError):
            if "replica instances" in str(reply):  # a replica answers this to WAIT and WAITAOF, and READONLY to scripts
                raise rx.ReadOnlyError(f"READONLY {reply}")
            if not is_transient(reply):
                raise ServerRejected(
                    f"the server does not support durability=: {reply}. {self._durability.requirements}. "
                    "Nothing was written"
                )
        if isinstance(reply, Exception):
            raise reply
        if request is self._whole_probe[-1]:
            self.probe = ()

    def check_replies(self, replies: Sequence[Any]) -> None:
        """Check the replies to `requests`.

        Raises:
            NotReplicated: the write is not as durable as required.
            RedisError: an error of the connection, unchanged.
        """
        for reply in replies:
            if isinstance(reply, rx.ResponseError):
                self.probe = self._whole_probe  # probe again, so that the next write fails before it writes
                raise NotReplicated(
                    f"the server rejected the wait: {reply}. {self._durability.requirements}", transient=False
                )
            if isinstance(reply, Exception):
                raise reply
        if (missing := self._durability.shortfall(replies[-1])) is not None:
            raise NotReplicated(missing, transient=True)


def make_durability_check(durability: Durability | None, endpoint: Endpoint, seconds: float) -> DurabilityCheck | None:
    """Return the check for the durability of a gate, or None when the server's own durability is enough.

    Raises:
        NotConfigured: the endpoint is a cluster.
    """
    if durability is None:
        return None
    if endpoint.kind == "cluster":
        raise NotConfigured(
            "durability= is not available on a cluster, where WAIT would have to follow each script to its node. "
            "Leave it out, and use min-replicas-to-write or appendfsync of the servers"
        )
    return DurabilityCheck(durability, min(seconds, SOCKET_TIMEOUT))
