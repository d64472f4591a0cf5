"""`once` on everything that can be called, sync and async; what it decorates stays what it was."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument, KeyReused, current

pytestmark = pytest.mark.one_in(3)


async def result_of(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


ran: list[Any] = []


@pytest.fixture(autouse=True)
def _nothing_ran() -> None:
    ran.clear()


def function(k: str, n: int = 1) -> tuple[str, int]:
    """A docstring."""
    ran.append((k, n))
    return k, n


async def coroutine_function(k: str, n: int = 1) -> tuple[str, int]:
    """A docstring."""
    ran.append((k, n))
    return k, n


class Called:
    def __call__(self, k: str, n: int = 1) -> tuple[str, int]:
        return function(k, n)


class Awaited:
    async def __call__(self, k: str, n: int = 1) -> tuple[str, int]:
        return await coroutine_function(k, n)


class Bound:
    def method(self, k: str, n: int = 1) -> tuple[str, int]:
        return function(k, n)

    async def awaiting(self, k: str, n: int = 1) -> tuple[str, int]:
        return await coroutine_function(k, n)


@pytest.mark.parametrize("key", ["{k}", lambda k, n=1: k], ids=["template", "callable"])
@pytest.mark.parametrize(
    ("work", "awaiting"),
    [
        pytest.param(function, False, id="function"),
        pytest.param(coroutine_function, True, id="coroutine function"),
        pytest.param(lambda k, n=1: function(k, n), False, id="lambda"),
        pytest.param(Called(), False, id="object"),
        pytest.param(Awaited(), True, id="awaiting object"),
        pytest.param(functools.partial(function, n=1), False, id="partial"),
        pytest.param(functools.partial(coroutine_function, n=1), True, id="awaiting partial"),
        pytest.param(functools.partial(functools.partial(function), n=1), False, id="partial of a partial"),
    ],
)
async def test_whatever_can_be_called_can_be_guarded(gate: Gate, work: Any, awaiting: bool, key: Any) -> None:
    guarded = gate.once(key=key, scope="work")(work)
    for _ in range(2):
        answer = guarded("x")
        assert inspect.isawaitable(answer) == awaiting
        assert await result_of(answer) == ("x", 1)
    assert await result_of(guarded(k="x")) == ("x", 1)
    assert ran == [("x", 1)]


@pytest.mark.parametrize("key", ["{k}", lambda self, k, n=1: k], ids=["template", "callable"])
async def test_bound_methods_can_be_guarded(gate: Gate, key: Any) -> None:
    bound = Bound()
    for work in (bound.method, bound.awaiting):
        guarded = gate.once(key=key)(work)
        assert await result_of(guarded("x")) == ("x", 1)
        assert await result_of(guarded(k="x")) == ("x", 1)
    assert ran == [("x", 1), ("x", 1)]


def shop(gate: Gate) -> type[Any]:
    """A class whose methods are guarded in every way there is."""
    once: Callable[..., Any] = functools.partial(gate.once, key="{k}")

    class Shop:
        name = "shop"

        @once()
        def method(self, k: str, n: int = 1) -> tuple[Any, ...]:
            return self.name, *function(k, n)

        @once()
        async def awaiting_method(self, k: str, n: int = 1) -> tuple[Any, ...]:
            return self.name, *function(k, n)

        @classmethod
        @once()
        def class_outside(cls, k: str, n: int = 1) -> tuple[Any, ...]:
            return cls.__name__, *function(k, n)

        @once()
        @classmethod
        def class_inside(cls, k: str, n: int = 1) -> tuple[Any, ...]:
            return cls.__name__, *function(k, n)

        @classmethod
        @once()
        async def awaiting_class_outside(cls, k: str, n: int = 1) -> tuple[Any, ...]:
            return cls.__name__, *function(k, n)

        @once()
        @classmethod
        async def awaiting_class_inside(cls, k: str, n: int = 1) -> tuple[Any, ...]:
            return cls.__name__, *function(k, n)

        @staticmethod
        @once()
        def static_outside(k: str, n: int = 1) -> tuple[Any, ...]:
            return "static", *function(k, n)

        @once()
        @staticmethod
        def static_inside(k: str, n: int = 1) -> tuple[Any, ...]:
            return "static", *function(k, n)

        @staticmethod
        @once()
        async def awaiting_static_outside(k: str, n: int = 1) -> tuple[Any, ...]:
            return "static", *function(k, n)

        @once()
        @staticmethod
        async def awaiting_static_inside(k: str, n: int = 1) -> tuple[Any, ...]:
            return "static", *function(k, n)

    return Shop


METHODS = ["method", "class_outside", "class_inside", "static_outside", "static_inside"]


@pytest.mark.parametrize("of_class", [False, True], ids=["instance", "class"])
@pytest.mark.parametrize("name", METHODS + [f"awaiting_{name}" for name in METHODS])
async def test_methods_of_every_kind_can_be_guarded(gate: Gate, name: str, of_class: bool) -> None:
    made = shop(gate)
    owner = made if of_class else made()
    guarded = getattr(owner, name)
    if of_class and name.endswith("method"):
        guarded = functools.partial(guarded, made())
    who = "shop" if "method" in name else "Shop" if "class" in name else "static"
    assert inspect.iscoroutinefunction(guarded) == name.startswith("awaiting")
    for call in (lambda: guarded("x", 2), lambda: guarded(k="x", n=2), lambda: guarded("x")):
        assert await result_of(call()) == (who, "x", 2)
    assert await result_of(guarded("y", n=3)) == (who, "y", 3)
    assert ran == [("x", 2), ("y", 3)]


async def test_a_key_may_name_the_instance(gate: Gate) -> None:
    class Account:
        def __init__(self, number: int) -> None:
            self.number = number

        @gate.once(key="{self.number}:{k}")
        def pay(self, k: str) -> int:
            ran.append(k)
            return self.number

        @gate.once(key=lambda self, k: f"{self.number}/{k}")
        def by_callable(self, k: str) -> int:
            ran.append(k)
            return self.number

    for name in ("pay", "by_callable"):
        assert [getattr(Account(n), name)("x") for n in (1, 2, 1)] == [1, 2, 1]
    assert len(ran) == 4


async def test_without_a_key_all_arguments_count_and_a_method_is_refused(gate: Gate) -> None:
    class Account:
        @staticmethod
        @gate.once()
        def pay(k: str, *more: int, **others: int) -> int:
            ran.append(k)
            return len(ran)

        @gate.once()
        def late(this, k: str) -> None:  # noqa: N805 - only its first call tells that it is a method
            ran.append(k)

        @gate.once()
        async def late_async(this, k: str) -> None:  # noqa: N805
            ran.append(k)

    assert Account.pay("x") == Account().pay(k="x") == 1
    assert Account.pay("x", 1) == 2
    assert Account.pay("x", a=1) == 3
    for name in ("late", "late_async"):
        for call in (getattr(Account(), name), functools.partial(getattr(Account, name), Account())):
            with pytest.raises(InvalidArgument, match=rf"{name} is a method.* Name what identifies .*\{{self\.id\}}"):
                await result_of(call("x"))
    with pytest.raises(InvalidArgument, match="is a method"):

        class Refused:
            @gate.once
            def pay(self, k: str) -> None: ...

    with pytest.raises(InvalidArgument, match="is a method"):

        class RefusedAsync:
            @gate.once
            async def pay(self, k: str) -> None: ...

    for method in (Plain().pay, Plain().pay_async):
        with pytest.raises(InvalidArgument, match="is a method"):
            gate.once(scope="bound")(method)
    held = ((Plain(), "object"), (Plain.open, "classmethod"), (functools.partial(Plain.pay, None), "partial"))
    for func, kind in held:
        for decorate in (gate.once(scope="held"), gate.merge(name="held")):
            with pytest.raises(InvalidArgument, match=rf"is an? {kind}"):
                decorate(func)
    assert len(ran) == 3


async def test_the_keywords_of_a_partial_count_as_arguments(face: Any) -> None:
    def send(order: str, /, **options: str) -> None:
        ran.append((order, options))

    def refund(order: str, *, channel: str) -> None:
        ran.append((order, {"channel": channel}))

    for work, key in ((send, None), (send, "{order}:{channel}"), (send, "{order}:{options[channel]}"), (refund, None)):
        ran.clear()
        scope = f"{work.__name__}-{len(key or '')}"
        by_sms, by_mail = (
            face.once(key=key, scope=scope)(functools.partial(functools.partial(work, channel="old"), channel=channel))
            for channel in ("sms", "mail")
        )
        # When they are called with the keyword that they hold, and with another one
        for guarded in (by_sms, by_mail):
            await guarded("o1")
        await by_sms("o1", channel="mail")
        await by_sms("o1", channel="sms")
        await by_sms("o1", channel="fax")
        # Then a call is one with its keyword, whoever gave it
        assert ran == [("o1", {"channel": channel}) for channel in ("sms", "mail", "fax")]
    # And also those of a partial that was given the name of its function
    ran.clear()
    for channel in ("sms", "mail", "sms"):
        held = functools.update_wrapper(functools.partial(send, channel=channel), send)
        await face.once(scope="named")(held)("o2")
    assert ran == [("o2", {"channel": channel}) for channel in ("sms", "mail")]
    # And a fingerprint sees it
    checked = [
        face.once(key="{order}", fingerprint=["options"], scope="checked")(functools.partial(send, channel=channel))
        for channel in ("sms", "mail")
    ]
    await checked[0]("o1")
    with pytest.raises(KeyReused):
        await checked[1]("o1")


class Plain:
    def pay(self, k: str) -> None: ...

    async def pay_async(self, k: str) -> None: ...

    @classmethod
    def open(cls, k: str) -> None: ...

    def __call__(self, k: str) -> None: ...


async def test_methods_of_two_classes_are_two_scopes_and_heirs_share_theirs(gate: Gate) -> None:
    class One:
        @gate.once(key="{k}")
        def work(self, k: str) -> str:
            return type(self).__name__

    class Two:
        @gate.once(key="{k}")
        def work(self, k: str) -> str:
            return type(self).__name__

    class Heir(One):
        def work(self, k: str) -> str:
            return super().work(k)

    assert [One().work("x"), Two().work("x"), Heir().work("x")] == ["One", "Two", "One"]


# -- generators -------------------------------------------------------------------------------------------------------


def generator(k: str) -> Iterator[str]:
    yield k


async def async_generator(k: str) -> AsyncIterator[str]:
    yield k


class Yielding:
    def __call__(self, k: str) -> Iterator[str]:
        yield k


@pytest.mark.parametrize(
    "func",
    [
        generator,
        async_generator,
        functools.partial(generator),
        staticmethod(generator),
        classmethod(generator),
        Yielding(),
    ],
    ids=["sync", "async", "partial", "static", "class", "object"],
)
def test_generators_are_refused_at_decoration(gate: Gate, func: Any) -> None:
    with pytest.raises(InvalidArgument, match="generator"):
        gate.once(key="{k}")(func)


@pytest.mark.parametrize("func", [None, 7, "name"])
def test_what_cannot_be_called_is_refused_at_decoration(gate: Gate, func: Any) -> None:
    with pytest.raises(InvalidArgument, match="not callable"):
        gate.once(key="{k}")(func)


# -- what stays true --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("func", [function, coroutine_function])
def test_name_signature_and_kind_stay_true(gate: Gate, func: Any) -> None:
    guarded: Any = gate.once(key="{k}")(func)
    assert (guarded.__name__, guarded.__qualname__, guarded.__doc__) == (
        func.__name__,
        func.__qualname__,
        "A docstring.",
    )
    assert guarded.__module__ == func.__module__
    assert guarded.__annotations__ == func.__annotations__
    assert inspect.signature(guarded) == inspect.signature(func)
    assert inspect.iscoroutinefunction(guarded) == (func is coroutine_function)
    assert asyncio.iscoroutinefunction(guarded) == (func is coroutine_function)
    assert inspect.isfunction(guarded)
    assert guarded.__wrapped__ is func
    assert inspect.unwrap(guarded) is func


def test_the_wrong_arguments_are_the_error_they_always_were(gate: Gate) -> None:
    guarded: Any = gate.once(key="{k}")(function)
    for args, kwargs in (((), {}), (("x", 1, 2), {}), (("x",), {"z": 1}), (("x",), {"k": "x"})):
        with pytest.raises(TypeError):
            guarded(*args, **kwargs)


def test_a_guard_inside_of_a_guard(gate: Gate) -> None:
    @gate.once(key="{k}", scope="outer")
    @gate.once(key="{n}", scope="inner")
    def work(k: str, n: int) -> tuple[str, int]:
        ran.append(current().key)
        return k, n

    assert work("x", 1) == ("x", 1)
    assert work("y", 1) == ("x", 1)
    assert work("x", 2) == ("x", 1)
    assert ran == ["1"]


def test_a_guarded_function_that_calls_itself_with_another_key(gate: Gate) -> None:
    @gate.once(key="{n}")
    def factorial(n: int) -> int:
        ran.append(n)
        return n * factorial(n - 1) if n else 1

    assert factorial(5) == factorial(5) == 120
    assert ran == [5, 4, 3, 2, 1, 0]
