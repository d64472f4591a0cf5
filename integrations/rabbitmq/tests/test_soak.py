"""Soak: guarded consumers of a quorum queue with a delivery limit, while everything fails at random.

    IDEMGATE_SOAK=10m pytest integrations/rabbitmq/tests/test_soak.py -s

runs for ten minutes; without it, for a few seconds. The seed is printed, and `IDEMGATE_SEED` repeats the plan of
faults. From two minutes on, the memory, descriptors and threads of consumers that were not killed must not grow.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from time import monotonic, sleep
from typing import Any, NamedTuple

import pika
import pytest
import redis
from pika.exceptions import AMQPError

from idemgate import Gate
from idemgate.testing import audit
from idemgate.testing.proxy import Proxy
from idemgate.types import milliseconds
from tests.for_each import for_each
from tests.resilience.judge import Judge
from tests.resilience.plan import Fault, injecting, plan
from tests.resilience.verdict import find_growth, read_events
from tools.reliability import server_of

SECONDS = milliseconds(os.environ.get("IDEMGATE_SOAK", "10s"), "IDEMGATE_SOAK") / 1000
LEASE = 2.0
MAX_ATTEMPTS, LIMIT = 15, 20
SCOPE = "soak"
OPTIONS = {"scope": SCOPE, "lease": "2s", "max_attempts": MAX_ATTEMPTS, "pause": "50ms", "hold": "5s"}
POISON, COPIES = 0.02, 0.2
BACKLOG = 150
"""The number of ready messages from which the publisher waits."""
STALLED, DRAIN = 60, 300
"""Seconds without a settled message, and in all, after which the rest is not expected to settle."""
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
LANES = {
    "wire": (0.5, (*WIRE, "black hole")),
    "processes": (2.0, ("kill", "kill", "stop")),
    "broker": (12.0, ("close connections", "close connections", "close connections", "kill broker")),
}
CONSUMERS = [("aio", True), ("blocking", True), ("aio", False), ("blocking", False)]
"""The client of each consumer, and whether the consumer is steady: it may be stopped and is not killed."""
GROWTH = {"rss": (0.1, 4e6), "descriptors": (0.0, 8), "threads": (0.0, 8)}
"""The share of the first third's median, and the amount on top, by which the last third's may be larger."""


class Publisher:
    """A publisher that repeats a message until it gets a confirm."""

    def __init__(self, broker: Any, queue: str) -> None:
        self._broker, self._queue = broker, queue
        self._connection: Any = None
        self._channel: Any = None
        self.confirmed: set[str] = set()
        self.copies = self.unconfirmed = 0

    def publish(self, message_id: str) -> None:
        properties = pika.BasicProperties(message_id=message_id, delivery_mode=2)
        self._repeat(lambda channel: channel.basic_publish("", self._queue, message_id.encode(), properties))
        self.copies += message_id in self.confirmed
        self.confirmed.add(message_id)

    def wait_for_backlog(self) -> None:
        def ready(channel: Any) -> int:
            return int(channel.queue_declare(self._queue, passive=True).method.message_count)

        end = monotonic() + STALLED
        while self._repeat(ready) > BACKLOG:
            assert monotonic() < end, f"the consumers leave more than {BACKLOG} messages for {STALLED} s"
            sleep(0.05)

    def close(self) -> None:
        if self._connection is not None and self._connection.is_open:
            with suppress(AMQPError):  # the broker may have closed it
                self._connection.close()

    def _repeat(self, act: Callable[[Any], Any]) -> Any:
        end = monotonic() + STALLED
        while True:
            try:
                if self._connection is None or self._connection.is_closed or self._channel.is_closed:
                    self.close()
                    self._connection = self._broker.connect()
                    self._channel = self._connection.channel()
                    self._channel.confirm_delivery()
                return act(self._channel)
            except (AMQPError, OSError):
                if monotonic() > end:
                    raise
                self.unconfirmed += 1
                sleep(0.1)


class Soak:
    """The consumers, the publisher, the proxy in front of Redis, and the faults that happen to them."""

    def __init__(self, store: str, namespace: str, broker: Any, queue: Any, dead: Any, python: Any, seed: int) -> None:
        self.broker, self.queue, self.dead, self.python, self.seed = broker, queue, dead, python, seed
        self.proxy = Proxy(store, remember=False)
        self.raw = redis.Redis.from_url(store)
        self.gate = Gate(store, namespace=namespace)
        self.publisher = Publisher(broker, queue.name)
        self.name = f"reports-of-{namespace}"
        self.order = {
            "store": self.proxy.url, "reports": store, "namespace": namespace, "broker": broker.url,
            "queue": queue.name, "options": OPTIONS,
        }  # fmt: skip
        self.consumers: dict[subprocess.Popen[str], tuple[str, bool]] = {}
        self.started = 0
        self.dead_letters: dict[str, Counter[str]] = defaultdict(Counter)
        self.counted: Counter[str] = Counter()
        self.over = threading.Event()

    def start(self, client: str, steady: bool) -> None:
        self.started += 1
        order = self.order | {"client": client, "seed": f"{self.seed} {self.started}"}
        process = self.python("soak_consumer.py", json.dumps(order), stdin=subprocess.PIPE)
        self.consumers[process] = client, steady

    def run(self, faults: dict[str, list[Fault]], seconds: float) -> None:
        """Publish messages for so many seconds, while the faults happen at their times."""
        for client, steady in CONSUMERS:
            self.start(client, steady)
        begin = monotonic()
        with injecting(faults, self._inject, self.over) as errors:
            self._publish_until(lambda: monotonic() > begin + seconds or bool(errors))

    def _publish_until(self, over: Callable[[], bool]) -> None:
        drawn = random.Random(f"{self.seed} messages")
        recent: deque[str] = deque(maxlen=200)
        while not over():
            if recent and drawn.random() < COPIES:
                self.publisher.publish(recent[-1] if drawn.random() < 0.5 else drawn.choice(recent))
            else:
                number = len(self.publisher.confirmed)
                recent.append(f"poison-{number}" if drawn.random() < POISON else f"job-{number}")
                self.publisher.publish(recent[-1])
                if number % 20 == 0:
                    self.publisher.wait_for_backlog()
            sleep(0.003)

    def _inject(self, fault: Fault) -> None:
        if fault.name in WIRE:
            WIRE[fault.name](self.proxy)
        else:
            getattr(self, "_" + fault.name.replace(" ", "_"))(fault.amount)
        self.counted[fault.name] += 1

    def _black_hole(self, amount: float) -> None:
        self.proxy.black_hole = True
        self.over.wait(2 * LEASE * amount**4)
        self.proxy.black_hole = False
        self.proxy.cut_all()

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

    def _close_connections(self, _: float) -> None:
        self.broker.close_connections()

    def _kill_broker(self, amount: float) -> None:
        self.broker.kill()
        sleep(amount)
        self.broker.start()

    def drain(self) -> list[str]:
        """Heal the wire, wait until all confirmed messages are settled, and stop the consumers.

        Return the ids that are left in the queue.
        """
        self.proxy.heal()
        self.proxy.release()
        self.proxy.cut_all()
        unsettled, end, stalled = self.publisher.confirmed, monotonic() + DRAIN, monotonic() + STALLED
        while True:
            self._take_dead_letters()
            left = {one for one in unsettled if one not in self.dead_letters and self.inspect(one).state != "done"}
            if left:  # a message whose completion was not stored is acknowledged
                left -= {facts[0] for kind, *facts in self.events() if kind == "ended" and facts[-1] == "not stored"}
            ready = self.queue.channel.queue_declare(self.queue.name, passive=True).method.message_count
            if not left and not ready:
                break
            if left != unsettled:
                unsettled, stalled = left, monotonic() + STALLED
            sample = [(one, self.inspect(one)) for one in sorted(left)[:3]]
            assert monotonic() < min(end, stalled), f"{len(left)} ids not settled, {ready} messages ready: {sample}"
            for process in self.consumers:
                assert process.poll() is None, f"a consumer ended with {process.returncode}"
            sleep(0.5)
        for process in self.consumers:
            process.communicate(timeout=60)
            assert process.returncode == 0
        self._take_dead_letters()
        return [properties.message_id for _, properties, _ in self.queue.all()]

    def _take_dead_letters(self) -> None:
        for _, properties, _ in self.dead.all():
            self.dead_letters[properties.message_id][properties.headers["x-death"][0]["reason"]] += 1

    def inspect(self, message_id: str) -> Any:
        return self.gate.inspect(message_id, scope=SCOPE)

    def events(self) -> Iterator[list[Any]]:
        return read_events(self.raw, self.name)

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
        self.publisher.close()
        self.proxy.close()
        self.gate.close()
        self.raw.delete(self.name, *self.raw.scan_iter(f"{self.name}:*"))
        self.raw.close()


class Record(NamedTuple):
    """The fields of a record that a verdict depends on."""

    state: str
    token: int


DONE = Record("done", 2)


@for_each(
    ("effects", "ends", "record", "wrong"),
    [
        ([(2, 9)], {2: "handled"}, DONE, 0),
        ([(1, 8), (2, 9)], {2: "handled"}, DONE, 0),  # a process that was killed
        ([(1, 9), (2, 9)], {2: "handled"}, DONE, 1),  # a run without an end, in a process that lived
        ([(1, 9), (2, 9)], {1: "handled", 2: "handled"}, DONE, 1),
        ([(1, 9), (2, 9)], {1: "failed", 2: "handled"}, DONE, 1),
        ([(2, 9), (1, 9)], {1: "lost", 2: "handled"}, DONE, 0),  # a stale owner
        ([(2, 9), (3, 9)], {2: "handled", 3: "lost"}, DONE, 1),
        ([(2, 9), (2, 9)], {2: "handled"}, DONE, 1),
        ([(1, 9)], {1: "not stored"}, Record("lapsed", 1), 0),
        ([(1, 9)], {1: "lost"}, Record("lapsed", 1), 1),
        ([], {}, DONE, 1),
        ([], {}, Record("absent", 0), 1),
    ],
)
def test_the_judge_finds_lost_messages_and_second_effects_without_a_reason(
    effects: list[tuple[int, int]], ends: dict[int, str], record: Record, wrong: int
) -> None:
    # Given effects of one message as (token, pid), and the outcomes of its runs; process 8 was killed
    events: list[list[Any]] = [["killed", 8], *(["effect", "job", token, pid] for token, pid in effects)]
    judge = Judge(iter([*events, *(["ended", "job", token, 9, outcome] for token, outcome in ends.items())]))
    # When it is judged
    judge.judge("job", record, is_dead=False)
    # Then it is wrong unless each second effect has a documented reason
    assert len(judge.wrong) == wrong, judge.wrong


@pytest.fixture
def dead(queue: Any, make_queue: Any) -> Any:
    """Make the queue a quorum queue with a delivery limit; return the queue of its dead letters.

    Dead letters are published at least once, so that a broker that is killed loses none.
    """
    dead_letters = make_queue()
    queue.channel.queue_delete(queue.name)
    arguments = {
        "x-queue-type": "quorum", "x-delivery-limit": LIMIT, "x-overflow": "reject-publish",
        "x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead_letters.name,
        "x-dead-letter-strategy": "at-least-once",
    }  # fmt: skip
    queue.channel.queue_declare(queue.name, durable=True, arguments=arguments)
    return dead_letters


@pytest.fixture
def soak(store: str, namespace: str, broker: Any, queue: Any, dead: Any, python: Any, seed: int) -> Iterator[Soak]:
    made = Soak(store, namespace, broker, queue, dead, python, seed)
    yield made
    made.close()


@pytest.mark.timeout(0)
@pytest.mark.slow
def test_no_message_is_lost_and_each_second_effect_has_a_documented_reason(
    soak: Soak, store: str, seed: int, record_fault: Callable[..., None]
) -> None:
    faults = plan(seed, SECONDS, LANES)
    print(f"\nseed {seed}: {sum(map(len, faults.values()))} faults within {SECONDS:g} s")
    # When consumers, the broker and the connections to Redis fail at random under a steady load
    soak.run(faults, SECONDS)
    left = soak.drain()
    # Then the queue has at most copies that its consumers returned
    confirmed = soak.publisher.confirmed
    assert set(left) <= confirmed, (seed, left)
    # And each confirmed message had its effect or is a dead letter
    # And no effect follows the recorded completion, and each effect before it has a documented reason
    records = {message_id: soak.inspect(message_id) for message_id in sorted(confirmed)}
    judge = Judge(soak.events())
    assert set(judge.effects) <= confirmed, seed
    for message_id, record in records.items():
        judge.judge(message_id, record, message_id in soak.dead_letters)
    assert judge.wrong == [], (seed, judge.wrong[:5])
    # And the dead letters are the messages that reached a limit
    unlimited = [
        (one, reasons, records[one])
        for one, reasons in soak.dead_letters.items()
        if "delivery_limit" not in reasons and records[one].attempts < MAX_ATTEMPTS
    ]
    assert unlimited == [], (seed, unlimited[:5])
    poison = {one for one in confirmed if one.startswith("poison")}
    assert poison <= set(soak.dead_letters), (seed, sorted(poison - set(soak.dead_letters))[:5])
    # And the store is sound, and no consumer grew
    report = audit(soak.gate)
    assert report.sound, (seed, str(report))
    grown = soak.growth() if SECONDS >= 120 else []
    assert grown == [], (seed, grown)
    done = sum(record.state == "done" for record in records.values())
    effects = sum(map(len, judge.effects.values()))
    reasons = sum(soak.dead_letters.values(), Counter[str]())
    print(
        f"{dict(soak.counted)}; {len(confirmed)} messages, {soak.publisher.copies} copies, "
        f"{soak.publisher.unconfirmed} publishes or connects failed; {done} done, "
        f"{judge.unstored} acknowledged without a stored completion, {effects} effects, "
        f"second effects explained {dict(+judge.reasons)}, {judge.late} of them late; "
        f"dead letters {len(poison)} poison, {len(set(soak.dead_letters) - poison)} others, by reason {dict(reasons)}; "
        f"{len(left)} copies left; lost 0, unexplained 0"
    )
    record_fault(
        "guarded consumers of a quorum queue, the broker and Redis at random (soak)",
        sum(soak.counted.values()),
        promises="P2 P3 P4 P5 P6",
        seed=seed,
        server=server_of(store),
        seconds=SECONDS,
        messages=len(confirmed),
        copies=soak.publisher.copies,
        effects=effects,
        second_effects_explained=judge.reasons.total(),
        acknowledged_without_completion=judge.unstored,
        dead_letters=len(soak.dead_letters),
        lost=0,
        unexplained=0,
        grown=len(grown),
    )
