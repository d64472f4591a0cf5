"""`once`: of all calls with the same key the first runs, and the others get what its parameters say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from idemgate import AlreadyDone, AlreadyInProgress, Gate, InvalidArgument, KeyReused, current
from idemgate.errors import NoCurrentExecution, ReplayedFailure, ResultUnavailable
from idemgate.guard import call
from idemgate.guard.manage import Decision
from idemgate.testing import Clock

pytestmark = pytest.mark.one_in(3)

Stored = Callable[[], dict[bytes, bytes]]


@dataclass
class Order:
    id: str
    total: int


async def test_duplicates_get_the_result_of_the_first(face: Any) -> None:
    ran = []

    @face.once(key="{event[id]}")
    def handle(event: dict[str, Any]) -> dict[str, Any]:
        ran.append(event)
        return {"seen": event["n"]}

    assert await handle({"id": "a", "n": 1}) == {"seen": 1}
    assert await handle({"id": "a", "n": 2}) == {"seen": 1}
    assert await handle(event={"id": "b", "n": 3}) == {"seen": 3}
    assert [event["n"] for event in ran] == [1, 3]
    assert (face.gate.counters["once.started"], face.gate.counters["once.completed"]) == (2, 2)
    assert face.gate.counters["once.done"] == 1


# -- key, scope, fingerprint ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "same", "other"),
    [
        pytest.param("{order.id}", Order("x", 2), Order("y", 1), id="an attribute"),
        pytest.param("{order.id}:{order.total}", Order("x", 1), Order("x", 2), id="two fields"),
        pytest.param(lambda order: order.id.encode(), Order("x", 3), Order("y", 1), id="a callable, bytes"),
        pytest.param(lambda order: order.total, Order("z", 1), Order("x", 2), id="a callable, a number"),
        pytest.param(None, Order("x", 1), Order("x", 2), id="all arguments"),
    ],
)
async def test_the_key_decides_what_is_the_same_work(face: Any, key: Any, same: Order, other: Order) -> None:
    ran = []

    @face.once(key=key)
    def handle(order: Order) -> int:
        ran.append(order)
        return len(ran)

    assert await handle(Order("x", 1)) == 1
    assert await handle(same) == 1
    assert await handle(other) == 2


async def test_a_scope_is_the_function_unless_it_is_shared(face: Any) -> None:
    ran = []

    def one(k: str) -> None:
        ran.append("one")

    def two(k: str) -> None:
        ran.append("two")

    for body in (one, two):
        await face.once(key="{k}")(body)("x")
    assert ran == ["one", "two"]
    for body in (one, two):
        await face.once(key="{k}", scope="together")(body)("x")
    assert ran == ["one", "two", "one"]


async def test_the_scope_of_a_function_is_its_qualified_name(face: Any) -> None:
    @face.once(key="{k}")
    def handle(k: str) -> None: ...

    await handle("x")
    scope = f"{__name__}.test_the_scope_of_a_function_is_its_qualified_name.handle"
    assert (await face.inspect("x", scope=scope)).state == "done"


@pytest.mark.parametrize(
    "fingerprint",
    [
        pytest.param(["amount"], id="names"),
        pytest.param("amount", id="one name"),
        pytest.param(["extra[amount]"], id="a member"),
        pytest.param(lambda key, amount, extra: {"a": amount}, id="a callable"),
    ],
)
async def test_the_same_key_with_another_payload_is_refused(face: Any, fingerprint: Any, stored: Stored) -> None:
    # Given a payment that was made
    ran = []

    @face.once(key="{key}", fingerprint=fingerprint)
    def pay(key: str, amount: int, extra: dict[str, Any]) -> str:
        ran.append(amount)
        return "receipt"

    assert await pay("k", 10, {"amount": 10, "at": 1}) == "receipt"
    assert await pay("k", 10, {"amount": 10, "at": 2}) == "receipt"
    before = stored()
    # When its key comes again with another amount
    with pytest.raises(KeyReused) as refused:
        await pay("k", 11, {"amount": 11, "at": 1})
    # Then nothing runs, and nothing is disclosed
    assert (refused.value.key, refused.value.args[1:]) == ("k", (refused.value.scope,))
    assert "receipt" not in str(vars(refused.value))
    assert "receipt" not in str(refused.value)
    assert ran == [10]
    assert stored() == before
    assert face.gate.counters["once.reused"] == 1


# -- retention and lease ----------------------------------------------------------------------------------------------


async def test_when_retention_ends_the_key_is_new(face: Any, clock: Clock) -> None:
    ran = []

    @face.once(key="{k}", retention="1h")
    def handle(k: str) -> int:
        ran.append(k)
        return len(ran)

    assert await handle("x") == 1
    clock.advance(3599.999)
    assert await handle("x") == 1
    clock.advance("1ms")
    assert await handle("x") == 2


async def test_a_lapsed_owner_is_taken_over(face: Any, clock: Clock) -> None:
    # Given an owner that fell silent
    former = await face.claim("x", scope="s", lease="30s")
    clock.advance("30s")

    # When a guarded function of that scope is called
    @face.once(key="{k}", scope="s")
    def handle(k: str) -> str:
        return "mine"

    assert await handle("x") == "mine"
    # Then it ran, which is counted, and the former owner is lost
    assert face.gate.counters["once.taken_over"] == 1
    assert not await former.complete("late")
    assert await handle("x") == "mine"


async def test_who_was_taken_over_while_running_changes_nothing_and_is_counted(face: Any, gate: Gate) -> None:
    # Given a run whose lease goes to another owner before it ends
    @face.once(key="{k}", scope="s")
    def handle(k: str) -> str:
        gate.forget(k, scope="s", force=True)
        other = gate.claim(k, scope="s")
        assert other.complete("of the other")
        return "of the former"

    # When it ends
    assert await handle("x") == "of the former"
    # Then its caller has its answer, and everybody else that of the other
    assert await handle("x") == "of the other"
    assert (gate.counters["once.lost"], gate.counters["once.completed"]) == (1, 0)


# -- on_done ----------------------------------------------------------------------------------------------------------


async def test_on_done_replay_skip_and_raise(face: Any) -> None:
    def body(k: str) -> dict[str, int]:
        return {"n": 1}

    guarded = {how: face.once(key="{k}", scope="s", on_done=how)(body) for how in (None, "replay", "skip", "raise")}
    assert await guarded[None]("x") == {"n": 1}
    assert await guarded[None]("x") == {"n": 1}
    assert await guarded["replay"]("x") == {"n": 1}
    assert await guarded["skip"]("x") is None
    with pytest.raises(AlreadyDone) as refused:
        await guarded["raise"]("x")
    assert (refused.value.key, refused.value.result) == ("x", {"n": 1})


async def test_a_replayed_result_is_of_the_annotated_type(face: Any) -> None:
    @face.once(key="{k}")
    def handle(k: str) -> list[Order]:
        return [Order(k, 1)]

    assert await handle("x") == [Order("x", 1)]
    assert await handle("x") == [Order("x", 1)]


async def test_a_stored_result_of_another_shape_is_an_error_and_not_a_run(face: Any) -> None:
    ran = []
    await (await face.claim("x", scope="s")).complete({"no": "order"})

    @face.once(key="{k}", scope="s")
    def handle(k: str) -> Order:
        ran.append(k)
        return Order(k, 1)

    with pytest.raises(ResultUnavailable, match="cannot be decoded"):
        await handle("x")
    assert ran == []


# -- on_in_progress ---------------------------------------------------------------------------------------------------


async def test_on_in_progress_raise_tells_when_to_come_again(face: Any, clock: Clock) -> None:
    await face.claim("x", scope="s", lease="30s")
    clock.advance("10s")

    @face.once(key="{k}", scope="s")
    def handle(k: str) -> None:
        raise AssertionError("runs elsewhere")

    with pytest.raises(AlreadyInProgress) as refused:
        await handle("x")
    assert (refused.value.key, refused.value.retry_after) == ("x", 20.0)
    assert face.gate.counters["once.in_progress"] == 1


async def test_on_in_progress_skip_gives_nothing(face: Any) -> None:
    owner = await face.claim("x", scope="s")

    @face.once(key="{k}", scope="s", on_in_progress="skip")
    def handle(k: str) -> str:
        return "ran"

    assert await handle("x") is None
    await owner.release()
    assert await handle("x") == "ran"


# -- max_result_bytes, and results that cannot be stored --------------------------------------------------------------


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (object(), "object"),
        ("x" * 200, "limit is 100"),
        (float, "type"),
        ({"a": object()}, r"\['a'\]"),
        ({"x" + "\N{EURO SIGN}" * 600: object()}, "\N{EURO SIGN}"),
    ],
)
async def test_what_cannot_be_stored_is_done_without_value_and_never_runs_again(
    face: Any, gate: Gate, result: object, why: str
) -> None:
    # Given a function whose result cannot be kept
    ran = []

    def body(k: str) -> Any:
        ran.append(k)
        return result

    guarded = face.once(key="{k}", scope="s", max_result_bytes=100)(body)
    # When it is called, its caller gets the result
    assert await guarded("x") is result
    # Then that is counted
    assert (gate.counters["once.completed"], gate.counters["once.result_not_stored"]) == (1, 1)
    # And the error of a duplicate says why it gets none, and the effect does not happen again
    with pytest.raises(ResultUnavailable, match=why) as refused:
        await guarded("x")
    assert refused.value.key == "x"
    with pytest.raises(AlreadyDone) as done:
        await face.once(key="{k}", scope="s", on_done="raise")(body)("x")
    assert done.value.result is None
    assert await face.once(key="{k}", scope="s", on_done="skip")(body)("x") is None
    assert ran == ["x"]
    assert (await face.inspect("x", scope="s")).kind == "n"
    with pytest.raises(ResultUnavailable):
        assert (await face.claim("x", scope="s")).result


class _Secretive:
    def __repr__(self) -> str:
        return "canary"

    def __str__(self) -> str:
        return "canary"


@dataclass
class _Unreadable:
    unset: str = field(init=False)

    def __getattr__(self, name: str) -> object:
        raise ValueError("canary")


@pytest.mark.parametrize(
    ("result", "where"),
    [
        ({"o": _Secretive()}, r"result\['o'\]: is a _Secretive"),
        ([1, {_Secretive(): 1}], r"result\[1\]\[<_Secretive>\]: is a _Secretive"),
        ({"o": bytearray(b"canary")}, r"result\['o'\]: is a bytearray"),
        ({"o": "canary\ud800"}, "result: holds half a surrogate pair"),
        ({"o": _Unreadable()}, r"result\['o'\]: its fields cannot be read \(ValueError\)"),
    ],
)
async def test_nobody_is_told_what_could_not_be_stored(face: Any, raw: Any, result: object, where: str) -> None:
    @face.once(key="{k}", scope="s")
    def handle(k: str) -> Any:
        return result

    await handle("x")
    # Then the error of another caller names the place and the type, and the store holds no more
    with pytest.raises(ResultUnavailable, match=where) as refused:
        await handle("x")
    assert "canary" not in str(refused.value)
    with pytest.raises(ResultUnavailable) as claimed:
        assert (await face.claim("x", scope="s")).result
    assert "canary" not in str(claimed.value)


async def test_max_result_bytes_counts_to_the_byte(face: Any) -> None:
    @face.once(key="{k}", max_result_bytes=100)
    def handle(k: str) -> str:
        return "x" * int(k)

    # 1 byte of version, 2 of msgpack
    for size in (97, 98):
        await handle(str(size))
    assert await handle("97") == "x" * 97
    with pytest.raises(ResultUnavailable):
        await handle("98")


async def test_max_result_bytes_is_about_results_only(face: Any) -> None:
    @face.once(key="{k}", scope="s", max_result_bytes=1, on_error="store")
    def handle(k: str) -> None:
        assert current().checkpoint("a note that is longer")
        raise ValueError("a failure that is longer")

    with pytest.raises(ValueError, match="longer"):
        await handle("x")
    with pytest.raises(ReplayedFailure, match="a failure that is longer"):
        await handle("x")


# -- at_most_once -----------------------------------------------------------------------------------------------------


async def test_at_most_once_marks_before_it_runs_and_drops_the_rest(face: Any, gate: Gate, clock: Clock) -> None:
    states = []

    @face.once(key="{k}", scope="s", at_most_once=True, retention="20s", fingerprint=["n"])
    def handle(k: str, n: int = 0) -> str:
        states.append(gate.inspect(k, scope="s").state)
        return "ran"

    assert await handle("x") == "ran"
    assert await handle("x") is None
    with pytest.raises(KeyReused):
        await handle("x", 1)
    clock.advance("20s")
    assert await handle("x") == "ran"
    assert states == ["done", "done"]


async def test_at_most_once_gives_no_second_chance_after_a_failure(face: Any) -> None:
    ran = []

    def body(k: str) -> None:
        ran.append(k)
        raise ValueError("no")

    guarded = face.once(key="{k}", scope="s", at_most_once=True)(body)
    with pytest.raises(ValueError, match="no"):
        await guarded("x")
    assert await guarded("x") is None
    with pytest.raises(AlreadyDone):
        await face.once(key="{k}", scope="s", at_most_once=True, on_done="raise")(body)("x")
    assert ran == ["x"]


async def test_at_most_once_knows_its_token_and_keeps_no_checkpoint(face: Any) -> None:
    told = []

    @face.once(key="{k}", scope="s", at_most_once=True)
    def handle(k: str) -> None:
        told.append((current().key, current().token, current().attempt))
        current().checkpoint("x")

    with pytest.raises(NoCurrentExecution, match="checkpoint"):
        await handle("x")
    assert told == [("x", (await face.inspect("x", scope="s")).token, 1)]


# -- cache_size -------------------------------------------------------------------------------------------------------


async def test_a_remembered_key_costs_no_round_trip_and_its_fingerprint_is_still_checked(
    wired: Any, wire: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    @wired.once(key="{k}", fingerprint=["n"], cache_size=2, retention="1h")
    def handle(k: str, n: int) -> int:
        ran.append((k, n))
        return n

    # Given a key that was done here
    assert await handle("x", 1) == 1
    # When it comes again
    wire.reset()
    assert await handle("x", 1) == 1
    with pytest.raises(KeyReused):
        await handle("x", 2)
    # Then the store is not asked
    assert wire.scripts == 0
    assert wired.gate.counters["once.remembered"] == 2
    # And the key fades with its retention: then the store is asked, which forgot nothing in this test
    (seen,) = wired.gate.context.caches
    now = seen._now()
    for later, asked in ((3500, 0), (3601, 1), (3602, 1)):
        monkeypatch.setattr(seen, "_now", lambda later=later: now + later)
        assert await handle("x", 1) == 1
        assert (later, wire.scripts) == (later, asked)
    assert ran == [("x", 1)]


async def test_no_more_keys_are_remembered_than_asked_for(wired: Any, wire: Any) -> None:
    @wired.once(key="{k}", cache_size=2)
    def handle(k: str) -> str:
        return k

    for k in ("a", "b", "c"):
        await handle(k)
    for k, asked in (("c", 0), ("b", 0), ("a", 1), ("a", 0), ("b", 1)):
        wire.reset()
        assert await handle(k) == k
        assert (k, wire.scripts) == (k, asked)


async def test_a_key_that_another_process_finished_is_remembered_once_heard_of(wired: Any, wire: Any) -> None:
    await (await wired.claim("x", scope="s")).complete("elsewhere")

    @wired.once(key="{k}", scope="s", cache_size=10)
    def handle(k: str) -> str:
        return "here"

    assert await handle("x") == "elsewhere"
    wire.reset()
    assert await handle("x") == "elsewhere"
    assert wire.scripts == 0


async def test_only_done_keys_are_remembered(wired: Any, wire: Any) -> None:
    owner = await wired.claim("x", scope="s")

    @wired.once(key="{k}", scope="s", cache_size=10)
    def handle(k: str) -> str:
        raise ValueError("failed")

    with pytest.raises(AlreadyInProgress):
        await handle("x")
    await owner.release()
    for _ in range(2):
        with pytest.raises(ValueError, match="failed"):
            await handle("x")


@pytest.mark.parametrize("late", ["claim", "reply"])
def test_a_duplicate_beside_a_forget_does_not_cache_the_forgotten_result(
    gate: Gate, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    # Given a key that is done, and not cached here
    gate.claim("x", scope="s").complete("old")
    guard = gate.guard("s", cache_size=10)
    if late == "claim":
        # When a duplicate arrives while the key is forgotten
        inspect = Decision.inspect

        def inspect_beside_a_duplicate(self: Decision) -> Any:
            assert guard.run("x", lambda: "new").value == "old"
            return inspect(self)

        monkeypatch.setattr(Decision, "inspect", inspect_beside_a_duplicate)
        assert gate.forget("x", scope="s")
    else:
        # When a duplicate gets its reply, and the key is forgotten before the reply is cached
        record_claim = call.record_claim

        def forget_and_record(*answer: Any) -> Any:
            monkeypatch.setattr(call, "record_claim", record_claim)
            assert gate.forget("x", scope="s")
            return record_claim(*answer)

        monkeypatch.setattr(call, "record_claim", forget_and_record)
        assert guard.run("x", lambda: "new").value == "old"
    # Then the next call runs
    assert guard.run("x", lambda: "new").value == "new"


# -- shadow -----------------------------------------------------------------------------------------------------------


async def test_shadow_runs_everything_and_counts_what_it_would_have_dropped(face: Any, gate: Gate) -> None:
    ran = []

    @face.once(key="{k}", scope="s", shadow=True, fingerprint=["n"], on_in_progress="wait", max_attempts=1)
    def handle(k: str, n: int) -> int:
        ran.append((k, n, current().key))
        return len(ran)

    # Given one key that is done, one in progress elsewhere, and one whose attempts are used up
    assert await handle("done", 1) == 1
    await face.claim("busy", scope="s", fingerprint={"n": 1})
    await (await face.claim("tried", scope="s")).release()
    # When each comes again, and the first with another payload, too
    assert await handle("done", 1) == 2
    assert await handle("done", 2) == 3
    assert await handle("busy", 1) == 4
    assert await handle("tried", 1) == 5
    # Then all ran, and four were counted
    assert [(k, n) for k, n, _ in ran] == [("done", 1), ("done", 1), ("done", 2), ("busy", 1), ("tried", 1)]
    assert [k for k, _, inside in ran] == [inside for _, _, inside in ran]
    assert gate.counters["once.shadowed"] == 4
    # And the records are as they would have been
    assert (await face.inspect("busy", scope="s")).state == "in_progress"
    assert (await face.inspect("done", scope="s")).state == "done"


async def test_a_checkpoint_in_shadow_of_a_duplicate_says_that_nothing_was_written(face: Any) -> None:
    said = []

    @face.once(key="{k}", shadow=True)
    def handle(k: str) -> None:
        said.append((current().checkpoint("note"), current().lease_lost))

    await handle("x")
    await handle("x")
    assert said == [(True, False), (False, True)]


# -- counters ---------------------------------------------------------------------------------------------------------


async def test_counters_tell_what_happened(face: Any, gate: Gate) -> None:
    @face.once(key="{k}")
    def handle(k: str) -> None: ...

    for k in ("a", "b", "a", "a"):
        await handle(k)
    assert gate.counters.snapshot() == {"once.started": 2, "once.completed": 2, "once.done": 2}
    assert gate.counters["never happened"] == 0


async def test_arguments_that_give_no_key_are_refused_before_anything_is_asked(wired: Any, wire: Any) -> None:
    @wired.once(key="{event[id]}")
    def handle(event: dict[str, Any]) -> None: ...

    await wired.inspect("warm")
    wire.reset()
    for event in ({}, {"id": None}, {"id": ""}, {"id": 1.5}, {"id": True}, {"id": []}):
        with pytest.raises(InvalidArgument, match=r"event\[id\]"):
            await handle(event)
    with pytest.raises(TypeError):
        await handle()
    assert wire.scripts == 0
