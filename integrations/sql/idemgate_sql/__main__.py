"""Print the tables of an inbox and an outbox: `python -m idemgate_sql ddl postgresql`."""

from __future__ import annotations

import argparse
import sys

from idemgate import InvalidArgument
from idemgate_sql.schema import build_migration, ddl


def main(words: list[str] | None = None) -> int:
    """Print what the command line asks for. Return the exit code."""
    options = _parser().parse_args(words)
    build = ddl if options.form == "ddl" else build_migration
    try:
        print(build(options.dialect, options.table), end="")  # noqa: T201 - this is the command
    except InvalidArgument as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m idemgate_sql", description=__doc__)
    parser.add_argument("form", choices=("ddl", "alembic"), help="plain SQL, or the functions of an Alembic revision")
    parser.add_argument("dialect", choices=("postgresql", "sqlite"))
    parser.add_argument("--table", default="idemgate", metavar="PREFIX", help="prefix of the names (default: idemgate)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
