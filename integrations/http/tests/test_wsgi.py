"""What is particular to WSGI: iterables, `write`, `exc_info`, inputs; and Flask."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import flask
import pytest
from idemgate_http.flask import idempotent
from idemgate_http.wsgi import IdempotencyKeyWSGI, read_environ

from idemgate import Gate
from integrations.http.tests.conftest import ESCAPED, FORGED, QUOTED, logged

OPTIONS: dict[str, Any] = {"single_tenant": True}


def environ(body: bytes = b"", key: str | None = "k", **more: Any) -> dict[str, Any]:
    found = {
        "REQUEST_METHOD": "POST", "SCRIPT_NAME": "", "PATH_INFO": "/pay", "QUERY_STRING": "",
        "CONTENT_LENGTH": str(len(body)), "wsgi.input": io.BytesIO(body),
    }  # fmt: skip
    return found | ({} if key is None else {"HTTP_IDEMPOTENCY_KEY": key}) | more


class Reply:
    """What a server gets from an app."""

    def __init__(self, app: Any, given: dict[str, Any]) -> None:
        self.starts: list[Any] = []
        self.written: list[bytes] = []
        iterable = app(given, self.start_response)
        try:
            self.body = b"".join([*self.written, *iterable])
        finally:
            if hasattr(iterable, "close"):
                iterable.close()

    def start_response(self, status: str, headers: Any, exc_info: Any = None) -> Any:
        self.starts.append((status, headers, exc_info))
        return self.written.append

    @property
    def status(self) -> str:
        return str(self.starts[-1][0])


class Iterable:
    """An iterable without a length, which counts how often it is closed."""

    def __init__(self, *parts: bytes) -> None:
        self.parts = iter(parts)
        self.closed = 0

    def __iter__(self) -> Iterator[bytes]:
        return self.parts

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("length", ["4", None])
def test_an_iterable_is_closed_once_after_the_response(gate: Gate, length: str | None) -> None:
    made = Iterable(b"ab", b"cd")

    def app(given: Any, start_response: Any) -> Any:
        start_response("200 OK", [("Content-Length", length)] if length else [])
        return made

    guarded = IdempotencyKeyWSGI(app, gate=gate, **OPTIONS)
    assert Reply(guarded, environ()).body == b"abcd"
    assert made.closed == 1
    assert Reply(guarded, environ()).status == ("200 OK" if length else "409 Conflict")
    assert made.closed == 1


def _middleware(gate: Gate, runs: list[bytes]) -> Any:
    def app(given: Any, start_response: Any) -> Any:
        runs.append(given["wsgi.input"].read())
        start_response("200 OK", [])
        return [b"ran"]

    return IdempotencyKeyWSGI(app, gate=gate, **OPTIONS)


def _decorated(gate: Gate, runs: list[bytes]) -> Any:
    app = flask.Flask("shop")

    @app.post("/pay")
    @idempotent(gate, **OPTIONS)
    def pay() -> str:
        runs.append(flask.request.get_data())
        return "ran"

    return app


@pytest.mark.parametrize(("build", "status"), [(_middleware, "400 Bad Request"), (_decorated, "400 BAD REQUEST")])
def test_a_body_that_is_shorter_than_announced_is_refused(gate: Gate, build: Any, status: str) -> None:
    runs: list[bytes] = []
    server = {"SERVER_NAME": "shop", "SERVER_PORT": "80", "wsgi.url_scheme": "http"}
    reply = Reply(build(gate, runs), environ(b"half", CONTENT_LENGTH="8", **server))
    assert reply.status == status
    assert json.loads(reply.body)["type"] == "urn:idemgate:problem:body-incomplete"
    assert gate.counters["http.body_incomplete"] == 1
    assert runs == []


@pytest.mark.parametrize("length", ["abc", "-5", "1.5", "\u0663"])
def test_a_length_that_is_no_number_is_refused(gate: Gate, length: str) -> None:
    runs: list[bytes] = []
    reply = Reply(_middleware(gate, runs), environ(b"body", CONTENT_LENGTH=length))
    assert (reply.status, runs) == ("400 Bad Request", [])


def test_a_server_sees_that_a_body_is_one_part(gate: Gate) -> None:
    """`wsgiref` and others then add a Content-Length that the app did not send."""

    def app(given: Any, start_response: Any) -> Any:
        start_response("200 OK", [])
        return [b"ab", b"cd"]

    body: Any = IdempotencyKeyWSGI(app, gate=gate, **OPTIONS)(environ(), lambda *_: lambda _: None)
    assert (len(body), [*body]) == (1, [b"abcd"])


def test_a_stream_is_passed_on_part_by_part(gate: Gate) -> None:
    produced: list[bytes] = []

    def produce() -> Iterator[bytes]:
        for part in (b"a", b"b", b"c"):
            produced.append(part)
            yield part

    def app(given: Any, start_response: Any) -> Any:
        start_response("200 OK", [])
        return produce()

    body = iter(IdempotencyKeyWSGI(app, gate=gate, **OPTIONS)(environ(), lambda *_: lambda _: None))
    assert produced == []
    assert next(body) == b"a"
    assert produced == [b"a"]


def test_a_large_iterable_is_read_to_the_limit_only(gate: Gate) -> None:
    produced: list[int] = []

    class Sized:
        def __len__(self) -> int:
            return 10

        def __iter__(self) -> Iterator[bytes]:
            for number in range(10):
                produced.append(number)
                yield b"x" * 100

    def app(given: Any, start_response: Any) -> Any:
        start_response("200 OK", [])
        return Sized()

    guarded = IdempotencyKeyWSGI(app, gate=gate, max_response_bytes=250, **OPTIONS)
    body = iter(guarded(environ(), lambda *_: lambda _: None))
    assert produced == [0, 1, 2]
    assert len(b"".join(body)) == 1000


def test_a_generator_app_starts_its_response_in_its_first_step(gate: Gate) -> None:
    def app(given: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [("Content-Length", "2")])
        yield b"ab"

    guarded = IdempotencyKeyWSGI(app, gate=gate, **OPTIONS)
    assert [Reply(guarded, environ()).body for _ in range(2)] == [b"ab", b"ab"]


def test_what_was_written_comes_before_what_is_returned(gate: Gate) -> None:
    def app(given: Any, start_response: Any) -> Any:
        write = start_response("200 OK", [])
        write(b"ab")
        return [b"cd"]

    guarded = IdempotencyKeyWSGI(app, gate=gate, **OPTIONS)
    assert [Reply(guarded, environ()).body for _ in range(2)] == [b"abcd", b"abcd"]


def test_exc_info_replaces_a_response_that_is_not_sent(gate: Gate) -> None:
    def app(given: Any, start_response: Any) -> Any:
        start_response("200 OK", [])
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            start_response("500 Broken", [], sys.exc_info())
        return [b"sorry"]

    guarded = IdempotencyKeyWSGI(app, gate=gate, **OPTIONS)
    reply = Reply(guarded, environ())
    assert (reply.status, reply.body) == ("500 Broken", b"sorry")
    assert gate.counters["http.released"] == 1


def test_exc_info_inside_a_stream_reaches_the_server(gate: Gate) -> None:
    def app(given: Any, start_response: Any) -> Iterator[bytes]:
        start_response("200 OK", [])
        yield b"a"
        try:
            raise ZeroDivisionError
        except ZeroDivisionError:
            start_response("500 Broken", [], sys.exc_info())
        yield b"b"

    reply = Reply(IdempotencyKeyWSGI(app, gate=gate, **OPTIONS), environ())
    assert [start[0] for start in reply.starts] == ["200 OK", "500 Broken"]
    assert reply.starts[1][2][0] is ZeroDivisionError


def test_a_second_start_without_exc_info_is_an_error_of_the_app(gate: Gate) -> None:
    def app(given: Any, start_response: Any) -> Any:
        start_response("200 OK", [])
        start_response("200 OK", [])
        return []

    with pytest.raises(AssertionError, match="twice"):
        Reply(IdempotencyKeyWSGI(app, gate=gate, **OPTIONS), environ())


@pytest.mark.parametrize("body", [[], [b""], (b"a", b"b")])
def test_an_app_that_never_starts_its_response_releases_its_key(gate: Gate, body: Any) -> None:
    closed = Iterable(*body)
    guarded = IdempotencyKeyWSGI(lambda given, start_response: closed, gate=gate, **OPTIONS)
    with pytest.raises(RuntimeError, match="start_response"):
        Reply(guarded, environ())
    assert closed.closed == 1
    assert gate.counters["http.released"] == 1


def test_an_exception_inside_the_iterable_closes_it_and_releases_the_key(gate: Gate) -> None:
    class Failing(Iterable):
        def __iter__(self) -> Iterator[bytes]:
            yield b"a"
            raise ZeroDivisionError

    made = Failing()

    def app(given: Any, start_response: Any) -> Any:
        start_response("200 OK", [("Content-Length", "2")])
        return made

    with pytest.raises(ZeroDivisionError):
        Reply(IdempotencyKeyWSGI(app, gate=gate, **OPTIONS), environ())
    assert made.closed == 1


def echo(given: Any, start_response: Any) -> Any:
    body = given["wsgi.input"].read(int(given["CONTENT_LENGTH"] or 0))
    start_response("200 OK", [])
    return [body]


class Trickle(io.BytesIO):
    """An input whose reads return a few bytes each, as a socket's may."""

    def read(self, size: int | None = -1) -> bytes:
        assert size is not None
        assert size > 0, "a server may wait for ever for the end of its input"
        return super().read(min(size, 3))


