"""Consumers that acknowledge duplicates of a message that was handled, without running them."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable
from time import monotonic
from typing import Any, Literal, NamedTuple, TypeVar, cast

from aio_pika.abc import AbstractIncomingMessage
from aio_pika.exceptions import CONNECTION_EXCEPTIONS
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPError
from pika.spec import Basic, BasicProperties

from idemgate import Duration, Gate, InvalidArgument, StoreUnavailable
from idemgate.core.pickling import PickledByName
from idemgate.core.scopes import check_unregistered
from idemgate.core.text import event_log, one_line
from idemgate.core.validation import check_parameters
from idemgate.core.verdict import counts_no_attempt
from idemgate.errors import NotConfigured, ServerRejected
from idemgate.types import Verdict, check_function, check_gate, milliseconds, scope_of

__all__ = ["guarded"]

log: logging.Logger = event_log("idemgate.rabbitmq")
F = TypeVar("F", bound=Callable[..., Any])
Verb = Literal["ack", "return", "requeue", "reject"]
"""`return` requeues by `basic.nack`, which RabbitMQ 4.3 does not count against the delivery limit of a quorum queue."""
HoldReason = Literal["in_progress", "store_unavailable"]

_STORE_ERRORS = (StoreUnavailable, ServerRejected, NotConfigured)
"""Errors of the store, not of the message: another message would get them too."""
_SHORTEST_POLL = 0.01
"""Seconds. A lease that is about to end must not turn the poll into a busy loop."""


class Settlement(NamedTuple):
    """The broker method that ends a delivery, its delay in seconds and its counter."""

    verb: Verb
    delay: float
    counter: str


class RetryIn(NamedTuple):
    """A decision to keep a message unacknowledged and to try its claim again after `seconds`."""

    seconds: float


class MessageHold:
    """The hold of one delivery: its remaining time and the reasons of its waits so far."""

    def __init__(self, message_id: str | None, seconds: float) -> None:
        self.message_id = message_id
        self.reasons: set[HoldReason] = set()
        self._deadline = monotonic() + seconds
        self._left_at_start: float | None = None

    @property
    def seconds_left(self) -> float:
        """The rest of the hold. The callback's run time does not use it up."""
        if self._left_at_start is not None:
            return self._left_at_start
        return max(self._deadline - monotonic(), 0.0)

    def start_callback(self) -> None:
        """Stop the timer: from here on the callback runs."""
        self._left_at_start = self.seconds_left


