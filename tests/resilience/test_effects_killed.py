"""kill -9 of a guarded payment, around its credit in SQLite and PostgreSQL and at random moments.

The guard promises at least one credit, and none after the completion was recorded. A process that dies after its credit
and before its completion is followed by an owner with a higher fencing token. A database that refuses lower tokens
accepts that owner, so the payment is credited again. Only the key that is inserted in the transaction of the credit
prevents this.

`IDEMGATE_KILLS` (see conftest.py) says how many processes are killed beyond the few of the suite.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from idemgate import Gate
from idemgate.testing import Clock
from tests.resilience.judging import check_sound, over
from tests.resilience.payments import ACCOUNT_FENCE, CHECKS, EFFECT_KEY, SCOPE, Bank

START = 1_700_000_000.0
LEASE = 6.0
"""Seconds. It lapses only when the test's clock says so. A process that stood still for half of it would not start."""
AFTER_CREDIT = "after commit"
AFTER_COMPLETION = "after guard/complete"
PLACES = {
    "before credit": 0,
    "before commit": 0,
    AFTER_CREDIT: 1,
    "before guard/complete": 1,
    AFTER_COMPLETION: 0,
}
"""Where a process dies: how often the next owner credits again, unless the key was inserted with the credit."""


class Payments:
    """Payments to one account, by processes that are killed and by those that recover."""

    def __init__(self, zygote: Any, url: str, raw: Any, namespace: str, bank_url: str, check: str) -> None:
        self.zygote, self.raw, self.check = zygote, raw, check
        self.clock = Clock(START)
        self.gate = Gate(url, namespace=namespace, clock=self.clock)
        self.bank = Bank(bank_url)
        self.bank.create_tables()
        self.order = {
            "scene": "pay", "url": url, "namespace": namespace, "bank": bank_url, "check": check, "lease": LEASE,
        }  # fmt: skip
        self.allowed: dict[str, range] = {}
        self.kills = 0
        self.duration = self.finish(self.add(1))
        """Seconds that an undisturbed payment takes, for kills at random moments."""

    def add(self, most: int) -> str:
        """Return a new payment that may be credited once to `most` times; once, if the key goes with the credit."""
        payment = f"p{len(self.allowed)}"
        self.allowed[payment] = range(1, 2 if self.check == EFFECT_KEY else most + 1)
        return payment

    def run(self, payment: str, **more: Any) -> dict[str, Any]:
        now = self.clock.microseconds() / 1_000_000
        ended: dict[str, Any] = self.zygote(**self.order, key=payment, now=now, **more)
        over(self.raw, self.gate.namespace)
        self.kills += ended["signal"] == 9
        return ended

    def finish(self, payment: str) -> float:
        """Pay in a process that nothing kills, then send a duplicate. Return the seconds of the first."""
        receipt, duration = self.run(payment)["said"]
        before = self.bank.credits()
        assert self.run(payment)["said"][0] == receipt == f"receipt for {payment}"
        assert self.bank.credits() == before, "credited after success"
        return float(duration)

    def kill_at(self, place: str, times: int = 1) -> str:
        """Pay, killing the first owners at that place. Return the payment."""
        again = times * PLACES[place]
        payment = self.add(1 + again)
        for _ in range(times):
            assert self.run(payment, die=place)["signal"] == 9
            self.clock.advance(LEASE)
        self.finish(payment)
        if again and self.check != EFFECT_KEY:
            assert len(self.bank.credits()[payment]) == 1 + again
        return payment

    def kill_at_random(self, drawn: random.Random) -> None:
        times = drawn.randint(1, 3)
        payment = self.add(1 + times)
        for _ in range(times):
            self.run(payment, kill_after=drawn.uniform(0, 1.2 * self.duration))
            self.clock.advance(LEASE)
        self.finish(payment)

    def judge(self) -> dict[str, int]:
        """Check what holds for each payment. Return the figures."""
        credited = self.bank.credits()
        assert credited.keys() == self.allowed.keys(), "a payment was lost"
        for payment, tokens in credited.items():
            assert len(tokens) in self.allowed[payment], f"{payment}: {len(tokens)} credits"
            assert tokens == sorted(set(tokens)), "fencing tokens rise with each owner"
            record = self.gate.inspect(payment, scope=SCOPE)
            assert record.state == "done"
            assert len(tokens) <= record.attempts == 1 + record.taken_over
        total = sum(map(len, credited.values()))
        assert self.bank.balance() == total
        return {"payments": len(credited), "credits": total}

    def close(self) -> None:
        check_sound(self.gate, self.raw)
        self.gate.close()
        self.bank.close()


