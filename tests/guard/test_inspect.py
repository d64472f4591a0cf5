"""What `inspect` shows of a key, and the counters as a mapping."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC
from typing import Any

import pytest

from idemgate import Gate, current
from idemgate.guard.claim_calls import Claims
from idemgate.testing import Clock


async def test_a_record_has_its_value_decoded_and_its_time_as_a_datetime(face: Any, clock: Clock) -> None:
    handle = face.once(key="{k}", scope="s")(lambda k: {"total": (1, 2)})
    began = clock.now()
    clock.advance("1s")
    await handle("a")
    record = await face.inspect("a", scope="s")
    assert record.value == {"total": (1, 2)}
    assert record.since is not None
    assert (record.since.tzinfo, (record.since - began).total_seconds()) == (UTC, 1.0)
    assert (record.recovered, record.unstored_reason) == (None, None)


async def test_a_record_shows_a_failure_a_checkpoint_and_why_nothing_was_stored(face: Any) -> None:
    def fail(k: str) -> None:
        current().checkpoint([1, k])
        raise ValueError("no")

    for policy in ("store", "keep"):
        with pytest.raises(ValueError, match="no"):
            await face.once(key="{k}", scope=policy, on_error=policy)(fail)("a")
    await face.once(key="{k}", scope="object")(lambda k: object())("a")
    assert (await face.inspect("a", scope="store")).value == {"failed": "builtins.ValueError", "text": "no"}
    assert (await face.inspect("a", scope="keep")).recovered == [1, "a"]
    unstored = await face.inspect("a", scope="object")
    assert unstored.value is None
    assert "result: is a object" in unstored.unstored_reason


async def test_a_record_is_readable_and_shows_no_stored_data(face: Any) -> None:
    await face.once(key="{k}", scope="s", retention="60s")(lambda k: "secret")("a")
    record = await face.inspect("a", scope="s")
    assert repr(record).startswith(f"<Record done attempts=1 token={record.token} since=2")
    assert repr(record).endswith(" retention_left=60.0>")
    assert repr(await face.inspect("b", scope="s")) == "<Record absent>"


async def test_an_absent_key_names_the_scopes_that_know_it(face: Any) -> None:
    for scope in ("charge", "refund", "mail"):
        guard = face.guard(scope)
        if scope != "mail":
            await guard.run("a", lambda: None)
    record = await face.inspect("a")
    assert (record.state, record.other_scopes) == ("absent", ("charge", "refund"))
    assert "other_scopes=charge, refund" in repr(record)
    assert (await face.inspect("b")).other_scopes == ()
    assert (await face.inspect("a", scope="charge")).other_scopes == ()


async def test_a_key_that_is_done_anew_while_it_is_forgotten_is_forgotten(
    face: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a key that is done
    gate.guard("s").run("a", lambda: 1)
    build, built = Claims.forget, []

    def forget(*args: Any) -> Any:
        built.append(args)
        if len(built) == 1:
            # And another program that forgets and runs it after its record was read
            assert gate.forget("a", scope="s")
            gate.guard("s").run("a", lambda: 2)
        return build(*args)

    monkeypatch.setattr(Claims, "forget", forget)
    # When it is forgotten, then its new record is read and deleted
    assert await face.forget("a", scope="s")
    assert (await face.inspect("a", scope="s")).state == "absent"
    assert len(built) == 3


def test_counters_are_a_mapping(gate: Gate) -> None:
    counters = gate.counters
    assert isinstance(counters, Mapping)
    assert ("once.done" in counters, counters["once.done"]) == (False, 0)
    gate.context.counters.add("once.done", 2)
    assert ("once.done" in counters, dict(counters.items()), [*counters.values()]) == (True, {"once.done": 2}, [2])
    assert {**counters} == counters == {"once.done": 2}
