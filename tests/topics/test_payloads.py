"""Payloads that come back: their fields, their items, what was dropped, and sums that would overflow."""

from __future__ import annotations

import math
from typing import Any

import pytest

from idemgate import InvalidArgument, append, union
from idemgate.testing import Clock
from tests.conftest import Face


async def _delivered(topic: Any) -> Any:
    (delivery,) = await topic.take(10)
    return delivery


async def test_fields_come_back_in_the_order_of_the_policy_then_by_name(face: Face) -> None:
    # Given a policy for some fields, and triggers with fields in other orders
    topic = face.topic("t", merge={"zebra": "sum", "apple": append(9), "mango": "max"}, window="1s")
    for _ in range(2):
        await topic.trigger("k", {"y": 1, "mango": 1, "b": 2, "zebra": 1, "x": 3, "a": 4, "apple": 1, "c": 5})
    await topic.flush()
    # Then the payload begins with the fields of the policy, and the others follow by name
    delivery = await _delivered(topic)
    assert [*delivery.payload] == ["zebra", "apple", "mango", "a", "b", "c", "x", "y"]
    # Also after a partial failure
    assert await topic.nack(delivery, items=["x", "apple", "zebra"], delay="0s") == "ok"
    assert [*(await _delivered(topic)).payload] == ["zebra", "apple", "x"]


@pytest.mark.parametrize("merge", ["sum", {"n": "sum"}], ids=["sum", "field"])
@pytest.mark.parametrize("number", [1.0e290 * 1.01, -1.7e308])
async def test_a_number_that_could_overflow_a_sum_is_refused(
    face: Face, everything: Any, merge: Any, number: float
) -> None:
    topic = face.topic("t", merge=merge)
    await topic.trigger("k", 1 if merge == "sum" else {"n": 1})
    before = everything()
    # When a number comes whose sum may become infinite
    with pytest.raises(InvalidArgument, match="1e290"):
        await topic.trigger("k", number if merge == "sum" else {"n": number})
    # Then it is refused, and nothing was written but the count of that and its reply
    after = everything()
    (meta,), (replies,) = ([key for key in after if part in key] for part in (b":meta", b":replies"))
    assert after[meta] == before[meta] | {b"refused_payload": b"1"}
    assert after | {meta: before[meta], replies: before[replies]} == before


async def test_the_largest_sum_is_finite(face: Face) -> None:
    # Given the largest numbers, in as many triggers as a message can count
    topic = face.topic("t", merge="sum", window="1s")
    await topic.trigger_many([("k", 1e290)] * 200)
    await topic.flush()
    assert (await _delivered(topic)).payload == pytest.approx(2e292)
    assert math.isfinite(1e290 * 2.0**40)


ONE: list[Any] = [
    {"a": 1, "b": {"x": 1, "y": 2}},
    ({"a": 1, "b": 2},),
    {"d": {"p": {"b": 1, "a": 2}}},
]
OTHER: list[Any] = [
    {"b": {"y": 2, "x": 1}, "a": 1},
    ({"b": 2, "a": 1},),
    {"d": {"p": {"a": 2, "b": 1}}},
]


@pytest.mark.parametrize(("one", "other"), list(zip(ONE, OTHER, strict=True)))
@pytest.mark.parametrize("field", [False, True], ids=["whole", "field"])
async def test_union_and_nack_agree_that_the_order_in_a_dict_does_not_matter(
    face: Face, one: Any, other: Any, field: bool
) -> None:
    # Given two payloads with a dict whose keys are in different orders
    topic = face.topic("t", merge={"items": "union"} if field else "union", window="1s")
    for item in (one, other):
        await topic.trigger("k", {"items": [item, "rest"]} if field else [item, "rest"])
    await topic.flush()
    delivery = await _delivered(topic)
    # Then it is one item
    items = delivery.payload["items"] if field else delivery.payload
    assert items == [one, "rest"]
    # And either order names it
    assert await topic.nack(delivery, items={"items": [other]} if field else [other], delay="0s") == "ok"
    delivery = await _delivered(topic)
    assert (delivery.payload["items"] if field else delivery.payload) == [one]


CAPPED: list[Any] = [
    (append(2), [1, 2, 3, 4], [1, 2]),
    (union(2), [[1], [2], [3], [4]], [1, 2]),
    ({"l": append(2)}, [{"l": n} for n in (1, 2, 3, 4)], {"l": [1, 2]}),
    ({"l": append(2)}, [{"l": n} for n in (1, 2, 3, 4)], {"l": ...}),
    ({"l": append(2)}, [{"l": n} for n in (1, 2, 3, 4)], ["l"]),
    ({"l": union(2)}, [{"l": [n]} for n in (1, 2, 3, 4)], ["l"]),
]


@pytest.mark.parametrize(("merge", "payloads", "items"), CAPPED)
async def test_all_items_named_are_the_same_as_most_of_them(
    face: Face, clock: Clock, conserved: Any, merge: Any, payloads: list[Any], items: Any
) -> None:
    # Given a delivery whose list was full
    topic = face.topic("t", merge=merge, window="1s")
    await topic.trigger_many([("k", payload) for payload in payloads])
    await topic.flush()
    delivery = await _delivered(topic)
    assert (delivery.count, delivery.dropped) == (2, 2)
    # When all of its items failed
    assert await topic.nack(delivery, items=items, delay="0s") == "ok"
    # Then those return, and the dropped ones are reported no more
    delivery = await _delivered(topic)
    assert (delivery.count, delivery.dropped) == (2, 0)
    stats = await topic.stats()
    assert (stats["partial"], stats["items_failed"]) == (1, 2)
    assert await topic.ack(delivery) == "ok"
    await conserved(topic, ["k"])
