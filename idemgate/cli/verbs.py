"""`idemgate NOUN VERB`: the commands of the table of verbs (`idemgate/operate`)."""

from __future__ import annotations

import argparse
import getpass
import socket
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from idemgate.cli.arguments import add_namespace, add_url, argument_type, url_of
from idemgate.cli.showing import show_answer
from idemgate.core.text import one_line
from idemgate.gate import Gate
from idemgate.operate.acts import describe_act, perform
from idemgate.operate.arguments import parse_text
from idemgate.operate.servers import count_evicted
from idemgate.operate.table import VERBS
from idemgate.operate.verb import Answer, Given, Kind, Lines, Parameter, Verb
from idemgate.worker.logs import configure_logs

__all__ = ["add_to", "who_runs"]


def add_to(parser: argparse.ArgumentParser, noun: str) -> None:
    """Add the verbs of a noun to its parser."""
    verbs: Any = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    for verb in VERBS:
        if verb.noun == noun:
            added = verbs.add_parser(verb.name, help=verb.about, description=verb.about)
            added.fill = partial(_add_options, verb)


def _add_options(verb: Verb, parser: argparse.ArgumentParser) -> None:
    for parameter in verb.parameters:
        _add_parameter(parser, parameter)
    add_url(parser)
    add_namespace(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    if verb.changes:
        parser.add_argument("--dry-run", action="store_true", help="only show what would change")
        parser.add_argument("--why", metavar="TEXT", default="", help="the reason, which others see")
    if verb.loses:
        parser.add_argument("--yes", "-y", action="store_true", help="do not ask")
    parser.set_defaults(command=partial(_run, verb))


def _add_parameter(parser: argparse.ArgumentParser, parameter: Parameter) -> None:
    name = parameter.name if parameter.required else "--" + parameter.name.replace("_", "-")
    if parameter.kind == "flag":
        parser.add_argument(name, action="store_true", help=parameter.about)
        return
    words: dict[str, Any] = dict(_NUMBERS.get(parameter.kind, {}))
    words["type"] = _lines if parameter.kind == "lines" else argument_type(partial(parse_text, parameter))
    shown = _METAVARS.get(parameter.kind, parameter.name.upper())
    parser.add_argument(name, metavar=shown, help=parameter.about, **words)


def _lines(text: str) -> Lines:
    """Read the lines of a file, or of the standard input."""
    try:
        content = sys.stdin.read() if text == "-" else Path(text).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be read: {error}") from None
    return Lines(text, content.split("\n"))


_NUMBERS: Mapping[Kind, Mapping[str, Any]] = {"texts": {"nargs": "*"}, "lines": {"nargs": "?", "default": "-"}}
_METAVARS: Mapping[Kind, str] = {
    "count": "N",
    "number": "N",
    "seconds": "TIME",
    "time": "TIME",
    "json": "JSON",
    "lines": "FILE",
}


def _run(verb: Verb, options: argparse.Namespace) -> int:
    given = {parameter.name: getattr(options, parameter.name) for parameter in verb.parameters}
    with Gate(url_of(options), namespace=options.namespace, presence=False) as gate:
        if verb.look is not None and options.dry_run:
            answer: Answer = verb.look(gate, given)
        elif verb.loses and not options.yes and not _confirm(verb, gate, given):
            return 2
        else:
            if verb.changes:
                configure_logs("info")
            answer = perform(gate, verb, given, who=who_runs(), why=getattr(options, "why", ""))
        show_answer(answer, gate.namespace, as_json=options.json)
        if verb.tells_past and (evicted := count_evicted(gate.context.endpoint)):
            print(f"idemgate: acts and histories may be missing: the server evicted {evicted:,} keys", file=sys.stderr)
    return 0


def _confirm(verb: Verb, gate: Gate, given: Given) -> bool:
    """Show what would change, and ask. Return True if the answer is yes. A confirmation needs a terminal."""
    assert verb.look is not None
    if not sys.stdin.isatty():
        print(
            f"idemgate {verb.title} loses data or runs work again. Look with --dry-run, then add --yes", file=sys.stderr
        )
        return False
    show_answer(verb.look(gate, given), gate.namespace, to=sys.stderr)
    print(f"idemgate {one_line(describe_act(verb, given))}? Type yes: ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip() == "yes":
        return True
    print("Nothing was changed", file=sys.stderr)
    return False


def who_runs() -> str:
    """Return the user and the host, as the list of acts names them."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a user database
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
