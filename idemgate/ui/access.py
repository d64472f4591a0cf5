"""Access to the page: who may run which verbs."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Collection
from inspect import isawaitable
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from idemgate.errors import InvalidArgument
from idemgate.operate.table import VERBS
from idemgate.operate.verb import Verb

__all__ = ["CHANGES", "READS", "Access", "AccessCallback", "Format", "ask_access", "everyone", "read_tokens"]

READS = frozenset(verb.title for verb in VERBS if not verb.changes)
"""The verbs that only read, such as "topic show"."""
CHANGES = frozenset(verb.title for verb in VERBS if verb.changes)
"""The verbs that change something, such as "topic pause"."""


class Access(NamedTuple):
    """The rights of one person.

    Attributes:
        who: the name in the list of acts. It is stored and logged.
        may: "all"; "read" for the verbs that only read; or the verbs themselves, such as `{*READS, "topic pause"}`.
            Reading shows keys, errors, payloads and results. The snapshot is shown in any case.
    """

    who: str
    may: Literal["all", "read"] | Collection[str] = "read"

    def allows(self, verb: Verb) -> bool:
        """Return True if the verb is allowed."""
        if self.may == "all":
            return True
        return verb.title in (READS if self.may == "read" else self.may)


AccessCallback: TypeAlias = Callable[[Request], Access | Awaitable[Access | None] | None]
"""Returns what the sender of a request may do, or None to refuse it. It gets headers, cookies and the session. A
function that is not async runs in a thread."""
Format: TypeAlias = Callable[[str, Any], Any]
"""Returns what the page shows of a stored value, as a value of JSON. It gets the name of the fact ("payload", "value"
or "checkpoint") and the value, as far as JSON can hold it, else its repr."""


async def ask_access(callback: AccessCallback, request: Request) -> Access | None:
    """Return what the sender of a request may do.

    Raises:
        InvalidArgument: the callback named a verb that does not exist.
        TypeError: it returned something else than an `Access` or None.
    """
    found: Any = await run_in_threadpool(callback, request)
    if isawaitable(found):
        found = await found
    if not (found is None or isinstance(found, Access)):
        raise TypeError(f"access= returned a {type(found).__name__}. Return idemgate.ui.Access(who, may) or None")
    if found is not None and found.may not in ("all", "read") and (wrong := {*found.may} - READS - CHANGES):
        raise InvalidArgument("may", sorted(wrong), "no such verbs", "Name verbs of idemgate.ui.READS and CHANGES")
    return found


def everyone(access: Access) -> AccessCallback:
    """Return a callback that gives all the same access: for a page that only one person reaches."""
    return lambda _: access


# -- tokens -----------------------------------------------------------------------------------------------------------

_SHORTEST = 20


def read_tokens(path: Path) -> AccessCallback:
    """Return the access of the tokens in a file. A request names its token in the header `Authorization: Bearer`.

    Each line is a name, "all" or "read", and a token. Empty lines and those that begin with # are skipped.

    Raises:
        InvalidArgument: the file cannot be read, has an invalid line, or no line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise InvalidArgument("--tokens", str(path), f"cannot be read: {error}", "Name a text file") from None
    found = dict[bytes, Access]()
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        words = line.split()
        # The line holds a secret, so the error does not show it.
        if len(words) != 3 or words[1] not in ("all", "read"):
            raise InvalidArgument("--tokens", f"line {number}", "is invalid", "Write: NAME all|read TOKEN")
        if len(words[2]) < _SHORTEST:
            fix = "Make one: python3 -c 'import secrets; print(secrets.token_urlsafe())'"
            raise InvalidArgument("--tokens", f"line {number}", f"a token of less than {_SHORTEST} characters", fix)
        found[words[2].encode()] = Access(words[0], "all" if words[1] == "all" else "read")
    if not found:
        raise InvalidArgument("--tokens", str(path), "has no token", "Write lines: NAME all|read TOKEN")

    def ask(request: Request) -> Access | None:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        sent = token.strip().encode() if scheme.lower() == "bearer" else b""
        matches = [access for known, access in found.items() if hmac.compare_digest(known, sent)]
        return matches[0] if matches else None

    return ask
