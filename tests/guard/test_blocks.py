"""The claim as a block (`with`, `async with`), and what `current()` says inside of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument, current
from idemgate.errors import NoCurrentExecution
from idemgate.testing import Clock


async def test_leaving_the_block_completes_the_claim(face: Any) -> None:
    async with face.inside("k") as claim:
        assert claim.started
        assert (await face.claim("k")).state == "in_progress"
    later = await face.claim("k")
    assert (later.state, later.result) == ("done", None)


async def test_a_body_that_completes_has_the_last_word(face: Any) -> None:
    async with face.inside("k") as claim:
        assert await claim.complete("result", retention="1h")
    assert (await face.claim("k")).result == "result"
    assert (await face.inspect("k")).retention_left == 3600.0


async def test_a_body_that_raises_gives_the_claim_back(face: Any) -> None:
    with pytest.raises(RuntimeError, match="broken"):
        async with face.inside("k"):
            raise RuntimeError("broken")
    assert (await face.claim("k")).attempt == 2


async def test_a_body_that_raises_after_it_completed_stays_done(face: Any) -> None:
    async def work() -> None:
        async with face.inside("k") as claim:
            await claim.complete("result")
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        await work()
    assert (await face.claim("k")).result == "result"


async def test_a_result_that_cannot_be_stored_leaves_by_the_error(face: Any) -> None:
    with pytest.raises(InvalidArgument, match="result"):
        async with face.inside("k") as claim:
            await claim.complete(object())
    assert (await face.inspect("k")).state == "released"


async def test_the_body_of_a_claim_that_was_not_granted_disturbs_nobody(face: Any) -> None:
    owner = await face.claim("k")
    async with face.inside("k") as claim:
        assert claim.state == "in_progress"
        with pytest.raises(NoCurrentExecution):
            current()
    with pytest.raises(RuntimeError):
        async with face.inside("k"):
            raise RuntimeError("still runs: ask for the state")
    assert await owner.complete("x")
    async with face.inside("k") as claim:
        assert (claim.state, claim.result) == ("done", "x")
    assert (await face.claim("k")).result == "x"


async def test_a_claim_lost_inside_the_block_is_counted(face: Any, gate: Gate) -> None:
    async with face.inside("k"):
        await face.forget("k", force=True)
    assert gate.counters["once.lost"] == 1
    assert (await face.inspect("k")).state == "absent"


async def test_a_body_that_goes_on_after_it_completed_has_lost_nothing(lasting: Any) -> None:
    async with lasting.inside("k", lease="1s") as claim:
        await claim.complete("result")
        await asyncio.sleep(0.4)  # while heartbeats find that nothing is held any more
        assert not current().lease_lost
    assert lasting.gate.counters["once.lease_lost"] == 0


async def test_current_is_the_claim_inside_and_nothing_outside(face: Any, clock: Clock) -> None:
    with pytest.raises(NoCurrentExecution, match="outside"):
        current()
    first = await face.claim("k")
    await first.checkpoint([1, 2])
    clock.advance("30s")
    async with face.inside("k") as claim:
        execution = current()
        assert (execution.key, execution.token, execution.attempt) == ("k", claim.token, 2)
        assert execution.recovered == [1, 2]
        assert not execution.lease_lost
        async with face.inside("inner"):
            assert current().key == "inner"
        assert current() is execution
    with pytest.raises(NoCurrentExecution):
        current()


async def test_current_keeps_a_checkpoint_in_both_flavours(face: Any, gate: Gate) -> None:
    async with face.inside("k"):
        assert current().checkpoint("blocking")
        assert gate.context.codec.decode(gate.inspect("k").checkpoint) == "blocking"
        assert await current().aio.checkpoint("awaiting")
        assert gate.context.codec.decode(gate.inspect("k").checkpoint) == "awaiting"
        with pytest.raises(InvalidArgument, match="checkpoint"):
            current().checkpoint(object())


async def test_a_checkpoint_of_a_lost_claim_says_so(face: Any, gate: Gate) -> None:
    async with face.inside("k"):
        await face.forget("k", force=True)
        assert not current().checkpoint("late")
        assert current().lease_lost
        assert not await current().aio.checkpoint("late")


async def test_who_waits_inside_the_block_until_it_may_run_is_kept_alive_from_then_on(
    face: Any, outlive_lease: Any
) -> None:
    # Given a block whose claim was not granted at first
    owner = await face.claim("k")
    async with face.inside("k", lease="1s") as claim:
        await owner.release()
        assert await claim.wait("60s") == "started"
        # When its body runs for longer than the lease
        await outlive_lease("k")
        # Then the lease still holds, and the end of the block completes it
        assert not (await face.claim("k")).started
    assert (await face.claim("k")).state == "done"


async def test_an_awaiting_claim_has_to_be_awaited(gate: Gate) -> None:
    claim = gate.aio.claim("k")
    assert "not sent" in repr(claim)
    for name in ("state", "started", "token", "result", "retry_after"):
        with pytest.raises(InvalidArgument, match="await"):
            getattr(claim, name)
    with pytest.raises(InvalidArgument, match="await"):
        await claim.wait("1s")
    assert (await claim).started
    assert "started" in repr(claim)
    assert (await claim) is claim
    assert (await gate.aio.inspect("k")).attempts == 1
