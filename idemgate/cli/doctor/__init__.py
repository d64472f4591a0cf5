"""`idemgate doctor`: check a server, its settings and the data of a namespace."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeVar

from idemgate.audit.server import Check
from idemgate.cli.arguments import add_namespace, add_url, url_of
from idemgate.cli.doctor.examine import Namespace, ServerCheck, examine_store
from idemgate.cli.doctor.showing import as_json, show
from idemgate.errors import InvalidArgument, StoreError
from idemgate.testing.audit import audit

__all__ = ["add_to"]

T = TypeVar("T")
DESCRIPTION = """\
Check the server (version, eviction, persistence, replicas, clock, memory, permissions) and the namespace. Print each
problem and its fix. To test write permission, doctor writes one record that expires after a second. With --read-only
it writes nothing. With --audit it also reads and checks all data of the namespace."""
EPILOG = "exit codes: 0 = nothing critical, perhaps warnings; 1 = critical, or no store answers; 2 = invalid arguments"


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.description = DESCRIPTION
    parser.epilog = EPILOG
    add_url(parser)
    add_namespace(parser)
    parser.add_argument(
        "--durability", metavar="LEVEL", help="test this durability of a gate: fsync, replicas, or a number"
    )
    parser.add_argument("--audit", action="store_true", help="read and check the whole namespace")
    parser.add_argument("--read-only", action="store_true", help="write nothing: for a user with the role auditor")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(command=doctor)


def doctor(options: argparse.Namespace) -> int:
    """Return 1 if something is critical, or a check cannot run, else 0. Raises NotConfigured, InvalidArgument."""
    asked = options.durability
    if asked is not None and options.read_only:
        raise InvalidArgument("--durability", asked, "only a write shows it", "Leave out --read-only")
    asked = int(asked) if asked is not None and asked.isdecimal() else asked
    where = Namespace(url_of(options), options.namespace, asked)
    failures: list[ServerCheck] = []
    report = None
    if options.audit:  # before there is a record of the doctor's own
        report = _unless_away("audit", lambda: audit(where.url, where.name), failures)
    checks = _unless_away("store", lambda: examine_store(where, writes=not options.read_only), failures) or []
    checks += failures
    if options.json:
        print(as_json(where, checks, report))
    else:
        show(where, checks, report)
    failed = any(check.state == "critical" for _, check in checks)
    return 1 if failed or (report is not None and report.critical) else 0


def _unless_away(name: str, look: Callable[[], T], failures: list[ServerCheck]) -> T | None:
    """Return the result of `look`. On a store error, add it to the failures under that name and return None."""
    try:
        return look()
    except StoreError as error:
        failures.append(
            ("", Check(name, "critical", str(error), "a server that answers, and the URL and login for it"))
        )
        return None
