"""No text of a user makes two things one, or decides where something goes that is not its own: of ten thousand, and of
a million in a large run."""

from __future__ import annotations

import random
import string
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from idemgate import Gate
from idemgate.core import keys
from idemgate.core.key_template import compile_key
from idemgate.errors import InvalidArgument
from tests.for_each import for_each

NAME = string.ascii_letters + string.digits + "_.-"
NASTY = [
    "{", "}", "{}", "}{", ":", "%", "%25", "%7D", "%3A", "\0", "\n", "\r\n", " ", "*", "?", "[", "\\", "#", "..", "é",
    "e\u0301",
    "\u2028", "\U0001f600", "once", "topic", "topics", "members", "ig2:", "}:scheduled", ":", "a", "b", "ab", "0", "00",
]  # fmt: skip


def text(rng: random.Random) -> str:
    return "".join(rng.choices(NASTY, k=rng.randrange(1, 7))) * rng.choice([1] * 12 + [40, 129])


def user_key(rng: random.Random) -> bytes:
    if rng.random() < 0.7:
        return text(rng).encode()
    return rng.randbytes(rng.randrange(1, 20)) * rng.choice([1] * 12 + [40, 3000])


@pytest.mark.timeout(900)
def test_records_never_meet_and_only_their_own_parts_steer_them(many: Any, record_fault: Any) -> None:
    # Given triples made to meet: of the same few pieces, cut in other places
    rng, n = random.Random(7), 1000 * min(many(10), 1000)
    owners: dict[bytes, int] = {}
    collisions = 0
    for number in range(n):
        triple = ("".join(rng.choices("ab.-_", k=rng.randrange(1, 4))), text(rng), user_key(rng))
        made = keys.record(*triple)
        # Then each has a key of its own
        collisions += owners.setdefault(made, hash(triple)) != hash(triple)
        # And it is one hash tag from the first brace to the last: all of the triple decides its slot, and nothing else
        assert made.count(b"{") == made.count(b"}") == 1
        assert made.startswith(b"ig2:{")
        assert made.endswith(b"}")
        if number % 16 == 0:
            assert key_slot(made) == key_slot(made[5:-1])
        # And it holds nothing that a log, a shell or a pattern would take for something else
        assert made.isascii()
        assert made.decode().isprintable()
        assert len(made) < 512
    assert collisions == 0
    record_fault(
        "namespace, scope and key made to meet others, or to go where they wish", n, seed=7, collisions=collisions
    )


def test_slots_of_topics_are_steered_by_topic_and_numbers_only() -> None:
    rng = random.Random(11)
    seen: dict[bytes, tuple[str, str, int, int, int]] = {}
    for _ in range(500):
        namespace, topic = ("".join(rng.choices("ab.-_0", k=rng.randrange(1, 5))) for _ in range(2))
        slots = rng.choice([1, 2, 16])
        number = rng.randrange(slots)
        parts = (*keys.slot(namespace, topic, number, slots), keys.outbox(namespace, topic, number, slots))
        assert len({key_slot(part) for part in parts}) == 1
        for place, part in enumerate(parts):
            mine = (namespace, topic, number, slots, place)
            assert seen.setdefault(part, mine) == mine
    # And whatever the key of a message is, it is in one of the slots, which its bytes alone decide
    for _ in range(500):
        key = user_key(rng)
        assert 0 <= keys.slot_of(key, 8) < 8
        assert keys.slot_of(key, 8) == keys.slot_of(bytes(key), 8)


def test_the_keys_of_dedup_sets_depend_only_on_namespace_scope_and_shard() -> None:
    rng = random.Random(13)
    seen: dict[bytes, tuple[str, str, int, int]] = {}
    for _ in range(500):
        whose = ("".join(rng.choices("ab.-_", k=rng.randrange(1, 4))), text(rng), rng.randrange(32))
        pages = keys.dedup_ids(*whose)
        assert len({key_slot(page) for page in pages}) == 1
        for place, page in enumerate(pages):
            assert seen.setdefault(page, (*whose, place)) == (*whose, place)
            assert page.count(b"{") == page.count(b"}") == 1
            assert page.decode().isprintable()


