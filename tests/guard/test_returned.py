"""What a guarded function returns: an annotation that cannot be stored is refused, and a lost model is logged."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, time
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NewType, Protocol, TypedDict, TypeVar
from uuid import UUID

import pytest

from idemgate import Gate, InvalidArgument
from idemgate.core.codec.storable import find_unstorable

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


@pytest.mark.parametrize("annotation", GOOD, ids=str)
def test_an_annotation_that_may_be_stored_passes(annotation: Any) -> None:
    assert find_unstorable(annotation) is None


@pytest.mark.parametrize("annotation", BAD, ids=str)
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
