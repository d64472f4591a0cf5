"""FastAPI: a dependency that requires the header, and puts it and the problems into the OpenAPI document.

app.add_middleware(IdempotencyKey, gate=gate, caller=...)

@app.post("/payments", dependencies=[Depends(require_key)], responses=RESPONSES)
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from fastapi import Depends, Header
from starlette.requests import Request

from idemgate_http.core import HEADER, MARK, MISSING, PASSED, RequiredKeyMissing
from idemgate_http.keys import MOST_CHARACTERS
from idemgate_http.problems import BASE, PROBLEMS

__all__ = ["RESPONSES", "require_key"]


def _check_middleware(request: Request) -> None:
    """Raise RequiredKeyMissing, which the middleware answers with 400. FastAPI itself would answer with 422.

    It runs before FastAPI validates the header and the body, because it is a dependency of `require_key`.
    """
    passed = request.scope.get(MARK)
    if passed == PASSED and HEADER not in request.headers:
        request.scope[MARK] = MISSING
        raise RequiredKeyMissing
    if passed is None or passed == PASSED:
        raise RuntimeError(
            f"{request.method} {request.url.path!r} depends on require_key, but no IdempotencyKey guards it. Add the "
            "middleware to the app, with this method in its `methods` and this path in its `applies_to`"
        )


def require_key(
    _checked: Annotated[None, Depends(_check_middleware)],
    key: Annotated[
        str,
        Header(
            alias="Idempotency-Key",
            min_length=1,
            description="A value that is unique to the operation, the same at each retry: a string in quotes, or bare. "
            f"At most {MOST_CHARACTERS} printable ASCII characters.",
            examples=['"8e03978e-40d5-43dd-bc93-6894a57f9324"'],
        ),
    ],
) -> str:
    """Require the header Idempotency-Key, and return it as it was sent.

    A request without it gets the 400 problem. Use it as `Depends(require_key)` on a route, a router or the app.

    Raises:
        RuntimeError: the middleware does not guard this app, this method or this path.
    """
    return key


def _describe(*names: str) -> dict[str, Any]:
    """Return the OpenAPI description of problems with one status."""
    examples = {
        name: {"value": {"type": BASE + name, "title": problem.title, "status": problem.status}}
        for name in names
        for problem in [PROBLEMS[name]]
    }
    schema = {
        "type": "object",
        "properties": {
            "type": {"type": "string", "format": "uri-reference"},
            "title": {"type": "string"},
            "status": {"type": "integer"},
            "detail": {"type": "string"},
        },
    }
    text = "; ".join(PROBLEMS[name].title for name in names)
    return {"description": text, "content": {"application/problem+json": {"schema": schema, "examples": examples}}}


RESPONSES: Final[dict[int | str, dict[str, Any]]] = {
    400: _describe("key-missing", "key-malformed", "caller-unknown"),
    409: _describe("in-progress", "response-not-kept"),
    413: _describe("body-too-large"),
    422: _describe("key-reused"),
    503: _describe("store-unavailable"),
}
"""The answers of the middleware, for `responses=` of a route, a router or the app.

The description of 422 replaces that of FastAPI's validation errors. Leave it out to keep the other one.
"""
