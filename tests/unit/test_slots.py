"""A request that spoke of several slots is asked again part by part, and told as it would have been as a whole."""

from __future__ import annotations

from typing import Any

from idemgate.core.calls import Batch
from idemgate.topics.slots import SlotRequest, restore_order


def _asked(part: SlotRequest[int], slots: int) -> tuple[list[SlotRequest[int]], Batch[Any]]:
    """The parts that were built, and what is asked; a part stands for the call that it makes."""
    built: list[SlotRequest[int]] = []

    def build(slot: int, one: SlotRequest[int]) -> Any:
        built.append(one)
        return slot

    return built, part.split(lambda entry: entry % slots, build, restore_order)


def test_what_is_still_together_is_asked_for_whole_with_the_same_id() -> None:
    whole = SlotRequest(b"r" * 16, [2, 4, 6])
    built, batch = _asked(whole, 2)
    assert built == [whole]
    assert batch.join([["a", "b", "c"]]) == ["a", "b", "c"]


def test_what_parts_is_told_in_the_order_in_which_it_was_asked() -> None:
    # Given six entries that have come to belong to three slots
    whole = SlotRequest(b"r" * 16, [1, 2, 3, 4, 5, 6])
    built, batch = _asked(whole, 3)
    assert [part.entries for part in built] == [[1, 4], [2, 5], [3, 6]]
    # Then each part has an id of its own, behind which that of the whole stands
    assert all(part.id[16:] == b"r" * 16 for part in built)
    assert len({part.id for part in built}) == 3
    # And the answers come as if it had been one
    assert batch.join([["one", "four"], ["two", "five"], ["three", "six"]]) == [
        "one", "two", "three", "four", "five", "six",
    ]  # fmt: skip


def test_a_part_finds_its_answers_in_those_to_any_request_it_was_part_of() -> None:
    # Given entries that were parted twice
    first = _asked(SlotRequest(b"r" * 16, [1, 2, 3, 4, 5, 6]), 2)[0][0]
    second = _asked(first, 3)[0][1]
    assert (first.entries, second.entries) == ([1, 3, 5], [3])
    # Then its own answers, those to what it was parted from, and those to the whole, say the same
    assert second.select_answers(["three"]) == ["three"]
    assert second.select_answers(["one", "three", "five"]) == ["three"]
    assert second.select_answers(["one", "two", "three", "four", "five", "six"]) == ["three"]
