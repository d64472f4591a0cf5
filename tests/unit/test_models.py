"""Stored models come back exactly where an annotation leads to their class; plain values become what it names."""

from __future__ import annotations

import copy
import inspect
import sys
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, asdict, dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import (
    Annotated,
    Any,
    Final,
    Generic,
    Literal,
    NewType,
    NotRequired,
    Optional,
    Self,
    TypeVar,
    Union,
    Unpack,
)

import freezegun
import pydantic
import pytest
import typing_extensions
from hypothesis import given
from hypothesis import strategies as st

from idemgate.core.codec import Codec, digest
from idemgate.core.codec.models import rebuild
from idemgate.core.codec.restoring import restore
from idemgate.core.codec.state import StoredModel
from idemgate.errors import DecodeError, InvalidArgument
from tests.for_each import for_each
from tests.security import decoders

CODEC = Codec()
T = TypeVar("T")


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Line:
    sku: str
    price: Decimal
    colour: Colour | None = None


@dataclass(frozen=True, slots=True)
class Order:
    id: int
    at: datetime
    lines: list[Line]
    by_name: dict[str, Line] = field(default_factory=dict)
    pair: tuple[Line, str] | None = None
    next: Order | None = None
    total: int = field(default=0, init=False)


@dataclass
class Refund:
    order: int
    reason: str


@dataclass
class Box(Generic[T]):
    inside: T


@dataclass
class Late:
    line: Nowhere  # noqa: F821 - what a TYPE_CHECKING import looks like when it runs


@dataclass
class Picky:
    n: int
    scale: InitVar[int] = 1

    def __post_init__(self, scale: int) -> None:
        if self.n < 0:
            raise ValueError("n is negative")


class Model(pydantic.BaseModel):
    id: int


class NamedModel(pydantic.BaseModel):
    name: int


ORDER = Order(
    1,
    datetime(2024, 1, 1, tzinfo=UTC),
    [Line("a", Decimal("1.50"), Colour.RED), Line("b", Decimal(2))],
    {"x": Line("c", Decimal(3))},
    (Line("d", Decimal(4)), "gift"),
    Order(2, datetime(2024, 1, 2, tzinfo=UTC), []),
)


def through(value: Any, annotation: object) -> Any:
    """Return the value as a duplicate gets it, which is also what the argument of a merged function gets."""
    stored = CODEC.decode_stored(CODEC.encode(value))
    assert CODEC.encode(stored) == CODEC.encode(value)
    found = restore(stored, annotation)
    assert rebuild(CODEC.decode_stored(CODEC.encode(value)), annotation) == found
    return found


@for_each(
    ("value", "annotation"),
    [
        (ORDER, Order),
        (ORDER, Optional[Order]),  # noqa: UP045 - people write both
        (ORDER, Refund | Order | None),
        (None, Order | None),
        (Refund(1, "late"), Union[Order, Refund]),  # noqa: UP007
        ([ORDER], list[Order]),
        ([ORDER], Sequence[Order]),
        ((ORDER, 1), tuple[Order, int]),
        ((ORDER, ORDER), tuple[Order, ...]),
        ((1, ORDER, ORDER), tuple[int, *tuple[Order | Refund, ...]]),
        ((Refund(1, "x"), ORDER, 1), tuple[Refund, *tuple[Order, ...], int]),
        ((Refund(1, "x"), 1), tuple[Refund, *tuple[Order, ...], int]),
        ((1, ORDER, Refund(1, "x")), tuple[int, Unpack[tuple[Order, Refund]]]),  # noqa: UP044 - people write both
        ({"a": [ORDER]}, dict[str, list[Order]]),
        ({"a": ORDER}, Mapping[str, Order | int]),
        ({"a": 3}, Mapping[str, Order | int]),
        (ORDER, Annotated[Order, "doc"]),
        (ORDER, Annotated[Order, ["unhashable"]]),
        ([ORDER], list[Annotated[Order, []]]),
        (ORDER, NewType("NewOrder", Order)),
        ("text", Order | str),
        (Model(id=1), Model),
        (Model(id=1), Model | None),
        ([Model(id=1)], list[Model]),
        (NamedModel(name=1), NamedModel),
        (Model(id=1), int | Model),
        (Box(1), Box[int]),
        ([1, {"a": (2,)}], Any),
        ([1, {"a": (2,)}], None),
        ([1, {"a": (2,)}], inspect.Parameter.empty),
        ({"a": {1, 2}}, dict[str, set[int]]),
    ],
)
def test_a_value_comes_back_as_annotated(value: Any, annotation: object) -> None:
    back = through(value, annotation)
    assert back == value
    assert type(back) is type(value)


