"""Connections that a test leaves open in its event loop, as a plugin of pytest (`addopts` in pyproject.toml).

Such a connection would be reported when it is garbage-collected, which is in the middle of another test, and that one
would fail. So each event loop is asked when it closes. The warning names the test, and the connection is closed.
`poe resilience` takes the warning for an error.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from asyncio import base_events
from typing import Any

import pytest

_close = base_events.BaseEventLoop.close


class LeftOpen(UserWarning):
    """A test left a connection open in its event loop."""


def close(loop: Any) -> None:
    """Close an event loop of asyncio, and first the connections in it."""
    found: list[Any] = [] if loop.is_closed() else list(getattr(loop, "_transports", {}).values())
    left = [transport for transport in found if transport._sock is not None and not transport.is_closing()]
    told = [f"{transport._sock!r} of {transport.get_protocol()!r}" for transport in left]
    for transport in left:
        transport.abort()
    if found and not loop.is_closed():
        loop.run_until_complete(asyncio.sleep(0))  # in which they are closed
    _close(loop)
    if told:
        warnings.warn(LeftOpen(f"{os.environ.get('PYTEST_CURRENT_TEST')}: {'; '.join(told)}"), stacklevel=2)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", f"default::{__name__}.LeftOpen")
    base_events.BaseEventLoop.close = close