def test_patterns_of_access_lists_hold_all_keys_of_their_kind_and_no_others() -> None:
    made = {
        "records": [keys.record("n", "topic", "k"), keys.record("n", "seen", "members")],
        "dedup": keys.dedup_ids("n", "once", 7),
        "topics": [keys.topics("n"), *keys.slot("n", "once", 3, 4), keys.outbox("n", "seen", 0, 1)],
        "members": keys.members("n", "topic"),
        "durability": [keys.durability_key("n")],
    }
    known = keys.patterns("n")
    for kind, found in made.items():
        for key in found:
            holding = {name for name, glob in known.items() if key.startswith(glob.removesuffix("*").encode())}
            assert holding == {kind, "all"}


@for_each("name", ["a b", "a{b", "a}b", "a:b", "a*", "", "a" * 65, "é", "a\n", "a\0", None, 7, b"a"])
def test_names_that_could_reach_a_tag_or_a_pattern_are_refused(name: Any) -> None:
    for make in (lambda: Gate("redis://x", namespace=name), lambda: Gate("redis://x").topic(name)):
        with pytest.raises(InvalidArgument):
            make()


VALUES = st.text(st.sampled_from(":%{}-/ab\0é\n") | st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)


def two(a: str, b: str) -> None: ...


@pytest.mark.parametrize("template", ["{a}{b}", "{a}%{b}", "{a}ab{b}"])
def test_a_template_whose_fields_nothing_separates_is_refused(template: str) -> None:
    with pytest.raises(InvalidArgument):
        compile_key(template, two)


@pytest.mark.parametrize("template", ["{a}:{b}", "{a}-{b}", "x{a}::{b}y"])
@given(first=st.tuples(VALUES, VALUES), second=st.tuples(VALUES, VALUES))
def test_a_template_gives_other_values_another_key(
    template: str, first: tuple[str, str], second: tuple[str, str]
) -> None:
    spec = compile_key(template, two)
    found = [spec.of(None, pair, {}) for pair in (first, second)]
    assert (found[0] == found[1]) is (first == second)


EVENTS = [b"e", b"v", b"k", b"ev", b"\0", b"e" * 16, b"k" * 17, b"vk", b"0" * 15, b"0" * 16]


def test_what_a_slot_remembers_of_one_key_is_not_taken_for_anothers(gate: Gate) -> None:
    # Given keys that begin as the names of notes do, and event ids made of the same bytes
    topic = gate.topic("t", window="60s")
    accepted = 0
    for key in EVENTS:
        for event in EVENTS:
            # When each pair is triggered, Then each is new once, whatever was remembered before
            assert topic.trigger(key, 1, event_id=event).accepted
            assert topic.trigger(key, 1, event_id=event).status == "duplicate"
            accepted += 1
        # And a version of one key is none of another's
        assert topic.trigger(key, 1, version=len(EVENTS) - EVENTS.index(key)).accepted
        accepted += 1
    assert topic.stats()["accepted"] == accepted


async def test_groups_and_keys_that_look_like_each_others_lines_stay_apart(gate: Gate, clock: Any) -> None:
    # Given groups one of which begins as another, and keys that look like what stands in a line
    topic = gate.topic("t")
    groups = ["g", "g\x01", "g0", "gg", "\x01", "g000000000000001"]
    names = [b"k", b"000000000000001k", b"\0k", b"\x01", b"g\0k", b"\xff\xfe"]
    for group in groups:
        for name in names:
            topic.trigger(group.encode() + b"/" + name, 1, group=group)
        # A group that holds what ends a group's name in a line is refused
        with pytest.raises(InvalidArgument, match="holds a NUL"):
            topic.trigger(b"x", 1, group=f"{group}\0")
    heard: list[tuple[str, bytes]] = []
    # When all of it is worked off, one of a group at a time
    while taken := topic.take(100):
        assert len({one.group for one in taken}) == len(taken)
        heard += [(one.group, one.raw_key) for one in taken]
        topic.ack(taken)
    # Then each came once, in the order of its group
    for group in groups:
        mine = [key.removeprefix(group.encode() + b"/") for of, key in heard if of == group]
        assert sorted(mine) == sorted(names)
    assert len(heard) == len(groups) * len(names)
    assert all(first != second for first, second in pairwise(heard))


def test_announced_members_and_topics_do_not_run_into_each_other() -> None:
    own = [keys.members("n", group) for group in ("a", "a.b", "a-b")]
    assert len({key for one in own for key in one}) == 9
