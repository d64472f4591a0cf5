"""The server's clock jumps before any script, forwards and back, by up to a day: a history of random calls, each at
another time."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from idemgate import Gate
from tests.resilience.servers import Jumpy

LEASE, HOUR, DAY = 30_000, 3_600_000, 86_400_000
JUMPS = [-DAY, -HOUR, -2 * LEASE, 0, 0, LEASE // 2, 2 * LEASE, HOUR, DAY]
KEYS = 5


@pytest.fixture
def server(tmp_path: Path, clock_library: Path) -> Iterator[Jumpy]:
    with Jumpy(tmp_path / "data", clock_library) as made:
        yield made


class Caller:
    """Asks for anything, and checks each answer against those before."""

    def __init__(self, gate: Gate, server: Jumpy, drawn: random.Random) -> None:
        self.gate, self.server, self.drawn = gate, server, drawn
        self.topic = gate.topic("t", slots=2, merge="append", lease="30s", backoff=0, max_attempts=10_000)
        self.claims: list[tuple[str, Any]] = []
        self.taken: list[Any] = []
        self.tokens: defaultdict[str, int] = defaultdict(int)  # the last one of each key, of claims and deliveries
        self.done: set[str] = set()
        self.accepted: dict[int, int] = {}  # number -> not due before, ms
        self.handled: list[int] = []

    def now(self) -> int:
        seconds, micros = self.server.client.time()
        return int(seconds * 1000 + micros // 1000)

    def act(self, n: int) -> None:
        does = [self.claim, self.end, self.trigger, self.take, self.settle]
        self.drawn.choice(does)(n)

    def claim(self, n: int) -> None:
        key = f"c{n // 60}-{self.drawn.randrange(KEYS)}"
        claim = self.gate.claim(key, lease="30s", retention="120h")
        if claim.started:
            assert key not in self.done
            self.rises(key, claim.token)
            self.claims.append((key, claim))
        elif key not in self.done:
            assert 0 <= (claim.retry_after or 0) <= 30, "a lease was lengthened"

    def end(self, _: int) -> None:
        if self.claims:
            key, claim = self.claims.pop(self.drawn.randrange(len(self.claims)))
            done = self.drawn.random() < 0.2
            if claim.complete("receipt") if done else claim.release():
                assert claim.token == self.tokens[key], "a former owner has a say"
                self.done |= {key} if done else set()

    def trigger(self, n: int) -> None:
        delay = self.drawn.choice([0, 0, HOUR])
        key = f"m{self.drawn.randrange(KEYS)}" if delay == 0 else f"later{n}"  # what merges is due with the first
        self.accepted[n] = self.now() + delay
        self.topic.trigger(key, n, delay=delay / 1000)

    def take(self, _: int) -> None:
        for delivery in self.topic.take(3):
            self.rises(delivery.key, delivery.token)
            if delivery.key.startswith("later") and delivery.attempt == 1:
                assert self.now() >= self.accepted[delivery.payload[0]], "it came early"
            self.taken.append(delivery)

    def settle(self, _: int) -> None:
        if self.taken:
            delivery = self.taken.pop(self.drawn.randrange(len(self.taken)))
            how = self.drawn.choice(["ack", "nack"])
            if getattr(self.topic, how)(delivery) == "ok":
                assert delivery.token == self.tokens[delivery.key], "a former owner has a say"
                self.handled += delivery.payload if how == "ack" else []

    def rises(self, key: str, token: int) -> None:
        assert token > self.tokens[key], f"the token of {key} did not rise"
        self.tokens[key] = token


def test_whatever_the_time_is_at_each_call_nothing_is_lost_or_held_for_longer(
    server: Jumpy,
    namespace: str,
    many: Callable[[int], int],
    drawn: random.Random,
    seed: int,
    sound: Callable[[Gate], None],
    record_fault: Callable[..., None],
) -> None:
    steps = many(300)
    with Gate(server.url, namespace=namespace) as gate:
        caller = Caller(gate, server, drawn)
        # Given random calls, before each of which the clock may jump
        for n in range(steps):
            server.jump(drawn.choice(JUMPS))
            caller.act(n)
        # When it stands still again, and goes on as far as everything is due
        server.jump(2 * DAY)
        for turn in range(3):
            server.jump(2 * DAY + turn * 2 * LEASE)
            for delivery in caller.topic.take(1000):
                caller.rises(delivery.key, delivery.token)
                assert caller.topic.ack(delivery) == "ok"
                caller.handled += delivery.payload
        # Then each was delivered, and acknowledged once, and what is done is done
        assert sorted(caller.handled) == sorted(caller.accepted)
        for key in caller.done:
            assert gate.claim(key).result == "receipt"
        sound(gate)
    figures = {"accepted": len(caller.accepted), "lost": 0, "fences_not_risen": 0}
    record_fault("the server's clock jumps between scripts", steps, promises="P2 P4 P5 P7 P9", seed=seed, **figures)
