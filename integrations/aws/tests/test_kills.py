"""kill -9 of consumers: between the effect and its completion, and between the completion and the deletion.

`IDEMGATE_KILLS` says how many consumers are killed more than the few of the suite.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections import Counter
from typing import Any

import pytest
import redis

from idemgate import Gate
from integrations.aws.tests.conftest import Queue
from tests.resilience.verdict import read_events
from tests.waiting import wait_until

KILLS = int(os.environ.get("IDEMGATE_KILLS", "0"))
PATIENCE = 200
"""Seconds for a consumer. On a busy machine its start alone takes a minute, and a run may lose its lease."""
OPTIONS = {"key": "{message.body}", "scope": "killed", "lease": "1s", "poll": 1, "backoff": 0}


class Case:
    """A queue, and consumers that die."""

    def __init__(self, store: str, gate: Gate, queue: Queue, python: Any) -> None:
        self.queue, self.python, self.gate = queue, python, gate
        self.order: dict[str, Any] = {
            "store": store, "reports": store, "namespace": gate.namespace, "endpoint": queue.sqs.meta.endpoint_url,
            "queue": queue.url, "options": OPTIONS, "seed": 0, "fails": 0,
        }  # fmt: skip

    def start(self, client: str, die: str) -> subprocess.Popen[str]:
        order = json.dumps({**self.order, "client": client, "die": die})
        process: subprocess.Popen[str] = self.python("consumer.py", order, stdin=subprocess.PIPE)
        return process

    def kill(self, client: str, die: str) -> None:
        """Run a consumer that kills itself."""
        process = self.start(client, die)
        try:
            assert process.wait(PATIENCE) == -9
        finally:
            process.kill()
            process.communicate()

    def finish(self, client: str) -> None:
        """Run a consumer until the queue is empty, and stop it."""
        process = self.start(client, "")
        try:
            wait_until(lambda: self.queue.count() == (0, 0), PATIENCE)
            process.communicate(timeout=PATIENCE)
            assert process.returncode == 0
        finally:
            process.kill()

    def effects(self) -> Counter[str]:
        with redis.Redis.from_url(self.order["store"]) as raw:
            events = read_events(raw, f"reports-of-{self.gate.namespace}")
            return Counter(facts[0] for kind, *facts in events if kind == "effect")


@pytest.fixture
def case(store: str, gate: Gate, make_queue: Any, python: Any) -> Case:
    return Case(store, gate, make_queue(), python)


@pytest.mark.parametrize(("client", "die"), [("boto3", "delete"), ("aiobotocore", "delete")])
@pytest.mark.slow
def test_a_message_that_was_completed_does_not_run_again(case: Case, client: str, die: str) -> None:
    case.queue.send("one")
    # When a consumer is killed after the completion, before the deletion
    case.kill(client, die)
    assert case.queue.count() != (0, 0)
    # Then the next one deletes the message, and does not run it
    case.finish(client)
    assert case.effects() == {"one": 1}


@pytest.mark.parametrize("client", ["boto3", "aiobotocore"])
@pytest.mark.slow
def test_a_message_that_was_not_completed_runs_again(case: Case, client: str) -> None:
    case.queue.send("one")
    case.kill(client, "effect")
    case.finish(client)
    assert case.effects() == {"one": 2}


@pytest.mark.timeout(0)
@pytest.mark.slow
def test_many_kills(case: Case, drawn: random.Random) -> None:
    """Only with IDEMGATE_KILLS."""
    if not KILLS:
        pytest.skip("IDEMGATE_KILLS says how many")
    killed = Counter[str]()
    for number in range(KILLS):
        for copy in range(20):
            case.queue.send(f"{number}-{copy % 15}")  # five of them are copies
        die = drawn.choice(["effect", "delete"])
        case.kill(drawn.choice(["boto3", "aiobotocore"]), die)
        killed[die] += 1
    case.finish("aiobotocore")
    effects = case.effects()
    assert len(effects) == 15 * KILLS
    again = sum(effects.values()) - len(effects)
    # Handlers that ran beside the one that killed its process had no completion either
    print(f"\n{dict(killed)} kills, {20 * KILLS} messages, {len(effects)} keys: lost 0, ran again {again}")
    assert again <= 10 * KILLS
