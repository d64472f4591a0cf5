"""Claims, completions and marks by plain commands: SET NX GET with PEXPIRETIME, SET IFEQ, and SET NX GET.

The server has these commands, and the gates have no test clock, which only the scripts know. Time passes by a change of
the key's expiry, from which the times of such a record follow.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from idemgate import AlreadyInProgress, Gate
from idemgate.cli.acl_rules import rule
from idemgate.core.calls import Call, new_id
from idemgate.core.codec import Codec
from idemgate.errors import OutcomeUnknown, ReplayedFailure, ServerRejected, StoreUnavailable, UnexpectedData
from idemgate.guard.claim_calls import Claims
from idemgate.guard.options import claim_options
from idemgate.lua import Script
from idemgate.store import clients, connection_aio, sync
from idemgate.testing.proxy import Proxy
from tests.conftest import PASSWORD, Face
from tests.faults import broken
from tests.guard.conftest import Wire, ask_for_plain
from tests.waiting import eventually

pytestmark = pytest.mark.one_in(3)

CLAIM, DONE = 192, (245, 246, 247)
"""The first bytes of the records."""
MARK_SIZE = 23
"""The bytes of the record of a mark, which begins as that of a claim."""
LEASE, KEEP = 30_000, 86_400_000
"""The defaults, in ms."""
LOOKED_AT = 5_000
"""The age in ms up to which a claim is looked at before it is forgotten by force."""
SECOND = b"*2\r\n$11\r\nPEXPIRETIME"
"""Where the second command of a claim begins."""
RESULT = Codec().encode("result")
LASTING = b"\xf5" + bytes(20)
"""A record that is done, and needs an expiry."""


@pytest.fixture
def record(plain: Any, plain_raw: Any) -> Callable[..., bytes]:
    """`record("k")`: what is stored for a key of `gate.claim`, or of another scope."""
    return lambda key, scope="claim": plain_raw.get(Claims(plain.gate.namespace, None).key(scope, key)[0]) or b""


@pytest.fixture
def passes(plain: Any, plain_raw: Any) -> Callable[..., None]:
    """`passes("k", 40_000)`: this time passes for the record of a key."""

    def expire_sooner(key: str, ms: int, scope: str = "claim") -> None:
        [name] = Claims(plain.gate.namespace, None).key(scope, key)
        assert plain_raw.pexpire(name, plain_raw.pttl(name) - ms)

    return expire_sooner


async def test_a_first_call_and_its_replays_run_no_script(plain: Any, record: Any) -> None:
    seen = []

    def work(k: str) -> str:
        seen.append(record(k, "s")[0])
        return f"did {k}"

    handle = plain.once(key="{k}", scope="s")(work)
    assert [await handle("x") for _ in range(3)] == ["did x"] * 3
    assert (seen, record("x", "s")[0]) == ([CLAIM], DONE[0])
    found = await plain.inspect("x", scope="s")
    assert (found.state, found.attempts, found.taken_over, found.value) == ("done", 1, 0, "did x")
    assert found.retention_left == pytest.approx(KEEP / 1000, abs=60)


async def test_two_round_trips_without_a_script_for_a_new_key_and_one_for_a_duplicate(
    plain: Any, plain_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("idemgate.guard.heartbeat.REGISTER_AFTER", 3600.0)
    wire = Wire(plain_url, tmp_path / "wire.sock")
    gate = Gate(wire.url, namespace=plain.gate.namespace, timeout="60s")
    handle = (await ask_for_plain(Face(gate, plain.awaiting))).once(key="{k}", scope="s")(lambda k: k)
    for trips in (2, 1):
        wire.reset()
        assert await handle("x") == "x"
        assert (wire.scripts, wire.trips) == (0, trips)
    await gate.aio.close()
    gate.close()
    wire.close()


async def test_what_is_done_without_a_value_is_told_as_by_the_script(plain: Any, record: Any) -> None:
    def fails(k: str) -> None:
        raise ValueError(k)

    handle = plain.once(key="{k}", scope="f", on_error="store")(fails)
    with pytest.raises(ValueError, match="x"):
        await handle("x")
    assert record("x", "f")[0] == DONE[2]
    for _ in range(2):
        with pytest.raises(ReplayedFailure, match="x"):
            await handle("x")
    assert (await plain.inspect("x", scope="f")).state == "failed"
    unstorable = plain.once(key="{k}", scope="n", on_done="skip")(lambda k: object())
    await unstorable("x")
    assert record("x", "n")[0] == DONE[1]
    assert await unstorable("x") is None
    assert (await plain.inspect("x", scope="n")).unstored_reason


async def test_the_token_is_the_one_that_every_reader_finds_and_it_rises(
    plain: Any, record: Any, passes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("idemgate.guard.manage.LOOK_SECONDS", 0.0)  # one claim of a script in 1,000 is looked at, too
    # 64 keys, each decided about within the ms in which it was claimed: most of them are
    for n in range(64):
        first = await plain.claim(f"k{n}")
        assert record(f"k{n}")[0] == CLAIM
        await first.complete(1)
        await plain.forget(f"k{n}")
        second = await plain.claim(f"k{n}")
        assert (await plain.inspect(f"k{n}")).token == second.token > first.token
        passes(f"k{n}", LOOKED_AT)
        await plain.forget(f"k{n}", force=True)
        assert (await plain.claim(f"k{n}")).token > second.token


async def test_a_claim_that_is_not_young_is_forgotten_at_once(
    plain: Any, record: Any, passes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("idemgate.guard.manage.LOOK_SECONDS", 3600.0)
    first = await plain.claim("k")
    passes("k", LOOKED_AT)
    assert record("k")[0] == CLAIM
    assert await plain.forget("k", force=True)
    assert not await first.complete("late")
    assert (await plain.claim("k")).token > first.token


async def test_a_claim_is_read_as_it_was_made(plain: Any, record: Any) -> None:
    claim = await plain.claim("k", lease="20s", retention="2h")
    found = await plain.inspect("k")
    assert record("k")[0] == CLAIM
    assert (found.state, found.token, found.attempts, found.taken_over) == ("in_progress", claim.token, 1, 0)
    assert 0 < found.lease_left <= 20
    assert found.since.timestamp() * 1_000_000 == pytest.approx(claim.token)
    other = await plain.claim("k")
    assert (other.state, other.attempt) == ("in_progress", 1)


@pytest.mark.parametrize("verb", ["checkpoint", "extend", "cancel"])
async def test_a_claim_that_the_scripts_have_changed_is_completed(plain: Any, record: Any, verb: str) -> None:
    claim = await plain.claim("k")
    if verb == "cancel":
        assert await plain.cancel("k")
    else:
        assert await (claim.checkpoint("half") if verb == "checkpoint" else claim.extend("50s"))
    found = await plain.inspect("k")
    assert (found.state, found.token, found.recovered) == (
        "in_progress", claim.token, "half" if verb == "checkpoint" else None
    )  # fmt: skip
    assert record("k")[0] not in (CLAIM, *DONE)
    assert await claim.complete("all")
    assert (await plain.inspect("k")).value == "all"


async def test_a_released_claim_is_claimed_again(plain: Any) -> None:
    claim = await plain.claim("k")
    assert await claim.release()
    again = await plain.claim("k")
    assert (again.state, again.attempt) == ("started", 2)
    assert again.token > claim.token


async def test_a_lapsed_claim_is_taken_over_and_its_owner_fenced_off(plain: Any, record: Any, passes: Any) -> None:
    claim = await plain.claim("k")
    passes("k", LEASE + 1)
    assert (await plain.inspect("k")).state == "lapsed"
    again = await plain.claim("k")
    assert (again.state, again.attempt) == ("started", 2)
    assert not await claim.complete("late")
    assert not await claim.release()
    assert await again.complete("now")


async def test_a_lapsed_claim_that_no_other_caller_took_is_completed(plain: Any, record: Any, passes: Any) -> None:
    claim = await plain.claim("k")
    passes("k", LEASE + 1)
    assert await claim.complete("late")
    assert record("k")[0] == DONE[0]


async def test_a_held_claim_waits_for_a_decision(plain: Any, record: Any, passes: Any) -> None:
    await plain.claim("k", on_lease_loss="hold")
    assert record("k")[0] == CLAIM
    passes("k", LEASE + 1)
    assert (await plain.inspect("k")).state == "held"
    with pytest.raises(OutcomeUnknown):
        await plain.claim("k", on_lease_loss="hold")
    await plain.resolve("k", done=True, result="decided", retention="1h")
    assert (await plain.inspect("k")).value == "decided"


async def test_attempts_are_counted_from_a_plain_claim_on(plain: Any, passes: Any) -> None:
    await plain.claim("k", max_attempts=2)
    passes("k", LEASE + 1)
    assert (await plain.claim("k", max_attempts=2)).attempt == 2


async def test_retention_ends_with_the_key(plain: Any, record: Any, passes: Any) -> None:
    claim = await plain.claim("k", retention="2m")
    await claim.complete("done", retention="1m")
    assert (await plain.inspect("k")).retention_left <= 60
    passes("k", 30_000)
    assert (await plain.claim("k")).state == "done"
    assert 0 < (await plain.inspect("k")).retention_left <= 30


async def test_the_next_calls_of_a_waiting_caller_get_the_result(plain: Any) -> None:
    started, end = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def work(k: str) -> str:
        loop.call_soon_threadsafe(started.set)
        asyncio.run_coroutine_threadsafe(end.wait(), loop).result(20)
        return "result"

    handle = plain.once(key="{k}", scope="s", on_in_progress="wait")(work)
    first = asyncio.ensure_future(handle("k"))
    await asyncio.wait_for(started.wait(), 20)
    second = asyncio.ensure_future(handle("k"))
    counters = plain.gate.counters

    async def is_noted() -> bool:
        found = plain.gate.context.link.command("GET", *Claims(plain.gate.namespace, None).key("s", "k"))
        return bool(found[0] != CLAIM)

    await eventually(is_noted)
    end.set()
    assert await asyncio.wait_for(asyncio.gather(first, second), 20) == ["result"] * 2
    assert dict(counters)["once.done"] == 1


# -- copies, lost replies, interruptions ------------------------------------------------------------------------------


def _claim(plain: Any, owner: bytes) -> tuple[Claims, Any]:
    claims = Claims(plain.gate.namespace, None)
    return claims, claims.plain_claim(claims.key("claim", "k"), owner, claim_options(Codec(), {}), 0)


async def _run(plain: Any, call: Call[Any]) -> Any:
    context = plain.gate.context
    return await context.aio_link.run(call) if plain.awaiting else context.link.run(call)


def _by_script(call: Call[Any]) -> Call[Any]:
    """Return the call without its plain commands, as a retry sends it."""
    return Call(call.script, call.keys, call.args, call.read)


async def test_a_late_copy_of_a_request_gets_the_first_answer(plain: Any, record: Any) -> None:
    owner = new_id()
    claims, claim = _claim(plain, owner)
    first = await _run(plain, claim)
    assert record("k")[0] == CLAIM
    for copy in (claim, _by_script(claim)):
        reply = await _run(plain, copy)
        assert (reply.state, reply.token, reply.attempt) == ("started", first.token, 1)
    completion = claims.complete(claim.keys, owner, first.token, KEEP, b"v", RESULT, first.stored)
    assert await _run(plain, completion)
    before = record("k")
    for copy in (completion, _by_script(completion)):
        assert await _run(plain, copy)
    stranger = claims.complete(claim.keys, new_id(), first.token + 1, KEEP, b"v", RESULT, first.stored)
    assert not await _run(plain, stranger)
    assert record("k") == before


async def test_a_completion_replaces_nothing_but_its_own_claim(plain: Any, passes: Any) -> None:
    owner = new_id()
    claims, claim = _claim(plain, owner)
    first = await _run(plain, claim)
    passes("k", LEASE + 1)
    second = await _run(plain, claims.claim(claim.keys, new_id(), LEASE, KEEP))
    assert second.taken_over == 1
    assert not await _run(plain, claims.complete(claim.keys, owner, first.token, KEEP, b"v", RESULT, first.stored))
    assert second.token > first.token
    assert (await _run(plain, claims.inspect(claim.keys))).state == "in_progress"


@pytest.fixture
async def split(
    plain: Any, plain_url: str, record: Any, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Proxy, asyncio.Future[Any]]]:
    """A claim of "k" of which the server has only the first command. The second one arrives with `proxy.join()`."""
    for module in (clients, sync, connection_aio):
        monkeypatch.setattr(module, "SOCKET_TIMEOUT", 60.0)
    with Proxy(plain_url) as proxy:
        gate = Gate(proxy.url, namespace=plain.gate.namespace, timeout="120s")
        face = await ask_for_plain(Face(gate, plain.awaiting))
        proxy.split_request(SECOND)
        claiming = asyncio.ensure_future(face.claim("k"))
        await eventually(lambda: record("k")[:1] == bytes([CLAIM]))
        yield proxy, claiming
        proxy.join()
        await gate.aio.close()
        gate.close()


@pytest.mark.parametrize("form", ["plain", "changed by a script"])
async def test_a_forgotten_owner_reads_no_token_of_a_later_claim(
    plain: Any, split: tuple[Proxy, asyncio.Future[Any]], record: Any, form: str
) -> None:
    # Given a claim whose owner has not read its token
    proxy, claiming = split
    if form != "plain":
        assert await plain.cancel("k")
        assert record("k")[0] != CLAIM
    # When another client forgets it by force, and claims it for longer
    assert await plain.forget("k", force=True)
    other = await plain.claim("k", retention="30d")
    proxy.join()
    # Then the owner learns that the key is not its own
    late = await asyncio.wait_for(claiming, 60)
    assert (late.state, other.state) == ("in_progress", "started")
    assert (await plain.inspect("k")).token == other.token


async def test_an_owner_whose_reply_was_late_gets_its_token_from_the_script(
    plain: Any, split: tuple[Proxy, asyncio.Future[Any]], record: Any
) -> None:
    proxy, claiming = split
    await plain.claim("other")
    assert await plain.forget("other", force=True)  # takes longer than the reply may take
    proxy.join()
    claim = await asyncio.wait_for(claiming, 60)
    assert (claim.state, claim.attempt, record("k")[0]) == ("started", 1, CLAIM)
    assert claim.token == (await plain.inspect("k")).token
    assert await claim.complete("done")


@pytest.mark.parametrize("lost", ["claim", "completion"])
async def test_a_lost_reply_is_asked_for_again(plain: Any, plain_url: str, tmp_path: Path, lost: str) -> None:
    wire, runs = Wire(plain_url, tmp_path / "wire.sock"), []
    gate = Gate(wire.url, namespace=plain.gate.namespace, timeout="60s")

    def work(k: str) -> str:
        runs.append(k)
        if lost == "completion":
            wire.flowing.clear()
        return k

    handle = (await ask_for_plain(Face(gate, plain.awaiting))).once(key="{k}", scope="s")(work)
    [name] = Claims(gate.namespace, None).key("s", "x")
    if lost == "claim":
        wire.flowing.clear()
    task = asyncio.ensure_future(handle("x"))
    wanted = CLAIM if lost == "claim" else DONE[0]

    async def is_stored() -> bool:
        with redis.Redis.from_url(plain_url) as client:
            return bool((client.get(name) or b"\0")[0] == wanted)

    await eventually(is_stored)
    wire.cut()
    wire.mend()
    wire.flowing.set()
    assert await asyncio.wait_for(task, 60) == "x"
    assert runs == ["x"]
    found = await plain.inspect("x", scope="s")
    assert (found.state, found.attempts) == ("done", 1)
    await gate.aio.close()
    gate.close()
    wire.close()


async def test_work_runs_once_while_requests_and_replies_are_lost(
    plain: Any, plain_url: str, drawn: random.Random
) -> None:
    """Callers of 64 keys, some of which several callers want at once, so that plain commands and scripts alternate."""
    runs, keys = Counter[str](), [f"k{n}" for n in range(64)]
    with Proxy(plain_url) as proxy:
        gate = Gate(proxy.url, namespace=plain.gate.namespace, timeout="60s")
        face = await ask_for_plain(Face(gate, plain.awaiting))
        handle = face.once(key="{k}", scope="s", on_in_progress="wait", wait="50s")(
            lambda k: runs.update([k]) or f"did {k}"
        )
        for word in (b"$2\r\nNX\r\n", b"$4\r\nIFEQ\r\n", b"EVALSHA"):
            for fault in (proxy.cut_reply, proxy.drop_request, proxy.double_request):
                fault(word, times=3)
        for start in range(0, 64, 16):
            calls = [key for key in keys[start : start + 16] for _ in range(drawn.choice((1, 1, 3)))]
            drawn.shuffle(calls)
            assert await asyncio.gather(*map(handle, calls)) == [f"did {key}" for key in calls]
        assert proxy.faults_left < 27
        await gate.aio.close()
        gate.close()
    assert runs == dict.fromkeys(keys, 1)


async def test_a_caller_that_is_cancelled_while_it_claims_holds_nothing(
    plain: Any, plain_url: str, tmp_path: Path
) -> None:
    wire = Wire(plain_url, tmp_path / "wire.sock")
    gate = Gate(wire.url, namespace=plain.gate.namespace, timeout="60s")
    await ask_for_plain(Face(gate, True))
    [name] = Claims(gate.namespace, None).key("claim", "x")
    wire.flowing.clear()
    task = asyncio.ensure_future(gate.aio.claim("x"))

    async def is_claimed() -> bool:
        with redis.Redis.from_url(plain_url) as client:
            return bool((client.get(name) or b"\0")[0] == CLAIM)

    await eventually(is_claimed)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    wire.flowing.set()
    await gate.aio.close()
    assert (await plain.inspect("x")).state == "released"
    gate.close()
    wire.close()


# -- marks and batches ------------------------------------------------------------------------------------------------


@pytest.fixture
async def counted(
    plain: Any, plain_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Face, Wire]]:
    """A gate behind a wire that counts scripts and round trips."""
    monkeypatch.setattr("idemgate.guard.heartbeat.REGISTER_AFTER", 3600.0)
    wire = Wire(plain_url, tmp_path / "wire.sock")
    gate = Gate(wire.url, namespace=plain.gate.namespace, timeout="60s")
    yield await ask_for_plain(Face(gate, plain.awaiting)), wire
    await gate.aio.close()
    gate.close()
    wire.close()


async def test_a_mark_runs_no_script_and_takes_one_round_trip(
    plain: Any, counted: tuple[Face, Wire], record: Any
) -> None:
    face, wire = counted
    for is_first in (True, False):
        wire.reset()
        assert await face.first("k", "90s") is is_first
        assert (wire.scripts, wire.trips) == (0, 1)
    assert (record("k", "first")[0], len(record("k", "first"))) == (CLAIM, MARK_SIZE)
    found = await plain.inspect("k", scope="first")
    assert (found.state, found.attempts, found.kind, found.checkpoint) == ("done", 1, "n", b"")
    assert found.since.timestamp() * 1_000_000 == pytest.approx(found.token)
    assert found.retention_left == pytest.approx(90, abs=60)


async def test_batches_run_no_script_for_keys_that_are_new_or_done(counted: tuple[Face, Wire]) -> None:
    face, wire = counted
    keys = [f"k{n}" for n in range(250)]
    wire.reset()
    assert await face.first_many([*keys, "k7"], "1h") == [True] * 250 + [False]
    assert await face.first_many([*keys, "new"], "1h") == [False] * 250 + [True]
    claims = await face.claim_many(keys)
    assert {claim.state for claim in claims} == {"started"}
    assert wire.scripts == 0
    assert all(await face.complete_many([(claim, n) for n, claim in enumerate(claims)]))
    wire.reset()
    again = await face.claim_many([*keys, "new"])
    assert [claim.result for claim in again] == [*range(250), None]
    assert (again[250].state, wire.scripts) == ("started", 0)


async def test_a_batch_asks_the_script_for_the_other_keys_only(
    plain: Any, counted: tuple[Face, Wire], plain_raw: Any, record: Any
) -> None:
    # Given keys of which only two are new or done
    face, wire = counted
    await (await plain.claim("done")).complete("result")
    await plain.claim("runs")
    await (await plain.claim("released")).release()
    [foreign] = Claims(plain.gate.namespace, None).key("claim", "foreign")
    plain_raw.set(foreign, "x")
    # When they are claimed together
    wire.reset()
    runs, new, strange, done, released = await face.claim_many(["runs", "new", "foreign", "done", "released"])
    # Then one script call has the others, and the owner of the new key completes it without a script
    assert [claim.state for claim in (runs, new, done, released)] == ["in_progress", "started", "done", "started"]
    assert isinstance(strange.error, UnexpectedData)
    assert (released.attempt, done.result, wire.scripts) == (2, "result", 1)
    assert new.token == (await plain.inspect("new")).token
    await (new.complete("x") if plain.awaiting else asyncio.to_thread(new.complete, "x"))
    assert (record("new")[0], wire.scripts) == (DONE[0], 1)
    plain_raw.delete(foreign)


FORMS = ["done", "failed", "done with a fingerprint", "marked", "marked by a script", "running", "released", "lapsed"]
"""What is stored under a key before it is marked."""


async def _store(plain: Any, form: str, key: str, passes: Any) -> None:
    def body(k: str) -> None:
        if form == "failed":
            raise ValueError(k)

    if form == "marked":
        assert await plain.first(key, "1h", scope="s")
    elif form in ("running", "released", "lapsed"):
        claim = await plain.claim(key, scope="s")
        if form == "released":
            await claim.release()
        elif form == "lapsed":
            passes(key, LEASE + 1, "s")
    else:
        options: dict[str, Any] = {"failed": {"on_error": "store"}, "marked by a script": {"at_most_once": True}}
        options |= {"done with a fingerprint": {"fingerprint": ["k"]}}
        with suppress(ValueError):
            await plain.once(key="{k}", scope="s", **options.get(form, {}))(body)(key)


@pytest.mark.parametrize("form", FORMS)
async def test_a_mark_is_answered_as_the_script_answers(plain: Any, passes: Any, form: str) -> None:
    for key in ("a", "b", "c"):
        await _store(plain, form, key, passes)
    is_first = form in ("released", "lapsed")
    assert await plain.first("a", "1h", scope="s") is is_first
    assert await plain.first_many(["b", "new", "c", "a"], "1h", scope="s") == [is_first, True, is_first, False]
    assert await plain.first_many(["b", "a"], "1h", scope="s") == [False, False]


async def test_a_mark_is_read_by_the_other_verbs(plain: Any) -> None:
    assert await plain.first("k", "1h", scope="s")
    token = (await plain.inspect("k", scope="s")).token
    assert (await plain.claim("k", scope="s")).state == "done"
    assert not await plain.cancel("k", scope="s")
    assert await plain.forget("k", scope="s")
    assert await plain.first("k", "1h", scope="s")
    assert (await plain.inspect("k", scope="s")).token > token


async def test_a_copy_of_a_mark_gets_the_first_answer(plain: Any, record: Any) -> None:
    claims = Claims(plain.gate.namespace, None)
    first, other = (claims.first(claims.key("claim", "k"), KEEP) for _ in range(2))
    assert await _run(plain, first)
    before = record("k")
    assert len(before) == MARK_SIZE
    for copy in (first, _by_script(first)):
        assert await _run(plain, copy)
    for copy in (other, _by_script(other)):
        assert not await _run(plain, copy)
    assert record("k") == before


async def test_marks_and_batches_are_answered_once_while_requests_and_replies_are_lost(
    plain: Any, plain_url: str
) -> None:
    planned = 0
    with Proxy(plain_url) as proxy:
        gate = Gate(proxy.url, namespace=plain.gate.namespace, timeout="60s")
        face = await ask_for_plain(Face(gate, plain.awaiting))

        def spoil() -> None:
            nonlocal planned
            if not proxy.faults_left:  # a new connection begins with scripts
                faults = proxy.cut_reply, proxy.drop_request, proxy.double_request
                faults[planned % 3](b"$2\r\nNX\r\n")
                planned += 1

        for n in range(64):
            spoil()
            assert await face.first(f"k{n}", "1h")
            spoil()
            assert await face.first_many([f"k{n}", f"l{n}", f"m{n}"], "1h") == [False, True, True]
            spoil()
            claims = await face.claim_many([f"k{n}", f"l{n}", f"k{n}"])
            assert [(claim.state, claim.attempt) for claim in claims[:2]] == [("started", 1)] * 2
            assert claims[2].state == "in_progress"
        await gate.aio.close()
        gate.close()
    assert planned > 32


@pytest.mark.parametrize("batch", [False, True], ids=["one", "batch"])
async def test_a_claim_whose_connection_is_lost_between_its_two_replies_asks_the_script(
    plain: Any, plain_url: str, record: Any, batch: bool
) -> None:
    with Proxy(plain_url) as proxy:
        gate = Gate(proxy.url, namespace=plain.gate.namespace, timeout="60s")
        face = await ask_for_plain(Face(gate, plain.awaiting))
        proxy.cut_reply_at(SECOND, len(b"$-1\r\n"))
        claims = await face.claim_many(["k", "l"]) if batch else [await face.claim("k")]
        assert proxy.faults_left == 0
        assert [(claim.state, claim.attempt) for claim in claims] == [("started", 1)] * len(claims)
        assert record("k")[0] == CLAIM
        assert claims[0].token == (await plain.inspect("k")).token
        assert await (face.complete_many([(claim, 1) for claim in claims]) if batch else claims[0].complete(1))
        await gate.aio.close()
        gate.close()


async def test_a_batch_whose_replies_were_late_gets_its_tokens_from_the_script(
    plain: Any, record: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("idemgate.guard.claim_calls.PAIR_SECONDS", -1.0)
    claims = await plain.claim_many(["k", "l"])
    assert [(claim.state, claim.token) for claim in claims] == [
        ("started", (await plain.inspect(key)).token) for key in ("k", "l")
    ]
    assert record("k")[0] == CLAIM


# -- what the scripts do ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{"fingerprint": ["k"]}, {"cache_size": 8}, {"retention": "90s"}, {"at_most_once": True}, {"lease": "5s"}],
    ids=str,
)
async def test_options_that_stay_on_the_scripts(plain: Any, record: Any, options: Any) -> None:
    seen = []
    handle = plain.once(key="{k}", scope="s", **options)(lambda k: seen.append(record(k, "s")[0]))
    await handle("x")
    await handle("x")
    assert len(seen) == 1
    assert not {CLAIM, *DONE} & {*seen, record("x", "s")[0]}


@pytest.mark.parametrize(
    "stored",
    [["x"], b"x", b"", b"\xf5", b"\xf5abc", b"\xf8" + bytes(7), b"\xfc" + bytes(8), LASTING, None],
    ids=["list", "text", "nothing", "code", "cut", "no token", "no result", "done, lasting", "claim, lasting"],
)  # fmt: skip
async def test_foreign_data_is_told_by_the_script(plain: Any, plain_raw: Any, stored: Any, record: Any) -> None:
    [name] = Claims(plain.gate.namespace, None).key("claim", "k")
    if isinstance(stored, list):
        plain_raw.rpush(name, *stored)
    elif stored is not None:
        plain_raw.set(name, stored)
    else:
        await plain.claim("k")
        plain_raw.persist(name)
    told = r"another type|another layout|lost its expiry"
    for claim in (plain.claim_many(["k"]), plain.claim_many(["k", "other"])):
        assert re.search(told, str((await claim)[0].error))
    with pytest.raises(UnexpectedData, match=told):
        await plain.claim("k")
    if stored != LASTING:  # a mark is one command, which reads no expiry
        for mark in (plain.first("k", "1h", scope="claim"), plain.first_many(["k", "l"], "1h", scope="claim")):
            with pytest.raises(UnexpectedData, match=told):
                await mark
    plain_raw.delete(name)
    await (await plain.claim("k")).release()


async def test_an_old_version_refuses_the_records(plain: Any, record: Any) -> None:
    """A reader of an older version must not take such a claim for one that has lapsed."""
    old = Script("guard/claim", broken("guard/claim", "records of plain commands are unknown"))
    owner = new_id()
    claims, claim = _claim(plain, owner)
    reply = await _run(plain, claim)
    for code in (CLAIM, DONE[0]):
        assert record("k")[0] == code
        other = claims.claim(claim.keys, new_id(), LEASE, KEEP)
        with pytest.raises(UnexpectedData, match="another layout"):
            await _run(plain, Call(old, other.keys, other.args, other.read))
        await _run(plain, claims.complete(claim.keys, owner, reply.token, KEEP, b"v", RESULT, reply.stored))


# -- servers and users without the commands ---------------------------------------------------------------------------


@pytest.fixture
def user(plain_url: str, plain_raw: Any, namespace: str) -> Iterator[Callable[..., str]]:
    """`user(since_7_2=True)`: the URL of a user with the role of the guard."""
    name = f"{namespace}-guard"

    def make(**options: bool) -> str:
        plain_raw.execute_command(*rule(["guard"], namespace, name, **options))
        plain_raw.execute_command("ACL", "SETUSER", name, f">{PASSWORD}")
        scheme, _, rest = plain_url.partition("://")
        return f"{scheme}://{name}:{PASSWORD}@{rest}"

    yield make
    plain_raw.execute_command("ACL", "DELUSER", name)


@pytest.fixture
async def limited(plain: Any, user: Any) -> AsyncIterator[Callable[..., Any]]:
    """`await limited(since_7_2=True)`: both flavours of a gate of that user."""
    made = list[Gate]()

    async def make(**options: bool) -> Face:
        made.append(Gate(user(**options), namespace=plain.gate.namespace))
        return await ask_for_plain(Face(made[-1], plain.awaiting))

    yield make
    for gate in made:
        await gate.aio.close()
        gate.close()


async def test_a_user_whose_rights_lack_a_command_uses_the_scripts(plain: Any, limited: Any, record: Any) -> None:
    for since_7_2 in (False, True):
        face = await limited(since_7_2=since_7_2)
        claim = await face.claim(f"k{since_7_2}")
        assert (record(f"k{since_7_2}")[0] == CLAIM) is since_7_2
        assert await claim.complete("done")
        assert (await face.claim(f"k{since_7_2}")).state == "done"


async def test_a_user_whose_rights_are_taken_gets_the_error_of_the_script_and_nothing_is_written(
    plain: Any, plain_raw: Any, limited: Any, record: Any
) -> None:
    face = await limited(since_7_2=True)
    plain_raw.execute_command("ACL", "SETUSER", f"{face.gate.namespace}-guard", "-set")
    with pytest.raises(ServerRejected, match="access list"):
        await face.claim("k")
    assert record("k") == b""
    plain_raw.execute_command("ACL", "SETUSER", f"{face.gate.namespace}-guard", "+set", "-pexpiretime")
    assert (await face.claim("k")).state == "started"
    assert record("k")[0] != CLAIM


async def test_claims_whose_second_command_is_refused_are_taken_back_and_made_by_the_script(
    plain: Any, plain_raw: Any, limited: Any, record: Any
) -> None:
    # Given a user that loses a right while its connections are open
    face = await limited(since_7_2=True)
    assert (await face.claim("before")).state == "started"
    assert record("before")[0] == CLAIM
    plain_raw.execute_command("ACL", "SETUSER", f"{face.gate.namespace}-guard", "-pexpiretime")
    # When it claims many keys at once, then each is granted by the script
    names = [f"k{n}" for n in range(20)]
    claims = await asyncio.gather(*(face.claim(name, on_lease_loss="hold") for name in names))
    assert [claim.state for claim in claims] == ["started"] * 20
    assert CLAIM not in {record(name)[0] for name in names}
    assert all(await asyncio.gather(*(claim.complete() for claim in claims)))


async def test_a_batch_whose_second_commands_are_refused_is_taken_back_and_made_by_the_script(
    plain: Any, plain_raw: Any, limited: Any, record: Any
) -> None:
    face = await limited(since_7_2=True)
    await (await plain.claim("done")).complete("result")
    await plain.claim("runs")
    plain_raw.execute_command("ACL", "SETUSER", f"{face.gate.namespace}-guard", "-pexpiretime")
    names = [f"k{n}" for n in range(20)]
    claims = await face.claim_many([*names, "k0"], on_lease_loss="hold")
    assert [claim.state for claim in claims] == ["started"] * 20 + ["in_progress"]
    assert CLAIM not in {record(name)[0] for name in names}
    assert all(await face.complete_many([(claim, 1) for claim in claims[:20]]))
    assert record("runs")[0] == CLAIM
    assert await face.first("k", "1h")
    assert await face.first_many(["k", "l"], "1h") == [False, True]
    assert CLAIM not in {record(name, "first")[0] for name in "kl"}


@pytest.mark.parametrize("many", [False, True], ids=["one", "batch"])
async def test_a_claim_is_not_granted_while_its_undo_may_still_arrive(
    plain: Any, plain_raw: Any, user: Any, many: bool
) -> None:
    # Given a user that loses a right, and whose undo of a claim is late
    with Proxy(user(since_7_2=True)) as proxy:
        face = await ask_for_plain(Face(Gate(proxy.url, namespace=plain.gate.namespace), plain.awaiting))
        await face.claim_many(["warm 1", "warm 2"])
        proxy.hold_request(b"PXAT")
        plain_raw.execute_command("ACL", "SETUSER", f"{face.gate.namespace}-guard", "-pexpiretime")
        # When it claims, then it is not told that it owns the key
        with pytest.raises(StoreUnavailable, match="was not taken back") as caught:
            await (face.claim_many(["k"]) if many else face.claim("k"))
        assert caught.value.executed == "unknown"
        # And once the undo has arrived another caller owns it
        assert proxy.release() == 1
        assert (await plain.claim("k")).state == "started"
        await face.gate.aio.close()
        face.gate.close()


async def test_a_batch_of_keys_with_and_without_fingerprints_is_claimed(plain: Any) -> None:
    claims = await plain.claim_many(["a", "b", "c", "a"], fingerprints=[None, "x", None, None])
    assert [claim.state for claim in claims] == ["started", "started", "started", "in_progress"]


async def test_marks_and_batches_that_are_refused_write_nothing(plain: Any, plain_raw: Any, limited: Any) -> None:
    face = await limited(since_7_2=True)
    plain_raw.execute_command("ACL", "SETUSER", f"{face.gate.namespace}-guard", "-set")
    before = plain_raw.dbsize()
    for asked in (face.first("k", "1h"), face.first_many(["k", "l"], "1h"), face.claim_many(["k", "l"])):
        with pytest.raises(ServerRejected, match="access list"):
            await asked
    assert plain_raw.dbsize() == before


async def test_a_connection_that_now_leads_to_an_older_server_falls_back(face: Any, url: str, namespace: str) -> None:
    """The server of this test process may lack SET IFEQ, and before Redis 7.0 SET NX GET."""
    gate = Gate(url, namespace=f"{namespace}-old")
    face = Face(gate, face.awaiting)
    runs = []
    handle = face.once(key="{k}", scope="s")(lambda k: runs.append(k) or k)

    def believe() -> None:
        if gate.context._link is not None and gate.context._link._pool is not None:
            gate.context._link._pool.takes_plain = True
        if face.awaiting:
            gate.context.aio_link._state.store.ready_connection(b"").takes_plain = True  # type: ignore[union-attr]

    for n in range(4):
        await handle(f"warm{n}")
        believe()
        assert [await handle(f"k{n}"), await handle(f"k{n}")] == [f"k{n}"] * 2
    assert len(runs) == 8
    believe()
    assert [await face.first("k", "1h"), await face.first("k", "1h")] == [True, False]
    believe()
    assert await face.first_many(["k", "l"], "1h") == [False, True]
    believe()
    assert [claim.state for claim in await face.claim_many(["m", "n", "m"])] == ["started", "started", "in_progress"]
    assert {(await face.inspect(f"k{n}", scope="s")).state for n in range(4)} == {"done"}
    await gate.aio.close()
    gate.close()


async def test_what_was_claimed_is_completed_when_the_server_is_out_of_memory(
    plain: Any, plain_raw: Any, record: Any
) -> None:
    claim = await plain.claim("k")
    assert record("k")[0] == CLAIM
    plain_raw.config_set("maxmemory", 1)
    try:
        for asked in (plain.claim("other"), plain.first("other", "1h"), plain.first_many(["other", "too"], "1h")):
            with pytest.raises(ServerRejected, match="maxmemory"):
                await asked
        with pytest.raises(ServerRejected, match="maxmemory"):
            await plain.claim_many(["other", "too"])
        assert await claim.complete("done")
    finally:
        plain_raw.config_set("maxmemory", 0)
    assert (await plain.inspect("k")).value == "done"
    await (await ask_for_plain(plain)).claim("later")
    assert record("later")[0] == CLAIM


async def test_a_lost_lease_is_told_to_its_owner(plain: Any, passes: Any) -> None:
    async with plain.inside("k", lease="30s") as claim:
        passes("k", LEASE + 1)
        await plain.forget("k", force=True)
        assert not await claim.checkpoint(1)


def test_a_busy_key_is_told_to_a_caller_that_does_not_wait(plain: Any) -> None:
    with plain.gate.claim("k"):
        handle = plain.gate.once(key="{k}", scope="claim")(lambda k: k)
        with pytest.raises(AlreadyInProgress):
            handle("k")
