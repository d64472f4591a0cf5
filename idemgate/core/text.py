"""Texts for people: of an exception, as dead letters and stored failures hold it, and for logs and terminals."""

from __future__ import annotations

import logging
import re
from traceback import format_exception

__all__ = ["common_error", "cut", "event_log", "last_line", "message_of", "one_line", "printable"]

_MAX_CHARACTERS = 500


def message_of(error: BaseException) -> str:
    """Return `str(error)`, or a substitute if that raises. The `__str__` of a user's exception may raise anything."""
    try:
        return str(error)
    except Exception as broken:  # noqa: BLE001 - the error matters, not its text
        return f"<str() of this {type(error).__name__} raised {type(broken).__name__}>"


def last_line(error: BaseException) -> str:
    """Return the last line of the error's traceback, at most 500 characters.

    A message of several lines is shortened to its first and its last line: the cause often stands in the first.
    """
    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    lines = message_of(error).strip().splitlines()
    text = f"{name}: {lines[0]}{f' ... {lines[-1]}' if len(lines) > 1 else ''}" if lines else name
    # The text may hold a lone surrogate, for example of a file name; UTF-8 cannot encode it.
    return text[:_MAX_CHARACTERS].encode(errors="backslashreplace").decode()


_OWN = re.compile(
    r"'[^']*'|\"[^\"]*\"|\b[0-9a-f]{8}-[0-9a-f-]{27}\b|\b0x[0-9a-f]+\b|\b(?=[a-f]*\d)[0-9a-f]{8,}\b|\d+(?:\.\d+)?",
    re.IGNORECASE,
)


def common_error(text: str) -> str:
    """Return what errors of the same failure share: the first line without numbers, ids and quoted texts."""
    return _OWN.sub("…", text.partition("\n")[0])


def printable(text: str) -> str:
    """Return text with each character that a terminal would act on as an escape, such as \\x1b. Line ends stay.

    Names in a store may come from anyone. Control characters, and those that change the direction of text, could hide
    or forge what a command prints.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in text
    )


def one_line(value: object) -> str:
    """Return the text of a value for one line of a log or a terminal: `printable`, and line ends are escaped, too.

    What a stranger chose, such as a path, a key in an error or the text of a handler's exception, could otherwise add
    lines that look like others.
    """
    try:
        text = str(value)
    except Exception:  # noqa: BLE001 - an exception of the user may have a broken `__str__`
        text = f"<{type(value).__name__}>"
    return text if text.isprintable() else printable(text).replace("\n", "\\n")


class _Tracebacks(logging.Filter):
    """Escape and indent the traceback of each record, with any formatter.

    The message of an exception may hold what a stranger sent. In the first column it could forge a record. Formatters
    of the standard library print `exc_text` where it is set; `exc_info` stays for those that read it.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.exc_info, tuple) and record.exc_info[1] is not None and not record.exc_text:
            text = printable("".join(format_exception(record.exc_info[1])))
            record.exc_text = "\n".join(f"  {line}" for line in text.splitlines())
        return True


_TRACEBACKS = _Tracebacks()


def event_log(name: str) -> logging.Logger:
    """Return the logger of this name, for a module that logs exceptions of the user's functions."""
    log = logging.getLogger(name)
    log.addFilter(_TRACEBACKS)
    return log


def cut(text: str, most: int) -> str:
    """Return a text of at most `most` characters that can be encoded."""
    text = text.encode(errors="backslashreplace").decode()
    return text if len(text) <= most else text[: most - 3] + "..."
