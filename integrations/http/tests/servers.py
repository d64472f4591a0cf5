"""Real servers in threads of the test process, one of each kind, and the apps that tests mount on them by a prefix."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Coroutine
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import hypercorn.asyncio
import hypercorn.config
import uvicorn
import waitress.server

READY = 20
"""Seconds after which a server that does not answer fails its tests."""


class Mounts:
    """An app that passes a request to the app of its first path segment, as ASGI and as WSGI."""

    def __init__(self) -> None:
        self.apps: dict[str, Any] = {}

    async def asgi(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await self.apps[scope["path"].split("/")[1]](scope, receive, send)

    def wsgi(self, environ: Any, start_response: Any) -> Any:
        return self.apps[environ["PATH_INFO"].split("/")[1]](environ, start_response)


class Server:
    """A server in a thread. `url` is its address, `apps` its mounted apps."""

    loop: asyncio.AbstractEventLoop | None = None

    def __init__(self) -> None:
        self.mounts = Mounts()
        # With the protocol, asyncio switches Nagle's algorithm off, which delays each answer by 40 ms.
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self.socket.bind(("127.0.0.1", 0))
        self.socket.listen(128)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.thread = threading.Thread(target=self.run, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def run(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        raise NotImplementedError

    def call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the event loop of the server."""
        if self.loop is None:
            return asyncio.run(coroutine)
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(READY)


class AsyncServer(Server):
    """A server with an event loop, which exists once `start` has returned."""

    def start(self) -> None:
        self.started = threading.Event()
        super().start()
        assert self.started.wait(READY)

    def run(self) -> None:
        asyncio.run(self.main())

    async def main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.stopped = asyncio.Event()
        self.started.set()
        await self.serve()

    async def serve(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.stopped.set)
        self.thread.join(READY)


class Uvicorn(AsyncServer):
    async def serve(self) -> None:
        config = uvicorn.Config(
            self.mounts.asgi, lifespan="off", log_config=None, ws="none", http="h11", interface="asgi3"
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([self.socket]))
        await self.stopped.wait()
        server.should_exit = server.force_exit = True
        await serving


class Hypercorn(AsyncServer):
    async def serve(self) -> None:
        config = hypercorn.config.Config()
        config.bind = [f"fd://{self.socket.detach()}"]
        config.loglevel = "CRITICAL"
        config.graceful_timeout = 1
        await hypercorn.asyncio.serve(self.mounts.asgi, config, shutdown_trigger=self.stopped.wait, mode="asgi")


class Waitress(Server):
    def run(self) -> None:
        self.server = waitress.server.create_server(
            self.mounts.wsgi, sockets=[self.socket], threads=24, asyncore_use_poll=True, expose_tracebacks=False
        )
        self.server.run()

    def stop(self) -> None:
        self.server.task_dispatcher.shutdown(timeout=1)
        self.server.trigger.pull_trigger(lambda: self.server.asyncore.close_all(self.server._map, ignore_all=True))
        self.thread.join(READY)


class _Quiet(WSGIRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


class _Threads(ThreadingMixIn, WSGIServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """A client that disconnects is no error of the test."""


class Wsgiref(Server):
    def run(self) -> None:
        self.server.serve_forever(poll_interval=0.02)

    def start(self) -> None:
        address = self.socket.getsockname()
        self.server = _Threads(address, _Quiet, bind_and_activate=False)
        self.server.socket.close()
        self.server.socket = self.socket
        self.server.server_name, self.server.server_port = address
        self.server.setup_environ()
        self.server.set_app(self.mounts.wsgi)
        super().start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()


KINDS: dict[str, Callable[[], Server]] = {
    "uvicorn": Uvicorn, "hypercorn": Hypercorn, "waitress": Waitress, "wsgiref": Wsgiref,
}  # fmt: skip
