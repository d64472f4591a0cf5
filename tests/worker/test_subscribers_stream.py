"""Callbacks on consumer groups: acknowledged when done, left while another owner runs, reclaimed, given up for good."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument
from idemgate.errors import Bury, Retry, ServerRejected
from idemgate.subscribers import Entry
from idemgate.testing.proxy import Proxy
from tests.claims import claims_of
from tests.waiting import eventually
from tests.worker.stubborn import Stubborn

AGED = 3_600_000
SOON = "150ms"
"""A reclaim time for tests in which idle time is the subject; elsewhere entries are aged with XCLAIM IDLE."""


@pytest.fixture(autouse=True)
def prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop waits for the read under way: a short one, here, where there are many stops."""
    monkeypatch.setattr("idemgate.subscribers.reader.BLOCK", 50)


@pytest.fixture
def stream(raw: Any, namespace: str) -> Log:
    return Log(raw, namespace)


class Log:
    """A stream and its group "billing", seen from outside."""

    def __init__(self, raw: Any, name: str) -> None:
        self.raw = raw
        self.name = name

    def add(self, **fields: Any) -> bytes:
        return self.raw.xadd(self.name, fields)

    def make(self) -> None:
        self.raw.xgroup_create(self.name, "billing", "0", mkstream=True)

    def take(self, consumer: str = "vanished", n: int = 100) -> list[bytes]:
        """As a consumer that takes entries and is never seen again."""
        return [one for one, _ in self.raw.xreadgroup("billing", consumer, {self.name: ">"}, n)[0][1]]

    def claim(self, entry: bytes, consumer: str = "vanished", idle: int = AGED, count: int | None = None) -> None:
        """Gives an entry to a consumer, as one that nobody has seen to for `idle` ms."""
        self.raw.xclaim(self.name, "billing", consumer, 0, [entry], idle=idle, retrycount=count, justid=True)

    def age(self) -> None:
        for one in self.pending():
            self.claim(one["message_id"], one["consumer"].decode(), count=one["times_delivered"])

    def pending(self) -> list[dict[str, Any]]:
        return self.raw.xpending_range(self.name, "billing", "-", "+", 100)

    def settled(self, n: int) -> bool:
        """Whether the group was given `n` entries, and all of them are acknowledged. Redis 6.2 does not count what it
        gives: there, whether it was given all there are."""
        group = self.raw.xinfo_groups(self.name)[0]
        all_given = group["last-delivered-id"] == self.raw.xinfo_stream(self.name)["last-generated-id"]
        return group.get("entries-read", n if all_given else None) == n and group["pending"] == 0

    def dead(self) -> list[dict[bytes, bytes]]:
        return [fields for _, fields in self.raw.xrange(f"{self.name}:dead")]

    def consumers(self) -> list[dict[str, Any]]:
        return self.raw.xinfo_consumers(self.name, "billing")


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_entries_are_handled_and_acknowledged(kind: str, one: Gate, stream: Log) -> None:
    # Given an entry from before the group was made
    first, got = stream.add(item="a", colour=b"\xff"), list[Entry]()
    if kind == "sync":
        one.stream(stream.name, group="billing", concurrency=1)(got.append)
    else:

        async def handle(entry: Entry) -> None:
            got.append(entry)

        one.stream(stream.name, group="billing", concurrency=1)(handle)
    async with one.aio.subscribers():
        # When another is added
        second = stream.add(item="b")
        await eventually(lambda: stream.settled(2))
    # Then both were handled, in order, with names as text and values as bytes
    assert got == [
        Entry(stream.name, first.decode(), {"item": b"a", "colour": b"\xff"}),
        Entry(stream.name, second.decode(), {"item": b"b"}),
    ]
    # And a consumer that was named for this run only has left the group
    assert stream.consumers() == []
    assert one.counters["stream.acked"] == 2


@pytest.mark.timeout(60)  # an event loop that spins would not see the end of `eventually`
async def test_more_callbacks_run_at_once_than_one_read_takes(one: Gate, stream: Log) -> None:
    # Given more entries, and a higher concurrency, than one read takes
    n, started, release = 1100, list[str](), asyncio.Event()
    pipeline = stream.raw.pipeline()
    for _ in range(n):
        pipeline.xadd(stream.name, {"a": "1"})
    pipeline.execute()

    @one.stream(stream.name, group="billing", concurrency=n)
    async def handle(entry: Entry) -> None:
        started.append(entry.id)
        await release.wait()

    # When no callback ends, then all of them run, and the event loop serves other tasks
    async with one.aio.subscribers():
        await eventually(lambda: len(started) == n)
        release.set()
        await eventually(lambda: stream.settled(n))


