"""Dead letters: kept with their reason, sent back or deleted, bounded by age and number."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta
from typing import Any

import pytest

from idemgate import Gate, InvalidArgument, Trigger
from idemgate.errors import UnexpectedData
from idemgate.testing import Clock
from idemgate.topics.dead_letters import DeadFilter
from idemgate.topics.deliveries import Settlement
from idemgate.topics.merge import pack
from idemgate.topics.topic_calls import TopicCalls
from tests.for_each import for_each
from tests.messages import pack_message
from tests.scripts.states import MESSAGE

pytestmark = pytest.mark.one_in(5)


async def _bury(topic: Any, n: int = 1000, reason: str = "no") -> None:
    """Buries whatever is due, `n` at most."""
    while taken := await topic.take(min(n, 1000)):
        await topic.bury(taken, reason=reason)
        n -= len(taken)


async def test_letters_are_listed_newest_first(face: Any, clock: Clock) -> None:
    topic = face.topic("t", slots=4)
    # Given letters of many slots, one a second
    for n in range(20):
        await topic.trigger(n, {"n": n})
        await _bury(topic, reason=f"reason {n}")
        clock.advance("1s")
    # When they are listed, page by page
    first, second, beyond = (
        await topic.dead.list(8),
        await topic.dead.list(15, skip=8),
        await topic.dead.list(5, skip=20),
    )
    # Then they come newest first, with all that is known of them
    assert [letter.payload["n"] for letter in first] == list(range(19, 11, -1))
    assert [letter.payload["n"] for letter in second] == list(range(11, -1, -1))
    assert beyond == []
    assert len(await topic.dead.list()) == 20
    letter = first[0]
    assert (letter.key, letter.reason, letter.attempts, letter.count) == ("19", "reason 19", 1, 1)
    assert letter.died_at == letter.first_at == letter.last_at
    assert len({letter.id for letter in first + second}) == 20


async def test_a_redriven_letter_is_delivered_again_as_if_new(face: Any, clock: Clock, conserved: Any) -> None:
    topic = face.topic("t", window="60s", max_attempts=2, backoff=0)
    # Given a letter of three triggers and two attempts, that a caller had given a time
    await topic.trigger_many([("k", 1), ("k", 2), ("k", 3)])
    await topic.reschedule("k", delay="5s")
    clock.advance("5s")
    await topic.nack(await topic.take(1), reason="no")
    await topic.nack(await topic.take(1), reason="no")
    (letter,) = await topic.dead.list()
    clock.advance("1h")
    # When it is sent back
    assert await topic.dead.redrive([letter.id]) == 1
    # Then it is due now, its attempts begin anew, and its triggers are those of before
    (delivery,) = await topic.take(10)
    assert (delivery.attempt, delivery.reason, delivery.count, delivery.payload) == (1, "redrive", 3, 3)
    assert (delivery.first_at, delivery.due_at) == (letter.first_at, clock.now())
    assert await topic.dead.list() == []
    stats = await topic.stats()
    assert (stats["redriven"], stats["redriven_triggers"]) == (1, 3)
    await conserved(topic, ["k"])
    # And a second time there is nothing to send
    assert await topic.dead.redrive([letter.id]) == 0


async def test_a_deleted_letter_is_gone(face: Any, conserved: Any) -> None:
    topic = face.topic("t")
    await topic.trigger_many([("a", 1), ("b", 2)])
    await _bury(topic)
    letters = {letter.key: letter for letter in await topic.dead.list()}
    assert await topic.dead.delete([letters["a"].id, "0-12345"]) == 1
    assert [letter.key for letter in await topic.dead.list()] == ["b"]
    assert (await topic.stats())["deleted_triggers"] == 1
    await conserved(topic, ["a", "b"])


@pytest.mark.parametrize("verb", ["redrive", "delete"])
async def test_all_of_many_letters_in_many_slots(face: Any, conserved: Any, verb: str) -> None:
    topic = face.topic("t", slots=2)
    # Given more letters than one call takes, in each slot
    await topic.trigger_many([(n, n) for n in range(1300)])
    await _bury(topic, 1300)
    assert (await topic.stats()).dead == 1300
    # When all are sent back, or deleted
    assert await getattr(topic.dead, verb)() == 1300
    # Then none is left
    stats = await topic.stats()
    assert (stats.dead, stats.ready) == (0, 1300 if verb == "redrive" else 0)
    assert await getattr(topic.dead, verb)() == 0
    await conserved(topic, [str(n) for n in range(1300)] if verb == "redrive" else [])


async def test_many_letters_by_their_ids(face: Any) -> None:
    topic = face.topic("t", slots=2)
    await topic.trigger_many([(n, n) for n in range(1100)])
    await _bury(topic, 1100)
    ids = [letter.id for letter in await topic.dead.list(2000)]
    assert await topic.dead.redrive(iter(ids[:1050])) == 1050
    assert (await topic.stats()).dead == 50
    assert await topic.dead.redrive([]) == 0


@for_each("bad", ["", "7", "x-1", "0-x", "2-5", "-1-5"])
async def test_an_id_of_another_kind_is_refused(face: Any, everything: Any, bad: str) -> None:
    topic = face.topic("t", slots=2)
    await topic.trigger("k")
    await _bury(topic)
    before = everything()
    for verb in (topic.dead.redrive, topic.dead.delete):
        with pytest.raises(InvalidArgument, match=f"ids='{bad}'.*DeadLetter.id"):
            await verb([bad])
    assert everything() == before


async def test_a_redriven_letter_joins_what_is_pending(face: Any, clock: Clock, conserved: Any) -> None:
    topic = face.topic("t", window="60s", merge="append")
    await topic.trigger("k", "old")
    clock.advance("60s")
    await _bury(topic)
    # Given a newer message of the key
    await topic.trigger("k", "new")
    # When the letter comes back
    assert await topic.dead.redrive() == 1
    # Then both are one message, due now, in the order of their triggers
    assert [(one.payload, one.count, one.reason) for one in await topic.take(10)] == [(["old", "new"], 2, "redrive")]
    assert (await topic.stats())["folded"] == 1
    await conserved(topic, ["k"])


async def test_a_redriven_letter_waits_behind_a_delivery(face: Any, clock: Clock, conserved: Any) -> None:
    topic = face.topic("t", merge="append")
    await topic.trigger("k", "old")
    await _bury(topic)
    clock.advance("1s")
    await topic.trigger("k", "running")
    (running,) = await topic.take(1)
    clock.advance("1s")
    await topic.trigger("k", "waiting")
    # When the letter comes back while the key is in flight
    assert await topic.dead.redrive() == 1
    # Then it joins what waits, and comes when that may
    assert await topic.take(10) == []
    await topic.ack(running)
    assert [one.payload for one in await topic.take(10)] == [["old", "waiting"]]
    await conserved(topic, ["k"])


async def test_a_redriven_letter_follows_the_policy_again(face: Any, clock: Clock) -> None:
    topic = face.topic("t", quiet="30s", max_delay=None)
    # Given a letter of a message for which a caller had named a time
    await topic.trigger("k", delay="5s")
    clock.advance("5s")
    await _bury(topic)
    # When it comes back, and its key is triggered before it is taken
    await topic.dead.redrive()
    receipt = await topic.trigger("k")
    # Then the quiet time holds for it as for any other
    assert (receipt.due_at - clock.now()).total_seconds() == 30


@pytest.mark.parametrize("newest_first", [True, False])
async def test_letters_of_one_key_come_back_in_the_order_of_their_triggers(
    face: Any, clock: Clock, newest_first: bool
) -> None:
    topic = face.topic("t", merge={"all": "append", "last": "last"})
    # Given three letters of one key, and a message that is newer
    for n in range(3):
        await topic.trigger("k", {"all": n, "last": n})
        await _bury(topic)
        clock.advance("1s")
    ids = [letter.id for letter in await topic.dead.list()]
    # When they come back, whichever first
    assert await topic.dead.redrive(ids if newest_first else None) == 3
    clock.advance("1s")
    await topic.trigger("k", {"all": 3, "last": 3})
    # Then the newest payload is still the last
    (delivery,) = await topic.take(1)
    assert delivery.payload == {"all": [0, 1, 2, 3], "last": 3}
    assert (delivery.count, (delivery.last_at - delivery.first_at).total_seconds()) == (4, 4)


@pytest.mark.parametrize("where", ["done", "in flight", "pending"])
@pytest.mark.parametrize("by", ["all", "ids", "key", "limit"])
async def test_a_letter_of_an_older_version_is_not_redriven(
    face: Any, clock: Clock, conserved: Any, where: str, by: str
) -> None:
    topic = face.topic("t", dedup_retention="1h")
    # Given a dead letter, a newer version of its key, and the letter of another key
    await topic.trigger("k", "old", version=1)
    await topic.trigger("other", "other", version=1)
    await _bury(topic)
    clock.advance("1s")
    await topic.trigger("k", "new", version=2)
    running = await topic.take(1) if where != "pending" else []
    if where == "done":
        await topic.ack(running)
    # When all letters are redriven
    letters = await topic.dead.list()
    selection: dict[str, Any] = {
        "all": {}, "ids": {"ids": [letter.id for letter in letters]}, "key": {"key": "*"}, "limit": {"limit": 2}
    }[by]  # fmt: skip
    assert await topic.dead.redrive(**selection) == 1
    # Then the older version is dropped, as its trigger would be, and counted
    assert sorted(one.payload for one in await topic.take(10)) == ["new", "other"] if where == "pending" else ["other"]
    stats = await topic.stats()
    assert (stats["outdated"], stats["deleted"], stats["deleted_triggers"], stats["redriven"]) == (1, 1, 1, 1)
    assert stats.dead == 0
    await conserved(topic, ["k", "other"])


@pytest.mark.parametrize("version", [None, 2])
async def test_a_letter_of_the_newest_version_is_redriven(face: Any, clock: Clock, version: int | None) -> None:
    topic = face.topic("t", dedup_retention="1h")
    await topic.trigger("k", "old", version=2)
    await _bury(topic)
    # Given a trigger of the same version, or none
    assert (await topic.trigger("k", "new", version=version)).status == "scheduled"
    # When the letter is redriven, then it is the older one, also within a millisecond
    assert await topic.dead.redrive() == 1
    assert [(one.payload, one.count, one.version) for one in await topic.take(2)] == [("new", 2, 2)]
    # And once the version is forgotten, that of a letter counts no more
    await topic.trigger("j", "old", version=1)
    await _bury(topic)
    await topic.trigger("j", "new", version=2)
    await topic.ack(await topic.take(1))
    clock.advance("1h")
    assert await topic.dead.redrive() == 1


async def test_a_redriven_letter_leaves_the_time_that_a_caller_set(face: Any, clock: Clock) -> None:
    topic = face.topic("t", merge="append")
    await topic.trigger("k", "old")
    await _bury(topic)
    # Given a pending message whose caller set its time
    await topic.trigger("k", "new", delay="1h")
    # When the letter joins it, then that time stands, and workers get no hint of an earlier one
    assert await topic.dead.redrive() == 1
    assert (await topic.next_due(), await topic.take(1)) == (clock.now() + timedelta(hours=1), [])
    clock.advance("1h")
    assert [one.payload for one in await topic.take(1)] == [["old", "new"]]


async def test_old_letters_are_discarded_and_counted(face: Any, clock: Clock, conserved: Any) -> None:
    topic = face.topic("t", dead_retention="7d", merge="count")
    # Given letters of 150 keys, of two triggers each, and a week
    await topic.trigger_many([(n, n) for n in range(150)] * 2)
    await _bury(topic)
    clock.advance("7d")
    # When further ones are buried, each call discards at most a hundred of the old
    await topic.trigger("new-1")
    await _bury(topic)
    assert ((await topic.stats()).dead, (await topic.stats())["expired"]) == (51, 100)
    await topic.trigger("new-2")
    await _bury(topic)
    # Then the old are gone, and are counted
    stats = await topic.stats()
    assert (stats.dead, stats["expired"], stats["expired_triggers"]) == (2, 150, 300)
    assert {letter.key for letter in await topic.dead.list()} == {"new-1", "new-2"}
    await conserved(topic, [])


async def test_beyond_the_cap_the_oldest_are_discarded_and_counted(face: Any, clock: Clock, conserved: Any) -> None:
    topic = face.topic("t", max_dead_letters=3)
    for n in range(5):
        await topic.trigger_many([(n, 1), (n, 2)])
        await _bury(topic)
        clock.advance("1s")
    stats = await topic.stats()
    assert (stats.dead, stats["expired"], stats["expired_triggers"]) == (3, 2, 4)
    assert [letter.key for letter in await topic.dead.list()] == ["4", "3", "2"]
    await conserved(topic, [])


async def test_what_dies_of_lapsed_leases_is_capped_too(face: Any, clock: Clock, conserved: Any) -> None:
    topic = face.topic("t", max_dead_letters=1, max_attempts=1, lease="30s")
    await topic.trigger_many([(n, n) for n in range(3)])
    assert len(await topic.take(10)) == 3
    clock.advance("30s")
    assert await topic.take(10) == []
    stats = await topic.stats()
    assert (stats.dead, stats["buried"], stats["expired"]) == (1, 3, 2)
    await conserved(topic, [])


async def test_the_cap_holds_in_a_call_that_also_discards_by_age(face: Any, clock: Clock, conserved: Any) -> None:
    # Given a dead letter past its retention
    topic = face.topic("t", max_dead_letters=2, dead_retention="60s")
    await topic.trigger("old")
    await _bury(topic)
    clock.advance("61s")
    # When one call buries more than the cap
    await topic.trigger_many([(n, n) for n in range(3)])
    await _bury(topic)
    # Then the old one and the ones beyond the cap are discarded
    stats = await topic.stats()
    assert (stats.dead, stats["expired"]) == (2, 2)
    await conserved(topic, [])


async def test_a_lower_cap_is_reached(face: Any, url: str, namespace: str, clock: Clock) -> None:
    topic = face.topic("t")
    await topic.trigger_many([(n, n) for n in range(20)])
    await _bury(topic)
    # When a program with a lower cap buries one
    with Gate(url, namespace=namespace, clock=clock) as other:
        lower = other.topic("t", max_dead_letters=5)
        lower.trigger("k")
        lower.bury(lower.take(1))
    # Then no more than that are left
    assert (await topic.stats()).dead == 5


async def test_a_letter_that_is_read_twice_is_equal(face: Any) -> None:
    topic = face.topic("t")
    for key in ("a", "b"):
        await topic.trigger(key, key)
        await _bury(topic)
    first, again = [await topic.dead.list() for _ in range(2)]
    assert first == again
    assert first[0] != first[1]
    assert len({*first, *again}) == 2


# -- by what they have in common --------------------------------------------------------------------------------------


async def _some_dead(topic: Any, clock: Clock) -> list[Any]:
    """Twelve letters, one a second, of many slots: order-0, mail-1, order-2 ...; every third one timed out."""
    died = []
    for n in range(12):
        await topic.trigger(f"{'mail' if n % 2 else 'order'}-{n}", n)
        died.append(clock.now())
        await _bury(topic, reason="TimeoutError: no answer" if n % 3 == 0 else "KeyError: 'id'")
        clock.advance("1s")
    return died


FILTERS: list[tuple[dict[str, Any], list[int]]] = [
    ({"key": "order-*"}, [0, 2, 4, 6, 8, 10]),
    ({"key": "*-1?"}, [10, 11]),
    ({"key": "order-4"}, [4]),
    ({"key": "ORDER-*"}, []),
    ({"reason": "Timeout"}, [0, 3, 6, 9]),
    ({"reason": "KeyError", "key": "mail-[15]"}, [1, 5]),
    ({"since": 3}, [3, 4, 5, 6, 7, 8, 9, 10, 11]),
    ({"until": 3}, [0, 1, 2]),
    ({"since": 3, "until": 6, "key": "mail-*"}, [3, 5]),
    ({"since": 6, "until": 3}, []),
    ({"limit": 2}, [10, 11]),
    ({"limit": 0}, []),
    ({"key": "order-*", "limit": 2}, [8, 10]),
]


@pytest.mark.parametrize("verb", ["redrive", "delete"])
@pytest.mark.parametrize(("wanted", "expected"), FILTERS, ids=lambda value: str(value))
async def test_letters_are_chosen_by_what_they_have_in_common(
    face: Any, clock: Clock, conserved: Any, verb: str, wanted: dict[str, Any], expected: list[int]
) -> None:
    topic = face.topic("t", slots=4)
    died = await _some_dead(topic, clock)
    wanted = {name: died[value] if name in ("since", "until") else value for name, value in wanted.items()}
    # When they are listed, then those are shown, newest first
    limit = {"n": wanted["limit"]} if "limit" in wanted else {}
    shown = {name: value for name, value in wanted.items() if name != "limit"}
    assert [letter.payload for letter in await topic.dead.list(**limit, **shown)] == expected[::-1]
    # When they are sent back or deleted, it is those and no others
    assert await getattr(topic.dead, verb)(**wanted) == len(expected)
    assert {letter.payload for letter in await topic.dead.list()} == set(range(12)) - set(expected)
    redriven = await topic.take(100)
    assert sorted(one.payload for one in redriven) == (expected if verb == "redrive" else [])
    assert {(one.attempt, one.reason) for one in redriven} <= {(1, "redrive")}
    await conserved(topic, [f"{kind}-{n}" for kind in ("mail", "order") for n in range(12)])
    # And a second time there is nothing to move
    assert await getattr(topic.dead, verb)(**wanted | ({"limit": 0} if "limit" in wanted else {})) == 0


async def test_a_filter_goes_through_many_pages(face: Any, clock: Clock) -> None:
    topic = face.topic("t", slots=2)
    # Given more letters than one call shows, most of which died in the same millisecond
    await topic.trigger_many([(n, n) for n in range(700)])
    await _bury(topic, 700)
    clock.advance("1ms")
    await topic.trigger_many([(n, n) for n in range(700, 720)])
    await _bury(topic, 20)
    # When those whose key ends in 7 are listed, page by page, and sent back
    listed = [letter.payload for skip in (0, 40) for letter in await topic.dead.list(40, skip=skip, key="*7")]
    assert sorted(listed) == list(range(7, 720, 10))
    assert await topic.dead.redrive(key="*7") == 72
    # Then the others are left
    assert (await topic.stats()).dead == 648
    assert sorted(one.payload for one in await topic.take(100)) == list(range(7, 720, 10))
    assert await topic.dead.delete(key="*1*", limit=10) == 10


async def _trips(topic: Any, raw: Any, **wanted: Any) -> tuple[int, list[str]]:
    """List letters. Return how many calls it took, and the keys."""
    before = raw.info("commandstats").get("cmdstat_evalsha", {"calls": 0})["calls"]
    found = [letter.key for letter in await topic.dead.list(**wanted)]
    return raw.info("commandstats")["cmdstat_evalsha"]["calls"] - before, found


async def test_a_call_examines_many_letters_and_returns_those_that_may_match(face: Any, raw: Any) -> None:
    # Given 2,000 letters of one millisecond
    topic = face.topic("t", max_dead_letters=2000)
    await topic.trigger_many([(f"order-{n}", n) for n in range(2000)])
    await _bury(topic)
    await _bury(topic)
    # When letters are listed by key or by reason
    # Then a call examines 200 of them, and stops when it has enough
    assert await _trips(topic, raw, key="order-7") == (10, ["order-7"])
    assert (await _trips(topic, raw, key="order-77*"))[0] == 10
    assert await _trips(topic, raw, reason="nothing of the kind") == (10, [])
    assert (await _trips(topic, raw, n=20, key="order-*"))[0] == 1
    assert (await _trips(topic, raw, n=2000))[0] == 40


@pytest.mark.parametrize(
    ("pattern", "matching"),
    [
        ("a", ["a"]), ("a*", ["a", "a*b", "ab", "aé", "a\\xffb", b"a\xffb"]), ("a?", ["ab", "aé"]), ("a[*]b", ["a*b"]),
        ("aé", ["aé"]), ("*b", ["a*b", "ab", "a\\xffb", b"a\xffb"]), ("a\\xffb", ["a\\xffb", b"a\xffb"]),
        ("[!a]", ["é"]), ("\ud800*", []), ("A", []),
    ],
)  # fmt: skip
async def test_patterns_of_keys_match_as_in_the_shell(face: Any, pattern: str, matching: list[str | bytes]) -> None:
    topic, keys = face.topic("t"), ["a", "a*b", "ab", "aé", "é", "a\\xffb", b"a\xffb"]
    await topic.trigger_many([(key, None) for key in keys])
    await _bury(topic)
    found = [letter.key for letter in await topic.dead.list(key=pattern)]
    shown = [key if isinstance(key, str) else key.decode(errors="backslashreplace") for key in matching]
    assert sorted(found) == sorted(shown)
    assert await topic.dead.delete(key=pattern) == len(shown)


async def test_parts_of_reasons_match_whatever_their_bytes_were(face: Any, raw: Any, namespace: str) -> None:
    # Given a letter whose reason is no UTF-8
    topic = face.topic("t")
    await topic.trigger("k", None)
    await topic.bury(await topic.take(), reason="broken é")
    part = f"ig2:{{{namespace}:topic:t:0/1}}:dead:data"
    (number,) = raw.hkeys(part)
    raw.hset(part, number, raw.hget(part, number).replace("é".encode(), b"\xff\xfe"))
    # Then it is found by what is shown of it
    for reason in ("broken", "n \ufffd", "\ufffd"):
        assert [letter.reason for letter in await topic.dead.list(reason=reason)] == ["broken \ufffd\ufffd"]
    assert await topic.dead.list(reason="é") == []


async def test_a_page_goes_on_behind_letters_of_its_millisecond_that_were_deleted(face: Any) -> None:
    # Given letters of one millisecond, and a page of the newest
    topic = face.topic("t")
    await topic.trigger_many([(f"k{n:02}", n) for n in range(30)])
    await _bury(topic)
    link, calls = face.gate.context.link, await topic.open()
    page, rest = link.run(calls.dead(0, DeadFilter(), 10)), []
    # When the letter at its end is deleted, and some around it
    ids = [letter.id for letter in page.letters]
    assert await topic.dead.delete(ids[-3:]) == 3
    while page.next is not None:
        page = link.run(calls.dead(0, DeadFilter(), 7, page.next))
        rest += [letter.id for letter in page.letters]
    # Then the others follow, each once
    assert rest == [letter.id for letter in await topic.dead.list()][7:]
    assert len(rest) == 20


async def test_large_letters_come_in_smaller_pages(face: Any) -> None:
    topic = face.topic("t")
    await topic.trigger_many([(n, b"x" * 50_000) for n in range(30)])
    await _bury(topic)
    # Given that one page is at most 128 KiB
    page = face.gate.context.link.run((await topic.open()).dead(0, DeadFilter(), 100))
    assert (len(page.letters), page.next is None) == (2, False)
    # Then all of them are found all the same
    assert len(await topic.dead.list()) == 30
    assert await topic.dead.redrive() == 30
    await _bury(topic)
    assert await topic.dead.delete(key="*") == 30


@pytest.mark.parametrize("verb", ["delete", "redrive"])
async def test_letters_that_die_between_two_pages_stay_dead(
    face: Any, url: str, namespace: str, clock: Clock, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    # Given more letters than one call moves
    topic, build, built = face.topic("t"), TopicCalls.take_dead, []
    await topic.trigger_many([(n, n) for n in range(53)])
    await _bury(topic)

    def bury_others(calls: TopicCalls, *args: Any) -> Any:
        if built:
            clock.advance("1s")
            with Gate(url, namespace=namespace, clock=clock) as other:
                failing = other.topic("t")
                failing.trigger_many([(f"late-{n}", n) for n in range(10)])
                failing.bury(failing.take(100))
        built.append(args)
        return build(calls, *args)

    # When others die after the first page
    monkeypatch.setattr(TopicCalls, "take_dead", bury_others)
    moved = await getattr(topic.dead, verb)()
    # Then only those that were there at first have moved
    assert (moved, len(built)) == (53, 2)
    letters = {letter.key for letter in await topic.dead.list(100)}
    assert letters >= {f"late-{n}" for n in range(10)}


@pytest.mark.parametrize("wanted", [{}, {"key": "*"}])
async def test_what_dies_again_meanwhile_is_not_sent_back_for_ever(
    face: Any, url: str, namespace: str, clock: Clock, wanted: dict[str, Any]
) -> None:
    topic = face.topic("t")
    await topic.trigger_many([(n, n) for n in range(450)])
    await _bury(topic)
    clock.advance("1s")
    over = threading.Event()

    def fail_all() -> None:
        with Gate(url, namespace=namespace, clock=clock) as other:
            failing = other.topic("t")
            while not over.is_set():
                failing.bury(failing.take(1000), reason="again")

    # Given a worker that buries each delivery at once
    thread = threading.Thread(target=fail_all)
    thread.start()
    try:
        # When all letters are sent back, then that ends: each of those that were there is sent once
        assert await topic.dead.redrive(**wanted) in range(450, 550)
    finally:
        over.set()
        thread.join()


@for_each(
    ("wanted", "said"),
    [
        ({"key": ""}, "key=''"),
        ({"key": 7}, "key=7"),
        ({"reason": ""}, "reason=''"),
        ({"since": 7}, "since=7"),
        ({"until": datetime(2024, 5, 1)}, "until=.*naive"),  # noqa: DTZ001
        ({"limit": -1}, "limit=-1"),
        ({"limit": True}, "limit=True"),
        ({"ids": ["0-1"], "key": "a"}, "ids=.*ids cannot be combined"),
        ({"ids": ["0-1"], "limit": 1}, "ids=.*ids cannot be combined"),
    ],
)
async def test_a_choice_that_makes_no_sense_is_refused(
    face: Any, everything: Any, wanted: dict[str, Any], said: str
) -> None:
    topic = face.topic("t")
    await topic.trigger("k")
    await _bury(topic)
    before = everything()
    for verb in (topic.dead.redrive, topic.dead.delete):
        with pytest.raises(InvalidArgument, match=said):
            await verb(**wanted)
    for bad in ({"n": -1}, {"skip": -1}):
        with pytest.raises(InvalidArgument, match="-1"):
            await topic.dead.list(**bad)
    assert everything() == before


async def test_a_redriven_letter_does_not_put_off_what_was_flushed(face: Any) -> None:
    # Given a dead letter, and a pending message of its key whose time was named, and which was flushed since
    topic = face.topic("t")
    await topic.trigger("k")
    await topic.bury(await topic.take(1))
    await topic.trigger("k", delay="1h")
    assert await topic.flush() == 1
    # When the letter is redriven
    assert await topic.dead.redrive() == 1
    # Then both are due
    (both,) = await topic.take(1)
    assert both.count == 2


@pytest.mark.parametrize("how", ["lapse", "nack", "defer", "part"])
async def test_a_redriven_letter_does_not_wait_for_a_retry_that_nobody_named(face: Any, clock: Clock, how: str) -> None:
    # Given a dead letter, and a message of its key whose time was named once, but which is to be tried again since
    topic = face.topic("t", lease="30s", merge="append")
    await topic.trigger("k")
    await topic.bury(await topic.take(1))
    await topic.trigger("k", delay=0)
    (delivery,) = await topic.take(1)
    if how == "lapse":
        clock.advance("30s")
        assert len(await topic.take(1)) == 1
        clock.advance("30s")
        assert await topic.take(1) == []
    elif how == "defer":
        face.gate.context.link.run((await topic.open()).settle(0, [Settlement("defer", delivery, 60_000)]))
    else:
        await topic.nack(delivery, delay="60s", items=delivery.payload if how == "part" else None)
    # When the letter is redriven
    await topic.dead.redrive()
    # Then it is due now, as every redriven letter
    (both,) = await topic.take(1)
    assert (both.count, both.reason) == (2, "redrive")


@pytest.mark.damages("undecodable")
@pytest.mark.parametrize("verb", ["redrive", "delete"])
@pytest.mark.parametrize("part", ["dead:data", "messages", "next", "inflight"])
async def test_a_letter_that_is_none_of_ours_or_would_meet_such_is_named(
    face: Any, raw: Any, everything: Any, namespace: str, part: str, verb: str
) -> None:
    # Given two letters, and with the key of the second, one of two triggers in flight and one pending behind it
    topic, name = face.topic("t"), f"ig2:{{{namespace}:topic:t:0/1}}:{part}"
    for key in "ab":
        await topic.trigger(key)
        await _bury(topic)
    await topic.trigger("b")
    await topic.trigger("b")
    assert len(await topic.take(1)) == 1
    await topic.trigger("b")
    ids = [letter.id for letter in await topic.dead.list()][::-1]
    # When what is stored of it is not as it was written
    field = "b" if part != "dead:data" else ids[1].partition("-")[2]
    assert raw.hset(name, field, "spoilt") == 0
    before = everything()
    # Then that is said, and neither letter is moved
    with pytest.raises(UnexpectedData, match=f":{part}: holds corrupt data under {field}"):
        await getattr(topic.dead, verb)(ids)
    assert everything() == before


# -- load -------------------------------------------------------------------------------------------------------------


async def test_exported_letters_are_dead_letters_again(face: Any, clock: Clock, conserved: Any) -> None:
    topic = face.topic("t", merge="append", slots=4)
    # Given letters of keys and groups, one of them of several triggers and attempts
    await topic.trigger_many([Trigger("many", n) for n in range(3)])
    await topic.nack(await topic.take(1), delay=0, reason="first")
    await topic.trigger_many([Trigger(f"k{n}", n, group=f"g{n % 3}" if n % 2 else None) for n in range(200)])
    await _bury(topic, reason="no \udcff".encode(errors="replace").decode())
    before = {one.id: one for one in await topic.dead.list(1000)}
    stored = [one.stored for one in before.values()]
    clock.advance("1h")
    # When they are deleted and loaded, then they are the same letters
    assert await topic.dead.delete() == len(before) > 60
    assert await topic.dead.load(stored) == (len(before), 0, 0, 0)
    after = {one.id: one for one in await topic.dead.list(1000)}
    assert {name: _facts(one) for name, one in after.items()} == {name: _facts(one) for name, one in before.items()}
    assert (await topic.stats())["accepted"] == 203 + sum(one.count for one in before.values())
    await conserved(topic, [f"k{n}" for n in range(200)])
    # And loaded again, they are known
    assert await topic.dead.load(iter(stored[::-1])) == (0, len(before), 0, 0)
    # And they come back
    assert await topic.dead.redrive() == len(before)
    assert await topic.dead.load(stored[:1]) == (1, 0, 0, 0)
    # Another topic with another number of slots takes them, too
    there = face.topic("there", merge="append", slots=2)
    assert await there.dead.load(stored) == (len(before), 0, 0, 0)
    assert {one.key for one in await there.dead.list(1000)} == {one.key for one in before.values()}


def _facts(letter: Any) -> Any:
    return (
        letter.key, letter.payload, letter.reason, letter.died_at, letter.attempts, letter.count, letter.first_at,
        letter.last_at, letter.message.group, letter.message.failure,
    )  # fmt: skip


async def test_an_id_that_is_taken_becomes_a_lower_one(face: Any, clock: Clock) -> None:
    topic, there = face.topic("t"), face.topic("there")
    for one in (topic, there):
        await one.trigger(one.name)
        await _bury(one)
    [letter], [held] = await topic.dead.list(), await there.dead.list()
    assert letter.id == held.id
    assert await there.dead.load([letter.stored]) == (1, 0, 0, 0)
    assert {one.key for one in await there.dead.list()} == {"t", "there"}
    # Then the letter is not known when it is loaded again
    assert await there.dead.load([letter.stored]) == (1, 0, 0, 0)


async def test_a_letter_of_a_clock_ahead_gets_an_id_of_now(face: Any, clock: Clock) -> None:
    topic = face.topic("t")
    await topic.trigger("k")
    await _bury(topic)
    [letter] = await topic.dead.list()
    clock.set(clock.now().timestamp() - 7200)
    there = face.topic("there")
    await there.open()
    assert await there.dead.load([letter.stored]) == (1, 0, 0, 0)
    [loaded] = await there.dead.list()
    assert loaded.id == f"0-{clock.microseconds()}"


async def test_letters_beyond_the_bounds_are_not_loaded(face: Any, clock: Clock) -> None:
    topic = face.topic("t", dead_retention="1h")
    await topic.trigger("old")
    await _bury(topic)
    clock.advance("30m")
    await topic.trigger_many([(n, n) for n in range(5)])
    await _bury(topic)
    stored = [one.stored for one in await topic.dead.list()]
    clock.advance("30m")
    there = face.topic("there", dead_retention="1h", max_dead_letters=3)
    await there.trigger("here")
    await _bury(there)
    # When one is past the retention and there is room for two, then the others are counted, and none is discarded
    assert await there.dead.load(stored) == (2, 0, 1, 3)
    assert (await there.stats())["expired"] == 0
    assert "here" in {one.key for one in await there.dead.list()}
    assert await there.dead.load(stored) == (0, 2, 1, 3)


@for_each("other", ["sum", "count", "min", "union", {"a": "sum"}])
async def test_a_letter_of_another_merge_policy_is_refused(face: Any, everything: Any, other: Any) -> None:
    topic = face.topic("t", merge="append")
    await topic.trigger("k", {"a": 1})
    await _bury(topic)
    letter, *_ = await topic.dead.list()
    there = face.topic("".join(filter(str.isalpha, str(other))), merge=other)
    await there.open()
    before = everything()
    with pytest.raises(InvalidArgument, match=r"letters\[0\]=.*DeadLetter.stored.*same merge policy"):
        await there.dead.load([letter.stored])
    assert everything() == before


@for_each(
    "bad",
    [
        b"", b"\xc0", b"letter", 7, "text", pack([b"k", b"", b"no", 1, 9]), pack([b"", MESSAGE, b"no", 1, 9]),
        pack([b"k", MESSAGE, b"no", -1, 9]), pack([b"k", MESSAGE, b"no", 1, 0]), pack([b"k", MESSAGE, b"no", 1, 2**53]),
        pack([b"k", MESSAGE, b"no", 1, b"9"]), pack([b"k", MESSAGE, 5, 1, 9]), pack([b"k", MESSAGE, b"no", 1]),
        pack([b"k", MESSAGE[:40], b"no", 1, 9]), pack([b"k", pack_message(b"\x01", count=0), b"no", 1, 9]),
    ],
)  # fmt: skip
async def test_what_is_no_letter_is_refused_before_anything_is_written(face: Any, everything: Any, bad: Any) -> None:
    topic = face.topic("t", merge="append")
    await topic.trigger("k")
    await _bury(topic)
    letter, *_ = await topic.dead.list()
    before = everything()
    with pytest.raises(InvalidArgument, match=r"letters\[1\]=.*DeadLetter.stored"):
        await topic.dead.load([letter.stored, bad])
    assert everything() == before
