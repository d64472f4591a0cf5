"""The metrics of a live namespace and of a process, and `idemgate metrics`, which serves the former."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from idemgate import Gate
from idemgate.core.activity import BOUNDS
from idemgate.errors import InvalidArgument
from idemgate.metrics import (
    PROCESS_METRICS,
    STORE_METRICS,
    GateCollector,
    StoreCollector,
    render_process,
    render_store,
)
from idemgate.store.context import Runner, Running
from idemgate.testing import Clock
from tests import cluster
from tests.operate.conftest import SEARCHES, Command, sent
from tests.presence.conftest import report
from tests.waiting import wait_until

METRICS = {**STORE_METRICS, **PROCESS_METRICS}
Values = dict[tuple[str, ...], float]


def parsed(text: bytes) -> dict[str, Values]:
    """The numbers of an exposition by name, and by the values of the labels as declared, without the namespace."""
    found: dict[str, Values] = {}
    for family in text_string_to_metric_families(text.decode()):
        for one in family.samples:
            declared = METRICS.get(one.name.removesuffix("_bucket"))
            names = declared.labels if declared else ()
            labels = {name: value for name, value in one.labels.items() if name != "namespace"}
            found.setdefault(one.name, {})[(*map(labels.pop, names), *labels.values())] = one.value
    return found


@pytest.fixture
def scrape(url: str, namespace: str) -> Iterator[Callable[[], dict[str, Values]]]:
    """`scrape()`: the metrics of the store, from a snapshot of this moment."""
    with Gate(url, namespace=namespace, presence=False) as reader:
        yield lambda: parsed(render_store(StoreCollector(reader)))


def found(metrics: dict[str, Values]) -> set[tuple[str, ...]]:
    """The findings with their topic and scope, without those of the server of the tests."""
    rows = metrics.get("idemgate_findings", {})
    return {(kind, topic, scope) for kind, _, topic, scope in rows if kind != "persistence"}


# -- of a store -------------------------------------------------------------------------------------------------------


def test_the_numbers_of_a_topic(filled: Gate, scrape: Callable[[], dict[str, Values]]) -> None:
    topic = filled.topic("jobs")
    topic.trigger("waits", {"n": 4}, version=3)
    topic.trigger("runs", 2)
    with suppress(InvalidArgument):
        topic.trigger("runs", object())
    metrics, stats = scrape(), topic.stats()
    assert metrics["idemgate_up"] == {(): 1}
    states = ("scheduled", "ready", "waiting", "blocked", "in_flight")
    messages = {state: metrics["idemgate_topic_messages"]["jobs", state] for state in states}
    assert messages == {state: getattr(stats, state) for state in states}
    assert (messages["scheduled"], messages["waiting"], messages["in_flight"]) == (2, 1, 1)
    assert metrics["idemgate_topic_dead_letters"] == {("jobs",): 2, ("empty",): 0}
    assert metrics["idemgate_triggers_accepted_total"]["jobs",] == stats["accepted"]
    assert metrics["idemgate_triggers_rejected_total"]["jobs", "version"] == 1
    assert metrics["idemgate_deliveries_started_total"]["jobs",] == 3
    assert metrics["idemgate_dead_letters_total"]["jobs", "buried"] == 3
    assert metrics["idemgate_topic_paused"]["jobs",] == 0
    assert metrics["idemgate_topic_due_oldest_seconds"]["empty",] == 0
    assert ("dead-letters", "jobs", "") in found(metrics)


def test_processes_are_added_up(gate: Gate, url: str, namespace: str, scrape: Callable[[], dict[str, Values]]) -> None:
    gate.topic("jobs").open()
    running = (Running("jobs", "order-7", time.monotonic() - 30, 0),)
    runner = Runner("worker", lambda _: True, lambda: ("jobs",), lambda: (1, 4), lambda: running)
    with Gate(url, namespace=namespace) as other:
        for one in (gate, other):
            with one.context.runners.running(runner):
                report(one)
        metrics = scrape()
    assert metrics["idemgate_topic_processes"] == {("jobs",): 2}
    assert metrics["idemgate_worker_places"] == {("busy",): 2, ("free",): 6}
    assert sum(metrics["idemgate_processes"].values()) == 2
    assert 30 <= metrics["idemgate_handler_running_oldest_seconds"]["jobs",] < 90


def test_what_was_decided_or_is_only_history_is_no_finding(
    gate: Gate, url: str, namespace: str, scrape: Callable[[], dict[str, Values]]
) -> None:
    """A cancelled message, a key that a person completed, and a duplicate that ran twice."""
    topic = gate.topic("jobs")
    topic.trigger("order-7", 1)
    topic.cancel("order-7")
    with Gate(url, namespace=namespace, clock=Clock(time.time() - 60)) as earlier:
        earlier.claim("order-8", lease="1s", on_lease_loss="hold", scope="charge")
        earlier.claim("order-9", lease="1s", scope="charge")
    with suppress(Exception):
        gate.claim("order-8", on_lease_loss="hold", scope="charge")
    report(gate)
    assert found(scrape()) == {("key-held", "", "charge")}
    gate.resolve("order-8", scope="charge", done=True)
    with gate.claim("order-9", scope="charge") as claim:  # it ran before, and runs again
        assert claim.state == "started"
    report(gate)
    metrics = scrape()
    assert found(metrics) == set()
    assert metrics["idemgate_messages_cancelled_total"] == {("jobs",): 1}


def test_a_snapshot_serves_the_scrapes_of_a_second(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    collector = StoreCollector(gate)
    gate.topic("jobs").open()
    assert [*parsed(render_store(collector))["idemgate_topic_paused"]] == [("jobs",)]
    gate.topic("mails").open()
    assert [*parsed(render_store(collector))["idemgate_topic_paused"]] == [("jobs",)]
    monkeypatch.setattr("idemgate.metrics.MAX_AGE", 0.0)
    assert {*parsed(render_store(collector))["idemgate_topic_paused"]} == {("jobs",), ("mails",)}


def test_a_store_that_is_away_is_the_only_finding_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("idemgate.metrics.MAX_AGE", 0.0)
    (port,) = cluster.unused_ports(1)
    with Gate(f"redis://127.0.0.1:{port}/0", presence=False, timeout="100ms") as gate:
        collector = StoreCollector(gate)
        for _ in range(2):
            metrics = parsed(render_store(collector))
            assert metrics == {"idemgate_up": {(): 0}, "idemgate_findings": {("store", "critical", "", ""): 1}}
        assert [one.message.partition(" ")[0] for one in caplog.records if one.name == "idemgate.metrics"] == [
            "metrics.failed"
        ]
        with cluster.server(tmp_path / "server", port, "--appendonly", "yes"):
            wait_until(lambda: parsed(render_store(collector))["idemgate_up"] == {(): 1})  # 100 ms may be too short
        parsed(render_store(collector))
    assert sum(one.levelno == logging.WARNING for one in caplog.records if one.name == "idemgate.metrics") == 2


def test_a_scrape_searches_for_no_key_and_writes_nothing(filled: Gate, raw: Any, stored: Any, scrape: Any) -> None:
    report(filled)
    before = stored()
    assert not sent(raw, scrape) & SEARCHES
    assert stored() == before


@pytest.mark.parametrize(("roles", "judged"), [(("viewer",), False), (("viewer", "auditor"), True)])
def test_the_exporter_is_for_those_who_only_read(
    filled: Gate, users: Callable[..., str], namespace: str, roles: tuple[str, ...], judged: bool
) -> None:
    with Gate(users(*roles), namespace=namespace, presence=False) as viewer:
        metrics = parsed(render_store(StoreCollector(viewer)))
    assert metrics["idemgate_up"] == {(): 1}
    assert ("persistence" in {kind for kind, *_ in metrics["idemgate_findings"]}) <= judged
    assert ("dead-letters", "jobs", "") in found(metrics)


# -- of a process -----------------------------------------------------------------------------------------------------


def test_a_process_has_its_counters_places_and_durations(gate: Gate) -> None:
    @gate.once(key="{key}", scope="charge")
    def charge(key: str) -> None: ...

    for key in ("order-7", "order-7", "order-8"):
        charge(key)
    times = gate.context.activity.times_of("jobs")
    for seconds in (0.002, 0.002, 5.0, 1000.0):
        times.handling.add(seconds)
    runner = Runner("worker", lambda _: True, lambda: ("jobs",), lambda: (1, 4))
    with gate.context.runners.running(runner):
        metrics = parsed(render_process(gate))
    events = metrics["idemgate_process_events_total"]
    assert {name: n for (name,), n in events.items()} == gate.counters.snapshot()
    assert events["once.done",] == 1
    assert metrics["idemgate_process_places"] == {("busy",): 1, ("free",): 3}
    buckets = metrics["idemgate_process_handling_seconds_bucket"]
    assert [buckets["jobs", bound] for bound in ("0.001", "0.003", "10.0", "300.0", "+Inf")] == [0, 2, 3, 3, 4]
    assert len(metrics["idemgate_process_store_call_seconds_bucket"]) == len(BOUNDS) + 1
    assert "process_cpu_seconds_total" in metrics or sys.platform != "linux"


def test_a_registry_takes_the_gates_of_a_program_together(gate: Gate, url: str, namespace: str) -> None:
    with Gate(url, namespace=f"{namespace}-2") as other:
        for one, n in ((gate, 1), (other, 2)):
            one.context.counters.add("once.done", n)
        registry = CollectorRegistry(auto_describe=True)
        registry.register(GateCollector(gate, gate, other))
        with pytest.raises(ValueError, match="Duplicated timeseries"):
            registry.register(GateCollector(gate))
        done = {
            one: registry.get_sample_value("idemgate_process_events_total", {"namespace": one, "event": "once.done"})
            for one in (namespace, f"{namespace}-2")
        }
    assert done == {namespace: 2, f"{namespace}-2": 2}


@pytest.mark.parametrize("gates", [(), ("redis://localhost",), (None,)])
def test_only_gates_are_collected(gates: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidArgument, match="GateCollector"):
        GateCollector(*gates)


# -- the command ------------------------------------------------------------------------------------------------------


@contextmanager
def exporter(url: str, namespace: str, address: str = "0") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command as a process, and the address that it prints."""
    line = [sys.executable, "-m", "idemgate", "metrics", "--url", url, "-n", namespace, "--listen", address]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.parametrize(("listen", "shown"), [("0", "127.0.0.1"), ("[::1]:0", "[::1]")])
def test_the_command_answers_until_a_signal(filled: Gate, url: str, namespace: str, listen: str, shown: str) -> None:
    with exporter(url, namespace, listen) as (process, address):
        assert address.startswith(f"http://{shown}:")
        with urllib.request.urlopen(address, timeout=60) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=")
            metrics = parsed(answer.read())
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(address.replace("/metrics", "/"), timeout=60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert metrics["idemgate_topic_dead_letters"]["jobs",] == 2
    assert not any(name.startswith(("idemgate_process_", "process_", "python_")) for name in metrics)


@pytest.mark.parametrize(
    ("address", "error"), [("x", "not a port"), ("70000", "not a port"), ("256.0.0.1:0", "cannot listen")]
)
def test_an_address_that_is_none_is_refused(command: Command, address: str, error: str) -> None:
    ran = command("metrics", "--listen", address)
    assert (ran.code, error in ran.err) == (2, True), ran.err


def test_without_the_extra_the_command_says_what_to_install(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "idemgate.metrics")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    ran = command("metrics")
    assert ran.code == 2
    assert "pip install '.[metrics]'" in ran.err
