"""The pictures, as SVG beside the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.ticker import NullFormatter

from benchmarks.report.figures import Rows, count, middle, per_core, rows_of
from benchmarks.report.sections import name_of, servers_of
from benchmarks.report.summary import GUARD, TOPIC

__all__ = ["draw"]

OURS, THEIRS, LIMIT = "#c0392b", "#7f8c8d", "#d5dbdb"
Bars = list[tuple[str, float]]


def draw(folder: Path) -> list[str]:
    """Writes them and returns their names, those for which there are figures. Deletes what is no longer drawn."""
    mpl.rcParams["svg.fonttype"] = "none"  # text stays text
    mpl.rcParams["svg.hashsalt"] = "idemgate"  # the same figures give the same file
    folder.mkdir(parents=True, exist_ok=True)
    guard, scheduler, late, merged = (rows_of(part) for part in ("guard", "scheduler", "lateness", "merging"))
    many = {"first": "first_async_200", "replay": "replay_async_200"}
    pictures: dict[str, Callable[[], Any]] = {
        "cores": lambda: _bars("per second that one core of the server can serve", _cores()),
        "guard-sync": lambda: _bars("calls per second, one caller", _by(guard, {"first": "first", "replay": "replay"})),
        "guard-async": lambda: _bars("calls per second, 200 tasks", _by(guard, many)),
        "scheduler": lambda: _bars("messages per second, one process", _by(scheduler, _SCHEDULED)),
        "lateness": lambda: _bars("ms after due at 200 messages per second", _late(late), least=True, log=True),
        "merging": lambda: _bars("triggers per second that merge", _by(merged, _MERGED)),
        "growth": _growth,
        "memory": lambda: _bars("", {"bytes of the server's memory per key": _memory()}, least=True),
    }
    for file in folder.glob("*.svg"):
        if file.stem not in pictures:
            file.unlink()
    return [name for name, picture in pictures.items() if _saved(folder / f"{name}.svg", picture())]


_SCHEDULED = {"enqueue": "enqueue", "drain": "drain"}
_MERGED = {
    "keeping the last payload, one after another": "keep_last_one",
    "keeping the first": "keep_first_one",
    "several at once": "keep_first_several",
}


def _saved(file: Path, figure: Any) -> bool:
    if figure is None:
        return False
    figure.savefig(file, metadata={"Date": None})
    plt.close(figure)
    return True


def _by(rows: Rows, steps: Mapping[str, str]) -> dict[str, Bars]:
    """A group of bars for each step, by its label."""
    return {label: _group(rows, step, "rate") for label, step in steps.items()}


def _group(rows: Rows, step: str, figure: str) -> Bars:
    return _measured(rows, lambda who: middle(rows, who, step, figure))


def _measured(rows: Rows, figure: Callable[[str], float | None]) -> Bars:
    bars = [(name_of(who).strip("*"), figure(who)) for who in dict.fromkeys(who for who, _ in rows if who != "bare")]
    return [(who, one) for who, one in bars if one is not None]


def _cores() -> dict[str, Bars]:
    """Of 32 threads, the column with most of the peers, and of the first columns of a topic."""
    shown = ((label, rows_of(part), step) for label, part, step in (*GUARD[2:4], *TOPIC[:2]))
    return {label: _measured(rows, partial(per_core, rows, step=step)) for label, rows, step in shown}


def _late(rows: Rows) -> dict[str, Bars]:
    return {figure: _group(rows, "steady", figure) for figure in ("p50", "p99")}


def _memory() -> Bars:
    rows = rows_of("memory")
    return _group(rows, servers_of(rows)[0], "bytes") if rows else []


def _bars(title: str, groups: dict[str, Bars], least: bool = False, log: bool = False) -> Any:
    """`least`: the least is best. `log`: they differ by powers of ten."""
    if not all(groups.values()):
        return None
    longest = max(len(bars) for bars in groups.values())
    figure, axes = plt.subplots(1, len(groups), figsize=(9, 0.8 + 0.32 * longest), layout="constrained", squeeze=False)
    for one, (label, bars) in zip(axes[0], groups.items(), strict=True):
        whos, values = zip(*sorted(bars, key=lambda bar: bar[1], reverse=not least), strict=True)
        drawn = one.barh(whos, values, color=[_color(who) for who in whos])
        one.bar_label(drawn, labels=[count(value) for value in values], padding=3)
        one.set(title=label, xscale="log" if log else "linear")
        one.xaxis.set_minor_formatter(NullFormatter())
        one.xaxis.set_visible(log)  # each bar says its figure
        one.invert_yaxis()
        one.margins(x=0.25)
        one.spines[["top", "right"]].set_visible(False)
        one.spines["bottom"].set_visible(log)
    figure.suptitle(title)
    return figure


def _color(who: str) -> str:
    limit = who.startswith(("limit", "its floor", "a bare"))
    return LIMIT if limit else OURS if who.startswith("idemgate") else THEIRS


def _growth() -> Any:
    rows = rows_of("backlog")
    sizes = list(dict.fromkeys(int(size) for size, _ in rows))
    if len(sizes) < 2:
        return None
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained", sharex=True)
    for one, step in zip(axes, ("trigger, 100 a call", "take and ack, 100 a call"), strict=True):
        for before, color in (("", OURS), ("bare: ", THEIRS)):
            costs = [middle(rows, str(size), before + step, "server_us") for size in sizes]
            one.plot(sizes, costs, marker="o", color=color, label="bare commands" if before else "idemgate")
        one.set(title=step, xscale="log", xlabel="messages pending", ylim=(0, None))
        one.spines[["top", "right"]].set_visible(False)
        one.legend()
    axes[0].set_ylabel("us of the server, per message")
    return figure
