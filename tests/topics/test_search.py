"""No interleaving of a small scope breaks a promise, and the search finds each fault that is put into the scripts.

`IDEMGATE_DEPTH=10 pytest tests/topics/test_search.py -s` looks further.
"""

from __future__ import annotations

from typing import Any

import pytest

from idemgate import Gate
from tests.exhaustive import broken, choose_depth
from tests.topics.search import SCOPES, Search, Violation

DEPTH = choose_depth(6, 7, 9)  # one more takes about three times as long


@pytest.mark.timeout(7200)
@DEPTH
@pytest.mark.parametrize("scope", SCOPES)
def test_no_interleaving_breaks_a_promise(raw: Any, gate: Gate, scope: str, depth: int, record_fault: Any) -> None:
    states = Search(raw, gate, SCOPES[scope], {}).run(depth)
    print(f"{scope}: {states:,} states within {depth} steps")
    assert states > 400
    record_fault(
        "every order of steps of a topic, with late copies (N: states)",
        states,
        promises="P4 P5 P6 P7 P9 P10 P11 P13 P15",
        exhaustive=True,
        steps=f"{depth}",
    )


@DEPTH
def test_no_interleaving_breaks_a_promise_in_a_crowded_millisecond(raw: Any, gate: Gate, depth: int) -> None:
    # Given a script that takes two messages of a millisecond for more than it can order
    crowded = broken("topics/take", {"local most_ordered = 128": "local most_ordered = 1"})
    # Then no order of steps breaks a promise
    assert Search(raw, gate, SCOPES["one group"], crowded).run(depth) > 400


FAULTS: dict[str, tuple[str, str, str, str]] = {
    "an ending needs no token": (
        "one key", "topics/settle", "elseif not entry or (d and d.token or entry) ~= tokens[i] then",
        "elseif not entry then"),
    "a plain ack needs no token": (
        "one key", "topics/settle", "if token ~= tokens[i] or seen[key] then", "if not token or seen[key] then"),
    "a key in flight is scheduled": (
        "one key", "topics/trigger",
        "if score and not in_flight[key] then", "if score then"),
    "a take is not remembered": ("one key", "topics/take", "elseif known_reply then", "elseif false then"),
    "a trigger is not remembered": ("one key", "topics/trigger", "if known_reply then", "if false then"),
    "what is behind is forgotten": (
        "one key", "topics/settle", 'redis.call("HSET", K.messages, unpack(messages))', ""),
    "what was cancelled is tried again": (
        "one key", "topics/settle", 'if d.cancelled and verb ~= "bury" then', "if false then"),
    "attempts are not counted": (
        "one key", "topics/settle", "m.attempts = m.attempts + 1\n", "\n"),
    "what lapses is lost": (
        "one key", "topics/take",
        'add_count("folded", requeue(K, p, key, m, retry_time(key, entry.token, m), reason.retry))', ""),
    "tokens do not rise": ("one key", "topics/take", "fence(last, now_us)", "now_us"),
    "what is cancelled stays scheduled": (
        "one key", "topics/cancel", "unschedule(K, key, m)\n  redis.call", "redis.call"),
    "leases lapse at once": (
        "one key", "topics/take", 'redis.call("ZRANGEBYSCORE", K.leases, "-inf", now_ms,',
        'redis.call("ZRANGEBYSCORE", K.leases, "-inf", "+inf",'),
    "a redriven letter stays": ("one key", "topics/take_dead", 'redis.call("HDEL", K.dead_data, id)', ""),
    "a group is never full": ("one group", "topics/take", "n >= p.group_limit then", "false then"),
    "an ending keeps its group": ("one group", "topics/settle", "group_leave(K, one[1], one[2], p.group_limit)", ""),
    "what was not heard of is not taken again": (
        "lost replies", "topics/take", "if d and flags and d.token == token then", "if false then"),
    "what was not heard of ends twice": (
        "lost replies", "topics/settle", "= recall_reply(K, ARGV[2], now_ms)", "= nil"),
    "a turn ends anew what it ended": (
        "turns", "topics/settle_and_take", "= recall_reply(K, ARGV[2], now_ms)", "= nil"),
    "a copy of a turn takes more": (
        "turns", "topics/settle_and_take", "(not known_reply or recall_reply(K, ARGV[5], now_ms))", "true"),
    "a turn ends what is another's": (
        "turns", "topics/settle_and_take", "elseif not entry or (d and d.token or entry) ~= tokens[i] then",
        "elseif not entry then"),
    "a turn takes beside what it has not let go": (
        "turns", "topics/settle_and_take", "group_leave(K, one[1], one[2], p.group_limit)", ""),
    "what is buried is tried again": (
        "dead letters", "topics/settle", 'if verb == "bury" or is_exhausted(p, m) then', "if false then"),
    "what is redriven is at its end": ("dead letters", "topics/take_dead", "m.attempts, m.pinned = 0, 0", ""),
    "what is deleted stays": ("dead letters", "topics/take_dead", 'redis.call("HDEL", K.dead_data, id)', ""),
    "what is deleted is not counted": ("dead letters", "topics/take_dead", "deleted_triggers = triggers", ""),
    "redriving does not know its copies": (
        "dead letters", "topics/take_dead", "and recall_reply(K, request, now_ms)", "and nil"),
    "what is given back was tried": ("times", "topics/settle", 'elseif verb == "return" then', "elseif false then"),
    "anybody extends": ("times", "topics/extend", "if d and d.token == tokens[i] then", "if d then"),
    "a heartbeat holds nothing": ("times", "topics/extend", 'redis.call("ZADD", K.leases, unpack(ends))', ""),
    "another time is not gone by": ("times", "topics/reschedule", "if stood then", "if false then"),
    "another time is not a caller's": (
        "times", "topics/reschedule", "m.due, m.why, m.pinned = due, reason.time, 1",
        "m.due, m.why, m.pinned = due, reason.time, 0"),
    "rescheduling does not know its copies": (
        "times", "topics/reschedule", "and recall_reply(K, request, now_ms)", "and nil"),
    "what is cancelled in flight goes on": (
        "times", "topics/cancel", "d.due or running.due, true,", "d.due or running.due, false,"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.slow
def test_a_fault_in_a_script_is_found(raw: Any, gate: Gate, fault: str) -> None:
    scope, name, before, after = FAULTS[fault]
    with pytest.raises(Violation) as found:
        Search(raw, gate, SCOPES[scope], broken(name, {before: after})).run(9)
    print(found.value)
    Search(raw, gate, SCOPES[scope], {}).follow(found.value.path)  # as it is, the script breaks nothing there
