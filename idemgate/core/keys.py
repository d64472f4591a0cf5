"""Every key in Redis, one function each: pattern, type and meaning. Reading this module is reading the data model.

| key | type | what |
|---|---|---|
| `ig1:{<ns>:once:<scope>:<key>}` | string | the record of one idempotency key (`lua/lib/record.lua`); its name is
also its wake-up channel |
| `ig1:{<ns>:seen:<scope>:<shard>}:0`, `:1` | hash | the two pages of one shard of a seen-set (`lua/lib/page.lua`) |
| `ig1:{<ns>:seen:<scope>:<shard>}:kept0`, `:kept1` | hash | the same of one that keeps values |
| `ig1:{<ns>:topics}` | hash | topic name -> packed policy; with " to" or " was" behind the name, what changes its slots
(`lua/topics/resize.lua`) |
| `ig1:{<ns>:topic:<topic>:<slot>/<slots>}:<part>` | see `lua/lib/slot.lua` | the fourteen parts of one slot; `:due` is
also its wake-up channel |
| `ig1:{<ns>:topic:<topic>:<slot>/<slots>}:out` | list or stream | what a slot sent on, unless a target is named |
| `ig1:{<ns>:touched}` | string | `1`; written before each WAIT of a gate with `durability=`, expires |
| `ig1:{<ns>:members:<group>}:<part>` | see `lua/lib/crew.lua` | who is there, and which slots they hold; `:alive` is
also their wake-up channel |

`ig1` is the layout. What stands in braces decides the Redis Cluster slot; it comes first and holds no other brace, so
no user key can steer where it goes. Text of users is percent-encoded, and hashed where it is long.
"""

from __future__ import annotations

import re
from binascii import crc32
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple
from urllib.parse import quote_from_bytes

from idemgate.errors import InvalidArgument

__all__ = [
    "Key",
    "Owner",
    "check_name",
    "check_scope",
    "dedup_ids",
    "dedup_values",
    "digest",
    "event",
    "heirs",
    "is_ours",
    "members",
    "outbox",
    "owner_of",
    "pattern",
    "patterns",
    "raw",
    "record",
    "slot",
    "slot_of",
    "slot_of_event",
    "text_of",
    "topics",
    "touched",
    "work",
]

Key = str | bytes | int

PARTS = (
    "due",
    "pending",
    "lease",
    "flight",
    "dead",
    "grave",
    "facts",
    "memo",
    "fade",
    "ready",
    "busy",
    "line",
    "told0",
    "told1",
)
LONGEST = 128
"""Longer escaped texts are replaced by a hash: a key is stored once a record, and memory is dear."""

_PLAIN = re.compile(rb"[A-Za-z0-9_.@:/+=,-]{1,128}")
_PLAIN_TEXT = re.compile(_PLAIN.pattern.decode())
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_SAFE = "_.@:/+=,-"


def check_name(value: str, what: str) -> str:
    """A namespace or topic name, or InvalidArgument. These are written by programmers, so they are refused rather than
    escaped."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise InvalidArgument(what, value, "not a name", "Use 1 to 64 of A-Z a-z 0-9 _ . -")
    return value


def check_scope(scope: str) -> str:
    """A scope, or InvalidArgument."""
    if isinstance(scope, str) and scope:
        try:
            scope.encode()
        except UnicodeEncodeError:
            pass
        else:
            return scope
    raise InvalidArgument(
        "scope", scope, "not a name", "Use text that is not empty; once also takes None: the function's name"
    )


def raw(key: Key) -> bytes:
    """The key's own bytes: str as UTF-8, an int as its decimal digits, so `7` and `"7"` are the same key."""
    if isinstance(key, str):
        try:
            encoded = key.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument(
                "key", key, f"not valid Unicode ({error.reason})", "Pass bytes, or repair the text"
            ) from None
    elif isinstance(key, bytes):
        encoded = key
    elif isinstance(key, int) and not isinstance(key, bool):
        encoded = _digits(key)
    else:
        raise InvalidArgument("key", key, f"a {type(key).__name__} is not a key", "Use a str, bytes or int")
    if not encoded:
        raise InvalidArgument("key", key, "empty", "A key names the work; an empty one would make all work one")
    if len(encoded) > 65_536:
        raise InvalidArgument(
            "key", key, f"{len(encoded)} bytes long", "Use at most 65,536 bytes, or a hash of what you have"
        )
    return encoded


