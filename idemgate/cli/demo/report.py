"""Texts of the demo: at its start, after an interruption, and at its end."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from datetime import UTC, datetime

from idemgate.cli.demo.events import Plan
from idemgate.cli.demo.promises import Promise
from idemgate.cli.demo.records import Records
from idemgate.cli.demo.screen import rows, took, wrap_words

__all__ = ["as_json", "as_text", "interruption_text", "opening"]


def opening(plan: Plan, subscribers: int, window: float) -> str:
    """Return the text for the start."""
    told = [f"{plan.events:,} events of {plan.paths:,} paths, {subscribers} subscribers, a window of {took(window)}"]
    if plan.years:
        first, last = (datetime.fromtimestamp(ts, UTC) for ts in plan.years)
        told.append(f"{first:%Y-%m-%d} to {last:%Y-%m-%d}: {took(plan.stream)} with long pauses cut")
    if math.isinf(plan.speed):
        told.append("as fast as the subscribers follow")
    else:
        speed = f"{plan.speed:,.0f}" if plan.speed >= 100 else f"{plan.speed:.3g}"
        takes = f"takes {took(plan.duration)}"
        told.append(f"{takes} at {speed} times the speed" if speed != "1" else takes)
    return "; ".join(told)


def interruption_text(records: Records, plan: Plan, elapsed: float) -> str:
    numbers = records.numbers()
    return (
        f"Interrupted after {elapsed:.1f} s: published {numbers['published']:,} of {len(plan.publications):,}, "
        f"handled {numbers['handled']:,}, delivered {numbers['deliveries']:,}. "
        f"Everything is ended; the promises were not judged."
    )


def as_json(records: Records, promises: Sequence[Promise], plan: Plan, elapsed: float) -> str:
    """One object; the durations' units are in their names."""
    facts = {
        "events": plan.events,
        "subscribers": records.subscribers,
        "elapsed_s": round(elapsed, 2),
        "kept": all(promise.is_kept for promise in promises),
        "promises": [{"promise": one.text, "kept": one.is_kept, "broken": one.broken} for one in promises],
    }
    return json.dumps(records.numbers() | facts, indent=2)


def as_text(records: Records, promises: Sequence[Promise], elapsed: float) -> str:
    numbers = rows(records.numbers() | {"elapsed_s": elapsed})
    lines = [f"  {label:<20}{text:>11}  {meaning}" for label, text, meaning in numbers]
    lines += ["", *_crash_text(records)]
    for promise in promises:
        lines.append(f"  {'kept  ' if promise.is_kept else 'BROKEN'}  {promise.text}")
        lines += [f"          {words}" for words in promise.broken]
    return wrap_words("\n".join(["", *lines]), " " * 10)


def _crash_text(records: Records) -> list[str]:
    """Return what the killed processes explain: reports that are missing, and deliveries that are late."""
    lines: list[str] = []
    if records.killed:
        lines += [
            "The killed subscriber could not report the last events that it handled.",
            "Each event counts as handled if it is in a delivery.",
        ]
    if records.worker_killed:
        lines.append("What the killed worker had not acknowledged was done again, 2 s later.")
    return [*lines, ""] if lines else []
