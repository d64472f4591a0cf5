"""The live screen: a progress bar and a table, with rich. Imported only where it is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self, TextIO

from rich import box, live, progress, table
from rich.console import Console, Group

from idemgate.cli.demo.screen import rows

if TYPE_CHECKING:
    from idemgate.cli.demo.records import Records

__all__ = ["Live", "can_move"]


def can_move(out: TextIO) -> bool:
    """Return True if the terminal can move its cursor (with TERM=dumb it cannot)."""
    console = Console(file=out)
    return console.is_terminal and not console.is_dumb_terminal


class Live:
    """A live screen, drawn eight times a second by a thread of rich, which also respects NO_COLOR."""

    def __init__(self, out: TextIO) -> None:
        self._console = Console(file=out, highlight=False)
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(40),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("starting", total=None)
        self._records: Records | None = None
        self._live = live.Live(
            console=self._console,
            get_renderable=self._draw,
            refresh_per_second=8,
            transient=True,
            redirect_stderr=False,
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False)

    def tick(self, phase: str, done: int, total: int, records: Records) -> None:
        self._records = records if done else None
        self._bar.update(self._task, description=phase, completed=done, total=total)

    def _draw(self) -> Group:
        if self._records is None:
            return Group(self._bar)
        shown = table.Table(box=box.SIMPLE, show_header=False, pad_edge=False)
        shown.add_column(style="cyan")
        shown.add_column(justify="right", style="bold", min_width=10)
        shown.add_column(style="dim")
        for row in rows(self._records.numbers()):
            shown.add_row(*row)
        return Group(self._bar, shown)
