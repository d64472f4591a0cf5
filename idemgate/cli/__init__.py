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
from functools import partial
from importlib import import_module
from typing import Any, NoReturn, cast

from idemgate.cli.arguments import HelpFormatter
from idemgate.core.text import one_line
from idemgate.core.version import VERSION
from idemgate.errors import IdemgateError, InvalidArgument, NotConfigured
from idemgate.operate.nouns import NOUNS

__all__ = ["command_line", "main"]

EXIT_CODES = (
    "exit codes: 0 = it went well, 1 = it did not, 2 = wrong command line or input, "
    "130 = interrupted by Ctrl-C, 143 = ended by SIGTERM"
)

COMMANDS = {
    "status": "what is wrong now, and the command that mends it",
    "metrics": "serve the metrics of a namespace to Prometheus",
    **NOUNS,
    "ui": "serve the page for operators",
    "acl": "print the access list of a role",
    "demo": "see it work, and check its promises",
    "simulate": "choose a window from recorded events",
    "doctor": "check a server, and its data with --audit",
    "once": "run a command once for a key, for cron and scripts",
    "run": "run the handlers and subscribers of a gate",
    "server": "run the embedded server",
}
"""What each command is for, in the order of the help. Its module is imported when it is called."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. argparse itself exits for --help, or with 2.

    Args:
        argv: The arguments; None means those of the process.
    """
    try:
        argv, behind = _split_command(sys.argv[1:] if argv is None else list(argv))
        options = command_line().parse_args(argv, argparse.Namespace(argv=behind))
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
        fill: Adds what is below this parser, before it parses. So a call builds the options of one command only.
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
    parser.add_argument("--version", action="version", version=f"idemgate {VERSION}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, about in COMMANDS.items():
        added = commands.add_parser(name, help=about, description=about, formatter_class=HelpFormatter)
        added.fill = partial(_add_options, name)
    return parser


def _add_options(name: str, parser: argparse.ArgumentParser) -> None:
    if name in NOUNS:
        import_module("idemgate.cli.verbs").add_to(parser, name)
    else:
        import_module(f"idemgate.cli.{name}").add_to(parser)


def _split_command(argv: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Return the arguments of `idemgate once`, and the command after the first --. argparse may drop a second one.

    Raises:
        InvalidArgument: There is no command, or no -- in front of it.
    """
    if argv[:1] != ["once"]:
        return argv, []
    at = argv.index("--") if "--" in argv else len(argv)
    own, command = argv[:at], argv[at + 1 :]
    if not command and not {"-h", "--help"}.intersection(own):
        fix = "Write -- before the command: idemgate once [options] KEY -- COMMAND ..."
        raise InvalidArgument("COMMAND", None, "there is none behind --", fix)
    return own, command


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
