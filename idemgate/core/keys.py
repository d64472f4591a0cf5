"""All keys in Redis, one function each: name, type and content.

| key | type | content |
|---|---|---|
| `ig2:{<ns>:once:<scope>:<key>}` | string | the record of an idempotency key (`guard/scripts/lib/format.lua`) |
| `ig2:{<ns>:history:<scope>:<shard>}` | list | transitions of its keys (`core/history.py`); expires |
| `ig2:{<ns>:scopes}` | hash | scope of records -> longest retention, ms (`guard/scripts/register.lua`) |
| `ig2:{<ns>:dedup:<scope>:<shard>}:0`, `:1` | hash | the two pages of a dedup shard (`dedup/scripts/lib/pages.lua`) |
| `ig2:{<ns>:dedup:<scope>:<shard>}:values0`, `:values1` | hash | the same for a dedup set with values |
| `ig2:{<ns>:topics}` | hash | the registry: topic name -> packed policy |
| `ig2:{<ns>:topic:<topic>:<slot>/<slots>}:<part>` | `topics/scripts/lib/slot/slot.lua` | the parts of a slot |
| `ig2:{<ns>:topic:<topic>:<slot>/<slots>}:results0`, `1` | hash | results of deliveries, if the topic stores them |
| `ig2:{<ns>:topic:<topic>:<slot>/<slots>}:history` | list | its last transitions (`core/history.py`); expires |
| `ig2:{<ns>:topic:<topic>:<slot>/<slots>}:out` | list or stream | the slot's forwarded messages, without a target |
| `<name>:<part>`, `{<name>}:<part>` | see `LIST_PARTS` | beside a list `<name>` that `gate.consume_list` consumes |
| `ig2:{<ns>:durability}` | string | `1`; written before each WAIT of a gate with `durability=`, expires |
| `ig2:{<ns>:acts}` | list | acts of operators (`operate/scripts/record.lua`) |
| `ig2:{<ns>:presence}` | sorted set | id of a process -> time of its last report, ms (`presence/scripts/beat.lua`) |
| `ig2:{<ns>:presence}:names` | sorted set | id of requests, and the name of their process -> time, ms; expires |
| `ig2:{<ns>:presence}:<id>` | string | the report of a process, packed (`presence/report.py`); expires |
| `ig2:{<ns>:members:<group>}:<part>` | `membership/scripts/lib/members.lua` | the members of a group, and their slots |

A record's name, a slot's `:scheduled`, its `:results0:<key>` and a group's `:alive` are also wake-up channels. In the
registry, a field of a topic's name with " to" or " was" appended records a change of its slots
(`topics/scripts/reshard/begin.lua`).

`ig2` is the layout. The part in braces selects the Redis Cluster slot. It comes first and contains no other brace, so
a user's key cannot change the cluster slot. User text is percent-encoded, and hashed if it is long.
"""

from __future__ import annotations

import re
from binascii import crc32
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple
from urllib.parse import quote_from_bytes
from uuid import UUID

from idemgate.errors import InvalidArgument, MissingKey

__all__ = [
    "Key",
    "Owner",
    "acts",
    "check_name",
    "check_scope",
    "dedup_ids",
    "dedup_values",
    "digest_id",
    "durability_key",
    "event",
    "is_library_key",
    "is_process_id",
    "list_keys",
    "members",
    "outbox",
    "owner_of",
    "pattern",
    "patterns",
    "presence",
    "process_names",
    "raw",
    "record",
    "record_prefix",
    "row_name",
    "scope_history",
    "scopes",
    "slot",
    "slot_history",
    "slot_messages",
    "slot_of",
    "slot_of_event",
    "step_key",
    "successor_slots",
    "text_of",
    "topics",
    "work",
]

Key = str | bytes | int

