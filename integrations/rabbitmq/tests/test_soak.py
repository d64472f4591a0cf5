"""Soak: guarded consumers of a quorum queue with a delivery limit, while everything fails at random.

    IDEMGATE_SOAK=10m pytest integrations/rabbitmq/tests/test_soak.py -s

runs for ten minutes; without it, for a few seconds. The seed is printed, and `IDEMGATE_SEED` repeats the plan of
faults. From two minutes on, the memory, descriptors and threads of consumers that were not killed must not grow.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from time import monotonic, sleep
from typing import Any, NamedTuple

import pika
import pytest
from pika.exceptions import AMQPError

from tests.for_each import for_each
from tests.resilience.consumers import MAX_ATTEMPTS, SCOPE, SECONDS, STALLED, ConsumerSoak
from tests.resilience.judge import Judge
from tools.reliability import server_of

LIMIT = 20
OPTIONS = {"scope": SCOPE, "lease": "2s", "max_attempts": MAX_ATTEMPTS, "pause": "50ms", "hold": "5s"}


class Publisher:
    """A publisher that repeats a message until it gets a confirm."""

    def __init__(self, broker: Any, queue: str) -> None:
        self._broker, self._queue = broker, queue
        self._connection: Any = None
        self._channel: Any = None

    def publish(self, message_id: str) -> None:
        properties = pika.BasicProperties(message_id=message_id, delivery_mode=2)
        self._repeat(lambda channel: channel.basic_publish("", self._queue, message_id.encode(), properties))

    def count_ready(self) -> int:
        def count(channel: Any) -> int:
            return int(channel.queue_declare(self._queue, passive=True).method.message_count)

        ready: int = self._repeat(count)
        return ready

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
                sleep(0.1)


def restart(broker: Any) -> None:
    broker.kill()
    sleep(0.5)
    broker.start()


FAULTS: dict[str, Callable[[Any], object]] = {
    "close connections": lambda broker: broker.close_connections(),
    "kill broker": restart,
}


class Soak(ConsumerSoak):
    program = "integrations.rabbitmq.tests.soak_consumer"
    kinds = (("aio", True), ("blocking", True), ("aio", False), ("blocking", False))
    broker_faults = FAULTS
    pauses = (0.5, 12.0, 2.0)

    def __init__(self, store: str, namespace: str, broker: Any, queue: Any, dead: Any, seed: int) -> None:
        super().__init__(store, namespace, broker, seed)
        self.queue, self.dead_queue = queue, dead
        self.publisher = Publisher(broker, queue.name)
        self.reasons: dict[str, Counter[str]] = defaultdict(Counter)

    def order(self, kind: str) -> Mapping[str, Any]:
        return {"broker": self.broker.url, "queue": self.queue.name, "options": OPTIONS, "client": kind}

    def send(self, bodies: Sequence[str]) -> Iterable[str]:
        for body in bodies:
            self.publisher.publish(body)
        return bodies

    def count_waiting(self) -> int:
        return self.publisher.count_ready()

    def count_unsettled(self) -> int:
        self._take_dead_letters()
        return self.count_left(self.reasons) + self.publisher.count_ready()

    def list_dead_letters(self) -> Iterable[str]:
        self._take_dead_letters()
        return [message_id for message_id, reasons in self.reasons.items() for _ in range(reasons.total())]

    def has_reason(self, key: str, record: Any) -> bool:
        return "delivery_limit" in self.reasons[key] or super().has_reason(key, record)

    def heal_broker(self) -> None:
        """It is healed already."""

    def close(self) -> None:
        super().close()
        self.publisher.close()

    def _take_dead_letters(self) -> None:
        for _, properties, _ in self.dead_queue.all():
            self.reasons[properties.message_id][properties.headers["x-death"][0]["reason"]] += 1


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
def soak(store: str, namespace: str, broker: Any, queue: Any, dead: Any, seed: int) -> Iterator[Soak]:
    made = Soak(store, namespace, broker, queue, dead, seed)
    yield made
    made.close()


@pytest.mark.timeout(0)
@pytest.mark.slow
def test_no_message_is_lost_and_each_second_effect_has_a_documented_reason(
    soak: Soak, store: str, seed: int, record_fault: Callable[..., None]
) -> None:
    soak.run(SECONDS)
    figures = soak.check()
    # And the queue has at most copies that its consumers returned
    left = [properties.message_id for _, properties, _ in soak.queue.all()]
    assert set(left) <= set(soak.sent), (seed, left)
    print(f"dead letters by reason {dict(sum(soak.reasons.values(), Counter[str]()))}; {len(left)} copies left")
    record_fault(
        "guarded consumers of a quorum queue, the broker and Redis at random (soak)",
        sum(soak.counted.values()),
        promises="P2 P3 P4 P5 P6",
        seed=seed,
        server=server_of(store),
        seconds=SECONDS,
        **figures,
    )
