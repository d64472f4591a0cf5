"""What was aimed at, and whether it was reached."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks import results
from benchmarks.report.figures import Rows, best, count, cpu, cpu_ratio, middle, ratios, rows_of, table
from benchmarks.report.sections import name_of

__all__ = ["PYTHON", "reasons", "targets"]

PYTHON = ("bullmq_python", "docket", "arq", "saq", "dramatiq", "rq", "celery", "huey")
GUARD, TOPIC = "idemgate_guard", "idemgate_scheduler"
REASONS = Path(__file__).with_name("reasons.md")


class Target(NamedTuple):
    """`most`: the figure may be at most this, else at least. `cpu`: the same ratio, by what both sides spent. `why`:
    a word of `reasons.md`, which says what stands in the way of those that are not reached."""

    what: str
    aim: float
    figure: float | None
    unit: str = "x"
    most: bool = False
    cpu: float | None = None
    why: str = ""

    @property
    def missed(self) -> bool:
        return self.figure is not None and (self.figure > self.aim if self.most else self.figure < self.aim)

    def cells(self) -> list[str]:
        said = "not measured" if self.figure is None else "**no**" if self.missed else "yes"
        figure = "-" if self.figure is None else f"{_digits(self.figure)}{self.unit}"
        spent = "" if self.cpu is None else f"{_digits(self.cpu)}x"
        return [self.what, f"{'<=' if self.most else '>='} {_digits(self.aim)}{self.unit}", figure, said, spent]


def targets() -> str:
    """The table."""
    return table(["", "aim", "measured", "reached", "by CPU"], (one.cells() for one in _all()))


def reasons() -> str:
    """What stands in the way of what was missed: the sections of `reasons.md` that it names."""
    missed = [one for one in _all() if one.missed]
    if not missed:
        return "Everything was reached."
    sections = re.findall(r"^# (\w+)\n\n(.*?)(?=\n*(?:^# |\Z))", REASONS.read_text(), re.MULTILINE | re.DOTALL)
    said = [text for name, text in sections if any(one.why == name for one in missed)]
    return "\n\n".join(["What stands in the way of the rest:", *said])


def _all() -> list[Target]:
    return [
        *_guards(rows_of("guard")), *_scheduling(rows_of("scheduler")), *_timing(), *_merging(rows_of("merging")),
        *_growth(), *_rest(),
    ]  # fmt: skip


def _digits(number: float) -> str:
    return count(number) if number >= 20 else f"{number:.2f}".rstrip("0").rstrip(".")


def _against(what: str, aim: float, rows: Rows, step: str, ours: str, theirs: str, why: str = "") -> Target:
    figures = ratios(rows, step, ours, theirs)
    return Target(what, aim, median(figures) if figures else None, cpu=cpu_ratio(rows, step, ours, theirs), why=why)


def _guards(rows: Rows) -> Iterator[Target]:
    against = [
        ("`SET NX` + `SET` by hand", "by_hand", "first", 1.8), ("`SET NX` + `GET` by hand", "by_hand", "replay", 3.5),
        ("Powertools", "powertools", "first", 3), ("Powertools", "powertools", "replay", 8),
        ("idemkit", "idemkit", "first", 3), ("idemkit", "idemkit", "replay", 5),
        ("idempotency-kit, one task", "idempotency_kit", "first_async_1", 5),
        ("idempotency-kit, one task", "idempotency_kit", "replay_async_1", 5),
        ("redis-py by hand, 200 tasks", "by_hand", "first_async_200", 6),
        ("redis-py by hand, 200 tasks", "by_hand", "replay_async_200", 8),
    ]  # fmt: skip
    for name, who, step, aim in against:
        word, why = step.split("_")[0], "many_tasks" if step.endswith("_200") else "one_caller"
        yield _against(f"guard, {word}: against {name}", aim, rows, step, GUARD, who, why)
    many = "`first_many` of 200 against a pipeline of 200 `SET NX`"
    yield _against(many, 1.5, rows, "first_many", GUARD, "by_hand", "first_many")
    known = middle(rows, GUARD, "known", "client_us")
    yield Target("a key known to be done (`remember`), CPU", 3, known, " us", most=True, why="known")


def _scheduling(rows: Rows) -> Iterator[Target]:
    ours, bare = cpu(rows, TOPIC, "many"), cpu(rows, "bare", "many")
    share = None if ours is None or bare is None else ours / bare
    yield Target("`trigger_many`: CPU against a bare `ZADD NX` + `HSET`", 1.5, share, most=True, why="triggers")
    yield Target("`trigger_many`", 50_000, middle(rows, TOPIC, "many"), "/s", why="triggers")
    yield Target("worker: take, a sync no-op, settle", 50_000, middle(rows, TOPIC, "many_sync"), "/s", why="worker")
    python = best(rows, "drain", PYTHON)
    yield _against(f"drain: against the best in Python ({name_of(python)})", 20, rows, "drain", TOPIC, python, "worker")
    yield _against("drain: against BullMQ on Node", 6, rows, "drain", TOPIC, "bullmq_node", "worker")
    yield Target("sent and consumed at the same time", 50_000, middle(rows, TOPIC, "both"), "/s", why="both")


def _timing() -> Iterator[Target]:
    rows = rows_of("lateness")
    for figure, aim in (("p50", 2), ("p99", 5)):
        ours = middle(rows, TOPIC, "steady", figure)
        yield Target(f"after due at 200/s, {figure}", aim, ours, " ms", most=True, why="lateness")


def _merging(rows: Rows) -> Iterator[Target]:
    ours = rows.get((TOPIC, "keep_last"), {})
    share = max(a / b for a, b in zip(ours["left"], ours["ops"], strict=True)) if "left" in ours else None
    yield Target(
        "100,000 triggers of 1,000 keys: deliveries of 1,000", 1_000, None if share is None else share * 1e5, most=True,
        unit="",
    )  # fmt: skip
    yield _against("triggers that merge: against BullMQ on Node", 3, rows, "keep_last", TOPIC, "bullmq_node", "merging")
    python = best(rows, "keep_first", PYTHON)
    yield _against(
        f"triggers that merge: against the best in Python ({name_of(python)})", 15, rows, "keep_first", TOPIC, python,
        "merging",
    )  # fmt: skip


def _growth() -> Iterator[Target]:
    sizes = (results.load("backlog") or {"sizes": []})["sizes"]
    few, many = (next((one for one in sizes if one["size"] == size), None) for size in (10_000, 5_000_000))
    for name in ("trigger", "trigger, 100 a call", "take and ack", "take and ack, 100 a call"):
        share = None
        if few is not None and many is not None:
            share = many["microseconds"][name]["cpu"] / few["microseconds"][name]["cpu"]
        yield Target(f"5,000,000 pending against 10,000: {name}", 2, share, most=True, why="backlog")


def _rest() -> Iterator[Target]:
    memory = rows_of("memory")
    for who, aim in (
        ("with a 30-byte result", 200), ("no result", 130), ("compact", 24), ("compact, 16-byte result", 48),
    ):  # fmt: skip
        figure = middle(memory, f"idemgate, {who}", "memory", "bytes")
        yield Target(f"bytes per remembered key: {who}", aim, figure, "", most=True, why="memory")
    blocks = [median(row["ms"]) for row in rows_of("blocks").values()]
    yield Target(
        "longest block of the server by a script", 3, max(blocks, default=None), " ms", most=True, why="blocks"
    )
    imports = rows_of("imports")
    ours, theirs = (middle(imports, name, "import", "ms") for name in ("idemgate", "redis"))
    yield Target("`import idemgate`", 120, ours, " ms", most=True, why="imports")
    share = None if ours is None or theirs is None else ours / theirs
    yield Target("`import idemgate` against `import redis`", 1.5, share, most=True, why="imports")