async def test_replicas_share_the_entries(replicas: Any, stream: Log) -> None:
    # Given three replicas
    gates, ran = replicas(3), Counter[str]()
    async with AsyncExitStack() as stack:
        for gate in gates:

            @gate.stream(stream.name, group="billing", concurrency=2)
            async def handle(entry: Entry) -> None:
                ran[entry.id] += 1

            await stack.enter_async_context(gate.aio.subscribers())
        # When a hundred entries are added
        ids = [stream.add(n=n).decode() for n in range(100)]
        await eventually(lambda: stream.settled(100))
    # Then each was handled once
    assert ran == dict.fromkeys(ids, 1)


async def test_what_is_new_from_now_on_is_asked_for(one: Gate, stream: Log) -> None:
    # Given an entry from before, and a group that begins with what comes
    stream.add(n=1)
    got: list[Entry] = []
    one.stream(stream.name, group="billing", start="$")(got.append)
    async with one.aio.subscribers():
        new = stream.add(n=2).decode()
        await eventually(lambda: got)
        # When the group is destroyed, and another entry comes
        stream.raw.xgroup_destroy(stream.name, "billing")
        newer = stream.add(n=3).decode()
        # Then the new group goes on behind what was read
        await eventually(lambda: len(got) == 2)
    assert [entry.id for entry in got] == [new, newer]


@pytest.mark.parametrize("on_done", ["replay", "skip", "raise"])
async def test_a_duplicate_is_acknowledged_without_running(on_done: Any, one: Gate, stream: Log) -> None:
    # Given a guard on a business key
    ran: list[str] = []

    @one.stream(stream.name, group="billing", concurrency=1)
    @one.once(key="{entry.fields[order]}", scope="orders", on_done=on_done)
    async def charge(entry: Entry) -> None:
        ran.append(entry.id)

    async with one.aio.subscribers():
        # When a producer sends an order twice
        first = stream.add(order=7).decode()
        stream.add(order=7)
        await eventually(lambda: stream.settled(2))
    # Then it ran once
    assert ran == [first]
    assert (one.counters["stream.handled"], one.counters["stream.duplicate"]) == (1, 1)


@pytest.mark.parametrize("policy", ["raise", "skip"])
async def test_an_entry_stays_pending_while_another_owner_runs(one: Gate, stream: Log, policy: Any) -> None:
    # Given an order that is in progress elsewhere
    ran: list[str] = []
    elsewhere = one.claim(b"7", scope="orders", lease="10m")

    @one.stream(stream.name, group="billing")
    @one.once(key="{entry.fields[order]}", scope="orders", on_done="raise", on_in_progress=policy)
    async def charge(entry: Entry) -> None:
        ran.append(entry.id)

    async with one.aio.subscribers():
        # When its entry comes, and comes again an hour later
        stream.add(order=7)
        for times in (1, 2):
            await eventually(lambda times=times: one.counters["stream.in_progress"] == times)
            # Then it is left pending, and that was no attempt
            await eventually(lambda: [entry["times_delivered"] for entry in stream.pending()] == [0])
            if times == 1:
                stream.age()
        assert ran == []
        # When the other owner is done, and the entry comes a third time
        assert elsewhere.complete("charged")
        stream.age()
        # Then it is acknowledged as a duplicate
        await eventually(lambda: stream.settled(1))
    assert (ran, one.counters["stream.duplicate"]) == ([], 1)


async def test_it_comes_back_when_the_other_owners_lease_may_end(one: Gate, stream: Log) -> None:
    # Given an order whose owner has vanished and whose lease is short, and a long reclaim time
    ran: list[str] = []
    raw_record = claims_of(one).key("orders", b"7")

    @one.stream(stream.name, group="billing", reclaim="1h")
    @one.once(key="{entry.fields[order]}", scope="orders")
    async def charge(entry: Entry) -> None:
        ran.append(entry.id)

    async with one.aio.subscribers():
        vanished = claims_of(one).claim(raw_record, b"v" * 16, 2_000, 60_000, b"", 0, False, False)
        one.context.link.run(vanished)
        # When its entry comes
        first = stream.add(order=7).decode()
        # Then it is not left for the hour, only until that lease has ended
        await eventually(lambda: stream.settled(1))
    assert ran == [first]
    assert one.counters["stream.in_progress"] >= 1


