"""Soak: consumers of FastStream on NATS with file storage, while everything fails at random.

    IDEMGATE_SOAK=10m pytest integrations/faststream/tests/test_soak.py -s

runs for ten minutes; without it, for a few seconds. Consumers are killed and stopped, the NATS server is killed and
started again, connections are cut.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from time import monotonic, sleep
from typing import Any

import nats
import pytest
from nats.errors import Error as NatsError
from nats.js.api import ConsumerConfig

from idemgate.testing.proxy import Proxy
from integrations.faststream.tests.soak_consumer import ACK_WAIT
from integrations.faststream.tests.transports import ignore
from tests.resilience.consumers import MAX_ATTEMPTS, SCOPE, SECONDS, STALLED, ConsumerSoak
from tools.reliability import server_of

OPTIONS = {"scope": SCOPE, "lease": "2s", "max_attempts": MAX_ATTEMPTS}


class Publisher:
    """A publisher that repeats a message until the server has confirmed it."""

    def __init__(self, url: str, stream: str) -> None:
        self._url, self._stream = url, stream
        self._runner = asyncio.Runner()
        self._client: Any = None

    def publish(self, message_id: str) -> None:
        subject, headers = f"{self._stream}.x", {"event-id": message_id}
        self.run(lambda jetstream: jetstream.publish(subject, message_id.encode(), timeout=2, headers=headers))

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


class Broker:
    """The NATS server, and a proxy in front of it."""

    def __init__(self, server: Any) -> None:
        self.server, self.proxy = server, Proxy(server.url, remember=False)

    def restart(self) -> None:
        self.server.kill()
        sleep(0.5)
        self.server.start()


FAULTS: dict[str, Callable[[Any], object]] = {
    "close connections": lambda broker: broker.proxy.cut_all(),
    "kill broker": lambda broker: broker.restart(),
}


class Soak(ConsumerSoak):
    program = "integrations.faststream.tests.soak_consumer"
    kinds = (("aio", True), ("blocking", True), ("aio", False), ("blocking", False))
    broker_faults = FAULTS
    pauses = (0.5, 6.0, 2.0)

    def __init__(self, store: str, namespace: str, server: Any, seed: int) -> None:
        super().__init__(store, namespace, Broker(server), seed)
        self.publisher = Publisher(server.url, namespace)
        self.publisher.run(self._declare)
        self.dead_seen = Counter[str]()

    async def _declare(self, jetstream: Any) -> None:
        await jetstream.add_stream(name=self.namespace, subjects=[f"{self.namespace}.>"])
        await jetstream.add_stream(name=f"{self.namespace}-dead", subjects=[f"{self.namespace}-dead"])
        config = ConsumerConfig(durable_name="billing", ack_wait=ACK_WAIT, max_ack_pending=1000)
        await jetstream.add_consumer(self.namespace, config)

    def order(self, kind: str) -> Mapping[str, Any]:
        return {"broker": self.broker.proxy.url, "queue": self.namespace, "options": OPTIONS, "client": kind}

    def send(self, bodies: Sequence[str]) -> Iterable[str]:
        for body in bodies:
            self.publisher.publish(body)
        return bodies

    def count_waiting(self) -> int:
        return self.publisher.count_unsettled()

    def count_unsettled(self) -> int:
        self._take_dead_letters()
        return self.count_left(self.dead_seen) + self.publisher.count_unsettled()

    def list_dead_letters(self) -> Iterable[str]:
        self._take_dead_letters()
        return self.dead_seen.elements()

    def heal_broker(self) -> None:
        """It is healed already."""

    def close(self) -> None:
        for name in (self.namespace, f"{self.namespace}-dead"):
            self.publisher.run(lambda jetstream, name=name: jetstream.delete_stream(name))
        super().close()
        self.publisher.close()
        self.broker.proxy.close()

    def _take_dead_letters(self) -> None:
        name = f"{self.namespace}-dead"
        last = self.publisher.run(lambda jetstream: jetstream.stream_info(name)).state.last_seq
        for number in range(self.dead_seen.total() + 1, last + 1):
            message = self.publisher.run(lambda jetstream, number=number: jetstream.get_msg(name, number))
            self.dead_seen[message.data.decode()] += 1


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
    soak.run(SECONDS)
    figures = soak.check()
    record_fault(
        "consumers of FastStream on NATS, the server and Redis at random (soak)",
        sum(soak.counted.values()),
        promises="P2 P3 P4 P5 P6",
        seed=seed,
        server=server_of(store),
        seconds=SECONDS,
        **figures,
    )
