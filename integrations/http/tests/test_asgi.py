"""What is particular to ASGI: tasks, cancellation, disconnects, streams, background work, and the frameworks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import litestar
import pytest
from idemgate_http import IdempotencyKey
from litestar.response import Stream

from idemgate import Gate, current

OPTIONS: dict[str, Any] = {"single_tenant": True}


def scope(key: str | None = "k", method: str = "POST", path: str = "/pay", **more: Any) -> dict[str, Any]:
    headers = [(b"idempotency-key", key.encode())] if key else []
    return {
        "type": "http", "method": method, "path": path, "query_string": b"", "headers": headers, "extensions": {},
    } | more  # fmt: skip


class Wire:
    """The server's side of one request: what the app receives, and what it has sent."""

    def __init__(self, body: bytes = b"{}") -> None:
        self.incoming: asyncio.Queue[Any] = asyncio.Queue()
        self.incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self.sent: list[Any] = []

    async def receive(self) -> Any:
        return await self.incoming.get()

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    def disconnect(self) -> None:
        self.incoming.put_nowait({"type": "http.disconnect"})

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent[1:])


async def respond(send: Any, body: bytes = b"ok", status: int = 200, **headers: str) -> None:
    fields = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


@pytest.fixture
async def agate(gate: Gate) -> AsyncIterator[Gate]:
    yield gate
    await gate.aio.close()


async def post(app: Any, key: str | None = "k", **more: Any) -> Wire:
    wire = Wire()
    await app(scope(key, **more), wire.receive, wire.send)
    return wire


# Background work


async def test_work_after_the_response_runs_after_it_was_sent_and_the_key_is_done(agate: Gate) -> None:
    order: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await respond(send)
        order.append(f"background, {agate.counters['once.completed']} completed, {len(wire.sent)} sent")

    wire = Wire()
    await IdempotencyKey(app, gate=agate, **OPTIONS)(scope(), wire.receive, wire.send)
    assert order == ["background, 1 completed, 2 sent"]


async def test_an_exception_after_the_response_reaches_the_server(agate: Gate) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await respond(send)
        raise ZeroDivisionError

    guarded, wire = IdempotencyKey(app, gate=agate, **OPTIONS), Wire()
    with pytest.raises(ZeroDivisionError):
        await guarded(scope(), wire.receive, wire.send)
    assert wire.body == b"ok"
    assert (await post(guarded)).body == b"ok"  # a replay


async def test_an_exception_before_the_response_reaches_the_server_and_nothing_is_sent(agate: Gate) -> None:
    calls: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        calls.append(1)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if len(calls) == 1:
            raise KeyError("of the app")
        await send({"type": "http.response.body", "body": b"2"})

    guarded, wire = IdempotencyKey(app, gate=agate, **OPTIONS), Wire()
    with pytest.raises(KeyError, match="of the app"):
        await guarded(scope(), wire.receive, wire.send)
    assert wire.sent == []
    assert (await post(guarded)).body == b"2"


async def test_an_error_of_the_library_that_the_app_raises_is_an_error_of_the_app(agate: Gate) -> None:
    @agate.once(key="{key}", scope="inner", fingerprint=["value"])
    async def inner(key: str, value: int) -> int:
        return value

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await inner("same", 1)
        await inner("same", 2)

    from idemgate import KeyReused

    with pytest.raises(KeyReused):
        await post(IdempotencyKey(app, gate=agate, **OPTIONS))
    assert agate.counters["http.key_reused"] == 0


async def test_an_app_that_returns_without_a_whole_response_is_reported_by_the_server(agate: Gate) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    guarded = IdempotencyKey(app, gate=agate, **OPTIONS)
    for _ in range(2):
        assert [message["type"] for message in (await post(guarded)).sent] == ["http.response.start"]
    assert agate.counters["once.started"] == 2


# Disconnects and cancellation


class Slow:
    """An app that counts its calls and its ends, and answers when it is told to."""

    def __init__(self) -> None:
        self.entered, self.leave = asyncio.Event(), asyncio.Event()
        self.calls = self.ends = self.cancelled = 0
        self.received: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.calls += 1
        self.entered.set()
        await receive()
        listening = asyncio.create_task(receive())
        listening.add_done_callback(lambda task: task.cancelled() or self.received.append(task.result()["type"]))
        try:
            await self.leave.wait()
            await respond(send)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            listening.cancel()
        self.ends += 1


