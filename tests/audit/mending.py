"""What the auditor prints to mend something."""

from __future__ import annotations

import ast
import re
from typing import Any

__all__ = ["words"]


def words(command: str) -> list[Any]:
    """The words of a printed command, as redis-cli reads it."""
    found = re.findall(r'"(?:[^"\\]|\\.)*"|\S+', command)
    return [ast.literal_eval(f"b{word}") if word[0] == '"' else word for word in found]
