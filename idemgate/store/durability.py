"""How durable a write has to be before it counts: what is sent behind it, and what the replies mean.

WAIT and WAITAOF speak of the writes of their own connection, and since Redis 7.2 of nothing else. A script that
answered a copy of a request, or what somebody else wrote, wrote nothing; so a touch goes before them, and what they
then say covers all that was written before the touch.
"""

from __future__ import annotations

from typing import Any, Literal

from idemgate.core.calls import Arg, Call
from idemgate.core.keys import touched
from idemgate.errors import InvalidArgument
from idemgate.lua import script

__all__ = ["Asked", "Durability", "durability_of"]

Asked = Literal["fsync", "replicas"] | int | None

_EXEMPT = frozenset(
    f"{folder}/{name}"
    for folder, names in {
        "guard": ("inspect", "renew"),
        "dedup": ("get",),
        "topics": ("take", "extend", "peek", "stats", "dead", "registry", "policy", "retell", "audit"),
        "members": ("announce", "leave", "roll"),
        "expiry": ("look",),
    }.items()
    for name in names
)
"""What only reads, and leases: nobody relies on a lease that is lost, what was taken is delivered again. A take that
was refused after it had been executed would cost an attempt each time."""


class Durability:
    """What is asked for: `replicas` that acknowledged a write, or, where that is 0, the primary's own fsync."""

    __slots__ = ("key", "replicas")

    def __init__(self, replicas: int, namespace: str) -> None:
        self.replicas = replicas
        self.key = touched(namespace)

    def concerns(self, call: Call[Any]) -> bool:
        """Whether somebody relies on what this call writes."""
        return call.script.name not in _EXEMPT

    def commands(self, milliseconds: int) -> list[tuple[Arg, ...]]:
        """What to send behind a write, on its connection; its replies are for `shortfall`."""
        touch = ("EVAL", script("store/touch").text, 1, self.key)
        if self.replicas:
            return [touch, ("WAIT", self.replicas, milliseconds)]
        return [touch, ("WAITAOF", 1, 0, milliseconds)]

    def shortfall(self, reply: Any) -> str | None:
        """What is missing by the reply to WAIT or WAITAOF; None when nothing is."""
        if self.replicas:
            return None if reply >= self.replicas else f"{reply} of {self.replicas} replicas acknowledged it"
        return None if reply[0] >= 1 else "it is not in the append-only file on disk yet"

    @property
    def needs(self) -> str:
        """What the server must have, for those whose server refuses."""
        if self.replicas:
            return "It needs a primary that lets this user call EVAL and WAIT (idemgate acl ROLE --durable)"
        return (
            "It needs Redis 7.2 or Valkey, `appendonly yes`, and a user that may call EVAL and WAITAOF "
            "(idemgate acl ROLE --durable --redis 7.2)"
        )


def durability_of(asked: Asked, namespace: str) -> Durability | None:
    """What `durability=` of a gate means, or InvalidArgument."""
    if asked is None:
        return None
    if asked == "fsync":
        return Durability(0, namespace)
    replicas = 1 if asked == "replicas" else asked
    if isinstance(replicas, bool) or not isinstance(replicas, int) or not 1 <= replicas <= 100:
        raise InvalidArgument(
            "durability", asked, "not a durability", 'Use None, "fsync", "replicas", or how many replicas (1 to 100)'
        )
    return Durability(replicas, namespace)