def test_what_is_a_model_already_or_may_be_anything_stays_what_it_is() -> None:
    line = Line("a", Decimal(1))
    assert rebuild(line, Line) is line
    stored = asdict(line)
    assert rebuild(stored, Union[Any, Line]) is stored  # noqa: UP007
    assert rebuild(stored, Union[Line, Any]) == line  # noqa: UP007


def test_enums_come_back_by_value() -> None:
    assert rebuild(["red", None], list[Colour | None]) == [Colour.RED, None]
    assert rebuild("red", Colour | str) is Colour.RED
    assert rebuild("red", str | Colour) == "red"
    assert rebuild({"red": 1}, dict[Colour, int]) == {Colour.RED: 1}
    with pytest.raises(DecodeError, match="Colour"):
        rebuild("green", Colour)


def test_fields_that_init_does_not_take_come_back_too() -> None:
    order = Order(1, ORDER.at, [])
    object.__setattr__(order, "total", 7)
    assert through(order, Order).total == 7


def test_two_versions_of_a_model_can_share_a_topic() -> None:
    # Given what a newer version stored: a field more, and one with a default less
    stored = {"sku": "a", "price": Decimal(1), "colour": "red", "weight": 3}
    assert rebuild(stored, Line) == Line("a", Decimal(1), Colour.RED)
    assert rebuild({"sku": "a", "price": Decimal(1)}, Line | None) == Line("a", Decimal(1))


@for_each(
    ("value", "annotation", "says"),
    [
        ({"sku": "a"}, Line, "price"),
        ({"sku": "a"}, Line | None, "price"),
        ([{"sku": "a"}], list[Line], "price"),
        ({"n": -1}, Picky, "n is negative"),
        ({}, Model, "Field required"),
        ({"x": 1}, Model | None, "Field required"),
        ({"line": {}}, Late, "Nowhere"),
    ],
)
def test_what_the_model_refuses_is_not_decodable(value: Any, annotation: object, says: str) -> None:
    with pytest.raises(DecodeError, match=says):
        rebuild(value, annotation)


@for_each("annotation", [Order, list[Order], dict[str, Order], tuple[Order, int], "Order", Box[Order]])
def test_a_value_of_another_shape_stays_as_it_is(annotation: object) -> None:
    assert rebuild(7, annotation) == 7
    assert rebuild("text", annotation) == "text"


def test_data_cannot_choose_a_class() -> None:
    hostile = {"__class__": "os.system", "py/object": "subprocess.Popen", "args": ["true"]}
    assert rebuild(hostile, Any) is hostile
    assert rebuild({**hostile, "order": 1, "reason": "x"}, Refund) == Refund(1, "x")


def test_plain_annotations_are_not_walked() -> None:
    value = {"a": [1, 2]}
    assert rebuild(value, dict[str, list[int]]) is value


def test_type_aliases_are_looked_through() -> None:
    class TypeAliasType(types.SimpleNamespace):  # as Python 3.12 has it
        pass

    assert rebuild({"order": 1, "reason": "x"}, TypeAliasType(__value__=Refund)) == Refund(1, "x")


LINES = st.builds(
    Line,
    st.text(st.characters(exclude_categories=("Cs",))),
    st.decimals(allow_nan=False),
    st.sampled_from([*Colour, None]),
)
ORDERS = st.builds(
    Order, st.integers(), st.datetimes(timezones=st.just(UTC)), st.lists(LINES, max_size=3),
    st.dictionaries(st.just("k"), LINES),
    st.none() | st.tuples(LINES, st.just("x")), st.just(ORDER) | st.none(),
)  # fmt: skip


