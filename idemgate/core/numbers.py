"""Checks of numbers that users hand in."""

from __future__ import annotations

from idemgate.errors import InvalidArgument

__all__ = ["whole"]


def whole(name: str, value: int, least: int = 1, most: int | None = None) -> int:
    """A whole number of at least `least` and, if that is said, at most `most`, or InvalidArgument."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise InvalidArgument(name, value, f"not a whole number {bounds}", "Pass an int")
    return value
