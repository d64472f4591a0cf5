"""The demo's screen: with rich a progress bar and a table, without it or without a terminal a line a second."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Self, TextIO

from idemgate.cli.demo.records import Records

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["Screen", "as_text"]

LABELS = {
    "published": ("published", "events, of which 1 in 20 twice"),
    "copies_received": ("copies received", "by all subscribers together"),
    "handled": ("handled once", "first copies, which the guard let through"),
    "duplicates_dropped": ("duplicates dropped", "further copies, which the guard stopped"),
    "triggers": ("triggers", "of the topic, one for each event"),
    "deliveries": ("deliveries", "to the worker, one a path and window"),
    "merge_ratio": ("merge ratio", "triggers in a delivery, on average"),
    "lateness_p50_ms": ("lateness p50", "ms from the due time to the handler's start"),
    "lateness_p99_ms": ("lateness p99", "ms, of 99 % of the deliveries at most"),
    "elapsed_s": ("elapsed", "seconds, with starting and ending the processes"),
}
"""Label and meaning of each number."""


def as_text(numbers: Mapping[str, float], promises: Mapping[str, list[str]], records: Records) -> str:
    """Return the final report."""
    lines = ["", *(f"  {label:<20}{value:>9}  {meaning}" for label, value, meaning in _rows(numbers)), ""]
    if any(one.killed for one in records.subscribers):
        lines.append("The killed subscriber could not report the last events that it handled.")
    if any(one.killed for one in records.workers):
        lines.append("What the killed worker had not acknowledged was done again, 2 s later.")
    lines += [""] * (lines[-1] != "")
    for promise, broken in promises.items():
        lines += [f"  {'BROKEN' if broken else 'kept  '}  {promise}", *(" " * 10 + text for text in broken)]
    return _wrap("\n".join(lines), 10)


def _rows(numbers: Mapping[str, float]) -> list[tuple[str, str, str]]:
    return [(LABELS[name][0], f"{value:,}", LABELS[name][1]) for name, value in numbers.items()]


def _wrap(text: str, indent: int) -> str:
    """Break lines of more than 80 characters between words. Continued lines are indented."""
    wrapper = textwrap.TextWrapper(80, "", " " * indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrapper.fill(line) for line in text.splitlines())


class Screen:
    """A display of the demo's progress, from entering to leaving."""

    def __init__(self, out: TextIO, records: Records) -> None:
        self._out, self._records = out, records
        self._start = self._shown = time.monotonic()
        self._live = _live(out, records)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        elif self._out.isatty() and find_spec("rich") is None:
            self.say("pip install rich: a live table instead of these lines")
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a permanent line."""
        if self._live:
            self._live.console.print(text, markup=False)
        else:
            print(_wrap(text, 8), file=self._out, flush=True)

    def tick(self, phase: str, total: int) -> None:
        """Update the numbers; it may be called often."""
        now, done = time.monotonic(), len(self._records.published)
        if self._live:
            self._live.update(self._live.task_ids[0], description=phase, completed=done, total=total)
        elif now - self._shown >= 1:
            self._shown = now
            if done:
                numbers = self._records.numbers()
                counts = f"handled {numbers['handled']:,}, dropped {numbers['duplicates_dropped']:,}"
                phase += f": {done:,} of {total:,}; {counts}, delivered {numbers['deliveries']:,}"
            self.say(f"{now - self._start:4.0f} s  {phase}")


def _live(out: TextIO, records: Records) -> Progress | None:
    """Return rich's progress bar above a table; None without rich, or where the cursor cannot be moved."""
    if not out.isatty() or find_spec("rich") is None:
        return None
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Table

    class Live(Progress):
        def get_renderables(self) -> Iterable[Any]:
            yield self.make_tasks_table(self.tasks)
            table = Table.grid(padding=(0, 2))
            table.add_column(style="cyan")
            table.add_column(justify="right", min_width=10)
            table.add_column(style="dim")
            for row in _rows(records.numbers()) if records.published else ():
                table.add_row(*row)
            yield table

    console = Console(file=out, highlight=False)
    if console.is_dumb_terminal:
        return None
    columns = TextColumn("{task.description}"), BarColumn(40), MofNCompleteColumn(), TimeElapsedColumn()
    live = Live(*columns, console=console, refresh_per_second=8, transient=True, redirect_stderr=False)
    live.add_task("starting", total=None)
    return live
