"""`topics/scripts/lib`, on a real server, against plain Python: whatever the payloads, and however they are grouped."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
import redis
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from idemgate import lua
from idemgate.core.codec import Codec, canonical
from idemgate.errors import InvalidArgument, UnexpectedData
from idemgate.testing import Clock
from idemgate.topics.merge import EXACT, MAX_SUMMAND, NAMES, Merge, MergeSpec, append, merge_of, merge_of_spec, union
from tests.for_each import for_each
from tests.messages import pack_message, unpack_message

pytestmark = pytest.mark.one_in(3)

CODEC = Codec(1_000_000)
FOLDS = (
    lua.source("topics/lib/payloads")
    + """
local spec, raw, cut = cmsgpack.unpack(ARGV[1]), ARGV[2] == "1", tonumber(ARGV[3])
local function fold(from, to)
  local acc
  for i = from, to do
    local next = raw and ARGV[i] or cmsgpack.unpack(ARGV[i])
    acc = acc == nil and next or merge(spec, acc, next)
  end
  -- As a message is kept and taken out again between two merges.
  return cmsgpack.unpack(cmsgpack.pack(acc))
end
local one = fold(4, #ARGV)
local two = cut > 0 and cut < #ARGV - 3 and merge(spec, fold(4, 3 + cut), fold(4 + cut, #ARGV)) or one
return { cmsgpack.pack(one), cmsgpack.pack(two) }
"""
)
SMALL = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
"""Each example is one script call; the fixtures (a client) are the same for all."""

texts = st.text(max_size=8)
small = st.integers(-(2**40), 2**40)
eighths = st.integers(-(2**30), 2**30).map(lambda n: n / 8)
"""Floats whose sums are exact, in whatever order."""
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | texts
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def merged(client: redis.Redis, policy: MergeSpec, payloads: list[Any], cut: int = 0) -> tuple[Any, Any, int]:
    """Merge all payloads one by one, and in two halves. Return both results and how many were dropped."""
    merge = merge_of(policy)
    lifted = [merge.lift(payload, CODEC) for payload in payloads]
    replies = client.execute_command("EVAL", FOLDS, 0, msgpack.packb(merge.spec), int(merge.raw), cut, *lifted)
    one, two = (msgpack.unpackb(reply, raw=True, strict_map_key=False) for reply in replies)
    assert (merge.count_dropped(one) == 0) == (merge.count_dropped(two) == 0)
    return merge.lower(one, CODEC.decode), merge.lower(two, CODEC.decode), merge.count_dropped(one)


def identical(left: Any, right: Any) -> bool:
    """Equal, and of the same types: 1, 1.0 and True are three."""
    return CODEC.encode(left) == CODEC.encode(right)


@pytest.fixture(scope="session")
def client(url: str) -> Any:
    with redis.Redis.from_url(url) as made:
        yield made


# -- one policy after the other ---------------------------------------------------------------------------------------


@SMALL
@given(payloads=st.lists(values, min_size=1, max_size=8), cut=st.integers(0, 8))
def test_last_first_and_count(client: redis.Redis, payloads: list[Any], cut: int) -> None:
    for policy, wanted in (("last", payloads[-1]), ("first", payloads[0]), ("count", len(payloads))):
        one, two, dropped = merged(client, policy, payloads, cut)
        assert identical(one, wanted)
        assert identical(two, wanted)
        assert dropped == 0


@SMALL
@given(payloads=st.lists(small | eighths, min_size=1, max_size=10), cut=st.integers(0, 10))
@example(payloads=[0.0, -0.0, 0], cut=1)
@example(payloads=[3.0], cut=0)
@example(payloads=[EXACT - 2, 1], cut=1)
@example(payloads=[-EXACT + 2, -1], cut=1)
def test_sums(client: redis.Redis, payloads: list[float], cut: int) -> None:
    one, two, _ = merged(client, "sum", payloads, cut)
    assert identical(one, sum(payloads) + 0.0 if any(isinstance(one, float) for one in payloads) else sum(payloads))
    assert identical(two, one)


@SMALL
@given(payloads=st.lists(st.integers(-EXACT, EXACT), min_size=2, max_size=6))
@example(payloads=[EXACT, 1])
@example(payloads=[EXACT, 1, -1, -1])
@example(payloads=[-EXACT, -1])
@example(payloads=[EXACT - 1, 1])
def test_a_sum_is_exact_or_a_float(client: redis.Redis, payloads: list[int]) -> None:
    one, _, _ = merged(client, "sum", payloads)
    assert (
        one == sum(payloads) if isinstance(one, int) else math.isclose(one, sum(payloads), rel_tol=1e-12, abs_tol=1024)
    )


@SMALL
@given(payload=st.floats(allow_nan=False, allow_infinity=False) | st.integers(-EXACT, EXACT))
@example(payload=5e-324)
@example(payload=1.7976931348623157e308)
@example(payload=2.0**63)
@example(payload=-(2.0**63))
@example(payload=0.1)
@example(payload=EXACT)
def test_one_number_stays_what_it_is(client: redis.Redis, payload: float) -> None:
    for policy in ("min", "max", *(["sum"] if abs(payload) <= MAX_SUMMAND else [])):
        one, _, _ = merged(client, policy, [payload])
        assert type(one) is type(payload)
        assert one == payload


@SMALL
@given(
    payloads=st.lists(
        st.floats(allow_nan=False, allow_infinity=False) | st.integers(-EXACT, EXACT), min_size=1, max_size=8
    ),
    cut=st.integers(0, 8),
)
@example(payloads=[1, 1.0], cut=1)
@example(payloads=[2.0, 2, 1.0, 1], cut=2)
@example(payloads=[EXACT, EXACT - 1, float(EXACT)], cut=2)
def test_min_and_max_keep_the_first_of_equals(client: redis.Redis, payloads: list[float], cut: int) -> None:
    for policy, best in (("min", min), ("max", max)):
        one, two, _ = merged(client, policy, payloads, cut)
        assert identical(one, best(payloads))
        assert identical(two, one)


@SMALL
@given(payloads=st.lists(values, min_size=1, max_size=10), cut=st.integers(0, 10), cap=st.integers(1, 6))
def test_append_is_the_beginning(client: redis.Redis, payloads: list[Any], cut: int, cap: int) -> None:
    one, two, dropped = merged(client, append(cap), payloads, cut)
    assert identical(one, payloads[:cap])
    assert identical(two, one)
    assert dropped == len(payloads[cap:])


collections = st.lists(values.filter(lambda value: value is not None) | st.none(), max_size=4)


@SMALL
@given(payloads=st.lists(collections, min_size=1, max_size=8), cut=st.integers(0, 8), cap=st.integers(1, 6))
@example(payloads=[[1, 1.0, True, "1", b"1"]], cut=0, cap=6)
@example(payloads=[[], [], []], cut=1, cap=1)
@example(payloads=[["z"], ["p", "z"], ["q"]], cut=1, cap=2)
@example(payloads=[[{"a": 1, "b": 2}], [{"b": 2, "a": 1}], [{"a": 1, "b": 3}]], cut=1, cap=6)
def test_union_is_what_came_first(client: redis.Redis, payloads: list[list[Any]], cut: int, cap: int) -> None:
    one, two, dropped = merged(client, union(cap), payloads, cut)
    distinct = list(dict.fromkeys(canonical(item) for payload in payloads for item in payload))
    assert [canonical(item) for item in one] == distinct[:cap]
    assert identical(two, one)
    assert (dropped > 0) == (len(distinct) > cap)


sized = st.lists(st.integers(1, 60).map(lambda size: "x" * size), min_size=1, max_size=10)


def _prefix(sizes: list[int], room: int) -> int:
    """How many come before the first that does not fit."""
    taken = 0
    while taken < len(sizes) and sum(sizes[: taken + 1]) <= room:
        taken += 1
    return taken


@SMALL
@given(payloads=sized, cut=st.integers(0, 10), room=st.integers(61, 250))
@example(payloads=["x" * 60, "x" * 60, "x"], cut=1, room=70)  # what fits after what did not is left out all the same
def test_bytes_are_limited(client: redis.Redis, payloads: list[str], cut: int, room: int) -> None:
    listed = Merge({"op": "append", "cap": 100, "bytes": room})
    wrapped = [len(msgpack.packb(CODEC.encode(one), use_bin_type=False)) for one in payloads]
    one, two, dropped = merged(client, listed, payloads, cut)
    kept = max(1, _prefix(wrapped, room))
    assert (one, two, dropped) == (payloads[:kept], payloads[:kept], len(payloads) - kept)
    united = Merge({"op": "union", "cap": 100, "bytes": room})
    distinct = list(dict.fromkeys(payloads))
    one, two, _ = merged(client, united, [[item] for item in payloads], cut)
    kept = max(1, _prefix([len(CODEC.encode(item)) for item in distinct], room))
    assert (one, two) == (distinct[:kept], distinct[:kept])


# -- one policy for each field ----------------------------------------------------------------------------------------

FIELDS: dict[str, MergeSpec] = {
    "n": "count", "s": "sum", "lo": "min", "hi": "max", "a": append(3), "u": union(3), "f": "first", "*": "last"
}  # fmt: skip
ORACLE: dict[str, Callable[[list[Any]], Any]] = {
    "n": len,
    "s": sum,
    "lo": min,
    "hi": max,
    "a": lambda payloads: payloads[:3],
    "u": lambda payloads: list(dict.fromkeys(item for payload in payloads for item in payload))[:3],
    "f": lambda payloads: payloads[0],
}
fields = st.fixed_dictionaries(
    {},
    optional={
        "n": values, "s": small, "lo": small, "hi": small, "a": values, "u": st.lists(texts, max_size=3), "f": values,
        "other": values, "": values, "1": values, "ünï\0": values,
    },
)  # fmt: skip


@SMALL
@given(payloads=st.lists(fields, min_size=1, max_size=6), cut=st.integers(0, 6))
@example(payloads=[{}, {}], cut=1)
@example(payloads=[{"u": []}, {"u": []}, {"a": None}], cut=1)
def test_each_field_by_its_own_policy(client: redis.Redis, payloads: list[dict[str, Any]], cut: int) -> None:
    one, two, _ = merged(client, FIELDS, payloads, cut)
    names = dict.fromkeys(name for payload in payloads for name in payload)
    given = {name: [payload[name] for payload in payloads if name in payload] for name in names}
    wanted = {name: ORACLE.get(name, lambda found: found[-1])(found) for name, found in given.items()}
    assert one.keys() == two.keys() == wanted.keys()
    for name in names:
        assert identical(one[name], wanted[name])
        assert identical(two[name], wanted[name])


def test_of_fields_without_a_name_the_first_thousand_are_kept(client: redis.Redis) -> None:
    # Given payloads of many fields, and one that the policy names and that comes last
    payloads = [{f"{part}-{n}": n for n in range(400)} for part in "abc"] + [{"s": 1, "a-0": "new", "late": 1}]
    for cut in range(4):
        one, two, dropped = merged(client, FIELDS, payloads, cut)
        assert len(one) == len(two) == 1001
        assert dropped == 201
        assert (one["s"], one["a-0"], "late" in one) == (1, "new", False)
        assert {name[0] for name in one} == {*"abcs"}
        assert all(f"{part}-{n}" in one for part in "ab" for n in range(400))


async def test_a_payload_of_more_fields_is_refused_and_what_is_dropped_is_counted(face: Any, clock: Clock) -> None:
    topic = face.topic("t", window="10s", merge={"s": "sum"})
    with pytest.raises(InvalidArgument, match="has 1,001 fields; the limit is 1,000"):
        await topic.trigger("k", dict.fromkeys(map(str, range(1001))))
    await topic.trigger("k", dict.fromkeys(map(str, range(1000))))
    await topic.trigger("k", {"s": 1, "more": 2})
    clock.advance("10s")
    (delivery,) = await topic.take()
    assert (len(delivery.payload), delivery.payload["s"], delivery.dropped) == (1001, 1, 1)
    # And a delivery that fails joins what came meanwhile, with what either dropped
    await topic.trigger("k", {"s": 2, "more": 3, "0": 4})
    await topic.nack(delivery, delay="0s")
    clock.advance("10s")
    (again,) = await topic.take()
    assert (len(again.payload), again.payload["s"], again.payload["0"], again.dropped) == (1001, 3, 4, 2)
    # And what fails of it is found, and tried again
    await topic.nack(again, items=["s", "0"], delay="0s")
    clock.advance("10s")
    (part,) = await topic.take()
    assert (part.payload, part.dropped) == ({"s": 3, "0": 4}, 0)


@pytest.mark.damages("undecodable")
async def test_a_number_of_dropped_fields_that_is_none_is_refused(face: Any, raw: Any, namespace: str) -> None:
    topic, pending = face.topic("t", window="10s", merge={"s": "sum"}), f"ig2:{{{namespace}:topic:t:0/1}}:messages"
    await topic.trigger("k", {"s": 1})
    fields = unpack_message(raw.hget(pending, "k"))
    acc = msgpack.unpackb(fields["acc"], raw=True) | {b"\xff": b"many"}
    spoilt = pack_message(**fields | {"acc": msgpack.packb(acc, use_bin_type=False)})
    raw.hset(pending, "k", spoilt)
    with pytest.raises(UnexpectedData, match="Nothing was written"):
        await topic.trigger("k", {"s": 1})
    assert raw.hget(pending, "k") == spoilt


# -- through a topic --------------------------------------------------------------------------------------------------

SERIES: dict[str, tuple[MergeSpec, list[Any]]] = {
    "last": ("last", [1, {"x": 1}, None, "z"]),
    "first": ("first", ["a", 2, 3, 4]),
    "count": ("count", [None] * 4),
    "sum": ("sum", [1, 2.5, -4, 10]),
    "min": ("min", [5, 2, 2.0, 9]),
    "max": ("max", [5, 9.0, 9, 2]),
    "append": (append(3), [1, 2, 3, 4]),
    "union": (union(3), [[1, 2], [2], [3, 1], [4]]),
    "fields": (FIELDS, [{"n": 1, "s": 2}, {"a": 1, "u": ["x"]}, {"s": 3, "u": []}, {"z": None, "a": 2}]),
}


@pytest.mark.parametrize("policy", [*NAMES, "fields"])
async def test_a_returned_delivery_comes_before_what_came_meanwhile(
    policy: str, face: Any, clock: Clock, client: redis.Redis
) -> None:
    # Given two triggers in flight, and two more that wait behind them
    spec, payloads = SERIES[policy]
    topic = face.topic("t", window="10s", merge=spec)
    for payload in payloads[:2]:
        await topic.trigger("k", payload)
    clock.advance("10s")
    (delivery,) = await topic.take()
    for payload in payloads[2:]:
        await topic.trigger("k", payload)
    # When the delivery fails and is tried again
    await topic.nack(delivery, delay="0s")
    clock.advance("10s")  # with "last" the newer payload waits for its own window
    (again,) = await topic.take()
    # Then it holds all four, merged in their order
    assert again.count == 4
    assert identical(again.payload, merged(client, spec, payloads)[0])


@for_each("policy", [*NAMES, "fields"])
def test_a_stored_policy_is_the_same_policy(policy: str) -> None:
    merge = merge_of(SERIES[policy][0])
    stored = merge_of_spec(msgpack.unpackb(msgpack.packb(merge.spec)))
    assert (stored, stored.raw, repr(stored)) == (merge, merge.raw, repr(merge))
    accs = [merge.lift(payload, CODEC) for payload in SERIES[policy][1]]
    assert [stored.lift(payload, CODEC) for payload in SERIES[policy][1]] == accs
