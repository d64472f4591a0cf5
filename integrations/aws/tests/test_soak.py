"""Soak: guarded consumers of a queue of SQS, while consumers, their connections and those of the store fail at random.

    IDEMGATE_SOAK=10m pytest integrations/aws/tests/test_soak.py -s

runs for ten minutes; without it, for a few seconds. The seed is printed, and `IDEMGATE_SEED` repeats the plan of
faults. From two minutes on, the memory, descriptors and threads of consumers that were not killed must not grow.
moto keeps its queues in memory, so it is not killed: its connections are cut.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from time import monotonic, sleep
from typing import Any

import pytest
import redis

from idemgate import Gate
from idemgate.testing import Proxy, audit
from idemgate.types import milliseconds
from integrations.aws.tests.conftest import Queue
from tests.resilience.judge import Judge
from tests.resilience.plan import Fault, injecting, plan
from tests.resilience.verdict import find_growth, read_events

SECONDS = milliseconds(os.environ.get("IDEMGATE_SOAK", "10s"), "IDEMGATE_SOAK") / 1000
LEASE = 2.0
MAX_ATTEMPTS = 15
SCOPE = "soak"
OPTIONS = {
    "key": "{message.body}", "scope": SCOPE, "lease": "2s", "max_attempts": MAX_ATTEMPTS, "poll": 1, "backoff": [0, 1],
}  # fmt: skip
POISON, COPIES = 0.02, 0.2
BACKLOG = 100
"""The number of visible messages from which the producer waits."""
WAITS = 20
"""The deliveries of a key in progress elsewhere, for each of its messages and for each fault."""
STALLED, DRAIN = 60, 300
"""Seconds without a settled message, and in all, after which the rest is not expected to settle."""
SCRIPT = b"EVALSHA"
WIRE: dict[str, Callable[[Proxy], object]] = {
    "cut a reply": lambda proxy: proxy.cut_reply(SCRIPT),
    "reset": lambda proxy: proxy.reset_reply(SCRIPT),
    "drop a request": lambda proxy: proxy.drop_request(SCRIPT),
    "double a request": lambda proxy: proxy.double_request(SCRIPT),
    "hold a request": lambda proxy: proxy.hold_request(SCRIPT),
    "release": lambda proxy: proxy.release(),
    "cut all": lambda proxy: proxy.cut_all(),
}
SQS: dict[str, Callable[[Proxy], object]] = {
    "lose a deletion": lambda proxy: proxy.drop_request(b"AmazonSQS.DeleteMessageBatch"),
    "lose the answer to a deletion": lambda proxy: proxy.cut_reply(b"AmazonSQS.DeleteMessageBatch"),
    "lose a delivery": lambda proxy: proxy.cut_reply(b"AmazonSQS.ReceiveMessage"),
    "lose a visibility": lambda proxy: proxy.drop_request(b"AmazonSQS.ChangeMessageVisibilityBatch"),
    "lose the answer to a dead letter": lambda proxy: proxy.cut_reply(b"AmazonSQS.SendMessage"),
    "cut all of SQS": lambda proxy: proxy.cut_all(),
}
LANES = {"wire": (1.5, (*WIRE, "black hole")), "sqs": (3.0, (*SQS,)), "processes": (8.0, ("kill", "kill", "stop"))}
"""The seconds between two faults. A request to moto takes 20 to 100 ms, and a consumer starts within 3 to 10 s."""
CONSUMERS = [("boto3", True), ("aiobotocore", True), ("boto3", False), ("aiobotocore", False)]
"""The client of each consumer, and whether the consumer is steady: it may be stopped and is not killed."""
GROWTH = {"rss": (0.1, 6e6), "descriptors": (0.0, 12), "threads": (0.0, 12)}
"""The share of the first third's median, and the amount on top, by which the last third's may be larger."""


class Soak:
    """The consumers, the producer, the proxies, and the faults that happen to them."""

    def __init__(self, store: str, namespace: str, endpoint: str, queue: Queue, python: Any, seed: int) -> None:
        self.queue, self.python, self.seed = queue, python, seed
        self.raw = redis.Redis.from_url(store)
        self.redis, self.sqs = Proxy(store, remember=False), Proxy(endpoint, remember=False)
        self.gate = Gate(store, namespace=namespace)
        self.name = f"reports-of-{namespace}"
        self.order = {
            "store": self.redis.url, "reports": store, "namespace": namespace, "endpoint": self.sqs.url,
            "queue": queue.url, "options": OPTIONS, "fails": 0.03, "die": "",
        }  # fmt: skip
        self.consumers: dict[subprocess.Popen[str], tuple[str, bool]] = {}
        self.started = self.drawn = 0
        self.sent, self.dead, self.counted = Counter[str](), Counter[str](), Counter[str]()
        self.over = threading.Event()

    def start(self, client: str, steady: bool) -> None:
        self.started += 1
        order = self.order | {"client": client, "seed": f"{self.seed} {self.started}"}
        self.consumers[self.python("consumer.py", json.dumps(order), stdin=subprocess.PIPE)] = client, steady

    def run(self, faults: dict[str, list[Fault]], seconds: float) -> None:
        """Send messages for so many seconds, while the faults happen at their times."""
        for client, steady in CONSUMERS:
            self.start(client, steady)
        begin = monotonic()
        with injecting(faults, self._inject, self.over) as errors:
            self._send_until(lambda: monotonic() > begin + seconds or bool(errors))

    def _send_until(self, over: Callable[[], bool]) -> None:
        drawn, recent = random.Random(f"{self.seed} messages"), deque[str](maxlen=200)
        while not over():
            bodies = [self._draw(drawn, recent) for _ in range(10)]
            self.queue.send_many(bodies)
            self.sent.update(bodies)
            end = monotonic() + STALLED
            while self.queue.count()[0] > BACKLOG:
                assert monotonic() < end, f"the consumers leave more than {BACKLOG} messages for {STALLED} s"
                sleep(0.1)

    def _draw(self, drawn: random.Random, recent: deque[str]) -> str:
        if recent and drawn.random() < COPIES:
            return recent[-1] if drawn.random() < 0.5 else drawn.choice(recent)
        self.drawn += 1
        recent.append(f"{'poison' if drawn.random() < POISON else 'job'}-{self.drawn}")
        return recent[-1]

    def _inject(self, fault: Fault) -> None:
        if fault.name in WIRE:
            WIRE[fault.name](self.redis)
        elif fault.name in SQS:
            SQS[fault.name](self.sqs)
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
        self.start(*self.consumers.pop(process))

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

    def drain(self) -> None:
        """Heal the wires, wait until all messages are settled, and stop the consumers."""
        self.redis.heal()
        self.redis.release()
        self.sqs.heal()
        self.redis.cut_all()
        end, stalled, before = monotonic() + DRAIN, monotonic() + STALLED, -1
        while (left := sum(self.queue.count())) > 0:
            if left != before:
                before, stalled = left, monotonic() + STALLED
            assert monotonic() < min(end, stalled), f"{left} messages not settled"
            for process in self.consumers:
                assert process.poll() is None, f"a consumer ended with {process.returncode}"
            sleep(0.5)
        for process in self.consumers:
            process.communicate(timeout=60)
            assert process.returncode == 0
        self.dead.update(letter["Body"] for letter in self.queue.take_dead_letters())

    def inspect(self, key: str) -> Any:
        return self.gate.inspect(key, scope=SCOPE)

    def events(self) -> tuple[Iterator[list[Any]], Counter[str]]:
        """Return the events for the judge, and how often each key was delivered while it ran elsewhere."""
        events = [*read_events(self.raw, self.name)]
        waits = Counter(key for kind, key, *_ in events if kind == "waited")
        return iter([each for each in events if each[0] != "waited"]), waits

    def growth(self) -> list[str]:
        """Return what grew by more than it may in a steady consumer. Print all figures."""
        found: list[str] = []
        for process, (client, steady) in self.consumers.items():
            if steady:
                samples = [json.loads(line) for line in self.raw.lrange(f"{self.name}:{process.pid}", 0, -1)]
                found += find_growth(client, samples, GROWTH)
        return found

    def close(self) -> None:
        for process in self.consumers:
            if process.poll() is None:
                self._end(process)
        self.redis.close()
        self.sqs.close()
        self.gate.close()
        self.raw.delete(self.name, *self.raw.scan_iter(f"{self.name}:*"))
        self.raw.close()


@pytest.fixture
def soak(store: str, namespace: str, endpoint: str, make_queue: Any, python: Any, seed: int) -> Iterator[Soak]:
    made = Soak(store, namespace, endpoint, make_queue(), python, seed)
    yield made
    made.close()


@pytest.mark.timeout(0)
@pytest.mark.slow
def test_no_message_is_lost_and_each_second_effect_has_a_documented_reason(soak: Soak, seed: int) -> None:
    faults = plan(seed, SECONDS, LANES)
    print(f"\nseed {seed}: {sum(map(len, faults.values()))} faults within {SECONDS:g} s")
    # When consumers and connections fail at random under a steady load
    soak.run(faults, SECONDS)
    soak.drain()
    # Then each message had its effect or is a dead letter
    # And no effect follows the recorded completion, and each effect before it has a documented reason
    events, waits = soak.events()
    judge, records = Judge(events), {key: soak.inspect(key) for key in sorted(soak.sent)}
    assert set(judge.effects) <= set(soak.sent), seed
    for key, record in records.items():
        judge.judge(key, record, key in soak.dead)
    assert judge.wrong == [], (seed, judge.wrong[:5])
    # And the dead letters are the messages whose attempts were exhausted
    unlimited = [(key, records[key]) for key in soak.dead if records[key].attempts < MAX_ATTEMPTS]
    assert unlimited == [], (seed, unlimited[:5])
    poison = {key for key in soak.sent if key.startswith("poison")}
    assert poison <= set(soak.dead), (seed, sorted(poison - set(soak.dead))[:5])
    # And deliveries that find their key in progress are bounded
    often = [(key, n, soak.sent[key]) for key, n in waits.items() if n > WAITS * soak.sent[key]]
    assert often == [], (seed, often[:5])
    # And the store is sound, and no consumer grew
    report = audit(soak.gate)
    assert report.sound, (seed, str(report))
    grown = soak.growth() if SECONDS >= 120 else []
    assert grown == [], (seed, grown)
    print(
        f"{dict(soak.counted)}; {soak.sent.total()} messages of {len(soak.sent)} keys; "
        f"{sum(record.state == 'done' for record in records.values())} done, {judge.unstored} deleted without a stored "
        f"completion, {sum(map(len, judge.effects.values()))} effects, second ones explained {dict(+judge.reasons)}, "
        f"{judge.late} of them late; dead letters {len(poison)} poison, {len(set(soak.dead) - poison)} others, "
        f"{soak.dead.total() - len(soak.dead)} copies of them; in progress elsewhere {waits.total()}, at most "
        f"{max(waits.values(), default=0)} a key; lost 0, unexplained 0"
    )
