"""`idemgate demo` shows the main job on one screen, and checks its own promises.

`actors.py` is what a user would write: subscribers and a worker, each a process. `play.py` starts them, publishes the
events of `events.py`, and kills two of the processes. `records.py` judges what each process reported.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from idemgate.cli.arguments import HelpFormatter, count, duration, factor

__all__ = ["add_to"]

DESCRIPTION = """\
Shows the main job on one screen, and checks its own promises.

Several subscriber processes receive the same Pub/Sub channel, so every event
arrives once in each of them, and about 1 in 20 events is published twice. A
guard (once) lets the first copy through and drops the others. Each event that
got through triggers the merged topic of its path; a worker gets one delivery a
path and window. In the middle a subscriber and the worker are killed, and new
ones start: nothing is lost. If a promise is broken, the exit code is 1.

The events of a file are published with its pauses, cut to 1 minute and speeded
up: --speed 20 is 20 times as fast, and --speed max leaves out the pauses. The
publisher waits for the slowest subscriber, so it may take longer. --window is
speeded up, too, but not by --speed max."""


def add_to(commands: Any) -> None:
    """Add the command to a parser."""
    about = "see it work, and check its promises"
    parser = commands.add_parser("demo", help=about, description=DESCRIPTION, formatter_class=HelpFormatter)
    add = parser.add_argument
    source = "JSON lines of {id, ts, path, change}, gzipped or not (default: made up)"
    add("--input", metavar="FILE", type=Path, help=source)
    add("--speed", metavar="FACTOR", type=factor, help="times as fast, or max (default: a file takes 25 s)")
    window = "window of the topic, in the file's time (default: 1s; of a file 1h)"
    add("--window", metavar="TIME", type=duration, help=window)
    add("--events", metavar="N", type=count, help="only the first N events (default: all; 2,000 made up)")
    add("--subscribers", metavar="N", type=count, default=4, help="processes that receive every event (default: 4)")
    killing = "kill a subscriber and the worker in the middle (default: yes)"
    add("--kill", action=argparse.BooleanOptionalAction, default=True, help=killing)
    add("--url", help="use this server, such as redis://localhost:6379/0 (default: an embedded one)")
    add("--json", action="store_true", help="the final report as JSON on stdout; progress goes to stderr")
    parser.set_defaults(command=_command)


def _command(options: argparse.Namespace) -> int:
    from idemgate.cli.demo.play import play

    return play(options)
