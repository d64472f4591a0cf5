"""`idemgate status` as an operator runs it: incidents are planted, found, and mended by the printed command."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from idemgate import Gate, Trigger
from idemgate.cli import main
from idemgate.core import keys
from idemgate.errors import InvalidArgument
from idemgate.guard.current import set_current
from idemgate.operate.snapshot import take_snapshot
from idemgate.store.context import Runner, Running
from idemgate.testing import Clock
from tests import cluster
from tests.operate.conftest import SEARCHES, Command, sent
from tests.presence.conftest import report


class Status(NamedTuple):
    """The exit code of `status`, and the findings by their kind."""

    code: int
    findings: dict[str, dict[str, Any]]


Look = Callable[..., Status]


@pytest.fixture
def look(command: Command) -> Look:
    """`look("--only", "jobs")`: what `status` finds, without what it says of the server of the tests."""

    def ask(*words: str) -> Status:
        ran = command("status", "--json", *words)
        assert ran.err == ""
        found = json.loads(ran.out)["findings"]
        return Status(
            ran.code, {one["id"]: one for one in found if not one["link"].startswith("docs/operations.md#check")}
        )

    return ask


@pytest.fixture
def earlier(url: str, namespace: str) -> Iterator[Callable[[float], Gate]]:
    """`earlier(60)`: a gate whose clock is a minute behind that of the server."""
    gates = list[Gate]()

    def make(seconds: float) -> Gate:
        gates.append(Gate(url, namespace=namespace, clock=Clock(time.time() - seconds)))
        return gates[-1]

    yield make
    for gate in gates:
        gate.close()


def serve(gate: Gate, *topics: str, places: int = 2, running: tuple[Running, ...] = ()) -> None:
    """Let this process report that it serves these topics."""
    runner = Runner("worker", lambda _: True, lambda: topics, lambda: (len(running), places), lambda: running)
    with gate.context.runners.running(runner):
        report(gate)


def mend(command: Command, status: Status, kind: str) -> None:
    """Run the command of a finding as it is printed."""
    program, *words = shlex.split(status.findings[kind]["mend"])
    assert program == "idemgate"
    ran = command(*words)
    assert ran.code == 0, ran.err


# -- incidents --------------------------------------------------------------------------------------------------------


def test_nothing_is_found_in_a_quiet_namespace(gate: Gate, command: Command, look: Look) -> None:
    gate.topic("jobs").trigger("later", 1, delay="1h")
    serve(gate, "jobs")
    assert look() == Status(look().code, {})
    shown = command("status").out
    assert "nothing to report" in command("status", "--only", "jobs").out
    assert shown.index("topic") < shown.index("jobs")


def test_a_forgotten_pause(gate: Gate, earlier: Callable[[float], Gate], command: Command, look: Look) -> None:
    gate.topic("jobs").trigger("order-7", 1)
    earlier(400).topic("jobs").pause("the database is down")
    serve(gate, "jobs")
    status = look("--only", "jobs")
    assert (status.code, [*status.findings]) == (3, ["topic-paused"])
    assert "the database is down" in status.findings["topic-paused"]["what"]
    mend(command, status, "topic-paused")
    assert look("--only", "jobs") == Status(0, {})


def test_a_key_that_waits_for_a_decision(
    gate: Gate, earlier: Callable[[float], Gate], command: Command, look: Look
) -> None:
    earlier(60).claim("order 7", lease="1s", on_lease_loss="hold", scope="charge")
    with suppress(Exception):
        gate.claim("order 7", on_lease_loss="hold", scope="charge")
    report(gate)
    status = look("--only", "order 7")
    assert (status.code, [*status.findings]) == (3, ["key-held"])
    assert status.findings["key-held"]["of"] == "charge"
    mend(command, status, "key-held")
    assert gate.inspect("order 7", scope="charge").state == "held"
    assert command("key", "resolve", "order 7", "--scope", "charge", "--again").code == 0
    assert look("--only", "order 7") == Status(0, {})
    assert gate.inspect("order 7", scope="charge").state != "held"


def test_a_guarded_function_finds_a_held_key_too(gate: Gate, earlier: Callable[[float], Gate], look: Look) -> None:
    earlier(60).claim("order-7", lease="1s", on_lease_loss="hold", scope="charge")

    @gate.once(key="{key}", scope="charge", on_lease_loss="hold")
    def charge(key: str) -> None: ...

    with suppress(Exception):
        charge("order-7")
    report(gate)
    assert [*look("--only", "order-7").findings] == ["key-held"]


def test_a_version_of_a_clock_that_was_ahead(gate: Gate, command: Command, look: Look) -> None:
    topic, now = gate.topic("jobs"), round(time.time() * 1000)
    topic.trigger("order-7", 1, delay="1h", version=now + 3_600_000, group="big")
    assert topic.trigger("order-7", 2, delay="1h", version=now, group="big").status == "dropped"
    assert topic.trigger_many([Trigger("order-8", 2, delay="1h", version=7)])[0].status == "scheduled"
    serve(gate, "jobs")
    status = look("--only", "jobs")
    assert (status.code, [*status.findings]) == (3, ["version-ahead"])
    assert status.findings["version-ahead"]["key"] == "order-7"
    mend(command, status, "version-ahead")
    assert look("--only", "jobs") == Status(0, {})


@pytest.mark.parametrize("key", ["order-7", "-n"])
def test_a_message_that_fails_each_time(key: str, gate: Gate, command: Command, look: Look) -> None:
    topic = gate.topic("jobs", max_attempts=9)
    topic.trigger(key, 1, group="-v")
    for attempt in range(1, 4):
        [delivery] = topic.take(1)
        gate.context.activity.note_failure("jobs", key, attempt, "KeyError: 'address'", 3600)
        topic.nack(delivery, delay="1h")
        topic.flush()
    serve(gate, "jobs")
    status = look(f"--only={key}")
    assert (status.code, [*status.findings]) == (3, ["poison-message"])
    mend(command, status, "poison-message")
    assert look("--only", "jobs") == Status(0, {})
    assert topic.stats().dead == 1


@pytest.mark.parametrize("key", ["order-7", "-n"])
def test_a_guarded_call_that_fails_each_time(key: str, gate: Gate, command: Command, look: Look) -> None:
    works = list[str]()

    @gate.once(key="{key}", scope="charge")
    def charge(key: str) -> None:
        if key not in works:
            raise KeyError("address")

    # Given a key that failed three times, one that succeeds then, and one of a consumer that gives it up
    for other in (key, key, key, "k2", "k2", "k2"):
        with suppress(KeyError):
            charge(other)
    works.append("k2")
    charge("k2")
    limited = gate.guard("limited", max_attempts=3)
    for _ in range(3):
        limited.run("k3", charge, "k3")
    report(gate)
    # Then the first one is found
    status = look("--only", "poison-message")
    assert (status.code, [*status.findings]) == (3, ["poison-message"])
    found = status.findings["poison-message"]
    assert (found["of"], found["key"]) == ("charge", key)
    assert found["what"] == "failed in attempt 3, and may be tried again: KeyError: 'address'"
    mend(command, status, "poison-message")
    # And no longer once it is done
    works.append(key)
    charge(key)
    report(gate)
    assert look("--only", "poison-message") == Status(0, {})


def test_a_call_after_a_block_that_an_interrupt_left_behind_is_not_inside_of_it(gate: Gate, look: Look) -> None:
    @gate.once(key="{key}", scope="charge")
    def charge(key: str) -> None:
        raise KeyError("address")

    def leave_behind() -> None:
        gate.claim("k1", scope="other").__enter__()

    leave_behind()
    try:
        for _ in range(3):
            with suppress(KeyError):
                charge("k2")
    finally:
        set_current(None)
    report(gate)
    assert [*look("--only", "poison-message").findings] == ["poison-message"]


def test_no_message_is_at_fault_while_a_server_fails(gate: Gate, look: Look) -> None:
    gate.topic("jobs", max_attempts=9).trigger("order-7", 1, delay="1h")
    gate.context.activity.note_failure("jobs", "order-7", 8, "KeyError: 'address'", 3600)
    gate.context.activity.note_failure("jobs", "order-7", 9, "StoreUnavailable", 3600, of_store=True)
    serve(gate, "jobs")
    assert look("--only", "order-7") == Status(0, {})


def test_dead_letters(gate: Gate, command: Command, look: Look) -> None:
    topic = gate.topic("jobs", slots=2)
    topic.trigger_many([Trigger(f"order-{n}", n) for n in range(4)])
    for delivery in topic.take(4):
        topic.bury(delivery, reason=f"KeyError: {delivery.key}")
    serve(gate, "jobs")
    status = look("--only", "jobs")
    assert (status.code, [*status.findings]) == (3, ["dead-letters"])
    assert status.findings["dead-letters"]["numbers"] == {"lately": 4, "in_all": 4}
    mend(command, status, "dead-letters")
    assert look("--only", "jobs") == Status(0, {})
    assert topic.stats().ready == 4


def test_a_topic_that_nothing_serves(
    gate: Gate, earlier: Callable[[float], Gate], command: Command, look: Look
) -> None:
    earlier(60).topic("mails").trigger("order-7", 1)
    serve(gate, "jobs")
    status = look("--only", "mails")
    assert (status.code, [*status.findings]) == (4, ["topic-unserved"])
    mend(command, status, "topic-unserved")  # it shows who runs, which mends nothing
    serve(gate, "jobs", "mails")
    assert [*look("--only", "mails").findings] != ["topic-unserved"]


def test_a_topic_of_a_renamed_handler(
    gate: Gate, command: Command, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.topic("mails").trigger("order-7", 1, delay="1h")
    monkeypatch.setattr("idemgate.presence.compose.Composer._started", 0.0, raising=False)
    report(gate)
    gate.context.observer._composer._started -= 100  # type: ignore[union-attr]
    serve(gate, "jobs")
    status = look("--only", "mails")
    assert (status.code, [*status.findings]) == (3, ["topic-abandoned"])
    mend(command, status, "topic-abandoned")  # it shows the topic, and loses nothing
    assert gate.topic("mails").stats().scheduled == 1
    gate.topic("jobs").open()
    assert command("topic", "transfer", "mails", "jobs").code == 0
    assert look("--only", "mails") == Status(0, {})


def test_handlers_that_hang(gate: Gate, earlier: Callable[[float], Gate], command: Command, look: Look) -> None:
    earlier(90).topic("jobs").trigger_many([("order-7", 1), ("order-8", 2)])
    gate.topic("jobs").take(1)
    running = Running("jobs", "order-7", time.monotonic() - 90, 0)
    serve(gate, "jobs", places=1, running=(running,))
    status = look("--only", "jobs")
    assert (status.code, [*status.findings]) == (4, ["handlers-hang"])
    assert status.findings["handlers-hang"]["key"] == "order-7"
    mend(command, status, "handlers-hang")


def test_a_late_topic_and_a_hot_group(gate: Gate, earlier: Callable[[float], Gate], look: Look) -> None:
    before = earlier(90)
    before.topic("jobs").trigger_many([Trigger(f"order-{n}", n, group="big") for n in range(3)])
    before.topic("jobs").take(3)
    before.topic("jobs").trigger("order-9", 1)
    serve(gate, "jobs")
    assert [*look("--only", "jobs").findings] == ["topic-late", "group-blocked"]


def test_a_payload_that_cannot_be_merged(gate: Gate, command: Command, look: Look) -> None:
    with pytest.raises(InvalidArgument):
        gate.topic("jobs", merge="sum").trigger("order-7", "seven")
    report(gate)
    status = look("--only", "jobs")
    assert (status.code, [*status.findings]) == (3, ["payload-refused"])
    assert status.findings["payload-refused"]["key"] == "order-7"
    mend(command, status, "payload-refused")


def test_the_clock_of_a_process(gate: Gate, look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    gate.topic("jobs").open()
    monkeypatch.setattr("idemgate.presence.compose.wall_clock", lambda: time.time() + 60)
    report(gate)
    assert [*look("--only", "process-clock").findings] == ["process-clock"]


def test_the_clock_of_a_process_is_shown_by_the_printed_command(
    gate: Gate, command: Command, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate.topic("jobs").open()
    monkeypatch.setattr("idemgate.presence.compose.wall_clock", lambda: time.time() + 60)
    report(gate)
    shown = command(*shlex.split(look("--only", "process-clock").findings["process-clock"]["mend"])[1:]).out
    assert re.search(r"^clock ahead +(59(\.\d)? s|0:01:00)$", shown, re.MULTILINE)


# -- servers ----------------------------------------------------------------------------------------------------------

SOUND = ("--appendonly", "yes", "--appendfsync", "everysec")
WRONG_SERVERS = {
    "eviction": ("--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"),
    "memory": ("--maxmemory", "1000kb"),
    "persistence": ("--appendonly", "no", "--save", ""),
}


@pytest.mark.parametrize("kind", WRONG_SERVERS)
def test_a_server_is_mended_by_the_printed_command(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (port,) = cluster.unused_ports(1)
    url = f"redis://127.0.0.1:{port}/0"
    with cluster.server(tmp_path / "server", port, *SOUND, *WRONG_SERVERS[kind]) as client:
        assert main(["status", "--url", url, "--only", kind, "--json"]) == 4
        [one] = json.loads(capsys.readouterr().out)["findings"]
        program, _, host, _, at, *words = shlex.split(one["mend"])
        assert (program, host, at) == ("redis-cli", "127.0.0.1", str(port))
        client.execute_command(*words)
        assert main(["status", "--url", url, "--only", kind, "--json"]) == 0


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_text_names_cause_command_and_page(gate: Gate, command: Command) -> None:
    topic = gate.topic("jobs")
    topic.trigger_many([Trigger(f"order-{n}\x1b[31m\n", n) for n in range(7)])
    for number, delivery in enumerate(topic.take(7)):
        topic.bury(delivery, reason=f"{'abcdefg'[number]}: {delivery.key}")
    shown = command("status", "--only", "dead-letters").out
    assert "\x1b" not in shown
    assert shown.count("cause: ") == 1
    assert "docs/findings.md#dead-letters" in shown
    # Only five of a slot are read
    assert shown.count("$ idemgate dead redrive jobs --reason ") == 5


def test_many_findings_of_one_kind_are_counted(earlier: Callable[[float], Gate], command: Command) -> None:
    before = earlier(60)
    for number in range(7):
        before.topic(f"jobs{number}").trigger("order-7", 1)
    ran = command("status", "--only", "topic-unserved")
    assert ran.code == 4
    assert ran.out.count("WARNING") + ran.out.count("CRITICAL") == 5
    assert "and 2 more of topic-unserved" in ran.out


def test_the_command_names_the_store_and_the_namespace_but_no_password(
    gate: Gate, command: Command, url: str, namespace: str, users: Callable[..., str]
) -> None:
    gate.topic("jobs").trigger("order-7", 1)
    with Gate(url, namespace=namespace, clock=Clock(time.time() - 400)) as before:
        before.topic("jobs").pause()
    resume = "$ idemgate topic resume jobs"
    assert f"{resume} --url {url} --namespace {namespace}\n" in command("status", "--only", "jobs").out
    assert f"{resume} --namespace {namespace}\n" in command("status", "--only", "jobs", as_user=users("viewer")).out


@pytest.mark.parametrize(
    ("roles", "judged"), [(("viewer",), False), (("operator",), False), (("viewer", "auditor"), True)]
)
def test_status_is_for_those_who_only_read(
    gate: Gate, command: Command, users: Callable[..., str], stored: Any, roles: tuple[str, ...], judged: bool
) -> None:
    topic = gate.topic("jobs")
    topic.trigger("order-7", 1)
    topic.bury(topic.take(1)[0])
    serve(gate, "jobs")
    before = stored()
    ran = command("status", as_user=users(*roles))
    assert ("servers were not judged" not in ran.out, stored()) == (judged, before)
    assert "dead-letters: jobs" in ran.out


def test_what_is_damaged_hides_nothing_else(gate: Gate, raw: Any, namespace: str, command: Command) -> None:
    good, bad = gate.topic("good"), gate.topic("bad")
    for topic in (good, bad):
        topic.trigger("order-7", 1)
        topic.bury(topic.take(1)[0], reason="KeyError: 7")
    (key,) = raw.scan_iter("*bad*:dead:data")
    before = raw.hgetall(key)
    raw.hset(key, next(iter(before)), b"\xc1")
    ran = command("status", "--only", "dead-letters")
    raw.hset(key, mapping=before)
    assert "dead-letters: good" in ran.out
    assert "1 entries are damaged" in ran.out


def test_failures_with_the_same_error_are_one_row(gate: Gate, command: Command) -> None:
    gate.topic("jobs").open()
    for number in range(3):
        error = f"KeyError: 'order-{number}' of 0x7f{number}"
        gate.context.activity.note_failure("jobs", f"k{number}\x1b", 1, error, None)
    gate.context.activity.note_failure("jobs", "k0\x1b", 1, "ValueError: no", None)
    gate.context.activity.note_failure("mails", "k9", 1, "ValueError: no", None)
    serve(gate, "jobs")
    rows = [line.split() for line in command("status").out.splitlines()]
    assert ["jobs", "3"] in [row[:2] for row in rows]
    assert [row[1] for row in rows if row[-2:] == ["ValueError:", "no"]] == ["1", "1"]
    assert "mails" not in command("status", "--only", "jobs").out


def test_a_watch_passes_each_snapshot_to_the_next(
    gate: Gate, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, before = list[Any](), list[Any]()

    def take(of: Gate, last: Any = None) -> Any:
        before.append(last)
        taken.append(take_snapshot(of, last))
        return taken[-1]

    def sleep(_: float) -> None:
        if len(taken) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("idemgate.cli.status.take_snapshot", take)
    monkeypatch.setattr("idemgate.cli.status.time.sleep", sleep)
    command("status", "--watch", "1s")
    assert before == [None, *taken[:2]]


def test_a_snapshot_reads_no_report_that_the_one_before_has(gate: Gate, raw: Any, namespace: str) -> None:
    serve(gate, "jobs")
    before = take_snapshot(gate)
    [process] = before.processes
    index, report = keys.presence(namespace, process.id)
    # Given another report of the same time, Then it is not read
    raw.set(report, b"damaged")
    assert (take_snapshot(gate, before).processes, take_snapshot(gate).unreadable) == ((process,), 1)
    # And a later one is
    serve(gate, "jobs", "mails")
    [process] = take_snapshot(gate, before).processes
    assert process.topics == ("jobs", "mails")
    # And one that may have expired is
    raw.zadd(index, {process.id: (time.time() - 31) * 1000})
    before = take_snapshot(gate)
    assert len(before.processes) == 1
    raw.delete(report)
    assert take_snapshot(gate, before).processes == ()


def test_no_key_is_searched_for(gate: Gate, raw: Any, command: Command) -> None:
    topic = gate.topic("jobs")
    topic.trigger("order-7", 1)
    topic.bury(topic.take(1)[0])
    serve(gate, "jobs")
    commands = sent(raw, lambda: command("status"))
    assert "EVALSHA" in commands
    assert not commands & SEARCHES


def test_without_a_store_it_fails_and_a_watch_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    (port,) = cluster.unused_ports(1)
    url = f"redis://127.0.0.1:{port}/0"
    assert main(["status", "--url", url]) == 1
    assert str(port) in capsys.readouterr().err


def test_a_watch_prints_again_until_it_is_interrupted(url: str, namespace: str) -> None:
    # SIGINT is ignored by what a shell started in the background, and by its children.
    program = (
        "import signal, sys\nfrom idemgate.cli import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\nsys.exit(main())"
    )
    words = ["status", "--url", url, "-n", namespace, "--watch", "0.1", "--only", "x"]
    with subprocess.Popen([sys.executable, "-c", program, *words], stdout=subprocess.PIPE, text=True) as watch:
        assert watch.stdout is not None
        for _ in range(2):
            assert watch.stdout.readline().startswith("nothing to report about x")
        watch.send_signal(signal.SIGINT)
        assert watch.wait(60) == 0
