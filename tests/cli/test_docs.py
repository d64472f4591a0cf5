"""Every block of Python in the documentation runs as it stands, the blocks of a page in order, as one program.

The servers and namespaces that a page names are replaced by those of the tests. A page that names PostgreSQL or imports
another framework is skipped where that is not installed. `test_examples.py` runs the recipes of the cookbook.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if "```python" in page.read_text() and page.parent.name != "cookbook"
]
SERVER = "redis://localhost:6379/0"
POSTGRES = "postgresql://localhost/shop"
FRAMEWORK = re.compile(r"^(?:from|import) (celery|cloudpickle|django|dramatiq|paho|pika|rq|uvloop)\b", re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@pytest.fixture(autouse=True)
def _restore_notifications(raw: Any) -> Iterator[None]:
    """The page about key expiry changes this setting of the server, which other tests share."""
    setting = raw.config_get("notify-keyspace-events")
    yield
    raw.config_set("notify-keyspace-events", next(iter(setting.values())))


def kombu_url(url: str) -> str:
    """Return the URL in the form of Celery's messaging library, which has another scheme for sockets."""
    return url.partition("?")[0].replace("unix://", "redis+socket://")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_page_runs(page: Path, tmp_path: Path, url: str, namespace: str, request: pytest.FixtureRequest) -> None:
    program = "\n\n".join(BLOCK.findall(page.read_text()))
    for framework in FRAMEWORK.findall(program):
        if importlib.util.find_spec(framework) is None:
            pytest.skip(f"no {framework} here")
    program = program.replace('namespace="guide', f'namespace="{namespace}-guide')
    program = program.replace(f'broker="{SERVER}"', f'broker="{kombu_url(url)}"').replace(SERVER, url)
    if POSTGRES in program:
        program = program.replace(POSTGRES, request.getfixturevalue("postgres_url"))
    (tmp_path / "page.py").write_text(program)
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", "import page"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
