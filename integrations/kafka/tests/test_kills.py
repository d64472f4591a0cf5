"""kill -9 of consumers: between the effect and its completion, and between the completion and the commit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import redis

from idemgate import Gate
from integrations.kafka.tests.kafka_topics import LIBRARIES, Topics
from tests.resilience.verdict import read_events
from tests.waiting import eventually

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.slow


def start(order: dict[str, Any]) -> subprocess.Popen[str]:
    """Start a consumer in a process."""
    words = [sys.executable, "-m", "integrations.kafka.tests.killed_consumer", json.dumps(order)]
    return subprocess.Popen(words, text=True, cwd=ROOT, stdin=subprocess.PIPE)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("die", "runs"), [("commit", 1), ("effect", 2)])
async def test_a_record_of_a_killed_consumer_runs_again_unless_it_was_completed(
    gate: Gate, store: str, topics: Topics, library: str, die: str, runs: int
) -> None:
    order = {
        "store": store, "reports": store, "namespace": gate.namespace, "settings": topics.settings(library),
        "topics": topics.name, "kind": "sync" if library == "confluent" else "async", "seed": 0, "fails": 0,
        "options": {
            "key": "{message.value}", "scope": "killed", "lease": "1s", "backoff": 0, "dead_topic": topics.dead,
        },
    }  # fmt: skip
    await topics.send(b"one")
    # When a consumer is killed after the effect, or after the completion and before the commit
    doomed = start({**order, "die": die})
    try:
        await eventually(lambda: doomed.poll() is not None)
    finally:
        doomed.kill()
        doomed.communicate()
    assert (doomed.returncode, await topics.lag()) == (-9, 1)
    # Then the next one commits the record, and runs it only if its effect was not completed
    other = start({**order, "die": ""})
    try:

        async def is_settled() -> bool:
            return await topics.lag() == 0

        await eventually(is_settled)
        other.communicate(timeout=60)
        assert other.returncode == 0
    finally:
        other.kill()
        other.communicate()
    with redis.Redis.from_url(store) as raw:
        events = read_events(raw, f"reports-of-{gate.namespace}")
        assert Counter(facts[0] for kind, *facts in events if kind == "effect") == {"one": runs}
