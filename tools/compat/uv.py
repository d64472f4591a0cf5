"""uv, which makes environments, downloads wheels and builds ours; and where all of that is kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["CACHE", "ROOT", "uv"]

ROOT = Path(__file__).parents[2]
CACHE = Path(os.environ.get("IDEMGATE_COMPATIBILITY", Path.home() / ".cache" / "idemgate-compatibility"))


def uv(*words: str | Path, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> None:
    """Run uv; `env` is added to the environment of this process."""
    beside = Path(sys.executable).with_name("uv")
    program = beside if beside.exists() else shutil.which("uv")
    if program is None:
        raise SystemExit("this needs uv: python -m pip install uv")
    subprocess.run([program, *words], cwd=cwd, env=_surroundings() | dict(env or {}), check=True)


def _surroundings() -> dict[str, str]:
    """Pythons of pyenv are found, too, whichever of them is switched on."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    return os.environ | {"PATH": os.pathsep.join([*map(str, sorted(pyenv.glob("*/bin"))), os.environ["PATH"]])}
