"""`poe release`: build what is published, and try it as a user gets it.

The packages are built two times from the last commit, in folders of different names: the first wheel comes from the
source distribution, the second one from the files. All must have the same bytes. Then the wheels are checked, and
installed into an empty environment without a checkout: programs, names, types, and tests out of the source
distribution. With `--tag v1.2.3` the metadata must be that of a release of this version, too.

It needs the dependency group `release` and the package index.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from email import message_from_bytes
from email.message import Message
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tools.compat import wheels
from tools.compat.environments import NEEDED
from tools.compat.uv import ROOT, uv

__all__ = ["CLASSIFIERS", "LINKS", "PYTHONS", "main"]

STUBS = ["celery-types"]
"""Celery has no types of its own."""
PYTHONS = ["3.11", "3.12", "3.13", "3.14", "3.15"]
CLASSIFIERS = {
    "Development Status :: 3 - Alpha",
    "Intended Audience :: Developers",
    "Operating System :: MacOS",
    "Operating System :: POSIX :: Linux",
    "Programming Language :: Python :: 3 :: Only",
    *(f"Programming Language :: Python :: {version}" for version in ["3", *PYTHONS]),
    "Typing :: Typed",
}
"""Those that each package has; some have more."""
LINKS = {"Changelog", "Documentation", "Issues", "Repository"}
RELATIVE = re.compile(r"""(\]\(|\b(?:src|srcset|href)=")(?![a-z]+:|#|//)([^)"\s]+)""")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
PICTURES = (".gif", ".jpg", ".png", ".svg", ".webp")
TESTS = [
    "tests/guard/test_once.py",
    "tests/topics/test_triggers.py",
    *(
        f"tests/unit/test_{name}.py"
        for name in ("backoff", "calls", "codec", "durations", "key_template", "merge", "models", "packing", "policy")
    ),
]
"""Tests of the source distribution that run on the installed wheel: none reads the source of the package."""


def main() -> int:
    words = _arguments()
    if find_spec("twine") is None:
        raise SystemExit("this needs the dependency group: uv sync --all-packages --all-extras --group release")
    packages = words.out / "packages"
    projects = read_projects(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        steps = {
            "metadata": find_metadata_faults(projects),
            "bytes": build_twice(packages, scratch),
            "twine": _twine(packages),
        }
        ours = sorted(packages.glob("*.whl"))
        steps["wheels"] = [fault for wheel in ours for fault in find_wheel_faults(wheel)]
        todo = [*find_missing(projects), *(fault for wheel in ours for fault in find_relative_links(wheel))]
        if words.tag:
            steps["tag"] = [*find_tag_faults(words.tag, projects, (ROOT / "CHANGELOG.md").read_text("utf-8")), *todo]
        for name, faults in steps.items():
            print(f"{name}: {'good' if not faults else ''}", *faults, sep="\n  " if faults else "", flush=True)
        if not any(steps.values()):
            _try(ours, packages, scratch)
    _write_sbom(words.out / "sbom.cdx.json")
    print(f"{packages}: what is published; sbom.cdx.json beside it: the dependencies")
    if todo and not words.tag:
        print("to be done before the first release (a tagged build fails without it):", *todo, sep="\n  ")
    return 1 if any(steps.values()) else 0


# -- what the files say -----------------------------------------------------------------------------------------------


def read_projects(root: Path) -> dict[Path, dict[str, Any]]:
    """Return the table `[project]` of the core and of each integration, by their folders."""
    files = [root / "pyproject.toml", *sorted(root.glob("integrations/*/pyproject.toml"))]
    return {file.parent: tomllib.loads(file.read_text("utf-8"))["project"] for file in files}


def find_metadata_faults(projects: Mapping[Path, Mapping[str, Any]]) -> list[str]:
    """Return what differs from the core, which is the first project, or is missing in any package."""
    core, *_ = projects
    pin = f"=={projects[core]['version']}"
    faults: list[str] = []
    for home, project in projects.items():
        name = project["name"]
        if project["version"] != projects[core]["version"]:
            faults.append(f"{name}: version {project['version']}, not {projects[core]['version']} as the core")
        loose = [
            one for one in project.get("dependencies", []) if one.startswith("idemgate-") and not one.endswith(pin)
        ]
        faults += [f"{name}: {one} without {pin}: releases are tested together" for one in loose]
        faults += [f"{name}: no classifier {one!r}" for one in sorted(CLASSIFIERS - {*project["classifiers"]})]
        licence = home / "LICENSE"
        if not licence.exists() or licence.read_bytes() != (core / "LICENSE").read_bytes():
            faults.append(f"{name}: no LICENSE that equals that of the core")
        if project.get("urls", {}) != projects[core].get("urls", {}):
            faults.append(f"{name}: [project.urls] differs from that of the core")
    return faults


def find_missing(projects: Mapping[Path, Mapping[str, Any]]) -> list[str]:
    """Return the links that [project.urls] lacks. There is no public address of the repository yet."""
    core, *_ = projects.values()
    missing = sorted(LINKS - {*core.get("urls", {})})
    return [f"[project.urls] of every package lacks {', '.join(missing)}"] if missing else []


def find_tag_faults(tag: str, projects: Mapping[Path, Mapping[str, Any]], changelog: str) -> list[str]:
    version = next(iter(projects.values()))["version"]
    faults = [] if tag == f"v{version}" else [f"the tag is {tag}, and the version of the packages is {version}"]
    if not re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        faults.append(f"CHANGELOG.md has no line `## [{version}] - YYYY-MM-DD`")
    return faults


def make_absolute(page: str, repository: str, version: str, folder: str) -> str:
    """Return the page with links into the repository at this version; the index has no files around a README.

    `folder` is where the page is, relative to the root.
    """

    def replace(found: re.Match[str]) -> str:
        path, *anchor = found[2].partition("#")
        view = "raw" if path.endswith(PICTURES) else "blob"
        full = Path(os.path.normpath(Path(folder, path))).as_posix()
        return f"{found[1]}{repository.rstrip('/')}/{view}/v{version}/{full}{''.join(anchor)}"

    parts = CODE.split(page)
    parts[::2] = [RELATIVE.sub(replace, part) for part in parts[::2]]
    return "".join(parts)


# -- what is built ----------------------------------------------------------------------------------------------------


def build_twice(out: Path, scratch: Path) -> list[str]:
    """Build into `out`, and again in another folder, time zone and order of hashes. Return the files that differ."""
    once = _build_in(scratch / "one", [])
    again = _build_in(scratch / "another-folder", ["--sdist", "--wheel"], TZ="Asia/Kathmandu", PYTHONHASHSEED="7")
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(once, out)
    return find_differences(out, again)


def _build_in(root: Path, kinds: list[str], **env: str) -> Path:
    _check_out(root)
    core = read_projects(root)[root]
    if repository := core.get("urls", {}).get("Repository"):
        for page in (root / "README.md", *root.glob("integrations/*/README.md")):
            folder = page.parent.relative_to(root).as_posix()
            page.write_text(make_absolute(page.read_text("utf-8"), repository, core["version"], folder), "utf-8")
    out = root / "dist"
    seconds = _git("log", "-1", "--format=%ct").strip()
    wheels.check_contents(wheels.build(out, root=root, kinds=kinds, env={"SOURCE_DATE_EPOCH": seconds, **env}), root)
    return out


def _check_out(folder: Path) -> None:
    """Write the files of the last commit. What is not committed is not published."""
    folder.mkdir()
    archive = folder.with_suffix(".tar")
    _git("archive", "--output", str(archive), "HEAD")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def find_differences(one: Path, other: Path) -> list[str]:
    names = {file.name for file in (*one.iterdir(), *other.iterdir())}
    return [f"{name}: two builds differ" for name in sorted(names) if _read(one / name) != _read(other / name)]


def _read(file: Path) -> bytes | None:
    return file.read_bytes() if file.exists() else None


def _twine(out: Path) -> list[str]:
    command = [sys.executable, "-m", "twine", "check", "--strict", *map(str, sorted(out.iterdir()))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [] if done.returncode == 0 else [done.stdout + done.stderr]


def find_wheel_faults(wheel: Path) -> list[str]:
    """Return what the wheel lacks: its mark for type checkers, and the text of each licence that it names."""
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    metadata = _metadata(wheel)
    faults = [] if any(name.endswith("/py.typed") for name in names) else [f"{wheel.name}: no py.typed"]
    licences = metadata.get_all("License-File", [])
    if "License-Expression" not in metadata or not licences:
        faults.append(f"{wheel.name}: no licence, or no text of it")
    faults += [
        f"{wheel.name}: no {one}" for one in licences if not any(name.endswith(f"/licenses/{one}") for name in names)
    ]
    return faults


def find_relative_links(wheel: Path) -> list[str]:
    """Return how many links of the page on the index lead nowhere."""
    payload = _metadata(wheel).get_payload()
    assert isinstance(payload, str)
    number = len(RELATIVE.findall("".join(CODE.split(payload)[::2])))
    return [f"{wheel.name}: {number} relative links in the page; `Repository` makes them absolute"] if number else []


def _metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (name for name in opened.namelist() if name.endswith(".dist-info/METADATA"))
        return message_from_bytes(opened.read(name))


# -- what is installed ------------------------------------------------------------------------------------------------


def _try(ours: list[Path], out: Path, scratch: Path) -> None:
    """Install the wheels and use them. The first thing that fails raises."""
    version = ".".join(map(str, sys.version_info[:2]))
    clean, done = wheels.try_on(version, ours)
    print(*done, sep="\n  ", flush=True)
    uv("pip", "install", "--quiet", "--python", clean, *NEEDED, *STUBS, *(_with_extras(wheel) for wheel in ours))
    for package in _packages(ours):
        print(" ", wheels.run_apart(clean, "-c", wheels.NAMES, package, "modules"), flush=True)
        print(" ", _verify_types(package, clean), flush=True)
    (source,) = out.glob("idemgate_redis-*.tar.gz")
    with tarfile.open(source) as opened:
        opened.extractall(scratch, filter="data")
    home = scratch / source.name.removesuffix(".tar.gz")
    shutil.rmtree(home / "idemgate")  # the tests find the installed one
    words = ["-q", "-n", "2", "-p", "no:cacheprovider", "--no-header", *TESTS]
    print(" ", wheels.run_apart(clean, "-m", "pytest", *words, cwd=home).splitlines()[-1], flush=True)


def _with_extras(wheel: Path) -> str:
    metadata = _metadata(wheel)
    extras = ",".join(metadata.get_all("Provides-Extra", []))
    return f"{metadata['Name']}[{extras}] @ {wheel.as_uri()}"


def _packages(ours: Iterable[Path]) -> Iterator[str]:
    for wheel in ours:
        name = wheel.name.partition("-")[0]
        yield "idemgate" if name == "idemgate_redis" else name


def _verify_types(package: str, clean: Path) -> str:
    """Return how complete the types of all public names are. Anything but 100 % raises."""
    pyright = Path(sys.executable).with_name("pyright")
    # It looks at the packages of the first `python` on PATH. It ends with 1 unless all is known.
    said = wheels.run_apart(pyright, "--verifytypes", package, "--ignoreexternal", path=clean.parent)
    (score,) = re.findall(r"Type completeness score: (\S+)", said)
    return f"{package}: types {score} complete"


def _write_sbom(file: Path) -> None:
    """Write the dependencies of all packages and extras, as CycloneDX."""
    words = ["--all-packages", "--all-extras", "--no-default-groups", "--output-file", file]
    uv("export", "--quiet", "--preview-features", "sbom-export", "--format", "cyclonedx1.5", *words)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tools.release", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--tag", default="", help="the tag of this commit: what it lacks for a release is an error")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist", help="the folder for packages and sbom.cdx.json (default: dist)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
