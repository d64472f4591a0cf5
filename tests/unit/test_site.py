"""The documentation site: each page has a place, each public name an entry, and no link is dead."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.for_each import for_each
from tools import site

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
ENTRIES = [
    entry
    for page in sorted(REFERENCE.glob("*.md"))
    for entry in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
]
PUBLIC = {
    "idemgate": "idemgate/__init__.py",
    "idemgate.errors": "idemgate/errors.py",
    "idemgate.testing": "idemgate/testing/__init__.py",
    "idemgate.types": "idemgate/types.py",
} | {path.parent.name: path.relative_to(ROOT).as_posix() for path in ROOT.glob("integrations/*/idemgate_*/__init__.py")}
CONFIGURATION = tomllib.loads((site.HERE / "zensical.toml").read_text(encoding="utf-8"))


def public_names(path: str) -> list[str]:
    """Return `__all__` of a module, without importing it: some need a framework."""
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise AssertionError(f"{path} has no __all__")


def leaves(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    else:
        for part in nav.values() if isinstance(nav, dict) else nav:
            yield from leaves(part)


@for_each("module", PUBLIC)
def test_each_public_name_has_an_entry(module: str) -> None:
    places = [module, "idemgate", "idemgate.errors"]  # `idemgate` also exports some names of the other modules
    assert [name for name in public_names(PUBLIC[module]) if not {f"{one}.{name}" for one in places} & {*ENTRIES}] == []


def test_no_name_has_two_entries() -> None:
    assert len(ENTRIES) == len({*ENTRIES}) > 100


def test_each_page_has_a_place() -> None:
    assert sorted(leaves(CONFIGURATION["project"]["nav"])) == site.pages()


def test_no_link_of_a_page_is_dead() -> None:
    known = {*site.pages(), *site._found(site.ASSETS)}
    for page in site.pages():
        site.page_text(page, known)


@for_each(
    ("text", "made"),
    [
        pytest.param("[x](../integrations/http#webhooks)", "[x](../integrations/http/README.md#webhooks)", id="folder"),
        pytest.param("[x](../integrations/sql/)", "[x](../integrations/sql/README.md)", id="folder with a slash"),
        pytest.param("[x](../pyproject.toml)", "x", id="a file that is not part of the site"),
        pytest.param("[x](tutorial.md#use-asyncio)", "[x](tutorial.md#use-asyncio)", id="page"),
        pytest.param("[x](https://example.com/a) [y](#z)", "[x](https://example.com/a) [y](#z)", id="address"),
        pytest.param("`[x](gone.md)` ``a`[x](gone.md)``", "`[x](gone.md)` ``a`[x](gone.md)``", id="code"),
        pytest.param("```py\n  [x](gone.md)\n```\n", "```py\n  [x](gone.md)\n```\n", id="block"),
        pytest.param("- a\n  - b\n    c\n", "- a\n    - b\n        c\n", id="nested list"),
        pytest.param("![x](pictures/key.svg)", "![x](pictures/key.svg)", id="picture"),
    ],
)
def test_a_page_of_the_site(text: str, made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"docs/tutorial.md", "integrations/http/README.md", "integrations/sql/README.md", "docs/pictures/key.svg"}
    monkeypatch.setattr(site, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir(exist_ok=True)
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "docs" / "a.md").write_text(text)
    assert site.page_text("docs/a.md", known) == made


def test_a_dead_link_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "ROOT", tmp_path)
    (tmp_path / "a.md").write_text("a [b](docs/gone.md#c)")
    with pytest.raises(site.DeadLink, match=re.escape("a.md: docs/gone.md#c")):
        site.page_text("a.md", {"a.md"})
