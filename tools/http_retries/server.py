"""The server of `tools.http_retries`: Prefect, unmodified but for the middleware. It is forked again after each kill.

python server.py DESCRIPTOR STORE NAMESPACE: it listens on the descriptor, and prints the process id of each server. It
runs in the environment of Prefect, which has no `tools`.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from typing import Any

import uvicorn
from idemgate_http import IdempotencyKey
from prefect.server.api.server import create_app

from idemgate import Gate

LEASE = "2s"


class Witness:
    """A middleware inside of the guard that answers with headers of the caller, as a session middleware would."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        account = dict(scope.get("headers", ())).get(b"x-account", b"")

        async def send_message(message: Any) -> None:
            if message["type"] == "http.response.start":
                given = [(b"set-cookie", b"session=" + account), (b"x-caller", account), (b"x-hidden", account)]
                message = {**message, "headers": [*message.get("headers", ()), *given]}
            await send(message)

        await self._app(scope, receive, send_message)


def serve(listening: socket.socket) -> None:
    """Run the server until it is killed."""
    app = create_app()
    app.add_middleware(Witness)
    app.add_middleware(
        IdempotencyKey,
        gate=Gate(sys.argv[2], namespace=sys.argv[3]),
        caller=lambda request: request.headers["x-account"],
        keep_headers=["x-caller"],
        lease=LEASE,
    )
    uvicorn.run(app, fd=listening.fileno(), log_level="critical", lifespan="on")


def main() -> None:
    listening = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    child = 0
    try:
        while True:
            if (child := os.fork()) == 0:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                serve(listening)
                os._exit(0)
            print(child, flush=True)
            os.waitpid(child, 0)
    finally:
        if child:
            os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
