"""What the tests of the READMEs share: their blocks, and an empty environment with what a user installs."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.waiting import wait_until
from tools.compat import wheels
from tools.compat.uv import uv

__all__ = ["MINUTES", "install", "read_readme", "run", "run_until_printed"]

MINUTES = 5
"""The longest time from the checkout to the output of the first program."""


def read_readme(test: str) -> tuple[str, list[str]]:
    """Return the README of the package that a test file belongs to, and its blocks of commands and programs."""
    text = Path(test).parents[1].joinpath("README.md").read_text(encoding="utf-8")
    return text, re.findall(r"^```(?:sh|python)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run(*command: object, **options: Any) -> str:
    """Run a program to its end and return what it printed."""
    words = [str(word) for word in command]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=MINUTES * 60, **options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_until_printed(lines: int, *command: object, cwd: Path, env: Mapping[str, str]) -> str:
    """Run a program until it has printed so many lines, then end it by SIGTERM. Return what it printed."""
    printed = cwd / "printed"
    with printed.open("w") as out:
        program = subprocess.Popen([str(word) for word in command], cwd=cwd, env=env, stdout=out)
        try:
            wait_until(lambda: printed.read_text().count("\n") >= lines or program.poll() is not None)
            program.send_signal(signal.SIGTERM)
            assert program.wait(60) == 0
        finally:
            program.kill()
            program.wait()
    return printed.read_text()


def install(commands: str, folder: Path, *more: str) -> tuple[Path, dict[str, str]]:
    """Make an empty environment and install what the first line of the commands says, from wheels of this checkout.

    Args:
        commands: the first block of a README, which begins with `pip install`.
        folder: a folder for the wheels and the environment.
        more: further requirements.

    Returns:
        The folder of its programs, and the variables for a process that runs there.
    """
    pip, verb, *wanted = shlex.split(commands.splitlines()[0], comments=True)
    assert (pip, verb) == ("pip", "install")
    found = [*more]
    for word in wanted:
        path, bracket, extras = word.partition("[")
        if path.startswith("."):
            name = f"idemgate-{Path(path).name or 'redis'}"
            path = str(*wheels.build(folder / name, name))
        found.append(path + bracket + extras)
    scripts = folder / "venv" / "bin"
    uv("venv", "--quiet", "--python", sys.executable, folder / "venv", cwd=folder)
    uv("pip", "install", "--quiet", "--python", scripts / "python", *found, cwd=folder)
    return scripts, {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
