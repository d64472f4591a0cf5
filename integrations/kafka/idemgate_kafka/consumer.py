"""A guarded consumer of Kafka.

`KafkaConsumer` holds what does not change. `_Reader` is one run of it: a member of the group, which polls. `_Lane` is a
partition while this member has it: it runs its records, settles them, and commits the first offset that is not settled.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Literal, NoReturn, Unpack

from idemgate import Gate, InvalidArgument
from idemgate.core.backoff import delays
from idemgate.core.clock import monotonic
from idemgate.core.key_template import check_message_fields
from idemgate.core.text import event_log, message_of, one_line
from idemgate.core.validation import check_int, check_parameters, is_async
from idemgate.core.verdict import choose_step
from idemgate.core.waits import finish_despite_cancel, wait_for_wakeup, wait_within
from idemgate.errors import DownstreamUnavailable
from idemgate.types import BackoffPolicy, GuardOptions, KeyCallable, Verdict, check_function, check_gate, scope_of
from idemgate_kafka.clients import ConsumerClient, Listener, ProducerClient, Settings, choose_library
from idemgate_kafka.message import Headers, KafkaMessage, Partition, build_headers, due_ms, restore_origin, value_of

__all__ = ["KafkaConsumer"]

log: logging.Logger = event_log("idemgate.kafka")
Order = Literal["key", "partition"]
POLL = 0.2
"""Seconds of one poll. A stop waits for it."""
WINDOW = 500
"""The records of a partition in memory from which it is paused. It is resumed at half of them."""
PAUSES = (0.2, 1.0, 5.0)
"""Seconds between failed requests. The last one repeats."""
ASK_AGAIN = (0.1, 1.0)
"""The least and the most seconds until a record that runs elsewhere is asked for again."""
LEAVE = 1.0
"""Seconds for which a rebalance waits for running handlers of the partitions that are taken away."""
READY = 30.0
"""Seconds after which a consumer without any partition counts as ready."""
IDLE = 60.0
"""Seconds of one wait for records."""
_ONE_BY_ONE = ("at_most_once", "cache_size", "on_error", "retry", "shadow", "sink")
"""The options of a guard with which records do not share round trips."""


class _GivenUp(DownstreamUnavailable):
    """A record of a batch that did not start, because the consumer stops or the partition was taken away."""


class _NotCommitted(Exception):
    """The lane ended before the offset of a settled record could be committed."""


class KafkaConsumer:
    """A consumer of topics that runs each record once.

    Register it with `gate.add_subscriber(consumer)`: `gate.run()` and `gate.aio.subscribers()` then run it. Or await
    `consumer.run(stop)`. It makes its own clients, and commits by itself: an offset is committed when all records
    before it are settled.

    | verdict | verb |
    |---|---|
    | handled, duplicate | settled: its offset may be committed |
    | in progress elsewhere | asked for again within a second, until that run has ended |
    | failed | run again after the delay of the error, or of `backoff`; with `retry_topic` produced there, and settled |
    | lease lost | run again after the delay |
    | rejected: each further run would end in the same error | produced to `dead_topic`, and settled |

    If the store is unavailable or a handler raises `DownstreamUnavailable`, the partition waits, and then one record at
    a time tests the service. Partitions run at once. A partition that waits is polled all the same, so a long handler
    does not end the membership in the group.

    Args:
        gate: the gate of the claims. Its counters have `consumer.*` (see `Gate.record_settlement`) and `kafka.*`.
        settings: those of `AIOKafkaConsumer`, such as {"bootstrap_servers": ..., "group_id": ...}, or those of
            confluent-kafka, such as {"bootstrap.servers": ..., "group.id": ...}. The group is required. The consumer
            commits itself, and a new group starts at the earliest record unless the settings say otherwise. The
            producer of dead letters and retries gets those that fit.
        topics: the topic, or several.
        handler: a function of a `KafkaMessage`. A coroutine function runs in the event loop, a plain one in its own
            thread, with both libraries. What it returns is dropped.
        key: the id of the operation: a template such as "{message.headers[event-id]}" or "{message.json[id]}", or a
            callable that gets the KafkaMessage. "{message.id}" recognises only what Kafka delivers twice: a producer
            that sends again makes another offset.
        dead_topic: the topic for rejected records, with the headers `idemgate-error` and `idemgate-origin`. None: they
            are logged with their offset, counted and passed over.
        retry_topic: a topic for failed records, which this consumer reads, too. It belongs to one group. None: a failed
            record stays where it is.
        scope: the scope of the keys. None: the qualified name of the handler. Groups that read the same records need
            different scopes.
        fingerprint: see `gate.guard`. A record with the same key and another fingerprint is rejected. By default it is
            the value. None: no fingerprint, for values that hold a time or a signature.
        order: what a record that waits holds up: "key", the records with the same record key, or "partition", all that
            follow. The commit waits in both cases. With "key" up to 500 later records may be done before it.
        batch: the most records of a partition whose claims travel together, and which a killed consumer may run again.
            With order="partition" and with some options of the guard it is always 1: `at_most_once`, `cache_size`,
            `on_error`, `retry`, `shadow` and `sink`.
        concurrency: the most handlers at once for each partition, up to `batch`.
        backoff: the delays after failed attempts, as of a topic. None: full jitter from 1 s to 10 min.
        **options: those of `gate.guard`. Without `max_attempts` a record that always fails is retried for ever.

    Raises:
        InvalidArgument: an argument is invalid.
        ImportError: the library of the settings is not installed.
    """

    def __init__(
        self,
        gate: Gate,
        settings: Settings,
        topics: str | Sequence[str],
        handler: Callable[[KafkaMessage], object],
        *,
        key: str | KeyCallable,
        dead_topic: str | None,
        retry_topic: str | None = None,
        scope: str | None = None,
        fingerprint: Sequence[str] | KeyCallable | None = value_of,
        order: Order = "key",
        batch: int = 10,
        concurrency: int = 1,
        backoff: BackoffPolicy = None,
        **options: Unpack[GuardOptions],
    ) -> None:
        check_gate(gate)
        check_function(handler, "handler")
        check_parameters(handler, "handler", "message")
        self._gate = gate
        self._handler = handler
        self._library = choose_library(settings)
        _check_group(settings, self._library.group, self._library.auto_commit)
        self._settings = settings
        self._topics = _check_topics(topics, dead_topic, retry_topic)
        self._dead_topic, self._retry_topic = dead_topic, retry_topic
        self._make_consumer()  # checks the settings
        self._group: tuple[Any, Any] = settings[self._library.servers], settings[self._library.group]
        check_message_fields(KafkaMessage, key, fingerprint)
        if order not in ("key", "partition"):
            raise InvalidArgument("order", order, "unknown choice", "Use 'key' or 'partition'")
        self._by_key = order == "key"
        self._batch = check_int("batch", batch, 1)
        self._concurrency = check_int("concurrency", concurrency, 1)
        if not self._by_key or any(options.get(name) for name in _ONE_BY_ONE):
            self._batch = 1
        delays(backoff)
        self._backoff: BackoffPolicy = backoff
        given: GuardOptions = {"on_done": "skip", **options}
        name = scope_of(handler) if scope is None else scope
        self._guard = gate.guard(name, key=key, fingerprint=fingerprint, **given).aio

    def __repr__(self) -> str:
        return f"KafkaConsumer({', '.join(map(repr, self._topics))})"

    async def run(self, stop: asyncio.Event, *, grace: float = 30.0, ready: Callable[[], None] | None = None) -> None:
        """Consume until `stop` is set, then let running handlers end, commit, and leave the group.

        Args:
            stop: Event that stops the consumer.
            grace: Seconds for running handlers after the stop.
            ready: Callback for the moment when it has its partitions, or has got none for 30 s. None: nothing waits for
                it.

        Raises:
            InvalidArgument: a topic is missing, also the one for dead letters or retries. Or another group of the gate
                reads one of the topics with the same scope.
            Exception: what the client raises if it cannot connect after a few tries, or what no further try would mend,
                such as a missing permission. Other errors are retried without end.
        """
        self._check_groups()
        await _Reader(self, stop).run(grace, ready)

    def _check_groups(self) -> None:
        """Raise InvalidArgument if another group of the gate has the same scope: each would drop what the other did."""
        scope, (servers, group) = self._guard.scope, self._group
        for other in self._gate.subscribers:
            if not isinstance(other, KafkaConsumer) or (other._guard.scope, other._group[0]) != (scope, servers):
                continue
            shared = [topic for topic in self._topics if topic in other._topics]
            if shared and other._group[1] != group:
                groups = f"{group!r} and {other._group[1]!r}"
                problem = f"the groups {groups} both read {shared[0]!r}, so a record would run in one of them only"
                raise InvalidArgument("scope", scope, problem, "Pass a scope of its own to one of them")

    def _make_consumer(self) -> ConsumerClient:
        return self._library.make_consumer(self._settings)

    def _make_producer(self) -> ProducerClient | None:
        if self._dead_topic is None and self._retry_topic is None:
            return None
        return self._library.make_producer(self._settings)

    def _check_found(self, found: Collection[str]) -> None:
        """Raise InvalidArgument if the cluster lacks a topic."""
        named = [("topics", each) for each in self._topics]
        named += [("dead_topic", self._dead_topic or ""), ("retry_topic", self._retry_topic or "")]
        for name, topic in named:
            if topic and topic not in found:
                fix = "Create it, or allow this client to describe it"
                raise InvalidArgument(name, topic, "the cluster has no such topic", fix)


class _Record:
    """A record from its arrival until its offset is committed. `verdict` is set once it is settled."""

    __slots__ = ("message", "next_offset", "ready_at", "verdict")

    def __init__(self, message: KafkaMessage, next_offset: int, ready_at: float) -> None:
        self.message = message
        self.next_offset = next_offset
        self.ready_at = ready_at
        self.verdict: Verdict[Any] | None = None


class _Reader:
    """One run of a consumer: a member of the group, its producer, and a lane for each partition that it has."""

    def __init__(self, consumer: KafkaConsumer, stop: asyncio.Event) -> None:
        self.consumer = consumer
        self.gate = consumer._gate
        self.client = consumer._make_consumer()
        self.producer = consumer._make_producer()
        self.commits = _Commits(self.client)
        self._stop = stop
        self._lanes = dict[Partition, _Lane]()
        self._running = set[asyncio.Task[None]]()
        self._has_joined = False
        self._failed_polls = 0
        self._error: BaseException | None = None

    async def run(self, grace: float, ready: Callable[[], None] | None) -> None:
        try:
            if await self._connect():
                await self._read(ready)
                await self._drain(grace)
        finally:
            for task in self._running:
                task.cancel()
            self.commits.cancel()
            await finish_despite_cancel(self._close())
        if self._error is not None:
            raise self._error

    async def _connect(self) -> bool:
        """Connect. Try a few times if the broker does not answer. Return False at the stop."""
        for pause in (*PAUSES, None):
            try:
                found = await self.client.open(self._listen_to(), Listener(self._gain, self._lose))
                self.consumer._check_found(found)
                if self.producer is not None:
                    await self.producer.open()
            except Exception as error:
                if pause is None or not self.consumer._library.is_unanswered(error):
                    raise
                self.report("connect_failed", error)
                await self._close()
                self.client, self.producer = self.consumer._make_consumer(), self.consumer._make_producer()
                self.commits = _Commits(self.client)
            else:
                return True
            await wait_within(self._stop, pause)
            if self._stop.is_set():
                break
        return False

    def _listen_to(self) -> list[str]:
        retry = self.consumer._retry_topic
        return [*self.consumer._topics, *([retry] if retry else [])]

    async def _close(self) -> None:
        await self.client.close()
        if self.producer is not None:
            await self.producer.close()

    async def _read(self, ready: Callable[[], None] | None) -> None:
        began = monotonic()
        while not self._stop.is_set() and self._error is None:
            found = await self._poll()
            # Without an await, in which a lane could end and another one begin at an earlier record.
            lanes = [lane for each, messages in found if (lane := self._lanes.get(each)) and lane.add(messages)]
            for lane in lanes:
                await lane.pause()
            if ready is not None and (self._has_joined or monotonic() > began + READY):
                ready()
                ready = None

    async def _poll(self) -> list[tuple[Partition, list[KafkaMessage]]]:
        try:
            found = await self.client.poll(POLL, WINDOW)
        except Exception as error:
            if self.consumer._library.is_permanent(error):
                raise
            pause = PAUSES[min(self._failed_polls, len(PAUSES) - 1)]
            self._failed_polls += 1
            self.report("poll_failed", error)
            await wait_within(self._stop, pause)
            return []
        self._failed_polls = 0
        return found

    async def _drain(self, grace: float) -> None:
        """Let the lanes end what runs. Poll on, so that a rebalance does not wait for it."""
        end = monotonic() + grace
        for lane in self._lanes.values():
            lane.leave()
        await self.client.pause([*self._lanes])
        while self._running and monotonic() < end and self._error is None:
            polling = asyncio.create_task(self._poll())
            await asyncio.wait({polling, *self._running}, return_when=asyncio.FIRST_COMPLETED)
            await polling

    # -- rebalances ---------------------------------------------------------------------------------------------------

    async def _gain(self, partitions: Sequence[Partition]) -> None:
        for partition in partitions:
            if partition not in self._lanes and not self._stop.is_set():
                lane = self._lanes[partition] = _Lane(self, partition)
                lane.task = task = asyncio.create_task(lane.run())
                self._running.add(task)
                task.add_done_callback(self._end)
        self._has_joined = True

    async def _lose(self, partitions: Sequence[Partition], is_lost: bool) -> None:
        """Settle what is done. The next owner gets the rest: it waits for what still runs here."""
        lanes = [lane for each in partitions if (lane := self._lanes.pop(each, None)) is not None]
        for lane in lanes:
            lane.leave()
            lane.is_owned = not is_lost
        if tasks := [lane.task for lane in lanes if lane.task is not None and not lane.task.done()]:
            await asyncio.wait(tasks, timeout=LEAVE)
        for lane in lanes:
            lane.is_owned = False

    def _end(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = _unwrap(error)  # an exception of the handler that is no Exception, or a wrong backoff

    def report(self, event: str, error: BaseException, partition: Partition | None = None, **facts: object) -> None:
        """Count and log what concerns no single record."""
        self.gate.counters.add(f"kafka.{event}")
        named = {"topic": partition.topic, "partition": partition.number} if partition else {
            "topic": ",".join(self.consumer._topics)
        }  # fmt: skip
        shown = " ".join(f"{name}={value!r}" for name, value in {**named, **facts}.items())
        text = one_line(message_of(error))
        log.warning("kafka.%s %s: %s: %s", event, shown, type(error).__name__, text, extra={**named, **facts})


class _Lane:
    """A partition while this consumer has it. `records` are those from the first that is not settled."""

    def __init__(self, reader: _Reader, partition: Partition) -> None:
        self._reader, self._consumer, self._gate = reader, reader.consumer, reader.gate
        self.partition = partition
        self.task: asyncio.Task[None] | None = None
        self.is_owned = True
        self._leaving = asyncio.Event()
        self._wake = asyncio.Event()
        self._records = deque[_Record]()
        self._settled = list[_Record]()
        self._in_flight = list[_Record]()
        self._committing: asyncio.Task[None] | None = None
        self._offset = self._committed = -1
        self._next_commit = self._next_run = 0.0
        self._is_paused = False
        self._outages = 0  # in a row
        self._resumes_at = 0.0
        self._work = self._adapt(reader.consumer._handler)

    def add(self, messages: Sequence[KafkaMessage]) -> bool:
        """Add records that were polled. Return True if these are enough."""
        if self._leaving.is_set():
            return False
        for each in messages:
            if self.partition.topic == self._consumer._retry_topic:
                wait = due_ms(each) / 1000 - time.time()
                self._records.append(_Record(restore_origin(each), each.offset + 1, monotonic() + max(wait, 0.0)))
            else:
                self._records.append(_Record(each, each.offset + 1, 0.0))
        self._wake.set()
        return len(self._records) >= WINDOW

    async def pause(self) -> None:
        """Get no more records, until half of them are committed."""
        self._is_paused = True
        await self._reader.client.pause([self.partition])
        self._wake.set()  # they may be settled by now

    def leave(self) -> None:
        """Start no more records, and end."""
        self._leaving.set()
        self._wake.set()

    async def run(self) -> None:
        """Run the records as they come, until `leave`."""
        try:
            while not self._leaving.is_set():
                if chosen := self._choose():
                    await self._run_batch(chosen)
                self._take_settled()
                await self._resume()
                if self._may_commit() and self._committing is None and monotonic() >= self._next_commit:
                    self._committing = asyncio.create_task(self._commit())  # beside the next batch
                if not chosen:
                    await wait_for_wakeup(self._wake, self._seconds_to_wait())
            if self._committing is not None:
                await asyncio.wait({self._committing})
            self._take_settled()
            if self._may_commit():
                await self._commit()
        finally:
            if self._committing is not None:
                self._committing.cancel()
            left = [*self._in_flight, *self._settled, *(each for each in self._records if each.verdict is not None)]
            self._record(left, _NotCommitted("the partition was given back before its offset could be committed"))

    def _seconds_to_wait(self) -> float:
        until = self._next_run
        if self._may_commit() and self._committing is None:
            until = min(until, self._next_commit)
        return until - monotonic()

    # -- run ----------------------------------------------------------------------------------------------------------

    def _choose(self) -> list[_Record]:
        """Return records that may run now: of each record key the first, or the first of the partition."""
        now, most = monotonic(), 1 if self._outages else self._consumer._batch
        chosen, taken = list[_Record](), set[bytes]()
        self._next_run = now + IDLE
        if now < self._resumes_at:
            self._next_run = self._resumes_at
            return chosen
        for record in self._records:
            key = record.message.key if self._consumer._by_key else b""
            if record.verdict is not None or key in taken:
                continue
            if record.ready_at > now:
                self._next_run = min(self._next_run, record.ready_at)
            else:
                chosen.append(record)
                if len(chosen) == most:
                    break
            if key is not None:
                taken.add(key)
        return chosen

    async def _run_batch(self, records: Sequence[_Record]) -> None:
        verdicts = await self._consumer._guard.run_many(
            [(None, record.message) for record in records], self._work, concurrency=self._consumer._concurrency
        )
        for record, verdict in zip(records, verdicts, strict=True):
            if not isinstance(verdict.error, _GivenUp):
                await self._settle(record, verdict)

    def _adapt(self, handler: Callable[[KafkaMessage], Any]) -> Callable[[KafkaMessage], Any]:
        """Return the handler as a batch calls it. Once the lane ends, the rest of its batch does not start."""
        if self._consumer._batch == 1:
            return handler

        def refuse() -> NoReturn:
            raise _GivenUp("this consumer stops, or its partition was taken away")

        if is_async(handler):

            async def work_async(message: KafkaMessage) -> Any:
                return refuse() if self._leaving.is_set() else await handler(message)

            return work_async

        def work(message: KafkaMessage) -> Any:
            return refuse() if self._leaving.is_set() else handler(message)

        return work

    # -- settle -------------------------------------------------------------------------------------------------------

    async def _settle(self, record: _Record, verdict: Verdict[Any]) -> None:
        step = choose_step(verdict)
        if verdict.outcome == "failed" and step != "retry":
            self._wait_for_service(verdict)
        else:
            self._outages = 0
        if verdict.action == "retry" and not (step == "retry" and self._consumer._retry_topic):
            if not self._outages:
                record.ready_at = monotonic() + self._choose_delay(verdict)
            self._record([record], None, verdict)
        elif verdict.action == "ack" or await self._pass_on(record.message, verdict):
            record.verdict = verdict

    def _choose_delay(self, verdict: Verdict[Any]) -> float:
        if verdict.outcome != "in_progress":
            return verdict.delay(self._consumer._backoff)
        least, most = ASK_AGAIN
        return min(max(verdict.retry_after or 0.0, least), most)

    def _wait_for_service(self, verdict: Verdict[Any]) -> None:
        """Run nothing until the delay has passed: the next record would fail, too."""
        now = monotonic()
        if now >= self._resumes_at and verdict.error is not None:
            self._outages += 1
            delay = verdict._replace(attempt=self._outages).delay(self._consumer._backoff)
            seconds = max(delay, ASK_AGAIN[0])  # 0 would be a hot loop
            self._resumes_at = now + seconds
            self._reader.report("paused", verdict.error, self.partition, seconds=round(seconds, 1))

    async def _pass_on(self, message: KafkaMessage, verdict: Verdict[Any]) -> bool:
        """Produce a record to the retry topic or the dead-letter topic. Return False if it was not possible in time."""
        if verdict.action == "reject":
            topic, build = self._consumer._dead_topic, functools.partial(build_headers, message)
            return topic is None or await self._send(topic, message, build, verdict)
        due = int((time.time() + verdict.delay(self._consumer._backoff)) * 1000)

        build = functools.partial(build_headers, message, attempt=verdict.attempt, due=due)
        return await self._send(self._consumer._retry_topic or "", message, build, verdict)

    async def _send(
        self, topic: str, message: KafkaMessage, build: Callable[[BaseException | None], Headers], verdict: Verdict[Any]
    ) -> bool:
        assert self._reader.producer is not None
        told: BaseException | None = verdict.error
        failures = 0
        while True:
            try:
                await self._reader.producer.send(topic, message.key, message.value, build(told))
            except Exception as error:  # noqa: BLE001 - the record waits, and so does its partition
                if told is not None and self._consumer._library.is_too_large(error):
                    told = None  # its text has no room
                    continue
                self._reader.report("send_failed", error, self.partition, to=topic, id=message.id)
                await wait_within(self._leaving, PAUSES[min(failures, len(PAUSES) - 1)])
                if self._leaving.is_set():
                    return False
                failures += 1
            else:
                return True

    # -- commit -------------------------------------------------------------------------------------------------------

    def _take_settled(self) -> None:
        """Take the settled records from the beginning. The offset behind them may be committed."""
        while self._records and self._records[0].verdict is not None:
            record = self._records.popleft()
            self._settled.append(record)
            self._offset = record.next_offset

    async def _resume(self) -> None:
        if self._is_paused and len(self._records) <= WINDOW // 2 and not self._leaving.is_set():
            self._is_paused = False
            await self._reader.client.resume(self.partition)

    def _may_commit(self) -> bool:
        return self._offset > self._committed and self.is_owned

    async def _commit(self) -> None:
        """Commit the offset of the first record that is not settled."""
        offset, self._in_flight, self._settled = self._offset, self._settled, []
        failure: Exception | None = None
        try:
            await self._reader.commits.commit(self.partition, offset)
            self._committed = offset
        except Exception as error:  # noqa: BLE001 - the next commit covers it, or the next owner gets the records
            self._next_commit = monotonic() + PAUSES[1]
            failure = error
        records, self._in_flight = self._in_flight, []
        self._record(records, failure)
        self._committing = None
        self._wake.set()

    def _record(
        self, records: Sequence[_Record], error: BaseException | None, verdict: Verdict[Any] | None = None
    ) -> None:
        for record in records:
            if (found := verdict or record.verdict) is not None:
                self._gate.record_settlement(self._consumer._guard.scope, found, record.message.id, error=error)


class _Commits:
    """The commits of one run. Those that come while a request is under way share the next one."""

    def __init__(self, client: ConsumerClient) -> None:
        self._client = client
        self._waiting = dict[Partition, tuple[int, asyncio.Future[None]]]()
        self._sender: asyncio.Task[None] | None = None

    async def commit(self, partition: Partition, offset: int) -> None:
        """Commit an offset. A partition waits for one commit at a time. Raise what the client raises."""
        committed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[partition] = offset, committed
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        await committed

    async def _send(self) -> None:
        while self._waiting:
            sent, self._waiting = self._waiting, {}
            failure: Exception | None = None
            try:
                await self._client.commit({partition: offset for partition, (offset, _) in sent.items()})
            except Exception as error:  # noqa: BLE001 - those who wait get it
                failure = error
            for _, committed in sent.values():
                if committed.done():  # its task was cancelled
                    continue
                if failure is not None:
                    committed.set_exception(failure)
                else:
                    committed.set_result(None)

    def cancel(self) -> None:
        if self._sender is not None:
            self._sender.cancel()


def _unwrap(error: BaseException) -> BaseException:
    """Return the exception of a handler from the group that the task group of a batch makes of it."""
    inner: tuple[BaseException, ...] = getattr(error, "exceptions", ())
    return _unwrap(inner[0]) if len(inner) == 1 else error


def _check_group(settings: Settings, group: str, auto_commit: str) -> None:
    if not isinstance(name := settings.get(group), str) or not name:
        fix = "Pass the name of the consumer group, which stores the offsets"
        raise InvalidArgument(f"settings[{group!r}]", name, "not the name of a group", fix)
    if settings.get(auto_commit) not in (None, False, "false"):
        fix = "Leave it out: an offset is committed when its records are settled"
        raise InvalidArgument(f"settings[{auto_commit!r}]", settings[auto_commit], "loses records", fix)


def _check_topics(topics: object, dead_topic: object, retry_topic: object) -> list[str]:
    """Return the topics. Raise InvalidArgument."""
    given: Any = [topics] if isinstance(topics, str) else topics
    names: list[Any] = [*given] if isinstance(given, Iterable) else []
    if not names or not all(isinstance(each, str) and each for each in names):
        raise InvalidArgument("topics", topics, "not the name of a topic, or several", "Pass text or a list of texts")
    used = list(names)
    for name, topic in (("dead_topic", dead_topic), ("retry_topic", retry_topic)):
        if topic is None:
            continue
        if not isinstance(topic, str) or not topic:
            raise InvalidArgument(name, topic, "not the name of a topic", "Pass text, or None")
        if topic in used:
            raise InvalidArgument(name, topic, "is read or used already", "Pass the name of another topic")
        used.append(topic)
    return names
