"""Responses that are rendered after the view: of Django REST framework, and templates that a middleware completes."""

from __future__ import annotations

import asyncio
import functools
import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.http import HttpResponse
from django.template import engines
from django.template.response import TemplateResponse
from django.test import AsyncClient, Client, override_settings
from django.urls import re_path
from django.utils.decorators import method_decorator
from django.utils.deprecation import MiddlewareMixin
from django.views import View
from idemgate_http import record_key
from idemgate_http.django import idempotent

from idemgate import Gate, InvalidArgument
from idemgate.testing import Clock
from integrations.http.tests.apps import setup_django
from integrations.http.tests.conftest import ESCAPED, FORGED, QUOTED, logged

pytestmark = pytest.mark.one_in(3)

setup_django()
REST = {
    "DEFAULT_AUTHENTICATION_CLASSES": [],
    "DEFAULT_PERMISSION_CLASSES": [],
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "UNAUTHENTICATED_USER": None,
}
with override_settings(REST_FRAMEWORK=REST):
    from rest_framework.decorators import api_view
    from rest_framework.exceptions import ValidationError
    from rest_framework.response import Response
    from rest_framework.test import APIClient, APIRequestFactory
    from rest_framework.views import APIView
    from rest_framework.viewsets import ViewSet

CODE = "{{ number }} {{ added }}"


class Complete(MiddlewareMixin):
    """A middleware that adds to the context of templates."""

    def process_template_response(self, request: Any, response: Any) -> Any:
        if response.context_data is not None:
            response.context_data["added"] = "by a middleware"
        return response


class Shop:
    """Views that make a payment, and what they did. `fail` is raised by the serialization of the next payment."""

    def __init__(self) -> None:
        self.paid: list[Any] = []
        self.odd: list[object] = []

    def pay(self, request: Any) -> Any:
        if request.data["amount"] < 0:
            raise ValidationError("negative")
        self.paid.append(request.data["amount"])
        extra = {"odd": self.odd.pop()} if self.odd else {}
        return Response({"payment": len(self.paid)} | extra, 202 if request.data["amount"] else 400)

    def urls(self) -> Any:
        shop = self

        def pay(request: Any) -> Any:
            return shop.pay(request)

        class Method(ViewSet):
            @method_decorator(idempotent)
            def create(self, request: Any) -> Any:
                return shop.pay(request)

        @method_decorator(idempotent(retention="1h"), name="post")
        class Post(APIView):
            def post(self, request: Any) -> Any:
                return shop.pay(request)

        @method_decorator(idempotent, name="dispatch")
        class Dispatch(APIView):
            def post(self, request: Any) -> Any:
                return shop.pay(request)

        class Whole(ViewSet):
            def create(self, request: Any) -> Any:
                return shop.pay(request)

        @idempotent
        def template(request: Any) -> Any:
            shop.paid.append(request.body)
            return TemplateResponse(request, engines["django"].from_string(CODE), {"number": len(shop.paid)})

        @idempotent
        async def awaited(request: Any) -> Any:
            return template.__wrapped__(request)

        views = {
            "below": api_view(["POST"])(idempotent(pay)),
            "above": idempotent(api_view(["POST"])(pay)),
            "method": Method.as_view({"post": "create"}),
            "post": Post.as_view(),
            "dispatch": Dispatch.as_view(),
            "whole": idempotent(Whole.as_view({"post": "create"})),
            "template": template,
            "awaited": awaited,
        }
        return type(
            "Urls", (), {"urlpatterns": [re_path(f"^(?:app-[0-9]+/)?{name}/$", view) for name, view in views.items()]}
        )


PLACES = ["below", "above", "method", "post", "dispatch", "whole"]


@pytest.fixture
def shop(gate: Gate) -> Iterator[Shop]:
    made = Shop()
    with (
        override_settings(
            REST_FRAMEWORK=REST,
            MIDDLEWARE=[f"{__name__}.Complete"],
            IDEMGATE_HTTP={"GATE": gate, "SINGLE_TENANT": True},
        ),
        override_settings(ROOT_URLCONF=made.urls()),
    ):
        yield made


Send = Callable[..., Any]


@pytest.fixture(params=["django", "drf", "waitress", "uvicorn"])
def send(request: pytest.FixtureRequest, shop: Shop, mount: Any) -> Send:
    """`send(place, amount, key)`: status, body and mark of an answer, of test clients and of real servers."""
    clients: dict[str, Any] = {"django": Client, "drf": APIClient}
    handlers: dict[str, Any] = {"waitress": WSGIHandler, "uvicorn": ASGIHandler}
    if request.param in clients:
        client: Any = clients[request.param](raise_request_exception=False)
    else:
        served = mount(request.param, handlers[request.param]())

    def post(place: str, amount: int = 5, key: str = "k") -> Any:
        body = json.dumps({"amount": amount})
        if request.param in clients:
            headers = {"idempotency-key": key}
            answer = client.post(f"/{place}/", body, content_type="application/json", headers=headers)
        else:
            answer = served.post(key, f"/{place}/", {"content-type": "application/json"}, content=body.encode())
        return answer.status_code, answer.content, answer.headers.get("idempotent-replayed")

    return post