def guarded(
    gate: Gate,
    *,
    scope: str | None = None,
    retention: Duration = "24h",
    lease: Duration = "30s",
    max_attempts: int | None = None,
    pause: Duration = "1s",
    hold: Duration = "15m",
) -> Callable[[F], F]:
    """Guard a consumer's callback by `message_id`: a message that was handled does not run again.

    A process that dies after the effect and before its completion leaves a message that runs again. If the effect must
    not be repeated, insert the message id in its transaction.

    The guard settles every message. Do not acknowledge in the callback, and consume without `no_ack`.
    `async def on_message(message)` is a callback of aio-pika.
    `def on_message(channel, method, properties, body)` is a callback of pika's BlockingConnection. It blocks that
    connection while it runs.

    | verdict | settlement |
    |---|---|
    | handled, duplicate | acknowledged |
    | another consumer runs the message, or the store failed before the callback ran | held, then decided again |
    | the same after `hold`, lease lost, or what is not the message's fault (below) | requeued without a count |
    | failed | requeued after `pause`, or the delay of `Retry` |
    | rejected: each delivery would end in the same error | rejected |
    | the channel closed, or the task was cancelled | left to the broker, which redelivers |

    The README has the counter of each event. If the store fails after the callback returned, the message is
    acknowledged, and a copy may run again.

    A held message stays unacknowledged. With aio-pika the guard retries the claim as soon as the other claim ends, with
    pika every `pause`. If the other consumer completed, the guard acknowledges the message. If it failed or was killed,
    the guard runs the callback once the claim is free. A held message takes one place of the prefetch window.

    A rejected message goes to the queue's dead-letter exchange. Without one the broker drops it. Errors that each
    delivery repeats are those that `idemgate.verdict_of` calls "rejected": `InvalidArgument`, `KeyReused`,
    `OutcomeUnknown`, `AttemptsExhausted`, `ReplayedFailure` and `DecodeError`.

    Not the message's fault are `DownstreamUnavailable`, and `StoreUnavailable` or `AlreadyInProgress` of another
    guarded call. The message is requeued after `pause`, or the delay of the error.

    In a quorum queue a requeue counts against the delivery limit, and so does every lost channel or connection. A hold
    counts nothing. "Without a count" is by `basic.nack`, which RabbitMQ 4.3 and later do not count; earlier versions
    do. The limit is therefore the number of failures and crashes that one message may have. `max_attempts` counts
    neither a hold nor what the callback raised that is not the fault of the message.

    Args:
        gate: The gate whose store keeps the claims, and whose `counters` count.
        scope: The namespace of the message ids. None takes the function's qualified name. Queues that receive the
            same message need different scopes.
        retention: The time for which a message is known as done. Set it longer than the time between two copies. A
            publisher's retry and a redriven dead letter have the same id.
        lease: The time for which a killed consumer still holds its claim, as in `Gate.claim`. At most `hold`.
        max_attempts: The number of runs after which a message is rejected, as in `Gate.claim`.
        pause: The delay before a failed message is requeued, and the poll interval of a held one. At most `hold`.
        hold: The longest time that one delivery waits unacknowledged, without the callback's run time. `hold` plus
            the longest run of the callback must stay below RabbitMQ's `consumer_timeout` (30 minutes).

    Returns:
        A decorator for the callback.

    Raises:
        InvalidArgument: An option is invalid, or `lease` or `pause` is longer than `hold`. Or the callback returns
            before its work ends, has other parameters than its client passes, or has no unique name and needs a
            `scope`.
    """
    check_gate(gate)
    options: dict[str, Any] = {"retention": retention, "lease": lease, "max_attempts": max_attempts}
    pause_seconds, hold_seconds = milliseconds(pause, "pause") / 1000, milliseconds(hold, "hold") / 1000
    _check_within_hold("lease", lease, hold, "a killed consumer's lease would outlast one hold and cost redeliveries")
    _check_within_hold("pause", pause, hold, "a held message would never be polled")

    def decorate(func: F) -> F:
        check_unregistered(func, "guarded")
        check_function(func)
        is_async = inspect.iscoroutinefunction(func)
        names = ("message",) if is_async else ("channel", "method", "properties", "body")
        check_parameters(func, "function", *names)
        guard = _ConsumerGuard(gate, func, scope, options, pause_seconds, hold_seconds)
        consume = guard.consume_aio if is_async else guard.consume_blocking
        callback = _Callback(consume)
        functools.update_wrapper(callback, func)
        callback._init_finder()
        return cast(F, callback)

    return decorate


class _Callback(PickledByName, functools.partial[Any]):
    """A guarded callback. Pickle stores its name, as that of any function."""


class _ChannelClosed(Exception):
    """The channel closed before the callback ran. The broker has redelivered the message: another consumer runs it."""