async def test_a_conflict_goes_to_the_dead_stream(one: Gate, stream: Log) -> None:
    # Given a guard with a fingerprint
    @one.stream(stream.name, group="billing", concurrency=1)
    @one.once(key="{entry.fields[order]}", scope="orders", fingerprint=lambda entry: entry.fields["amount"])
    async def charge(entry: Entry) -> None: ...

    async with one.aio.subscribers():
        # When the same order comes with another amount
        stream.add(order=7, amount=1)
        other = stream.add(order=7, amount=2)
        await eventually(lambda: stream.settled(2))
    # Then the entry is in the dead stream, as it was, with the reason
    [dead] = stream.dead()
    assert dead.pop(b"idemgate.error").endswith(b"use a new key for a new intent")
    assert dead == {
        b"idemgate.id": other,
        b"idemgate.stream": stream.name.encode(),
        b"idemgate.group": b"billing",
        b"idemgate.deliveries": b"1",
        b"idemgate.reason": b"KeyReused",
        b"order": b"7",
        b"amount": b"2",
    }
    assert one.counters["stream.dead"] == 1


async def test_what_a_vanished_consumer_took_is_reclaimed(one: Gate, stream: Log) -> None:
    # Given two entries that a consumer took before it vanished, one of them long ago
    stream.make()
    old, young = stream.add(n=1), stream.add(n=2)
    assert stream.take() == [old, young]
    stream.claim(old, count=1)
    got: list[Entry] = []
    one.stream(stream.name, group="billing")(got.append)
    # When another subscriber comes
    async with one.aio.subscribers():
        await eventually(lambda: one.counters["stream.acked"] == 1)
        # Then it goes on with the old one, as its second attempt, and leaves the other
        assert [(entry.id, entry.deliveries) for entry in got] == [(old.decode(), 2)]
        assert [entry["message_id"] for entry in stream.pending()] == [young]
        # And with the other once that is old too
        stream.age()
        await eventually(lambda: stream.settled(2))
    assert one.counters["stream.reclaimed"] == 2


async def test_a_killed_process_leaves_nothing_behind(one: Gate, stream: Log, run_and_kill: Any) -> None:
    # Given a process that was killed while it handled an entry
    number = stream.add(n=1).decode()
    await asyncio.to_thread(run_and_kill, f'stream({stream.name!r}, group="billing")', "entry.id")
    got: list[Entry] = []

    @one.stream(stream.name, group="billing", reclaim=SOON)
    @one.once(key="{entry.id}", scope="killed")
    def handle(entry: Entry) -> None:
        got.append(entry)

    # When a replica of it listens
    async with one.aio.subscribers():
        await eventually(lambda: stream.settled(1))
    # Then it ran there, as soon as neither the group nor the guard held it for the dead
    assert [entry.id for entry in got] == [number]
    assert one.counters["once.taken_over"] == 1


async def test_a_failure_is_tried_again_until_it_is_given_up(one: Gate, stream: Log) -> None:
    # Given a callback that fails, and another entry that does not
    tries: list[int] = []

    @one.stream(stream.name, group="billing", reclaim=SOON, max_deliveries=3)
    async def handle(entry: Entry) -> None:
        if entry.fields["n"] == b"1":
            tries.append(entry.deliveries)
            raise ValueError("cannot")

    async with one.aio.subscribers():
        poison = stream.add(n=1)
        stream.add(n=2)
        # When it was delivered three times
        await eventually(lambda: stream.settled(2))
    # Then it went to the dead stream with its error
    assert tries == [1, 2, 3]
    [dead] = stream.dead()
    assert dead[b"idemgate.id"] == poison
    assert (dead[b"idemgate.reason"], dead[b"idemgate.error"]) == (b"max_deliveries", b"ValueError: cannot")
    assert (one.counters["stream.failed"], one.counters["stream.handled"]) == (3, 1)


async def test_what_killed_its_process_each_time_is_given_up_unrun(one: Gate, stream: Log) -> None:
    # Given an entry that was delivered seventeen times to processes that vanished
    stream.make()
    poison = stream.add(n=1)
    stream.take()
    stream.claim(poison, count=17)
    ran: list[Entry] = []
    one.stream(stream.name, group="billing")(ran.append)
    # When a subscriber reclaims it
    async with one.aio.subscribers():
        await eventually(lambda: stream.settled(1))
    # Then it is not run any more
    assert ran == []
    assert [dead[b"idemgate.deliveries"] for dead in stream.dead()] == [b"18"]


