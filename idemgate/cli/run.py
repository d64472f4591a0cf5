"""`idemgate run MODULE:GATE`: a worker and the subscribers as a program."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import logging
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from pkgutil import walk_packages
from types import ModuleType
from typing import Any, Literal

from idemgate.cli.arguments import count, span
from idemgate.cli.probe import Probes
from idemgate.core.text import printable
from idemgate.default_gate import default_gate
from idemgate.errors import IdemgateError, InvalidArgument
from idemgate.gate import Gate
from idemgate.membership.member import Membership
from idemgate.worker.logs import configure_logs

__all__ = ["add_to", "find_gate"]

log: logging.Logger = logging.getLogger("idemgate.worker")
DESCRIPTION = """\
Run the handlers of a gate's topics, and its subscribers, until SIGTERM or Ctrl-C.
The first signal lets running handlers finish, for --grace; a second one does not wait. All signals within a second of
the first count as one. Unfinished messages are delivered again, by this or another worker. Modules are found in the
current directory and on Python's path."""


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command to its parser."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "gate",
        metavar="MODULE[:GATE]",
        nargs="?",
        help="where the gate is, such as shop.app:gate. A module alone: its gate, or the default gate",
    )
    parser.add_argument(
        "--scan",
        metavar="PACKAGE",
        action="append",
        default=[],
        help="import all modules of this package first, so that they register their handlers; may be repeated",
    )
    parser.add_argument(
        "--topic", metavar="T", dest="topics", action="append", default=[], help="only this topic; may be repeated"
    )
    parser.add_argument("--concurrency", metavar="N", type=count, default=32, help="handlers at once (default: 32)")
    parser.add_argument(
        "--grace", metavar="TIME", type=span, default=30.0, help="time to finish, when stopped (default: 30s)"
    )
    parser.add_argument(
        "--membership",
        metavar="WHERE",
        help="divide the topics' slots with the other workers: redis, or MODULE:NAME of your own Membership",
    )
    parser.add_argument(
        "--probe", metavar="[HOST:]PORT",
        help="answer HTTP at /live, /ready and /metrics: of this machine only, unless a host such as 0.0.0.0 is given",
    )  # fmt: skip
    parser.add_argument(
        "--log", choices=("text", "json"), default="text",
        help="how to log to stderr: json writes one object a line, with host and pid (default: text)",
    )  # fmt: skip
    parser.set_defaults(command=work)


def work(options: argparse.Namespace) -> int:
    """Run a worker. Return 0 after a graceful stop, 1 if handlers had to be cut short, 2 if an import failed."""
    try:
        gate = find_gate(options.gate, options.scan)
        membership = membership_at(options.membership)
    except IdemgateError:
        raise
    except Exception as error:  # noqa: BLE001 - a module of the user may raise anything
        print(f"idemgate: the program cannot be imported\n{printable(_format_import_error(error))}", file=sys.stderr)
        return 2
    if options.log == "json":
        configure_logs(as_json=True)
    if options.probe is not None:
        gate.context.lifespans.add(Probes(gate, options.probe).lifespan, first=True)
    gate.run(*options.topics, concurrency=options.concurrency, grace=options.grace, membership=membership)
    code = 1 if gate.counters["worker.cut_short"] else 0
    _leave_threads_behind(code)
    return code


def _format_import_error(error: Exception) -> str:
    """Return the traceback of an error without the frames of this command and of Python's import system."""
    shown = traceback.TracebackException.from_exception(error)
    ours = (str(Path(__file__).parent), importlib.__file__, "<frozen importlib")
    shown.stack = traceback.StackSummary.from_list(
        [frame for frame in shown.stack if not frame.filename.startswith(ours)]
    )
    return "".join(shown.format()).rstrip()


def find_gate(target: str | None, packages: Sequence[str]) -> Gate:
    """Import the packages and the target, and return the gate to run.

    Args:
        target: `module:name`; a module alone; or None, if there are packages.
        packages: Packages whose modules are all imported.

    Raises:
        InvalidArgument: Part of the target is wrong, or there is not exactly one gate; the message says which.
    """
    if target is None and not packages:
        raise InvalidArgument("MODULE:GATE", target, "not given", "Write shop.app:gate, or --scan shop")
    modules = [module for package in packages for module in load_package(package)]
    if target is not None and ":" in target:
        return gate_at(target)
    if target is not None:
        modules.append(load_module("MODULE", target, target))
    gates = {id(value): value for module in modules for value in vars(module).values() if isinstance(value, Gate)}
    if default_gate.has_work:
        gates[id(default_gate)] = default_gate
    else:
        gates.pop(id(default_gate), None)  # a module imported it
    found = [*gates.values()]
    if len(found) == 1:
        return found[0]
    where = target or ", ".join(packages)
    if not found:
        fix = "Make a Gate, or register handlers with idemgate.merge or the default gate"
        if target not in (None, *packages) and hasattr(modules[-1], "__path__"):
            fix = f"If it is in a module of the package, write --scan {target}, or name the module"
        raise InvalidArgument("MODULE:GATE", where, "it has no gate, and the default gate has no handler", fix)
    names = ", ".join(sorted(_names_of(found, modules)))
    raise InvalidArgument("MODULE:GATE", where, f"it has {len(found)} gates: {names}", "Name one, as in shop.app:gate")


