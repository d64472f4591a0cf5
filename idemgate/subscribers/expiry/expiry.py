"""Keys that expire: a due set that is the truth, and events that are hints.

The due set is a topic. Its messages are the keys that are known to expire, each due when it does; whoever works on the
topic looks at the key first: if it lives on, it is due again when it expires then; if it is gone, the handler runs.
That needs no event at all. Events bring into the set what is not in it yet, and make due what expired early or was not
known; all listeners hear them, and the topic makes one message of it.

Whether a key that is gone was handled already is asked of its record (scope `expiry.<name>`), in which a claim
remembers when it was last found gone: an event that arrives after that tells nothing new.

Counters: `expiry.acted`, `.renewed` (due, but it lived), `.deleted`, `.echoes` (handled before); `.heard` (expired
events), `.registered` (keys put into the due set here), `.scans`, `.gaps`, `.dropped` (events, the backlog was full),
`.unfit` (keys that are too long or empty), `.deaf` (a server was found not to say what expires), `.store_errors`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from idemgate.core.durations import Duration, milliseconds
from idemgate.core.functions import awaited
from idemgate.core.keys import Key, is_ours, raw, text_of
from idemgate.core.numbers import whole
from idemgate.errors import AlreadyInProgress, InvalidArgument
from idemgate.guard.attempt import Passage
from idemgate.guard.claim import AioClaim, Claim
from idemgate.guard.decide import forget, forget_async
from idemgate.guard.options import ClaimOptions, attempt_of
from idemgate.store.context import Context
from idemgate.subscribers.callback import checked
from idemgate.subscribers.expiry import rules as expiry
from idemgate.subscribers.expiry.glob import matcher
from idemgate.subscribers.expiry.listener import Hearing
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
    """The expired keys of a pattern; make it with `gate.expiry`. `topic` is the due set, with its statistics, dead
    letters, `pause` ...; `expiry.aio` has the same methods, awaiting."""

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
        self.pattern = _pattern(pattern)
        if notifications not in ("check", "set", "assume"):
            fix = 'Use "check", "set" (change the server\'s setting if need be) or "assume" (do not ask)'
            raise InvalidArgument("notifications", notifications, "no such choice", fix)
        self.notifications = notifications
        self.scan_seconds = milliseconds(scan, "scan") / 1000
        self.retention = milliseconds(retention, "retention") / 1000
        if self.retention * 1000 < expiry.ECHO_MS:
            raise InvalidArgument("retention", retention, "events may arrive as late as that", 'Use at least "10s"')
        self.backlog = whole("backlog", backlog)
        self.scope = f"expiry.{name}"
        self._matches = matcher(self.pattern.encode())
        self.topic = make_topic()  # last: bad options must leave no topic behind

    def __repr__(self) -> str:
        return f"<Expiry {self.topic.name!r} {self.pattern!r}>"

    @cached_property
    def aio(self) -> AioExpiry:
        """The awaiting face."""
        return AioExpiry(self)

    def handler(self, func: OnExpired) -> OnExpired:
        """Registers the function, sync or async, that a worker calls with each key that is gone (`Expired`); returns it
        unchanged.

        At least once for each time that a key expired; never again after it has returned, for `retention`. What it
        raises means what it means in a topic: again after the backoff, `Bury`, `Retry`, dead letters. A key that lives
        again before it is tried (again) has not expired: the handler hears of it when it does.
        """
        checked(func)
        self.topic.handler(self._awaiting(func) if awaited(func) else self._blocking(func))
        return func

    def matches(self, key: bytes) -> bool:
        """Whether this key is meant. Those of idemgate itself never are: handling them would make more of them."""
        return self._matches(key) and not is_ours(key)

    def track(self, key: Key) -> Tracked:
        """Puts a key that exists into the due set, so that its end is acted on whatever becomes of events. Do so after
        each change of its time to live, if the server does not tell (flag `g`). Two round trips.

        "tracked"; "lasting": it never expires; "absent": there is no such key. InvalidArgument for one that does not match.
        """
        raw_key = self._meant(key)
        seen = self.context.link.run(self.look(raw_key))
        if seen.expires:
            self.topic.trigger_many([expiry.due(raw_key, seen)])
        return _tracked(seen)

    def untrack(self, key: Key) -> Untracked:
        """Takes a key out of the due set; call it before you delete one yourself. As `Topic.cancel`."""
        return self.topic.cancel(self._meant(key))

    async def run(self, stop: asyncio.Event, *, grace: float = 30.0, ready: Callable[[], None] | None = None) -> None:
        """As `Subscriber.run`. It listens and keeps the due set; handlers run in workers. Raises ServerRejected where the
        server does not say what expires."""
        await Hearing(self).run(stop, grace, ready)

    def look(self, key: bytes) -> Any:
        return expiry.look(key, self.context.clock)

    def count(self, what: str, n: int = 1) -> None:
        if n:
            self.context.counters.add(f"expiry.{what}", n)

    def _meant(self, key: Key) -> bytes:
        found = raw(key)
        if not self.matches(found):
            raise InvalidArgument("key", key, f"does not match {self.pattern!r}", "Nobody listens to that key")
        return found

    # -- a key is due: the same steps, blocking and awaiting ----------------------------------------------------------

    def _blocking(self, func: Callable[[Expired], object]) -> Callable[[Delivery[Any]], None]:
        def when_due(delivery: Delivery[Any]) -> None:
            seen = self.context.link.run(self.look(delivery.raw_key))
            if seen.expires:
                self.topic.trigger_many([expiry.due(delivery.raw_key, seen)])
            if self._settled(delivery, seen):
                return
            claim = self._claim(delivery)
            if not claim.started:
                if self._told(claim, delivery):
                    return
                forget(self.context, delivery.raw_key, self.scope, force=False)
                claim = _started(self._claim(delivery))
            try:
                _refuse_awaitable(func(expiry.expired_of(delivery)))
            except BaseException:
                claim.release()
                raise
            claim.complete(seen.now_ms)
            self.count("acted")

        return when_due

    def _awaiting(self, func: Callable[[Expired], Any]) -> Callable[[Delivery[Any]], Any]:
        async def when_due(delivery: Delivery[Any]) -> None:
            seen = await self.context.aio_link.run(self.look(delivery.raw_key))
            if seen.expires:
                await self.topic.aio.trigger_many([expiry.due(delivery.raw_key, seen)])
            if self._settled(delivery, seen):
                return
            claim = await self._aio_claim(delivery)
            if not claim.started:
                if self._told(claim, delivery):
                    return
                await forget_async(self.context, delivery.raw_key, self.scope, force=False)
                claim = _started(await self._aio_claim(delivery))
            try:
                await func(expiry.expired_of(delivery))
            except BaseException:
                await claim.release()
                raise
            await claim.complete(seen.now_ms)
            self.count("acted")

        return when_due

    def _claim(self, delivery: Delivery[Any]) -> Claim:
        return Claim(self.context, self._attempt(delivery)).ask()

    def _aio_claim(self, delivery: Delivery[Any]) -> AioClaim:
        return AioClaim(self.context, self._attempt(delivery))

    def _attempt(self, delivery: Delivery[Any]) -> Passage:
        options: ClaimOptions = {"scope": self.scope, "lease": self._lease, "retention": self.retention}
        return attempt_of(self.context, delivery.raw_key, None, options)

    @property
    def _lease(self) -> float:
        # That of the delivery, which is renewed and begins no later: nobody else gets this key before.
        return self.topic.policy.lease / 1000

    def _settled(self, delivery: Delivery[Any], seen: expiry.Look) -> bool:
        """Whether there is nothing to do: it lives, or it was deleted."""
        if seen.alive:
            self.count("renewed")
        elif expiry.deleted(delivery):
            self.count("deleted")
        else:
            return False
        return True

    def _told(self, claim: Claim | AioClaim, delivery: Delivery[Any]) -> bool:
        """Whether the handler was told of this already. AlreadyInProgress while another delivery may still run."""
        if claim.retry_after is not None:
            raise AlreadyInProgress(delivery.key, claim.retry_after)
        found = expiry.is_echo(delivery, claim.result)
        self.count("echoes", found)
        return found


class AioExpiry:
    """As `Expiry`, awaiting."""

    def __init__(self, blocking: Expiry) -> None:
        self._expiry = blocking

    async def track(self, key: Key) -> Tracked:
        """As `Expiry.track`."""
        raw_key = self._expiry._meant(key)
        seen = await self._expiry.context.aio_link.run(self._expiry.look(raw_key))
        if seen.expires:
            await self._expiry.topic.aio.trigger_many([expiry.due(raw_key, seen)])
        return _tracked(seen)

    async def untrack(self, key: Key) -> Untracked:
        """As `Expiry.untrack`."""
        return await self._expiry.topic.aio.cancel(self._expiry._meant(key))


AnyClaim = TypeVar("AnyClaim", bound="Claim | AioClaim")


def _started(claim: AnyClaim) -> AnyClaim:
    if not claim.started:  # somebody claimed it between our two questions
        raise AlreadyInProgress(text_of(claim._passage.key), claim.retry_after or 1.0)
    return claim


def _refuse_awaitable(result: object) -> None:
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise InvalidArgument(
            "handler", result, "a plain function returned what has yet to run", "Make it an `async def`"
        )


def _tracked(seen: expiry.Look) -> Tracked:
    return "tracked" if seen.expires else "lasting" if seen.alive else "absent"


def _pattern(pattern: str) -> str:
    if not isinstance(pattern, str) or not pattern:
        raise InvalidArgument("pattern", pattern, "not a pattern of keys", 'Use a text such as "session:*"')
    return pattern
