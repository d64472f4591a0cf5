"""Options are checked before the first request."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from idemgate_http import IdempotencyKey
from idemgate_http.webhooks import CloudEvents, GitHub
from idemgate_http.wsgi import IdempotencyKeyWSGI

from idemgate import Gate, InvalidArgument
from tests.for_each import for_each


async def app(scope: Any, receive: Any, send: Any) -> None: ...


async def async_caller(request: Any) -> str:
    return "a"


@for_each(
    ("options", "name"),
    [
        ({}, "caller"),
        ({"caller": None}, "caller"),
        ({"caller": str, "single_tenant": True}, "caller"),
        ({"caller": "x-account"}, "caller"),
        ({"caller": async_caller}, "caller"),
        ({"single_tenant": "yes"}, "single_tenant"),
        ({"source": GitHub("s"), "caller": str}, "source"),
        ({"source": GitHub("s"), "single_tenant": True}, "source"),
        ({"source": "github"}, "source"),
        ({"source": CloudEvents()}, "caller"),
        *[({"keep_statuses": [each]}, "keep_statuses") for each in (100, 199, 408, 425, 429, 500, 600, "404", True)],
        ({"keep_statuses": 404}, "keep_statuses"),
        *[({"keep_headers": [each]}, "keep_headers") for each in ("Set-Cookie", "authorization", "TE", "")],
        ({"keep_headers": "x-cost"}, "keep_headers"),
        *[({"methods": [name]}, "methods") for name in ("GET", "head", "post", "PO ST", "OPTIONS")],
        ({"methods": "POST"}, "methods"),
        ({"methods": []}, "methods"),
        ({"max_body_bytes": -1}, "max_body_bytes"),
        ({"max_body_bytes": "1MiB"}, "max_body_bytes"),
        ({"max_response_bytes": 1 << 40}, "max_response_bytes"),
        ({"required": "yes"}, "required"),
        ({"applies_to": "/pay"}, "applies_to"),
        ({"fingerprint": "body"}, "fingerprint"),
        ({"redact": 1}, "redact"),
        ({"on_in_progress": "skip"}, "on_in_progress"),
        ({"on_store_error": "ignore"}, "on_store_error"),
        ({"retention": "soon"}, "retention"),
        ({"lease": 0}, "lease"),
        ({"wait": "x"}, "wait"),
        ({"retry_after": 0}, "retry_after"),
        ({"problem_base": ""}, "problem_base"),
        ({"shield": None}, "shield"),
        ({"grace": -1}, "grace"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"scope": ""}, "scope"),
    ],
)  # fmt: skip
def test_an_invalid_option_is_refused(gate: Gate, options: dict[str, Any], name: str) -> None:
    given = options if {"caller", "single_tenant", "source"} & {*options} or not options else {"caller": str} | options
    with pytest.raises(InvalidArgument) as refused:
        IdempotencyKey(app, gate=gate, **given)
    assert refused.value.name == name


def test_an_unknown_option_and_one_of_another_face_are_refused(gate: Gate) -> None:
    with pytest.raises(TypeError, match="'retries'"):
        IdempotencyKey(app, gate=gate, single_tenant=True, retries=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'shield'"):
        IdempotencyKeyWSGI(app, gate=gate, single_tenant=True, shield=True)  # type: ignore[arg-type, call-arg]


@pytest.mark.parametrize("caller", ["a", 7, UUID(int=7)])
def test_a_caller_is_text_a_number_or_a_uuid(gate: Gate, caller: object) -> None:
    from idemgate_http import Headers, Request

    core = IdempotencyKey(app, gate=gate, caller=lambda request: caller)._core
    selected = core.select(Request("POST", "/", b"", Headers([("idempotency-key", "k")]), None))
    assert selected is not None
    assert getattr(selected, "caller") == caller  # noqa: B009
