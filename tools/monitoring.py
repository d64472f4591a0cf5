"""Write `docs/monitoring`: alert rules for Prometheus, made from the catalogue of findings, and a Grafana dashboard.

The catalogue (`idemgate/audit/catalogue.py`) is the only place of causes, repairs and thresholds. A test compares both
files with what this program makes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from idemgate.audit.catalogue import CATALOGUE, SNAPSHOT_KINDS, link_of

FOLDER = Path(__file__).parents[1] / "docs" / "monitoring"
INTERVAL = "10s"
"""How often Prometheus evaluates the rules. Processes report as often."""
BRIDGED = "30s"
"""A finding that is absent for less is the same alert: a message that fails each time is no finding while it runs."""


def main() -> None:
    """Write both files."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in {"alerts.yml": alert_rules(), "dashboard.json": dashboard()}.items():
        (FOLDER / name).write_text(text)
        print(FOLDER / name)


# -- alert rules ------------------------------------------------------------------------------------------------------


def alert_name(kind: str) -> str:
    """Return the name of the alert for a kind of finding: `IdemgateTopicLate`."""
    return "Idemgate" + "".join(word.capitalize() for word in kind.split("-"))


def summary(kind: str, subject: str | None = None) -> str:
    """Return what an alert says first, about a topic or a scope, or "" for neither. None leaves it to Prometheus."""
    template = "{{ with or $labels.topic $labels.scope }} {{ . }}{{ end }}"
    return f"{kind}{template if subject is None else f' {subject}'.rstrip()}: {CATALOGUE[kind].cause}"


def description(kind: str, namespace: str = "{{ $labels.namespace }}") -> str:
    """Return what to do."""
    look = f"`idemgate status --namespace {namespace} --only {kind}` has the details and the command"
    return f"{CATALOGUE[kind].mend}. {look}"


def alert_rules() -> str:
    """Return the rules: one for each finding that a snapshot shows, and one for an exporter that is away."""
    lines = [
        "# Made by `python -m tools.monitoring` from idemgate/audit/catalogue.py: change that instead.",
        "groups:",
        "  - name: idemgate",
        f"    interval: {INTERVAL}",
        "    rules:",
    ]
    for kind in SNAPSHOT_KINDS:
        found = f'max_over_time(idemgate_findings{{finding="{kind}"}}[{BRIDGED}])'
        lines += _rule(
            alert_name(kind),
            # Without the labels of the exporter: two of them, or a new one, are no other alert.
            f"max by (namespace, finding, severity, topic, scope) ({found}) > 0",
            {},
            {"summary": summary(kind), "description": description(kind), "page": link_of(kind)},
        )
    lines += _rule(
        "IdemgateMetricsMissing",
        f"absent_over_time(idemgate_up[{BRIDGED}])",
        {"severity": "critical"},
        {
            "summary": "no exporter of idemgate answers: nothing is known of any namespace",
            "description": "start `idemgate metrics`, and look at the targets of Prometheus",
            "page": "docs/monitoring.md",
        },
        pending=INTERVAL,  # a Prometheus that starts evaluates before its first scrape
    )
    return "\n".join(lines) + "\n"


def _rule(
    name: str, expr: str, labels: dict[str, str], annotations: dict[str, str], pending: str = ""
) -> Iterator[str]:
    yield f"      - alert: {name}"
    yield f"        expr: {expr}"
    if pending:
        yield f"        for: {pending}"
    for title, texts in {"labels": labels, "annotations": annotations}.items():
        if texts:
            yield f"        {title}:"
            yield from (f"          {key}: {json.dumps(text)}" for key, text in texts.items())


# -- dashboard --------------------------------------------------------------------------------------------------------


class Panel(NamedTuple):
    """A panel: its title, what it shows in words, the unit of Grafana, and a query for each legend."""

    title: str
    text: str
    unit: str
    queries: dict[str, str]
    type: str = "timeseries"
    width: int = 8


