"""Metrics for Prometheus. They are collected when they are read, so that calls and deliveries cost nothing more.

`StoreCollector` has those of a namespace: its topics, what is wrong, and all processes together. `idemgate metrics`
serves it. `GateCollector` has those of this process. `idemgate run --probe` serves it, and another program registers it
with its own registry. The two are never served together: the first is read once for a namespace, the second in each
process. So no name of a metric is in both.

No label holds a key, a process or a host.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple

from idemgate.audit.running import findings
from idemgate.audit.snapshot import Snapshot, TopicSeen
from idemgate.core.activity import BOUNDS
from idemgate.core.clock import monotonic
from idemgate.core.text import one_line
from idemgate.errors import IdemgateError, InvalidArgument, NotConfigured
from idemgate.gate import Gate
from idemgate.operate.snapshot import take_snapshot

try:
    from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.registry import Collector
except ModuleNotFoundError:
    raise NotConfigured(
        "metrics need the extra `metrics`: pip install '.[metrics]' in a checkout of idemgate"
    ) from None

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = [
    "CONTENT_TYPE", "PROCESS_METRICS", "STORE_METRICS", "TOPIC_COUNTERS", "GateCollector", "StoreCollector",
    "render_process", "render_store", "snapshot_metrics",
]  # fmt: skip

log: logging.Logger = logging.getLogger("idemgate.metrics")
CONTENT_TYPE = CONTENT_TYPE_LATEST
"""The type of what `render_store` and `render_process` return."""
MAX_AGE = 1.0
"""Seconds in which a snapshot serves further scrapes."""


class Declared(NamedTuple):
    """A metric: its type, its help, and its labels beside `namespace`."""

    type: Literal["gauge", "counter", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


STORE_METRICS: Mapping[str, Declared] = {
    "idemgate_up": Declared("gauge", "1 if the store answered, else 0. Then only `store` is among the findings"),
    "idemgate_findings": Declared(
        "gauge", "Findings of `idemgate status` by kind; without a series if there are none",
        ("finding", "severity", "topic", "scope"),
    ),
    "idemgate_unreadable_entries": Declared("gauge", "Damaged entries that the other metrics leave out"),
    "idemgate_topic_messages": Declared(
        "gauge", "Messages: scheduled, ready, waiting for their key, blocked by their group, or in flight",
        ("topic", "state"),
    ),
    "idemgate_topic_dead_letters": Declared("gauge", "Dead letters", ("topic",)),
    "idemgate_topic_due_oldest_seconds": Declared(
        "gauge", "How long a message is due that is not in flight; 0 if none is", ("topic",)
    ),
    "idemgate_topic_blocked_oldest_seconds": Declared(
        "gauge", "How long a message is due that waits for its group; 0 if none does", ("topic",)
    ),
    "idemgate_topic_paused": Declared("gauge", "1 if the topic is paused, else 0", ("topic",)),
    "idemgate_topic_processes": Declared("gauge", "Processes that take from the topic", ("topic",)),
    "idemgate_handler_running_oldest_seconds": Declared(
        "gauge", "How long a handler of the topic runs; 0 if none does", ("topic",)
    ),
    "idemgate_processes": Declared("gauge", "Processes that report", ("role", "version")),
    "idemgate_worker_places": Declared("gauge", "Places for handlers of all workers, busy or free", ("state",)),
    "idemgate_triggers_accepted_total": Declared("counter", "Triggers that a delivery follows", ("topic",)),
    "idemgate_triggers_merged_total": Declared(
        "counter", "Accepted triggers that joined a pending message", ("topic",)
    ),
    "idemgate_triggers_rejected_total": Declared(
        "counter", "Triggers that were dropped or refused, or are duplicates", ("topic", "reason")
    ),
    "idemgate_deliveries_started_total": Declared("counter", "Deliveries that began", ("topic",)),
    "idemgate_deliveries_ended_total": Declared("counter", "Deliveries that ended", ("topic", "outcome")),
    "idemgate_settlements_lost_total": Declared(
        "counter", "Deliveries that were settled too late: another worker had the message", ("topic",)
    ),
    "idemgate_messages_cancelled_total": Declared("counter", "Messages that were cancelled", ("topic",)),
    "idemgate_messages_forwarded_total": Declared("counter", "Messages moved to the list or stream", ("topic",)),
    "idemgate_items_dropped_total": Declared("counter", "Items that had no room in their message", ("topic",)),
    "idemgate_dead_letters_total": Declared(
        "counter", "Dead letters by event: buried, redriven, deleted, or expired unseen", ("topic", "event")
    ),
}  # fmt: skip
"""The metrics of a store."""
_ENDS = ("acked", "nacked", "lapsed", "returned", "deferred")
TOPIC_COUNTERS: Mapping[str, tuple[str, ...]] = {
    "accepted": ("idemgate_triggers_accepted_total",),
    "merged": ("idemgate_triggers_merged_total",),
    "replaced": ("idemgate_triggers_merged_total",),
    "duplicate": ("idemgate_triggers_rejected_total", "duplicate"),
    "dropped_version": ("idemgate_triggers_rejected_total", "version"),
    "dropped_window": ("idemgate_triggers_rejected_total", "window"),
    "dropped_full": ("idemgate_triggers_rejected_total", "full"),
    "refused_payload": ("idemgate_triggers_rejected_total", "payload"),
    "refused_too_large": ("idemgate_triggers_rejected_total", "too_large"),
    "taken": ("idemgate_deliveries_started_total",),
    **{name: ("idemgate_deliveries_ended_total", name) for name in _ENDS},
    "lost": ("idemgate_settlements_lost_total",),
    "cancelled": ("idemgate_messages_cancelled_total",),
    "forwarded": ("idemgate_messages_forwarded_total",),
    "items_dropped": ("idemgate_items_dropped_total",),
    **{name: ("idemgate_dead_letters_total", name) for name in ("buried", "redriven", "deleted", "expired")},
}
"""The metric and the last label of counters of a topic. Those that are left out are sums or parts of these."""
PROCESS_METRICS: Mapping[str, Declared] = {
    "idemgate_process_events_total": Declared("counter", "The counters of gates (gate.counters) by name", ("event",)),
    "idemgate_process_places": Declared("gauge", "Places for handlers in this process, busy or free", ("state",)),
    "idemgate_process_lateness_seconds": Declared(
        "histogram", "From the due time of a message to its take: a sample every 50 ms", ("topic",)
    ),
    "idemgate_process_handling_seconds": Declared(
        "histogram", "From start to end of a handler: a sample every 50 ms", ("topic",)
    ),
    "idemgate_process_store_call_seconds": Declared("histogram", "Single calls of the store: a sample every 50 ms"),
}  # fmt: skip
"""The metrics of a process."""
Sample = tuple[str, tuple[str, ...], tuple[float, ...]]
"""A metric, its labels, and its number; of a histogram the number of each bucket. Samples with equal labels add up."""


class StoreCollector(Collector):
    """The metrics of a namespace.

    A collection takes one snapshot, or uses the last one if that is younger than a second. It never raises because of
    the store. Then `idemgate_up` is 0, and all numbers are left out instead of repeated. Any thread may collect.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._lock = threading.Lock()
        self._snapshot: Snapshot | None = None
        self._taken_at: float | None = None
        self._failing = False

    def collect(self) -> Iterator[Metric]:
        """Return the metrics now."""
        return snapshot_metrics(self._gate.context.namespace, self._take())

    def describe(self) -> Iterator[Metric]:
        """Return the metrics without numbers."""
        return _families(STORE_METRICS, ())

    def _take(self) -> Snapshot | None:
        with self._lock:  # scrapes at one time share a snapshot, and a failure
            if self._taken_at is None or monotonic() - self._taken_at >= MAX_AGE:
                self._snapshot = self._take_anew()
                self._taken_at = monotonic()
            return self._snapshot

    def _take_anew(self) -> Snapshot | None:
        try:
            snapshot = take_snapshot(self._gate)
        except IdemgateError as error:
            if not self._failing:
                log.warning("metrics.failed error=%s", one_line(error), extra={"error": str(error)})
            self._failing = True
            return None
        self._failing = False
        return snapshot


