"""Read the errors of a server: what they say about its address, and how to correct the configuration."""

from __future__ import annotations

import re
from typing import TypeVar

import redis.exceptions as rx

from idemgate.lua import names, script
from idemgate.lua.checked import checked

__all__ = ["describe_rejection", "explain_redirect", "suggest_server", "suggests_failover"]

T = TypeVar("T")
_FAILOVER = re.compile(
    r"(READONLY|LOADING|MASTERDOWN|NOREPLICAS|UNBLOCKED)\b"
    r"|.*: -(READONLY|MASTERDOWN|NOREPLICAS) "  # the wording of Redis 6.2 when the first write of a script is refused
    r"|.*replica instances",  # a replica answers this to WAIT and WAITAOF
    re.DOTALL,
)
_CLUSTER_URL = "use redis+cluster://HOST:PORT[,HOST:PORT...], without the number of a database"
_FIXES = (
    (r"CROSSSLOT|not allowed in cluster mode", f"The server is a node of a cluster: {_CLUSTER_URL}"),
    (
        r"unknown command '?`?(EVAL|SELECT)",
        "A sentinel answers like this: if it is one, use redis+sentinel://HOST:PORT[,HOST:PORT...]/SERVICE",
    ),
    (r"unknown command '?`?SENTINEL", "The URL must name sentinels; for a server without them use redis://HOST:PORT"),
    (r"cluster support disabled", "The server is no node of a cluster: use redis://HOST:PORT"),
    (r"NOAUTH|unauthenticated|Authentication required", "Add the password: redis://USER:PASSWORD@HOST:PORT"),
    (r"WRONGPASS|invalid username-password", "Correct the user name and the password of the URL or the client"),
    (r"without any password configured", "The server has no password: leave it out, or set requirepass there"),
)


def suggests_failover(error: object) -> bool:
    """Return whether an error suggests that the address now leads to another server, which is the primary."""
    return isinstance(error, rx.ResponseError) and _FAILOVER.match(str(error)) is not None


def explain_redirect(error: T) -> T | rx.ResponseError:
    """Return the error to raise for a reply to a client that does not follow redirects. Others pass unchanged.

    MOVED and ASK then never go away. A cluster that is down may come up: only the text changes.
    """
    word = str(error).partition(" ")[0] if isinstance(error, rx.ResponseError) else ""
    if word in ("MOVED", "ASK"):
        return rx.ResponseError(
            f"the server is a node of a cluster ({error}), but the URL names it alone: {_CLUSTER_URL}"
        )
    if word == "CLUSTERDOWN":
        return rx.ResponseError(f"{error}. The server is a node of a cluster: {_CLUSTER_URL}")
    return error


_DENIED = re.compile(r"NOPERM|no permissions|can't run this command|can't access at least one|ACL failure in script")
_SHA = re.compile(r"(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])")
_ARGUMENTS = re.compile(r", with args beginning with:.*", re.DOTALL)


def describe_rejection(error: Exception) -> str:
    """Return the server's text with script names instead of SHA-1 digests, without arguments, and with the fix."""
    text = _ARGUMENTS.sub("", str(error))
    if not _DENIED.search(text):
        fix = next((f". {fix}" for pattern, fix in _FIXES if re.search(pattern, text)), "")
        return f"the server refused: {text.removesuffix('.') if fix else text}{fix}"
    script_names = {variant(name).sha.decode(): name for name in names() for variant in (script, checked)}
    text = _SHA.sub(lambda match: script_names.get(match[0], match[0]), text)
    return f"this user's access list does not allow it: {text}. Run `idemgate acl` to print what each role needs"


_REFUSED = re.compile(r"[Cc]onnection refused|Connect call failed|Err(?:or|no) (?:2|61|111) connecting to")
"""Texts of the errors for an address at which no server listens: Linux, macOS, asyncio, a missing unix socket."""


def suggest_server(error: Exception) -> str:
    """Return the fix for an address at which no server listens, or an empty text."""
    if not _REFUSED.search(str(error)):
        return ""
    return " No server listens there: correct the address, or start a server, for example with `idemgate server`"
