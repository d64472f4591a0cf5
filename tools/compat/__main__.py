"""`python -m tools.compat`: the suite on every server, redis-py, Python, parser and protocol."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

from tools.compat import cells, environments, node, report, suite, wheels
from tools.compat.cells import Cell
from tools.compat.servers import SERVERS

AXES: dict[str, list[str]] = {
    "servers": list(SERVERS),
    "redis-py": cells.REDIS_PY,
    "python": cells.PYTHONS,
    "parser": cells.PARSERS,
    "protocol": cells.PROTOCOLS,
}
MORE = """\
Without a selection: a few combinations in which every value is met. With one: every combination of what is named, where
the other axes are those of %s. Servers are made once, environments each time, by uv. Results are kept in
~/.cache/idemgate-compatibility (IDEMGATE_COMPATIBILITY); docs/compatibility.md is written of all that are there.
"""


def main() -> int:
    words = _arguments()
    if words.report:
        report.write()
        return 0
    if words.node:
        green = _print_result(node.run(words.node))
        report.write(keep=True)
        return 0 if green else 1
    chosen = [getattr(words, name.replace("-", "_")) for name in AXES]
    some = cells.product(*chosen) if any(chosen) else cells.COVER
    folders = suite.QUICK if words.quick else suite.FOLDERS
    if not any(chosen):
        _try_wheels()
    red = [cell for cell in some if not _green(cell, folders, words.n)]
    report.write()
    return 1 if red else 0


def _green(cell: Cell, folders: list[str], workers: int) -> bool:
    print(cell.name, end=" ", flush=True)
    interpreter = environments.python(cell.python, cell.redis_py, cell.parser)
    return _print_result(suite.run(cell, interpreter, folders, workers))


def _print_result(result: dict[str, Any]) -> bool:
    told = ", ".join(f"{result[name]} {name}" for name in ("passed", "skipped", "failed") if name in result)
    print(f"{told or 'did not run'} ({result['seconds']} s)", *result.get("failures", []), sep="\n  ", flush=True)
    return result["code"] == 0


def _try_wheels() -> None:
    built = wheels.build(wheels.WHEELS)
    wheels.check_contents(built)
    for python in cells.PYTHONS:
        print(python, *wheels.try_on(python, built)[1], sep="\n  ", flush=True)


def _some(values: list[str], text: str) -> list[str]:
    named = text.split(",")
    if unknown := set(named) - set(values):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not of {', '.join(values)}")
    return named


def _arguments() -> argparse.Namespace:
    more = MORE % cells.BASE.name.replace("_", ", ")
    parser = argparse.ArgumentParser("python -m tools.compat", epilog=more)
    for name, values in AXES.items():
        some = partial(_some, values)
        parser.add_argument(f"--{name}", metavar="A,B", type=some, default=[], help=f"of {', '.join(values)}")
    parser.add_argument("--quick", action="store_true", help="the part of the suite that depends on them most")
    parser.add_argument("-n", type=int, default=2, help="test processes at once (default: 2)")
    parser.add_argument("--node", metavar="314", help="only this version of Python in Node, without a server")
    parser.add_argument("--report", action="store_true", help="only write docs/compatibility.md")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
