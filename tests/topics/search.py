"""Every interleaving of the protocol of one slot, up to a depth, run by the scripts themselves.

Two workers, two triggers, and what may happen to them, in each scope another part of it: take, acknowledge, give up on,
bury, give back, end and take in one call, extend, cancel, bury by the key, give another time, a lease that lapses,
redrive, delete, a worker that forgets, a reply that is lost, and a late copy of each request that was made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import chain
from typing import Any

import msgpack
import redis

from idemgate import Gate
from idemgate.core.calls import Call, stamp
from idemgate.testing import Clock
from idemgate.topics.merge import pack
from idemgate.topics.messages import Trigger
from tests import exhaustive
from tests.exhaustive import Violation
from tests.messages import unpack_message

__all__ = ["SCOPES", "Held", "Request", "Scope", "Search", "State", "Step", "Violation", "in_flight"]

LEASE = 10_000
"""Ms; so short that replies are remembered (30 s at least) past all the lapses of a path."""
START = 1_700_000_000.0
SNAPSHOT = """local dumps = {}
for i, key in ipairs(KEYS) do dumps[i] = redis.call("DUMP", key) or "" end
local function zset(i) return redis.call("ZRANGE", KEYS[i], 0, -1, "WITHSCORES") end
local function hash(i) return redis.call("HGETALL", KEYS[i]) end
return {
  dumps, zset(1), hash(2), zset(4), hash(5), zset(6), hash(7), hash(8), hash(12), hash(3), zset(13), zset(11) }"""
RESET = """for i, key in ipairs(KEYS) do
  redis.call("DEL", key)
  if ARGV[i] ~= "" then redis.call("RESTORE", key, i > 13 and 120000 or 0, ARGV[i]) end
end"""
"""Only the last two, which remember replies, go by themselves."""
ONCE = ("cancel", "inter", "reschedule", "redrive", "delete")
"""What a path has at most one of. To "inter" is to bury the pending message of a key."""


@dataclass(frozen=True)
class Scope:
    """`keys`: those of the first and the second trigger, two keys are of one group. `ends`: how a worker ends what it
    holds; a "turn" takes the next in the same call. `more`: what else there is. `attempts`: of a message at most."""

    keys: tuple[str, str]
    ends: tuple[str, ...]
    more: tuple[str, ...]
    attempts: int = 2


SCOPES = {
    "one key": Scope(("k", "k"), ("ack", "nack"), ("cancel", "forget", "redrive")),
    "one group": Scope(("k", "l"), ("ack", "nack"), ("cancel", "inter", "forget")),
    "lost replies": Scope(("k", "k"), ("ack", "nack"), ("unheard",)),
    "turns": Scope(("k", "l"), ("turn ack", "turn nack"), ("unheard",)),
    "dead letters": Scope(("k", "k"), ("nack", "bury"), ("cancel", "inter", "redrive", "delete"), attempts=1),
    "times": Scope(("k", "k"), ("ack", "return"), ("extend", "reschedule", "cancel")),
}


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
    held: Held | None
    """What it ends, or extends."""
    keys: tuple[bytes, ...]


@dataclass(frozen=True)
class State:
    """What the server holds, and what the world knows of it."""

    dumps: tuple[bytes, ...] = (b"",) * 15
    content: Any = ((),) * 11
    now: int = 0
    accepted: int = 0
    acked: frozenset[int] = frozenset()
    cancelled: frozenset[int] = frozenset()
    deleted: frozenset[int] = frozenset()
    workers: tuple[Held | None, ...] = (None, None)
    unheard: Request | None = None
    """What was answered, and not heard by its worker, who asks again."""
    asking: int = -1
    """Which worker that is."""
    losses: int = 0
    named: int = 0
    """When the pending message of the first key is due, as a caller said; 0: nobody did."""
    sent: tuple[Request, ...] = ()
    copies: int = 0
    lapses: int = 0
    fence: int = 0
    path: tuple[str, ...] = field(default=(), compare=False)

    def same(self) -> Any:
        """What makes two states one: not how they came to be."""
        # Once no more copies come, what was sent matters only by its name.
        sent = frozenset(self.sent) if self.copies < 1 else frozenset(one.name for one in self.sent)
        return (
            self.content, self.now, self.accepted, self.acked, self.cancelled, self.deleted, self.workers, self.unheard,
            self.asking, self.losses, self.named, sent, self.copies, self.lapses,
        )  # fmt: skip


@dataclass(frozen=True)
class Step(exhaustive.Step):
    """`told` is the request that this is a late copy of; `worker` whose step it is; `held` what it ends or extends.
    `heard`: the reply arrives; `again`: it is asked again by whom did not hear it. `keys`: none of them: the slot's."""

    worker: int = 0
    held: Held | None = None
    told: Request | None = None
    heard: bool = True
    again: bool = False
    keys: tuple[bytes, ...] = ()

    @property
    def verb(self) -> str:
        """With "turn" only how it ends."""
        return self.name.removeprefix("turn ").partition(" ")[0]


