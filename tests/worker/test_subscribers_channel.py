"""Callbacks on Pub/Sub channels: every replica hears, one runs; no outcome ends it; what is lost is counted."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from contextlib import AsyncExitStack
from contextvars import ContextVar
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument
from idemgate.subscribers import PubSubMessage
from idemgate.testing.proxy import Proxy
from tests.for_each import for_each
from tests.waiting import eventually

SCOPE = ContextVar("SCOPE", default="outside")


def total(gates: list[Gate], name: str) -> int:
    return sum(gate.counters[name] for gate in gates)


def event_id(heard: PubSubMessage) -> str:
    return heard.json()["id"]


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_of_all_replicas_one_handles_each_event(kind: str, replicas: Any, raw: Any, namespace: str) -> None:
    # Given four replicas whose guarded callback listens to one channel
    gates, ran = replicas(4), Counter[str]()
    for gate in gates:
        guarded = gate.once(key=event_id, scope="prices")
        if kind == "sync":

            def handle(heard: PubSubMessage) -> None:
                ran[event_id(heard)] += 1

            gate.subscribe(namespace)(guarded(handle))
        else:

            async def handle_async(heard: PubSubMessage) -> None:
                ran[event_id(heard)] += 1

            gate.subscribe(namespace)(guarded(handle_async))
    async with AsyncExitStack() as stack:
        for gate in gates:
            await stack.enter_async_context(gate.aio.subscribers())
        # When twenty events are published, each of them twice
        for number in [*range(20), *range(20)]:
            raw.publish(namespace, json.dumps({"id": f"e{number}"}))
        # Then every replica hears all forty
        await eventually(lambda: total(gates, "channel.heard") == 160)
    # And each event was handled once, and every copy has an outcome
    assert ran == {f"e{number}": 1 for number in range(20)}
    names = ("handled", "duplicate", "in_progress", "failed", "rejected")
    outcomes = {name: total(gates, f"channel.{name}") for name in names}
    assert outcomes["handled"] == 20
    assert outcomes["duplicate"] + outcomes["in_progress"] == 140
    assert outcomes["failed"] == outcomes["rejected"] == 0
    assert total(gates, "once.started") == 20


async def test_a_pattern_says_which_channel_it_was(one: Gate, raw: Any, namespace: str) -> None:
    # Given a callback on a pattern
    heard: list[PubSubMessage] = []
    one.subscribe(f"{namespace}.*", pattern=True)(heard.append)
    async with one.aio.subscribers():
        # When something is published to two channels that match and to one that does not
        raw.publish(f"{namespace}.eur", b"\xff1")
        raw.publish(f"{namespace}", b"no")
        raw.publish(f"{namespace}.usd", b"2")
        await eventually(lambda: len(heard) == 2)
    # Then it got the two, at once, with their channels and bytes
    heard.sort(key=lambda one: one.channel)
    assert heard == [PubSubMessage(f"{namespace}.eur", b"\xff1"), PubSubMessage(f"{namespace}.usd", b"2")]


async def test_a_sync_callback_runs_in_a_thread_with_the_context(one: Gate, raw: Any, namespace: str) -> None:
    # Given a sync callback, and a context variable set before the subscribers start
    seen: list[tuple[str, bool]] = []
    one.subscribe(namespace)(
        lambda heard: seen.append((SCOPE.get(), threading.current_thread() is threading.main_thread()))
    )
    SCOPE.set("inside")
    async with one.aio.subscribers():
        raw.publish(namespace, "x")
        await eventually(lambda: seen)
    # Then it saw the variable, outside of the loop's thread
    assert seen == [("inside", False)]


async def test_no_outcome_ends_the_subscriber(one: Gate, raw: Any, namespace: str, caplog: Any) -> None:
    # Given a guard with a fingerprint, one key in progress elsewhere, one done, and a callback that may fail
    ran: list[str] = []

    @one.subscribe(namespace, concurrency=1)
    @one.once(key=event_id, scope="outcomes", on_done="raise", fingerprint=lambda heard: heard.json().get("amount", 0))
    def handle(heard: PubSubMessage) -> None:
        ran.append(event_id(heard))
        if event_id(heard) == "bad":
            raise ValueError("no good")
        if event_id(heard) == "odd":
            raise asyncio.CancelledError

    elsewhere = one.claim("busy", scope="outcomes", fingerprint=0)
    async with one.aio.subscribers():
        # When each of them is published, and what is no JSON
        for message in (
            {"id": "ok"}, {"id": "ok"}, {"id": "ok", "amount": 7}, {"id": "busy"}, {"id": "bad"}, {"id": "odd"},
        ):  # fmt: skip
            raw.publish(namespace, json.dumps(message))
        raw.publish(namespace, "{")
        raw.publish(namespace, '{"id": "last"}')
        # Then the last one is handled all the same
        await eventually(lambda: one.counters["channel.handled"] == 2)
    assert ran == ["ok", "bad", "odd", "last"]
    # And each outcome was counted, and what needs a person was logged
    counted = {name: one.counters[f"channel.{name}"] for name in ("duplicate", "in_progress", "rejected", "failed")}
    assert counted == {"duplicate": 1, "in_progress": 1, "rejected": 2, "failed": 2}
    assert [record.getMessage() for record in caplog.records].count("subscriber.failed") == 4
    assert elsewhere.release()


async def test_a_lost_connection_is_counted_and_made_anew(one: Gate, raw: Any, namespace: str) -> None:
    # Given a subscriber that hears
    heard: list[bytes] = []
    one.subscribe(namespace)(lambda message: heard.append(message.data))
    async with one.aio.subscribers():
        raw.publish(namespace, "before")
        await eventually(lambda: heard == [b"before"])
        # When the server ends its connection
        raw.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        # Then the gap is counted, and it hears again
        await eventually(lambda: one.counters["channel.gaps"] == 1 and raw.publish(namespace, "after"))
        await eventually(lambda: b"after" in heard)


async def test_a_connection_that_falls_silent_is_noticed_and_made_anew(
    replicas: Any, url: str, raw: Any, namespace: str
) -> None:
    # Given a subscriber that listens, over a connection that swallows everything from some time on
    with Proxy(url) as proxy:
        gate, heard = replicas(1, proxy.url)[0], list[bytes]()
        gate.subscribe(namespace)(lambda one: heard.append(one.data))
        async with gate.aio.subscribers():
            raw.publish(namespace, "before")
            await eventually(lambda: heard == [b"before"])
            proxy.black_hole = proxy.mute = True
            assert raw.publish(namespace, "swallowed") == 1
            await eventually(lambda: proxy.swallowed)  # from here on that connection is silent for good
            # When others would go through again
            proxy.heal()
            # Then it notices, though nobody closed it: it hears what comes, and counts the gap
            await eventually(lambda: gate.counters["channel.gaps"] == 1)
            await eventually(lambda: raw.publish(namespace, "after") > 1 or b"after" in heard)
            await eventually(lambda: b"after" in heard)
        assert b"swallowed" not in heard


async def test_a_subscriber_behind_a_black_hole_stops(replicas: Any, url: str, raw: Any, namespace: str) -> None:
    with Proxy(url) as proxy:
        gate = replicas(1, proxy.url)[0]
        gate.subscribe(namespace)(lambda _: None)
        async with asyncio.timeout(30):
            async with gate.aio.subscribers():
                proxy.black_hole = proxy.mute = True
                raw.publish(namespace, "swallowed")


async def test_it_begins_when_the_store_is_there(replicas: Any, url: str, raw: Any, namespace: str) -> None:
    # Given a way to the server on which the next five requests break
    with Proxy(url) as proxy:
        gate = replicas(1, proxy.url)[0]
        heard: list[bytes] = []
        gate.subscribe(namespace)(lambda message: heard.append(message.data))
        proxy.drop_request(b"", times=5)
        # When the subscriber starts
        async with gate.aio.subscribers():
            # Then it listens as soon as that is possible
            await eventually(lambda: raw.publish(namespace, "here"))
            await eventually(lambda: heard == [b"here"])


async def test_a_full_backlog_drops_what_comes_and_counts_it(one: Gate, raw: Any, namespace: str, caplog: Any) -> None:
    # Given one call at a time, a backlog of two, and a callback that waits
    release, ran = asyncio.Event(), list[bytes]()

    @one.subscribe(namespace, concurrency=1, backlog=2)
    async def handle(heard: PubSubMessage) -> None:
        ran.append(heard.data)
        await release.wait()

    async with one.aio.subscribers():
        # When six messages come
        for number in range(6):
            raw.publish(namespace, str(number))
        await eventually(lambda: one.counters["channel.heard"] == 6)
        # Then one runs, two wait, three were dropped, and that is logged once
        assert (ran, one.counters["channel.dropped"]) == ([b"0"], 3)
        release.set()
        await eventually(lambda: one.counters["channel.handled"] == 3)
    assert ran == [b"0", b"1", b"2"]
    assert [record.getMessage() for record in caplog.records].count("subscriber.backlog_full") == 1


async def test_stopping_lets_what_was_heard_finish(one: Gate, raw: Any, namespace: str) -> None:
    # Given one message at work and one that waits
    release, ran = asyncio.Event(), list[bytes]()

    @one.subscribe(namespace, concurrency=1)
    async def handle(heard: PubSubMessage) -> None:
        await release.wait()
        ran.append(heard.data)

    async with one.aio.subscribers():
        raw.publish(namespace, "1")
        raw.publish(namespace, "2")
        await eventually(lambda: one.counters["channel.heard"] == 2)
        # When it is stopped while the first can finish
        asyncio.get_running_loop().call_soon(release.set)
    # Then both were handled, and it does not listen any more
    assert ran == [b"1", b"2"]
    await eventually(lambda: raw.publish(namespace, "3") == 0)


@pytest.mark.parametrize("swallows", [False, True])
async def test_what_does_not_finish_within_the_grace_is_counted(
    one: Gate, raw: Any, namespace: str, swallows: bool
) -> None:
    # Given one message at work that will not end, even when it is cancelled, and one that waits
    cancelled, go, running = list[str](), asyncio.Event(), list[asyncio.Task[Any] | None]()

    @one.subscribe(namespace, concurrency=1)
    async def handle(heard: PubSubMessage) -> None:
        running.append(asyncio.current_task())
        while not go.is_set():
            try:
                await go.wait()
            except asyncio.CancelledError:
                cancelled.append("yes")
                if not swallows:
                    raise

    async with one.aio.subscribers(grace=0):
        raw.publish(namespace, "1")
        raw.publish(namespace, "2")
        await eventually(lambda: one.counters["channel.heard"] == 2)
    # Then stopping does not wait for it, and both are counted
    assert (cancelled, one.counters["channel.abandoned"]) == (["yes"], 2)
    # And when it ends after all, the one that waited does not start
    go.set()
    await eventually(lambda: running[0] is not None and running[0].done())
    assert len(running) == 1


def no_generator(heard: PubSubMessage) -> Any:
    yield heard


@for_each(
    ("channel", "options", "callback", "named"),
    [
        pytest.param("", {}, print, "channel", id="empty"),
        pytest.param("prices.*", {}, print, "channel", id="a pattern that does not say so"),
        pytest.param("prices", {"concurrency": 0}, print, "concurrency", id="no concurrency"),
        pytest.param("prices", {"backlog": True}, print, "backlog", id="no number"),
        pytest.param("prices", {}, "print", "callback", id="no function"),
        pytest.param("prices", {}, no_generator, "callback", id="a generator"),
    ],
)
def test_bad_input_is_refused_where_it_is_written(channel: str, options: Any, callback: Any, named: str) -> None:
    gate = Gate("redis://nowhere.invalid")
    with pytest.raises(InvalidArgument) as refused:
        gate.subscribe(channel, **options)(callback)
    assert refused.value.name == named
    assert gate.subscribers == []


async def test_nothing_to_listen_to_is_an_error(one: Gate) -> None:
    with pytest.raises(InvalidArgument, match=r"gate\.on"):
        async with one.aio.subscribers():
            pass
