"""Ask whether a server has the commands by which the guard claims and completes keys without a script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis.exceptions as rx

from idemgate.core.calls import PerKeyCall
from idemgate.store.resp import pack_command
from idemgate.store.retry import is_transient

__all__ = ["has_errors", "join_plain", "probe_of", "takes_plain"]

_NO_RECORD = b"no record of idemgate"
"""A value that no record has. Even where it is stored, the probe changes nothing."""


def probe_of(key: bytes) -> list[bytes]:
    """Return the requests that ask a server for its commands and for the rights of the user. They write nothing.

    Send the second one only if the first one was no error: a server logs each refusal.
    """
    probe = ("SET", key, _NO_RECORD, "IFEQ", _NO_RECORD, "KEEPTTL")
    return [pack_command(probe), pack_command(("PEXPIRETIME", key))]


def takes_plain(replies: Sequence[Any]) -> bool | None:
    """Return whether a server with these replies to the probe has the commands. None: it cannot tell now."""
    errors = [reply for reply in replies if isinstance(reply, Exception)]
    for error in errors:
        if isinstance(error, rx.OutOfMemoryError) or is_transient(error) or str(error).startswith("WRONGTYPE"):
            return None
    return not errors


def join_plain(calls: Sequence[PerKeyCall[Any]]) -> tuple[bytes, int]:
    """Return one request of the plain commands of calls, and the number of their replies."""
    return b"".join([call.frame_plain() for call in calls]), sum(
        len(call.keys) * (2 if call.pair else 1) for call in calls
    )


def has_errors(replies: Sequence[Any]) -> bool:
    """Return whether the server refused one of these commands."""
    return not _ERRORS.isdisjoint(map(type, replies))


_ERRORS = frozenset((rx.ResponseError, rx.OutOfMemoryError, rx.NoScriptError))
"""The classes of all errors that `resp` makes of a reply."""
