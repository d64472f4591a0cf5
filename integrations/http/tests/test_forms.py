"""Forms and bodies that something reads before a decorated view, as CSRF checks do."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Iterator
from typing import Any

import flask
import pytest
from django.http import HttpResponse, RawPostDataException
from django.test import Client, override_settings
from django.urls import re_path
from idemgate_http.django import idempotent
from idemgate_http.flask import idempotent as flask_idempotent

from idemgate import Gate
from integrations.http.tests.apps import REST, setup_django

setup_django()
with override_settings(REST_FRAMEWORK=REST):
    from rest_framework.decorators import api_view, parser_classes, permission_classes
    from rest_framework.parsers import FormParser, MultiPartParser
    from rest_framework.permissions import BasePermission

MULTIPART = "multipart/form-data; boundary=B"
EMPTY = b"--B--\r\n"
CHUNKED = {"wsgi.input_terminated": True, "HTTP_TRANSFER_ENCODING": "chunked"}
Send = Callable[..., tuple[int, bytes]]


def part(headers: bytes, content: bytes = b"data") -> bytes:
    """Return a multipart body of one part."""
    return b'--B\r\nContent-Disposition: form-data; name="f"' + headers + b"\r\n\r\n" + content + b"\r\n--B--\r\n"


class Early:
    """What reads a request before the view: by default its form. `runs` is what the view did."""

    def reset(self) -> None:
        self.runs: list[str] = []
        self.read: Callable[[Any], object] = lambda request: request.POST.get("token")

    def __call__(self, get_response: Any) -> Any:
        def middleware(request: Any) -> Any:
            self.read(request)
            return get_response(request)

        return middleware


early = Early()


def read_early(get_response: Any) -> Any:
    """The middleware of Django that reads the request."""
    return early(get_response)


class Reads(BasePermission):
    """The permission of Django REST framework that reads the request."""

    def has_permission(self, request: Any, view: Any) -> bool:
        early.read(request)
        return True


def build_flask(gate: Gate) -> Send:
    app = flask.Flask("shop")
    app.testing = True
    early.read = lambda request: request.form.get("token")

    @app.before_request
    def read() -> None:
        early.read(flask.request)

    @app.post("/")
    @flask_idempotent(gate, single_tenant=True)
    def pay() -> str:
        early.runs.append("ran")
        return ",".join(file.content_type for file in flask.request.files.values())

    def send(body: bytes, content_type: str = MULTIPART, **environ: Any) -> tuple[int, bytes]:
        answer = app.test_client().post(
            "/", input_stream=io.BytesIO(body), content_type=content_type, headers={"Idempotency-Key": "k"},
            environ_overrides=environ or {"CONTENT_LENGTH": str(len(body))},
        )  # fmt: skip
        return answer.status_code, answer.data

    return send


def build_django(gate: Gate, *, framework: bool = False) -> Send:
    def pay(request: Any) -> HttpResponse:
        early.runs.append("ran")
        return HttpResponse(",".join(f"{file.content_type}{file.charset or ''}" for file in request.FILES.values()))

    guarded: Any = idempotent(gate=gate, single_tenant=True)(pay)
    if framework:
        early.read = lambda request: request.data
        for decorator in (permission_classes([Reads]), parser_classes([MultiPartParser, FormParser])):
            guarded = decorator(guarded)
        guarded = api_view(["POST"])(guarded)
    urls = type("Urls", (), {"urlpatterns": [re_path("", guarded)]})

    def send(body: bytes, content_type: str = MULTIPART) -> tuple[int, bytes]:
        middleware = [] if framework else [f"{__name__}.read_early"]
        with override_settings(ROOT_URLCONF=urls, MIDDLEWARE=middleware, IDEMGATE_HTTP={}, REST_FRAMEWORK=REST):
            answer: Any = Client().generic("POST", "/", body, content_type, headers={"Idempotency-Key": "k"})
        return answer.status_code, answer.content

    return send


BUILD: dict[str, Callable[[Gate], Send]] = {
    "flask": build_flask,
    "django": build_django,
    "framework": lambda gate: build_django(gate, framework=True),
}


@pytest.fixture(params=BUILD)
def send(request: pytest.FixtureRequest, gate: Gate) -> Iterator[Send]:
    """`send(body, content_type)`: status and body of the answer to a request whose form was read before the view."""
    early.reset()
    return BUILD[request.param](gate)


def test_the_type_of_a_file_is_part_of_the_payload(send: Send) -> None:
    def file(kind: bytes) -> bytes:
        return part(b'; filename="a"\r\nContent-Type: ' + kind)

    kinds = (b"text/csv", b"text/html", b"text/csv; charset=latin-1", b"text/csv; header=absent")
    answers = [send(file(kind)) for kind in kinds]
    assert [status for status, _ in answers] == [200, 422, 422, 422]
    assert send(file(b"text/csv")) == answers[0] == (200, b"text/csv")
    assert early.runs == ["ran"]


def test_a_client_may_build_a_form_again(send: Send) -> None:
    """Another boundary is no other form, once it is parsed."""
    body = part(b"")
    assert send(body)[0] == send(body.replace(b"--B", b"--A"), MULTIPART.replace("=B", "=A"))[0] == 200
    assert early.runs == ["ran"]


def test_a_form_without_fields_runs_once(send: Send) -> None:
    assert [send(EMPTY)[0] for _ in range(2)] == [200, 200]
    assert send(part(b""))[0] == 422
    assert early.runs == ["ran"]


@pytest.mark.parametrize("body", [b"one", part(b"")])
def test_a_body_that_was_read_before_its_form_is_an_error(send: Send, body: bytes) -> None:
    """The form is empty then, whatever was in the body."""

    def read(request: Any) -> object:
        return (request.stream if isinstance(request, flask.Request) else request).read(), form(request)

    form, early.read = early.read, read
    with pytest.raises((RuntimeError, RawPostDataException), match="read"):
        send(body)
    assert early.runs == []


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_was_read_from_the_stream_of_flask_is_an_error(gate: Gate, chunked: bool) -> None:
    early.reset()
    send = build_flask(gate)
    early.read = lambda request: request.stream.read()
    with pytest.raises(RuntimeError, match="the body of POST '/' was read before the guard"):
        send(b"one", "text/plain", **(CHUNKED if chunked else {}))
    assert early.runs == []


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("content_type", ["text/plain", "application/json"])
@pytest.mark.parametrize("how", ["get_data", "form"])
@pytest.mark.parametrize("body", [b"", b"one"])
def test_a_body_that_flask_still_has_is_read(
    gate: Gate, chunked: bool, content_type: str, how: str, body: bytes
) -> None:
    early.reset()
    send = build_flask(gate)
    early.read = lambda request: request.get_data() if how == "get_data" else request.form.get("token")
    environ = CHUNKED if chunked else {"wsgi.input_terminated": True}
    assert [send(found, content_type, **environ)[0] for found in (body, body, b"two")] == [200, 200, 422]
    assert early.runs == ["ran"]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_a_hook_of_flask_unpacks_is_read(gate: Gate, chunked: bool) -> None:
    early.reset()
    send = build_flask(gate)

    def unpack(request: Any) -> None:
        request.stream = gzip.GzipFile(fileobj=request.stream)

    early.read = unpack
    environ = CHUNKED if chunked else {}
    packed = [gzip.compress(body) for body in (b"1", b"1", b"2")]
    assert [send(body, "application/json", **environ)[0] for body in packed] == [200, 200, 422]
    assert early.runs == ["ran"]
