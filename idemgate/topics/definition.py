"""The definition of a topic, and the part of `Topic` and `AioTopic` that needs no I/O."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, Literal, cast
from weakref import WeakKeyDictionary

from idemgate.core.calls import Call
from idemgate.core.codec import digest
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.keys import Key, raw, text_of
from idemgate.core.scopes import mark_registered
from idemgate.core.text import last_line
from idemgate.core.validation import MOST, check_function, check_parameters
from idemgate.errors import DecodeError, IdemgateError, InvalidArgument, PolicyChanged, TooLarge
from idemgate.guard.current import Execution
from idemgate.store.context import Context
from idemgate.topics.deliveries import Settlement, nack_items
from idemgate.topics.merge import Merge
from idemgate.topics.messages import Delivery, Forward, Receipt, SettleOutcome, Trigger, decode_trigger, encode_trigger
from idemgate.topics.policy import Policy, diff_policies, find_newer, from_stored, merge_declarations, slots_of
from idemgate.topics.recurring import Misfire, RecurringTrigger, build_recurring
from idemgate.topics.slots import CheckPayload, OpenReply, open_topic, stored_policy
from idemgate.topics.topic_calls import TopicCalls

if TYPE_CHECKING:
    from zoneinfo import ZoneInfo

    from typing_extensions import TypeVar  # see `messages`

    Sent = TypeVar("Sent", default=Any)
    Delivered = TypeVar("Delivered", default=Sent)
else:
    from typing import TypeVar

    Sent, Delivered = TypeVar("Sent"), TypeVar("Delivered")

__all__ = [
    "COUNT_WITHIN",
    "BaseTopic",
    "Buried",
    "Cancelled",
    "CheckInput",
    "Delivered",
    "Deliveries",
    "Rescheduled",
    "Sent",
    "TopicDefinition",
    "add_event_ids",
    "add_trace",
    "check_count",
    "match_outcomes",
    "name_first",
    "note_extension",
    "to_deliveries",
]

log: logging.Logger = logging.getLogger("idemgate.topic")
MAX_FULL = 100
"""The keys with a full message that a program remembers, to log each once."""
COUNT_WITHIN = 0.25
"""Seconds that a refused trigger may wait until the store has counted it. After that its error is raised anyway."""
_REFUSAL = f"{InvalidArgument.__module__}.{InvalidArgument.__qualname__}: "
"""How the usual error of a refused trigger begins. Its text alone says what is wrong."""
R = TypeVar("R")
_STATUS = attrgetter("status")
_LOST = attrgetter("items_dropped")
CheckInput = Callable[[TopicCalls], object]
"""A function that builds a call, to raise InvalidArgument for invalid input before a topic is created."""
Buried = Literal["buried", "in_flight", "absent"]
Cancelled = Literal["cancelled", "in_flight", "absent"]
Rescheduled = Literal["rescheduled", "in_flight", "absent"]
Deliveries = Delivery[Any] | Sequence[Delivery[Any]]


def _accept(_calls: TopicCalls) -> None:
    """Accept any input."""


class TopicDefinition:
    """One topic of one context. `declared` is the policy that this program uses.

    `calls` is None until the server has confirmed the policy. A topic declared without options (`plain`) adopts the
    stored policy if there is one. A policy with a lower revision than the stored one adopts that, too. A running worker
    has its own calls, which no declaration changes.
    """

    def __init__(self, context: Context, name: str, declared: Policy, plain: bool) -> None:
        self.context = context
        self.name = name
        self.declared: Policy = declared
        self.plain: bool = plain
        self.handler: Callable[..., Any] | None = None
        self.forward: Forward | None = None
        self.recurring: dict[str, RecurringTrigger] = {}
        self.calls: TopicCalls | None = None
        self.check: CheckPayload | None = None
        self.unregister: Callable[[], object] = lambda: None  # removes it from its gate
        self._said: Policy = declared  # as the program declared it; `declared` may be an adopted one
        self._said_plain = plain
        self._refused = False
        self._adopted = 0
        self._full: dict[str, float] = {}
        self.coalescers: MutableMapping[Any, Any] = WeakKeyDictionary()  # of the async form, by event loop
        context.bound.add(self)

    def _rebind(self) -> None:
        """Open the topic again at its next use, with the policy that the program declared; see `Context.override`."""
        self.declared, self.plain, self.calls = self._said, self._said_plain, None
        self._refused, self._adopted = False, 0
        self.coalescers.clear()  # they have a link to the former store

    def declare(self, declared: Policy, plain: bool) -> None:
        """Declare the topic again: with the same policy, or with a new one and a higher revision. Raises PolicyChanged.

        A lower revision uses the known policy. A declaration that the server refused does not count, so the next one
        replaces it.
        """
        if self._refused:
            self.declared, self.plain, self._said, self._refused = declared, plain, declared, False
            self._said_plain = plain
            return
        if plain:
            return
        if self.plain or declared.revision > self._said.revision:
            same_slots = not self.plain and declared.slots == self._said.slots  # the stored number may be another one
            self.declared = replace(declared, slots=self.declared.slots) if same_slots else declared
            self.plain, self._said_plain, self._said, self.calls = False, False, declared, None
        elif declared.revision < self._said.revision:
            self._note_adopted(self._said.revision, declared.revision)
        elif declared.pack_stored() != self._said.pack_stored():
            before, asked = diff_policies(self._said.pack_stored(), declared.pack_stored())
            raise PolicyChanged(self.name, before, asked, "program")
        else:
            self._replace_policy(merge_declarations(self.declared, declared))

    def adopt(self, stored: bytes) -> None:
        """Use a stored policy with a higher revision, from the next call on."""
        newer = find_newer(stored, self.declared)
        if newer is not None and not self._refused:
            self._note_adopted(newer.revision, self.declared.revision)
            self._replace_policy(newer)

    def _note_adopted(self, revision: int, mine: int) -> None:
        """Log and count once for each revision that this program adopts it."""
        if revision <= self._adopted:
            return
        self._adopted = revision
        self.context.counters.add("topic.policy_adopted")
        self.context.activity.note_adopted(self.name, revision, mine)
        facts = {"topic": self.name, "revision": revision, "declared": mine}
        log.warning("topic.policy_adopted topic=%r revision=%d declared=%d", *facts.values(), extra=facts)

    def _replace_policy(self, policy: Policy) -> None:
        if policy != self.declared:
            self.declared = policy
            self.calls = self.build_calls() if self.calls is not None else None

    def set_dedup_retention(self, retention: int) -> None:
        """Set how long an event id is stored, in ms, before the first use of the topic. Raises InvalidArgument."""
        if self.calls is not None and self.declared.dedup_retention != retention:
            fix = "Decorate the function before the first trigger"
            raise InvalidArgument("retention", retention, f"topic {self.name!r} is in use already", fix)
        self.declared = replace(self.declared, dedup_retention=retention)
        self._said = replace(self._said, dedup_retention=retention)

    def set_handler(self, handler: Callable[..., Any]) -> None:
        """Register the handler. One that is defined again, as by a module that is loaded again, replaces itself.

        Raises InvalidArgument if it takes no delivery, or the topic has another consumer.
        """
        check_function(handler, "handler")
        check_parameters(handler, "handler", "delivery")
        if self.handler is not None and self.handler != handler and not _is_defined_again(self.handler, handler):
            raise InvalidArgument(
                "handler",
                handler,
                f"topic {self.name!r} has another one already, {self.handler!r}, and each message has one handler",
                "Call both from one handler, or use two topics",
            )
        if self.forward is not None:
            raise InvalidArgument(
                "handler", handler, f"topic {self.name!r} is forwarded", "Use a handler or forward(), not both"
            )
        if self.handler != handler:
            self.context.runners.warn_if_late("handler", self.name, self.name)
        self.handler = handler

    def set_check(self, check: CheckPayload) -> None:
        """Check the payload of each trigger of this process."""
        self.check = check
        if self.calls is not None:
            self.calls = self.build_calls()

    def set_forward(self, to: Forward) -> None:
        """Set the forward target. Raises InvalidArgument if the topic has a handler."""
        if self.handler is not None:
            raise InvalidArgument(
                "forward", self.name, "the topic has a handler", "Use a handler or forward(), not both"
            )
        if self.declared.result_retention is not None:
            raise InvalidArgument(
                "forward", self.name, "forwarded messages have no results", "Drop result_retention, or use a handler"
            )
        if self.forward is None:
            self.context.runners.warn_if_late("forward", self.name, self.name)
        self.forward = to

    @property
    def has_consumer(self) -> bool:
        """True if a worker can process messages, by a handler or by forwarding them.

        Raises InvalidArgument for a topic with recurring triggers and neither of both.
        """
        consumed = self.handler is not None or self.forward is not None
        if self.recurring and not consumed:
            raise InvalidArgument(
                "topics",
                self.name,
                f"it has recurring triggers ({', '.join(sorted(self.recurring))}) but no handler and no forward target",
                "Register a handler, or call topic.forward(...)",
            )
        return consumed

    def require_forward(self) -> Forward:
        """Return the forward target. Raises InvalidArgument if there is none."""
        if self.forward is None:
            raise InvalidArgument(
                "forward_once", self.name, "the topic has no forward target", 'Call topic.forward("list") first'
            )
        return self.forward

    def add_recurring(self, trigger: RecurringTrigger) -> None:
        """Add a recurring trigger. Raises InvalidArgument if another one has the same name."""
        if trigger.name not in self.recurring:
            self.context.runners.warn_if_late("every", self.name, f"{self.name}/{trigger.name}")
        known = self.recurring.setdefault(trigger.name, trigger)
        if known != trigger:
            raise InvalidArgument(
                "name", trigger.name, f"recurs already, as {known.expression!r}", "Give each its own name"
            )

    def build_calls(self) -> TopicCalls:
        """Return calls for the declared policy. They check a trigger before the topic itself is written."""
        context = self.context
        return TopicCalls(
            context.namespace, self.name, self.declared, context.codec, context.clock, self.set_slots, self.check,
            context.redact is not None,
        )  # fmt: skip

    def set_slots(self, slots: int) -> None:
        """Adopt the stored number of slots."""
        if slots != self.declared.slots:
            self._replace_policy(replace(self.declared, slots=slots))

    def count_refused(self, error: IdemgateError) -> Call[bool] | None:
        """Count a payload that a trigger refused, in this process. Return the call that counts it in the store.

        Return None for any other error.
        """
        if not isinstance(error, InvalidArgument) or not error.name.startswith("payload"):
            return None
        counter = "refused_too_large" if isinstance(error, TooLarge) else "refused_payload"
        self.context.counters.add(f"topic.{counter}")
        key = "" if error.subject is None else error.subject[1]
        self.context.activity.note_refused(self.name, key, last_line(error).removeprefix(_REFUSAL))
        return (self.calls or self.build_calls()).count_refused(counter, self.calls is not None)

    def note_dropped(self, triggers: Sequence[Trigger], receipts: Sequence[Receipt]) -> None:
        """Remember the keys of triggers that were dropped with a version: a wrong clock may have sent the newest.

        Log those that were dropped because their message is full, all of them or some of their items.
        """
        if "dropped" not in map(_STATUS, receipts) and not (self.declared.merge.drops and any(map(_LOST, receipts))):
            return
        for trigger, receipt in zip(triggers, receipts, strict=False):
            if receipt.items_dropped:
                self._warn_of_full(text_of(trigger.key))
            elif receipt.status != "dropped":
                continue
            elif trigger.version is not None:
                group = "" if trigger.group is None else text_of(trigger.group)
                self.context.activity.note_outdated(self.name, text_of(trigger.key), group)
            elif self.declared.merge.drops and self.declared.edge == "trailing":
                self._warn_of_full(text_of(trigger.key))

    def _warn_of_full(self, key: str) -> None:
        """Log that the message of a key is full. Do so once for each window or minute: the longer one counts."""
        now, policy = self.context.now(), self.declared
        if self._full.get(key, now) > now:
            return
        self._full.pop(key, None)
        self._full[key] = now + max(60.0, (policy.window or policy.max_delay or 0) / 1000)
        if len(self._full) > MAX_FULL:
            del self._full[next(iter(self._full))]
        facts = {"topic": self.name, "key": key}
        log.warning(
            "topic.message_full topic=%r key=%r: items of triggers are dropped, because the message has no room. "
            "Shorten the window, or merge with append(cap=...) or union(cap=...)", *facts.values(), extra=facts,
        )  # fmt: skip

    def reset(self) -> None:
        """Forget a topic that was deleted from the server. The next use opens it again."""
        self.calls = None
        if self.handler is None and self.forward is None and not self.recurring:
            self.unregister()

    def open_call(self, check: CheckInput = _accept) -> Call[Any]:
        """Build the call that opens the topic. For a plain topic it reads the stored policy and writes nothing.

        Any other topic is created by the call, so `check` raises InvalidArgument before it.
        """
        context = self.context
        if self.plain:
            return stored_policy(context.namespace, context.clock, self.name)
        check(self.build_calls())
        return open_topic(context.namespace, context.clock, self.name, self.declared)

    def apply_open_reply(self, reply: Any, check: CheckInput = _accept) -> bool:
        """Apply the reply of `open_call`. Return False if the topic has to be opened once more.

        That happens for a plain topic that does not exist yet, if `check` accepts the input. It also happens if the
        number of slots was changed since this program was written. Raises PolicyChanged.
        """
        # The kind of the reply decides, because `plain` may have changed while the call was under way.
        if not isinstance(reply, OpenReply):
            if reply is None:
                check(self.build_calls())
                self.plain = False
                return False
            self.declared = from_stored(reply, self.declared)
        elif reply.word == "resized":
            self.declared = replace(self.declared, slots=slots_of(reply.policy))
            return False
        elif reply.word == "newer":
            adopted = from_stored(reply.policy, self.declared)
            self._note_adopted(adopted.revision, self.declared.revision)
            self.declared = adopted
        elif reply.word == "differs":
            self._refused = True
            raise PolicyChanged(self.name, *diff_policies(reply.policy, self.declared.pack_stored()))
        self.calls = self.build_calls()
        return True


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
        if trigger.trace or (tracer := self.definition.context.tracer) is None:
            return self._pack_trigger(trigger)
        with tracer.trigger(self.name, [trigger], sends=False) as step:
            return self._pack_trigger(replace(trigger, trace=step.trace))

    def _pack_trigger(self, trigger: Trigger) -> bytes:
        definition = self.definition
        calls = definition.calls or definition.build_calls()
        if calls is not definition.calls and definition.plain:
            calls = calls.for_policy(replace(calls.policy, priority=True), calls.policy.slots)
        try:
            calls.pack_trigger(trigger)
        except InvalidArgument as error:
            definition.count_refused(error)
            raise
        clock = definition.context.clock
        now = time.time() if clock is None else clock.microseconds() / 1_000_000
        return encode_trigger(trigger, definition.context.codec, now)

    def unpack_trigger(self, packed: bytes) -> Trigger:
        """Return a trigger that `pack_trigger` packed, to send it: its models are in their stored form.

        Raises DecodeError.
        """
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
        hour runs in each hour. It runs in both of a repeated one.

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

    def _build_burials(self, deliveries: Deliveries, group: Key | None, reason: str) -> list[Settlement]:
        if group is not None:
            fix = "Leave it out, or pass a key"
            raise InvalidArgument("group", group, "is for a key: a delivery knows its own", fix)
        return self._build_settlements("bury", deliveries, reason=reason)

    def _build_settlements(
        self, verb: str, deliveries: Deliveries, delay: Duration | None = None, reason: str = ""
    ) -> list[Settlement]:
        checked = to_deliveries(deliveries)
        if verb == "nack" and delay is None:
            backoff = self.policy.backoff
            return [Settlement(verb, delivery, backoff.ms(delivery.attempt), reason) for delivery in checked]
        delay_ms = 0 if delay is None else milliseconds(delay, "delay", zero=True)
        return [Settlement(verb, delivery, delay_ms, reason) for delivery in checked]


def _is_defined_again(old: Any, new: Any) -> bool:
    """Return True if two functions come from one place: a module was loaded again, or a cell of a notebook run again.

    Nested functions and methods say nothing: one place makes many of them.
    """
    name = getattr(new, "__qualname__", "<")
    same = (old.__module__, getattr(old, "__qualname__", "")) == (new.__module__, name)
    return same and "<" not in name and not hasattr(old, "__self__") and not hasattr(new, "__self__")


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


def match_outcomes(deliveries: Deliveries, outcomes: list[str]) -> SettleOutcome | list[SettleOutcome]:
    """Return one outcome for one delivery, and a list for a sequence."""
    checked = cast("list[SettleOutcome]", outcomes)
    return checked[0] if isinstance(deliveries, Delivery) else checked


def name_first(error: IdemgateError, topic: str, triggers: Sequence[Trigger]) -> None:
    """Name the topic and the first of these triggers in an error about all of them."""
    if triggers:
        error.name_subject(topic, triggers[0].key, len(triggers) - 1)


def add_trace(triggers: list[Trigger], trace: bytes) -> list[Trigger]:
    """Return the triggers with the trace of the step that sends them. One that was packed before keeps its own."""
    if not trace:
        return triggers
    return [trigger if trigger.trace else replace(trigger, trace=trace) for trigger in triggers]


def add_event_ids(triggers: list[Trigger], execution: Execution, topic: str, merge: Merge) -> list[Trigger]:
    """Return the triggers of a guarded run with event ids, if the merge policy counts copies. A given `event_id` stays.

    If a process dies after a trigger and before the completion of its run, the next attempt makes the trigger again.
    Both attempts share the event id, so the topic drops the copy.

    Raises InvalidArgument for a payload that cannot be stored.
    """
    if not merge.counts_copies:
        return triggers
    return [
        trigger if trigger.event_id is not None else _add_event_id(trigger, execution, topic) for trigger in triggers
    ]


def _add_event_id(trigger: Trigger, execution: Execution, topic: str) -> Trigger:
    try:
        event_id = execution.next_event_id(topic, raw(trigger.key), digest(trigger.payload, name="payload"))
    except InvalidArgument as error:
        error.name_subject(topic, trigger.key)
        raise
    return replace(trigger, event_id=event_id)