def test_the_input_is_read_to_its_length_and_no_further(gate: Gate) -> None:
    guarded = IdempotencyKeyWSGI(echo, gate=gate, **OPTIONS)
    source = Trickle(b"0123456789 of the next request")
    assert Reply(guarded, environ(**{"wsgi.input": source, "CONTENT_LENGTH": "10"})).body == b"0123456789"
    assert source.tell() == 10


def test_a_chunked_input_is_read_where_the_server_marks_its_end(gate: Gate) -> None:
    guarded = IdempotencyKeyWSGI(echo, gate=gate, **OPTIONS)
    chunked = {"wsgi.input": Trickle(b"0123456789"), "CONTENT_LENGTH": "", "wsgi.input_terminated": True}
    assert Reply(guarded, environ(**chunked)).body == b"0123456789"
    unmarked = {"wsgi.input": Trickle(b"0123456789"), "CONTENT_LENGTH": ""}
    assert Reply(guarded, environ(None or b"", "l", **unmarked)).body == b""


def test_a_body_that_is_cut_off_runs_nothing(gate: Gate) -> None:
    guarded = IdempotencyKeyWSGI(echo, gate=gate, **OPTIONS)
    assert Reply(guarded, environ(b"12345", CONTENT_LENGTH="10")).status == "400 Bad Request"
    assert gate.counters["once.started"] == 0


