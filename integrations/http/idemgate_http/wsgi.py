"""`IdempotencyKeyWSGI`: middleware for Flask, Pyramid, Bottle and any other WSGI app."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator
from http import HTTPStatus
from itertools import chain
from typing import Any, Unpack, cast

from idemgate import Gate
from idemgate_http.core import MARK, STREAMED, TOO_LARGE, Admission, HttpGuard, Released
from idemgate_http.options import HttpOptions
from idemgate_http.request import Headers, Request
from idemgate_http.response import Response

__all__ = ["IdempotencyKeyWSGI", "read_environ"]

Environ = dict[str, Any]
StartResponse = Callable[..., Callable[[bytes], object]]
WsgiApp = Callable[[Environ, StartResponse], Iterable[bytes]]
_CHUNK = 1 << 16


class IdempotencyKeyWSGI:
    """Answer the retries of a request from its first response.

    `app.wsgi_app = IdempotencyKeyWSGI(app.wsgi_app, gate=gate, caller=lambda request: request.headers["x-account"])`.
    Threads can share it. A request costs two round trips to the store, a retry one.

    Args:
        app: the WSGI app.
        gate: the gate whose store keeps the responses.
        **options: see `HttpOptions`.

    Raises:
        InvalidArgument: an option is invalid, or neither `caller` nor `single_tenant` is given.
    """

    def __init__(self, app: WsgiApp, *, gate: Gate, **options: Unpack[HttpOptions]) -> None:
        self._app = app
        self._core = HttpGuard(gate, options, HttpOptions)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Handle one request. Other methods pass through."""
        core = self._core
        if core.passes(environ["REQUEST_METHOD"], environ.get(MARK)):
            return self._app(environ, start_response)
        selected = core.select(read_environ(environ))
        if selected is None:
            return self._app(environ, start_response)
        if isinstance(selected, Response):
            return respond(start_response, selected)
        body = read_body(environ, core.options.max_body_bytes)
        if body is None:
            return respond(start_response, core.refuse("body-incomplete"))
        admission = core.admit(selected, body)
        if isinstance(admission, Response):
            return respond(start_response, admission)
        environ["wsgi.input"], environ["CONTENT_LENGTH"] = io.BytesIO(body), str(len(body))
        environ[MARK] = core.mark
        if admission is None:
            return self._app(environ, start_response)
        return self._guard(environ, start_response, admission)

    def _guard(self, environ: Environ, start_response: StartResponse, admission: Admission) -> Iterable[bytes]:
        """Run the app once for the key of the request, or answer from its record."""
        call = _Call(self._app, environ, self._core, admission)
        verdict = self._core.guard.run(admission.key, call.run, fingerprint=admission.fingerprint)
        answer = self._core.answer(verdict)
        return call.respond(start_response) if answer is None else respond(start_response, answer)


