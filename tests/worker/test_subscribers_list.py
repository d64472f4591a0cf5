"""Callbacks on lists: removed when done, kept while another owner runs, reclaimed, and dead after too many attempts."""

from __future__ import annotations

import asyncio
import json
import time
from base64 import b64decode
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from redis.crc import key_slot

from idemgate import Gate, InvalidArgument
from idemgate.core.keys import list_keys
from idemgate.errors import Bury, Retry, UnexpectedData
from idemgate.lua import script
from idemgate.subscribers import ListEntry
from idemgate.subscribers.list_entries import ListCalls
from idemgate.testing.proxy import Proxy
from tests import cluster as servers
from tests.claims import claims_of
from tests.waiting import eventually
from tests.worker.stubborn import Stubborn

SOON = "150ms"
"""A reclaim time for tests in which lapsed leases are the subject; elsewhere leases are ended by hand."""
DEAD = "vanished-consumer"


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a read short: a stop waits for it."""
    monkeypatch.setattr("idemgate.subscribers.reader.BLOCK", 50)


@pytest.fixture
def jobs(raw: Any, namespace: str) -> Queue:
    return Queue(raw, f"{namespace}:{{jobs}}")


class Queue:
    """A list and the keys beside it, seen from outside."""

    def __init__(self, raw: Any, name: str) -> None:
        self.raw, self.name = raw, name
        self.source, self.incoming, self.leases, self.state, self.data, self.dead_letters = list_keys(name)

    def push(self, *entries: Any) -> None:
        self.raw.rpush(self.name, *(one if isinstance(one, bytes | str) else json.dumps(one) for one in entries))

    def leave(self, data: bytes, deliveries: int = 1, number: str = "0") -> None:
        """Leave an entry as a consumer does that took it and died. Its lease has ended."""
        self.raw.hset(self.data, number, data)
        self.raw.hset(self.state, number, f"{deliveries} {DEAD}")
        self.raw.zadd(self.leases, {number: 1})

    def age(self) -> None:
        """End all leases and delays."""
        for number in self.raw.zrange(self.leases, 0, -1):
            self.raw.zadd(self.leases, {number: 1})

    def taken(self) -> dict[bytes, tuple[int, bytes]]:
        """The entries between the list and their end: data -> deliveries and consumer."""
        state = self.raw.hgetall(self.state)
        held = {number: value.split(b" ") for number, value in state.items()}
        return {data: (int(held[number][0]), held[number][1]) for number, data in self.raw.hgetall(self.data).items()}

    def settled(self) -> bool:
        return not self.raw.exists(self.source, self.incoming, self.leases, self.state, self.data)

    def dead(self) -> list[dict[str, Any]]:
        return [json.loads(letter) for letter in self.raw.lrange(self.dead_letters, 0, -1)]


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("pop", ["left", "right"])
async def test_entries_are_handled_in_order_and_removed(kind: str, pop: Any, one: Gate, jobs: Queue) -> None:
    # Given entries from before the subscriber started, one of them pushed twice
    push = jobs.raw.rpush if pop == "left" else jobs.raw.lpush
    push(jobs.name, b'{"n": 1}', b"\xff", b"\xff")
    got: list[ListEntry] = []
    if kind == "sync":
        one.consume_list(jobs.name, concurrency=1, pop=pop)(got.append)
    else:

        async def handle(entry: ListEntry) -> None:
            got.append(entry)

        one.consume_list(jobs.name, concurrency=1, pop=pop)(handle)
    async with one.aio.subscribers():
        await eventually(lambda: one.counters["list.acked"] == 3)
        # When others are pushed
        push(jobs.name, "4", "5")
        await eventually(lambda: one.counters["list.acked"] == 5)
    # Then each was handled in order, as its first attempt, with an id of its own
    assert [entry.data for entry in got] == [b'{"n": 1}', b"\xff", b"\xff", b"4", b"5"]
    assert [(entry.list, entry.deliveries) for entry in got] == [(jobs.name, 1)] * 5
    assert got[0].json() == {"n": 1}
    assert len({entry.id for entry in got}) == 5
    # And nothing is left beside the list
    assert jobs.settled()
    assert one.counters["list.read"] == 5


async def test_replicas_share_the_entries(replicas: Any, jobs: Queue) -> None:
    # Given three replicas that wait for entries
    gates, ran = replicas(3), Counter[bytes]()
    async with AsyncExitStack() as stack:
        for gate in gates:

            @gate.consume_list(jobs.name, concurrency=2)
            async def handle(entry: ListEntry) -> None:
                ran[entry.data] += 1

            await stack.enter_async_context(gate.aio.subscribers())
        # When a hundred entries are pushed
        for n in range(100):
            jobs.push(str(n))
        await eventually(lambda: sum(gate.counters["list.acked"] for gate in gates) == 100)
    # Then each was handled once
    assert ran == {b"%d" % n: 1 for n in range(100)}
    assert jobs.settled()


async def test_forwarded_messages_are_consumed(gate: Gate, raw: Any) -> None:
    # Given a topic that forwards to lists beside its slots
    topic, done = gate.topic("exports", merge="append", slots=2), list[tuple[str, Any]]()
    topic.forward("list")

    @gate.once(key="{delivery.id}", on_done="skip")
    def export(delivery: Any) -> None:
        done.append((delivery.key, delivery.payload))

    for name in topic.forward_targets():
        gate.consume_list(name)(lambda entry: export(topic.decode_forwarded(entry.data)))
    topic.trigger("ann", 1)
    topic.trigger("ann", 2)
    topic.trigger("bob", 3)
    async with gate.aio.subscribers():
        # When it forwards
        assert await topic.aio.forward_once() == 2
        await eventually(lambda: gate.counters["list.acked"] == 2)
    # Then each message was handled, and the keys beside the lists are known to the audit
    assert sorted(done) == [("ann", [1, 2]), ("bob", [3])]


async def test_a_duplicate_is_removed_without_running(one: Gate, jobs: Queue) -> None:
    ran: list[str] = []

    @one.consume_list(jobs.name, concurrency=1)
    @one.once(key="{entry.data}", scope="orders")
    async def charge(entry: ListEntry) -> None:
        ran.append(entry.id)

    async with one.aio.subscribers():
        # When a producer pushes an order twice
        jobs.push("7", "7")
        await eventually(lambda: one.counters["list.acked"] == 2)
    # Then it ran once
    assert len(ran) == 1
    assert (one.counters["list.handled"], one.counters["list.duplicate"]) == (1, 1)
    assert jobs.settled()


@pytest.mark.parametrize("policy", ["raise", "skip"])
async def test_an_entry_is_delayed_while_another_owner_runs(one: Gate, jobs: Queue, policy: Any) -> None:
    # Given an order that is in progress elsewhere
    ran: list[str] = []
    elsewhere = one.claim(b"7", scope="orders", lease="10m")

    @one.consume_list(jobs.name)
    @one.once(key="{entry.data}", scope="orders", on_in_progress=policy)
    async def charge(entry: ListEntry) -> None:
        ran.append(entry.id)

    async with one.aio.subscribers():
        # When its entry comes
        jobs.push("7")
        await eventually(lambda: one.counters["list.in_progress"] == 1)
        # Then it waits as an entry that nobody holds, that was no attempt, and reads go on without it
        await eventually(lambda: jobs.taken() == {b"7": (0, b"")})
        jobs.push("8")
        await eventually(lambda: one.counters["list.acked"] == 1)
        assert one.counters["list.in_progress"] == 1
        assert jobs.raw.zrange(jobs.leases, 0, -1, withscores=True)[0][1] > (time.time() + 500) * 1000
        # When the other owner is done, and the delay ends
        assert elsewhere.complete("charged")
        jobs.age()
        await eventually(jobs.settled)
    assert (len(ran), one.counters["list.duplicate"]) == (1, 1)


async def test_it_comes_back_when_the_other_owners_lease_may_end(one: Gate, jobs: Queue) -> None:
    # Given an order whose owner has vanished and whose lease is short, and a long reclaim time
    ran: list[ListEntry] = []

    @one.consume_list(jobs.name, reclaim="1h")
    @one.once(key="{entry.data}", scope="orders")
    async def charge(entry: ListEntry) -> None:
        ran.append(entry)

    record = claims_of(one).key("orders", b"7")
    async with one.aio.subscribers():
        one.context.link.run(claims_of(one).claim(record, b"v" * 16, 2_000, 60_000, b"", 0, False, False))
        # When its entry comes
        jobs.push("7")
        # Then it is delayed until that lease has ended, not for the hour
        await eventually(lambda: one.counters["list.acked"] == 1)
    assert [entry.deliveries for entry in ran] == [1]
    assert 1 <= one.counters["list.in_progress"] <= 5


async def test_a_conflict_becomes_a_dead_letter(one: Gate, jobs: Queue) -> None:
    @one.consume_list(jobs.name, concurrency=1)
    @one.once(key=lambda entry: entry.json()["order"], scope="orders", fingerprint=lambda entry: entry.data)
    async def charge(entry: ListEntry) -> None: ...

    async with one.aio.subscribers():
        # When the same order comes with another amount
        jobs.push({"order": 7, "amount": 1}, {"order": 7, "amount": 2})
        await eventually(lambda: one.counters["list.acked"] == 2)
    # Then the entry is a dead letter with its reason
    [dead] = jobs.dead()
    assert dead.pop("error").endswith("use a new key for a new intent")
    assert set(dead) == {"id", "deliveries", "reason", "at", "data"}
    assert (dead["reason"], dead["deliveries"], json.loads(dead["data"])["amount"]) == ("KeyReused", 1, 2)
    assert one.counters["list.dead"] == 1
    assert jobs.settled()


async def test_what_a_vanished_consumer_took_is_reclaimed(one: Gate, jobs: Queue) -> None:
    # Given an entry that a consumer took before it died, one that it moved and did not take, and a new one
    jobs.leave(b"taken")
    jobs.raw.rpush(jobs.incoming, b"moved")
    jobs.push("new")
    got: list[ListEntry] = []
    one.consume_list(jobs.name, concurrency=1)(got.append)
    # When another subscriber starts
    async with one.aio.subscribers():
        await eventually(lambda: one.counters["list.acked"] == 3)
    # Then they run in this order, the first as its second attempt
    assert [(entry.data, entry.deliveries) for entry in got] == [(b"taken", 2), (b"moved", 1), (b"new", 1)]
    assert (one.counters["list.reclaimed"], one.counters["list.read"]) == (1, 2)
    assert jobs.settled()


async def test_a_killed_process_leaves_nothing_behind(one: Gate, jobs: Queue, run_and_kill: Any) -> None:
    # Given a process that was killed while it handled an entry
    jobs.push("7")
    await asyncio.to_thread(run_and_kill, f'consume_list({jobs.name!r}, reclaim="400ms")', "entry.data")
    got: list[ListEntry] = []

    @one.consume_list(jobs.name, reclaim=SOON)
    @one.once(key="{entry.data}", scope="killed")
    def handle(entry: ListEntry) -> None:
        got.append(entry)

    # When a replica of it listens
    async with one.aio.subscribers():
        await eventually(lambda: one.counters["list.acked"] == 1)
    # Then it ran there as the second attempt
    assert [(entry.data, entry.deliveries) for entry in got] == [(b"7", 2)]
    assert jobs.settled()


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_failure_is_retried_until_it_is_dead(kind: str, one: Gate, jobs: Queue) -> None:
    # Given a callback that fails for one entry
    tries: list[tuple[bytes, int]] = []

    def handle(entry: ListEntry) -> None:
        tries.append((entry.data, entry.deliveries))
        if entry.data == b"\xffbad":
            raise ValueError("no such card")

    async def handle_async(entry: ListEntry) -> None:
        handle(entry)

    one.consume_list(jobs.name, reclaim=SOON, max_deliveries=3, concurrency=1)(
        handle if kind == "sync" else handle_async
    )
    async with one.aio.subscribers():
        jobs.push(b"\xffbad", "good")
        await eventually(lambda: one.counters["list.acked"] == 2)
    # Then it was tried three times behind the other, and is a dead letter
    assert tries == [(b"\xffbad", 1), (b"good", 1), (b"\xffbad", 2), (b"\xffbad", 3)]
    [dead] = jobs.dead()
    assert (dead["reason"], dead["error"]) == ("max_deliveries", "ValueError: no such card")
    assert (dead["deliveries"], b64decode(dead["data_base64"])) == (3, b"\xffbad")
    assert jobs.settled()


async def test_an_entry_whose_deliveries_all_ended_with_their_process_does_not_run(one: Gate, jobs: Queue) -> None:
    jobs.leave(b"poison", deliveries=17)
    ran: list[ListEntry] = []
    one.consume_list(jobs.name)(ran.append)
    async with one.aio.subscribers():
        await eventually(lambda: one.counters["list.acked"] == 1)
    assert ran == []
    assert [dead["deliveries"] for dead in jobs.dead()] == [18]


async def test_bury_and_retry_choose_what_happens(one: Gate, jobs: Queue) -> None:
    tries: list[tuple[bytes, int]] = []

    @one.consume_list(jobs.name, reclaim="1h")
    def handle(entry: ListEntry) -> None:
        tries.append((entry.data, entry.deliveries))
        if entry.data == b"never":
            raise Bury("not for us")
        if entry.deliveries == 1:
            raise Retry("not yet", delay="10ms")

    async with one.aio.subscribers():
        jobs.push("never", "soon")
        await eventually(lambda: one.counters["list.acked"] == 2)
    # Then that happened long before the reclaim time
    assert sorted(tries) == [(b"never", 1), (b"soon", 1), (b"soon", 2)]
    assert [(dead["reason"], dead["data"]) for dead in jobs.dead()] == [("Bury", "never")]


async def test_dead_letters_are_bounded_and_dropped_ones_are_counted(one: Gate, jobs: Queue) -> None:
    @one.consume_list(jobs.name, concurrency=1, max_dead_letters=2)
    async def handle(entry: ListEntry) -> None:
        raise Bury

    async with one.aio.subscribers():
        jobs.push(*map(str, range(5)))
        await eventually(lambda: one.counters["list.acked"] == 5)
    assert [dead["data"] for dead in jobs.dead()] == ["3", "4"]
    assert one.counters["list.dead_trimmed"] == 3


async def test_an_entry_that_cannot_be_buried_is_not_removed(one: Gate, jobs: Queue) -> None:
    # Given a key of another type in the place of the dead letters
    jobs.raw.set(jobs.dead_letters, "text")

    @one.consume_list(jobs.name)
    async def handle(entry: ListEntry) -> None:
        raise Bury

    async with one.aio.subscribers():
        jobs.push("7")
        await eventually(lambda: one.counters["list.unburied"] == 1)
        assert list(jobs.taken()) == [b"7"]
        # When that is repaired, and the entry comes again
        jobs.raw.delete(jobs.dead_letters)
        jobs.age()
        await eventually(jobs.settled)
    assert len(jobs.dead()) == 1


async def test_a_long_callback_is_not_reclaimed_by_others(replicas: Any, jobs: Queue) -> None:
    # Given two replicas, and a callback that takes longer than the reclaim time
    gates, release, started = replicas(2), asyncio.Event(), list[str]()

    async def handle(entry: ListEntry) -> None:
        started.append(entry.id)
        await release.wait()

    async with AsyncExitStack() as stack:
        for gate in gates:
            gate.consume_list(jobs.name, reclaim="1500ms", concurrency=1)(handle)
            await stack.enter_async_context(gate.aio.subscribers())
        jobs.push("7")
        await eventually(lambda: started)
        # When its lease was renewed until the first one has ended twice
        first = jobs.raw.zscore(jobs.leases, started[0])
        await eventually(lambda: jobs.raw.zscore(jobs.leases, started[0]) > first + 3000)
        release.set()
        await eventually(jobs.settled)
    # Then no other consumer took it
    assert len(started) == 1
    assert [sum(gate.counters[f"list.{name}"] for gate in gates) for name in ("reclaimed", "lost")] == [0, 0]


async def test_leases_are_renewed_while_a_callback_blocks_the_event_loop(one: Gate, jobs: Queue) -> None:
    # Given a callback that blocks its event loop until its lease was renewed
    renewed = list[bool]()

    @one.consume_list(jobs.name, reclaim="3s")
    async def handle(entry: ListEntry) -> None:
        first, end = jobs.raw.zscore(jobs.leases, entry.id), time.monotonic() + 20
        while (lease := jobs.raw.zscore(jobs.leases, entry.id)) == first and time.monotonic() < end:
            time.sleep(0.01)  # noqa: ASYNC251 - that is the test
        renewed.append(lease > first)

    async with one.aio.subscribers():
        jobs.push("7")
        await eventually(lambda: renewed and jobs.settled())
    # Then it was renewed meanwhile, so that no other consumer takes the entry
    assert renewed == [True]


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_an_entry_is_renewed_until_its_removal_is_answered(kind: str, one: Gate, jobs: Queue) -> None:
    # Given an event loop that is blocked as soon as the callback ended, until the lease was renewed
    ids = list[str]()

    async def handle_async(entry: ListEntry) -> None:
        ids.append(entry.id)

    def renewed() -> bool:
        first, end = jobs.raw.zscore(jobs.leases, ids[0]), time.monotonic() + 5
        while (lease := jobs.raw.zscore(jobs.leases, ids[0])) == first and time.monotonic() < end:
            time.sleep(0.01)
        return bool(lease > first)

    one.consume_list(jobs.name, reclaim="3s")((lambda entry: ids.append(entry.id)) if kind == "sync" else handle_async)
    async with one.aio.subscribers(), asyncio.timeout(30):
        jobs.push("7")
        while not one.counters["list.handled"]:
            await asyncio.sleep(0)  # each turn of the loop, so that the removal has not left
        was_renewed = renewed()
        await eventually(jobs.settled)
    # Then no other consumer takes the entry meanwhile, and none is reported to have it
    assert was_renewed
    assert (one.counters["list.acked"], one.counters["list.lost"]) == (1, 0)


async def test_an_entry_that_another_took_is_counted_as_lost(one: Gate, jobs: Queue) -> None:
    # Given an entry that runs here
    release, started = asyncio.Event(), list[str]()

    @one.consume_list(jobs.name, reclaim="1s")
    async def handle(entry: ListEntry) -> None:
        started.append(entry.id)
        await release.wait()
        raise Bury

    async with one.aio.subscribers():
        jobs.push("7")
        await eventually(lambda: started)
        # When another consumer takes it and keeps it
        jobs.raw.hset(jobs.state, started[0], "5 other")
        jobs.raw.zadd(jobs.leases, {started[0]: 2e12})
        await eventually(lambda: one.counters["list.lost"] == 1)
        release.set()
        await eventually(lambda: one.counters["list.rejected"] == 1)
    # Then that consumer settles it
    assert jobs.taken() == {b"7": (5, b"other")}
    assert jobs.dead() == []


async def test_an_entry_that_another_took_while_the_process_stalled_does_not_start(
    one: Gate, jobs: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an entry that runs here, and one that waits behind it
    release, started = asyncio.Event(), list[bytes]()

    @one.consume_list(jobs.name, reclaim="60s", concurrency=1)
    async def handle(entry: ListEntry) -> None:
        started.append(entry.data)
        await release.wait()

    async with one.aio.subscribers():
        jobs.push("a", "b")
        await eventually(lambda: started and len(jobs.taken()) == 2)
        # When the process stalls beyond the leases, and another consumer takes the second one
        (second,) = [number for number, data in jobs.raw.hgetall(jobs.data).items() if data == b"b"]
        jobs.raw.hset(jobs.state, second, "2 other")
        jobs.raw.zadd(jobs.leases, {second: 2e12})
        monkeypatch.setattr("idemgate.subscribers.reader.monotonic", lambda: time.monotonic() + 61)
        release.set()
        # Then it does not start here
        await eventually(lambda: one.counters["list.lost"] == 1)
    assert started == [b"a"]
    assert jobs.taken() == {b"b": (2, b"other")}


async def test_a_late_renewal_costs_no_attempt(one: Gate, jobs: Queue) -> None:
    # Given an entry that runs here
    release, ran = asyncio.Event(), list[str]()

    @one.consume_list(jobs.name)
    async def handle(entry: ListEntry) -> None:
        ran.append(entry.id)
        await release.wait()

    async with one.aio.subscribers():
        jobs.push("7")
        await eventually(lambda: ran)
        # When its renewals are so late that this consumer takes it again
        jobs.age()
        await eventually(lambda: jobs.raw.zscore(jobs.leases, ran[0]) > 1)
        # Then it does not run beside itself
        assert [deliveries for deliveries, _ in jobs.taken().values()] == [1]
        release.set()
        await eventually(jobs.settled)
    assert (len(ran), one.counters["list.reclaimed"]) == (1, 0)


async def test_an_entry_whose_take_was_not_answered_is_delivered_as_its_first_attempt(one: Gate, jobs: Queue) -> None:
    # Given a consumer that holds an entry of which it does not know, because the reply was lost
    calls = ListCalls(jobs.name, "me", None, lease_ms=1, pop="left", max_dead_letters=1)
    jobs.push("unknown")
    first = await one.context.aio_link.run(calls.take(5))
    # When its lease ends
    jobs.age()
    again = await one.context.aio_link.run(calls.take(5))
    # Then it is delivered with the same count, and to another consumer with the next
    assert [taken.entry for taken in again.entries] == [taken.entry for taken in first.entries]
    jobs.age()
    other = ListCalls(jobs.name, "other", None, lease_ms=1, pop="left", max_dead_letters=1)
    assert [taken.entry.deliveries for taken in (await one.context.aio_link.run(other.take(5))).entries] == [2]


@pytest.mark.parametrize("undo", [False, True])
async def test_a_late_copy_of_a_release_does_not_release_a_later_delivery(one: Gate, jobs: Queue, undo: bool) -> None:
    # Given an entry that a consumer released, and has taken again
    run = one.context.aio_link.run
    calls, other = (
        ListCalls(jobs.name, name, None, lease_ms=60_000, pop="left", max_dead_letters=1) for name in ("me", "other")
    )
    jobs.push("a")
    (first,) = (await run(calls.take(5))).entries
    release = calls.retry(first, 0, undo=undo)
    await run(release)
    (again,) = (await run(calls.take(5))).entries
    assert again.entry.deliveries == 2 - undo
    # When a copy of the release arrives late
    await run(release)
    # Then no other consumer gets the entry, and its own still holds it
    assert (await run(other.take(5))).entries == []
    assert await run(calls.renew([again])) == [True]


async def test_a_take_that_is_sent_again_takes_other_entries(one: Gate, jobs: Queue) -> None:
    # Given a take that was executed, and whose reply was lost
    take = ListCalls(jobs.name, "me", None, lease_ms=60_000, pop="left", max_dead_letters=1).take(2)
    jobs.push(*"abcdef")
    first = await one.context.aio_link.run(take)
    # When a copy of it is executed, and a late one once those entries are handled
    again = await one.context.aio_link.run(take)
    calls = ListCalls(jobs.name, "me", None, lease_ms=60_000, pop="left", max_dead_letters=1)
    await one.context.aio_link.run(calls.remove([taken.id for taken in first.entries + again.entries]))
    late = await one.context.aio_link.run(take)
    # Then no entry is lost, and none has the id of another
    entries = first.entries + again.entries + late.entries
    assert [taken.entry.data for taken in entries] == [b"a", b"b", b"c", b"d", b"e", b"f"]
    assert len({taken.id for taken in entries}) == 6
    assert set(jobs.taken()) == {b"e", b"f"}


async def test_no_entry_is_lost_when_the_reply_to_a_take_is_lost(url: str, namespace: str, jobs: Queue) -> None:
    # Given a list, and a connection that breaks instead of bringing the reply to a take
    ran = list[bytes]()
    with Proxy(url) as proxy:
        proxied = Gate(proxy.url, namespace=namespace)

        @proxied.consume_list(jobs.name, concurrency=1, reclaim=SOON)
        async def handle(entry: ListEntry) -> None:
            ran.append(entry.data)

        async with proxied.aio.subscribers():
            jobs.push("loads the script")
            await eventually(lambda: ran)
            proxy.cut_reply(script("subscribers/lists/take").sha)
            # When the take is sent again
            jobs.push(*"abcdef")
            # Then each entry is handled
            await eventually(jobs.settled)
        await proxied.aio.close()
        proxied.close()
    assert Counter(ran) == Counter([b"loads the script", b"a", b"b", b"c", b"d", b"e", b"f"])


async def test_data_that_was_deleted_is_counted(one: Gate, jobs: Queue) -> None:
    jobs.leave(b"gone")
    jobs.raw.delete(jobs.data)
    one.consume_list(jobs.name)(print)
    async with one.aio.subscribers():
        await eventually(lambda: one.counters["list.missing"] == 1)
    assert jobs.settled()


async def test_stopping_finishes_running_entries_and_returns_waiting_ones(one: Gate, jobs: Queue) -> None:
    # Given one entry that runs and one that waits
    release, ran = asyncio.Event(), list[bytes]()

    @one.consume_list(jobs.name, concurrency=1)
    async def handle(entry: ListEntry) -> None:
        await release.wait()
        ran.append(entry.data)

    jobs.push("1", "2", "3")
    async with one.aio.subscribers():
        await eventually(lambda: one.counters["list.read"] == 2)
        # When it stops, and the first can finish after that
        stopping = asyncio.create_task(eventually(lambda: one.counters["list.returned"] == 1))
        stopping.add_done_callback(lambda _: release.set())
    # Then the first is removed, and any consumer may take the other at once, as its first attempt
    assert (ran, one.counters["list.acked"]) == ([b"1"], 1)
    assert jobs.taken() == {b"2": (0, b"")}
    again: list[tuple[bytes, int]] = []
    one.subscribers.clear()
    one.consume_list(jobs.name, concurrency=1)(lambda entry: again.append((entry.data, entry.deliveries)))
    async with one.aio.subscribers():
        await eventually(jobs.settled)
    assert again == [(b"2", 1), (b"3", 1)]


async def test_an_entry_that_does_not_finish_within_the_grace_goes_back(one: Gate, jobs: Queue) -> None:
    @one.consume_list(jobs.name)
    async def handle(entry: ListEntry) -> None:
        await asyncio.Event().wait()

    async with one.aio.subscribers(grace=0):
        jobs.push("7")
        await eventually(lambda: one.counters["list.read"] == 1)
    # Then another may take it at once, and that was no attempt
    assert (one.counters["list.abandoned"], one.counters["list.returned"]) == (1, 1)
    assert jobs.taken() == {b"7": (0, b"")}


async def test_a_callback_that_swallows_its_cancellation_is_left_to_its_lease(one: Gate, jobs: Queue) -> None:
    # Given a callback that does not end when it is cancelled
    stubborn = Stubborn()
    one.consume_list(jobs.name, reclaim="10m")(stubborn.handle)

    # When its subscriber stops, then that ends all the same, and nobody may take the entry yet
    async with one.aio.subscribers(grace=0):
        jobs.push("7")
        await eventually(lambda: stubborn.running)
    assert (one.counters["list.abandoned"], one.counters["list.returned"]) == (1, 0)
    [(deliveries, consumer)] = jobs.taken().values()
    assert (deliveries, consumer != b"") == (1, True)
    lease = jobs.raw.zrange(jobs.leases, 0, -1, withscores=True)
    # And when the callback fails later, it does not touch the entry, which waits for the end of its lease
    await stubborn.fail()
    assert jobs.taken() == {b"7": (1, consumer)}
    assert jobs.raw.zrange(jobs.leases, 0, -1, withscores=True) == lease
    assert jobs.dead() == []


async def test_removals_travel_together(one: Gate, jobs: Queue) -> None:
    # Given two hundred entries whose callbacks end at the same time
    release = asyncio.Event()
    jobs.push(*map(str, range(200)))

    @one.consume_list(jobs.name, concurrency=200)
    async def handle(entry: ListEntry) -> None:
        await release.wait()

    async with one.aio.subscribers():
        await eventually(lambda: one.counters["list.read"] == 200)
        calls, run = [], type(one.context.aio_link).run

        async def counted(self: Any, call: Any, *args: Any) -> Any:
            calls.append(call.script.name)
            return await run(self, call, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(one.context.aio_link), "run", counted)
            release.set()
            await eventually(jobs.settled)
    # Then a few calls removed them
    assert calls.count("subscribers/lists/settle") <= 3


async def test_large_entries_are_taken_in_parts(one: Gate, jobs: Queue) -> None:
    # Given entries of more bytes than one call may move
    jobs.push(*[str(n) * 100_000 for n in range(5)])
    got: list[bytes] = []
    one.consume_list(jobs.name, concurrency=1)(lambda entry: got.append(entry.data[:1]))
    async with one.aio.subscribers():
        await eventually(lambda: one.counters["list.acked"] == 5)
    assert got == [b"0", b"1", b"2", b"3", b"4"]


async def test_it_continues_after_the_store_was_away(replicas: Any, url: str, jobs: Queue) -> None:
    # Given a subscriber with an entry that runs, by a connection that can break
    with Proxy(url) as proxy:
        gate, release, ran = replicas(1, proxy.url)[0], asyncio.Event(), Counter[bytes]()

        @gate.consume_list(jobs.name, reclaim=SOON)
        @gate.once(key="{entry.data}", scope="away")
        async def handle(entry: ListEntry) -> None:
            ran[entry.data] += 1
            await release.wait()

        async with gate.aio.subscribers():
            jobs.push("1")
            await eventually(lambda: ran)
            # When the connections break, and the next ten requests too, while its callback ends and an entry comes
            proxy.drop_request(b"", times=10)
            proxy.cut_all()
            release.set()
            jobs.push("2")
            # Then both are done in the end, each by one run
            await eventually(jobs.settled)
        assert ran == {b"1": 1, b"2": 1}
        assert gate.counters["list.store_errors"] >= 1


async def test_a_key_that_is_no_list_ends_all_with_an_error(one: Gate, jobs: Queue) -> None:
    jobs.raw.set(jobs.name, "text")
    one.consume_list(jobs.name)(print)
    with pytest.raises(UnexpectedData, match="holds a string, expected a list"):
        async with one.aio.subscribers():
            pass
    assert jobs.raw.get(jobs.name) == b"text"


@pytest.mark.timeout(120)
async def test_lists_work_on_a_cluster(tmp_path: Path) -> None:
    with servers.cluster(tmp_path) as ports:
        gate = Gate(f"redis+cluster://127.0.0.1:{ports[0]}", namespace="n")
        ran: list[bytes] = []
        names = ["orders", "a:{tag}:b", *(f"jobs-{n}" for n in range(4))]
        for name in names:

            @gate.consume_list(name)
            async def handle(entry: ListEntry) -> None:
                ran.append(entry.data)
                raise Bury

        link = gate.context.aio_link
        async with gate.aio.subscribers():
            for name in names:
                await link.command("RPUSH", name, name)
            await eventually(lambda: gate.counters["list.acked"] == len(names))
        assert sorted(ran) == sorted(name.encode() for name in names)
        assert await link.command("LLEN", "{orders}:dead") == 1
        await gate.aio.close()
        gate.close()


@pytest.mark.parametrize("name", ["orders", "a:{tag}:b", "{x", "a{b", "ig2:{n:topic:t:0/1}:out", "{a}{b}"])
def test_the_keys_beside_a_list_have_its_cluster_slot(name: str) -> None:
    assert len({key_slot(key) for key in list_keys(name)}) == 1
    assert len(set(list_keys(name))) == 6


@pytest.mark.parametrize(
    ("options", "named"),
    [
        pytest.param({"name": ""}, "name", id="no list"),
        pytest.param({"name": "a}b"}, "name", id="brace without a tag"),
        pytest.param({"name": "{}b"}, "name", id="empty tag"),
        pytest.param({"pop": "top"}, "pop", id="no end"),
        pytest.param({"concurrency": 0}, "concurrency", id="no concurrency"),
        pytest.param({"reclaim": -1}, "reclaim", id="no duration"),
        pytest.param({"max_deliveries": 0}, "max_deliveries", id="no deliveries"),
        pytest.param({"max_dead_letters": 1.5}, "max_dead_letters", id="no number"),
    ],
)
def test_invalid_options_are_rejected(options: Any, named: str) -> None:
    gate = Gate("redis://nowhere.invalid")
    with pytest.raises(InvalidArgument) as rejected:
        gate.consume_list(**{"name": "orders"} | options)(print)
    assert rejected.value.name == named
    assert gate.subscribers == []
