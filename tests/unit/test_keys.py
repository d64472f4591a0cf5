"""Keys in Redis: no two things share one, and no user decides where one goes."""

from __future__ import annotations

import re
import string
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from redis.crc import key_slot

from idemgate.core import keys
from idemgate.dedup.dedup import DedupCalls
from idemgate.errors import InvalidArgument
from tests.for_each import for_each

NAME = string.ascii_letters + string.digits + "_.-"
names = st.text(NAME, min_size=1, max_size=8)
TRICKY = "aA%:{}#/@ \n\0\u00e9\u2028\U0001f600"
parts = st.one_of(
    st.text(TRICKY + "0123456789abcdef", min_size=1, max_size=12),
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200),
    st.sampled_from(
        ["%", "%25", "%3A", ":", "a:b", "{x}", "}:scheduled", "#" + "0" * 32, "a" * 128, "a" * 129, ":" * 128]
    ),
)
user_keys = parts | st.binary(min_size=1, max_size=200) | st.integers()
UNHURRIED = settings(deadline=None)
triples = st.tuples(names, parts, user_keys)
works = st.tuples(names, st.just(b"") | parts.map(str.encode), parts.map(str.encode) | st.binary(min_size=1))


def tag(key: bytes) -> bytes:
    """What Redis Cluster hashes of a key."""
    return key.partition(b"{")[2].partition(b"}")[0]


# -- one thing, one key -----------------------------------------------------------------------------------------------


