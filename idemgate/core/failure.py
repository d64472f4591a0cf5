"""The text of an exception, as dead letters and stored failures hold it."""

from __future__ import annotations

__all__ = ["last_line", "message_of"]

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
