"""A Prometheus with the configuration of the page and the alert rules scrapes a live namespace and a worker."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from idemgate import Gate
from idemgate.metrics import StoreCollector, render_process, render_store
from idemgate.testing import Clock
from tests import cluster
from tests.needs import report_missing
from tests.operate.test_metrics import exporter
from tests.presence.conftest import report
from tests.waiting import wait_until
from tools import monitoring

PAGE = (monitoring.FOLDER.parent / "monitoring.md").read_text()


def program(name: str) -> str:
    return shutil.which(name) or report_missing("prometheus")


def configure(folder: Path, exporter: str, *, quick: bool = False) -> Path:
    """Write the configuration of the page, and the rules beside it. `quick` divides their times by ten."""
    [config] = re.findall(r"```yaml\n(global:.*?)```", PAGE, re.DOTALL)
    config = config.replace("exporter:9746", exporter)
    for name, text in {"alerts.yml": monitoring.alert_rules(), "prometheus.yml": config}.items():
        (folder / name).write_text(re.sub(r"\b([13])0s\b", r"\1s", text) if quick else text)
    return folder / "prometheus.yml"


def test_the_configuration_of_the_page_is_valid(tmp_path: Path) -> None:
    config = configure(tmp_path, "exporter:9746")
    ran = subprocess.run(
        [program("promtool"), "check", "config", config], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_promtool_finds_nothing_to_correct_in_the_metrics(filled: Gate) -> None:
    promtool = program("promtool")
    report(filled)
    for text in (render_store(StoreCollector(filled)), render_process(filled)):
        ran = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, timeout=60, check=False)
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, b"", b"")


@contextmanager
def prometheus(folder: Path, config: Path) -> Iterator[str]:
    """A Prometheus, and its address."""
    (port,) = cluster.unused_ports(1)
    line = [
        program("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.mark.slow
def test_an_alert_names_the_topic_and_ends_when_it_is_mended(
    gate: Gate, url: str, namespace: str, tmp_path: Path
) -> None:
    program("prometheus")
    gate.topic("jobs").trigger("order-7", 1)
    with Gate(url, namespace=namespace, clock=Clock(time.time() - 400)) as earlier:
        earlier.topic("jobs").pause("outage")
    with exporter(url, namespace, "0") as (_, address):
        config = configure(tmp_path, address.removeprefix("http://").removesuffix("/metrics"), quick=True)
        with prometheus(tmp_path, config) as server:

            def alerts() -> dict[str, Any]:
                with urllib.request.urlopen(f"{server}/api/v1/alerts", timeout=60) as answer:
                    found = json.load(answer)["data"]["alerts"]
                return {one["labels"]["alertname"]: one for one in found if one["state"] == "firing"}

            paused = wait_until(lambda: alerts().get("IdemgateTopicPaused"), not_yet=(OSError,))
            assert paused["labels"]["topic"] == "jobs"
            assert paused["labels"]["namespace"] == namespace
            assert paused["annotations"]["summary"] == "topic-paused jobs: a pause was not ended"
            gate.topic("jobs").resume()
            wait_until(lambda: "IdemgateTopicPaused" not in alerts())
