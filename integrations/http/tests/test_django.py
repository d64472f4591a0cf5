"""What is particular to Django: transactions, settings, the decorator, and views that are async."""

from __future__ import annotations

import asyncio
import json
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from asgiref.sync import markcoroutinefunction, sync_to_async
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.db import connections, transaction
from django.http import Http404, HttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import RequestFactory, override_settings
from django.urls import re_path
from django.utils.decorators import method_decorator
from django.views import View
from idemgate_http import IdempotencyKey
from idemgate_http.django import IdempotencyKeyMiddleware, idempotent
from idemgate_http.wsgi import IdempotencyKeyWSGI

from idemgate import Gate, InvalidArgument
from idemgate.testing import Clock
from integrations.http.tests.apps import MIDDLEWARE, Answer, django_app, setup_django
from integrations.http.tests.wire import post as wire_post

SHOP = Path(__file__).with_name("shop.py")
setup_django()


# Transactions and crashes, in a process with a database


@pytest.fixture(scope="module")
def shop(store: str) -> Iterator[Callable[..., Any]]:
    """`shop(namespace, now, database, form, kill)`: the answer to a request, or None if its process was killed."""
    command = [sys.executable, "-W", "error", str(SHOP), store]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        lines, answers = process.stdin, process.stdout

        def send(*words: object, kill: str = "never") -> Any:
            print(*words, kill, file=lines, flush=True)
            code, returned = json.loads(answers.readline())
            assert code == (0 if kill == "never" else -9)
            return returned

        yield send
        lines.close()


@pytest.mark.parametrize(
    ("kill", "payments", "replayed"), [("inside", 1, False), ("between", 2, False), ("after", 1, True)]
)
@pytest.mark.parametrize("form", ["middleware", "decorator"])
def test_no_crash_loses_a_payment_of_a_key_that_is_done(
    shop: Any, gate: Gate, clock: Clock, tmp_path: Path, form: str, kill: str, payments: int, replayed: bool
) -> None:
    """The commit comes before the completion. Between the two is the window in which a retry pays again."""
    database = tmp_path / "shop.sqlite"

    def send(kill: str = "never") -> Any:
        return shop(gate.namespace, clock.microseconds() / 1_000_000, database, form, kill=kill)

    assert send(kill) is None
    clock.advance("31s")  # the lease of the process that was killed ends
    status, _, is_replay = send()
    assert (status, is_replay) == (201, replayed)
    with closing(sqlite3.connect(database)) as connection:
        assert connection.execute("SELECT count(*) FROM payments").fetchone() == (payments,)
    assert send()[2] is True


# The decorator, in this process


@pytest.fixture
def configure(gate: Gate) -> Iterator[Callable[..., None]]:
    """`configure(retention="1h")`: the setting IDEMGATE_HTTP of this test."""
    active: list[Any] = []

    def enable(**options: Any) -> None:
        given = {"GATE": gate, "SINGLE_TENANT": True} | {name.upper(): value for name, value in options.items()}
        override = override_settings(IDEMGATE_HTTP=given)
        override.enable()
        active.append(override)

    yield enable
    for override in active:
        override.disable()


def post(key: str | None = "k", body: bytes = b"{}") -> Any:
    headers = {} if key is None else {"idempotency-key": key}
    return RequestFactory().post("/pay", body, content_type="application/json", headers=headers)


def test_a_decorated_view(configure: Any, gate: Gate) -> None:
    configure(required=True)
    calls: list[Any] = []

    @idempotent
    def pay(request: Any, account: str) -> HttpResponse:
        calls.append(account)
        return HttpResponse(f"{len(calls)}", status=201, headers={"Location": "/1"})

    assert [pay(post(), "a").content for _ in range(2)] == [b"1", b"1"]
    assert pay(post(), account="a")["location"] == "/1"
    assert pay(post(None), "a").status_code == 400
    assert pay(RequestFactory().get("/pay"), "a").content == b"2"