class Search(exhaustive.Search[State, Step]):
    def __init__(self, raw: redis.Redis, gate: Gate, scope: Scope, scripts: Mapping[str, str]) -> None:
        self.scope = scope
        self.names = scope.keys
        self.group = None if self.names[0] == self.names[1] else "g"
        topic = gate.topic("search", merge="append", backoff=0, lease="10s", max_attempts=scope.attempts)
        self.calls = topic.open()
        super().__init__(raw, self.calls.keys(0), RESET, SNAPSHOT, scripts)

    def start(self) -> State:
        return State()

    def asked(self, state: State, step: Step) -> tuple[Any, ...]:
        return (stamp(Clock(START + state.now / 1000)), *step.args)

    # -- what may happen ----------------------------------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[Step]:
        n, more = state.accepted, self.scope.more
        if n < 2:
            yield self._step(f"trigger {n + 1}", self.calls.trigger(Trigger(self.names[n], n + 1, group=self.group)))
        for step in self.works(state):
            yield step
            if "unheard" in more and state.losses < 1 and step.verb != "forget":
                yield replace(step, name=f"{step.name}, unheard", heard=False)
        if state.unheard:
            one = state.unheard
            yield Step(f"again {one.name}", one.script, one.args, state.asking, one.held, one, again=True)
        yield from self._others(state)
        if self.may_lapse(state) and state.lapses < 2:
            yield Step("lapse")
        if state.copies < 1:
            # A take that found nothing is not remembered: its copy is the first that takes, and not a second.
            for one in (one for one in state.sent if not one.name.startswith("take") or len(one.reply) > 4):
                yield Step(f"copy of {one.name}", one.script, one.args, held=one.held, told=one, keys=one.keys)

    def may_lapse(self, state: State) -> bool:
        return bool(state.content[2]) or state.named > _ms(state)

    def works(self, state: State) -> Iterator[Step]:
        """What a worker does."""
        yield from self.takes(state)
        for worker, held in enumerate(state.workers):
            if held is None or worker == state.asking:
                continue
            for end in self.scope.ends:
                yield self.end(end, worker, held)
            if "extend" in self.scope.more:
                name = f"extend {worker}.{self._nth(state, 'extend')}"
                yield Step(name, "topics/extend", (LEASE, held.key, held.fence), worker, held)
            if "forget" in self.scope.more:
                yield Step(f"forget {worker}", worker=worker)

    def takes(self, state: State) -> Iterator[Step]:
        """Workers are alike, so that of those who hold nothing one is enough."""
        free = [n for n, held in enumerate(state.workers) if held is None and n != state.asking]
        for worker in free[:1]:
            name = f"take {worker}.{self._nth(state, 'take')}"
            yield self._step(name, self.calls.take(0, 1), worker)

    def end(self, end: str, worker: int, held: Held, delay: int = 0) -> Step:
        turn, _, verb = end.rpartition(" ")
        call = self.calls.settle_and_take(0, [], 1) if turn else self.calls.settle(0, [])
        args = list(call.args[1:])
        args[0], args[2] = _id(f"{end} {held.fence}"), pack([held.key, held.fence])
        if turn:
            args[3] = _id(f"after {held.fence}")
        args += () if verb == "ack" else (1, verb, delay, "why")
        return Step(f"{end} {worker}", call.script.name, tuple(args), worker, held)

    def _others(self, state: State) -> Iterator[Step]:
        more = {one for one in ONCE if one in self.scope.more and not self._nth(state, one)}
        if state.accepted and "cancel" in more:
            yield self._step("cancel", self.calls.cancel(self.names[0], group=self.group))
        if state.accepted and "inter" in more:
            yield self._step("inter", self.calls.bury(self.names[0], self.group, "why"))
        if state.accepted and "reschedule" in more:
            later = Trigger(self.names[0], delay=LEASE / 1000, group=self.group)
            yield self._step("reschedule", self.calls.reschedule(later))
        for verb in ("redrive", "delete") if state.content[5] else ():
            if verb in more:
                yield self._step(verb, self.calls.take_dead(0, verb, []))

    def _nth(self, state: State, name: str) -> int:
        return sum(one.name.startswith(name) for one in state.sent)

    def _step(self, name: str, call: Call[Any], worker: int = 0) -> Step:
        return Step(name, call.script.name, (_id(name), *call.args[2:]), worker)

    def alone(self, state: State, step: Step) -> State:
        path = (*state.path, step.name)
        if step.name == "lapse":
            return replace(state, now=state.now + LEASE, lapses=state.lapses + 1, path=path)
        return replace(state, workers=_put(state.workers, step.worker, None), path=path)

    # -- what came of it ----------------------------------------------------------------------------------------------

    def answered(self, before: State, step: Step, reply: tuple[Any, ...], found: tuple[Any, ...]) -> State:
        after = replace(before, dumps=found[0], content=tuple(map(_ordered, found[1:])), path=(*before.path, step.name))
        if step.told is not None:
            after = replace(after, copies=before.copies + (not step.again))
            self._judge_copy(before, after, step.told, reply)
        else:
            after = self._done(before, after, step, reply)
        if step.again:
            after = replace(after, unheard=None, asking=-1)
        if step.heard and (step.again or not step.told):
            after = self._heard(after, step, reply)
        self._judge(before, after, step)
        return after

    def _done(self, before: State, after: State, step: Step, reply: tuple[Any, ...]) -> State:
        """Return what is true after this request, whether or not its reply arrived."""
        sent = Request(step.name.removesuffix(", unheard"), step.script, step.args, reply, step.held, step.keys)
        taken = _taken(step, reply)
        if step.verb == "take" and not taken:
            return after
        after = replace(after, sent=(*before.sent, sent))
        if not step.heard:
            after = replace(after, unheard=sent, asking=step.worker, losses=before.losses + 1)
        if step.verb == "trigger":
            return replace(after, accepted=before.accepted + 1)
        if step.held:
            after = self._ended(before, after, step, reply)
        if taken:
            after = self._taken(before, after, step, taken)
        pending = _pending(before.content).get(self.names[0].encode())
        if step.verb == "cancel":
            self._judge_cancel(before, after, reply[0])
            return replace(after, named=0, cancelled=before.cancelled | set(_items(pending) if pending else ()))
        if step.verb == "inter":
            flights = in_flight(before.content)
            expected = b"buried" if pending else b"in_flight" if self.names[0].encode() in flights else b"absent"
            self.check(after, reply[0] == expected, "P13: the burial of a key has a wrong reply")
            self.check(after, in_flight(after.content) == flights, "P13: a burial changes what is in flight")
            return replace(after, named=0)
        if step.verb == "reschedule":
            self.check(after, (reply[0] == b"rescheduled") is bool(pending), "what is pending is given no other time")
            return replace(after, named=reply[2] if pending else before.named)
        if step.verb == "delete":
            return replace(after, deleted=before.deleted | set(_buried(before.content)))
        if step.verb == "redrive":
            # Both triggers are of this key: what is merged into counts as tried again, too
            again = _pending(after.content)[self.names[0].encode()]
            self.check(after, _attempts_of(again) == 0, "P13: what is redriven was tried before")
        return after

    def _judge_cancel(self, before: State, after: State, word: bytes) -> None:
        key = self.names[0].encode()
        flight, pending = in_flight(after.content).get(key), _pending(before.content).get(key)
        expected = b"in_flight" if flight else b"cancelled" if pending else b"absent"
        self.check(after, word == expected, "P13: a cancellation has a wrong reply")
        self.check(after, not flight or flight[1], "P13: what is cancelled in flight may be tried again")

    def _taken(self, before: State, after: State, step: Step, taken: tuple[Any, ...]) -> State:
        key, fence, due, message = taken
        self.check(after, fence > before.fence, "P4: a fencing token does not rise")
        self.check(after, due <= _ms(before), "P9: a delivery is early")
        if key == self.names[0].encode() and before.named:
            self.check(after, due == before.named, "P9: a delivery is not due when a caller said")
            after = replace(after, named=0)
        expected = self._attempts(before, step, key) + 1
        most = self.scope.attempts
        since = int(unpack_message(message).get("attempts", 0))  # its newest trigger
        counted = _attempts_of(message) + 1 == expected < 2 * most and since < most
        self.check(after, counted, "P11: an attempt is not counted, or is one too many")
        return replace(after, fence=fence)

    def _attempts(self, state: State, step: Step, key: bytes) -> int:
        """How often what is taken next of this key was delivered before: its delivery, which lapses or is ended here,
        or what is pending."""
        flight = in_flight(state.content).get(key)
        ended = step.held is not None and flight is not None and step.held.fence == flight[0]
        over = flight is None or flight[1] or self._is_exhausted(flight[2])
        if flight is None or over or (ended and step.verb == "ack"):
            return _attempts_of(_pending(state.content)[key])
        return _attempts_of(flight[2]) + 1

    def _is_exhausted(self, message: bytes) -> bool:
        """Whether the delivery of this message is its last."""
        since, most = int(unpack_message(message).get("attempts", 0)) + 1, self.scope.attempts
        return since >= most or _attempts_of(message) + 1 >= 2 * most

    def _ended(self, before: State, after: State, step: Step, reply: tuple[Any, ...]) -> State:
        """What is true of a delivery that was ended, or extended."""
        held, verb = step.held, step.verb
        assert held is not None
        outcome = reply[2] if verb == "extend" else reply[-1]
        flight = in_flight(before.content).get(held.key)
        mine = flight is not None and flight[0] == held.fence
        self.check(after, (outcome == b"lost") is not mine, "P5: an ending is not answered by who holds the key")
        if not flight or not mine:
            return after
        if verb == "extend":
            ends = _lease_end(after.content, held.key)
            self.check(after, ends == _ms(before) + LEASE, "P10: a lease is not extended")
        elif verb == "ack":
            return replace(after, acked=before.acked | set(held.items))
        elif verb == "bury":
            self.check(after, outcome == b"dead", "what is buried is not dead")
        elif flight[1]:
            self.check(after, outcome == b"cancelled", "P13: a cancelled delivery is tried again")
            return replace(after, cancelled=before.cancelled | set(held.items))
        elif verb == "nack" and outcome == b"ok" and step.script == "topics/settle":
            left = _attempts_of(_pending(after.content)[held.key])
            self.check(after, left == _attempts_of(held.message) + 1, "P11: an attempt is not counted")
        elif verb in ("return", "defer"):
            left = _attempts_of(_pending(after.content)[held.key])
            self.check(after, left == _attempts_of(held.message), "P11: what is given back counts as an attempt")
        return after

    def _heard(self, after: State, step: Step, reply: tuple[Any, ...]) -> State:
        """What a worker knows after this reply."""
        taken, ended = _taken(step, reply), step.held is not None and step.script != "topics/extend"
        if taken:
            key, fence, _, message = taken
            return replace(after, workers=_put(after.workers, step.worker, Held(key, fence, message, _items(message))))
        return replace(after, workers=_put(after.workers, step.worker, None)) if ended else after

    def _judge_copy(self, before: State, after: State, first: Request, reply: tuple[Any, ...]) -> None:
        quiet = after.content == before.content
        if first.script == "topics/extend":
            assert first.held is not None
            mine = in_flight(before.content).get(first.held.key, (0,))[0] == first.held.fence
            self.check(after, mine or quiet, "P6: a late copy extends what is another's")
            return
        self.check(after, quiet, "P6: a late copy has a second effect")
        if first.script not in ("topics/take", "topics/settle_and_take"):
            self.check(after, reply == first.reply, "P6: a late copy is answered otherwise")
            return
        # It gets what is still its own.
        taken, had = _delivery_in(reply), _delivery_in(first.reply)
        self.check(after, taken in ((), had), "P6: a late copy of a take gets another delivery")
        flight = in_flight(before.content).get(had[0]) if had else None
        own = flight is not None and flight[0] == had[1]
        self.check(after, bool(taken) is own, "P6: a late copy of a take does not get what is its own")
        if first.script == "topics/settle_and_take":
            self.check(after, reply[-1] == first.reply[-1], "P6: a late copy is answered otherwise")

    def _judge(self, before: State, after: State, step: Step) -> None:
        due, _, lease, _, dead, grave, facts, busy, _, line, ready = (_pairs(part) for part in after.content)
        pending = _pending(after.content)
        flights, was = in_flight(after.content), in_flight(before.content)
        # Where every trigger is
        places = [items for packed in pending.values() for items in _items(packed)]
        places += [n for _, _, packed in flights.values() for n in _items(packed)]
        silent = after.cancelled | self._gone(before, after)
        places += [*_buried(after.content), *after.acked, *silent, *after.deleted]
        wanted = list(range(1, after.accepted + 1))
        self.check(after, sorted(places) == wanted, f"P7: triggers are at {sorted(places)}")
        object.__setattr__(after, "cancelled", silent)
        # Nothing stands without what it stands for
        lined = [member.rpartition(b"\0")[2][30:] for member in line]
        placed = [*due, *lined, *(member[30 if self.group else 16 :] for member in ready)]
        standing = set(pending) - set(flights)
        self.check(after, sorted(placed) == sorted(standing), "P7: what is pending stands nowhere, or twice")
        self.check(after, set(lease) == set(flights), "a delivery without a lease, or a lease without")
        self.check(after, set(dead) == set(grave), "a dead letter without its index")
        # One at a time
        if self.group:
            self.check(after, len(flights) <= 1, "P10: two of a group at a time")
            inside = {one for keys in busy.values() for one in msgpack.unpackb(keys, raw=True)}
            self.check(after, set(flights) <= inside <= set(flights) | set(pending), "a group is held by nobody")
        for key, (fence, _, packed) in was.items():
            now = flights.get(key)
            live = _lease_end(before.content, key) > _ms(before)
            own = step.held is not None and step.held.fence == fence and step.told is None
            stays = now is not None and now[0] == fence
            self.check(after, not live or own or stays, "P10: a live delivery is ended")
            self.check(after, now is None or now[0] != fence or now[2] == packed, "P7: merged into what is running")
        gone = [int(facts.get(b"%b_triggers" % how, 0)) for how in (b"acked", b"cancelled", b"deleted")]
        ended = [len(after.acked), len(after.cancelled), len(after.deleted)]
        self.check(after, gone == ended, "P15: the counters do not say what was done")

    def _gone(self, before: State, after: State) -> frozenset[int]:
        """Of deliveries that were cancelled and then lapsed: nobody says so to a worker."""
        now = in_flight(after.content)
        lapsed = [one for key, one in in_flight(before.content).items() if one[1] and now.get(key, (0,))[0] != one[0]]
        buried = set(_buried(after.content))
        return frozenset(n for _, _, packed in lapsed for n in _items(packed)) - after.acked - buried


