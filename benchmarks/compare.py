"""Compare this checkout with another one: `python -m benchmarks.compare OTHER PART ...`.

Both checkouts run each part in turns, with the same environment, so that they meet the same load of the machine. The
output is one table. For each figure it has the medians of both and two ratios, this checkout by the other.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.machine import ROOT
from benchmarks.report.figures import count, table

__all__ = ["main"]

FIGURES = ("rate", "client_us", "server_us", "script_us", "ms", "p50", "p99")
"""Of a rate more is better, of the others less. `bytes` is compared for memory only: elsewhere it is noise."""
Key = tuple[str, str, str, str]
"""Part, contestant, step and figure."""


def main() -> None:
    words = _arguments()
    here: dict[Key, list[float]] = {}
    other: dict[Key, list[float]] = {}
    with TemporaryDirectory() as folder:
        for number in range(words.rounds):
            sides = [(ROOT, here), (words.other.resolve(), other)]
            for part in words.parts:
                for checkout, found in sides if number % 2 else reversed(sides):
                    for key, figures in _measure(checkout, part, Path(folder), words.full):
                        found.setdefault(key, []).extend(figures)
            print(f"round {number + 1} of {words.rounds}", file=sys.stderr, flush=True)
    print(_table(here, other))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.compare", description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="a checkout of another commit; its benchmarks measure it")
    parser.add_argument("parts", nargs="+", help="parts of the benchmark: guard, scheduler, merging, ...")
    parser.add_argument("--rounds", type=int, default=5, help="how often each checkout runs each part; default: 5")
    parser.add_argument("--full", action="store_true", help="do as much as `python -m benchmarks PART`, not a tenth")
    return parser.parse_args()


def _measure(checkout: Path, part: str, folder: Path, full: bool) -> Iterator[tuple[Key, list[float]]]:
    """Run a part in a checkout, on a tenth of the operations or on all. Yield its figures.

    Those of peers, which are the same programs on both sides, show the noise.
    """
    command = [sys.executable, "-m", "benchmarks", part, *([] if full else ["--quick"])]
    packages = [checkout, *sorted((checkout / "integrations").iterdir())]
    path = os.pathsep.join(map(str, packages))  # before the packages that this environment has installed
    env = {**os.environ, "IDEMGATE_BENCHMARKS": str(folder), "PYTHONPATH": path}
    done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{part} failed in {checkout}:\n{done.stderr}")
    for row in json.loads((folder / "results" / f"{part}.json").read_text())["rows"]:
        for figure in ("bytes",) if part == "memory" else FIGURES:
            if (values := row.get(figure)) and all(values):
                yield (part, row["who"], row["step"], figure), values


def _table(here: dict[Key, list[float]], other: dict[Key, list[float]]) -> str:
    head = ["part", "who", "step", "figure", "this", "other", "medians", "bests", "N"]
    return table(head, [_compare(key, here[key], other[key]) for key in sorted(here.keys() & other.keys())])


def _compare(key: Key, this: list[float], that: list[float]) -> list[str]:
    """Return a row: the medians of both, and the ratios of the medians and of the best figures.

    Load from outside makes figures worse, never better. So a difference counts only if the best figures have it, too.
    """
    best = max if key[3] == "rate" else min
    ratios = median(this) / median(that), best(this) / best(that)
    worse = max(ratios) < 0.95 if key[3] == "rate" else min(ratios) > 1.05
    return [
        *key,
        count(median(this)),
        count(median(that)),
        *(f"{ratio:.2f}" for ratio in ratios),
        f"{len(this)}" + (" worse" if worse else ""),
    ]


if __name__ == "__main__":
    main()
