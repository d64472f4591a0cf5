"""Each fault that the auditor looks for is planted, by raw commands, and that one is found, and nothing else."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import msgpack
import pytest

from idemgate import Gate, InvalidArgument, Trigger
from idemgate.audit.catalogue import DATA_KINDS
from idemgate.audit.slot import Contents, Slot, SlotView, check_slot, decode_topic_entry, read_slot
from idemgate.core import keys
from idemgate.errors import LeaseLost
from idemgate.membership import heartbeats as members
from idemgate.operate.acts import record_call
from idemgate.presence import calls as presence
from idemgate.presence.compose import Composer
from idemgate.store.nodes import servers
from idemgate.store.sync import SyncLink
from idemgate.testing import Clock, audit
from idemgate.testing.audit import CODEC, _Audit
from idemgate.topics.reshard import ReshardProgress
from tests.audit.mending import execute, is_command, run_commands
from tests.messages import pack_message, unpack_message

pytestmark = pytest.mark.one_in(5)

Plant = Callable[["Hand"], object]


class Hand:
    """What damages a namespace."""

    def __init__(self, gate: Gate, raw: Any) -> None:
        self.raw = raw
        self.namespace = gate.namespace
        self.gate = gate

    def key(self, part: str, topic: str = "t", number: int = 0, slots: int = 1) -> bytes:
        return keys.slot(self.namespace, topic, number, slots)[keys.PARTS.index(part)]

    def name(self, rest: str) -> str:
        """A key of the namespace."""
        return f"ig2:{{{self.namespace}:{rest}"

    def edit(self, part: str, name: bytes | None, place: int, value: Any, topic: str = "t") -> None:
        """Writes one place of a packed array; of the first one where none is named."""
        key = self.key(part, topic)
        name = name or self.raw.hkeys(key)[0]
        fields = msgpack.unpackb(self.raw.hget(key, name), raw=True)
        fields[place - 1] = value
        self.raw.hset(key, name, msgpack.packb(fields, use_bin_type=False))

    def message(self, name: bytes, topic: str = "t", **changes: Any) -> None:
        """Writes fields of a message."""
        key = self.key("messages", topic)
        self.raw.hset(key, name, pack_message(**unpack_message(self.raw.hget(key, name)) | changes))

    def entry(self, name: bytes, place: int, value: bytes) -> None:
        """Writes one place of the entry of a delivery in flight."""
        places = self.raw.hget(self.key("inflight"), name).split(b" ")
        places[place - 1] = value
        self.raw.hset(self.key("inflight"), name, b" ".join(places))

    def move(self, source: str, target: str) -> None:
        self.raw.rename(self.key(source), target)

    def fence(self, part: str) -> int:
        value = self.raw.hvals(self.key(part))[0]
        return int(value.split(b" ")[0] if part == "inflight" else msgpack.unpackb(value, raw=True)[4])


def _infinite(hand: Hand) -> None:
    (member,) = hand.raw.zrange(hand.key("ready", "r"), 0, -1)
    hand.raw.zadd(hand.key("ready", "r"), {member: "inf"})


def _last(key: str) -> str:
    return key.rpartition(":")[2].rstrip("}")


def _second_flight(hand: Hand) -> None:
    """A dead letter of a key, under the token of its delivery."""
    fence, message = hand.fence("inflight"), hand.raw.hget(hand.key("messages"), b"flies")
    letter = msgpack.packb([b"flies", message, b"why", 7, fence], use_bin_type=False)
    hand.raw.hset(hand.key("dead:data"), str(fence), letter)
    hand.raw.zadd(hand.key("dead"), {str(fence): 7})
    hand.raw.hincrby(hand.key("meta"), "accepted", 1)


def _to_other_slot(hand: Hand, window: str | None) -> None:
    """A slot of two, whose keys belong to the other one."""
    topic = hand.gate.topic("two", slots=2, window=window)
    topic.trigger("a")
    assert len(topic.take(1)) == (window is None)
    number = keys.slot_of(b"a", 2)
    for part in keys.PARTS:
        key = hand.key(part, "two", number, 2)
        if hand.raw.exists(key):
            hand.raw.rename(key, hand.key(part, "two", 1 - number, 2))


def _hold(hand: Hand, group: str, *keys: bytes) -> None:
    hand.raw.hset(hand.key("group:active"), group, msgpack.packb(keys, use_bin_type=False))


def _unknown_to_its_group(hand: Hand) -> None:
    hand.gate.topics["t"].cancel("behind", group="g")
    hand.raw.hdel(hand.key("group:active"), "g")


def _limit(hand: Hand, topic: str, group_concurrency: int) -> None:
    """What the registry says of a topic's groups."""
    key = hand.name("topics}")
    facts = msgpack.unpackb(hand.raw.hget(key, topic))
    hand.raw.hset(key, topic, msgpack.packb(facts | {"group_concurrency": group_concurrency}))


def _limit_lowered(hand: Hand) -> None:
    topic = hand.gate.topic("wide", group_concurrency=2)
    topic.trigger_many([Trigger("a", group="g"), Trigger("b", group="g")])
    assert len(topic.take(2)) == 2
    _limit(hand, "wide", 1)


def _line_moved(hand: Hand) -> None:
    (member,) = hand.raw.zrange(hand.key("group:waiting"), 0, -1)
    hand.raw.zrem(hand.key("group:waiting"), member)
    hand.raw.zadd(hand.key("group:waiting"), {member.replace(b"\x00\x000", b"\x00\x001"): 0})


def _ready_moved(hand: Hand) -> None:
    (member,) = hand.raw.zrange(hand.key("ready", "r"), 0, -1)
    hand.raw.zrem(hand.key("ready", "r"), member)
    hand.raw.zadd(
        hand.key("ready", "r"),
        {
            b"1" + member[1:]: 0,
        },
    )
    hand.message(b"second", "r", due=5)


def _earlier_after_a_flush(hand: Hand) -> None:
    topic = hand.gate.topics["t"]
    assert topic.flush() == 2
    topic.trigger("later", 1, delay="1h")
    assert audit(hand.gate).sound
    hand.raw.zincrby(hand.key("scheduled"), -1, "later")


