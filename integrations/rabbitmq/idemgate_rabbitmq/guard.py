"""Consumers that acknowledge and drop a message that was handled before."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar, cast

from aio_pika.abc import AbstractIncomingMessage
from aio_pika.exceptions import CONNECTION_EXCEPTIONS
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPError
from pika.spec import Basic, BasicProperties

from idemgate import AttemptsExhausted, BadInput, Bury, Duration, Gate, KeyReused, OutcomeUnknown, Retry, milliseconds

__all__ = ["guarded"]

log = logging.getLogger("idemgate.rabbitmq")
F = TypeVar("F", bound=Callable[..., Any])
Verb = Literal["ack", "requeue", "reject"]
_HOPELESS = (Bury, BadInput, KeyReused, OutcomeUnknown, AttemptsExhausted)
"""The same again tomorrow."""


class Ending(NamedTuple):
    """What becomes of a message: the broker's verb, after so many seconds, and the counter that tells of it."""

    verb: Verb
    delay: float
    counter: str


DONE = Ending("ack", 0, "handled")
DUPLICATE = Ending("ack", 0, "duplicate")
ELSEWHERE = Ending("requeue", 0, "in_progress")
LOST = Ending("requeue", 0, "lost")


def guarded(
    gate: Gate,
    *,
    scope: str | None = None,
    retention: Duration = "24h",
    lease: Duration = "30s",
    max_attempts: int | None = None,
    pause: Duration = "1s",
) -> Callable[[F], F]:
    """Guard a consumer's callback by `message_id`, and settle each message: it does not run again after success.

    Do not acknowledge messages yourself, and consume without `no_ack`. If the process dies after the effect and before
    the completion is recorded, the callback runs again. Insert the message id in the transaction of an effect that must
    not be repeated.

    `async def on_message(message)` is a callback of aio-pika; `def on_message(channel, method, properties, body)` one
    of pika's BlockingConnection, which it holds up while it runs.

    | what happened | the message is |
    |---|---|
    | it returned, and that is recorded | acknowledged (`rabbitmq.handled`) |
    | it was done before | acknowledged, without a call (`rabbitmq.duplicate`) |
    | another consumer runs it | waited for, for `pause`; then requeued (`rabbitmq.in_progress`) |
    | it returned, but its lease was lost meanwhile | requeued: whoever has it now decides (`rabbitmq.lost`) |
    | it raised, or the store is away | requeued after `pause`, or the delay of `Retry` (`rabbitmq.failed`) |
    | `Bury`, the same id with another body, no message id, attempts exhausted | rejected: it goes to the queue's
    dead-letter exchange; without one the broker drops it (`rabbitmq.rejected`, and an error is logged) |

    - `scope`: None: the function's qualified name. Give every queue its own, where several get the same message.
    - `retention`: how long a done message is known: longer than copies may be apart. A publisher's retries and a
      redrive from the dead letters bear the same id.
    - `lease`, `max_attempts`: as in `Gate.claim`.

    While it waits or pauses a message stays unacknowledged, so set a prefetch count. When its connection is lost,
    aio-pika cancels the callbacks that run: their claims are given back, and the messages run again.
    Counters are in `gate.counters`. Raises BadInput.
    """
    seconds = milliseconds(pause, "pause") / 1000

    def decorate(func: F) -> F:
        guard = _Guard(gate, func, scope, retention, lease, max_attempts, seconds)
        made = guard.aio if _awaited(func) else guard.blocking
        return cast(F, functools.update_wrapper(functools.partial(made), func))

    return decorate


