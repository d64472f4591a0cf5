"""Programs of two versions on one store. What they share is what is stored, and its layout: `docs/keys.md`. A layout
that a program does not know it refuses before it writes anything (`tests/guard/test_foreign.py`,
`tests/topics/test_refusals.py`); with the same layout, texts of two versions of each script work side by side.

A fresh checkout has no older version to run, so the other version is the same scripts with other texts, hence other
hashes: each call is of one version or the other.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from idemgate import Gate, lua
from idemgate.core import calls
from idemgate.guard import claim_calls
from idemgate.lua import Script, script
from idemgate.testing import Clock


def test_calls_of_two_versions_share_what_is_stored(
    url: str,
    raw: Any,
    namespace: str,
    drawn: random.Random,
    seed: int,
    sound: Any,
    monkeypatch: pytest.MonkeyPatch,
    record_fault: Callable[..., None],
) -> None:
    # Given scripts of two versions, of which each call takes either
    versions: dict[str, list[Script]] = {}

    def either(name: str) -> Script:
        if name not in versions:
            old = script(name)
            versions[name] = [old, Script(name, old.text.decode() + "\n-- of a later version\n")]
        return drawn.choice(versions[name])

    monkeypatch.setattr(calls, "script", either)
    monkeypatch.setattr(lua, "script", either)
    monkeypatch.setattr(claim_calls, "script", either)
    clock, ran, handled = Clock(), list[str](), list[int]()
    with Gate(url, namespace=namespace, clock=clock) as gate:
        topic = gate.topic("t", merge="append", slots=2, lease="10s", backoff=0)
        charge = gate.once(key="{key}", scope="s")(lambda key: ran.append(key) or key)
        # When there is much to do
        for n in range(200):
            assert charge(f"k{n // 4}") == f"k{n // 4}"
            topic.trigger(f"k{n % 20}", n, event_id=n)
            assert topic.trigger(f"k{n % 20}", n, event_id=n).status == "duplicate"
            for delivery in topic.take(3) if n % 5 == 0 else []:
                end = drawn.choice(["ack", "nack", "lapse"])
                if end == "lapse":
                    clock.advance("10s")
                elif getattr(topic, end)(delivery) == "ok" and end == "ack":
                    handled += delivery.payload
        while (stats := topic.stats()).pending + stats.in_flight:
            clock.advance("10s")  # what lapsed more than once is tried again within a lease
            taken = topic.take(100)
            assert set(topic.ack(taken)) <= {"ok"}
            handled += [one for delivery in taken for one in delivery.payload]
        # Then nothing is lost, and nothing had two effects
        assert ran == [f"k{n}" for n in range(50)]
        assert sorted(handled) == list(range(200))
        for name in ("guard/claim", "guard/complete", "topics/trigger", "topics/take", "topics/settle"):
            assert raw.script_exists(*(one.sha for one in versions[name])) == [True, True], name
        sound(gate)
    record_fault("two versions of each script at once (N: calls of the busiest)", 400, promises="P2 P6 P7", seed=seed)
