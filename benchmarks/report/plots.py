"""The pictures, as SVG beside the page."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.ticker import NullFormatter

from benchmarks.report.figures import Rows, count, middle, rows_of
from benchmarks.report.sections import name_of

__all__ = ["draw"]

OURS, THEIRS = "#c0392b", "#7f8c8d"
Bars = list[tuple[str, float]]


def draw(folder: Path) -> list[str]:
    """Writes them and returns their names, those for which there are figures."""
    mpl.rcParams["svg.fonttype"] = "none"  # text stays text
    mpl.rcParams["svg.hashsalt"] = "idemgate"  # the same figures give the same file
    guard, scheduler, late = rows_of("guard"), rows_of("scheduler"), rows_of("lateness")
    pictures = {
        "guard-sync": ("calls per second, one caller", _by(guard, ("first", "replay"))),
        "guard-async": ("calls per second, 200 tasks", _by(guard, ("first_async_200", "replay_async_200"))),
        "scheduler": ("messages per second, one process", _by(scheduler, ("enqueue", "drain"))),
        "lateness": ("ms after due at 200 messages per second", _by(late, ("steady",), ("p50", "p99"))),
    }
    return [name for name, (title, bars) in pictures.items() if _drawn(folder / f"{name}.svg", title, bars)]


def _by(rows: Rows, steps: tuple[str, ...], figures: tuple[str, ...] = ("rate",)) -> dict[str, Bars]:
    found: dict[str, Bars] = {}
    for step in steps:
        for figure in figures:
            whos = dict.fromkeys(who for who, _ in rows)
            bars = [(name_of(who).strip("*"), middle(rows, who, step, figure)) for who in whos]
            label = figure if len(figures) > 1 else step.split("_")[0]
            found[label] = [(who, one) for who, one in bars if one is not None and who != "bare commands"]
    return found


def _drawn(file: Path, title: str, groups: dict[str, Bars]) -> bool:
    if not all(groups.values()):
        return False
    high = "p50" not in groups  # of rates the greatest is best, of times the least, and those differ by powers of ten
    longest = max(len(bars) for bars in groups.values())
    figure, axes = plt.subplots(1, len(groups), figsize=(9, 0.8 + 0.32 * longest), layout="constrained")
    for one, (label, bars) in zip(axes, groups.items(), strict=True):
        whos, values = zip(*sorted(bars, key=lambda bar: bar[1], reverse=high), strict=True)
        drawn = one.barh(whos, values, color=[OURS if who == "idemgate" else THEIRS for who in whos])
        one.bar_label(drawn, labels=[count(value) for value in values], padding=3)
        one.set(title=label, xscale="linear" if high else "log")
        one.xaxis.set_minor_formatter(NullFormatter())
        one.invert_yaxis()
        one.margins(x=0.25)
        one.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)
    return True