def test_options_of_the_decorator_replace_those_of_the_setting(configure: Any, gate: Gate) -> None:
    configure(required=True, keep_statuses=[404])

    @idempotent(required=False, scope="other")
    def pay(request: Any) -> HttpResponse:
        return HttpResponse(status=404)

    assert pay(post(None)).status_code == 404
    assert "idempotent-replayed" in [pay(post()) for _ in range(2)][1].headers
    assert gate.counters["once.done"] == 1


@pytest.mark.parametrize("error", [Http404, ZeroDivisionError])
def test_an_exception_of_a_view_releases_its_key(configure: Any, error: Any) -> None:
    configure()
    calls: list[int] = []

    @idempotent
    def pay(request: Any) -> HttpResponse:
        calls.append(1)
        raise error

    for _ in range(2):
        with pytest.raises(error):
            pay(post())
    assert len(calls) == 2


def test_a_template_is_stored_when_it_is_rendered(configure: Any) -> None:
    configure()
    numbers = iter(range(10))
    template = engines["django"].from_string("{{ number }}") if "django" in engines else None
    assert template is not None

    @idempotent
    def pay(request: Any) -> TemplateResponse:
        return TemplateResponse(request, template, {"number": next(numbers)})

    assert pay(post()).render().content == b"0"
    assert pay(post()).content == b"0"


def test_views_keep_their_attributes_and_their_own_transactions(configure: Any) -> None:
    configure()
    seen: list[bool] = []

    @idempotent
    @transaction.non_atomic_requests
    def pay(request: Any) -> HttpResponse:
        seen.append(connections["default"].in_atomic_block)
        return HttpResponse()

    pay.csrf_exempt = True  # type: ignore[attr-defined]
    with override_atomic():
        pay(post())
        assert seen == [False]
        assert idempotent(lambda request: seen.append(connections["default"].in_atomic_block) or HttpResponse())(
            post("l")
        )
        assert seen == [False, True]
        # a request that passes has its transaction, too
        idempotent(lambda request: seen.append(connections["default"].in_atomic_block) or HttpResponse())(post(None))
        assert seen == [False, True, True]


def test_a_guarded_view_is_exempted_from_transactions(configure: Any) -> None:
    configure()
    seen: list[bool] = []

    def pay(request: Any) -> HttpResponse:
        seen.append(connections["default"].in_atomic_block)
        return HttpResponse()

    with override_atomic():
        transaction.non_atomic_requests(idempotent(pay))(post())
        assert seen == [False]
        transaction.non_atomic_requests(using="other")(idempotent(pay))(post("l"))
        assert seen == [False, True]


def test_a_class_based_view(configure: Any) -> None:
    configure()
    seen: list[bool] = []

    class Pay(View):
        def post(self, request: Any) -> HttpResponse:
            seen.append(connections["default"].in_atomic_block)
            return HttpResponse(f"{len(seen)}")

    guarded = idempotent(Pay.as_view())
    with override_atomic():
        assert [guarded(post()).content for _ in range(2)] == [b"1", b"1"]
    assert seen == [True]


async def test_an_async_class_based_view(configure: Any, gate: Gate) -> None:
    configure()

    class Pay(View):
        async def post(self, request: Any) -> HttpResponse:
            return HttpResponse("ok")

    guarded = idempotent(Pay.as_view())
    assert "idempotent-replayed" in [await guarded(post()) for _ in range(2)][1].headers
    await gate.aio.close()


class override_atomic:  # noqa: N801 - a context manager
    def __enter__(self) -> None:
        connections.settings["default"]["ATOMIC_REQUESTS"] = True

    def __exit__(self, *_: object) -> None:
        connections.settings["default"]["ATOMIC_REQUESTS"] = False
        connections.close_all()


def test_a_method_inside_the_transaction_of_its_request_is_refused(configure: Any) -> None:
    configure()

    @idempotent
    def pay(request: Any) -> HttpResponse:
        return HttpResponse("paid")

    # Given the transaction that Django began around the view, of which a decorated method is a part
    with override_atomic():
        with transaction.atomic(), pytest.raises(RuntimeError, match=r"idemgate.*non_atomic_requests"):
            pay(post())
        # Then nothing was stored
        assert pay(post()).content == b"paid"


