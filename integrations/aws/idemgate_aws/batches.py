"""Batches of SQS messages in AWS Lambda, with partial batch responses."""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from threading import Thread
from typing import Any, Unpack

from idemgate import Gate, Guard, InvalidArgument
from idemgate.core.backoff import delays
from idemgate.core.key_template import check_message_fields
from idemgate.core.scopes import scope_of
from idemgate.core.validation import check_parameters, is_async
from idemgate.types import BackoffPolicy, GuardOptions, KeyCallable, Verdict, check_function, check_gate, milliseconds
from idemgate_aws.message import SqsMessage, body_of, build_dead_letter
from idemgate_aws.queue import LONGEST, check_client, check_url

__all__ = ["lambda_batch"]

LEAST_MS = 1_000
"""The time that must be left of the invocation to start another message."""


def lambda_batch(
    gate: Gate,
    handler: Callable[[SqsMessage], object],
    *,
    key: str | KeyCallable,
    scope: str | None = None,
    fingerprint: Sequence[str] | KeyCallable | None = body_of,
    client: Any = None,
    dead_letters: str | None = None,
    backoff: BackoffPolicy = None,
    **options: Unpack[GuardOptions],
) -> Callable[[dict[str, Any], Any], dict[str, list[dict[str, str]]]]:
    """Return a Lambda function for the messages of an SQS trigger: each message runs once.

    It returns the messages that must come again as `batchItemFailures`; Lambda deletes the others. **The event source
    mapping needs `ReportBatchItemFailures`.** Without it Lambda ignores the answer and deletes failed messages, too.

    The messages run one after the other. With a coroutine function those of a standard queue run at once. In a FIFO
    queue all messages after the first failure fail without a run. So do those for which less than a second is left.
    `max_run` is the time that is left of the invocation: no lease is renewed after its end.

    | verdict | Lambda gets |
    |---|---|
    | handled, duplicate | nothing: it deletes the message |
    | rejected, with `dead_letters` | the same, after the message was sent to that queue |
    | rejected, without it | a failure, so that the redrive policy moves the message in the end |
    | failed, lease lost, in progress elsewhere | a failure; with `client` the message is hidden for its delay |

    Args:
        gate: the gate of the claims, made outside the function. Its counters have `consumer.*` and
            `lambda.not_started`.
        handler: a function of an `SqsMessage`. A coroutine function runs in an event loop that stays between
            invocations.
        key, scope, fingerprint, backoff: see `SqsConsumer`.
        client: `boto3.client("sqs")`, for delays and dead letters. None: a failed message returns when the queue's
            visibility timeout ends.
        dead_letters: the URL of the queue for rejected messages, which needs `client`.
        **options: those of `gate.guard`.

    Returns:
        A function of an event and a context. It raises InvalidArgument for the event of another trigger.

    Raises:
        InvalidArgument: an argument is invalid.
    """
    return _Batches(gate, handler, key, scope, fingerprint, client, dead_letters, backoff, options).run


