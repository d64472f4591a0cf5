"""A response as a value, its headers that may be replayed, and its stored form."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

__all__ = ["DIGESTS", "HEADER_BYTES", "NEVER_KEPT", "REPLAYABLE", "Response", "Stored", "has_wrong_length", "may_keep",
           "pack", "pack_not_kept", "unpack"]  # fmt: skip

DIGESTS = frozenset({"content-digest", "repr-digest", "digest", "content-md5"})
"""Digests of the body. One of a body that `redact` has changed is wrong, and confirms a guess of what was removed."""
REPLAYABLE = DIGESTS | {
    "content-type", "content-language", "content-encoding", "content-disposition", "content-location", "content-range",
    "location", "link", "etag", "last-modified", "cache-control", "cdn-cache-control", "surrogate-control", "pragma",
    "expires", "vary", "content-security-policy", "x-content-type-options", "x-frame-options", "referrer-policy",
    "permissions-policy", "cross-origin-opener-policy", "cross-origin-embedder-policy", "cross-origin-resource-policy",
    "x-robots-tag", "refresh",
}  # fmt: skip
"""The headers that a replay has: what describes the body, and who may store it or how a browser may show it.

`keep_headers` adds others.
"""
NEVER_KEPT = frozenset({
    "set-cookie", "set-cookie2", "authorization", "proxy-authorization", "www-authenticate", "proxy-authenticate",
    "authentication-info", "proxy-authentication-info", "connection", "proxy-connection", "keep-alive", "te", "trailer",
    "transfer-encoding", "upgrade", "content-length", "date",
})  # fmt: skip
"""Credentials, and what belongs to one connection or one answer. They are never stored, whatever the options say."""
HEADER_BYTES = 16 * 1024
"""The most bytes of stored headers. A response with more is not kept."""
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Response:
    """A response whose body is in memory. `headers` are (name, value) pairs; a name may occur more than once."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Stored:
    """The content of the record of a done key. `response` is None if it was not kept for the reason `why`."""

    status: int
    response: Response | None
    why: str = ""


def has_wrong_length(response: Response) -> bool:
    """Return True if the body has more or fewer bytes than the Content-Length says."""
    if response.status in (204, 304):  # the length of a 304 is that of the 200
        return False
    lengths = {value.strip() for name, value in response.headers if name.lower() == "content-length"}
    return any(length.isdecimal() and int(length) != len(response.body) for length in lengths)


def pack(response: Response, allowed: frozenset[str]) -> list[Any]:
    """Return the stored form of a response: its status, the allowed headers and its body."""
    kept = [[name, value] for name, value in response.headers if may_keep(name, allowed)]
    return [_VERSION, response.status, kept, bytes(response.body), ""]


def may_keep(name: str, allowed: frozenset[str]) -> bool:
    """Return whether a header of this name may be stored."""
    lower = name.lower()
    return lower in allowed and lower not in NEVER_KEPT


def pack_not_kept(status: int, why: str) -> list[Any]:
    """Return the stored form of a key that is done without its response."""
    return [_VERSION, status, [], b"", why]


def unpack(value: object) -> Stored | None:
    """Return what a record holds, or None if another program or version wrote it."""
    match value:
        case [int(version), int(status), list(headers) | tuple(headers), bytes(body), str(why)] if (
            version == _VERSION and 100 <= status <= 999
        ):
            pairs = [_header(header) for header in cast("Iterable[object]", headers)]
            if None in pairs:
                return None
            kept = tuple(pair for pair in pairs if pair is not None)
            return Stored(status, None if why else Response(status, kept, body), why)
        case _:
            return None


def _header(value: object) -> tuple[str, str] | None:
    """Return a pair of texts as a header, and None for other values."""
    match value:
        case [str(name), str(text)]:
            return name, text
        case _:
            return None