PARTS = (
    "scheduled",
    "messages",
    "next",
    "leases",
    "inflight",
    "dead",
    "dead:data",
    "meta",
    "dedup",
    "dedup:expiry",
    "ready",
    "group:active",
    "group:waiting",
    "replies0",
    "replies1",
)
RESULT_PARTS = ("results0", "results1")
"""The keys beside a slot whose topic stores results of deliveries (`topics/scripts/lib/slot/store_result.lua`)."""
HISTORY_PART = "history"
HISTORY_SHARDS = 16
"""The number of histories of a scope of guarded keys."""
LIST_PARTS = ("incoming", "leases", "state", "data", "dead")
"""The keys beside a list that `gate.consume_list` consumes.

- `incoming`, list: entries that a blocking pop has moved, and no consumer has taken.
- `leases`, sorted set: id of a taken entry -> ms from which a consumer may take it: its lease or delay has ended.
- `state`, hash: id -> number of deliveries, then the consumer that holds the entry and the id of its take, or nothing.
- `data`, hash: id -> the entry as it was in the list.
- `dead`, list: dead letters as JSON.
"""
LONGEST = 128
"""The maximum bytes of an escaped text. A longer one is replaced by a hash, since every record stores its key."""

_HASH_TAG = re.compile(r"[^{]*\{[^}]+\}")
_PLAIN = re.compile(rb"[A-Za-z0-9_.@:/+=,-]{1,128}")
_PLAIN_TEXT = re.compile(_PLAIN.pattern.decode())
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_PROCESS_ID = re.compile(r"[0-9a-f]{32}")
_SAFE = "_.@:/+=,-"


def check_name(value: str, what: str) -> str:
    """Return the name of a namespace or topic. Raises InvalidArgument for other characters, which are not escaped."""
    if not isinstance(value, str) or not _NAME.fullmatch(value):
        raise InvalidArgument(what, value, "not a name", "Use 1 to 64 of A-Z a-z 0-9 _ . -")
    return value


def check_scope(scope: str) -> str:
    """Return the scope. Raises InvalidArgument for empty text, invalid Unicode and other types."""
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
    """Return the bytes of a key: str as UTF-8, an int as decimal digits. So `7` and `"7"` are the same key.

    Raises:
        MissingKey: the key is None or empty.
        InvalidArgument: the key is longer than 65,536 bytes, or of another type.
    """
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
        kind = MissingKey if key is None else InvalidArgument
        raise kind("key", key, f"a {type(key).__name__} is not a key", "Use a str, bytes or int")
    if not encoded:
        raise MissingKey("key", key, "empty", "An empty key would be shared by all work")
    if len(encoded) > 65_536:
        raise InvalidArgument(
            "key", key, f"{len(encoded)} bytes long", "Use at most 65,536 bytes, or a hash of what you have"
        )
    return encoded


def _digits(key: int) -> bytes:
    try:
        return b"%d" % key
    except ValueError:  # Python limits the conversion of an int to 4,300 digits
        bits = f"int of {key.bit_length()} bits"
        raise InvalidArgument("key", bits, "is too long for a key", "Use a hash of it") from None


def text_of(key: Key) -> str:
    """Return the key as text for errors and logs."""
    return raw(key).decode(errors="backslashreplace")


def digest_id(key: Key, what: str) -> bytes:
    """Return a digest of 16 bytes for a user's text, such as an event id. `what` is the parameter to name in errors."""
    try:
        return blake2b(raw(key), digest_size=16).digest()
    except InvalidArgument as error:
        raise InvalidArgument(what, error.value, error.problem, error.fix) from None


def event(event_id: Key, key: bytes, route: bytes) -> bytes:
    """Return 18 bytes for an event of a key: a digest of 128 bits, then the hash that selects its slot."""
    name = digest_id(event_id, "event_id")
    return blake2b(name + key, digest_size=16).digest() + (crc32(route) & 0xFFFF).to_bytes(2)


def _escape(text: bytes) -> bytes:
    """Escape a text without collisions: plain text stays, and other bytes become %XX.

    A long text becomes `#` and a hash; no escaped text starts with `#`.
    """
    if _PLAIN.fullmatch(text):
        return text
    escaped = quote_from_bytes(text, safe=_SAFE).encode()
    if len(escaped) <= LONGEST:
        return escaped
    return b"#" + blake2b(text, digest_size=16).hexdigest().encode()