class _ConsumerGuard:
    """The guard of one callback, with one driver for aio-pika and one for pika."""

    def __init__(
        self,
        gate: Gate,
        func: Callable[..., Any],
        scope: str | None,
        options: dict[str, Any],
        pause: float,
        hold: float,
    ) -> None:
        self._gate, self._func, self._pause, self._hold_seconds = gate, func, pause, hold
        self._scope = scope_of(func) if scope is None else scope
        self._guard = gate.guard(self._scope, on_done="skip", **options)
        self._next_store_try = 0.0

    # The driver for aio-pika.

    async def consume_aio(self, message: AbstractIncomingMessage) -> None:
        """Run and settle one message."""
        hold = MessageHold(message.message_id, self._hold_seconds)
        try:
            settlement = await self._run_aio(hold, message)
            if settlement is None:
                self._report_unsettled(hold)
                return
            await asyncio.sleep(settlement.delay)
            await self._settle_aio(hold, message, settlement)
        except asyncio.CancelledError:  # aio-pika cancels the callbacks of a closed channel
            self._report_unsettled(hold)
            raise

    async def _run_aio(self, hold: MessageHold, message: AbstractIncomingMessage) -> Settlement | None:
        """Run the callback once. Hold the message while its key is in progress or the store is away.

        Return None once the channel is closed.
        """
        run, wait = self._guard.aio.run, None
        while _is_channel_open(message):
            verdict = await run(hold.message_id, self._call_aio, hold, message, fingerprint=message.body, wait=wait)
            outcome = self._decide(hold, verdict)
            if not isinstance(outcome, RetryIn):
                return outcome
            if verdict.outcome == "in_progress":
                wait = outcome.seconds  # the next try returns as soon as the other claim ends
            else:
                await asyncio.sleep(outcome.seconds)
        return None

    async def _call_aio(self, hold: MessageHold, message: AbstractIncomingMessage) -> None:
        if not _is_channel_open(message):
            raise _ChannelClosed
        hold.start_callback()
        await self._func(message)

    async def _settle_aio(self, hold: MessageHold, message: AbstractIncomingMessage, settlement: Settlement) -> None:
        try:
            if settlement.verb == "ack":
                await message.ack()
            elif settlement.verb == "return":
                await message.nack(requeue=True)
            else:
                await message.reject(requeue=settlement.verb == "requeue")
        except CONNECTION_EXCEPTIONS:
            self._report_unsettled(hold)

    # The driver for pika.

    def consume_blocking(
        self, channel: BlockingChannel, method: Basic.Deliver, properties: BasicProperties, body: bytes
    ) -> None:
        """Run and settle one message, or schedule the next try of its claim."""
        self._try_blocking(MessageHold(properties.message_id, self._hold_seconds), channel, method, properties, body)

    def _try_blocking(
        self,
        hold: MessageHold,
        channel: BlockingChannel,
        method: Basic.Deliver,
        properties: BasicProperties,
        body: bytes,
    ) -> None:
        outcome = self._run_blocking(hold, channel, method, properties, body) if channel.is_open else None
        if outcome is None:  # the broker has redelivered the message: another consumer runs it
            self._report_unsettled(hold)
            return
        if isinstance(outcome, RetryIn):
            retry = functools.partial(self._try_blocking, hold, channel, method, properties, body)
            self._call_later(hold, channel, outcome.seconds, retry)
            return
        settle = functools.partial(self._settle_blocking, hold, channel, method, outcome)
        if outcome.delay:
            self._call_later(hold, channel, outcome.delay, settle)
        else:
            settle()

    def _run_blocking(
        self,
        hold: MessageHold,
        channel: BlockingChannel,
        method: Basic.Deliver,
        properties: BasicProperties,
        body: bytes,
    ) -> Settlement | RetryIn | None:
        """Try the message once."""
        # Each try of an unavailable store blocks the connection for the gate's timeout. If every held message tried,
        # the connection would miss its heartbeats. So one message per pause tries, and the others wait with it.
        wait = self._next_store_try - monotonic()
        if wait > 0:
            return self._hold_or_requeue(hold, "store_unavailable", wait)
        # Without `wait`, which opens a Pub/Sub connection for each call.
        verdict = self._guard.run(
            hold.message_id, self._call_blocking, hold, channel, method, properties, body, fingerprint=body
        )
        if _is_store_away(verdict):
            self._next_store_try = monotonic() + self._pause
        return self._decide(hold, verdict)

    def _call_blocking(self, hold: MessageHold, *message: Any) -> None:
        hold.start_callback()
        self._func(*message)

    def _call_later(
        self, hold: MessageHold, channel: BlockingChannel, seconds: float, callback: Callable[[], None]
    ) -> None:
        """Schedule `callback` on the channel's connection. A sleep would block the connection and its heartbeats."""
        if channel.is_open:
            channel.connection.call_later(seconds, callback)
        else:
            self._report_unsettled(hold)

    def _settle_blocking(
        self, hold: MessageHold, channel: BlockingChannel, method: Basic.Deliver, settlement: Settlement
    ) -> None:
        tag = cast(int, method.delivery_tag)
        try:
            if settlement.verb == "ack":
                channel.basic_ack(tag)
            elif settlement.verb == "return":
                channel.basic_nack(tag, requeue=True)
            else:
                channel.basic_reject(tag, requeue=settlement.verb == "requeue")
        except AMQPError:
            self._report_unsettled(hold)

    # Decisions that both drivers share.

    def _decide(self, hold: MessageHold, verdict: Verdict[None]) -> Settlement | RetryIn | None:
        """Map a verdict to the settlement of its message, to another try, or to None if the channel is closed."""
        if isinstance(verdict.error, _ChannelClosed):
            return None
        if verdict.outcome == "in_progress" and not verdict.ran:
            return self._hold_or_requeue(
                hold, "in_progress", min(self._pause, max(verdict.retry_after or 0, _SHORTEST_POLL))
            )
        if _is_store_away(verdict):
            return self._hold_or_requeue(hold, "store_unavailable", self._pause, verdict.error)
        if verdict.outcome in ("handled", "duplicate"):
            return self._count(Settlement("ack", 0, verdict.outcome))
        # The delay uses up the hold, so that no delivery reaches the broker's consumer_timeout.
        delay = min(verdict.delay(self._pause), hold.seconds_left)
        if verdict.outcome == "lost":
            return self._count(Settlement("return", delay, "lost"))
        return self._settle_failure(hold, verdict, delay)

    def _hold_or_requeue(
        self, hold: MessageHold, reason: HoldReason, seconds: float, error: BaseException | None = None
    ) -> RetryIn | Settlement:
        """Decide to try the claim again after `seconds`, or to requeue a message whose hold has ended."""
        if not (left := hold.seconds_left):
            log.warning(
                "rabbitmq.hold_ended scope=%r id=%r reason=%s", self._scope, hold.message_id, reason,
                extra=self._log_facts(hold) | {"reason": reason},
            )  # fmt: skip
            return self._count(Settlement("return", 0, reason))
        if reason not in hold.reasons:
            hold.reasons.add(reason)
            self._gate.counters.add(f"rabbitmq.held_{reason}")
            log.log(
                logging.INFO if reason == "in_progress" else logging.WARNING,
                "rabbitmq.held scope=%r id=%r reason=%s%s",
                self._scope, hold.message_id, reason, "" if error is None else f": {one_line(error)}",
                extra=self._log_facts(hold) | {"reason": reason},
            )  # fmt: skip
        return RetryIn(min(seconds, left))

    def _settle_failure(self, hold: MessageHold, verdict: Verdict[None], delay: float) -> Settlement:
        """Return the settlement of a message whose claim or callback raised."""
        error = verdict.error
        if verdict.outcome == "rejected":
            settlement = Settlement("reject", 0, "rejected")
        elif counts_no_attempt(error):
            settlement = Settlement("return", delay, "deferred")
        else:
            settlement = Settlement("requeue", delay, "failed")
        log.log(
            logging.ERROR if settlement.verb == "reject" else logging.WARNING,
            "rabbitmq.%s scope=%r id=%r: %s: %s", settlement.counter, self._scope, hold.message_id,
            type(error).__name__, one_line(error), extra=self._log_facts(hold), exc_info=error,
        )  # fmt: skip
        return self._count(settlement)

    def _count(self, settlement: Settlement) -> Settlement:
        self._gate.counters.add(f"rabbitmq.{settlement.counter}")
        return settlement

    def _report_unsettled(self, hold: MessageHold) -> None:
        """Count and log a message that the guard cannot settle. The broker redelivers it."""
        self._gate.counters.add("rabbitmq.unsettled")
        log.warning(
            "rabbitmq.unsettled scope=%r id=%r", self._scope, hold.message_id, extra=self._log_facts(hold),
        )  # fmt: skip

    def _log_facts(self, hold: MessageHold) -> dict[str, object]:
        return {"scope": self._scope, "id": hold.message_id}


def _check_within_hold(name: str, value: Duration, hold: Duration, why: str) -> None:
    if milliseconds(value, name) > milliseconds(hold, "hold"):
        fix = f"Pass hold={value!r} or longer, below RabbitMQ's consumer_timeout (30 minutes), or a shorter {name}"
        raise InvalidArgument(name, value, f"is longer than hold={hold!r}: {why}", fix)


def _is_store_away(verdict: Verdict[None]) -> bool:
    """Return True if the store failed before the callback ran, for a reason that other messages have, too."""
    return not verdict.ran and isinstance(verdict.error, _STORE_ERRORS)


def _is_channel_open(message: AbstractIncomingMessage) -> bool:
    try:
        return message.channel is not None
    except CONNECTION_EXCEPTIONS:  # aio-pika raises if the channel is closed
        return False
