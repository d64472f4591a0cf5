"""Requests that try to pass a guard: unsigned webhooks, odd methods, and paths below a mounted app."""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import time
from typing import Any

import flask
import httpx
import pytest
from fastapi import FastAPI, Request
from idemgate_http import IdempotencyKey, Response, is_verified
from idemgate_http.asgi import read_scope
from idemgate_http.flask import idempotent
from idemgate_http.webhooks import GitHub, Stripe
from idemgate_http.wsgi import IdempotencyKeyWSGI

from idemgate import Gate
from tests.for_each import for_each

pytestmark = pytest.mark.one_in(3)

SECRET = "whsec_test"
EVENT = json.dumps({"id": "evt_1", "object": "event"})


def sign(body: str) -> dict[str, str]:
    at = int(time.time())
    signature = hmac.new(SECRET.encode(), f"{at}.{body}".encode(), hashlib.sha256).hexdigest()
    return {"Stripe-Signature": f"t={at},v1={signature}"}


def fastapi_app(gate: Gate, ran: list[bool]) -> Any:
    """A shop whose two middlewares are added as the README shows, the one for webhooks first, so inside."""
    app = FastAPI()
    app.add_middleware(
        IdempotencyKey, gate=gate, source=Stripe(SECRET), applies_to=lambda request: request.path == "/hooks/stripe"
    )
    app.add_middleware(IdempotencyKey, gate=gate, caller=lambda request: request.headers["x-account"])

    @app.api_route("/hooks/stripe", methods=["POST", "PUT", "PATCH"])
    async def hook(request: Request) -> dict[str, bool]:
        ran.append(is_verified(request.scope))
        return {"ok": True}

    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop")


def flask_app(gate: Gate, ran: list[bool]) -> Any:
    """The same in Flask, with a decorated view inside the middleware."""
    app = flask.Flask("shop")

    @app.route("/hooks/stripe", methods=["POST", "PUT", "PATCH"])
    @idempotent(gate, source=Stripe(SECRET))
    def hook() -> Any:
        ran.append(is_verified(flask.request.environ))
        return flask.jsonify(ok=True)

    app.wsgi_app = IdempotencyKeyWSGI(  # type: ignore[method-assign]
        app.wsgi_app, gate=gate, caller=lambda request: request.headers["x-account"]
    )
    return httpx.Client(transport=httpx.WSGITransport(app), base_url="http://shop")


async def answer(given: Any) -> Any:
    return await given if hasattr(given, "__await__") else given


@pytest.mark.parametrize("build", [fastapi_app, flask_app])
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH"])
@pytest.mark.parametrize("headers", [{}, {"Idempotency-Key": "x", "X-Account": "anna"}], ids=["plain", "with a key"])
async def test_no_unsigned_event_reaches_the_app(gate: Gate, build: Any, method: str, headers: dict[str, str]) -> None:
    ran: list[bool] = []
    client = build(gate, ran)
    refused = await answer(client.request(method, "/hooks/stripe", content=EVENT, headers=headers))
    assert (refused.status_code, ran) == (400, [])
    # And a signed one does, once, and the app sees that it was verified
    for _ in range(2):
        found = await answer(client.request(method, "/hooks/stripe", content=EVENT, headers=headers | sign(EVENT)))
        assert found.status_code == 200
    assert ran == [True]


def call(app: Any, **more: Any) -> tuple[str, list[tuple[str, str]], bytes]:
    starts: list[Any] = []
    environ = {
        "REQUEST_METHOD": "POST", "SCRIPT_NAME": "", "PATH_INFO": "/pay", "QUERY_STRING": "", "CONTENT_LENGTH": "0",
        "HTTP_IDEMPOTENCY_KEY": "k", "wsgi.input": io.BytesIO(),
    }  # fmt: skip
    body = b"".join(app({**environ, **more}, lambda *start: starts.append(start)))
    return starts[-1][0], starts[-1][1], body


