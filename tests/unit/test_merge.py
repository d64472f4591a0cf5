"""Merge policies as users write them; what they do to payloads is shown in tests/scripts/test_merge.py."""

from __future__ import annotations

from typing import Any

import pytest

from idemgate.core.codec import Codec
from idemgate.errors import InvalidArgument
from idemgate.topics.merge import EXACT, NAMES, MergeSpec, _items, append, merge_of, merge_of_spec, union
from tests.for_each import for_each

CODEC = Codec(10_000)

BAD_POLICIES: dict[str, tuple[Any, str]] = {
    "no such name": ("newest", "no such merge policy. Use one of last, first, append"),
    "a number": (7, "not a merge policy"),
    "none": (None, "not a merge policy"),
    "no field at all": ({}, "not a merge policy"),
    "no such name in a field": ({"a": "newest"}, "no such merge policy"),
    "a field that is not text": ({7: "sum"}, "not a str"),
    "a policy for fields in a field": ({"a": {"b": "sum"}}, "itself one per field"),
    "the same, made before": ({"a": merge_of({"b": "sum"})}, "itself one per field"),
}


@for_each("which", BAD_POLICIES)
def test_what_is_no_policy_is_refused(which: str) -> None:
    given, told = BAD_POLICIES[which]
    with pytest.raises(InvalidArgument) as refused:
        merge_of(given)
    assert told in str(refused.value)


@for_each("cap", [0, -1, True, 1.5, "9", None, 100_001])
def test_a_cap_is_a_number_of_items(cap: Any) -> None:
    for make in (append, union):
        with pytest.raises(InvalidArgument, match=r"^cap=.*Use 1 to 100,000"):
            make(cap)


@pytest.mark.parametrize("make", [append, union])
def test_a_stored_cap_is_one_that_can_be_said(make: Any) -> None:
    assert merge_of_spec(make(1).spec) == make(1)
    assert merge_of_spec(make(100_000).spec) == make(100_000)
    for cap in (0, 100_001, "9"):
        with pytest.raises(InvalidArgument, match=r"^cap="):
            merge_of_spec({**make(1).spec, "cap": cap})


@pytest.mark.parametrize(("policy", "payload"), [("union", ["a", "b", "c"]), ({"a": "append"}, {"a": 1, "b": "x"})])
def test_what_many_items_take_together_is_limited_to_the_byte(policy: Any, payload: Any) -> None:
    size = len(merge_of(policy).lift(payload, Codec()))
    assert len(merge_of(policy).lift(payload, Codec(size))) == size
    with pytest.raises(InvalidArgument, match=f"takes {size} bytes; the limit is {size - 1}"):
        merge_of(policy).lift(payload, Codec(size - 1))


@for_each("name", NAMES)
def test_a_name_is_a_policy_and_so_is_a_policy(name: Any) -> None:
    assert merge_of(name) == merge_of(merge_of(name))
    assert hash(merge_of(name)) == hash(merge_of(name))
    assert merge_of(name) != merge_of("sum" if name != "sum" else "max")
    assert name in repr(merge_of(name))


def test_fields_in_any_order_are_one_policy() -> None:
    assert merge_of({"a": "sum", "b": append(3)}) == merge_of({"b": append(3), "a": "sum"})
    assert merge_of({"a": "sum"}) == merge_of({"a": "sum", "*": "last"}) != merge_of({"a": "sum", "*": "first"})
    assert append(3) != append(4)
    assert append() == merge_of("append")


BAD_PAYLOADS: dict[str, tuple[MergeSpec, Any, str]] = {
    "text": ("sum", "7", 'merge="sum" needs numbers'),
    "a bool": ("max", True, 'merge="max" needs numbers'),
    "nothing": ("min", None, 'merge="min" needs numbers'),
    "nan": ("sum", float("nan"), "finite numbers"),
    "infinity": ("max", float("-inf"), "finite numbers"),
    "beyond 2**53": ("sum", EXACT + 1, "integers up to 2**53"),
    "below -2**53": ("min", -EXACT - 1, "integers up to 2**53"),
    "no collection": ("union", "abc", "needs a list, tuple or set"),
    "a mapping": ("union", {"a": 1}, "needs a list, tuple or set"),
    "no mapping": ({"a": "sum"}, [1], "needs a dict as payload"),
    "a field that is not text": ({"a": "sum"}, {7: 1}, "a field's name is not a str"),
    "an item that is not storable": ("append", object(), "payload"),
}


@for_each("which", BAD_PAYLOADS)
def test_what_cannot_be_merged_is_refused_when_it_is_triggered(which: str) -> None:
    policy, payload, told = BAD_PAYLOADS[which]
    with pytest.raises(InvalidArgument) as refused:
        merge_of(policy).lift(payload, CODEC)
    assert told in str(refused.value)


def test_a_bad_field_is_named() -> None:
    with pytest.raises(InvalidArgument, match=r"^payload\['n'\]='x'"):
        merge_of({"n": "sum"}).lift({"m": 1, "n": "x"}, CODEC)


@pytest.mark.parametrize("items", [[3, 1, 3], (3, 1, 3), {3, 1}, frozenset({1, 3})])
def test_a_union_takes_every_collection(items: Any) -> None:
    assert merge_of("union").lift(items, CODEC)


def test_one_trigger_alone_respects_the_cap() -> None:
    # Given a payload of more distinct items than a union may hold
    lifted = _unpacked(union(2).lift([1, 2, 2, 3, 4], CODEC))
    # Then the rest is dropped and counted before anything is merged
    assert union(2).lower(lifted, CODEC.decode) == [1, 2]
    assert union(2).count_dropped(lifted) == 2


def _unpacked(lifted: bytes) -> Any:
    import msgpack

    return msgpack.unpackb(lifted, raw=True)


@pytest.mark.parametrize("other", [b"\x91\x01", b"\x81\x01\x01", b"\xc4\x01x", b"\xd4\x01x", b"\x91\xa1x"])
def test_items_are_texts_and_nothing_else(other: bytes) -> None:
    assert _items(b"\xa1x\xa0") == [b"x", b""]
    with pytest.raises(ValueError, match="exceeds"):
        _items(b"\xa1x" + other)


def test_what_is_collected_is_bounded_as_is_promised() -> None:
    assert append(5).spec["bytes"] == union(5).spec["bytes"] == 1024**2
