"""Groups under load: eight worker processes, 64 groups of which some are hot, and kill -9.

A list in Redis, outside of the workers, puts all events in one order. Workers append the begin and the end of each
handler, and each reply to a settlement. The test appends the death of each process. An attempt lives from its begin
to its end, or to the death of its process. Two attempts of one group overlap if one
begins while the other lives.

`IDEMGATE_KILLS` (see conftest.py) says how many processes are to be killed instead of the few of the suite.
"""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import monotonic, sleep
from typing import Any

import pytest

from idemgate import Gate, Trigger
from tests.waiting import wait_until

WORKERS, CONCURRENCY, GROUPS, SLOTS = 8, 2, 64, 2
LEASE = 4.0
"""Seconds of the server's time: a process that is not killed keeps its leases by a heartbeat every 0.7 s."""
WEIGHTS = [1 / rank for rank in range(1, GROUPS + 1)]
"""Zipf's law: of all messages the first group has a fifth, the last a three hundredth."""


def key_of(group: str, number: int) -> str:
    return f"{group}-{number:06}"


class Shop:
    """Eight workers of one topic, and what is triggered for them."""

    def __init__(self, zygote: Any, url: str, raw: Any, namespace: str, seed: int) -> None:
        self.zygote, self.raw, self.namespace = zygote, raw, namespace
        self.gate = Gate(url, namespace=namespace)
        self.topic = self.gate.topic("t", slots=SLOTS, lease=LEASE, backoff=0)
        self.order = {
            "scene": "serve", "url": url, "namespace": namespace, "slots": SLOTS, "lease": LEASE,
            "concurrency": CONCURRENCY, "linger": 0.004, "seed": seed,
        }  # fmt: skip
        self.lives = itertools.count()
        self.living: dict[int, int] = {}
        self.sent: Counter[str] = Counter()

    def trigger(self, groups: list[str]) -> None:
        """One message each, numbered within its group; its key sorts as its number."""
        found: list[Trigger] = []
        for group in groups:
            number = self.sent[group]
            found.append(Trigger(key_of(group, number), number, group=group))
            self.sent[group] += 1
        assert all(receipt.status == "scheduled" for receipt in self.topic.trigger_many(found))

    def start(self) -> None:
        life = next(self.lives)
        self.living[life] = self.zygote.start(**self.order, life=life)

    def kill(self, life: int) -> None:
        self.zygote.kill(self.living.pop(life))
        self.raw.rpush(f"{self.namespace}:events", json.dumps(["dead", life]))

    @property
    def told(self) -> int:
        return int(self.raw.llen(f"{self.namespace}:events"))

    def events(self) -> list[list[Any]]:
        return [json.loads(line) for line in self.raw.lrange(f"{self.namespace}:events", 0, -1)]

    def begun(self) -> list[str]:
        """The groups of all attempts so far."""
        return [event[2] for event in self.events() if event[0] == "begin"]

    def hold(self, some: str | int | None = None) -> str:
        """From now on no handler (of that group, of that worker) ends, until this key is deleted."""
        key = f"{self.namespace}:hold" + ("" if some is None else f":{some}")
        self.raw.set(key, 1)
        return key

    def until(self, happens: Any, within: float = 60) -> None:
        wait_until(happens, within, self.topic.stats)

    def done(self) -> bool:
        stats = self.topic.stats()
        return stats.pending + stats.in_flight == 0

    def close(self) -> None:
        for life in list(self.living):
            self.kill(life)
        self.gate.close()
        for key in self.raw.scan_iter(f"*{self.namespace}*", count=1000):
            self.raw.delete(key)


@pytest.fixture
def shop(zygote: Any, url: str, raw: Any, namespace: str, seed: int) -> Iterator[Shop]:
    made = Shop(zygote, url, raw, namespace, seed)
    yield made
    made.close()


@dataclass
class Attempt:
    """Of one message, by one process. Tokens of a slot rise in the order in which its messages were taken."""

    life: int
    group: str
    number: int
    token: int
    slot: int
    due: int
    attempt: int


