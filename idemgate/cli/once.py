"""`idemgate once KEY -- COMMAND`: a guard for cron and shell scripts."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from idemgate.cli.arguments import add_namespace, add_url, duration, url_of
from idemgate.core.text import one_line
from idemgate.core.verdict import Verdict
from idemgate.errors import InvalidArgument
from idemgate.gate import Gate
from idemgate.guard.options import GuardOptions

__all__ = ["add_to"]

DESCRIPTION = """\
Run a command once for a key: the first call runs it, and a later one prints a line on stderr and exits with 0.
While the command runs, its lease is renewed. If it fails, or its host dies, the next call runs it again.

  idemgate once "report-$(date +%F)" -- make-report --mail

The exit code is that of the command: 128 and the number of the signal that ended it, 126 if it cannot be executed,
127 if it is not found. 75: it was not run, because another process runs it, or the store is away. Try again later.
2: an argument is invalid. Signals are passed on to the command. Its output is not stored."""
TRY_LATER = 75
"""EX_TEMPFAIL of sysexits.h."""
PASSED_ON = ("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2")
FROM_TERMINAL = ("SIGINT", "SIGQUIT")
"""The signals that a terminal sends to the command, too."""


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.description = DESCRIPTION
    parser.usage = "idemgate once [options] KEY -- COMMAND ..."
    parser.add_argument("key", metavar="KEY", help="what the command does, such as report-2026-11-29")
    parser.add_argument("--scope", default="command", help="commands of one scope share their keys (default: command)")
    parser.add_argument(
        "--retention",
        metavar="TIME",
        type=duration,
        default=86_400.0,
        help="how long the key stays done (default: 24h)",
    )
    parser.add_argument(
        "--lease", metavar="TIME", type=duration, default=30.0,
        help="how long the key stays taken after its host died (default: 30s)",
    )  # fmt: skip
    parser.add_argument(
        "--wait", metavar="TIME", type=duration,
        help="wait for another process that runs the command, at most this long (default: do not wait)",
    )  # fmt: skip
    add_url(parser)
    add_namespace(parser)
    parser.set_defaults(command=run_once)


def run_once(options: argparse.Namespace) -> int:
    """Run the command unless its key is done, and return the exit code; see DESCRIPTION."""
    given: GuardOptions = {"retention": options.retention, "lease": options.lease}
    if options.wait is not None:
        given |= {"on_in_progress": "wait", "wait": options.wait}
    command = _Command(options.argv)
    with Gate(url_of(options), namespace=options.namespace) as gate:
        guard = gate.guard(options.scope, **given)
        verdict = guard.run(options.key, command.run)
    if isinstance(verdict.error, InvalidArgument):
        raise verdict.error
    if (line := _describe(verdict, command, options.key)) is not None:
        print(f"idemgate: {line}", file=sys.stderr)
    if command.code is not None:
        return command.code
    return 0 if verdict.outcome == "duplicate" else TRY_LATER


def _describe(verdict: Verdict[Any], command: _Command, key: str) -> str | None:
    """Return what the user must know beside the output of the command."""
    name = f"'{one_line(key)}'"
    if verdict.outcome == "duplicate":
        return f"{name} is done already: the command was not run"
    if verdict.outcome == "in_progress":
        return f"{name} is in progress elsewhere: the command was not run"
    if command.code is None:
        return f"the command was not run: {one_line(verdict.error)}"
    if command.problem is not None:
        return one_line(command.problem)
    if verdict.outcome == "lost":
        return f"the lease of {name} was lost while the command ran: it may run again"
    if command.code == 0 and verdict.error is not None:
        return f"the command ended, but the store did not record it, so it may run again: {one_line(verdict.error)}"
    return None


class _Failed(Exception):
    """The command did not end with 0, so its key is released."""


class _Command:
    """One run of the command. `code` is its exit code once it has ended, and `problem` why it did not begin."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.code: int | None = None
        self.problem: OSError | None = None
        self._argv = argv
        self._process: subprocess.Popen[bytes] | None = None
        self._signals: list[int] = []

    def run(self) -> None:
        """Run the command to its end. Raise _Failed unless it ends with 0."""
        with self._passing_on_signals():
            try:
                self._process = subprocess.Popen(self._argv)  # noqa: S603 - it is the command of the user
            except OSError as error:
                self.problem = error
                self.code = 127 if isinstance(error, FileNotFoundError) else 126
                raise _Failed from error
            for number in self._signals:  # those that came before it was there
                self._process.send_signal(number)
            code = self._process.wait()
        self.code = code if code >= 0 else 128 - code
        if self.code:
            raise _Failed

    @contextmanager
    def _passing_on_signals(self) -> Generator[None]:
        before = {number: signal.signal(number, self._pass_on) for number in map(signal.Signals.__getitem__, PASSED_ON)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_on(self, number: int, _frame: object) -> None:
        if self._process is None:
            self._signals.append(number)
        elif signal.Signals(number).name not in FROM_TERMINAL or not os.isatty(0):
            self._process.send_signal(number)
