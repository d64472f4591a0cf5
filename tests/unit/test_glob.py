"""Patterns of keys, case by case; `tests/worker/test_subscribers_expiry.py` asks a server whether these are its own."""

from __future__ import annotations

from typing import Any

from idemgate.subscribers.expiry.glob import matcher
from tests.for_each import for_each

CASES: list[tuple[bytes, list[bytes], list[bytes]]] = [
    (b"", [b""], [b"a"]),
    (b"a.c", [b"a.c"], [b"abc", b"a.cd", b"xa.c"]),
    (b"a?c", [b"abc", b"a\nc", b"a\xffc"], [b"ac", b"abbc"]),
    (b"*", [b"", b"a\nb"], []),
    (b"a*c", [b"ac", b"abc", b"acc"], [b"a", b"acd", b"bac"]),
    (b"a*b*c", [b"abc", b"axbyc", b"abbc"], [b"acb", b"ac", b"ab"]),
    (b"a*b*c*d", [b"abcd", b"axbycxd"], [b"acbd", b"abd"]),
    (b"a**b", [b"ab", b"axb"], [b"a", b"abx"]),
    (b"*:user:*", [b":user:", b"x:user:7", b":user:user:"], [b"user:", b":user"]),
    (b"[abc]", [b"a", b"b", b"c"], [b"d", b"", b"ab", b"X"]),
    (b"[a-c]x", [b"ax", b"bx", b"cx"], [b"dx", b"-x", b"`x"]),
    (b"[c-a]", [b"a", b"b", b"c"], [b"d", b"-"]),
    (b"[^a-c]", [b"d", b"-", b"^", b"["], [b"a", b"b", b"c"]),
    (b"[a^]", [b"a", b"^"], [b"b"]),
    (b"[a-]", [b"a", b"]", b"_"], [b"-", b"b"]),
    (b"[a\\-c]", [b"a", b"-", b"c"], [b"b", b"\\"]),
    (b"[\\]]", [b"]"], [b"\\", b"a"]),
    (b"[ab", [b"a", b"b"], [b"[ab", b"c"]),
    (b"[a-", [b"a", b"-"], [b"b", b"`"]),
    (b"[\\", [b"\\"], [b"a", b"["]),
    (b"[\\a", [b"a"], [b"\\", b"b"]),
    (b"[^0]", [b"1", b"\x10"], [b"0"]),
    (b"[]x", [], [b"x", b"]x", b"[]x"]),
    (b"[^]", [b"a", b"]"], [b""]),
    (b"\\*", [b"*"], [b"\\*", b"a"]),
    (b"\\?x", [b"?x"], [b"ax"]),
    (b"a\\", [b"a\\"], [b"a"]),
]


@for_each(("pattern", "yes", "no"), CASES, ids=lambda value: "" if isinstance(value, list) else None)
def test_a_pattern_matches_whole_keys(pattern: bytes, yes: list[bytes], no: list[bytes]) -> None:
    matches = matcher(pattern)
    assert [key for key in [*yes, *no] if matches(key)] == yes


@for_each(("pattern", "yes", "no"), CASES, ids=lambda value: "" if isinstance(value, list) else None)
def test_a_server_reads_it_as_well(raw: Any, namespace: str, pattern: bytes, yes: list[bytes], no: list[bytes]) -> None:
    # A prefix sets the keys of this test apart
    prefix = namespace.encode() + b":"
    raw.mset(dict.fromkeys([prefix + key for key in [*yes, *no]], 1))
    found = {key.removeprefix(prefix) for key in raw.scan_iter(match=prefix + pattern, count=10_000)}
    assert found == {*yes}
    raw.delete(*[prefix + key for key in [*yes, *no]])