def _earlier_after_a_flush_of_nothing(hand: Hand) -> None:
    topic = hand.gate.topics["t"]
    assert topic.flush() == 2
    topic.trigger("later", 1)
    assert topic.flush() == 0
    assert audit(hand.gate).sound
    hand.raw.zincrby(hand.key("scheduled"), -1, "later")


def _earlier_after_it_was_joined(hand: Hand) -> None:
    topic = hand.gate.topics["t"]
    assert topic.flush() == 2
    topic.trigger("waits", 1, delay="1h", version=3)
    assert audit(hand.gate).sound
    hand.raw.zincrby(hand.key("scheduled"), -1, "waits")


def _kept(hand: Hand, state: str) -> None:
    """A record keeps something that no codec wrote."""
    claim = hand.gate.claim("kept")
    if state == "result":
        assert claim.complete("x" * 40)
    elif state == "checkpoint":
        assert claim.checkpoint("x" * 40)
    else:

        @hand.gate.once(key="{n}", scope="claim", on_error="store")
        def kept(n: str) -> None:
            raise ValueError(n * 40)

        with pytest.raises(ValueError, match="xxx"):
            kept("x")
    name = hand.name(f"once:claim:{'x' if state == 'failure' else 'kept'}}}")
    record = hand.raw.get(name)
    assert audit(hand.gate).sound
    hand.raw.set(name, record[:-40] + bytes(40), keepttl=True)
    hand.raw.setrange(name, record.rindex(b"\x01\xd9" if state != "failure" else b"\x01\xc7"), b"\xc1")


def _left_and_holds(hand: Hand) -> None:
    assert hand.gate.context.link.run(members.leave(hand.namespace, "crew", hand.gate.context.clock, "m1"))
    report = audit(hand.gate)
    assert report.sound
    assert report.counted["members"] == 0
    hand.raw.hset(hand.name("members:crew}:held"), "t:0", "m1")
    hand.raw.expire(hand.name("members:crew}:held"), 60)


def _act(hand: Hand) -> None:
    hand.gate.context.link.run(record_call(hand.gate, "ann@host", "topic pause t", "too many errors"))
    assert audit(hand.gate).sound


def _cancel(hand: Hand) -> None:
    hand.gate.topic("cancelled").trigger("k")
    hand.gate.topic("cancelled").cancel("k")
    assert audit(hand.gate).sound


def _history(hand: Hand) -> bytes:
    return keys.slot_history(hand.gate.namespace, "cancelled", 0, 1)


def _report(hand: Hand) -> None:
    context = hand.gate.context
    report = Composer(context).compose()
    context.link.run(presence.beat(hand.gate.namespace, None, "0" * 32, report, named=True))
    assert audit(hand.gate).sound


def _names(hand: Hand) -> bytes:
    return keys.process_names(hand.gate.namespace)


def _index(hand: Hand) -> bytes:
    return keys.presence(hand.gate.namespace)[0]


def _stored(hand: Hand) -> bytes:
    return keys.presence(hand.gate.namespace, "0" * 32)[1]


def _page(hand: Hand, kind: str) -> bytes:
    """Return the page of a dedup set with one id, or with one value."""
    dedup = hand.gate.dedup("s", "1h")
    if kind == "ids":
        assert dedup.add("id")
    else:
        dedup.get_or_set("id", 1)
    (page,) = hand.raw.scan_iter(hand.name("dedup:*"))
    assert audit(hand.gate).sound
    return bytes(page)


