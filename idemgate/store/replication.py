"""Waiting for copies of a write: what a link sends behind a script, and what it makes of the replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis.exceptions as rx

from idemgate.core.backoff import SOCKET_TIMEOUT
from idemgate.core.calls import Call
from idemgate.errors import NotConfigured, ServerRejected
from idemgate.store.durability import Durability
from idemgate.store.endpoint import Endpoint
from idemgate.store.resp import pack
from idemgate.store.retry import Short, is_passing

__all__ = ["Copies", "copies_of"]


class Copies:
    """`requests` travel behind a script, on its connection; `check` is told their replies.

    Before the first script go those of `trial`, one after the other, and `tried` is told the reply to each.
    """

    __slots__ = ("_durability", "_trial", "requests", "trial")

    def __init__(self, durability: Durability, seconds: float) -> None:
        self._durability = durability
        # The touch last: where the server cannot wait, not even that is written.
        self._trial = self.trial = tuple(map(pack, reversed(durability.commands(1))))
        # Half the time that a reply may take: what is short is asked again until the call's deadline. For a sync
        # longer, if there is time: with `everysec` one comes every 1 to 1.1 s, and each try, which writes, needs one
        # that begins after it; to wait for a second would miss one after the other.
        least = seconds * 500
        wait = least if durability.replicas else max(least, seconds * 1000 - 500)
        self.requests = [pack(words) for words in durability.commands(max(1, int(wait)))]

    def concern(self, call: Call[Any]) -> bool:
        return self._durability.concerns(call)

    def tried(self, request: bytes, reply: Any) -> None:
        """ServerRejected where the server can never do it; what may pass is raised as it is."""
        if isinstance(reply, rx.ResponseError):
            if "replica instances" in str(reply):  # what WAIT and WAITAOF are told where the script is told READONLY
                raise rx.ReadOnlyError(f"READONLY {reply}")
            if not is_passing(reply):
                raise ServerRejected(
                    f"durability= is refused by the server: {reply}. {self._durability.needs}. Nothing was written"
                )
        if isinstance(reply, Exception):
            raise reply
        if request is self._trial[-1]:
            self.trial = ()

    def check(self, replies: Sequence[Any]) -> None:
        """Raises Short; errors of the connection are raised as they are."""
        for reply in replies:
            if isinstance(reply, rx.ResponseError):
                self.trial = self._trial  # the next write is not to find out again by having been written
                raise Short(f"the server refused: {reply}. {self._durability.needs}", passing=False)
            if isinstance(reply, Exception):
                raise reply
        if (missing := self._durability.shortfall(replies[-1])) is not None:
            raise Short(missing, passing=True)


def copies_of(durability: Durability | None, endpoint: Endpoint, seconds: float) -> Copies | None:
    """None where writes need not be more durable than the server makes them; NotConfigured on a cluster."""
    if durability is None:
        return None
    if endpoint.kind == "cluster":
        raise NotConfigured(
            "durability= is not available on a cluster, where WAIT would have to follow each script to its node. "
            "Leave it out, and use min-replicas-to-write or appendfsync of the servers"
        )
    return Copies(durability, min(seconds, SOCKET_TIMEOUT))