def test_a_method_in_lower_case_is_guarded(gate: Gate) -> None:
    ran: list[str] = []

    def app(environ: Any, start_response: Any) -> Any:
        ran.append(environ["REQUEST_METHOD"])
        start_response("201 Created", [("content-length", "2")])
        return [b"ok"]

    guarded = IdempotencyKeyWSGI(app, gate=gate, single_tenant=True)
    for method in ("post", "POST", "Post"):
        assert call(guarded, REQUEST_METHOD=method)[0] == "201 Created"
    assert ran == ["post"]


class Lengthless:
    """An iterable without a length, as the closing iterator of Werkzeug is."""

    def __init__(self, *parts: bytes) -> None:
        self._parts = parts

    def __iter__(self) -> Any:
        return iter(self._parts)


@pytest.mark.parametrize("parts", [(), (b"",)])
@pytest.mark.parametrize("line", ["204 No Content", "304 Not Modified"])
def test_a_response_without_a_body_is_kept(gate: Gate, line: str, parts: tuple[bytes, ...]) -> None:
    def app(environ: Any, start_response: Any) -> Any:
        start_response(line, [])
        return Lengthless(*parts)

    guarded = IdempotencyKeyWSGI(app, gate=gate, single_tenant=True)
    assert call(guarded)[::2] == (line, b"")
    status, headers, body = call(guarded)
    assert (status, body) == (line, b"")
    assert ("idempotent-replayed", "true") in headers


@pytest.mark.parametrize(
    "redact",
    [
        lambda response: None,
        lambda response: {"status": 200},
        lambda response: Response(200, (), "text"),
        lambda response: Response(200, {"a": "b"}, b""),
        lambda response: Response(500, (), b""),
    ],
)
def test_a_redact_function_that_returns_no_response_repeats_nothing(gate: Gate, redact: Any) -> None:
    ran: list[int] = []

    def app(environ: Any, start_response: Any) -> Any:
        ran.append(1)
        start_response("201 Created", [("content-length", "2")])
        return [b"ok"]

    guarded = IdempotencyKeyWSGI(app, gate=gate, single_tenant=True, redact=redact)
    assert call(guarded)[0] == "201 Created"
    assert call(guarded)[0] == "409 Conflict"
    assert ran == [1]
    assert (gate.counters["http.kept"], gate.counters["http.redact_failed"]) == (0, 1)


@for_each(
    ("root", "path", "whole"),
    [
        ("", "/pay", "/pay"), ("/v1", "/v1/pay", "/v1/pay"), ("/v1", "/pay", "/v1/pay"), ("/v1/", "/pay", "/v1/pay"),
        ("/pay", "/payments", "/pay/payments"), ("/v1", "/v1", "/v1"), ("/v1", "/v10/x", "/v1/v10/x"),
    ],
)  # fmt: skip
def test_the_path_has_the_prefix_of_a_mounted_app(root: str, path: str, whole: str) -> None:
    scope = {"type": "http", "method": "post", "root_path": root, "path": path, "headers": []}
    request = read_scope(scope)
    assert (request.path, request.method) == (whole, "POST")


async def test_the_webhook_guards_of_two_providers_verify_the_events_of_their_own_paths(gate: Gate) -> None:
    # Given an app with a guard for each of two providers
    ran: list[bool] = []
    app = FastAPI()
    for source in (GitHub(SECRET), Stripe(SECRET)):
        path = f"/hooks/{source.name}"
        app.add_middleware(
            IdempotencyKey, gate=gate, source=source, applies_to=lambda request, path=path: request.path == path
        )

    @app.post("/hooks/{name}")
    async def hook(name: str, request: Request) -> None:
        ran.append(is_verified(request.scope))

    # When each provider sends its signed event, and an event comes by another path
    github = {"X-Hub-Signature-256": f"sha256={hmac.new(SECRET.encode(), EVENT.encode(), 'sha256').hexdigest()}"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
        await client.post("/hooks/github", content=EVENT, headers=github | {"X-GitHub-Delivery": "d1"})
        await client.post("/hooks/stripe", content=EVENT, headers=sign(EVENT))
        await client.post("/hooks/other", content=EVENT, headers=sign(EVENT))
    # Then the view sees which ones were verified
    assert ran == [True, True, False]
