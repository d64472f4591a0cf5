"""The clients of confluent-kafka. They block, so they are called in threads of their own."""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition

from idemgate.core.clock import monotonic
from idemgate_kafka.clients import Listener, Records, Settings
from idemgate_kafka.message import Headers, KafkaMessage, Partition

__all__ = ["ConfluentLibrary"]

R = TypeVar("R")
REQUEST_MS = 10_000
"""The patience of requests, unless the settings have another one."""
SLICE = 0.02
"""Seconds of one call that waits for records, between which the other calls of a consumer have their turn."""
POLL = 0.1
"""Seconds of one wait for the answers to a producer."""
_OF_CONSUMERS = (
    "auto.", "check.crcs", "client.rack", "consume.", "coordinator.", "enable.auto.", "enable.partition.eof", "fetch.",
    "group.", "heartbeat.", "isolation.level", "max.partition.", "max.poll.", "offset.", "partition.assignment.",
    "queued.m", "session.",
)  # fmt: skip
"""The beginnings of the settings that a producer warns about."""
_OUTAGES = (
    KafkaError._TRANSPORT, KafkaError._MSG_TIMED_OUT, KafkaError._TIMED_OUT, KafkaError._TIMED_OUT_QUEUE,
    KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE, KafkaError._QUEUE_FULL, KafkaError.REQUEST_TIMED_OUT,
    KafkaError.NOT_ENOUGH_REPLICAS, KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND, KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.COORDINATOR_NOT_AVAILABLE, KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
)  # fmt: skip
_PERMANENT = (
    KafkaError._FATAL, KafkaError._AUTHENTICATION, KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE,
    KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED, KafkaError.SASL_AUTHENTICATION_FAILED, KafkaError.UNSUPPORTED_VERSION,
)  # fmt: skip
_TOO_LARGE = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_RECORD)


class ConfluentLibrary:
    servers = "bootstrap.servers"
    group = "group.id"
    auto_commit = "enable.auto.commit"

    def make_consumer(self, settings: Settings) -> ConfluentConsumer:
        return ConfluentConsumer(settings)

    def make_producer(self, settings: Settings) -> ConfluentProducer:
        return ConfluentProducer({name: each for name, each in settings.items() if not name.startswith(_OF_CONSUMERS)})

    def is_unanswered(self, error: Exception) -> bool:
        return isinstance(error, BufferError) or _code_of(error) in _OUTAGES

    def is_permanent(self, error: Exception) -> bool:
        return not isinstance(error, KafkaException) or error.args[0].fatal() or _code_of(error) in _PERMANENT

    def is_too_large(self, error: Exception) -> bool:
        return _code_of(error) in _TOO_LARGE


def _code_of(error: Exception) -> int | None:
    return error.args[0].code() if isinstance(error, KafkaException) else None


