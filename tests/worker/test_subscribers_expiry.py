"""Keys that expire: of all listeners one acts, and what no event told is acted on all the same."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from idemgate import Gate, InvalidArgument, Trigger
from idemgate.errors import ServerRejected
from idemgate.store.embedded.server import start
from idemgate.subscribers import Expired, Expiry
from idemgate.subscribers.expiry.glob import matcher
from idemgate.subscribers.expiry.rules import add_event_flags, due, look, missing, timed_out
from idemgate.testing import Clock
from idemgate.testing.proxy import Proxy
from tests.cluster import agree, cluster, server, unused_ports, wait_for
from tests.for_each import for_each

SETTING = "notify-keyspace-events"
CHANNEL = "__keyevent@0__:expired"
Make = Callable[..., Gate]


@pytest.fixture(scope="module")
def own() -> Iterator[str]:
    """A server of this module: its setting is changed, and its subscribers are cut off."""
    with start() as started:
        yield started.url


@pytest.fixture
def raw(own: str) -> Iterator[Any]:
    with redis.Redis.from_url(own) as client:
        client.flushall()
        client.config_set(SETTING, "Egx")
        yield client


@pytest.fixture
async def make(own: str, namespace: str) -> AsyncIterator[Make]:
    """Gates of one namespace, as several processes would have."""
    made: list[Gate] = []

    def gate(at: str = own, **options: Any) -> Gate:
        made.append(Gate(at, namespace=namespace, **options))
        return made[-1]

    yield gate
    for one in made:
        await one.aio.close()
        one.close()


def listener(gate: Gate, ran: list[Expired], kind: str = "sync", **options: Any) -> Expiry:
    """The sessions of a gate, with a handler that keeps what it got."""
    sessions = gate.on_expired("sessions", options.pop("pattern", "session:*"), **options)
    if kind == "sync":
        sessions.handler(ran.append)
    else:

        @sessions.handler
        async def ended(gone: Expired) -> None:
            ran.append(gone)

    return sessions


@asynccontextmanager
async def working(*gates: Gate) -> AsyncIterator[None]:
    """All of them listen and work, and have scanned."""
    async with AsyncExitStack() as stack:
        for gate in gates:
            scanned = gate.counters["expiry.scans"]
            await stack.enter_async_context(gate.aio.subscribers())
            await stack.enter_async_context(gate.aio.worker())
            while gate.counters["expiry.scans"] == scanned:
                await asyncio.sleep(0.003)
        yield


async def expire_unheard(raw: Any, *names: str) -> None:
    """They are gone, and nobody was told."""
    raw.config_set(SETTING, "")
    for name in names:
        assert raw.pexpire(name, 1)
    while raw.exists(*names):
        await asyncio.sleep(0.001)


def keys(ran: list[Expired]) -> list[str]:
    return sorted(gone.key for gone in ran)


# -- N hear, one acts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_of_all_listeners_one_acts(kind: str, make: Make, raw: Any, eventually: Any) -> None:
    # Given three listeners
    gates, ran = [make() for _ in range(3)], list[Expired]()
    for gate in gates:
        listener(gate, ran, kind)
    async with working(*gates):
        # When ten keys of the pattern expire, and others expire, or are deleted, or stay
        for number in range(10):
            raw.set(f"session:{number}", "x", px=30 + number)
        raw.set("other:1", "x", px=1)
        raw.set("session:stays", "x")
        raw.set("session:deleted", "x", px=60_000)
        raw.delete("session:deleted")
        # Then each of the ten is handled, and all heard all of them
        await eventually(lambda: all(gate.counters["expiry.heard"] == 10 for gate in gates))
        await eventually(lambda: len(ran) >= 10)
        await eventually(lambda: gates[0].topics["sessions"].stats().pending == 0)
    # Once, with what is known of it
    assert keys(ran) == [f"session:{number}" for number in range(10)]
    assert ran[0].delivery.attempt == 1
    assert ran[0].raw_key == ran[0].key.encode()


REPLICA = """
import json, sys
from idemgate import Gate

