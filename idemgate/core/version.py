"""The version of this package, which `CLIENT LIST` shows. Reading it from installed metadata takes a millisecond."""

from __future__ import annotations

__all__ = ["VERSION"]

VERSION = "0.1.0"
