"""FastAPI: the dependency, its place in the OpenAPI document, and the order of the checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import httpx
import pytest
from fastapi import APIRouter, Depends, FastAPI, Form
from idemgate_http import IdempotencyKey
from idemgate_http.fastapi import RESPONSES, require_key
from pydantic import BaseModel

from idemgate import Gate
from integrations.http.tests.test_frameworks import strip


class Payment(BaseModel):
    amount: int


def build(gate: Gate, events: list[Any], **options: Any) -> FastAPI:
    app = FastAPI()
    app.add_middleware(IdempotencyKey, gate=gate, caller=lambda request: request.headers["x-account"], **options)

    @app.post("/payments", status_code=201, dependencies=[Depends(require_key)], responses=RESPONSES)
    async def pay(payment: Payment) -> dict[str, int]:
        events.append(payment.amount)
        return {"n": len(events)}

    @app.post("/blocking", status_code=201)
    def pay_blocking(payment: Payment, key: Annotated[str, Depends(require_key)]) -> dict[str, Any]:
        events.append(payment.amount)
        return {"n": len(events), "key": key}

    @app.post("/optional")
    async def optional(amount: Annotated[int, Form()]) -> dict[str, int]:
        events.append(amount)
        return {"n": len(events)}

    @app.put("/unguarded", dependencies=[Depends(require_key)])
    async def unguarded() -> None: ...

    return app


@pytest.mark.parametrize("server", ["uvicorn", "hypercorn"])
def test_a_route_that_requires_the_header(mount: Callable[..., Any], gate: Gate, server: str) -> None:
    events: list[Any] = []
    client = mount(server, strip(build(gate, events)))
    first, second = (client.post(path="/payments", json={"amount": 5}, content=None) for _ in range(2))
    assert (first.status_code, first.json(), second.content) == (201, {"n": 1}, first.content)
    assert second.headers["idempotent-replayed"] == "true"
    blocking = [client.post(path="/blocking", json={"amount": 6}, content=None).json() for _ in range(2)]
    assert blocking == [{"n": 2, "key": "k"}] * 2
    for path in ("/payments", "/blocking"):
        missing = client.post(None, path, json={"amount": 5}, content=None)
        assert (missing.status_code, missing.json()["type"]) == (400, "urn:idemgate:problem:key-missing")
        assert missing.headers["content-type"] == "application/problem+json"
        # The header is checked before the body
        assert client.post(None, path, json={"amount": "x"}, content=None).status_code == 400
        assert client.post("", path, json={"amount": 5}, content=None).status_code == 400
    assert events == [5, 6]
    assert gate.counters["http.key_missing"] == 4


def test_a_body_that_is_not_valid_releases_the_key(mount: Callable[..., Any], gate: Gate) -> None:
    events: list[Any] = []
    client = mount("uvicorn", strip(build(gate, events)))
    assert client.post(path="/payments", json={"amount": "x"}, content=None).status_code == 422
    assert client.post(path="/payments", json={"amount": 5}, content=None).status_code == 201


def test_a_route_that_does_not_require_the_header(mount: Callable[..., Any], gate: Gate) -> None:
    events: list[Any] = []
    client = mount("uvicorn", strip(build(gate, events)))
    assert [client.post("k", "/optional", data={"amount": 1}, content=None).json()["n"] for _ in range(2)] == [1, 1]
    assert [client.post(None, "/optional", data={"amount": 1}, content=None).json()["n"] for _ in range(2)] == [2, 3]


def test_the_same_form_has_other_bytes_in_each_multipart_body(mount: Callable[..., Any], gate: Gate) -> None:
    events: list[Any] = []
    client = mount("uvicorn", strip(build(gate, events)))
    answers = [client.post("k", "/optional", files={"amount": (None, "1")}, content=None) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 422]
    assert answers[1].json()["type"] == "urn:idemgate:problem:key-reused"


def test_the_openapi_document_has_the_header_and_the_problems(gate: Gate) -> None:
    paths = build(gate, []).openapi()["paths"]
    for path in ("/payments", "/blocking"):
        (parameter,) = paths[path]["post"]["parameters"]
        assert (parameter["name"], parameter["in"], parameter["required"]) == ("Idempotency-Key", "header", True)
        assert parameter["description"]
    responses = paths["/payments"]["post"]["responses"]
    assert {*responses} == {"201", "400", "409", "413", "422", "503"}
    assert "application/problem+json" in responses["409"]["content"]
    assert "parameters" not in paths["/optional"]["post"]


def test_a_router_may_require_the_header(mount: Callable[..., Any], gate: Gate) -> None:
    app = FastAPI()
    app.add_middleware(IdempotencyKey, gate=gate, single_tenant=True)
    router = APIRouter(dependencies=[Depends(require_key)], responses=RESPONSES)

    @router.post("/a")
    async def a() -> None: ...

    app.include_router(router)
    assert mount("uvicorn", strip(app)).post(None, "/a").status_code == 400


@pytest.mark.parametrize("guards", [1, 2])
def test_a_route_of_a_mounted_app_may_require_the_header(mount: Callable[..., Any], gate: Gate, guards: int) -> None:
    # Given an app inside of an app, which answers 500 to each exception itself
    inner, outer = FastAPI(), FastAPI()
    outer.mount("/v1", inner)
    for app in (outer, inner)[:guards]:
        app.add_middleware(IdempotencyKey, gate=gate, single_tenant=True)

    @inner.post("/payments", dependencies=[Depends(require_key)])
    async def pay() -> str:
        return "paid"

    client = mount("uvicorn", strip(outer))
    # When a request has no header, it gets the problem
    missing = client.post(None, "/v1/payments")
    assert (missing.status_code, missing.json()["type"]) == (400, "urn:idemgate:problem:key-missing")
    assert gate.counters["http.key_missing"] == 1
    assert client.post("k", "/v1/payments").json() == "paid"


async def test_a_route_that_no_middleware_guards_fails(gate: Gate) -> None:
    transport = httpx.ASGITransport(build(gate, []))
    async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
        with pytest.raises(RuntimeError, match="PUT '/unguarded' depends on require_key, but no IdempotencyKey guards"):
            await client.put("/unguarded", headers={"idempotency-key": "k"})


async def test_the_error_of_an_unguarded_route_has_no_control_characters_of_the_path(gate: Gate) -> None:
    app = FastAPI()

    @app.post("/{name:path}", dependencies=[Depends(require_key)])
    async def pay(name: str) -> None: ...

    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
        with pytest.raises(RuntimeError, match="depends on require_key") as raised:
            await client.post("/a%1B%5B31m%E2%80%A8ERROR forged%C2%85")
    assert str(raised.value).isprintable()


async def test_a_route_on_a_path_to_which_the_middleware_does_not_apply_fails(gate: Gate) -> None:
    # Given a middleware that does not apply to a route that requires the header
    events: list[Any] = []
    app = build(gate, events, applies_to=lambda request: request.path != "/payments")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://shop") as client:
        # When a request has the header
        with pytest.raises(RuntimeError, match="POST '/payments' depends on require_key, but no IdempotencyKey guards"):
            await client.post("/payments", json={"amount": 5}, headers={"idempotency-key": "k", "x-account": "a"})
    # Then it does not run unguarded
    assert events == []