@pytest.mark.parametrize("place", ["middleware", "wrapped", "both", "outside"])
@pytest.mark.parametrize("is_async", [False, True])
async def test_the_inner_one_of_two_guards_passes_on_inside_a_transaction(
    configure: Any, gate: Gate, place: str, is_async: bool
) -> None:
    configure()
    seen: list[bool] = []

    class Pay(View):
        @method_decorator(idempotent)
        def post(self, request: Any) -> HttpResponse:
            seen.append(connections["default"].in_atomic_block)
            return HttpResponse(f"{len(seen)}", status=201, headers={"content-length": "1"})

    # Given ATOMIC_REQUESTS, and a guard around the transaction of a method that has one of its own
    view = idempotent(Pay.as_view()) if place in ("wrapped", "both") else Pay.as_view()
    urls = type("Urls", (), {"urlpatterns": [re_path("", view)]})
    middleware = [MIDDLEWARE] if place in ("middleware", "both") else []
    with override_atomic(), override_settings(ROOT_URLCONF=urls, MIDDLEWARE=middleware):
        app: Any = ASGIHandler() if is_async else WSGIHandler()
        if place == "outside":
            guard: Any = IdempotencyKey if is_async else IdempotencyKeyWSGI
            app = guard(app, gate=gate, single_tenant=True)
        transport = httpx.ASGITransport(app) if is_async else httpx.WSGITransport(app)
        # When a request is sent twice, and once without the header
        answers = [
            await handle(transport, httpx.Request("POST", "http://shop/", headers=headers))
            for headers in ({"idempotency-key": "k"}, {"idempotency-key": "k"}, {})
        ]
    # Then each runs once, in a transaction
    assert answers == [(201, b"1", None), (201, b"1", "true"), (201, b"2", None)]
    assert seen == [True, True]
    await gate.aio.close()


async def handle(transport: Any, request: httpx.Request) -> Any:
    """Return status, body and mark of an answer."""
    if isinstance(transport, httpx.AsyncBaseTransport):
        answer = await transport.handle_async_request(request)
        await answer.aread()
    else:
        answer = await asyncio.to_thread(transport.handle_request, request)
        answer.read()
    return answer.status_code, answer.content, answer.headers.get("idempotent-replayed")


@pytest.mark.parametrize("is_async", [False, True])
async def test_a_method_behind_a_decorator_that_hides_it_fails_with_the_fix(configure: Any, is_async: bool) -> None:
    configure()

    def hide(func: Any) -> Any:
        def call(*args: Any) -> Any:
            return func(*args)

        return markcoroutinefunction(call) if is_async else call

    class Pay(View):
        @idempotent
        @hide
        def post(self, request: Any) -> None: ...

    with pytest.raises(InvalidArgument, match=r"(?s)call.*a Pay in the place of the request.*method_decorator"):
        answer = Pay().post(post())
        await answer


def test_a_view_that_raises_rolls_back(configure: Any) -> None:
    configure()

    @idempotent
    def pay(request: Any) -> HttpResponse:
        with connections["default"].cursor() as cursor:
            cursor.execute("CREATE TABLE IF NOT EXISTS rolled (id INTEGER)")
        raise ZeroDivisionError

    with override_atomic():
        with pytest.raises(ZeroDivisionError):
            pay(post())
        assert "rolled" not in connections["default"].introspection.table_names()


async def test_an_async_view(configure: Any, gate: Gate) -> None:
    configure()
    calls: list[int] = []

    @idempotent
    async def pay(request: Any) -> HttpResponse:
        await asyncio.sleep(0)
        calls.append(1)
        return HttpResponse(f"{len(calls)}")

    assert [(await pay(post())).content for _ in range(2)] == [b"1", b"1"]
    await gate.aio.close()


@pytest.mark.parametrize("shield", [True, False])
async def test_an_async_view_whose_request_is_cancelled(configure: Any, gate: Gate, shield: bool) -> None:
    configure(shield=shield)
    entered, leave = asyncio.Event(), asyncio.Event()
    ends: list[str] = []

    @idempotent
    async def pay(request: Any) -> HttpResponse:
        entered.set()
        try:
            await leave.wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise
        ends.append("paid")
        return HttpResponse("paid")

    request = asyncio.create_task(pay(post()))
    await entered.wait()
    request.cancel()
    await asyncio.wait([request])
    leave.set()
    async with asyncio.timeout(20):
        while not ends or (retry := await pay(post())).status_code == 409:
            await asyncio.sleep(0.001)
    assert ends[0] == ("paid" if shield else "cancelled")
    assert ("idempotent-replayed" in retry.headers) is shield
    await gate.aio.close()


