"""Soak: consumers of FastStream on NATS with file storage, while everything fails at random.

    IDEMGATE_SOAK=10m pytest integrations/faststream/tests/test_soak.py -s

runs for ten minutes; without it, for a few seconds. Consumers are killed and stopped, the NATS server is killed and
started again, connections are cut. Plan, effects and judge are those of the soak of RabbitMQ.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import nats
import pytest
import redis
from nats.errors import Error as NatsError
from nats.js.api import ConsumerConfig

from idemgate import Gate
from idemgate.testing import audit
from idemgate.testing.proxy import Proxy
from integrations.faststream.tests.soak_consumer import ACK_WAIT
from integrations.faststream.tests.transports import ignore
from integrations.rabbitmq.tests import test_soak as rabbit
from tests.resilience.plan import plan
from tools.reliability import server_of

SECONDS, STALLED, DRAIN, MAX_ATTEMPTS = rabbit.SECONDS, rabbit.STALLED, rabbit.DRAIN, rabbit.MAX_ATTEMPTS
OPTIONS = {"scope": rabbit.SCOPE, "lease": "2s", "max_attempts": MAX_ATTEMPTS}
LANES = {
    "wire": rabbit.LANES["wire"],
    "processes": rabbit.LANES["processes"],
    "broker": (6.0, ("close connections", "kill broker")),
}
ROOT = Path(__file__).parents[3]


class Publisher:
    """A publisher that repeats a message until the server has confirmed it."""

    def __init__(self, url: str, stream: str) -> None:
        self._url, self._stream = url, stream
        self._runner = asyncio.Runner()
        self._client: Any = None
        self.confirmed: set[str] = set()
        self.copies = self.unconfirmed = 0

    def publish(self, message_id: str) -> None:
        subject, headers = f"{self._stream}.x", {"event-id": message_id}
        self.run(lambda jetstream: jetstream.publish(subject, message_id.encode(), timeout=2, headers=headers))
        self.copies += message_id in self.confirmed
        self.confirmed.add(message_id)

    def wait_for_backlog(self) -> None:
        end = monotonic() + STALLED
        while self.count_unsettled() > rabbit.BACKLOG:
            assert monotonic() < end, f"the consumers leave more than {rabbit.BACKLOG} messages for {STALLED} s"
            sleep(0.05)

    def count_unsettled(self) -> int:
        info = self.run(lambda jetstream: jetstream.consumer_info(self._stream, "billing", timeout=2))
        return int(info.num_pending + info.num_ack_pending)

    def run(self, act: Callable[[Any], Awaitable[Any]]) -> Any:
        end = monotonic() + STALLED
        while True:
            try:
                return self._runner.run(self._act(act))
            except (TimeoutError, NatsError, OSError):
                if monotonic() > end:
                    raise
                self.unconfirmed += 1
                sleep(0.1)

    async def _act(self, act: Callable[[Any], Awaitable[Any]]) -> Any:
        if self._client is None or self._client.is_closed:
            self._client = await nats.connect(
                self._url, error_cb=ignore, reconnect_time_wait=0.1, max_reconnect_attempts=-1
            )
        return await act(self._client.jetstream())

    def close(self) -> None:
        if self._client is not None:
            self._runner.run(self._client.close())
        self._runner.close()


class Soak(rabbit.Soak):
    """The consumers, the publisher, the proxies in front of Redis and NATS, and the faults that happen to them."""

    def __init__(self, store: str, namespace: str, server: Any, seed: int) -> None:
        self.broker, self.seed, self.stream = server, seed, namespace
        self.proxy = Proxy(store, remember=False)
        self.nats = Proxy(server.url, remember=False)
        self.raw = redis.Redis.from_url(store)
        self.gate = Gate(store, namespace=namespace)
        self.publisher = Publisher(server.url, namespace)
        self.publisher.run(self._declare)
        self.name = f"reports-of-{namespace}"
        self.order = {
            "store": self.proxy.url, "reports": store, "namespace": namespace, "broker": self.nats.url,
            "queue": namespace, "options": OPTIONS,
        }  # fmt: skip
        self.consumers: dict[subprocess.Popen[str], tuple[str, bool]] = {}
        self.started = self.dead_seen = 0
        self.dead_letters = defaultdict(Counter)
        self.counted = Counter()
        self.over = threading.Event()

    async def _declare(self, jetstream: Any) -> None:
        await jetstream.add_stream(name=self.stream, subjects=[f"{self.stream}.>"])
        await jetstream.add_stream(name=f"{self.stream}-dead", subjects=[f"{self.stream}-dead"])
        config = ConsumerConfig(durable_name="billing", ack_wait=ACK_WAIT, max_ack_pending=1000)
        await jetstream.add_consumer(self.stream, config)

    def python(self, _: str, order: str, **options: Any) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "integrations.faststream.tests.soak_consumer", order]
        return subprocess.Popen(words, text=True, cwd=ROOT, **options)

    def _close_connections(self, _: float) -> None:
        self.nats.cut_all()

    def drain(self) -> list[str]:
        """Heal the wires, wait until all confirmed messages are settled, and stop the consumers."""
        self.proxy.heal()
        self.proxy.release()
        self.proxy.cut_all()
        unsettled, end, stalled = self.publisher.confirmed, monotonic() + DRAIN, monotonic() + STALLED
        while True:
            self._take_dead_letters()
            left = {one for one in unsettled if one not in self.dead_letters and self.inspect(one).state != "done"}
            if left:  # a message whose completion was not stored is acknowledged
                left -= {facts[0] for kind, *facts in self.events() if kind == "ended" and facts[-1] == "not stored"}
            waiting = self.publisher.count_unsettled()
            if not left and not waiting:
                break
            if left != unsettled:
                unsettled, stalled = left, monotonic() + STALLED
            sample = [(one, self.inspect(one)) for one in sorted(left)[:3]]
            assert monotonic() < min(end, stalled), f"{len(left)} ids not settled, {waiting} messages left: {sample}"
            for process in self.consumers:
                assert process.poll() is None, f"a consumer ended with {process.returncode}"
            sleep(0.5)
        for process in self.consumers:
            process.communicate(timeout=60)
            assert process.returncode == 0
        self._take_dead_letters()
        return []

    def _take_dead_letters(self) -> None:
        name = f"{self.stream}-dead"
        last = self.publisher.run(lambda jetstream: jetstream.stream_info(name)).state.last_seq
        for number in range(self.dead_seen + 1, last + 1):
            message = self.publisher.run(lambda jetstream, number=number: jetstream.get_msg(name, number))
            self.dead_letters[message.data.decode()]["rejected"] += 1
        self.dead_seen = last

    def close(self) -> None:
        for name in (self.stream, f"{self.stream}-dead"):
            self.publisher.run(lambda jetstream, name=name: jetstream.delete_stream(name))
        super().close()
        self.nats.close()


@pytest.fixture
def soak(store: str, namespace: str, nats_server: Any, seed: int) -> Iterator[Soak]:
    made = Soak(store, namespace, nats_server, seed)
    yield made
    made.close()


@pytest.mark.timeout(0)
@pytest.mark.slow
def test_no_message_is_lost_and_each_second_effect_has_a_documented_reason(
    soak: Soak, store: str, seed: int, record_fault: Callable[..., None]
) -> None:
    faults = plan(seed, SECONDS, LANES)
    print(f"\nseed {seed}: {sum(map(len, faults.values()))} faults within {SECONDS:g} s")
    # When consumers, the NATS server and the connections fail at random under a steady load
    soak.run(faults, SECONDS)
    soak.drain()
    # Then each confirmed message had its effect or is a dead letter
    # And no effect follows the recorded completion, and each effect before it has a documented reason
    confirmed = soak.publisher.confirmed
    records = {message_id: soak.inspect(message_id) for message_id in sorted(confirmed)}
    judge = rabbit.Judge(soak.events())
    assert set(judge.effects) <= confirmed, seed
    for message_id, record in records.items():
        judge.judge(message_id, record, message_id in soak.dead_letters)
    assert judge.wrong == [], (seed, judge.wrong[:5])
    # And the dead letters are the messages that used up their attempts
    early = [(one, records[one]) for one in soak.dead_letters if records[one].attempts < MAX_ATTEMPTS]
    assert early == [], (seed, early[:5])
    poison = {one for one in confirmed if one.startswith("poison")}
    assert poison <= set(soak.dead_letters), (seed, sorted(poison - set(soak.dead_letters))[:5])
    # And the store is sound, and no consumer grew
    report = audit(soak.gate)
    assert report.sound, (seed, str(report))
    grown = soak.growth() if SECONDS >= 120 else []
    assert grown == [], (seed, grown)
    effects = sum(map(len, judge.effects.values()))
    print(
        f"{dict(soak.counted)}; {len(confirmed)} messages, {soak.publisher.copies} copies, "
        f"{soak.publisher.unconfirmed} publishes or connects failed; "
        f"{sum(record.state == 'done' for record in records.values())} done, "
        f"{judge.unstored} acknowledged without a stored completion, {effects} effects, "
        f"second effects explained {dict(+judge.reasons)}, {judge.late} of them late; "
        f"dead letters {len(poison)} poison, {len(set(soak.dead_letters) - poison)} others; lost 0, unexplained 0"
    )
    record_fault(
        "consumers of FastStream on NATS, the server and Redis at random (soak)",
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
