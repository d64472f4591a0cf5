"""The programs in docs/examples print what the pages show."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_shows_what_three_lines_lose(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(DOCS / "examples" / "three_lines.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert f"```\n{printed}```\n" in (DOCS / "three-lines.md").read_text(encoding="utf-8")
