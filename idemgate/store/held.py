"""Leases of what a consumer holds: deliveries of a topic, entries of a stream or list."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from idemgate.core.calls import Batch
from idemgate.core.clock import monotonic
from idemgate.errors import StoreUnavailable
from idemgate.store.heartbeat import LeaseRenewal

__all__ = ["Held", "HeldRenewal", "Holder"]


class Held(Protocol):
    """Something that a consumer holds, from its take until it is settled.

    Attributes:
        until: The lease holds at least until then, monotonic seconds. It counts from the request, because the server
            may have granted the lease long before its reply arrived.
        settling: It is being settled, or will be soon. The store may then rightly report that the lease is gone.
    """

    until: float
    settling: bool

    @property
    def is_renewable(self) -> bool:
        """Return False if it is known to be lost, or is released: a renewal would undo that."""
        ...


H = TypeVar("H", bound=Held)


class Holder(Protocol[H]):
    """A consumer. The heartbeat thread calls its methods while the event loop changes what it holds."""

    def copy_held(self) -> Collection[H]:
        """Return all that the consumer holds now."""
        ...

    def split_renewal(self, held: list[H], alone: bool, /) -> Iterable[Sequence[H]]:
        """Split what one batch each renews. `alone` follows an error about data: something held may be corrupt."""
        ...

    def build_renewal(self, part: Sequence[H], /) -> Batch[list[bool]]:
        """Build the calls that renew one part. Their answer says of each whether this consumer still holds it."""
        ...

    def mark_lost(self, one: H, /) -> None:
        """Mark one as lost, count and log it: another consumer may have it."""
        ...


class HeldRenewal(LeaseRenewal, Generic[H]):
    """The renewal of all that one consumer holds. Its event loop may be blocked: only the heartbeat thread is needed.

    Args:
        lease: Seconds until another consumer may take what is not renewed.
        holder: The consumer.
        expires: True if what may have expired before the next renewal counts as lost. False if the store decides that,
            and the next renewal that succeeds reports it.
    """

    __slots__ = ("_error", "_expires", "_holder", "_under_way")

    def __init__(self, lease: float, holder: Holder[H], *, expires: bool) -> None:
        super().__init__(lease)
        self._holder = holder
        self._expires = expires
        self._error: Exception | None = None
        self._under_way: set[H] = set()

    def renew(self) -> Sequence[Batch[None]]:
        error, self._error = self._error, None
        everything = self._holder.copy_held()
        # Before `is_renewable` is read: the event loop changes it, then calls `wait_for`. So one notices the other.
        self._under_way = set(everything)
        # Also what is settling: the event loop may be blocked before its settlement leaves.
        held = [one for one in everything if one.is_renewable]
        self._under_way.intersection_update(held)
        alone = error is not None and not isinstance(error, StoreUnavailable)
        return [self._renew_part(part) for part in self._holder.split_renewal(held, alone)]

    def _renew_part(self, part: Sequence[H]) -> Batch[None]:
        sent, renewing = monotonic(), self._holder.build_renewal(part)

        def apply_answers(answers: list[Any]) -> None:
            self.record(part, renewing.join(answers), sent)
            self._under_way.difference_update(part)

        return Batch(renewing.calls, apply_answers)

    def record(self, part: Sequence[H], still_held: list[bool], sent: float) -> None:
        """Record the answer to a renewal that was sent at `sent`, monotonic seconds."""
        for one, is_held in zip(part, still_held, strict=True):
            if is_held:
                one.until = sent + self.lease
            else:
                self._mark_lost(one)

    def _mark_lost(self, one: H) -> None:
        if one.is_renewable and not one.settling:
            self._holder.mark_lost(one)

    def note_error(self, error: Exception) -> None:
        self._error = error
        self._under_way = set()  # any error ends the tries under way

    def overdue(self) -> None:
        deadline = monotonic() + self.interval
        for one in self._holder.copy_held() if self._expires else ():
            if one.until <= deadline:
                self._mark_lost(one)

    async def wait_for(self, one: H) -> None:
        """Wait until no renewal of one that is not renewable any more is under way, at most for the lease."""
        end = monotonic() + self.lease
        while one in self._under_way and monotonic() < end:  # noqa: ASYNC110 - a thread empties it
            await asyncio.sleep(0.001)
