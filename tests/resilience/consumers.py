"""The frame of a soak of guarded consumers: a steady load with copies, while consumers and connections fail at random.

Consumers are processes that report to the list `reports-of-NAMESPACE` until their standard input is closed:

- ["effect", ID, TOKEN, PID]: the effect of one run
- ["ended", ID, TOKEN, PID, OUTCOME]: the outcome of the run's verdict, "not stored" if its completion may not have been
- ["waited", ID, TIME]: a delivery of a message that is in progress elsewhere, and its time in seconds
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from time import monotonic, sleep
from typing import Any, ClassVar

import redis

from idemgate import Gate
from idemgate.testing import Proxy, audit
from idemgate.types import milliseconds
from tests.resilience.judge import Judge
from tests.resilience.plan import Fault, injecting, plan
from tests.resilience.verdict import find_growth, read_events
from tests.waiting import wait_until

__all__ = ["LEASE", "MAX_ATTEMPTS", "SCOPE", "SECONDS", "STALLED", "ConsumerSoak", "find_hot_loops"]

ROOT = Path(__file__).parents[2]
SECONDS = milliseconds(os.environ.get("IDEMGATE_SOAK", "10s"), "IDEMGATE_SOAK") / 1000
LEASE = 2.0
MAX_ATTEMPTS = 15
SCOPE = "soak"
POISON, COPIES = 0.02, 0.2
BACKLOG = 100
"""The number of waiting messages from which the producer waits."""
WAITS = 20
"""The most deliveries of a key in progress elsewhere within one lease, for each message. A hot loop makes hundreds."""
STALLED, DRAIN = 60, 300
"""Seconds without a settled message, and in all, after which the rest is not expected to settle."""
START = 300
"""Seconds until all consumers have started. The load and the faults begin then."""
SCRIPT = b"EVALSHA"
WIRE: dict[str, Callable[[Proxy], object]] = {
    "cut a reply": lambda proxy: proxy.cut_reply(SCRIPT),
    "reset": lambda proxy: proxy.reset_reply(SCRIPT),
    "drop a request": lambda proxy: proxy.drop_request(SCRIPT),
    "double a request": lambda proxy: proxy.double_request(SCRIPT),
    "swallow a request": lambda proxy: proxy.swallow_request(SCRIPT),
    "hold a request": lambda proxy: proxy.hold_request(SCRIPT),
    "release": lambda proxy: proxy.release(),
    "cut all": lambda proxy: proxy.cut_all(),
}
GROWTH = {"rss": (0.1, 6e6), "descriptors": (0.0, 12), "threads": (0.0, 12)}
"""The share of the first third's median, and the amount on top, by which the last third's may be larger."""


def find_hot_loops(events: Iterable[list[Any]], sent: Mapping[str, int]) -> list[tuple[str, int, int]]:
    """Return each key with too many deliveries in progress elsewhere within one lease, and the number of its messages.

    Not those of its whole life: on a busy machine one key may be in progress for a minute.
    """
    moments: dict[str, list[float]] = defaultdict(list)
    for kind, *facts in events:
        if kind == "waited":
            moments[facts[0]].append(facts[1])
    found: list[tuple[str, int, int]] = []
    for key, times in moments.items():
        times.sort()
        most = max(bisect_right(times, each + LEASE) - place for place, each in enumerate(times))
        if most > WAITS * sent[key]:
            found.append((key, most, sent[key]))
    return found


class ConsumerSoak(ABC):
    """The consumers, the producer, the proxies, and the faults that happen to them.

    Attributes:
        program: the module that is a consumer.
        kinds: the kind of each consumer, and whether it is steady: it may be stopped and is not killed.
        broker_faults: what happens to the broker, or to the proxy in front of it.
        pauses: the mean seconds between two faults of the store's wire, of the broker's, and of the processes.
    """

    program: ClassVar[str]
    kinds: ClassVar[Sequence[tuple[str, bool]]]
    broker_faults: ClassVar[Mapping[str, Callable[[Any], object]]]
    pauses: ClassVar[tuple[float, float, float]] = (1.5, 3.0, 8.0)

    def __init__(self, store: str, namespace: str, broker: Any, seed: int) -> None:
        self.store, self.namespace, self.broker, self.seed = store, namespace, broker, seed
        self.raw = redis.Redis.from_url(store)
        self.redis = Proxy(store, remember=False)
        self.gate = Gate(store, namespace=namespace)
        self.name = f"reports-of-{namespace}"
        self.consumers: dict[subprocess.Popen[str], tuple[str, bool]] = {}
        self.started = self.drawn = 0
        self.sent, self.dead, self.counted = Counter[str](), Counter[str](), Counter[str]()
        self.over = threading.Event()

    def order(self, kind: str) -> Mapping[str, Any]:
        """Return what the order of a consumer has beside its store; see `consumer_process.py`."""
        return {}

    def start_process(self, kind: str, seed: str) -> subprocess.Popen[str]:
        """Start a consumer."""
        order = {
            "store": self.redis.url, "reports": self.store, "namespace": self.namespace, "seed": seed, "fails": 0.03,
            "die": "", **self.order(kind),
        }  # fmt: skip
        words = [sys.executable, "-m", self.program, json.dumps(order)]
        return subprocess.Popen(words, text=True, cwd=ROOT, stdin=subprocess.PIPE)

    @abstractmethod
    def send(self, bodies: Sequence[str]) -> Iterable[str]:
        """Produce messages. Return what the broker has, copies included."""

    @abstractmethod
    def count_waiting(self) -> int:
        """Return how many messages wait for a consumer."""

    @abstractmethod
    def count_unsettled(self) -> int:
        """Return how many messages are not settled."""

    @abstractmethod
    def list_dead_letters(self) -> Iterable[str]:
        """Return the bodies of all dead letters, at the end."""

    def heal_broker(self) -> None:
        """Undo the faults of the broker."""
        self.broker.heal()
        self.broker.delay = 0.0

    def has_reason(self, key: str, record: Any) -> bool:
        """Return True if a message may be a dead letter."""
        return bool(record.attempts >= MAX_ATTEMPTS)

    def count_left(self, dead: Collection[str]) -> int:
        """Return how many messages are neither done nor dead letters, nor ended without a stored completion."""
        left = {key for key in self.sent if key not in dead and self.gate.inspect(key, scope=SCOPE).state != "done"}
        if left:
            events = read_events(self.raw, self.name)
            left -= {facts[0] for kind, *facts in events if kind == "ended" and facts[-1] == "not stored"}
        return len(left)

    def run(self, seconds: float) -> None:
        """Produce messages for so many seconds, while consumers and connections fail. Then wait for the end of all."""
        wire, broker, processes = self.pauses
        lanes = {
            "wire": (wire, (*WIRE, "black hole")),
            "broker": (broker, (*self.broker_faults,)),
            "processes": (processes, ("kill", "kill", "stop")),
        }
        faults = plan(self.seed, seconds, lanes)
        print(f"\nseed {self.seed}: {sum(map(len, faults.values()))} faults within {seconds:g} s")
        for kind, steady in self.kinds:
            self._start(kind, steady)
        wait_until(lambda: all(map(self._has_started, self.consumers)), START)  # on a busy machine that takes a minute
        begin = monotonic()
        with injecting(faults, self._inject, self.over) as errors:
            self._send_until(lambda: monotonic() > begin + seconds or bool(errors))
        self._drain()

    def check(self) -> dict[str, int]:
        """Judge what the consumers reported. Print and return the figures."""
        seed, sent = self.seed, self.sent
        # Each message had its effect or is a dead letter
        # And no effect follows the recorded completion, and each effect before it has a documented reason
        events = [*read_events(self.raw, self.name)]
        waits = Counter(key for kind, key, *_ in events if kind == "waited")
        hot = find_hot_loops(events, sent)
        judge = Judge(iter([each for each in events if each[0] != "waited"]))
        records = {key: self.gate.inspect(key, scope=SCOPE) for key in sorted(sent)}
        assert set(judge.effects) <= set(sent), seed
        for key, record in records.items():
            judge.judge(key, record, key in self.dead)
        assert judge.wrong == [], (seed, judge.wrong[:5])
        # And the dead letters are the messages whose attempts were exhausted
        unlimited = [(key, records[key]) for key in self.dead if not self.has_reason(key, records[key])]
        assert unlimited == [], (seed, unlimited[:5])
        poison = {key for key in sent if key.startswith("poison")}
        assert poison <= set(self.dead), (seed, sorted(poison - set(self.dead))[:5])
        # And deliveries that find their key in progress are bounded
        assert hot == [], (seed, hot[:5])
        # And the store is sound, and no consumer grew
        report = audit(self.gate)
        assert report.sound, (seed, str(report))
        grown = self._find_growth() if SECONDS >= 120 else []
        assert grown == [], (seed, grown)
        print(
            f"{dict(self.counted)}; {sent.total()} messages of {len(sent)} keys; "
            f"{sum(record.state == 'done' for record in records.values())} done, {judge.unstored} settled without a "
            f"stored completion, {sum(map(len, judge.effects.values()))} effects, second ones explained "
            f"{dict(+judge.reasons)}, {judge.late} of them late; dead letters {len(poison)} poison, "
            f"{len(set(self.dead) - poison)} others, {self.dead.total() - len(self.dead)} copies of them; in progress "
            f"elsewhere {waits.total()}, at most {max(waits.values(), default=0)} a key; lost 0, unexplained 0"
        )
        return {
            "messages": len(sent), "copies": sent.total() - len(sent), "effects": sum(map(len, judge.effects.values())),
            "second_effects_explained": judge.reasons.total(), "acknowledged_without_completion": judge.unstored,
            "dead_letters": len(self.dead), "lost": 0, "unexplained": 0, "grown": len(grown),
        }  # fmt: skip

    def close(self) -> None:
        for process in self.consumers:
            if process.poll() is None:
                self._end(process)
        self.redis.close()
        self.gate.close()
        self.raw.delete(self.name, *self.raw.scan_iter(f"{self.name}:*"))
        self.raw.close()

    # -- load ---------------------------------------------------------------------------------------------------------

    def _start(self, kind: str, steady: bool) -> None:
        self.started += 1
        self.consumers[self.start_process(kind, f"{self.seed} {self.started}")] = kind, steady

    def _has_started(self, process: subprocess.Popen[str]) -> bool:
        """Return True once a consumer has reported its samples, or has ended."""
        return bool(self.raw.exists(f"{self.name}:{process.pid}")) or process.poll() is not None

    def _send_until(self, over: Callable[[], bool]) -> None:
        drawn, recent = random.Random(f"{self.seed} messages"), deque[str](maxlen=200)
        while not over():
            self.sent.update(self.send([self._draw(drawn, recent) for _ in range(10)]))
            end, before = monotonic() + STALLED, self.count_waiting()
            while (waiting := self.count_waiting()) > BACKLOG:
                if waiting < before:
                    before, end = waiting, monotonic() + STALLED
                assert monotonic() < end, f"the consumers settle none of {waiting} messages for {STALLED} s"
                sleep(0.1)

    def _draw(self, drawn: random.Random, recent: deque[str]) -> str:
        if recent and drawn.random() < COPIES:
            return recent[-1] if drawn.random() < 0.5 else drawn.choice(recent)
        self.drawn += 1
        recent.append(f"{'poison' if drawn.random() < POISON else 'job'}-{self.drawn}")
        return recent[-1]

    def _drain(self) -> None:
        """Heal the wires, wait until all messages are settled, and stop the consumers."""
        self.redis.heal()
        self.redis.release()
        self.redis.cut_all()
        self.heal_broker()
        end, stalled, before = monotonic() + DRAIN, monotonic() + STALLED, -1
        while (left := self.count_unsettled()) > 0:
            if left != before:
                before, stalled = left, monotonic() + STALLED
            assert monotonic() < min(end, stalled), f"{left} messages not settled"
            for process in self.consumers:
                assert process.poll() is None, f"a consumer ended with {process.returncode}"
            sleep(0.5)
        for process in self.consumers:
            process.communicate(timeout=DRAIN)
            assert process.returncode == 0
        self.dead.update(self.list_dead_letters())

    # -- faults -------------------------------------------------------------------------------------------------------

    def _inject(self, fault: Fault) -> None:
        if fault.name in WIRE:
            WIRE[fault.name](self.redis)
        elif fault.name in self.broker_faults:
            self.broker_faults[fault.name](self.broker)
        else:
            getattr(self, "_" + fault.name.replace(" ", "_"))(fault.amount)
        self.counted[fault.name] += 1

    def _black_hole(self, amount: float) -> None:
        self.redis.black_hole = True
        self.over.wait(2 * LEASE * amount**4)
        self.redis.black_hole = False
        self.redis.cut_all()

    def _kill(self, amount: float) -> None:
        mortal = [process for process, (_, steady) in self.consumers.items() if not steady]
        process = mortal[int(amount * len(mortal))]
        self._end(process)
        self._start(*self.consumers.pop(process))

    def _end(self, process: subprocess.Popen[str]) -> None:
        assert process.poll() is None, f"a consumer ended with {process.returncode}"
        process.kill()
        process.communicate()
        self.raw.rpush(self.name, json.dumps(["killed", process.pid]))

    def _stop(self, amount: float) -> None:
        process = list(self.consumers)[int(amount * len(self.consumers))]
        process.send_signal(signal.SIGSTOP)
        self.over.wait(LEASE * (0.2 + 1.5 * (amount * 10 % 1)))
        process.send_signal(signal.SIGCONT)

    def _find_growth(self) -> list[str]:
        """Return what grew by more than it may in a steady consumer. Print all figures."""
        found: list[str] = []
        for process, (kind, steady) in self.consumers.items():
            if steady:
                samples = [json.loads(line) for line in self.raw.lrange(f"{self.name}:{process.pid}", 0, -1)]
                found += find_growth(kind, samples, GROWTH)
        return found
