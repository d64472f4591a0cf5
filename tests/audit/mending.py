"""Run the commands that the auditor prints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from typing import Any

from idemgate.testing import Finding

__all__ = ["execute", "is_command", "run_commands"]


def is_command(finding: Finding) -> bool:
    """Whether a finding has a command that mends it, and not only advice."""
    return finding.mend[:3].isupper()


def run_commands(raw: Any, findings: Iterable[Finding]) -> None:
    for one in findings:
        if is_command(one):
            execute(raw, one.mend)


def execute(raw: Any, command: str) -> None:
    raw.execute_command(*_words(command))


def _words(command: str) -> list[Any]:
    """The words of a printed command, as redis-cli reads it."""
    found = re.findall(r'"(?:[^"\\]|\\.)*"|\S+', command)
    return [ast.literal_eval(f"b{word}") if word[0] == '"' else word for word in found]