def step_key(namespace: str, scope: str, key: Key, step: str) -> str:
    """Return a UUID for one step of the work of a key. It must never change, because other systems store it."""
    parts = (namespace.encode(), scope.encode(), raw(key), step.encode())
    digested = bytearray(blake2b(b"".join(b"%d:%s" % (len(part), part) for part in parts), digest_size=16).digest())
    digested[6], digested[8] = digested[6] & 0x0F | 0x80, digested[8] & 0x3F | 0x80  # version 8 of RFC 9562
    return str(UUID(bytes=bytes(digested)))


def work(topic: str, group: bytes, key: bytes) -> str:
    """Return a unique text for a topic, group (b"" for none) and key.

    It is unique because a topic's name has no `/`, and escaped text has no `|`.
    """
    route = b"%s|%s" % (_escape(group), _escape(key)) if group else _escape(key)
    return f"{topic}/{route.decode()}"


def _escape_scope(scope: str) -> bytes:
    check_scope(scope)
    # A colon ends the scope, so it must not contain one. The key is last and may.
    return _escape(scope.encode()).replace(b":", b"%3A")


@lru_cache(4096)
def record_prefix(namespace: str, scope: str) -> bytes:
    """Return the begin of the keys of all records of a scope. The escaped key and "}" follow."""
    return b"ig2:{%s:once:%s:" % (namespace.encode(), _escape_scope(scope))


def record(namespace: str, scope: str, key: Key) -> bytes:
    """Return the key of the record of one idempotency key."""
    plain = type(key) is str and _PLAIN_TEXT.fullmatch(key)
    return record_prefix(namespace, scope) + (key.encode() if plain else _escape(raw(key))) + b"}"  # type: ignore[union-attr]  # pyright: ignore[reportAttributeAccessIssue]


def row_name(namespace: str, scope: str, key: Key) -> tuple[str, str]:
    """Return the scope and the key under which a sink stores an idempotency key, as in its `SinkEntry`.

    They are parts of `record`. Raises InvalidArgument for a scope or a key that a guard would refuse.
    """
    return f"{namespace}:{_escape_scope(scope).decode()}", _escape(raw(key)).decode()


@lru_cache(4096)
def dedup_ids(namespace: str, scope: str, shard: int) -> tuple[bytes, bytes]:
    """Return the keys of the two pages of one shard of a dedup set."""
    tag = _shard(namespace, scope, shard)
    return tag + b":0", tag + b":1"


@lru_cache(4096)
def dedup_values(namespace: str, scope: str, shard: int) -> tuple[bytes, bytes]:
    """Return the keys of the two pages of one shard of a dedup set with values."""
    tag = _shard(namespace, scope, shard)
    return tag + b":values0", tag + b":values1"


def _shard(namespace: str, scope: str, shard: int) -> bytes:
    return b"ig2:{%s:dedup:%s:%d}" % (namespace.encode(), _escape_scope(scope), shard)


def list_keys(name: str) -> tuple[bytes, ...]:
    """Return a user's list and the keys beside it (`LIST_PARTS`), which all have its cluster slot.

    A name without a hash tag is the hash tag of the others.

    Raises:
        InvalidArgument: the name is empty, or has a closing brace and no hash tag, so that no other key has its slot.
    """
    if not isinstance(name, str) or not name:
        raise InvalidArgument("name", name, "not the name of a list", "Use a non-empty string")
    tagged = _HASH_TAG.match(name)
    if not tagged and "}" in name:
        raise InvalidArgument("name", name, "a '}' without a hash tag", "Use a name without braces, or with a {tag}")
    stem = name if tagged else f"{{{name}}}"
    return name.encode(), *(f"{stem}:{part}".encode() for part in LIST_PARTS)


def scopes(namespace: str) -> bytes:
    """Return the key of the longest retention of each scope."""
    return f"ig2:{{{namespace}:scopes}}".encode()


def acts(namespace: str) -> bytes:
    """Return the key of the list of acts of operators."""
    return f"ig2:{{{namespace}:acts}}".encode()


