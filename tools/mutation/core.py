"""Mutants of the pure modules: what is peculiar to judging them.

In the fork of a mutant the changed module is loaded a second time, and what differs in it is put into the first: the
code and defaults of functions, and the values of constants wherever they were imported to. So nobody's classes change.
"""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Callable, Mapping
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from types import CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from tools.mutation.edits import PACKAGE, Edit, files, text
from tools.mutation.judging import Judge

__all__ = ["Modules"]

PLAIN = (int, float, str, bytes, type(None))


class Modules(Judge[Edit]):
    """Of mutants of the pure modules."""

    none = Edit("core/clock", 1, 0, 0, "", False)
    tests = [  # noqa: RUF012
        "tests/unit",
        *(
            f"tests/{one}.py"
            for one in [
                "guard/test_bad_input",
                "guard/test_call",
                "guard/test_claims",
                "guard/test_shapes",
                "guard/test_failures",
                "dedup/test_ids",
                "dedup/test_values",
                "guard/test_records",
                "guard/test_once",
                "guard/test_regressions",
                "topics/test_triggers",
                "topics/test_deliveries",
                "topics/test_dead_letters",
                "topics/test_refusals",
                "topics/test_registry",
                "topics/test_partial",
                "topics/test_changes",
                "topics/test_windows",
                "topics/test_merging",
                "topics/test_limits",
                "topics/test_large",
                "topics/test_groups",
                "topics/test_forwarding",
                "topics/test_reshard",
                "topics/test_merge_decorator",
                "scripts/test_contracts",
                "audit/test_audit",
                "audit/test_doctor",
                "audit/test_history",
                "topics/test_events",
                "topics/test_priorities",
                "worker/test_members",
                "worker/test_subscribers_expiry",
                "security/test_acl",
                "guard/test_batches",
                "guard/test_blocks",
                "worker/test_worker",
                "worker/test_worker_fairness",
                "worker/test_worker_limits",
                "store/test_durability",
                "guard/test_inspect",
                "guard/test_verdicts",
                "guard/test_scopes",
                "guard/test_cancellation",
                "worker/test_worker_leases",
                "worker/test_worker_stop",
                "worker/test_subscribers_list",
                "worker/test_subscribers_stream",
            ]
        ),
    ]

    def sound(self, found: list[Edit]) -> list[Edit]:
        return found

    def tracing(self, directory: Path) -> Callable[[], list[str]]:
        here, seen = {str(PACKAGE / f"{one}.py"): one for one in files()}, set[tuple[str, int]]()

        def line(frame: FrameType, event: str, arg: object) -> Any:
            seen.add((frame.f_code.co_filename, frame.f_lineno))
            return line

        def called(frame: FrameType, event: str, arg: object) -> Any:
            return line(frame, event, arg) if frame.f_code.co_filename in here else None

        def told() -> list[str]:
            lines = sorted(f"{here[name]}:{number}" for name, number in [*seen] if name in here)
            seen.clear()
            sys.settrace(called)
            return lines

        threading.settrace(called)
        sys.settrace(called)
        return told

    def change(self, one: Edit) -> None:
        name = f"idemgate.{one.file.replace('/', '.')}".removesuffix(".__init__")
        old, new = import_module(name), ModuleType(name)
        new.__file__ = old.__file__
        exec(compile(one.source, str(old.__file__), "exec"), new.__dict__)
        _graft(old, vars(new), name, one.inside)
        for module in _ours():
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()

    def reaching(self, one: Edit) -> set[str]:
        """Of what is done when a module is loaded, all those that come by the module."""
        if not one.inside:
            by = (own for line, own in self.comes_by.items() if line.startswith(f"{one.file}:"))
            return self.naming(one).union(*by)
        begin, end = _statement(one.file, one.line)
        return set().union(*(self.comes_by[f"{one.file}:{line}"] for line in range(begin, end + 1)))

    def naming(self, one: Edit) -> set[str]:
        """Of what is done when a module is loaded, those whose files import from it: they read what it defines."""
        module = f"from idemgate.{one.file.replace('/', '.')} import"
        return {name for name, item in self.items.items() if not one.inside and module in _written(item.path)}

    def traced(self) -> list[str]:
        return [text(file) for file in files()]


@cache
def _written(path: Path) -> str:
    return path.read_text()


def _ours() -> list[ModuleType]:
    return [module for name, module in sys.modules.items() if name.startswith(("idemgate", "tests."))]


def _graft(holder: Any, new: Mapping[str, Any], module: str, inside: bool) -> None:
    """Makes of a module or a class what another version of it is; `inside`: only functions differ."""
    for name, value in new.items():
        prior = vars(holder).get(name)
        if isinstance(value, type) and isinstance(prior, type) and value.__module__ == module:
            _graft(prior, vars(value), module, inside)
        elif (function := _function(prior)) and (changed := _function(value)):
            _swap(function, changed)
        elif not inside and not name.startswith("__") and _is_plain(value) and _is_plain(prior) and value != prior:
            _replace(holder, name, prior, value)


def _function(value: Any) -> FunctionType | None:
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, cached_property):
        value = value.func
    elif isinstance(value, staticmethod | classmethod):
        value = value.__func__
    value = getattr(value, "__wrapped__", value)
    return value if isinstance(value, FunctionType) else None


def _swap(old: FunctionType, new: FunctionType) -> None:
    if isinstance(old.__code__, CodeType) and old.__code__.co_freevars == new.__code__.co_freevars:
        old.__code__ = new.__code__
        old.__defaults__ = new.__defaults__
        old.__kwdefaults__ = new.__kwdefaults__
        for cell, other in zip(old.__closure__ or (), new.__closure__ or (), strict=True):
            _refill(cell, other)


def _refill(cell: CellType, other: CellType) -> None:
    if (function := _function(cell.cell_contents)) and (changed := _function(other.cell_contents)):
        _swap(function, changed)


def _is_plain(value: Any) -> bool:
    """Whether it is made of values alone, also of named tuples."""
    if isinstance(value, Mapping):
        return all(_is_plain(key) and _is_plain(one) for key, one in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN) or type(value).__module__ in ("re", "_struct", "datetime")


def _replace(holder: Any, name: str, prior: Any, value: Any) -> None:
    setattr(holder, name, value)
    if isinstance(holder, ModuleType):
        for module in _ours():
            if name in vars(module) and vars(module)[name] is prior:
                setattr(module, name, value)


def _statement(file: str, line: int) -> tuple[int, int]:
    """The lines of the smallest statement that has this one; of one with a body, those of its head."""
    found = (1, line)
    for node in ast.walk(ast.parse(text(file))):
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
            if node.lineno <= line <= end and end - node.lineno <= found[1] - found[0]:
                found = (node.lineno, end)
    return found
