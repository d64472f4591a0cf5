"""Faces of gates that log in as users with the access lists of roles, as `idemgate acl` prints them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from idemgate import Gate
from idemgate.testing import Clock
from tests.conftest import Face


@pytest.fixture(params=["blocking", "awaiting"])
async def faces(
    request: pytest.FixtureRequest, users: Callable[..., str], namespace: str, clock: Clock
) -> AsyncIterator[Callable[..., Face]]:
    """`faces("guard")` is a face whose gate logs in as a user of these roles."""
    gates: list[Gate] = []

    def make(*roles: str, **options: Any) -> Face:
        gates.append(Gate(users(*roles, **options), namespace=namespace, clock=clock, timeout="30s"))
        return Face(gates[-1], request.param == "awaiting")

    yield make
    for gate in gates:
        await gate.aio.close()
        gate.close()
