"""The server of `idemgate ui`."""

from __future__ import annotations

import os
import socket
import threading
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

__all__ = ["serve_until_signal"]

GRACE = 5.0
"""Seconds that running requests get to end after a signal."""


class _Server(uvicorn.Server):
    """Ends the process some seconds after the first signal.

    A command runs in a thread, which nothing can cancel. A redrive may take minutes, and would run on after the end of
    the server. Each of its calls is atomic, and the same command goes on with the rest.
    """

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        timer = threading.Timer(GRACE, os._exit, (0,))
        timer.daemon = True
        timer.start()
        super().handle_exit(sig, frame)


def serve_until_signal(page: ASGIApp, listening: socket.socket) -> None:
    """Serve an app on a socket until SIGINT or SIGTERM. The handlers of before then get the signal."""
    config = uvicorn.Config(
        page, log_config=None, access_log=False, server_header=False, proxy_headers=False, lifespan="off", ws="none"
    )
    _Server(config).run([listening])
