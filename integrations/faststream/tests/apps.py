"""An app of FastStream on a test broker, with the middleware, for each kind of broker."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from faststream import AckPolicy, BaseMiddleware
from faststream.kafka import KafkaBroker, KafkaRouter, TestKafkaBroker
from faststream.nats import JStream, NatsBroker, NatsRouter, TestNatsBroker
from faststream.rabbit import RabbitBroker, RabbitRouter, TestRabbitBroker
from faststream.redis import RedisBroker, RedisRouter, StreamSub, TestRedisBroker
from idemgate_faststream import Once

from idemgate import Gate

for kind in (TestKafkaBroker, TestNatsBroker, TestRabbitBroker, TestRedisBroker):
    kind.__test__ = False  # type: ignore[attr-defined] - they are no tests

HEADER = "{message.headers[event-id]}"


class Kind(NamedTuple):
    """A broker, the arguments of a subscriber that redelivers, and those of a message for it."""

    broker: Any
    router: Any
    test_broker: Any
    subscriber: dict[str, Any]
    target: dict[str, Any]


KINDS = {
    "nats": Kind(NatsBroker, NatsRouter, TestNatsBroker, {"subject": "s", "stream": JStream("all")}, {"subject": "s"}),
    "kafka": Kind(KafkaBroker, KafkaRouter, TestKafkaBroker, {"ack_policy": AckPolicy.NACK_ON_ERROR}, {"topic": "s"}),
    "rabbit": Kind(RabbitBroker, RabbitRouter, TestRabbitBroker, {"queue": "s"}, {"queue": "s"}),
    "redis": Kind(
        RedisBroker, RedisRouter, TestRedisBroker, {"stream": StreamSub("s", group="g", consumer="c")}, {"stream": "s"}
    ),
}


class App:
    """A broker with the middleware and what it told FastStream about each message."""

    def __init__(self, kind: str, once: Once, **subscriber: Any) -> None:
        broker, router, self._test_broker, defaults, self._target = KINDS[kind]
        self.messages: list[Any] = []
        self.raised: list[BaseException] = []
        options = {**defaults, **subscriber}
        topics = ("s",) if kind == "kafka" else ()
        self.broker, self.router = broker(logger=None), router(middlewares=[self._watch, once])
        self.subscriber = self.router.subscriber(*topics, **options)

    def _watch(self, msg: Any, /, *, context: Any) -> Any:
        app = self

        class Watch(BaseMiddleware):  # type: ignore[type-arg]
            async def consume_scope(self, call_next: Any, msg: Any) -> Any:
                app.messages.append(msg)
                return await call_next(msg)

            async def after_processed(self, exc_type: Any = None, exc_val: Any = None, exc_tb: Any = None) -> bool:
                if exc_val is not None:
                    app.raised.append(exc_val)
                return False

        return Watch(msg, context=context)

    async def publish(self, body: Any = "x", event_id: str | None = "e1", **options: Any) -> None:
        headers = {} if event_id is None else {"event-id": event_id}
        headers |= options.pop("headers", {})
        await self.broker.publish(body, headers=headers, **self._target, **options)

    @asynccontextmanager
    async def running(self) -> Any:
        self.broker.include_router(self.router)
        async with self._test_broker(self.broker):
            yield self


def settled(gate: Gate) -> dict[str, int]:
    return {name.removeprefix("consumer."): n for name, n in gate.counters.items() if name.startswith("consumer.")}