@pytest.mark.parametrize("place", PLACES)
def test_a_retry_of_a_view_of_rest_framework_gets_the_first_answer(
    shop: Shop, send: Send, gate: Gate, place: str
) -> None:
    assert send(place) == (202, b'{"payment":1}', None)
    assert send(place) == (202, b'{"payment":1}', "true")
    assert send(place, 6)[0] == 422
    # A refused request and a returned error leave the key free
    assert [send(place, amount, "l")[0] for amount in (-1, 0, 7, 7)] == [400, 400, 202, 202]
    assert shop.paid == [5, 0, 7]
    assert (gate.counters["http.kept"], gate.counters["http.released"]) == (2, 2)


@pytest.mark.parametrize("place", ["template", "awaited"])
def test_a_template_that_a_middleware_completes_is_stored_complete(shop: Shop, send: Send, place: str) -> None:
    assert send(place) == (200, b"1 by a middleware", None)
    assert send(place) == (200, b"1 by a middleware", "true")
    assert len(shop.paid) == 1


@pytest.mark.parametrize("place", ["below", "method", "post"])
def test_an_answer_that_cannot_be_rendered_is_an_error_of_the_app(shop: Shop, gate: Gate, place: str) -> None:
    """As with a view that raises: the error reaches the client, and the key is free."""
    shop.odd.append(object())
    client = Client()
    options: Any = {"content_type": "application/json", "headers": {"idempotency-key": "k"}}
    with pytest.raises(TypeError, match="not JSON serializable"):
        client.post(f"/{place}/", '{"amount": 5}', **options)
    assert gate.counters["http.released"] == 1
    assert client.post(f"/{place}/", '{"amount": 5}', **options).json() == {"payment": 2}


@pytest.mark.parametrize("place", PLACES)
def test_a_test_may_call_a_view_and_render_what_it_returns(shop: Shop, place: str) -> None:
    """As the documentation of Django REST framework tests a view: without the handler, which renders."""
    view = next(one.callback for one in shop.urls().urlpatterns if place in str(one.pattern))
    rendered: list[bytes] = []

    def send(amount: int = 5) -> Any:
        request = APIRequestFactory().post("/pay", {"amount": amount}, format="json", headers={"idempotency-key": "k"})
        response = view(request)
        response.add_post_render_callback(lambda response: rendered.append(response.content))  # as decorators do
        assert response.render() is response
        return response.status_code, response.is_rendered, json.loads(response.content).get("payment")

    assert [send(), send(), send(6)] == [(202, True, 1), (202, True, 1), (422, True, None)]
    assert len(rendered) == 3
    replay = view(APIRequestFactory().post("/pay", {"amount": 5}, format="json", headers={"idempotency-key": "k"}))
    assert pickle.loads(pickle.dumps(replay)).content == replay.content  # as caches do


def test_a_key_stays_claimed_until_its_answer_is_rendered_or_its_lease_ends(
    shop: Shop, gate: Gate, clock: Clock
) -> None:
    from django.test import RequestFactory

    @idempotent
    def pay(request: Any) -> Any:
        shop.paid.append(1)
        return TemplateResponse(request, engines["django"].from_string(CODE), {"number": len(shop.paid)})

    def post() -> Any:
        return pay(RequestFactory().post("/pay", b"{}", "application/json", headers={"idempotency-key": "k"}))

    first = post()
    assert post().status_code == 409
    # One that nobody renders blocks its key for its lease
    clock.advance("31s")
    second = post()
    assert not second.is_rendered
    # When the first is rendered after all, its owner is not the last one
    assert first.render().content == b"1 "
    assert gate.counters["http.lost"] == 1
    assert second.render().content == b"2 "
    replay = post()
    assert (replay.content, replay["idempotent-replayed"]) == (b"2 ", "true")


