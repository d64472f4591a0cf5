"""Build the documentation site from the Markdown pages of the repository and the docstrings of the public names."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "site"
HERE = Path(__file__).parent
PAGES = (
    "*.md", "docs/**/*.md", "integrations/README.md", "integrations/*/README.md", "idemgate/*/README.md",
    "tools/README.md",
)  # fmt: skip
ASSETS = ("docs/**/*.svg", "docs/**/*.png", "docs/monitoring/*")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
CODE_OR_LINK = re.compile(
    r"(?P<ticks>`+)(?:(?!\n\n).)*?(?<!`)(?P=ticks)(?!`)"
    r"|\[(?P<text>(?:[^\[\]]|\[[^\[\]]*\])*)\]\((?P<target>[^()\s]+)\)",
    re.DOTALL,
)


class DeadLink(Exception):
    """A page links to a file that the repository does not have."""


def pages() -> list[str]:
    """Return the pages of the site, as paths of the repository."""
    return _found(PAGES)


def _found(patterns: tuple[str, ...]) -> list[str]:
    return sorted({path.relative_to(ROOT).as_posix() for pattern in patterns for path in ROOT.glob(pattern)})


def page_text(page: str, known: set[str]) -> str:
    """Return a page as the site needs it.

    - A link to a folder leads to its README.md. One to a file that is not part of the site is text.
    - Python-Markdown indents nested lists by four spaces, code hosts by two.

    Args:
        page: its path in the repository.
        known: the paths of all pages and assets.

    Raises:
        DeadLink: a link leads nowhere.
    """
    parts = FENCE.split((ROOT / page).read_text(encoding="utf-8"))
    for number in range(0, len(parts), 2):  # those between fences
        linked = CODE_OR_LINK.sub(lambda found: _linked(found, page, known), parts[number])
        parts[number] = re.sub("^ +", lambda indent: indent[0] * 2, linked, flags=re.MULTILINE)
    return "".join(parts)


def _linked(found: re.Match[str], page: str, known: set[str]) -> str:
    """Return a link as the site needs it. Code stays as it is."""
    target = found["target"]
    path, hash_, anchor = (target or "").partition("#")
    if not path or re.match("[a-z]+:", path):
        return found[0]
    place = os.path.normpath(Path(page).parent / path)
    if f"{place}/README.md" in known:
        return f"[{found['text']}]({path.rstrip('/')}/README.md{hash_}{anchor})"
    if place in known:
        return found[0]
    if not (ROOT / place).exists():
        raise DeadLink(f"{page}: {target}")
    return found["text"]


def collect(folder: Path) -> None:
    """Write the pages, the assets and the configuration of the site into a folder, which is deleted before."""
    shutil.rmtree(folder, ignore_errors=True)
    known = {*pages(), *_found(ASSETS)}
    for path in known:
        copy = folder / "pages" / path
        copy.parent.mkdir(parents=True, exist_ok=True)
        if path.endswith(".md"):
            copy.write_text(page_text(path, known), encoding="utf-8")
        else:
            shutil.copyfile(ROOT / path, copy)
    for name in ("site.css", "site.js"):
        shutil.copyfile(HERE / name, folder / "pages" / name)
    shutil.copyfile(HERE / "zensical.toml", folder / "zensical.toml")


def build(folder: Path = BUILD) -> Path:
    """Build the site in a folder, and return the folder of its HTML.

    Raises:
        DeadLink: a link leads nowhere.
        CalledProcessError: the site cannot be built, or there was a warning.
    """
    collect(folder)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "-f", str(folder / "zensical.toml")]
    subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True
    )  # for tools.site.options
    return folder / "html"
