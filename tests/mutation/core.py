"""Mutants of `idemgate/core`, made and judged by mutmut, in a copy of the checkout.

A mutant in which nothing but the wording of a text differs is counted apart: what a message says is not what is tested.
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
import subprocess
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from idemgate.link.embedded import start

__all__ = ["TESTS", "Tried", "counted", "judged"]

ROOT = Path(__file__).parents[2]
TESTS = [
    "tests/unit",
    "--ignore=tests/unit/test_imports.py",  # mutants import more
    *(
        f"tests/{one}.py"
        for one in [
            "guard/test_bad_input",
            "guard/test_passage",
            "guard/test_claims",
            "guard/test_shapes",
            "guard/test_failures",
            "topic/test_triggers",
            "topic/test_deliveries",
            "topic/test_dead",
            "topic/test_refusals",
            "topic/test_registry",
            "topic/test_partial",
            "topic/test_changes",
            "topic/test_windows",
            "lua/test_contracts",
            "work/test_members",
            "security/test_acl",
            "link/test_durability",
        ]
    ),
]
"""What is about `core` alone, and what asks Redis by it."""
OUTCOMES = {0: "survived", 1: "killed", 3: "killed", 33: "survived", 36: "timeout", -24: "timeout", 24: "timeout"}
"""By how the tests end; 33 = no test comes by."""


NAMES = """
import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc):
    for mark in metafunc.definition.iter_markers("parametrize"):
        object.__setattr__(mark._param_ids_from or mark, "_param_ids_generated", None)
"""
"""pytest keeps names of parameters on the mark and escapes their backslashes once more each time it runs in a process,
as in mutmut, which would not find those tests again. Here it makes them anew."""


class Tried(NamedTuple):
    module: str
    change: str
    outcome: str
    """killed, timeout, survived, wording."""
    told: str


def judged(directory: Path, sample: int, seed: int, only: Iterable[str], jobs: int) -> list[Tried]:
    """Makes all mutants in an empty directory, and tries those that are asked for."""
    _copy(directory)
    with start() as server:
        own = {"IDEMGATE_TEST_URL": server.url}
        without = ("PYTHONDONTWRITEBYTECODE", "PYTHONPATH")  # the copy is what is tested
        environment = {name: value for name, value in os.environ.items() if name not in without} | own

        def mutmut(*words: str, found: bool = True) -> None:
            command = [sys.executable, "-m", "mutmut", "run", "--max-children", str(jobs), *words]
            with (directory / "mutmut.log").open("a+") as log:
                ended = subprocess.run(command, cwd=directory, env=environment, check=False, stdout=log)
                if found and ended.returncode:
                    log.seek(0)
                    raise RuntimeError(f"mutmut: {log.read()[-3000:]}")

        mutmut("none of them", found=False)  # makes them, and learns which tests come by; then says that there is none
        chosen = _sampled([one for one in _found(directory) if _named(one, only)], sample, seed)
        mutmut(*chosen)
        late = [name for name in chosen if _found(directory)[name] == "timeout"]
        if late:
            mutmut("--max-children", "1", *late)
    found = _found(directory)
    return [_tried(directory, name, found[name]) for name in chosen]


def counted(directory: Path) -> int:
    """How many there are in all."""
    return len(_found(directory))


def _named(name: str, only: Iterable[str]) -> bool:
    return not only or any(name.removeprefix("idemgate.core.").startswith(one) for one in only)


def _copy(directory: Path) -> None:
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes((ROOT / name).read_bytes())
    (directory / "conftest.py").write_text(NAMES)
    beside = sorted(path.name for path in directory.iterdir() if path.name != "pyproject.toml")
    with (directory / "pyproject.toml").open("a") as file:
        file.write(
            "\n[tool.mutmut]\n"
            'source_paths = ["idemgate/core"]\n'
            f"also_copy = {json.dumps(beside)}\n"
            f"pytest_add_cli_args_test_selection = {json.dumps(TESTS)}\n"
        )


def _found(directory: Path) -> dict[str, str]:
    codes: dict[str, int | None] = {}
    for file in sorted((directory / "mutants").rglob("*.meta")):
        codes |= json.loads(file.read_text())["exit_code_by_key"]
    return {name: "untried" if code is None else OUTCOMES.get(code, "killed") for name, code in codes.items()}


def _sampled(names: list[str], n: int, seed: int) -> list[str]:
    """About so many at random: of each module its share, and three at least."""
    drawn, modules = random.Random(seed), defaultdict[str, list[str]](list)
    for name in names:
        modules[name.split(".")[2]].append(name)
    shares = {module: max(3, round(n * len(own) / len(names))) if n else len(own) for module, own in modules.items()}
    return [one for module, own in modules.items() for one in drawn.sample(own, min(shares[module], len(own)))]


# -- wording ----------------------------------------------------------------------------------------------------------


def _tried(directory: Path, name: str, outcome: str) -> Tried:
    command = [sys.executable, "-m", "mutmut", "show", name]
    shown = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True).stdout
    lines = [line for line in shown.splitlines() if not re.match(r"--- |\+\+\+ |@@|#", line)]
    before, after = ("\n".join(line[1:] for line in lines if line[:1] != sign) for sign in "+-")
    gone, new = (" ".join(line[1:].strip() for line in lines if line[:1] == sign) for sign in "-+")
    module = name.split(".")[2]
    worded = outcome == "survived" and _silent(before) == _silent(after)
    change = f"{gone} -> {new or '(nothing)'}"
    return Tried(module, change, "wording" if worded else outcome, f"{name}: {change}")


def _silent(code: str) -> str:
    """The code, every text that has a space in it left empty."""
    try:
        tree = ast.parse(textwrap.dedent(code))
    except SyntaxError:
        return code
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            node.value = ""
    return ast.dump(tree)