@dataclass
class Record:
    """What happened, read from the list."""

    attempts: list[Attempt] = field(default_factory=list)
    overlaps: list[tuple[Attempt, Attempt]] = field(default_factory=list)
    taken: dict[int, set[tuple[str, int]]] = field(default_factory=lambda: defaultdict(set))
    """By process: the keys and tokens of what it took and has not begun. Messages of one take share a token."""
    takes: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    """By message: the tokens under which it was taken."""
    settled: dict[tuple[str, int], int] = field(default_factory=dict)
    """By key and token: when the server had ended that, or had it back, ms. Not if its process died before it knew."""
    dead: set[int] = field(default_factory=set)

    def by_group(self) -> dict[str, list[Attempt]]:
        found: dict[str, list[Attempt]] = defaultdict(list)
        for one in self.attempts:
            found[one.group].append(one)
        return found


def read(events: list[list[Any]]) -> Record:
    """Plays the record: which attempts live at each moment, by group."""
    record, alive = Record(), defaultdict[str, list[Attempt]](list)
    for what, life, *facts in events:
        if what == "took":
            for token, key in facts[0]:
                record.taken[life].add((key, token))
                record.takes[key].add(token)
        elif what == "begin":
            one = Attempt(life, *facts)
            record.taken[life].discard((key_of(one.group, one.number), one.token))
            record.attempts.append(one)
            # What a process had sent before it died may be heard afterwards; it does not live.
            if life not in record.dead:
                record.overlaps += [(other, one) for other in alive[one.group]]
                alive[one.group].append(one)
        elif what == "end":
            group, _, token = facts
            alive[group] = [one for one in alive[group] if one.token != token]
        elif what == "settled":
            record.settled |= dict.fromkeys(map(tuple, facts[1]), facts[0])
        else:
            record.dead.add(life)
            for group in alive:
                alive[group] = [one for one in alive[group] if one.life != life]
    return record


def check_order(record: Record, sent: Counter[str]) -> None:
    """Every message of a group, in the order of their numbers; one again only after the death of who had it."""
    for group, attempts in record.by_group().items():
        for before, after in itertools.pairwise(attempts):
            again = after.number == before.number and before.life in record.dead and after.token > before.token
            assert again or after.number == before.number + 1, (before, after)
        assert (attempts[0].number, attempts[-1].number) == (0, sent[group] - 1)
    assert record.by_group().keys() == sent.keys()


def check_fairness(record: Record) -> int:
    """A message whose group is free is taken before everything of its slot that came due later: a hot group is never
    served before an older message of another. How many were checked.

    A message is free when the one before it in its group has been settled, and when a worker that prefetched it has
    released it. Both are known only of processes that lived on.
    """
    checked = 0
    by_slot: dict[int, list[Attempt]] = defaultdict(list)
    for one in record.attempts:
        by_slot[one.slot].append(one)
    for attempts in by_slot.values():
        attempts.sort(key=lambda one: one.token)
    for attempts in record.by_group().values():
        for before, after in zip([None, *attempts], attempts, strict=False):
            key = key_of(after.group, after.number)
            in_the_way = [] if before is None else [(key_of(before.group, before.number), before.token)]
            in_the_way += [(key, token) for token in record.takes[key] if token < after.token]
            if after.attempt > 1 or not record.settled.keys() >= set(in_the_way):
                continue
            free = max([after.due, *(record.settled[one] for one in in_the_way)])
            ahead = [one for one in _taken_between(by_slot[after.slot], free, after.token) if one.attempt == 1]
            unfair = [one for one in ahead if one.due > after.due]
            assert not unfair, (after, free, unfair)
            checked += 1
    return checked


def _taken_between(attempts: list[Attempt], ms: int, token: int) -> list[Attempt]:
    """Tokens are microseconds of the server's time, or a little more where several were taken at once."""
    found = []
    for one in reversed(attempts):
        if one.token <= (ms + 1) * 1000:
            break
        if one.token < token:
            found.append(one)
    return found


