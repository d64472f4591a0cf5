"""Choice of the demo's screen: a live one if rich is installed and the output is a terminal, else plain lines."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TextIO

from idemgate.cli.demo.screen import Lines, Screen

__all__ = ["choose_screen"]


def choose_screen(out: TextIO) -> Screen:
    """Return the live screen if rich is installed and `out` is a terminal, else plain lines."""
    if out.isatty() and find_spec("rich") is not None:
        from idemgate.cli.demo.live import Live, can_move

        if can_move(out):
            return Live(out)
    return Lines(out)
