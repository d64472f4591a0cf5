"""Recurring triggers: planned ahead by any worker, each occurrence one message; what runs of those that were missed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise, takewhile
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument, StoreUnavailable
from idemgate.testing import Clock
from idemgate.topics.recurring import build_recurring
from idemgate.worker.worker import Worker

pytestmark = pytest.mark.one_in(3)


def at(*fields: int) -> datetime:
    return datetime(*fields, tzinfo=UTC)  # type: ignore[misc, arg-type]


def noting(gate: Gate, name: str = "reports", **policy: Any) -> tuple[Any, list[datetime]]:
    """A topic and the occurrences for which its handler was called, which their keys tell."""
    topic, seen = gate.topic(name, **policy), []

    @topic.handler
    async def handle(delivery: Any) -> None:
        occurrence = datetime.fromisoformat(delivery.key.split("@")[1])
        assert (delivery.count, delivery.reason) == (1, "time")
        assert occurrence <= delivery.due_at <= gate.context.clock.now()  # type: ignore[union-attr]
        seen.append(occurrence)

    return topic, seen


def planned(topic: Any) -> Any:
    """`await eventually(planned(topic))`: when one occurrence waits in it, and nothing else."""

    async def look() -> bool:
        stats = await topic.aio.stats()
        return (stats.pending, stats.in_flight) == (1, 0) and stats.next_due > topic.definition.context.clock.now()

    return look


async def test_every_local_nine_o_clock_across_the_change_to_summer_time(
    gate: Gate, clock: Clock, eventually: Any
) -> None:
    # Given a daily trigger at nine in Berlin
    topic, seen = noting(gate)
    topic.every("0 9 * * *", name="daily", tz="Europe/Berlin")
    clock.set(at(2026, 3, 27, 12).timestamp())
    async with gate.aio.worker():
        for expected in (at(2026, 3, 28, 8), at(2026, 3, 29, 7), at(2026, 3, 30, 7)):
            # When its time is there but for a millisecond, nothing happens
            await eventually(planned(topic))
            clock.set(expected.timestamp() - 0.001)
            assert (await topic.aio.stats()).next_due == expected
            assert expected not in seen
            # Then it does
            clock.advance("1ms")
            await eventually(lambda expected=expected: seen[-1:] == [expected])
    assert len(seen) == 3


@pytest.mark.parametrize("zone", ["Europe/Berlin", "America/New_York", "Australia/Lord_Howe"])
@pytest.mark.parametrize("cron", ["30 2 * * *", "30 2,3 * * *", "*/15 * * * *", "15 1 * * MON-FRI"])
@pytest.mark.slow
def test_whenever_planning_begins_it_finds_the_same_occurrences(zone: str, cron: str) -> None:
    # Given all occurrences from before until after a change of the clocks
    one = build_recurring("r", cron, zone, None)
    for start in (at(2026, 3, 1), at(2026, 10, 1)):
        end = start + timedelta(days=36)
        times = [t.at for t in takewhile(lambda t, end=end: t.at < end, one.after(start))]
        # Then a worker that starts in between, even in the hour that occurs twice, goes on with the next of them
        for before, after in pairwise(times):
            for part in (0, 0.3, 0.7):
                assert next(one.after(before + (after - before) * part)).at == after


async def test_two_workers_make_each_occurrence_happen_once(
    url: str, namespace: str, clock: Clock, eventually: Any
) -> None:
    # Given two programs with the same recurring trigger
    gates = [Gate(url, namespace=namespace, clock=clock) for _ in range(2)]
    found = [noting(gate, slots=4, merge="append") for gate in gates]
    for topic, _ in found:
        topic.every("0 * * * *", name="hourly", payload={"kind": "hour"})
    topic = found[0][0]
    async with gates[0].aio.worker(), gates[1].aio.worker():
        for hour in range(1, 13):
            await eventually(planned(topic))
            clock.advance("1h")
            # Then one of them handles it
            await eventually(lambda hour=hour: len(found[0][1]) + len(found[1][1]) >= hour)
        await eventually(planned(topic))
    times = sorted(found[0][1] + found[1][1])
    assert times == [times[0] + timedelta(hours=n) for n in range(12)]
    stats = await topic.aio.stats()
    assert (stats["accepted"], stats["merged"], stats["acked"]) == (13, 0, 12)
    assert gates[0].counters["worker.planned"] + gates[1].counters["worker.planned"] == 13
    for gate in gates:
        await gate.aio.close()
        gate.close()


async def test_a_worker_that_is_started_again_runs_the_newest_of_what_was_missed(
    gate: Gate, clock: Clock, eventually: Any
) -> None:
    # Given a worker that planned the next hour, and left
    topic, seen = noting(gate)
    topic.every("0 * * * *", name="hourly")
    clock.set(at(2026, 1, 1, 0, 30).timestamp())
    async with Worker(gate):
        await eventually(planned(topic))
    # When another one comes three hours later
    clock.advance("3h")
    async with Worker(gate):
        await eventually(lambda: seen)
        await eventually(planned(topic))
        clock.advance("30m")
        await eventually(lambda: len(seen) == 2)
    # Then the newest missed occurrence replaced the one that was planned, and the next one came in time
    assert seen == [at(2026, 1, 1, 3), at(2026, 1, 1, 4)]
    assert gate.counters["worker.misfired"] == 1


async def test_no_occurrence_is_skipped_while_the_store_is_away(
    gate: Gate, clock: Clock, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a worker whose store goes away
    topic, seen = noting(gate)
    topic.every("*/10 * * * *", name="often", misfire="all", misfire_grace="1h")
    clock.set(at(2026, 1, 1).timestamp())
    async with gate.aio.worker():
        await eventually(planned(topic))
        with monkeypatch.context() as patch:

            async def away(*_: Any, **__: Any) -> Any:
                raise StoreUnavailable("away", "no")

            for name in ("run", "run_all"):
                patch.setattr(gate.aio.context.aio_link, name, away)
            # When the time of five occurrences passes
            clock.advance("55m")
            await eventually(lambda: gate.counters["worker.store_unavailable"] >= 4)
            assert seen == []
        # Then all of them are handled once it is back, and the next one is planned
        await eventually(lambda: len(seen) == 5)
        assert sorted(seen) == [at(2026, 1, 1, 0, minute) for minute in (10, 20, 30, 40, 50)]
        await eventually(planned(topic))
        assert (await topic.aio.stats()).next_due == at(2026, 1, 1, 1)


async def test_several_recurring_triggers_of_a_topic_each_keep_their_own_time(
    gate: Gate, clock: Clock, eventually: Any
) -> None:
    topic, keys = gate.topic("reports", merge="append"), []

    @topic.handler
    def handle(delivery: Any) -> None:
        keys.append((delivery.key.split("@")[0], delivery.payload))

    topic.every("0 * * * *", name="hourly", payload=1)
    topic.every("30 2 * * *", name="nightly", payload=2)
    clock.set(at(2026, 1, 1).timestamp())
    async with gate.aio.worker():
        await eventually(lambda: gate.counters["worker.planned"] == 2)
        for expected in (("hourly", [1]), ("hourly", [1]), ("nightly", [2]), ("hourly", [1])):
            due = (await topic.aio.stats()).next_due
            clock.set(due.timestamp())
            before = gate.counters["worker.planned"]
            await eventually(lambda expected=expected: keys[-1:] == [expected])
            await eventually(lambda before=before: gate.counters["worker.planned"] == before + 1)
            keys.append(None)
    assert [key for key in keys if key] == [("hourly", [1]), ("hourly", [1]), ("nightly", [2]), ("hourly", [1])]


async def test_each_is_planned_from_the_beginning_even_if_the_store_goes_away_half_way(
    gate: Gate, clock: Clock, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given two recurring triggers, and a store that is away when the second one is to be planned
    topic, seen = noting(gate)
    topic.every("0 0 * * *", name="daily")
    topic.every("0 * * * *", name="hourly", misfire="all", misfire_grace="1d")
    clock.set(at(2026, 1, 1, 0, 30).timestamp())
    run_all, refused = gate.aio.context.aio_link.run_all, []

    async def once_away(batch: Any, *args: Any, **kwargs: Any) -> Any:
        if any(b"hourly" in bytes(arg) for call in batch.calls for arg in call.args if isinstance(arg, bytes)):
            refused.append(batch)
            if len(refused) == 1:
                clock.advance("2h")
            if len(refused) < 3:
                raise StoreUnavailable("away", "no")
        return await run_all(batch, *args, **kwargs)

    monkeypatch.setattr(gate.aio.context.aio_link, "run_all", once_away)
    async with gate.aio.worker():
        # Then what came since it began is handled, though the first one is due much later
        await eventually(lambda: len(seen) == 2)
    assert sorted(seen) == [at(2026, 1, 1, 1), at(2026, 1, 1, 2)]


async def test_an_occurrence_can_be_cancelled_and_the_next_one_comes(gate: Gate, clock: Clock, eventually: Any) -> None:
    topic, seen = noting(gate)
    topic.every("0 * * * *", name="hourly")
    clock.set(at(2026, 1, 1, 0, 30).timestamp())
    async with gate.aio.worker():
        await eventually(planned(topic))
        assert await topic.aio.cancel("hourly@2026-01-01T01:00:00Z") == "cancelled"
        clock.advance("30m")
        await eventually(planned(topic))
        clock.advance("1h")
        await eventually(lambda: seen)
    assert seen == [at(2026, 1, 1, 2)]


async def test_it_keeps_the_servers_time_too(live: Gate, eventually: Any) -> None:
    # Given no test clock
    topic, _ = noting(live)
    topic.every("0 0 1 1 *", name="yearly", tz="UTC")
    async with live.aio.worker():
        await eventually(lambda: live.counters["worker.planned"] == 1)
    due = (await topic.aio.stats()).next_due
    # Then the next New Year is planned, and nothing else
    assert due == at(datetime.now(UTC).year + 1, 1, 1)


async def test_recurring_triggers_that_nobody_handles_are_refused(gate: Gate) -> None:
    gate.topic("other").handler(print)
    gate.topic("reports").every("0 9 * * *", name="daily")
    for topics in ((), ("reports",)):
        with pytest.raises(InvalidArgument, match=r"recurring triggers \(daily\) but no handler and no forward target"):
            gate.aio.worker(*topics)
    # A worker for other topics is not concerned
    async with gate.aio.worker("other"):
        pass


async def test_a_payload_that_its_topic_cannot_take_is_refused_at_the_start(gate: Gate) -> None:
    topic, _ = noting(gate, merge="sum")
    topic.every("0 9 * * *", name="daily", payload="many")
    with pytest.raises(InvalidArgument, match="many"):
        async with gate.aio.worker():
            pytest.fail("it started")
    assert (await topic.aio.stats()).pending == 0


async def paused_for_two_hours(
    gate: Gate, clock: Clock, eventually: Any, restart: bool, begin: datetime, **options: Any
) -> list[int]:
    """Pause a topic with a job of every ten minutes from 0:05 to 2:05; return the minutes of all that ran by 2:11."""
    topic, seen = noting(gate, slots=2)
    topic.every("*/10 * * * *", name="often", **options)
    clock.set(begin.timestamp() + 300)
    async with gate.aio.worker():
        await eventually(planned(topic))
        await topic.aio.pause()
        if not restart:
            for _ in range(12):
                clock.advance("10m")
                await eventually(lambda: topic.stats().scheduled == 1)
    if restart:  # while no worker runs
        clock.advance("2h")
    async with gate.aio.worker():
        await topic.aio.resume()
        await eventually(planned(topic))
        clock.advance("5m")
        await eventually(planned(topic))
        await eventually(lambda: seen[-1:] == [begin + timedelta(minutes=130)])
        clock.advance("1m")
    return [(occurrence - begin) // timedelta(minutes=1) for occurrence in sorted(seen)]


@pytest.mark.parametrize(
    ("zone", "begin"),
    [
        ("UTC", at(2026, 1, 1)),
        ("Europe/Berlin", at(2026, 10, 25)),  # an hour before the end of summer time
        ("America/New_York", at(2026, 3, 8, 6)),  # an hour before its beginning
    ],
)
@pytest.mark.parametrize("restart", [False, True], ids=["paused", "restarted"])
@pytest.mark.parametrize(
    ("options", "late"),
    [
        ({}, [120]),
        ({"misfire_grace": "4m"}, []),
        ({"misfire_grace": "5m"}, [120]),
        ({"misfire": "all", "misfire_grace": "30m"}, [100, 110, 120]),
        ({"misfire": "all", "misfire_grace": "1d"}, list(range(10, 121, 10))),
    ],
    ids=["once", "none", "once-in-time", "all-within-a-bound", "all"],
)
async def test_the_policy_decides_what_runs_after_a_pause_or_without_a_worker(
    gate: Gate, clock: Clock, eventually: Any, restart: bool, zone: str, begin: datetime, options: Any, late: list[int]
) -> None:
    assert await paused_for_two_hours(gate, clock, eventually, restart, begin, tz=zone, **options) == [*late, 130]
    counters = gate.topic("reports").stats()
    assert counters["dead"] == counters["cancelled"] == 0


@pytest.mark.parametrize(
    ("zone", "spring", "newest", "coming"),
    [
        ("Europe/Berlin", at(2026, 3, 28, 12), at(2026, 10, 25, 0, 30), at(2026, 10, 26, 1, 30)),
        ("America/New_York", at(2026, 3, 7, 12), at(2026, 11, 1, 5, 30), at(2026, 11, 2, 6, 30)),
    ],
)
@pytest.mark.parametrize(
    ("options", "days"),
    [({}, 1), ({"misfire_grace": "74m"}, 0), ({"misfire": "all", "misfire_grace": "3d"}, 3)],
    ids=["once", "none", "all-within-a-bound"],
)
async def test_the_policy_decides_after_a_summer_without_a_worker(
    gate: Gate,
    clock: Clock,
    eventually: Any,
    zone: str,
    spring: datetime,
    newest: datetime,
    coming: datetime,
    options: Any,
    days: int,
) -> None:
    # Given a nightly job in the hour that the end of summer time repeats, planned before summer time began
    topic, seen = noting(gate)
    topic.every("30 2 * * *" if zone == "Europe/Berlin" else "30 1 * * *", name="nightly", tz=zone, **options)
    clock.set(spring.timestamp())
    async with Worker(gate):
        await eventually(planned(topic))
    # When a worker comes again in the second of the two hours, after the same time of the clock on the wall
    clock.set((newest + timedelta(minutes=75)).timestamp())
    async with Worker(gate):
        await eventually(lambda: len(seen) == days)
        await eventually(planned(topic))
        assert (await topic.aio.stats()).next_due == coming
        clock.set(coming.timestamp())
        await eventually(lambda: seen[-1:] == [coming])
    # Then it makes up for what the policy says: no night twice, and the last one is 75 minutes ago
    assert sorted(seen) == [newest - timedelta(days=day) for day in reversed(range(days))] + [coming]


async def test_a_retry_is_no_misfire(gate: Gate, clock: Clock, eventually: Any) -> None:
    # Given an occurrence that failed, and whose retry comes after the next one
    topic, attempts = gate.topic("reports", backoff="90m", max_attempts=2), []

    @topic.handler
    def handle(delivery: Any) -> None:
        attempts.append((delivery.key[-9:-4], delivery.attempt))
        if delivery.key.endswith("T01:00:00Z"):
            raise ValueError("no")

    topic.every("0 * * * *", name="hourly", misfire_grace="10m")
    clock.set(at(2026, 1, 1, 0, 30).timestamp())
    async with gate.aio.worker():
        await eventually(planned(topic))
        for minutes, n in ((30, 1), (60, 2), (30, 3)):
            clock.advance(timedelta(minutes=minutes))
            await eventually(lambda n=n: gate.counters["worker.acked"] + gate.counters["worker.nacked"] >= n)
        await eventually(lambda: topic.stats().dead == 1)
    assert attempts == [("01:00", 1), ("02:00", 1), ("01:00", 2)]


@pytest.mark.parametrize("merge", ["last", "append"])
async def test_an_occurrence_runs_with_the_payload_that_its_program_declares(
    url: str, namespace: str, clock: Clock, eventually: Any, merge: Any
) -> None:
    # Given a release that planned an occurrence, and ran it once without success
    got: list[Any] = []

    def release(payload: Any, fails: bool) -> Gate:
        gate = Gate(url, namespace=namespace, clock=clock)
        topic = gate.topic("reports", merge=merge, backoff="1s")

        @topic.handler
        def handle(delivery: Any) -> None:
            got.append(delivery.payload)
            if fails:
                raise ValueError("no")

        topic.every("0 * * * *", name="hourly", payload=payload)
        return gate

    clock.set(at(2026, 1, 1, 0, 30).timestamp())
    old, new = release({"table": "old"}, fails=True), release(None, fails=False)
    async with old.aio.worker():
        await eventually(lambda: old.counters["worker.planned"] == 1)
        clock.advance("30m")
        await eventually(lambda: old.counters["worker.nacked"] == 1)
        await eventually(lambda: old.counters["worker.planned"] == 2)
    clock.advance("1h")
    # When the next release runs the retry, and what is ready by then
    async with new.aio.worker():
        await eventually(lambda: len(got) == 3)
    # Then both have its payload
    wrap = (lambda payload: [payload]) if merge == "append" else (lambda payload: payload)
    assert got == [wrap({"table": "old"}), wrap(None), wrap(None)]
    for gate in (old, new):
        await gate.aio.close()
        gate.close()


async def test_an_occurrence_that_the_store_lost_is_planned_again(
    gate: Gate, clock: Clock, raw: Any, eventually: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a yearly and a cancelled hourly occurrence
    monkeypatch.setattr("idemgate.worker.cron.VERIFY", 0.01)
    topic, _ = noting(gate)
    topic.every("0 0 1 1 *", name="yearly")
    topic.every("0 * * * *", name="hourly")
    clock.set(at(2026, 5, 1, 0, 30).timestamp())
    async with gate.aio.worker():
        await eventually(lambda: gate.counters["worker.planned"] == 2)
        assert await topic.aio.cancel("hourly@2026-05-01T01:00:00Z") == "cancelled"
        await eventually(lambda: topic.stats()["duplicate"])  # the scheduler noticed that it is cancelled
        # When the store loses everything
        raw.delete(*raw.keys(f"*{gate.namespace}*"))
        # Then the yearly one is planned again, and the cancelled one is not
        await eventually(lambda: gate.counters["worker.planned"] == 3)
        assert topic.peek("yearly@2027-01-01T00:00:00Z").pending is not None
        assert topic.stats().pending == 1
    assert gate.counters["worker.planned"] == 3
