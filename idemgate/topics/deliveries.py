"""Deliveries: take or forward due messages, extend leases, and end deliveries (ack, nack, bury, release, defer)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from idemgate.core import keys
from idemgate.core.calls import MAX_ENTRIES, Arg, Batch, Call, Incomplete, new_id, split_batches
from idemgate.store.context import Context
from idemgate.topics.merge import pack
from idemgate.topics.messages import Delivery, Forward, Forwarded, Settled, SettledAndTaken, Taken, decode_forwarded
from idemgate.topics.partial import FailedItems
from idemgate.topics.results import NONE_RESULT
from idemgate.topics.slots import (
    BaseCalls,
    Rebuild,
    SlotRequest,
    divide,
    earliest,
    flatten,
    next_batch_size,
    restore_order,
    split_request,
)

__all__ = [
    "MAX_MIXED_SETTLEMENTS",
    "DeliveryCalls",
    "Settlement",
    "defer_oversize",
    "nack_items",
    "plan_trim",
    "split_oversize",
]

log: logging.Logger = logging.getLogger("idemgate.topic")
T = TypeVar("T")
MAX_MIXED_SETTLEMENTS = 32
"""Maximum settlements per script call if some are not an ack. Those take several times as long."""
_OUTCOMES = {word.encode(): word for word in ("ok", "dead", "cancelled", "lost", "left")}
_OVERSIZE_DELAY = 30_000
"""Ms until the message is due again. It limits the takes if no worker has a larger limit."""


class Settlement(NamedTuple):
    """The end of one delivery.

    `verb` is ack, nack, bury, return (never started) or defer (not possible yet; the attempt does not count). `delay`
    is in ms before the next attempt. `part` holds the items that a nack retries; None means all of them. `result` is
    the encoded result of an ack (`encode_result`); None stands for that of a handler that returned None.
    """

    verb: str
    delivery: Delivery[Any]
    delay: int = 0
    failure: str = ""
    part: FailedItems | None = None
    result: bytes | None = None

    @property
    def size(self) -> int:
        """The approximate number of bytes that the script reads to settle this delivery."""
        return self.delivery.size + len(self.result or b"")

    def args(self, position: int) -> tuple[Arg, ...]:
        """Return the script arguments of a settlement other than a plain ack. `position` counts from 1."""
        if self.verb == "ack":
            return (position, "result", 0, NONE_RESULT if self.result is None else self.result)
        verb, failure = (self.verb, self.failure) if self.part is None else ("part", self.part.pack(self.failure))
        return (position, verb, self.delay, failure)


def nack_items(delivery: Delivery[Any], items: object, delay: int, failure: str) -> Settlement:
    """Return the settlement that retries only these items.

    Without items it is an ack. With all items it is a plain nack, unless some were dropped: these are done. Raises
    InvalidArgument for an item that the delivery does not have.
    """
    part = delivery.select_items(items)
    if not part.items:
        return Settlement("ack", delivery)
    return Settlement("nack", delivery, delay, failure, part if part.items < part.of or delivery.dropped else None)


class DeliveryCalls(BaseCalls):
    """The calls that take messages, and that extend or end their deliveries."""

    __slots__ = ()

    # -- take and forward ---------------------------------------------------------------------------------------------

    def take(self, slot: int, n: int, request: bytes = b"") -> Call[Taken]:
        """Build the call that takes at most `n` due messages of a slot. With `n=0` it only requeues lapsed leases.

        `request` is the id of the request that this call sends again, or a part of. Without one it is a new request.
        """
        request, policy = request or new_id(), self.policy
        args = (request, self._policy, n, policy.lease, *policy.slot_limits(slot))
        return self._call(
            "take",
            slot,
            args,
            lambda reply: self._read_deliveries(slot, reply, len(reply)),
            self._redirect_take(request, n),
        )

    def _redirect_take(self, request: bytes, n: int) -> Rebuild:
        def rebuild(calls: Any, slot: int) -> Batch[Taken]:
            # Several old slots may now be one slot. Each takes from it, since each caller needs its next due time.
            slots = calls.merged_successors(slot, self)
            shares = zip(slots, divide(n, len(slots)), split_request(request, len(slots)), strict=True)
            return Batch([calls.take(*share) for share in shares], _join_takes)

        return rebuild

    def _read_deliveries(self, slot: int, reply: list[Any], end: int) -> Taken:
        """Return the deliveries in a reply, up to position `end`."""
        name, merge, codec = self.name, self.policy.merge, self.codec
        token = reply[4]
        deliveries: list[Delivery[Any]] = [
            # Not Delivery[Any](...): subscripting would cost as much as all the rest.
            Delivery(name, slot, key, token, due_ms, None, (packed, merge, codec))
            for key, due_ms, packed in zip(*(reply[at:end:3] for at in range(5, 8)), strict=True)
        ]
        paused = token if type(token) is bytes else None
        return Taken(deliveries, lapsed=reply[3], next_due_ms=reply[2], now_ms=reply[1], paused=paused)

    def forward(self, slot: int, to: Forward, n: int, request: bytes = b"") -> Call[Forwarded]:
        """Build the call that moves at most `n` due messages of a slot into the target list or stream.

        `request` is as for `take`.
        """
        request = request or new_id()

        def rebuild(calls: Any, slot: int) -> Batch[Forwarded]:
            slots = calls.merged_successors(slot, self)
            shares = zip(slots, divide(n, len(slots)), split_request(request, len(slots)), strict=True)
            return Batch([calls.forward(slot, to, share, part) for slot, share, part in shares], _join_forwards)

        return self._call(
            "forward",
            slot,
            (request, self._policy, n, to.kind, to.keep),
            lambda reply: Forwarded(reply[3], reply[2], reply[1], reply[4] if len(reply) > 4 else None),
            rebuild,
            to.target or keys.outbox(self.namespace, self.name, slot, self.policy.slots),
        )

    def outboxes(self) -> list[bytes]:
        """Return the keys into which messages are forwarded without a named target, one per slot."""
        slots = self.policy.slots
        return [keys.outbox(self.namespace, self.name, slot, slots) for slot in range(slots)]

    def decode_forwarded(self, packed: bytes) -> Delivery[Any]:
        """Decode a forwarded message as its target stores it. Raises DecodeError."""
        return decode_forwarded(self.name, packed, self.policy.merge, self.codec)

    # -- end and extend -----------------------------------------------------------------------------------------------

    def settle(self, slot: int, settlements: Sequence[Settlement]) -> Call[Settled]:
        """Build the call that ends these deliveries of one slot."""
        return self._settle(slot, SlotRequest(new_id(), settlements))

    def _settle(self, slot: int, request: SlotRequest[Settlement]) -> Call[Settled]:
        entries = request.entries

        def read(reply: list[Any]) -> Settled:
            outcomes = request.select_answers(_read_outcomes(reply[3:]))
            return self._complete(slot, entries, Settled(outcomes, reply[2], reply[1]), lambda settled: settled)

        return self._call(
            "settle",
            slot,
            (request.id, self._policy, _pack_deliveries(entries), *self._failure_args(entries)),
            read,
            _redirect_settle(request),
        )

    def _complete(
        self, slot: int, settlements: Sequence[Settlement], settled: Settled, build: Callable[[Settled], T]
    ) -> T:
        """Return `build(settled)`. Raises Incomplete with the remaining calls if the script deferred some entries."""
        outcomes = settled.outcomes
        if "left" not in outcomes[-1:]:
            return build(settled)
        done = outcomes.index("left")
        rest = split_batches(list(settlements[done:]), lambda entry: entry.size, next_batch_size(done))
        calls = [self.settle(slot, batch) for batch in rest]

        def join(answers: list[Settled]) -> T:
            all_outcomes = outcomes[:done] + flatten(answer.outcomes for answer in answers)
            return build(Settled(all_outcomes, answers[-1].next_due_ms, answers[-1].now_ms))

        raise Incomplete(Batch(calls, join))

    def _failure_args(self, settlements: Sequence[Settlement]) -> list[Arg]:
        """Return the arguments of all settlements other than plain acks."""
        args: list[Arg] = []
        for position, settlement in enumerate(settlements, 1):
            if settlement.verb != "ack" or self.policy.result_retention is not None:
                args += settlement.args(position)
        return args

    def max_settlements(self, settlements: Sequence[Settlement]) -> int:
        """Return the maximum number of these settlements that fit in one script call."""
        acks = [settlement.verb for settlement in settlements].count("ack")
        plain = self.policy.result_retention is None and acks == len(settlements)
        return MAX_ENTRIES if plain else MAX_MIXED_SETTLEMENTS

    def settle_and_take(self, slot: int, settlements: Sequence[Settlement], n: int) -> Call[SettledAndTaken]:
        """Build the call that settles these deliveries and then takes at most `n`, in one atomic step."""
        request, take_id, policy = SlotRequest(new_id(), settlements), new_id(), self.policy
        limits = (n, policy.lease, *policy.slot_limits(slot))
        args = (
            request.id,
            self._policy,
            _pack_deliveries(settlements),
            take_id,
            *limits,
            *self._failure_args(settlements),
        )

        def read(reply: list[Any]) -> SettledAndTaken:
            end = len(reply) - len(settlements)
            taken = self._read_deliveries(slot, reply, end)
            settled = Settled(_read_outcomes(reply[end:]), taken.next_due_ms, taken.now_ms)
            return self._complete(slot, settlements, settled, lambda all_settled: SettledAndTaken(all_settled, taken))

        def rebuild(calls: Any, slot: int) -> Batch[SettledAndTaken]:
            # Each half keeps its request id, as if it had been sent as a separate call.
            settles, takes = _redirect_settle(request)(calls, slot), self._redirect_take(take_id, n)(calls, slot)
            count = len(settles.calls)
            return Batch(
                [*settles.calls, *takes.calls],
                lambda answers: SettledAndTaken(settles.join(answers[:count]), takes.join(answers[count:])),
            )

        return self._call("settle_and_take", slot, args, read, rebuild)

    def settle_many(self, settlements: Iterable[Settlement]) -> Batch[list[str]]:
        """Build the calls that end many deliveries. Outcomes keep the order of the settlements.

        A script call ends deliveries of one slot: at most 128 KiB, and at most 100 of them. The limit is 32 if some
        are not an ack. Large messages that wait behind the deliveries need more calls.
        """
        entries = list(settlements)
        return self._split_by_slot(
            entries,
            lambda entry: self.slot_of_delivery(entry.delivery),
            self.settle,
            lambda answer: answer.outcomes,
            lambda entry: entry.size,
            self.max_settlements(entries),
        )

    def extend(self, slot: int, deliveries: Sequence[Delivery[Any]], lease: int | None = None) -> Call[list[str]]:
        """Build the call that extends the leases by `lease` ms from now. None means the lease of the policy."""
        return self._extend(slot, SlotRequest(b"", deliveries), self.policy.lease if lease is None else lease)

    def _extend(self, slot: int, request: SlotRequest[Delivery[Any]], lease: int) -> Call[list[str]]:
        args: list[Arg] = [lease]
        for delivery in request.entries:
            args += (delivery.raw_key, delivery.token)
        return self._call(
            "extend",
            slot,
            args,
            lambda reply: _read_outcomes(reply[2:]),
            lambda calls, _: request.split(
                calls.slot_of_delivery, lambda slot, part: calls._extend(slot, part, lease), restore_order
            ),
        )

    def extend_many(self, deliveries: Iterable[Delivery[Any]], lease: int | None = None) -> Batch[list[str]]:
        """Build the calls that extend many leases. Outcomes keep the order of the deliveries."""
        return self._split_by_slot(
            deliveries,
            self.slot_of_delivery,
            lambda slot, batch: self.extend(slot, batch, lease),
            lambda answer: answer,
            lambda delivery: delivery.size,
        )


def _join_takes(answers: list[Taken]) -> Taken:
    return Taken(
        flatten(answer.deliveries for answer in answers),
        lapsed=sum(answer.lapsed for answer in answers),
        next_due_ms=earliest(answer.next_due_ms for answer in answers),
        now_ms=answers[-1].now_ms,
        paused=next((answer.paused for answer in answers if answer.paused), None),
    )


def _join_forwards(answers: list[Forwarded]) -> Forwarded:
    next_due_ms = earliest(answer.next_due_ms for answer in answers)
    paused = next((answer.paused for answer in answers if answer.paused), None)
    return Forwarded(sum(answer.sent for answer in answers), next_due_ms, answers[-1].now_ms, paused)


def _redirect_settle(request: SlotRequest[Settlement]) -> Rebuild:
    return lambda calls, _: request.split(
        lambda settlement: calls.slot_of_delivery(settlement.delivery), calls._settle, _join_settles
    )


def _join_settles(positions: list[list[int]], answers: list[Settled]) -> Settled:
    outcomes = restore_order(positions, [answer.outcomes for answer in answers])
    next_due_ms = earliest(answer.next_due_ms for answer in answers)
    return Settled(outcomes, next_due_ms, max(answer.now_ms for answer in answers))


def _pack_deliveries(settlements: Sequence[Settlement]) -> bytes:
    """Return keys and tokens of all deliveries as one argument, because each argument costs time on both sides."""
    flat: list[object] = []
    for settlement in settlements:
        delivery = settlement.delivery
        flat += (delivery.raw_key, delivery.token)
    return pack(flat)


def _read_outcomes(words: list[bytes]) -> list[str]:
    return [_OUTCOMES[word] for word in words]


# -- deliveries that are too large ------------------------------------------------------------------------------------


def defer_oversize(context: Context, delivery: Delivery[Any]) -> Settlement | None:
    """Return the settlement that defers a delivery with a value that is too large for this gate, else None.

    It counts no attempt. It is counted and logged.
    """
    size = delivery.oversize
    if not size:
        return None
    context.counters.add("topic.too_large")
    facts = {"topic": delivery.topic, "key": delivery.key, "size": size, "max_bytes": context.codec.max_bytes}
    log.error("topic.too_large topic=%r key=%r size=%d max_bytes=%d", *facts.values(), extra=facts)
    return Settlement("defer", delivery, _OVERSIZE_DELAY)


def split_oversize(
    context: Context, deliveries: Sequence[Delivery[Any]]
) -> tuple[list[Delivery[Any]], list[Settlement]]:
    """Return the deliveries that this gate may decode, and the settlements of the others."""
    if max([delivery.size for delivery in deliveries], default=0) <= context.codec.max_bytes:
        return [*deliveries], []  # no value is larger than its message
    fitting: list[Delivery[Any]] = []
    deferred: list[Settlement] = []
    for delivery in deliveries:
        settlement = defer_oversize(context, delivery)
        if settlement is None:
            fitting.append(delivery)
        else:
            deferred.append(settlement)
    return fitting, deferred


# -- target streams of forwarded messages -----------------------------------------------------------------------------


def plan_trim(stream: bytes) -> Generator[tuple[Any, ...], Any, int]:
    """Plan the trimming of a stream: yield commands, receive their replies, return the number of removed entries.

    Without a group nothing is removed, because readers without a group acknowledge nothing. What a group has
    acknowledged only grows, so the commands need no transaction. The server removes whole nodes of its tree. So up to
    about a hundred acknowledged entries stay.
    """
    if not (yield ("EXISTS", stream)):
        return 0  # XINFO would raise
    groups = yield ("XINFO", "GROUPS", stream)
    done: list[tuple[int, int]] = []
    for fields in groups:
        group: dict[bytes, Any] = dict(zip(fields[::2], fields[1::2], strict=True))
        # Read before the pending entries: those that are delivered in between have higher ids.
        last_delivered = _entry_id(group[b"last-delivered-id"])
        count, oldest, *_ = yield ("XPENDING", stream, group[b"name"])
        done.append(min(last_delivered, _entry_id(oldest)) if count else last_delivered)
    if not done or min(done) == (0, 0):
        return 0
    milliseconds, number = min(done)
    return int((yield ("XTRIM", stream, "MINID", "~", f"{milliseconds}-{number}")))


def _entry_id(text: bytes) -> tuple[int, int]:
    milliseconds, _, number = text.partition(b"-")
    return int(milliseconds), int(number)
