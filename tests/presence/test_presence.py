"""Which processes report, what they report, and until when."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import ref

import pytest

from idemgate import Gate
from idemgate.core import keys
from idemgate.core.calls import run_plan
from idemgate.errors import InvalidArgument, StoreUnavailable
from idemgate.presence import presence
from idemgate.presence.calls import beat, list_ids, read_processes, read_reports
from idemgate.presence.compose import Composer
from idemgate.testing import Clock
from tests.presence.conftest import Seen, presence_of, report
from tests.waiting import wait_until

PROGRAM = """
import sys, time
from idemgate import Gate
gate = Gate(sys.argv[1], namespace=sys.argv[2])
gate.first("k", "1h")
{then}
"""


@pytest.fixture
def program(url: str, namespace: str) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """`program("time.sleep(9)")` starts a process that uses a gate, then runs this line."""
    started: list[subprocess.Popen[bytes]] = []

    def start(then: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", PROGRAM.format(then=then), url, namespace]
        started.append(subprocess.Popen(words, stdin=subprocess.PIPE))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


# -- who reports ------------------------------------------------------------------------------------------------------


def test_a_gate_reports_soon_after_its_first_call_and_leaves_at_its_end(
    gate: Gate, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "FIRST_AFTER", 1.0)
    for key in "abc":
        gate.topic("jobs").trigger(key, 1)
    wait_until(lambda: seen() != [], 20)
    [found] = seen()
    assert (found.pid, found.role, found.busy, found.places) == (os.getpid(), "client", 0, 0)
    assert sum(found.calls) >= 1
    gate.close()
    assert seen() == []


def test_a_gate_that_did_nothing_reports_nothing(gate: Gate) -> None:
    gate.topic("jobs")
    gate.once(key="{x}", scope="s")(lambda x: x)
    assert presence_of(gate).due == presence.NEVER


def test_a_gate_with_a_test_clock_or_without_presence_reports_nothing(url: str, namespace: str) -> None:
    with Gate(url, namespace=namespace, clock=Clock()) as by_clock:
        by_clock.first("k", "1h")
        assert presence_of(by_clock).due == presence.NEVER
    with Gate(url, namespace=namespace, presence=False) as silent:
        silent.first("k", "1h")
        assert silent.context.observer is None


async def test_a_gate_that_is_used_again_after_its_end_reports_again(gate: Gate, seen: Seen) -> None:
    await gate.aio.first("k", "1h")
    report(gate)
    await gate.aio.close()
    assert presence_of(gate).due == presence.NEVER
    assert seen() == []
    presence_of(gate).beat()  # by a thread that looked before the end
    assert seen() == []
    await gate.aio.first("k", "1h")
    assert presence_of(gate).due < presence.NEVER
    gate.first("k", "1h")
    await gate.aio.close()
    assert presence_of(gate).due < presence.NEVER  # the blocking side is open
    gate.close()
    assert presence_of(gate).due == presence.NEVER


def test_a_gate_that_is_dropped_without_its_end_is_freed(url: str, namespace: str) -> None:
    gate = Gate(url, namespace=namespace)
    gate.first("k", "1h")
    gone = ref(gate.context)
    gate.context.link.close()
    del gate
    gc.collect()
    wait_until(lambda: gc.collect() is not None and gone() is None, 10)


def test_a_forked_child_reports_for_itself_with_its_first_call(gate: Gate, seen: Seen) -> None:
    gate.first("k", "1h")
    report(gate)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with suppress(BaseException):
            assert presence_of(gate).due < presence.NEVER
            gate.first("other", "1h")
            report(gate)
            found = run_plan(read_processes(gate.namespace, None), gate.context.link.run_all)[0]
            gate.close()
            os.write(write, b" ".join(b"%d" % one.pid for one in found))
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    pids = {*map(int, os.read(read, 100).split())}
    os.close(read)
    assert pids == {os.getpid(), child}
    assert [one.pid for one in seen()] == [os.getpid()]  # the end of the child's gate removes the child only


def test_a_program_that_ends_leaves_and_one_that_is_killed_expires(
    program: Callable[[str], subprocess.Popen[bytes]], seen: Seen, raw: Any, namespace: str
) -> None:
    ends, dies = program("sys.stdin.read()"), program("time.sleep(60)")
    wait_until(lambda: len(seen()) == 2, 30)
    ends.communicate(timeout=30)
    assert [one.pid for one in seen()] == [dies.pid]
    dies.send_signal(signal.SIGKILL)
    dies.wait()
    # Then its report expires, and a reader does not miss it in the index
    [left] = seen()
    _, stored = keys.presence(namespace, left.id)
    assert 0 < raw.pttl(stored) <= 30_000
    raw.pexpire(stored, 1)
    wait_until(lambda: seen() == [], 10)


def test_an_old_process_is_dropped_from_the_index_by_the_report_of_another(gate: Gate, raw: Any) -> None:
    index, old = keys.presence(gate.namespace)[0], "0" * 32
    now = int(raw.time()[0]) * 1000
    raw.zadd(index, {old: now - 31_000, "1" * 32: now})
    gate.first("k", "1h")
    report(gate)
    assert raw.zscore(index, old) is None
    assert raw.zcard(index) == 2


def test_a_server_out_of_memory_takes_reports(gate: Gate, seen: Seen, raw: Any) -> None:
    report(gate)  # so that the script is loaded
    raw.flushdb()
    raw.config_set("maxmemory", 1)
    try:
        report(gate)
    finally:
        raw.config_set("maxmemory", 0)
    assert [one.pid for one in seen()] == [os.getpid()]


# -- what they report -------------------------------------------------------------------------------------------------


async def test_a_worker_reports_what_runs_and_what_failed(gate: Gate, seen: Seen) -> None:
    blocking, awaiting = gate.topic("blocking", backoff="1h"), gate.topic("awaiting", max_attempts=1)
    release = threading.Event()
    ending = asyncio.Event()

    @blocking.handler
    def work(delivery: Any) -> None:
        if delivery.key == "fails":
            raise ValueError("not\ntoday") from StoreUnavailable("no answer", "no")
        release.wait(30)

    @awaiting.handler
    async def work_async(delivery: Any) -> None:
        if delivery.key == "fails":
            raise KeyError("no")
        await ending.wait()

    for topic in (blocking, awaiting):
        topic.trigger("fails", 1)
        topic.trigger("runs", 1)
    async with gate.aio.worker(concurrency=7) as worker:
        dispatcher = worker._loop.dispatcher
        # A thread that found no other job counts as busy for a moment
        while gate.counters["worker.failed"] < 2 or len([*dispatcher.list_started()]) < 2 or dispatcher.free < 5:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(report, gate)
        [found] = seen()
        release.set()
        ending.set()
    assert (found.role, found.busy, found.places, {*found.topics}) == ("worker", 2, 7, {"blocking", "awaiting"})
    running = {work.of: work for work in found.running}
    assert {work.max_run for work in found.running} == {None}
    assert running["blocking"].key == running["awaiting"].key == "runs"
    assert running["blocking"].location.endswith(" work")
    assert running["awaiting"].location.endswith(" work_async")
    failures = {failure.of: failure for failure in reversed(found.failures)}
    assert (failures["blocking"].attempt, failures["blocking"].error) == (1, "ValueError: not ... today")
    assert failures["blocking"].next_at is not None
    assert (failures["awaiting"].error, failures["awaiting"].next_at) == ("KeyError: 'no'", None)
    assert {of: failure.of_store for of, failure in failures.items()} == {"blocking": True, "awaiting": False}
    assert found.counters["worker.failed"].last_minute == found.counters["worker.failed"].total >= 2
    # And once they ended
    await asyncio.to_thread(report, gate)
    [found] = seen()
    assert (found.role, found.running) == ("client", ())
    assert sum(found.times["awaiting"].handling) >= 1
    assert sum(found.times["awaiting"].lateness) >= 1
    assert found.last_minute == found.times


@pytest.mark.parametrize("awaiting", [False, True])
async def test_a_guarded_call_is_reported_while_it_runs(gate: Gate, seen: Seen, awaiting: bool) -> None:
    found = list[Any]()

    @gate.once(key="{key}", scope="charge")
    def charge(key: str) -> None:
        report(gate)
        found.extend(seen())
        raise ValueError(key)

    @gate.once(key="{key}", scope="charge")
    async def charge_async(key: str) -> None:
        await asyncio.to_thread(report, gate)
        found.extend(seen())
        raise ValueError(key)

    with suppress(ValueError):
        await (charge_async("k") if awaiting else asyncio.to_thread(charge, "k"))
    [running] = found[0].running
    assert (running.of, running.key, running.max_run) == ("charge", "k", 0)
    assert running.location.endswith(" charge_async" if awaiting else " report")
    assert found[0].scopes == ("charge",)
    # And its failure once it ended
    await asyncio.to_thread(report, gate)
    [ended] = seen()
    assert ended.running == ()
    [failure] = ended.failures
    assert (failure.of, failure.key, failure.attempt, failure.error) == ("charge", "k", 1, "ValueError: k")
    assert failure.next_at == failure.at


def test_a_guarded_call_that_hangs_is_reported_until_it_ends(gate: Gate, seen: Seen) -> None:
    with gate.claim("k", scope="charge", lease="1s", max_run="100ms") as claim:
        wait_until(lambda: claim.lease_lost)
        report(gate)
        [running] = seen()[0].running
        assert (running.of, running.key, running.max_run) == ("charge", "k", 100)
        gate.context.heartbeat.close()
    report(gate)
    assert seen()[0].running == ()
    assert (gate.counters["once.max_run_exceeded"], gate.counters["once.lease_lost"]) == (1, 0)


def test_a_report_that_arrives_while_all_are_read_has_its_own_time(gate: Gate, namespace: str) -> None:
    clock, link = Clock(), gate.context.link
    report = Composer(gate.context).compose()
    link.run(beat(namespace, clock, "0" * 32, report))

    def run_all(batch: Any) -> Any:
        answer = link.run_all(batch)
        clock.advance("10s")
        link.run(beat(namespace, clock, "0" * 32, report))
        return answer

    [found], _ = run_plan(read_processes(namespace, clock), run_all)
    assert found.seen_at == clock.now() - timedelta(seconds=10)


def test_a_message_that_fails_often_is_reported_among_many_failures(gate: Gate, seen: Seen) -> None:
    def fail(attempt: int, retry_after: float | None) -> list[str]:
        gate.context.activity.note_failure("jobs", "poison", attempt, "KeyError: 'address'", retry_after)
        for n in range(30):
            gate.context.activity.note_failure("jobs", f"order-{n}", 1, "ConnectionError: closed", 1.0)
        for n in range(20):
            gate.context.activity.note_failure("jobs", f"late-{n}", 9, "StoreUnavailable", 1.0, of_store=True)
        report(gate)
        return [failure.key for failure in seen()[0].failures]

    gate.topic("jobs").open()
    assert (fail(2, 60.0)[0], fail(3, 60.0)[0]) == ("late-19", "poison")
    # And many of them leave room for the others
    for n in range(30):
        gate.context.activity.note_failure("jobs", f"poison-{n}", 3, "KeyError: 'address'", 0.0)
    assert len([key for key in fail(3, 60.0) if key.startswith("late")]) == 10
    assert "poison" not in fail(4, None)  # it is a dead letter


def test_a_refused_trigger_is_reported(gate: Gate, seen: Seen) -> None:
    with pytest.raises(InvalidArgument):
        gate.topic("jobs").trigger("k", object())
    report(gate)
    [refused] = seen()[0].refused
    assert (refused.of, refused.key) == ("jobs", "k")
    assert "payload" in refused.error


# -- what they hide ---------------------------------------------------------------------------------------------------


def hide(kind: str, text: str) -> str:
    if text == "fails":
        raise ValueError("secret")
    return f"<{kind}>"


@pytest.mark.parametrize("key", ["k", "fails"])
def test_redact_decides_what_is_stored_of_keys_and_errors(
    url: str, namespace: str, raw: Any, seen: Seen, key: str
) -> None:
    with Gate(url, namespace=namespace, redact=hide) as gate:

        @gate.once(key="{key}", scope="charge")
        def charge(key: str) -> None:
            raise ValueError(f"secret {key}")

        with pytest.raises(ValueError, match="secret"):
            charge(key)
        report(gate)
        [process] = seen()
        [failure] = process.failures
        assert failure.error == "<error>"
        assert failure.key == ("<key>" if key == "k" else "<redact failed>")
        assert gate.counters["presence.redact_failed"] == (key == "fails")
        assert b"secret" not in raw.get(keys.presence(namespace, process.id)[1])


def test_the_options_are_checked_and_pickled(url: str) -> None:
    for options in ({"presence": "no"}, {"redact": 7}, {"redact": asyncio.sleep}):
        with pytest.raises(InvalidArgument, match=next(iter(options))):
            Gate(url, **options)
    copy = pickle.loads(pickle.dumps(Gate(url, presence=False, redact=hide)))
    assert copy.context.observer is None
    assert pickle.loads(pickle.dumps(Gate(url, redact=hide))).context.redact is hide


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_user_without_rights_reports_once_that_it_may_not(
    users: Callable[..., str], raw: Any, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    url = users("guard")
    raw.execute_command("ACL", "SETUSER", f"{namespace}-guard", "resetkeys", f"~ig2:{{{namespace}:once:*")
    with Gate(url, namespace=namespace) as gate, caplog.at_level(logging.WARNING, "idemgate.presence"):
        gate.first("k", "1h")
        report(gate)
        gate.context.note_fork()  # also if another call would start the reports again
        gate.first("k", "1h")
        assert presence_of(gate).due == presence.NEVER
        assert gate.counters["presence.failed"] == 1
    assert [record.message.partition(" ")[0] for record in caplog.records] == ["presence.refused"]


def test_a_store_that_is_away_is_counted_and_tried_again(url: str, namespace: str) -> None:
    with Gate("redis://127.0.0.1:1", namespace=namespace) as gate:
        report(gate)
        assert gate.counters["presence.failed"] == 1
        assert presence_of(gate).due < presence.NEVER


def test_an_index_of_another_type_is_counted_and_logged(gate: Gate, raw: Any, caplog: pytest.LogCaptureFixture) -> None:
    raw.set(keys.presence(gate.namespace)[0], "x")
    report(gate)
    assert gate.counters["presence.failed"] == 1
    assert "holds another type than a sorted set" in caplog.text
    raw.delete(keys.presence(gate.namespace)[0])


def test_a_damaged_report_hides_no_other_one(gate: Gate, raw: Any) -> None:
    gate.first("k", "1h")
    report(gate)
    index, stored = keys.presence(gate.namespace, "0" * 32)
    raw.zadd(index, {"0" * 32: 1e13})
    raw.set(stored, b"\xc1", px=10_000)
    found, damaged = run_plan(read_processes(gate.namespace, None), gate.context.link.run_all)
    assert [one.pid for one in found] == [os.getpid()]
    assert damaged == 1
    raw.delete(stored)


def test_thousands_of_processes_are_listed(gate: Gate, raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    index = keys.presence(gate.namespace)[0]
    raw.zadd(index, {f"{n:032x}": n for n in range(5_000)})
    assert [*gate.context.link.run(list_ids(gate.namespace, None))] == [f"{n:032x}" for n in range(5_000)][::-1]
    # And of more than a reader takes it gets the newest
    monkeypatch.setattr("idemgate.presence.calls.MAX_PROCESSES", 3)
    assert [*gate.context.link.run(list_ids(gate.namespace, None))] == [f"{n:032x}" for n in (4_999, 4_998, 4_997)]
    raw.delete(index)


def test_a_report_without_its_place_in_the_index_is_none(gate: Gate, raw: Any) -> None:
    report(gate)
    (process,) = gate.context.link.run(list_ids(gate.namespace, None))
    index, stored = keys.presence(gate.namespace, process)
    raw.zrem(index, process)
    assert gate.context.link.run(read_reports(gate.namespace, None, [process])) == [None]
    raw.delete(stored)
