"""Guarded and merged functions pass between processes as other functions do: by name. A gate travels by value."""

from __future__ import annotations

import asyncio
import copy
import functools
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import redis

from idemgate import AlreadyInProgress, Gate, KeyReused, PartialFailure
from idemgate.testing import Clock
from tests.for_each import for_each

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


@for_each(("find", "result"), FUNCTIONS)
@for_each("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
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


def test_a_function_without_a_name_is_refused() -> None:
    nameless = gate.merge("{k}", name="nameless")(functools.partial(lambda end, k: k, ""))
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        with pytest.raises((pickle.PicklingError, AttributeError)):
            pickle.dumps(nameless, protocol)
    with pytest.raises(pickle.PicklingError, match="'MergedFunction' by value"):
        cloudpickle.dumps(nameless)


@gate.once(key="{k}", on_store_error="run")
def fail(k: str) -> None:
    raise {
        "progress": AlreadyInProgress("k", 2.5, "s"),
        "reused": KeyReused("k", "s"),
        "partial": PartialFailure([1], "no", delay="5s"),
    }[k] from ValueError("cause")


@pytest.mark.parametrize("method", ["fork", "spawn", pytest.param("forkserver", marks=pytest.mark.slow)])
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


def above(func: Any) -> Any:
    @functools.wraps(func)
    def inner(*args: Any) -> Any:
        return func(*args)

    return inner


def by_value() -> dict[str, Any]:
    """Guarded functions that cloudpickle copies, because they have no module to import them from."""

    @gate.once(key="{k}", scope="local")
    def function(k: str) -> str:
        return k

    @gate.once(key="{k}", scope="local")
    async def coroutine_function(k: str) -> str:
        return k

    @gate.callback("{k}", scope="local")
    def callback(k: str) -> str:
        return k

    class Shop:
        @gate.once(key="{k}", scope="local")
        def method(self, k: str) -> str:
            return k

    class Static:
        @gate.once(key="{k}", scope="local")
        @staticmethod
        def function(k: str) -> str:
            return k

    class OfClass:
        @gate.once(key="{k}", scope="local")
        @classmethod
        def function(cls, k: str) -> str:
            return k

    return {
        "function": function, "coroutine function": coroutine_function, "callback": callback,
        "bound": Shop().method, "unbound": Shop.method, "class": Shop, "object": Shop(),
        "static": Static.function, "static of a class": Static, "classmethod": OfClass.function,
        "caller": lambda: function("1"), "decorated": above(function),
    }  # fmt: skip


def test_what_cloudpickle_copies_from_a_module_is_refused() -> None:
    # A class gives a new object each time, so cloudpickle does not find it by its name
    for func in (Shop.method, Shop.static_inside):
        with pytest.raises(pickle.PicklingError, match=r"by value.*below @staticmethod"):
            cloudpickle.dumps(func)


@for_each("kind", by_value())
def test_a_copy_of_a_guarded_function_would_have_no_guard_and_is_refused(kind: str) -> None:
    with pytest.raises(pickle.PicklingError, match=r"scope 'local' by value.*no guard\. Define it in a module"):
        cloudpickle.dumps(by_value()[kind])


@for_each(("find", "result"), [each for each in FUNCTIONS if each.id != "staticmethod inside"])
async def test_cloudpickle_finds_a_function_of_a_module_by_its_name(find: Callable[[], Any], result: str) -> None:
    assert await result_of(cloudpickle.loads(cloudpickle.dumps(find()))("1")) == result


PROGRAM = """
import asyncio, sys
import cloudpickle
from idemgate import Gate

gate = Gate(sys.argv[1], namespace=sys.argv[2], timeout="20s")
aio = gate.aio

@gate.once(key="{k}", scope="s")
def guarded(k): ...

@gate.merge("{k}", name="m")
def merged(k): ...

def plain(k):
    with gate.claim(k) as claim:
        return claim.state

async def awaiting(k):
    async with aio.claim(k) as claim:
        return claim.state

objects = (merged, merged.with_options(delay=1), merged.aio)
for refused in (guarded, lambda: guarded("1"), *objects, lambda: merged.trigger("1")):
    try:
        cloudpickle.dumps(refused)
    except Exception as error:
        assert "scope 's' by value" in str(error) or "'merged' by value" in str(error), error
    else:
        raise AssertionError(refused)
sys.stdout.buffer.write(cloudpickle.dumps([plain, lambda k: asyncio.run(awaiting(k))]))
"""
"""A program whose functions use a gate, and whose guarded and merged functions are its own."""


def test_functions_of_a_program_carry_their_gate_to_other_processes(url: str, namespace: str) -> None:
    program = [sys.executable, "-c", PROGRAM, url, namespace]
    pickled = subprocess.run(program, capture_output=True, check=True, timeout=60).stdout
    load = "import pickle, sys; print([f(k) for k, f in enumerate(pickle.load(sys.stdin.buffer))])"
    states = [
        subprocess.run([sys.executable, "-c", load], input=pickled, capture_output=True, check=True, timeout=60).stdout
        for _ in range(2)
    ]
    assert states == [b"['started', 'started']\n", b"['done', 'done']\n"]


SPAWN = """
from multiprocessing import get_context
from idemgate import Gate

gate = Gate("redis://nowhere:1", timeout="1ms")

@gate.once(key="{k}", on_store_error="run")
def guarded(k):
    return f"guarded {k}"

@gate.merge("{k}")
def merged(k):
    return f"merged {k}"

if __name__ == "__main__":
    with get_context("spawn").Pool(1) as pool:
        print([pool.apply(func, ("1",)) for func in (guarded, merged, merged.with_options(delay=1))])
"""


@pytest.mark.slow
def test_functions_of_a_program_pass_to_its_own_child_processes(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(SPAWN)
    program = [sys.executable, str(tmp_path / "program.py")]
    printed = subprocess.run(program, capture_output=True, check=True, timeout=60, text=True).stdout
    assert printed == "['guarded 1', 'merged 1', 'merged 1']\n"


def test_a_gate_travels_as_what_it_was_made_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = Gate("redis://u:secret@nowhere:1/2", namespace="n", timeout="3s", max_bytes=77, durability=1)
    pickled = pickle.dumps([given, given.aio])
    found, aio = pickle.loads(pickled)
    context = found.context
    assert (context.endpoint, context.namespace, context.timeout) == (given.context.endpoint, "n", 3.0)
    assert (context.codec.max_bytes, context.durability.replicas) == (77, 1)
    # One gate for all that a process loads, so that each task does not open connections
    assert found is not given
    assert aio is found.aio
    assert pickle.loads(pickled)[0] is found
    assert pickle.loads(pickle.dumps(found)) is found
    # Without a URL each process has its own IDEMGATE_URL; a directory is that of the sender
    other = pickle.loads(pickle.dumps(Gate(namespace="env")))
    monkeypatch.setenv("IDEMGATE_URL", "redis://there:7")
    assert str(other.context.endpoint) == "there:7"
    monkeypatch.chdir(tmp_path)
    embedded = pickle.loads(pickle.dumps(Gate("embedded://a b")))
    assert embedded.context.source == f"embedded://{tmp_path}/a%20b"
    assert copy.copy(given) is copy.deepcopy(given) is given
    assert "secret" not in repr([vars(given), vars(given.context)])


REFUSED = {
    "it was made from a client. Make it from a URL": lambda: Gate(redis.Redis()),
    "it has a clock of this process. Leave out clock=": lambda: Gate("redis://nowhere:1", clock=Clock()),
    "temporary and of this process. Name a directory": lambda: Gate("embedded://"),
}


@for_each("reason", REFUSED)
@for_each("dumps", [pickle.dumps, cloudpickle.dumps])
def test_a_gate_with_parts_of_this_process_is_refused(reason: str, dumps: Callable[[object], bytes]) -> None:
    made = REFUSED[reason]()
    for each in (made, made.aio):
        with pytest.raises(pickle.PicklingError, match=f"{reason}.*or create the gate in a module"):
            dumps(each)
    assert copy.copy(made) is copy.deepcopy(made) is made


def test_what_uses_a_gate_is_refused_and_the_error_names_the_gate() -> None:
    for each in (gate.topic("t"), gate.guard("g"), gate.dedup("d", "1h"), gate.aio.claim("k")):
        with pytest.raises(pickle.PicklingError, match="Pickle the gate, and make the object from it"):
            cloudpickle.dumps(each)
