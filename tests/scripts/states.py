"""What the contracts of scripts are tried on: every state that a slot, a record or a dedup set can be in, and every
call of it. One key "k", and a few others beside it.

A scene is built once and brought back from its DUMPs before each question, and questions are asked as they are, without
a link: the reply is the script's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import redis

from idemgate import Gate
from idemgate.audit.slot import Slot as OneSlot
from idemgate.audit.slot import read_slot
from idemgate.core import keys
from idemgate.core.calls import Call, stamp
from idemgate.core.durations import milliseconds
from idemgate.dedup import dedup
from idemgate.dedup.dedup import DedupCalls
from idemgate.errors import IdemgateError
from idemgate.guard.claim_calls import Claims, Record, register_retention
from idemgate.guard.heartbeat import note_history
from idemgate.history.calls import read_history
from idemgate.membership import heartbeats as members
from idemgate.membership.ownership import HeartbeatRequest
from idemgate.operate.acts import acts_call, record_call
from idemgate.operate.keys import scopes_call
from idemgate.presence import calls as presence
from idemgate.subscribers.expiry.rules import look
from idemgate.subscribers.list_entries import ListCalls, TakenEntry
from idemgate.testing import Clock
from idemgate.topics import registry
from idemgate.topics import reshard as resizing
from idemgate.topics.dead_letters import DeadFilter
from idemgate.topics.deliveries import Settlement
from idemgate.topics.merge import pack
from idemgate.topics.messages import Delivery, Forward, Message, Position, Ticket, Trigger
from idemgate.topics.partial import FailedItems
from idemgate.topics.slots import open_topic, stored_policy
from idemgate.topics.topic_calls import TopicCalls
from tests.messages import pack_message

__all__ = [
    "JOBS", "PAGES", "RECORDS", "SLOTS", "Jobs", "Pages", "Record", "Rig", "Slot", "ask_crew", "ask_operators",
    "ask_registry", "ask_theirs",
]  # fmt: skip

Dump = dict[bytes, bytes]
CHANGE = b"change"
MESSAGE = pack_message(pack([2, 0, b"\xa1\x01\xa1\x02"]), count=2, attempts=1)
"""One of a topic that appends: two triggers, attempted once."""


NOBODY = Record("done", 1, 1, 0, None, 1.0, 0.0, "", False, "v", b"", b"")


# Bringing the scene back, and looking at it, on the server: there are ten thousand cases.
RESET = """for i, key in ipairs(KEYS) do
  redis.call("DEL", key)
  if ARGV[i] ~= "" then redis.call("RESTORE", key, 0, ARGV[i]) end
end"""
DUMP = """local dumped = {}
for i, key in ipairs(KEYS) do dumped[i] = redis.call("DUMP", key) end
return dumped"""


class Rig:
    """A server, a namespace of it, and a clock. `keys` are those of the scene, which is all that is looked at."""

    def __init__(self, raw: redis.Redis, url: str, namespace: str) -> None:
        self.raw = raw
        self.clock = Clock()
        self.gate = Gate(url, namespace=namespace, clock=self.clock)
        self.keys: tuple[bytes, ...] = ()
        self.scene: Dump = {}
        self.began = self.clock.now()

    def keep(self, looked_at: Iterable[bytes]) -> None:
        """The scene is as it is now."""
        self.keys = tuple(looked_at)
        self.scene, self.began = self.dump(), self.clock.now()

    def again(self) -> None:
        """Brings the scene back."""
        self.clock.set(self.began.timestamp())
        self.raw.eval(RESET, len(self.keys), *self.keys, *(self.scene.get(key, b"") for key in self.keys))

    def dump(self) -> Dump:
        found: Any = self.raw.eval(DUMP, len(self.keys), *self.keys)
        return {key: dumped for key, dumped in zip(self.keys, found, strict=True) if dumped is not None}

    def ask(self, call: Call[Any]) -> list[Any]:
        """The script's reply, at the time of now. Raises what the server raises."""
        args = (stamp(self.clock), *call.args[1:])
        try:
            return self.raw.evalsha(call.script.sha.decode(), len(call.keys), *call.keys, *args)
        except redis.exceptions.NoScriptError:
            return self.raw.eval(call.script.text.decode(), len(call.keys), *call.keys, *args)


