"""Collect the rows that tests of faults record, and write `docs/reliability.md` from them.

    python -m tools.reliability --n 1000        # runs every test that records a fault, then writes the document
    python -m tools.reliability --render        # writes the page from docs/reliability.json
    python -m tools.reliability --update ROWS   # replaces the rows of the faults that a run recorded in this directory

Tests record rows with the fixture `record_fault`. With the environment variable IDEMGATE_RELIABILITY each test
process appends its rows to its file in that directory, and `merged` combines them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import redis

__all__ = ["document", "merged", "note", "replace", "server_of", "surroundings", "wanted"]

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
FIGURES = ROOT / "docs" / "reliability.json"
ROWS = "IDEMGATE_RELIABILITY"
"""The environment variable that names the directory of rows."""
Row = dict[str, Any]

# -- recording --------------------------------------------------------------------------------------------------------


def wanted() -> bool:
    return ROWS in os.environ


def note(rows: Iterable[Row]) -> None:
    """Append rows to the file of this process."""
    with (Path(os.environ[ROWS]) / f"{os.getpid()}.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@cache
def surroundings() -> Row:
    """Return the facts that all rows of a process share."""
    return {
        "redis-py": redis.__version__,
        "parser": f"hiredis {version('hiredis')}" if _has_hiredis() else "pure",
        "python": platform.python_version(),
        "commit": _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain", "-uno") else ""),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _has_hiredis() -> bool:
    try:
        import hiredis  # noqa: F401
    except ImportError:
        return False
    return True


def _git(*words: str) -> str:
    try:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


@cache
def server_of(url: str) -> str:
    """Kind and version: "valkey 9.1.0"."""
    with redis.Redis.from_url(url, decode_responses=True) as client:
        found: dict[str, str] = client.info("server")  # type: ignore[assignment]
    if "valkey_version" in found:
        return f"valkey {found['valkey_version']}"
    return f"redis {found['redis_version']}"


# -- merging ----------------------------------------------------------------------------------------------------------


def merged(rows: Iterable[Row]) -> list[Row]:
    """Return one row for each fault and server. Counts are summed, and different texts listed once."""
    found: dict[tuple[str, str], Row] = {}
    for row in rows:
        known = found.setdefault((row["fault"], row["server"]), {"n": 0, "violations": 0, "figures": {}, "seeds": []})
        known |= {name: value for name, value in row.items() if name not in (*known, "seed")}
        known["promises"] = sorted({*known["promises"], *row["promises"]}, key=lambda one: int(one[1:]))
        known["passed"] &= row["passed"]
        known["exhaustive"] &= row["exhaustive"]
        known["n"] += row["n"]
        known["violations"] += row["violations"]
        for name, value in row["figures"].items():
            known["figures"][name] = _together(known["figures"].get(name), value)
        if row["seed"] is not None and row["seed"] not in known["seeds"]:
            known["seeds"].append(row["seed"])
    return sorted(found.values(), key=lambda row: (row["test"], row["fault"], row["server"]))


def _together(known: Any, value: Any) -> Any:
    if known is None or isinstance(value, int | float):
        return value if known is None else known + value
    return known if value in known.split(", ") else f"{known}, {value}"


def read(directory: Path) -> list[Row]:
    """Return the rows that test processes recorded in a directory."""
    lines = [line for file in sorted(directory.glob("*.jsonl")) for line in file.read_text().splitlines()]
    return [json.loads(line) for line in lines]


def replace(rows: Iterable[Row]) -> None:
    """Replace the rows of the same faults, and write the page."""
    new = merged(rows)
    others = [row for row in json.loads(FIGURES.read_text()) if row["fault"] not in {one["fault"] for one in new}]
    _write([*others, *new])


def _write(rows: Iterable[Row]) -> None:
    ordered = sorted(rows, key=lambda row: (row["test"], row["fault"], row["server"]))
    FIGURES.write_text(json.dumps(ordered, indent=1) + "\n")
    PAGE.write_text(document(ordered))


# -- the document -----------------------------------------------------------------------------------------------------


def document(rows: Sequence[Row]) -> str:
    """Return the text of `docs/reliability.md`, with all figures from the rows."""
    table = [_line(row) for row in rows]
    facts = {
        name: ", ".join(sorted({row[name] for row in rows}))
        for name in ("server", "redis-py", "parser", "python", "commit", "date")
    }
    return _PAGE.format(
        table="\n".join(table),
        kinds="; ".join(f"{n:,} {kind}" for kind, n in _by_kind(rows).items()),
        violations=sum(row["violations"] for row in rows),
        failed=sum(not row["passed"] for row in rows),
        **{name.replace("-", "_"): value for name, value in facts.items()},
    )


_KINDS = {
    r"tools/mutation": "changes to the code",
    r"tests/scripts/": "cases of single scripts",
    r".*/test_(model|search)\.py": "calls and states of models",
    r"tests/security/test_injection\.py": "made-up names",
    r"tests/security/test_fuzz\.py": "made-up bytes given to decoders",
    r"tests/security/": "calls beyond an access list, and rights taken away",
    r"": "faults injected into running systems, or histories of them",
}
"""The kind of a row by the file of its test: the first pattern that matches."""


def _by_kind(rows: Iterable[Row]) -> dict[str, int]:
    found = dict.fromkeys(reversed(_KINDS.values()), 0)
    for row in rows:
        kind = next(name for pattern, name in _KINDS.items() if re.match(pattern, row["test"]))
        found[kind] += row["n"]
    return {kind: n for kind, n in found.items() if n}


def _line(row: Row) -> str:
    bound = _bound(row) if row["passed"] and not row["violations"] else ""
    result = f"{row['violations']}" if row["passed"] else f"**{row['violations']}, test failed**"
    figures = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in row["figures"].items())
    seeds = ", ".join(map(str, row["seeds"][:2])) + (f" and {len(row['seeds']) - 2} more" if row["seeds"][2:] else "")
    cells = (row["fault"], " ".join(row["promises"]), f"{row['n']:,}", result, bound, figures, seeds, row["server"])
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"


def _bound(row: Row) -> str:
    return "all there are" if row["exhaustive"] else f"{3 / row['n']:.2g}" if row["n"] > 3 else ""


_PAGE = """\
<!-- Written by `python -m tools.reliability` from docs/reliability.json. Do not edit: run it. -->
# Reliability

