"""Expiry subscriptions: a due set as the source of truth, and expiry events as hints.

The due set is a topic. Its messages are the keys that are known to expire, each due at its expiry. A worker checks each
due key first. If the key still lives, it is scheduled again for its new expiry. If it is gone, the handler runs. That
works without any event. Events add keys that are not in the set yet, and make keys due that expired early or unknown.
All listeners receive them, and the topic merges them into one message.

The key's record (scope `expiry.<name>`) shows if a missing key was handled already. In it a claim stores when the key
was last found missing. An event about an earlier time is stale.

Counters:

- `expiry.acted`, `.renewed` (due, but the key lived), `.deleted`, `.echoes` (handled before).
- `expiry.heard` (expired events), `.registered` (keys put into the due set by this listener).
- `expiry.scans`, `.gaps`, `.dropped` (events, since the backlog was full).
- `expiry.unfit` (keys that are too long or empty).
- `expiry.deaf` (a server was found to send no expiry events), `.store_errors`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from idemgate.core.calls import run_plan, run_plan_async
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.keys import Key, is_library_key, raw, text_of
from idemgate.core.scopes import mark_registered
from idemgate.core.validation import check_int, is_async, refuse_unfinished
from idemgate.errors import AlreadyInProgress, InvalidArgument
from idemgate.guard.claim import AioClaim, Claim, claim_request
from idemgate.guard.manage import forget
from idemgate.guard.options import ClaimOptions
from idemgate.guard.request import Request
from idemgate.store.context import Context
from idemgate.subscribers.callback import check_callback
from idemgate.subscribers.expiry import rules as expiry
from idemgate.subscribers.expiry.glob import matcher
from idemgate.subscribers.expiry.listener import ExpiryListener
from idemgate.subscribers.expiry.rules import Expired
from idemgate.topics.messages import Delivery

if TYPE_CHECKING:
    from idemgate.topics.topic import Topic

__all__ = ["AioExpiry", "Expiry"]

OnExpired = TypeVar("OnExpired", bound="Callable[[Expired], object]")
Tracked = Literal["tracked", "lasting", "absent"]
Untracked = Literal["cancelled", "in_flight", "absent"]
Notifications = Literal["check", "set", "assume"]


class Expiry:
    """An expiry subscription for a pattern of keys; create it with `gate.on_expired`.

    `topic` is the due set, with its statistics, dead letters and `pause`. `expiry.aio` has the same methods for
    asyncio.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        make_topic: Callable[[], Topic],
        pattern: str,
        *,
        notifications: Notifications,
        scan: Duration,
        retention: Duration,
        backlog: int,
    ) -> None:
        self.context = context
        self.pattern: str = _check_pattern(pattern)
        if notifications not in ("check", "set", "assume"):
            fix = 'Use "check", "set" (change the server\'s setting if necessary) or "assume" (no check)'
            raise InvalidArgument("notifications", notifications, "no such choice", fix)
        self.notifications: Notifications = notifications
        self.scan_seconds: float = milliseconds(scan, "scan") / 1000
        self.retention: float = milliseconds(retention, "retention") / 1000
        if self.retention * 1000 < expiry.ECHO_MS:
            raise InvalidArgument("retention", retention, "events may arrive that late", 'Use at least "10s"')
        self.backlog: int = check_int("backlog", backlog)
        self.scope: str = f"expiry.{name}"
        self._matches = matcher(self.pattern.encode())
        self.topic: Topic[Any, Any] = make_topic()  # last: bad options must leave no topic behind

    def __repr__(self) -> str:
        return f"<Expiry {self.topic.name!r} {self.pattern!r}>"

    @cached_property
    def aio(self) -> AioExpiry:
        """The asyncio version of this object."""
        return AioExpiry(self)

    def handler(self, func: OnExpired) -> OnExpired:
        """Register the function, sync or async, that a worker calls with each expired key (`Expired`).

        It runs at least once for each time that a key expired. After it has returned, it does not run again for that
        expiry within `retention`. Its exceptions mean the same as in a topic: retry after the backoff, `Bury`, `Retry`,
        dead letters. A key that is created again before the (next) attempt has not expired: the handler runs when it
        does.

        Returns:
            The function, unchanged.
        """
        check_callback(func)
        self.topic.handler(self._awaiting(func) if is_async(func) else self._blocking(func))
        mark_registered(func, "expiry.handler")
        return func

    def matches(self, key: bytes) -> bool:
        """Return True if the key matches the pattern. Idemgate's own keys never do: handling them would create more."""
        return self._matches(key) and not is_library_key(key)

    def track(self, key: Key) -> Tracked:
        """Put an existing key into the due set, so that its expiry is handled even if its event is lost.

        Repeat this after each change of its time to live, unless the server sends generic events (flag `g`). It takes
        two round trips.

        Returns:
            "tracked", "lasting" for a key that never expires, or "absent" for a key that does not exist.

        Raises:
            InvalidArgument: The key does not match the pattern.
        """
        raw_key = self._check_key(key)
        seen = self.context.link.run(self.look(raw_key))
        if seen.expires:
            self.topic.trigger_many([expiry.due(raw_key, seen)])
        return _track_result(seen)

    def untrack(self, key: Key) -> Untracked:
        """Remove a key from the due set; call it before deleting the key. See `Topic.cancel`."""
        return self.topic.cancel(self._check_key(key))

    async def run(self, stop: asyncio.Event, *, grace: float = 30.0, ready: Callable[[], None] | None = None) -> None:
        """Listen and keep the due set; see `Subscriber.run`. Handlers run in workers.

        Raises:
            ServerRejected: A server sends no expiry events.
        """
        await ExpiryListener(self).run(stop, grace, ready)

    def look(self, key: bytes) -> Any:
        return expiry.look(key, self.context.clock)

    def count(self, what: str, n: int = 1) -> None:
        if n:
            self.context.counters.add(f"expiry.{what}", n)

    def _check_key(self, key: Key) -> bytes:
        found = raw(key)
        if not self.matches(found):
            raise InvalidArgument("key", key, f"does not match {self.pattern!r}", "Pass a key that matches the pattern")
        return found

    # -- the handler of a due key, blocking and asyncio --------------------------------------------------------------

    def _blocking(self, func: Callable[[Expired], object]) -> Callable[[Delivery[Any]], None]:
        def handle_due(delivery: Delivery[Any]) -> None:
            seen = self.context.link.run(self.look(delivery.raw_key))
            if seen.expires:
                self.topic.trigger_many([expiry.due(delivery.raw_key, seen)])
            if self._needs_no_handler(delivery, seen):
                return
            claim = self._claim(delivery)
            if not claim.started:
                if self._was_handled(claim, delivery):
                    return
                run_plan(forget(self.context, delivery.raw_key, self.scope, False), self.context.link.run_all)
                claim = _require_started(self._claim(delivery))
            try:
                refuse_unfinished(func(expiry.expired_of(delivery)))
            except BaseException:
                claim.release()
                raise
            claim.complete(seen.now_ms)
            self.count("acted")

        return handle_due

    def _awaiting(self, func: Callable[[Expired], Any]) -> Callable[[Delivery[Any]], Any]:
        async def handle_due(delivery: Delivery[Any]) -> None:
            seen = await self.context.aio_link.run(self.look(delivery.raw_key))
            if seen.expires:
                await self.topic.aio.trigger_many([expiry.due(delivery.raw_key, seen)])
            if self._needs_no_handler(delivery, seen):
                return
            claim = await self._aio_claim(delivery)
            if not claim.started:
                if self._was_handled(claim, delivery):
                    return
                await run_plan_async(
                    forget(self.context, delivery.raw_key, self.scope, False), self.context.aio_link.run_all
                )
                claim = _require_started(await self._aio_claim(delivery))
            try:
                refuse_unfinished(await func(expiry.expired_of(delivery)))
            except BaseException:
                await claim.release()
                raise
            await claim.complete(seen.now_ms)
            self.count("acted")

        return handle_due

    def _claim(self, delivery: Delivery[Any]) -> Claim:
        return Claim(self.context, self._request(delivery)).acquire()

    def _aio_claim(self, delivery: Delivery[Any]) -> AioClaim:
        return AioClaim(self.context, self._request(delivery))

    def _request(self, delivery: Delivery[Any]) -> Request:
        # The lease of the delivery, which is renewed and begins no later. So no other worker gets this key before.
        lease = self.topic.policy.lease / 1000
        options: ClaimOptions = {"scope": self.scope, "lease": lease, "retention": self.retention}
        return claim_request(self.context, delivery.raw_key, None, options)

    def _needs_no_handler(self, delivery: Delivery[Any], seen: expiry.Look) -> bool:
        """Return True if there is nothing to handle: the key lives, or it was deleted."""
        if seen.alive:
            self.count("renewed")
        elif expiry.was_deleted(delivery):
            self.count("deleted")
        else:
            return False
        return True

    def _was_handled(self, claim: Claim | AioClaim, delivery: Delivery[Any]) -> bool:
        """Return True if the handler has handled this expiry already.

        Raises:
            AlreadyInProgress: Another delivery may still run.
        """
        if claim.retry_after is not None:
            raise AlreadyInProgress(delivery.key, claim.retry_after, claim._request.options.scope)
        found = expiry.is_echo(delivery, claim.result)
        self.count("echoes", found)
        return found


