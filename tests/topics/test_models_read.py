"""Without an annotation that names its class, a program reads a stored model as the dict of its fields."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import pytest

from idemgate import Delivery, Gate, append, union
from tests.conftest import Face


@dataclass
class Item:
    n: int


async def _take(topic: Any) -> Delivery[Any]:
    (delivery,) = await topic.take()
    return delivery


@pytest.mark.parametrize(
    ("merge", "payload", "shown"),
    [
        ("last", Item(1), {"n": 1}),
        ("last", {"a": [(Item(1),)]}, {"a": [({"n": 1},)]}),
        (append(5), Item(1), [{"n": 1}]),
        (union(5), [(Item(1),)], [({"n": 1},)]),
        ({"a": append(5)}, {"a": Item(1), "b": Item(2)}, {"a": [{"n": 1}], "b": {"n": 2}}),
    ],
)
async def test_every_reader_of_a_payload_gets_the_dict_of_a_model(
    face: Face, merge: Any, payload: Any, shown: Any
) -> None:
    topic = face.topic("t", merge=merge)
    await topic.trigger("k", payload)
    assert (await topic.peek("k")).pending.payload == shown
    delivery = await _take(topic)
    assert delivery.payload == shown
    await topic.bury(delivery, reason="x")
    dead = face.gate.topic("t", merge=merge).dead
    assert [letter.payload for letter in dead.list()] == [shown]
    assert dead.redrive() == 1
    assert (await _take(topic)).payload == shown


async def test_a_result_is_read_as_the_dict_of_a_model(face: Face) -> None:
    topic = face.topic("t", result_retention="1h")
    receipt = await topic.trigger("k", 1)
    await topic.ack(await _take(topic), result=[Item(1)])
    assert await topic.result(receipt, "5s") == [{"n": 1}]
    claim = await face.claim("k", scope="s")
    await claim.checkpoint(Item(1))
    await claim.complete((Item(1),))
    assert (await face.claim("k", scope="s")).result == ({"n": 1},)
    assert "stored" not in repr(await face.inspect("k", scope="s"))


async def test_a_parameter_without_an_annotation_gets_the_dict_of_a_model(face: Face, gate: Gate) -> None:
    got: list[Any] = []

    def sync(k: str, item, more: Any = None, *rest, **named) -> None:  # type: ignore[no-untyped-def]
        got.append((item, more, rest, named))

    merged = gate.merge(key="{k}", name="m")(sync)
    merged.trigger("k", Item(1), [Item(2)], Item(3), z=Item(4))
    async with gate.aio.worker():
        for _ in range(2000):
            if got:
                break
            await asyncio.sleep(0.01)
    assert got == [({"n": 1}, [{"n": 2}], ({"n": 3},), {"z": {"n": 4}})]
