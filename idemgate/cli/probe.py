"""HTTP probes of a worker for an orchestrator: /live and /ready, answered by a thread of their own."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from idemgate.core import keys
from idemgate.core.clock import monotonic
from idemgate.errors import InvalidArgument, StoreError
from idemgate.gate import Gate
from idemgate.store.sync import SyncLink

__all__ = ["Probes"]

STALLED = 30.0
"""Seconds after which an event loop that did not run, or a worker without a reply to a poll, is reported."""
STORE_WITHIN = 1.0
"""Seconds in which the store must answer."""
REQUEST_WITHIN = 5.0
"""Seconds in which a client must send its request."""
Facts = Mapping[str, Any]


class Probes:
    """The probes of one gate: they answer while its lifespan runs, also while the worker starts and stops.

    Args:
        gate: the gate that will run.
        address: `port` or `host:port`. Without a host only this machine reaches it.

    Raises:
        InvalidArgument: the address is invalid, or another program has the port.
    """

    def __init__(self, gate: Gate, address: str) -> None:
        self._gate = gate
        self._link: SyncLink | None = None
        self._lock = threading.Lock()  # one check of the store at a time
        self._ran_at = monotonic()
        self._server = _listen(address, {"/live": self.live, "/ready": self.ready})

    @property
    def port(self) -> int:
        """The port on which it listens."""
        return int(self._server.server_address[1])

    async def lifespan(self) -> AsyncIterator[None]:
        """Answer until it is left."""
        thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True, name="idemgate-probe")
        thread.start()
        ticks = asyncio.create_task(self._tick())
        try:
            yield
        finally:
            ticks.cancel()
            await asyncio.to_thread(self._server.shutdown)
            self._server.server_close()
            if self._link is not None:
                self._link.close()

    async def _tick(self) -> None:
        while True:
            self._ran_at = monotonic()
            await asyncio.sleep(1)

    # -- answers, in threads of the server ----------------------------------------------------------------------------

    def live(self) -> list[str]:
        """Return why the program should be restarted."""
        stalled = monotonic() - self._ran_at
        return [f"the event loop has not run for {stalled:.0f} s"] if stalled > STALLED else []

    def ready(self) -> list[str]:
        """Return why it does no work now."""
        runners = self._gate.context.runners.now()
        problems = self.live() if runners else ["not started"]
        for runner in runners:
            silent, (busy, _) = monotonic() - runner.replied_at(), runner.places()
            if not busy and silent > STALLED:
                problems.append(f"no reply to a poll for {silent:.0f} s")
        return problems if self._store_answers() else [*problems, "the store does not answer"]

    def _store_answers(self) -> bool:
        context = self._gate.context
        if not self._lock.acquire(timeout=STORE_WITHIN):
            return False  # it keeps another probe waiting
        try:
            if self._link is None:
                self._link = SyncLink(context.endpoint, STORE_WITHIN)
            self._link.command("PING", keys.topics(context.namespace))
        except StoreError:
            return False
        finally:
            self._lock.release()
        return True


def _listen(address: str, answers: Mapping[str, Callable[[], list[str]]]) -> ThreadingHTTPServer:
    """Return a server that answers these paths: 200 without problems, else 503 with them."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not (port.isdecimal() and int(port) < 65536):
        raise InvalidArgument("--probe", address, "not a port", "Write 8080, or 0.0.0.0:8080")

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_WITHIN
        server_version, sys_version = "idemgate", ""

        def do_GET(self) -> None:
            answer = answers.get(self.path.partition("?")[0])
            problems = None if answer is None else answer()
            status = HTTPStatus.NOT_FOUND if problems is None else HTTPStatus.OK
            status = HTTPStatus.SERVICE_UNAVAILABLE if problems else status
            body = json.dumps({"ok": status == HTTPStatus.OK, "problems": problems or []}).encode() + b"\n"
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 - the name of http.server

    class Server(ThreadingHTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def handle_error(self, request: Any, client_address: Any) -> None: ...  # a client that went away

    try:
        return Server((host, int(port)), Handler)
    except OSError as error:
        raise InvalidArgument(
            "--probe", address, f"cannot listen there: {error.strerror or error}", "Name another"
        ) from error
