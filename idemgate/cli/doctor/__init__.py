"""`idemgate doctor`: is this store fit for what is promised, and is what it holds sound?"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeVar

from idemgate.audit.server import Check
from idemgate.cli.arguments import add_namespace, add_url, url_of
from idemgate.cli.doctor.examine import Namespace, Told, examine_store
from idemgate.cli.doctor.showing import as_json, show
from idemgate.errors import InvalidArgument, StoreError
from idemgate.testing.audit import audit

__all__ = ["add_to"]

T = TypeVar("T")
DESCRIPTION = """\
Looks at the server's version, eviction, persistence, replicas, clock, memory and permissions, and at the namespace, and
says what is wrong and what mends it. Changes nothing, but for one record of its own that is gone after a second: the
proof that writing is permitted; with --read-only not even that. With --audit it reads everything in the namespace and
checks it, too."""
EPILOG = "exit codes: 0 = no error (there may be warnings), 1 = an error, or the store is away, 2 = wrong command line"


def add_to(commands: Any) -> None:
    """Add the command to a parser."""
    parser = commands.add_parser(
        "doctor",
        help="check a server, and with --audit what it holds",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_url(parser)
    add_namespace(parser)
    parser.add_argument("--durability", metavar="ASKED", help="try that of the gates: fsync, replicas, or how many")
    parser.add_argument("--audit", action="store_true", help="read and check the whole namespace")
    parser.add_argument(
        "--read-only", action="store_true", help="try nothing that writes: for a user who only looks (role auditor)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    parser.set_defaults(command=doctor)


def doctor(options: argparse.Namespace) -> int:
    """0 without errors, 1 with; what cannot be looked at is an error, beside what could be. Raises NotConfigured,
    InvalidArgument."""
    asked = options.durability
    if asked is not None and options.read_only:
        raise InvalidArgument("--durability", asked, "only a write shows it", "Leave out --read-only")
    asked = int(asked) if asked is not None and asked.isdecimal() else asked
    where = Namespace(url_of(options), options.namespace, asked)
    failures: list[Told] = []
    report = None
    if options.audit:  # before there is a record of the doctor's own
        report = _unless_away("audit", lambda: audit(where.url, where.name), failures)
    checks = _unless_away("store", lambda: examine_store(where, writes=not options.read_only), failures) or []
    checks += failures
    if options.json:
        print(as_json(where, checks, report))
    else:
        show(where, checks, report)
    failed = any(check.state == "error" for _, check in checks)
    return 1 if failed or (report is not None and report.errors) else 0


def _unless_away(name: str, look: Callable[[], T], failures: list[Told]) -> T | None:
    """Return the result of `look`. On a store error, add it to the failures under that name and return None."""
    try:
        return look()
    except StoreError as error:
        failures.append(("", Check(name, "error", str(error), "a server that answers, and the URL and login for it")))
        return None
