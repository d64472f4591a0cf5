"""The program that is watched. It has four topics with handlers and three guarded functions and a producer.

    idemgate run tools.night.app:gate   # a worker
    python -m tools.night.app 0         # the producer 0, with 50 triggers a second

`NIGHT_WORLD` names a file of JSON: what is outside of the program, such as a service that does not answer. It says what
goes wrong, and is read again when it has changed. `NIGHT_RENAMED` is a topic that this program names otherwise, and
`NIGHT_REVISION` the revision of all policies.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from idemgate import Delivery, Gate
from idemgate.errors import IdemgateError

__all__ = ["TOPICS", "gate", "produce"]

PRODUCED = 50
"""Triggers a second of one producer."""
REVISION = int(os.environ.get("NIGHT_REVISION", "1"))
COMMON: dict[str, Any] = {"lease": "10s", "max_attempts": 50, "concurrency": 4, "revision": REVISION}
TOPICS: dict[str, dict[str, Any]] = {
    "charges": {"slots": 2},
    "mails": {},
    "totals": {"merge": "sum", "window": f"{100 * REVISION}ms"},
    "renders": {"group_concurrency": REVISION},
}
"""The topics with their options. A later revision has another window and lets a group do more at once."""


class World:
    """What is outside of the program: `world["slow"]` is None, or what is slow."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read_at = 0
        self._facts: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        changed_at = self._file.stat().st_mtime_ns
        if changed_at != self._read_at:
            self._facts, self._read_at = json.loads(self._file.read_text()), changed_at
        return self._facts.get(name)


world = World(Path(os.environ["NIGHT_WORLD"]))
drawn = random.Random()
gate = Gate(namespace=os.environ["IDEMGATE_NAMESPACE"], timeout="4s")


def _named(topic: str) -> str:
    return f"{topic}-v2" if topic == os.environ.get("NIGHT_RENAMED") else topic


topics = {topic: gate.topic(_named(topic), **COMMON, **options) for topic, options in TOPICS.items()}


# -- guarded functions ------------------------------------------------------------------------------------------------


@gate.once(key="{key}", scope="charge", lease="2s", retention="10m")
def charge(key: str) -> str:
    return _call_bank("charge", key)


@gate.once(key="{key}", scope="settle", lease="2s", retention="10m", on_lease_loss="hold")
def settle(key: str) -> str:
    return _call_bank("settle", key)


@gate.once(key="{key}", scope="audit", lease="2s", retention="10m", max_run="5s")
def audit(key: str) -> str:
    return _call_bank("audit", key)


GUARDED = {"charge": charge, "settle": settle, "audit": audit}


def _call_bank(scope: str, key: str) -> str:
    if world["stops"] and world["stops"][:2] == [scope, key]:
        os.kill(os.getpid(), world["stops"][2])  # killed, or stopped for longer than its lease
    time.sleep(3600 if world["stuck"] == [scope, key] else drawn.uniform(0, 0.005))
    return f"receipt for {key}"


# -- handlers ---------------------------------------------------------------------------------------------------------


def _time_of(delivery: Delivery[Any], topic: str) -> float:
    """Return how many seconds a handler needs. Raise if it fails, as one of a hundred does at first."""
    if world["fails"] == [topic, delivery.key]:
        raise KeyError("address")
    if delivery.attempt == 1 and drawn.random() < (world["flaky"] or 0.01):
        raise ConnectionError("the peer closed the connection")
    if world["hangs"] == topic:
        return 3600
    if world["slow"] and world["slow"][:2] in ([topic, None], [topic, delivery.group]):
        return float(world["slow"][2])
    return drawn.uniform(0, 0.01)


@topics["charges"].handler
def handle_charge(delivery: Delivery[Any]) -> None:
    time.sleep(_time_of(delivery, "charges"))
    charge(delivery.key)


@topics["mails"].handler
async def handle_mail(delivery: Delivery[Any]) -> None:
    await asyncio.sleep(_time_of(delivery, "mails"))


@topics["totals"].handler
async def handle_total(delivery: Delivery[Any]) -> None:
    await asyncio.sleep(_time_of(delivery, "totals"))


@topics["renders"].handler
def handle_render(delivery: Delivery[Any]) -> None:
    time.sleep(_time_of(delivery, "renders"))


# -- the producer -----------------------------------------------------------------------------------------------------


def produce(number: int) -> None:
    """Send triggers and call guarded functions until the process is ended. Errors of the store are passed over."""
    due = time.monotonic()
    for n in itertools.count():
        for send in (_send_trigger, _call_guarded, *([_send_wrong] if n % PRODUCED == 0 else [])):
            with suppress(IdemgateError):
                send(number, n)
        due = max(due + 1 / PRODUCED, time.monotonic() - 1)
        time.sleep(max(0.0, due - time.monotonic()))


def _send_trigger(number: int, n: int) -> None:
    topic = [*topics][n % len(topics)]
    group = f"tenant-{drawn.randrange(20)}" if topic == "renders" else None
    topics[topic].trigger(f"order-{drawn.randrange(10_000)}", drawn.randrange(100), group=group)
    if world["hot"] and n % 5 == 0:
        topics["renders"].trigger(f"hot-{number}-{n}", 1, group=world["hot"])


def _call_guarded(number: int, n: int) -> None:
    if n % 5 == 0:
        charge(f"payment-{round(time.monotonic() * 5)}")  # the other producer calls it, too
    if n % 25 == 0:
        settle(f"day-{number}-{n}")


def _send_wrong(number: int, n: int) -> None:
    """Send what the world asks for, about once a second."""
    if asked := world["calls"]:
        scope, key = asked
        GUARDED[scope](key)
    if (versioned := world["versioned"]) and number != 1:
        topic, key, group, unit = versioned
        topics[topic].trigger(key, 1, group=group, version=round(time.time() * unit))
    if (refused := world["refused"]) and number == 0:
        topic, key, payload = refused
        topics[topic].trigger(key, payload)


if __name__ == "__main__":
    produce(int(sys.argv[1]))
