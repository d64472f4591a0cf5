"""`gate.merge`: a function that is triggered with its own arguments, and later called once with the merged ones."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pydantic
import pytest

from idemgate import Gate, InvalidArgument, PartialFailure, Trigger, append
from idemgate.testing import Clock


@dataclass
class Line:
    sku: str
    pieces: int


@dataclass
class Order:
    id: int
    lines: list[Line]


async def _trigger(merged: Any, face: Any, *args: Any, **kwargs: Any) -> Any:
    """Through the flavour of `face`."""
    if face.awaiting:
        return await merged.aio.trigger(*args, **kwargs)
    return await asyncio.to_thread(merged.trigger, *args, **kwargs)


async def _deliver(merged: Any, face: Any) -> Any:
    """Takes the one delivery that is due, calls the handler as a worker does, acks; what the function returned."""
    topic = face.topic(merged.topic.name)
    (delivery,) = await topic.take(10)
    returned = merged.topic.definition.handler(delivery)
    if inspect.isawaitable(returned):
        returned = await returned
    assert await topic.ack(delivery) == "ok"
    return returned


async def test_triggers_with_its_own_arguments_and_is_called_once(face: Any, gate: Gate, clock: Clock) -> None:
    calls = []

    @gate.merge(key="{doc_id}", quiet="5s", max_delay="1m", name="reindex")
    def reindex(doc_id: int, reason: str = "none", *, force: bool = False) -> str:
        """Makes the index anew."""
        calls.append((doc_id, reason, force))
        return f"indexed {doc_id}"

    # Given three triggers, spelled in three ways
    receipts = [
        await _trigger(reindex, face, 7),
        await _trigger(reindex, face, doc_id=7, reason="edit"),
        await _trigger(reindex, face, 7, "save", force=True),
    ]
    assert [receipt.status for receipt in receipts] == ["scheduled", "merged", "merged"]
    assert calls == []
    # When the key is quiet
    clock.advance("5s")
    # Then the function runs once, with the arguments of the last
    assert await _deliver(reindex, face) == "indexed 7"
    assert calls == [(7, "save", True)]


async def test_defaults_are_those_of_the_trigger(face: Any, gate: Gate) -> None:
    @gate.merge(key="{a}", merge="first", name="f")
    def f(a: int, b: list[int] | None = None, *rest: int, c: str = "c", **more: int) -> Any:
        return a, b, rest, c, more

    await _trigger(f, face, 1)
    await _trigger(f, face, 1, [2], 3, 4, c="x", d=5)
    assert await _deliver(f, face) == (1, None, (), "c", {})
    await _trigger(f, face, 1, [2], 3, 4, c="x", d=5)
    assert await _deliver(f, face) == (1, [2], (3, 4), "x", {"d": 5})


def test_calling_it_directly_calls_it(gate: Gate, everything: Any) -> None:
    @gate.merge(window="1m", name="f")
    def f(a: int, b: int = 2) -> int:
        """Adds."""
        return a + b

    assert (f(1), f(1, b=5)) == (3, 6)
    assert (f.__name__, f.__doc__, inspect.signature(f)) == ("f", "Adds.", inspect.signature(f.__wrapped__))
    assert everything() == {}


async def test_an_async_function_stays_one(face: Any, gate: Gate) -> None:
    @gate.merge(key="{a}", merge={"n": "sum"}, name="f")
    async def f(a: str, n: int) -> str:
        await asyncio.sleep(0)
        return f"{a}{n}"

    # Given that it can still be awaited directly
    assert await f("direct", 1) == "direct1"
    # When it is triggered twice, its handler is awaited with the merged arguments
    await _trigger(f, face, "k", 1)
    await _trigger(f, face, a="k", n=2)
    assert inspect.iscoroutinefunction(f.topic.definition.handler)
    assert await _deliver(f, face) == "k3"


async def test_each_argument_may_have_its_policy(face: Any, gate: Gate) -> None:
    @gate.merge(
        key="{doc}", merge={"n": "sum", "tags": "union", "log": append(2), "times": "count", "*": "first"}, name="f"
    )
    def f(doc: str, n: int, tags: list[str], log: str, times: int = 0, who: str = "") -> Any:
        return doc, n, tags, log, times, who

    await _trigger(f, face, "d", 1, ["a"], "x", who="ann")
    await _trigger(f, face, "d", 2, ["b", "a"], "y", who="bob")
    await _trigger(f, face, "d", 3, [], "z")
    assert await _deliver(f, face) == ("d", 6, ["a", "b"], ["x", "y"], 3, "ann")


async def test_arguments_are_made_again_by_their_annotations(face: Any, gate: Gate) -> None:
    @gate.merge(key="{order.id}", name="f")
    def f(order: Order, at: datetime, by: Line | None = None) -> Any:
        return order, at, by

    order, at = Order(7, [Line("a", 1), Line("b", 2)]), datetime(2024, 5, 1, tzinfo=UTC)
    receipt = await _trigger(f, face, order, at, by=Line("c", 3))
    assert receipt.status == "scheduled"
    assert await _deliver(f, face) == (order, at, Line("c", 3))


async def test_without_a_key_all_arguments_are_the_key(face: Any, gate: Gate) -> None:
    @gate.merge(window="1m", name="f")
    def f(a: int, b: int = 2) -> None: ...

    statuses = [(await _trigger(f, face, *args)).status for args in ((1,), (1, 2), (1, 3), (2,))]
    assert statuses == ["scheduled", "merged", "scheduled", "scheduled"]


def test_the_topic_is_named_after_the_function(gate: Gate) -> None:
    def refresh(a: int) -> None: ...

    refresh.__module__, refresh.__qualname__ = "shop.images", "refresh"
    assert gate.merge(window="1m")(refresh).topic.name == "shop.images.refresh"
    assert gate.topic("shop.images.refresh").policy.window == 60_000


async def test_bad_arguments_are_refused_and_nothing_is_written(face: Any, gate: Gate, everything: Any) -> None:
    @gate.merge(key="{a}", merge={"n": "sum"}, name="f")
    def f(a: str, n: int) -> None: ...

    with pytest.raises(TypeError, match="missing a required argument: 'n'"):
        await _trigger(f, face, "k")
    with pytest.raises(TypeError, match="unexpected keyword argument 'm'"):
        await _trigger(f, face, "k", 1, m=2)
    with pytest.raises(InvalidArgument, match=r"payload\['n'\]='x': not an int or float"):
        await _trigger(f, face, "k", "x")
    with pytest.raises(InvalidArgument, match="makes an empty key"):
        await _trigger(f, face, "", 1)
    with pytest.raises(InvalidArgument, match=r"\{a\}=<object object at .*does not name anything"):
        await _trigger(f, face, object(), 1)
    assert everything() == {}


def _generator() -> Iterator[int]:
    yield 1


async def _async_generator() -> AsyncIterator[int]:
    yield 1


class _Shop:
    def method(self, a: int) -> None: ...


def _plain(a: int, b: int = 2) -> None: ...


def _a_function_whose_name_is_so_long_that_no_topic_can_be_named_after_it(a: int) -> None: ...


@pytest.mark.parametrize(
    ("func", "options", "text"),
    [
        (_generator, {}, "a generator function"),
        (_async_generator, {}, "a generator function"),
        (_Shop.method, {}, "a method needs its object, which cannot be stored. Use a function"),
        (_plain, {"merge": "sum"}, "merge='sum': would not leave the arguments of a call. Use"),
        (_plain, {"merge": "append"}, "merge='append': would not leave the arguments"),
        (_plain, {"merge": {"a": "sum", "c": "max"}}, "merge='c': not an argument of the function. It has a, b"),
        (_plain, {"key": "{c}"}, "c"),
        (_plain, {"window": "1m", "quiet": "1m"}, "quiet=60.0"),
        (_plain, {"name": "a b"}, "topic='a b': not a name"),
        (_plain, {"name": None, "window": -1}, "window=-1"),
        (_a_function_whose_name_is_so_long_that_no_topic_can_be_named_after_it, {"name": None}, "Pass name="),
    ],
)
def test_a_bad_use_is_refused_at_decoration(gate: Gate, everything: Any, func: Any, options: Any, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        gate.merge(**({"name": "f"} | options))(func)
    assert text in str(caught.value)
    assert everything() == {}
    assert gate.topics == {}


def test_a_topic_has_one_handler(gate: Gate) -> None:
    gate.merge(name="f")(_plain)
    with pytest.raises(InvalidArgument, match=r"topic 'f' has another one already.*use two topics"):
        gate.merge(name="f")(lambda a: a)


def test_a_function_that_is_defined_again_replaces_itself(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    # Given a module that is loaded again, so that each of its functions is another object of the same name
    namespaces: list[dict[str, Any]] = [{"__name__": "shop"} for _ in range(2)]
    for namespace in namespaces:
        exec("def handle(delivery): pass\ndef merged(a): pass", namespace)
        assert gate.topic("t").handler(namespace["handle"]) is namespace["handle"]
        gate.merge(name="m")(namespace["merged"])
    assert gate.topic("t").definition.handler is namespaces[1]["handle"]

    # And the method of one object, which is another object at each access
    class Service:
        def handle(self, delivery: Any) -> None: ...

        @classmethod
        def handle_all(cls, delivery: Any) -> None: ...

    service = Service()
    for name, registered in (("method", lambda: service.handle), ("class", lambda: Service.handle_all)):
        gate.topic(name).handler(registered())
        gate.topic(name).handler(registered())
    # But two objects are two handlers
    with pytest.raises(InvalidArgument, match="has another one"):
        gate.topic("method").handler(Service().handle)


# -- another delivery -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("awaits", [False, True])
async def test_a_delivery_may_enqueue_the_call_elsewhere(face: Any, gate: Gate, clock: Clock, awaits: bool) -> None:
    queue: list[Any] = []

    def enqueue(delivery: Any) -> str:
        queue.append((delivery.id, delivery.payload))
        return "queued"

    async def enqueue_async(delivery: Any) -> str:
        return enqueue(delivery)

    @gate.merge(
        key="{doc}", quiet="5s", max_delay="1m", name="reindex", merge={"fields": "union", "*": "last"},
        deliver=enqueue_async if awaits else enqueue,
    )  # fmt: skip
    def reindex(doc: str, fields: list[str], line: Line | None = None, user: str = "") -> str:
        return f"indexed {doc}"

    await _trigger(reindex, face, "d", ["a"], user="ada")
    await _trigger(reindex, face, "d", ["b"], Line("sku", 2), user="bob")
    clock.advance(6)
    assert await _deliver(reindex, face) == "queued"
    ((delivery_id, arguments),) = queue
    assert delivery_id
    assert arguments == {"doc": "d", "fields": ["a", "b"], "line": {"sku": "sku", "pieces": 2}, "user": "bob"}
    # A direct call does not enqueue
    assert reindex("d", []) == "indexed d"


def test_a_delivery_that_takes_no_delivery_is_refused(gate: Gate) -> None:
    with pytest.raises(InvalidArgument, match="cannot be called with"):
        gate.merge(name="f", deliver=lambda: None)(_plain)  # type: ignore[arg-type,misc]


# -- options of triggers, and once on the same function ---------------------------------------------------------------


async def test_triggers_take_options(face: Any, gate: Gate, clock: Clock) -> None:
    @gate.merge(key="{item}", name="reindex", merge={"n": "sum"}, priority=True)
    def reindex(item: str, n: int = 1) -> None: ...

    later = reindex.with_options(delay="30s", priority=7, group="g")
    receipt = await _trigger(later, face, "a")
    assert receipt.due_ms == clock.microseconds() // 1000 + 30_000
    assert [await _status(reindex.with_options(event_id=1), face, "b") for _ in range(2)] == ["scheduled", "duplicate"]
    assert [await _status(reindex.with_options(version=n), face, "c") for n in (2, 1)] == ["scheduled", "dropped"]
    clock.advance(30)
    (delivery,) = (one for one in gate.topic("reindex").take(9) if one.key == "a")
    assert (delivery.priority, delivery.group) == (7, "g")
    with pytest.raises(TypeError, match="with_options"):
        reindex.with_options(colour="red")  # type: ignore[call-arg]


async def _status(merged: Any, face: Any, *args: Any) -> str:
    return str((await _trigger(merged, face, *args)).status)


async def test_once_above_merge_drops_copies_and_merges_the_rest(face: Any, gate: Gate, clock: Clock) -> None:
    totals: list[tuple[str, int]] = []

    @gate.once(key="{event}", retention="1h")
    @gate.merge(key="{account}", window="10s", merge={"amount": "sum"}, name="credit")
    def credit(account: str, amount: int, event: str) -> None:
        totals.append((account, amount))

    # Given three events of one account, each of them twice
    statuses = [await _status(credit, face, "acc", n, f"event-{n}") for n in (1, 2, 3, 1, 2, 3)]
    assert statuses == ["scheduled", "merged", "merged", "duplicate", "duplicate", "duplicate"]
    # Then the function gets their sum once
    clock.advance(10)
    await _deliver(credit, face)
    assert totals == [("acc", 6)]
    # And a copy after the delivery is dropped, until the retention ends
    assert await _status(credit, face, "acc", 1, "event-1") == "duplicate"
    clock.advance(3700)
    assert await _status(credit, face, "acc", 1, "event-1") == "scheduled"


async def test_merge_above_once_guards_the_merged_call(face: Any, gate: Gate, clock: Clock) -> None:
    ran: list[int] = []

    @gate.merge(key="{item}", window="10s", name="reindex")
    @gate.once(key="{item}:{version}")
    def reindex(item: str, version: int) -> None:
        ran.append(version)

    for _ in range(2):  # the second window holds the same version
        for version in (1, 2):
            await _trigger(reindex, face, "a", version)
        clock.advance(10)
        await _deliver(reindex, face)
    assert ran == [2]


def test_a_direct_call_of_once_above_merge_is_guarded(gate: Gate) -> None:
    ran: list[int] = []

    @gate.once(key="{n}")
    @gate.merge(key="{n}", name="direct")
    def handle(n: int) -> int:
        ran.append(n)
        return n

    assert [handle(1), handle(1), handle(2)] == [1, 1, 2]
    assert ran == [1, 2]


@pytest.mark.parametrize("option", [{"lease": "5s"}, {"fingerprint": ["n"]}, {"on_error": "store"}])
def test_once_above_merge_refuses_options_without_effect(gate: Gate, option: Any) -> None:
    @gate.merge(key="{n}", name="refused")
    def handle(n: int) -> None: ...

    with pytest.raises(InvalidArgument, match="once above merge"):
        gate.once(key="{n}", **option)(handle)


class Card(pydantic.BaseModel):
    number: str
    token: str = pydantic.Field(exclude=True)

    @pydantic.field_validator("number")
    @classmethod
    def spread(cls, number: str) -> str:
        return number + "0"

    @pydantic.field_serializer("number")
    def mask(self, number: str) -> str:
        return "****"


class Gold(Card):
    limit: int


async def test_models_reach_the_function_as_they_were_triggered(face: Any, gate: Gate) -> None:
    @gate.merge(key="{n}", merge={"cards": append()}, name="cards")
    def charge(n: int, card: Card, cards: list[Card]) -> Any:
        if len(cards) > 1:
            raise PartialFailure({"cards": cards[1:]})
        return card, cards

    gold, card = Gold(number="1", token="t", limit=3), Card(number="2", token="u")
    for cards in (gold, card):
        await _trigger(charge, face, 1, gold, cards)
    # When its handler runs, then no validator has changed what the validators of the producer had made
    (delivery,) = await face.topic("cards").take(1)
    with pytest.raises(PartialFailure) as failed:
        charge.topic.definition.handler(delivery)
    # And the failed items are found, as models or as the dicts that `delivery.payload` has
    assert failed.value.items["cards"] == [card]
    for items in ({"cards": [card]}, {"cards": delivery.payload["cards"][1:]}):
        assert delivery.select_items(items).items == 1
    assert delivery.payload["card"] == {"number": "10", "token": "t", "limit": 3}
    # A trigger that waits in an outbox keeps them, too
    packed = charge.topic.pack_trigger(Trigger(2, {"n": 2, "card": gold, "cards": card}))
    await face.topic("cards").trigger_many([charge.topic.unpack_trigger(packed)])
    assert await _deliver(charge, face) == (gold, [card])


@dataclass
class Held:
    by: Any


async def test_a_function_never_gets_the_stored_form_of_a_model(face: Any, gate: Gate) -> None:
    def handle(n, item, any_one: Any, some: list, line: Line, *rest: Line, **more: Line) -> Any:  # type: ignore[no-untyped-def]
        return item, any_one, some, line, rest, more

    def plainly(n, item) -> Any:  # type: ignore[no-untyped-def]
        return item

    gold = Gold(number="1", token="t", limit=3)
    fields = {"number": "10", "token": "t", "limit": 3}
    mixed, bare = gate.merge(key="{n}", name="mixed")(handle), gate.merge(key="{n}", name="bare")(plainly)
    line = Line("a", 1)
    await _trigger(mixed, face, 1, gold, gold, [gold], line, line, last=line)
    await _trigger(bare, face, 1, {"a": [gold]})
    assert await _deliver(mixed, face) == (fields, fields, [fields], line, (line,), {"last": line})
    assert await _deliver(bare, face) == {"a": [fields]}


def local_line() -> Any:
    @dataclass
    class Local(Line): ...

    return Local


async def test_a_trigger_that_could_not_be_restored_is_refused(face: Any, gate: Gate, everything: Any) -> None:
    @gate.merge(key="{n}", merge={"items": append()}, name="held")
    def handle(n: int, held: Held | None = None, items: list[Held] | None = None, line: Line | None = None) -> None: ...

    def vague(n: int, held: Nowhere) -> None: ...  # type: ignore[name-defined]  # noqa: F821

    unknown = gate.merge(key="{n}", name="vague")(vague)
    held = Held(Line("a", 1))
    before = everything()
    for named, says in (
        ({"held": held}, r"payload\['held'\].*Line, and the annotation leads to Any. Annotate the parameter"),
        ({"items": held}, r"payload\['items'\].*Line, and the annotation leads to Any"),
        ({"line": {"sku": "a"}}, r"payload\['line'\].*pieces"),
    ):
        with pytest.raises(InvalidArgument, match=says):
            await _trigger(handle, face, 1, **named)
        with pytest.raises(InvalidArgument, match=says):
            await face.topic("held").trigger_many([(1, {"n": 1, **named})])
        with pytest.raises(InvalidArgument, match=says):
            handle.topic.pack_trigger(Trigger(1, {"n": 1, **named}))
    # A class of a function has the name of another class
    Local, Other = local_line(), local_line()  # noqa: N806
    assert Local is not Other

    def take(n: int, held: Any = None, lines: Any = None) -> None: ...

    take.__annotations__ |= {"held": Local, "lines": list[Local]}  # type: ignore[valid-type]
    local = gate.merge(key="{n}", name="local")(take)
    for named in ({"held": Other("a", 1)}, {"lines": [Other("a", 1)]}):
        with pytest.raises(InvalidArgument, match=r"payload\['.*would come back as another class of the same name"):
            await _trigger(local, face, 1, **named)
        packed = Trigger(1, {"n": 1, **named})
        with pytest.raises(InvalidArgument, match="another class of the same name"):
            local.topic.pack_trigger(packed)
    with pytest.raises(InvalidArgument, match="needs its arguments by name"):
        await face.topic("vague").trigger(1, 5)
    with pytest.raises(InvalidArgument, match="annotation of 'held' cannot be evaluated"):
        await _trigger(unknown, face, 1, held)
    assert everything() == before
    await _trigger(unknown, face, 1, "plain")
    assert await _trigger(handle, face, 1, Held(1), Held(2))
    assert await _trigger(local, face, 1, Local("a", 1), [Local("a", 1)])
    sent = local.topic.unpack_trigger(local.topic.pack_trigger(Trigger(2, {"n": 2, "lines": [Local("a", 1)]})))
    assert await face.topic("local").trigger_many([sent])
