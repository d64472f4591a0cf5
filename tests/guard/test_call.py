"""The decisions of a guarded call for replies that a test cannot make a server send."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest

from idemgate import Gate, LeaseLost
from idemgate.guard import call
from idemgate.guard.claim_calls import ClaimReply
from idemgate.guard.context import DoneCache
from idemgate.guard.options import GuardOptions, OnceOptions, once_options
from idemgate.guard.request import NOT_STORED, Grant, Request, build_ending
from tests.claims import claims_of

GATE = Gate()


def request_with(**changed: Any) -> Request:
    """Return a request of the key "k" with these options."""
    options = once_options(GATE.context.codec, "once", None, cast(GuardOptions, changed))
    return Request(dataclasses.replace(options, scope="s"), claims_of(GATE), "k")


def busy(left_ms: int) -> ClaimReply:
    return ClaimReply("in_progress", left_ms=left_ms, attempt=1)


def test_a_reply_for_a_released_owner_means_a_lost_lease() -> None:
    error = call.decide(request_with(), ClaimReply("stale")).error
    assert isinstance(error, LeaseLost)
    assert error.key == "k"


async def test_a_late_copy_of_a_released_claim_is_refused(face: Any, gate: Gate) -> None:
    # Given a claim that was released
    claim = await face.claim("k")
    asked = (claim.inner if hasattr(claim, "inner") else claim)._request
    await claim.release()
    # When its request arrives once more, it does not take the key again
    assert gate.context.link.run(call.build_claim(asked, waited=False)).state == "stale"
    assert (await face.inspect("k")).state == "released"
    # And the attempt of the next owner says so
    await face.claim("k")
    assert gate.context.link.run(call.build_claim(asked, waited=False)).state == "in_progress"


@pytest.mark.parametrize(
    ("left_ms", "seconds"), [(30_000, 1.0), (400, 0.4), (1, 0.01), (0, 0.01)], ids=["poll", "lease", "soon", "now"]
)
def test_a_waiting_caller_polls_when_the_lease_may_end_and_each_second(
    left_ms: int, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call, "monotonic", lambda: 1000.0)
    assert call.pause(busy(left_ms), 1010.0) == seconds


def test_the_wait_time_counts_from_the_first_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(call, "monotonic", lambda: now[0])
    assert call.pause(busy(30_000), 1010.0) == 1.0
    now[0] += 9.75
    assert call.pause(busy(30_000), 1010.0) == 0.25
    now[0] += 0.25
    assert call.pause(busy(30_000), 1010.0) <= 0


def test_options_are_immutable() -> None:
    options = request_with().options
    assert isinstance(options, OnceOptions)
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.lease = 1  # type: ignore[misc]


def test_the_done_cache_evicts_the_oldest_entry() -> None:
    now = [1000.0]
    cache, reply = DoneCache(2, lambda: now[0]), ClaimReply("done")
    cache.store(b"a", b"", reply, 5_000, 0)
    cache.store(b"b", b"print", reply, 1_000, 0)
    for name, fingerprint in ((b"a", b""), (b"b", b"print")):
        cached = cache.lookup(name, fingerprint)
        assert cached is not None
        assert cached.reply is reply
    # Another fingerprint is recognized, and learning again makes a key the newest
    other = cache.lookup(b"b", b"another")
    assert other is not None
    assert other.reply.state == "reused"
    cache.store(b"a", b"", reply, 5_000, 0)
    cache.store(b"c", b"", reply, 5_000, 0)
    assert cache.lookup(b"b", b"print") is None
    # And each ends with its retention
    now[0] += 5
    assert cache.lookup(b"a", b"") is None
    assert cache.lookup(b"never", b"") is None


@pytest.mark.parametrize("at", [0, 1])
def test_the_done_cache_keeps_no_entry_about_which_another_thread_decides_meanwhile(at: int) -> None:
    # Given a key that another thread forgets before its reply is cached, or in the middle of that
    def forget_meanwhile() -> float:
        cache.evict(b"a")
        return 1000.0

    cache = DoneCache(2, forget_meanwhile if at else lambda: 1000.0)
    if not at:
        cache.evict(b"a")
    # When the reply is cached
    cache.store(b"a", b"", ClaimReply("done"), 5_000, 0)
    # Then the next call asks the store
    assert cache.lookup(b"a", b"") is None


def test_a_request_has_one_owner() -> None:
    request = request_with()
    assert len(request.owner) == 16
    assert call.build_claim(request, waited=False).args.count(request.owner) == 1
    assert request_with().owner != request.owner


def test_the_cached_reply_has_the_token_of_the_completed_claim() -> None:
    grant = Grant(request_with(), ClaimReply("started", token=77))
    cached = call.build_done_reply(grant, build_ending(b"v", b"data"))
    assert (cached.state, cached.token, cached.left_ms, cached.kind, cached.result) == (
        "done", 77, 86_400_000, b"v", b"data",
    )  # fmt: skip


@pytest.mark.parametrize("choice", ["wait", "raise", "skip"])
def test_only_a_waiting_caller_requests_a_wakeup(choice: str) -> None:
    _, _, _, terms, _ = call.build_claim(request_with(on_in_progress=choice), waited=False).args
    assert terms[-1] == (choice == "wait")


def test_a_result_whose_type_name_is_invalid_still_completes() -> None:
    odd = type("Odd", (), {})
    odd.__qualname__ = "\ud800"
    ending = call.encode_ending(request_with().options, odd())
    assert ending[0] == NOT_STORED
    assert b"is a ?, which would come back as something else" in ending[1]


def test_the_reason_for_a_missing_result_may_be_invalid_utf8() -> None:
    error = call.decide(request_with(), ClaimReply("done", kind=b"n", result=b"caf\xe9")).error
    assert str(error).endswith("caf\ufffd")
