"""The faults of the proxy that other tests cannot tell from each other."""

from __future__ import annotations

import socket
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest

from idemgate.testing import Proxy

PING = b"*1\r\n$4\r\nPING\r\n"


def _close(proxy: Proxy) -> None:
    proxy.cut_reply(b"PING")


def _reset(proxy: Proxy) -> None:
    proxy.reset_reply(b"PING")


def _ask(proxy: Proxy) -> str:
    with socket.create_connection(("127.0.0.1", urlsplit(proxy.url).port or 0), timeout=10) as connection:
        connection.sendall(PING)
        try:
            return "closed" if connection.recv(100) == b"" else "answered"
        except ConnectionResetError:
            return "reset"


@pytest.mark.parametrize(("fault", "expected"), [(_close, "closed"), (_reset, "reset")])
def test_a_connection_is_closed_or_reset(url: str, fault: Callable[[Proxy], None], expected: str) -> None:
    found = set[str]()
    with Proxy(url.partition("?")[0]) as proxy:
        for _ in range(50):  # two threads of the proxy see the end of a connection
            fault(proxy)
            found.add(_ask(proxy))
    assert found == {expected}
