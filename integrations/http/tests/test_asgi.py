"""What is particular to ASGI: background work, exceptions, streams and extensions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from idemgate_http import IdempotencyKey

from idemgate import Gate, KeyReused, current
from integrations.http.tests.wire import OPTIONS, Wire, post, respond, scope

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


async def test_a_message_is_read_when_it_is_sent(agate: Gate) -> None:
    """The app may give its headers as an iterator, and use a message and a buffer again."""
    headers = [(b"content-length", b"6"), (b"location", b"/p/1")]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 201, "headers": iter(headers)})
        message = {"type": "http.response.body", "body": b"ab", "more_body": True}
        await send(message)
        buffer = bytearray(b"cd")
        message["body"] = memoryview(buffer)
        await send(message)
        buffer[:] = b"ef"
        message["more_body"] = False
        await send(message)

    guarded = IdempotencyKey(app, gate=agate, **OPTIONS)
    first, second = await post(guarded), await post(guarded)
    assert first.sent[0]["headers"] == headers
    assert [(message["body"], message["more_body"]) for message in first.sent[1:]] == [
        (b"ab", True), (b"cd", True), (b"ef", False),
    ]  # fmt: skip
    assert (second.body, second.sent[0]["headers"][0]) == (b"abcdef", headers[1])


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
