"""All packages of the repository carry one version."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def versions(root: Path) -> dict[str, str]:
    """The version literal of the root and of every integration, by path."""
    projects = [root / "pyproject.toml", *sorted(root.glob("integrations/*/pyproject.toml"))]
    return {
        path.relative_to(root).as_posix(): tomllib.loads(path.read_text("utf-8"))["project"]["version"]
        for path in projects
    }


def astray(root: Path) -> dict[str, str]:
    """Those that differ from the root's."""
    found = versions(root)
    return {path: version for path, version in found.items() if version != found["pyproject.toml"]}


def project(folder: Path, version: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pyproject.toml").write_text(f'[project]\nname = "x"\nversion = "{version}"\n', "utf-8")


def test_every_package_has_the_version_of_the_root() -> None:
    assert astray(ROOT) == {}


def test_the_changelog_has_a_heading_for_the_version() -> None:
    version = versions(ROOT)["pyproject.toml"]
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_another_version_is_found(tmp_path: Path) -> None:
    # Given a root and two integrations, one of them left behind
    project(tmp_path, "0.2.0")
    project(tmp_path / "integrations/celery", "0.2.0")
    project(tmp_path / "integrations/kafka", "0.1.0")
    # Then it is the one that is named
    assert astray(tmp_path) == {"integrations/kafka/pyproject.toml": "0.1.0"}


def test_a_package_without_a_version_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "x"\ndynamic = ["version"]\n', "utf-8")
    with pytest.raises(KeyError, match="version"):
        versions(tmp_path)
