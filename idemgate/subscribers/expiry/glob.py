"""Matching of keys against glob patterns, with the rules of Redis (KEYS, SCAN MATCH, PSUBSCRIBE)."""

from __future__ import annotations

import re
from collections.abc import Callable

__all__ = ["matcher"]


def matcher(pattern: bytes) -> Callable[[bytes], bool]:
    """Return a function that matches keys: `*`, `?`, `[abc]`, `[a-z]`, `[^a]`, and a backslash to escape."""
    between, at = [b""], 0
    while at < len(pattern):
        if pattern[at : at + 1] == b"*":
            between.append(b"")
            at += 1
        else:
            part, at = _part(pattern, at)
            between[-1] += part
    compiled = re.compile(_join_with_stars(between), re.DOTALL)
    return lambda key: compiled.fullmatch(key) is not None


def _join_with_stars(between: list[bytes]) -> bytes:
    """Join the parts between stars into one expression.

    Each part but the last matches at the first possible place, without backtracking. Otherwise a hostile key could take
    exponential time.
    """
    if len(between) == 1:
        return between[0]
    first, *others, last = between
    return first + b"".join(b"(?>.*?%b)" % part for part in others) + b".*" + last


def _part(pattern: bytes, at: int) -> tuple[bytes, int]:
    """Return the expression for the part at a position, and the position of the next part."""
    one = pattern[at : at + 1]
    if one == b"?":
        return b".", at + 1
    if one == b"[":
        return _class(pattern, at + 1)
    if one == b"\\" and at + 1 < len(pattern):
        return re.escape(pattern[at + 1 : at + 2]), at + 2
    return re.escape(one), at + 1


def _class(pattern: bytes, at: int) -> tuple[bytes, int]:
    """Return the expression for a bracket. An unclosed bracket ends with the pattern, as in Redis."""
    negated = pattern[at : at + 1] == b"^"
    at += negated
    allowed: set[int] = set()
    while at < len(pattern) and pattern[at : at + 1] != b"]":
        if pattern[at : at + 1] == b"\\" and at + 1 < len(pattern):
            allowed.add(pattern[at + 1])
            at += 2
        elif pattern[at + 1 : at + 2] == b"-" and at + 2 < len(pattern):
            low, high = sorted((pattern[at], pattern[at + 2]))
            allowed.update(range(low, high + 1))
            at += 3
        else:
            allowed.add(pattern[at])
            at += 1
    chosen = set(range(256)) - allowed if negated else allowed
    inside = b"".join(b"\\x%02x" % byte for byte in sorted(chosen))
    return (b"[" + inside + b"]" if inside else b"(?!)"), at + 1