@pytest.mark.parametrize("kind", ["view", "awaited", "template", "rest"])
async def test_an_answer_that_cannot_be_read_is_reported_and_does_not_run_again(
    shop: Shop, gate: Gate, caplog: Any, kind: str
) -> None:
    base: Any = {"template": TemplateResponse, "rest": Response}.get(kind, HttpResponse)

    class Odd(base):  # type: ignore[misc]
        @property
        def content(self) -> bytes:
            raise ZeroDivisionError(f"of the response{FORGED}")

        @content.setter
        def content(self, value: object) -> None:
            base.content.fset(self, value)

    def pay(request: Any) -> Any:
        shop.paid.append(1)
        if kind == "template":
            return Odd(request, engines["django"].from_string(CODE), status=201)
        return Odd(status=201)

    async def pay_async(request: Any) -> Any:
        return pay(request)

    view = idempotent(pay_async if kind == "awaited" else pay)
    if kind == "rest":
        view = api_view(["POST"])(view)

    async def post() -> int:
        request = APIRequestFactory().post(f"/pay{QUOTED}", {}, format="json", headers={"idempotency-key": "k"})
        answer = await (view(request) if kind == "awaited" else sync_to_async(view)(request))
        if hasattr(answer, "render"):
            await sync_to_async(answer.render)()
        return int(answer.status_code)

    assert ([await post(), await post()], shop.paid) == ([201, 409], [1])
    assert (gate.counters["http.record_failed"], gate.counters["http.response_not_kept"]) == (1, 1)
    assert logged(caplog) == [f"http.record_failed method=POST path=/pay{ESCAPED}: ZeroDivisionError"]
    await gate.aio.close()


# Responses that nobody renders


class Replace(MiddlewareMixin):
    """A middleware that sends another response than the view's, as Django allows."""

    def process_template_response(self, request: Any, response: Any) -> Any:
        if "raises" in request.path:
            raise ZeroDivisionError
        if response.context_data is None:  # of Django REST framework
            return response
        return TemplateResponse(request, response.template_name, {**response.context_data, "added": "another"})


class Till:
    """Views whose response another one replaces. A payment of "slow" waits for `leave`."""

    def __init__(self) -> None:
        self.paid: list[str] = []
        self.entered, self.leave = threading.Event(), threading.Event()

    def pay(self, request: Any) -> int:
        self.paid.append(request.path)
        self.entered.set()
        assert "slow" not in request.headers or self.leave.wait(20)
        return len(self.paid)

    def urls(self) -> Any:
        till = self

        class Pay(APIView):
            @method_decorator(idempotent)
            def post(self, request: Any) -> Any:
                return Response({"paid": till.pay(request)}, status=request.data.get("status", 201))

        class Enveloped(Pay):
            def post(self, request: Any) -> Any:
                return Response({"data": super().post(request).data}, status=201)

        class Envelope(Pay):
            def finalize_response(self, request: Any, response: Any, *args: Any, **kwargs: Any) -> Any:
                if hasattr(response, "data"):
                    response = Response({"data": response.data}, status=response.status_code)
                return super().finalize_response(request, response, *args, **kwargs)

        @idempotent
        def template(request: Any) -> Any:
            number = till.pay(request)
            return TemplateResponse(request, engines["django"].from_string(CODE), {"number": number})

        @idempotent
        async def template_async(request: Any) -> Any:
            return await asyncio.to_thread(template.__wrapped__, request)

        views = {
            "enveloped": Enveloped.as_view(),
            "envelope": Envelope.as_view(),
            "template": template,
            "awaited": template_async,
            "raises": template,
        }
        return type(
            "Urls", (), {"urlpatterns": [re_path(f"^{name}(?:\\s[^/]*)?/$", view) for name, view in views.items()]}
        )


@pytest.fixture
def till(gate: Gate) -> Iterator[Till]:
    made = Till()
    options = {"GATE": gate, "SINGLE_TENANT": True, "LEASE": "4s"}
    with (
        override_settings(REST_FRAMEWORK=REST, MIDDLEWARE=[f"{__name__}.Replace"], IDEMGATE_HTTP=options),
        override_settings(ROOT_URLCONF=made.urls()),
    ):
        yield made


def wait_for(gate: Gate, name: str) -> None:
    """Wait until the heartbeat thread has counted."""
    until = time.monotonic() + 20
    while not gate.counters[name]:
        assert time.monotonic() < until, gate.counters
        time.sleep(0.01)


SENT: Any = {"content_type": "application/json", "headers": {"idempotency-key": "k"}}


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("place", ["enveloped", "envelope", "template", "awaited", "raises"])
async def test_a_view_whose_response_is_replaced_runs_once(
    till: Till, gate: Gate, clock: Clock, caplog: Any, place: str, is_async: bool
) -> None:
    path = f"/{place}{QUOTED}/"

    async def post() -> Any:
        if is_async:
            return await AsyncClient(raise_request_exception=False).post(path, b"{}", **SENT)
        return await sync_to_async(Client(raise_request_exception=False).post)(path, b"{}", **SENT)

    first = await post()
    assert first.status_code == {"template": 200, "awaited": 200, "raises": 500}.get(place, 201)
    await asyncio.to_thread(wait_for, gate, "once.completed")
    clock.advance("5s")
    retry = await post()
    # The subclass reads `data` of the guard's answer, and gets an error that names the fix
    assert retry.status_code == (500 if place == "enveloped" else 409)
    assert ("is idemgate's answer to a retry" in caplog.text) == (place == "enveloped")
    assert (gate.counters["http.unrendered"], gate.counters["http.not_kept"]) == (1, 1)
    assert (gate.counters["http.response_not_kept"], len(till.paid)) == (1, 1)
    (text,) = logged(caplog)
    assert text.startswith(f"http.unrendered method=POST path=/{place}{ESCAPED}/ record=")


