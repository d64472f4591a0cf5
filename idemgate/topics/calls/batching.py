"""A request of many entries, and its division when its slot was split into several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from idemgate.core.calls import Batch, Call
from idemgate.core.tokens import token

__all__ = ["SlotRequest", "restore_order"]

E = TypeVar("E")
A = TypeVar("A")


class SlotRequest(Generic[E]):
    """The entries that one script call handles in one slot.

    `id` is the request id, followed by the ids of the larger requests that this one is a part of. The server may have
    answered one of those before the slot moved, and the reply may be lost. `larger` maps the number of entries of
    each larger request to the positions of these entries in it.
    """

    __slots__ = ("entries", "id", "larger")

    def __init__(
        self, request_id: bytes, entries: Sequence[E], larger: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        self.id = request_id
        self.entries = entries
        self.larger = larger or {}

    def select_answers(self, answers: list[A]) -> list[A]:
        """Return the answers to these entries from a reply to this request or to a larger one."""
        if len(answers) == len(self.entries):
            return answers
        return [answers[position] for position in self.larger[len(answers)]]

    def split(
        self,
        slot_of: Callable[[E], int],
        build: Callable[[int, SlotRequest[E]], Call[A]],
        join: Callable[[list[list[int]], list[A]], A],
    ) -> Batch[A]:
        """Build the same request again, one call per slot. Entries that share a slot keep the request id."""
        by_slot: defaultdict[int, list[int]] = defaultdict(list)
        for position, entry in enumerate(self.entries):
            by_slot[slot_of(entry)].append(position)
        calls = [build(slot, self._select(positions)) for slot, positions in by_slot.items()]
        return Batch(calls, lambda answers: join(list(by_slot.values()), answers))

    def _select(self, positions: list[int]) -> SlotRequest[E]:
        if len(positions) == len(self.entries):
            return self
        larger = {size: [where[position] for position in positions] for size, where in self.larger.items()}
        larger[len(self.entries)] = positions
        return SlotRequest(token() + self.id, [self.entries[position] for position in positions], larger)


def restore_order(positions: list[list[int]], answers: list[Any]) -> list[Any]:
    """Join the answers of several calls in the order of the original entries."""
    by_position = {
        position: answer
        for where, part in zip(positions, answers, strict=True)
        for position, answer in zip(where, part, strict=True)
    }
    return [by_position[position] for position in sorted(by_position)]
