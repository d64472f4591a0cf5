"""What ships: a package's wheel holds all of it and nothing else, installs in a clean environment, and runs there."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from pathlib import Path

from tools.compat.environments import environment
from tools.compat.uv import CACHE, ROOT, uv

__all__ = ["build", "try_on"]

WHEELS = CACHE / "wheels"
DEMO = ["--subscribers", "2", "--events", "200", "--speed", "max", "--window", "100ms"]


def build() -> dict[str, str]:
    """The wheels, by the name of their package; each holds every file of its package, and nothing else."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    uv("build", "--quiet", "--wheel", "--all-packages", "--out-dir", WHEELS)
    marks = [*ROOT.glob("*/py.typed"), *ROOT.glob("integrations/*/*/py.typed")]
    packages = {mark.parent.name: mark.parent for mark in marks}
    wheels = sorted(WHEELS.glob("*.whl"))
    found = {_checked(wheel, packages): wheel.name for wheel in wheels}
    assert found.keys() == packages.keys(), f"no wheel of {packages.keys() - found.keys()}"
    return found


def _checked(wheel: Path, packages: dict[str, Path]) -> str:
    """The package in it."""
    with zipfile.ZipFile(wheel) as opened:
        names = {name for name in opened.namelist() if ".dist-info/" not in name}
    (package,) = {name.partition("/")[0] for name in names}
    home = packages[package]
    ours = {
        file.relative_to(home.parent).as_posix()
        for file in home.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert names == ours, f"{wheel.name}: {names ^ ours}"
    return package


def try_on(version: str) -> list[str]:
    """Installs the wheels on that Python, in clean environments; what was done."""
    clean = environment(f"wheel-{version}", version)
    (ours,) = WHEELS.glob("idemgate_redis-*.whl")
    uv("pip", "install", "--quiet", "--python", clean, f"idemgate-redis[all] @ {ours.as_uri()}")
    command = clean.with_name("idemgate")
    done = [_ran(command, "--version"), _ran(command, "demo", *DEMO).splitlines()[-1]]
    for wheel in sorted(WHEELS.glob("*.whl")):
        uv("pip", "install", "--quiet", "--python", clean, wheel)
        package = wheel.name.partition("-")[0]
        if wheel != ours:
            done.append(_ran(clean, "-c", f"import {package}; print({package}.__name__)"))
    return done


def _ran(*words: str | Path) -> str:
    """What it said; it runs elsewhere than in the checkout, or that would be imported."""
    done = subprocess.run(words, cwd=CACHE, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
    return done.stdout.strip()
