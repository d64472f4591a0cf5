"""Starlette and Litestar on real servers, and clients that give up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import httpx
import litestar
import pytest
from idemgate_http import IdempotencyKey
from litestar.response import Stream

from idemgate import Gate
from integrations.http.tests.apps import Answer, asgi_app
from tests.waiting import wait_until


def starlette_app(gate: Gate, events: list[str]) -> Any:
    from starlette.applications import Starlette
    from starlette.background import BackgroundTask
    from starlette.responses import JSONResponse, StreamingResponse
    from starlette.routing import Route

    async def pay(request: Any) -> Any:
        events.append("pay")
        return JSONResponse({"n": len(events)}, 201, background=BackgroundTask(lambda: events.append("background")))

    async def stream(request: Any) -> Any:
        events.append("stream")
        return StreamingResponse(iter([b"a", b"b"]))

    app = Starlette(routes=[Route("/pay", pay, methods=["POST"]), Route("/stream", stream, methods=["POST"])])
    app.add_middleware(IdempotencyKey, gate=gate, single_tenant=True)
    return app


def litestar_app(gate: Gate, events: list[str]) -> Any:
    from litestar.background_tasks import BackgroundTask
    from litestar.middleware import DefineMiddleware

    @litestar.post("/pay")
    async def pay() -> litestar.Response[dict[str, int]]:
        events.append("pay")
        return litestar.Response({"n": len(events)}, background=BackgroundTask(note))

    async def note() -> None:
        events.append("background")

    @litestar.post("/stream")
    async def stream() -> Stream:
        events.append("stream")
        return Stream(iter([b"a", b"b"]))

    return litestar.Litestar(
        [pay, stream], middleware=[DefineMiddleware(IdempotencyKey, gate=gate, single_tenant=True)]
    )


def strip(app: Any) -> Any:
    """Return an app that is mounted by its first path segment."""

    async def mounted(scope: Any, receive: Any, send: Any) -> None:
        path = "/" + scope["path"].split("/", 2)[2]
        await app(scope | {"path": path, "raw_path": path.encode()}, receive, send)

    return mounted


@pytest.mark.parametrize("build", [starlette_app, litestar_app])
@pytest.mark.parametrize("server", ["uvicorn", "hypercorn"])
def test_frameworks(mount: Callable[..., Any], gate: Gate, build: Any, server: str) -> None:
    events: list[str] = []
    client = mount(server, strip(build(gate, events)))
    first, second = client.post(), client.post()
    assert (first.status_code, first.json()) == (201, {"n": 1})
    assert (second.status_code, second.json()) == (201, {"n": 1})
    wait_until(lambda: len(events) > 1)  # the client has its response before the background task runs
    assert events == ["pay", "background"]
    assert client.post("s", "/stream").content == b"ab"
    assert client.post("s", "/stream").status_code == 409
    assert events == ["pay", "background", "stream"]


@pytest.mark.parametrize("server", ["uvicorn", "hypercorn"])
def test_a_client_that_gives_up_does_not_stop_its_request(mount: Callable[..., Any], gate: Gate, server: str) -> None:
    entered, leave, ended = threading.Event(), threading.Event(), threading.Event()

    def handler(call: Any) -> Answer:
        entered.set()
        assert leave.wait(20)
        ended.set()
        return Answer(b"paid")

    client = mount(server, IdempotencyKey(asgi_app(handler), gate=gate, single_tenant=True))
    with pytest.raises(httpx.ReadTimeout):
        client.post(timeout=0.2)
    assert entered.wait(20)  # on a busy machine after the client has gone
    leave.set()
    assert ended.wait(20)
    answer = client.post()
    while answer.status_code == 409:
        answer = client.post()
    assert (answer.content, answer.headers["idempotent-replayed"]) == (b"paid", "true")