class AioExpiry:
    """An asyncio version of `Expiry`."""

    def __init__(self, blocking: Expiry) -> None:
        self._expiry = blocking

    async def track(self, key: Key) -> Tracked:
        """Put an existing key into the due set; see `Expiry.track`."""
        raw_key = self._expiry._check_key(key)
        seen = await self._expiry.context.aio_link.run(self._expiry.look(raw_key))
        if seen.expires:
            await self._expiry.topic.aio.trigger_many([expiry.due(raw_key, seen)])
        return _track_result(seen)

    async def untrack(self, key: Key) -> Untracked:
        """Remove a key from the due set; see `Expiry.untrack`."""
        return await self._expiry.topic.aio.cancel(self._expiry._check_key(key))


AnyClaim = TypeVar("AnyClaim", bound="Claim | AioClaim")


def _require_started(claim: AnyClaim) -> AnyClaim:
    if not claim.started:  # another worker claimed it between the two calls
        request = claim._request
        raise AlreadyInProgress(text_of(request.key), claim.retry_after or 1.0, request.options.scope)
    return claim


def _track_result(seen: expiry.Look) -> Tracked:
    return "tracked" if seen.expires else "lasting" if seen.alive else "absent"


def _check_pattern(pattern: str) -> str:
    if not isinstance(pattern, str) or not pattern:
        raise InvalidArgument("pattern", pattern, "not a pattern of keys", 'Use a text such as "session:*"')
    return pattern
