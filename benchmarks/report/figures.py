"""Figures out of the results: medians, ratios of one run, and how they are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from benchmarks import results
from benchmarks.measuring import Row, spread

__all__ = [
    "Rows",
    "count",
    "cpu",
    "cpu_ratio",
    "middle",
    "per_core",
    "ranged",
    "ratio",
    "ratios",
    "rows_of",
    "shown",
    "table",
]

Rows = dict[tuple[str, str], Row]
"""By (who, step)."""


def rows_of(part: str) -> Rows:
    """The rows of a part; empty if it was not run."""
    found = results.load(part)
    return {} if found is None else {(row["who"], row["step"]): row for row in found["rows"]}


def middle(rows: Rows, who: str, step: str, figure: str = "rate") -> float | None:
    """The median of one figure, None if it was not measured."""
    figures = rows.get((who, step), {}).get(figure)
    return median(figures) if figures else None


def ratios(rows: Rows, step: str, ours: str, theirs: str, our_step: str = "", figure: str = "rate") -> list[float]:
    """Return the ratio of a figure in each repetition: both were measured in turns."""
    mine = rows.get((ours, our_step or step), {}).get(figure, [])
    other = rows.get((theirs, step), {}).get(figure, [])
    return [a / b for a, b in zip(mine, other, strict=False)]


def cpu(rows: Rows, who: str, step: str) -> float | None:
    """Microseconds of both sides together."""
    client, server = middle(rows, who, step, "client_us"), middle(rows, who, step, "server_us")
    return None if client is None or server is None else client + server


def cpu_ratio(rows: Rows, step: str, ours: str, theirs: str) -> float | None:
    """How many times less CPU, of both sides together."""
    mine, other = cpu(rows, ours, step), cpu(rows, theirs, step)
    return None if mine is None or other is None else other / mine


def per_core(rows: Rows, who: str, step: str) -> float | None:
    """Operations a second that one core of the server can serve."""
    spent = middle(rows, who, step, "server_us")
    return 1e6 / spent if spent else None


def count(number: float | None, digits: int = 0) -> str:
    """12,345; small numbers keep a digit, what was not measured is a dash."""
    if number is None:
        return "-"
    return f"{number:,.{digits}f}" if digits or abs(number) >= 20 else f"{number:,.1f}"


def ranged(figures: Sequence[float] | None, digits: int = 0) -> str:
    """Median (least..greatest)."""
    if not figures:
        return "-"
    mid, least, greatest = spread(list(figures))
    return f"{count(mid, digits)} ({count(least, digits)}..{count(greatest, digits)})"


def ratio(figures: Sequence[float]) -> str:
    return "-" if not figures else "{:.1f}x ({:.1f}..{:.1f})".format(*spread(list(figures)))


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in rows)


def shown(rows: Sequence[Row]) -> str:
    """Return the medians of the figures that the rows of a part have."""
    figures = [name for name in _SHOWN if any(row.get(name) for row in rows)]
    lines = [[row["who"], row["step"], *(_median(row.get(name)) for name in figures)] for row in rows]
    return table(["who", "step", *figures], lines)


_SHOWN = (
    "rate", "client_us", "server_us", "bytes", "p50", "p99", "ms",
    "all", "network", "commands", "plumbing", "packing", "lua", "allocator", "libc", "data_misses", "last_misses",
)  # fmt: skip


def _median(figures: Sequence[float] | None) -> str:
    return count(median(figures)) if figures else "-"