@pytest.mark.parametrize("around", ["middleware", "asgi"])
def test_a_client_that_gives_up_does_not_stop_an_async_view(
    mount: Callable[..., Any], gate: Gate, around: str, configure: Any
) -> None:
    """Django cancels an async view when its client disconnects. The view goes on, with threads of its own."""
    entered, leave = threading.Event(), threading.Event()
    threads: list[int] = []

    def handler(call: Any) -> Answer:
        entered.set()
        assert leave.wait(20)
        return Answer(b"paid")

    name = f"async-gives-up-{around}"
    options = {"gate": gate, "single_tenant": True}
    if around == "middleware":
        app = django_app(name, handler, options, awaiting=True)
    else:
        with override_settings(MIDDLEWARE=[]):
            app = IdempotencyKey(django_app(name, handler, options, awaiting=True), **options)  # type: ignore[arg-type]
    client = mount("uvicorn", app, name)
    with pytest.raises(httpx.ReadTimeout):
        client.post(timeout=0.3)
    assert entered.wait(20)  # on a busy machine after the client has gone
    leave.set()
    answer = client.post()
    while answer.status_code == 409:
        answer = client.post()
    assert (answer.content, answer.headers["idempotent-replayed"]) == (b"paid", "true")
    assert threads == []


async def test_a_view_may_use_the_database_after_its_client_has_gone(configure: Any, gate: Gate) -> None:
    """`ThreadSensitiveContext` of the request has ended by then."""
    configure()
    from asgiref.sync import ThreadSensitiveContext

    entered, leave = asyncio.Event(), asyncio.Event()
    rows: list[Any] = []

    def query() -> None:
        with connections["default"].cursor() as cursor:
            rows.append(cursor.execute("SELECT 1").fetchone())
        connections.close_all()

    @idempotent
    async def pay(request: Any) -> HttpResponse:
        await sync_to_async(query)()
        entered.set()
        await leave.wait()
        await sync_to_async(query)()
        return HttpResponse("paid")

    async def serve() -> None:
        async with ThreadSensitiveContext():
            await pay(post())

    request = asyncio.create_task(serve())
    await entered.wait()
    request.cancel()
    await asyncio.wait([request])
    leave.set()
    async with asyncio.timeout(20):
        while (retry := await pay(post())).status_code == 409:
            await asyncio.sleep(0.001)
    assert (retry.content, rows) == (b"paid", [(1,), (1,)])
    await gate.aio.close()


# Settings and limits


def account_of(request: Any) -> str:
    return "a"


