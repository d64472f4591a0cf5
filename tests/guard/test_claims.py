"""The claim: one owner at a time, and the replies that all others get."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from idemgate import AlreadyInProgress, Gate, InvalidArgument, KeyReused, OutcomeUnknown, current
from idemgate.core import keys
from idemgate.core.calls import new_id
from idemgate.errors import AttemptsExhausted, ResultUnavailable, UnexpectedData
from idemgate.guard.claim_calls import ClaimReply, Record
from idemgate.guard.heartbeat import ScopeRegistration
from idemgate.guard.request import build_renewal
from idemgate.store.context import MAX_SCOPES
from idemgate.testing import Clock
from tests.claims import claims_of
from tests.waiting import eventually, subscribed

pytestmark = pytest.mark.one_in(3)

Stored = Callable[[], dict[bytes, bytes]]


async def test_a_second_claim_is_told_that_the_first_runs(face: Any, clock: Clock) -> None:
    # Given a claim that was granted
    first = await face.claim("order-7", lease="30s")
    assert first.started
    assert (first.attempt, first.taken_over, first.retry_after, first.result) == (1, 0, None, None)
    # When another owner asks ten seconds later
    clock.advance("10s")
    second = await face.claim("order-7")
    # Then its reply says how long the lease still holds
    assert (second.state, second.started, second.retry_after) == ("in_progress", False, 20.0)


async def test_who_was_refused_has_no_say(face: Any, stored: Stored) -> None:
    # Given a claim, and another that was told to wait
    await face.claim("k")
    refused = await face.claim("k")
    before = stored()
    # When the refused one acts as if it were the owner
    said = [
        await refused.complete("x"),
        await refused.release(),
        await refused.extend(),
        await refused.checkpoint("x"),
    ]
    # Then each call returns False, and nothing has changed
    assert said == [False, False, False, False]
    assert stored() == before


@pytest.mark.parametrize("result", [None, 0, "text", {"a": [1, (2, 3)]}, b"\x00"])
async def test_a_done_key_gives_its_result_until_retention_ends(face: Any, clock: Clock, result: object) -> None:
    # Given a key that was done
    first = await face.claim("k")
    assert await first.complete(result, retention="1h")
    # When others ask within retention, and after it
    clock.advance(3599.999)
    second = await face.claim("k")
    clock.advance("1ms")
    third = await face.claim("k")
    # Then the former gets the result, and the latter may run as if nothing had been
    assert (second.state, second.result, second.token) == ("done", result, first.token)
    assert (third.state, third.attempt, third.taken_over, third.recovered) == ("started", 1, 0, None)
    assert third.token > first.token


async def test_retention_of_the_claim_is_the_default(face: Any, clock: Clock) -> None:
    claim = await face.claim("k", retention="10m")
    assert await claim.complete()
    clock.advance(599.999)
    assert (await face.claim("k")).state == "done"
    clock.advance("1ms")
    assert (await face.claim("k")).started


async def test_completing_is_answered_alike_twice_but_written_once(face: Any, stored: Stored) -> None:
    claim = await face.claim("k")
    assert await claim.complete("first")
    before = stored()
    assert await claim.complete("second")
    assert stored() == before
    assert (await face.claim("k")).result == "first"


async def test_a_lapsed_lease_is_taken_over_and_its_owner_has_no_say_any_more(
    face: Any, clock: Clock, stored: Stored
) -> None:
    # Given an owner that fell silent
    former = await face.claim("k", lease="30s")
    clock.advance("30s")
    # When another one asks
    latter = await face.claim("k")
    # Then it may run, and knows that it is not the first
    assert (latter.started, latter.attempt, latter.taken_over) == (True, 2, 1)
    assert latter.token > former.token
    # And whatever the former owner still says changes nothing
    before = stored()
    assert not await former.complete("late")
    assert not await former.release()
    assert not await former.extend("1h")
    assert not await former.checkpoint("late")
    assert stored() == before
    # And the latter is not disturbed by it
    assert await latter.complete("mine")
    assert (await face.claim("k")).result == "mine"


async def test_one_millisecond_before_its_end_a_lease_still_holds(face: Any, clock: Clock) -> None:
    await face.claim("k", lease="30s")
    clock.advance(29.999)
    assert (await face.claim("k")).retry_after == 0.001


@pytest.mark.parametrize("hold", [False, True])
async def test_at_its_very_end_a_lease_holds_nobody_back(face: Any, clock: Clock, hold: bool) -> None:
    # Given keys whose leases end at this very moment
    policy = {"lease": "30s", "scope": "s", "on_lease_loss": "hold" if hold else "retry"}
    for key in ("forgotten", "marked", "marked with others"):
        await face.claim(key, **policy)
    clock.advance("29.999s")
    assert await face.first_many(["marked with others"], "1h", scope="s") == [False]
    clock.advance("1ms")
    # Then they may be forgotten, and, unless they need a decision, be marked
    assert await face.forget("forgotten", scope="s")
    assert await face.first("marked", "1h", scope="s") is not hold
    assert await face.first_many(["other", "marked with others"], "1h", scope="s") == [True, not hold]


async def test_at_the_very_end_of_its_retention_nothing_is_known_of_a_key(face: Any, clock: Clock) -> None:
    for key in ("forgotten", "marked", "marked with others", "claimed"):
        await (await face.claim(key, scope="s")).complete("done", retention="60s")
    clock.advance("59.999s")
    assert (await face.claim("claimed", scope="s")).state == "done"
    clock.advance("1ms")
    assert not await face.forget("forgotten", scope="s")
    assert await face.first("marked", "1h", scope="s")
    assert await face.first_many(["marked with others"], "1h", scope="s") == [True]
    assert (await face.claim("claimed", scope="s")).attempt == 1


async def test_a_lapsed_owner_may_still_finish_as_long_as_nobody_took_over(face: Any, clock: Clock) -> None:
    owner = await face.claim("k", lease="30s")
    clock.advance("5m")
    assert await owner.checkpoint("half")
    assert await owner.extend()
    assert (await face.claim("k")).retry_after == 30.0
    clock.advance("5m")
    assert await owner.complete("late but alone")
    assert (await face.claim("k")).result == "late but alone"


async def test_extend_runs_the_lease_anew_from_now(face: Any, clock: Clock) -> None:
    owner = await face.claim("k", lease="30s")
    clock.advance("20s")
    assert await owner.extend()
    assert (await face.claim("k")).retry_after == 30.0
    assert await owner.extend("2m")
    assert (await face.claim("k")).retry_after == 120.0
    assert await owner.extend("1s")
    assert (await face.claim("k")).retry_after == 1.0


async def test_a_lease_ends_though_the_clock_was_set_back(face: Any, clock: Clock) -> None:
    # Given a claim whose owner falls silent, and a clock that is set back by an hour
    first = await face.claim("k", lease="30s")
    clock.set(clock.now().timestamp() - 3600)
    # When a caller has asked for the key, and a lease has gone by since
    assert (await face.claim("k")).retry_after == 30
    clock.advance("29.999s")
    assert (await face.claim("k")).retry_after == 0.001
    clock.advance("1ms")
    # Then the next one may run, with a higher token
    second = await face.claim("k")
    assert (second.state, second.taken_over) == ("started", 1)
    assert second.token > first.token


@pytest.mark.parametrize("asking", ["first", "first_many", "forget", "resolve"])
async def test_each_call_shortens_a_lease_that_a_clock_left_far_ahead(face: Any, clock: Clock, asking: str) -> None:
    # Given a claim whose owner falls silent, and a clock that is set back by an hour
    await face.claim("k", lease="30s")
    clock.set(clock.now().timestamp() - 3600)
    asked: dict[str, Callable[[], Any]] = {
        "first": lambda: face.first("k", "60s", scope="claim"),
        "first_many": lambda: face.first_many(["other", "k"], "60s", scope="claim"),
        "forget": lambda: face.forget("k"),
        "resolve": lambda: face.resolve("k", done=True),
    }
    ask, refused = asked[asking], asking in ("forget", "resolve")
    # When calls of one kind ask for the key, each within a lease
    for left in (30.0, 10.0):
        if refused:
            with pytest.raises(AlreadyInProgress) as told:
                await ask()
            assert told.value.retry_after == left
        else:
            assert await ask() in (False, [left == 30, False])
        clock.advance("20s")
    # Then the lease has ended one lease after the first call
    assert await ask() in (True, [False, True])


@pytest.mark.parametrize("wait", [False, True])
def test_after_a_clock_set_back_a_lease_ends_for_who_waits_and_who_does_not(
    gate: Gate, clock: Clock, wait: bool
) -> None:
    record, claims = claims_of(gate).key("s", "k"), claims_of(gate)
    gate.context.link.run(claims.claim(record, new_id(), 30_000, 60_000))
    clock.set(clock.now().timestamp() - 3600)
    for left in (30_000, 1):
        assert gate.context.link.run(claims.claim(record, new_id(), 30_000, 60_000, wait=wait)).left_ms == left
        clock.advance(left / 1000 - 0.001 if left > 1 else 0.001)
    assert gate.context.link.run(claims.claim(record, new_id(), 30_000, 60_000, wait=wait)).state == "started"


async def test_a_clock_set_back_does_not_lengthen_a_lease(face: Any, clock: Clock) -> None:
    await face.claim("k", lease="30s")
    clock.set(clock.now().timestamp() - 3600)
    assert (await face.claim("k")).retry_after == 30.0


async def test_a_released_key_may_run_again_and_counts_its_attempts(face: Any) -> None:
    # Given a claim that was given back
    first = await face.claim("k")
    assert await first.release()
    # When the next one asks
    second = await face.claim("k")
    # Then it is the second attempt, taken over from nobody
    assert (second.started, second.attempt, second.taken_over) == (True, 2, 0)
    assert second.token > first.token
    assert not await first.complete("too late")
    assert not await first.release()


def test_an_attempt_that_was_never_started_is_not_counted(gate: Gate) -> None:
    record, attempts = claims_of(gate).key("s", "k"), []
    # Given claims of which only the first was given back because nothing was run
    for undo in (True, False, False):
        owner = new_id()
        attempts.append(gate.context.link.run(claims_of(gate).claim(record, owner, 30_000, 60_000)).attempt)
        assert gate.context.link.run(claims_of(gate).release(record, owner, 60_000, undo=undo))
    assert attempts == [1, 1, 2]


def test_what_is_kept_for_no_time_is_gone(gate: Gate, raw: Any) -> None:
    record, owner = claims_of(gate).key("s", "k"), new_id()
    gate.context.link.run(claims_of(gate).claim(record, owner, 30_000, 60_000))
    assert gate.context.link.run(claims_of(gate).release(record, owner, 0))
    assert not raw.exists(*record)


@pytest.mark.parametrize("end", ["release", "complete"])
def test_what_ends_within_a_millisecond_ended_when_it_began(url: str, namespace: str, end: str) -> None:
    class Between(Clock):
        def microseconds(self) -> int:
            return super().microseconds() + 700

    clock = Between(1_700_000_000.005)
    gate, owner = Gate(url, namespace=namespace, clock=clock), new_id()
    record = claims_of(gate).key("s", "k")
    fence = gate.context.link.run(claims_of(gate).claim(record, owner, 30_000, 60_000)).token
    clock.advance("1s")
    if end == "release":
        assert gate.context.link.run(claims_of(gate).release(record, owner, 60_000))
    else:
        assert gate.context.link.run(claims_of(gate).complete(record, owner, fence, 60_000, b"n", b""))
    seen = gate.context.link.run(claims_of(gate).inspect(record))
    assert (seen.since, seen.retention_left) == (datetime.fromtimestamp(1_700_000_001.005, UTC), 60.0)
    gate.close()


def test_what_is_read_to_release_many_is_bounded(gate: Gate, raw: Any) -> None:
    # Given three claims with 100 KiB of progress each
    claims, given = claims_of(gate), [(claims_of(gate).key("s", key)[0], new_id(), 60_000, b"") for key in "abc"]
    for name, owner, *_ in given:
        gate.context.link.run(claims.claim((name,), owner, 30_000, 60_000))
        assert gate.context.link.run(claims.checkpoint((name,), owner, gate.context.codec.encode(bytes(100 << 10))))
    # When they are given back in one call, then it ends with the second, and says so by what it answers
    [each] = claims.release_each(given, 100, undo=False)
    assert len(raw.eval(each.script.text, len(each.keys), *each.keys, *each.args)) == 2
    assert [gate.context.link.run(claims.inspect((name,))).state for name, *_ in given] == [
        "released",
        "released",
        "in_progress",
    ]


@pytest.mark.parametrize("end", ["release", "complete", "resolve"])
@pytest.mark.parametrize("hold", [False, True])
def test_an_end_is_published_where_a_caller_waits(gate: Gate, raw: Any, clock: Clock, hold: bool, end: str) -> None:
    record, owners, claims = claims_of(gate).key("s", "k"), [new_id(), new_id()], claims_of(gate)
    with subscribed(raw, record[0]) as listener:
        # When two owners end one after the other, and only the second knew of a waiter
        for owner, wait in zip(owners, (False, True), strict=True):
            fence = gate.context.link.run(claims.claim(record, owner, 30_000, 60_000, hold=hold)).token
            gate.context.link.run(claims.claim(record, new_id(), 30_000, 60_000, hold=hold, wait=wait))
            if end == "release":
                assert gate.context.link.run(claims.release(record, owner, 60_000))
            elif end == "complete":
                assert gate.context.link.run(claims.complete(record, owner, fence, 60_000, b"n", b""))
                clock.advance("60s")
            else:
                clock.advance("30s")
                vanished = gate.context.link.run(claims.inspect(record))
                assert (
                    gate.context.link.run(claims.resolve(record, new_id(), vanished, False, 60_000, b"n", b""))[0]
                    == "ok"
                )
            raw.publish(record[0], b"ended")
        raw.publish(record[0], b"all")
        # Then only that one is published
        heard = [listener.get_message(timeout=30)["data"]]
        while heard[-1] != b"all":
            heard.append(listener.get_message(timeout=30)["data"])
    assert heard == [b"ended", owners[1], b"ended", b"all"]


def test_a_decision_about_an_owner_that_was_taken_over_decides_nothing(gate: Gate, clock: Clock) -> None:
    # Given an owner that vanished, as an inspection showed, and another that has taken over and vanished since
    record, claims = claims_of(gate).key("s", "k"), claims_of(gate)
    gate.context.link.run(claims.claim(record, new_id(), 30_000, 60_000))
    clock.advance("30s")
    seen = gate.context.link.run(claims.inspect(record))
    gate.context.link.run(claims.claim(record, new_id(), 30_000, 60_000))
    clock.advance("30s")
    # Then what was decided about the first changes nothing
    assert gate.context.link.run(claims.resolve(record, new_id(), seen, True, 60_000, b"n", b""))[0] == "changed"
    assert gate.context.link.run(claims.forget(record, new_id(), seen, False))[0] == "changed"
    assert gate.context.link.run(claims.inspect(record)).state == "lapsed"


def test_a_copy_of_a_decision_is_answered_as_the_first(gate: Gate, clock: Clock) -> None:
    record, claims = claims_of(gate).key("s", "k"), claims_of(gate)
    for word in ("ok", "forgotten"):
        # Given an owner that vanished
        gate.context.link.run(claims.claim(record, new_id(), 30_000, 60_000))
        clock.advance("30s")
        seen = gate.context.link.run(claims.inspect(record))
        # When what is decided about it arrives twice
        if word == "ok":
            decision = claims.resolve(record, new_id(), seen, False, 60_000, b"n", b"")
        else:
            decision = claims.forget(record, new_id(), seen, False)
        assert gate.context.link.run(decision) == gate.context.link.run(decision) == (word, 0)


async def test_a_released_claim_is_over_for_its_owner(face: Any) -> None:
    claim = await face.claim("k")
    assert await claim.release()
    assert await claim.release()
    assert not await claim.complete("x")
    assert not await claim.extend()
    assert not await claim.checkpoint("x")


async def test_attempts_are_forgotten_when_the_retention_of_a_released_key_ends(face: Any, clock: Clock) -> None:
    claim = await face.claim("k", retention="1h")
    await claim.checkpoint("note")
    await claim.release()
    clock.advance("1h")
    again = await face.claim("k")
    assert (again.started, again.attempt, again.recovered) == (True, 1, None)


async def test_tokens_rise_through_everything_that_happens_to_a_key(face: Any, clock: Clock) -> None:
    tokens = []
    for end in ("release", "lapse", "complete", "set back", "forget", "release"):
        claim = await face.claim("k", lease="30s", retention="1h")
        tokens.append(claim.token)
        if end == "release":
            await claim.release()
        elif end == "complete":
            await claim.complete()
            clock.advance("1h")
        elif end == "set back":
            await claim.release()
            clock.set(clock.now().timestamp() - 60)
        elif end == "forget":
            await face.forget("k", force=True)
            clock.advance("2m")
        else:
            clock.advance("30s")
    assert tokens == sorted(set(tokens))


# -- fingerprints -----------------------------------------------------------------------------------------------------


async def test_the_same_key_with_another_payload_is_refused_and_told_nothing(face: Any, stored: Stored) -> None:
    # Given a key in progress under one payload, and one that is done
    running = await face.claim("running", fingerprint={"amount": 1})
    done = await face.claim("done", fingerprint={"amount": 1})
    await done.complete("secret result")
    before = stored()
    for key in ("running", "done"):
        for other in ({"amount": 2}, None):
            # When the key comes with another payload, or with none named
            with pytest.raises(KeyReused) as refused:
                await face.claim(key, fingerprint=other)
            # Then the error names the key and nothing else
            assert refused.value.key == key
            assert refused.value.args == (key, "claim")
            assert "secret" not in str(refused.value)
    assert stored() == before
    # And the same payload is answered as ever
    assert (await face.claim("running", fingerprint={"amount": 1})).state == "in_progress"
    assert (await face.claim("done", fingerprint={"amount": 1})).result == "secret result"
    assert await running.complete()


async def test_a_fingerprint_outlives_the_lease_but_not_the_release(face: Any, clock: Clock) -> None:
    claim = await face.claim("k", fingerprint=1)
    clock.advance("10m")
    with pytest.raises(KeyReused):
        await face.claim("k", fingerprint=2)
    assert await claim.release()
    assert (await face.claim("k", fingerprint=2)).started
    with pytest.raises(KeyReused):
        await face.claim("k", fingerprint=1)


# -- checkpoints ------------------------------------------------------------------------------------------------------


async def test_the_next_attempt_recovers_the_note_of_the_one_before(face: Any, clock: Clock) -> None:
    # Given an owner that noted how far it came, and fell silent
    first = await face.claim("k")
    assert first.recovered is None
    assert await first.checkpoint({"charged": True})
    assert await first.checkpoint({"charged": True, "mailed": False})
    clock.advance("30s")
    # When another one takes over, and gives the key back
    second = await face.claim("k")
    assert second.recovered == {"charged": True, "mailed": False}
    assert await second.release()
    # Then the note is still there for the third, which finishes
    third = await face.claim("k")
    assert third.recovered == {"charged": True, "mailed": False}
    assert await third.complete(retention="1h")
    # And with that it is gone
    clock.advance("1h")
    assert (await face.claim("k")).recovered is None


async def test_what_cannot_be_stored_is_refused_and_the_claim_is_still_held(face: Any, stored: Stored) -> None:
    claim = await face.claim("k")
    before = stored()
    with pytest.raises(InvalidArgument, match=r"result"):
        await claim.complete(object())
    with pytest.raises(InvalidArgument, match=r"checkpoint"):
        await claim.checkpoint(object())
    with pytest.raises(InvalidArgument, match=r"result.*takes 3\d\d,\d\d\d bytes"):
        await claim.complete("x" * 300_000)
    assert stored() == before
    assert (await face.claim("k")).state == "in_progress"
    assert await claim.complete("fine")


# -- max_attempts, hold, resolve --------------------------------------------------------------------------------------


async def test_a_key_is_started_at_most_max_attempts_times(face: Any, clock: Clock) -> None:
    # Given a key that was started three times without success, in different ways
    for end in ("release", "lapse", "release"):
        claim = await face.claim("k", max_attempts=3, retention="1h")
        assert claim.started
        if end == "release":
            await claim.release()
        else:
            clock.advance("30s")
    # When it is asked for again
    with pytest.raises(AttemptsExhausted) as refused:
        await face.claim("k", max_attempts=3)
    # Then it is refused, with the number, until it is forgotten or its retention ends
    assert (refused.value.key, refused.value.attempts) == ("k", 3)
    assert await face.forget("k")
    again = await face.claim("k", max_attempts=3)
    assert again.attempt == 1


async def test_exhausted_attempts_fade_with_the_retention_of_the_last(face: Any, clock: Clock) -> None:
    await (await face.claim("k", max_attempts=1, retention="1h")).release()
    with pytest.raises(AttemptsExhausted):
        await face.claim("k", max_attempts=1)
    clock.advance("1h")
    assert (await face.claim("k", max_attempts=1)).attempt == 1


async def test_a_held_key_waits_for_a_decision(face: Any, clock: Clock, stored: Stored) -> None:
    # Given an owner that vanished, of a key that must not be started twice
    await face.claim("k", on_lease_loss="hold")
    clock.advance("30s")
    # When others ask
    before = stored()
    for _ in range(2):
        with pytest.raises(OutcomeUnknown) as refused:
            await face.claim("k")
        assert (refused.value.key, refused.value.attempt) == ("k", 1)
    assert not await face.first("k", "1h", scope="claim")
    # Then nobody runs, and nothing changes
    assert stored() == before


async def test_resolved_as_done_a_held_key_gives_the_result_and_its_zombie_is_lost(
    face: Any, clock: Clock, stored: Stored
) -> None:
    zombie = await face.claim("k", on_lease_loss="hold")
    clock.advance("30s")
    assert await face.resolve("k", done=True, result="found in the ledger", retention="1h")
    before = stored()
    assert not await zombie.complete("zombie")
    assert not await zombie.release()
    assert not await zombie.extend()
    assert not await zombie.checkpoint("zombie")
    assert stored() == before
    later = await face.claim("k")
    assert (later.state, later.result) == ("done", "found in the ledger")
    clock.advance("1h")
    assert (await face.claim("k")).started


@pytest.mark.parametrize("kind", ["claim", "batch", "once", "complete", "complete_many"])
async def test_resolved_as_done_a_key_stays_done_for_the_longest_retention_of_its_scope(
    face: Any, clock: Clock, url: str, namespace: str, raw: Any, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr("idemgate.guard.heartbeat.REGISTER_AFTER", 0)
    # Given a program of this scope that keeps its keys for a week, and one that keeps them for an hour
    names = keys.scopes(namespace)
    for retention, longest in (("7d", b"604800000"), ("1h", b"604800000")):
        program = Gate(url, namespace=namespace, clock=clock)
        if kind == "once":
            program.once(key="{k}", scope="pay", retention=retention)(lambda k: k)(f"other {retention}")
        elif kind == "claim":
            with program.claim(f"other {retention}", scope="pay", retention=retention):
                pass
        elif kind == "complete":
            with program.claim(f"other {retention}", scope="pay") as claim:
                claim.complete(retention=retention)
        elif kind == "complete_many":
            with program.claim_many([f"other {retention}"], scope="pay") as claims:
                program.complete_many([(claims[0], None)], retention=retention)
        else:
            with program.claim_many([f"other {retention}"], scope="pay", retention=retention):
                pass
        await eventually(lambda longest=longest: raw.hget(names, "pay") == longest)
        program.close()
    lost = await face.claim("k", scope="pay", retention="1h", on_lease_loss="hold")
    assert lost.started
    clock.advance("30s")
    # When an operator decides that the work is done, Then its key is kept for a week
    assert await face.resolve("k", done=True, scope="pay")
    clock.advance("167h")
    assert (await face.claim("k", scope="pay")).state == "done"
    clock.advance("1h")
    assert (await face.claim("k", scope="pay")).started


async def test_without_a_retention_an_unknown_scope_is_not_resolved(face: Any, stored: Stored) -> None:
    before = stored()
    with pytest.raises(InvalidArgument, match=r"retention=None: the store does not know the scope 'pay'.*\"7d\""):
        await face.resolve("k", done=True, scope="pay")
    assert not await face.resolve("k", done=True, scope="pay", retention="7d")
    assert not await face.resolve("k", done=False, scope="pay")
    assert stored() == before


async def test_a_program_stores_its_scopes_once_and_a_failure_of_it_disturbs_nothing(
    face: Any,
    gate: Gate,
    raw: Any,
    namespace: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tried = []
    renew = ScopeRegistration.renew
    monkeypatch.setattr("idemgate.guard.heartbeat.REGISTER_AFTER", 0)

    def try_here(self: ScopeRegistration) -> Any:
        if self._context is gate.context:  # gates of earlier tests try late
            tried.append(self)
        return renew(self)

    monkeypatch.setattr(ScopeRegistration, "renew", try_here)
    # Given another program's value under that key
    names = keys.scopes(namespace)
    raw.set(names, "theirs")
    for n in range(3):
        assert await face.once(key="{k}", scope="pay")(lambda k, n: n)("k", n) == 0
    await eventually(lambda: len(tried) == 1)
    # Then claims work, nothing is logged, and only `resolve` names it
    assert (await face.claim("k", scope="pay")).state == "done"
    with pytest.raises(UnexpectedData, match="holds another type than a hash"):
        await face.resolve("other", done=True, scope="pay")
    assert await face.resolve("other", done=True, scope="pay", retention="1h") is False
    assert [record.getMessage() for record in caplog.records if record.name == "idemgate.lease"] == []
    assert raw.get(names) == b"theirs"
    raw.delete(names)
    # And with many scopes made up by a program, only some of them are stored
    for n in range(3 * MAX_SCOPES):
        gate.context.note_scope(f"tenant-{n}", 1)
    assert len(gate.context.scopes) == MAX_SCOPES


async def test_resolved_as_not_done_a_held_key_runs_again_and_its_zombie_is_lost(
    face: Any, clock: Clock, stored: Stored
) -> None:
    zombie = await face.claim("k", on_lease_loss="hold")
    await zombie.checkpoint("half")
    clock.advance("30s")
    assert await face.resolve("k", done=False)
    before = stored()
    assert not await zombie.complete("zombie")
    assert not await zombie.release()
    assert not await zombie.extend()
    assert stored() == before
    later = await face.claim("k", on_lease_loss="hold")
    assert (later.started, later.attempt, later.recovered) == (True, 2, "half")
    assert later.token > zombie.token
    assert not await zombie.complete("zombie")
    assert await later.complete("mine")


async def test_a_held_owner_that_comes_back_before_the_decision_may_finish(face: Any, clock: Clock) -> None:
    owner = await face.claim("k", on_lease_loss="hold")
    clock.advance("10m")
    assert await owner.complete("after all")
    assert (await face.claim("k")).result == "after all"
    assert not await face.resolve("k", done=False)
    assert (await face.claim("k")).result == "after all"


async def test_a_live_claim_cannot_be_resolved_and_nothing_has_nothing_to_resolve(face: Any, stored: Stored) -> None:
    await face.claim("k", on_lease_loss="hold", lease="30s")
    before = stored()
    for done in (True, False):
        with pytest.raises(AlreadyInProgress) as refused:
            await face.resolve("k", done=done)
        assert (refused.value.key, refused.value.retry_after) == ("k", 30.0)
        assert not await face.resolve("never seen", done=done)
    assert stored() == before


# -- waiting for another owner ----------------------------------------------------------------------------------------


async def listening(raw: Any, gate: Gate, key: str, scope: str = "claim") -> None:
    """Return once a client listens for the end of that key."""
    channel = claims_of(gate).key(scope, key)[0]
    while raw.pubsub_numsub(channel)[0][1] == 0:
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("end", ["complete", "release", "forget"])
async def test_waiting_ends_when_the_other_owner_does(face: Any, gate: Gate, raw: Any, end: str) -> None:
    # Given a caller that waits for another owner
    owner = await face.claim("k")
    waiting = await face.claim("k")
    task = asyncio.create_task(waiting.wait("20s"))
    await listening(raw, gate, "k")
    # When that owner ends
    if end == "forget":
        await face.forget("k", force=True)
    else:
        await getattr(owner, end)()
    # Then the waiting one learns the result, or may run
    assert await asyncio.wait_for(task, 60) == ("done" if end == "complete" else "started")
    assert waiting.started == (end != "complete")
    if waiting.started:
        assert await waiting.complete()


async def test_waiting_ends_when_the_lease_of_the_other_lapses(face: Any, gate: Gate, raw: Any, clock: Clock) -> None:
    await face.claim("k", lease="2s")
    waiting = await face.claim("k")
    task = asyncio.create_task(waiting.wait("20s"))
    await listening(raw, gate, "k")
    clock.advance("2s")
    assert await asyncio.wait_for(task, 60) == "started"
    assert (waiting.attempt, waiting.taken_over) == (2, 1)


async def test_waiting_gives_up_in_time_and_asks_at_least_once(face: Any) -> None:
    owner = await face.claim("k")
    waiting = await face.claim("k")
    assert await waiting.wait("30ms") == "in_progress"
    assert await waiting.wait(0) == "in_progress"
    await owner.complete("x")
    assert await waiting.wait(0) == "done"
    assert waiting.result == "x"
    assert await waiting.wait(0) == "done"
    assert await owner.wait(0) == "started"


# -- the once-only mark -----------------------------------------------------------------------------------------------


async def test_first_is_true_once_within_retention(face: Any, clock: Clock) -> None:
    assert [await face.first("k", "20s") for _ in range(3)] == [True, False, False]
    clock.advance(19.999)
    assert not await face.first("k", "20s")
    clock.advance("1ms")
    assert await face.first("k", "20s")


async def test_first_many_answers_in_order_and_counts_equal_keys_once(face: Any) -> None:
    assert await face.first("b", "20s")
    assert await face.first_many(["a", "b", "c", "a", 7, "7", b"c"], "20s") == [
        True, False, True, False, True, False, False,
    ]  # fmt: skip
    assert await face.first_many(iter(["d", "a"]), "20s") == [True, False]
    assert await face.first_many([], "20s") == []


async def test_marks_and_claims_of_one_scope_see_each_other(face: Any, clock: Clock) -> None:
    # Given a mark, and a claim, in one scope
    assert await face.first("marked", "1h", scope="s")
    assert await face.first_many(["marked with others"], "1h", scope="s") == [True]
    claim = await face.claim("claimed", scope="s")
    # Then the mark is a done key without a result, and who claimed was first
    marked = await face.claim("marked", scope="s")
    assert marked.state == "done"
    with pytest.raises(ResultUnavailable):
        assert marked.result
    assert not await face.first("claimed", "1h", scope="s")
    # And a lapsed claim may be marked, after which its owner is lost
    clock.advance("30s")
    assert await face.first("claimed", "1h", scope="s")
    assert not await claim.complete()


# -- names of keys ----------------------------------------------------------------------------------------------------


async def test_a_number_and_its_text_are_one_key_and_scopes_are_apart(face: Any) -> None:
    assert (await face.claim(7)).started
    assert not (await face.claim("7")).started
    assert not (await face.claim(b"7")).started
    assert (await face.claim("7", scope="other")).started


@pytest.mark.parametrize("key", ["x" * 5000, "{a}:b", "ä" * 100, b"\xff\x00", "a b", "%41"])
async def test_any_text_is_a_key_of_its_own(face: Any, key: Any) -> None:
    assert (await face.claim(key)).started
    assert not (await face.claim(key)).started
    assert (await face.claim(key + ("x" if isinstance(key, str) else b"x"))).started
    assert (await face.claim("A")).started


# -- looking and forgetting -------------------------------------------------------------------------------------------


async def test_inspect_tells_each_state(face: Any, clock: Clock, stored: Stored) -> None:
    now = clock.now()

    async def looks(key: str, **expected: Any) -> None:
        before = stored()
        record = await face.inspect(key)
        assert {name: getattr(record, name) for name in expected} == expected
        assert stored() == before

    await looks(
        "k", state="absent", token=0, attempts=0, taken_over=0, lease_left=None, retention_left=None, since=None,
        owner="", has_fingerprint=False, result=b"", checkpoint=b"",
    )  # fmt: skip
    claim = await face.claim("k", lease="30s", retention="1h", fingerprint="f", on_lease_loss="hold")
    await claim.checkpoint("note")
    clock.advance("10s")
    await looks(
        "k", state="in_progress", token=claim.token, attempts=1, lease_left=20.0, retention_left=None, since=now,
        has_fingerprint=True, checkpoint=face.gate.context.codec.encode("note"),
    )  # fmt: skip
    clock.advance("20s")
    await looks("k", state="held", token=claim.token, attempts=1, lease_left=None, retention_left=None)
    await claim.complete({"n": 1})
    clock.advance("10m")
    await looks(
        "k", state="done", token=claim.token, retention_left=3000.0, lease_left=None,
        since=now + timedelta(seconds=30), kind="v",
        result=face.gate.context.codec.encode({"n": 1}), has_fingerprint=True, checkpoint=b"",
    )  # fmt: skip
    clock.advance("50m")
    await looks("k", state="absent", token=claim.token, attempts=0, retention_left=None, owner="", result=b"")
    again = await face.claim("k", lease="30s")
    clock.advance("30s")
    await looks("k", state="lapsed", token=again.token, attempts=1, lease_left=None)
    third = await face.claim("k", retention="1h")
    await looks("k", state="in_progress", attempts=2, taken_over=1)
    await third.release()
    await looks("k", state="released", attempts=2, taken_over=1, retention_left=3600.0, has_fingerprint=False)


async def test_inspect_shows_a_mark_of_any_caller(face: Any, clock: Clock) -> None:
    # Given marks, made alone and together
    now = clock.now()
    assert await face.first("a", "20s")
    assert await face.first_many(["b", "c"], "20s") == [True, True]
    clock.advance("5s")
    # Then each is done, by one attempt, without a result
    for key in "abc":
        record = await face.inspect(key, scope="first")
        assert (record.state, record.attempts, record.taken_over, record.since) == ("done", 1, 0, now)
        assert (record.retention_left, record.kind, record.has_fingerprint) == (15.0, "n", False)


async def test_inspect_tells_the_last_millisecond_of_a_lease(face: Any, clock: Clock) -> None:
    await face.claim("k", lease="30s")
    clock.advance("29.999s")
    record = await face.inspect("k")
    assert (record.state, record.lease_left) == ("in_progress", 0.001)
    clock.advance("1ms")
    assert (await face.inspect("k")).state == "lapsed"


async def test_in_the_last_millisecond_of_a_lease_the_key_is_neither_marked_nor_resolved(
    face: Any, clock: Clock, stored: Stored
) -> None:
    await face.claim("k", lease="30s")
    clock.advance("29.999s")
    before = stored()
    assert not await face.first("k", "1h", scope="claim")
    with pytest.raises(AlreadyInProgress) as refused:
        await face.resolve("k", done=True)
    assert refused.value.retry_after == 0.001
    assert stored() == before


async def test_a_stored_failure_is_marked_and_a_released_key_is_not(face: Any, clock: Clock) -> None:
    @face.once(key="{k}", scope="s", on_error="store", retention="1h")
    def fails(k: str) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await fails("failed")
    await (await face.claim("released", scope="s")).release()
    assert await face.first_many(["failed", "released"], "1h", scope="s") == [False, True]


def test_a_mark_is_told_with_its_token(gate: Gate) -> None:
    key = claims_of(gate).key("s", "k")
    first, second = (gate.context.link.run(claims_of(gate).mark(key, new_id(), 60_000)) for _ in range(2))
    assert (first.state, first.attempt, first.taken_over) == ("started", 1, 0)
    assert (second.state, second.token, second.attempt, second.left_ms) == ("done", first.token, 1, 60_000)
    assert gate.context.link.run(claims_of(gate).inspect(key)).token == first.token


def test_a_claim_without_a_number_may_be_tried_any_number_of_times(gate: Gate, clock: Clock) -> None:
    key = claims_of(gate).key("s", "k")
    for attempt in range(1, 4):
        claim = gate.context.link.run(claims_of(gate).claim(key, new_id(), 30_000, 60_000))
        assert (claim.state, claim.attempt) == ("started", attempt)
        clock.advance("30s")


@pytest.mark.parametrize("on_error", ["store", "release"])
async def test_what_was_done_at_a_later_attempt_says_so(face: Any, on_error: str) -> None:
    await (await face.claim("k", scope="s")).release()

    @face.once(key="{k}", scope="s", on_error=on_error)
    def second(k: str) -> None:
        if on_error == "store":
            raise ValueError("no")

    with suppress(ValueError):
        await second("k")
    assert (await face.inspect("k", scope="s")).attempts == 2
    assert (await face.claim("k", scope="s")).attempt == 2


async def test_inspect_tells_a_stored_failure(face: Any) -> None:
    @face.once(key="{k}", scope="s", on_error="store")
    def fails(k: str) -> None:
        raise ValueError("no such item")

    with pytest.raises(ValueError, match="no such item"):
        await fails("k")
    record = await face.inspect("k", scope="s")
    assert (record.state, record.kind) == ("failed", "e")
    assert (await face.claim("k", scope="s")).result == {"failed": "builtins.ValueError", "text": "no such item"}


async def test_a_forgotten_key_is_new(face: Any, clock: Clock) -> None:
    assert not await face.forget("k")
    claim = await face.claim("k")
    await claim.complete("x")
    assert await face.forget("k")
    assert not await face.forget("k")
    again = await face.claim("k")
    assert (again.started, again.attempt) == (True, 1)
    clock.advance("30s")
    assert await face.forget("k")
    assert not await again.complete()
    assert not await face.forget("k")


async def test_a_live_claim_is_forgotten_by_force_only(face: Any, clock: Clock, stored: Stored) -> None:
    claim = await face.claim("k", lease="30s")
    before = stored()
    for passes, left in (("0s", 30.0), ("29.999s", 0.001)):
        clock.advance(passes)
        with pytest.raises(AlreadyInProgress) as refused:
            await face.forget("k")
        assert (refused.value.key, refused.value.retry_after) == ("k", left)
        assert stored() == before
    assert await face.forget("k", force=True)
    assert not await claim.complete("x")
    assert not await claim.extend()
    assert (await face.inspect("k")).state == "absent"
    assert (await face.claim("k")).attempt == 1


async def test_a_done_key_past_its_retention_was_already_forgotten(face: Any, clock: Clock) -> None:
    await (await face.claim("k", retention="1h")).complete()
    clock.advance("1h")
    assert not await face.forget("k")


@pytest.mark.parametrize("end", ["complete", "release"])
def test_of_a_key_whose_time_is_over_nothing_is_told_though_its_bytes_are_still_there(
    gate: Gate, raw: Any, clock: Clock, end: str
) -> None:
    # Given a key that was taken over, with progress, and ended
    record, claims, owner = claims_of(gate).key("s", "k"), claims_of(gate), new_id()
    note = gate.context.codec.encode("n")
    gate.context.link.run(claims.claim(record, new_id(), 30_000, 60_000, b"f" * 16))
    clock.advance("30s")
    entry = gate.context.link.run(claims.claim(record, owner, 30_000, 60_000, b"f" * 16))
    assert gate.context.link.run(claims.checkpoint(record, owner, note))
    seen = gate.context.link.run(claims.inspect(record))
    assert (seen.attempts, seen.taken_over, seen.checkpoint, seen.since) == (2, 1, note, clock.now())
    if end == "complete":
        assert gate.context.link.run(claims.complete(record, owner, entry.token, 60_000, b"v", note))
    else:
        assert gate.context.link.run(claims.release(record, owner, 60_000))
    # When retention is over, and the server has not removed it yet
    clock.advance("60s")
    assert raw.exists(record[0])
    # Then the reply has only its token
    gone = gate.context.link.run(claims.inspect(record))
    assert gone == Record("absent", entry.token, 0, 0, None, None, None, "", False, "", b"", b"")


# -- cancel -----------------------------------------------------------------------------------------------------------


async def test_the_owner_of_a_cancelled_key_learns_it_with_its_next_heartbeat(lasting: Any) -> None:
    seen = threading.Event()

    def work() -> str:
        while not current().cancel_requested:
            assert not seen.wait(0.005)
        return f"stopped, lease lost: {current().lease_lost}"

    running = asyncio.create_task(lasting.guard("s", lease="1500ms").run("k", work))
    async with asyncio.timeout(60):
        while not await lasting.cancel("k", scope="s"):
            await asyncio.sleep(0.005)
        verdict = await running
    # Then its claim was held all the time
    assert (verdict.outcome, verdict.value) == ("handled", "stopped, lease lost: False")
    # And nobody is left to cancel
    assert await lasting.cancel("k", scope="s") is False


async def test_a_claim_in_a_block_learns_that_it_is_cancelled(lasting: Any) -> None:
    async with lasting.inside("k", lease="1500ms") as claim, asyncio.timeout(60):
        assert claim.cancel_requested is False
        assert await lasting.cancel("k") is True
        while not claim.cancel_requested:
            await asyncio.sleep(0.005)


async def test_a_cancelled_key_is_not_cancelled_for_its_next_owner(face: Any, clock: Clock) -> None:
    claim = await face.claim("k", lease="10s")
    assert await face.cancel("k") is True
    clock.advance(11)
    assert await face.cancel("k") is False
    taken_over = await face.claim("k", lease="10s")
    assert (claim.token < taken_over.token, await taken_over.extend()) == (True, True)
    assert face.gate.context.link.run(taken_over_renewal(face.gate, taken_over)) == "ok"


def taken_over_renewal(gate: Gate, claim: Any) -> Any:
    """The heartbeat of a claim."""
    return build_renewal(getattr(claim, "inner", claim)._build_grant(ClaimReply("started")))
