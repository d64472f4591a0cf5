"""`Webhooks`: a topic whose messages are POSTed, and a record for each that remembers how it went."""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable, Container, Coroutine, Iterable
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

import httpx
from idemgate_http.webhooks import Secrets, secret_bytes, sign

from idemgate import Bury, Delivery, Duration, Gate, InvalidArgument, Receipt, Retry, Topic, current
from idemgate.types import BackoffPolicy, OnceFunction, Record, check_gate, milliseconds
from idemgate_webhook.answers import Attempt, History, described, history_of, retry_after, with_attempt
from idemgate_webhook.guarded import Guarded
from idemgate_webhook.outgoing import body_bytes, checked_id, checked_url
from idemgate_webhook.posting import Answer, post

__all__ = ["SCHEDULE", "AioWebhooks", "Rejected", "Undelivered", "Webhooks"]

SCHEDULE: tuple[Duration, ...] = ("15s", "15s", "30s", "3m", "10m", "20m", "30m", "60m", "3h", "6h", "24h")
"""Pauses between attempts: twelve attempts within 35 hours."""
AGENT = "idemgate-webhook"


class Undelivered(Retry):
    """An attempt failed and another may follow. `attempt` says how; a tenacity wait strategy sees this error."""

    __module__ = "idemgate_webhook"  # as it stands in a dead letter

    def __init__(self, text: str, attempt: Attempt) -> None:
        super().__init__(text)
        self.attempt = attempt


class Rejected(Bury):
    """An attempt failed for good: the receiver is gone, or its address is refused. `attempt` says how."""

    __module__ = "idemgate_webhook"

    def __init__(self, text: str, attempt: Attempt) -> None:
        super().__init__(text)
        self.attempt = attempt


