"""The blocks of the README run, and the example does."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1]
README = (FOLDER / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def test_the_blocks_run(store: str, broker: str, close: Callable[[Any], None]) -> None:
    found: dict[str, Any] = {"__name__": "block"}
    for block in BLOCKS:
        text = block.replace("redis://localhost:6379/0", store).replace("redis://localhost:6379/1", broker)
        exec(text, found)
    assert found["result"].id == found["charge"].delay_once({"id": "o1"}).id
    assert found["charge"]({"id": "o1"}) == "receipt of o1"
    close(found["app"])
    found["gate"].close()


def test_the_example_shows_what_happened() -> None:
    run = subprocess.run(
        [sys.executable, str(FOLDER / "example.py")], capture_output=True, text=True, timeout=100, check=True
    )
    lines = run.stdout.splitlines()
    assert [line for line in lines if line.startswith("charging")] == ["charging o1", "charging o2", "charging o3"]
    assert "copy: receipt of o1" in lines
    assert "enqueued 1 of 3" in lines
    assert "o3: receipt of o3 after a wait of 1 s" in lines
