"""A Prometheus with the configuration of `docs/monitoring.md` and the alert rules."""

from __future__ import annotations

import json
import re
import shutil
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests import cluster
from tests.needs import report_missing
from tools import monitoring

__all__ = ["Alert", "configure", "find_alerts", "find_program", "has_scraped", "prometheus"]

Alert = dict[str, dict[str, str]]
PAGE = (monitoring.FOLDER.parent / "monitoring.md").read_text()


def find_program(name: str) -> str:
    return shutil.which(name) or report_missing("prometheus")


def configure(folder: Path, exporter: str, workers: Sequence[str] = (), *, quick: bool = False) -> Path:
    """Write the configuration of the page, and the rules beside it. `quick` divides their times by ten."""
    [config] = re.findall(r"```yaml\n(global:.*?)```", PAGE, re.DOTALL)
    config = config.replace("exporter:9746", exporter).replace('["web-1:8080", "web-2:8080"]', json.dumps([*workers]))
    for name, text in {"alerts.yml": monitoring.alert_rules(), "prometheus.yml": config}.items():
        (folder / name).write_text(re.sub(r"\b([13])0s\b", r"\1s", text) if quick else text)
    return folder / "prometheus.yml"


@contextmanager
def prometheus(folder: Path, config: Path, port: int | None = None) -> Iterator[str]:
    """A Prometheus, and its address."""
    port = cluster.unused_ports(1)[0] if port is None else port
    line = [
        find_program("prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with cluster.running(line):
        yield f"http://127.0.0.1:{port}"


def find_alerts(server: str) -> list[Alert]:
    """Return the alerts that fire. Raises OSError while the server starts."""
    return [one for one in _ask(server, "alerts")["alerts"] if one["state"] == "firing"]


def has_scraped(server: str) -> bool:
    """Return True if the store is known to be up. Raises OSError while the server starts."""
    return bool(_ask(server, "query?query=idemgate_up")["result"])


def _ask(server: str, path: str) -> Any:
    with urllib.request.urlopen(f"{server}/api/v1/{path}", timeout=60) as answer:
        return json.load(answer)["data"]
