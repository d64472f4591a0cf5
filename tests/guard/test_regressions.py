"""Faults that were found by using it, each as the test that shows it."""

from __future__ import annotations

from typing import Any

import pytest

from idemgate import Gate, InvalidArgument, OutcomeUnknown
from idemgate.errors import AttemptsExhausted
from idemgate.testing import Clock


async def test_a_held_key_outlives_lease_and_retention_on_the_servers_own_clock(face: Any, raw: Any) -> None:
    # Given a claim that is held when its owner vanishes, with a short lease and a short retention
    await face.claim("k", lease="1s", retention="1s", on_lease_loss="hold")
    # Then Redis itself does not drop its record while it still needs a decision
    (record,) = raw.scan_iter(match=f"ig2:{{{face.gate.namespace}:once:claim:k}}")
    assert raw.pttl(record) > 9 * 365 * 86_400_000
    # And one that is not held is dropped some time after its lease, also where it was extended
    claim = await face.claim("other", lease="60s", retention="60s")
    (record,) = raw.scan_iter(match=f"ig2:{{{face.gate.namespace}:once:claim:other}}")
    assert 0 < raw.pttl(record) < 30 * 86_400_000
    assert await claim.extend("120s")
    assert 0 < raw.pttl(record) < 30 * 86_400_000


async def test_errors_name_the_scope_that_mends_them(face: Any, clock: Clock) -> None:
    # Given a function whose owner vanished, and one that was tried too often
    held = face.once(key="{x}", scope="pay", on_lease_loss="hold")(lambda x: x)
    await face.claim("7", scope="pay", lease="1s", on_lease_loss="hold")
    clock.advance("2s")
    with pytest.raises(OutcomeUnknown) as unknown:
        await held(x="7")
    # Then the fix in the text is the one that works
    assert "gate.resolve('7', scope='pay', done=True or False)" in str(unknown.value)
    assert await face.resolve("7", done=False, scope=unknown.value.scope)
    assert await held(x="7") == "7"

    def broken(x: str) -> None:
        raise LookupError(x)

    tried = face.once(key="{x}", scope="try", max_attempts=1)(broken)
    with pytest.raises(LookupError):
        await tried(x="8")
    with pytest.raises(AttemptsExhausted) as exhausted:
        await tried(x="8")
    assert "gate.forget('8', scope='try')" in str(exhausted.value)
    assert await face.forget("8", scope=exhausted.value.scope)


async def test_what_is_remembered_follows_forget_and_the_test_clock(face: Any, clock: Clock) -> None:
    # Given a remembered key
    runs: list[str] = []
    guarded = face.once(key="{x}", scope="rem", cache_size=10, retention="1h")(lambda x: runs.append(x))
    await guarded(x="a")
    await guarded(x="a")
    assert runs == ["a"]
    # When it is forgotten here, it runs again; and when its retention has passed by the test's clock, too
    assert await face.forget("a", scope="rem")
    await guarded(x="a")
    clock.advance("2h")
    await guarded(x="a")
    assert runs == ["a", "a", "a"]


async def test_what_others_did_is_remembered_until_its_retention_ends_and_no_longer(face: Any, clock: Clock) -> None:
    # Given a key that was done elsewhere, which this process learns
    await (await face.claim("a", scope="rem")).complete("there", retention="60s")
    guarded = face.once(key="{x}", scope="rem", cache_size=10)(lambda x: "here")
    assert await guarded(x="a") == "there"
    clock.advance("59.999s")
    assert await guarded(x="a") == "there"
    # Then it knows when that ends
    clock.advance("1ms")
    assert await guarded(x="a") == "here"


async def test_a_remembered_result_that_can_be_changed_is_nobody_elses(face: Any) -> None:
    guarded = face.once(key="{x}", scope="s", cache_size=10)(lambda x: [x])
    for _ in range(3):
        result = await guarded(x="a")
        assert result == ["a"]
        result.append("changed by its caller")


async def test_one_key_is_not_many(face: Any) -> None:
    with pytest.raises(InvalidArgument, match="one value, not many"):
        await face.first_many("abc", "1s")


@pytest.mark.parametrize("n", [-1, 1.5, "a", True])
async def test_a_number_of_deliveries_is_checked(face: Any, n: Any) -> None:
    with pytest.raises(InvalidArgument, match="n="):
        await face.topic("t").take(n)


async def test_what_is_no_delivery_cannot_be_acknowledged(face: Any) -> None:
    with pytest.raises(InvalidArgument, match="not a delivery"):
        await face.topic("t").ack("x")


def test_a_topic_declared_twice_keeps_what_was_said(gate: Gate) -> None:
    # Given a topic that one module names and another configures
    gate.topic("q", window="1s")
    topic = gate.topic("q", window="1s", lease="5m", max_attempts=2)
    # Then what was said counts, whichever came first; saying two things is refused
    assert (topic.policy.lease, topic.policy.max_attempts) == (300_000, 2)
    assert gate.topic("q", window="1s").policy.lease == 300_000
    with pytest.raises(InvalidArgument, match="lease"):
        gate.topic("q", window="1s", lease="1m")
