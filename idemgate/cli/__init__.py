"""The command `idemgate`: one module a command, argparse only, rich where it is installed.

Exit codes: 0 it went well, 1 it did not (a promise was broken, the store is away), 2 the command line or the program it
names is wrong; 130 interrupted by Ctrl-C, 143 ended by SIGTERM. A worker and a server are ended by a signal as a matter
of course: that is 0.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn, cast

from idemgate.cli import acl, demo, doctor, run, server, topics
from idemgate.errors import IdemgateError, InvalidArgument, NotConfigured

__all__ = ["command_line", "main"]

EXIT_CODES = (
    "exit codes: 0 = it went well, 1 = it did not, 2 = wrong command line or input, "
    "130 = interrupted by Ctrl-C, 143 = ended by SIGTERM"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command (None: that of the command line); the exit code. argparse itself exits for --help, or with 2."""
    options = command_line().parse_args(argv)
    try:
        return int(options.command(options))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except BaseExceptionGroup as group:
        return _complain(_first(group))
    except IdemgateError as error:
        return _complain(error)


class _Parser(argparse.ArgumentParser):
    """What argparse repeats of a command line that it refuses may be a URL."""

    def error(self, message: str) -> NoReturn:
        super().error(re.sub(r"://\S*@", "://***@", message))


def command_line() -> argparse.ArgumentParser:
    """All commands and their options."""
    parser = _Parser(
        prog="idemgate",
        description="Run the first of all duplicates, merge a burst of triggers into one delivery.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"idemgate {version('idemgate-redis')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (acl, demo, doctor, run, server, topics):
        command.add_to(commands)
    return parser


def _first(error: BaseException) -> BaseException:
    """Of the faults that ended a worker the first; the others fell with it."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    return _first(cast("BaseExceptionGroup[BaseException]", error).exceptions[0])


def _complain(error: BaseException) -> int:
    """One line for what the user can mend; a fault of the program keeps its traceback."""
    if not isinstance(error, IdemgateError):
        raise error
    print(f"idemgate: {error}", file=sys.stderr)
    return 2 if isinstance(error, InvalidArgument | NotConfigured) else 1
