"""What a backlog costs: memory per pending message, and the server's time per trigger, take and ack, at each size; and
the same of the bare commands that write as much.

One topic, one slot, a small payload. Messages are due at random times, half of them before now; most triggers come to
be due now, behind those, some at any time, anywhere among the others. Each repetition takes out what it put in.
"""

from __future__ import annotations

import random
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count, islice
from typing import Any

from benchmarks.measuring import Row
from benchmarks.plan import Plan
from benchmarks.server import port_of, spent, started, used_memory
from idemgate import Gate, Trigger
from idemgate.testing import Clock

__all__ = ["SIZES", "Backlog", "Bare", "run"]

SIZES = (10_000, 100_000, 1_000_000, 5_000_000)
HOUR = 3_600_000
CHUNK = 20_000
Works = dict[str, Callable[[], object]]


def run(plan: Plan) -> list[Row]:
    """The rows: `who` is the size, `server_us` of one message; and bytes of one."""
    rows: list[Row] = []
    for size in SIZES:
        for kind, before in ((Backlog, ""), (Bare, "bare: ")):
            with started() as server, closing(kind(server)) as backlog:
                found = {"bytes": {"bytes": [backlog.fill(plan.size(size))]}} | _costs(backlog, plan)
            rows += ({"who": str(plan.size(size)), "step": before + step, **row} for step, row in found.items())
            print(".", end="", flush=True)
    print()
    return rows


def _costs(backlog: Backlog | Bare, plan: Plan) -> dict[str, Row]:
    n, rows = plan.size(1_000), dict[str, Row]()
    for repetition in range(-1, plan.repetitions):  # the first warms up, and is not counted
        for name, work in backlog.works(n).items():
            before = spent(backlog.raw)
            work()
            after, row = spent(backlog.raw), rows.setdefault(name, defaultdict(list))
            if repetition >= 0:
                row["server_us"].append((after.cpu - before.cpu) / n * 1e6)
                row["script_us"].append((after.scripts - before.scripts) / n * 1e6)
        backlog.tidy(n)
    return rows


