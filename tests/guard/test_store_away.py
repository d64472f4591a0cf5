"""When the store is away: `on_store_error`, and what happens to work that was under way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import tenacity

from idemgate import AlreadyDone, AlreadyInProgress, Gate, KeyReused, StoreUnavailable, current
from idemgate.errors import NotConfigured, ReplayedFailure, ResultUnavailable
from idemgate.testing import Clock


def noting() -> tuple[list[str], Callable[[str], None]]:
    """What ran, and a function that notes it."""
    ran: list[str] = []

    def body(k: str) -> None:
        ran.append(k)

    return ran, body


async def test_on_store_error_raise_runs_nothing(nowhere: Any) -> None:
    ran, body = noting()
    handle = nowhere.once(key="{k}")(body)
    with pytest.raises(StoreUnavailable) as refused:
        await handle("x")
    assert refused.value.executed == "no"
    assert ran == []
    assert nowhere.gate.counters.snapshot() == {}


async def test_on_store_error_run_runs_everything_and_counts_it(nowhere: Any) -> None:
    @nowhere.once(key="{k}", on_store_error="run")
    def handle(k: str) -> tuple[str, int, int]:
        return current().key, current().token, current().attempt

    for _ in range(2):
        assert await handle("x") == ("x", 0, 1)
    assert nowhere.gate.counters.snapshot() == {"once.store_error.run": 2}


async def test_on_store_error_local_runs_a_key_once_in_this_process(nowhere: Any) -> None:
    ran = []

    def body(k: str) -> str:
        ran.append(k)
        if len(ran) == 1:
            raise ValueError("the first fails")
        return "result"

    handle = nowhere.once(key="{k}", on_store_error="local")(body)
    # Given a run that failed, after which the key may run again
    with pytest.raises(ValueError, match="the first fails"):
        await handle("x")
    assert await handle("x") == "result"
    # When it comes again, then it is done here
    assert await handle("x") == "result"
    assert await handle("y") == "result"
    assert ran == ["x", "x", "y"]
    assert nowhere.gate.counters["once.store_error.local"] == 4


async def test_on_store_error_local_answers_duplicates_as_on_done_says(nowhere: Any) -> None:
    skip = nowhere.once(key="{k}", scope="s", on_store_error="local", on_done="skip")(lambda k: k)
    refuse = nowhere.once(key="{k}", scope="s", on_store_error="local", on_done="raise")(lambda k: k)
    assert [await skip("x"), await skip("x")] == ["x", None]
    assert await refuse("x") == "x"
    with pytest.raises(AlreadyDone) as refused:
        await refuse("x")
    assert refused.value.result == "x"
    unstorable = nowhere.once(key="{k}", scope="u", on_store_error="local")(lambda k: object())
    await unstorable("x")
    with pytest.raises(ResultUnavailable, match="object"):
        await unstorable("x")


async def test_on_store_error_local_knows_fingerprints(nowhere: Any) -> None:
    handle = nowhere.once(key="{k}", scope="s", on_store_error="local", fingerprint=["n"])(lambda k, n: n)
    assert [await handle("x", 1), await handle("x", 1)] == [1, 1]
    with pytest.raises(KeyReused):
        await handle("x", 2)


async def test_on_store_error_local_applies_on_error(nowhere: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def body(k: str) -> None:
        ran.append(k)
        raise ValueError("no")

    for policy, error in (("store", ReplayedFailure), ("keep", AlreadyInProgress), ("release", ValueError)):
        handle = nowhere.once(key="{k}", on_store_error="local", on_error=policy, lease="30s")(body)
        with pytest.raises(ValueError, match="no"):
            await handle(policy)
        with pytest.raises(error):
            await handle(policy)
    assert ran == ["store", "keep", "release", "release"]


async def test_on_store_error_local_stores_a_bounded_number_of_bytes(
    nowhere: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(import_module("idemgate.guard.local"), "MAX_BYTES", 250)
    ran = []

    def body(k: str) -> bytes:
        ran.append(k)
        return bytes(100)

    handle = nowhere.once(key="{k}", on_store_error="local")(body)
    for key in "abcba":
        assert await handle(key) == bytes(100)
    assert ran == ["a", "b", "c", "a"]


async def test_on_store_error_local_serves_batches(nowhere: Any) -> None:
    guard = nowhere.guard("s", on_store_error="local")
    assert [one.value for one in await guard.run_many([("a", 1), ("b", 2)], lambda n: n)] == [1, 2]
    again = await guard.run_many([("a", 3), ("c", 4)], lambda n: n)
    assert [(one.outcome, one.value) for one in again] == [("duplicate", 1), ("unguarded", 4)]


async def test_on_store_error_local_runs_a_key_one_at_a_time(nowhere: Any) -> None:
    entered, go_on = threading.Event(), threading.Event()

    def body(k: str) -> str:
        entered.set()
        assert go_on.wait(60)
        return "done"

    options = {"key": "{k}", "on_store_error": "local", "lease": "30s"}
    handle = nowhere.once(**options)(body)
    task = asyncio.create_task(handle("x"))
    assert await asyncio.to_thread(entered.wait, 10)
    with pytest.raises(AlreadyInProgress) as refused:
        await handle("x")
    assert refused.value.retry_after == 30.0
    go_on.set()
    assert await task == "done"


async def test_on_store_error_local_remembers_until_retention_ends(
    nowhere: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = import_module("idemgate.guard.local")
    ran, body = noting()
    handle = nowhere.once(key="{k}", on_store_error="local", on_done="skip", retention="1h")(body)
    await handle("x")
    now = local.monotonic()
    monkeypatch.setattr(local, "monotonic", lambda: now + 3599)
    await handle("x")
    assert ran == ["x"]
    monkeypatch.setattr(local, "monotonic", lambda: now + 3601)
    await handle("x")
    assert ran == ["x", "x"]


async def test_at_most_once_has_no_second_chance_without_the_store_either(nowhere: Any) -> None:
    ran = []

    def body(k: str) -> None:
        ran.append(k)
        raise ValueError("no")

    handle = nowhere.once(key="{k}", on_store_error="local", at_most_once=True)(body)
    with pytest.raises(ValueError, match="no"):
        await handle("x")
    assert await handle("x") is None
    assert ran == ["x"]


@pytest.mark.parametrize("policy", ["run", "local"])
async def test_retry_works_without_the_store_too(nowhere: Any, policy: str) -> None:
    ran = []

    def body(k: str) -> int:
        ran.append(k)
        if len(ran) == 1:
            raise ConnectionError("again")
        return len(ran)

    retry = tenacity.Retrying(stop=tenacity.stop_after_attempt(2), reraise=True)
    assert await nowhere.once(key="{k}", on_store_error=policy, retry=retry)(body)("x") == 2


async def test_shadow_runs_everything_without_the_store_too(nowhere: Any) -> None:
    ran, body = noting()
    handle = nowhere.once(key="{k}", on_store_error="local", shadow=True)(body)
    await handle("x")
    await handle("x")
    assert ran == ["x", "x"]
    assert nowhere.gate.counters["once.shadowed"] == 1


async def test_a_refusal_is_not_a_store_error(face: Any) -> None:
    handle = face.once(key="{k}", scope="s", fingerprint=["n"], on_store_error="run")(lambda k, n: n)
    await handle("x", 1)
    with pytest.raises(KeyReused):
        await handle("x", 2)


async def test_everything_else_says_that_the_store_is_away(nowhere: Any) -> None:
    for ask in (
        nowhere.claim("k"),
        nowhere.first("k", "1h"),
        nowhere.first_many(["a", "b"], "1h"),
        nowhere.inspect("k"),
        nowhere.forget("k"),
        nowhere.resolve("k", done=True),
    ):
        with pytest.raises(StoreUnavailable):
            await ask


# -- gone while the work ran ------------------------------------------------------------------------------------------


async def test_a_result_that_cannot_be_recorded_is_given_all_the_same_and_counted(impatient: Any, wire: Any) -> None:
    # Given a store that goes away while the work runs
    @impatient.once(key="{k}", scope="s", lease="1s")
    def handle(k: str) -> str:
        wire.cut()
        return "the effect happened"

    # When it ends, its caller must not run it again
    assert await handle("x") == "the effect happened"
    assert (impatient.gate.counters["once.completion_lost"], impatient.gate.counters["once.completed"]) == (1, 0)
    # Then what the store knows is that it was started
    wire.mend()
    assert (await impatient.inspect("x", scope="s")).state == "in_progress"


async def test_a_failure_that_cannot_be_recorded_is_raised_all_the_same_and_counted(impatient: Any, wire: Any) -> None:
    @impatient.once(key="{k}", scope="s", lease="1s")
    def handle(k: str) -> str:
        wire.cut()
        raise ValueError("of the work")

    with pytest.raises(ValueError, match="of the work"):
        await handle("x")
    assert impatient.gate.counters["once.completion_lost"] == 1


async def test_a_result_is_recorded_when_the_store_comes_back_within_the_lease(
    face: Any, wire: Any, clock: Clock, namespace: str
) -> None:
    # Given a gate that gives up on a call after a second, and the store, which is away for longer while a run ends
    hasty = type(face)(Gate(wire.url, namespace=namespace, clock=clock, timeout="1s"), face.awaiting)

    @hasty.once(key="{k}", scope="s", lease="60s")
    def handle(k: str) -> str:
        wire.cut()
        threading.Timer(1.5, wire.mend).start()
        return "result"

    await face.inspect("x", scope="s")
    # Then the end of the run is recorded: it has as long as its lease
    assert await handle("x") == "result"
    assert hasty.gate.counters["once.completed"] == 1
    assert (await face.inspect("x", scope="s")).state == "done"
    await hasty.gate.aio.close()
    hasty.gate.close()


# -- no store at all --------------------------------------------------------------------------------------------------


async def test_a_gate_without_a_store_decorates_and_says_so_when_used(
    face: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("IDEMGATE_URL", raising=False)
    unnamed = type(face)(Gate(), face.awaiting)
    ran, body = noting()
    for policy in ("raise", "run", "local"):
        handle = unnamed.once(key="{k}", on_store_error=policy)(body)
        with pytest.raises(NotConfigured, match="IDEMGATE_URL"):
            await handle("x")
    assert ran == []
