"""`idemgate server [DIR]`: the embedded server in the foreground."""

from __future__ import annotations

import argparse
import sys
import time

from idemgate.cli.signals import Interrupted, watching
from idemgate.store.embedded.server import start
from idemgate.worker.logs import configure_logs

__all__ = ["add_to"]

DESCRIPTION = """\
Run a Valkey or Redis server and print its URL, until Ctrl-C or SIGTERM. With DIR it keeps its data there, and all
programs that name this directory share one server. Without DIR its data are deleted at the end."""


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.description = DESCRIPTION
    parser.add_argument("directory", metavar="DIR", nargs="?", help="directory for the data (default: none are kept)")
    parser.set_defaults(command=serve)


def serve(options: argparse.Namespace) -> int:
    """Run a server; return 0 after a signal, 1 if the server ended unexpectedly. Errors of `start` pass through."""
    configure_logs()
    with watching() as signals, start(options.directory) as embedded:
        print(embedded.url, flush=True)
        print(f"Use it with: IDEMGATE_URL={embedded.url}   (Ctrl-C ends it)", file=sys.stderr)
        try:
            while embedded.alive:
                signals.check()
                time.sleep(0.1)
        except Interrupted:
            return 0
    return 1
