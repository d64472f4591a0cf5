"""Responses that stream: a key is done with the first part, and free if the work for that fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import flask
import pytest
from django.db import connections
from django.http import StreamingHttpResponse
from django.test import AsyncClient, Client, override_settings
from django.urls import re_path
from idemgate_http import IdempotencyKey
from idemgate_http.django import idempotent
from idemgate_http.flask import idempotent as flask_idempotent
from idemgate_http.wsgi import IdempotencyKeyWSGI
from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.routing import Route
from werkzeug.test import EnvironBuilder

from idemgate import Gate
from integrations.http.tests.apps import MIDDLEWARE, REST, setup_django
from integrations.http.tests.wire import post as wire_post

setup_django()
with override_settings(REST_FRAMEWORK=REST):
    from rest_framework.decorators import api_view

OPTIONS: dict[str, Any] = {"single_tenant": True}
HEADERS = {"Idempotency-Key": "k"}


class Work:
    """A stream whose first two runs fail before their first part."""

    def __init__(self, kind: str = "text/plain") -> None:
        self.runs = 0
        self.kind = kind

    def stream(self) -> Iterator[bytes]:
        self._begin()
        yield b"a"
        yield b"b"

    async def stream_async(self) -> AsyncIterator[bytes]:
        await asyncio.sleep(0)
        self._begin()
        yield b"a"
        yield b"b"

    def _begin(self) -> None:
        self.runs += 1
        if self.runs < 3:
            raise LookupError("the database is away")


@pytest.fixture(params=["text/plain", "text/event-stream"])
def work(request: pytest.FixtureRequest) -> Work:
    return Work(request.param)


def check(work: Work, post: Callable[[], tuple[int, bytes]]) -> None:
    """Check that two runs that fail free the key, and that the third one ends it."""
    for runs in (1, 2):
        with pytest.raises(LookupError, match="away"):
            post()
        assert work.runs == runs
    assert post() == (200, b"ab")
    assert [post()[0] for _ in range(2)] == [409, 409]
    assert work.runs == 3


@pytest.mark.parametrize("is_async", [False, True])
def test_of_starlette(gate: Gate, work: Work, is_async: bool) -> None:
    async def pay(request: Any) -> StreamingResponse:
        return StreamingResponse(work.stream_async() if is_async else work.stream(), media_type=work.kind)

    app = IdempotencyKey(Starlette(routes=[Route("/", pay, methods=["POST"])]), gate=gate, **OPTIONS)

    async def post() -> tuple[int, bytes]:
        wire = await wire_post(app, path="/")
        return wire.status, wire.body

    with asyncio.Runner() as runner:
        check(work, lambda: runner.run(post()))
        runner.run(gate.aio.close())


@pytest.mark.parametrize("form", ["middleware", "decorator"])
def test_of_flask(gate: Gate, work: Work, form: str) -> None:
    app = flask.Flask("shop")
    app.testing = True

    def pay() -> Any:
        return flask.Response(work.stream(), mimetype=work.kind)

    if form == "middleware":
        app.wsgi_app = IdempotencyKeyWSGI(app.wsgi_app, gate=gate, **OPTIONS)  # type: ignore[method-assign]
    else:
        pay = flask_idempotent(gate, **OPTIONS)(pay)
    app.post("/")(pay)

    def post() -> tuple[int, bytes]:
        answer = app.test_client().post("/", headers=HEADERS)
        return answer.status_code, answer.data

    check(work, post)


@contextmanager
def django(gate: Gate, form: str, view: Any) -> Iterator[None]:
    """Route requests to a view that is guarded by the middleware, or by the decorator."""
    guarded = view if form == "middleware" else idempotent(gate=gate, **OPTIONS)(view)
    urls = [re_path("", api_view(["POST"])(guarded) if form == "framework" else guarded)]
    with override_settings(
        ROOT_URLCONF=type("Urls", (), {"urlpatterns": urls}),
        MIDDLEWARE=[MIDDLEWARE] if form == "middleware" else [],
        IDEMGATE_HTTP={"GATE": gate, "SINGLE_TENANT": True},
        REST_FRAMEWORK=REST,
    ):
        yield


@pytest.mark.parametrize("form", ["middleware", "decorator", "framework"])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume")
def test_of_django_under_wsgi(gate: Gate, work: Work, form: str, is_async: bool) -> None:
    """Django collects an async stream for WSGI, and warns of that."""

    def pay(request: Any) -> StreamingHttpResponse:
        return StreamingHttpResponse(work.stream_async() if is_async else work.stream(), content_type=work.kind)

    def post() -> tuple[int, bytes]:
        answer: Any = Client().post("/", headers=HEADERS)
        return answer.status_code, b"".join(answer) if answer.streaming else answer.content

    with django(gate, form, pay):
        check(work, post)


@pytest.mark.parametrize("form", ["middleware", "decorator", "sync view", "framework"])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume")
def test_of_django_under_asgi(gate: Gate, work: Work, form: str, is_async: bool) -> None:
    """Django collects a sync stream for ASGI, and warns of that."""

    def make() -> StreamingHttpResponse:
        return StreamingHttpResponse(work.stream_async() if is_async else work.stream(), content_type=work.kind)

    def pay(request: Any) -> StreamingHttpResponse:
        return make()

    async def pay_async(request: Any) -> StreamingHttpResponse:
        return make()

    async def post() -> tuple[int, bytes]:
        answer: Any = await AsyncClient().post("/", headers=HEADERS)
        return answer.status_code, b"".join([part async for part in answer]) if answer.streaming else answer.content

    with django(gate, form, pay if form in ("sync view", "framework") else pay_async), asyncio.Runner() as runner:
        check(work, lambda: runner.run(post()))
        runner.run(gate.aio.close())


def test_a_stream_of_django_begins_after_the_transaction_of_its_view(gate: Gate, monkeypatch: Any) -> None:
    """Without the guard it does so too. A cursor that was opened inside would end with the transaction."""
    seen: list[bool] = []

    def stream() -> Iterator[bytes]:
        seen.append(connections["default"].in_atomic_block)
        yield b"a"

    def pay(request: Any) -> StreamingHttpResponse:
        seen.append(connections["default"].in_atomic_block)
        return StreamingHttpResponse(stream())

    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
    with django(gate, "decorator", pay):
        assert Client().post("/", headers=HEADERS).status_code == 200
    connections.close_all()
    assert seen == [True, False]


def test_a_stream_of_flask_is_closed_once(gate: Gate) -> None:
    app, events = flask.Flask("shop"), list[str]()

    class Parts:
        def __iter__(self) -> Iterator[str]:
            yield "a"
            yield "b"

        def close(self) -> None:
            events.append("closed")

    @app.post("/")
    @flask_idempotent(gate, **OPTIONS)
    def pay() -> Any:
        response = flask.Response(Parts())
        response.call_on_close(lambda: events.append("called"))
        return response

    answer = app.test_client().post("/", headers=HEADERS)
    assert (answer.data, events) == (b"ab", [])
    answer.close()
    assert events == ["closed", "called"]


def test_a_request_of_flask_that_passes_streams_from_its_first_part(gate: Gate) -> None:
    """Only a guarded request waits for the first part."""
    app, work = flask.Flask("shop"), Work()

    @app.post("/")
    @flask_idempotent(gate, **OPTIONS)
    def pay() -> Any:
        return flask.Response(work.stream())

    body: Any = app(EnvironBuilder(method="POST").get_environ(), lambda *_: lambda _: None)
    assert work.runs == 0
    body.close()