@pytest.mark.timeout(0)
def test_live_attempts_of_a_group_never_overlap_however_many_workers_die(
    shop: Shop, kills: int, drawn: random.Random, seed: int, sound: Any, record_fault: Any
) -> None:
    groups, wanted = [f"g{number:02}" for number in range(GROUPS)], kills or 6
    # Given eight worker processes, one of which has given back what it held ahead of its handlers
    slow = shop.hold(0)
    shop.trigger(groups)
    shop.start()
    shop.until(lambda: len(shop.begun()) == CONCURRENCY)
    for _ in range(WORKERS - 1):
        shop.start()
    shop.trigger(groups)
    shop.until(lambda: shop.topic.stats()["returned"])
    shop.raw.delete(slow)
    # When messages of 64 groups come in, most of them of few groups, and again and again one of the workers is killed
    for _ in range(wanted):
        shop.trigger(drawn.choices(groups, WEIGHTS, k=drawn.randint(40, 120)))
        seen = shop.told + drawn.randint(1, 200)
        end = monotonic() + 2  # where most groups wait for leases of the dead, there is less to tell
        while shop.told < seen and monotonic() < end:
            sleep(0.002)
        shop.kill(drawn.choice(list(shop.living)))
        shop.start()
    shop.trigger(groups)
    shop.until(shop.done, 60 + wanted)
    # Then no two live attempts of a group overlapped
    record = read(shop.events())
    assert record.overlaps == []
    # And everything was handled in the order of its group, and again only after the death of who had it
    check_order(record, shop.sent)
    # And nothing that came due later was taken before what was free to go
    checked = check_fairness(record)
    assert checked > len(record.attempts) / 2
    # And nothing was lost
    stats = shop.topic.stats()
    messages = sum(shop.sent.values())
    assert (stats["accepted"], stats["acked"], stats["acked_triggers"], stats.dead) == (*[messages] * 3, 0)
    assert stats["taken"] == stats["acked"] + stats["lapsed"] + stats["returned"]
    assert len(record.attempts) - messages <= stats["lapsed"]
    # And nothing lapsed of what the living had: each thing that they took they began, or gave back
    assert sum(len(left) for life, left in record.taken.items() if life not in record.dead) <= stats["returned"]
    # And the store is sound
    sound(shop.gate)
    record_fault(
        f"SIGKILL of one of {WORKERS} workers on {GROUPS} groups",
        len(record.dead),
        promises="P3 P7 P10",
        seed=seed,
        messages=messages,
        attempts=len(record.attempts),
        overlaps=0,
        out_of_order=0,
        lost=0,
    )
    if kills:
        hot = max(shop.sent.values()) / messages
        print(f"\n{len(record.dead)} kills of {WORKERS} workers, {messages} messages of {GROUPS} groups, {hot:.0%} of")
        print(f"one; {len(record.attempts)} attempts, {stats['lapsed']} lapses: overlaps of live attempts 0, out of")
        print(f"order 0, taken before an older one that was free 0 (of {checked} checked), lost 0")


def test_no_worker_is_idle_while_another_group_has_work(shop: Shop) -> None:
    # Given a thousand messages of one group, and only then a few of others
    shop.trigger(["hot"] * 1000)
    others = [f"g{number}" for number in range(40)]
    shop.trigger(others)
    # When eight workers start, whose handlers do not end for now
    everything, hot = shop.hold(), shop.hold("hot")
    for _ in range(WORKERS):
        shop.start()
    # Then all of their places are taken, by as many groups
    shop.until(lambda: len(shop.begun()) == WORKERS * CONCURRENCY)
    running = Counter(shop.begun())
    assert len(running) == WORKERS * CONCURRENCY
    assert running["hot"] == 1
    # And when all but those of the hot group end, all others are done while it is still at its first
    shop.raw.delete(everything)
    shop.until(lambda: shop.topic.stats()["acked"] == len(others))
    assert Counter(shop.begun()) == {"hot": 1} | dict.fromkeys(others, 1)
    # And then it goes on
    shop.raw.delete(hot)
    shop.until(lambda: shop.topic.stats()["acked"] > len(others) + 10)
    assert read(shop.events()).overlaps == []
