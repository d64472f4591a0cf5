"""The consumers of this package as transports of the consumer contract."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from idemgate import Gate
from idemgate.core.keys import list_keys
from idemgate.lua import script
from idemgate.testing import Transport, adapt_handler
from idemgate.testing.contract import LEASE, MAX_ATTEMPTS, SCOPE, Handler
from idemgate.testing.proxy import Proxy

__all__ = ["ChannelTransport", "ListTransport", "StreamTransport", "TopicTransport"]


class GateConsumer:
    """A gate with its own connections, which run through a proxy, so that they can be cut."""

    def __init__(self, url: str, namespace: str) -> None:
        self.proxy = Proxy(url, remember=False)
        self.gate = Gate(self.proxy.url, namespace=namespace, timeout="2s")
        self._stopped = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def run(self, runner: Any, *, is_worker: bool) -> None:
        if is_worker:
            self._task = asyncio.create_task(runner.run(self._stopped))
            return
        ready = asyncio.Event()
        self._task = asyncio.create_task(runner.run(self._stopped, ready=ready))
        await ready.wait()

    async def stop(self) -> None:
        self._stopped.set()
        assert self._task is not None
        await self._task
        await self.gate.aio.close()
        self.gate.close()
        self.proxy.close()

    async def kill(self) -> None:
        self.proxy.close()
        assert self._task is not None
        self._task.cancel()
        await asyncio.sleep(0.01)
        self._task.cancel()  # a second one ends the grace time of a worker
        with suppress(asyncio.CancelledError):
            await self._task
        await self.gate.aio.close()


class RedisTransport(Transport):
    """Messages in Redis under `name`. `lost_requests` are words of the requests that acknowledge."""

    is_worker = False
    lost_requests: tuple[bytes, ...] = ()

    def __init__(self, gate: Gate, url: str, raw: Any) -> None:
        super().__init__(gate)
        self.url = url
        self.raw = raw
        self.name = f"{gate.namespace}:{{contract}}"

    async def start(self, handler: Handler, *, acknowledges: bool = True) -> GateConsumer:
        consumer = GateConsumer(self.url, self.gate.namespace)
        guard = consumer.gate.once(
            key=lambda message: self.count(self.read(message)[0]),
            fingerprint=lambda message: self.read(message)[1],
            scope=SCOPE,
            lease=LEASE,
            **self.build_options(handler),
        )
        self.register(consumer.gate, guard(adapt_handler(handler, self.read)))
        for word in () if acknowledges else self.lost_requests:
            consumer.proxy.drop_request(word, times=1_000_000)
        aio = consumer.gate.aio
        runner = aio.worker(concurrency=4, grace="10s") if self.is_worker else aio.subscribers(grace="10s")
        await consumer.run(runner, is_worker=self.is_worker)
        return consumer

    def build_options(self, handler: Handler) -> dict[str, Any]:
        """Return further options of the guard."""
        return {}

    @abstractmethod
    def register(self, gate: Gate, callback: Callable[[Any], Any]) -> None:
        """Register the guarded callback."""

    @abstractmethod
    def read(self, message: Any) -> tuple[str, bytes]:
        """Return the id and the body of a message."""


class StreamTransport(RedisTransport):
    lost_requests = (b"XACK",)

    def register(self, gate: Gate, callback: Callable[[Any], Any]) -> None:
        gate.stream(self.name, group="g", reclaim="200ms", concurrency=4, max_deliveries=MAX_ATTEMPTS)(callback)

    def read(self, message: Any) -> tuple[str, bytes]:
        return message.fields["id"].decode(), message.fields["body"]

    async def publish(self, message_id: str, body: bytes) -> None:
        self.raw.xadd(self.name, {"id": message_id, "body": body})

    async def is_empty(self) -> bool:
        group = self.raw.xinfo_groups(self.name)[0]
        last = self.raw.xinfo_stream(self.name)["last-generated-id"]
        return group["pending"] == 0 and group["last-delivered-id"] == last

    async def list_dead_letters(self) -> list[bytes]:
        return [fields[b"body"] for _, fields in self.raw.xrange(f"{self.name}:dead")]


class ListTransport(RedisTransport):
    lost_requests = (script("subscribers/lists/settle").sha,)

    def register(self, gate: Gate, callback: Callable[[Any], Any]) -> None:
        gate.consume_list(self.name, reclaim="200ms", concurrency=4, max_deliveries=MAX_ATTEMPTS)(callback)

    def read(self, message: Any) -> tuple[str, bytes]:
        message_id, _, body = message.data.partition(b" ")
        return message_id.decode(), body

    async def publish(self, message_id: str, body: bytes) -> None:
        self.raw.rpush(self.name, message_id.encode() + b" " + body)

    async def is_empty(self) -> bool:
        return not self.raw.exists(*list_keys(self.name)[:-1])

    async def list_dead_letters(self) -> list[bytes]:
        import json

        letters = self.raw.lrange(list_keys(self.name)[-1], 0, -1)
        return [json.loads(letter)["data"].partition(" ")[2].encode() for letter in letters]


class ChannelTransport(RedisTransport):
    redelivers = False
    has_dead_letters = False

    def register(self, gate: Gate, callback: Callable[[Any], Any]) -> None:
        gate.subscribe(self.name)(callback)

    def read(self, message: Any) -> tuple[str, bytes]:
        message_id, _, body = message.data.partition(b" ")
        return message_id.decode(), body

    async def publish(self, message_id: str, body: bytes) -> None:
        assert self.raw.publish(self.name, message_id.encode() + b" " + body)

    async def is_empty(self) -> bool:
        return True


class TopicTransport(RedisTransport):
    is_worker = True
    lost_requests = (script("topics/settle").sha, script("topics/settle_and_take").sha)

    def _topic(self, gate: Gate) -> Any:
        return gate.topic("contract", lease="1s", backoff="100ms", max_attempts=MAX_ATTEMPTS)

    def register(self, gate: Gate, callback: Callable[[Any], Any]) -> None:
        self._topic(gate).handler(callback)

    def read(self, message: Any) -> tuple[str, bytes]:
        return message.key, message.payload

    async def publish(self, message_id: str, body: bytes) -> None:
        await self._topic(self.gate).aio.trigger(message_id, body)

    async def is_empty(self) -> bool:
        stats = await self._topic(self.gate).aio.stats()
        return stats.pending == stats.in_flight == 0

    async def list_dead_letters(self) -> list[bytes]:
        return [letter.payload for letter in await self._topic(self.gate).aio.dead.list()]
