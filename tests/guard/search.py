"""Every interleaving of the protocol of one guarded key, up to a depth, run by the scripts themselves.

Two callers claim, beat, complete, release and vanish; an operator looks, and later forgets or resolves what it saw; the
lease lapses, the retention ends; each reply may be lost, and each request that was made may come once more, at any
time.

What is judged is what is promised, from the answers alone and not by a model of the scripts: who was granted the key
when, and what was done.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, NamedTuple, cast

import redis

from idemgate import Gate
from idemgate.core.calls import stamp
from idemgate.guard import claim_calls
from idemgate.guard.claim_calls import Claims, PlainClaim, PlainTerms, Record, _plain_terms
from idemgate.lua import expand, script
from idemgate.testing import Clock
from tests import exhaustive
from tests.claims import claims_of
from tests.exhaustive import Violation

__all__ = ["Search", "Violation"]

LEASE, KEEP = 10_000, 120_000
"""Ms: of a lease, of what is done or was released: whole minutes, as the short form of a record has them."""
MOMENT = 1_200
"""Ms: longer than a caller waits for the reply to a plain claim."""
PRINT = b"print of sixteen"
START = 4_000_000_000.0
BEGIN = 4_000_000_000_000
"""The time at the start, in s and in ms. It is in the future: the server removes no key whose time comes later."""
SNAPSHOT = f"""{expand("guard/lib/read_record")}
local r, stored = read_record(KEYS[1]), redis.call("GET", KEYS[1]) or ""
local code, dump, expires = string.byte(stored), "", 0
if code then
  expires = redis.pcall("PEXPIRETIME", KEYS[1]) -- an error of Redis 6.2
  expires = type(expires) == "number" and expires >= {BEGIN} and expires or {2 * BEGIN}
end
if code then dump = string.format("%.0f ", expires) .. redis.call("DUMP", KEYS[1]) end
return {{ {{ dump }}, code and stored .. expires or "",
  {{ r.state, r.owner, r.fence, r.ends, r.print, r.attempts, r.taken }} }}"""
"""The record, and when its key expires. The scripts count that from the server's clock, which stands for a time in a
future that no claim is of."""
RESET = """redis.call("DEL", KEYS[1])
if ARGV[1] ~= "" then
  local ms, dump = string.match(ARGV[1], "^(%d+) (.*)$")
  redis.call("RESTORE", KEYS[1], ms, dump, "ABSTTL")
end"""
PLAIN = {
    # SET NX GET PX and PEXPIRETIME, at the time of the test clock, by which the server has removed what has ended
    "plain/claim": f"""{expand("guard/lib/read_record")}
local now, r = math.floor(tonumber(ARGV[1]) / 1000), read_record(KEYS[1])
if r.state ~= "p" and r.ends > 0 and r.ends <= now then redis.call("DEL", KEYS[1]) end
local old = redis.call("SET", KEYS[1], ARGV[2] .. ARGV[5], "NX", "GET", "PXAT", now + ARGV[3])
return {{ "plain", 0, old, redis.call("PEXPIRETIME", KEYS[1]) }}""",
    # the first of the two, alone, of an absent key; and the second
    "plain/set": """local now = math.floor(tonumber(ARGV[1]) / 1000)
return { "plain", 0, redis.call("SET", KEYS[1], ARGV[2] .. ARGV[5], "NX", "GET", "PXAT", now + ARGV[3]) }""",
    "plain/expiry": """return { "plain", 0, redis.call("PEXPIRETIME", KEYS[1]) }""",
    # SET IFEQ PX
    "plain/complete": """local now = math.floor(tonumber(ARGV[1]) / 1000)
