"""Types of command-line arguments, and the format of help. argparse exits with 2 and names an invalid argument."""

from __future__ import annotations

import argparse
import math
import os
import textwrap

from idemgate.core.durations import milliseconds
from idemgate.errors import InvalidArgument, NotConfigured

__all__ = ["HelpFormatter", "add_namespace", "add_url", "count", "duration", "factor", "span", "url_of"]


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


def duration(text: str) -> float:
    """Parse a duration in seconds, such as "30", "500ms" or "1h30m"; "0" is rejected."""
    return _seconds(text, zero=False)


def span(text: str) -> float:
    """Parse a duration in seconds; "0" is allowed."""
    return _seconds(text, zero=True)


def _seconds(text: str, *, zero: bool) -> float:
    number = _number(text)
    try:
        return milliseconds(text if number is None else number, "TIME", zero=zero) / 1000
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(f"{text!r} {error.problem}. {error.fix}") from None


def factor(text: str) -> float:
    """Parse a positive number; "max" is infinity."""
    if text == "max":
        return math.inf
    number = _number(text) or 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a positive number nor max")
    return number


def count(text: str) -> int:
    """Parse a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


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
