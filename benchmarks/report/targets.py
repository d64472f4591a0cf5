"""The aims, and whether they were reached."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.report.figures import Rows, best, count, cpu, cpu_ratio, middle, ratios, rows_of, table
from benchmarks.report.sections import name_of

__all__ = ["PYTHON", "reached", "reasons", "targets"]

PYTHON = ("bullmq_python", "docket", "arq", "saq", "dramatiq", "rq", "celery", "huey")
PEERS = ("bullmq_node", *PYTHON)
GUARD, TOPIC, LIMIT, BARE = "idemgate_guard", "idemgate_scheduler", "limit", "bare"
REASONS = Path(__file__).with_name("reasons.md")


class Target(NamedTuple):
    """An aim and its figures.

    `most`: the figure may be at most this, else at least. `limit`: the figure of the minimal program with as many round
    trips, in the same rounds. `cpu`: the same ratio by the CPU time of both sides. `why`: the section of `reasons.md`
    that is printed if the aim was missed. `bounds`: False if the limit is only a comparison.
    """

    what: str
    aim: float
    figure: float | None
    unit: str = "x"
    most: bool = False
    cpu: float | None = None
    limit: float | None = None
    why: str = ""
    bounds: bool = True

    @property
    def missed(self) -> bool:
        return self._misses(self.figure)

    def _misses(self, figure: float | None) -> bool:
        return figure is not None and (figure > self.aim if self.most else figure < self.aim)

    def part_of_aim(self, figure: float) -> float:
        return self.aim / figure if self.most else figure / self.aim

    def cells(self) -> list[str]:
        aim = f"{'<=' if self.most else '>='} {_digits(self.aim)}{self.unit}"
        limit = "" if self.limit is None else f"{_digits(self.limit)}{self.unit}"
        spent = "" if self.cpu is None else f"{_digits(self.cpu)}x"
        figure = "-" if self.figure is None else f"{_digits(self.figure)}{self.unit}"
        return [self.what, aim, figure, self._reached(), limit, spent]

    def _reached(self) -> str:
        if self.figure is None:
            return "not measured"
        if not self.missed:
            return "yes"
        return "**no**; beyond the limit" if self.bounds and self._misses(self.limit) else "**no**"


def targets() -> str:
    """The table."""
    return table(["", "aim", "measured", "reached", "the limit", "by CPU"], (one.cells() for one in _all()))


def reached() -> list[tuple[str, float, float | None]]:
    """Return names, measured figures and limits. 1 is the aim, and more is better."""
    return [
        (one.what.replace("`", ""), one.part_of_aim(one.figure), one.limit and one.part_of_aim(one.limit))
        for one in _all()
        if one.figure
    ]


def reasons() -> str:
    """Return the sections of `reasons.md` of the missed aims."""
    missed = [one for one in _all() if one.missed]
    if not missed:
        return "All aims were reached."
    sections = re.findall(r"^# (\w+)\n\n(.*?)(?=\n*(?:^# |\Z))", REASONS.read_text(), re.MULTILINE | re.DOTALL)
    said = [text for name, text in sections if any(one.why == name for one in missed)]
    return "\n\n".join(["Why the others were missed:", *said])


def _all() -> list[Target]:
    return [
        *_guards(rows_of("guard")), *_scheduling(rows_of("scheduler")), *_timing(), *_merging(rows_of("merging")),
        *_growth(), *_rest(),
    ]  # fmt: skip


def _digits(number: float) -> str:
    return count(number) if number >= 20 else f"{number:.2f}".rstrip("0").rstrip(".")


def _against(
    what: str, aim: float, rows: Rows, step: str, ours: str, theirs: str, why: str = "", limit: str = ""
) -> Target:
    """Return the aim of a ratio against a peer. `limit` names the minimal program."""
    figure, most = (_median(ratios(rows, step, who, theirs)) for who in (ours, limit))
    return Target(what, aim, figure, cpu=cpu_ratio(rows, step, ours, theirs), limit=most, why=why)


def _median(figures: list[float]) -> float | None:
    return median(figures) if figures else None


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
        yield _against(f"guard, {word}: against {name}", aim, rows, step, GUARD, who, why, LIMIT)
    many = "`first_many` of 200 against a pipeline of 200 `SET NX`"
    yield _against(many, 1.5, rows, "first_many", GUARD, "by_hand", "first_many")
    for step, calls in (("first", "one caller"), ("first_async_200", "200 tasks")):
        ours = _share(cpu(rows, "idemgate_run", step), cpu(rows, GUARD, step))
        yield Target(f"`guard.run`, first call, {calls}: CPU against the decorator", 1.03, ours, most=True)
    known = middle(rows, GUARD, "known", "client_us")
    yield Target("a key known to be done (`cache_size`), CPU", 3, known, " us", most=True, why="known")


def _scheduling(rows: Rows) -> Iterator[Target]:
    what = "`trigger_many`: CPU against a bare `ZADD NX` + `HSET`"
    ours, floor = (_share(cpu(rows, who, step), cpu(rows, BARE, "many")) for who, step in _SENT)
    yield Target(what, 1.5, ours, most=True, limit=floor, why="triggers")
    for what, step, limit, why in (
        ("`trigger_many`", "many", "many", "triggers"),
        ("worker: take, a sync no-op, settle", "many_sync", "many_take", "worker"),
    ):
        figure, most = middle(rows, TOPIC, step), middle(rows, BARE, limit)
        yield Target(what, 50_000, figure, "/s", limit=most, why=why)
    fastest = best(rows, "enqueue", PEERS)
    what = f"one trigger at a time: against the fastest peer ({name_of(fastest)})"
    yield _against(what, 1, rows, "enqueue", TOPIC, fastest, "enqueue", BARE)
    python = best(rows, "drain", PYTHON)
    peers = [(f"the best in Python ({name_of(python)})", python, 20), ("BullMQ on Node", "bullmq_node", 6)]
    for name, who, aim in peers:
        yield _against(f"drain: against {name}", aim, rows, "drain", TOPIC, who, "worker", BARE)
    figure, most = (middle(rows, who, "both") for who in (TOPIC, BARE))
    yield Target("sent and consumed at the same time", 70_000, figure, "/s", limit=most, why="both")


_SENT = [(TOPIC, "many"), (BARE, "many_floor")]


def _share(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None else ours / theirs


def _timing() -> Iterator[Target]:
    rows = rows_of("lateness")
    for figure, aim in (("p50", 2), ("p99", 5)):
        ours = middle(rows, TOPIC, "steady", figure)
        yield Target(f"after due at 200/s, {figure}", aim, ours, " ms", most=True, why="lateness")


def _merging(rows: Rows) -> Iterator[Target]:
    ours = rows.get((TOPIC, "keep_last_one"), {})
    share = max(a / b for a, b in zip(ours["left"], ours["ops"], strict=True)) if "left" in ours else None
    yield Target(
        "100,000 triggers of 1,000 keys: deliveries of 1,000", 1_000, None if share is None else share * 1e5, most=True,
        unit="",
    )  # fmt: skip
    for ending, how in (("_one", ""), ("_several", ", several at once")):
        last, first = f"keep_last{ending}", f"keep_first{ending}"
        what, python = f"triggers that merge{how}: against", best(rows, first, PYTHON)
        yield _against(f"{what} BullMQ on Node", 3, rows, last, TOPIC, "bullmq_node", "merging")
        yield _against(f"{what} BullMQ on Node, keeping the first", 3, rows, first, TOPIC, "bullmq_node", "merging")
        yield _against(f"{what} the best in Python ({name_of(python)})", 15, rows, first, TOPIC, python, "merging")


def _growth() -> Iterator[Target]:
    rows = rows_of("backlog")
    for name in ("trigger", "trigger, 100 a call", "take and ack", "take and ack, 100 a call"):
        ours, bare = (
            _share(*(middle(rows, size, step, "server_us") for size in ("5000000", "10000")))
            for step in (name, f"bare: {name}")
        )
        what = f"5,000,000 pending against 10,000: {name}"
        yield Target(what, 2, ours, most=True, limit=bare, why="backlog", bounds=False)


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
    yield Target("`import idemgate` against `import redis`", 1.5, _share(ours, theirs), most=True, why="imports")