url, namespace = sys.argv[1:]
gate = Gate(url, namespace=namespace)
sessions = gate.on_expired("sessions", "session:*", lease="2s")

@sessions.handler
def ended(gone):
    gate.context.link.command("RPUSH", "handled", gone.key)

gate.run()
print(json.dumps(gate.counters.snapshot()))
"""


@pytest.fixture
def processes(own: str, raw: Any, namespace: str) -> Iterator[list[subprocess.Popen[str]]]:
    command = [sys.executable, "-c", REPLICA, own, namespace]
    made = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    yield made
    for process in made:
        process.kill()
        process.communicate()


@pytest.mark.slow
async def test_of_all_processes_one_acts(processes: Any, raw: Any, eventually: Any) -> None:
    # Given three processes in gate.run()
    await eventually(lambda: raw.pubsub_numsub(CHANNEL)[0][1] == 3)
    # When forty keys expire
    for number in range(40):
        raw.set(f"session:{number}", "x", px=20 + 5 * number)
    await eventually(lambda: raw.llen("handled") >= 40)
    answers = await _stopped(processes)
    # Then all ended well, each heard, and each key was handled once
    assert [process.returncode for process in processes] == [0, 0, 0], answers
    assert all(counts["expiry.heard"] > 0 for counts in answers)
    assert sorted(raw.lrange("handled", 0, -1)) == sorted(b"session:%d" % number for number in range(40))


@pytest.mark.slow
async def test_a_killed_process_loses_nothing(processes: Any, raw: Any, eventually: Any) -> None:
    # Given three processes in gate.run(), of which one is killed while keys expire
    await eventually(lambda: raw.pubsub_numsub(CHANNEL)[0][1] == 3)
    for number in range(100):
        raw.set(f"session:{number}", "x", px=20 + 5 * number)
    await eventually(lambda: raw.llen("handled") >= 30)
    processes[0].kill()
    # Then all keys are handled, those that it held when their leases end
    await eventually(lambda: len(set(raw.lrange("handled", 0, -1))) == 100)
    answers = await _stopped(processes[1:])
    # And twice only what it may have handled without having said so
    doubled = raw.llen("handled") - 100
    assert doubled <= sum(counts.get("worker.lapsed", 0) for counts in answers)


async def _stopped(processes: Any) -> list[dict[str, int]]:
    for process in processes:
        process.send_signal(signal.SIGTERM)
    answers = [await asyncio.to_thread(process.communicate, timeout=20) for process in processes]
    return [json.loads(out) for out, _ in answers]


# -- nothing is missed ------------------------------------------------------------------------------------------------


async def test_what_expires_while_nobody_listens_is_acted_on(
    make: Make, raw: Any, clock: Clock, eventually: Any
) -> None:
    # Given a key that a listener has seen, and one that a program tracks without ever listening
    ran = list[Expired]()
    first, web = make(clock=clock), make(clock=clock)
    listener(first, ran)
    tracked = web.on_expired("sessions", "session:*")
    raw.set("session:seen", "x", px=60_000)
    raw.set("session:tracked", "x", px=60_000)
    async with working(first):
        pass
    assert tracked.track("session:tracked") == "tracked"
    # When they expire while nobody is there
    await expire_unheard(raw, "session:seen", "session:tracked")
    clock.advance("61s")
    # Then the next subscriber acts on them
    raw.config_set(SETTING, "Ex")
    second = make(clock=clock)
    listener(second, ran)
    async with working(second):
        await eventually(lambda: len(ran) == 2)
    assert keys(ran) == ["session:seen", "session:tracked"]
    assert {gone.heard for gone in ran} == {False}
    assert all(gone.until is not None for gone in ran)


async def test_no_event_is_needed(make: Make, raw: Any, clock: Clock, eventually: Any) -> None:
    # Given a server that says nothing, a key that is there before, and one that is found by a later scan
    raw.config_set(SETTING, "")
    ran = list[Expired]()
    gate = make(clock=clock)
    sessions = listener(gate, ran, notifications="assume", scan="1m")
    raw.set("session:before", "x", px=100_000)
    async with working(gate):
        raw.set("session:later", "x", px=100_000)
        clock.advance("61s")
        await eventually(lambda: sessions.topic.peek("session:later").pending)
        # When they expire, and their time has come
        await expire_unheard(raw, "session:before", "session:later")
        clock.advance("101s")
        # Then both are acted on
        await eventually(lambda: len(ran) == 2)
    assert keys(ran) == ["session:before", "session:later"]
    assert gate.counters["expiry.heard"] == 0


async def test_of_all_listeners_one_scans(make: Make, raw: Any, clock: Clock, eventually: Any) -> None:
    # Given three listeners, each of which has scanned once
    gates = [make(clock=clock) for _ in range(3)]
    for gate in gates:
        listener(gate, [], scan="1m")
    async with working(*gates):
        # When it is time to scan again
        clock.advance("61s")
        # Then one of them does
        claimed = [gate.counters["expiry.scans"] for gate in gates]
        await eventually(lambda: sum(gate.counters["expiry.scans"] for gate in gates) == sum(claimed) + 1)
        clock.advance("61s")
        await eventually(lambda: sum(gate.counters["expiry.scans"] for gate in gates) == sum(claimed) + 2)


async def test_only_the_event_is_needed(make: Make, raw: Any, eventually: Any) -> None:
    # Given a server that says what expires and nothing else, so that nobody knows of a key before
    raw.config_set(SETTING, "Ex")
    ran = list[Expired]()
    gates = [make(), make()]
    for gate in gates:
        listener(gate, ran)
    async with working(*gates):
        raw.set("session:1", "x", px=20)
        await eventually(lambda: all(gate.counters["expiry.heard"] == 1 for gate in gates))
        await eventually(lambda: ran and gates[0].topics["sessions"].stats().in_flight == 0)
    assert [(gone.key, gone.heard, gone.until) for gone in ran] == [("session:1", True, None)]


async def test_a_lost_connection_loses_nothing(make: Make, raw: Any, clock: Clock, eventually: Any) -> None:
    # Given a listener that knows of a key
    ran = list[Expired]()
    gate = make(clock=clock)
    sessions = listener(gate, ran, notifications="set")
    async with working(gate):
        raw.set("session:known", "x", px=60_000)
        await eventually(lambda: sessions.topic.peek("session:known").pending)
        # When the server forgets to say anything while another key is made, and its connection breaks
        raw.config_set(SETTING, "")
        raw.set("session:unheard", "x", px=60_000)
        raw.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        # Then it looks for what it has missed, counts the gap, and the server says again what expires
        await eventually(lambda: sessions.topic.peek("session:unheard").pending)
        assert missing(raw.config_get(SETTING)[SETTING], "Egx") == ""
        assert gate.counters["expiry.gaps"] == 1
        # And both are acted on when their time has come
        await expire_unheard(raw, "session:known", "session:unheard")
        clock.advance("61s")
        await eventually(lambda: len(ran) == 2)
    assert keys(ran) == ["session:known", "session:unheard"]


async def test_events_are_lost_with_the_connection_and_acted_on(
    make: Make, raw: Any, clock: Clock, eventually: Any
) -> None:
    # Given a listener that knows of twenty keys
    ran = list[Expired]()
    gate = make(clock=clock)
    sessions = listener(gate, ran)
    async with working(gate):
        for number in range(20):
            raw.set(f"session:{number}", "x", px=60_000)
        await eventually(lambda: sessions.topic.stats().scheduled == 20)
        # When its connection is broken again and again while they expire
        for number in range(20):
            raw.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
            raw.pexpire(f"session:{number}", 1)
        clock.advance("61s")
        # Then all are acted on, once
        await eventually(lambda: len(ran) >= 20)
        await eventually(lambda: sessions.topic.stats().in_flight == 0)
    assert keys(ran) == sorted(f"session:{number}" for number in range(20))


async def test_a_server_that_falls_silent_is_told_of(make: Make, raw: Any, eventually: Any, caplog: Any) -> None:
    # Given a listener that only checks
    gate = make()
    sessions = listener(gate, [])
    async with working(gate):
        raw.config_set(SETTING, "")
        raw.set("session:unheard", "x", px=60_000)
        # When it finds, after a gap, that the server says nothing any more
        raw.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
        # Then that is counted and logged, and it goes on with what it finds
        await eventually(lambda: gate.counters["expiry.deaf"] == 1)
        await eventually(lambda: sessions.topic.peek("session:unheard").pending)
    assert "expiry.deaf" in [record.getMessage() for record in caplog.records]


async def test_it_begins_when_the_store_is_there(make: Make, own: str, raw: Any, eventually: Any) -> None:
    # Given a way to the server on which requests break, until the first attempts have failed
    ran = list[Expired]()
    with Proxy(own) as proxy:
        gate = make(proxy.url, timeout="300ms")
        sessions = listener(gate, ran)
        proxy.drop_request(b"", times=1000)
        stop, ready = asyncio.Event(), asyncio.Event()
        raw.set("session:1", "x", px=60_000)
        subscriber = asyncio.create_task(sessions.run(stop, ready=ready.set))
        await ready.wait()
        assert gate.counters["expiry.scans"] == 0
        # When they pass again
        proxy.heal()
        # Then it listens and scans
        await eventually(lambda: gate.counters["expiry.registered"] == 1)
        async with gate.aio.worker():
            raw.pexpire("session:1", 1)
            await eventually(lambda: keys(ran) == ["session:1"])
        stop.set()
        await subscriber


# -- what is acted on -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_renewed_key_is_not_acted_on(kind: str, make: Make, raw: Any, clock: Clock, eventually: Any) -> None:
    # Given a tracked key of a minute, by a clock that is moved
    raw.config_set(SETTING, "Ex")
    ran = list[Expired]()
    gate = make(clock=clock)
    sessions = listener(gate, ran, kind)
    raw.set("session:1", "x", px=60_000)
    async with working(gate):
        former = sessions.topic.peek("session:1").due_at
        # When it is renewed, and its former time has come
        raw.pexpire("session:1", 600_000)
        clock.advance("61s")
        # Then it is not acted on, and due when it will expire now
        await eventually(lambda: gate.counters["expiry.renewed"] == 1)
        await eventually(lambda: sessions.topic.stats().in_flight == 0)
        current = sessions.topic.peek("session:1").due_at
        assert (ran, current > former) == ([], True)
        # When it does expire, sooner than was known
        raw.pexpire("session:1", 20)
        # Then it is acted on
        await eventually(lambda: keys(ran) == ["session:1"])


async def test_a_key_that_expires_again_is_acted_on_again(make: Make, raw: Any, eventually: Any) -> None:
    # Given a key that has expired and was handled, in two replicas
    ran = list[Expired]()
    gates = [make(), make()]
    for gate in gates:
        listener(gate, ran)
    async with working(*gates):
        for times in (1, 2, 3):
            # When it is made anew, lives long enough to be seen, and expires again
            raw.set("session:1", "x", px=1_000)
            # Then it is handled again, once
            await eventually(lambda times=times: len(ran) == times)
            await eventually(lambda times=times: all(gate.counters["expiry.heard"] == times for gate in gates))
            await eventually(lambda: gates[0].topics["sessions"].stats().in_flight == 0)
    assert len(ran) == 3


async def test_an_event_that_was_wrong_does_not_hide_the_next(make: Make, raw: Any, eventually: Any) -> None:
    # Given a key of which an event said that it had expired, while it lives
    ran, gate = list[Expired](), make()
    sessions = listener(gate, ran, notifications="set")
    async with gate.aio.worker():
        raw.set("session:1", "x", px=60_000)
        sessions.track("session:1")
        sessions.topic.trigger_many([timed_out(b"session:1")])
        await eventually(lambda: gate.counters["expiry.renewed"] == 1)
        # When it does expire, long before its time, and is heard to
        raw.delete("session:1")
        sessions.topic.trigger_many([timed_out(b"session:1")])
        # Then it is acted on now, and not when its time would have come
        await eventually(lambda: keys(ran) == ["session:1"])


async def test_a_late_copy_of_an_event_tells_nothing_new(make: Make, raw: Any, clock: Clock, eventually: Any) -> None:
    # Given a key that was handled
    ran = list[Expired]()
    gate = make(clock=clock)
    sessions = listener(gate, ran)
    async with working(gate):
        raw.set("session:1", "x", px=20)
        await eventually(lambda: len(ran) == 1)
        # When its event arrives once more, and what was seen of it before, too
        await eventually(lambda: sessions.topic.stats().in_flight == 0)
        echoes = gate.counters["expiry.echoes"]
        sessions.topic.trigger_many([Trigger("session:1", {"heard": 1})])
        await eventually(lambda: gate.counters["expiry.echoes"] > echoes)
        # Then nothing happens
        assert len(ran) == 1
        # When one arrives much later
        clock.advance("11s")
        sessions.topic.trigger_many([Trigger("session:1", {"heard": 1})])
        # Then it was another time that it expired
        await eventually(lambda: len(ran) == 2)


async def test_what_was_seen_before_it_was_handled_tells_nothing_new(
    make: Make, raw: Any, clock: Clock, eventually: Any
) -> None:
    # Given a key that was seen to live for a minute, and then expired sooner and was handled
    ran = list[Expired]()
    gate = make(clock=clock)
    sessions = listener(gate, ran)
    raw.set("session:1", "x", px=60_000)
    seen = gate.context.link.run(look(b"session:1", clock))
    clock.advance("5s")
    async with working(gate):
        raw.pexpire("session:1", 1)
        await eventually(lambda: gate.counters["expiry.acted"] == 1)
        await eventually(lambda: sessions.topic.stats().in_flight == 0)
        echoes = gate.counters["expiry.echoes"]
        # When a slow listener puts it into the due set for that minute
        sessions.topic.trigger_many([due(b"session:1", seen)])
        clock.advance("61s")
        # Then it is not handled again
        await eventually(lambda: gate.counters["expiry.echoes"] > echoes)
    assert len(ran) == 1


async def test_a_key_that_was_handled_by_a_worker_that_died_is_not_handled_again(
    make: Make, raw: Any, clock: Clock, eventually: Any
) -> None:
    # Given a worker that ends between its handler and the acknowledgement
    raw.config_set(SETTING, "")
    ran = list[Expired]()
    gate = make(clock=clock)
    sessions = listener(gate, ran)
    raw.set("session:1", "x", px=60_000)
    sessions.track("session:1")
    await expire_unheard(raw, "session:1")
    clock.advance("61s")
    (delivery,) = sessions.topic.take(1)
    sessions.topic.definition.handler(delivery)
    # When its lease has ended, and another worker takes over
    clock.advance("31s")
    async with gate.aio.worker():
        await eventually(lambda: gate.counters["expiry.echoes"] == 1)
    # Then it is not handled again
    assert len(ran) == 1


async def test_a_key_that_was_made_lasting_is_forgotten(make: Make, raw: Any, clock: Clock, eventually: Any) -> None:
    # Given a tracked key
    raw.config_set(SETTING, "Ex")
    ran = list[Expired]()
    gate = make(clock=clock)
    sessions = listener(gate, ran)
    raw.set("session:1", "x", px=60_000)
    sessions.track("session:1")
    async with working(gate):
        # When it is written anew without a time to live, and its former time has come
        raw.set("session:1", "y")
        clock.advance("61s")
        # Then it is not acted on, and not waited for
        await eventually(lambda: gate.counters["expiry.renewed"] == 1)
        await eventually(lambda: sessions.topic.stats().in_flight == 0)
    assert (ran, sessions.topic.stats().pending) == ([], 0)


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_failed_handler_is_tried_again(kind: str, make: Make, raw: Any, eventually: Any) -> None:
    # Given a handler that fails twice
    gate, attempts = make(), list[int]()
    sessions = gate.on_expired("sessions", "session:*", backoff=0.001)

    def fail(gone: Expired) -> None:
        attempts.append(gone.delivery.attempt)
        if len(attempts) < 3:
            raise ValueError("no good")

    async def fail_soon(gone: Expired) -> None:
        fail(gone)

    sessions.handler(fail if kind == "sync" else fail_soon)
    async with working(gate):
        raw.set("session:1", "x", px=20)
        # Then it is tried until it succeeds, and not again
        await eventually(lambda: gate.counters["expiry.acted"] == 1)
        await eventually(lambda: sessions.topic.stats().in_flight == 0)
    assert len(attempts) == 3


async def test_untracked_and_lasting_keys_are_not_acted_on(make: Make, raw: Any, eventually: Any) -> None:
    # Given a server that does not say what is deleted
    raw.config_set(SETTING, "Ex")
    ran = list[Expired]()
    gate = make()
    sessions = listener(gate, ran)
    raw.set("session:lasting", "x")
    raw.set("session:out", "x", px=60_000)
    # When keys are tracked and untracked, in both faces
    assert sessions.track("session:lasting") == await sessions.aio.track("session:lasting") == "lasting"
    assert sessions.track("session:none") == await sessions.aio.track("session:none") == "absent"
    assert await sessions.aio.track("session:out") == sessions.track("session:out") == "tracked"
    assert sessions.untrack("session:out") == "cancelled"
    assert await sessions.aio.untrack("session:out") == "absent"
    raw.delete("session:out")
    # Then only what expires is acted on
    async with working(gate):
        raw.set("session:end", "x", px=20)
        await eventually(lambda: ran)
        # The key was checked when it was due, and the server tells its end: both may have triggered.
        await eventually(lambda: (now := sessions.topic.stats()).pending + now.in_flight == 0)
    assert keys(ran) == ["session:end"]


async def test_keys_of_idemgate_itself_are_none_of_them(make: Make, raw: Any, eventually: Any) -> None:
    # Given a listener to everything, and keys of any bytes, and one without a name, and one that is too long
    ran = list[Expired]()
    gate = make()
    listener(gate, ran, pattern="*")
    async with working(gate):
        gate.first("mark", 0.02)
        for key in (b"\xff\n", b"", b"k" * 70_000):
            raw.set(key, "x", px=30)
        raw.set("end", "x", px=60)
        await eventually(lambda: len(ran) >= 2)
        await eventually(lambda: not raw.keys("ig2:*first*"))
    # Then ours are not handled, and what cannot be is counted
    assert sorted(gone.raw_key for gone in ran) == [b"end", b"\xff\n"]
    assert gate.counters["expiry.unfit"] >= 2


async def test_it_hears_the_database_of_its_gate(make: Make, own: str, raw: Any, eventually: Any) -> None:
    # Given listeners to two databases
    here, there = list[Expired](), list[Expired]()
    other = own + ("&" if "?" in own else "?") + "db=3" if own.startswith("unix") else own.rpartition("/")[0] + "/3"
    gates = [make(), make(other)]
    for gate, ran in zip(gates, (here, there), strict=True):
        listener(gate, ran)
    with redis.Redis.from_url(other) as raw_there:
        async with working(*gates):
            # When a key expires in each
            raw.set("session:here", "x", px=20)
            raw_there.set("session:there", "x", px=20)
            await eventually(lambda: here and there)
    # Then each hears its own
    assert (keys(here), keys(there)) == (["session:here"], ["session:there"])


# -- the server's setting ---------------------------------------------------------------------------------------------


async def test_a_server_that_says_nothing_is_an_error_with_the_fix(make: Make, raw: Any) -> None:
    # Given a server that says other things
    raw.config_set(SETTING, "K$x")
    gate = make()
    listener(gate, [])
    # Then it does not start, and says what to do
    with pytest.raises(ServerRejected, match=r"lacks 'E'.*CONFIG SET notify-keyspace-events .*notifications=\"set\""):
        async with gate.aio.subscribers():
            pass


async def test_it_sets_what_is_missing_and_keeps_what_is_there(make: Make, raw: Any) -> None:
    raw.config_set(SETTING, "K$x")
    gate = make()
    listener(gate, [], notifications="set")
    async with gate.aio.subscribers():
        assert set(raw.config_get(SETTING)[SETTING]) == set("K$xEg")


async def test_who_may_not_ask_can_say_that_it_is_set(make: Make, own: str, raw: Any, eventually: Any) -> None:
    # Given a user who may not use CONFIG, as on managed servers
    raw.execute_command("ACL", "SETUSER", "app", "on", ">secret", "~*", "&*", "+@all", "-config")
    client = redis.Redis.from_url(own, username="app", password="secret")
    refused, assuming, ran = make(client), make(client), list[Expired]()
    listener(refused, ran)
    listener(assuming, ran, notifications="assume")
    # Then checking is refused with the ways out
    with pytest.raises(ServerRejected, match=r"may read|let this user.*notifications=\"assume\""):
        async with refused.aio.subscribers():
            pass
    # And assuming works
    async with working(assuming):
        raw.set("session:1", "x", px=20)
        await eventually(lambda: keys(ran) == ["session:1"])
    client.close()


@pytest.mark.parametrize(
    ("flags", "lacks", "after"),
    [
        ("", "Ex", "Egx"),
        ("AE", "", "AE"),
        ("AK", "E", "AKE"),
        ("xE", "", "xEg"),
        ("K$", "Ex", "K$Egx"),
    ],
)
def test_flags_are_added_and_none_is_dropped(flags: str, lacks: str, after: str) -> None:
    assert missing(flags) == lacks
    assert add_event_flags(flags) == after


# -- patterns and bad input -------------------------------------------------------------------------------------------

GLOBS = st.text(alphabet="ab-*?[]^\\", min_size=1, max_size=7)


@pytest.fixture(scope="module")
def empty(own: str) -> Iterator[Any]:
    """A database of this server that holds nothing else."""
    with redis.Redis.from_url(own) as client:
        client.select(7)
        yield client


@given(pattern=GLOBS, names=st.sets(st.text(alphabet="ab-*?[]^\\", min_size=1, max_size=5), min_size=1, max_size=8))
def test_patterns_match_as_they_do_in_redis(empty: Any, pattern: str, names: set[str]) -> None:
    with empty.pipeline() as pipe:
        pipe.select(7).flushdb().mset(dict.fromkeys(names, "x")).keys(pattern)
        found = {key.decode() for key in pipe.execute()[-1]}
    matches = matcher(pattern.encode())
    assert {name for name in names if matches(name.encode())} == found


@for_each(
    ("name", "pattern", "options", "named"),
    [
        pytest.param("sessions", "", {}, "pattern", id="no pattern"),
        pytest.param("sessions", 7, {}, "pattern", id="no text"),
        pytest.param("no name", "session:*", {}, "topic", id="no name"),
        pytest.param("taken", "session:*", {}, "name", id="a topic of that name"),
        pytest.param("sessions", "session:*", {"notifications": "yes"}, "notifications", id="no such choice"),
        pytest.param("sessions", "session:*", {"scan": 0}, "scan", id="no interval"),
        pytest.param("sessions", "session:*", {"retention": "1s"}, "retention", id="forgotten too soon"),
        pytest.param("sessions", "session:*", {"backlog": 0}, "backlog", id="no backlog"),
        pytest.param("sessions", "session:*", {"slots": 3}, "slots", id="no power of two"),
    ],
)
def test_bad_input_is_refused_where_it_is_written(name: Any, pattern: Any, options: Any, named: str) -> None:
    gate = Gate("redis://nowhere.invalid")
    gate.topic("taken")
    with pytest.raises(InvalidArgument) as refused:
        gate.on_expired(name, pattern, **options)
    assert refused.value.name == named
    assert (gate.subscribers, list(gate.topics)) == ([], ["taken"])


def test_what_cannot_be_a_handler_or_a_key_is_refused() -> None:
    sessions = Gate("redis://nowhere.invalid").on_expired("sessions", "session:*")
    for wrong in ("print", lambda _: (yield)):
        with pytest.raises(InvalidArgument):
            sessions.handler(wrong)  # type: ignore[type-var]  # pyright: ignore[reportArgumentType]
    with pytest.raises(InvalidArgument, match="does not match"):
        sessions.track("other:1")
    with pytest.raises(InvalidArgument, match="does not match"):
        sessions.untrack("other:1")


async def test_a_plain_function_that_hands_on_a_coroutine_is_refused(make: Make, raw: Any, eventually: Any) -> None:
    gate = make()
    sessions = gate.on_expired("sessions", "session:*")

    async def soon(gone: Expired) -> None: ...

    sessions.handler(lambda gone: soon(gone))
    async with working(gate):
        raw.set("session:1", "x", px=20)
        await eventually(lambda: sessions.topic.stats().dead)
    assert "async def" in sessions.topic.dead.list()[0].reason


# -- a cluster --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    with cluster(tmp_path_factory.mktemp("cluster")) as found:
        yield found


def nodes(ports: list[int]) -> redis.RedisCluster:
    return redis.RedisCluster(host="127.0.0.1", port=ports[0], decode_responses=True)


async def test_it_hears_every_primary_of_a_cluster(make: Make, ports: list[int], eventually: Any) -> None:
    # Given two listeners to a cluster, which make its nodes say what expires
    ran = list[Expired]()
    gates = [make(f"redis+cluster://127.0.0.1:{ports[0]}") for _ in range(2)]
    for gate in gates:
        listener(gate, ran, notifications="set", slots=4)
    with nodes(ports) as client:
        client.set("session:before", "x", px=60_000)
        async with working(*gates):
            client.pexpire("session:before", 1)
            # When keys expire on all of its nodes
            for number in range(30):
                client.set(f"session:{number}", "x", px=30)
            assert len({client.get_node_from_key(f"session:{number}").port for number in range(30)}) == 3
            # Then each is handled once
            await eventually(lambda: all(gate.counters["expiry.heard"] == 31 for gate in gates))
            await eventually(lambda: len(ran) >= 31, 60)  # a delivery whose reply was lost comes again after 30 s
            await eventually(lambda: gates[0].topics["sessions"].stats().in_flight == 0)
    assert keys(ran) == sorted(["session:before", *(f"session:{number}" for number in range(30))])


@pytest.mark.slow
async def test_it_follows_a_failover(make: Make, ports: list[int], tmp_path: Path, eventually: Any) -> None:
    # Given a listener to a cluster one of whose primaries has a replica
    ran = list[Expired]()
    gate = make(f"redis+cluster://127.0.0.1:{ports[0]}")
    listener(gate, ran, notifications="set")
    (port,) = unused_ports(1)
    options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "5000", "--cluster-config-file", "nodes.conf")
    with server(tmp_path / "replica", port, *options) as replica, nodes(ports) as client:
        old = client.get_node_from_key("session:0")
        await asyncio.to_thread(_join, replica, client, old, ports[0])
        async with working(gate):
            client.set("session:0", "x", px=8_000)
            await eventually(lambda: gate.counters["expiry.registered"] >= 1)
            # When the replica takes over
            await asyncio.to_thread(_take_over, replica)
            # Then it is listened to, and what its former primary knew of is acted on, and what begins there
            await eventually(lambda: replica.pubsub_numsub(CHANNEL)[0][1] == 1)
            client.nodes_manager.initialize()
            client.set("session:0:{session:0}", "x", px=30)
            await eventually(lambda: len(ran) == 2)
    assert keys(ran) == ["session:0", "session:0:{session:0}"]


def _join(replica: Any, client: Any, primary: Any, port: int) -> None:
    replica.execute_command("CLUSTER MEET", "127.0.0.1", port)
    name = client.execute_command("CLUSTER MYID", target_nodes=primary)
    wait_for(lambda: replica.execute_command("CLUSTER REPLICATE", name))
    wait_for(lambda: replica.info("replication")["master_link_status"] == "up")
    # The other primaries vote for it only when they have heard whom it follows.
    with ExitStack() as stack:
        ports = [one.port for one in client.get_primaries()]
        primaries = [stack.enter_context(redis.Redis(port=one, decode_responses=True)) for one in ports]
        wait_for(lambda: agree([replica, *primaries]))


def _take_over(replica: Any) -> None:
    replica.execute_command("CLUSTER FAILOVER")
    wait_for(lambda: replica.info("replication")["role"] == "master")
