"""Consumers of a quorum queue with a delivery limit, killed with SIGKILL while they run a message.

Each kill costs the message one redelivery, and no message is lost. `IDEMGATE_KILLS` says how many consumers to kill
with each client, instead of two.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import pika
import pytest

KILLS = 2
"""Consumers killed on one message, one after the other."""
RUNS = max(1, int(os.environ.get("IDEMGATE_KILLS", "0")) // KILLS)
MESSAGES = 6
LIMIT = 3
LEASE = "3s"


class Consumer:
    """A process of consumer.py and the lines that it printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[list[str]] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.split())

    def ids(self, event: str) -> set[str]:
        return {line[1] for line in self.lines if line[0] == event}

    def is_ready(self) -> bool:
        return ["ready"] in self.lines

    def redeliveries(self) -> dict[str, int]:
        return {line[1]: int(line[2]) for line in self.lines if line[0] == "started"}

    def kill(self) -> None:
        self.process.kill()
        self._close()

    def finish(self) -> None:
        """Let it settle its messages and exit."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(60) == 0
        self._close()

    def _close(self) -> None:
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


@pytest.fixture
def dead(queue: Any, make_queue: Any) -> Any:
    """Make the queue a quorum queue with a delivery limit; return the queue of its dead letters."""
    dead_letters = make_queue()
    queue.channel.queue_delete(queue.name)
    arguments = {
        "x-queue-type": "quorum", "x-delivery-limit": LIMIT,
        "x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead_letters.name,
    }  # fmt: skip
    queue.channel.queue_declare(queue.name, durable=True, arguments=arguments)
    return dead_letters


@pytest.mark.timeout(90 * RUNS + 60)
@pytest.mark.parametrize("client", ["aio", "blocking"])
@pytest.mark.slow
async def test_each_killed_consumer_costs_one_redelivery(
    client: str, store: str, namespace: str, broker: Any, queue: Any, dead: Any, python: Any
) -> None:
    consumers: list[Consumer] = []

    def start(hang: str) -> Consumer:
        patient = broker.url.replace("heartbeat=5", "heartbeat=600")  # a busy machine must not cost a redelivery
        arguments = ["consumer.py", store, namespace, patient, queue.name, client, LEASE, hang]
        consumers.append(Consumer(python(*arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)))
        return consumers[-1]

    async def until(fact: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not fact():
                assert dead.all() == [], "the broker dropped a message at the delivery limit"
                assert consumers[-1].process.poll() is None, "the consumer ended"
                await asyncio.sleep(0.05)

    async def run_once(run: int) -> tuple[int, int]:
        """Kill the consumers of one message; return how many held it, and the most redeliveries of any message."""
        # Given messages in a quorum queue
        victim = f"{run}-victim"
        ids = {victim, *(f"{run}-{n}" for n in range(MESSAGES - 1))}
        for message_id in sorted(ids, reverse=True):
            properties = pika.BasicProperties(message_id=message_id, delivery_mode=2)
            queue.channel.basic_publish("", queue.name, b"x", properties)
        # When consumers are killed while they run one of them, each with a successor that waits for messages
        first = len(consumers)
        start(hang=victim)
        for n in range(KILLS):
            await until(lambda: victim in consumers[-1].ids("started"))
            owner = consumers[-1]
            start(hang=victim if n < KILLS - 1 else "none")
            await until(lambda: consumers[-1].is_ready())
            owner.kill()
        # Then the last one runs it when the lease lapses
        await until(lambda: ids == set[str]().union(*(one.ids("handled") for one in consumers[first:])))
        await until(lambda: not queue.channel.queue_declare(queue.name, passive=True).method.message_count)
        await asyncio.to_thread(consumers[-1].finish)
        # And each kill cost one redelivery
        assert consumers[-1].redeliveries()[victim] == KILLS
        # And at most duplicates are left: pika requeues the messages that it had not passed on when it stopped
        assert dead.all() == []
        assert {properties.message_id for _, properties, _ in queue.all()} <= ids - {victim}
        held = sum(victim in one.ids("held") for one in consumers[first:])
        return held, max(n for one in consumers[first:] for n in one.redeliveries().values())

    began = time.monotonic()
    try:
        outcomes = [await run_once(run) for run in range(RUNS)]
    finally:
        for one in consumers:
            one.kill()
    held, worst = sum(held for held, _ in outcomes), max(worst for _, worst in outcomes)
    assert worst <= LIMIT
    print(
        f"\n{client}: {RUNS} runs, {RUNS * KILLS} kills, {held} holds after one, "
        f"{RUNS * MESSAGES} messages, lost 0, most redeliveries of one {worst} of {LIMIT}, "
        f"{time.monotonic() - began:.0f} s"
    )
