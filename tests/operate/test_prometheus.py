"""A Prometheus with the configuration of the page and the alert rules scrapes a live namespace and a worker."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from idemgate import Gate
from idemgate.metrics import StoreCollector, render_process, render_store
from idemgate.testing import Clock
from tests.operate.test_metrics import exporter
from tests.presence.conftest import report
from tests.prometheus import Alert, configure, find_alerts, find_program, prometheus
from tests.waiting import wait_until


def test_the_configuration_of_the_page_is_valid(tmp_path: Path) -> None:
    config = configure(tmp_path, "exporter:9746", ["web-1:8080"])
    ran = subprocess.run(
        [find_program("promtool"), "check", "config", config], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_promtool_finds_nothing_to_correct_in_the_metrics(filled: Gate) -> None:
    promtool = find_program("promtool")
    report(filled)
    for text in (render_store(StoreCollector(filled)), render_process(filled)):
        ran = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, timeout=60, check=False)
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")


@pytest.mark.slow
def test_an_alert_names_the_topic_and_ends_when_it_is_mended(
    gate: Gate, url: str, namespace: str, tmp_path: Path
) -> None:
    find_program("prometheus")
    gate.topic("jobs").trigger("order-7", 1)
    with Gate(url, namespace=namespace, clock=Clock(time.time() - 400)) as earlier:
        earlier.topic("jobs").pause("outage")
    with exporter(url, namespace, "0") as (_, address):
        config = configure(tmp_path, address.removeprefix("http://").removesuffix("/metrics"), quick=True)
        with prometheus(tmp_path, config) as server:

            def alerts() -> dict[str, Alert]:
                return {one["labels"]["alertname"]: one for one in find_alerts(server)}

            paused = wait_until(lambda: alerts().get("IdemgateTopicPaused"), not_yet=(OSError,))
            assert paused["labels"]["topic"] == "jobs"
            assert paused["labels"]["namespace"] == namespace
            assert paused["annotations"]["summary"] == "topic-paused jobs: a pause was not ended"
            gate.topic("jobs").resume()
            wait_until(lambda: "IdemgateTopicPaused" not in alerts())
