"""Tests of `tests/plugins/open_sockets.py`: a connection that is left open is told of by the test that opened it."""

from __future__ import annotations

import asyncio
import gc
import socket

import pytest

from tests.plugins.open_sockets import LeftOpen


async def leave_open(server: socket.socket) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection(*server.getsockname())
    return writer


def test_a_connection_that_is_left_open_is_named_and_closed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        # When an event loop ends before its connection
        with pytest.warns(LeftOpen, match=r"test_a_connection_that_is_left_open_is_named_and_closed.* of <.*Protocol"):
            writer = asyncio.run(leave_open(server))
        # Then it is closed, and the garbage collector has nothing to say
        assert writer.is_closing()
        accepted, _ = server.accept()
        with accepted:
            assert accepted.recv(1) == b""
    del writer
    gc.collect()


def test_a_connection_that_is_closing_is_not_told_of() -> None:
    async def close_at_last() -> None:
        (await leave_open(server)).close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        asyncio.run(close_at_last())
        accepted, _ = server.accept()
        with accepted:
            assert accepted.recv(1) == b""
    gc.collect()