# -- slots of a topic -------------------------------------------------------------------------------------------------


class Slot:
    """A topic of one slot, in the state that `build` makes of it. `flying` is the last delivery of "k"."""

    def __init__(self, rig: Rig, build: str) -> None:
        self.rig = rig
        self.clock = rig.clock
        ranked, leading = build == "ready", build == "behind a door"
        window = "10s" if leading else None
        self.topic = rig.gate.topic(
            f"t-{build.replace(' ', '-').replace(',', '')}", merge="append", backoff=5, lease="30s", max_attempts=3,
            priority=ranked, window=window, edge="leading" if leading else "trailing", concurrency=50,
            result_retention=60 if "results" in build else None,
        )  # fmt: skip
        self.calls: TopicCalls = self.topic.open()
        self.flying = self._stranger()
        SLOTS[build](self)
        self.outbox = keys.outbox(rig.gate.namespace, self.topic.name, 0, 1)
        rig.keep((*self.calls.keys(0), *self.calls.result_keys(0), self.outbox))

    def _stranger(self) -> Delivery[Any]:
        return Delivery(self.topic.name, 0, b"k", 7, 1, Message(MESSAGE, self.calls.policy.merge, self.calls.codec))

    def trigger(self, key: str = "k", **options: Any) -> None:
        self.topic.trigger(key, [1], **options)

    def take(self, n: int = 1) -> None:
        taken = self.topic.take(n)
        self.flying = next((one for one in taken if one.key == "k"), self.flying)

    def take_k(self, **options: Any) -> None:
        self.trigger(**options)
        self.take()

    def close(self) -> None:
        self.rig.ask(resizing._close(self.calls, 0, CHANGE))

    def asks(self) -> dict[str, Call[Any]]:
        """Everything that can be asked of a slot, each with a request id of its own."""
        calls, one = self.calls, self.flying
        part = FailedItems([1, 0, b"\xa1\x01"], 1, 2)
        far = self.clock.microseconds() // 1000 + 60_000
        loaded = [
            resizing._Entry(kind, name, b"%d" % number, value, b"1" if kind == b"p" else b"", b"g")
            for kind, name, number, value in (
                (b"p", b"k", far, MESSAGE),
                (b"f", b"n", far, pack([b"9 5 0 2 ", MESSAGE])),
                (b"d", b"9", 5, pack([b"buried", MESSAGE, b"no", 5, 9])),
                (b"m", b"vk", far, b"3"),
                (b"e", keys.event("e", b"k", b"k"), far, b""),
                (b"c", b"accepted", 0, b"3"),
                (b"t", b"r" * 16, far // 30_000, pack([b"ok", 1])),
            )
        ]
        trigger_many = calls.trigger_many([Trigger("k", [1]), Trigger("n", [2]), Trigger("k", [3], delay=9)]).calls[0]
        settled = [Settlement("ack", one), Settlement("nack", one, 5, "why"), Settlement("bury", self._stranger())]
        return {
            "trigger": calls.trigger(Trigger("k", [1])),
            "trigger at": calls.trigger(Trigger("k", [1], delay=3)),
            "trigger group": calls.trigger(Trigger("k", [1], group="g")),
            "trigger event": calls.trigger(Trigger("k", [1], event_id="e", version=4)),
            "trigger many": trigger_many,
            "take": calls.take(0, 5),
            **{
                f"settle {verb}": calls.settle(0, [Settlement(verb, one, 5, "why")])
                for verb in ("ack", "nack", "bury", "return", "defer")
            },
            "turn": calls.settle_and_take(0, settled, 5),
            "turn nack": calls.settle_and_take(0, [Settlement("nack", one, 5, "why")], 1),
            "turn return": calls.settle_and_take(0, [Settlement("return", one)], 5),
            "settle part": calls.settle(0, [Settlement("nack", one, 5, "why", part)]),
            "settle many": calls.settle(0, settled),
            "extend": calls.extend(0, [one]),
            "forward list": calls.forward(0, Forward("list", None, 0), 10),
            "forward stream": calls.forward(0, Forward("stream", None, 5), 10),
            "cancel": calls.cancel("k"),
            "bury key": calls.bury("k", None, "why"),
            "reschedule": calls.reschedule(Trigger("k", delay=1)),
            "flush": calls.flush("k"),
            "flush all": calls.flush_slot(0),
            "pause": calls._pause(0, b"1"),
            "resume": calls._pause(0, b"0"),
            "peek": calls.peek("k"),
            "count refused": calls.count_refused("refused_payload", True),
            "versions": calls.versions("k"),
            "reset version": calls.reset_version("k"),
            "stats": calls._stats(0),
            "stats closed": calls.depth(0).calls[0],
            "dead": calls.dead(0, DeadFilter(), 10),
            "audit": self._audit(1_000),
            "audit, large": self._audit(0),
            "redrive": calls.take_dead(0, "redrive", []),
            "redrive named": calls.take_dead(0, "redrive", [*self._letters(), "404"]),
            "delete": calls.take_dead(0, "delete", []),
            "load dead": calls.load_dead([(b"k", pack([b"k", MESSAGE, b"no", far - 60_000, 9]))]).calls[0],
            "adopt": calls.adopt_letters("other", [pack([b"k", MESSAGE, b"no", far - 60_000, 9])]).calls[0],
            "messages": calls.messages(0, Position(), 10),
            "messages, further": calls.messages(0, Position(1, 5.0, b"a"), 10),
            "close": resizing._close(calls, 0, CHANGE),
            "reopen": calls.reopen(0, CHANGE),
            "unload": resizing._unload(calls, 0, CHANGE, 0),
            "unload next": resizing._unload(calls, 0, CHANGE, 1),
            "load": resizing._load(calls, 0, CHANGE, 1, 1, loaded),
            "retell": resizing._list_replies(calls, 0, 0, b"0"),
            "purge look": resizing._purge(calls, 0, CHANGE, False),
            "purge": resizing._purge(calls, 0, CHANGE, True),
        } | ({"results": calls.result(Ticket("t", b"k", b"k", 1, 1, 0))} if calls.result_keys(0) else {})  # fmt: skip

    def _audit(self, most: int) -> Call[Any]:
        return read_slot(OneSlot(self.rig.gate.namespace, self.topic.name, 0, 1), self.clock, most, 1 << 20)

    def _letters(self) -> list[str]:
        return [text.decode() for text in self.rig.raw.zrange(self.calls.keys(0)[5], 0, -1)]

    def others_act(self) -> None:
        """Whatever may happen in a slot before a late copy of a request arrives; refused where it is closed."""
        calls = self.calls
        self.clock.advance("6s")
        acts = [
            calls.cancel("k"), calls.trigger(Trigger("k", [8])), calls.take(0, 9), calls.trigger(Trigger("k", [9])),
            calls.flush("k"), calls._pause(0, b"1"), calls._pause(0, b"0"), calls.take_dead(0, "redrive", []),
        ]  # fmt: skip
        for act in acts:
            self.rig.ask(act)
        self.clock.advance("1s")


def _lapsed(slot: Slot) -> None:
    slot.take_k()
    slot.clock.advance("31s")


def _retrying(slot: Slot, **options: Any) -> None:
    slot.take_k(**options)
    slot.topic.nack(slot.flying, reason="why")


def _dead(slot: Slot) -> None:
    slot.take_k()
    slot.topic.bury(slot.flying, reason="no")


def _in_line(slot: Slot, first: str = "first") -> None:
    """Two of a group, of which the first is in flight and the second waits for it."""
    slot.trigger(first, group="g")
    slot.clock.advance("1ms")
    slot.trigger("k" if first != "k" else "second", group="g")
    slot.take(2)


def _full_house(slot: Slot) -> None:
    """Of everything there is something, and nothing is closed: "k" in flight, another behind it, in a group with a
    line; one lapsed, one dead, one ripe, one late; and what is remembered."""
    slot.trigger("lapsed")
    slot.trigger("grave")
    taken = slot.topic.take(2)
    slot.topic.bury([one for one in taken if one.key == "grave"], reason="no")
    slot.clock.advance("29s")
    slot.take_k(group="g")
    slot.clock.advance("1500ms")
    slot.trigger("line", group="g")
    slot.rig.ask(slot.calls._call("take", 0, slot.calls.take(0, 0).args[1:], list))  # nobody is handed out
    slot.trigger(group="g", version=3, event_id="x")
    slot.trigger("late", delay=60)
    slot.trigger("ripe")


def _results(slot: Slot) -> None:
    """Of "k" a result is stored, another delivery is in flight, and one trigger waits behind it."""
    slot.take_k()
    slot.topic.ack(slot.flying, result="done")
    slot.take_k()
    slot.trigger()


def _ready(slot: Slot) -> None:
    for key, priority in (("high", 9), ("k", 5), ("low", 1)):
        slot.trigger(key, priority=priority)
    slot.take()


def _closed(slot: Slot) -> None:
    _full_house(slot)
    slot.close()


def _purged(slot: Slot) -> None:
    _closed(slot)
    slot.rig.ask(resizing._purge(slot.calls, 0, CHANGE, True))


def _cancelled(slot: Slot) -> None:
    slot.take_k()
    slot.topic.cancel("k")


def _behind(slot: Slot) -> None:
    slot.take_k()
    slot.trigger()


def _paused(slot: Slot) -> None:
    slot.trigger()
    slot.topic.pause()


def _exhausted(slot: Slot) -> None:
    slot.trigger()
    for _ in range(2):
        slot.take()
        slot.topic.nack(slot.flying, delay=0)
    slot.take()
    slot.clock.advance("31s")


SLOTS: dict[str, Callable[[Slot], Any]] = {
    "absent": lambda slot: None,
    "pending": lambda slot: slot.trigger(delay=20),
    "ripe": lambda slot: slot.trigger(),
    "ripe, of a group": lambda slot: slot.trigger(group="g"),
    "in flight": lambda slot: slot.take_k(),
    "behind": _behind,
    "cancelled": _cancelled,
    "lapsed": _lapsed,
    "lapsed for good": _exhausted,
    "retrying": _retrying,
    "retrying, of a group": lambda slot: _retrying(slot, group="g"),
    "in line": _in_line,
    "before a line": lambda slot: _in_line(slot, "k"),
    "dead": _dead,
    "remembered": lambda slot: slot.take_k(event_id="e", version=9),
    "behind a door": lambda slot: slot.take_k(),
    "results": _results,
    "results, lapsed for good": _exhausted,
    "ready": _ready,
    "paused": _paused,
    "full house": _full_house,
    "closed": _closed,
    "purged": _purged,
}


# -- records ----------------------------------------------------------------------------------------------------------


class Record:
    """One guarded key in the state that `build` makes of it; "me" is an owner, "other" another one."""

    def __init__(self, rig: Rig, build: str) -> None:
        self.rig = rig
        self.clock = rig.clock
        self.calls = Claims(rig.gate.namespace, rig.clock)
        self.key, self.beside = self.calls.key("s", build), self.calls.key("s", f"{build}, beside")
        RECORDS[build](self)
        rig.keep((*self.key, *self.beside))

    def claim(self, owner: bytes = b"me", **options: Any) -> None:
        self.rig.ask(self.calls.claim(self.key, owner, 30_000, 60_000, **options))

    def complete(self, kind: bytes = b"v") -> None:
        self.claim()
        fence = self.clock.microseconds()
        self.rig.ask(self.calls.complete(self.key, b"me", fence, 60_000, kind, b"result"))

    def asks(self) -> dict[str, Call[Any]]:
        calls, key = self.calls, self.key
        try:
            seen = self.rig.gate.context.link.run(calls.inspect(key)) or NOBODY
        except IdemgateError:
            seen = NOBODY
        asked: dict[str, Call[Any]] = {}
        for owner in (b"me", b"other"):
            who = owner.decode()
            asked |= {
                f"claim, {who}": calls.claim(key, owner, 30_000, 60_000),
                f"claim all, {who}": calls.claim(key, owner, 30_000, 60_000, b"print", 1, hold=True, wait=True),
                f"mark, {who}": calls.mark(key, owner, 60_000, b""),
                f"complete, {who}": calls.complete(key, owner, seen.token, 60_000, b"v", b"result"),
                f"fail, {who}": calls.complete(key, owner, seen.token, 60_000, b"e", b"failure"),
                f"renew, {who}": calls.renew(key, owner, 30_000, 60_000),
                f"release, {who}": calls.release(key, owner, 60_000, undo=False),
                f"undo, {who}": calls.release(key, owner, 60_000, undo=True),
                f"waited, {who}": calls.claim(key, owner, 30_000, 60_000, b"print", wait=2),
                f"share, {who}": calls.release(key, owner, 60_000, failure=b"failure"),
                f"checkpoint, {who}": calls.checkpoint(key, owner, b"note"),
            }
        return asked | {
            "marks": calls.mark_many((*key, *self.beside), 60_000, 100)[0],
            "inspect": calls.inspect(key),
            "cancel": calls.cancel(key, seen.token),
            "forget": calls.forget(key, b"r1", seen, force=False),
            "forget by force": calls.forget(key, b"r2", seen, force=True),
            "resolve": calls.resolve(key, b"r3", seen, True, 60_000, b"v", b"result"),
            "resolve again": calls.resolve(key, b"r4", seen, False, 60_000, b"n", b""),
            "register": register_retention(self.rig.gate.context, "s", 60_000),
            "register no more": register_retention(self.rig.gate.context, "s", 0),
        }

    def lapse(self) -> None:
        self.clock.advance("31s")

    def others_act(self) -> None:
        """Let each lease lapse. Another owner takes over, and ends."""
        self.clock.advance("31s")
        self.rig.ask(self.calls.claim(self.key, b"third", 30_000, 60_000))
        self.clock.advance("1s")


def _lapsed_claim(record: Record, **options: Any) -> None:
    record.claim(**options)
    record.lapse()


def _expired(record: Record) -> None:
    record.complete()
    record.clock.advance("61s")


def _released(record: Record) -> None:
    record.claim()
    record.rig.ask(record.calls.release(record.key, b"me", 60_000, undo=False))


def _shared(record: Record) -> None:
    calls = record.calls
    for call in (
        calls.claim(record.key, b"me", 30_000, 60_000, b"print"),
        calls.checkpoint(record.key, b"me", b"note"),
        calls.claim(record.key, b"other", 30_000, 60_000, b"print", wait=1),
        calls.release(record.key, b"me", 60_000, failure=b"failure"),
    ):
        record.rig.ask(call)


def _noted(record: Record) -> None:
    record.claim()
    record.rig.ask(record.calls.checkpoint(record.key, b"me", b"note"))


def _cancelled(record: Record) -> None:
    record.claim()
    record.rig.ask(
        record.calls.cancel(record.key, record.rig.gate.context.link.run(record.calls.inspect(record.key)).token)
    )
    record.claim(b"other", wait=True)


RECORDS: dict[str, Callable[[Record], Any]] = {
    "absent": lambda record: None,
    "in progress": lambda record: record.claim(),
    "in progress, of another": lambda record: record.claim(b"other"),
    "in progress, noted": _noted,
    "lapsed": _lapsed_claim,
    "lapsed, held": lambda record: _lapsed_claim(record, hold=True),
    "waited for": lambda record: (record.claim(), record.claim(b"other", wait=True)),
    "cancelled, waited for": _cancelled,
    "done": lambda record: record.complete(),
    "done, printed": lambda record: record.rig.ask(record.calls.mark(record.key, b"me", 60_000, b"print")),
    "failed": lambda record: record.complete(b"e"),
    "released": _released,
    "released, shared": _shared,
    "expired": _expired,
}


# -- dedup sets -------------------------------------------------------------------------------------------------------

RETENTION, MANY = "10m", 120
"""Of a set; and how many ids a shard is given, so that their buckets split."""
IDS = [n for n in range(10_000) if dedup._digest_id(n)[0] == 0 and dedup._digest_id(n)[1][3] % 2]
"""All of one shard, and of them only those that leave the first bucket when it is split."""


class Pages:
    """One shard of the ids of a dedup set, and one of its values, in the state that `build` makes. Ids are named by
    their places in `IDS`."""

    def __init__(self, rig: Rig, build: str) -> None:
        self.rig = rig
        self.clock = rig.clock
        self.scope = build
        PAGES[build](self)
        rig.keep((*self.add(0).keys, *self.get_or_set(7, 0).keys))

    def calls(self, retention: str = RETENTION) -> DedupCalls:
        return DedupCalls(self.rig.gate.namespace, self.rig.clock, self.scope, milliseconds(retention, "retention"))

    def add(self, *places: int, retention: str = RETENTION) -> Call[Any]:
        [one] = self.calls(retention).add_many([IDS[place] for place in places]).calls
        return one

    def get_or_set(self, value: int, *places: int, retention: str = RETENTION) -> Call[Any]:
        pairs = [(IDS[place], value) for place in places]
        [one] = self.calls(retention).get_or_set_many(pairs).calls
        return one

    def mark(self, *places: int) -> None:
        self.rig.ask(self.add(*places))
        self.rig.ask(self.get_or_set(7, *places))

    def asks(self) -> dict[str, Call[Any]]:
        """Return the calls of ids that are stored, if any is, and of the last two, which are never stored."""
        return {
            "add": self.add(0),
            "add new": self.add(-1),
            "add many": self.add(-1, 0, 1, -2),
            "add for longer": self.add(0, -1, retention="1h"),
            "add for less": self.add(0, -1, retention="1s"),
            "get_or_set": self.get_or_set(8, 0),
            "get_or_set new": self.get_or_set(8, -1),
            "get_or_set many": self.get_or_set(8, -1, 0, 1, -2),
            "get_or_set for longer": self.get_or_set(8, 0, -1, retention="1h"),
            "get": self.calls().get(IDS[0]),
            "get new": self.calls().get(IDS[-1]),
        }

    def others_act(self) -> None:
        """Add the same ids within the retention, and set other values for them."""
        self.clock.advance("500ms")
        for place in (0, 1, -1, -2):
            self.rig.ask(self.add(place))
            self.rig.ask(self.get_or_set(9, place))


def _turned(pages: Pages) -> None:
    """An older page, of which the first half of the marks is out of date, and a younger one."""
    pages.mark(0, 2)
    pages.clock.advance("9m")
    pages.mark(1, 3)
    pages.clock.advance("2m")
    pages.mark(4)


def _outlived(pages: Pages) -> None:
    """Nothing of it counts, and it is not removed yet."""
    _turned(pages)
    pages.clock.advance("40m")


def _uneven(pages: Pages) -> None:
    """A bucket is full, and the next to be split is another one."""
    pages.rig.ask(pages.add(*range(97)))
    pages.rig.ask(pages.get_or_set(7, *range(49)))


PAGES: dict[str, Callable[[Pages], Any]] = {
    "empty": lambda pages: None,
    "young": lambda pages: pages.mark(0, 1),
    "split": lambda pages: pages.mark(*range(MANY)),
    "uneven": _uneven,
    "turned": _turned,
    "outlived": _outlived,
}


# -- consumed lists ---------------------------------------------------------------------------------------------------


class Jobs:
    """A list "jobs" and the keys beside it, in the state that `build` makes. `held` is an entry that "me" has taken."""

    def __init__(self, rig: Rig, build: str) -> None:
        self.rig = rig
        self.clock = rig.clock
        self.name = f"{rig.gate.namespace}:{{jobs}}"
        self.held = TakenEntry(self.name, b"unknown", b"1 me", b"x")
        rig.raw.rpush(self.name, "a", "b")
        JOBS[build](self)
        rig.keep(keys.list_keys(self.name))

    def calls(self, consumer: str = "me") -> ListCalls:
        return ListCalls(self.name, consumer, self.clock, lease_ms=30_000, pop="left", max_dead_letters=1)

    def take(self, n: int = 1, consumer: str = "me") -> None:
        call = self.calls(consumer).take(n)
        taken = call.answer(self.rig.ask(call)).entries
        self.held = taken[0] if taken and consumer == "me" else self.held

    def move(self) -> None:
        self.rig.raw.rpush(keys.list_keys(self.name)[1], "moved")

    def retry(self) -> None:
        self.take()
        self.rig.ask(self.calls().retry(self.held, 10_000, undo=False))

    def bury(self) -> None:
        self.take()
        self.rig.ask(self.calls().bury(self.held, b"letter"))

    def asks(self) -> dict[str, Call[Any]]:
        calls, one = self.calls(), self.held
        return {
            "take": calls.take(5),
            "take as another": self.calls("other").take(5),
            "renew": calls.renew([one]),
            "remove": calls.remove([one.id, b"unknown"]),
            "retry": calls.retry(one, 5_000, undo=False),
            "undo": calls.retry(one, 0, undo=True),
            "bury": calls.bury(one, b"letter"),
        }

    def others_act(self) -> None:
        """End all leases, and let another consumer take everything."""
        self.clock.advance("31s")
        self.take(10, "third")


def _lapsed_entry(jobs: Jobs) -> None:
    jobs.take()
    jobs.clock.advance("31s")


JOBS: dict[str, Callable[[Jobs], Any]] = {
    "waiting": lambda jobs: None,
    "moved": lambda jobs: jobs.move(),
    "taken": lambda jobs: jobs.take(),
    "taken by another": lambda jobs: jobs.take(1, "other"),
    "lapsed": _lapsed_entry,
    "delayed": lambda jobs: jobs.retry(),
    "buried": lambda jobs: jobs.bury(),
}


# -- the rest ---------------------------------------------------------------------------------------------------------


def ask_registry(rig: Rig) -> dict[str, Call[Any]]:
    """A registry with a topic "t" of 4 slots, and "u" that is being changed to 8; what can be asked of it."""
    gate, clock = rig.gate, rig.clock
    policy = gate.topic("t", slots=4).policy
    other = gate.topic("x", slots=8, window=5).policy
    changed = gate.topic("y", slots=4, window=5).policy
    later = gate.topic("z", slots=4, window=5, revision=1).policy
    t, u = (TopicCalls(gate.namespace, name, policy, gate.context.codec, clock) for name in "tu")
    for name in "tu":
        rig.ask(open_topic(gate.namespace, clock, name, policy))
    change = rig.ask(resizing._begin(u, 8))[4]
    rig.keep([keys.topics(gate.namespace)])
    return {
        "open": open_topic(gate.namespace, clock, "t", policy),
        "open new": open_topic(gate.namespace, clock, "n", policy),
        "open other": open_topic(gate.namespace, clock, "t", other),
        "open differing": open_topic(gate.namespace, clock, "t", changed),
        "open changed": open_topic(gate.namespace, clock, "t", later),
        "policy": stored_policy(gate.namespace, clock, "t"),
        "registry": registry.list_entries(gate.namespace, clock),
        "resize": resizing._begin(t, 8),
        "resize again": resizing._begin(u, 2),
        "resized": resizing._end(u, change, "done", policy.pack_stored(), other.pack_stored()),
        "given up": resizing._end(u, change, "given up", b"", b""),
        "forgotten": resizing._end(u, change, "forgotten", b"", b""),
    }


def ask_crew(rig: Rig) -> dict[str, Call[Any]]:
    """A group with members "a" and "b", of which "b" has lapsed; what can be asked of it."""
    namespace, clock = rig.gate.namespace, rig.clock

    def says(member: str, number: int, *topics: str, **more: Any) -> Call[Any]:
        said = {"generation": 0, "released": (), "taken_over": (), "wanted": ()} | more
        return members.heartbeat(namespace, "g", clock, HeartbeatRequest(member, number, topics, **said), 10_000)

    rig.ask(says("b", 1, "t"))
    clock.advance("9s")
    generation = int(rig.ask(says("a", 2, "t", "u"))[2])
    rig.ask(says("a", 3, "t", "u", generation=generation, wanted=(("t", 0), ("t", 1))))
    clock.advance("2s")
    rig.keep(keys.members(namespace, "g"))
    return {
        "announce": says("a", 4, "t"),
        "announce old": says("a", 1, "t"),
        "announce new": says("c", 1, "t", generation=generation, taken_over=(("t", 0),), wanted=(("u", 1),)),
        "let go": says("a", 4, "t", "u", released=(("t", 0),)),
        "leave": members.leave(namespace, "g", clock, "a"),
        "leave unknown": members.leave(namespace, "g", clock, "z"),
        "roll": members.list_members(namespace, "g", clock),
    }


def ask_operators(rig: Rig) -> dict[str, Call[Any]]:
    """A list with an act, a scope, and the report of a process; what can be asked of them."""
    gate = rig.gate
    rig.ask(record_call(gate, "ann@host", "topic pause t", "too many errors"))
    rig.ask(register_retention(gate.context, "s", 60_000))
    here, there = "0" * 32, "1" * 32
    topic = gate.topic("t").open()
    rig.ask(topic.trigger(Trigger("k")))
    rig.ask(topic.cancel("k"))
    history, guarded = keys.slot_history(gate.namespace, "t", 0, 1), keys.scope_history(gate.namespace, "s", b"k")
    rig.ask(note_history(gate.context, guarded, [(0, b"zero")]))
    rig.ask(presence.beat(gate.namespace, rig.clock, here, b"report", named=True))
    single = [history, guarded, keys.acts(gate.namespace), keys.scopes(gate.namespace)]
    rig.keep([*single, *keys.presence(gate.namespace, here, there), keys.process_names(gate.namespace)])
    return {
        "record": record_call(gate, "bob@host", "topic resume t", ""),
        "acts": acts_call(gate, 5),
        "scopes": scopes_call(gate),
        "history": read_history(history, rig.clock, b"k"),
        "note": note_history(gate.context, guarded, [(1, b"one"), (0, b"another")]),
        "beat": presence.beat(gate.namespace, rig.clock, here, b"later"),
        "beat of another": presence.beat(gate.namespace, rig.clock, there, b"other"),
        "leave": presence.leave(gate.namespace, rig.clock, here),
        "named beat": presence.beat(gate.namespace, rig.clock, here, b"later", named=True),
        "names": presence.list_names(gate.namespace, rig.clock),
        "processes": presence.list_ids(gate.namespace, rig.clock),
        "reports": presence.read_reports(gate.namespace, rig.clock, [here, there]),
    }


def ask_theirs(rig: Rig) -> dict[str, Call[Any]]:
    """Keys of another program, of any type, which are only read."""
    asked = {name: look(f"{rig.gate.namespace}:{name}".encode(), rig.clock) for name in ("text", "list", "none")}
    rig.raw.set(asked["text"].keys[0], "x")
    rig.raw.rpush(asked["list"].keys[0], "x")
    rig.keep(key for one in asked.values() for key in one.keys)
    return asked
