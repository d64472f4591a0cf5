"""One handler as an app of each kind: plain ASGI, plain WSGI, and Django with both of its handlers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, ClassVar

import django
from django.conf import settings
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.http import HttpResponse, StreamingHttpResponse
from django.test.utils import override_settings
from django.urls import re_path
from idemgate_http import IdempotencyKey
from idemgate_http.wsgi import IdempotencyKeyWSGI

REST = {
    "DEFAULT_AUTHENTICATION_CLASSES": [],
    "DEFAULT_PERMISSION_CLASSES": [],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "UNAUTHENTICATED_USER": None,
}
"""The settings of Django REST framework, which reads them when it is imported."""
MIDDLEWARE = "idemgate_http.django.IdempotencyKeyMiddleware"


@dataclass
class Call:
    """What a handler gets."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Answer:
    """What a handler returns. `parts` is a streamed body, which has no length."""

    body: bytes = b""
    status: int = 201
    headers: list[tuple[str, str]] = field(default_factory=list)
    parts: Iterable[bytes] | None = None
    length: bool = True


Handler = Callable[[Call], Answer]


def asgi_app(handler: Handler) -> Any:
    """Return a plain ASGI app. The handler runs in a thread, so it may block."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message.get("body", b""), message.get("more_body", False)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        answer = await asyncio.to_thread(handler, Call(scope["method"], scope["path"], headers, body))
        fields = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in answer.headers]
        if answer.parts is None and answer.length:
            fields.append((b"content-length", b"%d" % len(answer.body)))
        await send({"type": "http.response.start", "status": answer.status, "headers": fields})
        for part in answer.parts or ():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": answer.body})

    return app


def wsgi_app(handler: Handler) -> Any:
    """Return a plain WSGI app."""

    def app(environ: Any, start_response: Any) -> Any:
        headers = {
            name.removeprefix("HTTP_").lower().replace("_", "-"): value
            for name, value in environ.items()
            if name.startswith("HTTP_")
        }
        body = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        path = environ["SCRIPT_NAME"] + environ["PATH_INFO"]
        answer = handler(Call(environ["REQUEST_METHOD"], path, headers, body))
        fields = list(answer.headers)
        if answer.parts is None and answer.length:
            fields.append(("Content-Length", str(len(answer.body))))
        start_response(f"{answer.status} {HTTPStatus(answer.status).phrase}", fields)
        return [answer.body] if answer.parts is None else (part for part in answer.parts)

    return app


HANDLERS: dict[str, Handler] = {}
"""The handlers of Django's views, by the first segment of the path."""


def _respond(request: Any) -> Any:
    headers = {name.lower(): value for name, value in request.headers.items()}
    answer = HANDLERS[request.path.split("/")[1]](Call(request.method, request.path, headers, request.body))
    if answer.parts is not None:
        response: Any = StreamingHttpResponse(answer.parts, status=answer.status)
    else:
        response = HttpResponse(answer.body, status=answer.status)
    del response["content-type"]
    for name, value in answer.headers:
        if name.lower() == "set-cookie":
            response.set_cookie(*value.partition("=")[::2])
        else:
            response[name] = value
    return response


async def _respond_async(request: Any) -> Any:
    response = await asyncio.to_thread(_respond, request)
    if response.streaming:
        parts = list(response.streaming_content)

        async def stream() -> Any:
            for part in parts:
                yield part

        response.streaming_content = stream()
    return response


class _Urls:
    urlpatterns: ClassVar = [re_path("^async-", _respond_async), re_path("", _respond)]


def setup_django() -> None:
    """Configure Django once for this process."""
    if not settings.configured:
        settings.configure(
            ALLOWED_HOSTS=["*"],
            DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
            LOGGING_CONFIG=None,
            ROOT_URLCONF=_Urls,
            SECRET_KEY="x" * 50,
            TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates"}],
            USE_TZ=True,
        )
        django.setup()


def django_app(name: str, handler: Handler, options: dict[str, Any], *, awaiting: bool) -> Any:
    """Return a Django app whose only middleware is the one under test."""
    setup_django()
    HANDLERS[name] = handler
    named = {key.upper(): value for key, value in options.items()}
    kind = ASGIHandler if awaiting else WSGIHandler
    with override_settings(MIDDLEWARE=[MIDDLEWARE], IDEMGATE_HTTP=named):
        return kind()


def build_app(face: str, name: str, handler: Handler, options: dict[str, Any]) -> Any:
    """Return the guarded app of a face."""
    if face.startswith("django"):
        return django_app(name, handler, options, awaiting=face == "django-async")
    if face == "asgi":
        return IdempotencyKey(asgi_app(handler), **options)
    return IdempotencyKeyWSGI(wsgi_app(handler), **options)