class Webhooks:
    """Sends webhooks: `send` stores one, a worker (`gate.run()`) POSTs it until it is accepted or given up.

    - `name`: of the topic that holds them.
    - `secret`: "whsec_...", or several while they are rotated; or a callable, sync or async, from the `owner` of a
      message to these. Asked at each attempt, stored nowhere.
    - `schedule`: pauses between attempts: a list of durations, one duration, or a tenacity wait strategy.
    - `max_attempts`: None: one more than a list has pauses, else 12.
    - `success`: statuses that end it well. - `give_up`: statuses that end it at once as a dead letter. All others,
      400 and 404 too, are tried again: receivers are mended. Redirects are not followed.
    - `timeout`: of one attempt as a whole, from the name's resolution to the answer.
    - `max_retry_after`: a `Retry-After` may lengthen a pause up to this, and never shortens one.
    - `retention`: how long a message is known after its last attempt (an id is not sent again, its history can be
      read), and how long dead letters stay.
    - `allow`: networks that may be reached though they are not public, such as "10.1.0.0/16".
    - `https_only`: False: plain http too.
    - `excerpt`: how many bytes of each answer the history keeps; 0: none.
    - `transport`: an httpx transport of yours in the place of `Guarded(allow)`; what it connects to is then checked by
      nobody but itself (a proxy such as smokescreen). It stays yours to close.
    - `slots`: as in `gate.topic`.

    At least once, never again after success: should a worker die between the receiver's answer and its record, the
    message is sent again, with the same id. Raises InvalidArgument.
    """

    def __init__(
        self,
        gate: Gate,
        name: str = "webhooks",
        *,
        secret: Secrets | Callable[[str], Secrets | Awaitable[Secrets]],
        schedule: BackoffPolicy = SCHEDULE,
        max_attempts: int | None = None,
        success: Container[int] = range(200, 300),
        give_up: Container[int] = (410,),
        timeout: Duration = "20s",
        max_retry_after: Duration = "24h",
        retention: Duration = "30d",
        allow: Iterable[str] = (),
        https_only: bool = True,
        excerpt: int = 512,
        transport: httpx.AsyncBaseTransport | None = None,
        slots: int = 1,
    ) -> None:
        check_gate(gate)
        if not callable(secret):
            secret_bytes(secret)
        self._gate = gate
        self._secret = secret
        self._success, self._give_up = success, give_up
        self._timeout = milliseconds(timeout, "timeout") / 1000
        self._longest = milliseconds(max_retry_after, "max_retry_after", zero=True)
        self._retention = retention
        self._https_only = https_only
        self._excerpt = _whole(excerpt)
        self._transport = _transport(transport, allow)
        attempts = max_attempts
        if attempts is None:
            attempts = (len(schedule) if isinstance(schedule, list | tuple) else len(SCHEDULE)) + 1
        # "first": what was sent first under an id is what goes out, every time.
        self.topic: Topic = gate.topic(
            name, merge="first", backoff=schedule, max_attempts=attempts, dead_retention=retention,
            dedup_retention=retention,
            slots=slots,
        )  # fmt: skip
        self._scope = f"webhook:{name}"
        guarded = gate.once(key=_key_of, scope=self._scope, retention=retention, on_done="skip")
        self.deliver: OnceFunction[[Delivery[Any]], Coroutine[Any, Any, object]] = guarded(self._attempt)
        self.topic.handler(self.deliver)

    def __repr__(self) -> str:
        return f"<Webhooks {self.topic.name!r}>"

    @cached_property
    def aio(self) -> AioWebhooks:
        """The awaiting face."""
        return AioWebhooks(self)

    def send(
        self,
        id: str,  # noqa: A002 - the specification's word
        url: str,
        body: object,
        *,
        owner: str = "",
        delay: Duration | None = None,
        at: datetime | None = None,
    ) -> Receipt:
        """Stores a webhook for delivery: now, or after `delay`, or `at` an aware time. One round trip, atomic.

        - `id`: names the event and the receiver, as in "evt_17:acme": the same at every attempt, and the receiver's
          idempotency key. Another `send` of it, within the retention, is a "duplicate", whatever its URL and body.
        - `body`: what json.dumps takes; bytes are sent as they are. Written once: every attempt sends these bytes.
        - `owner`: whose URL it is, handed to a `secret` that is a callable.

        Raises InvalidArgument before anything is written, also if the URL names a refused address. Host names are
        resolved and checked at each attempt.
        """
        message = self._message(id, url, body, owner)
        return self.topic.trigger(id, message, delay=delay, at=at, event_id="sent")

    def history(self, id: str) -> History:  # noqa: A002
        """How the attempts went, oldest first. One round trip, changes nothing."""
        return self._history(id, self._gate.inspect(id, scope=self._scope))

    async def _attempt(self, delivery: Delivery[Any]) -> object:
        """Make one attempt, and return the history that its guard stores. Raises Undelivered or Rejected."""
        began = self._now()
        answer = await self._post(delivery.key, delivery.payload, began)
        at = datetime.fromtimestamp(began, UTC)
        attempt = Attempt(delivery.attempt, at, answer.status, answer.ms, answer.excerpt, answer.error)
        execution = current()
        history = with_attempt(execution.recovered, attempt)
        if answer.status is not None and answer.status in self._success:
            return history
        await execution.aio.checkpoint(history)
        raise self._failure(delivery, attempt, answer)

    async def _post(self, id: str, message: dict[str, Any], now: float) -> Answer:  # noqa: A002
        secret = self._secret
        if callable(secret):
            found = secret(message["owner"])
            secret = await found if inspect.isawaitable(found) else found
        body: bytes = message["body"]
        headers = {
            "accept-encoding": "identity",
            "connection": "close",
            "content-type": "application/json",
            "idempotency-key": f'"{id}"',
            "user-agent": AGENT,
            "webhook-id": id,
            "webhook-signature": sign(secret, id, int(now), body),
            "webhook-timestamp": str(int(now)),
        }
        return await post(self._transport, message["url"], headers, body, self._timeout, self._excerpt)

    def _failure(self, delivery: Delivery[Any], attempt: Attempt, answer: Answer) -> Undelivered | Rejected:
        text = described(answer.status) if answer.status is not None else answer.error
        if answer.refused or (answer.status is not None and answer.status in self._give_up):
            return Rejected(text, attempt)
        failure = Undelivered(text, attempt)
        asked = retry_after(answer.retry_after, self._now())
        if asked is not None:
            own = self.topic.policy.backoff.ms(delivery.attempt, failure)
            failure.delay = timedelta(milliseconds=max(own, min(round(asked * 1000), self._longest)))
        return failure

    def _message(self, id: str, url: str, body: object, owner: str) -> dict[str, Any]:  # noqa: A002
        checked_id(id)
        return {"url": checked_url(url, self._https_only, self._transport), "body": body_bytes(body), "owner": owner}

    def _history(self, id: str, record: Record) -> History:  # noqa: A002
        kept = record.result if record.state == "done" else record.checkpoint
        return history_of(id, record.state == "done", self._gate.context.codec.decode(kept) if kept else None)

    def _now(self) -> float:
        clock = self._gate.context.clock
        return time.time() if clock is None else clock.microseconds() / 1_000_000


class AioWebhooks:
    """As `Webhooks`, awaiting: `await webhooks.aio.send(...)`."""

    def __init__(self, webhooks: Webhooks) -> None:
        self._webhooks = webhooks

    async def send(
        self,
        id: str,  # noqa: A002
        url: str,
        body: object,
        *,
        owner: str = "",
        delay: Duration | None = None,
        at: datetime | None = None,
    ) -> Receipt:
        """As `Webhooks.send`."""
        message = self._webhooks._message(id, url, body, owner)
        return await self._webhooks.topic.aio.trigger(id, message, delay=delay, at=at, event_id="sent")

    async def history(self, id: str) -> History:  # noqa: A002
        """As `Webhooks.history`."""
        webhooks = self._webhooks
        return webhooks._history(id, await webhooks._gate.aio.inspect(id, scope=webhooks._scope))


def _key_of(_: Webhooks, delivery: Delivery[Any]) -> str:
    """Return the key of the guard: the id of the webhook. A worker that died may have sent it before."""
    return delivery.key


def _transport(given: httpx.AsyncBaseTransport | None, allow: Iterable[str]) -> httpx.AsyncBaseTransport:
    if given is None:
        return Guarded(allow)
    if allow:
        raise InvalidArgument(
            "allow", allow, "a transport was given too", "Pass Guarded(allow) as the transport, or leave one"
        )
    return given


def _whole(excerpt: int) -> int:
    if not isinstance(excerpt, int) or isinstance(excerpt, bool) or not 0 <= excerpt <= 4096:
        raise InvalidArgument("excerpt", excerpt, "not a number of bytes from 0 to 4,096", "Pass an int")
    return excerpt
