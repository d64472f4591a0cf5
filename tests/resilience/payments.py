"""A guarded payment that credits an account in a database, and three checks by which the database may refuse a repeat.

SQLite and PostgreSQL run the same statements. The check and the credit are always one transaction.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Callable
from typing import Any

import redis

from idemgate import Gate, current
from idemgate.testing import Clock, History
from tests.resilience.points import reach

__all__ = ["ACCOUNT_FENCE", "CHECKS", "EFFECT_KEY", "SCOPE", "TOKEN_PER_PAYMENT", "Bank", "pay"]

SCOPE = "pay"
ACCOUNT_FENCE = "fence on the account"
TOKEN_PER_PAYMENT = "token kept per payment"
EFFECT_KEY = "key inserted with the credit"

SCHEMA = (
    "CREATE TABLE account (balance INTEGER NOT NULL, fence BIGINT NOT NULL)",
    "INSERT INTO account VALUES (0, 0)",
    "CREATE TABLE credits (payment TEXT NOT NULL, token BIGINT NOT NULL)",
    "CREATE TABLE tokens (payment TEXT PRIMARY KEY, token BIGINT NOT NULL)",
    "CREATE TABLE effects (payment TEXT PRIMARY KEY)",
)
CHECKS = {
    ACCOUNT_FENCE: "UPDATE account SET fence = :token WHERE fence <= :token",
    TOKEN_PER_PAYMENT: (
        "INSERT INTO tokens (payment, token) VALUES (:payment, :token) ON CONFLICT (payment) "
        "DO UPDATE SET token = excluded.token WHERE tokens.token <= excluded.token"
    ),
    EFFECT_KEY: "INSERT INTO effects (payment) VALUES (:payment) ON CONFLICT (payment) DO NOTHING",
}
"""Statements that change one row if the credit is allowed, else none."""


class Bank:
    """One connection to the database at `url`: a URL of PostgreSQL, or the path of an SQLite file."""

    def __init__(self, url: str) -> None:
        self._postgres = url.startswith("postgresql:")
        self._connection: Any
        if self._postgres:
            import psycopg

            self._connection = psycopg.connect(url, autocommit=True)
        else:
            self._connection = sqlite3.connect(url, timeout=60, isolation_level=None)

    def create_tables(self) -> None:
        for statement in SCHEMA:
            self._connection.execute(statement)

    def credit(self, check: str, payment: str, token: int) -> bool:
        """Credit the account with 1 if the check allows it. Return whether it did."""
        self._connection.execute("BEGIN" if self._postgres else "BEGIN IMMEDIATE")
        allowed = self._execute(CHECKS[check], payment=payment, token=token).rowcount == 1
        if allowed:
            self._execute("INSERT INTO credits VALUES (:payment, :token)", payment=payment, token=token)
            self._execute("UPDATE account SET balance = balance + 1")
        reach("before commit")
        self._connection.execute("COMMIT")
        return allowed

    def credits(self) -> dict[str, list[int]]:
        """Return the tokens of the credits of each payment, in their order."""
        found: dict[str, list[int]] = {}
        for payment, token in self._execute("SELECT payment, token FROM credits ORDER BY token"):
            found.setdefault(payment, []).append(token)
        return found

    def balance(self) -> int:
        return int(self._execute("SELECT balance FROM account").fetchone()[0])

    def close(self) -> None:
        self._connection.close()

    def _execute(self, statement: str, **values: object) -> Any:
        if self._postgres:
            statement = re.sub(r":(\w+)", r"%(\1)s", statement)
        return self._connection.execute(statement, values)


class StaleToken(Exception):
    """The database refused the token."""


def pay(order: dict[str, Any]) -> Callable[[], object]:
    """Build the scene: connect, then pay `order["key"]` under the guard. Its result is (receipt, seconds it took)."""
    name = order["namespace"]
    gate = Gate(order["url"], namespace=name, clock=Clock(order["now"]))
    raw = redis.Redis.from_url(order["url"])
    history = History(lambda event: raw.rpush(f"{name}:history", event.to_json()))
    bank = Bank(order["bank"])

    @gate.once(key="{payment}", scope=SCOPE, lease=order["lease"])
    def credit(payment: str) -> str:
        token = current().token
        with history.run(payment, token, current().attempt, work=payment):
            reach("before credit")
            allowed = bank.credit(order["check"], payment, token)
            reach("after commit")
            if not allowed and order["check"] != EFFECT_KEY:
                raise StaleToken(payment)
            return f"receipt for {payment}"

    def scene() -> object:
        start = time.monotonic()
        return credit(order["key"]), time.monotonic() - start

    return scene