class _Thread:
    """The thread of a consumer. All calls run in it: a commit of another thread would wait for the end of a poll."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs = SimpleQueue[Callable[[], None] | None]()
        threading.Thread(target=self._work, name="idemgate-kafka", daemon=True).start()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def stop(self) -> None:
        """End the thread after the calls that wait."""
        self._jobs.put(None)

    async def run(self, call: Callable[..., R], *args: Any, **options: Any) -> R:
        """Run a call, and return or raise what it does."""
        ended: Future[R] = Future()

        def job() -> None:
            try:
                ended.set_result(call(*args, **options))
            except BaseException as error:  # noqa: BLE001 - it is raised in the event loop
                ended.set_exception(error)

        self._jobs.put(job)
        return await asyncio.shield(asyncio.wrap_future(ended))

    def wait_for(self, made: Coroutine[Any, Any, None]) -> None:
        """Wait, in this thread, for the event loop. Run the calls that it makes meanwhile, such as a commit."""
        waiting = asyncio.run_coroutine_threadsafe(made, self._loop)
        while not waiting.done():
            with suppress(Empty):
                job = self._jobs.get(timeout=SLICE)
                if job is not None:
                    job()
        waiting.result()


class ConfluentConsumer:
    """A consumer. Rebalances happen inside `poll`, whose thread then waits for the event loop."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._thread: _Thread | None = None
        self._client: Any = None
        self._failure: Exception | None = None

    async def open(self, topics: Sequence[str], listener: Listener) -> set[str]:
        thread = self._thread = _Thread()

        async def assigned(partitions: Sequence[TopicPartition]) -> None:
            await listener.assigned(_to_partitions(partitions))

        async def revoked(partitions: Sequence[TopicPartition], is_lost: bool) -> None:
            await listener.revoked(_to_partitions(partitions), is_lost)

        def connect() -> set[str]:
            client = self._client = Consumer(
                {
                    "auto.offset.reset": "earliest", "logger": logging.getLogger("confluent_kafka"), **self._settings,
                    "enable.auto.commit": False,
                }
            )  # fmt: skip
            found = {*client.list_topics(timeout=REQUEST_MS / 1000).topics}
            client.subscribe(
                [*topics],
                on_assign=lambda _, given: thread.wait_for(assigned(given)),
                on_revoke=lambda _, taken: thread.wait_for(revoked(taken, False)),
                on_lost=lambda _, lost: thread.wait_for(revoked(lost, True)),
            )
            return found

        return await thread.run(connect)

    async def poll(self, seconds: float, most: int) -> Records:
        if (failure := self._failure) is not None:
            self._failure = None
            raise failure
        messages, end = list[Message](), monotonic() + seconds
        while not messages and monotonic() < end:
            messages = await self._run(self._read, most)
        found = dict[Partition, list[KafkaMessage]]()
        for message in messages:
            if (error := message.error()) is None:
                made = _to_message(message)
                found.setdefault(Partition(made.topic, made.partition), []).append(made)
            elif error.code() != KafkaError._PARTITION_EOF:
                self._failure = KafkaException(error)  # raised by the next poll, because the others do not come again
        return [*found.items()]

    def _read(self, most: int) -> list[Message]:
        """Wait for a record, and take the others that are here. `consume` alone would wait until there are enough."""
        first: Message | None = self._client.poll(SLICE)
        if first is None:
            return []
        try:
            return [first, *self._client.consume(most - 1, 0)]
        except Exception as error:  # noqa: BLE001 - as below
            self._failure = error
            return [first]

    async def pause(self, partitions: Sequence[Partition]) -> None:
        for each in partitions:
            with suppress(KafkaException):  # it was lost
                await self._run(self._client.pause, [TopicPartition(*each)])

    async def resume(self, partition: Partition) -> None:
        with suppress(KafkaException):
            await self._run(self._client.resume, [TopicPartition(*partition)])

    async def commit(self, offsets: Mapping[Partition, int]) -> None:
        sent = [TopicPartition(*each, offset) for each, offset in offsets.items()]
        for each in await self._run(self._client.commit, offsets=sent, asynchronous=False):
            if each.error is not None:
                raise KafkaException(each.error)

    async def close(self) -> None:
        if self._thread is not None:
            if self._client is not None:
                await self._run(self._client.close)
            self._thread.stop()

    async def _run(self, call: Callable[..., R], *args: Any, **options: Any) -> R:
        assert self._thread is not None, "not open"
        return await self._thread.run(call, *args, **options)


def _to_partitions(partitions: Sequence[TopicPartition]) -> list[Partition]:
    return [Partition(each.topic, each.partition) for each in partitions]


def _to_message(message: Message) -> KafkaMessage:
    given: Any = message.headers() or ()
    kind, timestamp = message.timestamp()
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    assert topic is not None
    assert partition is not None
    assert offset is not None
    headers = tuple((name, value or b"") for name, value in given)
    return KafkaMessage(topic, partition, offset, message.key(), message.value(), headers, timestamp if kind else None)


class ConfluentProducer:
    def __init__(self, settings: Settings) -> None:
        patience = {} if settings.keys() & {"message.timeout.ms", "delivery.timeout.ms"} else {
            "message.timeout.ms": REQUEST_MS
        }  # fmt: skip
        self._settings = {"logger": logging.getLogger("confluent_kafka"), "acks": "all", **patience, **settings}
        self._polls = ThreadPoolExecutor(1, "idemgate-kafka-send")
        self._client: Producer | None = None
        self._waiting = 0
        self._poller: asyncio.Task[None] | None = None

    async def open(self) -> None:
        client = self._client = Producer(self._settings)
        await asyncio.get_running_loop().run_in_executor(
            self._polls, functools.partial(client.list_topics, timeout=REQUEST_MS / 1000)
        )

    async def send(self, topic: str, key: bytes | None, value: bytes | None, headers: Headers) -> None:
        assert self._client is not None, "not open"
        loop = asyncio.get_running_loop()
        sent: asyncio.Future[None] = loop.create_future()

        def answer(error: KafkaError | None) -> None:
            if sent.done():
                return
            if error is None:
                sent.set_result(None)
            else:
                sent.set_exception(KafkaException(error))

        def on_delivery(error: KafkaError | None, _: object) -> None:
            loop.call_soon_threadsafe(answer, error)

        self._client.produce(topic, value=value, key=key, headers=[*headers], on_delivery=on_delivery)
        self._waiting += 1
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll(self._client))
        try:
            await sent
        finally:
            self._waiting -= 1

    async def _poll(self, client: Producer) -> None:
        """Let the library call back while anybody waits."""
        while self._waiting:
            await asyncio.get_running_loop().run_in_executor(self._polls, client.poll, POLL)

    async def close(self) -> None:
        if self._poller is not None:
            self._poller.cancel()
        self._client = None
        self._polls.shutdown(wait=False)