async def test_a_cancelled_request_goes_on_and_its_retry_gets_the_answer(agate: Gate, caplog: Any) -> None:
    app = Slow()
    guarded, wire = IdempotencyKey(app, gate=agate, **OPTIONS), Wire()
    request = asyncio.create_task(guarded(scope(), wire.receive, wire.send))
    await app.entered.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    conflict = await post(guarded)
    assert conflict.status == 409
    app.leave.set()
    await guarded._outliving.drain(20)
    assert (app.calls, app.ends, app.cancelled) == (1, 1, 0)
    assert wire.sent == []  # its server does not wait for a response any more
    assert (await post(guarded)).body == b"ok"
    assert agate.counters["http.outlived"] == 1
    assert "http.outlived method=POST path=/pay" in caplog.text


async def test_a_cancelled_request_that_fails_later_is_logged(agate: Gate, caplog: Any) -> None:
    entered, leave = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        entered.set()
        await leave.wait()
        raise ZeroDivisionError

    guarded = IdempotencyKey(app, gate=agate, **OPTIONS)
    request = asyncio.create_task(post(guarded))
    await entered.wait()
    request.cancel()
    await asyncio.wait([request])
    leave.set()
    await guarded._outliving.drain(20)
    assert agate.counters["http.outlived_failed"] == 1
    assert "ZeroDivisionError" in caplog.text


async def test_an_app_is_not_told_of_a_disconnect_before_its_response(agate: Gate) -> None:
    app = Slow()
    guarded, wire = IdempotencyKey(app, gate=agate, **OPTIONS), Wire()
    request = asyncio.create_task(guarded(scope(), wire.receive, wire.send))
    await app.entered.wait()
    wire.disconnect()
    for _ in range(5):
        await asyncio.sleep(0)
    assert app.received == []
    app.leave.set()
    await request
    assert app.ends == 1


async def test_without_a_shield_a_cancelled_request_releases_its_key(agate: Gate) -> None:
    app = Slow()
    guarded = IdempotencyKey(app, gate=agate, shield=False, **OPTIONS)
    request = asyncio.create_task(post(guarded))
    await app.entered.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert (app.calls, app.cancelled) == (1, 1)
    app.leave.set()
    assert (await post(guarded)).body == b"ok"
    assert app.calls == 2


async def test_without_a_shield_an_app_is_told_of_a_disconnect(agate: Gate) -> None:
    app = Slow()
    guarded, wire = IdempotencyKey(app, gate=agate, shield=False, **OPTIONS), Wire()
    request = asyncio.create_task(guarded(scope(), wire.receive, wire.send))
    await app.entered.wait()
    wire.disconnect()
    async with asyncio.timeout(20):
        while not app.received:
            await asyncio.sleep(0)
    app.leave.set()
    await request
    assert app.received == ["http.disconnect"]