def test_paths_are_decoded_as_in_asgi() -> None:
    encoded = {"SCRIPT_NAME": "/caf\u00c3\u00a9", "PATH_INFO": "/\u00ff", "CONTENT_TYPE": "text/plain"}
    request = read_environ(environ(**encoded))
    assert request.path == "/caf\u00e9/\udcff"
    assert request.headers["content-type"] == "text/plain"


# Flask


def flask_app(gate: Gate, events: list[Any]) -> flask.Flask:
    app = flask.Flask("shop")

    @app.before_request
    def authenticate() -> None:
        flask.g.account = flask.request.headers.get("x-account")

    @app.after_request
    def add_cookie(response: flask.Response) -> flask.Response:
        response.set_cookie("session", "secret")
        return response

    @app.post("/pay")
    @idempotent(gate, caller=lambda request: flask.g.account)
    def pay() -> Any:
        events.append((flask.g.account, flask.request.get_json(silent=True), flask.request.form.to_dict()))
        return {"n": len(events)}, 201, {"Location": f"/p/{len(events)}"}

    @app.post("/fail")
    @idempotent(gate, caller=lambda request: flask.g.account)
    def fail() -> Any:
        events.append("fail")
        flask.abort(404)

    @app.post("/stream")
    @idempotent(gate, caller=lambda request: flask.g.account)
    def stream() -> Any:
        events.append("stream")
        return flask.Response(iter([b"a", b"b"]))

    return app


