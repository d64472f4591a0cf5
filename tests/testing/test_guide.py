"""The tests of the page "Test your handlers" pass as a reader would run them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "testing.md").read_text(encoding="utf-8")
FILES = re.findall(r"`(\w+\.py)`(?:.|\n(?!\n))*?\n\n```py\n([\s\S]*?)^```", PAGE, re.MULTILINE)


def test_the_five_tests_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("idemgate_sql")
    pytest.importorskip("idemgate_pytest")
    monkeypatch.delenv("IDEMGATE_TEST_URL", raising=False)
    for name, text in FILES:
        (tmp_path / name).write_text(text)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["conftest.py", "shop.py", "test_shop.py"]
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # other plugins take seconds to import
    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "-p", "idemgate_pytest"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert "5 passed" in run.stdout, run.stdout + run.stderr
