"""One guarded request of an ASGI app: the app in its own task, and its response in a buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any, cast

from idemgate_http.core import STREAMED, TOO_LARGE, Admission, HttpGuard, Released
from idemgate_http.response import Response

__all__ = ["App", "Exchange", "Message", "Receive", "Scope", "Send", "read_headers", "send_response"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Exchange:
    """One run of the app, and its response up to the moment at which its key is done.

    `run_app` is the handler of the guard. It returns as soon as the last part of the response is known. The app waits
    in `send` until the guard has stored the completion. Then it sends its response and goes on. So background tasks run
    after the response, as without the guard.

    Attributes:
        task: the task of the app, or None before it started.
    """

    def __init__(
        self, app: App, scope: Scope, receive: Receive, send: Send, body: bytes, core: HttpGuard, admission: Admission
    ) -> None:
        self.task: asyncio.Task[None] | None = None
        self._app = app
        self._scope = scope
        self._receive, self._send = receive, send
        self._body: bytes | None = body
        self._core = core
        self._admission = admission
        self._end: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._settled = asyncio.Event()
        self._abandoned = self._passing = False
        self._messages: list[Message] = []
        self._parts: list[bytes] = []
        self._size = 0

    async def run_app(self) -> list[Any]:
        """Run the app to the end of its response and return what the record stores.

        If the caller is cancelled, cancel the app and wait for its end.
        """
        self.task = asyncio.create_task(self._call_app())
        try:
            return await self._end
        except asyncio.CancelledError:
            self.cancel()
            await asyncio.wait([self.task])
            raise

    def settle(self) -> None:
        """Let the app send its response: the key is done or released."""
        self._settled.set()

    def abandon(self) -> None:
        """Discard the response, because its client or its server has gone."""
        self._abandoned = True
        self._settled.set()

    def cancel(self) -> None:
        """Cancel the app and discard its response."""
        self.abandon()
        if self.task is not None:
            self.task.cancel()

    async def finish(self) -> None:
        """Wait for the end of the app, with what it does after its response. Raise its exception."""
        assert self.task is not None
        await self.task
        if not self._passing:  # the app returned inside its response; the server reports that
            await self._flush()

    async def _call_app(self) -> None:
        try:
            await self._app(self._scope, self._receive_message, self._send_message)
        except asyncio.CancelledError:
            self._end.cancel()
            raise
        finally:
            self._end_with(Released())

    # What the app receives

    async def _receive_message(self) -> Message:
        """Return the body, and later what the server has to say.

        A shielded app is not told of a disconnect before its response is complete, or before it streams.
        """
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        if self._core.options.shield:
            await self._settled.wait()
        return {"type": "http.disconnect"} if self._abandoned else await self._receive()

    # What the app sends

    async def _send_message(self, message: Message) -> None:
        if self._passing:
            await self._pass_on(message)
            return
        message = _copy(message)
        self._messages.append(message)
        if message["type"] == "http.response.start":
            if len(self._messages) > 1:
                raise RuntimeError("the app sent http.response.start twice")
            why = self._read_start(message)
        elif message["type"] == "http.response.body" and len(self._messages) > 1:
            why = self._read_part(message)
            if why is None and not message.get("more_body", False):
                await self._finish_response(self._pack())
                return
        else:
            raise RuntimeError(f"a guarded app sent {message['type']}, which cannot be kept")
        if why is not None:
            await self._finish_response(self._pack_not_kept(why))

    def _read_start(self, message: Message) -> str | None:
        """Read the start of the response. Return why it is not kept, or None."""
        self._status: int = message["status"]
        self._headers = read_headers(message.get("headers", ()))
        found = {name.lower(): value for name, value in self._headers}
        length = found.get("content-length", "")
        self._length = int(length) if length.isascii() and length.isdecimal() else None
        if found.get("content-type", "").lower().startswith("text/event-stream"):
            return STREAMED
        return TOO_LARGE if (self._length or 0) > self._core.options.max_response_bytes else None

    def _read_part(self, message: Message) -> str | None:
        """Read a part of the body. Return why the response is not kept, or None."""
        part: bytes = message.get("body", b"")
        self._size += len(part)
        if self._size > self._core.options.max_response_bytes:
            return TOO_LARGE
        if message.get("more_body", False) and self._length is None:
            return STREAMED
        self._parts.append(part)
        return None

    def _pack(self) -> list[Any] | Released:
        """Return what the record stores of a complete response, or the exception that releases the claim."""
        response = Response(self._status, self._headers, b"".join(self._parts))
        try:
            return self._core.pack(self._admission.request, response)
        except Released as released:
            return released

    def _pack_not_kept(self, why: str) -> list[Any] | Released:
        try:
            return self._core.pack_not_kept(self._status, why)
        except Released as released:
            return released

    async def _finish_response(self, end: list[Any] | Released) -> None:
        """End the guarded part of the app, and send what was buffered once the key is done or released."""
        self._end_with(end)
        await self._settled.wait()
        await self._flush()

    def _end_with(self, end: list[Any] | Released) -> None:
        if self._end.done():
            return
        if isinstance(end, Released):
            self._end.set_exception(end)
        else:
            self._end.set_result(end)

    async def _flush(self) -> None:
        self._passing = True
        messages, self._messages, self._parts = self._messages, [], []
        for message in messages:
            await self._pass_on(message)

    async def _pass_on(self, message: Message) -> None:
        if not self._abandoned:
            await self._send(message)


def _copy(message: Message) -> Message:
    """Return a message as it is now: headers may be an iterator, and the app may use its objects again."""
    copied = dict(message)
    if "headers" in message:
        copied["headers"] = [(name, value) for name, value in message["headers"]]
    if "body" in message:
        copied["body"] = b"".join((message["body"],))  # bytes are not copied
    return copied


def read_headers(raw: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[str, str], ...]:
    """Return headers of ASGI as text."""
    return tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in raw)


async def send_response(send: Send, response: Response) -> None:
    """Send a response whose body is in memory."""
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in response.headers]
    if response.body or response.status not in (204, 304):
        headers.append((b"content-length", b"%d" % len(response.body)))
    await send({"type": "http.response.start", "status": response.status, "headers": headers})
    await send(cast("Message", {"type": "http.response.body", "body": response.body}))
