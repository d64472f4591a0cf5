"""kill -9 of a guarded payment at each step and at random, while Redis loses its data and owners stall.

Each payment is credited exactly once, and each call gets the first result. `IDEMGATE_KILLS` says how many processes the
slow tests kill; the others kill a few.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from idemgate import Gate
from idemgate.store.embedded.server import start
from idemgate.testing import Clock, audit
from integrations.sql.tests.flavours import Flavour
from integrations.sql.tests.killed import PLACES
from tests.resilience.forking import Zygote

KILLS = int(os.environ.get("IDEMGATE_KILLS", "0"))
PAY, CONSUME = "integrations.sql.tests.killed:pay", "integrations.sql.tests.killed:consume"
LEASE = 30.0
"""Seconds. It lapses only when the clock of the test says so."""
FEW = 2
"""Rounds of each kind in the usual suite. The slow tests draw many more."""


class Payments:
    """Payments to one account, by processes that die or stand still and by those that come after them."""

    def __init__(self, zygote: Zygote, url: str, flavour: Flavour, name: str, seed: int) -> None:
        self.zygote, self.flavour = zygote, flavour
        self.seed, self.drawn = seed, random.Random(seed)
        self.clock = Clock(1_700_000_000.0)
        self.gate = Gate(url, namespace=f"kills-{name}-{seed}", clock=self.clock)
        self.raw = redis.Redis.from_url(url)
        self.order = {
            "scene": PAY, "url": url, "namespace": self.gate.namespace,
            "flavour": name, "database": flavour.url, "lease": LEASE, "lock_timeout": 5, "times": 1,
        }  # fmt: skip
        self.topic = self.gate.topic("payments", lease=LEASE, backoff=0, max_attempts=100)
        self.keys: list[str] = []
        self.kills = 0
        self.told: Counter[str] = Counter()
        flavour.look("INSERT INTO stock VALUES ('account', 0)")
        began = time.monotonic()
        self.finish(self.add())
        self.duration = time.monotonic() - began

    def add(self) -> str:
        self.keys.append(f"p{len(self.keys)}")
        return self.keys[-1]

    def run(self, key: str, **more: Any) -> Any:
        """Run a process. Return what it said, or None if it was killed."""
        now = self.clock.microseconds() / 1_000_000
        ended = self.zygote(**{**self.order, "key": key, "now": now, **more})
        self.kills += ended["signal"] == signal.SIGKILL
        return ended["said"]

    def finish(self, key: str) -> None:
        """Pay twice in a process that nothing kills."""
        assert self.run(key, times=2) == [{"receipt": key}] * 2

    def lose(self, flush: bool) -> None:
        """Let the lease of the owner end: by the clock, or because Redis lost all its data."""
        if flush:
            self.raw.flushall()
        else:
            self.clock.advance(LEASE)

    def kill_at(self, place: str, times: int = 1, flush: bool = False) -> None:
        key = self.add()
        for _ in range(times):
            assert self.run(key, die=place) is None, f"{place} was not reached"
            self.lose(flush)
        self.finish(key)

    def kill_at_random(self, flush: bool = False) -> None:
        key = self.add()
        for _ in range(self.drawn.randint(1, 3)):
            self.run(key, kill_after=self.drawn.uniform(0, self.duration))
            self.lose(flush)
        self.finish(key)

    def stall(self, flush: bool = False) -> None:
        """Let an owner stand still, pay with others, and then kill it or let it go on."""
        key, now = self.add(), self.clock.microseconds() / 1_000_000
        linger = self.duration
        after = self.drawn.uniform(0, self.duration + linger)
        pid = self.zygote.stop(after, **{**self.order, "key": key, "now": now, "linger": linger})
        self.lose(flush)
        [successor] = self.run(key, lock_timeout=0.02)
        kill = self.drawn.random() < 0.5
        said = self.zygote.go_on(pid, signal.SIGKILL if kill else signal.SIGCONT)["said"]
        self.kills += kill
        self.told["busy" if successor == "busy" else "paid"] += 1
        assert successor in ("busy", {"receipt": key})
        assert said in (None, [{"receipt": key}], ["busy"])
        self.lose(flush)
        self.finish(key)

    def redeliver(self, place: str) -> None:
        """Pay by a message of a topic. The process that takes it dies; another one gets it again."""
        key = self.add()
        self.topic.trigger(key, 5)
        assert self.run(key, scene=CONSUME, die=place) is None, f"{place} was not reached"
        self.clock.advance(LEASE)
        assert self.run(key, scene=CONSUME) == [{"receipt": key}]
        assert self.run(key, scene=CONSUME) == []

    def judge(self) -> None:
        """Check that each payment was credited once, and that Redis has the results."""
        assert self.flavour.credits() == sorted(self.keys)
        assert self.flavour.look("SELECT n FROM stock") == [(len(self.keys),)]
        assert [kind for _, _, kind in self.flavour.rows()] == ["value"] * len(self.keys)
        report = audit(self.gate)
        assert report.sound, str(report)

    def close(self) -> None:
        self.gate.close()
        self.raw.close()


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    made.preload("integrations.sql.tests.killed")
    yield made
    made.close()


@pytest.fixture
def own_url() -> Iterator[str]:
    """A server of this test, which may lose its data."""
    with start() as server:
        yield server.url


@pytest.fixture
async def payments(
    request: pytest.FixtureRequest, zygote: Zygote, own_url: str, flavour: Flavour, capsys: Any, seed: int
) -> Any:
    name = request.node.callspec.params["flavour"]
    await flavour.create()
    made, began = Payments(zygote, own_url, flavour, name, seed), time.monotonic()
    yield made
    try:
        made.judge()
    finally:
        made.close()
    with capsys.disabled():
        if KILLS:
            figures = (
                f"N={made.kills} payments={len(made.keys)} {dict(made.told)} seconds={time.monotonic() - began:.0f}"
            )
            print(f"\n{request.node.name}: kills {figures} seed={seed}")


async def test_a_payment_killed_at_each_step_is_credited_once(payments: Payments) -> None:
    # The lease lapses at one step, and Redis loses its data at the next. The seed says which comes first.
    for number, place in enumerate(PLACES, start=payments.seed):
        payments.kill_at(place, flush=number % 2 == 1)
    payments.kill_at("after insert", times=3, flush=payments.seed % 2 == 1)


@pytest.mark.slow
async def test_payments_killed_at_random_moments_are_credited_once(payments: Payments) -> None:
    for number in range(FEW):
        payments.kill_at_random(flush=number % 2 == 1)


@pytest.mark.slow
async def test_owners_that_stall_beyond_their_lease_credit_once(payments: Payments) -> None:
    for number in range(FEW):
        payments.stall(flush=number % 2 == 1)


@pytest.mark.slow
async def test_a_redelivery_of_a_topic_whose_worker_died_is_credited_once(payments: Payments) -> None:
    for place in ("before insert", "after commit", "before topics/settle"):
        payments.redeliver(place)


SCENES: dict[str, Callable[[Payments], None]] = {
    "steps": lambda payments: payments.kill_at(payments.drawn.choice(PLACES)),
    "random": lambda payments: payments.kill_at_random(),
    "flushed": lambda payments: (
        payments.kill_at_random(flush=True)
        if payments.drawn.random() < 0.5
        else payments.kill_at(payments.drawn.choice(PLACES), flush=True)
    ),
    "stalled": lambda payments: payments.stall(flush=payments.drawn.random() < 0.3),
    "redelivered": lambda payments: payments.redeliver(payments.drawn.choice((*PLACES, "before topics/settle"))),
}


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.parametrize("scene", SCENES)
async def test_many_kills(payments: Payments, scene: str) -> None:
    """Kill a fifth of IDEMGATE_KILLS in each scene and flavour."""
    if not KILLS:
        pytest.skip("IDEMGATE_KILLS says how many")
    while payments.kills < KILLS / len(SCENES):
        SCENES[scene](payments)
