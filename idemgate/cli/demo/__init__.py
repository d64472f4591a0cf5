"""`idemgate demo`: the real thing on one screen.

Several subscriber processes hear the same Pub/Sub channel, so every event arrives several times, and some are published
twice. Each subscriber guards its handler with `once` and triggers a merged topic; a worker takes the deliveries. At the
end the promises are checked against what each process reported. `actors.py` is what a user would write; the rest is
stage machinery.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from idemgate.cli.arguments import HelpFormatter, count, duration, factor

__all__ = ["add_to"]

DESCRIPTION = """\
Shows the main job on one screen, and checks its own promises.

Several subscriber processes hear the same Pub/Sub channel, so every event
arrives once in each of them, and about 1 in 20 events is published twice. A
guard (once) lets the first copy through and drops the others. Each event that
got through triggers the merged topic of its path; a worker gets one delivery a
path and window. In the middle a subscriber and the worker are killed, and new
ones start: nothing is lost.

At the end: what was published, received, handled, dropped, triggered and
delivered, how late deliveries were, and whether all promises were kept; if one
was broken the exit code is 1. Ctrl-C ends everything (130)."""
TIME = """\
time:
  The events of a file are published in their order, with the pauses between
  them, speeded up. Pauses longer than --max-gap are cut to it, or the
  nights and holidays of years would be all there is to see. Without --speed
  the speed is such that the whole lasts about 25 s; if the subscribers
  cannot follow, it lasts longer, as nothing may be lost. --window is in the
  time of the file: it is speeded up like the pauses. With --speed max there
  are no pauses, and --window is in your time."""


def add_to(commands: Any) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "demo",
        help="see it work, and check its promises",
        description=DESCRIPTION,
        epilog=TIME,
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add(
        "--input",
        metavar="FILE",
        type=Path,
        help="JSON lines of {id, ts, path, change}, gzipped or not (default: made up)",
    )
    add(
        "--speed",
        metavar="FACTOR",
        type=factor,
        help="times as fast as in the file, or max (default: 25 s in all)",
    )
    add(
        "--max-gap",
        metavar="TIME",
        type=duration,
        default=60.0,
        help="longest pause, in the file's time (default: 1m)",
    )
    add(
        "--window",
        metavar="TIME",
        type=duration,
        help="window of the topic, in the file's time (default: 1s; of a file 1h)",
    )
    add("--events", metavar="N", type=count, help="only the first N events (default: all; 2,000 made up)")
    add("--subscribers", metavar="N", type=count, default=4, help="processes that hear every event (default: 4)")
    add(
        "--seed",
        metavar="N",
        type=int,
        default=1,
        help="for other made-up events, other duplicates (default: 1)",
    )
    add(
        "--kill",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="kill a subscriber and the worker in the middle, and start new ones (default: yes)",
    )
    add("--url", help="use this server, such as redis://localhost:6379/0 (default: an embedded one)")
    add("--json", action="store_true", help="the final report as JSON on stdout; progress goes to stderr")
    parser.set_defaults(command=_command)


def _command(options: argparse.Namespace) -> int:
    from idemgate.cli.demo.play import play

    return play(options)
