"""Calls that end deliveries (ack, nack, bury, release, defer) or extend their leases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from idemgate.core.calls import Arg, Batch, Call, Incomplete
from idemgate.core.chunks import BATCH, split_batches
from idemgate.core.tokens import token
from idemgate.topics.calls.base import Rebuild, earliest, flatten, next_batch_size
from idemgate.topics.calls.batching import SlotRequest, restore_order
from idemgate.topics.calls.take import TakeCalls
from idemgate.topics.merge import pack
from idemgate.topics.messages import Delivery, Settled, SettledAndTaken
from idemgate.topics.partial import FailedItems
from idemgate.topics.results import NONE_RESULT

__all__ = ["MAX_MIXED_SETTLEMENTS", "SettleCalls", "Settlement", "nack_items"]

T = TypeVar("T")
MAX_MIXED_SETTLEMENTS = 32
"""Maximum settlements per script call if some are not an ack. Those take several times as long."""
_OUTCOMES = {word.encode(): word for word in ("ok", "dead", "cancelled", "lost", "left")}


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


class SettleCalls(TakeCalls):
    """The calls that end deliveries or extend their leases."""

    __slots__ = ()

    def settle(self, slot: int, settlements: Sequence[Settlement]) -> Call[Settled]:
        """Build the call that ends these deliveries of one slot."""
        return self._settle(slot, SlotRequest(token(), settlements))

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
        calls = [self._settle(slot, SlotRequest(token(), batch)) for batch in rest]

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
        return BATCH if plain else MAX_MIXED_SETTLEMENTS

    def settle_and_take(self, slot: int, settlements: Sequence[Settlement], n: int) -> Call[SettledAndTaken]:
        """Build the call that settles these deliveries and then takes at most `n`, in one atomic step."""
        request, take_id, policy = SlotRequest(token(), settlements), token(), self.policy
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
