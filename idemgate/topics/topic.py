"""The topic for blocking code."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from typing import Any, TypeVar, cast, overload

from idemgate.core.calls import MAX_ENTRIES, Batch, Call, run_plan
from idemgate.core.clock import monotonic
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.keys import Key
from idemgate.errors import IdemgateError, StoreError
from idemgate.guard.current import Execution, current_claim
from idemgate.store.context import Context
from idemgate.topics.dead_letters import DeadLetters
from idemgate.topics.definition import (
    COUNT_WITHIN,
    BaseTopic,
    Buried,
    Cancelled,
    CheckInput,
    Delivered,
    Deliveries,
    Rescheduled,
    Sent,
    TopicDefinition,
    add_event_ids,
    add_trace,
    check_count,
    match_outcomes,
    name_first,
    note_extension,
    to_deliveries,
)
from idemgate.topics.deliveries import Settlement, plan_trim, split_oversize
from idemgate.topics.messages import Delivery, Peek, Receipt, SettleOutcome, Stats, StoredVersion, Trigger, to_triggers
from idemgate.topics.policy import Policy, check_slots
from idemgate.topics.registry import find_entry
from idemgate.topics.reshard import DeletedTopic, ReshardProgress, ReshardResult, plan_delete, plan_reshard
from idemgate.topics.results import ResultWait
from idemgate.topics.topic_aio import AioTopic
from idemgate.topics.topic_calls import TopicCalls

__all__ = ["AioTopic", "Topic"]

T = TypeVar("T")


class Topic(BaseTopic[Sent, Delivered]):
    """A topic for blocking code; create it with `gate.topic`. `topic.aio` is the same topic for asyncio."""

    def __init__(self, context: Context, name: str, declared: Policy, plain: bool) -> None:
        super().__init__(TopicDefinition(context, name, declared, plain))

    @cached_property
    def aio(self) -> AioTopic[Sent, Delivered]:
        """The same topic for asyncio."""
        return AioTopic(self.definition)

    @cached_property
    def dead(self) -> DeadLetters:
        """The dead letters: list, redrive, delete."""
        return DeadLetters(self.definition.context, self.open)

    def open(self) -> TopicCalls:
        """Create the topic, or check its policy, once. Every other method does this first.

        Returns:
            The call builders of the topic.

        Raises:
            PolicyChanged: The stored policy of the same revision differs.
        """
        return self.definition.calls or self._open()

    def _open(self, *check: CheckInput) -> TopicCalls:
        """Open the topic as `open` does. Before that creates it, the input is checked: invalid input writes nothing."""
        definition = self.definition
        while definition.calls is None:
            reply = definition.context.link.run(definition.open_call(*check))
            definition.apply_open_reply(reply, *check)
        return definition.calls

    def run(self, build: Callable[[TopicCalls], Call[T]]) -> T:
        """Run one call. It is built before the topic is created, so that invalid input writes nothing."""
        return self.definition.context.link.run(build(self.definition.calls or self._open(build)))

    def _run_for(self, key: Key, build: Callable[[TopicCalls], Call[T]]) -> T:
        """Run one call about a key. Errors name the key."""
        try:
            return self.run(build)
        except IdemgateError as error:
            error.name_subject(self.name, key)
            raise

    def trigger(
        self,
        key: Key,
        payload: Sent | None = None,
        *,
        priority: int | None = None,
        group: Key | None = None,
        delay: Duration | None = None,
        at: datetime | None = None,
        version: int | None = None,
        event_id: Key | None = None,
    ) -> Receipt:
        """Send one trigger. One round trip, atomic.

        Args:
            key: The key. Triggers of the same key are merged.
            payload: The payload, as the merge policy requires. Of a dataclass or pydantic model all fields are sent as
                they are, also those that it masks or leaves out in its output. `delivery.payload` has a dict of them.
            priority: The priority of the message; higher ones are delivered first. None leaves it unchanged.
            group: The group. At most `group_concurrency` deliveries of a group run at once.
            delay: The time from now until the message is due, instead of the policy's. Also moves a pending message.
            at: The time at which the message is due, as an aware datetime. A past time means now.
            version: A trigger with a lower version than an earlier one of its key is "dropped".
            event_id: A second trigger of this key with the same id within `dedup_retention` is a "duplicate". One
                event may trigger many keys. None: inside a function guarded with `once`, a policy that counts copies
                ("append", "count", "sum") gets an id that each attempt of the run shares. So a crash between the
                trigger and the end of the run does not count twice. Elsewhere there is none.

        Returns:
            The receipt: what became of the trigger, and when the message is due.

        Raises:
            InvalidArgument: An argument is invalid. No message was written. A payload that cannot be stored or merged,
                or is too large, is counted in this process and, if the store answers within 0.25 s, in the topic
                (`refused_payload`, `refused_too_large`).
            PolicyChanged: The stored policy of the same revision differs.
            StoreUnavailable: The trigger may or may not have been accepted. Repeat it with an `event_id`.
        """
        trigger = Trigger(
            key, payload, priority=priority, group=group, delay=delay, at=at, version=version, event_id=event_id
        )
        if self.definition.context.tracer is not None:  # the usual path stays short
            (receipt,) = self.trigger_many([trigger])
            return receipt
        try:
            if event_id is None and (execution := current_claim()) is not None:
                (trigger,) = self._add_event_ids([trigger], execution)
            receipt = self.run(lambda calls: calls.trigger(trigger))
        except IdemgateError as error:
            error.name_subject(self.name, key)
            self._count_refused(error)
            raise
        if receipt.due_ms is None or receipt.items_dropped:
            self.definition.note_dropped([trigger], [receipt])
        return receipt

    def trigger_many(self, triggers: Iterable[Trigger | tuple[Key, Sent]]) -> list[Receipt]:
        """Send many triggers, in order.

        All triggers are checked before the first is sent. Each script call is atomic and handles triggers of one slot:
        at most 128 KiB, and at most 128 of them. The limit is 40 if some have options beyond a time. Merging into
        more than 128 KiB of stored messages needs more calls.

        Args:
            triggers: `Trigger` objects or (key, payload) tuples.

        Returns:
            The receipts, in the order of the triggers.

        Raises:
            InvalidArgument: A trigger is invalid. No message was written. One is counted, as by `trigger`.
            StoreUnavailable: Some triggers may not have been accepted.
        """
        checked = to_triggers(triggers)
        if (tracer := self.definition.context.tracer) is None:
            return self._trigger_many(checked)
        with tracer.trigger(self.name, checked) as step:
            receipts = self._trigger_many(add_trace(checked, step.trace))
            step.note(receipts)
            return receipts

    def _trigger_many(self, checked: list[Trigger]) -> list[Receipt]:
        try:
            if (execution := current_claim()) is not None:
                checked = self._add_event_ids(checked, execution)
            receipts = self._run_all(lambda calls: calls.trigger_many(checked))
        except IdemgateError as error:
            name_first(error, self.name, checked)
            self._count_refused(error)
            raise
        self.definition.note_dropped(checked, receipts)
        return receipts

    def _count_refused(self, error: IdemgateError) -> None:
        """Let the store count a payload that was refused. An error of that is ignored: the caller raises `error`."""
        if (call := self.definition.count_refused(error)) is not None:
            with suppress(Exception):
                self.definition.context.link.run(call, COUNT_WITHIN, COUNT_WITHIN)

    def result(self, receipt: Receipt, timeout: Duration = "30s") -> Any:
        """Wait for the end of the delivery that carries a trigger and return what its handler returned.

        All triggers that were merged into one delivery get the same result. It needs `result_retention`. One round
        trip if the result is there. Else the caller subscribes and the end of the delivery wakes it. Any process may
        call it with the receipt.

        In a handler do not wait for another key of the same group: with `group_concurrency=1` that message runs only
        after this delivery, so the wait ends with ResultTimeout.

        Args:
            receipt: What `trigger` returned.
            timeout: The longest wait. 0 only looks.

        Returns:
            The value. A model comes back as the dict of its fields.

        Raises:
            ResultTimeout: The delivery did not end in time. It may still run.
            DeliveryFailed: The message became a dead letter.
            NoResult: The trigger was not accepted or was cancelled, or the value could not be stored.
            InvalidArgument: The topic stores no results, the receipt is of another topic, or the caller is part of the
                handler that runs this key, so that the wait could not end.
        """
        wait = ResultWait(self.name, self.open().policy, receipt, timeout)
        while (found := self.run(lambda calls: calls.result(wait.ticket))) is None:
            wait.check_other_delivery(self.definition.context)
            wait.check_deadline()
            channel = self.open().result_channel(wait.ticket)
            with self.definition.context.link.waiting(channel) as waiter:
                # Read again after subscribing: the delivery may have ended before the subscription.
                if (found := self.run(lambda calls: calls.result(wait.ticket))) is not None:
                    break
                waiter.wait(wait.next_poll)
        return wait.decode(self.definition.context.codec, found)

    def take(self, n: int = 1) -> list[Delivery[Delivered]]:
        """Take due messages, oldest first within a slot.

        Their leases begin now. Renew them with `extend`, and end each delivery with `ack`, `nack`, `bury` or
        `release`. It makes one round trip per slot and 100 deliveries, or 128 KiB of them. If a round trip fails, the
        deliveries taken before are returned.

        A delivery with a value larger than the gate's `max_bytes` is deferred by 30 s without an attempt, so that a
        gate with a larger limit can take it. It is counted as `topic.too_large`.

        Args:
            n: The maximum number of deliveries.

        Returns:
            At most `n` deliveries; an empty list if no message is due.

        Raises:
            StoreError: No delivery could be taken.
        """
        deliveries: list[Delivery[Delivered]] = []
        check_count(n)
        calls = self.open()
        try:
            for slot in self._rotate_slots(calls):
                more = True
                while more and len(deliveries) < n:
                    taken = self.definition.context.link.run(calls.take(slot, min(n - len(deliveries), MAX_ENTRIES)))
                    fitting, oversize = split_oversize(self.definition.context, taken.deliveries)
                    deliveries, more = deliveries + fitting, taken.more
                    if oversize:
                        self._settle([], oversize)
        except StoreError:
            if not deliveries:
                raise
        return deliveries

    def forward_once(self, n: int = 1000) -> int:
        """Forward the messages that are due now. A worker does this continuously; use it in a loop without a worker.

        It makes one atomic round trip per slot and 100 messages, or 128 KiB of them. If a round trip fails, the
        number of messages forwarded before is returned.

        Args:
            n: The maximum number of messages.

        Returns:
            The number of forwarded messages.

        Raises:
            InvalidArgument: `forward` has not set a target.
            StoreError: No message could be forwarded.
        """
        check_count(n)
        to, calls, sent = self.definition.require_forward(), self.open(), 0
        try:
            for slot in self._rotate_slots(calls):
                more = True
                while more and n > sent:
                    part = calls.forward(slot, to, min(n - sent, MAX_ENTRIES))
                    reply = self.definition.context.link.run(part)
                    sent, more = sent + reply.sent, reply.more
        except StoreError:
            if not sent:
                raise
        return sent

    def trim_forwarded(self) -> int:
        """Remove the entries of the target streams that every consumer group has acknowledged.

        A worker does this continuously; see `forward`. Up to about a hundred acknowledged entries stay in each stream.

        Returns:
            The number of removed entries.

        Raises:
            InvalidArgument: The topic is not forwarded to a stream.
        """
        command, removed = self.definition.context.link.command, 0
        self.run(lambda calls: calls.time())  # adopts the stored number of slots, which decides the streams
        for stream in self._streams_to_trim():
            removed += run_plan(plan_trim(stream), lambda words: command(*words))
        return removed

    @overload
    def ack(self, deliveries: Delivery[Any], *, result: object = None) -> SettleOutcome: ...
    @overload
    def ack(self, deliveries: Sequence[Delivery[Any]], *, result: object = None) -> list[SettleOutcome]: ...
    def ack(self, deliveries: Deliveries, *, result: object = None) -> SettleOutcome | list[SettleOutcome]:
        """Acknowledge deliveries as done.

        Args:
            deliveries: One delivery, or a sequence of them.
            result: The value that `result` returns to the callers of the triggers. It needs `result_retention`.

        Returns:
            "ok", or "lost": the lease had lapsed, another worker has or had the message, and nothing was changed. One
            outcome per delivery.

        Raises:
            InvalidArgument: The result cannot be stored. Nothing was written.
        """
        return self._settle(deliveries, self._build_acks(deliveries, result))

    @overload
    def nack(
        self, deliveries: Delivery[Any], *, items: object = None, delay: Duration | None = None, reason: str = ""
    ) -> SettleOutcome: ...
    @overload
    def nack(
        self, deliveries: Sequence[Delivery[Any]], *, delay: Duration | None = None, reason: str = ""
    ) -> list[SettleOutcome]: ...
    def nack(
        self, deliveries: Deliveries, *, items: object = None, delay: Duration | None = None, reason: str = ""
    ) -> SettleOutcome | list[SettleOutcome]:
        """Report a failure, so that the message is retried. Triggers that arrived meanwhile are merged into it.

        Args:
            deliveries: One delivery, or a sequence of them.
            items: The items of one delivery that failed, as for `PartialFailure`. The rest is done, in the same atomic
                step. Only these items can then become dead or cancelled. None means that all failed.
            delay: The time until the next attempt. None means the topic's backoff.
            reason: A text about the failure, stored with the message.

        Returns:
            "ok", "dead" after the last attempt, "cancelled" or "lost". One outcome per delivery.

        Raises:
            InvalidArgument: `items` holds something that is not in the payload, or the merge policy has no items.
                Nothing was written.
        """
        return self._settle(deliveries, self._build_nacks(deliveries, items, delay, reason))

    @overload
    def bury(self, deliveries: Delivery[Any], *, reason: str = "") -> SettleOutcome: ...
    @overload
    def bury(self, deliveries: Sequence[Delivery[Any]], *, reason: str = "") -> list[SettleOutcome]: ...
    @overload
    def bury(self, key: Key, /, *, group: Key | None = None, reason: str = "") -> Buried: ...
    def bury(
        self, deliveries: Deliveries | Key, *, group: Key | None = None, reason: str = ""
    ) -> SettleOutcome | list[SettleOutcome] | Buried:
        """Give up deliveries, or the pending message of a key: move it to the dead letters, from where it can return.

        Pass a key for a message that does harm. It takes one round trip and is atomic. A delivery of the key that runs
        is not touched: only the message pending behind it is moved.

        Args:
            deliveries: One delivery, a sequence of them, or a key.
            group: The group that the triggers of the key named. Not for deliveries.
            reason: A text about the failure, stored with the dead letter.

        Returns:
            Of deliveries "dead", "cancelled" or "lost". One outcome per delivery.
            Of a key "buried": no delivery of that message starts after this. "in_flight": it is being delivered, and
            no message is pending behind it. "absent": there was no message.
        """
        if isinstance(deliveries, Key):
            key = deliveries
            return cast(Buried, self._run_for(key, lambda calls: calls.bury(key, group, reason)))
        return self._settle(deliveries, self._build_burials(deliveries, group, reason))

    @overload
    def release(self, deliveries: Delivery[Any]) -> SettleOutcome: ...
    @overload
    def release(self, deliveries: Sequence[Delivery[Any]]) -> list[SettleOutcome]: ...
    def release(self, deliveries: Deliveries) -> SettleOutcome | list[SettleOutcome]:
        """Return deliveries that were never started. The attempt does not count.

        Args:
            deliveries: One delivery, or a sequence of them.

        Returns:
            "ok", "cancelled" or "lost". One outcome per delivery.
        """
        return self._settle(deliveries, self._build_settlements("return", deliveries))

    @overload
    def extend(self, deliveries: Delivery[Any], lease: Duration | None = None) -> SettleOutcome: ...
    @overload
    def extend(self, deliveries: Sequence[Delivery[Any]], lease: Duration | None = None) -> list[SettleOutcome]: ...
    def extend(self, deliveries: Deliveries, lease: Duration | None = None) -> SettleOutcome | list[SettleOutcome]:
        """Extend the leases of deliveries (heartbeat).

        Args:
            deliveries: One delivery, or a sequence of them.
            lease: The lease, counted from now. None means the topic's lease.

        Returns:
            "ok", "cancelled" (still held, but not retried after a failure) or "lost". One outcome per delivery. The
            last two also set `delivery.cancelled` and `delivery.lost`.
        """
        lease_ms = None if lease is None else milliseconds(lease, "lease")
        checked = to_deliveries(deliveries)
        outcomes = self._run_all(lambda calls: calls.extend_many(checked, lease_ms))
        return match_outcomes(deliveries, note_extension(checked, outcomes))

    def cancel(self, key: Key, *, group: Key | None = None) -> Cancelled:
        """Cancel the message of a key. One round trip, atomic.

        Args:
            key: The key.
            group: The group that its triggers named.

        Returns:
            "cancelled": no delivery starts after this. "in_flight": one may be running; it is not retried, and the
            message pending behind it was removed. "absent": there was no message.
        """
        return cast(Cancelled, self._run_for(key, lambda calls: calls.cancel(key, group)))

    def reschedule(
        self, key: Key, *, at: datetime | None = None, delay: Duration | None = None, group: Key | None = None
    ) -> Rescheduled:
        """Move the pending message of a key to another time. One round trip, atomic.

        Args:
            key: The key.
            at: The new time, as an aware datetime.
            delay: The time from now, instead of `at`.
            group: The group that its triggers named.

        Returns:
            "rescheduled", "in_flight" (it is being delivered and no message is pending behind it) or "absent".

        Raises:
            InvalidArgument: Neither or both of `at` and `delay` were given.
        """
        return cast(
            Rescheduled,
            self._run_for(key, lambda calls: calls.reschedule(Trigger(key, at=at, delay=delay, group=group))),
        )

    def flush(self, key: Key | None = None, *, group: Key | None = None) -> int:
        """Make pending messages due now.

        The whole topic takes several calls: 500 scheduled messages per call, then the messages that wait behind
        deliveries, then those that were scheduled meanwhile.

        Args:
            key: The key. None means the whole topic.
            group: The group that the triggers of `key` named.

        Returns:
            The number of messages moved. It may be too low while the topic is being resharded.
        """
        if key is not None:
            return self._run_for(key, lambda calls: calls.flush(key, group))
        moved, calls = 0, self.open()
        waiting = [calls.flush_slot(slot) for slot in range(calls.policy.slots)]
        while waiting:
            reply = self.definition.context.link.run(waiting.pop())
            moved += reply.moved
            waiting += reply.more
        return moved

    def pause(self, reason: str | None = None) -> bool:
        """Stop all deliveries until `resume`. Deliveries in flight continue. One round trip, atomic for each slot.

        `stats().paused` then tells since when, by whom and why. Workers log it with their next take.

        Args:
            reason: Why, for operators: at most 500 characters. None means no reason.

        Returns:
            False if it was paused before. Then the first pause stays, with its reason.

        Raises:
            InvalidArgument: The reason is no such text.
        """
        return self._run_all(lambda calls: calls.pause(reason))

    def resume(self) -> bool:
        """End a pause and wake the workers. Return False if the topic was not paused."""
        return self._run_all(lambda calls: calls.resume())

    def peek(self, key: Key, *, group: Key | None = None) -> Peek:
        """Return the state of a key: its pending message and its delivery. Changes nothing; one round trip."""
        return self._run_for(key, lambda calls: calls.peek(key, group))

    def versions(self, key: Key, *, group: Key | None = None) -> StoredVersion | None:
        """Return the version that the topic knows of a key. Changes nothing; one round trip.

        Args:
            key: The key.
            group: The group that its triggers named. A key that came with several groups may have a version in each.

        Returns:
            The highest `version` of its triggers, and until when it is stored. None if there is none.
        """
        return self._run_for(key, lambda calls: calls.versions(key, group))

    def reset_version(self, key: Key, *, group: Key | None = None) -> bool:
        """Forget the version that the topic knows of a key, such as one from a wrong clock. One round trip, atomic.

        The next trigger of the key is accepted with any version. Pending messages and dead letters stay as they are.

        Args:
            key: The key.
            group: The group that its triggers named.

        Returns:
            True if there was a version.
        """
        return self._run_for(key, lambda calls: calls.reset_version(key, group))

    def stats(self) -> Stats:
        """Return message counts, since when messages are due, and counters. Changes nothing.

        One script call per slot, all in one round trip. Each slot is read at one moment, and the slots one after the
        other. A call takes the server about 0.05 ms, and 2 ms if more than a hundred groups are blocked.
        """
        return self._run_all(lambda calls: calls.stats())

    def reshard(self, slots: int, on_progress: Callable[[ReshardProgress], object] = lambda _: None) -> ReshardResult:
        """Change the number of slots while the topic is in use. No message is lost or repeated.

        Slots are moved part by part. While a part is moved, calls that need it wait, for as long as the gate's
        `timeout`. A part of 100,000 messages takes a few seconds. After a crash, call it again: it continues, and the
        topic's other parts stay usable.

        Args:
            slots: The new number of slots, a power of two.
            on_progress: A function that receives the progress after each step.

        Returns:
            The number of slots before and after, and the number of moved entries.

        Raises:
            InvalidArgument: The number is invalid, or the topic does not exist.
            TopicInUse: It is being resharded to another number, or deleted.
            StoreError: The server failed. Call it again.
        """
        check_slots(self.policy, slots)  # first: a number that cannot be one must not create the topic
        result = run_plan(plan_reshard(self.open(), slots, on_progress), self.definition.context.link.run_all)
        self.definition.set_slots(result.after)
        return result

    def delete(self, *, discard: bool = False) -> DeletedTopic:
        """Delete the topic from the server: policy, counters, dedup entries and versions. The next use creates it.

        A refused call writes nothing, except if a message arrives while the topic is being closed: then the topic is
        opened again. After a crash, call it again. Messages that were forwarded stay in their lists and streams.

        Args:
            discard: Delete messages and dead letters too.

        Returns:
            The number of discarded messages and dead letters.

        Raises:
            TopicInUse: The topic holds messages or dead letters and `discard` is false.
        """
        context = self.definition.context
        entry = context.link.run(find_entry(context.namespace, context.clock, self.name))
        result = run_plan(plan_delete(self.definition.build_calls(), entry, discard), context.link.run_all)
        self.definition.reset()
        return result

    def next_due(self) -> datetime | None:
        """Return the earliest due time of the scheduled and ready messages. It is in the past if any is ready.

        None means that no message is pending, or that all of them wait for a delivery of their key or of their group.
        `stats().oldest_due` counts these, too.
        """
        return self.stats().next_due

    def _add_event_ids(self, triggers: list[Trigger], execution: Execution) -> list[Trigger]:
        """Add event ids to the triggers of a guarded run. This opens the topic, because its stored policy decides."""
        calls = self.definition.calls or self._open(lambda calls: calls.trigger_many(triggers))
        return add_event_ids(triggers, execution, self.name, calls.policy.merge)

    def _run_all(self, build: Callable[[TopicCalls], Batch[T]]) -> T:
        return self.definition.context.link.run_all(build(self.definition.calls or self._open(build)))

    def _settle(self, deliveries: Deliveries, settlements: list[Settlement]) -> SettleOutcome | list[SettleOutcome]:
        tracer = self.definition.context.tracer
        began = 0.0 if tracer is None else monotonic()
        outcomes = self._run_all(lambda calls: calls.settle_many(settlements))
        if tracer is not None:
            tracer.record_settlements(self.name, settlements, outcomes, monotonic() - began)
        return match_outcomes(deliveries, outcomes)
