"""Alert rules and the dashboard: made from the catalogue, and they see what a snapshot shows, and nothing else."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from idemgate.audit import server
from idemgate.audit.catalogue import CATALOGUE, SNAPSHOT_KINDS, link_of
from idemgate.audit.running import findings
from idemgate.audit.snapshot import Snapshot
from idemgate.metrics import PROCESS_METRICS, STORE_METRICS, TOPIC_COUNTERS, snapshot_metrics
from idemgate.topics.messages import Stats
from tests.audit.test_running import CASES, SOUND, WRONG, snapshot
from tests.for_each import for_each
from tests.needs import report_missing
from tools import monitoring

METRICS = {**STORE_METRICS, **PROCESS_METRICS}
RULES = (monitoring.FOLDER / "alerts.yml").read_text()
DASHBOARD = json.loads((monitoring.FOLDER / "dashboard.json").read_text())
PAGE = (monitoring.FOLDER.parent / "monitoring.md").read_text()
QUERIES = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def with_server(**facts: Any) -> Snapshot:
    info = {**SOUND.info, **facts.pop("info", {})}
    return snapshot(servers={"h:1": SOUND._replace(info=info, **facts)})


PLANTED: dict[str, Snapshot | None] = {
    "store": None,
    **{kind: with_server(info=info) for info, kind, _ in WRONG.values()},
    "server": with_server(info={"redis_version": "5.0.0"}),
    "disk": with_server(info={"aof_last_write_status": "err"}),
    "cluster": with_server(info={"cluster_enabled": 1}),
    "clock": with_server(apart=9.0),
    "connections": with_server(info={"maxclients": 10, "connected_clients": 9}),
    **{kind: cases[0][0] for kind, cases in CASES.items()},
}
"""A snapshot for each kind, in which it is the only finding."""


def samples(there: Snapshot | None) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """The metrics of a snapshot: by name and labels."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for metric in snapshot_metrics("shop", there):
        for one in metric.samples:
            found.setdefault(one.name, {})[tuple(one.labels.items())] = one.value
    return found


def labels_of(kind: str) -> dict[str, str]:
    """The labels of the planted finding."""
    [labels] = samples(PLANTED[kind])["idemgate_findings"]
    return dict(labels)


# -- one truth --------------------------------------------------------------------------------------------------------


def test_the_files_are_those_that_the_catalogue_makes() -> None:
    assert monitoring.alert_rules() == RULES, "python -m tools.monitoring"
    assert monitoring.dashboard() == (monitoring.FOLDER / "dashboard.json").read_text(), "python -m tools.monitoring"


def test_each_kind_that_a_snapshot_shows_has_a_rule_and_no_other() -> None:
    ruled = dict(re.findall(r'- alert: (\w+)\n +expr: .*finding="([a-z-]+)"', RULES))
    assert ruled == {monitoring.alert_name(kind): kind for kind in SNAPSHOT_KINDS}
    assert {*PLANTED} == {*SNAPSHOT_KINDS}
    assert [*re.findall(r"page: \"(.+)\"", RULES)] == [*map(link_of, SNAPSHOT_KINDS), "docs/monitoring.md"]
    checks = {*re.findall(r'Check\("([a-z]+)"', inspect.getsource(server).partition("def durable(")[0])}
    assert checks - {*SNAPSHOT_KINDS} == {"replicas"}  # it is never more than advice


@for_each("kind", PLANTED)
def test_a_finding_is_a_metric_with_its_topic_or_scope(kind: str) -> None:
    there = PLANTED[kind]
    if there is not None:
        [one] = findings(there)
        assert one.kind == kind
        of = ("scope" if one.of_scope else "topic", one.of)
        assert {of, ("finding", kind), ("severity", one.severity), ("namespace", "shop")} <= labels_of(kind).items()
    assert samples(there)["idemgate_up"] == {(("namespace", "shop"),): there is not None}


