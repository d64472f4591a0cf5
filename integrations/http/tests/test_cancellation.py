"""Requests of an ASGI app whose client disconnects, whose task is cancelled, or whose server shuts down."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from idemgate_http import IdempotencyKey

from idemgate import Gate
from idemgate.testing import Clock
from integrations.http.tests.wire import OPTIONS, Wire, post, respond, scope

# Disconnects and cancellation


class Slow:
    """An app that counts its calls and its ends, and answers on request."""

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
        raise ZeroDivisionError("odd\nERROR forged\x1b[2J")

    guarded = IdempotencyKey(app, gate=agate, **OPTIONS)
    request = asyncio.create_task(post(guarded, path="/pay\nERROR forged"))
    await entered.wait()
    request.cancel()
    await asyncio.wait([request])
    leave.set()
    await guarded._outliving.drain(20)
    assert agate.counters["http.outlived_failed"] == 1
    assert "ZeroDivisionError" in caplog.text
    assert "\nERROR forged" not in caplog.text
    assert "\x1b" not in caplog.text
    assert [record.getMessage().partition(" record=")[0] for record in caplog.records] == [
        f"http.{event} method=POST path=/pay\\nERROR forged" for event in ("outlived", "outlived_failed")
    ]


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

    monkeypatch.setattr("idemgate.guard.call.wait_for_wakeup", wait_for_ever)
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
    """Cancel the request after each number of steps of the event loop, until it ends without that."""
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


async def test_a_request_that_a_shutdown_cuts_short_may_be_held(agate: Gate, clock: Clock) -> None:
    slow = Slow()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await (slow(scope, receive, send) if scope["type"] == "http" else respond_to_lifespan(receive, send))

    guarded = IdempotencyKey(app, gate=agate, grace=0, on_lease_loss="hold", **OPTIONS)
    request = asyncio.create_task(post(guarded))
    await slow.entered.wait()
    request.cancel()
    await asyncio.wait([request])
    await shut_down(guarded)
    assert slow.cancelled == 1
    assert b"in-progress" in (await post(guarded)).body
    clock.advance("31s")  # its lease ends
    assert b"outcome-unknown" in (await post(guarded)).body
    assert slow.calls == 1


async def respond_to_lifespan(receive: Any, send: Any) -> None:
    """Complete the startup and the shutdown."""
    while (message := await receive())["type"] != "lifespan.shutdown":
        await send({"type": message["type"] + ".complete"})
    await send({"type": "lifespan.shutdown.complete"})


async def test_websockets_pass_through(agate: Gate) -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)

    websocket = {"type": "websocket", "path": "/"}
    await IdempotencyKey(app, gate=agate, **OPTIONS)(websocket, None, None)  # type: ignore[arg-type]
    assert seen[0] is websocket


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