async def test_bury_and_retry_say_what_to_do(one: Gate, stream: Log) -> None:
    # Given a callback that says of one entry never, of the other soon
    tries: list[tuple[bytes, int]] = []

    @one.stream(stream.name, group="billing", reclaim="1h")
    def handle(entry: Entry) -> None:
        tries.append((entry.fields["n"], entry.deliveries))
        if entry.fields["n"] == b"never":
            raise Bury("not for us")
        if entry.deliveries == 1:
            raise Retry("not yet", delay="10ms")

    async with one.aio.subscribers():
        stream.add(n="never")
        stream.add(n="soon")
        await eventually(lambda: stream.settled(2))
    # Then so it was, long before the reclaim time
    assert sorted(tries) == [(b"never", 1), (b"soon", 1), (b"soon", 2)]
    assert [(dead[b"idemgate.reason"], dead[b"n"]) for dead in stream.dead()] == [(b"Bury", b"never")]


async def test_a_stored_failure_is_given_up(one: Gate, stream: Log) -> None:
    # Given a guard that stores failures
    tries: list[str] = []

    @one.stream(stream.name, group="billing")
    @one.once(key="{entry.fields[order]}", scope="orders", on_error="store")
    async def charge(entry: Entry) -> None:
        tries.append(entry.id)
        raise ValueError("no such card")

    async with one.aio.subscribers():
        # When two entries have the same key
        stream.add(order=7)
        await eventually(lambda: one.counters["stream.rejected"] == 1)
        stream.add(order=7)
        await eventually(lambda: stream.settled(2))
    # Then it ran once, and both are dead letters, because each further delivery would fail in the same way
    assert len(tries) == 1
    assert [dead[b"idemgate.reason"] for dead in stream.dead()] == [b"ValueError", b"ReplayedFailure"]


async def test_the_dead_stream_has_an_end_and_says_so(one: Gate, stream: Log) -> None:
    # Given a dead stream of two
    @one.stream(stream.name, group="billing", concurrency=1, dead=f"{stream.name}:lost", max_dead_letters=2)
    async def handle(entry: Entry) -> None:
        raise Bury

    async with one.aio.subscribers():
        for n in range(5):
            stream.add(n=n)
        await eventually(lambda: stream.settled(5))
    # Then the last two are kept, and the others were counted
    kept = [fields[b"n"] for _, fields in stream.raw.xrange(f"{stream.name}:lost")]
    assert (kept, one.counters["stream.dead_trimmed"]) == ([b"3", b"4"], 3)


async def test_what_cannot_be_buried_is_not_acknowledged(one: Gate, stream: Log) -> None:
    # Given a dead stream that is no stream
    stream.raw.set(f"{stream.name}:dead", "text")

    @one.stream(stream.name, group="billing")
    async def handle(entry: Entry) -> None:
        raise Bury

    async with one.aio.subscribers():
        stream.add(n=1)
        await eventually(lambda: one.counters["stream.unburied"] == 1)
        assert len(stream.pending()) == 1
        # When that is mended, and the entry comes again
        stream.raw.delete(f"{stream.name}:dead")
        stream.age()
        # Then it is buried
        await eventually(lambda: stream.settled(1))
    assert len(stream.dead()) == 1


async def test_a_long_callback_is_not_reclaimed_by_others(replicas: Any, stream: Log) -> None:
    # Given two replicas, and a callback that takes longer than the reclaim time
    gates, release, started = replicas(2), asyncio.Event(), list[str]()

    async def handle(entry: Entry) -> None:
        started.append(entry.id)
        await release.wait()

    async with AsyncExitStack() as stack:
        for gate in gates:
            gate.stream(stream.name, group="billing", reclaim="3s", concurrency=1)(handle)
            await stack.enter_async_context(gate.aio.subscribers())
        stream.add(n=1)
        await eventually(lambda: started)
        # When so many heartbeats came that the reclaim time has passed twice
        idle, beats, since = 0, 0, time.monotonic()

        def beaten() -> bool:
            nonlocal idle, beats
            before, idle = idle, stream.pending()[0]["time_since_delivered"]
            beats += idle < before
            return beats >= 6 and time.monotonic() - since > 6

        await eventually(beaten)
        release.set()
        await eventually(lambda: stream.settled(1))
    # Then nobody took it
    assert len(started) == 1
    assert [sum(gate.counters[f"stream.{name}"] for gate in gates) for name in ("reclaimed", "lost")] == [0, 0]


