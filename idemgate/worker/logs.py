"""Logging on stderr for programs that configure none: the event's name, then its facts; or both as JSON."""

from __future__ import annotations

import json
import logging
import socket
from datetime import UTC, datetime

from idemgate.core.text import one_line, printable
from idemgate.errors import InvalidArgument

__all__ = ["configure_logs"]

_HOST = socket.gethostname()
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class Facts(logging.Formatter):
    """A formatter that appends the `extra` fields: `worker.dead topic='images' attempt=17`.

    A field that the message already shows is not repeated. A record begins at the first column, its traceback does not.
    So no exception of a handler and no key can forge a record, or act on a terminal.
    """

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        head, *rest = printable(text).split("\n")
        return "\n".join([head, *(f"  {line}" for line in rest)])

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        facts = [
            f"{name}={value!r}"
            for name, value in vars(record).items()
            if name not in _STANDARD and f" {name}=" not in record.message
        ]
        return one_line(" ".join([super().formatMessage(record), *facts]))


class JsonFacts(logging.Formatter):
    """A formatter that writes a record as one JSON object, with the host and the process id."""

    def format(self, record: logging.LogRecord) -> str:
        super().format(record)  # sets the message and the text of the traceback
        facts = {name: value for name, value in vars(record).items() if name not in _STANDARD}
        traceback = "\n".join(filter(None, (record.exc_text, record.stack_info)))
        shown = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname, "logger": record.name, "message": record.message, "host": _HOST,
            "pid": record.process, "facts": facts,
        }  # fmt: skip
        return json.dumps(shown | ({"traceback": traceback} if traceback else {}), default=repr)


def configure_logs(level: str = "INFO", *, as_json: bool = False) -> None:
    """Log events of idemgate from `level`, others from WARNING.

    If a handler receives the events of idemgate already, do nothing.

    Args:
        level: The name of a level of `logging`, in any case.
        as_json: Write one JSON object a line instead of text.

    Raises:
        InvalidArgument: There is no such level.
    """
    level = _check_level(level)
    root, ours = logging.getLogger(), logging.getLogger("idemgate")
    if ours.hasHandlers():
        return
    handler = logging.StreamHandler()
    text = Facts("%(asctime)s %(levelname)-7s %(name)s %(message)s")
    handler.setFormatter(JsonFacts() if as_json else text)
    root.addHandler(handler)
    if ours.level == logging.NOTSET:
        ours.setLevel(level)


def _check_level(level: str) -> str:
    names = logging.getLevelNamesMapping()
    if not isinstance(level, str) or level.upper() not in names:
        raise InvalidArgument("level", level, "no such level", f"Use one of {', '.join(names)}")
    return level.upper()
