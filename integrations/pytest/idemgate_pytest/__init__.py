"""Fixtures of pytest for programs that use idemgate. Importing them imports nothing of idemgate.

The store is a server of its own for each process of pytest (xdist has several), or the one that the environment
variable IDEMGATE_TEST_URL names.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

import pytest

if TYPE_CHECKING:
    from idemgate import Gate
    from idemgate.testing import Clock

__all__ = ["Override", "idemgate_clock", "idemgate_gate", "idemgate_override", "idemgate_url"]

_numbers = itertools.count()


class Override(Protocol):
    """What the fixture `idemgate_override` returns."""

    def __call__(self, gate: Gate, /) -> Gate:
        """Let a gate of the program use the store and the clock of the test until it ends. Return the gate."""
        ...


@pytest.fixture(scope="session")
def idemgate_url() -> Iterator[str]:
    """The URL of the store of the tests, for clients of their own."""
    if url := os.environ.get("IDEMGATE_TEST_URL"):
        yield url
        return
    from idemgate.testing import temporary_server

    with temporary_server() as url:
        yield url


@pytest.fixture
def idemgate_clock() -> Clock:
    """The clock of the test: `idemgate_clock.advance("1h")`."""
    from idemgate.testing import Clock

    return Clock()


@pytest.fixture
def _idemgate_namespace(idemgate_url: str) -> Iterator[str]:
    """The begin of the namespaces of the test. After it the store is empty, or holds nothing of these namespaces."""
    from idemgate.testing import delete_keys

    prefix = f"test-{os.getpid()}-{next(_numbers)}"
    yield prefix
    delete_keys(idemgate_url, prefix if os.environ.get("IDEMGATE_TEST_URL") else None)


@pytest.fixture
def idemgate_gate(idemgate_url: str, idemgate_clock: Clock, _idemgate_namespace: str) -> Iterator[Gate]:
    """A gate on a clean namespace, whose time is `idemgate_clock`."""
    from idemgate import Gate

    with Gate(idemgate_url, namespace=_idemgate_namespace, clock=idemgate_clock) as gate:
        yield gate


@pytest.fixture
def idemgate_override(idemgate_url: str, idemgate_clock: Clock, _idemgate_namespace: str) -> Iterator[Override]:
    """A function that lets a gate of the program use a clean namespace and `idemgate_clock` during the test.

    `idemgate_override(shop.app.gate)`, or `idemgate_override(idemgate.default_gate)`.
    """
    from idemgate.testing import override

    namespaces: dict[str, str] = {}
    with ExitStack() as stack:

        def use(gate: Gate, /) -> Gate:
            namespace = namespaces.setdefault(gate.namespace, f"{_idemgate_namespace}-{len(namespaces)}")
            return stack.enter_context(override(gate, idemgate_url, namespace=namespace, clock=idemgate_clock))

        yield use