@UNHURRIED
@given(first=triples, second=triples)
@example(first=("n", "a:b", "c"), second=("n", "a", "b:c"))
@example(first=("n", "a%3Ab", "c"), second=("n", "a:b", "c"))
@example(first=("n", "s", "%"), second=("n", "s", "%25"))
@example(first=("n", "s", "a" * 129), second=("n", "s", "a" * 130))
@example(first=("n", "s", "\u00e9" * 100), second=("n", "s", "\u00e9" * 101))
@example(first=("n", "s" * 129, "k"), second=("n", "s" * 130, "k"))
@example(first=("n", "s", b"\xc3\xa9"), second=("n", "s", b"\xe9"))
def test_other_records_have_other_keys(first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    same = (*first[:2], keys.raw(first[2])) == (*second[:2], keys.raw(second[2]))
    assert (keys.record(*first) == keys.record(*second)) is same


@UNHURRIED
@given(first=works, second=works)
@example(first=("t", b"a", b"b|c"), second=("t", b"a|b", b"c"))
@example(first=("t", b"", b"a|b"), second=("t", b"a", b"b"))
@example(first=("t", b"", b"\xff"), second=("t", b"", rb"\xff"))
def test_work_on_other_things_has_another_name(first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    assert (keys.work(*first) == keys.work(*second)) is (first == second)


@UNHURRIED
@given(triple=triples, topic=names, number=st.integers(0, 16_383))
def test_kinds_do_not_mix(triple: tuple[Any, ...], topic: str, number: int) -> None:
    namespace = triple[0]
    record, registry = keys.record(*triple), keys.topics(namespace)
    found = [record, registry, *keys.slot(namespace, topic, number, 16), *keys.members(namespace, topic)]
    found.append(keys.outbox(namespace, topic, number, 16))
    assert len(set(found)) == len(found)


@UNHURRIED
@given(triple=triples)
def test_a_key_is_short_plain_and_safe_to_print(triple: tuple[Any, ...]) -> None:
    record = keys.record(*triple)
    assert record.isascii()
    assert record.decode().isprintable()
    assert len(record) < 64 + 3 * keys.LONGEST + keys.LONGEST + 32


@pytest.mark.parametrize("key", ["7", 7, b"7"])
def test_text_bytes_and_number_are_one_key(key: keys.Key) -> None:
    assert keys.record("ns", "s", key) == b"ig2:{ns:once:s:7}"
    assert keys.text_of(key) == "7"


def test_the_layout_is_what_it_was() -> None:
    assert keys.record("shop", "orders", "a b:c") == b"ig2:{shop:once:orders:a%20b:c}"
    assert keys.record("shop", "a:b", "k" * 129).startswith(b"ig2:{shop:once:a%3Ab:#")
    assert keys.topics("shop") == b"ig2:{shop:topics}"
    assert keys.scopes("shop") == b"ig2:{shop:scopes}"
    assert keys.owner_of("shop", keys.scopes("shop")) == keys.Owner("scopes")
    assert keys.acts("shop") == b"ig2:{shop:acts}"
    assert keys.owner_of("shop", keys.acts("shop")) == keys.Owner("acts")
    assert keys.presence("shop", "0" * 32) == (b"ig2:{shop:presence}", b"ig2:{shop:presence}:" + b"0" * 32)
    index, report = keys.presence("shop", "0" * 32)
    assert keys.owner_of("shop", index) == keys.Owner("presence")
    assert keys.owner_of("shop", keys.process_names("shop")) == keys.Owner("names")
    history = keys.scope_history("shop", "a:b", b"k")
    assert history == b"ig2:{shop:history:a%3Ab:13}"
    assert keys.owner_of("shop", history) == keys.Owner("history", "a%3Ab")
    assert keys.owner_of("shop", report) == keys.Owner("report", "0" * 32)
    assert keys.slot("shop", "images", 3, 16)[0] == b"ig2:{shop:topic:images:3/16}:scheduled"
    assert len(keys.slot("shop", "images", 3, 16)) == 15
    assert keys.outbox("shop", "images", 3, 16) == b"ig2:{shop:topic:images:3/16}:out"
    history = keys.slot_history("shop", "images", 3, 16)
    assert history == b"ig2:{shop:topic:images:3/16}:history"
    assert keys.owner_of("shop", history) == keys.Owner("history", "images", 3, 16, "history")


# -- where a key goes -------------------------------------------------------------------------------------------------


@UNHURRIED
@given(triple=triples)
@example(triple=("n", "s", "{0}"))
@example(triple=("n", "{0}", "}{0}"))
def test_all_of_a_record_decides_where_it_goes(triple: tuple[Any, ...]) -> None:
    # No part of it can be made to decide alone: the tag is the whole name.
    record = keys.record(*triple)
    assert (record.count(b"{"), record.count(b"}")) == (1, 1)
    assert b"ig2:{" + tag(record) + b"}" == record


@UNHURRIED
@given(namespace=names, topic=names, number=st.integers(0, 16_383))
def test_the_keys_of_a_call_live_together(namespace: str, topic: str, number: int) -> None:
    slot = (*keys.slot(namespace, topic, number, 16), keys.outbox(namespace, topic, number, 16))
    for whole in (slot, keys.members(namespace, topic)):
        assert len({tag(key) for key in whole}) == 1
        assert len({key_slot(key) for key in whole}) == 1


def test_slots_of_a_topic_spread_over_the_cluster() -> None:
    places = {key_slot(keys.slot("shop", "images", number, 16)[0]) * 3 // 16_384 for number in range(16)}
    assert places == {0, 1, 2}


@UNHURRIED
@given(key=st.binary(min_size=1, max_size=50), power=st.integers(0, 14))
def test_a_slot_exists(key: bytes, power: int) -> None:
    assert 0 <= keys.slot_of(key, 2**power) < 2**power
    assert keys.slot_of(key, 2**power) == keys.slot_of(key, 2**14) % 2**power


@pytest.mark.parametrize("pattern", ["%d", "user:%d", "2024-%d", "%024x"])
def test_slots_are_used_evenly(pattern: str) -> None:
    used = Counter(keys.slot_of((pattern % number).encode(), 16) for number in range(16_000))
    assert len(used) == 16
    assert all(800 < times < 1200 for times in used.values())


# -- what is refused --------------------------------------------------------------------------------------------------

BAD_KEYS: list[Any] = ["", b"", True, None, 1.5, ["a"], {"a": 1}, object(), "\ud800", "x" * 65_537, 10**5000]


@for_each("key", BAD_KEYS, ids=range(len(BAD_KEYS)))
def test_what_is_no_key_is_refused(key: Any) -> None:
    for use in (keys.raw, lambda key: keys.record("ns", "s", key), keys.text_of):
        with pytest.raises(InvalidArgument) as told:
            use(key)
        assert told.value.name == "key"
        assert len(str(told.value)) < 300
    with pytest.raises(InvalidArgument) as told:
        keys.digest_id(key, "event_id")
    assert told.value.name == "event_id"


def test_the_longest_key_is_a_key() -> None:
    assert len(keys.record("ns", "s", "x" * 65_536)) < 200


@for_each("name", ["", "a b", "a:b", "{a}", "a\n", "\u00e9", "x" * 65, None, 7, b"a", "a/b", "*"])
def test_what_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^topic=.*: not a name\. Use 1 to 64 of A-Z a-z 0-9 _ \. -$"):
        keys.check_name(name, "topic")


@UNHURRIED
@given(names | st.text(NAME, min_size=60, max_size=64))
def test_a_name_is_taken_as_it_is(name: str) -> None:
    assert keys.check_name(name, "topic") == name
    assert keys.slot("ns", name, 0, 1)[0] == f"ig2:{{ns:topic:{name}:0/1}}:scheduled".encode()


def test_keys_that_are_not_text_can_be_read_in_errors() -> None:
    assert keys.text_of(b"\xff\x00a") == "\\xff\x00a"


@UNHURRIED
@given(first=user_keys, second=user_keys)
def test_a_digest_tells_texts_apart(first: keys.Key, second: keys.Key) -> None:
    assert len(keys.digest_id(first, "event_id")) == 16
    assert (keys.digest_id(first, "e") == keys.digest_id(second, "e")) is (keys.raw(first) == keys.raw(second))


def test_an_event_says_which_slot_it_belongs_to() -> None:
    # Given an event of a key, of a group
    name = keys.event("e", b"key", b"group")
    assert len(name) == 18
    # Then that is where its group is, of however many slots
    for slots in (1, 2, 64, 16_384):
        assert keys.slot_of_event(name, slots) == keys.slot_of(b"group", slots)
    # And it is another one of another key, id or both joined, and the same wherever it is
    others = [keys.event("e", b"yek", b"group"), keys.event("ek", b"ey", b"group"), keys.event("f", b"key", b"group")]
    assert len({name[:16], *(other[:16] for other in others)}) == 4
    assert keys.event("e", b"key", b"key")[:16] == name[:16]


def test_the_pages_of_kept_values_are_known_for_what_they_are() -> None:
    for number, key in enumerate(keys.dedup_values("ns", "s:1", 31)):
        assert keys.owner_of("ns", key) == keys.Owner("dedup", "s%3A1", 31, part=f"values{number}")


def test_every_part_of_a_slot_is_documented_and_no_other() -> None:
    page = (Path(__file__).parents[2] / "docs" / "keys.md").read_text()
    table = page.partition("## Find the keys of a topic")[2].partition("## Find the members")[0]
    named = [name for row in re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE) for name in re.findall("`(.+?)`", row)]
    assert sorted(named) == sorted((*keys.PARTS, *keys.RESULT_PARTS))
    table = page.partition("## Find the keys of a consumed list")[2].partition("## Find the marker")[0]
    assert re.findall(r"^\| `(.+?)` \|", table, re.MULTILINE) == [*keys.LIST_PARTS]
    # And a key of each is known for what it is
    for part, key in zip(keys.PARTS, keys.slot("shop", "images", 3, 8), strict=True):
        assert key == f"ig2:{{shop:topic:images:3/8}}:{part}".encode()
        assert keys.owner_of("shop", key) == ("slot", "images", 3, 8, part)
    for part, key in zip(keys.RESULT_PARTS, keys.slot_results("shop", "images", 3, 8), strict=True):
        assert keys.owner_of("shop", key) == ("results", "images", 3, 8, part)


@pytest.mark.parametrize(
    ("number", "before", "after", "found"),
    [(0, 1, 4, [0, 1, 2, 3]), (1, 2, 8, [1, 3, 5, 7]), (1, 8, 2, [1]), (3, 8, 2, []), (2, 4, 4, [2])],
)
def test_a_slot_becomes_others_which_have_what_it_had(number: int, before: int, after: int, found: list[int]) -> None:
    assert [*keys.successor_slots(number, before, after)] == found
    # And those are where what it had belongs now
    mine = [name for n in range(200) if keys.slot_of(name := b"k%d" % n, before) == number]
    assert after < before or {keys.slot_of(name, after) for name in mine} == {*found}


def test_what_is_stored_of_an_id_stays_what_it_is() -> None:
    call = DedupCalls("n", None, "s", 3_600_000).add("k")
    assert (call.keys[0], call.args[3]) == (b"ig2:{n:dedup:s:2}:0", bytes.fromhex("4e1cf695df3112ed"))
