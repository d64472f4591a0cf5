"""What a guarded function returns: an annotation that cannot be stored is refused, and a lost model is logged."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, time
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, Protocol, TypedDict, TypeVar
from uuid import UUID

import pydantic
import pytest

from idemgate import Gate, InvalidArgument, KeyReused
from idemgate.core.codec.storable import find_unstorable
from idemgate.errors import ResultUnavailable
from tests.for_each import for_each
from tests.security import decoders

pytestmark = pytest.mark.one_in(3)

T = TypeVar("T")
OrderId = NewType("OrderId", str)


@dataclass
class Order:
    id: str


class Base:
    """A base of models."""


@dataclass
class Derived(Base):
    id: str


class Color(Enum):
    RED = 1


class Pair(NamedTuple):
    a: int


class Row(TypedDict):
    a: int


class Named(Protocol):
    name: str


class Text(str):
    __slots__ = ()


class Response: ...


GOOD = [
    None, int, str | None, list[int], dict[str, Any], tuple[int, ...], set[UUID], Order, list[Order],
    Order | dict[str, int], Any, object, T, OrderId, Annotated[int, "m"], Literal["a"], Row, Named, Base,
    Sequence[int], Mapping[str, Order], Iterable[int], datetime, Decimal, int | Response, "forward",
]  # fmt: skip
BAD = [
    Response, Response | None, list[Response], dict[str, Path], tuple[int, Path], Color, list[Color], Pair, Text, time,
    bytearray, Iterator[int], Generator[int], Awaitable[int], Callable[[], int], type[int], threading.Lock().__class__,
    Exception, Sequence[Path], Path | Response,
]  # fmt: skip


@for_each("annotation", GOOD, ids=str)
def test_an_annotation_that_may_be_stored_passes(annotation: Any) -> None:
    assert find_unstorable(annotation) is None


@for_each("annotation", BAD, ids=str)
def test_an_annotation_that_cannot_be_stored_is_found(annotation: Any) -> None:
    assert find_unstorable(annotation) is not None


def test_a_function_that_returns_what_cannot_be_stored_is_refused_at_decoration(gate: Gate) -> None:
    def handle(k: str) -> Response:
        return Response()

    async def handle_soon(k: str) -> list[Response]:
        return []

    for func in (handle, handle_soon):
        for decorator in (gate.once(key="{k}"), gate.callback("{k}")):
            with pytest.raises(InvalidArgument, match=r"returns Response, which cannot be stored.*on_done='skip'"):
                decorator(func)
    gate.once(key="{k}", on_done="skip")(handle)
    gate.once(key="{k}", on_done="raise")(handle)
    gate.once(key="{k}", at_most_once=True)(handle)


async def test_a_model_without_an_annotation_is_logged_once(face: Any, caplog: pytest.LogCaptureFixture) -> None:
    def unannotated(k: str):  # type: ignore[no-untyped-def]
        return Order(k)

    def annotated(k: str) -> Order:
        return Order(k)

    for func, scope in ((unannotated, "u"), (annotated, "a")):
        handle = face.once(key="{k}", scope=scope)(func)
        for key in "xy":
            await handle(key)
    found = [record.message for record in caplog.records if "model_not_annotated" in record.message]
    assert len(found) == 1
    assert found[0].startswith("once.model_not_annotated scope='u' key='x': no return annotation")


@dataclass
class Paid:
    id: str


@dataclass
class Line:
    """`tests.security.decoders` has another one."""


class Sheet(pydantic.BaseModel, Generic[T]):
    lines: list[T] = []


class Receipt(pydantic.BaseModel):
    id: str

    @pydantic.field_validator("id")
    @classmethod
    def number(cls, id: str) -> str:
        return "r-" + id


class Secret(Receipt):
    card: str

    @pydantic.field_serializer("card")
    def mask(self, card: str) -> str:
        return "****"


@pytest.mark.parametrize("options", [{}, {"cache_size": 10}, {"on_store_error": "local"}], ids=repr)
@pytest.mark.parametrize(
    ("result", "returns"),
    [(Paid("1"), Order | Paid), (Secret(id="1", card="4242"), Receipt), ([Order("1"), Paid("1")], list[Order | Paid])],
)
async def test_a_duplicate_gets_what_the_first_call_got(face: Any, result: Any, returns: Any, options: Any) -> None:
    def handle(k: str) -> Any:
        return result

    handle.__annotations__["return"] = returns
    guarded = face.once(key="{k}", scope="s", **options)(handle)
    for _ in range(2):
        again = await guarded("x")
        assert again == result
        assert type(again) is type(result)
    assert dict(face.gate.counters)["once.started"] == 1


@dataclass
class Held:
    by: Any


@dataclass
class Pocket(Generic[T]):
    inside: T


@pytest.mark.parametrize(
    ("result", "returns"),
    [
        (Held(Order("1")), Held), ([Held(Order("1"))], list[Held]), (Receipt.model_construct(), Receipt),
        (Order("1"), Named), ({"id": "1"}, Order), (Held(Color.RED), Held),
    ],
)  # fmt: skip
async def test_a_result_that_no_duplicate_could_get_is_counted_at_the_first_run(
    face: Any, caplog: pytest.LogCaptureFixture, result: Any, returns: Any
) -> None:
    def handle(k: str) -> Any:
        return result

    handle.__annotations__["return"] = returns
    assert await face.once(key="{k}", scope="s")(handle)("x") is result
    assert face.gate.counters["once.result_not_stored"] == 1
    assert any("once.result_not_stored scope='s' key='x'" in record.message for record in caplog.records)
    with pytest.raises(ResultUnavailable, match=r"cannot be restored.*Annotate what holds it"):
        await face.once(key="{k}", scope="s")(handle)("x")
    # Where no duplicate gets a result, it is stored for `inspect` all the same
    assert await face.once(key="{k}", scope="skip", on_done="skip")(handle)("x") is result
    assert face.gate.counters["once.result_not_stored"] == 1


def of_one_name() -> tuple[Any, Any]:
    """Return two classes that have the same name."""

    def make() -> Any:
        @dataclass
        class Local:
            n: int

        return Local

    return make(), make()


@pytest.mark.parametrize("place", ["list", "dict", "model"])
async def test_a_result_with_a_class_of_the_same_name_inside_is_not_stored(face: Any, place: str) -> None:
    one, other = of_one_name()
    returns = {"list": list[one], "dict": dict[str, one], "model": Pocket[one]}[place]  # type: ignore[valid-type]

    def handle(k: str, of: Any) -> Any:
        return {"list": [of(1)], "dict": {"a": of(1)}, "model": Pocket(of(1))}[place]

    handle.__annotations__["return"] = returns
    guarded = face.once(key="{k}", scope="s")(handle)
    # Given results of the annotated class, and of another one with its name
    await guarded("fine", one)
    await guarded("other", other)
    # Then only the first one reaches a duplicate
    assert await guarded("fine", one) == handle("fine", one)
    with pytest.raises(ResultUnavailable, match="would come back as another class"):
        await guarded("other", other)
    assert face.gate.counters["once.result_not_stored"] == 1


async def test_a_parameter_that_cannot_be_evaluated_does_not_hide_what_is_returned(face: Any) -> None:
    # Given a parameter whose class is imported under TYPE_CHECKING only
    def handle(k: str, session: Nowhere | None = None) -> Order | Derived:  # type: ignore[name-defined]  # noqa: F821
        return Derived(k)

    guarded = face.once(key="{k}", scope="s")(handle)
    # Then a duplicate gets an object of the same class
    assert [await guarded("x"), await guarded("x")] == [Derived("x")] * 2
    # Unless it is the class of the result that cannot be evaluated
    handle.__annotations__["return"] = "Nowhere"
    unknown = face.once(key="{k}", scope="unknown")(handle)
    assert [await unknown("x"), await unknown("x")] == [Derived("x"), {"id": "x"}]


async def test_a_model_in_a_list_without_an_annotation_is_logged(face: Any, caplog: pytest.LogCaptureFixture) -> None:
    for scope, result in (("l", [Order("1")]), ("plain", [[0] * 10, {0: "a"}])):
        await face.once(key="{k}", scope=scope)(lambda k, result=result: result)("x")
    (found,) = (record.message for record in caplog.records if "model_not_annotated" in record.message)
    assert "scope='l'" in found


async def test_a_duplicate_of_a_model_that_the_annotation_does_not_lead_to_has_no_result(face: Any) -> None:
    def handle(k: str) -> Any:
        return Paid(k)

    for returns, why in ((Order, "holds a .*Paid, and the annotation leads to Order"), (dict[str, Order], "holds a")):
        handle.__annotations__["return"] = returns
        guarded = face.once(key="{k}", scope=str(returns)[-9:].strip("[]'>"))(handle)
        assert await guarded("x") == Paid("x")
        with pytest.raises(ResultUnavailable, match=why):
            await guarded("x")
    # And a dict that stands for a model is none
    handle.__annotations__["return"] = Order
    plain = face.once(key="{k}", scope="d")(lambda k: {"id": k})
    await plain("x")
    with pytest.raises(ResultUnavailable, match="it is a dict, and the annotation names Order"):
        await face.once(key="{k}", scope="d")(handle)("x")
    assert (await face.claim("x", scope="d")).result == {"id": "x"}


class Masked(Order):
    """A model that shows the same id for all, and holds more than its fields."""

    def __init__(self, id: str, more: int) -> None:
        super().__init__(id)
        self.more = more

    def __getattribute__(self, name: str) -> Any:
        return "masked" if name == "id" else super().__getattribute__(name)


async def test_calls_with_models_that_differ_in_what_no_field_shows_are_different_calls(face: Any) -> None:
    def handle(event: Any) -> None: ...

    all_arguments = face.once(scope="all")(handle)
    checked = face.once(key=lambda event: "k", scope="checked", fingerprint=["event"])(handle)
    called = face.once(key=lambda event: "k", scope="called", fingerprint=lambda event: event)(handle)
    calls = [Masked("1", 1), Masked("2", 1), Masked("1", 2)]
    for event in calls:
        await all_arguments(event)
    assert face.gate.counters["once.started"] == 3
    claim = await face.claim("k", scope="claim", fingerprint=calls[0])
    await claim.complete()
    for guarded in (checked, called):
        await guarded(calls[0])
        for event in calls[1:]:
            with pytest.raises(KeyReused):
                await guarded(event)
    for event in calls[1:]:
        with pytest.raises(KeyReused):
            await face.claim("k", scope="claim", fingerprint=event)


async def test_a_model_of_a_class_in_a_function_needs_a_key(face: Any) -> None:
    @dataclass
    class Local:
        id: str

    def handle(event: Any) -> None: ...

    with pytest.raises(InvalidArgument, match=r"arguments\['event'\].*a name that another class may have.*key="):
        await face.once(scope="s")(handle)(Local("1"))
    with pytest.raises(InvalidArgument, match=r"fingerprint.*Define the class at the top of its module"):
        await face.once(key="{event.id}", fingerprint=["event"], scope="s")(handle)(Local("1"))
    assert face.gate.counters["once.started"] == 0
    await face.once(key="{event.id}", scope="s")(handle)(Local("1"))


async def test_models_of_one_generic_model_are_different_calls(face: Any) -> None:
    # Given two empty pages of classes with one short name
    mine, other = Sheet[Line](), Sheet[decoders.Line]()
    ran = list[Any]()
    every = face.once(scope="all")(lambda page: ran.append(type(page)))
    checked = face.once(key=lambda page: "k", scope="checked", fingerprint=["page"])(lambda page: None)
    # Then they are two calls, two fingerprints, and two items of a union
    for page in (mine, other, mine):
        await every(page)
    assert ran == [type(mine), type(other)]
    await checked(mine)
    with pytest.raises(KeyReused):
        await checked(other)
    with pytest.raises(KeyReused):
        await face.claim("k", scope="checked", fingerprint=other)
    topic = face.topic("t", merge="union")
    await topic.trigger_many([("k", [mine]), ("k", [other]), ("k", [mine])])
    [delivery] = await topic.take(1)
    assert len(delivery.payload) == 2
    await topic.ack(delivery)


async def test_calls_with_different_models_are_different_calls(face: Any) -> None:
    ran: list[Any] = []

    def handle(event: Any) -> None:
        ran.append(event)

    all_arguments = face.once(scope="all")(handle)
    checked = face.once(key="{event.id}", scope="checked", fingerprint=["event"])(handle)
    calls = [Order("1"), Paid("1"), Secret(id="1", card="1"), Secret(id="1", card="2"), Receipt(id="1")]
    for event in [*calls, *calls]:
        await all_arguments(event)
    assert ran == calls
    await checked(calls[0])
    await checked(calls[2])
    for event in (calls[1], calls[3], calls[4]):
        with pytest.raises(KeyReused):
            await checked(event)
    with pytest.raises(KeyReused):
        await face.claim("1", scope="checked", fingerprint=calls[1])
