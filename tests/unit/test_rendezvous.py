"""Who serves which slot: everybody decides alike, little moves, nobody has much more than the others."""

from __future__ import annotations

import random
from collections import Counter
from math import sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idemgate import InvalidArgument
from idemgate.membership.rendezvous import owned_slots, owner, slot_id

names = st.lists(st.text(min_size=1, max_size=20), min_size=1, max_size=12, unique=True)


def owners(members: list[str], slots: int = 64) -> dict[int, str]:
    return {number: owner(slot_id("t", number), members) for number in range(slots)}


@given(names, st.randoms())
def test_the_order_of_the_members_does_not_matter(members: list[str], order: random.Random) -> None:
    shuffled = list(members)
    order.shuffle(shuffled)
    assert owners(shuffled) == owners(members)


@given(names)
def test_the_shares_are_what_each_owns_and_together_everything(members: list[str]) -> None:
    owned = owners(members)
    for member in members:
        assert owned_slots(member, members, "t", 64) == {number for number, who in owned.items() if who == member}


@given(names, st.text(min_size=1, max_size=20))
def test_a_newcomer_takes_slots_and_nothing_else_moves(members: list[str], newcomer: str) -> None:
    # Given members, and one more
    after = owners([*members, newcomer])
    # Then each slot stays where it was, or goes to the newcomer
    assert all(after[number] in (before, newcomer) for number, before in owners(members).items())


@given(names.filter(lambda members: len(members) > 1), st.data())
def test_when_one_goes_only_its_slots_move(members: list[str], data: st.DataObject) -> None:
    gone = data.draw(st.sampled_from(members))
    after = owners([member for member in members if member != gone])
    assert all(before in (gone, after[number]) for number, before in owners(members).items())


@pytest.mark.parametrize(
    ("members", "slots", "fleets"), [(2, 64, 50), (8, 64, 50), (8, 1024, 20), (50, 1024, 10), (100, 16_384, 1)]
)
@pytest.mark.slow
def test_no_share_is_more_than_five_roots_off_the_mean(members: int, slots: int, fleets: int) -> None:
    # Given names as workers have them, of several fleets
    mean = slots / members
    for fleet in range(fleets):
        names = [f"host-{fleet}-{n}-{random.Random(n).randbytes(8).hex()}" for n in range(members)]
        counts = Counter(owners(names, slots).values())
        # Then every share is s/n, give or take 5 x sqrt(s/n)
        assert all(abs(counts[name] - mean) <= 5 * sqrt(mean) for name in names), counts


def test_topics_are_divided_independently() -> None:
    # Given two topics of one slot each, as is the default
    members = [f"m{n}" for n in range(50)]
    chosen = {topic: owner(slot_id(topic, 0), members) for topic in map(str, range(200))}
    # Then they are not all with the same member
    assert len(set(chosen.values())) > 40


def test_who_is_not_there_serves_nothing() -> None:
    assert owned_slots("me", ["you"], "t", 8) == frozenset()
    with pytest.raises(InvalidArgument, match="there are no members"):
        owner("t:0", [])
