"""The methods of a gate that register subscribers: Pub/Sub channels, streams, lists and expired keys."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack

from idemgate.core.durations import Duration
from idemgate.core.scopes import mark_registered
from idemgate.core.validation import is_async
from idemgate.errors import InvalidArgument
from idemgate.store.context import Context
from idemgate.topics.policy import ExpiryOptions, TopicOptions
from idemgate.topics.topic import Topic

if TYPE_CHECKING:
    from idemgate.subscribers import Entry as StreamEntry
    from idemgate.subscribers import Expiry, ListEntry, PubSubMessage, Subscriber

__all__ = ["SubscriberMethods"]

MessageCallback = TypeVar("MessageCallback", bound="Callable[[PubSubMessage], object]")
EntryCallback = TypeVar("EntryCallback", bound="Callable[[StreamEntry], object]")
ListCallback = TypeVar("ListCallback", bound="Callable[[ListEntry], object]")
Registered = list["Subscriber"]  # within the class `list` is a method


class SubscriberMethods:
    """The part of `Gate` that registers subscribers."""

    context: Context
    topics: dict[str, Topic]
    subscribers: Registered

    def topic(self, name: str, **options: Unpack[TopicOptions]) -> Topic:
        """Return a topic; see `Gate.topic`."""
        raise NotImplementedError

    def add_subscriber(self, subscriber: Subscriber) -> None:
        """Register a consumer loop of your own, such as one of Kafka, SQS or NATS.

        `gate.run()` and `gate.aio.subscribers()` run it with the other subscribers, with their signals and grace time.

        Args:
            subscriber: an object with the method `run` of `idemgate.types.Subscriber`.

        Raises:
            InvalidArgument: it has no coroutine function `run` with these arguments.
        """
        run = getattr(subscriber, "run", None)
        if not is_async(run) or not _accepts_stop(run):
            fix = "Pass an object with `async def run(self, stop, *, grace=30.0, ready=None)`"
            raise InvalidArgument("subscriber", subscriber, "not a subscriber", fix)
        self._register(subscriber)

    def _register(self, subscriber: Subscriber) -> None:
        self.context.runners.warn_if_late("subscriber", None, repr(subscriber))
        self.subscribers.append(subscriber)

    def subscribe(
        self,
        channel: str,
        *,
        pattern: bool | None = None,
        concurrency: int = 32,
        backlog: int = 10_000,
    ) -> Callable[[MessageCallback], MessageCallback]:
        """Register a callback for the messages of a Redis Pub/Sub channel.

        `gate.run()` or `async with gate.aio.subscribers()` starts the subscription. Every replica of the program
        receives every message. With `once` below this decorator, one replica runs it; duplicates and keys in progress
        elsewhere are dropped. Pub/Sub stores nothing: a message is lost after an error of the callback (logged), or
        while the connection is down. The connection is restored. Counters: `channel.*`.

        Args:
            channel: the channel or pattern.
            pattern: True subscribes to all matching channels, "prices.*". None: False; a name like a pattern is
                invalid.
            concurrency: the most callbacks at once; 1 keeps the order.
            backlog: the most waiting messages. Further ones are dropped and counted (`channel.dropped`).

        Returns:
            A decorator that returns the function, sync or async, unchanged.

        Raises:
            InvalidArgument: an option is invalid.
        """

        _check_parentheses("subscribe", channel)

        def register(func: MessageCallback) -> MessageCallback:
            from idemgate.subscribers import Channel

            subscriber = Channel(self.context, channel, func, pattern=pattern, concurrency=concurrency, backlog=backlog)
            self._register(subscriber)
            mark_registered(func, "gate.subscribe")
            return func

        return register

    def stream(
        self,
        stream: str,
        *,
        group: str,
        consumer: str | None = None,
        start: Literal["0", "$"] = "0",
        concurrency: int = 32,
        reclaim: Duration = "30s",
        max_deliveries: int = 17,
        dead: str | None = None,
        max_dead_letters: int = 10_000,
    ) -> Callable[[EntryCallback], EntryCallback]:
        """Register a callback for the entries of a Redis stream, as a member of a consumer group.

        One replica gets each entry, at least once. Guard the callback with `once` to run it once. An entry is
        acknowledged when the callback has returned, or when its guard found the key done. While another owner runs
        the key, the entry stays pending until that lease may end. After another error it stays pending for `reclaim`,
        or the delay of `Retry` if that is shorter. After a permanent error (KeyReused, `Bury`, a stored failure, ...)
        or `max_deliveries` attempts it moves to the dead stream, with reason and error. Counters: `stream.*`.

        Args:
            stream: the stream.
            group: the consumer group. It is created if missing, with the stream.
            consumer: the name of this member, unique among live members. None: a new name, removed at the end of the
                run.
            start: where a new group begins: "0" at the first entry, "$" at new entries.
            concurrency: the most callbacks at once.
            reclaim: take over an entry that was not renewed for this long. Use at least the lease of the guard, and
                more than anything that blocks the event loop. It is renewed while the callback runs.
            max_deliveries: attempts before an entry is dead.
            dead: the dead stream. None: the name of the stream and ":dead".
            max_dead_letters: the most entries of the dead stream.

        Returns:
            A decorator that returns the function, sync or async, unchanged.

        Raises:
            InvalidArgument: an option is invalid.
        """

        def register(func: EntryCallback) -> EntryCallback:
            from idemgate.subscribers import Stream

            subscriber = Stream(
                self.context, stream, func, group=group, consumer=consumer, start=start, concurrency=concurrency,
                reclaim=reclaim, max_deliveries=max_deliveries, dead=dead, max_dead_letters=max_dead_letters,
            )  # fmt: skip
            self._register(subscriber)
            mark_registered(func, "gate.stream")
            return func

        return register

    def list(
        self,
        name: str,
        *,
        pop: Literal["left", "right"] = "left",
        concurrency: int = 32,
        reclaim: Duration = "30s",
        max_deliveries: int = 17,
        max_dead_letters: int = 10_000,
    ) -> Callable[[ListCallback], ListCallback]:
        """Register a callback for the entries of a Redis list.

        One replica gets each entry, at least once. Guard the callback with `once` to run it once. The list may also be
        the target of `topic.forward("list")`. An entry leaves the list when a consumer takes it. It is stored beside
        the list until the callback has returned, or its guard found the key done. While another owner runs the key, the
        entry is delayed until that lease may end. After another error it is delayed for `reclaim`, or the delay of
        `Retry`. After a permanent error (KeyReused, `Bury`, a stored failure, ...) or `max_deliveries` attempts it
        becomes a dead letter. Counters: `list.*`.

        Dead letters are a list of JSON objects with `id`, `deliveries`, `reason`, `error`, `at` and `data`, or
        `data_base64` for data that is not UTF-8. Its name is that of the list and ":dead". The other keys beside the
        list are named in the same way. If the name has no hash tag, they have it as theirs: `{orders}:dead`.

        With `concurrency=1` and one replica the order of the list is kept, except for retries.

        Args:
            name: the list.
            pop: the end from which to take: "left" if producers use RPUSH, as `forward` does, "right" for LPUSH.
            concurrency: the most callbacks at once.
            reclaim: the lease of a taken entry, renewed while the callback runs. After it another consumer takes the
                entry of a consumer that died. Use at least the lease of the guard, and more than anything that blocks
                the event loop.
            max_deliveries: attempts before an entry is dead.
            max_dead_letters: the most dead letters. The oldest are dropped and counted (`list.dead_trimmed`).

        Returns:
            A decorator that returns the function, sync or async, unchanged.

        Raises:
            InvalidArgument: an option is invalid, or the name has a closing brace and no hash tag.
        """

        _check_parentheses("list", name)

        def register(func: ListCallback) -> ListCallback:
            from idemgate.subscribers import ListQueue

            subscriber = ListQueue(
                self.context, name, func, pop=pop, concurrency=concurrency, reclaim=reclaim,
                max_deliveries=max_deliveries, max_dead_letters=max_dead_letters,
            )  # fmt: skip
            self._register(subscriber)
            mark_registered(func, "gate.list")
            return func

        return register

    def on_expired(
        self,
        name: str,
        pattern: str,
        *,
        notifications: Literal["check", "set", "assume"] = "check",
        scan: Duration = "5m",
        retention: Duration = "1h",
        backlog: int = 100_000,
        **options: Unpack[ExpiryOptions],
    ) -> Expiry:
        """Handle the keys of a pattern that expire. Register the callback with `@expiry.handler`.

        One of all listeners handles each key. Keys that expire without a listener are handled later. Run it with
        `gate.run()`, or with both `gate.aio.subscribers()` and `gate.aio.worker()`. Subscribers fill the due set,
        which is the topic `name`, and workers of that topic run the handler. Counters: `expiry.*`.

        A key enters the due set when its time to live is set, if the server reports that (flag `g`), or with `track`,
        and at the latest with the next scan. A key is missed only if it was not tracked, lived between two scans, and
        expired while no listener received its event. A deletion is no expiry if the server reports it (flag `g`) or
        after `untrack`. Otherwise it counts as one, because it looks the same.

        Args:
            name: the name of the due set.
            pattern: a pattern as in SCAN, "session:*".
            notifications: how to treat notify-keyspace-events, which needs "Ex" and should have "g". "check" raises
                ServerRejected at the start. "set" adds the missing flags. "assume" is for users that may not read it.
            scan: the interval between scans of all keys of the database by one of the listeners. Each listener also
                scans at its start and after each gap.
            retention: how long a handled key is stored, at least 10 s.
            backlog: the most waiting events. Further ones are dropped and counted.
            **options: `slots`, `lease`, `max_attempts` and `backoff`; see `topic`.

        Raises:
            InvalidArgument: an option is invalid.
        """
        from idemgate.subscribers import Expiry
        from idemgate.subscribers.expiry.rules import ECHO_MS, MERGE

        if name in self.topics:
            raise InvalidArgument(
                "name", name, "a topic of this gate has this name", "Choose another name for the due set"
            )

        def make_topic() -> Topic:
            return self.topic(name, merge=MERGE, dedup_retention=ECHO_MS / 1000, **options)

        expiry = Expiry(
            self.context, name, make_topic, pattern, notifications=notifications, scan=scan, retention=retention,
            backlog=backlog,
        )  # fmt: skip
        self._register(expiry)
        return expiry


def _check_parentheses(method: str, name: object) -> None:
    """Raise InvalidArgument if a function is in the place of the name: it would never be registered."""
    if callable(name):
        fix = f'Write @gate.{method}("name") above it'
        raise InvalidArgument(method, getattr(name, "__qualname__", name), "a function in the place of a name", fix)


def _accepts_stop(run: Any) -> bool:
    """Return True if the method can be called as `Subscriber.run`."""
    try:
        inspect.signature(run).bind(None, grace=0.0, ready=None)
    except TypeError:
        return False
    return True
