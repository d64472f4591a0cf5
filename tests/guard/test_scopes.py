"""The default scope of a function and the default name of its topic: one for each function, in every program."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument

PROGRAM = """
import functools
import multiprocessing
import sys
from idemgate import Gate, InvalidArgument

gate = Gate("redis://nowhere", namespace="shop")


def charge(order): ...


def wrap(func):
    @functools.wraps(func)
    def outer(*args): ...
    return outer


def show():
    try:
        print(gate.once(key="{order}")(charge)._self_guard.options.scope)
        print(gate.once(key="{order}")(wrap(charge))._self_guard.options.scope)
        print(gate.merge("{order}")(charge).topic.name)
    except InvalidArgument as error:
        print(f"refused: {error}")


if __name__ == "__main__":
    show()
    if len(sys.argv) == 1:
        raise SystemExit
    child = multiprocessing.get_context("spawn").Process(target=show)
    child.start()
    child.join()
"""


def run(*command: str, cwd: Path, program: str | None = None) -> list[str]:
    ended = subprocess.run(
        [sys.executable, *command], cwd=cwd, input=program, capture_output=True, text=True, timeout=60, check=True
    )
    return ended.stdout.splitlines()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A script, the same as a module of a package, and the same as the program of a package."""
    (tmp_path / "shop" / "back").mkdir(parents=True)
    for name in ("shop/__init__.py", "shop/back/__init__.py"):
        (tmp_path / name).touch()
    (tmp_path / "plain").mkdir()
    for name in ("app.py", "shop/back/app.py", "shop/__main__.py", "plain/__main__.py"):
        (tmp_path / name).write_text(PROGRAM)
    return tmp_path


PROGRAMS = {
    "a script": (["app.py"], "app"),
    "a module": (["-m", "app"], "app"),
    "a script with a profiler": (["-m", "cProfile", "-o", "profile", "app.py"], "app"),
    "a module of a package": (["-m", "shop.back.app"], "shop.back.app"),
    "a file of a package": (["shop/back/app.py"], "shop.back.app"),
    "a package": (["-m", "shop"], "shop.__main__"),
}
MODULES = sorted({module for _, module in PROGRAMS.values()})


def test_a_module_has_the_scopes_of_its_name(project: Path) -> None:
    shown = run("-c", "".join(f"import {module}; {module}.show()\n" for module in MODULES), cwd=project)
    assert shown == [f"{module}.charge" for module in MODULES for _ in range(3)]


@pytest.mark.parametrize(
    "program",
    [pytest.param(name, marks=() if name in ("a script", "a package") else pytest.mark.slow) for name in PROGRAMS],
)
def test_a_program_has_the_scopes_of_its_module(program: str, project: Path) -> None:
    command, module = PROGRAMS[program]
    if "cProfile" in command or command == ["-m", "shop"]:  # a child cannot import the main module of these
        assert run(*command, cwd=project) == [f"{module}.charge"] * 3
    else:  # a child shows them, too
        assert run(*command, "child", cwd=project) == [f"{module}.charge"] * 6


@pytest.mark.parametrize(
    ("command", "program"),
    [
        pytest.param(["-c", PROGRAM], None, id="python -c"),
        pytest.param(["-"], PROGRAM, id="standard input", marks=pytest.mark.slow),
        pytest.param(["plain"], None, id="a folder that is no package", marks=pytest.mark.slow),
    ],
)
def test_a_program_without_a_name_is_refused(command: list[str], program: str | None, project: Path) -> None:
    lines = run(*command, cwd=project, program=program)
    assert lines[0].startswith("refused: scope='__main__.charge': the function is defined in an interactive session")
    assert "Pass scope=" in lines[0]


def plain(k: str) -> str:
    return k


class Called:
    def __call__(self, k: str) -> str:
        return k


@pytest.mark.parametrize(
    ("func", "problem"),
    [
        pytest.param(lambda k: k, "a lambda has no unique name", id="a lambda"),
        pytest.param(functools.partial(plain), "a partial has no unique name", id="a partial"),
        pytest.param(
            functools.partial(functools.partial(plain)), "a partial has no unique name", id="a partial of a partial"
        ),
        pytest.param(Called(), "an object with __call__ has no unique name", id="an object"),
    ],
)
def test_what_has_no_name_of_its_own_needs_a_scope(gate: Gate, func: Any, problem: str) -> None:
    for decorate, name in (
        (gate.once(key="{k}"), "scope"),
        (gate.callback("{k}"), "scope"),
        (gate.merge("{k}"), "name"),
    ):
        with pytest.raises(InvalidArgument, match=rf"{name}='.*{problem}\. Pass {name}="):
            decorate(func)
    assert gate.once(key="{k}", scope="s")(func)("x") == "x"
    assert gate.callback("{k}", scope="c")(func)("x") == "x"
    assert gate.merge("{k}", name="t")(func).topic.name == "t"


