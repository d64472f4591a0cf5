"""The arguments of verbs as texts, from a command line or a request, and what they mean."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, cast

from idemgate.core.durations import parse_seconds
from idemgate.core.validation import parse_count
from idemgate.errors import InvalidArgument
from idemgate.operate.table import VERBS
from idemgate.operate.verb import Given, Kind, Lines, Parameter, Verb

__all__ = ["parse_given", "parse_text", "read_command"]


def parse_text(parameter: Parameter, text: str) -> Any:
    """Return the value of a parameter that was written as text. Raises InvalidArgument."""
    parse = _PARSERS.get(parameter.kind)
    return text if parse is None else parse(text, parameter.name)


def _number(text: str, name: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InvalidArgument(name, text, "is not a whole number", "Write one such as 5") from None


def _time(text: str, name: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument(name, text, "is no time such as 2026-12-24T18:00Z", "Write date and time") from None
    if found.tzinfo is None:
        raise InvalidArgument(name, text, "has no offset", "Add Z for UTC, or +01:00")
    return found


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(name, text, f"is not JSON: {error}", "A text needs quotes: '\"x\"'") from None


_PARSERS: Mapping[Kind, Callable[[str, str], Any]] = {
    "count": parse_count, "number": _number, "seconds": parse_seconds, "time": _time, "json": _json,
}  # fmt: skip


# -- requests ---------------------------------------------------------------------------------------------------------


def parse_given(verb: Verb, arguments: Mapping[str, Any]) -> Given:
    """Return the values of the parameters of a verb.

    Args:
        verb: the verb.
        arguments: texts by the name of the parameter, as one writes them on the command line. A flag is a bool, "texts"
            is a list of texts, "lines" is the text of the file, and a number may be one of JSON. None is as if it was
            not given.

    Raises:
        InvalidArgument: a name is unknown, a required argument is missing, or a value is invalid.
    """
    names = {parameter.name for parameter in verb.parameters}
    for name in arguments:
        if name not in names:
            there = ", ".join(one.name for one in verb.parameters) or "none"
            raise InvalidArgument("arguments", name, f"`{verb.title}` has no such parameter", f"It has: {there}")
    return {one.name: _value_of(one, arguments.get(one.name)) for one in verb.parameters}


def _value_of(parameter: Parameter, value: Any) -> Any:
    kind = parameter.kind
    if kind == "flag":
        return _expect(parameter, False if value is None else value, bool, "true or false")
    if kind == "texts":
        texts = _expect(parameter, [] if value is None else value, list, "a list of texts")
        return [_expect(parameter, one, str, "a list of texts") for one in cast("list[object]", texts)]
    if value is None:
        if parameter.required:
            raise InvalidArgument(parameter.name, value, "is missing", f"Give it: {parameter.about}")
        return None
    if kind == "lines":
        return Lines("(sent)", _expect(parameter, value, str, "the text of the file").split("\n"))
    if kind in ("count", "number", "seconds") and type(value) in (int, float):
        value = str(value)
    return parse_text(parameter, _expect(parameter, value, str, "a text"))


def _expect(parameter: Parameter, value: Any, kind: type, wanted: str) -> Any:
    if not isinstance(value, kind):
        raise InvalidArgument(parameter.name, value, f"is not {wanted}", f"Send {wanted}")
    return value


# -- commands ---------------------------------------------------------------------------------------------------------


def read_command(line: str) -> tuple[Verb, dict[str, Any]] | None:
    """Return the verb of a command line such as "idemgate topic pause jobs", and its arguments for `parse_given`.

    None for another command, and for one with escapes ($'...'), which cannot be told from other texts.
    """
    words = shlex.split(line)
    verb = next((one for one in VERBS if ["idemgate", one.noun, one.name] == words[:3]), None)
    if verb is None or "$'" in line:
        return None
    flags = {f"--{one.name.replace('_', '-')}": one for one in verb.parameters if not one.required}
    placed = [one for one in verb.parameters if one.required]
    arguments = dict[str, Any]()
    rest, ended = iter(words[3:]), False
    for word in rest:
        flag, assigned, value = word.partition("=")
        if word == "--" and not ended:
            flags, ended = {}, True  # what is behind it is no option
        elif word in flags:
            arguments[flags[word].name] = True if flags[word].kind == "flag" else next(rest, None)
        elif assigned and flag in flags:
            arguments[flags[flag].name] = value
        elif placed and placed[0].kind == "texts":
            arguments.setdefault(placed[0].name, []).append(word)
        elif placed:
            arguments[placed.pop(0).name] = word
        else:
            return None
    return verb, arguments
