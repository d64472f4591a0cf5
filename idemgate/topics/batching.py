"""A request of many entries, and what becomes of it when their slot has become several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from idemgate.core.calls import Batch, Call
from idemgate.core.tokens import token

__all__ = ["Part", "in_order"]

E = TypeVar("E")
A = TypeVar("A")


class Part(Generic[E]):
    """Entries that one slot is asked for at once. `request` is the id of the request, followed by those of the larger
    ones that it is a part of: one of them may have been answered, before the slot moved, and its reply lost.

    `larger`: for each of those, by its number of entries, where in it these are.
    """

    __slots__ = ("entries", "larger", "request")

    def __init__(self, request: bytes, entries: Sequence[E], larger: Mapping[int, Sequence[int]] | None = None) -> None:
        self.request = request
        self.entries = entries
        self.larger = larger or {}

    def own(self, answers: list[A]) -> list[A]:
        """The answers to these entries, also if those to a larger request came."""
        if len(answers) == len(self.entries):
            return answers
        return [answers[place] for place in self.larger[len(answers)]]

    def again(
        self,
        slot_of: Callable[[E], int],
        build: Callable[[int, Part[E]], Call[A]],
        join: Callable[[list[list[int]], list[A]], A],
    ) -> Batch[A]:
        """The same entries asked for slot by slot; whole, with the same id, if they are still together."""
        places: defaultdict[int, list[int]] = defaultdict(list)
        for place, entry in enumerate(self.entries):
            places[slot_of(entry)].append(place)
        calls = [build(slot, self._picked(found)) for slot, found in places.items()]
        return Batch(calls, lambda answers: join(list(places.values()), answers))

    def _picked(self, places: list[int]) -> Part[E]:
        if len(places) == len(self.entries):
            return self
        larger = {size: [where[place] for place in places] for size, where in self.larger.items()}
        larger[len(self.entries)] = places
        return Part(token() + self.request, [self.entries[place] for place in places], larger)


def in_order(places: list[list[int]], answers: list[Any]) -> list[Any]:
    """The answers of the parts as those of the whole."""
    found = {
        place: answer
        for where, part in zip(places, answers, strict=True)
        for place, answer in zip(where, part, strict=True)
    }
    return [found[place] for place in sorted(found)]
