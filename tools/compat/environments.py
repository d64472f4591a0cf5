"""An environment for each combination of Python, redis-py and parser, with this checkout in it; made anew by uv."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tools.compat.uv import CACHE, ROOT, uv

__all__ = ["environment", "installed", "python"]

NEEDED = ["pytest>=8.4", "pytest-asyncio", "pytest-timeout", "pytest-xdist", "hypothesis", "pydantic"]


def environment(name: str, version: str) -> Path:
    """An empty one; its interpreter."""
    home = CACHE / "environments" / name
    shutil.rmtree(home, ignore_errors=True)
    uv("venv", "--quiet", "--no-project", "--python", version, home)
    return home / "bin" / "python"


def python(version: str, redis_py: str, parser: str) -> Path:
    """The interpreter of an environment that has what the suite needs. `redis_py`: "8" is the last of the eights."""
    made = environment(f"{version}-{redis_py}-{parser}", version)
    extras = "cli,cron,embedded,metrics" + (",hiredis" if parser == "hiredis" else "")
    redis = f"redis=={redis_py}" + ("" if redis_py.count(".") == 2 else ".*")
    uv("pip", "install", "--quiet", "--python", made, "--editable", f"{ROOT}[{extras}]", redis, *NEEDED)
    return made


def installed(interpreter: Path) -> dict[str, str]:
    """What was found for `python`, `redis` and `hiredis` ("" where there is none)."""
    program = (
        "import platform\nfrom importlib.metadata import distributions\n"
        "found = {one.name: one.version for one in distributions()}\n"
        "print(platform.python_version(), found['redis'], found.get('hiredis', ''), sep=',')"
    )
    said = subprocess.run([interpreter, "-c", program], capture_output=True, text=True, check=True).stdout
    return dict(zip(("python", "redis", "hiredis"), said.strip().split(","), strict=True))
