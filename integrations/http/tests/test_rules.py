"""The rules of the header, on every face and on real servers: what runs, what is refused, and what a retry gets."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable
from typing import Any
from uuid import UUID

import httpx
import pytest
from idemgate_http import Response, record_key
from idemgate_http.webhooks import GitHub

from integrations.http.tests.apps import Answer, Call
from integrations.http.tests.conftest import ESCAPED, FACES, QUOTED, Client, Effects, logged

pytestmark = pytest.mark.one_in(3)

Serve = Callable[..., Client]


def numbered(call: Call, number: int) -> Answer:
    """Return an answer that no other call gives."""
    body = json.dumps({"payment": number, "sent": call.body.decode("latin-1")}).encode()
    return Answer(body, 201, [("Content-Type", "application/json"), ("Location", f"/payments/{number}")])


@pytest.fixture
def effects() -> Effects:
    return Effects(numbered)


def problem(response: Any, name: str, status: int) -> dict[str, Any]:
    """Check a problem and return it."""
    found = response.json()
    assert (response.status_code, found["type"]) == (status, f"urn:idemgate:problem:{name}"), found
    assert response.headers["content-type"] == "application/problem+json"
    assert found["status"] == status
    assert found["title"]
    assert found["detail"]
    return dict(found)


def test_a_retry_gets_the_first_answer(serve: Serve, effects: Effects) -> None:
    client = serve(effects)
    first, second = client.post(), client.post()
    assert len(effects.calls) == 1
    assert first.status_code == second.status_code == 201
    assert first.content == second.content
    assert first.headers["location"] == second.headers["location"] == "/payments/1"
    assert second.headers["content-type"] == "application/json"
    assert second.headers["idempotent-replayed"] == "true"
    assert "idempotent-replayed" not in first.headers
    assert client.gate.counters["http.kept"] == client.gate.counters["http.replayed"] == 1


def test_the_app_gets_the_body_and_the_headers(serve: Serve, effects: Effects) -> None:
    client = serve(effects)
    body = b"\x00\xff" * 40_000
    client.post(content=body, headers={"x-more": "1"})
    (call,) = effects.calls
    assert (call.method, call.body) == ("POST", body)
    assert call.headers["x-more"] == "1"
    assert call.path.endswith("/pay")


@pytest.mark.parametrize("face", [face for face in FACES if face not in ("wsgi-wsgiref", "django-waitress")])
def test_a_chunked_body_is_read(serve: Serve, effects: Effects, face: str) -> None:
    client = serve(effects)
    first, second = (client.post(content=iter([b"a" * 1000, b"b" * 1000])) for _ in range(2))
    assert first.content == second.content
    assert effects.calls[0].body == b"a" * 1000 + b"b" * 1000
    problem(client.post(content=iter([b"c"])), "key-reused", 422)


def test_other_methods_and_requests_without_the_header_pass(serve: Serve, effects: Effects) -> None:
    client = serve(effects)
    for _ in range(2):
        assert client.post(None).status_code == 201
        assert client.send("PUT", "/pay", "k", None, content=b"x").status_code == 201
        assert client.send("GET", "/pay", "k", None).status_code == 201
    assert len(effects.calls) == 6
    assert not client.gate.counters["once.started"]


def test_a_preflight_passes_every_guard(serve: Serve, effects: Effects) -> None:
    """A browser sends it without the header, the account and a signature."""
    guards: list[dict[str, Any]] = [
        {"required": True, "methods": ["POST", "PUT", "PATCH", "DELETE"]},
        {"caller": None, "source": GitHub("s")},
    ]
    for options in guards:
        headers = {
            "x-account": None,
            "origin": "https://shop.example",
            "access-control-request-method": "POST",
            "access-control-request-headers": "content-type,idempotency-key",
        }
        assert serve(effects, **options).send("OPTIONS", "/pay", None, headers).status_code == 201
    assert [call.method for call in effects.calls] == ["OPTIONS", "OPTIONS"]


def test_a_patch_is_guarded_and_methods_are_an_option(serve: Serve, effects: Effects) -> None:
    client = serve(effects)
    for _ in range(2):
        client.send("PATCH", "/pay", "k", None, content=b"x")
    assert len(effects.calls) == 1
    client = serve(effects, methods=["DELETE"])
    for _ in range(2):
        client.send("DELETE", "/pay", "d", None)
        client.post("d")
    assert [call.method for call in effects.calls] == ["PATCH", "DELETE", "POST", "POST"]


def test_a_missing_header_is_refused_where_it_is_required(serve: Serve, effects: Effects) -> None:
    client = serve(effects, required=True)
    problem(client.post(None), "key-missing", 400)
    client = serve(effects, required=lambda request: request.path.endswith("/pay"))
    problem(client.post(None), "key-missing", 400)
    assert not effects.calls
    assert client.post(None, "/other").status_code == 201
    assert client.gate.counters["http.key_missing"] == 2


def test_a_malformed_header_is_refused(serve: Serve, effects: Effects) -> None:
    client = serve(effects)
    for value in (
        '"k', "a b", "k,l", '"k", "l"', "", '""', "x" * 256, '"k";', '"k";A=1', '"k" l', "k;a=1", "k\\", "'a b'",
    ):  # fmt: skip
        problem(client.post(value), "key-malformed", 400)
    assert not effects.calls


def test_quoted_and_bare_values_are_one_key(serve: Serve, effects: Effects) -> None:
    client = serve(effects)
    assert client.post("k-1").content == client.post('"k-1"').content
    assert client.post('"a \\"b\\" \\\\"').content == client.post('"a \\"b\\" \\\\"').content
    assert client.post("k-1").content == client.post('"k-1";a=1; b;c="x;y"').content  # parameters are ignored
    assert client.post("x" * 255).status_code == 201
    assert len(effects.calls) == 3


def test_two_headers_are_malformed(serve: Serve, effects: Effects) -> None:
    client = serve(effects)
    fields = [("x-account", "a"), ("idempotency-key", "k"), ("idempotency-key", "l")]
    problem(client.http.post(client.url + "/pay", headers=fields), "key-malformed", 400)


def test_another_payload_is_refused(serve: Serve, effects: Effects) -> None:
    client = serve(effects)
    client.post(content=b"1")
    problem(client.post(content=b"2"), "key-reused", 422)
    problem(client.post(path="/pay?a=1", content=b"1"), "key-reused", 422)
    assert client.post(content=b"1").headers["idempotent-replayed"] == "true"
    assert len(effects.calls) == 1


def test_the_media_type_is_part_of_the_payload(serve: Serve, effects: Effects) -> None:
    client = serve(effects)

    def send(kind: str | None) -> Any:
        return client.post(content=b"[1]", headers={"content-type": kind})

    send("application/json")
    for same in ("Application/JSON", 'application/json ; Charset="UTF-8"', "application/json;"):
        assert send(same).headers["idempotent-replayed"] == "true"
    for other in (
        "application/cbor", "application/json; charset=latin-1", "application/json; profile=p", None,
        "application/json; boundary=x", "application/json; strict",
    ):  # fmt: skip
        problem(send(other), "key-reused", 422)
    assert len(effects.calls) == 1


def test_the_boundary_is_part_of_the_payload(serve: Serve, effects: Effects) -> None:
    """One body is two forms under two boundaries."""
    client = serve(effects)

    def send(kind: str) -> Any:
        return client.post(
            content=b"--B\r\n\r\n1\r\n--A\r\n\r\n2\r\n--A--\r\n--B--\r\n", headers={"content-type": kind}
        )

    send("multipart/form-data; boundary=B")
    assert send('Multipart/Form-Data; Boundary="B"').headers["idempotent-replayed"] == "true"
    for other in ("A", "b"):
        problem(send(f"multipart/form-data; boundary={other}"), "key-reused", 422)
    assert len(effects.calls) == 1


def test_the_content_encoding_is_part_of_the_payload(serve: Serve, effects: Effects) -> None:
    client = serve(effects)

    def send(coding: str | None, key: str = "k") -> Any:
        return client.post(key, content=b"x", headers={"content-encoding": coding})

    send("gzip, br")
    assert send("GZip,br").headers["idempotent-replayed"] == "true"
    for other in ("gzip", "br, gzip", None):
        problem(send(other), "key-reused", 422)
    send(None, "l")
    problem(send("gzip", "l"), "key-reused", 422)
    assert len(effects.calls) == 2


def test_a_fingerprint_is_an_option(serve: Serve, effects: Effects) -> None:
    client = serve(effects, fingerprint=lambda request, body: json.loads(body)["amount"])
    first = client.post(content=b'{"amount": 1, "at": 5}')
    assert client.post(content=b'{"at": 6, "amount": 1}').content == first.content
    problem(client.post(content=b'{"amount": 2}'), "key-reused", 422)


def test_callers_methods_and_paths_have_their_own_keys(serve: Serve, effects: Effects) -> None:
    client = serve(effects)
    answers = [
        client.post(),
        client.post(headers={"x-account": "b"}),
        client.post(path="/refund"),
        client.send("PATCH", "/pay", "k", None, content=b"{}"),
    ]
    assert len(effects.calls) == len({answer.content for answer in answers}) == 4
    assert all("idempotent-replayed" not in answer.headers for answer in answers)


class Masked(str):
    """A token that keeps itself out of logs."""

    __slots__ = ()

    def __str__(self) -> str:
        return "Token(***)"


class MaskedId(UUID):
    def __str__(self) -> str:
        return "Id(***)"


def test_callers_of_two_types_have_their_own_keys(serve: Serve, effects: Effects) -> None:
    number, uuid = UUID(int=7), str(UUID(int=7))
    callers: list[Any] = [7, "7", number, uuid, "i1:7", "u36:" + uuid]
    callers += [Masked("anna"), Masked("bob"), MaskedId(int=8), MaskedId(int=9), "\ud800", "\udcc3\udca9", "é"]
    client = serve(effects, caller=lambda request: callers[int(request.headers["x-who"])])
    for _ in range(2):
        answers = [client.post(headers={"x-who": str(who)}).content for who in range(len(callers))]
        assert len(set(answers)) == len(callers)
    assert len(effects.calls) == len(callers)
    path = httpx.URL(client.url).path + "/pay"
    assert all(client.gate.inspect(record_key(caller, "POST", path, "k"), scope="http") for caller in callers)


def test_an_unknown_caller_is_refused(serve: Serve, effects: Effects) -> None:
    callers: list[Any] = [lambda request: None, lambda request: "", lambda request: request.headers["x-no"]]
    for caller in callers:
        problem(serve(effects, caller=caller).post(), "caller-unknown", 400)
    assert not effects.calls


def test_a_caller_function_that_fails_runs_nothing(serve: Serve, effects: Effects) -> None:
    callers: list[Any] = [lambda _: 1 / 0, lambda _: object(), lambda _: True, lambda _: 10**5000]
    for caller in callers:
        assert serve(effects, caller=caller).post().status_code == 500
    assert not effects.calls


def test_a_single_tenant_has_no_callers(serve: Serve, effects: Effects) -> None:
    client = serve(effects, caller=None, single_tenant=True)
    assert client.post(headers={"x-account": None}).content == client.post(headers={"x-account": "b"}).content


def test_a_large_body_is_refused_by_its_length_and_by_its_bytes(serve: Serve, effects: Effects, face: str) -> None:
    client = serve(effects, max_body_bytes=1000)
    assert client.post(content=b"x" * 1000).status_code == 201
    once = {"connection": "close"}  # a server may close the connection of a body that it has not read to its end
    problem(client.post(content=b"x" * 1001, headers=once), "body-too-large", 413)
    if "wsgiref" not in face and face != "django-waitress":
        problem(client.post("l", content=iter([b"x" * 600, b"x" * 600]), headers=once), "body-too-large", 413)
    assert client.post(None, content=b"x" * 2000).status_code == 201
    assert len(effects.calls) == 2


def test_other_statuses_release_the_key(serve: Serve) -> None:
    statuses = (400, 404, 409, 422, 429, 500, 503)
    effects = Effects(lambda call, number: Answer(b"%d" % number, int(call.path[-3:]) if number % 2 else 200))
    client = serve(effects)
    for number, status in enumerate(statuses):
        path = f"/{status}"
        first, second, third = (
            client.post(path=path),
            client.post(path=path, content=b"corrected"),
            client.post(path=path, content=b"corrected"),
        )
        assert (first.status_code, first.content) == (status, b"%d" % (2 * number + 1))
        assert (second.status_code, second.content) == (200, b"%d" % (2 * number + 2))
        assert third.content == second.content
    assert client.gate.counters["http.released"] == len(statuses)


def test_2xx_and_3xx_are_kept(serve: Serve) -> None:
    statuses = (200, 202, 204, 301, 303)

    def answer(call: Call, number: int) -> Answer:
        status = int(call.path[-3:])
        return Answer(b"" if status == 204 else b"x", status, [("Location", "/n")])

    effects = Effects(answer)
    client = serve(effects)
    for status in statuses:
        assert [client.post(path=f"/{status}").status_code for _ in range(2)] == [status, status]
    assert len(effects.calls) == len(statuses)


def test_chosen_client_errors_are_kept(serve: Serve) -> None:
    effects = Effects(lambda call, number: Answer(b"%d" % number, 404))
    client = serve(effects, keep_statuses=[404])
    first, second = client.post(), client.post()
    assert (second.status_code, second.content) == (404, b"1")
    assert first.content == second.content


def test_an_exception_releases_the_key(serve: Serve) -> None:
    def fail_first(call: Call, number: int) -> Answer:
        if number == 1:
            raise ZeroDivisionError("of the app")
        return Answer(b"ok")

    effects = Effects(fail_first)
    client = serve(effects)
    assert client.post().status_code == 500
    assert client.post().content == b"ok"
    assert len(effects.calls) == 2


@pytest.mark.parametrize("body", [b"short", b"longer than it says"])
def test_a_response_of_another_length_than_announced_releases_the_key(serve: Serve, body: bytes) -> None:
    # Given an app that breaks off in its first body
    def break_off_first(call: Call, number: int) -> Answer:
        return Answer(body, 201, [("Content-Length", "10")], length=False) if number == 1 else Answer(b"whole")

    effects = Effects(break_off_first)
    client = serve(effects)
    with contextlib.suppress(httpx.TransportError):  # some servers close the connection
        client.post()
    # When the client tries again
    answers = [client.post() for _ in range(2)]
    # Then it gets a whole response
    assert [answer.content for answer in answers] == [b"whole"] * 2
    assert len(effects.calls) == 2
    assert client.gate.counters["http.released"] == 1


def test_only_listed_headers_are_replayed(serve: Serve) -> None:
    headers = [
        ("Content-Type", "text/plain"), ("Content-Language", "de"), ("Content-Disposition", "inline"), ("ETag", '"e"'),
        ("Link", '</a>; rel="next"'), ("Location", "/l"), ("X-Cost", "3"), ("X-Request-Id", "r1"),
        ("Set-Cookie", "session=secret"), ("WWW-Authenticate", "Basic"), ("Authorization", "secret"),
        ("Cache-Control", "no-store"), ("CDN-Cache-Control", "no-store"), ("Surrogate-Control", "no-store"),
        ("X-Content-Type-Options", "nosniff"), ("Vary", "Accept"),
        ("Content-Security-Policy", "default-src 'none'"), ("Expires", "0"), ("Pragma", "no-cache"),
        ("X-Frame-Options", "DENY"), ("Referrer-Policy", "no-referrer"), ("Permissions-Policy", "camera=()"),
        ("Cross-Origin-Opener-Policy", "same-origin"), ("Cross-Origin-Embedder-Policy", "require-corp"),
        ("Cross-Origin-Resource-Policy", "same-origin"), ("X-Robots-Tag", "noindex"), ("Refresh", "0;url=/"),
        ("Content-Digest", "sha-256=:YQ==:"), ("Repr-Digest", "sha-256=:YQ==:"), ("Digest", "a=b"),
        ("Content-MD5", "a"), ("Content-Range", "bytes 0-0/5"),
    ]  # fmt: skip
    effects = Effects(lambda call, number: Answer(b"x", 200, headers))
    client = serve(effects, keep_headers=["X-Cost"])
    first, second = client.post(), client.post()
    client.http.cookies.clear()
    assert "secret" in first.headers["set-cookie"]
    kept = {name.lower(): value for name, value in [*headers[:7], *headers[11:]]}
    assert {name: second.headers.get(name) for name in kept} == kept
    for name in ("x-request-id", "set-cookie", "www-authenticate", "authorization"):
        assert name in first.headers
        assert name not in second.headers


def test_redact_changes_what_is_stored_only(serve: Serve) -> None:
    def redact(response: Response) -> Response:
        return Response(response.status, (*response.headers, ("Set-Cookie", "no")), b'{"card": "***"}')

    effects = Effects(lambda call, number: Answer(b'{"card": "4242"}', 201))
    client = serve(effects, redact=redact)
    first, second = client.post(), client.post()
    assert first.content == b'{"card": "4242"}'
    assert second.content == b'{"card": "***"}'
    assert "set-cookie" not in second.headers


@pytest.mark.parametrize("is_changed", [True, False])
def test_a_digest_of_another_body_is_not_stored(serve: Serve, is_changed: bool) -> None:
    """It would be wrong, and tells who can read the store when a guess of what `redact` removed is right."""
    headers = [("Content-Digest", "sha-256=:YQ==:"), ("ETag", '"e"')]
    effects = Effects(lambda call, number: Answer(b"4242", 201, headers))
    client = serve(
        effects, redact=lambda response: Response(response.status, response.headers, b"*" if is_changed else b"4242")
    )
    _, second = client.post(), client.post()
    assert (second.headers["etag"], "content-digest" in second.headers) == ('"e"', not is_changed)


def test_a_response_that_cannot_be_redacted_is_not_kept(serve: Serve, caplog: Any) -> None:
    effects = Effects(lambda call, number: Answer(b"card-4242", 201))
    client = serve(effects, redact=lambda response: response.nothing)
    assert client.post().content == b"card-4242"
    problem(client.post(), "response-not-kept", 409)
    assert client.gate.counters["http.redact_failed"] == 1
    assert "card-4242" not in caplog.text


def test_a_streamed_response_is_done_and_not_kept(serve: Serve) -> None:
    effects = Effects(lambda call, number: Answer(parts=[b"a" * 10, b"b" * 10, b"c"]))
    client = serve(effects)
    assert client.post().content == b"a" * 10 + b"b" * 10 + b"c"
    for _ in range(2):
        problem(client.post(), "response-not-kept", 409)
    assert len(effects.calls) == 1
    assert client.gate.counters["http.not_kept"] == 1
    assert client.gate.counters["http.response_not_kept"] == 2


def test_a_large_response_is_done_and_not_kept(serve: Serve) -> None:
    effects = Effects(lambda call, number: Answer(b"x" * int(call.path.rpartition("/")[2])))
    client = serve(effects, max_response_bytes=200_000)
    assert [client.post("fits", "/200000").content for _ in range(2)] == [b"x" * 200_000] * 2
    assert client.post("big", "/200001").content == b"x" * 200_001
    problem(client.post("big", "/200001"), "response-not-kept", 409)
    assert len(effects.calls) == 2


def test_a_streamed_error_releases_the_key(serve: Serve) -> None:
    effects = Effects(lambda call, number: Answer(parts=[b"a", b"b"], status=500))
    client = serve(effects)
    assert [client.post().content for _ in range(2)] == [b"ab"] * 2
    assert len(effects.calls) == 2


def test_a_copy_of_a_running_request_conflicts(serve: Serve) -> None:
    entered, leave = threading.Event(), threading.Event()

    def block(call: Call, number: int) -> Answer:
        entered.set()
        assert leave.wait(20)
        return Answer(b"done")

    effects = Effects(block)
    client = serve(effects)
    answers: list[Any] = []
    first = threading.Thread(target=lambda: answers.append(client.post()))
    first.start()
    assert entered.wait(20)
    conflict = client.post()
    leave.set()
    first.join()
    problem(conflict, "in-progress", 409)
    assert conflict.headers["retry-after"] == "1"
    assert client.post().content == answers[0].content == b"done"
    assert len(effects.calls) == 1


def test_concurrent_copies_run_once_and_may_wait(serve: Serve) -> None:
    copies = 12
    start = threading.Barrier(copies)
    effects = Effects(numbered)
    client = serve(effects, on_in_progress="wait", wait="20s")
    answers: list[Any] = []

    def send() -> None:
        start.wait()
        answers.append(client.post())

    threads = [threading.Thread(target=send) for _ in range(copies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(effects.calls) == 1
    assert {(answer.status_code, answer.content) for answer in answers} == {(201, answers[0].content)}
    assert sum("idempotent-replayed" in answer.headers for answer in answers) == copies - 1


def test_a_key_may_be_used_again_after_the_retention(serve: Serve, effects: Effects, clock: Any) -> None:
    client = serve(effects, retention="1h")
    client.post()
    clock.advance("59m")
    assert client.post().headers["idempotent-replayed"] == "true"
    clock.advance("2m")
    assert client.post(content=b"other").json()["payment"] == 2


def test_a_record_can_be_inspected_and_forgotten(serve: Serve, effects: Effects) -> None:
    client = serve(effects, scope="payments")
    client.post("k")
    key = record_key("a", "POST", httpx.URL(client.url).path + "/pay", "k")
    assert client.gate.inspect(key, scope="payments").state == "done"
    assert client.gate.forget(key, scope="payments")
    assert client.post("k").json()["payment"] == 2


def test_problems_have_the_configured_base(serve: Serve, effects: Effects) -> None:
    client = serve(effects, required=True, problem_base="https://api.example/problems/")
    assert client.post(None).json()["type"] == "https://api.example/problems/key-missing"


def test_a_path_adds_no_line_to_the_log(serve: Serve, caplog: Any) -> None:
    """A client chooses the path. It is decoded, so it may hold line ends and what a terminal acts on."""
    effects = Effects(lambda call, number: Answer(b"short", 201, [("Content-Length", "10")], length=False))
    client = serve(effects, redact=lambda response: response.nothing)
    with contextlib.suppress(httpx.TransportError):  # some servers close the connection
        client.post(path=f"/a{QUOTED}")
    effects._answer = lambda call, number: Answer(b"whole")
    client.post(path=f"/b{QUOTED}%0D%0A%C2%85")
    texts = logged(caplog)
    assert {text.split()[0] for text in texts} == {"http.wrong_length", "http.redact_failed"}
    assert all(ESCAPED in text for text in texts)


def test_no_secret_is_logged(serve: Serve, effects: Effects, caplog: Any) -> None:
    caplog.set_level("DEBUG", "idemgate")
    client = serve(effects)
    for body in (b"c4n4ry-body", b"c4n4ry-other"):
        client.post("c4n4ry-key", headers={"x-account": "c4n4ry-account"}, content=body)
    client.post('"c4n4ry', headers={"x-account": "c4n4ry-account"})
    assert "c4n4ry" not in caplog.text
