"""`python -m tools.night`: run incidents with seeds and print what was seen. It ends with 1 if anything failed."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from statistics import median

import tools.night
from tools.night.incidents import CALM, INCIDENTS
from tools.night.judging import Result, run

PROGRAMS = ("prometheus", "redis-cli", "bash")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=tools.night.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = [*CALM, *INCIDENTS]
    parser.add_argument(
        "--kinds", type=_names, default=kinds, help=f"comma-separated; default: all, {', '.join(kinds)}"
    )
    parser.add_argument("--seeds", type=_seeds, default=[0], help="such as 3 or 0-9 (default: 0)")
    parser.add_argument("--quiet", metavar="MINUTES", type=float, default=1, help="the quiet time (default: 1)")
    parser.add_argument(
        "--jobs", type=int, default=3 * (os.cpu_count() or 1), help="systems at once (default: 3 a core)"
    )
    options = parser.parse_args()
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        parser.error(f"missing programs: {', '.join(missing)} (.ci/brokers installs them)")
    # The calm ones take the longest, and need no other seed.
    todo = [
        (kind, seed) for seed in options.seeds for kind in options.kinds if kind != "quiet" or seed == options.seeds[0]
    ]
    results = list[Result]()
    spawning = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, spawning, max_tasks_per_child=1) as pool:
        for done in as_completed([pool.submit(run, kind, seed, minutes=options.quiet) for kind, seed in todo]):
            results.append(done.result())
            print(_line(results[-1]), flush=True)
    print("\n".join(_summary(results)))
    return any(one.problem for one in results)


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := {*names} - {*INCIDENTS, *CALM}:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return names


def _seeds(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return [*range(int(first), int(last or first) + 1)]


def _line(result: Result) -> str:
    lags = "".join(f", {name} {_list(found)} s" for name, found in result.lags.items() if found)
    gone = f", gone {_list(result.gone)} s" if result.gone else ""
    verdict = f"FAILED: {result.problem} (logs: {result.folder})" if result.problem else "ok"
    return f"{result.name} {result.seed}: {verdict}{lags}{gone}, took {result.seconds:.0f} s"


def _list(numbers: Iterable[float]) -> str:
    return "/".join(f"{one:.0f}" for one in numbers)


def _summary(results: Sequence[Result]) -> Iterable[str]:
    """Yield a row for each kind with its runs and failures and the median and largest lag after the threshold."""
    by_kind = defaultdict[str, list[Result]](list)
    for one in results:
        by_kind[one.name].append(one)
    yield f"\n{'kind':30} {'runs':>5} {'failed':>6}  {'status, s':>12} {'alert, s':>12}   (median / largest)"
    for name, found in by_kind.items():
        cells = [_spread([lag for one in found for lag in one.lags[which]]) for which in ("status", "alert")]
        yield f"{name:30} {len(found):5} {sum(bool(one.problem) for one in found):6}  {cells[0]:>12} {cells[1]:>12}"
    commands = sum(len(one.commands) for one in results)
    failed = sum(bool(one.problem) for one in results)
    yield f"{len(results)} runs, {failed} failed, {commands} printed commands ran"


def _spread(lags: Sequence[float]) -> str:
    return f"{median(lags):.0f} / {max(lags):.0f}" if lags else "-"


if __name__ == "__main__":
    sys.exit(main())