@for_each(
    ("kind", "number", "topic", "scope"),
    [
        ("poison-message", 0, "jobs", ""),
        ("poison-message", 1, "", "charge"),
        ("calls-hang", 0, "", "charge"),
        ("calls-hang", -1, "jobs", ""),
        ("key-held", 0, "", "charge"),
    ],
)
def test_a_finding_is_of_a_topic_or_of_a_scope(kind: str, number: int, topic: str, scope: str) -> None:
    [labels] = samples(CASES[kind][number][0])["idemgate_findings"]
    assert (dict(labels)["topic"], dict(labels)["scope"]) == (topic, scope)


def test_the_page_lists_each_metric_with_its_labels_and_no_other() -> None:
    listed = re.findall(r"^\| `(idemgate_\w+)` \| ([a-z]+) \| (.*?) \|", PAGE, re.MULTILINE)
    assert len(listed) == len(METRICS)
    for name, kind, labels in listed:
        assert (kind, tuple(re.findall(r"`(\w+)`", labels))) == (METRICS[name].type, METRICS[name].labels), name


def test_the_dashboard_and_the_rules_use_each_metric_and_no_other() -> None:
    used = {name for text in (*QUERIES, RULES) for name in re.findall(r"\bidemgate_\w+", text)}
    assert {name.removesuffix("_bucket") for name in used} == {*METRICS}
    for query in QUERIES:
        for name, labels in re.findall(r"(idemgate_\w+)\{(.*?)\}", query):
            known = {"namespace", *METRICS[name.removesuffix("_bucket")].labels}
            assert {*re.findall(r"(\w+)=", labels)} <= known, query
            assert {*re.findall(r"\w+", "".join(re.findall(r"by \((.*?)\)", query)))} <= {*known, "le", "instance"}
    assert {*re.findall(r"\$(\w+)", json.dumps(QUERIES))} == {"namespace", "topic", "__rate_interval"}
    legends = [(t["legendFormat"], t["expr"]) for panel in DASHBOARD["panels"] for t in panel["targets"]]
    assert [one for one in legends if not all(f"{name}" in one[1] for name in re.findall(r"{{(\w+)}}", one[0]))] == []


def test_no_panels_overlap() -> None:
    taken = [
        (x, y)
        for panel in DASHBOARD["panels"]
        for grid in [panel["gridPos"]]
        for x in range(grid["x"], grid["x"] + grid["w"])
        for y in range(grid["y"], grid["y"] + grid["h"])
    ]
    assert len(taken) == len({*taken})
    assert max(x for x, _ in taken) < 24


def test_names_follow_the_conventions_and_no_label_grows_with_keys() -> None:
    for name, (kind, text, labels) in METRICS.items():
        assert name.endswith("_total") == (kind == "counter"), name
        assert text, name
        assert not {*labels} & {"key", "pid", "host", "process", "group"}, name
        assert not re.search(r"_(ms|minutes|milliseconds)\b", name)
    assert not {*STORE_METRICS} & {*PROCESS_METRICS}


def test_each_counter_of_a_topic_is_a_metric_or_a_part_of_one() -> None:
    counters = (Stats.__doc__ or "").partition("Counters of triggers:")[2].partition("At any")[0]
    documented = {*re.findall(r"`(\w+)`", counters)}
    left_out = {"dropped", "partial", "folded", "outdated", "items_failed"}
    options = {"bury", "cancel", "dead_retention", "max_dead", "partial", "release", "_triggers", "acked_triggers"}
    assert documented - options - left_out == {*TOPIC_COUNTERS}


# -- promtool ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    return found or report_missing("prometheus")


