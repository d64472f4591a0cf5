"""Which member serves which slot: rendezvous hashing (highest random weight; Thaler and Ravishankar, 1998).

Every member computes it for itself, from the list of members alone. When one comes, slots move to it and nowhere else;
when one goes, its slots move and no others. Each member's share is as random as a throw of dice: of s slots and n
members, s/n give or take a few times sqrt(s/n). So a topic wants many more slots than it has members (8 times is a good
rule), and one with fewer slots than members leaves some without work.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from hashlib import blake2b

from idemgate.errors import InvalidArgument

__all__ = ["mine", "owner", "slot_id"]


def slot_id(topic: str, number: int) -> str:
    """How a slot of a topic is called among members: "images:7"."""
    return f"{topic}:{number}"


def owner(slot: str, members: Sequence[str]) -> str:
    """The member that serves this slot: the same for every order of `members`. InvalidArgument if there are none."""
    if not members:
        raise InvalidArgument(
            "members", members, "nobody is there", "Ask when at least one member has announced itself"
        )
    return max(members, key=lambda member: _weight(slot, member))


def mine(me: str, members: Collection[str], topic: str, slots: int) -> frozenset[int]:
    """The slots of a topic that `me` serves; none if it is not among the members.

    A slot is dropped at the first member that outweighs `me`, so this takes about 1 + ln(members) microseconds a slot.
    """
    if me not in members:
        return frozenset()
    others = [member for member in members if member != me]
    return frozenset(number for number in range(slots) if _outweighs(me, others, slot_id(topic, number)))


def _outweighs(me: str, others: list[str], slot: str) -> bool:
    weight = _weight(slot, me)
    return all(_weight(slot, other) < weight for other in others)


def _weight(slot: str, member: str) -> tuple[bytes, str]:
    # The member's name settles a tie: one in 2^64, but then everybody must settle it alike.
    return blake2b(f"{slot}\n{member}".encode(), digest_size=8).digest(), member
