"""A verb: one declaration of what an operator may ask. The command line is built from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

from idemgate.audit.running import verb_line
from idemgate.gate import Gate

__all__ = ["Answer", "Facts", "Given", "Kind", "Lines", "Parameter", "Verb", "tell_change"]

Kind = Literal["text", "texts", "pattern", "count", "number", "seconds", "time", "json", "flag", "lines"]
"""The kind of a value. "texts" are several texts. A "pattern" is a text with wildcards. A "count" is an int of at
least 1. "seconds" are a float that was written as a duration such as "5m". A "time" is an aware datetime. A "flag" is a
bool. "lines" are `Lines`."""


class Lines(NamedTuple):
    """The lines of a file, and its name for people."""

    name: str
    lines: Sequence[str]

    def __str__(self) -> str:
        return self.name


Given = Mapping[str, Any]
"""The values of the parameters by name. An option that was not given is None, [] for "texts", and False for a flag."""
Facts = Mapping[str, Any]
Answer = Facts | Sequence[Facts] | Iterator[Facts]
"""What a verb found or did: facts by name, rows with the same names, or rows that are read as they are printed.

Values are those of JSON, or datetimes."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a verb. A required one is given by position, the others by `--name`.

    Flags with the same `choice` exclude each other.
    """

    name: str
    about: str
    kind: Kind = "text"
    required: bool = False
    choice: str = ""


@dataclass(frozen=True, slots=True)
class Verb:
    """A verb of a noun.

    Attributes:
        noun: what it is about: "key", "topic", "dead", ...
        name: its name below the noun, as on the command line.
        about: one sentence for the help.
        run: does it. It raises InvalidArgument for what cannot be done, before anything is written.
        parameters: its parameters, in the order of the command line.
        look: returns what `run` would change, and writes nothing. None for a verb that only reads.
        loses: true if data is lost, or work may run twice: it wants a confirmation.
        find_scope: returns the scope of its guarded key, which need not be given.
        tells_past: true if it shows acts or histories, of which a server that evicts keys may have lost some.
    """

    noun: str
    name: str
    about: str
    run: Callable[[Gate, Given], Answer]
    parameters: tuple[Parameter, ...] = ()
    look: Callable[[Gate, Given], Answer] | None = None
    loses: bool = False
    find_scope: Callable[[Gate, Given], str] | None = None
    tells_past: bool = False

    @property
    def changes(self) -> bool:
        """True if it changes what the store holds."""
        return self.look is not None

    @property
    def title(self) -> str:
        """Its noun and its name, as on the command line."""
        return f"{self.noun} {self.name}"

    @property
    def subject(self) -> str | None:
        """The parameter that names what it is about: the last required text."""
        return next((one.name for one in reversed(self.parameters) if one.required and one.kind == "text"), None)

    def write_command(self, values: Mapping[str, Any]) -> str:
        """Return the command line with these values by the name of the parameter, as a shell reads it.

        Nothing is checked: what is missing is left out, and what is wrong is written as it is.
        """
        placed, named = list[str](), dict[str, str | bool]()
        for parameter in self.parameters:
            value = values.get(parameter.name)
            if value is None or value is False or value == []:
                continue
            if parameter.kind == "texts":
                placed += map(str, cast("Sequence[Any]", value) if isinstance(value, list) else [value])
            elif parameter.required:
                placed.append(str(value))
            else:
                named[parameter.name] = value is True or str(value)
        return verb_line(self.noun, self.name, *placed, **named)


def tell_change(name: str, done: bool, otherwise: str) -> dict[str, Any]:
    """Return whether a verb changed something, and what was the case if it did not."""
    return {name: done} if done else {name: done, "state": otherwise}
