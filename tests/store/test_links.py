"""Both links when the server, or the way to it, fails. Faults are real: a server's, or a proxy's."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
import redis.asyncio
import redis.exceptions as rx

from idemgate import Gate, Trigger
from idemgate.core.calls import Batch, Call, new_id
from idemgate.errors import ServerRejected, StoreUnavailable, UnexpectedData
from idemgate.guard.claim_calls import ClaimReply
from idemgate.store import connection, retry, sync
from idemgate.store import pubsub as listen
from idemgate.store.clients import sync_pool
from idemgate.store.connection_aio import open_connection
from idemgate.store.embedded import server as embedded
from idemgate.store.pubsub import PubSubConnection
from idemgate.store.resp import pack_command
from idemgate.store.retry import RetryBudget, is_of_store, is_transient
from idemgate.store.url import endpoint_from_url
from idemgate.testing import Clock
from idemgate.testing.proxy import Proxy
from tests.claims import claims_of
from tests.for_each import for_each
from tests.waiting import eventually

pytestmark = pytest.mark.one_in(3)

ROOT = Path(__file__).parents[2]
NOWHERE = "unix:///nowhere/redis.sock"


def claim(gate: Gate, key: str, owner: bytes | None = None) -> Call[ClaimReply]:
    return claims_of(gate).claim(claims_of(gate).key("s", key), owner or new_id(), 30_000, 60_000)


def inspect(gate: Gate, key: str) -> Call[Any]:
    return claims_of(gate).inspect(claims_of(gate).key("s", key))


def together(calls: list[Call[Any]]) -> Batch[list[Any]]:
    return Batch(calls, list)


# -- ending ------------------------------------------------------------------------------------------------------------


async def test_two_who_wait_for_the_last_reply_both_hear_of_it(url: str) -> None:
    client = redis.asyncio.Redis.from_url(url)
    wire = await open_connection(client.connection_pool, reply_timeout=86_400)
    async with asyncio.timeout(30):
        asked = wire.send(b"*1\r\n$4\r\nPING\r\n")
        await asyncio.gather(wire.drain(), wire.drain())
        assert await asked == b"PONG"
        await wire.close()
    await client.aclose()


# -- scripts the server does not know ---------------------------------------------------------------------------------


async def test_the_tasks_of_an_event_loop_share_one_connection(gate: Gate, raw: redis.Redis) -> None:
    before = {one["id"] for one in raw.client_list()}
    await asyncio.gather(*(gate.aio.context.aio_link.run(inspect(gate, "k")) for _ in range(100)))
    own = [one for one in raw.client_list() if one["id"] not in before and one["cmd"].startswith("eval")]
    assert len(own) == 1
    await gate.aio.close()


async def test_a_forgotten_script_is_sent_again(asker: Any, own: redis.Redis, own_url: str) -> None:
    # Given a link whose scripts the server knows
    ask = asker(own_url)
    assert (await ask.run(claim(ask.gate, "a"))).state == "started"
    # When the server forgets all scripts
    own.script_flush()
    # Then the next call brings its script along, and the one after does not need to
    assert (await ask.run(claim(ask.gate, "b"))).state == "started"
    own.config_resetstat()
    assert (await ask.run(claim(ask.gate, "c"))).state == "started"
    assert set(own.info("commandstats")) & {"cmdstat_eval", "cmdstat_evalsha"} == {"cmdstat_evalsha"}


async def test_forgotten_scripts_of_a_batch_are_sent_again(asker: Any, own: redis.Redis, own_url: str) -> None:
    # Given a server that has forgotten all scripts
    ask = asker(own_url)
    await ask.run(inspect(ask.gate, "a"))
    own.script_flush()
    # When calls of two kinds travel together
    calls = [claim(ask.gate, "a"), inspect(ask.gate, "a"), claim(ask.gate, "a"), inspect(ask.gate, "b")]
    answers = await ask.run_all(together(calls))
    # Then each has its own answer, in order
    assert [one.state for one in answers] == ["started", "in_progress", "in_progress", "absent"]
    assert answers[1].owner == calls[0].args[4].hex()


async def test_a_forgotten_script_is_sent_once_for_all_who_await_it(
    own: redis.Redis, own_url: str, namespace: str
) -> None:
    # Given a server that has forgotten all scripts
    async with AsyncExitStack() as ending:
        gate = Gate(own_url, namespace=namespace, clock=Clock())  # without one some servers need no script
        ending.callback(gate.close)
        ending.push_async_callback(gate.aio.close)
        await gate.aio.first("before", "60s")
        for forgets in range(2):
            own.script_flush()
            own.config_resetstat()
            # When many ask at once
            found = await asyncio.gather(*(gate.aio.first(f"k{forgets}{n % 50}", "60s") for n in range(100)))
            # Then one of them brings the script along, and each is answered once
            assert found == [True] * 50 + [False] * 50
            assert own.info("commandstats")["cmdstat_eval"]["calls"] == 1


# -- what errors mean -------------------------------------------------------------------------------------------------

PASSING: list[tuple[Exception, bool]] = [
    (rx.ConnectionError("Connection closed by server."), True),
    (rx.TimeoutError("Timeout reading from socket"), True),
    (rx.BusyLoadingError("Redis is loading the dataset in memory"), True),
    (rx.ReadOnlyError("You can't write against a read only replica."), True),
    (rx.TryAgainError("Multiple keys request during rehashing of slot"), True),
    (rx.ClusterDownError("The cluster is down"), True),
    (rx.MasterDownError("Link with MASTER is down"), True),
    (rx.MovedError("1 127.0.0.1:7000"), True),
    (rx.ResponseError("BUSY Redis is busy running a script."), True),
    (rx.ResponseError("NOREPLICAS Not enough good replicas to write."), True),
    (rx.ResponseError("MISCONF Redis is configured to save RDB snapshots"), True),
    (
        # Redis 6.2
        rx.ResponseError(
            "Error running script (call to f_0a): @user_script:5: @user_script: 5: -READONLY You can't write"
        ),
        True,
    ),
    (rx.ResponseError("max number of clients reached"), True),
    (rx.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), False),
    (rx.NoPermissionError("this user has no permissions to run the 'evalsha' command"), False),
    (rx.AuthenticationError("invalid username-password pair or user is disabled."), False),
    (rx.ResponseError("user_script:7: attempt to index a nil value"), False),
    (rx.ResponseError("BUSYGROUP Consumer Group name already exists"), False),
    (rx.InvalidResponse("Protocol Error: b'HTTP/1.1 400 Bad Request'"), False),
    (rx.DataError("Invalid input of type: 'dict'."), False),
]


@for_each(("error", "passing"), PASSING, ids=lambda one: str(one)[:40])
def test_which_errors_are_worth_another_try(error: Exception, passing: bool) -> None:
    assert is_transient(error) is passing


OF_STORE = [
    StoreUnavailable("no answer", "no"), ServerRejected("OOM command not allowed"),
    rx.OutOfMemoryError("command not allowed"), rx.ReadOnlyError("You can't write"), rx.MaxConnectionsError("too many"),
    rx.ResponseError("MISCONF Redis is configured to save RDB snapshots"),
    type("ConnectionError", (Exception,), {"__module__": "valkey.exceptions"})("refused"),
]  # fmt: skip
OF_HANDLER = [
    KeyError("redis.exceptions.TimeoutError"), ConnectionError("the peer closed the connection"),
    RuntimeError("OOM command not allowed"), UnexpectedData("k", "a list"), rx.ResponseError("WRONGTYPE"),
]  # fmt: skip


@for_each("error", OF_STORE, ids=repr)
def test_a_failed_server_is_told_from_a_failed_handler(error: Exception) -> None:
    assert is_of_store(error)
    with pytest.raises(ValueError, match="caused") as caused:
        raise ValueError("caused") from error
    assert is_of_store(caused.value)
    meanwhile = ValueError("raised while that was handled")
    meanwhile.__context__ = error
    assert not is_of_store(meanwhile)


@for_each("error", OF_HANDLER, ids=repr)
def test_a_failed_handler_is_told_from_a_failed_server(error: Exception) -> None:
    assert not is_of_store(error)


async def test_a_busy_script_is_waited_for(asker: Any, own: redis.Redis, own_url: str, three_tries: Any) -> None:
    # Given a server that is busy with an endless script of another client
    ask = asker(own_url)
    await ask.run(claim(ask.gate, "before"))
    own.config_set("lua-time-limit", 10)
    with other_client(own_url) as busy:
        endless = asyncio.create_task(asyncio.to_thread(_ignoring_errors, busy.eval, "while true do end", 0))
        try:
            await eventually(lambda: _busy(own))
            # When a call has less time than that
            with three_tries(), pytest.raises(StoreUnavailable) as told:
                await ask.run(claim(ask.gate, "k"), within=20)
            # Then it says that nothing was executed
            assert told.value.executed == "no"
            assert "BUSY" in str(told.value)
            # And a call that has the time gets through when the script is ended
            late = asyncio.create_task(ask.run(claim(ask.gate, "k")))
            await asyncio.sleep(0.05)
            assert not late.done()
        finally:
            own.script_kill()
        assert (await late).state == "started"
        await endless


async def test_a_replica_is_waited_for_until_it_is_a_primary(
    asker: Any, own: redis.Redis, own_url: str, three_tries: Any
) -> None:
    # Given a server that was made a replica
    ask = asker(own_url)
    await ask.run(claim(ask.gate, "before"))
    own.replicaof("127.0.0.1", "1")
    try:
        with three_tries(), pytest.raises(StoreUnavailable) as told:
            await ask.run(claim(ask.gate, "k"), within=20)
        assert told.value.executed == "no"
        late = asyncio.create_task(ask.run(claim(ask.gate, "k")))
    finally:
        # When it is a primary again
        own.replicaof("NO", "ONE")
    # Then the call gets through
    assert (await late).state == "started"


@pytest.mark.parametrize("error", ["READONLY", "MASTERDOWN", "NOREPLICAS"])
@pytest.mark.parametrize("batch", [False, True])
async def test_after_a_failover_behind_its_address_calls_reach_the_new_primary(
    asker: Any, own: redis.Redis, own_url: str, url: str, batch: bool, error: str
) -> None:
    with Proxy(own_url) as address:
        # Given connections to a server
        ask = asker(address.url)
        await ask.run(claim(ask.gate, "before"))
        own.config_set("replica-serve-stale-data", "no" if error == "MASTERDOWN" else "yes")
        if error == "NOREPLICAS":
            own.config_set("min-replicas-to-write", 1)
        else:
            own.replicaof("127.0.0.1", "1")
        try:
            # When it is a replica or has none, and its address leads to the new primary
            address._upstream = url
            # Then calls get through
            if batch:
                answers = await ask.run_all(together([claim(ask.gate, key) for key in "ab"]))
                assert [one.state for one in answers] == ["started", "started"]
            else:
                assert (await ask.run(claim(ask.gate, "a"))).state == "started"
        finally:
            own.replicaof("NO", "ONE")


async def test_after_a_failover_listeners_hear_the_new_primary(
    own: redis.Redis, own_url: str, url: str, raw: redis.Redis, namespace: str
) -> None:
    with Proxy(own_url) as address:
        # Given a listener whose server becomes a replica, and another one behind its address
        gate = Gate(address.url, namespace=namespace)
        link, heard, name = gate.aio.context.aio_link, [], f"{namespace}:c".encode()
        ear = link.subscription()
        await ear.add(name, lambda _channel, data: heard.append(data))
        await link.run(claim(gate, "before"))
        own.replicaof("127.0.0.1", "1")
        try:
            address._upstream = url
            # When a call learns of it
            await link.run(claim(gate, "k"))
            # Then the listener hears of the gap, and hears the new server
            await eventually(lambda: heard == [None])
            assert raw.publish(name, "x") == 1
            await eventually(lambda: heard == [None, b"x"])
        finally:
            own.replicaof("NO", "ONE")
            await ear.close()
            await gate.aio.close()


@for_each(
    "text",
    [
        "READONLY You can't write against a read only replica.",
        "LOADING Redis is loading the dataset in memory",
        "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
        "NOREPLICAS Not enough good replicas to write.",
        "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
        "WAIT cannot be used with replica instances. Please also note that writes to replicas are just local.",
    ],
)
def test_an_error_of_a_server_that_is_no_primary_suggests_a_failover(text: str) -> None:
    assert retry.suggests_failover(redis.exceptions.ResponseError(text))
    assert not retry.suggests_failover(redis.exceptions.ResponseError("WRONGTYPE " + text.partition(" ")[0]))


def test_the_heartbeat_reaches_the_new_primary_behind_its_address(
    own: redis.Redis, own_url: str, url: str, namespace: str
) -> None:
    with Proxy(own_url) as address:
        gate = Gate(address.url, namespace=namespace)
        link = gate.context._heartbeat_link()
        assert link.try_each([Batch[None]([claim(gate, "before")], lambda _: None)], 5.0) == [None]
        renewals = [Batch[None]([claim(gate, key)], lambda _: None) for key in "ab"]
        own.replicaof("127.0.0.1", "1")
        try:
            address._upstream = url
            assert all(isinstance(error, StoreUnavailable) for error in link.try_each(renewals, 5.0))
            # It sends each batch once: the next try has a new connection
            assert link.try_each(renewals, 5.0) == [None, None]
        finally:
            own.replicaof("NO", "ONE")
            link.close()
            gate.close()


async def test_requests_in_flight_get_their_replies_when_a_connection_is_replaced(
    own: redis.Redis, own_url: str
) -> None:
    client = redis.asyncio.Redis.from_url(own_url)
    wire = await open_connection(client.connection_pool, reply_timeout=60)
    async with asyncio.timeout(60):
        replies = [wire.send(pack_command(("PING", f"{number}"))) for number in range(3)]
        wire.retire()
        assert wire.retired
        assert not wire.ready
        assert await asyncio.gather(*replies) == [b"0", b"1", b"2"]
        await eventually(lambda: wire.closed)
        with pytest.raises(rx.ConnectionError) as told:
            await wire.send(pack_command(("PING",)))
    with pytest.raises(StoreUnavailable) as final:
        RetryBudget(0).next_delay(told.value)
    assert final.value.executed == "no"
    await client.aclose()


@pytest.mark.parametrize(
    ("reply", "fix"),
    [
        ("MOVED 946 127.0.0.1:7001", "redis+cluster://"),
        ("ASK 946 127.0.0.1:7001", "redis+cluster://"),
        ("CROSSSLOT Keys in request don't hash to the same slot", "redis+cluster://"),
        ("ERR unknown command 'EVALSHA', with args beginning with: 'secret'", "redis+sentinel://"),
        ("ERR This instance has cluster support disabled", "redis://HOST"),
        ("NOAUTH Authentication required.", "USER:PASSWORD"),
        ("WRONGPASS invalid username-password pair or user is disabled.", "password"),
    ],
)
async def test_an_error_of_the_configuration_is_raised_at_once_with_its_fix(asker: Any, reply: str, fix: str) -> None:
    with answering(f"-{reply}") as address:
        ask = asker(address)
        for run in (
            lambda: ask.run(claim(ask.gate, "k"), within=3600),
            lambda: ask.run_all(together([claim(ask.gate, key) for key in "ab"]), within=3600),
        ):
            with pytest.raises(ServerRejected, match=re.escape(fix)) as told:
                await asyncio.wait_for(run(), 60)
            assert "secret" not in str(told.value)


@contextmanager
def answering(line: str) -> Iterator[str]:
    """Yield the URL of a server that sends this line as the reply to each script, and OK to other commands."""

    def serve(client: socket.socket) -> None:
        with client, suppress(OSError):
            while data := client.recv(1 << 16):
                scripts = data.count(b"EVALSHA")
                others = len(re.findall(rb"^\*\d+\r$", data, re.MULTILINE)) - scripts
                client.sendall(b"+OK\r\n" * others + f"{line}\r\n".encode() * scripts)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)


def test_an_error_inside_a_topic_script_keeps_its_code(own: redis.Redis, own_url: str, namespace: str) -> None:
    # Given a topic on a server that was made a replica
    with Gate(own_url, namespace=namespace) as gate:
        topic = gate.topic("t")
        topic.trigger("before")
        call = topic.open().trigger(Trigger("k"))
        own.replicaof("127.0.0.1", "1")
        # Then the error has the code by which a client recognizes it
        try:
            with pytest.raises(rx.ReadOnlyError):
                own.execute_command("EVALSHA", call.script.sha, len(call.keys), *call.keys, *call.args)
        finally:
            own.replicaof("NO", "ONE")


async def test_missing_replicas_are_waited_for(asker: Any, own: redis.Redis, own_url: str, three_tries: Any) -> None:
    # Given a server that wants a replica before it writes
    ask = asker(own_url)
    own.config_set("min-replicas-to-write", 1)
    with three_tries(), pytest.raises(StoreUnavailable, match="NOREPLICAS") as told:
        await ask.run(claim(ask.gate, "k"), within=20)
    assert told.value.executed == "no"
    # When it no longer does, Then the call gets through
    late = asyncio.create_task(ask.run(claim(ask.gate, "k")))
    own.config_set("min-replicas-to-write", 0)
    assert (await late).state == "started"


async def test_a_server_without_memory_refuses_to_begin_but_not_to_end(
    asker: Any, own: redis.Redis, own_url: str
) -> None:
    # Given a claim, and a server that has run out of memory since
    ask = asker(own_url)
    owner, record = new_id(), ask.claims.key("s", "held")
    fence = (await ask.run(claim(ask.gate, "held", owner))).token
    own.config_set("maxmemory", 1)
    # When a caller claims another key
    with pytest.raises(ServerRejected, match="maxmemory"):
        await ask.run(claim(ask.gate, "new"))
    # Then nothing was written, and the claim that stands can be kept and completed
    assert (await ask.run(inspect(ask.gate, "new"))).state == "absent"
    assert await ask.run(ask.claims.renew(record, owner, 30_000, 60_000))
    assert await ask.run(ask.claims.complete(record, owner, fence, 60_000, b"v", b"x"))
    assert (await ask.run(inspect(ask.gate, "held"))).state == "done"


async def test_a_missing_permission_is_not_tried_again(asker: Any, own: redis.Redis, own_url: str) -> None:
    # Given a user who may not run scripts
    own.execute_command("ACL", "SETUSER", "weak", "on", ">pw", "~*", "&*", "+@all", "-evalsha", "-eval")
    ask = asker(redis.Redis(unix_socket_path=own_url.removeprefix("unix://"), username="weak", password="pw"))
    own.config_resetstat()
    # Then the refusal raises at once
    with pytest.raises(ServerRejected, match="evalsha"):
        await ask.run(claim(ask.gate, "k"))
    assert own.info("commandstats")["cmdstat_evalsha"]["rejected_calls"] == 1
    own.execute_command("ACL", "DELUSER", "weak")


async def test_a_wrong_password_is_not_tried_again(asker: Any, own: redis.Redis, own_url: str) -> None:
    ask = asker(redis.Redis(unix_socket_path=own_url.removeprefix("unix://"), username="u", password="wrong-pw"))
    with pytest.raises(ServerRejected, match="invalid username-password pair") as told:
        await ask.run(claim(ask.gate, "k"))
    assert "wrong-pw" not in str(told.value)


async def test_a_foreign_key_is_named(asker: Any, own: redis.Redis, own_url: str) -> None:
    # Given a key of ours that holds what we did not write
    ask = asker(own_url)
    calls = [claim(ask.gate, "k"), claim(ask.gate, "other")]
    own.set(calls[0].keys[0], "another program's")
    # Then it is refused, alone and in a batch, and left as it is
    with pytest.raises(UnexpectedData, match="another layout"):
        await ask.run(calls[0])
    with pytest.raises(UnexpectedData):
        await ask.run_all(together(calls))
    assert own.get(calls[0].keys[0]) == "another program's"


# -- the way to the server --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", [NOWHERE, "redis://127.0.0.1:1"])
async def test_nobody_there_means_not_executed(asker: Any, url: str) -> None:
    ask = asker(url, timeout="100ms")
    for attempt in (ask.run(claim(ask.gate, "k")), ask.run_all(together([claim(ask.gate, "a"), claim(ask.gate, "b")]))):
        with pytest.raises(StoreUnavailable) as told:
            await attempt
        assert told.value.executed == "no"
    with pytest.raises(StoreUnavailable):
        await ask.command("PING")


async def test_a_lost_reply_is_asked_for_again_with_the_same_token(asker: Any, proxy: Proxy) -> None:
    # Given a way on which the reply of the first claim gets lost
    ask = asker(proxy.url)
    await ask.run(inspect(ask.gate, "k"))
    before = proxy.count(b"EVALSHA")
    owner = new_id()
    proxy.cut_reply(b"EVALSHA")
    # When a key is claimed
    entry = await ask.run(claim(ask.gate, "k", owner))
    # Then it was claimed once, by this owner, though the script was executed twice (the third is EVAL: it was unknown)
    assert (entry.state, entry.attempt) == ("started", 1)
    assert proxy.count(owner) in (2, 3)
    assert proxy.count(b"EVALSHA") - before == 2
    # And its record says so
    record = await ask.run(inspect(ask.gate, "k"))
    assert (record.owner, record.attempts) == (owner.hex(), 1)


async def test_a_lost_reply_of_a_batch_has_one_effect(asker: Any, proxy: Proxy) -> None:
    # Given a way on which the replies of a whole batch get lost
    ask = asker(proxy.url)
    topic = ask.gate.topic("t", window="1h", merge="count")
    await asyncio.to_thread(topic.trigger, "warm")
    face = topic.aio if ask.awaiting else topic
    proxy.cut_reply(b"EVALSHA")
    # When triggers travel
    triggers = [("a", None), ("a", None), ("b", None)]
    receipts = await _either(
        face.trigger_many(triggers) if ask.awaiting else asyncio.to_thread(face.trigger_many, triggers)
    )
    # Then each counts once
    assert [one.status for one in receipts] == ["scheduled", "merged", "scheduled"]
    assert topic.peek("a").pending.count == 2


async def test_a_dropped_request_is_sent_again(asker: Any, proxy: Proxy) -> None:
    ask = asker(proxy.url)
    await ask.run(inspect(ask.gate, "k"))
    proxy.drop_request(b"EVALSHA", times=2)
    assert (await ask.run(claim(ask.gate, "k"))).attempt == 1
    answers = await ask.run_all(together([claim(ask.gate, "a"), claim(ask.gate, "b")]))
    assert [one.state for one in answers] == ["started", "started"]


async def test_what_is_not_known_is_said(asker: Any, proxy: Proxy) -> None:
    # Given a way on which every reply gets lost
    ask = asker(proxy.url)
    await ask.run(claim(ask.gate, "warm"))
    proxy.cut_reply(b"EVALSHA", times=1000)
    # Then the error says that the call may have run, as it has
    owner = new_id()
    with pytest.raises(StoreUnavailable) as told:
        await ask.run(claim(ask.gate, "k", owner), within=0.2)
    assert told.value.executed == "unknown"
    proxy.heal()
    assert (await ask.run(inspect(ask.gate, "k"))).owner == owner.hex()


async def test_silence_ends_at_the_deadline(asker: Any, proxy: Proxy) -> None:
    # Given a gate with a time-out of 1 s, and a server that falls silent
    ask = asker(proxy.url, timeout="1s")
    await ask.run(claim(ask.gate, "k"))
    proxy.black_hole = True
    calls = [claim(ask.gate, "a"), claim(ask.gate, "b"), claim(ask.gate, "c")]
    attempts = (lambda: ask.run(calls[0]), "unknown"), (lambda: ask.run_all(together(calls)), "no")
    for attempt, executed in attempts:
        # When something is asked
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match=r"after [12] tries") as told:
            await attempt()
        # Then it gives up at the deadline. The first request was sent; for the second there was no connection
        assert time.monotonic() - began > 0.2
        assert told.value.executed == executed
    # When the server speaks again, Then so does the link
    proxy.heal()
    assert (await ask.run(calls[0], within=30)).state == "started"


async def test_it_goes_on_after_a_restart_of_the_server(asker: Any, tmp_path: Path) -> None:
    # Given a link to a server that keeps its data
    with embedded.start(str(tmp_path)) as server:
        ask = asker(server.url)
        owner = new_id()
        await ask.run(claim(ask.gate, "k", owner))
        # When the server is killed
        os.kill(server.pid, signal.SIGKILL)
        # Then calls, alone and together, wait for its restart, and what was claimed still is
        again, other = await asyncio.gather(
            ask.run(claim(ask.gate, "k")),
            ask.run_all(together([claim(ask.gate, "k", owner), claim(ask.gate, "new")])),
        )
        assert again.state == "in_progress"
        assert [(one.state, one.attempt) for one in other] == [("started", 1), ("started", 1)]


# -- many at once -----------------------------------------------------------------------------------------------------


def test_threads_share_one_link(url: str, namespace: str) -> None:
    # Given one gate and eight threads
    with Gate(url, namespace=namespace) as gate:
        wrong: list[object] = []

        def work(number: int) -> None:
            for i in range(60):
                owner = new_id()
                if gate.context.link.run(claim(gate, f"{number}-{i}", owner)).state != "started":
                    wrong.append((number, i))
                if gate.context.link.run(inspect(gate, f"{number}-{i}")).owner != owner.hex():
                    wrong.append((number, i))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        # When all work at once
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # Then each got its own answers
        assert wrong == []


def test_event_loops_share_one_link(url: str, namespace: str) -> None:
    # Given one gate and four event loops in four threads, two of them one after the other
    gate = Gate(url, namespace=namespace)
    seen: list[bool] = []

    async def work(number: int) -> None:
        owners = {f"{number}-{i}": new_id() for i in range(50)}
        calls = [claim(gate, key, owner) for key, owner in owners.items()]
        entries = await asyncio.gather(*(gate.aio.context.aio_link.run(call) for call in calls))
        records = await gate.aio.context.aio_link.run_all(together([inspect(gate, key) for key in owners]))
        seen.append({one.state for one in entries} == {"started"})
        seen.append([record.owner for record in records] == [owner.hex() for owner in owners.values()])
        await gate.aio.close()

    def live(number: int) -> None:
        asyncio.run(work(number))
        asyncio.run(work(number + 10))

    threads = [threading.Thread(target=live, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Then every one of them got its own answers
    assert seen == [True] * 16


FORK = """if True:
    from tests.claims import claims_of
    import asyncio, os, sys
    from idemgate import Gate
    from idemgate.core.calls import new_id
    gate = Gate(sys.argv[1], namespace=sys.argv[2])

    def own(name):
        for i in range(200):
            owner = new_id()
            key = claims_of(gate).key("s", f"{name}-{i}")
            assert gate.context.link.run(claims_of(gate).claim(key, owner, 30_000, 60_000)).state == "started"
            assert gate.context.link.run(claims_of(gate).inspect(key)).owner == owner.hex()
        return gate.context.link.command("CLIENT", "ID")

    async def own_async(name):
        async def one(i):
            owner = new_id()
            key = claims_of(gate).key("s", f"{name}-{i}")
            claim = claims_of(gate).claim(key, owner, 30_000, 60_000)
            assert (await gate.aio.context.aio_link.run(claim)).state == "started"
            assert (await gate.aio.context.aio_link.run(claims_of(gate).inspect(key))).owner == owner.hex()
        await asyncio.gather(*(one(i) for i in range(200)))
        used = await gate.aio.context.aio_link.command("CLIENT", "ID")
        await gate.aio.close()
        return used

    async def before():
        return await gate.aio.context.aio_link.command("CLIENT", "ID")

    used = {own("before"), asyncio.run(before())}
    read, write = os.pipe()
    child = os.fork()
    name = "parent" if child else "child"
    mine = own(name), asyncio.run(own_async(name + "-async"))
    if not child:
        assert mine[0] not in used and mine[1] not in used, "a connection of the parent's"
        os.write(write, b"good")
        os._exit(0)
    os.waitpid(child, 0)
    assert mine[0] in used, "the parent keeps its own"
    print(os.read(read, 9).decode())
