"""The number of slots of a topic changes under load, and the command that changes it is killed again and again.

Each trigger is handled once, or again where its worker was killed, in the order of its group. No two live attempts of a
key or a group overlap.

A list in the store records when each attempt begins and ends, and when a worker is dead. Its places are one order of
all that happened anywhere.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from idemgate import Gate, Trigger
from tests.cluster import running, wait_for

PROGRAM = """
import json, os, time
import redis
from idemgate import Gate

gate = Gate({url!r}, namespace={namespace!r}, timeout="20s")
store = redis.Redis.from_url({url!r})
# What this program says is the number that the topic had at first.
work = gate.topic("work", window="50ms", merge="append", slots=2, lease="{lease}", backoff="10ms", max_attempts=1000)


@work.handler
def handle(delivery):
    facts = [os.getpid(), delivery.key, delivery.group, delivery.payload, delivery.token]
    store.rpush({log!r}, json.dumps(["begin", *facts]))
    time.sleep(0.002)
    store.rpush({log!r}, json.dumps(["end", *facts]))
"""
LAYOUTS = [8, 1, 4]
PRODUCERS = 3


@contextmanager
def _worker(folder: Path) -> Iterator[Any]:
    command = [sys.executable, "-m", "idemgate", "run", "program:gate", "--concurrency", "16"]
    here = os.getcwd()  # noqa: PTH109
    try:
        os.chdir(folder)
        with running(command) as process:
            os.chdir(here)
            yield process
    finally:
        os.chdir(here)


class Producer(threading.Thread):
    """Triggers keys of its own, some of them in groups, each trigger with a number and an event id; some twice."""

    def __init__(self, number: int, url: str, namespace: str, seed: int) -> None:
        super().__init__()
        self.number = number
        self.seed = seed
        self.gate = Gate(url, namespace=namespace, timeout="20s")
        self.over = threading.Event()
        self.accepted: list[str] = []
        self.grouped: dict[str, list[str]] = defaultdict(list)
        self.wrong: list[BaseException | str] = []

    def run(self) -> None:
        drawn = random.Random(f"{self.seed} {self.number}")
        try:
            with self.gate:
                for turn in range(1_000_000):
                    if self.over.is_set():
                        return
                    self._trigger(f"{self.number}-{turn:06}", drawn)
        except BaseException as error:
            self.wrong.append(error)

    def _trigger(self, name: str, drawn: random.Random) -> None:
        topic = self.gate.topic("work", window="50ms", merge="append", slots=2)
        batch = []
        for i in range(drawn.choice([1, 1, 5])):
            one = f"{name}-{i}"
            if drawn.random() < 0.3:
                group = f"group{self.number}.{drawn.randrange(4)}"
                self.grouped[group].append(one)
                batch.append(Trigger(one, one, group=group, event_id=one))
            else:
                batch.append(Trigger(f"key{self.number}.{drawn.randrange(30)}", one, event_id=one))
        receipts = topic.trigger_many(batch)
        self.wrong += [f"{one} was not accepted" for one in receipts if not one.accepted]
        self.accepted += [str(one.payload) for one in batch]
        if drawn.random() < 0.2 and any(one.status != "duplicate" for one in topic.trigger_many(batch)):
            self.wrong.append(f"{name} was accepted again")


async def _change(url: str, namespace: str, slots: int, drawn: random.Random) -> int:
    """`idemgate topic reshard`, killed at a moment of its own, and run again until it ends; how often it was killed."""
    for kills in range(100):
        command = ["-m", "idemgate", "topic", "reshard", "work", str(slots), "--url", url, "--namespace", namespace]
        process = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=asyncio.subprocess.PIPE)
        try:
            async with asyncio.timeout(0.25 + drawn.random() * 0.15 if kills < 3 else 60):
                out, _ = await process.communicate()
        except TimeoutError:
            process.kill()
            await process.wait()
            continue
        assert process.returncode == 0
        assert re.search(rf"^slots +{slots}$", out.decode(), re.MULTILINE)
        return kills
    pytest.fail("it never ended")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("killed", [False, True], ids=["the command is killed", "workers are killed, too"])
async def test_nothing_is_lost_or_done_twice(
    url: str,
    raw: redis.Redis,
    namespace: str,
    tmp_path: Path,
    killed: bool,
    sound: Any,
    drawn: random.Random,
    seed: int,
    record_fault: Any,
) -> None:
    log, lease = f"{namespace}:log", "4s" if killed else "30s"
    program = PROGRAM.format(url=url, namespace=namespace, log=log, lease=lease)
    (tmp_path / "program.py").write_text(program)
    producers = [Producer(number, url, namespace, seed) for number in range(PRODUCERS)]
    with ExitStack() as stack:
        # Given two workers and three producers
        for _ in range(2):
            stack.enter_context(_worker(tmp_path))
        for producer in producers:
            producer.start()
            stack.callback(producer.over.set)
        wait_for(lambda: raw.llen(log) > 200)
        # When the number of slots changes again and again, and the command dies on the way
        kills = 0
        for slots in LAYOUTS:
            if killed:
                with _worker(tmp_path) as third:
                    wait_for(lambda: raw.llen(log) > 200)
                    kills += await _change(url, namespace, slots, drawn)
                    third.send_signal(signal.SIGKILL)
                    third.wait()
                    raw.rpush(log, json.dumps(["dead", third.pid]))
            else:
                kills += await _change(url, namespace, slots, drawn)
        for producer in producers:
            producer.over.set()
        for producer in producers:
            await asyncio.to_thread(producer.join, 30)
        with Gate(url, namespace=namespace) as gate:
            (found,) = gate.stored_topics()
            topic = gate.topic("work")
            await asyncio.to_thread(wait_for, lambda: not (topic.stats().pending + topic.stats().in_flight), 60)
            stats = topic.stats()
            await asyncio.to_thread(sound, gate)
    # Then every accepted trigger was handled
    accepted = [one for producer in producers for one in producer.accepted]
    events = [json.loads(one) for one in raw.lrange(log, 0, -1)]  # type: ignore[union-attr]
    begun, ended = ([facts for what, *facts in events if what == word] for word in ("begin", "end"))
    print(f"{len(accepted)} triggers, {len(begun)} attempts, command killed {kills} times, {stats['lapsed']} lapsed")
    assert [producer.wrong for producer in producers] == [[]] * PRODUCERS
    assert found.slots == LAYOUTS[-1]
    assert (stats["accepted"], stats["acked_triggers"], stats.dead) == (len(accepted), len(accepted), 0)
    seen = [one for _, _, _, payload, _ in ended for one in payload]
    assert set(seen) == set(accepted)
    # And begun again no more often than leases were lost
    assert len(begun) <= stats["acked"] + stats["lapsed"]
    if not killed:
        assert stats["lapsed"] == 0
        assert sorted(seen) == sorted(accepted)
    # And live attempts of a key or a group never overlapped, and those of a group came in order
    _apart(events)
    _in_order(begun, producers)
    workers = len(LAYOUTS) * killed
    record_fault(
        "SIGKILL of the command that changes the number of slots, and of workers meanwhile",
        kills + workers,
        promises="P7 P10 P14",
        seed=seed,
        changes=len(LAYOUTS),
        triggers=len(accepted),
        lost=0,
    )


def _apart(events: list[Any]) -> None:
    """No two live attempts of a key, and no two of a group, at a time; tokens of a key rise."""
    live: dict[tuple[str, str], tuple[int, int]] = {}
    tokens: dict[str, int] = {}
    dead: set[int] = set()
    for what, pid, *facts in events:
        if what == "dead":
            dead.add(pid)
            live = {name: one for name, one in live.items() if one[0] != pid}
            continue
        key, group, _, token = facts
        names = {("key", key), ("group", group)} - {("group", "")}
        if what == "end":
            live = {name: one for name, one in live.items() if name not in names or one != (pid, token)}
            continue
        assert tokens.get(key, 0) < token, (key, token)
        tokens[key] = token
        if pid not in dead:  # what it had sent before it died may be heard afterwards; it does not live
            assert not live.keys() & names, (what, pid, facts, live)
            live |= dict.fromkeys(names, (pid, token))


def _in_order(begun: list[Any], producers: list[Producer]) -> None:
    """Every message of a group, in the order in which they were triggered; one again only before the next."""
    by_group: dict[str, list[str]] = defaultdict(list)
    for _, key, group, *_ in begun:
        if by_group[group][-1:] != [key]:
            by_group[group].append(key)
    for producer in producers:
        for group, keys in producer.grouped.items():
            assert by_group[group] == keys, group