def run(promtool: str, *words: str | Path) -> None:
    ran = subprocess.run([promtool, *words], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_promtool_accepts_the_rules_and_the_queries_of_the_dashboard(promtool: str, tmp_path: Path) -> None:
    run(promtool, "check", "rules", monitoring.FOLDER / "alerts.yml")
    queries = [query.replace("$__rate_interval", "1m") for query in QUERIES]
    rules = [{"record": f"q{n}", "expr": query} for n, query in enumerate(queries)]
    (tmp_path / "queries.yml").write_text(json.dumps({"groups": [{"name": "queries", "rules": rules}]}))
    run(promtool, "check", "rules", tmp_path / "queries.yml")


def scene(name: str, there: Snapshot | None, fires: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """A test of promtool: what is found at the second scrape fires by the evaluation of 30 s."""
    series = [
        {
            "series": metric + "{" + ", ".join(f"{key}={json.dumps(text)}" for key, text in labels) + "}",
            "values": f"_ {n}+0x5",
        }
        for metric, rows in samples(there).items()
        for labels, n in rows.items()
    ]
    names = re.findall(r"alert: (\w+)", RULES)
    expected = [{"eval_time": "30s", "alertname": one, "exp_alerts": fires.get(one, [])} for one in names]
    return {"name": name, "interval": "10s", "input_series": series, "alert_rule_test": expected}


def end_scene() -> dict[str, Any]:
    """A finding that is absent for a scrape or two is the same alert, which ends 30 s after the finding."""
    made = scene("ends", PLANTED["topic-paused"], {})
    [series] = [one for one in made["input_series"] if one["series"].startswith("idemgate_findings")]
    rule = made["alert_rule_test"][0] | {"alertname": "IdemgateTopicPaused"}
    alert = {"exp_labels": labels_without_empty("topic-paused"), "exp_annotations": annotations("topic-paused")}
    return made | {
        "input_series": [series | {"values": "_ 1 _ _ 1"}],
        "alert_rule_test": [rule | {"eval_time": f"{n}s", "exp_alerts": [alert]} for n in (20, 30, 60)]
        + [rule | {"eval_time": "80s", "exp_alerts": []}],
    }


def labels_without_empty(kind: str) -> dict[str, str]:
    return {name: value for name, value in labels_of(kind).items() if value}


def annotations(kind: str) -> dict[str, str]:
    labels = labels_of(kind)
    return {
        "summary": monitoring.summary(kind, labels["topic"] or labels["scope"]),
        "description": monitoring.description(kind, "shop"),
        "page": link_of(kind),
    }


def test_each_finding_fires_its_alert_alone_within_30_s(promtool: str, tmp_path: Path) -> None:
    """A case for each kind, and for a snapshot that nearly has it."""
    tests = list[dict[str, Any]]()
    for kind, there in PLANTED.items():
        alert = {"exp_labels": labels_without_empty(kind), "exp_annotations": annotations(kind)}
        tests.append(scene(kind, there, {monitoring.alert_name(kind): [alert]}))
    for kind, cases in CASES.items():
        near = cases[0][1]
        if not findings(near):
            tests.append(scene(f"nearly {kind}", near, {}))
    assert len(tests) > len(PLANTED) + 10
    tests.append(end_scene())
    missing = {"exp_labels": {"severity": "critical"}, "exp_annotations": dict(re.findall(
        r'(\w+): "(.*)"', RULES.partition("MetricsMissing\n")[2].partition("annotations:")[2]
    ))}  # fmt: skip
    silent = scene("no exporter", None, {"IdemgateMetricsMissing": [missing]})
    tests.append(silent | {"input_series": []})
    starts = {"eval_time": "0s", "alertname": "IdemgateMetricsMissing", "exp_alerts": []}
    tests.append(silent | {"name": "Prometheus starts", "alert_rule_test": [starts]})
    (tmp_path / "alerts.yml").write_text(RULES)
    scenes = {"rule_files": ["alerts.yml"], "evaluation_interval": "10s", "tests": tests}
    (tmp_path / "test.yml").write_text(json.dumps(scenes))
    run(promtool, "test", "rules", tmp_path / "test.yml")


def test_an_alert_says_what_to_do() -> None:
    assert monitoring.summary("topic-paused", "jobs") == "topic-paused jobs: a pause was not ended"
    assert monitoring.summary("memory", "") == "memory: more data than memory"
    assert monitoring.description("topic-paused", "shop") == (
        "resume the topic. `idemgate status --namespace shop --only topic-paused` has the details and the command"
    )
    assert all(CATALOGUE[kind].mend in RULES for kind in SNAPSHOT_KINDS)