"""


def test_a_forked_child_uses_its_own_connections(url: str, namespace: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK, url, namespace],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("good\n", 0), done.stderr


@pytest.fixture
async def slow_gate(proxy: Proxy, namespace: str) -> AsyncIterator[Gate]:
    """A gate whose every request and reply takes 3 ms."""
    gate = Gate(proxy.url, namespace=namespace)
    proxy.delay = 0.003
    yield gate
    await gate.aio.close()
    gate.close()


async def test_a_storm_of_cancellations_mixes_no_replies(slow_gate: Gate) -> None:
    # Given one connection for many callers, and keys whose owners are known
    link = slow_gate.aio.context.aio_link
    owners = {f"k{i}": new_id() for i in range(20)}
    await link.run_all(together([claim(slow_gate, key, owner) for key, owner in owners.items()]))
    storm = random.Random(7)
    cancelled = finished = 0

    async def look(key: str) -> None:
        assert (await link.run(inspect(slow_gate, key))).owner == owners[key].hex()

    async def look_together(keys: list[str]) -> None:
        records = await link.run_all(together([inspect(slow_gate, key) for key in keys]))
        assert [record.owner for record in records] == [owners[key].hex() for key in keys]

    # When callers are cancelled at every moment of a call
    for _ in range(150):
        keys = storm.sample(sorted(owners), 3)
        tasks = [asyncio.create_task(work) for work in (look(keys[0]), look(keys[1]), look_together(keys))]
        await asyncio.sleep(storm.random() * 0.02)
        for task in storm.sample(tasks, 2):
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            # Then nobody ever sees the reply of another
            assert outcome is None or isinstance(outcome, asyncio.CancelledError)
            cancelled += outcome is not None
            finished += outcome is None
    assert cancelled > 50
    assert finished > 50
    await look_together(sorted(owners))


async def test_a_cancelled_claim_is_given_back(slow_gate: Gate) -> None:
    # Given claims that are cancelled at every moment
    storm = random.Random(3)
    keys = [f"c{i}" for i in range(60)]
    for key in keys:
        task = asyncio.ensure_future(_claimed(slow_gate, key))
        await asyncio.sleep(storm.random() * 0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    # When everything under way has ended
    await slow_gate.aio.close()
    # Then no key is held by a caller who does not know that he holds it
    records = await slow_gate.aio.context.aio_link.run_all(
        together([claims_of(slow_gate).inspect(claims_of(slow_gate).key("claim", key)) for key in keys])
    )
    assert {record.state for record in records} <= {"absent", "released", "done"}
    assert {record.state for record in records} >= {"released", "done"}


async def _claimed(gate: Gate, key: str) -> None:
    claimed = await gate.aio.claim(key)
    await asyncio.shield(claimed.complete())


async def test_more_callers_than_connections_all_get_through(
    asker: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given two connections and 200 callers, some of whom wait for a wake-up meanwhile
    monkeypatch.setattr(connection, "CONNECTIONS", 2)
    ask = asker(url)
    entries = await asyncio.wait_for(asyncio.gather(*(ask.run(claim(ask.gate, f"k{i}")) for i in range(200))), 60)
    # Then all are answered
    assert {one.state for one in entries} == {"started"}


def test_no_connection_left_is_not_executed(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a pool of one connection, which is in use
    monkeypatch.setattr(connection, "CONNECTIONS", 1)
    pool = connection.ConnectionPool(sync_pool(endpoint_from_url(url), seconds=60), 0.5)
    held = pool.send([pack_command(("PING",))])
    # When something else is sent, Then it fails in time, and that it was never sent is known
    with pytest.raises(rx.RedisError) as failed:
        pool.execute(pack_command(("PING",)))
    assert is_transient(failed.value)
    with pytest.raises(StoreUnavailable) as told:
        RetryBudget(0).next_delay(failed.value)
    assert told.value.executed == "no"
    # And the one in use still works
    assert pool.collect(held, 1) == [b"PONG"]
    assert pool.execute(pack_command(("PING",))) == b"PONG"
    pool.close()


class LateRelease(threading.Condition):
    """A condition whose first wait times out, and gets a notification before it returns."""

    def __init__(self, release: Callable[[], object]) -> None:
        super().__init__()
        self._release: Callable[[], object] | None = release

    def wait(self, timeout: float | None = None) -> bool:
        if self._release is None:
            return super().wait(timeout)
        release, self._release = self._release, None
        release()
        return False


@pytest.mark.parametrize("broken", [False, True])
def test_a_connection_released_at_the_end_of_a_wait_is_used(
    url: str, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    # Given a pool of one connection, which is released just after its only waiter gave up
    monkeypatch.setattr(connection, "CONNECTIONS", 1)
    pool = connection.ConnectionPool(sync_pool(endpoint_from_url(url), seconds=60), 0.5)
    held = pool.send([pack_command(("PING",))])
    pool._available = LateRelease(lambda: pool.discard(held) if broken else pool.collect(held, 1))
    # Then the waiter gets it, or its place
    assert pool.execute(pack_command(("PING",))) == b"PONG"
    pool.close()


# -- being woken ------------------------------------------------------------------------------------------------------


async def test_all_channels_are_heard_however_they_are_added(
    url: str, namespace: str, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given that who adds a channel waits for the server's confirmation as long as it takes
    patient = SimpleNamespace(**{**vars(asyncio), "timeout": lambda _seconds: asyncio.timeout(3600)})
    monkeypatch.setattr(listen, "asyncio", patient)
    # Given an ear that is asked for many channels at once, before it is connected
    async with _ear(url, namespace) as ear:
        heard: list[bytes] = []
        names = [f"{namespace}:{i}".encode() for i in range(20)]
        # Then all are confirmed
        async with asyncio.timeout(60):
            await asyncio.gather(*(ear.add(name, lambda channel, _data: heard.append(channel)) for name in names))
        for name in names:
            raw.publish(name, "x")
        await eventually(lambda: sorted(heard) == sorted(names))


async def test_an_ear_that_lost_its_last_listener_hears_the_next(url: str, namespace: str, raw: redis.Redis) -> None:
    async with _ear(url, namespace) as ear:
        heard: list[int] = []
        name = f"{namespace}:c".encode()
        for number in range(30):

            def listen(_channel: bytes, _data: bytes | None, number: int = number) -> None:
                heard.append(number)

            # Given a listener who came while the ear was being closed behind the one before
            await ear.add(name, listen)
            raw.publish(name, "x")
            # Then it hears
            await eventually(lambda number=number: number in heard)
            ear.remove(name, listen)
            raw.publish(name, "to nobody")
            await asyncio.sleep(0.001 * (number % 3))


async def test_a_broken_subscription_is_made_anew_and_the_gap_is_told(
    proxy: Proxy, namespace: str, raw: redis.Redis
) -> None:
    async with _ear(proxy.url, namespace) as ear:
        heard: list[bytes | None] = []
        name, pattern = f"{namespace}:c".encode(), f"{namespace}:p*".encode()
        await ear.add(name, lambda _channel, data: heard.append(data))
        await ear.add(pattern, lambda _channel, data: heard.append(data), pattern=True)
        # When the connection breaks
        proxy.cut_all()
        # Then listeners learn that they may have missed something, and hear again
        await eventually(lambda: heard == [None, None])
        await eventually(lambda: raw.publish(name, "one") == 1)
        await eventually(lambda: raw.publish(f"{namespace}:px", "two") == 1)
        await eventually(lambda: heard == [None, None, b"one", b"two"])


async def test_an_outage_is_logged_once_for_all_connections_and_tries(
    proxy: Proxy, namespace: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given two Pub/Sub connections of a gate
    gaps = [0, 0]
    with Gate(proxy.url, namespace=namespace) as gate:
        ears = [gate.context.aio_link.subscription() for _ in gaps]
        for n, ear in enumerate(ears):

            def listen(_channel: bytes, data: bytes | None, n: int = n) -> None:
                gaps[n] += data is None

            await ear.add(f"{namespace}:{n}".encode(), listen)
        # When they break, and cannot be opened for a while
        opened, tries = PubSubConnection.open, 0

        async def fail(*_: Any) -> PubSubConnection:
            nonlocal tries
            tries += 1
            if tries <= 8:
                raise rx.ConnectionError("away")
            return await opened(*_)

        monkeypatch.setattr(PubSubConnection, "open", fail)
        proxy.cut_all()
        await eventually(lambda: gaps == [1, 1])
        assert tries >= 10
        # Then that is logged once
        assert [record.getMessage().split()[0] for record in caplog.records] == ["listen.lost"]
        # And the next outage is logged again
        proxy.cut_all()
        await eventually(lambda: gaps == [2, 2])
        assert len(caplog.records) == 2
        for ear in ears:
            await ear.close()
        await gate.aio.close()


async def test_a_blocking_call_in_an_event_loop_is_logged_once(
    url: str, namespace: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def events() -> list[str]:
        return [record.getMessage().partition(":")[0] for record in caplog.records]

    monkeypatch.setattr(sync, "_has_warned", False)
    with Gate(url, namespace=namespace) as gate, Gate(NOWHERE, namespace=namespace, timeout=0.1) as away:
        # Not in a thread, and not by the async form
        await asyncio.to_thread(gate.first, "a", "1m")
        await gate.aio.first("b", "1m")
        assert events() == []
        # But where the call waits, and only once
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                away.first("a", "1m")
        assert events() == ["store.blocks_event_loop"]
        await gate.aio.close()


@pytest.mark.parametrize("way", ["first", "once", "trigger"])
async def test_a_blocking_call_whose_connections_were_opened_outside_is_logged_once(
    url: str, namespace: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(sync, "_has_warned", False)
    with Gate(url, namespace=namespace) as gate:
        call: dict[str, Callable[[str], object]] = {
            "first": lambda key: gate.first(key, "1m"),
            "once": gate.once(key="{key}", scope="s")(lambda key: None),
            "trigger": gate.topic("t").trigger,
        }
        await asyncio.to_thread(call[way], "a")
        assert caplog.records == []
        gate.context.activity.calls.due = 0.0  # the sample of the thread is 50 ms old
        call[way]("b")
        call[way]("c")
        assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["store.blocks_event_loop"]


async def test_a_channel_is_added_while_its_connection_is_replaced(
    proxy: Proxy, namespace: str, raw: redis.Redis
) -> None:
    async with _ear(proxy.url, namespace) as ear:
        heard: set[bytes] = set()

        def listen(channel: bytes, data: bytes | None) -> None:
            heard.add(channel if data is not None else b"")

        await ear.add(f"{namespace}:first".encode(), listen)
        for number in range(20):
            # Given tasks that subscribe one after the other, while the connection ends
            names = [f"{namespace}:{number}:{one}".encode() for one in range(30)]
            adding = []
            for one, name in enumerate(names):
                adding.append(asyncio.create_task(ear.add(name, listen)))
                if one == 10 + number % 10:
                    proxy.cut_all()
                await asyncio.sleep(0)
            # Then none of them fails
            async with asyncio.timeout(60):
                await asyncio.gather(*adding)
            # And all of them hear
            await eventually(lambda names=names: all(raw.publish(name, "x") == 1 for name in names))
            await eventually(lambda names=names: heard.issuperset(names))
            for name in names:
                ear.remove(name, listen)
        # And no subscription stays behind
        await eventually(lambda: raw.pubsub_channels(f"{namespace}:*") == [f"{namespace}:first".encode()])


async def test_a_waiter_is_woken(asker: Any, url: str, namespace: str, raw: redis.Redis) -> None:
    ask = asker(url)
    name = f"{namespace}:w".encode()
    if ask.awaiting:
        async with ask.gate.aio.context.aio_link.waiting(name) as event:
            raw.publish(name, "x")
            await asyncio.wait_for(event.wait(), 60)
    else:
        with ask.gate.context.link.waiting(name) as waiter:
            raw.publish(name, "x")
            assert waiter.wait(60) is True
            assert waiter.wait(0.01) is False


async def test_a_waiter_whose_connection_is_lost_is_woken_to_look_again(
    asker: Any, proxy: Proxy, namespace: str, raw: redis.Redis
) -> None:
    ask = asker(proxy.url)
    name = f"{namespace}:w".encode()
    if ask.awaiting:
        async with ask.gate.aio.context.aio_link.waiting(name) as event:
            proxy.cut_all()
            await asyncio.wait_for(event.wait(), 60)
            event.clear()
            raw.publish(name, "x")
            await asyncio.wait_for(event.wait(), 60)
    else:
        with ask.gate.context.link.waiting(name) as waiter:
            proxy.cut_all()
            assert waiter.wait(3600) is True
            raw.publish(name, "x")
            assert waiter.wait(3600) is True


def test_a_waiter_without_a_server_waits_out_its_time() -> None:
    gate = Gate(NOWHERE)
    with gate.context.link.waiting(b"c") as waiter:
        began = time.monotonic()
        assert waiter.wait(0.05) is False
        assert time.monotonic() - began >= 0.05


# -- small things -----------------------------------------------------------------------------------------------------


class _ear:  # noqa: N801 - reads like a function
    """An ear that is closed at the end."""

    def __init__(self, url: str, namespace: str) -> None:
        self._gate = Gate(url, namespace=namespace)

    async def __aenter__(self) -> Any:
        self._ear = self._gate.aio.context.aio_link.subscription()
        return self._ear

    async def __aexit__(self, *_: object) -> None:
        await self._ear.close()
        await self._gate.aio.close()


@contextmanager
def other_client(url: str) -> Iterator[redis.Redis]:
    client = redis.Redis.from_url(url)
    yield client
    client.close()


def _ignoring_errors(call: Callable[..., object], *args: object) -> None:
    try:
        call(*args)
    except rx.RedisError:
        return


def _busy(client: redis.Redis) -> bool:
    try:
        client.ping()
    except rx.ResponseError as error:
        return str(error).startswith("BUSY")
    return False


async def _either(work: Any) -> Any:
    return await work


async def test_who_is_cancelled_while_it_subscribes_is_not_listened_for(gate: Gate, raw: Any, namespace: str) -> None:
    name = f"{namespace}:given up".encode()

    async def wait() -> None:
        async with gate.aio.context.aio_link.waiting(name):
            pytest.fail("it was cancelled before")

    # Given one that begins to subscribe, and is cancelled
    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    assert waiting.cancelled()
    # Then the connection that others listen on is not subscribed to its channel
    async with gate.aio.context.aio_link.waiting(f"{namespace}:other".encode()):
        assert raw.pubsub_numsub(name) == [(name, 0)]