async def test_leases_are_renewed_while_a_callback_blocks_the_event_loop(one: Gate, stream: Log) -> None:
    # Given a callback that blocks its event loop until its entry was renewed
    renewed = list[bool]()

    @one.stream(stream.name, group="billing", reclaim="3s")
    async def handle(entry: Entry) -> None:
        idle, end = -1, time.monotonic() + 20
        while (before := idle) <= (idle := stream.pending()[0]["time_since_delivered"]) and time.monotonic() < end:
            time.sleep(0.01)  # noqa: ASYNC251 - that is the test
        renewed.append(idle < before)

    async with one.aio.subscribers():
        stream.add(n=1)
        await eventually(lambda: stream.settled(1))
    # Then it was renewed meanwhile, so that no other consumer reclaims it
    assert renewed == [True]


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("verdict", ["acked", "dead"])
async def test_an_entry_is_renewed_until_its_acknowledgement_is_answered(
    kind: str, verdict: str, one: Gate, stream: Log
) -> None:
    # Given an event loop that is blocked as soon as the callback ended, until the entry was renewed
    def handle(entry: Entry) -> None:
        if verdict == "dead":
            raise Bury

    async def handle_async(entry: Entry) -> None:
        handle(entry)

    def renewed() -> bool:
        idle, end = -1, time.monotonic() + 5
        while (before := idle) <= (idle := stream.pending()[0]["time_since_delivered"]) and time.monotonic() < end:
            time.sleep(0.01)
        return idle < before

    one.stream(stream.name, group="billing", reclaim="3s")(handle if kind == "sync" else handle_async)
    async with one.aio.subscribers(), asyncio.timeout(30):
        stream.add(n=1)
        while not one.counters["stream.handled"] + one.counters["stream.rejected"]:
            await asyncio.sleep(0)  # each turn of the loop, so that the acknowledgement has not left
        was_renewed = renewed()
        await eventually(lambda: stream.settled(1))
    # Then no other consumer reclaims the entry meanwhile, and none is reported to have it
    assert was_renewed
    assert (one.counters[f"stream.{verdict}"], one.counters["stream.lost"]) == (1, 0)


