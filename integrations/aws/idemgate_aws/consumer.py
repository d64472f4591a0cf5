"""A guarded consumer of SQS.

`SqsConsumer` holds what does not change. `_Reader` is the state of one run: it receives, runs and settles.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Unpack

from idemgate import Duration, Gate, InvalidArgument
from idemgate.core.backoff import delays
from idemgate.core.clock import monotonic
from idemgate.core.key_template import check_message_fields
from idemgate.core.scopes import scope_of
from idemgate.core.text import event_log, message_of, one_line
from idemgate.core.validation import check_int, check_parameters
from idemgate.core.verdict import choose_step
from idemgate.core.waits import wait_until_done, wait_within
from idemgate.types import BackoffPolicy, GuardOptions, KeyCallable, Verdict, check_function, check_gate, milliseconds
from idemgate_aws.message import SqsMessage, body_of
from idemgate_aws.queue import BATCH, LONGEST, SqsQueue, check_url, is_unanswered, naming_missing

__all__ = ["SqsConsumer"]

log: logging.Logger = event_log("idemgate.sqs")
MARGIN = 5.0
"""Seconds of them that a request may take. SQS refuses a longer visibility, instead of shortening it."""
LONGEST_POLL = 20
RECEIVE_PAUSES = (0.2, 1.0, 5.0)
"""Seconds between failed receives. The last one repeats."""


class SqsConsumer:
    """A consumer of a queue that runs each message once.

    Register it with `gate.add_subscriber(consumer)`: `gate.run()` and `gate.aio.subscribers()` then run it. Or await
    `consumer.run(stop)`.

    A delivery is hidden for the time of the lease, and for longer as long as its handler runs. SQS ends that after 12
    hours; the copy that it then delivers waits for the first.

    | verdict | verb |
    |---|---|
    | handled, duplicate | deleted; several deletions share a request |
    | in progress elsewhere | hidden until that claim may have ended |
    | failed, lease lost | hidden for the delay of the error, or of `backoff` |
    | rejected: each delivery would end in the same error | sent to the dead-letter queue, then deleted |

    In a FIFO queue the messages of a group run one after the other, other groups beside them. A message that is
    hidden hides those that follow it in its group. A dead letter does not.

    If the store is unavailable or a handler raises `DownstreamUnavailable`, the consumer receives nothing until the
    delay has passed, and then one message at a time until one succeeds: SQS counts each delivery.

    Args:
        gate: the gate of the claims. Its counters have `consumer.*` (see `Gate.record_settlement`) and `sqs.*`.
        client: `boto3.client("sqs")`, which is called in threads, or an open client of aiobotocore.
        url: the queue.
        handler: a function of an `SqsMessage`. A coroutine function runs in the event loop, a plain one in its own
            thread. What it returns is dropped.
        key: the id of the operation: a template such as "{message.attributes[event-id]}" or "{message.json[id]}", or
            a callable that gets the SqsMessage. "{message.id}" recognises only what SQS delivers twice.
        scope: the scope of the keys. None: the qualified name of the handler. Queues with the same messages need
            different scopes.
        fingerprint: see `gate.guard`. A copy with the same key and another fingerprint is a dead letter. By default
            it is the body. None: no fingerprint, for bodies that hold a time or a signature.
        dead_letters: the URL of the queue for rejected messages. None: that of the queue's redrive policy. A dead
            letter has the attribute `idemgate-error`.
        concurrency: the most handlers at once.
        backoff: the delays after failed attempts, as of a topic. None: full jitter from 1 s to 10 min.
        poll: how long one request waits for messages, 0 to 20 seconds. A stop waits for the request, too.
        **options: those of `gate.guard`. Without `max_attempts` the redrive policy alone ends the attempts.

    Raises:
        InvalidArgument: an argument is invalid.
    """

    def __init__(
        self,
        gate: Gate,
        client: Any,
        url: str,
        handler: Callable[[SqsMessage], object],
        *,
        key: str | KeyCallable,
        scope: str | None = None,
        fingerprint: Sequence[str] | KeyCallable | None = body_of,
        dead_letters: str | None = None,
        concurrency: int = 10,
        backoff: BackoffPolicy = None,
        poll: Duration = "20s",
        **options: Unpack[GuardOptions],
    ) -> None:
        check_gate(gate)
        check_function(handler, "handler")
        check_parameters(handler, "handler", "message")
        check_message_fields(SqsMessage, key, fingerprint)
        self._gate = gate
        self._handler = handler
        self._queue = SqsQueue(client, url)
        self._dead_letters = None if dead_letters is None else check_url("dead_letters", dead_letters)
        if self._dead_letters == self._queue.url:
            raise InvalidArgument("dead_letters", dead_letters, "the queue that is consumed", "Pass another queue")
        self._concurrency = check_int("concurrency", concurrency)
        delays(backoff)
        self._backoff: BackoffPolicy = backoff
        self._poll = _whole_seconds("poll", poll, LONGEST_POLL, zero=True)
        self._visibility = _whole_seconds("lease", options.get("lease", "30s"), LONGEST)
        self._max_attempts = options.get("max_attempts")
        given: GuardOptions = {"on_done": "skip", **options}
        name = scope_of(handler) if scope is None else scope
        self._guard = gate.guard(name, key=key, fingerprint=fingerprint, **given).aio

    def __repr__(self) -> str:
        return f"SqsConsumer({self._queue.url!r})"

    @property
    def _is_fifo(self) -> bool:
        return self._queue.url.endswith(".fifo")

    async def run(self, stop: asyncio.Event, *, grace: float = 30.0, ready: Callable[[], None] | None = None) -> None:
        """Consume until `stop` is set, then let running handlers end.

        Messages that do not run then are returned to the queue at once.

        Args:
            stop: Event that stops the consumer.
            grace: Seconds for running handlers after the stop.
            ready: Callback for the moment when it begins to receive. None: nothing waits for it.

        Raises:
            InvalidArgument: the queue or its dead-letter queue does not exist. Or the queue has no redrive policy, and
                `dead_letters` is None. Or the policy moves a message before `max_attempts` runs.
            Exception: what the client raises if it cannot read the queue's attributes: an answer of SQS at once, and no
                answer after a few tries. Later errors are retried without end.
        """
        dead_letters = await self._read_policy(stop)
        if ready is not None:
            ready()
        await _Reader(self, dead_letters, stop).run(grace)

    async def _read_policy(self, stop: asyncio.Event) -> str:
        """Return the URL of the dead-letter queue. Try a few times if SQS does not answer."""
        for pause in RECEIVE_PAUSES:
            try:
                return await self._choose_dead_letters()
            except Exception as error:
                if isinstance(error, InvalidArgument) or not is_unanswered(error):
                    raise
                _log_failure(self._queue, error)
            await wait_within(stop, pause)
        return await self._choose_dead_letters()

    async def _choose_dead_letters(self) -> str:
        queue, passed = self._queue, self._dead_letters
        with naming_missing("url", queue.url):
            answer = await queue.call("get_queue_attributes", QueueUrl=queue.url, AttributeNames=["RedrivePolicy"])
        policy = json.loads(answer.get("Attributes", {}).get("RedrivePolicy", "{}"))
        receives = int(policy.get("maxReceiveCount", 0))
        if self._max_attempts is not None and 0 < receives < self._max_attempts:
            problem = f"the redrive policy of {queue.url} moves a message after {receives} deliveries"
            fix = "Raise maxReceiveCount well above it: deliveries that run nothing count, too"
            raise InvalidArgument("max_attempts", self._max_attempts, problem, fix)
        target = passed or policy.get("deadLetterTargetArn")
        if target is None:
            problem = (
                f"{queue.url} has no redrive policy, so a message that cannot succeed would return until it expires"
            )
            fix = "Pass the URL of a dead-letter queue, or give the queue a redrive policy"
            raise InvalidArgument("dead_letters", None, problem, fix)
        *_, account, name = re.split("[:/]", target)
        with naming_missing("dead_letters", target):
            found = await queue.call("get_queue_url", QueueName=name, QueueOwnerAWSAccountId=account)
        url: str = passed or found["QueueUrl"]
        return url


class _Line:
    """Messages that run one after the other: those of a FIFO group in one batch, or one message."""

    def __init__(self, messages: list[SqsMessage], received_at: float, visibility: int) -> None:
        self.messages = messages
        self.ends = received_at + LONGEST - MARGIN
        self.hidden_until = received_at + visibility
        self.is_reported = False

    @property
    def seconds_left(self) -> int:
        """The whole seconds for which SQS may still hide the messages."""
        return max(math.floor(self.ends - monotonic()), 0)


class _Reader:
    """One run of a consumer. It receives messages for free places, runs them, and settles them."""

    def __init__(self, consumer: SqsConsumer, dead_letters: str, stop: asyncio.Event) -> None:
        self._consumer = consumer
        self._queue = consumer._queue
        self._guard = consumer._guard
        self._counters = consumer._gate.counters
        self._dead_letters = dead_letters
        self._stop = stop
        self._running = set[asyncio.Task[None]]()
        self._deletions = _Deletions(consumer._queue)
        self._error: BaseException | None = None
        self._failed_receives = 0
        self._outages = 0  # in a row
        self._resumes_at = 0.0

    # -- receive ------------------------------------------------------------------------------------------------------

    async def run(self, grace: float) -> None:
        stopped = asyncio.create_task(self._stop.wait())
        try:
            while not self._stop.is_set() and self._error is None:
                if (free := self._count_free()) > 0:
                    await self._receive(free, stopped, grace)
                else:
                    await asyncio.wait({*self._running, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if (pause := self._resumes_at - monotonic()) > 0:
                    await wait_within(self._stop, pause)
            await wait_until_done(self._running, grace, asyncio.Event())
        finally:
            stopped.cancel()
            for task in self._running:
                task.cancel()
        if self._error is not None:
            raise self._error

    def _count_free(self) -> int:
        places = 1 if self._outages else self._consumer._concurrency
        return places - len(self._running)

    async def _receive(self, free: int, stopped: asyncio.Task[Any], grace: float) -> None:
        consumer = self._consumer
        receiving = asyncio.create_task(self._queue.receive(free, consumer._poll, consumer._visibility))
        try:
            await asyncio.wait({receiving, stopped}, return_when=asyncio.FIRST_COMPLETED)
            # Not cancelled at the stop: SQS would hide what it sends until the end of its visibility.
            await asyncio.wait({receiving}, timeout=grace)
        finally:
            receiving.cancel()
        if not receiving.done():
            return
        try:
            messages = receiving.result()
        except Exception as error:  # noqa: BLE001 - SQS will be back
            await self._wait_after(error)
            return
        self._failed_receives = 0
        lines = [_Line(line, monotonic(), consumer._visibility) for line in self._to_lines(messages)]
        for line in lines:
            if self._stop.is_set():
                await self._return(line)
            else:
                self._start(line)

    def _to_lines(self, messages: Iterable[SqsMessage]) -> list[list[SqsMessage]]:
        if not self._consumer._is_fifo:
            return [[message] for message in messages]
        groups = dict[str | None, list[SqsMessage]]()
        for message in messages:
            groups.setdefault(message.group, []).append(message)
        return [*groups.values()]

    def _start(self, line: _Line) -> None:
        task = asyncio.create_task(self._run_line(line))
        self._running.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = error  # an exception of the handler that is no Exception, or a wrong backoff

    async def _return(self, line: _Line) -> None:
        """Let other consumers have messages that do not run here."""
        try:
            await self._queue.hide([(message, 0) for message in line.messages])
        except Exception:  # noqa: BLE001 - they return when their visibility ends
            self._counters.add("sqs.not_returned", len(line.messages))

    async def _wait_after(self, error: Exception) -> None:
        self._counters.add("sqs.receive_failed")
        pause = RECEIVE_PAUSES[min(self._failed_receives, len(RECEIVE_PAUSES) - 1)]
        self._failed_receives += 1
        _log_failure(self._queue, error)
        await wait_within(self._stop, pause)

    # -- run ----------------------------------------------------------------------------------------------------------

    async def _run_line(self, line: _Line) -> None:
        while line.messages:
            keep = functools.partial(self._keep, line)
            verdict = await self._guard.run(None, self._consumer._handler, line.messages[0], keep=keep)
            if not await self._settle(line, verdict):
                return
            line.messages.pop(0)
            if line.messages and not await self._may_go_on(line):
                return

    async def _may_go_on(self, line: _Line) -> bool:
        """Return True if the next message of a line may run: it is hidden for long enough."""
        if self._stop.is_set():
            await self._return(line)
            return False
        if line.hidden_until - monotonic() > self._consumer._visibility / 2:
            return True
        try:
            await self._hide(line, self._consumer._visibility)
        except Exception as error:  # noqa: BLE001 - it may be visible by now: SQS delivers it again
            self._counters.add("sqs.expired", len(line.messages))
            log.warning(
                "sqs.expired queue=%r messages=%d: %s", self._queue.url, len(line.messages),
                one_line(message_of(error)), extra={"queue": self._queue.url, "messages": len(line.messages)},
            )  # fmt: skip
            return False
        return True

    async def _keep(self, line: _Line, seconds: float) -> None:
        """Hide the message that runs, and those that wait behind it."""
        if line.seconds_left < seconds and not line.is_reported:
            line.is_reported = True
            self._counters.add("sqs.visibility_ended")
            message_id = line.messages[0].id
            log.warning(
                "sqs.visibility_ended queue=%r id=%r: SQS hides no message for more than 12 hours. It delivers a "
                "copy now, which waits for the handler", self._queue.url, message_id,
                extra={"queue": self._queue.url, "id": message_id},
            )  # fmt: skip
        if monotonic() + line.seconds_left > line.hidden_until:
            await self._hide(line, seconds)

    async def _hide(self, line: _Line, seconds: float) -> None:
        whole = min(math.ceil(seconds), line.seconds_left)
        sent_at = monotonic()
        await self._queue.hide([(message, whole) for message in line.messages])
        line.hidden_until = sent_at + whole

    # -- settle -------------------------------------------------------------------------------------------------------

    async def _settle(self, line: _Line, verdict: Verdict[Any]) -> bool:
        """Settle the first message of a line. Return True if the next one may run."""
        gate, message = self._consumer._gate, line.messages[0]
        delay = self._choose_delay(verdict)
        try:
            if verdict.action == "retry":
                # While the first one is hidden, SQS delivers none of its group.
                hidden = min(math.ceil(delay), line.seconds_left)
                await self._queue.hide([(message, hidden), *((each, 0) for each in line.messages[1:])])
            else:
                if verdict.action == "reject":
                    await self._queue.bury(message, self._dead_letters, verdict.error)
                await self._deletions.delete(message)
        except Exception as error:  # noqa: BLE001 - SQS delivers it again
            gate.record_settlement(self._guard.scope, verdict, message.id, error=error)
            return verdict.action == "ack"
        gate.record_settlement(self._guard.scope, verdict, message.id)
        return verdict.action != "retry"

    def _choose_delay(self, verdict: Verdict[Any]) -> float:
        """Return the seconds until another attempt. Receive nothing for that time if other messages would fail, too."""
        backoff = self._consumer._backoff
        if verdict.outcome != "failed" or choose_step(verdict) == "retry":
            self._outages = 0
            delay = verdict.delay(backoff)
            return max(delay, 1.0) if verdict.outcome == "in_progress" else delay  # 0 would be a hot loop
        now = monotonic()
        if now >= self._resumes_at:
            self._outages += 1
            seconds = verdict._replace(attempt=self._outages).delay(backoff)
            self._resumes_at = now + seconds
            self._counters.add("sqs.paused")
            error = verdict.error
            log.warning(
                "sqs.paused queue=%r seconds=%.1f: %s: %s", self._queue.url, seconds, type(error).__name__,
                one_line(error), extra={"queue": self._queue.url, "seconds": seconds},
            )  # fmt: skip
        return self._resumes_at - now


class _Deletions:
    """The deletions of one run. Those that come while a request is under way share the next one."""

    def __init__(self, queue: SqsQueue) -> None:
        self._queue = queue
        self._waiting: list[tuple[SqsMessage, asyncio.Future[None]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def delete(self, message: SqsMessage) -> None:
        """Delete a message. Raise what the client raises, or RefusedBySqs."""
        deleted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((message, deleted))
        if self._sender is None:
            self._sender = asyncio.create_task(self._send())
        await deleted

    async def _send(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:BATCH], self._waiting[BATCH:]
            errors: dict[int, Exception]
            try:
                errors = {**await self._queue.delete([message for message, _ in batch])}
            except Exception as error:  # noqa: BLE001 - those who wait get it
                errors = dict.fromkeys(range(len(batch)), error)
            for n, (_, deleted) in enumerate(batch):
                if deleted.done():  # its task was cancelled
                    continue
                if n in errors:
                    deleted.set_exception(errors[n])
                else:
                    deleted.set_result(None)
        self._sender = None


def _log_failure(queue: SqsQueue, error: Exception) -> None:
    log.warning(
        "sqs.receive_failed queue=%r: %s: %s", queue.url, type(error).__name__, one_line(message_of(error)),
        extra={"queue": queue.url},
    )  # fmt: skip


def _whole_seconds(name: str, value: Duration, most: int, *, zero: bool = False) -> int:
    seconds = math.ceil(milliseconds(value, name, zero=zero) / 1000)
    if seconds > most:
        raise InvalidArgument(name, value, f"longer than SQS allows, {most} seconds", "Pass a shorter one")
    return seconds
