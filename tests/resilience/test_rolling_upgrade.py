"""An upgrade that is under way: processes of another version of the package and of this one work on one store, at the
same time.

`IDEMGATE_OTHER=<folder of another checkout>` is that version. Without it, one is made of this one that stores some
things in other ways: records always in their long form, and one more counter beside those of a topic.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

import idemgate
from idemgate import Gate
from tests.cluster import wait_for
from tests.faults import spoil
from tests.resilience.mixed import CLAIMED, GUARDED

PROGRAM = Path(__file__).with_name("mixed.py")
THIS = Path(idemgate.__file__).parents[1]


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """Where the other version is imported from."""
    if named := os.environ.get("IDEMGATE_OTHER"):
        return Path(named).resolve()
    made = tmp_path / "other" / "idemgate"
    shutil.copytree(THIS / "idemgate", made, ignore=shutil.ignore_patterns("__pycache__"))
    for file in made.rglob("*.lua"):
        file.write_text(f"{file.read_text(encoding='utf-8')}-- of another version\n", encoding="utf-8")
    spoil_file(made / "guard/scripts/lib/format.lua", "the long form says all")
    spoil_file(made / "topics/scripts/lib/slot/counters.lua", "there is another counter")
    return made.parent


def spoil_file(file: Path, fault: str) -> None:
    file.write_text(spoil(file.read_text(encoding="utf-8"), fault), encoding="utf-8")


class Process:
    """One of `mixed.py`."""

    def __init__(self, version: Path, **order: Any) -> None:
        self.version = version
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM), json.dumps(order)],
            env=os.environ | {"PYTHONPATH": str(version)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def says(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline() or '"it ended"')

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def processes(versions: list[Path], **order: Any) -> Iterator[list[Process]]:
    with ExitStack() as stack:
        made: list[Process] = []
        for part, version in enumerate(versions):
            made.append(Process(version, **order, name=f"p{part}", part=part, parts=len(versions)))
            stack.callback(made[-1].close)
        yield made


def test_processes_of_two_versions_lose_nothing_and_do_nothing_twice(
    url: str,
    namespace: str,
    other: Path,
    many: Callable[[int], int],
    sound: Callable[[Gate], None],
    record_fault: Callable[..., None],
) -> None:
    numbers = many(120)
    with (
        Gate(url, namespace=namespace) as gate,
        processes([other, THIS] * 2, url=url, namespace=namespace, numbers=numbers) as running,
    ):
        # Given producers, workers, guarded calls and claims of both
        assert [one.says() for one in running] == ["ready"] * 4
        for one in running:
            one.go_on()
        # When they work at the same time on the same keys
        assert [one.says() for one in running] == ["produced"] * 4
        topic = gate.topic("t", slots=2, merge="append", lease="60s", backoff=0)
        wait_for(lambda: (stats := topic.stats()).pending + stats.in_flight == 0)
        for one in running:
            one.go_on()
        did = [one.says() for one in running]
        assert [one["from"] for one in did] == [str(one.version) for one in running]
        judge(did, numbers)
        stats = topic.stats()
        assert (stats["accepted"], stats["acked_triggers"], stats["lapsed"]) == (numbers, numbers, 0)
        sound(gate)
    version = "another checkout" if "IDEMGATE_OTHER" in os.environ else "made of this one"
    record_fault("processes of two versions at once", numbers, promises="P2 P6 P7", lost=0, other=version)


def judge(did: list[Any], numbers: int) -> None:
    handled = [delivery for one in did for delivery in one["handled"]]
    # Then each trigger was handled once, under tokens of its own, by processes of both
    assert sorted(number for _, _, payload in handled for number in payload) == list(range(numbers))
    assert len({(key, token) for key, token, _ in handled}) == len(handled)
    assert all(did[part]["handled"] or did[part + 2]["handled"] for part in (0, 1))
    # And what is guarded ran once, and everybody has the result of that run
    guarded = {key: f"{key} by p{part}" for part, one in enumerate(did) for key in one["guarded"]}
    assert sorted(key for one in did for key in one["guarded"]) == sorted({f"g{n // GUARDED}" for n in range(numbers)})
    assert all(one["answers"] == guarded for one in did)
    assert sorted(key for one in did for key in one["claimed"]) == sorted({f"c{n // CLAIMED}" for n in range(numbers)})
