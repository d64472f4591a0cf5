"""The part of a topic that needs no I/O, shared by `Topic` and `AioTopic`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, cast

from idemgate.core.durations import Duration, milliseconds
from idemgate.core.keys import Key, raw
from idemgate.core.scopes import mark_registered
from idemgate.core.validation import MOST
from idemgate.errors import DecodeError, InvalidArgument
from idemgate.topics.calls import Settlement, TopicCalls, nack_items
from idemgate.topics.cron import Misfire, build_recurring
from idemgate.topics.definition import TopicDefinition
from idemgate.topics.messages import Delivery, Forward, Outcome, Trigger, decode_trigger, encode_trigger
from idemgate.topics.policy import Policy

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

    from typing_extensions import TypeVar  # see `messages`

    Sent = TypeVar("Sent", default=Any)
    Delivered = TypeVar("Delivered", default=Sent)
else:
    from typing import TypeVar

    Sent, Delivered = TypeVar("Sent"), TypeVar("Delivered")

__all__ = [
    "BaseTopic",
    "Cancelled",
    "Delivered",
    "Deliveries",
    "Rescheduled",
    "Sent",
    "check_count",
    "match_outcomes",
    "note_extension",
    "to_deliveries",
]

R = TypeVar("R")
Cancelled = Literal["cancelled", "in_flight", "absent"]
Rescheduled = Literal["rescheduled", "in_flight", "absent"]
Deliveries = Delivery[Any] | Sequence[Delivery[Any]]


class BaseTopic(Generic[Sent, Delivered]):
    """The base of `Topic` and `AioTopic`: the type of a trigger's payload, and the type of a delivery's."""

    if not TYPE_CHECKING:

        def __class_getitem__(cls, types):
            """Let `Topic[Order]` mean `Topic[Order, Order]`, as it does for type checkers."""
            return super().__class_getitem__(types if isinstance(types, tuple) else (types, types))

    def __init__(self, definition: TopicDefinition) -> None:
        self.definition = definition
        self._first_slot = 0

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"

    @property
    def name(self) -> str:
        """The name of the topic."""
        return self.definition.name

    @property
    def namespace(self) -> str:
        """The namespace of its gate. Another namespace may have a topic of the same name."""
        return self.definition.context.namespace

    @property
    def policy(self) -> Policy:
        """The policy of the topic."""
        return self.definition.declared

    def handler(self, func: Callable[[Delivery[Delivered]], R]) -> Callable[[Delivery[Delivered]], R]:
        """Register the function that a worker calls with each delivery. Register it before the worker starts.

        Args:
            func: A function of one argument, the `Delivery`. It may be sync or async.

        Returns:
            The function, unchanged.

        Raises:
            InvalidArgument: The topic has another handler or a forward target, or `func` is a generator or takes no
                single argument.
        """
        self.definition.set_handler(func)
        mark_registered(func, "topic.handler")
        return func

    def pack_trigger(self, trigger: Trigger) -> bytes:
        """Check a trigger and return it as bytes, to store it elsewhere and send it later. No round trip.

        `unpack_trigger` returns it. A delay counts from now, so it becomes a time.

        Raises:
            InvalidArgument: The topic would refuse the trigger. If the topic was declared without options, only its
                first use tells what its stored policy refuses.
        """
        definition = self.definition
        calls = definition.calls or definition.build_calls()
        calls.pack_trigger(trigger)
        clock = definition.context.clock
        now = time.time() if clock is None else clock.microseconds() / 1_000_000
        return encode_trigger(trigger, definition.context.codec, now)

    def unpack_trigger(self, packed: bytes) -> Trigger:
        """Return a trigger that `pack_trigger` packed. Raises DecodeError."""
        return decode_trigger(packed, self.definition.context.codec)

    def forward(
        self, to: Literal["list", "stream"], target: Key | None = None, *, keep: int = 0, trim: bool | None = None
    ) -> None:
        """Let a worker move due messages into a Redis list or stream instead of handling them.

        The move is atomic. A list grows at its right end; a stream entry has the field `message`. Consumers read with
        `gate.consume_list`, `gate.stream`, BLPOP or XREADGROUP and decode entries with `decode_forwarded`. A consumer
        that crashes may read an entry again: guard it by `once` on `delivery.id`. Two slots may use the same token.

        Args:
            to: "list" or "stream".
            target: The key of the list or stream, on the same server as the topic. None means one key per slot, see
                `forward_targets`. On a cluster it must be None.
            trim: Whether a worker removes the entries of a stream that every consumer group has acknowledged. None
                means True without a target, and False for a named one, which other programs may read, too. Nothing is
                removed while the stream has no group. Create all groups before the first entry is acknowledged: a
                group that is added later does not get what was removed.
            keep: The approximate maximum number of entries in the target; the oldest are dropped first. 0 keeps all.

        Raises:
            InvalidArgument: An argument is invalid, or the topic has a handler.
        """
        if to not in ("list", "stream"):
            raise InvalidArgument("to", to, "neither a list nor a stream", 'Use "list" or "stream"')
        if not isinstance(keep, int) or isinstance(keep, bool) or not 0 <= keep <= MOST:
            raise InvalidArgument(
                "keep", keep, "not a number of entries", f"Use 0 for all of them, or an int up to {MOST}"
            )
        if trim not in (None, False) and (trim is not True or to == "list"):
            problem = "not a choice" if trim is not True else "a list has no groups"
            raise InvalidArgument("trim", trim, problem, "Use True or False for a stream; leave it out for a list")
        trims = to == "stream" and (target is None if trim is None else trim)
        self.definition.set_forward(Forward(to, None if target is None else raw(target), keep, trims))

    def forward_targets(self) -> list[str]:
        """Return the keys into which `forward` without a target moves messages, one per slot.

        The number of slots is the one that this process knows. It asks no server: after a reshard by another process,
        use the topic once before.
        """
        return [name.decode() for name in self.definition.build_calls().outboxes()]

    def _streams_to_trim(self) -> list[bytes]:
        """Return the streams into which this topic forwards. Raises InvalidArgument if there are none."""
        forward = self.definition.require_forward()
        if forward.kind != "stream":
            raise InvalidArgument(
                "trim_forwarded", self.name, "the topic is forwarded to a list", 'Use forward("stream")'
            )
        return [name.encode() for name in self.forward_targets()] if forward.target is None else [forward.target]

    def decode_forwarded(self, entry: bytes | Mapping[Any, bytes]) -> Delivery[Delivered]:
        """Decode a forwarded message.

        Args:
            entry: An element of the list, or the fields of a stream entry.

        Returns:
            A delivery without a lease. It needs no acknowledgement.

        Raises:
            DecodeError: The entry is not a forwarded message.
        """
        packed = entry.get(b"message", entry.get("message")) if isinstance(entry, Mapping) else entry
        if packed is None:
            raise DecodeError("the fields hold no `message`")
        return self.definition.build_calls().decode_forwarded(packed)

    def every(
        self,
        cron: str,
        *,
        name: str,
        tz: str | ZoneInfo = "UTC",
        payload: Sent | None = None,
        misfire: Misfire = "once",
        misfire_grace: Duration | None = None,
    ) -> None:
        """Trigger the topic at each occurrence of a cron expression. Declare it before the worker starts.

        Each occurrence is one message, however many workers schedule it. Its key is `name`, "@" and the UTC time:
        cancel that key to skip an occurrence.

        A worker schedules each occurrence when the previous one has come. Without a running worker occurrences are
        missed. `misfire` decides what runs after that, after an outage of the store, or after a pause of the topic.

        Changes of the clocks: an expression that names hours runs once at each of them, every day. An hour that is
        skipped makes one run at its end, and one that is repeated makes none the second time. An expression for every
        hour runs in each hour that there is, in both of a repeated one.

        Args:
            cron: A cron expression of five fields.
            name: The name of this recurring trigger, unique in the topic.
            tz: The time zone of the expression. Any but "UTC" needs a time-zone database.
            payload: The payload of every occurrence. One that was scheduled with another payload runs with this one,
                unless the topic is forwarded.
            misfire: "once": of several missed occurrences only the newest runs. "all": each of them runs.
            misfire_grace: The longest delay: an occurrence that cannot begin until then does not run. None is no limit.
                "all" needs one.

        Raises:
            InvalidArgument: The expression, the time zone, the name or the policy is invalid.
            NotConfigured: The extra `cron` is not installed, or the system has no time-zone database.
        """
        self.definition.add_recurring(build_recurring(name, cron, tz, payload, misfire, misfire_grace))

    def _rotate_slots(self, calls: TopicCalls) -> list[int]:
        """Return all slots. Each call starts at another slot, so that no slot is always served last."""
        slots = calls.policy.slots
        self._first_slot = (self._first_slot + 1) % slots
        return [(self._first_slot + i) % slots for i in range(slots)]

    def _build_nacks(
        self, deliveries: Deliveries, items: object, delay: Duration | None, reason: str
    ) -> list[Settlement]:
        settlements = self._build_settlements("nack", deliveries, delay, reason)
        if items is None:
            return settlements
        if not isinstance(deliveries, Delivery):
            raise InvalidArgument(
                "items", items, "are those of one delivery", "Nack a delivery of which only some failed alone"
            )
        return [nack_items(deliveries, items, settlements[0].delay, reason)]

    def _build_acks(self, deliveries: Deliveries, result: object) -> list[Settlement]:
        if result is None:
            return self._build_settlements("ack", deliveries)
        if self.policy.result_retention is None:
            fix = 'Declare it with result_retention="10m"'
            raise InvalidArgument("result", result, f"topic {self.name!r} stores no results", fix)
        packed = b"v" + self.definition.context.codec.encode(result, "result")
        return [Settlement("ack", delivery, result=packed) for delivery in to_deliveries(deliveries)]

    def _build_settlements(
        self, verb: str, deliveries: Deliveries, delay: Duration | None = None, reason: str = ""
    ) -> list[Settlement]:
        checked = to_deliveries(deliveries)
        if verb == "nack" and delay is None:
            backoff = self.policy.backoff
            return [Settlement(verb, delivery, backoff.ms(delivery.attempt), reason) for delivery in checked]
        delay_ms = 0 if delay is None else milliseconds(delay, "delay", zero=True)
        return [Settlement(verb, delivery, delay_ms, reason) for delivery in checked]


def to_deliveries(deliveries: Deliveries) -> list[Delivery[Any]]:
    """Return one or many deliveries as a list. Raises InvalidArgument."""
    checked = [deliveries] if isinstance(deliveries, Delivery) else list(deliveries)
    for delivery in checked:
        if not isinstance(delivery, Delivery):
            raise InvalidArgument(
                "deliveries", delivery, "not a delivery", "Pass what take() returned, one or a list of them"
            )
    return checked


def check_count(n: int) -> None:
    """Raise InvalidArgument unless `n` is an int of at least 0."""
    if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n <= MOST:
        raise InvalidArgument("n", n, "not a number of deliveries", f"Pass an int from 0 to {MOST}")


def note_extension(deliveries: Sequence[Delivery[Any]], outcomes: list[str]) -> list[str]:
    """Mark the deliveries that an extension found cancelled or lost. Return the outcomes."""
    for delivery, outcome in zip(deliveries, outcomes, strict=True):
        if outcome == "cancelled":
            delivery.cancelled = True
        elif outcome == "lost":
            delivery.lost = True
    return outcomes


def match_outcomes(deliveries: Deliveries, outcomes: list[str]) -> Outcome | list[Outcome]:
    """Return one outcome for one delivery, and a list for a sequence."""
    checked = cast("list[Outcome]", outcomes)
    return checked[0] if isinstance(deliveries, Delivery) else checked
