"""Users of the test server with the access lists of roles, as `idemgate acl` prints them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from idemgate import Gate
from idemgate.core.acl import rule, user_name
from idemgate.testing import Clock
from tests.conftest import Face

PASSWORD = "c4n4ry-p455w0rd"


def as_user(url: str, name: str, password: str = PASSWORD) -> str:
    """The same store as somebody else."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{name}:{password}@{rest}"


@pytest.fixture
def users(raw: Any, url: str, namespace: str) -> Iterator[Callable[..., str]]:
    """`users("guard", ...)` makes a user of these roles in the test's namespace and gives its URL."""
    made: list[str] = []

    def make(*roles: str, tenant: str = namespace, **options: Any) -> str:
        name = user_name(roles, tenant)
        raw.execute_command(*rule(roles, tenant, name, **options))
        raw.execute_command("ACL", "SETUSER", name, f">{PASSWORD}")
        made.append(name)
        return as_user(url, name)

    yield make
    if made:
        raw.execute_command("ACL", "DELUSER", *made)


@pytest.fixture(params=["blocking", "awaiting"])
async def faces(
    request: pytest.FixtureRequest, users: Callable[..., str], namespace: str, clock: Clock
) -> AsyncIterator[Callable[..., Face]]:
    """`faces("guard")` is a face whose gate logs in as a user of these roles."""
    gates: list[Gate] = []

    def make(*roles: str, **options: Any) -> Face:
        gates.append(Gate(users(*roles, **options), namespace=namespace, clock=clock, timeout="2s"))
        return Face(gates[-1], request.param == "awaiting")

    yield make
    for gate in gates:
        await gate.aio.close()
        gate.close()