FAULTS: dict[str, tuple[str, str, Plant]] = {
    # name: kind, what the key of the finding ends with, how it is planted
    "a rank that no priority has": ("disagrees", "ready", _infinite),
    "counted, and not there": ("conservation", "topics}", lambda h: h.raw.hincrby(h.key("meta"), "accepted", 1)),
    "there, and not counted": ("conservation", "topics}", lambda h: h.raw.hincrby(h.key("meta"), "acked_triggers", 2)),
    "a count that was changed": ("conservation", "topics}", lambda h: h.message(b"waits", count=7)),
    "scheduled, not pending": ("orphan", "scheduled", lambda h: h.raw.zadd(h.key("scheduled"), {"nobody": 1})),
    "ready, not pending": ("orphan", "ready", lambda h: h.raw.zadd(h.key("ready"), {"000000000000001-nobody": 1})),
    "in line, not pending": (
        "orphan",
        "group:waiting",
        lambda h: h.raw.zadd(h.key("group:waiting"), {b"g\x00\x00" + b"000000000000001" + b"000000000000001nobody": 0}),
    ),
    "a lease of nothing": ("orphan", "leases", lambda h: h.raw.zadd(h.key("leases"), {"nobody": 1})),
    "a delivery without a lease": ("orphan", "inflight", lambda h: h.raw.zrem(h.key("leases"), "flies")),
    "a lease of years": ("lease", "leases", lambda h: h.raw.zadd(h.key("leases"), {"flies": 9_999_999_999_999_000})),
    "a lease beyond the longest": ("lease", "leases", lambda h: h.raw.zincrby(h.key("leases"), 10_000_000, "flies")),
    "a lease without an end": ("lease", "leases", lambda h: h.raw.zadd(h.key("leases"), {"flies": "inf"})),
    "a last token days ahead": ("fence", "meta", lambda h: h.raw.hincrby(h.key("meta"), "fence", 3 * 86_400_000_000)),
    "a last token that is too large": ("fence", "meta", lambda h: h.raw.hset(h.key("meta"), "fence", str(2**53))),
    "a last token that is no integer": ("undecodable", "meta", lambda h: h.raw.hset(h.key("meta"), "fence", "1e15")),
    "a pause that cannot be read": ("undecodable", "meta", lambda h: h.raw.hset(h.key("meta"), "paused", "1 x")),
    "a record's token far ahead": (
        "fence",
        "done}",
        lambda h: h.raw.setrange(h.name("once:claim:done}"), 1, (2**52).to_bytes(7)),
    ),
    "a record's token that is too large": (
        "fence",
        "runs}",
        lambda h: h.raw.setrange(h.name("once:claim:runs}"), 2, (2**54).to_bytes(7)),
    ),
    "a retention of a scope that is no number": (
        "undecodable",
        "scopes}",
        lambda h: h.raw.hset(h.name("scopes}"), "claim", "a week"),
    ),
    "the retentions of scopes end": (
        "expires",
        "scopes}",
        lambda h: (h.raw.hset(h.name("scopes}"), "claim", "1"), h.raw.expire(h.name("scopes}"), 9)),
    ),
    "the retentions of scopes are of another type": (
        "wrong-type",
        "scopes}",
        lambda h: (h.raw.delete(h.name("scopes}")), h.raw.set(h.name("scopes}"), "x")),
    ),
    "an act that cannot be read": (
        "undecodable",
        "acts}",
        lambda h: (_act(h), h.raw.rpush(h.name("acts}"), b"\0" * 24 + b"\xc1")),
    ),
    "the acts end": ("expires", "acts}", lambda h: (_act(h), h.raw.expire(h.name("acts}"), 9))),
    "the acts are of another type": ("wrong-type", "acts}", lambda h: h.raw.set(h.name("acts}"), "x")),
    "a transition that cannot be read": (
        "undecodable",
        ":history",
        lambda h: (_cancel(h), h.raw.rpush(_history(h), "x")),
    ),
    "a history that never ends": ("no-expiry", ":history", lambda h: (_cancel(h), h.raw.persist(_history(h)))),
    "a history of another type": ("wrong-type", ":history", lambda h: h.raw.set(_history(h), "x", ex=9)),
    "a process that is none": ("undecodable", "presence}", lambda h: (_report(h), h.raw.zadd(_index(h), {"me": 1}))),
    "a name of no process": ("undecodable", ":names", lambda h: (_report(h), h.raw.zadd(_names(h), {"12345678": 1}))),
    "the names of processes never end": ("no-expiry", ":names", lambda h: (_report(h), h.raw.persist(_names(h)))),
    "the names of processes are of another type": ("wrong-type", ":names", lambda h: h.raw.set(_names(h), "x", ex=9)),
    "the index of processes never ends": ("no-expiry", "presence}", lambda h: (_report(h), h.raw.persist(_index(h)))),
    "the index of processes is of another type": ("wrong-type", "presence}", lambda h: h.raw.set(_index(h), "x", ex=9)),
    "a report that cannot be read": ("undecodable", "0" * 32, lambda h: (_report(h), h.raw.set(_stored(h), "x", ex=9))),
    "a report that never ends": ("no-expiry", "0" * 32, lambda h: (_report(h), h.raw.persist(_stored(h)))),
    "a page of ids that never ends": ("no-expiry", ":1", lambda h: h.raw.persist(_page(h, "ids"))),
    "a page of values that never ends": ("no-expiry", ":values1", lambda h: h.raw.persist(_page(h, "values"))),
    "a page of ids without a head": ("undecodable", ":1", lambda h: h.raw.hdel(_page(h, "ids"), "")),
    "a page of ids that is garbage": ("undecodable", ":1", lambda h: h.raw.hset(_page(h, "ids"), "", b"\x95\x02")),
    "a page of ids of another layout": (
        "undecodable",
        ":1",
        lambda h: h.raw.hset(_page(h, "ids"), "", msgpack.packb([2, 1, 2, 3, 4])),
    ),
    "a page of ids of another type": (
        "wrong-type",
        ":1",
        lambda h: (page := _page(h, "ids"), h.raw.delete(page), h.raw.set(page, "x", ex=9)),
    ),
    "a death without a body": ("orphan", "dead", lambda h: h.raw.zadd(h.key("dead"), {"17": 1})),
    "a body without a death": ("orphan", "dead:data", lambda h: h.raw.delete(h.key("dead"))),
    "pending, stands nowhere": ("unplaced", "messages", lambda h: h.raw.zrem(h.key("scheduled"), "waits")),
    "its line was deleted": ("unplaced", "messages", lambda h: h.raw.delete(h.key("group:waiting"))),
    "its ready set was deleted": ("unplaced", "r:0/1}:messages", lambda h: h.raw.delete(h.key("ready", "r"))),
    "scheduled while in flight": ("misplaced", "scheduled", lambda h: h.raw.zadd(h.key("scheduled"), {"flies": 1})),
    "in two places": ("misplaced", "messages", lambda h: h.raw.zadd(h.key("scheduled"), {"behind": 1})),
    "behind an empty group": (
        "stuck",
        "group:waiting",
        lambda h: (
            h.raw.hdel(h.key("group:active"), "g"),
            h.entry(b"flies", 5, b""),
            h.message(b"flies", group=b""),
        ),
    ),
    "a group that holds what waits in its line": (
        "held",
        "group:active",
        lambda h: _hold(h, "g", b"flies", b"behind"),
    ),
    "a group that holds what is of no group": ("held", "group:active", lambda h: _hold(h, "i", b"waits")),
    "a group that holds a stranger": (
        "held",
        "group:active",
        lambda h: h.raw.hset(h.key("group:active"), "i", msgpack.packb([b"nobody"], use_bin_type=False)),
    ),
    "in flight, unknown to its group": ("overlap", "inflight", _unknown_to_its_group),
    "more in a group than it may hold": ("overlap", "group:active", _limit_lowered),
    "a line, and room": ("room", "group:waiting", lambda h: _limit(h, "t", 2)),
    "a token above the last": ("fence", "meta", lambda h: h.raw.hset(h.key("meta"), "fence", "1")),
    "no last token": ("fence", "meta", lambda h: h.raw.hdel(h.key("meta"), "fence")),
    "a token granted twice": ("fence", "leases", _second_flight),
    "a message that is garbage": ("undecodable", "messages", lambda h: h.raw.hset(h.key("messages"), "waits", b"\xc1")),
    "a message of another length": (
        "undecodable",
        "messages",
        lambda h: h.raw.hset(h.key("messages"), "waits", b"\0" * 30),
    ),
    "a payload that is garbage": ("undecodable", "messages", lambda h: h.message(b"waits", acc=b"\xc1")),
    "a delivery that is cancelled and not": ("undecodable", "inflight", lambda h: h.entry(b"flies", 3, b"7")),
    "a delivery that is garbage": ("undecodable", "inflight", lambda h: h.raw.hset(h.key("inflight"), "flies", b"")),
    "a letter that is garbage": (
        "undecodable",
        "dead:data",
        lambda h: h.raw.hset(h.key("dead:data"), h.raw.hkeys(h.key("dead:data"))[0], b"x"),
    ),
    "a group that is garbage": (
        "undecodable",
        "group:active",
        lambda h: h.raw.hset(h.key("group:active"), "g", b"\xc1"),
    ),
    "a counter that is no number": ("undecodable", "meta", lambda h: h.raw.hset(h.key("meta"), "acked", "many")),
    "a member of the line that is none": (
        "undecodable",
        "group:waiting",
        lambda h: h.raw.zadd(h.key("group:waiting"), {"g": 0}),
    ),
    "a member of the ready that is none": (
        "undecodable",
        "ready",
        lambda h: h.raw.zadd(h.key("ready", "r"), {"soon": 0}),
    ),
    "a policy that is garbage": ("undecodable", "topics}", lambda h: h.raw.hset(h.name("topics}"), "u", b"\xc1")),
    "sizes that a topic never had": (
        "undecodable",
        "topics}",
        lambda h: h.raw.hset(h.name("topics}"), "r was", "9" * 5000),
    ),
    "scheduled later than due": (
        "disagrees",
        "scheduled",
        lambda h: h.raw.zadd(h.key("scheduled"), {"waits": 9_999_999_999_999}),
    ),
    "scheduled earlier than due": ("disagrees", "scheduled", lambda h: h.raw.zincrby(h.key("scheduled"), -1, "waits")),
    "scheduled earlier than due, after a flush": ("disagrees", "scheduled", _earlier_after_a_flush),
    "scheduled earlier than due, after a flush of nothing": (
        "disagrees",
        "scheduled",
        _earlier_after_a_flush_of_nothing,
    ),
    "scheduled earlier than due, after a flush and a trigger": ("disagrees", "scheduled", _earlier_after_it_was_joined),
    "in line with another time": ("disagrees", "group:waiting", _line_moved),
    "in line by another score": (
        "disagrees",
        "group:waiting",
        lambda h: h.raw.zadd(h.key("group:waiting"), {h.raw.zrange(h.key("group:waiting"), 0, 0)[0]: 1}),
    ),
    "ready with another time": ("disagrees", "ready", _ready_moved),
    "a delivery that counts otherwise": ("disagrees", "inflight", lambda h: h.entry(b"flies", 4, b"3")),
    "large where nothing is": ("disagrees", "meta", lambda h: h.message(b"waits", failure=b"x" * 2000)),
    "a letter by another number": ("disagrees", "dead:data", lambda h: h.edit("dead:data", None, 5, 7)),
    "a letter that died at another time": (
        "disagrees",
        "dead:data",
        lambda h: h.raw.zadd(h.key("dead"), {h.raw.hkeys(h.key("dead:data"))[0]: 5}),
    ),
    "in the slot of others": ("wrong-slot", "messages", lambda h: _to_other_slot(h, "1h")),
    "in flight in the slot of others": ("wrong-slot", "leases", lambda h: _to_other_slot(h, None)),
    "a topic nobody registered": ("unregistered", "", lambda h: h.raw.hdel(h.name("topics}"), "r")),
    "a topic with groups nobody registered": ("unregistered", "", lambda h: h.raw.hdel(h.name("topics}"), "t")),
    "a slot beyond the last": (
        "unregistered",
        "r:2/2}:meta",
        lambda h: h.raw.hset(h.key("meta", "r", 2, 2), mapping={"v": 3, "acked": 1}),
    ),
    "messages in a closed slot": ("closed", "meta", lambda h: h.raw.hset(h.key("meta"), "v", "closed x")),
    "replies that are never forgotten": (
        "no-expiry",
        "",
        lambda h: h.raw.persist(next(h.raw.scan_iter(h.name("topic:t:0/1}:replies*")))),
    ),
    "a record that never ends": ("no-expiry", "done}", lambda h: h.raw.persist(h.name("once:claim:done}"))),
    "members that never end": ("no-expiry", "alive", lambda h: h.raw.persist(h.name("members:crew}:alive"))),
    "a holding that never ends": ("no-expiry", "held", lambda h: h.raw.persist(h.name("members:crew}:held"))),
    "messages that end": ("expires", "messages", lambda h: h.raw.expire(h.key("messages"), 1000)),
    "a registry that ends": ("expires", "topics}", lambda h: h.raw.expire(h.name("topics}"), 1000)),
    "an outbox that ends": (
        "expires",
        "out",
        lambda h: h.raw.rpush(h.name("topic:t:0/1}:out"), "x") and h.raw.expire(h.name("topic:t:0/1}:out"), 99),
    ),
    "a taken entry of an outbox without a lease": (
        "orphan",
        "out",
        lambda h: [h.raw.hset(h.name(f"topic:t:0/1}}:out:{part}"), "7", "1 c") for part in ("data", "state")],
    ),
    "a key beside an outbox of another type": (
        "wrong-type",
        "out",
        lambda h: h.raw.set(h.name("topic:t:0/1}:out:leases"), "x"),
    ),
    "remembered for ever": ("forgotten-never", "dedup", lambda h: h.raw.hset(h.key("dedup"), "vk", "1")),
    "a table of event ids that is none": ("undecodable", "dedup", lambda h: h.raw.hset(h.key("dedup"), "e", "x")),
    "a bucket of event ids cut short": ("undecodable", "dedup", lambda h: h.raw.hset(h.key("dedup"), "e0", "x" * 23)),
    "an event id that is not counted": ("disagrees", "dedup", lambda h: h.raw.hset(h.key("dedup"), "e0", b"x" * 48)),
    "an event id in another bucket": (
        "disagrees",
        "dedup",
        lambda h: h.raw.hset(h.key("dedup"), mapping={"e": b"\x93\x01\x02\x01", "e0": b"\1" * 24}),
    ),
    "a version that is none": (
        "undecodable",
        "dedup",
        lambda h: h.raw.hset(h.key("dedup"), "vk", "x3") + h.raw.zadd(h.key("dedup:expiry"), {"vk": 1e12}),
    ),
    "what is to be forgotten never": (
        "forgotten-never",
        "dedup:expiry",
        lambda h: h.raw.hset(h.key("dedup"), "vk", "3 g") + h.raw.zadd(h.key("dedup:expiry"), {"vk": "inf"}),
    ),
    "a rate that makes wait for ever": ("lease", "meta", lambda h: h.raw.hset(h.key("meta"), "rate", 10**18)),
    "a member that is there for ever": (
        "lease",
        "alive",
        lambda h: h.raw.zadd(h.name("members:crew}:alive"), {"m1": "inf"}),
    ),
    "a group that holds a key twice": (
        "held",
        "group:active",
        lambda h: h.raw.hset(h.key("group:active"), "g", msgpack.packb([b"flies", b"flies"], use_bin_type=False)),
    ),
    "nothing to forget": ("forgotten-never", "dedup:expiry", lambda h: h.raw.zadd(h.key("dedup:expiry"), {"vk": 1})),
    "a key nobody makes": ("foreign", "mine", lambda h: h.raw.set(h.name("topic:t:0/1}:mine"), "x")),
    "a record that is not escaped": ("foreign", "", lambda h: h.raw.set(h.name("once:s:a b}"), "x")),
    "a part of another type": (
        "wrong-type",
        "replies1",
        lambda h: h.raw.delete(h.key("replies1")) + h.raw.rpush(h.key("replies1"), "x"),
    ),
    "a slot of another layout": ("wrong-type", "meta", lambda h: h.raw.hset(h.key("meta"), "v", "4")),
    "a record of another type": ("wrong-type", "x}", lambda h: h.raw.rpush(h.name("once:s:x}"), "x")),
    "a registry of another type": (
        "wrong-type",
        "topics}",
        lambda h: [h.raw.delete(key) for key in h.raw.scan_iter(h.name("top*"))] and h.raw.set(h.name("topics}"), "x"),
    ),
    "members of another type": (
        "wrong-type",
        "alive",
        lambda h: h.raw.delete(h.name("members:crew}:alive")) and h.raw.set(h.name("members:crew}:alive"), "x", ex=9),
    ),
    "a record that is garbage": (
        "undecodable",
        "done}",
        lambda h: h.raw.set(h.name("once:claim:done}"), b"\xc1", keepttl=True),
    ),
    "a mark with what is no text": (
        "undecodable",
        ":m}",
        lambda h: h.gate.first("m", "1h") and h.raw.append(h.name("once:first:m}"), b"\xc0"),
    ),
    "a result that is garbage": ("undecodable", "kept}", lambda h: _kept(h, "result")),
    "a checkpoint that is garbage": ("undecodable", "kept}", lambda h: _kept(h, "checkpoint")),
    "a failure that is garbage": ("undecodable", ":x}", lambda h: _kept(h, "failure")),
    "a record of another layout": (
        "undecodable",
        "done}",
        lambda h: h.raw.setrange(h.name("once:claim:done}"), 0, b"\xc2"),
    ),
    "a record of no state": (
        "undecodable",
        "done}",
        lambda h: h.raw.setrange(h.name("once:claim:done}"), 0, b"\xc1z" + bytes(40)),
    ),
    "a record that ends too early": (
        "undecodable",
        "done}",
        lambda h: h.raw.set(h.name("once:claim:done}"), b"\xf8" + bytes(10), keepttl=True),
    ),
    "a change of slots that nobody is known to go on with": (
        "changing",
        "topics}",
        lambda h: h.raw.hset(h.name("topics}"), "t to", "4 abc"),
    ),
    "a topic that is half forgotten": ("changing", "topics}", lambda h: h.raw.hset(h.name("topics}"), "t to", "0 abc")),
    "a change of slots that is none": (
        "undecodable",
        "topics}",
        lambda h: h.raw.hset(h.name("topics}"), "t to", "four"),
    ),
    "a change of slots of no topic": ("orphan", "topics}", lambda h: h.raw.hset(h.name("topics}"), "u to", "4 abc")),
    "a slot that does not say its layout": ("layout", "meta", lambda h: h.raw.hdel(h.key("meta"), "v")),
    "a write before a WAIT that never ends": (
        "no-expiry",
        "durability}",
        lambda h: h.raw.set(h.name("durability}"), "1"),
    ),
    "another layout": ("layout", "topics}", lambda h: h.raw.hset(f"ig1:{{{h.namespace}:topics}}", "t", "x")),
    "a slot nobody holds": ("owner", "held", lambda h: h.raw.zrem(h.name("members:crew}:alive"), "m1")),
    "a slot that one holds who has left": ("owner", "held", _left_and_holds),
}