class _Call:
    """One run of the app, and its response."""

    def __init__(self, app: WsgiApp, environ: Environ, core: HttpGuard, admission: Admission) -> None:
        self._app = app
        self._environ = environ
        self._core = core
        self._admission = admission
        self._status = ""
        self._headers: list[tuple[str, str]] = []
        self._parts: list[bytes] = []
        self._iterable: Iterable[bytes] = ()
        self._iterator: Iterator[bytes] = iter(())
        self._error: Exception | None = None
        self._server: StartResponse | None = None
        self._complete = False

    def run(self) -> list[Any]:
        """Run the app, read its response up to the limit, and return what the record stores."""
        try:
            self._iterable = self._app(self._environ, self._start_response)
            self._iterator = iter(self._iterable)
            why = self._collect()
            status = int(self._status[:3])
        except Exception as error:  # noqa: BLE001 - `respond` raises it
            self._error = error
            _close(self._iterable)
            raise Released from None
        if why is not None:
            return self._core.pack_not_kept(status, why)
        return self._core.pack(self._admission.request, Response(status, tuple(self._headers), b"".join(self._parts)))

    def respond(self, start_response: StartResponse) -> Iterable[bytes]:
        """Return the response of the app to the server, or raise its exception."""
        if self._error is not None:
            raise self._error
        self._server = start_response
        start_response(self._status, self._headers)
        if self._complete:
            return _WholeBody(iter([b"".join(self._parts)]), self._iterable)
        return _Body(chain(self._parts, self._iterator), self._iterable)

    def _start_response(
        self, status: str, headers: list[tuple[str, str]], exc_info: Any = None
    ) -> Callable[[bytes], object]:
        """The `start_response` of the app. Once the response is on its way, it is that of the server."""
        if self._server is not None:
            return self._server(status, headers, exc_info)
        if self._status and exc_info is None:
            raise AssertionError("start_response was called twice without exc_info")
        self._status, self._headers = status, list(headers)
        return self._parts.append

    def _collect(self) -> str | None:
        """Read the response. Return why it is not kept, or None."""
        while not self._status:  # a generator calls start_response in its first step
            if (part := next(self._iterator, None)) is None:
                raise RuntimeError("the app returned without calling start_response")
            self._parts.append(part)
        names = {name.lower(): value for name, value in self._headers}
        length = names.get("content-length", "")
        most = self._core.options.max_response_bytes
        if length.isdecimal() and int(length) > most:
            return TOO_LARGE
        if names.get("content-type", "").lower().startswith("text/event-stream"):
            return STREAMED
        has_body = self._status[:3] not in ("204", "304")
        if has_body and not (length or hasattr(self._iterable, "__len__")):
            return STREAMED
        size = sum(map(len, self._parts))
        while size <= most:
            if (part := next(self._iterator, None)) is None:
                self._complete = True
                return None
            self._parts.append(part)
            size += len(part)
        return TOO_LARGE


class _Body:
    """The body that the server iterates over. Closing it closes the iterable of the app."""

    def __init__(self, parts: Iterator[bytes], iterable: Iterable[bytes]) -> None:
        self._parts = parts
        self._iterable = iterable

    def __iter__(self) -> Iterator[bytes]:
        return self._parts

    def close(self) -> None:
        _close(self._iterable)


class _WholeBody(_Body):
    """A body in one part. A server gives it a Content-Length if the app did not."""

    def __len__(self) -> int:
        return 1


def _close(iterable: object) -> None:
    if (close := getattr(iterable, "close", None)) is not None:
        close()


def respond(start_response: StartResponse, response: Response) -> list[bytes]:
    """Start a response whose body is in memory, and return the body."""
    headers = list(response.headers)
    if response.body or response.status not in (204, 304):
        headers.append(("content-length", str(len(response.body))))
    start_response(f"{response.status} {_phrase(response.status)}", headers)
    return [response.body]


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"


def read_environ(environ: Environ) -> Request:
    """Return the view of a WSGI request. Text in an environ is Latin-1 for any encoding of the bytes."""
    path = environ.get("SCRIPT_NAME", "") + environ.get("PATH_INFO", "")
    decoded = path.encode("latin-1").decode("utf-8", "surrogateescape")
    query = environ.get("QUERY_STRING", "").encode("latin-1")
    names = [(name[5:].replace("_", "-"), value) for name, value in environ.items() if name.startswith("HTTP_")]
    names += [(name.replace("_", "-"), environ[name]) for name in ("CONTENT_TYPE", "CONTENT_LENGTH") if name in environ]
    return Request(environ["REQUEST_METHOD"].upper(), decoded, query, Headers(names), environ)


def read_body(environ: Environ, most: int) -> bytes | None:
    """Return the body, or one byte more than `most` allows. None: the client sent less than it announced, or no number.

    A body without a length is chunked. Only a server that marks its end can be asked for it.
    """
    length = environ.get("CONTENT_LENGTH") or ""
    if length and not (length.isascii() and length.isdecimal()):
        return None
    if not length:
        return _read(environ, most + 1) if environ.get("wsgi.input_terminated") else b""
    wanted = min(int(length), most + 1)
    body = _read(environ, wanted)
    return body if len(body) == wanted else None


def _read(environ: Environ, size: int) -> bytes:
    """Read this many bytes, or fewer at the end of the input. A read may return less than it was asked for."""
    source, parts = cast("io.BufferedIOBase", environ["wsgi.input"]), list[bytes]()
    while size > 0 and (part := source.read(min(size, _CHUNK))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
