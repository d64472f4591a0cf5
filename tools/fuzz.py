"""`python -m tools.fuzz --seconds 600`: bytes are sought, led by coverage, that a decoder neither reads nor
refuses, or for which it takes much memory or time.

Every decoder of `tests/security/decoders.py` has a process of its own, which may have so much memory and no more. What
it has found interesting is kept in ~/.cache/idemgate-fuzz (IDEMGATE_FUZZ_CORPUS), and so is what it found wrong; the
first seeds are what a real server holds and answers. Needs atheris (`pip install --group fuzz`), on Linux.
"""

from __future__ import annotations

import argparse
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha1
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import redis

ROOT = Path(__file__).parents[1]
KEPT = Path(os.environ.get("IDEMGATE_FUZZ_CORPUS", Path.home() / ".cache" / "idemgate-fuzz"))
INSTALL = "pip install --group fuzz   (Linux, Python 3.11 to 3.13)"
SECONDS = 20
"""Longest time for one input."""
GROWTH_KIB = 4096
"""A process that grows by as much at one input is looked at more closely."""


def main() -> int:
    words = _arguments()
    if words.decoder:
        _fuzz(words.decoder, words.memory, words.rest)
    if find_spec("atheris") is None:
        print(f"atheris is not installed: {INSTALL}", file=sys.stderr)
        return 2
    from tests.security.decoders import DECODERS

    names = words.only or list(DECODERS)
    if unknown := set(names) - set(DECODERS):
        raise SystemExit(f"{', '.join(sorted(unknown))}: not of {', '.join(DECODERS)}")
    seeds = list(dict.fromkeys(_seeds()))
    share = max(1, words.seconds // len(names))
    print(f"{len(names)} decoders, {share} s each, {words.memory} MiB, {len(seeds)} seeds", flush=True)
    found = [name for name in names if not _clean(name, share, words.memory, seeds)]
    print(f"found: {', '.join(found)}" if found else "nothing found")
    return 1 if found else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tools.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=600, help="for all of them together (default: 600)")
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="A,B", help="these decoders")
    parser.add_argument("--memory", type=int, default=256, help="MiB that a decoder may have (default: 256)")
    parser.add_argument("--decoder", help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args()


# -- the one who watches ----------------------------------------------------------------------------------------------


def _clean(name: str, seconds: int, memory: int, seeds: list[bytes]) -> bool:
    corpus, crashes = KEPT / "corpus" / name, KEPT / "found" / name
    for folder in (corpus, crashes):
        folder.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        (corpus / sha1(seed, usedforsecurity=False).hexdigest()).write_bytes(seed)
    told = [
        f"-max_total_time={seconds}", f"-timeout={SECONDS}", "-rss_limit_mb=0", "-max_len=4096", "-verbosity=1",
        "-print_final_stats=1", f"-artifact_prefix={crashes}/", str(corpus),
    ]  # fmt: skip
    command = [sys.executable, "-m", __spec__.name, "--decoder", name, "--memory", str(memory), "--", *told]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", check=False)
    said = done.stdout + done.stderr
    runs = re.search(r"number_of_executed_units: (\d+)", said) or re.search(r"Done (\d+) runs", said)
    cover = re.findall(r"cov: (\d+)", said)
    print(f"{name:16} {runs[1] if runs else '?':>9} inputs, coverage {cover[-1] if cover else '?'}", end=" ")
    if done.returncode == 0:
        print("ok", flush=True)
        return True
    print(f"FOUND, in {crashes}", *_story(said), sep="\n    ", flush=True)
    return False


def _story(said: str) -> list[str]:
    """The traceback of the child, or its last words."""
    lines = said.splitlines()
    start = next((i for i, line in enumerate(lines) if "Uncaught Python exception" in line), len(lines) - 15)
    end = next((i for i in range(start + 1, len(lines)) if not lines[i].strip()), start + 25)
    return lines[max(0, start) : end]


def _seeds() -> Iterator[bytes]:
    """What stands in the keys of a server on which something is everywhere, and what it answers, for every call."""
    from idemgate import Gate
    from idemgate.store.embedded.server import start
    from idemgate.testing import Clock
    from tests.security.test_acl import Scene
    from tests.security.test_fuzz import BOMBS

    yield from (b"", b"\n\n\n", b"1h30m", b"500ms", b"{a[id]}:{b}\0x", b"*[a-z]?\0abc", b"0 9 * * MON\0UTC", *BOMBS)
    yield from (b"redis\n1\n2\nh:1/0?db=1", b"rediss+cluster\na\nb\nh:1,[::1]:2", b"redis+sentinel\n\n\nh:1/service/0")
    yield from (b"MOVED 7 127.0.0.1:7000", b"ASK 7 [::1]:7000", b"TRYAGAIN", b"http://127.0.0.1:80/a?b", b"https://h")
    yield from (b"Fri, 21 Nov 2026 15:00:00 GMT", b"120", b"i\n1700000000\nv1,eHg= v1a,x\n{}", b'{"a": [1, 2.5, null]}')
    yield b"1-0\0name\0value"
    with start() as own, Gate(own.url, namespace="n", clock=Clock()) as gate, redis.Redis.from_url(own.url) as raw:
        scene = Scene(gate)
        for key in raw.scan_iter():
            yield key
            if raw.type(key) == b"string":
                yield raw.get(key)
            elif raw.type(key) == b"hash":
                yield from (one for pair in raw.hgetall(key).items() for one in pair)
        for made in scene.calls:
            with_time = [*made.keys, *made.args]
            answer = _resp(raw.eval(made.script.text, len(made.keys), *with_time))
            yield from (bytes([number]) + answer for number in range(32))


def _resp(value: Any) -> bytes:
    """As a server says it."""
    if isinstance(value, list):
        return b"*%d\r\n" % len(value) + b"".join(map(_resp, value))
    return b":%d\r\n" % value if isinstance(value, int) else b"$%d\r\n%b\r\n" % (len(value), value)


# -- the one who tries ------------------------------------------------------------------------------------------------


def _fuzz(name: str, memory: int, rest: list[str]) -> None:
    """Does not return."""
    import atheris

    with atheris.instrument_imports(include=["idemgate", "idemgate_http", "idemgate_otel", "idemgate_webhook"]):
        from tests.security import decoders

    def grown() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def once(data: bytes) -> None:
        before = grown()
        decoders.refused_or_read(name, data)
        if grown() - before > GROWTH_KIB:
            decoders.check_memory(name, data)

    atheris.Setup([name, *rest], once)
    room = _size() + memory * 1024 * 1024
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    atheris.Fuzz()


def _size() -> int:
    """Bytes of address space that are in use."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main())