def _digits(key: int) -> bytes:
    try:
        return b"%d" % key
    except ValueError:  # Python refuses to write out thousands of digits
        bits = f"int of {key.bit_length()} bits"
        raise InvalidArgument("key", bits, "is too long for a key", "Use a hash of it") from None


def text_of(key: Key) -> str:
    """The key as people read it in errors and logs."""
    return raw(key).decode(errors="backslashreplace")


def digest(key: Key, what: str) -> bytes:
    """A text of users where only its identity matters, such as an event id: 16 bytes."""
    try:
        return blake2b(raw(key), digest_size=16).digest()
    except InvalidArgument as error:
        raise InvalidArgument(what, error.value, error.problem, error.fix) from None


def event(event_id: Key, key: bytes, route: bytes) -> bytes:
    """18 bytes: what tells this event of this key from all others (a digest of 128 bits), and what decides its slot."""
    name = digest(event_id, "event_id")
    return blake2b(name + key, digest_size=16).digest() + (crc32(route) & 0xFFFF).to_bytes(2)


def _escape(text: bytes) -> bytes:
    """Injective: plain text stays, other bytes become %XX, and what is long becomes `#` and a hash (no text escapes to
    a `#`)."""
    if _PLAIN.fullmatch(text):
        return text
    escaped = quote_from_bytes(text, safe=_SAFE).encode()
    if len(escaped) <= LONGEST:
        return escaped
    return b"#" + blake2b(text, digest_size=16).hexdigest().encode()


def work(topic: str, group: bytes, key: bytes) -> str:
    """What a delivery is about, as text: another for each topic, group (b"" for none) and key. (A topic's name has no
    `/`, what is escaped no `|`.)"""
    about = b"%s|%s" % (_escape(group), _escape(key)) if group else _escape(key)
    return f"{topic}/{about.decode()}"


def _escape_scope(scope: str) -> bytes:
    check_scope(scope)
    # The scope may not hold the colon that ends it; the key, being last, may.
    return _escape(scope.encode()).replace(b":", b"%3A")


@lru_cache(4096)
def _record_prefix(namespace: str, scope: str) -> bytes:
    return b"ig1:{%s:once:%s:" % (namespace.encode(), _escape_scope(scope))


def record(namespace: str, scope: str, key: Key) -> bytes:
    """The record of one idempotency key."""
    plain = type(key) is str and _PLAIN_TEXT.fullmatch(key)
    return _record_prefix(namespace, scope) + (key.encode() if plain else _escape(raw(key))) + b"}"  # type: ignore[union-attr]  # pyright: ignore[reportAttributeAccessIssue]


@lru_cache(4096)
def dedup_ids(namespace: str, scope: str, shard: int) -> tuple[bytes, bytes]:
    """The two pages of one shard of a seen-set."""
    tag = _shard(namespace, scope, shard)
    return tag + b":0", tag + b":1"


@lru_cache(4096)
def dedup_values(namespace: str, scope: str, shard: int) -> tuple[bytes, bytes]:
    """The two pages of one shard of a seen-set that keeps values."""
    tag = _shard(namespace, scope, shard)
    return tag + b":kept0", tag + b":kept1"


def _shard(namespace: str, scope: str, shard: int) -> bytes:
    return b"ig1:{%s:seen:%s:%d}" % (namespace.encode(), _escape_scope(scope), shard)


def topics(namespace: str) -> bytes:
    """The registry: which topics exist, and their policies."""
    return b"ig1:{%s:topics}" % namespace.encode()


def touched(namespace: str) -> bytes:
    """Written before each WAIT, so that the WAIT covers all that was written before; expires."""
    return b"ig1:{%s:touched}" % namespace.encode()


def members(namespace: str, group: str) -> tuple[bytes, ...]:
    """One group of members, in the order in which scripts get its parts."""
    return tuple(f"ig1:{{{namespace}:members:{group}}}:{part}".encode() for part in ("alive", "facts", "held"))