def shared(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith("once.scope_shared")]


def make(gate: Gate, tenant: str) -> Callable[[str], str]:
    @gate.once(key="{k}")
    def pay(k: str) -> str:
        return tenant

    return pay


def test_a_second_function_of_a_scope_is_named_in_a_warning(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    # Given functions of one factory, which all have its scope
    caplog.set_level(logging.WARNING, "idemgate.once")
    ann = make(gate, "ann")
    assert shared(caplog) == []
    bob, cid = make(gate, "bob"), make(gate, "cid")
    # Then one warning says so, with the scope and the fix
    (line,) = shared(caplog)
    assert f"scope={__name__}.make.pay: another function has this scope" in line
    assert "Pass scope=" in line
    assert [ann("1"), bob("1"), cid("1")] == ["ann"] * 3


def test_a_scope_that_was_given_or_whose_function_is_gone_is_no_surprise(
    gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "idemgate.once")
    for _ in range(3):
        gate.once(key="{k}", scope="pay")(plain)
        gate.once(key="{k}")(plain)  # the same function again
        make(gate, "ann")("1")
        gc.collect()
    with pytest.raises(InvalidArgument):
        gate.once(cache_size=-1, on_done="skip")(make)  # a refused decoration takes no scope
    gate.once(scope=f"{__name__}.plain", on_done="skip")(make)
    assert shared(caplog) == []


def test_objects_of_two_classes_that_share_a_method_are_named(gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "idemgate.once")

    class Shop:
        @gate.once(key="{k}")
        def pay(self, k: str) -> str:
            return type(self).__name__

        @gate.once(key="{k}")
        @classmethod
        def refund(cls, k: str) -> str:
            return cls.__name__

    class Ann(Shop): ...

    class Bob(Shop): ...

    assert [Ann().pay("1"), Ann().pay("2"), Ann.refund("1"), Ann().refund("2")] == ["Ann"] * 4
    assert shared(caplog) == []
    assert [Bob().pay("1"), Bob().pay("3"), Bob.refund("1"), Shop().pay("4")] == ["Ann", "Bob", "Ann", "Shop"]
    pay, refund = shared(caplog)
    assert "Shop.pay: objects of " in pay
    assert "Shop.refund: objects of " in refund
    for line in (pay, refund):
        assert ".Ann and " in line
        assert ".Bob share this inherited method" in line


@contextlib.contextmanager
def block(k: str) -> Iterator[str]:
    yield k


@contextlib.asynccontextmanager
async def async_block(k: str) -> AsyncIterator[str]:
    yield k


def generate(k: str) -> Iterator[str]:
    yield k


async def generate_async(k: str) -> AsyncIterator[str]:
    yield k


class Handler:
    async def __call__(self, message: object) -> None: ...


REFUSED = [
    pytest.param(5, "not callable", id="a number"),
    pytest.param(None, "not callable", id="None"),
    pytest.param(Handler, r"a class.*Pass one: Handler\(...\)", id="a class"),
    pytest.param(block, "a context manager returns before its block has run", id="a context manager"),
    pytest.param(async_block, "a context manager returns before its block has run", id="an async context manager"),
    pytest.param(generate, "a generator function returns before its body has run", id="a generator"),
    pytest.param(generate_async, "a generator function returns before its body has run", id="an async generator"),
]


@pytest.mark.parametrize(("func", "problem"), REFUSED)
def test_what_ends_before_its_work_is_refused_everywhere(gate: Gate, func: Any, problem: str) -> None:
    places: list[Callable[[Any], object]] = [
        gate.once(key="{k}", scope="s"),
        gate.callback("{k}", scope="s"),
        gate.merge("{k}", name="m"),
        gate.topic("t").handler,
        gate.topic("t").aio.handler,
        gate.subscribe("c"),
        gate.consume_list("l"),
        gate.stream("s", group="g"),
        gate.on_expired("sessions", "session:*").handler,
        lambda work: gate.guard("s").run("k", work, "m"),
        lambda work: gate.guard("s").run_many([("k", "m")], work),
    ]
    for place in places:
        with pytest.raises(InvalidArgument, match=problem):
            place(func)


def test_a_function_that_runs_a_generator_to_its_end_is_accepted(gate: Gate) -> None:
    @functools.wraps(generate)
    def run_to_end(k: str) -> list[str]:
        return list(generate(k))

    assert gate.once(key="{k}", scope="s")(run_to_end)("x") == ["x"]