def presence(namespace: str, *ids: str) -> tuple[bytes, ...]:
    """Return the key of the index of processes, then those of the reports of processes with these ids."""
    index = f"ig2:{{{namespace}:presence}}"
    return index.encode(), *(f"{index}:{one}".encode() for one in ids)


def process_names(namespace: str) -> bytes:
    """Return the key of the names of processes, also of those that have ended."""
    return f"ig2:{{{namespace}:presence}}:names".encode()


def is_process_id(text: str) -> bool:
    """Return True for an id that `presence` may get from a store."""
    return _PROCESS_ID.fullmatch(text) is not None


def topics(namespace: str) -> bytes:
    """Return the key of the registry: the topics and their policies."""
    return b"ig2:{%s:topics}" % namespace.encode()


def durability_key(namespace: str) -> bytes:
    """Return the key written before each WAIT, so that the WAIT covers all earlier writes. It expires."""
    return b"ig2:{%s:durability}" % namespace.encode()


def members(namespace: str, group: str) -> tuple[bytes, ...]:
    """Return the keys of a group of members, in the order of the scripts' KEYS."""
    return tuple(f"ig2:{{{namespace}:members:{group}}}:{part}".encode() for part in ("alive", "meta", "held"))


@lru_cache(65_536)
def slot(namespace: str, topic: str, number: int, slots: int) -> tuple[bytes, ...]:
    """Return the keys of one slot of a topic, in the order of the scripts' KEYS.

    The names contain the number of slots. A client with another number uses other keys and cannot touch these.
    """
    tag = f"ig2:{{{namespace}:topic:{topic}:{number}/{slots}}}"
    return tuple(f"{tag}:{part}".encode() for part in PARTS)


def slot_results(namespace: str, topic: str, number: int, slots: int) -> tuple[bytes, ...]:
    """Return the keys of a slot that hold results of deliveries."""
    tag = f"ig2:{{{namespace}:topic:{topic}:{number}/{slots}}}"
    return tuple(f"{tag}:{part}".encode() for part in RESULT_PARTS)


def slot_history(namespace: str, topic: str, number: int, slots: int) -> bytes:
    """Return the key of the history of a slot. It stays there when the number of slots changes."""
    return f"ig2:{{{namespace}:topic:{topic}:{number}/{slots}}}:{HISTORY_PART}".encode()


def slot_messages(namespace: str, topic: str, number: int, slots: int) -> bytes:
    """Return the key of a slot that has each message, for those who need no other key of `slot`."""
    return f"ig2:{{{namespace}:topic:{topic}:{number}/{slots}}}:messages".encode()


def scope_history(namespace: str, scope: str, raw_key: bytes) -> bytes:
    """Return the key of the history of a scope that has the transitions of this key."""
    shard = crc32(raw_key) % HISTORY_SHARDS
    return b"ig2:{%s:history:%s:%d}" % (namespace.encode(), _escape_scope(scope), shard)


def result_channel(namespace: str, topic: str, key: bytes) -> bytes:
    """Return the channel that wakes the callers that wait for a result of a key. It does not depend on the slots."""
    return f"ig2:{{{namespace}:topic:{topic}}}:result:".encode() + key


def patterns(namespace: str) -> dict[str, str]:
    """Return the key patterns for ACL rules, by name. The same patterns fit the channels.

    The names are `records`, `scopes`, `history`, `acts`, `presence`, `dedup`, `topics` (with slots and outboxes),
    `members`, `durability` and `all`.
    """
    own = f"ig2:{{{check_name(namespace, 'namespace')}:"
    kinds = {"records": "once:*", "dedup": "dedup:*", "topics": "topic*", "members": "members:*"}
    kinds["history"] = "history:*"
    kinds |= {"scopes": "scopes}", "acts": "acts}", "presence": "presence}*", "durability": "durability}", "all": "*"}
    return {name: own + rest for name, rest in kinds.items()}


def is_library_key(key: bytes) -> bool:
    """Return True for a key of this library in any namespace."""
    return key.startswith(b"ig2:{")


