"""What can be changed in a script: one small thing at a time, found by pattern, line by line."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NamedTuple

from idemgate import lua

__all__ = ["Mutant", "files", "mutants", "sampled"]

FOLDER = Path(lua.__file__).parent
ROOMS = ("guard", "dedup", "topics", "reshard", "members", "lib")
HOT = re.compile(
    r"guard/|dedup/|topics/(trigger|take|settle|settle_and_take|cancel)$|lib/slot/(take_messages|read_due_batch|write_batch|settle_deliveries)$"
)
"""What every message goes through: thrice as densely sampled, and judged first."""
RULES: list[tuple[str, str, str]] = [
    ("==", r" == ", " ~= "),
    ("~=", r" ~= ", " == "),
    ("<=", r" <= ", " < "),
    ("<", r" < ", " <= "),
    (">=", r" >= ", " > "),
    (">", r" > ", " >= "),
    ("+", r" \+ ", " - "),
    ("-", r" - ", " + "),
    ("*", r" \* ", " / "),
    ("+1", r" \+ 1\b", ""),
    ("-1", r" - 1\b", ""),
    ("and", r" and ", " or "),
    ("or", r" or ", " and "),
    ("not", r"\bnot ", ""),
    ("0", r"(?<![\w.\"])0(?![\w.\"x])", "1"),
    ("1", r"(?<![\w.\"%\[\\])1(?![\w.\"%\]])", "0"),
    ("true", r"\btrue\b", "false"),
    ("false", r"\bfalse\b", "true"),
    ("if", r"(?<=\bif ).+(?= then$)", "true"),
    ("if not", r"(?<=\bif ).+(?= then$)", "false"),
    ("min", r"math\.min", "math.max"),
    ("max", r"math\.max", "math.min"),
    ("key", r"\bK\.scheduled\b", "K.ready"),
    ("key", r"\bK\.messages\b", "K.next"),
    ("key", r"\bK\.next\b", "K.messages"),
    ("key", r"\bK\.inflight\b", "K.messages"),
    ("call", r"^(?=\s*redis\.p?call\(.*\)$)\s*redis.*$", ""),
    ("call", r"^\s*(?!function\b)[a-z_]+\((?:[^()]|\([^()]*\))*\)$", ""),
    ("assign", r"^(?!\s*(?:local|return|if|for|while|elseif)\b)[\w.\[\], #+]+ = [^{}]+[^,{(]$", ""),
]
"""Name, what is found in a line of code, and what stands there instead."""


class Mutant(NamedTuple):
    file: str
    line: int
    rule: str
    text: str
    was: str

    @property
    def change(self) -> str:
        """What names it even when lines above it come and go."""
        return f"{self.was.strip()} -> {self.text.strip() or '(nothing)'}"

    @property
    def source(self) -> str:
        """The file, changed."""
        lines = lua.source(self.file).splitlines()
        lines[self.line - 1] = self.text
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.change}"


def files() -> list[str]:
    return sorted(
        path.relative_to(FOLDER).with_suffix("").as_posix() for room in ROOMS for path in (FOLDER / room).rglob("*.lua")
    )


def mutants(file: str) -> Iterator[Mutant]:
    """All of a file; two rules that come to the same are one."""
    found: set[tuple[int, str]] = set()
    for number, line in enumerate(lua.source(file).splitlines(), 1):
        code = line.partition(" -- ")[0]
        if code.lstrip().startswith("--"):
            continue
        for rule, pattern, instead in RULES:
            for match in re.finditer(pattern, code):
                changed = code[: match.start()] + instead + code[match.end() :]
                if changed != code and (number, changed) not in found:
                    found.add((number, changed))
                    yield Mutant(file, number, rule, changed, code)


def sampled(found: Sequence[Mutant], n: int, seed: int) -> list[Mutant]:
    """`n` of them at random: of each file its share, three times as large on the hot path, which comes first; less than
    `n` where a file has less than its share."""
    drawn, by_file = random.Random(seed), dict[str, list[Mutant]]()
    for one in found:
        by_file.setdefault(one.file, []).append(one)
    weights = {file: len(own) * (3 if HOT.match(file) else 1) for file, own in by_file.items()}
    share, files = n / sum(weights.values()), drawn.sample([*by_file], len(by_file))
    # Rounded is how many there are up to a file, so that parts of one come to be one somewhere.
    ends = [0, *(math.floor(end * share + 0.5) for end in accumulate(weights[file] for file in files))]
    shares = {file: end - begin for file, (begin, end) in zip(files, pairwise(ends), strict=True)}
    chosen = [one for file, own in by_file.items() for one in drawn.sample(own, min(shares[file], len(own)))]
    drawn.shuffle(chosen)
    return sorted(chosen, key=lambda one: not HOT.match(one.file))
