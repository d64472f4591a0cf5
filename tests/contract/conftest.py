"""The gate of the contract's tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from idemgate import Gate


@pytest.fixture
async def live(url: str, namespace: str, sound: Callable[[Gate], None]) -> AsyncIterator[Gate]:
    """A gate on the server's clock. Its namespace is audited at the end."""
    made = Gate(url, namespace=namespace)
    yield made
    sound(made)
    await made.aio.close()
    made.close()
