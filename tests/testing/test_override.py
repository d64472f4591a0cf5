"""`override`: what a program has made of its gate uses another store, and afterwards its own again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

import idemgate
from idemgate import Gate, InvalidArgument
from idemgate.errors import PolicyChanged
from idemgate.testing import Clock, override
from tests.conftest import Face


@pytest.fixture
def elsewhere(gate: Gate, url: str) -> AbstractContextManager[Gate]:
    """Another namespace and another clock, which begins later."""
    return override(gate, url, namespace=f"{gate.namespace}-other", clock=Clock(1_800_000_000.0))


async def test_what_a_program_has_made_uses_the_other_store_and_then_its_own_again(
    face: Face, gate: Gate, elsewhere: AbstractContextManager[Gate]
) -> None:
    # Given a program with a guarded function, a guard, a topic and a dedup set, all of them used
    ran: list[int] = []

    async def use() -> dict[str, Any]:
        before = len(ran)
        await charge(1)
        await charge(1)
        verdict = await guard.run("k", lambda: ran.append(2))
        receipt = await topic.trigger("a", len(ran))
        return {
            "ran": len(ran) - before, "verdict": verdict.outcome, "receipt": receipt.status, "new": await ids.add("a"),
            "first": await face.first("f", "1h"), "started": gate.counters["once.started"],
            "due": receipt.due_at,
        }  # fmt: skip

    charge = face.once(key="{n}", scope="charge", cache_size=10)(lambda n: ran.append(n))
    guard = face.guard("consumer")
    topic = face.topic("images", window="1h")
    ids = face.dedup("ids", "1h")
    expected = {"ran": 2, "verdict": "handled", "receipt": "scheduled", "new": True, "first": True, "started": 2}
    repeated = {"ran": 0, "verdict": "duplicate", "receipt": "merged", "new": False, "first": False, "started": 2}
    found = await use()
    due = found.pop("due")
    assert found == expected
    # When its gate is overridden, then nothing has happened there yet
    with elsewhere as same:
        assert same is gate
        assert gate.namespace.endswith("-other")
        found = await use()
        assert found.pop("due") > due
        assert found == expected
        assert (await use()) | {"due": None} == repeated | {"due": None}
    # And afterwards everything is as before
    assert not gate.namespace.endswith("-other")
    assert await use() == repeated | {"due": due}
    assert (await topic.peek("a")).pending.count == 2


async def test_a_merged_function_and_its_worker_use_the_other_store(
    face: Face, gate: Gate, elsewhere: AbstractContextManager[Gate], eventually: Any
) -> None:
    calls: list[int] = []

    @gate.merge(key="{n}", name="merged")
    def render(n: int) -> None:
        calls.append(n)

    render.trigger(1)
    with elsewhere:
        render.trigger(2)
        async with gate.aio.worker():
            await eventually(lambda: calls)
    assert calls == [2]
    assert render.topic.stats().pending == 1


async def test_a_topic_may_have_another_policy_in_the_other_store(
    gate: Gate, url: str, elsewhere: AbstractContextManager[Gate]
) -> None:
    # Given a topic without options, which adopts what is stored
    with Gate(url, namespace=gate.namespace, clock=gate.context.clock) as other:
        other.topic("t", window="7s", slots=4).trigger("a")
    topic = gate.topic("t")
    assert (topic.trigger("b").status, topic.policy.window) == ("scheduled", 7000)
    # When the other store has another policy, and it is used there
    with elsewhere:
        assert topic.trigger("b").status == "scheduled"
        assert (topic.policy.window, topic.policy.slots) == (None, 1)
    # Then the topic has its own again
    assert topic.trigger("b").status == "merged"
    assert (topic.policy.window, topic.policy.slots) == (7000, 4)


async def test_a_refused_policy_is_refused_in_the_other_store_only(
    gate: Gate, url: str, elsewhere: AbstractContextManager[Gate]
) -> None:
    topic = gate.topic("t", window="1s")
    topic.trigger("a")
    with elsewhere:
        with Gate(url, namespace=gate.namespace, clock=gate.context.clock) as other:
            other.topic("t", window="2s").trigger("a")
        with pytest.raises(PolicyChanged):
            topic.trigger("a")
    assert topic.trigger("a").status == "merged"


async def test_only_the_namespace_or_only_the_clock_can_change(gate: Gate, clock: Clock) -> None:
    gate.first("a", "1h")
    with override(gate, namespace=f"{gate.namespace}-other"):
        assert gate.context.clock is clock
        assert gate.first("a", "1h") is True
    later = Clock(clock.microseconds() / 1_000_000)
    later.advance("2h")
    with override(gate, clock=later):
        assert gate.first("a", "1h") is True


async def test_overrides_nest_and_end_after_an_error(gate: Gate, elsewhere: AbstractContextManager[Gate]) -> None:
    name = gate.namespace
    gate.counters.add("mine")
    with elsewhere:
        gate.counters.add("theirs")
        with pytest.raises(ValueError, match="no"), override(gate, namespace=f"{name}-third"):
            assert gate.namespace == f"{name}-third"
            assert dict(gate.counters) == {}
            raise ValueError("no")
        assert (gate.namespace, dict(gate.counters)) == (f"{name}-other", {"theirs": 1})
    assert (gate.namespace, dict(gate.counters)) == (name, {"mine": 1})


async def test_a_lease_is_renewed_in_the_other_store(gate: Gate, clock: Clock, eventually: Any) -> None:
    # Given a claim in the store of the program, so that its heartbeats have a connection, and one in the other store
    other = override(gate, namespace=f"{gate.namespace}-other")
    with gate.claim("k", lease="1s"), other, gate.claim("k", lease="1s") as claim:
        assert claim.started
        # When its lease has nearly ended, then it is renewed there
        clock.advance("900ms")
        await eventually(lambda: gate.inspect("k").lease_left == 1.0)


async def test_reports_of_the_program_end_meanwhile(gate: Gate, elsewhere: AbstractContextManager[Gate]) -> None:
    class Observer:
        def __init__(self) -> None:
            self.told: list[str] = []

        def begin(self) -> None:
            self.told.append(f"begin {gate.namespace.endswith('-other')}")

        def end(self) -> None:
            self.told.append(f"end {gate.namespace.endswith('-other')}")

    observer = gate.context.observer = Observer()
    gate.first("a", "1h")
    with elsewhere:
        gate.first("a", "1h")
        assert observer.told == ["begin False", "end False"]
    assert observer.told == ["begin False", "end False", "begin False"]


async def test_no_connection_is_left_open(gate: Gate, url: str, raw: Any, eventually: Any) -> None:
    await gate.aio.first("a", "1h")
    before = len(raw.client_list())
    with override(gate, url, namespace=f"{gate.namespace}-other"):
        gate.first("a", "1h")
        await gate.aio.first("b", "1h")
        assert len(raw.client_list()) > before
        await gate.aio.close()
    await eventually(lambda: len(raw.client_list()) == before)  # the server notices it a moment later


@pytest.fixture
def default(url: str, namespace: str) -> Iterator[Gate]:
    with override(idemgate.default_gate, url, namespace=namespace) as gate:
        yield gate


async def test_the_default_gate_is_overridden_also_for_configure(
    default: Gate, url: str, namespace: str, sound: Any
) -> None:
    # Given a program that configures the default gate when it starts
    @idemgate.once(key="{n}", scope="s")
    def double(n: int) -> int:
        return 2 * n

    for _ in range(2):  # also when it is in use
        assert idemgate.configure("redis://nowhere.invalid:1", namespace="production") is default
        assert double(4) == 8
    with pytest.raises(InvalidArgument, match="store"):
        idemgate.configure(5)
    # Then it used the store of the test
    with Gate(url, namespace=namespace) as gate:
        assert gate.inspect("4", scope="s").state == "done"
        sound(gate)


async def test_a_running_worker_prevents_it(gate: Gate) -> None:
    gate.topic("t").handler(lambda delivery: None)
    async with gate.aio.worker():
        with pytest.raises(InvalidArgument, match=r"a worker or a subscriber of it runs"), override(gate):
            raise AssertionError("not reached")


@pytest.mark.parametrize("bad", [{"namespace": "a b"}, {"store": 5}, {"store": "nonsense"}])
async def test_bad_arguments_change_nothing(gate: Gate, bad: dict[str, Any]) -> None:
    before = gate.namespace
    with pytest.raises(idemgate.IdemgateError), override(gate, **bad):
        raise AssertionError("not reached")
    assert gate.namespace == before
    assert gate.first("a", "1h")
