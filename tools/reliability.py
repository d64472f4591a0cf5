"""What the tests of faults found, as rows, and `docs/reliability.md`, which is made of them.

    python -m tools.reliability --n 1000        # runs every test that records a fault, then writes the document
    python -m tools.reliability --render        # writes it anew from docs/reliability.json
    python -m tools.reliability --update ROWS   # replaces the rows of the faults that a run recorded in this directory

Tests say what they did with the fixture `record_fault`. With the environment variable IDEMGATE_RELIABILITY each test
process appends its rows to a file of its own in that directory; `merged` makes one list of them.
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
    """Appends to the file of this process."""
    with (Path(os.environ[ROWS]) / f"{os.getpid()}.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@cache
def surroundings() -> Row:
    """What all rows of a process have in common."""
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
    """One row a fault and server: counts are sums, and what differs is listed once each."""
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
    """Puts these rows in the place of those of the same fault, and writes the page anew."""
    new = merged(rows)
    others = [row for row in json.loads(FIGURES.read_text()) if row["fault"] not in {one["fault"] for one in new}]
    _write([*others, *new])


def _write(rows: Iterable[Row]) -> None:
    ordered = sorted(rows, key=lambda row: (row["test"], row["fault"], row["server"]))
    FIGURES.write_text(json.dumps(ordered, indent=1) + "\n")
    PAGE.write_text(document(ordered))


# -- the document -----------------------------------------------------------------------------------------------------


def document(rows: Sequence[Row]) -> str:
    """`docs/reliability.md`. Every figure of it comes from the rows."""
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
"""Of a row, by the file of its test; the first that fits."""


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
<!-- Made by `python -m tools.reliability` out of docs/reliability.json. Do not edit: run it. -->
# Reliability

What was broken on purpose, how often, and how often a [promise](promises.md) did not hold. A program makes this page
of what the tests recorded at the commits that are named here. A zero (violations, `lost`, `half states`, `stale
writes`) is what a test asserts and not what it counted: had there been one, the test had failed, and its row would say
so. Only the rows of changes to the code count violations; only with `appendfsync everysec` is `lost` counted.

- N by kind: {kinds}. Violations: {violations}; failed tests: {failed}.
- Servers: {server}. redis-py {redis_py}, parser {parser}, Python {python}. Commit {commit}, {date}.

## Assumptions

The promises, and so these figures, hold while

- the primary does not forget acknowledged writes: no failover to a replica that lacks them, no power loss beyond the
  chosen fsync, no FLUSHALL, `maxmemory-policy noeviction`. Tests that break this on purpose say so in their row.
- the server's clock does not jump forward by more than what is left of a lease;
- the owner of a lease gets a heartbeat through once in that lease. If not, it loses the lease, which is counted, and
  the work may run again: that is P3, and no violation;
- keys are changed by these scripts only;
- duplicates come within the retention.

The guard cannot close the window between an effect elsewhere and the record of it. A process that is killed there
leaves work that runs again, with a higher fencing token. Rows that kill there count these second runs as a figure. A
key that is inserted in the transaction of the effect closes the window ([Databases](guides/databases.md)).

## Figures

*N* is how often the fault was injected, or how many histories, cases or inputs were checked. *Violations* are broken
promises. None in N bounds the rate at 3/N (95 %), if the N are independent; that is what *at most* says. "All there
are" means that the cases were enumerated: every byte, every await, every script.

In the rows of changes to the code itself, *N* is how many were tried, a violation is one that no test noticed and that
`tools/mutation/survivors.md` does not explain, and *equivalent* are those it explains. *Of* is how many there are: N is
a sample by the seed, of the scripts that every message goes through three times as dense. In `core`, changes of what
only words a text or says a type are left out. Each is judged by so many of the tests that come by it as take some
seconds (`--budget`), so that one that counts as unnoticed may be noticed by the rest.
They are run apart from the rest, and so may be of other commits.

| fault | promises | N | violations | at most | figures | seed | server |
|---|---|---|---|---|---|---|---|
{table}

## How to run

`poe test` and `poe resilience` together inject every fault with a small N. A large run:

```sh
poe reliability --n 1000          # about that many of each fault; rewrites this page and docs/reliability.json
poe reliability --n 1000 -k wire  # only some, printed and not written
poe mutation --sample 600 --budget 12 --record         # changes of the scripts: their row of this page
poe mutation --core --sample 900 --budget 8 --record   # changes of idemgate/core, and its modules one by one
IDEMGATE_SOAK=10m pytest tests/resilience/test_soak.py -s   # all faults at random for ten minutes
```

`IDEMGATE_RELIABILITY=rows pytest tests/resilience/test_soak.py` records rows in the directory `rows`.
`python -m tools.reliability --update rows` then puts them into this page.

The seed of a row repeats its choices: `IDEMGATE_SEED=<seed>`. What the operating system and the network decide it
cannot repeat.
"""

# -- the command ------------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.reliability", description="What was broken, and what held.")
    parser.add_argument("--n", type=int, default=1000, help="about how many of each fault (default: %(default)s)")
    parser.add_argument("-k", help="only tests of such names; the document is printed and not written")
    parser.add_argument("--jobs", type=int, default=2, help="test processes (default: %(default)s)")
    parser.add_argument("--render", action="store_true", help="run nothing; write the document anew from its figures")
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
        mutants = [row for row in json.loads(FIGURES.read_text()) if row["test"] == "tools/mutation"]
        _write([*mutants, *rows])
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
