"""A snapshot for the page, as values of JSON: findings, a row for each topic and each process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from idemgate.audit.findings import Finding, finding_as_facts
from idemgate.audit.running import findings, group_by_topic
from idemgate.audit.snapshot import VERSION, Snapshot, TopicSeen
from idemgate.core.activity import BOUNDS
from idemgate.operate.arguments import read_command
from idemgate.operate.topics import describe_condition
from idemgate.presence.report import Process

__all__ = ["overview"]


def overview(snapshot: Snapshot) -> dict[str, Any]:
    """Return a snapshot for the page. It holds no keys but those of findings.

    `taken_at` is the only fact that changes if nothing else does.
    """
    serving = group_by_topic(snapshot.processes)
    return {
        "version": VERSION,
        "namespace": snapshot.namespace,
        "taken_at": snapshot.taken_at.isoformat(),
        "findings": [_finding(one) for one in findings(snapshot)],
        "topics": [_topic(one, serving[one.name]) for one in snapshot.topics],
        "processes": [_process(one) for one in snapshot.processes],
        "servers_judged": any(seen.info for seen in snapshot.servers.values()),
        "unreadable": snapshot.unreadable,
    }


def _finding(finding: Finding) -> dict[str, Any]:
    """Return a finding, and the verb that mends it: its title and its arguments, or None."""
    command = read_command(finding.mend)
    verb = None if command is None else {"title": command[0].title, "arguments": command[1]}
    return finding_as_facts(finding) | {"verb": verb}


def _topic(topic: TopicSeen, serving: Sequence[Process]) -> dict[str, Any]:
    stats = topic.stats
    times = [one.last_minute[topic.name] for one in serving if topic.name in one.last_minute]
    due = stats.ready + stats.waiting + stats.blocked
    return {
        "topic": topic.name, "slots": topic.slots, "state": _state(topic, due, serving),
        "paused": stats.paused and {
            "since": stats.paused.since.isoformat(), "by": stats.paused.by, "reason": stats.paused.reason,
        },
        "due": due, "ready": stats.ready, "waiting": stats.waiting, "blocked": stats.blocked,
        "scheduled": stats.scheduled, "in_flight": stats.in_flight, "dead": stats.dead,
        "oldest_due": stats.oldest_due and stats.oldest_due.isoformat(),
        "concurrency": topic.concurrency, "rate": topic.rate,
        "accepted": stats.counters.get("accepted", 0),
        "ended": sum(stats.counters.get(name, 0) for name in _ENDS),
        "busy": sum(one.busy for one in serving), "places": sum(one.places for one in serving),
        "versions": dict(Counter(one.version for one in serving)),
        "handling": _quantiles([one.handling for one in times]),
        "lateness": _quantiles([one.lateness for one in times]),
    }  # fmt: skip


_ENDS = ("acked_triggers", "cancelled_triggers", "forwarded_triggers", "buried_triggers")
"""The counters of triggers that left the pending messages, and the running ones."""


def _state(topic: TopicSeen, due: int, serving: Sequence[Process]) -> str:
    """Return in a few words what a topic does."""
    stats = topic.stats
    if condition := describe_condition(topic.changing_to, stats.paused):
        return condition
    if due and not serving and not stats.in_flight:
        return "no process takes"
    if topic.concurrency is not None and stats.in_flight >= topic.concurrency:
        return f"at its limit: {stats.in_flight} of {topic.concurrency}"
    if stats.in_flight:
        return "working"
    return "waiting" if due else "scheduled" if stats.scheduled else "idle"


def _quantiles(histograms: Sequence[Sequence[int]]) -> dict[str, float | None] | None:
    """Return the bounds below which half and 99 % of the durations are, in seconds; None above the largest bound."""
    total = [sum(counts) for counts in zip(*histograms, strict=True)]
    n = sum(total)
    return {"p50": _bound(total, n * 0.5), "p99": _bound(total, n * 0.99)} if n else None


def _bound(counts: Sequence[int], rank: float) -> float | None:
    below = 0
    for bound, count in zip(BOUNDS, counts, strict=False):
        below += count
        if below >= rank:
            return bound
    return None


def _process(one: Process) -> dict[str, Any]:
    return {
        "process": one.name, "id": one.id, "role": one.role, "program": one.program, "version": one.version,
        "started_at": one.started_at.isoformat(), "busy": one.busy, "places": one.places, "topics": list(one.topics),
        "scopes": list(one.scopes), "running": len(one.running), "failures": len(one.failures),
    }  # fmt: skip
