"""What ships: a package's wheel holds all of it and nothing else, installs in a clean environment, and runs there."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.compat.environments import environment
from tools.compat.uv import CACHE, ROOT, uv

__all__ = ["NAMES", "WHEELS", "build", "check_contents", "run_apart", "try_on"]

WHEELS = CACHE / "wheels"
DEMO = ["--subscribers", "2", "--events", "200", "--speed", "max", "--window", "100ms"]
NAMES = """\
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
assert "site-packages" in package.__file__, package.__file__
found = [sys.argv[1], *(f"{sys.argv[1]}.{one.name}" for one in pkgutil.iter_modules(package.__path__))]
public = [name for name in found if not name.rpartition(".")[2].startswith("_")]
names = 0
for name in public if len(sys.argv) > 2 else public[:1]:
    module = importlib.import_module(name)
    names += len([getattr(module, one) for one in getattr(module, "__all__", ())])
print(f"{sys.argv[1]}: {names} names")
"""
"""Import the names in `__all__` of a package; with a second argument also of each of its modules."""


def build(
    folder: Path,
    *packages: str,
    root: Path = ROOT,
    kinds: Sequence[str] = ("--wheel",),
    env: Mapping[str, str] | None = None,
) -> list[Path]:
    """Build the named packages, or all, into an empty folder, and return their wheels.

    Without `kinds`, uv builds a source distribution of each, and the wheel from that.
    """
    shutil.rmtree(folder, ignore_errors=True)
    for chosen in [["--package", package] for package in packages] or [["--all-packages"]]:
        uv("build", "--quiet", "--no-create-gitignore", *kinds, *chosen, "--out-dir", folder, cwd=root, env=env)
    return sorted(folder.glob("*.whl"))


def check_contents(wheels: Sequence[Path], root: Path = ROOT) -> None:
    """Check that each package has a wheel, which holds every file of it, and nothing else."""
    marks = [*root.glob("*/py.typed"), *root.glob("integrations/*/*/py.typed")]
    packages = {mark.parent.name: mark.parent for mark in marks}
    found = {_checked(wheel, packages) for wheel in wheels}
    assert found == packages.keys(), f"no wheel of {packages.keys() - found}"


def _checked(wheel: Path, packages: dict[str, Path]) -> str:
    """The package in it."""
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
    (package,) = {name.partition("/")[0] for name in names}
    assert package in packages, f"{wheel.name}: {package} has no py.typed"
    home = packages[package]
    ours = {
        file.relative_to(home.parent).as_posix()
        for file in home.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert names == ours, f"{wheel.name}: {names ^ ours}"
    return package


def try_on(version: str, wheels: Sequence[Path]) -> tuple[Path, list[str]]:
    """Install the wheels on that Python, in a clean environment. Return its interpreter, and what was done there."""
    clean = environment(f"wheel-{version}", version)
    (ours,) = (wheel for wheel in wheels if wheel.name.startswith("idemgate_redis-"))
    uv("pip", "install", "--quiet", "--python", clean, f"idemgate-redis[all] @ {ours.as_uri()}")
    command = clean.with_name("idemgate")
    done = [run_apart(command, "--version"), run_apart(command, "demo", *DEMO).splitlines()[-1]]
    program, output = read_first_program((ROOT / "README.md").read_text(encoding="utf-8"))
    file = clean.with_name("first_program.py")
    file.write_text(program, encoding="utf-8")
    assert run_apart(clean, file) == output
    done += [output, run_apart(clean, "-c", NAMES, "idemgate", "modules")]
    for wheel in wheels:
        uv("pip", "install", "--quiet", "--python", clean, wheel)
        if wheel != ours:
            done.append(run_apart(clean, "-c", NAMES, wheel.name.partition("-")[0]))
    return clean, done


def read_first_program(page: str) -> tuple[str, str]:
    """Return the first program of a page, and what it prints: the block that follows."""
    found = re.search(r"^```python\n(.*?)^```$.*?^```(?:text)?\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert found is not None, "the page has no program with its output behind it"
    return found[1], found[2].strip()


def run_apart(*words: str | Path, cwd: Path = CACHE, path: Path | None = None) -> str:
    """Run a program elsewhere than in the checkout, which would be imported there. Return what it prints.

    `path` is a folder to put first on PATH.
    """
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    if path:
        env["PATH"] = f"{path}{os.pathsep}{env['PATH']}"
    done = subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout.strip()
