"""The methods of a guarded function: its scope, its keys, and what the store knows of the key of a call."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from idemgate import AlreadyInProgress, Gate, InvalidArgument, MissingKey
from idemgate.types import Record, once_function


def decorate(face: Any, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return `gate.once` for a plain function. The awaiting flavour makes it a coroutine function first."""

    def guard(body: Callable[..., Any]) -> Any:
        async def work(*args: Any, **kwargs: Any) -> Any:
            return body(*args, **kwargs)

        return face.gate.once(**options)(functools.wraps(body)(work) if face.awaiting else body)

    return guard


async def result_of(value: Any, face: Any) -> Any:
    assert inspect.isawaitable(value) is face.awaiting
    return await value if face.awaiting else value


async def test_a_function_inspects_and_forgets_the_key_of_a_call(face: Any) -> None:
    runs: list[str] = []
    charge = decorate(face, key="{order[id]}", scope="charge")(lambda order, note="": runs.append(order["id"]))
    order = {"id": "o1"}

    assert (await result_of(charge.inspect(order), face)).state == "absent"
    await result_of(charge(order), face)
    record = await result_of(charge.inspect(order, note="ignored"), face)
    assert (type(record), record.state) == (Record, "done")
    assert record == await face.inspect("o1", scope="charge")
    assert (charge.scope, charge.key(order), charge.key(order=order)) == ("charge", "o1", "o1")

    assert await result_of(charge.forget(order=order), face) is True
    assert await result_of(charge.forget(order), face) is False
    await result_of(charge(order), face)
    assert runs == ["o1", "o1"]


async def test_an_absent_key_names_the_other_scopes_of_the_gate(face: Any) -> None:
    charge, refund = (decorate(face, key="{k}", scope=scope)(lambda k: k) for scope in ("charge", "refund"))
    await result_of(refund("a"), face)
    assert (await result_of(charge.inspect("a"), face)).other_scopes == ("refund",)


async def test_a_live_owner_keeps_its_key(face: Any) -> None:
    charge = decorate(face, key="{k}", scope="s")(lambda k: k)
    async with face.gate.aio.claim("a", scope="s"):
        with pytest.raises(AlreadyInProgress):
            await result_of(charge.forget("a"), face)
        assert (await result_of(charge.inspect("a"), face)).state == "in_progress"


async def test_forgetting_evicts_the_key_from_the_cache(face: Any) -> None:
    runs: list[str] = []
    charge = decorate(face, key="{k}", scope="s", cache_size=10)(lambda k: runs.append(k))
    for _ in range(2):
        await result_of(charge("a"), face)
        await result_of(charge("a"), face)
        await result_of(charge.forget("a"), face)
    assert runs == ["a", "a"]


@pytest.mark.parametrize("key", ["{k}", lambda self, k: k], ids=["template", "callable"])
async def test_a_method_finds_its_keys_with_and_without_its_object(face: Any, key: Any) -> None:
    class Shop:
        @decorate(face, key=key, scope="method")
        def pay(self, k: str) -> str:
            return k

    shop = Shop()
    await result_of(shop.pay("a"), face)
    assert shop.pay.key("a") == Shop.pay.key(shop, "a") == shop.pay.key(k="a")
    for record in (shop.pay.inspect("a"), shop.pay.inspect(k="a"), Shop.pay.inspect(shop, "a")):
        assert (await result_of(record, face)).state == "done"
    assert (shop.pay.scope, Shop.pay.scope, once_function(shop.pay).scope) == ("method",) * 3
    assert await result_of(shop.pay.forget("a"), face) is True


@pytest.mark.parametrize("key", ["{k}", lambda *given: given[-1]], ids=["template", "callable"])
async def test_a_class_method_finds_its_keys(face: Any, key: Any) -> None:
    def name(cls: type, k: str) -> str:
        return k

    async def name_async(cls: type, k: str) -> str:
        return k

    class Shop:
        open = face.gate.once(key=key, scope="s")(classmethod(name_async if face.awaiting else name))

    await result_of(Shop.open("a"), face)
    for function in (Shop.open, Shop().open):
        assert function.key("a") == "a"
        assert (await result_of(function.inspect("a"), face)).state == "done"


@pytest.mark.parametrize("key", ["{k}", lambda k: k], ids=["template", "callable"])
async def test_a_static_method_finds_its_keys(face: Any, key: Any) -> None:
    class Shop:
        close = staticmethod(decorate(face, key=key, scope="s")(lambda k: k))

    await result_of(Shop.close("a"), face)
    for function in (Shop.close, Shop().close):
        assert function.key("a") == function.key(k="a") == "a"
        assert (await result_of(function.inspect("a"), face)).state == "done"


async def test_a_call_without_a_key_raises_as_the_function_does(face: Any) -> None:
    charge = decorate(face, key="{order[id]}", scope="s", on_missing_key="skip")(lambda order: order)
    with pytest.raises(MissingKey):
        charge.key({})
    with pytest.raises(TypeError, match="order"):
        charge.key()
    with pytest.raises(MissingKey):
        await result_of(charge.inspect({}), face)


def test_a_function_without_a_guard_is_refused(gate: Gate) -> None:
    with pytest.raises(InvalidArgument, match="not decorated with once"):
        once_function(len)
    guarded = gate.once(key="{k}", scope="s")(lambda k: k)
    assert once_function(guarded) is copy.copy(guarded) is guarded


def test_a_parameter_may_have_the_name_of_a_method(gate: Gate) -> None:
    @gate.once(key="{key}:{self}:{scope}", scope="s")
    def charge(key: str, scope: str, inspect: str = "", **others: str) -> None: ...

    assert charge.key(key="a", scope="b", self="c") == "a:c:b"