def test_a_replaced_response_of_another_status_leaves_its_key_free(till: Till, gate: Gate) -> None:
    client, key = APIClient(), record_key("", "POST", "/envelope/", "k")
    until = time.monotonic() + 20
    for _ in range(2):
        answer = client.post("/envelope/", {"status": 400}, format="json", headers={"idempotency-key": "k"})
        assert answer.status_code == 400
        while gate.inspect(key, scope="http").state == "in_progress":
            assert time.monotonic() < until
            time.sleep(0.01)
    assert (len(till.paid), gate.counters["http.released"]) == (2, 2)


@pytest.mark.parametrize("place", ["template", "awaited", "envelope"])
async def test_a_view_whose_client_went_before_the_rendering_runs_once(
    till: Till, gate: Gate, clock: Clock, place: str
) -> None:
    """A server of ASGI cancels the request. The view goes on, and nobody renders its response."""
    names = {"idempotency-key": "k", "content-type": "application/json", "content-length": "2", "slow": "1"}
    headers = [(name.encode(), value.encode()) for name, value in names.items()]
    scope = {"type": "http", "method": "POST", "path": f"/{place}/", "query_string": b"", "headers": headers}
    messages: asyncio.Queue[Any] = asyncio.Queue()
    await messages.put({"type": "http.request", "body": b"{}", "more_body": False})

    async def send(_: Any) -> None: ...

    request = asyncio.create_task(ASGIHandler()(scope, messages.get, send))
    assert await asyncio.to_thread(till.entered.wait, 20)
    await messages.put({"type": "http.disconnect"})
    await asyncio.sleep(0.1)  # Django cancels the request; later, the response is sent as without a disconnect
    till.leave.set()
    await asyncio.wait_for(request, 20)
    await asyncio.to_thread(wait_for, gate, "once.completed")
    clock.advance("5s")
    assert (await AsyncClient().post(f"/{place}/", b"{}", **SENT)).status_code == 409
    assert len(till.paid) == 1


# Methods


def test_a_method_is_refused_at_its_decoration(shop: Shop) -> None:
    with pytest.raises(InvalidArgument, match=r"create.*method_decorator"):

        class Pay(ViewSet):
            @idempotent
            def create(self, request: Any) -> Any: ...

    with pytest.raises(InvalidArgument, match="method_decorator"):

        class PayAsync(View):
            @idempotent(required=True)
            async def post(self, request: Any) -> Any: ...

    with pytest.raises(InvalidArgument, match="as_view"):
        idempotent(View)


@pytest.mark.parametrize("kind", [classmethod, staticmethod, functools.partialmethod])
def test_what_becomes_a_method_is_refused_at_its_decoration(shop: Shop, kind: Any) -> None:
    def post(request: Any) -> Any: ...

    with pytest.raises(InvalidArgument, match=rf"post.*a {kind.__name__}, not a view.*Write @"):
        idempotent(kind(post))


def test_a_method_whose_first_parameter_has_another_name_is_refused(shop: Shop) -> None:
    class Pay:
        def this(this: Any, request: Any) -> Any: ...  # noqa: N805
        def all(*args: Any) -> Any: ...
        async def awaited(_: Any, request: Any) -> Any: ...  # noqa: N805
        def static(request: Any) -> Any: ...  # noqa: N805

    for method in (Pay.this, Pay.all, Pay.awaited):
        with pytest.raises(InvalidArgument, match=r"a method of a class.*method_decorator"):
            idempotent(method)
    idempotent(Pay.static)
    idempotent(Pay().this)


def test_a_method_has_one_guard(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """`method_decorator` calls the decorator at each request. A guard has a state of its own."""
    from idemgate_http import django

    made: list[object] = []
    init = django._DjangoGuard.__init__
    monkeypatch.setattr(django._DjangoGuard, "__init__", lambda self, given: made.append(given) or init(self, given))
    client = APIClient()
    for place in ("method", "post"):
        for key in ("a", "b", "c"):
            client.post(f"/{place}/", {"amount": 5}, format="json", headers={"idempotency-key": key})
    assert made == [{}, {"retention": "1h"}]