@lru_cache(65_536)
def slot(namespace: str, topic: str, number: int, slots: int) -> tuple[bytes, ...]:
    """The parts of one slot of a topic, in the order in which scripts get them.

    The name says of how many slots it is one: whoever goes by another number looks elsewhere, and never into it.
    """
    tag = f"ig1:{{{namespace}:topic:{topic}:{number}/{slots}}}"
    return tuple(f"{tag}:{part}".encode() for part in PARTS)


def patterns(namespace: str) -> dict[str, str]:
    """What an access list may let somebody see, by name: `records`, `seen` (the pages of seen-sets), `topics` (and
    their slots and outboxes), `members`, `touched`, `all`. The same patterns are those of their channels."""
    own = f"ig1:{{{check_name(namespace, 'namespace')}:"
    kinds = {"records": "once:*", "seen": "seen:*", "topics": "topic*", "members": "members:*"}
    kinds |= {"touched": "touched}", "all": "*"}
    return {name: own + rest for name, rest in kinds.items()}


def is_ours(key: bytes) -> bool:
    """Whether a key is one of these, of whichever namespace."""
    return key.startswith(b"ig1:{")


class Owner(NamedTuple):
    """What a key of a namespace belongs to: `kind` "once", "seen", "topics", "touched", "slot", "out" or "members";
    "layout" is a key of another layout, "foreign" one that no function here makes. `name` is the scope as escaped, the
    topic or the group of members."""

    kind: str
    name: str = ""
    number: int = 0
    slots: int = 1
    part: str = ""


_ESCAPED = r"(?:#[0-9a-f]{32}|(?:[\w.@:/+=,-]|%[0-9A-F]{2}){1,128})"
_SIZE = r"[1-9][0-9]{0,4}"
_OWNERS = re.compile(
    rf"once:(?P<scope>{_ESCAPED}):{_ESCAPED}\}}"
    r"|(?P<topics>topics)\}|(?P<touched>touched)\}"
    rf"|seen:(?P<seen>{_ESCAPED}):(?P<shard>0|[1-9]\d?)\}}:(?P<page>(?:kept)?[01])"
    rf"|topic:(?P<topic>[\w.-]{{1,64}}):(?P<number>0|{_SIZE})/(?P<slots>{_SIZE})\}}:(?P<part>{'|'.join(PARTS)}|out)"
    r"|members:(?P<group>[\w.-]{1,64})\}:(?P<crew>alive|facts|held)",
    re.ASCII,
)


def pattern(namespace: str) -> bytes:
    """For SCAN: every key of a namespace, of whichever layout."""
    return b"ig*:{%s:*" % namespace.encode()


def owner_of(namespace: str, key: bytes) -> Owner:
    """What a key that matches `pattern` belongs to: the functions of this module, read backwards."""
    prefix = b"ig1:{%s:" % namespace.encode()
    if not key.startswith(prefix):
        return Owner("layout")
    found = _OWNERS.fullmatch(key[len(prefix) :].decode(errors="replace"))
    if found is None:
        return Owner("foreign")
    if found["topics"]:
        return Owner("topics")
    if found["touched"]:
        return Owner("touched")
    if found["scope"]:
        return Owner("once", found["scope"])
    if found["seen"]:
        return Owner("seen", found["seen"], int(found["shard"]), part=found["page"])
    if found["group"]:
        return Owner("members", found["group"], part=found["crew"])
    kind = "out" if found["part"] == "out" else "slot"
    return Owner(kind, found["topic"], int(found["number"]), int(found["slots"]), found["part"])


def outbox(namespace: str, topic: str, number: int, slots: int) -> bytes:
    """Where a slot's forwarded messages go unless a target is named: beside the slot, so that a cluster moves them in
    one step."""
    return f"ig1:{{{namespace}:topic:{topic}:{number}/{slots}}}:out".encode()


def slot_of(key: bytes, slots: int) -> int:
    """Which slot a key belongs to: CRC32 of its bytes, modulo the number of slots (a power of two)."""
    return crc32(key) & (slots - 1)


def slot_of_event(name: bytes, slots: int) -> int:
    """Which slot an event belongs to, as `event` says it: that of its group or key."""
    return int.from_bytes(name[16:18]) & (slots - 1)


def heirs(number: int, before: int, after: int) -> range:
    """The slots, of `after`, that a slot of `before` becomes: several where there come to be more, the first of those
    that become one where there come to be less, and none for the others of them."""
    return range(number, after, max(before, 1))
