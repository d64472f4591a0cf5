"""Types of command-line arguments, and the format of help. argparse exits with 2 and names an invalid argument."""

from __future__ import annotations

import argparse
import math
import os
import textwrap
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

from idemgate.core.durations import parse_seconds
from idemgate.core.validation import parse_count
from idemgate.errors import InvalidArgument, NotConfigured

__all__ = [
    "HelpFormatter",
    "add_namespace",
    "add_url",
    "argument_type",
    "count",
    "duration",
    "factor",
    "span",
    "split_address",
    "url_of",
]  # fmt: skip

T = TypeVar("T")


def add_url(parser: argparse.ArgumentParser) -> None:
    """Add --url to a parser; `url_of` reads it."""
    parser.add_argument("--url", help="the store (default: the environment variable IDEMGATE_URL)")


def url_of(options: argparse.Namespace) -> str:
    """Return the URL of the store. Raises NotConfigured if none was given."""
    url: str = options.url or os.environ.get("IDEMGATE_URL", "")
    if not url:
        raise NotConfigured("no store is configured. Pass --url redis://host:6379/0, or set IDEMGATE_URL")
    return url


def add_namespace(parser: argparse.ArgumentParser) -> None:
    """Add --namespace to a parser. Its default is the environment variable IDEMGATE_NAMESPACE."""
    default = os.environ.get("IDEMGATE_NAMESPACE") or "default"
    about = f"namespace of the gate (default: the environment variable IDEMGATE_NAMESPACE, now: {default})"
    parser.add_argument("--namespace", "-n", metavar="NAME", default=default, help=about)


def split_address(option: str, address: str) -> tuple[str, int]:
    """Return the host and the port of `PORT`, `HOST:PORT` or `[HOST]:PORT`. Without a host it is this machine's.

    Raises:
        InvalidArgument: it is none of them.
    """
    host, _, port = address.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) < 65536):
        raise InvalidArgument(option, address, "not a port", "Write 8080, or 0.0.0.0:8080")
    return host.removeprefix("[").removesuffix("]") or "127.0.0.1", int(port)


def argument_type(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return a type for argparse: a function that raises InvalidArgument."""

    def parse_argument(text: str) -> T:
        try:
            return parse(text)
        except InvalidArgument as error:
            raise argparse.ArgumentTypeError(f"{text!r:.100} {error.problem}. {error.fix}") from None

    return parse_argument


duration: Callable[[str], float] = argument_type(partial(parse_seconds, name="TIME"))
"""Parse a duration in seconds, such as "30", "500ms" or "1h30m"; "0" is rejected."""
span: Callable[[str], float] = argument_type(partial(parse_seconds, name="TIME", zero=True))
"""Parse a duration in seconds; "0" is allowed."""
count: Callable[[str], int] = argument_type(partial(parse_count, name="N"))
"""Parse a whole number of at least 1."""


def factor(text: str) -> float:
    """Parse a positive number; "max" is infinity."""
    if text == "max":
        return math.inf
    with suppress(ValueError):
        if 0 < (number := float(text)) < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is neither a positive number nor max")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Wraps descriptions at words to the width of the terminal. Empty lines and indented lines stay apart."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:  # noqa: ARG002 - the signature of argparse
        blocks: list[str] = []
        for line in text.splitlines():
            starts_block = not blocks or not line or line[0] == " " or not blocks[-1] or blocks[-1][0] == " "
            if starts_block:
                blocks.append(line)
            else:
                blocks[-1] += " " + line
        return "\n".join(_wrap_block(block, width) for block in blocks)


def _wrap_block(block: str, width: int) -> str:
    hanging = " " * (len(block) - len(block.lstrip()) + 2) if block.startswith(" ") else ""
    lines = textwrap.wrap(block, width, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)