if redis.call("GET", KEYS[1]) ~= ARGV[6] then return { "undecided", 0 } end
redis.call("SET", KEYS[1], ARGV[7], "PXAT", now + ARGV[5])
return { "ok", 0 }""",
}
"""What a client sends without a script. The owner and the token stand where the scripts have theirs."""
GRANTS = ("started", "ok", "forgotten")
"""Answers that say that the request had, or has, its effect."""


class Stored(NamedTuple):
    """What a record says, as the scripts read it; `ends` in ms since the epoch."""

    state: bytes = b"absent"
    owner: bytes = b""
    fence: int = 0
    ends: int = 0
    print: bytes = b""
    attempts: int = 0
    taken: int = 0


ABSENT = Stored()


class Caller(NamedTuple):
    """The owner id under which a caller believes to run, b"" if none, and the fencing token of that claim."""

    owner: bytes = b""
    fence: int = 0
    waits: bytes = b""
    """The owner id of a caller that was answered "busy", and waits."""
    ends: int = 0
    """How many runs had ended when it began to wait."""
    asks: bytes = b""
    """The owner id of a caller whose claim is stored, and which has not read its token: `fence`."""
    asked: int = 0
    """When it claimed."""


@dataclass(frozen=True)
class Request:
    """`number`: which one of this path. `effect`: it changed what is stored. `plain`: it was sent without a script."""

    name: str
    script: str
    args: tuple[Any, ...]
    reply: tuple[Any, ...]
    number: int
    effect: bool
    plain: bool


@dataclass(frozen=True)
class World:
    """The truth, which no caller knows whole. Times in ms from the start."""

    owner: bytes = b""
    """Who was granted the key last, and has not ended: b"" nobody."""
    fence: int = 0
    until: int = 0
    """When the owner's lease ends."""
    done_until: int = 0
    starts: int = 0
    """Attempts since the key was absent."""
    lapses: int = 0
    """How often it was taken over since."""
    rests_until: int = 0
    """When what is not in progress is forgotten."""
    last: int = -1
    """The request that had an effect last."""
    ends: int = 0
    """How many runs have ended."""
    waited: bool = False
    """A caller was told that the key is busy, and that it may wait."""
    failure: bytes = b""
    """Whose failure the callers that waited get."""
    ghost: bool = False
    """The owner was granted the key by a copy of a claim, which came when others had come and gone."""

    def at(self, now: int) -> World:
        """What of it still counts."""
        gone = not self.owner and self.rests_until <= now
        return replace(self, starts=0, lapses=0, done_until=0, failure=b"") if gone else self


@dataclass(frozen=True)
class State:
    dumps: tuple[bytes, ...] = (b"",)
    content: bytes = b""
    found: Stored = ABSENT
    """What `content` says."""
    now: int = 0
    world: World = World()
    callers: tuple[Caller, ...] = (Caller(), Caller())
    seen: tuple[int, bool] | None = None
    """The fencing token, and whether it ran, at the operator's last look."""
    early: int = -1
    """When the operator was told that the claim may not have been read by its owner."""
    told: int = 0
    """The highest fencing token that a caller has read."""
    sent: tuple[Request, ...] = ()
    unheard: int = 0
    copies: int = 0
    path: tuple[str, ...] = field(default=(), compare=False)

    def same(self) -> Any:
        facts = self.content, self.now, self.world, self.callers, self.seen, self.early, self.told
        return *facts, self.sent, self.unheard, self.copies


@dataclass(frozen=True)
class Step(exhaustive.Step):
    """`caller`: whose step it is. `told`: the request that this is a copy of. `heard`: the reply arrives. `plain`: it
    is sent without the script. `half`: only one of its two commands reaches the server."""

    caller: int = 0
    told: Request | None = None
    heard: bool = True
    plain: bool = False
    half: str = ""