def strip(app: Any) -> Any:
    """Return an app that is mounted by its first path segment."""

    def mounted(given: Any, start_response: Any) -> Any:
        given["PATH_INFO"] = "/" + given["PATH_INFO"].split("/", 2)[2]
        return app(given, start_response)

    return mounted


def test_a_view_of_flask(mount: Callable[..., Any], gate: Gate) -> None:
    events: list[Any] = []
    client = mount("waitress", strip(flask_app(gate, events)))
    first, second = client.post(json={"a": 1}, content=None), client.post(json={"a": 1}, content=None)
    assert (second.status_code, second.json(), second.headers["location"]) == (201, {"n": 1}, "/p/1")
    assert first.content == second.content
    assert events == [("a", {"a": 1}, {})]
    client.post("f", data={"b": "2"}, content=None)
    assert events[1] == ("a", None, {"b": "2"})
    assert client.post("g", headers={"x-account": None}).status_code == 400
    assert client.post("h", headers={"x-account": "b"}).json() == {"n": 3}
    assert [client.post(path="/fail").status_code for _ in range(2)] == [404, 404]
    assert events[3:] == ["fail", "fail"]
    assert [client.post("s", "/stream").status_code for _ in range(2)] == [200, 409]
    assert events[5:] == ["stream"]


def test_a_whole_app_of_flask(mount: Callable[..., Any], gate: Gate) -> None:
    events: list[Any] = []
    app = flask_app(gate, events)
    # the middleware answers first, and the decorators of the views pass on
    app.wsgi_app = IdempotencyKeyWSGI(app.wsgi_app, gate=gate, **OPTIONS)  # type: ignore[method-assign]
    client = mount("waitress", strip(app))
    first, second = client.post(json={"a": 1}, content=None), client.post(json={"a": 1}, content=None)
    assert first.content == second.content
    assert "set-cookie" in first.headers
    assert "set-cookie" not in second.headers
    assert len(events) == 1
    assert [client.post("s", "/stream").status_code for _ in range(2)] == [200, 409]


@pytest.mark.parametrize("how", ["abort", "error handler", "redirect", "other status"])
def test_the_response_of_flask_to_an_exception_of_a_view_is_kept(gate: Gate, how: str) -> None:
    app, runs = flask.Flask("shop"), list[str]()

    class NoFunds(Exception):
        pass

    @app.errorhandler(NoFunds)
    def answer(error: NoFunds) -> Any:
        return {"error": "no funds"}, 402

    @app.post("/pay")
    @idempotent(gate, **OPTIONS, keep_statuses=[402, 409])
    def pay() -> Any:
        runs.append(how)
        if how == "error handler":
            raise NoFunds
        flask.abort(flask.redirect("/card", 303) if how == "redirect" else 409 if how == "abort" else 404)

    answers = [app.test_client().post("/pay", headers={"Idempotency-Key": "k"}) for _ in range(2)]
    status = {"redirect": 303, "other status": 404, "abort": 409, "error handler": 402}[how]
    assert [answer.status_code for answer in answers] == [status, status]
    assert answers[0].data == answers[1].data
    assert len(runs) == (2 if how == "other status" else 1)
    assert answers[1].headers.get("location") == ("/card" if how == "redirect" else None)


def test_an_exception_that_flask_does_not_handle_frees_the_key(gate: Gate) -> None:
    app, runs = flask.Flask("shop"), list[int]()

    @app.post("/pay")
    @idempotent(gate, **OPTIONS)
    def pay() -> Any:
        runs.append(1)
        raise LookupError("no account")

    app.testing = True
    with pytest.raises(LookupError, match="no account"):
        app.test_client().post("/pay", headers={"Idempotency-Key": "k"})
    app.testing = False
    assert app.test_client().post("/pay", headers={"Idempotency-Key": "k"}).status_code == 500
    assert len(runs) == 2


