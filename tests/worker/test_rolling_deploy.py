"""Releases of a program that declare other policies for a topic, each in processes of its own, under load."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from idemgate import Gate
from tests.waiting import wait_until

PROGRAM = """
import sys
import redis
from idemgate import Gate
from idemgate.worker import poller

url, namespace, name, window, backoff, revision, kind = sys.argv[1:]
poller.FOLLOW = 0.2  # seconds between two looks at the stored policy
gate, client = Gate(url, namespace=namespace), redis.Redis.from_url(url)
topic = gate.topic("t", window=window, backoff=backoff, merge="append", slots=2, lease="120s", revision=int(revision))

def work(delivery):
    # Some triggers fail once. The effect of the others is a number in a list.
    failing = [number for number in delivery.payload if number % 9 == 0]
    if failing and client.sadd(f"{namespace}-failed", *failing):
        raise ValueError("once")
    client.rpush(f"{namespace}-{name}", *delivery.payload)

async def work_async(delivery):
    work(delivery)

topic.handler(work if kind == "blocking" else work_async)
gate.run(grace="60s")
"""
RELEASES = {"old": ("300ms", "100ms", "0"), "new": ("100ms", "300ms", "1")}


class Process:
    """A process of a release. Its log is in a file."""

    def __init__(self, url: str, namespace: str, release: str, number: int, kind: str, folder: Path) -> None:
        self.name = f"{release}{number}"
        self.log = folder / self.name
        self.key = f"{namespace}-{self.name}"
        words = [url, namespace, self.name, *RELEASES[release], kind]
        with self.log.open("w") as log:
            self.running = subprocess.Popen([sys.executable, "-c", PROGRAM, *words], stderr=log)

    @property
    def adoptions(self) -> int:
        return self.log.read_text().count("topic.policy_adopted topic='t' revision=1 declared=0")

    def stop(self) -> None:
        assert self.running.poll() is None, self.log.read_text()
        self.running.send_signal(signal.SIGTERM)
        assert self.running.wait(60) == 0, self.log.read_text()


@pytest.fixture
def start(url: str, namespace: str, tmp_path: Path, raw: Any) -> Iterator[Callable[..., Process]]:
    """`start("old", "blocking")`: starts a process of this release."""
    made: list[Process] = []

    def start(release: str, kind: str) -> Process:
        made.append(one := Process(url, namespace, release, len(made), kind, tmp_path))
        return one

    yield start
    for one in made:
        one.running.kill()
        one.running.wait()
        raw.delete(one.key)
    raw.delete(f"{namespace}-failed")


@contextmanager
def load(topic: Any) -> Iterator[list[int]]:
    """Trigger three numbers every 20 ms. The list is what was triggered."""
    sent, stopped = list[int](), threading.Event()

    def trigger() -> None:
        while not stopped.wait(0.02):
            numbers = range(len(sent), len(sent) + 3)
            topic.trigger_many([(number % 7, number) for number in numbers])
            sent.extend(numbers)

    thread = threading.Thread(target=trigger)
    thread.start()
    try:
        yield sent
    finally:
        stopped.set()
        thread.join()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["blocking", "awaiting"])
def test_processes_of_two_revisions_are_restarted_forward_and_back(
    live: Gate, raw: Any, start: Callable[..., Process], kind: str
) -> None:
    def working(*processes: Process) -> None:
        """Wait until each of them handles what was triggered from now on."""
        before = [raw.llen(one.key) for one in processes]
        wait_until(lambda: all(raw.llen(one.key) > n for one, n in zip(processes, before, strict=True)))

    # Given a process of the old release, under load
    processes = [start("old", kind)]
    wait_until(live.stored_topics)
    topic = live.topic("t")
    with load(topic) as sent:
        working(processes[0])
        for release in ("new", "old", "new", "old"):
            # When a process of the other one starts, then both work
            former, latter = processes[-1], start(release, kind)
            processes.append(latter)
            working(former, latter)
            # And the old one adopts the policy of the new one
            old = latter if release == "old" else former
            wait_until(lambda old=old: old.adoptions == 1)
            working(former, latter)
            former.stop()
        working(processes[-1])
    # Then every trigger is handled once
    wait_until(lambda: sum(raw.llen(one.key) for one in processes) >= len(sent))
    processes[-1].stop()
    assert sorted(int(n) for one in processes for n in raw.lrange(one.key, 0, -1)) == sent
    # And each old process logged the adoption once, and the policy of the new release holds
    assert [one.adoptions for one in processes] == [1, 0, 1, 0, 1]
    (stored,) = live.stored_topics()
    assert (stored.policy.window, stored.policy.revision) == (100, 1)
    assert topic.stats().dead == 0