class _Guard:
    def __init__(
        self,
        gate: Gate,
        func: Callable[..., Any],
        scope: str | None,
        retention: Duration,
        lease: Duration,
        max_attempts: int | None,
        pause: float,
    ) -> None:
        self._gate, self._func, self._pause = gate, func, pause
        self._scope = f"{func.__module__}.{func.__qualname__}" if scope is None else scope
        self._options: dict[str, Any] = {
            "scope": self._scope, "retention": retention, "lease": lease, "max_attempts": max_attempts,
        }  # fmt: skip
        gate.once(**self._options)  # only to refuse bad ones now, not with the first message

    # The awaiting driver.

    async def aio(self, message: AbstractIncomingMessage) -> None:
        ending = await self._aio_run(message)
        await asyncio.sleep(ending.delay)
        try:
            if ending.verb == "ack":
                await message.ack()
            else:
                await message.reject(requeue=ending.verb == "requeue")
        except CONNECTION_EXCEPTIONS:  # the broker delivers it again
            self._unsettled(message.message_id)

    async def _aio_run(self, message: AbstractIncomingMessage) -> Ending:
        try:
            key = _key(message.message_id)
            async with self._gate.aio.claim(key, fingerprint=message.body, **self._options) as claim:
                if claim.state == "in_progress":
                    await claim.wait(self._pause)
                if not claim.started:
                    return self._counted(DUPLICATE if claim.state == "done" else ELSEWHERE)
                await self._func(message)
                return self._counted(DONE if await claim.complete() else LOST)
        except Exception as error:  # noqa: BLE001 - whatever it is, it says something about this message only
            return self._failed(message.message_id, error)

    # The blocking driver.

    def blocking(
        self, channel: BlockingChannel, method: Basic.Deliver, properties: BasicProperties, body: bytes
    ) -> None:
        ending, tag = self._blocking_run(channel, method, properties, body), cast(int, method.delivery_tag)

        def settle() -> None:
            try:
                if ending.verb == "ack":
                    channel.basic_ack(tag)
                else:
                    channel.basic_reject(tag, requeue=ending.verb == "requeue")
            except AMQPError:
                self._unsettled(properties.message_id)

        if ending.delay:  # sleeping here would hold up everything on this connection
            channel.connection.call_later(ending.delay, settle)
        else:
            settle()

    def _blocking_run(
        self, channel: BlockingChannel, method: Basic.Deliver, properties: BasicProperties, body: bytes
    ) -> Ending:
        try:
            key = _key(properties.message_id)
            with self._gate.claim(key, fingerprint=body, **self._options) as claim:
                if claim.state == "in_progress":
                    claim.wait(self._pause)
                if not claim.started:
                    return self._counted(DUPLICATE if claim.state == "done" else ELSEWHERE)
                self._func(channel, method, properties, body)
                return self._counted(DONE if claim.complete() else LOST)
        except Exception as error:  # noqa: BLE001
            return self._failed(properties.message_id, error)

    # What both share.

    def _failed(self, message_id: str | None, error: Exception) -> Ending:
        facts = {"scope": self._scope, "id": message_id}
        if isinstance(error, _HOPELESS):
            log.error("rabbitmq.rejected", extra=facts, exc_info=error)
            return self._counted(Ending("reject", 0, "rejected"))
        log.warning("rabbitmq.failed", extra=facts, exc_info=error)
        return self._counted(Ending("requeue", self._delay(error), "failed"))

    def _delay(self, error: Exception) -> float:
        if not isinstance(error, Retry) or error.delay is None:
            return self._pause
        try:
            return milliseconds(error.delay, "delay", zero=True) / 1000
        except BadInput:
            log.exception("rabbitmq.bad_delay", extra={"scope": self._scope})
            return self._pause

    def _counted(self, ending: Ending) -> Ending:
        self._gate.counters.add(f"rabbitmq.{ending.counter}")
        return ending

    def _unsettled(self, message_id: str | None) -> None:
        self._gate.counters.add("rabbitmq.unsettled")
        log.warning("rabbitmq.unsettled", extra={"scope": self._scope, "id": message_id})


def _key(message_id: str | None) -> str:
    if not message_id:
        raise BadInput("message_id", message_id, "the message has none", "Publish with one: it names the work")
    return message_id


def _awaited(func: Callable[..., Any]) -> bool:
    if not callable(func) or inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
        raise BadInput("function", func, "not a function to call", "Decorate a def or async def without yield")
    return inspect.iscoroutinefunction(func)
