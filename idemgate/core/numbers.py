"""Checks of numbers that users hand in."""

from __future__ import annotations

from idemgate.errors import BadInput

__all__ = ["whole"]


def whole(name: str, value: int, least: int = 1) -> int:
    """A whole number of at least `least`, or BadInput."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise BadInput(name, value, f"not a whole number of at least {least}", "Pass an int")
    return value