@pytest.fixture
def hand(full: Gate, raw: Any) -> Hand:
    return Hand(full, raw)


def test_what_the_scripts_leave_is_sound_and_counted(full: Gate) -> None:
    report = audit(full)
    assert report.findings == ()
    assert report.sound
    assert report.counted == {
        "members": 1,
        "topics": 2, "slots": 2, "records": 3, "pending": 5, "in_flight": 2, "dead": 1, "records done": 1,
        "records in progress": 1, "records released": 1,
    }  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_alone_and_the_printed_commands_mend_it(hand: Hand, found: Any, fault: str) -> None:
    kind, place, plant = FAULTS[fault]
    assert found().sound
    # When it is planted
    plant(hand)
    # Then it is what is found, once or in each key that has it, with how it may have come and what mends it
    report = found()
    assert {*report.by_kind} == {kind}, str(report)
    assert all(one.key.endswith(place) and one.cause and one.remedy for one in report.findings), str(report)
    assert bool(report.critical) is (DATA_KINDS[kind].severity == "critical")
    # And the commands that are printed mend it
    wholly = all(map(is_command, report.findings))
    for _ in range(3):  # one may show another
        run_commands(hand.raw, report.findings)
        report = found()
    assert not wholly or report.sound, str(report)
    assert not any(map(is_command, report.findings)), str(report)