class Search(exhaustive.Search[State, Step]):
    """`hold`: a key whose owner vanished waits for a decision. `share`: callers wait, and get the failure of a run.
    `plain`: callers claim and complete without a script where they may, and retry by the scripts."""

    def __init__(
        self,
        raw: redis.Redis,
        gate: Gate,
        scripts: Mapping[str, str],
        hold: bool = False,
        share: bool = False,
        plain: bool = False,
    ) -> None:
        self.claims, self.hold, self.share, self.plain = claims_of(gate), hold, share, plain
        self.print = b"" if plain else PRINT
        self.terms = cast("PlainTerms", _plain_terms(script("guard/claim"), LEASE, KEEP, 0, hold, 0))
        self.record = claims_of(gate).key("search", "k")
        super().__init__(raw, self.record, RESET, SNAPSHOT, {**PLAIN, **scripts})

    def start(self) -> State:
        return State()

    def asked(self, state: State, step: Step) -> tuple[Any, ...]:
        return (stamp(Clock(START + state.now / 1000)), *step.args)

    def runs(self, step: Step) -> str:
        return step.half or (step.script.replace("guard", "plain") if step.plain else step.script)

    # -- what may happen ----------------------------------------------------------------------------------------------

    def steps(self, state: State) -> Iterator[Step]:
        for step in (*self._calls(state), *self._decisions(state)):
            yield step
            if state.unheard < 1 and not step.half:
                yield replace(step, name=f"{step.name}, unheard", heard=False)
        if state.copies < 2:
            for one in state.sent:
                yield Step(f"copy of {one.name}", one.script, one.args, told=one, plain=one.plain)
                if one.plain:
                    yield Step(f"copy of {one.name}, by the script", one.script, self._by_script(one), told=one)
        if state.sent and state.now < 2 * LEASE:
            yield Step("lapse")
        if state.sent and state.now < KEEP:
            yield Step("retention ends")
        if state.early == state.now or any(one.asks and one.asked == state.now for one in state.callers):
            yield Step("a moment passes")
        if state.content and state.early < 0 and state.seen != (now := self._looks(state)):
            yield Step(f"look {now}")

    def _calls(self, state: State) -> Iterator[Step]:
        record, claims = self.record, self.claims
        for caller, (owner, fence, waits, _, asks, _) in enumerate(state.callers):
            n = sum(one.script == "guard/claim" for one in state.sent)
            if asks:
                args = (self.terms.record, self.terms.lifetime, b"\0", asks)
                yield Step(f"second half {caller}", "guard/claim", args, caller, plain=True, half="plain/expiry")
            elif waits:
                call = claims.claim(record, waits, LEASE, KEEP, self.print, 0, self.hold, 2)
                yield Step(f"claim again {caller}", call.script.name, tuple(call.args[1:]), caller)
            elif not owner and n < 3:
                token = f"{caller}.{n}".encode().ljust(16 if self.plain else 0, b".")
                call = claims.claim(record, token, LEASE, KEEP, self.print, 0, self.hold, int(self.share or self.plain))
                yield Step(f"claim {caller}", call.script.name, tuple(call.args[1:]), caller)
                if self.plain and not state.content:  # else the script is asked, too
                    args = (self.terms.record, self.terms.lifetime, b"\0", token)
                    yield Step(f"plain claim {caller}", call.script.name, args, caller, plain=True)
                    yield Step(f"first half {caller}", call.script.name, args, caller, plain=True, half="plain/set")
            if owner:
                failure = b"failure of " + owner if self.share else b""
                for call in (
                    claims.complete(record, owner, fence, KEEP, b"v", b"result"),
                    claims.release(record, owner, KEEP, False, failure),
                    claims.renew(record, owner, LEASE, KEEP),
                ):
                    if not _has_sent(state, call.script.name, owner) or call.script.name != "guard/renew":
                        yield Step(
                            f"{call.script.name.partition('/')[2]} {owner.decode()}",
                            call.script.name,
                            tuple(call.args[1:]),
                            caller,
                        )
                stored = self.terms.record + owner
                if self.plain and state.content.startswith(stored):
                    done = b"\xf5" + fence.to_bytes(7) + (KEEP // 60_000).to_bytes(2) + b"result"
                    args = (b"v", owner, fence, KEEP, stored, done)
                    yield Step(f"plain complete {owner.decode()}", "guard/complete", args, caller, plain=True)
                yield Step(f"vanish {caller}", caller=caller)

    def _by_script(self, one: Request) -> tuple[Any, ...]:
        """Return the arguments with which a plain request is retried."""
        if one.script == "guard/complete":
            return (*one.args[:4], b"result")
        return tuple(self.claims.claim(self.record, one.args[3], LEASE, KEEP, b"", 0, self.hold, 0).args[1:])

    def _decisions(self, state: State) -> Iterator[Step]:
        decided = [one for one in state.sent if one.script in ("guard/forget", "guard/resolve")]
        early = len(decided) == 1 and decided[0].reply[0] == b"early"
        if state.seen is None or (decided and not early):
            return
        seen, claims = _record(*state.seen), Claims("", None if self.plain else self.claims.clock)
        if early:
            if state.now >= state.early + claim_calls.LOOK_SECONDS * 1000:
                call = claims.forget(self.record, b"request", seen, True, True)
                yield Step("forget by force, later", call.script.name, tuple(call.args[1:]))
            return
        for call, name in (
            (self.claims.forget(self.record, b"request", seen, False), "forget"),
            (claims.forget(self.record, b"request", seen, True), "forget by force"),
            (self.claims.resolve(self.record, b"request", seen, True, KEEP, b"v", b"decided"), "resolve as done"),
            (self.claims.resolve(self.record, b"request", seen, False, KEEP, b"n", b""), "resolve as free"),
        ):
            yield Step(name, call.script.name, tuple(call.args[1:]))

    def _looks(self, state: State) -> tuple[int, bool]:
        return state.found.fence, state.found.state == b"p"

    def alone(self, state: State, step: Step) -> State:
        path = (*state.path, step.name)
        if step.name == "lapse":
            return replace(state, now=state.now + LEASE, path=path)
        if step.name == "retention ends":
            return replace(state, now=state.now + KEEP, path=path)
        if step.name == "a moment passes":
            return replace(state, now=state.now + MOMENT, path=path)
        if step.name.startswith("look"):
            return replace(state, seen=self._looks(state), path=path)
        return replace(state, callers=_put(state.callers, step.caller, Caller()), path=path)

    # -- what came of it ----------------------------------------------------------------------------------------------

    def answered(self, before: State, step: Step, reply: tuple[Any, ...], found: tuple[Any, ...]) -> State:
        dumps, content, says = found
        after = replace(before, dumps=dumps, content=content, found=Stored(*says), path=(*before.path, step.name))
        if step.half == "plain/expiry":
            return self._read(before, after, step, reply)
        reply = self._plain_told(after, step, reply) if step.plain else _told(reply)
        word = reply[0].decode()
        changed = after.content != before.content and word != "busy"  # which notes that a caller waits
        if step.told is not None:
            self._judge_copy(before, after, step.told, reply)
            number, after = step.told.number, replace(after, copies=before.copies + 1)
        else:
            number = len(before.sent)
            after = replace(
                after,
                sent=(*before.sent, Request(step.name, step.script, step.args, reply, number, changed, step.plain)),
            )
        self._judge(before, after, step, word, reply)
        world = self._now(before, step, word, reply, changed)
        if changed:
            world = replace(world, last=number)
        after = replace(after, world=world, unheard=before.unheard + (not step.heard))
        self._judge_content(after)
        return self._known(before, after, step, reply)

    def _read(self, before: State, after: State, step: Step, reply: tuple[Any, ...]) -> State:
        """A caller reads the token of its claim, or asks the script: a copy of its claim."""
        caller = before.callers[step.caller]
        asked = monotonic() - (before.now - caller.asked) / 1000
        answer = PlainClaim((b"k",), caller.asks, self.terms).answer_plain((None, reply[2]), asked)
        if answer is None:
            return replace(after, callers=_put(before.callers, step.caller, Caller()))
        self.check(after, answer.token == caller.fence, "P4: a caller reads the token of another claim")
        told = max(before.told, answer.token)
        return replace(after, callers=_put(before.callers, step.caller, Caller(caller.asks, answer.token)), told=told)

    def _plain_told(self, after: State, step: Step, reply: tuple[Any, ...]) -> tuple[Any, ...]:
        """What a client reads in the reply to plain commands, in the words of the scripts."""
        if reply[0] != b"plain":
            return reply
        if step.half:
            return b"started", 0, after.found.fence, 1, 0, b""
        answer = PlainClaim((b"k",), _owner(step), self.terms).answer_plain(reply[2:], monotonic())
        if answer is None:
            return b"undecided", 0
        if answer.state == "started":
            return b"started", 0, answer.token, answer.attempt, answer.taken_over, answer.checkpoint
        return b"done", 0, answer.kind, answer.result, answer.token, answer.attempt, 0

    def _known(self, before: State, after: State, step: Step, reply: tuple[Any, ...]) -> State:
        """What a caller believes after this reply, which it may not have heard."""
        owner = _owner(step)
        if step.script == "guard/claim":
            caller = int(owner[:1])
            if step.half:
                asks = Caller(fence=reply[2], asks=owner, asked=before.now)
                return replace(after, callers=_put(before.callers, caller, asks))
            if reply[0] == b"started" and step.heard and not before.callers[caller].owner:
                told = max(before.told, reply[2])
                return replace(after, callers=_put(before.callers, caller, Caller(owner, reply[2])), told=told)
            if self.share and step.heard and step.told is None:
                waits = before.callers[caller]
                if reply[0] == b"busy" and not waits.waits:
                    waits = Caller(waits=owner, ends=before.world.ends)
                return replace(after, callers=_put(before.callers, caller, waits if reply[0] == b"busy" else Caller()))
        elif step.told is None and step.heard and step.script in ("guard/complete", "guard/release"):
            return replace(after, callers=_put(before.callers, step.caller, Caller()))
        elif reply[0] == b"early" and step.told is None:
            return replace(after, early=before.now)
        return after

    def _judge(self, before: State, after: State, step: Step, word: str, reply: tuple[Any, ...]) -> None:
        world, owner, changed = before.world, _owner(step), after.content != before.content
        live = bool(world.owner) and world.until > before.now
        if step.script == "guard/claim":
            self._judge_claim(before, after, owner, word, reply)
            self._judge_waited(before, after, step, word, reply)
        elif step.script in ("guard/complete", "guard/release", "guard/renew"):
            # IFEQ finds the same record in a late copy of the claim, which was granted another token.
            same = step.script != "guard/complete" or step.args[2] == world.fence or (step.plain and world.ghost)
            mine = world.owner == owner and same
            self.check(after, mine or not changed, "P5: who does not own the key changes it")
            if mine:
                self.check(after, word == "ok" or (step.plain and word == "undecided"), "P5: the owner is refused")
            elif step.plain:
                self.check(after, word in ("ok", "undecided"), "P5: a plain completion has another answer")
            elif step.told is None and not _had_effect(before, step.script, owner):
                self.check(after, word == "lost", "P5: who does not own the key is not told so")
        else:
            fence, running = before.seen or (0, False)
            again = before.early >= 0 and not changed  # a copy of the first request had the effect
            if step.told is None and word in GRANTS and not again:
                self.check(after, world.fence == fence, "what came since is decided about")
                self.check(after, bool(world.owner) == running, "what has ended since is decided about")
                force = step.script == "guard/forget" and step.args[2] != b"0"
                self.check(after, force or not live, "P1: what is live is decided about")
            self.check(after, word in GRANTS or not changed, "a decision that is refused has an effect")

    def _judge_claim(self, before: State, after: State, owner: bytes, word: str, reply: tuple[Any, ...]) -> None:
        world, now = before.world.at(before.now), before.now
        live = bool(world.owner) and world.until > now
        if word != "started":
            noted = (self.share or self.plain) and word == "busy"
            self.check(after, noted or after.content == before.content, "a claim that is refused has an effect")
            free = world.done_until <= now and (not world.owner or (not live and not self.hold))
            self.check(after, not free or word in ("stale", "shared", "undecided"), "a free key is refused")
            self.check(after, word != "busy" or reply[2] == world.until - now, "wrong remaining lease")
            if word == "done":
                self.check(after, reply[3] in (b"result", b"decided"), "P2: a duplicate gets another result")
            return
        if owner == world.owner:
            self.check(after, reply[2] == world.fence, "P6: a copy of a claim gets another token")
            return
        self.check(after, not live, "P1: two live claims")
        self.check(after, world.done_until <= now, "P2: it is done, and runs again")
        self.check(after, not (self.hold and world.owner), "P3: an owner that vanished is not waited for")
        self.check(after, reply[2] > max(world.fence, before.told), "P4: a fencing token does not rise")
        self.check(after, reply[3] == world.starts + 1, "P11: an attempt is not counted")
        self.check(after, reply[4] == world.lapses + bool(world.owner), "P3: a lost lease is not counted")

    def _judge_waited(self, before: State, after: State, step: Step, word: str, reply: tuple[Any, ...]) -> None:
        """Those who waited for a run that failed get its failure, and nobody else does."""
        world, owner, waited = before.world.at(before.now), _owner(step), step.args[2][-1] == 2
        caller = before.callers[int(owner[:1])]
        if word == "shared":
            self.check(after, waited, "a failure goes to a caller that did not wait")
            self.check(after, reply[3] == b"failure of " + world.failure, "a failure is not that of the last run")
            self.check(after, step.told is not None or caller.ends < world.ends, "a failure came before the wait")
        elif waited and step.told is None:
            self.check(after, not world.failure, "a caller that waited for a failure does not get it")

    def _judge_copy(self, before: State, after: State, first: Request, reply: tuple[Any, ...]) -> None:
        """What nobody came after gets the same answer, and has no second effect. Otherwise a copy of a claim may be
        granted what is free, and a copy of a heartbeat hold what is its own."""
        quiet = after.content == before.content
        world, owner = before.world, _owner(first)
        if first.script not in ("guard/claim", "guard/renew") and first.reply[0].decode() in GRANTS:
            self.check(after, quiet or (world.ghost and world.owner == owner), "P6: a late copy has a second effect")
        if first.effect and world.last == first.number and not world.ghost:
            self.check(after, _is_same(reply, first.reply), "P6: a copy is answered otherwise")
            self.check(after, quiet or first.script == "guard/renew", "P6: a copy has a second effect")
        if first.script == "guard/claim" and world.rests_until > before.now and world.last >= 0:
            last = before.sent[world.last]
            own = last.script in ("guard/complete", "guard/release") and _owner(last) == owner
            self.check(after, quiet or not own, "P6: a late claim locks what was given back")

    def _now(self, before: State, step: Step, word: str, reply: tuple[Any, ...], changed: bool) -> World:
        """The truth after this answer."""
        now, owner = before.now, _owner(step)
        world = before.world.at(now)
        if word == "busy":
            return replace(world, waited=self.share)
        if word not in GRANTS or not (changed or owner == world.owner):
            return world
        if step.script == "guard/claim":
            return self._granted(world, owner, now, reply[2], step.told is not None)
        if step.script == "guard/renew":
            return replace(world, until=now + LEASE)
        return self._ended(world, step, now) if changed else world

    def _granted(self, world: World, owner: bytes, now: int, fence: int, copy: bool) -> World:
        if owner == world.owner:
            return world
        more = {"starts": world.starts + 1, "lapses": world.lapses + bool(world.owner)}
        return replace(
            world,
            owner=owner,
            fence=fence,
            until=now + LEASE,
            done_until=0,
            ghost=copy,
            waited=False,
            failure=b"",
            **more,
        )

    def _ended(self, world: World, step: Step, now: int) -> World:
        rest = replace(world, owner=b"", until=0, ghost=False, rests_until=now + KEEP, waited=False)
        rest = replace(rest, ends=world.ends + self.share)
        if step.script == "guard/release" and world.waited:
            return replace(rest, failure=world.owner)
        if step.plain:
            rest = replace(rest, fence=step.args[2])
        if step.script == "guard/complete" or (step.script == "guard/resolve" and step.args[2] == b"1"):
            return replace(rest, done_until=now + KEEP)
        if step.script == "guard/forget":
            return replace(rest, done_until=0, rests_until=0, starts=0, lapses=0)
        return rest

    def _judge_content(self, after: State) -> None:
        """What is stored says what is true."""
        if not after.content:
            return
        found, world = after.found, after.world
        ends = found.ends - BEGIN
        self.check(after, found.fence == world.fence, "P4: the token that was granted last is not what is stored")
        running = found.state == b"p"
        self.check(after, running == bool(world.owner), "it is in progress, or not, against what was answered")
        if running:
            self.check(after, found.owner == world.owner, "P1: it is stored for another owner")
            self.check(after, ends == world.until, "P1: the lease does not end as it was granted")
        if running or world.done_until > after.now:
            counted = (found.attempts, found.taken) == (world.starts, world.lapses)
            self.check(after, counted, "P11: attempts or lost leases are not what is stored")
        if world.done_until > after.now:
            kept = found.state == b"d" and ends == world.done_until
            self.check(after, kept, "P2: what is done is not kept as long")
            self.check(after, found.print == self.print, "what is done lost its fingerprint")


def _owner(asked: Step | Request) -> bytes:
    """Under which token it acts: that of a record stands behind what all of a batch have in common."""
    place = {"guard/claim": 3, "guard/complete": 1, "guard/release": 1}.get(asked.script, 0)
    return cast("bytes", asked.args[place])


def _has_sent(state: State, name: str, owner: bytes) -> bool:
    return any(one.script == name and _owner(one) == owner for one in state.sent)


def _had_effect(state: State, name: str, owner: bytes) -> bool:
    """The request itself; or, last of all, a copy of it."""
    last = state.world.last
    return any((one.effect or one.number == last) and one.script == name and _owner(one) == owner for one in state.sent)


def _told(reply: tuple[Any, ...]) -> tuple[Any, ...]:
    """What a packed reply says, in the words of the others, without their time."""
    packed = bytes(reply) if isinstance(reply[0], int) else b""
    if packed == b"k":
        return b"ok", 0
    if packed[:1] == b"s":
        return b"started", 0, *struct.unpack_from(">xQII", packed), packed[17:]
    if packed:
        kind, token, attempt, left = struct.unpack_from(">xcQIQ", packed)
        return b"done", 0, kind, packed[22:], token, attempt, left
    return reply


def _timeless(reply: tuple[Any, ...]) -> tuple[Any, ...]:
    return (reply[0], *reply[2:])


def _is_same(reply: tuple[Any, ...], first: tuple[Any, ...]) -> bool:
    """Whether a copy got the first answer. Where plain commands decide nothing, the script is asked."""
    return reply[0] == b"undecided" or _timeless(reply) == _timeless(first)


def _put(callers: tuple[Caller, ...], at: int, one: Caller) -> tuple[Caller, ...]:
    return (*callers[:at], one, *callers[at + 1 :])


def _record(fence: int, running: bool) -> Record:
    """The record as the operator saw it."""
    state = "in_progress" if running else "done"
    return Record(state, fence, 1, 0, None, None, None, "", True, "", b"", b"")