@given(ORDERS)
def test_any_order_survives(order: Order) -> None:
    assert through(order, Order) == order
    assert CODEC.decode(CODEC.encode(order)) == CODEC.decode(CODEC.encode(plain(asdict(order))))


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(plain(item) for item in value)
    return value.value if isinstance(value, Enum) else value


def test_real_pydantic_models() -> None:
    class Part(pydantic.BaseModel):
        colour: Colour
        price: Decimal
        at: datetime

    class Whole(pydantic.BaseModel):
        model_config = pydantic.ConfigDict(alias_generator=lambda name: name.title(), populate_by_name=True)
        parts: tuple[Part, ...]
        tags: set[str] = set()
        size: int = pydantic.Field(1, alias="howBig")

    # Given nested models with aliases, When they are stored and rebuilt, Then they are the same
    whole = Whole(parts=(Part(colour=Colour.RED, price=Decimal("1.5"), at=ORDER.at),), tags={"a"}, size=3)
    assert through(whole, Whole) == whole
    assert through([whole], list[Whole | Refund]) == [whole]
    assert CODEC.decode(CODEC.encode(whole))["parts"][0]["colour"] == "red"
    with pytest.raises(DecodeError, match="Whole"):
        rebuild({"parts": 3}, Whole)


def test_each_member_of_a_tuple_is_made_by_its_own_annotation() -> None:
    kind = tuple[str, Colour, Line]
    stored = ("red", "red", {"sku": "a", "price": Decimal(1)})
    assert rebuild(stored, kind) == ("red", Colour.RED, Line("a", Decimal(1)))
    # One of another length is none of them
    assert rebuild(stored[1:], kind) == stored[1:]
    # An unpacked tuple stands for as many as there are
    assert rebuild(("red", "red", "red", "red"), tuple[str, *tuple[Colour, ...], str]) == (
        "red", Colour.RED, Colour.RED, "red",
    )  # fmt: skip


def test_of_several_models_the_first_is_made_that_takes_the_value() -> None:
    assert rebuild({"id": 1}, Model | NamedModel) == Model(id=1)
    assert rebuild({"name": 1}, Model | NamedModel) == NamedModel(name=1)


# -- classes whose code changes what it gets ------------------------------------------------------------


class Price(pydantic.BaseModel):
    cents: int

    @pydantic.field_validator("cents", mode="before")
    @classmethod
    def from_euros(cls, euros: float) -> int:
        return round(float(euros) * 100)


@dataclass
class Number:
    number: str


class Card(pydantic.BaseModel):
    number: str
    token: str = pydantic.Field(exclude=True)
    colour: Colour = Colour.RED

    @pydantic.field_serializer("number")
    def mask(self, number: str) -> str:
        return "****" + number[-4:]


class Gold(Card):
    limit: int


class Swapped(pydantic.BaseModel):
    id: int = pydantic.Field(alias="uid")
    uid: int = pydantic.Field(alias="id")


