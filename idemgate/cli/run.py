"""`idemgate run MODULE:GATE`: a worker as a program."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import sys
import threading
from importlib.util import find_spec
from typing import Any

from idemgate.cli import logs
from idemgate.cli.arguments import count, span
from idemgate.errors import InvalidArgument
from idemgate.gate import Gate
from idemgate.membership.member import Membership

__all__ = ["add_to", "gate_at"]

DESCRIPTION = """\
Runs the handlers of a gate's topics, and its subscribers, until SIGTERM or Ctrl-C.
The first signal lets running handlers finish, for --grace; a second one does not wait. What did not finish is
delivered again, here or elsewhere. Modules are found in the current directory, and where Python finds them."""


def add_to(commands: Any) -> None:
    """Adds the command to argparse's."""
    parser = commands.add_parser(
        "run",
        help="run the handlers and subscribers of a gate",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("gate", metavar="MODULE:GATE", help="where the gate is, such as shop.app:gate")
    parser.add_argument(
        "--topic", metavar="T", dest="topics", action="append", default=[], help="only this topic; may be repeated"
    )
    parser.add_argument("--concurrency", metavar="N", type=count, default=32, help="handlers at once (default: 32)")
    parser.add_argument(
        "--grace", metavar="TIME", type=span, default=30.0, help="time to finish, when stopped (default: 30s)"
    )
    parser.add_argument(
        "--members",
        metavar="WHERE",
        help="divide the topics' slots with the other workers: redis, or MODULE:NAME of a Membership of your own",
    )
    parser.set_defaults(command=work)


def work(options: argparse.Namespace) -> int:
    """0 after a graceful stop, 1 when handlers had to be cut short."""
    gate = gate_at(options.gate)
    logs.configure()
    members = options.members == "redis" or membership_at(options.members)
    gate.run(*options.topics, concurrency=options.concurrency, grace=options.grace, members=members)
    code = 1 if gate.counters["worker.cut_short"] else 0
    _leave_threads_behind(code)
    return code


def gate_at(target: str) -> Gate:
    """The gate that `package.module:name` (or `:name.of.it`) means; InvalidArgument says which part of it is wrong."""
    found: Gate = found_at("MODULE:GATE", target, Gate, "Gate(...)")
    return found


def membership_at(target: str | None) -> bool | Membership:
    """The membership that is meant, or False for none; InvalidArgument."""
    return target is not None and found_at("--members", target, Membership, "RedisMembership(gate)")


def found_at(argument: str, target: str, kind: type, made: str) -> Any:
    """What `package.module:name` means, which has to be of a kind; InvalidArgument, which says how one is `made`.

    The current directory comes first in the search path. What the module itself raises when imported is not hidden.
    """
    name, _, path = target.partition(":")
    if not all(part.isidentifier() for part in [*name.split("."), *path.split(".")]):
        raise InvalidArgument(argument, target, "not a module and a name in it", "Write it as shop.app:gate")
    if os.getcwd() not in sys.path and "" not in sys.path:  # noqa: PTH109 - as sys.path has it
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    _check_module(argument, target, name)
    found: object = importlib.import_module(name)
    for part in path.split("."):
        if not hasattr(found, part):
            raise InvalidArgument(
                argument, target, f"module {name!r} has no {path!r}", _those_in(name, found, kind, made)
            )
        found = getattr(found, part)
    if not _is(found, kind):
        problem = f"{path!r} is of type {type(found).__name__}, not {kind.__name__}"
        raise InvalidArgument(argument, target, problem, _those_in(name, sys.modules[name], kind, made))
    return found


def _check_module(argument: str, target: str, name: str) -> None:
    """Apart from the import: that the module is missing is the caller's mistake, what it misses itself is not."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        package = ".".join(parts[:length])
        spec = None
        with contextlib.suppress(ModuleNotFoundError, ValueError):
            spec = find_spec(package)
        if spec is None:
            fix = f"Looked in {os.getcwd()} and in Python's path; cd to the project, or install it"  # noqa: PTH109
            raise InvalidArgument(argument, target, f"there is no module {package!r}", fix)


def _those_in(name: str, module: object, kind: type, made: str) -> str:
    found = sorted(key for key, value in vars(module).items() if _is(value, kind))
    if not found:
        return f"Module {name!r} has no {kind.__name__.lower()}: make one with {made}"
    return f"{kind.__name__}s in it: {', '.join(f'{name}:{key}' for key in found)}"


def _is(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, type)  # a class has the attributes of its objects


def _leave_threads_behind(code: int) -> None:
    """A handler's thread that outlived the grace time cannot be ended, and Python would wait for it for ever. Its
    delivery is left to its lease; the process ends."""
    left = [one for one in threading.enumerate() if one is not threading.main_thread() and not one.daemon]
    if left:
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
