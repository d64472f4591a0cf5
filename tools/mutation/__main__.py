"""Make small changes to the code, one at a time, and list the changes that no test notices.

    poe mutation --sample 400 --seed 1          400 mutants of the scripts, spread over their files
    poe mutation --all                          all mutants of the scripts
    poe mutation --only topics/take:120         the mutants of a line, or of a file
    poe mutation --core --sample 400            mutants of the pure Python modules, without those of messages
    poe mutation --names topics/take            what names the mutants of a file

A mutant that survives needs a test, or a reason in `tools/mutation/survivors.md`. Survivors without a reason are
printed, and the exit status is 1. `--record` writes the figures into docs/reliability.md.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from idemgate.store.embedded.server import start
from tools import reliability
from tools.mutation import edits, judging, operators
from tools.mutation.core import Modules
from tools.mutation.judging import Scripts

SURVIVORS = Path(__file__).parent / "survivors.md"


class Tried(NamedTuple):
    """A mutant and its outcome: killed, timeout, survived or discarded."""

    file: str
    name: str
    outcome: str
    told: str


def explained() -> dict[tuple[str, str], str]:
    """Return the reasons of survivors.md by file and name of a mutant."""
    found, file = dict[tuple[str, str], str](), ""
    for line in SURVIVORS.read_text().splitlines():
        if line.startswith("## "):
            file = line.removeprefix("## ").strip("`")
        elif line.startswith("- "):
            name, _, reason = line.removeprefix("- ").partition(": ")
            found[file, name] = reason
    return found


def tried(options: argparse.Namespace) -> tuple[list[Tried], int]:
    judge, every = (Modules, _edits()) if options.core else (Scripts, _mutants())
    found = [one for one in every if not options.only or any(_under(str(one), only) for only in options.only)]
    if options.sample:
        found = operators.sampled(found, options.sample, options.seed)
    print(f"{len(found)} of {len(every)} mutants, seed {options.seed}", flush=True)
    began, known = time.monotonic(), _known(options.resume)
    former = {one: known[str(one)] for one in found if str(one) in known}

    def say(one: Any, verdict: judging.Verdict) -> None:
        if options.verbose or verdict.outcome != "killed":
            print(f"{time.monotonic() - began:.0f} s: {verdict.outcome} {one} {verdict.by}", flush=True)
        if options.resume:
            with options.resume.open("a") as file:
                file.write(json.dumps([str(one), *verdict]) + "\n")

    rest = [one for one in found if one not in former or former[one].outcome != "killed"]
    made = judge(rest, options.jobs, options.budget, options.minutes, say)
    if rest and options.minutes > 0:
        judging.judged(made)
    verdicts = former | made.verdicts
    return [Tried(one.file, one.name, verdict.outcome, str(one)) for one, verdict in verdicts.items()], len(every)


def _mutants() -> list[Any]:
    return [one for file in operators.files() for one in operators.mutants(file)]


def _edits() -> list[Any]:
    return [one for file in edits.files() for one in edits.edits(file)]


def _all() -> list[Any]:
    return [*_mutants(), *_edits()]


def _known(file: Path | None) -> dict[str, judging.Verdict]:
    """Return the last verdict on each mutant that earlier runs wrote into this file, by its name."""
    lines = file.read_text().splitlines() if file and file.exists() else []
    return {told: judging.Verdict(outcome, by) for told, outcome, by in map(json.loads, lines)}


def _under(told: str, only: str) -> bool:
    return told.startswith((f"{only}:", f"{only} "))


def summary(found: Iterable[Tried], known: Mapping[tuple[str, str], str], every: int) -> dict[str, int]:
    """Return the figures of a run. Equivalent mutants survived and have a reason."""
    count = Counter(
        "equivalent" if one.outcome == "survived" and (one.file, one.name) in known else one.outcome for one in found
    )
    return {name: count[name] for name in ("killed", "timeout", "equivalent", "survived", "discarded")} | {"of": every}


def record(fault: str, figures: Mapping[str, int], seed: int) -> None:
    """Write a row of docs/reliability.md. Discarded mutants do not count."""
    with start() as server:
        used = reliability.server_of(server.url)
    judged = sum(figures[name] for name in ("killed", "timeout", "equivalent", "survived"))
    row = {
        "fault": fault, "test": "tools/mutation", "n": judged, "promises": [], "violations": figures["survived"],
        "exhaustive": judged + figures["discarded"] == figures["of"], "seed": seed, "server": used,
        "figures": {name: value for name, value in figures.items() if value and name != "survived"}, "passed": True,
    }  # fmt: skip
    reliability.replace([row | reliability.surroundings()])


def by_file(found: Iterable[Tried], known: Mapping[tuple[str, str], str]) -> Iterator[str]:
    """Yield a line for each file: how many of its mutants without a reason the tests noticed."""
    files = defaultdict[str, list[bool]](list)
    for one in found:
        if one.outcome != "discarded" and (one.outcome != "survived" or (one.file, one.name) not in known):
            files[one.file].append(one.outcome != "survived")
    for file, noticed in sorted(files.items()):
        yield f"{file:20}{sum(noticed):5} of {len(noticed):4} {100 * sum(noticed) / len(noticed):6.1f} %"


def main() -> int:
    options = _parser().parse_args()
    if options.names:
        print(*(f"{one.line}: {one.name}: {one.change}" for one in _all() if one.file == options.names), sep="\n")
        return 0
    found, every = tried(options)
    known = explained()
    figures = summary(found, known, every)
    print(*by_file(found, known), sep="\n")
    for one in found:
        if one.outcome == "survived" and (one.file, one.name) not in known:
            print(f"\nSURVIVED {one.told}\n- {one.name}: ")
        elif one.outcome == "killed" and (one.file, one.name) in known:
            print(f"\nKILLED although {SURVIVORS.name} has a reason: {one.told}\n- {one.name}")
    print(", ".join(f"{name} {value}" for name, value in figures.items()), f"(seed {options.seed})")
    if options.record:
        fault = "a pure module" if options.core else "a script"
        record(f"a change of one small thing in {fault}, not noticed by the tests", figures, options.seed)
    return 1 if figures["survived"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="poe mutation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    many = parser.add_mutually_exclusive_group(required=True)
    many.add_argument("--sample", type=int, default=0, metavar="N", help="try N mutants, chosen at random")
    many.add_argument("--all", action="store_true", help="try all mutants")
    many.add_argument("--only", action="append", metavar="FILE[:LINE]", help="try the mutants of a file or a line")
    many.add_argument("--names", metavar="FILE", help="list the names of the mutants of a file")
    parser.add_argument("--core", action="store_true", help="change the pure modules instead of the scripts")
    parser.add_argument("--seed", type=int, default=1, help="seed of the sample (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants tried at the same time (default: %(default)s)")
    parser.add_argument("--budget", type=float, default=0, metavar="SECONDS",
        help="run tests of this duration for a mutant; 0 = all tests that reach its line (default)")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=math.inf,
        help="start no mutant after this time; 0 = only sum up --resume")  # fmt: skip
    parser.add_argument("--resume", type=Path, metavar="FILE",
        help="append verdicts to this file, and skip the mutants that it lists as killed")  # fmt: skip
    parser.add_argument("--record", action="store_true", help="write the figures into docs/reliability.md")
    parser.add_argument("--verbose", action="store_true", help="print the test that killed each mutant")
    return parser


if __name__ == "__main__":
    sys.exit(main())