class GateCollector(Collector):
    """The metrics of gates in this process, for a registry of prometheus-client.

    A registry takes one of them, so pass it all gates of the program. It sends nothing. Any thread may collect.

    Args:
        gates: The gates, told apart by their namespaces. Numbers of gates with one namespace are added up.

    Raises:
        InvalidArgument: There is none, or something else is among them.
    """

    def __init__(self, *gates: Gate) -> None:
        if not gates or not all(isinstance(one, Gate) for one in gates):
            raise InvalidArgument("gates", gates, "no gates", "Pass one or several: GateCollector(gate)")
        self._gates = gates

    def collect(self) -> Iterator[Metric]:
        """Return the metrics now."""
        return _families(PROCESS_METRICS, (one for gate in self._gates for one in _read_gate(gate)))

    def describe(self) -> Iterator[Metric]:
        """Return the metrics without numbers. So a registry refuses a second collector."""
        return _families(PROCESS_METRICS, ())


def snapshot_metrics(namespace: str, snapshot: Snapshot | None) -> Iterator[Metric]:
    """Return the metrics of a namespace from a snapshot; None if it could not be taken."""
    return _families(STORE_METRICS, _read_store(namespace, snapshot))


def render_store(collector: StoreCollector) -> bytes:
    """Return the metrics of a store as Prometheus reads them."""
    return _render(collector)