_IN = 'namespace="$namespace"'
_OF = f'{_IN}, topic=~"$topic"'
_RATE = "[$__rate_interval]"


def _quantiles(metric: str, labels: str, by: str) -> dict[str, str]:
    return {
        f"p{share} {{{{topic}}}}".strip() if "topic" in by else f"p{share}": (
            f"histogram_quantile(0.{share}, sum by ({by}) (rate({metric}_bucket{{{labels}}}[10m])))"
        )
        for share in (50, 99)
    }


PANELS = (
    Panel(
        "Findings", "What is wrong now. docs/findings.md has a section for each", "short",
        {"": f"max by (finding, severity, topic, scope) (idemgate_findings{{{_IN}}})"}, "table", 16,
    ),
    Panel("Store", "1: the store answers the exporter", "short", {"": f"min(idemgate_up{{{_IN}}})"}, "stat", 4),
    Panel(
        "Damaged entries", "`idemgate doctor --audit` names them", "short",
        {"": f"max(idemgate_unreadable_entries{{{_IN}}})"}, "stat", 4,
    ),
    Panel(
        "Oldest due message", "How long a message is due, and no worker took it", "s",
        {
            "{{topic}}": f"max by (topic) (idemgate_topic_due_oldest_seconds{{{_OF}}})",
            "{{topic}} blocked by a group": f"max by (topic) (idemgate_topic_blocked_oldest_seconds{{{_OF}}}) > 0",
        },
    ),
    Panel(
        "Due messages", "Ready, waiting for their key, or blocked by their group", "short",
        {
            "{{topic}} {{state}}": (
                f'max by (topic, state) (idemgate_topic_messages{{{_OF}, state=~"ready|waiting|blocked"}})'
            )
        },
    ),
    Panel(
        "Scheduled and in flight", "Messages due later, and deliveries that run", "short",
        {
            "{{topic}} {{state}}": (
                f'max by (topic, state) (idemgate_topic_messages{{{_OF}, state=~"scheduled|in_flight"}})'
            )
        },
    ),
    Panel(
        "Triggers", "Accepted, merged with a pending message, and rejected, a second", "ops",
        {
            "{{topic}} accepted": f"max by (topic) (rate(idemgate_triggers_accepted_total{{{_OF}}}{_RATE}))",
            "{{topic}} merged": f"max by (topic) (rate(idemgate_triggers_merged_total{{{_OF}}}{_RATE}))",
            "{{topic}} {{reason}}": (
                f"max by (topic, reason) (rate(idemgate_triggers_rejected_total{{{_OF}}}{_RATE})) > 0"
            ),
        },
    ),
    Panel(
        "Deliveries", "Started, and ended by their outcome, a second", "ops",
        {
            "{{topic}} started": f"max by (topic) (rate(idemgate_deliveries_started_total{{{_OF}}}{_RATE}))",
            "{{topic}} {{outcome}}": (
                f"max by (topic, outcome) (rate(idemgate_deliveries_ended_total{{{_OF}}}{_RATE})) > 0"
            ),
            "{{topic}} settled too late": (
                f"max by (topic) (rate(idemgate_settlements_lost_total{{{_OF}}}{_RATE})) > 0"
            ),
        },
    ),
    Panel(
        "Dead letters", "Stored now, and what became of others in the last hour", "short",
        {
            "{{topic}}": f"max by (topic) (idemgate_topic_dead_letters{{{_OF}}})",
            "{{topic}} {{event}}": f"max by (topic, event) (increase(idemgate_dead_letters_total{{{_OF}}}[1h])) > 0",
        },
    ),
    Panel(
        "Places of workers", "Handlers that run, and how many more may", "short",
        {"{{state}}": f"max by (state) (idemgate_worker_places{{{_IN}}})"},
    ),
    Panel(
        "Oldest running handler", "A line that only rises is a handler that hangs", "s",
        {"{{topic}}": f"max by (topic) (idemgate_handler_running_oldest_seconds{{{_OF}}})"},
    ),
    Panel(
        "Processes", "Those that report, and those that take from each topic", "short",
        {
            "{{role}} {{version}}": f"max by (role, version) (idemgate_processes{{{_IN}}})",
            "of {{topic}}": f"max by (topic) (idemgate_topic_processes{{{_OF}}})",
            "{{topic}} paused": f"max by (topic) (idemgate_topic_paused{{{_OF}}}) > 0",
        },
    ),
    Panel(
        "Cancelled, forwarded, dropped items", "A second", "ops",
        {
            "{{topic}} cancelled": f"max by (topic) (rate(idemgate_messages_cancelled_total{{{_OF}}}{_RATE}))",
            "{{topic}} forwarded": f"max by (topic) (rate(idemgate_messages_forwarded_total{{{_OF}}}{_RATE}))",
            "{{topic}} items dropped": f"max by (topic) (rate(idemgate_items_dropped_total{{{_OF}}}{_RATE}))",
        },
    ),
    Panel(
        "Handlers: duration", "Of the processes that are scraped, a sample", "s",
        _quantiles("idemgate_process_handling_seconds", _OF, "topic, le"),
    ),
    Panel(
        "Lateness of takes", "Of the processes that are scraped, a sample", "s",
        _quantiles("idemgate_process_lateness_seconds", _OF, "topic, le"),
    ),
    Panel(
        "Calls of the store", "Of the processes that are scraped, a sample", "s",
        _quantiles("idemgate_process_store_call_seconds", _IN, "le"),
    ),
    Panel(
        "Guarded calls", "Counters of `once` in the processes that are scraped, a second", "ops",
        {"{{event}}": f'sum by (event) (rate(idemgate_process_events_total{{{_IN}, event=~"once[.].*"}}{_RATE})) > 0'},
    ),
    Panel(
        "Places of scraped processes", "By the process that Prometheus scrapes", "short",
        {"{{instance}} {{state}}": f"sum by (instance, state) (idemgate_process_places{{{_IN}}})"},
    ),
)  # fmt: skip


