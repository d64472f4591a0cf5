"""Guarded and merged functions pass between processes as other functions do: by name."""

from __future__ import annotations

import asyncio
import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from idemgate import AlreadyInProgress, Gate, KeyReused, PartialFailure

gate = Gate("redis://nowhere:1", namespace="pickled", timeout="1ms")


@gate.once(key="{k}", on_store_error="run")
def function(k: str) -> str:
    return f"function {k}"


@gate.once(key="{k}", on_store_error="run")
async def coroutine_function(k: str) -> str:
    return f"coroutine {k}"


@gate.callback("{k}", on_store_error="run")
def callback(k: str) -> str:
    return f"callback {k}"


@gate.merge("{k}")
def merged(k: str) -> str:
    return f"merged {k}"


@gate.once(key="{k}")
@gate.merge("{k}", name="both")
def both(k: str) -> str:
    return f"both {k}"


class Shop:
    def __init__(self, name: str) -> None:
        self.name = name

    @gate.once(key="{k}", on_store_error="run")
    def method(self, k: str) -> str:
        return f"{self.name} {k}"

    @gate.once(key="{k}", on_store_error="run")
    @classmethod
    def class_method(cls, k: str) -> str:
        return f"{cls.__name__} {k}"

    @staticmethod
    @gate.once(key="{k}", on_store_error="run")
    def static_outside(k: str) -> str:
        return f"static {k}"

    @gate.once(key="{k}", on_store_error="run")
    @staticmethod
    def static_inside(k: str) -> str:
        return f"static {k}"


FUNCTIONS = [
    pytest.param(lambda: function, "function 1", id="function"),
    pytest.param(lambda: coroutine_function, "coroutine 1", id="coroutine function"),
    pytest.param(lambda: callback, "callback 1", id="callback"),
    pytest.param(lambda: merged, "merged 1", id="merged"),
    pytest.param(lambda: merged.with_options(delay="5s"), "merged 1", id="merged with options"),
    pytest.param(lambda: Shop("ann").method, "ann 1", id="method"),
    pytest.param(lambda: Shop.class_method, "Shop 1", id="classmethod"),
    pytest.param(lambda: Shop.static_outside, "static 1", id="staticmethod"),
    pytest.param(lambda: Shop.static_inside, "static 1", id="staticmethod inside"),
]


async def result_of(value: Any) -> Any:
    return await value if asyncio.iscoroutine(value) else value


@pytest.mark.parametrize(("find", "result"), FUNCTIONS)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
async def test_a_function_is_found_by_its_name(find: Callable[[], Any], result: str, protocol: int) -> None:
    found = pickle.loads(pickle.dumps(find(), protocol))
    assert await result_of(found("1")) == result
    assert type(found) is type(find())


def test_a_method_without_its_object_is_that_of_the_class() -> None:
    assert pickle.loads(pickle.dumps(Shop.method))(Shop("bob"), "1") == "bob 1"


def test_a_merged_function_keeps_its_options_and_its_topic() -> None:
    found = pickle.loads(pickle.dumps(merged.with_options(delay="5s").with_options(priority=1)))
    assert found._options == {"delay": "5s", "priority": 1}
    assert found.topic is merged.topic
    assert pickle.loads(pickle.dumps(merged.aio)).topic is merged.aio.topic
    assert pickle.loads(pickle.dumps(merged)) is merged


@pytest.mark.parametrize("func", [function, merged, both, callback])
def test_a_copy_is_the_function(func: Any) -> None:
    assert copy.copy(func) is copy.deepcopy(func) is pickle.loads(pickle.dumps(func)) is func
    assert copy.deepcopy({"work": [func]})["work"][0] is func


def test_a_function_inside_a_function_is_refused_as_others_are() -> None:
    @gate.once(key="{k}")
    def inner(k: str) -> None: ...

    def plain(k: str) -> None: ...

    for func in (inner, plain):
        with pytest.raises((pickle.PicklingError, AttributeError), match="<locals>"):
            pickle.dumps(func)


@gate.once(key="{k}", on_store_error="run")
def fail(k: str) -> None:
    raise {
        "progress": AlreadyInProgress("k", 2.5, "s"),
        "reused": KeyReused("k", "s"),
        "partial": PartialFailure([1], "no", delay="5s"),
    }[k] from ValueError("cause")


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_guarded_functions_run_in_a_pool_and_their_errors_come_back(method: str) -> None:
    with ProcessPoolExecutor(1, get_context(method)) as pool:
        assert list(pool.map(function, ["1", "2"])) == ["function 1", "function 2"]
        assert pool.submit(Shop("ann").method, "1").result() == "ann 1"
        assert pool.submit(merged, "1").result() == "merged 1"
        errors = [pool.submit(fail, kind).exception() for kind in ("progress", "reused", "partial")]
        assert [str(error) for error in errors] == [
            str(AlreadyInProgress("k", 2.5, "s")), str(KeyReused("k", "s")), "no"
        ]  # fmt: skip
        assert [getattr(error, "retry_after", getattr(error, "items", None)) for error in errors] == [2.5, None, [1]]
        assert "ValueError: cause" in str(errors[0].__cause__)
        assert pool.submit(function, "3").result() == "function 3"  # the pool is not broken
