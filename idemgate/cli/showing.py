"""Print answers: as JSON for programs, and as tables or lines for people."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, TextIO, cast

from idemgate.core.text import one_line
from idemgate.operate.values import STORED, to_json
from idemgate.operate.verb import Answer

__all__ = ["show_answer"]


def show_answer(answer: Answer, namespace: str, *, as_json: bool = False, to: TextIO | None = None) -> None:
    """Print an answer, or that the namespace has nothing. Text is escaped for a terminal; values of JSON are not."""
    out = to or sys.stdout
    if isinstance(answer, Iterator):
        for row in answer:
            print(json.dumps(row, default=to_json), file=out)
    elif as_json:
        print(json.dumps(answer, indent=2, default=to_json), file=out)
    elif isinstance(answer, Mapping):
        _show_facts(answer, out)
    elif answer:
        _show_rows(answer, out)
    else:
        print(f"nothing found in namespace {namespace!r} (--namespace names another)", file=out)


def _show_facts(facts: Mapping[str, Any], out: TextIO) -> None:
    """Print a line for each fact that is known, and each list of facts as a table below its name."""
    known = {name: value for name, value in facts.items() if value not in (None, "", {}, [])}
    width = max((len(_title(name)) for name in known), default=0)
    for name, value in known.items():
        if isinstance(value, list) and isinstance(cast("list[object]", value)[0], Mapping):
            print(f"{_title(name)}:", file=out)
            _show_rows(cast("list[Mapping[str, Any]]", value), out)
        else:
            print(f"{_title(name):<{width}}  {_text(name, cast('object', value))}", file=out)


def _show_rows(rows: Sequence[Mapping[str, Any]], out: TextIO) -> None:
    """Print a table. On a terminal that is too narrow cut its last column, or print a block of lines for each row."""
    names = [name for name in rows[0] if any(row[name] not in (None, "") for row in rows)]
    texts = [list(map(_title, names)), *([_text(name, row[name]) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    if out.isatty():
        left = shutil.get_terminal_size().columns - sum(widths[:-1]) - 2 * len(widths) + 2
        if left < min(widths[-1], _NARROWEST):
            for row in rows:
                _show_facts(row, out)
                print(file=out)
            return
        for line in texts:
            line[-1] = line[-1] if len(line[-1]) <= left else line[-1][: left - 3] + "..."
    for line in texts:
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip(), file=out)


_NARROWEST = 20
"""The least width to which the last column is cut."""


def _title(name: str) -> str:
    return name.replace("_", " ")


def _text(name: str, value: object) -> str:
    """Return the value of a fact as text for one line of a terminal."""
    if value is None or value == "":
        return "-"
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}Z"
    if name in STORED and not isinstance(value, str):
        return one_line(json.dumps(value, ensure_ascii=False))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if name == "clock_ahead":
            sign = "-" if value < 0 else ""
            return f"{value:g} s" if abs(value) < 60 else f"{sign}{timedelta(seconds=round(abs(value)))}"
        return f"{timedelta(seconds=round(value))}" if name.endswith(("_left", "lateness")) else f"{value:g}"
    if isinstance(value, Mapping):
        parts = cast("Mapping[str, object]", value).items()
        return " ".join(f"{one_line(key)}={_text(key, part)}" for key, part in parts)
    if isinstance(value, list):
        return ", ".join(_text("", part) for part in cast("list[object]", value))
    return one_line(value)
