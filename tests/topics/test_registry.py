"""Which topics there are, as the store alone tells; and how one is deleted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import msgpack
import pytest

from idemgate import Gate, InvalidArgument, Trigger
from idemgate.core.calls import run_plan
from idemgate.errors import DecodeError, TopicInUse, UnexpectedData
from idemgate.testing import Clock
from idemgate.topics.definition import TopicDefinition
from idemgate.topics.registry import find_entry
from idemgate.topics.reshard import _begin, _purge, plan_delete, plan_reshard
from idemgate.types import DeletedTopic
from tests.conftest import Awaited, Face

pytestmark = pytest.mark.one_in(3)

Dumps = Callable[[], dict[bytes, bytes]]


@pytest.fixture
async def other(gate: Gate, url: str, clock: Clock) -> AsyncIterator[Gate]:
    """Another program on the same store."""
    made = Gate(url, namespace=gate.namespace, clock=clock, timeout="120s")
    yield made
    await made.aio.close()
    made.close()


@pytest.fixture
def looking(face: Face, other: Gate) -> Any:
    """A program that knows nothing of the topics, through the same face."""
    return other.aio if face.awaiting else Awaited(other)


async def test_a_store_tells_its_topics(face: Face, looking: Any, clock: Clock, at: Any, everything: Dumps) -> None:
    # Given two topics, one with something in it
    assert await looking.stored_topics() == []
    renders = face.topic("renders", window="60s", merge="append", slots=4, rate="10/s")
    await renders.trigger_many([(f"k{i}", i) for i in range(10)])
    clock.advance("60s")
    await renders.bury((await renders.take(3))[0])
    await face.topic("mail").trigger("k", at=at(500))
    await face.topic("mail").pause()
    before = everything()
    # Then another program reads what they are and how much is where
    mail, found = await looking.stored_topics()
    assert (found.name, found.slots, found.policy.window, found.changing_to) == ("renders", 4, 60_000, None)
    assert found.policy.pack_stored() == renders.policy.pack_stored()
    assert found.stats == await renders.stats()
    assert (found.stats.ready, found.stats.in_flight, found.stats.dead, found.stats["accepted"]) == (7, 2, 1, 10)
    assert (mail.name, mail.slots, mail.stats.scheduled, mail.stats.next_due, bool(mail.stats.paused)) == (
        "mail", 1, 1, at(500), True,
    )  # fmt: skip
    # And wrote nothing
    assert everything() == before


@pytest.mark.damages("wrong-type")
@pytest.mark.damages("wrong-type")
async def test_a_registry_that_is_none_is_said(looking: Any, gate: Gate, raw: Any) -> None:
    raw.set(f"ig2:{{{gate.namespace}:topics}}", "text")
    with pytest.raises(UnexpectedData, match="holds a string, expected a hash"):
        await looking.stored_topics()


NOTED = {
    "sizes that are no numbers": ("t was", "2 many"),
    "a size that is far too long": ("t was", "9" * 5000),
    "a size above all": ("t was", "2 16385"),
    "a change that is none": ("t to", "many n"),
    "a change to more than there can be": ("t to", "99999999999 n"),
    "a policy of no number of slots": ("t", msgpack.packb({"slots": "many"})),
    "a policy of three slots": ("t", msgpack.packb({"slots": 3})),
}


@pytest.mark.damages("undecodable", "wrong-slot", "unregistered")
@pytest.mark.parametrize("field", NOTED)
async def test_an_entry_that_is_none_of_ours_is_said(
    face: Face, looking: Any, raw: Any, everything: Dumps, field: str
) -> None:
    # Given a topic whose entry in the registry is damaged
    topic = face.topic("t", slots=2)
    await topic.trigger("k", 1)
    raw.hset(f"ig2:{{{face.gate.namespace}:topics}}", *NOTED[field])
    before = everything()
    # When anybody goes by it, then it is an error that says so, and nothing is written
    for ask in (looking.stored_topics, lambda: topic.reshard(4), topic.delete, lambda: topic.delete(discard=True)):
        with pytest.raises((UnexpectedData, DecodeError), match=r"of topic '?t\b"):
            await ask()
    assert everything() == before


async def test_as_many_slots_as_there_can_be_are_told(face: Face, looking: Any, raw: Any) -> None:
    await face.topic("t").trigger("k")
    registry = f"ig2:{{{face.gate.namespace}:topics}}"
    raw.hset(registry, mapping={"t was": "1 16384", "t to": "16384 n"})
    (found,) = await looking.stored_topics()
    assert found.changing_to == 16384
    raw.hdel(registry, "t was", "t to")


@pytest.mark.damages("undecodable")
async def test_a_counter_that_is_no_number_is_said(face: Face, looking: Any, raw: Any) -> None:
    topic = face.topic("t")
    await topic.trigger("k", 1)
    raw.hset(f"ig2:{{{face.gate.namespace}:topic:t:0/1}}:meta", "accepted", "many")
    for ask in (topic.stats, looking.stored_topics):
        with pytest.raises(DecodeError, match=r"expected counters: .*many"):
            await ask()


async def test_an_emptied_topic_is_forgotten(face: Face, looking: Any, clock: Clock, everything: Dumps) -> None:
    # Given a topic whose slots were changed, and which is empty again
    topic = face.topic("t", window="60s", slots=2)
    await topic.trigger_many([Trigger(f"k{i}", event_id=f"e{i}") for i in range(20)])
    await topic.reshard(4)
    clock.advance("60s")
    await topic.ack(await topic.take(100))
    # When it is forgotten
    gone = await topic.delete()
    # Then it is gone, except for keys that expire
    assert (gone.known, gone.pending, gone.in_flight, gone.dead) == (True, 0, 0, 0)
    assert await looking.stored_topics() == []
    assert all(0 < topic.definition.context.link.command("PTTL", key) <= 86_400_000 for key in everything())
    assert {key.partition(b"}:")[2] for key in everything()} == {b"meta", b"replies0", b"replies1"} - {b"replies1"}
    # And to forget it once more is nothing
    assert await topic.delete() == DeletedTopic(False, 0, 0, 0)


@pytest.mark.parametrize("held", ["pending", "in_flight", "dead"])
async def test_one_that_holds_something_is_kept(face: Face, clock: Clock, held: str, everything: Dumps) -> None:
    # Given a topic that holds something, of any kind
    topic = face.topic("t", slots=2, merge="append")
    await topic.trigger_many([(f"k{i}", i) for i in range(6)])
    if held != "pending":
        taken = await topic.take(100)
        await (topic.bury(taken) if held == "dead" else topic.extend(taken))
    before = everything()
    # Then it is not forgotten, nothing is written, and it goes on as before
    with pytest.raises(TopicInUse, match=r"topic 't': it holds .*\b6 .*discard=True"):
        await topic.delete()
    assert everything() == before
    assert (await topic.trigger("k0", 1)).accepted
    # Unless that is said; then what was discarded is counted
    gone = await topic.delete(discard=True)
    assert getattr(gone, held) == 6
    assert sum((gone.pending, gone.in_flight, gone.dead)) == (6 if held == "pending" else 7)


async def test_a_gate_forgets_a_topic_that_it_deleted_unless_a_worker_needs_it(face: Face, gate: Gate) -> None:
    # Given a topic of this process only, and one with a handler
    topic, handled = face.topic("t"), face.topic("handled")
    gate.topic("handled").handler(print)
    for one in (topic, handled):
        await one.trigger("k", 1)
        # When they are deleted
        await one.delete(discard=True)
    # Then the gate knows only the one that a worker serves
    assert [*gate.topics] == ["handled"]
    # And what still refers to the other uses it as before
    assert (await topic.trigger("k", 1)).accepted
    assert (await face.topic("t", window="1s").delete(discard=True)).pending == 1


async def test_what_comes_while_it_is_being_forgotten_is_kept(face: Face, gate: Gate) -> None:
    # Given a topic that is found to be empty
    topic = face.topic("t", slots=2)
    await topic.ack(await topic.take(10))
    plan = plan_delete(await gate.topic("t").aio.open(), _entry(gate, "t"), False)
    looked = gate.context.link.run_all(next(plan))
    # When a message comes before it is closed
    await topic.trigger("k", 1)
    # Then the topic is not forgotten, and goes on
    with pytest.raises(TopicInUse, match="it holds 1 pending"):
        run_plan(_resumed(plan, looked), gate.context.link.run_all)
    assert (await topic.trigger("k", 2)).status == "merged"
    assert [(one.name, one.changing_to) for one in gate.stored_topics()] == [("t", None)]


@pytest.mark.parametrize(
    ("begun", "said"),
    [
        (0, "it is being deleted; let that end first: idemgate topic delete t"),
        (4, "it is being resharded to 4 slots; let that end first: idemgate topic reshard t 4"),
    ],
)
async def test_a_change_that_was_begun_ends_before_another(face: Face, gate: Gate, begun: int, said: str) -> None:
    # Given a topic whose change was cut off as soon as it was begun
    topic = face.topic("t", slots=2)
    await topic.trigger("k", 1)
    calls = gate.topic("t").open()
    assert gate.context.link.run(_begin(calls, begun)).word == "changing"
    # Then no other one begins, and it is said which is to end
    with pytest.raises(TopicInUse) as told:
        await topic.reshard(8)
    assert str(told.value) == f"topic 't': {said}"
    if begun:
        with pytest.raises(TopicInUse) as told:
            await topic.delete(discard=True)
        assert str(told.value) == f"topic 't': {said}"
        assert (await topic.reshard(begun)).after == begun
    # And the one that was begun goes on
    assert await topic.delete(discard=True) == DeletedTopic(True, 1, 0, 0)


def test_what_was_made_only_just_now_is_forgotten_and_what_never_was_has_no_slots(gate: Gate) -> None:
    # Given a topic that another process made after the registry was asked for it
    made = gate.topic("t").open()
    assert run_plan(plan_delete(made, None, True), gate.context.link.run_all) == DeletedTopic(True, 0, 0, 0)
    # And one that nobody made
    never = gate.topic("u").definition.build_calls()
    with pytest.raises(InvalidArgument, match="no such topic in the store"):
        run_plan(plan_reshard(never, 4, lambda _: None), gate.context.link.run_all)


def test_who_comes_late_to_a_slot_that_is_open_again_discards_nothing(gate: Gate) -> None:
    topic = gate.topic("t")
    topic.trigger("k", 1)
    assert gate.context.link.run(_purge(topic.open(), 0, b"a change that has ended", really=True)) == (0, 0, 0)
    assert topic.stats().pending == 1


@pytest.mark.damages("wrong-type")
async def test_one_whose_slots_hold_what_is_not_ours_is_left_alone(face: Face, raw: Any, everything: Dumps) -> None:
    # Given a topic of which one slot holds something foreign
    topic = face.topic("t", slots=2)
    await topic.trigger_many([(f"k{i}", i) for i in range(6)])
    key = f"ig2:{{{face.gate.namespace}:topic:t:1/2}}:dedup"
    raw.delete(key)
    raw.rpush(key, "foreign")
    before = everything()
    # When it is to be forgotten, then nothing is written
    for discard in (False, True):
        with pytest.raises(UnexpectedData, match="holds a list"):
            await topic.delete(discard=discard)
    assert everything() == before


def _resumed(plan: Any, answers: Any) -> Any:
    """The rest of a plan that was stopped before it was sent these answers."""
    batch = plan.send(answers)
    while True:
        batch = plan.send((yield batch))


def _entry(gate: Gate, name: str) -> Any:
    return gate.context.link.run(find_entry(gate.namespace, gate.context.clock, name))


async def test_who_still_uses_it_makes_it_anew(face: Face, other: Gate, url: str, clock: Clock) -> None:
    # Given a program that opened a topic, with a delivery, before it was forgotten
    stale = other.topic("t", window="60s", slots=4)
    used = stale.aio if face.awaiting else Awaited(stale)
    await used.trigger("k", 1)
    clock.advance("60s")
    (taken,) = await used.take(1)
    await face.topic("t", window="60s", slots=4).delete(discard=True)
    # When it goes on
    assert (await used.trigger("k", 2)).status == "scheduled"
    assert await used.ack(taken) == "lost"
    # Then the topic is there again, as that program says it is
    (found,) = await face.stored_topics()
    assert (found.name, found.slots, found.stats.scheduled) == ("t", 4, 1)
    # And where it is forgotten again, and another process makes it with other slots, that program uses these
    await face.topic("t", window="60s", slots=4).delete(discard=True)
    with Gate(url, namespace=other.namespace, clock=clock) as third:
        third.topic("t", window="60s", slots=2).trigger("k")
        assert (await used.trigger("k")).status == "merged"
        assert stale.policy.slots == 2


async def test_killed_anywhere_it_goes_on(gate: Gate, clock: Clock) -> None:
    # Given how many steps it takes
    steps = 1
    for killed in range(1, 20):
        topic = gate.topic(f"t{killed}", slots=2).aio
        await topic.trigger_many([(f"k{i}", i) for i in range(6)])
        plan = plan_delete(await topic.open(), _entry(gate, topic.name), True)
        batch = plan.send(gate.context.link.run_all(next(plan)))  # it has looked, which changes nothing
        try:
            for _ in range(killed):
                batch = plan.send(gate.context.link.run_all(batch))
        except StopIteration:
            break
        steps += 1
        # When it is killed after any of them, that can be seen
        assert [one.changing_to for one in gate.stored_topics() if one.name == topic.name] == [0]
        # Then it is gone when it is said again
        with pytest.raises(TopicInUse, match=r"being deleted; .*: idemgate topic delete t\d+$"):
            await topic.reshard(4)
        await topic.delete(discard=True)
        assert topic.name not in [one.name for one in gate.stored_topics()]
        assert (await topic.trigger("k")).status == "scheduled"
    assert steps > 3


async def test_only_active_topics_are_listed_on_request(face: Face) -> None:
    empty, pending, dead, paused = [face.topic(name) for name in ("empty", "pending", "dead", "paused")]
    for topic in (empty, pending, dead):
        await topic.trigger("k")
    for topic, end in ((empty, empty.ack), (dead, dead.bury)):
        await end(await topic.take(1))
    await paused.pause()
    assert [one.name for one in await face.stored_topics()] == ["dead", "empty", "paused", "pending"]
    assert [one.name for one in await face.stored_topics(active=True)] == ["dead", "paused", "pending"]


# -- a topic without options ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["trigger", "trigger_many", "inside a guarded run"])
async def test_a_topic_without_options_checks_its_first_trigger_by_the_stored_policy(
    face: Face, other: Gate, how: str
) -> None:
    # Given a topic with priorities that merges numbers
    await face.topic("t", priority=True, merge="sum", slots=4).open()
    # When another program that declares no options triggers it
    theirs = Face(other, face.awaiting)
    topic = theirs.topic("t")

    async def send(payload: object) -> None:
        if how == "trigger":
            await topic.trigger("k", payload, priority=5)
        elif how == "trigger_many":
            await topic.trigger_many([Trigger("k", payload, priority=5)])
        elif face.awaiting:
            async with other.aio.claim("run", scope="s"):
                await topic.trigger("k", payload, priority=5)
        else:
            with other.claim("run", scope="s"):
                other.topic("t").trigger("k", payload, priority=5)

    # Then a payload that the stored policy cannot merge is refused, and one that it merges is accepted
    with pytest.raises(InvalidArgument, match="payload"):
        await send("text")
    await send(2)
    pending = (await topic.peek("k")).pending
    assert (pending.payload, pending.priority) == (2, 5)


async def test_invalid_input_for_a_topic_that_does_not_exist_creates_nothing(face: Face, other: Gate) -> None:
    # Given a topic without options that is not stored
    topic = face.topic("t")
    for invalid in ({"priority": 5}, {"delay": "soon"}, {"version": "1"}):
        with pytest.raises(InvalidArgument, match=next(iter(invalid))):
            await topic.trigger("k", **invalid)
    assert await face.stored_topics() == []
    # When another program creates it with a policy
    await Face(other, face.awaiting).topic("t", priority=True).open()
    # Then the first trigger that is accepted there uses that policy
    assert (await topic.trigger("k", priority=5)).status == "scheduled"


async def test_a_topic_with_options_is_opened_in_one_round_trip(face: Face, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    original = TopicDefinition.open_call

    def open_call(self: TopicDefinition, *check: Any) -> Any:
        made = original(self, *check)
        opened.append(made.script.name)
        return made

    monkeypatch.setattr(TopicDefinition, "open_call", open_call)
    await face.topic("said", window="1s").trigger("k")
    await face.topic("stored", slots=2).open()
    assert opened == ["topics/open", "topics/open"]


def test_a_packed_trigger_of_a_topic_without_options_may_have_a_priority(gate: Gate) -> None:
    # Given a topic without options whose stored policy this program has not read
    topic = gate.topic("t")
    packed = topic.pack_trigger(Trigger("k", 1, priority=5))
    assert topic.unpack_trigger(packed).priority == 5
    # But what no policy accepts is refused
    with pytest.raises(InvalidArgument, match="priority"):
        topic.pack_trigger(Trigger("k", 1, priority=cast(Any, "high")))
    assert gate.stored_topics() == []