@pytest.fixture(params=["SQLite", "PostgreSQL"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """The kind of a database and the URL of an empty one."""
    if request.param == "SQLite":
        return request.param, str(tmp_path / "bank")
    return request.param, request.getfixturevalue("postgres_url")


@pytest.fixture(params=CHECKS)
def check(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def payments(
    zygote: Any, url: str, raw: Any, namespace: str, database: tuple[str, str], check: str
) -> Iterator[Payments]:
    if database[0] == "PostgreSQL":
        zygote.preload("psycopg")
    made = Payments(zygote, url, raw, namespace, database[1], check)
    yield made
    made.close()


@pytest.fixture
def record(database: tuple[str, str], check: str, record_fault: Any) -> Callable[..., None]:
    """Record the kills of a test, for this database and this check."""

    def record_kills(payments: Payments, seed: int | None = None) -> None:
        fault = f"SIGKILL around a credit in {database[0]}, {check}"
        record_fault(fault, payments.kills, promises="P2 P3 P4", seed=seed, **payments.judge())

    return record_kills


def test_only_a_key_inserted_with_the_credit_prevents_a_second_credit(payments: Payments, record: Any) -> None:
    # Given payments whose owners die at each place
    for place in PLACES:
        payments.kill_at(place)
    # And one whose first three owners die after their credit
    payment = payments.kill_at(AFTER_CREDIT, times=3)
    # Then each is credited at least once, and only the key bounds it to once
    expected = 1 if payments.check == EFFECT_KEY else 4
    assert len(payments.bank.credits()[payment]) == expected
    record(payments)


def test_payments_killed_at_random_moments(payments: Payments, drawn: random.Random, seed: int, record: Any) -> None:
    for _ in range(4):
        payments.kill_at_random(drawn)
    record(payments, seed)


@pytest.mark.timeout(0)
def test_many_kills(payments: Payments, kills: int, drawn: random.Random, seed: int, record: Any) -> None:
    """Only with IDEMGATE_KILLS."""
    if not kills:
        pytest.skip("IDEMGATE_KILLS says how many")
    while payments.kills < kills:
        if drawn.random() < 0.5:
            place = drawn.choice([*PLACES])
            payments.kill_at(place, 1 if place == AFTER_COMPLETION else drawn.randint(1, 2))  # no second owner
        else:
            payments.kill_at_random(drawn)
    record(payments, seed)


@pytest.mark.parametrize("first", ["successor", "stale owner"])
def test_a_fence_refuses_a_stale_owner_that_comes_after_its_successor(
    url: str, namespace: str, database: tuple[str, str], check: str, first: str
) -> None:
    clock, bank = Clock(START), Bank(database[1])
    bank.create_tables()
    with Gate(url, namespace=namespace, clock=clock) as gate:
        # Given an owner that stalled beyond its lease, and its successor
        stale = gate.claim("p", lease=LEASE)
        clock.advance(LEASE)
        successor = gate.claim("p", lease=LEASE)
        # When both credit
        order = [successor, stale] if first == "successor" else [stale, successor]
        allowed = [bank.credit(check, "p", claim.token) for claim in order]
        # Then a fence refuses the lower token once it has seen the higher; the key refuses whichever comes second
        assert allowed == [True, first == "stale owner" and check != EFFECT_KEY]
        # And the store accepts only the successor
        assert (stale.complete("stale"), successor.complete("receipt")) == (False, True)
    bank.close()


def test_a_fence_that_keys_share_refuses_live_owners(
    url: str, namespace: str, database: tuple[str, str], check: str
) -> None:
    clock, bank = Clock(START), Bank(database[1])
    bank.create_tables()
    with Gate(url, namespace=namespace, clock=clock) as gate:
        # Given owners of two payments, the second of which was granted later
        first = gate.claim("p1", lease="30s")
        clock.advance("1s")
        second = gate.claim("p2", lease="30s")
        # When the second credits first
        assert bank.credit(check, "p2", second.token)
        # Then a fence on the account refuses the first, although it still owns its key
        assert bank.credit(check, "p1", first.token) == (check != ACCOUNT_FENCE)
        assert first.complete("receipt")
        assert second.complete("receipt")
    bank.close()
