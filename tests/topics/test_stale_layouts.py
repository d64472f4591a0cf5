"""Every method of a topic, in a process that knows another number of slots than the server stores."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import pytest

from idemgate import Gate, Trigger
from idemgate.core.calls import Batch, Call
from idemgate.errors import InvalidArgument, TopicInUse
from idemgate.store import retry
from idemgate.testing import Clock
from idemgate.topics.dead_letters import AioDeadLetters, DeadLetters
from idemgate.topics.messages import Peek
from idemgate.topics.reshard import plan_reshard
from idemgate.topics.topic import AioTopic, Topic
from tests.conftest import Awaited, Face

pytestmark = pytest.mark.one_in(5)

KEYS = [f"k{i}" for i in range(24)]


def _layouts(few: int, many: int) -> pytest.MarkDecorator:
    """Parametrize a test with a flavour and two slot counts. The usual tests take each value once."""
    return pytest.mark.parametrize(
        ("face", "before", "after"),
        [
            pytest.param("blocking", few, many, id="more slots, blocking"),
            pytest.param("awaiting", many, few, id="fewer slots, awaiting"),
            pytest.param("awaiting", few, many, id="more slots, awaiting", marks=pytest.mark.slow),
            pytest.param("blocking", many, few, id="fewer slots, blocking", marks=pytest.mark.slow),
        ],
        indirect=["face"],
    )


LAYOUTS = _layouts(2, 8)
Method = Callable[[Any, dict[str, Any]], Awaitable[Any]]


@pytest.fixture
async def other(gate: Gate, url: str, clock: Clock) -> AsyncIterator[Gate]:
    """Another process on the same store."""
    made = Gate(url, namespace=gate.namespace, clock=clock, timeout="5s")
    yield made
    await made.aio.close()
    made.close()


@pytest.fixture(autouse=True)
def redirects_without_delay() -> Iterator[None]:
    """The change takes a step after each reply, so a redirected call need not wait for it."""
    with pytest.MonkeyPatch.context() as patch:  # not the fixture: a test undoes that one
        patch.setattr(retry, "retry_pause", lambda tried: 0.0)
        yield


def _policy(slots: int) -> dict[str, Any]:
    return {
        "window": "60s", "merge": "append", "slots": slots, "max_attempts": 2, "backoff": "10s", "lease": "30s",
        "result_retention": "10m",
    }  # fmt: skip


async def _fill(topic: Any, clock: Clock) -> dict[str, Any]:
    """Fill a topic with dead letters, deliveries in flight and pending messages. Returns what a caller holds."""
    await topic.trigger_many([(f"dead{i}", i) for i in range(24)])
    clock.advance("60s")
    due = await topic.take(100)
    for at in range(0, 24, 8):
        await topic.bury(due[at : at + 8], reason="no")
        clock.advance("1ms")
    await topic.trigger_many([(f"fly{i}", i) for i in range(8)])
    clock.advance("60s")
    flying = sorted(await topic.take(100), key=lambda one: one.key)
    receipts = [await topic.trigger(key, 0) for key in KEYS]
    return {"flying": flying, "receipts": receipts}


# -- every method -----------------------------------------------------------------------------------------------------


async def _result(topic: Any, held: dict[str, Any]) -> Any:
    await topic.flush(KEYS[0])
    await topic.ack(await topic.take(100), result={"n": 1})
    return await topic.result(held["receipts"][0], timeout="0s")


async def _take(topic: Any, _: dict[str, Any]) -> Any:
    await topic.flush()
    return sorted(one.key for one in await topic.take(100))


async def _take_few(topic: Any, _: dict[str, Any]) -> Any:
    await topic.flush()
    return [len(await topic.take(5)) for _ in range(7)]


async def _ids(topic: Any) -> list[str]:
    return [letter.id for letter in await topic.dead.list(100)]


SCENES: dict[str, Method] = {
    "open": lambda topic, _: _as_none(topic.open()),
    "run": lambda topic, _: topic.run(lambda calls: calls.time()),
    "trigger": lambda topic, _: topic.trigger(KEYS[0], 2),
    "trigger_many": lambda topic, _: topic.trigger_many([Trigger(key, 2) for key in KEYS]),
    "result": _result,
    "take": _take,
    "take few": _take_few,
    "forward_once": lambda topic, _: topic.forward_once(),
    "ack": lambda topic, held: topic.ack(held["flying"], result=1),
    "nack": lambda topic, held: topic.nack(held["flying"], delay="5s", reason="later"),
    "nack items": lambda topic, held: topic.nack(held["flying"][0], items=held["flying"][0].payload),
    "bury": lambda topic, held: topic.bury(held["flying"], reason="no"),
    "release": lambda topic, held: topic.release(held["flying"]),
    "extend": lambda topic, held: topic.extend(held["flying"], "60s"),
    "cancel": lambda topic, _: topic.cancel(KEYS[0]),
    "bury a key": lambda topic, _: topic.bury(KEYS[0]),
    "reschedule": lambda topic, _: topic.reschedule(KEYS[0], delay="500s"),
    "flush": lambda topic, _: topic.flush(),
    "flush one": lambda topic, _: topic.flush(KEYS[0]),
    "pause": lambda topic, _: topic.pause(),
    "resume": lambda topic, _: _both(topic.pause(), topic.resume),
    "peek": lambda topic, _: topic.peek(KEYS[0]),
    "versions": lambda topic, _: topic.versions(KEYS[0]),
    "reset_version": lambda topic, _: topic.reset_version(KEYS[0]),
    "stats": lambda topic, _: topic.stats(),
    "next_due": lambda topic, _: topic.next_due(),
    "reshard": lambda topic, _: _after(topic.reshard(4)),
    "delete": lambda topic, _: topic.delete(discard=True),
    "dead.list": lambda topic, _: _letters(topic.dead.list(100)),
    "dead.list pages": lambda topic, _: _letters(topic.dead.list(9, skip=3), len),
    "dead.list matching": lambda topic, _: _letters(topic.dead.list(100, key="dead1*", reason="no")),
    "dead.redrive": lambda topic, _: topic.dead.redrive(),
    "dead.redrive matching": lambda topic, _: topic.dead.redrive(key="dead1*"),
    "dead.redrive limit": lambda topic, _: topic.dead.redrive(limit=16),
    "dead.delete": lambda topic, _: topic.dead.delete(),
    "dead.delete matching": lambda topic, _: topic.dead.delete(key="dead1*"),
    "dead.load": lambda topic, _: _reloaded(topic),
    "dead.delete limit": lambda topic, _: topic.dead.delete(limit=16),
}
LOCAL = {
    "aio", "dead", "decode_forwarded", "every", "forward", "forward_targets", "handler", "name", "namespace",
    "pack_trigger", "policy", "unpack_trigger",
}  # fmt: skip
"""They do not ask the server."""
APART = {"trim_forwarded"}
"""They have a test of their own below."""


async def _as_none(opened: Awaitable[Any]) -> None:
    await opened


async def _both(first: Awaitable[Any], second: Callable[[], Awaitable[Any]]) -> Any:
    return await first, await second()


async def _after(resharding: Awaitable[Any]) -> int:
    return int((await resharding).after)


async def _reloaded(topic: Any) -> Any:
    """Delete the letters that this layout has, and load them."""
    stored = [letter.stored for letter in await topic.dead.list(100)]
    await topic.dead.delete(limit=5)
    return await topic.dead.load(stored)


async def _letters(listing: Awaitable[Any], shown: Callable[[Any], Any] = sorted) -> Any:
    return shown([letter.key for letter in await listing])


def _methods(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_every_public_method_has_a_scene() -> None:
    # Given the public methods of a topic and of its dead letters
    topics, letters = _methods(Topic) - LOCAL - APART, _methods(DeadLetters)
    assert (_methods(AioTopic) - LOCAL - APART, _methods(AioDeadLetters)) == (topics, letters)
    # Then each has a scene below
    assert {name.split()[0] for name in SCENES} == topics | {f"dead.{name}" for name in letters}
    assert len(topics | letters) > 20


@pytest.mark.parametrize("scene", SCENES)
@LAYOUTS
async def test_a_process_with_a_stale_layout_gets_the_same_answer(
    face: Face, other: Gate, clock: Clock, scene: str, before: int, after: int
) -> None:
    # Given two equal topics, that a process has opened
    topics, held = [], []
    for name in ("t", "u"):
        made = other.topic(name, **_policy(before) | ({} if scene != "forward_once" else {"result_retention": None}))
        if scene == "forward_once":
            made.forward("list")
        topics.append(made.aio if face.awaiting else Awaited(made))
        began = clock.microseconds() / 1_000_000
        held.append(await _fill(topics[-1], clock))
        clock.set(began)
    clock.advance("125s")
    # When another process gives one of them another number of slots
    options = {} if scene != "forward_once" else {"result_retention": None}
    await face.topic("t", **_policy(before) | options).reshard(after)
    # Then each method answers and does the same as without it
    answers = [await SCENES[scene](topic, facts) for topic, facts in zip(topics, held, strict=True)]
    assert _shown(answers[0]) == _shown(answers[1])
    first, second = [await topic.stats() for topic in topics]
    assert first == second
    assert await _letters(topics[0].dead.list(100)) == await _letters(topics[1].dead.list(100))


def _shown(answer: Any) -> Any:
    if isinstance(answer, list):
        return [_shown(one) for one in answer]
    if isinstance(answer, Peek):
        return answer.pending and (answer.pending.payload, answer.pending.count), answer.due_at, answer.token
    return (answer.status, answer.due_ms) if hasattr(answer, "due_ms") else answer


@LAYOUTS
async def test_the_streams_of_the_stored_layout_are_trimmed(
    face: Face, other: Gate, raw: Any, before: int, after: int
) -> None:
    # Given a process with a stale layout, and a topic that is forwarded to streams
    made, topic = (one.topic("t", slots=before) for one in (other, face.gate))
    for one in (made, topic):
        one.forward("stream")
    made.open()
    topic.reshard(after)
    # And streams of the new layout, of which the only group has acknowledged all
    topic.trigger_many([(f"k{i}", i) for i in range(300 * after)])
    assert topic.forward_once(10_000) == 300 * after
    for stream in topic.forward_targets():
        raw.xgroup_create(stream, "g", "0")
        entries = raw.xreadgroup("g", "c", {stream: ">"}, count=10_000)[0][1]
        raw.xack(stream, "g", *(entry for entry, _ in entries))
    # Then that process trims them
    assert await (made.aio if face.awaiting else Awaited(made)).trim_forwarded() > 100 * after


@pytest.mark.parametrize("verb", ["redrive", "delete"])
@LAYOUTS
async def test_ids_that_another_process_listed_are_known(
    face: Face, other: Gate, clock: Clock, verb: str, before: int, after: int
) -> None:
    # Given a process with a stale layout
    made = other.topic("t", **_policy(before))
    stale = made.aio if face.awaiting else Awaited(made)
    await _fill(stale, clock)
    topic = face.topic("t", **_policy(before))
    await topic.reshard(after)
    # Then it takes the ids that a process with the new layout lists
    assert await getattr(stale.dead, verb)(await _ids(topic)) == 24


@pytest.mark.parametrize("verb", ["redrive", "delete"])
async def test_an_id_of_a_former_layout_is_refused(
    face: Face, other: Gate, clock: Clock, everything: Any, verb: str
) -> None:
    # Given the ids of a topic with 8 slots, which has 2 now
    made = other.topic("t", **_policy(8))
    stale = made.aio if face.awaiting else Awaited(made)
    await _fill(stale, clock)
    former = next(one for one in await _ids(stale) if int(one[0]) >= 2)
    await face.topic("t", **_policy(8)).reshard(2)
    before = everything()
    # Then an id without a slot is refused, also in a process that does not know the change
    with pytest.raises(InvalidArgument, match=f"ids='{former}'.*the number of slots changes the ids"):
        await getattr(stale.dead, verb)([former])
    assert everything() == before


# -- during a change --------------------------------------------------------------------------------------------------


def _stepping(plan: Generator[Batch[list[Any]], list[Any], Any], link: Any) -> Generator[None]:
    """Perform one step of a change for each `next`."""
    batch = next(plan)
    with suppress(StopIteration):
        while True:
            answers = link.run_all(batch)
            yield
            batch = plan.send(answers)


DURING = (
    *("take", "flush", "pause", "resume", "stats", "dead.list"),
    *("dead.redrive", "dead.redrive matching", "dead.redrive limit", "dead.delete limit"),
)


@pytest.fixture
def after_each_reply(monkeypatch: pytest.MonkeyPatch) -> Callable[[Generator[None]], None]:
    """`after_each_reply(steps)`: after each reply to a call, another process performs a step."""

    def follow(steps: Generator[None]) -> None:
        busy = False

        def answer(self: Call[Any], reply: Any) -> Any:
            nonlocal busy
            if not busy:
                busy = True
                try:
                    next(steps, None)
                finally:
                    busy = False
            return read(self, reply)

        monkeypatch.setattr(Call, "answer", answer)

    read = Call.answer
    return follow


@pytest.mark.parametrize("stride", [8, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scene", DURING)
@_layouts(2, 4)
async def test_a_change_that_goes_on_during_the_call_makes_no_difference(
    face: Face,
    other: Gate,
    clock: Clock,
    after_each_reply: Any,
    monkeypatch: Any,
    before: int,
    after: int,
    scene: str,
    stride: int,
) -> None:
    # Given a change of which some steps were done
    policy = _policy(before)
    for done in range(2, 26, stride):
        found = []
        for name in (f"t{done}", f"u{done}"):
            topic, began = face.topic(name, **policy), clock.microseconds() / 1_000_000
            held = await _fill(topic, clock)
            if name.startswith("t"):
                calls = other.topic(name, **policy).open()
                steps = _stepping(plan_reshard(calls, after, lambda _: None), other.context.link)
                list(islice(steps, done))
                # When a step follows each reply
                after_each_reply(steps)
            answer = _shown(await SCENES[scene](topic, held))
            if name.startswith("t"):
                monkeypatch.undo()
                list(steps)
            clock.set(began)
            # Then the call did and answered what it does without a change
            found.append((answer, await topic.stats(), await _letters(topic.dead.list(100))))
        assert found[0] == found[1], f"after {done} steps"


@pytest.mark.parametrize("verb", ["redrive", "delete"])
async def test_ids_are_refused_during_a_change(face: Face, other: Gate, clock: Clock, verb: str) -> None:
    # Given a topic whose slots are being changed
    topic = face.topic("t", **_policy(4))
    await _fill(topic, clock)
    ids = await _ids(topic)
    steps = _stepping(plan_reshard(other.topic("t", **_policy(4)).open(), 2, lambda _: None), other.context.link)
    list(islice(steps, 6))
    # Then ids are refused, and other selections are not
    with pytest.raises(TopicInUse, match="List the letters again after the change"):
        await getattr(topic.dead, verb)(ids)
    list(steps)
    assert (await topic.stats()).dead == 24
    assert await getattr(topic.dead, verb)(limit=24) == 24


async def test_ids_whose_slots_move_meanwhile_are_counted(
    face: Face, other: Gate, clock: Clock, after_each_reply: Any
) -> None:
    # Given a caller with the ids of all letters
    topic = face.topic("t", **_policy(4))
    await _fill(topic, clock)
    ids = await _ids(topic)
    plan = plan_reshard(other.topic("t", **_policy(4)).open(), 2, lambda _: None)
    # When the slots change after the first ids were moved
    steps = _stepping(plan, other.context.link)

    def wait() -> Generator[None]:
        yield
        yield
        list(steps)
        yield

    after_each_reply(wait())
    # Then the caller learns how many were moved
    with pytest.raises(TopicInUse, match=r"after [1-9]\d* of 24"):
        await topic.dead.redrive(ids)


@pytest.mark.parametrize("sent", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 8])
async def test_slots_change_between_two_calls_of_a_batch(
    gate: Gate, other: Gate, clock: Clock, after: int, sent: int
) -> None:
    # Given calls to all slots, some of which are answered before the number of slots changes, and some after
    async def send(batch: Batch[Any]) -> Any:
        answers = [gate.context.link.run(call) for call in batch.calls[:sent]]
        other.topic(name, **_policy(4)).reshard(after)
        return batch.join(answers + [gate.context.link.run(call) for call in batch.calls[sent:]])

    for name, build in _BATCHES.items():
        topic = gate.topic(name, **_policy(4))
        await _fill(topic.aio, clock)
        if name == "resume":
            topic.pause()
        before = topic.stats()
        # Then they answer as if it had not changed, and reach all messages
        answer = await send(build(topic.open()))
        assert answer == (before if name == "stats" else True)
        assert bool(topic.stats().paused) == (name == "pause")


_BATCHES: dict[str, Callable[[Any], Batch[Any]]] = {
    "pause": lambda calls: calls.pause(),
    "resume": lambda calls: calls.resume(),
    "stats": lambda calls: calls.stats(),
}
