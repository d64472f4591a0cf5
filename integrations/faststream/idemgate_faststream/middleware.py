"""The middleware: it gets a verdict on each message from the guard, and lets FastStream settle the message by it."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from faststream import BaseMiddleware, StreamMessage
from faststream.exceptions import AckMessage, HandlerException, IgnoredException, NackMessage, RejectMessage

from idemgate import Duration, Gate, Guard, InvalidArgument, StoreError, Verdict
from idemgate.core.backoff import delays
from idemgate.core.key_template import KeySpec, compile_message_key
from idemgate.core.scopes import scope_of
from idemgate.core.validation import check_parameters
from idemgate.types import BackoffPolicy, GuardOptions, Keep, KeyCallable, check_function, check_gate, milliseconds
from idemgate_faststream.identity import check_redelivery, expose_given_ids, redelivery_of
from idemgate_faststream.responses import pack_reply, unpack_reply

__all__ = ["Once"]

Message = StreamMessage[Any]
OnReject = Callable[[Message, Exception], object]


class Once:
    """A middleware that runs each message once: `NatsBroker(url, middlewares=[Once(gate, key=...)])`.

    It decides how each message of the broker or router is settled, and replaces `ack_policy`. A policy of MANUAL or
    ACK_FIRST, a batch, and a source that delivers once at most are refused at each message by an InvalidArgument,
    which FastStream logs. What has not been acknowledged then stays with the broker.

    | verdict | settlement |
    |---|---|
    | "handled" | acknowledged, after the reply was published |
    | "duplicate" | acknowledged without a call; its stored reply is published again |
    | "in_progress" | NATS: given back with a delay. Others: held for up to `hold`, then given back |
    | "failed", "lost", or the reply was not published | given back: NATS with the delay, Kafka and RabbitMQ after it |
    | "rejected" | `on_reject`, then rejected. Redis: acknowledged, because it would be redelivered |

    `AckMessage` of a handler makes the key done. `NackMessage` and `RejectMessage` release it. Each of them goes on to
    FastStream with its options.

    The effect of a handler and the completion of its key are two steps. A process that dies between them leaves a
    message that runs again.

    Args:
        gate: the gate whose store keeps the keys, and whose `counters` count (`consumer.*`).
        key: what identifies the message: a template over the `StreamMessage`, such as
            "{message.headers[Nats-Msg-Id]}", or a callable that gets it. An id that FastStream made up is refused:
            `message_id` is none of the publisher on Kafka, and elsewhere only if the publisher sets it. A message
            without the header is rejected; see `on_missing_key`.
        scope: keys of one scope share their record. None: each subscriber has its own, the name of its handler as for
            `gate.once`. Two subscribers that receive the same message need different ones.
        fingerprint: a callable or fields such as ["message.headers[total]"]. The same key with another fingerprint is
            rejected. None: the body.
        backoff: the delay after a failed attempt, as for a topic. None: full jitter from 1 s to 10 min.
        hold: the longest time for which a message waits in the consumer where its broker would redeliver it at once.
            It takes the place of another one meanwhile. On Kafka it stops its partition, so keep it and the run below
            `max_poll_interval_ms`.
        on_reject: a function that keeps rejected messages, `on_reject(message, error)`, plain or async. If it raises,
            the message is given back. The handler's RejectMessage reaches it too. None: the broker's dead letters.
        **options: those of `gate.once`, such as `retention`, `lease` and `max_attempts`. Without `max_attempts` a
            message that always fails is retried for ever.

    Raises:
        InvalidArgument: an option is invalid.
    """

    def __new__(cls, *_: object, **options: object) -> Self:
        """Refuse the class in the place of its object: FastStream would call it for each message."""
        if "context" in options:
            raise InvalidArgument("middlewares", cls, "a class, not its object", "Pass [Once(gate, key=...)]")
        return super().__new__(cls)

    def __init__(
        self,
        gate: Gate,
        *,
        key: str | KeyCallable,
        scope: str | None = None,
        fingerprint: Sequence[str] | KeyCallable | None = None,
        backoff: BackoffPolicy = None,
        hold: Duration = "30s",
        on_reject: OnReject | None = None,
        **options: Unpack[GuardOptions],
    ) -> None:
        check_gate(gate)
        delays(backoff)
        if on_reject is not None:
            check_function(on_reject, "on_reject")
            check_parameters(on_reject, "on_reject", "message", "error")  # otherwise each rejected message would return
        spec = compile_message_key(key)
        if isinstance(key, str):
            _check_attribute(key, spec)

        def find_key(message: Message) -> object:
            return spec.of(None, (expose_given_ids(message),), {})

        self._make_guard = functools.partial(
            gate.guard,
            key=find_key,
            fingerprint=_read_body if fingerprint is None else fingerprint,
            **options,
        )
        guard = self._make_guard("unnamed" if scope is None else scope)  # checks the options
        self._guards: dict[object, Guard] = {}
        self._shared = guard if scope is not None else None
        self._on_reject = on_reject
        self._gate, self._backoff, self._hold = gate, backoff, milliseconds(hold, "hold") / 1000

    def __call__(self, msg: Any, /, *, context: Any) -> BaseMiddleware[Any, Any]:
        """Return the middleware of one message. FastStream calls it."""
        return _OnceMiddleware(self, msg, context=context)

    def _guard_of(self, subscriber: Any) -> Guard:
        """Return the guard of a subscriber. Raise InvalidArgument if its handler has no unique name."""
        if self._shared is not None:
            return self._shared
        guard = self._guards.get(subscriber)
        if guard is None:
            handler = inspect.unwrap(subscriber.calls[0].handler._declared_call)
            guard = self._guards[subscriber] = self._make_guard(scope_of(handler))
        return guard

    async def _reject(self, message: Message, verdict: Verdict[Any]) -> Verdict[Any]:
        """Hand a rejected message to `on_reject`. Return the verdict: "failed" if that raised."""
        if self._on_reject is None or verdict.error is None:
            return verdict
        try:
            done = self._on_reject(message, verdict.error)
            if inspect.isawaitable(done):
                await done
        except Exception as error:  # noqa: BLE001 - any error means that the message is not kept elsewhere
            return Verdict("failed", None, error, attempt=verdict.attempt)
        return verdict


def _check_attribute(key: str, spec: KeySpec) -> None:
    """Raise InvalidArgument for an attribute that no message has: each message would be rejected."""
    probe = StreamMessage[Any](raw_message=None, body=b"")
    try:
        spec.of(None, (probe,), {})
    except InvalidArgument as error:
        cause = error.__cause__
        if isinstance(cause, AttributeError) and cause.obj is probe:
            fix = 'Name one that it has, as in "{message.headers[event-id]}"'
            raise InvalidArgument("key", key, f"a message has no attribute .{cause.name}", fix) from None


def _read_body(message: Message) -> object:
    return message.body


def _keep(message: Any) -> Keep:
    async def keep(_: float) -> None:
        await message.in_progress()

    return keep


class _OnceMiddleware(BaseMiddleware[Any, Any]):
    """The middleware of one message."""

    def __init__(self, once: Once, msg: Any, /, *, context: Any) -> None:
        super().__init__(msg, context=context)
        self._once = once
        self._message: Message | None = None
        self._verdict: Verdict[Any] | None = None
        self._scope = ""

    async def consume_scope(self, call_next: Callable[[Message], Awaitable[Any]], msg: Message) -> Any:
        """Run the handler once, and return its reply. Raise what settles the message otherwise."""
        consumed: Any = self.context.get_local("message")
        if getattr(consumed, "raw_message", None) is not msg.raw_message:
            return await call_next(msg)  # of a request, or of `get_one`: not for a handler
        subscriber: Any = self.context.get_local("handler_")
        check_redelivery(subscriber, consumed)
        guard = self._once._guard_of(subscriber)
        returned: Any = None
        acknowledged: AckMessage | None = None

        async def run(message: Message) -> Any:
            nonlocal returned, acknowledged
            try:
                returned = await call_next(message)
            except AckMessage as error:  # done
                acknowledged = error
            return await pack_reply(returned, subscriber)

        keep, wait = (_keep(msg), None) if redelivery_of(msg) == "delayed" else (None, self._once._hold)
        verdict = await guard.aio.run(None, run, msg, keep=keep, wait=wait)
        self._watch(consumed, guard.scope, verdict)
        if acknowledged is not None and verdict.action == "ack":
            raise acknowledged
        if verdict.action != "ack":
            await self._give_back(consumed, verdict)
        if verdict.ran:
            if verdict.error is not None and not isinstance(verdict.error, StoreError):
                raise verdict.error  # `on_error` said "complete"
            return returned
        if verdict.replayed:
            return unpack_reply(verdict.value)
        raise AckMessage  # there is no reply to publish

    async def after_processed(
        self,
        exc_type: type[BaseException] | None = None,  # noqa: ARG002 - FastStream passes it
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,  # noqa: ARG002 - the same
    ) -> bool | None:
        """Give the message back if its reply was not published: its copy is a duplicate, which publishes it."""
        verdict = self._verdict
        if (
            verdict is not None
            and self._message is not None
            and verdict.action == "ack"
            and isinstance(exc_val, Exception)
            and not isinstance(exc_val, IgnoredException)
            and exc_val is not verdict.error
        ):
            self._verdict = Verdict("failed", None, exc_val, attempt=verdict.attempt)
            await self._give_back(self._message, self._verdict)
        return False

    async def _give_back(self, message: Message, verdict: Verdict[Any]) -> None:
        """Raise what lets FastStream reject a message or return it to the broker."""
        once, redelivery = self._once, redelivery_of(message)
        told = verdict.error if isinstance(verdict.error, IgnoredException) else None
        if isinstance(told, RejectMessage) and not told.extra_options.get("requeue"):
            verdict = verdict._replace(outcome="rejected")
        if verdict.action == "reject":
            self._verdict = verdict = await once._reject(message, verdict)
            if verdict.action == "reject":
                raise AckMessage if redelivery == "idle" else told or RejectMessage
            told = None
        if told is not None:
            if not isinstance(told, HandlerException):  # such as StopConsume, after which the policy might reject it
                await message.nack()
            raise told
        delay = verdict.delay(once._backoff)
        if redelivery == "delayed":
            raise NackMessage(delay=delay)
        if redelivery == "at once" and verdict.outcome != "in_progress":  # that one has waited
            await asyncio.sleep(min(delay, once._hold))
        raise NackMessage

    # -- counters -----------------------------------------------------------------------------------------------------

    def _watch(self, message: Message, scope: str, verdict: Verdict[Any]) -> None:
        """Count the settlement when FastStream hands it to the broker."""
        self._message, self._scope, self._verdict = message, scope, verdict
        for name in ("ack", "nack", "reject"):
            setattr(message, name, functools.partial(self._settle, getattr(message, name)))

    async def _settle(self, settle: Callable[..., Awaitable[None]], **options: Any) -> None:
        try:
            await settle(**options)
        except Exception as error:
            self._record(error)
            raise
        self._record(None)

    def _record(self, error: Exception | None) -> None:
        """Count once: to reject a message of Kafka is to acknowledge it."""
        verdict, self._verdict = self._verdict, None
        if self._message is not None and verdict is not None:
            self._once._gate.record_settlement(self._scope, verdict, self._message.message_id, error=error)
