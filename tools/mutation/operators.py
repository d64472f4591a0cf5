"""What can be changed in a script: one small thing at a time, found by pattern, line by line."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

from idemgate import lua

__all__ = ["Mutant", "files", "mutants", "named", "sampled"]

T = TypeVar("T")

UNTRIED = ("store/", "subscribers/")
HOT = re.compile(
    r"guard/|dedup/|topics/(trigger|take|settle|settle_and_take|cancel)$"
    r"|topics/lib/slot/(take_messages|settle_deliveries)$"
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
    ("if true", r"(?<=\bif ).+(?= then$)", "true"),
    ("if false", r"(?<=\bif ).+(?= then$)", "false"),
    ("min", r"math\.min", "math.max"),
    ("max", r"math\.max", "math.min"),
    ("K.scheduled", r"\bK\.scheduled\b", "K.ready"),
    ("K.messages", r"\bK\.messages\b", "K.next"),
    ("K.next", r"\bK\.next\b", "K.messages"),
    ("K.inflight", r"\bK\.inflight\b", "K.messages"),
    ("call", r"^(?=\s*redis\.p?call\(.*\)$)\s*redis.*$", ""),
    ("call", r"^\s*(?!function\b)[a-z_]+\((?:[^()]|\([^()]*\))*\)$", ""),
    ("assign", r"^(?!\s*(?:local|return|if|for|while|elseif)\b)[\w.\[\], #+]+ = [^{}]+[^,{(]$", ""),
]
"""Name, what is found in a line of code, and what stands there instead."""
FUNCTION = re.compile(r"^( *)local function (\w+)")


class Mutant(NamedTuple):
    file: str
    line: int
    name: str
    """What names it in its file when lines come and go: `named`."""
    text: str
    was: str

    @property
    def change(self) -> str:
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
    return sorted(name for name in (*lua.names(), *lua.libraries()) if not name.startswith(UNTRIED))


def mutants(file: str) -> list[Mutant]:
    """All of a file; two rules that come to the same are one."""
    return [Mutant(file, line, name, text, was) for name, (line, text, was) in named(_changes(file))]


def named(found: Iterable[tuple[str, str, T]]) -> Iterator[tuple[str, T]]:
    """Name changes by function and operator, and by a number where a function has several of that operator."""
    found = list(found)
    several = Counter((function, operator) for function, operator, _ in found)
    seen = Counter[tuple[str, str]]()
    for function, operator, change in found:
        seen[function, operator] += 1
        number = f" {seen[function, operator]}" if several[function, operator] > 1 else ""
        yield f"`{function}` `{operator}`{number}", change


def _changes(file: str) -> Iterator[tuple[str, str, tuple[int, str, str]]]:
    """Yield the function, the operator and the line before and after each change."""
    found, functions = set[tuple[int, str]](), list[tuple[int, str]]()
    for number, line in enumerate(lua.source(file).splitlines(), 1):
        code = line.partition(" -- ")[0]
        if not code.strip() or code.lstrip().startswith("--"):
            continue
        indent = len(code) - len(code.lstrip())
        functions = [one for one in functions if one[0] < indent or code.strip().startswith("end")]
        for operator, pattern, instead in RULES:
            for match in re.finditer(pattern, code):
                changed = code[: match.start()] + instead + code[match.end() :]
                if changed != code and (number, changed) not in found:
                    found.add((number, changed))
                    name = ".".join(one for _, one in functions) or "-"
                    yield name, _exact(operator, code), (number, changed, code)
        if begun := FUNCTION.match(code):
            functions.append((len(begun[1]), begun[2]))


def _exact(operator: str, code: str) -> str:
    """Name what is called or assigned, too."""
    if operator == "call":
        return "call " + (re.findall(r'"([A-Z]+)"', code) or re.findall(r"\w+", code))[0]
    return f"assign {code.partition(' = ')[0].strip()}" if operator == "assign" else operator


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
