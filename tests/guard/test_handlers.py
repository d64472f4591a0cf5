"""What `gate.guard` refuses as a handler: a function whose body does not run when it is called."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import dataclasses
import functools
import io
import itertools
import sqlite3
import types
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import wrapt

from idemgate import Gate, InvalidArgument
from idemgate.subscribers.callback import Callback
from idemgate.worker.handler import build_run, build_run_async

pytestmark = pytest.mark.one_in(5)

ran: list[str] = []


@pytest.fixture(autouse=True)
def nothing_ran() -> None:
    ran.clear()


async def handle_async(message: str) -> str:
    ran.append(message)
    return message


def handle(message: str) -> str:
    ran.append(message)
    return message


def generate(message: str) -> Iterator[str]:
    ran.append(message)
    yield message


class AsyncHandler:
    async def __call__(self, message: str) -> None:
        ran.append(message)


class Holder:
    async def handle(self, message: str) -> None:
        ran.append(message)


NOT_BLOCKING: list[Any] = [
    handle_async, functools.partial(handle_async), AsyncHandler(), Holder().handle, generate, None, "handle",
]  # fmt: skip


@pytest.mark.parametrize("handler", NOT_BLOCKING)
@pytest.mark.parametrize("many", [False, True])
def test_a_blocking_guard_refuses_a_handler_that_would_not_run(gate: Gate, handler: Any, many: bool) -> None:
    guard = gate.guard("orders")
    # When it is passed a handler whose call runs nothing
    with pytest.raises(InvalidArgument, match=r"handler|function"):
        guard.run_many([("k", "m")], handler) if many else guard.run("k", handler, "m")
    # Then the key is not done, and the right handler runs
    assert gate.inspect("k", scope="orders").state == "absent"
    assert guard.run("k", handle, "m").outcome == "handled"


@pytest.mark.parametrize("many", [False, True])
def test_a_handler_that_returns_its_coroutine_does_not_make_the_key_done(gate: Gate, many: bool) -> None:
    guard = gate.guard("orders")
    # When a lambda hides a coroutine function
    hidden: Callable[[str], Any] = lambda message: handle_async(message)  # noqa: E731
    verdict = guard.run_many([("k", "m")], hidden)[0] if many else guard.run("k", hidden, "m")
    # Then the message is rejected, and its key is free
    assert (verdict.outcome, type(verdict.error), ran) == ("rejected", InvalidArgument, [])
    assert gate.inspect("k", scope="orders").state == "released"


def test_a_guarded_function_that_returns_a_coroutine_does_not_make_the_key_done(gate: Gate) -> None:
    @gate.once(key="{message}", scope="orders")
    def hidden(message: str) -> Any:
        return handle_async(message)

    for _ in range(2):
        with pytest.raises(InvalidArgument, match="returned its coroutine"):
            hidden("k")


async def test_an_async_guard_accepts_every_function_that_returns_an_awaitable(gate: Gate) -> None:
    guard = gate.guard("orders").aio
    accepted: list[Any] = [
        handle_async, lambda message: handle_async(message), AsyncHandler(), functools.partial(handle_async),
    ]  # fmt: skip
    for number, handler in enumerate(accepted):
        assert (await guard.run(f"k{number}", handler, "m")).outcome == "handled"
    assert ran == ["m"] * len(accepted)


@pytest.mark.parametrize("options", [{"wait": "soon"}, {"keep": 5}, {"keep": handle_async}])
def test_an_invalid_option_of_a_run_is_raised_and_is_no_verdict(gate: Gate, options: Any) -> None:
    with pytest.raises(InvalidArgument):
        gate.guard("orders").run("k", handle, "m", **options)
    assert ran == []


@pytest.mark.parametrize("options", [{"wait": "soon"}, {"keep": 5}])
async def test_an_invalid_option_of_an_async_run_is_raised_and_is_no_verdict(gate: Gate, options: Any) -> None:
    with pytest.raises(InvalidArgument):
        await gate.guard("orders").aio.run("k", handle_async, "m", **options)
    assert ran == []


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("policy", [lambda _error: 1 / 0, lambda _error: "again"])
async def test_a_failing_on_error_releases_the_key_and_hides_no_error(face: Any, policy: Any, many: bool) -> None:
    # Given a policy that raises, or that returns an unknown choice
    guard = face.guard("orders", on_error=policy, lease="7s")

    def fail(message: str) -> None:
        raise ValueError(message)

    # When the handler fails
    verdict = (await guard.run_many([("k", "m")], fail))[0] if many else await guard.run("k", fail, "m")
    # Then the verdict has the error of the handler, which names that of the policy, and the key is free
    assert isinstance(verdict.error, ValueError)
    assert "on_error failed" in verdict.error.__notes__[0]
    assert (await face.inspect("k", scope="orders")).state == "released"
    assert verdict.retry_after is None


def _unfinished() -> list[Any]:
    return [
        concurrent.futures.Future(), (each for each in "ab"), map(str, "ab"), itertools.starmap(str, [("a",)]),
        asyncio.get_running_loop().create_future(), asyncio.ensure_future(asyncio.sleep(60)),
    ]  # fmt: skip


async def test_work_that_has_not_ended_makes_no_key_done(face: Any) -> None:
    states: list[str] = []
    results: list[Any] = []

    def handle(*_: object) -> Any:
        return results[-1]

    guard, function = face.guard("g"), face.once(key="{k}", scope="f")(lambda k: handle())
    for result in _unfinished():
        results.append(result)
        with pytest.raises(InvalidArgument, match=r"whose work has not ended\. Wait for it"):
            await function("k")
        verdict = await guard.run("k", handle)
        (many,) = await guard.run_many([("m", "message")], handle)
        for each in (verdict, many):
            assert (each.outcome, each.ran) == ("rejected", True)
            assert isinstance(each.error, InvalidArgument)
        states += [(await face.inspect(key, scope=scope)).state for key, scope in (("k", "f"), ("k", "g"), ("m", "g"))]
    assert {*states} == {"released"}
    # It is stopped, because the next call of the key may run
    await asyncio.sleep(0)
    assert all(each.cancelled() for each in results if hasattr(each, "cancelled"))
    assert list(results[1]) == []
    # A cursor and a file may be iterated, but what they did is done
    for n, result in enumerate(
        (sqlite3.connect(":memory:", check_same_thread=False).execute("SELECT 1"), io.StringIO())
    ):
        results.append(result)
        assert (await guard.run(f"done {n}", handle)).outcome == "handled"


@dataclasses.dataclass
class Holder:
    held: Any


AROUND: list[Callable[[Any], Any]] = [
    lambda it: [1, it], lambda it: (it,), lambda it: {"a": [it]}, lambda it: {it}, Holder,
    lambda it: [object(), Holder(it)], lambda it: deque([it]), lambda it: {"a": it}.values(),
    lambda it: types.SimpleNamespace(a=it),
]  # fmt: skip


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("on_error", ["release", "keep", "store"])
async def test_work_that_has_not_ended_inside_a_result_makes_no_key_done(face: Any, around: Any, on_error: Any) -> None:
    options = {"on_error": on_error}
    state = {"release": "released", "keep": "in_progress", "store": "failed"}[on_error]
    guard = face.guard("g", **options)
    for n, result in enumerate(_unfinished()):
        function = face.once(key="{k}", scope="f", **options)(lambda k, result=result: around(result))
        with pytest.raises(InvalidArgument, match=r"whose work has not ended\. Wait for it"):
            await function(f"k{n}")
        verdict = await guard.run(f"k{n}", lambda *_, result=result: around(result))
        (many,) = await guard.run_many([(f"m{n}", "message")], lambda *_, result=result: around(result))
        for each in (verdict, many):
            assert (each.outcome, each.ran) == ("rejected", True)
            assert isinstance(each.error, InvalidArgument)
        keys = ((f"k{n}", "f"), (f"k{n}", "g"), (f"m{n}", "g"))
        assert {(await face.inspect(key, scope=scope)).state for key, scope in keys} == {state}
        await asyncio.sleep(0)
        assert getattr(result, "cancelled", lambda: True)()
    assert "once.completed" not in dict(face.gate.counters)


async def test_a_result_that_is_not_stored_may_hold_anything(face: Any) -> None:
    pending: list[Any] = [concurrent.futures.Future()]
    handle = face.once(key="{k}", scope="s", at_most_once=True, on_done="skip")(lambda k: pending)
    assert await handle("k") is pending
    assert (await face.inspect("k", scope="s")).state == "done"


async def test_a_delivery_of_work_that_has_not_ended_is_rejected(gate: Gate) -> None:
    topic = gate.topic("t")
    topic.trigger("k", 1)
    (delivery,) = topic.take()
    for result in _unfinished():
        run, run_async = (
            build_run(lambda _, it=result: it, gate.context),
            build_run_async(_returning(result), gate.context),
        )
        for verdict in (
            contextvars.copy_context().run(run, delivery), await run_async(delivery),
            await Callback(_returning(result), gate.context, "s")("message"),
        ):  # fmt: skip
            assert (verdict.outcome, type(verdict.error)) == ("rejected", InvalidArgument)
    # A subscriber awaits what a lambda around a coroutine function returns, but no thread
    subscriber: Callback[str] = Callback(lambda message: handle_async(message), gate.context, "s")
    assert ((await subscriber("m")).outcome, ran) == ("handled", ["m"])
    pool: Callback[str] = Callback(lambda _: concurrent.futures.Future(), gate.context, "s")
    assert (await pool("m")).outcome == "rejected"


def _returning(result: Any) -> Any:
    async def handle(_: object) -> Any:
        return result

    return handle


def copy_attributes(func: Any) -> Any:
    @functools.wraps(func)
    def above(*args: Any) -> Any:
        ran.append("above")
        return func(*args)

    @functools.wraps(func)
    async def above_async(*args: Any) -> Any:
        ran.append("above")
        return await func(*args)

    return above_async if asyncio.iscoroutinefunction(func) else above


@wrapt.decorator
def forward_attributes(func: Any, _instance: object, args: Any, kwargs: Any) -> Any:
    ran.append("above")
    return func(*args, **kwargs)


@pytest.mark.parametrize("above", [copy_attributes, forward_attributes])
@pytest.mark.parametrize("awaiting", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("kind", ["once", "callback", "method"])
async def test_a_decorator_above_a_guarded_handler_runs(gate: Gate, above: Any, awaiting: bool, kind: str) -> None:
    def effect(*_: object) -> None:
        ran.append("effect")

    async def effect_async(*_: object) -> None:
        ran.append("effect")

    # Given a guarded handler, and a decorator above it whose function has the attributes of what it decorates
    guard: Any = gate.callback if kind == "callback" else gate.once
    handler = above(guard(key=lambda *_: "k", scope="s")(effect_async if awaiting else effect))
    if kind == "method":
        handler = type("Orders", (), {"handle": handler})().handle
    topic = gate.topic("t")
    topic.trigger("k", 1)
    (delivery,) = topic.take()
    # When a topic and a subscriber call it
    verdicts = [
        await build_run_async(handler, gate.context)(delivery)
        if awaiting
        else build_run(handler, gate.context)(delivery),
        await Callback(handler, gate.context, "s")("message"),
    ]
    # Then each call goes through the decorator, and the effect happens once
    assert [verdict.outcome for verdict in verdicts] == ["handled", "handled"]
    assert ran == ["above", "effect", "above"]