def _id(name: str) -> bytes:
    """Request ids by what they ask, so that two ways to one state are seen to meet."""
    return blake2b(name.encode(), digest_size=16).digest()


def _taken(step: Step, reply: tuple[Any, ...]) -> tuple[Any, ...]:
    """The delivery that a reply brings: key, token, when it was due, message."""
    return _delivery_in(reply) if step.script in ("topics/take", "topics/settle_and_take") else ()


def _delivery_in(reply: tuple[Any, ...]) -> tuple[Any, ...]:
    return (reply[5], reply[4], *reply[6:8]) if len(reply) > 7 else ()


def _buried(content: Any) -> list[int]:
    return [n for letter in _pairs(content[5]).values() for n in _items(msgpack.unpackb(letter, raw=True)[1])]


def _ms(state: State) -> int:
    return int(START * 1000) + state.now


def _put(workers: tuple[Held | None, ...], at: int, held: Held | None) -> tuple[Held | None, ...]:
    return (*workers[:at], held, *workers[at + 1 :])


def _ordered(flat: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """A hash of large values is in another order each time it was brought back."""
    return tuple(chain.from_iterable(sorted(zip(flat[::2], flat[1::2], strict=True))))


def _pairs(flat: Any) -> dict[bytes, bytes]:
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _pending(content: Any) -> dict[bytes, bytes]:
    flying = _pairs(content[2])
    return {key: one for key, one in _pairs(content[1]).items() if key not in flying} | _pairs(content[8])


def in_flight(content: Any) -> dict[bytes, tuple[int, bool, bytes]]:
    """Fence, whether it was cancelled, and the message, by key."""
    messages, entries = _pairs(content[1]), {key: [start] for key, start in _pairs(content[2]).items()}
    entries |= {key: entry.split(b" ") for key, entry in _pairs(content[3]).items()}
    return {key: (int(float(one[0])), one[2:3] == [b"1"], messages[key]) for key, one in entries.items()}


def _lease_end(content: Any, key: bytes) -> float:
    """Ms; that of a lease from 1970 if there is none."""
    return float(_pairs(content[2]).get(key, 0)) // 1000 + int(_pairs(content[6])[b"term"])


def _attempts_of(packed: bytes) -> int:
    """All of them, also those before its newest trigger."""
    message = unpack_message(packed)
    return int(message.get("attempts", 0)) + int(message.get("earlier") or 0)


def _items(packed: bytes) -> tuple[int, ...]:
    """The numbers of the triggers that a message is made of: the last byte of each payload."""
    unpacker = msgpack.Unpacker(raw=True)
    unpacker.feed(msgpack.unpackb(unpack_message(packed)["acc"], raw=True)[2])
    return tuple(payload[-1] for payload in unpacker)