@pytest.mark.parametrize("shield", [True, False])
async def test_a_request_that_waits_for_another_one_can_be_cancelled(
    agate: Gate, shield: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = asyncio.Event()

    async def wait_for_ever(wake: asyncio.Event, seconds: float) -> None:
        waits.set()
        await asyncio.Event().wait()

    monkeypatch.setattr("idemgate.guard.driver.wait_for_wakeup", wait_for_ever)
    app = Slow()
    guarded = IdempotencyKey(app, gate=agate, shield=shield, on_in_progress="wait", wait="60s", **OPTIONS)
    first = asyncio.create_task(post(guarded))
    await app.entered.wait()
    second = asyncio.create_task(post(guarded))
    await waits.wait()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    app.leave.set()
    assert (await first).body == b"ok"
    assert app.calls == 1
    assert agate.counters["http.outlived"] == 0


async def test_cancelling_at_any_step_runs_the_work_once_and_leaves_no_task(agate: Gate) -> None:
    """Cancel the request after each number of steps of the event loop, until it ends by itself."""
    finished = False
    steps = 0
    while not finished:
        calls: list[int] = []

        async def app(scope: Any, receive: Any, send: Any, calls: list[int] = calls) -> None:
            await receive()
            calls.append(1)
            await asyncio.sleep(0)
            await respond(send, b"%d" % len(calls))

        guarded, key = IdempotencyKey(app, gate=agate, **OPTIONS), f"k{steps}"
        request = asyncio.create_task(post(guarded, key))
        for _ in range(steps):
            await asyncio.sleep(0)
        finished = request.done()
        request.cancel()
        await asyncio.wait([request])
        await guarded._outliving.drain(20)
        retry = await post(guarded, key)
        while retry.status == 409:  # the claim of the cancelled request is being released
            await asyncio.sleep(0.001)
            retry = await post(guarded, key)
        assert retry.body == b"1", steps
        assert len(calls) == 1, steps
        steps += 1
        if steps > 5000:  # a store that answers in no time
            break
    others = [task for task in asyncio.all_tasks() if "Exchange" in repr(task) or "IdempotencyKey" in repr(task)]
    assert others == []


async def test_a_client_that_disconnects_inside_its_body_starts_nothing(agate: Gate) -> None:
    app = Slow()
    wire = Wire()
    wire.incoming = asyncio.Queue()
    wire.incoming.put_nowait({"type": "http.request", "body": b"{", "more_body": True})
    wire.disconnect()
    await IdempotencyKey(app, gate=agate, **OPTIONS)(scope(), wire.receive, wire.send)
    assert (app.calls, wire.sent) == (0, [])


# Shutdown


async def shut_down(guarded: Any) -> list[str]:
    """Run a lifespan to its shutdown and return what the app was told."""
    wire = Wire()
    wire.incoming = asyncio.Queue()
    for kind in ("lifespan.startup", "lifespan.shutdown"):
        wire.incoming.put_nowait({"type": kind})
    await guarded({"type": "lifespan"}, wire.receive, wire.send)
    return [message["type"] for message in wire.sent]


@pytest.mark.parametrize("grace", [20, 0])
async def test_a_shutdown_waits_for_handlers_whose_client_has_gone(agate: Gate, grace: float) -> None:
    slow = Slow()
    ended: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await slow(scope, receive, send)
            return
        while (message := await receive())["type"] != "lifespan.shutdown":
            await send({"type": message["type"] + ".complete"})
        ended.append(slow.ends)
        await send({"type": "lifespan.shutdown.complete"})

    guarded = IdempotencyKey(app, gate=agate, grace=grace, **OPTIONS)
    request = asyncio.create_task(post(guarded))
    await slow.entered.wait()
    request.cancel()
    await asyncio.wait([request])
    if grace:
        asyncio.get_running_loop().call_later(0.01, slow.leave.set)
    assert await shut_down(guarded) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert ended == [1 if grace else 0]
    assert slow.cancelled == (0 if grace else 1)
    assert agate.counters["http.cut_short"] == (0 if grace else 2)
    slow.leave.set()
    assert (await post(guarded)).body == b"ok"
    assert slow.calls == (1 if grace else 2)


async def test_websockets_pass_through(agate: Gate) -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    websocket = {"type": "websocket", "path": "/"}
    await IdempotencyKey(app, gate=agate, **OPTIONS)(websocket, None, None)  # type: ignore[arg-type]
    assert seen[0] is websocket


# Streams


async def test_an_event_stream_starts_at_once_and_ends_when_its_client_disconnects(agate: Gate) -> None:
    stopped: list[str] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        stopped.append((await receive())["type"])

    guarded, wire = IdempotencyKey(app, gate=agate, **OPTIONS), Wire()
    request = asyncio.create_task(guarded(scope(), wire.receive, wire.send))
    async with asyncio.timeout(20):
        while len(wire.sent) < 2:
            await asyncio.sleep(0.001)
    assert wire.body == b"data: 1\n\n"  # before the stream has ended
    assert agate.counters["once.completed"] == 1
    assert (await post(guarded)).status == 409
    wire.disconnect()
    await request
    assert stopped == ["http.disconnect"]


async def test_a_response_in_parts_with_a_length_is_kept(agate: Gate) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        await send({"type": "http.response.body", "body": b"ab", "more_body": True})
        await send({"type": "http.response.body", "body": b"cd", "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    guarded = IdempotencyKey(app, gate=agate, **OPTIONS)
    assert len((await post(guarded)).sent) == 4
    assert (await post(guarded)).body == b"abcd"


async def test_extensions_that_a_buffer_cannot_replay_are_not_offered(agate: Gate) -> None:
    offered: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        offered.append([*scope["extensions"]])
        await respond(send)

    names = ("push", "pathsend", "zerocopysend", "trailers", "early_hint", "debug")
    extensions = {f"http.response.{name}": {} for name in names} | {"tls": {}}
    guarded = IdempotencyKey(app, gate=agate, **OPTIONS)
    await post(guarded, extensions=extensions)
    await post(guarded, None, extensions=extensions)
    assert offered == [["tls"], [*extensions]]


async def test_a_message_that_cannot_be_kept_is_refused(agate: Gate) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.pathsend", "path": "/etc/passwd"})

    with pytest.raises(RuntimeError, match="pathsend"):
        await post(IdempotencyKey(app, gate=agate, **OPTIONS))


async def test_the_app_runs_inside_the_guard(agate: Gate) -> None:
    seen: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(current().token)
        await respond(send)

    await post(IdempotencyKey(app, gate=agate, **OPTIONS))
    assert seen[0] > 0


async def test_a_guard_inside_of_a_guard_passes_on(agate: Gate) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await respond(send)

    inner = IdempotencyKey(app, gate=agate, **OPTIONS)
    assert (await post(IdempotencyKey(inner, gate=agate, **OPTIONS))).body == b"ok"
    assert agate.counters["once.started"] == 1


async def test_two_mounts_of_one_app_have_their_own_keys(agate: Gate) -> None:
    calls: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        calls.append(1)
        await respond(send, b"%d" % len(calls))

    guarded = IdempotencyKey(app, gate=agate, **OPTIONS)
    answers = [
        (await post(guarded, path=path, root_path=root)).body
        for root, path in (("/a", "/a/pay"), ("/b", "/b/pay"), ("/a", "/pay"), ("/b", "/pay"))
    ]
    assert answers == [b"1", b"2", b"1", b"2"]  # servers differ in whether `path` contains `root_path`


# Frameworks on a real server


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
    assert events == ["pay", "background"]
    assert client.post("s", "/stream").content == b"ab"
    assert client.post("s", "/stream").status_code == 409
    assert events == ["pay", "background", "stream"]


@pytest.mark.parametrize("server", ["uvicorn", "hypercorn"])
def test_a_client_that_gives_up_does_not_stop_its_request(mount: Callable[..., Any], gate: Gate, server: str) -> None:
    import threading

    from integrations.http.tests.apps import Answer, asgi_app

    entered, leave, ended = threading.Event(), threading.Event(), threading.Event()

    def handler(call: Any) -> Answer:
        entered.set()
        assert leave.wait(20)
        ended.set()
        return Answer(b"paid")

    client = mount(server, IdempotencyKey(asgi_app(handler), gate=gate, single_tenant=True))
    with pytest.raises(httpx.ReadTimeout):
        client.post(timeout=0.2)
    assert entered.is_set()
    leave.set()
    assert ended.wait(20)
    answer = client.post()
    while answer.status_code == 409:
        answer = client.post()
    assert (answer.content, answer.headers["idempotent-replayed"]) == (b"paid", "true")


async def test_http_middleware_of_starlette_around_it_does_not_cancel_it(agate: Gate) -> None:
    """`BaseHTTPMiddleware` cancels its app when the client disconnects."""
    from starlette.applications import Starlette
    from starlette.middleware.base import BaseHTTPMiddleware

    slow = Slow()
    outer = Starlette()
    outer.mount("/", slow)
    outer.add_middleware(IdempotencyKey, gate=agate, single_tenant=True)

    async def pass_on(request: Any, call_next: Any) -> Any:
        return await call_next(request)

    outer.add_middleware(BaseHTTPMiddleware, dispatch=pass_on)
    wire = Wire()
    request = asyncio.create_task(outer(scope() | {"root_path": "", "http_version": "1.1"}, wire.receive, wire.send))
    await slow.entered.wait()
    request.cancel()
    await asyncio.wait([request])
    slow.leave.set()
    async with asyncio.timeout(20):
        while not slow.ends:
            await asyncio.sleep(0.001)
    assert (slow.calls, slow.cancelled) == (1, 0)
