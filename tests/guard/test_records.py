"""What is stored of a key: no more than is needed, and read back the same in either form."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from idemgate import Gate
from idemgate.core.calls import new_id
from idemgate.core.keys import record
from idemgate.guard.call import build_claim
from idemgate.testing import Clock
from tests.claims import claims_of

RESULT = "a result of just thirty bytes."
PACKED = 32
"""Its bytes as they are stored."""


def stored(gate: Gate, raw: Any, key: str, scope: str = "claim") -> bytes:
    found = raw.get(record(gate.namespace, scope, key))
    assert isinstance(found, bytes)
    return found


async def test_what_is_done_at_the_first_attempt_takes_twelve_bytes_and_its_result(
    face: Any, gate: Gate, raw: Any
) -> None:
    await (await face.claim("plain")).complete(RESULT)
    await (await face.claim("printed", fingerprint=1)).complete(RESULT)
    await face.first("marked", "24h")
    assert len(stored(gate, raw, "plain")) == 12 + PACKED
    assert len(stored(gate, raw, "printed")) == 12 + 16 + PACKED
    assert len(stored(gate, raw, "marked", "first")) == 12 + 16


@pytest.mark.parametrize(
    ("retention", "worked", "short"),
    [("1m", 0.0, True), ("45d", 65.535, True), ("90s", 0.0, False), ("46d", 0.0, False), ("1m", 65.536, False)],
)
async def test_either_form_says_the_same(
    face: Any, gate: Gate, raw: Any, clock: Clock, retention: str, worked: float, short: bool
) -> None:
    # Given a claim that is completed after some time
    claim = await face.claim("k", retention=retention, fingerprint="one")
    clock.advance(worked)
    began = clock.microseconds()
    await claim.complete(RESULT)
    assert (stored(gate, raw, "k")[0] >= 248) is short
    # When a caller inspects it a little later
    clock.advance("10s")
    seen = await face.inspect("k")
    # Then everything is there, in milliseconds
    assert (seen.state, seen.kind, seen.token, seen.attempts, seen.taken_over) == ("done", "v", claim.token, 1, 0)
    assert seen.since == datetime.fromtimestamp(began // 1000 / 1000, UTC)
    assert seen.retention_left == {"1m": 60, "90s": 90, "45d": 45 * 86400, "46d": 46 * 86400}[retention] - 10
    assert seen.has_fingerprint
    assert gate.context.codec.decode(seen.result) == RESULT
    assert (await face.claim("k", fingerprint="one")).result == RESULT


async def test_a_second_attempt_is_remembered_as_such(face: Any, gate: Gate, raw: Any) -> None:
    await (await face.claim("k")).release()
    await (await face.claim("k")).complete(RESULT)
    assert stored(gate, raw, "k")[0] == 193
    assert (await face.inspect("k")).attempts == 2


async def test_a_copy_of_a_completion_is_known_and_that_of_another_owner_is_not(face: Any, gate: Gate) -> None:
    # Given a key that was forgotten after an owner had it, and done by the next
    former = await face.claim("k")
    await face.forget("k", force=True)
    later = await face.claim("k")
    assert await later.complete(RESULT)
    # When both complete it once more
    assert await later.complete("again") is True
    assert await former.complete("too late") is False
    # Then nothing changed
    assert (await face.claim("k")).result == RESULT


async def test_an_owner_that_vanished_loses_its_claim_by_a_decision(face: Any, clock: Clock) -> None:
    vanished = await face.claim("k", lease="30s", on_lease_loss="hold")
    clock.advance("31s")
    assert await face.resolve("k", done=True, result="decided")
    assert await vanished.complete("after all") is False
    assert (await face.claim("k")).result == "decided"


async def test_a_late_copy_of_a_claim_is_not_completed_by_the_attempt_before_it(
    face: Any, gate: Gate, clock: Clock
) -> None:
    # Given a key that was done and forgotten, and that a late copy of the claim has taken again
    claim = await face.claim("k", retention="1m")
    request = (claim.inner if hasattr(claim, "inner") else claim)._request
    await claim.complete(RESULT)
    clock.advance("61s")
    assert gate.context.link.run(build_claim(request, waited=False)).token > claim.token
    # When the completion is made once more, and arrives twice
    answers = [await claim.complete("again") for _ in range(2)]
    # Then both are answered the same, and nothing came of it
    assert answers == [False, False]
    assert (await face.inspect("k")).state == "in_progress"


def test_a_copy_of_which_nothing_is_known_any_more_is_a_request_of_nobody(gate: Gate, clock: Clock) -> None:
    """How far P6 reaches, as docs/promises.md has it."""
    run, claims = gate.context.link.run, claims_of(gate)
    # Given a mark and a claim that were done, and whose retention ended
    marked, claimed, noted = (claims.key("s", name) for name in ("marked", "claimed", "noted"))
    owner = new_id()

    def mark() -> Any:
        return run(claims.mark(marked, owner, 60_000))

    def claim() -> Any:
        return run(claims.claim(claimed, owner, 30_000, 60_000, hold=True))

    first, second = mark(), claim()
    assert (first.state, mark().token) == ("started", first.token)
    assert run(claims.complete(claimed, owner, second.token, 60_000, b"n", b""))
    assert claim().state == "done"
    clock.advance("61s")
    # When copies of them come, Then they mark and claim anew, with higher tokens
    assert mark().token > first.token
    assert run(claims.inspect(marked)).retention_left == 60
    assert claim().token > second.token
    clock.advance("31s")
    assert run(claims.inspect(claimed)).state == "held"
    # And of a claim that lives, a copy of a note puts it back
    run(claims.claim(noted, owner, 30_000, 60_000))
    for note in ("one", "two", "one"):
        assert run(claims.checkpoint(noted, owner, gate.context.codec.encode(note)))
    assert gate.context.codec.decode(run(claims.inspect(noted)).checkpoint) == "one"
