"""Processes to kill, and how many of them.

The suite kills at every fail point once or a few times, in seconds. `IDEMGATE_KILLS=2000` kills about that many
processes a test more, at the same places and at random moments, and prints what it found:
`pytest tests/resilience -s -n 2`.

Every namespace that a test makes is audited at its end, while its servers are up. Where none of them is any more, the
test asks for itself (`sound`); where that cannot be, it says why: `@pytest.mark.unaudited("...")`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from idemgate import Gate
from tests.resilience.forking import Zygote
from tests.resilience.judging import KillCase, Namespaces
from tests.resilience.servers import Server, library

KILLS = int(os.environ.get("IDEMGATE_KILLS", "0"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "unaudited(why): what the test leaves in the store cannot be audited")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark each test of this folder, which is all that this hook of a folder's conftest sees."""
    item.add_marker("slow")


@pytest.fixture(autouse=True)
def namespaces(request: pytest.FixtureRequest) -> Iterator[Namespaces]:
    """Every gate is noted as it is made."""
    found = Namespaces({kind for mark in request.node.iter_markers("damages") for kind in mark.args})
    plain = Gate.__init__

    def noted(self: Gate, *args: Any, **options: Any) -> None:
        plain(self, *args, **options)
        found.note(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Gate, "__init__", noted)
        if not [*request.node.iter_markers("unaudited")]:
            patched.setattr(Server, "leaving", found.leave)
        yield found


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Before any fixture goes away, and its server or its keys with it."""
    namespaces: Namespaces = item.funcargs["namespaces"]  # type: ignore[attr-defined]
    try:
        yield
        if not [*item.iter_markers("unaudited")]:
            namespaces.end()
            assert not namespaces.missed(), f"never audited: {[*namespaces.missed()]}"
    finally:
        namespaces.gates.clear()


@pytest.fixture
def sound(sound: Callable[[Gate], None], namespaces: Namespaces) -> Callable[[Gate], None]:
    """`sound(gate)`, now: its server will be gone at the end of the test."""

    def check(gate: Gate) -> None:
        sound(gate)
        namespaces.audited.add(gate.namespace)

    return check


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture
def case(
    request: pytest.FixtureRequest, zygote: Zygote, url: str, raw: Any, namespace: str
) -> Iterator[Callable[[], KillCase]]:
    """Make a `Case` of the test's module at each call; the former one is audited and closed."""
    made: list[KillCase] = []

    def make() -> KillCase:
        while made:
            made.pop().close()
        made.append(request.module.Case(zygote, url, raw, namespace))
        return made[0]

    yield make
    for one in made:
        one.close()


@pytest.fixture(scope="session")
def kills() -> int:
    """How many processes to kill beyond the few of the suite: the environment variable IDEMGATE_KILLS."""
    return KILLS


@pytest.fixture(scope="session")
def clock_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """To be preloaded into a server: its clock is what a file says (`clock.c`)."""
    return library("clock", tmp_path_factory.mktemp("clock"))
