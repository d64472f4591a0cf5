"""Replicas that consume a Pub/Sub channel with a guarded callback are killed with SIGKILL while they run messages.

Pub/Sub delivers once at most, so the publisher here repeats its messages. Each additional run of
a message follows a lost lease. A completed message does not run again. No key is blocked beyond its lease.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from idemgate import Gate
from tests.waiting import wait_until

MESSAGES, KILLS, REPLICAS = 20, 8, 3
PROGRAM = """
import sys, time
import redis
from idemgate import Gate

url, namespace = sys.argv[1:]
gate = Gate(url, namespace=namespace)
effects = redis.Redis.from_url(url)

@gate.subscribe("prices-" + namespace)
@gate.once(key=lambda message: message.json()["id"], scope="prices", lease="500ms")
def on_price(message):
    effects.hincrby("runs-" + namespace, message.json()["id"], 1)
    time.sleep(0.03)

gate.run()
"""


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_killed_replicas_run_no_completed_message_again_and_block_no_key(
    url: str, namespace: str, raw: Any, sound: Callable[[Gate], None], drawn: random.Random
) -> None:
    channel = f"prices-{namespace}"
    identifiers = list[str]()

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", PROGRAM, url, namespace], stderr=subprocess.DEVNULL)

    def publish(names: list[str]) -> None:
        for name in names:
            raw.publish(channel, f'{{"id": "{name}"}}')

    replicas = [start() for _ in range(REPLICAS)]
    try:
        with Gate(url, namespace=namespace) as gate:
            wait_until(lambda: raw.pubsub_numsub(channel)[0][1] == REPLICAS)

            def unfinished() -> list[str]:
                return [name for name in identifiers if gate.inspect(name, scope="prices").state != "done"]

            # When a replica is killed in the middle, again and again, and the publisher repeats every message
            for turn in range(KILLS):
                identifiers += [f"{turn}-{number}" for number in range(MESSAGES)]
                publish(identifiers)
                time.sleep(drawn.uniform(0, 0.06))
                victim = replicas.pop(drawn.randrange(REPLICAS))
                victim.kill()
                victim.wait()
                replicas.append(start())
                wait_until(lambda: raw.pubsub_numsub(channel)[0][1] == REPLICAS)
            # Then every message is done once the leases of the killed replicas have ended
            time.sleep(0.6)
            publish(unfinished())
            wait_until(lambda: not unfinished())
            # And some were running when their replica was killed; each additional run followed a lost lease
            records = {name: gate.inspect(name, scope="prices") for name in identifiers}
            runs = {name.decode(): int(count) for name, count in raw.hgetall(f"runs-{namespace}").items()}
            assert any(record.taken_over for record in records.values())
            assert all(record.attempts == 1 + record.taken_over for record in records.values())
            assert all(runs[name] <= records[name].attempts for name in identifiers)
            # And a message that is done does not run again
            publish(identifiers)
            time.sleep(0.2)
            assert {name.decode(): int(n) for name, n in raw.hgetall(f"runs-{namespace}").items()} == runs
            print(f"{KILLS} kills, {sum(runs.values())} runs of {len(identifiers)} messages")
            sound(gate)
    finally:
        for replica in replicas:
            replica.kill()
            replica.wait()
        raw.delete(f"runs-{namespace}")
