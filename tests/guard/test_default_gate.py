"""The default gate: `configure`, and `once` with and without parentheses."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument

HEAD = "import idemgate, redis\nfrom idemgate import merge, once\n"


@pytest.fixture
def program(tmp_path: Path, url: str, namespace: str) -> Callable[[str], str]:
    """Runs a program in its own process, whose default gate is unused; returns what it prints."""

    def run(text: str) -> str:
        file = tmp_path / "program.py"
        file.write_text(HEAD + f"URL, NAME = {url!r}, {namespace!r}\n" + text)
        done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=60, check=False)
        return done.stdout + done.stderr

    return run


@pytest.mark.parametrize("store", ["URL", "redis.Redis.from_url(URL)"])
def test_configure_sets_the_store_of_functions_that_are_decorated_before(
    program: Callable[[str], str], store: str, namespace: str, url: str
) -> None:
    printed = program(f"""
@once(key="{{n}}", scope="s")
def double(n):
    return 2 * n
ids = idemgate.default_gate.dedup("ids", "1h")
idemgate.configure({store}, namespace=NAME)
print(double(4), ids.add("a"), idemgate.default_gate.namespace == NAME)
import pickle
try:
    print(pickle.loads(pickle.dumps(idemgate.default_gate)).dedup("ids", "1h").add("a"))
except pickle.PicklingError:
    print("refused")
""")
    assert printed.split() == ["8", "True", "True", "False" if store == "URL" else "refused"]
    with Gate(url, namespace=namespace) as gate:
        assert gate.inspect("4", scope="s").state == "done"
        assert gate.dedup("ids", "1h").add("a") is False


def test_configure_refuses_a_gate_in_use_and_bad_arguments(program: Callable[[str], str]) -> None:
    printed = program("""
for bad in ({"store": 5}, {"store": "nonsense"}, {"store": URL, "namespace": "a b"}):
    try:
        idemgate.configure(**bad)
    except idemgate.IdemgateError as error:
        print("refused", type(error).__name__)
idemgate.configure(URL, namespace=NAME)
idemgate.configure(URL, namespace=NAME)  # before the first use it may be repeated
idemgate.default_gate.claim("k")
try:
    idemgate.configure(URL)
except idemgate.InvalidArgument as error:
    print("in use" in str(error))
""")
    assert printed.count("refused") == 3, printed
    assert printed.splitlines()[-1] == "True"


def test_without_a_store_the_error_names_configure(program: Callable[[str], str]) -> None:
    assert "idemgate.configure" in program("idemgate.default_gate.claim('k')")


async def test_once_works_without_parentheses(gate: Gate) -> None:
    ran: list[int] = []

    @gate.once
    def handle(n: int) -> int:
        ran.append(n)
        return n

    @gate.once()
    def same(n: int) -> int:
        ran.append(n)
        return n

    @gate.once
    async def awaited(n: int) -> int:
        ran.append(n)
        return n

    assert [handle(1), handle(1), same(1), same(1), await awaited(1), await awaited(1)] == [1] * 6
    assert ran == [1, 1, 1]
    assert handle.__name__ == "handle"


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(lambda gate: gate.once(lambda order: order), id="a lambda by position"),
        pytest.param(lambda gate: gate.once(5), id="a number"),
        pytest.param(lambda gate: gate.once(object())(print), id="an object"),
    ],
)
def test_a_wrong_use_of_once_fails_at_decoration(gate: Gate, bad: Callable[[Gate], Any]) -> None:
    with pytest.raises(InvalidArgument):
        bad(gate)


def test_once_takes_one_positional_argument(gate: Gate) -> None:
    with pytest.raises(TypeError, match="one positional argument"):
        gate.once("{a}", "{b}")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="one positional argument"):
        gate.once("{a}", key="{b}")  # type: ignore[call-overload]