def test_what_cannot_be_read_and_stands_nowhere_is_scheduled_at_once(hand: Hand, found: Any) -> None:
    hand.raw.hset(hand.key("messages"), "waits", b"\xc1")
    hand.raw.zrem(hand.key("scheduled"), "waits")
    mends = {one.kind: one.mend for one in found().findings}
    now = hand.raw.zscore(hand.key("scheduled"), "again") - 3_600_000
    assert mends["unplaced"] == f"ZADD {hand.key('scheduled').decode()} {now:.0f} waits"
    assert "undecodable" in mends


def test_a_message_below_a_kibibyte_is_not_large_to_the_byte(gate: Gate) -> None:
    for size in range(900, 1060, 4):
        gate.topic(f"t{size}").trigger("k", "x" * size)
    assert audit(gate).findings == ()


@pytest.mark.parametrize("name", ["result", "checkpoint", "failure"])
def test_what_a_record_keeps_and_nobody_can_read_is_named(hand: Hand, found: Any, name: str) -> None:
    _kept(hand, name)
    (one,) = found().findings
    assert one.what.startswith(f"its {name} cannot be decoded: ")


@pytest.mark.parametrize(
    ("counter", "told"),
    [("accepted", "3 accepted triggers neither ended nor are held"),
     ("acked_triggers", "3 more than accepted ended or are held")],
)  # fmt: skip
def test_how_many_triggers_are_not_accounted_for_is_told(hand: Hand, found: Any, counter: str, told: str) -> None:
    hand.raw.hincrby(hand.key("meta"), counter, 3)
    (one,) = found().findings
    assert one.what == f"topic 't': {told}"


