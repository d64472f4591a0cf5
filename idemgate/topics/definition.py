"""What a topic is, whichever face it is used through: its policy, its handler, and whether the store agrees with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from idemgate.core.calls import Call
from idemgate.core.functions import refuse_generator
from idemgate.errors import InvalidArgument, PolicyChanged
from idemgate.store.context import Context
from idemgate.topics.calls import Opened, TopicCalls, open_topic, stored_policy
from idemgate.topics.coalesce import Gathering
from idemgate.topics.cron import Recurring
from idemgate.topics.messages import Forward
from idemgate.topics.policy import Policy, differing, from_stored, reconciled, slots_of

__all__ = ["Opening"]


class Opening:
    """One topic of one context, shared by its faces. `declared` is what this program says; `calls` appear once the store
    agreed.

    A topic that was named without any policy (`plain`) takes over the stored one, if there is one.
    """

    def __init__(self, context: Context, name: str, declared: Policy, plain: bool, redefine: bool) -> None:
        self.context = context
        self.name = name
        self.declared: Policy = declared
        self.plain = plain
        self.redefine = redefine
        self.handler: Callable[..., Any] | None = None
        self.onward: Forward | None = None
        self.recurring: dict[str, Recurring] = {}
        self.calls: TopicCalls | None = None
        self._said = declared.slots
        self._gatherings: WeakKeyDictionary[asyncio.AbstractEventLoop, Gathering] = WeakKeyDictionary()

    def declare(self, declared: Policy, redefine: bool) -> None:
        """The same name again: the same policy, or a new one with `redefine`."""
        if self.plain:
            self._said = declared.slots
        elif declared.slots == self._said:  # and the store has another number by now
            declared = replace(declared, slots=self.declared.slots)
        if self.plain or redefine:
            self.declared, self.plain, self.redefine, self.calls = declared, False, redefine, None
        elif declared.stored() != self.declared.stored():
            raise PolicyChanged(self.name, *differing(self.declared.stored(), declared.stored()))
        else:
            self._adopt(reconciled(self.declared, declared))

    def _adopt(self, policy: Policy) -> None:
        if policy != self.declared:
            self.declared = policy
            self.calls = self.provisional() if self.calls is not None else None

    def handle(self, handler: Callable[..., Any]) -> None:
        refuse_generator(handler)
        if self.handler is not None and self.handler is not handler:
            raise InvalidArgument(
                "handler",
                handler,
                f"topic {self.name!r} has one already: {self.handler!r}",
                "A topic has one handler",
            )
        if self.onward is not None:
            raise InvalidArgument(
                "handler", handler, f"topic {self.name!r} is sent on", "Handle messages here, or send them on"
            )
        self.handler = handler

    def send_on(self, to: Forward) -> None:
        if self.handler is not None:
            raise InvalidArgument(
                "forward", self.name, "the topic has a handler", "Handle messages here, or send them on"
            )
        self.onward = to

    @property
    def worked(self) -> bool:
        """Whether a worker has something to do with its messages. InvalidArgument if they would come by themselves, and
        nobody said what for."""
        found = self.handler is not None or self.onward is not None
        if self.recurring and not found:
            raise InvalidArgument(
                "topics",
                self.name,
                f"it has recurring triggers ({', '.join(sorted(self.recurring))}) but nobody handles them",
                "Register a handler, or send them on: topic.forward(...)",
            )
        return found

    def destination(self) -> Forward:
        if self.onward is None:
            raise InvalidArgument("forward_due", self.name, "nobody said where to", 'Say topic.forward("list") before')
        return self.onward

    def recur(self, made: Recurring) -> None:
        known = self.recurring.setdefault(made.name, made)
        if known != made:
            raise InvalidArgument(
                "name", made.name, f"recurs already, as {known.expression!r}", "Give each its own name"
            )

    def gathering(self) -> Gathering:
        """That of the running event loop."""
        loop = asyncio.get_running_loop()
        found = self._gatherings.get(loop)
        if found is None:
            found = self._gatherings[loop] = Gathering(self.context.aio_link)
        return found

    def provisional(self) -> TopicCalls:
        """Calls by the declared policy: to check a trigger before the topic itself is written."""
        context = self.context
        return TopicCalls(context.namespace, self.name, self.declared, context.codec, context.clock, self.lay_out)

    def lay_out(self, slots: int) -> None:
        """The topic has this many slots, says the store."""
        if slots != self.declared.slots:
            self._adopt(replace(self.declared, slots=slots))

    def forget(self) -> None:
        """The next use opens it anew."""
        self.calls = None

    def ask(self) -> Call[Any]:
        """The call that opens the topic."""
        if self.plain:
            return stored_policy(self.context.namespace, self.context.clock, self.name)
        return open_topic(self.context.namespace, self.context.clock, self.name, self.declared, self.redefine)

    def answered(self, answer: Any) -> bool:
        """Takes the answer of `ask`; False if it has to be asked once more (a plain topic that nobody has made yet, or
        one whose number of slots was changed since this program was written)."""
        if not isinstance(answer, Opened):  # what was asked, not what another caller has learnt meanwhile, decides
            if answer is None:
                self.plain = False
                return False
            self.declared = from_stored(answer, self.declared)
        elif answer.word == "resized":
            self.declared = replace(self.declared, slots=slots_of(answer.policy))
            return False
        elif answer.word == "differs":
            raise PolicyChanged(self.name, *differing(answer.policy, self.declared.stored()))
        self.calls = self.provisional()
        return True
