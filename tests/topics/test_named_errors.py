"""The errors of calls about a key name the topic and the key."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument, StoreUnavailable, Trigger
from idemgate.errors import IdemgateError, PolicyChanged, UnexpectedData
from tests.conftest import Face

pytestmark = pytest.mark.one_in(3)

Ask = Callable[[Any], Awaitable[Any]]

ASKS: dict[str, Ask] = {
    "trigger": lambda topic: topic.trigger("order-7"),
    "trigger_many": lambda topic: topic.trigger_many([Trigger("order-7")]),
    "cancel": lambda topic: topic.cancel("order-7"),
    "bury": lambda topic: topic.bury("order-7"),
    "reschedule": lambda topic: topic.reschedule("order-7", delay="1s"),
    "flush": lambda topic: topic.flush("order-7"),
    "peek": lambda topic: topic.peek("order-7"),
}
INVALID: dict[str, Ask] = {
    "trigger": lambda topic: topic.trigger("order-7", priority=1),
    "a payload": lambda topic: topic.trigger("order-7", object()),
    "the second of many": lambda topic: topic.trigger_many([("a", 1), Trigger("order-7", delay=-1), ("c", object())]),
    "cancel": lambda topic: topic.cancel("order-7", group=""),
    "reschedule": lambda topic: topic.reschedule("order-7"),
}


async def _error(kind: type[IdemgateError], ask: Ask, topic: Any) -> IdemgateError:
    with pytest.raises(kind) as caught:
        await ask(topic)
    assert str(caught.value).endswith(" (topic 't', key 'order-7')")
    assert caught.value.subject == ("t", "order-7", 0)
    return caught.value


@pytest.mark.parametrize("opened", [True, False], ids=["opened", "unopened"])
@pytest.mark.parametrize("ask", INVALID.values(), ids=INVALID)
async def test_an_invalid_argument(face: Face, ask: Ask, opened: bool) -> None:
    topic = face.topic("t", window="1s")
    if opened:
        await topic.open()
    error = await _error(InvalidArgument, ask, topic)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


async def test_an_invalid_payload_inside_a_guarded_run(face: Face) -> None:
    topic = face.topic("t", merge="append")
    await topic.open()
    async with face.inside("run", scope="s"):
        await _error(InvalidArgument, lambda topic: topic.trigger("order-7", object()), topic)
        many = [("a", 1), ("order-7", object())]
        await _error(InvalidArgument, lambda topic: topic.trigger_many(many), topic)


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
async def test_a_policy_that_differs(face: Face, gate: Gate, url: str, ask: Ask) -> None:
    await face.topic("t", window="1s").open()
    other = Gate(url, namespace=gate.namespace, clock=gate.context.clock)
    await _error(PolicyChanged, ask, Face(other, face.awaiting).topic("t", window="2s"))
    await other.aio.close()
    other.close()


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
async def test_foreign_data(face: Face, raw: Any, namespace: str, ask: Ask) -> None:
    topic, meta = face.topic("t"), f"ig2:{{{namespace}:topic:t:0/1}}:meta"
    await topic.open()
    raw.set(meta, "x")
    await _error(UnexpectedData, ask, topic)
    raw.delete(meta)


@pytest.mark.parametrize("awaiting", [False, True], ids=["blocking", "awaiting"])
@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
async def test_a_store_that_is_away(ask: Ask, awaiting: bool) -> None:
    gate = Gate("redis://127.0.0.1:1", namespace="away", timeout="10ms")
    await _error(StoreUnavailable, ask, Face(gate, awaiting).topic("t"))
    await gate.aio.close()
    gate.close()


async def test_many_keys_are_counted(face: Face, raw: Any, namespace: str) -> None:
    topic, meta = face.topic("t"), f"ig2:{{{namespace}:topic:t:0/1}}:meta"
    await topic.open()
    raw.set(meta, "x")
    with pytest.raises(UnexpectedData, match=r"\(topic 't', key 'a' and 2 more\)") as caught:
        await topic.trigger_many([("a", 1), (b"b", 1), (3, 1)])
    assert caught.value.subject == ("t", "a", 2)
    raw.delete(meta)


async def test_each_task_of_a_shared_call_gets_its_own_key(gate: Gate, raw: Any) -> None:
    # Given triggers of one tick, which share a call that fails
    topic, meta = gate.aio.topic("t"), f"ig2:{{{gate.namespace}:topic:t:0/1}}:meta"
    await topic.open()
    raw.set(meta, "x")
    found = await asyncio.gather(*(topic.trigger(key) for key in ("a", b"\xff", 3)), return_exceptions=True)
    # Then each error names the key of its task
    assert [type(one) for one in found] == [UnexpectedData] * 3
    subjects = [one.subject for one in found if isinstance(one, IdemgateError)]
    assert subjects == [("t", "a", 0), ("t", "\\xff", 0), ("t", "3", 0)]
    raw.delete(meta)


def test_an_invalid_key_is_shown(gate: Gate) -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    for key, shown in ((None, "None"), ("", ""), (Broken(), "<Broken")):
        with pytest.raises(InvalidArgument) as caught:
            gate.topic("t").trigger(key)  # type: ignore[arg-type]
        assert caught.value.subject is not None
        assert caught.value.subject[1].startswith(shown)
