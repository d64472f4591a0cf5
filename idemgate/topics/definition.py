"""The definition of a topic, shared by its sync and async interfaces: policy, handler, and stored state."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from idemgate.core.calls import Call
from idemgate.core.validation import check_function, check_parameters
from idemgate.errors import InvalidArgument, PolicyChanged
from idemgate.store.context import Context
from idemgate.topics.calls import OpenReply, TopicCalls, open_topic, stored_policy
from idemgate.topics.coalesce import TriggerCoalescer
from idemgate.topics.cron import RecurringTrigger
from idemgate.topics.messages import Forward
from idemgate.topics.policy import Policy, diff_policies, find_newer, from_stored, merge_declarations, slots_of

__all__ = ["TopicDefinition"]

log = logging.getLogger("idemgate.topic")


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
        self.plain = plain
        self.handler: Callable[..., Any] | None = None
        self.forward: Forward | None = None
        self.recurring: dict[str, RecurringTrigger] = {}
        self.calls: TopicCalls | None = None
        self.unregister: Callable[[], object] = lambda: None  # removes it from its gate
        self._said: Policy = declared  # as the program declared it; `declared` may be an adopted one
        self._refused = False
        self._adopted = 0
        self._coalescers: WeakKeyDictionary[asyncio.AbstractEventLoop, TriggerCoalescer] = WeakKeyDictionary()

    def declare(self, declared: Policy, plain: bool) -> None:
        """Declare the topic again: with the same policy, or with a new one and a higher revision. Raises PolicyChanged.

        A lower revision uses the known policy. A declaration that the server refused does not count, so the next one
        replaces it.
        """
        if self._refused:
            self.declared, self.plain, self._said, self._refused = declared, plain, declared, False
            return
        if plain:
            return
        if self.plain or declared.revision > self._said.revision:
            same_slots = not self.plain and declared.slots == self._said.slots  # the stored number may be another one
            self.declared = replace(declared, slots=self.declared.slots) if same_slots else declared
            self.plain, self._said, self.calls = False, declared, None
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
        """Register the handler. Raises InvalidArgument if it takes no delivery, or the topic has another consumer."""
        check_function(handler, "handler")
        check_parameters(handler, "handler", "delivery")
        if self.handler is not None and self.handler is not handler:
            raise InvalidArgument(
                "handler",
                handler,
                f"topic {self.name!r} has one already: {self.handler!r}",
                "A topic has one handler",
            )
        if self.forward is not None:
            raise InvalidArgument(
                "handler", handler, f"topic {self.name!r} is forwarded", "Use a handler or forward(), not both"
            )
        if self.handler is None:
            self.context.runners.warn_if_late("handler", self.name, self.name)
        self.handler = handler

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

    def coalescer(self) -> TriggerCoalescer:
        """Return the trigger coalescer of the running event loop."""
        loop = asyncio.get_running_loop()
        coalescer = self._coalescers.get(loop)
        if coalescer is None:
            coalescer = self._coalescers[loop] = TriggerCoalescer(self.context.aio_link)
        return coalescer

    def build_calls(self) -> TopicCalls:
        """Return calls for the declared policy. They check a trigger before the topic itself is written."""
        context = self.context
        return TopicCalls(context.namespace, self.name, self.declared, context.codec, context.clock, self.set_slots)

    def set_slots(self, slots: int) -> None:
        """Adopt the stored number of slots."""
        if slots != self.declared.slots:
            self._replace_policy(replace(self.declared, slots=slots))

    def reset(self) -> None:
        """Forget a topic that was deleted from the server. The next use opens it again."""
        self.calls = None
        if self.handler is None and self.forward is None and not self.recurring:
            self.unregister()

    def open_call(self) -> Call[Any]:
        """Build the call that opens the topic."""
        if self.plain:
            return stored_policy(self.context.namespace, self.context.clock, self.name)
        context = self.context
        return open_topic(context.namespace, context.clock, self.name, self.declared)

    def apply_open_reply(self, reply: Any) -> bool:
        """Apply the reply of `open_call`. Return False if the topic has to be opened once more.

        That happens for a plain topic that does not exist yet. It also happens if the number of slots was changed
        since this program was written. Raises PolicyChanged.
        """
        # The kind of the reply decides, because `plain` may have changed while the call was under way.
        if not isinstance(reply, OpenReply):
            if reply is None:
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
