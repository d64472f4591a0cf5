"""Every interleaving of the protocol of one slot, up to a depth, run by the scripts themselves.

Two workers, two triggers, and what may happen to them: take, acknowledge, give up on, cancel, a lease that lapses,
redrive, a worker that forgets, and a late copy of each request that was made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgpack
import redis

from idemgate import Gate
from idemgate.core.calls import Call
from idemgate.core.clock import stamp
from idemgate.core.merging import wrapped
from idemgate.core.messages import Trigger
from idemgate.testing import Clock
from tests import exhaustive
from tests.exhaustive import Violation

__all__ = ["Search", "Violation"]

LEASE = 10_000
"""Ms; so short that replies are remembered (30 s at least) past all the lapses of a path."""
START = 1_700_000_000.0
SNAPSHOT = """local dumps = {}
for i, key in ipairs(KEYS) do dumps[i] = redis.call("DUMP", key) or "" end
local function zset(i) return redis.call("ZRANGE", KEYS[i], 0, -1, "WITHSCORES") end
local function hash(i) return redis.call("HGETALL", KEYS[i]) end
return { dumps, zset(1), hash(2), zset(3), hash(4), zset(5), hash(6), hash(7), hash(11), zset(12) }"""
RESET = """for i, key in ipairs(KEYS) do
  redis.call("DEL", key)
  if ARGV[i] ~= "" then redis.call("RESTORE", key, i > 12 and 120000 or 0, ARGV[i]) end
