"""The decisions of a guarded call that no server can be brought to ask for at will."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from idemgate import Gate, LeaseLost
from idemgate.guard import attempt as passage
from idemgate.guard.attempt import Answer, Guard, Passage, Seen, Wait
from idemgate.guard.calls import Entry
from idemgate.guard.options import guard_of
from tests.claims import claims_of

GATE = Gate()


def passing(**options: Any) -> Passage:
    """A passage of key "k" with these options."""
    defaults = dict(zip(_NAMES, _DEFAULTS, strict=True))
    guard = guard_of(GATE.context.codec, **{**defaults, **options})
    return Passage(dataclasses.replace(guard, scope="s"), claims_of(GATE), "k", b"")


_NAMES = (
    "scope", "retention", "lease", "on_done", "on_in_progress", "wait", "on_error", "on_lease_loss", "on_store_error",
    "max_attempts", "retry", "at_most_once", "max_result_bytes", "shadow",
)  # fmt: skip
_DEFAULTS = (None, "24h", "30s", None, "raise", "30s", "release", "retry", "raise", None, None, False, None, False)


def busy(left_ms: int) -> Entry:
    return Entry("in_progress", left_ms=left_ms, attempt=1)


def test_a_token_that_was_released_before_is_a_lost_lease() -> None:
    verdict = passing().judge(Entry("stale"))
    assert isinstance(verdict, Answer)
    with pytest.raises(LeaseLost) as lost:
        verdict.give()
    assert lost.value.key == "k"


async def test_a_late_copy_of_a_claim_that_was_released_is_refused(face: Any, gate: Gate) -> None:
    # Given a claim that was released
    claim = await face.claim("k")
    asked = (claim.inner if hasattr(claim, "inner") else claim)._passage
    await claim.release()
    # When its request arrives once more, it does not take the key again
    assert gate.context.link.run(asked.enter()).state == "stale"
    assert (await face.inspect("k")).state == "released"
    # And where the next owner runs, it is told so
    await face.claim("k")
    assert gate.context.link.run(asked.enter()).state == "in_progress"


@pytest.mark.parametrize(
    ("left_ms", "seconds"), [(30_000, 1.0), (400, 0.4), (1, 0.01), (0, 0.01)], ids=["poll", "lease", "soon", "now"]
)
def test_who_waits_looks_again_when_the_lease_may_end_and_each_second(left_ms: int, seconds: float) -> None:
    assert passing(on_in_progress="wait").judge(busy(left_ms)) == Wait(seconds)


def test_waiting_is_counted_from_the_first_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(passage, "monotonic", lambda: now[0])
    waiting = passing(on_in_progress="wait", wait="10s")
    assert waiting.judge(busy(30_000)) == Wait(1.0)
    now[0] += 9.75
    assert waiting.judge(busy(30_000)) == Wait(0.25)
    now[0] += 0.25
    assert isinstance(waiting.judge(busy(30_000)), Answer)


def test_guards_can_be_compared_and_not_changed() -> None:
    guard = passing().guard
    assert isinstance(guard, Guard)
    with pytest.raises(dataclasses.FrozenInstanceError):
        guard.lease = 1  # type: ignore[misc]


def test_seen_keeps_what_was_learnt_last() -> None:
    now = [1000.0]
    seen, entry = Seen(2, lambda: now[0]), Entry("done")
    seen.keep(b"a", b"", entry, 5_000)
    seen.keep(b"b", b"print", entry, 1_000)
    for name, fingerprint in ((b"a", b""), (b"b", b"print")):
        known = seen.recall(name, fingerprint)
        assert known is not None
        assert known.entry is entry
    # Another fingerprint is told apart, and learning again makes a key the newest
    other = seen.recall(b"b", b"another")
    assert other is not None
    assert other.entry.state == "reused"
    seen.keep(b"a", b"", entry, 5_000)
    seen.keep(b"c", b"", entry, 5_000)
    assert seen.recall(b"b", b"print") is None
    # And each ends with its retention
    now[0] += 5
    assert seen.recall(b"a", b"") is None
    assert seen.recall(b"never", b"") is None


def test_an_owner_is_drawn_once_whoever_asks_first() -> None:
    passage = passing()
    owner = passage.owner
    assert len(owner) == 16
    assert passage.enter().args.count(owner) == 1
    assert passage.owner == owner


def test_what_the_next_caller_is_answered_has_the_token_of_the_work() -> None:
    passage = passing()
    passage.entry = Entry("started", token=77)
    passage.result = b"v", b"data"
    known = passage.finished()
    assert (known.state, known.token, known.left_ms, known.kind, known.result) == (
        "done", 77, 86_400_000, b"v", b"data",
    )  # fmt: skip


@pytest.mark.parametrize("choice", ["wait", "raise", "skip"])
def test_only_who_waits_asks_to_be_woken(choice: str) -> None:
    _, _, _, terms, _ = passing(on_in_progress=choice).enter().args
    assert terms[-1] == (choice == "wait")


def test_work_whose_result_has_a_type_that_cannot_be_named_is_done_all_the_same() -> None:
    odd = type("Odd", (), {})
    odd.__qualname__ = "\ud800"
    done = passing()
    assert done.complete(odd()).args[1] == b"n"
    assert b"is a ?, which would come back as something else" in done.result[1]


def test_why_there_is_no_result_is_told_whatever_its_bytes() -> None:
    entry = Entry("done", kind=b"n", result=b"caf\xe9")
    answer = passing().judge(entry)
    assert isinstance(answer, Answer)
    assert str(answer.error).endswith("caf\ufffd")
