"""P1 from outside: histories of one key, recorded at concurrent clients while the wire fails, are linearizable.

Threads claim, renew, complete, release, checkpoint, inspect, forget and resolve one key, each through a link of its own
behind a proxy that loses replies and requests of any of them, doubles them, and lets some arrive late; leases lapse
under owners that live on. Each request bears a time of its own, by which the proxy knows how often it reached the
server: a copy that comes when others had the key is answered as of then, so the history has to say that there was one.
That the checker finds what is wrong is shown with scripts that were spoilt.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import Any, cast

import pytest

from idemgate import Gate
from idemgate.core import calls
from idemgate.core.calls import Call, new_id
from idemgate.core.codec import Codec
from idemgate.errors import StoreUnavailable
from idemgate.guard import claim_calls
from idemgate.guard.claim_calls import Claims, PlainClaim, PlainMark, PlainTerms, Record, _plain_terms
from idemgate.lua import Script, script
from idemgate.testing import Clock
from idemgate.testing.proxy import Proxy
from tests.faults import broken
from tests.guard.search import PLAIN
from tests.guard.test_model import answer_of, facts_of
from tests.resilience.linear import PLAIN_SPOILT, SPOILT, UNKNOWN, Operation, linearizable

CLIENTS, STEPS, LEASE, KEEP = 4, 8, 6_000, 960_000
PLAIN_START = 4_000_000_000
"""In the future: the server removes no plain claim whose time comes later."""
SCRIPT = b"EVALSHA"
VERBS = (
    "claim",
    "claim",
    "claim",
    "complete",
    "renew",
    "release",
    "checkpoint",
    "inspect",
    "inspect",
    "forget",
    "resolve",
    "resolve",
)
PLAIN_VERBS = ("claim", "complete", "mark")
DECISIONS = ("forget", "resolve")
RESULT, DECIDED = (Codec().encode(one) for one in ("result", "decided"))


MIXED = pytest.mark.servers("7.0"), pytest.mark.damages("fence", "disagrees")  # of a time that is to come


class History:
    """One key, and all that its clients did."""

    def __init__(self, url: str, namespace: str, drawn: random.Random, plain: bool = False) -> None:
        self.proxy, self.drawn, self.clock = Proxy(url), drawn, Clock(PLAIN_START if plain else 1_700_000_000)
        self.plain, self.stored = plain, dict[bytes, bytes]()
        self.namespace, self.operations = namespace, list[Operation]()
        self.owners = [new_id() for _ in range(3)]
        self.fences: dict[bytes, int] = {}
        self.seen: Record | None = None
        self.wrong: list[BaseException] = []
        self.lock, self.lapses = threading.Lock(), 0

    def run(self) -> None:
        seeds = [self.drawn.randrange(1 << 30) for _ in range(CLIENTS + 1)]
        clients = [threading.Thread(target=self._client, args=(random.Random(seed),)) for seed in seeds[1:]]
        for one in clients:
            one.start()
        self._spoil(random.Random(seeds[0]), clients)
        for one in clients:
            one.join()
        self.proxy.heal()
        self.proxy.release()
        self._client(random.Random(0), steps=3)  # what came late shows now
        self.proxy.close()
        assert not self.wrong, self.wrong
        self.operations = [self._with_copies(one) for one in self.operations]

    def _with_copies(self, one: Operation) -> Operation:
        (key,) = Claims(self.namespace, None).key("s", "k")
        return replace(one, copies=max(0, self.proxy.count(b"%s\r\n%s" % (key, _time(one.us))) - 1))

    def _now(self, drawn: random.Random, verb: str) -> int:
        """Return a time that no other request has, us. Now and then the lease of the owner is over by then."""
        with self.lock:
            lapses = drawn.random() < (0.5 if verb == "resolve" else 0.15)
            self.lapses += lapses
            ends = self.plain and drawn.random() < 0.1  # what is done or was released is gone
            self.clock.advance((KEEP if ends else LEASE if lapses else 1) / 1000)
            return self.clock.microseconds()

    def _spoil(self, drawn: random.Random, clients: list[threading.Thread]) -> None:
        proxy = self.proxy
        while any(one.is_alive() for one in clients):
            if not proxy.faults_left:  # or requests would never get through
                drawn.choice([proxy.cut_reply, proxy.double_request, proxy.drop_request, proxy.hold_request])(SCRIPT)
            if drawn.random() < 0.3:
                proxy.release()
            time.sleep(0.01)

    def _client(self, drawn: random.Random, steps: int = STEPS) -> None:
        try:
            with Gate(self.proxy.url, namespace=self.namespace, clock=self.clock) as gate:
                for _ in range(steps):
                    self._step(gate, drawn)
        except BaseException as error:
            self.wrong.append(error)

    def _step(self, gate: Gate, drawn: random.Random) -> None:
        verb = drawn.choice((*VERBS, "mark") if self.plain else VERBS)
        if verb in DECISIONS and (self.seen is None or drawn.random() < 0.5):
            self._ask(gate, drawn, "inspect")
        self._ask(gate, drawn, verb if self.seen or verb not in DECISIONS else "inspect")

    def _ask(self, gate: Gate, drawn: random.Random, verb: str) -> None:
        owner = self.owners[drawn.choice([0, 0, 0, 1, 2])]
        arguments: dict[str, tuple[Any, ...]] = {
            "claim": (new_id(), LEASE, KEEP, b"", 0, drawn.random() < 0.2),
            "mark": (new_id(), KEEP, b""),
            "complete": (owner, self.fences.get(owner, 0), KEEP, b"v", RESULT),
            "renew": (owner, LEASE, KEEP),
            "release": (owner, KEEP, False),
            "inspect": (),
            "checkpoint": (owner, RESULT),
            "forget": (new_id(), self.seen, drawn.random() < 0.3),
            "resolve": (new_id(), self.seen, drawn.random() < 0.5, KEEP, b"v", DECIDED),
        }
        if self.plain and verb in PLAIN_VERBS and drawn.random() < 0.7:
            if verb == "mark":
                arguments["plain_mark"] = arguments["mark"][:2]
            elif verb == "claim":
                arguments["plain_claim"] = (*arguments["claim"][:3], arguments["claim"][5])
            elif owner in self.stored:
                arguments["plain_complete"] = arguments["complete"]
            if f"plain_{verb}" in arguments:
                answer = self._send(gate, drawn, f"plain_{verb}", arguments)
                if verb == "claim" and answer is not UNKNOWN and answer[0] == "started" and drawn.random() < 0.7:
                    owner = arguments["claim"][0]  # else another client changes most of these before their end
                    end = drawn.choice(["plain_complete", "complete"])
                    self._send(gate, drawn, end, {end: (owner, self.fences[owner], *arguments["complete"][2:])})
                if answer is not UNKNOWN:
                    return
        self._send(gate, drawn, verb, arguments)

    def _build(self, verb: str, us: int, arguments: tuple[Any, ...]) -> Call[Any]:
        claims = Claims(self.namespace, Clock(us / 1_000_000))
        record = claims.key("s", "k")
        if not verb.startswith("plain"):
            return getattr(claims, verb)(record, *arguments)  # type: ignore[no-any-return]
        text = Script(verb, PLAIN["plain/complete" if verb == "plain_complete" else "plain/claim"])
        if verb == "plain_mark":
            mark = PlainMark(script("guard/mark"), record, (b"", *arguments, b""), bool)  # its answer needs the owner
            head = b"\xc0" + arguments[1].to_bytes(6)
            words = (us, head, arguments[1], b"\0", arguments[0])
            return Call(text, record, words, lambda reply: mark.answer_plain(reply[2], 0.0))
        if verb == "plain_claim":
            owner, lease, keep, hold = arguments
            terms = cast("PlainTerms", _plain_terms(script("guard/claim"), lease, keep, 0, hold, 0))
            claim = PlainClaim(record, owner, terms)
            read = lambda reply: claim.answer_plain(reply[2:], time.monotonic())  # noqa: E731
            return Call(text, record, (us, terms.record, terms.lifetime, b"\0", owner), read)
        owner, fence, keep, kind, result = arguments
        done = b"\xf5" + fence.to_bytes(7) + (keep // 60_000).to_bytes(2) + result
        words = (us, kind, owner, fence, keep, self.stored[owner], done)
        return Call(text, record, words, lambda reply: True if reply[0] == b"ok" else None)

    def _send(self, gate: Gate, drawn: random.Random, verb: str, arguments: dict[str, tuple[Any, ...]]) -> Any:
        """Send a call and note it. Return its answer, which is UNKNOWN if plain commands are not enough."""
        us = self._now(drawn, verb)
        call = self._build(verb, us, arguments[verb])
        assert int(call.args[0]) == us
        if drawn.random() < (0.3 if verb in DECISIONS else 0.15):  # most decisions are refused
            drawn.choice([self.proxy.cut_reply, self.proxy.double_request, self.proxy.hold_request])(_time(us))
        called, answer = time.monotonic(), UNKNOWN
        try:
            found = gate.context.link.run(call, within=drawn.choice([0.0] + 7 * [30.0]))
            answer = facts_of(found) if verb == "inspect" else UNKNOWN if found is None else answer_of(found)
            if verb == "inspect":
                self.seen = found
            elif verb.endswith("claim") and found is not None and answer[0] == "started":
                # only now does anybody know this owner
                self.owners = [arguments[verb][0], *self.owners[:2]]
                self.fences[self.owners[0]] = answer[1]
                if verb == "plain_claim":
                    self.stored[self.owners[0]] = found.stored
        except StoreUnavailable as error:
            if error.executed == "no":
                return answer
        returned = inf if answer is UNKNOWN else time.monotonic()
        self.operations.append(Operation(called, returned, us, verb, arguments[verb], answer))
        return answer


def _time(us: int) -> bytes:
    """As it stands in a request, and in the copies of it."""
    return b"$16\r\n%d\r\n" % us


@pytest.mark.timeout(0)
@pytest.mark.parametrize("plain", [False, pytest.param(True, marks=MIXED)])
def test_histories_of_a_key_are_linearizable_while_the_wire_fails(
    url: str, namespace: str, drawn: random.Random, seed: int, many: Any, sound: Any, record_fault: Any, plain: bool
) -> None:
    histories, operations, unknown, copies, lapses = many(8), 0, 0, 0, 0
    for number in range(histories):
        history = History(url, f"{namespace}-{number}", drawn, plain)
        history.run()
        assert linearizable(history.operations), (seed, sorted(history.operations, key=lambda one: one.called))
        with Gate(url, namespace=history.namespace) as gate:  # its own went through a proxy that is gone
            sound(gate)
        operations += len(history.operations)
        unknown += sum(one.answer is UNKNOWN for one in history.operations)
        copies += sum(one.copies for one in history.operations)
        lapses += history.lapses
    record_fault(
        "history of one key, recorded at concurrent clients while the wire fails, checked for linearizability"
        + (", plain commands and scripts mixed" if plain else ""),
        histories,
        promises="P1 P2 P4 P5 P6",
        seed=seed,
        operations=operations,
        unknown_outcomes=unknown,
        copies=copies,
        lapsed_leases=lapses,
    )


@pytest.mark.unaudited("scripts were spoilt, and what they wrote with them")
@pytest.mark.parametrize(
    ("name", "fault", "plain"),
    [*((*one, False) for one in SPOILT), *(pytest.param(*one, True, marks=MIXED) for one in PLAIN_SPOILT)],
)
def test_a_spoilt_script_is_found(
    name: str, fault: str, plain: bool, url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = Script(name, broken(name, fault))
    spoilt: Callable[[str], Script] = lambda one: changed if one == name else script(one)  # noqa: E731 - a stand-in
    monkeypatch.setattr(calls, "script", spoilt)
    monkeypatch.setattr(claim_calls, "script", spoilt)
    for number in range(100):
        history = History(url, f"{namespace}-{number}", random.Random(number), plain)
        history.run()
        if not linearizable(history.operations):
            return
    pytest.fail("the checker found nothing wrong with it")