This page lists the faults that tests inject, how often, and how often a [promise](promises.md) was broken. A program
writes it from the records of the tests, at the commits named here.

A zero (violations, `lost`, `half states`, `stale writes`) is an assertion of the test. If it did not hold, the test
would fail, and its row would say so. Two exceptions count instead of asserting: violations in the rows of changes to
the code, and `lost` with `appendfsync everysec`.

- N by kind: {kinds}. Violations: {violations}; failed tests: {failed}.
- Servers: {server}. redis-py {redis_py}, parser {parser}, Python {python}. Commit {commit}, {date}.

## Assumptions

The promises and these figures hold under these assumptions. Tests that break one on purpose say so in their row.

- The primary does not lose acknowledged writes: no failover to a replica that lacks them, no power loss beyond the
  fsync policy, no FLUSHALL, `maxmemory-policy noeviction`.
- The server's clock does not jump forward by more than the rest of a lease.
- A heartbeat of the owner reaches the server once in each lease. Otherwise the owner loses the lease, which is
  counted, and the work may run again. That is P3 and no violation.
- Only these scripts change the keys.
- Duplicates arrive within the retention.

The guard cannot close the window between an effect in another system and its record. If a process is killed there,
the work runs again with a higher fencing token. The rows of such kills count these second runs. A key that is
inserted in the transaction of the effect closes the window ([Databases](guides/databases.md)).

## Figures

*N* is the number of injected faults, or of checked histories, cases or inputs. *Violations* are broken promises.
Without a violation in N independent tries, the rate is at most 3/N (95 %): the column *at most*. "All there are"
means that all cases were tried: every byte, every await, every script.

In the rows of changes to the code, *N* is the number of tried changes. A violation is a change that no test notices
and that `tools/mutation/survivors.md` does not explain. *Equivalent* counts the explained ones. *Of* is the number of
possible changes, from which the seed draws a sample. The scripts of every message are sampled three times as often.
In `core`, changes of texts and type annotations are left out. Tests that reach a change run for some seconds
(`--budget`), so the whole suite may notice more. These runs are separate, and may be of other commits.

| fault | promises | N | violations | at most | figures | seed | server |
|---|---|---|---|---|---|---|---|
{table}

## Run it again

`poe test` and `poe resilience` together inject every fault with a small N. For a large run:

```sh
poe reliability --n 1000          # about that many of each fault; writes this page and docs/reliability.json
poe reliability --n 1000 -k wire  # only some; prints them
poe mutation --sample 600 --budget 12 --record         # changes of the scripts: their row of this page
poe mutation --core --sample 900 --budget 8 --record   # changes of idemgate/core, and its modules one by one
IDEMGATE_SOAK=10m pytest tests/resilience/test_soak.py -s   # all faults at random for ten minutes
```

`IDEMGATE_RELIABILITY=rows pytest tests/resilience/test_soak.py` records rows in the directory `rows`. `python -m
tools.reliability --update rows` then replaces them in this page.

`IDEMGATE_SEED=<seed>` repeats the choices of a row. It does not repeat the timing of the operating system and the
network.
"""

# -- the command ------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.reliability", description="Inject faults; write the page.")
    parser.add_argument("--n", type=int, default=1000, help="about how many of each fault (default: %(default)s)")
    parser.add_argument("-k", help="only tests of such names; the page is printed and not written")
    parser.add_argument("--jobs", type=int, default=2, help="test processes (default: %(default)s)")
    parser.add_argument("--render", action="store_true", help="run nothing; write the page from its figures")
    parser.add_argument("--update", type=Path, metavar="ROWS", help="run nothing; replace the rows of the same faults")
    options = parser.parse_args()
    if options.update:
        replace(read(options.update))
        return 0
    if options.render:
        PAGE.write_text(document(json.loads(FIGURES.read_text())))
        return 0
    with tempfile.TemporaryDirectory() as directory:
        code = _run(options, directory)
        rows = merged(read(Path(directory)))
    if options.k:
        print(document(rows))
    else:
        others = [row for row in json.loads(FIGURES.read_text()) if not row["test"].startswith("tests/")]
        _write([*others, *rows])
    return code


def _run(options: argparse.Namespace, directory: str) -> int:
    many = {"IDEMGATE_FAULTS": options.n, "IDEMGATE_KILLS": options.n, "IDEMGATE_STEPS": max(11_000, 50 * options.n)}
    words = ["-n", str(options.jobs), "--dist", "worksteal", "-q", "tests", *(["-k", options.k] if options.k else [])]
    soak = f"{max(10, 6 * options.n // 10)}s"  # ten minutes for a thousand
    more = {"IDEMGATE_GARBAGE": "1", "IDEMGATE_LEAST": "1", "IDEMGATE_SOAK": soak}
    environment = more | os.environ | {name: str(value) for name, value in many.items()} | {ROWS: directory}
    return subprocess.run([sys.executable, "-m", "pytest", *words], cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
