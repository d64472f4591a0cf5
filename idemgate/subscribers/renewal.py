"""Lease renewal of the entries that a consumer of a stream or list holds, by the heartbeat thread of the gate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from idemgate.core.calls import Batch, Call
from idemgate.core.clock import monotonic
from idemgate.store.heartbeat import LeaseRenewal

__all__ = ["EntryRenewal", "HeldEntry"]

RENEWALS = 100
"""Entries that one script call renews."""


class HeldEntry(Protocol):
    """The part of an entry that its renewal needs; `idemgate.subscribers.list_entries.TakenEntry` describes it."""

    id: bytes
    over: bool
    released: bool
    lost: bool
    held_from: float


H = TypeVar("H", bound=HeldEntry)


class EntryRenewal(LeaseRenewal, Generic[H]):
    """A renewal of all entries in `live`. The event loop may be blocked: only the heartbeat thread is needed.

    Args:
        lease: Seconds until another consumer may take an entry.
        live: The entries by id. The event loop changes them meanwhile.
        build: Function that builds the call which renews entries. The answer says of each whether it is still held.
        on_lost: Callback for an entry that another consumer has.
    """

    __slots__ = ("_build", "_live", "_on_lost", "_under_way")

    def __init__(
        self,
        lease: float,
        live: dict[bytes, H],
        build: Callable[[Sequence[H]], Call[list[bool]]],
        on_lost: Callable[[H], None],
    ) -> None:
        super().__init__(lease)
        self._live = live
        self._build = build
        self._on_lost = on_lost
        self._under_way: set[bytes] = set()

    def renew(self) -> Sequence[Batch[None]]:
        entries = self._live.copy().values()
        # Before `released` is read: the event loop sets `released`, then looks here. So one of both notices the other.
        self._under_way = {entry.id for entry in entries}
        # Also entries whose callback has ended: the event loop may be blocked before their acknowledgements leave.
        working = [entry for entry in entries if not entry.released and not entry.lost]
        self._under_way.intersection_update(entry.id for entry in working)
        return [self._batch(working[n : n + RENEWALS]) for n in range(0, len(working), RENEWALS)]

    def _batch(self, entries: Sequence[H]) -> Batch[None]:
        sent = monotonic()

        def apply_reply(answers: list[list[bool]]) -> None:
            self.record(entries, answers[0], sent)
            self._under_way.difference_update(entry.id for entry in entries)

        return Batch([self._build(entries)], apply_reply)

    def record(self, entries: Sequence[H], held: list[bool], sent: float) -> None:
        """Record the reply to a renewal of time `sent`, monotonic seconds."""
        for entry, is_held in zip(entries, held, strict=True):
            if is_held:
                entry.held_from = sent
            elif not entry.over and not entry.lost:  # one that ended meanwhile may have been settled
                entry.lost = True
                self._on_lost(entry)

    def note_error(self, error: Exception) -> None:  # noqa: ARG002 - any error ends the tries under way
        self._under_way = set()

    def overdue(self) -> None:
        """Do nothing: the store decides who holds an entry, and the next renewal that succeeds reports it."""

    async def wait_for(self, number: bytes) -> None:
        """Wait until no renewal of an entry is under way, at most for the lease. The entry must be `released`."""
        end = monotonic() + self.lease
        while number in self._under_way and monotonic() < end:  # noqa: ASYNC110 - a thread empties it
            await asyncio.sleep(0.001)
