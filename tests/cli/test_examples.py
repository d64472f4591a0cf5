"""The programs in docs/examples print what the pages show, and the recipes of the cookbook run."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from tests.for_each import for_each

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_shows_what_three_lines_lose(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(DOCS / "examples" / "three_lines.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert f"```\n{printed}```\n" in (DOCS / "three-lines.md").read_text(encoding="utf-8")


@for_each("page", sorted((DOCS / "cookbook").glob("*-*.md")), ids=lambda page: page.stem)
def test_a_recipe_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs as it is copied: on an embedded server, and not on the one that it names."""
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert sum(len(block.splitlines()) for block in blocks) <= 60
    monkeypatch.chdir(tmp_path)
    program = "\n\n".join(blocks).replace("redis://localhost:6379/0", "unix:///nowhere")
    (tmp_path / "recipe.py").write_text(program)
    runpy.run_path("recipe.py")
