"""Which lines of the scripts a test runs: a script marks the lines it comes by, and writes them to the server's log."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

__all__ = ["MARK", "Log", "marked", "place", "wrapped"]

MARK = "lines of scripts:"
_STATEMENT = re.compile(r"\s*(?:local |if |for |while |return\b|redis\.|[\w.]+[\[( ].*=|\w+, .* = |\w+\()")
_INSIDE = re.compile(r"\s*(?:and |or |\.\.|else|end|until|\}|\)|--|[\w\"\[\].]+ = [^=].*,$)")
_OPEN_END = re.compile(r"(?:[,=+]|\.\.|\b(?:and|or|not))\s*$")


def _statements(source: str) -> Iterator[tuple[int, str]]:
    """The lines at which a statement begins."""
    depth, open_end = 0, False
    for number, line in enumerate(source.splitlines(), 1):
        code = re.sub(r'"(?:[^"\\]|\\.)*"', '""', line).partition("--")[0]
        if depth == 0 and not open_end and _STATEMENT.match(code) and not _INSIDE.match(code):
            yield number, line
        open_end = bool(_OPEN_END.search(code)) if code.strip() else open_end
        depth += sum(map(code.count, "({[")) - sum(map(code.count, ")}]"))


def marked(file: str, source: str) -> str:
    lines = source.splitlines()
    for number, line in _statements(source):
        lines[number - 1] = f'T["{file}:{number}"]=1 {line}'
    return "\n".join(lines) + "\n"


def wrapped(script: str) -> str:
    """The script, which tells where it has been when it ends, in whatever way."""
    return (
        f"local T = {{}}\nlocal function script()\n{script}\nend\n"
        "local whole, reply = pcall(script)\nlocal lines = {}\n"
        "for line in pairs(T) do lines[#lines + 1] = line end\n"
        f'redis.log(redis.LOG_WARNING, "{MARK} " .. table.concat(lines, " "))\n'
        "if not whole then error(reply, 0) end\nreturn reply\n"
    )


def place(file: str, number: int, source: str) -> str:
    """The line that is run whenever this one may be: itself, or the statement it is part of."""
    lines, known = source.splitlines(), {line for line, _ in _statements(source)}

    def indent(line: int) -> int:
        return len(lines[line - 1]) - len(lines[line - 1].lstrip())

    found = next(line for line in range(number, 0, -1) if line in known and indent(line) <= indent(number))
    return f"{file}:{found}"


class Log:
    """What was written to the logs of a directory since it was asked last."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.read: dict[Path, int] = {}

    def lines(self) -> set[str]:
        found: set[str] = set()
        for path in self.directory.glob("*.log"):
            with path.open("rb") as file:
                file.seek(self.read.get(path, 0))
                text = file.read()
            self.read[path] = self.read.get(path, 0) + len(text)
            for line in text.decode(errors="replace").splitlines():
                found.update(line.partition(MARK)[2].split())
        return found
