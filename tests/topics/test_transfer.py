"""The pending messages of a topic: a page of them, and their move to another topic. Only operators do it, blocking."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import pytest

from idemgate import Gate, Trigger, append
from idemgate.core.calls import Batch, run_plan
from idemgate.core.keys import slot_of
from idemgate.errors import ResultTimeout, TopicInUse, UnexpectedData
from idemgate.history.calls import find_message_history
from idemgate.operate.transfer import keep_dead_letters, plan_messages, plan_transfer
from idemgate.testing import Clock
from idemgate.topics.dead_letters import PAGE
from idemgate.topics.messages import Position
from tests.for_each import for_each
from tests.waiting import subscribed

REASON = "moved"


def pages(gate: Gate, name: str, n: int) -> Iterator[list[Any]]:
    """Yield the pages of the pending messages of a topic."""
    after: Position | None = Position()
    while after is not None:
        page = run_plan(plan_messages(gate.topic(name).open(), after, n), gate.context.link.run_all)
        yield page.messages
        after = page.next


def calls_of(gate: Gate, name: str, n: int) -> Iterator[list[bytes]]:
    """Yield the keys that each call for a page of the first slot returns."""
    after: Position | None = Position()
    while after is not None:
        page = gate.context.link.run(gate.topic(name).open().messages(0, after, n))
        yield [one.raw_key for one in page.messages]
        after = page.next


def transfer(gate: Gate, source: str, to: str, send: Callable[[Any], Any] | None = None) -> Any:
    plan = plan_transfer(gate.topic(source).open(), gate.topic(to).open(), REASON, lambda _: None)
    return run_plan(plan, send or gate.context.link.run_all)


# -- pages ------------------------------------------------------------------------------------------------------------


@for_each("slots", [1, 4])
@for_each("n", [1, 3, 250])
def test_each_pending_message_is_on_one_page(gate: Gate, clock: Clock, slots: int, n: int) -> None:
    # Given messages in each state: 40 of one time, some of a group that is busy, and one behind a delivery
    topic = gate.topic(f"t{slots}-{n}", slots=slots, priority=True)
    topic.trigger_many([Trigger("runs", 1, group="g"), Trigger("b1", 1, group="g"), Trigger("b2", 1, group="g")])
    [runs] = topic.take(1)
    topic.take(9)
    topic.trigger_many([Trigger(f"k{number}", number, delay="1m") for number in range(40)])
    topic.trigger_many([Trigger("soon", 1, delay="1s"), Trigger(runs.key, 2, group="g"), Trigger("same", 1)])
    other = next(name for name in "abcdefgh" if slots == 1 or slot_of(name.encode(), slots) != slot_of(b"same", slots))
    topic.trigger("same", 1, group=other)
    topic.trigger("ready", 1, priority=5)
    # Then each is on one page, in the order of the states and times
    found = [one for page in pages(gate, topic.name, n) for one in page]
    names = [one.raw_key.decode() for one in found]
    there = {runs.key, "b1", "b2", "soon", "ready", "same", *(f"k{number}" for number in range(40))}
    assert {*names} == there
    assert len(names) == len(there) + (slots > 1)  # the same key twice, at the same time
    states = {one.raw_key.decode(): one.state for one in found}
    blocked = {"runs", "b1", "b2"} - {runs.key}
    assert {key for key, state in states.items() if state == "blocked"} == blocked
    assert (states[runs.key], states["ready"], states["soon"]) == ("waiting", "ready", "scheduled")
    assert [one.position for one in found] == sorted(one.position for one in found)
    assert (len(found[0].message.group), found[-1].message.payload) == (0, 2)
    topic.ack(runs)


def test_a_page_goes_on_where_messages_are_gone_and_others_came(gate: Gate, clock: Clock) -> None:
    topic = gate.topic("t")
    topic.trigger_many([Trigger(f"k{number}", number, delay="1m") for number in range(9)])
    walk = pages(gate, "t", 3)
    assert [one.raw_key for one in next(walk)] == [b"k0", b"k1", b"k2"]
    topic.cancel("k2")
    topic.cancel("k4")
    topic.trigger("k35", 1, delay="1m")
    assert [one.raw_key for one in next(walk)] == [b"k3", b"k35", b"k5"]


def test_a_call_returns_no_more_messages_than_asked_for_behind_deliveries_either(gate: Gate, clock: Clock) -> None:
    topic = gate.topic("t")
    topic.trigger_many([(f"k{number}", 1) for number in range(5)])
    taken = topic.take(5)
    topic.trigger_many([(f"k{number}", 2) for number in range(5)])
    assert [len(keys) for keys in calls_of(gate, "t", 2)] == [2, 2, 1]
    topic.ack(taken)


def test_a_call_returns_a_message_that_is_larger_than_its_room(gate: Gate, clock: Clock) -> None:
    topic, drawn = gate.topic("t"), random.Random(1)
    topic.trigger_many([Trigger(f"k{number}", drawn.randbytes(200_000), delay="1m") for number in range(3)])
    assert list(calls_of(gate, "t", 50)) == [[b"k0"], [b"k1"], [b"k2"]]


def test_a_page_of_large_messages_is_short_and_all_are_found(gate: Gate, clock: Clock) -> None:
    topic = gate.topic("t", slots=2)
    topic.trigger_many([Trigger(f"k{number}", "x" * 50_000, delay="1m") for number in range(9)])
    page = gate.context.link.run(topic.open().messages(0, Position(), PAGE))
    assert (len(page.messages), page.next is None) == (2, False)
    found = [one.raw_key for page in pages(gate, "t", 50) for one in page]
    assert (len(found), len({*found})) == (9, 9)


def test_a_member_without_a_message_is_named(gate: Gate, raw: Any, clock: Clock) -> None:
    gate.topic("t").trigger("k", 1)
    [scheduled] = raw.scan_iter(f"*{gate.namespace}:*:scheduled")
    raw.zadd(scheduled, {"ghost": 1})
    with pytest.raises(UnexpectedData, match="lists ghost, which has no stored data"):
        next(pages(gate, "t", 50))
    raw.zrem(scheduled, "ghost")


def test_pages_look_past_many_deliveries_without_a_message_behind_them(
    gate: Gate, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = gate.topic("t")
    topic.trigger_many([(f"k{number:03}", 1) for number in range(450)])
    taken = [one for _ in range(5) for one in topic.take(100)]
    topic.trigger(taken[-1].key, 2)
    assert [one.state for page in pages(gate, "t", 50) for one in page] == ["waiting"]
    # And a call that would look too long returns where it got to
    monkeypatch.setattr("idemgate.operate.transfer._ROUNDS", 1)
    assert [len(page) for page in pages(gate, "t", 50)] == [0, 0, 1]
    topic.ack(taken)


def test_pages_follow_a_change_of_slots(gate: Gate, url: str, clock: Clock) -> None:
    topic = gate.topic("t", slots=2)
    topic.trigger_many([Trigger(f"k{number}", number, delay="1m") for number in range(9)])
    before = topic.open()
    with Gate(url, namespace=gate.namespace, clock=clock) as other:
        other.topic("t", slots=2).reshard(8)
    page = run_plan(plan_messages(before, Position(), 5), gate.context.link.run_all)
    rest = run_plan(plan_messages(before, page.next, 5), gate.context.link.run_all)
    assert [one.raw_key for one in page.messages + rest.messages] == [b"k%d" % number for number in range(9)]


# -- moving -----------------------------------------------------------------------------------------------------------


def test_a_message_keeps_all_that_it_has(gate: Gate, clock: Clock) -> None:
    # Given a message with a version, a priority and a group, which failed once, and is due in a minute
    old, new = gate.topic("old", priority=True, slots=4), gate.topic("new", priority=True, slots=2)
    old.trigger("k", {"n": 1}, group="g", version=7, priority=3)
    [delivery] = old.take(1)
    old.nack(delivery, delay="1m", reason="KeyError: 7")
    before = old.peek("k", group="g")
    # When it is moved
    assert transfer(gate, "old", "new") == (1, 0)
    # Then it has them there, and nothing is left
    after = new.peek("k", group="g")
    names = ("payload", "count", "attempts", "version", "priority", "group", "failure", "first_ms", "last_ms", "due_ms")
    assert [getattr(after.pending, one) for one in names] == [getattr(before.pending, one) for one in names]
    assert after.due_at == before.due_at
    assert (old.stats().pending, old.stats().dead) == (0, 0)
    # And a trigger with a lower version is dropped, as it was before, also after its slot has moved
    new.reshard(8)
    assert new.trigger("k", 2, group="g", version=6).status == "dropped"
    # And a worker gets it when it is due
    clock.advance("1m")
    [delivery] = new.take(1)
    assert (delivery.attempt, delivery.failure) == (2, "KeyError: 7")
    new.ack(delivery)


def test_each_state_is_moved_except_what_runs(gate: Gate, clock: Clock) -> None:
    old, new = gate.topic("old", slots=2), gate.topic("new")
    old.trigger_many([Trigger(key, key, group="g") for key in ("runs", "blocked")])
    [runs] = old.take(9)
    old.trigger(runs.key, "behind", group="g")
    old.trigger_many([Trigger("due", 1), Trigger("later", 1, delay="1h")])
    assert transfer(gate, "old", "new") == (3, 0)
    assert (old.stats().pending, old.stats().in_flight, old.stats().waiting) == (1, 1, 1)
    assert (new.stats().ready, new.stats().scheduled) == (2, 1)
    # And the delivery ends there, as before
    assert old.ack(runs) == "ok"
    assert transfer(gate, "old", "new") == (1, 0)
    assert old.stats().pending == 0


def test_messages_that_were_flushed_or_are_ready_are_due_at_once(gate: Gate, clock: Clock) -> None:
    old, new = gate.topic("old", priority=True), gate.topic("new")
    old.trigger_many([Trigger("flushed", 1, delay="1h"), Trigger("ranked", 1)])
    old.take(1)
    old.flush()
    assert transfer(gate, "old", "new").moved == 1
    assert new.stats().ready == 1


@for_each(
    ("old_time", "new_time", "due"),
    [("10s", "20s", 20), ("20s", "10s", 10), (None, "5s", 5), ("5s", None, 5), ("2m", None, 120)],
)
def test_it_joins_the_message_of_its_key(
    gate: Gate, clock: Clock, old_time: str | None, new_time: str | None, due: int
) -> None:
    """A time that a caller set stays: that of the message which is there, else that of the one which comes."""
    names = [f"{kind}-{old_time}-{new_time}" for kind in ("old", "new")]
    old, new = (gate.topic(name, merge="append", window="1m") for name in names)
    old.trigger("k", 1, delay=old_time)
    clock.advance("1ms")
    new.trigger("k", 2, delay=new_time)
    now = clock.now()
    assert transfer(gate, *names).moved == 1
    seen = new.peek("k")
    assert (seen.pending.payload, seen.pending.count) == ([1, 2], 2)
    assert (round((seen.due_at - now).total_seconds()), new.stats()["folded"]) == (due, 1)


def test_it_joins_a_message_at_the_earlier_time(gate: Gate, clock: Clock) -> None:
    old, new = gate.topic("old", merge="sum", window="1m"), gate.topic("new", merge="sum", window="1m")
    for first, second in ((old, new), (new, old)):
        key = first.name
        first.trigger(key, 1)
        clock.advance("5s")
        second.trigger(key, 2)
        expected = first.peek(key).due_at
        transfer(gate, "old", "new")
        assert (new.peek(key).due_at, new.peek(key).pending.payload) == (expected, 3)
    # And at once if that one was flushed
    new.trigger("flushed", 1)
    new.flush()
    old.trigger("flushed", 2, delay=None)
    transfer(gate, "old", "new")
    assert new.peek("flushed").due_at <= clock.now()
    # And behind a delivery it waits for its end
    clock.advance("2m")
    taken = new.take(9)
    old.trigger("old", 5)
    transfer(gate, "old", "new")
    assert (new.stats().waiting, new.peek("old").pending.payload) == (1, 5)
    new.ack(taken)


def test_workers_of_the_other_topic_hear_of_an_earlier_time(gate: Gate, raw: Any, clock: Clock) -> None:
    old, new = gate.topic("old"), gate.topic("new")
    new.trigger("later", 1, delay="1h")
    old.trigger("k", 1)
    [scheduled] = raw.scan_iter(f"*{gate.namespace}:*:new:*:scheduled")
    with subscribed(raw, scheduled) as heard:
        transfer(gate, "old", "new")
        hint = heard.get_message(timeout=30)
    assert int(hint["data"]) == round(new.next_due().timestamp() * 1000)


def test_what_is_remembered_of_a_moved_version_expires_beside_event_ids(gate: Gate, raw: Any, clock: Clock) -> None:
    # Given a topic that remembers an event for longer than a transfer is remembered
    old, new = gate.topic("old"), gate.topic("new", dedup_retention="7d")
    new.trigger("other", 1, event_id="e")
    old.trigger("k", 1, version=3)
    transfer(gate, "old", "new")
    found = {key: raw.pttl(key) for key in raw.scan_iter(f"*{gate.namespace}:*:new:*:dedup*")}
    assert len(found) == 2
    assert all(0 < left <= 9 * 86_400_000 for left in found.values()), found


def test_a_message_of_a_lower_version_is_dropped_and_counted(gate: Gate, clock: Clock) -> None:
    old, new = gate.topic("old"), gate.topic("new")
    old.trigger("k", 1, version=3)
    new.trigger("k", 2, version=4)
    assert transfer(gate, "old", "new") == (0, 1)
    assert (new.peek("k").pending.payload, new.stats()["dropped_version"], old.stats().dead) == (2, 1, 0)


def test_a_result_of_a_moved_message_is_none_of_later_triggers(gate: Gate, raw: Any, clock: Clock) -> None:
    # Given a topic with many triggers, so that the last one has a high number
    old, new = gate.topic("old"), gate.topic("new", result_retention="1h")
    for _ in range(50):
        old.trigger("k", 1)
        old.cancel("k")
    old.trigger("k", 1)
    transfer(gate, "old", "new")
    new.ack(new.take(1)[0], result="of the moved one")
    # When a trigger comes after the message has ended, in the same millisecond
    receipt = new.trigger("k", 1)
    # Then it gets a result of its own
    with pytest.raises(ResultTimeout):
        new.result(receipt, "10ms")
    # And what is remembered of the moved message expires
    [dedup] = raw.scan_iter(f"*{gate.namespace}:*:new:*:dedup")
    assert 0 < raw.pttl(dedup) <= 2 * 86_400_000


@for_each("size", [1, 9_000])
def test_a_message_stays_while_the_one_of_its_key_has_no_room_for_both(gate: Gate, size: int) -> None:
    # Given messages of two items, half of whose keys have a full one in the other topic
    old, new = (gate.topic(f"{name}{size}", merge=append(2)) for name in ("old", "new"))
    names = [f"k{number:03}" for number in range(120)]
    for item in ("o" * size, "p" * size):
        old.trigger_many([(name, item) for name in names])
    for item in ("n" * size, "m" * size):
        new.trigger_many([(name, item) for name in names[::2]])
    # When they are moved
    assert transfer(gate, old.name, new.name).moved == 60
    # Then nothing of the other topic was dropped, and what has no room is a dead letter of the former one
    assert (new.stats().pending, new.stats()["items_dropped"]) == (120, 0)
    assert (old.stats().pending, old.stats().dead) == (0, 60)
    assert {letter.reason for letter in old.dead.list(100)} == {REASON}
    # And the same command goes on when there is room
    while deliveries := new.take(50):
        new.ack(deliveries)
    assert transfer(gate, old.name, new.name).moved == 60
    assert (old.stats().dead, new.stats().pending, new.stats()["items_dropped"]) == (0, 60, 0)


def test_a_message_stays_while_the_older_one_of_its_key_has_dropped_items(gate: Gate, clock: Clock) -> None:
    # Given a message of the other topic that dropped an item, and a later one that would have room in it
    old, new = (gate.topic(name, merge="append") for name in ("old", "new"))
    new.trigger_many([("k", str(n) * 230_000) for n in range(5)])
    clock.advance("1ms")
    old.trigger("k", "late")
    # Then it stays, since nothing joins a list that has dropped items
    assert transfer(gate, "old", "new").moved == 0
    assert (old.stats().dead, new.stats()["items_dropped"]) == (1, 1)


def test_dead_letters_of_others_stay(gate: Gate, url: str, clock: Clock) -> None:
    # Given dead letters, more than a program would keep, some with a reason that begins alike, and an old one
    old = gate.topic("old", dead_retention="365d", max_dead_letters=500)
    old.trigger("ancient", 1)
    old.bury("ancient")
    clock.advance("40d")
    old.trigger_many([(f"d{number}", number) for number in range(250)])
    for number in range(250):
        old.bury(f"d{number}", reason=REASON + " further")
    old.trigger("k", 1)
    # When another program, which does not know these limits, moves the messages
    with Gate(url, namespace=gate.namespace, clock=clock) as other:
        other.topic("new").open()
        assert transfer(other, "old", "new") == (1, 0)
    assert (old.stats().dead, old.stats()["expired"]) == (251, 0)


def test_triggers_that_come_meanwhile_stay_and_it_ends(gate: Gate, clock: Clock) -> None:
    old, new = gate.topic("old"), gate.topic("new")
    old.trigger_many([(f"k{number}", 1) for number in range(120)])
    sent = 0

    def send(batch: Batch[Any]) -> Any:
        nonlocal sent
        clock.advance("1s")
        sent += 1
        answers = gate.context.link.run_all(batch)
        clock.advance("1s")
        old.trigger(f"later{sent}", 1)
        return answers

    assert transfer(gate, "old", "new", send).moved == 121  # one came before the first page was read
    assert (old.stats().pending, new.stats().pending) == (sent - 1, 121)


def test_a_change_of_slots_ends_it_and_it_goes_on_after(gate: Gate, clock: Clock) -> None:
    old, new = gate.topic("old", slots=2, merge="sum"), gate.topic("new", slots=2, merge="sum")
    old.trigger_many([(f"k{number}", 1) for number in range(200)])
    sent = 0

    def send(batch: Batch[Any]) -> Any:
        nonlocal sent
        sent += 1
        if sent == 5:  # letters were adopted, and not deleted
            old.reshard(4)
            new.reshard(8)
        return gate.context.link.run_all(batch)

    with pytest.raises(TopicInUse, match="Repeat the call"):
        transfer(gate, "old", "new", send)
    transfer(gate, "old", "new")
    assert (old.stats().pending, old.stats().dead) == (0, 0)
    assert sum(one.message.payload for page in pages(gate, "new", 250) for one in page) == 200


@for_each(
    ("quiet", "is_flushed", "reason"),
    [("20s", True, "flush"), ("20s", False, "window"), ("10s", False, "quiet"), ("5s", False, "quiet")],
)
def test_a_message_that_joins_another_has_the_reason_of_its_time(
    gate: Gate, clock: Clock, quiet: str, is_flushed: bool, reason: str
) -> None:
    # Given a message whose time is behind that of its key in the other topic, the same, or before it
    old, new = (
        gate.topic(f"old-{reason}-{quiet}", quiet=quiet, max_delay=None),
        gate.topic(f"new-{reason}-{quiet}", window="10s"),
    )
    old.trigger("k", 1)
    new.trigger("k", 2)
    if is_flushed:
        new.flush()
    # When they are one
    transfer(gate, old.name, new.name)
    # Then it is due for the reason of the earlier time
    clock.advance("10s")
    [delivery] = new.take(1)
    assert delivery.reason == reason
    new.ack(delivery)


def test_the_history_of_the_other_topic_tells_what_it_adopted(gate: Gate, clock: Clock) -> None:
    # Given keys that the other topic has with a lower version, with a higher one, and not at all
    old, new = gate.topic("old"), gate.topic("new", history=64)
    old.trigger_many([Trigger(key, 1, version=3) for key in ("merged", "dropped", "scheduled")])
    new.trigger("merged", 1, version=2)
    new.trigger("dropped", 1, version=4)
    # When they are moved
    assert transfer(gate, "old", "new") == (2, 1)
    # Then its history says what became of each
    for key, told in (("merged", "merged"), ("dropped", "dropped_version"), ("scheduled", "scheduled")):
        newest = find_message_history(gate.context, key)["new"].transitions[0]
        assert (newest.what, newest.key, newest.triggers) == (told, key, 1)
    # And a topic that keeps only what is unusual tells only of the drop
    plain = gate.topic("plain")
    plain.trigger("dropped", 1, version=9)
    transfer(gate, "new", "plain")
    kept = {key: find_message_history(gate.context, key)["plain"].transitions for key in ("merged", "dropped")}
    assert {key: [one.what for one in found] for key, found in kept.items()} == {
        "merged": [], "dropped": ["dropped_version"],
    }  # fmt: skip


@for_each("damage", ["unreadable", "empty", "number"])
def test_letters_that_are_none_are_refused_before_anything_is_written(gate: Gate, clock: Clock, damage: str) -> None:
    # Given a dead letter, and another one that is damaged after the client has read it
    old, new = gate.topic(f"old-{damage}"), gate.topic(f"new-{damage}")
    old.trigger("k", 1)
    old.bury("k")
    [dead] = old.dead.list()
    key, message, *rest = msgpack.unpackb(dead.stored, raw=True)
    parts = {"unreadable": None, "empty": [key, b"", *rest], "number": [7, message, *rest]}[damage]
    [call] = new.open().adopt_letters(old.name, [dead.stored]).calls
    call.args = (*call.args, b"mark", msgpack.packb(parts, use_bin_type=False))
    # Then it is named by its place, and the first one is not adopted either
    with pytest.raises(UnexpectedData, match=f"argument holds corrupt data under {len(call.args)}"):
        gate.context.link.run(call)
    assert new.stats().pending == 0


# -- interruptions ----------------------------------------------------------------------------------------------------


class Cut(Exception):
    """Ends a transfer."""


@pytest.mark.parametrize("how", ["before", "half", "after"])
def test_a_transfer_that_is_interrupted_anywhere_loses_and_doubles_nothing(gate: Gate, clock: Clock, how: str) -> None:
    """Before, within or after each of its requests, and again in the next try; payloads are added up."""
    for cut_at in range(1, 40):
        options: Any = {"merge": "sum", "slots": 2, "dedup_retention": "1s"}
        old, new = (gate.topic(f"{kind}{cut_at}-{how}", **options) for kind in ("old", "new"))
        old.trigger_many([(f"k{number}", 1) for number in range(60)])
        new.trigger_many([(f"k{number}", 1000) for number in range(0, 60, 7)])
        wanted = sum(1 if number % 7 else 1001 for number in range(60))
        ended = False
        for attempt in range(3):
            sent = 0

            def send(batch: Batch[Any]) -> Any:
                nonlocal sent
                sent += 1
                if sent == cut_at + attempt and attempt < 2:  # noqa: B023
                    part = {"before": 0, "half": len(batch.calls) // 2, "after": len(batch.calls)}[how]
                    gate.context.link.run_all(Batch(batch.calls[:part], list))
                    raise Cut
                return gate.context.link.run_all(batch)

            try:
                transfer(gate, old.name, new.name, send)
                ended = attempt == 0
                break
            except Cut:
                # Triggers and deliveries go on meanwhile: what is buried does not merge with them
                old.trigger(f"k{attempt}", 10_000)
                wanted += 10_000
                clock.advance("10m")
                for delivery in new.take(3):
                    wanted -= delivery.payload
                    new.ack(delivery)
        assert sum(one.message.payload for page in pages(gate, new.name, 250) for one in page) == wanted, cut_at
        assert (old.stats().pending, old.stats().dead) == (0, 0)
        if ended:
            return
    pytest.fail("it never ended")


@for_each("seed", range(20))
def test_two_transfers_at_once_move_each_message_once(gate: Gate, clock: Clock, seed: int) -> None:
    drawn = random.Random(seed)
    old, new = (gate.topic(f"{kind}{seed}", merge="sum", slots=2) for kind in ("old", "new"))
    old.trigger_many([(f"k{number}", 1) for number in range(130)])
    plans = [plan_transfer(old.open(), new.open(), REASON, lambda _: None) for _ in range(2)]
    waiting = [(plan, next(plan)) for plan in plans]
    moved = 0
    while waiting:
        plan, request = waiting.pop(drawn.randrange(len(waiting)))
        try:
            waiting.append((plan, plan.send(gate.context.link.run_all(request))))
        except StopIteration as end:
            moved += end.value.moved
    assert (moved, new.stats().pending, old.stats().pending, old.stats().dead) == (130, 130, 0, 0)


def test_a_bury_by_an_operator_discards_no_dead_letter(gate: Gate, clock: Clock) -> None:
    topic = gate.topic("t", max_dead_letters=1)
    topic.trigger_many([("a", 1), ("b", 1)])
    topic.bury("a")
    gate.context.link.run(keep_dead_letters(topic.open()).bury("b"))
    assert (topic.stats().dead, topic.stats()["expired"]) == (2, 0)
