"""An extension of griffe: the tables of options in the reference, from docstrings, types and `docs/guides/options.md`.

A function with `**options: Unpack[SomeOptions]` gets one row for each option that its docstring documents. The row has
the type of the TypedDict and the default of the guide. A function that only says `**options: the options of ...` stays
as it is.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from griffe import DocstringParameter, DocstringSectionKind, Function, UnpackTypedDictExtension

from tools.site import ROOT

ROW = re.compile(r"^\| (`.+?`) \| (.+?) \| ", re.MULTILINE)
UNKNOWN = "..."
"""What griffe sets as the default of an option of a TypedDict."""


@cache
def defaults() -> tuple[dict[str, str], dict[str, str]]:
    """Return the defaults of the options of `once`, and those of topics, as the guide words them."""
    once, topic = (ROOT / "docs/guides/options.md").read_text(encoding="utf-8").split("\n## When a topic delivers\n")
    return _defaults(once), _defaults(topic)


def _defaults(page: str) -> dict[str, str]:
    found = dict[str, str]()
    for cell, default in ROW.findall(page):
        names = re.findall("`(.+?)`", cell)
        words = default.replace("`", "").split(", ")
        found |= zip(names, words if len(words) == len(names) else [default.replace("`", "")] * len(names), strict=True)
    return found


class Options(UnpackTypedDictExtension):
    """The extension."""

    def on_function(self, *, func: Function, **facts: Any) -> None:
        text = func.docstring.value if func.docstring else ""
        if "\nArgs:\n" not in text:
            return
        if "**options" not in text:
            super().on_function(func=func, **facts)
        for section in func.docstring.parsed if func.docstring else ():
            if section.kind is DocstringSectionKind.parameters:
                section.value[:] = _rows(func, section.value)


def _rows(func: Function, rows: list[DocstringParameter]) -> list[DocstringParameter]:
    """Return a row for each documented name. "on_in_progress, wait" are two names."""
    typed = {row.name: row for row in rows if row.value == UNKNOWN}
    known = defaults()[func.name in {"topic", "merge"}] if typed else {}
    made = list[DocstringParameter]()
    for row in rows:
        if row.value == UNKNOWN:
            continue
        first, *others = row.name.split(", ")
        for name in (first, *others):
            given = typed.get(name) or next((one for one in func.parameters if one.name == name), row)
            default = known.get(name, UNKNOWN) if name in typed else getattr(given, "default", row.value)
            text = row.description if name == first else f"see `{first}`"
            made.append(DocstringParameter(name, annotation=given.annotation, description=text, value=default))
    return made