@pytest.mark.parametrize(
    ("event", "headers", "end"),
    [
        ("record_failed", {}, ": ZeroDivisionError"),
        ("redact_failed", {}, ": ZeroDivisionError"),
        ("wrong_length", {"Content-Length": "10"}, ""),
    ],
)
def test_a_path_adds_no_line_to_the_log_of_a_view_of_flask(
    gate: Gate, caplog: Any, event: str, headers: Any, end: str
) -> None:
    app, runs = flask.Flask("shop"), list[str]()

    class Odd(flask.Response):
        automatically_set_content_length = False

        def get_data(self, as_text: bool = False) -> Any:
            if event == "record_failed":
                raise ZeroDivisionError(f"of the response{FORGED}")
            return super().get_data(as_text)

    def redact(response: Any) -> Any:
        raise ZeroDivisionError(f"of redact{FORGED}")

    @idempotent(gate, redact=redact if event == "redact_failed" else None, **OPTIONS)
    def pay() -> Any:
        runs.append(event)
        return Odd("short", 201, headers)

    def post() -> int:
        with app.test_request_context(f"/pay{QUOTED}", method="POST", headers={"Idempotency-Key": "k"}):
            return flask.make_response(pay()).status_code

    assert post() == 201
    assert logged(caplog) == [f"http.{event} method=POST path=/pay{ESCAPED}{end}"]
    # A wrong length means that the view broke off, so its key is free
    assert (post(), len(runs)) == ((201, 2) if event == "wrong_length" else (409, 1))


@pytest.mark.skipif(flask.Request.max_content_length.fset is None, reason="Flask 3.0 has one limit for all requests")
def test_no_more_of_a_chunked_body_is_read_than_a_view_of_flask_may_get(gate: Gate) -> None:
    app, chunks = flask.Flask("shop"), io.BytesIO(b"x" * 10_000_000)

    @app.post("/pay")
    @idempotent(gate, **OPTIONS, max_body_bytes=1000)
    def pay() -> Any:
        raise AssertionError("with a body that is too large")

    headers = {"Idempotency-Key": "k", "Transfer-Encoding": "chunked"}
    environ = {"wsgi.input_terminated": True}
    answer = app.test_client().post("/pay", input_stream=chunks, headers=headers, environ_overrides=environ)
    assert (answer.status_code, answer.json["type"]) == (413, "urn:idemgate:problem:body-too-large")
    assert chunks.tell() < 100_000


@pytest.mark.parametrize("multipart", [False, True])
def test_a_form_of_flask_that_was_read_before_the_guard_has_a_fingerprint(gate: Gate, multipart: bool) -> None:
    """Extensions for CSRF read the form in `before_request`. Then Flask has no bytes of the body any more."""
    # Given an app that reads the form before the decorated view
    app, events = flask.Flask("shop"), list[Any]()

    @app.before_request
    def check_token() -> None:
        assert flask.request.form["token"] == "t"

    @app.post("/pay")
    @idempotent(gate, **OPTIONS)
    def pay() -> Any:
        events.append((flask.request.form["amount"], [file.read() for file in flask.request.files.values()]))
        return {"n": len(events)}, 201

    def post(amount: str, file: bytes = b"f") -> int:
        data = {"amount": amount, "token": "t"} | ({"file": (io.BytesIO(file), "f.txt")} if multipart else {})
        return app.test_client().post("/pay", data=data, headers={"Idempotency-Key": "k"}).status_code

    # When the form is sent, sent again, and sent with another amount or file under its key
    assert [post("5"), post("5"), post("500")] == [201, 201, 422]
    assert not multipart or post("5", b"g") == 422
    # Then the view ran once, with the whole form
    assert events == [("5", [b"f"] if multipart else [])]


def test_a_body_of_flask_that_was_read_as_a_stream_before_the_guard_is_an_error(gate: Gate) -> None:
    app = flask.Flask("shop")
    app.testing = True

    @app.before_request
    def read() -> None:
        flask.request.stream.read()

    @app.post("/pay")
    @idempotent(gate, **OPTIONS)
    def pay() -> Any:
        raise AssertionError("without its body")

    with pytest.raises(RuntimeError, match="the body of POST '/pay' was read before the guard"):
        app.test_client().post("/pay", data=b"5", headers={"Idempotency-Key": "k"})
