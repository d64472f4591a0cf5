"""Calls that take due messages out of a slot: for handlers, or to forward them."""

from __future__ import annotations

from typing import Any

from idemgate.core import keys
from idemgate.core.calls import Batch, Call
from idemgate.core.tokens import token
from idemgate.topics.calls.base import BaseCalls, Rebuild, divide, earliest, flatten, split_request
from idemgate.topics.messages import Delivery, Forward, Forwarded, Taken, decode_forwarded

__all__ = ["TakeCalls"]


class TakeCalls(BaseCalls):
    """The calls that take due messages."""

    __slots__ = ()

    def take(self, slot: int, n: int) -> Call[Taken]:
        """Build the call that takes at most `n` due messages of a slot. With `n=0` it only requeues lapsed leases."""
        return self._take(token(), slot, n)

    def _take(self, request: bytes, slot: int, n: int) -> Call[Taken]:
        policy = self.policy
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
            shares = zip(split_request(request, len(slots)), slots, divide(n, len(slots)), strict=True)
            return Batch([calls._take(*share) for share in shares], _join_takes)

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
        return Taken(deliveries, lapsed=reply[3], next_due_ms=reply[2], now_ms=reply[1])

    def forward(self, slot: int, to: Forward, n: int) -> Call[Forwarded]:
        """Build the call that moves at most `n` due messages of a slot into the target list or stream."""
        return self._forward(token(), slot, to, n)

    def _forward(self, request: bytes, slot: int, to: Forward, n: int) -> Call[Forwarded]:
        def rebuild(calls: Any, slot: int) -> Batch[Forwarded]:
            slots = calls.merged_successors(slot, self)
            shares = zip(split_request(request, len(slots)), slots, divide(n, len(slots)), strict=True)
            return Batch([calls._forward(part, slot, to, share) for part, slot, share in shares], _join_forwards)

        return self._call(
            "forward",
            slot,
            (request, self._policy, n, to.kind, to.keep),
            lambda reply: Forwarded(reply[3], next_due_ms=reply[2], now_ms=reply[1]),
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


def _join_takes(answers: list[Taken]) -> Taken:
    return Taken(
        flatten(answer.deliveries for answer in answers),
        lapsed=sum(answer.lapsed for answer in answers),
        next_due_ms=earliest(answer.next_due_ms for answer in answers),
        now_ms=answers[-1].now_ms,
    )


def _join_forwards(answers: list[Forwarded]) -> Forwarded:
    next_due_ms = earliest(answer.next_due_ms for answer in answers)
    return Forwarded(sum(answer.sent for answer in answers), next_due_ms=next_due_ms, now_ms=answers[-1].now_ms)
