"""`current().key_for` gives one key for one step of the work: in every attempt, owner, process and hash seed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from idemgate import Gate, current
from idemgate.testing import Clock

KEYS: dict[str, Any] = {
    "text": "order-7", "empty text": "", "not ascii": "größe 🙂", "long text": "x" * 1000, "bytes": b"\xff\x00{}",
    "empty bytes": b"", "int": 7, "negative": -7, "big int": 2**200,
}  # fmt: skip
PROGRAM = """
import json, sys
from idemgate import Gate, current
from tests.guard.test_key_for import KEYS
gate = Gate(sys.argv[1], namespace=sys.argv[2])
guard = gate.guard("s")
found = {}
for name, key in KEYS.items():
    verdict = guard.run(key, lambda: current().key_for("charge"))
    found[name] = [verdict.outcome, verdict.value, str(verdict.error)]
print(json.dumps(found))
"""


async def test_each_attempt_and_owner_has_the_key_of_the_first(face: Any, clock: Clock) -> None:
    made: dict[str, set[str]] = {}
    guard = face.guard("s", lease="30s", retention="1h")
    for attempt in range(3):
        for name, key in KEYS.items():

            def body(name: str = name, fails: bool = attempt == 0) -> None:
                made.setdefault(name, set()).add(current().key_for("charge"))
                if fails:
                    raise ValueError

            verdict = await guard.run(key, body)
            if key not in ("", b""):
                assert verdict.ran, name
        clock.advance("2h")  # the retention has ended: a later owner
    assert {len(found) for found in made.values()} == {1}
    assert len({*map(str, made.values())}) == len(made)


@pytest.mark.timeout(120)
def test_processes_with_other_hash_seeds_make_the_same_keys(url: str, namespace: str) -> None:
    found = []
    for number, seed in enumerate(("1", "random")):
        environment = os.environ | {"PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", PROGRAM, url, namespace]
        output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        found.append(json.loads(output))
        with Gate(url, namespace=namespace) as gate:
            for key in KEYS.values():
                if key not in ("", b""):
                    assert gate.forget(key, scope="s"), number
    assert all(each == found[0] for each in found)
    assert {name for name, (outcome, *_) in found[0].items() if outcome != "handled"} <= {"empty text", "empty bytes"}


def test_keys_that_share_a_record_share_the_key_of_a_step(gate: Gate) -> None:
    guard, made = gate.guard("s"), set()
    for key in (7, "7", b"7"):
        guard.run(key, lambda: made.add(current().key_for("charge")))
        gate.forget("7", scope="s")
    assert len(made) == 1