def dashboard() -> str:
    """Return the dashboard as Grafana imports it."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels = list[dict[str, Any]]()
    x = y = 0
    for number, panel in enumerate(PANELS, 1):
        if x + panel.width > 24:
            x, y = 0, y + 8
        panels.append({
            "id": number, "title": panel.title, "description": panel.text, "type": panel.type, "datasource": source,
            "gridPos": {"x": x, "y": y, "w": panel.width, "h": 8},
            "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
            "options": {"reduceOptions": {"calcs": ["lastNotNull"]}} if panel.type == "stat" else {},
            "targets": [_target(n, *query, panel.type) for n, query in enumerate(panel.queries.items())],
        })  # fmt: skip
        x += panel.width
    facts = {
        "title": "idemgate", "uid": "idemgate", "tags": ["idemgate"], "schemaVersion": 39, "editable": True,
        "refresh": INTERVAL, "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [
            {"name": "datasource", "type": "datasource", "query": "prometheus"},
            _variable("namespace", "label_values(idemgate_up, namespace)", source),
            _variable("topic", f"label_values(idemgate_topic_processes{{{_IN}}}, topic)", source, many=True),
        ]},
        "panels": panels,
    }  # fmt: skip
    return json.dumps(facts, indent=2) + "\n"


def _target(number: int, legend: str, query: str, kind: str) -> dict[str, Any]:
    form = {"format": "table", "instant": True} if kind == "table" else {}
    return {"refId": "ABC"[number], "expr": query, "legendFormat": legend} | form


def _variable(name: str, query: str, source: dict[str, str], *, many: bool = False) -> dict[str, Any]:
    several = {"multi": True, "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}
    return {
        "name": name, "type": "query", "datasource": source, "definition": query, "refresh": 2,
        "query": {"query": query, "refId": name},
    } | (several if many else {})  # fmt: skip


if __name__ == "__main__":
    main()