end"""
"""Only the last two, which remember replies, go by themselves."""
TELL = ("trigger", "ack", "nack", "cancel", "redrive")
"""Requests whose late copy gets the same answer; that of a take gets what is still its own."""


@dataclass(frozen=True)
class Held:
    """A delivery as its worker got it."""

    key: bytes
    fence: int
    message: bytes
    items: tuple[int, ...]


@dataclass(frozen=True)
class Request:
    name: str
    script: str
    args: tuple[Any, ...]
    reply: tuple[Any, ...]


@dataclass(frozen=True)
class State:
    """What the server holds, and what the world knows of it."""

    dumps: tuple[bytes, ...] = (b"",) * 14
    content: Any = ((),) * 9
    now: int = 0
    accepted: int = 0
    acked: frozenset[int] = frozenset()
    cancelled: frozenset[int] = frozenset()
    workers: tuple[Held | None, ...] = (None, None)
    sent: tuple[Request, ...] = ()
    copies: int = 0
    lapses: int = 0
    redrives: int = 0
    fence: int = 0
    path: tuple[str, ...] = field(default=(), compare=False)

    def same(self) -> Any:
        """What makes two states one: not how they came to be."""
        sent = frozenset(self.sent)
        return (
            self.content, self.now, self.accepted, self.acked, self.cancelled, self.workers, sent, self.copies,
            self.lapses, self.redrives,
        )  # fmt: skip


@dataclass(frozen=True)
class Step(exhaustive.Step):
    """`told` is the request that this is a late copy of; `worker` whose step it is."""

    worker: int = 0
    told: Request | None = None


class Search(exhaustive.Search[State, Step]):
    """`keys` says which keys the first and the second trigger have; two keys are of one group."""

    def __init__(self, raw: redis.Redis, gate: Gate, keys: tuple[str, str], scripts: Mapping[str, str]) -> None:
        self.names = keys
        self.group = None if keys[0] == keys[1] else "g"
        topic = gate.topic("search", merge="append", backoff=0, lease="10s", max_attempts=2)
        self.calls = topic.open()
        super().__init__(raw, self.calls.keys(0), RESET, SNAPSHOT, scripts)

    def start(self) -> State:
        return State()

    def asked(self, state: State, step: Step) -> tuple[Any, ...]:
        return (stamp(Clock(START + state.now / 1000)), *step.args)

    # -- what may happen ----------------------------------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[Step]:
        n = state.accepted
        if n < 2:
            yield self._step(f"trigger {n + 1}", self.calls.trigger(Trigger(self.names[n], n + 1, group=self.group)))
        for worker, held in enumerate(state.workers):
            if held is None:
                yield self._step(f"take {worker}.{self._nth(state, f'take {worker}')}", self.calls.take(0, 1), worker)
                continue
            for verb in ("ack", "nack"):
                ending = wrapped([held.key, held.fence])
                args = (b"", self.calls.take(0, 1).args[2], ending, *(() if verb == "ack" else (1, verb, 0, "why")))
                yield Step(
                    f"{verb} {worker} {held.fence}", "topic/settle", self._named(args, f"{verb} {held.fence}"), worker
                )
            yield Step(f"forget {worker}", worker=worker)
        if state.accepted and not any(one.name == "cancel" for one in state.sent):
            yield self._step("cancel", self.calls.cancel(self.names[0], group=self.group))
        if any(state.workers) and state.lapses < 2:
            yield Step("lapse")
        if state.content[5] and state.redrives < 1:
            yield self._step("redrive", self.calls.exhume(0, "redrive", []))
        if state.copies < 1:
            # A take that found nothing is not remembered: its copy is the first that takes, and not a second.
            for one in (one for one in state.sent if not one.name.startswith("take") or len(one.reply) > 4):
                yield Step(f"copy of {one.name}", one.script, one.args, told=one)

    def _nth(self, state: State, name: str) -> int:
        return sum(one.name.startswith(name) for one in state.sent)

    def _step(self, name: str, call: Call[Any], worker: int = 0) -> Step:
        return Step(name, call.script.name, self._named(tuple(call.args[1:]), name), worker)

    def _named(self, args: tuple[Any, ...], name: str) -> tuple[Any, ...]:
        """Request ids by what they ask, so that two ways to one state are seen to meet."""
        return (name.encode().ljust(16)[:16] if len(name) <= 16 else name[:4].encode() + name[-12:].encode(), *args[1:])

    def alone(self, state: State, step: Step) -> State:
        path = (*state.path, step.name)
        if step.name == "lapse":
            return replace(state, now=state.now + LEASE, lapses=state.lapses + 1, path=path)
        return replace(state, workers=_put(state.workers, step.worker, None), path=path)

    # -- what came of it ----------------------------------------------------------------------------------------------

    def answered(self, before: State, step: Step, reply: tuple[Any, ...], found: tuple[Any, ...]) -> State:
        after = replace(before, dumps=found[0], content=found[1:], path=(*before.path, step.name))
        if step.told is not None:
            after = replace(after, copies=before.copies + 1)
            self._judge_copy(before, after, step.told, reply)
        else:
            sent = Request(step.name, step.script, step.args, reply)
            after = replace(self._known(before, after, step, reply), sent=(*before.sent, sent))
        self._judge(before, after, step)
        return after

    def _known(self, before: State, after: State, step: Step, reply: tuple[Any, ...]) -> State:
        """What the world knows after this reply."""
        verb = step.name.partition(" ")[0]
        flights = _flights(before.content)
        if verb == "trigger":
            return replace(after, accepted=before.accepted + 1)
        if verb == "take" and len(reply) > 4:
            self.check(after, reply[5] > before.fence, "P4: a fencing token does not rise")
            self.check(after, reply[6] <= _ms(before), "P9: a delivery is early")
            expected = _attempts(before, reply[4]) + 1
            self.check(
                after, _attempts_of(reply[7]) == expected <= 2, "P11: an attempt is not counted, or is one too many"
            )
            held = Held(reply[4], reply[5], reply[7], _items(reply[7]))
            return replace(after, workers=_put(before.workers, step.worker, held), fence=reply[5])
        if verb in ("ack", "nack"):
            held = before.workers[step.worker]
            assert held is not None
            mine = flights.get(held.key, (0,))[0] == held.fence
            self.check(after, (reply[3] == b"lost") is not mine, "P5: an ending is not answered by who holds the key")
            after = replace(after, workers=_put(before.workers, step.worker, None))
            if verb == "ack" and mine:
                return replace(after, acked=before.acked | set(held.items))
            if mine and flights[held.key][1]:
                self.check(after, reply[3] == b"cancelled", "P13: a cancelled delivery is tried again")
                return replace(after, cancelled=before.cancelled | set(held.items))
        if verb == "cancel":
            pending = _pending(before.content).get(self.names[0].encode())
            return replace(after, cancelled=before.cancelled | set(_items(pending) if pending else ()))
        if verb == "redrive":
            return replace(after, redrives=1)
        return after

    def _judge_copy(self, before: State, after: State, first: Request, reply: tuple[Any, ...]) -> None:
        self.check(after, after.content == before.content, "P6: a late copy has a second effect")
        if first.name.startswith(TELL):
            self.check(after, reply == first.reply, "P6: a late copy is answered otherwise")
        elif len(reply) > 4:
            self.check(after, reply[4:] == first.reply[4:], "P6: a late copy of a take gets another delivery")

    def _judge(self, before: State, after: State, step: Step) -> None:
        due, pending, lease, _, dead, grave, facts, busy, line = (_pairs(part) for part in after.content)
        flights, was = _flights(after.content), _flights(before.content)
        # Where every trigger is
        places = [items for packed in pending.values() for items in _items(packed)]
        places += [n for _, _, packed in flights.values() for n in _items(packed)]
        places += [n for letter in grave.values() for n in _items(msgpack.unpackb(letter, raw=True)[1])]
        silent = after.cancelled | self._gone(before, after)
        places += [*after.acked, *silent]
        wanted = list(range(1, after.accepted + 1))
        self.check(after, sorted(places) == wanted, f"P7: triggers are at {sorted(places)}")
        object.__setattr__(after, "cancelled", silent)
        # Nothing stands without what it stands for
        lined = {member.rpartition(b"\0")[2][15:] for member in line}
        standing = set(pending) - set(flights)
        self.check(after, set(due) | lined == standing, "P7: what is pending stands nowhere, or twice")
        self.check(after, not (set(due) & lined), "what waits in line is scheduled too")
        self.check(after, set(lease) == set(flights), "a delivery without a lease, or a lease without")
        self.check(after, set(dead) == set(grave), "a dead letter without its index")
        # One at a time
        if self.group:
            self.check(after, len(flights) <= 1, "P10: two of a group at a time")
            inside = {one for keys in busy.values() for one in msgpack.unpackb(keys, raw=True)}
            self.check(after, set(flights) <= inside <= set(flights) | set(pending), "a group is held by nobody")
        for key, (fence, _, packed) in was.items():
            now = flights.get(key)
            live = int(float(_pairs(before.content[2])[key])) > _ms(before)
            own = step.name.startswith(("ack", "nack")) and step.name.endswith(str(fence))
            stays = now is not None and now[0] == fence
            self.check(after, not live or own or stays, "P10: a live delivery is ended")
            self.check(after, now is None or now[0] != fence or now[2] == packed, "P7: merged into what is running")
        counted = {name: int(value) for name, value in facts.items() if name != b"paused"}
        gone = counted.get(b"acked_triggers", 0) + counted.get(b"cancelled_triggers", 0)
        ended = len(after.acked) + len(after.cancelled)
        self.check(after, gone == ended, "P15: the counters do not say what was done")

    def _gone(self, before: State, after: State) -> frozenset[int]:
        """Of deliveries that were cancelled and then lapsed: nobody says so to a worker."""
        now = _flights(after.content)
        lapsed = [one for key, one in _flights(before.content).items() if one[1] and now.get(key, (0,))[0] != one[0]]
        return frozenset(n for _, _, packed in lapsed for n in _items(packed)) - after.acked


def _ms(state: State) -> int:
    return int(START * 1000) + state.now


def _put(workers: tuple[Held | None, ...], at: int, held: Held | None) -> tuple[Held | None, ...]:
    return (*workers[:at], held, *workers[at + 1 :])


def _pairs(flat: Any) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _pending(content: Any) -> dict[bytes, bytes]:
    return _pairs(content[1])


def _flights(content: Any) -> dict[bytes, tuple[int, bool, bytes]]:
    """Fence, whether it was cancelled, and the message, by key."""
    unpacked = {key: msgpack.unpackb(packed, raw=True) for key, packed in _pairs(content[3]).items()}
    return {key: (d[0], d[2] == 1, d[6]) for key, d in unpacked.items()}


def _attempts_of(packed: bytes) -> int:
    return int(msgpack.unpackb(packed, raw=True)[4])


def _attempts(state: State, key: bytes) -> int:
    """How often what is taken next of this key was delivered before: its delivery, which lapses, or what is pending."""
    flight = _flights(state.content).get(key)
    if flight and not flight[1] and _attempts_of(flight[2]) < 2:
        return _attempts_of(flight[2])
    return _attempts_of(_pending(state.content)[key])


def _items(packed: bytes) -> tuple[int, ...]:
    """The numbers of the triggers that a message is made of: the last byte of each payload."""
    unpacker = msgpack.Unpacker(raw=True)
    unpacker.feed(msgpack.unpackb(packed, raw=True)[8][2])
    return tuple(payload[-1] for payload in unpacker)
