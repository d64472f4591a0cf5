"""The blocks of the README run, and the example does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1]
README = (FOLDER / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_blocks_run() -> None:
    found: dict[str, Any] = {"__name__": "block"}
    for block in BLOCKS:
        exec(block.replace("redis://localhost:6379/0", "embedded://").replace("\ngate.run()", "\n#"), found)
    assert found["gate"].context.tracer is not found["tracing"]
    found["gate"].close()


@pytest.mark.slow
def test_the_example_shows_the_links() -> None:
    run = subprocess.run(
        [sys.executable, str(FOLDER / "example.py")], capture_output=True, text=True, timeout=100, check=True
    )
    lines = run.stdout.splitlines()
    (process,) = [line for line in lines if line.startswith("process thumbnails")]
    assert process.count("links to") == 1
    assert sum("links to" in line for line in lines if line.startswith("once charge")) == 1
