"""The topic for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from contextlib import suppress
from copy import copy
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from idemgate.core.calls import MAX_ENTRIES, Batch, Call, run_plan_async
from idemgate.core.clock import monotonic
from idemgate.core.durations import Duration, milliseconds
from idemgate.core.keys import Key
from idemgate.core.waits import wait_for_wakeup
from idemgate.errors import IdemgateError, StoreError
from idemgate.guard.current import Execution, current_claim
from idemgate.topics.dead_letters import AioDeadLetters
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
from idemgate.topics.policy import check_slots
from idemgate.topics.registry import find_entry
from idemgate.topics.reshard import (
    DeletedTopic,
    ReshardProgress,
    ReshardResult,
    plan_delete,
    plan_reshard,
)
from idemgate.topics.results import ResultWait
from idemgate.topics.topic_calls import TopicCalls
from idemgate.topics.triggers import PackedTrigger

if TYPE_CHECKING:
    from idemgate.store.aio import AsyncLink

__all__ = ["AioTopic"]

T = TypeVar("T")


class AioTopic(BaseTopic[Sent, Delivered]):
    """A topic for asyncio; create it with `gate.aio.topic`. The methods are those of `Topic`."""

    def __init__(self, definition: TopicDefinition) -> None:
        super().__init__(definition)
        self._coalescers: MutableMapping[asyncio.AbstractEventLoop, _TriggerCoalescer] = definition.coalescers

    @cached_property
    def dead(self) -> AioDeadLetters:
        """The dead letters: list, redrive, delete."""
        return AioDeadLetters(self.definition.context, self.open)

    async def open(self) -> TopicCalls:
        """Create the topic, or check its policy, once. See `Topic.open`."""
        return self.definition.calls or await self._open()

    async def _open(self, *check: CheckInput) -> TopicCalls:
        """Open the topic as `open` does. See `Topic._open`."""
        definition = self.definition
        while definition.calls is None:
            reply = await definition.context.aio_link.run(definition.open_call(*check))
            definition.apply_open_reply(reply, *check)
        return definition.calls

    async def run(self, build: Callable[[TopicCalls], Call[T]]) -> T:
        """Run one call. See `Topic.run`."""
        return await self.definition.context.aio_link.run(build(self.definition.calls or await self._open(build)))

    async def _run_for(self, key: Key, build: Callable[[TopicCalls], Call[T]]) -> T:
        """Run one call about a key. Errors name the key."""
        try:
            return await self.run(build)
        except IdemgateError as error:
            error.name_subject(self.name, key)
            raise

    async def trigger(
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
        """Send one trigger. See `Topic.trigger`.

        Triggers of one tick of the event loop share a script call, and therefore its failure.
        """
        trigger = Trigger(
            key, payload, priority=priority, group=group, delay=delay, at=at, version=version, event_id=event_id
        )
        if self.definition.context.tracer is not None:  # the usual path stays short
            (receipt,) = await self.trigger_many([trigger])
            return receipt
        try:
            if event_id is None and (execution := current_claim()) is not None:
                (trigger,) = await self._add_event_ids([trigger], execution)
            calls = self.definition.calls or await self._open(lambda calls: calls.pack_trigger(trigger))
            receipt = await self._coalescer().add(calls, calls.pack_trigger(trigger))
        except IdemgateError as error:
            error.name_subject(self.name, key)
            await self._count_refused(error)
            raise
        if receipt.due_ms is None or receipt.items_dropped:
            self.definition.note_dropped([trigger], [receipt])
        return receipt

    async def trigger_many(self, triggers: Iterable[Trigger | tuple[Key, Sent]]) -> list[Receipt]:
        """Send many triggers, in order. See `Topic.trigger_many`."""
        checked = to_triggers(triggers)
        if (tracer := self.definition.context.tracer) is None:
            return await self._trigger_many(checked)
        with tracer.trigger(self.name, checked) as step:
            receipts = await self._trigger_many(add_trace(checked, step.trace))
            step.note(receipts)
            return receipts

    async def _trigger_many(self, checked: list[Trigger]) -> list[Receipt]:
        try:
            if (execution := current_claim()) is not None:
                checked = await self._add_event_ids(checked, execution)
            receipts = await self._run_all(lambda calls: calls.trigger_many(checked))
        except IdemgateError as error:
            name_first(error, self.name, checked)
            await self._count_refused(error)
            raise
        self.definition.note_dropped(checked, receipts)
        return receipts

    async def _count_refused(self, error: IdemgateError) -> None:
        """Let the store count a payload that was refused. An error of that is ignored: the caller raises `error`."""
        if (call := self.definition.count_refused(error)) is not None:
            with suppress(Exception):
                await self.definition.context.aio_link.run(call, COUNT_WITHIN, COUNT_WITHIN)

    async def result(self, receipt: Receipt, timeout: Duration = "30s") -> Any:  # noqa: ASYNC109 - as for `Topic`
        """Wait for the end of a delivery and return what its handler returned. See `Topic.result`."""
        wait = ResultWait(self.name, (await self.open()).policy, receipt, timeout)
        link = self.definition.context.aio_link
        while (found := await self.run(lambda calls: calls.result(wait.ticket))) is None:
            wait.check_other_delivery(self.definition.context)
            wait.check_deadline()
            channel = (await self.open()).result_channel(wait.ticket)
            async with link.waiting(channel) as wake:
                if (found := await self.run(lambda calls: calls.result(wait.ticket))) is not None:
                    break
                await wait_for_wakeup(wake, wait.next_poll)
        return wait.decode(self.definition.context.codec, found)

    async def take(self, n: int = 1) -> list[Delivery[Delivered]]:
        """Take due messages. See `Topic.take`. If the task is cancelled, the leases of taken messages lapse."""
        deliveries: list[Delivery[Delivered]] = []
        check_count(n)
        calls = await self.open()
        try:
            for slot in self._rotate_slots(calls):
                more = True
                while more and len(deliveries) < n:
                    taken = await self.definition.context.aio_link.run(
                        calls.take(slot, min(n - len(deliveries), MAX_ENTRIES))
                    )
                    fitting, oversize = split_oversize(self.definition.context, taken.deliveries)
                    deliveries, more = deliveries + fitting, taken.more
                    if oversize:
                        await self._settle([], oversize)
        except StoreError:
            if not deliveries:
                raise
        return deliveries

    async def forward_once(self, n: int = 1000) -> int:
        """Forward the messages that are due now. See `Topic.forward_once`."""
        check_count(n)
        to, calls, sent = self.definition.require_forward(), await self.open(), 0
        try:
            for slot in self._rotate_slots(calls):
                more = True
                while more and n > sent:
                    part = calls.forward(slot, to, min(n - sent, MAX_ENTRIES))
                    reply = await self.definition.context.aio_link.run(part)
                    sent, more = sent + reply.sent, reply.more
        except StoreError:
            if not sent:
                raise
        return sent

    async def trim_forwarded(self) -> int:
        """Remove the entries that every consumer group has acknowledged. See `Topic.trim_forwarded`."""
        command, removed = self.definition.context.aio_link.command, 0
        await self.run(lambda calls: calls.time())
        for stream in self._streams_to_trim():
            removed += await run_plan_async(plan_trim(stream), lambda words: command(*words))
        return removed

    @overload
    async def ack(self, deliveries: Delivery[Any], *, result: object = None) -> SettleOutcome: ...
    @overload
    async def ack(self, deliveries: Sequence[Delivery[Any]], *, result: object = None) -> list[SettleOutcome]: ...
    async def ack(self, deliveries: Deliveries, *, result: object = None) -> SettleOutcome | list[SettleOutcome]:
        """Acknowledge deliveries as done. See `Topic.ack`."""
        return await self._settle(deliveries, self._build_acks(deliveries, result))

    @overload
    async def nack(
        self, deliveries: Delivery[Any], *, items: object = None, delay: Duration | None = None, reason: str = ""
    ) -> SettleOutcome: ...
    @overload
    async def nack(
        self, deliveries: Sequence[Delivery[Any]], *, delay: Duration | None = None, reason: str = ""
    ) -> list[SettleOutcome]: ...
    async def nack(
        self, deliveries: Deliveries, *, items: object = None, delay: Duration | None = None, reason: str = ""
    ) -> SettleOutcome | list[SettleOutcome]:
        """Report a failure, so that the message is retried. See `Topic.nack`."""
        return await self._settle(deliveries, self._build_nacks(deliveries, items, delay, reason))

    @overload
    async def bury(self, deliveries: Delivery[Any], *, reason: str = "") -> SettleOutcome: ...
    @overload
    async def bury(self, deliveries: Sequence[Delivery[Any]], *, reason: str = "") -> list[SettleOutcome]: ...
    @overload
    async def bury(self, key: Key, /, *, group: Key | None = None, reason: str = "") -> Buried: ...
    async def bury(
        self, deliveries: Deliveries | Key, *, group: Key | None = None, reason: str = ""
    ) -> SettleOutcome | list[SettleOutcome] | Buried:
        """Give up deliveries, or the pending message of a key: move it to the dead letters. See `Topic.bury`."""
        if isinstance(deliveries, Key):
            key = deliveries
            return cast(Buried, await self._run_for(key, lambda calls: calls.bury(key, group, reason)))
        return await self._settle(deliveries, self._build_burials(deliveries, group, reason))

    @overload
    async def release(self, deliveries: Delivery[Any]) -> SettleOutcome: ...
    @overload
    async def release(self, deliveries: Sequence[Delivery[Any]]) -> list[SettleOutcome]: ...
    async def release(self, deliveries: Deliveries) -> SettleOutcome | list[SettleOutcome]:
        """Return deliveries that were never started. See `Topic.release`."""
        return await self._settle(deliveries, self._build_settlements("return", deliveries))

    @overload
    async def extend(self, deliveries: Delivery[Any], lease: Duration | None = None) -> SettleOutcome: ...
    @overload
    async def extend(
        self, deliveries: Sequence[Delivery[Any]], lease: Duration | None = None
    ) -> list[SettleOutcome]: ...
    async def extend(
        self, deliveries: Deliveries, lease: Duration | None = None
    ) -> SettleOutcome | list[SettleOutcome]:
        """Extend the leases of deliveries. See `Topic.extend`."""
        lease_ms = None if lease is None else milliseconds(lease, "lease")
        checked = to_deliveries(deliveries)
        outcomes = await self._run_all(lambda calls: calls.extend_many(checked, lease_ms))
        return match_outcomes(deliveries, note_extension(checked, outcomes))

    async def cancel(self, key: Key, *, group: Key | None = None) -> Cancelled:
        """Cancel the message of a key. See `Topic.cancel`."""
        return cast(Cancelled, await self._run_for(key, lambda calls: calls.cancel(key, group)))

    async def reschedule(
        self, key: Key, *, at: datetime | None = None, delay: Duration | None = None, group: Key | None = None
    ) -> Rescheduled:
        """Move the pending message of a key to another time. See `Topic.reschedule`."""
        return cast(
            Rescheduled,
            await self._run_for(key, lambda calls: calls.reschedule(Trigger(key, at=at, delay=delay, group=group))),
        )

    async def flush(self, key: Key | None = None, *, group: Key | None = None) -> int:
        """Make pending messages due now. See `Topic.flush`."""
        if key is not None:
            return await self._run_for(key, lambda calls: calls.flush(key, group))
        moved, calls = 0, await self.open()
        waiting = [calls.flush_slot(slot) for slot in range(calls.policy.slots)]
        while waiting:
            reply = await self.definition.context.aio_link.run(waiting.pop())
            moved += reply.moved
            waiting += reply.more
        return moved

    async def pause(self, reason: str | None = None) -> bool:
        """Stop all deliveries until `resume`. See `Topic.pause`."""
        return await self._run_all(lambda calls: calls.pause(reason))

    async def resume(self) -> bool:
        """End a pause and wake the workers. See `Topic.resume`."""
        return await self._run_all(lambda calls: calls.resume())

    async def peek(self, key: Key, *, group: Key | None = None) -> Peek:
        """Return the state of a key. See `Topic.peek`."""
        return await self._run_for(key, lambda calls: calls.peek(key, group))

    async def versions(self, key: Key, *, group: Key | None = None) -> StoredVersion | None:
        """Return the version that the topic knows of a key. See `Topic.versions`."""
        return await self._run_for(key, lambda calls: calls.versions(key, group))

    async def reset_version(self, key: Key, *, group: Key | None = None) -> bool:
        """Forget the version that the topic knows of a key. See `Topic.reset_version`."""
        return await self._run_for(key, lambda calls: calls.reset_version(key, group))

    async def stats(self) -> Stats:
        """Return message counts and counters. See `Topic.stats`."""
        return await self._run_all(lambda calls: calls.stats())

    async def reshard(
        self, slots: int, on_progress: Callable[[ReshardProgress], object] = lambda _: None
    ) -> ReshardResult:
        """Change the number of slots while the topic is in use. See `Topic.reshard`."""
        check_slots(self.policy, slots)
        plan = plan_reshard(await self.open(), slots, on_progress)
        result = await run_plan_async(plan, self.definition.context.aio_link.run_all)
        self.definition.set_slots(result.after)
        return result

    async def delete(self, *, discard: bool = False) -> DeletedTopic:
        """Delete the topic from the server. See `Topic.delete`."""
        context = self.definition.context
        entry = await context.aio_link.run(find_entry(context.namespace, context.clock, self.name))
        plan = plan_delete(self.definition.build_calls(), entry, discard)
        result = await run_plan_async(plan, context.aio_link.run_all)
        self.definition.reset()
        return result

    async def next_due(self) -> datetime | None:
        """Return the earliest due time of the scheduled and ready messages. See `Topic.next_due`."""
        return (await self.stats()).next_due

    async def _add_event_ids(self, triggers: list[Trigger], execution: Execution) -> list[Trigger]:
        """Add event ids to the triggers of a guarded run. This opens the topic, because its stored policy decides."""
        calls = self.definition.calls or await self._open(lambda calls: calls.trigger_many(triggers))
        return add_event_ids(triggers, execution, self.name, calls.policy.merge)

    async def _run_all(self, build: Callable[[TopicCalls], Batch[T]]) -> T:
        return await self.definition.context.aio_link.run_all(build(self.definition.calls or await self._open(build)))

    async def _settle(
        self, deliveries: Deliveries, settlements: list[Settlement]
    ) -> SettleOutcome | list[SettleOutcome]:
        tracer = self.definition.context.tracer
        began = 0.0 if tracer is None else monotonic()
        outcomes = await self._run_all(lambda calls: calls.settle_many(settlements))
        if tracer is not None:
            tracer.record_settlements(self.name, settlements, outcomes, monotonic() - began)
        return match_outcomes(deliveries, outcomes)

    def _coalescer(self) -> _TriggerCoalescer:
        """Return the trigger coalescer of the running event loop."""
        loop = asyncio.get_running_loop()
        coalescer = self._coalescers.get(loop)
        if coalescer is None:
            coalescer = self._coalescers[loop] = _TriggerCoalescer(self.definition.context.aio_link)
        return coalescer


_Waiting = tuple[PackedTrigger, "asyncio.Future[Receipt]"]


class _TriggerCoalescer:
    """The triggers of all tasks since the last tick, for one event loop and one topic.

    They share one script call per slot. A coalesced trigger costs a fifth of a separate call. No task waits for others
    to arrive.
    """

    __slots__ = ("_link", "_waiting")

    def __init__(self, link: AsyncLink) -> None:
        self._link = link
        self._waiting: list[_Waiting] = []

    def add(self, calls: TopicCalls, packed: PackedTrigger) -> asyncio.Future[Receipt]:
        """Add a packed trigger and return the future of its receipt.

        Cancelling the future does not withdraw the trigger.
        """
        loop = asyncio.get_running_loop()
        receipt: asyncio.Future[Receipt] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._flush, calls)
        self._waiting.append((packed, receipt))
        return receipt

    def _flush(self, calls: TopicCalls) -> None:
        entries, self._waiting = self._waiting, []
        try:
            self._link.spawn(self._send(calls, entries))
        except Exception as error:  # noqa: BLE001 - every waiting task raises it
            _fail(entries, error)

    async def _send(self, calls: TopicCalls, entries: list[_Waiting]) -> None:
        try:
            receipts = await self._link.run_all(calls.trigger_packed([packed for packed, _ in entries]))
        except asyncio.CancelledError:
            for _, future in entries:
                future.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - every waiting task raises it
            _fail(entries, error)
        else:
            for (_, future), receipt in zip(entries, receipts, strict=True):
                if not future.done():
                    future.set_result(receipt)


def _fail(entries: list[_Waiting], error: Exception) -> None:
    for _, future in entries:
        if not future.done():
            # Each task names its own key in a copy.
            future.set_exception(copy(error) if isinstance(error, IdemgateError) else error)
