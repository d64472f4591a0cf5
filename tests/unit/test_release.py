"""The packages that are published: what their metadata says, and what `poe release` finds wrong.

The slow test builds all packages twice, which needs the package index.
"""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path

import pytest

import idemgate
from tools import release
from tools.compat.uv import ROOT
from tools.compat.wheels import read_first_program

PROJECT = """\
[project]
name = "{name}"
version = "{version}"
classifiers = {classifiers}
"""
METADATA = """\
Metadata-Version: 2.4
Name: x
License-Expression: MIT
License-File: LICENSE

"""
URLS = dict.fromkeys(release.LINKS, "https://example.com")


def write_project(folder: Path, version: str, classifiers: set[str] = release.CLASSIFIERS, more: str = "") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    words = PROJECT.format(name=folder.name, version=version, classifiers=sorted(classifiers))
    (folder / "pyproject.toml").write_text(words + more, "utf-8")
    (folder / "LICENSE").write_text("MIT", "utf-8")


def write_wheel(folder: Path, names: list[str], page: str = "") -> Path:
    with zipfile.ZipFile(folder / "x-1-py3-none-any.whl", "w") as wheel:
        for name in names:
            wheel.writestr(name, "")
        wheel.writestr("x-1.dist-info/METADATA", METADATA + page)
    return folder / "x-1-py3-none-any.whl"


def test_the_metadata_of_all_packages_is_good() -> None:
    projects = release.read_projects(ROOT)
    assert len(projects) > 4
    assert projects[ROOT]["version"] == idemgate.__version__
    assert release.find_metadata_faults(projects) == []
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
    assert f"python: {release.PYTHONS}".replace("'", '"') in workflow


def test_the_changelog_has_a_heading_for_the_version() -> None:
    assert f"\n## [{idemgate.__version__}]" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_a_package_that_differs_from_the_core_is_named(tmp_path: Path) -> None:
    # Given a core and two integrations, one of them left behind
    write_project(tmp_path, "0.2.0")
    write_project(
        tmp_path / "integrations/celery", "0.2.0", more='dependencies = ["idemgate-redis==0.2.0", "celery"]\n'
    )
    classifiers = release.CLASSIFIERS - {"Typing :: Typed"}
    write_project(tmp_path / "integrations/kafka", "0.1.0", classifiers, 'dependencies = ["idemgate-redis"]\n')
    (tmp_path / "integrations/kafka/LICENSE").unlink()
    # Then it is named with all that is wrong
    assert release.find_metadata_faults(release.read_projects(tmp_path)) == [
        "kafka: version 0.1.0, not 0.2.0 as the core",
        "kafka: idemgate-redis without ==0.2.0: releases are tested together",
        "kafka: no classifier 'Typing :: Typed'",
        "kafka: no LICENSE that equals that of the core",
    ]


def test_a_tag_needs_its_version_its_date_and_all_links(tmp_path: Path) -> None:
    core = {"name": "x", "version": "1.2.0"}
    assert release.find_tag_faults("v1.2.0", {tmp_path: core}, "# C\n\n## [1.2.0] - 2027-01-31\n") == []
    faults = release.find_tag_faults("v1.2.1", {tmp_path: core}, "## [1.2.0] - Unreleased\n")
    assert [re.sub(r"[^0-9a-zA-Z ]", "", fault)[:20] for fault in faults] == [
        "the tag is v121 and ",
        "CHANGELOGmd has no l",
    ]
    assert release.find_missing({tmp_path: core | {"urls": URLS}}) == []
    (missing,) = release.find_missing({tmp_path: core})
    assert all(name in missing for name in release.LINKS)


def test_links_of_a_page_lead_into_the_repository() -> None:
    page = (
        "[a](docs/a.md#b) ![c](c.svg) [d](../../e) [f](https://g/h) [i](#j)\n"
        '<img src="k.png" alt="">\n'
        "`[l](m)`\n```py\ncall(n)[o](p)\n```\n[q](r)\n"
    )
    assert release.make_absolute(page, "https://x/y/", "1.0", "integrations/z") == (
        "[a](https://x/y/blob/v1.0/integrations/z/docs/a.md#b) ![c](https://x/y/raw/v1.0/integrations/z/c.svg)"
        " [d](https://x/y/blob/v1.0/e) [f](https://g/h) [i](#j)\n"
        '<img src="https://x/y/raw/v1.0/integrations/z/k.png" alt="">\n'
        "`[l](m)`\n```py\ncall(n)[o](p)\n```\n[q](https://x/y/blob/v1.0/integrations/z/r)\n"
    )


def test_a_wheel_has_its_mark_its_licence_and_a_page_with_working_links(tmp_path: Path) -> None:
    whole = write_wheel(tmp_path, ["x/py.typed", "x-1.dist-info/licenses/LICENSE"], "[a](https://b) `[c](d)`\n")
    assert [*release.find_wheel_faults(whole), *release.find_relative_links(whole)] == []
    bare = write_wheel(tmp_path, [], "[a](b)\n")
    assert release.find_wheel_faults(bare) == [f"{bare.name}: no py.typed", f"{bare.name}: no LICENSE"]
    assert release.find_relative_links(bare) == [
        f"{bare.name}: 1 relative links in the page; `Repository` makes them absolute"
    ]


def test_files_that_differ_or_are_missing_are_named(tmp_path: Path) -> None:
    for folder, files in (("one", {"a": "1", "b": "1", "c": "1"}), ("two", {"a": "1", "b": "2"})):
        (tmp_path / folder).mkdir()
        for name, text in files.items():
            (tmp_path / folder / name).write_text(text)
    found = release.find_differences(tmp_path / "one", tmp_path / "two")
    assert found == ["b: two builds differ", "c: two builds differ"]


def test_the_readme_has_a_first_program_with_its_output() -> None:
    program, output = read_first_program((ROOT / "README.md").read_text("utf-8"))
    assert "Gate" in program
    assert output


@pytest.mark.slow
def test_two_builds_have_the_same_bytes(tmp_path: Path) -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("no checkout of git")
    assert release.build_twice(tmp_path / "packages", tmp_path) == []
    assert len([*(tmp_path / "packages").iterdir()]) == 2 * len(release.read_projects(ROOT))
