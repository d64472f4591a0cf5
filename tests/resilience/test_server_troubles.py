"""A server that forgets its scripts, drops its clients, stands still, has no memory or disk left, or has become a
replica: nothing is lost, half done, or done twice, and waiting calls go on without help."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import redis

from idemgate import Gate, StoreUnavailable
from idemgate.errors import ServerRejected
from idemgate.testing import Clock, audit
from tests.cluster import wait_for
from tests.resilience.counted import CountedWork
from tests.resilience.servers import DEBUG, Server, everything


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "data", *DEBUG, "--appendonly", "yes") as made:
        yield made


@contextmanager
def troubled(trouble: Callable[[], object], every: float) -> Iterator[Counter[str]]:
    """The trouble comes again and again; how often, is counted."""
    halt, came = threading.Event(), Counter[str]()

    def work() -> None:
        while not halt.wait(every):
            with suppress(redis.exceptions.ConnectionError):
                trouble()
                came["times"] += 1

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield came
    finally:
        halt.set()
        thread.join(60)


def stall(server: Server, drawn: random.Random) -> None:
    """Stands still as a whole, its connections open."""
    assert server.process is not None
    os.kill(server.process.pid, signal.SIGSTOP)
    threading.Event().wait(drawn.uniform(0.05, 0.4))
    os.kill(server.process.pid, signal.SIGCONT)


TROUBLES: dict[str, tuple[float, Callable[[Server, random.Random], object]]] = {
    "scripts forgotten": (0.001, lambda server, _: server.client.script_flush()),
    "clients killed": (0.05, lambda server, _: server.client.execute_command("CLIENT", "KILL", "TYPE", "normal")),
    "subscribers killed": (0.05, lambda server, _: server.client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")),
    "writes paused": (0.2, lambda server, _: server.client.execute_command("CLIENT", "PAUSE", 100, "WRITE")),
    "all paused": (0.2, lambda server, _: server.client.execute_command("CLIENT", "PAUSE", 100, "ALL")),
    "stalls (DEBUG SLEEP)": (0.2, lambda server, _: server.client.execute_command("DEBUG", "SLEEP", 0.2)),
    "stops and goes on (SIGSTOP)": (0.3, stall),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("trouble", TROUBLES)
async def test_under_trouble_nothing_is_lost_or_done_twice(
    server: Server,
    namespace: str,
    trouble: str,
    kills: int,
    drawn: random.Random,
    seed: int,
    record_fault: Callable[..., None],
) -> None:
    gate = Gate(server.url, namespace=namespace, timeout="60s")
    work, numbers = CountedWork(gate), itertools.count()
    least, times = max(150, kills), min(max(2, kills // 10), 30)

    async def produce() -> None:
        """Until the trouble has come often enough."""
        while (number := next(numbers)) < least or came["times"] < times:
            await work.do(number)

    every, does = TROUBLES[trouble]
    async with gate.aio.worker(concurrency=8):
        with troubled(lambda: does(server, drawn), every) as came:
            await asyncio.gather(*(produce() for _ in range(3)))
        most = len(work.guarded) // 2
        await asyncio.to_thread(wait_for, lambda: len(work.runs) == most)
    # Then each was accepted and acknowledged once, and ran once: no lease was lost
    stats = await work.topic.aio.stats()
    assert (stats["accepted"], stats["acked_triggers"], stats["lapsed"]) == (most, most, 0)
    assert set(work.runs.values()) == set(work.guarded.values()) == {1}
    assert len(work.guarded) == 2 * most >= 2 * least
    assert gate.counters["once.completion_lost"] == gate.counters["worker.unsettled"] == 0
    await gate.aio.close()
    gate.close()
    record_fault(
        f"server: {trouble}",
        came["times"],
        promises="P2 P6 P7",
        seed=seed if does is stall else None,
        accepted=most,
        lost=0,
    )


async def test_without_memory_new_work_is_refused_whole_and_what_runs_can_end(
    server: Server, namespace: str, record_fault: Callable[..., None]
) -> None:
    with Gate(server.url, namespace=namespace, timeout="1s") as gate:
        topic = gate.topic("t", backoff=0)
        claims = [gate.claim(n) for n in range(5)]
        batch = gate.claim_many(range(10, 30))
        topic.trigger_many([(n, n) for n in range(6)])
        held = topic.take(5)
        # Given a server that has no memory left
        server.client.config_set("maxmemory", 1)
        before, refused = everything(server.client), 0
        # When new work comes
        for ask in (
            lambda: gate.claim("new"),
            lambda: gate.claim_many(["new", 3, "more"]),
            lambda: gate.first("new", "1h"),
            lambda: topic.trigger("new", 1),
            lambda: topic.trigger("0", 1),
            lambda: topic.trigger_many([("x", 1), ("y", 2)]),
            lambda: claims[3].checkpoint("half"),
        ):
            with pytest.raises(ServerRejected, match="memory"):
                ask()
            refused += 1
        # Then it is refused, and not a byte has changed
        assert everything(server.client) == before
        # While what runs is kept alive, and ended
        assert claims[0].complete("receipt")
        assert claims[1].release()
        assert claims[2].extend()
        assert gate.complete_many([(claim, "receipt") for claim in batch[1:]]) == [True] * 19
        assert gate.release_many(batch) == [True] + [False] * 19
        assert [claim.result for claim in gate.claim_many(range(11, 30))] == ["receipt"] * 19
        assert topic.extend(held) == ["ok"] * 5
        assert topic.ack(held[0]) == "ok"
        assert topic.nack(held[1]) == "ok"
        assert topic.bury(held[2], reason="no") in ("ok", "dead")
        assert topic.release(held[3]) == "ok"
        (due,) = (one for one in topic.take(5) if one.key == "5")
        assert topic.ack(due) == "ok"
        assert str(topic.cancel("4"))
        assert gate.claim(0).result == "receipt"
        # And when there is memory again, all goes on
        server.client.config_set("maxmemory", 0)
        assert gate.claim("new").started
        assert topic.trigger("new", 1).status == "scheduled"
    record_fault("server out of memory", refused, promises="P6 P7", half_states=0)


@pytest.mark.parametrize("awaiting", [False, True])
async def test_a_server_that_cannot_write_is_waited_for_and_nothing_was_done(
    server: Server, namespace: str, awaiting: bool, record_fault: Callable[..., None]
) -> None:
    """MISCONF: the last snapshot failed. READONLY: it follows another server. NOREPLICAS: too few follow it."""
    client = server.client
    troubles: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
        ("READONLY", lambda: client.replicaof("127.0.0.1", 1), lambda: client.replicaof("NO", "ONE")),
        (
            "NOREPLICAS",
            lambda: client.config_set("min-replicas-to-write", 1),
            lambda: client.config_set("min-replicas-to-write", 0),
        ),
        ("MISCONF", lambda: unsaved(server), lambda: client.config_set("stop-writes-on-bgsave-error", "no")),
    ]
    gate = Gate(server.url, namespace=namespace, timeout="500ms")
    patient = Gate(server.url, namespace=namespace, timeout="60s")
    for word, begin, end in troubles:
        begin()
        before = everything(client)
        with pytest.raises(StoreUnavailable, match="(?i)" + {"READONLY": "read only"}.get(word, word)) as refused:
            await first(gate, awaiting, word)
        # Then it certainly did not run
        assert refused.value.executed == "no"
        assert everything(client) == before
        # And who waits has its answer when it can write again
        waiting = asyncio.create_task(first(patient, awaiting, word))
        await asyncio.sleep(0.05)
        end()
        assert await waiting is True
    for one in (gate, patient):
        await one.aio.close()
        one.close()
    record_fault("server refuses to write", len(troubles), promises="P6", done=0)


def unsaved(server: Server) -> None:
    """Its snapshots cannot be written: the directory they belong into is no directory any more."""
    server.client.config_set("stop-writes-on-bgsave-error", "yes")
    server.client.config_set("save", "3600 1")
    (server.home / "dump.rdb").mkdir()
    server.client.bgsave()
    wait_for(lambda: server.client.info("persistence")["rdb_last_bgsave_status"] == "err")


async def first(gate: Gate, awaiting: bool, key: str) -> bool:
    return await (gate.aio.first(key, "1h") if awaiting else asyncio.to_thread(gate.first, key, "1h"))


@pytest.mark.parametrize("awaiting", [False, True])
@pytest.mark.parametrize("policy", ["raise", "run", "local"])
async def test_while_the_server_is_away_each_policy_does_what_it_says(
    server: Server, namespace: str, policy: Any, awaiting: bool, record_fault: Callable[..., None]
) -> None:
    gate, runs, handled = Gate(server.url, namespace=namespace, timeout="500ms"), Counter[str](), asyncio.Queue[str]()
    topic = gate.topic("t", lease="60s")

    @gate.once(key="{key}", scope="s", on_store_error=policy, on_done="skip")
    def charge(key: str) -> str:
        runs[key] += 1
        return key

    @gate.once(key="{key}", scope="s", on_store_error=policy, on_done="skip")
    async def acharge(key: str) -> str:
        runs[key] += 1
        return key

    async def call(key: str) -> str | None:
        return await (acharge(key) if awaiting else asyncio.to_thread(charge, key))

    @topic.handler
    async def handle(delivery: Any) -> None:
        handled.put_nowait(delivery.key)

    async with gate.aio.worker():
        await topic.aio.trigger("before", 1)
        assert await asyncio.wait_for(handled.get(), 60) == "before"
        assert await call("before") == "before"
        await asyncio.to_thread(wait_for, lambda: gate.counters["worker.acked"] == 1)
        # Given a server that is away for many times the time-out
        server.kill()
        for _ in range(3):
            if policy == "raise":
                with pytest.raises(StoreUnavailable):
                    await call("away")
            else:
                await call("away")
        # Then it did not run, or each time, or once, and was counted
        assert runs["away"] == {"raise": 0, "run": 3, "local": 1}[policy]
        assert gate.counters[f"once.store_error.{policy}"] == (0 if policy == "raise" else 3)
        with pytest.raises(StoreUnavailable):
            await topic.aio.trigger("away", 1)
        await asyncio.to_thread(wait_for, lambda: gate.counters["worker.store_unavailable"] >= 1)
        # When it is back
        server.start()
        # Then the worker goes on without help, and guards guard
        await topic.aio.trigger("after", 1)
        assert await asyncio.wait_for(handled.get(), 60) == "after"
        assert [await call("after"), await call("after")] == ["after", None]
        assert runs["after"] == 1
    await gate.aio.close()
    gate.close()
    record_fault(f"server away, on_store_error={policy}", 1, promises="P15", runs=runs["away"])


@pytest.mark.parametrize("awaiting", [False, True])
@pytest.mark.parametrize("policy", ["raise", "run", "local"])
async def test_a_server_that_is_away_for_minutes(
    tmp_path: Path,
    namespace: str,
    policy: Any,
    awaiting: bool,
    monkeypatch: pytest.MonkeyPatch,
    record_fault: Callable[..., None],
) -> None:
    local, runs, clock = import_module("idemgate.guard.local"), Counter[str](), Clock()
    with Server(tmp_path / "kept", "--appendonly", "yes", "--appendfsync", "always") as server:
        gate = Gate(server.url, namespace=namespace, timeout="3s", clock=clock)
        topic = gate.topic("t", lease="60s", backoff=0)

        @gate.once(key="{key}", scope="s", lease="60s", on_store_error=policy, on_done="skip", retention="1h")
        def charge(key: str) -> str:
            runs[key] += 1
            return key

        @gate.once(key="{key}", scope="s", lease="60s", on_store_error=policy, on_done="skip", retention="1h")
        async def acharge(key: str) -> str:
            runs[key] += 1
            return key

        async def call(key: str) -> str | None:
            return await (acharge(key) if awaiting else asyncio.to_thread(charge, key))

        # Given what is done, held, in flight and scheduled, when the server goes away
        await call("done")
        held = gate.claim("held", scope="s", lease="60s")
        topic.trigger("flight", 1)
        (flight,) = topic.take(1)
        topic.trigger("later", 1, delay="5m")
        server.kill()
        began = local.monotonic()
        for minutes in (0, 5, 10):
            # And calls go on for minutes
            clock.advance("5m")
            monkeypatch.setattr(local, "monotonic", lambda minutes=minutes: began + 60 * minutes)
            if policy == "raise":
                with pytest.raises(StoreUnavailable):
                    await call("away")
            else:
                await call("away")
        assert runs["away"] == {"raise": 0, "run": 3, "local": 1}[policy]
        # When it is back
        server.start()
        # Then what was done stays so, and what was not is taken over, under higher tokens
        await call("done")
        assert runs["done"] == 1
        again = gate.claim("held", scope="s", lease="60s")
        assert (again.started, again.taken_over) == (True, 1)
        assert again.token > held.token
        assert not held.complete("stale")
        taken = {one.key: one for one in topic.take(10)}
        assert {key: one.attempt for key, one in taken.items()} == {"flight": 2, "later": 1}
        assert topic.ack(flight) == "lost"
        assert topic.ack(list(taken.values())) == ["ok", "ok"]
        # And a key that ran meanwhile runs once more, since the store never heard of it, and then no more
        before = runs["away"]
        await call("away")
        await call("away")
        assert runs["away"] == before + 1
        report = audit(gate)
        assert report.sound, str(report)
        await gate.aio.close()
        gate.close()
    fault = f"server away, and all clocks moved on by minutes meanwhile, on_store_error={policy}"
    record_fault(fault, 1, promises="P2 P5 P7 P15", runs=runs["away"])
