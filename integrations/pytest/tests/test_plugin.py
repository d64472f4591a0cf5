"""The fixtures: a clean store and a clock for each test, and nothing imported before a test uses them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from idemgate import Gate

FOLDER = Path(__file__).parents[1]
BLOCKS = re.findall(r"^```py\n(.*?)^```", (FOLDER / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`run(test="...", shop="...")`: runs pytest on these modules in a process of its own; returns what it prints."""
    monkeypatch.delenv("IDEMGATE_TEST_URL", raising=False)

    def run(*options: str, fails: bool = False, autoload: bool = False, **modules: str) -> str:
        environment = {} if autoload else {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # others take seconds to import
        options += () if autoload else ("-p", "idemgate_pytest", "-p", "pytest_asyncio.plugin")
        for name, text in modules.items():
            (tmp_path / f"{name}.py").write_text(text)
        (tmp_path / "pytest.ini").write_text(
            "[pytest]\nfilterwarnings = error\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\n"
        )
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options],
            cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert (done.returncode != 0) is fails, done.stdout + done.stderr
        return done.stdout

    return run


def test_each_test_has_a_clean_store_and_its_own_clock(run: Run) -> None:
    run(
        test_it="""
import pytest, redis

@pytest.mark.parametrize("n", [1, 2, 3])
def test_one(idemgate_gate, idemgate_clock, idemgate_url, n):
    client = redis.Redis.from_url(idemgate_url)
    assert client.dbsize() == 0
    client.rpush("jobs", "left over")
    assert idemgate_gate.first("a", "1h")
    idemgate_clock.advance("2h")
    assert idemgate_gate.first("a", "1h")
    assert dict(idemgate_gate.counters) == {}
    client.close()

@pytest.mark.parametrize("n", [1, 2])
async def test_two(idemgate_gate, n):
    assert await idemgate_gate.aio.first("a", "1h")
    topic = idemgate_gate.topic("t")
    topic.handler(lambda delivery: None)
    await topic.aio.trigger("a")
    assert (await idemgate_gate.aio.drain()).delivered == 1
"""
    )


@pytest.mark.slow
def test_gates_of_a_program_are_overridden(run: Run) -> None:
    run(
        shop="""
import idemgate
from idemgate import Gate

gate, other = Gate("redis://nowhere.invalid:1", namespace="shop"), Gate("redis://nowhere.invalid:1", namespace="mail")
charged = []

@gate.once(key="{order}", scope="charge")
def charge(order):
    charged.append(order)

@idemgate.once(key="{order}", scope="ship")
async def ship(order):
    return order

def main():
    idemgate.configure("redis://nowhere.invalid:1", namespace="shop")
""",
        test_it="""
import idemgate, pytest, shop

@pytest.fixture(autouse=True)
def gate(idemgate_override):
    shop.charged.clear()
    idemgate_override(shop.other)
    idemgate_override(idemgate.default_gate)
    return idemgate_override(shop.gate)

@pytest.mark.parametrize("n", [1, 2])
def test_it(gate, idemgate_clock, n):
    assert gate is shop.gate and gate.context.clock is idemgate_clock
    shop.charge("o1"); shop.charge("o1")
    assert shop.charged == ["o1"]
    assert gate.counters["once.done"] == 1
    assert shop.other.namespace != gate.namespace

@pytest.mark.parametrize("n", [1, 2])
async def test_async(n):
    shop.main()
    assert await shop.ship("o1") == await shop.ship("o1") == "o1"
    assert idemgate.default_gate.counters["once.started"] == 1
""",
    )


@pytest.mark.slow
def test_on_a_server_of_the_environment_only_the_keys_of_the_test_are_deleted(
    run: Run, monkeypatch: pytest.MonkeyPatch, idemgate_gate: Gate, idemgate_url: str
) -> None:
    # Given a server with data
    assert idemgate_gate.first("ours", "1h")
    monkeypatch.setenv("IDEMGATE_TEST_URL", idemgate_url)
    # When tests run on it
    run(
        test_it="""
import os, redis
from idemgate import Gate

gate = Gate(namespace="shop")

def test_it(idemgate_gate, idemgate_override):
    assert idemgate_gate.first("ours", "1h")
    assert idemgate_override(gate).first("ours", "1h")
    with redis.Redis.from_url(os.environ["IDEMGATE_TEST_URL"]) as client:
        print(client.dbsize())
"""
    )
    # Then only that is left
    assert not idemgate_gate.first("ours", "1h")
    assert sum(1 for _ in idemgate_gate.context.link.command("KEYS", "*")) == 1


@pytest.mark.slow
def test_nothing_is_imported_before_a_test_uses_a_fixture(run: Run) -> None:
    run(
        "-p",
        "no:valkey",
        "-p",
        "no:faker",
        autoload=True,
        test_it="""
import sys

def loaded():
    return [name for name in sys.modules if name.partition(".")[0] in ("idemgate", "redis", "msgpack")]

def test_before():
    assert "idemgate_pytest" in sys.modules
    assert loaded() == []

def test_with_the_clock(idemgate_clock):
    assert loaded()
""",
    )


@pytest.mark.slow
def test_pytest_rewrites_no_assertion_of_idemgate(run: Run) -> None:
    # A plugin in the distribution of idemgate would let pytest compile all its modules anew
    assert "rewrites nothing" in run(
        "-s",
        test_it="""
from importlib.metadata import distributions

def test_it():
    named = [one for dist in distributions() for one in dist.entry_points if one.group == "pytest11"]
    assert [one.dist.name for one in named if one.value.startswith("idemgate")] == ["idemgate-pytest"]
    print("rewrites nothing")
""",
    )


@pytest.mark.slow
def test_a_test_that_fails_leaves_nothing_to_the_next_one(run: Run) -> None:
    printed = run(
        fails=True,
        test_it="""
def test_a(idemgate_override):
    import idemgate
    assert idemgate_override(idemgate.default_gate).first("a", "1h")
    raise ValueError

def test_b(idemgate_override):
    import idemgate
    assert idemgate_override(idemgate.default_gate).first("a", "1h")
""",
    )
    assert "1 failed, 1 passed" in printed


def test_the_block_of_the_readme_runs(run: Run) -> None:
    assert "1 passed" in run(test_it="".join(BLOCKS))


@pytest.mark.slow
def test_the_example_runs() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "IDEMGATE_TEST_URL"}
    subprocess.run([sys.executable, FOLDER / "example.py"], check=True, timeout=100, env=environment)