async def test_a_late_release_leaves_an_entry_to_the_consumer_that_took_it(
    one: Gate, stream: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an entry whose callback failed, and that another consumer takes before the release arrives
    @one.stream(stream.name, group="billing", reclaim="60s")
    async def handle(entry: Entry) -> None:
        stream.claim(entry.id.encode(), "other", idle=0, count=2)
        raise ValueError

    async with one.aio.subscribers():
        stream.add(n=1)
        await eventually(lambda: one.counters["stream.failed"])
    # Then the other consumer keeps it
    assert [(found["consumer"], found["times_delivered"]) for found in stream.pending()] == [(b"other", 2)]


async def test_an_entry_that_another_took_while_the_process_stalled_does_not_start(
    one: Gate, stream: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an entry that runs here, and one that waits behind it
    release, started = asyncio.Event(), list[bytes]()

    @one.stream(stream.name, group="billing", reclaim="60s", concurrency=1)
    async def handle(entry: Entry) -> None:
        started.append(entry.fields["n"])
        await release.wait()

    async with one.aio.subscribers():
        stream.add(n="a")
        second = stream.add(n="b")
        await eventually(lambda: started and one.counters["stream.read"] == 2)
        # When the process stalls beyond the time after which another consumer may take them, and one takes the second
        stream.claim(second, "other", idle=0, count=2)
        monkeypatch.setattr("idemgate.subscribers.reader.monotonic", lambda: time.monotonic() + 61)
        release.set()
        # Then it does not start here
        await eventually(lambda: one.counters["stream.lost"] == 1)
    assert started == [b"a"]


async def test_an_entry_that_another_took_is_counted_as_lost(one: Gate, stream: Log) -> None:
    # Given an entry at work here, that is not taken back while this machine is slow to look
    release = asyncio.Event()

    @one.stream(stream.name, group="billing", reclaim="3s")
    async def handle(entry: Entry) -> None:
        await release.wait()
        raise Bury

    async with one.aio.subscribers():
        entry = stream.add(n=1)
        await eventually(stream.pending)
        # When another consumer takes it, and keeps it
        await eventually(lambda: stream.claim(entry, "other", idle=0, count=5) or one.counters["stream.lost"] == 1)
        release.set()
        await eventually(lambda: one.counters["stream.rejected"] == 1)
    # Then what becomes of it is that consumer's to say
    assert [(found["consumer"], found["times_delivered"]) for found in stream.pending()] == [(b"other", 5)]
    assert stream.dead() == []


async def test_a_late_heartbeat_starts_nothing_twice(one: Gate, stream: Log) -> None:
    # Given an entry at work here
    release, ran = asyncio.Event(), list[str]()

    @one.stream(stream.name, group="billing", consumer="me")
    async def handle(entry: Entry) -> None:
        ran.append(entry.id)
        await release.wait()

    async with one.aio.subscribers():
        entry = stream.add(n=1)
        await eventually(lambda: ran)
        # When its heartbeats are so late that this consumer reclaims it from itself
        stream.claim(entry, "me", count=1)
        await eventually(lambda: stream.pending()[0]["time_since_delivered"] < AGED)
        # Then that was no other attempt, and it does not run beside itself
        assert [found["times_delivered"] for found in stream.pending()] == [1]
        release.set()
        await eventually(lambda: stream.settled(1))
    assert (len(ran), one.counters["stream.reclaimed"]) == (1, 0)


@pytest.mark.parametrize("how", ["destroyed", "deleted"])
async def test_a_group_that_vanished_is_made_again(how: str, one: Gate, stream: Log) -> None:
    # Given a subscriber that works
    got: list[bytes] = []
    one.stream(stream.name, group="billing")(lambda entry: got.append(entry.fields["n"]))
    async with one.aio.subscribers():
        stream.add(n=1)
        await eventually(lambda: one.counters["stream.acked"] == 1)
        # When its group, or the stream as a whole, is gone
        if how == "destroyed":
            stream.raw.xgroup_destroy(stream.name, "billing")
        else:
            stream.raw.delete(stream.name)
        stream.add(n=2)
        # Then it makes the group again, and misses nothing that is there
        await eventually(lambda: one.counters["stream.groups_made"] == 2 and b"2" in got)
        await eventually(lambda: not stream.pending())
    assert sorted(got) == ([b"1", b"1", b"2"] if how == "destroyed" else [b"1", b"2"])


async def test_what_is_at_work_when_its_group_vanishes_is_not_started_again(one: Gate, stream: Log) -> None:
    # Given an entry at work here
    release, ran = asyncio.Event(), list[str]()

    @one.stream(stream.name, group="billing")
    async def handle(entry: Entry) -> None:
        ran.append(entry.id)
        await release.wait()

    async with one.aio.subscribers():
        stream.add(n=1)
        await eventually(lambda: ran)
        # When its group is destroyed, and made again, and gives it out again
        stream.raw.xgroup_destroy(stream.name, "billing")
        await eventually(lambda: one.counters["stream.groups_made"] == 2 and stream.pending())
        release.set()
        # Then it is acknowledged by the run that was under way
        await eventually(lambda: stream.settled(1))
    assert len(ran) == 1


async def test_what_was_trimmed_before_it_was_done_is_counted(one: Gate, stream: Log) -> None:
    # Given an entry that was taken by a vanished consumer and then deleted from the stream
    stream.make()
    entry = stream.add(n=1)
    stream.take()
    stream.claim(entry)
    stream.raw.xdel(stream.name, entry)
    one.stream(stream.name, group="billing")(print)
    # When it is reclaimed
    async with one.aio.subscribers():
        # Then the loss is counted, and nothing is pending
        await eventually(lambda: one.counters["stream.trimmed"] == 1)
        await eventually(lambda: stream.settled(1))


async def test_stopping_finishes_what_runs_and_returns_what_waits(one: Gate, stream: Log) -> None:
    # Given one entry at work and one that waits for its turn
    release, ran = asyncio.Event(), list[bytes]()

    @one.stream(stream.name, group="billing", concurrency=1)
    async def handle(entry: Entry) -> None:
        await release.wait()
        ran.append(entry.fields["n"])

    async with one.aio.subscribers():
        stream.add(n=1)
        second = stream.add(n=2)
        await eventually(lambda: one.counters["stream.read"] == 2)
        # When it stops, and the first can finish after that
        stopping = asyncio.create_task(eventually(lambda: one.counters["stream.returned"] == 1))
        stopping.add_done_callback(lambda _: release.set())
    # Then the first is acknowledged, and the other can be reclaimed at once, as if it had not been delivered
    assert (ran, one.counters["stream.acked"]) == ([b"1"], 1)
    [left] = stream.pending()
    assert (left["message_id"], left["times_delivered"]) == (second, 0)
    assert left["time_since_delivered"] >= 30_000


async def test_what_does_not_finish_within_the_grace_goes_back(one: Gate, stream: Log) -> None:
    # Given an entry whose callback does not end
    @one.stream(stream.name, group="billing")
    async def handle(entry: Entry) -> None:
        await asyncio.Event().wait()

    async with one.aio.subscribers(grace=0):
        stream.add(n=1)
        await eventually(lambda: one.counters["stream.read"] == 1)
    # Then stopping does not wait for it: another may take it at once, and that was no attempt
    assert (one.counters["stream.abandoned"], one.counters["stream.returned"]) == (1, 1)
    [left] = stream.pending()
    assert left["times_delivered"] == 0
    assert left["time_since_delivered"] >= 30_000
    # And its name stays: with the name, the group would forget the entry
    assert [consumer["pending"] for consumer in stream.consumers()] == [1]


async def test_a_callback_that_swallows_its_cancellation_is_left_behind(one: Gate, stream: Log) -> None:
    # Given a callback that does not end when it is cancelled
    stubborn = Stubborn()
    one.stream(stream.name, group="billing")(stubborn.handle)

    # When its subscriber stops, then that ends all the same
    async with one.aio.subscribers(grace=0):
        entry = stream.add(n=1)
        await eventually(lambda: stubborn.running)
    assert one.counters["stream.abandoned"] == 1
    # And when the callback fails later, it does not touch the entry, which another consumer has now
    stream.claim(entry, "other", idle=0, count=5)
    await stubborn.fail()
    assert [(found["consumer"], found["times_delivered"]) for found in stream.pending()] == [(b"other", 5)]


async def test_a_consumer_that_stops_deletes_its_name(one: Gate, stream: Log) -> None:
    # Given a consumer that has handled an entry
    @one.stream(stream.name, group="billing")
    async def handle(entry: Entry) -> None: ...

    async with one.aio.subscribers():
        stream.add(n=1)
        await eventually(lambda: stream.settled(1))
        assert len(stream.consumers()) == 1
    # When it has stopped, then the group does not keep its name
    assert stream.consumers() == []


async def test_names_of_vanished_consumers_are_deleted(one: Gate, stream: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given consumers that were never seen again: two named by idemgate, of which one has an entry, and one by a user
    monkeypatch.setattr("idemgate.subscribers.stream_group.VANISHED", 0)
    stream.make()
    empty, busy = f"host-1-{0:032x}", f"host-2-{0:032x}"
    for name in (empty, "theirs"):
        stream.raw.xgroup_createconsumer(stream.name, "billing", name)
    stream.add(n=1)
    stream.take(busy)

    @one.stream(stream.name, group="billing", consumer="me")
    async def handle(entry: Entry) -> None: ...

    # When another consumer of the group runs
    async with one.aio.subscribers():
        await eventually(lambda: one.counters["stream.consumers_removed"])
    # Then it deletes the name that is generated and has no entry
    assert {consumer["name"].decode() for consumer in stream.consumers()} - {"me"} == {busy, "theirs"}


async def test_acknowledgements_travel_together(one: Gate, stream: Log) -> None:
    # Given two hundred entries whose callbacks end at the same time
    release = asyncio.Event()
    for n in range(200):
        stream.add(n=n)

    @one.stream(stream.name, group="billing", concurrency=200)
    async def handle(entry: Entry) -> None:
        await release.wait()

    async with one.aio.subscribers():
        await eventually(lambda: one.counters["stream.read"] == 200)
        before = stream.raw.info("commandstats").get("cmdstat_xack", {"calls": 0})["calls"]
        # When they end
        release.set()
        await eventually(lambda: stream.settled(200))
    # Then that took a few commands
    assert stream.raw.info("commandstats")["cmdstat_xack"]["calls"] - before <= 3


async def test_it_goes_on_when_the_store_was_away(replicas: Any, url: str, stream: Log) -> None:
    # Given a subscriber with an entry at work, by a way to the server that can break
    with Proxy(url) as proxy:
        gate, release, ran = replicas(1, proxy.url)[0], asyncio.Event(), Counter[bytes]()

        @gate.stream(stream.name, group="billing", reclaim=SOON)
        async def handle(entry: Entry) -> None:
            ran[entry.fields["n"]] += 1
            await release.wait()

        async with gate.aio.subscribers():
            stream.add(n=1)
            await eventually(lambda: ran)
            # When the connections break, and the next ten requests too, while its callback ends and an entry comes
            proxy.drop_request(b"", times=10)
            proxy.cut_all()
            release.set()
            stream.add(n=2)
            # Then both are done in the end, each by one run
            await eventually(lambda: stream.settled(2))
        assert ran == {b"1": 1, b"2": 1}
        assert gate.counters["stream.store_errors"] >= 1


async def test_it_begins_when_the_store_is_there(replicas: Any, url: str, stream: Log) -> None:
    # Given a way to the server on which the next requests break
    with Proxy(url) as proxy:
        gate, got = replicas(1, proxy.url)[0], list[Entry]()
        gate.stream(stream.name, group="billing")(got.append)
        proxy.drop_request(b"", times=5)
        # When the subscriber starts
        async with gate.aio.subscribers():
            # Then it works as soon as that is possible
            await eventually(lambda: stream.raw.exists(stream.name))
            stream.add(n=1)
            await eventually(lambda: stream.settled(1))
        assert len(got) == 1


@pytest.mark.parametrize("group", ["exists", "is missing"])
async def test_it_starts_while_the_server_is_out_of_memory(
    group: str, one: Gate, stream: Log, caplog: pytest.LogCaptureFixture
) -> None:
    # Given entries, and a server without memory
    got = list[bytes]()
    one.stream(stream.name, group="billing")(lambda entry: got.append(entry.fields["n"]))
    stream.add(n=1)
    if group == "exists":
        stream.make()
    stream.raw.config_set("maxmemory", 1)
    try:
        # When the subscriber starts
        async with one.aio.subscribers():
            if group == "exists":
                # Then it handles the entries of a group that exists
                await eventually(lambda: stream.settled(1))
            else:
                # Or it retries, until the server has memory
                await eventually(lambda: one.counters["stream.store_errors"] > 2)
                stream.raw.config_set("maxmemory", 0)
                await eventually(lambda: got and stream.settled(1))
    finally:
        stream.raw.config_set("maxmemory", 0)
    assert got == [b"1"]
    # And no log says that a group was deleted
    assert "subscriber.group_gone" not in caplog.text


@pytest.mark.parametrize("gone", ["the group", "the stream"])
async def test_a_group_that_was_deleted_is_logged_and_created_again(
    gone: str, one: Gate, stream: Log, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a subscriber that looks for vanished consumers each time
    monkeypatch.setattr("idemgate.subscribers.stream.REMOVE_INTERVAL", 0)
    got = list[bytes]()
    one.stream(stream.name, group="billing")(lambda entry: got.append(entry.fields["n"]))
    async with one.aio.subscribers():
        stream.add(n=1)
        await eventually(lambda: stream.settled(1))
        assert "subscriber.group_gone" not in caplog.text
        # When its group is deleted
        if gone == "the group":
            stream.raw.xgroup_destroy(stream.name, "billing")
        else:
            stream.raw.delete(stream.name)
        # Then this is logged, and the group is created
        await eventually(lambda: "subscriber.group_gone" in caplog.text)
        stream.add(n=2)
        await eventually(lambda: b"2" in got)
    # And nothing else was
    assert "subscriber.consumers_kept" not in caplog.text


async def test_what_is_no_stream_ends_all_with_an_error(one: Gate, stream: Log) -> None:
    # Given a key that holds something else, and a subscriber beside that works
    stream.raw.set(stream.name, "text")
    one.subscribe(stream.name)(print)
    one.stream(stream.name, group="billing")(print)
    # When they start
    with pytest.raises(ServerRejected, match="WRONGTYPE"):
        async with one.aio.subscribers():
            pass
    # Then nothing was written, and nobody listens
    assert stream.raw.get(stream.name) == b"text"
    assert stream.raw.pubsub_numsub(stream.name)[0][1] == 0


@pytest.mark.parametrize(
    ("options", "named"),
    [
        pytest.param({"stream": ""}, "stream", id="no stream"),
        pytest.param({"group": ""}, "group", id="no group"),
        pytest.param({"consumer": ""}, "consumer", id="no consumer"),
        pytest.param({"start": "1-0"}, "start", id="another start"),
        pytest.param({"concurrency": 0}, "concurrency", id="no concurrency"),
        pytest.param({"reclaim": -1}, "reclaim", id="no duration"),
        pytest.param({"max_deliveries": 0}, "max_deliveries", id="no deliveries"),
        pytest.param({"max_dead_letters": 1.5}, "max_dead_letters", id="no number"),
        pytest.param({"dead": "orders"}, "dead", id="dead in the stream itself"),
    ],
)
def test_bad_input_is_refused_where_it_is_written(options: Any, named: str) -> None:
    gate = Gate("redis://nowhere.invalid")
    with pytest.raises(InvalidArgument) as refused:
        gate.stream(**{"stream": "orders", "group": "billing"} | options)(print)
    assert refused.value.name == named
    assert gate.subscribers == []


async def test_an_entry_that_another_took_while_it_waited_is_not_started(one: Gate, stream: Log) -> None:
    # Given one entry that runs, and one that waits behind it
    seen, go = [], asyncio.Event()
    first, second = stream.add(n=1), stream.add(n=2)

    @one.stream(stream.name, group="billing", concurrency=1, reclaim=SOON)
    async def handle(entry: Entry) -> None:
        seen.append(entry.id.encode())
        await go.wait()

    async with one.aio.subscribers():
        await eventually(lambda: one.counters["stream.read"] == 2 and seen)
        # When another consumer takes the one that waits
        await eventually(lambda: stream.claim(second, "other", idle=0, count=5) or one.counters["stream.lost"] == 1)
        go.set()
        # Then it is not started here
        await eventually(lambda: one.counters["stream.acked"] == 1)
    assert seen == [first]