class Open(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    id: int
    note: str = ""
    _seen: int = pydantic.PrivateAttr(0)

    def model_post_init(self, _context: object) -> None:
        self._seen += 1


class Lines(pydantic.RootModel[list[Line]]):
    pass


class Wrapped(pydantic.BaseModel, Generic[T]):
    inside: T


class Listed(pydantic.BaseModel, Generic[T]):
    items: list[T] = []


class Chain(pydantic.BaseModel, Generic[T]):
    inside: T
    next: Chain[T] | None = None


@dataclass
class Amount:
    cents: int
    more: InitVar[Any] = None

    def __post_init__(self, more: object) -> None:
        self.cents *= 100
        self.shown = more or f"{self.cents} ct"


@dataclass(slots=True)
class Other:
    order: int
    reason: str


class Kind(Enum):
    ONE = 1


@dataclass
class Mixed:
    of: Colour | Kind | int
    flags: set[Colour]


class Cash(pydantic.BaseModel):
    kind: Literal[Colour.RED] = Colour.RED


@dataclass
class Page(Generic[T]):
    items: list[T]
    best: Optional[T] = None  # noqa: UP045 - people write both
    by_name: dict[str, Annotated[T, "doc"]] = field(default_factory=dict)


@dataclass
class LinePage(Page[Line]):
    page: Final[Optional[Page[Line]]] = None  # noqa: UP045


@dataclass
class Sorted(Page[T]):
    of: tuple[T, ...] = ()


@dataclass
class Twice(Page[list[T]], Generic[T]):
    one: T | None = None


@dataclass
class Node:
    kids: list[Self]


class Leaf(pydantic.BaseModel):
    kid: Self | None = None


class Row(typing_extensions.TypedDict):
    line: Line
    next: NotRequired[Row | None]


class Rows(pydantic.BaseModel):
    rows: list[Row]


class Size(IntEnum):
    SMALL = 1


class Word(StrEnum):
    HI = "hi"


@dataclass
class Plainly:
    size: int
    words: dict[str, int]
    either: int | str | None = None


class Private(pydantic.BaseModel):
    _line: Line = pydantic.PrivateAttr(default_factory=lambda: Line("a", Decimal(1)))
    _colour: Colour | None = None
    _list: list[Line] = pydantic.PrivateAttr(default_factory=list)


class Heir(Refund):
    line: Line

    def __init__(self) -> None:
        super().__init__(1, "x")
        self.line = Line("x", Decimal(7))


class TypedExtra(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Line]


def private() -> Private:
    made = Private()
    made._line, made._colour, made._list = Line("b", Decimal(2)), Colour.BLUE, [Line("c", Decimal(3))]
    return made


LINE = Line("a", Decimal(1))
GOLD = Gold(number="4242", token="t", limit=1)
EXACT: list[tuple[Any, Any]] = [
    (Price(cents=5), Price), ([Price(cents=5)], list[Price]), (Amount(5), Amount),
    (Card(number="4242", token="t"), Card), (GOLD, Card), ({"a": GOLD}, dict[str, Card | int]),
    (Swapped(uid=1, id=2), Swapped), (Open(id=1, more="x"), Open), (Lines([LINE]), Lines),
    (Wrapped[Line](inside=LINE), Wrapped[Line]), (Box(LINE), Box[Line]), (Other(1, "x"), Refund | Other),
    (Refund(1, "x"), Refund | Other), (Mixed(Kind.ONE, {Colour.RED}), Mixed), (Mixed(1, set()), Mixed),
    (Cash(), Cash), ([Cash()], list[Refund | Cash]), (Page([LINE], LINE, {"a": LINE}), Page[Line]),
    (LinePage([LINE], page=Page([LINE])), LinePage), (LinePage([LINE]), Page[Line]),
    (Sorted([LINE], of=(LINE,)), Sorted[Line]), (Sorted([LINE], of=(LINE,)), Page[Line]),
    (Twice([[LINE]], one=LINE), Twice[Line]), (Page([Page([LINE])]), Page[Page[Line]]), (Node([Node([])]), Node),
    (Chain[Line](inside=LINE, next=Chain[Line](inside=LINE)), Chain[Line]),
    (Leaf(kid=Leaf()), Leaf), ({"line": LINE, "next": {"line": LINE, "next": None}}, Row), ({"line": LINE}, Row | None),
    (Rows.model_construct(rows=[{"line": LINE}]), Rows), (Plainly(Size.SMALL, {Word.HI: 1}, Word.HI), Plainly),
    (Heir(), Heir), (Heir(), Refund), (TypedExtra(a=LINE), TypedExtra), (Wrapped(inside=LINE), Wrapped[Line]),
]  # fmt: skip


@for_each(("value", "annotation"), EXACT)
def test_a_model_is_restored_without_its_code(value: Any, annotation: Any) -> None:
    back = through(value, annotation)
    assert (back, type(back)) == (value, type(value))
    assert getattr(back, "__dict__", None) == getattr(value, "__dict__", None)
    assert getattr(back, "model_fields_set", None) == getattr(value, "model_fields_set", None)


@for_each(
    ("one", "other"),
    [
        (Refund(1, "x"), Other(1, "x")),
        (Card(number="1111 4242", token="t"), Card(number="9999 4242", token="t")),
        (Card(number="1", token="t"), Card(number="1", token="u")),
        (Card(number="1", token="t", colour="red"), Gold(number="1", token="t", limit=1)),
        (Open(id=1, more=1), Open(id=1, more=2)),
        (Mixed(Kind.ONE, set()), Mixed(1, set())),
        (Lines([]), []),
        (Refund(1, "x"), asdict(Refund(1, "x"))),
    ],
)
def test_two_different_models_have_two_digests(one: Any, other: Any) -> None:
    for around in (lambda value: value, lambda value: {"a": [value]}, Box):
        assert digest(around(one)) != digest(around(other))
        assert digest(around(copy.deepcopy(one))) == digest(around(one))


class MaskedByDict(Number):
    @property
    def number(self) -> str:  # type: ignore[override]
        return "****"

    @number.setter
    def number(self, number: str) -> None:
        self.__dict__["number"] = number + "!"


class MaskedByBacking(Number):
    @property
    def number(self) -> str:  # type: ignore[override]
        return "****"

    @number.setter
    def number(self, number: str) -> None:
        self._number = number + "!"


@dataclass(slots=True)
class SlottedNumber:
    number: str


class MaskedSlot(SlottedNumber):
    __slots__ = ("_more",)

    @property
    def number(self) -> str:  # type: ignore[override]
        return "****"

    @number.setter
    def number(self, number: str) -> None:
        SlottedNumber.number.__set__(self, number + "!")  # type: ignore[attr-defined]
        self._more = len(number)


class MaskedReads(Number):
    def __getattribute__(self, name: str) -> Any:
        return "****" if name == "number" else super().__getattribute__(name)


class MaskedModel(pydantic.BaseModel):
    number: str

    def __getattribute__(self, name: str) -> Any:
        return "****" if name == "number" else super().__getattribute__(name)


@dataclass
class Tenfold:
    n: int

    class Descriptor:
        def __get__(self, instance: Any, owner: Any) -> Any:
            return self if instance is None else instance._n

        def __set__(self, instance: Any, n: int) -> None:
            instance._n = n * 10


Tenfold.n = Tenfold.Descriptor()  # type: ignore[assignment]


class WithMore(Number):
    def __init__(self, number: str, more: int) -> None:
        super().__init__(number)
        self.more = more


@pydantic.dataclasses.dataclass(config=pydantic.ConfigDict(extra="allow"))
class OpenNumber:
    number: str


@dataclass
class Salted:
    n: int
    salt: InitVar[int] = 0

    def __post_init__(self, salt: int) -> None:
        self._salt = self.salt = salt  # type: ignore[misc]


def seen(times: int) -> Open:
    made = Open(id=1)
    made._seen = times
    return made


STATES: list[tuple[Any, Any]] = [
    (MaskedByDict("1"), MaskedByDict("2")), (MaskedByBacking("1"), MaskedByBacking("2")),
    (MaskedSlot("1"), MaskedSlot("2")), (MaskedReads("1"), MaskedReads("2")),
    (MaskedModel(number="1"), MaskedModel(number="2")), (Tenfold(1), Tenfold(2)), (WithMore("1", 1), WithMore("1", 2)),
    (OpenNumber("1", more=1), OpenNumber("1", more=2)), (Salted(1, 1), Salted(1, 2)), (seen(1), seen(2)),
]  # fmt: skip


@for_each(("one", "other"), STATES, ids=lambda value: type(value).__name__)
def test_state_that_a_field_does_not_show_tells_models_apart_and_is_restored(one: Any, other: Any) -> None:
    assert digest(one) != digest(other)
    for value in (one, other):
        back = through([value], list[type(value)])[0]  # type: ignore[misc]
        assert digest(back) == digest(value)
        assert type(back) is type(value)


def test_which_fields_were_set_does_not_tell_equal_models_apart() -> None:
    assert Open(id=1) == Open(id=1, note="")
    assert digest(Open(id=1)) == digest(Open(id=1, note=""))


def test_the_dict_of_a_model_has_its_real_values_and_its_extras() -> None:
    assert CODEC.decode(CODEC.encode(MaskedByDict("1"))) == {"number": "1!"}
    assert CODEC.decode(CODEC.encode(OpenNumber("1", more=1))) == {"number": "1", "more": 1}


def test_a_property_whose_value_the_instance_does_not_hold_is_refused() -> None:
    elsewhere: dict[int, int] = {}

    class Elsewhere:
        def __get__(self, instance: Any, owner: Any) -> Any:
            return elsewhere.get(id(instance))

        def __set__(self, instance: Any, n: int) -> None:
            elsewhere[id(instance)] = n

    @dataclass
    class Outside:
        n: int

    Outside.n = Elsewhere()  # type: ignore[assignment]
    value = Outside(1)
    with pytest.raises(DecodeError, match=r"'n' of .*Outside is a property, and its value is not in the instance"):
        restore(CODEC.decode_stored(CODEC.encode(value)), Outside)


def of_function(kind: str) -> Any:
    if kind == "dataclass":

        @dataclass
        class Local:
            n: int
    elif kind == "enum":

        class Local(Enum):  # type: ignore[no-redef]
            ONE = 1

        return Box(Local(1))
    else:

        class Local(pydantic.BaseModel):  # type: ignore[no-redef]
            n: int

    return Local(n=1)


@pytest.mark.parametrize(
    "value",
    [*map(of_function, ("dataclass", "model", "enum")), pydantic.create_model("Line", n=(int, 1))()],
    ids=lambda value: type(value).__qualname__,
)
def test_a_class_whose_name_others_may_have_identifies_nothing(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"a name that another class may have.*Define the class at the top"):
        digest({"a": [value]}, name="fingerprint")
    digest([Wrapped[int](inside=1), Box(Kind.ONE), Size.SMALL.value, Meta.Inner(1)])


@pytest.mark.parametrize("make", [lambda of: of, lambda of: list[of], lambda of: of | None, lambda of: Wrapped[of]])
def test_a_generic_model_is_identified_by_the_modules_of_its_arguments(make: Callable[[Any], Any]) -> None:
    # Given one model of two classes with one short name, which shows none of them in its values
    mine, other = Listed[make(Line)](), Listed[make(decoders.Line)]()
    assert type(mine).__qualname__ == type(other).__qualname__
    # Then they are two values, and each comes back as its class
    assert digest(mine) != digest(other)
    assert digest(mine) == digest(Listed[make(Line)]())
    for value in (mine, other):
        assert type(restore(CODEC.decode_stored(CODEC.encode(value)), type(value))) is type(value)
    # And a class of a function as its argument identifies nothing
    local = Listed[make(type(of_function("model")))]()
    with pytest.raises(InvalidArgument, match="a name that another class may have"):
        digest(local, name="fingerprint")


def test_a_generic_model_is_identified_by_values_and_metadata_in_its_arguments() -> None:
    kinds: list[Any] = [
        Any, None, int, int | None, Literal["a"], Literal["b"], Annotated[int, 1], pydantic.PositiveInt, datetime,
    ]  # fmt: skip
    models = [Listed[kind] for kind in kinds]
    digests = [digest(model()) for model in models]
    assert len(set(digests)) == len(kinds)
    every = Union[tuple(models)]  # noqa: UP007 - of a tuple
    for model in models:  # also where all of them may come
        assert type(restore(CODEC.decode_stored(CODEC.encode(model())), every)) is model
        assert type(restore(CODEC.decode_stored(CODEC.encode(model())), Listed)) is model
    spellings: list[Any] = [Line | None, Optional[Line]]  # noqa: UP045 - people write both
    assert len({digest(Listed[kind]()) for kind in spellings}) == 1
    with freezegun.freeze_time("2026-01-01"):
        assert digest(models[-1]()) == digests[-1]


class Meta:
    @dataclass
    class Inner:
        n: int


class DequeLine(Line, deque[int]):
    """A dataclass with state that is no attribute."""


def test_a_model_with_a_base_of_c_is_refused() -> None:
    for use in (digest, CODEC.encode):
        with pytest.raises(InvalidArgument, match="is a DequeLine, which would come back as something else"):
            use(DequeLine("a", Decimal(1)))


@for_each(
    ("value", "annotation", "says"),
    [
        (Refund(1, "x"), Other, "holds a .*:Refund, and the annotation leads to Other"),
        (Box(Line("a", Decimal(1))), Box[Any], "holds a .*:Line"),
        (Box(Line("a", Decimal(1))), Box, "holds a .*:Line, and the annotation leads to no class"),
        (Box(Colour.RED), Box[str], "holds a .*:Colour, and the annotation leads to str"),
        (Amount(1, Line("a", Decimal(1))), Amount, "holds a .*:Line, and the annotation leads to no class"),
        (asdict(Refund(1, "x")), Refund | None, "it is a dict, and the annotation names Refund"),
        ([{"number": "1"}], list[Card], "it is a dict"),
    ],
)
def test_what_an_annotation_does_not_lead_to_is_an_error(value: Any, annotation: Any, says: str) -> None:
    with pytest.raises(DecodeError, match=says):
        restore(CODEC.decode_stored(CODEC.encode(value)), annotation)


def test_a_stored_name_loads_nothing_and_chooses_no_other_class() -> None:
    for name in ("os:system", "subprocess:Popen", "antigravity:x", f"{__name__}:Line"):
        with pytest.raises(DecodeError, match="leads to Refund"):
            restore(StoredModel(name, {"order": 1, "reason": "x"}, {}, []), Refund)
    assert "antigravity" not in sys.modules


def test_a_stored_model_of_another_version_has_defaults_and_no_unknown_fields() -> None:
    name = f"{__name__}:Line"
    assert restore(StoredModel(name, {"sku": "a", "price": 1, "weight": 3}, {}, []), Line) == Line("a", Decimal(1))
    with pytest.raises(DecodeError, match="does not fit Line: a stored model lacks its field 'price'"):
        restore(StoredModel(name, {"sku": "a"}, {}, []), Line)
    card = restore(StoredModel(f"{__name__}:Card", {"number": "1", "token": "t"}, {}, []), Card)
    assert card == Card(number="1", token="t")


def test_a_private_attribute_is_restored_by_its_annotation() -> None:
    back = through(private(), Private)
    assert (back._line, back._colour, back._list) == (Line("b", Decimal(2)), Colour.BLUE, [Line("c", Decimal(3))])
    assert type(through(Plainly(Size.SMALL, {}), Plainly).size) is Size


def test_a_plain_dict_is_converted_by_a_typed_dict() -> None:
    plain_line = {"sku": "a", "price": Decimal(1)}
    for annotation in (Row, Row | None, list[Row]):
        row: Any = {"line": plain_line, "next": {"line": plain_line}}
        made: Any = {"line": LINE, "next": {"line": LINE}}
        wrap = annotation == list[Row]
        assert rebuild([row] if wrap else row, annotation) == ([made] if wrap else made)
    assert rebuild({"items": [plain_line]}, Page[Line]) == Page([LINE])


def test_a_generic_model_that_this_process_has_not_made_is_restored_as_the_equal_one() -> None:
    name = f"{__name__}:Wrapped[Nobody]"
    back = restore(StoredModel(name, {"inside": 1}, {}, []), Wrapped)
    assert type(back) is Wrapped
    assert back == Wrapped[int](inside=1)
    with pytest.raises(DecodeError, match=r"Wrapped\[Nobody\], and the annotation leads to Refund"):
        restore(StoredModel(name, {"inside": 1}, {}, []), Refund)


@for_each("annotation", [Any, dict, list, None, object, inspect.Parameter.empty, dict[str, Any]])
def test_without_an_annotation_that_leads_to_a_model_it_is_the_dict_of_its_fields(annotation: Any) -> None:
    for value in (GOLD, [GOLD, 1], {"a": (Mixed(Kind.ONE, {Colour.RED}),)}, private()):
        assert rebuild(CODEC.decode_stored(CODEC.encode(value)), annotation) == CODEC.decode(CODEC.encode(value))


def test_a_private_attribute_that_cannot_be_stored_is_refused() -> None:
    model = Open(id=1)
    model._seen = object()  # type: ignore[assignment]
    with pytest.raises(InvalidArgument, match=r"payload\['_seen'\]|payload.*_seen"):
        CODEC.encode(model)
