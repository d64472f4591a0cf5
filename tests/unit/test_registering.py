"""Functions are checked when they register, so that no message meets a handler that cannot take it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import celery
import dramatiq
import pydantic
import pytest
import redis
import rq.decorators
from dramatiq.brokers.stub import StubBroker
from typing_extensions import TypedDict

from idemgate import Delivery, Gate, InvalidArgument
from tests.for_each import for_each


@pytest.fixture
def gate() -> Iterator[Gate]:
    """A gate that never connects."""
    with Gate("redis://localhost:1/0", namespace="unit") as made:
        yield made


def none() -> None: ...
def two(delivery: Any, more: Any) -> None: ...
def keyword(*, delivery: Any) -> None: ...
def method(self: Any, delivery: Any) -> None: ...
async def none_awaiting() -> None: ...


class WithoutArgument:
    def __call__(self) -> None: ...


class Handlers:
    def handle(self, delivery: Any) -> None: ...
    def handle_none(self) -> None: ...


UNFIT = [5, "name", none, two, keyword, method, none_awaiting, WithoutArgument(), Handlers().handle_none]
FIT = [
    lambda delivery: None, lambda *args: None, Handlers().handle, functools.partial(two, more=1), print,
    lambda delivery, more=1: None,
]  # fmt: skip


def registrations(gate: Gate) -> list[Any]:
    """Return every way to register a function of one argument."""
    return [
        gate.topic("t").handler,
        gate.stream("s", group="g"),
        gate.consume_list("l"),
        gate.subscribe("c"),
        gate.on_expired("e", "e:*").handler,
    ]


@pytest.mark.parametrize("func", UNFIT, ids=range(len(UNFIT)))
def test_a_function_that_takes_no_single_argument_is_refused(gate: Gate, func: Any) -> None:
    for register in registrations(gate):
        with pytest.raises(InvalidArgument, match=r"not callable|cannot be called with \("):
            register(func)
    # And the topic has no handler
    gate.topic("t").handler(lambda delivery: None)


@pytest.mark.parametrize("func", FIT, ids=range(len(FIT)))
def test_a_function_that_takes_one_argument_is_accepted(gate: Gate, func: Any) -> None:
    for register in registrations(gate):
        register(func)


@pytest.mark.parametrize("method", ["subscribe", "consume_list", "stream", "on_expired"])
def test_a_decorator_without_its_parentheses_is_refused_at_decoration(gate: Gate, method: str) -> None:
    with pytest.raises((TypeError, InvalidArgument)):
        getattr(gate, method)(lambda message: None)


def test_a_guarded_function_is_checked_by_its_own_parameters(gate: Gate) -> None:
    with pytest.raises(InvalidArgument, match="cannot be called with"):
        gate.topic("t").handler(gate.once(key="{a}:{b}", scope="s")(lambda a, b: None))
    gate.topic("t").handler(gate.once(key="{delivery.id}", scope="s")(lambda delivery: None))


# -- fields of templates ----------------------------------------------------------------------------------------------


class Address(TypedDict):
    street: str


class Event(TypedDict):
    id: str
    address: Address


@dataclasses.dataclass
class Order:
    id: str
    event: Event

    @property
    def number(self) -> str:
        return self.id


class Payment(pydantic.BaseModel):
    id: str
    order: Order


class Open(pydantic.BaseModel, extra="allow"):
    id: str


class Point(NamedTuple):
    x: int


class Plain:
    def __init__(self) -> None:
        self.id = 1


WRONG = [
    (Event, "{it[idd]}", "Event has no member [idd]"),
    (Event, "{it.id}", "Event has no attribute .id"),
    (Event, "{it[address][streets]}", "Address has no member [streets]"),
    (Order, "{it.idd}", "Order has no attribute .idd"),
    (Order, "{it.event[idd]}", "Event has no member [idd]"),
    (Payment, "{it.order.idd}", "Order has no attribute .idd"),
    (Point, "{it.y}", "Point has no attribute .y"),
    (Delivery[Any], "{it.idd}", "Delivery has no attribute .idd"),
    (str, "{it.id}", "str has no attribute .id"),
]
RIGHT = [
    (Event, "{it[id]}"), (Event, "{it[address][street]}"), (Order, "{it.id}"), (Order, "{it.number}"),
    (Order, "{it.event[address][street]}"), (Payment, "{it.order.id}"), (Point, "{it.x}"), (Point, "{it[0]}"),
    (Delivery[Any], "{it.id}"), (Delivery[Any], "{it.payload[id]}"), (Open, "{it.other}"), (Plain, "{it.id}"),
    (Any, "{it.id}"), (object, "{it.id}"), (Mapping[str, Any], "{it.id}"), (dict[str, str], "{it[id]}"),
    (Order | None, "{it.idd}"), ("Missing", "{it.id}"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "key", "problem"), WRONG)
def test_a_field_that_the_annotation_does_not_have_is_refused(gate: Gate, kind: Any, key: str, problem: str) -> None:
    def func(it: Any) -> None: ...

    func.__annotations__ = {"it": kind}
    with pytest.raises(InvalidArgument) as caught:
        gate.once(key=key)(func)
    assert problem in str(caught.value)
    # And so is a field of the fingerprint
    with pytest.raises(InvalidArgument) as caught:
        gate.once(key="{it}", fingerprint=[key.strip("{}")])(func)
    assert problem in str(caught.value)


@for_each(("kind", "key"), RIGHT)
def test_a_field_that_the_annotation_may_have_is_accepted(gate: Gate, kind: Any, key: str) -> None:
    def func(it: Any) -> None: ...

    func.__annotations__ = {"it": kind}
    gate.once(key=key)(func)


@pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("kind", range(6), ids=["topic", "stream", "list", "subscribe", "on_expired", "callback"])
@pytest.mark.parametrize("between", ["nothing", "wraps", "staticmethod", "guard"])
def test_a_guard_above_a_decorator_that_registers_is_refused(
    gate: Gate, kind: int, is_async: bool, between: str
) -> None:
    register = [*registrations(gate), gate.callback("{message}", scope="callback")][kind]

    def blocking(message: Any) -> None: ...
    async def awaiting(message: Any) -> None: ...

    func: Any = awaiting if is_async else blocking
    below = register(gate.once("{message}", scope="below")(func) if between == "guard" else func)
    if between == "wraps":
        below = functools.wraps(below)(lambda message: below(message))
    elif between == "staticmethod":
        below = staticmethod(below)
    for name, above in (
        ("gate.once", gate.once("{message}", scope="above")),
        ("gate.callback", gate.callback("{message}", scope="above")),
    ):
        with pytest.raises(InvalidArgument, match=rf"without this guard\. Write @{name} below @(gate|topic|expiry)\."):
            above(below)


def test_a_guard_above_a_registered_function_without_parentheses_is_refused(gate: Gate) -> None:
    with pytest.raises(InvalidArgument, match=r"Write @gate\.once below @topic\.handler"):

        @gate.once
        @gate.topic("t").handler
        def handle(delivery: Any) -> None: ...


def queued(queue: str, func: Any) -> Any:
    """Return what the decorator of a task queue makes of a function."""
    if queue.startswith("celery"):
        return celery.Celery("unit").task(lazy=queue == "celery")(func)
    if queue == "dramatiq":
        return dramatiq.actor(func, broker=StubBroker(), actor_name="unit")
    return rq.decorators.job("unit", connection=redis.Redis())(func)


@pytest.mark.parametrize("between", ["nothing", "wraps"])
@pytest.mark.parametrize("queue", ["celery", "celery eager", "dramatiq", "rq"])
def test_a_guard_above_the_decorator_of_a_task_is_refused(gate: Gate, queue: str, between: str) -> None:
    """`charge.delay(order)` and the worker would run the task without the guard."""

    def charge(order: Any) -> None: ...

    task = queued(queue, charge)
    if between == "wraps":
        task = functools.wraps(task)(lambda order: task(order))
    for above in (gate.once(key="{order}", scope="above"), gate.callback("{order}", scope="above")):
        with pytest.raises(InvalidArgument, match=r"without this guard\. Write @gate\.(once|callback) below @"):
            above(task)


@pytest.mark.parametrize("queue", ["celery", "celery eager", "dramatiq", "rq"])
def test_a_guard_below_the_decorator_of_a_task_is_accepted(gate: Gate, queue: str) -> None:
    def charge(order: Any) -> None: ...

    queued(queue, gate.once(key="{order}", scope="below")(charge))


def test_a_guard_of_a_bound_method_that_is_registered_is_refused(gate: Gate) -> None:
    handlers = Handlers()
    gate.topic("t").handler(handlers.handle)
    with pytest.raises(InvalidArgument, match=r"Write @gate\.once below @topic\.handler"):
        gate.once("{delivery}", scope="bound")(handlers.handle)
    gate.once("{delivery}", scope="bound")(Handlers().handle)  # that of another object


def test_a_guard_below_and_a_second_guard_of_the_inner_function_are_accepted(gate: Gate) -> None:
    def handle(message: Any) -> None: ...

    for register in registrations(gate):
        register(gate.once("{message}", scope="below")(handle))
    gate.once("{message}", scope="other")(handle)  # the inner function itself was registered nowhere

    @gate.once("{message}")
    @gate.merge("{message}", name="merged")
    def merged(message: Any) -> None: ...  # drops copies of triggers


def test_methods_of_a_registered_object_can_be_guarded(gate: Gate) -> None:
    handlers = Handlers()
    gate.topic("t").handler(handlers.handle)
    assert gate.once("{delivery}", scope="direct")(Handlers.handle)