def test_a_setting_may_name_functions_and_the_gate(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    import types

    module = types.ModuleType("shop_settings")
    module.gate, module.account_of = gate, account_of  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shop_settings", module)
    with override_settings(IDEMGATE_HTTP={"GATE": "shop_settings.gate", "CALLER": "shop_settings.account_of"}):
        guarded = IdempotencyKeyMiddleware(lambda request: HttpResponse("ok"))
    assert [guarded(post()).content for _ in range(2)] == [b"ok", b"ok"]
    assert gate.counters["http.replayed"] == 1


@pytest.mark.parametrize(
    ("given", "name"),
    [({}, "caller"), (["GATE"], "IDEMGATE_HTTP"), ({"CALLER": str, "GATE": 5}, "gate"), ({"RETENTION": 0}, "caller")],
)
def test_an_invalid_setting_is_refused_at_the_start(given: Any, name: str) -> None:
    with override_settings(IDEMGATE_HTTP=given), pytest.raises(InvalidArgument) as refused:
        IdempotencyKeyMiddleware(lambda request: HttpResponse())
    assert refused.value.name == name


def test_an_unknown_setting_is_refused_at_the_start(configure: Any) -> None:
    configure(retries=3)
    with pytest.raises(TypeError, match="retries"):
        IdempotencyKeyMiddleware(lambda request: HttpResponse())


def test_the_limit_of_django_for_bodies_is_answered_with_413(configure: Any) -> None:
    configure()
    guarded = IdempotencyKeyMiddleware(lambda request: HttpResponse())
    with override_settings(DATA_UPLOAD_MAX_MEMORY_SIZE=10):
        assert guarded(post(body=b"x" * 11)).status_code == 413


@pytest.mark.parametrize("is_async", [False, True])
async def test_two_query_strings_of_raw_utf_8_are_two_payloads(configure: Any, gate: Gate, is_async: bool) -> None:
    configure()

    def buy(request: Any) -> HttpResponse:
        return HttpResponse("bought " + request.GET["item"])

    # Given Django behind a server that passes on a query string as the client sent it
    urls = type("Urls", (), {"urlpatterns": [re_path("", buy)]})
    with override_settings(ROOT_URLCONF=urls, MIDDLEWARE=[MIDDLEWARE]):
        app: Any = ASGIHandler() if is_async else WSGIHandler()
        # When one key is sent with two items of the same length, which are not percent-encoded
        answers = [await send_raw(app, item, is_async) for item in ("日本", "東京", "日本")]
    # Then the second is another payload
    assert [status for status, _ in answers] == [200, 422, 200]
    assert [body for status, body in answers if status == 200] == ["bought 日本".encode()] * 2
    await gate.aio.close()


async def send_raw(app: Any, item: str, is_async: bool) -> tuple[int, bytes]:
    """Return status and body of the answer to a query string of raw UTF-8."""
    query = f"item={item}".encode()
    if is_async:
        wire = await wire_post(app, path="/", query_string=query)
        return wire.status, wire.body
    environ, statuses = post().environ | {"QUERY_STRING": query.decode("latin-1")}, list[str]()
    parts = await asyncio.to_thread(app, environ, lambda status, _: statuses.append(status))
    return int(statuses[0][:3]), b"".join(parts)


def test_fields_of_one_name_are_joined_in_a_replay(configure: Any, gate: Gate) -> None:
    from idemgate_http.django import _ADAPTER
    from idemgate_http.response import Response

    built = _ADAPTER.build(post(), Response(200, (("link", "<a>"), ("link", "<b>"))))
    assert (built["link"], built.get("content-type")) == ("<a>, <b>", None)


def test_the_handler_of_a_sync_view_under_asgi(mount: Callable[..., Any], gate: Gate) -> None:
    from integrations.http.tests import apps

    calls: list[int] = []

    def handler(call: Any) -> Answer:
        calls.append(1)
        return Answer(b"ok")

    apps.HANDLERS["sync-under-asgi"] = handler
    with override_settings(MIDDLEWARE=[apps.MIDDLEWARE], IDEMGATE_HTTP={"GATE": gate, "SINGLE_TENANT": True}):
        app = ASGIHandler()
    client = mount("uvicorn", app, "sync-under-asgi")
    assert [client.post().content for _ in range(2)] == [b"ok", b"ok"]
    assert len(calls) == 1


def test_a_multipart_form_that_django_has_parsed_before_the_guard_has_a_fingerprint(configure: Any) -> None:
    """CsrfViewMiddleware parses the form before the view. Then Django has no bytes of the body any more."""
    # Given a decorated view behind middleware that reads the form
    configure()
    calls: list[Any] = []

    @idempotent
    def pay(request: Any) -> HttpResponse:
        calls.append((request.POST["amount"], request.FILES["file"].read()))
        return HttpResponse(status=201)

    def send(amount: str, file: bytes = b"f") -> int:
        form = {"amount": amount, "file": SimpleUploadedFile("f.txt", file)}
        request = RequestFactory().post("/pay", form, headers={"idempotency-key": "k"})
        assert request.POST["amount"] == amount
        return int(pay(request).status_code)

    # When the form is sent, sent again, and sent with another amount or file under its key
    assert [send("5"), send("5"), send("500"), send("5", b"g")] == [201, 201, 422, 422]
    # Then the view ran once, with the whole form
    assert calls == [("5", b"f")]
