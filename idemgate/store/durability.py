"""The required durability of a write: the commands sent behind it, and the meaning of their replies.

WAIT and WAITAOF cover the writes of their own connection; since Redis 7.2 they cover nothing else. A script that
answers a copy of a request writes nothing. The same holds for one that returns another client's write. So a small write
precedes them, and their reply covers all earlier writes as well.
"""

from __future__ import annotations

from typing import Any, Literal

from idemgate.core.calls import Arg, Call
from idemgate.core.keys import durability_key
from idemgate.errors import InvalidArgument
from idemgate.lua import script

__all__ = ["Durability", "DurabilityOption", "parse_durability"]

DurabilityOption = Literal["fsync", "replicas"] | int | None

_EXEMPT = frozenset(
    f"{folder}/{name}"
    for folder, names in {
        "guard": ("inspect", "renew", "scopes"),
        "dedup": ("get",),
        "topics": (
            "take", "extend", "peek", "stats", "dead", "registry", "results", "policy", "audit", "count_refused",
        ),
        "topics/messages": ("list",),
        "topics/versions": ("read",),
        "topics/reshard": ("replies",),
        "operate": ("acts",),
        "history": ("read",),
        "presence": ("beat", "leave", "list", "names", "read"),
        "membership": ("heartbeat", "leave", "list"),
        "subscribers/expiry": ("ttl",),
    }.items()
    for name in names
)  # fmt: skip
"""Scripts that only read or only lease. A lost lease does no harm: its message is delivered again. A take that fails
after it was executed would cost an attempt each time.
"""


class Durability:
    """The number of `replicas` that must acknowledge a write. 0 requires an fsync of the primary instead."""

    __slots__ = ("key", "replicas")

    def __init__(self, replicas: int, namespace: str) -> None:
        self.replicas: int = replicas
        self.key: bytes = durability_key(namespace)

    def applies_to(self, call: Call[Any]) -> bool:
        """Return whether the write of this call must be durable."""
        return call.script.name not in _EXEMPT

    def commands(self, milliseconds: int) -> list[tuple[Arg, ...]]:
        """Return the commands to send behind a write, on its connection. The last reply is for `shortfall`.

        `milliseconds` bounds the wait on the server.
        """
        touch = ("EVAL", script("store/touch").text, 1, self.key)
        if self.replicas:
            return [touch, ("WAIT", self.replicas, milliseconds)]
        return [touch, ("WAITAOF", 1, 0, milliseconds)]

    def shortfall(self, reply: Any) -> str | None:
        """Return what is missing by the reply to WAIT or WAITAOF, or None when nothing is."""
        if self.replicas:
            return None if reply >= self.replicas else f"{reply} of {self.replicas} replicas acknowledged it"
        return None if reply[0] >= 1 else "it is not in the append-only file on disk yet"

    @property
    def requirements(self) -> str:
        """The server's side of this setting, for the text of an error."""
        if self.replicas:
            return "It needs a primary that lets this user call EVAL and WAIT (idemgate acl ROLE --durable)"
        return (
            "It needs Redis 7.2 or Valkey, `appendonly yes`, and a user that may call EVAL and WAITAOF "
            "(idemgate acl ROLE --durable --redis 7.2)"
        )


def parse_durability(option: DurabilityOption, namespace: str) -> Durability | None:
    """Return the meaning of `durability=`, or None for the server's own durability.

    Args:
        option: None, "fsync", "replicas" (one replica), or a number of replicas from 1 to 100.
        namespace: the namespace whose touch key is written.

    Raises:
        InvalidArgument: `option` is something else.
    """
    if option is None:
        return None
    if option == "fsync":
        return Durability(0, namespace)
    replicas = 1 if option == "replicas" else option
    if isinstance(replicas, bool) or not isinstance(replicas, int) or not 1 <= replicas <= 100:
        raise InvalidArgument(
            "durability", option, "not a durability", 'Use None, "fsync", "replicas", or how many replicas (1 to 100)'
        )
    return Durability(replicas, namespace)
