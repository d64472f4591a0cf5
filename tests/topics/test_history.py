"""The history of a topic: what happened to a key outside the usual path, for those who ask when it is gone."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument, Trigger, append
from idemgate.core import keys
from idemgate.core.calls import process_bytes
from idemgate.core.history import HISTORY_LASTS, KEPT
from idemgate.core.process import process_name
from idemgate.history.calls import KeyHistory, find_message_history
from idemgate.testing import Clock
from idemgate.topics.messages import Forward
from tests.conftest import Face
from tests.for_each import for_each


def history(gate: Gate, key: str = "k", topic: str = "t") -> KeyHistory:
    return find_message_history(gate.context, key)[topic]


def told(gate: Gate, key: str = "k") -> list[tuple[Any, ...]]:
    """Return what the history tells of a key, the oldest first."""
    return [(one.what, one.attempts, one.triggers) for one in reversed(history(gate, key).transitions)]


async def test_the_usual_path_leaves_no_trace(face: Any, gate: Gate, raw: Any, namespace: str) -> None:
    # Given messages that were triggered, merged, retried, given back and done
    topic = face.topic("t", window="1s", backoff="0s")
    for end in (topic.nack, topic.release, topic.ack):
        await topic.trigger_many([Trigger("k"), Trigger("k", version=3), Trigger("l", delay=0)])
        face.gate.context.clock.advance("1h")
        for delivery in await topic.take(10):
            await end(delivery)
    # Then there is no history
    assert told(gate) == []
    assert not raw.exists(keys.slot_history(namespace, "t", 0, 1))


async def test_a_cancelled_message_is_told_from_one_that_never_arrived(face: Any, gate: Gate, clock: Clock) -> None:
    # Given a key whose message was cancelled
    topic = face.topic("t", window="1m")
    await topic.trigger_many([("k", 1), ("k", 2)])
    assert await topic.cancel("k") == "cancelled"
    at = clock.now()
    clock.advance("1h")
    # Then its history says so, with the time and the process
    found = history(gate)
    [one] = found.transitions
    assert (one.what, one.key, one.at, one.triggers, one.by) == ("cancelled", "k", at, 2, process_name())
    # And that of another key says since when there would be a trace
    other = history(gate, "never")
    assert other == KeyHistory((), clock.now() - timedelta(milliseconds=HISTORY_LASTS))


async def test_a_delivery_that_is_cancelled_leaves_two_traces(face: Any, gate: Gate) -> None:
    topic = face.topic("t")
    await topic.trigger("k")
    [delivery] = await topic.take(1)
    await topic.cancel("k")
    assert await topic.nack(delivery) == "cancelled"
    assert told(gate) == [("cancel_asked", 0, 1), ("cancelled", 0, 1)]
    assert [one.token for one in history(gate).transitions] == [delivery.token] * 2


async def test_a_duplicate_that_ran_twice_is_explained(face: Any, gate: Gate, clock: Clock) -> None:
    # Given a delivery whose lease lapsed, and that was delivered again
    topic = face.topic("t", lease="10s")
    await topic.trigger("k")
    [late] = await topic.take(1)
    clock.advance("11s")
    [again] = await topic.take(1)
    # When both end
    assert await topic.ack(late) == "lost"
    assert await topic.ack(again) == "ok"
    # Then the history tells which one was late, and who took it over
    me = process_bytes().hex()
    lapsed, lost = reversed(history(gate).transitions)
    assert (lapsed.what, lapsed.token, lapsed.attempts, lapsed.by) == ("lapsed", late.token, 1, me)
    assert (lost.what, lost.token, lost.by) == ("lost", late.token, me)


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_lease_that_lapses_last_is_told_with_what_follows(
    face: Any, gate: Gate, clock: Clock, cancelled: bool
) -> None:
    topic = face.topic("t", lease="10s", max_attempts=1)
    await topic.trigger("k")
    await topic.take(1)
    if cancelled:
        await topic.cancel("k")
    clock.advance("11s")
    assert await topic.take(1) == []
    assert [what for what, _, _ in told(gate)][-2:] == ["lapsed", "cancelled" if cancelled else "buried"]


async def test_dead_letters_are_followed(face: Any, gate: Gate) -> None:
    # Given a message that died, was redriven, died again and was deleted; and one that was buried by its key
    topic = face.topic("t", max_attempts=1)
    await topic.trigger("k")
    for end in (topic.dead.redrive, topic.dead.delete):
        [delivery] = await topic.take(1)
        assert await topic.nack(delivery) == "dead"
        [letter] = await topic.dead.list()
        await end([letter.id])
    await topic.trigger("l")
    await topic.bury("l")
    # Then each step is told
    assert told(gate) == [("buried", 1, 1), ("redriven", 1, 1), ("buried", 1, 1), ("deleted", 1, 1)]
    assert told(gate, "l") == [("buried", 0, 1)]


async def test_a_letter_that_is_outdated_is_told(face: Any, gate: Gate) -> None:
    topic = face.topic("t")
    await topic.trigger("k", version=1)
    await topic.bury("k")
    await topic.trigger("k", version=2)
    await topic.dead.redrive()
    assert [what for what, _, _ in told(gate)] == ["buried", "outdated"]


async def test_triggers_that_are_dropped_are_told_except_by_a_window(face: Any, gate: Gate) -> None:
    # Given triggers that are too old, and that find no room
    topic = face.topic("t", merge=append(1), window="1h")
    await topic.trigger_many([Trigger("k", 1, version=2), Trigger("k", 1, version=1), Trigger("k", 2, version=2)])
    assert told(gate) == [("dropped_version", 0, 0), ("dropped_full", 0, 1)]
    # And one that a leading edge drops, as it should
    edge = face.topic("edge", window="1h", edge="leading")
    await edge.trigger("k")
    assert (await edge.trigger("k")).status == "dropped"
    assert history(gate, topic="edge").transitions == ()


async def test_a_request_that_is_sent_again_is_told_once(face: Any, gate: Gate) -> None:
    calls = gate.topic("t").open()
    await face.topic("t").trigger("k")
    request = calls.cancel("k")
    assert [gate.context.link.run(request) for _ in range(3)] == ["cancelled"] * 3
    assert told(gate) == [("cancelled", 0, 1)]


async def test_a_slot_keeps_the_newest_and_says_since_when(
    face: Any, gate: Gate, raw: Any, namespace: str, clock: Clock
) -> None:
    # Given more cancelled messages than a slot keeps
    topic = face.topic("t")
    for n in range(KEPT + 3):
        clock.advance("1s")
        await topic.trigger(f"k{n}")
        await topic.cancel(f"k{n}")
    # Then the oldest are gone, and nothing is missing since the oldest that is kept
    assert [history(gate, f"k{n}").transitions != () for n in (0, 2, 3, KEPT + 2)] == [False, False, True, True]
    assert history(gate, "never").since == clock.now() - timedelta(seconds=KEPT - 1)
    # And the history ends some time after its last entry
    name = keys.slot_history(namespace, "t", 0, 1)
    assert raw.llen(name) == KEPT
    assert HISTORY_LASTS - 60_000 < raw.pttl(name) <= HISTORY_LASTS


@for_each("key", ["k" * 128, "k" * 129, "k" * 65_536, "\0\n", b"\xff", 7, "%d("])
def test_any_key_is_found_again_and_a_long_one_takes_little(key: Any, gate: Gate, raw: Any, namespace: str) -> None:
    topic = gate.topic("t")
    topic.trigger(key)
    topic.cancel(key)
    found = find_message_history(gate.context, key)["t"]
    assert [one.what for one in found.transitions] == ["cancelled"]
    assert len(raw.lindex(keys.slot_history(namespace, "t", 0, 1), 0)) < 400


async def test_a_gate_that_redacts_hides_keys_in_histories(
    face: Any, gate: Gate, entry: str, namespace: str, clock: Clock, raw: Any
) -> None:
    # Given a gate that hides keys, and a key that one without an option and one that keeps all has
    with Gate(entry, namespace=namespace, clock=clock, redact=lambda kind, text: f"<{kind}>") as hiding:
        for name, options in (("t", {}), ("all", {"history": 64})):
            topic = Face(hiding, face.awaiting).topic(name, **options)
            await topic.trigger("4711", event_id="e")
            await topic.cancel("4711")
        await hiding.aio.close()
    # Then no history holds it, and one who knows it finds it
    names = list(raw.scan_iter(f"*{gate.namespace}:*:history"))
    assert len(names) == 2
    assert all(b"4711" not in b"".join(raw.lrange(name, 0, -1)) for name in names)
    assert told(gate, "4711") == [("cancelled", 0, 1)]
    assert (await traces(face, "e")).found == ()
    assert [one.outcome for one in (await traces(face, "e", key="4711")).found] == ["cancelled"]


async def test_a_history_stays_where_it_is_when_the_number_of_slots_changes(
    face: Any, gate: Gate, raw: Any, namespace: str
) -> None:
    # Given a topic that was changed to four slots and to two, with a cancelled message in each layout
    topic = face.topic("t")
    for slots in (4, 2, 0):
        await topic.trigger("k", group=f"g{slots}")
        await topic.cancel("k", group=f"g{slots}")
        if slots:
            await topic.reshard(slots)
    # Then all are found, whatever the group
    assert [what for what, _, _ in told(gate)] == ["cancelled"] * 3
    assert len(list(raw.scan_iter(f"*{gate.namespace}:*:history"))) == 3
    # And they are gone with the topic
    await topic.delete()
    assert list(raw.scan_iter(f"*{gate.namespace}:*:history")) == []


async def test_a_history_of_another_type_costs_no_message(face: Any, gate: Gate, raw: Any, namespace: str) -> None:
    name = keys.slot_history(namespace, "t", 0, 1)
    raw.set(name, "x")
    topic = face.topic("t")
    await topic.trigger("k")
    assert await topic.cancel("k") == "cancelled"
    assert (await topic.stats())["cancelled"] == 1
    raw.delete(name)


# -- all transitions --------------------------------------------------------------------------------------------------


async def traces(face: Any, event_id: str, **where: Any) -> Any:
    return await face.trace(event_id, **where)


async def test_a_topic_may_keep_all_transitions(face: Any, gate: Gate, clock: Clock) -> None:
    # Given a topic that keeps all, and messages that take every way
    topic = face.topic("t", history=500, backoff="0s", max_attempts=2, lease="10s", dedup_retention="1h")
    await topic.trigger_many([Trigger("k", event_id="e"), Trigger("k", event_id="e"), Trigger("k", delay="1s")])
    clock.advance("1s")
    for end in (topic.release, topic.nack, topic.ack):
        [delivery] = await topic.take(1)
        await end(delivery)
    await topic.trigger("k", delay="1h")
    await topic.reschedule("k", delay="2h")
    # Then its history has each
    assert [what for what, _, _ in told(gate)] == [
        "scheduled", "duplicate", "replaced", "taken", "returned", "taken", "nacked", "taken", "acked", "scheduled",
        "rescheduled",
    ]  # fmt: skip
    taken = [one for one in history(gate).transitions if one.what == "taken"]
    assert [(one.attempts, one.triggers) for one in reversed(taken)] == [(1, 2), (1, 2), (2, 2)]


async def test_a_window_that_drops_is_told_by_a_topic_that_keeps_all(face: Any, gate: Gate) -> None:
    topic = face.topic("t", history=64, window="1h", edge="leading")
    await topic.trigger_many([("k", 1), ("k", 2)])
    assert [what for what, _, _ in told(gate)] == ["scheduled", "dropped"]


@pytest.mark.parametrize("ways", [{"result_retention": "1h"}, {"priority": True}, {"merge": "append"}])
async def test_results_priorities_and_partial_ends_are_told(face: Any, gate: Gate, ways: dict[str, Any]) -> None:
    topic = face.topic("t", history=64, backoff="0s", **ways)
    await topic.trigger("k", 1)
    await topic.trigger("k", 2, group="g")
    for _ in range(2):
        for delivery in await topic.take(10):
            await topic.ack(delivery)
    assert [what for what, _, _ in told(gate)].count("acked") == [what for what, _, _ in told(gate)].count("taken") > 0


async def test_an_event_is_traced_through_merges_and_retries(face: Any, gate: Gate, clock: Clock) -> None:
    # Given two events of a key that merge, a third one while their delivery runs, and others
    topic = face.topic("t", history=500, window="1s", backoff="0s", slots=4)
    await topic.trigger_many([Trigger(f"k{n}", event_id="other") for n in range(20)])
    await topic.trigger("k", 1, event_id="one")
    await topic.trigger("k", 2, event_id="two")
    clock.advance("1s")
    taken = {one.key: one for one in await topic.take(100)}
    await topic.trigger("k", 3, event_id="three")
    await topic.nack(taken["k"])
    clock.advance("1h")
    again = {one.key: one for one in await topic.take(100)}
    await topic.ack(again["k"])
    # Then each of them knows the deliveries that took it
    me = process_bytes().hex()
    for event_id, status, tokens in (
        ("one", "scheduled", [taken["k"], again["k"]]), ("two", "merged", [taken["k"], again["k"]]),
        ("three", "scheduled", [again["k"]]),
    ):  # fmt: skip
        [found] = (await traces(face, event_id)).found
        assert (found.topic, found.key, found.status, found.outcome, found.by) == ("t", "k", status, "acked", me)
        assert [one.token for one in found.deliveries] == [one.token for one in tokens]
        assert found.deliveries[-1].outcomes == ("acked",)
        assert found.deliveries[-1].ended_at == clock.now()
    # And an event id of several keys is found with each, or with one
    assert len((await traces(face, "other")).found) == 20
    [one] = (await traces(face, "other", topic="t", key="k3")).found
    assert one.key == "k3"


async def test_a_trace_tells_a_lapsed_delivery_and_a_late_end(face: Any, clock: Clock) -> None:
    topic = face.topic("t", history=100, lease="10s")
    await topic.trigger("k", event_id="e")
    [late] = await topic.take(1)
    clock.advance("11s")
    [again] = await topic.take(1)
    await topic.ack(late)
    await topic.ack(again)
    [found] = (await traces(face, "e")).found
    assert [(one.attempt, one.outcomes) for one in found.deliveries] == [(1, ("lapsed", "lost")), (2, ("acked",))]


async def test_a_trace_tells_how_a_message_ended(face: Any, clock: Clock) -> None:
    topic = face.topic("t", history=200, max_attempts=1)
    ends = {"pending": None, "cancelled": "cancelled", "buried": "buried", "redriven": None, "deleted": "deleted"}
    for key in ends:
        await topic.trigger(key, event_id=key, delay="1h")
    await topic.cancel("cancelled")
    for key in ("buried", "redriven", "deleted"):
        await topic.bury(key)
    for letter in await topic.dead.list():
        if letter.key == "redriven":
            await topic.dead.redrive([letter.id])
        elif letter.key == "deleted":
            await topic.dead.delete([letter.id])
    for key, outcome in ends.items():
        [found] = (await traces(face, key)).found
        assert (found.outcome, found.deliveries) == (outcome, ()), key
    # And a duplicate has a trace of its own
    await topic.trigger("pending", event_id="pending")
    assert [one.status for one in (await traces(face, "pending")).found] == ["scheduled", "duplicate"]


async def test_a_trace_says_what_it_cannot_know(face: Any, gate: Gate, clock: Clock) -> None:
    # Given a topic that keeps all, and one that does not
    await face.topic("silent").trigger("k", event_id="e")
    await face.topic("t", history=64).trigger("k" * 200, event_id="long")
    found = await traces(face, "e")
    assert (found.found, found.untraced) == ((), ("silent",))
    assert found.since == {"t": clock.now() - timedelta(milliseconds=HISTORY_LASTS)}
    # And a long key has to be named
    assert (await traces(face, "long")).found == ()
    assert len((await traces(face, "long", key="k" * 200)).found) == 1
    with pytest.raises(InvalidArgument, match="no such topic"):
        await traces(face, "e", topic="nowhere")


async def test_forwarded_messages_are_traced(face: Any, gate: Gate) -> None:
    topic = face.topic("t", history=64)
    await topic.trigger("k", event_id="e")
    calls = gate.topic("t").open()
    assert gate.context.link.run(calls.forward(0, Forward("list", None, 0), 10)).sent == 1
    [found] = (await traces(face, "e")).found
    assert found.outcome == "forwarded"