class _Batches:
    """One Lambda function."""

    def __init__(
        self,
        gate: Gate,
        handler: Callable[[SqsMessage], object],
        key: str | KeyCallable,
        scope: str | None,
        fingerprint: Sequence[str] | KeyCallable | None,
        client: Any,
        dead_letters: str | None,
        backoff: BackoffPolicy,
        options: GuardOptions,
    ) -> None:
        check_gate(gate)
        check_function(handler, "handler")
        check_parameters(handler, "handler", "message")
        check_message_fields(SqsMessage, key, fingerprint)
        delays(backoff)
        if client is not None:
            check_client(client)
        elif dead_letters is not None:
            raise InvalidArgument("client", None, "needed for dead_letters", 'Pass client=boto3.client("sqs")')
        self._dead_letters = None if dead_letters is None else check_url("dead_letters", dead_letters)
        self._gate, self._handler, self._backoff = gate, handler, backoff
        self._client: Any = client
        self._scope = scope_of(handler) if scope is None else scope
        self._key, self._fingerprint = key, fingerprint
        self._options: GuardOptions = {"on_done": "skip", **options}
        self._max_run = None if (given := options.get("max_run")) is None else milliseconds(given, "max_run")
        self._make_guard(LEAST_MS)  # checks the options
        self._urls = dict[str, str]()
        self._runner = asyncio.Runner() if is_async(handler) else None
        if self._runner is not None:
            weakref.finalize(self, _close, self._runner)

    def run(self, event: dict[str, Any], context: Any) -> dict[str, list[dict[str, str]]]:
        """Run the messages of an event; see `lambda_batch`."""
        messages = _read_event(event)
        if self._runner is not None:
            failed = self._runner.run(self._run_async(messages, context))
        else:
            failed = self._run(messages, context)
        return {"batchItemFailures": [{"itemIdentifier": message.id} for message in failed]}

    def _run(self, messages: list[SqsMessage], context: Any) -> list[SqsMessage]:
        failed = list[SqsMessage]()
        for message, guard in self._start(messages, failed, context):
            verdict = guard.run(None, self._handler, message)
            if not self._settle(message, verdict):
                failed.append(message)
        return failed

    async def _run_async(self, messages: list[SqsMessage], context: Any) -> list[SqsMessage]:
        failed = list[SqsMessage]()

        async def run_one(message: SqsMessage, guard: Guard) -> None:
            verdict = await guard.aio.run(None, self._handler, message)
            if not await asyncio.to_thread(self._settle, message, verdict):
                failed.append(message)

        tasks = list[asyncio.Task[None]]()
        for message, guard in self._start(messages, failed, context):
            tasks.append(asyncio.create_task(run_one(message, guard)))
            if _is_fifo(message):
                await tasks[-1]
        await asyncio.gather(*tasks)
        return failed

    def _start(
        self, messages: list[SqsMessage], failed: list[SqsMessage], context: Any
    ) -> Iterator[tuple[SqsMessage, Guard]]:
        """Yield the messages that may start. Add the others to those that failed."""
        for message in messages:
            left = int(context.get_remaining_time_in_millis())
            if left < LEAST_MS or (failed and _is_fifo(message)):
                self._gate.counters.add("lambda.not_started")
                failed.append(message)
            else:
                yield message, self._make_guard(left)

    def _make_guard(self, left_ms: int) -> Guard:
        """Return a guard that renews no lease after the end of the invocation, whose process is frozen then."""
        max_run = left_ms if self._max_run is None else min(left_ms, self._max_run)
        options: GuardOptions = {**self._options, "max_run": max_run / 1000}
        return self._gate.guard(self._scope, key=self._key, fingerprint=self._fingerprint, **options)

    def _settle(self, message: SqsMessage, verdict: Verdict[Any]) -> bool:
        """Settle a message as far as Lambda does not. Return True if Lambda may delete it."""
        is_done = verdict.action == "ack" or (verdict.action == "reject" and self._dead_letters is not None)
        try:
            if verdict.action == "reject" and self._dead_letters is not None:
                self._bury(message, self._dead_letters, verdict.error)
            elif verdict.action == "retry" and self._client is not None:
                self._hide(message, verdict.delay(self._backoff))
        except Exception as error:  # noqa: BLE001 - the message returns when its visibility ends
            self._gate.record_settlement(self._scope, verdict, message.id, error=error)
            return False
        self._gate.record_settlement(self._scope, verdict, message.id)
        return is_done

    def _bury(self, message: SqsMessage, url: str, error: BaseException | None) -> None:
        try:
            self._client.send_message(**build_dead_letter(message, url, error))
        except Exception:  # noqa: BLE001 - a message of the largest size has no room for the error
            self._client.send_message(**build_dead_letter(message, url, None))

    def _hide(self, message: SqsMessage, seconds: float) -> None:
        url = self._urls.get(message.queue_arn)
        if url is None:
            *_, account, name = message.queue_arn.split(":")
            found = self._client.get_queue_url(QueueName=name, QueueOwnerAWSAccountId=account)
            url = self._urls[message.queue_arn] = found["QueueUrl"]
        hidden = min(math.ceil(seconds), LONGEST)
        self._client.change_message_visibility(QueueUrl=url, ReceiptHandle=message.receipt, VisibilityTimeout=hidden)


def _close(runner: asyncio.Runner) -> None:
    """Close a runner, in a thread if its owner is collected while an event loop runs in this one."""
    if asyncio._get_running_loop() is None:
        runner.close()
    else:
        (thread := Thread(target=runner.close)).start()
        thread.join()


def _is_fifo(message: SqsMessage) -> bool:
    return message.queue_arn.endswith(".fifo")


def _read_event(event: Any) -> list[SqsMessage]:
    try:
        records = event["Records"]
        if all(record["eventSource"] == "aws:sqs" for record in records):
            return [SqsMessage.from_record(record) for record in records]
    except (LookupError, TypeError):
        pass
    raise InvalidArgument("event", event, "not an event of SQS", "Add a trigger for a queue of SQS to this function")