def _names_of(gates: Sequence[Gate], modules: Sequence[ModuleType]) -> set[str]:
    """Return `module:name` of each gate, once."""
    names = {id(default_gate): "idemgate:default_gate"}
    for module in modules:
        for name, value in vars(module).items():
            if isinstance(value, Gate):
                names.setdefault(id(value), f"{module.__name__}:{name}")
    return {names[id(gate)] for gate in gates}


def load_package(name: str) -> list[ModuleType]:
    """Import a package and all modules below it, in the order of their names. Return them.

    Folders without `__init__.py` may hold scripts, so they are skipped, with a warning for each that holds modules.
    Errors that a module raises while it is imported pass through.

    Raises:
        InvalidArgument: There is no such package.
    """
    package = load_module("--scan", name, name)
    names = sorted(entry.name for entry in walk_packages(getattr(package, "__path__", []), f"{name}."))
    programs = [name for name in names if name.endswith(".__main__")]  # importing one would run it
    modules = [package, *(importlib.import_module(name) for name in names if name not in programs)]
    for folder in _find_skipped_folders(modules):
        log.warning(
            "run.folder_skipped folder=%r: it has no __init__.py, so --scan did not import its modules", folder,
            extra={"folder": folder},
        )  # fmt: skip
    return modules


def _find_skipped_folders(modules: Sequence[ModuleType]) -> list[str]:
    """Return the folders of scanned packages that hold modules and have no `__init__.py`."""
    packages = {Path(path) for module in modules for path in getattr(module, "__path__", [])}
    folders = [folder for package in packages if package.is_dir() for folder in package.iterdir()]
    return sorted(
        str(folder)
        for folder in folders
        if folder.name.isidentifier() and not (folder / "__init__.py").exists() and any(folder.glob("*.py"))
    )


def load_module(argument: str, target: str, name: str) -> ModuleType:
    """Import a module, with the current directory first in the search path.

    Errors that the module itself raises while it is imported pass through.

    Raises:
        InvalidArgument: There is no such module.
    """
    if not all(part.isidentifier() for part in name.split(".")):
        raise InvalidArgument(argument, target, "not a module", "Write it as shop.app:gate, or shop.app")
    if os.getcwd() not in sys.path and "" not in sys.path:  # noqa: PTH109 - as sys.path has it
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    _check_module(argument, target, name)
    return importlib.import_module(name)


def gate_at(target: str) -> Gate:
    """Import the gate at `package.module:name` or `package.module:name.attribute`.

    Raises:
        InvalidArgument: Part of the target is wrong; the message says which.
    """
    gate: Gate = import_object("MODULE:GATE", target, Gate, "Gate(...)")
    return gate


def membership_at(target: str | None) -> Literal["redis"] | Membership | None:
    """Return the membership for the option's value; None means no membership.

    Raises:
        InvalidArgument: The value is neither "redis" nor the place of a membership.
    """
    if target is None:
        return None
    if target == "redis":
        return "redis"
    membership: Membership = import_object("--membership", target, Membership, "RedisMembership(gate)")
    return membership


def import_object(argument: str, target: str, kind: type, example: str) -> Any:
    """Import the object at `package.module:name`, with the current directory first in the search path.

    Errors that the module itself raises while it is imported pass through.

    Args:
        argument: Name of the command-line argument, for messages.
        target: Place of the object.
        kind: Required type of the object.
        example: Expression that creates such an object, for messages.

    Raises:
        InvalidArgument: Part of the target is wrong, or the object has another type.
    """
    name, _, path = target.partition(":")
    if not all(part.isidentifier() for part in [*name.split("."), *path.split(".")]):
        raise InvalidArgument(argument, target, "not a module and a name in it", "Write it as shop.app:gate")
    value: object = load_module(argument, target, name)
    for part in path.split("."):
        if not hasattr(value, part):
            raise InvalidArgument(
                argument, target, f"module {name!r} has no {path!r}", _list_candidates(name, value, kind, example)
            )
        value = getattr(value, part)
    if not _is_instance(value, kind):
        problem = f"{path!r} is of type {type(value).__name__}, not {kind.__name__}"
        raise InvalidArgument(argument, target, problem, _list_candidates(name, sys.modules[name], kind, example))
    return value


def _check_module(argument: str, target: str, name: str) -> None:
    """Raise InvalidArgument if the module is missing. An import missing inside the module is another error."""
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        package = ".".join(parts[:length])
        spec = None
        with contextlib.suppress(ModuleNotFoundError, ValueError):
            spec = find_spec(package)
        if spec is None:
            fix = f"Looked in {os.getcwd()} and in Python's path; cd to the project, or install it"  # noqa: PTH109
            raise InvalidArgument(argument, target, f"there is no module {package!r}", fix)


def _list_candidates(name: str, module: object, kind: type, example: str) -> str:
    candidates = sorted(key for key, value in vars(module).items() if _is_instance(value, kind))
    if not candidates:
        return f"Module {name!r} has no {kind.__name__.lower()}: make one with {example}"
    return f"{kind.__name__}s in it: {', '.join(f'{name}:{key}' for key in candidates)}"


def _is_instance(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, type)  # a class satisfies a Protocol too


def _leave_threads_behind(code: int) -> None:
    """Exit the process if threads of handlers outlived the grace time: Python would wait for them for ever.

    Their deliveries are left to their leases.
    """
    main = threading.main_thread()
    if any(thread is not main and not thread.daemon for thread in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
