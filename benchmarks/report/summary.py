"""The first section of the page: idemgate beside each peer, and beside the barest program that does the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median

from benchmarks.report.figures import Rows, count, cpu_ratio, middle, per_core, ratios, rows_of, table
from benchmarks.report.sections import name_of, servers_of

__all__ = ["bare", "bytes_over", "cores", "growth", "times"]

Column = tuple[str, str, str]
"""Head, part of the benchmark, step."""
GUARD: Sequence[Column] = [
    ("first call", "guard", "first"), ("replay", "guard", "replay"),
    ("first, 32 threads", "threads", "first, 32, pinned"), ("replay, 32 threads", "threads", "replay, 32, pinned"),
    ("first, 200 tasks", "guard", "first_async_200"), ("replay, 200 tasks", "guard", "replay_async_200"),
]  # fmt: skip
TOPIC: Sequence[Column] = [
    ("one trigger", "scheduler", "enqueue"), ("take and settle", "scheduler", "drain"),
    ("merge, the last", "merging", "keep_last_one"), ("merge, the first", "merging", "keep_first_one"),
    ("the first, several at once", "merging", "keep_first_several"),
]  # fmt: skip
FACES = {"idemgate_guard": GUARD, "idemgate_scheduler": TOPIC}
Cell = Callable[[str, Rows, str, str], str]
"""Of idemgate's contestant, the rows of a part, another contestant, a step."""
OWN = {"idemgate_run", "limit", "bare"}
"""Neither idemgate as most use it, nor a peer."""
BARE = [
    ("guard, first call", "`SET NX`, `SET` by hand", "guard", "first", "first"),
    ("guard, replay", "`SET NX`, `GET` by hand", "guard", "replay", "replay"),
    ("guard, first call, 200 tasks", "the same by hand", "guard", "first_async_200", "first_async_200"),
    ("guard, replay, 200 tasks", "the same by hand", "guard", "replay_async_200", "replay_async_200"),
    ("`first_many` of 200", "a pipeline of 200 `SET NX`", "guard", "first_many", "first_many"),
    ("one trigger", "`ZADD NX`, `HSET`", "scheduler", "enqueue", "enqueue"),
    ("`trigger_many`, 500 a call", "`ZADD NX`, `HSET` of 500", "scheduler", "many", "many"),
    ("worker, sync handler", "`ZRANGE`, `HMGET`, `ZREM`, `HDEL` of 100", "scheduler", "many_sync", "many_take"),
    ("sent and consumed at once", "both of these at once", "scheduler", "both", "both"),
]
FLOORS = {
    "idemgate, with a 30-byte result": "its floor: a bare SET PX of such a key and value",
    "idemgate, no result": "its floor, too",
    "idemgate, a pending message": "its floor: a bare ZADD and HSET",
    "idemgate, a message in flight": "its floor: a bare ZADD and HSET",
}


def times() -> str:
    """How many times as fast as each peer, and how many times less CPU."""

    def cell(ours: str, rows: Rows, who: str, step: str) -> str:
        rates, spent = ratios(rows, step, ours, who), cpu_ratio(rows, step, ours, who)
        return f"{median(rates):.1f}x, {spent:.1f}x" if rates and spent else "-"

    return _grids("idemgate is, against", cell, OWN | {*FACES})


def cores() -> str:
    """Calls or messages a second that one core of the server can serve."""
    return _grids("per s and core", lambda _, rows, who, step: count(per_core(rows, who, step)), OWN)


def _grids(head: str, cell: Cell, without: set[str]) -> str:
    """Return a table of guards and one of topics, with a line for each contestant that was measured."""
    return "\n\n".join(_grid(head, cell, without, ours, columns) for ours, columns in FACES.items())


def _grid(head: str, cell: Cell, without: set[str], ours: str, columns: Sequence[Column]) -> str:
    parts = [(rows_of(part), step) for _, part, step in columns]
    whos = dict.fromkeys(who for rows, step in parts for who, done in rows if done == step and who not in without)
    lines = ([name_of(who), *(cell(ours, rows, who, step) for rows, step in parts)] for who in whos)
    return table([head, *(label for label, _, _ in columns)], lines)


def bare() -> str:
    """The rates of idemgate and of the barest program, and the ratio of a round."""
    lines: list[list[str]] = []
    for what, program, part, step, its_step in BARE:
        rows = rows_of(part)
        ours, other = ("idemgate_guard", "by_hand") if part == "guard" else ("idemgate_scheduler", "bare")
        found = ratios(rows, its_step, ours, other, step)
        figures = [count(middle(rows, ours, step)), count(middle(rows, other, its_step))]
        lines.append([what, program, *figures, f"{median(found):.2f}x" if found else "-"])
    return table(["", "the barest program", "idemgate, per s", "it, per s", "idemgate is"], lines)


def growth() -> str:
    """The server's cost of a message with the most pending, by that with the fewest."""
    rows = rows_of("backlog")
    sizes = sorted({int(size) for size, _ in rows})
    if not sizes:
        return "Not measured."
    head = f"cost of {sizes[-1]:,} pending by that of {sizes[0]:,}"
    steps = ("trigger", "trigger, 100 a call", "take and ack", "take and ack, 100 a call")
    lines = ([step, *(_grown(rows, sizes, before + step) for before in ("", "bare: "))] for step in steps)
    return table([head, "idemgate", "bare commands"], lines)


def _grown(rows: Rows, sizes: Sequence[int], step: str) -> str:
    few, many = (middle(rows, str(size), step, "server_us") for size in (sizes[0], sizes[-1]))
    return f"{many / few:.1f}x" if few and many else "-"


def bytes_over() -> str:
    """Bytes of a key over those of the bare commands, on each server."""
    rows = rows_of("memory")
    servers = servers_of(rows)
    lines = ([what.removeprefix("idemgate, "), *_over(rows, servers, what, floor)] for what, floor in FLOORS.items())
    return table(["bytes over the floor (all)", *servers], lines) if rows else "Not measured."


def _over(rows: Rows, servers: Iterable[str], what: str, floor: str) -> Iterable[str]:
    for server in servers:
        ours, least = (middle(rows, who, server, "bytes") for who in (what, floor))
        yield "-" if ours is None or least is None else f"{ours - least:+.0f} ({ours:.0f})"
