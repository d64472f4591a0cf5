"""The command `idemgate`: one module a command, argparse only, rich where it is installed.

Exit codes: 0 success, 1 failure (a broken promise, an unavailable store), 2 invalid command line or program, 130
interrupted by Ctrl-C, 143 ended by SIGTERM. For a worker and a server, the end by a signal is a success: 0.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, NoReturn, cast

from idemgate.cli import acl, demo, doctor, metrics, once, run, server, simulate, status, ui, verbs
from idemgate.core.text import one_line
from idemgate.errors import IdemgateError, InvalidArgument, NotConfigured

__all__ = ["command_line", "main"]

EXIT_CODES = (
    "exit codes: 0 = it went well, 1 = it did not, 2 = wrong command line or input, "
    "130 = interrupted by Ctrl-C, 143 = ended by SIGTERM"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. argparse itself exits for --help, or with 2.

    Args:
        argv: The arguments; None means those of the process.
    """
    try:
        argv, command = once.split_command(sys.argv[1:] if argv is None else list(argv))
        options = command_line().parse_args(argv, argparse.Namespace(argv=command))
        return int(options.command(options))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 1
    except BaseExceptionGroup as group:
        return _print_error(_first_error(group))
    except IdemgateError as error:
        return _print_error(error)


class _Parser(argparse.ArgumentParser):
    """A parser that hides passwords of URLs in its error messages.

    Attributes:
        fill: Adds what is below this parser, before it parses. So a call builds the verbs of one noun only.
    """

    fill: Callable[[argparse.ArgumentParser], None] | None = None

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride] - it has overloads
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        if self.fill is not None:
            self.fill(self)
            self.fill = None
        return super().parse_known_args(args, namespace)

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if arg_strings == ["--"] and action.nargs is None:
            return "--"  # a key may be named so; argparse takes it for the end of options, and leaves a list
        return super()._get_values(action, arg_strings)

    def error(self, message: str) -> NoReturn:
        super().error(re.sub(r"://\S*@", "://***@", message))


def command_line() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    parser = _Parser(
        prog="idemgate",
        description="Run the first of all duplicates, merge a burst of triggers into one delivery.",
        epilog=EXIT_CODES,
    )
    parser.add_argument("--version", action="version", version=f"idemgate {version('idemgate-redis')}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (status, metrics, verbs, ui, acl, demo, simulate, doctor, once, run, server):
        command.add_to(commands)
    return parser


def _first_error(error: BaseException) -> BaseException:
    """Return the first error of a group; the others are its consequences."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    return _first_error(cast("BaseExceptionGroup[BaseException]", error).exceptions[0])


def _print_error(error: BaseException) -> int:
    """Print one line for an error that the user can fix. Raise any other error, with its traceback."""
    if not isinstance(error, IdemgateError):
        raise error
    print(f"idemgate: {one_line(error)}", file=sys.stderr)
    return 2 if isinstance(error, InvalidArgument | NotConfigured) else 1