class Owner(NamedTuple):
    """The owner of a key in a namespace.

    `kind` is "once", "scopes", "acts", "presence", "report", "names", "dedup", "topics", "durability", "slot",
    "results", "history", "out" or "members". It is "layout" for a key of another layout, and "foreign" for a key that
    no function here builds. `name` is the escaped scope, the topic, the id of a process or the group of members.
    """

    kind: str
    name: str = ""
    number: int = 0
    slots: int = 1
    part: str = ""


_ESCAPED = r"(?:#[0-9a-f]{32}|(?:[\w.@:/+=,-]|%[0-9A-F]{2}){1,128})"
_OUT = rf"out(?::(?:{'|'.join(LIST_PARTS)}))?"
_PART = "|".join((*PARTS, *RESULT_PARTS, HISTORY_PART, _OUT))
_SIZE = r"[1-9][0-9]{0,4}"
_OWNERS = re.compile(
    rf"once:(?P<scope>{_ESCAPED}):{_ESCAPED}\}}"
    r"|(?P<single>topics|scopes|acts|durability|presence)\}"
    rf"|presence\}}:(?:(?P<process>{_PROCESS_ID.pattern})|(?P<names>names))"
    rf"|history:(?P<history>{_ESCAPED}):(?:[0-9]|1[0-5])\}}"
    rf"|dedup:(?P<dedup>{_ESCAPED}):(?P<shard>0|[1-9]\d?)\}}:(?P<page>(?:values)?[01])"
    rf"|topic:(?P<topic>[\w.-]{{1,64}}):(?P<number>0|{_SIZE})/(?P<slots>{_SIZE})\}}:(?P<part>{_PART})"
    r"|members:(?P<group>[\w.-]{1,64})\}:(?P<member>alive|meta|held)",
    re.ASCII,
)


def pattern(namespace: str) -> bytes:
    """Return the SCAN pattern for all keys of a namespace, in any layout."""
    return b"ig*:{%s:*" % namespace.encode()


def owner_of(namespace: str, key: bytes) -> Owner:
    """Return the owner of a key that matches `pattern`. It is the inverse of this module's functions."""
    prefix = b"ig2:{%s:" % namespace.encode()
    if not key.startswith(prefix):
        return Owner("layout")
    found = _OWNERS.fullmatch(key[len(prefix) :].decode(errors="replace"))
    if found is None:
        return Owner("foreign")
    if found["single"]:
        return Owner(found["single"])
    if found["names"]:
        return Owner("names")
    if found["process"]:
        return Owner("report", found["process"])
    if found["scope"]:
        return Owner("once", found["scope"])
    if found["history"]:
        return Owner("history", found["history"])
    if found["dedup"]:
        return Owner("dedup", found["dedup"], int(found["shard"]), part=found["page"])
    if found["group"]:
        return Owner("members", found["group"], part=found["member"])
    part = found["part"]
    kind = "slot" if part in PARTS else "results" if part in RESULT_PARTS else part.partition(":")[0]
    return Owner(kind, found["topic"], int(found["number"]), int(found["slots"]), part)


def outbox(namespace: str, topic: str, number: int, slots: int) -> bytes:
    """Return the key for a slot's forwarded messages if no target is named.

    It shares the slot's hash tag, so that a script can move messages atomically.
    """
    return f"ig2:{{{namespace}:topic:{topic}:{number}/{slots}}}:out".encode()


def slot_of(key: bytes, slots: int) -> int:
    """Return the slot of a key: CRC32 of its bytes, modulo the number of slots (a power of two)."""
    return crc32(key) & (slots - 1)


def slot_of_event(name: bytes, slots: int) -> int:
    """Return the slot of an event, given the bytes from `event`: the slot of its group or key."""
    return int.from_bytes(name[16:18]) & (slots - 1)


def successor_slots(number: int, before: int, after: int) -> range:
    """Return the slots of a layout with `after` slots that succeed slot `number` of `before` slots.

    With more slots, one slot has several successors. With fewer, only the first of the merged slots has one.
    """
    return range(number, after, max(before, 1))
