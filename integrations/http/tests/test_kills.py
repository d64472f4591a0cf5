"""kill -9 of the worker processes of gunicorn, at each step of a request and at random moments.

`IDEMGATE_KILLS` is how many processes are killed at named steps; 60 in the usual suite, half of them for each kind of
worker. A third as many are killed at random.
"""

from __future__ import annotations

import os
import random
import socket
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from idemgate import Gate
from idemgate.testing import Clock

APPS = Path(__file__).parent
KILLS = int(os.environ.get("IDEMGATE_KILLS", "24")) // 2
POINTS = {"before": 1, "effect": 2, "between": 2, "after": 1}
"""How many effects a request has whose first attempt is killed there. Two: the documented window."""


class Shop:
    """A client of a gunicorn, and the database of its apps."""

    def __init__(self, url: str, database: Path, clock: Clock) -> None:
        self.url, self.database, self.clock = url, database, clock
        self.deaths = 0

    def send(self, key: str, die: str) -> httpx.Response | None:
        """Send a request on a new connection. Return None if the worker died."""
        now = f"{self.clock.microseconds() / 1_000_000:.6f}"
        headers = {"idempotency-key": key, "x-now": now, "x-die": die, "connection": "close"}
        try:
            return httpx.post(self.url, headers=headers, content=b"{}", timeout=30, verify=False)
        except httpx.TransportError:
            self.deaths += 1
            return None

    def retry(self, key: str) -> httpx.Response:
        """Send a request again until it is answered. The lease of a worker that died ends at once."""
        self.clock.advance("31s")
        while (response := self.send(key, "never")) is None or response.status_code == 409:
            self.clock.advance("31s")
        return response

    def effects(self) -> Counter[str]:
        with closing(sqlite3.connect(self.database)) as connection:
            return Counter(dict(connection.execute("SELECT key, count(*) FROM payments GROUP BY key").fetchall()))


@pytest.fixture(params=[
    pytest.param(("gthread", "wsgi"), id="gthread", marks=pytest.mark.slow), pytest.param(("asgi", "asgi"), id="asgi")
])  # fmt: skip
def shop(request: pytest.FixtureRequest, store: str, gate: Gate, clock: Clock, tmp_path: Path) -> Iterator[Shop]:
    database, (worker, app) = tmp_path / "shop.sqlite", request.param
    with closing(sqlite3.connect(database)) as connection, connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE payments (id INTEGER PRIMARY KEY, key TEXT)")
    environment = {"IDEMGATE_STORE": store, "IDEMGATE_NAMESPACE": gate.namespace, "IDEMGATE_DATABASE": str(database)}
    with socket.create_server(("127.0.0.1", 0)) as listening:
        command = [
            sys.executable, "-m", "gunicorn", f"killed:{app}", "--chdir", str(APPS), "--preload", "--workers", "2",
            "--worker-class", worker, "--bind", f"fd://{listening.fileno()}", "--log-level", "critical",
            "--no-control-socket",
        ]  # fmt: skip
        with subprocess.Popen(command, env=os.environ | environment, pass_fds=[listening.fileno()]) as process:
            yield Shop(f"http://127.0.0.1:{listening.getsockname()[1]}/pay", database, clock)
            process.terminate()


@pytest.mark.slow
def test_of_a_request_whose_server_is_killed_the_retry_gets_the_answer(shop: Shop) -> None:
    expected: dict[str, int] = {}
    answers: dict[str, str] = {}
    for number in range(KILLS):
        die = [*POINTS][number % 4]
        key = f"{die}-{number}"
        assert shop.send(key, die) is None
        response = shop.retry(key)
        assert response.status_code == 201
        assert ("idempotent-replayed" in response.headers) is (die == "after")
        expected[key], answers[key] = POINTS[die], response.text
    assert shop.effects() == expected
    # Every later retry gets the same answer and has no effect
    for key, text in answers.items():
        again = shop.retry(key)
        assert (again.text, again.headers["location"]) == (text, f"/p/{text}")
        assert again.headers["idempotent-replayed"] == "true"
    assert shop.effects() == expected
    assert shop.deaths == KILLS
    print(f"N={KILLS} kills, of which {sum(n > 1 for n in expected.values())} inside the window")


@pytest.mark.slow
def test_of_a_request_whose_server_is_killed_at_random_the_retry_gets_the_answer(
    shop: Shop, seed: int, drawn: random.Random
) -> None:
    answers: dict[str, str] = {}
    failures: Counter[str] = Counter()
    numbers = iter(range(1 << 20))
    while shop.deaths < KILLS // 3:
        key = f"random-{next(numbers)}"
        response = shop.send(key, str(drawn.randrange(8_000)))
        if response is None or response.status_code == 409:
            failures[key] += 1
            response = shop.retry(key)
        answers[key] = response.text
    effects = shop.effects()
    assert {*effects} == {*answers}
    # A key has at most one effect more than workers died under it, and its answers never differ
    assert all(count <= 1 + failures[key] for key, count in effects.items()), (seed, effects)
    for key, text in answers.items():
        assert shop.retry(key).text == text, (seed, key)
    assert shop.effects() == effects
    twice = sum(count > 1 for count in effects.values())
    print(f"N={shop.deaths} kills at random, {len(answers)} requests, {twice} ran twice, seed={seed}")
