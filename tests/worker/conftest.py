"""What tests of long-running things wait with: for something to happen, never for time to pass."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from idemgate import Gate
from tests import waiting


@pytest.fixture
def eventually() -> Callable[..., Any]:
    return waiting.eventually


@pytest.fixture
def listening(raw: Any, eventually: Any) -> Callable[..., Any]:
    """`await listening(topic)`: returns once a worker has subscribed to the hints of each slot of the topic."""

    async def wait(topic: Any) -> None:
        calls = await topic.aio.open()
        channels = [calls.keys(slot)[0] for slot in range(calls.policy.slots)]
        await eventually(lambda: all(number for _, number in raw.pubsub_numsub(*channels)))

    return wait


@pytest.fixture
async def live(entry: str, url: str, namespace: str, sound: Callable[[Gate], None]) -> AsyncIterator[Gate]:
    """A gate on the server's own clock: for heartbeats and sleeping, which are about real time. Audited at the end."""
    made = Gate(entry, namespace=namespace)
    yield made
    await made.aio.close()
    made.close()
    with Gate(url, namespace=namespace) as admin:  # not every role may audit
        sound(admin)


@pytest.fixture
async def replicas(entry: str, namespace: str) -> AsyncIterator[Callable[..., list[Gate]]]:
    """Several gates of one namespace, as several processes would have."""
    made: list[Gate] = []

    def make(n: int, at: str = entry) -> list[Gate]:
        made.extend(Gate(at, namespace=namespace) for _ in range(n))
        return made

    yield make
    for gate in made:
        await gate.aio.close()
        gate.close()


KILLED = """
import sys, time
from idemgate import Gate

url, namespace = sys.argv[1:]
gate = Gate(url, namespace=namespace)

@gate.{register}
@gate.once(key="{{{key}}}", scope="killed", lease="400ms")
def handle(entry):
    print("started", flush=True)
    time.sleep(60)

gate.run()
"""


@pytest.fixture
def run_and_kill(url: str, namespace: str) -> Callable[[str, str], None]:
    """`run_and_kill(register, key)`: kill a process while its guarded callback runs for an entry."""

    def run(register: str, key: str) -> None:
        command = [sys.executable, "-c", KILLED.format(register=register, key=key), url, namespace]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == "started\n"
            finally:
                process.kill()

    return run


@pytest.fixture
def one(replicas: Callable[..., list[Gate]]) -> Gate:
    """One such gate."""
    return replicas(1)[0]
