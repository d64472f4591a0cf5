"""What a backlog costs: memory per pending message, and the server's time per trigger, take and ack, at each size.

    python benchmarks/backlog.py --sizes 10000,5000000 --json backlog.json

One topic, one slot, a small payload, on a server of its own without persistence. Messages are due at random times, half
of them before now; most triggers come to be due now, behind those, some at any time, anywhere among the others. Each
repetition takes out what it put in. Costs are CPU time of the server's process (`used_cpu_*` of INFO: reading, the
script, answering) and, of that, the script (`usec` of INFO commandstats), per message. Medians over the repetitions.
Five million messages need about 2 GB and five to fifteen minutes, most of which is putting them in.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import redis

from idemgate import Gate, Trigger
from idemgate.link.embedded import find_server
from idemgate.testing import Clock

HOUR = 3_600_000
CHUNK = 20_000
OPERATIONS = (
    "trigger",
    "trigger, 100 a call",
    "trigger at any time, 100 a call",
    "trigger of a pending key",
    "take and ack",
    "take and ack, 100 a call",
)


@dataclass(frozen=True)
class Cost:
    """Of one message, in microseconds of the server's time."""

    cpu: float
    script: float


@contextmanager
def server(core: int | None) -> Iterator[redis.Redis]:
    """A client of a new server, pinned to that core where the system can do that."""
    with tempfile.TemporaryDirectory() as home:
        path = f"{home}/redis.sock"
        words = ["--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no", "--dir", home]
        process = subprocess.Popen([find_server().path, *words], stdout=subprocess.DEVNULL)
        try:
            if core is not None and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(process.pid, {core})
            while not Path(path).exists():
                time.sleep(0.01)
            with redis.Redis(unix_socket_path=path, decode_responses=True) as client:
                yield client
        finally:
            process.kill()
            process.wait()


class Backlog:
    """One topic with pending messages, and the means to measure it."""

    def __init__(self, raw: redis.Redis, seed: int = 7) -> None:
        path = raw.connection_pool.connection_kwargs["path"]
        self.raw: Any = raw
        self.clock = Clock()
        self.gate = Gate(f"unix://{path}", namespace="bench", clock=self.clock, timeout="60s")
        self.topic = self.gate.topic("t", lease="1h")
        self.chance = random.Random(seed)
        self.size = 0
        self.due = array("Q")  # by number, ms

    def fill(self, size: int) -> float:
        """Bytes per message, once the replies that are remembered for copies of a request have expired."""
        before = self.raw.info("memory")["used_memory"]
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
        return float((self.raw.info("memory")["used_memory"] - before) / size)

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
        for key in self.raw.scan_iter("*:told?", count=1000):
            self.raw.unlink(key)

    def repetition(self, n: int) -> dict[str, Cost]:
        """Each operation `n` times; afterwards as many messages are pending as before, about as many of them due."""
        self.clock.advance(n / self.size * HOUR / 1000)
        single, many, timed, again = self.due_now(n), self.due_now(n), self.new(n), self.pending(n)
        works: list[Callable[[], object]] = [
            lambda: self.put(single, 1),
            lambda: self.put(many, 100),
            lambda: self.put(timed, 100),
            lambda: self.put(again, 1),
            lambda: self.done(n, 1),
            lambda: self.done(n, 100),
        ]
        costs = {name: self._measured(work, n) for name, work in zip(OPERATIONS, works, strict=True)}
        self.done(n, 100)  # what was put in three times was taken out twice
        self._forget_replies()
        return costs

    def put(self, triggers: list[Trigger], size: int) -> None:
        for start in range(0, len(triggers), size):
            self.topic.trigger_many(triggers[start : start + size])

    def done(self, n: int, size: int) -> None:
        for _ in range(0, n, size):
            taken = self.topic.take(size)
            assert len(taken) == size
            self.topic.ack(taken)

    def _measured(self, work: Callable[[], object], n: int) -> Cost:
        before = self._spent()
        work()
        cpu, script = (after - spent for after, spent in zip(self._spent(), before, strict=True))
        return Cost(cpu / n, script / n)

    def _spent(self) -> tuple[float, float]:
        info = self.raw.info("everything")
        script = sum(info.get(f"cmdstat_{name}", {}).get("usec", 0) for name in ("evalsha", "eval"))
        return (info["used_cpu_user"] + info["used_cpu_sys"]) * 1e6, float(script)


def measured(size: int, repetitions: int, n: int, core: int | None) -> dict[str, Any]:
    """All that is said of one size."""
    with server(core) as raw:
        backlog = Backlog(raw)
        began = time.monotonic()
        memory = backlog.fill(size)
        seconds = time.monotonic() - began
        backlog.repetition(n)  # warms up, and is not counted
        found = [backlog.repetition(n) for _ in range(repetitions)]
        stats = backlog.topic.stats()
        assert stats.pending == size, stats  # as many as were said, while it was measured
        backlog.gate.close()
    costs = {
        name: {part: median(getattr(costs[name], part) for costs in found) for part in ("cpu", "script")}
        for name in OPERATIONS
    }
    return {"size": size, "bytes_per_message": memory, "fill_seconds": seconds, "microseconds": costs}


def shown(results: list[dict[str, Any]]) -> str:
    """The table: a column a size, and how much the last costs of the first."""
    first, last = results[0], results[-1]
    lines = [f"{'us of the server per message':42}" + "".join(f"{one['size']:>14,}" for one in results) + "     ratio"]
    lines.append(f"{'bytes per message':42}" + "".join(f"{one['bytes_per_message']:14.0f}" for one in results))
    for part in ("cpu", "script"):
        for name in OPERATIONS:
            values = [one["microseconds"][name][part] for one in results]
            ratio = last["microseconds"][name][part] / first["microseconds"][name][part]
            lines.append(f"{f'{name} ({part})':42}" + "".join(f"{value:14.1f}" for value in values) + f"{ratio:10.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default="10000,100000", help="pending messages, smallest first")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("-n", type=int, default=1000, help="messages an operation, in each repetition; hundreds")
    parser.add_argument("--core", type=int, help="core to which the server is pinned")
    parser.add_argument("--json", type=Path, help="file for the results")
    given = parser.parse_args()
    sizes = [int(size) for size in given.sizes.split(",")]
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)  # now, and not after all was measured
    results = [measured(size, given.repetitions, given.n, given.core) for size in sizes]
    print(shown(results))
    if given.json:
        about = {"commit": _commit(), "date": datetime.now(UTC).date().isoformat(), "load": f"{os.getloadavg()[0]:.1f}"}
        given.json.write_text(
            json.dumps({**about, "repetitions": given.repetitions, "sizes": results}, indent=1) + "\n"
        )


def _commit() -> str:
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip() or "-"


if __name__ == "__main__":
    main()
