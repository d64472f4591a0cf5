"""Changes the scripts one small thing at a time, and says which changes no test notices.

    python tests/mutation/mutate.py --sample 60 --seed 1          any of all mutants
    python tests/mutation/mutate.py --only topic/reschedule       all of one file

A mutant runs in a copy of the checkout, against the tests that reach its file, until the first one fails or time is up
(which is a kill, too). What survives is explained in `survivors.md`, or gets a test.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LUA = Path("idemgate/lua")
RULES: list[tuple[str, str, str]] = [
    ("==", r" == ", " ~= "),
    ("~=", r" ~= ", " == "),
    ("<=", r" <= ", " < "),
    ("<", r" < ", " <= "),
    (">=", r" >= ", " > "),
    (">", r" > ", " >= "),
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
    ("key", r"\bK\.due\b", "K.ready"),
    ("key", r"\bK\.pending\b", "K.flight"),
    ("key", r"\bK\.flight\b", "K.pending"),
    ("drop", r"^(?=\s*redis\.call\(.*\)$)\s*redis.*$", ""),
    ("drop", r"^(?=\s*(?:place|vacate|advance|finish|unplace|hint|wake|count|fade|remember|rewrite)\()\s*.*$", ""),
]
"""Name, what is found in a line of code, and what stands there instead."""
TESTS = {
    "once": "guard/test_claims guard/test_mended guard/test_model guard/test_foreign",
    "members": "work/test_members",
    "topic": "topic/test_search topic/test_replays topic/test_groups topic/test_model topic/test_deliveries"
    " topic/test_dead topic/test_windows topic/test_priorities topic/test_limits topic/test_forwarding"
    " topic/test_partial topic/test_changes topic/test_reslot topic/test_registry",
}
"""By room; those that notice most come first."""
FIRST = {"topic": "slot", "once": "record", "members": "crew"}
"""Which scenes of `tests/lua/test_states.py` reach a room; these run first."""


class Mutant(NamedTuple):
    file: str
    line: int
    rule: str
    text: str
    was: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} [{self.rule}] {self.was.strip()} -> {self.text.strip() or '(nothing)'}"


def mutants(file: str) -> Iterator[Mutant]:
    for number, line in enumerate((ROOT / LUA / f"{file}.lua").read_text().splitlines(), 1):
        code = line.partition(" -- ")[0]
        if code.lstrip().startswith("--"):
            continue
        for rule, pattern, instead in RULES:
            for match in re.finditer(pattern, code):
                changed = code[: match.start()] + instead + code[match.end() :]
                if changed != code:
                    yield Mutant(file, number, rule, changed, code)


def rooms_of(file: str) -> list[str]:
    """The rooms whose scripts include a file, directly or not."""
    from idemgate import lua

    if not file.startswith("lib/"):
        return [file.partition("/")[0]]

    def reaches(name: str) -> bool:
        return any(one == file or reaches(one) for one in re.findall(r'@include "([^"]+)"', lua.source(name)))

    return sorted({name.partition("/")[0] for name in lua.names() if reaches(name)})


def noticed(mutant: Mutant, copy: Path, seconds: float) -> bool:
    """Whether a test fails, or does not end."""
    path = copy / LUA / f"{mutant.file}.lua"
    whole = path.read_text()
    lines = whole.splitlines()
    lines[mutant.line - 1] = mutant.text
    path.write_text("\n".join(lines) + "\n")
    try:
        return any(_fails(copy, room, seconds) for room in rooms_of(mutant.file))
    finally:
        path.write_text(whole)


def _fails(copy: Path, room: str, seconds: float) -> bool:
    env = os.environ | {"PYTHONPATH": str(copy), "IDEMGATE_DEPTH": "4", "IDEMGATE_STEPS": "2000"}
    base = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header"]
    states = ["tests/lua/test_states.py", "-k", f"({FIRST[room]}) and (first or late or garbage) and not valkey"]
    for tests in (
        ["tests/lua/test_contracts.py", "-k", "compiles"],
        [f"tests/{one}.py" for one in TESTS[room].split()],
        states,
    ):
        try:
            done = subprocess.run([*base, *tests], cwd=copy, env=env, capture_output=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return True
        if done.returncode not in (0, 5):
            return True
    return False


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--only", action="append", help="a file, such as topic/take or lib/place; may be repeated")
    asked.add_argument("--sample", type=int, default=0, help="so many mutants, at random (0: all)")
    asked.add_argument("--seed", type=int, default=1)
    asked.add_argument("--jobs", type=int, default=2)
    asked.add_argument("--seconds", type=float, default=240, help="after which a run of tests counts as failed")
    asked.add_argument(
        "--budget", type=float, default=0, help="seconds after which no further mutant is begun (0: none)"
    )
    given = asked.parse_args()
    files = given.only or sorted(
        str(path.relative_to(ROOT / LUA).with_suffix(""))
        for path in (ROOT / LUA).rglob("*.lua")
        if path.parent.name != "expiry"
    )
    found = [mutant for file in files for mutant in mutants(file)]
    if given.sample and given.sample < len(found):
        found = random.Random(given.seed).sample(found, given.sample)
    report(found, given.jobs, given.seconds, given.budget)


def report(found: list[Mutant], jobs: int, seconds: float, budget: float) -> None:
    import time

    began, copies, survivors, tried = time.monotonic(), Queue[Path](), list[Mutant](), 0
    with tempfile.TemporaryDirectory() as top:
        for job in range(jobs):
            copy = Path(top) / str(job)
            skipped = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", "node_modules")
            shutil.copytree(ROOT, copy, ignore=skipped)
            copies.put(copy)

        def judge(mutant: Mutant) -> bool | None:
            if budget and time.monotonic() - began > budget:
                return None
            copy = copies.get()
            try:
                return noticed(mutant, copy, seconds)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(jobs) as pool:
            for mutant, killed in zip(found, pool.map(judge, found), strict=True):
                tried += killed is not None
                if killed is False:
                    survivors.append(mutant)
                    print("SURVIVED", mutant, flush=True)
    print(f"{tried - len(survivors)} of {tried} mutants were noticed ({len(found) - tried} were not tried)")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
