"""P1 from outside: histories of one key, recorded at concurrent clients while the wire fails, are linearizable.

Threads claim, renew, complete, release, inspect and forget one key, each through a link of its own behind a proxy that
loses replies and requests, doubles them, and lets some of them arrive late. Leases do not lapse here, and nothing is
forgotten by force: a claim whose reply was lost, and that was taken over before it was asked for again, is answered
as of then, which is one lost lease. `test_wire.py` and the model of the guard are about that, and about late claims.
That the checker finds what is wrong is shown with scripts that were spoilt.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from idemgate import Gate
from idemgate.core import calls
from idemgate.core.claims import Record
from idemgate.core.tokens import token
from idemgate.errors import StoreUnavailable
from idemgate.lua import Script, script
from idemgate.testing import Clock
from tests.faults.linear import UNKNOWN, Operation, linearizable
from tests.guard.test_model import answer_of, facts_of
from tests.proxy import Proxy

CLIENTS, STEPS, LEASE, KEEP = 4, 8, 1_000, 1_000_000
SCRIPT = b"EVALSHA"
ASKED_AGAIN = ("claim", "renew", "inspect")
"""Not those that end something: a copy of them that comes when another owner was there is told so, though the first one
had its effect."""


class History:
    """One key, and all that its clients did."""

    def __init__(self, url: str, namespace: str, drawn: random.Random) -> None:
        self.proxy, self.drawn, self.clock = Proxy(url), drawn, Clock(1_700_000_000)
        self.namespace, self.operations = namespace, list[Operation]()
        self.owners = [token() for _ in range(3)]
        self.seen: Record | None = None
        self.wrong: list[BaseException] = []

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

    def _spoil(self, drawn: random.Random, clients: list[threading.Thread]) -> None:
        proxy = self.proxy
        again = [calls.script(f"once/{verb}").sha for verb in ASKED_AGAIN]
        late = [calls.script(f"once/{verb}").sha for verb in ("complete", "renew", "release", "forget")]
        while any(one.is_alive() for one in clients):
            if proxy.planned < CLIENTS:  # or requests would never get through
                drawn.choice([proxy.cut_reply, proxy.double_request])(drawn.choice(again))
                proxy.drop_request(SCRIPT)
            if proxy.planned < CLIENTS:
                proxy.hold_request(drawn.choice(late))
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
        verb = drawn.choice(["claim", "claim", "complete", "renew", "release", "inspect", "forget"])
        if verb == "forget" and self.seen is None:
            verb = "inspect"
        owner = drawn.choice(self.owners)
        arguments: dict[str, tuple[Any, ...]] = {
            "claim": (token(), LEASE, KEEP, b"", 0, False),
            "complete": (owner, KEEP, b"v", b"result"),
            "renew": (owner, LEASE, KEEP),
            "release": (owner, KEEP, False),
            "inspect": (),
            "forget": (token(), self.seen, False),
        }
        us = self.clock.microseconds()
        gate.claims.clock = Clock(us / 1_000_000)
        call = getattr(gate.claims, verb)(gate.claims.key("s", "k"), *arguments[verb])
        assert int(call.args[0]) == us
        called, answer = time.monotonic(), UNKNOWN
        try:
            found = gate.link.run(call, within=drawn.choice([0.0] + 7 * [30.0]))
            answer = facts_of(found) if verb == "inspect" else answer_of(found)
            if verb == "inspect":
                self.seen = found
            elif verb == "claim":  # only now does anybody know this owner
                self.owners[drawn.randrange(len(self.owners))] = arguments[verb][0]
        except StoreUnavailable as error:
            if error.executed == "no":
                return
        returned = float("inf") if answer is UNKNOWN else time.monotonic()
        self.operations.append(Operation(called, returned, us, verb, arguments[verb], answer))


@pytest.mark.timeout(0)
def test_histories_of_a_key_are_linearizable_while_the_wire_fails(
    url: str, namespace: str, drawn: random.Random, seed: int, many: Any, record_fault: Any
) -> None:
    histories, operations, unknown = many(8), 0, 0
    for number in range(histories):
        history = History(url, f"{namespace}-{number}", drawn)
        history.run()
        assert linearizable(history.operations), (seed, sorted(history.operations, key=lambda one: one.called))
        operations += len(history.operations)
        unknown += sum(one.answer is UNKNOWN for one in history.operations)
    record_fault(
        "history of one key, recorded at concurrent clients while the wire fails, checked for linearizability",
        histories,
        promises="P1 P2 P4 P5 P6",
        seed=seed,
        operations=operations,
        unknown_outcomes=unknown,
    )


SPOILT = {
    "a claim that does not look at the lease": ("once/claim", "if left > 0 then", "if left > 1e15 then"),
    "a claim that does not know its copies": ("once/claim", "if r[record.owner] == token then", "if false then"),
    "a completion by anybody": ("once/complete", "r[record.owner] ~= token or ", ""),
    "a release by anybody": ("once/release", "if r[record.owner] ~= token then", "if false then"),
    "a heartbeat of a former owner": ("once/renew", "r[record.owner] ~= token", "false"),
    "a fence that stands still": ("once/claim", "fence(r[record.fence], now_us)", "now_us"),
    "a forgetting of what came since": ("once/forget", "if r[record.fence] ~= tonumber(ARGV[3]) or", "if false and"),
}  # fmt: skip


@pytest.mark.parametrize("bug", SPOILT)
def test_a_spoilt_script_is_found(bug: str, url: str, namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, before, after = SPOILT[bug]
    assert before in script(name).text.decode()
    spoilt: Callable[[str], Script] = lambda one: (  # noqa: E731 - it is a stand-in
        Script(name, script(name).text.decode().replace(before, after)) if one == name else script(one)
    )
    monkeypatch.setattr(calls, "script", spoilt)
    for number in range(40):
        history = History(url, f"{namespace}-{number}", random.Random(number))
        history.run()
        if not linearizable(history.operations):
            return
    pytest.fail("the checker found nothing wrong with it")