class Backlog:
    """One topic with pending messages, and the means to measure it."""

    def __init__(self, raw: Any) -> None:
        self.clock, self.chance = Clock(), random.Random(7)
        self.size = 0
        self.due = array("Q")  # by number, ms
        self.at(raw)

    def at(self, raw: Any) -> None:
        """The server of the topic: another one may have loaded what this one saved."""
        self.raw = raw
        url = f"redis://127.0.0.1:{port_of(raw)}/0"
        self.gate = Gate(url, namespace="bench", clock=self.clock, timeout="60s")
        self.topic = self.gate.topic("t", lease="1h")

    def close(self) -> None:
        self.gate.close()

    def fill(self, size: int) -> float:
        """Bytes per message, once the replies that are remembered for copies of a request have expired."""
        before = used_memory(self.raw)
        while self.size < size:
            triggers = self.new(min(CHUNK, size - self.size))
            self.topic.trigger_many(triggers)
            self.size += len(triggers)
        # Once more: Redis enlarges its hash tables step by step while they are used, and is done with that then.
        for start in range(0, size, CHUNK):
            numbers = range(start, min(start + CHUNK, size))
            self.topic.trigger_many([Trigger(f"message-{number}", {"n": number}) for number in numbers])
        self.clock.advance("30m")
        self._forget_replies()
        return float((used_memory(self.raw) - before) / size)

    def new(self, n: int) -> list[Trigger]:
        """Triggers of keys of their own, each due at some moment of the coming hour."""
        delays = [self.chance.randrange(HOUR) for _ in range(n)]
        first = len(self.due)
        self.due.extend(self.now + delay for delay in delays)
        return [
            Trigger(f"message-{number}", {"n": number}, delay=delay / 1000)
            for number, delay in enumerate(delays, first)
        ]

    def due_now(self, n: int) -> list[Trigger]:
        """Triggers of keys of their own, without a time: behind everything that is due, as with a window."""
        first = len(self.due)
        self.due.extend([self.now] * n)
        return [Trigger(f"message-{number}", {"n": number}) for number in range(first, first + n)]

    def pending(self, n: int) -> list[Trigger]:
        """Triggers of keys that are pending and not due, anywhere in the backlog."""
        found: list[Trigger] = []
        while len(found) < n:
            number = self.chance.randrange(len(self.due))
            if self.due[number] > self.now:
                found.append(Trigger(f"message-{number}", {"n": 0}))
        return found

    @property
    def now(self) -> int:
        return self.clock.microseconds() // 1000

    def _forget_replies(self) -> None:
        # They expire by themselves, two minutes of real time later.
        for key in self.raw.scan_iter("*:replies?", count=1000):
            self.raw.unlink(key)

    def works(self, n: int) -> Works:
        """Each for `n` messages; after them and `tidy` as many are pending as before, about as many of them due."""
        self.clock.advance(n / self.size * HOUR / 1000)
        single, many, timed, again = self.due_now(n), self.due_now(n), self.new(n), self.pending(n)
        return {
            "trigger": lambda: self.put(single, 1),
            "trigger, 100 a call": lambda: self.put(many, 100),
            "trigger at any time, 100 a call": lambda: self.put(timed, 100),
            "trigger of a pending key": lambda: self.put(again, 1),
            "take and ack": lambda: self.done(n, 1),
            "take and ack, 100 a call": lambda: self.done(n, 100),
        }

    def tidy(self, n: int) -> None:
        """What was put in three times was taken out twice."""
        self.done(n, 100)
        self._forget_replies()
        assert self.topic.stats().pending == self.size

    def put(self, triggers: list[Trigger], size: int) -> None:
        for start in range(0, len(triggers), size):
            self.topic.trigger_many(triggers[start : start + size])

    def done(self, n: int, size: int) -> None:
        for _ in range(0, n, size):
            taken = self.topic.take(size)
            assert len(taken) == size
            self.topic.ack(taken)


class Bare:
    """The same in a sorted set and a hash, by bare commands: no lease, no merging."""

    def __init__(self, raw: Any) -> None:
        self.chance, self.numbers = random.Random(7), count()
        self.at(raw)

    def at(self, raw: Any) -> None:
        """As that of `Backlog`."""
        self.raw = raw

    def close(self) -> None:
        """It has nothing of its own."""

    def fill(self, size: int) -> float:
        before = used_memory(self.raw)
        for start in range(0, size, CHUNK):
            n = min(CHUNK, size - start)
            self._put({key: self.chance.random() for key in self._keys(n)})
        return float((used_memory(self.raw) - before) / size)

    def _keys(self, n: int) -> Iterator[str]:
        return (f"message-{number}" for number in islice(self.numbers, n))

    def _put(self, scores: dict[str, float]) -> None:
        with self.raw.pipeline(transaction=False) as pipeline:
            packed = dict.fromkeys(scores, '{"n": 4711}')
            pipeline.zadd("due", scores, nx=True).hset("what", mapping=packed).execute()

    def works(self, n: int) -> Works:
        return {
            "trigger": lambda: self.put(n, 1),
            "trigger, 100 a call": lambda: self.put(n, 100),
            "take and ack": lambda: self.done(n, 1),
            "take and ack, 100 a call": lambda: self.done(n, 100),
        }

    def tidy(self, n: int) -> None:
        assert self.raw.zcard("due") == self.raw.hlen("what")

    def put(self, n: int, size: int) -> None:
        for _ in range(0, n, size):
            self._put(dict.fromkeys(self._keys(size), 0.5))  # behind the half that is due

    def done(self, n: int, size: int) -> None:
        for _ in range(0, n, size):
            keys = self.raw.zrange("due", 0, size - 1)
            self.raw.hmget("what", keys)
            with self.raw.pipeline(transaction=False) as pipeline:
                pipeline.zrem("due", *keys).hdel("what", *keys).execute()