def test_a_slow_rate_may_make_wait_for_years(gate: Gate) -> None:
    topic = gate.topic("slow", rate="1/24h", burst=500)
    topic.trigger_many([Trigger(str(n)) for n in range(500)])
    while topic.take(100):
        pass
    assert topic.stats().in_flight == 500
    assert audit(gate).findings == ()


@pytest.mark.damages("disagrees")
def test_a_key_that_goes_before_its_record_ends_is_told(
    url: str, namespace: str, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given records of every state and form of the scripts, on the server's clock. Those of plain commands hold no time
    monkeypatch.setattr("idemgate.store.connection.takes_plain", lambda replies: False)
    gate = Gate(url, namespace=namespace)
    gate.claim("running", lease="1h", retention="2h")
    with suppress(LeaseLost):  # the reply may come after the lease
        gate.claim("held", lease="1ms", retention="2h", on_lease_loss="hold")
    for number, retention in enumerate(("24h", "90s", "3600d")):
        gate.claim(f"done{number}", retention=retention).complete({"r": 1})
        assert gate.first(f"first{number}", retention)
    gate.claim("released").release()
    gate.claim("forgotten").complete()
    gate.forget("forgotten")
    gate.claim("later").release()
    gate.claim("later", retention="24h").complete()
    assert audit(gate).sound
    # When some go before they say
    moved = {"running": 600_000, "done0": 600_000, "first2": 600_000, "released": 600_000, "later": 600_000}
    for key, left_ms in moved.items():
        (name,) = raw.keys(f"ig2:{{{namespace}:once:*:{key}}}")
        raw.pexpire(name, left_ms)
    report = audit(gate)
    assert {one.kind for one in report.findings} == {"disagrees"}
    assert {_last(one.key) for one in report.findings} == {*moved}
    # Then the printed commands mend the findings that have any
    for one in report.findings:
        if one.mend:
            execute(raw, one.mend)
    assert [_last(one.key) for one in audit(gate).findings] == ["running"]
    gate.close()


SAID: dict[str, tuple[str, str]] = {
    "behind an empty group": ("'behind' stands behind group 'g', which is empty", ""),
    "no last token": ("the slot's last one is missing", "HSET {meta} fence {fence}"),
    "a token above the last": ("the slot's last one is 1", "HSET {meta} fence {fence}"),
    "a slot that does not say its layout": ("of which layout", "HSETNX {meta} v 3"),
    "messages that end": ("it will be gone in 1000 s", "PERSIST {messages}"),
    "a record of no state": ("it is no record", "it may say that the work is done; to let it run again: DEL {done}"),
}


@pytest.mark.parametrize("fault", SAID)
def test_a_fault_is_told_with_the_command_that_mends_it(hand: Hand, found: Any, fault: str) -> None:
    what, mend = SAID[fault]
    last = int(hand.raw.hget(hand.key("meta"), "fence"))
    FAULTS[fault][2](hand)
    report = found()
    names = {"meta": hand.key("meta").decode(), "messages": hand.key("messages").decode(), "fence": last}
    names["done"] = hand.name("once:claim:done}")
    assert any(what in one.what for one in report.findings), str(report)
    assert {one.mend for one in report.findings} == {mend.format(**names)}, [*report.findings]


def test_a_mended_group_holds_what_is_in_flight_though_it_did_not_know(hand: Hand, found: Any) -> None:
    # Given a group that knows a stranger, and not what is in flight in it
    _hold(hand, "g", b"stranger")
    commands = {finding.mend for finding in found().findings if finding.mend}
    for command in commands:
        execute(hand.raw, command)
    # Then, once it is mended, nothing else of it is handed out beside
    assert msgpack.unpackb(hand.raw.hget(hand.key("group:active"), "g"), raw=True) == [b"flies"]
    assert found().findings == ()
    assert hand.gate.topics["t"].take(5) == []


def test_a_lease_without_a_message_is_only_taken_away(hand: Hand, found: Any) -> None:
    hand.raw.hdel(hand.key("inflight"), "flies")
    hand.raw.hdel(hand.key("messages"), "flies")
    hand.raw.zadd(hand.key("leases"), {"flies": 9_999_999_999_999_000})
    mends = [finding.mend for finding in found().findings if "lease" in finding.mend]
    assert mends == [f"ZREM {hand.key('leases').decode()} flies"]


@pytest.mark.parametrize("turn", [*range(12), *(pytest.param(n, marks=pytest.mark.slow) for n in range(12, 100))])
def test_of_two_faults_the_commands_mend_both(hand: Hand, found: Any, turn: int) -> None:
    # Given two faults at once, where the first has left something for the second
    one, other = random.Random(turn).sample([*FAULTS], 2)
    FAULTS[one][2](hand)
    with suppress(Exception):
        FAULTS[other][2](hand)
    report = found()
    wholly = all(map(is_command, report.findings))
    # When everything that is printed is done, a few times
    for _ in range(4):
        run_commands(hand.raw, report.findings)
        report = found()
    # Then nothing is left to be done, and no error that had a command
    assert not any(map(is_command, report.findings)), f"{one} + {other}\n{report}"
    assert not (wholly and report.critical), f"{one} + {other}\n{report}"


def test_a_key_that_stands_in_two_places_is_told_with_both(hand: Hand, found: Any) -> None:
    (member,) = hand.raw.zrange(hand.key("group:waiting"), 0, -1)
    assert member.endswith(b"behind")
    hand.raw.zadd(hand.key("scheduled"), {"behind": 1})
    told = [one.what for one in found().findings if one.kind == "misplaced"]
    assert told == ["'behind' stands in 2 places: scheduled, group:waiting"]


def test_what_was_asked_for_is_no_fault(full: Gate, clock: Clock) -> None:
    # Given leases of every length, and times that were changed in every way
    topic = full.topics["t"]
    (ready,) = full.topics["r"].take(1)
    assert full.topics["r"].extend(ready, "30d") == "ok"
    assert audit(full).sound
    assert full.topics["r"].cancel(ready.key) == "in_flight"
    assert audit(full).sound
    topic.trigger_many([Trigger(f"k{n}", n, delay=f"{n + 1}m") for n in range(8)])
    assert topic.flush("k1")
    assert topic.reschedule("k2", delay="2h")
    assert audit(full).sound
    assert topic.flush() > 5
    topic.trigger("k3", 9)
    topic.trigger("k4", 9, delay="3h")
    assert topic.reschedule("k5", delay="2h")
    assert audit(full).sound
    # When the clock goes on, or back, and there are other slots, Then all of that is sound
    for moved in ("1m", "-40s", "2m"):
        clock.set(clock.microseconds() / 1e6 + (-40 if moved == "-40s" else 60))
        taken = topic.take(3)
        assert topic.extend(taken, "20d") == ["ok"] * 3
        assert audit(full).sound, moved
        topic.nack(taken, delay="1h")
        topic.flush()
        assert audit(full).sound, moved
    for slots in (4, 1):
        topic.reshard(slots)
        assert audit(full).sound, slots
        topic.trigger_many([Trigger(f"k{n}", n, delay="1h") for n in range(8)])
        topic.flush()
        assert topic.extend(topic.take(1)[0], "1d") == "ok"
        assert audit(full).sound, slots


def test_facts_that_expire_before_their_times_do_are_no_fault(
    gate: Gate, clock: Clock, raw: Any, namespace: str
) -> None:
    # Given a remembered version, whose hash has expired, and whose sorted set lives for the rest of a second
    gate.topic("t").trigger("k", version=1)
    key = f"ig2:{{{namespace}:topic:t:0/1}}:dedup"
    clock.advance("30d")
    assert raw.delete(key)
    assert audit(gate).findings
    # Then that is no fault, as it is with more time left
    raw.pexpire(f"{key}:expiry", 900)
    assert audit(gate).findings == ()


def test_a_rate_that_is_slow_by_what_was_asked_for_is_no_fault(hand: Hand, found: Any) -> None:
    # Given one a day, of a thousand slots: each may have one in almost three years
    topic = hand.gate.topic("slow", rate="1/d", slots=1024)
    topic.trigger("k", 1)
    assert len(topic.take()) == 1
    assert found().sound, str(found())


def test_a_result_that_is_larger_than_the_auditors_own_limit_is_no_fault(full: Gate, url: str) -> None:
    with Gate(url, namespace=full.namespace, clock=full.context.clock, max_bytes=1_000_000) as large:
        assert large.claim("large").complete("x" * 500_000)
        large.topic("large", window="1h").trigger("k", "x" * 500_000)
    assert audit(full).sound
    assert audit(url, full.namespace).sound


def test_each_sort_of_fault_is_planted(found: Any) -> None:
    planted = {kind for kind, _, _ in FAULTS.values()}
    elsewhere = {"fence-fell", "ran-again", "overlap-key", "overlap-group", "unread"}
    assert planted | elsewhere == {*DATA_KINDS}


def test_what_is_too_large_is_not_read_and_said(full: Gate) -> None:
    for limits in ({"most": 3}, {"most_bytes": 10}):
        report = audit(full, **limits)
        assert report.by_kind == {"unread": 2}
        assert report.critical == ()
        assert report.counted["pending"] == 0


def test_a_store_is_named_by_its_url_and_namespaces_do_not_mix(full: Gate, hand: Hand, url: str) -> None:
    hand.raw.set(hand.name("mine"), "x")
    assert audit(url, full.namespace).by_kind == {"foreign": 1}
    assert audit(full, f"{full.namespace}x").counted["slots"] == 0
    with pytest.raises(InvalidArgument, match="namespace"):
        audit(url, "a b")


def test_the_work_of_an_audit_is_linear_in_the_number_of_entries(gate: Gate) -> None:
    def fill_and_count(topic: str, messages: int) -> int:
        # Given as many messages, dead letters, groups with a queue, event ids and versions
        held = gate.topic(topic)
        held.trigger_many(
            [Trigger(f"k{n}", n, group=f"g{n // 3}", event_id=f"e{n}", version=n) for n in range(messages)]
        )
        for delivery in held.take(messages // 6):
            held.bury(delivery)
        held.take(messages // 6)
        held.trigger_many([Trigger(f"later{n}", n, delay="1h") for n in range(messages)])
        held.take(1)  # the messages that are due wait for their groups now
        # When their slot is checked
        slot = Slot(gate.namespace, topic, 0, 1)
        found = gate.context.link.run(read_slot(slot, gate.context.clock, 100_000, 1 << 30))
        assert isinstance(found, Contents)
        stored = gate.context.link.command("HGET", keys.topics(gate.namespace), topic)
        return count_lines(lambda: check_slot(SlotView(slot, found, decode_topic_entry(stored, False), CODEC)))

    # Then four times as many entries take about four times as many lines of code
    assert fill_and_count("many", 400) < 5 * fill_and_count("few", 100)


def count_lines(run: Callable[[], object]) -> int:
    """Run it, and return how many lines of code it went through."""
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    former = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(former)
    return lines


def test_an_audit_writes_nothing(full: Gate, raw: Any) -> None:
    def everything() -> dict[bytes, bytes]:
        scopes = keys.scopes(full.namespace)  # the heartbeat thread registers them at any time
        return {key: raw.dump(key) for key in raw.scan_iter(f"ig2:{{{full.namespace}:*") if key != scopes}

    before = everything()
    audit(full)
    assert everything() == before


async def test_what_goes_on_meanwhile_is_no_fault(url: str, namespace: str) -> None:
    # Given a namespace in which much happens
    gate = Gate(url, namespace=namespace)
    topic = gate.topic("t", slots=2, lease="5s", backoff=0, merge="append", group_concurrency=2)
    stop = threading.Event()

    def work(number: int) -> int:
        chance, done = random.Random(number), 0
        while not stop.is_set():
            done += 1
            key = f"k{chance.randrange(20)}"
            topic.trigger(key, done, group=f"g{chance.randrange(3)}")
            gate.claim(key, lease="1s").release()
            for delivery in topic.take(3):
                chance.choice((topic.ack, topic.nack, topic.bury))(delivery)
            topic.cancel(key, group="g1")
            if chance.random() < 0.2:
                topic.dead.redrive()
        return done

    with ThreadPoolExecutor(3) as threads:
        working = [threads.submit(work, number) for number in range(3)]
        # When it is audited again and again
        try:
            reports = [await asyncio.to_thread(audit, gate) for _ in range(25)]
        finally:
            stop.set()
    # Then it is sound each time
    assert all(one.result() > 1 for one in working)
    assert [str(one) for one in reports if not one.sound] == []
    assert any(one.counted["in_flight"] for one in reports)
    assert audit(gate).sound
    gate.close()


@pytest.mark.damages("undecodable")
def test_a_topic_that_is_opened_meanwhile_is_no_fault(gate: Gate, raw: Any, namespace: str) -> None:
    # Given an audit that has read the registry, and says what is wrong there
    raw.hset(keys.topics(namespace), "odd", b"\xc1")
    link = SyncLink(gate.context.endpoint, 5.0)
    with servers(gate.context.endpoint) as found:
        findings = _Audit(namespace, gate.context.clock, 1000, 100_000).all(link, found)
        assert next(findings).kind == "undecodable"
        # When a topic is opened, and it goes on
        gate.topic("later").trigger("k")
        # Then it finds nothing else
        assert list(findings) == []
    link.close()


@pytest.mark.damages("undecodable", "orphan")
@pytest.mark.parametrize("faulty", [False, True])
def test_a_change_of_the_number_of_slots_meanwhile_is_no_fault(
    gate: Gate, raw: Any, namespace: str, faulty: bool
) -> None:
    # Given an audit that has read the registry
    topic = gate.topic("t", slots=1, dedup_retention="1h")
    topic.trigger_many([Trigger(f"k{n}", n, event_id=f"e{n}") for n in range(20)])
    raw.hset(keys.topics(namespace), "odd", b"\xc1")
    link = SyncLink(gate.context.endpoint, 5.0)
    with servers(gate.context.endpoint) as found:
        findings = _Audit(namespace, gate.context.clock, 1000, 100_000).all(link, found)
        assert next(findings).kind == "undecodable"
        # When the topic gets another number of slots, and it goes on
        topic.reshard(4)
        if faulty:
            raw.zadd(keys.slot(namespace, "t", 0, 4)[keys.PARTS.index("scheduled")], {"nobody": 1})
        # Then it finds what is wrong, and nothing else
        assert [one.kind for one in findings] == ["orphan"] * faulty
    link.close()


def test_a_change_of_slots_that_was_cut_off_is_said_with_what_goes_on_with_it(gate: Gate) -> None:
    # Given a change of slots that ended after the first of two parts
    topic = gate.topic("t", slots=2)
    topic.trigger_many([(f"k{n}", n) for n in range(20)])

    def cut_off(progress: ReshardProgress) -> None:
        if progress.done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        topic.reshard(4, cut_off)
    # Then that is said, and is all that is
    report = audit(gate)
    assert report.by_kind == {"changing": 1}
    assert report.critical == ()
    (one,) = report.findings
    assert "'t' is being changed to 4 slots" in one.what
    assert one.remedy == "unless a command does this now: idemgate topic reshard t 4"
    # And when another process goes on with it, the audit is clean
    topic.reshard(4)
    assert audit(gate).sound


@pytest.mark.parametrize("turns", range(3))
def test_slots_that_are_changed_to_and_fro_are_no_fault(gate: Gate, turns: int) -> None:
    # Given a topic whose slots are changed again and again
    topic = gate.topic("t", slots=1, dedup_retention="1h")
    topic.trigger_many([Trigger(f"k{n}", n, event_id=f"e{n}") for n in range(50)])
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            for number in (2 << turns, 1):
                topic.reshard(number)

    with ThreadPoolExecutor(1) as threads:
        changing = threads.submit(change)
        # When it is audited again and again
        try:
            reports = [audit(gate) for _ in range(30)]
        finally:
            stop.set()
    # Then it is sound each time, but for a change that was under way from the beginning to the end of an audit
    changing.result()
    assert [str(one) for one in reports if {*one.by_kind} > {"changing"}] == []
    assert [str(one) for one in reports if one.critical] == []
    assert audit(gate).sound


def test_the_documentation_explains_every_finding() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    explained = page.partition("## Repair a finding")[2]
    assert [kind for kind in DATA_KINDS if f"`{kind}`" not in explained] == []
