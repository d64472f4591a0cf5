"""The claims of a batch: made, renewed and ended together, each with its own result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument, KeyReused, OutcomeUnknown, StoreUnavailable, current
from idemgate.core.calls import MAX_ENTRIES
from idemgate.errors import AttemptsExhausted, DecodeError, NoCurrentExecution, ServerRejected, UnexpectedData
from idemgate.testing import Clock, History
from tests.claims import claims_of
from tests.waiting import subscribed

pytestmark = pytest.mark.one_in(3)

Stored = Callable[[], dict[bytes, bytes]]


@asynccontextmanager
async def block(face: Any, keys: Any, **options: Any) -> AsyncIterator[Any]:
    """`with gate.claim_many(...)` or `async with gate.aio.claim_many(...)`."""
    if face.awaiting:
        async with face.gate.aio.claim_many(keys, **options) as claims:
            yield claims
    else:
        with face.gate.claim_many(keys, **options) as claims:
            yield claims


async def states(face: Any, keys: Any) -> list[str]:
    return [(await face.inspect(key)).state for key in keys]


async def told(face: Any, answer: Any) -> Any:
    """What one claim of a batch answers, which is awaited where the batch was."""
    return await answer if face.awaiting else answer


# -- asking -----------------------------------------------------------------------------------------------------------


async def test_each_key_is_answered_as_it_is_in_the_order_of_the_keys(face: Any) -> None:
    # Given a key that is done, and one that another owner runs
    await (await face.claim("done")).complete({"n": 1})
    await face.claim("runs", lease="20s")
    # When they are claimed together with a new one
    new, done, runs = claims = await face.claim_many(["new", "done", "runs"])
    # Then each claim knows its own state
    assert [claim.state for claim in claims] == ["started", "done", "in_progress"]
    assert (new.attempt, done.result, runs.retry_after) == (1, {"n": 1}, 20.0)
    assert [claim.error for claim in claims] == [None] * 3


async def test_of_equal_keys_the_first_is_granted_and_the_others_are_told_that_it_runs(face: Any) -> None:
    claims = await face.claim_many(["a", "b", "a", "a"])
    assert [claim.state for claim in claims] == ["started", "started", "in_progress", "in_progress"]
    assert await face.complete_many([(claims[0], "x")]) == [True]
    wait = claims[2].wait if face.awaiting else lambda seconds: asyncio.to_thread(claims[2].wait, seconds)
    assert (await wait(0), claims[2].result) == ("done", "x")


async def test_the_options_are_those_of_a_single_claim(face: Any, clock: Clock) -> None:
    options = {"scope": "s", "lease": "10s", "retention": "1h", "on_lease_loss": "hold", "max_attempts": 3}
    [claim] = await face.claim_many(["k"], **options)
    assert not (await face.claim("k", **options)).started
    clock.advance("10s")
    [held] = await face.claim_many(["k"], **options)
    assert isinstance(held.error, OutcomeUnknown)
    assert await face.complete_many([(claim, 1)]) == [True]
    assert (await face.inspect("k", scope="s")).retention_left == 3600.0


async def test_nothing_is_asked_for_no_keys(face: Any, stored: Stored) -> None:
    assert await face.claim_many([]) == []
    assert await face.complete_many([]) == []
    assert await face.release_many([]) == []
    async with block(face, iter(())) as claims:
        assert claims == []
    assert not stored()


async def test_what_is_wrong_with_one_key_is_told_by_its_claim_and_the_others_are_granted(
    face: Any, clock: Clock, raw: Any, gate: Gate
) -> None:
    # Given keys of which each is refused for a reason of its own
    await (await face.claim("reused", fingerprint="x")).complete()
    await face.claim("held", on_lease_loss="hold")
    await face.claim("exhausted", max_attempts=1)
    clock.advance("30s")
    foreign = claims_of(gate).key("claim", "foreign")[0]
    raw.set(foreign, "another program's")
    # When they are claimed together with others
    keys = ["reused", "one", "held", "exhausted", "foreign", "two"]
    reused, one, held, exhausted, strange, two = claims = await face.claim_many(keys, max_attempts=1)
    # Then each claim tells its own error, when it is used
    assert one.started
    assert two.started
    wrong = [(reused, KeyReused), (held, OutcomeUnknown), (exhausted, AttemptsExhausted), (strange, UnexpectedData)]
    for claim, kind in wrong:
        assert isinstance(claim.error, kind)
        assert kind.__name__ in repr(claim)
        for name in ("state", "started", "token", "result", "retry_after"):
            with pytest.raises(kind):
                getattr(claim, name)
        with pytest.raises(kind):
            await face.complete_many([(one, 1), (claim, 2)])
    # And the others are held, and can be ended
    assert await face.complete_many([(claim, 1) for claim in claims if claim.error is None]) == [True, True]
    assert raw.get(foreign) == b"another program's"
    raw.delete(foreign)


async def test_a_note_that_cannot_be_read_back_is_that_claims_error(face: Any, gate: Gate, url: str) -> None:
    # Given a note of a former owner, larger than another gate reads
    former = await face.claim("a")
    await former.checkpoint("x" * 100)
    await former.release()
    with Gate(url, namespace=gate.namespace, clock=gate.context.clock, max_bytes=32) as small:
        other = type(face)(small, face.awaiting)
        async with block(other, ["a", "b"]) as (a, b):
            assert isinstance(a.error, DecodeError)
            assert b.started
        await small.aio.close()
    assert await states(face, ["b"]) == ["released"]


@pytest.mark.parametrize(
    ("keys", "name"),
    [(["a", 1.5], r"keys\[1\]"), (["", "a"], r"keys\[0\]"), ("abc", "keys"), (7, "keys")],
    ids=repr,
)
async def test_a_key_that_is_none_is_named_and_nothing_is_claimed(
    face: Any, stored: Stored, keys: Any, name: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name}="):
        await face.claim_many(keys)
    assert not stored()


# -- ending -----------------------------------------------------------------------------------------------------------


async def test_completed_together_each_has_its_result_and_who_lost_it_is_told(face: Any, clock: Clock) -> None:
    one, two, three = await face.claim_many(["one", "two", "three"])
    # Given that another owner has taken one over
    await face.forget("two", force=True)
    await face.claim("two")
    # When all are completed
    assert await face.complete_many([(three, 3), (two, 2), (one, [1])], retention="1h") == [True, False, True]
    # Then what was held is done, for as long as it was said
    assert [claim.state for claim in await face.claim_many(["one", "two", "three"])] == ["done", "in_progress", "done"]
    clock.advance(3599.999)
    assert [(await face.claim(key)).result for key in ("one", "three")] == [[1], 3]
    clock.advance("1ms")
    assert (await face.claim("one")).started


async def test_completing_again_is_answered_alike(face: Any, stored: Stored) -> None:
    pairs = [(claim, "x") for claim in await face.claim_many(["a", "b"])]
    assert await face.complete_many(pairs) == [True, True]
    before = stored()
    assert await face.complete_many(pairs) == [True, True]
    assert stored() == before


async def test_a_claim_that_is_completed_twice_at_once_is_named_and_nothing_is_written(face: Any, gate: Gate) -> None:
    one, two = await face.claim_many(["a", "b"])
    for again in ("x", "y"):
        with pytest.raises(InvalidArgument, match=r"^pairs\[2\]='a': .*twice"):
            await face.complete_many([(one, "x"), (two, "x"), (one, again)])
    assert await states(face, ["a", "b"]) == ["in_progress", "in_progress"]
    assert gate.counters["once.lost"] == 0
    assert await face.complete_many([(one, "x"), (two, "x")]) == [True, True]


async def test_what_is_lost_without_a_block_is_counted_too_and_each_once(face: Any, gate: Gate) -> None:
    # Given claims that another client deleted under their owner
    one, two, three, four, mine, theirs = await face.claim_many(["1", "2", "3", "4", "mine", "mine"])
    for key in "1234":
        await face.forget(key, force=True)
    # When they are ended, one by one and together, and again
    for _ in range(2):
        assert not await told(face, one.complete("dropped"))
        assert not await told(face, two.release())
        assert await face.complete_many([(three, "dropped"), (mine, 1)]) == [False, True]
        assert await face.release_many([four]) == [False]
    # Then each is counted once; what was never held is no loss, nor what was completed before
    assert await face.complete_many([(theirs, 2)]) == [False]
    assert not await told(face, mine.release())
    assert gate.counters["once.lost"] == 4


async def test_large_results_and_notes_go_in_parts_and_each_is_answered(face: Any, gate: Gate, raw: Any) -> None:
    # Given results and notes of which only a few go through one script
    large = {key: key * 50_000 for key in "abcdefg"}
    claims = await face.claim_many(large)
    assert await face.complete_many([(one, large[key]) for one, key in zip(claims, large, strict=True)]) == [True] * 7
    noted = await face.claim_many(list("hijklmn"))
    for claim in noted:
        await told(face, claim.checkpoint("note" * 25_000))
    foreign = claims_of(gate).key("claim", "foreign")[0]
    raw.set(foreign, "another program's")
    # When they are asked for among others
    keys = ["new", *"abc", "foreign", "a", *"defg", "foreign", *"hij", "last"]
    found = dict(zip(enumerate(keys), await face.claim_many(keys), strict=True))
    # Then each has its own result
    for (_, key), claim in found.items():
        if key == "foreign":
            assert isinstance(claim.error, UnexpectedData)
            assert claim.error.redis_key == foreign.decode()
        else:
            wanted = "in_progress" if key in "hij" else "done" if key in large else "started"
            assert (claim.state, claim.result) == (wanted, large.get(key))
    # And what has notes is ended, and the notes are kept for the next
    assert await face.release_many(noted) == [True] * 7
    again = await face.claim_many(list("hijklmn"))
    assert {claim.recovered for claim in again} == {"note" * 25_000}
    # And a call that completes claims ends after it has read two of the notes
    before = raw.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert await face.complete_many([(claim, 1) for claim in again]) == [True] * 7
    assert raw.info("commandstats")["cmdstat_evalsha"]["calls"] - before == 4
    raw.delete(foreign)


async def test_released_together_the_next_ones_may_run(face: Any) -> None:
    claims = await face.claim_many(["a", "b", "a"])
    assert await face.release_many(claims) == [True, True, False]
    assert [claim.started for claim in await face.claim_many(["a", "b"])] == [True, True]


async def test_single_claims_can_be_ended_together_too(face: Any, gate: Gate) -> None:
    claims = [gate.claim("blocking"), await gate.aio.claim("awaiting")]
    assert await face.complete_many([(claim, 1) for claim in claims]) == [True, True]
    assert await states(face, ["blocking", "awaiting"]) == ["done", "done"]


async def test_a_result_that_cannot_be_stored_is_named_and_all_are_still_held(face: Any, gate: Gate) -> None:
    async with block(face, ["a", "b"]) as (one, two):
        with pytest.raises(InvalidArgument, match=r"^pairs\[1\]"):
            await face.complete_many([(one, 1), (two, object())])
        with pytest.raises(InvalidArgument, match="retention"):
            await face.complete_many([(one, 1)], retention="soon")
        assert await states(face, ["a", "b"]) == ["in_progress", "in_progress"]
        assert await face.complete_many([(one, 1)]) == [True]
    assert await states(face, ["a", "b"]) == ["done", "released"]


async def test_what_is_no_claim_of_this_gate_is_refused(face: Any, gate: Gate, url: str, namespace: str) -> None:
    mine = await face.claim("a")
    with Gate(url, namespace=namespace) as other:
        for pairs in ([("a", 1)], [(mine, 1), 7], [mine, mine], {"a": 1}, "ab", [(other.claim("b"), 1)]):
            with pytest.raises(InvalidArgument, match="pairs"):
                await face.complete_many(pairs)
        for claims in (["a"], "ab", [mine, other.claim("c")], mine):
            with pytest.raises(InvalidArgument, match="claims"):
                await face.release_many(claims)
        for key in "bc":
            other.forget(key, force=True)
    assert await states(face, ["a"]) == ["in_progress"]


# -- the block --------------------------------------------------------------------------------------------------------


async def test_leaving_the_block_releases_what_it_has_not_completed(face: Any, gate: Gate) -> None:
    await (await face.claim("done")).complete("before")
    async with block(face, ["a", "b", "done", "c"]) as (a, _b, _done, c):
        await face.complete_many([(a, 1)])
        await face.release_many([c])
    assert await states(face, ["a", "b", "c", "done"]) == ["done", "released", "released", "done"]
    assert (await face.claim("done")).result == "before"
    assert gate.counters["once.lost"] == 0


async def test_a_body_that_raises_keeps_what_it_completed(face: Any) -> None:
    with pytest.raises(RuntimeError, match="broken"):
        async with block(face, ["a", "b"]) as (a, _b):
            await face.complete_many([(a, 1)])
            raise RuntimeError("broken")
    assert await states(face, ["a", "b"]) == ["done", "released"]


async def test_a_refused_key_does_not_keep_the_block_from_ending_the_others(face: Any) -> None:
    await (await face.claim("reused", fingerprint="x")).complete()
    with pytest.raises(KeyReused):
        async with block(face, ["a", "reused"]) as claims:
            assert [claim.started for claim in claims]
    assert await states(face, ["a"]) == ["released"]


async def test_a_claim_lost_inside_the_block_is_counted(face: Any, gate: Gate) -> None:
    async with block(face, ["a", "b", "c"]):
        await face.forget("b", force=True)
    assert gate.counters["once.lost"] == 1


async def test_a_claim_has_a_block_of_its_own_inside(face: Any, gate: Gate) -> None:
    async with block(face, ["a", "b"]) as claims:
        with pytest.raises(NoCurrentExecution):
            current()
        one, _two = claims
        if face.awaiting:
            async with one:
                assert current().key == "a"
        else:
            with one:
                assert current().key == "a"
        assert await states(face, ["a", "b"]) == ["done", "in_progress"]
    assert await states(face, ["a", "b"]) == ["done", "released"]


async def test_heartbeats_keep_all_of_the_block_and_none_that_was_ended(
    face: Any, gate: Gate, outlive_lease: Any
) -> None:
    # Given a block that runs for longer than the lease
    async with block(face, ["a", "b", "c"], lease="1s") as (a, b, c):
        await face.complete_many([(a, 1)])
        await outlive_lease("b", "c")
        # Then what it holds is kept alive, and what it has ended is no loss
        assert [claim.state for claim in await face.claim_many(["a", "b", "c"])] == [
            "done",
            "in_progress",
            "in_progress",
        ]
        assert not any(claim.lease_lost for claim in (a, b, c))
        assert gate.counters["once.lease_lost"] == 0
    # And afterwards nothing does
    assert not gate.context.heartbeat._renewals


async def test_a_claim_that_is_lost_while_the_block_runs_says_so(face: Any, gate: Gate) -> None:
    async with block(face, ["a", "b"], lease="1s") as (a, b):
        await face.forget("a", force=True)
        async with asyncio.timeout(30):
            while not a.lease_lost:
                await asyncio.sleep(0.005)
        assert not b.lease_lost
        assert await face.complete_many([(a, 1), (b, 2)]) == [False, True]
    assert gate.counters["once.lease_lost"] == 1


async def test_who_waits_inside_the_block_until_it_may_run_is_kept_alive_from_then_on(
    face: Any, outlive_lease: Any
) -> None:
    owner = await face.claim("k")
    async with block(face, ["k"], lease="1s") as (claim,):
        await owner.release()
        wait = claim.wait if face.awaiting else lambda seconds: asyncio.to_thread(claim.wait, seconds)
        assert await wait("60s") == "started"
        await outlive_lease("k")
        assert not (await face.claim("k")).started
    assert await states(face, ["k"]) == ["released"]


async def test_an_awaiting_batch_has_to_be_awaited(gate: Gate) -> None:
    claims = gate.aio.claim_many(["a", "b"])
    with pytest.raises(InvalidArgument, match="await"):
        claims[0].state  # noqa: B018
    assert (await claims) is claims
    assert (await claims) is claims
    assert (await claims[0]) is claims[0]
    assert (await gate.aio.inspect("a")).attempts == 1


# -- when the store fails ---------------------------------------------------------------------------------------------


async def test_where_the_store_fails_midway_what_was_granted_is_given_back(face: Any, gate: Gate, raw: Any) -> None:
    # Given as many keys as one script goes through, and more that this user has no right to change
    namespace = gate.namespace
    user = f"u-{namespace}"
    mine = claims_of(gate).key("claim", "mine-")[0].decode().replace("}", "*")
    raw.execute_command("ACL", "SETUSER", user, "on", ">secret", "+@all", f"~{mine}")
    keys = [f"mine-{n}" for n in range(MAX_ENTRIES)]
    made = Gate(_as(gate, user), namespace=namespace, clock=gate.context.clock)
    try:
        limited = type(face)(made, face.awaiting)
        # When they are claimed together
        with pytest.raises(ServerRejected):
            await limited.claim_many([*keys, "other"])
        # Then those that were granted are free, as if nobody had asked
        records = [await face.inspect(key) for key in keys]
        assert {(record.state, record.attempts) for record in records} == {("released", 0)}
        # And of a script that was refused nothing was granted
        with pytest.raises(ServerRejected):
            await limited.claim_many(["mine-new", "other"])
        assert await states(face, ["mine-new", "other"]) == ["absent", "absent"]
    finally:
        await made.aio.close()
        made.close()
        raw.execute_command("ACL", "DELUSER", user)


def _as(gate: Gate, user: str) -> str:
    settings = gate.context.endpoint.settings
    if "path" in settings:
        return f"unix://{user}:secret@{settings['path']}"
    return f"redis://{user}:secret@{settings.get('host', 'localhost')}:{settings.get('port', 6379)}"


async def test_a_store_that_is_away_is_said_once(impatient: Any, wire: Any) -> None:
    claims = await impatient.claim_many(["a", "b", "c"])
    wire.cut()
    with pytest.raises(StoreUnavailable):
        await impatient.claim_many(["d", "e", "f"])
    with pytest.raises(StoreUnavailable):
        await impatient.complete_many([(claim, 1) for claim in claims])
    wire.mend()
    # What could not be completed can be completed again
    assert await impatient.complete_many([(claim, 1) for claim in claims]) == [True] * 3


async def test_what_left_a_block_is_not_hidden_by_a_store_that_is_away(impatient: Any, wire: Any) -> None:
    # When the body of a block raises, or is cancelled, while the store is away
    for error in (ValueError("the body's own"), asyncio.CancelledError()):
        with pytest.raises(type(error)) as left:
            async with block(impatient, ["a", "b"]):
                wire.cut()
                raise error
        # Then that is what the caller gets, and what could not be given back is counted
        assert left.value is error
        wire.mend()
        await impatient.forget("a", force=True)
        await impatient.forget("b", force=True)
    assert impatient.gate.counters["once.unreleased"] == 4


async def test_a_single_block_hides_nothing_either(impatient: Any, wire: Any) -> None:
    error = ValueError("the body's own")
    with pytest.raises(ValueError, match="own") as left:
        await _raised_inside(impatient, wire, error)
    assert left.value is error
    assert impatient.gate.counters["once.unreleased"] == 1


async def _raised_inside(face: Any, wire: Any, error: Exception) -> None:
    if face.awaiting:
        async with face.gate.aio.claim("c"):
            wire.cut()
            raise error
    else:
        with face.gate.claim("c"):
            wire.cut()
            raise error


async def test_awaited_batches_can_be_gathered(gate: Gate) -> None:
    batches = await asyncio.gather(gate.aio.claim_many(["a"]), gate.aio.claim_many(["a"]))
    assert sorted(claim.state for claims in batches for claim in claims) == ["in_progress", "started"]


async def test_a_lost_reply_is_asked_for_again_with_the_same_tokens(wired: Any, wire: Any) -> None:
    # Given claims that were granted, but whose replies were lost
    await wired.claim("warm")
    wire.reset()
    wire.flowing.clear()
    task = asyncio.ensure_future(wired.claim_many(["a", "b", "a"]))
    assert await asyncio.to_thread(wire.asked.wait, 30)
    while wire.scripts < 1:
        await asyncio.sleep(0.002)
    wire.cut()
    wire.flowing.set()
    wire.mend()
    # Then the same owner gets the same reply
    claims = await task
    assert [claim.state for claim in claims] == ["started", "started", "in_progress"]
    assert [claim.attempt for claim in claims[:2]] == [1, 1]
    assert await wired.complete_many([(claim, 1) for claim in claims]) == [True, True, False]


# -- many consumers ---------------------------------------------------------------------------------------------------


async def test_the_owner_knows_of_a_waiter_that_asked_in_a_batch(face: Any, gate: Gate, raw: Any) -> None:
    # Given an owner, and a batch that was told that it runs
    owner = await face.claim("k")
    others = await face.claim_many(["j", "k"])
    assert [one.state for one in others] == ["started", "in_progress"]
    with subscribed(raw, claims_of(gate).key("claim", "k")[0]) as listener:
        # When it ends, then that is published at once
        assert await owner.complete(1)
        assert listener.get_message(timeout=30)["type"] == "message"


async def test_of_batches_that_overlap_each_key_is_done_by_one(face: Any) -> None:
    # Given consumers that get the same messages in batches that overlap, some of which they fail to do
    keys, history = [f"k{n}" for n in range(60)], History()

    async def consume(drawn: Random) -> None:
        batch = drawn.choices(keys, k=20)
        async with block(face, batch) as claims:
            mine = [(key, claim) for key, claim in zip(batch, claims, strict=True) if claim.started]
            for key, claim in mine:
                with history.run(key, claim.token, claim.attempt):
                    await asyncio.sleep(0)
            done = [one for one in mine if drawn.random() < 0.7]
            assert await face.complete_many([(claim, key) for key, claim in done]) == [True] * len(done)
            for key, claim in done:
                history.record_done(key, claim.token)

    async def consumer(number: int) -> None:
        for turn in range(12):
            await consume(Random(f"{number} {turn}"))

    await asyncio.gather(*map(consumer, range(4)))
    # Then nothing that was done ran again, no key ran twice at a time, and nothing is held
    assert history.findings() == []
    assert set(await states(face, keys)) <= {"done", "released", "absent"}
    assert [one.result for one in await face.claim_many(keys) if one.state == "done"]


async def test_a_large_result_in_front_leaves_the_others_to_one_more_call(face: Any, raw: Any) -> None:
    # Given many keys, of which the first is done with a large result
    claim = await face.claim("large", scope="s")
    await claim.complete("x" * 200_000)
    before = raw.info("commandstats")["cmdstat_evalsha"]["calls"]
    # When all are claimed
    claims = await face.claim_many(["large", *(f"k{n}" for n in range(99))], scope="s")
    # Then they go in two calls, or in three where the server has forgotten the script
    assert [claim.state for claim in claims] == ["done"] + ["started"] * 99
    assert raw.info("commandstats")["cmdstat_evalsha"]["calls"] - before <= 3
    await face.release_many([claim for claim in claims if claim.started])


@pytest.mark.damages("wrong-type")
async def test_releasing_one_that_could_not_be_claimed_releases_none(face: Any, raw: Any) -> None:
    # Given a batch, of which one key holds something else
    raw.rpush(claims_of(face.gate).key("s", "foreign")[0], "x")
    claims = await face.claim_many(["ours", "foreign"], scope="s")
    # When all are released, then what is wrong is said before anything is written
    with pytest.raises(UnexpectedData):
        await face.release_many(claims)
    assert (await face.claim("ours", scope="s")).state == "in_progress"
    assert await face.release_many(claims[:1]) == [True]


def test_each_claim_of_a_batch_has_its_own_retention(gate: Gate, raw: Any) -> None:
    claims = [gate.claim(f"k{hours}", retention=f"{hours}h") for hours in (1, 2, 3)]
    gate.complete_many([(claim, "paid") for claim in claims])
    left = {key: raw.pttl(key) for key in raw.scan_iter(f"*{gate.namespace}*")}
    hours = sorted(round(ms / 3_600_000, 1) for key, ms in left.items() if key.rsplit(b":", 1)[-1].startswith(b"k"))
    assert hours == [1.0, 2.0, 3.0]


async def test_claims_of_a_batch_have_their_own_fingerprints(face: Any) -> None:
    keys = [f"k{n}" for n in range(6)]
    prints = [{"total": n // 2} for n in range(4)] + [None, b"body"]
    claims = await face.claim_many(keys, fingerprints=prints, scope="s")
    assert [claim.state for claim in claims] == ["started"] * 6
    await face.complete_many([(claim, n) for n, claim in enumerate(claims)])
    # When some come with another payload, then those are refused
    again = await face.claim_many(keys, fingerprints=[{"total": 0}] * 4 + [None, "body"], scope="s")
    assert [type(claim.error) for claim in again] == [type(None)] * 2 + [KeyReused] * 2 + [type(None), KeyReused]
    # And a guard finds the same fingerprint
    guard = face.guard("s")
    assert (await guard.run("k2", lambda: 1, fingerprint={"total": 1})).value == 2


@pytest.mark.parametrize(("prints", "name"), [(["one"], "fingerprints="), (["one", object()], r"fingerprints\[1\]")])
async def test_bad_fingerprints_of_a_batch_are_refused_before_anything_is_sent(
    face: Any, stored: Any, prints: Any, name: str
) -> None:
    before = stored()
    with pytest.raises(InvalidArgument, match=name):
        await face.claim_many(["a", "b"], fingerprints=prints, scope="s")
    assert stored() == before