def render_process(gate: Gate) -> bytes:
    """Return the metrics of this process as Prometheus reads them: the default registry, and those of the gate.

    The gate is left out if the program has a GateCollector in the default registry.
    """
    there = generate_latest(REGISTRY)
    return there if b"# TYPE idemgate_process_events_total " in there else there + _render(GateCollector(gate))


def _render(collector: Collector) -> bytes:
    registry = CollectorRegistry()
    registry.register(collector)
    return generate_latest(registry)


def _families(declared: Mapping[str, Declared], samples: Iterable[Sample]) -> Iterator[Metric]:
    """Yield the declared metrics with their samples."""
    sums: dict[str, dict[tuple[str, ...], tuple[float, ...]]] = {name: {} for name in declared}
    for name, labels, numbers in samples:
        known = sums[name].get(labels)
        sums[name][labels] = numbers if known is None else tuple(map(sum, zip(known, numbers, strict=True)))
    for name, (kind, text, more) in declared.items():
        labels = ("namespace", *more)
        if kind == "histogram":
            histogram = HistogramMetricFamily(name, text, labels=labels)
            for values, counts in sums[name].items():
                bounds = (*map(str, BOUNDS), "+Inf")
                histogram.add_metric(values, [*zip(bounds, accumulate(counts), strict=True)], None)
            yield histogram
        else:
            family = (GaugeMetricFamily if kind == "gauge" else CounterMetricFamily)(name, text, labels=labels)
            for values, (number,) in sums[name].items():
                family.add_metric(values, number)
            yield family


# -- of a store -------------------------------------------------------------------------------------------------------


def _read_store(namespace: str, snapshot: Snapshot | None) -> Iterator[Sample]:
    if snapshot is None:
        yield "idemgate_up", (namespace,), (0,)
        yield "idemgate_findings", (namespace, "store", "critical", "", ""), (1,)
        return
    yield "idemgate_up", (namespace,), (1,)
    yield "idemgate_unreadable_entries", (namespace,), (snapshot.unreadable,)
    for finding in findings(snapshot):
        about = ("", one_line(finding.of)) if finding.of_scope else (one_line(finding.of), "")
        yield "idemgate_findings", (namespace, finding.kind, finding.severity, *about), (1,)
    for topic in snapshot.topics:
        for name, labels, number in _read_topic(snapshot, topic):
            yield name, (namespace, topic.name, *labels), (number,)
    yield "idemgate_worker_places", (namespace, "busy"), (sum(one.busy for one in snapshot.processes),)
    yield "idemgate_worker_places", (namespace, "free"), (sum(one.places - one.busy for one in snapshot.processes),)
    for one in snapshot.processes:
        yield "idemgate_processes", (namespace, one_line(one.role), one_line(one.version)), (1,)


def _read_topic(snapshot: Snapshot, topic: TopicSeen) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """Yield the metrics of a topic with their labels beside its name."""
    stats = topic.stats
    for state in ("scheduled", "ready", "waiting", "blocked", "in_flight"):
        yield "idemgate_topic_messages", (state,), getattr(stats, state)
    yield "idemgate_topic_dead_letters", (), stats.dead
    yield "idemgate_topic_due_oldest_seconds", (), stats.lateness.total_seconds()
    blocked = 0.0 if stats.oldest_blocked is None else _age(snapshot, stats.oldest_blocked.oldest_due)
    yield "idemgate_topic_blocked_oldest_seconds", (), blocked
    yield "idemgate_topic_paused", (), int(stats.paused is not None)
    serving = [one for one in snapshot.processes if topic.name in one.topics]
    yield "idemgate_topic_processes", (), len(serving)
    ages = [_age(snapshot, work.since) for one in serving for work in one.running if work.of == topic.name]
    yield "idemgate_handler_running_oldest_seconds", (), max(ages, default=0.0)
    for counter, (name, *labels) in TOPIC_COUNTERS.items():
        yield name, tuple(labels), stats[counter]


def _age(snapshot: Snapshot, since: datetime) -> float:
    return max(0.0, (snapshot.taken_at - since).total_seconds())


# -- of this process --------------------------------------------------------------------------------------------------


def _read_gate(gate: Gate) -> Iterator[Sample]:
    context = gate.context
    namespace, activity = context.namespace, context.activity
    for event, n in context.counters.snapshot().items():
        yield "idemgate_process_events_total", (namespace, event), (n,)
    for runner in context.runners.now():
        busy, places = runner.places()
        yield "idemgate_process_places", (namespace, "busy"), (busy,)
        yield "idemgate_process_places", (namespace, "free"), (places - busy,)
    for topic, times in activity.topics.copy().items():
        yield "idemgate_process_lateness_seconds", (namespace, topic), tuple(times.lateness.counts)
        yield "idemgate_process_handling_seconds", (namespace, topic), tuple(times.handling.counts)
    yield "idemgate_process_store_call_seconds", (namespace,), tuple(activity.calls.counts)
