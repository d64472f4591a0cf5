"""Every script may be sent again, at once or late: the same answer, and no second effect."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from idemgate import Delivery, Gate, Trigger
from idemgate.core.calls import Call, stamp
from idemgate.core.codec.decoding import unpack
from idemgate.errors import UnexpectedData
from idemgate.testing import Clock
from idemgate.topics.dead_letters import DeadLetter
from idemgate.topics.deliveries import Settlement, nack_items
from idemgate.topics.merge import pack
from idemgate.topics.messages import Forward
from idemgate.topics.reshard import _close, _Entry, _list_replies, _load, _of_slot, _unload
from idemgate.topics.topic_calls import TopicCalls
from tests.scripts.states import MESSAGE

pytestmark = pytest.mark.one_in(5)

Dumps = Callable[[], dict[bytes, bytes]]


class Stage:
    """A topic in use: "flying" is in flight with "flying" behind it, "other" is in flight, "ripe" is due,
    "late" is due in an hour, "dead" is a dead letter. `run` carries a call in the flavour of the test."""

    def __init__(self, face: Any, clock: Clock) -> None:
        self.clock = clock
        self.gate: Gate = face.gate
        self.awaiting = face.awaiting
        self.topic = self.gate.topic("t", merge="append", lease="30s", backoff=0)
        self.calls: TopicCalls = self.topic.open()
        self.topic.trigger_many([("dead", 1), ("flying", 1), ("other", 1), ("other", 2)])
        dead, self.flying, self.other = self.topic.take(3)
        self.topic.bury(dead, reason="no")
        self.topic.trigger("flying", 2)
        self.topic.trigger("late", 1, delay="1h")
        self.topic.trigger("ripe", 1)
        (self.letter,) = self.topic.dead.list()

    async def run(self, call: Call[Any]) -> Any:
        # A server reads its clock anew for a copy; a test clock's time is in the arguments.
        call = Call(call.script, call.keys, (stamp(self.clock), *call.args[1:]), call.read)
        answer = await self.gate.aio.context.aio_link.run(call) if self.awaiting else self.gate.context.link.run(call)
        return facts(answer)

    def others_act(self) -> None:
        """Everybody does something to every key, so that a second effect would show."""
        topic = self.topic
        self.clock.advance("1s")
        topic.dead.redrive()
        topic.pause()
        topic.resume()
        topic.flush()
        taken = topic.take(100)
        topic.ack(taken[::2])
        topic.nack(taken[1::2], delay="10s")
        topic.ack(self.other)
        for key in ("flying", "ripe", "late", "dead", "other", "new"):
            topic.trigger(key, "by others", delay="20s")
        topic.reschedule("late", delay="40s")
        self.clock.advance("1s")


def facts(answer: Any) -> Any:
    """An answer as plain values: deliveries by what they carry."""
    if isinstance(answer, list):
        return [facts(one) for one in answer]
    if isinstance(answer, Delivery):
        return (answer.key, answer.token, answer.due_ms, answer.count, answer.payload, answer.attempt, answer.reason)
    if hasattr(answer, "settled"):
        return (answer.settled.outcomes, facts(answer.taken))
    if hasattr(answer, "deliveries"):
        return (facts(answer.deliveries), answer.lapsed)
    if hasattr(answer, "outcomes"):
        return answer.outcomes
    return answer


def _settle(verb: str) -> Callable[[Stage], Call[Any]]:
    return lambda stage: stage.calls.settle(
        0, [Settlement(verb, stage.flying, 5, "why"), Settlement(verb, stage.other, 5, "why")]
    )


def _older(letter: DeadLetter) -> bytes:
    """The same letter with a lower id, which the stage does not hold."""
    *rest, number = unpack(letter.stored, "a letter")
    return pack([*rest, number - 1])


MUTATING: dict[str, Callable[[Stage], Call[Any]]] = {
    "trigger": lambda stage: stage.calls.trigger(Trigger("new", 1)),
    "trigger, merged": lambda stage: stage.calls.trigger(Trigger("late", 2, event_id="e", version=3)),
    "trigger, replaced": lambda stage: stage.calls.trigger(Trigger("late", 2, delay=3)),
    "trigger, behind": lambda stage: stage.calls.trigger(Trigger("flying", 3)),
    "trigger_many": lambda stage: stage.calls.trigger_many([Trigger("new", n) for n in range(5)]).calls[0],
    "take": lambda stage: stage.calls.take(0, 10),
    "turn": lambda stage: stage.calls.settle_and_take(0, [Settlement("ack", stage.flying)], 10),
    "turn, nothing to take": lambda stage: stage.calls.settle_and_take(
        0, [Settlement("nack", stage.other, 5, "why")], 0
    ),
    "count_refused": lambda stage: stage.calls.count_refused("refused_payload", True),
    "ack": _settle("ack"),
    "nack": _settle("nack"),
    "bury": _settle("bury"),
    "nack, some items": lambda stage: stage.calls.settle(0, [nack_items(stage.other, [2], 5, "why")]),
    "return": _settle("return"),
    "defer": _settle("defer"),
    "forward": lambda stage: stage.calls.forward(0, Forward("list", None, 0), 10),
    "forward, a stream": lambda stage: stage.calls.forward(0, Forward("stream", None, 9), 10),
    "pause": lambda stage: stage.calls.pause().calls[0],
    "resume": lambda stage: stage.calls.resume().calls[0],
    "trigger, group": lambda stage: stage.calls.trigger(Trigger("late", 2, group="g")),
    "extend": lambda stage: stage.calls.extend(0, [stage.flying], 60_000),
    "cancel": lambda stage: stage.calls.cancel("late"),
    "cancel, in flight": lambda stage: stage.calls.cancel("flying"),
    "cancel, absent": lambda stage: stage.calls.cancel("new"),
    "bury a key": lambda stage: stage.calls.bury("late", None, "why"),
    "bury a key, behind": lambda stage: stage.calls.bury("flying", None, "why"),
    "bury a key, in flight": lambda stage: stage.calls.bury("other", None, "why"),
    "reschedule": lambda stage: stage.calls.reschedule(Trigger("late", delay=7)),
    "reschedule, in flight": lambda stage: stage.calls.reschedule(Trigger("other", delay=7)),
    "reschedule, absent": lambda stage: stage.calls.reschedule(Trigger("new", delay=7)),
    "flush": lambda stage: stage.calls.flush("late"),
    "flush, nothing": lambda stage: stage.calls.flush("new"),
    "flush all": lambda stage: stage.calls.flush_slot(0),
    "redrive": lambda stage: stage.calls.take_dead(0, "redrive", []),
    "redrive, by id": lambda stage: stage.calls.take_dead(0, "redrive", [stage.letter.id.partition("-")[2]]),
    "delete": lambda stage: stage.calls.take_dead(0, "delete", []),
    "load a letter": lambda stage: stage.calls.load_dead([(b"dead", _older(stage.letter))]).calls[0],
    "adopt a letter": lambda stage: stage.calls.adopt_letters("other", [stage.letter.stored]).calls[0],
}


@pytest.fixture
def stage(face: Any, clock: Clock) -> Stage:
    return Stage(face, clock)


@pytest.mark.parametrize("name", MUTATING)
async def test_a_call_sent_again_at_once(stage: Stage, everything: Dumps, name: str) -> None:
    call = MUTATING[name](stage)
    # Given a call that was executed, but whose answer was lost
    before = everything()
    first = await stage.run(call)
    after = everything()
    assert after != before or name == "extend"
    # When it is sent again, thrice
    answers = [await stage.run(call) for _ in range(3)]
    # Then the answers are the first one, and no byte has changed
    assert answers == [first] * 3
    assert everything() == after


# These read or renew what is theirs at the time of the copy: a former owner gets "lost", never the first reply.
_OF_THE_MOMENT = ("take", "turn", "extend")


@pytest.mark.parametrize("name", [name for name in MUTATING if name not in _OF_THE_MOMENT])
async def test_a_call_sent_again_late(stage: Stage, everything: Dumps, name: str) -> None:
    call = MUTATING[name](stage)
    first = await stage.run(call)
    # Given that everybody acted on every key meanwhile
    stage.others_act()
    before = everything()
    # When a late copy of the call arrives
    again = await stage.run(call)
    # Then it is answered as the first was, and changes nothing of what the others did
    assert again == first
    assert everything() == before


@pytest.mark.parametrize("name", [name for name in MUTATING if name not in _OF_THE_MOMENT])
async def test_a_call_sent_again_after_the_clock_stepped_back(stage: Stage, everything: Dumps, name: str) -> None:
    # Given a call that was executed as a half minute began
    stage.clock.set((stage.clock.now().timestamp() // 30 + 1) * 30)
    call = MUTATING[name](stage)
    first = await stage.run(call)
    # When the clock steps back by a second, into the half minute before, and another request is answered there
    stage.clock.set(stage.clock.now().timestamp() - 1)
    stage.topic.trigger("another", 1)
    before = everything()
    # Then a copy of the call is answered as the first was, and changes nothing
    assert await stage.run(call) == first
    assert everything() == before


@pytest.mark.parametrize("hours", [1, 24])
async def test_an_event_is_recognized_after_the_clock_jumped_back(stage: Stage, everything: Dumps, hours: int) -> None:
    # Given a trigger with an event id
    call = stage.calls.trigger(Trigger("late", 2, event_id="e"))
    await stage.run(call)
    # When the clock jumps back by hours, and a copy of the trigger arrives
    stage.clock.set(stage.clock.now().timestamp() - hours * 3600)
    receipt = await stage.run(call)
    # Then the copy is a duplicate, and the message holds the trigger once
    assert receipt.status == "duplicate"
    assert stage.topic.peek("late").pending.count == 2


async def test_a_late_copy_of_a_take_brings_only_what_is_still_its_own(
    stage: Stage, clock: Clock, everything: Dumps
) -> None:
    # Given a take of two, one of which was settled, while another became due
    stage.topic.trigger("second", 1)
    call = stage.calls.take(0, 10)
    taken = await stage.run(call)
    assert [one[0] for one in taken[0]] == ["ripe", "second"]
    stage.topic.ack(stage.gate.context.link.run(call).deliveries[0])
    stage.topic.trigger("third", 1)
    before = everything()
    # When the take is sent again, it has no second effect, and returns no delivery of another worker
    again = await stage.run(call)
    assert again == (taken[0][1:], 0)
    # And when the rest has lapsed and was taken over, a copy brings nothing
    clock.advance("29s")
    stage.topic.extend([stage.flying, stage.other], "1h")
    assert everything() != before
    clock.advance("1s")
    assert {one.key for one in stage.topic.take(100)} == {"second", "third"}
    before = everything()
    assert await stage.run(call) == ([], 0)
    assert everything() == before


async def test_a_late_copy_of_a_turn_takes_nothing_that_it_did_not_take(
    stage: Stage, clock: Clock, everything: Dumps
) -> None:
    # Given a turn that ended one delivery, one "lost", and took the next two
    stage.topic.trigger("second", 1)
    stranger = Delivery("t", 0, b"other", 7, 1, stage.other._message)
    call = stage.calls.settle_and_take(0, [Settlement("ack", stage.other), Settlement("nack", stranger, 5)], 2)
    outcomes, (taken, lapsed) = await stage.run(call)
    assert (outcomes, [one[0] for one in taken], lapsed) == (["ok", "lost"], ["ripe", "second"], 0)
    # And one of them ended, and another message is due
    stage.topic.ack(stage.gate.context.link.run(call).taken.deliveries[0])
    stage.topic.trigger("third", 1)
    before = everything()
    # When a copy comes, then it gets the same outcomes, and what is still its own
    assert await stage.run(call) == (["ok", "lost"], (taken[1:], 0))
    assert everything() == before
    # And where it had taken nothing, a copy takes nothing either
    stage.topic.pause()
    again = stage.calls.settle_and_take(0, [Settlement("nack", stage.flying, 5)], 2)
    first = await stage.run(again)
    assert first == (["ok"], ([], 0))
    stage.topic.resume()
    before = everything()
    assert await stage.run(again) == first
    assert everything() == before


@pytest.mark.damages("undecodable")
async def test_what_is_wrong_with_the_next_message_does_not_keep_a_delivery_from_ending(
    stage: Stage, raw: Any, everything: Dumps
) -> None:
    # Given a pending message of another program
    pending = stage.calls.keys(0)[1]
    raw.hset(pending, "ripe", b"no message")
    # When a turn ends a delivery, and would take that next
    outcomes, taken = await stage.run(stage.calls.settle_and_take(0, [Settlement("ack", stage.other)], 2))
    # Then it has ended, and the next take says what is wrong
    assert (outcomes, taken) == (["ok"], ([], 0))
    with pytest.raises(UnexpectedData, match="ripe") as caught:
        await stage.run(stage.calls.take(0, 2))
    assert caught.value.redis_key == pending.decode()


@pytest.mark.damages("undecodable")
@pytest.mark.parametrize("verb", ["take", "settle", "turn"])
async def test_a_remembered_reply_that_is_none_of_ours_is_named(
    stage: Stage, raw: Any, everything: Dumps, verb: str
) -> None:
    # Given a call whose reply is remembered, and is not as it was written
    ends = [Settlement("ack", stage.other)]
    call = {
        "take": stage.calls.take(0, 1),
        "settle": stage.calls.settle(0, ends),
        "turn": stage.calls.settle_and_take(0, ends, 0),
    }
    await stage.run(call[verb])
    (replies,) = [key for key in stage.calls.keys(0) if b":replies" in key and raw.exists(key)]
    raw.hset(replies, mapping={name: b"spoilt" for name in raw.hkeys(replies) if name})
    before = everything()
    # When a copy of it comes, then its error names the damaged key, and it has no effect
    with pytest.raises(UnexpectedData, match="a corrupt reply") as caught:
        await stage.run(call[verb])
    assert caught.value.redis_key == replies.decode()
    assert everything() == before


async def test_replies_are_shown_with_the_requests_they_were_given_to(stage: Stage, clock: Clock) -> None:
    # Given replies of this half minute and of the one before
    ends = [Settlement("ack", stage.other)]
    clock.set(clock.now().timestamp() // 30 * 30)
    calls = [stage.calls.settle(0, ends), stage.calls.cancel("ripe")]
    for call in calls:
        clock.advance("30s")
        await stage.run(call)
    # Then of each log all of them are shown, and nothing else
    shown = [await stage.run(_list_replies(stage.calls, 0, log, b"0")) for log in (0, 1)]
    names = [entry.name for _, entries in shown for entry in entries]
    assert {bytes(call.args[1])[2:16] for call in calls} <= {*names}
    assert all(len(name) == 14 for name in names)
    # And of what is older, nothing
    clock.advance("90s")
    assert [await stage.run(_list_replies(stage.calls, 0, log, b"0")) for log in (0, 1)] == [(b"0", []), (b"0", [])]


@pytest.mark.damages("undecodable")
@pytest.mark.parametrize("part", ["next", "inflight"])
async def test_what_is_stored_of_a_key_is_read_before_it_is_changed(
    stage: Stage, raw: Any, everything: Dumps, part: str
) -> None:
    # Given a key of which what is pending, or in flight, is not as it was written
    (key,) = [key for key in stage.calls.keys(0) if key.endswith(f":{part}".encode())]
    raw.hset(key, "flying", b"spoilt")
    before = everything()
    calls = stage.calls
    for call in (
        calls.cancel("flying"),
        calls.reschedule(Trigger("flying", delay=1)),
        calls.flush("flying"),
        *([calls.flush_slot(0)] if part == "next" else []),
        calls.settle(0, [Settlement("ack", stage.flying)]),
        calls.settle(0, [Settlement("nack", stage.flying, 5)]),
        calls.settle_and_take(0, [Settlement("nack", stage.flying, 5)], 2),
        *([calls.extend(0, [stage.flying])] if part == "inflight" else []),
    ):
        # Then whatever would change it says so, and changes nothing
        with pytest.raises(UnexpectedData, match="flying") as caught:
            await stage.run(call)
        assert caught.value.redis_key == key.decode()
        assert everything() == before


async def test_a_late_copy_of_a_close_does_not_close_what_was_opened_again(stage: Stage, everything: Dumps) -> None:
    # Given a slot that a change has closed, and opened again
    close = _close(stage.calls, 0, b"change")
    await stage.run(close)
    await stage.run(_of_slot(stage.calls, "reopen", 0, (b"change",), lambda _: None))
    before = everything()
    # When a copy of the first comes, then the slot stays open
    await stage.run(close)
    assert everything() == before
    assert stage.topic.trigger("new").status == "scheduled"


@pytest.mark.damages("undecodable", "closed")
@pytest.mark.parametrize("part", ["messages", "next", "inflight"])
async def test_what_comes_from_another_slot_must_not_meet_what_is_none_of_ours(
    stage: Stage, raw: Any, everything: Dumps, part: str
) -> None:
    # Given a slot that takes another one in, and holds of a key what is not as it was written
    (key,) = [key for key in stage.calls.keys(0) if key.endswith(f":{part}".encode())]
    await stage.run(_close(stage.calls, 0, b"change"))
    raw.hset(key, "flying", b"spoilt")
    before = everything()
    # When a message of that key comes
    arrives = _Entry(b"p", b"flying", b"1700000000000", MESSAGE, b"", b"")
    with pytest.raises(UnexpectedData, match="flying") as caught:
        await stage.run(_load(stage.calls, 0, b"change", 1, 1, [arrives]))
    # Then the key that is to blame is named, and nothing was written
    assert caught.value.redis_key == key.decode()
    assert everything() == before


@pytest.mark.damages("undecodable", "closed")
@pytest.mark.parametrize("part", ["messages", "next", "inflight", "dead:data"])
@pytest.mark.parametrize("spoilt", [b"spoilt", b"\x92\xa6buried\xa1x"])
async def test_what_is_none_of_ours_goes_to_no_other_slot(stage: Stage, raw: Any, part: str, spoilt: bytes) -> None:
    # Given a slot that is closed, in which what is stored of a key is not as it was written
    (key,) = [key for key in stage.calls.keys(0) if key.endswith(f":{part}".encode())]
    await stage.run(_close(stage.calls, 0, b"change"))
    name = raw.hkeys(key)[0]
    raw.hset(key, name, spoilt)
    # When all of it is to be shown to another slot, batch by batch, then the key that is to blame is named instead
    with pytest.raises(UnexpectedData, match=re.escape(name.decode())) as caught:
        for batch in range(4):
            await stage.run(_unload(stage.calls, 0, b"change", batch))
    assert caught.value.redis_key == key.decode()
    assert raw.hget(key, name) == spoilt


async def test_a_copy_of_a_take_still_says_what_lapsed(stage: Stage, clock: Clock, everything: Dumps) -> None:
    clock.advance("30s")
    # Given a take that put back two lapsed ones and brought one of the three that were due
    call = stage.calls.take(0, 1)
    first = await stage.run(call)
    assert (len(first[0]), first[1]) == (1, 2)
    before = everything()
    # When its answer was lost, the copy says the same
    assert await stage.run(call) == first
    assert everything() == before


async def test_a_late_copy_of_a_heartbeat_does_not_revive(stage: Stage, clock: Clock, everything: Dumps) -> None:
    call = stage.calls.extend(0, [stage.flying])
    assert await stage.run(call) == ["ok"]
    # Given that another owner took the key over
    clock.advance("30s")
    assert "flying" in {one.key for one in stage.topic.take(100)}
    before = everything()
    # Then a late heartbeat of the former owner gets "lost"
    assert await stage.run(call) == ["lost"]
    assert everything() == before


@pytest.mark.parametrize("wait", ["29s", "30s"])
async def test_answers_are_remembered_for_half_a_minute(stage: Stage, clock: Clock, wait: str) -> None:
    # Given a trigger at the end of the time for which its answer is written down
    clock.set((clock.now().timestamp() // 30 + 1) * 30 - 0.001)
    call = stage.calls.trigger(Trigger("new", 1))
    first = await stage.run(call)
    # When its copy comes half a minute later, it is still known
    clock.advance(wait)
    assert await stage.run(call) == first
    assert stage.topic.peek("new").pending.count == 1


async def test_answers_are_forgotten_after_a_minute(stage: Stage, clock: Clock, raw: Any, namespace: str) -> None:
    # Given many requests over a long time
    for n in range(200):
        stage.topic.trigger(f"k{n % 3}", n)
        clock.advance("7s")
    # Then only those of the last minute are kept, and their keys end by themselves
    for part in ("replies0", "replies1"):
        key = f"ig2:{{{namespace}:topic:t:0/1}}:{part}"
        assert raw.hlen(key) <= 6
        assert 0 < raw.pttl(key) <= 120_000


async def test_opening_again_changes_nothing(
    face: Any, url: str, namespace: str, clock: Clock, everything: Dumps
) -> None:
    face.gate.topic("t", window="60s").open()
    before = everything()
    with Gate(url, namespace=namespace, clock=clock) as again:
        again.topic("t", window="60s").open()
        again.topic("t").open()
    assert everything() == before
