"""`IdempotencyKey`: pure ASGI middleware for Starlette, FastAPI, Litestar, Django and any other ASGI app."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Unpack

from idemgate import Gate, Verdict
from idemgate_http.core import MARK, MISSING, PASSED, Admission, HttpGuard, RequiredKeyMissing
from idemgate_http.exchange import App, Exchange, Message, Receive, Scope, Send, read_headers, send_response
from idemgate_http.options import AsgiOptions
from idemgate_http.outliving import Outliving
from idemgate_http.request import Headers, Request
from idemgate_http.response import Response

__all__ = ["IdempotencyKey"]


class IdempotencyKey:
    """Answer the retries of a request from its first response.

    `app.add_middleware(IdempotencyKey, gate=gate, caller=lambda request: request.headers["x-account"])`. Add it inside
    the authentication. A request costs two round trips to the store, a retry one.

    Args:
        app: the ASGI app.
        gate: the gate whose store keeps the responses.
        **options: see `AsgiOptions`.

    Raises:
        InvalidArgument: an option is invalid, or neither `caller` nor `single_tenant` is given.
    """

    def __init__(self, app: App, *, gate: Gate, **options: Unpack[AsgiOptions]) -> None:
        self._app = app
        self._core = HttpGuard(gate, options, AsgiOptions)
        self._outliving = Outliving(self._core)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection. Websockets and other methods pass through."""
        kind = scope["type"]
        if kind == "http" and not self._core.passes(scope["method"], scope.get(MARK)):
            await self._handle(scope, receive, send)
        else:
            await self._app(scope, self._drain_at_shutdown(receive) if kind == "lifespan" else receive, send)

    def _drain_at_shutdown(self, receive: Receive) -> Receive:
        """Return a `receive` that waits for handlers whose client has gone before it reports the shutdown."""

        async def receive_message() -> Message:
            message = await receive()
            if message["type"] == "lifespan.shutdown":
                await self._outliving.drain(self._core.options.grace)
            return message

        return receive_message

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, refuse it, or guard it."""
        selected = self._core.select(read_scope(scope))
        if selected is None:
            await self._pass_on(scope, receive, send)
        elif isinstance(selected, Response):
            if selected.status != 413:  # a server that closes on an unread body may lose the answer with it
                await _read_body(receive, self._core.options.max_body_bytes)
            await send_response(send, selected)
        elif (body := await _read_body(receive, self._core.options.max_body_bytes)) is not None:
            admission = self._core.admit(selected, body)
            if isinstance(admission, Response):
                await send_response(send, admission)
            elif admission is None:  # verified, but without an id
                scope[MARK] = self._core.mark
                await self._app(scope, _replay_body(body, receive), send)
            else:
                await self._guard(scope, receive, send, body, admission)

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Call the app unguarded. A dependency of it may need the header all the same."""
        # Not in a copy: outer middleware reads the route that a router adds. The mark of an outer guard stays.
        scope.setdefault(MARK, PASSED)

        async def send_unless_missing(message: Message) -> None:
            """Drop the 500 with which a mounted app answers the exception before it raises it again."""
            if scope[MARK] != MISSING:
                await send(message)

        try:
            await self._app(scope, receive, send_unless_missing)
        except RequiredKeyMissing:
            scope[MARK] = MISSING
        if scope[MARK] == MISSING:
            scope[MARK] = PASSED  # an outer middleware lets the answer through
            await send_response(send, self._core.refuse("key-missing"))

    async def _guard(self, scope: Scope, receive: Receive, send: Send, body: bytes, admission: Admission) -> None:
        """Run the app once for the key of the request, or answer from its record."""
        scope[MARK] = self._core.mark
        scope["extensions"] = _drop_extensions(scope)
        exchange = Exchange(self._app, scope, receive, send, body, self._core, admission)
        run = self._core.guard.aio.run(admission.key, exchange.run_app, fingerprint=admission.fingerprint)
        if self._core.options.shield:
            verdict = await self._shield(run, exchange, admission)
        else:
            verdict = await _run_unshielded(run, exchange)
        if (answer := self._core.answer(verdict)) is not None:
            await send_response(send, answer)
            return
        exchange.settle()
        await exchange.finish()

    async def _shield(
        self, run: Coroutine[Any, Any, Verdict[Any]], exchange: Exchange, admission: Admission
    ) -> Verdict[Any]:
        """Run the guarded part in its own task, which goes on if the server cancels the request."""
        task = asyncio.create_task(run)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            exchange.abandon()
            if exchange.task is None:
                task.cancel()  # nothing has started: the guard releases its claim
            else:
                self._outliving.add(admission, task, exchange.task)
            raise


def read_scope(scope: Scope) -> Request:
    """Return the view of an ASGI request. Servers differ in whether the path has the prefix of a mounted app."""
    root, path = scope.get("root_path", "").rstrip("/"), scope["path"]
    whole = path if path == root or path.startswith(f"{root}/") else root + path
    return Request(
        scope["method"].upper(), whole, scope.get("query_string", b""), Headers(read_headers(scope["headers"])), scope
    )


async def _run_unshielded(run: Coroutine[Any, Any, Verdict[Any]], exchange: Exchange) -> Verdict[Any]:
    """Run the guarded part in the task of the server. If that is cancelled, the app is, too."""
    try:
        return await run
    except BaseException:
        exchange.cancel()
        raise


def _drop_extensions(scope: Scope) -> dict[str, Any]:
    """Return the extensions without the ways to respond that a buffer cannot replay: push, pathsend, trailers ..."""
    offered: dict[str, Any] = scope.get("extensions") or {}
    return {name: value for name, value in offered.items() if not name.startswith("http.response.")}


async def _read_body(receive: Receive, most: int) -> bytes | None:
    """Return the body, or one byte more than `most` allows. None: the client disconnected."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        part: bytes = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if size > most or not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that begins with a body that was read."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_message() -> Message:
        return messages.pop() if messages else await receive()

    return receive_message
